"""Options that commands share."""

from __future__ import annotations

import functools
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from reshard.api.asked import OPENING, TargetOptions
from reshard.cli.commands import option
from reshard.cli.terminal import JSON
from reshard.cli.values import (
    READ,
    READ_PLACE,
    STRATEGY_PLACE,
    WRITE_PLACE,
    StyleType,
    ToType,
    cluster_address,
    layout_rules,
    rank_list,
    read_cipher,
    size,
)
from reshard.errors import UsageError
from reshard.storage.cipher import MODE, MODES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from reshard.storage.cipher import Cipher
    from reshard.storage.places import Place


class Running(NamedTuple):
    """The values of `run_options`: how a command runs, and how much it prints."""

    dry_run: bool
    overwrite: bool
    restart: bool
    fsync: bool
    drop_cache: bool | None
    threads: int | None
    scheduler: str | None
    cluster: str | None
    write_manifest: Place | None
    as_json: bool
    quiet: bool
    verbose: bool


def remember_json(ctx: click.Context, _param: click.Parameter, value: bool) -> bool:
    """Report errors as JSON, too, if the option is given."""
    if value:
        ctx.meta[JSON] = True
    return value


json_option = option(
    "--json",
    "as_json",
    under="Output",
    first=True,
    is_flag=True,
    is_eager=True,
    callback=remember_json,
    help="Print one JSON object; its keys: --help-all.",
)
raw_option = option(
    "--raw", under="Output", is_flag=True, help="Show device matrices and tensor maps, as strategy files have them."
)
quiet_option = option("-q", "--quiet", under="Output", first=True, is_flag=True, help="Print nothing but errors.")
verbose_option = option(
    "-v", "--verbose", under="Output", first=True, is_flag=True, help="Print everything there is to say of it."
)
overwrite_file_option = option(
    "--overwrite", under="Output", first=True, is_flag=True, help="Replace FILE if it exists."
)
memory_option = option(
    "--memory",
    under="Running",
    first=True,
    callback=size,
    metavar="SIZE",
    help="Most memory to use, such as 8GB.",
)
threads_option = option(
    "--threads",
    under="Running",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of threads; of a local cluster, in each worker.  [default: one per processor, at most 4]",
)
cluster_option = option(
    "--cluster",
    under="Running",
    metavar="ADDRESS",
    callback=cluster_address,
    help="Run on the dask cluster with its scheduler at ADDRESS, such as tcp://10.0.0.1:8786; its workers reach SOURCE "
    "and TARGET by the same paths. With local or local:4 worker processes of this machine are started.",
)


def drop_option(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the `--drop` option with the help text of a command."""
    return option("--drop", under="Tensors", multiple=True, metavar="GLOB", help=text)


class _Opening(NamedTuple):
    """An option of opening a checkpoint: for SOURCE, and for TARGET if both are opened."""

    source: Callable[[Callable[..., Any]], Callable[..., Any]]
    target: Callable[[Callable[..., Any]], Callable[..., Any]]


def opening_flag(name: str, side: str = "") -> str:
    """Return the flag of a parameter of `OPENING`.

    >>> opening_flag("layouts"), opening_flag("rank_pattern", "target-")
    ('--layout', '--target-rank-pattern')
    """
    return f"--{side}{name.removesuffix('s').replace('_', '-')}"


def _opening(name: str, **attrs: Any) -> _Opening:
    source, target = opening_flag(name), opening_flag(name, "target-")
    as_source = attrs | {"help": f"As {source}, for TARGET."}
    return _Opening(
        option(source, name, under="Source", **attrs),
        option(target, f"target_{name}", under="Target", **as_source),
    )


_SUFFIX = _opening(
    "suffix",
    metavar="SUFFIX",
    help="If a rank's directory has several checkpoints, take the one whose name ends with this.",
)
_RANK_PATTERN = _opening(
    "rank_pattern",
    metavar="PATTERN",
    default=OPENING["rank_pattern"],
    show_default=True,
    help="Where a rank's files are below SOURCE, such as 'node{rank}/*.ckpt'.",
)
_ITERATION = _opening(
    "iteration",
    type=click.IntRange(min=0),
    metavar="N",
    help="Which checkpoint of a run's directory; by default the one that the run names as its last.",
)
_OPENING = (
    _opening("partial", is_flag=True, help="The source may lack ranks, but not the blocks that are needed."),
    _ITERATION,
    _opening(
        "stage",
        type=click.IntRange(min=0),
        metavar="N",
        help="Only this stage of a pipeline source; with --source-strategy of that stage or of all.",
    ),
    _opening(
        "layouts",
        multiple=True,
        metavar="NAME=RULE",
        callback=layout_rules,
        help="How the tensors of this name (or glob) are cut, in place of what the strategy says: whole, copy (every "
        "rank has a value of its own), split:DIM, DEV_MATRIX:TENSOR_MAP[:OPT_SIZE] such as 2,4:1,-1, or as `inspect` "
        "shows it. May be repeated.",
    ),
    _SUFFIX,
    _RANK_PATTERN,
)
suffix_option, rank_pattern_option, iteration_option = _SUFFIX.source, _RANK_PATTERN.source, _ITERATION.source

source_strategy_option = option(
    "--source-strategy",
    under="Source",
    first=True,
    type=STRATEGY_PLACE,
    metavar="STRATEGY",
    help="Strategy file of the source, or a directory of them. What reshard wrote, and copies of that, need none.",
)
target_strategy_option = option(
    "--target-strategy",
    under="Target",
    first=True,
    type=STRATEGY_PLACE,
    metavar="STRATEGY",
    help="Strategy file or rules (.yaml) of the target. Without it, there is one rank of whole tensors.",
)
key_option = option(
    "--key-file",
    "cipher",
    under="Source",
    type=READ,
    callback=read_cipher,
    envvar="RESHARD_KEY_FILE",
    metavar="FILE",
    help="Key of encrypted .ckpt files of SOURCE: 16, 24 or 32 bytes, or 48 or 64 hexadecimal digits. Without it "
    "$RESHARD_KEY_FILE names the file, or $RESHARD_KEY is the key; these are used only where files are encrypted.",
)
target_key_option = option(
    "--target-key-file",
    "target_cipher",
    under="Target",
    type=READ,
    callback=read_cipher,
    envvar="RESHARD_TARGET_KEY_FILE",
    metavar="FILE",
    help="As --key-file, for TARGET; $RESHARD_TARGET_KEY_FILE and $RESHARD_TARGET_KEY. With any of them nothing is "
    "written that cannot be encrypted. If a run is stopped, its encrypted files start over.",
)


def encryption_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of encrypting the target, and pass them as one `target_cipher`."""

    @functools.wraps(command)
    def encrypting(*args: Any, target_cipher: Cipher | None, encryption: str | None, **kwargs: Any) -> Any:
        if encryption and not target_cipher:
            raise UsageError("--encryption needs the key of TARGET", code="no-key", hint="add --target-key-file FILE")
        cipher = replace(target_cipher, mode=encryption) if target_cipher and encryption else target_cipher
        return command(*args, target_cipher=cipher, **kwargs)

    mode = option(
        "--encryption",
        under="Target",
        type=click.Choice(MODES),
        help=f"How .ckpt files of TARGET are encrypted, with --target-key-file.  [default: {MODE}, as by MindSpore]",
    )
    wrapped: Callable[..., Any] = target_key_option(mode(encrypting))
    return wrapped


def source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of opening the source."""
    for add in (key_option, *(opening.source for opening in _OPENING), source_strategy_option):
        command = add(command)
    return command


def opened_target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of opening a target, and pass them as `target_reading`."""

    @functools.wraps(command)
    def reading(*args: Any, **kwargs: Any) -> Any:
        target_reading = {name: kwargs.pop(f"target_{name}") for name in OPENING}
        return command(*args, target_reading=target_reading, **kwargs)

    wrapped: Callable[..., Any] = reading
    for add in (
        target_key_option,
        *(opening.target for opening in _OPENING),
        target_strategy_option,
    ):
        wrapped = add(wrapped)
    return wrapped


def target_options(verb: Literal["convert", "transform", "unify", "plan"]) -> Callable[..., Any]:
    """Return a decorator that adds target options and passes them as `options`."""
    return functools.partial(_with_target_options, verb)


def _with_target_options(verb: str, command: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(command)
    def asking(*args: Any, **kwargs: Any) -> Any:
        values = {field.name: kwargs.pop(field.name) for field in fields(TargetOptions)}
        return command(*args, options=TargetOptions(**values), **kwargs)

    wrapped: Callable[..., Any] = asking
    for add in (encryption_options, memory_option, *_target_options(), *_format_options(verb), target_strategy_option):
        wrapped = add(wrapped)
    return wrapped


def _target_options() -> Iterable[Callable[..., Any]]:
    """Yield the options of targets, the last first."""
    yield option(
        "--compression", under="Target", metavar="CODEC", help="zarr: zstd, or zstd:LEVEL like zstd:3.  [default: none]"
    )
    yield option(
        "--shard-size",
        under="Target",
        callback=size,
        metavar="SIZE",
        help="zarr: the most bytes of chunks in a file; 0 for each chunk in its own.  [default: 64MiB if chunks are "
        "small]",
    )
    yield option(
        "--chunk-size",
        under="Target",
        callback=size,
        metavar="SIZE",
        help="zarr: the most bytes in a chunk, such as 16MB.  [default: chunks are the source's blocks]",
    )
    yield option(
        "--target-stage",
        under="Target",
        type=click.IntRange(min=0),
        metavar="N",
        help="Only the ranks of this stage of a pipeline target; with --target-strategy of that stage or of all.",
    )
    yield option("--link-replicas", under="Target", is_flag=True, help="Make equal target files links to one file.")
    yield option(
        "--remove-redundancy",
        under="Target",
        is_flag=True,
        help="Store each block on one of the ranks that would hold it.",
    )
    yield option(
        "--ranks",
        under="Target",
        callback=rank_list,
        metavar="LIST",
        help="Only these ranks of the target, such as 0,3-5.",
    )
    yield option(
        "--same-ranks",
        under="Target",
        is_flag=True,
        help="ckpt, safetensors: keep each rank's file as it is cut; only the format changes. No strategy is needed.  "
        "[default: if nothing says how SOURCE was sharded, and --to is given]",
    )
    yield option(
        "--link",
        under="Target",
        is_flag=True,
        help="dcp: link the files of SOURCE, a DCP or the directory of several, and write .metadata alone: to rename, "
        "leave out or merge takes no time and no space.",
    )
    yield option(
        "--target-step",
        under="Target",
        type=click.IntRange(min=0),
        metavar="N",
        help="checkpoint2: how many steps the training has done; TARGET/iteration_N is written, and the tracker names "
        "it.  [default: what the source says]  dcp: TARGET/iter_N, as Megatron has it.  [default: TARGET "
        "itself]",
    )
    yield option(
        "--prefix",
        under="Target",
        metavar="PREFIX",
        help="What names of files begin with: rank_0/PREFIX0.ckpt and so on, or PREFIX-model-… of checkpoint2.  "
        "[default: checkpoint_, or the source's or checkpoint]",
    )
    yield option(
        "--max-shard-size",
        under="Target",
        callback=size,
        metavar="SIZE",
        help="hf, mindspore, dcp, checkpoint2: most tensor bytes in a file of whole tensors. One tensor alone may have "
        "more.  [default: 4GB; dcp: 1GiB]",
    )
    yield option(
        "--layouts-of",
        under="Target",
        type=READ_PLACE,
        metavar="CHECKPOINT",
        help="checkpoint2, dcp: cut the tensors as in this Checkpoint 2.0, of which metadata.json is enough, in place "
        "of --target-strategy.",
    )


def _format_options(verb: str) -> Iterable[Callable[..., Any]]:
    """Yield the format options: `--to`, or `--format` and `--style` for old commands."""
    old = verb in {"transform", "unify"}
    default = "by --style" if verb == "unify" else "the source's"
    yield option(
        "--style",
        under="Target",
        first=old,
        hidden=not old,
        type=StyleType(),
        metavar="STYLE",
        help="Names of the files of a set: huggingface, mindspore or checkpoint2.",
    )
    yield option(
        "--format",
        under="Target",
        first=old,
        hidden=not old,
        type=ToType(),
        metavar="FORMAT",
        help=f"Format of the files, in the words of `convert`.  [default: {default}]",
    )
    yield option(
        "--to",
        under="Target",
        first=not old,
        hidden=old,
        type=ToType(),
        metavar="FORMAT",
        help="ckpt or safetensors (files of ranks, or one file), hf or mindspore (a set of whole tensors), dcp, "
        "checkpoint2, or zarr. A DCP is of PyTorch, a Checkpoint 2.0 of MindSpore Transformers. The files of hf are "
        "model-00001-of-00002.safetensors and so on with model.safetensors.index.json; those of mindspore "
        "part0.safetensors with param_name_map.json, and hyper_param.safetensors for what the strategy does not name. "
        "dcp and checkpoint2 are of blocks with --target-strategy or --layouts-of, else of whole tensors, which load "
        "on every number of devices.  "
        "[default: as TARGET is named, else as SOURCE]",
    )


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of running, and pass them as one `running`."""

    @functools.wraps(command)
    def runs(*args: Any, **kwargs: Any) -> Any:
        running = Running(**{name: kwargs.pop(name) for name in Running._fields})
        cluster = running.cluster
        if cluster and (running.scheduler or (running.threads and not cluster.startswith("local"))):
            typed = "--scheduler" if running.scheduler else "--threads"
            raise UsageError(
                f"{typed} is for this machine; the workers of {cluster} have their own",
                code="conflicting-options",
                hint=f"leave {typed} out",
            )
        return command(*args, running=running, **kwargs)

    wrapped: Callable[..., Any] = runs
    for add in (
        quiet_option,
        verbose_option,
        json_option,
        cluster_option,
        option(
            "--scheduler",
            under="Running",
            type=click.Choice(["threads", "synchronous"]),
            help="Scheduler of the dask graph.  [default: threads]",
        ),
        threads_option,
        option(
            "--fsync/--no-fsync",
            under="Running",
            default=True,
            help="Sync each file to disk before it gets its name; without it, there are no checksums.  [default: yes]",
        ),
        option(
            "--drop-cache/--no-drop-cache",
            under="Running",
            default=None,
            help="Keep what is read and written out of the page cache.  [default: if source and target together are "
            "larger than memory]",
        ),
        option(
            "--write-manifest",
            under="Output",
            type=WRITE_PLACE,
            metavar="FILE",
            help="Write checksums of the target files into FILE, for `reshard verify --manifest`; what is written now "
            "is not read again for it.",
        ),
        option(
            "--overwrite",
            under="Running",
            first=True,
            is_flag=True,
            help="Replace files that are in TARGET. Others that earlier runs wrote there are removed at the end. "
            "The FILE of --write-manifest is replaced, too.",
        ),
        option(
            "--restart",
            under="Running",
            first=True,
            is_flag=True,
            help="Start over: replace what an earlier run left. Without it, such a run is resumed.",
        ),
        option(
            "--dry-run",
            under="Running",
            first=True,
            is_flag=True,
            help="Only print what would be read and written.",
        ),
    ):
        wrapped = add(wrapped)
    return wrapped
