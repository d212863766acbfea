"""`reshard.plan` and `reshard.read_plan`, and the `Plan` that users see."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from reshard.api.checkpoints import record_of
from reshard.api.choices import refuse_format, run_plan, selection_of
from reshard.api.formats import CUT, check_options, like, target_options
from reshard.api.jobs import planned
from reshard.api.options import SelectionKeywords, taken
from reshard.arguments import checked
from reshard.core.format import written
from reshard.core.plan.changes import refuse_unused
from reshard.core.plan.inputs import Selection, globs
from reshard.core.plan.make import with_memory
from reshard.core.plan.planfile import read as read_record
from reshard.core.plan.planfile import save as save_record
from reshard.core.run.settings import RunOptions
from reshard.core.storage.places import as_place
from reshard.core.storage.urls.s3.options import use_options
from reshard.errors import UsageError, names
from reshard.messages import warn
from reshard.sizes import size_of
from reshard.strategy.names import ranges_text

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping
    from typing import BinaryIO, Unpack

    from reshard.api.checkpoints import Checkpoint
    from reshard.api.options import PlanOptions
    from reshard.core.layout.arrangement import Arrangement
    from reshard.core.plan.plan import Plan as Record
    from reshard.core.plan.plan import Stats
    from reshard.core.run.graph import Graph
    from reshard.core.run.settings import Progress, Report
    from reshard.core.storage.cipher import Cipher
    from reshard.core.storage.places import AnyName
    from reshard.strategy.strategy import Strategy
    from reshard.view.ranks import RankArrays
    from reshard.view.svg import Picture


@checked
def plan(
    source: Checkpoint,
    target_strategy: Strategy | Arrangement | AnyName | None = None,
    *,
    to: str | None = None,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Plan the conversion of a checkpoint; nothing is read or written.

    Args:
        source: the checkpoint to convert, as `reshard.open` returns it.
        target_strategy: which rank is to hold which block: a strategy, a strategy file, or rules (`.yaml`); None for
            whole tensors. For a Checkpoint 2.0 and a DCP also a checkpoint that is cut as the target shall be.
        to: `safetensors` or `ckpt`, files of ranks; `hf` or `mindspore`, a set of whole tensors; `dcp`, of PyTorch;
            `checkpoint2`, of MindSpore Transformers; `deepspeed-universal`, of DeepSpeed; `orbax`, of JAX;
            `zarr`, a store. By default ckpt if all files of the source are .ckpt, else safetensors.
        options: as in `help(reshard.api.options)`: `include`, `exclude`, `weights_only`, `name_map`, `cast`, `drop`,
            `allow_missing`, `rules`, `lora`, `selection` (to which `drop` and `allow_missing` can be added); `ranks`,
            `target_stage`, `remove_redundancy`, `target_cipher`; `memory`, `threads`; and those of the format, such as
            `max_shard_size="4GB"`, which `reshard formats` lists.

    Raises:
        reshard.SourceError: weights are missing or would be dropped; all at once. Also a target layout that does not
            fit a tensor's shape, or a source that seems to be one rank of several.
        reshard.StrategyError: the target is one stage of a pipeline and neither `ranks` nor `target_stage` is given, or
            has no such stage.
        reshard.BudgetError: `memory` is too little; the error names the least that works.
        reshard.UsageError: an unknown format or rank, or an option that the format does not take.

    >>> source = reshard.open("src_checkpoints", strategy="src_strategy.ckpt")
    >>> plan = reshard.plan(source, "dst_strategy.ckpt", to="safetensors")
    >>> plan.ranks, plan.stats.bytes_read
    ((0, 1, 2, 3), 14924)
    >>> plan.run("dst").tensors
    15
    """
    record = record_of(source)
    given: dict[str, Any] = {**options}
    refuse_format(target_strategy, f"give it as to={target_strategy!r}")
    chosen: dict[str, Any] = taken(given, SelectionKeywords)
    if (selection := chosen.get("selection")) is not None:
        drop, may_lack = globs(chosen.pop("drop", ())), globs(chosen.pop("allow_missing", ()))
        chosen["selection"] = replace(
            selection, drop=selection.drop + drop, allow_missing=selection.allow_missing + may_lack
        )
    selection = selection_of(**chosen)
    if to is not None:
        format_ = written(to)
    else:  # files of ranks, in the encoding of the source's if all have the same
        own = like(record)
        format_ = own if own.one_file else written("safetensors")
    wanted = target_options(given, "plan", target_strategy=target_strategy)
    check_options(format_, wanted.given([*CUT, *wanted.of_format]))
    result = planned(record, wanted, format_, selection or Selection(), given.get("threads"))
    refuse_unused(result, selection)
    warn(text for text in result.warnings if text not in record.warnings)
    return Plan(result)


class Plan:
    """The plan of a conversion, made before anything is read or written.

    >>> [name for name in dir(Plan) if name[0] != "_"]
    ... # doctest: +NORMALIZE_WHITESPACE
    ['dropped', 'files', 'filesystem', 'format', 'graph', 'left_out', 'missing', 'open', 'picture', 'rank', 'ranks',
     'read', 'run', 'save', 'stats', 'to_dataframe', 'warnings']
    """

    __slots__ = ("_record",)
    _record: Record

    def __init__(self, record: Record, /) -> None:
        self._record = record

    @property
    def stats(self) -> Stats:
        """Return the cost: bytes to read and write, files, tasks, and peak memory."""
        return self._record.stats

    @property
    def format(self) -> str:
        """Return the format of the target files."""
        return self._record.format

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks of the target that are written."""
        return self._record.ranks

    @property
    def files(self) -> Mapping[str, int]:
        """Return the sizes in bytes of the files that it would write, by their paths below the target.

        Raises:
            reshard.UsageError: the files are compressed or encrypted, so that nobody knows their sizes yet.
        """
        from reshard.core.run.reading import reader_of  # not on every start

        return MappingProxyType(reader_of(self._record).sizes)

    @checked
    def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Return bytes of a file that it would write, without writing it.

        They are computed from the source when they are asked for, byte for byte what `run` writes. If a file stores
        checksums of its tensors, a tensor is read whole when its checksum is asked for.

        Args:
            path: one of `files`.
            offset: the first byte.
            nbytes: how many; by default all up to the end. At the end of the file there are fewer.

        Raises:
            KeyError: there is no such file.
            reshard.SourceError: a source file cannot be read.
            reshard.TargetError: a source file changed since it was opened; at a URL, only the first read looks.
            reshard.UsageError: a number is negative; the files are compressed or encrypted.

        >>> source = reshard.open("src_checkpoints", strategy="src_strategy.ckpt")
        >>> plan = reshard.plan(source, to="hf", weights_only=True)
        >>> [(path, size) for path, size in plan.files.items() if path.endswith(".safetensors")]
        [('model-00001-of-00001.safetensors', 7952)]
        >>> plan.read("model-00001-of-00001.safetensors", 8, 31)
        b'{"__metadata__":{"format":"pt"}'
        """
        from reshard.core.run.reading import reader_of

        return reader_of(self._record).read(path, offset, nbytes)

    @checked
    def open(self, path: str) -> BinaryIO:
        """Return a file that it would write, as a binary file that can seek; errors as for `read`.

        It reads a MiB ahead, and may be given to any library that takes a file.

        >>> source = reshard.open("src_checkpoints", strategy="src_strategy.ckpt")
        >>> import json
        >>> with reshard.plan(source, to="hf").open("model.safetensors.index.json") as file:
        ...     json.load(file)["weight_map"]["net.layer1.weight"]
        'model-00001-of-00001.safetensors'
        """
        from reshard.core.run.reading import opened, reader_of

        return opened(reader_of(self._record), path)

    @checked
    def filesystem(self) -> Any:
        """Return the files that it would write as a file system of fsspec, which only reads.

        Libraries that read by fsspec take it: `xarray.open_zarr(plan.filesystem().get_mapper())`, of a plan to a store.

        >>> source = reshard.open("src_checkpoints", strategy="src_strategy.ckpt")
        >>> files = reshard.plan(source, to="zarr").filesystem()
        >>> files.isdir("net.layer1.weight"), files.size("net.layer1.weight/zarr.json") > 100
        (True, True)
        """
        from reshard.core.run.filesystem import PlanFileSystem

        return PlanFileSystem(self._record)

    @property
    def dropped(self) -> tuple[str, ...]:
        """Return the names in the source that the target does not have."""
        return self._record.dropped

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the names in the target that the source does not have."""
        return self._record.missing

    @property
    def left_out(self) -> tuple[str, ...]:
        """Return the names in the source that the selection does not choose."""
        return self._record.left_out

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings, those from opening the source included."""
        return self._record.warnings

    @checked
    def rank(self, rank: int) -> RankArrays:
        """Return the contents of a target rank, as a mapping of names to lazy dask arrays.

        Raises:
            reshard.UsageError: the plan does not write this rank.
        """
        from reshard.view.ranks import planned_arrays  # it brings dask

        record = self._record
        if rank not in record.ranks:
            raise UsageError(
                f"this plan does not write rank {rank}", code="no-such-rank",
                facts=[f"it writes ranks {ranges_text(record.ranks)}"],
            )  # fmt: skip
        return planned_arrays(record, rank)

    @checked
    def picture(self, name: str | None = None) -> Picture:
        """Draw the transfers from source files to target files, or those of one tensor.

        The picture of one tensor has the blocks that are read, each from one rank, and those that are written.

        Args:
            name: the tensor, by its name in the target or the source; all by default.

        Raises:
            reshard.UsageError: the plan does not move such a tensor.
        """
        from reshard.view.html import picture

        transfers = self._record.transfers
        if name is not None and not any(name in (each.name, each.source_name) for each in transfers):
            alike = get_close_matches(name, (each.name for each in transfers), n=3)
            raise UsageError(
                f"the plan moves no tensor {name!r}", code="no-match",
                hint=f"did you mean {names(alike)}?" if alike else "",
            )  # fmt: skip
        return picture(self._record, name)

    @checked
    def graph(
        self, directory: AnyName, *, fsync: bool = True, overwrite: bool = False, partition: str | None = None
    ) -> Graph:
        """Return the dask graph that writes the target files.

        It is a dask collection: `compute()` writes the files and returns a `Report`; `dask.compute` computes it with
        other collections, `client.compute` on a cluster. It has a layer for each stage, and takes the annotations of
        `dask.annotate`.

        Existing files are looked for when the graph is made, not again when it is computed. `run` does more: it
        resumes a stopped run, removes unfinished files after a failure, keeps a ledger and checksums, checks that the
        workers see the same files, and reports progress.

        Args:
            directory: where the target files go; a local path, or a URL.
            fsync: as for `run`.
            overwrite: replace target files that exist, those of earlier runs of this plan, too; without it they are
                refused. No other file is removed.
            partition: as for `run`.

        Raises:
            reshard.TargetError: a target file exists, is one of the sources, or is being written by a run; a source
                file changed since it was opened.
        """
        from reshard.core.run.graph import graph  # it brings dask

        return graph(self._record, str(as_place(directory)), fsync=fsync, overwrite=overwrite, partition=partition)

    @checked
    def run(
        self,
        directory: AnyName,
        *,
        client: Any = None,
        threads: int | None = None,
        fsync: bool = True,
        drop_cache: bool | None = None,
        overwrite: bool = False,
        restart: bool = False,
        checksums: bool | None = None,
        ledger: bool = True,
        partition: str | None = None,
        server_copy: bool = True,
        memory: int | str | None = None,
        progress: Callable[[Progress], None] | bool | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Report:
        """Write the target files.

        The bytes are the same whatever the scheduler and the number of threads. A run that was stopped is resumed.

        Args:
            directory: where the target files go; made if it does not exist. A local path, or a URL.
            client: where to run: a `distributed.Client`; a cluster, such as `distributed.LocalCluster`; the address of
                a scheduler, or its file; `"processes"`, `"threads"` or `"synchronous"` of this machine, or another of
                dask's words for them; a function such as `dask.threaded.get`, or an executor, with which progress is
                reported at the end. By default the `scheduler` of dask's configuration; else the current client, if
                there is one; else threads. Workers must reach the source and the target by the same paths. If one is
                lost, its tasks run again elsewhere.
            threads: the number of threads of this process; by default one for each available processor, and at most
                the `threads` of `reshard.plan` (4 by default), for which the memory was predicted. With `"processes"`,
                the threads of each.
            fsync: sync every file to disk before it gets its name.
            drop_cache: keep source and target out of the page cache, so that other programs keep their pages; by
                default if source and target together are larger than memory.
            overwrite: replace target files that exist; without it they are refused, unless an earlier run of the same
                plan made them from the same sources. Files that earlier runs wrote there, and this one does not, are
                removed at the end.
            restart: discard the state of an earlier run in the target, and replace the files that it finished; other
                files that it wrote are removed, too.
            checksums: compute CRC-32C of the written bytes, so that an interrupted run can be resumed, and for
                `Report.manifest`; by default as `fsync`.
            ledger: keep a ledger in `.reshard` in the target: the files, and the run that writes them. Without it,
                nothing can be resumed. A zarr store has no ledger in it once it is finished.
            partition: `tensor`, a task writes parts of all files; or `file`, a task writes files from first byte to
                last. By default `file` if the target is at a URL or encrypted, else `tensor`.
            server_copy: from S3 to S3, let the store copy the parts of files that are parts of source files; their
                bytes are neither read nor checksummed here.
            memory: the most resident memory to use, in bytes or as `"1GB"`, in place of that of `reshard.plan`.
            progress: called with a `reshard.Progress` after each task, and at the beginning of a run that is resumed;
                True shows a bar, in a notebook or on a terminal.
            storage_options: as for `reshard.open`, for the target.

        Returns:
            the bytes read and written, and the files.

        Raises:
            reshard.TargetError: a target file exists, is one of the sources, or is being written by another run; the
                target was begun from other sources or by another plan; a source file changed while it was read.
            reshard.BudgetError: the disk is full, or has no room for the target; or `memory` is too little.
            reshard.SourceError: a source file changed or cannot be read.
            reshard.UsageError: options that contradict each other, or a client that is none.
            reshard.ReshardError: the cluster cannot be reached, has had no worker for 30 seconds, or failed.
        """
        options = RunOptions(
            client=client, threads=threads, fsync=fsync, drop_cache=drop_cache,
            overwrite=overwrite, restart=restart, checksums=checksums, ledger=ledger, partition=partition,
            server_copy=server_copy,
        )  # fmt: skip
        use_options(storage_options, directory)
        record = self._record
        if (limit := size_of(memory, "memory")) is not None:
            record = with_memory(record, limit, threads)
        return run_plan(record, directory, options, progress)

    @checked
    def to_dataframe(self) -> Any:
        """Return the plan as a `pandas.DataFrame`, a row for each tensor that it writes.

        Columns: `name`, `dtype`, `shape`, `nbytes`, `cut` in words and the number of `blocks`, all of the target;
        `kind`; `source_name`, `source_dtype` and `source_cut`.

        Raises:
            reshard.ReshardError: pandas is not installed.
        """
        from reshard.view.notebook.frames import plan_frame  # not on every start

        return plan_frame(self._record)

    @checked
    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write a plan file, which `reshard.read_plan` and `reshard run` read.

        It holds no weights and no key.

        Raises:
            reshard.TargetError: the file exists, or is one of the source's files.
            reshard.UsageError: a plan of this kind cannot be saved.
        """
        save_record(self._record, str(as_place(path)), overwrite=overwrite)

    def __repr__(self) -> str:
        return repr(self._record)

    def _repr_html_(self) -> str:
        from reshard.view.html import html

        return html(self._record)


@checked
def read_plan(
    path: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    cipher: Cipher | None = None,
    target_cipher: Cipher | None = None,
) -> Plan:
    """Read a plan file, which `Plan.save` wrote on any machine, and open its source.

    Args:
        path: the plan file.
        source: the source, if it was moved since it was planned: a directory with the same files below it.
        cipher: decrypts the source's files; a plan file holds no key.
        target_cipher: encrypts the target's files, in the mode that was planned.

    Raises:
        reshard.SourceError: the file is not valid, this version would make another plan, or the source is missing.
        reshard.TargetError: the source is not the one that was planned.
        reshard.UsageError: the source or the target is encrypted and no key is given, or the target is not encrypted
            and a key is given.

    >>> source = reshard.open("src_checkpoints", strategy="src_strategy.ckpt")
    >>> reshard.plan(source, "dst_strategy.ckpt").save("plan.json")
    >>> reshard.read_plan("plan.json").run("dst").tensors
    15
    """
    source = None if source is None else str(as_place(source))
    record = read_record(str(as_place(path))).plan(source, cipher=cipher, target_cipher=target_cipher)
    warn(record.warnings)
    return Plan(record)
