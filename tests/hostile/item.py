"""An item of the corpus: one hostile thing, and the commands that may meet it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from makers import fifo, link, unreadable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# {bad}: the item; {set}: two rank directories that both have it; {dir}: a directory that has it alone; {out}: a target.
# {file}, {ranks}, {strategy}: a valid checkpoint file, a set of two ranks, and the strategy of the set.
# What begins with a dot is a function of `child.API`.
FILE = (
    "inspect {bad}",
    "inspect {bad} --json",
    "inspect {bad} --layout *=whole",
    "inspect {set} --source-strategy {strategy}",
    "convert {bad} {out} --to hf",
    "convert {bad} {out} --target-strategy {strategy}",
    "convert {bad} {out} --to hf --dry-run",
    "convert {set} {out} --source-strategy {strategy}",
    "convert --to=mindspore {bad} {out}",
    "convert {set} {out} --source-strategy {strategy} --to hf",
    "convert {bad} {out}/a.ckpt --to ckpt",
    "convert {set} {out} --to safetensors",
    "strategy make {rules} --like {bad} -o {out}",
    "verify {bad}",
    "verify {file} --against {bad}",
    ".open {bad}",
    ".open_rank {bad}",
    ".load_checkpoint {bad}",
    ".convert_file {bad} {out}",
)


@dataclass(frozen=True, slots=True)
class Item:
    """One hostile thing.

    Attributes:
        name: what it is.
        content: its bytes, or what makes it at a path.
        says: the code of the error that every command must report, and after ` @ ` a place that it names; several codes
            are joined by `|`. Else a part of what it says. Empty if the item is accepted.
        commands: what meets it.
        code: the exit code of the commands.
        file: what it is called.
        slow: for the slow suite.
        headroom: bytes of address space that a command may take.
        seconds: how much processor time a command may take; it may wait four times as long.
    """

    name: str
    content: bytes | Callable[[Path], None]
    says: str
    commands: tuple[str, ...] = FILE
    code: int = 4
    file: str = "bad.ckpt"
    slow: bool = False
    headroom: int = 250_000_000
    seconds: int = 10

    def make(self, directory: Path) -> Path:
        """Make the item below a directory."""
        path = directory / self.file
        if isinstance(self.content, bytes):
            path.write_bytes(self.content)
        else:
            self.content(path)
        return path


def not_to_be_read(make: Callable[..., Item]) -> list[Item]:
    """Whatever small file is expected."""
    irregular = "not-a-file"
    return [
        make("a FIFO", fifo, irregular),
        make("a device that does not end", link("/dev/zero"), irregular),
        make("a file without permission", unreadable, "cannot-read"),
    ]
