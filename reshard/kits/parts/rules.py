"""How the user says that tensor-parallel parts are cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.errors import StrategyError
from reshard.strategy.files import read_strategy
from reshard.strategy.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.core.listing import OpenOptions


def rules_over_parts(options: OpenOptions) -> Mapping[str, str] | None:
    """Return how the user says that tensor-parallel parts are cut, as rules over the parts; None for nothing.

    Layouts win over the strategy, whose devices are the parts.

    Raises:
        StrategyError: the strategy cannot be read, or a layout cannot be written as a rule.
    """
    strategy, layouts = options.strategy, options.layouts
    if strategy is None:
        return dict(layouts) if layouts else None
    if not isinstance(strategy, Strategy):
        strategy = read_strategy(strategy)
    rules = {}
    for name, (placed, *_) in strategy.tensors.items():
        rules[name] = placed.layout.rule
        if placed.expanded or placed.layout.param_split_shape or placed.layout.field:
            raise StrategyError(
                f"the layout of {name!r} is uneven, interleaved or of an unknown shape", code="unsupported-layout"
            )
    return {**rules, **layouts}
