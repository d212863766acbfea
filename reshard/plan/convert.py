"""A checkpoint in another format: the same ranks, the same files, the same tensors in each.

No strategy is needed, because nothing is cut or joined. Every file is planned alone, as one of whole tensors, and the
plans are joined into one, so that a run of it is one run: its files get their names when all are complete.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.errors import UsageError
from reshard.formats import by_name
from reshard.formats.rank_dirs import RANK_PATTERN
from reshard.formats.sets import read_index
from reshard.formats.target_files import NamedFile
from reshard.formats.zarr_files import is_store
from reshard.plan.build import TENSOR_BYTES, thread_bytes
from reshard.plan.make import plan
from reshard.plan.plan import Plan, Stats
from reshard.plan.select import Selection, globs
from reshard.source.assemble import join
from reshard.source.checkpoint import Checkpoint
from reshard.source.open import read_headers
from reshard.storage.remote import is_url
from reshard.storage.remote_store import LIBRARY_BYTES, fetched_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.formats.rank_dirs import AnyPath
    from reshard.plan.plan import Move, Piece
    from reshard.source.checkpoint import SourceFile


def plan_convert(
    path: AnyPath,
    format: str,  # noqa: A002 -- the word of every such tool
    *,
    name: str | None = None,
    rank_pattern: str = RANK_PATTERN,
    suffix: str | None = None,
    drop: Iterable[str] = (),
    threads: int | None = None,
) -> Plan:
    """Plan how every file of a checkpoint is written anew in another format.

    A file keeps its place below the directory and its name, but for the extension.

    Args:
        path: a directory of rank directories, or one file.
        format: `safetensors` or `ckpt`.
        name: what the target file is called, where the source is one file.
        rank_pattern: where a rank's files are below the directory.
        suffix: take the files whose names end so, where a rank has several.
        drop: globs of entries to leave out because they cannot be converted.
        threads: the most threads that a run may have.

    Returns:
        a plan to be run. It has no arrays of ranks: which tensors are parts of one is not known.

    Raises:
        SourceError: no files, or files that are not sound.
        UsageError: a unified set, whose index goes by the names of its files.
    """
    kind = "zarr store" if is_store(path) else "unified set" if path.is_dir() and read_index(path) else None
    if kind:
        raise UsageError(f"{path}: is a {kind}; `reshard transform` makes one file of it, in either format")
    files, ranks, notices = read_headers(path, rank_pattern=rank_pattern, suffix=suffix)
    selection = Selection(drop=globs(drop))
    extension = by_name(format).EXTENSION
    plans = []
    for file, rank in zip(files, ranks, strict=True):
        target = name or f"{_below(path, file)}{extension}"
        alone = Checkpoint(
            file.path, join(file.path, (file,), (0,), None, partial=False), (file,), (0,),
            unreadable=dict(file.index.unreadable),
        )  # fmt: skip
        one = plan(
            alone,
            format=format,
            files=NamedFile(target),
            selection=selection,
            remove_redundancy=file.index.deduplicated,
            threads=threads,
        )
        plans.append(replace(one, files=tuple(written._replace(rank=rank) for written in one.files)))
    return _joined(plans, Checkpoint(str(path), {}, files, ranks, notices=tuple(notices)))


def _below(path: AnyPath, file: SourceFile) -> str:
    """Return a file's place below the directory, without the extension."""
    place = file.path.removeprefix(f"{path.absolute()}/")
    stem, dot, extension = place.rpartition(".")
    return stem if dot and "/" not in extension else place


def _joined(plans: Sequence[Plan], source: Checkpoint) -> Plan:
    """Join plans of one file each; the n-th reads and writes the n-th file."""
    moves: list[Move] = []
    tasks: list[tuple[Piece, ...]] = []
    for number, one in enumerate(plans):
        first = len(moves)
        moves += [move._replace(holders=(number,), targets=((number,),)) for move in one.moves]
        tasks += [tuple(piece._replace(move=first + piece.move) for piece in task) for task in one.tasks]
    every = [one.stats for one in plans]
    largest = max(every, key=lambda stats: stats.peak_memory)
    threads, band = plans[0].threads, max(one.band_bytes for one in plans)
    more_threads = min(threads, len(tasks)) - min(threads, largest.tasks)
    remote = any(is_url(file.path) for file in source.files)
    more = more_threads * (thread_bytes(band) + (fetched_bytes(1, band) - LIBRARY_BYTES if remote else 0))
    stats = Stats(
        tensors=len({move.name for move in moves}),
        bytes_needed=sum(stats.bytes_needed for stats in every),
        bytes_read=sum(stats.bytes_read for stats in every),
        bytes_written=sum(stats.bytes_written for stats in every),
        target_bytes=sum(stats.target_bytes for stats in every),
        source_files=len(plans),
        target_files=len(plans),
        tasks=len(tasks),
        peak_memory=largest.peak_memory + TENSOR_BYTES * len(moves) + more,
    )
    return replace(
        plans[0],
        source=source,
        files=tuple(file for one in plans for file in one.files),
        moves=tuple(moves),
        tasks=tuple(tasks),
        stats=stats,
        ranks=tuple(sorted(set(source.ranks))),
        dropped=tuple(dict.fromkeys(name for one in plans for name in one.dropped)),
        texts={},
        notices=source.notices,
        request=None,
    )
