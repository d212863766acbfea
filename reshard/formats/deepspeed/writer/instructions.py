"""Change a pickle as a program: drop and replace entries of dicts, and keep the instructions that make all else.

The instructions of a pickle push constants, join them to tuples and calls, and add items to lists and dicts. Here they
become a graph. A constant is the bytes of its instruction. An object is a `GraphNode`: the instructions that make it,
each with the values that it takes from the stack. Nothing is imported or called. The graph is written as Python's own
pickler does: an object that comes again by its number, so that shared objects stay shared.

Ask `kits.torch.pickles` first: only what it accepts can be parsed here. An object that contains itself is refused, and
so is one that changes after its use, since it would be another one then.

Source: `pickle.py` and `pickletools.py` of Python 3.13.
"""

from __future__ import annotations

from itertools import chain, islice, pairwise
from pickletools import genops
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.errors import SourceError
from reshard.kits.torch.pickling import pickled

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_MAKES = {
    "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "REDUCE": 2, "NEWOBJ": 2, "STACK_GLOBAL": 2, "BINPERSID": 1,
    "TUPLE": None, "FROZENSET": None, "EMPTY_DICT": 0, "EMPTY_LIST": 0, "EMPTY_SET": 0, "BYTEARRAY8": 0,
}  # fmt: skip
"""Instructions that make an object, and of how many values; None for all above a mark."""

_CHANGES = {"APPEND": 1, "SETITEM": 2, "BUILD": 1, "APPENDS": None, "SETITEMS": None, "ADDITEMS": None}
"""Instructions that change the object below their values, and how many these are."""

_PAIRS, _ITEMS, _OUTSIDE = {b"s", b"u"}, {b"a", b"e"}, b"Q"
_TEXTS = {b"X": 5, b"\x8c": 2, b"\x8d": 9}  # with the offset of the text in its instruction
_NUMBERED = {*_TEXTS, b"c", b"C", b"B", b"\x8e"}  # the constants that have numbers, as texts and names do
_MOST_INSTRUCTIONS, _MOST_OBJECTS = 1 << 23, 1 << 20  # 100,000 tensors have 4,000,000 and 700,000
_BATCH = 1000  # items that are added at once, as in Python


class Instruction(NamedTuple):
    """An instruction that makes or changes an object.

    Attributes:
        code: the instruction.
        values: the values that it takes from the stack.
        mark: a mark is below them.
    """

    code: bytes
    values: tuple[Value, ...] = ()
    mark: bool = False


class GraphNode:
    """An object. The first of its instructions makes it; the others change it."""

    __slots__ = ("instructions", "is_used")

    def __init__(self, *instructions: Instruction) -> None:
        self.instructions = list(instructions)
        self.is_used = False

    @property
    def made_of(self) -> tuple[Value, ...]:
        """Return the values of which it is made: items of a tuple; a function and its arguments."""
        return self.instructions[0].values

    @property
    def items(self) -> Iterator[Value]:
        """Yield the items of a list."""
        return (value for each in self.instructions if each.code in _ITEMS for value in each.values)

    @property
    def pairs(self) -> Iterator[tuple[Value, Value]]:
        """Yield the keys and values of a dict."""
        return (
            pair for each in self.instructions if each.code in _PAIRS
            for pair in zip(each.values[::2], each.values[1::2], strict=True)
        )  # fmt: skip

    @property
    def entries(self) -> dict[str, Value]:
        """Return the values of a dict whose keys are texts."""
        return {name: value for key, value in self.pairs if (name := text_of(key)) is not None}

    def with_pairs(self, pairs: Iterable[tuple[Value, Value]]) -> GraphNode:
        """Return a dict that is made alike, with other keys and values."""
        values = chain.from_iterable(pairs)
        first, *changes = (each for each in self.instructions if each.code not in _PAIRS)
        batches = iter(lambda: tuple(islice(values, 2 * _BATCH)), ())
        return GraphNode(first, *(Instruction(b"u", batch, mark=True) for batch in batches), *changes)

    def with_entries(self, entries: Mapping[str, Value | None]) -> GraphNode:
        """Return a dict that is made alike, with some entries replaced, added, or dropped (None)."""
        pairs = [(key, entries.get(text_of(key) or "", value)) for key, value in self.pairs]
        known = self.entries
        pairs += [(text(name), value) for name, value in entries.items() if name not in known]
        return self.with_pairs([(key, value) for key, value in pairs if value is not None])


Value = bytes | GraphNode
"""A constant, as its instruction, or an object."""


def text(content: str) -> bytes:
    """Return a text."""
    encoded = content.encode()
    return b"X%b%b" % (len(encoded).to_bytes(4, "little"), encoded)


def text_of(value: Value) -> str | None:
    """Return the characters of a text, or None.

    >>> text_of(text("w")), text_of(value_of(1))
    ('w', None)
    """
    if isinstance(value, bytes) and value[:1] in _TEXTS:
        return value[_TEXTS[value[:1]] :].decode()
    return None


def value_of(value: object) -> Value:
    """Return the instructions of a value; `kits.torch.pickling` says what it may be.

    >>> written(value_of({"a": [1, True]}), 2) == pickled({"a": [1, True]}, 2)
    True
    """
    return parsed(pickled(value, 2))[0]


def tuple_of(values: Sequence[Value]) -> Value:
    """Return a tuple."""
    if not values:
        return b")"
    code = (b"\x85", b"\x86", b"\x87", b"t")[min(len(values), 4) - 1]
    return GraphNode(Instruction(code, tuple(values), mark=len(values) > 3))


def list_of(values: Iterable[Value]) -> GraphNode:
    """Return a list."""
    return GraphNode(Instruction(b"]"), Instruction(b"e", tuple(values), mark=True))


def dict_of(pairs: Iterable[tuple[Value, Value]]) -> GraphNode:
    """Return a dict."""
    return GraphNode(Instruction(b"}")).with_pairs(pairs)


def references(value: Value) -> Iterator[GraphNode]:
    """Yield the references to data outside of the pickle that a value contains, each once."""
    visited: set[int] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, GraphNode) and id(node) not in visited:
            visited.add(id(node))
            waiting += chain.from_iterable(each.values for each in node.instructions)
            if node.instructions[0].code == _OUTSIDE:
                yield node


def parsed(content: bytes) -> tuple[Value, int]:
    """Return the value of a pickle that `kits.torch.pickles` accepted, and its protocol.

    Raises:
        SourceError: an object contains itself, or changes after its use; or there are too many. The message does not
            name the file.
    """
    stack: list[Value] = []
    marks: list[int] = []
    numbered: dict[Any, Value] = {}
    protocol, objects = 2, 0

    def taken(count: int | None) -> tuple[Value, ...]:
        at = marks.pop() if count is None else len(stack) - count
        values = tuple(stack[at:])
        del stack[at:]
        for value in values:
            if isinstance(value, GraphNode):
                value.is_used = True
        return values

    instructions = pairwise(chain(genops(content), [(None, None, len(content))]))
    for number, ((opcode, argument, begin), (_, _, end)) in enumerate(instructions):
        if number > _MOST_INSTRUCTIONS or objects > _MOST_OBJECTS:
            raise SourceError("has too many values to be carried", code="too-large")
        code, name = content[begin:end], opcode.name if opcode else ""
        if name == "PROTO":
            protocol = code[1]
        elif name == "MARK":
            marks.append(len(stack))
        elif name in {"BINPUT", "LONG_BINPUT", "MEMOIZE"}:
            numbered[len(numbered) if argument is None else argument] = stack[-1]
        elif name in {"BINGET", "LONG_BINGET"}:
            stack.append(numbered[argument])
        elif name in _MAKES:
            count, objects = _MAKES[name], objects + 1
            stack.append(GraphNode(Instruction(code, taken(count), mark=count is None)))
        elif name in _CHANGES:
            count = _CHANGES[name]
            values = taken(count)
            changed = stack[-1]
            if not isinstance(changed, GraphNode) or changed.is_used:
                raise SourceError("has an object that contains itself", code="bad-pickle")
            changed.instructions.append(Instruction(code, values, mark=count is None))
        elif name not in {"FRAME", "STOP"}:
            stack.append(code)
    (value,) = stack
    return value, protocol


def written(value: Value, protocol: int) -> bytes:
    """Return a pickle of a value."""
    content = bytearray(b"\x80%c" % protocol)
    numbers: dict[int, int] = {}  # by identity, as in Python: equal texts may be two objects

    def numbered(value: Value) -> None:
        number = numbers[id(value)] = len(numbers)
        content.extend(b"q%c" % number if number < 256 else b"r" + number.to_bytes(4, "little"))

    def parts(node: GraphNode) -> Iterator[Value]:
        """Write a node, and yield its values where they are to be written."""
        for position, each in enumerate(node.instructions):
            content.extend(b"(" * each.mark)
            yield from each.values
            content.extend(each.code)
            if position == 0 and each.code != _OUTSIDE:
                numbered(node)

    open_nodes: list[Iterator[Value]] = [iter((value,))]
    while open_nodes:
        item = next(open_nodes[-1], None)
        if item is None:
            open_nodes.pop()
        elif (number := numbers.get(id(item))) is not None:
            content.extend(b"h%c" % number if number < 256 else b"j" + number.to_bytes(4, "little"))
        elif isinstance(item, GraphNode):
            open_nodes.append(parts(item))
        else:
            content.extend(item)
            if item[:1] in _NUMBERED:
                numbered(item)
    return bytes(content) + b"."
