"""What a command is to write: its format, and the plan of it.

`convert`, `transform`, `unify` and `plan` are one code path, `job`. They differ in the format that they take if none is
given (`Verb`). Steps:

1. The format: that of `--to`; else by the name of TARGET; else that of SOURCE. If it was not given, the run says it.
2. Options that mean nothing in that format are refused by name.
3. Files of ranks of which nothing says how they were sharded are converted one by one: each rank keeps what it has.
4. Everything else is opened as whole tensors, and planned.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import reshard
from reshard.cli.options import CUT, Asked, flag
from reshard.cli.values import CHECKPOINT2, DCP, noting_swap
from reshard.errors import TargetError, UsageError
from reshard.formats import check_name
from reshard.formats.sets import DCP_ITEMS, SET_INDEXES
from reshard.formats.zarr import NAME as ZARR
from reshard.plan.make import plan as make_plan
from reshard.readers.open import open as open_checkpoint
from reshard.storage.places import as_place

if TYPE_CHECKING:
    from reshard.plan.plan import Plan
    from reshard.plan.select import Selection
    from reshard.source.checkpoint import Checkpoint
    from reshard.storage.places import Place
    from reshard.strategy.strategy import Strategy
    from reshard.targets.kinds import AnyFiles
    from reshard.targets.pattern import Pattern

RANKS = ("ckpt", "safetensors")
"""Formats of the files of ranks."""

WHOLE = {"hf": "a Hugging Face set", "mindspore": "a unified set of MindSpore", ZARR: "a zarr store"}
"""Formats of whole tensors alone."""

Verb = Literal["convert", "transform", "unify"]
"""Which format is taken if none is given: the source's; that of rank files; a MindSpore set. `plan` is as `convert`."""

_BLOCKS = (*RANKS, DCP, CHECKPOINT2)
_TAKEN_BY = {
    "layouts_of": (DCP, CHECKPOINT2),
    "target_strategy": _BLOCKS,
    "ranks": _BLOCKS,
    "stage": _BLOCKS,
    "remove_redundancy": _BLOCKS,
    "link_replicas": _BLOCKS,
    "same_ranks": RANKS,
    "prefix": (*RANKS, CHECKPOINT2),
    "step": (DCP, CHECKPOINT2),
    "max_shard_size": ("hf", "mindspore", DCP, CHECKPOINT2),
    "link": (DCP,),
    "chunk_size": (ZARR,),
    "shard_size": (ZARR,),
    "compression": (ZARR,),
}
"""The formats that take each option."""

_READING: dict[str, object] = {"stage": None, "iteration": None, "partial": False, "layouts": {}}
"""What says how a source was sharded, and its default."""


class Job(NamedTuple):
    """A plan, where it writes, and what it was taken from.

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
    source: Place,
    source_strategy: Place | None,
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
        source: the checkpoint.
        source_strategy: how it was sharded, if given.
        target: where it goes; None if a plan is to be saved without.
        asked: the options of the target.
        selection: which tensors.
        reading: how the source is opened (`cli.options.OPENING`, and its cipher).
        verb: the command, for its defaults.
        threads: the most threads that a run may have.

    Raises:
        UsageError: options that contradict each other or the format.
    """
    to, reason = _stated(asked, target, verb)
    if to is not None:
        _refuse_misfits(asked, to)
    kept = _kept_ranks(source, source_strategy, target, asked, to, selection, reading, verb)
    if kept is not None:
        return _of_same_ranks(source, target, asked, to, selection, reading, threads, kept, reason)
    with noting_swap(source, source_strategy, asked.target_strategy, reading):
        checkpoint = open_checkpoint(source, strategy=source_strategy, **reading)
    if to is None:
        to, reason = _of_source(checkpoint, source, asked, verb)
        _refuse_misfits(asked, to)
    name = _file_name(source, target, asked, to, verb)
    plan = _planned(checkpoint, asked, to, name, selection, threads)
    directory = target.parent if name and target is not None else target
    return Job(plan, directory, target, (f"format: {to}, {reason}",) if reason else ())


# --- the format -------------------------------------------------------------------------------------------------


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
        return {"huggingface": "hf"}.get(asked.style, asked.style), ""
    if verb == "unify" and asked.format == "safetensors":
        return "mindspore", ""
    to = asked.to or asked.format
    if to or target is None:
        return to, ""
    if target.suffix == ".zarr":
        return ZARR, f"as {target.name} is the name of a zarr store"
    if verb == "convert" and target.suffix in {".ckpt", ".safetensors"} and not target.is_dir():
        return target.suffix[1:], f"as {target.name} is the name of such a file"
    return ("mindspore", "") if verb == "unify" else (None, "")


def _of_source(checkpoint: Checkpoint, source: Place, asked: Asked, verb: Verb) -> tuple[str, str]:
    """Return the format of a target of which nothing else says it, and why."""
    if asked.link:
        return DCP, ""
    kind = source_format(checkpoint, source)
    if verb == "transform":
        return (kind if kind in RANKS else "safetensors"), ""
    if kind in WHOLE and asked.given(CUT):
        return "safetensors", f"as {WHOLE[kind]} holds whole tensors only"
    return kind, "as the source"


def source_format(checkpoint: Checkpoint, source: Place) -> str:
    """Return which of the formats of `--to` a checkpoint has; safetensors if it is none of them."""
    if checkpoint.format == ZARR:
        return ZARR
    if source.is_dir():
        if checkpoint.format in {DCP, DCP_ITEMS}:
            return DCP
        if checkpoint.described_by in {"Checkpoint 2.0", "metadata.json"}:
            return CHECKPOINT2
        for name, kind in zip(SET_INDEXES, ("mindspore", "hf"), strict=True):
            if (source / name).is_file():
                return kind
    return checkpoint.format if checkpoint.format in RANKS else "safetensors"


# --- options that do not fit ------------------------------------------------------------------------------------


def _refuse_misfits(asked: Asked, to: str) -> None:
    """Refuse options that mean nothing in a format, or next to each other.

    Raises:
        UsageError: there are such options; the message names them.
    """
    code = "option-of-another-format"
    misfits = asked.given(name for name, formats in _TAKEN_BY.items() if to not in formats)
    cut = [name for name in misfits if name in {flag(option) for option in CUT}]
    if to in WHOLE and cut:
        raise UsageError(f"{WHOLE[to]} holds whole tensors", code=code, hint=f"leave {', '.join(cut)} out")
    if misfits:
        formats = next(formats for name, formats in _TAKEN_BY.items() if flag(name) == misfits[0])
        raise UsageError(
            f"{', '.join(misfits)} does not go with the format {to}", code=code,
            hint=f"leave {', '.join(misfits)} out, or choose --to {' or '.join(formats)}",
        )  # fmt: skip
    if asked.layouts_of and asked.target_strategy:
        raise UsageError(
            "--layouts-of and --target-strategy both say how tensors are cut",
            code="conflicting-options", hint="leave one out",
        )  # fmt: skip
    if to == CHECKPOINT2 and asked.max_shard_size is not None and (asked.layouts_of or asked.target_strategy):
        raise UsageError(
            "--max-shard-size is for whole tensors; ranks have one file each", code=code,
            hint="leave --max-shard-size out",
        )  # fmt: skip
    if asked.link:
        others = asked.given(name for name in (*_TAKEN_BY, "memory", "cipher") if name != "link")
        others = [{"--cipher": "--target-key-file"}.get(name, name) for name in others]
        if others:
            raise UsageError(
                "--link keeps files and blocks as they are", code=code, hint=f"leave {', '.join(others)} out, or --link"
            )


def _file_name(source: Place, target: Place | None, asked: Asked, to: str, verb: Verb) -> str | None:
    """Return the name of the target file if the target is one file, else None.

    Raises:
        UsageError: its name is that of another format, or several ranks are asked for.
        TargetError: it is a directory, and the source is one file.
    """
    if verb != "convert" or target is None or to not in RANKS:
        return None
    named = target.suffix in {".ckpt", ".safetensors"} and not target.is_dir()
    cut = asked.given(CUT)
    if cut and named:
        raise UsageError(
            f"{target.name} is the name of one file, and {cut[0]} makes a file for each rank",
            code="one-file",
            hint="name a directory for TARGET",
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
            f"--prefix is for the files of ranks, and {target.name} is one file",
            code="one-file",
            hint="leave --prefix out",
        )
    return target.name


# --- ranks that keep what they have -----------------------------------------------------------------------------


def _kept_ranks(
    source: Place,
    source_strategy: Place | None,
    target: Place | None,
    asked: Asked,
    to: str | None,
    selection: Selection,
    reading: dict[str, Any],
    verb: Verb,
) -> str | None:
    """Return why each rank's file is to be converted as it is cut, an empty text if that was asked for; None if not.

    It is if it was asked for; if SOURCE is one file, or has several ranks of which nothing says how they were sharded.
    """
    if asked.same_ranks:
        return ""
    undescribed = source_strategy is None and all(reading[name] == value for name, value in _READING.items())
    if verb != "convert" or to not in RANKS or not undescribed or asked.given(CUT):
        return None
    from reshard.readers.open import has_several_ranks, noted, self_described

    if source.is_file():
        as_it_is = asked.memory is None and not any(_choices(selection).values())
        return "" if as_it_is and self_described(source) is None else None
    if target is not None and target.suffix in {".ckpt", ".safetensors"} and not target.is_dir():
        return None
    if not source.is_dir() or not has_several_ranks(
        source, rank_pattern=reading["rank_pattern"], suffix=reading["suffix"]
    ):
        return None
    known, change = noted(source, reading["cipher"])
    return None if known or change else f"nothing says how {source} was sharded, so each rank keeps what it has"


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
    from reshard.plan.make import plan_convert

    if to is None:
        raise UsageError(
            "--same-ranks changes the format alone, and none is given",
            code="needs-format",
            hint="add --to ckpt or safetensors",
        )
    others = asked.given([*CUT, "prefix", "memory"])
    others += [f"--{name.rstrip('s')}" for name, value in _READING.items() if reading[name] != value]
    others += [name for name, value in _choices(selection).items() if value]
    if others:
        raise UsageError(
            f"{', '.join(others)} does not go with files of ranks as they are cut", code="needs-strategy",
            facts=[note] if note else [],
            hint="add --source-strategy STRATEGY" if note else "leave --same-ranks out",
        )  # fmt: skip
    name = _file_name(source, target, asked, to, "convert") if source.is_file() else None
    plan = plan_convert(
        source, to, name=name, rank_pattern=reading["rank_pattern"], suffix=reading["suffix"], drop=selection.drop,
        threads=threads, cipher=reading["cipher"], target_cipher=asked.cipher, rules=selection.rules,
    )  # fmt: skip
    notes = [f"format: {to}, {reason}"] if reason else []
    directory = target.parent if name and target is not None else target
    return Job(plan, directory, target, (*notes, *([note] if note else ())))


def _choices(selection: Selection) -> dict[str, object]:
    """Return what a selection says that cannot be applied to files as they are, by options."""
    return {
        "--include": selection.include,
        "--exclude": selection.exclude,
        "--weights-only": selection.weights_only,
        "--name-map": selection.name_map,
        "--cast": selection.cast,
        "--allow-missing": selection.allow_missing,
        "--lora": selection.lora,
    }


# --- the plan ---------------------------------------------------------------------------------------------------


def _planned(
    checkpoint: Checkpoint, asked: Asked, to: str, name: str | None, selection: Selection, threads: int | None
) -> Plan:
    """Plan what becomes of whole tensors."""
    if asked.link:
        return make_plan(checkpoint, files=reshard.LinkedDCP(), selection=selection)
    layout: Strategy | Pattern | None = None
    if asked.layouts_of:
        layout = reshard.read_layouts(asked.layouts_of)
    elif asked.target_strategy:
        layout = _target_strategy(as_place(asked.target_strategy), checkpoint, selection)
    files = files_of(asked, to, name)
    options: dict[str, Any] = {} if asked.prefix is None or to not in RANKS else {"prefix": asked.prefix}
    # A Checkpoint 2.0 is of safetensors files, and says so itself.
    written = None if to == CHECKPOINT2 else "safetensors" if to in {"hf", "mindspore"} else to
    return make_plan(
        checkpoint, layout, format=written, files=files, ranks=asked.ranks, stage=asked.stage, selection=selection,
        remove_redundancy=asked.remove_redundancy, link_replicas=asked.link_replicas, memory=asked.memory,
        threads=threads, target_cipher=asked.cipher, **options,
    )  # fmt: skip


def files_of(asked: Asked, to: str, name: str | None = None) -> AnyFiles | None:
    """Return how the files of a target are laid out; None for the files of ranks."""
    size: dict[str, Any] = {} if asked.max_shard_size is None else {"max_shard_size": asked.max_shard_size}
    if to == DCP:
        return reshard.DCP(step=asked.step, **size)
    if to == CHECKPOINT2:
        return reshard.Checkpoint2(asked.step, asked.prefix, **size)
    if to == ZARR:
        return reshard.ZarrGroup(asked.chunk_size, asked.shard_size, asked.compression)
    if to in WHOLE:
        return reshard.HuggingFaceSet(**size) if to == "hf" else reshard.MindSporeSet(**size)
    if name is not None:
        from reshard.formats.entries import NamedFile  # not on every start

        return NamedFile(name)
    return None


def _target_strategy(strategy: Place, checkpoint: Checkpoint, selection: Selection) -> Strategy:
    """Return the strategy of a target, read or made by rules for the tensors that it gets."""
    if strategy.suffix not in {".yaml", ".yml"}:
        return reshard.read_strategy(strategy)
    from reshard.plan.select import derived, select
    from reshard.source.strategies import strategy_by_rules

    checkpoint = derived(checkpoint, selection)
    kept = select(checkpoint, None, selection).kept
    return strategy_by_rules(strategy, checkpoint, target_names=dict(kept))


def with_format(asked: Asked, target: Place, to: str | None) -> Asked:
    """Return the options with a format, if neither they nor the name of the target say one."""
    named = target.suffix in {".zarr", ".ckpt", ".safetensors"}
    return asked if asked.to or asked.format or asked.style or named else replace(asked, to=to)
