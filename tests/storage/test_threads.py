"""Work on threads from a main thread that may be interrupted at any moment."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from _thread import interrupt_main
from typing import TYPE_CHECKING

import pytest
from commands import interruptible
from stopped_runs import TARGET, small_tasks, source

import reshard
from reshard.core.storage.threads import map_ordered, uninterrupted

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.core.run.run import Progress

__all__ = ["interruptible", "small_tasks", "source"]  # fixtures, for pytest to find


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt the main thread wherever it has just taken a lock that other threads may want."""
    main = threading.get_ident()
    enter = threading.Condition.__enter__

    def entered(condition: threading.Condition) -> bool:
        taken = enter(condition)
        if threading.get_ident() == main:
            raise KeyboardInterrupt
        return taken

    monkeypatch.setattr(threading.Condition, "__enter__", entered)


def stop_at_the_end(state: Progress) -> None:
    if state.written == state.total:
        raise LookupError


@pytest.mark.usefixtures("interrupted")
def test_the_main_thread_takes_no_lock_that_others_want(source: reshard.Checkpoint, tmp_path: Path) -> None:
    """Python may interrupt it there: of 1,600 commands stopped as they began to write, 4 never ended."""
    plan = reshard.plan(source, TARGET)
    out = tmp_path / "out"
    with pytest.raises(LookupError, match="kept"):
        plan.run(out, threads=2, progress=stop_at_the_end)
    assert plan.run(out, threads=2).resumed
    assert reshard.verify(out, TARGET, against=source).equal
    assert reshard.verify(out, manifest=reshard.Manifest.make(out)).equal


def nothing(_: object) -> None:
    pass


def test_results_come_in_order_and_are_told_here() -> None:
    here = threading.get_ident()
    told: list[tuple[int, bool]] = []
    map_ordered(int, range(20), 3, lambda number: told.append((number, threading.get_ident() == here)))
    assert told == [(number, True) for number in range(20)]
    assert [*map_ordered(str, [3, 1, 2], 2)] == [*map_ordered(str, [3, 1, 2], 0)] == ["3", "1", "2"]


@pytest.mark.parametrize("thread", ["main", "another"])
def test_what_goes_wrong_ends_the_work(thread: str) -> None:
    begun: list[int] = []

    def fails(number: int) -> None:
        begun.append(number)
        time.sleep(0.01)
        if number == 2:
            raise ValueError("2")

    def told(_: object) -> None:
        raise LookupError

    def attempts() -> None:
        with pytest.raises(ValueError, match="2"):
            map_ordered(fails, range(100), 2, nothing)
        with pytest.raises(LookupError):
            map_ordered(fails, range(3, 100), 2, told)

    if thread == "main":
        attempts()
    else:
        map_ordered(lambda attempt: attempt(), [attempts], 1)
    assert len(begun) < 20


HANGS = {
    "as the work ends": "uninterrupted(lambda tell: interrupt_main(), print, list)",
    "as the work tells": "uninterrupted(lambda tell: (interrupt_main(), tell(1), tell(2)), lambda value: None, list)",
    "as it begins": "threading.Thread.start = kill; uninterrupted(lambda tell: 1, print, list)",
    "while it is given up": "uninterrupted(lambda tell: (tell(1), time.sleep(0.2)), fails, interrupt_main)",
    "what gives up fails": "uninterrupted(lambda tell: tell(1), fails, fails)",
    "no memory": "threads.start_new_thread = no_memory; uninterrupted(lambda tell: 1, print, list)",
}


@pytest.mark.parametrize("code", HANGS.values(), ids=HANGS)
def test_nothing_waits_for_ever(code: str) -> None:
    """In processes of their own, which can be ended."""
    script = f"""
import os, signal, threading, time
from _thread import interrupt_main
caught = []
def raises_once(*_):
    if not caught:
        caught.append(True)
        raise KeyboardInterrupt
signal.signal(signal.SIGINT, raises_once)  # who starts the tests may ignore it
from reshard.core.storage import threads
from reshard.core.storage.threads import uninterrupted
def fails(*_): raise LookupError
def no_memory(*_): raise MemoryError
def kill(*_):  # wakes the main thread, as `interrupt_main` does not; where that has looked for signals and does not
    while not caught:  # wait yet, CPython loses one, and here nothing else would ever wake it
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
try:
    {code}
except (KeyboardInterrupt, LookupError, MemoryError) as error:
    print(type(error).__name__)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout.strip() in {"KeyboardInterrupt", "LookupError", "MemoryError"}
    assert not ended.stderr


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("moment", [0.0, 0.02])
def test_an_interrupt_ends_the_work_first(moment: float) -> None:
    begun: list[int] = []
    ended: list[int] = []

    def slow(number: int) -> None:
        begun.append(number)
        if number == 0:
            time.sleep(moment)
            interrupt_main()
        time.sleep(0.05)
        ended.append(number)

    with pytest.raises(KeyboardInterrupt):
        map_ordered(slow, range(100), 2, nothing)
    assert sorted(begun) == sorted(ended)
    assert len(begun) < 20
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reshard")]


def test_a_thread_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    def attempt() -> None:
        with pytest.raises(RuntimeError, match="can't start"):
            uninterrupted(lambda tell: tell(1), nothing, list)

    with monkeypatch.context() as patch:
        patch.setattr("reshard.core.storage.threads.start_new_thread", fails)
        attempt()
    monkeypatch.setattr(threading.Thread, "start", fails)
    attempt()
