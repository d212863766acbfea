"""Random rules on random files: what they give is what numpy makes of the whole tensors, and back it is the source."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING, Any

import helpers
import numpy as np
import pytest
import yaml
import zarr
from checkpoints import blocks, dtype_name, plan_with, write_file, write_ranks
from dcp_files import write_hyper
from fuzzing import SECONDS, Fuzzer, require
from written_dcp import read as read_dcp

import reshard
from reshard import Layout, Rules, Selection, Strategy
from reshard.core.layout import strided
from reshard.core.model import reshape
from reshard.core.plan import budget
from reshard.formats.checkpoint2.options import Checkpoint2
from reshard.formats.zarr.layout import ZarrGroup

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Mapping
    from pathlib import Path
    from random import Random

    from helpers import Array

SHARE = 0.2
SIDES = ("one", "two")
DTYPES = ("float32", "uint16", "float16", "int8", "bool", "float64", "int64", "int32", "uint8")  # uint16: bfloat16
VERBS = ("rename", "stack", "transpose", "tie", "concat", "concat", "interleave", "interleave", "halves", "pad")
STATES = ("adam_m.{}", "optimizer.state.exp_avg.{}", "{}.exp_avg", "moments.{}")

Tensors = dict[str, Any]


@dataclass
class Rule:
    """A rule as YAML has it, and the same in numpy.

    Attributes:
        number: makes its names its own.
        verb: how what is made is made.
        counts: how many there are of each number that becomes an axis.
        free: the values of a number that stays one.
        bodies: the shape of each part, before it is turned; all but the cut axis are the same.
        axis: that which is cut.
        groups, sizes: of `interleave`, and of `halves`, whose one size is how many pieces there are.
        padded: rows with padding.
        flat, transposed: as the rule says.
        made: the side that has what is made.
    """

    number: int
    verb: str
    counts: dict[str, int]
    free: list[int]
    bodies: list[tuple[int, ...]]
    axis: int
    groups: int
    sizes: list[int]
    padded: int
    flat: bool
    transposed: bool
    made: int
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def free_word(self) -> str:
        """The number that stays one, as a name has it."""
        return f"{{f{self.number}}}"

    def names(self) -> tuple[list[str], str]:
        """The names of the parts and of what is made, with words."""
        middle = ".".join([*(f"{word}{{{word}}}" for word in self.counts), *([self.free_word] if self.free else [])])
        parts = [f"r{self.number}.part{part}.{middle}.w" for part in range(len(self.bodies))]
        return parts, f"m{self.number}.{f'{self.free_word}.' if self.free else ''}w"

    def fields(self) -> dict[str, Any]:
        """The rule, as a file has it."""
        parts, fused = self.names()
        verb = "interleave" if self.verb == "halves" else self.verb
        plain = self.verb == "rename" and not self.options
        return {
            SIDES[self.made]: fused if plain else {verb: fused, **self.options},
            SIDES[1 - self.made]: parts if len(parts) > 1 else parts[0],
        }

    def join(self, parts: list[Array]) -> Array:
        """Make one of the parts of one set of numbers, by numpy."""
        turned = [part.swapaxes(-1, -2) if self.transposed else part for part in parts]
        axis = self.axis
        if self.verb == "concat":
            return np.concatenate(turned, axis)
        if self.verb == "interleave":
            rows = [
                part.take(range(group * size, (group + 1) * size), axis)
                for group in range(self.groups)
                for part, size in zip(turned, self.sizes, strict=True)
            ]
            return np.concatenate(rows, axis)
        if self.verb == "halves":
            (pieces,), count = self.sizes, turned[0].shape[axis]
            each = count // self.groups // pieces
            order = [
                group * each * pieces + piece * each + row
                for group in range(self.groups)
                for row in range(each)
                for piece in range(pieces)
            ]
            return turned[0].take(order, axis)
        if self.verb == "pad":
            shape = list(turned[0].shape)
            shape[axis] = self.padded - shape[axis]
            return np.concatenate([turned[0], np.zeros(shape, turned[0].dtype)], axis)
        return turned[0]

    def tensors(self, rng: Random, dtype: str) -> tuple[Tensors, Tensors]:
        """Random whole tensors of the parts' side, and what is made of them."""
        parts, fused = self.names()
        all_parts: Tensors = {}
        all_made: Tensors = {}
        for value in self.free or [None]:
            bodies = []
            for index in product(*map(range, self.counts.values())):
                bound = {**dict(zip(self.counts, index, strict=True)), f"f{self.number}": value}
                some = [numbers(rng, dtype, shape) for shape in self.bodies]
                some = some[:1] * len(some) if self.verb == "tie" else some
                all_parts |= {name.format(**bound): array for name, array in zip(parts, some, strict=True)}
                bodies.append(self.join(some))
            if not self.counts:
                whole = bodies[0]
            elif self.flat:
                whole = np.concatenate(bodies)
            else:
                whole = np.stack(bodies).reshape(*self.counts.values(), *bodies[0].shape)
            all_made[fused.format(**{f"f{self.number}": value})] = whole.copy()
        return all_parts, all_made


def numbers(rng: Random, dtype: str, shape: tuple[int, ...]) -> Array:
    """Random bits."""
    kind = np.dtype(dtype)
    raw = rng.randbytes(prod(shape) * kind.itemsize)
    if dtype == "bool":
        raw = bytes(byte & 1 for byte in raw)
    return np.frombuffer(raw, kind).reshape(shape)


def some_rule(rng: Random, number: int, *, said: bool) -> Rule:
    """Return a random rule.

    Args:
        rng: the source of chance.
        number: of the rule.
        said: how many there are of each number that becomes an axis is said.
    """
    verb = rng.choice(VERBS)
    of_rule = [f"a{number}", f"b{number}"]  # a word of two rules has one range
    words = rng.sample(of_rule, rng.choice([0, 0, 1, 1, 2])) or (of_rule[:1] if verb == "stack" else [])
    counts = {} if verb == "tie" else {word: rng.randint(1, 3) for word in words}
    free = sorted(rng.sample(range(12), rng.randint(1, 2))) if rng.random() < 0.4 else []
    transposed = verb == "transpose" or (verb != "tie" and rng.random() < 0.3)
    least = 2 if transposed else 0 if verb in {"rename", "stack", "tie"} else 1
    body = [rng.choice([1, 2, 3, 4, 5]) for _ in range(max(least, rng.choice([0, 1, 2, 2, 2, 3])))]
    flat = bool(counts) and bool(body) and rng.random() < 0.3
    axis = rng.randrange(len(body)) if body else 0
    options: dict[str, Any] = {}
    groups, sizes, padded = 1, [0], 0
    rows = [body[axis]] if body else []
    if verb == "concat":  # of more than two parts, sizes are to be said where it is cut
        sizes = [rng.randint(1, 4) for _ in range(rng.randint(2, 3))]
        if rng.random() < 0.4:
            sizes = sizes[:1] * len(sizes)
        rows = sizes
        if len(set(sizes)) > 1 or len(sizes) > 2 or rng.random() < 0.5:
            options["sizes"] = [f"n{number} - n{number} + {size}" if rng.random() < 0.3 else size for size in sizes]
    elif verb == "interleave":
        groups = rng.randint(1, 4)
        kind = rng.choice(["rows", "equal", "sizes", "both"])
        size = 1 if kind == "rows" else rng.randint(1, 4)
        sizes = [size if kind in {"rows", "equal"} else rng.randint(1, 4) for _ in range(rng.randint(2, 3))]
        if kind in {"equal", "both"}:
            options["groups"] = groups
        if kind in {"sizes", "both"} or (kind == "equal" and len(sizes) > 2):
            options["sizes"] = sizes
        rows = [groups * size for size in sizes]
    elif verb == "halves":
        groups, sizes = rng.randint(1, 3), [rng.randint(2, 3)]
        rows = [groups * sizes[0] * rng.randint(1, 3)]
        options |= {"groups": groups, "halves": sizes[0]}
    elif verb == "pad":
        multiple = rng.randint(1, 4)
        padded = -(-rows[0] // multiple) * multiple
        options |= {"size": rows[0], **({"to": padded} if rng.random() < 0.5 else {"multiple": multiple})}
    elif verb == "tie":
        rows = rows * rng.randint(2, 3) if rows else rows
    if verb in {"concat", "interleave", "halves", "pad"} and (axis or rng.random() < 0.3):
        options["axis"] = axis if rng.random() < 0.7 else axis - len(body)
    if counts:
        every = said or flat
        options["by"] = dict(counts) if every else list(counts) if len(counts) > 1 else next(iter(counts))
    if flat:
        options["flat"] = True
    if transposed and verb != "transpose":
        options["transposed"] = True
    shapes = []
    for count in rows or [0] * (rng.randint(2, 3) if verb == "tie" else 1):
        shape = [*body]
        if shape:
            shape[axis] = count
        if transposed:
            shape[-2:] = shape[:-3:-1]
        shapes.append(tuple(shape))
    return Rule(
        number, verb, counts, free, shapes, axis, groups, sizes, padded, flat, transposed, rng.randrange(2), options
    )


@dataclass
class Model:
    """Whole tensors on both sides."""

    text: str
    sides: tuple[Tensors, Tensors]


def some_model(rng: Random) -> Model:
    """Return random rules, and tensors on either side of them."""
    steps = rng.random() < 0.3
    rules = [some_rule(rng, number, said=steps) for number in range(rng.randint(1, 4))]
    families = ["{}", *rng.sample(STATES, rng.choice([0, 0, 1, 2]))]
    sides: tuple[Tensors, Tensors] = ({}, {})
    for rule in rules:
        for family in families:
            dtype = rng.choice(DTYPES)
            found = rule.tensors(rng, dtype)
            for side, some in zip((1 - rule.made, rule.made), found, strict=True):
                sides[side].update({family.format(name): array for name, array in some.items()})
        if steps:
            step = numbers(rng, "float32", ())
            for side, some in zip((1 - rule.made, rule.made), found, strict=True):
                sides[side].update({f"{name}.step": step for name in some})
    if rng.random() < 0.3:
        for tensors in sides:
            tensors["global_step"] = np.array([7], np.int32)
    given = [rule.fields() for rule in rules]
    if rng.random() < 0.2:
        side = rng.randrange(2)
        given.append({SIDES[side]: "junk.{n}.*", SIDES[1 - side]: None, "optional": True})
    rng.shuffle(given)
    content = {"reshard-rules": 1, "sides": [*SIDES], "let": {f"n{rule.number}": 5 for rule in rules}, "rules": given}
    return Model(yaml.safe_dump(content, sort_keys=False), sides)


# --- files ---------------------------------------------------------------------------------------------------------


def some_strategy(rng: Random, tensors: Tensors) -> Strategy:
    """Return random layouts on two to eight ranks: rows, columns, both, replicas."""
    matrix = rng.choice([[2], [4], [2, 2], [3], [2, 3], [2, 2, 2]])
    stages = rng.choice([1, 1, 2])
    layouts: dict[str, Any] = {}
    for name, array in tensors.items():
        entries = [-1] * array.ndim
        for axis in rng.sample(range(len(matrix)), len(matrix)):
            fits = [n for n in range(array.ndim) if entries[n] == -1 and array.shape[n] % matrix[-1 - axis] == 0]
            if fits and rng.random() < 0.7:
                entries[rng.choice(fits)] = axis
        layouts[name] = Layout.of(matrix, entries)
        if stages > 1:
            layouts[name] = dict.fromkeys(rng.sample(range(stages), rng.choice([1, 1, 2])), layouts[name])
    if stages > 1 and {stage for placed in layouts.values() for stage in placed} != {0, 1}:
        return some_strategy(rng, tensors)
    return Strategy.of(layouts)


def some_boxes(rng: Random, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return boxes that cut a tensor anyhow, as offsets and extents."""
    edges = []
    for extent in shape:
        inner = rng.sample(range(1, extent), min(extent - 1, rng.choice([0, 0, 1, 2]))) if extent > 1 else []
        edges.append([*pairwise([0, *sorted(inner), extent])])
    return [(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in product(*edges)]


def write_source(rng: Random, root: Path, tensors: Tensors, counts: Counter[str]) -> tuple[Path, Strategy | None]:
    """Write whole tensors into files of a random kind."""
    kind = rng.choice(["file", "ranks", "boxes", "boxes"])
    counts[f"source: {kind}"] += 1
    format = rng.choice(["safetensors", "ckpt"])
    if kind == "file":
        return write_file(root / f"whole.{format}", tensors, format), None
    if kind == "ranks":
        strategy = some_strategy(rng, tensors)
        return write_ranks(root, tensors, strategy, format), strategy
    boxes: dict[int, dict[str, Any]] = {rank: {} for rank in range(rng.randint(1, 4))}
    for name, array in tensors.items():
        for box in some_boxes(rng, array.shape):
            boxes[rng.randrange(len(boxes))].setdefault(name, []).append(box)
    return write_hyper(root, tensors, boxes), None


def read_target(root: Path, kind: str) -> Tensors:
    """Return the whole tensors that were written, by code of its own where there is some."""
    if kind == "dcp":
        read = read_dcp(root)
        shapes = {name: tensor.shape for name, tensor in read.tensors.items()}
        return {
            name: np.ndarray(shapes[name], f"V{array.nbytes // prod(shapes[name])}", array.tobytes())
            for name, array in read.whole().items()
        }
    if kind == "zarr":
        group = zarr.open_group(root, mode="r")
        return {name: np.asarray(reshard.open(root)[name]) for name, _ in group.arrays()}
    if kind == "checkpoint2":
        return {name: np.asarray(array) for name, array in reshard.open(root).items()}
    found = {}
    for path in sorted(root.rglob("*.safetensors")) + sorted(root.rglob("*.ckpt")):
        for name, (_, shape, content) in helpers.read_rank_file(path).items():
            found[name] = np.ndarray(shape, f"V{len(content) // prod(shape)}", content)
    return found


def assert_equal(found: Mapping[str, Any], expected: Tensors, what: str) -> None:
    require(set(found) == set(expected), f"{what}: other names: {sorted(set(found) ^ set(expected))}")
    for name, array in expected.items():
        one = np.asarray(found[name])
        require(one.shape == array.shape, f"{what}: {name} is of {one.shape}; expected {array.shape}")
        require(one.tobytes() == array.tobytes(), f"{what}: {name} of {array.shape} differs")


def convert(
    rng: Random, root: Path, opened: reshard.Checkpoint, rules: Rules, expected: Tensors, counts: Counter[str]
) -> reshard.Checkpoint:
    """Convert into files of a random kind, look at them, and return them as a checkpoint."""
    derived = opened.derive(rules)
    assert_equal(derived, expected, "lazy arrays")
    name = rng.choice(sorted(expected))
    places = tuple(slice(rng.randint(0, extent), rng.randint(0, extent)) for extent in expected[name].shape)
    part = np.asarray(derived[name][places])
    require(part.tobytes() == expected[name][places].tobytes(), f"{name}[{places}] differs")
    kind = rng.choice(["file", "set", "ranks", "ranks", "dcp", "zarr", "checkpoint2"])
    counts[f"target: {kind}"] += 1
    selection = Selection(rules=rules)
    strategy = some_strategy(rng, expected) if kind in {"ranks", "checkpoint2"} or rng.random() < 0.3 else None
    memory = {"memory": 300_000_000} if rng.random() < 0.3 else {}
    if kind == "set":
        plan = reshard.plan(opened, to="hf", selection=selection, **memory)
    elif kind == "checkpoint2":
        files = Checkpoint2(step=1)
        plan = plan_with(opened, strategy, files=files, format="safetensors", selection=selection, **memory)
    elif kind in {"dcp", "zarr"}:
        strategy = strategy if kind == "dcp" else None
        zarr_files = {"files": ZarrGroup(compression="zstd")} if kind == "zarr" and rng.random() < 0.4 else {}
        plan = reshard.plan(opened, strategy, to=kind, selection=selection, **memory, **zarr_files)
    else:
        strategy = strategy if kind == "ranks" else None
        format = rng.choice(["safetensors", "ckpt"])
        plan = reshard.plan(opened, strategy, to=format, selection=selection, **memory)
    if rng.random() < 0.3:
        plan.save(root.with_suffix(".json"))
        plan = reshard.read_plan(root.with_suffix(".json"))
    plan.run(root, fsync=False, partition="file" if kind != "zarr" and rng.random() < 0.3 else None)
    if kind == "ranks" and strategy:
        for rank in strategy.ranks:
            (path,) = (root / f"rank_{rank}").iterdir()
            of_rank = blocks(expected, strategy, rank)
            held = {key: (dtype_name(one), one.shape, one.tobytes()) for key, one in of_rank.items()}
            require(helpers.read_rank_file(path) == held, f"rank {rank} has something else")
    else:
        assert_equal(read_target(root, kind), expected, kind)
    require(reshard.verify(root).equal, f"{kind}: verify finds a difference with what it was made from")
    against = {"strategy": strategy} if kind == "ranks" else {}
    same = reshard.verify(root, against=opened, selection=selection, **against)
    require(same.equal, f"{kind}: verify finds a difference: {same.differences}")
    return reshard.open(root, **against, contents=False)  # blocks may be equal by chance


def one_case(rng: Random, root: Path, counts: Counter[str]) -> None:
    """Convert a model forth and back."""
    model = some_model(rng)
    (root / "rules.yaml").write_text(model.text)
    side = rng.randrange(2)
    rules = Rules.read(root / "rules.yaml", source=SIDES[side] if rng.random() < 0.2 else "")
    with pytest.MonkeyPatch.context() as patch:
        if rng.random() < 0.5:
            patch.setattr(budget, "BAND_BYTES", rng.choice([64, 256, 1000]))
            patch.setattr(budget, "TASK_BYTES", rng.choice([128, 512, 4000]))
        if rng.random() < 0.5:
            patch.setattr(reshape, "_MOST_RUNS", rng.choice([1, 2, 5]))
        if rng.random() < 0.5:
            patch.setattr(strided, "GAP", rng.choice([0, 4, 40]))
            patch.setattr(strided, "SCRATCH", rng.choice([16, 64, 200]))
        path, strategy = write_source(rng, root / "source", model.sides[side], counts)
        opened = reshard.open(path, strategy=strategy, contents=False)
        try:
            target = convert(rng, root / "target", opened, rules, model.sides[1 - side], counts)
            back = Rules.read(root / "rules.yaml") if rules.source else rules
            convert(rng, root / "back", target, back, model.sides[side], counts)
        except Exception as error:
            error.add_note(model.text)
            raise


@pytest.mark.slow
@pytest.mark.timeout(10 * SECONDS * SHARE + 600)
def test_fuzz_rules() -> None:
    Fuzzer("rules", SHARE, 60).run(one_case)
