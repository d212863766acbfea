"""Sums and means of low-precision floats are accumulated in float32, in every idiom of dask, numpy and xarray."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr

import reshard
from reshard.dtypes import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Idiom = tuple[Callable[[Any], Any], Callable[[Any], Any]]

LOW = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
SHAPE = (60, 40)
CHUNKS = {"whole": (60, 40), "rows": (13, 40), "boxes": (17, 9)}


def numbers(dtype: str) -> np.ndarray[Any, Any]:
    """Small numbers that every dtype holds, whose sums none of them holds."""
    return (np.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE) % 7 + 1).astype(BY_NAME[dtype].numpy())


@pytest.fixture(params=CHUNKS)
def chunks(request: pytest.FixtureRequest) -> tuple[int, int]:
    return CHUNKS[request.param]


@pytest.fixture(params=LOW)
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def low(dtype: str, chunks: tuple[int, int], tmp_path: Path) -> da.Array:
    """A tensor in a file."""
    reshard.write({"w": numbers(dtype)}, tmp_path / "set", format="hf")
    return reshard.open(tmp_path / "set").array("w", chunks=chunks)


ACCUMULATES: dict[str, Idiom] = {
    "da.sum": (da.sum, np.sum),
    "da.sum of rows": (lambda x: da.sum(x, axis=1), lambda v: v.sum(1)),
    "da.sum, keepdims": (lambda x: da.sum(x, axis=0, keepdims=True), lambda v: v.sum(0, keepdims=True)),
    "da.sum of a sum": (lambda x: da.sum(da.sum(x, axis=0)), np.sum),
    "da.mean": (da.mean, np.mean),
    "da.mean of columns": (lambda x: da.mean(x, axis=0), lambda v: v.mean(0)),
    "da.prod": (lambda x: da.prod(x[:, :9], axis=1), lambda v: v[:, :9].prod(1)),
    "da.var": (da.var, np.var),
    "da.var, ddof": (lambda x: da.var(x, axis=0, ddof=1), lambda v: v.var(0, ddof=1)),
    "da.std": (lambda x: da.std(x, axis=1), lambda v: v.std(1)),
    "da.nansum": (lambda x: da.nansum(x, axis=0), lambda v: v.sum(0)),
    "da.nanmean": (da.nanmean, np.mean),
    "da.nanstd": (da.nanstd, np.std),
    "da.nanvar": (lambda x: da.nanvar(x, axis=0), lambda v: v.var(0)),
    "da.average": (lambda x: da.average(x, axis=0), lambda v: v.mean(0)),
    "da.cumsum": (lambda x: da.cumsum(x, axis=0), lambda v: v.cumsum(0)),
    "da.cumsum, blelloch": (lambda x: da.cumsum(x, axis=1, method="blelloch"), lambda v: v.cumsum(1)),
    "da.nancumsum": (lambda x: da.nancumsum(x, axis=0), lambda v: v.cumsum(0)),
    "da.cumprod": (lambda x: da.cumprod(x[:9], axis=0), lambda v: v[:9].cumprod(0)),
    "da.concatenate": (lambda x: da.concatenate([x, x]).sum(), lambda v: 2 * v.sum()),
    "da.stack": (lambda x: da.stack([x, x + x]).mean(), lambda v: 1.5 * v.mean()),
    "da.block": (lambda x: da.block([[x, x]]).sum(), lambda v: 2 * v.sum()),
    "da.tensordot": (lambda x: da.tensordot(x, x, axes=(1, 1)), lambda v: v @ v.T),
    "da.dot": (lambda x: da.dot(x, x.T), lambda v: v @ v.T),
    "da.matmul": (lambda x: da.matmul(x.T, x), lambda v: v.T @ v),
    "da.vdot": (lambda x: da.vdot(x.ravel(), x.ravel()), lambda v: (v * v).sum()),
    "da.einsum": (lambda x: da.einsum("ij,kj->ik", x, x), lambda v: v @ v.T),
    "da.einsum to a scalar": (lambda x: da.einsum("ij,ij->", x, x), lambda v: (v * v).sum()),
    "da.linalg.norm": (da.linalg.norm, np.linalg.norm),
    "da.linalg.norm of rows": (lambda x: da.linalg.norm(x, axis=1), lambda v: np.linalg.norm(v, axis=1)),
    "da.linalg.norm, 1": (lambda x: da.linalg.norm(x, ord=1), lambda v: np.linalg.norm(v, ord=1)),
    "da.trace": (da.trace, np.trace),
    "da.cov": (lambda x: da.cov(x.T), lambda v: np.cov(v.T)),
    "da.square": (lambda x: da.square(x).mean(), lambda v: (v**2).mean()),
    "da.median": (lambda x: da.median(x.rechunk({1: -1}), axis=1), lambda v: np.median(v, axis=1)),
    "da.diff": (lambda x: da.diff(x, axis=0).sum(), lambda v: np.diff(v, axis=0).sum()),
    "da.reduction": (lambda x: da.reduction(x, np.sum, np.sum, dtype=x.dtype), np.sum),
    "da.where": (lambda x: da.where(x > 3, x, 0).sum(), lambda v: v[v > 3].sum()),
    "map_blocks": (lambda x: x.map_blocks(lambda chunk: chunk + chunk).sum(), lambda v: 2 * v.sum()),
    "map_overlap": (lambda x: x.map_overlap(np.copy, depth=1, boundary="none").mean(), np.mean),
    "x.sum": (lambda x: x.sum(axis=(0, 1)), np.sum),
    "x.mean": (lambda x: x.mean(axis=1), lambda v: v.mean(1)),
    "x.std": (lambda x: x.std(), np.std),
    "x.moment": (lambda x: x.moment(2), np.var),
    "x.cumsum": (lambda x: x.cumsum(axis=1), lambda v: v.cumsum(1)),
    "x.dot": (lambda x: x.dot(x.T), lambda v: v @ v.T),
    "x @ y": (lambda x: x @ x.T, lambda v: v @ v.T),
    "x @ numpy": (lambda x: x @ np.ones(SHAPE[1], x.dtype), lambda v: v.sum(1)),
    "x.trace": (lambda x: x.trace(), np.trace),
    "x[mask]": (lambda x: x[x > 3].sum(), lambda v: v[v > 3].sum()),
    "x[list]": (lambda x: x[[0, 2, 59]].sum(), lambda v: v[[0, 2, 59]].sum()),
    "x[::-1]": (lambda x: x[::-1, ::2].mean(), lambda v: v[::-1, ::2].mean()),
    "x.vindex": (lambda x: x.vindex[[0, 1, 2], [1, 0, 2]].sum(), lambda v: v[[0, 1, 2], [1, 0, 2]].sum()),
    "x.blocks": (lambda x: x.blocks[:, :].sum(), np.sum),
    "x.rechunk": (lambda x: x.rechunk(7).sum(), np.sum),
    "x.reshape": (lambda x: x.reshape(-1).sum(), np.sum),
    "x.T": (lambda x: x.T.mean(axis=1), lambda v: v.mean(0)),
    "x.persist": (lambda x: x.persist(scheduler="sync").sum(), np.sum),
    "x - x.mean()": (lambda x: (x - x.mean()).std(), np.std),
    "pickled": (lambda x: pickle.loads(pickle.dumps(x)).sum(), np.sum),  # noqa: S301
    "optimized": (lambda x: dask.optimize(x)[0].sum(), np.sum),
    "np.sum": (lambda x: np.sum(x, axis=1), lambda v: v.sum(1)),
    "np.mean": (np.mean, np.mean),
    "np.std": (np.std, np.std),
    "np.linalg.norm": (np.linalg.norm, np.linalg.norm),
    "np.einsum": (lambda x: np.einsum("ij,kj->ik", x, x), lambda v: v @ v.T),
    "xarray mean": (lambda x: xr.DataArray(x, dims=("a", "b")).mean(skipna=False).data, np.mean),
    "xarray sum": (lambda x: xr.DataArray(x, dims=("a", "b")).sum("a", skipna=False).data, lambda v: v.sum(0)),
    "xarray std": (lambda x: xr.DataArray(x, dims=("a", "b")).std(skipna=False).data, np.std),
    "xarray dot": (lambda x: xr.dot(xr.DataArray(x, dims=("a", "b")), xr.DataArray(x, dims=("a", "b"))).data,
                   lambda v: (v * v).sum()),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::dask.array.core.PerformanceWarning")
@pytest.mark.parametrize("scheduler", ["sync", "threads"])
def test_what_accumulates_does_so_in_float32(low: da.Array, dtype: str, scheduler: str) -> None:
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
    assert ones.compute().mean() == np.sum(ones.compute()) / 20_000 == 1
