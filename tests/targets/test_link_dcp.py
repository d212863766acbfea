"""Distributed checkpoints of PyTorch made of others by `.metadata` alone: renamed, selected, merged, files linked."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from checkpoints import write_file
from commands import done
from dcp_files import item, write_torch
from linked_dcp import CASES, FULL, WHOLE, assert_equal, described, full_of, linked, one_file, paths_in, shares, simple
from refusals import refused

import reshard
from reshard import Selection
from reshard.errors import ChangedError, SourceError
from reshard.kits.torch.carried import followed

if TYPE_CHECKING:
    from dcp_files import Box


# --- renaming ---


@pytest.mark.parametrize("name", CASES)
def test_every_real_one_is_renamed_and_back(mindspore_data: Path, tmp_path: Path, name: str) -> None:
    """With its objects; what is listed in the end is what was in the beginning, with the same items."""
    root = mindspore_data / "dcp" / name
    source, full = reshard.open(root / "checkpoint"), full_of(root)
    there = {old: f"new.{old}" for old in source._record.all_names}
    report = linked(source, tmp_path / "new", there)
    new = reshard.open(tmp_path / "new")
    assert_equal(new, {there[old]: value for old, value in full.items()})
    assert set(new._record.extras.objects) == {there[old] for old in source._record.extras.objects}
    assert not new.unreadable
    assert report.bytes_read == report.bytes_written == 0
    assert report.links == len(source._record.files)
    assert all(shares(file.path, tmp_path / "new" / Path(file.path).name) for file in source._record.files)
    assert reshard.verify(tmp_path / "new").equal
    linked(tmp_path / "new", tmp_path / "back", {new: old for old, new in there.items()})
    assert_equal(reshard.open(tmp_path / "back"), full)
    assert reshard.verify(tmp_path / "back", against=root / "checkpoint").equal
    if name != "rank_local":  # which has no `.metadata`
        before, after = described(root / "checkpoint"), described(tmp_path / "back")
        assert after["listed"] == before["listed"]
        assert after["planned"] == before["planned"]
        assert {key for key in before["flat"] if before["flat"][key]} == after["flat"].keys()
    assert str(mindspore_data).encode() not in (tmp_path / "new" / ".metadata").read_bytes()


def test_what_every_rank_said_is_in_one_file(mindspore_data: Path, tmp_path: Path) -> None:
    root = mindspore_data / "dcp" / "rank_local" / "checkpoint"
    plan = reshard.plan(reshard.open(root), to="dcp", link=True)
    assert "several ranks have an object n each; that of the first rank is taken" in plan.warnings
    plan.run(tmp_path / "out")
    assert paths_in(tmp_path / "out", "metadata") == [".metadata"]
    assert described(tmp_path / "out")["listed"]["n"][-1][None]["relative_path"] == "__0_0.distcp"


def of_ranks(root: Path, boxes: list[Box], **more: object) -> Path:
    """Each rank says for itself that it has one box of w; the first has b, too."""
    for rank, (begin, extents) in enumerate(boxes):
        part = tuple(slice(at, at + size) for at, size in zip(begin, extents, strict=True))
        some = [("w", (begin, extents), item(FULL["w"][part]))]
        some += [] if rank else [("b", ((0,), (5,)), item(FULL["b"]))]
        write_torch(root, FULL, {rank: some}, **more)  # type: ignore[arg-type]
        (root / ".metadata").rename(root / f"__{rank}.metadata")
    return root


def test_boxes_at_the_place_of_another(tmp_path: Path) -> None:
    """Nothing says which is which, where boxes are of several sizes; of one size any is right."""
    for name, first in (("alike", WHOLE), ("unlike", ((0, 0), (0, 4)))):
        of_ranks(tmp_path / name / "e", [first, WHOLE])
        write_torch(tmp_path / name / "plain", {"p": FULL["w"]}, {0: [("p", WHOLE, item(FULL["w"]))]})
    linked(tmp_path / "alike", tmp_path / "out")
    assert len(described(tmp_path / "out")["listed"]["w"][3]) == 1
    with refused(SourceError, "ambiguous-boxes", "'w'"):
        linked(tmp_path / "unlike", tmp_path / "other")
    linked(tmp_path / "unlike", tmp_path / "other", exclude=("w", "b"))
    assert set(reshard.open(tmp_path / "other")) == {"p"}


@pytest.mark.parametrize(
    ("old", "path", "new", "expected"),
    [
        ("model.w", ("model", "w"), "net.w", ("net", "w")),
        ("model.w", ("model", "w"), "model.attn.w", ("model", "attn.w")),
        ("w", ("w",), "model.w", ("model.w",)),
        ("a.0.b", ("a", 0, "b"), "a.1.b", ("a", 1, "b")),
        ("a.0.b", ("a", 0, "b"), "a.x.b", ("a", "x", "b")),
        ("a.b.c", ("a", "b", "c"), "x.y.c", ("x", "y", "c")),
        ("a.b.c", ("a", "b", "c"), "x.c", ("x", "c")),
        ("a.b.c", ("a", "b", "c"), "c", ("c",)),
        ("a.b", ("a", "b"), "a.b.b", ("a", "b.b")),
        ("m.l.0.w", ("m", "l.0.w"), "n.k.0.v", ("n", "k.0.v")),
        ("m.l.0.w", ("m", "l.0.w"), "n.k.0.x.v", ("n", "k.0.x.v")),
        ("m.l.0.w", ("m", "l.0.w"), "n", ("n",)),
        ("m.s.l.0.w.e", ("m", "s", "l.0.w", "e"), "n.t.k.1.w.e", ("n", "t", "k.1.w", "e")),
        ("a.b", ("other",), "c", ("c",)),  # nothing that PyTorch writes
        ("a.b", ("other",), "a.b", ("other",)),
    ],
)
def test_paths_follow_names(old: str, path: tuple[str | int, ...], new: str, expected: Any) -> None:
    assert followed(path, old, new) == expected


@pytest.mark.parametrize("path", [("a",) * 65, ("w", 1 << 40), ("w", -1), ("w", True), ("w", None), "w", ()])
def test_paths_that_cannot_be_are_left_out(path: Any, tmp_path: Path) -> None:
    linked(one_file(tmp_path / "source", "w", "__0_0.distcp", path), tmp_path / "out")
    assert described(tmp_path / "out")["planned"] is None


def test_megatron_finds_what_it_needs_besides(mindspore_data: Path, tmp_path: Path) -> None:
    root = mindspore_data / "dcp" / "mcore_tp2_pp2" / "checkpoint"
    linked(root, tmp_path / "out")
    for name in ("common.pt", "metadata.json"):
        assert (tmp_path / "out" / name).read_bytes() == (root / name).read_bytes()
        assert not (tmp_path / "out" / name).samefile(root / name)


# --- selecting ---


def test_files_without_anything_are_not_linked(tmp_path: Path) -> None:
    root = simple(tmp_path)
    linked(root, tmp_path / "b", include=("b",))
    assert paths_in(tmp_path / "b") == [".metadata", "__1_0.distcp"]
    assert_equal(reshard.open(tmp_path / "b"), {"b": FULL["b"]})
    linked(root, tmp_path / "w", exclude=("b",))
    assert paths_in(tmp_path / "w", "distcp") == ["__0_0.distcp", "__1_0.distcp"]
    assert_equal(reshard.open(tmp_path / "w"), {"w": FULL["w"]})
    plan = reshard.plan(reshard.open(root), to="dcp", link=True, selection=Selection(exclude=("b",)))
    assert plan.left_out == ("b",)
    assert "belong to no listed tensor or object" in plan.warnings[-1]


def test_what_is_not_read_is_carried(tmp_path: Path) -> None:
    """Encoded items, and buckets of Megatron's optimizer; not what is not whole, unless it may be left out."""
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_x.bucket_idx_0.exp_avg"
    full = {"w": FULL["w"], bucket: FULL["b"], "half": FULL["w"]}
    items = {
        0: [("w", WHOLE, item(FULL["w"])), (bucket, ((0,), (5,)), item(FULL["b"]))],
        1: [("half", ((0, 0), (3, 4)), item(FULL["w"][:3]))],
    }
    root = write_torch(tmp_path / "source", full, items)
    with refused(SourceError, "unreadable-tensor", "'half'", "12 of"):
        linked(root, tmp_path / "out")
    linked(root, tmp_path / "out", {bucket: f"{bucket}.new"}, drop=("half",))
    found = reshard.open(tmp_path / "out")
    assert_equal(found, {"w": FULL["w"], f"{bucket}.new": FULL["b"]})
    assert "half" not in described(tmp_path / "out")["listed"]
    before, after = (described(one)["listed"] for one in (root, tmp_path / "out"))
    assert after[f"{bucket}.new"] == before[bucket]
    assert reshard.verify(tmp_path / "out").equal


def test_encodings_are_carried(mindspore_data: Path, tmp_path: Path) -> None:
    shutil.copytree(mindspore_data / "dcp" / "zstd" / "checkpoint", tmp_path / "all" / "z")
    write_torch(tmp_path / "all" / "plain", {"p": FULL["w"]}, {0: [("p", WHOLE, item(FULL["w"]))]})
    linked(tmp_path / "all", tmp_path / "out")
    info = next(iter(described(tmp_path / "out")["listed"]["w"][-1].values()))
    assert info["transform_descriptors"] == ["stream.zstd/1"]
    assert info["relative_path"] == "z__0_0.distcp"
    verified = reshard.verify(tmp_path / "out")
    assert verified.equal


# --- merging ---


def test_directories_that_are_one_checkpoint(mindspore_data: Path, tmp_path: Path, apart: Path) -> None:
    """They are opened as one, and merged."""
    full = {name: value for name, value in full_of(mindspore_data / "dcp" / "fsdp2_uneven").items() if name != "step"}
    opened = reshard.open(apart)
    assert_equal(opened, full)
    assert "optim.param_groups.0.lr" in opened._record.extras.objects
    linked(apart, tmp_path / "one", {"optim.*": "optimizer.*"})
    one = reshard.open(tmp_path / "one")
    assert_equal(one, {name.replace("optim.", "optimizer."): value for name, value in full.items()})
    assert {"optimizer_0__0_0.distcp", "pytorch_model_fsdp_0__0_0.distcp"} <= set(paths_in(tmp_path / "one"))
    planned = described(tmp_path / "one")["planned"]
    assert planned["optimizer.param_groups.0.lr"] == ("optimizer", "param_groups", 0, "lr")
    assert planned["model.emb.weight"] == ("model", "emb.weight")
    assert reshard.verify(tmp_path / "one").equal
    with refused(ChangedError, "source-changed"):  # which a link changes
        reshard.plan(opened, to="hf").run(tmp_path / "hf")
    reshard.convert(apart, tmp_path / "hf", to="hf")
    assert_equal(reshard.open(tmp_path / "hf"), full)
    done("verify", apart)


def test_directories_that_are_not_one_checkpoint(tmp_path: Path) -> None:
    simple(tmp_path / "run", "first")
    simple(tmp_path / "run", "second")
    with refused(SourceError, "several-checkpoints", "second/.metadata", "'w'", "first"):
        reshard.open(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "second")
    with refused(SourceError, "no-checkpoint", tmp_path / "run"):
        reshard.open(tmp_path / "run")
    unfinished = simple(tmp_path / "run", "third", ("v", "c"))
    (unfinished / ".metadata").unlink()
    with refused(SourceError, "unfinished", "third", "__0_0.distcp"):
        reshard.open(tmp_path / "run")


@pytest.mark.parametrize("other", ["model.safetensors", "rank_0"])
def test_directories_next_to_another_checkpoint(tmp_path: Path, apart: Path, other: str) -> None:
    """What else is there is what was meant, as it was before."""
    write_file(apart / (other if "." in other else f"{other}/a.safetensors"), {"w": FULL["w"]})
    assert_equal(reshard.open(apart), {"w": FULL["w"]})


def test_what_is_next_to_the_data_of_two(mindspore_data: Path, tmp_path: Path) -> None:
    for name in ("flat", "plain"):
        shutil.copytree(mindspore_data / "dcp" / "mcore_flat" / "checkpoint", tmp_path / "all" / name)
    root = tmp_path / "all" / "plain"
    for path in paths_in(root, "distcp"):
        (root / path).unlink()
    (root / ".metadata").unlink()
    write_torch(root, {"p": FULL["w"]}, {0: [("p", WHOLE, item(FULL["w"]))]}, planner_data=None)
    plan = reshard.plan(reshard.open(tmp_path / "all"), to="dcp", link=True)
    assert any("common.pt are two of a kind, and left out" in text for text in plan.warnings)
    plan.run(tmp_path / "out")
    assert not {"common.pt", "metadata.json"}.intersection(paths_in(tmp_path / "out"))


def test_names_of_files_that_would_be_the_same(tmp_path: Path) -> None:
    """Those of a directory begin with its name."""
    one_file(tmp_path / "all" / "a", "p", "b__0_0.distcp")
    one_file(tmp_path / "all" / "ab", "q", "__0_0.distcp")
    with refused(SourceError, "bad-name", "ab/__0_0.distcp", "'ab__0_0.distcp'"):
        linked(tmp_path / "all", tmp_path / "out")
    linked(tmp_path / "all", tmp_path / "out", include=("q",))
    assert paths_in(tmp_path / "out", "distcp") == ["ab__0_0.distcp"]
