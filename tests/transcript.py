"""A transcript: what is typed, what is printed, and the exit code, for `tests/cli/transcripts` and the README.

A line that begins with `$ ` is typed into bash, with the next ones if it ends with a backslash, in the folder that
`reshard demo` made. What follows is what a terminal of 80 columns shows, stdout and stderr as they come; `…` stands
for anything in a line, and a line `...` for any lines. A last line `[2]` is the exit code, if it is not 0. Lines in
front of the first command say what is shown.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class Typed(NamedTuple):
    """A command, and what is to come of it."""

    command: str
    lines: list[str]
    code: int = 0


def typed(text: str) -> list[Typed]:
    found = []
    for block in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, *lines = block.rstrip().split("\n")
        while command.endswith("\\"):
            command += f"\n{lines.pop(0)}"
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


def check(commands: Iterable[Typed], folder: Path, *first: Path) -> None:
    """Type commands in a folder, one after the other, and compare what comes with what is to come.

    Commands are looked for in some directories first, then in that of this Python.
    """
    places = [*map(str, first), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("RESHARD_", "AWS_"))},
        "PATH": os.pathsep.join(places),
        "COLUMNS": "80",
    }
    for command, lines, code in commands:
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, text=True, check=False, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert re.fullmatch(pattern(lines), done.stdout), f"$ {command}\n{done.stdout}[{done.returncode}]"
        assert done.returncode == code, f"$ {command}\n{done.stdout}[{done.returncode}]"
