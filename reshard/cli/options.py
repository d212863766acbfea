"""Options that commands share, and the records in which commands get their values.

An option is declared once: its name, its group in the help, its text, and what parses its value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from reshard.api.asked import TargetOptions
from reshard.api.formats import help_of
from reshard.cli.commands import GroupedOption, option, record
from reshard.cli.terminal import JSON
from reshard.cli.values import (
    READ,
    STRATEGY_PLACE,
    WRITE,
    WRITE_PLACE,
    ToType,
    cluster_address,
    dequantized_dtype,
    layout_rules,
    rank_list,
    read_cipher,
    size,
    tuned,
)
from reshard.core.format import targets, written
from reshard.core.listing import OpenOptions
from reshard.core.options import takers
from reshard.core.run.clusters.names import is_word
from reshard.core.run.settings import RunOptions
from reshard.core.storage.cipher import MODE, MODES
from reshard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reshard.core.format import Format
    from reshard.core.options import OptionField
    from reshard.core.storage.cipher import Cipher
    from reshard.core.storage.places import Place

_source, _target, _running, _output = (
    partial(option, under="Source"),
    partial(option, under="Target"),
    partial(option, under="Running"),
    partial(option, under="Output"),
)
_NUMBER: dict[str, Any] = {"type": click.IntRange(min=0), "metavar": "N"}
_SIZE: dict[str, Any] = {"callback": size, "metavar": "SIZE"}


def _named(formats: Iterable[Format]) -> str:
    return ", ".join(each.name for each in formats)


# --- output -----------------------------------------------------------------------------------------------------


def remember_json(ctx: click.Context, _param: click.Parameter, value: bool) -> bool:
    """Report errors as JSON, too, if the option is given."""
    if value:
        ctx.meta[JSON] = True
    return value


json_option = _output(
    "--json", "as_json", in_short_help=True, is_flag=True, is_eager=True, callback=remember_json,
    help="Print one JSON object; its keys: --help-all.",
)  # fmt: skip
quiet_option = _output("-q", "--quiet", in_short_help=True, is_flag=True, help="Print nothing but errors.")
verbose_option = _output("-v", "--verbose", in_short_help=True, is_flag=True, help="Print all details.")


def output_file_option(text: str) -> GroupedOption:
    """Return the option for the file that a command writes, with its help text."""
    return _output("-o", "--output", in_short_help=True, type=WRITE, required=True, metavar="FILE", help=text)


overwrite_file_option = _output("--overwrite", in_short_help=True, is_flag=True, help="Replace FILE if it exists.")


# --- running ----------------------------------------------------------------------------------------------------


memory_option = _running("--memory", in_short_help=True, **_SIZE, help="Most memory to use, such as 8GB.")
threads_option = _running(
    "--threads", type=click.IntRange(min=1), metavar="N",
    help="Number of threads; of a local cluster, in each worker.  [default: one per processor, at most 4]",
)  # fmt: skip
cluster_option = _running(
    "--cluster", metavar="ADDRESS", callback=cluster_address, envvar="RESHARD_CLUSTER",
    help="Run on the dask cluster whose scheduler is at ADDRESS, such as tcp://10.0.0.1:8786, or in the file ADDRESS. "
    "local and local:4 start worker processes here; threads and synchronous run in this process.  "
    "[default: $DASK_SCHEDULER_ADDRESS, else threads]",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Running(RunOptions):
    """How a command runs a plan, and how much it prints."""

    cluster: str | None
    dry_run: bool
    write_manifest: Place | None
    as_json: bool
    quiet: bool
    verbose: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cluster and self.threads and not is_word(self.cluster):
            raise UsageError(
                f"--threads is for this machine; the workers of {self.cluster} have their own",
                code="conflicting-options",
                hint="leave --threads out",
            )


def _running_of(*, tune: dict[str, bool], **values: Any) -> Running:
    return Running(**{**values, **tune})


run_options = record(
    "running",
    _running_of,
    _running("--dry-run", in_short_help=True, is_flag=True, help="Only print what would be read and written."),
    _running(
        "--restart", in_short_help=True, is_flag=True,
        help="Replace what an earlier run left. Else it is resumed.",
    ),
    _running(
        "--overwrite", in_short_help=True, is_flag=True,
        help="Replace files that are in TARGET. Others that earlier runs wrote there are removed.",
    ),
    _output(
        "--write-manifest", type=WRITE_PLACE, metavar="FILE",
        help="Write checksums of the target files into FILE, for `reshard verify --manifest`.",
    ),
    threads_option,
    _running(
        "--tune", multiple=True, callback=tuned, envvar="RESHARD_TUNE", metavar="NAME=VALUE",
        help="fsync=no: do not sync files to disk; there are no checksums, and a resumed run writes unfinished files "
        "again. drop-cache=yes (or no): keep what is read and written out of the page cache. server-copy=no: send all "
        "bytes from S3 to S3. May be repeated.",
    ),
    cluster_option,
    json_option,
    verbose_option,
    quiet_option,
)  # fmt: skip


# --- keys -------------------------------------------------------------------------------------------------------


key_option = _source(
    "--key-file", "cipher", type=READ, callback=read_cipher, envvar="RESHARD_KEY_FILE", metavar="FILE",
    help="Key of encrypted .ckpt files of SOURCE: 16, 24 or 32 bytes, or 48 or 64 hexadecimal digits.  "
    "[default: $RESHARD_KEY_FILE, or the key in $RESHARD_KEY]",
)  # fmt: skip
target_key_option = _target(
    "--target-key-file", "target_cipher", type=READ, callback=read_cipher, envvar="RESHARD_TARGET_KEY_FILE",
    metavar="FILE",
    help="As --key-file, for .ckpt files of TARGET.  [default: $RESHARD_TARGET_KEY_FILE, or $RESHARD_TARGET_KEY]",
)  # fmt: skip


# --- opening ----------------------------------------------------------------------------------------------------


def drop_option(text: str) -> GroupedOption:
    """Return the `--drop` option with the help text of a command."""
    return option("--drop", under="Tensors", multiple=True, metavar="GLOB", help=text)


def opening_flag(name: str) -> str:
    """Return the flag of a field of `OpenOptions`.

    >>> opening_flag("layouts"), opening_flag("rank_pattern")
    ('--layout', '--rank-pattern')
    """
    return f"--{'layout' if name == 'layouts' else name.replace('_', '-')}"


_LAYOUT: dict[str, Any] = {"multiple": True, "metavar": "NAME=RULE", "callback": layout_rules}
_OPENING = (
    _source(
        "--rank-pattern", metavar="PATTERN", default=OpenOptions().rank_pattern, show_default=True,
        help="Where a rank's files are below SOURCE, such as 'node{rank}/*.ckpt'.",
    ),
    _source(
        "--suffix", metavar="SUFFIX",
        help="If a directory has several checkpoints, take the one whose name ends with this.",
    ),
    _source(
        "--layout", "layouts", **_LAYOUT,
        help="How the tensors of this name (or glob) are cut, in place of what the strategy says: whole, copy (every "
        "rank has a value of its own), split:DIM, or DEV_MATRIX:TENSOR_MAP[:OPT_SIZE] such as 2,4:1,-1. May be "
        "repeated.",
    ),
    _source(
        "--stage", **_NUMBER,
        help="Only this stage of a pipeline source; with --source-strategy of that stage or of all.",
    ),
    _source(
        "--step", **_NUMBER,
        help="Which checkpoint of a run's directory; by default the one that the run names as its last.",
    ),
    _source("--partial", is_flag=True, help="The source may lack ranks, but not the blocks that are needed."),
)  # fmt: skip

source_strategy_option = _source(
    "--source-strategy", in_short_help=True, type=STRATEGY_PLACE, metavar="STRATEGY",
    help="Strategy file of SOURCE, or their directory. Not needed for what reshard wrote, or copies of it.",
)  # fmt: skip
target_strategy_option = _target(
    "--target-strategy", in_short_help=True, type=STRATEGY_PLACE, metavar="STRATEGY",
    help="Strategy file or rules (.yaml) of the target. Without it, there is one rank of whole tensors. "
    f"{_named(each for each in targets() if each.takes_layouts)}: also a checkpoint that is cut as TARGET shall be.",
)  # fmt: skip


dequantize_option = option(
    "--dequantize", under="Tensors", metavar="DTYPE",
    callback=dequantized_dtype,
    help="Multiply float8 and 4-bit weights by their scales: to bfloat16, float16 or float32, before anything "
    "else here.",
)  # fmt: skip


def _opening_of(**values: Any) -> OpenOptions:
    return OpenOptions(**{name.removeprefix("source_").removeprefix("target_"): values[name] for name in values})


class Openings(NamedTuple):
    """The options of opening several sources.

    Attributes:
        strategies: one for all sources that need one, or one for each.
        common: the other options.
    """

    strategies: tuple[Place, ...]
    common: OpenOptions


def _openings_of(*, strategies: tuple[Place, ...], **values: Any) -> Openings:
    return Openings(strategies, OpenOptions(**values))


source_options = record("opening", _opening_of, source_strategy_option, *_OPENING, key_option)
"""Adds the options of opening the source."""
average_source_options = record(
    "openings", _openings_of,
    _source(
        "--source-strategy", "strategies", in_short_help=True, multiple=True, type=STRATEGY_PLACE, metavar="STRATEGY",
        help="Strategy file for all sources that need one. May be repeated: one for each of these, in order.",
    ),
    *_OPENING, key_option,
)  # fmt: skip
"""Adds the options of opening several sources, and passes their `Openings`."""
opened_target_options = record(
    "target_opening",
    _opening_of,
    _target(
        "--target-strategy",
        in_short_help=True,
        type=STRATEGY_PLACE,
        metavar="STRATEGY",
        help="Strategy file of TARGET, if it has no ledger.",
    ),
    _target("--target-layout", "target_layouts", **_LAYOUT, help="As --layout, for TARGET."),
    _target("--target-stage", **_NUMBER, help="As --stage, for TARGET."),
    target_key_option,
)
"""Adds the options of opening a target."""


# --- the target -------------------------------------------------------------------------------------------------


def _target_of(*, target_cipher: Cipher | None, encryption: str | None, **values: Any) -> TargetOptions:
    if encryption and not target_cipher:
        raise UsageError("--encryption needs the key of TARGET", code="no-key", hint="add --target-key-file FILE")
    cipher = replace(target_cipher, mode=encryption) if target_cipher and encryption else target_cipher
    of_format = {name: values.pop(name) for name in _BY_OPTION} | click.get_current_context().meta.get(_OF_PACKAGE, {})
    given = {name: value for name, value in of_format.items() if value is not None and value is not False}
    return TargetOptions(target_cipher=cipher, of_format=given, **values)


def _option_of_formats(name: str, fields: Sequence[tuple[Format, OptionField]]) -> GroupedOption:
    """Return an option that some formats take, with the help of each."""
    field = fields[0][1]
    kinds: dict[str, dict[str, Any]] = {"size": _SIZE, "count": _NUMBER, "flag": {"is_flag": True}, "text": {}}
    more = {"metavar": field.metavar, **kinds[field.kind]} if field.metavar else kinds[field.kind]
    texts = {each.name: help_of(its) for each, its in fields}
    return _target(f"--{name.replace('_', '-')}", of_formats=texts, **more)


def _options_of_package(word: str) -> list[GroupedOption]:
    """Load the package of a format, and return the format's options; [] for a format of this program."""
    if not word or any(word in {each.name, *each.aliases} for each in targets()):
        return []
    try:
        found = written(word)
    except UsageError:
        return []  # `--to` itself says so
    made = [_option_of_formats(name, fields) for name, fields in takers([found]).items() if name not in _BY_OPTION]
    for each in made:
        each.expose_value, each.callback = False, partial(_keep, each.callback)
    return made


def _keep(parse: Callable[..., Any] | None, ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Parse the value of an option of a package, and keep it for `_target_of`."""
    ctx.meta.setdefault(_OF_PACKAGE, {})[str(param.name)] = parse(ctx, param, value) if parse else value


_OF_PACKAGE = "reshard.options of a package"

_BY_OPTION = takers(targets())
_OF_FORMATS = tuple(_option_of_formats(name, fields) for name, fields in _BY_OPTION.items())
"""The options that single formats take."""

target_options = record(
    "options",
    _target_of,
    target_strategy_option,
    _target(
        "--to", in_short_help=True, type=ToType(), metavar="FORMAT", more=_options_of_package,
        help=f"{_named(targets())}, or one of a package: see `reshard formats`.  "
        "[default: as TARGET is named, else as SOURCE]",
    ),
    *_OF_FORMATS,
    _target(
        "--same-ranks", is_flag=True,
        of_formats=dict.fromkeys(
            [each.name for each in targets() if each.one_file],
            "Keep each rank's blocks as they are; only format and --drop apply, and --rules if SOURCE is one file. No "
            "strategy is needed.  [default: if nothing says how SOURCE was sharded, and --to is given]",
        ),
    ),
    _target(
        "--ranks", callback=rank_list, metavar="LIST",
        help="Only these ranks of the target, such as 0,3-5. With the strategy of one stage: its ranks.",
    ),
    _target(
        "--remove-redundancy", is_flag=True, help="Store each block on one of the ranks that would hold it."
    ),
    memory_option,
    target_key_option,
    _target(
        "--encryption", type=click.Choice(MODES),
        help=f"How .ckpt files of TARGET are encrypted, with --target-key-file.  [default: {MODE}, as by MindSpore]",
    ),
)  # fmt: skip
"""Adds the options of a target, and passes their `TargetOptions`."""
