"""How fast and in how much memory a ZeRO-3 checkpoint becomes a Hugging Face set, beside `cp` and DeepSpeed's script.

    python tests/bench/zero3.py                          # 10 GB, 16 ranks, 5 rounds, beside cp
    RESHARD_DEEPSPEED_PYTHON=… python tests/bench/zero3.py --only script    # beside zero_to_fp32.py, too

The checkpoint is synthetic: layers of a model, random numbers, 12 bytes for each parameter. Arms alternate,
each in a process of its own, and the first round is thrown away. Medians are reported.

* `all`: weights, masters and moments; `cp -r` of the checkpoint followed by `sync -f` is its peer.
* `weights`: weights in bfloat16, rounded from the masters.
* `script`: masters as weights, as `zero_to_fp32.py` makes them, in memory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import OrderedDict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from measure import RESHARD, measured
from saves_files import Global, Made, tensor, write_save

if TYPE_CHECKING:
    from collections.abc import Sequence

HIDDEN, INNER, VOCABULARY = 2048, 5504, 32003
LAYER = {
    "self_attn.qkv_proj.weight": (3 * HIDDEN, HIDDEN), "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "mlp.gate_proj.weight": (INNER, HIDDEN), "mlp.up_proj.weight": (INNER, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INNER), "input_layernorm.weight": (HIDDEN,),
}  # fmt: skip
SUB_GROUP = 10**8
VERSION = {"version": b"3\n"}  # which PyTorch asks for
KINDS = {"fp32": 0.02, "exp_avg": 1e-3, "exp_avg_sq": 1e-6}


def shapes(nbytes: float) -> list[dict[str, tuple[int, ...]]]:
    """Shapes of parameters by sub-group, of about so many bytes of states."""
    whole = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    layers = max(1, int((nbytes / 12 - sum(map(prod, whole.values()))) / sum(map(prod, LAYER.values()))))
    for number in range(layers):
        whole |= {f"model.layers.{number}.{name}": shape for name, shape in LAYER.items()}
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in whole.items():
        if sum(map(prod, groups[-1].values())) >= SUB_GROUP:
            groups.append({})
        groups[-1][name] = shape
    return groups


def stored(array: np.ndarray[Any, Any]) -> Made:
    """Return a tensor that PyTorch loads, too."""
    made = tensor(array)
    made.reduced = (Global("torch._utils", "_rebuild_tensor_v2"), *made.reduced[1:])
    return made


def write(root: Path, groups: Sequence[dict[str, tuple[int, ...]]], ranks: int) -> None:
    """Write a checkpoint, rank by rank."""
    placeholders = OrderedDict((name, stored(np.zeros(0, np.uint16))) for group in groups for name in group)
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    for rank in range(ranks):
        base = np.random.default_rng(rank).standard_normal(1 << 20, np.float32)
        flats: dict[str, list[Made]] = {kind: [] for kind in KINDS}
        for group in groups:
            count = sum(-(-prod(shape) // ranks) for shape in group.values())
            for kind, scale in KINDS.items():
                values = np.abs(base) if kind == "exp_avg_sq" else base
                flats[kind].append(stored(np.resize(values * np.float32(scale), count)))
        state = {
            number: {"step": stored(np.array(5, np.float32)), **{kind: flats[kind][number] for kind in list(KINDS)[1:]}}
            for number in range(len(groups))
        }
        optimizer: dict[str, Any] = {
            "zero_stage": 3, "partition_count": ranks, "fp32_flat_groups": flats["fp32"],
            "optimizer_state_dict": {"state": state, "param_groups": [{"lr": 1e-3, "params": [*range(len(groups))]}]},
        }  # fmt: skip
        directory = root / "global_step5"
        write_save(
            directory / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            {"optimizer_state_dict": optimizer, "ds_config": config, "ds_version": "0.19.8"},
            records=VERSION,
        )
        write_save(
            directory / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
            {
                "module": placeholders, "buffer_names": [], "optimizer": None,
                "param_shapes": [
                    OrderedDict((name, Made("Size", shape)) for name, shape in group.items()) for group in groups
                ],
                "frozen_param_shapes": {}, "frozen_param_fragments": {}, "shared_params": {}, "global_steps": 5,
                "skipped_steps": 0, "dp_world_size": ranks, "mp_world_size": 1, "ds_version": "0.19.8",
                "ds_config": config,
            },
            records=VERSION,
        )  # fmt: skip
    (root / "latest").write_text("global_step5")


def main() -> None:
    """Run the arms and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=10e9, help="bytes of the checkpoint")
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", default="all,weights", help="arms, with commas between")
    parser.add_argument("--directory", type=Path, help="a directory on the disk to be measured")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        run, target = root / "run", root / "target"
        write(run, shapes(options.size), options.ranks)
        copy = ["sh", "-c", f"cp -r {run} {target} && sync -f {target}"]
        arms = {
            "all": [*RESHARD, "convert", str(run), str(target), "--to", "hf"],
            "weights": [*RESHARD, "convert", str(run), str(target), "--to", "hf", "--weights-only"],
            "script": [*RESHARD, "convert", str(run), str(target), "--to", "hf", "--include", "fp32.*"],
        }
        chosen = {name: arms[name] for name in options.only.split(",")}
        if "script" in chosen:
            python = os.environ["RESHARD_DEEPSPEED_PYTHON"]
            chosen["zero_to_fp32"] = [python, "-m", "deepspeed.utils.zero_to_fp32", str(run), str(target)]
        results: dict[str, list[tuple[float, int]]] = {name: [] for name in ("cp", *chosen)}
        for number in range(options.runs + 1):
            for name, command in (("cp", copy), *chosen.items()):
                os.sync()
                result = measured(*command)
                shutil.rmtree(target)
                if number:
                    results[name].append((result.seconds, result.peak))
        beside = statistics.median(seconds for seconds, _ in results["cp"])
        for name, of_arm in results.items():
            seconds = [each for each, _ in of_arm]
            median, peak = statistics.median(seconds), max(each for _, each in of_arm)
            sys.stdout.write(
                f"{name:14} {median:6.2f} s ({min(seconds):.2f}-{max(seconds):.2f}), {median / beside:.2f} x cp, "
                f"{peak / 1e6:,.0f} MB\n"
            )
    finally:
        shutil.rmtree(root)
        subprocess.run(["sync"], check=True)


if __name__ == "__main__":
    main()
