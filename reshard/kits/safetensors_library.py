"""Read safetensors files with Hugging Face's library, as an independent check of this program's reader and writer.

The library lists the tensors of a file with their dtypes and shapes, and gives their contents by name, so this
program's own reader does not decide where the bytes are.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
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
    from reshard.core.storage.base import ReadStore

_READ_BYTES = 64 << 20  # memory of a thread: the bytes of a read, if one row is not larger


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a file: its byte range, its name, and the bytes of a row; 0 if it has no dimensions."""

    begin: int
    end: int
    name: str
    row_bytes: int


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
        return _LibraryStore(self.tensors)

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
    if not files or checkpoint.coding is not None or not can(files[0].path).positioned:
        fault = f"{checkpoint.root} has no plain, local safetensors files for the library to read"
        raise UsageError(fault, code="not-for-the-library")
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
        for name, entry in ((name, entry) for name, entry in entries.items() if name in described):
            expected = ("I8" if entry.dtype is INT4 else entry.dtype.safetensors, entry.dtype.as_values(entry.shape))
            if described[name] != expected:
                fault = f"is {described[name]} there; this program read {expected}"
                faults.add(f"{file.path}: tensor {name!r}", fault, code="library-disagrees")
            elif entry.dtype.bits or entry.dtype.name.startswith("float8"):
                unread[name] = None
            elif entry.nbytes:
                ((begin, nbytes),) = entry.runs
                stored.append(_Stored(begin, begin + nbytes, name, nbytes // entry.shape[0] if entry.shape else 0))
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

    def __init__(self, tensors: dict[str, list[_Stored]]) -> None:
        super().__init__(any_store())
        self._tensors = tensors
        self._opened: dict[str, Any] = {}
        self._lock = Lock()

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill one buffer."""
        buffer = buffer.cast("B")
        tensors = self._tensors.get(path, [])
        following = bisect_right(tensors, offset, key=lambda tensor: tensor.end)
        while len(buffer):
            tensor = tensors[following] if following < len(tensors) else None
            if tensor is not None and tensor.begin <= offset:
                count = min(tensor.end - offset, len(buffer), max(_READ_BYTES // 2, tensor.row_bytes))
                self._read_tensor(path, tensor, offset - tensor.begin, buffer[:count])
                following += offset + count == tensor.end
            else:
                count = min(tensor.begin - offset, len(buffer)) if tensor else len(buffer)
                self.inner.read_into(path, offset, buffer[:count])
            offset, buffer = offset + count, buffer[count:]

    def close(self) -> None:
        """Close every file."""
        with self._lock:
            self._opened.clear()
        super().close()

    def _read_tensor(self, path: str, tensor: _Stored, begin: int, buffer: memoryview) -> None:
        """Fill a buffer with bytes of a tensor."""
        opened = self._file(path)
        if tensor.row_bytes:
            first, last = begin // tensor.row_bytes, -(-(begin + len(buffer)) // tensor.row_bytes)
            content = opened.get_slice(tensor.name)[first:last].tobytes()
            begin -= first * tensor.row_bytes
        else:
            content = opened.get_tensor(tensor.name).tobytes()
        buffer[:] = content[begin : begin + len(buffer)]

    def _file(self, path: str) -> Any:
        from safetensors import safe_open

        with self._lock:
            if path not in self._opened:
                opened: Any = safe_open
                self._opened[path] = opened(path, framework="numpy").__enter__()
            return self._opened[path]
