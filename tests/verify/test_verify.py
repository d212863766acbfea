"""Verification: every bit of a target is the source's, and what is not is found where it is."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import helpers
import ml_dtypes
import numpy as np
import pytest
from checkpoints import numbers, strategy_of, write_file, write_ranks
from compared import AFTER, BEFORE, FULL, compared, flip, rank_file
from generators import Model, models
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from refusals import refused
from samples import examples, sampled

import reshard
from reshard import Layout, Selection, Strategy
from reshard.core.plan import budget
from reshard.core.plan.make import plan_convert
from reshard.core.verify import compare
from reshard.errors import BudgetError, SourceError, UsageError


@pytest.fixture
def small_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the work so fine that a small model has many bands and tasks."""
    monkeypatch.setattr(budget, "TASK_BYTES", 512)
    monkeypatch.setattr(compare, "SAMPLE_BYTES", 64)
    monkeypatch.setattr(budget, "BAND_BYTES", 128)


@pytest.mark.parametrize("threads", [1, 3])
def test_what_a_conversion_made_is_equal(sides: tuple[Path, Path], small_bands: None, threads: int) -> None:
    told: list[Any] = []
    found = compared(*sides, threads=threads, progress=told.append)
    assert found
    assert found.equal
    assert not found.differences
    assert found.tensors == 4
    stored = sum(array.nbytes for name, array in FULL.items() if name != "b") + FULL["b"].nbytes * 8 + 8 * 4
    made = FULL["w"].nbytes * 3 + FULL["b"].nbytes + FULL["c"].nbytes + 6 * 4
    assert found.bytes_read == found.total_bytes == stored + made  # each byte of either side, once
    assert [event.written for event in told] == sorted(event.written for event in told)
    assert told[-1].written == told[-1].total == found.bytes_read


@pytest.mark.parametrize("name", sampled([(name,) for name in helpers.case_names() if not name.startswith("lost")], 6))
def test_recorded_cases_are_equal_after_a_conversion(mindspore_data: Path, tmp_path: Path, name: str) -> None:
    """Both formats, twice: against what MindSpore saved in the same format, and in the other."""
    case = mindspore_data / "cases" / name
    meta = helpers.load_meta(case)
    before, after = strategy_of(case, meta["src"]), strategy_of(case, meta["dst"])
    every = Selection(drop=("*",), allow_missing=("*",))
    for source, format in (("ckpt", "safetensors"), ("safetensors", "ckpt")):
        opened = reshard.open(case / f"src_{source}", strategy=before)
        plan = reshard.plan(opened, after, to=format, selection=every)
        plan.run(tmp_path / source, fsync=False)
        for other in ("ckpt", "safetensors"):
            found = reshard.verify(
                tmp_path / source, after, against=case / f"src_{other}", source_strategy=before, selection=every
            )
            assert not found.differences
            assert found.tensors + len(plan._record.texts) == len({each.name for each in plan._record.transfers})
            assert set(found.dropped) == set(plan.dropped)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(model=models(), data=st.data(), format=st.sampled_from(["ckpt", "safetensors"]))
def test_one_flipped_bit_is_found_where_it_is(
    tmp_path_factory: pytest.TempPathFactory, model: Model, data: st.DataObject, format: str
) -> None:
    """In any file of either side. Every element is another number, and that says its place in the whole tensor."""
    root = tmp_path_factory.mktemp("model")
    full = numbers(model.shapes, "int32")
    source = write_ranks(root / "src", full, model.source)
    plan = reshard.plan(reshard.open(source, strategy=model.source), model.target, to=format)
    plan.run(root / "dst", fsync=False)

    def verified() -> reshard.Verification:
        return reshard.verify(root / "dst", model.target, against=source, source_strategy=model.source)

    assert verified().equal
    side = data.draw(st.sampled_from(["source", "target"]), label="side")
    strategy = model.source if side == "source" else model.target
    rank = data.draw(st.sampled_from(strategy.ranks), label="rank")
    path = rank_file(root / ("src" if side == "source" else "dst"), rank)
    held = helpers.read_rank_file(path)
    assume(held)
    name = data.draw(st.sampled_from(sorted(held)), label="name")
    _, shape, content = held[name]
    elements = np.frombuffer(content, np.int32)
    element = data.draw(st.integers(0, elements.size - 1), label="element")
    flip(path, name, element, data.draw(st.integers(0, 31), label="bit"))
    inside = tuple(map(int, np.unravel_index(element, shape)))
    whole = tuple(map(int, np.argwhere(full[name] == elements[element])[0]))

    found = verified().differences
    assert {one.name for one in found} == {name}
    assert {one.kind for one in found} == {"values"}
    assert {one.index for one in found} == {whole}
    assert {one.count for one in found} == {1}
    if str(path) in {one.path for one in found}:
        (one,) = found
        assert (one.side, one.rank, one.path, one.index_in_block) == (side, rank, str(path), inside)
    else:  # the copy that all else is compared with: it is named by each that differs from it
        assert side == "source"
        assert {one.reference for one in found} == {str(path)}


@pytest.mark.parametrize("rank", [0, 3])
def test_a_replica_that_differs(sides: tuple[Path, Path], rank: int) -> None:
    source, target = sides
    flip(rank_file(target, rank), "w", 5, bit=9)
    (one,) = compared(source, target).differences
    assert (one.name, one.side, one.rank, one.index_in_block, one.count) == ("w", "target", rank, (0, 5), 1)
    assert one.path == str(rank_file(target, rank))
    assert int(one.found or "", 16) ^ int(one.expected or "", 16) == 1 << 9


def test_a_replica_in_the_source_that_no_conversion_reads(sides: tuple[Path, Path]) -> None:
    source, target = sides
    flip(rank_file(source, 5), "b", 11)
    (one,) = compared(source, target).differences
    assert (one.name, one.side, one.rank, one.index, one.count) == ("b", "source", 5, (11,), 1)
    assert one.reference == str(rank_file(source, 0))


@pytest.mark.parametrize("cast", [{}, {"float32": "float16"}])
def test_every_copy_that_differs_is_named(tmp_path: Path, small_bands: None, cast: dict[str, str]) -> None:
    """Columns, of which source and target have copies each, cast or not: a wrong one says nothing of the next."""
    before = Strategy.of({"w": Layout.of([4, 2], [1, -1])})
    after = Strategy.of({"w": Layout.of([3, 2], [-1, 1])})  # of columns that half the source's rows make
    selection = Selection(cast=cast)
    full = numbers({"w": (24, 36)})
    source = write_ranks(tmp_path / "src", full, before)
    plan = reshard.plan(reshard.open(source, strategy=before), after, selection=selection)
    plan.run(tmp_path / "dst", fsync=False)
    wrong = [rank_file(source, 3), *(rank_file(tmp_path / "dst", rank) for rank in (1, 2, 5))]
    for path in wrong:
        flip(path, "w", 70, bit=3)
        flip(path, "w", 80, bit=3)
    found = reshard.verify(
        tmp_path / "dst", after, against=source, source_strategy=before, selection=selection
    ).differences
    assert sorted((one.path, one.count) for one in found) == sorted((str(path), 2) for path in wrong)


def test_bits_are_compared_not_numbers(tmp_path: Path) -> None:
    """NaNs with other payloads differ, and so do 0.0 and -0.0; equal NaNs do not."""
    values = np.zeros((4, 4), np.float32)
    values[1] = np.nan
    other = values.copy()
    other[0, 2] = -0.0
    other.view(np.uint32)[1, 3] ^= 1
    one, two = (write_file(tmp_path / f"{n}.safetensors", {"w": array}) for n, array in enumerate((values, other)))
    assert reshard.verify(one, against=one).equal
    (difference,) = reshard.verify(two, against=one).differences
    assert (difference.count, difference.index) == (2, (0, 2))
    assert (difference.found, difference.expected) == ("80000000", "00000000")


@pytest.mark.parametrize("name", ["step", "note"])
def test_what_no_strategy_names_is_compared_too(sides: tuple[Path, Path], name: str, tmp_path: Path) -> None:
    source, _ = sides
    also: dict[str, Any] = {"step": np.array(7, np.int32), "note": "hello"}
    also[name] = np.array(8, np.int32) if name == "step" else "other"
    wrong = write_ranks(tmp_path / "wrong", FULL, AFTER, also=also)
    found = compared(source, wrong).differences
    assert {(one.name, one.rank, one.kind) for one in found} == {
        (name, rank, "values" if name == "step" else "text") for rank in range(6)
    }


def test_ranks_values_of_their_own_are_those_of_some_source_rank(tmp_path: Path) -> None:
    """A random state: every rank has its own, and a target rank that of one source rank."""
    states = [np.random.default_rng(rank).integers(0, 99, 40) for rank in range(4)]
    strategy = Strategy.of({"w": Layout.of([4], [0])})
    weight = numbers({"w": (8,)})
    for rank in range(4):
        part = {"w": weight["w"][2 * rank : 2 * rank + 2], "rng": states[rank]}
        write_file(tmp_path / "src" / f"rank_{rank}" / "a.safetensors", part)
    reading = {"strategy": strategy, "layout": {"rng": "copy"}, "contents": False}
    source = reshard.open(tmp_path / "src", **reading)
    half = Strategy.of({"w": Layout.of([2], [0])})
    reshard.plan(source, half).run(tmp_path / "dst")

    def verified() -> reshard.Verification:
        target = reshard.open(tmp_path / "dst", strategy=half, layout={"rng": "copy"}, contents=False)
        return reshard.verify(target, against=reshard.open(tmp_path / "src", **reading))

    assert verified().equal
    assert verified().warnings == ("rng differs between the ranks of the source; any of its values will do",)
    flip(rank_file(tmp_path / "dst", 1), "rng", 17)
    (one,) = verified().differences
    assert (one.name, one.rank) == ("rng", 1)


def test_a_missing_tensor_and_one_too_many(sides: tuple[Path, Path], tmp_path: Path) -> None:
    source, _ = sides
    less = {name: array for name, array in FULL.items() if name != "c"} | {"d": FULL["c"]}
    strategy = Strategy.of({"w": AFTER.tensors["w"][0].layout, "b": AFTER.tensors["b"][0].layout})
    other = write_ranks(tmp_path / "dst", less, strategy, also={"d": FULL["c"]})

    def found(**selected: Any) -> set[tuple[str, str | None]]:
        result = reshard.verify(
            other, strategy, against=source, source_strategy=BEFORE, selection=Selection(**selected)
        )
        return {(one.kind, one.name) for one in result.differences}

    assert found() == {("missing", "c"), ("missing", "step"), ("missing", "note"), ("extra", "d")}
    assert found(drop=("c",), exclude=("step", "note"), allow_missing=("d",)) == set()
    # A conversion writes what no strategy names, whatever it may drop.
    assert found(drop=("c", "step", "note"), allow_missing=("d",)) == {("missing", "step"), ("missing", "note")}


def test_shapes_that_differ(tmp_path: Path) -> None:
    one = write_file(tmp_path / "a.ckpt", {"w": np.zeros((4, 2), np.float32)}, "ckpt")
    two = write_file(tmp_path / "b.ckpt", {"w": np.zeros((2, 4), np.float32)}, "ckpt")
    (difference,) = reshard.verify(two, against=one).differences
    assert (difference.kind, difference.text) == ("shape", "is [2, 4]; the source has [4, 2]")


def test_directories_of_the_same_ranks_need_no_strategy(sides: tuple[Path, Path], tmp_path: Path) -> None:
    source, target = sides
    reshard.Plan(plan_convert(source, "safetensors")).run(tmp_path / "converted", fsync=False)
    assert reshard.verify(tmp_path / "converted", against=source).equal
    flip(rank_file(tmp_path / "converted", 6), "c", 3)
    (one,) = reshard.verify(tmp_path / "converted", against=source).differences
    assert (one.name, one.rank, one.index) == ("c", 6, (1, 1))
    assert reshard.verify(target, AFTER, against=source).equal, "its ledger knows the other strategy"
    assert reshard.verify(target, against=source, source_strategy=BEFORE).equal
    shutil.rmtree(target / ".reshard")
    with refused(SourceError, "no-layout", "8 ranks", "source_strategy=..., or layout="):
        reshard.verify(target, AFTER, against=source)
    with refused(SourceError, "no-layout", "6 ranks", " target_strategy=..., or layout="):
        reshard.verify(target, against=source, source_strategy=BEFORE)


def test_a_tensor_that_stages_share_is_compared_in_each(tmp_path: Path) -> None:
    """Two stages cut it differently; the first is read, the other is compared with it."""
    rows, columns = Layout.of([2], [0, -1]), Layout.of([2], [-1, 0])
    strategy = Strategy.of({"first": {0: rows}, "w": {0: rows, 1: columns}})  # both have the same blocks in stage 0
    full = numbers({"first": (4, 6), "w": (4, 6)})
    source = write_ranks(tmp_path / "src", full, strategy)
    target = write_file(tmp_path / "whole.safetensors", full)
    assert reshard.verify(target, against=source, source_strategy=strategy).equal
    assert reshard.verify(source, strategy, against=target).equal
    flip(rank_file(source, 3), "w", 4)
    for found in (
        reshard.verify(target, against=source, source_strategy=strategy),
        reshard.verify(source, strategy, against=target),
    ):
        (one,) = found.differences
        assert (one.rank, one.index, one.index_in_block) == (3, (1, 4), (1, 1))
    assert found.differences[0].side == "target"


def test_a_sample_reads_less(tmp_path: Path, small_bands: None) -> None:
    full = numbers({"a": (400, 8), "b": (400, 8), "tiny": (2,)}, "int32")
    one, two = (write_file(tmp_path / f"{n}.safetensors", full) for n in range(2))
    for element in range(0, 3200, 8):
        flip(two, "a", element)
    found = [reshard.verify(two, against=one, sample=0.1) for _ in range(2)]
    assert found[0].bytes_read == pytest.approx(0.1 * found[0].total_bytes, rel=0.1)
    assert found[0].tensors == 3
    assert reshard.verify(two, against=one, sample=1.0).differences[0].count == 400


@pytest.mark.parametrize("sample", [0, -1, 1.5, math.nan])
def test_a_share_that_is_none(tmp_path: Path, sample: float) -> None:
    path = write_file(tmp_path / "a.ckpt", FULL, "ckpt")
    with refused(UsageError, "out-of-range", f"sample is {sample}"):
        reshard.verify(path, against=path, sample=sample)


def test_no_contradicting_wishes(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.ckpt", FULL, "ckpt")
    with refused(UsageError, "conflicting-options"):
        reshard.verify(path, against=path, manifest=path)
    with refused(UsageError, "out-of-range", "threads is 0"):
        reshard.verify(path, threads=0)
    with refused(BudgetError, "not-enough-memory", "memory="):
        reshard.verify(path, against=path, memory=1000)


def test_tensors_without_elements(tmp_path: Path) -> None:
    full = {"none": np.zeros((0, 4), np.float32), "rows": np.zeros((4, 0), np.float32), "one": np.zeros((), np.float32)}
    one, two = (write_file(tmp_path / f"a.{format}", full, format) for format in ("ckpt", "safetensors"))
    assert reshard.verify(one, against=two).equal
    flip(two, "one", 0)
    assert [one.index for one in reshard.verify(one, against=two).differences] == [()]


def test_a_sound_structure(sides: tuple[Path, Path]) -> None:
    found = reshard.verify(sides[1], AFTER)
    assert found.equal
    assert (found.against, found.files, found.tensors, found.bytes_read) == (None, 6, 5, 0)
    assert found.ranks == tuple(range(6))
    assert not found.warnings


def test_a_missing_rank(sides: tuple[Path, Path]) -> None:
    rank_file(sides[1], 4).unlink()
    with refused(SourceError, "missing-ranks", "rank 4") as caught:
        reshard.verify(sides[1], AFTER)
    assert caught.value.exit_code == 4
    shutil.rmtree(sides[1] / ".reshard")  # which knows of the file
    with refused(SourceError, "missing-ranks", "rank 4", "ranks up to 5"):
        reshard.verify(sides[1])


def test_a_lying_header(sides: tuple[Path, Path]) -> None:
    path = rank_file(sides[1], 1)
    content = path.read_bytes()
    assert b'"shape":[48,18]' in content
    path.write_bytes(content.replace(b'"shape":[48,18]', b'"shape":[18,48]'))
    with refused(SourceError, "wrong-shape", "rank_1", "tensor 'w'", "[18, 48]", "[48, 18]"):
        reshard.verify(sides[1], AFTER)
    path.write_bytes(content.replace(b'"shape":[48,18]', b'"shape":[48,19]'))
    result = reshard.verify(sides[1])
    assert [(each.kind, each.name, each.rank) for each in result.differences] == [("missing", "w", 1)]


def test_a_weight_that_the_strategy_names(sides: tuple[Path, Path]) -> None:
    more = Strategy.of({**{name: places[0].layout for name, places in AFTER.tensors.items()}, "v": Layout.of([6], [0])})
    with refused(SourceError, "missing-tensor", "tensor 'v'", "allow_missing='v'"):
        reshard.verify(sides[1], more)
    assert reshard.verify(sides[1], more, selection=Selection(allow_missing=("v",))).equal


def test_unfinished_files_are_reported(sides: tuple[Path, Path]) -> None:
    path = rank_file(sides[1], 4)
    (path.parent / "checkpoint_4.safetensors.partial").touch()
    warnings = reshard.verify(sides[1], AFTER).warnings
    assert "1 unfinished file (rank_4/checkpoint_4.safetensors.partial)" in warnings[0]
    path.unlink()
    with refused(SourceError, "missing-ranks", "rank 4", "unfinished file"):
        reshard.verify(sides[1], AFTER)


def test_replicas_that_are_stored_once_are_reported(mindspore_data: Path) -> None:
    folder = mindspore_data / "deduplicated" / "tut_src8"
    strategy = reshard.read_strategy(mindspore_data / "real" / "tut_src8" / "strategy_0.ckpt")
    found = reshard.verify(folder, strategy)
    assert found.equal
    assert any("replicas are stored once" in notice for notice in found.warnings)
    assert reshard.verify(
        folder, strategy, against=mindspore_data / "real" / "tut_src8" / "ckpt", source_strategy=strategy
    ).equal


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_a_tensor_that_differs_everywhere_takes_no_more_memory(tmp_path: Path) -> None:
    """Differences are computed in float64, four times the size of the numbers."""
    shape = (4096, 4096)
    for name, bits in (("a", 0x3F80), ("b", 0x4000)):  # 1 and 2
        write_file(tmp_path / name / "w.safetensors", {"w": np.full(shape, bits, "<u2").view(ml_dtypes.bfloat16)})
    script = """
import reshard
found = reshard.verify("a", against="b", memory=75_000_000, threads=1)
(one,) = found.differences
print(one.count, one.largest, one.nans, open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(reshard.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True, env=environment
    )
    count, largest, nans, peak = done.stdout.split()
    assert (int(count), float(largest), int(nans)) == (math.prod(shape), 1.0, 0)
    assert int(peak) * 1024 < 75_000_000


@pytest.mark.parametrize(
    ("option", "word"), [({"memory": 1 << 30}, "memory=..."), ({"client": object()}, "client=...")]
)
@pytest.mark.parametrize("manifest", [True, False])
def test_what_only_a_comparison_obeys_is_refused_elsewhere(
    sides: tuple[Path, Path], option: dict[str, Any], word: str, manifest: bool
) -> None:
    _, target = sides
    what = {"manifest": reshard.Manifest.make(target)} if manifest else {"target_strategy": AFTER}
    assert reshard.verify(target, **what)
    with refused(UsageError, "needs-source", word):
        reshard.verify(target, **what, **option)


def test_options_of_paths_are_refused_for_opened_checkpoints(sides: tuple[Path, Path], tmp_path: Path) -> None:
    """`verify(source, "target")` compared nothing, and was true: the path was taken for a strategy."""
    source = reshard.open(sides[0], strategy=BEFORE)
    for options in ({"target_strategy": tmp_path / "none"}, {"target_strategy": BEFORE}):
        with refused(UsageError, "no-effect", "target_strategy"):
            reshard.verify(source, **options)  # type: ignore[arg-type]
    with refused(UsageError, "no-effect", "source_strategy"):
        reshard.verify(sides[1], AFTER, against=source, source_strategy=BEFORE)
