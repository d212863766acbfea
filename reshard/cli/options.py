"""Options that commands share, and what their values are turned into."""

from __future__ import annotations

import functools
import json
import os
import re
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from stat import S_IROTH, S_ISREG
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

import reshard
from reshard.cli.commands import INPUTS, KEY_FILES, OUTPUTS, STRATEGIES, WARNINGS, option
from reshard.dtypes import by_name
from reshard.errors import Faults, ReshardError, SourceError, UsageError
from reshard.layout.block import LONGEST_NAME
from reshard.plan.select import Selection
from reshard.storage.cipher import MODE, MODES, Cipher, read_key
from reshard.storage.places import as_place, is_url
from reshard.storage.small import is_text, parse_json, pointed, read_small

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reshard.storage.places import AnyName, Place

_MOST_RANKS = 1 << 20
_PLANNING = ("prefix", "format", "ranks", "remove_redundancy", "link_replicas", "memory", "target_cipher")
_LARGEST_NAME_MAP = 1 << 26
_MOST_KEY = 1 << 20
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kMGTP])(i?))?B?", re.IGNORECASE)


class Running(NamedTuple):
    """How a command is to run, and what it is to say: the values of `run_options`."""

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


def rank_list(_ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Return the ranks of a list such as `0,3-5`."""
    if value is None:
        return None
    found: set[int] = set()
    for part in value.split(","):
        match = _RANGE.fullmatch(part.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not low <= high < _MOST_RANKS:
            raise click.BadParameter(f"{part!r}: invalid rank or range of ranks; expected e.g. 0,3-5", param=param)
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def layout_rules(_ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """Return the rules of texts such as `embedding.*=split:0`."""
    found = {}
    for value in values:
        name, equals, rule = value.rpartition("=")
        if not (name and equals and rule):
            raise click.BadParameter(f"{value!r}: expected NAME=RULE, e.g. 'embedding.*=split:0'", param=param)
        found[name] = rule
    return found


def _casts(_ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for value in values:
        old, equals, new = value.partition("=")
        if not (old and equals and new):
            raise click.BadParameter(f"{value!r}: expected OLD=NEW, e.g. float32=bfloat16", param=param)
        before, after = by_name(old, UsageError).name, by_name(new, UsageError).name
        if found.setdefault(before, after) != after:
            raise click.BadParameter(f"{before} cannot become both {found[before]} and {after}", param=param)
    return found


def size(_ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Return the bytes that a text such as `4GB` (decimal) or `512MiB` (binary) means, as dask reads it."""
    if value is None:
        return None
    match = _SIZE.fullmatch(value.strip())
    if not match:
        raise click.BadParameter(f"{value!r}: invalid size; expected e.g. 4GB or 512MiB", param=param)
    power = "kmgtp".index(match[2].lower()) + 1 if match[2] else 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def _name_map(_ctx: click.Context, _param: click.Parameter, path: Path | None) -> dict[str, str]:
    """Read a JSON object of old names to new names.

    Raises:
        UsageError: it is none; all faults at once.
    """
    if path is None:
        return {}
    faults = Faults(f"name map {path}")
    repeated: list[str] = []
    raw = read_small(path, "name map", _LARGEST_NAME_MAP, UsageError)
    try:
        content = parse_json(raw, repeated)
    except json.JSONDecodeError as error:
        shown = pointed(error.doc, error.lineno - 1, error.colno - 1)
        raise UsageError(f"name map {path}: is not JSON: line {error.lineno}: {error.msg}{shown}") from None
    except ValueError as error:
        raise UsageError(f"name map {path}: is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f'name map {path}: is a JSON {type(content).__name__}; expected {{"old name": "new name"}}')
    for old in repeated:
        faults.add(f"name {old!r}", "is there twice")
    for old, new in content.items():
        if not isinstance(new, str):
            faults.add(f"name {old!r}", f"becomes a JSON {type(new).__name__}; expected the new name")
        elif not is_text(new) or not 1 <= len(new.encode()) <= LONGEST_NAME:
            faults.add(
                f"name {old!r:.300}", f"becomes {new!r:.60}; expected text of 1 to {LONGEST_NAME} bytes in UTF-8"
            )
    faults.raise_if_any(UsageError)
    return content


@contextmanager
def noting_swap(
    path: AnyName, strategy: AnyName | None, other: AnyName | None, reading: dict[str, Any]
) -> Iterator[None]:
    """Note on the error of a checkpoint that does not open with its strategy that it does with the other side's."""
    try:
        yield
    except SourceError as error:
        if strategy is not None and other is not None:
            with suppress(ReshardError, OSError):
                reshard.read_strategy(strategy)
                reshard.open(path, strategy=other, **reading)
                error.add_note(f"it fits {other}; are the two strategies swapped?")
        raise


def cluster_address(_ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Check the address of a cluster."""
    if value is not None and not re.fullmatch(r"local(?::[1-9][0-9]{0,3})?|(?!local)[a-z]+://\S+", value):
        raise click.BadParameter(
            f"{value!r}: invalid cluster; expected e.g. tcp://10.0.0.1:8786, local or local:4", param=param
        )
    return value


class PathType(click.Path):
    """A path, and what a command does with it, so that no file is written that is read (`commands.Command`).

    It is not empty: that of a shell variable that is not set would be the current directory.

    Args:
        role: `INPUTS` of what is read, `STRATEGIES` of strategy files and directories of them, `OUTPUTS` of a file that
            is written, None of a directory where files go.
        remote: it may be a URL that fsspec knows.
    """

    def __init__(self, role: str | None, *, remote: bool = False) -> None:
        super().__init__(path_type=Path)
        self.role, self.remote = role, remote

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the place that a path names."""
        if value == "":
            self.fail("is empty; expected a path", param, ctx)
        place = as_place(value)
        if is_url(place) and not self.remote:
            self.fail(f"{value} is a URL; expected a path on this machine", param, ctx)
        if ctx is not None and self.role is not None:
            ctx.meta.setdefault(self.role, []).append(place)
        return place


class StyleType(click.Choice[str]):
    """The style of a set of whole tensors."""

    def __init__(self) -> None:
        super().__init__(["mindspore", "huggingface"])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the style that a word means."""
        return super().convert({"hf": "huggingface", "ms": "mindspore"}.get(value, value), param, ctx)


READ, READ_PLACE = PathType(INPUTS), PathType(INPUTS, remote=True)
STRATEGY, STRATEGY_PLACE = PathType(STRATEGIES), PathType(STRATEGIES, remote=True)
WRITE, WRITE_PLACE = PathType(OUTPUTS), PathType(OUTPUTS, remote=True)
TARGET, TARGET_PLACE = PathType(None), PathType(None, remote=True)

json_option = option(
    "--json",
    "as_json",
    under="Output",
    first=True,
    is_flag=True,
    help="Print one JSON object; its keys: --help-all.",
)
source_strategy_option = option(
    "--source-strategy",
    under="Source",
    first=True,
    type=STRATEGY_PLACE,
    metavar="STRATEGY",
    help="Strategy file of the source, or directory of its ranks' strategy files.",
)

memory_option = option(
    "--memory",
    under="Running",
    first=True,
    callback=size,
    metavar="SIZE",
    help="Most memory that a run may use, such as 8GB.",
)
suffix_option = option(
    "--suffix",
    under="Source",
    metavar="SUFFIX",
    help="If a rank's directory has several checkpoints, take the one whose name ends with this.",
)
rank_pattern_option = option(
    "--rank-pattern",
    under="Source",
    metavar="PATTERN",
    default="rank_{rank}/*",
    show_default=True,
    help="Where a rank's files are below SOURCE, such as 'node{rank}/*.ckpt'.",
)


def _cipher(ctx: click.Context, param: click.Parameter, path: Path | None) -> Cipher | None:
    """Return the key that is in a file, or in the variable that is called like the one that names the file.

    A pipe will do, so that a program may hand the key over: --key-file <(vault ...).
    """
    variable = str(param.envvar).removesuffix("_FILE")
    if path is None:
        text = os.environ.get(variable)
        return Cipher(None, read_key(os.fsencode(text), variable)) if text else None
    try:
        with path.open("rb") as file:
            mode, content = os.fstat(file.fileno()).st_mode, file.read(_MOST_KEY)
    except OSError as error:
        raise UsageError(f"key file {path}: cannot be read: {error.strerror}") from None
    if S_ISREG(mode) and mode & S_IROTH:
        text = f"key file {path}: every user of this machine may read it; chmod 600 {path}"
        ctx.meta.setdefault(WARNINGS, []).append(text)
    if ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE:
        ctx.meta.setdefault(KEY_FILES, {})[param.name] = path if S_ISREG(mode) else "FILE"
    return Cipher(None, read_key(content, f"key file {path}"))


key_option = option(
    "--key-file",
    "cipher",
    under="Source",
    type=READ,
    callback=_cipher,
    envvar="RESHARD_KEY_FILE",
    metavar="FILE",
    help="Key of encrypted .ckpt files of SOURCE: 16, 24 or 32 bytes, or 48 or 64 hexadecimal digits. Without it "
    "$RESHARD_KEY_FILE names the file, or $RESHARD_KEY is the key.",
)
target_key_option = option(
    "--target-key-file",
    "target_cipher",
    under="Target",
    type=READ,
    callback=_cipher,
    envvar="RESHARD_TARGET_KEY_FILE",
    metavar="FILE",
    help="As --key-file, for TARGET; $RESHARD_TARGET_KEY_FILE and $RESHARD_TARGET_KEY. Of a run that is stopped, "
    "encrypted files start over.",
)


def encryption_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say how the target is encrypted, and pass them as one `target_cipher`."""

    @functools.wraps(command)
    def encrypting(*args: Any, target_cipher: Cipher | None, encryption: str | None, **others: Any) -> Any:
        if encryption and not target_cipher:
            raise UsageError("--encryption is about an encrypted target; give its key too: --target-key-file FILE")
        cipher = replace(target_cipher, mode=encryption) if target_cipher and encryption else target_cipher
        return command(*args, target_cipher=cipher, **others)

    mode = option(
        "--encryption",
        under="Target",
        type=click.Choice(MODES),
        help=f"How .ckpt files of TARGET are encrypted, with --target-key-file.  [default: {MODE}, as by MindSpore]",
    )
    wrapped: Callable[..., Any] = target_key_option(mode(encrypting))
    return wrapped


def source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say what the source is."""
    for add in (
        key_option,
        option(
            "--partial",
            under="Source",
            is_flag=True,
            help="The source may lack ranks, but not the blocks that are needed.",
        ),
        option(
            "--iteration",
            under="Source",
            type=click.IntRange(min=0),
            metavar="N",
            help="Which checkpoint of a run's directory; by default the one that the run names as its last.",
        ),
        option(
            "--stage",
            under="Source",
            type=click.IntRange(min=0),
            metavar="N",
            help="Only this stage of a pipeline source; with --source-strategy of that stage or of all.",
        ),
        option(
            "--layout",
            "layouts",
            under="Source",
            multiple=True,
            metavar="NAME=RULE",
            callback=layout_rules,
            help="How the tensors of this name (or glob) are cut, whatever the strategy says: whole, copy (every rank "
            "has a value of its own), split:DIM, DEV_MATRIX:TENSOR_MAP[:OPT_SIZE] such as 2,4:1,-1, or as `inspect` "
            "shows it. May be repeated.",
        ),
        suffix_option,
        rank_pattern_option,
        source_strategy_option,
    ):
        command = add(command)
    return command


def target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say what the target is, and pass them as `target_strategy` and one `planning`."""

    @functools.wraps(command)
    def planning(*args: Any, **given: Any) -> Any:
        asked = {key: given.pop(key) for key in _PLANNING}
        return command(*args, planning=asked | {"stage": given.pop("target_stage")}, **given)

    wrapped: Callable[..., Any] = planning
    for add in (
        encryption_options,
        memory_option,
        option(
            "--target-stage",
            under="Target",
            type=click.IntRange(min=0),
            metavar="N",
            help="Only the ranks of this stage of a pipeline target; with --target-strategy of that stage or of all.",
        ),
        option("--link-replicas", under="Target", is_flag=True, help="Make equal target files links to one file."),
        option(
            "--remove-redundancy",
            under="Target",
            is_flag=True,
            help="Store each block on one of the ranks that would hold it.",
        ),
        option(
            "--ranks",
            under="Target",
            callback=rank_list,
            metavar="LIST",
            help="Only these ranks of the target, such as 0,3-5.",
        ),
        option(
            "--format",
            under="Target",
            first=True,
            type=click.Choice(["ckpt", "safetensors"]),
            help="Format of the files.  [default: the source's]",
        ),
        option(
            "--prefix",
            under="Target",
            default="checkpoint_",
            show_default=True,
            help="Target files are rank_0/checkpoint_0.ckpt and so on.",
        ),
        option(
            "--target-strategy",
            under="Target",
            first=True,
            type=STRATEGY_PLACE,
            metavar="STRATEGY",
            help="Strategy file of the target; without it, one rank of whole tensors.",
        ),
    ):
        wrapped = add(wrapped)
    return wrapped


def drop_option(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option that lets tensors be left out, with what it means for a command."""
    return option("--drop", under="Tensors", multiple=True, metavar="GLOB", help=text)


def selection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say which tensors are wanted, and pass them as one `selection`."""

    @functools.wraps(command)
    def selecting(
        *args: Any,
        include: tuple[str, ...],
        exclude: tuple[str, ...],
        weights_only: bool,
        name_map: dict[str, str],
        casts: dict[str, str],
        drop: tuple[str, ...],
        allow_missing: tuple[str, ...],
        **others: Any,
    ) -> Any:
        selection = Selection(include, exclude, weights_only, name_map, casts, drop, allow_missing)
        return command(*args, selection=selection, **others)

    wrapped: Callable[..., Any] = selecting
    for add in (
        option(
            "--allow-missing",
            under="Tensors",
            multiple=True,
            metavar="GLOB",
            help="Weights that the source may lack. May be repeated.",
        ),
        drop_option("Weights that the target may lack. May be repeated."),
        option(
            "--cast",
            "casts",
            under="Tensors",
            first=True,
            multiple=True,
            callback=_casts,
            metavar="OLD=NEW",
            help="Convert a dtype, such as float32=bfloat16. Values are rounded to nearest. May be repeated.",
        ),
        option(
            "--name-map",
            under="Tensors",
            first=True,
            type=READ,
            callback=_name_map,
            metavar="FILE",
            help='JSON object of old to new names: {"layers.*.wq": "model.*.q_proj"}. Optimizer states follow.',
        ),
        option(
            "--exclude",
            under="Tensors",
            multiple=True,
            metavar="GLOB[@COUNT]",
            help="No tensors of these names. May be repeated.",
        ),
        option(
            "--include",
            under="Tensors",
            first=True,
            multiple=True,
            metavar="GLOB[@COUNT]",
            help="Only tensors of these names. With @COUNT, exactly that many. May be repeated.",
        ),
        option(
            "--weights-only",
            under="Tensors",
            first=True,
            is_flag=True,
            help="No optimizer states, global_step and the like.",
        ),
    ):
        wrapped = add(wrapped)
    return wrapped


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say how to run, and pass them as one `running`."""

    @functools.wraps(command)
    def runs(
        *args: Any,
        dry_run: bool,
        overwrite: bool,
        restart: bool,
        fsync: bool,
        drop_cache: bool | None,
        threads: int | None,
        scheduler: str | None,
        cluster: str | None,
        write_manifest: Place | None,
        as_json: bool,
        quiet: bool,
        **others: Any,
    ) -> Any:
        if cluster and (scheduler or (threads and not cluster.startswith("local"))):
            given = "--scheduler" if scheduler else "--threads"
            raise click.UsageError(f"{given} is only for runs on this machine; the workers of {cluster} have their own")
        running = Running(
            dry_run=dry_run,
            overwrite=overwrite,
            restart=restart,
            fsync=fsync,
            drop_cache=drop_cache,
            threads=threads,
            scheduler=scheduler,
            cluster=cluster,
            write_manifest=write_manifest,
            as_json=as_json,
            quiet=quiet,
        )
        return command(*args, running=running, **others)

    wrapped: Callable[..., Any] = runs
    for add in (
        option("-q", "--quiet", under="Output", first=True, is_flag=True, help="Print nothing but errors."),
        json_option,
        option(
            "--cluster",
            under="Running",
            metavar="ADDRESS",
            callback=cluster_address,
            help="Run on the dask cluster with its scheduler at ADDRESS, such as tcp://10.0.0.1:8786; its workers "
            "reach SOURCE and TARGET by the same paths. Or local, local:4: worker processes of this machine.",
        ),
        option(
            "--scheduler",
            under="Running",
            type=click.Choice(["threads", "synchronous"]),
            help="Scheduler of the dask graph.  [default: threads]",
        ),
        option(
            "--threads",
            under="Running",
            type=click.IntRange(min=1),
            metavar="N",
            help="Number of threads; of a local cluster, in each worker.  [default: one per processor, at most 4]",
        ),
        option(
            "--fsync/--no-fsync",
            under="Running",
            default=True,
            help="Sync each file to disk before it gets its name; without, there are no checksums.  [default: yes]",
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
            help="Replace target files that exist. The FILE of --write-manifest, too.",
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
