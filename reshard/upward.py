"""The conveniences that look upward: results draw themselves, and a report makes its manifest.

Imports point down, from shelf to shelf and from room to room, but for the names of this table, which are imported when
they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

HOMES = {"html": "view.html", "manifest_of": "core.verify.manifest", "picture": "view.html"}


def upward(name: str) -> Any:
    """Return what has a name of the table."""
    return getattr(import_module(f"reshard.{HOMES[name]}"), name)
