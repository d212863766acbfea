"""The safetensors format: what is said of files that are not valid, and the checksum in their notes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from format_files import saved, st_file
from refusals import refused

from reshard.errors import SourceError
from reshard.kits.files import index_file

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("content", "code", "place"),
    [
        (st_file({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"abc"), "truncated", " bytes of "),
        (st_file({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"abcde"), "trailing-bytes", "has"),
        (st_file({"w": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]}}, b"abcde"), "bad-offsets", "(a gap"),
        (
            st_file(
                {
                    "w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                    "v": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
                },
                b"abcdef",
            ),
            "bad-offsets", "tensor 'v' begins at byte 2 of the data; expected 4 (an overlap",
        ),
        (
            st_file(
                b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
                b'"w":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
                b"ab",
            ),
            "duplicate-name", "'w'",
        ),
        (st_file({"w": {"dtype": "I8", "shape": [2], "data_offsets": [0, 4]}}, b"abcd"), "unreadable-tensor", "4 byte"),
        (st_file({"w": {"dtype": "F3", "shape": [2], "data_offsets": [0, 1]}}, b"a"), "unreadable-tensor", "'F3'"),
        (st_file({"w": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}, b"a"), "bad-header", "tensor 'w'"),
        (st_file({"w": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, b"a"), "bad-header", "tensor 'w'"),
        (st_file({"w": {"dtype": "U8", "shape": [1], "data_offsets": [False, 1]}}, b"a"), "bad-header", "tensor 'w'"),
        (st_file({"w": {"dtype": "U8", "shape": [1], "data_offsets": [-1, 0]}}, b"a"), "bad-header", "tensor 'w'"),
        (st_file({"w": {"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]}}, b"a"), "bad-header", "tensor 'w'"),
        (st_file({"w": {"dtype": "U8", "data_offsets": [0, 1]}}, b"a"), "bad-header", "tensor 'w'"),
        (st_file({"w": [1]}, b"a"), "bad-header", "tensor 'w'"),
        (st_file({"w\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}), "bad-name", "UTF-8"),
        (st_file({"__metadata__": {"format": 1}}), "bad-metadata", "__metadata__"),
        (st_file({"__metadata__": []}), "bad-metadata", "__metadata__"),
        (st_file({"__metadata__": {"reshard.str": "[1]"}}), "bad-metadata", "reshard.str"),
        (
            st_file(
                {
                    "__metadata__": {"reshard.str": '{"w": "text"}'},
                    "w": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]},
                }
            ),
            "duplicate-name", "'w'",
        ),
        (st_file(b"{not json"), "not-json", "header"),
        (st_file(b'{"\xff": 1}'), "not-json", "header"),
        (st_file(b'{"a":' * 50_000), "not-json", "header"),
        (b"\x00\x10\0\0\0\0\0\0{}", "truncated", "10 bytes of 4104"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_safetensors_file_that_is_not_sound_says_what(tmp_path: Path, content: bytes, code: str, place: str) -> None:
    path = saved(tmp_path, content)
    with refused(SourceError, code, place) as caught:
        index_file(str(path))
    assert str(caught.value).startswith(str(path))


def test_all_faults_of_a_header_are_told_at_once(tmp_path: Path) -> None:
    path = saved(tmp_path, st_file({name: {"dtype": "X", "shape": [], "data_offsets": [0, 0]} for name in "abc"}))
    with refused(SourceError, "unreadable-tensor", "3 faults", "tensor 'a'"):
        index_file(str(path))


@pytest.mark.parametrize(("note", "crc"), [("123", 123), ("-1", None), ("9" * 5000, None), ("", None)])
def test_a_checksum_in_the_notes(tmp_path: Path, note: str, crc: int | None) -> None:
    index = index_file(str(saved(tmp_path, st_file({"__metadata__": {"crc_num": note}}))))
    assert (index.crc, index.metadata) == (crc, ())
