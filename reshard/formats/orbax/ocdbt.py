"""Read databases of OCDBT, TensorStore's key-value format: a manifest, a B+tree, and values in data files.

`manifest.ocdbt` has the location of the root of the newest version's tree. A leaf has keys and their values: short ones
within the leaf, others by data file, offset and length. The path of a data file begins with a base path, which is also
before the paths of all files that the node in it names.

Nothing is trusted: nodes have checksums; the height decreases by one at each step, and no node is read twice, so that a
tree ends; keys ascend; sizes are limited, decoded ones too; and only files that the directory has are read.

Source: TensorStore 0.1.86 `kvstore/ocdbt/index.rst`, and databases that it wrote (`tests/data/orbax`).
"""

from __future__ import annotations

import struct
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.storage.base import COPY_AGAIN, truncated
from reshard.core.storage.crc import crc32c
from reshard.core.storage.places import any_store
from reshard.errors import SourceError
from reshard.formats.orbax.steps import MANIFEST
from reshard.formats.zarr.files import StoredValue
from reshard.kits.chunks import zstd_content

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.formats.zarr.files import StoreFiles

_MANIFEST_MAGIC, _NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
_HEADER = struct.Struct(">I8sBB")  # magic number, length, version and compression
_LARGEST_MANIFEST = 4 << 20
_LARGEST_TREE = 512 << 20  # bytes of all nodes, decoded; Orbax limits one to 100 MB
_MOST_KEYS = 1 << 22  # of all nodes
_MOST_EXPANDED = 1 << 15  # bytes that zstd may decode one to: a block of 128 KiB has at least 4
_MOST_BITS = 64
_LONGEST_STRING = 1 << 16
_MOST_ITEMS = 1 << 22
_MOST_STRING_BYTES = 256 << 20  # of a list whose strings share prefixes, which takes few bytes in a file


class _Location(NamedTuple):
    """A range of a file, by the base path and the rest of the path."""

    base: bytes
    rest: bytes
    offset: int
    nbytes: int

    @property
    def path(self) -> str:
        """Return the path of the file below the directory of the database."""
        return (self.base + self.rest).decode(errors="replace")


class _NodeFields:
    """Reads the fields of a decoded node in order.

    Every method raises `ValueError` if the node is damaged.
    """

    def __init__(self, content: bytes) -> None:
        self.content, self.position = content, 0

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        end = self.position + count
        if end > len(self.content):
            raise ValueError(f"it ends at byte {len(self.content)}; expected {count} bytes from {self.position} on")
        part = self.content[self.position : end]
        self.position = end
        return part

    def varint(self) -> int:
        """Return a number in 7 bits a byte, the lowest first."""
        value = 0
        for shift in range(0, _MOST_BITS, 7):
            byte = self.take(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError(f"it has a number of more than {_MOST_BITS} bits")

    def count(self) -> int:
        """Return a number of items, each of which takes at least a byte."""
        count = self.varint()
        if count > _MOST_ITEMS:
            raise ValueError(f"it has {count} items; at most {_MOST_ITEMS} are supported")
        if count > len(self.content) - self.position:
            raise ValueError(f"it has {count} items in {len(self.content) - self.position} bytes")
        return count

    def varints(self, count: int) -> list[int]:
        """Return several numbers."""
        return [self.varint() for _ in range(count)]

    def strings(self, shared: Sequence[int], lengths: Sequence[int]) -> Iterator[bytes]:
        """Yield strings: of each, how many bytes it shares with the one before, and how many follow."""
        if sum(shared) + sum(lengths) > _MOST_STRING_BYTES:
            raise ValueError(f"it has strings of more than {_MOST_STRING_BYTES} bytes")
        before = b""
        for prefix, length in zip(shared, lengths, strict=True):
            if prefix > len(before) or prefix + length > _LONGEST_STRING:
                raise ValueError(f"it has a string of {prefix} + {length} bytes after one of {len(before)}")
            before = before[:prefix] + self.take(length)
            yield before

    def files(self) -> list[tuple[bytes, bytes]]:
        """Return a table of data files: the base path and the rest of the path of each."""
        count = self.count()
        shared = [0, *self.varints(count - 1)] if count else []
        lengths, bases = self.varints(count), self.varints(count)
        return [(path[:base], path[base:]) for path, base in zip(self.strings(shared, lengths), bases, strict=True)]


class Database:
    """The newest version of a database.

    Args:
        files: the files of the item.
        below: the directory of the database in it, with a slash at the end, or "".

    Attributes:
        values: the values, by key.

    Raises:
        SourceError: a file is missing or truncated; the database is damaged, too large, or of an unknown version.
    """

    def __init__(self, files: StoreFiles, below: str = "") -> None:
        self._directory, self._statuses = f"{files.base}/{below}", files.statuses
        self._manifest = f"{self._directory}{MANIFEST}"
        self.values: dict[str, StoredValue] = {}
        self._ends: dict[bytes, tuple[str, int]] = {}  # the path and the size of each file
        self._nodes: set[_Location] = set()
        self._left = _LARGEST_TREE
        self._keys = 0
        root, height = self._root()
        waiting = [(root, height, b"")] if root.nbytes else []
        while waiting:
            node, height, prefix = waiting.pop()
            with _told(f"the node at byte {node.offset} of {self._directory}{node.path}"):
                waiting += reversed(self._read(node, height, prefix))

    def _root(self) -> tuple[_Location, int]:
        """Return the root of the newest version, and its height."""
        status = self._statuses.get(self._manifest)
        manifest = _Location(b"", MANIFEST.encode(), 0, status.nbytes if status else 0)
        with _told(self._manifest):
            fields = self._fields(manifest, _MANIFEST_MAGIC, _LARGEST_MANIFEST)
            fields.take(16)  # a UUID
            if fields.varint():
                fault = f"{self._manifest} is followed by numbered manifests"
                raise SourceError(fault, code="unsupported-version")
            fields.varints(2)
            fields.take(1)
            fields.take(4 if fields.varint() else 0)  # the compression of new nodes
            table = fields.files()
            count = fields.count()
            generations = fields.varints(count)
            heights = fields.take(count)
            files, offsets, sizes = (fields.varints(count) for _ in range(3))
            if not count or any(a >= b for a, b in pairwise(generations)):
                raise ValueError("it has no version, or they do not ascend")
            return _location(table, b"", files[-1], offsets[-1], sizes[-1]), heights[-1]

    def _read(self, node: _Location, height: int, prefix: bytes) -> list[tuple[_Location, int, bytes]]:
        """Read a node: note the values of a leaf, or return the nodes below, each with its height and prefix."""
        if node in self._nodes:
            raise ValueError("it is in the tree twice")
        self._nodes.add(node)
        fields = self._fields(node, _NODE_MAGIC, self._left)
        self._left -= len(fields.content)
        if fields.take(1)[0] != height:
            raise ValueError(f"its height is not {height}")
        table = fields.files()
        count = fields.count()
        self._keys += count
        if self._keys > _MOST_KEYS:
            raise ValueError(f"there are more than {_MOST_KEYS} keys")
        shared = [0, *fields.varints(count - 1)] if count else []
        lengths = fields.varints(count)
        self._left -= count * len(prefix) + sum(shared) + sum(lengths)
        if self._left < 0:
            raise ValueError(f"the nodes have more than {_LARGEST_TREE} bytes")
        common = fields.varints(count) if height else []
        keys = [prefix + key for key in fields.strings(shared, lengths)]
        if any(a >= b for a, b in pairwise(keys)):
            raise ValueError("its keys do not ascend")
        if height:
            columns = (fields.varints(count) for _ in range(3))
            nodes = [_location(table, node.base, *column) for column in zip(*columns, strict=True)]
            return [
                (below, height - 1, key[: len(prefix) + length])
                for below, key, length in zip(nodes, keys, common, strict=True)
            ]
        self._add(node, table, keys, fields)
        return []

    def _add(self, node: _Location, table: list[tuple[bytes, bytes]], keys: list[bytes], fields: _NodeFields) -> None:
        """Add the values of a leaf."""
        sizes, kinds = fields.varints(len(keys)), fields.take(len(keys))
        if set(kinds) - {0, 1}:
            raise ValueError("it has a value of an unknown kind")
        files, offsets = (iter(fields.varints(sum(kinds))) for _ in range(2))
        for key, nbytes, is_far in zip(keys, sizes, kinds, strict=True):
            name = key.decode()
            if name in self.values:
                raise ValueError(f"it has the key {name!r:.300} of another node")
            if is_far:
                far = _location(table, node.base, next(files), next(offsets), nbytes)
                self.values[name] = StoredValue(self._checked(far), far.offset, nbytes)
            else:
                self.values[name] = StoredValue(self._manifest, 0, nbytes, fields.take(nbytes))

    def _fields(self, location: _Location, magic: int, most: int) -> _NodeFields:
        """Read a node or the manifest, check it, and decode it."""
        path = self._checked(location)
        if not _HEADER.size + 4 <= location.nbytes <= most:
            raise ValueError(f"it has {location.nbytes} bytes; expected {_HEADER.size + 4} to {most}")
        content = bytearray(location.nbytes)
        any_store().read_into(path, location.offset, memoryview(content))
        kind, length, version, compression = _HEADER.unpack_from(content)
        if kind != magic or int.from_bytes(length, "little") != len(content):
            raise ValueError("it does not begin with its magic number and length")
        if version or compression > 1:
            raise ValueError(f"it is of version {version} with compression {compression}; expected 0, and 0 or 1")
        end = len(content) - 4
        if int.from_bytes(content[end:], "little") != crc32c(memoryview(content)[:end]):
            raise ValueError("it does not match its checksum")
        body = bytes(memoryview(content)[_HEADER.size : end])
        if compression:
            body = bytes(zstd_content(body, min(most, len(body) * _MOST_EXPANDED)))
        return _NodeFields(body)

    def _checked(self, location: _Location) -> str:
        """Return the full path of a file after checking that it exists and has the range."""
        name = location.base + location.rest
        if name not in self._ends:
            below = location.path
            if below.startswith("/") or ".." in below.split("/"):
                fault = f"{self._manifest} names {below!r:.300}, which leads out of the directory"
                raise SourceError(fault, code="outside-directory")
            path = f"{self._directory}{below}"
            status = self._statuses.get(path)
            if status is None:
                fault = f"{path} is missing; the database of {self._manifest} names it"
                raise SourceError(fault, code="missing-file", hint=COPY_AGAIN)
            self._ends[name] = path, status.nbytes
        path, nbytes = self._ends[name]
        if location.offset + location.nbytes > nbytes:
            raise truncated(path, nbytes, location.offset + location.nbytes)
        return path


def _location(table: list[tuple[bytes, bytes]], base: bytes, number: int, offset: int, nbytes: int) -> _Location:
    """Return a location, by the number of the file in the table of a node, and the base path of the node."""
    if number >= len(table):
        raise ValueError(f"it names file {number} of {len(table)}")
    own_base, rest = table[number]
    return _Location(base + own_base, rest, offset, nbytes)


@contextmanager
def _told(where: str) -> Iterator[None]:
    """Say where something is damaged."""
    try:
        yield
    except SourceError:
        raise
    except ValueError as error:
        raise SourceError(f"{where} is damaged", code="corrupt", facts=[str(error)]) from None
