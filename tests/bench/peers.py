"""The same job by other tools: the safetensors library, and MindSpore or PyTorch where a Python with it is named."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

# What `ru_maxrss` says begins with the peak of the process that started this one; this does not.
PEAK = """
def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
"""

# The obvious script: load all ranks, join, cut, save. uint16 stands for bfloat16, which numpy has not.
BY_HAND = """
import sys, time
import numpy as np
from pathlib import Path
from safetensors.numpy import load_file, save_file
import ml_dtypes  # noqa: F401 -- registers bfloat16, which is compared
source, out = Path(sys.argv[1]), Path(sys.argv[2])
began = time.perf_counter()
ranks = [load_file(source / f"rank_{r}" / f"checkpoint_{r}.safetensors") for r in range(8)]
whole = {n: np.concatenate([rank[n] for rank in ranks]) if v.ndim == 2 else v for n, v in ranks[0].items()}
for r in range(4):
    (out / f"rank_{r}").mkdir(parents=True)
    part = {n: np.split(v, 4)[r] if v.ndim == 2 else v for n, v in whole.items()}
    save_file(part, out / f"rank_{r}" / f"checkpoint_{r}.safetensors")
print("FIGURES", time.perf_counter() - began, peak())
"""

MINDSPORE = """
import sys, time
import mindspore as ms
source, out, a, b, format = sys.argv[1:6]
began = time.perf_counter()
ms.transform_checkpoints(source, out, "checkpoint_", a, b, output_format=format)
print("FIGURES", time.perf_counter() - began, peak())
"""

RESHARD = """
import sys, time
began = time.perf_counter()
import reshard
source, out, a, b, format = sys.argv[1:6]
plan = reshard.plan(reshard.open(source, strategy=a), reshard.read_strategy(b), format=format)
plan.run(out, fsync=False)
print("FIGURES", time.perf_counter() - began, peak())
"""

_LOAD = """
import sys, time, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from safetensors.torch import save_file
source, out = sys.argv[1:3]
began = time.perf_counter()
state = {}
reader = HuggingFaceStorageReader(source) if HUGGING_FACE else dcp.FileSystemReader(source)
_load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
"""
_TOLD = 'print("FIGURES", time.perf_counter() - began, peak())'

# In one process, as scripts do it: all is loaded, and saved whole. Rows and columns are the same then.
TORCH = {
    "dcp-hf": f"""
HUGGING_FACE = False
{_LOAD}
import os
os.makedirs(out)
save_file(state, out + "/model.safetensors", metadata={{"format": "pt"}})
{_TOLD}
""",
    "dcp-columns": f"""
HUGGING_FACE = False
{_LOAD}
dcp.save(state, storage_writer=dcp.FileSystemWriter(out, sync_files=False), no_dist=True)
{_TOLD}
""",
    "hf-dcp": f"""
HUGGING_FACE = True
{_LOAD}
dcp.save(state, storage_writer=dcp.FileSystemWriter(out, sync_files=False), no_dist=True)
{_TOLD}
""",
}


def told(out: str) -> tuple[float, int]:
    """Return the seconds and the peak memory that a script tells."""
    _, seconds, peak = next(line for line in out.splitlines() if line.startswith("FIGURES")).split()
    return float(seconds), int(peak)


def torch_table(titles: dict[str, str], figures: list[dict[str, Any]]) -> None:
    """Print how long PyTorch took for rows, in the same rounds: medians."""
    if not any(row["torch"] for row in figures):
        return
    print("\n| PyTorch loads all, saves it | process | imports left out | CPU | peak | reshard | theirs ÷ ours |")
    print("|---|---|---|---|---|---|---|")
    for row in figures:
        if row["torch"]:
            whole, cpu, seconds, peak = (statistics.median(some) for some in zip(*row["torch"], strict=True))
            ours = statistics.median(row["seconds"])
            print(
                f"| {titles[row['row']]} | {whole:.2f} s | {seconds:.2f} s | {cpu:.2f} s | {peak / 1e6:,.0f} MB "
                f"| {ours:.2f} s | {seconds / ours:.1f} × |",
                flush=True,
            )


def figures(python: str, script: str, out: Path, *arguments: str) -> tuple[float, int]:
    """Run a script; return the seconds and the peak memory that it tells, imports left out."""
    shutil.rmtree(out, ignore_errors=True)
    done = subprocess.run(
        [python, "-c", PEAK + script, *arguments],
        capture_output=True, text=True, check=False, env={**os.environ, "GLOG_v": "3"},
    )  # fmt: skip
    shutil.rmtree(out, ignore_errors=True)
    if done.returncode:
        sys.exit(f"a peer failed:\n{done.stderr[-2000:]}")
    return told(done.stdout)


def against_peers(root: Path, mindspore: str | None) -> list[dict[str, object]]:
    """Print how long others take for tp8 → tp4, each right before ours; medians of three pairs."""
    out = root / "out"
    print("\n| tp8 → tp4, imports left out of theirs | theirs | reshard | theirs ÷ ours | their peak | ours |")
    print("|---|---|---|---|---|---|")
    found = []
    peers = [("safetensors load, concatenate, save", "st", sys.executable, BY_HAND)]
    if mindspore:
        peers += [
            ("MindSpore, safetensors", "st", mindspore, MINDSPORE),
            ("MindSpore, .ckpt", "ckpt", mindspore, MINDSPORE),
        ]
    for title, name, python, script in peers:
        if not (root / name).exists():
            continue
        format = "ckpt" if name == "ckpt" else "safetensors"
        arguments = [
            str(root / name),
            str(out),
            str(root / f"{name}.strategy.ckpt"),
            str(root / "tp4.strategy.ckpt"),
            format,
        ]
        pairs = []
        for _ in range(3):
            theirs = figures(python, script, out, *arguments)
            pairs.append((theirs, figures(sys.executable, RESHARD, out, *arguments)))
        theirs, ours = sorted(pairs, key=lambda pair: pair[0][0] / pair[1][0])[1]
        print(
            f"| {title} | {theirs[0]:.2f} s | {ours[0]:.2f} s | {theirs[0] / ours[0]:.1f} × | {theirs[1] / 1e6:.0f} MB "
            f"| {ours[1] / 1e6:.0f} MB |",
            flush=True,
        )
        found.append({"peer": title, "pairs": pairs})
    return found
