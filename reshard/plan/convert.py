"""A checkpoint in another format: the same ranks, the same files, the same tensors in each.

No strategy is needed, because nothing is cut or joined: every file is one of whole tensors. All are one plan, so that
its files get their names when all are complete.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.errors import Faults, UsageError
from reshard.formats import by_name
from reshard.formats.rank_dirs import RANK_PATTERN
from reshard.formats.sets import read_index
from reshard.formats.target_files import NamedFile
from reshard.formats.zarr_files import is_store
from reshard.plan.budget import budget
from reshard.plan.build import Item, build
from reshard.plan.destination import SameFiles
from reshard.plan.select import Selection, globs, select
from reshard.source.assemble import join_whole
from reshard.source.checkpoint import Checkpoint
from reshard.source.open import read_headers
from reshard.storage.places import as_place

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.plan.plan import Plan
    from reshard.source.checkpoint import SourceFile
    from reshard.storage.places import AnyName, Place


def plan_convert(
    path: AnyName,
    format: str,  # noqa: A002 -- the word of every such tool
    *,
    name: str | None = None,
    rank_pattern: str = RANK_PATTERN,
    suffix: str | None = None,
    drop: Iterable[str] = (),
    threads: int | None = None,
) -> Plan:
    """Plan how every file of a checkpoint is written again in another format.

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
    path = as_place(path)
    kind = "zarr store" if is_store(path) else "unified set" if path.is_dir() and read_index(path) else None
    if kind:
        raise UsageError(f"{path}: is a {kind}; `reshard transform` makes one file of it, in either format")
    files, ranks, notices = read_headers(path, rank_pattern=rank_pattern, suffix=suffix)
    if name is not None:
        NamedFile(name).volumes([], "")  # refuses what is not a name
    extension = by_name(format).EXTENSION
    return plan_files(
        Checkpoint(str(path), {}, files, ranks, notices=tuple(notices)),
        [name or f"{_below(path, file)}{extension}" for file in files],
        format,
        selections=[Selection(drop=globs(drop))] * len(files),
        threads=threads,
    )


def plan_files(
    source: Checkpoint,
    paths: Sequence[str],
    format: str,  # noqa: A002 -- as above
    *,
    selections: Sequence[Selection],
    threads: int | None = None,
) -> Plan:
    """Plan how each of some files is written again in another format, as one of whole tensors wherever it lies.

    Args:
        source: the files; it needs no tensors.
        paths: what each becomes, below the target directory.
        format: `safetensors` or `ckpt`.
        selections: which tensors of each, and under which names.
        threads: the most threads that a run may have.

    Raises:
        SourceError: entries cannot be converted that a selection does not drop.
        UsageError: two tensors of a file would have one name, or a dtype does not exist in the format.
    """
    items: list[list[Item]] = []
    dropped: dict[str, None] = {}
    for number, (file, selection) in enumerate(zip(source.files, selections, strict=True)):
        tensors = join_whole(file.path, source.files, source.ranks, [number])
        one = Checkpoint(file.path, tensors, (file,), (0,), unreadable=dict(file.index.unreadable))
        selected = select(one, None, selection)
        items.append([Item(new, tensors[old], tensors[old].spec.dtype) for old, new in selected.kept])
        dropped.update(dict.fromkeys(selected.dropped))
    destination = SameFiles(source, items, paths, by_name(format))
    every = [item for some in items for item in some]
    limit = budget(source, every, destination, threads=threads)
    made = build(source, every, destination, limit, Faults(source.root))
    return replace(made, dropped=tuple(dropped), notices=source.notices)


def _below(path: Place, file: SourceFile) -> str:
    """Return a file's place below the directory, without the extension."""
    place = file.path.removeprefix(f"{path.absolute()}/")
    stem, dot, extension = place.rpartition(".")
    return stem if dot and "/" not in extension else place
