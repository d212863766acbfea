"""With mindformers installed: its own `load_checkpoint` reads every Checkpoint 2.0 that is written here, on any mesh.

What `.ci/run` installs it with, beside MindSpore, is there; RESHARD_MINDSPORE_PYTHON names the Python.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import helpers
import numpy as np
import pytest
from checkpoints import plan_with

import reshard
from reshard import Layout, Strategy
from reshard.formats.checkpoint2.options import Checkpoint2

if TYPE_CHECKING:
    from collections.abc import Mapping

PYTHON = os.environ.get("RESHARD_MINDSPORE_PYTHON", "")
JOB = Path(__file__).parents[1] / "mindformers_job.py"
CASES = sorted(
    {path.split("/")[1] for path in helpers.packed_files("checkpoint2") if path.count("/") > 3 and "dcp_" not in path}
)


@cache
def has_mindformers() -> bool:
    found = "import importlib.util as u; raise SystemExit(u.find_spec('mindformers') is None)"
    return bool(PYTHON) and subprocess.run([PYTHON, "-c", found], check=False).returncode == 0


pytestmark = [pytest.mark.mindspore, pytest.mark.timeout(600)]


def load(case: Path, *directories: Path) -> list[dict[str, Any]]:
    """What came of loading each checkpoint on four meshes. mindformers writes a log into the directory it runs in."""
    done = subprocess.run(
        [PYTHON, JOB, case, *directories], capture_output=True, text=True, check=False, cwd=directories[-1].parent,
        env={**os.environ, "GLOG_v": "3", "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    found: list[dict[str, Any]] = json.loads(line.removeprefix("RESULT"))
    return found


def targets(full: Mapping[str, Any]) -> dict[str, tuple[Strategy | None, bool]]:
    """Meshes that no case has, with optimizer parallel over a part of an axis; each block once or by every rank."""
    rows, parts = {}, {}
    for name, value in full.items():
        if name != "global_step" and value.ndim:
            rest = [-1] * (value.ndim - 1)
            rows[name] = Layout.of([2, 2], [1 if not value.shape[0] % 2 else -1, *rest])
            parts[name] = Layout.of([8], [-1, *rest], 4 if not value.shape[0] % 4 else 0)
    return {
        "whole": (None, False),
        "rows": (Strategy.of(rows), False),
        "parts": (Strategy.of(parts), False),
        "once": (Strategy.of(parts), True),
    }


@pytest.mark.parametrize("name", CASES)
def test_it_loads_what_is_written_on_every_mesh(mindspore_data: Path, tmp_path: Path, name: str) -> None:
    if not has_mindformers():
        pytest.skip("RESHARD_MINDSPORE_PYTHON names no Python that has mindformers")
    case = mindspore_data / "checkpoint2" / name
    source = reshard.open(case / "checkpoint")
    full = {key: value for key, value in np.load(case / "full.npz").items() if key in source}
    for kind, (target, once) in targets(full).items():
        files = Checkpoint2(max_shard_size=3000)
        plan_with(source, target, files=files, remove_redundancy=once).run(tmp_path / kind, fsync=False)
    if (Path(source.root) / "metadata.json").is_file():
        pattern = source.root
        reshard.plan(reshard.open(tmp_path / "rows"), pattern, to="checkpoint2").run(tmp_path / "own", fsync=False)
    written = sorted(tmp_path.iterdir())
    found = load(case, case / "checkpoint", *written)
    assert [one["wrong"] for one in found] == [[]] * len(found)
    real, ours = found[:4], found[4:]
    assert [one["right"] for one in ours] == [one["right"] for one in real] * len(written)
    assert min(one["right"] for one in real) >= len(full) - 1


def test_it_loads_experts_that_the_other_mode_stacked(mindspore_data: Path, tmp_path: Path) -> None:
    """Planes of the dynamic graph become rows of the static one; `main_param.*` has no place there."""
    if not has_mindformers():
        pytest.skip("RESHARD_MINDSPORE_PYTHON names no Python that has mindformers")
    cases = mindspore_data / "checkpoint2"
    case = cases / "graph_ep2_tp2_moe"
    source = reshard.open(cases / "pynative_fsdp4_ep2_once" / "checkpoint")
    plan = reshard.plan(source, case / "checkpoint", to="checkpoint2")
    assert {name.split(".")[0] for name in plan.dropped} == {"main_param"}
    plan.run(tmp_path / "run", fsync=False)
    assert reshard.verify(tmp_path / "run").equal
    found = load(case, case / "checkpoint", tmp_path / "run")
    assert [one["wrong"] for one in found] == [[]] * 8
    assert [one["right"] for one in found[4:]] == [one["right"] for one in found[:4]]
