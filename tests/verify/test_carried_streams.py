"""Verifying items that are zstd streams: by the sums that the zip in each carries, and by that of the stream."""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from commands import call
from dcp_files import ZSTD, item, saved, stream, without_sums, write_torch, zip_records
from measure import RESHARD, measured
from numcodecs import zstd

import reshard
from reshard.core.storage.places import any_store
from reshard.formats.dcp import zstd as module
from reshard.formats.dcp.zstd import StreamArchives
from reshard.kits.chunks import decoding
from reshard.kits.torch.archive import Archives, ZipPart

if TYPE_CHECKING:
    from pathlib import Path

    from dcp_files import Box

    from reshard.core.model.entries import Summed

W = np.arange(24, dtype=np.float32).reshape(6, 4)
BOX: Box = (0, 0), W.shape
BEFORE = b"what lies before an item"


def looked(path: Path, content: bytes) -> Summed:
    """What is said of a stream, behind other bytes and before others in its file."""
    path.write_bytes(BEFORE + content + b"and what lies behind")
    part = ZipPart("w", len(BEFORE), len(content))
    (found,) = StreamArchives(Archives(()), ((part, W.nbytes),)).read(str(path), any_store())
    assert (found.name, found.run, found.pending) == ("w", part[1:], ())
    return found


def records(content: bytes) -> dict[str, bytes]:
    return zip_records(zstd.decompress(content))


@pytest.mark.parametrize("kind", ["real", "another", "an object", "with a sum", "with that sum alone"])
def test_any_bit_that_is_another_is_seen_or_changes_nothing(mindspore_data: Path, tmp_path: Path, kind: str) -> None:
    root = mindspore_data / "dcp" / "zstd" / "checkpoint"
    content = {
        "real": (root / "__0_0.distcp").read_bytes,
        "another": lambda: (root / "__1_0.distcp").read_bytes()[453:],
        "an object": lambda: (root / "__1_0.distcp").read_bytes()[:453],
        "with a sum": lambda: stream(item(W), checksum=True),
        "with that sum alone": lambda: stream(without_sums(item(W)), checksum=True),
    }[kind]()
    right = records(content)
    found = looked(tmp_path / "x", content)
    assert not found.faults
    assert found.carries
    random = Random(kind)  # noqa: S311 -- an example
    seen = 0
    for at in range(len(content)):
        for bit in range(8) if at < 64 else random.sample(range(8), 2):
            flipped = bytearray(content)
            flipped[at] ^= 1 << bit
            if looked(tmp_path / "x", bytes(flipped)).faults:
                seen += 1
            else:
                assert records(bytes(flipped)) == right, (at, bit)
    assert seen > 2 * len(content)


def test_any_byte_too_few_or_too_many_is_seen(tmp_path: Path) -> None:
    content = stream(item(W))
    for nbytes in range(0, len(content), 7):
        assert looked(tmp_path / "x", content[:nbytes]).faults, nbytes
    for more in (b"\0", content, bytes(1 << 20)):
        assert looked(tmp_path / "x", content + more).faults


def test_a_stream_without_any_sum(tmp_path: Path) -> None:
    assert not looked(tmp_path / "x", stream(without_sums(item(W)))).carries
    root = write_torch(
        tmp_path / "src", {"w": W}, {0: [("w", BOX, stream(without_sums(item(W))))]}, transform_descriptors=ZSTD
    )
    found = reshard.verify(root)
    assert (found.equal, found.bytes_read) == (True, 0)
    assert found.unchecked[1] == "contents of w, which were saved without checksums"


def test_what_is_another_is_named(tmp_path: Path) -> None:
    """Contents, a record that says how they are rebuilt, an object: of items that are valid streams."""
    good = item(W)
    spoilt = good.replace(W.tobytes()[:16], bytes(16))
    assert spoilt != good
    objects = {"o": stream(saved({"lr": 0.5}).replace(b"lr", b"LR"))}
    items = {0: [("w", BOX, stream(spoilt))]}
    root = write_torch(tmp_path / "src", {"w": W}, items, objects=objects, transform_descriptors=ZSTD, coded=ZSTD)
    w, o = sorted(reshard.verify(root).differences, key=lambda difference: difference.name != "w")
    assert (w.kind, w.name, o.kind, o.name) == ("checksum", "w", "checksum", "o")
    assert w.text.startswith("data/0 in its item at byte 0 of the file has the CRC-32 ")
    assert o.text.startswith(f"data.pkl in its item at byte {len(items[0][0][2])} of the file has the CRC-32 ")
    result = call("verify", root)
    assert result.exit_code == 3
    assert "differs from what it carries of itself (checksums, replicas): 2 of " in result.stdout


def test_an_object_that_goes_on_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = {"o": stream(saved(["word"] * 9)), "p": stream(saved(list(range(200_000))))}
    items = {0: [("w", BOX, stream(item(W)))]}
    root = write_torch(tmp_path / "src", {"w": W}, items, objects=objects, transform_descriptors=ZSTD, coded=ZSTD)
    assert reshard.verify(root).unchecked == (".metadata, which carries no checksum of itself",)
    monkeypatch.setattr(module, "_LARGEST", 1 << 17)
    found = reshard.verify(root)
    assert found.equal
    assert found.unchecked[0] == "contents of p: objects in zstd streams that decode to more than 1 GB"
    assert not any("carry no checksums of them" in text for text in found.unchecked)
    assert found.bytes_read == len(objects["o"]) + len(items[0][0][2])


def test_a_tensor_that_may_be_too_long_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large a shape the metadata declare, nothing is allocated for it."""
    content = stream(item(W))
    (tmp_path / "x").write_bytes(content)
    streams = StreamArchives(Archives(()), ((ZipPart("w", 0, len(content)), 1 << 50),))
    (found,) = streams.read(str(tmp_path / "x"), any_store())
    assert (found.unread, found.faults) == (True, ())
    monkeypatch.setattr(module, "_LARGEST", W.nbytes - 1)
    assert looked(tmp_path / "y", content).unread


LARGE = np.random.default_rng(0).integers(0, 9, (700, 500)).astype(np.float32)


@pytest.mark.parametrize("piece", [777, 1 << 17])
def test_large_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(decoding, "_PIECE_BYTES", piece)
    whole = item(LARGE)

    def of(content: bytes) -> Summed:
        (tmp_path / "x").write_bytes(BEFORE + content)
        archives = StreamArchives(Archives(()), ((ZipPart("w", len(BEFORE), len(content)), LARGE.nbytes),))
        (found,) = archives.read(str(tmp_path / "x"), any_store())
        return found

    assert not of(stream(whole)).faults
    random = Random(piece)  # noqa: S311 -- an example
    for at in random.sample(range(len(whole)), 6):
        spoilt = bytearray(whole)
        spoilt[at] ^= 1 << random.randrange(8)
        assert of(stream(bytes(spoilt))).faults, at
    good = stream(whole)
    assert "is not one frame of zstd" in of(good + b"\0").faults[0]
    assert "is not one frame of zstd" in of(good[:-1]).faults[0]


@pytest.mark.slow
def test_memory_of_a_long_stream(tmp_path: Path) -> None:
    """An item is decoded once at a time by `verify`, and as predicted otherwise; here one of 126 MB."""
    large = np.tile(np.random.default_rng(1).integers(0, 255, 1 << 17).astype(np.float32), 240)
    boxes = {"w": ((0,), large.shape)}
    content = item(large)
    for spoilt, code in ((False, 0), (True, 3)):
        if spoilt:
            held = bytearray(content)
            held[len(held) // 2] ^= 1
            content = bytes(held)
        root = write_torch(
            tmp_path / str(spoilt), {"w": large}, {0: [("w", boxes["w"], stream(content))]}, transform_descriptors=ZSTD
        )
        done = measured(*RESHARD, "verify", str(root))
        assert done.code == code, done.err
        assert done.peak < 62_000_000 + large.nbytes + len(stream(content)) + (32 << 20)
        assert ("data/0 in its item at byte 0 of the file has the CRC-32" in done.out + done.err) == spoilt
        target = str(tmp_path / f"{spoilt}-whole")
        done = measured(
            *RESHARD, "convert", "--to=mindspore", str(root), target, "--tune=fsync=no", "--memory", "420MB", "--json"
        )
        assert done.code == 0, done.err
        assert done.peak <= json.loads(done.out)["peak_memory"] <= 420_000_000
