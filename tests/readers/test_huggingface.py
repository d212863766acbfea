"""Blocks that PyTorch saved for Hugging Face: real ones give the whole tensors, and what is missing is said."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import assert_equal, numbers, write_file
from commands import done
from refusals import failed, refused

import reshard
from reshard import Layout, Strategy
from reshard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FULL = numbers({"w": (6, 4), "s": (), "b": (5,)}) | {"n": np.arange(4, dtype=np.int64), "e": np.zeros((0, 2), np.int8)}


def write(root: Path, shard: int, tensors: Mapping[str, Any], offsets: Mapping[str, Any], *, of: int = 1) -> Path:
    info = {name: {"saved_offsets": list(some)} for name, some in offsets.items()}
    path = root / f"shard-{shard:05d}-model-00001-of-{of:05d}.safetensors"
    return write_file(path, tensors, DCP_SHARDING_INFO=json.dumps(info), DCP_VERSION="1.0")


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Rows of three ranks, the last with an empty one; a replica; a tensor without dimensions, one without elements."""
    root = tmp_path / "src"
    w, b, n = FULL["w"], FULL["b"], FULL["n"]
    first = {"w": w[:2], "b": b[:3], "n": n, "s": FULL["s"], "e": FULL["e"]}
    write(root, 1, first, {"w": (0, 0), "b": (0,), "n": (0,), "s": (), "e": (0, 0)})
    write(root, 2, {"w": w[2:4], "b": b[3:], "n": n}, {"w": (2, 0), "b": (3,), "n": (0,)})
    write(root, 3, {"w": w[4:], "b": b[5:]}, {"w": (4, 0), "b": (5,)})
    return root


def test_a_real_one_that_pytorch_consolidated_beside(mindspore_data: Path, tmp_path: Path) -> None:
    root = mindspore_data / "dcp" / "hf_consolidated"
    full, found = np.load(root / "full.npz"), reshard.open(root / "checkpoint")
    assert_equal(found, full)
    assert not found.warnings
    sharded = reshard.open(root / "checkpoint" / "sharded")
    assert_equal(sharded, full)
    assert set(sharded.ranks) == {0, 1, 2, 3}
    assert reshard.verify(root / "checkpoint", against=root / "checkpoint" / "sharded").equal
    reshard.plan(sharded, to="hf").run(tmp_path / "hf")
    for path in (tmp_path / "hf").glob("*.safetensors"):
        assert b"DCP_" not in path.read_bytes()


def test_every_row_of_what_pytorch_does_wrong_is_right(three: Path, tmp_path: Path) -> None:
    """0-dimensional tensors, integers, empty tensors and blocks, replicas."""
    source = reshard.open(three)
    assert_equal(source, FULL)
    columns = Strategy.of({"w": Layout.of([2], [-1, 0])})
    reshard.plan(source.sel("w"), columns).run(tmp_path / "columns", fsync=False)
    assert_equal(reshard.open(tmp_path / "columns", strategy=columns), {"w": FULL["w"]})
    first = "shard-00001-model-00001-of-00001.safetensors"
    shutil.copy(three / first, three / first.replace("of-00001", "of-00002"))
    with refused(SourceError, "several-checkpoints", three, "1, 2 files"):
        reshard.open(three)


def test_what_cannot_be_known_is_said(three: Path) -> None:
    """Of the last rank nothing is missed: only the others' blocks show that there is a gap."""
    assert len(reshard.open(three).warnings) == 1
    (three / "shard-00003-model-00001-of-00001.safetensors").unlink()
    found = reshard.open(three)
    assert found["w"].shape == (4, 4)
    assert found.warnings[0] in done("inspect", three).stderr.replace("\n", " ")


def test_a_gap_is_refused_by_name(three: Path, tmp_path: Path) -> None:
    (three / "shard-00002-model-00001-of-00001.safetensors").unlink()
    found = reshard.open(three)
    assert set(found.unreadable) == {"w", "b"}
    words = ("convert", "--to=mindspore", three, tmp_path / "u")
    failed(4, "unreadable-tensor", *words, places=("tensor 'w'",))
    done(*words, "--drop", "w", "--drop", "b")


def test_the_first_of_two_blocks_of_a_rank_that_pytorch_lost(tmp_path: Path) -> None:
    """Of two chunks of a name in one rank it keeps the last: gate is gone, and up is at its offset."""
    write(tmp_path, 1, {"w": FULL["w"][3:]}, {"w": (3, 0)})
    write(tmp_path, 2, {"b": FULL["b"]}, {"b": (0,)})
    assert set(reshard.open(tmp_path).unreadable) == {"w"}


def test_blocks_that_contradict_each_other(tmp_path: Path) -> None:
    w = FULL["w"]
    write(tmp_path, 1, {"w": w, "o": w[:3], "d": w[0]}, {"w": (0, 0), "o": (0, 0), "d": (0,)})
    write(tmp_path, 2, {"w": w + 1, "o": w[2:], "d": w}, {"w": (0, 0), "o": (2, 0), "d": (0, 0)})
    write(tmp_path, 3, {"t": w[0], "u": w, "x": w}, {"t": (0,), "u": (0,)})
    write(tmp_path, 4, {"t": w[0].astype(np.float64)}, {"t": (4,)})
    write(tmp_path, 5, {"ok": w}, {"ok": (0, 0)})
    found = reshard.open(tmp_path)
    assert set(found) == {"ok"}
    assert found.unreadable.keys() == {"w", "o", "d", "t", "u", "x"}


@pytest.mark.parametrize(
    ("notes", "code", "place"),
    [
        ({}, "no-layout", "DCP_SHARDING_INFO"),
        ({"DCP_SHARDING_INFO": "{"}, "no-layout", "DCP_SHARDING_INFO"),
        ({"DCP_SHARDING_INFO": "[]"}, "no-layout", "DCP_SHARDING_INFO"),
        ({"DCP_SHARDING_INFO": '{"x": {"saved_offsets": [0]}}'}, "unknown-tensor", "'x'"),
    ],
)
def test_files_that_say_nothing_of_use(tmp_path: Path, notes: dict[str, str], code: str, place: str) -> None:
    path = write_file(tmp_path / "shard-00001-model-00001-of-00001.safetensors", {"w": FULL["w"]}, **notes)
    with refused(SourceError, code, path.name, place):
        reshard.open(tmp_path)


@pytest.mark.parametrize("offsets", [[-1, 0], [0.5, 0], ["0", 0], [1 << 70, 0], [1 << 62, 1 << 62], None, {}])
def test_offsets_that_cannot_be(tmp_path: Path, offsets: Any) -> None:
    info = json.dumps({"w": {"saved_offsets": offsets}, "b": {"saved_offsets": [0]}})
    write_file(
        tmp_path / "shard-00001-model-00001-of-00001.safetensors", {"w": FULL["w"], "b": FULL["b"]},
        DCP_SHARDING_INFO=info,
    )  # fmt: skip
    found = reshard.open(tmp_path)
    assert set(found) == {"b"}
    assert set(found.unreadable) == {"w"}
