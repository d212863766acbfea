"""The safetensors format: what is said of files that are not valid, and the checksum in their notes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from format_files import saved, st_file

from reshard.errors import SourceError
from reshard.formats import index_file

if TYPE_CHECKING:
    from pathlib import Path


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
        (st_file({"w": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}, b"a"), "no valid dtype, shape"),
        (st_file({"w": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, b"a"), "no valid dtype, shape"),
        (st_file({"w": {"dtype": "U8", "shape": [1], "data_offsets": [False, 1]}}, b"a"), "no valid dtype, shape"),
        (st_file({"w": {"dtype": "U8", "shape": [1], "data_offsets": [-1, 0]}}, b"a"), "no valid dtype, shape"),
        (st_file({"w": {"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]}}, b"a"), "no valid dtype, shape"),
        (st_file({"w": {"dtype": "U8", "data_offsets": [0, 1]}}, b"a"), "no valid dtype, shape"),
        (st_file({"w": [1]}, b"a"), "no valid dtype, shape"),
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
