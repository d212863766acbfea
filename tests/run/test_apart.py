"""A target is not inside its source, nor a source inside its target; and a file alone has nothing left beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fsspec
import pytest
from checkpoints import assert_equal, numbers, tree, write_file, write_ranks
from commands import call, done
from refusals import refused
from remotes import get, put

import reshard
from reshard import Layout, Strategy
from reshard.errors import TargetError

if TYPE_CHECKING:
    from pathlib import Path

FULL = numbers({"a": (8, 4), "b": (8, 8)})
TWO = Strategy.of(dict.fromkeys(FULL, Layout.of([2], [0, -1])))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a source of two ranks, one of one file, and a store."""
    write_ranks(tmp_path / "src", FULL, TWO)
    reshard.write_strategy(TWO, tmp_path / "two.ckpt")
    write_file(tmp_path / "one" / "rank_0" / "net.safetensors", FULL)
    done("convert", tmp_path / "one" / "rank_0" / "net.safetensors", tmp_path / "z.zarr")
    (tmp_path / "link").symlink_to("src")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        "convert src src/rank_0 --source-strategy two.ckpt",
        "convert src link/new --source-strategy two.ckpt",
        "convert src src/out --source-strategy two.ckpt --to dcp",
        "convert src src/out --source-strategy two.ckpt --to checkpoint2 --target-step 3",
        "convert link src/set --source-strategy two.ckpt --to hf",
        "convert src . --to ckpt",
        "convert one/rank_0 one/rank_0/rank_0 --to ckpt",
        "convert one/rank_0 one --to ckpt",
        "convert z.zarr z.zarr/w --target-strategy two.ckpt",
        "convert z.zarr z.zarr/w/m.zarr",
    ],
)
@pytest.mark.parametrize("more", [[], ["--overwrite"], ["--dry-run"]])
def test_one_inside_the_other_is_refused(folder: Path, words: str, more: list[str]) -> None:
    before = tree(folder)
    assert call(*words.split(), *more).exit_code == 6
    assert tree(folder) == before
    assert not (folder / "src" / "out").exists()


def test_a_plan_file_is_looked_at_where_it_is_run(folder: Path) -> None:
    done("plan", "src", "--source-strategy", "two.ckpt", "-o", "file.plan")
    before = tree(folder)
    for target in ("src/rank_0", "."):
        assert call("run", "file.plan", target).exit_code == 6
    assert tree(folder) == before


def test_at_a_url(root: str, tmp_path: Path) -> None:
    write_ranks(tmp_path / "src", FULL, TWO)
    put(tmp_path / "src", f"{root}/src")
    source = reshard.open(f"{root}/src", strategy=TWO)
    before = get(root)
    for target in (f"{root}/src/rank_0", root):
        with refused(TargetError, "overlaps", f"{root}/src"):
            reshard.plan(source).run(target)
    assert get(root) == before


def test_next_to_each_other_is_well(folder: Path) -> None:
    """Files are converted in place, ranks beside others of their run, and one file beside its source."""
    done("convert", "src", "src", "--to", "ckpt")
    done("convert", "one/rank_0/net.safetensors", "one/rank_0/new.ckpt", "--to", "ckpt")
    done("convert", "one/rank_0/net.safetensors", "one/rank_0/m.zarr")
    done("convert", "--to=mindspore", "src", "src2", "--source-strategy", "two.ckpt", "--suffix", ".ckpt")


@pytest.mark.parametrize("target", ["out.safetensors", "new/out.safetensors", "./out.safetensors"])
def test_a_file_alone_has_nothing_beside_it(folder: Path, target: str) -> None:
    before = {path.relative_to(folder) for path in folder.rglob("*")}
    new = {"new"} if target.startswith("new") else set()
    command = ["convert", "one/rank_0/net.safetensors", target, "--to", "safetensors"]
    done(*command)
    done(*command, "--overwrite")
    assert "nothing is left to do" in done(*command).output
    after = {path.relative_to(folder) for path in folder.rglob("*")}
    assert {str(path) for path in after - before} == {target.removeprefix("./"), *new}
    assert_equal(reshard.open(target), FULL)
    done("verify", target, "--against", "one")


def test_a_file_alone_at_a_url_has_nothing_beside_it(folder: Path, root: str) -> None:
    done("convert", "one/rank_0/net.safetensors", f"{root}/out.safetensors", "--to", "safetensors")
    fs, place = fsspec.core.url_to_fs(root)
    assert [path.rpartition("/")[2] for path in fs.find(place)] == ["out.safetensors"]


def test_a_file_alone_that_failed_is_gone_on_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the next run needs stays until then."""
    before = {path.relative_to(folder) for path in folder.rglob("*")}
    command = ["convert", "one/rank_0/net.safetensors", "out.ckpt", "--to", "ckpt"]

    def fail(*_: object, **__: object) -> None:
        raise TargetError("a full disk")

    with monkeypatch.context() as patch:
        patch.setattr("reshard.core.storage.local.LocalStore.publish", fail)
        assert call(*command).exit_code == 6
    done(*command)
    assert {str(path.relative_to(folder)) for path in folder.rglob("*")} == {*map(str, before), "out.ckpt"}


def test_a_file_alone_leaves_the_ledger_of_another_target(folder: Path) -> None:
    done("convert", "src", "out", "--source-strategy", "two.ckpt", "--target-strategy", "two.ckpt")
    ledger = tree(folder / "out" / ".reshard")
    done("convert", "one/rank_0/net.safetensors", "out/new.ckpt", "--to", "ckpt")
    assert tree(folder / "out" / ".reshard") == ledger
    done("verify", "out")
