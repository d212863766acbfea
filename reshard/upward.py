"""The conveniences that look upward: a checkpoint gives arrays, a plan runs itself, everything draws itself.

Imports point down, from shelf to shelf and from room to room, but for the names of this table, which are imported when
they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

HOMES = {
    "RankArrays": "view.arrays",
    "graph": "run.graph",
    "groups": "view.tables",
    "html": "view.html",
    "manifest_of": "verify.manifest_files",
    "picture": "view.html",
    "plan": "plan.make",
    "run": "view.progress",
    "save": "plan.planfile",
    "tensor_array": "view.arrays",
}


def upward(name: str) -> Any:
    """Return what has a name of the table."""
    return getattr(import_module(f"reshard.{HOMES[name]}"), name)
