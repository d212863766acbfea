"""Load the tensors of a target rank into memory: each byte once, straight into its place.

Arrays that the caller has are filled as they are: numpy's, and PyTorch's tensors in the memory of the processor. They
may have any strides, and any dtype, to which values are rounded. PyTorch is recognised, and never imported.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reshard.compute.boxes import BoxGrid
from reshard.core.layout.block import Block, shape_text
from reshard.core.model.stored import stored_tensor
from reshard.core.storage.threads import map_ordered
from reshard.dtypes import by_name
from reshard.errors import Faults, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.core.model.stored import StoredTensor
    from reshard.core.plan.plan import Plan, RankBlock
    from reshard.dtypes import DType

Array = np.ndarray[Any, np.dtype[Any]]

PART_BYTES = 8 << 20
"""The most bytes of a tensor that a thread reads at once, and of small tensors that it reads one after the other."""


class _Place(NamedTuple):
    """Where a tensor goes: an array of the bits of its elements, and the dtype of these."""

    bits: Array
    dtype: DType


class _Part(NamedTuple):
    """A box of a tensor's block, the tensor that it is read from, and its place."""

    stored: StoredTensor
    block: Block
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
    places = {name: _place(name, arrays[name], of.block, faults) for name, of in chosen.items()}
    faults.raise_if_any(UsageError)
    paths = [file.path for file in plan.source.files]
    parts = [
        part
        for name, of in chosen.items()
        if (place := places[name]) is not None
        for part in _parts(_stored(plan, of, paths), of.block, place)
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


def _parts(stored: StoredTensor, block: Block, place: _Place) -> list[_Part]:
    grid = BoxGrid.of(block.shape, max(PART_BYTES // max(stored.kind.itemsize, 1), 1))
    return [_Part(stored, block, box, place) for box in grid]


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
    for stored, block, box, (bits, dtype) in parts:
        ranges = [range(a + r.start, a + r.stop) for a, r in zip(block.start, box.ranges, strict=True)]
        out: Array = bits[(*box.within(Block.whole(box.stop)), ...)]  # type: ignore[arg-type]  # an array for no dimensions, too
        if dtype is stored.kind:
            stored.read_into(ranges, out)
            continue
        with np.errstate(over="ignore", invalid="ignore"):  # a number that is too large becomes infinity
            np.copyto(out.view(dtype.numpy()), stored.read(ranges), casting="unsafe")


def _place(name: str, array: Any, block: Block, faults: Faults) -> _Place | None:
    """Return where a tensor goes in an array of the caller; None after adding a fault."""
    where = f"tensor {name!r}"
    shape = tuple(getattr(array, "shape", ()))
    if isinstance(array, np.ndarray):
        bits, word = array, array.dtype.name
    elif (torch := sys.modules.get("torch")) is not None and isinstance(array, torch.Tensor):
        if hasattr(array, "to_local") or array.device.type != "cpu":
            what = "a DTensor" if hasattr(array, "to_local") else f"on {array.device}"
            faults.add(
                where, f"is {what}; expected a tensor in the memory of the processor", code="wrong-type",
                hint="load into a tensor on the CPU, and copy from it",
            )  # fmt: skip
            return None
        word = str(array.dtype).removeprefix("torch.").removesuffix("_x2")
        kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        kind = kinds.get(array.element_size())
        bits = np.empty(()) if kind is None else array.detach().view(kind).numpy()
        word = "" if kind is None else word
    else:
        faults.unexpected(where, array, "an array of numpy or a tensor of PyTorch")
        return None
    if shape != block.shape:
        faults.add(where, f"is {shape_text(shape)}; expected {shape_text(block.shape)}", code="wrong-shape")
        return None
    if not bits.flags.writeable:
        faults.add(where, "cannot be written into", code="bad-array")
        return None
    try:
        dtype = by_name(word, UsageError)
    except UsageError as error:
        faults.add(where, error)
        return None
    return _Place(bits.view(dtype.carrier()), dtype)
