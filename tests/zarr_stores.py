"""A small source for tests of zarr stores, kinds of stores to write of it, and kinds that zarr writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
from checkpoints import Array, numbers, write_ranks

import reshard
from reshard import Layout, Strategy
from reshard.core.plan import budget
from reshard.formats.zarr.layout import ZarrGroup

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = {"layers.0.wq": (8, 6), "layers.0.wo": (40, 30), "experts": (4, 6, 10), "norm": (7,)}
ROWS, COLUMNS = Layout.of([2], [0, -1]), Layout.of([2], [-1, 0])
SOURCE = Strategy.of(
    {
        "layers.0.wq": Layout.of([2], [0, -1]),
        "layers.0.wo": COLUMNS,
        "bits": ROWS,
        "experts": Layout.of([2], [-1, 0, -1]),
    }
)
TARGET = Strategy.of(
    {"layers.0.wq": Layout.of([3], [-1, 0]), "layers.0.wo": Layout.of([3], [-1, 0]), "bits": Layout.of([3], [-1, -1]),
     "experts": Layout.of([3], [-1, 0, -1])}
)  # fmt: skip
FULL = numbers({name: SHAPES[name] for name in ("layers.0.wq", "layers.0.wo", "experts")})
FULL["bits"] = np.arange(64, dtype=np.uint16).reshape(8, 8)  # stands for bfloat16
ALSO: dict[str, Array | str] = {
    "norm": np.arange(7, dtype=np.float32), "global_step": np.array(7, np.int32), "none": np.zeros((0, 3), np.float32),
    "run": "größe",
}  # fmt: skip
GROUPS = {
    "blocks": ZarrGroup(),
    "a file a chunk": ZarrGroup(shard_size=0),
    "chunks": ZarrGroup(chunk_size=100),
    "odd shards": ZarrGroup(chunk_size=100, shard_size=300),
    "zstd": ZarrGroup(compression="zstd:3"),
    "zstd chunks": ZarrGroup(chunk_size=100, shard_size=0, compression="zstd"),
    "zstd shards": ZarrGroup(chunk_size=100, shard_size=700, compression="zstd:-3"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"chunks": (4, 3), "compressors": None},
    "whole": {"chunks": (10, 7), "compressors": None},
    "shards": {"chunks": (2, 3), "shards": (4, 6), "compressors": None},
    "row shards": {"chunks": (1, 7), "shards": (4, 7), "compressors": None},
    "dots": {"chunks": (4, 3), "compressors": None, "chunk_key_encoding": {"name": "default", "separator": "."}},
    "v2 keys": {"chunks": (4, 3), "compressors": None, "chunk_key_encoding": {"name": "v2", "separator": "."}},
    "zstd": {"chunks": (4, 3), "compressors": zarr.codecs.ZstdCodec(level=1)},
    "zstd checksum": {"chunks": (4, 3), "compressors": zarr.codecs.ZstdCodec(level=1, checksum=True)},
    "zstd shards": {"chunks": (2, 3), "shards": (4, 6), "compressors": zarr.codecs.ZstdCodec()},
    "gzip": {"chunks": (4, 3), "compressors": zarr.codecs.GzipCodec()},
    "blosc shards": {"chunks": (2, 3), "shards": (4, 6), "compressors": zarr.codecs.BloscCodec()},
    "big endian": {"chunks": (4, 3), "compressors": None, "serializer": zarr.codecs.BytesCodec(endian="big")},
    "transposed": {"chunks": (4, 3), "compressors": None, "filters": [zarr.codecs.TransposeCodec(order=(1, 0))]},
    "default": {"chunks": (3, 3)},
}


@pytest.fixture
def source(tmp_path: Path) -> reshard.Checkpoint:
    return reshard.open(write_ranks(tmp_path / "src", FULL, SOURCE, also=ALSO), strategy=SOURCE)


@pytest.fixture(params=["whole", "small"])
def tasks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with bands of a few rows, and many tasks."""
    if request.param == "small":
        monkeypatch.setattr(budget, "BAND_BYTES", 64)
        monkeypatch.setattr(budget, "TASK_BYTES", 512)


def assert_same(found: Any, expected: Any) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()
