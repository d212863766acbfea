"""Headers of many files: equal ones are parsed once, and no two that differ are taken for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoints import write_file

from reshard.core.storage.base import Around
from reshard.core.storage.places import AnyStore, any_store
from reshard.kits import ckpt, headers
from reshard.kits.files import index_file
from reshard.kits.headers import Headers

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.core.model.entries import FileIndex

FORMATS = pytest.mark.parametrize("format", ["safetensors", "ckpt"])


def indexes(*paths: Path) -> list[FileIndex]:
    """Index files together; each index must be what the file alone has."""
    together = Headers(AnyStore())
    found = [together.index(str(path)) for path in paths]
    assert [index._replace(header_id=0) for index in found] == [index_file(str(path)) for path in paths]
    return found


def tensors(first: float, *, count: int = 3000, name: str = "w") -> dict[str, np.ndarray]:
    return {name: np.arange(first, first + count, dtype=np.float32), "b": np.float32(first), "e": np.zeros((0, 2))}


@FORMATS
def test_files_that_differ_in_contents_alone_are_parsed_once(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write_file(tmp_path / f"{rank}", tensors(rank), format) for rank in range(5)]
    first, *others = indexes(*paths)
    assert all(other is first for other in others)
    parsed: list[str] = []
    monkeypatch.setattr(headers, "header_of", lambda path, **more: parsed.append(path) or index_file(path, **more))
    together = Headers(AnyStore())
    for path in paths:
        together.index(str(path))
    assert parsed == [str(paths[0])]


@FORMATS
@pytest.mark.parametrize(
    "other",
    [
        tensors(1, name="v"),
        {"w": np.zeros(3000, np.int32), "b": np.float32(0), "e": np.zeros((0, 2))},
        {"w": np.zeros((30, 100), np.float32), "b": np.float32(0), "e": np.zeros((0, 2))},
        {"w": np.zeros(3001, np.float32), "e": np.zeros((0, 2))},
    ],
    ids=["name", "dtype", "shape", "fewer"],
)
def test_headers_that_differ_are_told_apart(tmp_path: Path, format: str, other: dict[str, np.ndarray]) -> None:
    same = write_file(tmp_path / "0", tensors(0), format), write_file(tmp_path / "2", tensors(2), format)
    differs = write_file(tmp_path / "1", other, format)
    size = max(path.stat().st_size for path in (*same, differs))
    if format == "safetensors":  # of one size, so that only the bytes tell them apart
        for path in (*same, differs):
            content = path.read_bytes()
            length = int.from_bytes(content[:8], "little")
            padding = b" " * (size - len(content))
            path.write_bytes((length + len(padding)).to_bytes(8, "little") + content[8 : 8 + length] + padding
                             + content[8 + length :])  # fmt: skip
    first, second, third = indexes(same[0], differs, same[1])
    assert first is not second
    assert third.entries is first.entries
    assert third.header_id == first.header_id != second.header_id


def test_text_is_part_of_a_header_though_it_is_contents(tmp_path: Path) -> None:
    paths = [write_file(tmp_path / note, {**tensors(0), "note": note}, "ckpt") for note in ("one", "two")]
    assert [index.entries["note"].text for index in indexes(*paths)] == ["one", "two"]


def test_files_that_differ_in_a_checksum_share_their_entries(tmp_path: Path) -> None:
    paths = [write_file(tmp_path / f"{crc}", tensors(0), crc_num=f"{crc}") for crc in (11, 22)]
    first, second = indexes(*paths)
    assert (first.crc, second.crc) == (11, 22)
    assert first.entries is second.entries


def test_files_behind_another_store_are_compared_too(tmp_path: Path) -> None:
    paths = [write_file(tmp_path / f"{rank}", tensors(rank), "ckpt") for rank in range(2)]
    together = Headers(Around(any_store()))  # such as one that decrypts
    assert together.index(str(paths[0])) is together.index(str(paths[1]))


@FORMATS
def test_local_files_are_compared_without_a_call_for_each_piece(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write_file(tmp_path / f"{rank}", tensors(rank), format) for rank in range(2)]
    together = Headers(any_store())
    first = together.index(str(paths[0]))
    monkeypatch.setattr(AnyStore, "read_into", None)
    assert together.index(str(paths[1])) is first


def test_what_is_not_a_entry_is_not_held_however_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "_MOST_HELD", 100)
    table = b"\x0a\x01m\x1a" + ckpt.encode_varint(300) + bytes(300)
    content = b"\x0a" + ckpt.encode_varint(len(table)) + table
    paths = [write_file(tmp_path / name, {"w": np.ones(2, np.float32)}, "ckpt") for name in "01"]
    for path in paths:
        path.write_bytes(path.read_bytes() + content)
    first, second = indexes(*paths)
    assert first is not second
    assert first.unreadable == second.unreadable != ()
