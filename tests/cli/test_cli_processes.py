"""The command line as a process: entry points, imports, signals, and progress on a terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from checkpoints import tree
from commands import Case, call, done, heed_signals
from faulty import IMPORTED

if TYPE_CHECKING:
    from collections.abc import Sequence

_HELPS = [
    ["--help"], ["convert", "--help"], ["inspect", "-h"], ["strategy", "--help"], ["strategy", "show", "--help"],
    ["strategy", "merge", "--help"], ["average", "--help"], ["convert", "-h"], ["demo", "--help"], ["--version"],
]  # fmt: skip


def test_help_imports_nothing_heavy() -> None:
    code = f"""
import sys
import reshard
from reshard.cli.main import main
for arguments in {_HELPS!r}:
    try:
        main(arguments)
    except SystemExit as stopped:
        assert not stopped.code, arguments
heavy = {{"numpy", "dask", "zarr", "distributed", "google.protobuf", "ml_dtypes"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)


@pytest.mark.parametrize("arguments", _HELPS[:-1])
def test_every_help_has_an_example(arguments: list[str]) -> None:
    text = call(*arguments).stdout
    assert "\n  reshard " in text or arguments == ["strategy", "--help"]
    assert all(len(line) <= 80 for line in text.splitlines())


def script(name: str) -> list[str]:
    found = Path(sys.executable).with_name(name)
    if not found.exists():
        pytest.skip(f"{name} is not installed next to Python")
    return [str(found)]


@pytest.mark.parametrize("entry", ["reshard", "python -m", "dask"])
def test_entry_points(entry: str, case: Case) -> None:
    command = {
        "reshard": lambda: script("reshard"),
        "python -m": lambda: [sys.executable, "-m", "reshard"],
        "dask": lambda: [*script("dask"), "reshard"],
    }[entry]()
    shown = subprocess.run(
        [*command, "strategy", "show", case.target_strategy], check=True, capture_output=True, text=True
    )
    assert "12 tensors over 4 ranks" in shown.stdout
    refused = subprocess.run([*command, "inspect", "/nonexistent"], check=False, capture_output=True, text=True)
    assert refused.returncode == 4
    assert refused.stderr.startswith("error: /nonexistent ")


def test_commands_are_proposed_as_they_were_called(case: Case, tmp_path: Path) -> None:
    """A folder of programs that is not on the PATH: `reshard` alone would not be found."""
    (called,) = script("reshard")
    elsewhere = "/usr/bin:/bin"
    for command, path, expected in (
        ([called], elsewhere, called),
        ([called], f"{Path(called).parent}:{elsewhere}", "reshard"),
        ([sys.executable, "-m", "reshard"], elsewhere, f"{sys.executable} -m reshard"),
    ):
        words = [*command, "convert", case.source, tmp_path / "x", "--to", "ckpt", "--restart"]
        environment = {**os.environ, "PATH": path}
        shown = subprocess.run(words, check=True, capture_output=True, text=True, env=environment)
        assert shown.stdout.endswith(f"next: {expected} verify {tmp_path / 'x'}\n")


def test_a_reader_that_goes_away_is_not_a_error_message(case: Case) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "reshard", "inspect", case.source, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert "rror" not in process.stderr.read()
    process.stderr.close()
    process.wait()


_SLOW = """
import os, sys, time
from faulty import Faults, MonkeyPatch, install

def slow(call):
    os.write(2, call.kind.encode() + b"\\n")  # at once: several threads do
    time.sleep({seconds})

faults = Faults()
faults.every(slow, *{name!r}.split())
install(faults, MonkeyPatch())
from reshard.cli.main import main
main(sys.argv[1:])
"""


def slowly(name: str, seconds: float, arguments: Sequence[str | Path]) -> list[str]:
    """A `reshard` whose store takes its time for operations (one name or several), and says on stderr when it does."""
    code = IMPORTED + _SLOW.format(name=name, seconds=seconds)
    return [sys.executable, "-c", code, *map(str, arguments)]


def stopped_at(name: str, seconds: float, number: int, arguments: Sequence[str | Path]) -> tuple[int, str]:
    """Send signals to a run as soon as it is at that operation; return its exit code and its last line."""
    process = subprocess.Popen(
        slowly(name, seconds, arguments),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_signals,  # noqa: PLW1509
    )
    assert process.stderr is not None
    assert process.stderr.readline() == f"{name}\n"
    process.send_signal(number)
    time.sleep(0.05)
    process.send_signal(number)  # the impatient one: it must not disturb the cleaning up
    lines = process.stderr.read().splitlines()
    process.stderr.close()
    return process.wait(), [line for line in lines if line != name][-1]


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "stopped by SIGTERM"),
        (signal.SIGHUP, 129, "stopped by SIGHUP"),
    ],
)
def test_a_stopped_run_leaves_no_unfinished_file_and_can_be_typed_again(
    case: Case, tmp_path: Path, number: int, code: int, word: str
) -> None:
    command: list[str | Path] = ["convert", case.source, tmp_path, *case.strategies, "--to", "ckpt"]
    returned, said = stopped_at("write_at", 0.01, number, command)
    assert returned == code
    assert said == f"{word}; unfinished files are removed; the same command starts from the beginning"
    assert tree(tmp_path) == {}
    done(*command)


_AT_AN_IMPORT = """
import os, runpy, signal, sys
left = int(sys.argv[1])
class Finder:
    begun = False
    def find_spec(self, name, *_):
        global left
        self.begun = self.begun or name == "reshard.cli.main"
        left -= self.begun
        if not left:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv[1:] = sys.argv[2:]
runpy.run_module("reshard", run_name="__main__")
"""


def interrupted_at_import(number: int, command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """Interrupt a command when it imports that many modules, of some six hundred."""
    return subprocess.run(
        [sys.executable, "-c", _AT_AN_IMPORT, str(number), *map(str, command)],
        check=False, capture_output=True, text=True, timeout=60, preexec_fn=heed_signals,
    )  # fmt: skip


@pytest.mark.parametrize("number", [1, 40, 300])
def test_an_interrupt_while_modules_are_imported(case: Case, tmp_path: Path, number: int) -> None:
    ended = interrupted_at_import(number, ["convert", case.source, tmp_path / "out", *case.strategies])
    assert (ended.returncode, ended.stderr) == (130, "interrupted; nothing was written\n")
    assert not (tmp_path / "out").exists()


def test_an_interrupt_while_it_plans_says_that_nothing_was_written(case: Case, tmp_path: Path) -> None:
    command: list[str | Path] = ["convert", case.source, tmp_path, *case.strategies, "--to", "ckpt", "--json"]
    returned, said = stopped_at("read_into", 0.2, signal.SIGTERM, command)
    assert (returned, said) == (143, "stopped by SIGTERM; nothing was written")
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("limit", [6, 16, 24])
def test_too_few_file_descriptors_are_said(case: Case, tmp_path: Path, limit: int) -> None:
    words = [
        sys.executable,
        "-m",
        "reshard",
        "convert",
        case.source,
        tmp_path / "out",
        *case.strategies,
        "--to",
        "ckpt",
    ]
    ended = subprocess.run(
        ["sh", "-c", f'ulimit -n {limit} && exec "$@"', "sh", *map(str, words)],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.stderr.count("\n") == (ended.returncode != 0), ended.stderr
    if limit < 18:
        assert ended.returncode == 1
        assert "16" in ended.stderr
        assert "`ulimit -n 256`" in ended.stderr
    elif limit > 20:
        assert ended.returncode == 0, ended.stderr


def test_a_run_stopped_at_its_end_tells_what_to_type(case: Case, tmp_path: Path) -> None:
    command: list[str | Path] = ["convert", case.source, tmp_path, *case.strategies, "--to", "ckpt"]
    returned, _ = stopped_at("publish", 0.1, signal.SIGTERM, command)
    assert returned == 143
    done(*command)
    assert len(tree(tmp_path)) == 4


def test_an_ignored_signal_stays_ignored(case: Case, tmp_path: Path) -> None:
    """Under nohup a job goes on when the terminal goes away."""
    process = subprocess.Popen(
        ["nohup", *slowly("write_at", 0.005, ["convert", case.source, tmp_path, *case.strategies])],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while (line := process.stderr.readline()) != "write_at\n":
        assert line, "it ended before it wrote"
    process.send_signal(signal.SIGHUP)
    process.stderr.read()
    process.stderr.close()
    assert process.wait() == 0
    assert len(tree(tmp_path)) == 4


def test_progress_on_a_terminal(case: Case, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    arguments: list[str | Path] = ["convert", case.source, tmp_path, *case.strategies]
    process = subprocess.Popen(
        slowly("publish", 0.08, arguments),
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # Linux's way to say that the other side is closed
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert process.stdout is not None
    assert b"wrote 4 ckpt files" in process.stdout.read()
    process.stdout.close()
    assert process.wait() == 0
    text = shown.decode()
    assert "100%" in text
    assert "15.0 kB of 15.0 kB, " in text
    assert "/s, 0:00:00 left" in text


def test_a_closed_stdout_is_not_a_fault(case: Case) -> None:
    for more in ([], ["--json"]):
        words = [sys.executable, "-m", "reshard", "inspect", str(case.source), *more]
        closed = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *words], check=False, capture_output=True, text=True)
        assert closed.returncode == 0
        assert "fault" not in closed.stderr
