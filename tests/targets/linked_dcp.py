"""Distributed checkpoints that others are linked to, and what is found of those."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import numbers
from dcp_files import item, write_torch
from written_dcp import unpickled

import reshard
from reshard import Selection
from reshard.dtypes import BY_NAME
from reshard.formats.dcp.metadata import Item
from reshard.formats.dcp.writer import ListedTensor, metadata
from reshard.kits.torch.saved_tensors import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dcp_files import Box

CASES = ["fsdp2_uneven", "kinds", "mcore_flat", "mcore_moe_ep2", "rank_local"]

FULL = numbers({"w": (6, 4), "b": (5,), "s": ()})
WHOLE: Box = (0, 0), (6, 4)


def linked(source: Path | reshard.Checkpoint, target: Path, names: Mapping[str, str] | None = None, **more: Any) -> Any:
    checkpoint = source if isinstance(source, reshard.Checkpoint) else reshard.open(source)
    plan = reshard.plan(checkpoint, to="dcp", link=True, selection=Selection(name_map=names or {}, **more))
    return plan.run(target)


def simple(tmp_path: Path, name: str = "source", tensors: tuple[str, ...] = ("w", "b")) -> Path:
    """Two ranks, of which the second has one tensor, by its first name."""
    one, two = tensors
    items = {
        0: [(one, ((0, 0), (3, 4)), item(FULL["w"][:3]))],
        1: [(one, ((3, 0), (3, 4)), item(FULL["w"][3:])), (two, ((0,), (5,)), item(FULL["b"]))],
    }
    full = {one: FULL["w"], two: FULL["b"]}
    return write_torch(tmp_path / name, full, items)


def one_file(root: Path, name: str, file: str, path: tuple[str | int, ...] | None = None) -> Path:
    """A tensor in a file of any name."""
    root.mkdir(parents=True)
    content = item(FULL["w"])
    (root / file).write_bytes(content)
    parts = [(Item((0, 0), file, 0, len(content)), (6, 4))]
    listed = ListedTensor(name, torch_dtype(name, BY_NAME["float32"]), (6, 4), parts, path)
    (root / ".metadata").write_bytes(metadata([listed], {}))
    return root


def described(root: Path) -> dict[str, Any]:
    """What `.metadata` says: of each name what it is with its chunks sorted, and its items; where it is nested."""
    kind, state = unpickled((root / ".metadata").read_bytes())
    assert kind == "torch.distributed.checkpoint.metadata.Metadata"
    top = dict(state)
    found: dict[str, Any] = {}
    for name, (what, *fields) in top["state_dict_metadata"]:
        about = dict(fields[0]) if fields else {}
        chunks = sorted((dict(one[1])["offsets"], dict(one[1])["sizes"]) for one in about.get("chunks", ()))
        dtype = about["properties"][1][0] if about else ""
        found[name] = [what, dtype[-1] if isinstance(dtype, tuple) else dtype, about.get("size"), chunks, {}]
    for index, info in top["storage_data"]:
        key = dict(index[1])
        found[key["fqn"]][-1][key.get("offset")] = dict(info[1])
    planned = top["planner_data"] and dict(top["planner_data"])
    return {"listed": found, "planned": planned, "flat": dict(top.get("mcore_data") or ()), "keys": {*top}}


def paths_in(root: Path, name: str = "") -> list[str]:
    there = root.iterdir() if root.is_dir() else ()
    return sorted(path.name for path in there if path.name.endswith(name) and path.name != ".reshard")


def assert_equal(found: reshard.Checkpoint, full: Mapping[str, Any]) -> None:
    assert set(found) == set(full)
    for name, value in full.items():
        array = found[name].compute()
        assert (array.shape, array.tobytes()) == (value.shape, value.tobytes()), name


def shares(one: Path | str, other: Path) -> bool:
    """Return whether two files are one, or, on a file system that has copies sharing blocks, the same."""
    return other.samefile(one) or (other.stat().st_nlink == 1 and other.read_bytes() == Path(one).read_bytes())


def full_of(root: Path) -> dict[str, Any]:
    return {name.replace("\\", "/"): value for name, value in np.load(root / "full.npz").items()}


@pytest.fixture
def apart(mindspore_data: Path, tmp_path: Path) -> Path:
    """The model and the optimizer in directories of their own, with files of the same names, as accelerate has them."""
    source = mindspore_data / "dcp" / "fsdp2_uneven" / "checkpoint"
    linked(source, tmp_path / "saved" / "pytorch_model_fsdp_0", include=("model.*",))
    linked(source, tmp_path / "saved" / "optimizer_0", include=("optim.*",))
    (tmp_path / "saved" / "trainer_state.json").write_text("{}")
    (tmp_path / "saved" / "random_states_0.pkl").write_bytes(b"\x80\x04N.")
    return tmp_path / "saved"
