"""hyper-parallel's distributed checkpoints as a source: real files give the whole tensors, and each trap is refused."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import assert_equal, numbers, write_file
from commands import done
from dcp_files import NEW, OLD, metadata, write_hyper
from refusals import failed, refused

import reshard
from reshard import Layout, Selection, Strategy
from reshard.errors import SourceError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from dcp_files import Box

STEP = "global_step_4"
TRACKER = "latest_checkpoint_iteration.txt"

FULL = numbers({"w": (7, 6), "b": (7,), "n": (4,), "s": (), "e": (0, 3)})
BOXES: dict[int, dict[str, list[Box]]] = {
    0: {
        "w": [((0, 0), (3, 6)), ((3, 0), (1, 2))],  # what is flat and ragged is cut into boxes
        "b": [((0,), (4,))],
        "n": [((0,), (4,))],
        "s": [((), ())],
        "e": [((0, 0), (0, 3))],
    },
    1: {"w": [((3, 2), (1, 4)), ((4, 0), (3, 6))], "b": [((4,), (3,))], "n": [((0,), (4,))]},
    2: {"b": [((7,), (0,))], "n": [((0,), (4,))]},
}
"""Uneven ones, several in a file, empty ones, replicas, and tensors without dimensions or elements."""


@pytest.fixture
def run(mindspore_data: Path, tmp_path: Path) -> Path:
    """A copy of a recorded run, which names its step."""
    root = shutil.copytree(mindspore_data / "checkpoint2" / "dcp_fsdp2_tp2", tmp_path / "run")
    (root / TRACKER).write_text("4\n")
    return root


def test_a_run_names_its_last_step(run: Path) -> None:
    root = run
    shutil.copytree(root / STEP, root / "global_step_12")
    (root / "global_step_12" / ".metadata").unlink()
    assert reshard.open(root).root.endswith(STEP)
    with refused(SourceError, "unfinished", ".metadata"):
        reshard.open(root, step=12)
    with refused(SourceError, "no-such-iteration", "iteration 5", "iterations 4, 12"):
        reshard.open(root, step=5)
    with refused(SourceError, "no-such-iteration"):
        reshard.open(root / STEP, step=12)
    shown = done("inspect", root).stdout.splitlines()
    assert shown[1].split()[:2] == ["global_step_4", "4"]
    assert "complete, newest" in shown[1]
    assert "incomplete" in shown[2]
    assert any("has no .metadata" in line for line in shown)
    (root / TRACKER).unlink()
    with refused(SourceError, "missing-tracker", TRACKER, "step=12"):
        reshard.open(root)
    assert_equal(reshard.open(root, step=4), dict(np.load(root / "full.npz")))


@pytest.mark.parametrize("package", [OLD, NEW])
@pytest.mark.parametrize("by_rank", [False, True])
def test_boxes_of_any_kind(tmp_path: Path, package: str, by_rank: bool) -> None:
    root = write_hyper(tmp_path / "src", FULL, BOXES, objects=["lr"], by_rank=by_rank, package=package)
    if package == OLD:  # which had no keys: what has several boxes in a file cannot be told apart
        assert "is not in _rank0_.safetensors" in reshard.open(root).unreadable["w"]
        return
    source = reshard.open(root)
    assert_equal(source, FULL)
    assert len(source.tensors["w"].shards) == 4
    assert [len(shard.replicas) for shard in source.tensors["n"].shards] == [3]
    assert set(source._record.extras.objects) == {"lr"}
    columns = Strategy.of({"w": Layout.of([3], [-1, 0]), "n": Layout.of([3], [-1])})
    plan = reshard.plan(source, columns, selection=Selection(drop=("b",)))
    assert "lr" in plan.dropped
    plan.run(tmp_path / "columns", fsync=False)
    assert_equal(
        reshard.open(tmp_path / "columns", strategy=columns), {name: FULL[name] for name in ("w", "n", "s", "e")}
    )
    reshard.plan(source, to="hf").run(tmp_path / "hf", fsync=False)
    assert_equal(reshard.open(tmp_path / "hf"), FULL)
    assert reshard.verify(tmp_path / "hf").equal
    assert reshard.verify(root).tensors


def test_what_every_file_has_under_another_key_is_planned(tmp_path: Path) -> None:
    """No file has an entry of the tensor's own name."""
    boxes = {0: {"w": [((0, 0), (3, 6)), ((3, 0), (4, 6))]}}
    source = reshard.open(write_hyper(tmp_path / "src", FULL, boxes))
    reshard.plan(source).run(tmp_path / "whole")
    assert_equal(reshard.open(tmp_path / "whole"), {"w": FULL["w"]})


def test_replicas_that_differ(tmp_path: Path) -> None:
    root = write_hyper(tmp_path / "src", FULL, BOXES)
    write_file(root / "_rank2_.safetensors", {"b": FULL["b"][:0], "n": FULL["n"] + 1})
    assert "differs between the ranks" in reshard.open(root).unreadable["n"]


# --- what is wrong is said ---

WHOLE: dict[str, list[Box]] = {"w": [((0, 0), (7, 6))], "b": [((0,), (7,))]}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A checkpoint of one rank, of which the metadata will be written otherwise."""
    return write_hyper(tmp_path / "src", FULL, {0: WHOLE})


def say(root: Path, boxes: Any, places: Any, objects: tuple[str, ...] = ()) -> None:
    (root / ".metadata").write_bytes(metadata(FULL, boxes, places, objects))


FILE = "_rank0_.safetensors"
PLACES: list[tuple[str, Any, Any, Any]] = [("w", (0, 0), FILE, None), ("b", (0,), FILE, None)]


@pytest.mark.parametrize(
    ("boxes", "place"),
    [
        ([((0, 0), (4, 6)), ((4, 0), (3, 6))], [((0, 0), FILE, None)]),
        ([((0, 0), (7, 6))], [((1, 0), FILE, None)]),
        ([((1, 0), (7, 6))], [((1, 0), FILE, None)]),
        ([((0, 0), (7, 6))], []),
        ([((0, 0), (7, 6))], [((0, 0), FILE, "other")]),
        ([((0, 0), (7, 6))], [((0, 0), FILE, "b")]),
    ],
)
def test_boxes_that_do_not_make_a_tensor(whole: Path, tmp_path: Path, boxes: Any, place: Any) -> None:
    """The tensor is refused by name, and the others are read."""
    say(whole, {**WHOLE, "w": boxes}, [PLACES[1], *(("w", *one) for one in place)])
    found = reshard.open(whole)
    assert set(found) == {"b"}
    with refused(SourceError, "unreadable-tensor", "'w'"):
        reshard.plan(found)
    reshard.plan(found, drop="w").run(tmp_path / "out")
    assert_equal(reshard.open(tmp_path / "out"), {"b": FULL["b"]})


def test_boxes_that_overlap_and_those_that_lack_some(tmp_path: Path) -> None:
    boxes: Any = {0: {"w": [((0, 0), (4, 6))], "b": [((0,), (4,))]}, 1: {"w": [((3, 0), (4, 6))], "b": [((5,), (2,))]}}
    root = write_hyper(tmp_path / "src", FULL, {**boxes, 2: {"n": [((0,), (4,))]}})
    assert reshard.open(root).unreadable == {
        "w": "is of shape [7, 6], and its blocks [0:4, 0:6] and [3:7, 0:6] overlap",
        "b": "is of shape [7], and its blocks have 6 of 7 elements",
    }


def test_a_dtype_that_is_no_text(whole: Path) -> None:
    """Lists in lists, which nobody could write as text: the dtype is that of the file."""
    content, text = (whole / ".metadata").read_bytes(), b"\x8c\x0dtorch.float32"
    assert text in content
    (whole / ".metadata").write_bytes(content.replace(text, b"]" * 2000 + b"a" * 1999))
    assert_equal(reshard.open(whole), {name: FULL[name] for name in WHOLE})


def test_a_dtype_that_the_file_contradicts(whole: Path) -> None:
    write_file(whole / FILE, {"w": FULL["w"].astype(np.float64), "b": FULL["b"]})
    assert "is float32 and float64" in reshard.open(whole).unreadable["w"]


def test_files_that_are_not_there_or_not_named(whole: Path) -> None:
    shutil.copy(whole / FILE, whole / "_rank1_.safetensors")
    (found,) = reshard.open(whole).warnings
    assert found == ".metadata does not name _rank1_.safetensors, which is not read"
    (whole / "_rank1_.safetensors").unlink()
    (whole / FILE).unlink()
    with refused(SourceError, "missing-file", "_rank0_.safetensors", ".metadata"):
        reshard.open(whole)


@pytest.mark.parametrize(
    ("boxes", "places", "code", "place"),
    [
        (WHOLE, [("w", (0, 0), "../_rank0_.safetensors", None)], "bad-file-name", "'../_rank0_.safetensors'"),
        (WHOLE, [("w", (0, 0), "/etc/passwd", None)], "bad-file-name", "'/etc/passwd'"),
        (WHOLE, [("w", (0, 0), "__0_0.distcp", None)], "bad-file-name", "'__0_0.distcp'"),
        (WHOLE, [("w", (0, 0), 7, None)], "bad-file-name", "tensor 'w' is in 7"),
        (WHOLE, [("w", (0, 0), FILE, ["w"])], "bad-name", "tensor_key"),
        (WHOLE, [("w", (0, -1), FILE, None)], "bad-shape", "-1"),
        (WHOLE, [("w", "00", FILE, None)], "bad-shape", "'00'"),
        (WHOLE, [("x", (0, 0), FILE, None)], "unknown-tensor", "'x'"),
        (WHOLE, [(["w"], (0, 0), FILE, None)], "unknown-tensor", "['w']"),
        ({"w": [((0,), (7, 6))]}, [], "wrong-dimensions", "'w' of shape [7, 6]"),
        ({"w": [((0, 0), (7, 6.0))]}, [], "bad-shape", "6.0"),
        ({"w": [((0, 0), (7, 1 << 70))]}, [], "bad-shape", str(1 << 70)),
    ],
)
def test_metadata_that_cannot_be(whole: Path, boxes: Any, places: Any, code: str, place: str) -> None:
    say(whole, boxes, places)
    with refused(SourceError, code, "/.metadata: ", place):
        reshard.open(whole)


def test_ranks_that_contradict_each_other(tmp_path: Path) -> None:
    root = write_hyper(tmp_path / "src", FULL, {0: WHOLE, 1: WHOLE, 2: WHOLE}, by_rank=True)
    assert_equal(reshard.open(root), {name: FULL[name] for name in WHOLE})
    other = {"w": np.zeros((8, 6), np.float32), "b": FULL["b"]}
    (root / "1.metadata").write_bytes(metadata(other, WHOLE, PLACES))
    with refused(SourceError, "ranks-disagree", "1.metadata", "'w'", "float32 [7, 6] and float32 [8, 6]"):
        reshard.open(root)
    (root / "1.metadata").write_bytes(metadata(FULL, {}, [], ["w"]))
    with refused(SourceError, "duplicate-name", "1.metadata: w"):
        reshard.open(root)
    (root / "1.metadata").unlink()
    with refused(SourceError, "missing-ranks", "rank 1", "3"):
        reshard.open(root)


def test_options_that_say_what_the_metadata_say_are_refused(whole: Path, tmp_path: Path) -> None:
    for options in ({"strategy": Strategy.of({})}, {"suffix": "x"}, {"layout": {"*": "whole"}}, {"stage": 0}):
        with refused(UsageError, "self-described", whole):
            reshard.open(whole, **options)
    words = ("convert", whole, tmp_path / "out", "--to", "ckpt")
    failed(2, "not-convertible", *words, "--same-ranks", places=("leave --same-ranks out",))
    done(*words)
    assert set(reshard.open(tmp_path / "out")) == set(reshard.open(whole))
    assert reshard.verify(tmp_path / "out").equal
