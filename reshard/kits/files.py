"""Checkpoint file formats, one module each, and the list of them.

A format is two functions over bytes at offsets, so that indexing does not read the whole file, and writing does not
build it in memory:

* `index(reader)` returns the index of a file, from its header alone;
* `lay_out(tensors, metadata)` returns, for tensors to be written, the bytes that are not tensor contents and the
  offsets of the contents.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from shlex import quote
from typing import TYPE_CHECKING

from reshard.core.model.entries import RangeReader
from reshard.core.storage.decryption import DecryptingStore
from reshard.core.storage.places import can
from reshard.errors import Faults, SourceError, UsageError

if TYPE_CHECKING:
    from reshard.core.model.entries import FileIndex, Format
    from reshard.core.storage.base import RangeStore
    from reshard.core.storage.places import Place


REMOTE_HEAD = 1 << 20
"""The first bytes to read at a URL: most headers, since a second request takes longer than a megabyte does."""

_LEGACY_SAVE = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9"
_REMOTE_WINDOW = 16 << 10  # a .ckpt file has no index: each large tensor takes a request, which should be short


def encodings() -> tuple[Format, ...]:
    """Return all formats, the most easily recognized first."""
    from reshard.kits import ckpt, safetensors

    return (safetensors, ckpt)


def check_name(path: str, written: str) -> None:
    """Check that a target's extension does not belong to another format.

    Raises:
        UsageError: it does, such as a store `x.zarr` of safetensors files, or a safetensors file `x.ckpt`.
    """
    named = PurePath(path).suffix.removeprefix(".")
    if named in {"zarr", *(format_.NAME for format_ in encodings())} - {written}:
        raise UsageError(
            f"{path} is the name of a {named} {'store' if named == 'zarr' else 'file'}, and the format is {written}",
            code="wrong-extension",
            hint=f"choose another name, or the format {named}",
        )


def check_file_name(path: Place, written: str) -> None:
    """Check that the name of a target that is one file has the extension of its format.

    MindSpore loads no file without it, and other programs choose the format by it.

    Raises:
        UsageError: it has another extension, or none.
    """
    check_name(str(path), written)
    if path.suffix != f".{written}":
        raise UsageError(
            f"{path} is one file and does not end with .{written}, which programs that load it expect",
            code="wrong-extension", hint=f"name it {path}.{written}",
        )  # fmt: skip


def by_name(name: str) -> Format:
    """Return the format with this name.

    Raises:
        UsageError: there is no such format.
    """
    for format_ in encodings():
        if name == format_.NAME:
            return format_
    known_names = ", ".join(format_.NAME for format_ in encodings())
    raise UsageError(f"unknown format {name!r}", code="unknown-format", facts=[f"known formats: {known_names}"])


def is_known(path: str) -> bool:
    """Return whether a file has a known format, by its first bytes rather than its name."""
    reader = RangeReader(path, window=0)
    start = reader.upto(0, 64)
    return any(format_.recognizes(start, reader.size) for format_ in encodings())


def is_save(path: str) -> bool:
    """Return whether `torch.save` wrote a file: a zip archive, or a chain of pickles that begins with its number."""
    return _starts_as_save(RangeReader(path, window=0).upto(0, len(_LEGACY_SAVE)))


def _starts_as_save(start: bytes) -> bool:
    return start.startswith((b"PK\x03\x04", _LEGACY_SAVE))


def index_file(path: str, *, store: RangeStore | None = None, head: bytes = b"") -> FileIndex:
    """Return the index of a checkpoint file; its format is detected by content, not by name.

    Args:
        path: the file.
        store: the store to read from; by default this process's store.
        head: the first bytes of the file, if they have been read.

    Raises:
        SourceError: the file is of no known format, truncated or corrupt, or was decrypted with the wrong key; or it
            has tensors, and none can be read.
    """
    index = header_of(path, store=store, head=head)
    refuse_unreadable(path, index)
    return index


def refuse_unreadable(path: str, index: FileIndex) -> None:
    """Raise `SourceError` if a file has tensors, and none can be read."""
    faults = Faults(path)
    for name, reason in () if index.entries else index.unreadable:
        faults.add(f"tensor {name!r:.300}", reason, code="unreadable-tensor")
    faults.raise_if_any(SourceError)


def header_of(path: str, *, store: RangeStore | None = None, head: bytes = b"") -> FileIndex:
    """Return the index of a file as `index_file` does, though no tensor may be readable."""
    try:
        return _index(path, store, head)
    except SourceError as error:
        cipher = store.cipher_of(path) if isinstance(store, DecryptingStore) else None
        if cipher is None or cipher.has_tag or "wrong-key" in error.codes:
            raise
        # A wrong key passes the padding of a CBC block once in 256 times; the result is then no valid checkpoint.
        error.facts += (f"or the key is wrong, which {cipher.mode} cannot tell",)
        raise


def _index(path: str, store: RangeStore | None, head: bytes) -> FileIndex:
    reader = RangeReader(path, store=store, window=_REMOTE_WINDOW if can(path).has_latency else 4096, head=head)
    start = reader.upto(0, len(head) or (REMOTE_HEAD if can(path).has_latency else 64))[:64]
    for format_ in encodings():
        if format_.recognizes(start, reader.size):
            return format_.index(reader)
    if not reader.size:
        raise SourceError(
            f"{path} is empty", code="empty-file", facts=["expected a checkpoint; was saving it interrupted?"]
        )
    # The first protobuf field is a message in MindSpore's .ckpt files, and a stage number in its strategy files.
    if re.match(rb"(\x08.)?\x12", start, re.DOTALL):
        raise SourceError(
            f"{path} is not a checkpoint, but may be a strategy file",
            code="strategy-file",
            hint=f"reshard strategy show {quote(path)}",
        )
    if _starts_as_save(start):
        raise SourceError(
            f"{path} is of torch.save, whose files of ranks are not read like MindSpore's", code="unsupported-format"
        )
    raise SourceError(
        f"{path} is not a checkpoint of a known format",
        code="not-a-checkpoint",
        facts=[f"expected safetensors or MindSpore .ckpt; it begins with {start[:8].hex(' ')}"],
    )
