"""Reading items that are zstd streams; longer ones are refused."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoints import assert_equal, numbers
from dcp_files import ZSTD, item, stream, write_torch
from refusals import refused

import reshard
from reshard import Layout, Strategy
from reshard.errors import BudgetError, SourceError
from reshard.formats.dcp import reader as dcp
from reshard.formats.dcp import zstd
from reshard.formats.dcp.metadata import DeclaredTensor
from reshard.kits.chunks import IMPORTED_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dcp_files import Box

FULL = numbers({"w": (6, 4), "b": (5,), "s": ()})
WHOLE: Box = (0, 0), (6, 4)
LARGE = np.random.default_rng(0).integers(0, 50, (1200, 700)).astype(np.float32)
LARGE_BOX: Box = (0, 0), LARGE.shape


@pytest.mark.parametrize("checksum", [False, True])
def test_items_that_are_zstd_streams(tmp_path: Path, checksum: bool) -> None:
    """Of many blocks, several in a file, read in bands by several threads."""
    full = {"w": LARGE, "v": LARGE.T.copy(), "b": FULL["b"]}
    boxes = {"w": LARGE_BOX, "v": ((0, 0), LARGE.T.shape), "b": ((0,), (5,))}
    items = {0: [(name, boxes[name], stream(item(full[name]), checksum=checksum)) for name in full]}
    root = write_torch(tmp_path / "src", full, items, transform_descriptors=ZSTD)
    source = reshard.open(root)
    assert_equal(source, full)
    rows = Strategy.of({name: Layout.of([2], [0, -1]) for name in ("w", "v")})
    reshard.plan(source, rows, to="safetensors", memory=200_000_000).run(tmp_path / "rows", fsync=False)
    assert_equal(reshard.open(tmp_path / "rows", strategy=rows), full)
    assert reshard.verify(tmp_path / "rows").equal
    columns = Strategy.of({name: Layout.of([4], [-1, 0]) for name in ("w", "v")})
    reshard.plan(source, columns, to="safetensors").run(tmp_path / "columns", fsync=False)
    assert_equal(reshard.open(tmp_path / "columns", strategy=columns), full)
    with refused(BudgetError, "not-enough-memory", "'w'", "memory="):
        reshard.plan(source, rows, memory=85_000_000)


@pytest.mark.parametrize(
    ("boxes", "expected"),
    [
        ([((0, 0), (4, 6))], 1),
        ([((0, column), (4, 2)) for column in (0, 2, 4)], 3),
        ([], 1),
    ],
)
def test_how_many_boxes_are_read_in_turn(boxes: list[Box], expected: int) -> None:
    assert dcp._side_by_side(DeclaredTensor("float32", (4, 6), set(boxes))) == expected
    one = {((0, *starts), (1, *extents)) for starts, extents in boxes}
    assert dcp._side_by_side(DeclaredTensor("float32", (1, 4, 6), one)) == expected


def test_what_is_held_of_streams_follows_from_each_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is small and cut into many columns takes no memory for those that are large and whole."""
    small = np.arange(8 * 64, dtype=np.float32).reshape(8, 64)
    columns = [("s", ((0, at), (8, 1)), stream(item(np.ascontiguousarray(small[:, at : at + 1])))) for at in range(64)]
    items = {rank: [one] for rank, one in enumerate(columns)}
    items[0].append(("w", LARGE_BOX, stream(item(LARGE))))
    root = write_torch(tmp_path, {"s": small, "w": LARGE}, items, transform_descriptors=ZSTD)
    coding = reshard.open(root)._record.coding
    assert coding.nbytes(1) - IMPORTED_BYTES < 64 * (1 << 18) * 9 // 8 + 7 * LARGE.nbytes
    monkeypatch.setattr(dcp, "_MOST_HELD", 1 << 20)
    assert reshard.open(root)._record.coding.nbytes(1) - IMPORTED_BYTES < 8 * LARGE.nbytes


def test_longer_items_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others of the file are read."""
    monkeypatch.setattr(zstd, "_LARGEST", 1 << 20)
    items = {0: [("w", LARGE_BOX, stream(item(LARGE))), ("b", ((0,), (5,)), stream(item(FULL["b"])))]}
    root = write_torch(tmp_path / "src", {"w": LARGE, "b": FULL["b"]}, items, transform_descriptors=ZSTD)
    source = reshard.open(root)
    assert_equal(source, {"b": FULL["b"]})
    with refused(SourceError, "unreadable-tensor", "tensor 'w'", "zstd stream", "3.4 MB", "1.0 MB"):
        reshard.plan(source)
    reshard.plan(source, drop=["w"]).run(tmp_path / "out", fsync=False)
    assert_equal(reshard.open(tmp_path / "out"), {"b": FULL["b"]})
    with refused(SourceError, "unreadable-tensor", "tensor 'w'", "zstd stream"):
        reshard.verify(root)


def test_replicas_that_are_zstd_streams(tmp_path: Path) -> None:
    made = {rank: [("w", WHOLE, stream(item(FULL["w"] + rank)))] for rank in range(2)}
    with refused(SourceError, "unreadable-tensor", "'w'", ".metadata"):
        reshard.plan(reshard.open(write_torch(tmp_path, FULL, made, transform_descriptors=ZSTD)))


def test_encoded_items_among_others(tmp_path: Path) -> None:
    items = {0: [("w", WHOLE, item(FULL["w"]))]}
    with refused(SourceError, "no-tensors", "'w' is not a zstd stream"):
        reshard.open(write_torch(tmp_path, FULL, items, transform_descriptors=ZSTD))


ZEROS = (1 << 17 << 3 | 2).to_bytes(3, "little") + b"\0"  # a block of 128 KiB, in four bytes


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        (lambda good: good[:-9], ("bad-chunk", "chunk 0", "__0_0.distcp", "one frame")),
        (lambda good: good + good, ("bad-chunk", "chunk 0", "__0_0.distcp", "one frame")),
        (lambda good: good[: len(good) // 2] + bytes(len(good) - len(good) // 2), ("bad-chunk", "chunk 0", "__0_0")),
        (lambda good: good[:4] + b"\x20" + good[5:], ("no-tensors", "'w'", "zstd")),
        (lambda _: stream(bytes(1 << 20)), ("no-tensors", "'w'", "torch.save")),
    ],
)  # fmt: skip
def test_streams_that_cannot_be_read(tmp_path: Path, spoilt: Callable[[bytes], bytes], said: tuple[str, ...]) -> None:
    bad = spoilt(stream(item(LARGE)))
    root = write_torch(tmp_path, {"w": LARGE}, {0: [("w", LARGE_BOX, bad)]}, transform_descriptors=ZSTD)
    with refused(SourceError, *said):
        reshard.open(root)["w"].compute()


def test_a_sum_at_the_end_of_a_stream_is_compared(tmp_path: Path) -> None:
    """Wherever in what is read at once it lies; zstd itself finds nothing wrong in blocks that are not compressed."""
    noise = np.random.default_rng(0).integers(0, 1 << 62, 90_000)
    for more in range(0, 30, 3):
        array = noise[: len(noise) - more]
        content = bytearray(stream(item(array), checksum=True))
        root = write_torch(
            tmp_path / str(more), {"w": array}, {0: [("w", ((0,), array.shape), bytes(content))]},
            transform_descriptors=ZSTD,
        )  # fmt: skip
        assert_equal(reshard.open(root), {"w": array})
        content[len(content) // 2] ^= 1
        (root / "__0_0.distcp").write_bytes(content)
        with refused(SourceError, "bad-chunk", "chunk 0", root / "__0_0.distcp"):
            reshard.open(root)["w"].compute()


@pytest.mark.slow
def test_a_stream_that_goes_on(tmp_path: Path) -> None:
    """It has a tensor, and 13 GB of zeros behind it: no more is decoded than twice what there should be."""
    good = stream(item(LARGE))
    at, last = 6, 0
    while not last:
        block = int.from_bytes(good[at : at + 3], "little")
        begin, last, at = at, block & 1, at + 3 + (1 if block >> 1 & 3 == 1 else block >> 3)
    bomb = good[:begin] + bytes([good[begin] & ~1]) + good[begin + 1 :] + ZEROS * 100_000 + b"\1\0\0"
    root = write_torch(tmp_path, {"w": LARGE}, {0: [("w", LARGE_BOX, bomb)]}, transform_descriptors=ZSTD)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with refused(SourceError, "bad-chunk", "chunk 0", root / "__0_0.distcp", "3,538,944 bytes"):
        reshard.open(root)["w"].compute()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # in KiB
