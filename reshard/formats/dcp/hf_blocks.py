"""Open sharded safetensors files that PyTorch saved for Hugging Face.

A file has the blocks of one rank, and its header metadata has the offset of each block in its tensor. The shapes of
whole tensors are not stored: they are inferred from the blocks. So blocks missing at the end of a tensor cannot be
detected; any other missing block is.

Sources: PyTorch 2.13 `distributed/checkpoint/{hf_storage,_hf_utils}.py`, and what that wrote (`tests/data/dcp`).
"""

from __future__ import annotations

from dataclasses import replace
from operator import add
from typing import TYPE_CHECKING, Literal

from reshard.core.layout.block import Block, is_possible, shape_text
from reshard.core.model.checkpoint import Checkpoint, TensorSpec
from reshard.core.model.entries import Extent
from reshard.core.model.facts import Extras
from reshard.core.model.probe import compare_contents
from reshard.core.model.table import Blocks, common_dtype, nothing_readable
from reshard.core.storage.base import COPY_AGAIN
from reshard.core.storage.small import parse_json
from reshard.errors import Faults, SourceError, names
from reshard.formats.dcp.names import BLOCKS
from reshard.kits.headers import read_indexes
from reshard.kits.safetensors import SHARDING_INFO
from reshard.strategy.names import ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import SourceFile, Tensor
    from reshard.core.storage.places import Place
    from reshard.dtypes import DType

_MOST_FILES = 100_000
_NOTES = {SHARDING_INFO, "DCP_VERSION"}


def open_blocks(root: Place, listing: Sequence[str], *, contents: bool | Literal["blocks"] = True) -> Checkpoint:
    """Open sharded safetensors files, reading their headers.

    A tensor with missing blocks is unreadable, with the reason: a plan needs it dropped by name.

    Args:
        root: the directory of the files.
        listing: the names in it.
        contents: compare samples of replicas.

    Raises:
        SourceError: a file is not valid or does not say where its blocks lie, or the files are of two sets.
    """
    matches = sorted(filter(None, map(BLOCKS.files.fullmatch, listing)), key=lambda match: match[0])
    counts = sorted({int(match["count"]) for match in matches})
    if len(counts) > 1:
        hint = "move one set to another directory"
        raise SourceError(f"{root} has files of sets of {names(counts)} files", code="several-checkpoints", hint=hint)
    numbers = {int(match["number"]) for match in matches}
    if absent := [number for number in range(1, min(counts[0], _MOST_FILES) + 1) if number not in numbers]:
        raise SourceError(f"{root} has no file {names(absent)} of {counts[0]}", code="missing-shards", hint=COPY_AGAIN)
    by_rank: dict[int, list[Place]] = {}
    for match in matches:
        by_rank.setdefault(int(match["shard"]) - 1, []).append(root / match[0])
    files, ranks = read_indexes(dict(sorted(by_rank.items())), None)
    faults = Faults(str(root))
    blocks: dict[str, list[tuple[Block, Extent]]] = {}
    dtypes: dict[str, set[DType]] = {}
    unreadable: dict[str, str] = {}
    for number, file in enumerate(files):
        offsets = _offsets(file, faults)
        unreadable.update(file.index.unreadable)
        for name, entry in file.index.entries.items():
            at = offsets.get(name)
            if at is None or len(at) != len(entry.shape):
                unreadable[name] = f"has no offsets in {SHARDING_INFO} of {file.path}, or not one for each dimension"
                continue
            block = Block(at, tuple(map(add, at, entry.shape)))
            blocks.setdefault(name, []).append((block, Extent(number, entry.runs)))
            dtypes.setdefault(name, set()).add(entry.dtype)
    faults.raise_if_any(SourceError)
    assembler = Blocks()
    tensors: dict[str, Tensor] = {}
    for name in [name for name in blocks if name not in unreadable]:
        try:
            shape = _whole_shape([block for block, _ in blocks[name]])
            tensors[name] = assembler.tensor(TensorSpec(name, common_dtype(dtypes[name]), shape), blocks[name])
        except SourceError as error:
            unreadable[name] = error.message
    if not tensors:
        raise SourceError(f"{root}: {nothing_readable(unreadable)}", code="no-tensors")
    absent = [rank for rank in range(max(by_rank)) if rank not in by_rank]
    gaps = f", with no file of {ranks_text(absent)}" if absent else ""
    unknown = (
        f"the files do not say how large whole tensors are: they are of {len(by_rank)} ranks{gaps}, and if there were "
        "more, whose files are missing, tensors are smaller than they were"
    )
    checkpoint = Checkpoint(
        str(root), tensors, tuple(map(without_notes, files)), ranks, warnings=(unknown,), unreadable=unreadable,
        extras=Extras(SHARDING_INFO),
    )  # fmt: skip
    return compare_contents(checkpoint, {}, contents=contents)


def without_notes(file: SourceFile) -> SourceFile:
    """Return a file without its block metadata, which do not apply to a target."""
    metadata = tuple((key, value) for key, value in file.index.metadata if key not in _NOTES)
    return replace(file, index=file.index._replace(metadata=metadata))


def _offsets(file: SourceFile, faults: Faults) -> dict[str, Shape]:
    """Return the offset of each block of a file in its tensor, by name."""
    try:
        content = parse_json(dict(file.index.metadata)[SHARDING_INFO].encode(), [])
    except (KeyError, ValueError):
        content = None
    if not isinstance(content, dict):
        faults.add(file.path, f"has no {SHARDING_INFO} in its header, so its blocks are unplaced", code="no-layout")
        return {}
    result = {}
    for name, info in content.items():
        offsets = info.get("saved_offsets") if isinstance(info, dict) else None
        if isinstance(offsets, list) and all(type(offset) is int and 0 <= offset < 1 << 63 for offset in offsets):
            result[name] = tuple(offsets)
        if name not in file.index.entries and name not in dict(file.index.unreadable):
            faults.add(file.path, f"has offsets for {name!r:.60} but no such tensor", code="unknown-tensor")
    return result


def _whole_shape(blocks: Sequence[Block]) -> Shape:
    """Return the shape of the tensor that has these blocks; raise `SourceError` if there is none."""
    dims = {len(block.stop) for block in blocks}
    if len(dims) > 1:
        raise SourceError(f"is of {names(sorted(dims))} dimensions in different files", code="ranks-disagree")
    shape = tuple(map(max, zip(*(block.stop for block in blocks), strict=True)))
    if not is_possible(shape):
        raise SourceError(f"has the shape {shape_text(shape)}, which no array can have", code="bad-shape")
    return shape
