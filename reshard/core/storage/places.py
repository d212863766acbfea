"""Places: local paths and URLs with one interface, and a store that reads files at both.

`as_place` turns a path or URL of the user into a `LocalPath` or a `RemotePath`. Both have the same methods, so that
other modules need not distinguish them; differences that matter are in the store's capabilities (`can`).
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PosixPath, PurePosixPath
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from reshard.core.storage.base import Around, Capabilities, Status
from reshard.core.storage.local import LOCAL, LocalStore, local_store
from reshard.core.storage.urls.listings import listings
from reshard.core.storage.urls.pool import SLAB_BYTES, pool
from reshard.core.storage.urls.remote import Fetch, RemoteStore, remote_can, remote_store, whole

if TYPE_CHECKING:
    import re
    from collections.abc import Iterable, Iterator, Sequence

    from reshard.core.storage.base import ReadStore, Want

T = TypeVar("T")

_LOCAL_SCHEMES = ("file://", "local://")


class LocalPath(PosixPath):
    """A path on this machine, with the additional methods of places."""

    __slots__ = ()

    @property
    def can(self) -> Capabilities:
        """Return the capabilities of the store."""
        return LOCAL

    def __str__(self) -> str:
        text = super().__str__()
        return f"./{text}" if text.startswith("~") else text  # or `as_place` would take it for a home directory

    def relative_to(self, *directory: str | os.PathLike[str]) -> PurePosixPath:  # type: ignore[override]
        """Return the path relative to a directory."""
        return PurePosixPath(self).relative_to(*directory)

    def refresh(self) -> None:
        """Do nothing: local listings are not cached."""

    def is_there(self) -> bool:
        """Return whether the path exists: a file, a directory, or only a broken link."""
        return os.path.lexists(self)

    def real(self) -> LocalPath:
        """Return the path with links resolved; loops of links are no error."""
        return LocalPath(os.path.realpath(self))

    def require_bucket(self) -> None:
        """Check nothing: only object stores have buckets."""

    def status(self) -> Status:
        """Return the state of the file."""
        return local_store().status(str(self))

    def files(self, depth: int | None = None) -> list[LocalPath]:
        """Return the files below it, `depth` levels deep; None for any depth."""
        patterns = ["**/*"] if depth is None else ["/".join("*" * level) for level in range(1, depth + 1)]
        return [path for pattern in patterns for path in self.glob(pattern) if path.is_file()]

    def matching(self, pattern: str, directories: re.Pattern[str]) -> list[LocalPath]:
        """Return the files below it that match a glob, and maybe more files if that costs less.

        Args:
            pattern: the glob for their paths.
            directories: matches the paths of directories that may have such files; they must be readable, because
                `glob` skips unreadable ones silently.

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
        """Return the names below it that exist now."""
        return [name for name in names if os.path.lexists(self / name)]

    def names(self) -> list[str]:
        """Return the names of its entries; empty if it is not a readable directory."""
        with suppress(OSError, ValueError):
            return os.listdir(self)
        return []


@dataclass(frozen=True, order=True)
class RemotePath:
    """A file or directory at a URL without a trailing slash, with the methods of a path.

    Object stores have no directories: each prefix of a name that ends at a slash counts as one.
    """

    url: str

    @property
    def can(self) -> Capabilities:
        """Return the capabilities of the store."""
        return can(self.url)

    @property
    def name(self) -> str:
        """Return the last part."""
        return PurePosixPath(self.url).name

    @property
    def stem(self) -> str:
        """Return the last part without its extension."""
        return PurePosixPath(self.url).stem

    @property
    def suffix(self) -> str:
        """Return the extension, with its dot."""
        return PurePosixPath(self.url).suffix

    @property
    def parent(self) -> RemotePath:
        """Return the directory that it is in."""
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
        """Return the path relative to a directory."""
        return PurePosixPath(self.url.removeprefix(f"{directory}/"))

    def is_relative_to(self, directory: str | RemotePath) -> bool:
        """Return whether it is a directory or below it."""
        return f"{self}/".startswith(f"{directory}/")

    def refresh(self) -> None:
        """Forget cached listings."""
        listings.forget(self.url)

    def is_there(self) -> bool:
        """Return whether it is a file; unlike for a local path, a directory does not count."""
        return self.is_file()

    def is_file(self) -> bool:
        """Return whether it is a file."""
        return listings.kind(self.url) == "file"

    def is_dir(self) -> bool:
        """Return whether anything is below it."""
        return listings.kind(self.url) == "directory"

    def status(self) -> Status:
        """Return its size and version as of the last `refresh`."""
        return listings.status(self.url)

    def require_bucket(self) -> None:
        """Check that its bucket exists, if its file system has buckets: a `SourceError` if not."""
        listings.require_bucket(self.url)

    def iterdir(self) -> list[RemotePath]:
        """Return its entries."""
        return [self / name for name in listings.level(self.url)]

    def files(self, depth: int | None = None) -> list[RemotePath]:  # noqa: ARG002 -- to list all is one request
        """Return all files below it, if any; one request lists a thousand files at any depth."""
        return list(map(RemotePath, listings.files(self.url)))

    def matching(self, pattern: str, directories: re.Pattern[str]) -> list[RemotePath]:  # noqa: ARG002 -- as `files`
        """Return all files below it, even if they do not match."""
        return self.files()

    def existing(self, names: Iterable[str]) -> list[str]:
        """Return the names below it that exist now; directories count if no name has a slash."""
        names = list(names)
        if not any("/" in name for name in names):
            entries = set(self.names())
            return [name for name in names if name in entries]
        self.refresh()
        urls = {file.url for file in self.files()}
        return [name for name in names if f"{self}/{name}" in urls]

    def names(self) -> list[str]:
        """Return the names of its entries; empty if it is not a directory."""
        self.refresh()
        return listings.level(self.url)

    def read_bytes(self) -> bytes:
        """Return the contents."""
        return whole(self.url)

    def __str__(self) -> str:
        return self.url


Place = LocalPath | RemotePath
"""The location of a file or directory."""

AnyName = str | os.PathLike[str] | RemotePath
"""Anything accepted as a location: path, URL or `Place`."""


def is_url(path: object) -> bool:
    """Return whether a path is a URL.

    >>> is_url("s3://bucket/run"), is_url("runs/1")
    (True, False)
    """
    return "://" in str(path)


def as_place(path: AnyName) -> Place:
    """Return the place that a path or URL names; a `file://` URL is a local path, and `~` the home directory.

    >>> as_place("s3://bucket/run/"), as_place("file:///run")
    (RemotePath(url='s3://bucket/run'), LocalPath('/run'))
    """
    if isinstance(path, (LocalPath, RemotePath)):
        return path
    text = os.path.expanduser(os.fspath(path))
    for scheme in _LOCAL_SCHEMES:
        text = text.removeprefix(scheme)
    return RemotePath(text.rstrip("/")) if is_url(text) else LocalPath(text)


def can(path: str) -> Capabilities:
    """Return the capabilities of the store at a path or URL.

    >>> can("runs/1").positioned, can("memory://runs").positioned
    (True, False)
    """
    scheme, separator, _ = path.partition("://")
    return remote_can(scheme) if separator else LOCAL


def workers_at(paths: Iterable[AnyName]) -> int:
    """Return how many files at paths to read at once, for `map_ordered`: 0 without latency."""
    return max((store.requests for path in paths if (store := can(str(path))).has_latency), default=0)


def in_batches(steps: Iterable[tuple[T, ReadStore, Sequence[Want]]]) -> Iterator[T]:
    """Yield the item of each step once its buffers are filled.

    Buffers are filled step by step, so steps may share them. At URLs, the following steps are read meanwhile, as far as
    the pool has buffers.

    Args:
        steps: for each step, the item, the store to read from, and the requests to read.

    Raises:
        SourceError: a file ends early or cannot be read.
    """
    batches: deque[_Batch[T]] = deque()
    batch = _Batch[T]()
    try:
        for step in steps:
            item, store, wants = step
            if not (wants and is_url(wants[0][0])) and not batch.steps and not batches:
                for want in wants:
                    store.read_into(*want)
                yield item
                continue
            nbytes = sum(len(buffer) for _, _, buffer in wants)
            if batch.steps and batch.nbytes + nbytes > SLAB_BYTES:
                while not batch.begin(is_first=not batches):
                    yield from batches.popleft().items()
                batches.append(batch)
                batch = _Batch()
            batch.steps.append(step)
            batch.nbytes += nbytes
        while not batch.begin(is_first=not batches):
            yield from batches.popleft().items()
        batches.append(batch)
        while batches:
            yield from batches.popleft().items()
    finally:
        for batch in batches:
            batch.close()


class _Batch(Generic[T]):
    """Steps that are read together.

    Attributes:
        steps: the steps, as in `in_batches`.
        nbytes: the number of bytes that they read.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[T, ReadStore, Sequence[Want]]] = []
        self.nbytes = 0
        self._fetch: Fetch | None = None

    def begin(self, *, is_first: bool) -> bool:
        """Begin to read what is at URLs; return False if the pool has no buffer, unless it is the first batch."""
        wants = [want for _, store, wants in self.steps if _is_plain(store) for want in wants if is_url(want[0])]
        if wants:
            slab = pool.take(own=is_first, sends=False)
            if slab is None:
                return False
            try:
                self._fetch = Fetch(wants, slab)
            except BaseException:  # an interrupt, while some requests may be in flight
                pool.forget(slab)
                raise
        return True

    def items(self) -> Iterator[T]:
        """Fill the buffers of each step, and yield its item."""
        try:
            others = self._read_others()
            for item, store, wants in self.steps:
                contents = others.get(store)
                for want in wants:
                    if contents is not None:
                        want[2][:] = next(contents)
                    elif self._fetch is not None and is_url(want[0]):
                        self._fetch.fill(want)
                    else:
                        store.read_into(*want)
                yield item
        finally:
            self.close()

    def _read_others(self) -> dict[ReadStore, Iterator[memoryview]]:
        """Read from stores that decrypt, decode or compute, with the requests of all steps at once."""
        copies: dict[ReadStore, list[Want]] = {}
        for _, store, wants in self.steps:
            if not _is_plain(store):
                of_store = copies.setdefault(store, [])
                of_store += [(path, offset, memoryview(bytearray(len(buffer)))) for path, offset, buffer in wants]
        for store, wants in copies.items():
            store.read(wants)
        return {store: (content for _, _, content in wants) for store, wants in copies.items()}

    def close(self) -> None:
        """Return the buffer to the pool."""
        if self._fetch is not None:
            self._fetch.close()
            self._fetch = None


def _is_plain(store: ReadStore) -> bool:
    return isinstance(store, AnyStore | RemoteStore)


def store_at(path: str) -> LocalStore | RemoteStore:
    """Return this process's store for a path or URL, to read and write files."""
    return remote_store() if is_url(path) else local_store()


class AnyStore(Around):
    """A store of local files by path and of remote files by URL. Safe for threads."""

    def __init__(self) -> None:
        super().__init__(local_store())

    def status(self, path: str) -> Status:
        """Return the state of a file as it is now."""
        return store_at(path).status(path)

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        return store_at(path).size(path)

    def read(self, wants: Sequence[Want]) -> None:
        """Fill buffers from files: local ones one by one, remote ones all at once."""
        local: list[Want] = []
        remote: list[Want] = []
        path, chosen = "", local
        for want in wants:
            if want[0] is not path:
                path = want[0]
                chosen = remote if is_url(path) else local
            chosen.append(want)
        if local:
            self.inner.read(local)
        if remote:
            remote_store().read(remote)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from a file."""
        (remote_store() if is_url(path) else self.inner).read_into(path, offset, buffer)

    def holds(self, path: str, pieces: Iterable[tuple[int, bytes]]) -> bool:
        """Return whether a file has certain bytes at certain offsets."""
        # There may be half a million pieces, and a call for each costs more than reading it.
        return super().holds(path, pieces) if is_url(path) else self.inner.holds(path, pieces)

    def prefetch(self, path: str, offset: int, nbytes: int) -> None:
        """Start to read a byte range of a local file into the page cache; do not wait."""
        if not is_url(path):
            self.inner.prefetch(path, offset, nbytes)

    def drop_cache(self, path: str, first: int = 0, last: int | None = None, *, written: bool = False) -> None:
        """Evict a byte range of a local file from the page cache; see `LocalStore.drop_cache`."""
        if not is_url(path):
            local_store().drop_cache(path, first, last, written=written)

    def __reduce__(self) -> tuple[type[AnyStore], tuple[Any, ...]]:
        """Travel to another process as a fresh store: handles do not."""
        return AnyStore, ()


@lru_cache(maxsize=1)
def any_store() -> AnyStore:
    """Return this process's store of all files."""
    return AnyStore()
