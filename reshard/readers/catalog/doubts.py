"""Whether a checkpoint that describes its own blocks is complete, and what opening it does not show."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from reshard.errors import SourceError
from reshard.formats.directories import CHECKPOINT2, DCP_FILES
from reshard.formats.entries import RangeReader
from reshard.formats.sets import DCP_INDEX
from reshard.formats.zarr.files import is_of_store
from reshard.readers.catalog.findings import Findings, by_opening
from reshard.readers.catalog.ranked import with_sidecars
from reshard.readers.checkpoint2.metadata import METADATA
from reshard.readers.dcp import BACKEND, COMMON, MTIME_TOLERANCE_NS, rank_of
from reshard.readers.openers import CHECKPOINT2_NAME, DCP_NAME, ORBAX, UNIVERSAL
from reshard.readers.orbax.steps import unfinished_reason
from reshard.readers.pickles import Pairs, PickledObject, numbers, unpickled
from reshard.readers.zarr import open_store, store_notes
from reshard.source.made import made_of

if TYPE_CHECKING:
    from reshard.readers.catalog.walk import Directory
    from reshard.readers.openers import Opener
    from reshard.source.checkpoint import Checkpoint
    from reshard.storage.places import Place

_STORAGE = "_StorageInfo"
"""The class of the records of PyTorch's data files."""


def described_findings(directory: Directory, opener: Opener) -> Findings:
    """Return whether the checkpoint in a directory is complete, given its opener."""
    root, names = directory.place, directory.names
    if opener.format == ORBAX and (reason := unfinished_reason(root, names)):
        return Findings("incomplete", reason)
    if opener.format == UNIVERSAL and (reason := _lacks_states(directory.below["zero"])):
        return Findings("incomplete", reason)

    def look() -> Findings:
        result = _by_metadata(directory) if opener.format == DCP_NAME else None
        return result or by_opening(partial(opener.opens, contents=False), root, partial(_doubt, directory, opener))

    return with_sidecars(directory, look)


def _doubt(directory: Directory, opener: Opener, checkpoint: Checkpoint) -> str:
    """Return why a checkpoint that can be opened may lack something, or ""."""
    if opener.format == DCP_NAME and (COMMON in directory.files) != (BACKEND in directory.files):
        return f"Megatron-Core writes both {COMMON} and {BACKEND}"
    if opener.format == DCP_NAME and DCP_INDEX in directory.files and _newer(directory):
        return f"files changed after {DCP_INDEX}, which comes last"
    if opener.format == CHECKPOINT2_NAME and METADATA not in directory.files:
        kinds = {match["kind"] for match in map(CHECKPOINT2.files.fullmatch, directory.files) if match}
        return f"has only {kinds.pop()} files, and nothing says whether there were others" if len(kinds) == 1 else ""
    return _encoded_files(directory, checkpoint) if opener.format == ORBAX else ""


def _by_metadata(directory: Directory) -> Findings | None:
    """Return that a DCP of PyTorch is complete if the sizes and times of its files show it; else None.

    To open it takes several times as long, since each block has a header.
    """
    files = directory.files
    is_plain = (COMMON in files) == (BACKEND in files) and not any(name.endswith(".metadata.tmp") for name in files)
    ends = _ends(directory.place / DCP_INDEX) if is_plain and DCP_INDEX in files else {}
    if not ends or ends.keys() != set(filter(DCP_FILES[_STORAGE].fullmatch, files)):
        return None
    if any(end > files[name].nbytes for name, end in ends.items()) or _newer(directory):
        return None
    return Findings("complete", "", len(set(map(rank_of, ends))))


def _newer(directory: Directory) -> bool:
    """Return whether data files of a DCP are newer than its metadata."""
    latest = directory.files[DCP_INDEX].modified + MTIME_TOLERANCE_NS / 1e9
    data = filter(DCP_FILES[_STORAGE].fullmatch, directory.files)
    return any(directory.files[name].modified > latest for name in data)


def _ends(index: Place) -> dict[str, int]:
    """Return the end of the items of each file by the metadata of a DCP; {} if files may have headers."""
    ends: dict[str, int] = {}
    last: dict[str, int] = {}
    with suppress(SourceError):
        content = unpickled(RangeReader(str(index), window=0), "the metadata of a DCP")
        items = content.field("storage_data") if isinstance(content, PickledObject) else None
        for _, info in items.items() if isinstance(items, Pairs) else ():
            is_known = isinstance(info, PickledObject) and info.name == _STORAGE
            name, *extent = info.fields("relative_path", "offset", "length") if is_known else (None,)
            if not isinstance(name, str):
                return {}
            begin, nbytes = numbers(extent)
            ends[name], last[name] = max(ends.get(name, 0), begin + nbytes), max(last.get(name, 0), begin)
        return ends if all(last.values()) else {}  # an item behind another one is in a file without a header
    return {}


def _lacks_states(zero: Directory) -> str:
    """Return which parameter of a Universal Checkpoint lacks a file, or "".

    A frozen parameter has only its weights.
    """
    files = {name: {*parameter.files} for name, parameter in zero.below.items()}
    union = set[str]().union(*files.values())
    for name, present in files.items():
        if present not in (union, {"fp32.pt"}):
            return f"zero/{name} has no {min(union - present)}"
    return ""


def store_findings(directory: Directory) -> Findings:
    """Return whether a zarr store is complete: in a store of another program, chunks may be absent."""

    def doubt(checkpoint: Checkpoint) -> str:
        if not store_notes(directory.place):
            return "an absent chunk of a zarr store stands for its fill value"
        recorded = made_of(directory.place)
        return "" if recorded and recorded.is_as_noted() else _encoded_files(directory, checkpoint)

    return by_opening(partial(open_store, directory.place), directory.place, doubt)


def _encoded_files(directory: Directory, checkpoint: Checkpoint) -> str:
    """Return why truncated chunks would not be noticed, or "".

    The lengths of encoded files are recorded nowhere.
    """
    if checkpoint.coding is None or not any(any(map(is_of_store, each.files)) for each in directory.every_directory()):
        return ""
    return "its chunks are compressed, so that their sizes do not show whether they are whole"
