"""What a conversion is to write, by options and defaults that `reshard.convert` and the command line share.

Steps of `job`:

1. The format: that of `to`; else by the name of the target; else that of the source. A note says so if it
   was not given.
2. Options that mean nothing in that format are refused by name.
3. Files of ranks of which nothing says how they were sharded are converted one by one: each rank keeps what it has.
4. Everything else is opened as whole tensors, and planned.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from shlex import quote
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from reshard.api.asked import OPENING
from reshard.api.choices import target_of
from reshard.errors import Option, ReshardError, SourceError, TargetError, Text, UsageError, joined
from reshard.formats import check_name
from reshard.formats.sets import DCP_NAME, LinkedDCP
from reshard.plan.make import plan as make_plan
from reshard.plan.make import plan_convert
from reshard.plan.select import Selection
from reshard.readers.open import has_several_ranks, noted, read_headers, self_described
from reshard.readers.open import open as open_checkpoint
from reshard.source.checkpoint import Checkpoint
from reshard.storage.places import as_place
from reshard.strategy.files import read_strategy
from reshard.strategy.strategy import Strategy
from reshard.targets.kinds import (
    CUT,
    RANKS,
    TAKEN_BY,
    WHOLE,
    check_options,
    file_format,
    files_of,
    is_file_name,
    named_word,
    source_word,
    word_of,
)
from reshard.targets.pattern import read_layouts

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from reshard.api.asked import Asked
    from reshard.plan.plan import Plan
    from reshard.storage.places import AnyName, Place
    from reshard.targets.pattern import Pattern

Verb = Literal["convert", "transform", "unify"]
"""Which format is taken if none is given: the source's; that of rank files; a MindSpore set."""

_SHARDED = {"stage": "stage", "iteration": "iteration", "partial": "partial", "layouts": "layout"}
"""The parameters of `OPENING` that say how a source was sharded, and the options that set them."""


class Job(NamedTuple):
    """A plan, where it writes, and the choices that were made for the user.

    Attributes:
        plan: what to do.
        directory: the directory of the target files.
        result: what was asked for: the directory, or one file in it.
        notes: what the run should say of choices that were made for the user.
    """

    plan: Plan
    directory: Place | None
    result: Place | None
    notes: tuple[str, ...]


def job(
    source: Place | Checkpoint,
    source_strategy: Strategy | AnyName | None,
    target: Place | None,
    asked: Asked,
    selection: Selection,
    reading: dict[str, Any],
    *,
    verb: Verb = "convert",
    threads: int | None = None,
) -> Job:
    """Plan what the options ask for.

    Args:
        source: the checkpoint, or where it is.
        source_strategy: how it was sharded, if given.
        target: where it goes; None if a plan is to be saved without.
        asked: the options of the target.
        selection: which tensors.
        reading: how the source is opened (`OPENING`, and its cipher); nothing of it counts for one that is open.
        verb: the command, for its defaults.
        threads: the most threads that a run may have.

    Raises:
        UsageError: options that contradict each other or the format.
    """
    if target is not None and not (asked.to or asked.format):
        _refuse_foreign_name(target)
    to, reason = _stated(asked, target, verb)
    if to is not None:
        _refuse_misfits(asked, to)
    if isinstance(source, Checkpoint):
        if asked.same_ranks:
            raise UsageError(
                Text(Option("same_ranks"), " converts the files of a path, and an opened checkpoint is given"),
                code="needs-path", hint="name the directory of the source",
            )  # fmt: skip
        checkpoint = source
    else:
        kept = _kept_ranks(source, source_strategy, target, asked, to, selection, reading, verb)
        if kept is not None:
            return _of_same_ranks(source, target, asked, to, selection, reading, threads, kept, reason)
        with noting_swap(source, source_strategy, asked.target_strategy, reading):
            checkpoint = open_checkpoint(source, strategy=source_strategy, **reading)
    if to is None:
        to, reason = _of_source(checkpoint, asked, verb)
        _refuse_misfits(asked, to)
    name = _file_name(as_place(checkpoint.root), target, asked, to, verb)
    plan = _planned(checkpoint, asked, to, name, selection, threads)
    directory = target.parent if name and target is not None else target
    notes = [f"format: {to}, {reason}"] if reason else []
    if to == "hf" and any(".linear_qkv." in label.name or ".linear_fc1." in label.name for label in plan.labels):
        notes.append(Text("names are those of Megatron-Core; for Hugging Face's add ", Option("rules")))
    return Job(plan, directory, target, tuple(notes))


def with_format(asked: Asked, target: Place, to: str | None) -> Asked:
    """Return the options with a format, if neither they nor the name of the target say one."""
    return asked if asked.given(("to", "format", "style")) or named_word(target) else replace(asked, to=to)


@contextmanager
def noting_swap(
    path: AnyName, strategy: Strategy | AnyName | None, other: Strategy | AnyName | None, reading: dict[str, Any]
) -> Iterator[None]:
    """Say it if a checkpoint that does not open with its strategy does with that of the other side.

    Raises:
        SourceError: it does not open.
    """
    try:
        yield
    except SourceError as error:
        if strategy is not None and other is not None and _fits_other(path, strategy, other, reading):
            raise SourceError(
                "the two strategies are swapped",
                code="swapped-strategies",
                facts=[f"{path} does not fit {_strategy(strategy)}; it fits {_strategy(other)}"],
                hint=Text("exchange ", Option("source_strategy"), " and ", Option("target_strategy")),
            ) from error
        is_path = strategy is not None and not isinstance(strategy, Strategy)
        is_of_another = error.code == "strategy-mismatch" or not error.hint
        if is_path and is_of_another and (beside := _fitting(path, reading)):
            error.hint = Text(f"{beside} fits: pass ", Option("source_strategy", beside, quote(beside)))
        raise


def _fitting(path: AnyName, reading: dict[str, Any]) -> str:
    """Return a strategy beside a checkpoint that fits it; empty if there is none."""
    from reshard.readers.beside import fitting_strategies  # on errors, and where nothing says how ranks were cut

    with suppress(ReshardError, OSError):
        some = {name: reading[name] for name in ("rank_pattern", "suffix", "cipher")}
        ranks = read_headers(path, **some).ranks
        fitting = fitting_strategies(
            as_place(path), ranks, lambda one: open_checkpoint(path, strategy=one, **reading, contents=False)
        )
        return str(fitting[0]) if fitting else ""
    return ""


def _strategy(strategy: Strategy | AnyName) -> str:
    return "the strategy that is given for it" if isinstance(strategy, Strategy) else str(strategy)


def _fits_other(
    path: AnyName, strategy: Strategy | AnyName, other: Strategy | AnyName, reading: dict[str, Any]
) -> bool:
    """Return whether a checkpoint opens with another strategy than its own, which can be read."""
    with suppress(ReshardError, OSError):
        for one in (strategy, other):
            if not isinstance(one, Strategy):
                read_strategy(one)
        open_checkpoint(path, strategy=other, **reading)
        return True
    return False


# --- the format -------------------------------------------------------------------------------------------------


_OTHER_FILES = {".npz", ".npy", ".pt", ".pth", ".bin", ".h5", ".pkl", ".json", ".gguf", ".onnx", ".zip", ".tar", ".gz"}


def _refuse_foreign_name(target: Place) -> None:
    """Refuse a target by whose name people expect a file of a format that is not written.

    Raises:
        UsageError: it is such a name, and no directory has it.
    """
    if target.suffix in _OTHER_FILES and not target.is_dir():
        raise UsageError(
            f"{target.name} is the name of a {target.suffix} file, which reshard does not write", code="unknown-format",
            hint="name a directory, or a file that ends with .safetensors or .ckpt",
        )  # fmt: skip


def _stated(asked: Asked, target: Place | None, verb: Verb) -> tuple[str | None, str]:
    """Return the format that options or the name of the target say, with the reason if it was not given."""
    if asked.to and (asked.format or asked.style):
        other = "--format" if asked.format else "--style"
        raise UsageError(f"--to and {other} both say the format", code="conflicting-options", hint=f"leave {other} out")
    if asked.style and asked.format not in {None, "safetensors"}:
        raise UsageError(
            f"--style {asked.style} is of safetensors files, not {asked.format}",
            code="option-of-another-format",
            hint="leave --format out, or --style",
        )
    if asked.style:
        return word_of(asked.style), ""
    if verb == "unify" and asked.format == "safetensors":
        return "mindspore", ""
    to = asked.to or asked.format
    if to or target is None:
        return to and word_of(to), ""
    named = named_word(target)
    if named and (verb == "convert" or named[0] not in RANKS):
        return named
    return ("mindspore", "") if verb == "unify" else (None, "")


def _of_source(checkpoint: Checkpoint, asked: Asked, verb: Verb) -> tuple[str, str]:
    """Return the format of a target of which nothing else says it, and why."""
    if asked.link:
        return DCP_NAME, ""
    word = source_word(checkpoint)
    if verb == "transform":
        return (word if word in RANKS else "safetensors"), ""
    if word in WHOLE and asked.given(CUT):
        return "safetensors", f"as {WHOLE[word]} holds whole tensors only"
    return word, "as the source"


# --- options that do not fit ------------------------------------------------------------------------------------


def _listed(names: Iterable[str]) -> Text:
    """Return options as they are typed."""
    return joined(", ", [Text(Option(name)) for name in names])


def _refuse_misfits(asked: Asked, to: str) -> None:
    """Refuse options that mean nothing in a format, or next to each other.

    Raises:
        UsageError: there are such options; the message names them.
    """
    check_options(to, asked.given(TAKEN_BY))
    if asked.layouts_of and asked.target_strategy:
        raise UsageError(
            Text(Option("layouts_of"), " and ", Option("target_strategy"), " both say how tensors are cut"),
            code="conflicting-options", hint="leave one out",
        )  # fmt: skip
    if to == "checkpoint2" and asked.max_shard_size is not None and (asked.layouts_of or asked.target_strategy):
        size = Option("max_shard_size")
        raise UsageError(
            Text(size, " is for whole tensors; ranks have one file each"), code="option-of-another-format",
            hint=Text("leave ", size, " out"),
        )  # fmt: skip
    if asked.link:
        others = asked.given(name for name in (*TAKEN_BY, "memory", "target_cipher") if name != "link")
        if others:
            raise UsageError(
                Text(Option("link"), " keeps files and blocks as they are"), code="option-of-another-format",
                hint=Text("leave ", _listed(others), " out, or ", Option("link")),
            )  # fmt: skip


def _file_name(source: Place, target: Place | None, asked: Asked, to: str, verb: Verb) -> str | None:
    """Return the name of the target file if the target is one file, else None.

    Raises:
        UsageError: its name is that of another format, or several ranks are asked for.
        TargetError: it is a directory, and the source is one file.
    """
    if verb != "convert" or target is None or to not in RANKS:
        return None
    named = is_file_name(target)
    cut = asked.given(CUT)
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
            hint=f"name a file, such as {target / source.name.rpartition('.')[0]}.{to}",
        )  # fmt: skip
    check_name(str(target), to)
    if asked.prefix is not None:
        raise UsageError(
            Text(Option("prefix"), f" is for the files of ranks, and {target.name} is one file"), code="one-file",
            hint=Text("leave ", Option("prefix"), " out"),
        )  # fmt: skip
    return target.name


# --- ranks that keep what they have -----------------------------------------------------------------------------


def _kept_ranks(
    source: Place,
    source_strategy: object,
    target: Place | None,
    asked: Asked,
    to: str | None,
    selection: Selection,
    reading: dict[str, Any],
    verb: Verb,
) -> str | None:
    """Return why each rank's file is to be converted as it is cut, an empty text if that was asked for; None if not.

    It is if it was asked for; if the source is one file, or has several ranks of which nothing says how they were
    sharded.
    """
    if asked.same_ranks:
        return ""
    undescribed = source_strategy is None and all(reading[name] == OPENING[name] for name in _SHARDED)
    if verb != "convert" or to not in RANKS or not undescribed or asked.given(CUT):
        return None
    if source.is_file():
        as_it_is = asked.memory is None and not _choices(selection)
        return "" if as_it_is and self_described(source) is None else None
    is_directory = source.is_dir() and not (target is not None and is_file_name(target))
    if not is_directory or not has_several_ranks(
        source, rank_pattern=reading["rank_pattern"], suffix=reading["suffix"]
    ):
        return None
    known, change = noted(source, reading["cipher"])
    if known or change:
        return None
    note = Text(f"nothing says how {source} was sharded, so each rank keeps what it has")
    if beside := _fitting(source, reading):
        note = Text(note, f"; {beside} fits: ", Option("source_strategy", beside, quote(beside)))
    return note


def _of_same_ranks(
    source: Place,
    target: Place | None,
    asked: Asked,
    to: str | None,
    selection: Selection,
    reading: dict[str, Any],
    threads: int | None,
    note: str,
    reason: str,
) -> Job:
    """Plan how each file is converted as it is cut."""
    if to is None:
        raise UsageError(
            Text(Option("same_ranks"), " changes the format alone, and none is given"), code="needs-format",
            hint=Text("add ", Option("to", "ckpt"), " or safetensors"),
        )  # fmt: skip
    others = asked.given([*CUT, "prefix", "memory"])
    others += [option for name, option in _SHARDED.items() if reading[name] != OPENING[name]]
    others += _choices(selection)
    if others:
        leave = Text("leave ", Option("same_ranks"), " out")
        raise UsageError(
            Text(_listed(others), " does not go with files of ranks as they are cut"), code="needs-strategy",
            facts=[note] if note else [],
            hint=Text("add ", Option("source_strategy", "STRATEGY", "STRATEGY")) if note else leave,
        )  # fmt: skip
    name = _file_name(source, target, asked, to, "convert") if source.is_file() else None
    plan = plan_convert(
        source, to, name=name, rank_pattern=reading["rank_pattern"], suffix=reading["suffix"], drop=selection.drop,
        threads=threads, cipher=reading["cipher"], target_cipher=asked.target_cipher, rules=selection.rules,
    )  # fmt: skip
    notes = [f"format: {to}, {reason}"] if reason else []
    directory = target.parent if name and target is not None else target
    return Job(plan, directory, target, (*notes, *([note] if note else ())))


def _choices(selection: Selection) -> list[str]:
    """Return which options of a selection are given that cannot be applied to files as they are."""
    none = Selection(drop=selection.drop, rules=selection.rules)
    names: Collection[str] = [field.name for field in fields(Selection)]
    return [name for name in names if getattr(selection, name) != getattr(none, name)]


# --- the plan ---------------------------------------------------------------------------------------------------


def _planned(
    checkpoint: Checkpoint, asked: Asked, to: str, name: str | None, selection: Selection, threads: int | None
) -> Plan:
    """Plan what becomes of whole tensors."""
    if asked.link:
        return make_plan(checkpoint, files=LinkedDCP(), selection=selection)
    layout: Strategy | Pattern | None
    if asked.layouts_of is not None:
        layout = read_layouts(asked.layouts_of)
    else:
        layout = target_of(asked.target_strategy, checkpoint, selection)
    files = files_of(
        to, name, prefix=asked.prefix, step=asked.target_step, max_shard_size=asked.max_shard_size,
        chunk_size=asked.chunk_size, shard_size=asked.shard_size, compression=asked.compression,
    )  # fmt: skip
    prefix: dict[str, Any] = {} if asked.prefix is None or to not in RANKS else {"prefix": asked.prefix}
    return make_plan(
        checkpoint, layout, format=file_format(to), files=files, ranks=asked.ranks, stage=asked.target_stage,
        selection=selection, remove_redundancy=asked.remove_redundancy, link_replicas=asked.link_replicas,
        memory=asked.memory, threads=threads, target_cipher=asked.target_cipher, **prefix,
    )  # fmt: skip
