"""DeepSpeed's checkpoints as a source: real ones give the tensors of the live engine, or say why not."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import helpers
import ml_dtypes
import numpy as np
import pytest
from checkpoints import assert_equal, write_file
from commands import done
from deepspeed_files import KINDS, size, truth, values, write_zero
from refusals import failed, one_line, refused
from samples import sampled, slow
from saves_files import Made, tensor, write_save

import reshard
from reshard.errors import ReshardError, SourceError
from reshard.formats.deepspeed.buffers import boxes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CASES = sorted({path.split("/")[1] for path in helpers.packed_files("deepspeed")})
BROKEN = [name for name in CASES if name.startswith("broken_")]
WRONG = ["universal_rr_s2_dp2", "universal_v0169_rr_s2_dp2"]
WHOLE = [name for name in CASES if name not in BROKEN and name not in WRONG]
GROUPS = ({"a.weight": (5, 3), "b.weight": (2, 4, 3)}, {"a.bias": (7,), "scale": (1,)})
TARGETS = ("hf", "dcp", "checkpoint2", "safetensors", "ckpt", "zarr")


def readable(case: Path) -> dict[str, Any]:
    """The tensors of a case that its files can give."""
    full = truth(case)
    if case.name.startswith("s0_"):  # states are by number
        return {name: full[name] for name in full if name.partition(".")[0] not in {*KINDS, "step"}}
    if case.name.startswith("moe_"):  # nothing says which ranks have which expert's states
        states = tuple(f"{kind}.moe.deepspeed_moe.experts." for kind in (*KINDS, "step"))
        return {name: full[name] for name in full if not name.startswith(states)}
    return full


@pytest.mark.parametrize("name", sampled([(name,) for name in WHOLE], 4))
def test_real_ones_are_the_tensors_of_the_live_engine(mindspore_data: Path, name: str) -> None:
    case = mindspore_data / "deepspeed" / name
    source = reshard.open(case / "checkpoint")
    assert_equal(source, readable(case))
    assert set(source.unreadable) == truth(case).keys() - readable(case).keys() - (
        truth(case).keys() if name.startswith("s0_") else set()
    )
    if not source.unreadable:
        assert reshard.verify(case / "checkpoint").equal


@pytest.mark.parametrize(
    ("name", "to"),
    sampled([(name, to) for number, name in enumerate(WHOLE) for to in TARGETS], 16),
)
def test_converted(mindspore_data: Path, tmp_path: Path, name: str, to: str) -> None:
    case = mindspore_data / "deepspeed" / name
    dropped = [option for pattern in reshard.open(case / "checkpoint").unreadable for option in ("--drop", pattern)]
    done("convert", case / "checkpoint", tmp_path / "out", "--to", to, *dropped)
    assert_equal(reshard.open(tmp_path / "out"), readable(case))
    done("verify", tmp_path / "out")


@pytest.mark.parametrize("name", BROKEN)
def test_broken_ones_are_refused(mindspore_data: Path, tmp_path: Path, name: str) -> None:
    codes = {
        "broken_cut": "truncated", "broken_latest": "no-such-iteration", "broken_missing_model_s3": "missing-ranks",
        "broken_missing_optim": "missing-ranks", "broken_surplus": "wrong-count",
    }  # fmt: skip
    source = mindspore_data / "deepspeed" / name / "checkpoint"
    for command in (("inspect", source), ("verify", source), ("convert", source, tmp_path / "out", "--to", "hf")):
        failed(4, codes[name], *command)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", WRONG)
def test_states_of_other_weights_are_not_read(mindspore_data: Path, tmp_path: Path, name: str) -> None:
    """DeepSpeed's converter writes the numbers of other parameters if gradients went round robin."""
    case = mindspore_data / "deepspeed" / name
    full, source = truth(case), reshard.open(case / "checkpoint")
    differ = set(json.loads((case / "info.json").read_text())["differ"])
    assert differ <= set(source.unreadable)
    assert not any(name.startswith("step.") for name in source.unreadable)
    assert_equal(source, {name: full[name] for name in source.tensors})
    assert [text for text in source.warnings if "round_robin_gradients" in text]
    failed(4, "unreadable-tensor", "convert", case / "checkpoint", tmp_path / "out", "--to", "hf")
    done("convert", case / "checkpoint", tmp_path / "out", "--to", "hf", "--weights-only")


def test_of_two_tags_the_last_or_any(mindspore_data: Path) -> None:
    run = mindspore_data / "deepspeed" / "two_tags_s2_dp3" / "checkpoint"
    last, before = reshard.open(run), reshard.open(run, step=2)
    assert last.root.endswith("global_step3")
    assert before.root.endswith("global_step2")
    assert before["embed.weight"].compute().tobytes() != last["embed.weight"].compute().tobytes()
    assert reshard.open(run / "global_step2").root == before.root
    refused_iteration = failed(4, "no-such-iteration", "inspect", run, "--step", "7")
    assert "2, 3" in one_line(refused_iteration.stderr)


def test_a_tag_of_any_name_and_weights_beside(tmp_path: Path) -> None:
    full = write_zero(tmp_path, GROUPS, tag="after lunch")
    assert_equal(reshard.open(tmp_path), full)
    (tmp_path / "latest").write_text("../elsewhere")
    with refused(SourceError, "no-such-iteration", "latest"):
        reshard.open(tmp_path)
    (tmp_path / "latest").write_text("after lunch")
    write_file(tmp_path / "model.safetensors", {"net": full["fp32.a.weight"]})
    assert list(reshard.open(tmp_path)) == ["net"]
    assert_equal(reshard.open(tmp_path / "after lunch"), full)
    (tmp_path / "ranks" / "rank_0").mkdir(parents=True)
    write_file(tmp_path / "ranks" / "rank_0" / "net.safetensors", {"net": full["fp32.a.weight"]})
    (tmp_path / "ranks" / "latest").symlink_to("rank_0")
    assert list(reshard.open(tmp_path / "ranks")) == ["net"]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 5, 40])
def test_any_number_of_ranks(tmp_path: Path, stage: int, ranks: int) -> None:
    full = write_zero(tmp_path / "run", GROUPS, stage=stage, ranks=ranks)
    source = reshard.open(tmp_path / "run")
    assert_equal(source, full)
    rows = reshard.Strategy.of({
        name: reshard.Layout.of([2], [0 if name.endswith("b.weight") else -1, *[-1] * value.ndim][: value.ndim])
        for name, value in full.items() if value.ndim
    })  # fmt: skip
    reshard.plan(source, rows, to="dcp").run(tmp_path / "out", fsync=False)
    assert_equal(reshard.open(tmp_path / "out"), full)


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "hidden_size": 8, "head_dim": 4, "intermediate_size": 12, "vocab_size": 16,
}  # fmt: skip
LLAMA_SHAPES: dict[str, tuple[int, ...]] = {
    "self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8), "self_attn.v_proj": (4, 8), "self_attn.o_proj": (8, 8),
    "mlp.gate_proj": (12, 8), "mlp.up_proj": (12, 8), "mlp.down_proj": (8, 12), "input_layernorm": (8,),
    "post_attention_layernorm": (8,),
}  # fmt: skip


@pytest.mark.parametrize("step", [None, 3])
def test_states_are_known_as_states_of_their_weights(tmp_path: Path, step: int | None) -> None:
    """Rules fuse and split them, and steps are numbers of which fused weights have one."""
    group = {f"model.layers.{n}.{name}.weight": shape for n in range(2) for name, shape in LLAMA_SHAPES.items()}
    group |= {"model.embed_tokens.weight": (16, 8), "model.norm.weight": (8,), "lm_head.weight": (16, 8)}
    full = write_zero(tmp_path / "run", [group], stage=3, ranks=3, step=step)
    done("convert", tmp_path / "run", tmp_path / "weights", "--to", "hf", "--weights-only")
    assert set(reshard.open(tmp_path / "weights")) == set(group)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    done(
        "convert", tmp_path / "run", tmp_path / "out", "--to", "dcp", "--rules", "llama-hf-mcore-layers",
        "--model-config", tmp_path / "config.json",
    )  # fmt: skip
    fused = reshard.open(tmp_path / "out")
    fc1 = "decoder.layers.1.mlp.linear_fc1.weight"
    for kind in ("", "fp32.", "exp_avg.", "exp_avg_sq."):
        parts = [full[f"{kind}model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up")]
        assert fused[f"{kind}{fc1}"].compute().tobytes() == np.concatenate(parts).tobytes()
    assert fused[f"step.{fc1}"].compute() == 3
    done("verify", tmp_path / "out")


def test_rounding_is_to_even_and_keeps_what_is_not_a_number(tmp_path: Path) -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F800000, 0xFF800000, 0x80000000, 0x7F7FFFFF, 1], np.uint32)
    full = values([{"w": (8,)}])
    full["fp32.w"] = bits.view(np.float32)
    full["w"] = full["fp32.w"].astype(ml_dtypes.bfloat16)
    write_zero(tmp_path, [{"w": (8,)}], stage=3, full=full)
    assert reshard.open(tmp_path)["w"].compute().view(np.uint16).tolist() == [
        0x3F80, 0x3F82, 0x3F81, 0x7F80, 0xFF80, 0x8000, 0x7F80, 0,
    ]  # fmt: skip


def test_weights_of_stage_2_alone(tmp_path: Path) -> None:
    """Somebody removed the optimizer's files; with stage 3 the weights are in them."""
    full = write_zero(tmp_path / "two", GROUPS)
    write_zero(tmp_path / "three", GROUPS, stage=3)
    for run in ("two", "three"):
        for path in (tmp_path / run / "global_step3").glob("*optim*"):
            path.unlink()
    source = reshard.open(tmp_path / "two")
    assert_equal(source, {name: full[name] for group in GROUPS for name in group})
    assert [text for text in source.warnings if "optimizer" in text]
    with refused(SourceError, "missing-ranks", "0-1"):
        reshard.open(tmp_path / "three")


def test_frozen_parameters_with_stage_3(tmp_path: Path) -> None:
    frozen = np.arange(15, dtype=np.float32).astype(ml_dtypes.bfloat16)

    def freeze(states: dict[str, Any], rank: list[int] = [0]) -> None:  # noqa: B006 -- counts the calls
        states["module"]["cold"] = tensor(np.zeros(0, np.uint16))
        states["module"]["cold_alias"] = tensor(np.zeros(0, np.uint16))
        states["frozen_param_shapes"] = {"cold": size((3, 5))}
        states["frozen_param_fragments"] = {"cold": tensor(np.pad(frozen, (0, 1))[rank[0] * 8 :][:8].view(np.uint16))}
        states["shared_params"] = {"cold_alias": "cold"} if rank[0] == 0 else {}
        rank[0] += 1

    full = write_zero(tmp_path, GROUPS, stage=3, model=freeze)
    full["cold"] = full["cold_alias"] = frozen.reshape(3, 5)
    assert_equal(reshard.open(tmp_path), full)


def test_tied_parameters_before_they_were_recorded(tmp_path: Path) -> None:
    """With stage 3 each parameter is of shape (0,) in the module; old versions of DeepSpeed have no `shared_params`."""

    def tie(states: dict[str, Any]) -> None:
        del states["shared_params"]
        states["module"] |= {"head": tensor(np.zeros(0, np.uint16)), "empty": tensor(np.zeros(0, np.float32))}
        states["buffer_names"] = ["empty"]

    full = write_zero(tmp_path, GROUPS, stage=3, model=tie)
    source = reshard.open(tmp_path)
    assert set(source.unreadable) == {"head"}
    assert_equal(source, {**full, "empty": np.zeros(0, np.float32)})


def spoil(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda values: values.update(changes)


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "no shapes": ("unsupported-version", {"model": spoil(param_shapes=None)}),
    "shapes of another model": ("wrong-shape", {"model": spoil(param_shapes=[{"a.weight": (5, 4)}, {"scale": (1,)}])}),
    "a group less": ("wrong-shape", {"model": spoil(param_shapes=[{"a.weight": (5, 3)}])}),
    "an impossible shape": ("bad-shape", {"model": spoil(param_shapes=[{"a": (1 << 60, 1 << 60)}, {"b": (1,)}])}),
    "a negative extent": ("bad-shape", {"model": spoil(param_shapes=[{"a": (-1, -15)}, {"b": (1,)}])}),
    "shapes that are text": ("bad-shape", {"model": spoil(param_shapes=[{"a": "15"}, {"b": (1,)}])}),
    "shapes that are no list": ("bad-value", {"model": spoil(param_shapes=7)}),
    "groups that are numbers": ("bad-value", {"model": spoil(param_shapes=[7, 8])}),
    "no module": ("not-a-state-dict", {"model": lambda values: values.pop("module")}),
    "a pipeline": ("unsupported-layout", {"model": spoil(module=None)}),
    "experts cut by DeepSpeed": ("unsupported-layout", {"model": spoil(ds_autoep_layers=[{"experts": 4}])}),
    "another number of partitions": ("wrong-count", {"optim": spoil(partition_count=[4, 4])}),
    "partitions of a group": ("wrong-count", {"optim": spoil(partition_count=[2, 1])}),
    "no number of partitions": ("bad-value", {"optim": spoil(partition_count=None)}),
    "groups of ranks": (
        "unsupported-layout", {"optim": spoil(ds_zero_partition_groups=[{"partition_count": 1}])},
    ),
    "groups of ranks that are a number": ("bad-value", {"optim": spoil(ds_zero_partition_groups=7)}),
    "no states": ("bad-value", {"optim": spoil(base_optimizer_state=None)}),
    "many kinds of states": (
        "too-large",
        {"optim": lambda values: values["base_optimizer_state"]["state"][0].update({f"k{n}": 1 for n in range(99)})},
    ),
    "long kinds of states": (
        "too-large", {"optim": lambda values: values["base_optimizer_state"]["state"][0].update({"k" * 999: 1})},
    ),
    "a long name": (
        "bad-name", {"model": lambda values: values["module"].update({"k" * 5000: tensor(np.zeros(1, np.float32))})},
    ),
    "paddings of fewer": ("wrong-shape", {"optim": spoil(param_alignment_paddings=[[0], [0, 0]])}),
    "paddings that are too large": ("wrong-shape", {"optim": spoil(param_alignment_paddings=[[0, 9], [0, 0]])}),
    "negative paddings": ("bad-shape", {"optim": spoil(param_alignment_paddings=[[0, -9], [0, 0]])}),
    "fewer elements, all buffers full": (
        "wrong-shape", {"model": spoil(param_shapes=[{"v": (20, 4)}]), "groups": [{"w": (40, 4)}]},
    ),
    "masters with gaps": (
        "wrong-shape",
        {"optim": spoil(single_partition_of_fp32_groups=[tensor(np.zeros((3, 13), np.float32))] * 2)},
    ),
    "masters that call something": (
        "unsupported-class",
        {"optim": spoil(single_partition_of_fp32_groups=[Made("system", "touch /tmp/owned", module="os")] * 2)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(tmp_path: Path, fault: str) -> None:
    code, changes = FAULTS[fault]
    write_zero(tmp_path, **{"groups": GROUPS, **changes})
    with refused(SourceError, code, tmp_path):
        reshard.open(tmp_path)


def test_files_of_two_trainings(tmp_path: Path) -> None:
    write_zero(tmp_path, GROUPS, stage=2)
    directory = tmp_path / "global_step3"
    shutil.copy(directory / "mp_rank_00_model_states.pt", directory / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    with refused(SourceError, "several-checkpoints", "zero_pp_rank_0_"):
        reshard.open(tmp_path)
    (directory / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    shutil.copy(
        directory / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        directory / "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    )
    with refused(SourceError, "several-checkpoints", "bf16_"):
        reshard.open(tmp_path)


def test_one_file_alone_is_one_of_several(tmp_path: Path) -> None:
    write_zero(tmp_path, GROUPS, stage=3)
    for path in (tmp_path / "global_step3").iterdir():
        failed(4, "one-of-several", "inspect", path)
    write_save(tmp_path / "global_step3" / "layer_00-model_00-model_states.pt", {"w": tensor(np.zeros(3, np.float32))})
    failed(4, "unsupported-layout", "inspect", tmp_path)  # of a pipeline


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_of_two_savings(tmp_path: Path, stage: int) -> None:
    """One name for all checkpoints, as Lightning's `last`, and saving was interrupted: sizes do not show it."""
    write_zero(tmp_path / "old", GROUPS, stage=stage, step=tensor(np.array(2, np.float32)))
    write_zero(tmp_path / "new", GROUPS, stage=stage)
    name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(tmp_path / "old" / "global_step3" / name, tmp_path / "new" / "global_step3" / name)
    with refused(SourceError, "several-steps", name):
        reshard.open(tmp_path / "new")


SPOILT = ("s3_dp2_bf16", "s2_dp2_bf16", "frozen_s3_dp3", "universal_s3_dp2_bf16", "legacy_s2_dp2", "moe_s2_dp2")


@pytest.mark.parametrize("seed", [0, *map(slow, range(1, 10))])
def test_changed_bytes_never_do_more_than_fail(mindspore_data: Path, tmp_path: Path, seed: int) -> None:
    """Bytes of pickles and of other records are changed: it opens, or says why not, in good time."""
    rng = np.random.default_rng(seed)
    for number in range(36):
        name = SPOILT[number % len(SPOILT)]
        root = shutil.copytree(mindspore_data / "deepspeed" / name / "checkpoint", tmp_path / f"{number}")
        paths = sorted(root.rglob("*.pt"))
        path = paths[rng.integers(len(paths))]
        content = bytearray(path.read_bytes())
        end = content.find(b"PK", 4) if content[:2] == b"PK" and rng.random() < 0.9 else len(content)
        for at in rng.integers(0, max(end, 1), rng.integers(1, 5)):
            content[at] = rng.integers(256)
        path.write_bytes(content)
        try:
            source = reshard.open(root)
        except ReshardError:
            continue
        for key in source:
            with suppress(ReshardError):
                source[key].compute()


def test_numbers_of_steps_that_cannot_be(tmp_path: Path) -> None:
    for step in (1 << 200, float("inf"), float("nan"), "three", True, None.__class__):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        write_zero(tmp_path / "run", GROUPS, stage=3, step=step if not isinstance(step, type) else [])
        assert not any(name.startswith("step.") for name in reshard.open(tmp_path / "run"))


def test_boxes_of_ranges() -> None:
    """Ranges of elements in row-major order become boxes that cover the tensor, each where it is in its range."""
    shape = (3, 4, 5)
    for ends in ((60,), (1, 2, 60), (7, 23, 41, 60), tuple(range(1, 61))):
        cut = boxes(shape, ends)
        flat, whole = np.arange(60), np.full(shape, -1)
        for block, number, offset, _ in cut:
            begin = (0, *ends)[number] + offset
            whole[block.within(type(block).whole(shape))] = flat[begin : begin + block.size].reshape(block.shape)
        assert (whole.reshape(-1) == flat).all()
        assert list(cut) == sorted(cut)
