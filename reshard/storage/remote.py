"""Files at URLs: what of `pathlib` finding a checkpoint needs, and how errors of a file system are told.

Every kind of URL that fsspec knows is one: `s3://`, `gs://`, `memory://` and so on. Credentials and addresses come from
where the file system itself looks for them (its environment variables, or fsspec's own `FSSPEC_S3_ENDPOINT_URL` and
the like), never from a plan, so that they are neither written down nor sent to other machines.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.errors import GoneError, ReshardError, SourceError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_LIBRARIES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
_LOCAL = ("file://", "local://")

# What tells that a file is another than before, the surest first; which of them there is depends on the file system.
_VERSIONS = (
    "ETag",
    "etag",
    "generation",
    "md5Hash",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "created",
    "modificationTime",
    "modify",
)


class Status(NamedTuple):
    """What tells one state of a file from another.

    Attributes:
        nbytes: its size.
        mtime_ns: when it last changed, in nanoseconds; of a file at a URL a number that stands for its entity tag or
            whatever else its file system has.
        change: of a local file, when anything of it last changed (ctime) and the number of its inode: whoever sets the
            time back does not set these. No copy has them, and no other machine need see the same.
    """

    nbytes: int
    mtime_ns: int
    change: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, status: os.stat_result) -> Status:
        """Return what the system says of a local file."""
        return cls(status.st_size, status.st_mtime_ns, (status.st_ctime_ns, status.st_ino))

    def is_still(self, before: Status) -> bool:
        """Return whether a file is as it was before, as far as both are known."""
        return self[:2] == before[:2] and ((0, 0) in {self.change, before.change} or self.change == before.change)


def is_url(path: object) -> bool:
    """Tell a URL from a local path.

    >>> is_url("s3://bucket/run"), is_url("runs/1")
    (True, False)
    """
    return "://" in str(path)


def as_path(path: str | os.PathLike[str] | RemotePath) -> Path | RemotePath:
    """Return a path or URL as what can be looked into; a `file://` URL is a local path.

    >>> as_path("s3://bucket/run/"), as_path("file:///run") == Path("/run")
    (RemotePath(url='s3://bucket/run'), True)
    """
    if isinstance(path, RemotePath):
        return path
    text = os.fspath(path)
    for scheme in _LOCAL:
        text = text.removeprefix(scheme)
    return RemotePath(text.rstrip("/")) if is_url(text) else Path(text)


def filesystem(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the file's name there.

    Raises:
        UsageError: there is no such kind of URL.
        ReshardError: its library is not installed.
    """
    from fsspec.core import url_to_fs  # 40 ms, for URLs only

    try:
        fs, name = url_to_fs(url)
    except ImportError as error:
        library = _LIBRARIES.get(url.partition("://")[0])
        hint = f"pip install {library}, or 'reshard[remote]'" if library else str(error)
        raise ReshardError(f"{url}: the library for such URLs is not installed; {hint}") from None
    except ValueError as error:
        raise UsageError(f"{url}: {error}") from None
    return fs, str(name)


@contextmanager
def telling(url: str, what: str, kind: type[ReshardError] = SourceError) -> Iterator[None]:
    """Turn whatever a file system raises into one sentence; each library has errors of its own."""
    try:
        yield
    except ReshardError:
        raise
    except FileNotFoundError:
        kind = GoneError if kind is SourceError else kind
        raise kind(f"{url}: cannot be {what}: it is not there") from None
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise kind(f"{url}: cannot be {what}: {text}") from error


def status_of(info: Mapping[str, Any]) -> Status:
    """Return what a file system's description of a file says about its state."""
    version = next((str(info[key]).strip('"') for key in _VERSIONS if info.get(key)), "")
    return Status(int(info["size"]), int.from_bytes(sha256(version.encode()).digest()[:7]) if version else 0)


def forget_listings(url: str) -> None:
    """Ask anew what there is; file systems remember listings for as long as the process lives."""
    filesystem(url)[0].invalidate_cache()


def existing(directory: Path | RemotePath, files: Iterable[str]) -> list[str]:
    """Return those of some files below a directory that are there, as it is now."""
    if isinstance(directory, RemotePath):
        forget_listings(directory.url)
        there = {file.url for file in directory.files()}
        return [file for file in files if f"{directory}/{file}" in there]
    return [file for file in files if os.path.lexists(directory / file)]


@dataclass(frozen=True, order=True)
class RemotePath:
    """A file or directory at a URL, without a slash at its end; what of `pathlib.Path` finding a checkpoint needs.

    Object stores have no directories: whatever a name begins with, up to a slash, is one.
    """

    url: str

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

    def relative_to(self, directory: Path | RemotePath) -> PurePosixPath:
        """Return where it is below a directory."""
        return PurePosixPath(self.url.removeprefix(f"{directory}/"))

    def is_file(self) -> bool:
        """Return whether it is a file."""
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Return whether anything is below it."""
        return self._kind() == "directory"

    def _kind(self) -> str | None:
        with telling(self.url, "looked at"):
            fs, name = filesystem(self.url)
            try:
                return str(fs.info(name)["type"])
            except (FileNotFoundError, NotADirectoryError):
                return None

    def status(self) -> Status:
        """Return its size and version, as they are known since `forget_listings`."""
        with telling(self.url, "looked at"):
            fs, name = filesystem(self.url)
            return status_of(fs.info(name))

    def iterdir(self) -> list[RemotePath]:
        """Return what is directly in it."""
        with telling(self.url, "listed"):
            fs, root = filesystem(self.url)
            return [self / str(name)[len(root) :].strip("/") for name in fs.ls(root, detail=False) if name != root]

    def files(self) -> list[RemotePath]:
        """Return all files below it, none where it is not: one request for a thousand of them, in any directories."""
        with telling(self.url, "listed"):
            fs, root = filesystem(self.url)
            with suppress(FileNotFoundError):
                return [self / str(name)[len(root) :].strip("/") for name in fs.find(root) if name != root]
            return []

    def read_bytes(self) -> bytes:
        """Return the contents."""
        with telling(self.url, "read"):
            fs, name = filesystem(self.url)
            return bytes(fs.cat_file(name))

    def __str__(self) -> str:
        return self.url
