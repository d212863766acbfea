"""Writing the files of chunks of a zarr store to where files are written from their first byte to their last: URLs.

A task has all bytes of its files (`partition`), and they come row by row. So a file is begun when its first byte comes,
and ended with its last one; only those that some rows meet are open at a time. In a shard, whose chunks are one after
the other, bytes of a later chunk wait in memory until those before them have come. Compressed chunks do so anyway
(`formats.zarr_chunks.EncodingWriter`).

Nothing is lost where bytes come that are not of a tensor: the rest of a chunk at the edge is zeros, and what stands
behind the contents is the index of a shard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.errors import TargetError
from reshard.run.mover import Moved, move_pieces
from reshard.storage.cipher import store_of
from reshard.storage.places import store_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from reshard.formats.entries import FileLayout
    from reshard.plan.plan import Plan
    from reshard.storage.local import Stream

_ZEROS = bytes(1 << 20)


class Streams:
    """Files that are begun with their first byte, and written in order."""

    def __init__(self, sizes: dict[str, int], *, sync: bool) -> None:
        self._sizes, self._sync = sizes, sync
        self._open: dict[str, tuple[Stream, int]] = {}

    def write_at(self, path: str, offset: int, buffer: memoryview | bytes) -> None:
        """Write what comes next in a file."""
        if path not in self._open:
            self._open[path] = store_at(path).stream(path, self._sizes[path]), 0
        stream, position = self._open[path]
        assert offset == position, "a file is written in order"  # noqa: S101
        stream.write(buffer)
        self._open[path] = stream, position + len(buffer)

    def cut(self, path: str, size: int) -> None:
        """End a file, which has this size."""
        stream, position = self._open.pop(path)
        assert position == size, "a file is ended with its last byte"  # noqa: S101
        stream.finish(sync=self._sync)

    def abort(self) -> None:
        """Give up what is not ended."""
        for stream, _ in self._open.values():
            stream.abort()


class _File:
    """A file of plain chunks: how far it is, what waits for its turn, and what stands between the contents."""

    def __init__(self, layout: FileLayout, spans: Iterable[tuple[int, int]]) -> None:
        self.size = layout.size
        self.position = 0
        self.waiting: dict[int, bytes] = {}
        self.own: dict[int, bytes | int] = dict(layout.literals)  # or so many zeros
        end = 0
        for start, nbytes in sorted([*spans, *((offset, len(content)) for offset, content in layout.literals)]):
            if start > end:
                self.own[end] = start - end
            end = start + nbytes
        if self.size > end:
            self.own[end] = self.size - end


class ChunkWriter:
    """Takes the contents of files of plain chunks in any order, and appends them to the files in theirs."""

    def __init__(self, files: dict[str, _File], streams: Streams) -> None:
        self._files, self._streams = files, streams

    def write_at(self, path: str, offset: int, buffer: memoryview) -> None:
        """Write contents, or have them wait."""
        file = self._files[path]
        if offset != file.position:
            file.waiting[offset] = bytes(buffer)
            return
        self._append(path, file, buffer)
        while file.position < file.size:
            if file.position in file.waiting:
                self._append(path, file, file.waiting.pop(file.position))
            elif file.position in file.own:
                own = file.own.pop(file.position)
                if isinstance(own, bytes):
                    self._append(path, file, own)
                else:
                    self._append_zeros(path, file, own)
            else:
                return
        self._streams.cut(path, file.size)
        del self._files[path]

    def _append(self, path: str, file: _File, content: memoryview | bytes) -> None:
        self._streams.write_at(path, file.position, content)
        file.position += len(content)

    def _append_zeros(self, path: str, file: _File, nbytes: int) -> None:
        for begin in range(0, nbytes, len(_ZEROS)):
            self._append(path, file, memoryview(_ZEROS)[: nbytes - begin])

    def close(self) -> None:
        """See that every file is whole.

        Raises:
            TargetError: one is not.
        """
        if self._files:
            raise TargetError(f"{next(iter(self._files))}: not all of it came; a fault of reshard")


def write_chunks(plan: Plan, number: int, directory: str, *, sync: bool, go_on: Callable[[], object]) -> Moved:
    """Write the files of chunks of one task; none is left unfinished where that fails.

    Args:
        plan: of a zarr store, by file.
        number: of the task.
        directory: where the store is.
        sync: have the files on the disk.
        go_on: see `move_pieces`.

    Raises:
        SourceError: a source file ends early or cannot be read.
        TargetError: a target file cannot be written.
    """
    paths = {n: f"{directory}/{plan.files[n].path}" for n in plan.groups[number]}
    streams = Streams({path: plan.files[n].layout.size for n, path in paths.items()}, sync=sync)
    try:
        if plan.coding:
            writer = plan.coding.writer(directory, streams)
        else:
            spans = _spans(plan, number)
            writer = ChunkWriter({path: _File(plan.files[n].layout, spans[n]) for n, path in paths.items()}, streams)
        store = store_of(plan.source.coding)
        moved = move_pieces(plan, plan.tasks[number], directory, store, writer, in_order=True, go_on=go_on)
        writer.close()
    except BaseException:
        streams.abort()
        raise
    return moved


def _spans(plan: Plan, number: int) -> dict[int, list[tuple[int, int]]]:
    """Return what comes for each file of a task: where in the file, and how many bytes."""
    found: dict[int, list[tuple[int, int]]] = {n: [] for n in plan.groups[number]}
    for file in found:
        for content in plan.files[file].layout.contents:
            found[file] += content.runs
    return found
