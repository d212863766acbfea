"""Where things are in nested dicts and lists (`planner_data` of a DCP), when they get other names.

A name is the keys and places of a path, with dots between. What of them is the same before and behind stays as it is,
and what is between becomes as many keys of as many words as it was, the last of them of what is left.

Source: PyTorch 2.13 `distributed/checkpoint/{_nested_dict,_traverse}.py`.
"""

from __future__ import annotations

import re
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.errors import Faults
    from reshard.readers.dcp.metadata import KeyPath

_PLACE = re.compile(r"\d{1,9}", re.ASCII)

_HINT = "choose other names"


def followed(path: KeyPath, old: str, new: str) -> KeyPath:
    """Return the path of something that gets another name.

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
    were = path[begin:end] if len(between) == end - begin else between
    return (*path[:begin], *(_as(key, before) for key, before in zip(between, were, strict=True)), *path[end:])


def _split(text: str, sizes: list[int]) -> list[str]:
    """Return a text as keys of so many words each, the last of what is left; as one where that leaves none.

    >>> _split("net.blocks.0.w", [1, 2]), _split("net", [1, 1])
    (['net', 'blocks.0.w'], ['net'])
    """
    words = text.split(".")
    if len(words) <= sum(sizes[:-1]):
        return [text]
    ends = [*accumulate(sizes[:-1]), len(words)]
    return [".".join(words[begin:end]) for begin, end in pairwise([0, *ends])]


def _as(key: str, before: str | int) -> str | int:
    """Return a key in place of another; it is one of a list if that was."""
    return int(key) if isinstance(before, int) and _PLACE.fullmatch(key) else key


def without_gaps(paths: Mapping[str, KeyPath]) -> dict[str, KeyPath]:
    """Return paths whose places in lists count from 0: PyTorch puts no list together of which something is left out.

    >>> without_gaps({"l.1.w": ("l", 1, "w"), "l.3.w": ("l", 3, "w"), "a": ("a",)})
    {'l.1.w': ('l', 0, 'w'), 'l.3.w': ('l', 1, 'w'), 'a': ('a',)}
    """
    places: dict[KeyPath, set[int]] = {}
    for path in paths.values():
        for depth, key in enumerate(path):
            if isinstance(key, int):
                places.setdefault(path[:depth], set()).add(key)
    numbers = {above: {key: number for number, key in enumerate(sorted(some))} for above, some in places.items()}
    return {
        name: tuple(numbers[path[:n]][key] if isinstance(key, int) else key for n, key in enumerate(path))
        for name, path in paths.items()
    }


def check_nesting(paths: Mapping[str, KeyPath], faults: Faults) -> None:
    """Check that dicts and lists can hold all paths: none is below another's, and a list has places alone."""
    at: dict[KeyPath, str] = {}
    for name, path in paths.items():
        other = at.setdefault(path, name)
        if other != name:
            faults.add(
                f"names {name!r} and {other!r}", "would have the same place in nested dicts", code="duplicate-name",
                hint=_HINT,
            )  # fmt: skip
    kinds: dict[KeyPath, tuple[type, str]] = {}
    for name, path in paths.items():
        for depth, key in enumerate(path):
            above = path[:depth]
            kind, first = kinds.setdefault(above, (type(key), name))
            if above in at or kind is not type(key):
                other = at.get(above, first)
                faults.add(
                    f"names {name!r} and {other!r}", "cannot both be in nested dicts and lists",
                    code="conflicting-names", hint=_HINT,
                )  # fmt: skip
                break
