"""Formats byte for byte as MindSpore, the safetensors library and protobuf write them, and read as others do."""

from __future__ import annotations

import re
import zlib
from math import prod
from typing import TYPE_CHECKING

import helpers
import pytest
import safetensors
from format_files import Held, contents_of, message, saved, write
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from reshard.dtypes import BY_NAME
from reshard.errors import SourceError
from reshard.kits import ckpt
from reshard.kits import safetensors as st_format
from reshard.kits.files import index_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def rank_files(folder: str) -> list[str]:
    """The checkpoint files in an archive, without strategies and what is encrypted."""
    return [
        name
        for name in helpers.packed_files(folder)
        if name.endswith((".ckpt", ".safetensors"))
        and "strategy" not in name
        and "aes" not in name
        and "sm4" not in name
    ]


def older_scalars(held: Held) -> Held:
    return {
        name: (dtype, () if shape == (0,) and data and dtype != "str" else shape, data)
        for name, (dtype, shape, data) in held.items()
    }


@pytest.mark.parametrize("folder", ["cases", "deduplicated", "encrypted", "real"])
def test_every_rank_file_of_mindspore_holds_what_other_readers_say(mindspore_data: Path, folder: str) -> None:
    names = rank_files(folder)
    assert len(names) == {"cases": 768, "deduplicated": 16, "encrypted": 3, "real": 96}[folder]
    for name in names:
        index = index_file(str(mindspore_data / name))
        assert contents_of(mindspore_data / name, index) == older_scalars(
            helpers.read_rank_file(mindspore_data / name)
        ), name
        assert index.deduplicated == (folder == "deduplicated" or "/dedup/" in name), name
        assert index.format == ("ckpt" if name.endswith(".ckpt") else "safetensors")


@pytest.mark.parametrize("folder", ["cases", "encrypted", "real"])
def test_ckpt_files_come_out_byte_for_byte_as_mindspore_wrote_them(mindspore_data: Path, folder: str) -> None:
    for name in rank_files(folder):
        if not name.endswith(".ckpt"):
            continue
        path = mindspore_data / name
        body = path.read_bytes()
        if index_file(str(path)).crc is not None:
            body = body[:-17]
            assert index_file(str(path)).crc == zlib.crc32(body)
        assert write(ckpt, contents_of(path, index_file(str(path)))) == body, name


@pytest.mark.parametrize("mode", ["aes-gcm", "aes-gcm-192", "aes-gcm-256", "aes-cbc", "sm4-cbc"])
def test_encrypted_files_are_refused_as_what_they_are(mindspore_data: Path, mode: str) -> None:
    kind = re.sub("-(192|256)", "", mode).upper()
    with refused(SourceError, "encrypted", f"{mode}.ckpt", kind):
        index_file(str(mindspore_data / "encrypted" / f"{mode}.ckpt"))


def library_has(dtype: str) -> bool:
    try:
        helpers.library_safetensors({"w": (dtype, (0,), b"")})
    except safetensors.SafetensorError:
        return False
    return True


LIBRARY_DTYPES = [dtype for dtype in BY_NAME if library_has(dtype) and not BY_NAME[dtype].bits]


def test_one_tensor_of_every_dtype_is_written_as_the_library_does() -> None:
    assert len(LIBRARY_DTYPES) >= 15
    held = {
        f"{place % 3}.{name}": (name, (2,), bytes(range(2 * BY_NAME[name].itemsize)))
        for place, name in enumerate(LIBRARY_DTYPES)
    }
    assert write(st_format, held, {"format": "ms"}) == helpers.library_safetensors(held, {"format": "ms"})


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@st.composite
def tensors(draw: st.DrawFn, dtypes: Sequence[str]) -> Held:
    held: Held = {}
    for name in draw(st.lists(NAMES.filter(lambda name: name != "__metadata__"), max_size=5, unique=True)):
        dtype, shape = draw(st.sampled_from(dtypes)), tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
        nbytes = prod(shape) * BY_NAME[dtype].itemsize
        held[name] = (dtype, shape, draw(st.binary(min_size=nbytes, max_size=nbytes)))
    return held


@given(tensors(LIBRARY_DTYPES), st.none() | st.tuples(NAMES, st.text(st.characters(exclude_categories=["Cs"]))))
def test_safetensors_are_written_byte_for_byte_as_the_library_does(held: Held, note: tuple[str, str] | None) -> None:
    # One note at most: the library writes several in an order that differs from run to run.
    notes = dict([note]) if note else None
    assert write(st_format, held, notes) == helpers.library_safetensors(held, notes)


@given(tensors([dtype for dtype in BY_NAME if BY_NAME[dtype].mindspore and dtype != "str"]), st.integers(1, 40))
def test_a_ckpt_is_what_protobuf_would_write_however_large_its_parts(
    tmp_path_factory: pytest.TempPathFactory, held: Held, part: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ckpt, "PART_BYTES", part)
        content = write(ckpt, held)
    expected = b"".join(
        message(name, BY_NAME[dtype].mindspore or "", shape, data[begin : begin + part])
        for name, (dtype, shape, data) in held.items()
        for begin in range(0, len(data), part) or (0,)
    )
    assert content == expected
    path = saved(tmp_path_factory.getbasetemp(), content)
    if content:
        assert contents_of(path, index_file(str(path))) == held
