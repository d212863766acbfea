"""zarr stores at URLs: an S3 server of its own on loopback, and fsspec's memory; see `test_zarr` for those on disks."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import fsspec
import numpy as np
import pytest
import zarr
from checkpoints import plan_with, tree, write_file, write_ranks
from faulty import Faults, raising
from refusals import refused
from remotes import Requests, at_urls, get
from zarr_stores import ALSO, FULL, GROUPS, OPTIONS, TARGET, assert_same, source

import reshard
from reshard import Layout, Strategy
from reshard.core.plan import budget
from reshard.core.plan.partition import partitioned
from reshard.core.storage.urls.s3 import upload_parts
from reshard.core.storage.urls.s3.upload_parts import LEAST_PART_BYTES
from reshard.errors import SourceError, TargetError
from reshard.formats.zarr.layout import ZarrGroup

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["source"]  # fixtures, for pytest to find


@at_urls("group", GROUPS, 3)
def test_there_and_back(
    source: reshard.Checkpoint,
    root: str,
    tmp_path: Path,
    group: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The files are those of a local store, byte for byte; zarr reads them, and so do we, also as a source."""
    monkeypatch.setattr(budget, "BAND_BYTES", 64)
    monkeypatch.setattr(budget, "TASK_BYTES", 512)
    plan = plan_with(source, files=GROUPS[group])
    plan.run(tmp_path / "local")
    report = plan.run(f"{root}/model.zarr", threads=3)
    assert report.bytes_written == plan.stats.bytes_written
    assert get(f"{root}/model.zarr") == tree(tmp_path / "local")
    opened, own = zarr.open_group(f"{root}/model.zarr", mode="r"), reshard.open(f"{root}/model.zarr")
    for name, value in {**FULL, **{name: value for name, value in ALSO.items() if not isinstance(value, str)}}.items():
        assert_same(opened[name][...], value)
        assert_same(own[name].compute(), value)
        if value.ndim > 1 and value.size:
            assert_same(own[name][1:4:2, ..., 1:3].compute(), value[1:4:2, ..., 1:3])
    assert own.tensors["run"].text == "größe"
    reshard.plan(own, TARGET).run(f"{root}/via")
    reshard.plan(source, TARGET).run(tmp_path / "direct")
    assert get(f"{root}/via") == tree(tmp_path / "direct")


@at_urls("options", ["shards", "zstd shards", "blosc shards", "gzip", "default"], 3)
def test_stores_that_zarr_wrote(root: str, tmp_path: Path, options: str) -> None:
    """Also with absent chunks, and codecs that only zarr knows."""
    value = np.random.default_rng(0).integers(1, 100, (10, 7)).astype("float32")
    group = zarr.open_group(f"{root}/z", mode="w")
    for name, rows in (("full", slice(None)), ("layers/0/sparse", slice(3, 5))):
        array = group.create_array(name, shape=(10, 7), dtype="float32", fill_value=2.5, **OPTIONS[options])
        array[rows] = value[rows]
    own = reshard.open(f"{root}/z")
    sparse = np.full((10, 7), 2.5, "float32")
    sparse[3:5] = value[3:5]
    assert {name: own[name].compute().tolist() for name in own} == {
        "full": value.tolist(), "layers/0/sparse": sparse.tolist()
    }  # fmt: skip
    reshard.plan(own).run(tmp_path / "out")
    assert_same(reshard.open(tmp_path / "out")["layers/0/sparse"].compute(), sparse)


def test_only_ranges_of_chunks_are_read(root: str, asked: Requests, tmp_path: Path) -> None:
    full = {"w": np.arange(3 << 18, dtype=np.float32).reshape(1024, 768)}
    path = write_file(tmp_path / "w.safetensors", full)
    for name, group in {"plain": ZarrGroup(chunk_size=1 << 20), "zstd": ZarrGroup(1 << 20, 0, "zstd")}.items():
        plan_with(reshard.open(path), files=group).run(f"{root}/{name}")
    own = reshard.open(f"{root}/plain")
    asked.ranges.clear()
    assert_same(own["w"][300:310].compute(), full["w"][300:310])
    assert asked.nbytes == 10 * 768 * 4
    own = reshard.open(f"{root}/zstd")
    stored = {name: len(content) for name, content in get(f"{root}/zstd").items() if "/c." in name}
    assert len(stored) == 4
    asked.ranges.clear()
    report = reshard.plan(own).run(tmp_path / "out", client="synchronous")
    assert report.bytes_read == 3 << 20
    assert asked.nbytes == sum(stored.values())  # each compressed chunk once
    assert len(asked.ranges) == 4


@at_urls("how", [(None, False), ("zstd", False), (None, True), ("zstd", True)], 3)
def test_a_failure_leaves_nothing_that_is_taken_for_a_store(
    source: reshard.Checkpoint,
    root: str,
    tmp_path: Path,
    faults: Faults,
    how: tuple[str | None, bool],
) -> None:
    """Before its last file, the group's metadata, there is no store, also where an older one was there."""
    store, (compression, overwrite) = f"{root}/model.zarr", how
    plan = plan_with(source, files=ZarrGroup(chunk_size=2000, shard_size=0, compression=compression))
    plan.run(tmp_path / "local")
    if overwrite:
        plan.run(store)
        assert plan.run(store).finished == len(plan._record.files)
    for share in (0.1, 0.5, 1):
        faults.clear()
        faults.every(lambda _call: none_yet(store), "create")
        faults.nth(round(share * len(plan._record.files)) - 1, raising(TargetError("the network is gone")), "create")
        with refused(TargetError, "bad-target", "the network is gone"):
            plan.run(store, overwrite=overwrite, restart=True, client="synchronous")
        with pytest.raises(SourceError):
            reshard.open(store)
        none_yet(store)
    assert faults.of("create")[-1].path == f"{store}/zarr.json"
    faults.clear()
    plan.run(store)
    assert get(store) == tree(tmp_path / "local")


def none_yet(store: str) -> None:
    fs, path = fsspec.core.url_to_fs(store)
    fs.invalidate_cache()
    assert not fs.exists(f"{path}/zarr.json")


def test_large_chunks_are_sent_in_parts(
    bucket: str,
    asked: Requests,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Column blocks side by side are sent side by side, none is held whole; small chunks share a shard."""
    full = {"w": np.arange(4 << 20, dtype=np.float32).reshape(1024, 4096)}
    strategy = Strategy.of({"w": Layout.of([2], [-1, 0])})
    local = reshard.open(write_ranks(tmp_path / "src", full, strategy), strategy=strategy)
    monkeypatch.setattr(upload_parts, "LEAST_PART_BYTES", 5 << 20)
    plan = plan_with(local, files=ZarrGroup(shard_size=0))
    plan.run(f"{bucket}/z")
    assert asked.operations.count("CompleteMultipartUpload") == 2
    assert asked.operations.count("UploadPart") == 4
    assert_same(zarr.open_group(f"{bucket}/z", mode="r")["w"][...], full["w"])


def test_memory_is_predicted(tmp_path: Path) -> None:
    """Each thread has the parts of the files that some rows meet, and in plain shards what waits for its turn."""
    full = {"w": np.zeros((2048, 8192), np.float32)}
    strategy = Strategy.of({"w": Layout.of([4], [-1, 0])})
    local = reshard.open(write_ranks(tmp_path / "src", full, strategy), strategy=strategy)
    base = plan_with(local, files=ZarrGroup(shard_size=0)).stats.peak_memory
    beside = partitioned(plan_with(local, files=ZarrGroup(shard_size=0))._record, None, "memory://x")
    assert len(beside.tasks) == 1  # the four chunks have all rows
    assert beside.stats.peak_memory - base >= 4 * LEAST_PART_BYTES
    rows = partitioned(plan_with(local, files=ZarrGroup(chunk_size=8 << 20, shard_size=0))._record, None, "memory://x")
    assert beside.stats.peak_memory - rows.stats.peak_memory >= 2 * LEAST_PART_BYTES
    shards = partitioned(plan_with(local, files=ZarrGroup(shard_size=64 << 20))._record, None, "memory://x")
    assert shards.stats.peak_memory - base >= 64 << 20
    shutil.rmtree(tmp_path / "src")
