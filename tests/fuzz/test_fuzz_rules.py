"""Random rules on random files: what they give is what numpy makes of the whole tensors, and back it is the source."""

from __future__ import annotations

from dataclasses import dataclass
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
from random_rules import VERBS, sample
from written_dcp import read as read_dcp

import reshard
from reshard import Layout, Rules, Selection, Strategy
from reshard.core.layout import strided
from reshard.core.model import reshape
from reshard.core.plan import budget
from reshard.formats.checkpoint2.options import Checkpoint2

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Mapping
    from pathlib import Path
    from random import Random


SHARE = 0.2
SIDES = ("a", "b")
DTYPES = ("float32", "float16", "int8", "float64", "int64", "int32")
STATES = ("adam_m.{}", "optimizer.state.exp_avg.{}", "{}.exp_avg", "moments.{}")

Tensors = dict[str, Any]


@dataclass
class Model:
    """Rules as YAML has them, and whole tensors on both sides."""

    text: str
    sides: tuple[Tensors, Tensors]


def some_model(rng: Random) -> Model:
    """Return random rules, and tensors on either side of them."""
    of_rule = sample(np.random.default_rng(rng.getrandbits(32)), rng.choice(VERBS), dtype=rng.choice(DTYPES))
    sides: tuple[Tensors, Tensors] = (dict(of_rule.parts), dict(of_rule.fused))
    for family in rng.sample(STATES, rng.choice([0, 0, 1, 2])):
        for side, tensors in zip(sides, (of_rule.parts, of_rule.fused), strict=True):
            side.update({family.format(name): array + array for name, array in tensors.items()})
    given: list[dict[str, Any]] = [of_rule.rule]
    if rng.random() < 0.5:
        given.append({"a": "x.{n}.w", "b": "y.{n}.w"})
        for number in rng.sample(range(12), 2):
            for side, name in zip(sides, "xy", strict=True):
                side[f"{name}.{number}.w"] = np.full((2, 3), number, np.float32)
    if rng.random() < 0.3:
        for tensors in sides:
            tensors["global_step"] = np.array([7], np.int32)
    if rng.random() < 0.2:
        side = rng.randrange(2)
        given.append({SIDES[side]: "junk.{n}.*", SIDES[1 - side]: None, "optional": True})
    rng.shuffle(given)
    return Model(yaml.safe_dump({"reshard-rules": 1, "sides": [*SIDES], "rules": given}, sort_keys=False), sides)


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
        zarr_files = {"compression": "zstd"} if kind == "zarr" and rng.random() < 0.4 else {}
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
    cut = strategy if kind == "ranks" else None
    same = reshard.verify(root, target_strategy=cut, against=opened, selection=selection)
    require(same.equal, f"{kind}: verify finds a difference: {same.differences}")
    return reshard.open(root, strategy=cut, contents=False)  # blocks may be equal by chance


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
