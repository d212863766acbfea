"""Running plans: the same bytes on every scheduler, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
from checkpoints import assert_rank_files, numbers, places, tree, write_file, write_ranks
from eight_ranks import FULL, ROWS, TARGET, small_tasks, source
from generators import Model, models
from hypothesis import HealthCheck, given, settings
from refusals import refused
from samples import examples

import reshard
from reshard import Layout, Strategy, plan
from reshard.core.model.entries import Content
from reshard.core.storage import local as store
from reshard.dtypes import BY_NAME
from reshard.errors import TargetError
from reshard.kits import ckpt

__all__ = ["small_tasks", "source"]  # fixtures, for pytest to find


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_the_bytes_are_the_same_on_every_scheduler(
    source: reshard.Checkpoint, tmp_path: Path, small_tasks: None, format: str
) -> None:
    made = reshard.plan(source, TARGET, to=format)
    assert len(made._record.tasks) > 10
    made.run(tmp_path / "sync", client="synchronous")
    for threads in (1, 2, 5):
        made.run(tmp_path / f"{threads}", threads=threads)
        assert tree(tmp_path / f"{threads}") == tree(tmp_path / "sync")
    assert_rank_files(tmp_path / "sync", FULL, TARGET)


def test_progress_adds_up(source: reshard.Checkpoint, tmp_path: Path, small_tasks: None) -> None:
    told: list[Any] = []
    report = reshard.plan(source, TARGET).run(tmp_path / "out", progress=told.append)
    written = [event.written for event in told]
    assert written == sorted(written)
    assert told[-1].written == told[-1].total == report.bytes_written
    assert report.bytes_written == sum(array.nbytes * (3 if name == "w" else 1) for name, array in FULL.items())
    assert len(report.files) == 6


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(models())
def test_any_model_goes_there_and_back(tmp_path_factory: pytest.TempPathFactory, model: Model) -> None:
    root = tmp_path_factory.mktemp("model")
    full = numbers(model.shapes, "float64")
    before = write_ranks(root / "a", full, model.source)
    there = reshard.plan(reshard.open(before, strategy=model.source), model.target, to="ckpt")
    there.run(root / "b", fsync=False)
    assert_rank_files(root / "b", full, model.target)
    back = reshard.plan(reshard.open(root / "b", strategy=model.target), model.source, to="safetensors")
    back.run(root / "c", fsync=False)
    assert tree(root / "c") == tree(root / "a")


def test_tensors_in_several_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MindSpore cuts contents at 512 MiB, in the middle of a row; here at 100 bytes, in the middle of an element."""
    monkeypatch.setattr(ckpt, "PART_BYTES", 101)
    source = reshard.open(write_ranks(tmp_path / "a", FULL, ROWS, "ckpt"), strategy=ROWS)
    assert len(source._record.files[0].index.entries["w"].runs) > 1
    reshard.plan(source, TARGET).run(tmp_path / "b")
    assert_rank_files(tmp_path / "b", FULL, TARGET)


def test_a_thousand_ranks_under_few_open_files(tmp_path: Path) -> None:
    script = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from checkpoints import numbers, write_ranks, assert_rank_files
import reshard
from reshard import Layout, Strategy
before, after = Strategy.of({"w": Layout.of([1200], [0])}), Strategy.of({"w": Layout.of([1000], [0])})
full = numbers({"w": (6000,)})
root = Path(sys.argv[1])
source = reshard.open(write_ranks(root / "a", full, before), strategy=before)
reshard.plan(source, after).run(root / "b", fsync=False)
assert_rank_files(root / "b", full, after)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parents[1])],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_source_is_never_overwritten(source: reshard.Checkpoint, tmp_path: Path) -> None:
    made = reshard.plan(source, ROWS)
    (tmp_path / "link").symlink_to(tmp_path / "src")
    for directory in (tmp_path / "src", tmp_path / "link"):
        with refused(TargetError, "target-is-source", "rank_0"):
            made.run(directory, overwrite=True)


def test_replicas_stored_once(tmp_path: Path) -> None:
    """Every block is in one file, as many bytes in each as can be, and what is written opens and converts as all do."""
    shapes = {f"w{i}": (16, 8 + 8 * (i % 3)) for i in range(12)} | {"b": (8,)}
    full = numbers(shapes)
    spread = Strategy.of({name: Layout.of([2, 4], [0] + [-1] * (len(shape) - 1)) for name, shape in shapes.items()})
    path = write_file(tmp_path / "whole.ckpt", {**full, "global_step": np.array(7, np.int32)}, "ckpt")
    for format in ("safetensors", "ckpt"):
        made = reshard.plan(reshard.open(path), spread, to=format, remove_redundancy=True)
        assert made.stats.bytes_written == sum(array.nbytes for array in full.values()) + 8 * 4
        made.run(tmp_path / format)
        sizes = [sum(p.stat().st_size for p in (tmp_path / format / f"rank_{r}").iterdir()) for r in range(8)]
        assert max(sizes) < 1.5 * min(sizes)
        again = reshard.open(tmp_path / format, strategy=spread)
        if format == "safetensors":
            assert all(file.index.deduplicated for file in again._record.files)
        reshard.plan(again, to="ckpt").run(tmp_path / f"{format}_back")
        assert helpers.read_rank_file(tmp_path / f"{format}_back/rank_0/checkpoint_0.ckpt") == helpers.read_rank_file(
            path
        )


def test_no_rank_of_a_deduplicated_set_is_empty(tmp_path: Path) -> None:
    """MindSpore cannot load a file without any tensor."""
    path = write_file(tmp_path / "whole.safetensors", numbers({"w": (4, 4), "b": (2,)}))
    everywhere = Strategy.of({"w": Layout.of([8], [-1, -1]), "b": Layout.of([8], [-1])})
    reshard.plan(reshard.open(path), everywhere, remove_redundancy=True).run(tmp_path / "out")
    held = [list(file.index.entries) for file in reshard.open(tmp_path / "out", strategy=everywhere)._record.files]
    assert sorted(map(len, held)) == [1] * 8
    assert held.count(["w"]) == 1


@pytest.mark.slow
def test_one_tensor_of_16_gb_within_512_mb(tmp_path: Path) -> None:
    """A sparse file with numbers at random places, so that skipping holes cannot pass; peak against prediction."""
    shape = (1 << 17, 1 << 16)  # two bytes each
    layout = ckpt.lay_out([Content("w", BY_NAME["bfloat16"], shape)], {})
    path = tmp_path / "w.ckpt"
    random = np.random.default_rng(0)
    spots = sorted(random.integers(0, shape[0] * shape[1], 200).tolist())
    runs = places(layout)["w"]
    with path.open("wb") as file:
        file.truncate(layout.size)
        for offset, literal in layout.literals:
            os.pwrite(file.fileno(), literal, offset)
        for place in spots:
            part, within = divmod(2 * place, ckpt.PART_BYTES)
            os.pwrite(file.fileno(), (place % 65521 + 1).to_bytes(2, "little"), runs[part][0] + within)
    script = """
import sys
import reshard
from reshard import Layout, Strategy
target = Strategy.of({"w": Layout.of([3, 8], [-1, 0])})
plan = reshard.plan(reshard.open(sys.argv[1]), target, memory=512 << 20, to="safetensors", ranks=[2, 5])
plan.run(sys.argv[2], fsync=False)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(plan.stats.peak_memory, int(peak.split()[1]) * 1024)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(path), str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    predicted, peak = map(int, done.stdout.split())
    assert peak <= predicted <= 512 << 20
    found = {}
    for rank in (2, 5):
        entry = reshard.open(tmp_path / f"out/rank_{rank}/checkpoint_{rank}.safetensors")
        ((offset, nbytes),) = entry._record.files[0].index.entries["w"].runs
        assert nbytes == 2 * shape[0] * shape[1] // 8
        bits = np.memmap(entry._record.files[0].path, np.uint16, offset=offset, mode="r")
        for start in range(0, len(bits), 1 << 26):
            for index in np.flatnonzero(bits[start : start + (1 << 26)]):
                row, column = divmod(start + int(index), shape[1] // 8)
                found[row * shape[1] + rank * shape[1] // 8 + column] = int(bits[start + index])
    expected = {p: p % 65521 + 1 for p in spots if p % shape[1] // (shape[1] // 8) in {2, 5}}
    assert found == expected


def test_a_plan_with_nothing_to_move_makes_its_files_first(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.ckpt", {"note": "text", "empty": np.zeros((0, 3), np.float32)}, "ckpt")
    for attempt in range(20):
        reshard.plan(reshard.open(path)).run(tmp_path / f"{attempt}", threads=4)
        assert (tmp_path / f"{attempt}" / "rank_0" / "checkpoint_0.ckpt").read_bytes() == path.read_bytes()


def test_handles_are_closed(source: reshard.Checkpoint, tmp_path: Path) -> None:
    reshard.plan(source, TARGET).run(tmp_path / "out")
    assert not store.local_store().files.handles
    assert plan is reshard.plan  # the function, though a module has its name
