"""Megatron-LM's `mp_rank_TT_PPP/model_optim_rng.pt`: real cases give the whole tensors, and each lie is refused."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import assert_equal
from commands import done
from refusals import failed, refused
from saves_files import Made, tensor, write_save
from tensor_parallel import megatron, nested, part_of, random, write_megatron

import reshard
from reshard.errors import SourceError, StrategyError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

CASES = ["plain", "virtual"]
FULL = megatron()
EMBEDDING = "embedding.word_embeddings.weight"
NORM = "decoder.layers.1.input_layernorm.weight"


@pytest.fixture(params=CASES)
def case(mindspore_data: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return shutil.copytree(mindspore_data / "megatron_legacy" / request.param, tmp_path / "case")


def full_of(case: Path) -> Mapping[str, Any]:
    return dict(np.load(case / "full.npz"))


# --- real files ---


def test_a_real_one_is_its_whole_tensors(case: Path) -> None:
    run = case / "checkpoint"
    for root in (run, run / "iter_0000005"):
        source = reshard.open(root)
        assert_equal(source, full_of(case))
        assert not source.warnings
        assert not source.unreadable
    assert_equal(reshard.open(run, step=5), full_of(case))
    (row,) = json.loads(done("inspect", run, "--json").stdout)["iterations"]
    assert row["nbytes"] == sum(path.stat().st_size for path in run.rglob("*.pt"))
    (run / "latest_checkpointed_iteration.txt").write_text("6")
    with refused(SourceError, "no-such-iteration"):
        reshard.open(run)


def test_one_file_of_a_real_one_is_refused(case: Path) -> None:
    """Also if only the stages of one part are there."""
    root = case / "checkpoint" / "iter_0000005"
    for path in sorted(root.rglob("*.pt")):
        with refused(SourceError, "one-of-several", path, "iter_0000005"):
            reshard.open(path)
    shutil.rmtree(root / "mp_rank_01_000")
    shutil.rmtree(root / "mp_rank_01_001")
    with refused(SourceError, "one-of-several", "mp_rank_00_000"):
        reshard.open(root / "mp_rank_00_000" / "model_optim_rng.pt")
    with refused(SourceError, "missing-ranks", "part 1 of stage 0"):
        reshard.open(root)
    alone = shutil.copy(root / "mp_rank_00_000" / "model_optim_rng.pt", case / "model.pt")
    with refused(SourceError, "one-of-several", "model.pt"):
        reshard.open(alone)


def test_the_only_file_is_opened_as_any_other(tmp_path: Path) -> None:
    path = write_megatron(tmp_path, FULL, [[4]], 1) / "mp_rank_00" / "model_optim_rng.pt"
    assert_equal(reshard.open(path), {f"model.{name}": array for name, array in FULL.items()})


# --- other shapes of a training ---


@pytest.mark.parametrize(
    ("layers", "parts"),
    [
        ([[4]], 1), ([[4]], 2), ([[4]], 4), ([[2, 2]], 1), ([[1, 3]], 2), ([[0, 4]], 2),
        ([[1, 1], [1, 1]], 2), ([[0, 1], [2, 1]], 1), ([[1, 1, 0], [0, 1, 1]], 2),
    ],
)  # fmt: skip
def test_parts_stages_and_virtual_stages(tmp_path: Path, layers: list[list[int]], parts: int) -> None:
    """Layers are numbered on, however many a stage has."""
    source = reshard.open(write_megatron(tmp_path, FULL, layers, parts))
    assert_equal(source, FULL)
    assert not source.unreadable


def test_names_of_before(tmp_path: Path) -> None:
    """Nested dicts; the output layer is tied to the embedding, and has a name of its own in the last stage."""
    full = megatron(old=True, gated=False)
    embedding = full["language_model.embedding.word_embeddings.weight"]
    del full["language_model.output_layer.weight"]

    def change(stage: int, part: int, value: dict[str, Any]) -> None:
        value["model"] = nested(value["model"])
        if stage == 1:
            copy = tensor(part_of(embedding, 0, part, 2))
            value["model"]["word_embeddings_for_head"] = {"weight": copy}

    args = {
        "swiglu": False, "untie_embeddings_and_output_weights": "left out", "group_query_attention": "left out",
        "num_query_groups": "left out", "num_attention_heads": 4, "kv_channels": None,
    }  # fmt: skip
    full |= {name: np.concatenate([array, array[:8]]) for name, array in full.items() if "query_key_value" in name}
    source = reshard.open(write_megatron(tmp_path, full, [[2, 2]], 2, args=args, change=change))
    assert_equal(source, full)
    assert len(source.tensors["language_model.embedding.word_embeddings.weight"].shards[0].replicas) == 2


def test_queries_keys_and_values_of_the_first_format(tmp_path: Path) -> None:
    """Their parts hold all queries, then all keys: joining them would mix them. They are refused by name."""
    full = megatron(old=True)
    names = {name for name in full if "query_key_value" in name}

    def change(_stage: int, _part: int, value: dict[str, Any]) -> None:
        del value["checkpoint_version"]
        value["model"] = nested(value["model"])

    source = reshard.open(write_megatron(tmp_path / "iter_0000005", full, [[4]], 2, change=change))
    assert set(source.unreadable) == names
    assert_equal(source, full, but=tuple(names))


def test_names_of_transformer_engine(tmp_path: Path) -> None:
    whole = random({
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": (8,),
        "decoder.layers.0.self_attention.q_layernorm.weight": (2,),
        "decoder.layers.0.mlp.shared_experts.gate_weight": (1, 8),
        "decoder.layers.0.self_attention.linear_proj.bias": (8,),
    })  # fmt: skip

    def change(_stage: int, part: int, value: dict[str, Any]) -> None:
        value["model"] |= {name: tensor(array) for name, array in whole.items()}
        value["model"]["decoder.layers.0.mlp.linear_fc1._extra_state"] = tensor(np.zeros(3 + part, np.uint8))
        value["model"]["decoder.layers.0.mlp.linear_fc2._extra_state"] = Made("BytesIO", b"x", module="io")
        value["model"]["decoder.layers.1.mlp.linear_fc2._extra_state"] = None

    source = reshard.open(write_megatron(tmp_path, FULL, [[4]], 2, change=change))
    assert_equal(source, {**FULL, **whole})
    assert {name for name in source._record.extras.objects if "extra" in name} == {
        f"decoder.layers.0.mlp.linear_fc{number}._extra_state" for number in (1, 2)
    }


def test_an_embedding_that_several_stages_have(tmp_path: Path) -> None:
    """As for predicting several tokens, or with tied weights; the copies have to be equal."""

    def shared(by: float) -> Callable[[int, int, dict[str, Any]], None]:
        def change(stage: int, part: int, value: dict[str, Any]) -> None:
            if stage:
                copy = part_of(FULL[EMBEDDING], 0, part, 2) + np.float32(by)
                value["model"] |= dict.fromkeys(("output_layer.weight", EMBEDDING), tensor(copy))

        return change

    args = {"untie_embeddings_and_output_weights": False}
    full = {name: array for name, array in FULL.items() if name != "output_layer.weight"}
    root = write_megatron(tmp_path / "tied", FULL, [[2, 2]], 2, args=args, change=shared(0))
    source = reshard.open(root)
    assert_equal(source, full)
    assert [len(shard.replicas) for shard in source.tensors[EMBEDDING].shards] == [3, 3]
    root = write_megatron(tmp_path / "differing", FULL, [[2, 2]], 2, args=args, change=shared(1))
    with refused(SourceError, "replicas-differ", EMBEDDING):
        reshard.open(root)
    with refused(SourceError, "replicas-differ", EMBEDDING):  # args say that they are tied
        reshard.open(write_megatron(tmp_path / "lie", FULL, [[4]], 2, args=args))


# --- the optimizer ---


def states(stage: int, part: int, value: dict[str, Any]) -> None:
    value["optimizer"] = {"optimizer": {"state": {0: {"exp_avg": tensor(np.zeros(9 + stage + part, np.float32))}}}}
    value["rng_state"] = [{"torch_rng_state": tensor(np.zeros(5, np.uint8))}]
    value["opt_param_scheduler"] = {"num_steps": 5}


def test_the_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    root = write_megatron(tmp_path / "src", FULL, [[2, 2]], 2, change=states)
    write_save(root / "mp_rank_00_000" / "distrib_optim.pt", {0: {"exp_avg": tensor(np.zeros(9, np.float32))}})
    source = reshard.open(root)
    assert_equal(source, FULL)
    files = {f"optimizer.state.{name}.pt" for name in ("model_optim_rng", "distrib_optim")}
    assert set(source.unreadable) == files
    assert {"args", "iteration", "rng_state", "opt_param_scheduler"} <= set(source._record.extras.objects)
    failed(4, "unreadable-tensor", "convert", root, tmp_path / "dst", "--to", "hf", places=(*files, "--drop"))
    done("convert", root, tmp_path / "dst", "--to", "hf", "--weights-only")
    assert_equal(reshard.open(tmp_path / "dst"), FULL)
    assert reshard.verify(tmp_path / "dst").equal


def test_states_in_directories_of_data_parallel_ranks(tmp_path: Path) -> None:
    """As the distributed optimizer of 2022 has them."""
    root = write_megatron(tmp_path, FULL, [[4]], 2, name="model_rng.pt")
    for part in range(2):
        for rank in range(2):
            write_save(root / f"mp_rank_{part:02d}_{rank:03d}" / "optim.pt", {"shard": tensor(FULL[NORM])})
    source = reshard.open(root)
    assert_equal(source, FULL)
    assert set(source.unreadable) == {"optimizer.state.optim.pt"}


# --- files and arguments that do not go together ---


def lie(**args: Any) -> Callable[[Path], Path]:
    return lambda root: write_megatron(root, FULL, [[2, 2]], 2, args=args)


def spoilt(change: Callable[[int, int, dict[str, Any]], object]) -> Callable[[Path], Path]:
    return lambda root: write_megatron(root, FULL, [[2, 2]], 2, change=change)


def of_one(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], Path]:
    """Spoils the file of part 1 of stage 1."""
    return spoilt(lambda stage, part, value: change(value) if stage and part else None)


def renamed(model: dict[str, Any], before: str, after: str) -> None:
    for name in [name for name in model if before in name]:
        model[name.replace(before, after)] = model.pop(name)


def moved(before: str, after: str) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        shutil.copytree(lie()(root) / before, root / after, dirs_exist_ok=True)
        return root

    return make


def without(name: str) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        shutil.rmtree(lie()(root) / name)
        return root

    return make


def with_args(value: object) -> Callable[[Path], Path]:
    return spoilt(lambda _stage, _part, file: file.update(args=value))


NAMESPACE = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
BROKEN: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "fewer parts": (lie(tensor_model_parallel_size=1), "no-such-rank", "part 1 of stage 0"),
    "more parts": (lie(tensor_model_parallel_size=4), "missing-ranks", "part 2 of stage 0"),
    "stages without end": (lie(pipeline_model_parallel_size=1 << 60), "missing-ranks", "part 0 of stage 2"),
    "fewer stages": (lie(pipeline_model_parallel_size=1), "no-such-rank", "part 0 of stage 1"),
    "virtual stages": (lie(virtual_pipeline_model_parallel_size=2), "files-disagree", "2 virtual stages"),
    **{f"parts {value!r}": (lie(tensor_model_parallel_size=value), "no-layout", "tensor_model_parallel_size")
       for value in ("left out", "2", True, 0, 1 << 70)},
    "another size": (lie(hidden_size=16), "wrong-shape", "args says"),
    "more layers": (lie(num_layers=5), "missing-layers", "4 layers"),
    "args of nothing": (with_args(None), "no-layout", "mp_rank_00_000"),
    "args of a dict": (with_args(NAMESPACE), "no-layout", "mp_rank_00_000"),
    "args of another class": (with_args(Made("Space", state=NAMESPACE, module="m")), "no-layout", "mp_rank_00_000"),
    "no model": (spoilt(lambda _stage, _part, value: value.pop("model")), "not-a-checkpoint", "mp_rank_00_000"),
    "model1 alone": (
        spoilt(lambda _stage, _part, value: value.update(model1=value.pop("model"))), "not-a-checkpoint", "model1",
    ),
    "model and model0": (
        spoilt(lambda _stage, _part, value: value.update(model0=value["model"])), "not-a-checkpoint", "model0",
    ),
    "a model of a tensor": (
        spoilt(lambda _stage, _part, value: value.update(model=tensor(FULL[NORM]))), "not-a-state-dict", "mp_rank_00",
    ),
    "a model of a list": (spoilt(lambda _stage, _part, value: value.update(model=[1])), "no-tensors", ""),
    "a list": (lambda root: write_save(root / "mp_rank_00" / "model_optim_rng.pt", [1]).parents[1],
               "not-a-checkpoint", "mp_rank_00"),
    "another iteration": (of_one(lambda value: value.update(iteration=6)), "files-disagree", "iteration"),
    "another version": (of_one(lambda value: value.update(checkpoint_version=2.0)), "files-disagree", "version"),
    "another number of models": (
        of_one(lambda value: value.update(model0=value["model"], model1=value.pop("model"))),
        "files-disagree", "virtual stages",
    ),
    "layers that do not begin at 0": (
        spoilt(lambda _stage, _part, value: renamed(value["model"], "layers.0.", "layers.7.")),
        "missing-layers", "decoder.layers",
    ),
    "layers in one part alone": (
        of_one(lambda value: renamed(value["model"], "layers.1.", "layers.2.")), "missing-layers", "5 layers",
    ),
    "a part that is missing": (without("mp_rank_01_000"), "missing-ranks", "part 1 of stage 0"),
    "a stage that is missing": (without("mp_rank_00_001"), "missing-ranks", "part 0 of stage 1"),
    "a rank too many": (moved("mp_rank_01_001", "mp_rank_01_007"), "no-such-rank", "stage 7"),
    "a rank twice": (moved("mp_rank_01_001", "mp_rank_001_001"), "duplicate-rank", "part 1 of stage 1"),
    "parts of tensors that are the same": (moved("mp_rank_00_000", "mp_rank_01_000"), "saved-whole", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_do_not_go_together(tmp_path: Path, name: str) -> None:
    make, code, place = BROKEN[name]
    root = make(tmp_path / "src")
    with refused(SourceError, code, place):
        reshard.open(root)


def test_files_of_another_training(tmp_path: Path) -> None:
    """With the same arguments: what all parts have alike is refused by name."""
    root = write_megatron(tmp_path / "src", FULL, [[4]], 2)
    other = write_megatron(tmp_path / "other", {name: array + 1 for name, array in FULL.items()}, [[4]], 2)
    shutil.copytree(other / "mp_rank_01", root / "mp_rank_01", dirs_exist_ok=True)
    source = reshard.open(root)
    assert set(source.unreadable) == {name for name in FULL if "norm" in name}
    assert "layout" in source.unreadable[NORM]
    failed(4, "unreadable-tensor", "convert", "--to=mindspore", root, tmp_path / "dst", places=("norm",))
    drifted = reshard.open(root, layout={"*norm.weight": "copy"})
    assert set(drifted) == set(FULL)
    assert any("differs between the ranks" in line for line in drifted.warnings)


def test_a_release(tmp_path: Path) -> None:
    """It has no number, and is opened by its own path, or as the only one of a run."""
    root = write_megatron(tmp_path / "run" / "release", FULL, [[4]], 2)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("release")
    for opened in (root, tmp_path / "run"):
        assert_equal(reshard.open(opened), FULL)
    done("convert", tmp_path / "run", tmp_path / "dst", "--to", "hf")
    assert reshard.verify(tmp_path / "dst").equal
    with refused(SourceError, "no-such-iteration", tmp_path / "run"):
        reshard.open(tmp_path / "run", step=5)


def test_rules_of_the_user_win(tmp_path: Path) -> None:
    """For a layer whose name is not known, and for one that is cut otherwise than usual."""
    extra = np.arange(64, dtype=np.float32).reshape(16, 4)

    def change(_stage: int, part: int, value: dict[str, Any]) -> None:
        value["model"]["decoder.layers.0.adapter.w"] = tensor(part_of(extra, 0, part, 2, gated=True))
        value["model"]["decoder.layers.0.mlp.linear_fc1.weight"] = tensor(
            part_of(FULL["decoder.layers.0.mlp.linear_fc1.weight"], 0, part, 2)
        )

    root = write_megatron(tmp_path / "src", FULL, [[4]], 2, change=change)
    assert set(reshard.open(root).unreadable) == {"decoder.layers.0.adapter.w"}
    rules = {"*.adapter.w": "gate-and-up", "decoder.layers.0.mlp.linear_fc1.weight": "split:0"}
    source = reshard.open(root, layout=rules)
    assert_equal(source, {**FULL, "decoder.layers.0.adapter.w": extra})
    options = [text for name, rule in rules.items() for text in ("--layout", f"{name}={rule}")]
    done("convert", root, tmp_path / "dst", "--to", "hf", *options)
    assert_equal(reshard.open(tmp_path / "dst"), {**FULL, "decoder.layers.0.adapter.w": extra})
    assert reshard.verify(tmp_path / "dst").equal
    with refused(StrategyError, "no-match", "nothing"):
        reshard.open(root, layout={"nothing": "whole"})
    with refused(StrategyError, "not-divisible", "adapter"):
        reshard.open(root, layout={"*input_layernorm.weight": "gate-and-up", "*.adapter.w": "2:0,-1:3"})
    with refused(reshard.UsageError, "self-described", root):
        reshard.open(root, suffix="x")
