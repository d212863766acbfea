"""`reshard.open`, and the `Checkpoint` that users see."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from reshard.api.choices import progress_of, run_plan
from reshard.arguments import checked
from reshard.core.format import knowing
from reshard.core.listing import RANK_PATTERN
from reshard.core.model.holdings import strategy_of
from reshard.core.open import open as open_checkpoint
from reshard.core.plan.changes import refuse_unused
from reshard.core.plan.make import plan as make_plan
from reshard.core.plan.select import narrowed
from reshard.core.storage.urls.s3.options import use_options
from reshard.dtypes import name_of
from reshard.errors import UsageError
from reshard.messages import warn
from reshard.rules.lora import LoRA
from reshard.rules.rules import Rules
from reshard.sizes import size_of
from reshard.view.notebook.opened import OpenedArrays

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import zarr
    from dask.array import Array
    from numpy.typing import DTypeLike
    from zarr.abc.store import Store

    from reshard.compute.stats import CheckpointStats
    from reshard.core.model.checkpoint import Checkpoint as Record
    from reshard.core.plan.inputs import Selection
    from reshard.core.run.settings import Progress, Report
    from reshard.core.storage.cipher import Cipher
    from reshard.core.storage.places import AnyName
    from reshard.strategy.strategy import Strategy
    from reshard.view.ranks import RankArrays
    from reshard.view.tables import Groups


@checked
def open(  # noqa: A001 -- reshard.open, as zarr.open and xarray.open_dataset
    path: AnyName | Mapping[int, AnyName] | zarr.Group,
    *,
    strategy: Strategy | AnyName | None = None,
    rank_pattern: str = RANK_PATTERN,
    suffix: str | None = None,
    layout: Mapping[str, str] | None = None,
    stage: int | Literal["own"] | None = None,
    partial: bool = False,
    step: int | None = None,
    cipher: Cipher | None = None,
    contents: bool | Literal["blocks"] = True,
    chunks: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Open a checkpoint, reading headers and samples of the contents.

    Args:
        path: a directory of rank directories; the files of some ranks by number; a unified set; a zarr store; a
            Checkpoint 2.0 of MindSpore Transformers, or the directory of a run that saves such; a DCP of PyTorch, or
            the directory of several that are one checkpoint, such as of the model and of the optimizer; the files of
            DTensors that `torch.save` wrote on each rank; the parts that Megatron-LM or Meta saved; a set of `.bin`
            files; or one file of whole tensors. A local path, a URL such as `s3://bucket/run`, or a `zarr.Group`.
        strategy: which rank holds which block: a strategy, a strategy file, or a directory of the files of a
            pipeline's ranks. None: the one in the ledger, if reshard wrote the files or they are copies of such files;
            else the source is one rank of whole tensors.
        rank_pattern: the paths of a rank's files below `path`; `{rank}` stands for its number.
        suffix: take the files whose names end with this (with or without extension), if there are several checkpoints.
        layout: glob of tensor names to a rule (see `Layout.parse`), in place of the strategy's layout; `copy` for
            tensors whose value differs by rank. It must not contradict a ledger. For parts of Megatron-LM or Meta it
            replaces the table of names, over the parts in the place of ranks; `gate-and-up` for two fused layers.
        stage: only this stage of a pipeline. A strategy of one stage is refused without it if the strategy, the
            files next to it or the files of the checkpoint show that there are others. `own`: take a strategy as it
            is; if it covers one stage and other stages have files, only its tensors are taken, with a warning.
        partial: the files of some ranks are enough; a plan that needs missing ranks is refused.
        step: which checkpoint of a run; by default the one that the run names as its last.
        cipher: decrypts `.ckpt` files that MindSpore encrypted; needs the `crypto` extra. Plain files are refused
            (see `Cipher.required`).
        contents: compare samples of the strategy's replicas with each other, and of its different blocks; `blocks`
            compares only different blocks. Copies that are not sampled are taken to differ by rank if they may;
            `reshard.verify` compares all of them.
        chunks: the chunks of lazy arrays; see `Checkpoint.array`.
        storage_options: credentials and address of the buckets of `s3://` URLs, in place of the environment's: `key`,
            `secret`, `token`, `endpoint_url`, `region` and `anon`, as for fsspec and pandas; also those two in
            `client_kwargs`. They hold for the bucket in this process alone, so not with a cluster.

    Raises:
        reshard.SourceError: no files, no step that every rank has, missing ranks, headers that contradict the
            strategy; all faults at once.
        reshard.StrategyError: the strategy cannot be read.
        reshard.UsageError: options that contradict each other or the checkpoint.

    >>> reshard.open("src_checkpoints", strategy="src_strategy.ckpt")["net.layer1.weight"].shape
    (16, 32)
    """
    options: dict[str, Any] = {
        "strategy": strategy, "rank_pattern": rank_pattern, "suffix": suffix, "layouts": layout, "stage": stage,
        "partial": partial, "step": step, "cipher": cipher, "contents": contents,
    }  # fmt: skip
    if opened_by := knowing(path):
        from reshard.api.writing import open_value  # it brings dask

        record = open_value(path, opened_by, options)
    else:
        use_options(storage_options, *(path.values() if isinstance(path, Mapping) else [path]))
        record = open_checkpoint(path, **options)  # type: ignore[arg-type]  # no zarr.Group
    warn(record.warnings)
    return Checkpoint(replace(record, opening=replace(record.opening, chunks=chunks)))


class Checkpoint(OpenedArrays):
    """An opened checkpoint: a mapping of names to lazy dask arrays of whole tensors.

    >>> from reshard.core.model.checkpoint import Checkpoint as Record
    >>> [name for name in dir(Checkpoint(Record("ckpt", {}, (), ()))) if name not in dir(dict) and name[0] != "_"]
    ... # doctest: +NORMALIZE_WHITESPACE
    ['array', 'assign', 'astype', 'close', 'dequantize', 'derive', 'format', 'groups', 'hist', 'merge_lora', 'nbytes',
     'picture', 'rank', 'ranks', 'read_object', 'root', 'scale', 'sel', 'stats', 'strategy', 'tensors', 'to_dataframe',
     'to_strategy', 'to_zarr', 'unreadable', 'warnings']
    """

    __slots__ = ("_record",)
    _record: Record

    def __init__(self, record: Record, /) -> None:
        self._record = record

    __eq__ = object.__eq__  # Mapping's would compute arrays
    __hash__ = object.__hash__

    @checked
    def sel(self, *patterns: str, dtype: DTypeLike | None = None, kind: str | None = None) -> Checkpoint:
        """Return the checkpoint with only the tensors that match all conditions; nothing is read.

        A plan leaves out the other tensors, and does not report them as missing. The result is empty if no tensor is of
        the dtype and kind.

        Args:
            patterns: names of tensors, or globs; a tensor must match one, and each must match a tensor. By default all.
            dtype: a dtype, such as `bfloat16`, `bf16` or `numpy.float32`.
            kind: `weights`, `optimizer` (all its states), `moments`, `masters`, `steps`, `other`, or a group of
                `groups("kind")`.

        Raises:
            reshard.UsageError: a pattern matches no tensor; an unknown dtype or kind.
        """
        record = self._record.sel(*patterns) if patterns else self._record
        return Checkpoint(narrowed(record, dtype=None if dtype is None else name_of(dtype), kind=kind))

    @checked
    def rank(self, rank: int) -> RankArrays:
        """Return the blocks in a rank's files as lazy dask arrays by name, shown as a table.

        Parts that are not one block, as ZeRO cuts them, are one flat array; assigned arrays are those of every rank.

        Raises:
            reshard.UsageError: there are no files of this rank.
        """
        from reshard.view.ranks import stored_arrays  # it brings dask

        return stored_arrays(self._record, rank)

    @checked
    def derive(self, rules: Rules | AnyName) -> Checkpoint:
        """Return the checkpoint with names and shapes of another program, without reading.

        Args:
            rules: the rules between the two programs, or their file; see `reshard.Rules`.

        Raises:
            reshard.SourceError: tensors that no rule names, or several; missing parts; shapes that do not fit.
            reshard.UsageError: its names match neither side of the rules.
        """
        rules = rules if isinstance(rules, Rules) else Rules.read(rules)
        return self._changed(rules.derived(self._record).checkpoint)

    @checked
    def merge_lora(self, lora: LoRA | AnyName) -> Checkpoint:
        """Return the checkpoint with a LoRA adapter, merged into weights when they are read.

        Weights, and their masters, become `weight + scale * (B @ A)`, computed in float32 and rounded once.

        Args:
            lora: the adapter, or its directory; see `reshard.LoRA`.

        Raises:
            reshard.SourceError: the adapter cannot be read, or does not fit the weights; all faults at once.
            reshard.UsageError: rules were applied before, or the adapter changes no tensor.
        """
        from reshard.rules.lora.merge import merged  # not on every start

        return self._changed(merged(self._record, lora if isinstance(lora, LoRA) else LoRA(str(lora))))

    @checked
    def assign(self, arrays: Mapping[str, Any] | None = None, /, **named: Any) -> Checkpoint:
        """Return the checkpoint with arrays as tensors, in place of those of the same names, or in addition.

        A plan computes the chunks of a dask array where it writes them: see `reshard.write`.

        Args:
            arrays: dask or numpy arrays by name.
            named: the same, for names that are identifiers.

        Raises:
            reshard.UsageError: an array has a dtype that no checkpoint has, or chunks of unknown sizes.

        >>> import numpy as np
        >>> from reshard.core.model.checkpoint import Checkpoint as Record
        >>> list(Checkpoint(Record("ckpt", {}, (), ())).assign({"layers.0.w": np.ones((2, 3))}, b=np.zeros(3)))
        ['layers.0.w', 'b']
        """
        from reshard.api.writing import assign  # it brings dask

        return self._changed(assign(self._record, {**(arrays or {}), **named}))

    @checked
    def scale(self, *patterns: str, factor: float = 1.0, shift: float = 0.0) -> Checkpoint:
        """Return the checkpoint with chosen tensors multiplied by a factor, and a number added to them.

        `x * factor + shift` is computed in float32 (float64 in float64) on reading, each operation rounded by itself.

        Args:
            patterns: names of tensors, or globs; every one must match.
            factor: the factor.
            shift: the number to add.

        Raises:
            reshard.UsageError: a pattern matches no tensor, or a number is not finite.
            reshard.SourceError: a tensor is not of floats, or has blocks in no file; all at once.
        """
        from reshard.expressions.scale import scale  # not on every start

        return self._changed(scale(self._record, patterns, factor, shift))

    @checked
    def dequantize(self, dtype: DTypeLike = "bfloat16") -> Checkpoint:
        """Return the checkpoint with quantized weights multiplied by their scales when they are read.

        Weights are float8 with scales of blocks, rows or the tensor, or two E2M1 values a byte with E8M0 scales. Scales
        are left out, and a Hugging Face set of the result gets a `config.json` without `quantization_config`.

        Args:
            dtype: the dtype of these weights: `bfloat16`, `float16` or `float32`.

        Raises:
            reshard.SourceError: a weight has no scales, or scales of another shape; nothing is quantized.
            reshard.UsageError: another dtype; rules or an adapter were applied before.
        """
        from reshard.expressions.quantized.dequantize import dequantize  # not on every start

        return self._changed(dequantize(self._record, name_of(dtype)))

    @checked
    def astype(self, dtype: DTypeLike) -> Checkpoint:
        """Return the checkpoint with all tensors of floats in another dtype, rounded to nearest when they are read.

        Args:
            dtype: `float64`, `float32`, `bfloat16`, `float16`, `float8_e4m3fn` or `float8_e5m2`, or numpy's dtype.

        Raises:
            reshard.UsageError: another dtype.
            reshard.SourceError: a tensor has blocks in no file; all at once.
        """
        from reshard.expressions.cast import astype  # not on every start

        return self._changed(astype(self._record, name_of(dtype)))

    @checked
    def groups(self, by: str = "name") -> Groups:
        """Return the number, size and dtypes of the tensors.

        Args:
            by: `name` (repeated layers as one), `prefix`, `dtype`, or `kind`: weights, and each state of the optimizer.
        """
        from reshard.view.tables import groups  # views are not needed on every start

        return groups(self._record, by, Checkpoint)

    @checked
    def stats(
        self,
        *,
        memory: int | str | None = None,
        threads: int | None = None,
        client: Any = None,
        progress: Callable[[Progress], None] | bool | None = None,
    ) -> CheckpointStats:
        """Compute minimum, maximum, mean, standard deviation, norm, zeros, NaNs and infinities of each tensor.

        Each byte is read once; replicas are not read. The result is the same for any number of threads.

        Args:
            memory: the most resident memory to use, in bytes or as `"1GB"`.
            threads: the number of threads; by default one for each available processor, at most 4.
            client: as for `Plan.run`: a cluster, whose workers read by the same paths, or threads; by default the
                current client, else threads.
            progress: called with bytes read (as `written`) and to be read; True shows a bar.

        Raises:
            reshard.SourceError: a file cannot be read, or is shorter than its header says.
            reshard.BudgetError: `memory` is too little.
        """
        from reshard.compute.stats import stats  # it brings numpy

        with progress_of(progress) as callback:
            return stats(
                self._record, memory=size_of(memory, "memory"), threads=threads, client=client, progress=callback
            )

    @checked
    def array(self, name: str, *, chunks: Any = None) -> Array:
        """Return a tensor as a lazy dask array.

        Sums and means of bfloat16, float16 and float8 are accumulated in float32 (`LowPrecisionArray` in the guide).

        Args:
            name: the name of the tensor.
            chunks: in the words of dask: `"auto"`, the most bytes (`"64MB"`), a number of rows and columns, -1 for all,
                a tuple or a dict by dimension. By default, and for `{}`, a chunk is a
                source shard; shards larger than 8 MiB, or than dask's `array.chunk-size`, are cut along their rows.

        Raises:
            reshard.UsageError: there is no such tensor (a `KeyError`, too), or dask does not understand the chunks.
            reshard.SourceError: it cannot be read; the reason is in `unreadable`.
        """
        from reshard.view.arrays import tensor_array  # it brings dask

        self._record.require(name)
        return tensor_array(self._record, name, chunks=chunks)

    @checked
    def to_zarr(
        self,
        store: AnyName | Store,
        *,
        chunk_size: int | str | None = None,
        compression: str | None = None,
        selection: Selection | None = None,
        memory: int | str | None = None,
        fsync: bool = True,
        overwrite: bool = False,
        restart: bool = False,
        threads: int | None = None,
        client: Any = None,
        progress: Callable[[Progress], None] | bool | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Report:
        """Write the whole tensors as one zarr v3 group, in a directory of its own.

        Args:
            store: the directory, created if it does not exist; a local path, a URL, or a `zarr.storage.LocalStore`.
            chunk_size: the most bytes in a chunk, such as `"16MB"`; by default chunks are the source's blocks.
            compression: `zstd`, `zstd:3` and so on; by default none.
            selection: which tensors, under which names, as which dtypes.
            memory: the most resident memory to use, in bytes or as `"1GB"`.
            fsync: as for `Plan.run`.
            overwrite: as for `Plan.run`.
            restart: as for `Plan.run`.
            threads: as for `Plan.run`.
            client: as for `Plan.run`.
            progress: as for `Plan.run`.
            storage_options: as for `Plan.run`.

        Raises:
            reshard.ReshardError: as `reshard.plan` and `Plan.run` do.
        """
        from reshard.api.writing import directory_of
        from reshard.core.run.settings import RunOptions
        from reshard.formats.zarr.layout import ZarrGroup

        if opened_by := knowing(store):
            store = directory_of(store, opened_by)
        use_options(storage_options, store)
        files = ZarrGroup(size_of(chunk_size, "chunk_size"), compression=compression)
        plan = make_plan(self._record, files=files, selection=selection, memory=size_of(memory, "memory"))
        refuse_unused(plan, selection)
        warn(text for text in plan.warnings if text not in self.warnings)
        options = RunOptions(overwrite=overwrite, restart=restart, fsync=fsync, threads=threads, client=client)
        return run_plan(plan, store, options, progress)  # type: ignore[arg-type]  # no store of zarr any more

    @checked
    def to_strategy(self, *, drop: Collection[str] = ()) -> Strategy:
        """Return the strategy that it was opened with, or the one in its metadata (Checkpoint 2.0).

        Args:
            drop: names of tensors, or globs, that are left out; every one must match.

        Raises:
            reshard.UsageError: it has neither a strategy nor metadata of its blocks; a pattern matches no tensor.
            reshard.SourceError: tensors cannot be read, or lie on ranks that no strategy can express; all at once.

        >>> reshard.open("src_checkpoints", strategy="src_strategy.ckpt").to_strategy()
        <Strategy: 12 tensors over 8 ranks>
        """
        return strategy_of(self._record, drop=drop)

    @checked
    def read_object(self, name: str) -> Any:
        """Return an object of a DCP, or a file beside its tensors, as plain data.

        Nothing is imported or called.

        Other values are replaced by a description: the `Name` of a class or function, or a `Record` of its call. A
        tensor becomes a `TensorSpec`, and a `Namespace` a dict of its attributes.

        Args:
            name: the name of the object, as `reshard inspect` shows it.

        Raises:
            reshard.UsageError: there is no such object; a `KeyError`, too.
            reshard.SourceError: it cannot be read, or is damaged.

        >>> more = {"target_step": 1, "source_strategy": "src_strategy.ckpt"}
        >>> report = reshard.convert("src_checkpoints", "run", to="dcp", **more)
        >>> reshard.open("run").read_object("metadata.json")["sharded_backend"]
        'torch_dist'
        """
        from reshard.core.model.objects import Objects  # not on every start

        record = self._record
        return (record.format.objects(record) if record.format else Objects(record)).read(name)

    def __getitem__(self, name: str, /) -> Array:
        """Return a tensor as a lazy dask array, as `array(name)` does."""
        from reshard.view.arrays import tensor_array  # it brings dask

        self._record.require(name)
        return tensor_array(self._record, name)

    def _changed(self, record: Record) -> Checkpoint:
        """Return a checkpoint that was made of this one, and warn of what it adds."""
        warn(text for text in record.warnings if text not in self.warnings)
        return Checkpoint(record)


def record_of(checkpoint: Checkpoint, argument: str = "source") -> Record:
    """Return the record of a checkpoint, for internal functions.

    Raises:
        UsageError: the argument is not a `Checkpoint`.
    """
    if not isinstance(checkpoint, Checkpoint):
        hint = "open it with reshard.open" if isinstance(checkpoint, str | os.PathLike) else ""
        raise UsageError(
            f"{argument} is {checkpoint!r:.200}; expected a Checkpoint", code="not-a-checkpoint", hint=hint
        )
    return checkpoint._record  # noqa: SLF001 -- of this module
