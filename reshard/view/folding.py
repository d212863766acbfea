"""Folding names that repeat: equal layers become one row (`layers.{0-31}.wq.weight`).

Without it a table of ten thousand tensors tells nothing.
"""

from __future__ import annotations

import re
from itertools import product
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

_INTEGER = re.compile(r"([0-9]{1,18})")  # longer runs of digits are cut, because int() of a huge one is slow
_MOST_NUMBERS = 16  # of a name; the work grows with their square
_MOST_RUNS = 8

KindT = TypeVar("KindT", bound="Hashable")


def ranges_text(numbers: Iterable[int | str]) -> str:
    """Write ascending integers as runs, the first few of many.

    >>> ranges_text([0, 1, 2, 5, 7, 8]), ranges_text(["08", "09", "10"]), ranges_text(range(0, 40, 2))
    ('0-2,5,7-8', '08-10', '0,2,4,6,8,10,12,14,...')
    """
    runs: list[tuple[int | str, int | str]] = []
    for number in numbers:
        if runs and int(number) == int(runs[-1][1]) + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in runs[:_MOST_RUNS]]
    return ",".join([*shown, "..."] if len(runs) > _MOST_RUNS else shown)


def fold(items: Iterable[tuple[str, KindT]]) -> list[tuple[str, KindT, int]]:
    """Fold names that differ in nothing but integers, where everything else about them (their kind) is equal.

    Args:
        items: names, each with its kind.

    Returns:
        for each folded name, its kind and how many names it stands for, in order of first appearance. A row with
        several ranges stands for all their combinations, so that nothing is shown that is not there.

    >>> names = [f"h.{i}.{w}" for i in range(3) for w in ("wq", "wk")] + ["h.7.wq", "ln"]
    >>> fold((name, None) for name in names)
    [('h.{0-2,7}.wq', None, 4), ('h.{0-2}.wk', None, 3), ('ln', None, 1)]
    """
    return [(name, kind, len(members)) for name, kind, members in fold_members(items)]


def fold_members(items: Iterable[tuple[str, KindT]]) -> list[tuple[str, KindT, list[str]]]:
    """Fold names, and return with each folded one and its kind the names that it stands for.

    >>> fold_members([("h.0.w", None), ("h.1.w", None), ("ln", None)])
    [('h.{0-1}.w', None, ['h.0.w', 'h.1.w']), ('ln', None, ['ln'])]
    """
    groups: dict[tuple[tuple[str, ...], KindT], list[tuple[str, ...]]] = {}
    for name, kind in items:
        parts = _INTEGER.split(name, _MOST_NUMBERS)
        groups.setdefault((tuple(parts[::2]), kind), []).append(tuple(parts[1::2]))
    return [
        (
            _joined(texts, [values[0] if len(values) == 1 else f"{{{ranges_text(values)}}}" for values in box]),
            kind,
            [_joined(texts, point) for point in product(*box)],
        )
        for (texts, kind), numbers in groups.items()
        for box in _boxes(numbers)
    ]


def _joined(texts: Sequence[str], between: Sequence[str]) -> str:
    return "".join(a + b for a, b in zip(texts, [*between, ""], strict=True))


def _boxes(numbers: Sequence[tuple[str, ...]]) -> list[tuple[tuple[str, ...], ...]]:
    """Join points of a lattice into boxes, axis after axis from the last; each point is in exactly one."""
    boxes: list[tuple[tuple[str, ...], ...]] = [tuple((number,) for number in point) for point in numbers]
    for axis in reversed(range(len(numbers[0]))):
        joined: dict[tuple[tuple[str, ...], ...], list[str]] = {}
        for box in boxes:
            joined.setdefault((*box[:axis], *box[axis + 1 :]), []).extend(box[axis])
        boxes = [
            (*rest[:axis], tuple(sorted(values, key=lambda value: (int(value), value))), *rest[axis:])
            for rest, values in joined.items()
        ]
    return boxes
