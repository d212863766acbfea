"""Checkpoint formats: what a file holds by its header, and where everything of a new file goes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import helpers
import pytest
import safetensors
from format_files import CODE, SAMPLE, Held, contents_of, saved, st_file, write
from refusals import refused

from reshard.core.model.entries import Content
from reshard.dtypes import BY_NAME, STR
from reshard.errors import SourceError, UsageError
from reshard.kits import ckpt
from reshard.kits import files as formats
from reshard.kits import safetensors as st_format
from reshard.kits.files import index_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize("format_", formats.encodings(), ids=lambda format_: format_.NAME)
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


@pytest.mark.parametrize(
    ("content", "code"),
    [(content, "not-a-checkpoint") for content in (b"\x0a", b"\x80\x02}q\x00.", b"{}", b"\x93NUMPY")]
    + [(b"", "empty-file"), (b"PK\x03\x04 a zip", "unsupported-format")],
)
def test_a_file_of_no_known_format(tmp_path: Path, content: bytes, code: str) -> None:
    with refused(SourceError, code):
        index_file(str(saved(tmp_path, content)))


def test_dtypes_that_a_format_does_not_have() -> None:
    with refused(UsageError, "unsupported-dtype", "'w'", ".ckpt", "float8_e4m3fn"):
        ckpt.lay_out([Content("w", BY_NAME["float8_e4m3fn"], (1,))], {})
    with refused(UsageError, "unsupported-dtype", "'w'"):
        st_format.lay_out([Content("w", STR, (1,))], {})


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
