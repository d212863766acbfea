"""Work out the shapes of a rule: the box of each part in a fused tensor, and the file blocks they come from.

A fused tensor's axes are divided into finer ones if the rule cuts them: the rows of `linear_qkv` are groups of rows, so
that the queries of all groups are one box of `[groups, rows of a group, columns]`. The axes in front are for numbers in
names. A part has the axes of its box, some in another order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.layout.axes import position, row_major
from reshard.core.layout.block import Block, shape_text
from reshard.core.model.checkpoint import Shard
from reshard.core.model.entries import Extent
from reshard.core.model.reshape import laid, shards_in
from reshard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import Tensor


_SIZES_HINT = "give the number of rows of each part in `sizes`"


class FusedPart(NamedTuple):
    """A part of a fused tensor.

    Attributes:
        region: its box in `FusedLayout.space`, without the axes in front.
        order: for each of its axes, the index of that axis in the region.
        axes: for each of its dimensions, how many consecutive axes it consists of.
    """

    region: Block
    order: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def space(self) -> Shape:
        """Return the extents of the part's axes."""
        return tuple(self.region.shape[axis] for axis in self.order)

    @property
    def shape(self) -> Shape:
        """Return the part's shape as a tensor."""
        extents = iter(self.space)
        return tuple(prod(next(extents) for _ in range(count)) for count in self.axes)


@dataclass(frozen=True, slots=True)
class FusedLayout:
    """The axes of a fused tensor, and the boxes of its parts.

    Attributes:
        front: the extents of the axes for numbers in names.
        space: the extents of the other axes.
        axes: for each dimension after the axes in front, how many axes in `space` it consists of.
        flat: the axes in front and the first dimension are one.
        parts: the parts at one index of the axes in front.
        padding: the box that belongs to no part.
        at: the dimension at which the axes in front are, if others are before them.
    """

    front: Shape
    space: Shape
    axes: tuple[int, ...]
    flat: bool
    parts: tuple[FusedPart, ...]
    padding: Block | None = None
    at: int = 0

    @property
    def shape(self) -> Shape:
        """Return the shape of the fused tensor."""
        extents = iter(self.space)
        body = tuple(prod(next(extents) for _ in range(count)) for count in self.axes)
        if self.flat:
            return (prod(self.front) * body[0], *body[1:])
        return (*body[: self.at], *self.front, *body[self.at :])

    @property
    def whole_space(self) -> Shape:
        """Return the extents of all axes, with those in front at their place."""
        return self.joined(self.front, self.space)

    def joined(self, front: Iterable[int], body: Sequence[int]) -> Shape:
        """Return numbers for all axes, from those for the axes in front and those for the other axes."""
        first = sum(self.axes[: self.at])
        return (*body[:first], *front, *body[first:])

    def divided(self, numbers: Shape) -> tuple[Shape, Shape]:
        """Return the numbers for the axes in front, and those for the other axes."""
        first = sum(self.axes[: self.at])
        last = first + len(self.front)
        return numbers[first:last], (*numbers[:first], *numbers[last:])


class AxisCut(NamedTuple):
    """The numbers by which a rule cuts one axis of a fused tensor.

    Attributes:
        axis: the index of the axis, not counting the axes in front.
        interleaved: each group has some rows of every part; otherwise the parts are consecutive.
        sizes: the rows of each part, in a group or in all; None if the rule has none: then the parts must be equal, and
            a split into more than two is refused (except `interleaved` without `groups`).
        groups: the number of groups; None if the rule has none.
        halves: for a single part, the number of pieces in each group, whose rows are interleaved; else 0.
        pads: the tensor is a padded part.
        size, padded: the number of rows without and with padding; None if the rule has none.
        multiple: the number that the padded rows are a multiple of, if the rule pads so.
        rows, columns: of a matrix that is transposed, the axes of the tensor that its rows and columns are, each with
            its extent, if known; empty for one axis.
    """

    axis: int = 0
    interleaved: bool = False
    sizes: tuple[int, ...] | None = None
    groups: int | None = None
    halves: int = 0
    pads: bool = False
    size: int | None = None
    padded: int | None = None
    multiple: int | None = None
    rows: tuple[int | None, ...] = ()
    columns: tuple[int | None, ...] = ()


def of_parts(
    shapes: Sequence[Shape], cut: AxisCut, front: Shape, *, flat: bool, transposed: bool, at: int = 0
) -> FusedLayout:
    """Return the layout of a fused tensor, given the shapes of its parts.

    Args:
        shapes: the shapes of the parts.
        cut: the cut of the fused tensor.
        front: the extents of the axes in front.
        flat: the axes in front and the first dimension are one.
        transposed: the last two dimensions of the parts are swapped.
        at: the dimension at which the axes in front are.

    Raises:
        SourceError: the parts do not fit together; the message is a predicate.
    """
    if cut.rows or cut.columns:
        return _matrix(_axes_of_matrix(shapes[0], cut), cut, front, at, flat=flat)
    bodies = [_turned(shape, transposed=transposed) for shape in shapes]
    axis = _axis(cut.axis, bodies[0])
    rest = {(*body[:axis], *body[axis + 1 :]) if body else () for body in bodies}
    if len(rest) > 1 or len({len(body) for body in bodies}) > 1:
        raise SourceError(
            f"has parts of {' and '.join(map(shape_text, shapes))}, which differ in more than one axis",
            code="wrong-shape",
        )
    rows = tuple(body[axis] if body else 1 for body in bodies)
    layout = _fused_layout(bodies[0], rows, None, len(rows), cut, front, flat=flat, transposed=transposed)
    return _moved(layout, at)


def of_fused(
    shape: Shape, count: int, cut: AxisCut, front: Sequence[int | None], *, flat: bool, transposed: bool, at: int = 0
) -> FusedLayout:
    """Return the layout of a fused tensor, given its own shape.

    Args:
        shape: its shape.
        count: the number of its parts.
        cut: the cut of the tensor.
        front: the extents of the axes in front; None to take an extent from the shape.
        flat: as for `of_parts`.
        transposed: as for `of_parts`.
        at: as for `of_parts`.

    Raises:
        SourceError: it cannot be split; the message is a predicate.
    """
    if flat:
        extents = [number for number in front if number is not None]
        if len(extents) < len(front):
            hint = "give the counts in `by`"
            raise SourceError("merges the axes in front with its rows", code="unknown-count", hint=hint)
        if not shape or not prod(extents) or shape[0] % prod(extents):
            raise SourceError(
                f"is {shape_text(shape)}; its rows do not split into {prod(extents)} equal parts", code="not-divisible"
            )
        body: Shape = (shape[0] // prod(extents), *shape[1:])
    else:
        if len(shape) < at + len(front):
            raise SourceError(f"is {shape_text(shape)}; expected {at + len(front)} axes", code="wrong-shape")
        extents = list(shape[at : at + len(front)])
        if any(count not in {None, extent} for count, extent in zip(front, extents, strict=True)):
            expected = shape_text(n or 0 for n in front)
            place = f"from dimension {at} on" if at else "in front"
            raise SourceError(f"is {shape_text(shape)}; expected {expected} {place}", code="wrong-shape")
        body = (*shape[:at], *shape[at + len(front) :])
    if cut.rows or cut.columns:
        return _matrix(body, cut, tuple(extents), at, flat=flat)
    axis = _axis(cut.axis, body)
    total = body[axis] if body else 1
    layout = _fused_layout(body, None, total, count, cut, tuple(extents), flat=flat, transposed=transposed)
    return _moved(layout, at)


def _moved(layout: FusedLayout, at: int) -> FusedLayout:
    """Return a layout with the axes in front at a dimension."""
    if at > len(layout.axes):
        raise SourceError(f"has no dimension {at} for the axes in front", code="out-of-range")
    return replace(layout, at=at)


def _axes_of_matrix(shape: Shape, cut: AxisCut) -> Shape:
    """Return the extents of the axes that a matrix is as a tensor: those of its columns, then those of its rows."""
    if len(shape) != 2:
        raise SourceError(f"is {shape_text(shape)}; expected a matrix", code="wrong-dimensions")
    axes: list[int] = []
    for word, extent, parts in (("columns", shape[1], cut.columns), ("rows", shape[0], cut.rows)):
        known = [part for part in parts or (extent,) if part is not None]
        if len(known) < len(parts):
            raise SourceError("needs the extents of axes", code="missing-size", hint=f"add config.json or `{word}`")
        if prod(known) != extent:
            raise SourceError(f"has {extent} {word}; the rule says {shape_text(known)}", code="row-mismatch")
        axes += known
    return tuple(axes)


def _matrix(body: Shape, cut: AxisCut, front: Shape, at: int, *, flat: bool) -> FusedLayout:
    """Return the layout of a tensor whose one part is a matrix: its first axes are columns, the others rows."""
    declared = (*(cut.columns or (None,)), *(cut.rows or (None,)))
    columns, rows = len(cut.columns) or 1, len(cut.rows) or 1
    if len(body) != len(declared) or any(a not in {None, b} for a, b in zip(declared, body, strict=True)):
        expected = ", ".join("any" if extent is None else str(extent) for extent in declared)
        raise SourceError(f"has axes {shape_text(body)}; expected {expected}", code="wrong-shape")
    order, space, axes = [*range(columns, columns + rows), *range(columns)], body, [1] * len(body)
    if cut.halves:
        if body[-1] % cut.halves:
            raise SourceError(f"has {body[-1]} rows, which are not {cut.halves} equal pieces", code="not-divisible")
        space, axes[-1] = (*body[:-1], body[-1] // cut.halves, cut.halves), 2
        order.insert(rows - 1, len(body))  # the pieces before the rows of each
        rows += 1
    part = FusedPart(Block.whole(space), tuple(order), (rows, columns))
    return _moved(FusedLayout(front, space, tuple(axes), flat, (part,)), at)


def _turned(shape: Shape, *, transposed: bool) -> Shape:
    if not transposed:
        return shape
    if len(shape) < 2:
        raise SourceError(f"is {shape_text(shape)}; to transpose, two dimensions are needed", code="wrong-dimensions")
    return (*shape[:-2], shape[-1], shape[-2])


def _axis(axis: int, body: Shape) -> int:
    number = axis + len(body) if axis < 0 else axis
    if not 0 <= number < max(len(body), 1):
        raise SourceError(f"is {shape_text(body)} and has no axis {axis}", code="out-of-range")
    return number


def _fused_layout(
    body: Shape, rows: Shape | None, total: int | None, count: int, cut: AxisCut, front: Shape, *, flat: bool,
    transposed: bool,
) -> FusedLayout:  # fmt: skip
    """Return a layout, given the rows of each part, or in total, along the cut axis."""
    if not body:
        if count > 1 or cut.pads or cut.halves or flat:
            raise SourceError("consists of single numbers, which have no rows", code="wrong-dimensions")
        return FusedLayout(front, (), (), flat, (FusedPart(Block((), ()), (), ()),))
    axis = _axis(cut.axis, body)
    extents, spans, padding = _of_axis(rows, total, count, cut)

    def box(span: _Span) -> Block:
        start, stop = span
        before, after = (0,) * axis, (0,) * (len(body) - axis - 1)
        return Block((*before, *start, *after), (*body[:axis], *stop, *body[axis + 1 :]))

    axes = tuple(len(extents) if dim == axis else 1 for dim in range(len(body)))
    ends = list(accumulate(axes, initial=0))
    of_dims = [list(range(a, b)) for a, b in pairwise(ends)]
    if cut.halves:
        groups, within, pieces = of_dims[axis]
        of_dims[axis] = [groups, pieces, within]
    if transposed:
        of_dims[-2:] = of_dims[:-3:-1]
    order = tuple(n for part_axes in of_dims for n in part_axes)
    parts = tuple(FusedPart(box(span), order, tuple(map(len, of_dims))) for span in spans)
    space = (*body[:axis], *extents, *body[axis + 1 :])
    return FusedLayout(front, space, axes, flat, parts, padding and box(padding))


_Span = tuple["Shape", "Shape"]


def _of_axis(
    rows: Shape | None, total: int | None, count: int, cut: AxisCut
) -> tuple[Shape, list[_Span], _Span | None]:
    """Divide the cut axis into finer axes.

    Returns:
        the extents of these axes, the range of each part along them, and the range of the padding.
    """
    if cut.pads:
        return _padded(rows[0] if rows else None, total, cut)
    if cut.halves:
        total = rows[0] if rows else total or 0
        if not cut.groups or total % (cut.groups * cut.halves):
            raise SourceError(
                f"has {total} rows, which do not split into {cut.groups} groups of {cut.halves} equal pieces",
                code="not-divisible",
            )
        extents = (cut.groups, total // cut.groups // cut.halves, cut.halves)
        return extents, [((0, 0, 0), extents)], None
    groups, sizes = _shares(rows, total, count, cut)
    ends = list(accumulate(sizes))
    begins = [end - size for end, size in zip(ends, sizes, strict=True)]
    if groups == 1:
        return (ends[-1],), [((a,), (b,)) for a, b in zip(begins, ends, strict=True)], None
    return (groups, ends[-1]), [((0, a), (groups, b)) for a, b in zip(begins, ends, strict=True)], None


def _padded(rows: int | None, total: int | None, cut: AxisCut) -> tuple[Shape, list[_Span], _Span | None]:
    size = cut.size if rows is None else rows
    if size is None:
        raise SourceError("is padded", code="missing-size", hint="set `size` to the number of rows without padding")
    if cut.size not in {None, size}:
        raise SourceError(f"has {size} rows; the rule says {cut.size}", code="row-mismatch")
    if total is None:
        total = -(-size // cut.multiple) * cut.multiple if cut.multiple else cut.padded
    if total is None:
        raise SourceError(
            "needs padding", code="missing-size", hint="set `to` or `multiple`, the padded number of rows"
        )
    if total < size:
        raise SourceError(f"has {size} rows without padding and {total} with it", code="row-mismatch")
    if cut.padded not in {None, total}:
        raise SourceError(f"has {total} rows with padding; the rule says {cut.padded}", code="row-mismatch")
    return (total,), [((0,), (size,))], ((size,), (total,)) if size < total else None


def _shares(rows: Shape | None, total: int | None, count: int, cut: AxisCut) -> tuple[int, tuple[int, ...]]:
    """Return the number of groups, and the rows of each part in a group."""
    sizes, groups = cut.sizes, cut.groups if cut.interleaved else 1
    if sizes is not None and (len(sizes) != count or min(sizes) < 1):
        raise SourceError(
            f"has sizes {shape_text(sizes)} for {count} parts; expected one of at least 1 for each", code="wrong-count"
        )
    if rows:
        if sizes is None and len(set(rows)) > 1:  # splitting them again would make equal parts
            raise SourceError(
                f"has parts of {' and '.join(map(str, rows))} rows, which are not equal", code="missing-sizes",
                hint=_SIZES_HINT,
            )  # fmt: skip
        if sizes is None and groups is None:
            sizes = (1,) * count  # row by row
        if groups is None:
            groups = rows[0] // sizes[0] if sizes else 1
        if sizes is None:
            sizes = tuple(-(-part_rows // groups) for part_rows in rows) if groups else ()
        if [groups * size for size in sizes] != [*rows]:
            raise SourceError(
                f"has parts of {shape_text(rows)} rows, which are not {groups} groups of {shape_text(sizes)}",
                code="row-mismatch",
            )
        return groups, sizes
    total = total or 0
    if sizes is None:
        if count > 2 and not (cut.interleaved and groups is None):
            raise SourceError(
                f"has {count} parts in {total} rows, which need not be equal", code="missing-sizes", hint=_SIZES_HINT
            )
        group_rows = count if groups is None else total // groups
        if group_rows % count:
            raise SourceError(
                f"has {total} rows, which do not split into {count} equal parts", code="not-divisible", hint=_SIZES_HINT
            )
        sizes = (group_rows // count,) * count
    if groups is None:
        groups = total // sum(sizes)
    if groups * sum(sizes) != total:
        raise SourceError(
            f"has {total} rows; {groups} groups of {shape_text(sizes)} have {groups * sum(sizes)}", code="row-mismatch"
        )
    return groups, sizes


# --- blocks of a fused tensor and of its parts


def indices(extents: Shape) -> Iterator[Shape]:
    """Yield all indices one by one: there may be too many for a list."""
    if not extents:
        yield ()
        return
    for first in range(extents[0]):
        for rest in indices(extents[1:]):
            yield (first, *rest)


def pieces(layout: FusedLayout, shard: Shard, itemsize: int) -> Iterator[tuple[Shape, int, Shard]]:
    """Yield the pieces of a fused tensor's block that belong to its parts.

    Each comes with its index along the axes in front and the number of the part.
    """
    block = shard.block
    (front_start, body_start), (front_stop, body_stop) = layout.divided(block.start), layout.divided(block.stop)
    for number, part in enumerate(layout.parts):
        body = Block(body_start, body_stop) & part.region
        if body is None:
            continue
        start, stop = ([at[axis] - part.region.start[axis] for axis in part.order] for at in (body.start, body.stop))
        box = Block(tuple(start), tuple(stop))
        steps = row_major(block.shape)
        for index in product(*map(range, front_start, front_stop)):
            corner = layout.joined(index, body.start)
            replicas = []
            for at in shard.replicas:
                strides = at.strides or steps
                begin = position(corner, block.start, strides)
                body_strides = layout.divided(strides)[1]
                piece_strides = tuple(body_strides[axis] for axis in part.order)
                replicas.append(laid(at, begin * itemsize, box.shape, piece_strides, itemsize))
            yield index, number, Shard(box, tuple(replicas))


def placed(layout: FusedLayout, tensor: Tensor, index: Shape, part: FusedPart) -> Iterator[Shard]:
    """Yield the blocks of a part as blocks of the fused tensor, at an index of the axes in front."""
    after = tuple(n + 1 for n in index)
    itemsize = tensor.spec.dtype.itemsize
    for block, replicas in shards_in(tensor, part.space):
        start, stop = list(part.region.start), list(part.region.stop)
        for axis, a, b in zip(part.order, block.start, block.stop, strict=True):
            start[axis], stop[axis] = part.region.start[axis] + a, part.region.start[axis] + b
        box = Block(layout.joined(index, start), layout.joined(after, stop))
        placed_replicas = []
        for at in replicas:
            strides = dict(zip(part.order, at.strides or row_major(block.shape), strict=True))
            fused_strides = layout.joined((1,) * len(index), [strides[axis] for axis in range(len(start))])
            placed_replicas.append(laid(at, 0, box.shape, fused_strides, itemsize))
        yield Shard(box, tuple(placed_replicas))


def zeros(layout: FusedLayout, padding: Block, index: Shape) -> Shard:
    """Return a block of padding, at an index of the axes in front."""
    after = tuple(n + 1 for n in index)
    return Shard(Block(layout.joined(index, padding.start), layout.joined(after, padding.stop)), (Extent(0, ()),))
