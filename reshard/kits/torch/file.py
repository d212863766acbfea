"""Read a file that `torch.save` wrote: its pickled value, and the location of each storage.

Most files are zip archives (`archive`). Before PyTorch 1.6, and on request since, a file is a chain of pickles instead,
with the storages behind them: the number of elements of each, and its bytes (`_legacy_save`). Such a file has no
checksums.

Sources: PyTorch 2.13 `torch/serialization.py` and `torch/csrc/generic/serialization.cpp`, and files that it wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from reshard.core.layout.block import Block
from reshard.core.model.checkpoint import SourceFile
from reshard.core.model.entries import Entry, FileIndex, RangeReader
from reshard.core.storage.places import any_store, in_batches
from reshard.dtypes import BY_NAME
from reshard.errors import SourceError
from reshard.kits.torch.archive import Archive, Archives, RecordReader, ZipPart
from reshard.kits.torch.pickles import Name, Pairs, describe, first_unpickled, unpickled
from reshard.kits.torch.tensors import STORAGES, storage_reference

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.entries import Extent
    from reshard.core.storage.base import ReadStore, Status, Want
    from reshard.core.storage.places import Place
    from reshard.dtypes import DType
    from reshard.kits.torch.pickles import PickledObject
    from reshard.kits.torch.tensors import Rebuilt

NAME = "torch.save"
"""The format of files with several tensors that `torch.save` wrote."""

PICKLE = b"data.pkl"
"""The record of the pickled value in a zip archive."""

_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # the magic number, pickled
_VERSION = 1001
_REMOTE_WINDOW = 1 << 22  # a pickle is read in many pieces; each would be a request


class Storage(NamedTuple):
    """The range of a storage, or of a pickle, in a file, in bytes."""

    begin: int
    nbytes: int


class TorchFile(NamedTuple):
    """A file that `torch.save` wrote.

    Attributes:
        path: its absolute path or URL.
        status: its state when it was read.
        value: the pickled value; see `kits.torch.pickles`.
        pickle: the range of the pickle.
        archive: its zip archive; None for a file in the format before PyTorch 1.6.
        legacy: the storages of such a file, by the name of their record in an archive.
    """

    path: str
    status: Status
    value: Any
    pickle: Storage
    archive: Archive | None
    legacy: Mapping[bytes, Storage]

    @classmethod
    def read(cls, location: Place, expected: str, *, with_value: bool = True, keeps: bool = False) -> TorchFile:
        """Read the pickle of a file.

        Args:
            location: the file.
            expected: the expected content, for messages.
            keeps: keep long texts and values; see `unpickled`.
            with_value: read the value; else it is None, and only the directory of an archive is read.

        Raises:
            SourceError: the file is not complete, or its pickle is not valid.
        """
        path = location.absolute()
        status = path.status()
        reader = RangeReader(str(path), window=_REMOTE_WINDOW if path.can.has_latency else 0)
        if reader.upto(0, len(_LEGACY)) == _LEGACY:
            value, pickle, storages = _legacy(reader, expected, keeps=keeps)
            return cls(str(path), status, value, pickle, None, storages)
        archive = Archive(reader)
        if not with_value:
            return cls(str(path), status, None, Storage(0, 0), archive, {})
        order = archive.content(b"byteorder").upto(0, 16) if b"byteorder" in archive.records else b"little"
        if order.strip() != b"little":
            raise SourceError(f"{path} has the unsupported byte order {order!r}", code="unsupported-byte-order")
        content = archive.content(PICKLE)
        value = unpickled(content, expected, outside=True, keeps=keeps)
        return cls(str(path), status, value, Storage(content.begin, content.size), archive, {})

    def storages(self, records: Collection[bytes]) -> Mapping[bytes, Storage]:
        """Return the ranges of storages, by the name of their record; at URLs, many headers are read at once.

        Raises:
            SourceError: a storage is missing, or its header is wrong.
        """
        if self.archive is None:
            for name in records:
                if name not in self.legacy:
                    raise SourceError(
                        f"{self.path} has no storage {name.decode(errors='replace')!r:.60}", code="corrupt"
                    )
            return self.legacy
        checked = self.archive.checked(dict.fromkeys(records))
        return {name: Storage(record.begin, record.size) for name, record in checked.items()}

    def source_file(self, number: int, entries: Mapping[str, Entry]) -> SourceFile:
        """Return the record of the file as number `number` of a checkpoint, with the entries of its tensors."""
        sums = None if self.archive is None else Archives((ZipPart("", 0, self.status.nbytes),))
        index = FileIndex(NAME, entries, header_id=number, sums=sums)
        return SourceFile(self.path, self.status.nbytes, self.status.mtime_ns, index, self.status.change)


class FileTensor(NamedTuple):
    """A tensor in one file: its dtype, its shape, and the extent of its bytes."""

    dtype: DType
    shape: Shape
    extent: Extent

    @classmethod
    def of(cls, tensor: Rebuilt, file: int, storage: Storage) -> FileTensor:
        """Return a tensor of file number `file`; raise `SourceError` if its storage is too short."""
        if tensor.elements * tensor.dtype.itemsize > storage.nbytes:
            raise SourceError("has a storage that is shorter than the tensor", code="truncated")
        return cls(tensor.dtype, tensor.shape, tensor.extent(file, storage.begin))

    @property
    def begin(self) -> int:
        """Return the offset of its first byte in the file; 0 if it is empty."""
        return self.extent.runs[0][0] if self.extent.runs else 0

    @property
    def entry(self) -> Entry:
        """Return its entry in the index of the file."""
        return Entry(self.dtype, self.shape, self.extent.runs, strides=self.extent.strides)

    def pieces(self) -> Iterator[tuple[Block, Extent]]:
        """Yield the tensor as one block, with its extent."""
        yield Block.whole(self.shape), self.extent


def _legacy(reader: RangeReader, expected: str, *, keeps: bool) -> tuple[Any, Storage, dict[bytes, Storage]]:
    """Return the value of a chain of pickles, the range of its pickle, and the storages behind them."""
    at = len(_LEGACY)
    values = []
    references: Sequence[PickledObject] = ()
    pickle = Storage(0, 0)
    for number, what in enumerate(("a version", "facts about a machine", expected, "a list of storages")):
        part = first_unpickled(RecordReader(reader, at, reader.size - at), what, outside=number == 2, keeps=keeps)
        values.append(part.value)
        if number == 2:
            references, pickle = part.references, Storage(at, part.nbytes)
        at += part.nbytes
    version, machine, value, keys = values
    little = dict(machine.items()).get("little_endian") if isinstance(machine, Pairs) else None
    if version != _VERSION or little is not True:
        _refuse(reader, f"is of version {describe(version)}, or of another byte order")
    sizes = _storage_sizes(reader, references)
    if not (isinstance(keys, list) and all(isinstance(key, str) and key in sizes for key in keys)):
        _refuse(reader, "has a list of storages that its pickle does not describe")
    storages: dict[bytes, Storage] = {}
    for key in keys:
        width, count = sizes[key]
        storages[b"data/" + key.encode()] = Storage(at + 8, count * width)
        at += 8 + count * width
    if len(storages) != len(sizes) or at != reader.size:
        _refuse(reader, f"has {reader.size:,} bytes; its storages end at byte {at:,}")

    def steps() -> Iterator[tuple[tuple[str, bytearray], ReadStore, list[Want]]]:
        for key, storage in zip(keys, storages.values(), strict=True):
            header = bytearray(8)
            yield (key, header), any_store(), [(reader.path, storage.begin - 8, memoryview(header))]

    for key, header in in_batches(steps()):
        if int.from_bytes(header, "little") != sizes[key][1]:
            _refuse(reader, f"has another number of elements in storage {key!r:.60} than its pickle says")
    return value, pickle, storages


def _storage_sizes(reader: RangeReader, references: Sequence[PickledObject]) -> dict[str, tuple[int, int]]:
    """Return the bytes of an element and the number of elements of each storage, by key."""
    sizes: dict[str, tuple[int, int]] = {}
    for reference in references:
        kind, key, count = storage_reference(reference)
        dtype = BY_NAME.get(STORAGES.get(kind.name.removesuffix("Storage"), "")) if isinstance(kind, Name) else None
        if dtype is None or type(count) is not int or not 0 <= count < 1 << 59:
            _refuse(reader, f"has the unsupported storage {describe(key)}")
        if sizes.setdefault(key, (dtype.itemsize, count)) != (dtype.itemsize, count):
            _refuse(reader, f"has storage {key!r:.60} with two sizes")
    return sizes


def _refuse(reader: RangeReader, why: str) -> NoReturn:
    raise SourceError(f"{reader.path} is not a complete file of torch.save", code="corrupt", facts=[f"it {why}"])
