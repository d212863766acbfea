"""Assemble tensors from listed blocks: boxes of any size, each with the extent of its bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.core.layout.block import Block, cover_fault
from reshard.core.model.checkpoint import Shard
from reshard.core.model.reshape import Shared
from reshard.errors import SourceError, names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import Tensor, TensorSpec
    from reshard.core.model.entries import Extent
    from reshard.dtypes import DType


class BlockList:
    """Assembles tensors from blocks.

    Tensors with equal blocks in the same files share their records.
    """

    def __init__(self) -> None:
        self._shared = Shared()
        self._faults: dict[tuple[Shape, tuple[Block, ...]], str | None] = {}

    def tensor(self, spec: TensorSpec, blocks: Iterable[tuple[Block, Extent]]) -> Tensor:
        """Return a tensor.

        Args:
            spec: its name, dtype and shape.
            blocks: its blocks, with each replica. Empty blocks are left out: they occur if a tensor is cut into more
                parts than it has rows.

        Raises:
            SourceError: the blocks do not cover it once; the message is a predicate.
        """
        whole = Block.whole(spec.shape)
        replicas: dict[Block, list[Extent]] = {}
        for block, extent in blocks:
            if block.size or block == whole:
                replicas.setdefault(block, []).append(extent)
        key = spec.shape, tuple(replicas)
        if key not in self._faults:
            self._faults[key] = cover_fault(spec.shape, replicas)
        if fault := self._faults[key]:
            raise SourceError(fault, code="missing-blocks")
        return self._shared.tensor(spec, (Shard(block, tuple(sorted(extents))) for block, extents in replicas.items()))


def common_dtype(dtypes: Iterable[DType]) -> DType:
    """Return the dtype of all parts of a tensor; raise `SourceError` if they differ."""
    by_name = {dtype.name: dtype for dtype in dtypes}
    if len(by_name) > 1:
        raise SourceError(f"is {names(sorted(by_name))} in different files", code="mixed-dtypes")
    (dtype,) = by_name.values()
    return dtype


def nothing_readable(unreadable: Mapping[str, str]) -> str:
    """Return the message for a checkpoint without readable tensors."""
    why = next((f": {name!r} {reason}" for name, reason in unreadable.items()), "; was saving it interrupted?")
    return f"holds no tensor that can be read{why}"
