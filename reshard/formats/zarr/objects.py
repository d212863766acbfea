"""Groups and stores that a program has opened with zarr."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dask.array as da

from reshard.dtypes import BY_NAME, INT4, STR
from reshard.errors import SourceError, UsageError
from reshard.formats.zarr.layout import ATTRIBUTES, CARRIED

if TYPE_CHECKING:
    import zarr
    from zarr.abc.store import Store

_OTHER = {INT4.name, STR.name, *(name for name, dtype in BY_NAME.items() if dtype.bits)}
"""The dtypes that numpy does not have."""


def local_path(store: zarr.Group | Store) -> str | None:
    """Return the path of a store, or of a group in one; None if it is not in a local directory."""
    from zarr.abc.store import Store
    from zarr.storage import LocalStore

    store, path = (store, "") if isinstance(store, Store) else (store.store, store.path)
    return str(store.root / path) if isinstance(store, LocalStore) else None


def arrays_of(group: zarr.Group) -> tuple[dict[str, da.Array], dict[str, str]]:
    """Return the arrays of a group by the names of their tensors, and why others cannot be read.

    Raises:
        SourceError: notes of this program are damaged.
    """
    from zarr import Array

    arrays: dict[str, da.Array] = {}
    unreadable: dict[str, str] = {}
    is_own = ATTRIBUTES in group.attrs
    for path, array in group.members(max_depth=None):
        if not isinstance(array, Array) or (is_own and path == CARRIED):
            continue
        notes: Any = array.attrs.get(ATTRIBUTES, {})
        if not isinstance(notes, dict):
            raise SourceError(f"array {path!r} of {group} has notes of reshard that are no object", code="bad-metadata")
        name = notes.get("name", path)
        if not isinstance(name, str) or name in arrays or name in unreadable:
            raise SourceError(f"{group} has a second tensor {name!r}, or its name is not text", code="bad-name")
        try:
            arrays[name] = _as_noted(da.from_zarr(array), notes.get("dtype"))
        except UsageError as error:
            unreadable[name] = error.message
    return arrays, unreadable


def _as_noted(array: da.Array, name: object) -> da.Array:
    """Return an array as the dtype that reshard noted: zarr stores the bits of bfloat16, which it lacks, as integers.

    Raises:
        UsageError: numpy lacks the dtype, too.
        SourceError: there is no such dtype, or it has another width.
    """
    if name is None or name == array.dtype.name:
        return array
    name = str(name)
    if name in _OTHER:
        raise UsageError(f"is {name}", code="bad-array", hint="open the store by its path or URL")
    dtype = BY_NAME.get(name)
    if dtype is None or dtype.itemsize != array.dtype.itemsize:
        raise SourceError(f"an array of {array.dtype} has the noted dtype {name!r}", code="wrong-dtype")
    return array.view(dtype.numpy())
