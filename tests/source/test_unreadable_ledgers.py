"""A ledger that exists and cannot be read is named; it does not count as absent."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest
from checkpoints import numbers, write_ranks
from commands import call
from refusals import failed, refused

import reshard
from reshard import Layout, Strategy
from reshard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FULL = numbers({"w": (8, 4)})
RANKS = Strategy.of({"w": Layout.of([2], [0, -1])})


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def removed(path: Path) -> None:
    path.unlink()


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00not JSON\n" * 3)


def other_values(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"[[2]", b"[[3]"))


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "provenance cut short": ("made-*.json", cut_short),
    "provenance missing": ("made-*.json", removed),
    "provenance is not JSON": ("made-*.json", garbage),
    "provenance changed": ("made-*.json", other_values),
    "log is not JSON": ("*.jsonl", garbage),
}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Two ranks whose layout is in the ledger only."""
    source = reshard.open(write_ranks(tmp_path / "src", FULL, RANKS), strategy=RANKS)
    reshard.plan(source, RANKS).run(tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_ledger_is_named(target: Path, damage: str) -> None:
    pattern, spoil = DAMAGE[damage]
    (path,) = (target / ".reshard").glob(pattern)
    spoil(path)
    with refused(SourceError, "unreadable-ledger", path.name):
        reshard.open(target)
    with refused(SourceError, "unreadable-ledger", path.name):
        reshard.verify(target)
    failed(4, "unreadable-ledger", "inspect", target, places=(path.name,))
    opened = reshard.open(target, strategy=RANKS)
    assert [path.name in warning for warning in opened.warnings] == [True]
    assert (opened["w"][:] == FULL["w"]).all()


@pytest.mark.parametrize("kind", ["directory", "log"])
def test_a_ledger_that_may_not_be_read_is_named(target: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (log,) = (target / ".reshard").glob("*.jsonl")
    closed = str(log if kind == "log" else log.parent)

    def denying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call_it(path: Any = ".", *arguments: Any, **more: Any) -> Any:
            if str(path) == closed:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), closed)
            return function(path, *arguments, **more)

        return call_it

    monkeypatch.setattr(os, "listdir", denying(os.listdir))
    monkeypatch.setattr(os, "open", denying(os.open))
    with refused(SourceError, "unreadable-ledger", closed):
        reshard.open(target)
    with refused(SourceError, "unreadable-ledger", closed):
        reshard.verify(target)


def test_runs_lists_a_checkpoint_with_a_damaged_ledger(target: Path) -> None:
    (path,) = (target / ".reshard").glob("made-*.json")
    garbage(path)
    entry = next(entry for entry in reshard.runs(target.parent) if entry.path == str(target))
    assert (entry.state, path.name in entry.reason) == ("unknown", True)


def test_a_target_without_a_ledger_opens_as_before(target: Path) -> None:
    (target / ".reshard").rename(target.parent / "elsewhere")
    with refused(SourceError, "no-layout"):
        reshard.open(target)
    assert call("verify", target).exit_code == 0
