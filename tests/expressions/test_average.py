"""Averages: equal bit for bit to numpy's and torch's (`tests/data/averages`), and what cannot be averaged."""

from __future__ import annotations

import json
import os
import re
import shutil
from typing import TYPE_CHECKING, Any

import adapters
import fsspec
import numpy as np
import pytest
from checkpoints import numbers, tree, write_file, write_ranks
from commands import call, done
from compared import flip
from refusals import failed, refused
from samples import slow
from saves_files import Storage, tensor, write_save
from stopped_runs import small_tasks, stopped

import reshard
from reshard import Layout, Rules, Selection, Strategy
from reshard.errors import ChangedError, SourceError, TargetError, UsageError
from reshard.expressions.average import COMPARED_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from faulty import Call, Faults

__all__ = ["small_tasks"]  # a fixture, for pytest to find

CASES = ["mindspore_dcp_hf", "mixed_dtypes", "order"]
DTYPES = [None, "float32", "bfloat16", "float16"]
STATES = {
    "moments.layers.0.attn.wq.weight", "moments.layers.0.attn.wq.bias", "moments.layers.0.norm.gamma",
    "adam_m.layers.0.attn.wq.weight", "learning_rate", "global_step", "epoch_num",
}  # fmt: skip
TWO = Strategy.of({"w": Layout.of([2], [0, -1]), "b": Layout.of([2], [-1])})
SHAPES = {"w": (8, 6), "b": (5,)}


def opened(case: Path) -> list[reshard.Checkpoint]:
    strategy = case / "a_strategy.ckpt"
    return [
        reshard.open(case / name, strategy=strategy if name == "a" and strategy.exists() else None) for name in "abc"
    ]


def weights(case: Path) -> list[float]:
    return list(json.loads((case / "info.json").read_text())["weights"])


def averaged(case: Path, dtype: str | None = None, *, states: bool = True) -> reshard.Checkpoint:
    has_states = case.name not in {"mixed_dtypes", "order"}
    return reshard.average(opened(case), weights(case), dtype=dtype, states=states and has_states)


def truth(case: Path, dtype: str | None = None) -> dict[str, Any]:
    with np.load(case / f"average.{dtype or 'same'}.npz") as arrays:
        return dict(arrays)


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        value = np.asarray(found[name])
        bits = value.view(np.uint16) if value.dtype.name == "bfloat16" else value
        assert (bits.dtype, bits.shape) == (array.dtype, array.shape), name
        assert np.array_equal(bits, array, equal_nan=array.dtype.kind == "f"), name


def halves(names: Mapping[str, Any]) -> Strategy:
    """Cut the first dimension of each tensor that can be cut in two."""
    maps = {name: [0 if not number and size and not size % 2 else -1 for number, size in enumerate(array.shape)]
            for name, array in names.items()}  # fmt: skip
    return Strategy.of({name: Layout.of([2], tensor_map) for name, tensor_map in maps.items()})


def ranks_of(
    root: Path, offset: float = 0, shapes: Mapping[str, tuple[int, ...]] = SHAPES, **options: Any
) -> reshard.Checkpoint:
    """Write two ranks; the values grow with the offset."""
    full = {name: array + np.float32(offset) for name, array in numbers(shapes).items()}
    return reshard.open(write_ranks(root, full, TWO, **options), strategy=TWO)


# --- values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_the_bits_of_arrays(mindspore_data: Path, case: str, dtype: str | None) -> None:
    folder = mindspore_data / "averages" / case
    average = averaged(folder, dtype)
    assert_same({name: average[name].compute() for name in average}, truth(folder, dtype))
    name = max(average, key=lambda name: average[name].size)
    array = average[name]
    if array.ndim == 2:
        assert np.array_equal(array[1:3, 2:].compute(), array.compute()[1:3, 2:])


@pytest.mark.parametrize("case", CASES)
def test_optimizer_states_are_left_out(mindspore_data: Path, case: str) -> None:
    folder = mindspore_data / "averages" / case
    average = averaged(folder, states=False)
    expected = {name: array for name, array in truth(folder).items() if name not in STATES}
    assert_same({name: average[name].compute() for name in average}, expected)


@pytest.mark.parametrize("to", ["hf", "mindspore", "dcp", "zarr", "checkpoint2", "safetensors", "ckpt", "dcp-cut"])
@pytest.mark.parametrize("case", [CASES[0], *map(slow, CASES[1:])])
def test_targets(mindspore_data: Path, tmp_path: Path, case: str, to: str) -> None:
    folder = mindspore_data / "averages" / case
    expected = truth(folder)
    options: dict[str, Any] = {"step": 7} if to == "checkpoint2" else {}
    if to in {"safetensors", "ckpt", "dcp-cut"}:
        options["target_strategy"] = halves(expected)
    target = tmp_path / ("out.zarr" if to == "zarr" else "out")
    reshard.convert(averaged(folder), target, to=to.removesuffix("-cut"), **options)
    written = reshard.open(target)
    assert_same({name: written[name].compute() for name in written}, expected)
    result = reshard.verify(target)
    assert result.equal
    assert not result.by_checksums
    assert str(result.against).startswith("average of ")


def test_the_bits_do_not_depend_on_threads_and_bands(mindspore_data: Path, tmp_path: Path) -> None:
    case = mindspore_data / "averages" / "order"
    written = []
    for number, (threads, memory) in enumerate([(1, None), (4, None), (1, "least")]):
        least = reshard.plan(averaged(case)).stats.peak_memory
        plan = reshard.plan(averaged(case), memory=memory and least + (1 << 20))
        plan.run(tmp_path / f"{number}", threads=threads)
        written.append((tmp_path / f"{number}/rank_0/checkpoint_0.safetensors").read_bytes())
    assert len(set(written)) == 1


def test_small_pieces(mindspore_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reshard.expressions.computed._PIECE", 7)
    case = mindspore_data / "averages" / "mixed_dtypes"
    average = averaged(case)
    assert_same({name: average[name].compute() for name in average}, truth(case))


def test_equal_weights_by_default(tmp_path: Path) -> None:
    sources = [ranks_of(tmp_path / f"{number}", number) for number in range(3)]
    third, full = np.float32(1 / 3), numbers(SHAPES)["w"]
    expected = full * third + (full + np.float32(1)) * third + (full + np.float32(2)) * third
    assert np.array_equal(reshard.average(sources)["w"].compute(), expected)
    assert reshard.average(sources).warnings == ()
    assert "1.5" in reshard.average(sources, [0.5, 0.5, 0.5]).warnings[0]


def test_float64_is_summed_in_float64(tmp_path: Path) -> None:
    values = np.array([1 + 2**-40, 3])
    for number in range(2):
        write_file(tmp_path / f"{number}.safetensors", {"w": values + number})
    average = reshard.average([reshard.open(tmp_path / f"{number}.safetensors") for number in range(2)])
    assert np.array_equal(average["w"].compute(), values * 0.5 + (values + 1) * 0.5)


def test_averages_of_averages_and_of_derived_checkpoints(tmp_path: Path) -> None:
    """With rules, fewer tensors, and an average among the inputs, all recorded."""
    a, b = ranks_of(tmp_path / "a"), ranks_of(tmp_path / "b", 1)
    write_file(tmp_path / "c.safetensors", {"model.w": numbers(SHAPES)["w"] * 3})
    rules = tmp_path / "rules.yaml"
    rules.write_text("reshard-rules: 1\nsides: [hf, ms]\nrules:\n  - {hf: model.w, ms: w}\n")
    c = reshard.open(tmp_path / "c.safetensors").derive(Rules.read(rules))
    inner = reshard.average([a.sel("w"), b.sel("w")], [0.25, 0.75])
    outer = reshard.average([inner, c])
    w = numbers(SHAPES)["w"]
    half = np.float32(0.5)
    expected = (w * np.float32(0.25) + (w + np.float32(1)) * np.float32(0.75)) * half + w * np.float32(3) * half
    assert np.array_equal(outer["w"].compute(), expected)
    reshard.plan(outer, format="safetensors").run(tmp_path / "out")
    assert np.array_equal(reshard.open(tmp_path / "out")["w"].compute(), expected)
    result = reshard.verify(tmp_path / "out")
    assert result.equal
    assert not result.by_checksums
    reshard.plan(outer, selection=Selection(name_map={"w": "v"})).save(tmp_path / "plan.json")
    reshard.read_plan(tmp_path / "plan.json").run(tmp_path / "again")
    assert np.array_equal(reshard.open(tmp_path / "again")["v"].compute(), expected)
    assert reshard.verify(tmp_path / "again").equal


def test_tied_tensors_are_computed_once(tmp_path: Path) -> None:
    """If they share their bytes in all checkpoints."""
    sources = []
    for number in range(2):
        w = numbers(SHAPES)["w"] + np.float32(number)
        shared = Storage(w.reshape(-1))
        tied = tensor(w, storage=shared)
        for kind, again in (("tied", tied), ("untied", tensor(w))):
            write_save(tmp_path / kind / f"{number}.pt", {"embed": tied, "head": again, "flat": tensor(w, first=0)})
        sources.append([reshard.open(tmp_path / kind / f"{number}.pt") for kind in ("tied", "untied")])
    (tied_0, _), (tied_1, untied_1) = sources
    tensors = reshard.average([tied_0, tied_1]).tensors
    assert tensors["embed"].runs == tensors["head"].runs != tensors["flat"].runs
    tensors = reshard.average([tied_0, untied_1]).tensors
    assert tensors["embed"].runs != tensors["head"].runs
    average = reshard.average([tied_0, tied_1])
    assert np.array_equal(average["head"].compute(), numbers(SHAPES)["w"] + np.float32(0.5))


def test_texts_and_steps_are_those_of_the_first(tmp_path: Path) -> None:
    sources = [
        ranks_of(tmp_path / f"{n}", n, format="ckpt", also={"global_step": np.array(n, np.int32), "note": f"{n}"})
        for n in range(2)
    ]
    assert set(reshard.average(sources)) == {"w", "b"}
    average = reshard.average(sources, states=True)
    reshard.convert(average, tmp_path / "out", to="ckpt")
    written = reshard.open(tmp_path / "out")
    assert int(written["global_step"].compute()) == 0
    assert written.tensors["note"].text == "0"


# --- refusals -----------------------------------------------------------------------------------------------------

REFUSED = {
    "int_differs": "different-values", "shape_differs": "different-shapes", "name_missing": "missing-tensor",
    "name_more": "missing-tensor", "kind_differs": "different-dtypes",
}  # fmt: skip


@pytest.mark.parametrize("other", REFUSED)
def test_checkpoints_that_differ(mindspore_data: Path, other: str) -> None:
    folder = mindspore_data / "averages" / "refuse"
    with refused(SourceError, REFUSED[other], folder / other):
        reshard.average([reshard.open(folder / "a"), reshard.open(folder / other)])


def test_names_in_one_checkpoint_alone(tmp_path: Path) -> None:
    """Each direction is told, and the command can leave the names out of the inputs."""
    arrays = numbers({"w": (4, 4), "only_a": (2,), "only_b": (3,), "shape": (2, 2)})
    write_file(tmp_path / "a.safetensors", {name: arrays[name] for name in ("w", "only_a", "shape")})
    more = {name: arrays[name] for name in ("w", "only_b")} | {"shape": arrays["w"]}
    write_file(tmp_path / "b.safetensors", more)
    a, b = (reshard.open(tmp_path / f"{name}.safetensors") for name in "ab")
    with pytest.raises(SourceError) as caught:
        reshard.average([a, b])
    assert {"missing-tensor", "different-shapes"} == set(caught.value.codes)
    assert len([fact for fact in caught.value.facts if "only_" in fact]) == 2
    inputs = ("average", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    failed(2, "no-match", *inputs, tmp_path / "out", "--exclude", "nowhere")
    done(*inputs, tmp_path / "out", "--to", "hf", "--exclude", "only_*@2", "--exclude", "shape")
    assert [*reshard.open(tmp_path / "out")] == ["w"]
    computed_again(tmp_path / "out")


def test_the_configuration_of_the_first_set_goes_along(tmp_path: Path) -> None:
    for name in "ab":
        write_file(tmp_path / name / "model.safetensors", numbers(SHAPES))
    config = {"model_type": "llama", "torch_dtype": "float32"}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    inputs = ("average", tmp_path / "a", tmp_path / "b")
    done(*inputs, tmp_path / "out", "--to", "hf")
    assert (tmp_path / "out" / "config.json").read_bytes() == (tmp_path / "a" / "config.json").read_bytes()
    done(*inputs, tmp_path / "narrow", "--to", "hf", "--dtype", "bf16")
    assert json.loads((tmp_path / "narrow" / "config.json").read_text()) == config | {"torch_dtype": "bfloat16"}
    done(*inputs, tmp_path / "files", "--to", "ckpt")
    assert not [*(tmp_path / "files").rglob("config.json")]
    computed_again(tmp_path / "out")
    done("average", tmp_path / "b", tmp_path / "a", tmp_path / "other", "--to", "hf")
    assert not (tmp_path / "other" / "config.json").exists()


def large_integers(tmp_path: Path, wrong: int) -> list[reshard.Checkpoint]:
    for number in range(2):
        ids = np.arange(COMPARED_BYTES, dtype=np.int64)
        ids[wrong] += number
        write_file(tmp_path / f"{number}.safetensors", {"ids": ids, "w": numbers({"w": (4, 4)})["w"]})
    return [reshard.open(tmp_path / f"{number}.safetensors") for number in range(2)]


@pytest.mark.slow
def test_an_integer_that_no_sample_shows(tmp_path: Path) -> None:
    """It is found when it is read: no file of the target is complete."""
    average = reshard.average(large_integers(tmp_path, 777_777))
    with refused(SourceError, "different-values", "ids"):
        reshard.plan(average).run(tmp_path / "out")
    assert not [name for name in tree(tmp_path / "out") if not name.endswith(".partial")]
    with refused(SourceError, "different-values", "ids"):
        reshard.average(large_integers(tmp_path, -1))


def test_plain_int8_is_an_integer(tmp_path: Path) -> None:
    write_file(tmp_path / "q.safetensors", {"x.weight": np.ones((4, 4), np.int8)})
    source = reshard.open(tmp_path / "q.safetensors")
    assert reshard.average([source, source])["x.weight"].compute().dtype == np.int8


def test_complex_numbers(tmp_path: Path) -> None:
    write_file(tmp_path / "z.safetensors", {"z": np.ones(3, np.complex64)})
    source = reshard.open(tmp_path / "z.safetensors")
    with refused(SourceError, "not-averageable", "complex64"):
        reshard.average([source, source])


def test_blocks_that_no_file_has(tmp_path: Path) -> None:
    whole = ranks_of(tmp_path / "a")
    ranks_of(tmp_path / "b", 1)
    shutil.rmtree(tmp_path / "b" / "rank_1")
    part = reshard.open(tmp_path / "b", strategy=TWO, partial=True)
    with refused(SourceError, "missing-blocks", tmp_path / "b"):
        reshard.average([whole, part])


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"weights": [1.0]}, "wrong-count"),
        ({"weights": [1.0, float("nan")]}, "bad-weight"),
        ({"weights": ["1", 0.5]}, "bad-argument"),
        ({"weights": "cosine"}, "bad-argument"),
        ({"dtype": "int32"}, "unsupported-dtype"),
        ({"dtype": "float8_e4m3fn"}, "unsupported-dtype"),
        ({"dtype": "float31"}, "unknown-dtype"),
    ],
)
def test_arguments(tmp_path: Path, arguments: dict[str, Any], code: str) -> None:
    sources = [ranks_of(tmp_path / "a"), ranks_of(tmp_path / "b")]
    with refused(UsageError, code):
        reshard.average(sources, **arguments)


def test_no_list_of_checkpoints(tmp_path: Path) -> None:
    with refused(UsageError, "no-sources"):
        reshard.average([])
    with refused(UsageError, "bad-argument"):
        reshard.average(ranks_of(tmp_path / "a"))  # type: ignore[arg-type]
    for weights in (None, "linear", "minus-sqrt", [1.0]):
        with refused(UsageError, "one-source"):
            reshard.average([ranks_of(tmp_path / "a")], weights)
    with refused(UsageError, "not-a-checkpoint"):
        reshard.average([tmp_path / "a"])  # type: ignore[list-item]


# --- runs, ledgers, plan files ------------------------------------------------------------------------------------


def test_a_flipped_bit_of_an_input_is_found(tmp_path: Path) -> None:
    average = reshard.average([ranks_of(tmp_path / "a"), ranks_of(tmp_path / "b", 1)])
    reshard.plan(average, format="safetensors").run(tmp_path / "out")
    flip(tmp_path / "b/rank_1/checkpoint_1.safetensors", "w", 0, bit=30)
    result = reshard.verify(tmp_path / "out")
    assert [each.name for each in result.differences] == ["w"]


def test_without_an_input_checksums_are_compared(tmp_path: Path) -> None:
    average = reshard.average([ranks_of(tmp_path / "a"), ranks_of(tmp_path / "b", 1)])
    reshard.plan(average, format="safetensors").run(tmp_path / "out")
    shutil.rmtree(tmp_path / "b")
    result = reshard.verify(tmp_path / "out")
    assert result.equal
    assert result.by_checksums
    assert "average of " in result.warnings[0]


def test_against_an_input_it_is_not_equal(tmp_path: Path) -> None:
    average = reshard.average([ranks_of(tmp_path / "a"), ranks_of(tmp_path / "b", 1)])
    reshard.plan(average, format="safetensors").run(tmp_path / "out")
    assert not reshard.verify(tmp_path / "out", against=tmp_path / "a", source_strategy=TWO).equal
    assert reshard.verify(tmp_path / "out", against=average).equal
    reshard.convert(tmp_path / "out", tmp_path / "hf", to="hf")
    assert reshard.verify(tmp_path / "hf", against=tmp_path / "out").equal
    reshard.convert(average, tmp_path / "second", to="hf")
    assert reshard.verify(tmp_path / "second", against=tmp_path / "out").equal


@pytest.mark.parametrize("changed", ["a", "b"])
@pytest.mark.parametrize("when", ["before", "during"])
def test_an_input_that_changes(tmp_path: Path, faults: Faults, when: str, changed: str) -> None:
    plan = reshard.plan(reshard.average([ranks_of(tmp_path / "a"), ranks_of(tmp_path / "b", 1)]), format="safetensors")
    path = tmp_path / changed / "rank_1/checkpoint_1.safetensors"

    def change(_call: Call) -> None:
        path.write_bytes(bytes(path.stat().st_size))
        os.utime(path, ns=(0, 0))

    if when == "before":
        change(None)  # type: ignore[arg-type]
    else:
        faults.nth(0, change, "write_at")
    with refused(ChangedError, "source-changed", path):
        plan.run(tmp_path / "out")
    assert not tree(tmp_path / "out")


@pytest.mark.usefixtures("small_tasks")
def test_a_stopped_run_is_resumed_with_the_same_inputs(tmp_path: Path) -> None:
    shapes = {"w": (64, 48), "b": (32,)}
    sources = [ranks_of(tmp_path / "a", shapes=shapes), ranks_of(tmp_path / "b", 1, shapes)]
    strategy = halves(numbers(shapes))
    plan = reshard.plan(reshard.average(sources), strategy, format="safetensors")
    stopped(plan, tmp_path / "out", 3)
    other = reshard.plan(reshard.average(sources, [0.75, 0.25]), strategy, format="safetensors")
    with refused(TargetError, "other-run"):
        other.run(tmp_path / "out")
    plan = reshard.plan(reshard.average(sources), strategy, format="safetensors")
    assert plan.run(tmp_path / "out").resumed
    assert reshard.verify(tmp_path / "out").equal


def test_no_target_in_an_input(tmp_path: Path) -> None:
    average = reshard.average([ranks_of(tmp_path / "a"), ranks_of(tmp_path / "b", 1)])
    with refused(TargetError, "overlaps", tmp_path / "b"):
        reshard.plan(average).run(tmp_path / "b" / "out")
    with refused(TargetError, "overlaps"):
        reshard.plan(average).run(tmp_path)


def test_plan_files(tmp_path: Path) -> None:
    average = reshard.average([ranks_of(tmp_path / "a"), ranks_of(tmp_path / "b", 1)])
    saved = tmp_path / "plan.json"
    reshard.plan(average, format="safetensors").save(saved)
    reshard.read_plan(saved).run(tmp_path / "out")
    assert reshard.verify(tmp_path / "out").equal
    with refused(UsageError, "several-sources"):
        reshard.read_plan(saved, source=tmp_path / "a")
    with refused(TargetError, "target-is-source"):
        reshard.plan(average).save(tmp_path / "b/rank_1/checkpoint_1.safetensors", overwrite=True)
    flip(tmp_path / "b/rank_1/checkpoint_1.safetensors", "w", 0)
    with refused(TargetError, "source-changed", "rank_1/checkpoint_1.safetensors"):
        reshard.read_plan(saved)
    (tmp_path / "b/rank_1/checkpoint_1.safetensors").unlink()
    with refused(SourceError, "not-found", "rank_1/checkpoint_1.safetensors"):
        reshard.read_plan(saved)


@pytest.mark.parametrize(
    ("key", "value"), [("kind", "median"), ("options", {}), ("options", {"weights": 3}), ("inputs", [])]
)
def test_a_ledger_that_was_changed(tmp_path: Path, key: str, value: Any) -> None:
    saved = tmp_path / "plan.json"
    average = reshard.average([ranks_of(tmp_path / "a"), ranks_of(tmp_path / "b", 1)], [0.25, 0.75])
    reshard.plan(average, format="safetensors").save(saved)
    content = json.loads(saved.read_text())
    content["provenance"]["source"]["computation"][key] = value
    saved.write_text(json.dumps(content))
    with pytest.raises(reshard.ReshardError):
        reshard.read_plan(saved)


# --- what is shown ------------------------------------------------------------------------------------------------


# --- the command --------------------------------------------------------------------------------------------------


def test_the_command(mindspore_data: Path, tmp_path: Path) -> None:
    case = mindspore_data / "averages" / "mindspore_dcp_hf"
    arguments = [
        "average", f"{case}/a:0.5", f"{case}/b:.3", f"{case}/c:2e-1", tmp_path / "out", "--to", "hf",
        "--source-strategy", case / "a_strategy.ckpt", "--states",
    ]  # fmt: skip
    result = done(*arguments, "--dry-run", "-v")
    assert "average of" in result.stdout
    assert "computed:" not in result.output
    result = done(*arguments)
    assert f"average of {case}/a, {case}/b, {case}/c" in result.stdout
    written = reshard.open(tmp_path / "out")
    assert_same({name: written[name].compute() for name in written}, truth(case))
    assert "average of" in done("verify", tmp_path / "out").stdout
    assert "nothing is left to do" in done(*arguments).stdout
    data = json.loads(done(*arguments, "--json").stdout)
    assert data["source"] == f"average of {case}/a, {case}/b, {case}/c"


def test_the_last_checkpoints_of_a_run(mindspore_data: Path, tmp_path: Path) -> None:
    case, run = mindspore_data / "averages" / "mixed_dtypes", tmp_path / "run"
    for number, name in enumerate("abab"):
        shutil.copytree(case / name, run / f"iter_{number + 1:07d}")
    (run / "latest_checkpointed_iteration.txt").write_text("3")
    a, b = (reshard.open(case / name) for name in "ab")
    done("average", run, "--last", "3", "--schedule", "minus-sqrt", tmp_path / "out", "--to", "hf", "--dtype", "fp32")
    expected = reshard.average([a, b, a], "minus-sqrt", dtype="float32")
    written = reshard.open(tmp_path / "out")
    assert_same({n: written[n].compute() for n in written}, {n: expected[n].compute() for n in expected})
    done("average", run, "--last", "2", "--iteration", "4", tmp_path / "two", "--to", "hf")
    written = reshard.open(tmp_path / "two")
    expected = reshard.average([a, b])
    assert_same({n: written[n].compute() for n in written}, {n: expected[n].compute() for n in expected})
    failed(4, "too-few-checkpoints", "average", run, "--last", "4", tmp_path / "x", places=("1, 2, 3",))
    failed(4, "not-a-run", "average", case / "a", "--last", "2", tmp_path / "x")
    failed(2, "one-source", "average", run, "--schedule", "linear", tmp_path / "x")
    failed(2, "conflicting-options", "average", f"{run}:1", "--last", "2", tmp_path / "x")


def test_strategies_of_the_command(tmp_path: Path) -> None:
    for name in "abc":
        ranks_of(tmp_path / name, ord(name))
    full = numbers(SHAPES)
    write_file(tmp_path / "whole.safetensors", full)
    reshard.write_strategy(TWO, tmp_path / "two.json")
    strategy = ["--source-strategy", tmp_path / "two.json"]
    arguments = ["average", tmp_path / "a", tmp_path / "whole.safetensors", tmp_path / "b"]
    done(*arguments, tmp_path / "one", *strategy, "--to", "hf")
    done(*arguments, tmp_path / "two", *strategy, *strategy, "--to", "hf")
    assert reshard.verify(tmp_path / "one", against=tmp_path / "two").equal
    failed(2, "wrong-count", *arguments, tmp_path / "c", tmp_path / "out", *strategy, *strategy)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["a:0.5", "b"], "missing-weight"),
        (["a:0.5", "b:0.5", "--schedule", "linear"], "conflicting-options"),
        (["a", "b", "--same-ranks"], "needs-path"),
        (["a"], "one-source"),
        *((["a:0.5", f"b:{word}"], "bad-weight") for word in ("abc", "O.5", "nan", "0,5", "1/2", "")),
    ],
)
def test_wrong_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write_file(tmp_path / name / "model.safetensors", numbers(SHAPES))
    failed(2, code, "average", *arguments, "out")


def test_a_forgotten_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        write_file(tmp_path / name / "model.safetensors", numbers(SHAPES))
    failed(2, "no-target", "average", "a:0.5", "b:0.2", "c:0.3")
    assert not (tmp_path / "c:0.3").exists()


def test_a_colon_in_a_path_is_no_weight(tmp_path: Path) -> None:
    for name in ("x:y", "z:1"):
        write_file(tmp_path / f"{name}.safetensors", numbers(SHAPES))
    done("average", tmp_path / "x:y.safetensors", tmp_path / "z:1.safetensors", tmp_path / "out.safetensors")
    assert call("average", tmp_path / "x:y.safetensors", tmp_path / "nowhere:0.5", tmp_path / "out").exit_code == 2
    assert call("average", tmp_path / "nowhere", tmp_path / "not:here", tmp_path / "out").exit_code == 4


# --- other inputs -------------------------------------------------------------------------------------------------


def computed_again(target: Path | str, **keys: Any) -> None:
    """Verify a target by its path alone, from its inputs and not by checksums."""
    result = reshard.verify(target, **keys)
    assert result.equal
    assert not result.by_checksums


def test_an_adapter_in_an_input(tmp_path: Path) -> None:
    model = adapters.weights("float32")
    write_file(tmp_path / "base.safetensors", model)
    lora = adapters.save(tmp_path / "adapter", adapters.matrices(model))
    base = reshard.open(tmp_path / "base.safetensors")
    merged = base.merge_lora(lora)
    average = reshard.average([base, merged])
    half, name = np.float32(0.5), "model.layers.0.q_proj.weight"
    expected = model[name] * half + np.asarray(merged[name].compute()) * half
    assert np.array_equal(average[name].compute(), expected)
    reshard.convert(average, tmp_path / "out", to="hf")
    computed_again(tmp_path / "out")
    path = tmp_path / "adapter/adapter_model.safetensors"
    plan = reshard.plan(reshard.average([base, base.merge_lora(lora)]))
    path.write_bytes(path.read_bytes()[:-4] + b"1234")
    with refused(ChangedError, "source-changed", path):
        plan.run(tmp_path / "other")


def test_stores_as_inputs(tmp_path: Path) -> None:
    for number, options in enumerate([{}, {"compression": "zstd"}]):
        ranks_of(tmp_path / f"{number}", number).to_zarr(tmp_path / f"{number}.zarr", **options)
    average = reshard.average([reshard.open(tmp_path / f"{number}.zarr") for number in range(2)])
    assert np.array_equal(average["w"].compute(), numbers(SHAPES)["w"] + np.float32(0.5))
    reshard.plan(average, format="safetensors").save(tmp_path / "plan.json")
    reshard.read_plan(tmp_path / "plan.json").run(tmp_path / "out")
    computed_again(tmp_path / "out")


def test_at_urls(tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    ranks_of(tmp_path / "a")
    ranks_of(tmp_path / "b", 1)
    files.put(str(tmp_path / "a"), "/averages/a", recursive=True)
    try:
        sources = [reshard.open(where, strategy=TWO) for where in ("memory://averages/a", tmp_path / "b")]
        reshard.plan(reshard.average(sources), format="safetensors").run("memory://averages/out", fsync=False)
        computed_again("memory://averages/out")
        written = reshard.open("memory://averages/out")
        assert np.array_equal(written["w"].compute(), numbers(SHAPES)["w"] + np.float32(0.5))
    finally:
        files.rm("/averages", recursive=True)


def test_no_view_shows_the_file_that_is_none(mindspore_data: Path, tmp_path: Path) -> None:
    average = averaged(mindspore_data / "averages" / "mixed_dtypes")
    plan = reshard.plan(average)
    shown = [
        repr(average), average._repr_html_(), plan._repr_html_(), repr(plan.rank(0)), average.groups()._repr_html_(),
        plan.picture()._repr_html_(), plan.picture("model.norm.weight")._repr_html_(),
        average.picture("model.norm.weight")._repr_html_(), repr(average.groups()),
    ]  # fmt: skip
    assert not [text for text in shown if re.search("computed:[0-9a-f]", text)]
    assert all("average of" in text for text in shown[:4])
