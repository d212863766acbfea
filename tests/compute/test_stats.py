"""Statistics of checkpoints: against numpy, of every format and dtype, with NaNs at known places."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import hollow
import ml_dtypes
import numpy as np
import pytest
from adapters import matrices, merged, save, weights, written
from checkpoints import numbers, write_file, write_ranks
from commands import call, done
from computed import FLOATS, KINDS, WHOLE_NUMBERS, model, values, write
from dcp_files import cut, item, write_torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measure import RESHARD, measured
from refusals import failed

import reshard
from reshard import Layout, Strategy
from reshard.compute.boxes import BOX_BYTES, BoxGrid
from reshard.compute.moments import CHUNK, Meter, Moments
from reshard.dtypes import BY_NAME

if TYPE_CHECKING:
    from pathlib import Path

    from computed import Array

    from reshard.compute.stats import ValueStats


def assert_numbers(stats: ValueStats, array: Array) -> None:
    """Hold statistics against those that numpy computes in float64."""
    wide = np.abs(array) if array.dtype.kind == "c" else array
    wide = wide.astype(np.float64).reshape(-1)
    finite = wide[np.isfinite(wide)]
    counts = len(wide), int(np.isnan(wide).sum()), int(np.isinf(wide).sum()), int((finite == 0).sum())
    assert (stats.size, stats.nans, stats.infs, stats.zeros) == counts
    if not len(finite):
        assert (stats.min, stats.max, stats.mean, stats.std, stats.norm) == (None,) * 5
        return
    assert (stats.min, stats.max) == (finite.min(), finite.max())
    assert stats.mean == pytest.approx(finite.mean(), rel=1e-12, abs=1e-12 * np.abs(finite).max())
    assert stats.std == pytest.approx(finite.std(), rel=1e-10, abs=1e-12 * np.abs(finite).max())
    assert stats.norm == pytest.approx(np.linalg.norm(finite), rel=1e-12)


def dtypes_of(kind: str) -> list[str]:
    if kind == "zarr":
        return [dtype for dtype in (*FLOATS, *WHOLE_NUMBERS) if "float8" not in dtype]
    return [*FLOATS, *WHOLE_NUMBERS] if "ckpt" not in kind else [d for d in (*FLOATS, *WHOLE_NUMBERS) if "8_e" not in d]


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_are_those_of_numpy(tmp_path: Path, kind: str) -> None:
    full = model(dtypes_of(kind))
    stats = write(tmp_path, full, kind).stats()
    assert set(stats.tensors) == set(full)
    for name, array in full.items():
        assert_numbers(stats.tensors[name], array)
        assert (stats.tensors[name].dtype, stats.tensors[name].shape) == (array.dtype.name, array.shape)
    assert stats.bytes_read == sum(array.nbytes for array in full.values())  # each byte once, and no replica
    assert not stats.not_finite
    assert not stats.not_computed
    total = np.concatenate([array.astype(np.float64).reshape(-1) for array in full.values()])
    assert stats.total.size == total.size
    assert stats.total.norm == pytest.approx(np.linalg.norm(total), rel=1e-9)


@pytest.mark.parametrize("dtype", [*FLOATS, "complex64", "float8_e8m0fnu", "float8_e4m3fnuz"])
def test_what_is_not_finite_is_counted(tmp_path: Path, dtype: str) -> None:
    array = values(dtype if dtype[0] != "c" else "float32", (3 * CHUNK + 5,))
    array = array.astype(np.complex64) if dtype == "complex64" else array
    special = np.array([np.nan, np.inf, -np.inf]).astype(array.dtype)
    array[CHUNK + 3 : CHUNK + 6] = special
    array[-1] = special[0]
    write_file(tmp_path / "w.safetensors", {"w": array})
    stats = reshard.open(tmp_path / "w.safetensors").stats()
    assert_numbers(stats.tensors["w"], array)
    first = stats.not_finite["w"]
    wide = np.abs(array) if dtype == "complex64" else array.astype(np.float64)
    assert first.index == (int(np.flatnonzero(~np.isfinite(wide))[0]),)


@given(st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=40), st.sampled_from(["bfloat16", "float16"]))
def test_any_codes_of_two_bytes(codes: list[int], dtype: str) -> None:
    array = np.array(codes, np.uint16)
    moments = Meter(BY_NAME[dtype]).measure(array)
    wide = array.view(getattr(ml_dtypes, dtype, dtype)).astype(np.float64)
    finite = wide[np.isfinite(wide)]
    assert moments[:4] == (len(finite), np.isnan(wide).sum(), np.isinf(wide).sum(), (finite == 0).sum())
    if len(finite):
        assert (moments.least, moments.most) == (finite.min(), finite.max())


@given(st.lists(st.lists(st.floats(-100, 100), max_size=5), max_size=5))
def test_joined_statistics_are_those_of_all(parts: list[list[float]]) -> None:
    meter = Meter(BY_NAME["float64"])
    joined = Moments()
    for part in parts:
        if part:
            joined = joined.joined(meter.measure(np.array(part).view(np.uint64)))
    every = np.array([number for part in parts for number in part])
    assert joined.size == len(every)
    if len(every):
        assert joined.std == pytest.approx(every.std(), abs=1e-9)
        assert joined.norm == pytest.approx(np.linalg.norm(every), abs=1e-9)


@given(st.lists(st.integers(0, 7), max_size=4), st.integers(1, 60))
@settings(max_examples=200)
def test_boxes_cover_a_shape_once(shape: list[int], most: int) -> None:
    cut = BoxGrid.of(tuple(shape), most)
    seen = np.zeros(shape, np.int64)
    boxes = list(cut)
    assert len(boxes) == len(cut)
    for box in boxes:
        assert 0 < box.size <= most
        seen[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] += 1
    assert (seen == 1).all()
    assert [box.start for box in boxes] == sorted(box.start for box in boxes)


def test_whole_numbers_stay_exact(tmp_path: Path) -> None:
    array = np.array([2**62 + 1, -(2**62) - 1, 5], np.int64)
    write_file(tmp_path / "w.safetensors", {"w": array})
    stats = reshard.open(tmp_path / "w.safetensors").stats().tensors["w"]
    assert (stats.min, stats.max) == (-(2**62) - 1, 2**62 + 1)


# --- where a NaN is ---------------------------------------------------------------------------------------------


def with_nan(root: Path, format: str = "safetensors") -> tuple[Path, Path, dict[str, Array]]:
    """Write 4 ranks of columns, with NaNs in rank 3 and, further behind, in rank 1."""
    full = {"a.w": values("bfloat16", (40, 64)), "b.w": values("float32", (8, 8))}
    full["a.w"].view(np.uint16)[7, 50] = 0x7FC0
    full["a.w"].view(np.uint16)[9, 20] = 0xFF80
    strategy = Strategy.of({name: Layout.of([4], [-1, 0]) for name in full})
    write_ranks(root / "src", full, strategy, format)
    reshard.write_strategy(strategy, root / "src.json")
    return root / "src", root / "src.json", full


@pytest.mark.parametrize("format", ["safetensors", "ckpt"])
def test_a_nan_is_named_with_its_tensor_rank_and_index(tmp_path: Path, format: str) -> None:
    source, strategy, _ = with_nan(tmp_path, format)
    first = reshard.open(source, strategy=strategy).stats().not_finite["a.w"]
    assert (first.index, first.rank, first.value) == ((7, 50), 3, "nan")
    assert "rank_3" in first.path
    result = call("stats", source, "--source-strategy", strategy, "--nan")
    assert result.exit_code == 3
    for text in ("a.w[7, 50]", "rank 3", "nan"):
        assert text in result.stdout
    assert call("stats", source, "--source-strategy", strategy).exit_code == 0
    assert call("stats", source, "--source-strategy", strategy, "--nan", "--match", "b.*").exit_code == 0


def test_what_cannot_be_read_may_have_a_nan(tmp_path: Path) -> None:
    """`--nan` answers for all tensors: one whose block no file has is neither finite nor not. A text has no NaN."""
    weights = {"l.w": values("float32", (4, 6)), "b": np.zeros(3, np.float32)}
    strategy = Strategy.of({"l.w": Layout.of([2], [0, -1]), "b": Layout.of([2], [-1])})
    write_ranks(tmp_path / "src", weights, strategy)
    (tmp_path / "src" / "rank_1" / "checkpoint_1.safetensors").unlink()
    reshard.write_strategy(strategy, tmp_path / "src.json")
    command = ("stats", tmp_path / "src", "--source-strategy", tmp_path / "src.json", "--partial", "--nan")
    assert json.loads(call(*command, "--json").stdout)["error"]["code"] == "not-computed"
    failed(4, "not-computed", *command, places=("l.w", "--match"))
    done(*command, "--match", "b")


def test_data_and_the_exit_code(tmp_path: Path) -> None:
    source, strategy, full = with_nan(tmp_path)
    result = call("stats", source, "--source-strategy", strategy, "--nan", "--json")
    assert result.exit_code == 3
    data = json.loads(result.stdout)
    assert data["error"]["code"] == "not-finite"
    assert data["finite"] is False
    tensor, other = sorted(data["tensors"], key=lambda tensor: tensor["name"])
    assert (tensor["name"], tensor["nans"], tensor["infs"], tensor["size"]) == ("a.w", 1, 1, 40 * 64)
    assert (tensor["first"]["index"], tensor["first"]["rank"]) == ([7, 50], 3)
    assert other["first"] is None
    assert other["norm"] == pytest.approx(np.linalg.norm(full["b.w"].astype(np.float64)))
    assert [group["tensors"] for group in data["groups"]] == [1, 1]
    assert {"min", "max", "mean", "std", "zeros", "dtype", "shape", "kind"} <= tensor.keys()


@pytest.mark.parametrize("turned", [False, True])
def test_the_index_is_in_the_whole_tensor_whatever_the_rules(tmp_path: Path, turned: bool) -> None:
    """Transposed and fused tensors are read in the order of the file, and found by their own index."""
    full = {"w": values("float32", (700, 900)), "qkv": values("float32", (6, 5))}
    full["w"][600, 3] = full["w"][2, 800] = np.inf
    full["qkv"][3, 4] = np.nan
    write_file(tmp_path / "w.safetensors", full)
    turn = {"parts": "w.t", "fused": {"transpose": "w"} if turned else "w"}
    split = {"parts": ["q", "k", "v"], "fused": {"concat": "qkv", "sizes": [2, 2, 2]}}
    rules = {"reshard-rules": 1, "sides": ["parts", "fused"], "rules": [turn, split]}
    (tmp_path / "rules.yaml").write_text(json.dumps(rules))
    stats = reshard.open(tmp_path / "w.safetensors").derive(tmp_path / "rules.yaml").stats()
    assert stats.not_finite["w.t"].index == ((3, 600) if turned else (2, 800))
    assert stats.not_finite["k"].index == (1, 4)
    assert stats.bytes_read == sum(array.nbytes for array in full.values())
    assert_numbers(stats.tensors["w.t"], full["w"])
    assert_numbers(stats.tensors["q"], full["qkv"][:2])


# --- the same, whoever computes ---------------------------------------------------------------------------------


def numbers_of(stats: Any) -> Any:
    return {name: (each.moments, each.sample, each.first) for name, each in stats.tensors.items()}


def test_threads_do_not_change_a_bit(tmp_path: Path) -> None:
    shape = (300, 9001)
    assert np.prod(shape) * 4 > 4 * BOX_BYTES
    full = {"l.f": values("float32", shape), "l.b": values("bfloat16", shape), "l.i": values("int8", shape)}
    checkpoint = write(tmp_path, full, "rows safetensors")
    one, four = (checkpoint.stats(threads=threads) for threads in (1, 4))
    assert numbers_of(one) == numbers_of(four)
    assert numbers_of(checkpoint.stats(memory="200MB")) == numbers_of(one)
    for name, array in full.items():
        assert_numbers(one.tensors[name], array)


# --- groups, and what is shown ----------------------------------------------------------------------------------


def test_groups_join_tensors(tmp_path: Path) -> None:
    full = {f"layers.{n}.w": values("float32", (30, 40), n) for n in range(4)} | {
        "moments.layers.0.w": values("float32", (30, 40), 9)
    }
    write_file(tmp_path / "w.safetensors", full)
    stats = reshard.open(tmp_path / "w.safetensors").stats()
    layers = np.stack([full[f"layers.{n}.w"] for n in range(4)])
    assert_numbers(stats.groups()["layers.{0-3}.w"], layers)
    assert set(stats.groups("prefix")) == {"layers", "moments"}
    assert set(stats.groups("kind")) == {"weights", "moments"}
    assert set(stats.groups("dtype")) == {"float32"}
    assert set(stats.groups("tensor")) == set(full)
    with pytest.raises(reshard.UsageError) as error:
        stats.groups("size")
    assert error.value.code == "bad-value"
    for by in ("name", "prefix", "dtype", "kind", "tensor"):
        assert done("stats", tmp_path / "w.safetensors", "--by", by).stdout


def test_histograms_are_those_of_numpy_in_large(tmp_path: Path) -> None:
    full = {
        "small": values("float32", (5000,)), "large": values("bfloat16", (400, 1000)),
        "bytes": values("int8", (999,)), "same": np.full(9, 2.5, np.float32),
    }  # fmt: skip
    write_file(tmp_path / "w.safetensors", full)
    stats = reshard.open(tmp_path / "w.safetensors").stats()
    for name, array in full.items():
        counts, edges = stats.tensors[name].histogram(12)
        expected, expected_edges = np.histogram(array.astype(np.float64), 12)
        assert edges == pytest.approx(expected_edges)
        assert counts / counts.sum() == pytest.approx(expected / expected.sum(), abs=0.05)
    assert stats.tensors["small"].histogram()[0].sum() == pytest.approx(5000)


def test_texts_and_what_cannot_be_read_are_listed(tmp_path: Path) -> None:
    full = {"l.w": values("float32", (8, 8))}
    strategy = Strategy.of({"l.w": Layout.of([2], [0, -1])})
    write_ranks(tmp_path / "src", full, strategy, "ckpt", {"note": "text"})
    checkpoint = reshard.open(tmp_path / "src", strategy=strategy)
    assert set(checkpoint.stats().not_computed) == {"note"}
    (tmp_path / "src/rank_1/checkpoint_1.ckpt").unlink()
    partial = reshard.open(tmp_path / "src", strategy=strategy, partial=True)
    stats = partial.stats()
    assert set(stats.not_computed) == {"note", "l.w"}
    assert stats.total.size == 0
    assert stats._repr_html_()


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = write_file(tmp_path / "w.safetensors", {"w": values("float32", (64, 64))})
    checkpoint = reshard.open(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(reshard.SourceError):
        checkpoint.stats()
    assert call("stats", path).exit_code == 4


def test_too_little_memory_is_refused(tmp_path: Path) -> None:
    path = write_file(tmp_path / "w.safetensors", {"w": values("float32", (64, 64))})
    with pytest.raises(reshard.BudgetError):
        reshard.open(path).stats(memory="20MB")
    assert call("stats", path, "--memory", "20MB").exit_code == 5
    assert call("stats", path, "--memory", "200MB", "--quiet").stdout == ""


def test_complex_numbers_whose_magnitude_is_too_large(tmp_path: Path) -> None:
    narrow = np.array([3e38 + 3e38j, 1j], np.complex64)
    reshard.write({"w": narrow}, tmp_path / "hf")
    values = reshard.open(tmp_path / "hf").stats()["w"]
    assert (values.infs, values.max) == (0, pytest.approx(float(np.abs(narrow[0].astype(np.complex128)))))


# --- What is computed with values that are not stored as they are: merged adapters, encrypted files, stri ---


def assert_read(checkpoint: reshard.Checkpoint, full: dict[str, Array], tmp_path: Path) -> None:
    """Statistics are those of whole tensors, and these equal the checkpoint."""
    stats = checkpoint.stats()
    assert set(stats.tensors) == set(full)
    for name, array in full.items():
        assert stats.tensors[name].norm == pytest.approx(np.linalg.norm(array.astype(np.float64)), rel=1e-12)
        assert stats.tensors[name].max == array.astype(np.float64).max()
    whole = write_file(tmp_path / "whole.safetensors", written(full))
    for sides in ((checkpoint, whole), (whole, checkpoint)):
        assert reshard.diff(*sides)


def test_a_merged_adapter(tmp_path: Path) -> None:
    model = weights()
    pairs = matrices(model)
    base = reshard.open(write_file(tmp_path / "model.safetensors", written(model)))
    both = base.merge_lora(save(tmp_path / "lora", pairs))
    assert_read(both, merged(model, pairs), tmp_path)
    changed = {name for name in pairs if "lora_A" in name}
    assert len(reshard.diff(base, both).changed) == len(changed)


def test_strided_tensors(tmp_path: Path) -> None:
    """Items of a DCP whose elements lie in column-major order, with gaps, or are one for many."""
    full = numbers({"turned": (320, 300), "step": (400, 250)})
    full["rows"] = np.repeat(numbers({"rows": (7000, 1)})["rows"], 2, axis=1)
    gaps = np.full((400, 500), 7, np.float32)
    gaps[:, 1::2] = full["step"]
    lying = {
        "turned": {"storage": np.ascontiguousarray(full["turned"].T).reshape(-1), "strides": (1, 320)},
        "step": {"storage": gaps.reshape(-1), "strides": (500, 2), "first": 1},
        "rows": {"storage": np.ascontiguousarray(full["rows"][:, 0]), "strides": (1, 0)},
    }
    items = [
        (name, ((0, 0), array.shape), item(cut(array, ((0, 0), array.shape)), **lying[name]))
        for name, array in full.items()
    ]
    checkpoint = reshard.open(write_torch(tmp_path / "dcp", full, {0: items}))
    assert any(tensor.sharding.is_strided for tensor in checkpoint.tensors.values())
    assert_read(checkpoint, full, tmp_path)


# --- Memory of what is computed with values, measured on whole commands: it does not grow with the tensor ---

MODEL = {"embedding": (24000, 4096), **{f"layers.{n}.w": (4096, 4096) for n in range(4)}}


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two checkpoints of holes, by rows and by columns, each with its strategy."""
    root = tmp_path_factory.mktemp("hollow")
    words = []
    for side, layout in {"source": Layout.of([8], [0, -1]), "target": Layout.of([64], [-1, 0])}.items():
        strategy = Strategy.of(dict.fromkeys(MODEL, layout))
        hollow.write_hollow(root / side, MODEL, strategy, "safetensors")
        reshard.write_strategy(strategy, root / f"{side}.json")
        words += [str(root / side), f"--{side}-strategy", str(root / f"{side}.json")]
    return words


@pytest.mark.slow
@pytest.mark.parametrize(("options", "most"), [([], 110e6), (["--threads", "1"], 90e6), (["--memory", "75MB"], 75e6)])
def test_statistics_take_little_memory(sides: list[str], options: list[str], most: float) -> None:
    took = measured(*RESHARD, "stats", *sides[:3], "--json", *options)
    assert took.code == 0, took.err
    assert took.peak < most


@pytest.mark.slow
@pytest.mark.parametrize(("options", "most"), [([], 200e6), (["--threads", "1"], 130e6), (["--memory", "90MB"], 90e6)])
def test_differences_take_little_memory(sides: list[str], options: list[str], most: float) -> None:
    source, *source_options = sides[:3]
    target, *target_options = sides[3:]
    took = measured(*RESHARD, "diff", source, target, *source_options, *target_options, "--json", *options)
    assert took.code == 0, took.err
    assert took.peak < most
