"""Memory of zarr stores: too little is told, and models of many times the memory go through."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoints import Array, blocks_of, places
from commands import call, least_memory
from refusals import refused
from zarr_stores import source

import reshard
from reshard import Layout, Strategy
from reshard.core.layout.block import Block
from reshard.core.model.entries import Content
from reshard.dtypes import BFLOAT16
from reshard.errors import BudgetError
from reshard.kits.files import by_name

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["source"]  # fixtures, for pytest to find


def test_memory_that_is_too_little_is_reported(source: reshard.Checkpoint) -> None:
    with refused(BudgetError, "not-enough-memory", "62.9 MB") as caught:
        reshard.plan(source, to="zarr", compression="zstd", memory=60 << 20)
    least = least_memory(caught.value)
    assert reshard.plan(source, to="zarr", compression="zstd", memory=least)._record.threads == 1


CAP = 512 << 20
BIG = {
    "embedding": (40_000, 8_192),
    "layers.0.w": (16_384, 12_288),
    "layers.1.w2": (12_288, 16_384),
    "layers.2.w": (24_576, 16_384),
}


def watched(*command: str | Path) -> int:
    """Run a command that is killed where it takes more than the cap; return its peak memory."""
    process = subprocess.Popen([sys.executable, "-m", "reshard", *map(str, command)], stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            break
        for line in status.splitlines():
            if line.startswith("VmHWM"):
                peak = max(peak, int(line.split()[1]) * 1024)
        if peak > CAP:
            process.kill()
            process.wait()
            pytest.fail(f"{command[0]} took {peak >> 20} MiB; the cap is {CAP >> 20}")
        time.sleep(0.005)
    assert process.wait() == 0
    return peak


HUGE = {"embedding": (151_936, 8_192)} | {
    f"layers.{i}.{name}": shape
    for i in range(12)
    for name, shape in {"w1": (28_672, 8_192), "w2": (8_192, 28_672), "w3": (28_672, 8_192)}.items()
}
STAGES = 2.25
"""The store and the target are there at once, whole; of the source only what is not a hole."""


def patches(name: str, shape: tuple[int, int]) -> list[tuple[int, int, Array]]:
    """Blocks at random places of a tensor, with numbers that are not zero; the rest of it is."""
    random = np.random.default_rng(sum(map(ord, name)))
    found = []
    for _ in range(48):
        rows, columns = (min(extent, int(random.integers(1, 700))) for extent in shape)
        row, column = (int(random.integers(0, a - b + 1)) for a, b in zip(shape, (rows, columns), strict=True))
        found.append((row, column, random.integers(1, 1 << 16, (rows, columns), np.uint16)))
    return found


def pieces(name: str, shape: tuple[int, int], block: Block) -> Iterator[tuple[int, int, Array]]:
    """What of the patches is in a block: row and column within it, and the numbers."""
    for row, column, values in patches(name, shape):
        both = Block((row, column), (row + values.shape[0], column + values.shape[1])) & block
        if both:
            within = values[both.start[0] - row : both.stop[0] - row, both.start[1] - column : both.stop[1] - column]
            yield both.start[0] - block.start[0], both.start[1] - block.start[1], within


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("model", "times", "compression"), [(BIG, 4, "zstd"), (HUGE, 36, None)], ids=["zstd", "plain"])
def test_a_model_of_many_times_the_memory(
    tmp_path: Path, model: dict[str, tuple[int, int]], times: int, compression: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Up to 20 GB with blocks of numbers at random places, so that holes that are skipped, or moved, cannot pass.

    The commands that unify and split it are killed above the cap.
    """
    nbytes = sum(2 * rows * columns for rows, columns in model.values())
    assert nbytes > times * CAP
    free = shutil.disk_usage(tmp_path).free
    if free < STAGES * nbytes:
        pytest.skip(f"{tmp_path} has {free / 1e9:.0f} GB of the {STAGES * nbytes / 1e9:.0f} GB that it takes")
    rows, columns = [0, -1], [-1, 0]
    before = Strategy.of({name: Layout.of([4], columns if "w2" in name else rows) for name in model})
    after = Strategy.of({name: Layout.of([8], rows if "w2" in name else columns) for name in model})
    for rank in range(4):
        blocks = blocks_of(model, before, rank)
        layout = by_name("safetensors").lay_out([Content(n, BFLOAT16, b.shape) for n, b in blocks.items()], {})
        path = tmp_path / "src" / f"rank_{rank}" / "w.safetensors"
        path.parent.mkdir(parents=True)
        with path.open("wb") as file:
            file.truncate(layout.size)
            file.write(layout.literals[0][1])
            for name, ((offset, _),) in places(layout).items():
                for row, column, values in pieces(name, model[name], blocks[name]):
                    for place, some in enumerate(values, row):
                        os.pwrite(file.fileno(), some, offset + 2 * (place * blocks[name].shape[1] + column))
    reshard.write_strategy(before, tmp_path / "before.ckpt")
    reshard.write_strategy(after, tmp_path / "after.ckpt")
    store, out = tmp_path / "model.zarr", tmp_path / "out"
    options = ["--memory", "512MiB", "--tune=fsync=no", "--tune=drop-cache=yes", "-q"]
    told = []
    unify = ["convert", tmp_path / "src", store, "--source-strategy", tmp_path / "before.ckpt", "--to", "zarr"]
    for command, done_with in (
        ([*unify, "--compression", compression] if compression else unify, "src"),
        (["convert", store, out, "--target-strategy", tmp_path / "after.ckpt"], "model.zarr"),
    ):
        predicted = json.loads(call(*command, "--memory", "512MiB", "--dry-run", "--json").stdout)["peak_memory"]
        began = time.monotonic()
        peak = watched(*command, *options)
        assert peak <= predicted <= CAP
        told.append(f"{command[0]}: peak {peak / 1e6:.0f} MB, {time.monotonic() - began:.0f} s")
        shutil.rmtree(tmp_path / done_with)
    with capsys.disabled():
        print(f"\n{nbytes / 1e9:.1f} GB within {CAP >> 20} MiB: {'; '.join(told)}")
    for rank in range(8):
        found = reshard.open(out / f"rank_{rank}")
        for name, block in blocks_of(model, after, rank).items():
            own = list(pieces(name, model[name], block))
            for start in range(0, block.shape[0], 4096):
                held = found[name][start : start + 4096].compute(scheduler="synchronous").view(np.uint16)
                expected = np.zeros(held.shape, np.uint16)
                for row, column, values in own:
                    first, last = max(row, start), min(row + len(values), start + 4096)
                    if first < last:
                        part = values[first - row : last - row]
                        expected[first - start : last - start, column : column + part.shape[1]] = part
                assert np.array_equal(held, expected), (rank, name, start)
        shutil.rmtree(out / f"rank_{rank}")
