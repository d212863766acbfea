"""Encrypted `.ckpt` files: MindSpore's format of independently encrypted blocks.

A block is, in little-endian 32-bit numbers and bytes:

    magic of the mode · [AES-GCM: 16-byte tag] · length of the rest · 16 · IV of 16 bytes ·
    length of the ciphertext · ciphertext (in the CBC modes padded by PKCS#7; AES-GCM takes 12 bytes of the IV)

Any range of the plaintext can be decrypted by itself, so an encrypted file is read like a plain one, a few MB at a
time, and never decrypted to a disk: CBC needs only the 16 bytes of ciphertext before the range, and AES-GCM is counter
mode with a tag. The tag covers a whole block and is checked, in one pass, before the first byte of the block is
returned. CBC has no tag: a wrong key passes the padding of a file's last block once in 256 times, and is detected when
the index of the decrypted file is read to its end, which happens before anything is written.

Files are encrypted while they are written. The head of a block, with the tag of AES-GCM, is known only at the end of
the block. If a file can be written in any order, no block is buffered; if it is written in order, as at a URL, one
block of up to 4 MiB is.

Source: MindSpore 2.10, `utils/crypto.cc`; the layout was checked against its files and its `_decrypt`.
"""

from __future__ import annotations

import os
import re
import struct
import threading
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.errors import Option, ReshardError, SourceError, Text, UsageError
from reshard.storage.base import Around
from reshard.storage.places import any_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from reshard.storage.base import Coding, ReadStore, Sink

MAGICS = {0x7F3A5ED8: "AES-GCM", 0x7F3A5ED9: "AES-CBC", 0x7F3A5EDA: "SM4-CBC"}
"""The modes by the first four bytes of a block."""

MODE = "AES-GCM"
"""The default mode for writing: MindSpore's default, and the only one that detects changes."""

BLOCK_BYTES = 4 << 20
"""The maximum plaintext of a written block; MindSpore writes 64 MiB and reads any size. Smaller blocks make range reads
cheaper, because the tag covers a whole block."""

MODES = tuple(MAGICS.values())

_KEY_BYTES = {"AES-GCM": (16, 24, 32), "AES-CBC": (16, 24, 32), "SM4-CBC": (16,)}
_DIGITS = re.compile(rb"(?:[0-9a-fA-F]{16}){2,4}")
_AMBIGUOUS = 32
_MAGIC_OF = {mode: magic for magic, mode in MAGICS.items()}
_UNIT = 16  # bytes in a block of AES and of SM4; also the size of an IV and of a tag
_GCM_IV_BYTES = 12  # MindSpore stores 16 and passes all to OpenSSL, which by default takes the first 12
_PIECE_BYTES = 4 << 20
_IMPORTED_BYTES, _THREAD_BYTES = 20 << 20, 9 << 20  # measured with up to 24 threads, in each mode
# If both encryption and CRC are requested, MindSpore 2.10 appends a CRC trailer of zeros, which it cannot read itself.
_TRAILER, _TRAILER_BYTES = b"crc_num", 17


def read_key(content: bytes, name: str) -> bytes:
    r"""Return the key in a file or variable: raw bytes or hexadecimal digits.

    A final newline is ignored. 32 hexadecimal digits are ambiguous (a key of 32 bytes or of 16) and are refused.

    Args:
        content: the contents of the file or variable.
        name: its name, for messages, which never show the contents.

    Raises:
        UsageError: it is not a key.

    >>> read_key(b"0123456789ABCDEF\n", "key.txt"), read_key(b"00" * 32 + b"\n", "key.txt") == bytes(32)
    (b'0123456789ABCDEF', True)
    """
    lines = [content, content.removesuffix(b"\n"), content.removesuffix(b"\r\n")]
    if digits := next(filter(_DIGITS.fullmatch, lines), None):
        if len(digits) == _AMBIGUOUS:
            raise UsageError(
                f"{name} has {_AMBIGUOUS} hexadecimal digits, which may be a key of 32 bytes or of 16",
                code="ambiguous-key",
                hint="write 16 bytes as they are (openssl rand 16), or 32 bytes as 64 digits (openssl rand -hex 32)",
            )
        return bytes.fromhex(digits.decode())
    for key in lines:
        if len(key) in _KEY_BYTES[MODE]:
            return key
    raise UsageError(
        f"{name} is not a key",
        code="bad-key",
        facts=[f"expected 16, 24 or 32 bytes, or 48 or 64 hexadecimal digits; found {len(content)} bytes"],
        hint="make a key with openssl rand 32, or openssl rand -hex 32",
    )


@dataclass(frozen=True, slots=True)
class Cipher:
    """A key and the mode in which it is used.

    Attributes:
        mode: `AES-GCM`, `AES-CBC` or `SM4-CBC`. With None, each file is read in its own mode, and files are written in
            AES-GCM, MindSpore's default.
        key: 16, 24 or 32 bytes for AES, 16 for SM4; not shown.
        required: files read with it must be encrypted. If false, as for keys from the environment, a checkpoint of
            plain files is read as it is; written files are encrypted in any case.

    Raises:
        UsageError: an unknown mode, or a key of another length.

    >>> Cipher("AES-GCM", b"0123456789ABCDEF")
    Cipher(mode='AES-GCM')
    >>> Cipher("SM4-CBC", b"0123")
    Traceback (most recent call last):
    ...
    reshard.errors.UsageError: the key has 4 bytes; SM4-CBC takes 16
    """

    mode: str | None
    key: bytes = field(repr=False)
    required: bool = field(default=True, repr=False)

    def __post_init__(self) -> None:
        mode = self.mode or MODE
        lengths = _KEY_BYTES.get(mode)
        if lengths is None:
            raise UsageError(
                f"unknown encryption mode {self.mode!r}",
                code="unknown-mode",
                facts=[f"known modes: {', '.join(_KEY_BYTES)}"],
            )
        if not isinstance(self.key, bytes):
            raise UsageError(f"the key is a {type(self.key).__name__}; expected bytes", code="bad-key")
        if len(self.key) not in lengths:
            sizes = " or ".join(map(str, lengths))
            raise UsageError(f"the key has {len(self.key)} bytes; {mode} takes {sizes}", code="bad-key")

    @property
    def has_tag(self) -> bool:
        """Return whether blocks are authenticated (AES-GCM), which detects wrong keys and changes."""
        return (self.mode or MODE) == "AES-GCM"

    @property
    def head_bytes(self) -> int:
        """Return the number of bytes of a block that are not ciphertext."""
        return 4 + self.has_tag * _UNIT + 4 + 4 + _UNIT + 4

    def encrypted_size(self, nbytes: int) -> int:
        """Return the encrypted size of `nbytes` bytes: all blocks with their heads.

        >>> Cipher("AES-GCM", bytes(16)).encrypted_size(17), Cipher("AES-CBC", bytes(16)).encrypted_size(16)
        (65, 64)
        """
        full, rest = divmod(nbytes, BLOCK_BYTES)
        return full * self._block_size(BLOCK_BYTES) + (self._block_size(rest) if rest else 0)

    def _block_size(self, nbytes: int) -> int:
        return self.head_bytes + (nbytes if self.has_tag else nbytes // _UNIT * _UNIT + _UNIT)

    def encrypt(self, pieces: Iterable[bytes | memoryview]) -> Iterator[bytes]:
        """Yield the encrypted blocks of a file, given in pieces; buffer one block at a time."""
        block = _BlockEncryptor(self)
        parts: list[bytes] = []
        for piece in pieces:
            view = memoryview(piece).cast("B")
            while len(view):
                part = view[: BLOCK_BYTES - block.nbytes]
                parts.append(block.add(part))
                view = view[len(part) :]
                if block.nbytes == BLOCK_BYTES:
                    parts.append(block.end())
                    yield b"".join((block.head(), *parts))
                    block, parts = _BlockEncryptor(self), []
        if block.nbytes:
            parts.append(block.end())
            yield b"".join((block.head(), *parts))

    def sink(self, into: Sink) -> Sink:
        """Return a sink that encrypts a file written in order; block heads are written last."""
        return _EncryptingSink(self, into)

    def store(self) -> DecryptingStore:
        """Return a store that reads the decrypted files."""
        return DecryptingStore(self)

    def nbytes(self, threads: int) -> int:
        """Return the memory of the import of cryptography, and of each thread's blocks and pieces."""
        return _IMPORTED_BYTES + threads * _THREAD_BYTES

    def encryptor(self, iv: bytes) -> Any:
        """Return the library's encryptor for one block."""
        modes = _library().modes
        return self._in_mode(modes.GCM(iv[:_GCM_IV_BYTES]) if self.has_tag else modes.CBC(iv)).encryptor()

    def authenticator(self, iv: bytes, tag: bytes) -> Any:
        """Return the library's decryptor for one AES-GCM block, which checks the tag at the end."""
        return self._in_mode(_library().modes.GCM(iv[:_GCM_IV_BYTES], tag)).decryptor()

    def decryptor(self, iv: bytes, unit: int, previous: bytes) -> Any:
        """Return the library's decryptor for one block from a 16-byte unit on, without the tag.

        Args:
            iv: the block's IV.
            unit: the number of the first unit.
            previous: the ciphertext of the previous unit, for the CBC modes; the IV for the first unit.
        """
        modes = _library().modes
        if not self.has_tag:
            return self._in_mode(modes.CBC(previous)).decryptor()
        # The counter that follows the 12 bytes is 1 for the tag, and from 2 on for the contents (NIST SP 800-38D).
        return self._in_mode(modes.CTR(iv[:_GCM_IV_BYTES] + (unit + 2).to_bytes(4, "big"))).decryptor()

    def _in_mode(self, mode: Any) -> Any:
        library = _library()
        algorithm = library.algorithms.SM4 if self.mode == "SM4-CBC" else library.algorithms.AES
        return library.Cipher(algorithm(self.key), mode)


class _BlockEncryptor:
    """A block being encrypted: `add` and `end` return ciphertext; `head` is valid after `end`."""

    def __init__(self, cipher: Cipher) -> None:
        self.cipher = cipher
        self.iv = os.urandom(_UNIT)
        self.encryptor = cipher.encryptor(self.iv)
        self.nbytes = self.cipher_bytes = 0

    def add(self, plain: memoryview) -> bytes:
        self.nbytes += len(plain)
        return self._counted(self.encryptor.update(plain))

    def end(self) -> bytes:
        missing = 0 if self.cipher.has_tag else _UNIT - self.nbytes % _UNIT
        return self._counted(self.encryptor.update(bytes([missing]) * missing) + self.encryptor.finalize())

    def head(self) -> bytes:
        tag = self.encryptor.tag if self.cipher.has_tag else b""
        head = struct.pack("<I", _MAGIC_OF[self.cipher.mode or MODE]) + tag
        return (
            head
            + struct.pack("<ii", 4 + _UNIT + 4 + self.cipher_bytes, _UNIT)
            + self.iv
            + struct.pack("<i", self.cipher_bytes)
        )

    def _counted(self, ciphertext: bytes) -> bytes:
        self.cipher_bytes += len(ciphertext)
        return ciphertext


class _EncryptingSink:
    """A sink that encrypts a file written in order."""

    ended = False

    def __init__(self, cipher: Cipher, into: Sink) -> None:
        self._cipher, self._into = cipher, into
        self._begin = 0  # offset of the block in the encrypted file
        self._block = _BlockEncryptor(cipher)

    def write_at(self, offset: int, data: memoryview | bytes) -> None:  # noqa: ARG002 -- it is written in order
        """Encrypt and write the next bytes."""
        view = memoryview(data).cast("B")
        while len(view):
            part = view[: BLOCK_BYTES - self._block.nbytes]
            view = view[len(part) :]
            self._append(self._block.add(part), self._block.cipher_bytes)
            if self._block.nbytes == BLOCK_BYTES:
                self._end_block()

    def _append(self, ciphertext: bytes, end: int) -> None:
        if ciphertext:
            self._into.write_at(self._begin + self._cipher.head_bytes + end - len(ciphertext), ciphertext)

    def _end_block(self) -> None:
        self._append(self._block.end(), self._block.cipher_bytes)
        self._into.write_at(self._begin, self._block.head())
        self._begin += self._cipher.head_bytes + self._block.cipher_bytes
        self._block = _BlockEncryptor(self._cipher)

    def finish(self, *, durable: bool) -> None:
        """Finish the file."""
        if self._block.nbytes:
            self._end_block()
        self._into.finish(durable=durable)
        self.ended = True

    def abort(self) -> None:
        """Abort the file."""
        self._into.abort()


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
        _library()  # at once: without it nothing can be read
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
        tag_bytes = _UNIT if cipher.has_tag else 0
        head = self._raw(path, position, min(cipher.head_bytes, size - position))
        try:
            block_bytes, iv_bytes, iv, cipher_bytes = struct.unpack_from(f"<ii{_UNIT}si", head, 4 + tag_bytes)
        except struct.error:
            mode = None
        else:
            valid = iv_bytes == _UNIT and cipher_bytes > 0 and block_bytes == 4 + _UNIT + 4 + cipher_bytes
            valid &= cipher.has_tag or cipher_bytes % _UNIT == 0
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
        last = offset + cipher_bytes - _UNIT
        previous = iv if cipher_bytes == _UNIT else self._raw(path, last - _UNIT, _UNIT)
        plain: bytes = cipher.decryptor(iv, 0, previous).update(self._raw(path, last, _UNIT))
        count = plain[-1]
        if not 0 < count <= _UNIT or plain[-count:] != bytes([count]) * count:
            raise _wrong_key(path)
        return count

    def _decrypt(self, path: str, block: _Sealed, begin: int, buffer: memoryview) -> None:
        """Fill a buffer from the plaintext of one block."""
        if block.cipher.has_tag:
            self._authenticate(path, block)
        stop = begin + len(buffer)
        position = begin // _UNIT * _UNIT
        while position < stop:
            end = min(position + _PIECE_BYTES, -(-stop // _UNIT) * _UNIT, block.cipher_bytes)
            first = self._raw(path, block.offset + position - _UNIT, _UNIT) if position else block.iv
            sealed = self._raw(path, block.offset + position, end - position)
            plain = block.cipher.decryptor(block.iv, position // _UNIT, first).update(sealed)
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
            except _library().InvalidTag:
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


def _library() -> Any:
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


def _wrong_key(path: str) -> SourceError:
    return SourceError(
        f"{path} cannot be decrypted with this key",
        code="wrong-key",
        facts=["the key is wrong, or the file was changed"],
    )


@lru_cache(maxsize=8)
def _coded(coding: Coding) -> ReadStore:
    return coding.store()


def store_of(coding: Coding | None) -> ReadStore:
    """Return this process's store for files with a coding, or for plain files."""
    return any_store() if coding is None else _coded(coding)


def required(cipher: Cipher | None) -> Cipher | None:
    """Return the cipher if it is required, else None."""
    return cipher if cipher is not None and cipher.required else None
