"""Trainings with DeepSpeed that are not the usual ones: other optimizers, empty parameters, experts, odd names."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import assert_equal
from commands import done
from deepspeed_files import KINDS, size, values, write_zero
from refusals import failed, refused
from saves_files import tensor, write_save

import reshard
from reshard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GROUPS = ({"a.weight": (5, 3), "b.weight": (2, 4, 3)}, {"a.bias": (7,), "scale": (1,)})


def each_group(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], None]:
    """Change the states of each group."""

    def changed(values: dict[str, Any]) -> None:
        for state in (values.get("base_optimizer_state") or values["optimizer_state_dict"])["state"].values():
            change(state)

    return changed


def without(full: dict[str, Any], *kinds: str) -> dict[str, Any]:
    return {name: full[name] for name in full if name.partition(".")[0] not in kinds}


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_that_are_not_flat_are_unreadable(tmp_path: Path, stage: int, ranks: int) -> None:
    """As of optimizers in 8 bits, which scale blocks, and of Muon, whose ranks have whole parameters."""
    odd: dict[str, Any] = {
        "absmax1": tensor(np.ones(64, np.float32)), "table": tensor(np.ones((2, 2), np.float32)), "text": "momentum",
        "nothing": None,
    }  # fmt: skip
    full = write_zero(tmp_path / "run", GROUPS, stage=stage, ranks=ranks, optim=each_group(lambda s: s.update(odd)))
    source = reshard.open(tmp_path / "run")
    assert_equal(source, full)
    names = [name for group in GROUPS for name in group]
    assert set(source.unreadable) == {f"{kind}.{name}" for kind in ("absmax1", "table", "text") for name in names}
    failed(4, "unreadable-tensor", "convert", tmp_path / "run", tmp_path / "out", "--to", "hf")
    done("convert", tmp_path / "run", tmp_path / "out", "--to", "hf", "--weights-only")


@pytest.mark.parametrize("stage", [2, 3])
def test_states_of_any_name_are_states(tmp_path: Path, stage: int) -> None:
    """As the format says, whatever the optimizer calls them; they go to a Universal Checkpoint and to no average."""
    optim = each_group(lambda state: state.update(shadow=state.pop("exp_avg")))
    full = write_zero(tmp_path / "run", GROUPS, stage=stage, ranks=2, optim=optim)
    full = {name.replace("exp_avg.", "shadow."): value for name, value in full.items()}
    source = reshard.open(tmp_path / "run")
    assert_equal(source, full)
    weights = {name for name in full if name.partition(".")[0] not in {"shadow", "fp32", "exp_avg_sq", "step"}}
    assert set(source.sel(kind="weights")) == set(reshard.average([source, source])) == weights
    done("convert", tmp_path / "run", tmp_path / "hf", "--to", "hf", "--weights-only")
    assert set(reshard.open(tmp_path / "hf")) == weights
    done("convert", tmp_path / "run", tmp_path / "out", "--to", "deepspeed-universal")
    assert_equal(reshard.open(tmp_path / "out"), full)
    assert set(reshard.open(tmp_path / "out").sel(kind="weights")) == weights


@pytest.mark.parametrize("stage", [2, 3])
def test_optimizers_without_moments(tmp_path: Path, stage: int) -> None:
    """As SGD is; a Universal Checkpoint of it has masters alone."""
    optim = each_group(lambda state: [state.pop(kind) for kind in (*KINDS[1:], "step")])
    full = without(write_zero(tmp_path / "run", GROUPS, stage=stage, ranks=3, optim=optim), *KINDS[1:], "step")
    assert_equal(reshard.open(tmp_path / "run"), full)
    done("convert", tmp_path / "run", tmp_path / "out", "--to", "deepspeed-universal")
    assert_equal(reshard.open(tmp_path / "out"), full)
    done("verify", tmp_path / "out")


def test_empty_parameters(tmp_path: Path) -> None:
    """With stage 2 they are taken for frozen ones, and for one parameter since all have no memory."""
    empty = {name: tensor(np.zeros(shape, np.float32)) for name, shape in {"void": (0, 3), "none": (0,)}.items()}

    def add(states: dict[str, Any]) -> None:
        states["module"] |= empty
        states["frozen_param_shapes"] = OrderedDict({"void": size((0, 3)), "none": size((0,))})
        states["frozen_param_fragments"] = OrderedDict(empty)
        states["shared_params"] = {"void": "none"}

    full = write_zero(tmp_path, GROUPS, model=add)
    assert_equal(reshard.open(tmp_path), {**full, "void": np.zeros((0, 3), "f4"), "none": np.zeros(0, "f4")})


@pytest.mark.parametrize("stage", [1, 3])
def test_a_weight_with_the_name_of_a_state(tmp_path: Path, stage: int) -> None:
    """A model has `scale`, and a module `fp32` with another."""
    shapes = {"scale": (4,), "fp32.scale": (4,)}
    full = values([{"scale": (4,), "other.scale": (4,)}])
    full |= {name.replace("other", "fp32"): array for name, array in full.items()}
    full["fp32.scale"] = full["fp32.fp32.scale"].astype(ml_dtypes.bfloat16)
    write_zero(tmp_path, [shapes], stage=stage, full=full, model=lambda states: states["module"].update(
        {"fp32.scale": tensor(np.zeros(0, np.uint16) if stage == 3 else full["fp32.scale"].view(np.uint16))}
    ))  # fmt: skip
    with refused(SourceError, "duplicate-name", "fp32.scale"):
        reshard.open(tmp_path)


EXPERTS = "moe.deepspeed_moe.experts.deepspeed_experts."


@pytest.mark.parametrize("partitions", [2, 1])
def test_experts_that_all_ranks_have(tmp_path: Path, partitions: int) -> None:
    """Their states are cut among all ranks, as others are; among fewer ranks, it is not known whose they are."""
    groups = ({"a.weight": (5, 3)}, {f"{EXPERTS}{number}.weight": (4, 3) for number in range(2)})
    full = values(groups)

    def cut(states: dict[str, Any]) -> None:
        for number in range(2):
            name = f"{EXPERTS}{number}.weight"
            path = tmp_path / "global_step3" / f"layer_0_expert_{number}_mp_rank_00_model_states.pt"
            write_save(path, {name: states["module"].pop(name)})

    write_zero(
        tmp_path, groups, full=full, model=cut, optim=lambda values: values.update(partition_count=[2, partitions])
    )
    source = reshard.open(tmp_path)
    states = {name for name in full if name.partition(".")[2] in groups[1]}
    assert set(source.unreadable) == (set() if partitions == 2 else states)
    assert_equal(source, {name: full[name] for name in full if name not in source.unreadable})
    for path in (tmp_path / "global_step3").glob("*optim*"):
        path.unlink()
    assert not reshard.open(tmp_path).unreadable


@pytest.mark.parametrize("tag", ["iter_0000100", "global_step_100", "iteration_00000100", "checkpoint"])
def test_tags_named_like_checkpoints_of_others(tmp_path: Path, tag: str) -> None:
    full = write_zero(tmp_path, GROUPS, tag=tag)
    assert_equal(reshard.open(tmp_path), full)
    done("inspect", tmp_path)


def test_a_picture_of_many_boxes(tmp_path: Path) -> None:
    """A rank has several boxes of a tensor, and one colour."""
    write_zero(tmp_path, [{"w": (11, 7)}], stage=3, ranks=5)
    assert "w" in reshard.open(tmp_path)._repr_html_()
