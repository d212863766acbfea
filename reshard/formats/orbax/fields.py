"""Fields of OCDBT's nodes: numbers of variable length, and lists of strings that share prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MOST_BITS = 64
_LONGEST_STRING = 1 << 16
_MOST_ITEMS = 1 << 22
_MOST_STRING_BYTES = 256 << 20  # of a list whose strings share prefixes, which takes few bytes in a file


class NodeFields:
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
