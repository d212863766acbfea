"""Rules over tensors that are computed: every verb over arrays, scaled, averaged and dequantized weights, beside numpy.

What the rules make is read lazily, written, and assigned to another checkpoint.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import dask.array as da
import ml_dtypes
import numpy as np
import pytest
from checkpoints import write_file
from random_rules import VERBS, random, sample
from samples import slow

import reshard
from reshard import Layout, Rules, Strategy

if TYPE_CHECKING:
    from pathlib import Path

    from helpers import Array

SOURCES = ("assigned", "scaled", "averaged", "scaled arrays", "arrays of computed", "dequantized")


def chunked(rng: np.random.Generator, array: Array) -> Any:
    chunks = tuple(int(rng.integers(1, extent + 1)) for extent in array.shape)
    return da.from_array(array, chunks=chunks) if rng.random() < 0.8 else array


def stored(root: Path, name: str, arrays: dict[str, Array]) -> reshard.Checkpoint:
    """A safetensors file; without it, a checkpoint of the same names and shapes with other values."""
    root.mkdir(parents=True, exist_ok=True)
    return reshard.open(write_file(root / f"{name}.safetensors", arrays))


def computed(rng: np.random.Generator, root: Path, kind: str, arrays: dict[str, Array]) -> reshard.Checkpoint:
    """A checkpoint with these values, which are computed."""
    zeros = {name: np.zeros_like(array) for name, array in arrays.items()}
    if kind == "assigned":
        return stored(root, "a", zeros).assign({name: chunked(rng, array) for name, array in arrays.items()})
    halves = {name: array / np.float32(2) for name, array in arrays.items()}
    if kind == "scaled":
        return stored(root, "a", halves).scale("*", factor=2.0)
    if kind == "averaged":
        others = {name: random(rng, array.shape, np.float32) for name, array in arrays.items()}
        rest = {name: array * 2 - others[name] for name, array in arrays.items()}
        return reshard.average([stored(root, "a", others), computed(rng, root / "b", "assigned", rest)])
    if kind == "scaled arrays":
        return computed(rng, root, "assigned", halves).scale("*", factor=2.0)
    if kind == "arrays of computed":
        of = computed(rng, root, "scaled arrays", halves)
        return of.assign({name: of[name] * 2 for name in of})
    codes = {name: (array / 4).astype(ml_dtypes.float8_e4m3fn) for name, array in arrays.items()}
    scales = {f"{name}_scale_inv": np.full((1, 1), 4, np.float32) for name in arrays}
    (root / "model").mkdir(parents=True)
    (root / "model" / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}})
    )
    write_file(root / "model" / "model.safetensors", {**codes, **scales})
    return reshard.open(root / "model").dequantize("float32")


def assert_exact(checkpoint: reshard.Checkpoint, expected: dict[str, Array]) -> None:
    assert set(checkpoint) == set(expected)
    for name, array in expected.items():
        content = np.asarray(checkpoint[name].compute())
        assert (content.shape, content.dtype) == (array.shape, array.dtype), name
        assert np.array_equal(content, array), name


@pytest.mark.parametrize("chunks", [(4, 4), (1, 4), (4, 1), (2, 2), (1, 1), (3, 4)])
def test_an_array_is_not_taken_for_one_of_its_shape_in_another_order(tmp_path: Path, chunks: tuple[int, int]) -> None:
    """A square transposed, or its rows interleaved, has the blocks of the array that was assigned."""
    values = np.arange(16, dtype=np.float32).reshape(4, 4)
    source = stored(tmp_path, "a", {"a.weight": np.zeros((4, 4), np.float32)})
    source = source.assign({"a.weight": da.from_array(values, chunks=chunks)})
    for verb, expected in (
        ({"transpose": "b.weight"}, values.T),
        ({"interleave": "b.weight", "groups": 1, "halves": 2}, values[[0, 2, 1, 3]]),
        ({"interleave": "b.weight", "groups": 1, "halves": 2, "axis": 1}, values[:, [0, 2, 1, 3]]),
    ):
        rules = Rules.of({"reshard-rules": 1, "sides": ["a", "b"], "rules": [{"a": "a.weight", "b": verb}]})
        derived = source.derive(rules)
        assert_exact(derived, {"b.weight": np.ascontiguousarray(expected)})
        assert_exact(derived.assign(c=derived["b.weight"]).sel("c"), {"c": np.ascontiguousarray(expected)})
    assert source["a.weight"].name == source.sel("a.*")["a.weight"].name  # the array itself


@pytest.mark.parametrize("seed", [0, slow(1)])
@pytest.mark.parametrize("verb", VERBS)
def test_some_computed_tensors_under_rules(tmp_path: Path, verb: str, seed: int) -> None:
    check(tmp_path, verb, SOURCES[(VERBS.index(verb) + 3 * seed) % len(SOURCES)], seed)


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("seed", range(2, 8))
def test_computed_tensors_under_rules(tmp_path: Path, verb: str, kind: str, seed: int) -> None:
    check(tmp_path, verb, kind, seed)


def check(tmp_path: Path, verb: str, kind: str, seed: int) -> None:
    """Compare everything that reads a derived checkpoint with numpy."""
    rng = np.random.default_rng([seed, VERBS.index(verb), SOURCES.index(kind)])
    of_rule = sample(rng, verb, dims=2 if kind == "dequantized" else 0)
    sides = [of_rule.parts, of_rule.fused]
    if seed % 2:
        sides.reverse()
    given, expected = sides
    if kind == "dequantized" and any(array.ndim != 2 for array in given.values()):
        given, expected = expected, given
    if kind == "dequantized" and any(array.ndim != 2 for array in given.values()):
        pytest.skip("weights in scaled blocks are matrices")
    derived = computed(rng, tmp_path, kind, given).derive(of_rule.rules)
    assert_exact(derived, expected)
    for name, array in expected.items():
        assert derived.stats().tensors[name].norm == pytest.approx(float(np.linalg.norm(array.reshape(-1))))
        box = tuple(slice(int(rng.integers(0, extent)), None) for extent in array.shape)
        assert np.array_equal(derived[name][box].compute(), array[box])
    reshard.convert(derived, tmp_path / "out", to="hf")
    assert_exact(reshard.open(tmp_path / "out"), expected)
    layouts = {name: Layout.of([2], [0 if d == 0 and n % 2 == 0 else -1 for d, n in enumerate(array.shape)])
               for name, array in expected.items()}  # fmt: skip
    reshard.convert(derived, tmp_path / "ranks", target_strategy=Strategy.of(layouts), cast={"float32": "float16"})
    assert_exact(reshard.open(tmp_path / "ranks"), {name: array.astype(np.float16) for name, array in expected.items()})
    again = derived.assign({f"n.{name}": derived[name] + 0 for name in expected} | dict.fromkeys(expected, 0.0))
    again = again.assign({f"m.{name}": derived[name] for name in expected}).sel("n.*", "m.*")
    of_names = {f"{prefix}.{name}": array for name, array in expected.items() for prefix in "nm"}
    assert_exact(again, of_names)
    reshard.convert(again, tmp_path / "again", to="dcp")
    assert_exact(reshard.open(tmp_path / "again"), of_names)
