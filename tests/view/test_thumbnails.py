"""Thumbnails of cuts in tables, two strategies side by side, and the names of boxes that are of no rank."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest
from checkpoints import numbers
from commands import done
from test_show import large

import reshard
from reshard import Layout, Strategy
from reshard.view.pictures import flow
from reshard.view.svg import GREY, rank_colour

if TYPE_CHECKING:
    from pathlib import Path

ROWS, COLUMNS, WHOLE = Layout.of([4], [0, -1]), Layout.of([4], [-1, 0]), Layout.of([4], [-1])
MESH = Strategy.of({"up": ROWS, "down": COLUMNS, "norm": WHOLE})


@pytest.fixture
def dcp(tmp_path: Path) -> reshard.Checkpoint:
    reshard.write(
        numbers({"up": (8, 4), "down": (4, 8), "norm": (4,)}), tmp_path / "dcp", to="dcp", target_strategy=MESH
    )
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
    plan = reshard.plan(dcp, to="hf", max_shard_size=130)
    drawn = flow.flow_of(plan._record)
    assert [node.name for node in drawn.sources] == [f"rank {rank}" for rank in range(4)]
    assert [node.name for node in drawn.targets] == [
        "model-00001-of-00003", "model-00002-of-00003", "model-00003-of-00003", "model.safetensors.index.json",
    ]  # fmt: skip
    assert len({box.fill for box in drawn.targets}) == 1
    plan.run(tmp_path / "set")
    back = flow.flow_of(reshard.plan(reshard.open(tmp_path / "set"), MESH)._record)
    assert sorted(node.name for node in back.sources) == [f"model-0000{n}-of-00003" for n in (1, 2, 3)]
    assert [node.name for node in back.targets] == [f"rank {rank}" for rank in range(4)]


def test_files_of_one_rank_are_told_apart() -> None:
    files = [flow.DrawnFile(rank, f"{rank}_{part}", "x") for rank in range(16) for part in "ab"]
    assert [box.name for box in flow.file_boxes(files[:4], Counter(), 0, "-")] == ["0_a", "0_b", "1_a", "1_b"]
    assert [box.name for box in flow.file_boxes(files, Counter(), 0, "-")] == [f"rank {rank}" for rank in range(16)]


# --- Pictures and tables of checkpoints that are not plain files of ranks: ZeRO-3, Orbax, averages ---

WEIGHT = "embed.weight"


@pytest.fixture
def zero3(mindspore_data: Path) -> reshard.Checkpoint:
    """Three ranks, each with a range of the elements of every master; no file has a 16-bit weight."""
    return reshard.open(mindspore_data / "deepspeed/s3_dp3_bf16/checkpoint")


def fills(markup: str) -> set[str]:
    """The fills of the rectangles of a picture."""
    return {fill for fill in re.findall(r'<rect[^>]* fill="(#\w+)"', markup) if fill != "none"}


def test_weights_that_zero_3_computes_are_on_no_rank(zero3: reshard.Checkpoint) -> None:
    listed = [set(zero3.rank(rank)) for rank in range(3)]
    assert all(f"fp32.{WEIGHT}" in names and WEIGHT not in names for names in listed)
    assert fills(zero3.picture(WEIGHT).svg()) == {GREY[0]}
    assert fills(zero3.picture(f"fp32.{WEIGHT}").svg()) == {rank_colour(rank)[0] for rank in range(3)}
    text = done("inspect", zero3.root, "--match", WEIGHT, "--picture").stdout
    assert "computed from 3 ranks" in text
    assert not re.search(r"rank 2|░ 2 ░", text)


def test_a_plan_shows_computed_weights_beside_tensors_of_the_same_files(zero3: reshard.Checkpoint) -> None:
    """Buffers are read from the file of rank 0, from which weights are computed as well."""
    plan = reshard.plan(zero3.sel(kind="weights"), to="safetensors")
    page = plan._repr_html_()
    assert {GREY[0], rank_colour(0)[0]} <= fills(page)
    assert rank_colour(2)[0] not in fills(plan.picture(WEIGHT).svg())
    assert f"<code>exp_avg.{WEIGHT}</code>" in page  # among what is left out


def test_orbax_shows_the_devices_of_the_training(mindspore_data: Path) -> None:
    page = reshard.open(mindspore_data / "orbax/mesh4x2_ocdbt_zarr2/checkpoint")._repr_html_()
    assert '<div class="what">devices</div><b>8</b>' in page
    assert '<div class="what">ranks</div>' not in page


def test_values_of_objects_are_not_called_reasons(zero3: reshard.Checkpoint) -> None:
    page = zero3._repr_html_()
    assert "skipped_steps" in page
    assert ">reason<" not in page
