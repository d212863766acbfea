"""Cut and join sharded checkpoints of M devices anew for N devices, from the files alone.

>>> import reshard
>>> strategy = reshard.Strategy.of({"w": reshard.Layout.of([2, 4], [1, -1])})
>>> strategy.grid("w", (8, 6)).ranks
((0, 1, 2, 3), (4, 5, 6, 7))
"""

from __future__ import annotations

import sys

__version__ = "0.1.0"

TYPE_CHECKING = False  # to import `typing` takes longer than all of this, and whoever starts the command waits for it

# The homes of all names, imported on first use: `reshard.entry` takes hold of interrupts before anything slow begins.
_HOMES = {
    "Block": "block",
    "Checkpoint": "checkpoint",
    "Cipher": "cipher",
    "HuggingFaceSet": "formats.unified",
    "Layout": "layout",
    "Manifest": "manifest",
    "MindSporeSet": "formats.unified",
    "Plan": "plan",
    "ReshardError": "errors",
    "Selection": "selection",
    "Strategy": "strategy",
    "Verification": "verification",
    "make_manifest": "verification",
    "ZarrGroup": "formats.zarr",
    "merge_strategies": "strategy_file",
    "open": "source",
    "plan": "plan",
    "read_plan": "plan_file",
    "read_manifest": "manifest",
    "read_strategy": "strategy_file",
    "verify": "verification",
    "write_manifest": "manifest",
    "write_strategy": "strategy_file",
}

__all__ = [
    "Block",
    "Checkpoint",
    "Cipher",
    "HuggingFaceSet",
    "Layout",
    "Manifest",
    "MindSporeSet",
    "Plan",
    "ReshardError",
    "Selection",
    "Strategy",
    "Verification",
    "ZarrGroup",
    "make_manifest",
    "merge_strategies",
    "open",
    "plan",
    "read_manifest",
    "read_plan",
    "read_strategy",
    "verify",
    "write_manifest",
    "write_strategy",
]

if TYPE_CHECKING:
    from reshard.block import Block
    from reshard.checkpoint import Checkpoint
    from reshard.cipher import Cipher
    from reshard.errors import ReshardError
    from reshard.formats.unified import HuggingFaceSet, MindSporeSet
    from reshard.formats.zarr import ZarrGroup
    from reshard.layout import Layout
    from reshard.manifest import Manifest, read_manifest, write_manifest
    from reshard.plan import Plan, plan
    from reshard.plan_file import read_plan
    from reshard.selection import Selection
    from reshard.source import open  # noqa: A004 -- reshard.open, as zarr.open
    from reshard.strategy import Strategy
    from reshard.strategy_file import merge_strategies, read_strategy, write_strategy
    from reshard.verification import Verification, make_manifest, verify


class _Package(type(sys)):  # type: ignore[misc]  # a module
    """This package, in which `plan` is the function, also once the module `reshard.plan` is imported."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value.plan if name == "plan" and isinstance(value, type(sys)) else value)


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
