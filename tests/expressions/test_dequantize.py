"""Weights in scaled blocks: the bits that PyTorch and numpy make of them, however they are cut, read and written."""

from __future__ import annotations

import json
import pickle
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import dask
import ml_dtypes
import numpy as np
import pytest
from checkpoints import assert_equal, assert_rank_files, write_file, write_ranks
from commands import done
from helpers import load_meta
from hypothesis import given
from hypothesis import strategies as st
from refusals import failed, refused

import reshard
from reshard import HuggingFaceSet, Layout, Strategy
from reshard.api.checkpoints import record_of
from reshard.core.layout.block import Block
from reshard.core.plan import budget
from reshard.errors import ChangedError, SourceError, TargetError, UsageError
from reshard.expressions.operand import Operand
from reshard.expressions.quantized import scaled
from reshard.expressions.quantized.scaled import ScaledBlocks

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from helpers import Array

CASES = ("fp8_v3", "fp8_v3_odd_values", "fp8_other_block", "fp4_v4", "fp4_v4_odd_values")
E4M3, E5M2, E8M0, BF16 = (
    np.dtype(getattr(ml_dtypes, name)) for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "bfloat16")
)
FLOAT8 = [E4M3, E5M2, np.dtype(ml_dtypes.float8_e4m3fnuz), np.dtype(ml_dtypes.float8_e5m2fnuz)]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def bits(array: Array) -> Array:
    """Return the bits of an array; NaNs are all the same."""
    result = np.ascontiguousarray(array).view(f"u{array.itemsize}").copy()
    if array.dtype.kind == "f" or array.dtype == BF16:
        result[np.isnan(array)] = np.iinfo(result.dtype).max >> 1
    return result


def assert_same(checkpoint: Mapping[str, Any], expected: Mapping[str, Array]) -> None:
    assert set(checkpoint) == set(expected)
    for name, value in zip(checkpoint, dask.compute(*map(checkpoint.__getitem__, checkpoint)), strict=True):
        assert (value.dtype, value.shape) == (expected[name].dtype, expected[name].shape), name
        assert np.array_equal(bits(value), bits(expected[name])), name


def times_scales(values: Array, scales: Array, block: tuple[int, int], dtype: Any = BF16) -> Array:
    """Multiply values by the scales of their blocks, as the vendors' scripts do."""
    wide = scales.astype(np.float32).repeat(block[0], -2).repeat(block[1], -1)
    with np.errstate(all="ignore"):
        return (values.astype(np.float32) * wide[..., : values.shape[-2], : values.shape[-1]]).astype(dtype)


def unpacked(stored: Array) -> Array:
    """Return the two values of each byte."""
    codes = stored.view(np.uint8)
    return E2M1[np.stack([codes & 15, codes >> 4], -1)].reshape(*stored.shape[:-1], -1)


def values(shape: tuple[int, ...], seed: int = 0, dtype: Any = E4M3) -> Array:
    """Return random codes, NaN among them."""
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8).view(dtype)


def scales_of(shape: tuple[int, ...], seed: int = 1, dtype: Any = np.float32) -> Array:
    rng = np.random.default_rng(seed)
    if dtype == E8M0:
        return rng.integers(100, 140, shape, np.uint8).view(E8M0)
    return (rng.standard_normal(shape) * 1e-3).astype(dtype)


def model() -> tuple[dict[str, Array], dict[str, Array]]:
    """Return a quantized model, and what it is in bfloat16."""
    codes = values((384, 256)).view(np.uint8)
    stored = {
        "a.weight": np.where(codes & 0x7F == 0x7F, 0, codes).view(E4M3),  # NaN varies
        "a.weight_scale_inv": scales_of((3, 2)),
        "b.weight": values((40, 64), 2).view(np.int8),
        "b.scale": scales_of((40, 4), dtype=E8M0),
        "norm.weight": np.arange(8, dtype=np.float32).astype(BF16),
        "step": np.arange(3, dtype=np.int8),
    }
    full = {
        "a.weight": times_scales(stored["a.weight"], stored["a.weight_scale_inv"], (128, 128)),
        "b.weight": times_scales(unpacked(stored["b.weight"]), stored["b.scale"], (1, 32)),
        "norm.weight": stored["norm.weight"],
        "step": stored["step"],
    }
    return stored, full


def save_set(root: Path, stored: Mapping[str, Array], config: object = None) -> Path:
    """Write a Hugging Face set of one file, and its config.json."""
    write_file(root / "model-00001-of-00001.safetensors", stored)
    index = {"metadata": {}, "weight_map": dict.fromkeys(stored, "model-00001-of-00001.safetensors")}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    if config is not None:
        (root / "config.json").write_text(json.dumps(config))
    return root


def fp8(**more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], **more}


# --- values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_recorded_values(mindspore_data: Path, tmp_path: Path, case: str) -> None:
    """All bits of PyTorch, in arrays, and in files of every kind of target."""
    folder = mindspore_data / "quantized" / case
    expected = load_meta(folder)["full"]
    opened = reshard.open(folder / "checkpoint")
    plain = opened.dequantize()
    assert_recorded(plain, expected)
    assert set(opened) > set(plain)
    for to in ("hf", "dcp", "zarr", "safetensors"):
        report = reshard.convert(plain, tmp_path / to, to=to)
        assert report.bytes_read <= opened.nbytes + (0 if to == "zarr" else 1 << 16)
        assert_recorded(reshard.open(tmp_path / to), expected)
        assert reshard.verify(tmp_path / to).equal, "computed again"


def assert_recorded(checkpoint: reshard.Checkpoint, expected: Mapping[str, Any]) -> None:
    assert set(checkpoint) == set(expected)
    for name, value in zip(checkpoint, dask.compute(*map(checkpoint.__getitem__, checkpoint)), strict=True):
        dtype, shape, digest = expected[name]
        assert (value.dtype.name, list(value.shape)) == (dtype, shape), name
        assert sha256(bits(value).tobytes()).hexdigest()[:32] == digest, name


@given(data=st.data())
def test_any_box_of_any_blocks(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A box may begin and end anywhere; large blocks have tables, small ones are multiplied."""
    packed = data.draw(st.booleans())
    kind = E8M0 if packed else data.draw(st.sampled_from([np.dtype(np.float32), BF16, np.dtype(np.float16), E8M0]))
    dtype = data.draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    block = (1, 32) if packed else data.draw(st.sampled_from([(128, 128), (64, 96), (1, 32), (3, 5), (1, 128)]))
    leading = data.draw(st.sampled_from([(), (2,)]))
    rows, columns = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 300))
    stored = values((*leading, rows, columns), 3, np.int8 if packed else data.draw(st.sampled_from(FLOAT8)))
    whole = unpacked(stored) if packed else stored
    shape = (*leading, -(-rows // block[0]), -(-whole.shape[-1] // block[1]))
    scales = scales_of(shape, 4, kind)
    path = tmp_path_factory.mktemp("box") / "model.safetensors"
    opened = record_of(reshard.open(write_file(path, {"w": stored, "s": scales})))
    result = reshard.dtypes.BY_NAME[dtype]
    expression = ScaledBlocks(Operand(opened, "w"), Operand(opened, "s"), block, result, packed)
    full = times_scales(whole, scales, block, result.numpy())
    assert expression.shape == full.shape
    for _ in range(5):
        edges = [sorted(data.draw(st.tuples(*[st.integers(0, extent)] * 2))) for extent in full.shape]
        box = Block(*map(tuple, zip(*edges, strict=True)))
        out = np.empty(box.shape, full.dtype)
        expression.evaluate(box, out)
        assert np.array_equal(bits(out), bits(full[tuple(slice(*edge) for edge in edges)])), (box, block)


def test_rows_that_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long rows are looked up in parts, which begin at any column of a block."""
    stored, full = model()
    opened = reshard.open(write_file(tmp_path / "model.safetensors", stored))
    for columns, chunk in ((100, 1000), (8, 8), (37, 50)):
        monkeypatch.setattr(scaled, "_MOST_COLUMNS", columns)
        monkeypatch.setattr(scaled, "_CHUNK", chunk)
        assert_same(opened.dequantize(), full)
        weight = opened.dequantize()["b.weight"]
        assert np.array_equal(bits(weight[3:9, 33:101].compute()), bits(full["b.weight"][3:9, 33:101]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_targets_dtypes(tmp_path: Path, dtype: str) -> None:
    """Weights that are not quantized keep their dtypes."""
    stored, full = model()
    opened = reshard.open(write_file(tmp_path / "model.safetensors", stored))
    with np.errstate(all="ignore"):
        full["a.weight"] = times_scales(stored["a.weight"], stored["a.weight_scale_inv"], (128, 128), dtype)
        full["b.weight"] = times_scales(unpacked(stored["b.weight"]), stored["b.scale"], (1, 32), dtype)
    assert_same(opened.dequantize(dtype), full)
    assert_same(pickle.loads(pickle.dumps(opened.dequantize(dtype))), full)  # noqa: S301 -- of this test


def test_blocks_larger_than_weights(tmp_path: Path) -> None:
    """A scale for each row, for all of a weight, or of no elements; a size in a file takes no memory."""
    for block, shape in (((1, 1 << 50), (5, 300)), ((1 << 50, 1 << 50), (5, 300)), ((64, 1 << 50), (130, 9000))):
        stored = {"w.weight": values(shape), "w.scale": scales_of((-(-shape[0] // block[0]), 1))}
        stored |= {"empty.weight": values((0, 4)), "empty.scale": scales_of((0, 1))}
        root = save_set(tmp_path / f"{block[0]}", stored, {"quantization_config": fp8(weight_block_size=block)})
        wide = times_scales(stored["w.weight"], stored["w.scale"], (min(block[0], shape[0]), shape[1]))
        assert_same(reshard.open(root).dequantize(), {"w.weight": wide, "empty.weight": np.empty((0, 4), BF16)})


# --- layouts ----------------------------------------------------------------------------------------------------


def strategy(shapes: Mapping[str, Array], how: str, ranks: int = 2) -> Strategy:
    """Cut matrices by rows or columns; other tensors are on every rank."""
    axes = {"rows": [0, -1], "columns": [-1, 0]}[how]
    return Strategy.of(
        {name: Layout.of([ranks], axes if array.ndim == 2 else [-1] * array.ndim) for name, array in shapes.items()}
    )


def test_ranks_to_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of float8 and of packed values, on two ranks, to rows on four; also in bands of a few elements."""
    stored, full = model()
    source = strategy(stored, "columns")
    root = write_ranks(tmp_path / "src", stored, source)
    plain = reshard.open(root, strategy=source).dequantize()
    assert_same(plain, full)
    target = strategy(full, "rows", 4)
    for at, band in (("default", budget.BAND_BYTES), ("small", 96)):
        monkeypatch.setattr(budget, "BAND_BYTES", band)
        monkeypatch.setattr(budget, "TASK_BYTES", 8 * band)
        for scheduler, threads in (("synchronous", None), ("threads", 4)):
            reshard.plan(plain, target).run(
                tmp_path / at, fsync=False, scheduler=scheduler, threads=threads, overwrite=True
            )
            assert_rank_files(tmp_path / at, full, target)


def test_a_source_that_changes(tmp_path: Path) -> None:
    """Scales that change after opening are noticed, as other files are."""
    stored, _ = model()
    path = write_file(tmp_path / "model.safetensors", stored)
    plan = reshard.plan(reshard.open(path).dequantize())
    write_file(path, {**stored, "a.weight_scale_inv": scales_of((3, 2), 9)})
    with pytest.raises((ChangedError, SourceError)):
        plan.run(tmp_path / "out")


# --- refusals ---------------------------------------------------------------------------------------------------


def opened(tmp_path: Path, stored: Mapping[str, Array], config: object = None) -> reshard.Checkpoint:
    return reshard.open(save_set(tmp_path / "set", stored, config))


def test_scales_that_do_not_fit(tmp_path: Path) -> None:
    """All faults at once, each with its tensor."""
    stored, _ = model()
    del stored["a.weight_scale_inv"]
    wrong = {
        "short.weight": values((200, 130)), "short.weight_scale_inv": scales_of((1, 2)),
        "int.weight": values((4, 8)).view(np.int8), "int.scale": scales_of((4, 1)),
        "row.weight": values((8,)), "row.scale": scales_of((1,)),
        "lost.weight_scale_inv": scales_of((1, 1)),
        "kind.weight": values((4, 8)), "kind.scale": np.ones((1, 1), np.int32),
    }  # fmt: skip
    with refused(SourceError, "missing-scale", "'a.weight'", "a.weight_scale_inv or a.scale") as caught:
        opened(tmp_path, stored | wrong).dequantize()
    assert set(caught.value.codes) >= {"missing-scale", "wrong-shape", "unsupported-dtype", "unused-scale"}
    for name in ("short", "int", "row", "lost", "kind"):
        assert f"{name}.weight" in str(caught.value)


def test_scales_that_are_left_out(tmp_path: Path) -> None:
    stored, full = model()
    source = opened(tmp_path, stored)
    with refused(SourceError, "missing-scale", "a.weight_scale_inv was left out"):
        source.sel("a.weight").dequantize()
    assert_same(source.dequantize().sel("a.weight"), {"a.weight": full["a.weight"]})


def test_weights_that_were_dequantized(tmp_path: Path) -> None:
    """Their scales were left: they are not multiplied again, nor dropped in silence."""
    stored, full = model()
    with refused(SourceError, "unused-scale", "a.weight_scale_inv", "bfloat16"):
        opened(tmp_path, stored | {"a.weight": full["a.weight"]}).dequantize()


@pytest.mark.parametrize("method", ["gptq", "awq", "hqq", "mxfp4", "bitsandbytes", 3])
@pytest.mark.parametrize("inner", [False, True])
def test_other_methods(tmp_path: Path, method: object, inner: bool) -> None:
    config: dict[str, Any] = {"quantization_config": {"quant_method": method}}
    config = {"text_config": config} if inner else config
    with refused(SourceError, "unsupported-quantization", repr(method), "config.json"):
        opened(tmp_path, model()[0], config).dequantize()


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ([], "wrong-type"),
        ({"quantization_config": "fp8"}, "wrong-type"),
        ({"quantization_config": fp8(weight_block_size=[0, 128])}, "bad-value"),
        ({"quantization_config": fp8(weight_block_size=[128])}, "bad-value"),
        ({"quantization_config": fp8(weight_block_size=[64, 128])}, "wrong-shape"),
    ],
)
def test_configurations_that_are_wrong(tmp_path: Path, config: object, code: str) -> None:
    with refused(SourceError, code):
        opened(tmp_path, model()[0], config).dequantize()
    (tmp_path / "set" / "config.json").write_text("{")
    with refused(SourceError, "not-json", "config.json"):
        reshard.open(tmp_path / "set").dequantize()


def test_calls_that_are_wrong(tmp_path: Path) -> None:
    source = opened(tmp_path, model()[0])
    for dtype in ("int8", "float64", "float8_e4m3fn"):
        with refused(UsageError, "unsupported-dtype", dtype):
            source.dequantize(dtype)
    with refused(UsageError, "unknown-dtype"):
        source.dequantize("half")
    with refused(SourceError, "not-quantized"):
        source.dequantize().dequantize()
    assert record_of(source.dequantize("bf16")).opening.computation[:2] == ("dequantize", {"dtype": "bfloat16"})


def test_after_rules(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "reshard-rules: 1\nsides: [a, b]\nrules: [{a: a.*, b: z.a.*}, {a: b.*, b: z.b.*}, {a: norm.*, b: z.norm.*}, "
        "{a: step, b: z.step}]\n"
    )
    stored, full = model()
    source = opened(tmp_path, stored)
    with refused(UsageError, "already-derived"):
        source.derive(rules).dequantize()
    assert_same(source.dequantize().derive(rules), {f"z.{name}": array for name, array in full.items()})


# --- config.json, and commands ----------------------------------------------------------------------------------


CONFIG = {
    "model_type": "deepseek_v3",
    "torch_dtype": "float8",
    "quantization_config": fp8(),
    "text_config": {"dtype": "bfloat16", "quantization_config": fp8(), "name": "é"},
    "hidden_size": 1 << 60,
}


def test_config_of_a_set(tmp_path: Path) -> None:
    """It goes with a Hugging Face set, without the quantization; nothing else of it is changed."""
    stored, full = model()
    plain = opened(tmp_path, stored, CONFIG).dequantize("float16")
    report = reshard.plan(plain, files=HuggingFaceSet(max_shard_size=100_000)).run(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "model_type": "deepseek_v3",
        "torch_dtype": "float16",
        "text_config": {"dtype": "float16", "name": "é"},
        "hidden_size": 1 << 60,
    }
    assert "config.json" in report.files
    assert len(reshard.open(tmp_path / "out")) == len(full)
    assert reshard.verify(tmp_path / "out").equal
    for to in ("dcp", "safetensors", "zarr"):
        reshard.convert(plain, tmp_path / to, to=to)
        assert not (tmp_path / to / "config.json").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("mine")
    with refused(TargetError, "already-exists", "config.json"):
        reshard.convert(plain, tmp_path / "other", to="hf")
    assert (tmp_path / "other" / "config.json").read_text() == "mine"


def test_averages(tmp_path: Path) -> None:
    """Inputs that are quantized are dequantized first; others are as they are."""
    stored, full = model()
    one, two = save_set(tmp_path / "one", stored, CONFIG), save_set(tmp_path / "two", full)
    with refused(SourceError, "not-averageable"):
        reshard.average([reshard.open(one), reshard.open(one)])
    done("average", f"{one}:0.5", f"{two}:0.5", tmp_path / "out", "--to", "hf", "--dequantize", "bfloat16")
    assert_same(reshard.open(tmp_path / "out"), full)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert reshard.verify(tmp_path / "out").equal
    failed(4, "not-quantized", "average", two, two, tmp_path / "none", "--dequantize", "bfloat16")


def test_commands(tmp_path: Path) -> None:
    """convert, plan and run; a run that is typed again; the ledger says what it is."""
    stored, full = model()
    source, out = save_set(tmp_path / "set", stored, CONFIG), tmp_path / "out"
    option = ("--dequantize", "bfloat16")
    done("convert", source, out, *option)
    assert_same(reshard.open(out), full)
    assert "finished by an earlier run" in done("convert", source, out, *option).stdout
    failed(6, "other-run", "convert", source, out, "--dequantize", "float32")
    assert "dequantized" in done("verify", out).stdout
    planned = done("plan", source, *option, "-o", tmp_path / "plan.json", "--to", "dcp")
    assert "dequantized" in planned.stdout
    done("run", tmp_path / "plan.json", tmp_path / "planned")
    assert_equal(reshard.open(tmp_path / "planned"), full)
    for more in (("--link", "--to", "dcp"), ("--same-ranks", "--to", "ckpt"), ("--via-zarr", tmp_path / "x.zarr")):
        failed(2, "conflicting-options", "convert", source, tmp_path / "none", *option, *more)
    failed(2, "unsupported-dtype", "convert", source, tmp_path / "none", "--dequantize", "int8")
    failed(2, "unknown-dtype", "convert", source, tmp_path / "none", "--dequantize", "fp")
    done("convert", source, tmp_path / "short", "--dequantize", "bf16")
