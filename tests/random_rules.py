"""Random rules of every verb, and what numpy makes of random parts by docs/reference/rules.md."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reshard import Rules

if TYPE_CHECKING:
    from helpers import Array

VERBS = ("rename", "concat", "interleave", "stack", "transpose", "pad", "tie")
WORDS = ("l", "e")


class Sample(NamedTuple):
    """A rule, and equal tensors on both of its sides: `parts` on side a, `fused` on side b."""

    rule: dict[str, Any]
    parts: dict[str, Array]
    fused: dict[str, Array]

    @property
    def rules(self) -> Rules:
        return Rules.of({"reshard-rules": 1, "sides": ["a", "b"], "rules": [self.rule]})


def body(verb: str, options: dict[str, Any], parts: list[Array]) -> Array:
    """The tensor that a verb makes of the parts at one index of the words in `by`."""
    first, axis = parts[0], options.get("axis", 0)
    if verb == "transpose" and ("rows" in options or "columns" in options):
        rows, columns = options.get("rows", first.shape[:1]), options.get("columns", first.shape[1:])
        split = first.reshape(*rows, *columns)
        if halves := options.get("halves"):
            split = first.reshape(*rows[:-1], halves, rows[-1] // halves, *columns)
            split = np.moveaxis(split, len(rows) - 1, len(rows)).reshape(*rows, *columns)
        return np.moveaxis(split, range(len(rows)), range(-len(rows), 0))
    if options.get("transposed") or verb == "transpose":
        parts = [np.swapaxes(part, -1, -2) for part in parts]
        first = parts[0]
    if verb in {"rename", "stack", "transpose", "tie"}:
        return first
    if verb == "concat":
        return np.concatenate(parts, axis)
    moved = [np.moveaxis(part, axis, 0) for part in parts]
    if verb == "pad":
        total = options["to"] if "to" in options else -(-len(moved[0]) // options["multiple"]) * options["multiple"]
        zeros = np.zeros((total - len(moved[0]), *moved[0].shape[1:]), first.dtype)
        return np.moveaxis(np.concatenate([moved[0], zeros]), 0, axis)
    if halves := options.get("halves"):
        rest = moved[0].shape[1:]
        pieces = moved[0].reshape(options["groups"], halves, -1, *rest)
        return np.moveaxis(np.swapaxes(pieces, 1, 2).reshape(-1, *rest), 0, axis)
    groups = options.get("groups", len(moved[0]) // options.get("sizes", [1])[0])
    of_groups = [np.split(part, groups) for part in moved]
    return np.moveaxis(np.concatenate([part[n] for n in range(groups) for part in of_groups]), 0, axis)


def fused(verb: str, options: dict[str, Any], counts: tuple[int, ...], parts: dict[Any, list[Array]]) -> Array:
    """The whole tensor: bodies along the axes of `by`."""
    bodies = [body(verb, options, parts[index]) for index in product(*map(range, counts))]
    if not counts:
        return bodies[0]
    if options.get("flat"):
        return np.concatenate(bodies)
    at = options.get("at", 0)
    stacked = np.stack(bodies).reshape(*counts, *bodies[0].shape)
    return np.moveaxis(stacked, range(len(counts)), range(at, at + len(counts)))


def sample(rng: np.random.Generator, verb: str, *, dims: int = 0, dtype: Any = np.float32) -> Sample:
    """A random rule of a verb, with parts of so many dimensions (0: any)."""
    dims = dims or int(rng.integers(1, 4))
    count = int(rng.integers(2, 4)) if verb in {"concat", "interleave"} else 1
    counts = tuple(int(n) for n in rng.integers(1, 4, int(rng.integers(0, 3))))
    if verb == "tie":
        count, counts = 2, ()
    if verb == "stack" and not counts:
        counts = (3,)
    if verb == "transpose":
        dims = max(dims, 2)
    shape = [int(n) for n in rng.integers(1, 6, dims)]
    options: dict[str, Any] = {}
    if dims > 1 and verb not in {"transpose", "tie"} and rng.random() < 0.4:
        options["transposed"] = True
    shapes = [tuple(shape)] * count
    order = [*range(dims - 2), dims - 1, dims - 2] if options.get("transposed") else [*range(dims)]
    if verb in {"concat", "interleave", "pad"}:
        axis = int(rng.integers(0, dims))
        options["axis"] = axis - dims if rng.random() < 0.3 else axis
        shapes = _cut(rng, verb, options, shapes, order[axis])
    if verb == "transpose" and dims == 2 and rng.random() < 0.6:
        rows, columns = ([int(n) for n in rng.integers(1, 4, 2)] for _ in range(2))
        if rng.random() < 0.5:
            rows[-1], options["halves"] = rows[-1] * 2, 2
        options |= {"rows": rows, "columns": columns} if rng.random() < 0.5 else {"rows": rows}
        shapes = [(prod(rows), prod(options.get("columns", [3])))]
    words = WORDS[: len(counts)]
    if counts:
        options["by"] = dict(zip(words, counts, strict=True))
        choice = rng.random()
        if choice < 0.3:
            options["flat"] = True
        elif choice < 0.6:
            options["at"] = int(rng.integers(0, dims + 1))
    suffix = "".join(f".{{{word}}}" for word in words)
    names = [f"p{number}{suffix}.weight" for number in range(len(shapes))]
    values = {index: [random(rng, each, dtype) for each in shapes] for index in product(*map(range, counts))}
    if verb == "tie":
        values[()] = values[()][:1] * 2
    made = fused(verb, options, counts, values)
    parts = {
        name.format(**dict(zip(words, index, strict=True))): value
        for index, of_index in values.items()
        for name, value in zip(names, of_index, strict=True)
    }
    rule = {"a": names if len(names) > 1 else names[0], "b": {verb: "f.weight", **options}}
    return Sample(rule, parts, {"f.weight": np.ascontiguousarray(made)})


def _cut(
    rng: np.random.Generator, verb: str, options: dict[str, Any], shapes: list[tuple[int, ...]], axis: int
) -> list[tuple[int, ...]]:
    """Set the options that cut an axis, and return the shapes of parts that they fit."""
    sizes = [int(n) for n in rng.integers(1, 4, len(shapes))]
    if verb == "pad":
        rows = shapes[0][axis]
        options["size"] = rows
        options |= {"multiple": 4} if rng.random() < 0.5 else {"to": rows + int(rng.integers(0, 4))}
        return shapes
    if verb == "concat":
        options["sizes"] = sizes
        extents = sizes
    elif rng.random() < 0.4:
        extents = [6] * len(shapes)
    elif rng.random() < 0.5:
        del shapes[1:]
        options |= {"groups": 2, "halves": 3}
        extents = [12]
    else:
        options |= {"groups": 2, "sizes": sizes} if rng.random() < 0.7 else {"sizes": sizes}
        extents = [2 * size for size in sizes]
    return [(*shape[:axis], n, *shape[axis + 1 :]) for shape, n in zip(shapes, extents, strict=True)]


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    """Numbers of four bits, which every computation keeps exact."""
    return (rng.integers(-15, 16, shape) * 2.0 ** rng.integers(-4, 4, shape)).astype(dtype)
