"""Meta's `consolidated.NN.pth`: the parts give the whole tensors, and what does not go together is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import assert_equal
from commands import done
from refusals import failed, refused
from remotes import put
from saves_files import Made, Storage, dtensor, mesh, shard, tensor
from tensor_parallel import PARAMS, llama, part_of, write_llama

import reshard
from reshard import Layout, Strategy
from reshard.errors import SourceError, StrategyError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FULL = llama()
Q = "layers.0.attention.wq.weight"


@pytest.mark.parametrize("axis", [0, 1], ids=["llama3", "llama2"])
@pytest.mark.parametrize("params", [None, PARAMS, {"model": PARAMS | {"vocab_size": 16}}])
@pytest.mark.parametrize("parts", [1, 2])
def test_parts_give_the_whole_tensors(tmp_path: Path, axis: int, params: Any, parts: int) -> None:
    write_llama(tmp_path, FULL, parts, embedding_axis=axis)
    if params:
        (tmp_path / "params.json").write_text(json.dumps(params))
    source = reshard.open(tmp_path)
    assert_equal(source, FULL)
    assert not source.warnings
    assert not source.unreadable


def test_one_file_alone(tmp_path: Path) -> None:
    write_llama(tmp_path, FULL)
    url = put(tmp_path, "memory://llama")
    for part in range(2):
        for root in (tmp_path, url):
            with refused(SourceError, "one-of-several", f"consolidated.0{part}.pth"):
                reshard.open(f"{root}/consolidated.0{part}.pth")


def test_the_only_file_and_the_only_one_that_is_left(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "one", FULL, 1) / "consolidated.00.pth"
    (tmp_path / "one" / "params.json").write_text(json.dumps(PARAMS))
    assert_equal(reshard.open(path), FULL)
    reshard.plan(reshard.open(path)).save(tmp_path / "plan.json")
    reshard.read_plan(tmp_path / "plan.json").run(tmp_path / "planned")
    assert reshard.verify(tmp_path / "planned").equal
    (write_llama(tmp_path / "two", FULL) / "consolidated.01.pth").unlink()
    with refused(SourceError, "wrong-shape", Q):
        reshard.open(tmp_path / "two" / "consolidated.00.pth")


def test_parts_that_are_not_there(tmp_path: Path) -> None:
    """The last are missed by the shapes, with sizes and without."""
    write_llama(tmp_path, FULL, 2)
    (tmp_path / "consolidated.01.pth").rename(tmp_path / "consolidated.03.pth")
    with refused(SourceError, "missing-ranks", "ranks 1-2"):
        reshard.open(tmp_path)
    (tmp_path / "consolidated.03.pth").unlink()
    with refused(SourceError, "wrong-shape", Q, "norm.weight"):
        reshard.open(tmp_path)
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    with refused(SourceError, "wrong-shape", Q, "params.json"):
        reshard.open(tmp_path)
    (tmp_path / "consolidated.0.pth").write_bytes(b"")
    with refused(SourceError, "duplicate-rank", "consolidated.00.pth"):
        reshard.open(tmp_path)
    (tmp_path / "consolidated.00.pth").unlink()
    (tmp_path / "consolidated.0.pth").rename(tmp_path / "consolidated.900000000.pth")
    with refused(SourceError, "missing-ranks"):
        reshard.open(tmp_path)


LIES: dict[str, tuple[Any, str]] = {
    "another size": ({"dim": 16}, "wrong-shape"),
    "more layers": ({"n_layers": 3}, "missing-layers"),
    "fewer layers": ({"n_layers": 1}, "missing-layers"),
    "layers without end": ({"n_layers": 1 << 60}, "missing-layers"),
    "other heads": ({"head_dim": 4}, "wrong-shape"),
    "other groups": ({"n_kv_heads": 4}, "wrong-shape"),
    "another vocabulary": ({"vocab_size": 15}, "wrong-shape"),
    "a text": ({"dim": "8"}, "bad-value"),
    "a flag": ({"n_heads": True}, "bad-value"),
    "a number of any size": ({"dim": 1 << 70}, "bad-value"),
}


@pytest.mark.parametrize("lie", LIES)
def test_sizes_that_lie(tmp_path: Path, lie: str) -> None:
    change, code = LIES[lie]
    write_llama(tmp_path, FULL)
    (tmp_path / "params.json").write_text(json.dumps(PARAMS | change))
    with refused(SourceError, code, "params.json"):
        reshard.open(tmp_path)


@pytest.mark.parametrize(("content", "code"), [("{", "not-json"), ("[]", "bad-value"), (" " * (2 << 20), "too-large")])
def test_sizes_that_are_none(tmp_path: Path, content: str, code: str) -> None:
    write_llama(tmp_path, FULL)
    (tmp_path / "params.json").write_text(content)
    with refused(SourceError, code, "params.json"):
        reshard.open(tmp_path)


# --- the table and the user's rules ---


def with_extra(values: np.ndarray[Any, Any], axis: int | None = 0) -> Callable[[int, dict[str, Any]], object]:
    """Adds a tensor that the table does not know."""
    return lambda part, state: state.update({"x.lora_a": tensor(part_of(values, axis, part, 2))})


EXTRA = np.arange(32, dtype=np.float32).reshape(8, 4)


def test_a_name_that_the_table_does_not_know(tmp_path: Path) -> None:
    write_llama(tmp_path / "src", FULL, change=with_extra(EXTRA))
    source = reshard.open(tmp_path / "src")
    assert_equal(source, FULL)
    assert "layout={'NAME': 'RULE'}" in source.unreadable["x.lora_a"]
    assert "--layout 'NAME=RULE'" in done("inspect", tmp_path / "src").stdout
    words = ("convert", "--to=mindspore", tmp_path / "src", tmp_path / "dst")
    failed(4, "unreadable-tensor", *words, places=("--layout 'NAME=RULE'",))
    done("convert", "--to=mindspore", tmp_path / "src", tmp_path / "dropped", "--drop", "x.lora_a")
    assert reshard.verify(tmp_path / "dropped").equal
    ruled = reshard.open(tmp_path / "src", layout={"x.*": "split:0"})
    assert_equal(ruled, {**FULL, "x.lora_a": EXTRA})
    assert reshard.open(tmp_path / "src", layout={"x.*": "split:1"})["x.lora_a"].shape == (4, 8)


def test_rules_are_kept_by_plans_and_ledgers(tmp_path: Path) -> None:
    write_llama(tmp_path / "src", FULL, change=with_extra(EXTRA))
    done("convert", tmp_path / "src", tmp_path / "dst", "--to", "hf", "--layout", "x.*=split:0")
    assert reshard.verify(tmp_path / "dst").equal
    reshard.plan(reshard.open(tmp_path / "src", layout={"x.*": "split:0"})).save(tmp_path / "plan.json")
    reshard.read_plan(tmp_path / "plan.json").run(tmp_path / "planned")
    for target in ("dst", "planned"):
        assert_equal(reshard.open(tmp_path / target), {**FULL, "x.lora_a": EXTRA})
    assert reshard.verify(tmp_path / "planned").equal
    reshard.open(tmp_path / "src", layout={"x.*": "split:0"}).to_zarr(tmp_path / "zarr", fsync=False)
    assert reshard.verify(tmp_path / "zarr").equal


@pytest.mark.parametrize("axis", [0, None])
def test_one_dimension_that_the_table_does_not_know(tmp_path: Path, axis: int | None) -> None:
    """Equal parts may be replicas, or zeros that are cut: the user says it."""
    write_llama(tmp_path, FULL, change=with_extra(EXTRA[0], axis))
    assert set(reshard.open(tmp_path).unreadable) == {"x.lora_a"}
    rule = "whole" if axis is None else "split:0"
    assert_equal(reshard.open(tmp_path, layout={"x.*": rule}), {**FULL, "x.lora_a": EXTRA[0]})
    copied = reshard.open(tmp_path, layout={"x.*": "copy"})
    assert (copied["x.lora_a"].compute()[:2] == EXTRA[0][:2]).all()
    assert any("x.lora_a" in line for line in copied.warnings) == (axis == 0)


def test_a_strategy_over_the_parts_wins_over_the_table(tmp_path: Path) -> None:
    """As for keys of which two parts share a head."""
    full = {name: array for name, array in FULL.items() if "layers.1." not in name}

    def share(part: int, state: dict[str, Any]) -> None:
        for name in ("wk", "wv"):
            array = full[f"layers.0.attention.{name}.weight"]
            state[f"layers.0.attention.{name}.weight"] = tensor(part_of(array, 0, part // 2, 2))

    write_llama(tmp_path / "src", full, 4, change=share)
    (tmp_path / "src" / "params.json").write_text(json.dumps(PARAMS | {"n_layers": 1}))
    with refused(SourceError, "wrong-shape", "layers.0.attention.wk.weight"):
        reshard.open(tmp_path / "src")
    shared = Layout.of([2, 2], [1, -1])
    strategy = Strategy.of({f"layers.0.attention.{name}.weight": shared for name in ("wk", "wv")})
    assert_equal(reshard.open(tmp_path / "src", strategy=strategy), full)
    reshard.write_strategy(strategy, tmp_path / "s.ckpt")
    done("convert", tmp_path / "src", tmp_path / "dst", "--to", "dcp", "--source-strategy", tmp_path / "s.ckpt")
    assert_equal(reshard.open(tmp_path / "dst"), full)
    assert reshard.verify(tmp_path / "dst").equal
    columns = strategy.with_layout(Q, Layout.of([4], [-1, 0]))
    assert reshard.open(tmp_path / "src", strategy=columns)[Q].shape == (2, 32)


def test_rules_that_do_not_fit(tmp_path: Path) -> None:
    write_llama(tmp_path, FULL)
    for rules, code in (
        ({"nothing.*": "whole"}, "no-match"), ({Q: "split:2"}, "bad-rule"), ({Q: "4:0,-1"}, "devices-differ"),
        ({Q: "sideways"}, "bad-rule"), ({"*": "split:1"}, "bad-rule"), ({"rope.*": "gate-and-up"}, "not-divisible"),
    ):  # fmt: skip
        with refused(StrategyError, code):
            reshard.open(tmp_path, layout=rules)
    with refused(StrategyError, "devices-differ", Q):
        reshard.open(tmp_path, strategy=Strategy.of({Q: Layout.of([4], [0, -1])}))
    with refused(StrategyError, "unsupported-layout", Q):
        reshard.open(tmp_path, strategy=Strategy.of({Q: Layout.of([2], [0, -1], param_split_shape=[3, 5])}))


def test_tensors_that_every_part_has_whole_are_not_joined(tmp_path: Path) -> None:
    """By a rule of the table as of the user: the whole would be the same rows twice."""
    write_llama(tmp_path, FULL, change=lambda _, state: state.update(w=tensor(EXTRA), v=tensor(EXTRA + 1)))
    with refused(SourceError, "saved-whole", "'w'"):
        reshard.open(tmp_path, layout={"w": "split:0", "v": "whole"})
    assert_equal(reshard.open(tmp_path, layout={"[vw]": "whole"}), {**FULL, "w": EXTRA, "v": EXTRA + 1})


# --- parts that do not go together ---


def test_parts_of_two_checkpoints(tmp_path: Path) -> None:
    """What all parts should have alike is refused by name."""
    write_llama(tmp_path / "one", FULL)
    write_llama(tmp_path / "other", {name: array + 1 for name, array in FULL.items()})
    (tmp_path / "other" / "consolidated.01.pth").replace(tmp_path / "one" / "consolidated.01.pth")
    source = reshard.open(tmp_path / "one")
    assert {name for name in FULL if "norm" in name or "freqs" in name} - {"rope.freqs"} == set(source.unreadable)
    failed(4, "unreadable-tensor", "convert", "--to=mindspore", tmp_path / "one", tmp_path / "dst", places=("norm",))


OUT = "layers.0.attention.wo.weight"
ODD: dict[str, Callable[[int], dict[str, Any]]] = {
    "of one part alone": lambda part: {} if part else {OUT: tensor(FULL[OUT][:, :4])},
    "of other shapes": lambda part: {OUT: tensor(FULL[OUT][:, : 4 + part])},
    "of other dtypes": lambda part: {OUT: tensor(FULL[OUT][:, :4].astype([np.float32, np.int64][part]))},
    "a DTensor": lambda part: {OUT: dtensor(tensor(FULL[OUT][:4]), (8, 8), [shard(0)], mesh((2,), part))},
    "no tensor": lambda part: {OUT: 7 if part else tensor(FULL[OUT][:, :4])},
    "an object with a tensor": lambda _: {OUT: Made("Mine", tensor(FULL[OUT]), module="mine")},
    "of one dimension": lambda _: {OUT: tensor(FULL[OUT][0])},
    "of no dimension": lambda _: {OUT: tensor(FULL[OUT][0, 0])},
    "a view of one element that makes no possible array": lambda _: {OUT: expanded((1, 1 << 59))},
}


def expanded(shape: tuple[int, ...]) -> Made:
    """A tensor of any shape in a storage of one element."""
    one = np.zeros(1, np.float32)
    return tensor(np.lib.stride_tricks.as_strided(one, shape, (0, 0)), storage=Storage(one), strides=(0, 0))


@pytest.mark.parametrize("name", ODD)
def test_a_tensor_that_cannot_be_joined(tmp_path: Path, name: str) -> None:
    def change(part: int, state: dict[str, Any]) -> None:
        del state[OUT]
        state.update(ODD[name](part))

    source = reshard.open(write_llama(tmp_path, FULL, change=change))
    assert set(source.unreadable) == {OUT}
    assert_equal(source, FULL, but=(OUT,))


def test_sizes_of_views_are_compared_before_anything_is_read(tmp_path: Path) -> None:
    write_llama(tmp_path, FULL, change=lambda _, state: state.update({Q: expanded((1 << 40, 8))}))
    with refused(SourceError, "wrong-shape", Q):
        reshard.open(tmp_path)
