"""`reshard.convert`, a conversion in one call, and `reshard.load`, into memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from reshard import environment
from reshard.api.asked import refuse_options_of_paths
from reshard.api.checkpoints import Checkpoint, record_of
from reshard.api.checkpoints import open as open_checkpoint
from reshard.api.choices import carried_out, selection_of
from reshard.api.formats import target_options
from reshard.api.jobs import job
from reshard.api.options import RunKeywords, SelectionKeywords, taken
from reshard.api.plans import plan as planned
from reshard.arguments import checked
from reshard.core.listing import OpenOptions
from reshard.core.plan.changes import refuse_unused
from reshard.core.plan.inputs import Selection
from reshard.core.run.settings import RunOptions
from reshard.core.storage.places import as_place
from reshard.core.storage.threads import processor_count
from reshard.core.storage.urls.s3.options import use_options
from reshard.errors import UsageError
from reshard.strategy.names import ranges_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Unpack

    from reshard.api.options import ConvertOptions
    from reshard.core.run.settings import Report
    from reshard.core.storage.places import AnyName
    from reshard.strategy.strategy import Strategy


@checked
def convert(
    source: AnyName | Checkpoint,
    target: AnyName,
    *,
    to: str | None = None,
    source_strategy: Strategy | AnyName | None = None,
    target_strategy: Strategy | AnyName | None = None,
    **options: Unpack[ConvertOptions],
) -> Report:
    """Convert a checkpoint, as `reshard convert SOURCE TARGET` does.

    Args:
        source: a path as for `reshard.open`, or an opened checkpoint.
        target: a directory, or one file if it is called `*.ckpt` or `*.safetensors`; a local path, or a URL.
        to: the format: `safetensors` or `ckpt`, files of ranks, or one file; `hf` or `mindspore`, a set of whole
            tensors; `dcp`, of PyTorch; `checkpoint2`, of MindSpore Transformers; `deepspeed-universal`, of DeepSpeed;
            `orbax`, of JAX; `zarr`, a store. By default the one that the target's name implies, else the source's.
        source_strategy: which rank of the source holds which block: a strategy, or a strategy file.
        target_strategy: which rank of the target holds which block: a strategy, a strategy file, or rules (`.yaml`);
            None for whole tensors. For `checkpoint2` and `dcp` also a checkpoint that is cut as the target shall be.
        options: as in `help(reshard.api.options)`: `include`, `exclude`, `weights_only`, `name_map`, `cast`, `drop`,
            `allow_missing`, `rules`, `lora`, `selection`, `dequantize`; `ranks`, `target_stage`, `remove_redundancy`,
            `same_ranks`, `cipher`, `target_cipher`; `memory`, `threads`, `client`, `overwrite`, `restart`, `progress`,
            `storage_options`; and those of the format, such as `max_shard_size="4GB"`, which `reshard formats` lists.

    Returns:
        the bytes read and written, and the files.

    Raises:
        reshard.UsageError: options that contradict each other or the format.
        reshard.SourceError, reshard.StrategyError, reshard.BudgetError, reshard.TargetError: as `reshard.open`,
            `reshard.plan` and `Plan.run` do.

    >>> strategies = {"source_strategy": "src_strategy.ckpt", "target_strategy": "dst_strategy.ckpt"}
    >>> report = reshard.convert("src_checkpoints", "dst", to="safetensors", **strategies)
    >>> report.files[0], len(report.files), report.tensors
    ('rank_0/checkpoint_0.safetensors', 4, 15)
    """
    given: dict[str, Any] = {**options}
    cipher, dequantize = given.pop("cipher", None), given.pop("dequantize", None)
    refuse_options_of_paths(source, source_strategy=source_strategy, cipher=cipher)
    selection = selection_of(**taken(given, SelectionKeywords))
    how = taken(given, RunKeywords)
    use_options(how.pop("storage_options", None), *([] if isinstance(source, Checkpoint) else [source]), target)
    progress = how.pop("progress", None)
    wanted = target_options(given, "convert", to=to, target_strategy=target_strategy)
    threads = given.get("threads")
    path = as_place(target)
    conversion = job(
        record_of(source) if isinstance(source, Checkpoint) else as_place(source),
        path, OpenOptions(strategy=source_strategy, cipher=cipher), wanted, selection or Selection(), threads=threads,
        dequantize=dequantize,
    )  # fmt: skip
    refuse_unused(conversion.plan, selection, dequantize)
    warned = source.warnings if isinstance(source, Checkpoint) else ()
    return carried_out(conversion, path, RunOptions(threads=threads, **how), progress, warned)


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
