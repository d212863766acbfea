"""Megatron-LM's older checkpoints: a file for each tensor-parallel part of each pipeline stage."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from reshard.core.format import Format, Found
from reshard.formats.megatron.names import RANKS, RELEASE, TRACKER
from reshard.kits.parts.cuts import rules_over_parts
from reshard.kits.torch.names import is_beside_readable, with_trainer_files

if TYPE_CHECKING:
    from reshard.core.listing import Contents, Listing, OpenOptions
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.findings import Directory, Findings


class Megatron(Format):
    """The directories of ranks, or the directory `release` of a run."""

    name = "megatron"
    title = "Megatron"
    parts = (RANKS,)
    takes = frozenset({"strategy", "layouts"})
    is_deep = True

    def find(self, here: Listing) -> Found | None:
        """See `Format`."""
        if RANKS.shown_by(here) and not is_beside_readable(here.names):
            return Found(self, here)
        has_release = {TRACKER, RELEASE} <= {*here.names} and RANKS.shown_by(here.below(RELEASE))
        return Found(self, here, variant=RELEASE) if has_release else None

    def open(self, found: Found, options: OpenOptions, *, contents: Contents) -> Checkpoint:
        """See `Format`."""
        from reshard.formats.megatron.reader import open_megatron

        here = found.here.below(RELEASE) if found.variant else found.here
        return open_megatron(here.place, here.names, contents=contents, rules=rules_over_parts(options))

    def complete(self, found: Found, tree: Directory) -> Findings:
        """See `Format`."""
        return with_trainer_files(tree, partial(super().complete, found, tree))


FORMATS = (Megatron(),)
