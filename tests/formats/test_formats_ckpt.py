"""The .ckpt format: scalars, dims, checksums, tensors in parts, and what is said of files that are not valid."""

from __future__ import annotations

import tracemalloc
import zlib
from typing import TYPE_CHECKING, Any

import helpers
import pytest
from checkpoints import places
from format_files import SAMPLE, contents_of, message, saved, write
from refusals import refused

from reshard.core.model.entries import Content
from reshard.dtypes import BY_NAME
from reshard.errors import SourceError
from reshard.kits import ckpt
from reshard.kits.files import index_file
from reshard.strategy.proto import message_class

if TYPE_CHECKING:
    from pathlib import Path


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


def test_the_checksum_is_read_and_is_not_a_tensor(tmp_path: Path) -> None:
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


def test_a_tensor_over_512_mib_is_two_messages(tmp_path: Path) -> None:
    shape = (3, 128 * 1024 * 1024)  # 384 MiB of bytes
    layout = ckpt.lay_out([Content("w", BY_NAME["float16"], shape), Content("b", BY_NAME["uint8"], (1,))], {})
    assert [nbytes for _, nbytes in places(layout)["w"]] == [512 << 20, 256 << 20]
    path = tmp_path / "sparse.ckpt"
    with path.open("wb") as file:
        file.truncate(layout.size)
        for offset, literal in layout.literals:
            file.seek(offset)
            file.write(literal)
    index = index_file(str(path))
    assert {name: (e.shape, e.runs) for name, e in index.entries.items()} == {
        "w": (shape, places(layout)["w"]),
        "b": ((1,), places(layout)["b"]),
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
    ("content", "code", "place"),
    [
        (WEIGHT + message("b", "Int8", [1], b"b") + WEIGHT, "duplicate-name", "'w'"),
        (WEIGHT + WEIGHT, "unreadable-tensor", "tensor 'w' has 8 bytes"),
        (WEIGHT + message("w", "Int32", [2], b"abcdefgh"), "corrupt", "that at byte 24 is int32 [2]"),
        (WEIGHT + message("w", "Float32", [1], b"abcd"), "corrupt", "float32 [1]"),
        (message("w", "Int32", [3], b"abcd"), "unreadable-tensor", "tensor 'w' has 4 bytes"),
        (message("w", "Int32", [-1], b"abcd"), "unreadable-tensor", "[-1]"),
        (message("w", "Int8", [1] * 65, b"a"), "unreadable-tensor", "[1, 1, 1"),
        (message("w", "Int7", [1], b"a"), "unreadable-tensor", "'Int7'"),
        (message("", "Int8", [1], b"a"), "not-a-checkpoint", "no name"),
        (message("w" * 70000, "Int8", [1], b"a"), "name-too-long", "70000 bytes"),
        (message("w", "str", [0], b"abc"), "unreadable-tensor", "'w'"),
        (message("w", "str", [0], b"\0\xd8\0\0"), "unreadable-tensor", "'w'"),
        (WEIGHT + b"\x12\x02hi", "unknown-field", "field 2"),
        (b"\x0a\x05\x0a\x01w\x12\x00", "not-a-checkpoint", "no tensor_type or tensor_content"),
        (b"\x0a\x03\x0a\x01w", "not-a-checkpoint", "no tensor"),
        (b"\x0a\x03\x0a\x01\xff", "bad-name", "byte 4"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "truncated", "byte 1"),
        (b"\x0a\xff\xff\xff\xff\x0f", "truncated", "6 bytes of 4294967301"),
        (b"\x0a\x01\x0b", "corrupt", "0xb at byte 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_ckpt_that_is_not_sound_says_where(tmp_path: Path, content: bytes, code: str, place: str) -> None:
    path = saved(tmp_path, content)
    with refused(SourceError, code, place) as caught:
        index_file(str(path))
    assert str(caught.value).startswith(str(path))


def test_a_message_of_packed_dims_without_end_is_not_held_in_memory(tmp_path: Path) -> None:
    dims = b"\x01" * 3_000_000
    tensor = b"\x0a" + ckpt.encode_varint(len(dims)) + dims
    value = b"\x0a\x01w\x12" + ckpt.encode_varint(len(tensor)) + tensor
    path = saved(tmp_path, b"\x0a" + ckpt.encode_varint(len(value)) + value)
    tracemalloc.start()
    with refused(SourceError, "unreadable-tensor"):
        index_file(str(path))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1_000_000
