"""A store around a store that notes what is asked of it, and fails, waits or kills where a test says so.

`install` puts one around the stores of this process, local files' and URLs'; the fixture `faults` does so for one test.
What is asked of the sinks that a store gives (`write_at`, `finish`) counts like what is asked of the store. A request
for a byte range at a URL, by a store or ahead, is a `fetch`.
"""

from __future__ import annotations

import itertools
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from pytest import MonkeyPatch  # noqa: PT013 -- for code of another process, too

from reshard.core.storage import cipher, local, places
from reshard.core.storage.base import stem_of_unfinished
from reshard.core.storage.urls import remote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


IMPORTED = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
"""What code of another process begins with, so that it can import this module."""


class Call(NamedTuple):
    """What was asked: of which kind, of which file by its final name; of reads and writes, where and how many bytes."""

    kind: str
    path: str
    offset: int = 0
    nbytes: int = 0


class Faults:
    """What stores are asked, in order, and what happens then."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._do: list[tuple[frozenset[str], Callable[[Call], object]]] = []

    def every(self, do: Callable[[Call], object], *kinds: str) -> None:
        """Before every call of some kinds, do something: raise, wait, kill, look."""
        self._do.append((frozenset(kinds), do))

    def nth(self, number: int, do: Callable[[Call], object], *kinds: str, after: bool = False) -> None:
        """Before the call of some kinds with this number, from 0 on, do something; also before those after it."""
        turns, lock = itertools.count(), threading.Lock()

        def turn(call: Call) -> None:
            with lock:
                turn = next(turns)
            if turn == number or (after and turn > number):
                do(call)

        self.every(turn, *kinds)

    def clear(self) -> None:
        """Forget what was asked, and have nothing happen any more."""
        self.calls.clear()
        self._do.clear()

    def of(self, *kinds: str) -> list[Call]:
        """What was asked of some kinds."""
        return [call for call in self.calls if call.kind in kinds]

    @contextmanager
    def broken(self, number: int, do: Callable[[Call], object], *kinds: str, after: bool = False) -> Iterator[None]:
        """Have `nth` for a while."""
        before = list(self._do)
        self.nth(number, do, *kinds, after=after)
        yield
        self._do = before

    def asked(self, kind: str, path: str, offset: int = 0, nbytes: int = 0) -> None:
        call = Call(kind, stem_of_unfinished(path) or path, offset, nbytes)
        self.calls.append(call)
        for kinds, do in list(self._do):
            if call.kind in kinds:
                do(call)


def raising(error: BaseException) -> Callable[[Call], None]:
    """What raises an error."""

    def do(_call: Call) -> None:
        raise error

    return do


class FaultySink:
    """A sink around a sink."""

    def __init__(self, sink: Any, path: str, faults: Faults) -> None:
        self._sink, self._path, self._faults = sink, path, faults

    @property
    def ended(self) -> bool:
        return bool(self._sink.ended)

    def write_at(self, offset: int, data: Any) -> None:
        self._faults.asked("write_at", self._path, offset, len(data))
        self._sink.write_at(offset, data)

    def finish(self, *, durable: bool) -> None:
        self._faults.asked("finish", self._path)
        self._sink.finish(durable=durable)

    def abort(self) -> None:
        self._sink.abort()


class FaultyStore:
    """A store around a store."""

    def __init__(self, store: Any, faults: Faults) -> None:
        self._store, self._faults = store, faults

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)
        if name in {"unfinished", "can"}:
            return real

        def asked(*arguments: Any, **options: Any) -> Any:
            path = arguments[0] if arguments and isinstance(arguments[0], str) else ""
            if name == "read" and "://" not in arguments[0][0][0]:  # local files are read one after the other
                for want in arguments[0]:
                    self.read_into(*want)
                return None
            if name == "read_into":
                self._faults.asked(name, path, arguments[1], len(arguments[2]))
            elif name == "read":
                self._faults.asked(name, arguments[0][0][0], 0, sum(len(want[2]) for want in arguments[0]))
            else:
                self._faults.asked(name, path)
            found = real(*arguments, **options)
            return FaultySink(found, path, self._faults) if name in {"create", "sink"} else found

        return asked


def install(faults: Faults, patch: MonkeyPatch) -> None:
    """Put faults around the stores of this process."""
    request = remote.read_request

    def requested(path: str, offset: int, buffer: memoryview) -> Any:
        faults.asked("fetch", path, offset, len(buffer))
        return request(path, offset, buffer)

    patch.setattr(remote, "read_request", requested)
    for module, name in ((local, "LocalStore"), (remote, "RemoteStore")):
        kind = getattr(module, name)
        patch.setattr(module, name, lambda kind=kind: FaultyStore(kind(), faults))
    forget()


def forget() -> None:
    """Have the stores of this process made again."""
    for made in (local.local_store, remote.remote_store, places.any_store, cipher._coded):
        made.cache_clear()


@pytest.fixture
def faults() -> Iterator[Faults]:
    found = Faults()
    with MonkeyPatch.context() as patch:
        install(found, patch)
        yield found
    forget()
