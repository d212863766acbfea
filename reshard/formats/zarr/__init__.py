"""Stores of zarr."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.core.format import Format, Found
from reshard.core.model.findings import Findings, by_opening
from reshard.core.storage.small import read_small
from reshard.errors import SourceError
from reshard.formats.zarr.files import is_of_store, is_store
from reshard.formats.zarr.layout import METADATA, NAME

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.core.listing import Contents, Listing, OpenOptions
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.findings import Directory
    from reshard.core.model.objects import Objects
    from reshard.core.options import Options
    from reshard.core.target import Target

_LARGEST_METADATA = 1 << 20


class Zarr(Format):
    """A group of arrays."""

    name = NAME
    title = "zarr"
    whole = called = "a zarr store"
    encoding = NAME
    extension = NAME
    is_deep = True
    block_bytes = 650
    carries = True
    has_steps = False

    @property
    def options(self) -> type[Options]:
        """See `Format`."""
        from reshard.formats.zarr.layout import ZarrGroup

        return ZarrGroup

    def target(self, options: Options) -> type[Target]:  # noqa: ARG002 -- all are of one kind
        """See `Format`."""
        from reshard.formats.zarr.writer import ZarrStore

        return ZarrStore

    def find(self, here: Listing) -> Found | None:
        """See `Format`."""
        return Found(self, here) if is_store(here.names) else None

    def open(self, found: Found, options: OpenOptions, *, contents: Contents) -> Checkpoint:  # noqa: ARG002 -- it takes none
        """See `Format`."""
        from reshard.formats.zarr.reader import open_store

        return open_store(found.place, contents=contents)

    def marks(self, name: str) -> bool:
        """See `Format`."""
        return is_of_store(name)

    def metadata_of(self, checkpoint: Checkpoint) -> list[str]:
        """See `Format`. They are those of arrays; those of the group are a file of the checkpoint."""
        root = Path(checkpoint.root).resolve()
        paths = (Path(file.path) for _, file in checkpoint.stored_files)
        parents = {above for path in paths for above in path.parents if above.is_relative_to(root)}
        files = (above / name for above in parents - {root} for name in (METADATA, ".zarray"))
        return sorted(str(file) for file in files if file.is_file())

    def remains(self, tree: Directory) -> str:
        """See `Format`."""
        return f"has arrays, and no {METADATA} of the store" if any(map(_is_array, tree.below.values())) else ""

    def knows(self, value: object) -> bool:
        """See `Format`. Nothing is imported to ask."""
        return type(value).__module__.partition(".")[0] == "zarr"

    def path_of(self, value: Any) -> str | None:
        """See `Format`."""
        from reshard.formats.zarr.objects import local_path

        return local_path(value)

    def arrays_of(self, value: Any) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        """See `Format`."""
        from reshard.formats.zarr.objects import arrays_of

        return arrays_of(value)

    def complete(self, found: Found, tree: Directory) -> Findings:
        """See `Format`. In a store of another program, chunks may be absent."""
        from reshard.core.records.made import made_of
        from reshard.formats.zarr.reader import store_notes

        def doubt(checkpoint: Checkpoint) -> str:
            if not store_notes(tree.place):
                return "an absent chunk of a zarr store stands for its fill value"
            try:
                recorded = made_of(tree.place)
            except SourceError as error:
                return error.message
            return "" if recorded and recorded.is_as_noted() else encoded_files(tree, checkpoint)

        return by_opening(partial(found.open, contents=False), tree.place, doubt)

    def objects(self, checkpoint: Checkpoint) -> Objects:
        """See `Format`."""
        from reshard.kits.torch.objects import SavedObjects

        return SavedObjects(checkpoint)


def _is_array(tree: Directory) -> bool:
    """Return whether a directory is an array, which is no checkpoint without its store."""
    if METADATA not in tree.files:
        return False
    from reshard.formats.zarr.metadata import parse_node

    try:
        raw = read_small(tree.place / METADATA, "metadata", _LARGEST_METADATA, SourceError)
        return parse_node(tree.place / METADATA, raw).get("node_type") == "array"
    except SourceError:
        return False


def encoded_files(tree: Directory, checkpoint: Checkpoint) -> str:
    """Return why truncated chunks would not be noticed, or "": the lengths of encoded files are recorded nowhere."""
    if checkpoint.coding is None or not any(any(map(is_of_store, each.files)) for each in tree.every_directory()):
        return ""
    return "its chunks are compressed, so that their sizes do not show whether they are whole"


FORMATS = (Zarr(),)
