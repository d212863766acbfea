"""Sets that other programs quantized: every command says the method, and nothing takes their codes for numbers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import write_file
from commands import done
from refusals import failed, refused
from safetensors import safe_open

import reshard

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from helpers import Array

E4M3, BF16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)


def ints(*shape: int, dtype: str = "int32") -> Array:
    return np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)


def float8(*shape: int) -> Array:
    codes = np.random.default_rng(0).integers(0, 0x7F, shape, np.uint8)
    return codes.view(E4M3)


def ones(*shape: int, dtype: Any = np.float32) -> Array:
    return np.ones(shape, dtype)


def config(method: str | None = None, **settings: Any) -> dict[str, Any]:
    return {"quantization_config": {**({"quant_method": method} if method else {}), **settings}}


GPTQ = {"a.qweight": ints(8, 2), "a.qzeros": ints(1, 2), "a.scales": ones(1, 8, dtype=np.float16), "a.g_idx": ints(8)}
AWQ = {name: array for name, array in GPTQ.items() if name != "a.g_idx"}
PACKED = {"a.weight_packed": ints(8, 2), "a.weight_scale": ones(8, 1), "a.weight_shape": ints(2, dtype="int64")}
BNB4 = {"a.weight": ints(16, 1, dtype="uint8"), "a.weight.absmax": ones(1), "a.weight.quant_map": ones(16)}
BNB8 = {"a.weight": ints(4, 4, dtype="int8"), "a.SCB": ones(4)}
MXFP4 = {"e.up_proj_blocks": ints(1, 2, 1, 16, dtype="uint8"), "e.up_proj_scales": ints(1, 2, 1, dtype="uint8")}
NVFP4 = {"a.weight": ints(8, 8, dtype="uint8"), "a.weight_scale": float8(8, 1), "a.weight_scale_2": ones()}
W8A8 = {"a.weight": ints(4, 4, dtype="int8"), "a.weight_scale": ones(4, 1)}
HQQ = {"a.W_q": ints(4, 4, dtype="uint8"), "a.scale": ones(4, 1), "a.zero": ones(4, 1)}
QUANTO = {"a.weight._data": ints(4, 4, dtype="int8"), "a.weight._scale": ones(4, 1)}
AQLM = {"a.codes": ints(4, 4, 1, dtype="int16"), "a.codebooks": ones(1, 16, 1, 8), "a.scales": ones(4, 1, 1, 1)}
ROWS = {"a.weight": float8(8, 4), "a.weight_scale": ones(8, 1, dtype=BF16), "a.input_scale": ones(1)}
WHOLE = {"a.weight": float8(8, 4), "a.weight_scale": ones(), "a.input_scale": ones()}
MISTRAL = {"a.weight": float8(8, 4), "a.qscale_weight": ones(), "a.qscale_act": ones()}
BLOCKS = {"a.weight": float8(8, 4), "a.weight_scale_inv": ones(1, 1)}
NORM = {"norm.weight": ones(4)}

SETS: dict[str, tuple[dict[str, Array], dict[str, Any], str]] = {
    "GPTQ": (GPTQ, {"config.json": config("gptq", bits=4, group_size=128)}, "gptq (bits 4, group_size 128)"),
    "old GPTQ": (GPTQ, {"quantize_config.json": {"bits": 4, "group_size": 128}}, "gptq (bits 4, group_size 128)"),
    "GPTQ alone": (GPTQ, {}, "gptq"),
    "AWQ alone": (AWQ, {}, "awq"),
    "packed": (PACKED, {"config.json": config("compressed-tensors", format="pack-quantized")}, "compressed-tensors"),
    "4 bits": (BNB4, {}, "bitsandbytes"),
    "8 bits": (BNB8, {"config.json": config(load_in_8bit=True)}, "bitsandbytes"),
    "gpt-oss": (MXFP4, {"config.json": config("mxfp4")}, "mxfp4"),
    "NVFP4": (
        NVFP4,
        {"hf_quant_config.json": {"quantization": {"quant_algo": "NVFP4"}}},
        "modelopt (quant_algo NVFP4)",
    ),
    "int8": (W8A8, {"config.json": config("compressed-tensors", format="int-quantized")}, "compressed-tensors"),
    "HQQ": (HQQ, {"config.json": config("hqq")}, "hqq"),
    "quanto": (QUANTO, {}, "quanto"),
    "AQLM": (AQLM, {}, "aqlm"),
    "a part": (BNB8, {"config.json": {"llm": {"text": config("finegrained")}}}, "finegrained"),
}
"""Sets whose codes are not dequantized: the tensors, the files beside them, and what is said."""

FLOAT8: dict[str, tuple[dict[str, Array], dict[str, Any], str]] = {
    "rows": (ROWS, {"config.json": config("compressed-tensors", format="float-quantized")}, "compressed-tensors"),
    "whole": (WHOLE, {"hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}}}, "modelopt (quant_algo FP8)"),
    "whole alone": (WHOLE, {}, "float8_e4m3fn with scales"),
    "Mistral": (MISTRAL, {"params.json": {"dim": 4, "quantization": {"qformat_weight": "fp8_e4m3"}}}, "mistral"),
    "DeepSeek": (BLOCKS, {"config.json": config("fp8", weight_block_size=[128, 128])}, "fp8"),
    "a part": (BLOCKS, {"config.json": {"text_config": config("fp8")}}, "fp8"),
}
"""Sets of float8 values with scales that are all 1."""


def saved(root: Path, tensors: Mapping[str, Array], files: Mapping[str, Any]) -> Path:
    write_file(root / "model.safetensors", {**tensors, **NORM})
    for name, content in files.items():
        (root / name).write_text(json.dumps(content))
    return root


def lines(text: str, word: str) -> list[str]:
    return [line for line in text.splitlines() if word in line]


@pytest.mark.parametrize("name", [*SETS, *FLOAT8])
def test_every_command_says_the_method_in_a_line(tmp_path: Path, name: str) -> None:
    tensors, files, method = (SETS | FLOAT8)[name]
    root = saved(tmp_path / "set", tensors, files)
    for command in (
        ("inspect", root), ("stats", root), ("diff", root, root), ("plan", root, "-o", tmp_path / "p", "--to", "dcp"),
        ("convert", root, tmp_path / "dcp", "--to", "dcp"), ("convert", root, tmp_path / "set2", "--to", "hf"),
        ("verify", tmp_path / "set2"),
    ):  # fmt: skip
        said = done(*command).stderr
        (line,) = lines(said, "is quantized")
        assert command[0] == "verify" or f": {method}" in line
        lost = lines(said, "not in the target")
        assert bool(lost) == (bool(files) and "dcp" in command)
        assert all(next(iter(files)) in each for each in lost)
    assert reshard.open(root).warnings[0] in reshard.plan(reshard.open(root)).warnings


@pytest.mark.parametrize("name", SETS)
def test_codes_are_not_computed_with(tmp_path: Path, name: str) -> None:
    tensors, files, _ = SETS[name]
    root, out = saved(tmp_path / "set", tensors, files), tmp_path / "out"
    codes = next(iter(tensors))
    dtype = tensors[codes].dtype.name
    for wide in ("int64", "float32"):
        result = failed(2, "unsupported-cast", "convert", root, out, "--cast", f"{dtype}={wide}", places=(codes,))
        assert "--dequantize" not in result.stderr
    result = failed(4, "not-averageable", "average", root, root, out, places=(codes,))
    assert "--dequantize" not in result.stderr
    with pytest.raises(reshard.SourceError) as caught:
        reshard.open(root).dequantize()
    assert {"unsupported-quantization", "unsupported-dtype"} & {*caught.value.codes}
    assert "_scale_scale" not in str(caught.value)
    done("convert", root, out, "--to", "hf")


@pytest.mark.parametrize("name", FLOAT8)
def test_float8_with_scales(tmp_path: Path, name: str) -> None:
    """The hint is what works, and nothing of the quantization is left."""
    tensors, files, _ = FLOAT8[name]
    root, out = saved(tmp_path / "set", tensors, files), tmp_path / "out"
    hinted = failed(2, "unsupported-cast", "convert", root, out, "--cast", "f8_e4m3=bf16", places=("a.weight",))
    assert "--dequantize bfloat16" in hinted.stderr
    assert "--dequantize bfloat16" in failed(4, "not-averageable", "average", root, root, out).stderr
    done("convert", root, out, "--to", "hf", "--dequantize", "bfloat16")
    plain = reshard.open(out)
    assert set(plain) == {"a.weight", *NORM}
    assert np.array_equal(np.asarray(plain["a.weight"]), tensors["a.weight"].astype(BF16))
    left = [path for path in out.glob("*.json") if "quantization" in path.read_text()]
    assert not left
    assert not plain.warnings
    assert reshard.verify(out).equal


def test_one_scale_for_a_row_or_a_tensor(tmp_path: Path) -> None:
    """With the bits of numpy: float32 times float32, rounded once."""
    rng = np.random.default_rng(1)
    codes, rows = float8(40, 300), rng.random((40, 1), np.float32)
    stored = {
        "rows.weight": codes, "rows.weight_scale": rows,
        "flat.weight": codes, "flat.weight_scale": rows[:, 0].astype(BF16),
        "none.weight": codes, "none.weight_scale": rows[0, 0],
        "one.weight": codes, "one.weight_scale": rows[1],
        "both.weight": codes, "both.qscale_weight": rows[2:3],
        "experts.up": np.stack([codes, codes]), "experts.up_scale": np.stack([rows, rows[::-1]]),
        "experts.up_input_scale": ones(2), "attn.k_scale": ones(), "attn.v_scale": ones(1), "q_scale": ones(3),
    }  # fmt: skip
    wide = codes.astype(np.float32)
    expected = {
        "rows.weight": wide * rows,
        "flat.weight": wide * rows.astype(BF16).astype(np.float32),
        "none.weight": wide * rows[0, 0],
        "one.weight": wide * rows[1],
        "both.weight": wide * rows[2],
        "experts.up": np.stack([wide * rows, wide * rows[::-1]]),
        "q_scale": ones(3),
    }
    plain = reshard.open(saved(tmp_path / "set", stored, {})).dequantize()
    assert set(plain) == {*expected, *NORM}
    for name, array in expected.items():
        full = array if name == "q_scale" else array.astype(BF16)
        assert np.array_equal(np.asarray(plain[name]), full), name
        part = np.asarray(plain[name][..., 7:33]) if full.ndim > 1 else full
        assert np.array_equal(part, full[..., 7:33] if full.ndim > 1 else full), name


def test_blocks_of_compressed_tensors(tmp_path: Path) -> None:
    codes, scales = float8(64, 48), np.random.default_rng(2).random((2, 3), np.float32)
    groups = {"group_0": {"weights": {"strategy": "block", "block_structure": [32, 16]}}}
    files = {"config.json": config("compressed-tensors", config_groups=groups)}
    plain = reshard.open(saved(tmp_path / "set", {"a.weight": codes, "a.weight_scale": scales}, files)).dequantize()
    full = (codes.astype(np.float32) * scales.repeat(32, 0).repeat(16, 1)).astype(BF16)
    assert np.array_equal(np.asarray(plain["a.weight"]), full)


def test_plain_numbers_are_not_quantized(tmp_path: Path) -> None:
    """Integers, float8 without scales, and a set that is quantized when it is loaded."""
    plain = {"ids": ints(4, 4), "w.weight": float8(4, 4), "b.weight": ones(4, 4), "b.scale": ones(4)}
    assert not reshard.open(saved(tmp_path / "set", plain, {})).warnings
    done("convert", tmp_path / "set", tmp_path / "out", "--to", "hf", "--cast", "int32=int64", "--cast", "f8_e4m3=bf16")
    on_load = saved(tmp_path / "load", {"w.weight": ones(2, 2)}, {"config.json": config("bitsandbytes")})
    assert not reshard.open(on_load).warnings


def test_the_dtype_is_changed_in_every_part_of_the_config(tmp_path: Path) -> None:
    parts = {
        "dtype": "float32", "text_config": {"dtype": "float32", "deep": {"torch_dtype": "float32"}},
        "vision_config": {"torch_dtype": "float32", "name": "float32"}, "audio": {"dtype": "float16"},
    }  # fmt: skip
    root = saved(tmp_path / "set", {}, {"config.json": parts})
    done("convert", root, tmp_path / "out", "--to", "hf", "--cast", "float32=bfloat16")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "dtype": "bfloat16", "text_config": {"dtype": "bfloat16", "deep": {"torch_dtype": "bfloat16"}},
        "vision_config": {"torch_dtype": "bfloat16", "name": "float32"}, "audio": {"dtype": "float16"},
    }  # fmt: skip
    quantized = saved(tmp_path / "fp8", BLOCKS, {"config.json": {**parts, **config("fp8", dtype="float32")}})
    done("convert", quantized, tmp_path / "cast", "--to", "hf", "--cast", "float32=bfloat16")
    content = json.loads((tmp_path / "cast" / "config.json").read_text())
    assert (content["dtype"], content["quantization_config"]["dtype"]) == ("bfloat16", "float32")


def test_a_config_that_is_damaged_says_nothing(tmp_path: Path) -> None:
    root = saved(tmp_path / "set", BLOCKS, {})
    (root / "config.json").write_text("{")
    assert "fp8" in reshard.open(root).warnings[0]
    with refused(reshard.SourceError, "not-json", "config.json"):
        reshard.open(root).dequantize()


@pytest.mark.parametrize("name", ["GPTQ", "NVFP4", "4 bits", "gpt-oss", "quanto", "rows", "Mistral", "DeepSeek"])
def test_codes_and_scales_go_together(tmp_path: Path, name: str) -> None:
    """Whether they are chosen, left out or renamed: a target with one of them means nothing."""
    tensors, files, _ = (SETS | FLOAT8)[name]
    root, out, names_file = saved(tmp_path / "set", tensors, files), tmp_path / "out", tmp_path / "names.json"
    codes, scales = [*tensors][:2]
    for options in (
        ("--include", codes), ("--include", scales), ("--exclude", codes), ("--exclude", scales), ("--drop", codes),
    ):  # fmt: skip
        failed(2, "parted-scales", "convert", root, out, "--to", "hf", *options, places=(codes, scales))
    alike = ("--same-ranks", "--to", "safetensors", "--drop", scales)
    failed(2, "parted-scales", "convert", root / "model.safetensors", tmp_path / "out.safetensors", *alike)
    for old, new in ((codes, codes.replace("a.", "b.")), (scales, f"x.{scales}")):
        names_file.write_text(json.dumps({old: new if new != old else f"x.{old}"}))
        failed(2, "parted-scales", "convert", root, out, "--to", "hf", "--name-map", names_file, places=(codes,))
    failed(2, "parted-scales", "average", root, root, out, "--exclude", codes, places=(scales,))
    with refused(reshard.UsageError, "parted-scales", codes):
        reshard.plan(reshard.open(root).sel(scales), format="dcp")
    assert not out.exists()
    names_file.write_text(json.dumps({f"{codes[:2]}*": "b.*"}))
    done("convert", root, tmp_path / "both", "--to", "hf", "--name-map", names_file, "--exclude", "norm.*")
    done("convert", root, tmp_path / "neither", "--to", "hf", "--include", "norm.*")
    with safe_open(next((tmp_path / "both").glob("*.safetensors")), framework="numpy") as file:
        assert {*file.keys()} == {f"b.{each[2:]}" for each in tensors}


def test_scales_take_the_other_name_that_programs_know(tmp_path: Path) -> None:
    root = saved(tmp_path / "set", BLOCKS | {"b.weight": float8(2, 2), "b.weight_scale_inv": ones(1, 1)}, {})
    names_file = tmp_path / "names.json"
    names_file.write_text('{"*.weight_scale_inv": "*.weight_scale"}')
    done("convert", root, tmp_path / "out", "--to", "hf", "--name-map", names_file)
    names_file.write_text('{"a.weight": "b.weight", "b.weight": "a.weight"}')
    failed(2, "parted-scales", "convert", root, tmp_path / "no", "--to", "hf", "--name-map", names_file)
