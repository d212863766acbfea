"""The provenance of a target that is opened, as its ledger has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.core.format import find, marked
from reshard.core.listing import RANK_PATTERN, Listing
from reshard.core.records.logs import UNREADABLE_LEDGER
from reshard.core.records.made import made_of
from reshard.core.runs import iteration_at
from reshard.core.storage.places import AnyName, Place, as_place
from reshard.errors import SourceError
from reshard.formats.ranks.directories import rank_files
from reshard.kits.indexes import read_index

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.records.made import Made


def made_at(
    path: AnyName, listing: Sequence[str] | None = None, *, mixed: bool = False, described: bool | None = None
) -> Made | None:
    """Return the provenance in a target's ledger, or None if the target has files that it does not list.

    Args:
        path: the target.
        listing: the names of its entries, if known.
        mixed: accept a directory that has other files, too; `Made.change` then names them.
        described: whether the path describes its own blocks, if that is known.

    Raises:
        SourceError: its ledger exists, and cannot be read or is damaged.
    """
    root = as_place(path)
    try:
        listing = root.names() if listing is None else listing
        directory = root if described is False else iteration_at(root)
        ledger = made_of(directory, listing if directory == root else None)
        if ledger is None or not listing or marked(listing):
            return ledger
        if described or (described is None and find(Listing(directory)).format.describes):
            files_by_rank = {
                0: [file for file in directory.files(depth=1) if file.suffix in {".safetensors", ".distcp"}]
            }
        else:
            unified = read_index(root)
            files_by_rank = {0: unified[0]} if unified else rank_files(root, RANK_PATTERN, None, [])[0]
    except SourceError as error:
        if error.code == UNREADABLE_LEDGER:
            raise
        return None  # several checkpoints in one directory, or missing ranks, which reading the files reports
    recorded = {f"{ledger.root}/{file}" for file in ledger.records}
    is_recorded = [str(file.absolute()) in recorded for files in files_by_rank.values() for file in files]
    return ledger if (any if mixed else all)(is_recorded) else None


def with_strategy(root: Place, listing: Sequence[str], *, described: bool | None) -> Made | None:
    """Return the provenance of a target with a strategy, or None.

    Files may have changed, and other files may have been added.
    """
    ledger = made_at(root, listing, mixed=True, described=described) if listing else None
    return ledger if ledger is not None and ledger.strategy else None
