"""Measure `reshard runs` on many checkpoints: how long the list takes, and until the newest complete one is known.

    python tests/bench/runs.py [--checkpoints 1000] [--files 64] [--tensors 8] [--directory DIR]

Each checkpoint is a copy, by hard links, of one that reshard writes: files of ranks with a strategy next to them, a
Hugging Face set, and a DCP, whose metadata name the path and an identifier of the save. Each format is measured in a
process of its own, three times; medians are printed.
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
from uuid import uuid4

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


def write_save(metadata: Path, step: int) -> None:
    """Give the metadata of a DCP a path and an identifier of their own, as PyTorch does."""
    texts = f"/runs/7b/step-{step}".encode(), str(uuid4()).encode()
    path, save = (b"\x8c%c%b\x94" % (len(text), text) for text in texts)
    record = b"\x8c\x25torch.distributed.checkpoint.metadata\x94\x8c\x0bStorageMeta\x94\x93\x94)\x81\x94}\x94("
    record += b"\x8c\rcheckpoint_id\x94" + path + b"\x8c\x07save_id\x94" + save
    record += b"\x8c\x07load_id\x94N\x8c\x07modules\x94]\x94ub"
    content = metadata.read_bytes()
    before, name, after = content.rpartition(b"\x8c\x0cstorage_meta\x94")
    metadata.unlink()  # of all steps
    metadata.write_bytes(before + name + record + after.removeprefix(b"N"))


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
                if name == "dcp":
                    write_save(run / f"step-{step}" / ".metadata", step)
            if name == "ranks":
                shutil.copy(folder / "strategy.json", run)
            times = [measure(run) for _ in range(3)]
            whole, newest = (statistics.median(seconds) for seconds in list(zip(*times, strict=True))[:2])
            files = sum(path.is_file() for path in run.rglob("*"))
            print(f"{name}: {files:,} files, {whole:.2f} s, newest {newest:.2f} s, {', '.join(times[0][2])}")
            shutil.rmtree(run)


if __name__ == "__main__":
    main()
