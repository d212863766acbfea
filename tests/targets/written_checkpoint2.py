"""Sources, strategies and files of the tests of Checkpoint 2.0 as a target."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import helpers
import numpy as np
from checkpoints import numbers, write_file

import reshard
from reshard import Layout, Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


CASES = sorted(
    {path.split("/")[1] for path in helpers.packed_files("checkpoint2") if path.count("/") > 3 and "dcp_" not in path}
)
MORE = ["graph_tied_pp2", "graph_tied_pp2_zero_once", "pynative_pp2"]
CUT = [name for name in CASES if name != "graph_1"]
SUBMESH = "pynative_submesh"
TRACKER = "latest_checkpointed_iteration.txt"
NAMES = ["epoch_num", "step_num", "global_step", "loss_scale", "global_batch_size", "consumed_samples", "ckpt_status"]

FULL = numbers({"h.0.w": (8, 12), "h.1.w": (8, 12), "emb": (16, 4), "norm": (12,)})
STATES = {f"adam_m.{name}": value + 1 for name, value in FULL.items()}
EVERYTHING = {**FULL, **STATES, "global_step": np.array([7], np.int32)}
LISTED = [*FULL, *STATES]


def strategy(matrix: list[int], maps: Mapping[str, list[Any]], optimizer: int = 0, stages: int = 1) -> Strategy:
    """The same for a weight and its states; layer n is in stage n, the embedding in all."""
    layouts: dict[str, Any] = {}
    for name in LISTED:
        weight = name.removeprefix("adam_m.")
        layout = Layout.of(matrix, maps.get(weight, [-1] * FULL[weight].ndim), optimizer)
        own = {"h.0.w": [0], "h.1.w": [stages - 1], "norm": [stages - 1]}.get(weight, range(stages))
        layouts[name] = dict.fromkeys(own, layout)
    return Strategy.of(layouts)


STRATEGIES = {
    "tensor parallel": strategy([2, 2], {"h.0.w": [0, -1], "h.1.w": [-1, 0], "emb": [0, -1]}),
    "optimizer parallel": strategy([2, 2], {"h.0.w": [0, -1], "h.1.w": [-1, 0], "emb": [(0, 1), -1]}, -1),
    "a part of an axis": strategy([8, 1], {}, 2),
    "a pipeline": strategy([2, 2], {"h.0.w": [1, 0], "h.1.w": [-1, 1], "emb": [0, -1]}, -1, stages=2),
}


def opened(mindspore_data: Path, name: str) -> tuple[reshard.Checkpoint, dict[str, Any]]:
    root = mindspore_data / ("checkpoint2_more" if name in MORE else "checkpoint2") / name
    source = reshard.open(root / "checkpoint")
    return source, {key: value for key, value in np.load(root / "full.npz").items() if key in source}


def rows(full: Mapping[str, Any]) -> Strategy:
    """Rows over two of four ranks."""
    some = {name: value.ndim for name, value in full.items() if value.ndim and not value.shape[0] % 2}
    return Strategy.of({name: Layout.of([2, 2], [1, *[-1] * (ndim - 1)]) for name, ndim in some.items()})


def whole_file(tmp_path: Path, tensors: Mapping[str, Any] = EVERYTHING, name: str = "net.safetensors") -> Any:
    return reshard.open(write_file(tmp_path / name, tensors))


def metadata(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place / "metadata.json").read_text())
    return found
