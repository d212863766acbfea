"""Pictures of cuts in block characters: as wide as the terminal, in colour or in ASCII."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from checkpoints import numbers
from generators import laid_out
from hypothesis import given
from hypothesis import strategies as st
from refusals import failed
from test_show import large

import reshard
from reshard import Layout, Strategy
from reshard.view.pictures.blocks import DrawnSide
from reshard.view.pictures.characters import Canvas, block_picture, picture_text

if TYPE_CHECKING:
    from pathlib import Path


@given(laid_out(), st.integers(20, 130), st.booleans())
def test_a_picture_is_not_wider_than_the_terminal(
    case: tuple[Layout, tuple[int, ...]], width: int, indices: bool
) -> None:
    layout, shape = case
    grid = layout.grid(shape)
    lines = block_picture(DrawnSide("", grid.shape, grid.blocks, grid.ranks), Canvas(width), indices=indices)
    assert all(len(line) <= width for line in lines)
    assert len(lines) <= 2 + 2 * 16


def test_colours_do_not_change_the_text() -> None:
    def paint(text: str, _background: int, _ink: int) -> str:
        return text

    checkpoint = large(20, 8)
    assert picture_text(checkpoint, Canvas(60, paint)) == picture_text(checkpoint, Canvas(60))


def test_tensors_that_are_cut_alike_share_a_picture() -> None:
    text = picture_text(large(10_000, 64), Canvas(60))
    assert text.count("rows / 64") == text.count("columns / 64") == 1
    assert "h.{0-999}.wa" in text
    assert len(text.splitlines()) < 40


def test_ascii_only() -> None:
    text = picture_text(large(20, 8), Canvas(60, ascii=True))
    assert text.isascii()
    assert ".. 0 ." in text
    assert "## 1 #" in text
    grid = Layout.of([64, 16], [1, 0]).grid((64, 32))
    assert "\n".join(
        block_picture(DrawnSide("", grid.shape, grid.blocks, grid.ranks), Canvas(60, ascii=True))
    ).isascii()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rows = Layout.of([2], [0, -1])
    reshard.write(
        numbers({"up": (4, 4), "down": (4, 6)}),
        tmp_path / "src",
        target_strategy=Strategy.of({"up": rows, "down": rows}),
    )
    return tmp_path / "src"


def inspected(source: Path, *options: str, **environment: str) -> bytes:
    command = [sys.executable, "-m", "reshard", "inspect", str(source), "--picture", *options]
    kept = {key: value for key, value in os.environ.items() if key not in {"NO_COLOR", "COLUMNS"}}
    return subprocess.run(command, env=kept | environment, check=True, capture_output=True).stdout


def test_without_a_name_all_tensors_are_drawn(source: Path) -> None:
    both = inspected(source, PYTHONIOENCODING="utf-8").decode()
    assert both.count("rows / 2") == 1
    assert "  up\n" in both
    assert "  down\n" in both
    assert "  0-1  ░░ 0 ░" in inspected(source, "--match", "down", PYTHONIOENCODING="utf-8").decode()
    assert inspected(source, "down", PYTHONIOENCODING="utf-8").decode().startswith("down  [4, 6]  float32  rows / 2\n")


def test_an_output_without_block_characters_gets_ascii(source: Path) -> None:
    assert b".. 0 ." in inspected(source, PYTHONIOENCODING="ascii")


def test_colours_only_where_they_are_wanted(source: Path) -> None:
    assert b"\x1b" not in inspected(source, PYTHONIOENCODING="utf-8")
    assert b"\x1b[48;5;110m" in inspected(source, "--color", "always", PYTHONIOENCODING="utf-8")
    assert b"\x1b" not in inspected(source, "--color", "never", PYTHONIOENCODING="utf-8")


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    reshard.write(numbers({"w\x1b[2J\u202e": (2, 2)}), tmp_path / "src.safetensors")
    assert picture_text(reshard.open(tmp_path / "src.safetensors")._record, Canvas()).replace("\n", "").isprintable()


def test_pictures_are_not_data(source: Path) -> None:
    failed(2, "bad-options", "inspect", source, "--picture", "--json")
    failed(2, "unknown-tensor", "inspect", source, "--picture", "upp", places=("upp",))
