"""What every rank shall hold: a target that lacks anything of that is not equal, whatever its other files have."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import helpers
import numpy as np
import pytest
from checkpoints import numbers, write_file, write_ranks
from compared import AFTER, BEFORE, FULL, compared, rank_file
from refusals import refused

import reshard
from reshard import Layout, Selection, Strategy
from reshard.core.layout.block import Block
from reshard.core.verify.sides import opened
from reshard.errors import SourceError
from reshard.kits.files import index_file

if TYPE_CHECKING:
    from pathlib import Path

SHARED = Strategy.of({
    "first": {0: Layout.of([2], [0, -1])}, "w": {0: Layout.of([2], [-1, -1]), 1: Layout.of([2], [-1, -1])},
    "last": {1: Layout.of([2], [-1, -1])},
})  # fmt: skip
STAGES = numbers({"first": (4, 6), "w": (4, 6), "last": (2, 2)})


def without(path: Path, *names: str, format: str = "ckpt") -> None:
    """Write a rank's file again without some of its tensors."""
    held = {name: (dtype, shape, content) for name, (dtype, shape, content) in helpers.read_rank_file(path).items()}
    arrays: dict[str, Any] = {
        name: np.frombuffer(content, dtype).reshape(shape) for name, (dtype, shape, content) in held.items()
    }
    write_file(path, {name: array for name, array in arrays.items() if name not in names}, format)


def as_map(path: Path, name: str) -> None:
    """Flip the bit of a `.ckpt` file that makes the message of a tensor one of a map parameter."""
    content = bytearray(path.read_bytes())
    place = content.index(b"\x0a" + bytes([len(name)]) + name.encode()) + 2 + len(name)
    assert content[place] == 0x12
    content[place] ^= 0x08
    path.write_bytes(content)


@pytest.fixture
def plain(tmp_path: Path) -> tuple[Path, Path]:
    """As `sides`, without what no strategy names, all in .ckpt files."""
    source = write_ranks(tmp_path / "src", FULL, BEFORE, "ckpt")
    reshard.plan(reshard.open(source, strategy=BEFORE), AFTER).run(tmp_path / "dst", fsync=False)
    return source, tmp_path / "dst"


def lacking(found: reshard.Verification) -> set[tuple[str, int | None, str | None]]:
    assert {one.side for one in found.differences} <= {"target"}
    return {(one.kind, one.rank, one.name) for one in found.differences}


def test_an_empty_file_of_a_rank_is_not_equal(plain: tuple[Path, Path]) -> None:
    """Rank 1 shares w with ranks 3 and 5; of b and c it has blocks of its own in another test."""
    source = write_ranks(plain[0].parent / "w", {"w": FULL["w"]}, BEFORE, "ckpt")
    target = write_ranks(plain[0].parent / "t", {"w": FULL["w"]}, AFTER, "ckpt")
    path = rank_file(target, 1)
    path.write_bytes(b"")
    found = compared(source, target)
    assert lacking(found) == {("missing", 1, "w")}
    (one,) = found.differences
    assert (one.path, one.block) == (str(path), Block((0, 18), (48, 36)))
    assert one.text.endswith("if each block is stored on one rank only, give deduplicated=True")
    assert compared(source, target, deduplicated=True).equal
    only_w = Strategy.of({"w": AFTER.tensors["w"][0].layout})
    with refused(SourceError, "missing-replicas", "rank 1: w", "deduplicated=True") as caught:
        reshard.verify(target, only_w)
    assert caught.value.exit_code == 4
    assert reshard.verify(target, only_w, deduplicated=True).equal


def test_a_replica_that_a_rank_lacks(plain: tuple[Path, Path]) -> None:
    source, target = plain
    assert compared(source, target).equal
    without(rank_file(target, 2), "w")
    assert lacking(compared(source, target)) == {("missing", 2, "w")}
    with refused(SourceError, "missing-replicas", "rank 2: w"):
        reshard.verify(target, AFTER)
    assert reshard.verify(target, AFTER, selection=Selection(allow_missing=("w",))).equal
    (notice,) = reshard.verify(target, AFTER, deduplicated=True).warnings
    assert "replicas are stored once" in notice


@pytest.mark.parametrize("name", ["w", "step"])
def test_one_bit_makes_a_tensor_a_map_parameter(tmp_path: Path, name: str) -> None:
    also = {"step": np.array(7, np.int32)}
    source = write_ranks(tmp_path / "src", FULL, BEFORE, "ckpt", also)
    target = write_ranks(tmp_path / "dst", FULL, AFTER, "ckpt", also)
    as_map(rank_file(target, 4), name)
    for more in ({}, {"deduplicated": True}, {"selection": Selection(drop=("*",))}):
        found = compared(source, target, **more)
        assert lacking(found) == {("missing", 4, name)}
        assert (
            found.differences[0].text == "is a map parameter (a hash table), which has no layout, and is not compared"
        )
    with refused(SourceError, "unreadable-tensor", f"rank 4: '{name}'", f"drop='{name}'"):
        reshard.verify(target, AFTER)
    assert reshard.verify(target, AFTER, selection=Selection(drop=(name,))).equal
    for rank in (0, 1, 2, 3, 5):
        as_map(rank_file(target, rank), name)
    found = compared(source, target, selection=Selection(drop=("*",)))
    assert lacking(found) == {("missing", rank, name) for rank in range(6)}


@pytest.mark.parametrize("name", ["step", "note"])
def test_what_no_strategy_names_is_on_every_rank(sides: tuple[Path, Path], name: str) -> None:
    source, target = sides
    also: dict[str, Any] = {"step": np.array(7, np.int32), "note": "hello"}
    del also[name]
    other = write_ranks(target.parent / "other", FULL, AFTER, also=also)
    rank_file(other, 3).rename(rank_file(target, 3))
    assert lacking(compared(source, target)) == {("missing", 3, name)}
    with refused(SourceError, "missing-replicas", f"rank 3: {name}"):
        reshard.verify(target, AFTER)


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_a_deduplicated_target_has_every_block_once(tmp_path: Path, format: str) -> None:
    source = write_ranks(tmp_path / "src", FULL, BEFORE, "ckpt", {"step": np.array(7, np.int32)})
    opened = reshard.open(source, strategy=BEFORE)
    reshard.plan(opened, AFTER, to=format, remove_redundancy=True).run(tmp_path / "dst", fsync=False)
    found = compared(source, tmp_path / "dst")
    assert found.equal == (format == "safetensors")  # .ckpt files do not say it
    for more in ({}, {"deduplicated": True})[format == "ckpt" :]:
        assert compared(source, tmp_path / "dst", **more).equal
        assert reshard.verify(tmp_path / "dst", AFTER, **more).equal
    if format == "ckpt":
        with refused(SourceError, "missing-replicas", "deduplicated=True"):
            reshard.verify(tmp_path / "dst", AFTER)


def test_a_tensor_that_stages_share_is_in_each_of_a_conversion(tmp_path: Path) -> None:
    """MindSpore leaves it out of the later stage; a conversion does not, and a network of that stage has it."""
    write_file(tmp_path / "src.ckpt", STAGES, "ckpt")
    target = write_ranks(tmp_path / "dst", STAGES, SHARED, "ckpt")

    def verified(**more: Any) -> reshard.Verification:
        return reshard.verify(target, SHARED, against=tmp_path / "src.ckpt", **more)

    assert verified().equal
    assert not reshard.verify(target, SHARED).warnings
    without(rank_file(target, 3), "w")
    assert lacking(verified()) == {("missing", 3, "w")}
    assert verified(deduplicated=True).equal
    with refused(SourceError, "missing-replicas", "rank 3: w"):
        reshard.verify(target, SHARED)
    without(rank_file(target, 2), "w")
    assert lacking(verified()) == {("missing", 2, "w"), ("missing", 3, "w")}
    assert lacking(verified(deduplicated=True)) == {("missing", 2, "w"), ("missing", 3, "w")}
    assert reshard.verify(target, SHARED).warnings == (
        "stage 1 has nothing of w, which it shares with others: MindSpore leaves out what another stage stores",
    )
    # As a source it is whole: stage 0 has all.
    assert reshard.verify(tmp_path / "src.ckpt", against=target, source_strategy=SHARED).equal


def test_some_ranks_are_verified_for_what_they_shall_hold(plain: tuple[Path, Path]) -> None:
    source, target = plain
    for rank in (0, 4, 5):
        rank_file(target, rank).unlink()
    partial = opened(target, AFTER, partial=True)
    assert reshard.verify(reshard.Checkpoint(partial), against=source, source_strategy=BEFORE).equal
    assert reshard.verify(reshard.Checkpoint(partial)).equal
    without(rank_file(target, 2), "w", "c")
    partial = opened(target, AFTER, partial=True)
    found = reshard.verify(reshard.Checkpoint(partial), against=source, source_strategy=BEFORE)
    assert lacking(found) == {("missing", 2, "w"), ("missing", 2, "c")}
    once = reshard.verify(reshard.Checkpoint(partial), against=source, source_strategy=BEFORE, deduplicated=True)
    assert lacking(once) == {("missing", 2, "c")}  # w may be on rank 0 or 4, and of c nobody else has its block


def test_what_may_be_dropped_is_not_what_may_be_lost(plain: tuple[Path, Path]) -> None:
    """The target strategy names it, so that a conversion writes it, whatever it may drop."""
    source, target = plain
    for rank in range(6):
        without(rank_file(target, rank), "c")
    found = compared(source, target, selection=Selection(drop=("*",), allow_missing=("*",)))
    assert (found.dropped, lacking(found)) == ((), {("missing", None, "c")})


def test_notes_of_the_files_are_carried_over(tmp_path: Path) -> None:
    source = write_file(tmp_path / "src.safetensors", FULL, epoch="7")
    reshard.plan(reshard.open(source)).run(tmp_path / "dst", fsync=False)
    target = rank_file(tmp_path / "dst", 0)
    found = reshard.verify(tmp_path / "dst", against=source)
    assert found.equal
    assert not any("note" in text for text in found.unchecked)
    content = target.read_bytes()
    for old, new, count in ((b'"epoch":"7"', b'"epoch":"6"', 1), (b'"epoch":"7"', b'"epoci":"7"', 2)):
        target.write_bytes(content.replace(old, new))
        differences = reshard.verify(tmp_path / "dst", against=source).differences
        assert [(one.kind, one.rank, one.path) for one in differences] == [("note", 0, str(target))] * count
    plain = write_file(tmp_path / "src.ckpt", FULL, "ckpt")
    found = reshard.verify(tmp_path / "dst", against=plain)  # such files have none
    assert found.equal
    assert found.unchecked[0] == "notes (__metadata__)"


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_a_flipped_bit_is_noticed_or_not_looked_at(tmp_path: Path, format: str) -> None:
    """In headers and contents; what passes is of what the result says it did not look at."""
    full = numbers({"w": (4, 2), "b": (2,)}, "int16")
    strategy = Strategy.of({"w": Layout.of([2], [0, -1]), "b": Layout.of([2], [-1])})
    also: dict[str, Any] = {"step": np.array(7, np.int32), "note": "ü"}
    source = write_ranks(tmp_path / "src", full, strategy, format, also)
    target = write_ranks(tmp_path / "dst", full, strategy, format, also)
    path = rank_file(target, 1)
    content = path.read_bytes()

    def passes() -> dict[str, bool]:
        found = {}
        for way, more in (("structure", {}), ("against", {"against": source, "source_strategy": strategy})):
            try:
                found[way] = reshard.verify(target, strategy, **more).equal
            except SourceError:
                found[way] = False
        return found

    entries = index_file(str(path)).entries
    stored = {place for entry in entries.values() for at, n in entry.runs for place in range(at, at + n)}
    text = content.index("ü".encode() if format == "safetensors" else "ü".encode("utf-32-le"))
    if format == "safetensors":
        unseen = set(range(content.index(b'"format"'), content.index(b'"ms"') + 4))
    else:
        unseen = {content.index(b"\x08\x00\x12\x03str") + 1}  # dims of text
    random = Random(format)  # noqa: S311 -- the same bits again
    for place in range(len(content)):
        bit = random.randrange(8)
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
        passed = passes()
        assert not passed["against"] or place in unseen, (place, bit)
        assert not passed["structure"] or place in unseen | stored | {text, text + 1}, (place, bit)
