"""With PyTorch installed: it loads the distributed checkpoints that are written here, every bit right.

python -m venv torch && torch/bin/pip install torch==2.13.0 numpy
RESHARD_TORCH_PYTHON=torch/bin/python pytest -m torch
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import numbers, write_file
from written_dcp import every_dtype

import reshard
from reshard import Strategy

if TYPE_CHECKING:
    from pathlib import Path

    from helpers import Array

PYTHON = os.environ.get("RESHARD_TORCH_PYTHON", "")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not PYTHON, reason="RESHARD_TORCH_PYTHON names no Python that has PyTorch"),
]

SAME = """
import sys, numpy as np, torch
import torch.distributed.checkpoint as dcp
expected = np.load(sys.argv[2])

def check(name, tensor):
    found = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    assert found == expected[name].tobytes(), name
"""

PLAIN = (
    SAME
    + """
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(sys.argv[1], sys.argv[1] + "/whole.pt")
whole = torch.load(sys.argv[1] + "/whole.pt", weights_only=True)
texts = {name: value for name, value in whole.items() if isinstance(value, str)}
tensors = {name: value for name, value in whole.items() if name not in texts}
assert tensors.keys() == set(expected), (sorted(tensors), sorted(expected))
loaded = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
dcp.load(loaded, checkpoint_id=sys.argv[1])
for some in (tensors, loaded):
    for name, tensor in some.items():
        check(name, tensor)
print("TEXTS", sorted(texts.items()))
"""
)

MESHES = (
    SAME
    + """
import os
import torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, zeros
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(self.down(torch.relu(self.up(x))))

def load(state):
    dcp.load(state, checkpoint_id=sys.argv[1])
    for name, tensor in state.items():
        check(name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)

def work(rank, world):
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = init_device_mesh("cpu", (4,))
    net = Net()
    fully_shard(net.up, mesh=flat)
    fully_shard(net, mesh=flat)
    load(net.state_dict())
    net = Net()
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    load(net.state_dict())
    for placements in ([Shard(0), Replicate()], [Shard(1), Shard(0)], [Replicate(), Shard(1)]):
        load({name: zeros(*expected[name].shape, device_mesh=mesh, placements=placements)
              for name in ("up.weight", "down.weight")})
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, (4,), nprocs=4)
    print("SAME")
"""
)


LINKED = """
import json, sys, torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

def bits(value):
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return [str(value.dtype), list(value.shape), flat.tolist()]
    return repr(value)

def loaded(root):  # by dcp.load, into what is there by its own name
    known = FileSystemReader(root).read_metadata().state_dict_metadata
    state = {name: None if isinstance(one, BytesStorageMetadata) else torch.full(one.size, 1).to(one.properties.dtype)
             for name, one in known.items()}
    dcp.load(state, checkpoint_id=root)
    return {name: bits(value) for name, value in state.items()}

def nested(root):
    dcp_to_torch_save(root, root + "/../whole.pt")
    return torch.load(root + "/../whole.pt", weights_only=False)

def shape_of(value):
    if isinstance(value, dict):
        return {key: shape_of(one) for key, one in value.items()}
    return [shape_of(one) for one in value] if isinstance(value, list) else bits(value)

names = json.load(open(sys.argv[1]))
target, sources = loaded(sys.argv[2]), [loaded(root) for root in sys.argv[3:]]
source = {name: value for some in sources for name, value in some.items()}
assert target == {new: source[old] for old, new in names.items()}
whole, before = shape_of(nested(sys.argv[2])), [shape_of(nested(root)) for root in sys.argv[3:]]
print(json.dumps([whole, before]))
"""


def torch(script: str, tmp_path: Path, *arguments: str | Path) -> str:
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [PYTHON, str(tmp_path / "script.py"), *map(str, arguments)],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def expected(path: Path, full: dict[str, Array]) -> Path:
    """Bits of the tensors, by their names; shapes are those of the tensors where the dtype is numpy's."""
    kept = {
        name: array if array.dtype.isbuiltin == 1 else np.frombuffer(array.tobytes(), np.uint8)
        for name, array in full.items()
    }
    np.savez(path, **kept)  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize("sharded", [False, True])
def test_every_dtype_is_loaded_whole(sharded: bool, tmp_path: Path) -> None:
    checkpoint, full = every_dtype(tmp_path)
    rules = {"scalar": None, "*": ["shard(0)", "replicate"]}
    shapes = {name: array.shape for name, array in full.items() if array.size}
    strategy = Strategy.from_rules(shapes, {"dp": 2, "tp": 2}, rules) if sharded else None
    reshard.plan(checkpoint, strategy, to="dcp").run(tmp_path / "out")
    assert torch(PLAIN, tmp_path, tmp_path / "out", expected(tmp_path / "full.npz", full)) == "TEXTS []\n"


def test_texts_are_loaded(tmp_path: Path) -> None:
    full = numbers({"w": (4, 3)}) | {"b": np.ones(3, ml_dtypes.bfloat16)}
    file = write_file(tmp_path / "a.ckpt", {**full, "lr": "cosine", "none": ""}, "ckpt")
    reshard.plan(reshard.open(file), to="dcp").run(tmp_path / "out")
    done = torch(PLAIN, tmp_path, tmp_path / "out", expected(tmp_path / "full.npz", full))
    assert done == "TEXTS [('lr', 'cosine'), ('none', '')]\n"


@pytest.mark.parametrize("mesh", [None, {"dp": 3}, {"dp": 2, "tp": 2}], ids=["whole", "rows of 3", "2 x 2"])
def test_fsdp_and_tensor_parallel_meshes(mesh: dict[str, int] | None, tmp_path: Path) -> None:
    """The blocks of the files are others than those that each rank of PyTorch wants, and uneven."""
    shapes = {
        "up.weight": (10, 6), "up.bias": (10,), "down.weight": (6, 10), "down.bias": (6,), "norm.weight": (6,),
        "norm.bias": (6,),
    }  # fmt: skip
    full = numbers(shapes)
    strategy = None
    if mesh:
        rules = {"*.weight": ["shard(0)", *["shard(0)"] * (len(mesh) - 1)]}
        strategy = Strategy.from_rules(shapes, mesh, rules)
    checkpoint = reshard.open(write_file(tmp_path / "a.safetensors", full))
    reshard.plan(checkpoint, strategy, to="dcp").run(tmp_path / "out")
    arguments = (tmp_path / "out", expected(tmp_path / "full.npz", full), tmp_path / "meet")
    assert torch(MESHES, tmp_path, *arguments).endswith("SAME\n")


def renamed(root: Path, source: reshard.Checkpoint, names: dict[str, str], **chosen: Any) -> dict[str, str]:
    """Link, and return the names of all that is linked, old to new."""
    plan = reshard.plan(source, to="dcp", link=True, selection=reshard.Selection(name_map=names, **chosen))
    plan.run(root / "out")
    found = reshard.Selection(name_map=names).renamed([*source._record.all_names], source._record.all_names)
    kept = {old: new for old, new in found.items() if old not in plan.left_out}
    (root / "names.json").write_text(json.dumps(kept))
    return kept


def linked_is_loaded(root: Path, *sources: Path) -> Any:
    """Check that `dcp.load` gives all that the sources have, by the new names; return both, nested."""
    return json.loads(torch(LINKED, root, root / "names.json", root / "out", *sources))


def test_renamed_by_metadata_alone(mindspore_data: Path, tmp_path: Path) -> None:
    root = mindspore_data / "dcp" / "fsdp2_uneven" / "checkpoint"
    names = renamed(tmp_path, reshard.open(root), {"model.layers.*": "model.blocks.*", "lr_scheduler.*": "lr.*"})
    assert len(names) == 40
    new, (old,) = linked_is_loaded(tmp_path, root)
    assert new["model"] == {key.replace("layers", "blocks"): value for key, value in old["model"].items()}
    assert new["optim"]["param_groups"] == old["optim"]["param_groups"]
    state = {key.replace("layers", "blocks"): value for key, value in old["optim"]["state"].items()}
    assert new["optim"]["state"] == state
    assert (new["lr"], new["step"]) == (old["lr_scheduler"], old["step"])


def test_merged_by_metadata_alone(mindspore_data: Path, tmp_path: Path) -> None:
    """Two directories with files of the same names."""
    sources = [mindspore_data / "dcp" / name / "checkpoint" for name in ("fsdp2_tp2d", "files")]
    (tmp_path / "all").mkdir()
    for number, source in enumerate(sources):
        (tmp_path / "all" / f"part{number}").symlink_to(source)
    names = renamed(tmp_path, reshard.open(tmp_path / "all"), {"w0": "w9"})
    assert len(names) == 12
    new, (one, two) = linked_is_loaded(tmp_path, *sources)
    two["w9"] = two.pop("w0")
    assert new == {**one, **two}
