"""Write pickles of other programs' objects, whose classes are named and need not be installed.

Python's own pickler does the work. Texts and names are written once, by value, so equal values make equal pickles.
"""

from __future__ import annotations

import io
import pickle
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.errors import SourceError
from reshard.kits.torch.pickles import Name, Pairs, PickledObject

if TYPE_CHECKING:
    from collections.abc import Iterable

_PythonPickler: Any = pickle._Pickler  # noqa: SLF001 -- the one in C imports what it names
_PAIR = 2, pickle.SETITEM, pickle.SETITEMS
_BATCH = 1000  # as Python's: a reader has so many items on its stack


class Items(NamedTuple):
    """A dict, whose items come one by one."""

    items: Iterable[tuple[object, object]]


def pickled(value: object, protocol: int = 2, *, streams: bool = False) -> bytes:
    r"""Return a pickle of a value: plain data, and what `kits.torch.pickles` reads.

    Args:
        value: the value.
        protocol: the protocol.
        streams: number only texts, names and calls with arguments, so that other values are not kept in memory; a list,
            a dict or another object that comes again is another one.

    Raises:
        SourceError: the value is nested too deeply. The message does not name a file.

    >>> pickled(("a", Name("torch", "Size"), 300))
    b'\x80\x02X\x01\x00\x00\x00aq\x00ctorch\nSize\nq\x01M,\x01\x87q\x02.'
    >>> pickle.loads(pickled({"a": [1, PickledObject(Name("builtins", "complex"), (2, 3))]}, 4))
    {'a': [1, (2+3j)]}
    """
    file = io.BytesIO()
    try:
        _Pickler(file, protocol, streams=streams).dump(value)
    except RecursionError:
        raise SourceError("is nested too deeply to be carried", code="too-large") from None
    return file.getvalue()


class _Pickler(_PythonPickler):  # type: ignore[misc]  # it has no types
    """Python's pickler, with names that are not imported and objects that are not created."""

    def __init__(self, file: io.BytesIO, protocol: int, *, streams: bool) -> None:
        super().__init__(file, protocol)
        self._streams = streams
        self._known: dict[str | Name, Any] = {}

    def persistent_id(self, obj: Any) -> Any:
        """Return the key of a reference to data outside of the pickle, or None."""
        return obj.arguments if type(obj) is PickledObject and obj.made_by is None else None

    def memoize(self, obj: Any) -> None:
        """Number a value, which is then written by its number when it comes again."""
        is_call = type(obj) is PickledObject and obj.arguments and not obj.is_new
        if is_call or not self._streams or type(obj) in {str, Name}:
            super().memoize(obj)

    def _is_known(self, value: str | Name) -> bool:
        """Write the number of an equal text or name, if there is one."""
        known = self._known.setdefault(value, value)
        if known is not value:
            self.save(known)
        return known is not value

    def _text(self, value: str) -> None:
        if not self._is_known(value):
            self.save_str(value)

    def _name(self, value: Name) -> None:
        if self._is_known(value):
            return
        if self.proto >= 4:
            self.save(value.module)
            self.save(value.name)
            self.write(pickle.STACK_GLOBAL)
        else:
            self.write(b"c%b\n%b\n" % (value.module.encode(), value.name.encode()))
        self.memoize(value)

    def _object(self, value: PickledObject) -> None:
        self.save(value.made_by)
        self.save(value.arguments)
        self.write(pickle.NEWOBJ if value.is_new else pickle.REDUCE)
        self.memoize(value)
        if value.items is not None:
            self._items(value.items)
        if value.state is not None:
            self.save(value.state)
            self.write(pickle.BUILD)

    def _dict(self, value: Pairs | Items) -> None:
        self.write(pickle.EMPTY_DICT)
        self.memoize(value)
        self._items(value if isinstance(value, Pairs) else (item for pair in value.items for item in pair))

    def _items(self, values: Iterable[Any]) -> None:
        """Write the items of a list, or keys and values in turn, in batches."""
        width, one, several = (1, pickle.APPEND, pickle.APPENDS) if type(values) is list else _PAIR
        iterator = iter(values)
        while batch := list(islice(iterator, width * _BATCH)):
            is_one = len(batch) == width
            self.write(b"" if is_one else pickle.MARK)
            for item in batch:
                self.save(item)
            self.write(one if is_one else several)

    dispatch = _PythonPickler.dispatch | {
        str: _text, Name: _name, PickledObject: _object, Pairs: _dict, Items: _dict
    }  # fmt: skip
