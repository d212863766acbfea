"""Which files a target has, and what each is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoints import numbers, tree, write_file
from hypothesis import example, given
from hypothesis import strategies as st
from refusals import refused

import reshard
from reshard import HuggingFaceSet, Layout, MindSporeSet, Strategy
from reshard.core.model.entries import ShardFiles, SizedTensor, TargetFiles
from reshard.errors import UsageError
from reshard.formats.ranks.options import RankFiles

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MIXED = [SizedTensor("a", 10, True), SizedTensor("b", 30, True), SizedTensor("c", 20, True),
         SizedTensor("step", 4, False), SizedTensor("text", 0, False, is_text=True)]  # fmt: skip


def test_a_rank_has_one_file() -> None:
    assert RankFiles("net-").shard_files(MIXED, ".ckpt").paths == ("rank_{rank}/net-{rank}.ckpt",)
    assert RankFiles("net-", "_part1").shard_files(MIXED, ".ckpt").paths == ("rank_{rank}/net-{rank}_part1.ckpt",)


def test_parts_are_even() -> None:
    shard_files = MindSporeSet(30).shard_files(MIXED, ".safetensors")
    assert shard_files.paths == ("part0.safetensors", "part1.safetensors", "hyper_param.safetensors")
    assert shard_files.of == {"b": 0, "c": 1, "a": 1, "step": 2, "text": 2}


def test_without_a_strategy_all_tensors_are_parts_and_text_is_not() -> None:
    tensors = [SizedTensor("a", 10, False), SizedTensor("text", 0, False, is_text=True)]
    shard_files = MindSporeSet().shard_files(tensors, ".safetensors")
    assert shard_files.of == {"a": 0, "text": 1}
    assert shard_files.paths == ("part0.safetensors", "hyper_param.safetensors")


def test_shards_are_filled_in_order() -> None:
    shard_files = HuggingFaceSet(30).shard_files(MIXED, ".safetensors")
    assert shard_files.of == {"a": 0, "b": 1, "c": 2, "step": 2, "text": 0}
    assert shard_files.paths[2] == "model-00003-of-00003.safetensors"


@pytest.mark.parametrize("files", [MindSporeSet(1), HuggingFaceSet(1)])
def test_tensors_without_elements_need_no_room(files: TargetFiles) -> None:
    empty = [SizedTensor(name, 0, True) for name in "abc"]
    assert len(files.shard_files(empty, ".safetensors").paths) == 1
    assert len(files.shard_files([SizedTensor("w", 9, True), *empty], ".safetensors").paths) == 1


def test_a_name_by_hand(tmp_path: Path) -> None:
    full = numbers({"w": (4, 4)})
    source = reshard.open(write_file(tmp_path / "x.safetensors", full))
    strategy = Strategy.of({"w": Layout.of([2], [0, -1])})
    reshard.plan(source, strategy, files=RankFiles(name="{rank}/of two.bin")).run(tmp_path / "out")
    assert list(tree(tmp_path / "out")) == ["0/of two.bin", "1/of two.bin"]
    found = reshard.open({rank: tmp_path / "out" / str(rank) / "of two.bin" for rank in range(2)}, strategy=strategy)
    assert np.array_equal(found["w"].compute(), full["w"])


@pytest.mark.parametrize("name", ["", "/x", "../x", "a/../../x", "x\ny", ".", "a\0"])
def test_a_name_cannot_lead_out(name: str) -> None:
    with refused(UsageError, "bad-name"):
        RankFiles(name=name)


def test_two_ranks_cannot_share_a_file(tmp_path: Path) -> None:
    source = reshard.open(write_file(tmp_path / "x.safetensors", numbers({"w": (4, 4)})))
    strategy = Strategy.of({"w": Layout.of([2], [0, -1])})
    with refused(UsageError, "duplicate-name", "same.bin", "{rank}"):
        reshard.plan(source, strategy, files=RankFiles(name="same.bin"))


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 60))
@example([0, 2], 1)
@pytest.mark.parametrize("style", [MindSporeSet, HuggingFaceSet])
def test_no_file_holds_more_than_asked_for_but_one_tensor(
    style: type[MindSporeSet | HuggingFaceSet], sizes: list[int], most: int
) -> None:
    tensors = [SizedTensor(f"t{number}", nbytes, True) for number, nbytes in enumerate(sizes)]
    shard_files = style(most).shard_files(tensors, ".safetensors")
    for number in range(len(shard_files.paths)):
        held = [tensor.nbytes for tensor in tensors if shard_files.of[tensor.name] == number and tensor.nbytes]
        assert sum(held) <= most or len(held) == 1
        assert held or len(shard_files.paths) == 1


class ByLetter:
    """A way of one's own: a file for each first letter."""

    def shard_files(self, tensors: Sequence[SizedTensor], extension: str) -> ShardFiles:
        letters = sorted({tensor.name[0] for tensor in tensors})
        of = {tensor.name: letters.index(tensor.name[0]) for tensor in tensors}
        return ShardFiles(tuple(f"{letter}{extension}" for letter in letters), of)


def test_files_are_laid_out_as_anyone_says(tmp_path: Path) -> None:
    full = numbers({"a.w": (4, 2), "b.w": (3,), "a.b": (5,)})
    write_file(tmp_path / "all.safetensors", full)
    plan = reshard.plan(reshard.open(tmp_path / "all.safetensors"), files=ByLetter())
    plan.run(tmp_path / "target", fsync=False)
    assert set(tree(tmp_path / "target")) == {"a.safetensors", "b.safetensors"}
    held = {name: set(reshard.open(tmp_path / "target" / f"{name}.safetensors")) for name in "ab"}
    assert held == {"a": {"a.w", "a.b"}, "b": {"b.w"}}
    with refused(UsageError, "wrong-format", "zarr", "ByLetter"):
        reshard.plan(reshard.open(tmp_path / "all.safetensors"), files=ByLetter(), format="zarr")
