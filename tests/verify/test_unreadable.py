"""What cannot be read of a checkpoint that describes itself is a difference, on whichever side, in each format."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import numbers, write_file
from commands import call, done
from dcp_files import item, saved, write_hyper, write_torch
from saves_files import tensor, write_rank, write_save

import reshard

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FULL = numbers({"w": (6, 4), "b": (5,)})
W: Any = (0, 0), (6, 4)
B: Any = (0,), (5,)


def pytorch(root: Path) -> Path:
    items = [("w", W, saved("no tensor")), ("b", B, item(FULL["b"]))]
    return write_torch(root, FULL, {0: items})


def encoded(root: Path) -> Path:
    """Of an encoding that is not known."""
    first = write_torch(
        root / "first", {"w": FULL["w"]}, {0: [("w", W, item(FULL["w"]))]}, transform_descriptors=["x/1"]
    )
    write_torch(root / "second", {"b": FULL["b"]}, {0: [("b", B, item(FULL["b"]))]})
    return first.parent


def hyper(root: Path) -> Path:
    write_hyper(root, FULL, {0: {"w": [W], "b": [B]}})
    write_file(root / "_rank0_.safetensors", {"b": FULL["b"]})
    return root


def hugging_face(root: Path) -> Path:
    """Of which two rows are in no file."""
    for number, begin in enumerate((0, 4), 1):
        offsets = {"w": {"saved_offsets": [begin, 0]}} | ({} if begin else {"b": {"saved_offsets": [0]}})
        some = {"w": FULL["w"][begin : begin + 2]} | ({} if begin else {"b": FULL["b"]})
        path = root / f"shard-{number:05d}-model-00001-of-00001.safetensors"
        write_file(path, some, DCP_SHARDING_INFO=json.dumps(offsets), DCP_VERSION="1.0")
    return root


def ranks(root: Path) -> Path:
    for rank in range(2):
        write_rank(root, rank, 2, {"w": tensor(FULL["w"][rank:]), "b": tensor(FULL["b"])})
    return root


def one_file(root: Path) -> Path:
    return write_save(root / "model.pt", {"w": tensor(FULL["w"], first=1), "b": tensor(FULL["b"])})


def zarr(root: Path) -> Path:
    write_file(root / "whole.safetensors", FULL)
    reshard.open(root / "whole.safetensors").to_zarr(root / "z")
    shutil.rmtree(root / "z.reshard")
    for path, changes in ((root / "z" / "w", {"data_type": "r16"}), (root / "z" / "b", {}), (root / "z", {})):
        said = json.loads((path / "zarr.json").read_text())
        (path / "zarr.json").write_text(json.dumps(said | {"attributes": {}} | changes))
    return root / "z"


FORMATS = [pytorch, encoded, hyper, hugging_face, ranks, one_file, zarr]


@pytest.mark.parametrize("made", FORMATS)
def test_on_either_side(tmp_path: Path, made: Callable[[Path], Path]) -> None:
    """Though the rest is equal; left out by name it is none."""
    root, whole = made(tmp_path / "root"), write_file(tmp_path / "whole.safetensors", FULL)
    found = reshard.open(root)
    assert (set(found.unreadable), set(found)) == ({"w"}, {"b"})
    for target, source in ((root, whole), (whole, root)):
        (difference,) = reshard.verify(target, against=source).differences
        assert difference.name == "w"
        assert found.unreadable["w"] in difference.text
        refused = call("verify", target, "--against", source)
        assert refused.exit_code == 3
        assert found.unreadable["w"] in refused.stdout
        done("verify", target, "--against", source, "--exclude", "w")


def test_blocks_that_mindformers_lost(mindspore_data: Path, tmp_path: Path) -> None:
    (case,) = mindspore_data.glob("checkpoint2*/pynative_submesh_once")
    whole = write_file(tmp_path / "whole.safetensors", dict(np.load(case / "full.npz")))
    lost = reshard.open(case / "checkpoint").unreadable
    assert lost
    for target, source in ((case / "checkpoint", whole), (whole, case / "checkpoint")):
        found = reshard.verify(target, against=source).differences
        assert {one.name for one in found if one.kind in {"missing", "extra"}} >= set(lost)


def test_what_is_linked_and_cannot_be_read(tmp_path: Path) -> None:
    """Its files are the same ones, and it is said that it was not compared."""
    source = encoded(tmp_path / "source")
    reshard.plan(reshard.open(source), to="dcp", link=True).run(tmp_path / "new")
    found = reshard.verify(tmp_path / "new", against=source)
    assert found.equal
    assert "w cannot be read on either side, and is not compared" in found.warnings
