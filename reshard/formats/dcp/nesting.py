"""Paths of renamed tensors and objects in nested dicts and lists.

They are the `planner_data` of a DCP.

A name is the keys and list indexes of a path, joined by dots. Keys at the beginning and the end that old and new names
share are kept. The middle of the new name is split into keys with the same numbers of words as before; the last key
takes the remaining words.

Source: PyTorch 2.13 `distributed/checkpoint/{_nested_dict,_traverse}.py`.
"""

from __future__ import annotations

import re
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.errors import Faults
    from reshard.formats.dcp.metadata import KeyPath

_INDEX = re.compile(r"\d{1,9}", re.ASCII)

_HINT = "choose other names"


def followed(path: KeyPath, old: str, new: str) -> KeyPath:
    """Return the path for a new name.

    >>> followed(("optim", "state", "layers.0.w", "step"), "optim.state.layers.0.w.step", "optim.state.w.step")
    ('optim', 'state', 'w', 'step')
    >>> followed(("model", "w"), "model.w", "w"), followed(("w",), "w", "model.w")
    (('w',), ('model.w',))
    >>> followed(("list", 1, "w"), "list.1.w", "list.7.w"), followed(("a", "b", "w"), "a.b.w", "x.w")
    (('list', 7, 'w'), ('x', 'w'))
    """
    keys = list(map(str, path))
    if new == old or ".".join(keys) != old:
        return path if new == old else (new,)
    begin, end, rest = 0, len(keys), new
    while begin < end - 1 and rest.startswith(f"{keys[begin]}."):
        rest = rest.removeprefix(f"{keys[begin]}.")
        begin += 1
    while begin < end - 1 and rest.endswith(f".{keys[end - 1]}"):
        rest = rest.removesuffix(f".{keys[end - 1]}")
        end -= 1
    if begin < end - 1 and rest == keys[end - 1]:
        return (*path[:begin], *path[end - 1 :])
    between = _split(rest, [key.count(".") + 1 for key in keys[begin:end]])
    before_keys = path[begin:end] if len(between) == end - begin else between
    return (*path[:begin], *(_like(key, before) for key, before in zip(between, before_keys, strict=True)), *path[end:])


def _split(text: str, sizes: list[int]) -> list[str]:
    """Split a text into keys with `sizes` words each; the last key gets the rest.

    Return a single key if no words are left for the last.

    >>> _split("net.blocks.0.w", [1, 2]), _split("net", [1, 1])
    (['net', 'blocks.0.w'], ['net'])
    """
    words = text.split(".")
    if len(words) <= sum(sizes[:-1]):
        return [text]
    ends = [*accumulate(sizes[:-1]), len(words)]
    return [".".join(words[begin:end]) for begin, end in pairwise([0, *ends])]


def _like(key: str, before: str | int) -> str | int:
    """Return a key, as a list index if it replaces a list index."""
    return int(key) if isinstance(before, int) and _INDEX.fullmatch(key) else key


def without_gaps(paths: Mapping[str, KeyPath]) -> dict[str, KeyPath]:
    """Renumber list indexes from 0, since PyTorch cannot rebuild a list with gaps.

    >>> without_gaps({"l.1.w": ("l", 1, "w"), "l.3.w": ("l", 3, "w"), "a": ("a",)})
    {'l.1.w': ('l', 0, 'w'), 'l.3.w': ('l', 1, 'w'), 'a': ('a',)}
    """
    indexes: dict[KeyPath, set[int]] = {}
    for path in paths.values():
        for depth, key in enumerate(path):
            if isinstance(key, int):
                indexes.setdefault(path[:depth], set()).add(key)
    numbers = {above: {key: number for number, key in enumerate(sorted(keys))} for above, keys in indexes.items()}
    return {
        name: tuple(numbers[path[:n]][key] if isinstance(key, int) else key for n, key in enumerate(path))
        for name, path in paths.items()
    }


def check_nesting(paths: Mapping[str, KeyPath], faults: Faults) -> None:
    """Check that no path is below another, and that lists have only indexes as keys."""
    at: dict[KeyPath, str] = {}
    for name, path in paths.items():
        other_name = at.setdefault(path, name)
        if other_name != name:
            faults.add(
                f"names {name!r} and {other_name!r}", "would have the same place in nested dicts",
                code="duplicate-name", hint=_HINT,
            )  # fmt: skip
    kinds: dict[KeyPath, tuple[type, str]] = {}
    for name, path in paths.items():
        for depth, key in enumerate(path):
            above = path[:depth]
            kind, first = kinds.setdefault(above, (type(key), name))
            if above in at or kind is not type(key):
                other_name = at.get(above, first)
                faults.add(
                    f"names {name!r} and {other_name!r}", "cannot both be in nested dicts and lists",
                    code="conflicting-names", hint=_HINT,
                )  # fmt: skip
                break
