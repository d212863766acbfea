"""Row bands and ownership by file: every target byte is written exactly once, in order, whatever the splits."""

from __future__ import annotations

import itertools
from math import prod
from typing import TYPE_CHECKING

import helpers
import numpy as np
import pytest
from checkpoints import assert_rank_files, numbers, tree, write_file, write_ranks
from generators import Model, laid_out, layouts, models, shapes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import examples

import reshard
from reshard import Layout, Strategy
from reshard.core.layout.block import Block
from reshard.core.plan import budget, partition
from reshard.core.plan.bands import Recipe, is_grid
from reshard.core.plan.partition import partitioned
from reshard.kits import ckpt

if TYPE_CHECKING:
    from pathlib import Path

    from faulty import Faults

    from reshard.core.plan.plan import Plan


FULL = numbers({"w": (48, 48), "v": (48, 24)})


def split(ranks: int, axis: int, names: tuple[str, ...] = ("w", "v")) -> Strategy:
    return Strategy.of({name: Layout.of([ranks], [0 if dim == axis else -1 for dim in range(2)]) for name in names})


def by_file(tmp_path: Path, before: Strategy, after: Strategy) -> Plan:
    """Plan by file, carry it out, and see that it reads what the plan says and writes what a plan by tensor does."""
    root = write_ranks(tmp_path / "src", FULL, before)
    plan = partitioned(reshard.plan(reshard.open(root, strategy=before), after)._record, "file", str(tmp_path))
    report = reshard.Plan(plan).run(tmp_path / "out")
    assert report.bytes_read == plan.stats.bytes_read
    assert_rank_files(tmp_path / "out", FULL, after)
    return plan


def files_of(plan: Plan) -> tuple[tuple[int, ...], ...]:
    return tuple(task.files for task in plan.tasks)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(model=models(), most=st.sampled_from([1, 2, 64]), format=st.sampled_from(["ckpt", "safetensors"]))
def test_any_model(tmp_path_factory: pytest.TempPathFactory, model: Model, most: int, format: str) -> None:
    root = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "FILES_AT_ONCE", most)
        patch.setattr(budget, "BAND_BYTES", 256)
        before = write_ranks(root / "a", numbers(model.shapes, "float64"), model.source)
        selection = reshard.Selection(cast={"float64": "float32"})
        plan = reshard.plan(reshard.open(before, strategy=model.source), model.target, to=format, selection=selection)
        plan.run(root / "b", fsync=False)
        alone = partitioned(plan._record, "file", str(root))
        report = reshard.Plan(alone).run(root / "c", fsync=False)
        assert tree(root / "c") == tree(root / "b")
        assert report.bytes_read == alone.stats.bytes_read >= plan.stats.bytes_read
        assert sorted(n for group in files_of(alone) for n in group) == list(range(len(plan._record.files)))
        assert max(map(len, files_of(alone))) <= most


def test_files_are_written_from_first_byte_to_last(
    tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "BAND_BYTES", 512)
    monkeypatch.setattr(ckpt, "PART_BYTES", 101)  # contents in several messages, cut in the middle of an element
    also = {"note": "päd → ✓", "empty": np.zeros((0, 3), np.float32), "step": np.array(7, np.int32)}
    root = write_ranks(tmp_path / "src", FULL, split(8, 0), "ckpt", also=also)
    plan = reshard.plan(reshard.open(root, strategy=split(8, 0)), split(6, 1))
    plan.run(tmp_path / "by_tensor")
    for drop_cache in (False, True):
        faults.clear()
        plan.run(tmp_path / "by_file", partition="file", threads=3, restart=True, drop_cache=drop_cache)
        assert tree(tmp_path / "by_file") == tree(tmp_path / "by_tensor")
        written: dict[str, list[tuple[int, int]]] = {}
        for call in faults.of("write_at"):
            written.setdefault(call.path, []).append((call.offset, call.nbytes))
        assert len(written) == 6
        for pieces in written.values():
            assert len(pieces) > 30
            assert [offset for offset, _ in pieces] == [sum(n for _, n in pieces[:i]) for i in range(len(pieces))]


def test_what_reads_the_same_bytes_is_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = by_file(tmp_path / "along", split(8, 0), split(4, 0))
    assert files_of(plan) == ((0,), (1,), (2,), (3,))  # they share nothing
    assert plan.stats.read_amplification == 1
    plan = by_file(tmp_path / "across", split(8, 0), split(4, 1))
    assert files_of(plan) == ((0, 1, 2, 3),)  # all of them need all rows
    assert plan.stats.read_amplification == 1
    plan = by_file(tmp_path / "thirds", split(4, 1), split(6, 1))
    assert files_of(plan) == ((0, 1, 2), (3, 4, 5))  # two of four columns are cut into three
    assert plan.stats.read_amplification == 1
    monkeypatch.setattr(partition, "FILES_AT_ONCE", 2)
    plan = by_file(tmp_path / "pairs", split(8, 0), split(4, 1))
    assert len(files_of(plan)) == 2
    assert plan.stats.read_amplification == 2


def test_small_replicas_do_not_put_files_together(tmp_path: Path) -> None:
    """Every rank has the norms; that is read again for each, and no reason to write all files in one task."""
    full = {**FULL, "norm": FULL["w"][0]}
    layouts = {rank: Strategy.of({**{n: Layout.of([rank], [0, -1]) for n in FULL}, "norm": Layout.of([rank], [-1])})
               for rank in (8, 4)}  # fmt: skip
    source = reshard.open(write_ranks(tmp_path / "src", full, layouts[8]), strategy=layouts[8])
    plan = partitioned(reshard.plan(source, layouts[4])._record, "file", str(tmp_path))
    assert len(files_of(plan)) == 4
    assert plan.stats.bytes_read == plan.stats.bytes_needed + 3 * 48 * 4
    assert reshard.Plan(plan).run(tmp_path / "out").bytes_read == plan.stats.bytes_read


def test_sets_and_links(tmp_path: Path) -> None:
    source = reshard.open(write_ranks(tmp_path / "src", FULL, split(8, 0)), strategy=split(8, 0))
    for name, plan in {
        "set": reshard.plan(source, to="mindspore", max_shard_size=5000),
    }.items():
        plan.run(tmp_path / name / "by_tensor")
        plan.run(tmp_path / name / "by_file", partition="file")
        assert tree(tmp_path / name / "by_file") == tree(tmp_path / name / "by_tensor")


ROWS = {"z": (1, 2, 1), "a": (2, 0, 2), "y": (0, 4, 0), "x": (0, 0, 4)}
SPLIT = Strategy.of({name: Layout.of([3], [0], param_split_shape=rows) for name, rows in ROWS.items()})
NO_ROWS = {name: np.arange(4, dtype=np.float32) + 10 * number for number, name in enumerate(ROWS)}


def block(name: str, rank: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    begin = sum(ROWS[name][:rank])
    return NO_ROWS[name][begin : begin + ROWS[name][rank]]


@pytest.mark.parametrize("partition", ["tensor", "file"])
@pytest.mark.parametrize("format", ["safetensors", "ckpt"])
def test_a_rank_may_hold_no_row(tmp_path: Path, partition: str, format: str) -> None:
    whole = reshard.open(write_file(tmp_path / "whole.safetensors", NO_ROWS))
    split = reshard.plan(whole, SPLIT, to=format)
    report = split.run(tmp_path / "split", partition=partition)
    assert report.bytes_read == report.bytes_written == split.stats.bytes_read == 64
    for rank in range(3):
        (path,) = (tmp_path / "split" / f"rank_{rank}").iterdir()
        assert {n: content for n, (_, _, content) in helpers.read_rank_file(path).items()} == {
            name: block(name, rank).tobytes() for name in ROWS
        }
    back = reshard.open(tmp_path / "split", strategy=SPLIT)
    reshard.plan(back, to="safetensors").run(tmp_path / "back", partition=partition)
    found = helpers.read_rank_file(tmp_path / "back" / "rank_0" / "checkpoint_0.safetensors")
    assert {name: content for name, (_, _, content) in found.items()} == {n: a.tobytes() for n, a in NO_ROWS.items()}
    assert not reshard.verify(tmp_path / "split", SPLIT, against=tmp_path / "whole.safetensors").differences


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
def test_a_tensor_without_elements(tmp_path: Path, ranks: list[int]) -> None:
    full = {"e": np.zeros((0, 4), np.float32), "w": np.arange(4, dtype=np.float32)}
    target = Strategy.of({"e": Layout.of([2], [-1, 0]), "w": Layout.of([2], [0])})
    plan = reshard.plan(reshard.open(write_file(tmp_path / "whole.safetensors", full)), target, ranks=ranks)
    plan.run(tmp_path / "out")
    for rank in ranks:
        found = helpers.read_rank_file(tmp_path / "out" / f"rank_{rank}" / f"checkpoint_{rank}.safetensors")
        assert {name: shape for name, (_, shape, _) in found.items()} == {"e": (0, 2), "w": (2,)}
    assert plan.run(tmp_path / "out").finished == len(ranks)


def test_it_is_not_lost_with_a_rank_that_had_none_of_it(tmp_path: Path) -> None:
    split = Strategy.of({"e": Layout.of([2], [-1, 0]), "w": Layout.of([2], [-1])})
    write_file(
        tmp_path / "src" / "rank_1" / "checkpoint_1.safetensors",
        {"e": np.zeros((0, 2), np.float32), "w": np.arange(4, dtype=np.float32)},
    )
    plan = reshard.plan(reshard.open(tmp_path / "src", strategy=split, partial=True))
    plan.run(tmp_path / "out")
    assert set(helpers.read_rank_file(tmp_path / "out" / "rank_0" / "checkpoint_0.safetensors")) == {"e", "w"}


def carry_out(recipe: Recipe, axis: int, cuts: list[int]) -> list[np.ndarray]:
    """Do with numpy what a recipe says, segment by segment, counting how often each element is written."""
    whole = np.arange(1, prod(recipe.shape) + 1).reshape(recipe.shape)
    sources = [whole[block.within(Block.whole(recipe.shape))].ravel() for block in recipe.sources]
    targets = [np.zeros(block.size, int) for block in recipe.targets]
    written = [np.zeros(block.size, int) for block in recipe.targets]
    for start, stop in itertools.pairwise(cuts):
        for segment in recipe.segments(axis, start, stop):
            rows, columns = segment.stop - segment.start, segment.columns
            read = [
                sources[number][offset : offset + rows * prod(shape)].reshape(rows, *shape)
                for number, offset, shape in zip(
                    columns.sources, segment.source_offsets, columns.source_shapes, strict=True
                )
            ]
            for place, number in enumerate(columns.targets):
                shape = (rows, *columns.target_shapes[place])
                made = np.zeros(shape, int)
                for part in columns.parts[place]:
                    made[part.target_slices or ...] = read[part.source][part.source_slices or ...]
                offset = segment.target_offsets[place]
                targets[number][offset : offset + made.size] = made.ravel()
                written[number][offset : offset + made.size] += 1
    assert all((count == 1).all() for count in written)
    return [content.reshape(block.shape) for content, block in zip(targets, recipe.targets, strict=True)]


def test_a_long_row_is_banded_along_a_later_axis() -> None:
    recipe = Recipe.of((3, 4, 5), [Block.whole((3, 4, 5))], [Block((1, 1, 0), (3, 3, 5))])
    assert recipe.axis(most_elements=19) == 1
    assert recipe.rows(1) == 12
    assert [(s.start, s.stop) for s in recipe.segments(1, 0, 12)] == [(5, 7), (9, 11)]


def test_rows_that_no_target_needs_are_not_read() -> None:
    recipe = Recipe.of((8,), [Block((0,), (4,)), Block((4,), (8,))], [Block((1,), (3,))])
    assert recipe.elements_read(0) == 2


def test_scalars_and_empty_tensors() -> None:
    scalar = Recipe.of((), [Block((), ())], [Block((), ())])
    assert scalar.elements_read(0) == 1
    empty = Recipe.of((0, 4), [Block.whole((0, 4))], [Block.whole((0, 4))])
    assert list(empty.segments(0, 0, empty.rows(0))) == []
    hollow = Recipe.of((4, 0), [Block.whole((4, 0))], [Block.whole((4, 0))])
    assert list(hollow.segments(0, 0, 4)) == []


def test_blocks_that_overlap_are_no_grid() -> None:
    assert not is_grid((2, 2), [Block((0, 0), (2, 1)), Block((0, 0), (1, 2))])
    assert not is_grid((2,), [Block((0,), (2,)), Block((0,), (2,))])


@given(st.data())
def test_any_grid_becomes_any_other(data: st.DataObject) -> None:
    before, shape = data.draw(laid_out())
    after = data.draw(layouts(ndim=len(shape)))
    shape = tuple(a * b for a, b in zip(shape, data.draw(shapes([after])), strict=True))
    target_blocks = after.grid(shape).blocks
    wanted = data.draw(st.lists(st.sampled_from(target_blocks), min_size=1, unique=True) | st.just(list(target_blocks)))
    recipe = Recipe.of(shape, before.grid(shape).blocks, wanted)
    axis = data.draw(st.integers(0, len(shape) - 1))
    rows = recipe.rows(axis)
    cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=4))})
    whole = np.arange(1, prod(shape) + 1).reshape(shape)
    for block, made in zip(wanted, carry_out(recipe, axis, cuts), strict=True):
        assert np.array_equal(made, whole[block.within(Block.whole(shape))])
    needed = prod(shape) if is_grid(shape, wanted) else sum(block.size for block in wanted)
    assert needed <= recipe.elements_read(axis) <= prod(shape)
