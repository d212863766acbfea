"""The histogram of a tensor, and the statistics of one, beside numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import write_ranks
from refusals import refused

import reshard
from reshard.compute import moments
from reshard.errors import MissingNameError, SourceError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

STRATEGY = reshard.Strategy.of({"w": reshard.Layout.of([2, 2], [0, 1])})
RNG = np.random.default_rng(3)


def values(kind: str) -> Any:
    full = RNG.normal(size=(64, 48))
    if kind == "not finite":
        full[3, 4], full[5, 6], full[7, 8] = np.nan, np.inf, -np.inf
    if kind == "constant":
        full[:] = 1.5
    if kind == "complex64":
        return (full + 1j * full[::-1]).astype(np.complex64)
    if kind in {"int8", "bool"}:
        return (full * 3).astype(kind)
    return full.astype({"bfloat16": ml_dtypes.bfloat16}.get(kind, np.float32))


def finite(full: Any) -> Any:
    wide = np.abs(full.astype(complex)) if full.dtype.kind == "c" else full.astype(np.float64)
    return wide[np.isfinite(wide)].astype(np.float64)


@pytest.mark.parametrize("kind", ["float32", "not finite", "constant", "complex64", "int8", "bool", "bfloat16"])
@pytest.mark.parametrize("bins", [1, 7, 64])
def test_counts_are_those_of_numpy(tmp_path: Path, kind: str, bins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "CHUNK", 500)  # several in each block
    monkeypatch.setattr("reshard.compute.histogram.CHUNK", 500)
    full = values(kind)
    source = reshard.open(write_ranks(tmp_path / "src", {"w": full}, STRATEGY), strategy=STRATEGY)
    picture = source.hist("w", bins)
    counts, edges = np.histogram(finite(full), bins)
    assert np.array_equal(picture.counts, counts)
    assert np.allclose(picture.edges, edges, rtol=1e-12, atol=0)


def test_without_a_finite_value_there_are_bins_of_nothing(tmp_path: Path) -> None:
    reshard.write({"w": np.full(5, np.nan, np.float32), "none": np.zeros((0, 3), np.float32)}, tmp_path / "hf")
    source = reshard.open(tmp_path / "hf")
    for name in ("w", "none"):
        assert source.hist(name, 3).counts.tolist() == [0, 0, 0]
        assert source.hist(name).svg().startswith("<svg")


@pytest.mark.parametrize(
    "full",
    [
        np.full(9, 1e30), np.full(3, np.finfo("float64").max), np.array([1, np.nextafter(1, 2)]),
        np.full(2000, 1e30, "float32"), np.array([5e-324, 0, 1e-323]), np.array([2**53, 2**53 + 1]),
    ],
    ids=["large", "largest", "close", "many", "subnormal", "integers"],
)  # fmt: skip
def test_a_range_without_numbers_for_all_bins_is_widened(tmp_path: Path, full: Any) -> None:
    reshard.write({"w": full}, tmp_path / "hf")
    picture = reshard.open(tmp_path / "hf").hist("w")
    assert picture.counts.sum() == full.size
    assert (np.diff(picture.edges) > 0).all()
    assert picture.edges[0] <= full.min()
    assert full.max() <= picture.edges[-1]
    stats = reshard.open(tmp_path / "hf").stats()
    assert stats["w"].histogram()[0].sum() == pytest.approx(full.size)
    assert stats._repr_html_()


def test_values_too_far_apart_are_refused(tmp_path: Path) -> None:
    most = np.finfo("float64").max
    reshard.write({"w": np.array([-most, most])}, tmp_path / "hf")
    with refused(SourceError, "out-of-range", "'w'"):
        reshard.open(tmp_path / "hf").hist("w")


def test_a_terminal_shows_bars(tmp_path: Path) -> None:
    full = np.repeat(np.arange(4, dtype=np.float32), [1, 2, 0, 8])
    reshard.write({"w": full}, tmp_path / "hf")
    lines = repr(reshard.open(tmp_path / "hf").hist("w", 3)).splitlines()[1:-2]
    assert [line.split()[1] for line in lines] == ["1", "2", "8"]
    assert [line.count("█") for line in lines] == [6, 12, 48]
    assert len(repr(reshard.open(tmp_path / "hf").hist("w", 1000)).splitlines()) < 20


def test_what_cannot_be_counted_is_refused(tmp_path: Path) -> None:
    reshard.write({"w": np.ones(3, np.float32)}, tmp_path / "hf")
    source = reshard.open(tmp_path / "hf")
    with refused(MissingNameError, "no-such-tensor", "'v'"):
        source.hist("v")
    for bins, code in ((0, "bad-value"), (-1, "bad-value"), (1 << 40, "bad-value"), (2.5, "bad-argument")):
        with refused(UsageError, code, bins):
            source.hist("w", bins)  # type: ignore[arg-type]


def test_the_statistics_of_one_tensor_show_themselves(tmp_path: Path) -> None:
    small, large = values("not finite")[:16], values("float32")
    reshard.write({"small": small, "large": large, "layers.0.w": large, "layers.1.w": large}, tmp_path / "hf")
    stats = reshard.open(tmp_path / "hf").stats()
    one = stats["small"]
    assert one.quartiles == tuple(np.quantile(finite(small), (0.25, 0.5, 0.75)))
    assert np.array_equal(one.histogram(9)[0], np.histogram(finite(small), 9)[0])
    assert stats["large"].quartiles is None
    text = repr(one)
    assert "\n" not in text
    for word in ("small", "float32", "[16, 48]", "NaN 1", "Inf 2", "median"):
        assert word in text
    assert "Moments" not in repr(stats.groups()["layers.{0-1}.w"])
    assert stats._ipython_key_completions_() == list(stats.tensors) == list(stats)
    assert len(stats) == 4
    with refused(MissingNameError, "no-such-tensor", "smal", "small"):
        stats["smal"]
