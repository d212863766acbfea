"""How long the way through a zarr store takes, compared with the direct one and `cp -r`, all in one run.

    python tests/bench/zarr_route.py                   # 2 GB, 5 rounds; about five minutes
    python tests/bench/zarr_route.py --values weights  # numbers as weights have them, which compress a little

As in `bench.py`: arms in random order, memory touched before each, the first round thrown away, warm, without fsync.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
from pathlib import Path

import bench
import ml_dtypes
import numpy as np

STORES = {"zarr": [], "zstd": ["--compression", "zstd"], "zstd3": ["--compression", "zstd:3"]}


def as_weights(root: Path) -> None:
    """Make random bytes bfloat16 numbers of a normal distribution, with the deviation of a layer's weights."""
    values = np.random.default_rng(1).normal(0, 0.02, 32 << 20).astype(ml_dtypes.bfloat16).tobytes()
    for number, path in enumerate(sorted(root.rglob("*.safetensors"))):
        with path.open("r+b") as file:
            nbytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(nbytes))
            for tensor in (tensor for name, tensor in header.items() if name != "__metadata__"):
                shift = number << 20 if len(tensor["shape"]) > 1 else 0  # blocks differ, but norms are replicas
                begin, end = tensor["data_offsets"]
                for offset in range(begin, end, len(values) - shift):
                    piece = values[shift : shift + end - offset]
                    os.pwrite(file.fileno(), piece, 8 + nbytes + offset)


def arms(root: Path) -> dict[str, list[str]]:
    """Every command that is timed."""
    source, target = str(root / "st"), str(root / "tp4.strategy.ckpt")
    strategy = ["--source-strategy", str(root / "st.strategy.ckpt")]
    out, quiet = str(root / "out"), ["-q", "--tune=fsync=no"]
    transform, split = [*bench.RESHARD, "convert"], ["--target-strategy", target, *quiet]
    found = {
        "cp -r": ["cp", "-r", source, out],
        "direct": [*transform, source, out, *strategy, *split],
    }
    for name, options in STORES.items():
        unify = [*bench.RESHARD, "convert", source, out, *strategy, "--to", "zarr", *options, *quiet]
        found[f"merge to {name}"] = unify
        found[f"split from {name}"] = [*transform, str(root / name), out, *split, "--to", "safetensors"]
    return found


def main() -> None:
    """Make the data and the stores, time the arms, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", default="2GB", help="size of the source (default 2GB)")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default 5)")
    parser.add_argument("--values", choices=["random", "weights"], default="random", help="what the tensors hold")
    parser.add_argument("--dir", type=Path, default=Path("bench-data"), help="where the data goes; removed afterwards")
    options = parser.parse_args()
    from dask.utils import parse_bytes

    root, out = options.dir, options.dir / "out"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    try:
        job = bench.make_data(root, parse_bytes(options.bytes), {"st"})
        if options.values == "weights":
            as_weights(root / "st")
        commands = arms(root)
        for name in STORES:
            bench.timed([str(root / name) if word == str(out) else word for word in commands[f"merge to {name}"]])
            nbytes = sum(path.stat().st_size for path in (root / name).rglob("*") if path.is_file())
            files = sum(path.is_file() for path in (root / name).rglob("*"))
            print(f"{name}: {files} files, {nbytes / job:.3f} of the source's bytes")
        found: dict[str, list[bench.Measured]] = {name: [] for name in commands}
        for turn in range(options.rounds + 1):
            for name, command in random.sample(list(commands.items()), len(commands)):
                shutil.rmtree(out, ignore_errors=True)
                os.sync()
                read = root / name.removeprefix("split from ") if name.startswith("split") else root / "st"
                bench.prepare(job, source=read, cold=False)
                timing = bench.timed(command)
                if turn:
                    found[name].append(timing)
        copy = statistics.median(timing.seconds for timing in found["cp -r"])
        print("\n| what | time ÷ `cp -r` | time | CPU | peak |\n|---|---|---|---|---|")
        for name, timings in found.items():
            seconds = [timing.seconds for timing in timings]
            print(
                f"| {name} | {statistics.median(seconds) / copy:.2f} × | {bench.spread(seconds)} s "
                f"| {statistics.median(t.cpu for t in timings):.2f} s | {max(t.peak for t in timings) / 1e6:.0f} MB |"
            )
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
