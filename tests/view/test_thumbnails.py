"""Thumbnails of cuts in tables, two strategies side by side, and the names of boxes that are of no rank."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest
from checkpoints import numbers
from test_show import large

import reshard
from reshard import Layout, Strategy
from reshard.view import flow

if TYPE_CHECKING:
    from pathlib import Path

ROWS, COLUMNS, WHOLE = Layout.of([4], [0, -1]), Layout.of([4], [-1, 0]), Layout.of([4], [-1])
MESH = Strategy.of({"up": ROWS, "down": COLUMNS, "norm": WHOLE})


@pytest.fixture
def dcp(tmp_path: Path) -> reshard.Checkpoint:
    reshard.write(numbers({"up": (8, 4), "down": (4, 8), "norm": (4,)}), tmp_path / "dcp", format="dcp", strategy=MESH)
    (tmp_path / "dcp" / ".reshard").rename(tmp_path / "ledger")
    return reshard.open(tmp_path / "dcp")


def parsed(shown: Any) -> ET.Element:
    return ET.fromstring(shown._repr_html_())


def thumbnails(root: ET.Element) -> list[tuple[str, str]]:
    """The title and the symbol of each thumbnail, in order; each symbol is in the page once, and used."""
    symbols = [symbol.get("id", "") for symbol in root.iter("symbol")]
    used = {use.get("href", "")[1:] for use in root.iter("use")}
    used.update(name for data in root.iter("script") for name in re.findall("reshard-[0-9a-f]{12}", data.text or ""))
    found = [
        ("".join(svg.itertext()), svg[1].get("href", "")[1:]) for svg in root.iter("svg") if svg.get("class") == "cut"
    ]
    assert len(symbols) == len(set(symbols))
    assert used == set(symbols)
    return found


def test_rows_with_equal_cuts_share_a_drawing() -> None:
    found = thumbnails(parsed(reshard.Checkpoint(large(400, 64))))
    assert Counter(title for title, _ in found) == {"rows / 64": 5, "columns / 64": 5}
    assert len({name for _, name in found}) == 2


def test_each_row_of_a_checkpoint_and_of_a_plan_has_its_cut(dcp: reshard.Checkpoint) -> None:
    titles = [title for title, _ in thumbnails(parsed(dcp))]
    assert titles == ["rows / 4", "columns / 4", "whole"]
    target = Strategy.of({"up": COLUMNS, "down": COLUMNS, "norm": WHOLE})
    moved = thumbnails(parsed(reshard.plan(dcp, target)))
    blocks = "1 x 4 blocks, each on 1 rank"
    assert [title for title, _ in moved] == ["rows / 4", blocks, "columns / 4", blocks, "whole", "whole on 4 ranks"]
    (_, up), (_, up_target), (_, down), (_, down_target), *_ = moved
    assert up != up_target
    assert up_target == down == down_target


def test_two_strategies_stand_side_by_side() -> None:
    other = Strategy.of({"up": COLUMNS, "down": Layout.of([2, 2], [-1, (1, 0)]), "bias": WHOLE})
    diff = MESH.diff(other)
    assert not diff.same
    root = parsed(diff)
    assert [title for title, _ in thumbnails(root)] == ["rows / 4", "columns / 4", "columns / 4", "columns / 4"]
    assert [row.text for row in root.iter("code")] == ["norm", "bias"]
    assert not thumbnails(parsed(MESH.diff(MESH)))
    assert MESH.diff(MESH).same


def test_files_that_are_of_no_rank_have_their_names(dcp: reshard.Checkpoint, tmp_path: Path) -> None:
    plan = reshard.plan(dcp, files=reshard.HuggingFaceSet(max_shard_size=130))
    drawn = flow._of_plan(plan._record)
    assert [node.name for node in drawn.sources] == [f"rank {rank}" for rank in range(4)]
    assert [node.name for node in drawn.targets] == [
        "model-00001-of-00003", "model-00002-of-00003", "model-00003-of-00003", "model.safetensors.index.json",
    ]  # fmt: skip
    assert len(set(flow._fills(drawn.targets))) == 1
    plan.run(tmp_path / "set")
    back = flow._of_plan(reshard.plan(reshard.open(tmp_path / "set"), MESH)._record)
    assert sorted(node.name for node in back.sources) == [f"model-0000{n}-of-00003" for n in (1, 2, 3)]
    assert [node.name for node in back.targets] == [f"rank {rank}" for rank in range(4)]


def test_files_of_one_rank_are_told_apart() -> None:
    files = [flow._DrawnFile(rank, f"{rank}_{part}", "x") for rank in (0, 1) for part in "ab"]
    assert [node.name for node in flow._files([0, 1, 2, 3], files, Counter(), "-")] == ["0_a", "0_b", "1_a", "1_b"]
    assert [node.name for node in flow._files([0, 0, 1, 1], files, Counter(), "-")] == ["rank 0", "rank 1"]
