"""Compare a target with the source in its ledger, without further arguments.

If the source or its key is missing, the files are compared with the recorded sizes and checksums, which encrypted files
do not have. This also detects later changes by other programs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from reshard.core.plan.inputs import derived, selection_of
from reshard.core.records.logs import known
from reshard.core.reopen import reopen
from reshard.core.storage.places import any_store, as_place, workers_at
from reshard.core.storage.threads import map_ordered
from reshard.core.verify.difference import Difference
from reshard.core.verify.sums import sum_contents
from reshard.errors import Option, ReshardError, SourceError, Text, UsageError, names

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.entries import Runs
    from reshard.core.plan.inputs import Selection
    from reshard.core.records.made import Made
    from reshard.core.storage.cipher import Cipher
    from reshard.core.storage.places import Place

Sums = tuple[tuple[Difference, ...], int, int]
"""Differences from the ledger, the number of compared ranges, and their bytes."""


def source_of(made: Made, cipher: Cipher | None) -> tuple[Checkpoint, Selection]:
    """Return source and selection in a ledger; the selection has been applied to the source.

    Raises:
        SourceError: the source is gone, cannot be read, or is encrypted and there is no key.
    """
    selection = selection_in(made)
    return derived(noted_source(made, cipher), selection), selection


def selection_in(made: Made) -> Selection:
    """Return the selection in a ledger; raise `SourceError` if it is not valid."""
    try:
        return selection_of(made.provenance.selection)
    except (ReshardError, ValueError, TypeError) as error:
        raise SourceError(
            f"the ledger of {made.target} has no valid selection", code="bad-ledger", facts=[str(error)]
        ) from None


def keys_of(made: Made, cipher: Cipher | None, source_cipher: Cipher | None) -> tuple[Cipher | None, Cipher | None]:
    """Return the keys of target and source, required if these were encrypted.

    Raises:
        UsageError: a key is missing that is needed to compare an encrypted target, which has no checksums in the
            ledger; the message says which.
    """
    keys: list[Cipher | None] = []
    is_encrypted = made.provenance.target.encryption is not None
    for side, key, encrypted in (
        ("target", cipher, is_encrypted),
        ("source", source_cipher, made.provenance.source.encrypted),
    ):
        if key is None and is_encrypted and encrypted:
            raise UsageError(
                f"the {side} of {made.target} is encrypted" if side == "source" else f"{made.target} is encrypted",
                code="no-key",
                facts=["a ledger holds no key"],
                hint=Text("pass its key: ", Option(f"{side}_key")),
            )
        keys.append(replace(key, required=True) if key and encrypted else key)
    return keys[0], keys[1]


def noted_source(
    made: Made,
    cipher: Cipher | None,
    key: Option = Option("source_key"),  # noqa: B008 -- a tuple
) -> Checkpoint:
    """Open the source in a ledger; raise `SourceError` on failure."""
    source = made.provenance.source
    if source.encrypted and cipher is None:
        raise SourceError(
            f"{source.root} is encrypted",
            code="no-key",
            facts=["a ledger holds no key"],
            hint=Text("pass its key: ", key),
        )
    return reopen(source, cipher=cipher)


def check_sums(made: Made, *, threads: int, on_progress: Callable[[int, int], None]) -> Sums:
    """Compare the files of a target with the sizes and checksums in its ledger."""
    differences: list[Difference] = []
    ranges: list[tuple[tuple[str, tuple[int, int, int]], str, Runs]] = []
    root = as_place(made.root)
    records = known(made.root, made.records, directory=made.ledger).records
    paths = [root / file for file in records]
    sizes = map_ordered(_size, paths, workers_at(paths))

    def add(kind: Literal["file", "size", "checksum"], file: str, text: str) -> None:
        differences.append(Difference(kind, text, None, "target", made.records[file].rank, f"{root}/{file}"))

    for (file, record), size in zip(records.items(), sizes, strict=True):
        if isinstance(size, SourceError):
            add("file", file, f"{size}")
        elif record.ready and size != record.ready[0]:
            add("size", file, f"has {size} bytes; {record.ready[0]} were written")
        else:
            ranges += [((file, span), f"{root}/{file}", (span[:2],)) for span in dict.fromkeys(record.ranges)]
    sums, read = sum_contents(ranges, threads=threads, on_progress=on_progress)
    wrong: dict[str, list[str]] = {}
    for (file, (begin, nbytes, crc)), value in sums.items():
        if value != crc:
            wrong.setdefault(file, []).append(f"{begin} to {begin + nbytes}")
    for file, spans in wrong.items():
        add("checksum", file, f"has other bytes than were written at {names(spans, most=3)}")
    return tuple(differences), len(ranges), read


def _size(path: Place) -> int | SourceError:
    try:
        return any_store().size(str(path))
    except SourceError as error:
        return error
