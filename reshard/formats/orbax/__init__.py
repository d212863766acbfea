"""Checkpoints of Orbax, as JAX's programs save them: read without JAX, Orbax or TensorStore."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from reshard.core.format import Format, Found
from reshard.core.listing import RunLayout
from reshard.core.model.findings import Findings, by_opening
from reshard.formats.orbax.steps import UNFINISHED, is_orbax, unfinished_reason
from reshard.formats.zarr import encoded_files
from reshard.kits.torch.names import with_trainer_files

if TYPE_CHECKING:
    from reshard.core.listing import Contents, Listing, OpenOptions
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.findings import Directory
    from reshard.core.options import Options
    from reshard.core.target import Target


class Orbax(Format):
    """A step of a run, or an item of one: a tree of arrays."""

    name = "orbax"
    title = "Orbax"
    whole = called = "a checkpoint of Orbax"
    encoding = "zarr"
    extends = ("zarr",)
    runs = (RunLayout("", re.compile(r"(?:.+_)?(\d{1,18})", re.DOTALL)),)
    unfinished_mark = UNFINISHED
    is_deep = True
    block_bytes = 650
    is_numbered = True

    @property
    def options(self) -> type[Options]:
        """See `Format`."""
        from reshard.formats.orbax.options import OrbaxTree

        return OrbaxTree

    def target(self, options: Options) -> type[Target]:  # noqa: ARG002 -- all are of one kind
        """See `Format`."""
        from reshard.formats.orbax.writer import OrbaxItem

        return OrbaxItem

    def find(self, here: Listing) -> Found | None:
        """See `Format`."""
        return Found(self, here) if is_orbax(here) else None

    def open(self, found: Found, options: OpenOptions, *, contents: Contents) -> Checkpoint:  # noqa: ARG002 -- it takes none
        """See `Format`."""
        from reshard.formats.orbax.reader import open_orbax

        return open_orbax(found.place, found.here.names, contents=contents)

    def complete(self, found: Found, tree: Directory) -> Findings:
        """See `Format`."""
        if reason := unfinished_reason(tree.place, tree.names):
            return Findings("incomplete", reason)
        opens = partial(found.open, contents=False)
        return with_trainer_files(tree, partial(by_opening, opens, found.place, partial(encoded_files, tree)))

    def unfinished(self, here: Listing) -> str:
        """See `Format`."""
        return unfinished_reason(here.place, here.names)


FORMATS = (Orbax(),)
