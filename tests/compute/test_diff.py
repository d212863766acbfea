"""Differences of two checkpoints: against numpy, of all pairs of layouts and formats, with NaNs and tolerances."""

from __future__ import annotations

import json
from math import inf, isnan
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import write_file, write_ranks
from commands import call, done
from computed import FLOATS, WHOLE_NUMBERS, model, values, write
from hypothesis import given
from hypothesis import strategies as st
from samples import slow

import reshard
from reshard import Layout, Strategy
from reshard.compute import differences
from reshard.compute.moments import CHUNK
from reshard.compute.pairs import PairMeter
from reshard.dtypes import BY_NAME

if TYPE_CHECKING:
    from pathlib import Path

    from computed import Array

    from reshard.compute.differences import TensorDiff


def assert_difference(diff: TensorDiff, a: Array, b: Array) -> None:
    """Hold a difference of finite tensors against that which numpy computes in float64."""
    kind = np.complex128 if "c" in a.dtype.kind + b.dtype.kind else np.float64
    wide_a, wide_b = a.astype(kind).reshape(-1), b.astype(kind).reshape(-1)
    distance = np.abs(wide_a - wide_b)
    assert diff.differing == np.count_nonzero(distance)
    assert diff.not_finite == 0
    assert diff.max_abs == pytest.approx(distance.max(initial=0), rel=1e-15)
    assert diff.mean_abs == pytest.approx(distance.mean() if distance.size else 0, rel=1e-12)
    norms = [np.linalg.norm(side) for side in (wide_a, wide_b)]
    if norms[0]:
        assert diff.relative == pytest.approx(np.linalg.norm(distance) / norms[0], rel=1e-12)
    if all(norms):
        assert diff.cosine == pytest.approx(np.vdot(wide_a, wide_b).real / norms[0] / norms[1], abs=1e-12)
    if diff.differing:
        assert diff.first == tuple(np.unravel_index(int((distance != 0).argmax()), a.shape))


def changed(full: dict[str, Array], *, share: float = 0.01) -> dict[str, Array]:
    """Change some elements of every second tensor."""
    rng = np.random.default_rng(5)
    result = dict(full)
    for name, array in list(full.items())[::2]:
        if array.size:
            other = array.copy().reshape(-1)
            places = rng.choice(array.size, max(1, int(share * array.size)), replace=False)
            wide = other[places] if array.dtype.kind == "c" else other[places].astype(np.float64)
            other[places] = (1 - wide).astype(array.dtype)
            result[name] = other.reshape(array.shape)
    return result


PAIRS = [
    ("columns safetensors", "rows ckpt"), ("hf", "columns safetensors"), ("dcp", "hf"), ("rows safetensors", "zarr"),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_differences_are_those_of_numpy(tmp_path: Path, first: str, second: str) -> None:
    dtypes = [dtype for dtype in (*FLOATS, *WHOLE_NUMBERS) if "float8" not in dtype]
    a = model(dtypes)
    b = changed(a)
    diff = reshard.diff(write(tmp_path / "a", a, first), write(tmp_path / "b", b, second))
    assert set(diff.tensors) == set(a)
    for name, array in a.items():
        assert_difference(diff.tensors[name], array, b[name])
    assert set(diff.changed) == {name for name in a if a[name].tobytes() != b[name].tobytes()}
    assert diff.bytes_read == 2 * sum(array.nbytes for array in a.values())
    relatives = [each.relative for each in diff.tensors.values()]
    assert relatives == sorted(relatives, reverse=True)
    assert not diff
    assert not diff.same


@pytest.mark.parametrize("share", [slow(1e-5), 0.01, slow(0.9)])
@pytest.mark.parametrize("dtype", [*FLOATS, *WHOLE_NUMBERS, "complex64"])
def test_any_share_of_elements_of_any_dtype(tmp_path: Path, dtype: str, share: float) -> None:
    base = values(dtype if dtype != "complex64" else "float32", (2 * CHUNK + 77,))
    full = {"w": base.astype(np.complex64) * (1 + 2j) if dtype == "complex64" else base}
    other = changed(full, share=share)
    write_file(tmp_path / "a.safetensors", full)
    write_file(tmp_path / "b.safetensors", other)
    diff = reshard.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert_difference(diff.tensors["w"], full["w"], other["w"])
    assert reshard.diff(tmp_path / "a.safetensors", tmp_path / "a.safetensors")


def test_dtypes_that_differ_are_compared_as_numbers(tmp_path: Path) -> None:
    a = {"w": values("bfloat16", (300, 40)), "v": values("float32", (300, 40))}
    b = {"w": a["w"].astype(np.float32), "v": a["v"].astype(ml_dtypes.bfloat16)}
    b["w"][3, 3] = np.nan
    a["w"][3, 3] = np.nan
    for side, tensors in (("a", a), ("b", b)):
        write_file(tmp_path / f"{side}.safetensors", tensors)
    diff = reshard.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert diff.dtypes == {"w": ("bfloat16", "float32"), "v": ("float32", "bfloat16")}
    assert diff.changed == ["v"]
    assert_difference(diff.tensors["v"], a["v"], b["v"])
    assert reshard.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", relative=0.01)
    assert not reshard.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", relative=1e-6)


@given(
    st.sampled_from(["bfloat16", "float16", "float32", "float8_e5m2"]),
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.booleans()), min_size=1, max_size=60),
)
def test_any_bits(dtype: str, pairs: list[tuple[int, int, bool]]) -> None:
    kind = BY_NAME[dtype]
    bits = 8 * kind.itemsize
    codes_a = np.array([a >> (32 - bits) for a, _, _ in pairs], kind.carrier())
    codes_b = np.array([(a if same else b) >> (32 - bits) for a, b, same in pairs], kind.carrier())
    sums = PairMeter(kind, kind).measure(codes_a, codes_b)
    with np.errstate(all="ignore"):
        a, b = (codes.view(kind.numpy()).astype(np.float64) for codes in (codes_a, codes_b))
        equal = (a == b) | (codes_a == codes_b)
        finite = np.isfinite(a) & np.isfinite(b)
        distance = np.abs(a - b)[finite]
    assert (sums.differing, sums.not_finite) == (np.count_nonzero(~equal), np.count_nonzero(~equal & ~finite))
    assert sums.largest == distance.max(initial=0)
    assert sums.distance == pytest.approx(distance.sum(), rel=1e-12)
    assert sums.of_a == pytest.approx((a[finite] ** 2).sum(), rel=1e-12)
    assert sums.of_both == pytest.approx((a * b)[finite].sum(), rel=1e-9, abs=1e-9 * (a**2 + b**2)[finite].sum())
    assert sums.first == (-1 if equal.all() else int(equal.argmin()))


def test_integers_beyond_what_a_float_holds(tmp_path: Path) -> None:
    for side, last in (("a", 0), ("b", 3)):
        write_file(tmp_path / f"{side}.safetensors", {"w": np.array([2**62 + last, -(2**62), 7], np.int64)})
    diff = reshard.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors").tensors["w"]
    assert (diff.differing, diff.max_abs, diff.first) == (1, 3, (0,))


# --- what is not finite -----------------------------------------------------------------------------------------


def test_nans_are_equal_only_to_themselves(tmp_path: Path) -> None:
    def codes(*places: tuple[int, int]) -> Array:
        array = values("bfloat16", (40,)).view(np.uint16)
        for place, code in places:
            array[place] = code
        return array

    sides = {
        "same": (codes((3, 0x7FC0)), codes((3, 0x7FC0))),
        "other bits": (codes((3, 0x7FC0)), codes((3, 0x7FC1))),
        "a number": (codes((3, 0x7FC0)), codes()),
        "infinity": (codes((3, 0x7F80)), codes((3, 0x7F80))),
        "other infinity": (codes((3, 0x7F80)), codes((3, 0xFF80))),
    }
    for number, side in enumerate("ab"):
        write_file(tmp_path / f"{side}.safetensors", {name: pair[number] for name, pair in sides.items()})
    diff = reshard.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", tolerance=inf, relative=inf)
    assert set(diff.beyond) == set(diff.changed) == {"other bits", "a number", "other infinity"}
    assert isnan(diff.tensors["a number"].max_abs)
    assert isnan(diff.tensors["other bits"].max_abs)
    assert diff.tensors["other infinity"].max_abs == inf
    assert diff.tensors["a number"].first == (3,)
    assert diff.tensors["a number"].not_finite == diff.tensors["a number"].differing == 1
    assert diff.tensors["same"].cosine == 1.0
    result = call("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--tolerance", "1e9", "--json")
    assert result.exit_code == 3
    data = {tensor["name"]: tensor for tensor in json.loads(result.stdout)["tensors"]}
    assert (data["a number"]["max_abs"], data["a number"]["not_finite"], data["a number"]["within"]) == (None, 1, False)
    assert data["same"]["within"] is True
    assert call("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--match", "same").exit_code == 0


# --- names, shapes, texts ---------------------------------------------------------------------------------------


def test_names_shapes_and_texts_that_differ(tmp_path: Path) -> None:
    w = values("float32", (8, 4))
    write_file(tmp_path / "a.ckpt", {"w": w, "shape": w, "text": "x", "only": w, "note": "same", "zero": w * 0}, "ckpt")
    write_file(
        tmp_path / "b.ckpt",
        {"w": w, "shape": w.T.copy(), "text": "y", "more": w, "note": "same", "zero": w * 0},
        "ckpt",
    )
    diff = reshard.diff(tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    assert (diff.only_a, diff.only_b, set(diff.unlike), diff.changed) == (("only",), ("more",), {"shape", "text"}, [])
    assert set(diff.tensors) == {"w", "zero"}
    assert diff.tensors["zero"].cosine is None
    assert not diff
    assert call("diff", tmp_path / "a.ckpt", tmp_path / "b.ckpt").exit_code == 3
    assert call("diff", tmp_path / "a.ckpt", tmp_path / "b.ckpt", "--match", "w", "--match", "note").exit_code == 0
    assert call("diff", tmp_path / "a.ckpt", tmp_path / "b.ckpt", "--match", "nothere").exit_code == 2


def test_tolerances_and_exit_codes(tmp_path: Path) -> None:
    a = {"w": np.full((10, 10), 2, np.float32), "v": np.ones(3, np.float32)}
    b = {**a, "w": a["w"] + np.float32(0.25)}
    paths = [write_file(tmp_path / f"{side}.safetensors", full) for side, full in (("a", a), ("b", b))]
    assert done("diff", paths[0], paths[0]).exit_code == 0
    for options, code in {
        (): 3, ("--tolerance", "0.25"): 0, ("--tolerance", "0.24"): 3, ("--relative", "0.125"): 0,
        ("--relative", "0.12"): 3, ("--relative", "0.12", "--tolerance", "0.3"): 0, ("--tolerance", "-1"): 2,
    }.items():  # fmt: skip
        assert call("diff", *paths, *options).exit_code == code, options
    data = json.loads(call("diff", *paths, "--json").stdout)
    assert (data["same"], data["error"]["code"]) == (False, "different")
    assert data["tensors"][0]["name"] == "w"
    assert {"shape", "dtypes", "size", "differing", "max_abs", "mean_abs", "relative", "cosine", "first"} <= set(
        data["tensors"][0]
    )
    assert call("diff", *paths, "--quiet").stdout == ""
    with pytest.raises(reshard.UsageError):
        reshard.diff(*paths, relative=-1.0)
    with pytest.raises(reshard.BudgetError):
        reshard.diff(*paths, memory="20MB")


def test_blocks_that_are_missing_are_not_compared(tmp_path: Path) -> None:
    full = {"l.w": values("float32", (8, 8)), "l.v": values("float32", (8, 8))}
    strategy = Strategy.of({"l.w": Layout.of([2], [0, -1]), "l.v": Layout.of([2], [-1, -1])})
    write_ranks(tmp_path / "src", full, strategy)
    write_file(tmp_path / "b.safetensors", full)
    (tmp_path / "src/rank_1/checkpoint_1.safetensors").unlink()
    diff = reshard.diff(reshard.open(tmp_path / "src", strategy=strategy, partial=True), tmp_path / "b.safetensors")
    assert set(diff.not_compared) == {"l.w"}
    assert set(diff.tensors) == {"l.v"}
    assert not diff


def test_sides_have_options_of_their_own(tmp_path: Path) -> None:
    full = {"l.w": values("float32", (40, 80))}
    words: list[str | Path] = []
    for side, layout in {"source": Layout.of([4], [0, -1]), "target": Layout.of([8], [-1, 0])}.items():
        strategy = Strategy.of({"l.w": layout})
        write_ranks(tmp_path / side, full, strategy)
        reshard.write_strategy(strategy, tmp_path / f"{side}.json")
        words += [f"--{side}-strategy", tmp_path / f"{side}.json"]
    assert call("diff", tmp_path / "source", tmp_path / "target", *words).exit_code == 0
    assert call("diff", tmp_path / "source", tmp_path / "target").exit_code == 4


# --- boxes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [40, 1 << 20])
def test_tensors_that_rules_fuse_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Their blocks are boxes of several axes, or lie in strides; both sides are read in one space."""
    monkeypatch.setattr(differences, "_MOST_BOX_BYTES", most)
    stacked, qkv = values("float32", (6, 8, 5)), values("float32", (12, 5))
    q, k, v = (qkv.reshape(2, 3, 2, 5)[:, part].reshape(4, 5) for part in range(3))
    parts = {f"experts.{n}": stacked[n].T.copy() for n in range(6)} | {"q": q.copy(), "k": k.copy(), "v": v.copy()}
    write_file(tmp_path / "whole.safetensors", {"experts": stacked, "qkv": qkv})
    write_file(tmp_path / "parts.safetensors", parts)
    rules = {"reshard-rules": 1, "sides": ["parts", "whole"], "rules": [
        {"parts": "experts.{expert}", "whole": {"stack": "experts", "by": "expert", "transposed": True}},
        {"parts": ["q", "k", "v"], "whole": {"interleave": "qkv", "groups": 2, "sizes": [2, 2, 2]}},
    ]}  # fmt: skip
    (tmp_path / "rules.yaml").write_text(json.dumps(rules))
    whole, of_parts = (reshard.open(tmp_path / f"{side}.safetensors") for side in ("whole", "parts"))
    fused, cut = of_parts.derive(tmp_path / "rules.yaml"), whole.derive(tmp_path / "rules.yaml")
    assert any(tensor.space for side in (fused, cut) for tensor in side.tensors.values())
    for a, b in ((fused, whole), (whole, fused), (cut, of_parts), (fused, fused)):
        diff = reshard.diff(a, b)
        assert diff.same
        assert diff.tensors
    other = parts | {"k": parts["k"] + 1}
    write_file(tmp_path / "other.safetensors", other)
    diff = reshard.diff(reshard.open(tmp_path / "other.safetensors").derive(tmp_path / "rules.yaml"), whole)
    assert diff.changed == ["qkv"]
    assert (diff.tensors["qkv"].differing, diff.tensors["qkv"].first) == (20, (2, 0))


def test_threads_do_not_change_a_bit(tmp_path: Path) -> None:
    a = {"l.f": values("float32", (300, 9004)), "l.b": values("bfloat16", (300, 9004))}
    b = changed(a)
    first, second = write(tmp_path / "a", a, "rows safetensors"), write(tmp_path / "b", b, "columns safetensors")
    results = [reshard.diff(first, second, threads=threads) for threads in (1, 4)]
    assert results[0].tensors == results[1].tensors


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_diff_and_stats_fit_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(tmp_path)
    long = "model.decoder.layers.{}.self_attention.query_key_value_projection.a_vector_with_a_long_name.weight"
    full = {long.format(number): np.full((40, 30), 1.5e-12 * 10**number, np.float32) for number in range(4)}
    write_file(tmp_path / "a.safetensors", full)
    other = {name: -value for name, value in full.items()} | {"only.in.this." + long: np.ones(3, np.float32)}
    other[long.format(1)][3, 3], other[long.format(2)] = np.nan, np.ones((2, 2), np.float32)
    write_file(tmp_path / "b.safetensors", other)
    for words in ("diff a.safetensors b.safetensors", "stats b.safetensors", "stats b.safetensors --by tensor"):
        lines = call(*words.split()).stdout.splitlines()
        assert max(map(len, lines)) <= columns


def test_what_a_notebook_shows(tmp_path: Path) -> None:
    a: dict[str, Any] = {f"l.{n}": values("float32", (8, 8)) for n in range(4)}
    b = changed(a) | {"l.2": np.full((8, 8), np.nan, np.float32), "more": a["l.0"]}
    write_file(tmp_path / "a.safetensors", a)
    write_file(tmp_path / "b.safetensors", b)
    diff = reshard.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert diff.changed[0] == "l.2"
    page = diff._repr_html_()
    assert page.count("<rect") == len(diff.changed)
    assert "more" in page
    assert repr(diff).isprintable()


def test_the_options_of_a_path_are_those_of_open(tmp_path: Path) -> None:
    full = {"l.w": np.ones((4, 4), np.float32)}
    write_ranks(tmp_path / "src", full, Strategy.of({"l.w": Layout.of([2], [0, -1])}))
    with pytest.raises(reshard.SourceError) as caught:
        reshard.diff(tmp_path / "src", tmp_path / "src")
    assert f"reshard.open({str(tmp_path / 'src')!r}, strategy=" in caught.value.hint
