"""The task stream of a run: which thread did what when, from the receipts, by threads and on a cluster."""

from __future__ import annotations

import os
import re
import time
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

import numpy as np
import pytest
from clusters import client_of, cluster

import reshard
from reshard.core.plan import budget
from reshard.core.run.settings import Receipt, Report

if TYPE_CHECKING:
    from pathlib import Path

NAMES = [f"layers.{i}.w" for i in range(8)]
MOVED = len(NAMES) * 64 * 256 * 4
LONG = [
    Receipt(f"{kind} {number}", 1000, 2000, 0.02, began=1e9 + number * 0.03, worker=f"host:{worker // 4} t{worker}")
    for worker in range(40)
    for number, kind in enumerate(["create"] + ["move"] * 249)
]  # fmt: skip


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> reshard.Plan:
    """A plan of eight tasks."""
    home = tmp_path_factory.mktemp("stream")
    rows = reshard.Strategy.of(dict.fromkeys(NAMES, reshard.Layout.of([4], [0, -1])))
    columns = reshard.Strategy.of(dict.fromkeys(NAMES, reshard.Layout.of([2], [-1, 0])))
    reshard.write(dict.fromkeys(NAMES, np.ones((64, 256), np.float32)), home / "src", target_strategy=rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "TASK_BYTES", 1 << 16)
        return reshard.plan(reshard.open(home / "src", strategy=rows), columns)


def report_of(receipts: list[Receipt]) -> Report:
    return Report("out", ("a",), 1, 1, 0.1, tuple(receipts), 1, 1, 1, 0, 0, (), (), 1)


def tips(report: Report) -> list[str]:
    """The tooltips of the boxes, from the picture as XML."""
    root = ET.fromstring(report.task_stream().svg(alone=True))  # noqa: S314 -- made here
    boxes = [path for path in root.iter() if path.tag.endswith("path")]
    assert all(re.fullmatch("#[0-9a-f]{6}", box.get("fill", "")) for box in boxes)
    return [box[0].text or "" for box in boxes]


@pytest.mark.parametrize("options", [{"threads": 2}, {"client": "synchronous"}, {"partition": "file"}])
def test_every_task_says_when_and_where_it_ran(plan: reshard.Plan, options: dict[str, object], tmp_path: Path) -> None:
    begin = time.time()
    report = plan.run(tmp_path / "out", **options)  # type: ignore[arg-type]
    end = time.time()
    assert report.receipts
    by_thread: dict[str, list[Receipt]] = {}
    for receipt in report.receipts:
        assert begin - 0.01 <= receipt.began <= receipt.began + receipt.seconds <= end + 0.01
        assert receipt.worker.startswith(f"{os.uname().nodename}:{os.getpid()} ")
        by_thread.setdefault(receipt.worker, []).append(receipt)
    assert len(by_thread) <= 2
    for receipts in by_thread.values():  # a thread does one task after the other
        ends = [each.began + each.seconds for each in sorted(receipts, key=lambda each: each.began)]
        begins = sorted(each.began for each in receipts)
        assert all(a <= b + 0.001 for a, b in zip(ends, begins[1:], strict=False))
    assert len(tips(report)) == len(report.receipts), "a box for each"
    assert f"wrote {MOVED // 8 / 1000:.1f} kB" in "".join(tips(report)) or options == {"partition": "file"}


def test_a_report_shows_its_task_stream_and_saves_it(plan: reshard.Plan, tmp_path: Path) -> None:
    report = plan.run(tmp_path / "out")
    assert report.task_stream().drawing in report._repr_html_()
    report.task_stream().save(tmp_path / "stream.svg")
    assert (tmp_path / "stream.svg").read_text().startswith("<svg")
    again = plan.run(tmp_path / "out")
    assert tips(again) == [], "nothing was left to do"


def test_a_cluster_has_a_row_for_each_thread_of_each_process(plan: reshard.Plan, tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    with cluster(tmp_path, 2) as one, client_of(one.address, 2) as client:
        report = plan.run(tmp_path / "out", client=client)
    processes = {receipt.worker.partition(" ")[0] for receipt in report.receipts}
    assert f"{os.uname().nodename}:{os.getpid()}" in processes, "which names the files"
    assert len(processes) > 1
    assert "process 2" in report.task_stream().drawing
    assert len(tips(report)) == len(report.receipts)


def test_ten_thousand_tasks_are_a_small_picture_of_all_of_them() -> None:
    report = report_of(LONG)
    began = time.perf_counter()
    drawing = report.task_stream().drawing
    assert time.perf_counter() - began < 3
    assert len(drawing) < 250_000
    assert "and 8 more threads" in drawing
    shown = [int(count) for tip in tips(report) for count in re.findall(r"^(\d+) task", tip)]
    assert sum(shown) == 32 * 250
    assert len(shown) <= 800
