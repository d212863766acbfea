"""Strategy files of MindSpore: all of its own are read and come back equal, and it reads what is written here."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import generators
import helpers
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from refusals import refused
from strategy_files import meaning

import reshard
from reshard.core.layout.layout import Layout, foldings
from reshard.errors import StrategyError
from reshard.strategy.files import merge_strategies, read_strategy, write_strategy
from reshard.strategy.strategy import Strategy


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


def test_the_step_is_what_mindspore_writes(mindspore_data: Path) -> None:
    seen = 0
    for name in NAMES:
        if name in EMPTY:
            continue
        for places in read_strategy(mindspore_data / name).tensors.values():
            for placed in places:
                assert placed.layout.shard_step() == placed.layout.opt_weight_shard_step, name
                seen += placed.layout.opt_weight_shard_size != 0
    assert seen == 3686


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


SCRIPT = """
import json, pathlib, sys
import mindspore
from mindspore.parallel._parallel_serialization import _convert_to_list, _build_searched_strategy
from reshard.strategy.files import read_strategy  # next to MindSpore's own messages in one process
found = {}
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    found[path.name] = _convert_to_list(_build_searched_strategy(str(path)))
    ours = read_strategy(path)
    assert set(ours.tensors) == set(found[path.name]), path
json.dump(found, open(sys.argv[2], "w"))
"""


@pytest.fixture
def mindspore_python() -> str:
    python = os.environ.get("RESHARD_MINDSPORE_PYTHON")
    if not python:
        pytest.skip("RESHARD_MINDSPORE_PYTHON names no Python that has MindSpore")
    return python


@pytest.mark.mindspore
def test_mindspore_reads_what_is_written_here(mindspore_python: str, tmp_path: Path, mindspore_data: Path) -> None:
    folder = tmp_path / "written"
    written: dict[str, Strategy] = {}

    @settings(
        max_examples=60, phases=[Phase.generate], database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(generators.models())
    def draw(model: generators.Model) -> None:
        # MindSpore takes a name apart at every dash.
        layouts = {
            name: {placed.stage: placed.layout for placed in places}
            for name, places in model.source.tensors.items()
            if "-" not in name
        }
        if not layouts:
            return
        shapes = {name: model.shapes[name] for name in layouts}
        name = f"{len(written)}.ckpt"
        written[name] = Strategy.of(layouts, shapes=shapes)
        write_strategy(written[name], folder / name)
        if all(len(axes) < 2 for by in layouts.values() for one in by.values() for axes in one.tensor_map):
            name = f"{len(written)}.json"
            written[name] = Strategy.of(layouts, shapes=shapes)
            write_strategy(written[name], folder / name)

    draw()
    for number, name in enumerate(NAMES):
        if name.startswith("strategies/") and name.endswith(".ckpt") and name not in EMPTY:
            written[f"real{number}.ckpt"] = read_strategy(mindspore_data / name)
            write_strategy(written[f"real{number}.ckpt"], folder / f"real{number}.ckpt")
    result = tmp_path / "found.json"
    home = str(Path(reshard.__file__).parent.parent)
    done = subprocess.run(
        [mindspore_python, "-c", SCRIPT, str(folder), str(result)],
        env=os.environ | {"PYTHONPATH": home},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text())
    assert found.keys() == written.keys()
    assert sum(name.endswith(".json") for name in found) >= 5
    for file, tensors in found.items():
        strategy = written[file]
        assert tensors.keys() == strategy.tensors.keys()
        for name, (matrix, tensor_map, uneven, field, step, size, stages) in tensors.items():
            places = strategy.tensors[name]
            if not strategy.merged:
                assert stages == [0]  # which MindSpore says of any file that is not merged
            else:
                assert sorted(stages) == [placed.stage for placed in places]
            layouts = [
                Layout.of(matrix, tensor_map, size, opt_weight_shard_step=step, param_split_shape=uneven, field=field)
            ]
            assert layouts[0] in [placed.layout for placed in places], (file, name)
            np.testing.assert_equal(step, layouts[0].shard_step())
