"""Encrypt `.ckpt` files: MindSpore's format of independently encrypted blocks.

A block is, in little-endian 32-bit numbers and bytes:

    magic of the mode · [AES-GCM: 16-byte tag] · length of the rest · 16 · IV of 16 bytes ·
    length of the ciphertext · ciphertext (in the CBC modes padded by PKCS#7; AES-GCM takes 12 bytes of the IV)

Files are encrypted while they are written. The head of a block, with the tag of AES-GCM, is known only at the end of
the block. If a file can be written in any order, no block is buffered; if it is written in order, as at a URL, one
block of up to 4 MiB is.

Source: MindSpore 2.10, `utils/crypto.cc`; the layout was checked against its files and its `_decrypt`.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from reshard.core.storage.decryption import MAGICS, UNIT, DecryptingStore, library
from reshard.core.storage.places import any_store
from reshard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from reshard.core.storage.base import Coding, ReadStore, Sink

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
_GCM_IV_BYTES = 12  # MindSpore stores 16 and passes all to OpenSSL, which by default takes the first 12
_IMPORTED_BYTES, _THREAD_BYTES = 20 << 20, 9 << 20  # measured with up to 24 threads, in each mode


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
        return 4 + self.has_tag * UNIT + 4 + 4 + UNIT + 4

    def encrypted_size(self, nbytes: int) -> int:
        """Return the encrypted size of `nbytes` bytes: all blocks with their heads.

        >>> Cipher("AES-GCM", bytes(16)).encrypted_size(17), Cipher("AES-CBC", bytes(16)).encrypted_size(16)
        (65, 64)
        """
        full, rest = divmod(nbytes, BLOCK_BYTES)
        return full * self._block_size(BLOCK_BYTES) + (self._block_size(rest) if rest else 0)

    def _block_size(self, nbytes: int) -> int:
        return self.head_bytes + (nbytes if self.has_tag else nbytes // UNIT * UNIT + UNIT)

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
        modes = library().modes
        return self._in_mode(modes.GCM(iv[:_GCM_IV_BYTES]) if self.has_tag else modes.CBC(iv)).encryptor()

    def authenticator(self, iv: bytes, tag: bytes) -> Any:
        """Return the library's decryptor for one AES-GCM block, which checks the tag at the end."""
        return self._in_mode(library().modes.GCM(iv[:_GCM_IV_BYTES], tag)).decryptor()

    def decryptor(self, iv: bytes, unit: int, previous: bytes) -> Any:
        """Return the library's decryptor for one block from a 16-byte unit on, without the tag.

        Args:
            iv: the block's IV.
            unit: the number of the first unit.
            previous: the ciphertext of the previous unit, for the CBC modes; the IV for the first unit.
        """
        modes = library().modes
        if not self.has_tag:
            return self._in_mode(modes.CBC(previous)).decryptor()
        # The counter that follows the 12 bytes is 1 for the tag, and from 2 on for the contents (NIST SP 800-38D).
        return self._in_mode(modes.CTR(iv[:_GCM_IV_BYTES] + (unit + 2).to_bytes(4, "big"))).decryptor()

    def _in_mode(self, mode: Any) -> Any:
        names = library()
        algorithm = names.algorithms.SM4 if self.mode == "SM4-CBC" else names.algorithms.AES
        return names.Cipher(algorithm(self.key), mode)


class _BlockEncryptor:
    """A block being encrypted: `add` and `end` return ciphertext; `head` is valid after `end`."""

    def __init__(self, cipher: Cipher) -> None:
        self.cipher = cipher
        self.iv = os.urandom(UNIT)
        self.encryptor = cipher.encryptor(self.iv)
        self.nbytes = self.cipher_bytes = 0

    def add(self, plain: memoryview) -> bytes:
        self.nbytes += len(plain)
        return self._counted(self.encryptor.update(plain))

    def end(self) -> bytes:
        missing = 0 if self.cipher.has_tag else UNIT - self.nbytes % UNIT
        return self._counted(self.encryptor.update(bytes([missing]) * missing) + self.encryptor.finalize())

    def head(self) -> bytes:
        tag = self.encryptor.tag if self.cipher.has_tag else b""
        head = struct.pack("<I", _MAGIC_OF[self.cipher.mode or MODE]) + tag
        return (
            head
            + struct.pack("<ii", 4 + UNIT + 4 + self.cipher_bytes, UNIT)
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


@lru_cache(maxsize=8)
def _coded(coding: Coding) -> ReadStore:
    return coding.store()


def store_of(coding: Coding | None) -> ReadStore:
    """Return this process's store for files with a coding, or for plain files."""
    return any_store() if coding is None else _coded(coding)


def required(cipher: Cipher | None) -> Cipher | None:
    """Return the cipher if it is required, else None."""
    return cipher if cipher is not None and cipher.required else None
