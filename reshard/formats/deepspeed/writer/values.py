"""The pickled values that a Universal Checkpoint carries: read as objects that nothing made, and pickled again.

Python's own unpickler and pickler do it, but for instructions that would import, call or hash something: a dict becomes
`Pairs`, and any other object a `Made`. The pickler numbers objects by identity, so that shared ones stay shared. Ask
`kits.torch.pickles` first: only what it accepts may be read here.

A value may have tensors of its own, as those of a client's state. Their storages are carried as they are, with their
keys; those of weights are not, since weights are written anew.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from reshard.core.model.entries import RangeReader
from reshard.core.model.objects import LARGEST
from reshard.core.storage.crc import crc32, crc32_fault
from reshard.errors import Option, SourceError, Text, bytes_text
from reshard.formats.deepspeed.files import EXPECTED
from reshard.kits.torch.archive import carries_sums
from reshard.kits.torch.file import PICKLE, TorchFile
from reshard.kits.torch.pickles import Name, Pairs
from reshard.kits.torch.pickling import pickled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.core.storage.places import Place
    from reshard.kits.torch.file import Storage

_Pickler: Any = pickle._Pickler  # noqa: SLF001 -- Python's own without C, as the next
_Unpickler: Any = pickle._Unpickler  # noqa: SLF001

_MOST_BYTES = 1 << 26  # of a pickle; 100,000 tensors have 20 MB
_BATCH = 1000  # items that are added at once, as in Python
_REFERENCE = 5  # items of a reference to a storage; the format before PyTorch 1.6 has one more, which may be None
_PROTOCOL_2 = b"\x80.(N\x88\x89KMJ\x8aGX)t\x85\x86\x87]aesuqrhjcQ"  # instructions that make only plain data
_DAMAGED = (pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, LookupError, TypeError, ValueError)


class Made:
    """An object: a function or class with its arguments, then items of a list, items of a dict, and a state.

    Attributes:
        is_new: `__new__` of the class is called, not the class.
    """

    __slots__ = ("arguments", "function", "is_new", "items", "pairs", "state")

    def __init__(self, function: object, arguments: object, *, is_new: bool) -> None:
        self.function, self.arguments, self.is_new = function, arguments, is_new
        self.items, self.pairs = list[object](), Pairs()
        self.state: object = None

    def __setitem__(self, key: object, value: object) -> None:
        self.pairs[key] = value

    def extend(self, values: Sequence[object]) -> None:
        """Add items."""
        self.items.extend(values)


class Reference(NamedTuple):
    """A reference to a storage: a word, the class of the storage, its key, its device, and its number of elements."""

    items: tuple[Any, ...]


Dict = Pairs | Made
"""A dict, or an object that has keys and values, such as an `OrderedDict`."""


def entries(values: Dict) -> dict[str, Any]:
    """Return the values of a dict whose keys are texts."""
    pairs = values.pairs if isinstance(values, Made) else values
    return {key: value for key, value in pairs.items() if isinstance(key, str)}


def with_entries(values: Dict, changed: Mapping[str, object]) -> Dict:
    """Return a dict that is made alike, with these entries in place of all whose keys are texts."""
    rest = dict(changed)
    pairs = Pairs()
    for key, value in (values.pairs if isinstance(values, Made) else values).items():
        if not isinstance(key, str):
            pairs[key] = value
        elif key in rest:
            pairs[key] = rest.pop(key)
    for key, value in rest.items():
        pairs[key] = value
    if isinstance(values, Pairs):
        return pairs
    result = Made(values.function, values.arguments, is_new=values.is_new)
    result.items, result.pairs, result.state = values.items, pairs, values.state
    return result


def value_of(value: object) -> Any:
    """Return what is read of a pickled value; `kits.torch.pickling` says what it may be."""
    return parsed(pickled(value, 2))


def parsed(content: bytes) -> Any:
    """Return the value of a pickle that `kits.torch.pickles` accepted.

    Raises:
        SourceError: it is too large, or not of protocol 2, which PyTorch writes. The message does not name the file.
    """
    if len(content) > _MOST_BYTES:
        raise SourceError(f"has {bytes_text(len(content))} of values, too many to be carried", code="too-large")
    try:
        return _Reader(io.BytesIO(content)).load()
    except _DAMAGED as error:
        raise SourceError(f"has values that cannot be carried: {error!s:.100}", code="bad-pickle") from None


class _Reader(_Unpickler):  # type: ignore[misc]
    """Reads a pickle of protocol 2."""

    def find_class(self, module: str, name: str) -> Name:
        return Name(module, name)

    def persistent_load(self, items: Any) -> Reference:
        if items[_REFERENCE:] not in [(), (None,)] or items[0] != "storage" or not isinstance(items[2], str):
            raise ValueError("a reference to unsupported data")
        return Reference(items[:_REFERENCE])

    def _dict(self) -> None:
        self.append(Pairs())

    def _call(self, *, is_new: bool = False) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = Made(self.stack[-1], arguments, is_new=is_new)

    def _new(self) -> None:
        self._call(is_new=True)

    def _build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Made) or self.stack[-1].state is not None:
            raise TypeError("a second state of an object")
        self.stack[-1].state = state

    dispatch: ClassVar = {code: _Unpickler.dispatch[code] for code in _PROTOCOL_2} | {
        pickle.EMPTY_DICT[0]: _dict, pickle.REDUCE[0]: _call, pickle.NEWOBJ[0]: _new, pickle.BUILD[0]: _build,
    }  # fmt: skip


class Written(NamedTuple):
    """A pickle, and the keys of the storages to which it refers."""

    content: bytes
    keys: Sequence[str]


def written(value: object) -> Written:
    """Return the pickle of a value, of protocol 2; raise `SourceError` if it is nested too deeply."""
    content = io.BytesIO()
    writer = _Writer(content, 2)
    writer.keys = {}
    try:
        writer.dump(value)
    except RecursionError:
        raise SourceError("has values that are nested too deeply", code="too-large") from None
    return Written(content.getvalue(), list(writer.keys))


class _Writer(_Pickler):  # type: ignore[misc]
    """Writes a pickle.

    Attributes:
        keys: the keys of the storages to which it refers.
    """

    keys: dict[str, None]

    def persistent_id(self, value: object) -> object:
        if not isinstance(value, Reference):
            return None
        self.keys[value.items[2]] = None
        return value.items

    def _name(self, value: Name) -> None:
        self.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
        self.memoize(value)

    def _made(self, value: Made) -> None:
        self.save(value.function)
        self.save(value.arguments)
        self.write(pickle.NEWOBJ if value.is_new else pickle.REDUCE)
        self.memoize(value)
        self._batches(value.items, 1, pickle.APPEND, pickle.APPENDS)
        self._batches(value.pairs, 2, pickle.SETITEM, pickle.SETITEMS)
        if value.state is not None:
            self.save(value.state)
            self.write(pickle.BUILD)

    def _batches(self, values: Sequence[object], width: int, adds_one: bytes, adds_all: bytes) -> None:
        for begin in range(0, len(values), width * _BATCH):
            batch = values[begin : begin + width * _BATCH]
            is_one = len(batch) == width
            self.write(b"" if is_one else pickle.MARK)
            for value in batch:
                self.save(value)
            self.write(adds_one if is_one else adds_all)

    dispatch: ClassVar = _Pickler.dispatch | {Name: _name, Made: _made, Pairs: _Pickler.save_dict}


class SavedValues(NamedTuple):
    """A dict that `torch.save` wrote: the file, and its value."""

    file: TorchFile
    root: Dict

    @classmethod
    def read(cls, location: Place) -> SavedValues:
        """Read a file; raise `SourceError` if it is not valid."""
        file = TorchFile.read(location, EXPECTED)
        try:
            root = parsed(_read(file, PICKLE, file.pickle))
        except SourceError as error:
            raise error.about(file.path) from None
        if not isinstance(root, Dict):
            raise SourceError(f"{file.path} has no dict; expected {EXPECTED}", code="not-a-state-dict")
        return cls(file, root)

    def storages(self, values: Mapping[str, object]) -> dict[str, bytes]:
        """Return the storages of values, by key; the names of values are for messages.

        Raises:
            SourceError: they have too many bytes, or a storage is not there or does not match its checksum.
        """
        keys = {name: written(value).keys for name, value in values.items()}
        records = {key: b"data/" + key.encode() for of_value in keys.values() for key in of_value}
        places = self.file.storages([*records.values()])
        nbytes = sum(places[record].nbytes for record in records.values())
        if nbytes > LARGEST:
            sizes = {name: sum(places[records[key]].nbytes for key in keys[name]) for name in keys}
            largest = max(sizes, key=sizes.__getitem__)
            raise SourceError(
                f"{self.file.path}: tensors of {largest!r:.60} are too large", code="too-large",
                facts=[f"{bytes_text(nbytes)} would be carried; at most {bytes_text(LARGEST)} are"],
                hint=Text("to leave them out, give ", Option("exclude", largest)),
            )  # fmt: skip
        return {key: _read(self.file, record, places[record]) for key, record in records.items()}


def _read(file: TorchFile, name: bytes, place: Storage) -> bytes:
    """Return the contents of a record after comparing them with their checksum, if there is one."""
    content = RangeReader(file.path, window=place.nbytes).read(*place)
    records = {} if file.archive is None else file.archive.records
    if records and carries_sums(records.values()) and (fault := crc32_fault(crc32(content), records[name].crc)):
        raise SourceError(
            f"{file.path} is corrupt: {name.decode(errors='replace')!r:.60} {fault}", code="wrong-checksum"
        )
    return content
