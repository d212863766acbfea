"""Measure `reshard runs` on many checkpoints: how long the list takes, and until the newest complete one is known.

    python tests/bench/runs.py [--checkpoints 1000] [--files 64] [--tensors 8] [--directory DIR]

Each checkpoint is a copy, by hard links, of one that reshard writes: files of ranks with a strategy next to them, a
Hugging Face set, and a DCP. Each format is measured in a process of its own, three times; medians are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import reshard

sys.path.insert(0, str(Path(__file__).parent.parent))

from measure import RESHARD, measured


def write(folder: Path, files: int, tensors: int) -> None:
    """Write one checkpoint of each format."""
    layout = reshard.Layout.of([files], [0, -1])
    strategy = reshard.Strategy.of({f"layers.{number}.weight": layout for number in range(tensors)})
    block = {name: np.ones((1, 8), np.float32) for name in strategy.tensors}
    for rank in range(files):
        (folder / f"ranks/rank_{rank}").mkdir(parents=True)
        save_file(block, folder / f"ranks/rank_{rank}/checkpoint_{rank}.safetensors")
    reshard.write_strategy(strategy, folder / "strategy.json")
    source = {"source_strategy": folder / "strategy.json"}
    reshard.convert(folder / "ranks", folder / "dcp", to="dcp", target_strategy=folder / "strategy.json", **source)
    size = -(-files * 32 * tensors // files)
    reshard.convert(folder / "ranks", folder / "hf", to="hf", max_shard_size=size, **source)
    for name in ("dcp", "hf"):
        shutil.rmtree(folder / name / ".reshard")


def measure(run: Path) -> tuple[float, float, set[str]]:
    """Return the seconds of the list, and of the newest one alone, and the states."""
    listed, newest = (measured(*RESHARD, "runs", str(run), *option) for option in (["--json"], ["--newest"]))
    if listed.code or newest.code:
        raise SystemExit(listed.err + newest.err)
    states = {each["state"] for each in json.loads(listed.out)["checkpoints"]}
    return listed.seconds, newest.seconds, states


def main() -> None:
    """Write, list and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=1000)
    parser.add_argument("--files", type=int, default=64)
    parser.add_argument("--tensors", type=int, default=8)
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        folder = Path(directory)
        write(folder, options.files, options.tensors)
        for name in ("ranks", "hf", "dcp"):
            run = folder / f"run-{name}"
            for step in range(options.checkpoints):
                shutil.copytree(folder / name, run / f"step-{step}", copy_function=os.link)
            if name == "ranks":
                shutil.copy(folder / "strategy.json", run)
            times = [measure(run) for _ in range(3)]
            whole, newest = (statistics.median(seconds) for seconds in list(zip(*times, strict=True))[:2])
            files = sum(path.is_file() for path in run.rglob("*"))
            print(f"{name}: {files:,} files, {whole:.2f} s, newest {newest:.2f} s, {', '.join(times[0][2])}")
            shutil.rmtree(run)


if __name__ == "__main__":
    main()
