"""Run a command in a terminal of some width, and tell what it shows in the end."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def run_in_terminal(command: Sequence[str], columns: int, cwd: Path | None = None, **env: str) -> str:
    """Return all that a command writes to a terminal of a width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    inherited = {key: value for key, value in os.environ.items() if key not in {"COLUMNS", "LINES", "NO_COLOR"}}
    process = subprocess.Popen(
        command, cwd=cwd, env={**inherited, "TERM": "xterm", "PAGER": "cat", **env}, stdin=theirs, stdout=theirs,
        stderr=theirs, close_fds=True,
    )  # fmt: skip
    os.close(theirs)
    output = bytearray()
    while True:
        try:
            piece = os.read(ours, 1 << 16)
        except OSError:  # the command ended
            break
        if not piece:
            break
        output += piece
    os.close(ours)
    process.wait(timeout=60)
    return output.decode()


def screen(output: str, columns: int) -> list[str]:
    """Return the lines that a terminal of a width shows after an output, empty ones left out."""
    lines, row, column = [""], 0, 0
    for piece in re.findall(r"\x1b\[[?0-9;]*[a-zA-Z]|[^\x1b]", output):
        if piece == "\n" or (len(piece) == 1 and piece != "\r" and column == columns):
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
        if piece == "\r":
            column = 0
        elif piece == "\x1b[1A":
            row -= 1
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif len(piece) == 1 and piece != "\n":
            lines[row] = lines[row][:column].ljust(column) + piece + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines if line.strip()]
