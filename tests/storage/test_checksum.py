"""CRC-32C: published values, a bit-by-bit oracle, and sums of a whole from those of its parts; CRC-32 beside zlib's."""

from __future__ import annotations

import sys
import zlib
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.core.storage import crc
from reshard.core.storage.crc import combine, crc32, crc32c

if TYPE_CHECKING:
    from collections.abc import Iterator

# RFC 3720, appendix B.4
PUBLISHED = [
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(reversed(range(32))), 0x113FDB5C),
    (b"", 0),
]


def bit_by_bit(content: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in content:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


@pytest.mark.parametrize(("content", "expected"), PUBLISHED)
def test_published_values(content: bytes, expected: int) -> None:
    assert crc32c(content) == bit_by_bit(content) == expected


@given(st.binary(max_size=200), st.sampled_from([bytes, bytearray, memoryview, np.array]))
def test_every_kind_of_buffer(content: bytes, kind: type) -> None:
    buffer = np.frombuffer(content, np.uint8).copy() if kind is np.array else kind(content)
    assert crc32c(buffer) == bit_by_bit(content)
    writable = memoryview(bytearray(b"before" + content + b"behind"))
    assert crc32c(writable[6 : 6 + len(content)]) == bit_by_bit(content)


def test_where_google_crc32c_is_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is, with a warning, where it has no wheel and no C compiler."""
    from google_crc32c import python

    monkeypatch.setattr("google_crc32c.extend", python.extend)
    for content, expected in PUBLISHED:
        assert crc32c(content) == crc32c(bytearray(content)) == expected


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=6))
def test_parts_combine_to_the_whole(content: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    parts = [content[a:b] for a, b in pairwise(edges)]
    *_, combined = accumulate(parts, lambda value, part: combine(value, crc32c(part), len(part)), initial=0)
    *_, extended = accumulate(parts, lambda value, part: crc32c(part, value), initial=0)
    assert combined == extended == crc32c(content)


def test_lengths_beyond_any_buffer() -> None:
    """Half and half of 2 ** 40 bytes is all of them: the carry is a power, whatever the exponent."""
    half, first = 1 << 39, crc32c(b"first")
    assert combine(first, 0, 2 * half) == combine(combine(first, 0, half), 0, half)
    piece = bytes(1 << 20)
    assert combine(first, crc32c(piece), len(piece)) == crc32c(piece, first)


@pytest.fixture(params=["zlib", "isal"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have CRC-32 from one library or the other."""
    if request.param == "isal":
        pytest.importorskip("isal.isal_zlib")
    else:
        monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    crc._crc32.cache_clear()
    yield
    crc._crc32.cache_clear()


@pytest.mark.usefixtures("library")
def test_crc32_is_that_of_zip_files() -> None:
    for content in (b"", b"a", bytes(range(256)) * 999):
        assert crc32(content) == crc32(memoryview(bytearray(content))) == zlib.crc32(content)
        assert crc32(content, 0x1234) == zlib.crc32(content, 0x1234)
