"""Every command says the one line that an item of the corpus must give, and does nothing else.

No crash, no hang, no large allocation, no write outside the target, nothing under a final name, nothing that a
terminal would obey.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import corpus
import pytest

if TYPE_CHECKING:
    from item import Item

HERE = Path(__file__).parent
MOST_CHARACTERS = 20_000  # of one message, for a terminal


Met = dict[tuple[str, str, str], dict[str, Any]]  # group, item, command


def commands(groups: list[str], directory: Path, *, slow: bool, every: int) -> Met:
    """What commands did with the items of some groups, all of them in one child process."""
    chosen = corpus.chosen(groups, slow=slow, every=every)
    expected = [(group, item.name, command) for group, item, commands in chosen for command in commands]
    paths = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]
    done = subprocess.run(
        [sys.executable, str(HERE / "child.py"), str(directory), "slow" if slow else "quick", str(every), *groups],
        capture_output=True,
        text=True,
        timeout=780 if slow else 280,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "MALLOC_ARENA_MAX": "1"},
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    met = {tuple(one["item"]): one for one in found}
    assert list(met) == expected, f"died at {expected[len(found)]}: {done.stderr}" if done.returncode else expected
    return met


def names(item: Item, found: dict[str, Any]) -> bool:
    """Whether an error has one of the codes of an item, and names its place."""
    says = re.fullmatch(r"([a-z0-9|-]+)(?: @ (.+))?", item.says, re.DOTALL)
    if not says:
        return item.says in found["said"]
    return not set(says[1].split("|")).isdisjoint(found["codes"]) and (says[2] or "") in found["said"]


def faults_of(item: Item, found: dict[str, Any]) -> list[str]:
    """What is wrong with how a command met an item."""
    said, lines = found["said"], found["said"].splitlines()
    if item.code == 3:  # what differs is told on stdout
        said, lines = said + found["shown"], ["error: "] * bool(found["shown"])
    errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    below = lines[errors[0] + 1 :] if errors else []
    faults = []
    if found["code"] != item.code:
        faults.append(f"exit code {found['code']}, expected {item.code}")
    if item.says and not names(item, found | {"said": said}):
        faults.append(f"does not say {item.says!r}, but {found['codes']}")
    if len(errors) != bool(item.says) or any(not line.startswith(("  ", "hint: ")) for line in below):
        faults.append("does not say one error, as one line or as one with a list below")
    if len(said) > MOST_CHARACTERS:
        faults.append(f"says {len(said)} characters")
    if any(not line.isprintable() for line in (found["said"] + found["shown"]).split("\n")):
        faults.append("says what a terminal would obey")
    if "error: no" in [line.strip() for line in (said + found["shown"]).splitlines()]:
        faults.append("says what a file has it say")
    if found["disturbed"]:
        faults.append("changed something that is not a target")
    if found["left"] and item.code:
        faults.append(f"left {found['left']}")
    return faults


def hold(groups: list[str], directory: Path, *, slow: bool = False, every: int = 1) -> None:
    """Hold what commands did against the table."""
    met = commands(groups, directory, slow=slow, every=every)
    wrong = [
        f"{group}: {item.name}: {command}\n    {'; '.join(faults)}\n    {met[group, item.name, command]['said']:.600}"
        for group, item, commands in corpus.chosen(groups, slow=slow, every=every)
        for command in commands
        if (faults := faults_of(item, met[group, item.name, command]))
    ]
    assert not wrong, f"{len(wrong)} of {len(met)} commands:\n" + "\n".join(wrong[:40])


def test_some_commands_say_one_line_of_each_item_and_do_nothing_else(tmp_path: Path) -> None:
    """Of every other group and of plans, by turns, so that each item is met; the slow tests do all."""
    hold([*list(corpus.items())[::2], "plans"], tmp_path, every=20)


@pytest.mark.slow
@pytest.mark.parametrize("group", corpus.items())
def test_each_command_says_one_line_and_does_nothing_else(group: str, tmp_path: Path) -> None:
    hold([group], tmp_path)


@pytest.mark.timeout(800)  # a million tensors take more than a minute to be indexed, on a slow machine two
@pytest.mark.slow
@pytest.mark.parametrize("group", [group for group, items in corpus.items().items() if any(i.slow for i in items)])
def test_large_items_too(group: str, tmp_path: Path) -> None:
    hold([group], tmp_path, slow=True)


def test_items_have_names_of_their_own_and_say_something() -> None:
    for group, items in corpus.items().items():
        assert len({item.name for item in items}) == len(items), group
        assert all(bool(item.says) == bool(item.code) for item in items), group
