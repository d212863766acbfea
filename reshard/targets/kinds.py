"""The one list of what makes the files of a target: for each way to lay them out its destination."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from reshard.formats.entries import TargetFiles
from reshard.formats.sets import DCP, DCP_NAME, LinkedDCP
from reshard.formats.zarr import NAME as ZARR
from reshard.formats.zarr import ZarrGroup
from reshard.targets.checkpoint2 import Checkpoint2

if TYPE_CHECKING:
    from reshard.targets.destination import Destination

AnyFiles = TargetFiles | ZarrGroup | DCP | LinkedDCP
"""A way to lay out the files of a target."""

OF_FORMATS: dict[str | None, type[ZarrGroup | DCP]] = {ZARR: ZarrGroup, DCP_NAME: DCP}
"""The formats of whole directories, each with its way to lay them out."""

_DESTINATIONS: dict[type, str] = {
    Checkpoint2: "checkpoint2.Checkpoint2Target",
    DCP: "dcp.DCPTarget",
    LinkedDCP: "dcp.relinked.Relinked",
    ZarrGroup: "zarr.ZarrStore",
}


def destination_of(files: AnyFiles) -> type[Destination]:
    """Return what makes files that are laid out so: those of ranks, where nothing else is said."""
    known = (_DESTINATIONS[kind] for kind in type(files).__mro__ if kind in _DESTINATIONS)
    module, _, name = next(known, "ranks.Ranks").rpartition(".")
    found: type[Destination] = getattr(import_module(f"reshard.targets.{module}"), name)  # not all on every start
    return found
