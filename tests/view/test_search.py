"""Search boxes and sortable columns of long tables: all rows are in a page, and its script shows those that match."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from checkpoints import numbers, write_ranks

import reshard
from reshard.view.notebook.search import packed, script

if TYPE_CHECKING:
    from collections.abc import Sequence

HARNESS = Path(__file__).with_name("search_harness.js")
SHAPES = {f"layers.{n}.{part}": (8, 4 * (n + 1)) for n in range(30) for part in ("wq", "wk")} | {"norm": (8,)}
STRATEGY = reshard.Strategy.of(
    {name: reshard.Layout.of([2], [0, -1][: len(shape)]) for name, shape in SHAPES.items()}
)  # fmt: skip

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="no node")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> reshard.Checkpoint:
    root = write_ranks(tmp_path_factory.mktemp("ranks") / "src", numbers(SHAPES), STRATEGY)
    return reshard.open(root, strategy=STRATEGY)


def unpacked(content: str) -> list[list[str]]:
    """The rows of a page's data, as its comment says: templates and the numbers in them."""
    return [
        "".join(part for pair in zip(["", *item.split(",")], parts, strict=False) for part in pair).split("\t")
        for parts, items in json.loads(content)["groups"]
        for item in items.split(";")
    ]


def data_of(shown: Any, number: int = 0) -> list[list[str]]:
    root = ET.fromstring(shown._repr_html_())
    return unpacked([each.text or "" for each in root.iter("script") if each.get("type")][number])


def tree(element: ET.Element) -> list[Any]:
    return [element.tag, element.attrib, element.text or "", [tree(child) for child in element]]


def acted(shown: Any, *steps: tuple[str, str]) -> list[dict[str, Any]]:
    """What a page shows after each step of a user: `type` into the box, `sort` by a title, `open` a row."""
    root = ET.fromstring(shown._repr_html_())
    content = {"page": tree(root), "script": script(), "steps": steps}
    done = subprocess.run(
        ["node", str(HARNESS)], input=json.dumps(content), capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["boxes"] == len([each for each in root.iter("div") if each.get("class") == "find"])
    steps_shown: list[dict[str, Any]] = result["steps"]
    return steps_shown


def names(step: dict[str, Any]) -> list[str]:
    return [row[0] for row in step["rows"]]


# --- the data ---


def test_every_tensor_is_in_the_page(source: reshard.Checkpoint) -> None:
    rows = data_of(source)
    assert {row[0]: row[2] for row in rows} == {name: str(list(shape)) for name, shape in SHAPES.items()}
    moved = data_of(reshard.plan(source, to="hf"))
    assert {row[0] for row in moved} == set(SHAPES)
    assert {row[0]: float(row[2]) for row in data_of(source.stats())}.keys() == set(SHAPES)


@pytest.mark.parametrize(
    "rows",
    [
        [["a.1.b", "[2, 3]"], ["a.01.b", "[2, 3]"], ["a.1.c", ""]],
        [["</script><b>", "&amp;"], ["\u2028 'x' \"y\"", "\x1b[0m"], ["é", "٣"]],
        [["1"], ["2"], ["2"]],
        [["", ""], ["same", "same"], ["same", "same"]],
    ],
)
def test_rows_are_unpacked_as_they_were(rows: Sequence[Sequence[str]]) -> None:
    content = packed([""] * len(rows[0]), rows)
    assert not set("<>&") & set(content)
    shown = [[cell.replace("\x1b", "\\x1b").replace("\u2028", "\\u2028") for cell in row] for row in rows]
    assert sorted(unpacked(content)) == sorted(shown)


# --- the script ---


@needs_node
def test_a_search_shows_tensors_of_folded_layers(source: reshard.Checkpoint) -> None:
    steps = acted(source, ("type", "layers.7. wq"), ("type", "LAYERS.*7*wk"), ("type", "no such"), ("type", ""))
    assert names(steps[0]) == ["layers.7.wq"]
    assert sorted(names(steps[1])) == ["layers.17.wk", "layers.27.wk", "layers.7.wk"]
    assert [names(step) for step in steps[2:]] == [[], []]
    assert [step["still"] for step in steps] == [False, False, False, True]
    assert steps[0]["rows"][0][1:4] == ["float32", "[8, 32]", "1.0 kB"]


@needs_node
def test_columns_are_sorted_by_value(source: reshard.Checkpoint) -> None:
    rising, falling, not_sorted = acted(source, ("sort", "bytes"), ("sort", "bytes"), ("sort", "bytes"))
    sizes = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
    assert [sizes[name] for name in names(rising)] == sorted(sizes.values())
    assert [sizes[name] for name in names(falling)] == sorted(sizes.values(), reverse=True)
    assert (names(not_sorted), not_sorted["still"]) == ([], True)
    by_name, by_shape = acted(source, ("sort", "tensor"), ("sort", "shape"))
    assert names(by_name)[:4] == ["layers.0.wk", "layers.0.wq", "layers.1.wk", "layers.1.wq"]
    assert names(by_shape)[-1].startswith("layers.29.")


@needs_node
def test_a_row_opens_what_to_type(source: reshard.Checkpoint) -> None:
    typed, opened, closed = acted(source, ("type", "layers.3.wq"), ("open", "layers.3.wq"), ("open", "layers.3.wq"))
    assert len(typed["rows"]) == len(closed["rows"]) == 1
    ((text,),) = opened["rows"][1:]
    assert '.picture("layers.3.wq")' in text
    assert '.hist("layers.3.wq")' in text


@needs_node
def test_a_table_of_all_rows_is_searched_where_it_is(tmp_path: Path) -> None:
    for step in range(1, 16):
        reshard.write({"w": np.zeros(step, np.float32)}, tmp_path / f"step-{step}", to="hf")
    runs = reshard.runs(tmp_path)
    found, all_again = acted(runs, ("type", "step-1"), ("type", ""))
    assert sorted(names(found)) == sorted(f"step-{n}" for n in (1, 10, 11, 12, 13, 14, 15))
    assert len(names(all_again)) == 15
    rising, falling = acted(runs, ("sort", "checkpoint"), ("sort", "checkpoint"))
    assert names(rising) == names(falling)[::-1] == [f"step-{n}" for n in range(1, 16)]


# --- without scripts and styles ---


def test_without_styles_there_is_a_text(source: reshard.Checkpoint) -> None:
    shown: list[Any] = [source, source.stats(), source.groups(), source.rank(0), source.hist("norm"), STRATEGY]
    for each in shown:
        root = ET.fromstring(each._repr_html_())
        (text,) = root.findall("pre")
        assert len((text.text or "").splitlines()) >= 1
        assert len(text.text or "") < 20_000
        (style,) = root.iter("style")
        assert re.search(r"\.reshard-text \{ display: none", style.text or "")
        assert root.findall("div")[0].get("hidden") is not None
    assert "layers.{0-29}.wq" in ET.tostring(ET.fromstring(source.groups()._repr_html_()), "unicode")


def test_without_a_script_there_is_no_box_and_all_is_shown(source: reshard.Checkpoint) -> None:
    root = ET.fromstring(source._repr_html_())
    assert not list(root.iter("input"))
    rows = [row for row in root.iter("tr") if any(row.iter("details"))]
    assert sum(int(row[1].text or "") for row in rows) == len(SHAPES)


# --- rows lead to pictures ---


def test_a_row_opens_the_picture_of_its_tensor(source: reshard.Checkpoint) -> None:
    root = ET.fromstring(source.sel("layers.3.wq", "norm")._repr_html_())
    symbols = {each.get("id"): ET.tostring(each, "unicode") for each in root.iter("symbol")}
    rows = [each for each in root.iter("details") if each.find("div/code") is not None]
    assert len(rows) == 2
    for row, name in zip(sorted(rows, key=lambda row: "wq" not in "".join(row.itertext())), ("layers.3.wq", "norm"),
                         strict=True):  # fmt: skip
        (svg,) = [each for each in row[1] if each.tag == "svg"]
        drawn = symbols[svg[0].get("href", "")[1:]]
        picture = ET.tostring(ET.fromstring(f"<symbol>{source.picture(name).drawing}</symbol>"), "unicode")
        assert drawn.partition(">")[2] == picture.partition(">")[2]
        assert f'.hist("{name}")' in "".join(row.itertext())


def test_statistics_of_each_tensor_are_in_the_page(tmp_path: Path) -> None:
    arrays = {f"layers.{n}.w": np.full((2, 2), n, np.float32) for n in range(40)}
    reshard.write(arrays, tmp_path / "hf")
    stats = reshard.open(tmp_path / "hf").stats()
    assert [[row[0], float(row[2])] for row in data_of(stats)] == [[name, arrays[name].max()] for name in stats.tensors]
    reshard.write({name: each + 1 for name, each in arrays.items()}, tmp_path / "other")
    diff = reshard.diff(tmp_path / "hf", tmp_path / "other")
    assert {row[0] for row in data_of(diff)} == set(arrays)
