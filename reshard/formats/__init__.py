"""Checkpoint file formats, one module each, and the one list of them.

A format is two functions over bytes at offsets, so that a file is neither read to be indexed nor built in memory to
be written:

* `index(reader)` says what a file holds, from its header alone;
* `lay_out(tensors, metadata)` tells, for tensors to be written, the bytes that are not tensor contents and where
  the contents go.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from shlex import quote
from typing import TYPE_CHECKING

from reshard.errors import SourceError, UsageError
from reshard.formats.entries import RangeReader
from reshard.storage.cipher import DecryptingStore
from reshard.storage.places import can

if TYPE_CHECKING:
    from reshard.formats.entries import FileIndex, Format
    from reshard.storage.base import Readable


_REMOTE_HEADER = 1 << 20
_REMOTE_WINDOW = 16 << 10  # a .ckpt file has no index: each large tensor is a request, whose answer should be short


def formats() -> tuple[Format, ...]:
    """Return every format, the more easily recognized first."""
    from reshard.formats import ckpt, safetensors

    return (safetensors, ckpt)


def check_name(path: str, written: str) -> None:
    """Check that a target is not called as one of another format is.

    Raises:
        UsageError: it is: a store `x.zarr` of safetensors files, a file `x.ckpt` of safetensors.
    """
    named = PurePath(path).suffix.removeprefix(".")
    if named in {"zarr", *(known.NAME for known in formats())} - {written}:
        raise UsageError(
            f"{path} is the name of a {named} {'store' if named == 'zarr' else 'file'}, and the format is {written}",
            code="wrong-extension",
            hint=f"choose another name, or the format {named}",
        )


def by_name(name: str) -> Format:
    """Return a format by its name.

    Raises:
        UsageError: there is no such format.
    """
    for known in formats():
        if name == known.NAME:
            return known
    known_names = ", ".join(known.NAME for known in formats())
    raise UsageError(f"unknown format {name!r}", code="unknown-format", facts=[f"known formats: {known_names}"])


def is_known(path: str) -> bool:
    """Return whether a file begins as one of a known format does, whatever its name."""
    reader = RangeReader(path, window=0)
    start = reader.upto(0, 64)
    return any(known.recognizes(start, reader.size) for known in formats())


def index_file(path: str, *, store: Readable | None = None) -> FileIndex:
    """Return what a checkpoint file holds; its content decides the format, not its name.

    Args:
        path: the file.
        store: what reads it; by default this process's.

    Raises:
        SourceError: the file is of no known format, truncated or corrupt, or was decrypted with the wrong key.
    """
    try:
        return _index(path, store)
    except SourceError as error:
        cipher = store.cipher_of(path) if isinstance(store, DecryptingStore) else None
        if cipher is None or cipher.has_tag or "wrong-key" in error.codes:
            raise
        # A wrong key passes the padding of a CBC block once in 256 times; what comes out is then no checkpoint.
        error.facts += (f"or the key is wrong, which {cipher.mode} cannot tell",)
        raise


def _index(path: str, store: Readable | None) -> FileIndex:
    reader = RangeReader(path, store=store, window=_REMOTE_WINDOW if can(path).waits else 4096)
    # A first request that has most headers whole: to ask a second time takes longer than a megabyte does.
    start = reader.upto(0, _REMOTE_HEADER if can(path).waits else 64)[:64]
    for known in formats():
        if known.recognizes(start, reader.size):
            return known.index(reader)
    if not reader.size:
        raise SourceError(
            f"{path} is empty", code="empty-file", facts=["expected a checkpoint; was saving it interrupted?"]
        )
    # Of protobuf's first field MindSpore's .ckpt files have a message, and its strategy files the number of a stage.
    if re.match(rb"(\x08.)?\x12", start, re.DOTALL):
        raise SourceError(
            f"{path} is not a checkpoint, but may be a strategy file",
            code="strategy-file",
            hint=f"reshard strategy show {quote(path)}",
        )
    raise SourceError(
        f"{path} is not a checkpoint of a known format",
        code="not-a-checkpoint",
        facts=[f"expected safetensors or MindSpore .ckpt; it begins with {start[:8].hex(' ')}"],
    )
