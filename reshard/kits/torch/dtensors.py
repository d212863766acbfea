"""Read pickled tensors of PyTorch: plain tensors, and one rank's parts of DTensors.

The blocks of a part follow from the placements, the mesh, and the coordinates of the rank in the mesh; the shape of the
part is compared with them. Classes move and change between versions of PyTorch, so they are recognized by name, and
read by the names of their fields:

* the ranks of a mesh, row by row: `_flatten_rank_map` and a layout whose axes have a shape and strides (since 2.10), or
  `_flatten_mesh_list` and the shape of the tensor `mesh` (before);
* the placement on each axis of the mesh: `placements`, each a `Shard`, `_StridedShard` or `Replicate`.

Sources: `_dtensor_spec.py`, `placement_types.py`, `device_mesh.py` and `_mesh_layout.py` of PyTorch 2.4, 2.6, 2.9 and
2.13, and files that 2.13 wrote (`tests/data/dcp`).
"""

from __future__ import annotations

from itertools import accumulate, islice, product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.layout.axes import row_major
from reshard.core.layout.block import MOST_DIMS, Block, is_possible, shape_text
from reshard.core.layout.placements import DimShard, device_ranges
from reshard.errors import LayoutError, SourceError
from reshard.kits.torch.pickles import Name, PickledObject, describe, numbers
from reshard.kits.torch.tensors import arguments_of, rebuilt, without_parameter
from reshard.strategy.names import ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from reshard.core.layout.block import Shape
    from reshard.core.layout.placements import Placement
    from reshard.kits.torch.tensors import Rebuilt

_MOST_BLOCKS = 1 << 10  # of a rank's part of a tensor
_MOST_MESHES = 1 << 8
_SUBCLASS = ("_rebuild_from_type_v2", "_rebuild_wrapper_subclass")


class DeviceMesh(NamedTuple):
    """The ranks of a layout: the extents of the axes, outermost first, and the ranks row by row."""

    extents: Shape
    ranks: tuple[int, ...]


class Spec(NamedTuple):
    """The layout of a DTensor: the shape of the whole, the mesh, and the placement on each of its axes."""

    shape: Shape
    placements: tuple[Placement, ...]
    mesh: DeviceMesh


class RankTensor(NamedTuple):
    """The part of a tensor in a rank's file: how to rebuild it, and its layout; None for a plain tensor."""

    local: Rebuilt
    spec: Spec | None

    def parts(self, rank: int) -> Iterator[tuple[Block, Rebuilt]]:
        """Yield the blocks of the tensor that a rank has, and how to rebuild each.

        Raises:
            SourceError: the layout is not valid, or does not match the shape of the part.
        """
        if self.spec is None:
            yield Block.whole(self.local.shape), self.local
            return
        shape, placements, mesh = self.spec
        try:
            ranges = device_ranges(mesh.extents, placements, shape, _coordinates(mesh, rank))
        except LayoutError as error:
            raise SourceError(error.message, code=error.code) from None
        extents = tuple(sum(stop - start for start, stop in dim_ranges) for dim_ranges in ranges)
        if extents != self.local.shape and not (0 in extents and 0 in self.local.shape):
            raise SourceError(
                f"has shape {shape_text(self.local.shape)} in the file of rank {rank}; its placements give "
                f"{shape_text(extents)} of {shape_text(shape)}",
                code="wrong-shape",
            )
        if prod(map(len, ranges)) > _MOST_BLOCKS:
            raise SourceError(
                f"has {prod(map(len, ranges)):,} blocks in a file; at most {_MOST_BLOCKS:,} are supported",
                code="too-many-blocks",
            )
        positions = [accumulate((stop - start for start, stop in of_dim), initial=0) for of_dim in ranges]
        for corner in product(*(zip(of_dim, at, strict=False) for of_dim, at in zip(ranges, positions, strict=True))):
            block = Block(tuple(start for (start, _), _ in corner), tuple(stop for (_, stop), _ in corner))
            yield block, self.local.part(tuple(position for _, position in corner), block.shape)


def is_tensor(value: object) -> bool:
    """Return whether a pickled value is a tensor, also of a kind that is not read."""
    return isinstance(value, PickledObject) and (value.name.startswith("_rebuild_") or value.name == "ShardedTensor")


class Tensors:
    """Reads the tensors of one file.

    Args:
        rank: the rank of the file.
        count: the number of ranks.
    """

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self._meshes: dict[PickledObject, DeviceMesh] = {}

    def read(self, value: object) -> RankTensor:
        """Return the part of a tensor in the file; raise `SourceError` if it cannot be read."""
        value = without_parameter(value)
        arguments = arguments_of(value)
        is_subclass = isinstance(value, PickledObject) and value.name == _SUBCLASS[0] and len(arguments) == 4
        if not is_subclass or not isinstance(arguments[0], Name) or arguments[0].name != _SUBCLASS[1]:
            return RankTensor(rebuilt(value), None)
        kind = arguments[1].name if isinstance(arguments[1], Name) else ""
        if kind != "DTensor":
            raise SourceError(f"is a tensor of the unsupported class {describe(kind)}", code="unsupported-class")
        state = PickledObject(None, None, state=arguments[3])
        local, spec = rebuilt(state.field("_local_tensor")), state.field("_spec")
        sizes = arguments[2][2] if isinstance(arguments[2], tuple) and len(arguments[2]) > 2 else None
        return RankTensor(local, self._spec(spec, numbers(sizes)))

    def _spec(self, value: object, shape: Shape) -> Spec:
        """Return the layout of a DTensor of a shape, from its other arguments."""
        if not isinstance(value, PickledObject):
            raise SourceError("has no spec, so which part a rank has is unknown", code="bad-dtensor")
        if not is_possible(shape):
            raise SourceError(f"has the impossible shape {shape_text(shape)}", code="bad-shape")
        mesh, placements = self._mesh(value.field("mesh")), value.field("placements")
        if not isinstance(placements, tuple) or len(placements) != len(mesh.extents):
            raise SourceError(
                f"has {describe(placements)} for placements on a mesh of {shape_text(mesh.extents)}",
                code="bad-placement",
            )
        order = value.field("shard_order")
        for entry in order if isinstance(order, tuple) else ():
            axes = numbers(arguments_of(entry)[1]) if len(arguments_of(entry)) == 2 else ()
            if list(axes) != sorted(axes):
                raise SourceError(
                    f"is cut by the mesh axes {shape_text(axes)} in an unsupported order", code="unsupported-layout"
                )
        return Spec(shape, tuple(map(_placement, placements)), mesh)

    def _mesh(self, value: object) -> DeviceMesh:
        if not isinstance(value, PickledObject):
            raise SourceError("has no mesh", code="bad-dtensor")
        if value not in self._meshes:
            if len(self._meshes) == _MOST_MESHES:
                raise SourceError(f"has more than {_MOST_MESHES} meshes in its file", code="too-many-meshes")
            mesh = self._meshes[value] = _mesh(value, self.rank, self.count)
            saved_by, at = value.field("_rank"), value.field("_coordinate_on_dim")
            if (saved_by is not None and saved_by != self.rank) or (
                at is not None and numbers(at) != _coordinates(mesh, self.rank)
            ):
                raise SourceError(
                    f"was saved by another rank; its file is named for rank {self.rank}", code="wrong-rank"
                )
        return self._meshes[value]


def _coordinates(mesh: DeviceMesh, rank: int) -> Shape:
    """Return the coordinates of a rank in a mesh."""
    number, coordinates = mesh.ranks.index(rank), list[int]()
    for extent in reversed(mesh.extents):
        number, coordinate = divmod(number, extent)
        coordinates.append(coordinate)
    return tuple(reversed(coordinates))


def _placement(value: object) -> Placement:
    name = value.name if isinstance(value, PickledObject) else ""
    if name == "Replicate":
        return None
    if not isinstance(value, PickledObject) or name not in {"Shard", "_StridedShard"}:
        why = ": each rank has a part of a sum" if name.lstrip("_").endswith("Partial") else ""
        raise SourceError(f"has the unsupported placement {describe(name)}{why}", code="unsupported-placement")
    dim, factor = value.field("dim"), value.field("split_factor") if name == "_StridedShard" else None
    (dim,) = numbers((dim,))
    if name == "Shard":
        return DimShard(dim)
    (factor,) = numbers((factor,))
    if not factor:
        raise SourceError("has the split_factor 0", code="bad-split-factor")
    return DimShard(dim, factor)


def _mesh(value: PickledObject, rank: int, count: int) -> DeviceMesh:
    """Return the mesh of at most `count` ranks that contains a rank; a layout may describe several."""
    axes, rank_map = _axes(value, count)
    if rank not in rank_map:
        raise SourceError(f"has a mesh of {ranks_text(rank_map)}, but is in the file of rank {rank}", code="wrong-rank")
    parts = [part for axis in axes for part in axis]
    extents = tuple(prod(size for size, _ in axis) for axis in axes)
    if not 0 < prod(extents) <= count:
        raise SourceError(f"has a mesh of more ranks than the {count} that have files", code="missing-ranks")
    index = rank_map.index(rank)
    begin = index - sum(index // stride % size * stride for size, stride in parts if stride)
    offsets = product(*(range(0, size * stride, stride) if stride else [0] * size for size, stride in parts))
    positions = [begin + sum(offset) for offset in offsets]
    ranks = tuple(rank_map[position] for position in positions if 0 <= position < len(rank_map))
    if len(set(ranks)) != len(positions) or max(ranks) >= count or rank not in ranks or len(extents) > MOST_DIMS:
        raise SourceError(
            f"has a mesh {shape_text(extents)} of {ranks_text(ranks)}, some twice or without a file", code="bad-mesh"
        )
    return DeviceMesh(extents, ranks)


def _axes(value: PickledObject, count: int) -> tuple[list[list[tuple[int, int]]], tuple[int, ...]]:
    """Return the sizes and strides of which each axis of a mesh consists, and the ranks that they count."""
    layout = value.field("_layout")
    if not isinstance(layout, PickledObject):  # before 2.10
        of_tensor = arguments_of(value.field("mesh"))
        shape = numbers(of_tensor[2] if len(of_tensor) > 2 else None)
        axes = [[axis] for axis in zip(shape, row_major(shape), strict=True)]
        return axes, numbers(value.field("_flatten_mesh_list"), count)
    flat_layouts = layout.field("axes")
    fields: Iterable[Any] = ()
    if flat_layouts is None:  # as in 2.10
        fields = zip(_several(layout.field("shape")), _several(layout.field("stride")), strict=False)
    elif isinstance(flat_layouts, tuple | list):
        fields = (each.fields("shape", "stride") for each in flat_layouts if isinstance(each, PickledObject))
    axes = [
        list(zip(numbers(_several(sizes)), numbers(_several(strides)), strict=False))
        for sizes, strides in islice(fields, MOST_DIMS + 1)
    ]
    return axes, numbers(value.field("_flatten_rank_map"), count)


def _several(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)
