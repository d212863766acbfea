"""Manifests: made by reading, checked without a strategy, refused where they lie or lead astray."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import numbers, plan_with, write_file, write_ranks
from compared import AFTER, BEFORE, FULL, rank_file
from refusals import refused
from samples import one_in

import reshard
from reshard import Layout, Manifest, Strategy
from reshard.core.plan import budget
from reshard.core.storage.crc import crc32c
from reshard.core.verify.manifest import FileSums, write_items
from reshard.dtypes import BY_NAME
from reshard.errors import SourceError, TargetError, UsageError
from reshard.formats.sets.options import HuggingFaceSet, MindSporeSet

if TYPE_CHECKING:
    from pathlib import Path

Sides = tuple["Path", "Path"]


@pytest.fixture
def made(sides: Sides) -> Manifest:
    return reshard.Manifest.make(sides[1])


def test_a_manifest_has_sizes_and_sums(sides: Sides, made: Manifest) -> None:
    _, target = sides
    assert list(made.files) == [f"rank_{rank}/checkpoint_{rank}.safetensors" for rank in range(6)]
    for rank in range(6):
        file = made.files[f"rank_{rank}/checkpoint_{rank}.safetensors"]
        assert file.nbytes == rank_file(target, rank).stat().st_size
        assert set(file.tensors) == {*FULL, "step", "note"}
        block = FULL["c"][4 * rank : 4 * rank + 4]
        assert file.tensors["c"] == (BY_NAME["float32"], (4, 8), crc32c(block.tobytes()))
        assert file.tensors["note"] == (BY_NAME["str"], (), crc32c(b"hello"))


def test_the_sums_do_not_depend_on_format_threads_or_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for format in ("ckpt", "safetensors"):
        for threads, nbytes in ((1, 64 << 20), (3, 100)):
            monkeypatch.setattr(budget, "TASK_BYTES", nbytes)
            monkeypatch.setattr(budget, "BAND_BYTES", nbytes // 2 - 13)
            path = write_file(tmp_path / f"a.{format}", {**FULL, "note": "größe", "none": np.zeros(0)}, format)
            found.append(reshard.Manifest.make(path, threads=threads).files[path.name].tensors)
    assert all(a == b for a, b in pairwise(found))
    assert found[0]["w"].crc32c == crc32c(FULL["w"].tobytes())
    assert found[0]["none"].crc32c == 0


def test_there_and_back(tmp_path: Path, made: Manifest) -> None:
    made.write(tmp_path / "m.json")
    assert reshard.Manifest.read(tmp_path / "m.json") == made
    before = (tmp_path / "m.json").read_bytes()
    with refused(TargetError, "already-exists", "m.json", "overwrite=True"):
        made.write(tmp_path / "m.json")
    made.write(tmp_path / "m.json", overwrite=True)
    assert (tmp_path / "m.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.glob("m.json*")) == ["m.json"]


def test_written_file_by_file(tmp_path: Path, made: Manifest) -> None:
    count = made.write(tmp_path / "m.json")
    assert count == made.checksums == 30 + 6
    assert write_items(iter(made.files.items()), tmp_path / "n.json", overwrite=False) == count
    assert (tmp_path / "n.json").read_bytes() == (tmp_path / "m.json").read_bytes()
    with refused(SourceError, "outside-directory", "'../x'"):
        write_items([*made.files.items(), ("../x", FileSums(0, 0))], tmp_path / "o.json", overwrite=False)
    assert sorted(path.name for path in tmp_path.glob("*.json*")) == ["m.json", "n.json"]


def test_unharmed_files_pass_wherever_they_are(sides: Sides, made: Manifest) -> None:
    moved = sides[1].rename(sides[1].parent / "elsewhere")
    found = reshard.verify(moved, manifest=made)
    assert found.equal
    assert (found.files, found.tensors, found.copies) == (6, 5, 30)
    assert found.bytes_read == sum(rank_file(moved, rank).stat().st_size for rank in range(6))
    assert not found.warnings


@one_in(7)
@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_any_flipped_bit_of_a_file_is_found(tmp_path: Path, format: str, every: int) -> None:
    """In the header too: names, places, notes, what a `str` entry has besides its text, padding, the number at the end.

    A note is not a part of a tensor, and of a `str` entry the dims are not.
    """
    tensors = {**numbers({"w": (2, 3), "v": (1,)}), "note": "ü"}
    path = write_file(tmp_path / f"a.{format}", tensors, format, step="3")
    content = path.read_bytes() + (b"crc_num\0\0\0\0\0\0\1\2\3\4" if format == "ckpt" else b"")
    path.write_bytes(content)
    made = reshard.Manifest.make(path)
    assert reshard.verify(path, manifest=made).equal
    missed = []
    for number in range(0, 8 * len(content), every):
        place, bit = divmod(number, 8)
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
        if reshard.verify(path, manifest=made).equal:
            missed.append((place, bit))
    assert not missed


def test_a_flipped_bit_of_a_note_is_a_difference_of_the_file(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.safetensors", numbers({"w": (2, 3)}), epoch="7")
    made = reshard.Manifest.make(path)
    path.write_bytes(path.read_bytes().replace(b'"epoch":"7"', b'"epoch":"6"'))
    (one,) = reshard.verify(path, manifest=made).differences
    assert (one.kind, one.name, one.path) == ("checksum", None, "a.safetensors")
    assert one.text.startswith("the header, or what else is not contents, has the CRC-32C ")


def test_what_is_wrong_is_told_of_each_file(sides: Sides, made: Manifest) -> None:
    _, target = sides
    rank_file(target, 0).unlink()
    with rank_file(target, 1).open("ab") as file:
        file.write(b"\0")
    rank_file(target, 2).write_bytes(bytes(rank_file(target, 2).stat().st_size))
    other = {name: array[::-1].copy() if name == "w" else array for name, array in FULL.items()}
    write_ranks(target.parent / "other", {**other, "v": FULL["c"]}, AFTER, also={"step": np.array(7, np.int32)})
    outside = target.parent / "outside"
    rank_file(target, 4).rename(outside)
    (target / "rank_4" / "checkpoint_4.safetensors").symlink_to(outside)
    write_file(target / "rank_9" / "late.ckpt", FULL, "ckpt")
    found = reshard.verify(target, manifest=made)
    told = {str(one.path)[:6]: (one.kind, one.text.split(";")[0]) for one in found.differences}
    assert told == {
        "rank_0": ("file", "is not there"),
        "rank_1": ("size", f"has {rank_file(target, 1).stat().st_size} bytes"),
        "rank_2": ("file", told["rank_2"][1]),
        "rank_4": ("file", "leads out of the directory, and is not followed"),
    }
    assert "not a checkpoint" in told["rank_2"][1]
    assert found.warnings == ("rank_9/late.ckpt: not in the manifest, and not checked",)


def test_headers_that_say_something_else(tmp_path: Path) -> None:
    def sums(**tensors: Any) -> tuple[Path, Manifest]:
        path = write_file(tmp_path / "a.safetensors", tensors)
        return path, reshard.Manifest.make(path)

    zeros = np.zeros((2, 4), np.float32)
    _, before = sums(w=zeros, v=zeros, u=zeros)
    path, after = sums(w=zeros.reshape(4, 2), v=zeros.view(np.int32), x=zeros)
    (one,) = before.files.values()
    same_size = Manifest({path.name: FileSums(after.files[path.name].nbytes, one.crc32c, one.tensors)})
    found = {(one.kind, one.name) for one in reshard.verify(path, manifest=same_size).differences}
    assert found == {("shape", "w"), ("dtype", "v"), ("missing", "u"), ("extra", "x")}


def test_some_of_the_files_only(sides: Sides, made: Manifest) -> None:
    for rank in (0, 2, 5):
        rank_file(sides[1], rank).unlink()
    assert len(reshard.verify(sides[1], manifest=made).differences) == 3
    found = reshard.verify(sides[1], manifest=made, partial=True)
    assert found.equal
    assert found.files == 3
    assert found.warnings == ("3 of the 6 files of the manifest are not here",)


@pytest.mark.parametrize("style", [MindSporeSet, HuggingFaceSet])
def test_the_index_of_a_set_is_summed_whole(sides: Sides, tmp_path: Path, style: Any) -> None:
    source = reshard.open(sides[0], strategy=BEFORE)
    plan_with(source, files=style(4000), format="safetensors").run(tmp_path / "set", fsync=False)
    made = reshard.Manifest.make(tmp_path / "set")
    assert reshard.verify(tmp_path / "set", manifest=made).equal
    (index,) = (tmp_path / "set").glob("*.json")
    assert made.files[index.name] == FileSums(index.stat().st_size, crc32c(index.read_bytes()))
    index.write_bytes(index.read_bytes().replace(b'"w"', b'"v"'))
    (one,) = reshard.verify(tmp_path / "set", manifest=made).differences
    assert (one.kind, one.name, one.path) == ("checksum", None, index.name)


def test_a_checkpoint_is_not_a_directory_of_files(sides: Sides, made: Manifest) -> None:
    with refused(UsageError, "wrong-type", "manifest"):
        reshard.verify(reshard.open(sides[1], strategy=AFTER), manifest=made)


def test_strategies_are_not_needed(tmp_path: Path) -> None:
    strategy = Strategy.of({"w": Layout.of([4], [0])})
    write_ranks(tmp_path / "a", numbers({"w": (8,)}), strategy, "ckpt", name="net")
    made = reshard.Manifest.make(tmp_path / "a", rank_pattern="rank_{rank}/net*", suffix=".ckpt")
    assert list(made.files) == [f"rank_{rank}/net.ckpt" for rank in range(4)]
    assert repr(made).startswith("<Manifest: 4 files, ")
