"""Checkpoint 2.0 of MindSpore Transformers."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from reshard.core.format import Format, Found
from reshard.core.listing import RunLayout
from reshard.core.model.findings import Findings, by_opening
from reshard.formats.checkpoint2.names import FILES, METADATA, TRACKER
from reshard.kits.torch.names import with_trainer_files

if TYPE_CHECKING:
    from reshard.core.layout.arrangement import Arrangement
    from reshard.core.listing import Contents, Listing, OpenOptions
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.findings import Directory
    from reshard.core.options import Options
    from reshard.core.storage.places import Place
    from reshard.core.target import Target


class Checkpoint2(Format):
    """An iteration of a training with MindSpore Transformers."""

    name = "checkpoint2"
    title = "Checkpoint 2.0"
    called = "a Checkpoint 2.0"
    takes_layouts = True
    parts = (FILES,)
    runs = (RunLayout(TRACKER, re.compile(r"iteration_(\d{8,18})")),)

    @property
    def options(self) -> type[Options]:
        """See `Format`."""
        from reshard.formats.checkpoint2.options import Checkpoint2 as Options2

        return Options2

    def target(self, options: Options) -> type[Target]:  # noqa: ARG002 -- all are of one kind
        """See `Format`."""
        from reshard.formats.checkpoint2.writer import Checkpoint2Target

        return Checkpoint2Target

    def find(self, here: Listing) -> Found | None:
        """See `Format`."""
        return Found(self, here) if FILES.shown_by(here) else None

    def open(self, found: Found, options: OpenOptions, *, contents: Contents) -> Checkpoint:  # noqa: ARG002 -- it takes none
        """See `Format`."""
        from reshard.formats.checkpoint2.reader import open_checkpoint2

        return open_checkpoint2(found.place, found.here.names, contents=contents)

    def layouts(self, place: Place) -> Arrangement:
        """See `Format`."""
        from reshard.formats.checkpoint2.metadata import layouts_at

        return layouts_at(place)

    def complete(self, found: Found, tree: Directory) -> Findings:
        """See `Format`."""

        def doubt(_: Checkpoint) -> str:
            kinds = {match["kind"] for match in map(FILES.files.fullmatch, tree.files) if match}
            if METADATA in tree.files or len(kinds) != 1:
                return ""
            return f"has only {kinds.pop()} files, and nothing says whether there were others"

        look = partial(by_opening, partial(found.open, contents=False), tree.place, doubt)
        return with_trainer_files(tree, look)


FORMATS = (Checkpoint2(),)
