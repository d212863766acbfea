"""Tensors that lie transposed, channels last, expanded or in any other strides in what `torch.save` made of them."""

from __future__ import annotations

import os
import subprocess
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import numbers, write_file
from commands import call, done
from dcp_files import cut, item, write_torch
from saves_files import Storage, dtensor, mesh, shard, tensor, write_rank, write_save

import reshard
from reshard import Layout, Rules, Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from checkpoints import Array
    from dcp_files import Box
    from saves_files import Made

PYTHON = os.environ.get("RESHARD_TORCH_PYTHON", "")

SHAPES = {"turned": (320, 300), "channels": (8, 8, 40, 40), "permuted": (60, 50, 40), "step": (400, 250), "b": (5,)}
FULL = numbers(SHAPES) | {"rows": np.repeat(numbers({"rows": (70_000, 1)})["rows"], 2, axis=1)}
HALVES = Strategy.of({name: Layout.of([2], [-1 if name == "b" else 0, *[-1] * (FULL[name].ndim - 1)]) for name in FULL})


def lying(array: Array, order: Sequence[int]) -> dict[str, Any]:
    """An array whose axes lie in another order: its storage and strides."""
    storage = np.ascontiguousarray(array.transpose(order))
    steps = {axis: prod(storage.shape[place + 1 :]) for place, axis in enumerate(order)}
    return {"storage": storage.reshape(-1), "strides": tuple(steps[axis] for axis in range(array.ndim))}


def kept(name: str, array: Array) -> dict[str, Any]:
    """How a tensor of this name lies, or a part of it."""
    if name == "rows":
        return {"storage": np.ascontiguousarray(array[:, 0]), "strides": (1, 0)}
    if name == "step":
        storage = np.full((len(array), 2 * array.shape[1]), 7, array.dtype)
        storage[:, 1::2] = array
        return {"storage": storage.reshape(-1), "strides": (storage.shape[1], 2), "first": 1}
    orders = {"turned": (1, 0), "channels": (0, 2, 3, 1), "permuted": (2, 0, 1)}
    return lying(array, orders[name]) if name in orders else {}


def saved(name: str, array: Array) -> Made:
    some = kept(name, array)
    return tensor(array, **some | {"storage": Storage(some["storage"])}) if some else tensor(array)


def write_dcp(root: Path, full: Mapping[str, Array] = FULL) -> Path:
    """Write a DCP of two ranks, of which each has half of the rows, that lie in strides."""
    items: dict[int, list[tuple[str, Box, bytes]]] = {0: [], 1: []}
    for name, array in full.items():
        half = -(-len(array) // 2)
        for rank, begin in enumerate((0, half)):
            box = (begin, *[0] * (array.ndim - 1)), (min(half, len(array) - begin), *array.shape[1:])
            items[rank].append((name, box, item(cut(array, box), **kept(name, cut(array, box)))))
    return write_torch(root, full, items)


def write_saves(root: Path) -> Path:
    """Write files of two ranks: of each tensor but one half of the rows."""
    for rank in range(2):
        halves = {name: FULL[name][rank * len(FULL[name]) // 2 :][: len(FULL[name]) // 2] for name in FULL}
        over = mesh((2,), rank)
        state = {name: dtensor(saved(name, halves[name]), FULL[name].shape, [shard(0)], over) for name in FULL}
        write_rank(root, rank, 2, state | {"b": tensor(FULL["b"])})
    return root


def write_one(root: Path) -> Path:
    return write_save(root / "model.pt", {name: saved(name, array) for name, array in FULL.items()})


KINDS = {"dcp": write_dcp, "saves": write_saves, "save": write_one}


def assert_equal(checkpoint: reshard.Checkpoint, full: Mapping[str, Array] = FULL) -> None:
    assert set(checkpoint) == set(full)
    for name in checkpoint:
        found = checkpoint[name].compute()
        assert (found.shape, found.tobytes()) == (full[name].shape, full[name].tobytes()), name


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_through(tmp_path: Path, kind: str) -> None:
    """As lazy arrays and parts of them, and on other ranks; what is made is compared with its source."""
    root = KINDS[kind](tmp_path / kind)
    source = reshard.open(root)
    assert_equal(source)
    assert not source.unreadable
    assert (source["turned"][7:200:3, 11].compute() == FULL["turned"][7:200:3, 11]).all()
    assert (source["channels"][3, ::2, 5:9].compute() == FULL["channels"][3, ::2, 5:9]).all()
    reshard.plan(source, HALVES, to="dcp").run(tmp_path / "out", fsync=False)
    assert_equal(reshard.open(tmp_path / "out"))
    assert reshard.verify(tmp_path / "out", against=root).equal
    assert reshard.verify(root, against=tmp_path / "out").equal
    done("verify", root)


@pytest.mark.parametrize("kind", ["dcp", "saves"])
def test_an_element_that_is_another_is_named(tmp_path: Path, kind: str) -> None:
    """On either side, and by the sums of the file."""
    root = KINDS[kind](tmp_path / kind)
    reshard.plan(reshard.open(root), to="hf").run(tmp_path / "hf", fsync=False)
    path = min(root.glob("*_*"))
    content = bytearray(path.read_bytes())
    first = FULL["turned"][: len(FULL["turned"]) // 2]
    place = content.find(np.ascontiguousarray(first.T).tobytes()) + 4 * (5 * len(first) + 9)  # of row 9, column 5
    content[place] ^= 1
    path.write_bytes(content)
    for target, source in ((tmp_path / "hf", root), (root, tmp_path / "hf")):
        (one,) = reshard.verify(target, against=source).differences
        assert (one.kind, one.name, one.count, one.index) == ("values", "turned", 1, (9, 5))
    result = call("verify", root)
    assert result.exit_code == 3


def test_transposed_by_rules_it_lies_row_by_row(tmp_path: Path) -> None:
    """Strides compose: two transpositions are none, and parts of what is permuted lie in strides of their own."""
    two = [
        {"a": "turned", "b": {"transpose": "t"}},
        {"a": ["q", "k"], "b": {"concat": "qk", "sizes": [100, 220], "transposed": True, "axis": 1}},
    ]
    some = {"turned": FULL["turned"], "q": FULL["turned"][:100] + 1, "k": FULL["turned"][100:] + 1}
    items = [
        (name, ((0, 0), array.shape), item(array, **kept("turned", array))) for name, array in some.items()
    ]  # fmt: skip
    source = reshard.open(write_torch(tmp_path / "dcp", some, {0: items}))
    found = source.derive(Rules.of({"reshard-rules": 1, "sides": ["a", "b"], "rules": two}))
    full = {"t": some["turned"].T, "qk": np.concatenate([some["q"].T, some["k"].T], axis=1)}
    assert_equal(found, full)
    (block,) = found.tensors["t"].shards
    assert block.replicas[0].strides == ()
    reshard.plan(found, to="hf").run(tmp_path / "hf", fsync=False)
    assert_equal(reshard.open(tmp_path / "hf"), full)
    assert reshard.verify(tmp_path / "hf", against=found).equal


@pytest.mark.parametrize("changed", [0, 1])
def test_replicas_of_which_one_is_turned(tmp_path: Path, changed: int) -> None:
    """Opening them compares elements; `verify` finds the one that is another."""
    w = FULL["turned"]
    other = w.copy()
    other[300, 7] += changed
    full = {"w": w, "b": FULL["b"]}
    plain, turned = item(w), item(other, **kept("turned", other))
    box = (0, 0), w.shape
    alike = {0: [("w", box, plain), ("b", ((0,), (5,)), item(full["b"]))], 1: [("w", box, turned)]}
    root = write_torch(tmp_path / "dcp", full, alike)
    source = reshard.open(root)
    assert (source._record.opening.looked.copies, source._record.opening.looked.whole) == (1, 0)  # type: ignore[union-attr]
    reshard.plan(source, to="hf").run(tmp_path / "hf", fsync=False)
    columns = Strategy.of({"w": Layout.of([2], [-1, 0]), "b": Layout.of([2], [-1])})  # put together where copies are
    reshard.plan(reshard.open(tmp_path / "hf"), columns, to="dcp").run(tmp_path / "columns", fsync=False)
    others = [reshard.verify(root, against=tmp_path / name) for name in ("hf", "columns")]
    for found in (reshard.verify(root), *others):
        assert [(one.name, one.index, one.rank) for one in found.differences] == [("w", (300, 7), 1)] * changed


def test_ranks_with_values_of_their_own(tmp_path: Path) -> None:
    """What differs between ranks and is of one each, in strides or not, is compared by its elements."""
    states = [np.arange(6, dtype=np.uint8).reshape(2, 3) + 9 * rank for rank in range(2)]
    for rank, state in enumerate(states):
        write_rank(tmp_path / "saves", rank, 2, {"b": tensor(FULL["b"])})
        turned = lying(state, (1, 0))
        rng = tensor(state, storage=Storage(turned["storage"]), strides=turned["strides"])
        write_rank(tmp_path / "saves", rank, 2, {"rng": rng}, "extra_state")
    source = reshard.open(tmp_path / "saves")
    assert source.tensors["extra_state.rng"].varies
    for number, state in enumerate([*states, states[0] + 1]):
        target = write_file(tmp_path / f"{'abc'[number]}.safetensors", {"b": FULL["b"], "extra_state.rng": state})
        assert [one.index for one in reshard.verify(target, against=source).differences] == [(0, 0)] * (number == 2)


OVERLAPPING = {
    "a number": ((1000,), (0,)), "a column": ((2, 200), (3, 0)), "a row": ((300, 7), (0, 1)),
    "far": ((2, 90), (90_000, 0)), "windows": ((98, 3), (1, 1)), "windows apart": ((2, 90, 3), (92, 1, 1)),
}  # fmt: skip


def test_elements_that_are_there_several_times(tmp_path: Path) -> None:
    """Expanded along any axes, and windows that overlap, which span as many elements as they have or more."""
    storage = np.arange(100_000, dtype=np.float32)
    full = {
        name: np.lib.stride_tricks.as_strided(storage, shape, tuple(4 * step for step in strides))
        for name, (shape, strides) in OVERLAPPING.items()
    }
    held = Storage(storage)
    state = {name: tensor(full[name], storage=held, strides=strides) for name, (_, strides) in OVERLAPPING.items()}
    source = reshard.open(write_save(tmp_path / "model.pt", state))
    assert_equal(source, full)
    reshard.plan(source, to="hf").run(tmp_path / "hf", fsync=False)
    assert_equal(reshard.open(tmp_path / "hf"), full)


# --- with PyTorch ---

SAVED = """
import sys
import numpy as np, torch, torch.distributed.checkpoint as dcp

torch.manual_seed(1)
state = {
    "turned": torch.randn(320, 300).t(), "low": torch.randn(320, 300).bfloat16().t(),
    "channels": torch.randn(16, 8, 30, 30).to(memory_format=torch.channels_last),
    "volume": torch.randn(4, 6, 10, 20, 20).to(memory_format=torch.channels_last_3d),
    "permuted": torch.randn(40, 50, 60).permute(2, 0, 1), "expanded": torch.randn(70_000, 1).expand(70_000, 2),
}
dcp.save(state, checkpoint_id=sys.argv[1] + "/dcp")
bits = {name: one.contiguous().reshape(-1).view(torch.uint8).numpy() for name, one in state.items()}
np.savez(sys.argv[1] + "/full.npz", **bits)
"""

LOADED = """
import sys
import numpy as np, torch, torch.distributed.checkpoint as dcp

full = np.load(sys.argv[1] + "/full.npz")
said = dcp.FileSystemReader(sys.argv[2]).read_metadata().state_dict_metadata
state = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in said.items()}
dcp.load(state, checkpoint_id=sys.argv[2])
for name, one in state.items():
    assert one.reshape(-1).view(torch.uint8).numpy().tobytes() == full[name].tobytes(), name
"""


@pytest.mark.torch
@pytest.mark.skipif(not PYTHON, reason="RESHARD_TORCH_PYTHON names no Python that has PyTorch")
def test_what_torch_saves_of_memory_in_any_order(tmp_path: Path) -> None:
    """As DCP; what is made of it is what torch loads. `test_saves_torch` does the same by torch.save."""
    subprocess.run([PYTHON, "-c", SAVED, str(tmp_path)], check=True, timeout=300, capture_output=True)
    full, found = dict(np.load(tmp_path / "full.npz")), reshard.open(tmp_path / "dcp")
    assert set(found) == set(full)
    for name in found:
        assert found[name].compute().tobytes() == full[name].tobytes(), name
    reshard.plan(found, to="dcp").run(tmp_path / "out", fsync=False)
    subprocess.run([PYTHON, "-c", LOADED, str(tmp_path), str(tmp_path / "out")], check=True, timeout=300)
