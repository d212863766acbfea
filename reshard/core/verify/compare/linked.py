"""Find blocks that both sides of a comparison have in the same bytes, such as those of a target that links files.

To compare them would compare bytes with themselves, which says nothing.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.storage.places import LocalPath, as_place
from reshard.core.verify.sums import check_carried

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from reshard.core.layout.block import Block
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.entries import Replica
    from reshard.core.verify.compare import Check
    from reshard.core.verify.sums import SumsChecked


class Linked(NamedTuple):
    """The checks that have bytes to compare, and what has none.

    Attributes:
        checks: the checks with bytes to compare.
        tensors: names of tensors with a block that both sides have in the same bytes, and the target nowhere else.
        files: numbers of the target files with these blocks.
    """

    checks: list[Check]
    tensors: set[str]
    files: list[int]


def without_linked(source: Checkpoint, target: Checkpoint, checks: list[Check]) -> Linked:
    """Separate what can be compared from what both sides have in the same bytes."""
    behind = len(source.files)
    known: dict[Hashable, int] = {}
    paths = (file.path for side in (source, target) for file in side.files)
    first_names = [known.setdefault(_identity(path), number) for number, path in enumerate(paths)]
    if all(number >= behind for number in first_names[behind:]):
        return Linked(checks, set(), [])
    to_compare: list[Check] = []
    tensors: set[str] = set()
    files: set[int] = set()
    for check in checks:
        linked = _linked(check, first_names)
        has_bytes = len(linked) < len(check.transfer.route.writes)
        numbers = {at.file - behind for copies in linked for at in copies if at.file >= behind}
        if numbers:
            tensors.add(check.name)
            files |= numbers
        if has_bytes:
            to_compare.append(check)
    return Linked(to_compare, tensors, sorted(files))


def check_sums(
    target: Checkpoint, linked: Linked, threads: int, on_progress: Callable[[int, int], object], client: Any
) -> SumsChecked:
    """Compare the files of linked blocks with the checksums that they contain."""
    files = tuple(target.files[number] for number in linked.files)
    ranks = tuple(target.ranks[number] for number in linked.files)
    shared = replace(target, files=files, ranks=ranks)
    return check_carried(shared, threads=threads, on_progress=on_progress, client=client)


def _linked(check: Check, first_names: Sequence[int]) -> list[tuple[Replica, ...]]:
    """Return the copies of each block whose every copy is the bytes that it would be compared with."""
    route, runs = check.transfer.route, check.transfer.read_runs
    if check.transfer.dtype is not check.transfer.target_dtype:
        return []

    def place(at: Replica) -> object:
        return first_names[at.file], runs[at.runs_index], at.strides

    references: dict[Block, set[object]] = {
        block: {place(each) for each in check.references or (at,)}
        for block, at in zip(route.recipe.sources, route.reads, strict=True)
    }
    return [
        copies
        for block, copies in zip(route.recipe.targets, route.writes, strict=True)
        if references.get(block, set()).issuperset(map(place, copies))
    ]


def _identity(path: str) -> Hashable:
    """Return a value that all names of a file share."""
    location = as_place(path)
    if isinstance(location, LocalPath):
        with suppress(OSError, ValueError):
            status = location.stat()
            return status.st_dev, status.st_ino
    return str(location)
