"""How long lazy arrays take, as ratios measured side by side.

    python tests/bench/lazy.py

1. An array of 2,048 ranks against one of 256: made and computed. It grows with the ranks: about 8, and at most 14.
2. A zarr store of 2,048 chunks, opened and computed, against `dask.array.from_zarr`: at most 1.5.

Rounds alternate, and the least time of each is taken.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import dask.array as da
import numpy as np
import zarr

import reshard

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 7


def least(**works: Callable[[], object]) -> dict[str, float]:
    """Return the least seconds of each function, by name."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            begin = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - begin)
    return {name: min(times) for name, times in seconds.items()}


def of_ranks(root: Path, ranks: int) -> reshard.Checkpoint:
    """Write a tensor of 64 bytes a rank, and open it."""
    values = np.arange(ranks * 16, dtype="float32").reshape(ranks, 16)
    strategy = reshard.Strategy.of({"w": reshard.Layout.of([ranks], [0, -1])})
    path = root / f"{ranks} ranks"
    reshard.write({"w": values}, path, target_strategy=strategy)
    return reshard.open(path, strategy=strategy)


def computed(source: reshard.Checkpoint) -> object:
    """Compute the tensor."""
    return source["w"].compute()


def main() -> None:
    """Print both ratios."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        few, many = of_ranks(root, 256), of_ranks(root, 2048)
        seconds = least(few=partial(computed, few), many=partial(computed, many))
        print(f"2,048 ranks: {seconds['many']:.2f} s, {seconds['many'] / seconds['few']:.1f} times that of 256 (≤ 14)")
        store = root / "store"
        array = zarr.open_group(store, mode="w").create_array("w", shape=(2048, 512), chunks=(1, 512), dtype="float32")
        array[:] = np.arange(array.size, dtype="float32").reshape(array.shape)
        seconds = least(
            zarr=lambda: np.asarray(da.from_zarr(str(store), component="w")),
            reshard=lambda: computed(reshard.open(store)),
        )
        ratio = seconds["reshard"] / seconds["zarr"]
        print(f"zarr store of 2,048 chunks: {seconds['reshard']:.2f} s, {ratio:.2f} times that of zarr (≤ 1.5)")


if __name__ == "__main__":
    main()
