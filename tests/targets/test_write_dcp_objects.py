"""Objects of a distributed checkpoint, and what Megatron keeps beside, go to another one byte for byte."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import numbers, plan_with
from commands import call, done
from dcp_files import item, saved, write_torch
from refusals import failed, refused
from written_dcp import read

import reshard
from reshard import Selection
from reshard.errors import SourceError, UsageError
from reshard.formats.dcp.names import DCP
from reshard.formats.orbax.options import OrbaxTree
from reshard.kits.torch import carried as module
from reshard.kits.torch.objects import contents

if TYPE_CHECKING:
    from collections.abc import Callable

FULL = numbers({"w": (6, 4), "v": (3,)})
ITEMS = [("w", ((0, 0), (6, 4)), item(FULL["w"])), ("v", ((0,), (3,)), item(FULL["v"]))]
MEGATRON = ("common.pt", "metadata.json")

TORCH = os.environ.get("RESHARD_TORCH_PYTHON", "")
MEGATRON_PYTHON = os.environ.get("RESHARD_MEGATRON_PYTHON", "")


@pytest.fixture
def root(mindspore_data: Path) -> Callable[[str], Path]:
    return lambda name: mindspore_data / "dcp" / name / "checkpoint"


def held(checkpoint: reshard.Checkpoint) -> dict[str, bytes]:
    return dict(contents(checkpoint._record.extras.objects))


def made(tmp_path: Path, *, paths: Any = None, **objects: bytes) -> reshard.Checkpoint:
    named = {name.replace("__", "."): content for name, content in objects.items()}
    return reshard.open(write_torch(tmp_path / "src", FULL, {0: ITEMS}, objects=named, planner_data=paths or {}))


@pytest.mark.parametrize("name", ["fsdp2_uneven", "kinds", "files", "rank_local"])
def test_real_ones_are_carried(root: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    """The bytes of every object, and where all is in the state that was saved."""
    source = reshard.open(root(name))
    assert source._record.extras.objects
    plan = reshard.plan(source, to="dcp")
    assert not plan.dropped
    assert dict(plan._record.memory)["objects"] == sum(map(len, held(source).values()))
    plan.run(tmp_path / "out", fsync=False)
    found, written = reshard.open(tmp_path / "out"), read(tmp_path / "out")
    assert held(found) == held(source)
    assert found._record.extras.paths == source._record.extras.paths
    assert reshard.verify(tmp_path / "out", against=root(name)).equal
    assert written.objects.keys() == source._record.extras.objects.keys()
    assert written.planner_data.keys() == set(source._record.all_names)
    if name == "fsdp2_uneven":
        assert written.objects["optim.param_groups.0.lr"] == 0.001
        assert written.planner_data["optim.state.emb.weight.step"] == ("optim", "state", "emb.weight", "step")
        assert written.planner_data["optim.param_groups.0.lr"] == ("optim", "param_groups", 0, "lr")


def test_paths_follow_new_names(root: Callable[[str], Path], tmp_path: Path) -> None:
    """Of tensors, their states and objects; what is a list of names has the old ones, which is said."""
    source = reshard.open(root("fsdp2_uneven"))
    names = {
        "model.layers.*": "model.blocks.*",
        "optim.state.layers.*": "optim.state.blocks.*",
        "lr_scheduler.*": "lr.*",
    }
    plan = reshard.plan(source, to="dcp", selection=Selection(name_map=names))
    (warning,) = plan.warnings
    assert warning.startswith("optim.param_groups.0.params: carried as it is, with the names that parameters had")
    plan.run(tmp_path / "out", fsync=False)
    found = read(tmp_path / "out")
    assert found.planner_data["model.blocks.0.up.bias"] == ("model", "blocks.0.up.bias")
    assert found.planner_data["optim.state.blocks.0.up.bias.step"] == ("optim", "state", "blocks.0.up.bias", "step")
    assert found.planner_data["lr.last_epoch"] == ("lr", "last_epoch")
    assert found.planner_data["model.emb.weight"] == ("model", "emb.weight")
    assert (found.objects["lr.last_epoch"], found.objects["step"]) == (7, 7)
    assert reshard.verify(tmp_path / "out").equal
    for selection in (Selection(exclude=("model.emb.*",)), Selection(exclude=("optim.state.*",))):
        assert warning in reshard.plan(source, to="dcp", selection=selection).warnings
    assert not reshard.plan(source, to="dcp").warnings
    assert not reshard.plan(source, to="dcp", selection=Selection(include=("model.*", "step"))).warnings


def test_names_that_cannot_be_nested(tmp_path: Path) -> None:
    """A list has places alone."""
    source = made(tmp_path, paths={"w": ("w",), "a.0": ("a", 0), "a.1": ("a", 1)}, a__0=saved(1), a__1=saved(2))
    with refused(SourceError, "conflicting-names"):
        reshard.plan(source, to="dcp", selection=Selection(name_map={"a.0": "a.b"}))
    reshard.plan(source, to="dcp", selection=Selection(name_map={"a.*": "b.*"})).run(tmp_path / "out")
    paths = reshard.open(tmp_path / "out")._record.extras.paths
    assert paths == {"w": ("w",), "v": ("v",), "b.0": ("b", 0), "b.1": ("b", 1)}


def test_what_is_chosen_is_carried(root: Callable[[str], Path], tmp_path: Path) -> None:
    source, group = reshard.open(root("fsdp2_uneven")), "optim.param_groups.0."
    for number, (selection, carried) in enumerate((
        (Selection(include=("model.*", f"{group}*"), exclude=(f"{group}params",)), 11),
        (Selection(weights_only=True), 0),
        (Selection(include=("model.*", "step")), 1),
    )):  # fmt: skip
        reshard.plan(source, to="dcp", selection=selection).run(tmp_path / f"{number}")
        assert len(reshard.open(tmp_path / f"{number}")._record.extras.objects) == carried
        assert reshard.verify(tmp_path / f"{number}").equal
    assert len(reshard.plan(source, to="hf").dropped) == 15
    assert set(MEGATRON) < set(plan_with(reshard.open(root("mcore_tp2_pp2")), files=OrbaxTree()).dropped)


def test_a_name_twice(tmp_path: Path) -> None:
    source = made(tmp_path, o=saved(1))
    with refused(UsageError, "duplicate-name", "'v'"):
        reshard.plan(source, to="dcp", selection=Selection(name_map={"o": "v"}))
    with refused(UsageError, "no-tensors"):
        reshard.plan(source, to="dcp", selection=Selection(include=("o",)))


def test_damaged_ones_are_not_carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = saved("word").replace(b"word", b"Word", 1)
    source = made(tmp_path, good=saved(1), o=content)
    failed(
        4, "wrong-checksum", "convert", source.root, tmp_path / "out", "--to", "dcp",
        places=("object 'o'", "archive/data.pkl", "--exclude o"),
    )  # fmt: skip
    done("convert", source.root, tmp_path / "out", "--to", "dcp", "--exclude", "o")
    assert set(reshard.open(tmp_path / "out")._record.extras.objects) == {"good"}
    monkeypatch.setattr(module, "LARGEST", len(content))
    with refused(SourceError, "too-large", "objects", "exclude="):
        reshard.plan(source, to="dcp")


def test_those_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    write_torch(tmp_path / "src", FULL, {0: ITEMS}, objects={"o": saved(1)}, coded=["stream.zstd/1"])
    plan = reshard.plan(reshard.open(tmp_path / "src"), to="dcp")
    assert plan.dropped == ("o",)
    plan.run(tmp_path / "out")
    found = reshard.verify(tmp_path / "out")
    assert found.equal
    assert found.dropped == ("o",)


def test_objects_that_differ_are_found(tmp_path: Path) -> None:
    source = made(tmp_path, a=saved("one"), b=saved("two"))
    reshard.plan(source, to="dcp").run(tmp_path / "out")
    others = {"a": saved("one"), "b": saved("TWO")}
    write_torch(tmp_path / "changed", FULL, {0: ITEMS}, objects=others)
    write_torch(tmp_path / "fewer", FULL, {0: ITEMS}, objects={"a": saved("one")})
    for target in ("changed", "fewer"):
        (one,) = reshard.verify(tmp_path / target, against=tmp_path / "out").differences
        assert (one.kind, one.name) == ("object", "b")
        assert call("verify", tmp_path / target, "--against", tmp_path / "out").exit_code == 3


# --- Megatron ---


@pytest.mark.parametrize("name", ["mcore_tp2_pp2", "mcore_layers_apart"])
def test_megatrons_own_are_carried(root: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    """Below the directory of a run, as Megatron looks for them; of the optimizer every bit."""
    source = reshard.open(root(name))
    done("convert", root(name), tmp_path / "run", "--to", "dcp", "--target-step", "5")
    found = reshard.open(tmp_path / "run")
    assert found.root == str(tmp_path / "run" / "iter_0000005")
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "5"
    for beside in MEGATRON:
        assert (Path(found.root) / beside).read_bytes() == (root(name) / beside).read_bytes()
    assert read(Path(found.root)).state["planner_data"] is None
    assert found._record.extras.paths is None
    assert held(found) == held(source)
    full = {key.replace("\\", "/"): value for key, value in np.load(root(name).parent / "full.npz").items()}
    assert set(found) == set(full)
    assert any(key.startswith("optimizer.state.") for key in full)
    for key, value in full.items():
        assert found[key].compute().tobytes() == value.tobytes(), key
    assert reshard.verify(tmp_path / "run").equal
    assert reshard.verify(found.root, against=root(name)).equal
    shown = done("inspect", tmp_path / "run").stdout
    assert "Training: iteration 5, optimizer fully_reshardable" in shown
    path = Path(found.root) / "common.pt"
    path.write_bytes(path.read_bytes()[:-1])
    (one,) = reshard.verify(found.root, against=root(name)).differences
    assert (one.kind, one.name, one.path) == ("object", "common.pt", str(path))


def test_the_step_of_a_run(root: Callable[[str], Path], tmp_path: Path) -> None:
    source = reshard.open(root("mcore_tp2_pp2"))
    run = ("--to", "dcp", "--target-step")
    done("convert", root("mcore_tp2_pp2"), tmp_path, *run, "5")
    other = done("convert", tmp_path, tmp_path, *run, "12")
    assert "says iteration 5, and is carried so to iteration 12" in other.stderr.replace("\n", " ")
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "12"
    failed(6, "is-iteration", "convert", tmp_path, tmp_path / "iter_0000005", *run, "5", places=("iter_0000005",))
    for step in (-1, 10**18):
        with refused(UsageError, "out-of-range", f"step is {step}"):
            DCP(step=step)
    plan = reshard.plan(source, to="dcp", target_step=7)
    assert [file.path for file in plan._record.files if file.publish != "file"] == [
        "iter_0000007/common.pt", "iter_0000007/metadata.json", "iter_0000007/.metadata",
        "latest_checkpointed_iteration.txt",
    ]  # fmt: skip


def test_a_file_of_another_program_is_not_megatrons(tmp_path: Path) -> None:
    """PyTorch's own checkpoint, next to which something is called as Megatron's files are."""
    source = made(tmp_path, paths={"w": ("w",)}, o=saved(1))
    for name in MEGATRON:
        (Path(source.root) / name).write_text("{}")
    found = reshard.open(source.root)
    assert not found._record.extras.beside
    reshard.plan(found, to="dcp").run(tmp_path / "out")
    assert read(tmp_path / "out").planner_data == {"w": ("w",), "v": ("v",), "o": ("o",)}


# --- with PyTorch, and with Megatron ---

EQUAL = """
import sys, torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
found = []
for path in sys.argv[1:3]:
    dcp_to_torch_save(path, sys.argv[3])
    found.append(torch.load(sys.argv[3], weights_only=False))

def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(
            one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
    if isinstance(one, dict):
        return type(one) is type(other) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other

assert same(*found)
groups = {"lr": None, "betas": None, "params": None}
state = {"optim": {"param_groups": [groups]}}
dcp.load(state, checkpoint_id=sys.argv[1])
print("LOADED", found[0]["optim"]["param_groups"][0]["lr"], groups["lr"], groups["betas"], groups["params"][:2])
"""


@pytest.mark.torch
@pytest.mark.skipif(not TORCH, reason="RESHARD_TORCH_PYTHON names no Python that has PyTorch")
def test_pytorch_loads_equal_objects(root: Callable[[str], Path], tmp_path: Path) -> None:
    reshard.plan(reshard.open(root("fsdp2_uneven")), to="dcp").run(tmp_path / "out")
    loaded = run(TORCH, EQUAL, tmp_path / "out", root("fsdp2_uneven"), tmp_path / "whole.pt")
    assert loaded == "LOADED 0.001 0.001 (0.9, 0.999) ['emb.weight', 'layers.0.norm.weight']\n"


LOAD = """
import json, sys
import numpy as np, torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor, load, load_common_state_dict
dist.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=0, world_size=1)
full = {name.replace("\\\\", "/"): value for name, value in np.load(sys.argv[2] + "/full.npz").items()}
dtypes = json.load(open(sys.argv[2] + "/meta.json"))["dtypes"]
state, expected = {}, {}
for name, value in full.items():
    kind, parts = getattr(torch, dtypes[name]), [((), value)]
    if ".layers." in name:
        parts = [(((0, layer, len(value)),), part) for layer, part in enumerate(value)]
    for at, part in parts:
        made = torch.zeros(part.shape, dtype=kind)
        state[name, at] = ShardedTensor.from_rank_offsets(name, made, *at, prepend_axis_num=len(at))
        expected[name, at] = part.tobytes()
for layer in range(4 * (len(sys.argv) > 4)):
    state[layer] = ShardedObject("decoder.layers.mlp.linear_fc1._extra_state", None, (4,), (layer,))
found = load(state, sys.argv[1])
for key, content in expected.items():
    assert found[key].contiguous().view(-1).view(torch.uint8).numpy().tobytes() == content, key
print("LOADED", load_common_state_dict(sys.argv[1])["iteration"], len(expected))
"""


@pytest.mark.torch
@pytest.mark.skipif(not MEGATRON_PYTHON, reason="RESHARD_MEGATRON_PYTHON names no Python that has megatron-core")
@pytest.mark.parametrize("name", ["mcore_tp2_pp2", "mcore_flat"])
def test_megatron_loads_it(root: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    """Also states that it kept flattened once, and would not load from what it wrote then."""
    reshard.plan(reshard.open(root(name)), to="dcp", target_step=5).run(tmp_path / "run")
    more = ["objects"] if name == "mcore_tp2_pp2" else []
    arguments = (root(name).parent, tmp_path / "meet", *more)
    found = run(MEGATRON_PYTHON, LOAD, tmp_path / "run" / "iter_0000005", *arguments)
    assert found.startswith("LOADED 5 " if more else "LOADED 3 ")


def run(python: str, script: str, *arguments: Path | str) -> str:
    done = subprocess.run(
        [python, "-c", script, *map(str, arguments)],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
