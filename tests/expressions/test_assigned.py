"""Dask and numpy arrays as tensors: `reshard.write` and `Checkpoint.assign`, beside numpy."""

from __future__ import annotations

import json
import pickle
import threading
import time
from typing import TYPE_CHECKING, Any

import dask.array as da
import ml_dtypes
import numpy as np
import pytest
import xarray as xr
from checkpoints import write_file, write_ranks
from clusters import client_of, cluster
from refusals import refused
from safetensors.numpy import load_file
from samples import slow

import reshard
from reshard import Layout, Strategy
from reshard.core.plan import budget
from reshard.errors import BudgetError, SourceError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DTYPES = ["float32", "float16", "bfloat16", "int8", "int64", "bool", "uint16"]
FORMATS = ["safetensors", "hf", "dcp", "zarr", "ckpt", "checkpoint2"]


def random_array(rng: np.random.Generator, dtype: str, dims: int) -> np.ndarray[Any, Any]:
    shape = tuple(int(n) for n in rng.integers(0 if rng.random() < 0.05 else 1, 40, dims))
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    bits = rng.integers(0, 2 if dtype == "bool" else 256, (*shape, kind.itemsize), np.uint8)
    return bits.view(kind).reshape(shape)


def chunked(rng: np.random.Generator, array: np.ndarray[Any, Any]) -> Any:
    """The array in chunks, at times computed by several tasks, or not in chunks at all."""
    if rng.random() < 0.15:
        return array
    chunks = tuple(int(rng.integers(1, extent + 1)) if extent else 1 for extent in array.shape)
    result = da.from_array(array, chunks=chunks)
    if rng.random() < 0.3 and array.ndim:
        result = da.concatenate([result[:1], result[1:]])
    return result.T.copy().T if rng.random() < 0.3 else result


def random_strategy(rng: np.random.Generator, arrays: dict[str, np.ndarray[Any, Any]]) -> Strategy:
    """Each tensor is cut over 4 ranks along a dimension that can be, or is a copy on each."""
    layouts = {}
    for name, array in arrays.items():
        able = [dim for dim, extent in enumerate(array.shape) if extent and extent % 4 == 0]
        cut = int(rng.choice(able)) if able else None
        layouts[name] = Layout.of([4], [0 if dim == cut else -1 for dim in range(array.ndim)])
    return Strategy.of(layouts)


def assert_equal(opened: reshard.Checkpoint, expected: dict[str, np.ndarray[Any, Any]]) -> None:
    assert set(opened) == set(expected)
    for name, array in expected.items():
        content = np.asarray(opened[name].compute())
        assert content.dtype == array.dtype
        assert content.shape == array.shape
        assert content.tobytes() == array.tobytes(), name


@pytest.mark.parametrize("seed", [*range(8), *map(slow, range(8, 40))])
def test_random_arrays_are_written_as_numpy_has_them(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    expected = {f"t.{n}": random_array(rng, str(rng.choice(DTYPES)), int(rng.integers(0, 4))) for n in range(6)}
    kind = FORMATS[seed % len(FORMATS)]
    cut = kind in {"safetensors", "ckpt", "dcp", "checkpoint2"} and seed % 2
    if kind == "ckpt":  # it has no empty tensors
        expected = {name: array for name, array in expected.items() if array.size}
    if kind == "checkpoint2":
        expected = {name: array for name, array in expected.items() if array.dtype != np.dtype("uint16")}
    arrays = {name: chunked(rng, array) for name, array in expected.items()}
    options: dict[str, Any] = {"strategy": random_strategy(rng, expected)} if cut else {}
    if kind == "zarr":
        options |= {"chunk_size": int(rng.integers(100, 2000)), "compression": [None, "zstd"][seed % 2]}
    if kind == "checkpoint2":
        options["step"] = 3
    threads = int(rng.integers(1, 5))
    reshard.write(arrays, tmp_path / "out", format=kind, threads=threads, **options)
    opened = reshard.open(tmp_path / "out")
    assert_equal(opened, expected)
    # And back: as arrays of the first target, cut in another way.
    back = {name: opened[name] for name in opened}
    reshard.write(back, tmp_path / "back", strategy=random_strategy(rng, expected))
    assert_equal(reshard.open(tmp_path / "back"), expected)


@pytest.mark.parametrize("partition", ["tensor", "file"])
def test_chunks_are_computed_once_and_few_at_a_time(tmp_path: Path, partition: str) -> None:
    """In the graph of the run; where whole files are written, when a file needs them."""
    computed: list[tuple[int, ...]] = []

    def block(at: tuple[int, ...]) -> np.ndarray[Any, Any]:
        computed.append(at)
        return np.full((8, 16), at[0], np.float32) + np.arange(16, dtype=np.float32)

    array = da.map_blocks(lambda block_info: block(block_info[None]["chunk-location"]), chunks=((8,) * 32, (16,)),
                          dtype=np.float32, meta=np.empty((0, 0), np.float32))  # fmt: skip
    source = reshard.Checkpoint.assign(_empty(), w=array)
    plan = reshard.plan(source, Strategy.of({"w": Layout.of([4], [-1, 0])}))
    plan.run(tmp_path / "out", partition=partition)
    if partition == "tensor":
        assert sorted(computed) == [(number, 0) for number in range(32)]
    expected = np.repeat(np.arange(32, dtype=np.float32), 8)[:, None] + np.arange(16, dtype=np.float32)
    assert_equal(reshard.open(tmp_path / "out"), {"w": expected})


def _empty() -> reshard.Checkpoint:
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.facts import Opening

    return reshard.Checkpoint(Checkpoint("(arrays)", {}, (), (), opening=Opening(by_file=True)))


def test_a_tensor_is_replaced_cast_renamed_and_left_out(tmp_path: Path) -> None:
    full = {"a": np.arange(24, dtype=np.float32).reshape(4, 6), "b": np.ones(3, np.float32)}
    strategy = Strategy.of({"a": Layout.of([2], [0, -1]), "b": Layout.of([2], [-1])})
    opened = reshard.open(write_ranks(tmp_path / "src", full, strategy), strategy=strategy)
    changed = opened.assign({"a": opened["a"] * 2 + 1}, c=np.zeros((2, 2), np.int8))
    assert_equal(changed, {"a": full["a"] * 2 + 1, "b": full["b"], "c": np.zeros((2, 2), np.int8)})
    assert_equal(changed.sel("a"), {"a": full["a"] * 2 + 1})
    reshard.convert(
        changed, tmp_path / "out", to="hf", cast={"float32": "bfloat16"}, name_map={"a": "x.a"}, exclude="c"
    )
    bf16 = ml_dtypes.bfloat16
    assert_equal(reshard.open(tmp_path / "out"), {"x.a": (full["a"] * 2 + 1).astype(bf16), "b": full["b"].astype(bf16)})
    reshard.convert(changed, tmp_path / "ranks", target_strategy=strategy, drop="c")
    assert_equal(reshard.open(tmp_path / "ranks"), {"a": full["a"] * 2 + 1, "b": full["b"]})


@pytest.mark.parametrize(
    "array",
    [
        np.ma.masked_array([1.0, 2.0], [False, True]),
        da.ma.masked_array(da.ones(3), mask=[True, False, False]),
        np.array([object()]),
        da.from_array(np.array([object()]), chunks=1),
        [[1.0], [1.0, 2.0]],
        None,
    ],
)
def test_masks_and_objects_are_refused(array: Any) -> None:
    with refused(UsageError, "bad-array", "'x'"):
        _empty().assign(x=array)


def test_a_mask_that_dask_does_not_know(tmp_path: Path) -> None:
    """The array says that it has no masks, and its chunks have."""
    plain = np.zeros(0)
    array = da.ones(4, chunks=2).map_blocks(lambda chunk: np.ma.masked_array(chunk, mask=True), meta=plain)
    with refused(SourceError, "wrong-chunk", "'x'"):
        reshard.write({"x": array}, tmp_path / "out")
    with refused(SourceError, "wrong-chunk", "'x'"):
        reshard.plan(_empty().assign(x=array), format="hf").run(tmp_path / "tasks", partition="file")


def test_an_array_of_xarray_stays_lazy(tmp_path: Path) -> None:
    sizes: list[int] = []

    def double(chunk: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        sizes.append(chunk.size)
        return chunk * 2

    values = np.arange(24.0).reshape(6, 4)
    lazy = da.from_array(values, chunks=(2, 4)).map_blocks(double, dtype=values.dtype, meta=values[:0])
    arrays = {"lazy": xr.DataArray(lazy, dims=("a", "b")), "here": xr.DataArray(values)}
    assert _empty().assign(arrays)["lazy"].numblocks == (3, 1)
    assert not sizes
    reshard.write(arrays, tmp_path / "x.safetensors")
    assert sizes == [8, 8, 8]
    written = load_file(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(written["lazy"], values * 2)
    np.testing.assert_array_equal(written["here"], values)


@pytest.mark.parametrize("shape", [(2**40, 0), (0, 3), (2**33, 0, 2**9)])
def test_arrays_without_elements(tmp_path: Path, shape: tuple[int, ...]) -> None:
    for number, array in enumerate((np.zeros(shape, "f4"), da.zeros(shape, dtype="f4", chunks=-1))):
        reshard.write({"x": array}, tmp_path / f"{number}.safetensors")
        content = (tmp_path / f"{number}.safetensors").read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        assert header["x"] == {"dtype": "F32", "shape": [*shape], "data_offsets": [0, 0]}


def test_arrays_that_cannot_be_tensors_are_refused_at_once() -> None:
    unknown = da.from_array(np.arange(8), chunks=4)
    with pytest.raises(UsageError) as caught:
        _empty().assign({"a": np.array(["x"]), "b": unknown[unknown > 2], "c": np.zeros(2, "datetime64[s]"), "": 1.0})
    assert caught.value.code == "bad-array"
    for name in "abc":
        assert repr(name) in str(caught.value)


def test_a_chunk_that_is_not_as_the_array_says_stops_the_run(tmp_path: Path) -> None:
    lying = da.from_array(np.zeros((8, 4), np.float32), chunks=(4, 4)).map_blocks(
        lambda block: block.astype(np.float64), dtype=np.float32
    )
    with pytest.raises(SourceError) as caught:
        reshard.write({"w": lying}, tmp_path / "out", format="hf")
    assert caught.value.code == "wrong-chunk"
    assert not list(tmp_path.glob("out/*.safetensors"))


def test_an_error_of_a_chunk_is_raised_and_nothing_is_named(tmp_path: Path) -> None:
    def failing(block: Any) -> Any:
        raise ZeroDivisionError

    array = da.zeros((8, 4), chunks=(4, 4), dtype=np.float32).map_blocks(
        failing, dtype=np.float32, meta=np.empty((0, 0))
    )
    with pytest.raises(ZeroDivisionError):
        reshard.write({"w": array.astype(np.float32)}, tmp_path / "out", format="hf")
    assert not list(tmp_path.glob("out/*.safetensors"))


def test_chunks_that_do_not_fit_in_memory_are_refused_with_chunks_that_do(tmp_path: Path) -> None:
    array = da.zeros((100_000, 1000), chunks=(100_000, 10), dtype=np.float32)
    with pytest.raises(BudgetError) as caught:
        reshard.write({"w": array}, tmp_path / "out", memory="100MB")
    assert "rechunk((1048, 1000))" in str(caught.value)
    plan = reshard.plan(_empty().assign(w=array.rechunk((1048, 1000))), memory="100MB")
    assert plan.stats.peak_memory <= 100e6


def test_a_plan_of_arrays_is_pickled_without_them_and_not_saved(tmp_path: Path) -> None:
    plan = reshard.plan(_empty().assign(w=da.from_array(np.zeros((1000, 1000)))))
    assert len(pickle.dumps(plan._record)) < 100_000
    with pytest.raises(UsageError) as caught:
        plan.save(tmp_path / "plan.json")
    assert caught.value.code == "not-savable"


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """A client of two processes."""
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        yield client


COMPUTED: dict[str, Any] = {
    "averaged": lambda zeros, ones: (reshard.average([zeros, ones]), 0.5),
    "scaled": lambda _zeros, ones: (ones.scale("*", factor=2.0), 2.0),
    "twice": lambda _zeros, ones: (reshard.average([ones.scale("*", factor=2.0), ones]).scale("*", factor=2.0), 3.0),
    "as it is": lambda _zeros, ones: (ones, 1.0),
}


@pytest.mark.parametrize("partition", ["tensor", "file"])
@pytest.mark.parametrize("name", COMPUTED)
def test_workers_compute_with_arrays(tmp_path: Path, client: Any, name: str, partition: str) -> None:
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    zeros = reshard.open(write_file(tmp_path / "z.safetensors", {"w": np.zeros((8, 8), np.float32)}))
    array = da.from_array(values, chunks=(4, 4)).map_blocks(lambda block: block + 1)  # a function that has no name
    source, factor = COMPUTED[name](zeros, zeros.assign(w=array))
    plan = reshard.plan(source, format="hf")
    plan.run(tmp_path / "run", client=client, partition=partition)
    client.compute(plan.graph(tmp_path / "graph", partition=partition)).result()
    for file in [next((tmp_path / out).glob("*.safetensors")) for out in ("run", "graph")]:
        assert np.array_equal(load_file(file)["w"], (values + 1) * np.float32(factor))
    assert reshard.verify(tmp_path / "run", against=source, client=client).equal
    assert source.stats(client=client).tensors["w"].max == 64 * factor
    assert reshard.diff(source, zeros, client=client).tensors["w"].differing == 64


def test_an_array_that_cannot_be_sent_is_refused_before_a_file_is_made(tmp_path: Path, client: Any) -> None:
    lock = threading.Lock()

    def locked(block: Any) -> Any:
        with lock:
            return block

    array = da.from_array(np.ones((8, 8), np.float32), chunks=(4, 4)).map_blocks(locked, dtype=np.float32)
    zeros = reshard.open(write_file(tmp_path / "z.safetensors", {"w": np.zeros((8, 8), np.float32)}))
    source = reshard.average([zeros, zeros.assign(w=array)])
    with refused(SourceError, "array-not-here", "'w'"):
        reshard.plan(source, format="hf").run(tmp_path / "out", client=client)
    assert not (tmp_path / "out").exists()
    with refused(SourceError, "array-not-here", "'w'"):
        source.stats(client=client)


def test_a_run_that_was_stopped_computes_only_what_is_left(tmp_path: Path) -> None:
    counts: list[int] = []

    def count(block: Any) -> Any:
        counts.append(1)
        return block + 1

    values = np.arange(64 * 1024, dtype=np.float32).reshape(64, 1024)
    array = da.from_array(values, chunks=(4, 1024)).map_blocks(count, dtype=np.float32, name="counted")
    stops = iter(range(100))

    def stop(event: Any) -> None:
        if event.written and next(stops) == 5:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "BAND_BYTES", 1 << 14)
        patch.setattr(budget, "LEAST_BAND_BYTES", 1 << 13)
        plan = reshard.plan(_empty().assign(w=array), Strategy.of({"w": Layout.of([4], [-1, 0])}))
        with pytest.raises(KeyboardInterrupt):
            plan.run(tmp_path / "out", threads=1, progress=stop)
        before = len(counts)
        assert before < 16
        report = plan.run(tmp_path / "out", threads=1)
    assert report.resumed
    assert len(counts) < before + 16
    assert_equal(reshard.open(tmp_path / "out"), {"w": values + 1})


def slowly(block: Any) -> Any:
    time.sleep(0.02)
    return block * 2


@pytest.mark.slow
def test_a_worker_is_killed_while_it_computes_chunks(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    values = np.arange(240 * 64, dtype=np.float32).reshape(240, 64)
    base = da.from_array(values, chunks=(4, 32)).map_blocks(slowly, dtype=np.float32)
    arrays = {"w": base + base.sum(axis=0)[None], "b": base[:, 0]}
    expected = {name: array.compute(scheduler="synchronous") for name, array in arrays.items()}
    strategy = Strategy.of({"w": Layout.of([4], [-1, 0]), "b": Layout.of([4], [0])})
    with cluster(tmp_path, 2) as one, client_of(one.address, 2) as client:
        killed: list[bool] = []

        def kill(event: Any) -> None:
            if event.written > event.total // 3 and not killed:
                killed.append(True)
                one.workers[0].kill()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(budget, "BAND_BYTES", 1 << 12)
            patch.setattr(budget, "LEAST_BAND_BYTES", 1 << 11)
            reshard.write(arrays, tmp_path / "out", strategy=strategy, client=client, progress=kill)
    assert killed
    opened = reshard.open(tmp_path / "out")
    assert_equal(opened.sel("b"), {"b": expected["b"]})
    np.testing.assert_allclose(opened["w"].compute(), expected["w"], rtol=1e-6)
