"""The sums of items of distributed checkpoints: whichever bit of an item is another, it is seen."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import struct
import subprocess
import zipfile
import zlib
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from dcp_files import item, record_places, without_sums, zip_records
from refusals import refused

from reshard.core.storage.base import Around
from reshard.core.storage.places import any_store
from reshard.dtypes import BY_NAME
from reshard.errors import SourceError
from reshard.kits.torch import archive
from reshard.kits.torch.archive import Archives, ZipPart
from reshard.kits.torch.saved_tensors import saved_tensor, saved_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from reshard.core.model.entries import Summed

PYTHON = os.environ.get("RESHARD_TORCH_PYTHON", "")
BEFORE = b"what lies before an item"


def looked(path: Path, content: bytes) -> Summed:
    """What is said of an item, behind other bytes and before others in its file."""
    path.write_bytes(BEFORE + content + b"PK\5\6 and what lies behind")
    (found,) = Archives((ZipPart("w", len(BEFORE), len(content)),)).read(str(path), any_store())
    assert found.run == (len(BEFORE), len(content))
    for what, ((begin, nbytes),), crc in found.pending:
        if zlib.crc32(path.read_bytes()[begin : begin + nbytes]) != crc:
            return found._replace(faults=(*found.faults, what))
    return found


def written(contents: bytes | str) -> bytes:
    """An item as this program writes it."""
    saved = saved_text(contents) if isinstance(contents, str) else saved_tensor(BY_NAME["uint8"], (len(contents),))
    found = bytearray(saved.nbytes)
    for offset, literal in saved.literals:
        found[offset : offset + len(literal)] = literal
    if not isinstance(contents, str):
        ((begin, nbytes),) = saved.data
        found[begin : begin + nbytes] = contents
        for place in [place for sums in saved.crcs for place in sums.places]:
            found[place : place + 4] = zlib.crc32(contents).to_bytes(4, "little")
    return bytes(found)


def real(mindspore_data: Path, *, is_object: bool = False) -> bytes:
    """The last item that PyTorch wrote into some file, of a tensor or of an object."""
    content = (mindspore_data / "dcp" / "kinds" / "checkpoint" / "__0_0.distcp").read_bytes()
    ends = [at + 22 for at in range(len(content)) if content[at : at + 4] == b"PK\5\6"]
    items = [content[begin:end] for begin, end in itertools.pairwise([0, *ends])]
    return [one for one in items if (b"_rebuild_tensor" in one) != is_object][-1]


def of(kind: str, mindspore_data: Path) -> bytes:
    """An item of some kind."""
    return {
        "a tensor": lambda: real(mindspore_data),
        "a tensor without elements": lambda: item(np.zeros((0, 3), np.float32)),
        "an object": lambda: real(mindspore_data, is_object=True),
        "written here": lambda: written(b"abcdefgh"),
        "a text": lambda: written("text"),
        "by Python's zip writer": lambda: item(np.arange(6, dtype=np.float32)),
    }[kind]()


KINDS = ["a tensor", "a tensor without elements", "an object", "written here", "a text", "by Python's zip writer"]


@pytest.mark.parametrize("kind", KINDS)
def test_any_bit_that_is_another_is_seen_or_changes_nothing(mindspore_data: Path, tmp_path: Path, kind: str) -> None:
    content = of(kind, mindspore_data)
    records = zip_records(content)
    found = looked(tmp_path / "x", content)
    assert not found.faults
    assert found.carries
    random = Random(kind)  # noqa: S311 -- an example
    unseen = 0
    for at in range(len(content)):
        flipped = bytearray(content)
        flipped[at] ^= 1 << random.randrange(8)
        if not looked(tmp_path / "x", bytes(flipped)).faults:
            unseen += 1
            with suppress(zipfile.BadZipFile):  # of an extra field, which PyTorch does not read
                assert zip_records(bytes(flipped)) == records, at
    assert unseen > 100  # padding, times, versions
    for at in record_places(content):
        flipped = bytearray(content)
        flipped[at] ^= 1 << random.randrange(8)
        assert looked(tmp_path / "x", bytes(flipped)).faults, at


@pytest.mark.parametrize("kind", KINDS)
def test_any_byte_too_few_or_too_many_is_seen(mindspore_data: Path, tmp_path: Path, kind: str) -> None:
    content = of(kind, mindspore_data)
    for nbytes in {0, 1, 21, 22, 97, 98, *range(0, len(content), 37), len(content) - 1}:
        assert looked(tmp_path / "x", content[:nbytes]).faults, nbytes
        assert looked(tmp_path / "x", content[nbytes:]).faults or not nbytes, nbytes
    assert looked(tmp_path / "x", content + b"\0").faults
    assert looked(tmp_path / "x", content + content).faults


def test_long_contents_are_left_to_be_read(tmp_path: Path) -> None:
    contents = bytes(range(256)) * 300
    content = written(contents)
    ((_, runs, crc),) = looked(tmp_path / "x", content).pending
    assert (runs, crc) == (((len(BEFORE) + content.index(contents), len(contents)),), zlib.crc32(contents))
    for at in record_places(content):
        if at % 37 == 0 or not 1000 < at < len(content) - 1000:
            flipped = bytearray(content)
            flipped[at] ^= 1 << at % 8
            assert looked(tmp_path / "x", bytes(flipped)).faults, at


def zipped(sizes: Sequence[int]) -> bytes:
    """A zip of stored records of these sizes."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as opened:
        for number, size in enumerate(sizes):
            opened.writestr(f"archive/data/{number}", bytes([number % 256]) * size)
    return made.getvalue()


def test_a_directory_that_is_longer_than_what_is_read_first(tmp_path: Path) -> None:
    """As of an object with many tensors; each is short, the item is not."""
    content = zipped([*range(300, 800), 9000])
    found = looked(tmp_path / "x", content)
    assert (found.faults, len(found.pending)) == ((), 1)
    for at in record_places(content)[::4999]:
        flipped = bytearray(content)
        flipped[at] ^= 16
        assert len(looked(tmp_path / "x", bytes(flipped)).faults) == 1


def test_many_short_contents_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a file with the states of an optimizer."""
    content = zipped([0, *[4000] * 299])
    monkeypatch.setattr(archive, "_MOST_HEADERS", 60_000)
    assert looked(tmp_path / "x", content).faults
    monkeypatch.setattr(archive, "_MOST_SHORT", 299)
    found = looked(tmp_path / "x", content)
    assert (found.faults, len(found.pending)) == ((), 299)
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 16
    assert looked(tmp_path / "x", bytes(flipped)).faults
    monkeypatch.setattr(archive, "_LARGEST_DIRECTORY", 60)
    assert looked(tmp_path / "x", content).faults


class Failing(Around):
    """A store that fails at one of its reads."""

    def __init__(self, left: int) -> None:
        super().__init__(any_store())
        self.left = left

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        self.left -= 1
        if not self.left:
            raise SourceError(f"{path}: cannot be read now")
        super().read_into(path, offset, buffer)


def test_what_cannot_be_read_is_not_said_to_be_wrong(tmp_path: Path) -> None:
    """The end, a directory that is longer, the headers."""
    path, content = tmp_path / "x", zipped([*[400] * 7, 5000, *[400] * 192])
    path.write_bytes(content)
    part = Archives((ZipPart("w", 0, len(content)),))
    for number in (1, 2, 3, 4):
        with refused(SourceError, "bad-source", path):
            list(part.read(str(path), Failing(number)))
    (found,) = part.read(str(path), Failing(5))
    assert (found.faults, len(found.pending)) == ((), 1)


@pytest.mark.parametrize("early", [False, True])
def test_an_item_beyond_4_gb(tmp_path: Path, early: bool) -> None:
    """Of which the contents are a hole, and what is read is none of it.

    PyTorch has one of the sizes in the header of the record as 0, since it is written before (seen of 2.13).
    """
    saved = saved_tensor(BY_NAME["uint8"], (5 << 30,))
    with (tmp_path / "x").open("wb") as file:
        for offset, literal in saved.literals:
            file.seek(offset)
            file.write(literal)
        for place in saved.crcs[0].places:
            file.seek(place)
            file.write(b"\1\2\3\4")
        file.truncate(saved.nbytes)
        sizes = saved.literals[0][1].index(b"\1\0\x10\0" + struct.pack("<2Q", 5 << 30, 5 << 30))
        if early:
            file.seek(sizes + 12)
            file.write(bytes(8))
    whole = Archives((ZipPart("w", 0, saved.nbytes),))
    (found,) = whole.read(str(tmp_path / "x"), any_store())
    assert (found.faults, found.pending[0][1:]) == ((), (saved.data, 0x04030201))
    behind = sum(saved.data[0])
    with (tmp_path / "x").open("r+b") as file:
        file.seek(behind)
        tail = file.read()
        entry = tail.index(b"PK\1\2", tail.index(b"data/0") - 60)
        sizes = [entry + 20, entry + 24, *range(entry + 64 + 4, entry + 64 + 20)]
        for at in [0, 8, 26, *(behind + at for at in (*sizes, len(tail) - 22, len(tail) - 42, len(tail) - 50))]:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 4]))
            file.flush()
            (found,) = whole.read(str(tmp_path / "x"), any_store())
            assert found.faults, at
            file.seek(at)
            file.write(bytes([byte]))


def test_sums_that_were_left_out_are_not_another(mindspore_data: Path, tmp_path: Path) -> None:
    content = without_sums(real(mindspore_data), behind=True)
    found = looked(tmp_path / "x", content)
    assert (found.faults, found.pending, found.carries) == ((), (), False)
    assert looked(tmp_path / "x", content.replace(b"archive/version", b"archive/wersion", 1)).faults  # headers are seen
    one = bytearray(content)
    struct.pack_into("<I", one, content.index(b"PK\1\2") + 16, 7)
    struct.pack_into("<I", one, content.index(b"PK\7\10") + 4, 7)
    assert looked(tmp_path / "x", bytes(one)).faults


SAVED = """
import sys, torch
torch.serialization.set_crc32_options(sys.argv[1] == "sums")
made = {"tensor": torch.arange(100000.0), "object": [torch.zeros(0), torch.ones(3, 2, dtype=torch.bfloat16), "x"]}
for name, value in made.items():
    torch.save(value, f"{sys.argv[2]}/{name}")
"""


@pytest.mark.torch
@pytest.mark.skipif(not PYTHON, reason="RESHARD_TORCH_PYTHON names no Python that has PyTorch")
@pytest.mark.parametrize("sums", ["sums", "none"])
def test_what_pytorch_writes_now(tmp_path: Path, sums: str) -> None:
    subprocess.run([PYTHON, "-c", SAVED, sums, str(tmp_path)], check=True)
    for name in ("tensor", "object"):
        found = looked(tmp_path / "x", (tmp_path / name).read_bytes())
        assert (found.faults, found.carries) == ((), sums == "sums")


FLIPPED = """
import io, pickle, sys, torch
cases = pickle.load(open(sys.argv[1], "rb"))
for content, others in cases:
    right = torch.load(io.BytesIO(content), weights_only=False)
    for other in others:
        value = torch.load(io.BytesIO(other), weights_only=False)
        if repr(value) != repr(right) or (isinstance(right, torch.Tensor) and not torch.equal(value, right)):
            sys.exit(f"{value} is not {right}")
"""


@pytest.mark.torch
@pytest.mark.skipif(not PYTHON, reason="RESHARD_TORCH_PYTHON names no Python that has PyTorch")
def test_pytorch_reads_the_same_where_a_flipped_bit_is_not_seen(mindspore_data: Path, tmp_path: Path) -> None:
    cases = []
    for kind in ("a tensor", "an object", "written here"):
        content = of(kind, mindspore_data)
        flips = [
            content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
            for at in range(len(content))
            for bit in range(8)
        ]
        cases.append((content, [other for other in flips if not looked(tmp_path / "x", other).faults]))
    (tmp_path / "cases").write_bytes(pickle.dumps(cases))
    subprocess.run([PYTHON, "-c", FLIPPED, str(tmp_path / "cases")], check=True)
