"""With DeepSpeed installed: it loads the Universal Checkpoints that are written here, and trains on.

python -m venv deepspeed && deepspeed/bin/pip install torch==2.13.0 deepspeed==0.19.8 numpy
RESHARD_DEEPSPEED_PYTHON=deepspeed/bin/python pytest -m deepspeed

A training is saved in the middle, converted here and, where it can, by DeepSpeed's own program; and each of the two is
loaded on other ranks and at other stages. Of one stage, all that follows must be equal, bit for bit.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from commands import done
from deepspeed_files import KINDS, values, write_zero

import reshard

if TYPE_CHECKING:
    from collections.abc import Mapping

PYTHON = os.environ.get("RESHARD_DEEPSPEED_PYTHON", "")

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(not PYTHON, reason="RESHARD_DEEPSPEED_PYTHON names no Python that has DeepSpeed"),
]

SCRIPT = Path(__file__).parent / "deepspeed_training.py"
SAVED_AT, STEPS = 2, 4
DTYPES: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 1}},
    "fp32": {},
}
SCHEDULER = {
    "type": "WarmupLR", "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 6},
}  # fmt: skip


class Saved(NamedTuple):
    """A training that is saved: its stage, ranks and dtype, options of its model, and more of its configuration."""

    stage: int
    ranks: int
    dtype: str
    model: Mapping[str, Any] = {}
    zero: Mapping[str, Any] = {}
    more: Mapping[str, Any] = {}
    own: bool = True  # DeepSpeed's own converter gets it right

    def config(self, stage: int) -> dict[str, Any]:
        zero = {"stage": stage, **(self.zero if stage == self.stage else {})}
        return {"zero_optimization": zero, "zero_allow_untested_optimizer": True, **DTYPES[self.dtype], **self.more}


SAVES = {
    "s1": Saved(1, 2, "bf16", more={"scheduler": SCHEDULER}),
    "s2_fp16": Saved(2, 2, "fp16"),
    "s2_fp32": Saved(2, 3, "fp32"),
    "s3": Saved(3, 3, "bf16", {"tied": True, "frozen": True, "decay": 0.1}, more={"scheduler": SCHEDULER}),
    "s3_fp32": Saved(3, 2, "fp32", {"groups": 1}),
    "s3_decay": Saved(3, 2, "bf16", own=False),
    "frozen": Saved(1, 2, "bf16", {"tied": True, "frozen": True}),
    "round_robin": Saved(2, 2, "bf16", zero={"round_robin_gradients": True}, own=False),
    "bf16_optimizer": Saved(1, 2, "bf16", more={"data_types": {"grad_accum_dtype": "fp32"}}),
    "elastic": Saved(2, 2, "bf16", zero={"elastic_checkpoint": True}, own=False),
}

OWN = [("s1", 1, 3), ("s2_fp16", 2, 3), ("s2_fp32", 1, 2), ("s3", 3, 1), ("frozen", 1, 3), ("bf16_optimizer", 1, 3)]
"""Loaded at a stage for which DeepSpeed's own converter writes, on other ranks: saved, stage, ranks."""

GONE_ON = [
    ("s1", 1, 2), ("s2_fp16", 2, 2), ("s2_fp32", 2, 3), ("s3_fp32", 3, 2), ("frozen", 1, 2), ("round_robin", 2, 2),
    ("bf16_optimizer", 1, 2), ("elastic", 2, 2),
]  # fmt: skip
"""Loaded as it was saved: what follows must be what follows without interruption."""

CROSSED = [
    ("s1", 3, 2), ("s2_fp16", 3, 3), ("s3", 1, 2), ("s3", 2, 3), ("frozen", 3, 1), ("s3_decay", 2, 3),
    ("round_robin", 3, 3), ("elastic", 3, 1),
]  # fmt: skip
"""Loaded at another stage, for which DeepSpeed has no converter."""

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def saves() -> dict[str, Saved]:
    """The trainings that DeepSpeed does on this processor: some have no float16."""
    code = "from deepspeed.accelerator import get_accelerator; print(bool(get_accelerator().is_fp16_supported()))"
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": ""}
    asked = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True, env=environment)
    has_float16 = asked.stdout.split()[-1] == "True"
    return {name: saved for name, saved in SAVES.items() if has_float16 or saved.dtype != "fp16"}


@pytest.fixture(autouse=True)
def _only_if_it_trains(request: pytest.FixtureRequest) -> None:
    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")
    if name and name not in request.getfixturevalue("saves"):
        pytest.skip("DeepSpeed trains in no float16 on this processor")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, saves: dict[str, Saved]) -> Path:
    """A directory with all trainings: `saved/NAME`, `ours/NAME`, `own/NAME`."""
    root = tmp_path_factory.mktemp("deepspeed")
    jobs = []
    for name, saved in saves.items():
        job = {"save": f"{root}/saved/{name}", "save_at": SAVED_AT, "steps": STEPS, "result": f"{root}/{name}.npz"}
        if saved.own:
            job["convert"] = f"{root}/own/{name}"
        jobs.append({**job, "config": saved.config(saved.stage), "ranks": saved.ranks, "model": saved.model})
    train(root, jobs)
    for name in saves:
        done("convert", root / "saved" / name, root / "ours" / name, "--to", "deepspeed-universal")
    return root


def train(root: Path, jobs: list[dict[str, Any]]) -> None:
    """Do jobs with DeepSpeed; there is one process for all of them."""
    (root / "jobs.json").write_text(json.dumps(jobs))
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": ""}
    ended = subprocess.run(
        [PYTHON, SCRIPT, root / "jobs.json"], capture_output=True, text=True, check=False, env=environment
    )
    assert ended.returncode == 0, ended.stderr[-4000:]


def read(path: Path) -> dict[str, Any]:
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files}


@pytest.fixture(scope="module")
def results(root: Path, saves: dict[str, Saved]) -> Results:
    """What follows of each loaded checkpoint, by `WHOSE/NAME/STAGE/RANKS`; and uninterrupted, by `NAME`."""
    wanted = {("ours", *each) for each in (*OWN, *GONE_ON, *CROSSED)} | {("own", *each) for each in OWN}
    jobs, paths = [], {name: root / f"{name}.npz" for name in saves}
    for whose, name, stage, ranks in sorted(each for each in wanted if each[1] in saves):
        config = SAVES[name]._replace(zero={}).config(stage)
        paths[f"{whose}/{name}/{stage}/{ranks}"] = path = root / f"{whose}-{name}-{stage}-{ranks}.npz"
        as_tag = whose == "own" or ranks % 2  # what is written here may be given by itself, too
        given = {"load": f"{root}/{whose}", "tag": name} if as_tag else {"load": f"{root}/ours/{name}"}
        jobs.append({
            "config": {**config, "checkpoint": {"load_universal": True}}, "ranks": ranks, "model": SAVES[name].model,
            "steps": STEPS - SAVED_AT, "result": str(path), **given,
        })  # fmt: skip
    train(root, jobs)
    return {name: read(path) for name, path in paths.items()}


def differing(some: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    return [
        name for name, array in some.items()
        if array.shape != others[name].shape or array.tobytes() != others[name].tobytes()
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "stage", "ranks"), OWN)
def test_all_is_as_after_deepspeeds_own_conversion(results: Results, name: str, stage: int, ranks: int) -> None:
    ours, own = (results[f"{whose}/{name}/{stage}/{ranks}"] for whose in ("ours", "own"))
    assert ours.keys() == own.keys()
    assert differing(ours, own) == []
    assert len(ours["losses"]) == STEPS - SAVED_AT


@pytest.mark.parametrize(("name", "stage", "ranks"), GONE_ON)
def test_it_goes_on_as_without_interruption(results: Results, name: str, stage: int, ranks: int) -> None:
    ours, whole = results[f"ours/{name}/{stage}/{ranks}"], results[name]
    assert ours["losses"].tolist() == whole["losses"][SAVED_AT:].tolist()
    weights = {key: array for key, array in whole.items() if key.partition(".")[0] not in {"losses", "client", "flat"}}
    assert differing(weights, ours) == []
    assert json.loads(str(ours["client"])) == {"note": "a client's own", "iteration": SAVED_AT}


@pytest.mark.parametrize(("name", "stage", "ranks"), CROSSED)
def test_states_and_losses_at_another_stage(root: Path, results: Results, name: str, stage: int, ranks: int) -> None:
    """Masters and moments are those of the files, bit for bit; stages round differently from then on."""
    ours, whole = results[f"ours/{name}/{stage}/{ranks}"], results[name]
    saved = reshard.open(root / "saved" / name)
    states = [key.removeprefix("loaded.") for key in ours if key.startswith("loaded.")]
    assert len(states) == 3 * len([key for key in saved.tensors if key.startswith("fp32.")])
    for state in states:
        assert ours[f"loaded.{state}"].tobytes() == saved[state].compute().tobytes(), state
    np.testing.assert_allclose(ours["losses"], whole["losses"][SAVED_AT:], rtol=2e-3)
    assert json.loads(str(ours["client"])) == {"note": "a client's own", "iteration": SAVED_AT}


def test_hyper_parameters_that_differ_between_groups(results: Results) -> None:
    """Stage 3 takes those of the first group for all groups, so that those that differ are left out."""
    assert results["ours/s1/3/2"]["decay"].tolist() == [0.1, 0]
    assert results["ours/s3_decay/2/3"]["decay"].tolist() == [0.1, 0]
    assert results["ours/s1/3/2"]["loaded_lr"].tolist() == results["ours/s1/1/3"]["loaded_lr"].tolist() != [0.01, 0.01]


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_tensor_parallel_ranks_get_their_parts(tmp_path: Path, parts: int) -> None:
    """Of a checkpoint of two ranks, by the patterns that the training recorded."""
    shapes = {"columns.weight": (12, 5), "rows.weight": (4, 6), "gated.weight": (24, 3), "same.bias": (5,)}
    full = values([shapes])

    def part_of(name: str, part: int, count: int) -> Any:
        array = full[name]
        if not array.ndim or name.endswith("same.bias"):
            return array
        if name.endswith("gated.weight"):
            return np.concatenate([np.split(half, count)[part] for half in np.split(array, 2)])
        return np.split(array, count, int(name.endswith("rows.weight")))[part]

    patterns = {
        "tp_replicated_parameter_patterns": ["same.bias"], "parameter_with_row_parallelism_patterns": ["rows.+"],
        "parameter_with_2_sub_params_cat_dim_0": ["gated.+"],
    }  # fmt: skip
    for part in range(2):
        local = {name: part_of(name, part, 2) for name in full}
        groups = [{name: local[name].shape for name in shapes}]
        extra = {"universal_checkpoint_info": patterns, "mp_world_size": 2}
        write_zero(tmp_path / "src", groups, full=local, part=part, extra=extra)
    done("convert", tmp_path / "src", tmp_path / "out", "--to", "deepspeed-universal")
    train(tmp_path, [{
        "folder": f"{tmp_path}/out/zero", "parts": parts, "result": f"{tmp_path}/parts.npz",
        "shapes": {name: part_of(name, 0, parts).shape for name in shapes},
    }])  # fmt: skip
    found = read(tmp_path / "parts.npz")
    assert len(found) == parts * len(KINDS) * len(shapes)
    for key, array in found.items():
        part, _, name = key.partition(".")
        assert array.tobytes() == part_of(name, int(part), parts).tobytes(), key


def test_they_are_equal_to_what_was_saved(root: Path, saves: dict[str, Saved]) -> None:
    for name in saves:
        done("verify", root / "ours" / name, "--against", root / "saved" / name)
