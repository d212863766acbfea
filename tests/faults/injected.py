"""`reshard` with a fault in it: `python injected.py '{"kind": "fails", …}' transform …`; `by-file` may come before.

The fault is put in at the calls with which the store and the ledger reach the disk, so that all that is above them is
the real thing. Work is cut fine, and receipts are noted at once, so that small tensors make many operations.

What to do, as JSON:

    note     file in which to write, at the end, how often each operation was done, and the bytes written
    kind     none; fails, short (less is done than asked for), ends (a read finds the end of the file), kill, signal,
             change
    operation  its name, or "any"
    at       which one of these, from 0 on
    errno    of what fails
    signal   to be sent
    change   content, touch, cut, remove or replace; `path` is the file
    statvfs  true: there seems to be room for everything; fallocate: false where the file system has none
"""

from __future__ import annotations

import atexit
import errno
import itertools
import json
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

OPERATIONS = ("preadv", "pwrite", "fsync", "replace", "posix_fallocate", "link", "write")


def inject(fault: dict[str, Any]) -> None:
    """Put a fault into the functions of `os`."""
    counts: Counter[str] = Counter()
    lock = threading.Lock()
    turns = itertools.count()

    def wrap(name: str) -> None:
        original = getattr(os, name)

        def operation(*arguments: Any, **options: Any) -> Any:
            if name == "write" and Path(f"/proc/self/fd/{arguments[0]}").readlink().suffix != ".jsonl":
                return original(*arguments)
            if name == "preadv" and len(arguments) > 3:  # what the page cache has would tell one run from another
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            with lock:
                counts[name] += 1
                hit = fault.get("operation") in {name, "any"} and next(turns) == fault.get("at")
            if hit:
                return happen(fault, original, arguments)
            done = original(*arguments, **options)
            if name == "pwrite":
                with lock:
                    counts["bytes"] += done
            return done

        setattr(os, name, operation)

    for name in OPERATIONS:
        wrap(name)
    if fault.get("statvfs"):
        real = os.statvfs
        os.statvfs = lambda path: os.statvfs_result((*real(path)[:3], 1 << 40, 1 << 40, *real(path)[5:]))  # type: ignore[assignment]
    if fault.get("fallocate") is False:

        def no_fallocate(*_: object) -> None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

        os.posix_fallocate = no_fallocate
    if "note" in fault:
        atexit.register(lambda: Path(fault["note"]).write_text(json.dumps(counts)))


def happen(fault: dict[str, Any], original: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    kind = fault["kind"]
    if kind == "fails":
        raise OSError(fault["errno"], os.strerror(fault["errno"]))
    if kind == "ends":
        return 0
    if kind in {"short", "kill"}:
        less = shortened(original.__name__, arguments)
        if kind == "short":
            return original(*less)
        if less != arguments:
            original(*less)
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "signal":
        os.kill(os.getpid(), fault["signal"])
    if kind == "change":
        change(Path(fault["path"]), fault["change"])
    return original(*arguments)


def shortened(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Ask for half of a read or a write."""
    if name in {"pwrite", "write"} and len(arguments[1]) > 1:
        return (arguments[0], arguments[1][: len(arguments[1]) // 2], *arguments[2:])
    if name == "preadv" and len(arguments[1][0]) > 1:
        return (arguments[0], [arguments[1][0][: len(arguments[1][0]) // 2]], *arguments[2:])
    return arguments


def change(path: Path, how: str) -> None:
    """Do to a source file what another program might."""
    later = path.stat().st_mtime_ns + 10**9
    if how == "content":
        with path.open("r+b") as file:
            file.write(changed_content(path))
        os.utime(path, ns=(later, later))
    elif how == "touch":
        os.utime(path, ns=(later, later))
    elif how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "remove":
        path.unlink()
    elif how == "replace":
        new = path.with_suffix(".new")
        new.write_bytes(changed_content(path))
        os.utime(new, ns=(later, later))
        new.rename(path)


def changed_content(path: Path) -> bytes:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    return bytes(content)


def main() -> None:
    fault = json.loads(sys.argv[1])
    sys.path.append(str(Path(__file__).parents[1]))
    import pytest
    from by_file import by_file

    from reshard.cli.main import main as reshard
    from reshard.core.plan import budget
    from reshard.core.run import graph
    from reshard.core.run.state import session as resume

    budget.TASK_BYTES, budget.BAND_BYTES, budget.LEAST_BAND_BYTES = 1024, 512, 256
    graph.FILES_A_TASK = 2
    resume.FLUSH_SECONDS = 0
    inject(fault)
    words = sys.argv[2:]
    if words[0] == "by-file":
        by_file(pytest.MonkeyPatch())
        del words[0]
    reshard(words)


if __name__ == "__main__":
    main()
