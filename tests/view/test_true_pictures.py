"""Pictures and tables of checkpoints that are not plain files of ranks: ZeRO-3, Orbax, averages."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from commands import done

import reshard
from reshard.view.svg import GREY, rank_colour

if TYPE_CHECKING:
    from pathlib import Path

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
    plan = reshard.plan(zero3.sel(kind="weights"), format="safetensors")
    page = plan._repr_html_()
    assert {GREY[0], rank_colour(0)[0]} <= fills(page)
    assert rank_colour(2)[0] not in fills(plan.picture(WEIGHT).svg())
    assert f"<code>exp_avg.{WEIGHT}</code>" in page  # among what is left out


def test_orbax_shows_the_devices_of_the_training(mindspore_data: Path) -> None:
    page = reshard.open(mindspore_data / "orbax/mesh4x2_ocdbt_zarr2/checkpoint")._repr_html_()
    assert '<div class="what">devices</div><b>8</b>' in page
    assert '<div class="what">ranks</div>' not in page
