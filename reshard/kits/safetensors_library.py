"""Check safetensors files with Hugging Face's library, independently of this program's reader and writer.

The library lists the tensors of a file with their dtypes and shapes, and gives their contents by name. They have to be
the bytes that this program finds by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.core.storage.places import any_store, can
from reshard.core.storage.threads import map_ordered
from reshard.dtypes import INT4
from reshard.errors import Faults, SourceError, UsageError, names
from reshard.kits.safetensors import NAME

if TYPE_CHECKING:
    from reshard.core.model.checkpoint import Checkpoint, SourceFile
    from reshard.core.model.entries import Entry

_READ_BYTES = 16 << 20  # the most bytes of a tensor that a thread compares at once, if one row is not larger


def check_by_library(checkpoint: Checkpoint, threads: int) -> tuple[int, list[str]]:
    """Compare names, dtypes, shapes and bytes of tensors with those that the library gives.

    Returns:
        The number of files, and a sentence if numpy lacks dtypes, so that the library cannot return some tensors.

    Raises:
        UsageError: the checkpoint has no safetensors files, or they are encrypted or at a URL.
        SourceError: the library finds something else in a file.
    """
    files = [file for file in checkpoint.files if file.index.format == NAME]
    if not files or checkpoint.coding is not None or not can(files[0].path).positioned:
        fault = f"{checkpoint.root} has no plain, local safetensors files for the library to read"
        raise UsageError(fault, code="not-for-the-library")
    faults = Faults(f"{checkpoint.root}, as the safetensors library reads it,")
    unread: dict[str, None] = {}
    for file, (wrong, unread_in_file) in zip(files, map_ordered(_compared, files, threads), strict=True):
        unread |= dict.fromkeys(unread_in_file)
        for name, fault in wrong.items():
            faults.add(f"{file.path}: tensor {name!r}", fault, code="library-disagrees")
    faults.raise_if_any(SourceError)
    lacking = f"{names(unread, most=3)} by the safetensors library, whose dtypes numpy lacks"
    return len(files), [lacking] if unread else []


def _compared(file: SourceFile) -> tuple[dict[str, str], list[str]]:
    """Return what is different in a file, by tensor, and the names of tensors that the library cannot return."""
    from safetensors import safe_open

    entries = {name: entry for name, entry in file.index.entries.items() if entry.text is None}
    wrong: dict[str, str] = {}
    unread: list[str] = []
    try:
        with safe_open(file.path, framework="numpy") as opened:
            theirs = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 -- not a dict
            for name in theirs.keys() - entries.keys() - dict(file.index.unreadable).keys():
                wrong[name] = "only the library finds it"
            for name, entry in entries.items():
                ours = "I8" if entry.dtype is INT4 else entry.dtype.safetensors, entry.dtype.as_values(entry.shape)
                if name not in theirs:
                    wrong[name] = "only this program finds it"
                elif (theirs[name].get_dtype(), tuple(theirs[name].get_shape())) != ours:
                    wrong[name] = f"is {theirs[name].get_dtype()} {theirs[name].get_shape()} there"
                elif entry.dtype.bits or entry.dtype.name.startswith("float8"):
                    unread.append(name)
                elif not _has_equal_bytes(opened, file.path, name, entry):
                    wrong[name] = "has other bytes there"
    except Exception as error:  # of the library, whose class is its own
        raise SourceError(f"{file.path}: the safetensors library: {error}", code="library-disagrees") from None
    return wrong, unread


def _has_equal_bytes(opened: Any, path: str, name: str, entry: Entry) -> bool:
    """Return whether a tensor that the library gives has the bytes of an entry; compare some rows at a time."""
    if not entry.nbytes:
        return True
    ((begin, nbytes),) = entry.runs
    rows = entry.shape[0] if entry.shape else 1
    row_bytes = nbytes // rows
    step = max(_READ_BYTES // row_bytes, 1)
    for row in range(0, rows, step):
        part = opened.get_slice(name)[row : min(row + step, rows)] if entry.shape else opened.get_tensor(name)
        ours = bytearray(part.nbytes)
        any_store().read_into(path, begin + row * row_bytes, memoryview(ours))
        if ours != part.tobytes():
            return False
    return True
