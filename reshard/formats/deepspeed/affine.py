"""Read the affine maps of DeepSpeed's AutoTP: the blocks of each tensor-parallel part, by parameter.

A map has the shape of the whole parameter, and of each part its shape and pieces. A piece is a box: its offset and
strides in the whole (`source`) and in the part (`dest`), as `torch.as_strided` takes them, and a factor by which the
part's values are scaled; scaled pieces are not supported.

Source: DeepSpeed 0.19.8 `checkpoint/affine.py`, and files that it wrote (`tests/data/deepspeed_parts`).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from reshard.core.layout.axes import row_major
from reshard.core.layout.block import Block, is_possible, shape_text
from reshard.errors import SourceError
from reshard.formats.deepspeed.pickled import table, whole_number
from reshard.kits.parts.cuts import CutPiece, TensorCut
from reshard.kits.torch.pickles import Pairs, describe, numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.layout.block import Shape

VERSION = 1
"""The newest version of the maps that is read."""

_RULE = "affine map"
_MOST_PIECES = 1 << 10


def affine_cut(value: object, shapes: Sequence[Shape]) -> TensorCut:
    """Return how parts make a whole parameter.

    Args:
        value: the map of the parameter, as pickled.
        shapes: the shape of each part.

    Raises:
        SourceError: the map is not valid, contradicts the parts, or has scaled pieces or ones that are not boxes.
    """
    entry = table(value, "an affine map")
    whole = numbers(entry.get("logical_shape"))
    ranks = entry.get("ranks")
    of_rank = {whole_number(key): part for key, part in ranks.items()} if isinstance(ranks, Pairs) else {}
    if set(of_rank) != set(range(len(shapes))) or not is_possible(whole):
        raise SourceError(f"has an affine map that is not of its {len(shapes)} parts", code="bad-value")
    pieces = []
    for part, shape in enumerate(shapes):
        content = table(of_rank[part], "an affine map")
        listed = content.get("pieces")
        if numbers(content.get("shard_shape")) != shape or not isinstance(listed, list):
            raise SourceError(
                f"has a part of {shape_text(shape)}; its affine map says {describe(content.get('shard_shape'))}",
                code="wrong-shape",
            )
        if not 0 < len(listed) <= _MOST_PIECES:
            raise SourceError(f"has {len(listed)} pieces in a part, which is not supported", code="unsupported-layout")
        pieces.append(tuple(_piece(piece, whole, shape) for piece in listed))
    return TensorCut(whole, _RULE, tuple(pieces))


def _piece(value: object, whole: Shape, part: Shape) -> CutPiece:
    piece = table(value, "a piece of an affine map")
    if piece.get("scale", 1.0) != 1:
        raise SourceError(f"has a part that is scaled by {describe(piece['scale'])}", code="unsupported-layout")
    extents = numbers(piece.get("shape"))
    return CutPiece(_box(piece.get("source"), extents, whole), _box(piece.get("dest"), extents, part))


def _box(location: object, extents: Shape, shape: Shape) -> Block:
    """Return the box of an offset and strides; raise `SourceError` if it is not one."""
    offset, strides = location if isinstance(location, list | tuple) and len(location) == 2 else (None, None)
    (at,) = numbers((offset,))
    steps = numbers(strides)
    expected = row_major(shape)
    regular = len(extents) == len(steps) == len(shape) and all(
        step == axis or extent == 1 for step, axis, extent in zip(steps, expected, extents, strict=True)
    )
    if not regular or at >= max(prod(shape), 1):
        raise SourceError("has a part that is not made of boxes", code="unsupported-layout")
    start = []
    for axis in expected:
        start.append(at // axis if axis else 0)
        at -= start[-1] * axis
    stop = tuple(begin + extent for begin, extent in zip(start, extents, strict=True))
    if any(end > extent for end, extent in zip(stop, shape, strict=True)):
        raise SourceError("has a part that is not made of boxes", code="unsupported-layout")
    return Block(tuple(start), stop)
