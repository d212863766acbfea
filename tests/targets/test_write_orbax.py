"""Checkpoints of Orbax: the files, and what Orbax itself loads.

RESHARD_ORBAX_PYTHON=orbax/bin/python pytest -m orbax  (with orbax-checkpoint and jax)
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import assert_equal, write_file
from commands import done
from format_files import CODE, SAMPLE, write
from refusals import failed

import reshard
from reshard.errors import UsageError
from reshard.kits.files import by_name

if TYPE_CHECKING:
    from pathlib import Path

PYTHON = os.environ.get("RESHARD_ORBAX_PYTHON", "")

LOAD = """
import sys
import jax, numpy as np, orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
root = sys.argv[1]
def flat(tree):
    return {".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path): np.asarray(leaf)
            for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
whole = ocp.PyTreeCheckpointer().restore(f"{root}/out")
assert isinstance(whole["blocks"], list) and isinstance(whole["by_number"], dict)
np.savez(f"{root}/whole.npz", **{k: v.view(np.uint8) if v.shape else v for k, v in flat(whole).items()})
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
sharding = NamedSharding(mesh, P("a", "b"))
template = {"params": {"w": jax.ShapeDtypeStruct((8, 6), np.float32, sharding=sharding)}}
args = ocp.checkpoint_utils.construct_restore_args(template)
got = ocp.PyTreeCheckpointer().restore(
    f"{root}/out", args=ocp.args.PyTreeRestore(template, restore_args=args, partial_restore=True)
)
assert got["params"]["w"].sharding == sharding
np.savez(f"{root}/part.npz", w=np.asarray(got["params"]["w"]))
with ocp.CheckpointManager(f"{root}/run") as manager:
    assert manager.latest_step() == 7
    assert flat(manager.restore(7, args=ocp.args.PyTreeRestore())).keys() == flat(whole).keys()
"""


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return {
        "params.w": rng.standard_normal((8, 6)).astype(np.float32),
        "params.half": rng.standard_normal((5, 3)).astype(ml_dtypes.bfloat16),
        "params.eighth": rng.standard_normal((16,)).astype(ml_dtypes.float8_e4m3fn),
        "blocks.0.b": np.arange(7, dtype=np.int32), "blocks.1.b": np.zeros(7, np.int32),
        "by_number.1.b": np.array([True, False]), "step": np.array(3, np.int64),
    }  # fmt: skip


@pytest.fixture
def written(tmp_path: Path) -> dict[str, np.ndarray[Any, Any]]:
    full = arrays()
    reshard.write(full, tmp_path / "in", format="safetensors")
    done("convert", tmp_path / "in", tmp_path / "out", "--to", "orbax")
    return full


def test_texts_and_int4_come_back(tmp_path: Path) -> None:
    """Orbax has neither: a text is in the notes of the group, and int4 are stored as int8."""
    (tmp_path / "a.ckpt").write_bytes(write(by_name("ckpt"), {**SAMPLE, **CODE}))
    done("convert", tmp_path / "a.ckpt", tmp_path / "out", "--to", "orbax")
    own = reshard.open(tmp_path / "out")
    assert own.format == "orbax"
    assert own.tensors["code"].text == "aé中😀"
    assert str(own.tensors["quant"].spec.dtype) == "int4"
    assert own["quant"].compute().tobytes() == SAMPLE["quant"][2]
    done("verify", tmp_path / "out")


def test_the_store_is_an_item_of_orbax(tmp_path: Path, written: dict[str, np.ndarray[Any, Any]]) -> None:
    root = tmp_path / "out"
    assert reshard.open(root).format == "orbax"
    assert_equal(reshard.open(root), written)
    (root / "zarr.json").unlink()  # which Orbax does not write
    assert_equal(reshard.open(root), written)
    metadata = json.loads((root / "_METADATA").read_text())
    paths = {ast.literal_eval(text): node for text, node in metadata["tree_metadata"].items()}
    assert {".".join(path) for path in paths} == written.keys()
    assert [each["key_type"] for each in paths["blocks", "1", "b"]["key_metadata"]] == [2, 1, 2]
    assert [each["key_type"] for each in paths["by_number", "1", "b"]["key_metadata"]] == [2, 2, 2]
    assert json.loads((root / "params.half" / "zarr.json").read_text())["data_type"] == "bfloat16"


def test_compressed_and_sharded(tmp_path: Path, written: dict[str, np.ndarray[Any, Any]]) -> None:
    options = ("--to", "orbax", "--compression", "zstd:3", "--chunk-size", "40B", "--shard-size", "200B")
    done("convert", tmp_path / "in", tmp_path / "small", *options)
    (tmp_path / "small" / "zarr.json").unlink()
    assert_equal(reshard.open(tmp_path / "small"), written)


def test_names_that_make_no_tree(tmp_path: Path) -> None:
    source = reshard.write({"a": np.zeros(2), "a.b": np.zeros(2)}, tmp_path / "in", format="safetensors")
    with pytest.raises(UsageError) as caught:
        reshard.plan(reshard.open(tmp_path / "in"), format="orbax")
    assert caught.value.code == "colliding-names"
    reshard.write({"mlp/~/linear.w": np.zeros(2)}, tmp_path / "haiku", format="safetensors")
    with pytest.raises(UsageError) as caught:
        reshard.plan(reshard.open(tmp_path / "haiku"), format="orbax")
    assert caught.value.code == "bad-name"
    failed(2, "option-of-another-format", "convert", tmp_path / "in", tmp_path / "out", "--to", "orbax", "--ranks", "1")
    assert source


@pytest.mark.orbax
@pytest.mark.timeout(600)
def test_orbax_loads_it(tmp_path: Path, written: dict[str, np.ndarray[Any, Any]]) -> None:
    if not PYTHON:
        pytest.skip("RESHARD_ORBAX_PYTHON names no Python that has Orbax")
    shutil.copytree(tmp_path / "out", tmp_path / "run" / "7" / "default")
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    subprocess.run([PYTHON, "-c", LOAD, tmp_path], check=True, capture_output=True, timeout=500, env=environment)
    with np.load(tmp_path / "whole.npz") as whole:
        assert set(whole.files) == written.keys()
        assert all(whole[name].tobytes() == array.tobytes() for name, array in written.items())
    with np.load(tmp_path / "part.npz") as part:
        assert part["w"].tobytes() == written["params.w"].tobytes()


def test_no_manifest_is_written(tmp_path: Path) -> None:
    source = write_file(tmp_path / "one.safetensors", {"w": np.ones(4, "f4")})
    command = "convert", source, tmp_path / "out", "--to", "orbax", "--write-manifest", tmp_path / "m.json"
    assert "zarr store" not in failed(2, "no-manifest", *command).stderr
