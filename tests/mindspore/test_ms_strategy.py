"""MindSpore's functions on strategy files, under its own names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import helpers
import numpy as np
import pytest
from checkpoints import write_file
from refusals import refused

import reshard
import reshard.mindspore as ms
from reshard.core.layout.layout import Layout
from reshard.errors import StrategyError
from reshard.strategy.proto import message_class

if TYPE_CHECKING:
    from pathlib import Path


def strategy_file(path: Path, **layouts: Layout) -> str:
    reshard.write_strategy(reshard.Strategy.of(dict(layouts)), path)
    return str(path)


# build_searched_strategy


def test_layouts_are_read_by_the_fields_of_mindspores_message(tmp_path: Path) -> None:
    layout = Layout.of([2, 4], [1, -1], 2, param_split_shape=[3, 5], indices_offset=[1], field=6)
    found = ms.build_searched_strategy(strategy_file(tmp_path / "strategy.ckpt", w=layout))
    assert list(found) == ["w"]
    assert list(found["w"].dev_matrix[0].dim) == [2, 4]
    assert list(found["w"].tensor_map[0].dim) == [1, -1]
    assert list(found["w"].param_split_shape[0].dim) == [3, 5]
    assert list(found["w"].indices_offset[0].dim) == [1]
    assert (found["w"].field, found["w"].opt_weight_shard_size, found["w"].opt_weight_shard_step) == (6, 2, 1)


def test_nested_maps_are_one_message_a_dimension(tmp_path: Path) -> None:
    path = strategy_file(tmp_path / "s.ckpt", a=Layout.of([2, 2], [-1, (1, 0)]), b=Layout.of([2, 2], [(1, 0)]))
    found = ms.build_searched_strategy(path)
    assert [list(part.dim) for part in found["a"].tensor_map] == [[-1], [1, 0]]
    assert [list(part.dim) for part in found["b"].tensor_map] == [[1, 0], []]
    strategy = reshard.Strategy.of({"a": Layout.of([2, 2], [-1, (1, 0)])}, shapes={"a": (4, 4)})
    reshard.write_strategy(strategy, tmp_path / "s.json")
    with refused(ValueError, "unknown-nesting", "tensor 'a'"):  # JSON has it expanded, and the message has no shape
        ms.build_searched_strategy(tmp_path / "s.json")


def test_a_merged_file_has_its_stages_in_the_names(tmp_path: Path) -> None:
    rows = Layout.of([2], [0])
    reshard.write_strategy(reshard.Strategy.of({"w": {0: rows, 1: rows}, "v": {1: rows}}), tmp_path / "s.json")
    assert list(ms.build_searched_strategy(tmp_path / "s.json")) == ["0-w", "1-w", "1-v"]


def test_every_real_file_reads_as_protobuf_has_it(mindspore_data: Path) -> None:
    for path in sorted((mindspore_data / "strategies").rglob("*.ckpt"))[:40]:
        message: Any = message_class("mindspore.straspb.ParallelStrategyMap")()
        message.ParseFromString(path.read_bytes())
        found = ms.build_searched_strategy(path)
        assert list(found) == [item.param_name for item in message.parallel_layout_item]
        for item in message.parallel_layout_item:
            assert found[item.param_name].SerializeToString() == item.parallel_layouts.SerializeToString()


# merge_pipeline_strategys


def test_a_pipeline_of_json_files_is_merged_to_either_format(mindspore_data: Path, tmp_path: Path) -> None:
    theirs = mindspore_data / "merged/pipe_noopt4.ckpt"
    (tmp_path / "src").mkdir()
    for path in (mindspore_data / "strategies/pipe_noopt4_ckpt").iterdir():
        reshard.write_strategy(reshard.read_strategy(path), tmp_path / f"src/{path.stem}.json")
    for name in ("dst.json", "dst.ckpt"):
        ms.merge_pipeline_strategys(tmp_path / "src", tmp_path / name)
        assert ms.build_searched_strategy(tmp_path / name) == ms.build_searched_strategy(theirs)


def test_one_stage_gets_its_number_too(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    strategy_file(tmp_path / "src/rank_0.ckpt", w=Layout.of([2], [0]))
    ms.merge_pipeline_strategys(str(tmp_path / "src"), str(tmp_path / "new/dst.ckpt"))
    assert list(ms.build_searched_strategy(tmp_path / "new/dst.ckpt")) == ["0-w"]


def test_merging_refuses_what_it_cannot_merge(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match="src_strategy_dirs .*/none "):
        ms.merge_pipeline_strategys(str(tmp_path / "none"), str(tmp_path / "dst.ckpt"))
    (tmp_path / "src").mkdir()
    with refused(ValueError, "no-strategy-file", tmp_path / "src"):
        ms.merge_pipeline_strategys(tmp_path / "src", tmp_path / "dst.ckpt")
    strategy_file(tmp_path / "src/a.ckpt", w=Layout.of([2], [0]))
    strategy_file(tmp_path / "src/b.json", w=Layout.of([2], [0]))
    with refused(ValueError, "mixed-formats", "1 .ckpt", "1 .json"):
        ms.merge_pipeline_strategys(tmp_path / "src", tmp_path / "dst.ckpt")
    assert not (tmp_path / "dst.ckpt").exists()


# restore_group_info_list


def test_the_ranks_of_a_group_info_file(tmp_path: Path) -> None:
    message: Any = message_class("mindspore.straspb.ParallelGroupMap")()
    item = message.parallel_group_item.add(group_name="dp")
    item.parallel_group_ranks.dim.extend([0, 1])
    message.ckpt_restore_rank_list.dim.extend([1, 3, 5])
    (tmp_path / "group.pb").write_bytes(message.SerializeToString())
    assert ms.restore_group_info_list(str(tmp_path / "group.pb")) == [1, 3, 5]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "not-found"),
        (b"", "not-a-group-info-file"),
        (b"\xff", "not-a-group-info-file"),
        (b"\x1a\x00", "not-a-group-info-file"),
    ],
)
def test_files_without_group_info_are_refused(tmp_path: Path, content: bytes | None, code: str) -> None:
    if content is not None:
        (tmp_path / "group.pb").write_bytes(content)
    with refused(ValueError, code, tmp_path / "group.pb"):
        ms.restore_group_info_list(str(tmp_path / "group.pb"))


# get_parameter_redundancy, remove_param_redundancy


def test_groups_of_ranks_that_hold_the_same(tmp_path: Path) -> None:
    path = strategy_file(tmp_path / "s.ckpt", w=Layout.of([2, 2], [-1, 0]), b=Layout.of([2, 2], [-1]))
    assert ms.get_parameter_redundancy(path) == {"b": ((0, 1, 2, 3),), "w": ((0, 2), (1, 3))}
    assert ms.get_parameter_redundancy(path, initial_rank=8)["w"] == ((8, 10), (9, 11))


def test_ranks_are_those_of_this_process_s_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK_ID", "6")
    assert ms.get_parameter_redundancy({"b": Layout.of([4], [-1])}) == {"b": ((4, 5, 6, 7),)}


def test_what_is_not_a_layout_of_mindspore_s_is_refused() -> None:
    with refused(StrategyError, "wrong-type", "SimpleNamespace", "tensor_map"):
        ms.get_parameter_redundancy({"b": SimpleNamespace(dev_matrix=[])}, 0)


def test_the_stages_of_a_merged_file_have_ranks_of_their_own(tmp_path: Path) -> None:
    whole = Layout.of([2], [-1])
    strategy = reshard.Strategy.of({"w": {0: whole, 1: whole}, "v": {1: Layout.of([2], [0])}})
    for name in ("s.ckpt", "s.json"):
        reshard.write_strategy(strategy, tmp_path / name)
        found = ms.get_parameter_redundancy(tmp_path / name, 0)
        assert found == {"0-w": ((0, 1),), "1-v": ((2,), (3,)), "1-w": ((2, 3),)}


def test_every_entry_of_a_nested_map_counts() -> None:
    """MindSpore reads the first alone, takes all four ranks for replicas, and stores one of four blocks."""
    assert ms.get_parameter_redundancy({"w": Layout.of([2, 2], [-1, (1, 0)])})["w"] == ((0,), (2,), (1,), (3,))
    nested = ms.get_parameter_redundancy({"w": Layout.of([2, 2, 2], [(2, 1), -1])})
    assert nested["w"] == ((0, 1), (4, 5), (2, 3), (6, 7))


def test_a_tensor_that_the_optimizer_shards_over_some_ranks_is_not_lost() -> None:
    """MindSpore works out 8 pieces from the step, which do not divide 4 replicas, and leaves the tensor out."""
    layout = Layout.of([2, 4], [1, -1], -1)
    assert layout.opt_weight_shard_step == 1
    assert ms.get_parameter_redundancy({"w": layout})["w"] == tuple((rank,) for rank in range(8))


def test_a_layout_as_a_compiled_network_has_it() -> None:
    plain = ([2, 2], [-1, 0], (4, 2), 0, True, "", (4, 4))
    sharded = ([2, 2], [-1, 0], (2, 2), 0, True, "2-group", (4, 4))
    assert ms.get_parameter_redundancy({"w": plain, "v": sharded}) == {
        "w": ((0, 2), (1, 3)), "v": ((0,), (2,), (1,), (3,)),
    }  # fmt: skip
    with refused(ValueError, "unknown-count", "parameter 'v'", "'2-group'", "(4, 2)"):
        ms.get_parameter_redundancy({"v": (*sharded[:2], (4, 2), *sharded[3:])})


def test_a_network_that_is_not_parallel_is_whole_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK_ID", "1")
    monkeypatch.setenv("RANK_SIZE", "3")
    parameter = ms.Parameter(np.zeros(2), "w")
    network = SimpleNamespace(parameters_and_names=lambda: [("w", parameter)])
    assert ms.get_parameter_redundancy(network) == {"w": ((0, 1, 2),)}


def test_replicas_are_stored_once_by_turns() -> None:
    redundancy = {"a": ((0, 1),), "b": ((0, 1),), "c": ((0,), (1,))}
    assert ms.remove_param_redundancy(redundancy) == {0: {"a", "c"}, 1: {"b", "c"}}
    assert ms.remove_param_redundancy(redundancy, keep_redundancy=2) == {0: {"a", "b", "c"}, 1: {"a", "b", "c"}}
    assert ms.remove_param_redundancy(redundancy, 0) == {}
    assert ms.remove_param_redundancy({}) == {}
    with refused(ValueError, "out-of-range", "keep_redundancy", "-1"):
        ms.remove_param_redundancy(redundancy, -1)


def test_a_network_that_was_compiled_is_not_taken_for_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK_ID", "0")
    monkeypatch.setenv("RANK_SIZE", "4")

    class Compiled:
        parameter_layout_dict = {"w": [[2, 2], [1, -1], [2, 4], 0, True, ""], "gone": [[4], [0], [1], 0, True, ""]}  # noqa: RUF012

        def parameters_and_names(self) -> list[tuple[str, ms.Parameter]]:
            return [(name, ms.Parameter(np.zeros(2), name)) for name in ("w", "b")]

    assert ms.get_parameter_redundancy(Compiled()) == {"b": ((0, 1, 2, 3),), "w": ((0, 1), (2, 3))}


@pytest.mark.parametrize("run", ["tut_src8", "mix8_optsize2"])
def test_the_files_that_mindspore_has_deduplicated(mindspore_data: Path, run: str) -> None:
    redundancy = ms.get_parameter_redundancy(str(mindspore_data / f"real/{run}/strategy_0.ckpt"), 0)
    for rank, names in ms.remove_param_redundancy(redundancy).items():
        theirs = helpers.read_rank_file(mindspore_data / f"deduplicated/{run}/rank_{rank}/net.safetensors")
        assert names == set(theirs) & set(redundancy)


# get_ckpt_path_with_strategy


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sixteen ranks of which each four in a row hold the same, but for rank 2's missing file; this is rank 2."""
    rows = Layout.of([4, 4], [1])
    strategy_file(tmp_path / "strategy.ckpt", w=rows, **{"accu_grads.w": Layout.of([16], [0])})
    for rank in set(range(16)) - {2}:
        write_file(tmp_path / f"rank_{rank}/x-1_40.ckpt", {"w": np.full(2, rank // 4, np.float32)}, "ckpt")
    monkeypatch.setenv("RANK_ID", "2")
    return tmp_path


def found(ranks: Path, path: str = "rank_2/x-1_40.ckpt") -> str | None:
    result = ms.get_ckpt_path_with_strategy(str(ranks / path), str(ranks / "strategy.ckpt"))
    return None if result is None else result.removeprefix(f"{ranks}/")


def test_the_rank_s_own_checkpoint_is_found_or_a_replica_s(ranks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(ranks) == "rank_0/x-1_40.ckpt"
    assert found(ranks, "x.ckpt") is None
    monkeypatch.setenv("RANK_ID", "1")  # MindSpore finds `rank_1` in `rank_12` and loads that rank's weights
    assert found(ranks, "rank_12/x-1_40.ckpt") == "rank_0/x-1_40.ckpt"
    monkeypatch.setenv("RANK_ID", "2")
    for rank in (0, 1, 3):
        (ranks / f"rank_{rank}/x-1_40.ckpt").unlink()
    assert found(ranks) is None
    for path in ("rank_2/x-1_40.ckpt", "x.ckpt"):
        write_file(ranks / path, {"w": np.zeros(2, np.float32)}, "ckpt")
        assert found(ranks, path) == path


def test_a_replica_holds_the_same_of_every_parameter(ranks: Path) -> None:
    """Rank 2 shares one with 0, 1 and 3, the other with 0, 4, 6 and so on; MindSpore gives up, as neither has both."""
    strategy_file(ranks / "strategy.ckpt", w=Layout.of([4, 4], [1]), v=Layout.of([8, 2], [0]))
    assert found(ranks) == "rank_0/x-1_40.ckpt"
    (ranks / "rank_0/x-1_40.ckpt").unlink()
    assert found(ranks) is None
