"""Options that select tensors, and rename or change them on the way."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from reshard.cli.commands import option, record
from reshard.cli.options import drop_option
from reshard.cli.values import READ, READ_PLACE, dtype_casts, numbers, read_name_map
from reshard.core.plan.inputs import Selection
from reshard.errors import UsageError
from reshard.rules.lora import LoRA

if TYPE_CHECKING:
    from reshard.core.storage.places import Place
    from reshard.rules.rules import Rules

_tensors = partial(option, under="Tensors")

model_config_option = _tensors(
    "--model-config", type=READ_PLACE, metavar="FILE",
    help="The config.json with the numbers of the rules and of layers.  [default: the source's]",
)  # fmt: skip
let_option = _tensors(
    "--let", multiple=True, callback=numbers, metavar="WORD=N",
    help="A number of the rules, in place of theirs. May be repeated.",
)  # fmt: skip
_RULES = (
    _tensors(
        "--rules", in_short_help=True, type=READ_PLACE, metavar="FILE",
        help="Rules of other names and shapes: a file, or a name of `reshard rules list`. Other options of this group "
        "take the names that the rules make.",
    ),
    model_config_option,
    let_option,
)  # fmt: skip


def rules_numbers(command: Any) -> Any:
    """Add the options for the numbers of rules."""
    return model_config_option(let_option(command))


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


rules_options = record("rules", read_rules, *_RULES)
"""Adds the options for rules, and passes the parsed rules as `rules`."""


def _adapter(root: Place | None, alpha: float | None) -> LoRA | None:
    """Return the LoRA adapter that the options give, or None."""
    if root is not None:
        return LoRA(str(root), alpha)
    if alpha is not None:
        raise UsageError(
            "--lora-alpha is for an adapter, and there is none", code="missing-option", hint="add --lora DIR"
        )
    return None


def _selection_of(
    *,
    rules: Place | None,
    model_config: Place | None,
    let: dict[str, int],
    lora: Place | None,
    lora_alpha: float | None,
    casts: dict[str, str],
    **values: Any,
) -> Selection:
    loaded = read_rules(rules, model_config, let)
    return Selection(cast=casts, rules=loaded, lora=_adapter(lora, lora_alpha), **values)


selection_options = record(
    "selection",
    _selection_of,
    _tensors("--weights-only", in_short_help=True, is_flag=True, help="No optimizer states, global_step and the like."),
    _tensors(
        "--include", in_short_help=True, multiple=True, metavar="GLOB[@COUNT]",
        help="Only tensors of these names. With @COUNT, exactly that many. May be repeated.",
    ),
    _tensors(
        "--exclude", multiple=True, metavar="GLOB[@COUNT]",
        help="No tensors of these names. May be repeated.",
    ),
    _tensors(
        "--name-map", in_short_help=True, type=READ, callback=read_name_map, metavar="FILE",
        help='JSON object of old to new names. As {"layers.*.wq": "model.*.q_proj"}; optimizer states follow.',
    ),
    _tensors(
        "--cast", "casts", in_short_help=True, multiple=True, callback=dtype_casts, metavar="OLD=NEW",
        help="Convert a dtype, such as float32=bfloat16. Values are rounded to nearest. May be repeated.",
    ),
    _tensors(
        "--lora", type=READ_PLACE, metavar="DIR",
        help="Merge a LoRA adapter, as PEFT saves it, into the weights, before anything else here.",
    ),
    _tensors(
        "--lora-alpha", type=float, metavar="N",
        help="The adapter's alpha, in place of lora_alpha in its adapter_config.json.",
    ),
    *_RULES,
    drop_option("Weights that the target may lack; with --rules, tensors that no rule names. May be repeated."),
    _tensors(
        "--allow-missing", multiple=True, metavar="GLOB", help="Weights that the source may lack. May be repeated."
    ),
)  # fmt: skip
"""Adds the options that select tensors, and passes them as one `selection`."""
