"""Read the metadata of a Checkpoint 2.0: how each tensor is cut, and which files have its blocks.

They may be 100 MB and more of JSON, which is read member by member. Names, paths and numbers are checked here;
`checkpoint2` compares them with the contents of the files.
"""

from __future__ import annotations

import json
import re
from array import array
from codecs import getincrementaldecoder
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.layout.arrangement import Arranged, Arrangement
from reshard.core.layout.block import Block
from reshard.core.layout.layout import Layout
from reshard.core.layout.mesh import Mesh
from reshard.core.model.entries import RangeReader
from reshard.dtypes import BY_NAME
from reshard.errors import Faults, LayoutError, SourceError, names
from reshard.formats.checkpoint2.names import METADATA
from reshard.strategy.strategy import MOST_RANKS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.core.layout.block import Shape
    from reshard.core.storage.places import Place


NUMBERS = 4
"""How many numbers locate a block: of the block, its file, its rank, and the group of ranks that hold it."""

_PIECE = 1 << 20
_LONGEST = 1 << 26  # characters of one member
_BEHIND = {*" \t\n\r:,]}"}
_SPACE = re.compile(r"[ \t\n\r]*")
_KEY = re.compile(r"""\((?:'(?P<single>.*)'|"(?P<double>.*)"), \((?P<number>\d{1,18}),\)\)""", re.DOTALL)
_MOST = 1 << 31  # ranks, and blocks of a tensor
_LONGEST_AXIS = 64
_DTYPES = {name.replace("_", ""): name for name in BY_NAME}  # MindSpore's names have no underscores


class Described(NamedTuple):
    """A tensor as the metadata list it.

    Attributes:
        dtype: the name of its dtype; empty if unknown.
        shape: the shape of the whole tensor.
        mesh: its layout over ranks; None if every file has it whole.
        reason: why it cannot be read, or "".
    """

    dtype: str
    shape: Shape
    mesh: Mesh | None
    reason: str


class Metadata:
    """The contents of `metadata.json`.

    Attributes:
        listed: the tensors by name.
        places: the locations of each tensor's blocks, flattened: for each, the numbers of the block, its file, its
            rank, and the group of ranks that hold it.
        files: the names of the files, each with its number.
        ranks: the rank of each file.
        groups: the groups of ranks.
    """

    def __init__(self, path: Place) -> None:
        self.listed: dict[str, Described] = {}
        self.places: dict[str, array[int]] = {}
        self.files: dict[str, int] = {}
        self.ranks: list[int] = []
        self._meshes: dict[Mesh, Mesh] = {}
        self._groups: dict[tuple[int, ...], int] = {}
        self._grids: dict[tuple[Mesh | None, Shape], tuple[tuple[Block, ...], dict[int, int]]] = {}
        self._outside: dict[tuple[Mesh | None, Shape, bytes], tuple[tuple[tuple[int, int], ...], bool]] = {}
        context = ""
        try:
            for section, name, value in members(str(path)):
                context = f"{section}.{name}: "
                if section == "state_dict_metadata":
                    self.listed[name] = self._listed(value)
                elif section == "storage_data":
                    self._place(name, value)
        except (ValueError, KeyError, TypeError, LayoutError) as error:
            message = f"has no {error}" if isinstance(error, KeyError) else str(error)
            raise SourceError(f"{path}: {context}{message}", code="bad-metadata") from None
        if unknown := [name for name in self.places if name not in self.listed]:
            raise SourceError(
                f"{path} has blocks of {names(map(repr, unknown), most=3)}, but no such tensor", code="unknown-tensor"
            )
        self.groups = list(self._groups)

    @property
    def devices(self) -> int:
        """Return the number of ranks, of which the highest is named."""
        ranks = set(self.ranks).union(*self.groups, *(mesh.ranks for mesh in self._meshes))
        return max(ranks, default=0) + 1

    def grid(self, tensor: Described) -> tuple[tuple[Block, ...], dict[int, int]]:
        """Return the blocks of a tensor, and the number of each block by rank; no ranks if it is whole on all."""
        key = tensor.mesh, tensor.shape
        if key not in self._grids:
            if tensor.mesh is None:
                self._grids[key] = (Block.whole(tensor.shape),), {}
            else:
                grid = tensor.mesh.grid(tensor.shape)
                self._grids[key] = grid.blocks, {rank: n for n, ranks in enumerate(grid.ranks) for rank in ranks}
        return self._grids[key]

    def outside(self, tensor: Described, places: array[int]) -> tuple[tuple[tuple[int, int], ...], bool]:
        """Return the ranks that hold a block and are not in the layout of a tensor, and whether numbers are wrong.

        Each rank comes with the number of its block. Numbers are wrong if they are not those of the layout.
        """
        key = tensor.mesh, tensor.shape, places.tobytes()
        if key not in self._outside:
            self._outside[key] = self._find_outside(tensor, places)
        return self._outside[key]

    def _find_outside(self, tensor: Described, places: array[int]) -> tuple[tuple[tuple[int, int], ...], bool]:
        _, of_rank = self.grid(tensor)
        outside: dict[int, int] = {}
        are_wrong = False
        for number, group in dict.fromkeys(zip(places[::NUMBERS], places[3::NUMBERS], strict=True)):
            for rank in self.groups[group]:
                if rank not in of_rank:
                    outside[rank] = number
                    are_wrong |= tensor.mesh is None and number != 0
                else:
                    are_wrong |= of_rank[rank] != number
        return tuple(sorted(outside.items())), are_wrong

    def _listed(self, value: dict[str, Any]) -> Described:
        shape = _numbers(value["global_shape"])
        dtype = value["properties"]["dtype"].lower()
        dtype = _DTYPES.get(dtype.replace("_", ""), dtype)
        layout = value.get("layout")
        if layout is None:
            return Described(dtype, shape, None, "")
        tensor_map = [entry if isinstance(entry, int) else _numbers(entry) for entry in layout["tensor_map"]]
        axes = tuple(str(axis)[:_LONGEST_AXIS] for axis in layout.get("alias_name", ()))
        mesh = Mesh(Layout.of(_numbers(layout["device_matrix"]), tensor_map), _numbers(layout["rank_list"]), axes)
        if len(set(mesh.ranks)) != prod(mesh.layout.dev_matrix) or len(set(mesh.ranks)) < len(mesh.ranks):
            raise ValueError(f"rank_list has {len(mesh.ranks)} ranks; expected one for each device")
        if len(mesh.layout.tensor_map) != len(shape):
            raise ValueError(f"tensor_map is of {len(mesh.layout.tensor_map)} dimensions; the shape has {len(shape)}")
        reason = ""
        if layout.get("interleaved_parallel"):
            reason = "is interleaved within each card (interleaved_parallel), which is not read"
        else:
            uneven = [dim for dim, ways in enumerate(mesh.layout.splits) if shape[dim] % ways]
            if uneven:
                dim, ways = uneven[0], mesh.layout.splits[uneven[0]]
                reason = (
                    f"has {shape[dim]} elements in dimension {dim}, which {ways} blocks do not divide; the format "
                    f"keeps {shape[dim] // ways} in each, so that {shape[dim] % ways} are lost"
                )
        return Described(dtype, shape, self._meshes.setdefault(mesh, mesh), reason)

    def _place(self, key: str, value: list[dict[str, Any]]) -> None:
        name, number = _read_key(key)
        if number >= _MOST:
            raise ValueError(f"is the block of number {number}; no tensor has as many")
        places = self.places.setdefault(name, array("i"))
        for location in value:
            file, rank = location["file_name"], location["storage_rank"]
            if not isinstance(file, str) or "/" in file or "\\" in file or not file.endswith(".safetensors"):
                raise ValueError(f"file_name is {file!r:.80}; expected a safetensors file in the same directory")
            if type(rank) is not int or not 0 <= rank < _MOST:
                raise ValueError(f"storage_rank is {rank!r:.60}; expected the number of a rank")
            group = tuple(location.get("rank_group", ()))
            if group not in self._groups:  # most have been checked before
                _numbers([*group])
            group = group if rank in group else (rank, *group)
            if self.files.setdefault(file, len(self.files)) == len(self.ranks):
                self.ranks.append(rank)
            elif self.ranks[self.files[file]] != rank:
                raise ValueError(f"{file} is of rank {rank} here, and of rank {self.ranks[self.files[file]]} before")
            places.extend((number, self.files[file], rank, self._groups.setdefault(group, len(self._groups))))


def _numbers(value: object) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or {*map(type, value)} - {int}
        or (value and not 0 <= min(value) <= max(value) < 1 << 63)
    ):
        raise ValueError(f"{value!r:.60} is there; expected whole numbers")
    return tuple(value)


def _read_key(key: str) -> tuple[str, int]:
    """Parse the name and block number in a key of `storage_data`, a tuple's repr.

    >>> _read_key("('a.b', (3,))"), _read_key(str(("it's", (0,))))
    (('a.b', 3), ("it's", 0))
    """
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError(f"the key {key!r:.80} is not a name and the number of a block")
    name = match["single"] if match["single"] is not None else match["double"]
    if "\\" in name:
        from ast import literal_eval

        try:
            name = literal_eval(key)[0]
        except (SyntaxError, RecursionError, MemoryError):
            raise ValueError(f"the key {key!r:.80} is not a name and the number of a block") from None
    return name, int(match["number"])


def layouts_at(directory: Place) -> Arrangement:
    """Return the arrangement of a Checkpoint 2.0; only its metadata are read.

    Raises:
        SourceError: the metadata are missing, or not valid.
    """
    if not (directory / METADATA).is_file():
        if not directory.is_dir():
            raise SourceError(f"no such directory: {directory}", code="not-found")
        raise SourceError(
            f"{directory} has no {METADATA}",
            code="not-a-checkpoint",
            hint="give a Checkpoint 2.0 whose tensors are cut",
        )
    metadata = Metadata(directory / METADATA)
    faults = Faults(str(directory / METADATA))
    tensors = {}
    for name, tensor in metadata.listed.items():
        if tensor.reason:
            faults.add(f"tensor {name!r}", tensor.reason, code="unreadable-tensor")
        others: tuple[tuple[int, int], ...] = ()
        if tensor.mesh is not None and not tensor.reason:
            blocks = len(metadata.grid(tensor)[0])
            outside, are_wrong = metadata.outside(tensor, metadata.places.get(name, array("i")))
            others = () if are_wrong else tuple((rank, number) for rank, number in outside if number < blocks)
        tensors[name] = Arranged((tensor.mesh,) if tensor.mesh else (), tensor.shape, others)
    faults.raise_if_any(SourceError)
    if metadata.devices > MOST_RANKS:
        raise SourceError(
            f"{directory / METADATA} has rank {metadata.devices - 1}; expected {MOST_RANKS - 1} at most",
            code="out-of-range", facts=["the file seems to be corrupt"],
        )  # fmt: skip
    return Arrangement(tensors, range(metadata.devices), metadata.devices, lists_all=True)


def members(path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the members of the objects in a JSON object: outer key, inner key, value.

    A value of the outer object that is not an object comes with an empty inner key.

    Raises:
        ValueError: it is not a JSON object.
        SourceError: the file cannot be read.

    >>> from pathlib import Path
    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp(), "a.json")
    >>> _ = path.write_text('{"a": {"b": [1], "c": 2}, "d": null}')
    >>> list(members(str(path)))
    [('a', 'b', [1]), ('a', 'c', 2), ('d', '', None)]
    """
    text = _TextParser(RangeReader(path, window=_PIECE))
    for key in text.names():
        if text.next() == "{":
            for name in text.names():
                yield key, name, text.value()
        else:
            yield key, "", text.value()
    if text.next():
        raise ValueError("something follows the object")


class _TextParser:
    """A parser of the text of a file, which buffers a piece of it."""

    def __init__(self, reader: RangeReader) -> None:
        self._reader, self._read = reader, 0
        self._decode = getincrementaldecoder("utf-8-sig")().decode
        self._buffer, self._at = "", 0
        self._scan = json.JSONDecoder().raw_decode

    def names(self) -> Iterator[str]:
        """Yield the keys of the next object; the caller reads the value of each before the next key."""
        self._take("{")
        separator = ""
        while self.next() != "}":
            self._take(separator)
            name = self.value()
            if not isinstance(name, str):
                raise ValueError(f"{name!r:.60} is the key of an object; expected text")  # noqa: TRY004 -- as for all faults
            self._take(":")
            yield name
            separator = ","
        self._take("}")

    def next(self) -> str:
        """Peek at the next character that is not white space; "" at the end."""
        while True:
            space = _SPACE.match(self._buffer, self._at)
            self._at = space.end() if space else self._at
            if self._at < len(self._buffer) or not self._more(_PIECE):
                return self._buffer[self._at : self._at + 1]

    def value(self) -> Any:
        """Parse and return the next JSON value."""
        self.next()
        nbytes = _PIECE
        while True:
            try:
                value, end = self._scan(self._buffer, self._at)
            except RecursionError:
                raise ValueError("it is nested too deeply") from None
            except json.JSONDecodeError as error:
                if len(self._buffer) - self._at > _LONGEST:
                    raise ValueError(f"a value has more than {_LONGEST} characters") from None
                if not self._more(nbytes):
                    raise ValueError(f"it is not JSON: {error.msg}") from None
            else:
                length = end - self._at
                if self._buffer[end : end + 1] in _BEHIND or not self._more(nbytes):  # a number may continue
                    self._at += length
                    return value
            nbytes *= 2

    def _take(self, character: str) -> None:
        following = self.next()
        if not following.startswith(character):
            raise ValueError(f"{following or 'the end'!r} is there; expected {character!r}")
        self._at += len(character)

    def _more(self, nbytes: int) -> bool:
        """Buffer more of the text; return whether there was any."""
        content = self._reader.upto(self._read, nbytes)
        self._read += len(content)
        self._buffer = self._buffer[self._at :] + self._decode(content, final=not content)
        self._at = 0
        return bool(content)
