"""Checkpoint file formats, one module each, and the one list of them.

A format is two functions over bytes at offsets, so that a file is neither read to be indexed nor built in memory to
be written:

* `index(reader)` tells what a file holds, from its header alone;
* `lay_out(tensors, metadata)` tells, for tensors to be written, the bytes that are not tensor contents and where
  the contents go.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, Protocol

from reshard.errors import SourceError, UsageError
from reshard.remote import is_url
from reshard.remote_store import store_at

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.block import Shape
    from reshard.checkpoint import FileIndex, Runs
    from reshard.dtypes import DType
    from reshard.store import Readable


_REMOTE_HEADER = 1 << 20
_REMOTE_WINDOW = 16 << 10  # a .ckpt file has no index: each large tensor is a request, whose answer should be short


class Content(NamedTuple):
    """A tensor to be written into one file: its name, dtype and the shape of the part; `text` for a `str` entry."""

    name: str
    dtype: DType
    shape: Shape
    text: str | None = None


class FileLayout(NamedTuple):
    """Where everything of a file to be written goes.

    Attributes:
        size: of the whole file, in bytes.
        literals: the bytes that are not tensor contents, with their offsets.
        places: for each tensor, the byte ranges of its contents; none for a `str` entry, which is in the literals.
    """

    size: int
    literals: tuple[tuple[int, bytes], ...]
    places: Mapping[str, Runs]


class RangeReader:
    """Reads pieces of one file, for indexing it; keeps the last piece, because headers lie close together."""

    def __init__(self, path: str, *, store: Readable | None = None, window: int = 4096) -> None:
        self.path = path
        self._store = store or store_at(path)
        self.size = self._store.size(path)
        self._window = window
        self._start = 0
        self._held = b""

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`.

        Raises:
            SourceError: the file ends before.
        """
        begin = offset - self._start
        if begin >= 0 and begin + nbytes <= len(self._held):
            return self._held[begin : begin + nbytes]
        if nbytes < 0 or offset + nbytes > self.size:
            raise SourceError(
                f"{self.path}: bytes {offset} to {offset + nbytes} are expected; the file ends at {self.size} "
                "(cut short?)"
            )
        buffer = bytearray(min(max(nbytes, self._window), self.size - offset))
        self._store.read_into(self.path, offset, memoryview(buffer))
        self._start, self._held = offset, bytes(buffer)
        return self._held[:nbytes]

    def upto(self, offset: int, nbytes: int) -> bytes:
        """Return at most `nbytes` bytes from `offset`, fewer where the file ends."""
        return self.read(offset, max(0, min(nbytes, self.size - offset)))


class Format(Protocol):
    """What the module of a format offers."""

    NAME: str
    EXTENSION: str

    def recognizes(self, start: bytes, size: int) -> bool:
        """Tell a file of this format by its first bytes and its size."""

    def index(self, reader: RangeReader) -> FileIndex:
        """Return what a file holds; raise `SourceError` where it is not sound."""

    def lay_out(self, contents: Sequence[Content], metadata: Mapping[str, str]) -> FileLayout:
        """Return where the contents of a file to be written go, and all its other bytes."""


def formats() -> tuple[Format, ...]:
    """Return every format, the more easily recognized first."""
    from reshard.formats import ckpt, safetensors

    return (safetensors, ckpt)


def by_name(name: str) -> Format:
    """Return a format by its name.

    Raises:
        UsageError: there is no such format.
    """
    for known in formats():
        if name == known.NAME:
            return known
    raise UsageError(f"unknown format {name!r}; known are {', '.join(known.NAME for known in formats())}")


def index_file(path: str, *, store: Readable | None = None) -> FileIndex:
    """Return what a checkpoint file holds; its format is told by its content, not by its name.

    Args:
        path: the file.
        store: what reads it; by default this process's.

    Raises:
        SourceError: the file is of no known format, cut short or corrupt.
    """
    reader = RangeReader(path, store=store, window=_REMOTE_WINDOW if is_url(path) else 4096)
    # A first request that has most headers whole: to ask a second time takes longer than a megabyte does.
    start = reader.upto(0, _REMOTE_HEADER if is_url(path) else 64)[:64]
    for known in formats():
        if known.recognizes(start, reader.size):
            return known.index(reader)
    if not reader.size:
        raise SourceError(f"{path}: is empty; a checkpoint was expected (was saving it interrupted?)")
    # Of protobuf's first field MindSpore's .ckpt files have a message, and its strategy files the number of a stage.
    is_strategy = re.match(rb"(\x08.)?\x12", start, re.DOTALL)
    seen = "may be a strategy file" if is_strategy else f"begins with {start[:8].hex(' ')}"
    raise SourceError(f"{path}: is of no known checkpoint format (it {seen}); expected safetensors or MindSpore .ckpt")
