"""Text for people: folded names, escaped names, tables that stay quick."""

from __future__ import annotations

import itertools
import re
import time
from math import prod

import pytest
from generators import laid_out
from hypothesis import given
from hypothesis import strategies as st

from reshard.core.layout.layout import Layout
from reshard.core.model.checkpoint import Checkpoint, Sharding, SourceFile, Tensor, TensorSpec
from reshard.core.model.entries import Entry, FileIndex, Replica
from reshard.dtypes import BY_NAME
from reshard.errors import printable
from reshard.strategy.names import group_names
from reshard.strategy.strategy import Strategy
from reshard.view.tables import checkpoint_text, rank_files_data, rank_files_text, rank_parts
from reshard.view.text import bytes_text, table_lines
from reshard.view.words import layout_words

FLOAT32 = BY_NAME["float32"]


def expand(folded: str) -> list[str]:
    """The names that a folded one stands for; they hold no braces of their own."""
    parts = re.split(r"\{([0-9,-]+)\}", folded)
    choices = [[text] for text in parts]
    for place in range(1, len(parts), 2):
        choices[place] = []
        for run in parts[place].split(","):
            first, _, last = run.partition("-")
            choices[place] += [str(n) for n in range(int(first), int(last or first) + 1)]
    return ["".join(choice) for choice in itertools.product(*choices)]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_table_is_not_wider_than_it_may_be_and_has_all_numbers(width: int) -> None:
    header = ("tensor", "bytes", "layout", "shards x replicas")
    rows = [("n" * 300, "1,024.5 GB", "stage 0: [2, 2, 2] map [-1, 1], stage 1: [2, 2, 2] map [1, -1]", "1024 x 8")]
    lines = table_lines(header, rows, width, below=2)
    assert max(map(len, lines)) <= width
    assert " ".join(" ".join(lines).split()).endswith(" ".join(rows[0][1:]))


def test_a_name_that_is_longer_than_others_does_not_widen_their_rows() -> None:
    lines = table_lines(("tensor", "bytes"), [("n" * 4000, "1 B"), ("m", "2 B")])
    assert [len(line) for line in lines] == [263, 4000 + 7, 263]


@given(
    st.sets(
        st.tuples(st.sampled_from("ab"), st.integers(0, 4), st.integers(0, 3)).map(lambda t: f"{t[0]}.{t[1]}.w{t[2]}"),
        max_size=25,
    )
)
def test_folding_loses_nothing_and_makes_nothing_up(names: set[str]) -> None:
    rows = group_names((name, None) for name in sorted(names))
    assert sorted(name for row, _, _ in rows for name in expand(row)) == sorted(names)
    assert [len(expand(row)) for row, _, _ in rows] == [count for _, _, count in rows]


@pytest.mark.parametrize("name", ["\x1b[2J", "a\nb", "\u202eltr", "\x9b31m", "\udcff", "\x00"])
def test_what_a_terminal_would_obey_is_escaped(name: str) -> None:
    text = printable(f"w{name}")
    assert text.isprintable()
    assert text.startswith("w\\" if name != "a\nb" else "wa\\n")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (14_924, "14.9 kB"), (999_950, "1.0 MB"), (2_147_483_648, "2.1 GB")],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert bytes_text(nbytes) == text


def test_a_layout_that_cannot_be_is_shown_with_the_reason() -> None:
    text = layout_words(Layout.of([4], [-1], 3, opt_weight_shard_step=1))
    assert "not possible" in text
    assert "3 does not divide the 4 devices" in text


@given(laid_out())
def test_words_count_the_blocks_and_the_copies(case: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = case
    grid = layout.grid(shape)
    words, _, copies = layout_words(layout).partition(" × ")
    ways = [int(way) for way in re.findall(r"/ (\d+)", words)]
    assert prod(ways) == len(grid.blocks)
    assert int(copies.split()[0] if copies else 1) == len(grid.ranks[0])


def large(tensors: int, ranks: int) -> Checkpoint:
    """A checkpoint of many tensors, as `open` would make it, without files."""
    rows, columns = Layout.of([ranks], [0, -1]), Layout.of([ranks], [-1, 0])
    layouts = {f"h.{i // 10}.w{'abcdefghij'[i % 10]}": rows if i % 2 else columns for i in range(tensors)}
    strategy = Strategy.of(layouts)
    grids = {layout: layout.grid((ranks, ranks)) for layout in (rows, columns)}
    shardings = {
        layout: Sharding(grid.blocks, tuple(tuple(Replica(rank, 0) for rank in some) for some in grid.ranks))
        for layout, grid in grids.items()
    }
    index = FileIndex("ckpt", {name: Entry(FLOAT32, (1, ranks), ((0, 4 * ranks),)) for name in layouts})
    files = tuple(SourceFile(f"rank_{rank}/x.ckpt", 100, 0, index) for rank in range(ranks))
    found = {
        name: Tensor(TensorSpec(name, FLOAT32, (ranks, ranks)), shardings[layout], (((0, 4 * ranks),),))
        for name, layout in layouts.items()
    }
    return Checkpoint("big", found, files, tuple(range(ranks)), strategy)


def test_ten_thousand_tensors_are_quick_and_short() -> None:
    checkpoint = large(10_000, 64)
    began = time.process_time()
    text = checkpoint_text(checkpoint)
    files = rank_files_text(rank_parts("big", checkpoint.files, checkpoint.ranks))
    seconds = time.process_time() - began
    assert len(text.splitlines()) == 18
    assert "h.{0-999}.wa" in text
    assert "ranks 0-63: each 10,000 tensors" in files
    assert seconds < 2, "measured: 0.15 s"


def test_ranks_with_different_files_are_shown_apart() -> None:
    one = FileIndex("ckpt", {"w": Entry(FLOAT32, (2, 4), ((0, 32),))})
    other = FileIndex("ckpt", {"w": Entry(FLOAT32, (3, 4), ((0, 48),))}, header_id=1)
    files = tuple(SourceFile(f"{n}", 10, 0, index) for n, index in enumerate([one, other, one, one]))
    parts = rank_parts("src", files, (0, 1, 2, 3))
    text = rank_files_text(parts)
    assert "ranks 0,2-3: each 1 tensor, 32 B" in text
    assert "rank 1: 1 tensor, 48 B" in text
    groups = rank_files_data(parts, [])["groups"]
    assert [group["ranks"] for group in groups] == [[0, 2, 3], [1]]  # type: ignore[attr-defined,index]
