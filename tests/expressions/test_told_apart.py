"""Computations of the same files are told apart, their files are watched, and they are not linked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import adapters
import ml_dtypes
import numpy as np
import pytest
from checkpoints import write_file, write_ranks

import reshard
from reshard import Layout, Strategy
from reshard.core.plan.plan import file_digests, plan_digest
from reshard.errors import SourceError, UsageError

if TYPE_CHECKING:
    from pathlib import Path


def adapted(root: Path, seed: int, factor: float = 1.0) -> reshard.Checkpoint:
    """The model of `adapters` with one of several adapters of equal shapes."""
    model = adapters.weights("float32")
    if not (root / "base.safetensors").exists():
        write_file(root / "base.safetensors", adapters.written(model))
    pairs = {name: (array * (1 + seed / 8)).astype(array.dtype) for name, array in adapters.matrices(model).items()}
    adapters.save(root / f"adapter{seed}", pairs)
    opened = reshard.open(root / "base.safetensors").merge_lora(root / f"adapter{seed}")
    return opened if factor == 1 else opened.scale("*", factor=factor)


def cut(root: Path, axis: int) -> reshard.Checkpoint:
    """Square weights of two ranks, which fit two strategies."""
    full = {f"w{n}": np.arange(64, dtype=np.float32).reshape(8, 8) + n for n in range(3)}
    if not (root / "ranks").exists():
        write_ranks(root / "ranks", {name: np.concatenate([array, array], 1) for name, array in full.items()},
                    Strategy.of({name: Layout.of([2], [-1, 0]) for name in full}))  # fmt: skip
    strategy = Strategy.of({name: Layout.of([2], [0, -1] if axis == 0 else [-1, 0]) for name in full})
    return reshard.open(root / "ranks", strategy=strategy, contents=False)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda root: reshard.average([adapted(root, 1), adapted(root, 2)]),
         lambda root: reshard.average([adapted(root, 1), adapted(root, 3)])),
        (lambda root: reshard.average([adapted(root, 1), adapted(root, 2)]),
         lambda root: reshard.average([adapted(root, 3), adapted(root, 2)])),
        (lambda root: adapted(root, 1, 2.0), lambda root: adapted(root, 1, 3.0)),
        (lambda root: adapted(root, 1, 2.0), lambda root: adapted(root, 2, 2.0)),
    ],
)  # fmt: skip
def test_other_computations_have_other_digests(tmp_path: Path, one: Any, other: Any) -> None:
    plans = [reshard.plan(made(tmp_path), format="hf")._record for made in (one, other)]
    assert plan_digest(plans[0]) != plan_digest(plans[1])
    assert not {*file_digests(plans[0])[:1]} & {*file_digests(plans[1])}
    again = reshard.plan(one(tmp_path), format="hf")._record
    assert (plan_digest(again), file_digests(again)) == (plan_digest(plans[0]), file_digests(plans[0]))


def test_other_strategies_of_the_same_files_have_other_digests(tmp_path: Path) -> None:
    scaled = [cut(tmp_path, axis).scale("w*", factor=2) for axis in (0, 1)]
    shapes = {tuple(each["w0"].shape) for each in scaled}
    assert len(shapes) == 2
    digests = [plan_digest(reshard.plan(each, format="hf")._record) for each in scaled]
    assert digests[0] != digests[1]


@pytest.mark.parametrize("change", ["assign", "assign all", "scale"])
def test_computed_tensors_are_not_linked(tmp_path: Path, change: str) -> None:
    reshard.write({"a": np.ones((4, 4), np.float32), "b": np.ones(4, np.float32)}, tmp_path / "dcp", format="dcp")
    source = reshard.open(tmp_path / "dcp")
    changed = {
        "assign": lambda: source.assign(a=np.zeros((4, 4), np.float32)),
        "assign all": lambda: source.assign(a=np.zeros((4, 4), np.float32), b=np.zeros(4, np.float32)),
        "scale": lambda: source.scale("a", factor=2),
    }[change]()
    with pytest.raises(UsageError) as caught:
        reshard.convert(changed, tmp_path / "out", to="dcp", link=True)
    assert caught.value.code == "not-linkable"


def test_what_is_scaled_after_an_adapter_is_verified(tmp_path: Path) -> None:
    """The ledger has the adapter, below the scale."""
    reshard.convert(adapted(tmp_path, 1, 2.0), tmp_path / "out", to="hf")
    verification = reshard.verify(tmp_path / "out")
    assert not verification.differences
    assert verification.tensors
    reshard.plan(adapted(tmp_path, 1, 2.0), format="hf").save(tmp_path / "plan.json")
    reshard.read_plan(tmp_path / "plan.json").run(tmp_path / "planned")


def test_float64_is_rounded_once(tmp_path: Path) -> None:
    values = np.array([1 + 2**-8 + 2**-40, 1 + 3 * 2**-8 - 2**-40, 2.0**200, -(1 + 2**-8 + 2**-40), 0.5, np.nan])
    for name in "ab":
        write_file(tmp_path / f"{name}.safetensors", {"w": values})
    opened = [reshard.open(tmp_path / f"{name}.safetensors") for name in "ab"]
    rounded = reshard.average(opened, dtype="bfloat16")["w"].compute()
    expected = np.array([1.0078125, 1.0078125, np.inf, -1.0078125, 0.5, np.nan], ml_dtypes.bfloat16)
    np.testing.assert_array_equal(rounded.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("weights", [[1e39, 1], [10**400, 1], [float("nan"), 1], [True, 1], ["1", 1], [1] * 30_000])
def test_weights_that_cannot_be_used(tmp_path: Path, weights: list[Any]) -> None:
    for name in "ab":
        write_file(tmp_path / f"{name}.safetensors", {"w": np.ones(3, np.float32)})
    opened = [reshard.open(tmp_path / f"{name}.safetensors") for name in "ab"]
    with pytest.raises(UsageError):
        reshard.average(opened, weights)


# --- `Checkpoint.scale`: a factor and a shift, in float32 ---

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
