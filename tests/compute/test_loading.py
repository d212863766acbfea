"""`reshard.load`: arrays in memory, beside numpy and, with PyTorch installed, in its tensors.

RESHARD_TORCH_PYTHON=torch/bin/python pytest -m torch tests/compute/test_loading.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import blocks, numbers, write_ranks
from refusals import refused
from safetensors.numpy import load_file

import reshard
from reshard import Layout, Strategy
from reshard.compute import loading
from reshard.errors import SourceError, UsageError

PYTHON = os.environ.get("RESHARD_TORCH_PYTHON", "")
FULL = numbers({"w": (48, 16), "b": (24,), "c": (12, 8, 2)})
SOURCE = Strategy.of({"w": Layout.of([4], [0, -1]), "b": Layout.of([4], [-1]), "c": Layout.of([4], [-1, 0, -1])})
TARGET = Strategy.of({"w": Layout.of([2], [-1, 0]), "b": Layout.of([2], [0]), "c": Layout.of([2], [0, -1, -1])})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_ranks(tmp_path / "src", FULL, SOURCE)


@pytest.fixture
def source(root: Path) -> reshard.Checkpoint:
    return reshard.open(root, strategy=SOURCE)


@pytest.fixture(params=[64, 8 << 20], ids=["in small parts", "whole"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "PART_BYTES", request.param)


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(
        (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        and found[name].tobytes() == array.tobytes()
        for name, array in expected.items()
    )


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("threads", [1, 3])
def test_whole_tensors_and_those_of_a_rank(source: reshard.Checkpoint, threads: int) -> None:
    assert same(reshard.load(source, threads=threads), FULL)
    for rank in (0, 1):
        assert same(reshard.load(source, TARGET, rank=rank, threads=threads), blocks(FULL, TARGET, rank))


@pytest.mark.usefixtures("parts")
def test_arrays_of_the_caller_are_filled_where_they_are(source: reshard.Checkpoint) -> None:
    """Of any strides and dtypes: numpy's own casts are the truth."""
    large = np.zeros((96, 40), np.float64)
    into = {"w": large[::2, 3:35:2], "b": np.zeros(24, ml_dtypes.bfloat16), "c": np.zeros((2, 8, 12), np.float32).T}
    found = reshard.load(source, into=into)
    assert all(found[name] is into[name] for name in FULL)
    for name, array in into.items():
        assert np.array_equal(array, FULL[name].astype(array.dtype)), name
    assert not large[1::2].any()
    assert not large[:, :3].any()


def test_names_are_changed_and_chosen(source: reshard.Checkpoint, root: Path) -> None:
    found = reshard.load(source, include=["w"], name_map={"w": "model.w"}, cast={"float32": "bfloat16"})
    assert same(found, {"model.w": FULL["w"].astype(ml_dtypes.bfloat16)})
    reshard.write(FULL | {"s": np.array(3, np.int64)}, root.parent / "set", to="hf")
    found = reshard.load(root.parent / "set", exclude=["b", "c"])
    assert same(found, {"w": FULL["w"], "s": np.array(3, np.int64)})


def test_computed_tensors_are_loaded(source: reshard.Checkpoint) -> None:
    more = source.scale("w", factor=2.0).assign({"b": np.ones(24, np.float32)})
    assert same(reshard.load(more), FULL | {"w": FULL["w"] * np.float32(2), "b": np.ones(24, np.float32)})


def test_a_tensor_that_differs_between_ranks_is_the_one_that_a_run_writes(tmp_path: Path) -> None:
    for rank in range(2):
        tensors = {"w": FULL["w"][rank * 24 : rank * 24 + 24], "step": np.array([rank], np.int32)}
        reshard.write(tensors, tmp_path / f"{rank}.safetensors", to="safetensors")
        (tmp_path / "src" / f"rank_{rank}").mkdir(parents=True)
        (tmp_path / f"{rank}.safetensors").rename(tmp_path / "src" / f"rank_{rank}" / "a.safetensors")
    cut = Strategy.of({"w": Layout.of([2], [0, -1])})
    source = reshard.open(tmp_path / "src", strategy=cut, layout={"step": "copy"})
    target = Strategy.of({"w": Layout.of([2], [-1, 0]), "step": Layout.of([2], [-1])})
    reshard.plan(source, target, to="safetensors").run(tmp_path / "out")
    for rank in range(2):
        assert same(
            reshard.load(source, target, rank=rank),
            load_file(tmp_path / f"out/rank_{rank}/checkpoint_{rank}.safetensors"),
        )


def test_names_that_only_one_side_has(source: reshard.Checkpoint) -> None:
    mine = {"w": np.zeros((48, 16), np.float32), "new": np.full(3, 7.0)}
    with pytest.raises(UsageError) as caught:
        reshard.load(source, into=mine)
    assert {"missing-tensor", "no-such-tensor"} <= set(caught.value.codes)
    assert not mine["w"].any()
    assert [*reshard.load(source, into=mine, strict=False)] == ["w"]
    assert np.array_equal(mine["w"], FULL["w"])
    assert (mine["new"] == 7).all()


@pytest.mark.parametrize(
    ("array", "code"),
    [
        (np.zeros((48, 15), np.float32), "wrong-shape"),
        (np.zeros(48 * 16, np.float32), "wrong-shape"),
        (np.zeros((48, 16), "datetime64[s]"), "unknown-dtype"),
        ([[0.0] * 16] * 48, "wrong-type"),
        (np.broadcast_to(np.zeros((1, 16), np.float32), (48, 16)), "bad-array"),
    ],
)
def test_an_array_that_cannot_be_filled(source: reshard.Checkpoint, array: Any, code: str) -> None:
    with refused(UsageError, code, "w"):
        reshard.load(source, into={"w": array}, include=["w"])


def test_a_rank_that_is_not_there(source: reshard.Checkpoint, tmp_path: Path) -> None:
    with refused(UsageError, "no-such-rank", "2"):
        reshard.load(source, TARGET, rank=2)
    with refused(SourceError, "not-found"):
        reshard.load(tmp_path / "nowhere")


SCRIPT = """
import sys
import numpy as np, torch
import reshard
full = np.load(sys.argv[2])
model = torch.nn.Module()
model.w = torch.nn.Parameter(torch.zeros(48, 16, dtype=torch.bfloat16))
model.b = torch.nn.Parameter(torch.zeros(24))
model.register_buffer("c", torch.zeros(2, 8, 12, dtype=torch.float64).permute(2, 1, 0))
reshard.load(sys.argv[1], into=model.state_dict())
for name, tensor in model.state_dict().items():
    assert torch.equal(tensor, torch.from_numpy(full[name]).to(tensor.dtype)), name
try:
    reshard.load(sys.argv[1], into={"w": torch.zeros(48, 16, device="meta")}, include=["w"])
except reshard.UsageError as error:
    print(error.code)
"""


def run_beside(script: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    """Run a script with PyTorch and this package."""
    root = str(Path(reshard.__file__).parents[1])
    path = os.pathsep.join([root, *(each for each in sys.path if each.endswith("site-packages"))])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [PYTHON, "-c", script, *arguments], env=environment, check=False, capture_output=True, text=True
    )


DTENSORS = """
import sys
import numpy as np, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
import reshard
full = {name: torch.from_numpy(array) for name, array in np.load(sys.argv[2]).items()}
LAYOUTS = [
    ((8,), [Shard(0)]), ((8,), [Shard(1)]), ((8,), [Replicate()]), ((2, 4), [Replicate(), Shard(0)]),
    ((2, 4), [Shard(0), Shard(1)]), ((2, 4), [Shard(0), Shard(0)]),
    ((2, 4), [_StridedShard(0, split_factor=4), Shard(0)]), ((2, 4), [Shard(1), _StridedShard(0, split_factor=3)]),
]
count = 0
for rank in range(8):
    dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
    for extents, placements in LAYOUTS:
        mesh = init_device_mesh("cpu", extents)
        parts = {n: distribute_tensor(t.clone(), mesh, placements, src_data_rank=None) for n, t in full.items()}
        expected = {name: part.to_local().clone() for name, part in parts.items()}
        for part in parts.values():
            part.to_local().zero_()
        reshard.load(sys.argv[1], into=parts)
        for name, part in parts.items():
            assert torch.equal(part.to_local(), expected[name]), (rank, placements, name)
            count += part.to_local().numel()
    dist.destroy_process_group()
print(count)
"""


@pytest.mark.torch
@pytest.mark.skipif(not PYTHON, reason="RESHARD_TORCH_PYTHON names no Python that has PyTorch")
def test_the_parts_of_dtensors_are_filled(tmp_path: Path) -> None:
    """Those of FSDP2, with tensor parallelism too, cut by PyTorch itself."""
    full = numbers({"even": (16, 8), "odd": (13, 7), "small": (3, 2), "three": (5, 6, 4)})
    reshard.write(full, tmp_path / "set", to="hf")
    np.savez(tmp_path / "full.npz", **full)
    ran = run_beside(DTENSORS, tmp_path / "set", tmp_path / "full.npz")
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 2 * sum(array.size for array in full.values())


@pytest.mark.torch
@pytest.mark.skipif(not PYTHON, reason="RESHARD_TORCH_PYTHON names no Python that has PyTorch")
def test_a_state_dict_of_pytorch_is_filled(tmp_path: Path) -> None:
    reshard.write(FULL, tmp_path / "set", to="hf")
    np.savez(tmp_path / "full.npz", **FULL)
    ran = run_beside(SCRIPT, tmp_path / "set", tmp_path / "full.npz")
    assert (ran.returncode, ran.stdout.strip()) == (0, "wrong-type"), ran.stderr
