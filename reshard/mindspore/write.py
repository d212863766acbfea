"""Writing one checkpoint file from beginning to end, its contents from arrays or from another file.

`reshard.run` writes many files in any order; here one file is written front to back, because a CRC or a cipher needs
its bytes in that order.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Protocol

from reshard.storage.local import local_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from reshard.formats.entries import Entry, FileLayout
    from reshard.mindspore.parameter import Tensor
    from reshard.storage.base import Readable
    from reshard.storage.cipher import Cipher

PIECE_BYTES = 4 << 20
"""How much of a file is held at once."""

_MOST_ZEROS = 1 << 32


class Contents(Protocol):
    """Where the contents of tensors come from."""

    def read(self, name: str, begin: int, nbytes: int) -> Iterable[memoryview]:
        """Yield a range of a tensor's contents in pieces; a piece is good until the next one is asked for."""


class TensorContents:
    """Contents in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def read(self, name: str, begin: int, nbytes: int) -> Iterable[memoryview]:
        """Yield a range of a tensor's contents, at once."""
        raw = self.tensors[name].array.reshape(-1).view("u1")
        return [raw[begin : begin + nbytes].data]


class FileContents:
    """Contents in a checkpoint file, a few MB of which are held at once."""

    def __init__(self, path: str, entries: Mapping[str, Entry], store: Readable) -> None:
        self.path, self.entries, self.store = path, entries, store
        self._buffer = memoryview(bytearray(PIECE_BYTES))

    def read(self, name: str, begin: int, nbytes: int) -> Iterator[memoryview]:
        """Yield a range of a tensor's contents from the runs of the file that hold them."""
        position = 0
        for offset, length in self.entries[name].runs:
            low, high = max(begin - position, 0), min(begin + nbytes - position, length)
            for start in range(low, high, PIECE_BYTES):
                view = self._buffer[: min(PIECE_BYTES, high - start)]
                self.store.read_into(self.path, offset + start, view)
                yield view
            position += length


def write_file(
    path: str, layout: FileLayout, contents: Contents, *, crc: bool = False, cipher: Cipher | None = None
) -> None:
    """Write a file beside its place, have it on the disk, then give it its name; a failure leaves nothing.

    Args:
        path: the file, which is replaced if it is there.
        layout: where everything goes.
        contents: the tensors.
        crc: end the file with the CRC-32 of all before it, as `.ckpt` files may (inside the encryption).
        cipher: encrypt the file.

    Raises:
        BudgetError: the disk is full.
        TargetError: the file cannot be written.
    """
    pieces: Iterable[bytes | memoryview] = in_order(layout, contents)
    nbytes = layout.size
    if crc:
        pieces = _with_trailer(pieces)
        nbytes += 17
    if cipher is not None:
        pieces = cipher.encrypt(pieces)
        nbytes = cipher.encrypted_size(nbytes)
    store = local_store()
    unfinished = store.unfinished(path)
    sink = store.create(unfinished, nbytes)
    try:
        position = 0
        for piece in pieces:
            sink.write_at(position, piece)
            position += len(piece)
        sink.finish(durable=True)
        store.publish(unfinished, path, durable=True)
    except BaseException:
        store.discard(unfinished)
        raise


def in_order(layout: FileLayout, contents: Contents) -> Iterator[bytes | memoryview]:
    """Yield all bytes of a file to be written, from the first to the last."""
    parts: list[tuple[int, bytes | tuple[str, int, int]]] = list(layout.literals)
    for content in layout.contents:
        begin = 0
        for offset, nbytes in content.runs:
            parts.append((offset, (content.name, begin, nbytes)))
            begin += nbytes
    parts.sort(key=lambda part: part[0])
    for _, part in parts:
        if isinstance(part, bytes):
            yield part
        elif part[2]:
            yield from contents.read(*part)


def _with_trailer(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
        yield piece
    yield b"crc_num" + crc.to_bytes(10, "big")


def named_crc(entries: Mapping[str, Entry], contents: Contents, *, as_mindspore: bool = True) -> int:
    """Return the CRC-32 over names and contents in name order, which safetensors files carry in their metadata.

    MindSpore has Python make bytes of every array. Of an integer array without dimensions that makes as many zeros as
    the number says (`bytes(np.array(5))` is five zeros), so that is what its CRC covers; and as it compares the same
    wrong thing when it loads, so must a file that it shall load.

    Args:
        entries: the tensors, by name.
        contents: their contents.
        as_mindspore: take integers without dimensions as MindSpore does; else by their bytes, like all others.
    """
    crc = 0
    for name in sorted(entries):
        entry = entries[name]
        crc = zlib.crc32(name.encode(), crc)
        raw = contents.read(name, 0, entry.nbytes)
        if as_mindspore and not entry.shape and entry.dtype.name.startswith(("int", "uint")):
            content = b"".join(raw)
            zeros = int.from_bytes(content, "little", signed=entry.dtype.name.startswith("int"))
            if 0 <= zeros <= _MOST_ZEROS:  # of others MindSpore cannot make bytes
                raw = (memoryview(bytes(min(PIECE_BYTES, zeros - n))) for n in range(0, zeros, PIECE_BYTES))
            else:
                raw = [memoryview(content)]
        for piece in raw:
            crc = zlib.crc32(piece, crc)
    return crc
