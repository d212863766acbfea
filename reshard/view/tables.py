"""Checkpoints as tables and as plain data: their tensors, files and groups.

Rank files without a strategy are shown as checkpoints, too: one for each set of ranks with equal tensors, with the
shapes in the files (`rank_parts`). Thus the same functions select, sort and show every table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.layout.block import Block
from reshard.core.model.checkpoint import Checkpoint, Sharding, Tensor, TensorSpec, matched, unreadable_in
from reshard.core.model.entries import Replica
from reshard.core.model.facts import Opening
from reshard.core.model.reshape import stacked_axes
from reshard.core.plan.select import kinds
from reshard.errors import UsageError, bytes_text, joined, names, printable
from reshard.spelling import missing_name
from reshard.strategy.names import group_members, group_names, natural, ranges_text
from reshard.upward import upward
from reshard.view.sections import Reasons, Table
from reshard.view.sections import lines as section_lines
from reshard.view.text import count_text, files_lines, looked_text, plain, source_lines, table_lines
from reshard.view.words import LEGEND, cut_words, extents_text, layout_data, layouts_of, layouts_text, shard_counts

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import SourceFile
    from reshard.core.model.entries import Entry
    from reshard.core.rank_files import Step

_SORTED: dict[str, Callable[[str, int], Any]] = {
    "bytes": lambda _, nbytes: -nbytes,
    "name": lambda name, _: natural(name.replace("{", "")),  # folded layers sort as the first of them
}


@dataclass(frozen=True, slots=True, eq=False)
class Groups(Mapping[str, Checkpoint]):
    """The tensors of a checkpoint in groups: a mapping of each group's name to a checkpoint of its tensors.

    Attributes:
        checkpoint: the checkpoint.
        by: the property that defines the groups.
        members: the names of the tensors of each group.
        shown_as: converts a group's checkpoint to the class that users see.
    """

    checkpoint: Checkpoint
    by: str
    members: Mapping[str, tuple[str, ...]]
    shown_as: Callable[[Checkpoint], Any]

    @property
    def counts(self) -> dict[str, int]:
        """Count the tensors of each group."""
        return {group: len(members) for group, members in self.members.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size of each group's whole tensors in bytes, replicas counted once."""
        tensors = self.checkpoint.tensors
        return {group: sum(tensors[n].spec.nbytes for n in members) for group, members in self.members.items()}

    @property
    def dtypes(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the dtypes in each group."""
        tensors = self.checkpoint.tensors
        return {
            group: tuple(dict.fromkeys(tensors[name].spec.dtype.name for name in members))
            for group, members in self.members.items()
        }

    def __getitem__(self, group: str) -> Any:
        if group not in self.members:
            raise missing_name(group, self.members, f"by {self.by} there is no group")
        return self.shown_as(self.checkpoint.sel(*self.members[group]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, group: object) -> bool:
        return group in self.members

    def _ipython_key_completions_(self) -> list[str]:
        return list(self.members)

    def __repr__(self) -> str:
        return f"<Groups of {printable(self.checkpoint.title)} by {self.by}: {len(self)}>"

    def __str__(self) -> str:
        rows = [(printable(name), *cells) for name, *cells in group_rows(self)]
        return "\n".join(table_lines((self.by, "count", "bytes", "dtype"), rows))

    def _repr_html_(self) -> str:
        return str(upward("html")(self))


def group_rows(groups: Groups) -> list[tuple[str, str, str, str]]:
    """Return the name, number of tensors, size and dtypes of each group as text."""
    counts, sizes, dtypes = groups.counts, groups.sizes, groups.dtypes
    return [(name, f"{counts[name]:,}", bytes_text(sizes[name]), ", ".join(dtypes[name])) for name in groups]


def groups(checkpoint: Checkpoint, by: str, shown_as: Callable[[Checkpoint], Any]) -> Groups:
    """Group the tensors of a checkpoint.

    Args:
        checkpoint: the checkpoint.
        shown_as: see `Groups`.
        by: `name` (names that differ only in numbers are one group: `layers.{0-31}.wq.weight`), `prefix` (the part
            before the first dot), `dtype`, or `kind` (`kinds`).

    Raises:
        UsageError: an unknown value of `by`.
    """
    tensors = checkpoint.tensors
    kind_of = kinds(checkpoint) if by == "kind" else {}
    keys: dict[str, Callable[[str], str]] = {
        "prefix": lambda name: name.partition(".")[0],
        "dtype": lambda name: tensors[name].spec.dtype.name,
        "kind": kind_of.__getitem__,
    }
    if by == "name":
        folded = group_members((name, None) for name in tensors)
        pairs = [(group, name) for group, _, members in folded for name in members]
    elif by in keys:
        pairs = [(keys[by](name), name) for name in tensors]
    else:
        raise UsageError(f"tensors cannot be grouped by {by!r}; expected {names(['name', *keys])}", code="bad-value")
    groups: dict[str, list[str]] = {}
    for group, name in pairs:
        groups.setdefault(group, []).append(name)
    return Groups(checkpoint, by, {group: tuple(members) for group, members in groups.items()}, shown_as)


class Total(NamedTuple):
    """The sums over the tensors of one kind and dtype; `parameters` counts their elements."""

    kind: str
    dtype: str
    tensors: int
    parameters: int
    nbytes: int


def totals(checkpoint: Checkpoint) -> list[Total]:
    """Return the sums by kind and dtype, `weights` first and `other` last."""
    kind_of = kinds(checkpoint)
    sums: dict[tuple[str, str], list[int]] = {}
    for name, tensor in checkpoint.tensors.items():
        total = sums.setdefault((kind_of[name], tensor.spec.dtype.name), [0, 0, 0])
        total[0] += 1
        total[1] += prod(tensor.spec.dtype.as_values(tensor.spec.shape) or tensor.spec.shape)
        total[2] += tensor.spec.nbytes
    order = ["weights", *dict.fromkeys(kind for kind, _ in sums if kind not in {"weights", "other"}), "other"]
    rows = [Total(kind, dtype, *total) for (kind, dtype), total in sums.items()]
    return sorted(rows, key=lambda row: order.index(row.kind))


def rank_parts(
    root: str, files: Sequence[SourceFile], ranks: Sequence[int], step: Step | None = None
) -> list[Checkpoint]:
    """Return a checkpoint for each set of ranks whose files have equal names, dtypes and shapes.

    Ranks mostly share their index (`core.model.headers`), so each distinct one is examined once.
    """
    by_rank: dict[int, list[SourceFile]] = {}
    for file, rank in zip(files, ranks, strict=True):
        by_rank.setdefault(rank, []).append(file)
    contents: dict[tuple[int, ...], Hashable] = {}
    alike: dict[Hashable, dict[int, list[SourceFile]]] = {}
    for rank, rank_files in sorted(by_rank.items()):
        headers = tuple(file.index.header_id for file in rank_files)
        if headers not in contents:
            entries = chain.from_iterable(file.index.entries.items() for file in rank_files)
            contents[headers] = frozenset((name, entry.dtype, entry.shape) for name, entry in entries)
        alike.setdefault(contents[headers], {})[rank] = rank_files
    return [replace(_unassembled(root, group), opening=Opening(step=step)) for group in alike.values()]


def _unassembled(root: str, files: Mapping[int, Sequence[SourceFile]]) -> Checkpoint:
    """Return a checkpoint of ranks with equal files: the shards of the first rank as whole tensors."""
    shared: dict[tuple[int, Shape], Sharding] = {}

    def tensor(number: int, name: str, entry: Entry) -> Tensor:
        key = number, entry.shape
        if key not in shared:
            shared[key] = Sharding((Block.whole(entry.shape),), ((Replica(number, 0),),))
        return Tensor(TensorSpec(name, entry.dtype, entry.shape), shared[key], (entry.runs,), text=entry.text)

    first = next(iter(files.values()))
    return Checkpoint(
        root,
        {name: tensor(n, name, entry) for n, file in enumerate(first) for name, entry in file.index.entries.items()},
        tuple(chain.from_iterable(files.values())),
        tuple(rank for rank, rank_files in files.items() for _ in rank_files),
        unreadable=unreadable_in(first),
    )


def chosen(parts: Sequence[Checkpoint], patterns: Sequence[str]) -> list[Checkpoint]:
    """Return checkpoints with only the tensors that match names or globs, if any are given.

    Raises:
        UsageError: a pattern matches no tensor of any checkpoint; the error names the nearest.
    """
    if not patterns:
        return list(parts)
    all_names = dict.fromkeys(name for part in parts for name in part.all_names)
    excluded = all_names.keys() - matched(parts[0].root, all_names, patterns)
    return [part.without(excluded & part.all_names.keys()) for part in parts]


def in_order(checkpoint: Checkpoint, sort: str | None) -> Checkpoint:
    """Sort the tensors by `name` or by `bytes`, the largest first; None keeps their order."""
    if sort is None:
        return checkpoint
    key = _SORTED[sort]
    tensors = sorted(checkpoint.tensors.items(), key=lambda item: key(item[0], item[1].spec.nbytes))
    return replace(checkpoint, tensors=dict(tensors))


def checkpoint_text(
    checkpoint: Checkpoint,
    *,
    sort: str | None = None,
    width: int | None = None,
    raw: bool = False,
    described: tuple[Mapping[str, int | str], Mapping[str, str]] | None = None,
) -> str:
    """Write a checkpoint as a table of its tensors, repeated layers folded, with sums.

    Args:
        checkpoint: the checkpoint.
        sort: the order of rows, as for `in_order`.
        width: the columns of the terminal; None for any number.
        raw: write device matrices, tensor maps, and the numbers of blocks and copies in the files.
        described: the result of `objects_of`, if it is known, since objects are read for it.
    """
    columns: dict[str, Callable[[Tensor], str]] = {}
    cut = checkpoint.strategy is not None or checkpoint.extras.has_layouts
    if cut or any(len(tensor.sharding.blocks) > 1 for tensor in checkpoint.tensors.values()):
        columns["layout"] = lambda tensor: cut_words(checkpoint, tensor)
    if raw:
        if cut:
            columns["device matrix and tensor map"] = lambda tensor: layouts_text(checkpoint, [tensor])
        columns["shards x replicas"] = lambda tensor: " x ".join(shard_counts(tensor.sharding))
    lines = source_lines(checkpoint)
    facts, objects = described or objects_of(checkpoint)
    if facts:
        lines.append(f"Training: {printable(', '.join(f'{word} {fact}' for word, fact in facts.items()))}")
    lines += ["", *_rows(checkpoint, "shape", sort, width, columns), ""]
    if cut and raw:
        lines += [*LEGEND.splitlines(), ""]
    lines += [*section_lines(totals_table(checkpoint), width), ""]
    if sampled := looked_text(checkpoint.opening.looked):
        lines.append(f"sampled: {sampled}")
    stored = _stored(checkpoint) if cut else 0
    in_files = f" in whole tensors, {bytes_text(stored)} in the files with replicas" if stored else ""
    lines.append(f"{_counted(checkpoint)}{in_files}")
    return joined("\n", [*lines, *_trouble_lines(checkpoint, objects)])


def _stored(checkpoint: Checkpoint) -> int:
    """Return the bytes of the tensors in all files, replicas included."""
    distinct = {file.index.header_id: file.index for file in checkpoint.files}  # ranks mostly share their index
    sizes = {
        header: sum(entry.nbytes for name, entry in index.entries.items() if name not in checkpoint.left_out)
        for header, index in distinct.items()
    }
    return sum(sizes[file.index.header_id] for file in checkpoint.files)


def rank_files_text(parts: Sequence[Checkpoint], *, sort: str | None = None, width: int | None = None) -> str:
    """Write a table for each of `rank_parts`, with the options of `checkpoint_text`."""
    files = [pair for part in parts for pair in part.stored_files]
    lines = files_lines(parts[0].root, files, [rank for rank, _ in files], parts[0].opening.step)
    for part in parts:
        ranks = sorted(set(part.ranks))
        title = f"ranks {ranges_text(ranks)}: each " if len(ranks) > 1 else f"rank {ranks[0]}: "
        lines += ["", f"{title if len(parts) > 1 or len(ranks) > 1 else ''}{_counted(part)}"]
        if part.tensors:
            lines += [*_rows(part, "shape in the file", sort, width, {}), "", *section_lines(totals_table(part), width)]
        lines += _trouble_lines(part, {})
    return joined("\n", lines)


def _counted(checkpoint: Checkpoint) -> str:
    total = len(checkpoint.tensors) + len(checkpoint.left_out)
    selected = f"{len(checkpoint.tensors):,} of " if checkpoint.left_out else ""
    return f"{selected}{count_text(total, 'tensor')}, {bytes_text(checkpoint.nbytes)}"


def _rows(
    checkpoint: Checkpoint,
    shape: str,
    sort: str | None,
    width: int | None,
    columns: Mapping[str, Callable[[Tensor], str]],
) -> list[str]:
    """Return the lines of a table of tensors, folded; `shape` is a title, `columns` has further ones by title."""
    rows = group_names(
        (name, (tensor.spec._replace(name=""), (extents_text(tensor), *(text(tensor) for text in columns.values()))))
        for name, tensor in checkpoint.tensors.items()
    )
    if sort is not None:
        key = _SORTED[sort]
        rows.sort(key=lambda row: key(row[0], row[1][0].nbytes * row[2]))
    table = [
        (printable(name), f"{count:,}", spec.dtype.name, extents, bytes_text(spec.nbytes * count), *texts)
        for name, (spec, (extents, *texts)), count in rows
    ]
    return table_lines(("tensor", "count", "dtype", shape, "bytes", *columns), table, width, below=len(columns))


def objects_of(checkpoint: Checkpoint) -> tuple[dict[str, int | str], dict[str, str]]:
    """Read and return the facts about the training, and the text of each object that is not a tensor."""
    if not (checkpoint.extras.objects or checkpoint.extras.beside):
        return {}, {}
    if checkpoint.format is None:
        return {}, {}
    objects = checkpoint.format.objects(checkpoint)
    return dict(objects.facts()), objects.shown()


def _trouble_lines(checkpoint: Checkpoint, objects: Mapping[str, str]) -> list[str]:
    return [line for section in troubles(checkpoint, objects) for line in section_lines(section)]


def troubles(checkpoint: Checkpoint, objects: Mapping[str, str]) -> list[Reasons]:
    """Return what is not readable, with the reason, and the objects that are not tensors, with their text."""
    return [
        Reasons("not readable", checkpoint.unreadable),
        Reasons("bound", checkpoint.extras.bound),
        Reasons("not a tensor", objects, ("name", "what it is"), "object"),
    ]


def totals_table(checkpoint: Checkpoint) -> Table:
    """Return a table of the sums by kind and dtype."""
    rows = [
        (kind, dtype, f"{tensors:,}", f"{parameters:,}", bytes_text(nbytes))
        for kind, dtype, tensors, parameters, nbytes in totals(checkpoint)
    ]
    return Table("", ("kind", "dtype", "tensors", "parameters", "bytes"), rows)


def table_rows(parts: Sequence[Checkpoint], *, whole: bool) -> Iterator[tuple[str | int, ...]]:
    """Yield the rows of `--csv`: the titles, then one row per tensor.

    `parts` is one checkpoint if tensors are `whole`, else the result of `rank_parts`.
    """
    common = ("name", "kind", "dtype", "shape", "parameters", "nbytes")
    yield (*common, "layout", "blocks", "replicas") if whole else ("ranks", *common)
    for part in parts:
        alike = sorted(set(part.ranks))
        ranks, kind_of = ranges_text(alike, most=len(alike)), kinds(part)
        for name, tensor in part.tensors.items():
            _, dtype, shape = tensor.spec
            row = (name, kind_of[name], dtype.name, str([*shape]), prod(shape), tensor.spec.nbytes)
            if whole:
                layouts = layouts_text(part, [tensor]) if part.strategy or part.extras.has_layouts else ""
                yield (*row, layouts, *shard_counts(tensor.sharding))
            else:
                yield (ranks, *row)


def checkpoint_data(checkpoint: Checkpoint) -> dict[str, object]:
    """Return a checkpoint as plain data."""
    facts, objects = objects_of(checkpoint)
    distinct = {tensor.sharding for tensor in checkpoint.tensors.values()}
    shards = {sharding: _shards_data(sharding, checkpoint.ranks) for sharding in distinct}
    return {
        **_files_data([checkpoint]),
        "nbytes": checkpoint.nbytes,
        "warnings": plain(checkpoint.warnings),
        "sampled": plain(checkpoint.opening.looked),
        "unreadable": dict(checkpoint.unreadable),
        "bound": dict(checkpoint.extras.bound),
        "objects": objects,
        "training": facts,
        "totals": plain(totals(checkpoint)),
        "tensors": [
            {
                **_tensor_data(tensor),
                "stacked": list(stacked_axes(tensor)),
                "layouts": [
                    {"stage": stage, **layout_data(layout)} for stage, layout in layouts_of(checkpoint, tensor)
                ],
                "shards": shards[tensor.sharding],
            }
            for tensor in checkpoint.tensors.values()
        ],
    }


def _tensor_data(tensor: Tensor) -> dict[str, object]:
    name, dtype, shape = tensor.spec
    return {"name": name, "dtype": dtype.name, "shape": list(shape), "nbytes": tensor.spec.nbytes}


def _shards_data(sharding: Sharding, ranks: Sequence[int]) -> list[dict[str, object]]:
    return [
        {**plain(block), "ranks": [ranks[at.file] for at in replicas]}
        for block, replicas in zip(sharding.blocks, sharding.replicas, strict=True)
    ]


def _files_data(parts: Sequence[Checkpoint]) -> dict[str, object]:
    files = [pair for part in parts for pair in part.stored_files]
    return {
        "source": parts[0].title,
        "step": plain(parts[0].opening.step),
        "ranks": sorted({rank for rank, _ in files}),
        "files": [
            {"rank": rank, "path": file.path, "format": file.index.format, "nbytes": file.nbytes}
            for rank, file in sorted(files, key=itemgetter(0))
        ],
    }


def rank_files_data(parts: Sequence[Checkpoint], warnings: Sequence[str]) -> dict[str, object]:
    """Return the tensors in each rank's files as plain data; `parts` is the result of `rank_parts`."""
    return {
        **_files_data(parts),
        "warnings": list(warnings),
        "groups": [
            {
                "ranks": sorted(set(part.ranks)),
                "totals": plain(totals(part)),
                "unreadable": dict(part.unreadable),
                "tensors": [_tensor_data(tensor) for tensor in part.tensors.values()],
            }
            for part in parts
        ],
    }
