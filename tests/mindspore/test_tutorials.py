"""The tutorials' scripts as printed, but for the import, on the files of the networks that the tutorials compile.

`real/tut_src8` is the network of the page "Model Transformation" on 8 cards, `real/tut_dst4_opt` the same on 4 cards with
optimizer parallel, `strategies/pipe_tut8_ckpt` on 2 pipeline stages of 4. The page of r1.5 is in `test_ms_slices`.
"""

# ruff: noqa: E501, PTH118, PTH208 -- the scripts are as the pages print them
from __future__ import annotations

import logging
import os
import shutil
from typing import TYPE_CHECKING, Any

import helpers
import numpy as np
import pytest
from checkpoints import blocks, write_ranks

import reshard
import reshard.mindspore as ms
from reshard.strategy.files import read_strategy

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Full = dict[str, helpers.Array]


class Network:
    """What a script of the page has after compiling: parameters of one rank's shapes."""

    def __init__(self, slices: Mapping[str, helpers.Array]) -> None:
        self.parameters = [ms.Parameter(np.zeros_like(value), name) for name, value in slices.items()]

    def parameters_and_names(self) -> Any:
        return [(parameter.name, parameter) for parameter in self.parameters]

    def holds(self, slices: Mapping[str, helpers.Array]) -> bool:
        return all(np.array_equal(parameter.asnumpy(), slices[parameter.name]) for parameter in self.parameters)


@pytest.fixture
def full(mindspore_data: Path) -> Full:
    """Every whole tensor of the network, and what every card has a copy of."""
    run = mindspore_data / "real" / "tut_src8"
    tensors = helpers.load_full(run)
    for name, (dtype, shape, content) in helpers.read_rank_file(run / "ckpt" / "rank_0" / "net.ckpt").items():
        tensors.setdefault(name, np.frombuffer(content, dtype).reshape(shape))
    assert set(tensors) > {"global_step", "learning_rate", "momentum"}
    return tensors


def held(full: Full, strategy: reshard.Strategy, rank: int) -> Full:
    """What a card holds: its slices, and the copies."""
    copies = {name: value for name, value in full.items() if name not in strategy.tensors}
    return {**copies, **blocks(full, strategy, rank)}


def assert_file(path: Path, expected: Full) -> None:
    """A file holds exactly these tensors, bit for bit."""
    assert helpers.read_rank_file(path) == {
        name: (value.dtype.name, value.shape, np.ascontiguousarray(value).tobytes()) for name, value in expected.items()
    }


def assert_rank_files(root: Path, full: Full, strategy: reshard.Strategy, *, prefix: str = "checkpoint_") -> None:
    """Each card has one file, which holds exactly what is its own."""
    for rank in strategy.ranks:
        (path,) = (root / f"rank_{rank}").iterdir()
        assert path.stem == f"{prefix}{rank}"
        assert_file(path, held(full, strategy, rank))


@pytest.fixture
def target(mindspore_data: Path) -> reshard.Strategy:
    return reshard.read_strategy(mindspore_data / "real" / "tut_dst4_opt" / "strategy_0.ckpt")


@pytest.fixture(params=["ckpt", "safetensors"])
def extension(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


@pytest.fixture
def trained(mindspore_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extension: str) -> Path:
    """The working directory of the page: `src_checkpoints/rank_x/checkpoint_x.ckpt` and both strategy files."""
    runs = mindspore_data / "real"
    for rank in range(8):
        target = tmp_path / "src_checkpoints" / f"rank_{rank}" / f"checkpoint_{rank}.{extension}"
        target.parent.mkdir(parents=True)
        shutil.copy(runs / "tut_src8" / extension / f"rank_{rank}" / f"net.{extension}", target)
    shutil.copy(runs / "tut_src8" / "strategy_0.ckpt", tmp_path / "src_strategy.ckpt")
    shutil.copy(runs / "tut_dst4_opt" / "strategy_0.ckpt", tmp_path / "dst_strategy.ckpt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def pipelined(
    mindspore_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: Full, extension: str
) -> Path:
    """`src_checkpoints_pipeline/rank_x/checkpoint-3_1875.ckpt` of two stages, and the strategy file of every rank."""
    shutil.copytree(mindspore_data / "strategies" / "pipe_tut8_ckpt", tmp_path / "src_pipeline_strategys")
    source = read_strategy(tmp_path / "src_pipeline_strategys")
    accumulated = {f"accu_grads.{name}": value for name, value in full.items() if name.startswith("net.")}
    copies = {name: value for name, value in full.items() if name not in source.tensors}
    root = tmp_path / "src_checkpoints_pipeline"
    write_ranks(root, {**full, **accumulated}, source, extension, copies, name="checkpoint-3_1875")
    for rank in range(8):
        (root / f"rank_{rank}" / "checkpoint-graph.meta").write_bytes(b"no checkpoint")
    shutil.copy(mindspore_data / "real" / "tut_dst4_opt" / "strategy_0.ckpt", tmp_path / "dst_strategy.ckpt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def same_as_mindspores(mindspore_data: Path, root: Path, name: str, extension: str) -> None:
    """The files hold what MindSpore's own run on 4 cards holds, which began with the same values."""
    theirs = mindspore_data / "real" / "tut_dst4_opt" / extension
    for rank in range(4):
        ours = helpers.read_rank_file(root / f"rank_{rank}" / f"{name}{rank}.{extension}")
        assert ours == helpers.read_rank_file(theirs / f"rank_{rank}" / f"net.{extension}")


# --- 8 cards to 4 cards with optimizer parallel ---


def test_a_directory_at_once(
    mindspore_data: Path, trained: Path, full: Full, target: reshard.Strategy, extension: str
) -> None:
    ms.transform_checkpoints(
        "src_checkpoints", "dst_checkpoints", "checkpoint_", "src_strategy.ckpt", "dst_strategy.ckpt",
        output_format=extension,
    )  # fmt: skip

    assert_rank_files(trained / "dst_checkpoints", full, target)
    same_as_mindspores(mindspore_data, trained / "dst_checkpoints", "checkpoint_", extension)

    for rank in range(4):  # "Loading the Transformed Checkpoint Files", on each card
        net = Network(held(full, target, rank))
        save_checkpoint_path = os.path.join("dst_checkpoints", f"rank_{rank}", f"checkpoint_{rank}.{extension}")
        param_dict = ms.load_checkpoint(save_checkpoint_path, format=extension)
        assert ms.load_param_into_net(net, param_dict) == ([], [])
        assert net.holds(held(full, target, rank))


def test_rank_by_rank_in_a_loop(
    mindspore_data: Path, trained: Path, full: Full, target: reshard.Strategy, extension: str
) -> None:
    dst_device_num = 4
    for tgt_rank in range(dst_device_num):
        rank_list = ms.rank_list_for_transform(tgt_rank, "./src_strategy.ckpt", "./dst_strategy.ckpt")
        checkpoint_file_map = {}
        for rank_id in rank_list:
            checkpoint_file_map[rank_id] = os.path.join(
                "src_checkpoints", f"rank_{rank_id}", f"checkpoint_{rank_id}.{extension}"
            )
        save_checkpoint_path = os.path.join("dst_checkpoints", f"rank_{tgt_rank}", f"checkpoint_{tgt_rank}.{extension}")
        ms.transform_checkpoint_by_rank(
            tgt_rank, checkpoint_file_map, save_checkpoint_path, "./src_strategy.ckpt", "./dst_strategy.ckpt"
        )

        assert len(rank_list) < 8

    assert_rank_files(trained / "dst_checkpoints", full, target)
    same_as_mindspores(mindspore_data, trained / "dst_checkpoints", "checkpoint_", extension)


# --- pipeline parallel ---


def test_a_pipeline_to_none_after_merging(
    pipelined: Path, full: Full, target: reshard.Strategy, extension: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "reshard.mindspore"):
        ms.merge_pipeline_strategys("src_pipeline_strategys", "src_strategy.ckpt")
        ms.transform_checkpoints(
            "src_checkpoints_pipeline", "dst_checkpoints", "checkpoint_", "src_strategy.ckpt", "dst_strategy.ckpt",
            output_format=extension,
        )  # fmt: skip

    assert_rank_files(pipelined / "dst_checkpoints", full, target)
    (warning,) = [record.message for record in caplog.records if "left out" in record.message]
    assert warning.count("accu_grads.") == 6


def test_one_sub_network_after_the_other(pipelined: Path, full: Full, target: reshard.Strategy, extension: str) -> None:
    stage_strategy_list = ["src_strategy_0.ckpt", "src_strategy_4.ckpt"]
    for src_strategy_file in stage_strategy_list:
        ms.transform_checkpoints(
            "src_checkpoints_pipeline", "dst_checkpoints", "checkpoint_", f"src_pipeline_strategys/{src_strategy_file}",
            "dst_strategy.ckpt", output_format=extension,
        )  # fmt: skip

    for rank in range(4):
        checkpoint_file_dir = f"dst_checkpoints/rank_{rank}"
        assert sorted(os.listdir(checkpoint_file_dir)) == [
            f"checkpoint_{rank}_part0.{extension}", f"checkpoint_{rank}_part1.{extension}",
        ]  # fmt: skip
        net = Network(held(full, target, rank))
        param_dict = ms.load_segmented_checkpoints(checkpoint_file_dir)
        param_not_load, _ = ms.load_param_into_net(net, param_dict)
        assert param_not_load == []
        assert net.holds(held(full, target, rank))

    opened = reshard.open(pipelined / "dst_checkpoints", strategy=target)  # the parts are read together here too
    assert set(opened) == set(full)
    assert all(np.array_equal(opened[name].compute(), value) for name, value in full.items())


@pytest.mark.parametrize("wanted", ["whole", "pipeline"])
def test_sub_networks_where_mindspore_says_no(pipelined: Path, full: Full, extension: str, wanted: str) -> None:
    """To whole tensors, and to a target that is a pipeline."""
    target = None
    if wanted == "pipeline":
        layers = reshard.read_strategy("src_pipeline_strategys")
        target = reshard.Strategy(
            {name: layers.tensors[name] for name in layers.tensors if not name.startswith("accu_grads")},
            layers.stages, layers.devices, merged=True,
        )  # fmt: skip
    for rank in (0, 4):
        ms.transform_checkpoints(
            "src_checkpoints_pipeline", "dst_checkpoints", "checkpoint_",
            f"src_pipeline_strategys/src_strategy_{rank}.ckpt", target, output_format=extension,
        )  # fmt: skip
    for rank in target.ranks if target else range(1):
        found = ms.load_segmented_checkpoints(f"dst_checkpoints/rank_{rank}")
        expected = held(full, target, rank) if target else full
        assert {
            name: parameter.asnumpy().tobytes() for name, parameter in found.items() if "accu_grads" not in name
        } == {name: np.ascontiguousarray(block).tobytes() for name, block in expected.items()}


# --- safetensors: unify, then load distributed ---


def test_unify_then_load_distributed(trained: Path, full: Full, target: reshard.Strategy, extension: str) -> None:
    src_dir = "./src_checkpoints"
    src_strategy_file = "./src_strategy.ckpt"
    dst_dir = "./merge_4p/"
    ms.unified_safetensors(src_dir, src_strategy_file, dst_dir)
    ms.load_distributed_checkpoint(
        network=None,
        predict_strategy="./dst_strategy.ckpt",
        format="safetensors",
        unified_safetensors_dir="./merge_4p/",
        dst_safetensors_dir="./dst_dir",
    )

    assert sorted(os.listdir("merge_4p")) == ["hyper_param.safetensors", "param_name_map.json", "part0.safetensors"]
    for rank in range(4):
        (path,) = (trained / "dst_dir" / f"rank_{rank}").iterdir()
        assert path.name == "net.safetensors"
        assert_file(path, held(full, target, rank))
