"""`Checkpoint.scale`: a factor and a shift, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import write_ranks

import reshard
from reshard import Layout, Strategy
from reshard.errors import SourceError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

CUT = Strategy.of({"a": Layout.of([4], [-1, 0]), "norm": Layout.of([4], [-1]), "n": Layout.of([4], [-1])})


@pytest.fixture
def full() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(1)
    bf16 = rng.standard_normal((6, 8)).astype(np.float32).astype(ml_dtypes.bfloat16)
    return {"a": bf16, "norm": rng.standard_normal(5).astype(np.float32), "n": np.arange(3, dtype=np.int32)}


def test_numbers_are_those_of_numpy(tmp_path: Path, full: dict[str, np.ndarray[Any, Any]]) -> None:
    source = reshard.open(write_ranks(tmp_path / "src", full, CUT), strategy=CUT)
    scaled = source.scale("a", "nor*", factor=1.1, shift=0.3)
    with np.errstate(all="raise"):
        sums = {name: full[name].astype(np.float32) * np.float32(1.1) + np.float32(0.3) for name in ("a", "norm")}
    expected = {"a": sums["a"].astype(ml_dtypes.bfloat16), "norm": sums["norm"], "n": full["n"]}
    other = Strategy.of({"a": Layout.of([2], [0, -1]), "norm": Layout.of([2], [-1]), "n": Layout.of([2], [-1])})
    report = reshard.convert(scaled, tmp_path / "out", target_strategy=other)
    assert report.bytes_read == sum(array.nbytes for array in full.values())
    for opened in (scaled, reshard.open(tmp_path / "out")):
        for name, array in expected.items():
            assert np.asarray(opened[name].compute()).tobytes() == array.tobytes()
    twice = scaled.scale("norm", factor=2.0)
    np.testing.assert_array_equal(twice["norm"].compute(), expected["norm"] * np.float32(2))


def test_other_tensors_are_refused(tmp_path: Path, full: dict[str, np.ndarray[Any, Any]]) -> None:
    source = reshard.open(write_ranks(tmp_path / "src", full, CUT), strategy=CUT)
    for patterns, factor, kind, code in (
        (("n",), 2.0, SourceError, "wrong-dtype"),
        (("x",), 2.0, UsageError, "no-match"),
        (("a",), float("inf"), UsageError, "bad-value"),
    ):
        with pytest.raises(kind) as caught:
            source.scale(*patterns, factor=factor)
        assert caught.value.code == code
