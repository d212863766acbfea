"""Read a pickle as data: nothing that it names is imported or called, and its keys are not hashed.

Python's unpickler follows the instructions. `_Scan` stands between it and the file: it reads the file in pieces, checks
each instruction, counts what it makes, and passes the piece on with a few instructions replaced:

* a dict becomes `Pairs`, a list of its keys and values, and a set a call with a list. Python would hash the keys, which
  takes for ever if many hashes are equal, or if a hundred tuples each hold the previous one twice;
* a new object becomes a `PickledObject`: the name, arguments and state of an object, as of a call;
* a long text or value becomes a record of its length, unless it is to be kept;
* each piece becomes a frame; the file's own frames are dropped.

A file that holds only lists, calls, names or numbers could take minutes and all memory. So the number of values is
compared with the number of instances: objects of classes (a tensor, a box, a storage entry) and references to data
outside of the pickle. For each instance PyTorch, Megatron-Core and hyper-parallel write at least 30 bytes (14 before
the storage entries), at most 11 objects (25 in a small file), and push some 30 values.

Sources: `pickletools` of Python 3.13; pickles of protocol 2 to 5 as Python's own pickler writes them. The instructions
for tuples that contain themselves, and for calls with keywords, are refused.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from reshard.core.layout.block import MOST_DIMS
from reshard.core.storage.small import is_text
from reshard.errors import SourceError, bytes_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MOST_BYTES = 1 << 28  # of a file; the metadata of a model of 10^12 parameters have 10^8
_MOST_OBJECTS = 10 << 20  # of some 100 bytes; also 64 bytes of a text, or 4 places on the stack and in the memo
_FREE_OBJECTS, _OBJECTS_PER_INSTANCE = 1 << 18, 64
_FREE_INSTANCES, _BYTES_PER_INSTANCE = 1 << 17, 24
_MOST_ATTRIBUTES = 64  # that are searched for a name: all objects may share one large dict
_LONGEST = 1 << 16  # bytes of a text or a name; a longer text names nothing
_WIDEST = 32  # bytes of an integer
_PIECE = 1 << 17

# instructions that are passed on as they are
_PLAIN = rb"(?:[()N\x88\x89\x85-\x87t\]aesuRb\x93\x94]++|[Khq].|M..|[Jj].{4}|G.{8}|r..[\0-\x3f]\0)"
_NEW_OBJECT, _NEW_RECORD = b"\x81\x94}\x94(", b"\x86Q\x94NQ\x94("  # and its attributes
_RUN = re.compile(rb"(?:%b|%b)*+" % (_PLAIN, re.escape(_NEW_OBJECT)), re.DOTALL)
_BETWEEN = re.compile(rb"(%b*+)%b" % (_PLAIN, re.escape(_NEW_OBJECT)), re.DOTALL)
_MAKES = b"]Qt\x85\x86\x87R\x93ue"  # instructions that make an object, or take as long
_PUSHES = b"(N\x88\x89)KMJGhj\x94qr"  # that take a place on the stack or in the memo
_INSTANCES = b"\x81Q"
_REPLACED = {  # objects, dicts, sets, references to data outside; `_Unpickler.persistent_load` tells them apart
    0x81: b"\x86Q",
    ord("}"): b"NQ",
    0x8F: b"\x88Q",
    0x90: b"e",
    0x91: b"lQ",
    ord("Q"): b"\x85Q",
}
_STOP, _FRAME, _OUTSIDE, _GLOBAL, _PUT = b".\x95Qcr"
_TEXTS = {0x8C: 1, ord("X"): 4, 0x8D: 8}  # with the bytes of the length that follows
_LONGS = {0x8A: 1, 0x8B: 4}
_WIDTHS = _TEXTS | _LONGS | {ord("C"): 1, ord("B"): 4, 0x8E: 8}
_NAMES = re.compile(rb"c[^\n]{1,4096}\n[^\n]{1,4096}\n")
_LONGER = b"KhqMJjGr" + bytes([*_WIDTHS, _FRAME, _GLOBAL])  # instructions that may be cut off
_DAMAGED = (pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, LookupError, TypeError, ValueError)


class Name(NamedTuple):
    """A class or a function that a pickle would import. A call returns a record."""

    module: str
    name: str

    def __call__(self, *arguments: object) -> PickledObject:
        """Return a record of a call."""
        return PickledObject(self, arguments)


_SET, _FROZEN_SET = Name("builtins", "set"), Name("builtins", "frozenset")


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


class PickledObject:
    """An object that is not created, or a call that is not made.

    Attributes:
        made_by: the class or function; None for a reference to data outside of the pickle.
        arguments: the arguments of the call, or the key of the reference.
        state: the state of the object, or None.
        items: items of the object: a list, or keys and values in turn; None without items.
        is_new: the object is created without a call of its class.
    """

    __slots__ = ("arguments", "is_new", "items", "made_by", "state")

    def __init__(self, made_by: object, arguments: object, *, state: object = None, is_new: bool = False) -> None:
        self.made_by = made_by
        self.arguments: Any = arguments
        self.state = state
        self.items: list[Any] | None = None
        self.is_new = is_new

    def __setstate__(self, state: object) -> None:
        """Keep the state."""
        if self.state is not None:
            raise TypeError("a second state of an object")
        self.state = state
        if type(state) is Pairs and len(state) <= 2 * _MOST_ATTRIBUTES:
            values = state[:]
            state.clear()
            state += values  # which frees the room for more

    def __setitem__(self, key: object, value: object) -> None:
        """Add a key and its value to the items."""
        if self.items is None:
            self.items = Pairs()
        if type(self.items) is not Pairs:
            raise TypeError("keys of an object with items")
        list.extend(self.items, (key, value))

    def extend(self, values: Iterable[object]) -> None:
        """Add items; those of a set are in its arguments."""
        if self.made_by == _SET and type(self.arguments[0]) is list:
            self.arguments[0].extend(values)  # of a call of another set, there is no list
            return
        if self.items is None:
            self.items = []
        self.items.extend(values)

    @property
    def name(self) -> str:
        """Return the name of the class or function without its module, or an empty string."""
        return self.made_by.name if isinstance(self.made_by, Name) else ""

    def field(self, name: str) -> Any:
        """Return an attribute from the state, or None."""
        return self.fields(name)[0]

    def fields(self, *names: str) -> list[Any]:
        """Return attributes from the state, None for a missing one. Fast if they are in this order."""
        values: list[Any] = [None] * len(names)
        for part in self.state[1::-1] if type(self.state) is tuple else (self.state,):
            if type(part) is Pairs:
                keys = tuple(part[: 2 * _MOST_ATTRIBUTES : 2])
                if keys == names[: len(keys)] and type(self.state) is not tuple:
                    return part[1::2] + values[len(keys) :]
                for position in (number for number, name in enumerate(names) if name in keys):
                    values[position] = part[2 * keys.index(names[position]) + 1]
        return values


def parts_of(value: object) -> Sequence[Any]:
    """Return the values in a list, a tuple, a dict or an object; none for another value."""
    if isinstance(value, PickledObject):
        return value.made_by, value.arguments, value.state, value.items
    return value if isinstance(value, list | tuple) else ()


class Readable(Protocol):
    """A pickle that is read in pieces, such as a `RangeReader`."""

    @property
    def path(self) -> str:
        """Return the path of the file, for messages."""

    @property
    def size(self) -> int:
        """Return the number of bytes."""

    def upto(self, offset: int, nbytes: int) -> bytes:
        """Return at most `nbytes` bytes from `offset`."""


def describe(value: object) -> str:
    """Describe a value in a message, in bounded time: it may contain the same value many times.

    >>> describe("w"), describe([1, 2]), describe([[], []]), describe(Name("os", "system"))
    ("'w'", '[1, 2]', 'a list of 2', "'system'")
    """
    if isinstance(value, Name | PickledObject):
        return f"{value.name!r:.60}" if value.name else "a record"
    if isinstance(value, list | tuple) and not all(isinstance(item, int | float | str) for item in value[:8]):
        return f"a {type(value).__name__.lower()} of {len(value)}"
    return f"{value[:8] if isinstance(value, list | tuple) else value!r:.60}"


def numbers(value: object, most: int = MOST_DIMS) -> tuple[int, ...]:
    """Return a shape, offsets or strides: a tuple of numbers, or the argument of `torch.Size`.

    Raises:
        SourceError: the value is not a tuple of at most `most` numbers. The message does not name the file.
    """
    if isinstance(value, PickledObject) and isinstance(value.arguments, tuple) and len(value.arguments) == 1:
        (value,) = value.arguments
    if isinstance(value, tuple | list) and len(value) <= most:
        for number in value:
            if type(number) is not int or not 0 <= number < 1 << 63:
                break
        else:
            return tuple(value)
    raise SourceError(f"has {describe(value)} for a shape or offsets; expected whole numbers", code="bad-shape")


def unpickled(reader: Readable, expected: str, *, outside: bool = False, keeps: bool = False) -> Any:
    """Return the value of a pickle as plain data and records.

    Args:
        reader: the file.
        expected: the expected content, for messages.
        outside: allow references to data outside of the pickle (persistent ids), which become records without a name.
        keeps: keep long texts and values.

    Raises:
        SourceError: it is not a pickle, has an instruction that Python's pickler does not write, or exceeds a limit.
    """
    first = first_unpickled(reader, expected, outside=outside, keeps=keeps)
    if first.nbytes != reader.size:
        _refuse(reader, expected, "goes on behind its end", first.nbytes)
    return first.value


class FirstPickle(NamedTuple):
    """The value of the first pickle of several, its length, and its references to data outside of it, in order."""

    value: Any
    nbytes: int
    references: tuple[PickledObject, ...]


def first_unpickled(reader: Readable, expected: str, *, outside: bool = False, keeps: bool = False) -> FirstPickle:
    """Return the first pickle of a file, which others may follow; arguments and errors as for `unpickled`."""
    scan = _Scan(reader, expected, outside=outside, longest=MOST_BYTES if keeps else _LONGEST)
    unpickler = _Unpickler(scan)
    try:
        first, values = unpickler.load()
    except SourceError:
        raise
    except _DAMAGED as error:
        scan.refuse(f"is damaged: {error!s:.100}")
    if first is not None or len(values) != 1:
        scan.refuse("ends before its value is complete")
    return FirstPickle(values[0], scan.nbytes, tuple(unpickler.references))


def _refuse(reader: Readable, expected: str, why: str, at: int) -> NoReturn:
    raise SourceError(f"{reader.path} {why} (byte {at:,} of a pickle); expected {expected}", code="bad-pickle")


class _Unpickler(pickle.Unpickler):
    """Python's unpickler, which imports nothing; it lists the references to data outside of the pickle."""

    def __init__(self, scan: _Scan) -> None:
        super().__init__(scan)
        self.references: list[PickledObject] = []

    def find_class(self, module: str, name: str) -> Name:
        if not is_text(module + name):
            raise ValueError("a name that is not text")
        return Name(module, name)

    def persistent_load(self, key: Any) -> Pairs | PickledObject:
        """Return what `_Scan` replaced: an object or a reference (a tuple), a dict (None), a set, or a long value."""
        if type(key) is tuple and len(key) == 2:
            if type(key[0]) is not Name or type(key[1]) is not tuple:
                raise TypeError("an object without a class")
            new = PickledObject(*key)
            new.is_new = True
            return new
        if key is None:
            return Pairs()
        if key is True:
            return PickledObject(_SET, ([],))
        if type(key) is list:
            return PickledObject(_FROZEN_SET, (key,))
        if type(key) is str:
            return PickledObject(Name("", key), ())
        self.references.append(PickledObject(None, *key))
        return self.references[-1]


class _Scan:
    """A pickle as `pickle.Unpickler` reads it: in pieces, checked and with some instructions replaced.

    Attributes:
        nbytes: the number of bytes that were checked: the length of the pickle, once it is read.
    """

    def __init__(self, reader: Readable, expected: str, *, outside: bool, longest: int) -> None:
        self._reader, self._expected, self._outside, self._longest = reader, expected, outside, longest
        self.nbytes = self._skipped = 0  # of long texts
        self._objects = self._instances = 0
        self._pieces = self._checked()
        self._piece = io.BytesIO()

    def read(self, nbytes: int) -> bytes:
        """Return the next bytes. The unpickler reads a frame at once, and the bytes around it one by one."""
        content = self._piece.read(nbytes)
        if len(content) < nbytes:
            self._piece = io.BytesIO(next(self._pieces, b""))
            content = self._piece.read(nbytes)
        return content

    def readline(self) -> bytes:
        """Return nothing: there are no lines outside of frames."""
        return b""

    def refuse(self, why: str) -> NoReturn:
        _refuse(self._reader, self._expected, why, self.nbytes)

    def _checked(self) -> Iterator[bytes]:
        """Yield the pickle, frame by frame.

        The instructions around it make (None, (value,)) if one value is left on the stack. More values or marks give
        another result, or an error.
        """
        start = self._reader.upto(0, 2)
        if len(start) < 2:
            self.refuse("ends early; was saving it interrupted?")
        if start[0] != 0x80:
            self._refuse_instruction(start[0])
        if not 2 <= start[1] <= 5:
            self.refuse(f"is of protocol {start[1]}; expected 2 to 5")
        yield b"\x80\x05N("
        self.nbytes = 2
        buffer, is_last = b"", False
        while not is_last:
            content = self._reader.upto(self.nbytes + len(buffer), max(_PIECE, len(buffer)))
            buffer += content
            begin = self.nbytes
            piece, is_last = self._follow(buffer)
            if self.nbytes == begin and (not content or len(buffer) > self._longest + _PIECE):
                self.refuse("ends early, or has a name that is too long; was saving it interrupted?")
            buffer = buffer[self.nbytes - begin :]
            self._compare()
            yield b"\x95%b%b" % (len(piece).to_bytes(8, "little"), piece)
        yield b"t\x86."

    def _follow(self, buffer: bytes) -> tuple[bytes, bool]:
        """Return the complete instructions of a buffer, and whether STOP is among them."""
        begin, at, is_last = self.nbytes, 0, False
        parts: list[bytes] = []
        while at < len(buffer) and not is_last:
            match = _RUN.match(buffer, at)
            if match and match.end() > at:
                plain = _BETWEEN.findall(match[0] + _NEW_OBJECT)
                parts.append(_NEW_RECORD.join(plain))
                self._instances += len(plain) - 1
                self._count(parts[-1])
                at = match.end()
                continue
            self.nbytes = begin + at
            code = buffer[at]
            instruction = self._content(buffer, at) if code in _WIDTHS else self._instruction(buffer, at)
            if instruction is None:
                break
            is_last = code == _STOP
            part, at = instruction
            parts.append(part)
        self.nbytes = begin + at
        return b"".join(parts), is_last

    def _instruction(self, buffer: bytes, at: int) -> tuple[bytes, int] | None:
        """Return the instruction to pass on, and the offset of the next; None if the buffer ends before."""
        code = buffer[at]
        part, end = _REPLACED.get(code, b""), at + 1
        self._objects += 1
        self._instances += code in _INSTANCES
        if code == _OUTSIDE and not self._outside:
            self.refuse("refers to something outside of itself")
        if code == _GLOBAL:
            names = _NAMES.match(buffer, at)
            if not names:
                return None
            part, end = names[0], names.end()
            self._objects += 2  # as it takes as long; a file has few classes
        elif code == _FRAME:
            end = at + 9
        elif code != _STOP and code not in _REPLACED:
            if code == _PUT and at + 5 <= len(buffer):
                self.refuse(f"remembers a value at place {int.from_bytes(buffer[at + 1 : at + 5], 'little'):,}")
            if code not in _LONGER:
                self._refuse_instruction(code)
            return None
        return (part, end) if end <= len(buffer) else None

    def _content(self, buffer: bytes, at: int) -> tuple[bytes, int] | None:
        """Return an instruction with a text or value; see `_instruction`."""
        code = buffer[at]
        begin = at + 1 + _WIDTHS[code]
        if begin > len(buffer):
            return None
        length = int.from_bytes(buffer[at + 1 : begin], "little")
        end = begin + length
        self._objects += 1
        if code in _LONGS and length > _WIDEST:
            self.refuse(f"has an integer of {length:,} bytes; at most {_WIDEST} are taken")
        if length > self._reader.size - self.nbytes:
            self.refuse(f"ends early, within a text or value of {length:,} bytes")
        if length > self._longest:
            self._skipped += length
            text = f"{bytes_text(length)} of text or bytes".encode()
            return b"\x8c%c%bQ" % (len(text), text), end
        if end > len(buffer):
            return None
        self._objects += min(length, _LONGEST) // 64
        if code in _TEXTS:
            try:
                buffer[begin:end].decode()
            except UnicodeDecodeError:
                self.refuse("has a text that is not UTF-8")
        return buffer[at:end], end

    def _count(self, plain: bytes) -> None:
        """Count objects, and pushes as quarters. Arguments may look like instructions: the counts are upper bounds."""
        self._objects += len(plain) - len(plain.translate(None, _MAKES))
        self._objects += (len(plain) - len(plain.translate(None, _PUSHES))) // 4

    def _compare(self) -> None:
        """Compare the counts with limits, with the number of instances, and that with the bytes so far."""
        most = min(_MOST_OBJECTS, _FREE_OBJECTS + _OBJECTS_PER_INSTANCE * self._instances)
        most_instances = _FREE_INSTANCES + (self.nbytes - self._skipped) // _BYTES_PER_INSTANCE
        if self._objects > most or self._instances > most_instances:
            self.refuse("has more values than a description of tensors needs")
        if self.nbytes > MOST_BYTES:
            self.refuse(f"has more than {bytes_text(MOST_BYTES)}, which are taken at most")

    def _refuse_instruction(self, code: int) -> NoReturn:
        from pickletools import opcodes  # not on every start

        name = next((opcode.name for opcode in opcodes if opcode.code == chr(code)), f"0x{code:02x}")
        self.refuse(f"has the unsupported instruction {name}")
