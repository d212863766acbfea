"""`reshard.diff`, as users call it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.api.checkpoints import Checkpoint, record_of
from reshard.api.checkpoints import open as open_checkpoint
from reshard.api.choices import progress_of
from reshard.arguments import checked
from reshard.errors import Option, ReshardError, Text
from reshard.sizes import size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reshard.compute.differences import CheckpointDiff
    from reshard.core.run.settings import Progress
    from reshard.core.storage.places import AnyName


@checked
def diff(
    a: AnyName | Checkpoint,
    b: AnyName | Checkpoint,
    *,
    tolerance: float = 0.0,
    relative: float | None = None,
    memory: int | str | None = None,
    threads: int | None = None,
    client: Any = None,
    progress: Callable[[Progress], None] | bool | None = None,
) -> CheckpointDiff:
    """Compare the values of two checkpoints of any layouts and formats as numbers.

    Names and shapes that differ are listed; for each tensor that both have, the largest and the mean absolute
    difference, the norm of the difference divided by the norm of `a`, the cosine, and the number of elements that
    differ. Dtypes may differ. Each byte is read once; replicas are not read. `reshard.verify` compares bits, and
    replicas, too.

    Args:
        a: a checkpoint, or a path that `reshard.open` can open without options.
        b: the other one.
        tolerance: the largest absolute difference of elements that counts as equal.
        relative: the largest relative difference of a tensor that counts as equal, even beyond `tolerance`.
        memory: the most resident memory to use, in bytes or as `"1GB"`.
        threads: the number of threads; by default one for each available processor, at most 4.
        client: as for `Plan.run`: a cluster, whose workers read by the same paths, or threads; by default the current
            client, else threads.
        progress: called with bytes read (as `written`) and to be read; True shows a bar.

    Returns:
        the differences, largest first; true if all are within the tolerance.

    Raises:
        reshard.SourceError: a checkpoint cannot be opened or read.
        reshard.UsageError: a tolerance is negative.
        reshard.BudgetError: `memory` is too little.

    >>> source = reshard.open("src_checkpoints", strategy="src_strategy.ckpt")
    >>> differences = reshard.diff(source, source.scale("net.layer1.weight", factor=2))
    >>> bool(differences), next(iter(differences.tensors))
    (False, 'net.layer1.weight')
    """
    from reshard.compute.differences import diff as diff_records  # it brings numpy

    first, second = (side if isinstance(side, Checkpoint) else _opened(side) for side in (a, b))
    with progress_of(progress) as callback:
        return diff_records(
            record_of(first), record_of(second), tolerance=tolerance, relative=relative,
            memory=size_of(memory, "memory"), threads=threads, client=client, progress=callback,
        )  # fmt: skip


def _opened(path: AnyName) -> Checkpoint:
    """Open a side; its errors name the options of `reshard.open`."""
    try:
        return open_checkpoint(path)
    except ReshardError as error:
        raise error.changed(lambda text: Text(*_of_open(text, path))) from None


def _of_open(text: str, path: AnyName) -> Iterator[str]:
    """Yield the parts of a text, with options as arguments of `reshard.open`."""
    for part in Text(text).parts:
        written = Text(part)
        yield f"reshard.open({str(path)!r}, {written})" if isinstance(part, Option) else written
