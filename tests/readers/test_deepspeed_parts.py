"""Tensor-parallel checkpoints of DeepSpeed: joined by patterns in the files, or as the user says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import assert_equal
from commands import done
from deepspeed_files import KINDS, truth, values, write_zero
from refusals import failed, refused
from saves_files import tensor, write_save

import reshard
from reshard.errors import SourceError, StrategyError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from checkpoints import Array

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (12, 3), "0.qkv.weight": (18, 3), "0.qkv.bias": (18,), "0.dense.weight": (3, 6),
    "0.dense.bias": (3,), "0.fc1.weight": (8, 3), "0.norm.weight": (3,),
}  # fmt: skip
PATTERNS = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [r"\d+.norm.weight", r"\d+\.dense.bias"],
    "parameter_with_row_parallelism_patterns": [r"\d+.dense.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r"\d+.fc1.weight"],
}
RULES = {"*.dense.weight": "split:1", "0.dense.bias": "whole", "*.norm.weight": "whole", "0.fc1.weight": "split:0"}


def part_of(name: str, array: Array, part: int, count: int) -> Array:
    weight = name if name in SHAPES else name.partition(".")[2]
    if not array.ndim or weight in {"0.norm.weight", "0.dense.bias"}:
        return array
    if weight == "0.dense.weight":
        return np.split(array, count, 1)[part]
    if weight == "0.fc1.weight":
        return np.concatenate([np.split(half, count)[part] for half in np.split(array, 2)])
    return np.split(array, count)[part]


def write_parts(
    root: Path,
    count: int = 2,
    *,
    patterns: Mapping[str, object] | None = None,
    gate_and_up: bool = True,
    **options: Any,
) -> dict[str, Array]:
    """Write a checkpoint in parts, and return its whole tensors."""
    full = values([SHAPES])
    for part in range(count):
        local = {name: part_of(name, array, part, count) for name, array in full.items()}
        if not gate_and_up:
            for kind in ("", *(f"{kind}." for kind in KINDS)):
                local[f"{kind}0.fc1.weight"] = np.split(full[f"{kind}0.fc1.weight"], count)[part]
        groups = [{name: local[f"fp32.{name}"].shape for name in SHAPES}]
        extra: dict[str, object] = {} if patterns is None else {"universal_checkpoint_info": dict(patterns)}
        write_zero(root, groups, full=local, part=part, extra={**extra, "mp_world_size": count}, **options)
    return full


@pytest.mark.parametrize("name", ["autotp_s1_tp2_dp2", "autotp_s3_tp2_dp2"])
def test_real_ones_of_autotp(mindspore_data: Path, tmp_path: Path, name: str) -> None:
    """Joined by affine maps, as DeepSpeed's own converter joins them."""
    case = mindspore_data / "deepspeed_parts" / name
    full = truth(case)
    source = reshard.open(case / "checkpoint")
    assert_equal(source, {**full, **{key: source[key].compute() for key in source if key not in full}})
    assert {key for key in source if key not in full} <= {f"step.{key}" for key in source}
    done("convert", case / "checkpoint", tmp_path / "out", "--to", "hf", "--weights-only")
    weights = {key: full[key] for key in full if key.partition(".")[0] not in {*KINDS, "step"}}
    assert_equal(reshard.open(tmp_path / "out"), weights)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("ranks", [1, 3])
def test_joined_by_patterns(tmp_path: Path, stage: int, ranks: int) -> None:
    full = write_parts(tmp_path / "run", patterns=PATTERNS, stage=stage, ranks=ranks)
    source = reshard.open(tmp_path / "run")
    assert_equal(source, full)
    for to in ("hf", "dcp"):
        done("convert", tmp_path / "run", tmp_path / to, "--to", to)
        assert_equal(reshard.open(tmp_path / to), full)
        done("verify", tmp_path / to)


def test_the_user_says_how(tmp_path: Path) -> None:
    full = write_parts(tmp_path / "run", stage=3, gate_and_up=False)
    with refused(SourceError, "no-layout", "layout"):
        reshard.open(tmp_path / "run")
    rules = {"*.weight": "split:0", "*.bias": "split:0", **RULES}
    assert_equal(reshard.open(tmp_path / "run", layout=rules), full)
    strategy = reshard.Strategy.of({
        name: reshard.Layout.parse(
            "split:1" if name.endswith("dense.weight") else "whole" if len(shape) == 1 and shape[0] == 3 else "split:0",
            len(shape), 2,
        )
        for name, shape in SHAPES.items()
    })  # fmt: skip
    assert_equal(reshard.open(tmp_path / "run", strategy=strategy), full)
    options = [text for rule in rules.items() for text in ("--layout", "=".join(rule))]
    done("convert", tmp_path / "run", tmp_path / "out", "--to", "hf", *options)
    assert_equal(reshard.open(tmp_path / "out"), full)
    done("verify", tmp_path / "out")


def test_rules_win_over_patterns(tmp_path: Path) -> None:
    full = write_parts(tmp_path, patterns=PATTERNS, gate_and_up=False)
    assert reshard.open(tmp_path)["fp32.0.fc1.weight"].compute().tobytes() != full["fp32.0.fc1.weight"].tobytes()
    assert_equal(reshard.open(tmp_path, layout={"0.fc1.weight": "split:0"}), full)


AVERAGED = {**PATTERNS, "parameter_to_average_patterns": [r"\d+.norm.weight"]}
REFUSED: dict[str, dict[str, Any]] = {
    "replicas-differ": {"patterns": {"tp_replicated_parameter_patterns": [".*"]}},
    "saved-whole": {"patterns": {"tp_replicated_parameter_patterns": 7}},  # which says nothing
    "bad-pattern": {"patterns": {"tp_replicated_parameter_patterns": ["(a+)+$"]}},
    "unsupported-layout": {
        "patterns": PATTERNS,
        "model": lambda states: states.update(checkpoint_parallel_dimensions={"pp_degree": 2, "tp_degree": 1}),
    },
    "wrong-count": {"patterns": PATTERNS, "model": lambda states: states.update(mp_world_size=1)},
}


@pytest.mark.parametrize("code", REFUSED)
def test_what_cannot_be_joined(tmp_path: Path, code: str) -> None:
    write_parts(tmp_path, **REFUSED[code])
    with refused(SourceError, code, tmp_path):
        reshard.open(tmp_path)


@pytest.mark.parametrize("stage", [1, 3])
def test_parts_that_are_averaged_are_unreadable(tmp_path: Path, stage: int) -> None:
    write_parts(tmp_path, stage=stage, patterns=AVERAGED)
    names = {"0.norm.weight", *(f"{kind}.0.norm.weight" for kind in KINDS)}
    assert set(reshard.open(tmp_path).unreadable) == names


@pytest.mark.parametrize(
    ("files", "code"), [("mp_rank_00_model_states.pt", "missing-file"), ("*mp_rank_01*", "wrong-count")]
)
def test_files_of_a_part_are_missing(tmp_path: Path, files: str, code: str) -> None:
    """Without the second part, the first would be taken for the whole model."""
    write_parts(tmp_path, patterns=PATTERNS)
    for path in (tmp_path / "global_step3").glob(files):
        path.unlink()
    failed(4, code, "inspect", tmp_path)


def test_rules_for_one_part(tmp_path: Path) -> None:
    write_zero(tmp_path, [{"w": (4, 4)}])
    with refused((UsageError, StrategyError), "self-described"):  # type: ignore[arg-type]  # either
        reshard.open(tmp_path, layout={"w": "split:0"})


def write_universal(root: Path, full: Mapping[str, Array], *, patterns: Mapping[str, object] | None = PATTERNS) -> None:
    """Write a Universal Checkpoint whose model states are in two parts."""
    write_parts(root, patterns=patterns)
    directory = root / "global_step3"
    for path in directory.glob("*optim*"):
        path.unlink()
    for name, array in full.items():
        kind, _, weight = name.partition(".")
        if weight in SHAPES:
            write_save(directory / "zero" / weight / f"{kind}.pt", {"param": tensor(array), "cat_dim": 0})
    write_save(directory / "zero" / "optimizer_state.pt", {"param_groups": []})


def test_universal_checkpoints_of_parts(tmp_path: Path) -> None:
    """Weights are those of the parts; states of others, which DeepSpeed's converter writes, are not read."""
    full = values([SHAPES])
    write_universal(tmp_path / "right", full)
    assert_equal(reshard.open(tmp_path / "right"), full)
    write_universal(tmp_path / "silent", full, patterns=None)
    assert_equal(reshard.open(tmp_path / "silent"), full)  # rounded masters
    wrong = {name: -array if array.ndim and name.endswith("0.dense.weight") else array for name, array in full.items()}
    write_universal(tmp_path / "wrong", wrong)
    source = reshard.open(tmp_path / "wrong")
    assert set(source.unreadable) == {f"{kind}.0.dense.weight" for kind in KINDS}
    assert_equal(source, {name: full[name] for name in full if name not in source.unreadable})
