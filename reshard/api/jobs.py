"""Plan a conversion by the options and defaults that `reshard.convert` and the command line share.

Steps of `job`:

1. Choose the format: `to`; else by the name of the target; else the source's. A note reports a format that was not
   given.
2. Refuse options that the format does not take, by name.
3. Plan ranks with an unknown sharding file by file: each rank keeps its tensors as they are.
4. Open any other source, and plan it.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from shlex import quote
from typing import TYPE_CHECKING, NamedTuple

from reshard.api.choices import target_of
from reshard.api.formats import (
    CUT,
    check_options,
    is_file_name,
    like,
    named_format,
    only_taker,
    options_of,
    refuse_foreign_name,
)
from reshard.core.format import written
from reshard.core.layout.arrangement import Arrangement
from reshard.core.model.checkpoint import Checkpoint
from reshard.core.open import has_several_ranks, is_described, ledger_layout, read_headers
from reshard.core.open import open as open_checkpoint
from reshard.core.options import option_fields
from reshard.core.plan.inputs import Selection
from reshard.core.plan.make import plan as make_plan
from reshard.core.plan.make import plan_convert
from reshard.core.storage.places import as_place
from reshard.errors import Option, ReshardError, SourceError, TargetError, Text, UsageError, joined
from reshard.kits.files import check_file_name
from reshard.strategy.files import read_strategy
from reshard.strategy.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from reshard.api.asked import TargetOptions
    from reshard.core.format import Format
    from reshard.core.listing import OpenOptions
    from reshard.core.plan.plan import Plan
    from reshard.core.storage.places import AnyName, Place

_SHARDED = {"stage": "stage", "step": "step", "partial": "partial", "layouts": "layout"}
"""The fields of `OpenOptions` for the sharding of a source, and the options that set them."""


class Job(NamedTuple):
    """A plan, its target, and notes on choices that were made for the user.

    Attributes:
        plan: the plan.
        directory: the directory of the target files.
        result: the target that the user named: the directory, or one file in it.
        notes: messages about choices that were made for the user.
    """

    plan: Plan
    directory: Place | None
    result: Place | None
    notes: tuple[str, ...]


def job(
    source: Place | Checkpoint,
    target: Place | None,
    opening: OpenOptions,
    options: TargetOptions,
    selection: Selection,
    *,
    threads: int | None = None,
    dequantize: str | None = None,
) -> Job:
    """Plan the conversion that the options describe.

    Args:
        source: the checkpoint, or its path.
        target: the path of the target; None for a plan that is saved without one.
        opening: the options of opening the source; ignored if it is open.
        options: the options of the target.
        selection: which tensors.
        threads: the most threads that a run may have.
        dequantize: the dtype to which quantized weights are dequantized, before the selection; None to keep them.

    Raises:
        UsageError: options that contradict each other or the format.
    """
    if dequantize is not None:
        _refuse_copies(options)
    if target is not None and not options.to:
        refuse_foreign_name(target)
    to, reason = _stated(options, target)
    if to is not None:
        _refuse_misfits(options, to)
    if isinstance(source, Checkpoint):
        if options.same_ranks:
            raise UsageError(
                Text(Option("same_ranks"), " converts the files of a path, and an opened checkpoint is given"),
                code="needs-path", hint="name the directory of the source",
            )  # fmt: skip
        checkpoint = source
    else:
        note = None if dequantize else _kept_ranks(source, target, opening, options, to, selection)
        if note is not None:
            return _of_same_ranks(source, target, opening, options, to, selection, threads, note, reason)
        with noting_swap(source, opening, options.target_strategy):
            checkpoint = open_checkpoint(source, **vars(opening))
    if dequantize is not None:
        from reshard.expressions.quantized.dequantize import dequantize as dequantized  # not on every start

        checkpoint = dequantized(checkpoint, dequantize)
    if to is None:
        to, reason = _of_source(checkpoint, options)
        _refuse_misfits(options, to)
    name = _file_name(as_place(checkpoint.root), target, options, to)
    plan = planned(checkpoint, options, to, selection, threads, name=name)
    directory = target.parent if name and target is not None else target
    notes = [f"format: {to.name}, {reason}"] if reason else []
    notes += to.notes(each.name for each in plan.transfers)
    return Job(plan, directory, target, tuple(notes))


def with_format(options: TargetOptions, target: Place, to: str | None) -> TargetOptions:
    """Return the options with a format, unless they or the target's name have one."""
    return options if options.to or named_format(target) else replace(options, to=to)


@contextmanager
def noting_swap(
    path: AnyName,
    opening: OpenOptions,
    other_strategy: Strategy | Arrangement | AnyName | None,
    side: str = "source",
) -> Iterator[None]:
    """Report swapped strategies if a checkpoint opens only with the other side's.

    Args:
        path: the checkpoint.
        opening: how it is opened.
        other_strategy: the strategy of the other side.
        side: which side it is, `source` or `target`.

    Raises:
        SourceError: the checkpoint does not open.
    """
    try:
        yield
    except SourceError as error:
        strategy = opening.strategy
        other = None if isinstance(other_strategy, Arrangement) else other_strategy
        if strategy is not None and other is not None and _fits_other(path, opening, other):
            raise SourceError(
                "the two strategies are swapped",
                code="swapped-strategies",
                facts=[f"{path} does not fit {_strategy(strategy)}; it fits {_strategy(other)}"],
                hint=Text("exchange ", Option("source_strategy"), " and ", Option("target_strategy")),
            ) from error
        is_path = strategy is not None and not isinstance(strategy, Strategy)
        is_of_another = error.code == "strategy-mismatch" or not error.hint
        if is_path and is_of_another and (candidate := _fitting(path, opening)):
            error.hint = Text(f"{candidate} fits: pass ", Option(f"{side}_strategy", candidate, quote(candidate)))
        raise


def _fitting(path: AnyName, opening: OpenOptions) -> str:
    """Return the path of a strategy next to a checkpoint that fits it, or ""."""
    from reshard.formats.ranks.completeness import fitting_strategies  # on errors only

    with suppress(ReshardError, OSError):
        ranks = read_headers(path, **opening.of_files).ranks
        fitting = fitting_strategies(
            as_place(path),
            ranks,
            lambda candidate: open_checkpoint(path, **vars(replace(opening, strategy=candidate)), contents=False),
        )
        return fitting[0] if fitting else ""
    return ""


def _strategy(strategy: Strategy | AnyName) -> str:
    return "the strategy that is given for it" if isinstance(strategy, Strategy) else str(strategy)


def _fits_other(path: AnyName, opening: OpenOptions, other_strategy: Strategy | AnyName) -> bool:
    """Return whether both strategies can be read and the other one fits."""
    with suppress(ReshardError, OSError):
        for side in (opening.strategy, other_strategy):
            if side is not None and not isinstance(side, Strategy):
                read_strategy(side)
        open_checkpoint(path, **vars(replace(opening, strategy=other_strategy)))
        return True
    return False


# --- the format -------------------------------------------------------------------------------------------------


def _stated(options: TargetOptions, target: Place | None) -> tuple[Format | None, str]:
    """Return the format by the options or the target's name, with a reason if implied."""
    if options.to or target is None:
        return (written(options.to) if options.to else None), ""
    return named_format(target) or (None, "")


def _of_source(checkpoint: Checkpoint, options: TargetOptions) -> tuple[Format, str]:
    """Return the default format of a target, by the source, with the reason."""
    if only := only_taker(options.of_format):
        return only, ""
    own = like(checkpoint)
    if own.whole and options.given(CUT):
        return written("safetensors"), f"as {own.whole} holds whole tensors only"
    return own, "as the source"


# --- options that do not fit ------------------------------------------------------------------------------------


def _listed(names: Iterable[str]) -> Text:
    """Return options as a list, each as the user types it."""
    return joined(", ", [Text(Option(name)) for name in names])


def _refuse_misfits(options: TargetOptions, to: Format) -> None:
    """Refuse options that do not go with the format, or with each other.

    Raises:
        UsageError: there are such options; the message names them.
    """
    check_options(to, options.given([*CUT, "same_ranks", *options.of_format]))
    for field in option_fields(to.options):
        if field.whole and field.option in options.of_format and options.target_strategy:
            raise UsageError(
                Text(Option(field.option), " is for whole tensors; ranks have one file each"),
                code="option-of-another-format", hint=Text("leave ", Option(field.option), " out"),
            )  # fmt: skip
        others = options.given([*CUT, "same_ranks", *options.of_format, "memory", "target_cipher"])
        conflicting = [name for name in others if name != field.option]
        if field.alone and field.option in options.of_format and conflicting:
            raise UsageError(
                Text(Option(field.option), " keeps files and blocks as they are"), code="option-of-another-format",
                hint=Text("leave ", _listed(conflicting), " out, or ", Option(field.option)),
            )  # fmt: skip


def _refuse_copies(options: TargetOptions) -> None:
    """Refuse options that keep the bytes of tensors, if weights are dequantized.

    Raises:
        UsageError: there is such an option.
    """
    alone = (
        [each.option for each in option_fields(only.options) if each.alone]
        if (only := only_taker(options.of_format))
        else []
    )
    for name in options.given((*alone, "same_ranks")):
        raise UsageError(
            Text(Option(name), " keeps blocks as they are, and ", Option("dequantize"), " computes others"),
            code="conflicting-options", hint=Text("leave ", Option(name), " out"),
        )  # fmt: skip


def _file_name(source: Place, target: Place | None, options: TargetOptions, to: Format) -> str | None:
    """Return the name of the target file if the target is one file, else None.

    Raises:
        UsageError: its name is of another format, or options ask for several ranks.
        TargetError: it is a directory, and the source is one file.
    """
    if target is None or not to.one_file:
        return None
    named = is_file_name(target)
    cut = options.given(CUT)
    if cut and named:
        raise UsageError(
            Text(f"{target.name} is the name of one file, and ", Option(cut[0]), " makes a file for each rank"),
            code="one-file",
            hint="name a directory for the target",
        )
    if cut or not (named or source.is_file()):
        return None
    if target.is_dir():
        raise TargetError(
            f"{target} is a directory, and {source} is one file", code="is-directory",
            hint=f"name a file, such as {target / source.name.rpartition('.')[0]}.{to.name}",
        )  # fmt: skip
    check_file_name(target, to.name)
    if "prefix" in options.of_format:
        raise UsageError(
            Text(Option("prefix"), f" is for the files of ranks, and {target.name} is one file"), code="one-file",
            hint=Text("leave ", Option("prefix"), " out"),
        )  # fmt: skip
    return target.name


# --- ranks that keep their tensors ------------------------------------------------------------------------------


def _kept_ranks(
    source: Place,
    target: Place | None,
    opening: OpenOptions,
    options: TargetOptions,
    to: Format | None,
    selection: Selection,
) -> str | None:
    """Return the note for a file-by-file conversion ("": none needed), or None if the source must be opened.

    Files are converted one by one if `same_ranks` is given, if the source is one file, or if it has several ranks with
    an unknown sharding. Any other source is opened as one checkpoint.
    """
    if options.same_ranks:
        return ""
    undescribed = opening.strategy is None and not _SHARDED.keys() & {*opening.given}
    if to is None or not to.one_file or not undescribed or options.given(CUT):
        return None
    if source.is_file():
        as_it_is = options.memory is None and not _choices(selection)
        return "" if as_it_is and not is_described(source) else None
    is_directory = source.is_dir() and not (target is not None and is_file_name(target))
    if not is_directory or not has_several_ranks(source, opening.rank_pattern, opening.suffix):
        return None
    is_known, change = ledger_layout(source, opening.cipher)
    if is_known or change:
        return None
    note = f"nothing says how {source} was sharded, so each rank keeps what it has; to join them pass "
    return Text(note, Option("source_strategy"))


def _of_same_ranks(
    source: Place,
    target: Place | None,
    opening: OpenOptions,
    options: TargetOptions,
    to: Format | None,
    selection: Selection,
    threads: int | None,
    note: str,
    reason: str,
) -> Job:
    """Plan a conversion file by file: blocks stay as they are; only format, `drop` and `rules` apply."""
    if to is None:
        raise UsageError(
            Text(Option("same_ranks"), " changes the format, and none is given"), code="needs-format",
            hint=Text("add ", Option("to", "ckpt"), " or safetensors"),
        )  # fmt: skip
    conflicting = [*options.given([*CUT, "prefix", "memory"]), *(["source_strategy"] if opening.strategy else [])]
    conflicting += [option for name, option in _SHARDED.items() if name in opening.given]
    conflicting += _choices(selection)
    if conflicting:
        leave = Text("leave ", Option("same_ranks"), " out")
        raise UsageError(
            Text(_listed(conflicting), " does not go with files of ranks as they are cut"), code="needs-strategy",
            facts=[note] if note else [],
            hint=Text("add ", Option("source_strategy", "STRATEGY", "STRATEGY")) if note else leave,
        )  # fmt: skip
    name = _file_name(source, target, options, to) if source.is_file() else None
    plan = plan_convert(
        source, to.name, name=name, **opening.of_files, drop=selection.drop, threads=threads,
        target_cipher=options.target_cipher, rules=selection.rules,
    )  # fmt: skip
    notes = [f"format: {to.name}, {reason}"] if reason else []
    directory = target.parent if name and target is not None else target
    return Job(plan, directory, target, (*notes, *([note] if note else ())))


def _choices(selection: Selection) -> list[str]:
    """Return the given selection options that cannot be applied to files as they are."""
    none = Selection(drop=selection.drop, rules=selection.rules)
    names: Collection[str] = [field.name for field in fields(Selection)]
    return [name for name in names if getattr(selection, name) != getattr(none, name)]


# --- the plan ---------------------------------------------------------------------------------------------------


def planned(
    checkpoint: Checkpoint,
    options: TargetOptions,
    to: Format,
    selection: Selection,
    threads: int | None,
    *,
    name: str | None = None,
) -> Plan:
    """Plan the conversion of an opened checkpoint.

    Args:
        checkpoint: the checkpoint.
        options: the options of the target, which suit the format.
        to: its format.
        selection: which tensors.
        threads: the most threads that a run may have.
        name: the name of the target file, if it is only one.
    """
    layout = target_of(options.target_strategy, checkpoint, selection)
    if isinstance(layout, Arrangement) and not to.takes_layouts:
        raise UsageError(
            f"{options.target_strategy} is a checkpoint, and a target of format {to.name} needs a strategy",
            code="needs-strategy", hint=f"reshard strategy make --like {options.target_strategy} -o FILE makes one",
        )  # fmt: skip
    return make_plan(
        checkpoint, layout, format=to.encoding or None, files=options_of(to, options.of_format, name),
        ranks=options.ranks, stage=options.target_stage, selection=selection,
        remove_redundancy=options.remove_redundancy, memory=options.memory, threads=threads,
        target_cipher=options.target_cipher,
    )  # fmt: skip
