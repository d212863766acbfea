"""Read encrypted `.ckpt` files; `cipher` describes their format.

Any range of the plaintext can be decrypted by itself, so an encrypted file is read like a plain one, a few MB at a
time, and never decrypted to a disk: CBC needs only the 16 bytes of ciphertext before the range, and AES-GCM is counter
mode with a tag. The tag covers a whole block and is checked, in one pass, before the first byte of the block is
returned. CBC has no tag: a wrong key passes the padding of a file's last block once in 256 times, and is detected when
the index of the decrypted file is read to its end, which happens before anything is written.
"""

from __future__ import annotations

import struct
import threading
from bisect import bisect_right
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.storage.base import Around
from reshard.core.storage.places import any_store
from reshard.errors import Option, ReshardError, SourceError, Text, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.core.storage.cipher import Cipher

MAGICS = {0x7F3A5ED8: "AES-GCM", 0x7F3A5ED9: "AES-CBC", 0x7F3A5EDA: "SM4-CBC"}
"""The modes by the first four bytes of a block."""

UNIT = 16
"""The bytes of a block of AES and of SM4; also the size of an IV and of a tag."""

_PIECE_BYTES = 4 << 20
# If both encryption and CRC are requested, MindSpore 2.10 appends a CRC trailer of zeros, which it cannot read itself.
_TRAILER, _TRAILER_BYTES = b"crc_num", 17


class _Sealed(NamedTuple):
    """The position of an encrypted block in plaintext and ciphertext, its IV and its tag."""

    cipher: Cipher
    start: int
    nbytes: int
    offset: int
    cipher_bytes: int
    iv: bytes
    tag: bytes


class DecryptingStore(Around):
    """A store of decrypted files. Safe to use from several threads.

    Raises (when a file is first read):
        SourceError: the file is not encrypted, in another mode, truncated, or encrypted with another key.
        ReshardError: the library `cryptography` is not installed.
    """

    def __init__(self, cipher: Cipher) -> None:
        super().__init__(any_store())
        library()  # at once: without it nothing can be read
        self.cipher = cipher
        self._indexes: dict[str, tuple[_Sealed, ...]] = {}
        self._authentic: set[tuple[str, int]] = set()
        self._lock_of_blocks = threading.Lock()

    def size(self, path: str) -> int:
        """Return the current size of the decrypted file, ignoring cached state."""
        with self._lock_of_blocks:
            self._authentic = {block for block in self._authentic if block[0] != path}
            blocks = self._indexes[path] = tuple(self._index(path))
        return blocks[-1].start + blocks[-1].nbytes if blocks else 0

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from the decrypted file.

        Raises:
            SourceError: the file ends too early, was changed, or was encrypted with another key.
        """
        if path not in self._indexes:
            self.size(path)
        blocks = self._indexes[path]
        done = 0
        for block in blocks[max(0, bisect_right(blocks, offset, key=attrgetter("start")) - 1) :]:
            begin = offset + done - block.start
            count = min(block.nbytes - begin, len(buffer) - done)
            if count <= 0:
                break
            self._decrypt(path, block, begin, buffer[done : done + count])
            done += count
        if done < len(buffer):
            raise SourceError(
                f"{path} is truncated",
                code="truncated",
                facts=[f"ends at byte {offset + done} of what is decrypted; expected {len(buffer) - done} more bytes"],
            )

    def cipher_of(self, path: str) -> Cipher | None:
        """Return the cipher of a file, with its mode; None if it has no indexed block."""
        blocks = self._indexes.get(path)
        return blocks[0].cipher if blocks else None

    def _index(self, path: str) -> Iterator[_Sealed]:
        """Yield the blocks of a file, from their heads (and the padding at their ends)."""
        size = self.inner.size(path)
        position = start = 0
        while position < size:
            if size - position == _TRAILER_BYTES and self._raw(path, position, len(_TRAILER)) == _TRAILER:
                return
            block = self._head(path, position, start, size)
            yield block
            position = block.offset + block.cipher_bytes
            start += block.nbytes

    def _head(self, path: str, position: int, start: int, size: int) -> _Sealed:
        mode = MAGICS.get(int.from_bytes(self._raw(path, position, min(4, size - position)), "little"))
        if mode is None and not position:
            raise SourceError(
                f"{path} is not encrypted", code="not-encrypted", hint=Text("leave out the key: ", Option("key"))
            )
        if mode not in {None, self.cipher.mode or mode}:
            raise SourceError(
                f"{path} is encrypted in mode {mode}, not {self.cipher.mode}",
                code="wrong-mode",
                hint=Text("pass ", Option("key", mode)),
            )
        try:
            cipher = replace(self.cipher, mode=mode) if mode else self.cipher
        except UsageError as error:
            raise UsageError(
                f"{path} is encrypted in mode {mode}, and the key does not fit", code="bad-key", facts=[error.message]
            ) from None
        tag_bytes = UNIT if cipher.has_tag else 0
        head = self._raw(path, position, min(cipher.head_bytes, size - position))
        try:
            block_bytes, iv_bytes, iv, cipher_bytes = struct.unpack_from(f"<ii{UNIT}si", head, 4 + tag_bytes)
        except struct.error:
            mode = None
        else:
            valid = iv_bytes == UNIT and cipher_bytes > 0 and block_bytes == 4 + UNIT + 4 + cipher_bytes
            valid &= cipher.has_tag or cipher_bytes % UNIT == 0
            offset = position + len(head)
        if mode is None or not valid or offset + cipher_bytes > size:
            raise SourceError(
                f"{path} is truncated or corrupt",
                code="corrupt",
                facts=[f"no encrypted block begins at byte {position}"],
            )
        padding = 0 if cipher.has_tag else self._padding(path, cipher, offset, cipher_bytes, iv)
        return _Sealed(cipher, start, cipher_bytes - padding, offset, cipher_bytes, iv, head[4 : 4 + tag_bytes])

    def _padding(self, path: str, cipher: Cipher, offset: int, cipher_bytes: int, iv: bytes) -> int:
        """Return the number of padding bytes at the end of a CBC block."""
        last = offset + cipher_bytes - UNIT
        previous = iv if cipher_bytes == UNIT else self._raw(path, last - UNIT, UNIT)
        plain: bytes = cipher.decryptor(iv, 0, previous).update(self._raw(path, last, UNIT))
        count = plain[-1]
        if not 0 < count <= UNIT or plain[-count:] != bytes([count]) * count:
            raise _wrong_key(path)
        return count

    def _decrypt(self, path: str, block: _Sealed, begin: int, buffer: memoryview) -> None:
        """Fill a buffer from the plaintext of one block."""
        if block.cipher.has_tag:
            self._authenticate(path, block)
        stop = begin + len(buffer)
        position = begin // UNIT * UNIT
        while position < stop:
            end = min(position + _PIECE_BYTES, -(-stop // UNIT) * UNIT, block.cipher_bytes)
            first = self._raw(path, block.offset + position - UNIT, UNIT) if position else block.iv
            sealed = self._raw(path, block.offset + position, end - position)
            plain = block.cipher.decryptor(block.iv, position // UNIT, first).update(sealed)
            low, high = max(begin, position), min(stop, end)
            buffer[low - begin : high - begin] = plain[low - position : high - position]
            position = end

    def _authenticate(self, path: str, block: _Sealed) -> None:
        """Check the tag of a block, once, before its plaintext is used."""
        with self._lock_of_blocks:
            if (path, block.start) in self._authentic:
                return
            check = block.cipher.authenticator(block.iv, block.tag)
            for position in range(0, block.cipher_bytes, _PIECE_BYTES):
                nbytes = min(_PIECE_BYTES, block.cipher_bytes - position)
                check.update(self._raw(path, block.offset + position, nbytes))
            try:
                check.finalize()
            except library().InvalidTag:
                raise _wrong_key(path) from None
            self._authentic.add((path, block.start))

    def _raw(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return bytes of the encrypted file."""
        buffer = bytearray(nbytes)
        self.inner.read_into(path, offset, memoryview(buffer))
        return bytes(buffer)

    def __reduce__(self) -> tuple[type[DecryptingStore], tuple[Cipher]]:
        """Travel to another process as a fresh store with the key."""
        return DecryptingStore, (self.cipher,)


def _wrong_key(path: str) -> SourceError:
    return SourceError(
        f"{path} cannot be decrypted with this key",
        code="wrong-key",
        facts=["the key is wrong, or the file was changed"],
    )


def library() -> Any:
    """Import the needed names of the library `cryptography`, an extra; takes 50 ms."""
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError as error:
        raise ReshardError(
            "encrypted checkpoints need the library cryptography",
            code="library-missing",
            hint="pip install 'reshard[crypto]'",
        ) from error
    return SimpleNamespace(InvalidTag=InvalidTag, Cipher=Cipher, algorithms=algorithms, modes=modes)
