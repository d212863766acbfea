"""Strategy files of MindSpore: all of its own are read and come back equal, and it reads what is written here."""

from __future__ import annotations

import json
from pathlib import Path

import helpers
import pytest
from refusals import refused
from strategy_files import meaning

from reshard.core.layout.layout import foldings
from reshard.errors import StrategyError
from reshard.strategy.files import merge_strategies, read_strategy, write_strategy


def strategy_names() -> list[str]:
    """Every strategy file of the test data."""
    return [
        name
        for folder in ("cases", "merged", "real", "strategies")
        for name in helpers.packed_files(folder)
        if (folder in ("merged", "strategies") or "strategy" in name or "_stages/" in name)
        and name.endswith((".ckpt", ".json"))
        and not name.endswith(("index.json", "info.json", "meta.json", "param_name_map.json"))
    ]


NAMES = strategy_names()
EMPTY = {f"strategies/pipe_tf8_tie_ckpt/src_strategy_{rank}.ckpt" for rank in range(4)}


def test_every_file_of_mindspore_is_read(mindspore_data: Path) -> None:
    assert len(NAMES) == 324
    for name in NAMES:
        if name in EMPTY:
            with refused(StrategyError, "no-tensors"):
                read_strategy(mindspore_data / name)
        else:
            strategy = read_strategy(mindspore_data / name)
            assert strategy.tensors, name
            assert strategy.merged == name.startswith("merged/") or name.startswith("cases/pipe"), name


def test_every_file_of_mindspore_comes_back_equal(mindspore_data: Path, tmp_path: Path) -> None:
    same_bytes = 0
    for name in NAMES:
        if name in EMPTY:
            continue
        path, ours = mindspore_data / name, tmp_path / f"ours{Path(name).suffix}"
        strategy = read_strategy(path)
        write_strategy(strategy, ours)
        assert read_strategy(ours) == strategy, name
        if ours.suffix == ".json":
            assert json.loads(ours.read_bytes()) == json.loads(path.read_bytes()), name
        else:
            # All but merged files (whose tensors MindSpore lists in an order of its own) even byte for byte.
            same = ours.read_bytes() == path.read_bytes()
            assert same or strategy.merged, name
            same_bytes += same
    assert same_bytes == 240


BOTH = sorted(
    name[:-5] for name in NAMES if name.endswith(".json") and name[:-5] + ".ckpt" in NAMES and "cases" not in name
)


def test_protobuf_and_json_of_one_network_say_the_same(mindspore_data: Path) -> None:
    assert len(BOTH) == 64
    nested = 0
    for name in BOTH:
        proto, text = (read_strategy(mindspore_data / (name + suffix)) for suffix in (".ckpt", ".json"))
        assert proto.tensors.keys() == text.tensors.keys()
        assert (proto.stages, proto.devices, proto.merged) == (text.stages, text.devices, text.merged)
        assert {op.name: (op.stage, op.strategy) for op in proto.operators} == {
            op.name: (op.stage, op.strategy) for op in text.operators
        }
        for tensor, places in proto.tensors.items():
            for one, other in zip(places, text.tensors[tensor], strict=True):
                assert one.stage == other.stage
                assert other.shape is not None
                possible = dict(foldings(other.layout, other.shape, len(one.layout.tensor_map)))
                assert one.layout in possible, (name, tensor)
                shape = possible[one.layout]
                assert text.grid(tensor, shape, stage=one.stage) == proto.grid(tensor, shape, stage=one.stage)
                nested += one.layout != other.layout
    assert nested == 44


@pytest.mark.parametrize("name", ["pipe_noopt4", "pipe_tf8", "pipe_tut8"])
def test_merging_gives_what_mindspore_merges(mindspore_data: Path, tmp_path: Path, name: str) -> None:
    theirs = read_strategy(mindspore_data / "merged" / f"{name}.ckpt")
    folder = mindspore_data / "strategies" / f"{name}_ckpt"
    ours = merge_strategies(folder, tmp_path / "merged.ckpt")
    assert meaning(ours) == meaning(theirs) == meaning(read_strategy(folder))
    assert sorted(ours.operators, key=str) == sorted(theirs.operators, key=str)
    assert meaning(read_strategy(tmp_path / "merged.ckpt")) == meaning(theirs)
    assert ours.current_stage == theirs.current_stage == 1


def test_a_pipeline_may_lack_files_of_ranks_whose_stage_is_known(mindspore_data: Path) -> None:
    # Two files a stage of four.
    strategy = read_strategy(mindspore_data / "strategies" / "pipe_tf16_4st_ckpt")
    assert (strategy.devices, strategy.ranks) == (4, range(16))
