"""Every command of the README runs, in the order in which it is printed.

The two that set up a virtual environment are run as printed by `.ci/run`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import helpers
import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SETUP = {"demo", "tests"}

BLOCKS = re.findall(r"(?:<!-- run: (\w+) -->\n)?```(\w+)\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `reshard demo` made, in which the README's commands are typed."""
    folder = tmp_path_factory.mktemp("readme")
    run("reshard demo", folder)
    return folder / "reshard-demo"


def run(script: str, folder: Path, *shell: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*(shell or ("bash", "-euc")), script], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_two_commands_that_set_up_are_there_and_run_by_ci() -> None:
    printed = {name: block for name, _, block in BLOCKS if name}
    assert set(printed) == SETUP
    assert all(block.startswith("python3 -m venv .venv && ") for block in printed.values())
    ci = (ROOT / ".ci" / "run").read_text()
    assert all(f'eval "$(printed {name})"' for name in SETUP)
    assert ci.count("eval") == 2


def test_every_other_block_runs(folder: Path) -> None:
    ran = 0
    for name, language, block in BLOCKS:
        if name in SETUP:
            continue
        out = run(block, folder, *((sys.executable, "-c") if language == "python" else ()))
        assert out
        ran += 1
    assert ran == 9
    whole = sorted((folder / "again").rglob("*.ckpt"))
    source = sorted((folder / "src_checkpoints").rglob("*.ckpt"))
    assert [*map(helpers.read_rank_file, whole)] == [*map(helpers.read_rank_file, source)]  # there and back again


def test_the_figures_about_mindspore_are_those_recorded(mindspore_data: Path) -> None:
    found = []
    for out in ("tc_ckpt", "tc_st"):
        calls = [
            call
            for name in helpers.case_names()
            for call in helpers.load_meta(mindspore_data / "cases" / name)["calls"]
            if call.get("out") == out
        ]
        wrong = sum(bool(call["ok"] and call["differs_from_reference"]) for call in calls)
        refused = sum(not call["ok"] for call in calls)
        found.append((len(calls) - wrong - refused, wrong, refused))
    for row, figures in zip(
        ("every rank right", "wrong values or shapes, silently", "refused with an error"),
        zip(*found, strict=True),
        strict=True,
    ):
        assert f"| {row} | {figures[0]} | {figures[1]} |" in README


def test_inline_commands_name_what_exists() -> None:
    help_text = run(
        "for c in transform unify convert verify plan run 'strategy merge' 'strategy make'; do reshard $c --help-all; "
        "done; reshard --help",
        ROOT,
    )
    help_text += run(
        f"{sys.executable} tests/bench/bench.py --help; {sys.executable} tests/bench/zarr_route.py --help", ROOT
    )
    for option in re.findall(r"(?<![-|<])--[a-z][a-z-]+", README):
        assert option in help_text, option
