"""What notebooks show: well-formed, harmless whatever the names are, small whatever the size, and true."""

from __future__ import annotations

import html
import json
import re
import time
import xml.etree.ElementTree as ET
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from safetensors.numpy import save_file
from test_show import large

import reshard
from reshard.core.layout.block import Block
from reshard.core.layout.layout import Layout
from reshard.core.model.checkpoint import Checkpoint, Shard, SourceFile, Tensor, TensorSpec
from reshard.core.model.entries import Entry, Extent, FileIndex
from reshard.core.run.graph import Graph
from reshard.core.run.settings import Receipt, Report, TaskOptions
from reshard.core.verify.difference import Difference
from reshard.core.verify.verification import Comparison, Counts, Verification
from reshard.dtypes import BY_NAME
from reshard.errors import MissingNameError
from reshard.strategy.strategy import Strategy
from reshard.view.notebook.search import script
from reshard.view.pictures import flow
from reshard.view.pictures.blocks import DrawnSide
from reshard.view.pictures.pens import draw
from reshard.view.svg import Markup, rank_colour, tag

if TYPE_CHECKING:
    from pathlib import Path


MOST = 600_000
HOSTILE = "<script>alert(1)</script>\"'&amp; onload=x \x1b[2J\u202e"
ELEMENTS = """
div span b i style details summary table thead tbody tr th td ul li code pre svg symbol use title g rect path text
script
""".split()
ATTRIBUTES = """
class id href style title open hidden type viewBox width height role x y rx d fill stroke stroke-width stroke-opacity
stroke-dasharray stroke-linejoin paint-order fill-opacity opacity pointer-events
font-size font-weight text-anchor transform vector-effect
""".split()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo") / "reshard-demo"
    reshard.demo("mindspore", directory)
    return directory


@pytest.fixture(scope="module")
def source(demo: Path) -> reshard.Checkpoint:
    return reshard.open(demo / "src_checkpoints", strategy=demo / "src_strategy.ckpt")


@pytest.fixture(scope="module")
def target(demo: Path) -> Strategy:
    return reshard.read_strategy(demo / "dst_strategy.ckpt")


@pytest.fixture(scope="module")
def plan(source: reshard.Checkpoint, target: Strategy) -> reshard.Plan:
    return reshard.plan(source, target, to="safetensors")


def parsed(shown: Any) -> ET.Element:
    """What a notebook shows of something, compared with all that its HTML promises."""
    text = reshard.Checkpoint(shown)._repr_html_() if isinstance(shown, Checkpoint) else shown._repr_html_()
    root = ET.fromstring(text)  # no entity but those of XML, every element closed, every attribute quoted
    assert (root.tag, root.get("class")) == ("div", "reshard-output")
    assert [(each.tag, each.get("class")) for each in root][1:3] == [("pre", "reshard-text"), ("div", "reshard")]
    for element in root.iter():
        assert element.tag in ELEMENTS
        assert element.attrib.keys() <= set(ATTRIBUTES)
    (style,) = root.iter("style")
    for rule in re.findall(r"([^{}]+)\{[^{}]*\}", style.text or ""):
        assert all(selector.strip().startswith(".reshard") for selector in rule.split(",")), rule
    scripts = [element.text or "" for element in root.iter("script") if element.get("type") is None]
    assert scripts == ([script()] if any(each.get("class") == "find" for each in root.iter("div")) else [])
    for data in (element.text or "" for element in root.iter("script") if element.get("type") is not None):
        assert not set("<>&") & set(data)
        json.loads(data)
    text = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"<script|javascript:|https?:|//|@import|url\(|&nbsp;", text.replace("://", "")), text[:80]
    assert len(text) <= MOST
    return root


def texts(root: ET.Element) -> list[str]:
    """The text of every element, tips included, without the styles."""
    return [element.text or "" for element in root.iter() if element.tag not in {"style", "script", "pre"}]


def test_everything_of_the_demo_is_shown(
    source: reshard.Checkpoint, target: Strategy, plan: reshard.Plan, tmp_path: Path
) -> None:
    layout = Layout.of([2, 4], [1, -1])
    report = plan.run(tmp_path / "out")
    shown: list[Any] = [
        source, source.sel("net.*"), source.groups(), source.groups("dtype"), layout, source.strategy, target, plan,
        report, plan.graph("elsewhere"), plan.picture(), plan.picture("net.layer1.weight"), layout.picture(),
        layout.picture((8, 6), Layout.of([3], [-1, 0])), source.picture("net.layer1.weight", target),
        target.picture("net.layer3.weight"), reshard.verify(tmp_path / "out"), reshard.verify(tmp_path / "out", target),
        source.stats(), reshard.diff(source, tmp_path / "out"),
    ]  # fmt: skip
    for each in shown:
        parsed(each)
        assert "\n" not in repr(each)
        assert repr(each).isprintable()
        assert len(repr(each)) < 400


def tensor_rows(root: ET.Element) -> list[ET.Element]:
    """The rows of the tensors of a checkpoint, which can be opened."""
    return [row for row in root.iter("tr") if any(row.iter("details"))]


def test_what_is_shown_of_a_checkpoint(source: reshard.Checkpoint) -> None:
    root = parsed(source)
    rows = {row[0][0][0].text: row for row in tensor_rows(root)}
    weight, bias = rows["net.layer1.weight"], rows["net.layer{1-2}.bias"]
    assert [cell.text for cell in weight[1:5]] == ["1", "float32", "[16, 32]", "2.0 kB"]
    assert [cell.text for cell in bias[1:5]] == ["2", "float32", "[32]", "256 B"]
    assert [*weight[5].itertext()] == ["columns / 2 × 4 copies"] * 2, "the tip of the thumbnail, and the text"
    assert weight[5][0].get("title") == "[2, 2, 2] map [-1, 1]; 2 x 4 blocks x copies in the files"
    totals = [[cell.text for cell in row] for row in next(root.iter("tbody"))]
    assert totals[:2] == [[kind, "float32", "6", "1,864", "7.5 kB"] for kind in ("weights", "moments")]


def test_tensors_of_which_a_row_says_the_same_share_it(tmp_path: Path) -> None:
    whole = Layout.of([2], [-1, -1])
    stages = Strategy.of({f"layers.{n}.w": {n // 2: whole} for n in range(4)})
    for rank in range(4):
        (tmp_path / f"src/rank_{rank}").mkdir(parents=True)
        some = {f"layers.{n}.w": np.ones((4, 4), np.float32) for n in range(4) if n // 2 == rank // 2}
        save_file(some, tmp_path / f"src/rank_{rank}/checkpoint_{rank}.safetensors")
    source = reshard.open(tmp_path / "src", strategy=stages)
    reshard.plan(source, to="zarr").run(tmp_path / "zarr")
    for each, rule in ((source, "whole × 2 copies"), (reshard.open(tmp_path / "zarr"), "whole")):
        (row,) = tensor_rows(parsed(each))
        assert [row[0][0][0].text, row[1].text] == ["layers.{0-3}.w", "4"]
        assert rule in row.itertext()
    assert "layers.{0-3}.w" in texts(parsed(reshard.plan(source, Strategy.of(dict.fromkeys(source, whole))).picture()))


def test_what_is_shown_of_a_verification(
    source: reshard.Checkpoint, target: Strategy, plan: reshard.Plan, tmp_path: Path
) -> None:
    plan.run(tmp_path / "out")
    root = parsed(reshard.verify(tmp_path / "out", target, against=source))
    assert [tile[1].text for tile in root.iter("div") if tile.get("class") == "tile"][:3] == ["none", "15", "4"]
    assert f"= {source.root}; every bit of 15 tensors" in texts(root)
    assert not list(root.iter("table"))
    path = tmp_path / "out/rank_2/checkpoint_2.safetensors"
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)
    root = parsed(reshard.verify(tmp_path / "out", target, against=source))
    (row,) = ([cell.text for cell in row] for row in root.iter("tr") if row[0].tag == "td")
    assert row[0] in source
    assert str(row[1]).startswith("1 of ")
    assert row[3:] == ["target, rank 2", "rank_2/checkpoint_2.safetensors"]


def test_the_table_adds_up(mindspore_data: Path) -> None:
    found = sorted(path for path in (mindspore_data / "real").iterdir() if (path / "ckpt").is_dir())
    assert len(found) > 4
    for path in found:
        checkpoint = reshard.open(path / "ckpt", strategy=path / "strategy_0.ckpt")
        root = parsed(checkpoint)
        assert sum(int(row[1].text or "") for row in tensor_rows(root)) == len(checkpoint)
        parsed(checkpoint.strategy)
        for name in checkpoint:
            parsed(checkpoint.picture(name))


# --- harmless ---------------------------------------------------------------------------------------------------


def hostile() -> tuple[Checkpoint, Strategy]:
    name, other = f"a.{HOSTILE}.w", f"b.{HOSTILE}"
    index = FileIndex("ckpt", {n: Entry(BY_NAME["float32"], (2,), ((0, 8),)) for n in (name, other)})
    file = SourceFile(f"/x/{HOSTILE}.ckpt", 10, 0, index)
    shards = [Shard(Block.whole((2,)), (Extent(0, ((0, 8),)),))]
    tensors = {n: Tensor.of(TensorSpec(n, BY_NAME["float32"], (2,)), shards) for n in (name, other)}
    strategy = Strategy.of({n: Layout.of([2], [0]) for n in (name, f"c.{HOSTILE}", f"adam.{name}")})
    one = Strategy.of({name: Layout.of([1], [-1]), other: Layout.of([1], [-1])})
    checkpoint = Checkpoint(
        HOSTILE, tensors, (file,), (0,), one, warnings=(HOSTILE,), unreadable={HOSTILE: f"is {HOSTILE}"}
    )
    return checkpoint, strategy


def test_names_are_never_markup() -> None:
    checkpoint, strategy = hostile()
    plan = reshard.plan(reshard.Checkpoint(checkpoint), strategy, drop=["*"], allow_missing=["*"])
    assert plan.dropped
    assert plan.missing
    name = next(iter(checkpoint.tensors))
    receipts = (Receipt("move 0", 1, 1, 0.1),)
    report = Report(HOSTILE, (HOSTILE,), 1, 1, 0.1, receipts, 1, 1, 1, 0, 0, (HOSTILE,), (HOSTILE,), 1)
    difference = Difference("text", HOSTILE, HOSTILE, rank=1, path=HOSTILE)
    verification = Verification(
        HOSTILE, (1,), Counts(1, 1, 1), Comparison(HOSTILE), (difference,), unchecked=(HOSTILE,)
    )
    source = reshard.Checkpoint(checkpoint)
    shown: list[Any] = [
        source, source.groups(), strategy, plan, plan.picture(), plan.picture(name),
        Graph(plan._record, HOSTILE, TaskOptions()), report, source.picture(name, strategy), strategy.picture(name),
        verification,
    ]  # fmt: skip
    for each in shown:
        root = parsed(each)
        assert any("<script>alert(1)</script>\"'&amp; onload=x" in text for text in texts(root)), repr(each)
        assert "\x1b" not in each._repr_html_()
        assert "\\x1b[2J\\u202e" in each._repr_html_()
        assert repr(each).isprintable()


def test_whatever_is_not_a_markup_is_escaped() -> None:
    assert tag("p", "<b>", tag("b", "&"), title='"<') == '<p title="&quot;&lt;">&lt;b&gt;<b>&amp;</b></p>'
    assert tag("p", Markup("<i/>")) == "<p><i/></p>"


@given(st.text(max_size=40))
def test_any_text_comes_through_as_it_is_printed(text: str) -> None:
    from reshard.errors import printable

    element = ET.fromstring(tag("p", text, title=text))
    assert (element.text or "") == element.get("title") == printable(text)
    assert html.unescape(tag("p", text)[3:-4]) == printable(text) or not text


# --- small ------------------------------------------------------------------------------------------------------


def test_ten_thousand_tensors_on_64_ranks() -> None:
    checkpoint = large(10_000, 64)
    source = reshard.Checkpoint(checkpoint)
    plan = reshard.plan(source, Strategy.of(dict.fromkeys(checkpoint.tensors, Layout.of([32], [0, -1]))))
    for each in (
        checkpoint,
        checkpoint.strategy,
        plan,
        reshard.Checkpoint(checkpoint).groups(),
        plan.picture("h.7.wa"),
    ):
        began = time.process_time()
        root = parsed(each)
        assert time.process_time() - began < 3, "measured: 0.3 s"
        assert root is not None


def test_names_that_do_not_fold() -> None:
    checkpoint = large(2_500, 4)
    renamed = {
        f"{n:014b}".translate({48: "l", 49: "o"}) * 9 + ".w": t for n, t in enumerate(checkpoint.tensors.values())
    }
    odd = Checkpoint("odd", renamed, checkpoint.files, checkpoint.ranks)
    root = parsed(odd)
    assert any(text == "and 2,260 more rows" for text in texts(root))
    parsed(reshard.Checkpoint(odd).groups())
    parsed(Strategy.of({name: Layout.of([4], [-1, n % 2 - 1]) for n, name in enumerate(renamed)}))


# --- true -------------------------------------------------------------------------------------------------------


def rectangles(root: ET.Element) -> list[list[tuple[tuple[float, ...], str]]]:
    """For each panel, its blocks: where each is, and what its tip says."""
    panels = []
    for group in root.iter("g"):
        found = [child for child in group if child.tag == "rect" and child.get("class") == "block"]
        if found:
            panels.append(
                [
                    (tuple(float(each.get(key) or 0) for key in ("x", "y", "width", "height")), each[0].text or "")
                    for each in found
                ]
            )
    return panels


def numbers(text: str) -> list[int]:
    """The ranks in a tip."""
    text, _, step = text.removeprefix("rank").removeprefix("s").split(":")[0].strip().partition(", step ")
    spans = [[int(end) for end in run.split("–")] for run in text.split(",")]
    return [n for span in spans for n in range(span[0], span[-1] + 1, int(step or 1))]


def box(text: str) -> tuple[tuple[int, int], ...]:
    inside = text[text.index("[") + 1 : -1]
    return tuple((int(a), int(b)) for a, b in (piece.split(":") for piece in inside.split(", ") if piece))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, tuple[int, ...]]:
    devices = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dims = draw(st.integers(0, 4))
    axes = draw(st.permutations(range(len(devices))))
    entries = [draw(st.integers(0, dims)) for _ in axes]  # which dimension an axis cuts; `dims` is none
    tensor_map = [tuple(axis for axis, entry in zip(axes, entries, strict=True) if entry == dim) for dim in range(dims)]
    layout = Layout.of(devices, tensor_map, draw(st.sampled_from([0, -1])) if dims else 0)
    factors = [draw(st.integers(1, 3)) for _ in range(dims)]
    return layout, tuple(ways * factor for ways, factor in zip(layout.splits, factors, strict=True))


@given(layouts())
def test_rectangles_are_the_blocks(made: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = made
    grid = layout.grid(shape)
    panels = rectangles(parsed(layout.picture(shape)))
    shown = [(box(tip), numbers(tip)) for panel in panels for _, tip in panel]
    expected = [
        (tuple(zip(block.start, block.stop, strict=True)), list(ranks))
        for block, ranks in zip(grid.blocks, grid.ranks, strict=True)
    ]
    assert sorted(shown) == sorted(expected), "each block once, with its ranks"
    total = 0.0
    for panel in panels:
        width = max(x + w for (x, _, w, _), _ in panel)
        height = max(y + h for (_, y, _, h), _ in panel)
        assert_tiles(panel, width, height)
        thickness = sum(prod(b - a for a, b in box(tip)) for _, tip in panel)
        for (_, _, w, h), tip in panel:
            share = prod(b - a for a, b in box(tip)) / thickness
            assert w * h / (width * height) == pytest.approx(share, rel=1e-3)
        total += thickness
    assert total == prod(shape)


def assert_tiles(panel: list[tuple[tuple[float, ...], str]], width: float, height: float) -> None:
    """Rectangles cover a panel, and none covers another."""
    assert sum(w * h for (_, _, w, h), _ in panel) == pytest.approx(width * height, rel=1e-3)
    for ((x, y, w, h), _), ((u, v, s, t), _) in combinations(panel, 2):
        assert min(x + w, u + s) - max(x, u) < 0.01 or min(y + h, v + t) - max(y, v) < 0.01


def test_coarser_rectangles_are_all_blocks_together() -> None:
    layout = Layout.of([8, 60, 3], [2, 1, 0])
    panels = rectangles(parsed(layout.picture((16, 120, 6))))
    assert len(panels) == 8
    ranks = sorted(rank for panel in panels for _, tip in panel for rank in numbers(tip.replace(",...", "")))
    assert len(set(ranks)) == len(ranks)
    for panel in panels:
        assert_tiles(panel, max(x + w for (x, _, w, _), _ in panel), max(y + h for (_, y, _, h), _ in panel))
        assert sum(prod(b - a for a, b in box(tip)) for _, tip in panel) == 2 * 120 * 6


def test_neighbours_and_groups_of_ranks_have_colours_of_their_own() -> None:
    for step in (1, 2, 4, 8, 16, 32):
        assert len({rank_colour(rank)[0] for rank in range(0, 9 * step, step)}) == 9


def test_replicas_are_hatched_and_others_are_not() -> None:
    replicated = parsed(Layout.of([2, 2], [1, -1]))
    assert sum(1 for _ in replicated.iter("path")) == 2
    assert "hatched: on several ranks" in texts(replicated)
    assert not list(parsed(Layout.of([2, 2], [1, 0])).iter("path"))


def test_blocks_that_no_file_has_are_empty() -> None:
    blocks = (Block((0,), (2,)), Block((2,), (4,)))
    root = parsed(draw([DrawnSide("", (4,), blocks, ((0,), ()))], "w"))
    assert [part.get("fill") for part in root.iter("rect")] == ["#77aadd", "none"]
    assert "empty: in no file" in texts(root)


def test_boxes_that_are_no_grid_are_drawn_as_they_are() -> None:
    blocks = (Block((0, 0), (4, 2)), Block((0, 2), (1, 4)), Block((1, 2), (4, 4)))
    (panel,) = rectangles(parsed(draw([DrawnSide("", (4, 4), blocks, ((0,), (1,), (2,)))], "w")))
    assert_tiles(panel, *(max(rect[k] + rect[k + 2] for rect, _ in panel) for k in (0, 1)))
    assert [box(tip) for _, tip in panel] == [tuple(zip(b.start, b.stop, strict=True)) for b in blocks]


def test_stages_are_drawn_apart(mindspore_data: Path) -> None:
    strategy = Strategy.of({"w": {0: Layout.of([4], [0, -1]), 1: Layout.of([4], [-1, 0])}})
    root = parsed(strategy.picture("w", (8, 8)))
    assert {"stage 0", "stage 1"} <= set(texts(root))
    tips = [tip for panel in rectangles(root) for _, tip in panel]
    assert tips[0] == "rank 0: [0:2, 0:8]"
    assert tips[-1] == "rank 7: [0:8, 6:8]"


@pytest.mark.parametrize("ranks", [None, [1], [0, 3]])
def test_a_plans_ribbons_are_its_bytes(source: reshard.Checkpoint, target: Strategy, ranks: list[int] | None) -> None:
    plan = reshard.plan(source, target, ranks=ranks)
    drawn = flow.flow_of(plan._record)
    assert sum(drawn.read.values()) == plan.stats.bytes_read == sum(node.nbytes for node in drawn.sources)
    assert sum(drawn.written.values()) == plan.stats.bytes_written == sum(node.nbytes for node in drawn.targets)
    assert [node.name for node in drawn.targets] == [f"rank {rank}" for rank in plan.ranks]


def test_a_tensor_of_a_plan_has_the_blocks_of_both_sides(
    source: reshard.Checkpoint, target: Strategy, plan: reshard.Plan
) -> None:
    name = "net.layer1.weight"
    read, written = rectangles(parsed(plan.picture(name)))
    for side, strategy in ((read, source.strategy), (written, target)):
        assert strategy is not None
        grid = strategy.grid(name, source[name].shape)
        assert [box(tip) for _, tip in side] == [tuple(zip(b.start, b.stop, strict=True)) for b in grid.blocks]
        assert all(set(numbers(tip)) <= set(ranks) for (_, tip), ranks in zip(side, grid.ranks, strict=True))


def test_a_cast_and_a_large_plan_keep_their_bytes() -> None:
    checkpoint = large(300, 64)
    target = Strategy.of(dict.fromkeys(checkpoint.tensors, Layout.of([32], [0, -1])))
    plan = reshard.plan(
        reshard.Checkpoint(checkpoint), target, selection=reshard.Selection(cast={"float32": "bfloat16"})
    )
    drawn = flow.flow_of(plan._record)
    assert sum(drawn.read.values()) == plan.stats.bytes_read
    assert sum(drawn.written.values()) == plan.stats.bytes_written
    assert [node.name for node in drawn.sources][:2] == ["ranks 0–3", "ranks 4–7"]
    assert max(len(drawn.sources), len(drawn.middles), len(drawn.targets)) <= 16


def test_unknown_tensors_are_reported(source: reshard.Checkpoint, target: Strategy, plan: reshard.Plan) -> None:
    with refused(MissingNameError, "no-such-tensor", "net.layer1.weigth", "net.layer1.weight"):
        source.picture("net.layer1.weigth")
    with refused(reshard.ReshardError, "not-in-strategy", "nt.layer1.bias", "net.layer1.bias"):
        target.picture("nt.layer1.bias")
    with refused(reshard.ReshardError, "no-match", "'xyz'"):
        plan.picture("xyz")
    with refused(reshard.ReshardError, "wrong-dimensions", "for 1", "and 2"):
        Layout.of([2], [0]).picture(target=Layout.of([2], [0, -1]))


def test_a_picture_is_a_file_of_its_own(plan: reshard.Plan, tmp_path: Path) -> None:
    plan.picture().save(tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text(encoding="utf-8")
    root = ET.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert text.count("http") == 1, "the namespace, and nothing that would be fetched"
    assert "prefers-color-scheme:dark" in text


def test_thousands_of_ranks_are_drawn_coarser() -> None:
    fine = Layout.of([64, 64], [1, 0])
    rows = Layout.of([4096], [0, -1])
    for each in (fine, rows, fine.picture((4096, 8192), rows), Layout.of([16, 16, 16], [2, 1, 0])):
        root = parsed(each)
        assert any("drawn coarser" in text for text in texts(root))
    assert sum(1 for _ in parsed(fine).iter("rect")) <= 576
    assert next(parsed(rows).iter("rect"))[0].text == "ranks 0–127: 128 blocks, [0:128, 0:1]"


def test_a_layout_that_cannot_be_is_reported() -> None:
    root = parsed(Layout.of([4], [-1], 3, opt_weight_shard_step=1))
    assert any("not possible: opt_weight_shard_size 3 does not divide" in text for text in texts(root))
