"""Writing whole files by one task: each from its first byte to its last.

The moves are those of a plan by tensor; only where their bytes go is another. What stands in a file before and between
the contents (its header, the heads of its messages, zeros of a chunk at the edge, the index of a shard) waits in the
file's sink for its turn, so that nothing is ever written twice or out of order.

A checkpoint file takes its contents in its own order. Of a zarr store, whose files are small and many, bytes come row
by row: a file is begun when its first byte comes and ends with its last one, so that only those that some rows meet are
open at a time; in a shard, whose chunks are one after the other, bytes of a later chunk wait for those before them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.run.mover import Moved, move_pieces
from reshard.storage.base import Ordered, Sinks
from reshard.storage.cipher import store_of
from reshard.storage.places import store_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reshard.formats.entries import FileLayout
    from reshard.plan.plan import Plan
    from reshard.storage.base import Sink

_ZEROS = memoryview(bytes(1 << 20))


def write_files(
    plan: Plan,
    number: int,
    group: Sequence[int],
    directory: str,
    *,
    sync: bool,
    checksums: bool = False,
    check: Callable[[], object],
    go_on: Callable[[], object],
) -> Moved:
    """Write the files of a task; nothing of them is left where that fails.

    Args:
        plan: of a zarr store by file, or the plan of the group alone (`plan.partition.group_plan`).
        number: of the task in that plan.
        group: the numbers of its files.
        directory: where they go.
        sync: have them on the disk.
        checksums: sum up what is written.
        check: called before a checkpoint file is complete, and so may appear; raises if it must not.
        go_on: see `move_pieces`.

    Raises:
        SourceError: a source file ends early or cannot be read.
        TargetError, BudgetError: a target file cannot be written.
    """
    numbers = {f"{directory}/{plan.files[n].path}": n for n in group}
    sinks = Sinks(lambda path: _sink(plan, numbers[path], path))
    try:
        sinks.open(numbers)
        moved = move_pieces(
            plan,
            plan.tasks[number],
            directory,
            store_of(plan.source.coding),
            sinks,
            checksums=checksums,
            in_order=True,
            go_on=go_on,
        )
        check()
        sinks.finish(durable=sync)
    except BaseException:
        sinks.abort()
        store = store_at(directory)
        for path in numbers:
            if path not in sinks:
                store.discard(store.unfinished(path))  # it has no name yet but where files appear whole
        raise
    return moved


def write_literals(plan: Plan, number: int, path: str, *, sync: bool) -> None:
    """Write a file that has no contents of tensors, such as the index of a set."""
    sink = _sink(plan, number, path)
    try:
        sink.finish(durable=sync)
    except BaseException:
        sink.abort()
        raise


def _sink(plan: Plan, number: int, path: str) -> Sink:
    """Return what takes the contents of a target file, by its final name, in about their order."""
    file, store = plan.files[number], store_at(path)
    unfinished, layout = store.unfinished(path), file.layout

    def begin() -> Sink:
        return store.create(unfinished, layout.size)

    if plan.coding and plan.coding.of(file.path):
        return plan.coding.sink(file.path, Ordered(begin, path, None))
    ends = plan.alone and bool(layout.contents)
    ordered = Ordered(begin, path, layout.size, room=layout.size if ends else 0, ends=ends)
    constant: list[tuple[int, bytes | memoryview]] = [*layout.literals, *_zeros(layout)]
    for offset, content in constant:
        ordered.write_at(offset, content)
    return ordered


def _zeros(layout: FileLayout) -> Iterator[tuple[int, memoryview]]:
    """Yield the zeros of a file where neither contents come nor its own bytes are: offset, and up to a MB of them."""
    known = [(offset, len(content)) for offset, content in layout.literals]
    known += [run for content in layout.contents for run in content.runs]
    end = 0
    for start, nbytes in sorted([*known, (layout.size, 0)]):
        for begin in range(end, start, len(_ZEROS)):
            yield begin, _ZEROS[: start - begin]
        end = start + nbytes
