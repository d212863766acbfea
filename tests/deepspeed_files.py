"""Writes small checkpoints of DeepSpeed's ZeRO, with any number of ranks, and faults."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from saves_files import Made, tensor, write_save

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from checkpoints import Array

KINDS = ("fp32", "exp_avg", "exp_avg_sq")

Change = "Callable[[dict[str, Any]], object]"


def size(shape: Sequence[int]) -> Made:
    """A `torch.Size`."""
    return Made("Size", tuple(shape))


def truth(case: Path) -> dict[str, Any]:
    """The tensors of a case by the names that reshard gives them, as arrays of their dtypes."""
    info = json.loads((case / "info.json").read_text())
    full = {}
    with np.load(case / "full.npz") as arrays:
        for key in arrays.files:
            dtype = info["dtypes"].get(key, "float32")
            full[key.removeprefix("module.")] = (
                arrays[key].view(ml_dtypes.bfloat16) if dtype == "bfloat16" else arrays[key]
            )
    return full


def values(groups: Sequence[Mapping[str, Sequence[int]]], seed: int = 0) -> dict[str, Array]:
    """Random states of parameters by name, and their weights in bfloat16."""
    rng = np.random.default_rng(seed)
    full: dict[str, Array] = {}
    for group in groups:
        for name, shape in group.items():
            for kind in KINDS:
                full[f"{kind}.{name}"] = rng.standard_normal(tuple(shape), np.float32)
            full[name] = full[f"fp32.{name}"].astype(ml_dtypes.bfloat16)
            full[f"step.{name}"] = np.array(3, np.float32)
    return full


def _buffer(full: Mapping[str, Array], kind: str, group: Mapping[str, Sequence[int]], rank: int, **cut: int) -> Array:
    """A rank's flat buffer of a kind of state, of a group."""
    ranks = cut["ranks"]
    flats = [full[f"{kind}.{name}"].reshape(-1) for name in group] or [np.zeros(0, np.float32)]
    if cut["stage"] < 3:
        flat = np.concatenate(flats)
        each = -(-flat.size // (2 * ranks)) * 2
        padded = np.pad(flat, (0, each * ranks - flat.size))[rank * each : (rank + 1) * each]
        return padded[: max(flat.size - rank * each, 0)] if kind == "fp32" else padded
    sizes = [-(-flat.size // ranks) for flat in flats]
    padded = [np.pad(flat, (0, each * ranks - flat.size)) for flat, each in zip(flats, sizes, strict=True)]
    return np.concatenate([
        flat[rank * each : (rank + 1) * each] for flat, each in zip(padded, sizes, strict=True)
    ])  # fmt: skip


def write_zero(
    root: Path, groups: Sequence[Mapping[str, Sequence[int]]], *, stage: int = 2, ranks: int = 2, step: object = None,
    full: Mapping[str, Array] | None = None, model: Change | None = None, optim: Change | None = None,
    tag: str = "global_step3", part: int = 0, extra: Mapping[str, object] | None = None,
) -> dict[str, Array]:  # fmt: skip
    """Write a checkpoint and return its tensors.

    Args:
        root: the directory of the run.
        groups: the shapes of parameters, by group.
        stage: the stage of ZeRO.
        ranks: the number of ranks.
        step: the step in the optimizer; by default a tensor of 3.
        full: the tensors; by default random ones.
        model, optim: change the values of each file before it is written.
        tag: the name of the checkpoint's directory.
        part: the number of the tensor-parallel part.
        extra: further values of the model states.
    """
    full = dict(full or values(groups))
    for rank in range(ranks):
        buffers = [
            {kind: _buffer(full, kind, group, rank, stage=stage, ranks=ranks) for kind in KINDS} for group in groups
        ]
        state = {
            number: {
                "step": tensor(np.array(3, np.float32)) if step is None else step,
                **{kind: tensor(of_group[kind]) for kind in KINDS[1:]},
            }
            for number, of_group in enumerate(buffers)
        }
        masters = [tensor(of_group["fp32"]) for of_group in buffers]
        torchs = {"state": state, "param_groups": [{"lr": 0.1, "params": [n]} for n in range(len(groups))]}
        if stage == 3:
            inner: dict[str, Any] = {
                "zero_stage": 3, "partition_count": ranks, "optimizer_state_dict": torchs, "fp32_flat_groups": masters,
            }  # fmt: skip
        else:
            inner = {
                "zero_stage": Made("ZeroStageEnum", stage, module="deepspeed.runtime.zero.config"),
                "partition_count": [ranks] * len(groups), "base_optimizer_state": torchs,
                "single_partition_of_fp32_groups": masters,
            }  # fmt: skip
        inner["ds_version"] = "0.19.8"
        if optim:
            optim(inner)
        write_save(
            root / tag / f"bf16_zero_pp_rank_{rank}_mp_rank_{part:02d}_optim_states.pt",
            {"optimizer_state_dict": inner, "ds_config": {"bf16": {"enabled": True}}, "ds_version": "0.19.8"},
        )
    names = [name for name in full if name.partition(".")[0] not in {*KINDS, "step"}]
    for rank in range(ranks if stage == 3 else 1):
        weights = {
            name: tensor((np.zeros(0, ml_dtypes.bfloat16) if stage == 3 else full[name]).view(np.uint16))
            for name in names
        }
        states: dict[str, Any] = {
            "module": OrderedDict(weights), "buffer_names": [], "optimizer": None,
            "param_shapes": [OrderedDict((name, size(shape)) for name, shape in group.items()) for group in groups],
            "frozen_param_shapes": {}, "frozen_param_fragments": {}, "shared_params": {}, "lr_scheduler": None,
            "global_steps": 3, "skipped_steps": 0, "dp_world_size": ranks, "mp_world_size": 1, **(extra or {}),
        }  # fmt: skip
        if model:
            model(states)
        ranked = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        write_save(root / tag / f"{ranked}mp_rank_{part:02d}_model_states.pt", states)
    (root / "latest").write_text(tag)
    return full
