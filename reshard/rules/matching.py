"""Match the names of a checkpoint's tensors with rules.

Each tensor has one rule, by its own name or by the weight's name in the name of an optimizer state or a scale.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import names
from reshard.rules.patterns import families
from reshard.strategy.names import MODEL, OPTAX, PARAMS, is_training_state, optimizer_states
from reshard.strategy.names import matches as matches_any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.errors import Faults
    from reshard.rules.patterns import Family
    from reshard.rules.ranges import Ranges
    from reshard.rules.rule import Rule
    from reshard.rules.rules import Rules
    from reshard.strategy.names import State

Bound = dict[str, int | str]
"""The values of words and stars in a name."""


@dataclass(slots=True)
class Use:
    """The application of a rule to the tensors of one family.

    Attributes:
        rule: the rule.
        number: the number of the rule.
        family: the family.
        members: names of the source's tensors, each with the number of its part and the values of all words. They are
            grouped by the values of the words that are not axes.
        sources: the names of the source's tensors.
        targets: the names of the resulting tensors.
    """

    rule: Rule
    number: int
    family: Family
    members: dict[tuple[tuple[str, int | str], ...], dict[str, tuple[int, Bound]]] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)


class Matches(NamedTuple):
    """The rules of a checkpoint's tensors.

    Attributes:
        uses: the applications of rules, by first appearance.
        dropped: tensors without a counterpart, by a rule or `drop`.
        training_state: replicated training state without a rule.
    """

    uses: list[Use]
    dropped: list[str]
    training_state: list[str]


def match_names(
    source: Checkpoint, rules: Rules, side: int, ranges: Ranges, faults: Faults, drop: Collection[str] = ()
) -> Matches:
    """Return the rule of each tensor.

    Args:
        source: the checkpoint.
        rules: the rules.
        side: the side of the checkpoint.
        ranges: collects the numbers in names of parts.
        faults: collects tensors with no rule or several, and rules without a tensor.
        drop: names and globs of tensors that are left out if they have no rule.
    """
    uses: dict[tuple[int, Family], Use] = {}
    matches = Matches([], [], [])
    matched = set[int]()
    states = optimizer_states(source.all_names, source.opening.states)
    prefixes: dict[Family, str] = {}
    for name, tensor in source.tensors.items():
        candidates = list(_candidates(name, rules, side, states))
        if not candidates:
            if is_training_state(name, tensor):
                matches.training_state.append(name)
            elif matches_any(name, drop):
                matches.dropped.append(name)
            else:
                faults.add(
                    f"tensor {name!r}", "matches no rule", code="unmatched-tensor",
                    hint=f"add a rule, with null for {rules.sides[1 - side]} to leave a tensor out",
                )  # fmt: skip
            continue
        numbers = {number for number, _, _, _ in candidates}
        matched |= numbers
        if len(numbers) > 1:
            rule_paths = names(rules.rules[number].key_path for number in sorted(numbers))
            faults.add(f"tensor {name!r}", f"matches several rules: {rule_paths}", code="ambiguous-rules")
            continue
        number, family, part, bound = candidates[0]
        rule = rules.rules[number]
        family = family._replace(new_outer=_new_outer(family, rules, side, prefixes))
        if not rule.parts:
            matches.dropped.append(name)
            continue
        use = uses.setdefault((number, family), Use(rule, number, family))
        use.sources.append(name)
        if side != rule.fused_side:
            ranges.add(rule, family, part, bound)
        axes = {word for word, _ in rule.by}
        key = tuple(sorted((word, value) for word, value in bound.items() if word not in axes))
        use.members.setdefault(key, {})[name] = (part, bound)
    for number, rule in enumerate(rules.rules):
        if number not in matched and not rule.optional and rule.side(side):
            patterns = names(pattern.text for pattern in rule.side(side))
            faults.add(
                rule.key_path, f"matches no tensor: {patterns}", code="no-match",
                hint="correct the rule, or add optional: true to it",
            )  # fmt: skip
    return matches._replace(uses=list(uses.values()))


def _new_outer(family: Family, rules: Rules, side: int, cache: dict[Family, str]) -> str:
    """Return the beginning of weights' names that the states of a family omit among the names that rules make.

    States of optax and PyTorch are named in the model, and weights are in `params.` or `model.`, if all names that the
    rules make are there. But a source whose weights are all there, too, shows by its own states if they omit it.
    """
    if family not in cache:
        outer = _outer_of(family)
        new, old = (all(name.startswith(outer) for name in _dotted(rules, at)) for at in (1 - side, side))
        cache[family] = outer if outer and new and (family.outer == outer or not old) else ""
    return cache[family]


def _outer_of(family: Family) -> str:
    """Return the beginning of weights' names that states of these names may omit."""
    if family.prefix.startswith(OPTAX):
        return PARAMS
    return MODEL if family.suffix and family.prefix in {"optim.state.", "optimizer.state."} else family.outer


def _dotted(rules: Rules, side: int) -> list[str]:
    """Return the names in the rules of one side, without single words such as `step`."""
    return [pattern.text for rule in rules.rules for pattern in rule.side(side) if "." in pattern.text]


def _candidates(
    name: str, rules: Rules, side: int, states: Mapping[str, State]
) -> Iterator[tuple[int, Family, int, Bound]]:
    """Yield the rules that match a name, or else the name of its weight.

    Only the most specific rules count: the ones with the fewest words.
    """
    for family, weight in families(name, states):
        candidates = [
            (number, family, part, bound)
            for number, rule in enumerate(rules.rules)
            for part, pattern in enumerate(rule.side(side))
            if (bound := pattern.match(weight)) is not None
        ]
        if candidates:
            fewest = min(len(bound) for *_, bound in candidates)
            yield from (candidate for candidate in candidates if len(candidate[3]) == fewest)
            return
