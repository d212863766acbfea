"""MindSpore `.ckpt` files: a sequence of protobuf `Checkpoint` messages.

Each message contains a tensor or a part of one. It is described in `proto/checkpoint.proto`; here its bytes are read
and written directly. Indexing scans the varints and seeks over the contents: for 1 GB it takes 1 ms, but parsing the
message takes 1 s and 2.3 GB.

* A tensor over 512 MiB is several messages with the same tag and the full dims, cut at exactly 536,870,912 bytes,
  in the middle of a row; asynchronous saves cut by rows. Any cut is read; cuts at 512 MiB are written.
* Scalars have dims `[]`; in older files, dims `[0]` with one element.
* `str` entries hold UTF-32 text with dims `[0]`.
* The file may end with `crc_num` and ten bytes, big-endian: the CRC-32 of all bytes before.

Source: MindSpore 2.10 `train/serialization.py` (`_exec_save`, `_write_parameter_data`, `_parse_ckpt_proto`).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.layout.block import LONGEST_NAME, MOST_DIMS, is_possible, shape_text
from reshard.core.model.entries import Entry, FileIndex, FileLayout, Summed
from reshard.core.storage.base import truncated
from reshard.core.storage.decryption import MAGICS
from reshard.dtypes import BY_MINDSPORE, STR
from reshard.errors import EncryptedError, Option, SourceError, Text, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.entries import Content, RangeReader, Runs
    from reshard.core.storage.base import ReadStore
    from reshard.dtypes import DType

NAME = "ckpt"
EXTENSION = ".ckpt"

PART_BYTES = 512 * 1024 * 1024
"""The maximum contents of one message, as MindSpore writes it."""

TRAILER = b"crc_num"
TRAILER_BYTES = len(TRAILER) + 10
MAP_PARAMETER = "is a map parameter (a hash table), which has no layout"
_LONGEST_TEXT = 1 << 24

_VARINT, _BYTES = 0, 2  # protobuf wire types
_FIXED_BYTES = {1: 8, 5: 4}  # of other wire types


def recognizes(start: bytes, size: int) -> bool:
    """Return whether a file is `.ckpt`, plain or encrypted.

    It begins with a message, the trailer of an empty file, or the magic of an encrypted block.
    """
    if int.from_bytes(start[:4], "little") in MAGICS or start.startswith(TRAILER):
        return True
    return size > 2 and start[0] == 0x0A  # field 1 of Checkpoint: a Value


def index(reader: RangeReader) -> FileIndex:
    """Return the index of a `.ckpt` file.

    Raises:
        SourceError: the file is encrypted, truncated, or not of MindSpore's format; the message gives the byte.
    """
    if cipher := MAGICS.get(int.from_bytes(reader.upto(0, 4), "little")):
        raise EncryptedError(
            f"{reader.path} is encrypted ({cipher})",
            code="encrypted",
            hint=Text("open it with its key: ", Option("key", cipher)),
        )
    end, sums = reader.size, None
    if end >= TRAILER_BYTES and reader.read(end - TRAILER_BYTES, len(TRAILER)) == TRAILER:
        sums = Trailer(end, int.from_bytes(reader.read(end - 10, 10), "big"))
        end -= TRAILER_BYTES
    parts: dict[str, list[_Value]] = {}
    unreadable: dict[str, str] = {}
    last = ""
    for field in _fields(reader, 0, end):
        if field[1:3] != (1, _BYTES):
            raise _unknown_field(reader, field, "checkpoint")
        name, value = _value(reader, *field[3:])
        if (name in parts or name in unreadable) and (name != last or isinstance(value, str)):
            raise SourceError(
                f"{reader.path} has tensor {name!r} twice, again at byte {field.position}", code="duplicate-name"
            )
        if isinstance(value, str):
            unreadable[name] = value
            last = ""
            continue
        parts.setdefault(name, []).append(value)
        last = name
        if value[:2] != parts[name][0][:2]:
            types = [f"{part.dtype} {shape_text(part.dims)}" for part in (parts[name][0], value)]
            raise SourceError(
                f"{reader.path} has pieces of several types of tensor {name!r}",
                code="corrupt",
                facts=[f"the first is {types[0]}, that at byte {field.start} is {types[1]}"],
            )
    entries = {}
    for name, values in parts.items():
        try:
            entries[name] = _entry(reader, values)
        except SourceError as error:
            unreadable[name] = error.message
    return FileIndex(NAME, entries, crc=sums and sums.crc, unreadable=tuple(unreadable.items()), sums=sums)


def map_parameters(path: str, index: FileIndex, selects: Callable[[str], object] = bool) -> list[str]:
    """Return the names of map parameters of a file.

    Args:
        path: the file, for messages.
        index: its index.
        selects: whether an entry is needed, by its name.

    Raises:
        SourceError: another entry cannot be read, and is needed.
    """
    for name, reason in index.unreadable:
        if reason != MAP_PARAMETER and selects(name):
            raise SourceError(f"{path}: tensor {name!r} {reason}", code="unreadable-tensor")
    return [name for name, reason in index.unreadable if reason == MAP_PARAMETER]


class Trailer(NamedTuple):
    """The CRC-32 at the end of a file, of all bytes before it.

    Attributes:
        nbytes: the size of the file.
        crc: the stored checksum.
    """

    nbytes: int
    crc: int

    def read(self, path: str, store: ReadStore) -> Iterator[Summed]:  # noqa: ARG002 -- the interface of `Sums`
        """Yield the whole file as the only part."""
        yield Summed("", (0, self.nbytes), (("all before crc_num", ((0, self.nbytes - TRAILER_BYTES),), self.crc),))


class _Value(NamedTuple):
    """The contents of one message: a tensor or a part of one."""

    dims: Shape
    dtype: DType
    run: tuple[int, int]


def _entry(reader: RangeReader, parts: Sequence[_Value]) -> Entry:
    """Return the entry of a tensor, whose messages have the same dims and dtype.

    Raises:
        SourceError: it cannot be read; the message is a predicate.
    """
    shape, dtype, _ = parts[0]
    nbytes = sum(part.run[1] for part in parts)
    runs = tuple(part.run for part in parts if part.run[1])
    if dtype is STR:
        return Entry(STR, shape, runs, _text(reader, runs, nbytes))
    if shape == (0,) and nbytes == dtype.itemsize:
        shape = ()  # a scalar in an older file
    if nbytes != prod(shape) * dtype.itemsize:
        expected = f"{prod(shape) * dtype.itemsize} for {dtype} {shape_text(shape)}"
        raise SourceError(f"has {nbytes} bytes; expected {expected}", code="wrong-size")
    return Entry(dtype, shape, runs)


def _text(reader: RangeReader, runs: Runs, nbytes: int) -> str:
    if nbytes > _LONGEST_TEXT:
        raise SourceError(f"is a text of {nbytes} bytes; at most {_LONGEST_TEXT} are read", code="too-large")
    try:
        # numpy pads text with zeros; MindSpore returns it without them.
        return b"".join(reader.read(*run) for run in runs).decode("utf-32-le").rstrip("\0")
    except UnicodeDecodeError as error:
        raise SourceError(f"is a text that is not UTF-32: {error.reason}", code="bad-text") from None


def _value(reader: RangeReader, position: int, end: int) -> tuple[str, _Value | str]:
    """Read a Value message, seeking over the contents; return its name, and its value or why it cannot be read."""
    fields: dict[int, tuple[int, int]] = {}
    for field in _fields(reader, position, end):
        if field.number not in {1, 2, 3} or field.wire != _BYTES or field.number in fields:
            raise _unknown_field(reader, field, "tensor of a checkpoint")
        fields[field.number] = field.start, field.stop
    name = _string(reader, *fields[1], "name") if 1 in fields else ""
    if name and 3 in fields and 2 not in fields:
        return name, MAP_PARAMETER
    if name and 3 in fields:
        raise SourceError(f"{reader.path} has {name!r} as a tensor and as a map parameter", code="corrupt")
    dims, kind, run = _tensor(reader, *fields[2]) if 2 in fields else ((), None, None)
    if name and not is_possible(dims):
        return name, f"has the impossible shape {shape_text(dims)}"
    if not name or kind is None or run is None:
        missing = "name" if not name else "tensor" if 2 not in fields else "tensor_type or tensor_content"
        raise SourceError(
            f"{reader.path} is not a MindSpore checkpoint",
            code="not-a-checkpoint",
            facts=[f"the message that ends at byte {end} has no {missing}"],
        )
    dtype = BY_MINDSPORE.get(kind)
    return name, f"has unknown type {kind!r:.60}" if dtype is None else _Value(dims, dtype, run)


def _tensor(reader: RangeReader, position: int, end: int) -> tuple[Shape, str | None, tuple[int, int] | None]:
    """Read a TensorProto message; return dims, type, and the byte range of the contents."""
    dims: list[int] = []
    kind = run = None
    for field in _fields(reader, position, end):
        start, stop = field.start, field.stop
        if field.number == 1 and field.wire in {_VARINT, _BYTES}:  # proto3 packs all into one field
            while start < stop and len(dims) <= MOST_DIMS:
                extent, start = _varint(reader, start, stop)
                dims.append(extent - (extent >> 63 << 64))
        elif (field.number, field.wire) == (2, _BYTES) and kind is None:
            kind = _string(reader, start, stop, "type")
        elif (field.number, field.wire) == (3, _BYTES) and run is None:
            run = (start, stop - start)
        else:
            raise _unknown_field(reader, field, "tensor of a checkpoint")
    return tuple(dims), kind, run


class _Field(NamedTuple):
    """A field of a message: where it begins, its number and wire type, and the range of its value."""

    position: int
    number: int
    wire: int
    start: int
    stop: int


def _unknown_field(reader: RangeReader, field: _Field, where: str) -> SourceError:
    """Return an error for an unknown field.

    Skipping it, as protobuf does, could lose a tensor because of one flipped bit.
    """
    return SourceError(
        f"{reader.path} has an unknown or repeated field {field.number} in a {where}, at byte {field.position}",
        code="unknown-field",
        facts=["the file is corrupt, or of a MindSpore newer than this program"],
    )


def _fields(reader: RangeReader, position: int, end: int) -> Iterator[_Field]:
    """Yield the fields of a message."""
    while position < end:
        key, start = _varint(reader, position, end)
        wire = key & 7
        if wire == _VARINT:
            stop = _varint(reader, start, end)[1]
        elif wire == _BYTES:
            length, start = _varint(reader, start, end)
            stop = start + length
        elif wire in _FIXED_BYTES:
            stop = start + _FIXED_BYTES[wire]
        else:
            raise SourceError(
                f"{reader.path} is corrupt, or not a MindSpore checkpoint",
                code="corrupt",
                facts=[f"{key:#x} at byte {position} begins no field"],
            )
        if stop > end == reader.size:
            raise truncated(reader.path, end, stop)
        if stop > end:
            raise SourceError(
                f"{reader.path} is corrupt",
                code="corrupt",
                facts=[f"the field at byte {position} has {stop - start} bytes, of which {end - start} are left"],
            )
        yield _Field(position, key >> 3, wire, start, stop)
        position = stop


def _varint(reader: RangeReader, position: int, end: int) -> tuple[int, int]:
    """Return an unsigned varint and its end."""
    content = reader.read(position, min(10, end - position))
    value = 0
    for count, byte in enumerate(content):
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, position + count + 1
    raise SourceError(
        f"{reader.path} is truncated or corrupt",
        code="truncated",
        facts=[f"the number at byte {position} does not end"],
    )


def _string(reader: RangeReader, start: int, stop: int, what: str) -> str:
    if stop - start > LONGEST_NAME:
        raise SourceError(
            f"{reader.path} has a {what} of {stop - start} bytes at byte {start}; at most {LONGEST_NAME} are read",
            code="name-too-long",
        )
    try:
        return reader.read(start, stop - start).decode()
    except UnicodeDecodeError:
        raise SourceError(f"{reader.path} has a {what} that is not UTF-8, at byte {start}", code="bad-name") from None


def lay_out(contents: Sequence[Content], metadata: Mapping[str, str]) -> FileLayout:  # noqa: ARG001 -- the format has none
    """Return the layout of a `.ckpt` file: offsets of contents, and the bytes between.

    Args:
        contents: the tensors, in the order of the messages.
        metadata: not stored; the format has no field for it.

    Raises:
        UsageError: a tensor has no name, or a dtype that MindSpore lacks.
    """
    literals: list[tuple[int, bytes]] = []
    laid_out: list[Content] = []
    position = 0
    for content in contents:
        if not content.name:
            raise UsageError(
                "a .ckpt file cannot hold a tensor without a name",
                code="bad-name",
                hint="rename the tensor, or write safetensors",
            )
        if content.dtype.mindspore is None:
            raise UsageError(
                f"a .ckpt file cannot hold tensor {content.name!r}, which is {content.dtype}",
                code="unsupported-dtype",
                hint="write safetensors",
            )
        # Empty text is stored as one zero, as in numpy: MindSpore cannot load an entry without contents.
        text = None if content.text is None else content.text.encode("utf-32-le") or bytes(4)
        nbytes = prod(content.shape) * content.dtype.itemsize if text is None else len(text)
        runs: list[tuple[int, int]] = []
        for begin in range(0, nbytes, PART_BYTES) or (0,):
            length = min(PART_BYTES, nbytes - begin)
            head = _message_head(content, length)
            literals.append((position, head if text is None else head + text))
            position += len(head)
            if length and text is None:
                runs.append((position, length))
            position += length
        laid_out.append(content._replace(runs=tuple(runs)))
    return FileLayout(position, tuple(literals), tuple(laid_out))


def _message_head(content: Content, length: int) -> bytes:
    """Return the bytes of a message before its contents, which are its last field."""
    shape = content.shape if content.text is None else (0,)
    dims = b"".join(b"\x08" + encode_varint(extent) for extent in shape)
    kind = (content.dtype.mindspore or "").encode()
    tensor = dims + b"\x12" + encode_varint(len(kind)) + kind + b"\x1a" + encode_varint(length)
    name = content.name.encode()
    value = b"\x0a" + encode_varint(len(name)) + name + b"\x12" + encode_varint(len(tensor) + length) + tensor
    return b"\x0a" + encode_varint(len(value) + length) + value


def encode_varint(value: int) -> bytes:
    r"""Encode an unsigned integer as protobuf does.

    >>> encode_varint(300)
    b'\xac\x02'
    """
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
