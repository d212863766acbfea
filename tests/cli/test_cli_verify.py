"""`reshard verify`: what it prints, its JSON, its exit codes, and how it takes wrong options."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import write_file, write_ranks
from commands import call, done
from compared import AFTER, BEFORE, FULL, flip, rank_file
from refusals import failed

import reshard
from reshard import Layout, Strategy

if TYPE_CHECKING:
    from click.testing import Result


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: src (8 ranks), dst (6 ranks, made of it), before.ckpt and after.ckpt."""
    monkeypatch.chdir(tmp_path)
    write_ranks(Path("src"), FULL, BEFORE, "ckpt")
    reshard.plan(reshard.open("src", strategy=BEFORE), AFTER).run("dst", fsync=False)
    reshard.write_strategy(BEFORE, "before.ckpt")
    reshard.write_strategy(AFTER, "after.ckpt")
    return tmp_path


TARGET = ["verify", "dst", "--target-strategy", "after.ckpt"]
BOTH = [*TARGET, "--against", "src", "--source-strategy", "before.ckpt"]


def data(result: Result) -> Any:
    return json.loads(result.stdout)


def test_equal(folder: Path) -> None:
    result = call(*BOTH)
    assert result.exit_code == 0
    assert result.stdout == "verified: dst = src; every bit of 3 tensors\n"
    assert not result.stderr
    assert call(*BOTH, "--quiet").stdout == ""
    assert data(call(*BOTH, "--json"))["equal"] is True


def test_a_difference_is_told_on_one_screen(folder: Path) -> None:
    flip(rank_file(folder / "dst", 2), "w", 20)
    result = call(*BOTH)
    assert result.exit_code == 3
    path = "rank_2/checkpoint_2.ckpt"
    lines = result.stdout.splitlines()
    assert lines[0] == "dst differs from src: 1 of 3 tensors"
    assert lines[1].startswith("  w[1, 2]   1 of 864 elements")
    places = [re.fullmatch(r"    0x[0-9a-f]{8} \(.+\) +(\S+)( \[1, 2\])?", line) for line in lines[2:]]
    assert [place and place[1] for place in places] == [f"dst/{path}", "src/rank_0/checkpoint_0.ckpt"]
    assert result.stderr == "", "the difference is told once"
    quiet = failed(3, "different", *BOTH, "--quiet", places=("dst", "src"))
    assert (quiet.stdout, len(quiet.stderr.splitlines())) == ("", 1)
    (found,) = data(call(*BOTH, "--json"))["differences"]
    assert (found["tensor"], found["rank"], found["side"], found["kind"]) == ("w", 2, "target", "values")
    assert (found["path"], found["index"], found["index_in_block"]) == (str(folder / "dst" / path), [1, 2], [1, 2])
    assert (found["count"], found["block"]) == (1, {"start": [0, 0], "stop": [48, 18]})


def test_values_that_are_no_numbers_are_counted(folder: Path) -> None:
    """The largest difference is of numbers; JSON has no infinity."""
    one = np.array([1, 2, 3, 4, np.nan, np.inf], np.float32)
    two = np.array([1, 2.5, np.nan, 4, np.nan, np.inf], np.float32)
    paths = [write_file(folder / f"{name}.ckpt", {"w": value}, "ckpt") for name, value in (("one", one), ("two", two))]
    (found,) = data(call("verify", *paths[:1], "--against", paths[1], "--json"))["differences"]
    assert (found["count"], found["largest"], found["nans"]) == (2, 0.5, 1)
    assert "0.5, 1 NaN" in call("verify", *paths[:1], "--against", paths[1]).stdout
    write_file(paths[0], {"w": np.full(6, -np.inf, np.float32)}, "ckpt")
    (found,) = data(call("verify", *paths[:1], "--against", paths[1], "--json"))["differences"]
    assert (found["largest"], found["nans"]) == (None, 2)


def test_a_sample_is_told(folder: Path) -> None:
    result = call(*BOTH, "--sample", "5%")
    assert result.exit_code == 0
    assert "; a random " in result.stdout
    assert "% of the bytes" in result.stdout
    assert data(call(*BOTH, "--sample", "0.5", "--json"))["sample"] == 0.5


def test_structure(folder: Path) -> None:
    result = call(*TARGET)
    assert result.exit_code == 0
    assert result.stdout == "headers alone: dst is complete and valid in structure; contents were not read\n"
    assert call(*TARGET, "-v").stdout == (
        result.stdout + "  tensors  3, 18 blocks in files\n  files    6, 6 ranks (0-5)\n"
        "  not compared: contents, but for samples of 4 of 4 replicas (its ledger names a source: run `verify` with "
        "the path alone to compare every bit with it); notes (__metadata__); checksums that files carry (crc_num), and "
        "how text entries are stored\n"
    )
    Path("dst/rank_3/checkpoint_3.ckpt").rename("dst/rank_3/checkpoint_3.ckpt.partial")
    failed(4, "missing-ranks", *TARGET, places=("rank 3", "(rank_3/checkpoint_3.ckpt.partial)"))
    result = call("verify", "dst", "--partial", "--target-strategy", "after.ckpt")
    assert result.exit_code == 0
    assert "unfinished" in result.stderr


def test_a_manifest(folder: Path) -> None:
    result = call("verify", "dst", "--write-manifest", "m.json")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "wrote m.json: 24 checksums of 6 files\n"
    Path("dst").rename("moved")
    result = call("verify", "moved", "--manifest", "m.json")
    assert result.exit_code == 0
    assert result.stdout == "verified: moved is as the manifest m.json says; every bit of 3 tensors\n"
    assert call("verify", "moved", "--write-manifest", "m.json").exit_code == 6
    flip(rank_file(folder / "moved", 5), "c", 0)
    result = call("verify", "moved", "--manifest", "m.json")
    assert result.exit_code == 3
    assert "tensor c: has the CRC-32C" in result.stdout
    assert call("verify", "moved", "--write-manifest", "m.json", "--overwrite").exit_code == 0
    assert call("verify", "moved", "--manifest", "m.json").exit_code == 0
    before = Path("moved/rank_0/checkpoint_0.ckpt").read_bytes()
    failed(
        6, "target-is-source", "verify", "moved", "--write-manifest", "moved/rank_0/checkpoint_0.ckpt", "--overwrite",
        places=("moved/rank_0/checkpoint_0.ckpt",),
    )  # fmt: skip
    assert Path("moved/rank_0/checkpoint_0.ckpt").read_bytes() == before
    Path("m.json").write_text('{"reshard_manifest": 2, "files": {"../x": {"nbytes": 1, "crc32c": "00000000"}}}')
    failed(4, "outside-directory", "verify", "moved", "--manifest", "m.json", places=("m.json", "'../x'"))


def test_a_manifest_of_files_that_are_partly_here(folder: Path) -> None:
    assert call("verify", "dst", "--write-manifest", "m.json").exit_code == 0
    rank_file(folder / "dst", 5).unlink()
    assert call("verify", "dst", "--manifest", "m.json").exit_code == 3
    result = call("verify", "dst", "--manifest", "m.json", "--partial")
    assert result.exit_code == 0
    assert "1 of the 6 files" in result.stderr
    for option in ("--suffix=a", "--target-stage=0", "--step=1", "--target-layout=*=whole"):
        failed(2, "no-effect", "verify", "dst", "--manifest", "m.json", option, places=(option.partition("=")[0],))


def test_options_of_a_conversion(folder: Path) -> None:
    how = ["--exclude", "c", "--cast", "float32=bfloat16", "--name-map", "names.json"]
    Path("names.json").write_text('{"w": "new.w"}')
    done = call(
        "convert", "--to=mindspore", "src", "weights", "--source-strategy", "before.ckpt", "--tune=fsync=no", *how
    )
    assert done.exit_code == 0, done.stderr
    against = ["--against", "src", "--source-strategy", "before.ckpt"]
    assert call("verify", "weights", *against, *how).exit_code == 0
    said = call("verify", "weights", "--against", "src").stdout
    assert "after changes (1 tensor renamed, cast to bfloat16); every bit of 2 tensors (1 tensor left out)\n" in said
    shutil.rmtree("weights/.reshard")
    result = call("verify", "weights", *against)
    assert result.exit_code == 3
    assert "tensor new.w: is in the target, not in the source" in result.stdout


def test_where_files_are_called_otherwise(folder: Path) -> None:
    strategy = Strategy.of({"w": Layout.of([2], [0, -1])})
    reshard.write_strategy(strategy, "two.ckpt")
    for name in ("a", "b"):
        write_ranks(Path("many"), {"w": FULL["w"]}, strategy, name=name)
    one = write_file(Path("one.ckpt"), {"w": FULL["w"]}, "ckpt")
    assert call("verify", "many", "--target-strategy", "two.ckpt", "--suffix", "b").exit_code == 0
    assert call("verify", one, "--against", "many", "--source-strategy", "two.ckpt", "--suffix", "a").exit_code == 0


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (["--sample", "5%"], "needs-source", "--sample"),
        (["--source-strategy", "before.ckpt"], "needs-source", "--against SOURCE"),
        (["--layout", "w=whole"], "needs-source", "--target-layout"),
        (["--against", "src", "--manifest", "m.json"], "conflicting-options", "give one of them"),
        (["--against", "src", "--sample", "0%"], "usage", "--sample"),
        (["--against", "src", "--sample", "120%"], "usage", "--sample"),
        (["--against", "src", "--sample", "nan"], "usage", "--sample"),
    ],
)
def test_options_that_would_do_nothing_are_refused(folder: Path, options: list[str], code: str, told: str) -> None:
    failed(2, code, *TARGET, *options, places=(told,))


def test_a_budget_that_is_too_little(folder: Path) -> None:
    failed(5, "not-enough-memory", *BOTH, "--memory", "1MB", places=("--memory 58MB",))


def test_the_hint_about_a_strategy_that_fits_is_of_the_side(tmp_path: Path) -> None:
    """What it says to type works: for a target it is the target's strategy."""
    home = reshard.demo("mindspore", tmp_path / "demo")
    result = call("verify", home / "src_checkpoints", "--target-strategy", home / "dst_strategy.ckpt")
    assert result.exit_code == 4
    assert f"--target-strategy {home / 'src_strategy.ckpt'}" in result.stderr
    done("verify", home / "src_checkpoints", "--target-strategy", home / "src_strategy.ckpt")
