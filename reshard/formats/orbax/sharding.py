"""The layouts of arrays: `_sharding`, a mesh and a partition spec for each.

They are shown, and other targets may keep them; nothing is read by them, since chunks are cut otherwise. So an entry
that is not understood is no error, and has no layout.
"""

from __future__ import annotations

from base64 import b64decode
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

from reshard.core.layout.arrangement import Arranged, Arrangement
from reshard.core.layout.grid import MOST_DEVICES
from reshard.core.layout.layout import Layout
from reshard.core.layout.mesh import Mesh
from reshard.core.storage.small import parse_json
from reshard.errors import LayoutError, SourceError
from reshard.formats.orbax.steps import read_object

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.core.layout.block import Shape
    from reshard.core.storage.places import Place

SHARDING = "_sharding"

_MOST_AXES = 32


def read_shardings(path: Place) -> dict[str, str]:
    """Return the JSON text of the sharding of each array, by name; none if the file is not valid."""
    try:
        content = read_object(path)
        return {b64decode(name).decode(): text for name, text in content.items() if isinstance(text, str)}
    except (SourceError, ValueError):
        return {}


def arrangement(shardings: Mapping[str, str], shapes: Mapping[str, Shape]) -> Arrangement | None:
    """Return the layouts of arrays by the JSON texts of their shardings; None if none is known."""
    kinds = {(shardings[name], len(shape)) for name, shape in shapes.items() if name in shardings}
    known = {kind: mesh for kind in kinds if (mesh := _mesh(*kind))}
    tensors = {name: Arranged(()) for name in shapes}
    for name, shape in shapes.items():
        mesh = known.get((shardings.get(name, ""), len(shape)))
        if mesh and all(extent % ways == 0 for extent, ways in zip(shape, mesh.layout.splits, strict=True)):
            tensors[name] = Arranged((mesh,), shape)
    if not any(each.meshes for each in tensors.values()):
        return None
    devices = 1 + max(rank for mesh in known.values() for rank in mesh.ranks)
    return Arrangement(tensors, range(devices), devices) if devices <= MOST_DEVICES else None


def _mesh(text: str, ndim: int) -> Mesh | None:
    """Return a mesh of devices and a layout over them; None if the text is of another kind of sharding."""
    try:
        match parse_json(text.encode(), []):
            case {
                "sharding_type": "NamedSharding", "shape": [*extents], "axis_names": [*axes],
                "partition_spec": [*spec], **rest,
            } if 0 < len(extents) == len(axes) <= _MOST_AXES and _are_numbers(extents):  # fmt: skip
                entries = [[] if entry is None else entry if isinstance(entry, list) else [entry] for entry in spec]
            case _:
                return None
        entries += [[]] * (ndim - len(spec))
        numbers = {axis: len(axes) - 1 - index for index, axis in enumerate(axes)}
        layout = Layout.of(extents, [[numbers[axis] for axis in entry] or -1 for entry in entries])
        return Mesh(layout, tuple(_devices(rest.get("device_mesh"), extents)), tuple(map(str, axes)))
    except (ValueError, TypeError, KeyError, LayoutError):
        return None


def _devices(mesh: Any, extents: list[int]) -> list[int]:
    """Return the numbers of devices in row-major order; consecutive ones if they are not known."""
    level = [mesh.get("mesh")] if isinstance(mesh, dict) else []
    for _ in extents:
        level = list(chain.from_iterable(each if isinstance(each, list) else [] for each in level))
    ids: list[Any] = [each.get("id") if isinstance(each, dict) else None for each in level]
    count = prod(extents)
    return ids if len(ids) == count == len(set(ids)) and _are_numbers(ids, 0) else list(range(count))


def _are_numbers(values: list[Any], least: int = 1) -> bool:
    return all(type(value) is int and least <= value < MOST_DEVICES for value in values)
