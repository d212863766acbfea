"""Distributed checkpoints (DCP) of PyTorch, Megatron-Core and hyper-parallel."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from reshard.core.format import Format, Found
from reshard.core.listing import STEP_NAME, STEP_WORD, Listing, RunLayout
from reshard.core.model.findings import Findings, by_opening
from reshard.errors import SourceError
from reshard.formats.dcp.names import BLOCKS, DCP_INDEX, DCP_OF_RANK, FILES, TRACKER, parts_below
from reshard.kits.indexes import set_indexes
from reshard.kits.torch.names import with_trainer_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from reshard.core.listing import Contents, OpenOptions
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.findings import Candidate, Directory
    from reshard.core.model.objects import Objects
    from reshard.core.options import Options
    from reshard.core.target import Target

_STEP = re.compile(rf"{STEP_NAME}(?:[-_.].*)?", re.IGNORECASE | re.DOTALL)
_PARTS = "parts"  # of one checkpoint, in several directories


class DistributedCheckpoint(Format):
    """A directory with metadata of all blocks, or several such directories that make one checkpoint."""

    name = "dcp"
    title = "DCP"
    aliases = ("distcp",)
    encoding = "dcp"
    takes_layouts = True
    parts = (FILES,)
    runs = (
        RunLayout("latest_checkpoint_iteration.txt", re.compile(r"global_step_(\d{1,18})")),  # hyper-parallel
        RunLayout(TRACKER, re.compile(r"iter_(\d{7,18})")),  # Megatron-LM
        RunLayout("", re.compile(rf"(?:{STEP_WORD})?(\d{{1,18}})(?:[-_.]ckpt?)?", re.IGNORECASE | re.DOTALL)),
    )
    of_tensors = frozenset({".distcp", ".safetensors"})
    carries = True
    entry_bytes = 800

    @property
    def options(self) -> type[Options]:
        """See `Format`."""
        from reshard.formats.dcp.names import DCP

        return DCP

    def target(self, options: Options) -> type[Target]:
        """See `Format`."""
        from reshard.formats.dcp.relinked import Relinked
        from reshard.formats.dcp.writer import DCPTarget

        return Relinked if getattr(options, "link", False) else DCPTarget

    def find(self, here: Listing) -> Found | None:
        """See `Format`."""
        if FILES.shown_by(here):
            return Found(self, here, here.names)
        files = parts_below(here.place, here.names)
        return Found(self, here, files, _PARTS) if files else None

    def open(self, found: Found, options: OpenOptions, *, contents: Contents) -> Checkpoint:  # noqa: ARG002 -- it takes none
        """See `Format`."""
        from reshard.formats.dcp.reader import open_dcp

        return open_dcp(found.place, found.files, contents=contents)

    def listed(self, tree: Directory) -> Iterator[tuple[Candidate, Iterable[str]]]:
        """See `Format`."""
        found = self.find(Listing(tree.place, tree.names))
        has_parts = found is not None and found.variant == _PARTS
        if found is None or (has_parts and _are_several(tree, found)):
            return
        confirm = partial(self._complete, found, tree, opens=True)
        candidate = self.candidate(tree, partial(self.complete, found, tree), confirm=confirm)
        if has_parts:
            candidate = replace(candidate, files=[*tree.every_file()])
        yield candidate, tree.below if has_parts else ()

    def remains(self, tree: Directory) -> str:
        """See `Format`."""
        return f"has only {DCP_INDEX} of a DCP, and no data" if DCP_INDEX in tree.files else ""

    def complete(self, found: Found, tree: Directory) -> Findings:
        """See `Format`. If metadata, sizes and times show that it is complete, no other header is read."""
        return self._complete(found, tree, opens=False)

    def _complete(self, found: Found, tree: Directory, *, opens: bool) -> Findings:
        from reshard.formats.dcp.completeness import by_metadata, doubt_of

        def look() -> Findings:
            result = None if opens else by_metadata(tree)
            return result or by_opening(partial(found.open, contents=False), found.place, lambda _: doubt_of(tree))

        return with_trainer_files(tree, look)

    def unfinished(self, here: Listing) -> str:
        """See `Format`. The metadata are written last."""
        is_saved = DCP_INDEX in here.names or any(map(DCP_OF_RANK.fullmatch, here.names))
        return f"it has no {DCP_INDEX}, which is written last" if not is_saved and FILES.shown_by(here) else ""

    def objects(self, checkpoint: Checkpoint) -> Objects:
        """See `Format`."""
        from reshard.kits.torch.objects import SavedObjects

        return SavedObjects(checkpoint)


class HuggingFaceBlocks(Format):
    """Files of blocks that PyTorch saved for Hugging Face, without an index of whole tensors."""

    name = "dcp-safetensors"
    title = "DCP in safetensors"
    parts = (BLOCKS,)

    def find(self, here: Listing) -> Found | None:
        """See `Format`."""
        return None if set_indexes(here.names) or not BLOCKS.shown_by(here) else Found(self, here)

    def open(self, found: Found, options: OpenOptions, *, contents: Contents) -> Checkpoint:  # noqa: ARG002 -- it takes none
        """See `Format`."""
        from reshard.formats.dcp.hf_blocks import open_blocks

        return open_blocks(found.place, found.here.names, contents=contents)


def _are_several(tree: Directory, found: Found) -> bool:
    """Return whether the DCPs below a directory are not parts of one checkpoint."""
    if any(map(_STEP.fullmatch, tree.below)):
        return True
    try:
        found.open(contents=False)
    except SourceError as error:
        return "several-checkpoints" in error.codes
    return False


FORMATS = (DistributedCheckpoint(), HuggingFaceBlocks())
