"""Provenance: what a target was made from, and how, as one record.

A ledger has the record, and a plan file has it with further options. It is
validated on reading: form by `schema.read`, values by `StrategyRecord.read` and `Selection`. Source files are only
read. `core.reopen` opens the source again.
"""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.layout.layout import Layout
from reshard.core.model.facts import computed_title
from reshard.core.records.schema import Count, Line
from reshard.core.storage.places import as_place
from reshard.strategy.strategy import MOST_RANKS, Placed, Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reshard.core.model.checkpoint import Checkpoint

LayoutRow = tuple[
    tuple[Count, ...], tuple[tuple[Count, ...], ...], int, int, tuple[int, ...], tuple[int, ...], int
]  # fmt: skip
"""The fields of a `Layout`."""

PlacedRow = tuple[Count, Count, tuple[Count, ...] | None, bool]
"""A pipeline stage, the index of a layout, a shape, and whether the shape is expanded."""


_DEEPEST, _MOST_SOURCES = 16, 1000


@dataclass(frozen=True, slots=True)
class StrategyRecord:
    """A strategy without its operators, which move no bytes; equal layouts and places are listed once.

    Attributes:
        stages: the first stage, and the one after the last.
        devices, merged: as in `Strategy`.
        layouts: distinct layouts.
        places: distinct places of a tensor, a row for each of its stages.
        tensors: by name, the index of the tensor's places.
    """

    stages: tuple[Count, Count]
    devices: Count
    merged: bool
    layouts: tuple[LayoutRow, ...]
    places: tuple[tuple[PlacedRow, ...], ...]
    tensors: dict[str, Count]

    @classmethod
    def of(cls, strategy: Strategy | None) -> StrategyRecord | None:
        """Return the record of a strategy."""
        if strategy is None:
            return None
        layouts: dict[Layout, int] = {}
        places: dict[tuple[PlacedRow, ...], int] = {}
        tensors = {}
        for name, placed in strategy.tensors.items():
            rows = tuple((p.stage, layouts.setdefault(p.layout, len(layouts)), p.shape, p.expanded) for p in placed)
            tensors[name] = places.setdefault(rows, len(places))
        stages = (strategy.stages.start, strategy.stages.stop)
        rows_of_layouts = tuple(astuple(layout) for layout in layouts)
        return cls(stages, strategy.devices, strategy.merged, rows_of_layouts, tuple(places), tensors)

    def read(self) -> Strategy:
        """Return the strategy; raise `ValueError` if it is invalid."""
        first, stop = self.stages
        devices = self.devices
        if not first < stop or not devices or stop * devices > MOST_RANKS:
            raise ValueError(f"a strategy of {devices} devices in stages {first} to {stop - 1} is impossible")
        layouts = [Layout(*row) for row in self.layouts]
        if any(layout.devices != devices for layout in layouts):
            raise ValueError(f"a layout of a strategy is not for its {devices} devices")
        places = [tuple(_placed(row, range(first, stop), layouts) for row in rows) for rows in self.places]
        if any(a.stage >= b.stage for placed in places for a, b in pairwise(placed)) or not all(places):
            raise ValueError("a tensor of a strategy is in no stage, or in stages that do not ascend")
        if any(number >= len(places) for number in self.tensors.values()):
            raise ValueError("a tensor of a strategy has places that are not listed")
        tensors = {name: places[number] for name, number in self.tensors.items()}
        return Strategy(tensors, range(first, stop), devices, merged=self.merged)


def _placed(row: PlacedRow, stages: range, layouts: list[Layout]) -> Placed:
    stage, layout, shape, expanded = row
    if stage not in stages or layout >= len(layouts):
        raise ValueError(f"a tensor of a strategy is in stage {stage} with layout {layout}, which are not there")
    if expanded and (shape is None or len(shape) != len(layouts[layout].tensor_map)):
        raise ValueError("a tensor of a strategy is expanded to a shape that its layout does not fit")
    return Placed(stage, layouts[layout], shape, expanded=expanded)


class FileRecord(NamedTuple):
    """A source file.

    Attributes:
        rank: its rank.
        path: its path: below the root in a plan file, relative to its siblings in a zarr store, else absolute.
        nbytes: its size.
        header: the index of its header's digest in `SourceRecord.headers`; None if that was not taken.
        version: tells files with equal headers apart: the digest of some pages (in a plan file), or the modification
            time (in a zarr store); else empty.
    """

    rank: Count
    path: Line
    nbytes: Count
    header: Count | None = None
    version: str = ""


@dataclass(frozen=True, slots=True)
class LoraRecord:
    """A `LoRA`, which checks `alpha` and `tied`."""

    root: Line
    alpha: Any
    tied: str
    digest: str


@dataclass(frozen=True, slots=True)
class InputRecord:
    """A checkpoint from which others are computed.

    Attributes:
        source: the checkpoint as it was opened.
        lora: the adapter that was merged into it.
        rules: the rules that were applied after that.
        left_out: names that were left out after that.
    """

    source: SourceRecord
    lora: LoraRecord | None
    rules: dict[str, Any] | None
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, checkpoint: Checkpoint, source: SourceRecord) -> InputRecord:
        """Return the record of a checkpoint, given the record of its source."""
        origin, lora = checkpoint.origin, checkpoint.lora
        before = origin.left_out | origin.checkpoint.left_out if origin else checkpoint.left_out
        rules = origin.rules.data() if origin and origin.rules else None
        adapter = LoraRecord(**asdict(lora)) if lora else None
        return cls(source, adapter, rules, tuple(sorted(checkpoint.left_out - before)))


@dataclass(frozen=True, slots=True)
class ComputationRecord:
    """A `Computation`; `core.reopen` checks the options.

    Attributes:
        kind, options: as in `Computation`.
        inputs: the records of its inputs.
    """

    kind: Line
    options: dict[str, Any]
    inputs: tuple[InputRecord, ...]

    def __post_init__(self) -> None:
        if self.depth > _DEEPEST or self.sources > _MOST_SOURCES:
            raise ValueError(f"computations of more than {_MOST_SOURCES} sources, or {_DEEPEST} on top of each other")

    @property
    def depth(self) -> int:
        """Return how many computations are on top of each other."""
        return 1 + max((each.source.computation.depth for each in self.inputs if each.source.computation), default=0)

    @property
    def sources(self) -> int:
        """Return the number of sources in files."""
        computations = (each.source.computation for each in self.inputs)
        return sum(computation.sources if computation else 1 for computation in computations)

    @classmethod
    def of(cls, source: Checkpoint, record: Callable[[Checkpoint], SourceRecord]) -> ComputationRecord | None:
        """Return the record of a source's computation, or None; `record` makes the record of an opened input."""
        computation = source.opening.computation
        if computation is None:
            return None
        inputs = tuple(InputRecord.of(each, record(each.opened)) for each in computation.inputs)
        return cls(computation.kind, dict(computation.options), inputs)


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """A source, and how it was opened.

    Attributes:
        root: the directory or file that was opened; of a computed source, that of its first input.
        described_by: as in `Extras`.
        strategy: the strategy, with rules and stage applied.
        stage, partial, by_file, elsewhere: as in `Opening`.
        varying: names of the tensors that differ from rank to rank.
        left_out: as in `Checkpoint`.
        encrypted: whether it can only be opened with a key.
        headers: distinct digests of headers (`headers.index_digests`).
        files: the files in the order of their ranks; none if the source describes itself, unless they are compared, or
            if it is computed.
        computation: how it is computed from other sources; None if it is in files.
        rules: as in `Opening`; None for none.
    """

    root: Line
    described_by: str
    strategy: StrategyRecord | None
    stage: Count | None
    partial: bool
    by_file: bool
    varying: tuple[str, ...]
    elsewhere: tuple[str, ...]
    left_out: tuple[str, ...]
    encrypted: bool
    headers: tuple[str, ...]
    files: tuple[FileRecord, ...]
    computation: ComputationRecord | None = None
    rules: dict[str, str] | None = None

    @classmethod
    def of(
        cls,
        source: Checkpoint,
        root: str,
        files: Sequence[FileRecord],
        headers: Sequence[str] = (),
        computation: ComputationRecord | None = None,
    ) -> SourceRecord:
        """Return the record of a source.

        Args:
            source: the source, without rules or an adapter.
            root: the path to record.
            files: the files to record, with indices into `headers`.
            headers: digests of headers.
            computation: how it is computed.
        """
        return cls(
            root, source.extras.described_by, StrategyRecord.of(source.strategy), source.opening.stage,
            source.opening.partial, source.opening.by_file,
            tuple(name for name, tensor in source.tensors.items() if tensor.varies),
            tuple(sorted(source.opening.elsewhere)), tuple(sorted(source.left_out)), source.cipher is not None,
            tuple(headers), tuple(files), computation, dict(source.opening.rules) or None,
        )  # fmt: skip

    @classmethod
    def by_path(cls, source: Checkpoint) -> SourceRecord:
        """Return the record of a source whose files are opened again at their paths."""
        root, computation = str(as_place(source.root).absolute()), ComputationRecord.of(source, cls.by_path)
        if computation is not None:
            return cls.of(source, root, (), computation=computation)
        pairs = () if source.extras.described_by else zip(source.ranks, source.files, strict=True)
        return cls.of(source, root, [FileRecord(rank, file.path, file.nbytes) for rank, file in pairs])

    def paths(self) -> dict[int, list[str]]:
        """Return the paths of each rank."""
        result: dict[int, list[str]] = {}
        for file in self.files:
            result.setdefault(file.rank, []).append(file.path)
        return result

    @property
    def stored(self) -> Iterator[SourceRecord]:
        """Yield the sources in files: this one, or those from which it is computed."""
        if self.computation is None:
            yield self
        else:
            for each in self.computation.inputs:
                yield from each.source.stored

    @property
    def title(self) -> str:
        """Return the root, or how the source is computed from others."""
        if self.computation is None:
            return self.root
        return computed_title(self.computation.kind, [each.source.title for each in self.computation.inputs])


@dataclass(frozen=True, slots=True)
class TargetRecord:
    """The options that define the target.

    Attributes:
        strategy: the strategy; None for whole tensors, and for targets that describe themselves.
        stage: the requested pipeline stage, if the strategy covers a single one.
        format: the name of the format.
        remove_redundancy: each block is stored once per group of replicas.
        encryption: the mode of encryption, or None.
        index: the file that is written last and makes the target complete, such as the index of a set; None for
            rank files.
    """

    strategy: StrategyRecord | None
    stage: Count | None
    format: str
    remove_redundancy: bool
    encryption: str | None
    index: str | None


@dataclass(frozen=True, slots=True)
class SelectionRecord:
    """A `Selection`, which checks patterns, casts, `rules` and `lora` when it is made again."""

    include: tuple[str, ...]
    exclude: tuple[str, ...]
    weights_only: bool
    names: dict[str, str]
    cast: dict[str, str]
    drop: tuple[str, ...]
    allow_missing: tuple[str, ...]
    rules: dict[str, Any] | None
    lora: LoraRecord | None


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a target was made from, and how.

    Attributes:
        made_by: the version of this program.
        source: the source.
        target: the options that define the target.
        selection: tensors, names, casts, rules and adapter.
    """

    made_by: Line
    source: SourceRecord
    target: TargetRecord
    selection: SelectionRecord
