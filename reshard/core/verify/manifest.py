"""Manifests: the sizes of files, and checksums of tensors and all other bytes.

A manifest accompanies files that leave the machine: they can be checked with it alone, without a strategy. Its JSON:

    {"reshard_manifest": 2,
     "files": {
       "rank_0/checkpoint_0.ckpt": {
         "nbytes": 8237, "crc32c": "0d4f5e11", "tensors": {"w": ["float32", [2, 8], "8a9136aa"]}},
       "param_name_map.json": {"nbytes": 312, "crc32c": "62a8ab43"}}}

with paths below the directory, and the CRC-32C of the contents of each tensor in the file, row-major, little-endian, or
of the UTF-8 bytes of a `str` entry. The `crc32c` of the file covers all its bytes outside of tensor contents, from
first to last: the header with all notes, `str` entries as they are stored, padding and trailers; so every bit of a file
has a checksum. A file without tensors (the index of a set) has only this one.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from reshard.arguments import checked
from reshard.core.layout.block import LONGEST_NAME
from reshard.core.records.schema import FormatError, Kind, read
from reshard.core.storage.places import as_place
from reshard.core.storage.small import parse_json, read_small, refuse_existing, write_whole
from reshard.dtypes import BY_NAME, DType
from reshard.errors import Faults, SourceError, names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from reshard.core.layout.block import Shape
    from reshard.core.storage.places import AnyName

VERSION = 2

_VERSION_KEY = "reshard_manifest"
_LARGEST = 1 << 28
_MOST_DIMS = 64


def _is_sum(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{8}", value) is not None


def _is_shape(value: object) -> bool:
    return (
        isinstance(value, list) and len(value) <= _MOST_DIMS and all(type(n) is int and 0 <= n < 1 << 62 for n in value)
    )


_Size = Annotated[int, Kind("a size in bytes", lambda value: type(value) is int and 0 <= value < 1 << 62)]
_Sum = Annotated[int, Kind("a CRC-32C, such as '8a9136aa'", _is_sum, lambda value: int(value, 16))]
_Shape = Annotated[tuple[int, ...], Kind("a shape, such as [2, 8]", _is_shape, tuple)]
_DType = Annotated[
    DType, Kind("a dtype", lambda value: isinstance(value, str) and value in BY_NAME, lambda value: BY_NAME[value])
]


class PartSum(NamedTuple):
    """The part of a tensor in a file: dtype, shape and the CRC-32C of the bytes."""

    dtype: _DType
    shape: _Shape
    crc32c: _Sum


@dataclass(frozen=True, slots=True)
class FileSums:
    """The size and the checksums of a file.

    Attributes:
        nbytes: its size.
        crc32c: the CRC-32C of all bytes outside of tensor contents.
        tensors: the part of each tensor in it.
    """

    nbytes: _Size
    crc32c: _Sum
    tensors: dict[str, PartSum] = field(default_factory=dict)

    @property
    def checksums(self) -> int:
        """Return the number of checksums: one of each tensor, and one of the rest."""
        return len(self.tensors) + 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """The sizes and checksums of checkpoint files, by path below the directory.

    Raises:
        SourceError: a path leads out of the directory.

    >>> manifest = reshard.Manifest.make("src_checkpoints")
    >>> manifest.files["rank_0/checkpoint_0.ckpt"].nbytes
    12445
    >>> manifest.write("sums.json")
    128
    >>> reshard.Manifest.read("sums.json") == manifest
    True
    """

    files: Mapping[str, FileSums]

    def __post_init__(self) -> None:
        check_paths(self.files)

    @staticmethod
    def make(target: AnyName, **options: Any) -> Manifest:
        """Read the files of a checkpoint, and return their manifest; see `make_manifest`."""
        from reshard.core.verify.manifest_files import make_manifest  # above this module

        return make_manifest(target, **options)

    @staticmethod
    def read(path: AnyName) -> Manifest:
        """Read and validate a manifest, which may be at a URL; see `read_manifest`."""
        return read_manifest(path)

    def write(self, path: AnyName, *, overwrite: bool = False) -> int:
        """Write it as JSON, and return the number of checksums in it; see `write_manifest`."""
        return write_manifest(self, path, overwrite=overwrite)

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Mapping[str, tuple[DType, Shape, int]]],
        nbytes: Mapping[str, int],
        crc32c: Mapping[str, int],
    ) -> Manifest:
        """Build a manifest from checksums of blocks, such as those that a run combined.

        Args:
            tensors: by checkpoint file and tensor: dtype, shape and CRC-32C.
            nbytes: the size of each file.
            crc32c: by file: the CRC-32C of all bytes outside of tensor contents.

        >>> from reshard.dtypes import BFLOAT16
        >>> made = Manifest.of({"a.ckpt": {"w": (BFLOAT16, (2,), 7)}}, {"a.ckpt": 100, "i": 3}, {"a.ckpt": 8, "i": 9})
        >>> made.files["a.ckpt"].tensors["w"].crc32c, made.files["i"]
        (7, FileSums(nbytes=3, crc32c=9, tensors={}))
        """
        files = {
            path: FileSums(size, crc32c[path], {name: PartSum(*part) for name, part in tensors.get(path, {}).items()})
            for path, size in nbytes.items()
        }
        return cls(dict(sorted(files.items())))

    @property
    def checksums(self) -> int:
        """Return the number of checksums of all files."""
        return sum(file.checksums for file in self.files.values())

    def __repr__(self) -> str:
        """Describe the manifest on one line.

        >>> Manifest({"a": FileSums(8, 0x62A8AB43)})
        <Manifest: 1 file, 8 bytes, 0 checksums of tensors>
        """
        count = len(self.files)
        sums = sum(len(file.tensors) for file in self.files.values())
        nbytes = sum(file.nbytes for file in self.files.values())
        return f"<Manifest: {count} file{'s' * (count != 1)}, {nbytes} bytes, {sums} checksums of tensors>"


@checked
def write_manifest(
    manifest: Manifest | Iterable[tuple[str, FileSums]], path: AnyName, *, overwrite: bool = False
) -> int:
    """Write a manifest as JSON, a line per file; the output is deterministic.

    Args:
        manifest: the manifest, or an iterator of its items, sorted by path.
        path: the path or URL to write to. It appears only when it is complete.
        overwrite: replace an existing file.

    Returns:
        the number of checksums in it.

    Raises:
        SourceError: a path leads out of the directory.
        TargetError: the file exists, or cannot be written.

    >>> reshard.Manifest.make("src_checkpoints").write("sums.json")
    128
    >>> bool(reshard.verify("src_checkpoints", manifest="sums.json"))
    True
    """
    count = 0

    def lines() -> Iterator[bytes]:
        nonlocal count
        yield f'{{"{_VERSION_KEY}": {VERSION},\n"files": {{\n'.encode()
        between = ""
        for name, file in manifest.files.items() if isinstance(manifest, Manifest) else manifest:
            check_paths([name])
            count += file.checksums
            yield f"{between}{json.dumps(name)}: {json.dumps(_file_data(file))}".encode()
            between = ",\n"
        yield b"\n}}\n"

    refuse_existing(path, overwrite=overwrite)
    write_whole(path, lines())
    return count


def check_paths(paths: Iterable[str]) -> None:
    """Raise `SourceError` if a path leads out, is too long, or has control characters."""
    faults = Faults("manifest")
    _check_paths(paths, faults)
    faults.raise_if_any(SourceError)


def _file_data(file: FileSums) -> dict[str, object]:
    data: dict[str, object] = {"nbytes": file.nbytes, "crc32c": f"{file.crc32c:08x}"}
    if file.tensors:
        data["tensors"] = {
            name: [part.dtype.name, list(part.shape), f"{part.crc32c:08x}"] for name, part in file.tensors.items()
        }
    return data


@checked
def read_manifest(path: AnyName) -> Manifest:
    """Read and validate a manifest, which may be at a URL.

    Raises:
        SourceError: it cannot be read, is not a manifest, has another version, or has paths that lead out of the
            directory.

    >>> count = reshard.Manifest.make("src_checkpoints").write("sums.json")
    >>> len(reshard.Manifest.read("sums.json").files)
    8
    """
    faults = Faults(f"manifest {path}")
    repeated: list[str] = []
    raw = read_small(as_place(path), "manifest", _LARGEST, SourceError)
    try:
        content = parse_json(raw, repeated)
    except ValueError as error:
        raise SourceError(f"manifest {path} is not JSON", code="not-json", facts=[str(error)]) from None
    if repeated:
        faults.add("$", f"has {names(repeated, most=3)} twice in one object", code="duplicate-key")
    if not isinstance(content, dict) or _VERSION_KEY not in content:
        raise SourceError(
            f"{path} is not a manifest",
            code="not-a-manifest",
            facts=[f"expected a JSON object with the key {_VERSION_KEY!r}"],
        )
    version = content[_VERSION_KEY]
    if type(version) is not int or version != VERSION:
        advice = "make it again from files that are valid" if version == 1 else "use a newer reshard"
        raise SourceError(
            f"manifest {path} has version {version!r:.40}; expected {VERSION}", code="unsupported-version", hint=advice
        )
    items = content.get("files")
    if not isinstance(items, dict) or len(content) != 2:
        raise SourceError(
            f"manifest {path} is not valid",
            code="bad-manifest",
            facts=["expected an object of paths under the key 'files', and no other key"],
        )
    _check_paths(items, faults)
    files: dict[str, FileSums] = {}
    for name, item in items.items():
        try:
            files[name] = read(FileSums, item, f"$.files[{name!r:.200}]")
        except FormatError as error:
            is_tensor = "].tensors[" in error.path
            faults.add(error.path, error.problem, code="bad-tensor" if is_tensor else "bad-entry")
            continue
        for tensor in filter(_is_long, files[name].tensors):
            fault = f"is a name of {len(tensor)} characters; names have at most {LONGEST_NAME} bytes"
            faults.add(f"$.files[{name!r:.200}].tensors[{tensor!r:.200}]", fault, code="name-too-long")
    faults.raise_if_any(SourceError)
    return Manifest(files)


def _is_long(name: str) -> bool:
    return len(name) > LONGEST_NAME or len(name.encode(errors="surrogatepass")) > LONGEST_NAME


def _check_paths(paths: Iterable[str], faults: Faults) -> None:
    """Report paths that are not plain paths below a directory."""
    for path in paths:
        if _is_long(path):
            fault = f"has {len(path)} characters; paths have at most {LONGEST_NAME} bytes"
            faults.add(f"path {path!r:.200}", fault, code="name-too-long")
            continue
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or str(pure) != path or not pure.name or not path.isprintable():
            fault = "is not a path below a directory, such as 'rank_0/checkpoint_0.ckpt'"
            faults.add(f"path {path!r:.200}", fault, code="outside-directory")
