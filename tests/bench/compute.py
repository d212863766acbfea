"""How long computing takes, beside `cat` of the inputs and `cp` of the output, all in one run.

    python tests/bench/compute.py                          # 8 checkpoints of 1 GB; about five minutes
    python tests/bench/compute.py --bytes 4GB --rounds 1   # as large as the issue asks: 36 GB on the disk
    RESHARD_TORCH_PYTHON=... python tests/bench/compute.py --torch     # the same average by torch: load all, add, save

Averages are of bfloat16 in different layouts and formats, to a Hugging Face set. `cat + cp` is the time of `cat` of the
inputs to nothing plus that of `cp` of the output. Arms alternate; ratios are medians of rounds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np

import reshard

RESHARD = [sys.executable, "-m", "reshard"]
SIDE, QUIET = 4096, ["-q", "--tune=fsync=no"]
TORCH = """
import sys, torch
from safetensors.torch import load_file, save_file
from pathlib import Path
*sources, target = sys.argv[1:]
total = None
for source in sources:
    loaded = {}
    for path in sorted(Path(source).glob("*.safetensors")):
        loaded.update(load_file(path))
    part = {name: tensor.float() * (1 / len(sources)) for name, tensor in loaded.items()}
    total = part if total is None else {name: total[name] + tensor for name, tensor in part.items()}
save_file({name: tensor.to(torch.bfloat16) for name, tensor in total.items()}, target)
"""


def write_set(root: Path, nbytes: int, seed: int, *, fp8: bool = False) -> None:
    """Write a Hugging Face set of square matrices, of bfloat16 or of float8 with scales."""
    root.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 0.02, SIDE * SIDE).astype(np.float32).astype(ml_dtypes.bfloat16)
    codes = rng.integers(0, 127, SIDE * SIDE, np.uint8)
    content = codes.tobytes() if fp8 else values.tobytes()
    scales = rng.random((SIDE // 128, SIDE // 128), np.float32).tobytes()
    count = max(1, nbytes // len(content))
    weight_map = {}
    for first in range(0, count, 32):
        name = f"model-{first // 32 + 1:05d}-of-{-(-count // 32):05d}.safetensors"
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        pieces = []
        for number in range(first, min(count, first + 32)):
            shapes = [(f"layers.{number}.weight", "F8_E4M3" if fp8 else "BF16", [SIDE, SIDE], content)]
            if fp8:
                side = SIDE // 128
                shapes.append((f"layers.{number}.weight_scale_inv", "F32", [side, side], scales))
            for tensor, dtype, shape, data in shapes:
                header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
                at += len(data)
                pieces.append(data)
                weight_map[tensor] = name
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        with (root / name).open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for piece in pieces:
                file.write(piece)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    config = {"architectures": ["Bench"], **({"quantization_config": quantization} if fp8 else {})}
    (root / "config.json").write_text(json.dumps(config))


def made(root: Path, nbytes: int, seed: int, *, fp8: bool = False) -> None:
    """Write a set in a process of its own: the memory of this one counts as that of its children."""
    process = multiprocessing.get_context("spawn").Process(
        target=write_set, args=(root, nbytes, seed), kwargs={"fp8": fp8}
    )
    process.start()
    process.join()
    assert process.exitcode == 0


def layouts(root: Path) -> list[tuple[str, list[str]]]:
    """Return a name and the options of `convert` for each layout of an input."""
    names = [f"layers.{number}.weight" for number in range(1024)]
    options = []
    for name, layout in (("rows", ([8], [0, -1])), ("columns", ([4], [-1, 0]))):
        path = root / f"{name}.ckpt"
        reshard.write_strategy(reshard.Strategy.of({each: reshard.Layout.of(*layout) for each in names}), path)
        options.append((name, ["--to", "safetensors", "--target-strategy", str(path), "--allow-missing", "*"]))
    return [("hf", []), options[0], ("dcp", ["--to", "dcp"]), options[1], ("zarr", ["--to", "zarr"])]


def files(root: Path) -> list[str]:
    """Return all files below a directory that hold contents."""
    return [str(path) for path in sorted(root.rglob("*")) if path.is_file() and ".reshard" not in str(path)]


def timed(command: list[str], *, wall: bool = True) -> tuple[float, float]:
    """Run a command; return its seconds and its peak memory in MB."""
    began = time.perf_counter()
    with Path(os.devnull).open("wb") as nothing, subprocess.Popen(command, stdout=nothing) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0 or not wall, command
    return time.perf_counter() - began, usage.ru_maxrss / 1000


def removed(path: Path) -> None:
    """Remove a target and what lies beside it."""
    for each in (path, path.with_name(f"{path.name}.reshard")):
        if each.is_file():
            each.unlink()
        shutil.rmtree(each, ignore_errors=True)


def beside(title: str, command: list[str], inputs: list[str], out: Path | None, rounds: int) -> None:
    """Time a command beside `cat` of its inputs plus `cp` of its output; print the medians."""
    ours, theirs, ratios, peak = [], [], [], 0.0
    for _ in range(rounds):
        seconds, peak = timed(command, wall=out is not None)
        copied = 0.0
        if out is not None:
            copied, _ = timed(["cp", "-r", str(out), f"{out}.copy"])
            removed(Path(f"{out}.copy"))
            removed(out)
        read, _ = timed(["cat", *inputs])
        ours.append(seconds)
        theirs.append(read + copied)
        ratios.append(seconds / (read + copied))
    median = statistics.median
    print(f"{title:22} {median(ours):6.2f} s, cat{' + cp' * (out is not None)} {median(theirs):6.2f} s, "
          f"ratio {median(ratios):.2f}, peak {peak:.0f} MB", flush=True)  # fmt: skip


def main() -> None:
    """Make the data, time the arms, print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", default="1GB", help="size of a checkpoint (default 1GB)")
    parser.add_argument("--count", type=int, default=8, help="checkpoints to average (default 8)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--torch", action="store_true", help="average Hugging Face sets, and by torch too")
    parser.add_argument("--only", default="average,dequantize,stats,diff", help="the arms")
    parser.add_argument("--dir", type=Path, default=Path("bench-data"), help="where the data goes; removed afterwards")
    options = parser.parse_args()
    from dask.utils import parse_bytes

    root, size = options.dir, parse_bytes(options.bytes)
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    arms = options.only.split(",")
    try:
        kinds = [("hf", list[str]())] if options.torch else layouts(root)
        sources = []
        for number in range(options.count if "average" in arms else 2):
            name, convert = kinds[number % len(kinds)]
            path = root / f"{number}-{name}"
            made(root / "set" if convert else path, size, number)
            if convert:
                timed([*RESHARD, "convert", str(root / "set"), str(path), *convert, *QUIET])
                shutil.rmtree(root / "set")
            sources.append(path)
        inputs = [file for source in sources for file in files(source)]
        print(f"{len(sources)} checkpoints of {options.bytes}: {', '.join(path.name for path in sources)}", flush=True)
        out = root / "out"
        if "average" in arms:
            command = [*RESHARD, "average", *map(str, sources), str(out), "--to", "hf", *QUIET]
            beside("average", command, inputs, out, options.rounds)
            if options.torch:
                python = os.environ.get("RESHARD_TORCH_PYTHON", sys.executable)
                script = [python, "-c", TORCH, *map(str, sources), str(root / "out.safetensors")]
                beside("average by torch", script, inputs, root / "out.safetensors", 1)
        if "stats" in arms:
            beside("stats", [*RESHARD, "stats", str(sources[0])], files(sources[0]), None, options.rounds)
        if "diff" in arms:
            pair = files(sources[0]) + files(sources[1])
            beside("diff", [*RESHARD, "diff", *map(str, sources[:2])], pair, None, options.rounds)
        if "dequantize" in arms:
            made(root / "fp8", size, 0, fp8=True)
            command = [
                *RESHARD,
                "convert",
                str(root / "fp8"),
                str(out),
                "--dequantize",
                "bfloat16",
                "--to",
                "hf",
                *QUIET,
            ]
            beside("dequantize", command, files(root / "fp8"), out, options.rounds)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
