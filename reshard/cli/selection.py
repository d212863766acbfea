"""Options that select tensors, and rename or change them on the way."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import click

from reshard.cli.commands import option
from reshard.cli.options import drop_option
from reshard.cli.values import READ, READ_PLACE, dtype_casts, numbers, read_name_map
from reshard.errors import UsageError
from reshard.plan.select import Selection
from reshard.rules.lora import TIED, LoRA

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.rules.rules import Rules
    from reshard.storage.places import Place

_rules_numbers = (
    option(
        "--let",
        under="Tensors",
        multiple=True,
        callback=numbers,
        metavar="WORD=N",
        help="A number of the rules, in place of theirs. May be repeated.",
    ),
    option(
        "--model-config",
        under="Tensors",
        type=READ_PLACE,
        metavar="FILE",
        help="The config.json with the numbers of the rules and of layers.  [default: the source's]",
    ),
)
_rules_option = option(
    "--rules",
    under="Tensors",
    first=True,
    type=READ_PLACE,
    metavar="FILE",
    help="Rules of other names and shapes: a file, or a name of `reshard rules list`. Other options of this group "
    "take the names that the rules make.",
)


def rules_numbers(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for the numbers of rules."""
    for add in _rules_numbers:
        command = add(command)
    return command


def rules_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for rules, and pass the parsed rules as `rules`."""

    @functools.wraps(command)
    def reading(*args: Any, rules: Place | None, model_config: Place | None, let: dict[str, int], **kwargs: Any) -> Any:
        return command(*args, rules=read_rules(rules, model_config, let), **kwargs)

    wrapped: Callable[..., Any] = _rules_option(rules_numbers(reading))
    return wrapped


def read_rules(rules: Place | None, model_config: Place | None, let: dict[str, int]) -> Rules | None:
    """Return the rules that the options give, or None.

    Raises:
        UsageError: there are options for rules, but no rules; or as `Rules.read`.
    """
    if rules is None:
        if model_config or let:
            name = "--model-config" if model_config else "--let"
            raise UsageError(f"{name} is for rules, and there are none", code="missing-option", hint="add --rules FILE")
        return None
    from reshard.rules.rules import Rules  # not on every start

    return Rules.read(rules, config=model_config, let=let)


def _adapter(root: Place | None, alpha: float | None, tied: str | None) -> LoRA | None:
    """Return the LoRA adapter that the options give, or None."""
    if root is not None:
        return LoRA(str(root), alpha, tied or "")
    if alpha is not None or tied:
        name = "--lora-tied" if alpha is None else "--lora-alpha"
        raise UsageError(f"{name} is for an adapter, and there is none", code="missing-option", hint="add --lora DIR")
    return None


def selection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that select tensors, and pass them as one `selection`."""

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
        rules: Rules | None,
        lora: Place | None,
        lora_alpha: float | None,
        lora_tied: str | None,
        **kwargs: Any,
    ) -> Any:
        adapter = _adapter(lora, lora_alpha, lora_tied)
        selection = Selection(include, exclude, weights_only, name_map, casts, drop, allow_missing, rules, adapter)
        return command(*args, selection=selection, **kwargs)

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
        rules_options,
        option(
            "--lora-tied",
            under="Tensors",
            type=click.Choice(TIED),
            help="If the adapter changes one of two tied weights, such as lm_head and embed_tokens: change both, as "
            "PEFT's merge_and_unload does, or untie them, as they were trained.",
        ),
        option(
            "--lora-alpha",
            under="Tensors",
            type=float,
            metavar="N",
            help="The adapter's alpha, in place of lora_alpha in its adapter_config.json.",
        ),
        option(
            "--lora",
            under="Tensors",
            type=READ_PLACE,
            metavar="DIR",
            help="Merge a LoRA adapter, as PEFT saves it, into the weights, before anything else here.",
        ),
        option(
            "--cast",
            "casts",
            under="Tensors",
            first=True,
            multiple=True,
            callback=dtype_casts,
            metavar="OLD=NEW",
            help="Convert a dtype, such as float32=bfloat16. Values are rounded to nearest. May be repeated.",
        ),
        option(
            "--name-map",
            under="Tensors",
            first=True,
            type=READ,
            callback=read_name_map,
            metavar="FILE",
            help='JSON object of old to new names. As {"layers.*.wq": "model.*.q_proj"}; optimizer states follow. '
            "With --rules, old names are those that the rules make.",
        ),
        option(
            "--exclude",
            under="Tensors",
            multiple=True,
            metavar="GLOB[@COUNT]",
            help="No tensors of these names. With --rules, names that the rules make. May be repeated.",
        ),
        option(
            "--include",
            under="Tensors",
            first=True,
            multiple=True,
            metavar="GLOB[@COUNT]",
            help="Only tensors of these names. With @COUNT, exactly that many. With --rules, names that the rules "
            "make. May be repeated.",
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
