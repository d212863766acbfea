"""Strided reads, element by element: into arrays of any memory order, with gaps that are skipped or read."""

from __future__ import annotations

from operator import mul
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.core.layout import strided
from reshard.core.layout.strided import Ahead, read_strided

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.layout.block import Shape

CONTENT = np.random.default_rng(0).bytes(1 << 16)


def read(requests: Sequence[tuple[int, memoryview]]) -> None:
    for begin, buffer in requests:
        buffer[:] = CONTENT[begin : begin + len(buffer)]


def elements(
    begin: int, pitch: Shape, shape: Shape, dtype: np.dtype[np.void]
) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
    expected = np.empty(shape, dtype)
    for index in np.ndindex(shape):
        first = begin + sum(map(mul, index, pitch))
        expected[index] = np.frombuffer(CONTENT, dtype, 1, first)[0]
    return expected


OWN_LIMITS = strided.GAP, strided.SCRATCH, strided._TILE, strided._NEAR


@pytest.fixture(params=[(0, 16, 1, 2), (4, 16, 2, 2), (4, 64, 3, 4), (40, 200, 7, 2), OWN_LIMITS], ids=str)
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that these small arrays reach, and those of the package."""
    for name, limit in zip(("GAP", "SCRATCH", "_TILE", "_NEAR"), request.param, strict=True):
        monkeypatch.setattr(strided, name, limit)


@pytest.mark.usefixtures("limits")
@given(st.data())
def test_elements_are_those_at_their_strides(data: st.DataObject) -> None:
    """Strides may have gaps, overlap or be in any order; the array may be a part of another, with its axes permuted."""
    dtype = np.dtype(f"V{data.draw(st.sampled_from([1, 2, 4, 8]), 'itemsize')}")
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4), "shape"))
    pitch = tuple(data.draw(st.lists(st.integers(0, 60), min_size=len(shape), max_size=len(shape)), "pitch"))
    begin = data.draw(st.integers(0, 20), "begin")
    order = data.draw(st.permutations(range(len(shape))), "order")
    margins = data.draw(st.lists(st.integers(0, 2), min_size=len(shape), max_size=len(shape)), "margins")
    whole = np.zeros([shape[dim] + margins[dim] for dim in order], dtype)
    out = whole.transpose(np.argsort(order)) if shape else whole
    kept = [slice(margin // 2, margin // 2 + count) for margin, count in zip(margins, shape, strict=True)]
    out = out[(..., *kept)]
    assert out.shape == shape
    read_strided(read, begin, pitch, out)
    assert out.tobytes() == elements(begin, pitch, shape, dtype).tobytes()


@pytest.mark.parametrize("tile", [1, 2, 3, 6, 7, 512])
@given(st.data())
def test_transposed_arrays_are_copied_by_tiles(tile: int, data: st.DataObject) -> None:
    """Whatever dimension is the fastest of the target, and however many columns are in a tile."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4), "shape"))
    source = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    order = data.draw(st.permutations(range(len(shape))), "order")
    target = np.zeros([shape[dim] for dim in order], np.int32).transpose(np.argsort(order))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strided, "_TILE", tile)
        patch.setattr(strided, "_NEAR", 2)
        strided._copy(target, source)
    assert (target == source).all()


@pytest.mark.usefixtures("limits")
@given(st.data())
def test_boxes_read_one_after_another(data: st.DataObject) -> None:
    """Read with read-ahead, in memory that is shared with another block."""
    itemsize = data.draw(st.sampled_from([1, 2, 4]), "itemsize")
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3), "shape"))
    strides = tuple(data.draw(st.lists(st.integers(0, 40), min_size=len(shape), max_size=len(shape)), "strides"))
    size = int(np.prod(shape))
    step = data.draw(st.integers(1, size), "step")
    dtype = np.dtype(f"V{itemsize}")
    expected = elements(0, tuple(each * itemsize for each in strides), shape, dtype).reshape(-1)
    ahead = Ahead(lambda nbytes: memoryview(bytearray(nbytes)))
    ahead.share("blocks", 2, data.draw(st.sampled_from([0, 64, 256, 4096]), "memory"))
    for first in range(0, size, step):
        for number in range(2):
            out = np.empty(min(step, size - first), dtype)
            ahead.read(number, read, shape, strides, first, out)
            assert out.tobytes() == expected[first : first + len(out)].tobytes()
