"""Files that were cut, joined or damaged: an error or a valid index, whatever the bytes are."""

from __future__ import annotations

import tracemalloc
from math import prod
from typing import TYPE_CHECKING

import pytest
from format_files import CODE, SAMPLE, contents_of, saved, st_file, write
from hypothesis import given
from hypothesis import strategies as st
from samples import one_in

from reshard.errors import SourceError
from reshard.kits import ckpt
from reshard.kits import safetensors as st_format
from reshard.kits.files import index_file

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.core.model.entries import FileIndex

DAMAGED = {"ckpt": write(ckpt, SAMPLE | CODE), "safetensors": write(st_format, SAMPLE | CODE, {"format": "ms"})}
MESSAGE_ENDS = {len(write(ckpt, dict(list((SAMPLE | CODE).items())[:count]))) for count in range(1, len(SAMPLE | CODE))}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path, kind: str) -> None:
    whole = DAMAGED[kind]
    for length in range(len(whole)):
        path = saved(tmp_path, whole[:length])
        if kind == "ckpt" and length in MESSAGE_ENDS:
            # Nothing in the file says that more tensors belong to it; what is left is valid.
            assert contents_of(path, index_file(str(path))).items() <= (SAMPLE | CODE).items()
            continue
        with pytest.raises(SourceError) as caught:
            index_file(str(path))
        assert caught.value.code in {"truncated", "empty-file", "not-a-checkpoint"}
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("kind", DAMAGED)
@pytest.mark.parametrize("more", [b"\0", b"\n", b"\0" * 4096, b"crc_num" + bytes(9), b"{}"])
def test_a_file_with_something_after_its_end_is_refused(tmp_path: Path, kind: str, more: bytes) -> None:
    with pytest.raises(SourceError):
        index_file(str(saved(tmp_path, DAMAGED[kind] + more)))


def check_sound(path: Path, index: FileIndex) -> None:
    """An index describes a file without contradiction: all ranges inside, none shared, sizes as the shapes say."""
    spans = sorted(run for entry in index.entries.values() for run in entry.runs)
    size = path.stat().st_size
    end = 0
    for offset, nbytes in spans:
        assert end <= offset
        assert nbytes >= 0
        end = offset + nbytes
    assert end <= size
    for entry in index.entries.values():
        assert entry.text is not None or entry.nbytes == prod(entry.shape) * entry.dtype.itemsize
        assert all(extent >= 0 for extent in entry.shape)


def survives(path: Path, content: bytes) -> None:
    """Index a damaged file: a `SourceError` or a valid index, and little memory, whatever the file says."""
    path.write_bytes(content)
    tracemalloc.start()
    try:
        index = index_file(str(path))
    except SourceError as error:
        assert len(str(error)) < 10_000  # noqa: PT017 -- the other outcome is as good
    else:
        check_sound(path, index)
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < 2_000_000


@one_in(7)
@pytest.mark.parametrize("kind", DAMAGED)
def test_every_flipped_bit_gives_an_error_or_a_sound_index(tmp_path: Path, kind: str, every: int) -> None:
    whole = DAMAGED[kind]
    for place in range(0, 8 * len(whole), every):
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        survives(tmp_path / "a", bytes(flipped))


@st.composite
def mangled(draw: st.DrawFn, whole: bytes) -> bytes:
    """A file with pieces replaced, taken out, doubled."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(content)))
        end = min(len(content), begin + draw(st.integers(0, 12)))
        content[begin:end] = draw(st.binary(max_size=12) | st.just(bytes(content[begin:end]) * 2))
    return bytes(content)


@pytest.mark.parametrize("kind", DAMAGED)
@given(st.data())
def test_any_damage_gives_an_error_or_a_sound_index(
    tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject
) -> None:
    survives(tmp_path_factory.getbasetemp() / "mangled", data.draw(mangled(DAMAGED[kind])))


@pytest.mark.parametrize("start", [b"\x0a", st_file({})[:9], b"\xd8\x5e\x3a\x7f", b"crc_num", b""])
@given(tail=st.binary(max_size=200))
def test_any_bytes_give_an_error_or_a_sound_index(
    tmp_path_factory: pytest.TempPathFactory, start: bytes, tail: bytes
) -> None:
    survives(tmp_path_factory.getbasetemp() / "random", start + tail)
