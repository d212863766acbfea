"""One stage of a pipeline where all of it was meant: refused, allowed where it is asked for, and counted then.

The pipeline is the tutorial's, 2 stages of 4 ranks; MindSpore wrote a strategy file for each of its ranks.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import helpers
import numpy as np
import pytest
from checkpoints import Array, blocks, dtype_name, numbers, tree, write_file, write_ranks
from commands import done, proposed
from refusals import failed, refused

import reshard
import reshard.mindspore as ms
from reshard import Layout, Strategy
from reshard.errors import SourceError, StrategyError, UsageError
from reshard.strategy.strategy import Operator

if TYPE_CHECKING:
    from pathlib import Path


FIRST, LAST = (0, "src_strategy_0.ckpt"), (1, "src_strategy_7.ckpt")
STEP = {"global_step": np.array(7, np.int32)}
ROWS = Layout.of([2], [0, -1])


@dataclass(frozen=True)
class Pipeline:
    """Whole tensors, and the same over the ranks of a pipeline and over 4 ranks without stages.

    Attributes:
        full: the whole tensors that a strategy names.
        files: the strategy file of each rank of the pipeline.
        all: the pipeline's strategy.
        source: the checkpoint of the pipeline.
        whole: a file of whole tensors.
        four: the checkpoint of 4 ranks.
        four_strategy: its strategy file.
    """

    full: dict[str, Array]
    files: Path
    all: Strategy
    source: Path
    whole: Path
    four: Path
    four_strategy: Path

    def of(self, stage: int) -> dict[str, Array]:
        return {name: value for name, value in self.full.items() if stage in self.all.stages_of(name)}


@pytest.fixture(scope="module")
def pipeline(mindspore_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    root = tmp_path_factory.mktemp("pipeline")
    files = mindspore_data / "strategies" / "pipe_tut8_ckpt"
    four = mindspore_data / "real" / "tut_dst4_opt" / "strategy_0.ckpt"
    opened = reshard.open(mindspore_data / "real" / "tut_dst4_opt" / "ckpt", strategy=four)
    full = {name: opened[name].compute() for name, tensor in opened.tensors.items() if tensor.listed}
    everything = reshard.read_strategy(files)
    return Pipeline(
        full,
        files,
        everything,
        write_ranks(root / "pipeline", full, everything, "ckpt", STEP),
        write_file(root / "whole.ckpt", {**full, **STEP}, "ckpt"),
        write_ranks(root / "four", full, reshard.read_strategy(four), "ckpt", STEP),
        four,
    )


def assert_refused(option: str, stage: int, *words: str | Path) -> None:
    ranks = f"{4 * stage}-{4 * stage + 3}" if option == "--ranks" else stage
    result = failed(4, "one-stage", *words, places=(f"stage {stage} ", f"{option} {ranks}"))
    assert not result.stdout or json.loads(result.stdout)["error"]["exit_code"] == 4


def held(pipeline: Pipeline, rank: int) -> dict[str, Any]:
    """What a rank of the pipeline holds, as `helpers.read_rank_file` gives it."""
    found = {**blocks(pipeline.full, pipeline.all, rank), **STEP}
    return {name: (dtype_name(a), a.shape, np.ascontiguousarray(a).tobytes()) for name, a in found.items()}


# --- the source's ---


@pytest.mark.parametrize(("stage", "name"), [FIRST, LAST])
@pytest.mark.parametrize(
    "words",
    [
        ["convert", "SOURCE", "OUT", "FILE", "TARGET"],
        ["convert", "SOURCE", "OUT", "FILE", "TARGET", "-q"],
        ["convert", "SOURCE", "OUT", "FILE", "TARGET", "--json"],
        ["convert", "SOURCE", "OUT", "FILE", "TARGET", "--dry-run"],
        ["convert", "SOURCE", "OUT", "FILE"],
        ["convert", "--to=mindspore", "SOURCE", "OUT", "FILE"],
        ["convert", "SOURCE", "OUT", "FILE", "--to", "zarr"],
        ["plan", "SOURCE", "FILE", "TARGET", "-o", "OUT"],
        ["plan", "SOURCE", "FILE", "--to", "hf"],
        ["inspect", "SOURCE", "FILE"],
        ["verify", "FOUR", "VERIFIED", "--against", "SOURCE", "FILE"],
    ],
    ids=" ".join,
)
def test_a_source_strategy_of_one_stage_is_refused(
    pipeline: Pipeline, tmp_path: Path, words: list[str], stage: int, name: str
) -> None:
    meant: dict[str, list[str | Path]] = {
        "SOURCE": [pipeline.source],
        "FOUR": [pipeline.four],
        "OUT": [tmp_path / "out"],
        "FILE": ["--source-strategy", pipeline.files / name],
        "TARGET": ["--target-strategy", pipeline.four_strategy],
        "VERIFIED": ["--target-strategy", pipeline.four_strategy],
    }
    assert_refused("--stage", stage, *(part for word in words for part in meant.get(word, [word])))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("stage", "name"), [FIRST, LAST])
@pytest.mark.parametrize("all_stages", [False, True])
def test_a_stage_of_the_source_that_is_asked_for_says_what_others_have(
    pipeline: Pipeline, tmp_path: Path, stage: int, name: str, all_stages: bool
) -> None:
    """From the stage's own file and from that of all; with a target strategy and to whole tensors."""
    others = sorted(pipeline.of(1 - stage))
    strategy = pipeline.files if all_stages else pipeline.files / name
    read = [pipeline.source, tmp_path / "out", "--source-strategy", strategy, "--stage", str(stage)]
    command = ["convert", *read, "--target-strategy", pipeline.four_strategy]
    for more in (["--dry-run"], []):
        told = json.loads(done(*command, *more, "--json").stdout)
        assert sorted(told["missing"]) == others
        assert told["dropped"] == []
    assert [file["path"] for file in told["files"]] == [f"rank_{r}/checkpoint_{r}_part{stage}.ckpt" for r in range(4)]
    assert done(*shlex.split(told["verify"])[1:]).exit_code == 0
    missing = [name for name in [*others, *pipeline.all.tensors] if name in others or name.startswith("accu_grads")]
    whole = json.loads(done("convert", *read[:1], tmp_path / "whole", *read[2:], "--json").stdout)
    assert set(others) <= set(whole["missing"]) <= set(missing)
    assert [file["path"] for file in whole["files"]] == [f"rank_0/checkpoint_0_part{stage}.ckpt"]
    told = json.loads(done("convert", "--to=mindspore", *read[:1], tmp_path / "set", *read[2:], "--json").stdout)
    assert told["missing"] == whole["missing"]
    report = done("convert", *read[:1], tmp_path / "words", *command[3:], "-v")
    assert re.search(rf"missing +{len(others)} names: ", report.stdout)


def test_python_is_asked_for_the_stage_too(pipeline: Pipeline, tmp_path: Path) -> None:
    for stage, name in (FIRST, LAST):
        for strategy in (pipeline.files / name, pipeline.all.of_stage(stage)):
            with refused(StrategyError, "one-stage", f"stage {stage} of a pipeline", f"stage={stage}"):
                reshard.open(pipeline.source, strategy=strategy)
            for given in (stage, "own"):
                source = reshard.open(pipeline.source, strategy=strategy, stage=given)
                opening = source._record.opening
                assert (opening.stage, opening.elsewhere) == (stage, set(pipeline.of(1 - stage)))
        assert set(reshard.plan(source).missing) >= set(pipeline.of(1 - stage))
        some = reshard.plan(source.sel("global_step"))  # what `sel` leaves out is not missed
        assert not set(some.missing) & set(pipeline.of(1 - stage))
        planned = reshard.plan(source, reshard.read_strategy(pipeline.four_strategy))
        planned.save(tmp_path / f"{stage}.json")
        assert reshard.read_plan(tmp_path / f"{stage}.json").missing == planned.missing
    with refused(UsageError, "bad-argument", "'both'"):
        reshard.open(pipeline.source, strategy=pipeline.all, stage="both")  # type: ignore[arg-type]
    with refused(StrategyError, "no-such-stage", "stage 0", "it has 1"):
        reshard.open(pipeline.source, strategy=pipeline.files / LAST[1], stage=0)


def test_a_weight_of_the_stage_itself_is_missed_as_before(pipeline: Pipeline, tmp_path: Path) -> None:
    write_ranks(tmp_path, {n: v for n, v in pipeline.full.items() if n != "net.layer1.bias"}, pipeline.all, "ckpt")
    source = reshard.open(tmp_path, strategy=pipeline.files / FIRST[1], stage=0)
    with refused(SourceError, "missing-tensor", "'net.layer1.bias'"):
        reshard.plan(source)


# --- the target's ---


@pytest.mark.parametrize(("stage", "name"), [FIRST, LAST])
@pytest.mark.parametrize("more", [[], ["-q"], ["--json"], ["--dry-run"], ["--drop", "*"]], ids=" ".join)
def test_a_target_strategy_of_one_stage_is_refused(
    pipeline: Pipeline, tmp_path: Path, stage: int, name: str, more: list[str]
) -> None:
    """From whole tensors, whose every weight would go whole to each rank; from ranks; from another pipeline."""
    target = ["--target-strategy", pipeline.files / name, *more]
    for read in (
        [pipeline.whole],
        [pipeline.four, "--source-strategy", pipeline.four_strategy],
        [pipeline.source, "--source-strategy", pipeline.files],
    ):
        assert_refused("--ranks", stage, "convert", read[0], tmp_path / "out", *read[1:], *target)
        if more not in (["--json"], ["--dry-run"]):
            assert_refused("--ranks", stage, "plan", *read, *target)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("stage", "name"), [FIRST, LAST])
@pytest.mark.parametrize("all_stages", [False, True])
def test_a_stage_of_the_target_that_is_asked_for(
    pipeline: Pipeline, tmp_path: Path, stage: int, name: str, all_stages: bool
) -> None:
    """The files are those that the whole target has of these ranks: nobody else writes a part of them."""
    strategy = pipeline.files if all_stages else pipeline.files / name
    target = ["--target-strategy", strategy, "--ranks", f"{4 * stage}-{4 * stage + 3}"]
    ranks = range(4 * stage, 4 * stage + 4)
    command = ["convert", pipeline.four, tmp_path / "out", "--source-strategy", pipeline.four_strategy, *target]
    result = done(*command, "-v")
    paths = [f"rank_{rank}/checkpoint_{rank}.ckpt" for rank in ranks]
    assert sorted(tree(tmp_path / "out")) == paths
    for rank in ranks:
        assert helpers.read_rank_file(tmp_path / "out" / paths[rank % 4]) == held(pipeline, rank)
    assert done(*proposed(result)).exit_code == 0
    told = json.loads(done(*command, "--overwrite", "--restart", "--json").stdout)
    assert sorted(told["dropped"]) == ([] if all_stages else sorted(pipeline.of(1 - stage)))
    assert done(*shlex.split(told["verify"])[1:]).exit_code == 0
    done("plan", pipeline.four, *command[3:], "-o", tmp_path / "plan.json")
    told = json.loads(done("run", tmp_path / "plan.json", tmp_path / "planned", "--json").stdout)
    assert tree(tmp_path / "planned") == tree(tmp_path / "out")
    assert done(*shlex.split(told["verify"])[1:]).exit_code == 0


def test_stages_of_a_target_are_written_beside_each_other(pipeline: Pipeline, tmp_path: Path) -> None:
    """A strategy for each stage makes two checkpoints of it, of which none is meant; that of all stages makes one."""
    read = ["--source-strategy", pipeline.four_strategy]
    for strategies, known in (([pipeline.files / FIRST[1], pipeline.files / LAST[1]], [True, False]),
                              ([pipeline.files, pipeline.files], [True, True])):  # fmt: skip
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        for stage, (strategy, is_known) in enumerate(zip(strategies, known, strict=True)):
            target = ["--target-strategy", strategy, "--target-stage", str(stage)]
            ranks = [*target[:2], "--ranks", f"{4 * stage}-{4 * stage + 3}"]
            told = json.loads(done("convert", pipeline.four, tmp_path / "out", *read, *ranks, "--json").stdout)
            assert (told["verify"] is not None) == is_known
            if is_known:
                assert done(*shlex.split(told["verify"])[1:]).exit_code == 0
            assert done("verify", tmp_path / "out", *target, "--against", pipeline.four, *read).exit_code == 0
    for rank in pipeline.all.ranks:
        found = helpers.read_rank_file(tmp_path / "out" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt")
        assert found == held(pipeline, rank)
    assert_refused("--target-stage", 0, "verify", tmp_path / "out", "--target-strategy", pipeline.files / FIRST[1])


def test_a_stage_of_the_target_in_python(pipeline: Pipeline) -> None:
    source = reshard.open(pipeline.four, strategy=pipeline.four_strategy)
    for stage, name in (FIRST, LAST):
        for one in (reshard.read_strategy(pipeline.files / name), pipeline.all.of_stage(stage)):
            with refused(StrategyError, "one-stage", f"stage {stage}", f"target_stage={stage}"):
                reshard.plan(source, one)
            for chosen in ({"target_stage": stage}, {"ranks": range(4 * stage, 4 * stage + 4)}):
                assert reshard.plan(source, one, **chosen).ranks == tuple(range(4 * stage, 4 * stage + 4))
        assert reshard.plan(source, pipeline.all, target_stage=stage, ranks=[4 * stage]).ranks == (4 * stage,)
        with refused(UsageError, "no-such-rank", f"rank {4 - 4 * stage} ", f"stage {stage}"):
            reshard.plan(source, pipeline.all, target_stage=stage, ranks=[4 - 4 * stage])
    with refused(StrategyError, "no-such-stage", "stage 2", "0, 1"):
        reshard.plan(source, pipeline.all, target_stage=2)
    with refused(UsageError, "missing-strategy", "stage 0"):
        reshard.plan(source, target_stage=0)


# --- whether a file is of one stage ---


def test_the_first_stage_s_file_is_known_by_those_beside_it(pipeline: Pipeline, tmp_path: Path) -> None:
    """By that of the highest rank, in the name of which the rank is the last number, or stands twice."""
    first, last = pipeline.files / FIRST[1], pipeline.files / LAST[1]

    def beside(own: str, *others: str, of: Path = last) -> bool:
        folder = tmp_path / "-".join([own, *others])
        folder.mkdir()
        shutil.copy(first, folder / own)
        for other in others:
            shutil.copy(of, folder / other)
        return reshard.read_strategy(folder / own).others

    assert reshard.read_strategy(first).others
    assert beside("strategy_0.ckpt", "strategy_7.ckpt")
    assert beside("s_3.ckpt", "s_12.ckpt", "s_4.ckpt")
    assert beside("rank_0_rank_0.ckpt", "rank_4_rank_4.ckpt")
    assert not beside("strategy.ckpt", "strategy_7.ckpt")
    assert not beside("run_0_s_0.ckpt", "run_1_s_7.ckpt")
    assert not beside("strategy_1.ckpt")
    assert not beside("a_0.ckpt", "a_3.ckpt", of=first)  # a rank of the same stage
    assert not beside("b_0.ckpt", "b_7.ckpt", of=pipeline.whole)
    assert not beside("c_0.ckpt", "c_7.ckpt", of=pipeline.four_strategy)
    assert repr(reshard.read_strategy(first)).endswith("(stage 0 of a pipeline)>")
    assert "stage 0 of a longer pipeline" in done("strategy", "show", first).stdout
    assert not pipeline.all.others


# --- a stage that has operators and no tensors ---


@pytest.mark.parametrize("extension", ["ckpt", "json"])
def test_a_stage_without_tensors_has_ranks(tmp_path: Path, extension: str) -> None:
    """The last of a merged file's as one between others: its ranks get what no strategy names."""
    full = numbers({"w": (4, 2), "v": (2, 2)})
    merged = Strategy.of({"w": {0: ROWS}, "v": {1: ROWS}})
    operators = tuple(Operator(f"op{stage}", stage, ((2, 1),)) for stage in range(3))
    reshard.write_strategy(replace(merged, operators=operators), tmp_path / f"s.{extension}")
    target = reshard.read_strategy(tmp_path / f"s.{extension}")
    assert (target.stages, target.ranks) == (range(3), range(6))
    before = Strategy.of({"w": ROWS, "v": ROWS})
    source = reshard.open(write_ranks(tmp_path / "src", full, before, also=STEP), strategy=before)
    reshard.plan(source, target).run(tmp_path / "out")
    for rank in range(6):
        found = helpers.read_rank_file(tmp_path / "out" / f"rank_{rank}" / f"checkpoint_{rank}.safetensors")
        assert set(found) == {*blocks(full, merged, rank), "global_step"}
    again = reshard.open(tmp_path / "out", strategy=target)
    assert all(np.array_equal(again[name].compute(), value) for name, value in full.items())
    assert reshard.verify(tmp_path / "out", target, against=source).equal


# --- MindSpore's names ---


def test_mindspores_names_take_the_target_s_stage_for_no_model(pipeline: Pipeline, tmp_path: Path) -> None:
    """MindSpore copies what a target strategy does not name; the weights of other stages would be lost here."""
    for stage, name in (FIRST, LAST):
        source = (pipeline.four, tmp_path / "out", "checkpoint_", pipeline.four_strategy)
        with refused(StrategyError, "one-stage", f"stage {stage}"):
            ms.transform_checkpoints(*source, pipeline.files / name)
        ms.unified_safetensors(pipeline.four, pipeline.four_strategy, tmp_path / "set")
        with refused(StrategyError, "one-stage", f"stage {stage}"):
            ms.load_distributed_checkpoint(
                None, predict_strategy=pipeline.files / name, format="safetensors",
                unified_safetensors_dir=tmp_path / "set", dst_safetensors_dir=tmp_path / "out",
            )  # fmt: skip
    assert not (tmp_path / "out").exists()
