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
    "Block": "core.layout.block",
    "BudgetError": "errors",
    "ChangedError": "errors",
    "Checkpoint": "api.checkpoints",
    "CheckpointDiff": "compute.differences",
    "CheckpointStats": "compute.stats",
    "Checkpoint2": "formats.checkpoint2.options",
    "Cipher": "core.storage.cipher",
    "convert": "api.conversions",
    "DCP": "formats.dcp.names",
    "demo": "api.demos",
    "diff": "api.comparing",
    "EncryptedError": "errors",
    "GoneError": "errors",
    "HuggingFaceSet": "formats.sets.options",
    "Layout": "core.layout.layout",
    "LayoutError": "errors",
    "LoRA": "rules.lora",
    "make_manifest": "core.verify.manifest_files",
    "Manifest": "core.verify.manifest",
    "merge_strategies": "strategy.files",
    "MindSporeSet": "formats.sets.options",
    "MissingNameError": "errors",
    "NoBucketError": "errors",
    "open": "api.checkpoints",
    "plan": "api.plans",
    "Plan": "api.plans",
    "PlanError": "errors",
    "Progress": "core.run.settings",
    "read_manifest": "core.verify.manifest",
    "read_object": "api.checkpoints",
    "read_plan": "api.plans",
    "read_strategy": "strategy.files",
    "Report": "core.run.settings",
    "ReshardError": "errors",
    "ReshardWarning": "messages",
    "Rules": "rules.rules",
    "runs": "view.computed.runs_view",
    "Selection": "core.plan.inputs",
    "SourceError": "errors",
    "Strategy": "strategy.strategy",
    "strategy_of": "api.checkpoints",
    "StrategyError": "errors",
    "TargetError": "errors",
    "UnansweredError": "errors",
    "UnsentError": "errors",
    "UsageError": "errors",
    "Verification": "core.verify.verification",
    "verify": "api.verification",
    "VerifyError": "errors",
    "write": "api.writing",
    "write_manifest": "core.verify.manifest",
    "write_strategy": "strategy.files",
    "ZarrGroup": "formats.zarr.layout",
}

__all__ = [
    "DCP",
    "Block",
    "BudgetError",
    "ChangedError",
    "Checkpoint",
    "Checkpoint2",
    "CheckpointDiff",
    "CheckpointStats",
    "Cipher",
    "EncryptedError",
    "GoneError",
    "HuggingFaceSet",
    "Layout",
    "LayoutError",
    "LoRA",
    "Manifest",
    "MindSporeSet",
    "MissingNameError",
    "NoBucketError",
    "Plan",
    "PlanError",
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
    "UnansweredError",
    "UnsentError",
    "UsageError",
    "Verification",
    "VerifyError",
    "ZarrGroup",
    "average",
    "convert",
    "demo",
    "diff",
    "make_manifest",
    "merge_strategies",
    "open",
    "plan",
    "read_manifest",
    "read_object",
    "read_plan",
    "read_strategy",
    "runs",
    "strategy_of",
    "verify",
    "write",
    "write_manifest",
    "write_strategy",
]

if TYPE_CHECKING:
    from reshard.api.averages import average
    from reshard.api.checkpoints import Checkpoint, open, read_object, strategy_of  # noqa: A004 -- reshard.open, as zarr.open
    from reshard.api.comparing import diff
    from reshard.api.conversions import convert
    from reshard.api.demos import demo
    from reshard.api.plans import Plan, plan, read_plan
    from reshard.api.verification import verify
    from reshard.api.writing import write
    from reshard.compute.differences import CheckpointDiff
    from reshard.compute.stats import CheckpointStats
    from reshard.core.layout.block import Block
    from reshard.core.layout.layout import Layout
    from reshard.core.plan.inputs import Selection
    from reshard.core.run.settings import Progress, Report
    from reshard.core.storage.cipher import Cipher
    from reshard.core.verify.manifest import Manifest, read_manifest, write_manifest
    from reshard.core.verify.manifest_files import make_manifest
    from reshard.core.verify.verification import Verification
    from reshard.errors import (
        BudgetError,
        ChangedError,
        EncryptedError,
        GoneError,
        LayoutError,
        MissingNameError,
        NoBucketError,
        PlanError,
        ReshardError,
        SourceError,
        StrategyError,
        TargetError,
        UnansweredError,
        UnsentError,
        UsageError,
        VerifyError,
    )
    from reshard.formats.checkpoint2.options import Checkpoint2
    from reshard.formats.dcp.names import DCP
    from reshard.formats.sets.options import HuggingFaceSet, MindSporeSet
    from reshard.formats.zarr.layout import ZarrGroup
    from reshard.messages import ReshardWarning
    from reshard.rules.lora import LoRA
    from reshard.rules.rules import Rules
    from reshard.strategy.files import merge_strategies, read_strategy, write_strategy
    from reshard.strategy.strategy import Strategy
    from reshard.view.computed.runs_view import runs


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


if not TYPE_CHECKING:  # a type checker would take any name for one of this module

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            from importlib import import_module

            value = getattr(import_module(f"reshard.{_HOMES[name]}"), name)
            globals()[name] = value
            return value
        raise AttributeError(f"module 'reshard' has no attribute {name!r}")
