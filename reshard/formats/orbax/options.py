"""Options of a target that is a checkpoint of Orbax."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.formats.zarr.layout import ZarrGroup


@dataclass(frozen=True, slots=True)
class OrbaxTree(ZarrGroup):
    """A checkpoint of Orbax: a zarr group with dtypes of TensorStore, and with Orbax's metadata."""
