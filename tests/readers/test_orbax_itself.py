"""Checkpoints that Orbax saves now, of other meshes and options than the recorded ones, and databases of TensorStore.

RESHARD_ORBAX_PYTHON=orbax/bin/python pytest -m orbax  (with orbax-checkpoint and jax)
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import assert_equal

import reshard
from reshard.core.storage.places import any_store, as_place
from reshard.formats.orbax.ocdbt import Database
from reshard.formats.zarr.files import StoreFiles

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PYTHON = os.environ.get("RESHARD_ORBAX_PYTHON")

SAVE = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=12"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp, numpy as np, orbax.checkpoint as ocp, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

root = sys.argv[1]
cases = {
    "plain": ((12,), {}, {}),
    "zarr3": ((3, 4), {"use_zarr3": True}, {}),
    "files": ((2, 3, 2), {"use_ocdbt": False}, {}),
    "files_zarr3": ((6, 2), {"use_ocdbt": False, "use_zarr3": True}, {}),
    "bytes": ((4, 3), {"use_compression": False}, {}),
    "bytes_zarr3": ((2, 6), {"use_compression": False, "use_zarr3": True}, {}),
    "bytes_files": ((1, 12), {"use_compression": False, "use_ocdbt": False}, {}),
    "chunks": ((3, 2), {}, {"chunk_byte_size": 700}),
    "chunks_zarr3": ((3, 2), {"use_zarr3": True}, {"chunk_byte_size": 300}),
    "cast": ((4,), {}, {"dtype": np.dtype(jnp.bfloat16)}),
    "cast_zarr3": ((6,), {"use_zarr3": True}, {"dtype": np.dtype("float16")}),
}
sizes = {"chunks": 20000, "bytes": 40960}

def tree(mesh):
    rng = np.random.default_rng(len(mesh.axis_names) + mesh.size)
    axes = mesh.axis_names
    def put(shape, spec, dtype):
        value = rng.standard_normal(shape) * 9
        return jax.device_put(jnp.asarray(value, dtype), NamedSharding(mesh, spec))
    params = {
        "w": put((24, 60), P(axes[0], axes[-1] if len(axes) > 1 else None), jnp.float32),
        "all": put((60, 5), P(axes), jnp.bfloat16),
        "copies": put((37, 3), P(), jnp.float16),
        "layers": [put((4, 12, 60), P(None, axes[0]), jnp.float32), put((13,), P(), jnp.int8)],
        "odd.name": {"a b": put((2, 60), P(None, axes[-1]), jnp.uint32)},
        "zeros": jnp.zeros((120,), jnp.float32),
        "big": put((120, 240), P(axes[0]), jnp.float32),
    }
    optimizer = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
    floats = {"w": params["w"], "big": params["big"]}
    return {"params": params, "opt_state": optimizer.init(floats), "step": 7, "rate": 0.5, "none": None}

def leaves(item, path=()):
    if isinstance(item, dict):
        pairs = item.items()
    elif hasattr(item, "_fields"):
        pairs = zip(item._fields, item)
    elif isinstance(item, (list, tuple)):
        pairs = enumerate(item)
    elif item is None:
        return
    else:
        yield ".".join(map(str, path)), np.asarray(item)
        return
    for key, value in pairs:
        yield from leaves(value, (*path, key))

for name, (shape, options, arguments) in cases.items():
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    mesh = Mesh(devices, tuple("abc"[: len(shape)]))
    saved = tree(mesh)
    handler = ocp.PyTreeCheckpointHandler(**options)
    args = jax.tree.map(lambda _: ocp.SaveArgs(**arguments), saved)
    kinds = {"ocdbt_target_data_file_size": sizes[name]} if name in sizes else {}
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(f"{root}/{name}", args=ocp.args.PyTreeSave(saved, save_args=args, **kinds))
    dtype = arguments.get("dtype")
    full = {}
    for key, value in leaves(saved):
        full[key] = value if dtype is None else np.asarray(jnp.asarray(value).astype(dtype))
    np.savez(f"{root}/{name}.npz", **{k: np.frombuffer(v.tobytes(), np.uint8) for k, v in full.items()})

mesh = Mesh(np.array(jax.devices()[:4]), ("a",))
with ocp.CheckpointManager(f"{root}/run", options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
    for step in (5, 10, 20):
        tree_ = {"w": jax.device_put(jnp.full((8, 6), step, jnp.float32), NamedSharding(mesh, P("a")))}
        manager.save(step, args=ocp.args.Composite(
            state=ocp.args.StandardSave(tree_), ema=ocp.args.StandardSave({"w": tree_["w"] + 1}),
            notes=ocp.args.JsonSave({"a": 1}),
        ))
    manager.wait_until_finished()
"""

TREES = """
import json, sys
import numpy as np, tensorstore as ts
root = sys.argv[1]
rng = np.random.default_rng(0)
for name, compression in (("plain", None), ("zstd", {"id": "zstd", "level": 3})):
    config = {"max_decoded_node_bytes": 500, "max_inline_value_bytes": 40, "compression": compression}
    base = {"driver": "file", "path": f"{root}/{name}/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base, "config": config}).result()
    truth = {}
    for part in range(3):  # versions
        transaction = ts.Transaction()
        for number in range(part, 3000, 2):
            key, value = f"arrays/{number // 100:03d}/chunk.{number}", rng.bytes(int(rng.integers(0, 100)))
            store.with_transaction(transaction)[key.encode()] = value
            truth[key] = value.hex()
        transaction.commit_sync()
    with open(f"{root}/{name}.json", "w") as file:
        json.dump(truth, file)
"""


def run(script: str, root: Path) -> None:
    if not PYTHON:
        pytest.skip("RESHARD_ORBAX_PYTHON names no Python that has Orbax")
    subprocess.run([PYTHON, "-c", script, root], check=True, capture_output=True, timeout=600)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("orbax")
    run(SAVE, root)
    return root


def cases(root: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(root.glob("*.npz")):
        with np.load(path) as arrays:
            yield path.with_suffix(""), {name: arrays[name].tobytes() for name in arrays.files}


@pytest.mark.orbax
@pytest.mark.timeout(900)
def test_what_orbax_saves_now(saved: Path, tmp_path: Path) -> None:
    for root, full in cases(saved):
        source = reshard.open(root)
        assert not source.unreadable
        assert set(source) == set(full), root
        for name in source:
            assert source[name].compute().tobytes() == full[name], (root, name)
        reshard.convert(source, tmp_path / root.name, to="hf")
        target = reshard.open(tmp_path / root.name)
        for name in target:
            assert target[name].compute().tobytes() == full[name], (root, name)


@pytest.mark.orbax
@pytest.mark.timeout(900)
def test_a_run_with_several_items(saved: Path) -> None:
    for step, root in ((10, saved / "run" / "10"), (20, saved / "run")):
        w = np.full((8, 6), step, np.float32)
        assert_equal(reshard.open(root), {"state.w": w, "ema.w": w + 1})


@pytest.mark.orbax
@pytest.mark.timeout(900)
def test_trees_of_tensorstore_with_many_nodes_and_versions(tmp_path: Path) -> None:
    run(TREES, tmp_path)
    for name in ("plain", "zstd"):
        values = Database(StoreFiles(as_place(tmp_path / name))).values
        truth = json.loads((tmp_path / f"{name}.json").read_text())
        assert values.keys() == truth.keys()
        for key, value in values.items():
            content = bytearray(value.nbytes) if value.content is None else bytearray(value.content)
            if value.content is None:
                any_store().read_into(value.path, value.offset, memoryview(content))
            assert content.hex() == truth[key]
