"""Reading a pickle as data: nothing is imported, called or hashed, whatever it says.

Python's own unpickler makes objects of any class that a pickle names and calls whatever it says, so that a file can do
what it likes. Here its instructions are followed, and in the place of an object is a `Record` of what would have made
it: a name, arguments, a state. Sets are lists, and so are dicts (`Pairs`): there is no key whose hash could be slow.

What a pickle shares is shared here, so that memory is in proportion to the file. Each instruction takes time, though,
and a file of nothing but lists, calls, names or numbers would take minutes. So what is made is compared with what
describes tensors: objects of classes (a tensor, a box, its place), and references to bytes outside of the pickle. For
each of these PyTorch, Megatron-Core and hyper-parallel write 30 bytes or more (14 until the places come), make at most
11 values (25 in a small file) of 7 bytes or more, and fill lists and dicts with 7 items. A pickle may have more than
that, and besides it a million numbers, 2^18 texts, lists and the like, and 16 MiB of short texts.

Sources: `pickletools` of Python 3.13; pickles of protocol 2 to 5 as Python's own pickler writes them, which needs the
instructions that are refused for a tuple that has itself alone.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from reshard.errors import SourceError, bytes_text
from reshard.layout.block import MOST_DIMS
from reshard.storage.small import is_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PROTO, _STOP, _MARK, _MEMOIZE, _BINGET, _LONG_BINGET, _BININT1, _BININT2, _BININT, _FLOAT = b"\x80.(\x94hjKMJG"
_EMPTY_TUPLE, _TUPLE1, _TUPLE3, _SETITEMS, _BUILD = b")\x85\x87ub"
_CALL = b"\x94\x85\x94R\x94"  # behind a tuple: calls something with this one argument
_NEW = b"\x81\x94}\x94("  # behind an empty tuple: makes an object, and begins its attributes
_UNSIGNED, _SIGNED, _DOUBLE = (struct.Struct(kind).unpack_from for kind in ("<I", "<i", ">d"))
_CONSTANTS = {ord("N"): None, ord(")"): (), 0x88: True, 0x89: False}

_LARGEST = 1 << 28  # of a file; the metadata of a model of 10^12 parameters have 10^8 bytes
_MOST_OBJECTS = 1 << 23
_MOST_ITEMS = 1 << 25  # of all lists, and twice those of all dicts
_MOST_PLAIN = 1 << 18  # objects that tell of no tensor; 4 times as many items, 64 times as many bytes
_MOST_FOR_ONE, _LEAST_BYTES, _MOST_BYTES, _SHORTEST = 64, 24, 1 << 14, 4  # each that does; bytes of an object
_DEEPEST = 256
_MOST_WAITING = 1 << 16  # values on the stack; Python's pickler takes 1,000 items of a list at once
_MOST_ATTRIBUTES = 64  # that are looked for a name: all objects may have the same many
_LONGEST = 1 << 16  # bytes of a text; a longer one names nothing, and is passed over
_WIDEST = 32  # bytes of an integer
_PIECE = 1 << 17
_NEAR = 16  # more than an instruction has without its contents


class Name(NamedTuple):
    """What a pickle would import: a class or a function, by its module and name."""

    module: str
    name: str


class Pairs(list[Any]):
    """A dict, as a list of its keys and values in turn."""

    __slots__ = ()

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Yield each key with its value."""
        return zip(self[::2], self[1::2], strict=True)


class Record:
    """What a pickle would have called something for.

    Attributes:
        made_by: the class or function.
        arguments: what it would be called with.
        state: what it would be given then; None where nothing is.
        items: what would be put into it, keys and values in turn or items of a list; None where nothing is.
    """

    __slots__ = ("arguments", "items", "made_by", "state")

    def __init__(self, made_by: object, arguments: object) -> None:
        self.made_by, self.arguments = made_by, arguments
        self.state: object = None
        self.items: Pairs | None = None

    @property
    def name(self) -> str:
        """The name of the class or function, without its module; empty where it is not one."""
        return self.made_by.name if isinstance(self.made_by, Name) else ""

    def field(self, name: str) -> Any:
        """Return an attribute from the state; None where it has none of that name."""
        return self.fields(name)[0]

    def fields(self, *names: str) -> list[Any]:
        """Return attributes from the state; None for each that it has not. Quick where they are in this order."""
        found = [None] * len(names)
        for part in self.state[1::-1] if type(self.state) is tuple else (self.state,):
            if type(part) is Pairs:
                keys = tuple(part[: 2 * _MOST_ATTRIBUTES : 2])
                if keys == names[: len(keys)]:
                    return part[1::2] + found[len(keys) :]
                for place, name in enumerate(names):
                    if name in keys:
                        found[place] = part[2 * keys.index(name) + 1]
        return found


class Readable(Protocol):
    """A pickle that is read in pieces, such as a `RangeReader`."""

    @property
    def path(self) -> str:
        """Where it is, for messages."""

    @property
    def size(self) -> int:
        """How many bytes it has."""

    def upto(self, offset: int, nbytes: int) -> bytes:
        """Return at most so many bytes from one on."""


def shown(value: object) -> str:
    """Return a few words for a message. To write a value out would take for ever where it has itself again and again.

    >>> shown("w"), shown([1, 2]), shown([[], []]), shown(Name("os", "system"))
    ("'w'", '[1, 2]', 'a list of 2', "'system'")
    """
    if isinstance(value, Name | Record):
        return f"{value.name!r:.60}" if value.name else "a record"
    if isinstance(value, list | tuple) and not all(isinstance(one, int | float | str) for one in value[:8]):
        return f"a {type(value).__name__.lower()} of {len(value)}"
    return f"{value[:8] if isinstance(value, list | tuple) else value!r:.60}"


def numbers(value: object, most: int = MOST_DIMS) -> tuple[int, ...]:
    """Return a shape or the like, of so many numbers at most: a tuple, or what would make one of it.

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
    """Return what a file has pickled, as plain data and records.

    Args:
        reader: the file.
        what: what it should be, for messages.
        outside: it may refer to things outside of itself (persistent ids), which become records without a name.

    Raises:
        SourceError: it is not a pickle, has an instruction that Python's pickler does not write, or exceeds a limit.
    """
    return _Machine(reader, what, outside=outside).run()


class _Machine:
    """Follows the instructions of a pickle."""

    def __init__(self, reader: Readable, what: str, *, outside: bool) -> None:
        self.reader, self.what, self.outside = reader, what, outside
        self.begin = self.at = self.skipped = 0  # of what is held; in what is held; bytes of long texts
        self.held = b""
        self.stack: list[Any] = []
        self.marks: list[int] = [0]  # none is below the first
        self.memo: list[Any] = []
        self.objects = self.items = self.telling = 0  # the last: what tells of tensors

    def run(self) -> Any:
        """Follow all instructions; return the value that is left."""
        if self.reader.size > _LARGEST:
            self.refuse(f"has {bytes_text(self.reader.size)}; at most {bytes_text(_LARGEST)} are taken")
        if self.take(1)[0] != _PROTO:
            self.refuse_instruction()
        _proto(self)
        try:
            self.follow_all()
        except (IndexError, struct.error):
            self.at = len(self.held)
            self.refuse("ends early; was saving it interrupted?")
        if self.begin + self.at != self.reader.size:
            self.refuse("goes on behind its end")
        if len(self.stack) != 1 or len(self.marks) > 1:
            self.refuse("ends before its value is complete")
        return self.stack[0]

    def follow_all(self) -> None:  # noqa: PLR0912, PLR0915 -- a call for each would take twice the time
        """Follow the instructions up to the last; an error of Python's where there is none.

        Those that make up most of a file are followed here, which takes a quarter of the time that calls do; some at
        once that follow each other in every object. What cannot be followed is left to `_STEPS`, which say why.
        """
        stack, marks, memo = self.stack, self.marks, self.memo
        held, at, last, floor, objects = self.held, self.at, 0, 0, self.objects
        nested, outer = 0, tuple[Any, ...]()  # tuples in tuples, and the last of them
        while True:
            if at >= last:
                self.at, self.objects = at, objects
                self.more()
                held, at, last = self.held, 0, len(self.held) - _NEAR
                if self.begin + len(held) == self.reader.size:
                    last = len(held)
            code = held[at]
            at += 1
            if code == _LONG_BINGET:
                (place,) = _UNSIGNED(held, at)
                stack.append(memo[place] if place < len(memo) else self.forgotten(place))
                at += 4
            elif code == _BINGET:
                stack.append(memo[held[at]] if held[at] < len(memo) else self.forgotten(held[at]))
                at += 1
            elif code == _BININT1:
                stack.append(held[at])
                at += 1
            elif code == _BININT2:
                stack.append(held[at] | held[at + 1] << 8)
                at += 2
            elif code == _BININT:
                stack += _SIGNED(held, at)
                at += 4
            elif _TUPLE1 <= code <= _TUPLE3 and len(stack) - floor > (count := code - _TUPLE1 + 1):
                value = tuple(stack[-count:])
                del stack[-count:]
                objects += 1
                nested = nested + 1 if outer is value[0] or outer is value[count >> 1] or outer is value[-1] else 0
                if nested > _DEEPEST:
                    self.refuse(f"has more than {_DEEPEST} tuples in each other")
                outer = value
                if held[at : at + 5] == _CALL and type(stack[-1]) is Name:
                    record = Record(stack.pop(), (value,))
                    memo += value, record.arguments, record
                    stack.append(record)
                    objects += 2
                    at += 5
                else:
                    stack.append(value)
            elif code == _EMPTY_TUPLE and held[at : at + 5] == _NEW and _is_class(stack, floor, marks):
                new = Record(stack.pop(), ()), Pairs()
                memo += new
                stack += new
                floor = len(stack)
                marks.append(floor)
                objects += 2
                self.telling += 1
                at += 5
            elif code == _SETITEMS and held[at] == _BUILD and _is_object(stack, floor, marks):
                self.items += len(stack) - floor
                attributes = stack[floor - 1]
                attributes += stack[floor:]
                del stack[floor - 1 :]
                marks.pop()
                floor = marks[-1]
                stack[-1].state = attributes
                at += 1
            elif code == _MEMOIZE and len(stack) > floor and len(memo) < objects:
                memo.append(stack[-1])
            elif code == _MARK and len(marks) <= _DEEPEST:
                floor = len(stack)
                marks.append(floor)
            elif code in _CONSTANTS:
                stack.append(_CONSTANTS[code])
            elif code == _FLOAT:
                stack += _DOUBLE(held, at)
                at += 8
            elif code == _STOP:
                self.at = at
                return
            else:
                follow = _STEPS.get(code)
                self.at, self.objects = at, objects
                if follow is None:
                    self.refuse_instruction()
                follow(self)
                at, objects, floor = self.at, self.objects, marks[-1]
                if held is not self.held:
                    held, last = self.held, 0

    def refuse(self, why: str) -> NoReturn:
        where = f"byte {self.begin + self.at:,} of a pickle"
        raise SourceError(f"{self.reader.path} {why} ({where}); expected {self.what}", code="bad-pickle")

    def refuse_instruction(self) -> NoReturn:
        from pickletools import opcodes  # not on every start

        self.at -= 1
        code = self.held[self.at]
        name = next((known.name for known in opcodes if known.code == chr(code)), f"0x{code:02x}")
        self.refuse(f"has the unsupported instruction {name}")

    # --- reading ---

    def more(self, nbytes: int = 1) -> None:
        """Hold so many bytes from here on at least; with each piece, the limits are looked at."""
        self.begin, self.at = self.begin + self.at, 0
        if nbytes > self.reader.size - self.begin:
            self.refuse("ends early; was saving it interrupted?")
        if len(self.stack) > _MOST_WAITING:
            self.refuse("is nested too deeply, or has too many values")
        self.check()
        self.held = self.reader.upto(self.begin, max(_PIECE, nbytes))

    def check(self) -> None:
        """Compare what was made with what is taken at most, and with the bytes so far and what tells of tensors."""
        if self.objects > _MOST_OBJECTS or self.items > _MOST_ITEMS:
            self.refuse(f"has more than {_MOST_OBJECTS:,} objects or {_MOST_ITEMS:,} items")
        telling, nbytes = self.telling, self.begin - self.skipped
        if (
            self.objects > _MOST_PLAIN + min(_MOST_FOR_ONE * telling, nbytes // _SHORTEST)
            or self.items > 4 * _MOST_PLAIN + _MOST_FOR_ONE * telling
            or not telling * _LEAST_BYTES - 12 * _MOST_PLAIN <= nbytes <= telling * _MOST_BYTES + 64 * _MOST_PLAIN
        ):
            self.refuse("has more values than what it tells of tensors can take")

    def take(self, nbytes: int) -> bytes:
        if len(self.held) - self.at < nbytes:
            self.more(nbytes)
        self.at += nbytes
        return self.held[self.at - nbytes : self.at]

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def content(self, width: int, convert: Callable[[bytes], object]) -> None:
        """Put what comes with its length in front there; of what is long a record of its length."""
        length = self.number(width)
        if length <= _LONGEST:
            self.made(convert(self.take(length)))
            return
        if length > self.reader.size - self.begin - self.at:
            self.refuse(f"has a text or value of {length:,} bytes, which end behind it; was saving it interrupted?")
        self.at += length
        self.skipped += length
        self.more()
        self.made(Record(Name("", f"{bytes_text(length)} of text or bytes"), ()))

    def line(self) -> str:
        if self.held.find(b"\n", self.at) < 0:
            self.more(min(_LONGEST, self.reader.size - self.begin - self.at))
        end = self.held.find(b"\n", self.at)
        if not 0 <= end - self.at <= _LONGEST:
            self.refuse("has a name without an end")
        text = self.decoded(self.take(end - self.at))
        self.at += 1
        return text

    def decoded(self, content: bytes) -> str:
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            self.refuse("has a text that is not UTF-8")

    # --- values ---

    def pop(self, count: int = 1) -> list[Any]:
        """Take the last values."""
        stack = self.stack
        if len(stack) - count < self.marks[-1]:
            self.refuse("takes a value where none is")
        found = stack[-count:]
        del stack[-count:]
        return found

    def top(self) -> Any:
        if len(self.stack) <= self.marks[-1]:
            self.refuse("takes a value where none is")
        return self.stack[-1]

    def marked(self) -> list[Any]:
        """Take the values behind the last mark."""
        if len(self.marks) == 1:
            self.refuse("takes values behind a mark where none is")
        place = self.marks.pop()
        found = self.stack[place:]
        del self.stack[place:]
        return found

    def made(self, value: object) -> None:
        """Put a value there that takes memory of its own."""
        self.objects += 1
        self.stack.append(value)

    def put(self, place: int) -> None:
        value = self.top()
        if place != len(self.memo) or place >= self.objects:
            self.refuse(f"remembers a value at place {place:,} of {len(self.memo):,}")
        self.memo.append(value)

    def forgotten(self, place: int) -> NoReturn:
        self.refuse(f"recalls a value from place {place:,} of {len(self.memo):,}")


def _is_class(stack: list[Any], floor: int, marks: list[int]) -> bool:
    """Return whether the last value behind a mark is a class, and there may be another mark."""
    return len(stack) > floor and type(stack[-1]) is Name and len(marks) <= _DEEPEST


def _is_object(stack: list[Any], floor: int, marks: list[int]) -> bool:
    """Return whether what is behind a mark are keys and values for a dict, which is to be the state of an object."""
    if len(marks) == 1 or floor - 2 < marks[-2] or (len(stack) - floor) % 2:
        return False
    return type(stack[floor - 1]) is Pairs and type(stack[floor - 2]) is Record and stack[floor - 2].state is None


# --- the instructions, by their codes ---


def _proto(machine: _Machine) -> None:
    if not 2 <= (version := machine.number(1)) <= 5:
        machine.refuse(f"is of protocol {version}; expected 2 to 5")


def _frame(machine: _Machine) -> None:
    machine.number(8)  # its length, which helps to read a stream
    machine.objects += 1


def _mark(machine: _Machine) -> None:
    machine.refuse("is nested too deeply")


def _long(width: int) -> Callable[[_Machine], None]:
    def follow(machine: _Machine) -> None:
        length = machine.number(width)
        if length > _WIDEST:
            machine.refuse(f"has an integer of {length:,} bytes; at most {_WIDEST} are taken")
        machine.made(int.from_bytes(machine.take(length), "little", signed=True))

    return follow


def _text(width: int) -> Callable[[_Machine], None]:
    return lambda machine: machine.content(width, machine.decoded)


def _bytes(width: int) -> Callable[[_Machine], None]:
    return lambda machine: machine.content(width, bytes)


def _tuple(count: int) -> Callable[[_Machine], None]:
    def follow(machine: _Machine) -> None:
        machine.made(tuple(machine.pop(count)))

    return follow


def _add(machine: _Machine, values: list[Any], *, pairs: bool) -> None:
    """Put values into what is on top: a list, a dict, or a record of something like them."""
    into = machine.top()
    if isinstance(into, Record):
        if into.items is None:
            into.items = Pairs()
        into = into.items
    elif type(into) is not (Pairs if pairs else list):
        machine.refuse(f"puts items into a {type(into).__name__.lower()}")
    if pairs and len(values) % 2:
        machine.refuse("has a key without a value")
    machine.objects += 1  # as it takes the time of one
    machine.items += len(values)
    into.extend(values)


def _name(machine: _Machine, module: object, name: object) -> None:
    if not (isinstance(module, str) and isinstance(name, str) and is_text(module + name)):
        machine.refuse("imports something that has no name")
    machine.objects += 3  # as it takes the time of several; classes are few
    machine.made(Name(module, name))


def _called(machine: _Machine) -> None:
    made_by, arguments = machine.pop(2)
    if not (isinstance(made_by, Name) and isinstance(arguments, tuple)):
        machine.refuse("calls something that has no name")
    machine.made(Record(made_by, arguments))


def _new(machine: _Machine) -> None:
    _called(machine)
    machine.telling += 1


def _called_by_keywords(machine: _Machine) -> None:
    (keywords,) = machine.pop()
    _called(machine)
    machine.top().items = keywords if type(keywords) is Pairs else None


def _build(machine: _Machine) -> None:
    (state,) = machine.pop()
    record = machine.top()
    if not isinstance(record, Record) or record.state is not None:
        machine.refuse(f"gives a state to a {type(record).__name__.lower()}, or a second one")
    record.state = state


def _outside(machine: _Machine) -> None:
    if not machine.outside:
        machine.refuse("refers to something outside of itself")
    machine.made(Record(None, *machine.pop()))
    machine.telling += 1


_STEPS: dict[int, Callable[[_Machine], None]] = {
    code[0]: follow
    for code, follow in {
        b"\x95": _frame,
        b"(": _mark,
        b"\x8a": _long(1),
        b"\x8b": _long(4),
        b"\x8c": _text(1),
        b"X": _text(4),
        b"\x8d": _text(8),
        b"C": _bytes(1),
        b"B": _bytes(4),
        b"\x8e": _bytes(8),
        b"\x96": _bytes(8),
        b"\x85": _tuple(1),
        b"\x86": _tuple(2),
        b"\x87": _tuple(3),
        b"t": lambda m: m.made(tuple(m.marked())),
        b"]": lambda m: m.made([]),
        b"a": lambda m: _add(m, m.pop(), pairs=False),
        b"e": lambda m: _add(m, m.marked(), pairs=False),
        b"}": lambda m: m.made(Pairs()),
        b"s": lambda m: _add(m, m.pop(2), pairs=True),
        b"u": lambda m: _add(m, m.marked(), pairs=True),
        b"\x8f": lambda m: m.made([]),
        b"\x90": lambda m: _add(m, m.marked(), pairs=False),
        b"\x91": lambda m: m.made(m.marked()),
        b"q": lambda m: m.put(m.number(1)),
        b"r": lambda m: m.put(m.number(4)),
        b"\x94": lambda m: m.put(len(m.memo)),
        b"c": lambda m: _name(m, m.line(), m.line()),
        b"\x93": lambda m: _name(m, *m.pop(2)),
        b"R": _called,
        b"\x81": _new,
        b"\x92": _called_by_keywords,
        b"b": _build,
        b"Q": _outside,
    }.items()
}
