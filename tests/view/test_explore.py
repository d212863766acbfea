"""Looking into checkpoints: a choice of tensors, groups of them, and what a slice or a difference reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import checkpoints
import numpy as np
import pytest
from refusals import refused
from test_show import large

import reshard
from reshard.core.layout.layout import Layout
from reshard.core.model import stored
from reshard.core.storage.local import LocalStore
from reshard.dtypes import BY_NAME
from reshard.errors import SourceError, UsageError
from reshard.strategy.strategy import Strategy
from reshard.view.tables import checkpoint_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.storage.base import Want

SHAPES = {
    "layers.0.attn.wq": (16, 8),
    "layers.0.attn.wk": (16, 8),
    "layers.0.mlp": (8, 8),
    "layers.1.attn.wq": (16, 8),
    "layers.1.attn.wk": (16, 8),
    "layers.1.mlp": (8, 8),
    "norm": (8,),
}
ROWS = Strategy.of({name: Layout.of([4], [0, *[-1] * (len(shape) - 1)]) for name, shape in SHAPES.items()})
COLUMNS = Strategy.of({name: Layout.of([2], [*[-1] * (len(shape) - 1), 0]) for name, shape in SHAPES.items()})


class CountingStore(LocalStore):
    """The files of this machine; remembers the bytes that were read of each."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[str, int, int]] = []

    def read(self, wants: Sequence[Want]) -> None:
        for want in wants:
            self.read_into(*want)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        self.reads.append((path, offset, len(buffer)))
        super().read_into(path, offset, buffer)

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self.reads)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> CountingStore:
    counting = CountingStore()
    monkeypatch.setattr(stored, "store_of", lambda _cipher: counting)
    return counting


@pytest.fixture
def full() -> dict[str, np.ndarray[Any, Any]]:
    return checkpoints.numbers(SHAPES)


@pytest.fixture
def source(tmp_path: Path, full: dict[str, np.ndarray[Any, Any]]) -> Checkpoint:
    return reshard.open(checkpoints.write_ranks(tmp_path / "src", full, ROWS), strategy=ROWS)


# --- choosing ---------------------------------------------------------------------------------------------------


def test_a_choice_is_a_checkpoint(source: Checkpoint, full: dict[str, np.ndarray[Any, Any]]) -> None:
    chosen = source.sel("layers.*.attn.*", "norm")
    assert list(chosen) == [name for name in source if "attn" in name or name == "norm"]
    assert chosen.nbytes == sum(full[name].nbytes for name in chosen)
    assert chosen["norm"].name == source["norm"].name, "the same lazy array"
    assert "layers.0.mlp" not in chosen
    with pytest.raises(KeyError):
        chosen["layers.0.mlp"]
    assert list(chosen.sel("*.wq")) == ["layers.0.attn.wq", "layers.1.attn.wq"]
    assert "\n" not in repr(chosen)
    assert "2 left out" in chosen._repr_html_()
    assert checkpoint_text(chosen._record).endswith(
        "5 of 7 tensors, 2.1 kB in whole tensors, 2.1 kB in the files with replicas"
    )


def test_a_choice_is_planned_and_written(
    source: Checkpoint, full: dict[str, np.ndarray[Any, Any]], tmp_path: Path
) -> None:
    chosen = source.sel("layers.*.attn.*").sel("*.wq")
    wanted = {name: full[name] for name in chosen}
    for target in (COLUMNS, None):
        plan = reshard.plan(chosen, target)
        assert not plan.missing
        assert not plan.dropped
        plan.run(tmp_path / f"{target}")
        checkpoints.assert_rank_files(tmp_path / f"{target}", wanted, target and Strategy.of(
            {name: COLUMNS.tensors[name][0].layout for name in chosen}
        ))  # fmt: skip
    names = {"layers.*": "model.*"}
    renamed = Strategy.of({name.replace("layers", "model"): p[0].layout for name, p in COLUMNS.tensors.items()})
    plan = reshard.plan(chosen, renamed, selection=reshard.Selection(name_map=names))
    assert [each.name for each in plan._record.transfers] == ["model.0.attn.wq", "model.1.attn.wq"]


def test_a_choice_does_not_hide_what_is_missing(source: Checkpoint) -> None:
    target = Strategy.of({**{n: p[0].layout for n, p in COLUMNS.tensors.items()}, "head": Layout.of([2], [0, -1])})
    with refused(SourceError, "missing-tensor", "'head'"):
        reshard.plan(source.sel("norm"), target)


def test_states_are_still_known_by_weights_that_are_left_out(tmp_path: Path) -> None:
    full = checkpoints.numbers({"w": (4, 4), "adam_m.w": (4, 4)})
    strategy = Strategy.of(dict.fromkeys(full, Layout.of([2], [0, -1])))
    source = reshard.open(checkpoints.write_ranks(tmp_path, full, strategy), strategy=strategy)
    only = Strategy.of({"w": Layout.of([2], [-1, 0])})
    plan = reshard.plan(source.sel("adam_m.*", "w"), only)
    assert plan.dropped == ("adam_m.w",)
    with refused(UsageError, "no-tensors"):
        reshard.plan(source.sel("adam_m.*"), selection=reshard.Selection(weights_only=True))


def test_a_pattern_that_matches_nothing_is_told_with_the_nearest(source: Checkpoint) -> None:
    with refused(UsageError, "no-match", "layer.*.atn.wq"):
        source.sel("norm", "layer.*.atn.wq")
    with refused(UsageError, "no-match", "§"):
        source.sel("§")


STATES = {
    "a.w": (2, 4), "b.w": (2, 4), "exp_avg.a.w": (2, 4), "exp_avg_sq.a.w": (2, 4), "fp32.a.w": (2, 4),
    "step.a.w": (1,), "exp_avg.b.w": (2, 4), "exp_avg_sq.b.w": (2, 4), "fp32.b.w": (2, 4), "step.b.w": (1,),
    "global_step": (1,), "learning_rate": (1,),
}  # fmt: skip


@pytest.fixture
def trained(tmp_path: Path) -> Checkpoint:
    arrays = checkpoints.numbers(STATES)
    arrays["a.w"] = arrays["a.w"].view(np.uint16)[:, ::2].copy()  # bfloat16
    return reshard.open(checkpoints.write_file(tmp_path / "trained.safetensors", arrays))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("weights", {"a.w", "b.w"}),
        ("optimizer", {name for name in STATES if name.count(".") > 1}),
        ("moments", {"exp_avg.a.w", "exp_avg_sq.a.w", "exp_avg.b.w", "exp_avg_sq.b.w"}),
        ("masters", {"fp32.a.w", "fp32.b.w"}),
        ("steps", {"step.a.w", "step.b.w", "global_step"}),
        ("other", {"global_step", "learning_rate"}),
        ("exp_avg", {"exp_avg.a.w", "exp_avg.b.w"}),
    ],
)
def test_tensors_are_chosen_by_kind(trained: Checkpoint, kind: str, names: set[str]) -> None:
    assert set(trained.sel(kind=kind)) == names
    groups = trained.groups("kind")
    assert kind not in groups or set(groups[kind]) == names


def test_all_conditions_hold(trained: Checkpoint, tmp_path: Path) -> None:
    assert list(trained.sel(dtype="bf16")) == ["a.w"]
    assert set(trained.sel("*b.w", "step.*", dtype="float32", kind="optimizer")) == {
        "exp_avg.b.w", "exp_avg_sq.b.w", "fp32.b.w", "step.a.w", "step.b.w",
    }  # fmt: skip
    assert set(trained.sel()) == set(trained), "no condition, as in xarray"
    moments = trained.sel(kind="moments")
    assert set(moments.sel(kind="moments")) == set(moments), "weights that are left out are still known"
    assert set(moments.sel(kind="weights")) == set()
    reshard.plan(moments, format="safetensors").run(tmp_path / "moments")
    assert reshard.verify(tmp_path / "moments", against=moments)


def test_a_choice_of_nothing_is_empty_and_not_written(trained: Checkpoint) -> None:
    nothing = trained.sel(dtype="int8")
    assert len(nothing) == 0
    assert "0 tensors" in repr(nothing)
    assert nothing._repr_html_()
    with refused(UsageError, "no-tensors"):
        reshard.plan(nothing)


@pytest.mark.parametrize(
    ("condition", "code", "place"),
    [({"kind": "moment"}, "unknown-kind", "moments"), ({"dtype": "float33"}, "unknown-dtype", "bfloat16")],
)
def test_an_unknown_condition_is_told_with_the_choices(
    trained: Checkpoint, condition: dict[str, str], code: str, place: str
) -> None:
    with refused(UsageError, code, place):
        trained.sel(**condition)


def test_ten_thousand_names_are_chosen_by_name() -> None:
    checkpoint = reshard.Checkpoint(large(10_000, 4))
    assert len(checkpoint.sel(*checkpoint)) == 10_000
    assert len(checkpoint.sel("h.*.wa")) == 1000
    assert len(checkpoint.groups()["h.{0-999}.wb"]) == 1000


# --- groups -----------------------------------------------------------------------------------------------------


def test_groups(source: Checkpoint) -> None:
    groups = source.groups()
    assert groups.counts == {"layers.{0-1}.attn.wq": 2, "layers.{0-1}.attn.wk": 2, "layers.{0-1}.mlp": 2, "norm": 1}
    assert groups.sizes == {
        "layers.{0-1}.attn.wq": 1024, "layers.{0-1}.attn.wk": 1024, "layers.{0-1}.mlp": 512, "norm": 32,
    }  # fmt: skip
    assert list(groups["layers.{0-1}.mlp"]) == ["layers.0.mlp", "layers.1.mlp"]
    assert source.groups("prefix").counts == {"layers": 6, "norm": 1}
    assert source.groups("dtype").dtypes == {"float32": ("float32",)}
    assert source.groups("kind").counts == {"weights": 7}
    assert repr(groups) == f"<Groups of {source.root} by name: 4>"
    assert str(source.groups("prefix")).splitlines()[1].split() == ["layers", "6", "2.6", "kB", "float32"]
    with refused(UsageError, "bad-value", "size"):
        source.groups("size")


# --- what is read -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
def test_a_slice_reads_its_bytes_and_no_others(tmp_path: Path, store: CountingStore, dtype: str) -> None:
    kind = BY_NAME[dtype]
    values = (np.arange(4096 * 512).reshape(4096, 512) % 5).astype(kind.numpy())
    source = one_tensor(tmp_path, values, Layout.of([8], [0, -1]))
    assert store.nbytes == 0, "opening reads headers only, and not through here"
    weight = source["w"]
    assert (weight.dtype, weight.npartitions, store.nbytes) == (kind.numpy(), 8, 0)
    assert (weight[:4].compute() == values[:4]).all()
    assert store.nbytes == 4 * 512 * kind.itemsize, f"of {values.nbytes} in the files"
    store.reads.clear()
    assert (weight[510:514].compute() == values[510:514]).all()
    assert sorted(nbytes for _, _, nbytes in store.reads) == [2 * 512 * kind.itemsize] * 2, "of two files"
    store.reads.clear()
    mean = weight.mean().compute()
    assert mean == pytest.approx(values.astype(np.float64).mean(), rel=1e-5)
    assert store.nbytes == values.nbytes, "every byte once"


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_difference_of_two_layouts_merges_neither(tmp_path: Path, store: CountingStore, dtype: str) -> None:
    kind = BY_NAME[dtype]
    first = (np.arange(1024 * 256).reshape(1024, 256) % 5).astype(kind.numpy())
    second = (np.arange(1024 * 256).reshape(1024, 256) % 3).astype(kind.numpy())
    a = one_tensor(tmp_path / "a", first, Layout.of([4], [0, -1]))
    b = one_tensor(tmp_path / "b", second, Layout.of([4], [-1, 0]))
    mean = (a["w"] - b["w"]).mean().compute()
    exact = first.astype(np.float64) - second.astype(np.float64)
    assert mean == pytest.approx(exact.mean(), rel=1e-5)
    assert store.nbytes == first.nbytes + second.nbytes, "every byte once"
    assert max(nbytes for _, _, nbytes in store.reads) <= first.nbytes // 4, "no more than a shard at a time"
    store.reads.clear()
    rows = (a.array("w", chunks=(2, -1))[:2], b.array("w", chunks=(2, -1))[:2])
    assert ((rows[0] - rows[1]).compute().astype(np.float64) == exact[:2]).all()
    assert store.nbytes == 2 * 2 * 256 * kind.itemsize
    store.reads.clear()
    assert ((a["w"] - b["w"])[:2].compute().astype(np.float64) == exact[:2]).all()
    assert store.nbytes == 2 * 256 * 256 * kind.itemsize, "dask slices a difference by chunks: slice first"


def test_a_slice_that_is_used_twice_reads_no_more(tmp_path: Path, store: CountingStore) -> None:
    values = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    weight = one_tensor(tmp_path, values, Layout.of([4], [0, -1]))["w"]
    part = weight[10:40, 3:7][2:, 1]
    assert ((part - part.mean()).compute() == values[12:40, 4] - values[12:40, 4].mean()).all()
    assert store.nbytes <= 28 * 32 * 4
    assert part.chunks == ((4, 16, 8),)
    assert part.name == weight[10:40, 3:7][2:, 1].name
    store.reads.clear()
    assert weight[-1, -1].compute() == values[-1, -1]
    assert weight[20].sum().compute() == values[20].sum()
    assert weight[..., 5].sum().compute() == values[:, 5].sum()
    assert weight[3:3].shape == (0, 32)
    assert (weight[::2][:4].compute() == values[::2][:4]).all()
    with pytest.raises(IndexError):
        weight[64]


def one_tensor(root: Path, values: np.ndarray[Any, Any], layout: Layout) -> Checkpoint:
    """A checkpoint of one tensor `w`."""
    strategy = Strategy.of({"w": layout})
    return reshard.open(checkpoints.write_ranks(root, {"w": values}, strategy), strategy=strategy)
