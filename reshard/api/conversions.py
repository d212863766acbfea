"""`reshard.convert`: a conversion in one call, with the defaults of the command of that name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.api.asked import TargetOptions, refuse_options_of_paths
from reshard.api.checkpoints import Checkpoint, record_of
from reshard.api.choices import carried_out, client_of, selection_of
from reshard.api.formats import given_options
from reshard.api.jobs import job
from reshard.arguments import checked
from reshard.core.listing import OpenOptions
from reshard.core.plan.changes import refuse_unused
from reshard.core.plan.inputs import Selection
from reshard.core.run.settings import RunOptions
from reshard.core.storage.places import as_place
from reshard.core.storage.urls.s3.options import use_options
from reshard.sizes import size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from reshard.api.choices import Globs
    from reshard.core.run.settings import Progress, Report
    from reshard.core.storage.cipher import Cipher
    from reshard.core.storage.places import AnyName
    from reshard.rules.lora import LoRA
    from reshard.rules.rules import Rules
    from reshard.strategy.strategy import Strategy


@checked
def convert(
    source: AnyName | Checkpoint,
    target: AnyName,
    *,
    to: str | None = None,
    source_strategy: Strategy | AnyName | None = None,
    target_strategy: Strategy | AnyName | None = None,
    same_ranks: bool = False,
    ranks: Iterable[int] | None = None,
    stage: int | None = None,
    remove_redundancy: bool = False,
    link_replicas: bool = False,
    include: Globs = (),
    exclude: Globs = (),
    weights_only: bool = False,
    name_map: Mapping[str, str] | None = None,
    cast: Mapping[str, str] | Globs | None = None,
    dequantize: str | None = None,
    drop: Globs = (),
    allow_missing: Globs = (),
    rules: Rules | Mapping[str, Any] | AnyName | None = None,
    lora: LoRA | AnyName | None = None,
    selection: Selection | None = None,
    cipher: Cipher | None = None,
    target_cipher: Cipher | None = None,
    memory: int | str | None = None,
    threads: int | None = None,
    client: Any = None,
    scheduler: Any = None,
    overwrite: bool = False,
    restart: bool = False,
    progress: Callable[[Progress], None] | bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **of_format: Any,
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
        same_ranks: `safetensors` and `ckpt`: convert each rank's file as it is cut; only the format changes. The
            default if the sharding of the source is unknown, and for one file.
        ranks: only these ranks of the target.
        stage: only the ranks of this stage of the target's pipeline.
        remove_redundancy: store each block on one of the ranks that would hold it.
        link_replicas: make equal target files links to one file.
        include: as in `reshard.Selection`.
        exclude: as in `reshard.Selection`.
        weights_only: as in `reshard.Selection`.
        name_map: as in `reshard.Selection`.
        cast: as in `reshard.Selection`.
        dequantize: multiply quantized weights by their scales first, as `Checkpoint.dequantize` to this dtype.
        drop: as in `reshard.Selection`.
        allow_missing: as in `reshard.Selection`.
        rules: as in `reshard.Selection`, or a rules file.
        lora: as in `reshard.Selection`, or the directory of an adapter.
        selection: in place of these keywords.
        cipher: decrypts the source's `.ckpt` files.
        target_cipher: encrypts the target's `.ckpt` files.
        memory: the most resident memory to use, in bytes or as `"1GB"`.
        threads: as for `Plan.run`.
        client: as for `Plan.run`.
        scheduler: as for `Plan.run`.
        overwrite: as for `Plan.run`.
        restart: as for `Plan.run`.
        progress: as for `Plan.run`.
        storage_options: as for `reshard.open`, for both paths.
        of_format: options of the format, such as `max_shard_size="4GB"`; `reshard formats` lists them.

    Returns:
        the bytes read and written, and the files.

    Raises:
        reshard.UsageError: options that contradict each other or the format.
        reshard.SourceError, reshard.StrategyError, reshard.BudgetError, reshard.TargetError: as `reshard.open`,
            `reshard.plan` and `Plan.run` do.

    >>> options = {"source_strategy": "src_strategy.ckpt", "target_strategy": "dst_strategy.ckpt"}
    >>> report = reshard.convert("src_checkpoints", "dst", to="safetensors", **options)
    >>> report.files[0], len(report.files), report.tensors
    ('rank_0/checkpoint_0.safetensors', 4, 15)
    """
    refuse_options_of_paths(source, source_strategy=source_strategy, cipher=cipher)
    use_options(storage_options, *([] if isinstance(source, Checkpoint) else [source]), target)
    selection = selection_of(
        selection, include=include, exclude=exclude, weights_only=weights_only, name_map=name_map, cast=cast, drop=drop,
        allow_missing=allow_missing, rules=rules, lora=lora,
    )  # fmt: skip
    options = TargetOptions(
        to=to, target_strategy=target_strategy, ranks=ranks, target_stage=stage,
        remove_redundancy=remove_redundancy, link_replicas=link_replicas, same_ranks=same_ranks,
        of_format=given_options(of_format, "convert"), memory=size_of(memory, "memory"), target_cipher=target_cipher,
    )  # fmt: skip
    path = as_place(target)
    conversion = job(
        record_of(source) if isinstance(source, Checkpoint) else as_place(source),
        path, OpenOptions(strategy=source_strategy, cipher=cipher), options, selection or Selection(), threads=threads,
        dequantize=dequantize,
    )  # fmt: skip
    refuse_unused(conversion.plan, selection, dequantize)
    running = RunOptions(client=client_of(client, scheduler), threads=threads, overwrite=overwrite, restart=restart)
    warned = source.warnings if isinstance(source, Checkpoint) else ()
    return carried_out(conversion, path, running, progress, warned)
