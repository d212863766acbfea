"""Hostile and broken input, as a table: what each thing is, and the one line that every command says of it.

An item makes a file or a directory `bad`, and names the commands that may meet it. Each of them ends with the item's
exit code and says its sentence; `child.py` runs them under a limit of memory and of time. An item without a sentence
is odd and valid: it is read, and nothing of it reaches the terminal raw or the disk elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from corpus_checkpoints import CKPT, ENCRYPTED, KINDS, NAMED, SAFETENSORS
from corpus_dcp import DCP, PICKLES
from corpus_directories import RANKS, SETS
from corpus_manifests import FOLDERS, MANIFESTS
from corpus_name_maps import NAME_MAPS
from corpus_parts import PARTS
from corpus_plans import PLANS
from corpus_rules import RULES_FILES
from corpus_saves import SAVES
from corpus_strategies import JSON, PROTOBUF, UNFIT
from corpus_targets import TARGETS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from item import Item


def items() -> dict[str, list[Item]]:
    """All items, by the group that one child process runs."""
    return {
        "ckpt": CKPT, "safetensors": SAFETENSORS, "kinds": KINDS, "protobuf": PROTOBUF, "unfit": UNFIT, "json": JSON,
        "sets": SETS, "ranks": RANKS, "rules": RULES_FILES, "names": NAME_MAPS, "encrypted": ENCRYPTED,
        "named": NAMED, "targets": TARGETS, "plans": PLANS, "manifests": MANIFESTS, "folders": FOLDERS, "dcp": DCP,
        "pickles": PICKLES, "saves": SAVES, "parts": PARTS,
    }  # fmt: skip


def chosen(groups: Sequence[str], *, slow: bool, every: int = 1) -> Iterator[tuple[str, Item, list[str]]]:
    """Give the items of some groups, each with what it meets: of so many commands one, by turns, and one at least."""
    for group in groups:
        for turn, item in enumerate(item for item in items()[group] if item.slow == slow):
            count = len(item.commands)
            yield group, item, [item.commands[(turn + place) % count] for place in range(0, count, every)]
