"""Every command of the README runs, in the order in which it is printed, and prints what is printed there.

The two that set up a virtual environment are run as printed by `.ci/run`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import helpers
import pytest
from samples import slow
from transcript import Typed, check, typed

from reshard.cli.main import cli

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SETUP = {"demo", "tests"}

SET_UP = dict(re.findall(r"<!-- run: (\w+) -->\n```sh\n(.*?)```", README, re.DOTALL))
BLOCKS = re.findall(r"```(console|python)\n(.*?)```(?:\n\n```text\n(.*?)```)?", README, re.DOTALL)
OPTION = re.compile(r"(?<![-|<\w])--[a-z][a-z-]+")


def test_the_two_commands_that_set_up_are_there_and_run_by_ci() -> None:
    assert set(SET_UP) == SETUP
    assert all(block.startswith("python3 -m venv .venv && ") for block in SET_UP.values())
    ci = (ROOT / ".ci" / "run").read_text()
    assert all(f'eval "$(printed {name})"' for name in SETUP)
    assert ci.count("eval") == 2


@pytest.mark.parametrize("start", ["forked", slow(None)])
def test_every_other_block_prints_what_is_printed_there(
    tmp_path: Path, start: str | None, request: pytest.FixtureRequest
) -> None:
    """With a `reshard` that starts at once, and when it is slow with the real one."""
    first = [request.getfixturevalue(start)] if start else []
    check([Typed("reshard demo", ["..."])], tmp_path, *first)
    folder = tmp_path / "reshard-demo"
    assert README.count("```") == 2 * (len(SET_UP) + sum(2 if text else 1 for _, _, text in BLOCKS))  # none is left out
    for language, block, text in BLOCKS:
        if language == "console":
            check([command._replace(lines=[*command.lines, "..."]) for command in typed(block)], folder, *first)
        else:
            assert text
            check([Typed(f"{shlex.quote(sys.executable)} -c {shlex.quote(block)}", text.splitlines())], folder)


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
    known = set(options(cli))
    for bench in ("bench.py", "zarr_route.py"):
        shown = subprocess.run(
            [sys.executable, f"tests/bench/{bench}", "--help"], cwd=ROOT, check=True, capture_output=True
        )
        known |= set(OPTION.findall(shown.stdout.decode()))
    assert known.issuperset(OPTION.findall(README))


def options(command: click.Command) -> Iterator[str]:
    """The options of a command and of those below it."""
    context = click.Context(command)
    yield from (option for parameter in command.get_params(context) for option in parameter.opts)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below
            yield from options(below)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_lines_for_completion_complete(shell: str, tmp_path: Path) -> None:
    if not shutil.which(shell):
        pytest.skip(f"no {shell} here")
    line = re.search(rf"`([^`\n]*_RESHARD_COMPLETE={shell}_source[^`]*)`", README)
    assert line
    seen = {
        "bash": "complete -p reshard",
        "zsh": "print $_comps[reshard]",
        "fish": "complete --do-complete 'reshard transf'",
    }[shell]
    before = "autoload -Uz compinit; compinit -D; " if shell == "zsh" else ""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [shell, "-c", f"{before}{line[1]}\n{seen}"],
        env={**os.environ, "PATH": path, "HOME": str(tmp_path)}, text=True, capture_output=True, check=True,
    )  # fmt: skip
    assert ("transform" if shell == "fish" else "_reshard_completion") in done.stdout
