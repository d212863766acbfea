"""Checkpoint formats: what a file holds by its header, and where everything of a new file goes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import helpers
import pytest
import safetensors
from format_files import CODE, SAMPLE, Held, contents_of, saved, write
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


def test_an_empty_file(tmp_path: Path) -> None:
    with refused(SourceError, "empty-file"):
        index_file(str(saved(tmp_path, b"")))


@pytest.mark.parametrize("content", [b"\x0a", b"\x80\x02}q\x00.", b"{}", b"\x93NUMPY"])
def test_a_file_of_no_known_format(tmp_path: Path, content: bytes) -> None:
    path = saved(tmp_path, content)
    with refused(SourceError, "not-a-checkpoint"):
        index_file(str(path))


def test_a_file_of_torch_save_among_files_of_ranks(tmp_path: Path) -> None:
    with refused(SourceError, "unsupported-format", "torch.save"):
        index_file(str(saved(tmp_path, b"PK\x03\x04 a zip")))


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
