"""A target compared with what its ledger says that it was made from: no strategy, source or selection need be given.

Where the source is not there any more, or its key is not, the files are compared with the sizes and the checksums that
the run noted, which encrypted ones do not have. Of what somebody else made of them since, that says so, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from reshard.errors import Option, ReshardError, SourceError, Text, UsageError, names
from reshard.plan.planfile import read_selection
from reshard.plan.select import derived
from reshard.readers.open import open as open_checkpoint
from reshard.readers.open import reopen, self_described
from reshard.source.made import read_small_strategy
from reshard.source.records import known
from reshard.storage.places import any_store, as_place, of_each
from reshard.verify.difference import Difference
from reshard.verify.sums import sum_contents

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.formats.entries import Runs
    from reshard.plan.select import Selection
    from reshard.source.checkpoint import Checkpoint
    from reshard.source.made import Made
    from reshard.storage.cipher import Cipher
    from reshard.storage.places import Place

Sums = tuple[tuple[Difference, ...], int, int]
"""What is not as it was noted; how many ranges were compared, and their bytes."""


def source_of(made: Made, cipher: Cipher | None) -> tuple[Checkpoint, Selection, bool]:
    """Return the source that a ledger tells, as it was selected, what was, and whether each replica is there once.

    Raises:
        SourceError: the source is not there any more, cannot be read, or is encrypted and there is no key.
    """
    try:
        source = noted_source(made.content["source"], cipher)
        selection = read_selection(made.content["selection"])
        source = derived(source, selection)
    except ReshardError:
        raise
    except (ValueError, TypeError) as error:
        raise SourceError(
            f"the ledger of {made.target} has no valid source", code="bad-ledger", facts=[str(error)]
        ) from None
    return source, selection, bool(made.content["target"]["deduplicated"])


def target_of(made: Made, cipher: Cipher | None) -> Checkpoint:
    """Return the target of a ledger, opened as it tells: `SourceError` where that is not possible."""
    strategy = made.strategy
    if self_described(as_place(made.target)) or (strategy is None and len(made.ranks) == 1):
        return open_checkpoint(made.target, contents=False, cipher=cipher)
    if strategy is not None and made.stage is not None:
        strategy = strategy.of_stage(made.stage)
    partial = strategy is not None and len(made.ranks) < len(strategy.ranks)
    return _opened(made.root, made.ranks, strategy, made.stage, partial=partial, cipher=cipher)


def keys_of(made: Made, cipher: Cipher | None, source_cipher: Cipher | None) -> tuple[Cipher | None, Cipher | None]:
    """Return the keys of the target and of the source, which are required where these were encrypted.

    Raises:
        UsageError: a key is missing that it takes to compare an encrypted target, of which a ledger has no checksums;
            the message says which.
    """
    keys: list[Cipher | None] = []
    for side, key in (("target", cipher), ("source", source_cipher)):
        encrypted = made.content[side]["encrypted"]
        if key is None and made.content["target"]["encrypted"] and encrypted:
            raise UsageError(
                f"the {side} of {made.target} is encrypted" if side == "source" else f"{made.target} is encrypted",
                code="no-key",
                facts=["a ledger holds no key"],
                hint=Text("pass its key: ", Option(f"{side}_key")),
            )
        keys.append(replace(key, required=True) if key and encrypted else key)
    return keys[0], keys[1]


def noted_source(
    given: dict[str, Any],
    cipher: Cipher | None,
    key: Option = Option("source_key"),  # noqa: B008 -- a tuple
) -> Checkpoint:
    """Open the source that a ledger has noted: `SourceError` if that is not possible."""
    if given["encrypted"] and cipher is None:
        raise SourceError(
            f"{given['root']} is encrypted",
            code="no-key",
            facts=["a ledger holds no key"],
            hint=Text("pass its key: ", key),
        )
    if given["describes_itself"]:
        return open_checkpoint(given["root"], cipher=cipher).without(set(given["left_out"]))
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
        cipher=cipher,
    )
    return found.without(set(given["left_out"]))


def _opened(
    root: str, files: dict[int, list[str]], strategy: Any, part: int | None, *, partial: bool, cipher: Cipher | None,
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
        warnings=(),
        cipher=cipher,
        whole=strategy is not None or len(files) == 1,
    )


def check_sums(made: Made, *, threads: int, on_progress: Callable[[int, int], None]) -> Sums:
    """Compare the files of a target with the sizes and checksums that its ledger noted."""
    differences: list[Difference] = []
    wanted: list[tuple[tuple[str, tuple[int, int, int]], str, Runs]] = []
    root = as_place(made.root)
    records = known(made.root, made.records, directory=made.ledger).records
    sizes = of_each(_size, [root / file for file in records])

    def add(kind: Literal["file", "size", "checksum"], file: str, text: str) -> None:
        differences.append(Difference(kind, text, None, "target", made.records[file].rank, f"{root}/{file}"))

    for (file, record), size in zip(records.items(), sizes, strict=True):
        if isinstance(size, SourceError):
            add("file", file, f"{size}")
        elif record.ready and size != record.ready[0]:
            add("size", file, f"has {size} bytes; {record.ready[0]} were written")
        else:
            wanted += [((file, one), f"{root}/{file}", (one[:2],)) for one in dict.fromkeys(record.ranges)]
    sums, read = sum_contents(wanted, threads=threads, on_progress=on_progress)
    wrong: dict[str, list[str]] = {}
    for (file, (begin, nbytes, crc)), found in sums.items():
        if found != crc:
            wrong.setdefault(file, []).append(f"{begin} to {begin + nbytes}")
    for file, some in wrong.items():
        add("checksum", file, f"has other bytes than were written at {names(some, most=3)}")
    return tuple(differences), len(wanted), read


def _size(place: Place) -> int | SourceError:
    try:
        return any_store().size(str(place))
    except SourceError as error:
        return error
