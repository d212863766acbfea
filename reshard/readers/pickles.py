"""Reading a pickle as data: nothing is imported, called or hashed, whatever it says.

Python's own unpickler makes objects of any class that a pickle names and calls whatever it says, so that a file can do
what it likes. Here its instructions are followed, and in the place of an object is a `Record` of what would have made
it: a name, arguments, a state. Sets are lists, and so are dicts (`Pairs`): there is no key whose hash could be slow.

What is shared is shared here too, so that memory is in proportion to the file. Limits stop a file that is made to take
more: they are several times what the metadata of the largest checkpoints need.

Sources: `pickletools` of Python 3.13; pickles of protocol 2 to 5 as Python's own pickler writes them, which never needs
the instructions that are refused.
"""

from __future__ import annotations

from struct import unpack
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from reshard.errors import SourceError, bytes_text
from reshard.storage.small import is_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PROTO, _STOP, _MARK, _BININT1, _BINGET, _LONG_BINGET, _MEMOIZE = b"\x80.(Khj\x94"

_LARGEST = 1 << 28  # of a file; the metadata of a model of 10^12 parameters have 10^8 bytes
_MOST_OBJECTS = 1 << 23
_MOST_ITEMS = 1 << 25  # of all lists, and twice those of all dicts
_DEEPEST = 256
_MOST_WAITING = 1 << 16  # values on the stack; Python's pickler takes 1,000 items of a list at once
_LONGEST = 1 << 16  # bytes of a text
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
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        for part in parts:
            if isinstance(part, Pairs) and name in (keys := part[::2]):
                return part[2 * keys.index(name) + 1]
        return None


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


def numbers(value: object) -> tuple[int, ...]:
    """Return a shape or the like: a tuple, or what would make one of it.

    Raises:
        SourceError: it is none; a short fact, to which the caller adds the place.
    """
    if isinstance(value, Record) and isinstance(value.arguments, tuple) and len(value.arguments) == 1:
        (value,) = value.arguments
    if not isinstance(value, tuple | list) or any(type(one) is not int or not 0 <= one < 1 << 63 for one in value):
        raise SourceError(f"has {shown(value)} for a shape or offsets; expected whole numbers")
    return tuple(value)


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
        self.begin = self.at = 0  # of what is held; in what is held
        self.held = b""
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.objects = self.items = 0

    def run(self) -> Any:
        """Follow all instructions; return the value that is left."""
        if self.reader.size > _LARGEST:
            self.refuse(f"has {bytes_text(self.reader.size)}; at most {bytes_text(_LARGEST)} are taken")
        if self.take(1)[0] != _PROTO:
            self.refuse_instruction()
        _proto(self)
        try:
            self.follow_all()
        except IndexError:
            self.at = len(self.held)
            self.refuse("ends early; was saving it interrupted?")
        if self.begin + self.at != self.reader.size:
            self.refuse("goes on behind its end")
        if len(self.stack) != 1 or self.marks:
            self.refuse("ends before its value is complete")
        return self.stack[0]

    def follow_all(self) -> None:
        """Follow the instructions up to the last; `IndexError` where there is none.

        Those that make up most of a file are followed here, which takes half of the time that calls do.
        """
        stack, marks, memo = self.stack, self.marks, self.memo
        held, at, last = self.held, self.at, 0
        while True:
            if at >= last:
                self.at = at
                self.more()
                held, at, last = self.held, 0, len(self.held) - _NEAR
                if self.begin + len(held) == self.reader.size:
                    last = len(held)
            code = held[at]
            at += 1
            if code == _BINGET:
                stack.append(memo[held[at]] if held[at] < len(memo) else self.forgotten(held[at]))
                at += 1
            elif code == _LONG_BINGET:
                place = int.from_bytes(held[at : at + 4], "little")
                stack.append(memo[place] if place < len(memo) else self.forgotten(place))
                at += 4
            elif code == _MEMOIZE and stack and len(memo) < self.objects:
                memo.append(stack[-1])
            elif code == _BININT1:
                stack.append(held[at])
                at += 1
            elif code == _MARK and len(marks) < _DEEPEST:
                marks.append(len(stack))
            elif code == _STOP:
                self.at = at
                return
            else:
                follow = _STEPS.get(code)
                self.at = at
                if follow is None:
                    self.refuse_instruction()
                follow(self)
                at = self.at
                if held is not self.held:
                    held, last = self.held, 0

    def refuse(self, why: str) -> NoReturn:
        where = f"byte {self.begin + self.at:,} of a pickle"
        raise SourceError(f"{self.reader.path}: {why} ({where}); expected {self.what}")

    def refuse_instruction(self) -> NoReturn:
        from pickletools import opcodes  # not on every start

        self.at -= 1
        code = self.held[self.at]
        name = next((known.name for known in opcodes if known.code == chr(code)), f"0x{code:02x}")
        self.refuse(f"has the instruction {name}, which is not followed")

    # --- reading ---

    def more(self, nbytes: int = 1) -> None:
        """Hold so many bytes from here on at least."""
        self.begin, self.at = self.begin + self.at, 0
        if nbytes > self.reader.size - self.begin:
            self.refuse("ends early; was saving it interrupted?")
        if len(self.stack) > _MOST_WAITING:
            self.refuse("is nested too deeply, or has too many values")
        self.held = self.reader.upto(self.begin, max(_PIECE, nbytes))

    def take(self, nbytes: int) -> bytes:
        if len(self.held) - self.at < nbytes:
            self.more(nbytes)
        self.at += nbytes
        return self.held[self.at - nbytes : self.at]

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def content(self, width: int) -> bytes:
        """Take what comes with its length in front."""
        length = self.number(width)
        if length > _LONGEST:
            self.refuse(f"has a text or value of {length:,} bytes; at most {_LONGEST:,} are taken")
        return self.take(length)

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
        if len(stack) - count < (self.marks[-1] if self.marks else 0):
            self.refuse("takes a value where none is")
        found = stack[-count:]
        del stack[-count:]
        return found

    def top(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            self.refuse("takes a value where none is")
        return self.stack[-1]

    def marked(self) -> list[Any]:
        """Take the values behind the last mark."""
        if not self.marks:
            self.refuse("takes values behind a mark where none is")
        place = self.marks.pop()
        found = self.stack[place:]
        del self.stack[place:]
        return found

    def made(self, value: object) -> None:
        """Put a value there that takes memory of its own."""
        self.objects += 1
        if self.objects > _MOST_OBJECTS:
            self.refuse(f"has more than {_MOST_OBJECTS:,} objects")
        self.stack.append(value)

    def put(self, place: int) -> None:
        value = self.top()
        if place > len(self.memo) or place >= self.objects:
            self.refuse(f"remembers a value at place {place:,} of {len(self.memo):,}")
        self.memo[place : place + 1] = [value]

    def forgotten(self, place: int) -> NoReturn:
        self.refuse(f"recalls a value from place {place:,} of {len(self.memo):,}")


# --- the instructions, by their codes ---


def _proto(machine: _Machine) -> None:
    if not 2 <= (version := machine.number(1)) <= 5:
        machine.refuse(f"is of protocol {version}; expected 2 to 5")


def _mark(machine: _Machine) -> None:
    machine.refuse("is nested too deeply")


def _long(width: int) -> Callable[[_Machine], None]:
    def follow(machine: _Machine) -> None:
        length = machine.number(width)
        if length > _WIDEST:
            machine.refuse(f"has an integer of {length:,} bytes; at most {_WIDEST} are taken")
        machine.stack.append(int.from_bytes(machine.take(length), "little", signed=True))

    return follow


def _text(width: int) -> Callable[[_Machine], None]:
    return lambda machine: machine.made(machine.decoded(machine.content(width)))


def _bytes(width: int) -> Callable[[_Machine], None]:
    return lambda machine: machine.made(machine.content(width))


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
    machine.items += len(values)
    if machine.items > _MOST_ITEMS:
        machine.refuse(f"has more than {_MOST_ITEMS:,} items")
    into.extend(values)


def _setitem(machine: _Machine) -> None:
    _add(machine, machine.pop(2), pairs=True)


def _name(machine: _Machine, module: object, name: object) -> None:
    if not (isinstance(module, str) and isinstance(name, str) and is_text(module + name)):
        machine.refuse("imports something that has no name")
    machine.made(Name(module, name))


def _stack_global(machine: _Machine) -> None:
    _name(machine, *machine.pop(2))


def _called(machine: _Machine) -> None:
    made_by, arguments = machine.pop(2)
    if not (isinstance(made_by, Name) and isinstance(arguments, tuple)):
        machine.refuse("calls something that has no name")
    machine.made(Record(made_by, arguments))


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


_STEPS: dict[int, Callable[[_Machine], None]] = {
    code[0]: follow
    for code, follow in {
        b"\x95": lambda m: m.number(8) and None,  # the length of a frame, which helps to read a stream
        b"(": _mark,
        b"N": lambda m: m.stack.append(None),
        b"\x88": lambda m: m.stack.append(True),
        b"\x89": lambda m: m.stack.append(False),
        b"M": lambda m: m.stack.append(m.number(2)),
        b"J": lambda m: m.stack.append(int.from_bytes(m.take(4), "little", signed=True)),
        b"\x8a": _long(1),
        b"\x8b": _long(4),
        b"G": lambda m: m.stack.append(unpack(">d", m.take(8))[0]),
        b"\x8c": _text(1),
        b"X": _text(4),
        b"\x8d": _text(8),
        b"C": _bytes(1),
        b"B": _bytes(4),
        b"\x8e": _bytes(8),
        b"\x96": _bytes(8),
        b")": lambda m: m.stack.append(()),
        b"\x85": _tuple(1),
        b"\x86": _tuple(2),
        b"\x87": _tuple(3),
        b"t": lambda m: m.made(tuple(m.marked())),
        b"]": lambda m: m.made([]),
        b"a": lambda m: _add(m, m.pop(), pairs=False),
        b"e": lambda m: _add(m, m.marked(), pairs=False),
        b"}": lambda m: m.made(Pairs()),
        b"s": _setitem,
        b"u": lambda m: _add(m, m.marked(), pairs=True),
        b"\x8f": lambda m: m.made([]),
        b"\x90": lambda m: _add(m, m.marked(), pairs=False),
        b"\x91": lambda m: m.made(m.marked()),
        b"q": lambda m: m.put(m.number(1)),
        b"r": lambda m: m.put(m.number(4)),
        b"\x94": lambda m: m.put(len(m.memo)),
        b"c": lambda m: _name(m, m.line(), m.line()),
        b"\x93": _stack_global,
        b"R": _called,
        b"\x81": _called,
        b"\x92": _called_by_keywords,
        b"b": _build,
        b"Q": _outside,
    }.items()
}
