"""What cannot be read is a difference, on whichever side; bytes that both sides share are not compared."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import numbers, write_file
from commands import call, done
from dcp_files import item, saved, write_hyper, write_torch
from saves_files import tensor, write_rank, write_save

import reshard
from reshard import Selection

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


FULL = numbers({"w": (6, 4), "b": (5,)})


def dcp(root: Path) -> Path:
    """Write w in two files, of which the second has b, too."""
    items = {
        0: [("w", ((0, 0), (3, 4)), item(FULL["w"][:3]))],
        1: [("w", ((3, 0), (3, 4)), item(FULL["w"][3:])), ("b", ((0,), (5,)), item(FULL["b"]))],
    }
    return write_torch(root, FULL, items)


def ranks(root: Path) -> Path:
    """Write w on one rank and b on the other."""
    for rank, name in enumerate(("w", "b")):
        write_file(root / f"rank_{rank}" / "a.safetensors", {name: FULL[name]})
    return root


def linked(source: Path, target: Path) -> Path:
    """Convert with links; a file system that clones files gets hard links, too."""
    done("convert", source, target, "--to", "dcp", "--link")
    for path in source.glob("*.distcp"):
        (target / path.name).unlink()
        (target / path.name).hardlink_to(path)
    return target


def damage(path: Path, values: np.ndarray) -> None:
    """Flip a bit of stored values, in place."""
    content = bytearray(path.read_bytes())
    content[content.index(values.tobytes())] ^= 1
    with path.open("r+b") as file:
        file.write(content)


def test_damage_in_a_linked_file_is_found_by_its_checksums(tmp_path: Path) -> None:
    source = dcp(tmp_path / "source")
    target = linked(source, tmp_path / "target")
    before = reshard.verify(target)
    assert before.equal
    assert (before.tensors, before.linked) == (0, 2)
    assert before.linked_summed_bytes > FULL["w"].nbytes
    damage(source / "__1_0.distcp", FULL["b"])
    after = reshard.verify(target)
    assert [(each.kind, each.name) for each in after.differences] == [("checksum", "b")]
    result = call("verify", target, "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["linked"] == 2


def test_linked_files_without_checksums_are_not_said_to_be_equal(tmp_path: Path) -> None:
    source = ranks(tmp_path / "source")
    shutil.copytree(source, tmp_path / "target", copy_function=os.link)
    damage(source / "rank_0" / "a.safetensors", FULL["w"])
    result = json.loads(done("verify", tmp_path / "target", "--against", source, "--json").stdout)
    assert (result["linked"], result["linked_summed_bytes"], result["tensors"], result["bytes_read"]) == (2, 0, 0, 0)
    assert "every bit" not in done("verify", tmp_path / "target", "--against", source).stdout


def test_only_linked_tensors_are_left_out(tmp_path: Path) -> None:
    source = ranks(tmp_path / "source")
    shutil.copytree(source, tmp_path / "target")
    path = tmp_path / "target" / "rank_0" / "a.safetensors"
    path.unlink()
    path.hardlink_to(source / "rank_0" / "a.safetensors")
    verified = reshard.verify(tmp_path / "target", against=source)
    assert (verified.equal, verified.tensors, verified.linked) == (True, 1, 1)
    assert verified.bytes_read == 2 * FULL["b"].nbytes
    damage(tmp_path / "target" / "rank_1" / "a.safetensors", FULL["b"])
    assert [each.name for each in reshard.verify(tmp_path / "target", against=source).differences] == ["b"]


def test_other_items_of_a_linked_file_are_compared(tmp_path: Path) -> None:
    """Metadata that name the bytes of another tensor are not overlooked, though the file is the same."""
    full = numbers({"w": (5,)}) | {"b": np.arange(5, dtype="float32") + 90}
    items = {0: [("w", ((0,), (5,)), item(full["w"])), ("b", ((0,), (5,)), item(full["b"]))]}
    source = write_torch(tmp_path / "source", full, items)
    done("convert", source, tmp_path / "target", "--to", "dcp", "--link", "--name-map", swapped(tmp_path))
    shutil.rmtree(tmp_path / "target" / ".reshard")
    (tmp_path / "target" / "__0_0.distcp").unlink()
    (tmp_path / "target" / "__0_0.distcp").hardlink_to(source / "__0_0.distcp")
    verified = reshard.verify(tmp_path / "target", against=source)
    assert {each.name for each in verified.differences} == {"w", "b"}
    assert verified.linked == 0
    names = Selection(name_map={"w": "b", "b": "w"})
    assert reshard.verify(tmp_path / "target", against=source, selection=names).linked == 2


def swapped(tmp_path: Path) -> Path:
    (tmp_path / "names.json").write_text(json.dumps({"w": "b", "b": "w"}))
    return tmp_path / "names.json"


@pytest.mark.parametrize("copies", [1, 2])
def test_replicas_of_a_checkpoint_compared_with_itself(tmp_path: Path, copies: int) -> None:
    for rank in range(copies):
        write_file(tmp_path / "one" / f"rank_{rank}" / "a.safetensors", {"w": FULL["w"]})
    opened = reshard.open(tmp_path / "one", layout={"*": "whole"})
    verified = reshard.verify(opened, against=opened)
    assert verified.equal
    assert (verified.tensors, verified.linked) == ((0, 1) if copies == 1 else (1, 0))


W: Any = (0, 0), (6, 4)
B: Any = (0,), (5,)


def pytorch(root: Path) -> Path:
    items = [("w", W, saved("no tensor")), ("b", B, item(FULL["b"]))]
    return write_torch(root, FULL, {0: items})


def encoded(root: Path) -> Path:
    """Of an encoding that is not known."""
    first = write_torch(
        root / "first", {"w": FULL["w"]}, {0: [("w", W, item(FULL["w"]))]}, transform_descriptors=["x/1"]
    )
    write_torch(root / "second", {"b": FULL["b"]}, {0: [("b", B, item(FULL["b"]))]})
    return first.parent


def hyper(root: Path) -> Path:
    write_hyper(root, FULL, {0: {"w": [W], "b": [B]}})
    write_file(root / "_rank0_.safetensors", {"b": FULL["b"]})
    return root


def hugging_face(root: Path) -> Path:
    """Of which two rows are in no file."""
    for number, begin in enumerate((0, 4), 1):
        offsets = {"w": {"saved_offsets": [begin, 0]}} | ({} if begin else {"b": {"saved_offsets": [0]}})
        some = {"w": FULL["w"][begin : begin + 2]} | ({} if begin else {"b": FULL["b"]})
        path = root / f"shard-{number:05d}-model-00001-of-00001.safetensors"
        write_file(path, some, DCP_SHARDING_INFO=json.dumps(offsets), DCP_VERSION="1.0")
    return root


def saved_ranks(root: Path) -> Path:
    for rank in range(2):
        write_rank(root, rank, 2, {"w": tensor(FULL["w"][rank:]), "b": tensor(FULL["b"])})
    return root


def one_file(root: Path) -> Path:
    return write_save(root / "model.pt", {"w": tensor(FULL["w"], first=1), "b": tensor(FULL["b"])})


def zarr(root: Path) -> Path:
    write_file(root / "whole.safetensors", FULL)
    reshard.open(root / "whole.safetensors").to_zarr(root / "z")
    shutil.rmtree(root / "z.reshard")
    for path, changes in ((root / "z" / "w", {"data_type": "r16"}), (root / "z" / "b", {}), (root / "z", {})):
        said = json.loads((path / "zarr.json").read_text())
        (path / "zarr.json").write_text(json.dumps(said | {"attributes": {}} | changes))
    return root / "z"


FORMATS = [pytorch, encoded, hyper, hugging_face, saved_ranks, one_file, zarr]


@pytest.mark.parametrize("made", FORMATS)
def test_on_either_side(tmp_path: Path, made: Callable[[Path], Path]) -> None:
    """Though the rest is equal; left out by name it is none."""
    root, whole = made(tmp_path / "root"), write_file(tmp_path / "whole.safetensors", FULL)
    found = reshard.open(root)
    assert (set(found.unreadable), set(found)) == ({"w"}, {"b"})
    for target, source in ((root, whole), (whole, root)):
        (difference,) = reshard.verify(target, against=source).differences
        assert difference.name == "w"
        assert found.unreadable["w"] in difference.text
        refused = call("verify", target, "--against", source)
        assert refused.exit_code == 3
        assert found.unreadable["w"] in refused.stdout
        done("verify", target, "--against", source, "--exclude", "w")


def test_blocks_that_mindformers_lost(mindspore_data: Path, tmp_path: Path) -> None:
    (case,) = mindspore_data.glob("checkpoint2*/pynative_submesh_once")
    whole = write_file(tmp_path / "whole.safetensors", dict(np.load(case / "full.npz")))
    lost = reshard.open(case / "checkpoint").unreadable
    assert lost
    for target, source in ((case / "checkpoint", whole), (whole, case / "checkpoint")):
        found = reshard.verify(target, against=source).differences
        assert {one.name for one in found if one.kind in {"missing", "extra"}} >= set(lost)


def test_what_is_copied_and_cannot_be_read(tmp_path: Path) -> None:
    """Its files are equal, and it is said that it was not compared."""
    source = encoded(tmp_path / "source")
    shutil.copytree(source, tmp_path / "new")
    found = reshard.verify(tmp_path / "new", against=source)
    assert found.equal
    assert "w cannot be read on either side, and is not compared" in found.warnings
