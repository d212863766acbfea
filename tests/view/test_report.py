"""The report at the end of a run, in words and as data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoints import numbers, write_ranks

import reshard
from reshard import Layout, Selection, Strategy
from reshard.cli.terminal import OPTIONS
from reshard.core.storage.crc import crc32c
from reshard.errors import spelled
from reshard.view.plans import plan_data, plan_text, report_text

if TYPE_CHECKING:
    from reshard.core.run.settings import Report

SOURCE = Strategy.of({"w": Layout.of([4], [0, -1]), "adam_m.w": Layout.of([4], [0, -1])})
TARGET = Strategy.of({"w": Layout.of([2, 2], [0, -1]), "adam_v.w": Layout.of([2, 2], [0, -1])})


@pytest.fixture
def plan(tmp_path: Path) -> reshard.Plan:
    full = numbers({"w": (8, 8), "adam_m.w": (8, 8)})
    root = write_ranks(tmp_path / "src", full, SOURCE, also={"global_step": np.array(7, np.int32)})
    return reshard.plan(reshard.open(root, strategy=SOURCE), TARGET)


@pytest.fixture
def report(plan: reshard.Plan, tmp_path: Path) -> Report:
    return plan.run(tmp_path / "dst")


def test_it_counts_what_was_written(plan: reshard.Plan, report: Report, tmp_path: Path) -> None:
    assert (report.tensors, report.source_files) == (2, 4)
    assert report.replicas == plan._record.replicas == 2 + 3  # w has 2 blocks on 4 ranks, global_step 1
    assert report.bytes_written == report.bytes_read + 256 + 3 * 4
    assert report.target_bytes == sum(path.stat().st_size for path in (tmp_path / "dst").rglob("*.safetensors"))
    assert (report.dropped, report.missing) == (("adam_m.w",), ("adam_v.w",))
    assert report.checksums is not None
    for path, sums in report.checksums.items():
        held = reshard.open(tmp_path / "dst" / path)
        assert sums == {name: crc32c(held[name].compute().tobytes()) for name in held}


def test_what_the_selection_leaves_out_is_said_with_the_options_that_do(plan: reshard.Plan, tmp_path: Path) -> None:
    selection = Selection(weights_only=True, exclude=("global*",))
    chosen = reshard.plan(reshard.Checkpoint(plan._record.source), TARGET, selection=selection)
    assert chosen.left_out == ("adam_m.w", "global_step")
    assert (plan.left_out, plan.missing, chosen.missing) == ((), ("adam_v.w",), ())
    line = "left out by weights_only and exclude: 2 names: adam_m.w, global_step\n"
    assert line in plan_text(chosen._record, "dst", verbose=True)
    report = chosen.run(tmp_path / "chosen")
    assert "1 tensor (2 tensors left out)" in report_text(chosen._record, report)
    text = report_text(chosen._record, report, verbose=True)
    assert line in text
    assert line.replace("weights_only and exclude", "--weights-only and --exclude") in spelled(text, OPTIONS)
    assert "dropped" not in text


def test_memory_is_measured_as_it_is_predicted(plan: reshard.Plan, tmp_path: Path) -> None:
    """What a notebook holds, and what it held before, is not the run's."""
    largest = b"\1" * (300 << 20)
    del largest
    held = b"\1" * (200 << 20)
    for report in (plan.run(tmp_path / "dst"), plan.graph(tmp_path / "graph").compute()):
        assert report.predicted_memory == pytest.approx(plan.stats.peak_memory, rel=0.1)
        assert report.predicted_memory / 2 < report.peak_memory < report.predicted_memory + (16 << 20)
    assert len(held) == 200 << 20


def test_finished_files_are_not_read_again(plan: reshard.Plan, report: Report, tmp_path: Path) -> None:
    """A bit of one has rotted, with its size and time kept: only `verify` sees it."""
    path = Path(report.directory) / report.files[3]
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    again = plan.run(report.directory)
    command = "reshard verify dst"
    told = "4 files kept, finished by an earlier run and not read again: "
    assert again.finished == 4
    assert report_text(plan._record, again, command).startswith("nothing is left to do: ")
    assert f"{told}the command below reads every bit\nnext: {command}" in report_text(plan._record, again, command)
    assert report_text(plan._record, again).endswith(f"{told}reshard verify reads every bit")
    assert plan_data(plan._record, "dst", again)["finished"] == 4
    (Path(report.directory) / report.files[0]).unlink()
    again = plan.run(report.directory)
    assert again.finished == 3
    assert "3 files kept" in report_text(plan._record, again, command)
    path.unlink()
    assert "3 files kept" in report_text(plan._record, plan.run(report.directory))
    assert "kept" not in report_text(plan._record, plan.run(report.directory, restart=True))


def test_checksums_have_their_place(plan: reshard.Plan, report: Report) -> None:
    sums = {"rank_0/checkpoint_0.safetensors": {"w": 0x1A2B, "global_step": 0xFFFFFFFF}}
    summed = report._replace(checksums=sums)
    unsummed = report._replace(checksums=None)
    assert "checksummed" not in report_text(plan._record, unsummed)
    assert "  sums     none made" in report_text(plan._record, unsummed, verbose=True)
    data = plan_data(plan._record, "dst", summed)
    assert data["checksums"] == {"rank_0/checkpoint_0.safetensors": {"w": "00001a2b", "global_step": "ffffffff"}}
