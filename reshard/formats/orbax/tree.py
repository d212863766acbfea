"""The tree that a checkpoint was saved from: `_METADATA`, and the strings in it.

Arrays are stored by the parts of their paths, joined by dots. A dot in a part is not escaped, so that the path is taken
from the metadata, and two arrays may have the same name, which is refused.
"""

from __future__ import annotations

import ast
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.layout.block import LONGEST_NAME
from reshard.core.storage.small import is_text
from reshard.errors import SourceError
from reshard.formats.orbax.steps import read_object

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.core.storage.places import Place

STRINGS = "_strings.json"
"""The file of the strings in the tree."""

_ARRAYS = {"jax.Array", "np.ndarray", "scalar"}
STRING = "string"
"""The type of a leaf that is a string."""

_SEQUENCE = 1  # the type of a key that is an index of a list or a tuple
_MOST_PARTS = 256
_MOST_DIGITS = 18


class TreeLeaf(NamedTuple):
    """A leaf of the tree.

    Attributes:
        path: the dict keys and list indices of it.
        kind: its type, such as `jax.Array`; empty if it is not known.
        is_stored: it is an array, or must be one.
    """

    path: tuple[str | int, ...]
    kind: str = ""
    is_stored: bool = True


class SavedTree(NamedTuple):
    """The tree of one item.

    Attributes:
        leaves: the leaves, by name.
        stores_fill: chunks that are equal to the fill value are stored, so that an absent one is lost.
        uses_ocdbt: values are in a database; None if it is not known.
    """

    leaves: Mapping[str, TreeLeaf]
    stores_fill: bool
    uses_ocdbt: bool | None


def read_tree(path: Place) -> SavedTree:
    """Return the tree that `_METADATA` describes.

    Raises:
        SourceError: it is not valid, or two arrays have the same name.
    """
    content = read_object(path)
    leaves: dict[str, TreeLeaf] = {}
    tree = content.get("tree_metadata")
    if not isinstance(tree, dict):
        raise SourceError(f"{path} has no tree_metadata, an object", code="bad-metadata")
    for key, node in tree.items():
        leaf = _leaf(path, key, node)
        if leaf is None:
            continue
        name = ".".join(map(str, leaf.path))
        if not name or not is_text(name) or len(name.encode()) > LONGEST_NAME:
            raise SourceError(f"{path} has an array without a name, or too long a one: {key:.300}", code="bad-name")
        if name in leaves:  # a dot in a key is not escaped
            raise SourceError(f"{path} has two arrays of the name {name!r}", code="duplicate-name")
        leaves[name] = leaf
    uses_ocdbt = content.get("use_ocdbt")
    return SavedTree(
        leaves, content.get("store_array_data_equal_to_fill_value") is True,
        uses_ocdbt if isinstance(uses_ocdbt, bool) else None,
    )  # fmt: skip


def _leaf(path: Place, key: str, node: object) -> TreeLeaf | None:
    """Return a leaf by the text of the tuple of its path; None for an empty node."""
    match node:
        case {"value_metadata": {"value_type": str(kind), **rest}, **more}:
            if rest.get("skip_deserialize") is True:
                return None
        case _:
            raise SourceError(f"{path} has no value_metadata for {key!r:.300}", code="bad-metadata")
    parts: Any = None
    if len(key) <= 4 * LONGEST_NAME:
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            parts = ast.literal_eval(key)
    if not isinstance(parts, tuple) or len(parts) > _MOST_PARTS or not all(isinstance(part, str) for part in parts):
        raise SourceError(f"{path} has the key {key!r:.300}; expected a tuple of strings", code="bad-metadata")
    keys = more.get("key_metadata")
    keys = keys if isinstance(keys, list) and len(keys) == len(parts) else [None] * len(parts)
    return TreeLeaf(tuple(map(_key, parts, keys)), kind, kind in _ARRAYS)


def _key(part: str, metadata: object) -> str | int:
    """Return a dict key, or the index of a sequence."""
    is_index = isinstance(metadata, dict) and metadata.get("key_type") == _SEQUENCE
    return int(part) if is_index and part.isascii() and part.isdecimal() and len(part) < _MOST_DIGITS else part
