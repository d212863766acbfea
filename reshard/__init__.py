"""Turn the sharded checkpoint of M devices into that of N devices, from the files alone.

>>> import reshard
>>> strategy = reshard.Strategy.of({"w": reshard.Layout.of([2, 4], [1, -1])})
>>> strategy.grid("w", (8, 6)).ranks
((0, 1, 2, 3), (4, 5, 6, 7))
"""

from __future__ import annotations

import sys

__version__ = "0.1.0"

TYPE_CHECKING = False  # to import `typing` takes longer than all of this, and whoever starts the command waits for it

# The homes of all names, imported on first use: `__main__` takes hold of interrupts before anything slow begins.
_HOMES = {
    "Block": "layout.block",
    "Checkpoint": "source.checkpoint",
    "Checkpoint2": "targets.checkpoint2",
    "Cipher": "storage.cipher",
    "DCP": "formats.sets",
    "HuggingFaceSet": "formats.sets",
    "Layout": "layout.layout",
    "LinkedDCP": "formats.sets",
    "LoRA": "rules.lora",
    "make_manifest": "verify.verify",
    "Manifest": "verify.manifest",
    "merge_strategies": "strategy.files",
    "MindSporeSet": "formats.sets",
    "open": "readers.open",
    "plan": "plan.make",
    "Plan": "plan.plan",
    "read_layouts": "targets.pattern",
    "read_manifest": "verify.manifest",
    "read_object": "readers.dcp.objects",
    "read_plan": "plan.planfile",
    "read_strategy": "strategy.files",
    "ReshardError": "errors",
    "Rules": "rules.rules",
    "Selection": "plan.select",
    "Strategy": "strategy.strategy",
    "strategy_of": "source.strategies",
    "Verification": "verify.verify",
    "verify": "verify.verify",
    "write_manifest": "verify.manifest",
    "write_strategy": "strategy.files",
    "ZarrGroup": "formats.zarr",
}

__all__ = [
    "DCP",
    "Block",
    "Checkpoint",
    "Checkpoint2",
    "Cipher",
    "HuggingFaceSet",
    "Layout",
    "LinkedDCP",
    "LoRA",
    "Manifest",
    "MindSporeSet",
    "Plan",
    "ReshardError",
    "Rules",
    "Selection",
    "Strategy",
    "Verification",
    "ZarrGroup",
    "make_manifest",
    "merge_strategies",
    "open",
    "plan",
    "read_layouts",
    "read_manifest",
    "read_object",
    "read_plan",
    "read_strategy",
    "strategy_of",
    "verify",
    "write_manifest",
    "write_strategy",
]

if TYPE_CHECKING:
    from reshard.errors import ReshardError
    from reshard.formats.sets import DCP, HuggingFaceSet, LinkedDCP, MindSporeSet
    from reshard.formats.zarr import ZarrGroup
    from reshard.layout.block import Block
    from reshard.layout.layout import Layout
    from reshard.plan.make import plan
    from reshard.plan.plan import Plan
    from reshard.plan.planfile import read_plan
    from reshard.plan.select import Selection
    from reshard.readers.dcp.objects import read_object
    from reshard.readers.open import open  # noqa: A004 -- reshard.open, as zarr.open
    from reshard.rules.lora import LoRA
    from reshard.rules.rules import Rules
    from reshard.source.checkpoint import Checkpoint
    from reshard.source.strategies import strategy_of
    from reshard.storage.cipher import Cipher
    from reshard.strategy.files import merge_strategies, read_strategy, write_strategy
    from reshard.strategy.strategy import Strategy
    from reshard.targets.checkpoint2 import Checkpoint2
    from reshard.targets.pattern import read_layouts
    from reshard.verify.manifest import Manifest, read_manifest, write_manifest
    from reshard.verify.verify import Verification, make_manifest, verify


class _Package(type(sys)):  # type: ignore[misc]  # a module
    """This package, in which `plan` and `verify` are functions, also once the shelves of these names are imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, type(sys))):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    if name in _HOMES:
        from importlib import import_module

        value = getattr(import_module(f"reshard.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'reshard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
