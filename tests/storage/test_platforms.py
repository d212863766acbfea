"""Systems that lack what Linux has: macOS, which works, and Windows, which is refused in one sentence."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
from checkpoints import write_file
from safetensors.numpy import load_file

from reshard.core.run import settings
from reshard.core.run.state import locks
from reshard.core.storage.local import LocalStore
from reshard.core.storage.page_cache import sync_file

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

# What Python has on Linux and not on macOS, and files that only Linux has. `sys.platform` stays, since other packages
# load their libraries by it.
AS_ON_MACOS = """
import builtins, errno, fcntl, io, os, sys

import numpy, dask.array

for name in ("sched_getaffinity", "sched_setaffinity", "posix_fallocate", "posix_fadvise", "fdatasync",
             "copy_file_range", "splice", "pidfd_open", "memfd_create", "RWF_NOWAIT"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("F_OFD_SETLK", "F_OFD_GETLK", "F_OFD_SETLKW"):
    delattr(fcntl, name)

def without(function):
    def call(path, *args, **options):
        if isinstance(path, str) and path.startswith("/proc/"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return function(path, *args, **options)
    return call

builtins.open, os.stat, os.open = without(open), without(os.stat), without(os.open)

from reshard.core.run.state import locks
locks.sys = type("sys", (), {"platform": "darwin"})

from reshard.__main__ import main
for command in sys.argv[1:]:
    sys.argv = ["reshard", *command.split()]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
"""


def on_macos(folder: Path, *commands: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", AS_ON_MACOS, *commands], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_commands_without_what_macos_lacks(tmp_path: Path) -> None:
    full = {f"w{number}": np.random.default_rng(number).random((300, 400), np.float32) for number in range(8)}
    write_file(tmp_path / "model.safetensors", full)
    output = on_macos(
        tmp_path,
        "demo",
        "demo training training",
        "convert training/step-2000 out --to hf",
        "verify out",
        "convert model.safetensors dropped --to hf --tune=drop-cache=yes",
        "convert model.safetensors limited --to hf --memory 200MB",
        "convert model.safetensors z --to zarr --threads 2 --compression zstd --tune=fsync=no",
        "convert z unsynced --to hf --tune=drop-cache=yes --tune=fsync=no",
        "verify z",
    )
    assert "all 14,960 bytes of their 60 tensors are equal" in output
    for folder in ("dropped", "limited", "unsynced"):
        written = load_file(tmp_path / folder / "model-00001-of-00001.safetensors")
        assert written.keys() == full.keys()
        assert all(np.array_equal(written[name], value) for name, value in full.items())


def test_a_sync_reaches_the_drive_on_macos(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[object] = []
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda _, command: calls.append(command))
    monkeypatch.setattr(os, "fsync", lambda _: calls.append("fsync"))
    with (tmp_path / "a").open("wb") as file:
        sync_file(file.fileno())
        assert calls == [51]

        def refuse(fd: int, command: int) -> None:
            raise OSError(45, "Operation not supported")

        monkeypatch.setattr(fcntl, "fcntl", refuse)
        sync_file(file.fileno())
    assert calls == [51, "fsync"]


def test_a_long_read_is_split_for_macos(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "long"
    size = (2 << 30) + 5
    with path.open("wb") as file:
        file.truncate(size)
        file.seek(size - 5)
        file.write(b"abcde")
    lengths: list[int] = []

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        (buffer,) = buffers
        assert len(buffer) < 1 << 31
        lengths.append(len(buffer))
        if offset + len(buffer) == size:
            buffer[-5:] = b"abcde"  # the rest are holes
        return len(buffer)

    monkeypatch.setattr(os, "preadv", preadv)
    buffer = memoryview(np.empty(size, np.uint8).data)
    LocalStore().read_into(str(path), 0, buffer)
    assert sum(lengths) == size
    assert bytes(buffer[-5:]) == b"abcde"


def test_peak_memory_is_in_bytes_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_resident", lambda _: 0)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert settings.peak_memory(0) == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_locks_of_other_processes_without_those_of_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "lock")
    hold = f"""
import fcntl, os
fd = os.open({path!r}, os.O_RDWR | os.O_CREAT)
fcntl.lockf(fd, fcntl.LOCK_EX, 1, 7)
print(flush=True)
input()"""
    holder = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin
    assert holder.stdout
    holder.stdout.readline()
    monkeypatch.setattr(sys, "platform", "darwin")
    descriptor = os.open(path, os.O_RDWR)
    assert not locks._take(descriptor, 7, 1)
    assert locks._take(descriptor, 8, 1)
    holder.communicate("\n")
    assert locks._take(descriptor, 7, 1)
    os.close(descriptor)


ON_WINDOWS = """
import sys
sys.platform = "win32"
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
"""


def on_windows(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", f"{ON_WINDOWS}\n{code}"], capture_output=True, text=True, check=False)


def test_windows_is_refused_in_one_sentence() -> None:
    command = on_windows("from reshard.__main__ import main\nmain()")
    assert command.returncode == 1
    assert command.stderr.startswith("error: ")
    assert command.stderr.count("\n") == 1
    assert "WSL" in command.stderr
    said = command.stderr.removeprefix("error: ")
    for use in (
        "import reshard; reshard.open('a')",
        "from reshard import Checkpoint",
        "from reshard.mindspore import load_checkpoint",
    ):
        done = on_windows(use)
        assert done.returncode == 1
        assert done.stderr.endswith(f"ImportError: {said}")
