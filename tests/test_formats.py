"""Checkpoint formats: what a file holds by its header, and where everything of a new file goes."""

from __future__ import annotations

import json
import os
import re
import tracemalloc
import zlib
from math import prod
from typing import TYPE_CHECKING, Any

import helpers
import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from reshard import formats
from reshard.dtypes import BY_NAME, STR, by_name
from reshard.errors import SourceError, UsageError
from reshard.formats import Content, FileLayout, ckpt, index_file
from reshard.formats import safetensors as st_format
from reshard.proto import message_class

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from reshard.checkpoint import Entry, FileIndex

Held = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Tensors as (dtype name, shape, bytes)."""


def build(layout: FileLayout, contents: dict[str, bytes]) -> bytes:
    """Put a laid-out file together; every byte must be given exactly once."""
    file, written = bytearray(layout.size), np.zeros(layout.size, np.uint8)

    def put(offset: int, piece: bytes) -> None:
        assert offset + len(piece) <= layout.size
        file[offset : offset + len(piece)] = piece
        written[offset : offset + len(piece)] += 1

    for offset, literal in layout.literals:
        put(offset, literal)
    for name, runs in layout.places.items():
        place = 0
        for offset, nbytes in runs:
            put(offset, contents[name][place : place + nbytes])
            place += nbytes
        assert place == len(contents[name])
    assert (written == 1).all()
    return bytes(file)


def write(format_: formats.Format, held: Held, metadata: dict[str, str] | None = None) -> bytes:
    """What a format makes of tensors; `str` ones are given as UTF-32."""
    contents = [
        Content(name, STR, (0,), data.decode("utf-32-le"))
        if dtype == "str"
        else Content(name, by_name(dtype, UsageError), shape)
        for name, (dtype, shape, data) in held.items()
    ]
    layout = format_.lay_out(contents, metadata or {})
    return build(layout, {name: data for name, (dtype, _, data) in held.items() if dtype != "str"})


def contents_of(path: Path, index: FileIndex) -> Held:
    """What an index says is in a file, read where it says."""
    file = path.read_bytes()

    def data(entry: Entry) -> bytes:
        if entry.text is not None:
            return entry.text.encode("utf-32-le")
        return b"".join(file[offset : offset + nbytes] for offset, nbytes in entry.runs)

    return {name: (entry.dtype.name, entry.shape, data(entry)) for name, entry in index.entries.items()}


def message(name: str, kind: str, dims: Sequence[int], content: bytes) -> bytes:
    """One Checkpoint message, by protobuf."""
    made: Any = message_class("Checkpoint")()
    value = made.value.add(tag=name)
    value.tensor.dims.extend(dims)
    value.tensor.tensor_type = kind
    value.tensor.tensor_content = content
    data: bytes = made.SerializeToString()
    return data


def saved(tmp_path: Path, content: bytes, name: str = "a.ckpt") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


def st_file(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


SAMPLE: Held = {
    "layer.weight": ("float32", (2, 3), bytes(range(24))),
    "layer.bias": ("bfloat16", (3,), b"abcdef"),
    "step": ("int32", (), b"\x07\0\0\0"),
    "quant": ("int4", (2,), b"\x01\xf9"),
    "empty": ("float16", (0, 4), b""),
}
CODE = {"code": ("str", (0,), "aé中😀".encode("utf-32-le"))}


# Examples.


@pytest.mark.parametrize("format_", formats.formats(), ids=lambda format_: format_.NAME)
def test_what_is_laid_out_is_found_again(tmp_path: Path, format_: formats.Format) -> None:
    held = SAMPLE | CODE
    path = saved(tmp_path, write(format_, held), "no-extension-needed")
    index = index_file(str(path))
    assert index.format == format_.NAME
    assert contents_of(path, index) == held
    assert index.entries["code"].text == "aé中😀"
    assert helpers.read_rank_file(path) == (held if format_ is ckpt else SAMPLE)


def test_safetensors_keeps_notes_and_says_what_it_adds(tmp_path: Path) -> None:
    path = saved(tmp_path, write(st_format, SAMPLE | CODE, {"format": "ms"}))
    assert index_file(str(path)).metadata == (("format", "ms"),)
    with safetensors.safe_open(path, "np") as opened:
        assert opened.metadata() == {
            "format": "ms",
            "quant": "Int4",
            "reshard.str": '{"code": "aé中😀"}',
        }


def test_formats_are_found_by_name() -> None:
    assert formats.by_name("ckpt") is ckpt
    assert formats.by_name("safetensors").EXTENSION == ".safetensors"
    with pytest.raises(UsageError, match="unknown format 'pickle'; known are safetensors, ckpt"):
        formats.by_name("pickle")


def test_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="is empty; a checkpoint was expected"):
        index_file(str(saved(tmp_path, b"")))


@pytest.mark.parametrize("content", [b"\x0a", b"PK\x03\x04 a zip", b"\x80\x02}q\x00.", b"{}", b"\x93NUMPY"])
def test_a_file_of_no_known_format(tmp_path: Path, content: bytes) -> None:
    path = saved(tmp_path, content)
    with pytest.raises(SourceError, match=r"is of no known checkpoint format .* expected safetensors or MindSpore"):
        index_file(str(path))


def test_dtypes_that_a_format_does_not_have() -> None:
    with pytest.raises(UsageError, match=r"'w': a \.ckpt file has no dtype float8_e4m3fn; write safetensors, or cast"):
        ckpt.lay_out([Content("w", BY_NAME["float8_e4m3fn"], (1,))], {})
    with pytest.raises(UsageError, match="'w': safetensors has no dtype str"):
        st_format.lay_out([Content("w", STR, (1,))], {})


# The .ckpt format.


def test_scalars_of_older_files(tmp_path: Path) -> None:
    old = message("step", "Int32", [0], b"\x07\0\0\0") + message("none", "Float32", [0], b"")
    path = saved(tmp_path, old)
    assert contents_of(path, index_file(str(path))) == {
        "step": ("int32", (), b"\x07\0\0\0"),
        "none": ("float32", (0,), b""),
    }


def test_packed_dims_as_newer_writers_have_them(tmp_path: Path) -> None:
    tensor = b"\x0a\x03\x02\xac\x02\x12\x05UInt8\x1a\xd8\x04" + bytes(600)
    value = b"\x0a\x01w\x12" + ckpt.encode_varint(len(tensor)) + tensor
    path = saved(tmp_path, b"\x0a" + ckpt.encode_varint(len(value)) + value)
    assert helpers.read_rank_file(path)["w"][:2] == ("uint8", (2, 300))
    assert contents_of(path, index_file(str(path)))["w"][:2] == ("uint8", (2, 300))


def test_the_checksum_is_read_and_is_no_tensor(tmp_path: Path) -> None:
    body = write(ckpt, SAMPLE)
    path = saved(tmp_path, body + b"crc_num" + zlib.crc32(body).to_bytes(10, "big"))
    index = index_file(str(path))
    assert index.crc == zlib.crc32(body)
    assert contents_of(path, index) == SAMPLE
    only_trailer = saved(tmp_path, b"crc_num" + bytes(10), "b.ckpt")
    assert index_file(str(only_trailer)).entries == {}


def test_parts_of_a_tensor_cut_by_rows_as_asynchronous_saving_does(tmp_path: Path) -> None:
    data = bytes(range(48))
    path = saved(
        tmp_path,
        message("w", "Int32", [4, 3], data[:24])
        + message("w", "Int32", [4, 3], data[24:36])
        + message("w", "Int32", [4, 3], data[36:])
        + message("b", "Int8", [1], b"b"),
    )
    index = index_file(str(path))
    assert contents_of(path, index) == {"w": ("int32", (4, 3), data), "b": ("int8", (1,), b"b")}
    assert len(index.entries["w"].runs) == 3


def test_large_tensors_are_written_in_parts_as_mindspore_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ckpt, "PART_BYTES", 10)
    path = saved(tmp_path, write(ckpt, SAMPLE))
    expected = [("layer.weight", 10), ("layer.weight", 10), ("layer.weight", 4)]
    made: Any = message_class("Checkpoint")()
    made.ParseFromString(path.read_bytes())
    assert [(v.tag, len(v.tensor.tensor_content)) for v in made.value][:3] == expected  # cut in the middle of a row
    assert {tuple(v.tensor.dims) for v in made.value if v.tag == "layer.weight"} == {(2, 3)}
    assert contents_of(path, index_file(str(path))) == SAMPLE == helpers.read_rank_file(path)


def test_a_tensor_over_512_mib_is_two_messages(tmp_path: Path) -> None:
    shape = (3, 128 * 1024 * 1024)  # 384 MiB of bytes
    layout = ckpt.lay_out([Content("w", BY_NAME["float16"], shape), Content("b", BY_NAME["uint8"], (1,))], {})
    assert [nbytes for _, nbytes in layout.places["w"]] == [512 << 20, 256 << 20]
    path = tmp_path / "sparse.ckpt"
    with path.open("wb") as file:
        file.truncate(layout.size)
        for offset, literal in layout.literals:
            file.seek(offset)
            file.write(literal)
    index = index_file(str(path))
    assert {name: (e.shape, e.runs) for name, e in index.entries.items()} == {
        "w": (shape, layout.places["w"]),
        "b": ((1,), layout.places["b"]),
    }


def test_map_parameters_are_named_and_not_read(tmp_path: Path) -> None:
    made: Any = message_class("Checkpoint")()
    made.value.add(tag="table").maptensor.tensor.add(tensor_type="Int32", tensor_content=b"keys")
    path = saved(tmp_path, made.SerializeToString() + write(ckpt, SAMPLE))
    index = index_file(str(path))
    assert index.unreadable == (("table", "is a map parameter (a hash table), which has no layout"),)
    assert contents_of(path, index) == SAMPLE


WEIGHT = message("w", "Int32", [1], b"abcd")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (WEIGHT + message("b", "Int8", [1], b"b") + WEIGHT, "'w' is there a second time, at byte"),
        (WEIGHT + WEIGHT, "tensor 'w' has 8 bytes; int32 [1] has 4"),
        (WEIGHT + message("w", "Int32", [2], b"abcdefgh"), "goes on at byte 24 as int32 [2]; it began as int32 [1]"),
        (WEIGHT + message("w", "Float32", [1], b"abcd"), "as float32 [1]; it began as int32 [1]"),
        (message("w", "Int32", [3], b"abcd"), "tensor 'w' has 4 bytes; int32 [3] has 12"),
        (message("w", "Int32", [-1], b"abcd"), ", which no array can have"),
        (message("w", "Int8", [1] * 65, b"a"), ", which no array can have"),
        (message("w", "Int7", [1], b"a"), "tensor 'w' has type 'Int7'; known are str, Bool"),
        (message("", "Int8", [1], b"a"), "has no name; not a MindSpore checkpoint"),
        (message("w" * 70000, "Int8", [1], b"a"), "a name of 70000 bytes; at most 4096 are taken"),
        (message("w", "str", [0], b"abc"), "text entry 'w' is not UTF-32"),
        (message("w", "str", [0], b"\0\xd8\0\0"), "text entry 'w' is not UTF-32"),
        (WEIGHT + b"\x12\x02hi", "field 2 is none that a checkpoint has"),
        (b"\x0a\x05\x0a\x01w\x12\x00", "has no tensor_type or tensor_content"),
        (b"\x0a\x03\x0a\x01w", "has no tensor"),
        (b"\x0a\x03\x0a\x01\xff", "a name is not UTF-8"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "a number does not end"),
        (b"\x0a\xff\xff\xff\xff\x0f", "a field of 4294967295 bytes is expected; 0 are left"),
        (b"\x0a\x01\x0b", "0xb begins no field"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_ckpt_that_is_not_sound_says_where(tmp_path: Path, content: bytes, expected: str) -> None:
    path = saved(tmp_path, content)
    with pytest.raises(SourceError, match=re.escape(expected)) as caught:
        index_file(str(path))
    assert str(caught.value).startswith(str(path))


def test_a_message_of_packed_dims_without_end_is_not_held_in_memory(tmp_path: Path) -> None:
    dims = b"\x01" * 3_000_000
    tensor = b"\x0a" + ckpt.encode_varint(len(dims)) + dims
    value = b"\x0a\x01w\x12" + ckpt.encode_varint(len(tensor)) + tensor
    path = saved(tmp_path, b"\x0a" + ckpt.encode_varint(len(value)) + value)
    tracemalloc.start()
    with pytest.raises(SourceError, match="which no array can have"):
        index_file(str(path))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1_000_000


# The safetensors format.


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (st_file({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"abc"), "the file has"),
        (st_file({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"abcde"), "its header describes"),
        (st_file({"w": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]}}, b"abcde"), "expected 0 (a gap"),
        (
            st_file(
                {
                    "w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                    "v": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
                },
                b"abcdef",
            ),
            "tensor 'v': begins at byte 2 of the data; expected 4 (an overlap",
        ),
        (
            st_file(
                b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
                b'"w":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
                b"ab",
            ),
            "'w': stands twice in one object of the header",
        ),
        (st_file({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"abcd"), "occupies 4 bytes"),
        (st_file({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"a"), "has dtype 'F4'; known are"),
        (st_file({"w": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}, b"a"), "no sound dtype, shape"),
        (st_file({"w": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, b"a"), "no sound dtype, shape"),
        (st_file({"w": {"dtype": "U8", "shape": [1], "data_offsets": [False, 1]}}, b"a"), "no sound dtype, shape"),
        (st_file({"w": {"dtype": "U8", "shape": [1], "data_offsets": [-1, 0]}}, b"a"), "no sound dtype, shape"),
        (st_file({"w": {"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]}}, b"a"), "no sound dtype, shape"),
        (st_file({"w": {"dtype": "U8", "data_offsets": [0, 1]}}, b"a"), "no sound dtype, shape"),
        (st_file({"w": [1]}, b"a"), "no sound dtype, shape"),
        (st_file({"w\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}), "which is not UTF-8"),
        (st_file({"__metadata__": {"format": 1}}), "its __metadata__ is not an object of strings"),
        (st_file({"__metadata__": []}), "its __metadata__ is not an object of strings"),
        (st_file({"__metadata__": {"reshard.str": "[1]"}}), "is not a JSON object of strings"),
        (
            st_file(
                {
                    "__metadata__": {"reshard.str": '{"w": "text"}'},
                    "w": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]},
                }
            ),
            "'w' is both a tensor and a text entry",
        ),
        (st_file(b"{not json"), "its header is not JSON"),
        (st_file(b'{"\xff": 1}'), "its header is not JSON"),
        (st_file(b'{"a":' * 50_000), "its header is not JSON"),
        (b"\x00\x10\0\0\0\0\0\0{}", "its header is said to be 4096 bytes long; the file has 10"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_safetensors_file_that_is_not_sound_says_what(tmp_path: Path, content: bytes, expected: str) -> None:
    path = saved(tmp_path, content)
    with pytest.raises(SourceError, match=re.escape(expected)) as caught:
        index_file(str(path))
    assert str(caught.value).startswith(str(path))


def test_all_faults_of_a_header_are_told_at_once(tmp_path: Path) -> None:
    path = saved(tmp_path, st_file({name: {"dtype": "X", "shape": [], "data_offsets": [0, 1]} for name in "abc"}))
    with pytest.raises(SourceError, match="has 3 faults:"):
        index_file(str(path))


@pytest.mark.parametrize(("note", "crc"), [("123", 123), ("-1", None), ("9" * 5000, None), ("", None)])
def test_a_checksum_in_the_notes(tmp_path: Path, note: str, crc: int | None) -> None:
    index = index_file(str(saved(tmp_path, st_file({"__metadata__": {"crc_num": note}}))))
    assert (index.crc, index.metadata) == (crc, ())


# MindSpore's and safetensors' own files.


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
    with pytest.raises(SourceError, match=rf"{mode}\.ckpt: is encrypted \({kind}\); open it with its key"):
        index_file(str(mindspore_data / "encrypted" / f"{mode}.ckpt"))


def library_has(dtype: str) -> bool:
    try:
        helpers.library_safetensors({"w": (dtype, (0,), b"")})
    except safetensors.SafetensorError:
        return False
    return True


LIBRARY_DTYPES = [dtype for dtype in BY_NAME if library_has(dtype)]


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


# Files that were cut, joined or damaged.

DAMAGED = {"ckpt": write(ckpt, SAMPLE | CODE), "safetensors": write(st_format, SAMPLE | CODE, {"format": "ms"})}
MESSAGE_ENDS = {len(write(ckpt, dict(list((SAMPLE | CODE).items())[:count]))) for count in range(1, len(SAMPLE | CODE))}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path, kind: str) -> None:
    whole = DAMAGED[kind]
    for length in range(len(whole)):
        path = saved(tmp_path, whole[:length])
        if kind == "ckpt" and length in MESSAGE_ENDS:
            # Nothing in the file tells that more tensors belong to it; what is left is sound.
            assert contents_of(path, index_file(str(path))).items() <= (SAMPLE | CODE).items()
            continue
        with pytest.raises(SourceError, match=re.escape(str(path))):
            index_file(str(path))


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
    """Index a damaged file: a `SourceError` or a sound index, and little memory, whatever the file says."""
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


@pytest.mark.parametrize("kind", DAMAGED)
def test_every_flipped_bit_gives_an_error_or_a_sound_index(tmp_path: Path, kind: str) -> None:
    whole = DAMAGED[kind]
    for place in range(8 * len(whole)):
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


def test_indexing_reads_headers_and_seeks_over_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = ("uint8", (8 << 20,), bytes(8 << 20))
    preadv, read = os.preadv, 0

    def counting(fd: int, buffers: list[memoryview], *how: int) -> int:
        nonlocal read
        count = preadv(fd, buffers, *how)
        read += count
        return count

    monkeypatch.setattr(os, "preadv", counting)
    makers: list[Callable[[Held], bytes]] = [lambda held: write(ckpt, held), lambda held: write(st_format, held)]
    for make in makers:
        path = saved(tmp_path, make({"a": large, "b": large}))
        assert list(index_file(str(path)).entries) == ["a", "b"]
    assert 0 < read < 64_000
