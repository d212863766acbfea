"""Read safetensors files with Hugging Face's library, as an independent check of this program's reader and writer.

The library lists the tensors of a file with their dtypes and shapes, and gives their contents by name, so this
program's own reader does not decide where the bytes are.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from math import prod
from threading import Lock
from typing import TYPE_CHECKING, Any

from reshard.core.storage.base import Around
from reshard.core.storage.places import any_store, can
from reshard.dtypes import INT4
from reshard.errors import Faults, SourceError, UsageError, names
from reshard.kits.safetensors import NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.entries import Entry
    from reshard.core.storage.base import ReadStore

_READ_BYTES = 64 << 20  # the most bytes of a tensor that a thread holds, if one row is not larger


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a file: its byte range, its name, and the size of a row."""

    begin: int
    end: int
    name: str
    row_bytes: int

    @classmethod
    def of(cls, name: str, entry: Entry) -> _Stored:
        """Return the tensor of an entry."""
        ((begin, nbytes),) = entry.runs
        return cls(begin, begin + nbytes, name, nbytes // (entry.shape[0] if entry.shape else 1))


@dataclass(frozen=True, eq=False)
class SafetensorsLibrary:
    """A `Coding` that reads files with the library.

    Attributes:
        tensors: the tensors of each file, in the order of their bytes.
        unread: names of tensors that the library cannot return, since numpy lacks the dtype; this program reads them.
    """

    tensors: dict[str, list[_Stored]]
    unread: tuple[str, ...]

    def store(self) -> ReadStore:
        """Return a store that reads tensors through the library."""
        return _LibraryStore(self)

    def nbytes(self, threads: int) -> int:
        """Return the memory that a number of threads need, in bytes."""
        return threads * _READ_BYTES


def by_library(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint that reads safetensors files with Hugging Face's library.

    Raises:
        UsageError: it has no safetensors files, or they are encrypted or at a URL.
        SourceError: the library finds other tensors in a file, or other dtypes or shapes.
    """
    files = [file for file in checkpoint.files if file.index.format == NAME]
    code = "not-for-the-library"
    if not files or checkpoint.coding is not None:
        raise UsageError(f"{checkpoint.root} has no plain safetensors files for the library to read", code=code)
    if not can(files[0].path).positioned:
        raise UsageError(f"{checkpoint.root}: the safetensors library reads local files only", code=code)
    faults = Faults(f"{checkpoint.root}, as the safetensors library reads it,")
    tensors: dict[str, list[_Stored]] = {}
    unread: dict[str, None] = {}
    for file in files:
        entries = {name: entry for name, entry in file.index.entries.items() if entry.text is None}
        described = _described(file.path)
        for name in entries.keys() ^ (described.keys() - dict(file.index.unreadable).keys()):
            message = "only this program finds it" if name in entries else "only the library finds it"
            faults.add(f"{file.path}: tensor {name!r}", message, code="library-disagrees")
        stored = []
        for name, entry in entries.items():
            if name not in described or not prod(entry.shape):
                continue
            expected = ("I8" if entry.dtype is INT4 else entry.dtype.safetensors, entry.dtype.as_values(entry.shape))
            if described[name] != expected:
                fault = f"is {described[name]} there; this program read {expected}"
                faults.add(f"{file.path}: tensor {name!r}", fault, code="library-disagrees")
            if entry.dtype.bits or entry.dtype.name.startswith("float8"):
                unread[name] = None
            else:
                stored.append(_Stored.of(name, entry))
        tensors[file.path] = sorted(stored, key=lambda tensor: tensor.begin)
    faults.raise_if_any(SourceError)
    return replace(checkpoint, coding=SafetensorsLibrary(tensors, tuple(unread)))


def _described(path: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype and shape of each tensor of a file, as the library says them."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="numpy") as opened:
            theirs = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 -- not a dict
            return {name: (tensor.get_dtype(), tuple(tensor.get_shape())) for name, tensor in theirs.items()}
    except Exception as error:  # of the library, whose class is its own
        raise SourceError(f"{path}: the safetensors library: {error}", code="library-disagrees") from None


def read_by_library(checkpoint: Checkpoint) -> int:
    """Return the number of files that the library reads."""
    return len(checkpoint.coding.tensors) if isinstance(checkpoint.coding, SafetensorsLibrary) else 0


def unread_by_library(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a description of the tensors that the library could not read."""
    if isinstance(checkpoint.coding, SafetensorsLibrary) and checkpoint.coding.unread:
        yield f"{names(checkpoint.coding.unread, most=3)} by the safetensors library, whose dtypes numpy lacks"


class _LibraryStore(Around):
    """Reads byte ranges from the library's tensors, else from the file."""

    def __init__(self, library: SafetensorsLibrary) -> None:
        super().__init__(any_store())
        self._tensors = library.tensors
        self._begins = {path: [tensor.begin for tensor in tensors] for path, tensors in library.tensors.items()}
        self._opened: dict[str, Any] = {}
        self._lock = Lock()

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill one buffer."""
        buffer = buffer.cast("B")
        tensors, begins = self._tensors.get(path, []), self._begins.get(path, [])
        while len(buffer):
            number = bisect_right(begins, offset) - 1
            tensor = tensors[number] if number >= 0 else None
            if tensor is not None and offset < tensor.end:
                count = min(tensor.end - offset, len(buffer))
                self._read_tensor(path, tensor, offset - tensor.begin, buffer[:count])
            else:
                following = begins[number + 1] if number + 1 < len(begins) else offset + len(buffer)
                count = min(following - offset, len(buffer))
                self.inner.read_into(path, offset, buffer[:count])
            offset, buffer = offset + count, buffer[count:]

    def close(self) -> None:
        """Close every file."""
        with self._lock:
            self._opened.clear()
        super().close()

    def _read_tensor(self, path: str, tensor: _Stored, begin: int, buffer: memoryview) -> None:
        """Fill a buffer with bytes of a tensor, a few rows at a time."""
        whole = self._file(path).get_slice(tensor.name)
        if not whole.get_shape():
            content = self._file(path).get_tensor(tensor.name).tobytes()
            buffer[:] = content[begin : begin + len(buffer)]
            return
        step = max(_READ_BYTES // 2 // tensor.row_bytes, 1)
        row, done = begin // tensor.row_bytes, 0
        skipped = begin - row * tensor.row_bytes
        while done < len(buffer):
            stop = min(row + step, -(-(begin + len(buffer)) // tensor.row_bytes))
            content = whole[row:stop].tobytes()[skipped : skipped + len(buffer) - done]
            buffer[done : done + len(content)] = content
            row, done, skipped = stop, done + len(content), 0

    def _file(self, path: str) -> Any:
        from safetensors import safe_open

        with self._lock:
            if path not in self._opened:
                opened: Any = safe_open
                self._opened[path] = opened(path, framework="numpy").__enter__()
            return self._opened[path]
