"""Universal Checkpoints of DeepSpeed as a target, without DeepSpeed (`test_universal_deepspeed` has it load them)."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import fsspec
import helpers
import numpy as np
import pytest
from checkpoints import assert_equal, write_file
from commands import done
from deepspeed_files import KINDS, truth, values, write_zero
from refusals import failed, refused
from samples import sampled
from saves_files import Made, tensor
from stopped_runs import small_tasks, stopped  # noqa: F401 -- a fixture for all tests here
from stubbed import Stub, loaded, same

import reshard
from reshard.errors import SourceError, TargetError, UsageError
from reshard.formats.deepspeed import carried

if TYPE_CHECKING:
    from pathlib import Path

CASES = [
    name
    for name in sorted({path.split("/")[1] for path in helpers.packed_files("deepspeed")})
    if not name.startswith(("broken_", "s0_", "moe_", "universal_rr_", "universal_v0169_rr_"))
]
GROUPS = ({"a.weight": (5, 3), "b.weight": (2, 4, 3)}, {"a.bias": (7,), "scale": (1,)})
WORD = "deepspeed-universal"
MODEL = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
DROPPED = {
    "base_optimizer_state", "single_partition_of_fp32_groups", "fp32_flat_groups", "param_slice_mappings",
}  # fmt: skip


def convert(source: Path | reshard.Checkpoint, target: Path, **options: Any) -> reshard.Report:
    return reshard.convert(source, target, to=WORD, **options)


def directory_of(run: Path) -> Path:
    """The directory of a case's files."""
    return run / next(run.glob("latest*")).read_text().strip()


@pytest.mark.parametrize("name", sampled([(name,) for name in CASES], 8))
def test_real_ones(mindspore_data: Path, tmp_path: Path, name: str) -> None:
    case = mindspore_data / "deepspeed" / name
    done("convert", case / "checkpoint", tmp_path / "out", "--to", WORD)
    full = truth(case)
    assert_equal(reshard.open(tmp_path / "out"), full)
    done("verify", tmp_path / "out")
    done("verify", tmp_path / "out", "--against", case / "checkpoint")
    check_files(tmp_path / "out", full)


def check_files(out: Path, full: dict[str, Any]) -> None:
    """Look at all files without reshard."""
    trained = {name.partition(".")[2] for name in full if name.startswith("fp32.")}
    assert {path.name for path in (out / "zero").iterdir()} == {*trained, "optimizer_state.pt"}
    for name in trained:
        for kind in KINDS:
            value = loaded(out / "zero" / name / f"{kind}.pt")
            assert value.keys() == {"param", "cat_dim"}
            assert value["cat_dim"] == 0
            assert same(value["param"], full[f"{kind}.{name}"])
        assert same(loaded(out / "zero" / name / "step.pt"), full[f"step.{name}"])
    assert (out / "latest_universal").read_text() == "."
    whole, empty = (loaded(out / name)["module"] for name in MODEL)
    states = tuple(f"{kind}." for kind in (*KINDS, "step"))
    weights = {name: array for name, array in full.items() if not name.startswith(states)}
    assert whole.keys() == empty.keys() == weights.keys()
    for name, array in weights.items():
        bits = array.view(np.uint16) if array.dtype.itemsize == 2 else array
        assert same(whole[name], bits)
        assert same(empty[name], bits) or empty[name].shape == (0,)
    assert same(empty["positions"], full["positions"])
    assert {array.shape for name, array in empty.items() if name in trained} == {(0,)}


CARRIED = [
    "client_s1_dp2", "overflow_s2_dp2", "frozen_s2_dp3", "frozen_s3_dp3", "universal_s3_dp2_bf16", "v0145_bf16opt_dp2",
]  # fmt: skip


@pytest.mark.parametrize("name", CARRIED)
def test_all_else_is_carried(mindspore_data: Path, tmp_path: Path, name: str) -> None:
    case = mindspore_data / "deepspeed" / name
    convert(case / "checkpoint", tmp_path / "out")
    source = directory_of(case / "checkpoint")
    before = loaded(min(source.glob("*mp_rank_00_model_states.pt"), key=lambda path: path.name))
    for path in MODEL:
        after = loaded(tmp_path / "out" / path)
        assert list(after) == list(before)
        assert type(after["module"]) is type(before["module"])
        assert list(after["module"]) == list(before["module"])
        differing = {key for key in before if not same(before[key], after[key])}
        assert differing <= {"module", "frozen_param_fragments"}
    if of_rank := sorted(source.glob("*zero_pp_rank_0_mp_rank_00_optim_states.pt")):
        optimizer = loaded(of_rank[0])["optimizer_state_dict"]
    else:
        optimizer = loaded(source / "zero" / "optimizer_state.pt")
    after = loaded(tmp_path / "out" / "zero" / "optimizer_state.pt")
    inner = optimizer.get("optimizer_state_dict", optimizer.get("base_optimizer_state"))
    groups = optimizer.get("param_groups") or inner["param_groups"]
    assert same(after["param_groups"], groups)
    kept = {*optimizer} - {*DROPPED, "optimizer_state_dict", "param_groups"}
    assert {key for key in kept if not same(optimizer[key], after[key])} == set()
    assert after.keys() == kept | {"optimizer_state_dict", "param_groups", "ds_version"}
    of_torch = after["optimizer_state_dict"]
    assert of_torch["state"].keys() == {0}
    assert same(of_torch["state"][0]["step"], np.array(2, np.float32))
    (first,) = of_torch["param_groups"]
    assert {**first, "weight_decay": groups[0]["weight_decay"]} == groups[0]
    assert "weight_decay" not in first  # which differs: stage 3 would take that of the first group for all


def test_frozen_parameters(mindspore_data: Path, tmp_path: Path) -> None:
    """At stage 2 they are the same tensors as in the module; for stage 3 they are not there twice."""
    for name, has_fragments in (("frozen_s1_dp3", False), ("frozen_s2_dp3", True), ("frozen_s3_dp3", True)):
        case = mindspore_data / "deepspeed" / name
        convert(case / "checkpoint", tmp_path / name)
        whole, empty = (loaded(tmp_path / name / path) for path in MODEL)
        assert whole["frozen_param_shapes"] == empty["frozen_param_shapes"]
        if has_fragments:
            frozen = whole["frozen_param_fragments"]
            assert frozen.keys() == whole["frozen_param_shapes"].keys()
            assert all(array is whole["module"][key] for key, array in frozen.items())
            assert empty["frozen_param_fragments"] == {}
        else:
            assert whole["frozen_param_fragments"] is empty["frozen_param_fragments"] is None


def test_tensors_of_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are carried with their storages, whatever these are called; the module's get other names."""
    state, large = np.arange(40, dtype=np.uint8), np.random.default_rng(3).integers(0, 256, 200_001, np.uint8)
    extra = {"rng": {"cpu": tensor(state), "other": [Made("Thing", 3, module="of.the.client")]}, "large": tensor(large)}
    full = write_zero(tmp_path / "src", GROUPS, extra=extra)
    convert(tmp_path / "src", tmp_path / "out")
    for path in MODEL:
        found = loaded(tmp_path / "out" / path)
        assert same(found["rng"]["cpu"], state)
        assert same(found["large"], large)
        (thing,) = found["rng"]["other"]
        assert isinstance(thing, Stub)
        assert (thing.kind, thing.arguments) == (("of.the.client", "Thing"), (3,))  # type: ignore[attr-defined]
    assert_equal(reshard.open(tmp_path / "out"), full)
    done("verify", tmp_path / "out", "--against", tmp_path / "src")
    monkeypatch.setattr(carried, "LARGEST", 79)
    failed(4, "too-large", "convert", tmp_path / "src", tmp_path / "less", "--to", WORD)
    done("convert", tmp_path / "src", tmp_path / "less", "--to", WORD, "--exclude", "large")
    assert "large" not in loaded(tmp_path / "less" / MODEL[0])


def test_weights_with_names_like_states(tmp_path: Path) -> None:
    """As of averaged weights: what is in the module is a weight."""
    groups = ({"w": (3, 2), "v": (4,)},)
    full = write_zero(tmp_path / "src", groups)
    more = {"average.w": full["fp32.w"], "average.v": full["fp32.v"]}

    def add(states: dict[str, Any]) -> None:
        states["module"].update({name: tensor(array) for name, array in more.items()})

    shutil.rmtree(tmp_path / "src")
    full = write_zero(tmp_path / "src", groups, full=full, model=add)
    convert(tmp_path / "src", tmp_path / "out")
    assert_equal(reshard.open(tmp_path / "out"), {**full, **more})
    assert {path.stem for path in (tmp_path / "out" / "zero" / "w").iterdir()} == {*KINDS, "step"}


def test_a_difference_in_what_is_carried(tmp_path: Path) -> None:
    write_zero(tmp_path / "src", GROUPS, extra={"rng": tensor(np.zeros(8, np.uint8)), "epoch": 3})
    write_zero(tmp_path / "other", GROUPS, extra={"rng": tensor(np.ones(8, np.uint8)), "epoch": 4})
    convert(tmp_path / "src", tmp_path / "out")
    done("verify", tmp_path / "out", "--against", tmp_path / "src")
    found = failed(3, "different", "verify", tmp_path / "out", "--against", tmp_path / "other")
    assert "epoch" in found.stdout
    assert "rng" in found.stdout


@pytest.mark.parametrize("stage", [2, 3])
def test_steps_that_are_plain_numbers(tmp_path: Path, stage: int) -> None:
    """As those of DeepSpeed's own Adam, which takes no tensor."""
    full = write_zero(tmp_path / "src", GROUPS, stage=stage, step=3)
    for source, target in (("src", "out"), ("out", "again")):
        convert(tmp_path / source, tmp_path / target)
        assert_equal(reshard.open(tmp_path / target), full)
        assert loaded(tmp_path / target / "zero" / "scale" / "step.pt") == 3
        optimizer = loaded(tmp_path / target / "zero" / "optimizer_state.pt")
        assert optimizer["optimizer_state_dict"]["state"] == {0: {"step": 3}}
        done("verify", tmp_path / target)


def test_of_a_universal_checkpoint_to_the_same(tmp_path: Path) -> None:
    write_zero(tmp_path / "src", GROUPS, extra={"epoch": 3})
    convert(tmp_path / "src", tmp_path / "out")
    convert(tmp_path / "out", tmp_path / "again")
    paths = [path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*.pt")]
    assert len(paths) == 4 * len([name for group in GROUPS for name in group]) + 3
    for path in paths:
        assert same(loaded(tmp_path / "out" / path), loaded(tmp_path / "again" / path)), path


def test_without_hyper_parameters(mindspore_data: Path, tmp_path: Path) -> None:
    case = mindspore_data / "deepspeed" / "elastic_s1_dp2"
    report = convert(case / "checkpoint", tmp_path / "out")
    assert len([text for text in report.warnings if "hyper-parameters" in text]) == 1
    assert loaded(tmp_path / "out" / "zero" / "optimizer_state.pt")["param_groups"] == [
        {"params": [0]},
        {"params": [1]},
    ]


def test_what_loading_needs_is_said(mindspore_data: Path, tmp_path: Path) -> None:
    case = mindspore_data / "deepspeed" / "rr_s2_dp2"
    report = convert(case / "checkpoint", tmp_path / "out")
    assert len([text for text in report.warnings if "round_robin_gradients" in text]) == 1
    for kind, pattern, is_said in (
        ("parameter_with_row_parallelism_patterns", "b.weight", False),
        ("parameter_with_row_parallelism_patterns", "(a*)*b", True),  # which could take for ever
        ("parameter_to_average_patterns", "b.weight", True),
        ("parameter_to_average_patterns", "other", False),
    ):
        shutil.rmtree(tmp_path / "src", ignore_errors=True)
        write_zero(tmp_path / "src", GROUPS, extra={"universal_checkpoint_info": {kind: [pattern]}})
        warnings = convert(tmp_path / "src", tmp_path / "tp", overwrite=True).warnings
        assert bool([text for text in warnings if "AutoTP" in text]) == is_said, (kind, pattern)


def test_how_parameters_are_cut(tmp_path: Path) -> None:
    """As the training recorded it, for a training with tensor parallelism to load it."""
    patterns = {
        "tp_replicated_parameter_patterns": [r"a\.bias"],
        "parameter_with_row_parallelism_patterns": [r"a\.weight"],
        "parameter_with_2_sub_params_cat_dim_0": [r".*b\.weight"],
        "vocabulary_parameter_patterns": ["scale"],
    }
    write_zero(tmp_path / "src", GROUPS, extra={"universal_checkpoint_info": patterns})
    for source, target in (("src", "out"), ("out", "again")):
        convert(tmp_path / source, tmp_path / target)
        entries = {name: loaded(tmp_path / target / "zero" / name / "fp32.pt") for group in GROUPS for name in group}
        for of_parameter in entries.values():
            del of_parameter["param"]
        assert entries == {
            "a.weight": {"cat_dim": 1}, "b.weight": {"cat_dim": 0, "param_n_sub_params": 2}, "a.bias": {"cat_dim": 0},
            "scale": {"cat_dim": 0, "vocab_tensor": True},
        }  # fmt: skip


def test_of_tensor_parallel_parts_that_the_user_joins(tmp_path: Path) -> None:
    whole = values([{"w": (4, 6), "v": (8,)}])
    for part in range(2):
        local = {name: np.split(array, 2, -1)[part] if array.ndim else array for name, array in whole.items()}
        write_zero(tmp_path / "src", [{"w": (4, 3), "v": (4,)}], full=local, part=part, extra={"mp_world_size": 2})
    convert(reshard.open(tmp_path / "src", layout={"w": "split:1", "v": "split:0"}), tmp_path / "out")
    assert_equal(reshard.open(tmp_path / "out"), whole)
    assert loaded(tmp_path / "out" / "zero" / "w" / "exp_avg.pt")["cat_dim"] == 1
    assert loaded(tmp_path / "out" / "zero" / "v" / "exp_avg.pt")["cat_dim"] == 0


def test_other_names_and_fewer_parameters(tmp_path: Path) -> None:
    full = write_zero(tmp_path / "src", GROUPS)
    report = convert(tmp_path / "src", tmp_path / "out", name_map={"a.*": "net.a.*"}, exclude=["*scale"])
    expected = {
        name.replace("a.", "net.a.") if name.split(".")[-2:][0] == "a" else name: array
        for name, array in full.items()
        if "scale" not in name
    }
    assert_equal(reshard.open(tmp_path / "out"), expected)
    assert [text for text in report.warnings if "a.weight" in text and "scale" in text]
    assert (tmp_path / "out" / "zero" / "net.a.weight" / "fp32.pt").exists()


REFUSED: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (SourceError, "missing-state", {"exclude": ["exp_avg.*"]}),
    (SourceError, "no-weight", {"exclude": ["scale"]}),
    (UsageError, "no-states", {"weights_only": True}),
    *(
        (SourceError, "bad-name", {"name_map": {"scale": name}})
        for name in ("a/b", "..", "x" * 256, "a\nb", "\\x", "optimizer_state.pt")
    ),
    *(
        (UsageError, "option-of-another-format", options)
        for options in ({"ranks": [0]}, {"max_shard_size": "1GB"}, {"target_strategy": "strategy.ckpt"})
    ),
]


def test_what_cannot_be_one(mindspore_data: Path, tmp_path: Path) -> None:
    write_zero(tmp_path / "src", GROUPS)
    source, out = tmp_path / "src", tmp_path / "out"
    for kind, code, options in REFUSED:
        with refused(kind, code):
            convert(source, out, **options)
    with refused(UsageError, "wrong-source"):
        convert(write_file(tmp_path / "x.safetensors", {"w": np.zeros(3, np.float32)}), out)
    with refused(UsageError, "wrong-source"):
        reshard.convert(reshard.average([reshard.open(source), reshard.open(source)]), out, to=WORD)
    with refused(UsageError, "no-states"):  # of stage 0
        convert(mindspore_data / "deepspeed" / "s0_dp2_bf16" / "checkpoint", out)
    assert not out.exists()


def test_files_that_are_damaged(tmp_path: Path) -> None:
    write_zero(tmp_path / "src", GROUPS, extra={"rng": tensor(np.full(64, 7, np.uint8))})
    path = tmp_path / "src" / "global_step3" / MODEL[0]
    content = path.read_bytes()
    assert content.count(b"\7" * 64) == 1
    path.write_bytes(content.replace(b"\7" * 64, b"\7" * 63 + b"\6"))
    with refused(SourceError, "wrong-checksum", path.name):
        convert(tmp_path / "src", tmp_path / "out")
    path.write_bytes(content.replace(b"frozen_param_shapes", b"frozen_param_shapeZ"))
    with refused(SourceError, "wrong-checksum", path.name):
        convert(tmp_path / "src", tmp_path / "out")


def test_files_of_another_checkpoint_in_the_directory(tmp_path: Path) -> None:
    """DeepSpeed looks for files by patterns."""
    write_zero(tmp_path / "src", GROUPS)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mp_rank_01_model_states.pt").touch()
    for options in ({}, {"overwrite": True}):
        with refused(TargetError, "other-set", "mp_rank_01_model_states.pt"):
            convert(tmp_path / "src", tmp_path / "out", **options)


def test_smaller_than_before(tmp_path: Path) -> None:
    write_zero(tmp_path / "src", GROUPS)
    full = write_zero(tmp_path / "less", GROUPS[:1])
    convert(tmp_path / "src", tmp_path / "out")
    convert(tmp_path / "less", tmp_path / "out", overwrite=True)
    assert_equal(reshard.open(tmp_path / "out"), full)
    assert not list((tmp_path / "out").glob("zero/scale/*"))


@pytest.mark.parametrize("partition", ["tensor", "file"])
def test_a_run_that_is_stopped(tmp_path: Path, partition: str) -> None:
    """It has neither of the files that say it is complete; the next run goes on."""
    full = write_zero(tmp_path / "src", ({"w": (64, 33), "v": (50, 20)},), stage=3, ranks=3)
    plan = reshard.plan(reshard.open(tmp_path / "src"), to=WORD)
    begun = len(plan._record.files) if partition == "tensor" else 0
    stopped(plan, tmp_path / "out", tasks=begun + 3, partition=partition)
    left = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert left.isdisjoint({"optimizer_state.pt", "latest_universal"})
    with refused(SourceError, "unfinished"):
        reshard.open(tmp_path / "out")
    report = plan.run(tmp_path / "out", partition=partition)
    assert report.resumed > 0
    assert_equal(reshard.open(tmp_path / "out"), full)
    plan.run(tmp_path / "once", threads=1)
    for path in (tmp_path / "once").rglob("*.pt"):
        assert path.read_bytes() == (tmp_path / "out" / path.relative_to(tmp_path / "once")).read_bytes()


def test_a_saved_plan_a_wrong_byte_and_a_url(tmp_path: Path) -> None:
    full = write_zero(tmp_path / "src", GROUPS)
    done("plan", tmp_path / "src", "--to", WORD, "-o", tmp_path / "plan.json")
    done("run", tmp_path / "plan.json", tmp_path / "out")
    convert(tmp_path / "src", "memory://universal")  # type: ignore[arg-type]
    stored = fsspec.filesystem("memory")
    for path in (*(tmp_path / "out").rglob("*.pt"), tmp_path / "out" / "latest_universal"):
        assert stored.cat(f"/universal/{path.relative_to(tmp_path / 'out')}") == path.read_bytes()
    path = tmp_path / "out" / "zero" / "a.weight" / "exp_avg.pt"
    content = bytearray(path.read_bytes())
    content[content.index(full["exp_avg.a.weight"].tobytes())] ^= 1
    path.write_bytes(content)
    failed(3, "different", "verify", tmp_path / "out", "--against", tmp_path / "src")
    shutil.rmtree(tmp_path / "out" / ".reshard")
    failed(3, "different", "verify", tmp_path / "out")
