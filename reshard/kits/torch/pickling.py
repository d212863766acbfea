"""Pickles of other programs' objects, whose classes are named and need not be there.

Only what PyTorch's checkpoints consist of can be written. Opcodes and the memo are those of Python's own pickler, so
that bytes are the same where it would write the same objects; text, globals and calls are written once, others each
time, and so are calls without arguments, which make what may be changed. Protocols 2 and 4.
"""

from __future__ import annotations

from itertools import islice
from struct import pack
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.kits.torch.pickles import Name

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

_BATCH = 1000  # as Python's: a reader has so many items on its stack


class Call(NamedTuple):
    """What a function makes of arguments, which are hashable."""

    function: Name
    arguments: tuple[object, ...]


class Instance(NamedTuple):
    """An object of a class: made without arguments, then given its state; None for no state."""

    kind: Name
    state: object


class Persistent(NamedTuple):
    """What the reader knows by this."""

    key: object


class Items(NamedTuple):
    """A dict, whose items come one by one."""

    items: Iterable[tuple[object, object]]


def pickled(value: object, protocol: int) -> bytes:
    r"""Return a pickle of a value: of the classes above, dicts, lists, tuples, text, numbers, booleans and None.

    >>> pickled(("a", Name("torch", "Size"), 300), 2)
    b'\x80\x02X\x01\x00\x00\x00aq\x00ctorch\nSize\nq\x01M,\x01\x87q\x02.'
    >>> import pickle
    >>> pickle.loads(pickled({"a": [1, -1.5, 1 << 40, Call(Name("builtins", "complex"), (2, 3))]}, 4))
    {'a': [1, -1.5, 1099511627776, (2+3j)]}
    """
    writer = _Writer(protocol)
    writer.write(value)
    return bytes(writer.content + b".")


class _Writer:
    """Writes one pickle."""

    def __init__(self, protocol: int) -> None:
        self.content = bytearray(b"\x80%c" % protocol)
        self._framed = protocol >= 4
        self._known: dict[object, int] = {}
        self._count = 0

    def write(self, value: object) -> None:
        """Write a value."""
        _WRITERS[type(value)](self, value)

    def constant(self, value: bool | None) -> None:
        self.content += b"N" if value is None else b"\x88" if value else b"\x89"

    def integer(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self.content += b"K%c" % value
        elif 0 <= value < 1 << 16:
            self.content += b"M" + value.to_bytes(2, "little")
        elif -(1 << 31) <= value < 1 << 31:
            self.content += b"J" + value.to_bytes(4, "little", signed=True)
        else:
            nbytes = value.bit_length() // 8 + 1
            self.content += b"\x8a%c" % nbytes + value.to_bytes(nbytes, "little", signed=True)

    def floating(self, value: float) -> None:
        self.content += b"G" + pack(">d", value)

    def text(self, value: str) -> None:
        if not self._again(value):
            encoded = value.encode()
            short = self._framed and len(encoded) < 256
            self.content += b"\x8c%c" % len(encoded) if short else b"X" + len(encoded).to_bytes(4, "little")
            self.content += encoded
            self._memoize(value)

    def named(self, value: Name) -> None:
        if not self._again(value):
            if self._framed:
                self.text(value.module)
                self.text(value.name)
                self.content += b"\x93"
            else:
                self.content += b"c%s\n%s\n" % (value.module.encode(), value.name.encode())
            self._memoize(value)

    def call(self, value: Call) -> None:
        if not (value.arguments and self._again(value)):
            self.named(value.function)
            self.items(value.arguments)
            self.content += b"R"
            self._memoize(value if value.arguments else None)

    def instance(self, value: Instance) -> None:
        self.named(value.kind)
        self.content += b")\x81"
        self._memoize()
        if value.state is not None:
            self.write(value.state)
            self.content += b"b"

    def persistent(self, value: Persistent) -> None:
        self.write(value.key)
        self.content += b"Q"

    def items(self, value: tuple[object, ...]) -> None:
        if len(value) > 3:
            self.content += b"("
        for item in value:
            self.write(item)
        self.content += (b")", b"\x85", b"\x86", b"\x87", b"t")[min(len(value), 4)]
        if value:
            self._memoize()

    def list(self, value: Sequence[object]) -> None:
        self.content += b"]"
        self._memoize()
        self._batches(iter(value), b"e", _BATCH)

    def dict(self, value: Mapping[object, object]) -> None:
        self.pairs(Items(value.items()))

    def pairs(self, value: Items) -> None:
        self.content += b"}"
        self._memoize()
        self._batches((one for pair in value.items for one in pair), b"u", 2 * _BATCH)

    def _batches(self, values: Iterator[object], end: bytes, size: int) -> None:
        while batch := list(islice(values, size)):
            self.content += b"("
            for value in batch:
                self.write(value)
            self.content += end

    def _again(self, value: Hashable) -> bool:
        """Write the number of what is known already; return whether it is."""
        number = self._known.get(value)
        if number is not None:
            self.content += b"h%c" % number if number < 256 else b"j" + number.to_bytes(4, "little")
        return number is not None

    def _memoize(self, value: Hashable = None) -> None:
        """Number what was written; text, globals and calls are then known by their numbers."""
        if value is not None:
            self._known[value] = self._count
        if self._framed:
            self.content += b"\x94"
        elif self._count < 256:
            self.content += b"q%c" % self._count
        else:
            self.content += b"r" + self._count.to_bytes(4, "little")
        self._count += 1


_WRITERS: dict[type, Callable[[_Writer, Any], None]] = {
    type(None): _Writer.constant,
    bool: _Writer.constant,
    int: _Writer.integer,
    float: _Writer.floating,
    str: _Writer.text,
    Name: _Writer.named,
    Call: _Writer.call,
    Instance: _Writer.instance,
    Persistent: _Writer.persistent,
    Items: _Writer.pairs,
    tuple: _Writer.items,
    list: _Writer.list,
    dict: _Writer.dict,
}
