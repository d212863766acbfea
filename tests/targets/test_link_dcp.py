"""Distributed checkpoints of PyTorch made of others by `.metadata` alone: renamed, selected, merged, files linked."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import helpers
import numpy as np
import pytest
from checkpoints import numbers, tree, write_file
from commands import call, done
from dcp_files import item, write_hyper, write_torch
from written_dcp import unpickled

import reshard
from reshard import LinkedDCP, Selection, Strategy
from reshard.dtypes import BY_NAME
from reshard.errors import BudgetError, ChangedError, SourceError, TargetError, UsageError
from reshard.storage import local
from reshard.storage.local import LocalStore
from reshard.storage.remote import filesystem
from reshard.targets.dcp.metadata import Listed, Part, metadata
from reshard.targets.torch_save import saved_tensor, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dcp_files import Box

NOT_LINKED = {"zstd", "verl_like", "hf_consolidated", "hf_sharded", "safetensors_format"}
CASES = sorted({path.split("/")[1] for path in helpers.packed_files("dcp")} - NOT_LINKED)

FULL = numbers({"w": (6, 4), "b": (5,), "s": ()})
WHOLE: Box = (0, 0), (6, 4)


def linked(source: Path | reshard.Checkpoint, target: Path, names: Mapping[str, str] | None = None, **more: Any) -> Any:
    checkpoint = source if isinstance(source, reshard.Checkpoint) else reshard.open(source)
    plan = reshard.plan(checkpoint, files=LinkedDCP(), selection=Selection(names=names or {}, **more))
    return plan.run(target)


def simple(tmp_path: Path, name: str = "source", tensors: tuple[str, ...] = ("w", "b")) -> Path:
    """Two ranks, of which the second has one tensor, by its first name."""
    one, two = tensors
    items = {
        0: [(one, ((0, 0), (3, 4)), item(FULL["w"][:3]))],
        1: [(one, ((3, 0), (3, 4)), item(FULL["w"][3:])), (two, ((0,), (5,)), item(FULL["b"]))],
    }
    full = {one: FULL["w"], two: FULL["b"]}
    return write_torch(tmp_path / name, full, items)


def one_file(root: Path, name: str, file: str, path: tuple[str | int, ...] | None = None) -> Path:
    """A tensor in a file of any name."""
    root.mkdir(parents=True)
    content = item(FULL["w"])
    (root / file).write_bytes(content)
    parts = [Part((0, 0), (6, 4), file, 0, len(content))]
    listed = Listed(name, torch_dtype(name, BY_NAME["float32"]), (6, 4), parts, path)
    (root / ".metadata").write_bytes(metadata([listed], {}))
    return root


def described(root: Path) -> dict[str, Any]:
    """What `.metadata` says: of each name what it is with its chunks sorted, and its items; where it is nested."""
    kind, state = unpickled((root / ".metadata").read_bytes())
    assert kind == "torch.distributed.checkpoint.metadata.Metadata"
    top = dict(state)
    found: dict[str, Any] = {}
    for name, (what, *fields) in top["state_dict_metadata"]:
        about = dict(fields[0]) if fields else {}
        chunks = sorted((dict(one[1])["offsets"], dict(one[1])["sizes"]) for one in about.get("chunks", ()))
        dtype = about["properties"][1][0] if about else ""
        found[name] = [what, dtype[-1] if isinstance(dtype, tuple) else dtype, about.get("size"), chunks, {}]
    for index, info in top["storage_data"]:
        key = dict(index[1])
        found[key["fqn"]][-1][key.get("offset")] = dict(info[1])
    planned = top["planner_data"] and dict(top["planner_data"])
    return {"listed": found, "planned": planned, "flat": dict(top.get("mcore_data") or ()), "keys": {*top}}


def paths_in(root: Path, name: str = "") -> list[str]:
    there = root.iterdir() if root.is_dir() else ()
    return sorted(path.name for path in there if path.name.endswith(name) and path.name != ".reshard")


def assert_equal(found: reshard.Checkpoint, full: Mapping[str, Any]) -> None:
    assert set(found) == set(full)
    for name, value in full.items():
        array = found[name].compute()
        assert (array.shape, array.tobytes()) == (value.shape, value.tobytes()), name


def shares(one: Path | str, other: Path) -> bool:
    """Return whether two files are one, or, on a file system that has copies sharing blocks, the same."""
    return other.samefile(one) or (other.stat().st_nlink == 1 and other.read_bytes() == Path(one).read_bytes())


def full_of(root: Path) -> dict[str, Any]:
    return {name.replace("\\", "/"): value for name, value in np.load(root / "full.npz").items()}


# --- renaming ---


@pytest.mark.parametrize("name", CASES)
def test_every_real_one_is_renamed_and_back(mindspore_data: Path, tmp_path: Path, name: str) -> None:
    """With its objects; what is listed in the end is what was in the beginning, with the same items."""
    root = mindspore_data / "dcp" / name
    source, full = reshard.open(root / "checkpoint"), full_of(root)
    there = {old: f"new.{old}" for old in source.every}
    report = linked(source, tmp_path / "new", there)
    new = reshard.open(tmp_path / "new")
    assert_equal(new, {there[old]: value for old, value in full.items()})
    assert list(new.objects) == [there[old] for old in source.every if old in source.objects]
    assert not new.unreadable
    assert report.bytes_read == report.bytes_written == 0
    assert report.links == len(source.files)
    for file in source.files:
        other = tmp_path / "new" / Path(file.path).name
        assert shares(file.path, other)
    assert reshard.verify(tmp_path / "new").equal
    linked(tmp_path / "new", tmp_path / "back", {new: old for old, new in there.items()})
    assert_equal(reshard.open(tmp_path / "back"), full)
    assert reshard.verify(tmp_path / "back", against=root / "checkpoint").equal
    if name != "rank_local":  # which has no `.metadata`
        before, after = described(root / "checkpoint"), described(tmp_path / "back")
        assert after["listed"] == before["listed"]
        assert after["planned"] == before["planned"]
        assert {key for key in before["flat"] if before["flat"][key]} == after["flat"].keys()
    assert {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"} >= (
        described(tmp_path / "back")["keys"] - {"mcore_data"}
    )
    assert str(mindspore_data).encode() not in (tmp_path / "new" / ".metadata").read_bytes()


def test_megatron_finds_what_it_needs_besides(mindspore_data: Path, tmp_path: Path) -> None:
    root = mindspore_data / "dcp" / "mcore_tp2_pp2" / "checkpoint"
    linked(root, tmp_path / "out")
    for name in ("common.pt", "metadata.json"):
        assert (tmp_path / "out" / name).read_bytes() == (root / name).read_bytes()
        assert not (tmp_path / "out" / name).samefile(root / name)


def test_what_every_rank_said_is_in_one_file(mindspore_data: Path, tmp_path: Path) -> None:
    root = mindspore_data / "dcp" / "rank_local" / "checkpoint"
    plan = reshard.plan(reshard.open(root), files=LinkedDCP())
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


@pytest.mark.parametrize("empty", [(0, 4), (6, 0), (0, 0)])
def test_an_empty_box_at_the_place_of_another(tmp_path: Path, empty: tuple[int, int]) -> None:
    """The item of that which has the bytes is listed, whichever rank comes first."""
    boxes: list[Box] = [((0, 0), empty), ((0, 0), (5, 4)), ((5, 0), (1, 4)), ((5, 0), (1, 4))]
    linked(of_ranks(tmp_path / "source", boxes), tmp_path / "out")
    assert paths_in(tmp_path / "out", "distcp") == ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]
    assert_equal(reshard.open(tmp_path / "out"), {"w": FULL["w"], "b": FULL["b"]})
    listed = described(tmp_path / "out")["listed"]["w"]
    assert [extents[1] for _, extents in listed[3]] == [(5, 4), (1, 4)]
    assert [place["relative_path"] for place in listed[4].values()] == ["__1_0.distcp", "__2_0.distcp"]


def test_an_encoded_box_at_the_place_of_another(tmp_path: Path) -> None:
    """Nothing says which is which, where boxes are of several sizes; of one size any is right."""
    alike: list[Box] = [WHOLE, WHOLE]
    for name, boxes in (("alike", alike), ("unlike", [((0, 0), (0, 4)), WHOLE])):
        of_ranks(tmp_path / name / "e", boxes, transform_descriptors=["x/1"])
        write_torch(tmp_path / name / "plain", {"p": FULL["w"]}, {0: [("p", WHOLE, item(FULL["w"]))]})
    linked(tmp_path / "alike", tmp_path / "out")
    assert len(described(tmp_path / "out")["listed"]["w"][3]) == 1
    with pytest.raises(
        SourceError, match=r"'w': has boxes of several sizes at \[0, 0\].*leave it out give exclude='w'"
    ):
        linked(tmp_path / "unlike", tmp_path / "other")
    linked(tmp_path / "unlike", tmp_path / "other", exclude=("w",))
    assert set(reshard.open(tmp_path / "other")) == {"p"}


@pytest.mark.parametrize(
    ("old", "path", "new", "expected"),
    [
        ("model.w", ("model", "w"), "net.w", ("net", "w")),
        ("model.w", ("model", "w"), "model.attn.w", ("model", "attn.w")),
        ("w", ("w",), "model.w", ("model.w",)),
        ("a.0.b", ("a", 0, "b"), "a.1.b", ("a", 0, "b")),  # a list of one
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
def test_paths_follow_names(old: str, path: tuple[str | int, ...], new: str, expected: Any, tmp_path: Path) -> None:
    root = one_file(tmp_path / "source", old, "__0_0.distcp", path)
    linked(root, tmp_path / "out", {old: new} if new != old else {})
    assert described(tmp_path / "out")["planned"] == {new: expected}


@pytest.mark.parametrize("path", [("a",) * 65, ("w", 1 << 40), ("w", -1), ("w", True), ("w", None), "w", ()])
def test_paths_that_cannot_be_are_left_out(path: Any, tmp_path: Path) -> None:
    linked(one_file(tmp_path / "source", "w", "__0_0.distcp", path), tmp_path / "out")
    assert described(tmp_path / "out")["planned"] is None


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"list.0": "list.x"}, r"names 'list\.2' and 'list\.x': cannot both be in nested dicts and lists"),
        ({"objects.rng": "list"}, r"names 'list\.0' and 'list': cannot both be in nested dicts and lists"),
        ({"objects.rng": "list.0"}, r"name 'list.0': is given to list.0, objects.rng"),
    ],
)
def test_names_that_cannot_be_together(mindspore_data: Path, tmp_path: Path, names: Any, said: str) -> None:
    with pytest.raises((SourceError, UsageError), match=said):
        linked(mindspore_data / "dcp" / "kinds" / "checkpoint", tmp_path / "out", names)
    assert not (tmp_path / "out").exists()


def test_who_has_names_is_told(mindspore_data: Path) -> None:
    source = reshard.open(mindspore_data / "dcp" / "fsdp2_uneven" / "checkpoint")

    def warnings(names: Mapping[str, str]) -> list[str]:
        plan = reshard.plan(source, files=LinkedDCP(), selection=Selection(names=names))
        return [text for text in plan.warnings if not text.startswith("data files are links")]

    assert warnings({}) == []
    (objects,) = warnings({"model.layers.*": "model.blocks.*"})  # which states follow
    assert "optim.param_groups.0.params: carried as it is, with the names that parameters had in the source" in objects
    assert len(warnings({"model.*": "net.*"})) == 1
    own = {"model.layers.*": "net.blocks.*", "optim.state.*": "optim.state.*"}
    _, states = warnings(own)
    assert "optimizer states keep their names though their weights do not: optim.state.layers." in states


@pytest.mark.parametrize(
    ("states", "names", "expected"),
    [
        (("optim.state.a.w.step",), {"model.a.*": "model.b.*"}, ("optim.state.b.w.step",)),
        (("optimizer.state.step.model.a.w",), {"model.a.*": "c.*"}, ("optimizer.state.step.c.w",)),
        (("optim.param_groups.a.w.lr",), {"model.a.w": "model.v"}, ("optim.param_groups.v.lr",)),
        (("optim.state.a.w.step",), {"model.*": "net.*"}, ("optim.state.a.w.step",)),
        (("optim.state.a.w.step", "ema.a.w"), {"model.a.*": "model.b.*"}, ("optim.state.b.w.step", "ema.a.w")),
        (("optim.state.a.w.step",), {"model.a.*": "model.b.*", "optim.state.*": "o.*"}, ("o.a.w.step",)),
    ],
)
def test_states_follow(states: tuple[str, ...], names: dict[str, str], expected: tuple[str, ...]) -> None:
    assert tuple(Selection(names=names).renamed(["model.a.w", *states]).values())[1:] == expected


# --- selecting ---


def test_files_without_anything_are_not_linked(tmp_path: Path) -> None:
    root = simple(tmp_path)
    linked(root, tmp_path / "b", include=("b",))
    assert paths_in(tmp_path / "b") == [".metadata", "__1_0.distcp"]
    assert_equal(reshard.open(tmp_path / "b"), {"b": FULL["b"]})
    linked(root, tmp_path / "w", exclude=("b",))
    assert paths_in(tmp_path / "w", "distcp") == ["__0_0.distcp", "__1_0.distcp"]
    assert_equal(reshard.open(tmp_path / "w"), {"w": FULL["w"]})
    plan = reshard.plan(reshard.open(root), files=LinkedDCP(), selection=Selection(exclude=("b",)))
    assert plan.left_out == ("b",)
    assert "are of nothing that is listed" in plan.warnings[-1]


def test_objects_are_chosen_as_tensors_are(mindspore_data: Path, tmp_path: Path) -> None:
    root = mindspore_data / "dcp" / "kinds" / "checkpoint"
    linked(root, tmp_path / "out", {"objects.int": "objects.number"}, include=("objects.*",), exclude=("*.bytes",))
    found = reshard.open(tmp_path / "out")
    assert set(found) == {"objects.rng"}
    before = {old.replace("objects.int", "objects.number") for old in reshard.open(root).objects}
    assert set(found.objects) == {name for name in before if name.startswith("objects.")} - {"objects.bytes"}


def test_what_is_not_read_is_carried(tmp_path: Path) -> None:
    """Encoded items, and buckets of Megatron's optimizer; not what is not whole, unless it may be left out."""
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_x.bucket_idx_0.exp_avg"
    full = {"w": FULL["w"], bucket: FULL["b"], "half": FULL["w"]}
    items = {
        0: [("w", WHOLE, item(FULL["w"])), (bucket, ((0,), (5,)), item(FULL["b"]))],
        1: [("half", ((0, 0), (3, 4)), item(FULL["w"][:3]))],
    }
    root = write_torch(tmp_path / "source", full, items)
    with pytest.raises(SourceError, match=r"'half'.*blocks have 12 of 24 elements.*to leave it out give drop='half'"):
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


@pytest.mark.parametrize("encoding", [["x" * 99 + "/1"], "zstd", 7, [["y/1"]]])
def test_encodings_that_cannot_be(tmp_path: Path, encoding: object) -> None:
    items = {0: [("w", WHOLE, item(FULL["w"]))]}
    write_torch(tmp_path / "all" / "e", FULL, items, transform_descriptors=encoding)
    write_torch(tmp_path / "all" / "plain", {"p": FULL["w"]}, {0: [("p", WHOLE, item(FULL["w"]))]})
    with pytest.raises(SourceError, match="tensor 'w': is encoded by .*, which is no name of an encoding"):
        linked(tmp_path / "all", tmp_path / "out")


# --- merging ---


@pytest.fixture
def apart(mindspore_data: Path, tmp_path: Path) -> Path:
    """The model and the optimizer in directories of their own, with files of the same names, as accelerate has them."""
    source = mindspore_data / "dcp" / "fsdp2_uneven" / "checkpoint"
    linked(source, tmp_path / "saved" / "pytorch_model_fsdp_0", include=("model.*",))
    linked(source, tmp_path / "saved" / "optimizer_0", include=("optim.*",))
    (tmp_path / "saved" / "trainer_state.json").write_text("{}")
    (tmp_path / "saved" / "random_states_0.pkl").write_bytes(b"\x80\x04N.")
    return tmp_path / "saved"


def test_directories_that_are_one_checkpoint(mindspore_data: Path, tmp_path: Path, apart: Path) -> None:
    """They are opened as one, and merged."""
    full = {name: value for name, value in full_of(mindspore_data / "dcp" / "fsdp2_uneven").items() if name != "step"}
    opened = reshard.open(apart)
    assert_equal(opened, full)
    assert opened.described_by == "optimizer_0/.metadata (and 1 more)"
    assert "optim.param_groups.0.lr" in opened.objects
    linked(apart, tmp_path / "one", {"optim.*": "optimizer.*"})
    one = reshard.open(tmp_path / "one")
    assert_equal(one, {name.replace("optim.", "optimizer."): value for name, value in full.items()})
    assert "optimizer.param_groups.0.lr" in one.objects
    assert {"optimizer_0__0_0.distcp", "pytorch_model_fsdp_0__0_0.distcp"} <= set(paths_in(tmp_path / "one"))
    planned = described(tmp_path / "one")["planned"]
    assert planned["optimizer.param_groups.0.lr"] == ("optimizer", "param_groups", 0, "lr")
    assert planned["model.emb.weight"] == ("model", "emb.weight")
    assert reshard.verify(tmp_path / "one").equal
    with pytest.raises(ChangedError, match=r"its contents, links, owner or rights"):  # which a link changes
        reshard.plan(opened, files=reshard.HuggingFaceSet(), format="safetensors").run(tmp_path / "hf")
    opened = reshard.open(apart)
    reshard.plan(opened, files=reshard.HuggingFaceSet(), format="safetensors").run(tmp_path / "hf")
    assert_equal(reshard.open(tmp_path / "hf"), full)
    assert reshard.verify(tmp_path / "hf").equal
    done("verify", apart)


def test_directories_that_are_not_one_checkpoint(tmp_path: Path) -> None:
    simple(tmp_path / "run", "step-1")
    simple(tmp_path / "run", "step-2")
    with pytest.raises(SourceError, match=r"step-2/\.metadata: has 'w', as step-1 has; expected directories of"):
        reshard.open(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "step-2")
    with pytest.raises(SourceError, match="run: has no"):
        reshard.open(tmp_path / "run")
    unfinished = simple(tmp_path / "run", "step-3", ("v", "c"))
    (unfinished / ".metadata").unlink()
    with pytest.raises(SourceError, match=r"step-3: __0_0\.distcp is of a distributed .*was saving it interrupted\?"):
        reshard.open(tmp_path / "run")


@pytest.mark.parametrize("other", ["model.safetensors", "rank_0"])
def test_directories_next_to_another_checkpoint(tmp_path: Path, apart: Path, other: str) -> None:
    """What else is there is what was meant, as it was before."""
    write_file(apart / (other if "." in other else f"{other}/a.safetensors"), {"w": FULL["w"]})
    assert_equal(reshard.open(apart), {"w": FULL["w"]})


def test_links_to_directories_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "both").mkdir()
    for name, tensors in (("model", ("w", "b")), ("optim", ("v", "c"))):
        (tmp_path / "both" / name).symlink_to(simple(tmp_path / "far" / "away", name, tensors))
    linked(tmp_path / "both", tmp_path / "out")
    assert_equal(reshard.open(tmp_path / "out"), {"w": FULL["w"], "b": FULL["b"], "v": FULL["w"], "c": FULL["b"]})
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


def test_what_is_next_to_the_data_of_two(mindspore_data: Path, tmp_path: Path) -> None:
    for name in ("flat", "plain"):
        shutil.copytree(mindspore_data / "dcp" / "mcore_flat" / "checkpoint", tmp_path / "all" / name)
    root = tmp_path / "all" / "plain"
    for path in paths_in(root, "distcp"):
        (root / path).unlink()
    (root / ".metadata").unlink()
    write_torch(root, {"p": FULL["w"]}, {0: [("p", WHOLE, item(FULL["w"]))]}, planner_data=None)
    plan = reshard.plan(reshard.open(tmp_path / "all"), files=LinkedDCP())
    assert any("common.pt are two of a kind, and left out" in text for text in plan.warnings)
    plan.run(tmp_path / "out")
    assert not {"common.pt", "metadata.json"}.intersection(paths_in(tmp_path / "out"))


def test_names_of_files_that_would_be_the_same(tmp_path: Path) -> None:
    """Those of a directory begin with its name."""
    one_file(tmp_path / "all" / "a", "p", "b__0_0.distcp")
    one_file(tmp_path / "all" / "ab", "q", "__0_0.distcp")
    with pytest.raises(
        SourceError, match=r"ab/__0_0\.distcp would be linked as 'ab__0_0\.distcp'; rename the directory"
    ):
        linked(tmp_path / "all", tmp_path / "out")
    linked(tmp_path / "all", tmp_path / "out", include=("q",))
    assert paths_in(tmp_path / "out", "distcp") == ["ab__0_0.distcp"]


# --- the files ---


def test_links_share_their_bytes(tmp_path: Path) -> None:
    root = simple(tmp_path)
    linked(root, tmp_path / "out")
    for name in ("__0_0.distcp", "__1_0.distcp"):
        assert shares(root / name, tmp_path / "out" / name)
    shutil.rmtree(root)
    assert_equal(reshard.open(tmp_path / "out"), {"w": FULL["w"], "b": FULL["b"]})
    assert reshard.verify(tmp_path / "out").equal  # by sizes: the source is gone


def test_a_link_is_of_the_file_that_a_link_leads_to(tmp_path: Path) -> None:
    root = simple(tmp_path)
    (root / "__0_0.distcp").rename(tmp_path / "blob")
    (root / "__0_0.distcp").symlink_to("../blob")
    linked(root, tmp_path / "deep" / "out")
    assert not (tmp_path / "deep" / "out" / "__0_0.distcp").is_symlink()
    assert_equal(reshard.open(tmp_path / "deep" / "out"), {"w": FULL["w"], "b": FULL["b"]})


def test_once_more(tmp_path: Path) -> None:
    """A finished target is left alone; what is made anew, or by another plan, leaves the source as it is."""
    root = simple(tmp_path)
    before = tree(root)
    linked(root, tmp_path / "out")
    plan = reshard.plan(reshard.open(root), files=LinkedDCP())
    again = plan.run(tmp_path / "out")
    assert (again.finished, again.touched) == (3, 0)
    assert plan.run(tmp_path / "out", restart=True).finished == 0
    other = reshard.plan(reshard.open(root), files=LinkedDCP(), selection=Selection(names={"w": "v"}))
    with pytest.raises(TargetError, match=r"\.metadata was written by a run of another plan"):
        other.run(tmp_path / "out")
    other.run(tmp_path / "out", overwrite=True)
    assert set(reshard.open(tmp_path / "out")) == {"v", "b"}
    assert tree(root) == before
    assert (root / "__0_0.distcp").stat().st_nlink <= 2


@pytest.mark.parametrize("failed", [0, 1])
def test_stopped_halfway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: int) -> None:
    root = simple(tmp_path)
    link, calls = LocalStore.link, []

    def stopped(self: LocalStore, original: str, unfinished: str) -> None:
        calls.append(original)
        if len(calls) > failed:
            raise KeyboardInterrupt
        link(self, original, unfinished)

    monkeypatch.setattr(LocalStore, "link", stopped)
    with pytest.raises(KeyboardInterrupt):
        linked(root, tmp_path / "out")
    assert ".metadata" not in paths_in(tmp_path / "out")
    with pytest.raises(SourceError):
        reshard.open(tmp_path / "out")
    monkeypatch.undo()
    linked(root, tmp_path / "out")
    assert_equal(reshard.open(tmp_path / "out"), {"w": FULL["w"], "b": FULL["b"]})
    assert paths_in(tmp_path / "out") == [".metadata", "__0_0.distcp", "__1_0.distcp"]


def test_copies_that_share_blocks_have_the_time_of_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As hard links have: `.metadata`, which is written before they are made, is to be no older."""

    def cloned(target: int, _request: int, source: int) -> None:
        os.pwrite(target, os.pread(source, 1 << 20, 0), 0)

    monkeypatch.setattr(local.fcntl, "ioctl", cloned)
    root = simple(tmp_path)
    for path in root.iterdir():
        os.utime(path, (path.stat().st_mtime - 100,) * 2)
    linked(root, tmp_path / "out")
    for name in ("__0_0.distcp", "__1_0.distcp"):
        one, other = (root / name).stat(), (tmp_path / "out" / name).stat()
        assert one.st_ino != other.st_ino
        assert one.st_mtime_ns == other.st_mtime_ns


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("first", range(1, 7))
def test_failed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, restart: bool) -> None:
    """A link that got its name, and could not be noted, is a run's own however many runs fail after it."""
    plan = reshard.plan(reshard.open(simple(tmp_path)), files=LinkedDCP())
    fsync = os.fsync

    def from_call(number: int) -> Callable[[int], None]:
        calls = itertools.count(1)

        def failing(fd: int) -> None:
            if next(calls) >= number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(fd)

        return failing

    for number in (first, 1):
        with monkeypatch.context() as patched, suppress(BudgetError):
            patched.setattr(os, "fsync", from_call(number))
            plan.run(tmp_path / "out")
    plan.run(tmp_path / "out", restart=restart)
    assert_equal(reshard.open(tmp_path / "out"), {"w": FULL["w"], "b": FULL["b"]})


def test_a_source_that_changes(tmp_path: Path) -> None:
    root = simple(tmp_path)
    plan = reshard.plan(reshard.open(root), files=LinkedDCP())
    file = root / "__1_0.distcp"
    os.utime(file, ns=(1, 1))
    with pytest.raises(ChangedError, match=r"__1_0\.distcp: changed since it was opened"):
        plan.run(tmp_path / "out")
    assert ".metadata" not in paths_in(tmp_path / "out")
    linked(root, tmp_path / "out")
    content = bytearray(file.read_bytes())
    begin = content.find(FULL["b"].tobytes())
    content[begin] ^= 1
    file.unlink()  # replaced: the target keeps what it was made from
    file.write_bytes(content)
    assert_equal(reshard.open(tmp_path / "out"), {"w": FULL["w"], "b": FULL["b"]})
    assert [one.name for one in reshard.verify(tmp_path / "out").differences] == ["b"]


def test_another_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refused)
    monkeypatch.setattr("reshard.storage.local._share_blocks", lambda *_: False)
    with pytest.raises(TargetError, match=r"cannot be linked to .*/__0_0\.distcp, which is on another file system"):
        linked(simple(tmp_path), tmp_path / "out")
    assert paths_in(tmp_path / "out") == []


# --- what cannot be ---


@pytest.fixture
def sources(mindspore_data: Path, tmp_path: Path) -> dict[str, Callable[[], Path | str]]:
    def at_url() -> str:
        fs, place = filesystem("memory://linked")
        for path in simple(tmp_path, "url").iterdir():
            fs.pipe(f"{place}/{path.name}", path.read_bytes())
        return "memory://linked"

    return {
        "url": at_url,
        "safetensors": lambda: mindspore_data / "dcp" / "safetensors_format" / "checkpoint",
        "hyper": lambda: write_hyper(tmp_path / "hyper", {"w": FULL["w"]}, {0: {"w": [WHOLE]}}),
        "file": lambda: write_file(tmp_path / "a.safetensors", {"w": FULL["w"]}),
        "hf": lambda: mindspore_data / "dcp" / "hf_sharded" / "checkpoint",
    }


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("url", "is at a URL, where no file can be linked"),
        ("safetensors", "has safetensors files, which hold names; expected a DCP"),
        ("hyper", "has safetensors files, which hold names"),
        ("file", "is not one; expected a DCP as PyTorch writes it"),
        ("hf", "has safetensors files, which hold names"),
    ],
)
def test_sources_that_cannot_be_linked(sources: Any, tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        linked(reshard.open(sources[name]()), tmp_path / "out")


def test_targets_that_cannot_be(tmp_path: Path) -> None:
    root = simple(tmp_path / "run")
    for target, said in ((root, "holds the source"), (tmp_path / "run", "holds the source")):
        with pytest.raises(TargetError, match=said):
            reshard.plan(reshard.open(root), files=LinkedDCP()).run(target, overwrite=True, restart=True)
    with pytest.raises(TargetError, match="is at a URL, where no file of a source can be linked"):
        linked(root, "memory://target")  # type: ignore[arg-type]


def test_what_does_not_go_together(tmp_path: Path) -> None:
    checkpoint = reshard.open(simple(tmp_path))
    strategy = Strategy.from_rules({"w": (6, 4)}, {"dp": 2}, {"w": ["dp"]})
    for more, said in (
        ({"target": strategy}, "keep their blocks"),
        ({"ranks": [0]}, "leave ranks"),
        ({"link_replicas": True}, "redundancy and links out"),
        ({"format": "ckpt"}, "do not go together"),
        ({"selection": Selection(cast={"float32": "bfloat16"})}, "keep their dtypes"),
        ({"selection": Selection(names={"x": "y"})}, "name 'x': matches no tensor"),
        ({"selection": Selection(names={"w": "b"})}, "name 'b': is given to w, b|is given to b, w"),
    ):
        with pytest.raises(UsageError, match=said):
            reshard.plan(checkpoint, files=LinkedDCP(), **more)  # type: ignore[arg-type]


def test_files_of_objects_must_be_there(mindspore_data: Path, tmp_path: Path) -> None:
    root = shutil.copytree(mindspore_data / "dcp" / "files" / "checkpoint", tmp_path / "files")
    place = described(root)["listed"]["object.a"][-1][None]["relative_path"]
    os.truncate(root / place, 5)
    with pytest.raises(SourceError, match=rf"{place}.*has 5 bytes; its items end at"):
        reshard.open(root)
    (root / place).unlink()
    with pytest.raises(SourceError, match=rf"{place}: is not there"):
        reshard.open(root)


# --- the command line ---


def test_the_command(tmp_path: Path, apart: Path) -> None:
    (tmp_path / "names.json").write_text(json.dumps({"model.*": "net.*"}))
    given = [apart, tmp_path / "out", "--format", "dcp", "--link", "--name-map", tmp_path / "names.json"]
    assert "16 files linked" in done("transform", *given).stdout
    assert "finished by an earlier run" in done("transform", *given).stdout
    assert "bit for bit" in done("verify", tmp_path / "out").stdout
    assert "net.emb.weight" in done("inspect", tmp_path / "out").stdout
    saved = ["plan", apart, "--format", "dcp", "--link", "--include", "model.*", "-o", tmp_path / "plan.json"]
    assert "0 B from 8 files" in done(*saved).stdout
    assert "8 files linked" in done("run", tmp_path / "plan.json", tmp_path / "planned").stdout
    for more, said in (
        (["--target-strategy", tmp_path / "names.json"], "leave --target-strategy out"),
        (["--ranks", "0", "--memory", "1GB"], "leave --ranks, --memory out"),
        (["--layouts-of", apart, "--prefix", "x"], "leave --prefix, --layouts-of out"),
        (["--write-manifest", tmp_path / "m.json"], "gets links"),
    ):
        result = call("transform", *given, *more)
        assert result.exit_code == 2
        assert said in result.stderr
    result = call("transform", apart, tmp_path / "other", "--link")
    assert "--link: only for --format dcp" in result.stderr


def test_time_does_not_depend_on_size(tmp_path: Path) -> None:
    """10 GB of holes take as long as 10 MB: what is read are the heads of the items."""
    seconds = []
    for name, rows in (("small", 1 << 9), ("large", 1 << 19)):
        saved = saved_tensor(BY_NAME["float32"], (rows, 1024))
        parts, listed = [], []
        (tmp_path / name).mkdir()
        with open(tmp_path / name / "__0_0.distcp", "wb") as file:  # noqa: PTH123
            for number in range(5):
                begin = number * saved.nbytes
                for offset, content in saved.literals:
                    file.seek(begin + offset)
                    file.write(content)
                parts = [Part((0, 0), (rows, 1024), "__0_0.distcp", begin, saved.nbytes)]
                dtype = torch_dtype("", BY_NAME["float32"])
                listed.append(Listed(f"w{number}", dtype, (rows, 1024), parts, (f"w{number}",)))
        (tmp_path / name / ".metadata").write_bytes(metadata(listed, {}))
        report = linked(tmp_path / name, tmp_path / f"{name}-out", {"w*": "v*"})
        seconds.append(report.seconds)
        assert (tmp_path / f"{name}-out" / "__0_0.distcp").stat().st_size == 5 * saved.nbytes
    assert 5 * saved.nbytes > 10e9
    assert max(seconds) < 5
