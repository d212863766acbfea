"""Read files of `torch.save` with all their values, of which a Universal Checkpoint carries most, and change dicts.

A value may have tensors of its own, as those of a client's state. Their storages are carried as they are, with their
keys; those of weights are not, since weights are written anew.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from reshard.core.model.entries import RangeReader
from reshard.core.model.objects import LARGEST
from reshard.core.storage.crc import crc32, crc32_fault
from reshard.errors import Option, SourceError, Text, bytes_text
from reshard.formats.deepspeed.listing import EXPECTED
from reshard.kits.torch.archive import carries_sums
from reshard.kits.torch.file import PICKLE, TorchFile
from reshard.kits.torch.pickles import Pairs, PickledObject, parts_of
from reshard.kits.torch.tensors import storage_reference

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from reshard.core.storage.places import Place
    from reshard.kits.torch.file import Storage

_REFERENCE = 5  # items: a word, the class of the storage, its key, its device, and its number of elements


class SavedValues(NamedTuple):
    """A dict that `torch.save` wrote.

    Attributes:
        file: the file.
        root: the dict.
    """

    file: TorchFile
    root: Pairs | PickledObject

    @classmethod
    def read(cls, location: Place) -> SavedValues:
        """Read a file; raise `SourceError` if it is not valid."""
        file = TorchFile.read(location, EXPECTED, keeps=True)
        _read(file, PICKLE, file.pickle)
        if not is_dict(file.value):
            raise SourceError(f"{file.path} has no dict; expected {EXPECTED}", code="not-a-state-dict")
        return cls(file, file.value)

    def storages(self, values: Mapping[str, object]) -> dict[str, bytes]:
        """Return the storages of some values, by key.

        Args:
            values: the values; the names are for messages.

        Raises:
            SourceError: they have too many bytes, or a storage is not there or does not match its checksum.
        """
        places: dict[str, Storage] = {}
        sizes: dict[str, int] = {}
        for name, value in values.items():
            before = len(places)
            keys = [self._key(name, reference) for reference in _references(value)]
            stored = self.file.storages([_record(key) for key in keys])
            places.update({key: stored[_record(key)] for key in keys})
            sizes[name] = sum(place.nbytes for place in [*places.values()][before:])
        if sum(sizes.values()) > LARGEST:
            largest = max(sizes, key=sizes.__getitem__)
            raise SourceError(
                f"{self.file.path}: tensors of {largest!r:.60} are too large", code="too-large",
                facts=[f"{bytes_text(sum(sizes.values()))} would be carried; at most {bytes_text(LARGEST)} are"],
                hint=Text("to leave them out, give ", Option("exclude", largest)),
            )  # fmt: skip
        return {key: _read(self.file, _record(key), place) for key, place in places.items()}

    def _key(self, name: str, reference: PickledObject) -> str:
        """Return the key of the storage that a reference names, and leave out what only the old format has."""
        try:
            _, key, _ = storage_reference(reference)
        except SourceError as error:
            raise SourceError(f"{self.file.path}: {name!r:.60} {error.message}", code="bad-pickle") from None
        reference.arguments = reference.arguments[:_REFERENCE]
        return key


def is_dict(value: object) -> TypeGuard[Pairs | PickledObject]:
    """Return whether a value is a dict, of any class."""
    return isinstance(value, Pairs) or (isinstance(value, PickledObject) and isinstance(value.items, Pairs | None))


def pairs_of(value: object) -> Iterator[tuple[Any, Any]]:
    """Yield the keys and values of a dict; none for another value."""
    items = value.items if isinstance(value, PickledObject) else value
    return items.items() if isinstance(items, Pairs) else iter(())


def entries_of(value: object) -> dict[str, Any]:
    """Return the values of a dict whose keys are texts; none for another value."""
    return {key: item for key, item in pairs_of(value) if isinstance(key, str)}


def with_pairs(value: Pairs | PickledObject, pairs: Iterable[tuple[object, object]]) -> Pairs | PickledObject:
    """Return a dict of the same class, with other keys and values."""
    items = Pairs(chain.from_iterable(pairs))
    if isinstance(value, Pairs):
        return items
    changed = PickledObject(value.made_by, value.arguments, state=value.state, is_new=value.is_new)
    changed.items = items
    return changed


def with_entries(
    value: Pairs | PickledObject, entries: Mapping[str, object], *, without: Collection[str] = ()
) -> Pairs | PickledObject:
    """Return a dict of the same class, with some entries replaced, added or left out."""
    left = dict(entries)
    pairs = []
    for key, item in pairs_of(value):
        name = key if isinstance(key, str) else None
        if name not in without:
            pairs.append((key, left.pop(name, item) if name is not None else item))
    return with_pairs(value, [*pairs, *left.items()])


def _references(value: object) -> Iterator[PickledObject]:
    """Yield the references to data outside of the pickle that a value contains, each once."""
    visited: set[int] = set()
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if id(part) in visited:
            continue
        visited.add(id(part))
        if isinstance(part, PickledObject) and part.made_by is None:
            yield part
        else:
            waiting += parts_of(part)


def _record(key: str) -> bytes:
    return b"data/" + key.encode()


def _read(file: TorchFile, name: bytes, place: Storage) -> bytes:
    """Return the contents of a record after comparing them with their checksum, if there is one."""
    content = RangeReader(file.path, window=place.nbytes).read(*place)
    records = {} if file.archive is None else file.archive.records
    if records and carries_sums(records.values()) and (fault := crc32_fault(crc32(content), records[name].crc)):
        raise SourceError(
            f"{file.path} is corrupt: {name.decode(errors='replace')!r:.60} {fault}", code="wrong-checksum"
        )
    return content
