"""`reshard.convert`: a conversion in one call, with the defaults of the command of that name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.api.asked import refuse_options_of_paths
from reshard.api.checkpoints import Checkpoint, record_of
from reshard.api.choices import carried_out, selection_of
from reshard.api.formats import target_options
from reshard.api.jobs import job
from reshard.api.options import RunKeywords, SelectionKeywords, taken
from reshard.arguments import checked
from reshard.core.listing import OpenOptions
from reshard.core.plan.changes import refuse_unused
from reshard.core.plan.inputs import Selection
from reshard.core.run.settings import RunOptions
from reshard.core.storage.places import as_place
from reshard.core.storage.urls.s3.options import use_options

if TYPE_CHECKING:
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
