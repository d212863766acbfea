"""What else is in a target directory: what is refused, and what is said of the rest before a run and after it."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from checkpoints import numbers, tree, write_file, write_ranks
from commands import call, done
from fsspec.core import url_to_fs
from refusals import failed, refused

import reshard
from reshard import Layout, Strategy
from reshard.errors import TargetError
from reshard.formats.sets.options import HuggingFaceSet, MindSporeSet

if TYPE_CHECKING:
    from pathlib import Path


SHAPES = {"a": (8, 4), "b": (4, 8), "c": (4, 4)}
FULL = numbers(SHAPES)
ROWS = Strategy.of(dict.fromkeys(SHAPES, Layout.of([4], [0, -1])))
STYLES = {"mindspore": MindSporeSet, "huggingface": HuggingFaceSet}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write_file(tmp_path / "src" / "net.safetensors", FULL)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def cut(whole: Path, out: Path | str) -> list[str | Path]:
    """The command that writes the four ranks of `ROWS`."""
    rows = whole.with_name("rows.ckpt")
    reshard.write_strategy(ROWS, rows)
    return ["convert", whole, out, "--target-strategy", rows]


# --- sets ---


@pytest.mark.parametrize("style", STYLES)
def test_no_shard_of_an_older_set_stays_beside_the_index(whole: Path, out: Path, style: str) -> None:
    command = ["convert", whole, out, "--to", style]
    done(*command, "--max-shard-size", "100B")
    before = tree(out)
    assert len(before) == 4
    failed(6, "other-set", *command, places=(out,))
    assert "would be removed" in done(*command, "--overwrite", "--dry-run").stderr
    assert tree(out) == before
    for option in ("--overwrite", "--restart"):
        removed = json.loads(done(*command, option, "--json").stdout)["removed"]
        assert set(removed) == before.keys() - tree(out).keys()
        assert len(tree(out)) == 2
        assert call("verify", out).exit_code == 0
        done(*command, "--max-shard-size", "100B", "--overwrite")
        assert tree(out) == before


@pytest.mark.parametrize("style", STYLES)
def test_a_shard_of_unknown_origin_is_not_removed(whole: Path, out: Path, style: str) -> None:
    command = ["convert", whole, out, "--to", style]
    done(*command, "--max-shard-size", "100B")
    changed = next(path for path in sorted(out.glob("*2*.safetensors")))
    changed.write_bytes(changed.read_bytes() + b"x")
    before = tree(out)
    for options in (["--overwrite"], ["--overwrite", "--dry-run"], ["--restart"], []):
        failed(6, "other-set", *command, *options, places=(changed.name,))
        assert tree(out) == before


def test_a_single_file_would_be_loaded_in_place_of_a_set(whole: Path, out: Path) -> None:
    """transformers looks for `model.safetensors` before it looks for an index."""
    write_file(out / "model.safetensors", FULL)
    failed(6, "other-set", "convert", whole, out, "--to", "hf", places=("model.safetensors",))


# --- others ---


def told(*command: str | Path) -> list[str]:
    """The warnings of a command: the same in words and JSON, of a dry run and of a run."""
    dry = [line.removeprefix("warning: ") for line in call(*command, "--dry-run").stderr.splitlines()]
    noted: list[str] = json.loads(done(*command, "--dry-run", "--json").stdout)["warnings"]
    assert [line for line in dry if " has " in line] == noted
    assert json.loads(done(*command, "--json").stdout)["warnings"] == noted
    return noted


def another(out: Path | str, *command: str | Path, place: str) -> None:
    """A command finds another checkpoint in its target, and writes nothing; nor does a dry run say that it would."""
    before = tree(out) if not isinstance(out, str) else None
    for options in ([], ["--dry-run"]):
        failed(6, "other-checkpoint", *command, *options, places=(place,))
    assert before is None or (not isinstance(out, str) and tree(out) == before)


def test_a_directory_of_its_own_has_nothing_beside(whole: Path, out: Path, tmp_path: Path) -> None:
    assert told(*cut(whole, out)) == []
    assert told("convert", "--to=mindspore", whole, tmp_path / "set") == []
    done(*cut(whole, out))
    assert told("convert", "--to=mindspore", whole, tmp_path / "set", "--overwrite") == []
    write_ranks(tmp_path / "ranks", FULL, ROWS)
    assert told("convert", tmp_path / "ranks", tmp_path / "converted", "--to", "ckpt") == []
    assert told("convert", whole, whole.with_name("net.ckpt"), "--to", "ckpt") == [], "a file was asked for"


@pytest.mark.parametrize(
    "other",
    ["rank_0/checkpoint_0.ckpt", "rank_7/checkpoint_7.ckpt", "rank_0/net-1_10.safetensors", "net.safetensors",
     "rank_0/checkpoint_0_part1.safetensors", "part0.safetensors", "__0_0.distcp"],
)  # fmt: skip
def test_rank_files_beside_files_of_another_format_or_checkpoint(whole: Path, out: Path, other: str) -> None:
    write_file(out / other, FULL, "ckpt" if other.endswith("ckpt") else "safetensors")
    another(out, *cut(whole, out), place=other)
    with refused(TargetError, "other-checkpoint", other):
        reshard.convert(whole, out, target_strategy=ROWS)


def test_rank_files_in_the_directory_of_a_run(whole: Path, out: Path) -> None:
    """Readers take the iteration: also `verify`, which would say nothing of what is written now."""
    done("convert", whole, out, "--to", "checkpoint2", "--target-step", "6")
    another(out, *cut(whole, out), place="iteration_00000006")
    again = done("convert", whole, out, "--to", "checkpoint2", "--target-step", "7").stderr
    assert "another checkpoint" not in again


@pytest.mark.parametrize("style", STYLES)
def test_a_set_beside_rank_files_and_rank_files_beside_a_set(
    whole: Path, out: Path, tmp_path: Path, style: str
) -> None:
    done(*cut(whole, out))
    another(out, "convert", whole, out, "--to", style, place="rank_0/checkpoint_0.safetensors")
    done("convert", whole, out, "--to", style, "--overwrite")
    assert not (out / "rank_0").exists()
    shutil.rmtree(out)
    done("convert", whole, out, "--to", style)
    index = next(out.glob("*.json")).name
    failed(6, "other-checkpoint", *cut(whole, out), places=(index,))
    assert json.loads(done(*cut(whole, tmp_path / "alone"), "--json").stdout)["verify"]


def test_rank_files_in_a_zarr_store(whole: Path, out: Path) -> None:
    done("convert", whole, out, "--to", "zarr")
    another(out, *cut(whole, out), place="a zarr store")


def test_files_in_a_bucket_are_seen(whole: Path) -> None:
    fs, place = url_to_fs("memory://beside-ranks")
    fs.pipe(f"{place}/rank_0/checkpoint_0.ckpt", b"theirs")
    another("memory://beside-ranks", *cut(whole, "memory://beside-ranks"), place="rank_0/checkpoint_0.ckpt")


def test_other_ranks_and_parts_of_the_same_target_are_no_other_checkpoint(
    whole: Path, out: Path, tmp_path: Path
) -> None:
    ranks = write_ranks(tmp_path / "ranks", FULL, ROWS)
    source = reshard.open(whole)
    reshard.plan(source, ROWS).run(out)
    assert tree(out) == tree(ranks)
    rules = tmp_path / "rules.yaml"
    rules.write_text("mesh: {dp: 4}\nrules: {'*': [dp, null]}\n")
    done("strategy", "make", rules, "--like", whole, "-o", tmp_path / "rows.ckpt")
    for path in out.glob("rank_[01]"):
        shutil.rmtree(path)
    assert told("convert", whole, out, "--target-strategy", tmp_path / "rows.ckpt", "--ranks", "0-1") == []
    done(*cut(whole, tmp_path / "one"))
    write_file(tmp_path / "one" / "rank_4" / "checkpoint_4.safetensors", FULL)
    (notice,) = told(*cut(whole, tmp_path / "one"))
    assert "rank_4/checkpoint_4.safetensors, of ranks that are not this target's" in notice
    write_ranks(tmp_path / "eight", FULL, Strategy.of(dict.fromkeys(SHAPES, Layout.of([4, 2], [0, -1]))))
    for rank in range(4):
        shutil.rmtree(tmp_path / "eight" / f"rank_{rank}")
    (notice,) = reshard.convert(whole, tmp_path / "eight", target_strategy=ROWS).warnings
    assert "rank_4/checkpoint_4.safetensors" in notice


def test_conversion_in_place_says_that_both_are_there(tmp_path: Path) -> None:
    ranks = write_ranks(tmp_path / "ranks", FULL, ROWS)
    (notice,) = told("convert", ranks, ranks, "--to", "ckpt")
    assert "rank_3/checkpoint_3.safetensors" in notice or "and 1 more" in notice


def test_the_directory_of_a_run_is_no_target(tmp_path: Path) -> None:
    """The target would hide the steps in it: a forgotten target of `average` is such a directory."""
    root = reshard.demo("training", tmp_path / "demo")
    run = root / "crashed"
    before = tree(run)
    for command in (
        ["average", root / "step-100", root / "step-200", run], ["convert", root / "step-100", run, "--to", "hf"],
    ):  # fmt: skip
        failed(6, "other-checkpoint", *command, places=(run, "step-200"))
        assert tree(run) == before
    done("convert", root / "step-100", run / "new", "--to", "hf")
    done("convert", root / "step-100", run, "--to", "dcp", "--target-step", "500")
    done("convert", root / "step-100", tmp_path / "elsewhere", "--to", "hf")
    done("convert", root / "step-100", tmp_path / "elsewhere" / "below", "--to", "hf")
    done("convert", root / "step-100", tmp_path / "elsewhere", "--to", "hf")  # it has a checkpoint of its own
