"""Places: a path or URL, resolved once, and the one store that reads whatever lies at any of them.

`as_place` makes a `LocalPath` or a `RemotePath` of what the user says. Both answer the same questions, so that nobody
else need know which it is; what is worth knowing is what its store can do (`can`).
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PosixPath, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from reshard.errors import GoneError, SourceError
from reshard.storage.base import Around, Capabilities, Status
from reshard.storage.local import LOCAL, LocalStore, local_store
from reshard.storage.remote import (
    FETCH_BYTES,
    RemoteStore,
    forget_listings,
    remote_can,
    remote_store,
    status_of,
    whole,
)
from reshard.storage.threads import map_threads
from reshard.storage.urls.requests import ask, filesystem

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from reshard.storage.base import ReadStore, Want

T = TypeVar("T")
R = TypeVar("R")

_LOCAL_SCHEMES = ("file://", "local://")


class LocalPath(PosixPath):
    """A file or directory on this machine: a path, and what else is asked of places."""

    __slots__ = ()

    @property
    def can(self) -> Capabilities:
        """What can be done there."""
        return LOCAL

    def refresh(self) -> None:
        """See what is there as it is now; on this machine that is always so."""

    def is_there(self) -> bool:
        """Return whether anything has this name, be it a link that leads nowhere."""
        return os.path.lexists(self)

    def real(self) -> LocalPath:
        """Return where it is without links; a loop of them does not matter."""
        return LocalPath(os.path.realpath(self))

    def require_bucket(self) -> None:
        """Check nothing: only object stores have buckets."""

    def status(self) -> Status:
        """Return the state of the file."""
        return local_store().status(str(self))

    def files(self, depth: int | None = None) -> list[LocalPath]:
        """Return the files below it, in so many levels of directories; of any number of them where that is None."""
        patterns = ["**/*"] if depth is None else ["/".join("*" * level) for level in range(1, depth + 1)]
        return [path for pattern in patterns for path in self.glob(pattern) if path.is_file()]

    def matching(self, pattern: str, directories: re.Pattern[str]) -> list[LocalPath]:
        """Return the files below it that match a glob, and maybe others, where that costs less.

        Args:
            pattern: of their paths.
            directories: what the path of a directory matches that may have some; to glob, one that may not be read has
                no files.

        Raises:
            OSError: such a directory cannot be read.
        """
        above = pattern.rpartition("/")[0]
        for directory in self.glob(above) if above else [self]:
            name = "" if directory == self else directory.relative_to(self).as_posix()
            if directories.fullmatch(name) and directory.is_dir():
                os.scandir(directory).close()
        return [path for path in self.glob(pattern) if path.is_file()]

    def existing(self, names: Iterable[str]) -> list[str]:
        """Return those of some names below it that are there now."""
        return [name for name in names if os.path.lexists(self / name)]

    def names(self) -> list[str]:
        """Return the names of what is directly in it now; none where it is not a directory, or may not be read."""
        with suppress(OSError, ValueError):
            return os.listdir(self)
        return []


@dataclass(frozen=True, order=True)
class RemotePath:
    """A file or directory at a URL, without a slash at its end: what of a path is asked of places.

    Object stores have no directories: whatever a name begins with, up to a slash, is one.
    """

    url: str

    @property
    def can(self) -> Capabilities:
        """What can be done there."""
        return can(self.url)

    @property
    def name(self) -> str:
        """The last part."""
        return PurePosixPath(self.url).name

    @property
    def stem(self) -> str:
        """The last part without its extension."""
        return PurePosixPath(self.url).stem

    @property
    def suffix(self) -> str:
        """The extension, with its dot."""
        return PurePosixPath(self.url).suffix

    @property
    def parent(self) -> RemotePath:
        """The directory that it is in."""
        return RemotePath(self.url.rpartition("/")[0])

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    def absolute(self) -> RemotePath:
        """Return itself."""
        return self

    def real(self) -> RemotePath:
        """Return itself: there are no links."""
        return self

    def is_symlink(self) -> bool:
        """Return False."""
        return False

    def relative_to(self, directory: str | RemotePath) -> PurePosixPath:
        """Return where it is below a directory."""
        return PurePosixPath(self.url.removeprefix(f"{directory}/"))

    def is_relative_to(self, directory: str | RemotePath) -> bool:
        """Return whether it is a directory or below it."""
        return f"{self}/".startswith(f"{directory}/")

    def refresh(self) -> None:
        """See what is there as it is now."""
        forget_listings(self.url)

    def is_there(self) -> bool:
        """Return whether it is a file."""
        return self.is_file()

    def is_file(self) -> bool:
        """Return whether it is a file."""
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Return whether anything is below it."""
        return self._kind() == "directory"

    def _kind(self) -> str | None:
        with suppress(GoneError):
            return str(ask(self.url, "looked at", "info")["type"])
        return None

    def status(self) -> Status:
        """Return its size and version, as they are known since `refresh`."""
        return status_of(ask(self.url, "looked at", "info"))

    def require_bucket(self) -> None:
        """Check that its bucket exists, if its file system has buckets: a `SourceError` if not."""
        try:
            ask(f"{self.url}/any", "looked at", "info")  # of a bucket alone the error does not say that it is one
        except SourceError as error:  # whatever else is wrong is told where it matters
            if error.code == "no-such-bucket":
                raise SourceError(error.message, code="no-such-bucket") from None

    def iterdir(self) -> list[RemotePath]:
        """Return what is directly in it."""
        names = ask(self.url, "listed", "ls", detail=False, nbytes=None)
        root = filesystem(self.url)[1]
        return [self / str(name)[len(root) :].strip("/") for name in names if name != root]

    def files(self, depth: int | None = None) -> list[RemotePath]:  # noqa: ARG002 -- to list all is one request
        """Return all files below it, none where it is not: one request for a thousand of them, in any directories."""
        with suppress(GoneError):
            names = ask(self.url, "listed", "find", nbytes=None)
            root = filesystem(self.url)[1]
            return [self / str(name)[len(root) :].strip("/") for name in names if name != root]
        return []

    def matching(self, pattern: str, directories: re.Pattern[str]) -> list[RemotePath]:  # noqa: ARG002 -- as `files`
        """Return all files below it, of which some match a glob."""
        return self.files()

    def existing(self, names: Iterable[str]) -> list[str]:
        """Return those of some names below it that are there now; of names in itself, directories too."""
        names = list(names)
        if not any("/" in name for name in names):
            there = set(self.names())
            return [name for name in names if name in there]
        self.refresh()
        urls = {file.url for file in self.files()}
        return [name for name in names if f"{self}/{name}" in urls]

    def names(self) -> list[str]:
        """Return the names of what is directly in it now; none where it is not a directory."""
        self.refresh()
        return [path.name for path in self.iterdir()] if self.is_dir() else []

    def read_bytes(self) -> bytes:
        """Return the contents."""
        return whole(self.url)

    def __str__(self) -> str:
        return self.url


Place = LocalPath | RemotePath
"""Where a file or a directory is."""

AnyName = str | os.PathLike[str] | RemotePath
"""What a caller may say for a place."""


def is_url(path: object) -> bool:
    """Return whether a path is a URL.

    >>> is_url("s3://bucket/run"), is_url("runs/1")
    (True, False)
    """
    return "://" in str(path)


def as_place(path: AnyName) -> Place:
    """Return the place that a path or URL names; a `file://` URL is a local path.

    >>> as_place("s3://bucket/run/"), as_place("file:///run")
    (RemotePath(url='s3://bucket/run'), LocalPath('/run'))
    """
    if isinstance(path, (LocalPath, RemotePath)):
        return path
    text = os.fspath(path)
    for scheme in _LOCAL_SCHEMES:
        text = text.removeprefix(scheme)
    return RemotePath(text.rstrip("/")) if is_url(text) else LocalPath(text)


def can(path: str) -> Capabilities:
    """Return what can be done at a path or URL.

    >>> can("runs/1").positioned, can("memory://runs").positioned
    (True, False)
    """
    scheme, separator, _ = path.partition("://")
    return remote_can(scheme) if separator else LOCAL


def of_each(function: Callable[[T], R], places: Sequence[T]) -> Iterator[R]:
    """Yield what a function says of each of some places; they are asked side by side where requests take long."""
    requests = max((can(str(place)).requests for place in places), default=1)
    return map(function, places) if requests == 1 else iter(map_threads(function, places, requests))


def in_batches(steps: Iterable[tuple[T, ReadStore, Sequence[Want]]]) -> Iterator[T]:
    """Yield each item of some steps when its buffers are filled; they are filled in turn, so that they may be the same.

    Where a request takes its time, what several steps want is requested at once, about `FETCH_BYTES` of it.

    Args:
        steps: of each the item, the store to read from, and what is read for it.

    Raises:
        SourceError: a file ends early or cannot be read.
    """
    waiting: list[tuple[T, ReadStore, Sequence[Want]]] = []
    room = FETCH_BYTES
    for step in steps:
        item, store, wants = step
        if not waiting and not (wants and is_url(wants[0][0])):
            for want in wants:
                store.read_into(*want)
            yield item
            continue
        waiting.append(step)
        room -= sum(len(buffer) for _, _, buffer in wants)
        if room <= 0:
            yield from _fetched(waiting)
            waiting, room = [], FETCH_BYTES
    yield from _fetched(waiting)


def _fetched(steps: Sequence[tuple[T, ReadStore, Sequence[Want]]]) -> Iterator[T]:
    """Read what some steps want, all at once, and yield their items one after the other."""
    held: dict[ReadStore, list[Want]] = {}
    for _, store, wants in steps:
        of_store = held.setdefault(store, [])
        of_store += [(path, offset, memoryview(bytearray(len(buffer)))) for path, offset, buffer in wants]
    for store, every in held.items():
        store.read(every)
    found = {store: iter(every) for store, every in held.items()}
    for item, store, wants in steps:
        for (_, _, buffer), (_, _, content) in zip(wants, found[store], strict=False):
            buffer[:] = content
        yield item


def store_at(path: str) -> LocalStore | RemoteStore:
    """Return this process's store that has a file, by its path or URL."""
    return remote_store() if is_url(path) else local_store()


class AnyStore(Around):
    """Reads local files by their paths and others by their URLs. Safe for threads."""

    def __init__(self) -> None:
        super().__init__(local_store())

    def status(self, path: str) -> Status:
        """Return the state of a file as it is now."""
        return store_at(path).status(path)

    def statuses(self, paths: Sequence[str]) -> list[Status | SourceError]:
        """Return the state of many files as it is now; or what is wrong with one."""

        def status(path: str) -> Status | SourceError:
            try:
                return self.status(path)
            except SourceError as error:
                return error

        return list(of_each(status, paths))

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        return store_at(path).size(path)

    def read(self, wants: Sequence[Want]) -> None:
        """Fill buffers from files: from local ones one after the other, at URLs all at once."""
        remote = []
        for want in wants:
            if "://" in want[0]:
                remote.append(want)
            else:
                self.inner.read_into(*want)
        if remote:
            remote_store().read(remote)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from a file."""
        (remote_store() if "://" in path else self.inner).read_into(path, offset, buffer)

    def holds(self, path: str, pieces: Iterable[tuple[int, bytes]]) -> bool:
        """Return whether a file has certain bytes at certain offsets."""
        # There may be half a million pieces, and a call for each costs more than reading it.
        return super().holds(path, pieces) if is_url(path) else self.inner.holds(path, pieces)

    def drop_cache(self, path: str, first: int = 0, last: int | None = None, *, written: bool = False) -> None:
        """Leave nothing of a local file, or of a part of it, in the page cache; see `LocalStore.drop_cache`."""
        if not is_url(path):
            local_store().drop_cache(path, first, last, written=written)

    def __reduce__(self) -> tuple[type[AnyStore], tuple[Any, ...]]:
        """Travel to another process as a fresh store: handles do not."""
        return AnyStore, ()


@lru_cache(maxsize=1)
def any_store() -> AnyStore:
    """Return this process's store of all files."""
    return AnyStore()
