"""With PyTorch installed: what its own DTensors are, of every placement, is read from what it saves, every bit right.

RESHARD_TORCH_PYTHON=torch/bin/python pytest -m torch
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import numpy as np
import pytest

import reshard

if TYPE_CHECKING:
    from pathlib import Path

PYTHON = os.environ.get("RESHARD_TORCH_PYTHON", "")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not PYTHON, reason="RESHARD_TORCH_PYTHON names no Python that has PyTorch"),
]

SAVED = """
import random, sys
import numpy as np, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

WORLD = 8
LAYOUTS = {
    "rows": ((8,), [Shard(0)]), "columns": ((8,), [Shard(1)]), "all": ((8,), [Replicate()]),
    "hsdp": ((2, 4), [Replicate(), Shard(0)]), "both": ((2, 4), [Shard(0), Shard(1)]),
    "same": ((2, 4), [Shard(0), Shard(0)]), "fsdp_tp": ((2, 4), [_StridedShard(0, split_factor=4), Shard(0)]),
    "strided": ((2, 4), [Shard(1), _StridedShard(0, split_factor=3)]),
    "deep": ((2, 2, 2), [_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0)]),
}
SHAPES = {"even": (16, 8), "odd": (13, 7), "small": (3, 2), "three": (5, 6, 4), "empty": (0, 4)}
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]
generator = torch.Generator().manual_seed(0)
full = {}
for layout in LAYOUTS:
    for name, shape in SHAPES.items():
        full[f"{layout}.{name}"] = torch.randn(shape, generator=generator).bfloat16()
rows = torch.arange(96.).reshape(16, 6)
full |= {"turned": rows, "in_a_larger_one": rows, "tied": rows, "of_some": rows, "flat": rows}
plain = {
    str(dtype)[6:]: torch.arange(12 * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(3, 4) for dtype in DTYPES
}
plain["bool"] = torch.arange(12).reshape(3, 4) % 3 == 0
base = torch.arange(60.).reshape(3, 4, 5)
plain |= {
    "transposed": base.transpose(0, 2), "strided": base[:, ::2, 1:4], "expanded": base[0, 0, :3, None].expand(3, 4),
    "channels_last": torch.arange(120.).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "shared": base, "part": base[1:],
    "parameter": torch.nn.Parameter(torch.ones(2, 2)),
}
full |= {f"plain.{name}": tensor.detach() for name, tensor in plain.items()}
full |= {"list.0": torch.ones(3), "list.1.deep": torch.zeros(2)}
for rank in range(WORLD):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    meshes, state = {}, {}
    for layout, (extents, placements) in LAYOUTS.items():
        if extents not in meshes:
            meshes[extents] = init_device_mesh("cpu", extents, mesh_dim_names=tuple("abc"[: len(extents)]))
        mesh = meshes[extents]
        for name in SHAPES:
            whole = local = full[f"{layout}.{name}"]
            for axis, one in enumerate(placements):
                if not isinstance(one, Replicate):
                    parts, _ = one._split_tensor(local, mesh.size(axis), with_padding=False)
                    local = parts[mesh.get_coordinate()[axis]]
            more = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
            state[f"{layout}.{name}"] = DTensor.from_local(local.clone(), mesh, placements, **more)
    more = {"run_check": False, "shape": rows.shape, "stride": rows.stride()}
    own = rows[2 * rank : 2 * rank + 2]
    larger = torch.cat([own, rows])
    state["turned"] = DTensor.from_local(own.t().contiguous().clone().t(), meshes[(8,)], [Shard(0)], **more)
    state["in_a_larger_one"] = state["tied"] = DTensor.from_local(larger[:2], meshes[(8,)], [Shard(0)], **more)
    some = meshes[(2, 4)]["b"]
    state["of_some"] = DTensor.from_local(rows.chunk(4)[some.get_local_rank()].clone(), some, [Shard(0)], **more)
    state["flat"] = DTensor.from_local(own.clone(), meshes[(2, 4)]._flatten("ab"), [Shard(0)], **more)
    state |= {"plain": plain, "list": [torch.ones(3), {"deep": torch.zeros(2)}, 7]}
    torch.save(state, f"{sys.argv[1]}/model_world_size_{WORLD}_rank_{rank}.pt")
    rng = {"cpu": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}
    torch.save({"rng": rng, "lr": 0.1}, f"{sys.argv[1]}/extra_state_world_size_{WORLD}_rank_{rank}.pt")
    torch.save(plain, f"{sys.argv[1]}/plain.pt")
    dist.destroy_process_group()
bits = {name: tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy() for name, tensor in full.items()}
np.savez(f"{sys.argv[1]}/full.npz", **bits)
"""


def test_every_placement_and_every_dtype(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    subprocess.run([PYTHON, "-c", SAVED, str(source)], check=True, timeout=300, capture_output=True)
    full = dict(np.load(source / "full.npz"))
    found = reshard.open(source)
    assert not found.unreadable
    assert set(found) == {*full, "extra_state.rng.cpu"}
    for name, bits in full.items():
        assert found[name].compute().tobytes() == bits.tobytes(), name
    whole = reshard.open(source / "plain.pt")
    assert set(whole) == {name.removeprefix("plain.") for name in full if name.startswith("plain.")}
    for name in whole:
        assert whole[name].compute().tobytes() == full[f"plain.{name}"].tobytes(), name
    reshard.plan(found, to="safetensors").run(tmp_path / "whole", fsync=False)
    assert reshard.verify(tmp_path / "whole").equal
