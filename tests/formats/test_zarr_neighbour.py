"""`NAME.zarr.reshard`, where the ledger of a zarr store goes: nothing there is deleted that no ledger wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fsspec
import pytest
from checkpoints import plan_with, tree, write_file
from commands import call, done
from refusals import refused
from remotes import FULL, get

import reshard
from reshard.errors import TargetError
from reshard.formats.zarr.layout import ZarrGroup

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.core.plan.plan import Plan

LOG = "00000001-abcdef12.jsonl"
MADE = "made-00ff.json"


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    source = reshard.open(write_file(tmp_path / "src" / "net.safetensors", FULL))
    return plan_with(source, files=ZarrGroup(chunk_size=512, shard_size=0))


@pytest.mark.parametrize(
    ("names", "option"),
    [(["notes.txt"], None), (["deep/er/notes.txt"], "--overwrite"), ([LOG], "--restart"), ([MADE], "--overwrite"),
     (["lock", "made-.json"], "--dry-run")],
)  # fmt: skip
def test_what_no_ledger_wrote_stays(tmp_path: Path, names: list[str], option: str | None) -> None:
    source = write_file(tmp_path / "net.safetensors", FULL)
    for name in names:
        path = tmp_path / "m.zarr.reshard" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"somebody": "else\'s"}\n')
    before = tree(tmp_path)
    refused = call("convert", source, tmp_path / "m.zarr", "--to", "zarr", *([option] if option else []))
    assert refused.exit_code == 6
    assert tree(tmp_path) == before


@pytest.mark.parametrize("kind", ["a link to a directory", "a link to nothing", "a file"])
@pytest.mark.parametrize("option", [None, "--overwrite"])
def test_what_is_no_directory_is_refused(tmp_path: Path, kind: str, option: str | None) -> None:
    source = write_file(tmp_path / "net.safetensors", FULL)
    place, elsewhere = tmp_path / "m.zarr.reshard", tmp_path / "elsewhere"
    if kind == "a file":
        place.write_text("mine")
    else:
        place.symlink_to(elsewhere)
    if kind == "a link to a directory":
        done("convert", source, tmp_path / "other.zarr")
        (tmp_path / "other.zarr.reshard").rename(elsewhere)  # it has nothing but a ledger, of another store
        (elsewhere / "notes.txt").write_text("mine")
    before = tree(tmp_path)
    assert call("convert", source, tmp_path / "m.zarr", *([option] if option else [])).exit_code == 6
    assert place.is_symlink() or place.is_file()
    assert tree(tmp_path) == before


def test_what_comes_there_during_a_run_stays(plan: Plan, tmp_path: Path) -> None:
    """The ledger does without its place rather than delete anything there."""
    notes = tmp_path / "m.zarr.reshard" / "notes.txt"

    def begin(_: object) -> None:
        notes.parent.mkdir(exist_ok=True)
        notes.write_text("mine")

    plan.run(tmp_path / "m.zarr", progress=begin)
    assert notes.read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "overwrite"),
    [("notes.txt", False), ("deep/er/notes.txt", True), ("00000001-abcdef12.000000.jsonl", True), (MADE, False)],
)
def test_at_a_url_at_any_depth(plan: Plan, root: str, name: str, overwrite: bool) -> None:
    with fsspec.open(f"{root}/m.zarr.reshard/{name}", "wb") as file:
        file.write(b"somebody else's\n")
    before = get(root)
    with refused(TargetError, "other-files", "m.zarr.reshard", name):
        plan.run(f"{root}/m.zarr", overwrite=overwrite)
    assert get(root) == before
