"""Whether a DCP is complete, by its metadata and the sizes and times of its files."""

from __future__ import annotations

import re
from hashlib import sha256
from itertools import chain
from math import prod
from typing import TYPE_CHECKING

from reshard.core.model.entries import RangeReader
from reshard.core.model.findings import Findings
from reshard.errors import SourceError
from reshard.formats.dcp.metadata import DCPMetadata, metadata_files
from reshard.formats.dcp.names import DCP_FILES, DCP_INDEX, rank_of
from reshard.formats.dcp.reader import MTIME_TOLERANCE_NS
from reshard.kits.torch.names import BACKEND, COMMON
from reshard.kits.torch.pickles import MOST_BYTES

if TYPE_CHECKING:
    from reshard.core.model.findings import Directory

_STORAGE = "_StorageInfo"
"""The class of the records of PyTorch's data files."""

_SAVE_RECORD = b"\x8c\x0bStorageMeta\x94\x93\x94)\x81\x94}\x94("
_SAVE = re.compile(
    re.escape(_SAVE_RECORD) + rb"\x8c\rcheckpoint_id\x94.{0,10000}?\x8c\x07save_id\x94\x8c\$.{36}", re.DOTALL
)
"""The beginning of a pickled `StorageMeta` of PyTorch: the path and the identifier of the save."""

_MOST_KNOWN = 8
_KNOWN_ENDS: dict[bytes, dict[str, int]] = {}
"""The end of the items of each file, by the digest of the metadata."""


def doubt_of(directory: Directory) -> str:
    """Return why a checkpoint that can be opened may lack something, or ""."""
    if (COMMON in directory.files) != (BACKEND in directory.files):
        return f"Megatron-Core writes both {COMMON} and {BACKEND}"
    if DCP_INDEX in directory.files and _newer(directory):
        return f"files changed after {DCP_INDEX}, which comes last"
    return ""


def by_metadata(directory: Directory) -> Findings | None:
    """Return that a DCP of PyTorch is complete if metadata, sizes and times show it; else None.

    To open it takes several times as long, since each block has a header.
    """
    files = directory.files
    if DCP_INDEX not in files or doubt_of(directory) or any(name.endswith(".metadata.tmp") for name in files):
        return None
    try:
        ends = _ends_by_metadata(directory)
    except SourceError:
        return None  # to open it says why
    if not ends or ends.keys() != set(filter(DCP_FILES[_STORAGE].fullmatch, files)):
        return None
    if any(end > files[name].nbytes for name, end in ends.items()):
        return None
    return Findings("complete", "", len(set(map(rank_of, ends))))


def _ends_by_metadata(directory: Directory) -> dict[str, int]:
    """Return the end of the items of each file of a DCP; {} if its metadata do not place all elements.

    The steps of a run have equal metadata, apart from the path and the identifier of the save, and reading them takes
    17 us a block. So the results are cached by a digest of the rest.
    """
    reader = RangeReader(str(directory.place / DCP_INDEX), window=0)
    if reader.size > MOST_BYTES or metadata_files(directory.place, directory.names) != [DCP_INDEX]:
        return {}
    content = reader.upto(0, reader.size)
    save = _SAVE.match(content, content.rfind(_SAVE_RECORD))
    start, stop = save.span() if save else (0, 0)
    digest = sha256(content[:start] + content[stop:]).digest()
    ends = _KNOWN_ENDS.get(digest)
    if ends is None:
        metadata = DCPMetadata(directory.place, directory.names, content=content)
        ends = _ends(metadata) if _places_all(metadata) else {}
        if len(_KNOWN_ENDS) >= _MOST_KNOWN:
            _KNOWN_ENDS.clear()
        _KNOWN_ENDS[digest] = ends
    return ends


def _newer(directory: Directory) -> bool:
    """Return whether data files of a DCP are newer than its metadata."""
    latest = directory.files[DCP_INDEX].modified + MTIME_TOLERANCE_NS / 1e9
    data = filter(DCP_FILES[_STORAGE].fullmatch, directory.files)
    return any(directory.files[name].modified > latest for name in data)


def _places_all(metadata: DCPMetadata) -> bool:
    """Return whether metadata name a place in the files for all elements of each tensor, which are not encoded."""
    for name, tensor in metadata.tensors.items():
        items = metadata.items.get(name, ())
        lacking = {offsets for offsets, extents in tensor.boxes if prod(extents)}.difference(
            item.offsets for item in items
        )
        size = sum(prod(extents) for _, extents in tensor.boxes)
        if lacking or size != prod(tensor.shape) or not tensor.dtype or any(item.encoding for item in items):
            return False
    return bool(metadata.tensors)


def _ends(metadata: DCPMetadata) -> dict[str, int]:
    """Return the end of the items of each file of a DCP; {} if files may have headers."""
    ends: dict[str, int] = {}
    last: dict[str, int] = {}
    for item in chain.from_iterable(metadata.items.values()):
        ends[item.file] = max(ends.get(item.file, 0), item.begin + item.nbytes)
        last[item.file] = max(last.get(item.file, 0), item.begin)
    return ends if all(last.values()) else {}  # an item behind another one is in a file without a header
