"""Checkpoints and what single ranks' files hold, in words and as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.layout.block import shape_text
from reshard.view.folding import fold, ranges_text
from reshard.view.strategies import LEGEND, layout_data
from reshard.view.words import bytes_text, count_text, printable, table_lines

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from reshard.formats.entries import Entry
    from reshard.layout.block import Shape
    from reshard.layout.layout import Layout
    from reshard.source.checkpoint import Checkpoint, Looked, Sharding, SourceFile, Tensor


def files_text(title: str, files: Sequence[SourceFile], ranks: Sequence[int]) -> str:
    """Write what files a checkpoint has, on one line."""
    formats = sorted({file.index.format for file in files})
    distinct = sorted(set(ranks))
    return (
        f"{printable(title)}: {count_text(len(files), 'file')} ({', '.join(formats)}), "
        f"{count_text(len(distinct), 'rank')} ({ranges_text(distinct)}), "
        f"{bytes_text(sum(file.nbytes for file in files))}"
    )


def checkpoint_text(checkpoint: Checkpoint, *, width: int | None = None) -> str:
    """Write a checkpoint as a table of its tensors, repeated layers folded, with sums.

    Args:
        checkpoint: what is shown.
        width: how many columns the terminal has; None for any number.
    """
    counted: dict[Sharding, str] = {}
    rows = [
        (tensor.spec.name, _kind(checkpoint, tensor, shards_text(tensor, counted)))
        for tensor in checkpoint.tensors.values()
    ]
    header = ("tensor", "count", "dtype", "shape", "bytes", "layout", "shards x replicas")
    table = [
        (
            printable(name),
            f"{count:,}",
            dtype,
            shape_text(shape),
            bytes_text(nbytes * count),
            layout,
            shards,
        )
        for name, (dtype, shape, nbytes, layout, shards), count in fold(rows)
    ]
    distinct = {file.index.header: file.index for file in checkpoint.files}  # ranks mostly share theirs
    sizes = {
        header: sum(entry.nbytes for name, entry in index.entries.items() if name not in checkpoint.left_out)
        for header, index in distinct.items()
    }
    stored = sum(sizes[file.index.header] for file in checkpoint.files)
    lines = [files_text(checkpoint.root, checkpoint.files, checkpoint.ranks), ""]
    lines += [*table_lines(header, table, width, below=2), ""]
    if checkpoint.strategy is not None:
        lines += [*LEGEND.splitlines(), ""]
    if looked := looked_text(checkpoint.looked):
        lines.append(f"sampled: {looked}")
    lines.append(
        f"{count_text(len(checkpoint), 'tensor')}, {bytes_text(checkpoint.nbytes)} in whole tensors, "
        f"{bytes_text(stored)} in the files with replicas"
    )
    for name, reason in checkpoint.unreadable.items():
        lines.append(f"not readable: {printable(name)}: {printable(reason)}")
    return "\n".join(lines)


def looked_text(looked: Looked | None) -> str | None:
    """Write how much of the contents was looked at when a checkpoint was opened; None where nothing is left to be said.

    >>> from reshard.source.checkpoint import Looked
    >>> looked_text(Looked(2, 10, 4, 1, 70))
    '2 of 10 tensors; 4 of 70 replicas, 1 of them bit for bit; verify compares all'
    >>> looked_text(Looked(10, 10, 70, 70, 70))
    'all 10 tensors; all 70 replicas, bit for bit'
    """
    if looked is None or (looked.tensors == looked.of_tensors and not looked.of_copies):
        return None
    tensors = count_text(looked.of_tensors, "tensor")
    every = "all " if looked.of_tensors > 1 else ""
    parts = [f"{every}{tensors}" if looked.tensors == looked.of_tensors else f"{looked.tensors:,} of {tensors}"]
    if looked.of_copies:
        copies = count_text(looked.of_copies, "replica")
        some = f"all {copies}" if looked.copies == looked.of_copies else f"{looked.copies:,} of {copies}"
        whole = "bit for bit" if looked.whole == looked.copies else f"{looked.whole:,} of them bit for bit"
        parts.append(f"{some}, {whole}")
    if looked.tensors < looked.of_tensors or looked.whole < looked.of_copies:
        parts.append("verify compares all")
    return "; ".join(parts)


def looked_data(looked: Looked | None) -> dict[str, int] | None:
    """Return how much of the contents was looked at, as plain data."""
    return None if looked is None else looked._asdict()


def _kind(checkpoint: Checkpoint, tensor: Tensor, shards: str) -> tuple[str, Shape, int, str, str]:
    """Return what the row of a tensor says beside its name."""
    layouts = layouts_of(checkpoint, tensor)
    if len(layouts) > 1:
        told = ", ".join(f"stage {stage}: {layout}" for stage, layout in layouts)
    else:
        told = str(layouts[0][1]) if layouts else "whole"
    if checkpoint.strategy is not None and len(checkpoint.strategy.stages) > 1 and len(layouts) == 1:
        told = f"stage {layouts[0][0]}: {told}"
    return tensor.spec.dtype.name, tensor.spec.shape, tensor.spec.nbytes, told, shards


def layouts_of(checkpoint: Checkpoint, tensor: Tensor) -> list[tuple[int, Layout]]:
    """Return the layouts of a tensor by stage; none of one that no strategy names."""
    if checkpoint.strategy is None or not tensor.listed:
        return []
    return [(placed.stage, placed.layout) for placed in checkpoint.strategy.tensors.get(tensor.spec.name, ())]


def shards_text(tensor: Tensor, known: dict[Sharding, str]) -> str:
    """Write how many blocks and how many copies of each there are; tensors share their sharding, so once for all."""
    sharding = tensor.sharding
    if sharding not in known:
        copies = sorted({len(replicas) for replicas in sharding.replicas} or {1})
        replicas = f"{copies[0]}" if len(copies) == 1 else f"{copies[0]}-{copies[-1]}"
        known[sharding] = f"{max(len(sharding.blocks), 1)} x {replicas}"
    return known[sharding]


def checkpoint_data(checkpoint: Checkpoint) -> dict[str, object]:
    """Return a checkpoint as plain data; nothing is folded there."""
    ranks = checkpoint.ranks
    holders: dict[Sharding, list[dict[str, object]]] = {}
    return {
        **_files_data(checkpoint.root, checkpoint.files, ranks),
        "nbytes": checkpoint.nbytes,
        "notices": list(checkpoint.notices),
        "sampled": looked_data(checkpoint.looked),
        "unreadable": dict(checkpoint.unreadable),
        "tensors": [
            {
                "name": tensor.spec.name,
                "dtype": tensor.spec.dtype.name,
                "shape": list(tensor.spec.shape),
                "nbytes": tensor.spec.nbytes,
                "layouts": [
                    {"stage": stage, **layout_data(layout)} for stage, layout in layouts_of(checkpoint, tensor)
                ],
                "shards": _shards_data(tensor.sharding, ranks, holders),
            }
            for tensor in checkpoint.tensors.values()
        ],
    }


def _shards_data(
    sharding: Sharding, ranks: Sequence[int], known: dict[Sharding, list[dict[str, object]]]
) -> list[dict[str, object]]:
    if sharding not in known:
        known[sharding] = [
            {"start": list(block.start), "stop": list(block.stop), "ranks": [ranks[at.file] for at in replicas]}
            for block, replicas in zip(sharding.blocks, sharding.replicas, strict=True)
        ]
    return known[sharding]


def _files_data(title: str, files: Sequence[SourceFile], ranks: Sequence[int]) -> dict[str, object]:
    return {
        "source": title,
        "ranks": sorted(set(ranks)),
        "files": [
            {"rank": rank, "path": file.path, "format": file.index.format, "nbytes": file.nbytes}
            for file, rank in zip(files, ranks, strict=True)
        ],
    }


def rank_files_text(title: str, files: Sequence[SourceFile], ranks: Sequence[int], *, width: int | None = None) -> str:
    """Write what each rank's files hold, where no strategy tells the whole tensors; ranks that hold the same as one."""
    lines = [files_text(title, files, ranks)]
    for alike, entries in _ranks_alike(files, ranks):
        found = [(name, (entry.dtype.name, entry.shape, entry.nbytes)) for name, entry in entries.items()]
        total = sum(entry.nbytes for entry in entries.values())
        each = "each " if len(alike) > 1 else ""
        lines += [
            "",
            (
                f"{'ranks' if len(alike) > 1 else 'rank'} {ranges_text(alike)}: "
                f"{each}{count_text(len(entries), 'tensor')}, {bytes_text(total)}"
            ),
        ]
        table = [
            (printable(name), f"{count:,}", dtype, shape_text(shape), bytes_text(nbytes * count))
            for name, (dtype, shape, nbytes), count in fold(found)
        ]
        lines += table_lines(("tensor", "count", "dtype", "shape in the file", "bytes"), table, width)
    return "\n".join(lines)


def rank_files_data(title: str, files: Sequence[SourceFile], ranks: Sequence[int]) -> dict[str, object]:
    """Return what each rank's files hold, as plain data."""
    return {
        **_files_data(title, files, ranks),
        "groups": [
            {
                "ranks": alike,
                "tensors": [
                    {
                        "name": name,
                        "dtype": entry.dtype.name,
                        "shape": list(entry.shape),
                        "nbytes": entry.nbytes,
                    }
                    for name, entry in entries.items()
                ],
            }
            for alike, entries in _ranks_alike(files, ranks)
        ],
    }


def _ranks_alike(files: Sequence[SourceFile], ranks: Sequence[int]) -> list[tuple[list[int], Mapping[str, Entry]]]:
    """Group ranks whose files hold tensors of equal names, dtypes and shapes, in order of the first of each group.

    Ranks mostly share their index (`source.headers` sees to that), so each distinct one is looked through once.
    """
    by_rank: dict[int, list[SourceFile]] = {}
    for file, rank in zip(files, ranks, strict=True):
        by_rank.setdefault(rank, []).append(file)
    of_index: dict[tuple[int, ...], tuple[Hashable, Mapping[str, Entry]]] = {}
    groups: dict[Hashable, tuple[list[int], Mapping[str, Entry]]] = {}
    for rank, held in sorted(by_rank.items()):
        key = tuple(file.index.header for file in held)
        if key not in of_index:
            entries: Mapping[str, Entry] = {name: entry for file in held for name, entry in file.index.entries.items()}
            contents = frozenset((name, entry.dtype, entry.shape) for name, entry in entries.items())
            of_index[key] = contents, entries
        contents_of_rank, entries = of_index[key]
        groups.setdefault(contents_of_rank, ([], entries))[0].append(rank)
    return list(groups.values())
