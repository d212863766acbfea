"""Reading a pickle as data: nothing that it names is imported or called, and its keys are not hashed.

Python's unpickler follows the instructions. `_Scan` stands between it and the file: it takes the file in pieces, checks
each instruction and counts what it makes, and hands on the piece with a few instructions replaced:

* a dict becomes `Pairs`, a list of its keys and values, and a set a list: Python would hash the keys, and equal hashes,
  or a tuple that holds the one before twice, a hundred deep, would take for ever;
* a new object becomes a call, of a `Name`, which returns a `Record`: the name, arguments and state of an object;
* a long text or value becomes a record of its length;
* frames are those of the pieces.

A file of nothing but lists, calls, names or numbers would take minutes and all memory. So the count of values is
compared with what describes tensors: objects of classes (a tensor, a box, its place), and references to bytes outside
of the pickle. For each of these PyTorch, Megatron-Core and hyper-parallel write 30 bytes or more (14 until the places
come), make at most 11 values (25 in a small file) of 7 bytes or more, and push some 30 on the stack and the memo. A
pickle may have more than that, and besides it a million numbers, 2^18 texts, lists and the like, and 16 MiB of short
texts.

Sources: `pickletools` of Python 3.13; pickles of protocol 2 to 5 as Python's own pickler writes them. The instructions
that it needs for tuples that hold themselves, and for calls with keywords, are refused.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from reshard.errors import SourceError, bytes_text
from reshard.layout.block import MOST_DIMS
from reshard.storage.small import is_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_LARGEST = 1 << 28  # bytes of a file; the metadata of a model of 10^12 parameters have 10^8
_MOST_OBJECTS = 1 << 23  # of some 100 bytes
_MOST_ITEMS = 1 << 26  # places on the stack, in the memo and in lists, of 8 bytes
_MOST_PLAIN = 1 << 18  # objects that tell of no tensor; 4 times as many items, 64 times as many bytes
_MOST_FOR_ONE, _LEAST_BYTES, _MOST_BYTES, _SHORTEST = 64, 24, 1 << 14, 4  # each that does; bytes of an object
_MOST_ATTRIBUTES = 64  # that are searched for a name: all objects may have the same many
_LONGEST = 1 << 16  # bytes of a text or a name; a longer text names nothing
_WIDEST = 32  # bytes of an integer
_PIECE = 1 << 17

# instructions that are handed on as they are
_PLAIN = rb"(?:[()N\x88\x89\x85-\x87t\]aesuRb\x93\x94]++|[Khq].|M..|[Jj].{4}|G.{8}|r..[\0-\x3f]\0)"
_NEW_OBJECT, _NEW_RECORD = b"\x81\x94}\x94(", b"R\x94NQ\x94("  # and its attributes
_RUN = re.compile(rb"(?:%b|%b)*+" % (_PLAIN, re.escape(_NEW_OBJECT)), re.DOTALL)
_BETWEEN = re.compile(rb"(%b*+)%b" % (_PLAIN, re.escape(_NEW_OBJECT)), re.DOTALL)
_MAKES = b"]Qt\x85\x86\x87R\x93ue"  # instructions that make an object, or take as long
_PUSHES = b"(N\x88\x89)KMJGhj\x94qr"  # that take a place on the stack or in the memo
_REPLACED = {  # objects, dicts, sets, references to things outside
    0x81: b"R",
    ord("}"): b"NQ",
    0x8F: b"]",
    0x90: b"e",
    0x91: b"l",
    ord("Q"): b"\x85Q",
}
_STOP, _NEW, _FRAME, _OUTSIDE, _GLOBAL, _PUT, _BYTEARRAY8, _BINBYTES8 = b".\x81\x95Qcr\x96\x8e"
_TEXTS = {0x8C: 1, ord("X"): 4, 0x8D: 8}  # with the bytes of the length that follows
_LONGS = {0x8A: 1, 0x8B: 4}
_WIDTHS = _TEXTS | _LONGS | {ord("C"): 1, ord("B"): 4, _BINBYTES8: 8, _BYTEARRAY8: 8}
_NAMES = re.compile(rb"c[^\n]{1,4096}\n[^\n]{1,4096}\n")
_LONGER = b"KhqMJjGr" + bytes([*_WIDTHS, _FRAME, _GLOBAL])  # instructions that may be cut off
_DAMAGED = (pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, LookupError, TypeError, ValueError)


class Name(NamedTuple):
    """A class or a function that a pickle would import. A call, as the unpickler does it, returns a record."""

    module: str
    name: str

    def __call__(self, *arguments: object) -> Record:
        """Return a record of a call."""
        return Record(self, arguments)


class Pairs(list[Any]):
    """A dict, as a list of its keys and values in turn."""

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        """Add a key and its value."""
        list.extend(self, (key, value))

    def extend(self, _: Iterable[Any]) -> NoReturn:
        """Refuse items without keys."""
        raise TypeError("items of a list in a dict")

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Yield each key with its value."""
        return zip(self[::2], self[1::2], strict=False)


class Record:
    """An object that is not made, or a call that is not done.

    Attributes:
        made_by: the class or function.
        arguments: of the call.
        state: the object's; None if there is none.
        items: to be put into it, keys and values in turn or items of a list; None if there are none.
    """

    __slots__ = ("arguments", "items", "made_by", "state")

    def __init__(self, made_by: object, arguments: object) -> None:
        self.made_by, self.arguments = made_by, arguments
        self.state: object = None
        self.items: Pairs | None = None

    def __setstate__(self, state: object) -> None:
        """Keep the state."""
        if self.state is not None:
            raise TypeError("a second state of an object")
        self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        """Keep a key and its value."""
        self.extend((key, value))

    def extend(self, values: Iterable[object]) -> None:
        """Keep items."""
        if self.items is None:
            self.items = Pairs()
        list.extend(self.items, values)

    @property
    def name(self) -> str:
        """The name of the class or function, without its module; empty if there is none."""
        return self.made_by.name if isinstance(self.made_by, Name) else ""

    def field(self, name: str) -> Any:
        """Return an attribute from the state, or None."""
        return self.fields(name)[0]

    def fields(self, *names: str) -> list[Any]:
        """Return attributes from the state, None for a missing one. Quick if they are in this order."""
        values = [None] * len(names)
        for part in self.state[1::-1] if type(self.state) is tuple else (self.state,):
            if type(part) is Pairs:
                keys = tuple(part[: 2 * _MOST_ATTRIBUTES : 2])
                if keys == names[: len(keys)]:
                    return part[1::2] + values[len(keys) :]
                for position, name in enumerate(names):
                    if name in keys:
                        values[position] = part[2 * keys.index(name) + 1]
        return values


class Readable(Protocol):
    """A pickle that is read in pieces, such as a `RangeReader`."""

    @property
    def path(self) -> str:
        """The path of the file, for messages."""

    @property
    def size(self) -> int:
        """The number of bytes."""

    def upto(self, offset: int, nbytes: int) -> bytes:
        """Return at most `nbytes` bytes from `offset`."""


def shown(value: object) -> str:
    """Describe a value in a message. To write all of it could take for ever, if it holds one value again and again.

    >>> shown("w"), shown([1, 2]), shown([[], []]), shown(Name("os", "system"))
    ("'w'", '[1, 2]', 'a list of 2', "'system'")
    """
    if isinstance(value, Name | Record):
        return f"{value.name!r:.60}" if value.name else "a record"
    if isinstance(value, list | tuple) and not all(isinstance(one, int | float | str) for one in value[:8]):
        return f"a {type(value).__name__.lower()} of {len(value)}"
    return f"{value[:8] if isinstance(value, list | tuple) else value!r:.60}"


def numbers(value: object, most: int = MOST_DIMS) -> tuple[int, ...]:
    """Return a shape or the like: a tuple of at most `most` numbers, or the argument of a call such as `torch.Size`.

    Raises:
        SourceError: it is none; a short fact, to which the caller adds the place.
    """
    if isinstance(value, Record) and isinstance(value.arguments, tuple) and len(value.arguments) == 1:
        (value,) = value.arguments
    if isinstance(value, tuple | list) and len(value) <= most:
        for one in value:
            if type(one) is not int or not 0 <= one < 1 << 63:
                break
        else:
            return tuple(value)
    raise SourceError(f"has {shown(value)} for a shape or offsets; expected whole numbers", code="bad-shape")


def unpickled(reader: Readable, what: str, *, outside: bool = False) -> Any:
    """Return the value of a pickle as plain data and records.

    Args:
        reader: the file.
        what: the expected content, for messages.
        outside: allow references to things outside of the file (persistent ids), which become records without a name.

    Raises:
        SourceError: it is not a pickle, has an instruction that Python's pickler does not write, or exceeds a limit.
    """
    scan = _Scan(reader, what, outside=outside)
    try:
        first, values = _Unpickler(scan).load()
    except SourceError:
        raise
    except _DAMAGED as error:
        scan.refuse(f"is damaged: {error!s:.100}")
    if first is not None or len(values) != 1:
        scan.refuse("ends before its value is complete")
    return values[0]


class _Unpickler(pickle.Unpickler):
    """Python's unpickler, which finds nothing."""

    def find_class(self, module: str, name: str) -> Name:
        if not is_text(module + name):
            raise ValueError("a name that is no text")
        return Name(module, name)

    def persistent_load(self, key: Any) -> Pairs | Record:
        """Return a dict for None, and a record for the size of a text: `_Scan` puts these, and others into tuples."""
        if key is None:
            return Pairs()
        return Record(Name("", key), ()) if isinstance(key, str) else Record(None, *key)


class _Scan:
    """A pickle as `pickle.Unpickler` reads it: in pieces, checked and with some instructions replaced."""

    def __init__(self, reader: Readable, what: str, *, outside: bool) -> None:
        self._reader, self._what, self._outside = reader, what, outside
        self._at = self._skipped = 0  # the next byte to be checked; bytes of long texts
        self._objects = self._items = self._telling = 0  # the last: what tells of tensors
        self._pieces = self._checked()
        self._piece = io.BytesIO()

    def read(self, nbytes: int) -> bytes:
        """Return the next bytes; the unpickler asks for a frame at once, and for the bytes around it one by one."""
        content = self._piece.read(nbytes)
        if len(content) < nbytes:
            self._piece = io.BytesIO(next(self._pieces, b""))
            content = self._piece.read(nbytes)
        return content

    def readline(self) -> bytes:
        """Return a line, of which there is none outside of a frame."""
        return b""

    def refuse(self, why: str) -> NoReturn:
        where = f"byte {self._at:,} of a pickle"
        raise SourceError(f"{self._reader.path} {why} ({where}); expected {self._what}", code="bad-pickle")

    def _checked(self) -> Iterator[bytes]:
        """Yield the pickle, frame by frame.

        Around it are instructions that make (None, (value,)) of the one value that has to be left on the stack, and
        something else, or nothing, of more values or marks.
        """
        reader = self._reader
        if reader.size > _LARGEST:
            self.refuse(f"has {bytes_text(reader.size)}; at most {bytes_text(_LARGEST)} are taken")
        start = reader.upto(0, 2)
        if len(start) < 2:
            self.refuse("ends early; was saving it interrupted?")
        if start[0] != 0x80:
            self._refuse_instruction(start[0])
        if not 2 <= start[1] <= 5:
            self.refuse(f"is of protocol {start[1]}; expected 2 to 5")
        yield b"\x80\x05N("
        self._at = 2
        held, is_last = b"", False
        while not is_last:
            more = reader.upto(self._at + len(held), _PIECE)
            held += more
            begin = self._at
            piece, is_last = self._follow(held)
            if self._at == begin and (not more or len(held) > _LONGEST + _PIECE):
                self.refuse("ends early, or has a name that is too long; was saving it interrupted?")
            held = held[self._at - begin :]
            self._compare()
            yield b"\x95%b%b" % (len(piece).to_bytes(8, "little"), piece)
        if self._at != reader.size:
            self.refuse("goes on behind its end")
        yield b"t\x86."

    def _follow(self, held: bytes) -> tuple[bytes, bool]:
        """Return whole instructions from the first byte, and whether the last of the pickle is among them."""
        begin, at, is_last = self._at, 0, False
        parts: list[bytes] = []
        while at < len(held) and not is_last:
            match = _RUN.match(held, at)
            if match and match.end() > at:
                plain = _BETWEEN.findall(match[0] + _NEW_OBJECT)
                parts.append(_NEW_RECORD.join(plain))
                self._telling += len(plain) - 1
                self._count(parts[-1])
                at = match.end()
            else:
                self._at = begin + at
                instruction = self._instruction(held, at)
                if instruction is None:
                    break
                is_last = held[at] == _STOP
                parts.append(instruction[0])
                at = instruction[1]
        self._at = begin + at
        return b"".join(parts), is_last

    def _instruction(self, held: bytes, at: int) -> tuple[bytes, int] | None:
        """Return an instruction to be handed on, and where the next begins; None if it goes on behind these bytes."""
        code = held[at]
        if code in _WIDTHS:
            return self._content(held, at, at + 1 + _WIDTHS[code])
        part, end = _REPLACED.get(code, b""), at + 1
        self._objects += 1
        self._telling += code in {_NEW, _OUTSIDE}
        if code == _OUTSIDE and not self._outside:
            self.refuse("refers to something outside of itself")
        if code == _GLOBAL:
            names = _NAMES.match(held, at)
            if not names:
                return None
            part, end = names[0], names.end()
            self._objects += 2  # as it takes the time of several; classes are few
        elif code == _FRAME:
            end = at + 9
        elif code != _STOP and code not in _REPLACED:
            if code == _PUT and at + 5 <= len(held):
                self.refuse(f"remembers a value at place {int.from_bytes(held[at + 1 : at + 5], 'little'):,}")
            if code not in _LONGER:
                self._refuse_instruction(code)
            return None
        return (part, end) if end <= len(held) else None

    def _content(self, held: bytes, at: int, begin: int) -> tuple[bytes, int] | None:
        """Return a text or value whose content begins at a byte; see `_instruction`."""
        code, length = held[at], int.from_bytes(held[at + 1 : begin], "little")
        end = begin + length
        if begin > len(held):
            return None
        if code in _LONGS and length > _WIDEST:
            self.refuse(f"has an integer of {length:,} bytes; at most {_WIDEST} are taken")
        if length > _LONGEST:
            if length > self._reader.size - self._at:
                self.refuse(f"has a text or value of {length:,} bytes, which end behind it")
            self._skipped += length
            text = f"{bytes_text(length)} of text or bytes".encode()
            part = b"\x8c%c%bQ" % (len(text), text)
        elif end > len(held):
            return None
        else:
            part = b"%c%b" % (_BINBYTES8 if code == _BYTEARRAY8 else code, held[at + 1 : end])
            if code in _TEXTS:
                try:
                    held[begin:end].decode()
                except UnicodeDecodeError:
                    self.refuse("has a text that is not UTF-8")
        self._objects += 1
        return part, end

    def _count(self, plain: bytes) -> None:
        """Count what instructions make. Their arguments may look like others, so that the counts are upper bounds."""
        self._objects += len(plain) - len(plain.translate(None, _MAKES))
        self._items += len(plain) - len(plain.translate(None, _PUSHES))

    def _compare(self) -> None:
        """Compare the counts with limits, and with the bytes so far and what tells of tensors."""
        if self._objects > _MOST_OBJECTS or self._items > _MOST_ITEMS:
            self.refuse(f"has more than {_MOST_OBJECTS:,} objects or {_MOST_ITEMS:,} items")
        telling, nbytes = self._telling, self._at - self._skipped
        if (
            self._objects > _MOST_PLAIN + min(_MOST_FOR_ONE * telling, nbytes // _SHORTEST)
            or self._items > 4 * _MOST_PLAIN + 2 * _MOST_FOR_ONE * telling
            or not telling * _LEAST_BYTES - 12 * _MOST_PLAIN <= nbytes <= telling * _MOST_BYTES + 64 * _MOST_PLAIN
        ):
            self.refuse("has more values than what it tells of tensors can take")

    def _refuse_instruction(self, code: int) -> NoReturn:
        from pickletools import opcodes  # not on every start

        name = next((known.name for known in opcodes if known.code == chr(code)), f"0x{code:02x}")
        self.refuse(f"has the unsupported instruction {name}")
