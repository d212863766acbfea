"""Checkpoint 2.0 of MindSpore Transformers as a target: what is written is what its own code writes, and comes last."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import helpers
import numpy as np
import pytest
from checkpoints import assert_equal, blocks, numbers, write_file
from commands import done
from hypothesis import given
from hypothesis import strategies as st
from refusals import failed, refused
from samples import sampled
from written_checkpoint2 import (
    CASES,
    CUT,
    EVERYTHING,
    FULL,
    LISTED,
    MORE,
    NAMES,
    STATES,
    STRATEGIES,
    SUBMESH,
    TRACKER,
    metadata,
    opened,
    rows,
    whole_file,
)

import reshard
from reshard import Layout, Strategy
from reshard.errors import LayoutError, SourceError, UsageError
from reshard.formats.checkpoint2.options import Checkpoint2

if TYPE_CHECKING:
    from collections.abc import Mapping


@pytest.mark.parametrize("once", [False, True], ids=["every replica", "each block once"])
@pytest.mark.parametrize("name", CASES)
def test_real_ones_are_cut_otherwise(mindspore_data: Path, tmp_path: Path, name: str, once: bool) -> None:
    source, full = opened(mindspore_data, name)
    target = tmp_path / "run"
    plan = reshard.plan(source, rows(full), to="checkpoint2", remove_redundancy=once)
    plan.run(target, fsync=False)
    found = reshard.open(target)
    assert found.warnings == ()
    assert_equal(found, full)
    assert reshard.verify(target).equal
    held = [path for path in target.rglob("*.safetensors") for _ in helpers.read_rank_file(path)]
    blocks_there = sum(1 if once else 4 // (2 if key in rows(full).tensors else 1) for key in full)
    assert len(held) == (blocks_there + sum(key in rows(full).tensors for key in full) if once else 4 * len(full))


@pytest.mark.parametrize("name", [*CUT, *MORE])
def test_to_another_mesh_and_back_is_what_mindformers_writes(mindspore_data: Path, tmp_path: Path, name: str) -> None:
    """Files with equal names and tensors, and metadata that are equal as JSON: chunks and replica numbers in order."""
    source, full = opened(mindspore_data, name)
    reshard.plan(source, rows(full), to="checkpoint2").run(tmp_path / "rows", fsync=False)
    pattern = source.root
    plan = reshard.plan(
        reshard.open(tmp_path / "rows"), pattern, to="checkpoint2", remove_redundancy=name.endswith("once")
    )
    plan.run(tmp_path / "back", fsync=False)
    real, ours = Path(source.root), tmp_path / "back" / Path(source.root).name
    assert_equal(reshard.open(ours), full)
    assert {path.name for path in ours.iterdir()} == {path.name for path in real.iterdir()}
    assert (ours / "common.json").read_bytes() == (real / "common.json").read_bytes()
    said, is_said = metadata(ours), metadata(real)
    norms = {key for key in full if name == SUBMESH and "norm" in key}  # of which the real numbers are wrong
    assert said["state_dict_metadata"] == is_said["state_dict_metadata"]
    assert {k: v for k, v in said["storage_data"].items() if not any(n in k for n in norms)} == {
        k: v for k, v in is_said["storage_data"].items() if not any(n in k for n in norms)
    }
    layouts = [one["layout"] for one in said["state_dict_metadata"].values() if one["layout"]]
    assert all(
        list(one) == ["device_matrix", "tensor_map", "interleaved_parallel", "alias_name", "rank_list"]
        for one in layouts
    )
    for path in real.glob("*.safetensors"):
        theirs = {key: value for key, value in helpers.read_rank_file(path).items() if key not in norms}
        assert {k: v for k, v in helpers.read_rank_file(ours / path.name).items() if k not in norms} == theirs


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("name", STRATEGIES)
def test_ranks_of_a_strategy_become_one_and_back(tmp_path: Path, name: str, once: bool) -> None:
    one = STRATEGIES[name]
    for rank in one.ranks:
        held = {**blocks(FULL | STATES, one, rank), "global_step": EVERYTHING["global_step"]}
        write_file(tmp_path / f"ranks/rank_{rank}/a.safetensors", held)
    source = reshard.open(tmp_path / "ranks", strategy=one)
    reshard.plan(source, one, to="checkpoint2", remove_redundancy=once).run(tmp_path / "run", fsync=False)
    found = reshard.open(tmp_path / "run")
    assert found.warnings == ()
    assert_equal(found, EVERYTHING)
    assert all(metadata(Path(found.root))["state_dict_metadata"][key]["layout"] for key in LISTED)
    if not once:  # each rank's files have its blocks
        for rank in one.ranks:
            count = f"{rank:07d}-{len(one.ranks):07d}.safetensors"
            there = {}
            for kind in ("model", "opt"):
                there |= helpers.read_rank_file(Path(found.root) / f"checkpoint-{kind}-{count}")
            expected = blocks(FULL | STATES, one, rank)
            assert {key: value[2] for key, value in there.items() if key != "global_step"} == {
                key: value.tobytes() for key, value in expected.items()
            }
    reshard.plan(found, one).run(tmp_path / "back", fsync=False)
    for rank in one.ranks:
        back = helpers.read_rank_file(tmp_path / f"back/rank_{rank}/checkpoint_{rank}.safetensors")
        assert back == helpers.read_rank_file(tmp_path / f"ranks/rank_{rank}/a.safetensors")


def test_stages_that_cut_a_tensor_otherwise_leave_it_to_the_first(tmp_path: Path) -> None:
    """There is one layout for each name, and mindformers finds the blocks by that."""
    one = Strategy.of(
        {"emb": {0: Layout.of([2], [0, -1]), 1: Layout.of([2], [-1, 0])}, "norm": {1: Layout.of([2], [-1])}}
    )
    some = {name: FULL[name] for name in ("emb", "norm")}
    reshard.plan(whole_file(tmp_path, some), one, to="checkpoint2", target_step=1).run(tmp_path / "run", fsync=False)
    found = reshard.open(tmp_path / "run")
    assert_equal(found, some)
    said = metadata(Path(found.root))
    ranks = [place["storage_rank"] for key, v in said["storage_data"].items() if "emb" in key for place in v]
    assert ranks == [0, 1]
    assert {place["file_name"] for place in said["storage_data"]["('norm', (0,))"]} == {
        "checkpoint-model-0000002-0000004.safetensors", "checkpoint-model-0000003-0000004.safetensors"
    }  # fmt: skip


@given(
    matrix=st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=4),
    used=st.lists(st.booleans(), min_size=4, max_size=4),
    pieces=st.sampled_from([-1, 1, 2, 3, 4, 6, 8, 12]),
)
def test_optimizer_sharding_is_folded_into_the_map(matrix: list[int], used: list[bool], pieces: int) -> None:
    axes = [len(matrix) - 1 - axis for axis, is_used in zip(range(len(matrix)), used, strict=False) if is_used]
    layout = Layout.of(matrix, [axes[:1] or -1, axes[1:] or -1], pieces)
    shape = (2**12 * 3**4, 2**12 * 3**4)
    try:
        folded = layout.folded()
    except LayoutError:
        return
    assert folded.opt_weight_shard_size == 0
    assert folded.grid(shape) == layout.grid(shape)


@pytest.mark.parametrize(
    ("tensors", "name", "given", "step", "unknown"),
    [
        (EVERYTHING, "net.safetensors", None, 7, {"epoch_num", "step_num", "loss_scale", "global_batch_size"}),
        (EVERYTHING, "net-1_9.safetensors", None, 7, {"loss_scale", "global_batch_size"}),
        (FULL, "net-1_9.safetensors", None, 9, {"loss_scale", "global_batch_size"}),
        (FULL, "net-3_9.safetensors", 109, 109, {"loss_scale", "global_batch_size"}),
        (FULL, "net.safetensors", 0, 0, {"epoch_num", "step_num", "loss_scale", "global_batch_size"}),
        (
            {**FULL, "epoch_num": np.array(2), "step_num": np.array(5), "loss_scale": np.array([64], np.float32)},
            "net.safetensors", 105, 105, {"global_batch_size"},
        ),
        ({**FULL, "global_step": np.array([-1])}, "net-1_3.safetensors", None, 3, {"loss_scale", "global_batch_size"}),
        (
            {**FULL, "global_step": np.array([7.0]), "epoch_num": np.array([True])},
            "net-1_3.safetensors", None, 3, {"loss_scale", "global_batch_size"},
        ),
    ],
)  # fmt: skip
def test_the_step_and_what_is_known_of_it(
    tmp_path: Path, tensors: Mapping[str, Any], name: str, given: int | None, step: int, unknown: set[str]
) -> None:
    source = whole_file(tmp_path, tensors, name)
    plan = reshard.plan(source, to="checkpoint2", target_step=given)
    plan.run(tmp_path / "run", fsync=False)
    said = json.loads((tmp_path / "run" / f"iteration_{step:08d}" / "common.json").read_text())
    assert list(said) == NAMES  # any other is an error there
    assert said["global_step"] == step
    assert {key for key in NAMES[:5] if said[key] is None} == unknown
    assert (said["consumed_samples"], said["ckpt_status"]) == (None, None)
    assert [text for text in plan.warnings if "common.json" in text]
    assert (tmp_path / "run" / TRACKER).read_text() == f"{step}"
    if "loss_scale" in tensors:
        assert (said["epoch_num"], said["step_num"], said["loss_scale"]) == (2, 5, 64.0)


def test_a_source_that_does_not_say_its_step(tmp_path: Path) -> None:
    source = whole_file(tmp_path, FULL, "net-3_9.safetensors")
    with refused(UsageError, "missing-step", "step="):
        reshard.plan(source, to="checkpoint2")
    failed(
        2, "missing-step", "convert", tmp_path / "net-3_9.safetensors", tmp_path / "run", "--to", "checkpoint2",
        places=("net-3_9.safetensors", "--target-step"),
    )  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_another_step_than_the_source_says(mindspore_data: Path, tmp_path: Path) -> None:
    """`common.json` stays what it was: what is in it, the training knows. That it has another step is said."""
    source, full = opened(mindspore_data, "graph_dp2_tp4")
    plan = reshard.plan(source, to="checkpoint2", target_step=12345678901)
    assert "common.json has global_step 4, and the iteration is 12345678901" in plan.warnings
    assert not [text for text in reshard.plan(source, to="checkpoint2").warnings if "global_step" in text]
    plan.run(tmp_path, fsync=False)
    place = tmp_path / "iteration_12345678901"
    assert (place / "common.json").read_bytes() == (Path(source.root) / "common.json").read_bytes()
    assert_equal(reshard.open(tmp_path), full)


def test_a_directory_that_was_renamed(mindspore_data: Path, tmp_path: Path) -> None:
    source, full = opened(mindspore_data, "graph_dp2_tp4")
    shutil.copytree(source.root, tmp_path / "best")
    reshard.plan(reshard.open(tmp_path / "best"), rows(full), to="checkpoint2").run(tmp_path / "run", fsync=False)
    assert (tmp_path / "run" / TRACKER).read_text() == "4"
    place = tmp_path / "run" / "iteration_00000004"
    assert (place / "common.json").read_bytes() == (Path(source.root) / "common.json").read_bytes()


@pytest.mark.parametrize("value", [np.inf, np.nan, -1.0])
def test_a_number_that_json_does_not_have_is_not_known(tmp_path: Path, value: float) -> None:
    source = whole_file(tmp_path, {**FULL, "loss_scale": np.array([value], np.float32)})
    reshard.plan(source, to="checkpoint2", target_step=1).run(tmp_path / "run", fsync=False)
    said = json.loads((tmp_path / "run" / "iteration_00000001" / "common.json").read_text(), parse_constant=pytest.fail)
    assert said["loss_scale"] is None


def test_a_common_json_that_is_not_an_object_is_refused(tmp_path: Path) -> None:
    reshard.plan(whole_file(tmp_path), to="checkpoint2").run(tmp_path / "run", fsync=False)
    place = (tmp_path / "run" / "iteration_00000007").rename(tmp_path / "best")
    (place / "common.json").write_text("[7]")
    with refused(SourceError, "wrong-type", "common.json"):
        reshard.open(place)


def test_single_values_without_dimensions_are_written_so(tmp_path: Path) -> None:
    """mindformers writes [1] for them, and then cannot read that: `Slice dimension count (0) …`."""
    some = {"w": FULL["norm"], "learning_rate": np.array(0.5, np.float32)}
    for target in (None, Strategy.of({"w": Layout.of([2], [0])})):
        root = tmp_path / str(target is None)
        reshard.plan(whole_file(tmp_path, some), target, to="checkpoint2", target_step=1).run(root, fsync=False)
        found = reshard.open(root)
        assert_equal(found, some)
        held = helpers.read_rank_file(next(Path(found.root).glob("*-opt-0000000-*")))
        assert held["learning_rate"][1] == ()
    assert metadata(Path(found.root))["state_dict_metadata"]["learning_rate"]["global_shape"] == []


def test_tensors_that_the_strategy_does_not_name_are_whole_everywhere(tmp_path: Path) -> None:
    plan = reshard.plan(whole_file(tmp_path), Strategy.of({"emb": Layout.of([2], [0, -1])}), to="checkpoint2")
    assert "copied whole to every rank, as the target strategy does not name it: 7 tensors, " in plan.warnings[0]
    plan.run(tmp_path / "run", fsync=False)
    said = metadata(tmp_path / "run" / "iteration_00000007")["storage_data"]
    assert [place["storage_rank"] for place in said["('norm', (0,))"]] == [0, 1]


def test_text_is_kept(tmp_path: Path) -> None:
    source = whole_file(tmp_path, {**FULL, "note": "größe"})
    for target in (None, Strategy.of({"h.0.w": Layout.of([2], [0, -1])})):
        reshard.plan(source, target, to="checkpoint2", target_step=1).run(tmp_path / str(target is None), fsync=False)
        found = reshard.open(tmp_path / str(target is None))
        assert found.tensors["note"].text == "größe"


def test_values_of_each_rank_s_own_are_kept(tmp_path: Path) -> None:
    """Which no metadata could say."""
    one = STRATEGIES["optimizer parallel"]
    for rank in one.ranks:
        write_file(
            tmp_path / f"ranks/rank_{rank}/a.safetensors",
            {**blocks(FULL | STATES, one, rank), "seed": np.array([rank])},
        )
    source = reshard.open(tmp_path / "ranks", strategy=one, layout={"seed": "copy"})
    reshard.plan(source, one, to="checkpoint2", target_step=1).run(tmp_path / "run", fsync=False)
    place = tmp_path / "run" / "iteration_00000001"
    assert "seed" not in metadata(place)["state_dict_metadata"]
    for rank in one.ranks:
        found = helpers.read_rank_file(place / f"checkpoint-model-{rank:07d}-0000004.safetensors")
        assert found["seed"][2] == np.array([rank]).tobytes()


def test_blocks_that_the_format_cannot_say(tmp_path: Path) -> None:
    source = whole_file(tmp_path)
    with refused(SourceError, "not-divisible", "'norm'", "dimension 0 of size 12", "4 or 6"):
        reshard.plan(source, Strategy.of({"norm": Layout.of([5], [0])}), to="checkpoint2")
    with refused(SourceError, "unequal-blocks", "'norm'"):
        reshard.plan(source, Strategy.of({"norm": Layout.of([2], [0], param_split_shape=[5, 7])}), to="checkpoint2")
    with refused(SourceError, "unsupported-layout", "'norm'", "6 pieces"):
        reshard.plan(source, Strategy.of({"norm": Layout.of([4, 3, 3], [-1], 6)}), to="checkpoint2")
    for name in ("a\nb", "a\u2028b", " a", "a,b"):  # mindformers takes escapes as they stand, and spaces off
        odd = whole_file(tmp_path, {name: FULL["norm"]})
        with refused(SourceError, "bad-name"):
            reshard.plan(odd, Strategy.of({name: Layout.of([2], [0])}), to="checkpoint2", target_step=1)
    reshard.plan(odd, to="checkpoint2", target_step=1)  # where no metadata are


def test_what_does_not_go_with_it(tmp_path: Path, mindspore_data: Path) -> None:
    source, one = whole_file(tmp_path), STRATEGIES["tensor parallel"]
    for code, options in (
        ("needs-all-ranks", {"ranks": [0]}),
        ("needs-all-ranks", {"target_stage": 0}),
        ("not-encryptable", {"target_cipher": reshard.Cipher("AES-GCM", b"k" * 16)}),
    ):
        with refused(UsageError, code):
            reshard.plan(source, one, to="checkpoint2", **options)
    pattern = mindspore_data / "checkpoint2" / "graph_dp2_tp4" / "checkpoint"
    with refused(UsageError, "needs-strategy", pattern):
        reshard.plan(source, pattern)
    for wrong in ("a/b", ".a", "{rank}", "\n"):
        with refused(UsageError, "bad-name"):
            Checkpoint2(prefix=wrong)
    with refused(UsageError, "out-of-range", "step is -1", "0 to 999999999999999999"):
        Checkpoint2(-1)
    for common in ("[]", "{", "[" * 100_000):
        with refused(UsageError, "not-json", "common.json"):
            Checkpoint2(common=common)
    with refused(SourceError, "not-a-checkpoint"):
        reshard.plan(source, mindspore_data / "checkpoint2" / "graph_1" / "checkpoint", to="checkpoint2")


@pytest.mark.parametrize("prefix", ["", "a-model"])
def test_a_prefix(tmp_path: Path, prefix: str) -> None:
    reshard.plan(whole_file(tmp_path), to="checkpoint2", prefix=prefix).run(tmp_path / "run", fsync=False)
    begin = f"{prefix}-" if prefix else ""
    place = tmp_path / "run" / "iteration_00000007"
    assert (place / f"{begin}model-0000000-0000001.safetensors").is_file()
    assert_equal(reshard.open(tmp_path / "run"), EVERYTHING)


def test_what_is_not_there_is_said_to_be_that(tmp_path: Path) -> None:
    failed(
        4, "not-found", "strategy", "make", "--like", tmp_path / "nothere", "-o", tmp_path / "s.ckpt",
        places=(tmp_path / "nothere",),
    )  # fmt: skip
    with refused(UsageError, "bad-name"):
        Checkpoint2(prefix="x" * 300)


def test_states_that_the_target_has_no_place_for(tmp_path: Path) -> None:
    """The ledger says that they were dropped, so that they are not missing."""
    one = STRATEGIES["tensor parallel"]
    for rank in one.ranks:
        write_file(tmp_path / f"ranks/rank_{rank}/a.safetensors", blocks(FULL | STATES, one, rank))
    source = reshard.open(tmp_path / "ranks", strategy=one)
    weights = Strategy.of({name: one.tensors[name][0].layout for name in FULL})
    plan = reshard.plan(source, weights, to="checkpoint2", target_step=1)
    assert set(plan.dropped) == set(STATES)
    plan.run(tmp_path / "run")
    assert_equal(reshard.open(tmp_path / "run"), FULL)
    assert reshard.verify(tmp_path / "run").equal
    assert done("verify", tmp_path / "run").exit_code == 0


def test_a_source_need_not_count_steps_as_the_pattern_does(tmp_path: Path) -> None:
    """Trainings of the dynamic graph list `global_step`; it is in `common.json` too."""
    every = {name: FULL[name] for name in ("emb", "norm")} | {"global_step": np.array([7], np.int32)}
    layouts = Strategy.of({"emb": Layout.of([2], [0, -1])})
    reshard.plan(whole_file(tmp_path, every), layouts, to="checkpoint2").run(tmp_path / "like", fsync=False)
    pattern = tmp_path / "like"
    assert "global_step" in reshard.open(pattern)
    some = whole_file(tmp_path, {"emb": FULL["emb"], "norm": FULL["norm"]}, "some.safetensors")
    plan = reshard.plan(some, pattern, to="checkpoint2", target_step=4)
    assert plan.missing == ("global_step",)
    with refused(SourceError, "missing-tensor", "'norm'"):
        reshard.plan(
            whole_file(tmp_path, {"emb": FULL["emb"]}, "emb.safetensors"), pattern, to="checkpoint2", target_step=4
        )


def test_a_whole_weight_that_the_pattern_lacks_is_not_hidden_in_files(tmp_path: Path) -> None:
    """Nothing would load it: the metadata of a pattern's training do not list it."""
    some = {name: FULL[name] for name in ("emb", "norm")}
    layouts = Strategy.of({"emb": Layout.of([2], [0, -1])})
    reshard.plan(whole_file(tmp_path, {"emb": FULL["emb"]}), layouts, to="checkpoint2", target_step=4).run(
        tmp_path / "like"
    )
    pattern, source = tmp_path / "like", whole_file(tmp_path, some, "more.safetensors")
    with refused(SourceError, "not-in-strategy", "'norm'"):
        reshard.plan(source, pattern, to="checkpoint2", target_step=4)


EXPERTS = numbers({"mlp.experts.weight1": (48, 24), "mlp.experts.weight2": (48, 12), "norm": (12,)})


STACKS = {
    "planes": {"mlp.experts.weight1": (4, 12, 24), "mlp.experts.weight2": (4, 12, 12)},
    "rows": {"mlp.experts.weight1": (48, 24), "mlp.experts.weight2": (48, 12)},
}


@pytest.mark.parametrize(
    ("before", "after"),
    sampled(
        product(
            [[2, 2], [3, 2], [16, 1]],
            [[[2, 2], [1, 0]], [[4], [0, -1]], [[2, 3], [1, 0]], [[4], [-1, 0]]],
        ),
        3,
    ),
)
def test_experts_are_stacked_as_the_pattern_has_them(tmp_path: Path, before: list[int], after: list[Any]) -> None:
    """From rows one below the other to planes, whatever the source cuts, and back; both are bit-equal and verified."""
    matrix, (first, second) = after
    full = EXPERTS | {f"adam_m.{name}": value + 1 for name, value in EXPERTS.items() if "experts" in name}
    shapes = {
        kind: {f"{state}{n}": v for n, v in some.items() for state in ("", "adam_m.")} for kind, some in STACKS.items()
    }
    for kind, layout in (("planes", [first, second, -1]), ("rows", [first, -1])):
        there = {name: value.reshape(shapes[kind].get(name, value.shape)) for name, value in full.items()}
        one = Strategy.of(
            {name: Layout.of(matrix, layout) for name in shapes[kind]} | {"norm": Layout.of(matrix, [-1])}
        )
        plan = reshard.plan(whole_file(tmp_path, there, f"{kind}.safetensors"), one, to="checkpoint2", target_step=1)
        plan.run(tmp_path / f"{kind} pattern", fsync=False)
    ranks = Strategy.of({name: Layout.of(before, [1, 0]) for name in full if name != "norm"})
    for rank in ranks.ranks:
        write_file(tmp_path / f"ranks/rank_{rank}/a.safetensors", blocks(full, ranks, rank) | {"norm": full["norm"]})
    source = reshard.open(tmp_path / "ranks", strategy=ranks)
    for kind in STACKS:
        pattern = tmp_path / f"{kind} pattern"
        plan = reshard.plan(source, pattern, to="checkpoint2", target_step=2)
        assert "over the same bytes: " in plan.warnings[0]
        plan.run(tmp_path / kind, fsync=False)
        source = reshard.open(tmp_path / kind)
        assert_equal(source, {name: value.reshape(shapes[kind].get(name, value.shape)) for name, value in full.items()})
        assert reshard.verify(tmp_path / kind).equal
        for rank in plan.ranks:
            arrays = plan.rank(rank)
            held = helpers.read_rank_file(
                Path(source.root) / f"checkpoint-opt-{rank:07d}-{len(plan.ranks):07d}.safetensors"
            )
            for name, (_, shape, content) in held.items():
                assert (arrays[name].shape, arrays[name].compute().tobytes()) == (shape, content)


def test_other_shapes_than_the_pattern_s_are_refused(tmp_path: Path) -> None:
    other = whole_file(tmp_path, {"w": np.zeros((24, 48), np.float32)}, "other.safetensors")
    reshard.plan(other, Strategy.of({"w": Layout.of([2], [0, -1])}), to="checkpoint2", target_step=1).run(
        tmp_path / "other"
    )
    source = whole_file(tmp_path, {"w": np.zeros((48, 24), np.float32)})
    with refused(SourceError, "wrong-shape", "'w'", "[48, 24]", "[24, 48]"):
        reshard.plan(source, tmp_path / "other", to="checkpoint2", target_step=1)
