"""A transcript: what is typed, what is printed, and the exit code, for `tests/cli/transcripts` and the README.

A line that begins with `$ ` is typed into bash, with the next ones if it ends with a backslash, in the folder that
`reshard demo` made. What follows is what a terminal of 80 columns shows, stdout and stderr as they come; `…` stands
for anything in a line, and a line `...` for any lines. A last line `[2]` is the exit code, if it is not 0. Lines in
front of the first command say what is shown.

`python tests/transcript.py --update` types them all, and writes what is printed now; read the difference.
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
    for command, lines, code in commands:
        done = type_in(command, folder, *first)
        assert re.fullmatch(pattern(lines), done.stdout), f"$ {command}\n{done.stdout}[{done.returncode}]"
        assert done.returncode == code, f"$ {command}\n{done.stdout}[{done.returncode}]"


def type_in(command: str, folder: Path, *first: Path) -> subprocess.CompletedProcess[str]:
    """Type a command in a folder."""
    places = [*map(str, first), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("RESHARD_", "AWS_"))},
        "PATH": os.pathsep.join(places),
        "COLUMNS": "80",
    }
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, text=True, check=False, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


# --- python tests/transcript.py --update ------------------------------------------------------------------------

VARYING = (
    (re.compile(r"\d+\.\d+ s \([\d.]+ \w*B/s\)"), "… s (…B/s)"),
    (re.compile(r"\d+\.\d+ s\b"), "… s"),
    (re.compile(r"(peak memory |about |peak\s+)[\d.]+ MB"), r"\1… MB"),
    (re.compile(r"\S*/reshard-demo\b"), "…"),
)
"""What is another each time, and how it is written."""


def update(text: str, folder: Path) -> str:
    """Return a transcript with what is printed now, of the commands that print something else than it says.

    A part that ends with `...` still ends so: as many lines stay in front of it as there were.
    """
    parts = [re.split(r"^\$ ", text, flags=re.MULTILINE)[0]]
    for command, lines, code in typed(text):
        done = type_in(command, folder)
        shown = lines
        if not re.fullmatch(pattern(lines), done.stdout):
            shown = done.stdout.splitlines()
            for found, written in VARYING:
                shown = [found.sub(written, line.rstrip()) for line in shown]
            if "..." in lines:
                shown = [*shown[: max(1, lines.index("..."))], "..."]
        ends = [f"[{done.returncode}]"] if done.returncode else []
        if done.returncode != code:
            sys.stderr.write(f"$ {command}\nends with {done.returncode}, not {code}\n")
        parts.append("\n".join([f"$ {command}", *shown, *ends]) + "\n")
    return "".join(parts)


def main() -> None:
    """Update the transcripts that are named, or all."""
    import tempfile

    if sys.argv[1:2] != ["--update"]:
        sys.exit("python tests/transcript.py --update [FILE...]")
    paths = [Path(path).absolute() for path in sys.argv[2:]]
    for path in paths or sorted((Path(__file__).parent / "cli" / "transcripts").glob("*.txt")):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, "-m", "reshard", "demo"], cwd=folder, check=True, capture_output=True)
            path.write_text(update(path.read_text(), Path(folder) / "reshard-demo"))


if __name__ == "__main__":
    main()
