"""`reshard.load`: tensors in memory, without files between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from reshard import environment
from reshard.api.checkpoints import Checkpoint
from reshard.api.checkpoints import open as open_checkpoint
from reshard.api.plans import plan as planned
from reshard.arguments import checked
from reshard.core.storage.threads import processor_count
from reshard.errors import UsageError
from reshard.strategy.names import ranges_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Unpack

    from reshard.api.options import SelectionKeywords
    from reshard.core.storage.places import AnyName
    from reshard.strategy.strategy import Strategy


@checked
def load(
    source: AnyName | Checkpoint,
    target_strategy: Strategy | AnyName | None = None,
    *,
    rank: int = 0,
    into: Mapping[str, Any] | None = None,
    strict: bool = True,
    threads: int | None = None,
    **options: Unpack[SelectionKeywords],
) -> dict[str, Any]:
    """Load a checkpoint of any format into memory: whole tensors, or what one rank will hold.

    Args:
        source: a path as for `reshard.open`, or an opened checkpoint.
        target_strategy: which rank is to hold which block, as for `reshard.plan`; None for whole tensors.
        rank: the rank to load.
        into: numpy's arrays, or PyTorch's tensors on the CPU, by name, such as `model.state_dict()`: they are filled in
            place, each byte once, and values are rounded to their dtypes; of a DTensor the part of this process. By
            default new arrays of numpy are made.
        strict: refuse names that only the checkpoint or only `into` has; with False they are left as they are.
        threads: the number of threads; by default one for each available processor, and at most 4.
        options: as in `help(reshard.api.options)`: `include`, `exclude`, `weights_only`, `name_map`, `cast`, `drop`,
            `allow_missing`, `rules`, `lora`, `selection`.

    Returns:
        the arrays by name: those of `into` that are filled, or new ones.

    Raises:
        reshard.SourceError: the checkpoint cannot be read.
        reshard.UsageError: an array has another shape or cannot be filled, or names differ; all faults at once. Also
            a rank that is not there.

    >>> source = reshard.open("src_checkpoints", strategy="src_strategy.ckpt")
    >>> arrays = reshard.load(source, "dst_strategy.ckpt", rank=3, weights_only=True)
    >>> arrays["net.layer1.weight"].shape, arrays["net.layer1.weight"].dtype.name
    ((4, 32), 'float32')
    >>> import numpy as np
    >>> mine = {"net.layer1.weight": np.zeros((16, 32), np.float16)}
    >>> bool(reshard.load(source, into=mine, include=[*mine])["net.layer1.weight"].any())
    True
    """
    from reshard.compute.loading import fill, new_arrays  # not on every start

    opened = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    record = planned(opened, target_strategy, to="safetensors", **cast("Any", options))._record  # noqa: SLF001 -- ours
    if rank not in record.ranks:
        raise UsageError(
            f"there is no rank {rank}", code="no-such-rank", facts=[f"there are {ranges_text(record.ranks)}"]
        )
    arrays = new_arrays(record, rank) if into is None else into
    workers = min(environment.threads(threads) or processor_count(), threads or 4)
    filled = fill(record, rank, arrays, strict=strict, threads=workers)
    return {name: arrays[name] for name in filled}
