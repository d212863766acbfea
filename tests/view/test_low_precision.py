"""Sums and means of low-precision floats are accumulated in float32, in every idiom of dask, numpy and xarray."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr
from refusals import refused

import reshard
from reshard.dtypes import BY_NAME
from reshard.view.arrays.low import LowPrecisionArray

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Idiom = tuple[Callable[[Any], Any], Callable[[Any], Any]]

SHAPE = (60, 40)
CHUNKS = {"bfloat16": (13, 40), "float16": (17, 9), "float8_e4m3fn": (60, 40), "float8_e5m2": (17, 9)}
"""Rows, boxes, and the whole tensor."""


def numbers(dtype: str) -> np.ndarray[Any, Any]:
    """Small numbers that every dtype holds, whose sums none of them holds."""
    return (np.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE) % 7 + 1).astype(BY_NAME[dtype].numpy())


@pytest.fixture(params=CHUNKS)
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def low(dtype: str, tmp_path: Path) -> da.Array:
    """A tensor in a file."""
    reshard.write({"w": numbers(dtype)}, tmp_path / "set", format="hf")
    return reshard.open(tmp_path / "set").array("w", chunks=CHUNKS[dtype])


ACCUMULATES: dict[str, Idiom] = {
    "da.sum": (da.sum, np.sum),
    "da.sum of rows": (lambda x: da.sum(x, axis=1), lambda v: v.sum(1)),
    "da.sum, keepdims": (lambda x: da.sum(x, axis=0, keepdims=True), lambda v: v.sum(0, keepdims=True)),
    "da.mean": (da.mean, np.mean),
    "da.prod": (lambda x: da.prod(x[:, :9], axis=1), lambda v: v[:, :9].prod(1)),
    "da.var": (da.var, np.var),
    "da.std": (lambda x: da.std(x, axis=1), lambda v: v.std(1)),
    "da.nansum": (lambda x: da.nansum(x, axis=0), lambda v: v.sum(0)),
    "da.nanmean": (da.nanmean, np.mean),
    "da.cumsum": (lambda x: da.cumsum(x, axis=0), lambda v: v.cumsum(0)),
    "da.cumprod": (lambda x: da.cumprod(x[:9], axis=0), lambda v: v[:9].cumprod(0)),
    "da.concatenate": (lambda x: da.concatenate([x, x]).sum(), lambda v: 2 * v.sum()),
    "da.tensordot": (lambda x: da.tensordot(x, x, axes=(1, 1)), lambda v: v @ v.T),
    "da.matmul": (lambda x: da.matmul(x.T, x), lambda v: v.T @ v),
    "da.vdot": (lambda x: da.vdot(x.ravel(), x.ravel()), lambda v: (v * v).sum()),
    "da.einsum": (lambda x: da.einsum("ij,kj->ik", x, x), lambda v: v @ v.T),
    "da.linalg.norm": (da.linalg.norm, np.linalg.norm),
    "da.trace": (da.trace, np.trace),
    "da.cov": (lambda x: da.cov(x.T), lambda v: np.cov(v.T)),
    "da.median": (lambda x: da.median(x.rechunk({1: -1}), axis=1), lambda v: np.median(v, axis=1)),
    "da.reduction": (lambda x: da.reduction(x, np.sum, np.sum, dtype=x.dtype), np.sum),
    "map_blocks": (lambda x: x.map_blocks(lambda chunk: chunk + chunk).sum(), lambda v: 2 * v.sum()),
    "map_overlap": (lambda x: x.map_overlap(np.copy, depth=1, boundary="none").mean(), np.mean),
    "x.sum": (lambda x: x.sum(axis=(0, 1)), np.sum),
    "x.moment": (lambda x: x.moment(2), np.var),
    "x @ y": (lambda x: x @ x.T, lambda v: v @ v.T),
    "x @ numpy": (lambda x: x @ np.ones(SHAPE[1], x.dtype), lambda v: v.sum(1)),
    "x[mask]": (lambda x: x[x > 3].sum(), lambda v: v[v > 3].sum()),
    "x[::-1]": (lambda x: x[::-1, ::2].mean(), lambda v: v[::-1, ::2].mean()),
    "x.vindex": (lambda x: x.vindex[[0, 1, 2], [1, 0, 2]].sum(), lambda v: v[[0, 1, 2], [1, 0, 2]].sum()),
    "x.reshape": (lambda x: x.reshape(-1).sum(), np.sum),
    "x.T": (lambda x: x.T.mean(axis=1), lambda v: v.mean(0)),
    "x - x.mean()": (lambda x: (x - x.mean()).std(), np.std),
    "pickled": (lambda x: pickle.loads(pickle.dumps(x)).sum(), np.sum),  # noqa: S301
    "optimized": (lambda x: dask.optimize(x)[0].sum(), np.sum),
    "np.sum": (lambda x: np.sum(x, axis=1), lambda v: v.sum(1)),
    "np.linalg.norm": (np.linalg.norm, np.linalg.norm),
    "np.einsum": (lambda x: np.einsum("ij,kj->ik", x, x), lambda v: v @ v.T),
    "xarray mean": (lambda x: xr.DataArray(x, dims=("a", "b")).mean(skipna=False).data, np.mean),
    "xarray dot": (lambda x: xr.dot(xr.DataArray(x, dims=("a", "b")), xr.DataArray(x, dims=("a", "b"))).data,
                   lambda v: (v * v).sum()),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::dask.array.core.PerformanceWarning")
def test_what_accumulates_does_so_in_float32(low: da.Array, dtype: str) -> None:
    scheduler = "sync" if low.numblocks[1] == 1 else "threads"
    values = numbers(dtype).astype(np.float64)
    lazy = {name: idiom(low) for name, (idiom, _) in ACCUMULATES.items()}
    results = dask.compute(lazy, scheduler=scheduler)[0]
    for name, (_, truth) in ACCUMULATES.items():
        expected = truth(values)
        assert results[name].dtype == (np.float64 if name == "da.cov" else np.float32), name
        np.testing.assert_allclose(np.asarray(results[name]), expected, rtol=3e-5, err_msg=name)
        if name != "x[mask]":  # its chunks have unknown sizes, from which dask infers nothing
            assert lazy[name].dtype == results[name].dtype, name


def test_twenty_thousand_ones(dtype: str, tmp_path: Path) -> None:
    """Sums of ones stop at 16 in float8, at 256 in bfloat16 and at 2048 in float16 if they are summed in these."""
    reshard.write({"w": np.ones(20_000, BY_NAME[dtype].numpy())}, tmp_path / "set", format="hf")
    ones = reshard.open(tmp_path / "set").array("w", chunks=7000)
    assert da.mean(ones).compute() == ones.mean().compute() == np.mean(ones).compute() == 1
    assert da.sum(ones).compute() == 20_000
    assert da.concatenate([ones, ones]).sum().compute() == 40_000
    assert da.cumsum(ones, axis=0)[-1].compute() == 20_000
    assert da.std(ones).compute() == 0
    assert da.mean(ones.reshape(-1, 1), axis=1).astype(ones.dtype).sum().compute() == 20_000
    assert ones.compute().mean() == np.sum(ones.compute()) / 20_000 == 1


ELEMENTWISE: dict[str, Callable[[Any], Any]] = {
    "x + x": lambda x: x + x,
    "x * 2": lambda x: x * 2,
    "abs": lambda x: abs(-x),
    "max": lambda x: x.max(axis=0),
    "np.minimum": lambda x: np.minimum(x, x[::-1]),
    "where": lambda x: da.where(x > 3, x, -x),
    "transposed": lambda x: x.T,
    "concatenate": lambda x: da.concatenate([x, x]),
    "cast back": lambda x: da.sum(x, axis=0).astype(x.dtype),
    "product, cast back": lambda x: (x @ x.T).astype(x.dtype),
    "power, cast back": lambda x: (x**2).astype(x.dtype),
    "cumulative, cast back": lambda x: da.cumsum(x, axis=1).astype(x.dtype),
}


@pytest.mark.filterwarnings("ignore::dask.array.core.PerformanceWarning", "ignore::RuntimeWarning")
def test_other_results_keep_the_dtype(low: da.Array, dtype: str) -> None:
    for name, idiom in ELEMENTWISE.items():
        lazy = idiom(low)
        result = lazy.compute(scheduler="sync")
        assert type(result) is LowPrecisionArray, name
        assert lazy.dtype == result.dtype == BY_NAME[dtype].numpy(), name


def test_extremes_of_all_elements_keep_the_dtype(low: da.Array, dtype: str, tmp_path: Path) -> None:
    extremes = {
        "min": low.min(),
        "max": da.max(low),
        "nanmax": da.nanmax(low),
        "both": da.stack([low.min(), low.max()]),
    }
    values = numbers(dtype)
    truth = {"min": values.min(), "max": values.max(), "nanmax": values.max(), "both": [values.min(), values.max()]}
    reshard.write(extremes, tmp_path / "written", format="hf")
    written = reshard.open(tmp_path / "written")
    for name, lazy in extremes.items():
        assert lazy.dtype == lazy.compute(scheduler="sync").dtype == written[name].dtype == values.dtype, name
        np.testing.assert_array_equal(np.asarray(written[name]), truth[name], err_msg=name)
    assert (low - low.min()).dtype == values.dtype
    assert extremes["both"].sum().dtype == extremes["both"].sum().compute().dtype == np.float32


def test_computed_arrays_are_arrays_of_numpy(low: da.Array, dtype: str) -> None:
    values = numbers(dtype)
    result = low.compute()
    assert isinstance(result, np.ndarray)
    assert type(np.asarray(result)) is np.ndarray
    assert np.shares_memory(np.asarray(result), result)
    assert type(result.astype("float32")) is np.ndarray
    assert result.tobytes() == values.tobytes()
    assert type(result.view(np.uint8)) is np.ndarray
    assert type(result[0, 0]) is type(values[0, 0])
    assert type(result.mean()) is np.float32
    assert str(result) == str(values)
    copy = pickle.loads(pickle.dumps(result))  # noqa: S301
    assert type(copy) is LowPrecisionArray
    assert (copy == values).all()
    assert type((low == 1).compute()) is type(low.argmax(axis=0).compute()) is np.ndarray
    assert repr(low.mean(axis=0).compute()) == repr(np.asarray(low.mean(axis=0).compute()))
    assert type(low.mean().compute()) is type(low.sum().compute()) is np.float32


def test_a_wider_dtype_is_given(low: da.Array, dtype: str) -> None:
    values = numbers(dtype).astype("float64")
    for total in (low.sum(dtype="float64"), da.sum(low, dtype="float64"), np.sum(low, dtype="float64")):
        assert total.dtype == total.compute().dtype == np.float64
        assert total.compute() == values.sum()
    assert da.mean(low, dtype="float64").compute() == values.mean()


def test_arrays_can_be_stored(low: da.Array, dtype: str, tmp_path: Path) -> None:
    target = np.zeros(SHAPE, BY_NAME[dtype].numpy())
    da.store(low, target, lock=False)
    assert target.tobytes() == numbers(dtype).tobytes()
    reshard.write({"w": low, "mean": da.mean(low, axis=0), "total": low.sum()}, tmp_path / "written", format="hf")
    written = reshard.open(tmp_path / "written")
    assert written["w"].compute().tobytes() == numbers(dtype).tobytes()
    assert written["mean"].dtype == np.float32
    assert np.allclose(written["mean"].compute(), numbers(dtype).astype("float64").mean(0))
    assert written["total"].compute() == numbers(dtype).astype("float64").sum()


def test_the_norm_of_float16_does_not_overflow(tmp_path: Path) -> None:
    reshard.write({"w": np.full((4, 4), 1000, np.float16)}, tmp_path / "set", format="hf")
    assert float(da.linalg.norm(reshard.open(tmp_path / "set")["w"])) == 4000


def test_a_checkpoint_is_converted_lazily(low: da.Array, dtype: str, tmp_path: Path) -> None:
    source = reshard.open(tmp_path / "set")
    wide = source.astype("float32")
    assert wide["w"].dtype == np.float32
    assert np.array_equal(wide["w"].compute(), numbers(dtype).astype("float32"))
    assert wide.astype(dtype)["w"].compute().tobytes() == numbers(dtype).tobytes()
    reshard.convert(wide, tmp_path / "wide", to="hf")
    assert reshard.open(tmp_path / "wide")["w"].dtype == np.float32
    reshard.verify(tmp_path / "wide")
    with refused(reshard.UsageError, "unsupported-dtype", "int8"):
        source.astype("int8")


def test_a_rank_of_a_plan_that_casts(dtype: str, tmp_path: Path) -> None:
    reshard.write({"w": np.ones(20_000, "float32")}, tmp_path / "set", format="hf")
    plan = reshard.plan(reshard.open(tmp_path / "set"), selection=reshard.Selection(cast={"float32": dtype}))
    ones = plan.rank(0)["w"]
    assert ones.dtype == ones.compute().dtype == BY_NAME[dtype].numpy()
    assert da.sum(ones).compute() == 20_000


MEMORY = """
import sys, dask.array as da, reshard
weight = reshard.open("set")["w"]
da.ones(8, chunks=4).mean().compute(num_workers=4)
peak = lambda word: int(open("/proc/self/status").read().split(word)[1].split()[0]) * 1024
before = peak("VmRSS:")
assert da.mean(weight).compute(num_workers=4) == 1
assert weight.sum(axis=0).compute(num_workers=4).max() == 32768
print(peak("VmHWM:") - before)
"""


@pytest.mark.slow
def test_a_mean_takes_little_memory(tmp_path: Path) -> None:
    """Chunks of 8 MiB on four threads, of a tensor of 268 MB in one shard."""
    ones = np.ones((32_768, 4_096), BY_NAME["bfloat16"].numpy())
    reshard.write({"w": ones}, tmp_path / "set", format="hf", max_shard_size="1GB")
    command = [sys.executable, "-c", MEMORY]
    done = subprocess.run(command, cwd=tmp_path, check=True, timeout=120, capture_output=True, text=True)
    assert int(done.stdout) < 100e6
