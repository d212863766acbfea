"""Tables of tensors: of a checkpoint, of what ranks' files hold, and of groups: how many, how large, of which dtypes.

Files of ranks that no strategy puts together are a `Checkpoint` for each set of ranks that hold the same, in which the
tensors are as they are in the files. So all tables are made of checkpoints, and sorted and chosen from alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.errors import UsageError, bytes_text, joined, names, printable
from reshard.formats.entries import Replica
from reshard.layout.block import Block, shape_text
from reshard.plan.select import all_states
from reshard.source.checkpoint import Checkpoint, Opening, Sharding, Tensor, TensorSpec, matched
from reshard.source.reshape import stacked_axes
from reshard.strategy.names import group_members, group_names, is_training_state, natural, ranges_text
from reshard.view.text import (
    LEGEND,
    count_text,
    looked_text,
    shards_text,
    shortened,
    source_lines,
)
from reshard.view.words import block_picture, cut_words, layouts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from reshard.formats.entries import Entry
    from reshard.formats.rank_dirs import Step
    from reshard.layout.block import Shape
    from reshard.readers.runs import Iteration
    from reshard.source.checkpoint import SourceFile

_LEAST_NAME = 24
_WIDEST = 256  # or every row of a table would be as wide as its longest name
_RIGHT = frozenset({"count", "bytes", "parameters", "tensors"})  # columns of numbers
_KEYS: dict[str, Callable[[Checkpoint], Callable[[str], str]]] = {
    "prefix": lambda _: lambda name: name.partition(".")[0],
    "dtype": lambda checkpoint: lambda name: checkpoint.tensors[name].spec.dtype.name,
    "kind": lambda checkpoint: kinds(checkpoint).__getitem__,
}
_SORTED: dict[str, Callable[[str, int], Any]] = {
    "bytes": lambda _, nbytes: -nbytes,
    "name": lambda name, _: natural(name.replace("{", "")),  # of several layers, as the first of them
}


@dataclass(frozen=True, slots=True, eq=False)
class Groups(Mapping[str, Checkpoint]):
    """The tensors of a checkpoint in groups: a mapping of each group's name to a checkpoint of its tensors.

    Attributes:
        checkpoint: of which the tensors are.
        by: what they are grouped by.
        members: for each group, the names of its tensors.
        shown_as: makes of the checkpoint of a group what users see of it.
    """

    checkpoint: Checkpoint
    by: str
    members: Mapping[str, tuple[str, ...]]
    shown_as: Callable[[Checkpoint], Any]

    @property
    def counts(self) -> dict[str, int]:
        """How many tensors each group has."""
        return {group: len(members) for group, members in self.members.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each group's whole tensors, replicas counted once, in bytes."""
        tensors = self.checkpoint.tensors
        return {group: sum(tensors[name].spec.nbytes for name in some) for group, some in self.members.items()}

    @property
    def dtypes(self) -> dict[str, tuple[str, ...]]:
        """The dtypes in each group, by name."""
        tensors = self.checkpoint.tensors
        return {
            group: tuple(dict.fromkeys(tensors[name].spec.dtype.name for name in some))
            for group, some in self.members.items()
        }

    def __getitem__(self, group: str) -> Any:
        return self.shown_as(self.checkpoint.sel(*self.members[group]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, group: object) -> bool:
        return group in self.members

    def __repr__(self) -> str:
        return f"<Groups of {printable(self.checkpoint.root)} by {self.by}: {len(self)}>"

    def __str__(self) -> str:
        counts, sizes, dtypes = self.counts, self.sizes, self.dtypes
        rows = [
            (printable(group), f"{counts[group]:,}", bytes_text(sizes[group]), ", ".join(dtypes[group]))
            for group in self
        ]
        return "\n".join(table_lines((self.by, "count", "bytes", "dtype"), rows))

    def _repr_html_(self) -> str:
        from reshard.view.html import groups_html

        return groups_html(self)


def groups(checkpoint: Checkpoint, by: str, shown_as: Callable[[Checkpoint], Any]) -> Groups:
    """Group the tensors of a checkpoint.

    Args:
        checkpoint: has the tensors.
        shown_as: see `Groups`.
        by: `name`, where names that differ in numbers only are one group (`layers.{0-31}.wq.weight`), `prefix`, what
            stands before the first dot, `dtype`, or `kind` (`kinds`).

    Raises:
        UsageError: tensors cannot be grouped by that.
    """
    found: dict[str, list[str]] = {}
    if by == "name":
        for group, _, members in group_members((name, None) for name in checkpoint.tensors):
            found.setdefault(group, []).extend(members)
    elif by in _KEYS:
        key = _KEYS[by](checkpoint)
        for name in checkpoint.tensors:
            found.setdefault(key(name), []).append(name)
    else:
        raise UsageError(f"tensors cannot be grouped by {by!r}; expected {names(['name', *_KEYS])}", code="bad-value")
    return Groups(checkpoint, by, {group: tuple(members) for group, members in found.items()}, shown_as)


def kinds(checkpoint: Checkpoint) -> dict[str, str]:
    """Return what each tensor is, by its name: `weights`, which states of the optimizer (`adam_m`), or `other`.

    Other are `global_step`, `learning_rate` and the like, and text. Names that were left out are known, too: to choose
    the states alone makes no weights of them.
    """
    states = all_states(checkpoint, None, checkpoint.left_out)
    return {
        name: states[name].kind if name in states else "other" if is_training_state(name, tensor) else "weights"
        for name, tensor in checkpoint.tensors.items()
    }


class Total(NamedTuple):
    """What the tensors of one kind and dtype are in sum; `parameters` are the numbers in them."""

    kind: str
    dtype: str
    tensors: int
    parameters: int
    nbytes: int


def totals(checkpoint: Checkpoint) -> list[Total]:
    """Return the sums by kind and dtype: weights first, what is neither weight nor state of one last."""
    kind_of = kinds(checkpoint)
    sums: dict[tuple[str, str], list[int]] = {}
    for name, tensor in checkpoint.tensors.items():
        total = sums.setdefault((kind_of[name], tensor.spec.dtype.name), [0, 0, 0])
        total[0] += 1
        total[1] += prod(tensor.spec.shape)
        total[2] += tensor.spec.nbytes
    order = ["weights", *dict.fromkeys(kind for kind, _ in sums if kind not in {"weights", "other"}), "other"]
    found = [Total(kind, dtype, *total) for (kind, dtype), total in sums.items()]
    return sorted(found, key=lambda total: order.index(total.kind))


def rank_parts(
    root: str, files: Sequence[SourceFile], ranks: Sequence[int], step: Step | None = None
) -> list[Checkpoint]:
    """Return what ranks' files hold: a checkpoint for each set of ranks whose tensors have equal names and shapes.

    Ranks mostly share their index (`source.headers` sees to that), so each distinct one is looked through once.

    Args:
        root: what was opened.
        files: the files of all ranks.
        ranks: the rank of each file.
        step: which of the checkpoints of a training run they are.
    """
    by_rank: dict[int, list[SourceFile]] = {}
    for file, rank in zip(files, ranks, strict=True):
        by_rank.setdefault(rank, []).append(file)
    of_headers: dict[tuple[int, ...], Hashable] = {}
    alike: dict[Hashable, dict[int, list[SourceFile]]] = {}
    for rank, held in sorted(by_rank.items()):
        headers = tuple(file.index.header for file in held)
        if headers not in of_headers:
            entries = [file.index.entries.items() for file in held]
            of_headers[headers] = frozenset((n, e.dtype, e.shape) for some in entries for n, e in some)
        alike.setdefault(of_headers[headers], {})[rank] = held
    return [replace(_as_they_are(root, some), opening=Opening(step=step)) for some in alike.values()]


def _as_they_are(root: str, held: Mapping[int, Sequence[SourceFile]]) -> Checkpoint:
    """Return the tensors of the first of some ranks that hold the same, as they are in its files."""
    shared: dict[tuple[int, Shape], Sharding] = {}

    def tensor(number: int, name: str, entry: Entry) -> Tensor:
        key = number, entry.shape
        if key not in shared:
            shared[key] = Sharding((Block.whole(entry.shape),), ((Replica(number, 0),),))
        return Tensor(TensorSpec(name, entry.dtype, entry.shape), shared[key], (entry.runs,), text=entry.text)

    first = next(iter(held.values()))
    found = [tensor(n, *item) for n, file in enumerate(first) for item in file.index.entries.items()]
    return Checkpoint(
        root,
        {one.spec.name: one for one in found},
        tuple(chain.from_iterable(held.values())),
        tuple(rank for rank, some in held.items() for _ in some),
        unreadable={name: reason for file in first for name, reason in file.index.unreadable},
    )


def chosen(parts: Sequence[Checkpoint], patterns: Sequence[str]) -> list[Checkpoint]:
    """Return the checkpoints with those tensors only that patterns choose: names, or globs; all where there is none.

    Raises:
        UsageError: a pattern matches no tensor of any; the nearest is named.
    """
    if not patterns:
        return list(parts)
    every = dict.fromkeys(name for part in parts for name in part.every)
    others = every.keys() - matched(parts[0].root, every, patterns)
    return [part.without(others & part.every.keys()) for part in parts]


def in_order(checkpoint: Checkpoint, sort: str | None) -> Checkpoint:
    """Return a checkpoint with its tensors by `name` or by `bytes`, the largest first; None: as they are."""
    if sort is None:
        return checkpoint
    key = _SORTED[sort]
    some = sorted(checkpoint.tensors.items(), key=lambda item: key(item[0], item[1].spec.nbytes))
    return replace(checkpoint, tensors=dict(some))


def checkpoint_text(
    checkpoint: Checkpoint, *, sort: str | None = None, width: int | None = None, raw: bool = False
) -> str:
    """Write a checkpoint as a table of its tensors, repeated layers folded, with sums.

    Args:
        checkpoint: what is shown.
        sort: by what rows are sorted, as in `in_order`.
        width: how many columns the terminal has; None for any number.
        raw: write device matrices and tensor maps, and how many blocks and copies the files have.
    """
    known: dict[Sharding, str] = {}
    more: dict[str, Callable[[Tensor], str]] = {}
    cut = checkpoint.strategy is not None or checkpoint.extras.has_layouts
    if cut or any(len(tensor.sharding.blocks) > 1 for tensor in checkpoint.tensors.values()):
        more["layout"] = lambda tensor: cut_words(checkpoint, tensor, known)
    if raw:
        counts: dict[Sharding, str] = {}
        if cut:
            more["device matrix and tensor map"] = lambda tensor: layouts_text(checkpoint, [tensor])
        more["shards x replicas"] = lambda tensor: shards_text(tensor, counts)
    distinct = {file.index.header: file.index for file in checkpoint.files}  # ranks mostly share theirs
    sizes = {
        header: sum(entry.nbytes for name, entry in index.entries.items() if name not in checkpoint.left_out)
        for header, index in distinct.items()
    }
    stored = sum(sizes[file.index.header] for file in checkpoint.files)
    lines = source_lines(checkpoint.root, checkpoint.files, checkpoint.ranks, checkpoint.opening.step)
    facts, shown = objects_of(checkpoint)
    said = ", ".join(f"{word} {fact}" for word, fact in facts.items())
    lines += [*([f"Megatron: {printable(said)}"] if said else []), ""]
    lines += [*_rows(checkpoint, "shape", sort, width, more), ""]
    if cut and raw:
        lines += [*LEGEND.splitlines(), ""]
    lines += [*_totals(checkpoint, width), ""]
    if looked := looked_text(checkpoint.opening.looked):
        lines.append(f"sampled: {looked}")
    in_files = f" in whole tensors, {bytes_text(stored)} in the files with replicas"
    lines.append(f"{_counted(checkpoint)}{in_files if cut else ''}")
    return joined("\n", [*lines, *_unreadable(checkpoint, shown)])


def picture_text(checkpoint: Checkpoint, name: str) -> str:
    """Draw in characters which ranks hold which block of a tensor.

    Raises:
        KeyError: the checkpoint has no such tensor; the nearest names are given.
    """
    checkpoint.require(name)
    tensor = checkpoint.tensors[name]
    places = checkpoint.strategy.tensors.get(name, ()) if checkpoint.strategy and tensor.listed else ()
    if places and checkpoint.strategy:
        grids = [checkpoint.strategy.grid(name, tensor.spec.shape, stage=placed.stage) for placed in places]
        pictures = [block_picture(grid.shape, grid.blocks, grid.ranks) for grid in grids]
    else:
        ranks = [sorted({checkpoint.ranks[at.file] for at in some}) for some in tensor.sharding.replicas]
        pictures = [block_picture(tensor.spec.shape, tensor.sharding.blocks, ranks)]
    title = f"{printable(name)}  {extents_text(tensor)}  {tensor.spec.dtype}  {cut_words(checkpoint, tensor, {})}"
    return "\n\n".join([title, *("\n".join(picture) for picture in pictures)])


def iterations_text(listed: Sequence[Iteration], *, width: int | None = None) -> str:
    """Write which checkpoints a run has: how large each is, and whether it is complete and the run was healthy.

    Args:
        listed: the checkpoints.
        width: how many columns the terminal has; None for any number.
    """
    table = []
    for one in listed:
        state = f"not complete: {one.problem}" if one.problem else "complete"
        said = [state, *(["the last"] if one.is_last else []), *one.warnings]
        table.append((f"iteration {one.number}", bytes_text(one.nbytes), printable("; ".join(said))))
    return "\n".join(table_lines(("checkpoint", "bytes", "state"), table, width, below=1))


def rank_files_text(parts: Sequence[Checkpoint], *, sort: str | None = None, width: int | None = None) -> str:
    """Write what ranks' files hold, where no strategy gives the whole tensors; ranks that hold the same as one.

    Args:
        parts: as `rank_parts` returns them.
        sort: by what rows are sorted, as in `in_order`.
        width: how many columns the terminal has; None for any number.
    """
    files = [file for part in parts for file in part.files]
    lines = source_lines(parts[0].root, files, [rank for part in parts for rank in part.ranks], parts[0].opening.step)
    for part in parts:
        alike = sorted(set(part.ranks))
        some = f"ranks {ranges_text(alike)}: each " if len(alike) > 1 else f"rank {alike[0]}: "
        lines += ["", f"{some if len(parts) > 1 or len(alike) > 1 else ''}{_counted(part)}"]
        if part.tensors:
            lines += [*_rows(part, "shape in the file", sort, width, {}), "", *_totals(part, width)]
        lines += _unreadable(part, {})
    return joined("\n", lines)


def _counted(checkpoint: Checkpoint) -> str:
    """Write how many tensors there are, of how many if some were left out, and how large they are."""
    every = len(checkpoint.tensors) + len(checkpoint.left_out)
    some = f"{len(checkpoint.tensors):,} of " if checkpoint.left_out else ""
    return f"{some}{count_text(every, 'tensor')}, {bytes_text(checkpoint.nbytes)}"


def _rows(
    checkpoint: Checkpoint,
    shape: str,
    sort: str | None,
    width: int | None,
    more: Mapping[str, Callable[[Tensor], str]],
) -> list[str]:
    """Return the lines of a table of tensors, repeated layers as one, with more columns, and what their shapes are."""
    rows = group_names(
        (name, (tensor.spec._replace(name=""), (extents_text(tensor), *(text(tensor) for text in more.values()))))
        for name, tensor in checkpoint.tensors.items()
    )
    if sort is not None:
        key = _SORTED[sort]
        rows.sort(key=lambda row: key(row[0], row[1][0].nbytes * row[2]))
    table = [
        (
            printable(name),
            f"{count:,}",
            spec.dtype.name,
            extents,
            bytes_text(spec.nbytes * count),
            *texts,
        )
        for name, (spec, (extents, *texts)), count in rows
    ]
    return table_lines(("tensor", "count", "dtype", shape, "bytes", *more), table, width, below=len(more))


def extents_text(tensor: Tensor) -> str:
    """Write the shape of a tensor, with what its first dimensions count, where that is known."""
    shape, words = tensor.spec.shape, stacked_axes(tensor)
    counted = ", ".join(count_text(extent, word) for extent, word in zip(shape, words, strict=False))
    rest = shape_text(shape[len(words) :])
    return f"[{counted}{', ' if rest != '[]' else ''}{rest[1:]}" if words else rest


def objects_of(checkpoint: Checkpoint) -> tuple[dict[str, int | str], dict[str, str]]:
    """Return what a checkpoint says of the training, and what each object is; they are read for that."""
    if not (checkpoint.extras.objects or checkpoint.extras.beside):
        return {}, {}
    from reshard.readers.dcp.objects import facts, shown_objects  # not on every start

    return facts(checkpoint), shown_objects(checkpoint)


def _unreadable(checkpoint: Checkpoint, objects: Mapping[str, str]) -> list[str]:
    found = [("not readable", checkpoint.unreadable), ("bound", checkpoint.extras.bound), ("not a tensor", objects)]
    rows = ((title, name, what) for title, some in found for name, what, _ in group_names(some.items()))
    return [f"{title}: {printable(name)}: {printable(what)}" for title, name, what in rows]


def _totals(checkpoint: Checkpoint, width: int | None) -> list[str]:
    table = [
        (printable(one.kind), one.dtype, f"{one.tensors:,}", f"{one.parameters:,}", bytes_text(one.nbytes))
        for one in totals(checkpoint)
    ]
    return table_lines(("kind", "dtype", "tensors", "parameters", "bytes"), table, width)


def layouts_text(checkpoint: Checkpoint, tensors: Sequence[Tensor]) -> str:
    """Write the layouts of tensors that are shown as one, with the stages of each where there are several."""
    stages: dict[str, set[int]] = {}
    for tensor in tensors:
        for stage, layout in layouts_of(checkpoint, tensor):
            stages.setdefault(str(layout), set()).add(stage)
    if stages and checkpoint.strategy and len(checkpoint.strategy.stages) > 1:
        return ", ".join(f"stage {ranges_text(sorted(some))}: {layout}" for layout, some in stages.items())
    return next(iter(stages), "whole")


def table_rows(parts: Sequence[Checkpoint], *, whole: bool) -> Iterator[tuple[str | int, ...]]:
    """Yield the rows of a table as data, the titles first: one for each tensor, nothing folded.

    Args:
        parts: one checkpoint, or as `rank_parts` returns them.
        whole: the tensors are whole ones, and not what ranks' files hold.
    """
    common = ("name", "kind", "dtype", "shape", "parameters", "nbytes")
    yield (*common, "layout", "blocks", "replicas") if whole else ("ranks", *common)
    known: dict[Sharding, str] = {}
    for part in parts:
        alike = sorted(set(part.ranks))
        ranks, kind_of = ranges_text(alike, most=len(alike)), kinds(part)
        for name, tensor in part.tensors.items():
            _, dtype, shape = tensor.spec
            row = (name, kind_of[name], dtype.name, str([*shape]), prod(shape), tensor.spec.nbytes)
            if whole:
                blocks, _, replicas = shards_text(tensor, known).partition(" x ")
                yield (
                    *row,
                    layouts_text(part, [tensor]) if part.strategy or part.extras.has_layouts else "",
                    blocks,
                    replicas,
                )
            else:
                yield (ranks, *row)


def table_lines(
    header: Sequence[str], rows: Iterable[Sequence[str]], width: int | None = None, *, below: int = 0
) -> list[str]:
    """Return the lines of a table, numbers to the right.

    Args:
        header: the titles; the first column is that of names.
        rows: the cells.
        width: how long lines may be, if not as long as they are: names are cut in the middle.
        below: so many columns, the last ones, go to lines of their own where the width does not suffice.
    """
    lines = [tuple(header), *map(tuple, rows)]
    sizes = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if width is None or sum(sizes) + 2 * len(sizes) - 2 <= width:
        return _columns(header, lines)
    kept = len(header) - below
    room = max(_LEAST_NAME, width - sum(sizes[1:kept]) - 2 * (kept - 1))
    above = _columns(header[:kept], [(shortened(line[0], room), *line[1:kept]) for line in lines])
    return [
        text
        for line, first in zip(lines, above, strict=True)
        for text in (first, *wrap("  ".join(line[kept:]), width, initial_indent="    ", subsequent_indent="    "))
    ]


def _columns(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [min(_WIDEST, max(len(line[column]) for line in lines)) for column in range(len(header))]
    return [
        "  ".join(
            cell.rjust(width) if title in _RIGHT else cell.ljust(width)
            for cell, width, title in zip(line, widths, header, strict=True)
        ).rstrip()
        for line in lines
    ]
