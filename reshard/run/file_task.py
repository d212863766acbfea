"""Writing a group of files side by side, each from its first byte to its last.

The moves are those of a plan by tensor; only where their bytes go is another: what stands before them in a file, its
header and the heads of its messages, is written first, and nothing is ever written twice or out of order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.run.mover import Moved, move_pieces
from reshard.storage.cipher import store_of
from reshard.storage.places import store_at

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard.formats.entries import FileLayout
    from reshard.plan.plan import Plan
    from reshard.storage.local import Stream


class _File:
    """A file that is being written: its stream, what is left of its own bytes, and how far it is."""

    def __init__(self, layout: FileLayout, path: str) -> None:
        self._size = layout.size
        self._literals = sorted(layout.literals, reverse=True)
        self._stream: Stream = store_at(path).stream(path, layout.size)
        self._position = 0

    def write(self, offset: int, content: memoryview) -> None:
        self._own_bytes()
        assert offset == self._position, "the moves of a group follow the order of its files"  # noqa: S101
        self._append(content)

    def finish(self, *, sync: bool) -> None:
        self._own_bytes()
        assert self._position == self._size, "a file's contents and its own bytes are all of it"  # noqa: S101
        self._stream.finish(sync=sync)

    def abort(self) -> None:
        self._stream.abort()

    def _own_bytes(self) -> None:
        while self._literals and self._literals[-1][0] == self._position:
            self._append(self._literals.pop()[1])

    def _append(self, content: memoryview | bytes) -> None:
        self._stream.write(content)
        self._position += len(content)


class _Files:
    """Writes into the files of the group."""

    def __init__(self, files: dict[str, _File]) -> None:
        self._files = files

    def close(self) -> None:
        """Do nothing."""

    def write_at(self, path: str, offset: int, buffer: memoryview) -> None:
        self._files[path].write(offset, buffer)


def write_files(
    plan: Plan,
    group: Sequence[int],
    directory: str,
    *,
    sync: bool,
    checksums: bool = False,
    check: Callable[[], object],
    go_on: Callable[[], object],
) -> Moved:
    """Write the files of a group; nothing of them is left where that fails.

    Args:
        plan: the plan of the group alone (`plan.partition.group_plan`).
        group: the numbers of its files.
        directory: where they go.
        sync: have them on the disk.
        checksums: sum up what is written.
        check: called before a file is complete, and so may appear; raises if it must not.
        go_on: see `move_pieces`.

    Raises:
        SourceError: a source file ends early or cannot be read.
        TargetError, BudgetError: a target file cannot be written.
    """
    files: dict[str, _File] = {}
    finished: list[str] = []
    try:
        for number in group:
            path = f"{directory}/{plan.files[number].path}"
            files[path] = _File(plan.files[number].layout, path)
        store, writer = store_of(plan.source.coding), _Files(files)
        moved = move_pieces(
            plan, plan.tasks[0], directory, store, writer, checksums=checksums, in_order=True, go_on=go_on
        )
        check()
        for path, file in files.items():
            file.finish(sync=sync)
            finished.append(path)
    except BaseException:
        for path, file in files.items():
            if path not in finished:
                file.abort()
        for path in finished:
            store_at(path).discard(path)  # it has no name yet but where files appear whole
        raise
    return moved


def write_literals(layout: FileLayout, path: str, *, sync: bool) -> None:
    """Write a file that has no contents of tensors, such as the index of a set."""
    _File(layout, path).finish(sync=sync)
