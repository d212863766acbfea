"""`Checkpoint.rank`: the blocks in the files of one rank, as a table and as arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoints import blocks, numbers, write_ranks
from refusals import refused

import reshard
from reshard import Layout, Strategy
from reshard.core.layout.block import Block
from reshard.core.model.entries import Extent
from reshard.errors import UsageError
from reshard.view.ranks import stored_part

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = {"a.w": (8, 6), "b.w": (4, 4), "n": (6,)}
STRATEGY = Strategy.of(
    {"a.w": Layout.of([2, 2], [1, 0]), "b.w": Layout.of([2, 2], [-1, 0]), "n": Layout.of([2, 2], [-1])}
)
FULL = numbers(SHAPES)


@pytest.fixture
def source(tmp_path: Path) -> reshard.Checkpoint:
    return reshard.open(write_ranks(tmp_path / "src", FULL, STRATEGY), strategy=STRATEGY)


@pytest.mark.parametrize("rank", range(4))
def test_arrays_are_the_blocks_of_the_rank(source: reshard.Checkpoint, rank: int) -> None:
    expected = blocks(FULL, STRATEGY, rank)
    arrays = source.rank(rank)
    assert set(arrays) == set(expected)
    for name, array in arrays.items():
        assert np.array_equal(array.compute(), expected[name]), name
    planned = reshard.plan(source, STRATEGY).rank(rank)
    assert {name: array.shape for name, array in planned.items()} == {n: array.shape for n, array in arrays.items()}


def test_a_rank_reads_its_own_copy(source: reshard.Checkpoint, tmp_path: Path) -> None:
    """Copies that differ are told apart, which reading the first copy could not."""
    path = next((tmp_path / "src" / "rank_3").iterdir())
    content = bytearray(path.read_bytes())
    at = content.index(FULL["n"].tobytes())
    content[at] ^= 1
    path.write_bytes(content)
    opened = reshard.open(tmp_path / "src", strategy=STRATEGY, contents=False)
    values = [opened.rank(rank)["n"].compute().tobytes() for rank in range(4)]
    assert values[:3] == [FULL["n"].tobytes()] * 3
    assert values[3] != values[0]


def test_a_table_shows_the_blocks(source: reshard.Checkpoint) -> None:
    arrays = source.rank(3)
    text = str(arrays)
    for cell in ("a.w", "[4, 3]", "[4:8, 3:6]", "whole", "rank 3"):
        assert cell in text
        assert cell in arrays._repr_html_() or cell == "rank 3"
    assert "\n" not in repr(arrays)
    planned = reshard.plan(source).rank(0)
    assert "[8, 6]" in str(planned)
    assert "whole" in planned._repr_html_()


def test_a_rank_without_files_is_refused(source: reshard.Checkpoint) -> None:
    with refused(UsageError, "no-such-rank", "7", "0-3"):
        source.rank(7)


def test_parts_that_are_no_block_are_one_flat_array(source: reshard.Checkpoint) -> None:
    """As in ZeRO's partitions: a range of elements in row-major order."""
    record = source._record
    tensor = record.tensors["a.w"]
    extent = next(replica.extent(tensor.runs) for replica in tensor.sharding.replicas[0])  # rows 0-3, columns 0-2
    (run,) = extent.runs
    head = Block((0, 1), (1, 3)), Extent(extent.file, ((run[0] + 4, 8),))
    rest = Block((1, 0), (3, 3)), Extent(extent.file, ((run[0] + 12, 24),))
    part = stored_part(record, tensor, (head, rest))
    assert part.make().compute().tobytes() == np.concatenate(
        [FULL["a.w"][0, 1:3], FULL["a.w"][1:3, :3].ravel()]
    ).tobytes()  # fmt: skip
    assert part[:4] == ("float32", (8,), 32, "[0:1, 1:3], [1:3, 0:3]")


@pytest.mark.parametrize("rank", range(4))
def test_computed_tensors_are_those_of_their_ranks(source: reshard.Checkpoint, rank: int) -> None:
    """A scaled tensor has the blocks that it had; an assigned array is in no file, and every rank lists it."""
    expected = blocks(FULL, STRATEGY, rank)
    scaled = source.scale("b.w", factor=2).rank(rank)
    assert set(scaled) == set(FULL)
    assert np.array_equal(scaled["b.w"].compute(), 2 * expected["b.w"])
    arrays = {"b.w": np.zeros((2, 3), "f4"), "new": np.arange(5), "n": np.ones(6, "f4"), "a.w": np.ones((8, 6), "f4")}
    assigned = source.assign(arrays).rank(rank)
    assert set(assigned) == set(arrays)
    for name, value in arrays.items():
        assert np.array_equal(assigned[name].compute(), value), name
