"""Load the tensors of a target rank into memory: each byte once, straight into its place.

Arrays that the caller has are filled as they are: numpy's, and PyTorch's tensors in the memory of the processor. They
may have any strides, and any dtype, to which values are rounded. Of a DTensor the local part is filled: its mesh and
its placements say which boxes of the whole tensor it has. PyTorch is recognised, and never imported.
"""

from __future__ import annotations

import sys
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reshard.compute.boxes import BoxGrid
from reshard.core.layout.block import Block, shape_text
from reshard.core.layout.placements import DimShard, device_ranges
from reshard.core.model.stored import stored_tensor
from reshard.core.storage.threads import map_ordered
from reshard.dtypes import by_name
from reshard.errors import Faults, ReshardError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.core.model.stored import StoredTensor
    from reshard.core.plan.plan import Plan, RankBlock
    from reshard.dtypes import DType

Array = np.ndarray[Any, np.dtype[Any]]

PART_BYTES = 8 << 20
"""The most bytes of a tensor that a thread reads at once, and of small tensors that it reads one after the other."""


class _Place(NamedTuple):
    """Where a block of a tensor goes: an array of the bits of its elements, the dtype of these, and the block."""

    bits: Array
    dtype: DType
    block: Block


class _Part(NamedTuple):
    """A box of a block, the tensor that it is read from, and the place of the block."""

    stored: StoredTensor
    box: Block
    place: _Place


def new_arrays(plan: Plan, rank: int) -> dict[str, Array]:
    """Return an array for each tensor that a rank of a plan will hold; their elements are not set."""
    blocks = plan.blocks(rank)
    return {name: np.empty(of.block.shape, of.dtype.carrier()).view(of.dtype.numpy()) for name, of in blocks.items()}


def fill(plan: Plan, rank: int, arrays: Mapping[str, Any], *, strict: bool, threads: int) -> list[str]:
    """Fill arrays with the tensors of a rank of a plan; return the names of those that are filled.

    Args:
        plan: the plan.
        rank: the rank.
        arrays: numpy's arrays or PyTorch's tensors by name, each of the shape of the rank's block.
        strict: refuse names that only one side has; else they are left as they are.
        threads: the number of threads.

    Raises:
        UsageError: an array cannot be filled, or has another shape; names differ; all faults at once.
        SourceError: a source file cannot be read.
    """
    blocks = plan.blocks(rank)
    faults = Faults("into")
    if strict:
        for name in blocks.keys() - arrays.keys():
            faults.add(f"tensor {name!r}", "is in the source, and not in `into`", code="missing-tensor")
        for name in arrays.keys() - blocks.keys():
            faults.add(f"tensor {name!r}", "is in `into`, and not in the source", code="no-such-tensor")
    chosen = {name: of for name, of in blocks.items() if name in arrays}
    places = {name: _places(name, arrays[name], of.block, faults) for name, of in chosen.items()}
    faults.raise_if_any(UsageError)
    paths = [file.path for file in plan.source.files]
    parts = [
        part
        for name, of in chosen.items()
        for stored in [_stored(plan, of, paths)]
        for place in places[name]
        for part in _parts(stored, place)
    ]
    for _ in map_ordered(_fill, _batches(parts), threads):
        pass
    return [*chosen]


def _stored(plan: Plan, of: RankBlock, paths: Sequence[str]) -> StoredTensor:
    """Return the tensor of a block; if its copies differ, that of the block's own file."""
    tensor = plan.source.tensors[of.source_name]
    if of.source_file is not None:
        replicas = tuple(
            tuple(sorted(each, key=lambda at: at.file != of.source_file)) for each in tensor.sharding.replicas
        )
        tensor = tensor._replace(sharding=type(tensor.sharding)(tensor.sharding.blocks, replicas))
    return stored_tensor(tensor, paths, plan.source.coding)


def _parts(stored: StoredTensor, place: _Place) -> list[_Part]:
    grid = BoxGrid.of(place.block.shape, max(PART_BYTES // max(stored.kind.itemsize, 1), 1))
    return [_Part(stored, box, place) for box in grid]


def _batches(parts: Sequence[_Part]) -> list[list[_Part]]:
    """Join small parts, so that threads are not busy with taking them."""
    batches: list[list[_Part]] = []
    room = 0
    for part in parts:
        nbytes = part.box.size * part.stored.kind.itemsize
        if room < nbytes or not batches:
            batches.append([])
            room = PART_BYTES
        batches[-1].append(part)
        room -= max(nbytes, PART_BYTES >> 8)  # a thread does not read more than 256 tensors at once
    return batches


def _fill(parts: Sequence[_Part]) -> None:
    for stored, box, (bits, dtype, block) in parts:
        ranges = [range(a + r.start, a + r.stop) for a, r in zip(block.start, box.ranges, strict=True)]
        out: Array = bits[(*box.within(Block.whole(box.stop)), ...)]  # type: ignore[arg-type]  # an array for no dimensions, too
        if dtype is stored.kind:
            stored.read_into(ranges, out)
            continue
        with np.errstate(over="ignore", invalid="ignore"):  # a number that is too large becomes infinity
            np.copyto(out.view(dtype.numpy()), stored.read(ranges), casting="unsafe")


def _places(name: str, array: Any, block: Block, faults: Faults) -> list[_Place]:
    """Return where a tensor goes in an array of the caller; nothing after adding a fault."""
    where = f"tensor {name!r}"
    shape = tuple(getattr(array, "shape", ()))
    torch = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(array, torch.Tensor)
    if not (is_torch or isinstance(array, np.ndarray)):
        faults.unexpected(where, array, "an array of numpy or a tensor of PyTorch")
        return []
    if shape != block.shape:
        faults.add(where, f"is {shape_text(shape)}; expected {shape_text(block.shape)}", code="wrong-shape")
        return []
    try:
        ranges = [[(0, extent)] for extent in shape]
        if is_torch and hasattr(array, "to_local"):
            ranges, array = _ranges_of_part(array), array.to_local()
        bits, dtype = _bits(array, torch) if is_torch else (array, by_name(array.dtype.name, UsageError))
    except ReshardError as error:
        faults.add(where, error)
        return []
    if not bits.flags.writeable:
        faults.add(where, "cannot be written into", code="bad-array")
        return []
    return [
        _Place(bits.view(dtype.carrier())[(*inside, ...)], dtype, part)  # type: ignore[arg-type]  # of no dimensions, too
        for part, inside in _boxes(ranges, block)
    ]


def _bits(tensor: Any, torch: Any) -> tuple[Array, DType]:
    """Return the memory of a tensor of PyTorch as an array, and its dtype.

    Raises:
        UsageError: it is on another device, or of a dtype that no checkpoint has.
    """
    if tensor.device.type != "cpu":
        raise UsageError(
            f"is on {tensor.device}; expected a tensor in the memory of the processor", code="wrong-type",
            hint="load into a tensor on the CPU, and copy from it",
        )  # fmt: skip
    dtype = by_name(str(tensor.dtype).removeprefix("torch."), UsageError)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if (kind := kinds.get(tensor.element_size())) is None:
        raise UsageError(f"is of {dtype}, which cannot be loaded into PyTorch", code="wrong-type")
    return tensor.detach().view(kind).numpy(), dtype


def _ranges_of_part(tensor: Any) -> list[list[tuple[int, int]]]:
    """Return the ranges of each dimension that the local part of a DTensor has, in order.

    Raises:
        UsageError: it has partial sums, or this process is not in its mesh.
    """
    mesh, at = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if at is None:
        raise UsageError("is a DTensor of a mesh that this process is not in", code="bad-placement")
    placements: list[DimShard | None] = []
    for each in tensor.placements:
        if hasattr(each, "dim"):
            placements.append(DimShard(each.dim, getattr(each, "split_factor", None)))
        elif each.is_replicate():
            placements.append(None)
        else:
            raise UsageError(f"is a DTensor with the placement {each}", code="bad-placement")
    return device_ranges(tuple(mesh.shape), placements, tuple(tensor.shape), tuple(at))


def _boxes(ranges: Sequence[Sequence[tuple[int, int]]], block: Block) -> Iterator[tuple[Block, tuple[slice, ...]]]:
    """Yield the boxes of the whole tensor that ranges stand for, each with its place in their array."""
    placed = [
        [*zip(of_dim, accumulate((stop - start for start, stop in of_dim), initial=0), strict=False)]
        for of_dim in ranges
    ]
    for chosen in product(*placed):
        start = tuple(begin + first for ((begin, _), _), first in zip(chosen, block.start, strict=True))
        stop = tuple(end + first for ((_, end), _), first in zip(chosen, block.start, strict=True))
        yield Block(start, stop), tuple(slice(at, at + end - begin) for (begin, end), at in chosen)
