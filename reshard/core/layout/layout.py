"""Layouts: which block of a tensor each rank of one pipeline stage holds.

The rules (MindSpore's, checked against MindSpore 2.10 on hundreds of random layouts):

1. A rank has row-major coordinates in the device matrix D.
2. A tensor-map value t >= 0 means device axis `len(D) - 1 - t`; -1 means that the dimension is not split. An entry
   may name several axes, major first. A dimension of size n that is split k ways gives each coordinate an equal
   block of n / k.
3. Optimizer sharding of size s splits the rank's block again along dimension 0. Take the device axes that the
   tensor map leaves unused, in order; p is the rank's row-major position among them and R their product (s = -1
   means R). The rank holds piece `p mod s` of s equal pieces.
4. Ranks that hold the same block are replicas of each other.

All functions here are pure. The grid of a layout over a shape is cached, because a model of ten thousand tensors has
a few dozen distinct pairs of layout and shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import comb, lcm, prod
from operator import index
from typing import TYPE_CHECKING

from reshard.arguments import checked
from reshard.core.layout.block import is_possible, shape_text
from reshard.core.layout.grid import MOST_DEVICES, grid, map_text
from reshard.errors import LayoutError, UsageError
from reshard.spelling import did_you_mean
from reshard.upward import upward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.layout.grid import Axes, Grid
    from reshard.view.svg import Picture

_MOST_AXES = 64

_MOST_FOLDINGS = 1000


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of one tensor over the devices of a stage, as in a strategy file.

    Attributes:
        dev_matrix: the extents of the device axes, outermost first.
        tensor_map: for each dimension, the tensor-map values of the axes that split it, major first; `()` if it is
            not split. `Layout.of` takes the flat form with -1 too.
        opt_weight_shard_size: 0 without optimizer sharding, -1 for all unused devices, else the number of pieces.
        opt_weight_shard_step: as the file gave it; not needed to read (see `shard_step`).
        param_split_shape: uneven sizes of dimension 0, one for each slice index; empty if slices are equal.
        indices_offset: kept for the file; it moves no bytes.
        field: the number of fields whose rows are interleaved over the devices; 0 if none. Kept, and refused by `grid`.

    Raises:
        LayoutError: an axis out of range or used twice, an empty or absurd device matrix.

    >>> rows = Layout.of([2, 4], [1, -1])
    >>> [str(block) for block in rows.grid((8, 6)).blocks]
    ['[0:4, 0:6]', '[4:8, 0:6]']
    >>> rows.grid((8, 6)).ranks
    ((0, 1, 2, 3), (4, 5, 6, 7))
    """

    dev_matrix: Shape
    tensor_map: tuple[Axes, ...]
    opt_weight_shard_size: int = 0
    opt_weight_shard_step: int = 0
    param_split_shape: Shape = ()
    indices_offset: Shape = ()
    field: int = field(default=0)

    def __post_init__(self) -> None:
        for kind, entries in (("dev_matrix", self.dev_matrix), ("tensor_map", self.tensor_map)):
            if len(entries) > _MOST_AXES:
                raise LayoutError(
                    f"{kind} has {len(entries)} entries; at most {_MOST_AXES} are possible", code="too-large"
                )
        if not self.dev_matrix or any(extent < 1 for extent in self.dev_matrix):
            raise LayoutError(
                f"dev_matrix is {shape_text(self.dev_matrix)}; expected extents of at least 1", code="out-of-range"
            )
        if prod(self.dev_matrix) > MOST_DEVICES:
            raise LayoutError(
                f"dev_matrix {shape_text(self.dev_matrix)} has more than {MOST_DEVICES} devices", code="too-large"
            )
        used: set[int] = set()
        for dim, axes in enumerate(self.tensor_map):
            for value in axes:
                if not 0 <= value < len(self.dev_matrix):
                    raise LayoutError(
                        f"tensor_map[{dim}] is {value}; expected -1 to {len(self.dev_matrix) - 1} "
                        f"for dev_matrix {shape_text(self.dev_matrix)}",
                        code="out-of-range",
                    )
                if value in used:
                    raise LayoutError(f"tensor_map[{dim}] repeats the value {value}", code="repeated-axis")
                used.add(value)
        if self.opt_weight_shard_size < -1:
            raise LayoutError(
                f"opt_weight_shard_size is {self.opt_weight_shard_size}; expected -1 or more", code="out-of-range"
            )

    @classmethod
    def of(
        cls,
        dev_matrix: Iterable[int],
        tensor_map: Iterable[int | Iterable[int]],
        opt_weight_shard_size: int = 0,
        *,
        opt_weight_shard_step: int | None = None,
        param_split_shape: Iterable[int] = (),
        indices_offset: Iterable[int] = (),
        field: int = 0,
    ) -> Layout:
        """Build a layout from a strategy file's numbers, in which -1 means not split.

        >>> Layout.of([2, 2, 2], [(1, 0), -1]).tensor_map
        ((1, 0), ())
        """
        try:
            axes = tuple(
                tuple(index(value) for value in (entry if isinstance(entry, Iterable) else (entry,)) if value != -1)
                for entry in tensor_map
            )
            layout = cls(
                tuple(map(index, dev_matrix)), axes, index(opt_weight_shard_size), index(opt_weight_shard_step or 0),
                tuple(map(index, param_split_shape)), tuple(map(index, indices_offset)), index(field),
            )  # fmt: skip
        except TypeError:  # checked only now, since there are layouts by the thousand
            raise UsageError(
                f"dev_matrix is {dev_matrix!r:.60} and tensor_map {tensor_map!r:.60}; expected lists of whole numbers",
                code="bad-argument",
            ) from None
        if opt_weight_shard_step is None:
            layout = replace(layout, opt_weight_shard_step=layout.shard_step())
        return layout

    @classmethod
    @checked
    def parse(cls, rule: str, ndim: int, devices: int) -> Layout:
        """Parse the text of a rule, as in the argument `layouts` of `reshard.open`.

        Args:
            rule: `whole` (every rank holds it all), `split:DIM` (evenly over all devices along a dimension), or
                `DEV_MATRIX:TENSOR_MAP[:OPT_SIZE]` in a strategy file's numbers, nested entries joined by `+`.
            ndim: dimensions of the tensor.
            devices: ranks in a stage.

        Raises:
            LayoutError: the rule has another form.

        >>> print(Layout.parse("split:1", 2, 8)), print(Layout.parse("2,2,2:1+0,-1:-1", 2, 8))
        [8] map [-1, 0]
        [2, 2, 2] map [(1, 0), -1] opt -1
        (None, None)
        """
        kind, *rest = rule.split(":")
        try:
            if kind == "whole" and not rest:
                return whole(ndim, devices)
            if kind == "split" and len(rest) == 1 and 0 <= int(rest[0]) < ndim:
                return cls.of([devices], [0 if dim == int(rest[0]) else -1 for dim in range(ndim)])
            if 1 <= len(rest) <= 2 and kind != "split":
                entries = [[int(value) for value in entry.split("+")] for entry in rest[0].split(",") if rest[0]]
                return cls.of([int(n) for n in kind.split(",")], entries, *map(int, rest[1:]))
        except LayoutError as error:
            raise error.about(f"rule {rule!r}") from None
        except ValueError as error:
            raise LayoutError(
                f"rule {rule!r} has no number where one is expected", code="bad-rule", facts=[str(error)]
            ) from None
        raise LayoutError(
            f"{rule!r} is not a rule for a tensor of {ndim} dimensions",
            code="bad-rule",
            hint=did_you_mean(rule, ["whole", "copy", *(f"split:{dim}" for dim in range(ndim))])
            or "use whole, split:DIM or DEV_MATRIX:TENSOR_MAP[:OPT_SIZE] such as 2,4:1,-1 (+ joins nested entries)",
        )

    @property
    def rule(self) -> str:
        """Return it as a rule, as `parse` takes it.

        >>> Layout.of([2, 4], [(1, 0), -1], -1).rule
        '2,4:1+0,-1:-1'
        """
        entries = ("+".join(map(str, axes)) if axes else "-1" for axes in self.tensor_map)
        parts = [",".join(map(str, self.dev_matrix)), ",".join(entries)]
        return ":".join([*parts, *([str(self.opt_weight_shard_size)] if self.opt_weight_shard_size else [])])

    @property
    def devices(self) -> int:
        """Return the number of ranks in the stage."""
        return prod(self.dev_matrix)

    def axis_extent(self, value: int) -> int:
        """Return the extent of the device axis that a tensor-map value names."""
        return self.dev_matrix[len(self.dev_matrix) - 1 - value]

    @property
    def unused_axes(self) -> Axes:
        """Return the indices in `dev_matrix` of unused axes, outermost first."""
        used = {len(self.dev_matrix) - 1 - value for axes in self.tensor_map for value in axes}
        return tuple(axis for axis in range(len(self.dev_matrix)) if axis not in used)

    @property
    def optimizer_shards(self) -> int:
        """Return the number of pieces of a block after optimizer sharding; 1 without it.

        Raises:
            LayoutError: the size does not divide the number of replicas.
        """
        if self.opt_weight_shard_size == 0:
            return 1
        replicas = prod(self.dev_matrix[axis] for axis in self.unused_axes)
        size = replicas if self.opt_weight_shard_size == -1 else self.opt_weight_shard_size
        if replicas % size:
            raise LayoutError(
                f"opt_weight_shard_size {size} does not divide the {replicas} devices that share a block",
                code="not-divisible",
                facts=[f"dev_matrix {shape_text(self.dev_matrix)}, tensor_map {map_text(self.tensor_map)}"],
            )
        return size

    @property
    def splits(self) -> Shape:
        """Return the number of parts of each dimension, optimizer sharding included."""
        ways = [prod(self.axis_extent(value) for value in axes) for axes in self.tensor_map]
        if ways:
            ways[0] *= self.optimizer_shards
        return tuple(ways)

    def folded(self) -> Layout:
        """Return an equivalent layout without optimizer sharding, as in MindSpore.

        Every device holds the same block under both. The unused device axes are added to the axes of dimension 0. If
        there are fewer pieces than devices, the first unused axes stay unused, so that their devices go on sharing a
        block; an axis that is needed in part is cut in two.

        Raises:
            LayoutError: no device axis can be split in two to give this number of pieces.

        Source: MindSpore 2.10 `parallel/strategy.py` (`_layout_process`).

        >>> print(Layout.of([2, 2], [0, -1], -1).folded(), Layout.of([8], [-1], 2).folded())
        [2, 2] map [(0, 1), -1] [4, 2] map [0]
        """
        matrix = list(self.dev_matrix)
        axes_of = [[len(matrix) - 1 - value for value in axes] for axes in self.tensor_map]
        sharing = prod(matrix[axis] for axis in self.unused_axes) // self.optimizer_shards
        for axis in self.unused_axes if self.optimizer_shards > 1 else ():
            at = axis + len(matrix) - len(self.dev_matrix)
            if sharing == 1:
                axes_of[0].append(at)
            elif not sharing % matrix[at]:
                sharing //= matrix[at]
            elif not matrix[at] % sharing:
                matrix[at : at + 1] = [sharing, matrix[at] // sharing]
                axes_of = [[number + (number > at) for number in axes] for axes in axes_of]
                axes_of[0].append(at + 1)
                sharing = 1
            else:
                raise LayoutError(
                    f"the optimizer cuts {self.optimizer_shards} pieces; no device axis of {self} can be split in two "
                    "to give this number",
                    code="unsupported-layout",
                )
        depth = len(matrix) - 1
        return replace(
            self, dev_matrix=tuple(matrix), tensor_map=tuple(tuple(depth - axis for axis in axes) for axes in axes_of),
            opt_weight_shard_size=0, opt_weight_shard_step=0,
        )  # fmt: skip

    def shard_step(self) -> int:
        """Return the `opt_weight_shard_step` that MindSpore writes.

        This is the stride of the ranks that share a block.

        It is (last - first) // (n - 1) over the ranks that share the block before optimizer sharding; true of
        all 2,764 such layouts that MindSpore 2.10 compiled for our test data.
        """
        if self.opt_weight_shard_size == 0:
            return 0
        extents = [self.dev_matrix[axis] for axis in self.unused_axes]
        count = prod(extents)
        if count == 1:
            return 0
        strides = [prod(self.dev_matrix[axis + 1 :]) for axis in self.unused_axes]
        last = sum((extent - 1) * stride for extent, stride in zip(extents, strides, strict=True))
        return last // (count - 1)

    def full_shape(self, shard: Shape) -> Shape:
        """Return the shape of the whole tensor, given the shape that each rank stores.

        Raises:
            LayoutError: the shard has another number of dimensions than the layout.

        >>> Layout.of([2, 4], [0, 1]).full_shape((2, 8))
        (8, 16)
        """
        if len(shard) != len(self.tensor_map):
            raise LayoutError(
                f"the files store {len(shard)} dimensions {shape_text(shard)}, "
                f"the layout has {len(self.tensor_map)} (tensor_map {map_text(self.tensor_map)})",
                code="wrong-dimensions",
            )
        whole = tuple(extent * ways for extent, ways in zip(shard, self.splits, strict=True))
        if self.param_split_shape:
            whole = (sum(self.param_split_shape), *whole[1:])
        if not is_possible(whole):
            raise LayoutError(
                f"the files store {shape_text(shard)}, which makes no possible array by the layout {self}",
                code="bad-shape",
            )
        return whole

    def grid(self, shape: Shape) -> Grid:
        """Return the blocks of a tensor of this shape, with stage-local ranks from 0.

        Raises:
            LayoutError: a size does not divide, or the layout interleaves rows (`field`).
        """
        return grid(shape, ((self, 0),))

    def picture(self, shape: Shape | None = None, target: Layout | None = None) -> Picture:
        """Draw the block of each rank, optionally next to another layout.

        Args:
            shape: the whole tensor's; by default the smallest that the layouts divide, in units of blocks.
            target: the layout to draw next to it.

        Raises:
            LayoutError: the shape does not divide, or the layouts have different numbers of dimensions.
        """
        drawn: Picture = upward("picture")(self, shape, target)
        return drawn

    def _repr_html_(self) -> str:
        return str(upward("html")(self))

    def __str__(self) -> str:
        """Write the layout on one line.

        >>> print(Layout.of([2, 4], [(1, 0), -1], -1))
        [2, 4] map [(1, 0), -1] opt -1
        """
        text = f"{shape_text(self.dev_matrix)} map {map_text(self.tensor_map)}"
        return text + (f" opt {self.opt_weight_shard_size}" if self.opt_weight_shard_size else "")


def whole(ndim: int, devices: int = 1) -> Layout:
    """Return the layout of a tensor that every device holds whole.

    >>> whole(2, 4).grid((3, 3)).ranks
    ((0, 1, 2, 3),)
    """
    return Layout((devices,), ((),) * ndim)


def least_shape(layouts: Sequence[Layout]) -> Shape:
    """Return the smallest shape that all layouts divide evenly.

    Raises:
        LayoutError: they have different numbers of dimensions.

    >>> least_shape([Layout.of([2, 4], [1, 0]), Layout.of([3, 2], [1, -1])])
    (6, 4)
    """
    if len({len(layout.tensor_map) for layout in layouts}) > 1:
        dims = " and ".join(str(len(layout.tensor_map)) for layout in layouts)
        raise LayoutError(
            f"the layouts are for {dims} dimensions", code="wrong-dimensions", hint="give the layouts of one tensor"
        )
    shape = [lcm(*ways) for ways in zip(*(layout.splits for layout in layouts), strict=True)]
    uneven = [sum(layout.param_split_shape) for layout in layouts if layout.param_split_shape]
    if uneven:
        shape[0] = uneven[0]
    return tuple(shape)


def foldings(layout: Layout, shape: Shape, ndim: int) -> list[tuple[Layout, Shape]]:
    """Return the layouts of `ndim` dimensions that an expanded one may represent.

    Each comes with its shape. MindSpore's JSON files write a nested entry expanded: all but its last axis become a
    dimension of exactly the axis's size, so that `[784, 512]` with entries `[-1, (1, 0)]` appears as shape
    `[784, 2, 256]`, map `[-1, 1, 0]`. Such a dimension may also be a real one; the caller has to decide.

    >>> [(str(folded), shape) for folded, shape in foldings(Layout.of([2, 2, 2], [-1, 1, 0]), (784, 2, 256), 2)]
    [('[2, 2, 2] map [-1, (1, 0)]', (784, 512))]
    """
    binds_right = [
        dim
        for dim in range(len(shape) - 1)
        if len(layout.tensor_map[dim]) == 1
        and layout.tensor_map[dim + 1]
        and layout.axis_extent(layout.tensor_map[dim][0]) == shape[dim]
    ]
    if len(shape) < ndim:
        return []
    if comb(len(binds_right), len(shape) - ndim) > _MOST_FOLDINGS:
        raise LayoutError(
            f"an expanded layout of {len(shape)} dimensions can be folded in too many ways", code="too-large"
        )
    candidates = []
    for chosen in combinations(binds_right, len(shape) - ndim):
        axes: list[Axes] = []
        sizes: list[int] = []
        open_group = False
        for dim, (entry, extent) in enumerate(zip(layout.tensor_map, shape, strict=True)):
            if open_group:
                axes[-1] += entry
                sizes[-1] *= extent
            else:
                axes.append(entry)
                sizes.append(extent)
            open_group = dim in chosen
        candidates.append((replace(layout, tensor_map=tuple(axes)), tuple(sizes)))
    return candidates
