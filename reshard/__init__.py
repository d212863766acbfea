"""Turn the sharded checkpoint of M devices into that of N devices, from the files alone.

>>> import reshard
>>> strategy = reshard.Strategy.of({"w": reshard.Layout.of([2, 4], [1, -1])})
>>> strategy.grid("w", (8, 6)).ranks
((0, 1, 2, 3), (4, 5, 6, 7))
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False  # to import `typing` takes longer than all of this, and whoever starts the command waits for it

# The homes of all names, imported on first use: `__main__` takes hold of interrupts before anything slow begins.
_HOMES = {
    "average": "api.averages",
    "BudgetError": "errors",
    "Checkpoint": "api.checkpoints",
    "Cipher": "core.storage.cipher",
    "convert": "api.conversions",
    "demo": "api.demos",
    "diff": "api.comparing",
    "Layout": "core.layout.layout",
    "load": "api.conversions",
    "LoRA": "rules.lora",
    "Manifest": "core.verify.manifest",
    "open": "api.checkpoints",
    "plan": "api.plans",
    "Plan": "api.plans",
    "Progress": "core.run.settings",
    "read_plan": "api.plans",
    "read_strategy": "strategy.files",
    "Report": "core.run.settings",
    "ReshardError": "errors",
    "ReshardWarning": "messages",
    "Rules": "rules.rules",
    "runs": "view.pages.runs_view",
    "Selection": "core.plan.inputs",
    "SourceError": "errors",
    "Strategy": "strategy.strategy",
    "StrategyError": "errors",
    "TargetError": "errors",
    "UsageError": "errors",
    "Verification": "core.verify.verification",
    "verify": "api.verification",
    "VerifyError": "errors",
    "write": "api.writing",
    "write_strategy": "strategy.files",
}

__all__ = [
    "BudgetError",
    "Checkpoint",
    "Cipher",
    "Layout",
    "LoRA",
    "Manifest",
    "Plan",
    "Progress",
    "Report",
    "ReshardError",
    "ReshardWarning",
    "Rules",
    "Selection",
    "SourceError",
    "Strategy",
    "StrategyError",
    "TargetError",
    "UsageError",
    "Verification",
    "VerifyError",
    "average",
    "convert",
    "demo",
    "diff",
    "load",
    "open",
    "plan",
    "read_plan",
    "read_strategy",
    "runs",
    "verify",
    "write",
    "write_strategy",
]

if TYPE_CHECKING:
    from reshard.api.averages import average
    from reshard.api.checkpoints import Checkpoint, open  # noqa: A004 -- reshard.open, as zarr.open
    from reshard.api.comparing import diff
    from reshard.api.conversions import convert, load
    from reshard.api.demos import demo
    from reshard.api.plans import Plan, plan, read_plan
    from reshard.api.verification import verify
    from reshard.api.writing import write
    from reshard.core.layout.layout import Layout
    from reshard.core.plan.inputs import Selection
    from reshard.core.run.settings import Progress, Report
    from reshard.core.storage.cipher import Cipher
    from reshard.core.verify.manifest import Manifest
    from reshard.core.verify.verification import Verification
    from reshard.errors import (
        BudgetError,
        ReshardError,
        SourceError,
        StrategyError,
        TargetError,
        UsageError,
        VerifyError,
    )
    from reshard.messages import ReshardWarning
    from reshard.rules.lora import LoRA
    from reshard.rules.rules import Rules
    from reshard.strategy.files import read_strategy, write_strategy
    from reshard.strategy.strategy import Strategy
    from reshard.view.pages.runs_view import runs


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


if not TYPE_CHECKING:  # a type checker would take any name for one of this module

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            from importlib import import_module

            value = getattr(import_module(f"reshard.{_HOMES[name]}"), name)
            globals()[name] = value
            return value
        from reshard.former import NAMES

        advice = f"; {NAMES[name]}" if name in NAMES else ""
        raise AttributeError(f"module 'reshard' has no attribute {name!r}{advice}")
