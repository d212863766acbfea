"""Strategies: a layout for every tensor of a model, over its pipeline stages.

The global number of a rank is stage x devices per stage + its number in the stage. One tensor may be in several
stages (tied embeddings); in a source it is read whole from the lowest stage that has all its blocks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from reshard.arguments import checked
from reshard.core.layout.arrangement import Arranged, Arrangement
from reshard.core.layout.block import shape_text
from reshard.core.layout.grid import grid
from reshard.core.layout.layout import Layout, foldings
from reshard.core.layout.mesh import Mesh
from reshard.errors import Faults, LayoutError, Option, StrategyError, Text, names
from reshard.upward import upward

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Unpack

    from reshard.core.layout.block import Shape
    from reshard.core.layout.grid import Grid
    from reshard.strategy.diff import Diff
    from reshard.strategy.operators import OperatorStrategy
    from reshard.strategy.rule_values import Options, Rule
    from reshard.view.svg import Picture


MOST_STAGES = 1 << 16
"""The most pipeline stages that are accepted."""

MOST_RANKS = 1 << 20
"""The most ranks, of all stages together, that are accepted."""

MERGED_NAME = re.compile(r"(\d+)-(.+)", re.DOTALL)
"""A tensor's name in a file that has several pipeline stages: the stage, a dash, the name."""


def merged_names(names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Split the names of a merged file into stages and own names.

    The result is empty if any name has no stage.

    >>> merged_names(["0-w", "1-w"]), merged_names(["0-w", "w"])
    ({'0-w': (0, 'w'), '1-w': (1, 'w')}, {})
    """
    split: dict[str, tuple[int, str]] = {}
    for name in names:
        match = MERGED_NAME.fullmatch(name)
        if match is None:
            return {}
        split[name] = int(match[1][:9]), match[2]
    return split


class Placed(NamedTuple):
    """A tensor's layout in one pipeline stage.

    Attributes:
        stage: the pipeline stage, from 0.
        layout: the layout over the devices of that stage.
        shape: the whole tensor's shape, if known.
        expanded: layout and shape may have more dimensions than the tensor: JSON writes nested entries expanded.
        unknown: unknown fields of the file, kept for writing: protobuf bytes or JSON items.
    """

    stage: int
    layout: Layout
    shape: Shape | None = None
    unknown: bytes | tuple[tuple[str, object], ...] = b""
    expanded: bool = False

    def of_dimensions(self, ndim: int) -> list[tuple[Layout, Shape | None]]:
        """Return the layouts of `ndim` dimensions that this may be, each with its shape."""
        if self.expanded and self.shape is not None:
            return [*foldings(self.layout, self.shape, ndim)]
        return [(self.layout, self.shape)] if len(self.layout.tensor_map) == ndim else []


class Operator(NamedTuple):
    """An operator's strategy, kept for writing; only its stage matters here."""

    name: str
    stage: int
    strategy: tuple[Shape, ...]
    unknown: bytes | tuple[tuple[str, object], ...] = b""


@dataclass(frozen=True, slots=True)
class Strategy:
    """The layout of each tensor in each pipeline stage that holds it.

    Attributes:
        tensors: for each tensor name, its layouts by stage, ascending.
        stages: the stages described; `range(1, 2)` for the file of one stage of a longer pipeline.
        devices: ranks in each stage.
        operators: operators' strategies, as the file gives them.
        merged: the names in the file have stage numbers, as after merging the files of a pipeline.
        current_stage: the field of the file; it has no meaning.
        unknown: unknown fields of the file, kept for writing.
        others: the pipeline is known to have more stages than `stages`: the file says so (stage 1 and higher), the
            files next to it do, or one of several stages was chosen. Ignored when strategies are compared.

    >>> strategy = Strategy.of({"w": Layout.of([4], [0, -1])})
    >>> strategy.ranks, strategy.grid("w", (8, 2)).ranks
    (range(0, 4), ((0,), (1,), (2,), (3,)))
    """

    tensors: Mapping[str, tuple[Placed, ...]]
    stages: range
    devices: int
    operators: tuple[Operator, ...] = ()
    merged: bool = False
    current_stage: int = 2
    unknown: bytes | tuple[tuple[str, object], ...] = field(default=b"")
    others: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.stages.start:
            object.__setattr__(self, "others", True)

    def __hash__(self) -> int:  # of what can be hashed: `tensors` is a dict
        return hash((frozenset(self.tensors), self.stages, self.devices))

    @classmethod
    @checked
    def of(
        cls, layouts: Mapping[str, Layout | Mapping[int, Layout]], *, shapes: Mapping[str, Shape] | None = None
    ) -> Strategy:
        """Build a strategy from layouts by name, or by name and stage.

        Raises:
            StrategyError: layouts disagree on the number of devices; each is named.
        """
        tensors = {}
        for name, value in layouts.items():
            by_stage = {0: value} if isinstance(value, Layout) else value
            shape = shapes.get(name) if shapes else None
            tensors[name] = tuple(Placed(stage, by_stage[stage], shape) for stage in sorted(by_stage))
        stages = {placed.stage for places in tensors.values() for placed in places}
        last = max(stages, default=0)
        faults = Faults("strategy")
        devices = agreed_devices(tensors, faults)
        faults.raise_if_any(StrategyError)
        return cls(tensors, range(last + 1), devices, merged=last > 0, current_stage=1 if last else 2)

    @classmethod
    def from_rules(
        cls, shapes: Mapping[str, Shape], mesh: Mapping[str, int], rules: Mapping[str, Rule], **options: Unpack[Options]
    ) -> Strategy:
        """Build the strategy of a network without compiling it, from a mesh and rules.

        Args:
            shapes: the whole shape of every tensor.
            mesh: the extents of the axes of a stage's device mesh by name, outermost first.
            rules: globs of tensor names to an entry for each dimension: an axis that splits it, several (major first),
                or None. The first match counts. Dimensions without an entry stay whole, and so do tensors that no rule
                matches. Optimizer states follow their weights. A rule of None leaves tensors out of the strategy. A
                rule may also be PyTorch's placements, one for each axis: `["shard(0)", "replicate"]`.
            options: `dtypes`, `optimizer_parallel`, `optimizer_weight_shard_size`, `parallel_optimizer_threshold`,
                `optimizer_parallel_except`, `pipeline`, `only_by_rule`, `predict`; see `strategy.rule_values.Options`.

        Raises:
            UsageError: a rule is never used, names an unknown axis, does not divide a tensor; all faults at once.

        >>> mesh = {"dp": 2, "mp": 4}
        >>> made = Strategy.from_rules({"h.0.wq.weight": (512, 256), "ln": (256,)}, mesh, {"*.wq.*": ("mp", None)},
        ...                            optimizer_parallel=True)
        >>> print(made.tensors["h.0.wq.weight"][0].layout, "|", made.tensors["ln"][0].layout)
        [2, 4] map [0, -1] opt -1 | [2, 4] map [-1]
        """
        from reshard.strategy.rules import from_rules

        layouts, whole_shapes = from_rules(shapes, mesh, rules, options)
        return cls.of(layouts, shapes=whole_shapes)

    @classmethod
    def from_operators(
        cls,
        shapes: Mapping[str, Shape],
        operators: Mapping[str, OperatorStrategy | Layout | None],
        devices: int,
        **options: Unpack[Options],
    ) -> Strategy:
        """Build the strategy of a network without compiling it, from its operators.

        Args:
            shapes: the whole shape of every tensor.
            operators: globs of parameter names to the strategy of the operator that uses them (`reshard.operators`),
                or to a layout; the first match counts. Parameters without a match are whole: their operators are cut
                along the batch.
            devices: ranks in each stage.
            options: as for `from_rules`.

        Raises:
            UsageError: a pattern is never used, a strategy does not fit a tensor; all faults at once.

        >>> from reshard.strategy.operators import matmul
        >>> layer = {"layer1.weight": (784, 512), "layer1.bias": (512,)}
        >>> made = Strategy.from_operators(layer, {"layer1.weight": matmul(((2, 1), (1, 2)))}, 8)
        >>> print(made.tensors["layer1.weight"][0].layout, "|", made.tensors["layer1.bias"][0].layout)
        [2, 2, 2] map [-1, 1] | [8] map [-1]
        """
        from reshard.strategy.rules import from_operators

        layouts, whole_shapes = from_operators(shapes, operators, devices, options)
        return cls.of(layouts, shapes=whole_shapes)

    @property
    def ranks(self) -> range:
        """Return the global numbers of the ranks of all stages."""
        return range(self.stages.start * self.devices, self.stages.stop * self.devices)

    def stage_of(self, rank: int) -> int:
        """Return the pipeline stage of a global rank."""
        return rank // self.devices

    def stages_of(self, name: str) -> tuple[int, ...]:
        """Return the stages that hold a tensor; empty if the strategy does not name it."""
        return tuple(placed.stage for placed in self.tensors.get(name, ()))

    def names_of(self, stage: int) -> list[str]:
        """Return the tensors of one stage, in the file's order."""
        return [name for name, places in self.tensors.items() if any(p.stage == stage for p in places)]

    def in_file_order(self) -> Iterator[tuple[str, Placed]]:
        """Yield the tensors of each stage under their names in the file, stage by stage."""
        for name, placed in self.by_stage():
            yield (f"{placed.stage}-{name}" if self.merged else name), placed

    def grid(self, name: str, shape: Shape, *, stage: int | None = None) -> Grid:
        """Return the blocks of a tensor and the global ranks that hold them.

        Args:
            name: a tensor that the strategy names.
            shape: the whole tensor's shape, as the files store it.
            stage: only this stage's ranks.

        Raises:
            LayoutError: the layout does not fit the shape; the message names tensor, dimension and sizes.
        """
        places = [p for p in self.tensors[name] if stage is None or p.stage == stage]
        try:
            return grid(shape, tuple((_folded_to(p, shape), p.stage * self.devices) for p in places))
        except LayoutError as error:
            raise error.about(f"tensor {name!r}") from None

    def arrangement(self, shapes: Mapping[str, Shape], faults: Faults) -> Arrangement:
        """Return the layouts and ranks of the tensors that the strategy names.

        Args:
            shapes: the whole shapes of tensors, as the files store them; tensors without a shape are left out.
            faults: collects the tensors whose layout is of another shape.
        """
        tensors = {}
        for name in self.tensors.keys() & shapes.keys():
            try:
                meshes = tuple(Mesh.of(_folded_to(p, shapes[name]), p.stage * self.devices) for p in self.tensors[name])
            except LayoutError as error:
                faults.add(f"tensor {name!r}", error)
                continue
            tensors[name] = Arranged(meshes, self.shape_of(name))
        return Arrangement(tensors, self.ranks, self.devices)

    def shape_of(self, name: str) -> Shape | None:
        """Return the whole shape of a tensor in the strategy, or None if it has no shape."""
        shapes = (placed.shape for placed in self.tensors[name] if not placed.expanded)
        return next((shape for shape in shapes if shape is not None), None)

    def whole_shape(self, name: str, shard: Shape, *, stage: int) -> Shape:
        """Return a tensor's whole shape, given the shape that the ranks of a stage store.

        Raises:
            LayoutError: the layout has another number of dimensions, or an expanded JSON layout fits two shapes.
        """
        placed = next(p for p in self.tensors[name] if p.stage == stage)
        try:
            if placed.shape is None or not placed.expanded or len(placed.layout.tensor_map) == len(shard):
                return placed.layout.full_shape(shard)
            shapes = {
                shape
                for layout, shape in foldings(placed.layout, placed.shape, len(shard))
                if layout.full_shape(shard) == shape
            }
        except LayoutError as error:
            raise error.about(f"tensor {name!r}") from None
        if len(shapes) == 1:
            return shapes.pop()
        possible = " or ".join(shape_text(shape) for shape in sorted(shapes)) or f"no shape of {len(shard)} dimensions"
        raise LayoutError(
            f"tensor {name!r}: its whole shape is unclear; the files store {shape_text(shard)}",
            code="unknown-shape",
            facts=[f"the JSON layout {placed.layout} of expanded shape {shape_text(placed.shape)} fits {possible}"],
            hint=Text("use the protobuf strategy file, or pass ", Option("layout", name, "RULE")),
        )

    def by_stage(self) -> list[tuple[str, Placed]]:
        """Return the tensors of each stage with their names, in the file's order."""
        placed = [(name, placed) for name, places in self.tensors.items() for placed in places]
        return sorted(placed, key=lambda item: item[1].stage)

    def of_stage(self, stage: int) -> Strategy:
        """Return the strategy of one stage of a pipeline.

        The strategy file of a single stage need not have its number: a file of stage 0 counts as the requested stage.

        Raises:
            StrategyError: there is no such stage.
        """
        if len(self.stages) == 1 and not self.merged and not self.stages.start:
            moved = {name: (places[0]._replace(stage=stage),) for name, places in self.tensors.items()}
            operators = tuple(operator._replace(stage=stage) for operator in self.operators)
            return replace(self, tensors=moved, stages=range(stage, stage + 1), operators=operators, others=True)
        if stage not in self.stages:
            raise StrategyError(f"the strategy has no stage {stage}; it has {names(self.stages)}", code="no-such-stage")
        here = {name: tuple(p for p in places if p.stage == stage) for name, places in self.tensors.items()}
        tensors = {name: places for name, places in here.items() if places}
        return replace(
            self,
            tensors=tensors,
            stages=range(stage, stage + 1),
            operators=tuple(operator for operator in self.operators if operator.stage == stage),
            merged=False,
            others=self.others or len(self.stages) > 1,
        )

    def with_layout(self, name: str, layout: Layout | None) -> Strategy:
        """Return a copy with another layout of a tensor, or without it (None).

        The layout is the same in every stage.

        Raises:
            StrategyError: the layout is for another number of devices.
        """
        if layout is not None and layout.devices != self.devices:
            raise StrategyError(
                f"tensor {name!r}: layout {layout} is for {layout.devices} devices; a stage has {self.devices}",
                code="devices-differ",
            )
        tensors = dict(self.tensors)
        if layout is None:
            tensors.pop(name, None)
        else:
            stages = self.stages_of(name) or tuple(self.stages)
            tensors[name] = tuple(Placed(stage, layout) for stage in stages)
        return replace(self, tensors=tensors)

    def diff(self, second: Strategy) -> Diff:
        """Compare with a second strategy: tensors that only one names, and layouts that differ.

        In a notebook the result shows both layouts of each tensor side by side.

        >>> before = Strategy.of({"w": Layout.of([4], [0, -1])})
        >>> before.diff(Strategy.of({"w": Layout.of([2, 2], [-1, 0])}))
        <Diff of two strategies: 1 with other blocks, 0 only in A, 0 only in B>
        """
        from reshard.strategy.diff import diff  # it compares strategies, too

        return diff(self, second)

    def picture(self, name: str, shape: Shape | None = None, target: Strategy | None = None) -> Picture:
        """Draw the block of each rank for a tensor, optionally next to another strategy.

        Args:
            name: a tensor that the strategies name.
            shape: the whole tensor's; by default the strategy's, else the smallest that the layouts divide.
            target: the strategy to draw next to it.

        Raises:
            UsageError: a strategy does not name the tensor.
            LayoutError: the shape does not divide.
        """
        drawn: Picture = upward("picture")(self, name, shape, target)
        return drawn

    def _repr_html_(self) -> str:
        return str(upward("html")(self))

    def __repr__(self) -> str:
        """Describe the strategy on one line.

        >>> Strategy.of({"w": Layout.of([4], [0, -1])})
        <Strategy: 1 tensor over 4 ranks>
        """
        stages = "" if len(self.stages) == 1 else f" in {len(self.stages)} pipeline stages"
        one_stage = f" (stage {self.stages.start} of a pipeline)" if self.others else ""
        count = len(self.tensors)
        return f"<Strategy: {count} tensor{'s' * (count != 1)} over {len(self.ranks)} ranks{stages}{one_stage}>"


def _folded_to(placed: Placed, shape: Shape) -> Layout:
    """Undo the expansion of JSON: return the layout with the tensor's own dimensions."""
    if placed.shape is None or not placed.expanded or len(placed.layout.tensor_map) == len(shape):
        return placed.layout
    for layout, folded in foldings(placed.layout, placed.shape, len(shape)):
        if folded == shape:
            return layout
    raise LayoutError(
        f"shape {shape_text(shape)} does not fit the JSON layout {placed.layout}",
        code="wrong-shape",
        facts=[f"its expanded shape is {shape_text(placed.shape)}"],
    )


def agreed_devices(tensors: Mapping[str, Iterable[Placed]], faults: Faults) -> int:
    """Return the number of devices in each stage; report tensors that disagree."""
    devices = 0
    for name, places in tensors.items():
        for placed in places:
            devices = devices or placed.layout.devices
            if placed.layout.devices != devices:
                faults.add(
                    f"{name}.dev_matrix",
                    f"{shape_text(placed.layout.dev_matrix)} has {placed.layout.devices} devices; "
                    f"the tensors before it have {devices}",
                    code="devices-differ",
                )
    return devices
