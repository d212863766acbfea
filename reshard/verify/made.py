"""A target compared with what its ledger says that it was made from: no strategy, source or selection need be given.

Where the source is not there any more, or is encrypted, the files are compared with the sizes and the checksums that
the run noted. Of what somebody else made of them since, that says so, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from reshard.errors import ReshardError, SourceError, names
from reshard.plan.planfile import read_selection
from reshard.source.made import read_small_strategy
from reshard.source.open import open as open_checkpoint
from reshard.source.open import reopen
from reshard.source.records import known
from reshard.storage.crc32c import crc_of_range
from reshard.storage.places import any_store, as_place
from reshard.storage.threads import each
from reshard.verify.difference import Difference

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.plan.select import Selection
    from reshard.source.checkpoint import Checkpoint
    from reshard.source.made import Made
    from reshard.source.records import Record

Sums = tuple[tuple[Difference, ...], int, int]
"""What is not as it was noted; how many ranges were compared, and their bytes."""


def source_of(made: Made) -> tuple[Checkpoint, Selection, bool]:
    """Return the source that a ledger tells, what was selected, and whether each replica is there once.

    Raises:
        SourceError: the source is not there any more, cannot be read, or is encrypted.
    """
    try:
        source = _source(made.content["source"])
        selection = read_selection(made.content["selection"])
    except ReshardError:
        raise
    except (ValueError, TypeError) as error:
        raise SourceError(f"{made.target}: what its ledger says of its source is not sound: {error}") from None
    return source, selection, bool(made.content["target"]["deduplicated"])


def target_of(made: Made) -> Checkpoint:
    """Return the target of a ledger, opened as it tells: `SourceError` where that is not possible."""
    strategy = made.strategy
    if made.content["target"]["format"] == "zarr" or (strategy is None and len(made.ranks) == 1):
        return open_checkpoint(made.target, contents=False)
    if strategy is not None and made.stage is not None:
        strategy = strategy.of_stage(made.stage)
    partial = strategy is not None and len(made.ranks) < len(strategy.ranks)
    return _opened(made.root, made.ranks, strategy, made.stage, partial=partial)


def _source(given: dict[str, Any]) -> Checkpoint:
    if given["encryption"] is not None:
        raise SourceError(f"{given['root']}: is encrypted, and a ledger holds no key")
    if given["is_store"]:
        return open_checkpoint(given["root"]).without(set(given["left_out"]))
    paths: dict[int, list[str]] = {}
    for rank, path in given["files"]:
        paths.setdefault(rank, []).append(path)
    found = _opened(
        given["root"],
        paths,
        read_small_strategy(given["strategy"]),
        given["stage"],
        partial=given["partial"],
        varying=given["varying"],
        elsewhere=given["elsewhere"],
    )
    return found.without(set(given["left_out"]))


def _opened(
    root: str, files: dict[int, list[str]], strategy: Any, part: int | None, *, partial: bool,
    varying: tuple[str, ...] = (), elsewhere: tuple[str, ...] = (),
) -> Checkpoint:  # fmt: skip
    """Open the files of each rank; those of several without a strategy are a checkpoint of no tensors."""
    return reopen(
        root,
        {rank: [as_place(path) for path in some] for rank, some in sorted(files.items())},
        strategy=strategy,
        part=part,
        partial=partial,
        varying=varying,
        elsewhere=elsewhere,
        notices=(),
        cipher=None,
        whole=strategy is not None or len(files) == 1,
    )


def check_sums(made: Made, *, threads: int, on_progress: Callable[[int, int], None]) -> Sums:
    """Compare the files of a target with the sizes and checksums that its ledger noted."""
    differences: list[Difference] = []
    records = known(made.root, made.records, directory=made.ledger).records
    total = sum(sum(record.wrote[1::3]) for record in records.values())
    count = done = 0

    def compared(one: tuple[list[Difference], int, int]) -> None:
        nonlocal count, done
        differences.extend(one[0])
        count, done = count + one[1], done + one[2]
        on_progress(done, total)

    each(lambda item: _sums_of(f"{made.root}/{item[0]}", item[1]), list(records.items()), threads, compared)
    return tuple(differences), count, done


def _sums_of(path: str, record: Record) -> tuple[list[Difference], int, int]:
    store, found = any_store(), 0

    def difference(kind: Literal["file", "size", "checksum"], text: str) -> Difference:
        return Difference(kind, text, None, "target", record.rank, path)

    try:
        size = store.size(path)
    except SourceError as error:
        return [difference("file", f"{error}")], 0, 0
    if record.ready and size != record.ready[0]:
        return [difference("size", f"has {size} bytes; {record.ready[0]} were written")], 0, 0
    wrong = []
    for begin, nbytes, crc in record.ranges:
        found += nbytes
        if crc_of_range(store, path, begin, nbytes) != crc:
            wrong.append(f"{begin} to {begin + nbytes}")
    differences = (
        [difference("checksum", f"has other bytes than were written at {names(wrong, most=3)}")] if wrong else []
    )
    return differences, len(record.wrote) // 3, found
