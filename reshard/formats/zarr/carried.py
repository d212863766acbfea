"""The array of a store for what is not a tensor: files beside the weights of a set, and objects of a DCP.

Its elements are their bytes, one after the other; its attributes have the name and the size of each. No tensor has the
name of its directory (`escaped`). A store of which nothing is to be carried has no such array.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reshard.dtypes import BY_NAME
from reshard.errors import SourceError
from reshard.formats.zarr.layout import METADATA, Array, array_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from reshard.core.storage.places import Place

DIRECTORY = "%carried"
"""The directory of the array, whose single chunk is `CHUNK`."""

CHUNK = "c.0"

KINDS = ("files", "objects", "beside")

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class CarriedBytes:
    """What a store carries.

    Attributes:
        contents: the bytes, by kind (`KINDS`) and name.
        paths: the paths of tensors and objects in nested dicts and lists, if they are not only their names; None for a
            checkpoint without paths.
        shard_size: the most bytes of tensors in a file of the set that is stored; 0 for any other checkpoint.
    """

    contents: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    paths: Mapping[str, KeyPath] | None = field(default_factory=dict)
    shard_size: int = 0

    @property
    def nbytes(self) -> int:
        """Return the number of all bytes."""
        return sum(map(len, self._all()))

    def stored(self) -> dict[str, bytes]:
        """Return the files of the array, by name; none if there is nothing to carry."""
        if not (self.nbytes or self.paths or self.shard_size):
            return {}
        sizes = {kind: {name: len(content) for name, content in items.items()} for kind, items in self.contents.items()}
        uint8 = BY_NAME["uint8"]
        array = Array((self.nbytes,), uint8, (max(self.nbytes, 1),), None, None)
        attributes = {"dtype": uint8.name, "carried": {**sizes, "paths": self.paths, "shard_size": self.shard_size}}
        files = {CHUNK: b"".join(self._all())} if self.nbytes else {}
        return {**files, METADATA: array_json(array.metadata(attributes))}

    def _all(self) -> Iterator[bytes]:
        return (content for items in self.contents.values() for content in items.values())


@dataclass(frozen=True, slots=True)
class CarriedRanges:
    """Where in the chunk of a store each item is.

    Attributes:
        ranges: begin and size, by kind (`KINDS`) and name.
        paths: as in `CarriedBytes`.
        shard_size: as in `CarriedBytes`.
    """

    ranges: Mapping[str, Mapping[str, tuple[int, int]]]
    paths: Mapping[str, KeyPath] | None
    shard_size: int


def parse(carried: Any, path: Place, nbytes: int) -> CarriedRanges:
    """Return the ranges of items in a chunk of a number of bytes, as the attributes of its array say.

    Raises:
        SourceError: the attributes do not say it, or they are of a chunk of another size.
    """
    fault = SourceError(
        f"{path} does not say what the bytes in {CHUNK} are", code="bad-metadata",
        facts=[f"expected names and sizes in 'carried', {nbytes} bytes in all"], hint="write the store again",
    )  # fmt: skip
    if not isinstance(carried, dict) or carried.keys() != {*KINDS, "paths", "shard_size"}:
        raise fault
    ranges: dict[str, dict[str, tuple[int, int]]] = {}
    begin = 0
    for kind in KINDS:
        if not isinstance(carried[kind], dict):
            raise fault
        ranges[kind] = {}
        for name, size in carried[kind].items():
            if type(size) is not int or size < 0:
                raise fault
            ranges[kind][name] = begin, size
            begin += size
    paths, shard_size = carried["paths"], carried["shard_size"]
    if (
        begin != nbytes
        or type(shard_size) is not int
        or shard_size < 0
        or not (paths is None or (isinstance(paths, dict) and all(map(_is_path, paths.values()))))
    ):
        raise fault
    paths = None if paths is None else {name: tuple(keys) for name, keys in paths.items()}
    return CarriedRanges(ranges, paths, shard_size)


def _is_path(keys: object) -> bool:
    return isinstance(keys, list) and len(keys) > 0 and all(type(key) in {str, int} for key in keys)
