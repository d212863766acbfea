"""The directories of Orbax: steps of a run, the items of a step, and which of them are finished.

A step is first written to `STEP.orbax-checkpoint-tmp`, and an item to `ITEM.orbax-checkpoint-tmp` in it. In an object
store, where directories cannot be renamed, the names are the final ones, and a file is written last.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from reshard.core.records.schema import parse
from reshard.core.storage.small import read_small
from reshard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from reshard.core.listing import Listing
    from reshard.core.storage.places import Place

ORBAX = "orbax"
"""The name of the format of files."""

UNFINISHED = ".orbax-checkpoint-tmp"
"""In the name of an unfinished step or item; in older versions a time follows."""

METADATA, MANIFEST = "_METADATA", "manifest.ocdbt"
"""The files that describe the tree of an item, and its database."""

PROCESS = re.compile(r"ocdbt\.process_(\d{1,9})")
"""The directory of the database of one process."""

_LARGEST_JSON = 64 << 20
STEP_METADATA, COMMITTED = "_CHECKPOINT_METADATA", "commit_success.txt"
_NO_ITEMS = {STEP_METADATA, COMMITTED, "orbax.checkpoint"}

_ITEMS = {"default", "items", "params", "state"}
"""Names of items, by which a step of an older version is recognised."""


def is_item(listing: Iterable[str]) -> bool:
    """Return whether a directory with these names has arrays, or is meant to have some."""
    listing = set(listing)
    return bool(listing & {METADATA, MANIFEST}) or any(map(PROCESS.fullmatch, listing))


def is_orbax(here: Listing) -> bool:
    """Return whether a directory is a step or an item of Orbax."""
    if is_item(here.names) or STEP_METADATA in here.names:
        return True
    return any(is_item(here.below(name).names) for name in sorted(_ITEMS.intersection(here.names)))


def unfinished_reason(directory: Place, listing: Collection[str]) -> str:
    """Return why a step, or the one of an item, is not finished, or "".

    A step without any metadata of Orbax, as older versions saved it, is finished once it has its name.
    """
    path = directory.absolute()
    if named := [name for name in (path.name, path.parent.name, *sorted(listing)) if UNFINISHED in name]:
        return f"{named[0]} is the name of an unfinished one"
    if COMMITTED in listing or STEP_METADATA not in listing:
        return ""
    try:
        committed = read_object(directory / STEP_METADATA).get("commit_timestamp_nsecs")
    except SourceError as error:
        return error.message
    return "" if committed else f"it has no {COMMITTED}, and {STEP_METADATA} has no time of its end"


def items_of(directory: Place, listing: Sequence[str]) -> dict[str, tuple[Place, list[str]]]:
    """Return the items with arrays of a step: the directory of each, and the names in it, by name.

    A directory that is an item itself has one, without a name. Other items, such as JSON, are left out. An unfinished
    item is one only if no item is finished.
    """
    if is_item(listing):
        return {"": (directory, list(listing))}
    finished: dict[str, tuple[Place, list[str]]] = {}
    unfinished: dict[str, tuple[Place, list[str]]] = {}
    for name in sorted(listing):
        below = () if name in _NO_ITEMS else (directory / name).names()
        if is_item(below):
            items = unfinished if UNFINISHED in name else finished
            items[name.partition(UNFINISHED)[0]] = directory / name, list(below)
    return finished or unfinished


def read_object(path: Place) -> dict[str, Any]:
    """Return the contents of a JSON file of Orbax, an object without repeated keys.

    Raises:
        SourceError: it is something else, or too large.
    """
    text = read_small(path, "file of metadata", _LARGEST_JSON, SourceError)
    try:
        content = parse(text)
    except ValueError as error:
        raise SourceError(f"{path} is not JSON", code="not-json", facts=[str(error)]) from None
    if not isinstance(content, dict):
        raise SourceError(f"{path} has a JSON {type(content).__name__}; expected an object", code="wrong-type")
    return content
