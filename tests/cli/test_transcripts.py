"""What is typed, what is printed and the exit code: the transcripts in `transcripts/`, each typed in a fresh folder.

A line that begins with `$ ` is typed into bash, in the folder that `reshard demo` made. What follows is what a terminal
of 80 columns shows, stdout and stderr as they come; `…` stands for anything in a line, and a line `...` for any lines.
A last line `[2]` is the exit code, if it is not 0. Lines in front of the first command say what is shown.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

TRANSCRIPTS = Path(__file__).parent / "transcripts"


class Typed(NamedTuple):
    """A command, and what is to come of it."""

    command: str
    lines: list[str]
    code: int


def typed(text: str) -> list[Typed]:
    found = []
    for block in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, *lines = block.rstrip().split("\n")
        code = re.fullmatch(r"\[(\d+)\]", lines[-1]) if lines else None
        found.append(Typed(command, lines[:-1] if code else lines, int(code[1]) if code else 0))
    return found


def pattern(lines: list[str]) -> str:
    """Return the regular expression that output matches."""
    parts = [
        r"(?:.*\n)*?" if line == "..." else ".*".join(map(re.escape, line.rstrip().split("…"))) + r" *\n"
        for line in lines
    ]
    return "".join(parts)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("typed")
    subprocess.run([sys.executable, "-m", "reshard", "demo"], cwd=folder, check=True, capture_output=True)
    return folder / "reshard-demo"


@pytest.mark.parametrize("name", sorted(path.stem for path in TRANSCRIPTS.glob("*.txt")))
def test_a_transcript(demo: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "reshard-demo"
    shutil.copytree(demo, folder, symlinks=True)
    commands = typed((TRANSCRIPTS / f"{name}.txt").read_text())
    assert commands
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("RESHARD_", "AWS_"))},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "80",
    }
    for command, lines, code in commands:
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, text=True, check=False, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert re.fullmatch(pattern(lines), done.stdout), f"$ {command}\n{done.stdout}[{done.returncode}]"
        assert done.returncode == code, f"$ {command}\n{done.stdout}[{done.returncode}]"
