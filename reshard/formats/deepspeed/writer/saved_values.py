"""Read files of `torch.save` as instructions: the values that a Universal Checkpoint carries.

A value may have tensors of its own, as those of a client's state. Their storages are carried as they are, with their
keys; those of weights are not, since weights are written anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.model.entries import RangeReader
from reshard.core.model.objects import LARGEST
from reshard.core.storage.crc import crc32, crc32_fault
from reshard.errors import Option, SourceError, Text, bytes_text
from reshard.formats.deepspeed.listing import EXPECTED
from reshard.formats.deepspeed.writer.instructions import GraphNode, Instruction, parsed, references, text_of, tuple_of
from reshard.kits.torch.archive import carries_sums
from reshard.kits.torch.file import PICKLE, TorchFile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.core.storage.places import Place
    from reshard.formats.deepspeed.writer.instructions import Value
    from reshard.kits.torch.file import Storage

_REFERENCE = 5  # items: a word, the class of the storage, its key, its device, and its number of elements


class SavedValues(NamedTuple):
    """A dict that `torch.save` wrote.

    Attributes:
        file: the file.
        root: the dict.
        protocol: the protocol of its pickle.
    """

    file: TorchFile
    root: GraphNode
    protocol: int

    @classmethod
    def read(cls, location: Place) -> SavedValues:
        """Read a file; raise `SourceError` if it is not valid."""
        file = TorchFile.read(location, EXPECTED)
        content = _read(file, PICKLE, file.pickle)
        try:
            root, protocol = parsed(content)
        except SourceError as error:
            raise error.about(file.path) from None
        if not isinstance(root, GraphNode):
            raise SourceError(f"{file.path} has no dict; expected {EXPECTED}", code="not-a-state-dict")
        return cls(file, root, protocol)

    def storages(self, values: Mapping[str, Value]) -> dict[str, bytes]:
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
            keys = [self._key(name, node) for node in references(value)]
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

    def _key(self, name: str, reference: GraphNode) -> str:
        """Return the key of the storage that a reference names, and leave out what only the old format has."""
        items: tuple[Any, ...] = getattr(reference.made_of[0], "made_of", ())
        key = text_of(items[2]) if len(items) >= _REFERENCE else None
        if key is None or text_of(items[0]) != "storage" or set(items[_REFERENCE:]) - {b"N"}:
            raise SourceError(f"{self.file.path}: {name!r:.60} refers to unsupported data", code="bad-pickle")
        reference.instructions = [Instruction(b"Q", (tuple_of(items[:_REFERENCE]),))]
        return key


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
