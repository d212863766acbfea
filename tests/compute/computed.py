"""Checkpoints of many dtypes and formats for tests of what is computed with their values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from checkpoints import write_ranks

import reshard
from reshard import Layout, Strategy

if TYPE_CHECKING:
    from pathlib import Path

Array = np.ndarray[Any, np.dtype[Any]]

FLOATS = ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
WHOLE_NUMBERS = ["int8", "uint8", "int16", "int32", "int64", "uint32", "uint64", "bool"]
SHAPE = (48, 4000)
"""More elements than a chunk has."""


def values(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    """Random numbers of a dtype, some of them zero."""
    rng = np.random.default_rng([seed, len(dtype), *shape])
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if dtype == "bool":
        return rng.random(shape) < 0.3
    if dtype in WHOLE_NUMBERS:
        ends = np.iinfo(kind)
        return rng.integers(max(ends.min, -100_000), min(ends.max, 100_000), shape, endpoint=True).astype(kind)
    numbers = rng.standard_normal(shape) * 0.5 + 0.1
    numbers[rng.random(shape) < 0.01] = 0
    numbers[rng.random(shape) < 0.01] = -0.0
    return numbers.astype(kind)


def model(dtypes: list[str], shape: tuple[int, ...] = SHAPE) -> dict[str, Array]:
    """One matrix of each dtype, and small tensors."""
    return {
        **{f"layers.{number}.{dtype}": values(dtype, shape) for number, dtype in enumerate(dtypes)},
        "norm": values("float32", (7,)),
        "step": np.array(12, np.int64),
        "empty": np.zeros((0, 3), np.float32),
    }


def cut(full: dict[str, Array], ranks: int, axis: int) -> Strategy:
    """A strategy that cuts matrices along an axis, with two replicas of each block."""
    devices = [2, ranks // 2]
    return Strategy.of({name: Layout.of(devices, [-1, 0] if axis else [0, -1]) for name in full if name[0] == "l"})


def write(root: Path, full: dict[str, Array], kind: str) -> reshard.Checkpoint:
    """Write tensors in a format and a layout, and open them."""
    how, _, format_ = kind.partition(" ")
    if how in {"rows", "columns"}:
        strategy = cut(full, 8, axis=how == "columns")
        whole = {name: array for name, array in full.items() if name not in strategy.tensors}
        write_ranks(root / "ranks", full, strategy, format_, whole)
        return reshard.open(root / "ranks", strategy=strategy)
    source = write(root, full, "rows safetensors")
    options: dict[str, Any] = {"compression": "zstd", "chunk_size": 40_000} if how == "zarr" else {}
    reshard.convert(source, root / how, to=how, **options)
    return reshard.open(root / how)


KINDS = ["rows safetensors", "columns safetensors", "rows ckpt", "hf", "dcp", "zarr"]
