"""The provenance of a target that is opened, as its ledger has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.core.format import find, marked
from reshard.core.listing import Listing, OpenOptions
from reshard.core.rank_files import EXTENSIONS
from reshard.core.records.logs import UNREADABLE_LEDGER
from reshard.core.records.made import made_of
from reshard.core.runs import iteration_at
from reshard.core.storage.places import AnyName, Place, as_place
from reshard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.records.made import Made


_OF_TENSORS = EXTENSIONS | {".distcp"}


def made_at(path: AnyName, listing: Sequence[str] | None = None, *, mixed: bool = False) -> Made | None:
    """Return the provenance in a target's ledger, or None if the target has files that it does not list.

    Args:
        path: the target.
        listing: the names of its entries, if known.
        mixed: accept a directory that has other files, too; `Made.change` then names them.

    Raises:
        SourceError: its ledger exists, and cannot be read or is damaged.
    """
    root = as_place(path)
    try:
        listing = root.names() if listing is None else listing
        directory = iteration_at(root, listing)
        ledger = made_of(directory, listing if directory == root else None)
        if ledger is None or not listing or marked(listing):
            return ledger
        found = find(Listing(directory, listing if directory == root else None))
        files_by_rank = found.format.files_by_rank(found, OpenOptions())
    except SourceError as error:
        if error.code == UNREADABLE_LEDGER:
            raise
        return None  # several checkpoints in one directory, or missing ranks, which reading the files reports
    recorded = {f"{ledger.root}/{file}" for file in ledger.records}
    files = [file for of_rank in files_by_rank.values() for file in of_rank if file.suffix in _OF_TENSORS]
    is_recorded = [str(file.absolute()) in recorded for file in files]
    return ledger if (any if mixed else all)(is_recorded) else None


def with_strategy(root: Place, listing: Sequence[str]) -> Made | None:
    """Return the provenance of a target with a strategy, or None.

    Files may have changed, and other files may have been added.
    """
    ledger = made_at(root, listing, mixed=True) if listing else None
    return ledger if ledger is not None and ledger.strategy else None
