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
from reshard.errors import UsageError

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
