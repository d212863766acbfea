"""The command line when something is wrong: every exit code, and messages without a traceback."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
from typing import TYPE_CHECKING

import click
import pytest
from checkpoints import numbers, tree, write_ranks
from click.testing import CliRunner
from commands import Case, call, done, next_command
from refusals import failed

import reshard
from reshard import Layout, Strategy
from reshard.cli.main import cli
from reshard.cli.values import size
from reshard.errors import BudgetError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "arguments",
    [
        ["transform", "a"],
        ["transform", "a", "b", "--ranks", "0-99999999999999"],
        ["transform", "a", "b", "--layout", "no-rule"],
        ["transform", "a", "b", "--threads", "0"],
        ["transform", "a", "b", "--format", "pickle"],
        ["transform", "a", "b", "--cast", "float32=float16", "--cast", "float32=bfloat16"],
        ["transform", "a", "b", "--memory", "much"],
        ["unify", "a", "b", "--max-shard-size", "4 elephants"],
        ["inspect"],
        ["nonsense"],
        ["transform", "a", "b", "--cast", "float32"],
        ["unify", "a", "b", "--style", "torch"],
    ],
)
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    failed(2, "usage", *arguments)


@pytest.mark.parametrize("number", ["8", "5", "0.5", "64000000"])
@pytest.mark.parametrize("option", ["--memory", "--max-shard-size", "--chunk-size", "--shard-size"])
def test_a_size_has_a_unit(case: Case, tmp_path: Path, option: str, number: str) -> None:
    """Eight bytes of memory are nobody's wish, and nor are files for each tensor."""
    words = ["unify", case.source, tmp_path / "out", "--source-strategy", case.source_strategy]
    words += ["--format", "zarr"] if option in {"--chunk-size", "--shard-size"} else []
    failed(2, "usage", *words, option, number, places=(option, f"{number}GB", f"{number}MB"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("text", "nbytes"), [("0", 0), ("8B", 8), ("8k", 8000), ("8 GB", 8 * 10**9), ("1.5KiB", 1536)])
def test_sizes(text: str, nbytes: int) -> None:
    assert size(click.Context(cli), cli.params[0], text) == nbytes


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("split", "reshard convert"),
        ("strategy mrege", "merge"),
        ("--debug", "reshard --help"),
        ("--debgu", "--debug"),
        ("convert a b --restart-all", "reshard convert --help"),
        ("convert a b --resume", "type the same command again"),
        ("convert a b --dry-run=no", "--dry-run"),
        ("convert a b --threads two", "'two'"),
        ("convert a b c d", "reshard convert [OPTIONS] SOURCE TARGET"),
        ("convert a b --memory 2 GB", "2GB"),
        ("convert a b --cast fp32=bf16 --cast float32=fp16", "bfloat16 and float16"),
        ("convert a b --threads bf17", "bf17"),
        ("convert a b --to tf", "'mindspore', 'hf'"),
        ("convert a b --to safetensor", "did you mean safetensors?"),
        ("inspect a --color alwys", "did you mean always?"),
        ("convert a b 2 GB", "2GB"),
    ],
)
def test_slips_are_understood(words: str, named: str) -> None:
    result = failed(2, "usage", *words.split(), places=(named,))
    error, *hint = result.stderr.splitlines()
    assert error.startswith("error: ")
    assert all(line.startswith("hint:  ") for line in hint)
    assert len(hint) <= 1


@pytest.mark.parametrize(
    ("words", "code", "meant"),
    [
        ("convert a b --cast flaot32=bfloat16", "unknown-dtype", "float32"),
        ("convert a b --cast fp32=bf17", "unknown-dtype", "bf16"),
        ("convert a b --dequantize bfloat61", "unknown-dtype", "bfloat16"),
        ("convert a b --rules lama-hf-mcore", "not-found", "llama-hf-mcore"),
    ],
)
def test_a_misspelled_name_is_answered_with_the_nearest(words: str, code: str, meant: str) -> None:
    failed(2, code, *words.split(), places=(f"did you mean {meant}?",))


def test_json_of_another_kind_is_no_strategy_that_names_nothing(case: Case, tmp_path: Path) -> None:
    name_map, index = tmp_path / "names.json", tmp_path / "index.json"
    name_map.write_text('{"net.w": "w"}')
    index.write_text('{"weight_map": {"w": "model.safetensors"}}')
    for path, place in ((name_map, "name map"), (index, "weight_map")):
        failed(4, "not-a-strategy", "inspect", case.source, "--source-strategy", path, places=(path, place))


def test_files_that_a_shell_made_of_a_glob_are_recognised(tmp_path: Path) -> None:
    paths = [tmp_path / f"strategy_{number}.ckpt" for number in range(3)]
    words = ("transform", "a", "b", "--source-strategy", *paths)
    failed(2, "usage", *words, places=(repr(str(paths[1])),))  # they are no files
    for path in paths:
        path.touch()
    failed(2, "usage", *words, places=(re.sub("[0-9]+", "*", str(paths[0])),))


@pytest.mark.parametrize("within", ["", "a.ckpt"])
def test_ranks_that_a_shell_made_of_a_glob_are_recognised(tmp_path: Path, within: str) -> None:
    ranks = [tmp_path / "ckpt" / f"rank_{number}" for number in range(2)]
    for rank in ranks:
        rank.mkdir(parents=True)
        (rank / "a.ckpt").touch()
    words = ["inspect", *(rank / within for rank in ranks)]
    failed(2, "usage", *words, places=(f"{tmp_path}/ckpt/rank_*", f"all ranks, {tmp_path}/ckpt\n"))


@pytest.mark.parametrize("command", ["transform", "plan", "verify"])
def test_swapped_strategies_are_recognised(case: Case, tmp_path: Path, command: str) -> None:
    source = [case.source, "--source-strategy", case.target_strategy]
    target = ["--target-strategy", case.source_strategy]
    words = {
        "transform": [*source, *target, tmp_path / "out"],
        "plan": [*source, *target],
        "verify": [case.source, *target, "--against", *source],
    }
    failed(4, "swapped-strategies", command, *words[command], places=(f"fits {case.source_strategy}",))
    failed(
        4, "not-found", "transform", case.source, tmp_path / "out", "--source-strategy", tmp_path / "gone", *target,
        places=(tmp_path / "gone",),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "environment", "terminal", "colored"),
    [
        ("inspect nothing", {}, True, True),
        ("inspect nothing", {}, False, False),
        ("inspect nothing", {"NO_COLOR": "1"}, True, False),
        ("inspect nothing", {"TERM": "dumb"}, True, False),
        ("inspect nothing --color never", {}, True, False),
        ("inspect nothing --color always", {"NO_COLOR": "1"}, False, True),
        ("--color always inspect nothing", {}, False, True),
        ("inspect --help", {}, True, True),
    ],
)
def test_color(
    words: str, environment: dict[str, str], terminal: bool, colored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm", **environment}.items():
        monkeypatch.setenv(name, value)
    assert ("\x1b[" in CliRunner().invoke(cli, words.split(), color=terminal).output) is colored


def test_json_has_no_color(case: Case) -> None:
    found = CliRunner().invoke(cli, ["inspect", str(case.source), "--json", "--color", "always"])
    assert "\x1b[" not in found.stdout
    assert "\x1b[" in found.stderr  # a warning


def test_a_rank_outside_the_target_is_2(case: Case, tmp_path: Path) -> None:
    failed(2, "no-such-rank", "transform", case.source, tmp_path, *case.strategies, "--ranks", "4", places=("rank 4 ",))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["inspect", "/nonexistent"], "not-found"),
        (["strategy", "show", "/nonexistent"], "not-found"),
        (["strategy", "show", __file__], "not-a-strategy"),
    ],
)
def test_a_bad_source_or_strategy_is_4(arguments: list[str], code: str) -> None:
    result = failed(4, code, *arguments, places=(arguments[-1].rpartition("/")[2],))
    assert "Traceback" not in result.stderr


def test_a_full_disk_is_5(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int, _offset: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    failed(5, "no-space", "transform", case.source, tmp_path, *case.strategies, places=("/checkpoint_",))
    assert tree(tmp_path) == {}


def test_control_characters_of_a_file_do_not_reach_the_terminal(tmp_path: Path) -> None:
    bad = tmp_path / "x.json"
    bad.write_text(json.dumps({"parallel_layout_item": {"w\x1b[31m\u202e": {"dev_matrix": [0], "tensor_map": [0]}}}))
    result = failed(
        4, "out-of-range", "strategy", "show", bad,
        places=(bad, "$.parallel_layout_item", "dev_matrix is [0]"),
    )  # fmt: skip
    assert "\x1b" not in result.stderr
    assert "\u202e" not in result.stderr
    assert "w\\x1b[31m\\u202e" in result.stderr


def test_a_fault_of_our_own_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_path: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(reshard, "read_strategy", broken)
    result = failed(1, "failed", "strategy", "show", "x", places=("RuntimeError", "first line"))
    error, hint = result.stderr.splitlines()
    assert error.startswith("error: ")
    assert "second" not in result.stderr
    assert "--debug" in hint


@pytest.mark.parametrize("how", [["--debug", "strategy", "show", "x"], ["strategy", "show", "x", "--debug"], None])
def test_debug_shows_the_traceback(how: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_path: object) -> None:
        raise RuntimeError("oh")

    monkeypatch.setattr(reshard, "read_strategy", broken)
    if how is None:
        monkeypatch.setenv("RESHARD_DEBUG", "1")
    result = call(*(how or ["strategy", "show", "x"]))
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert "in broken" in result.stderr


def test_memory_that_does_not_suffice_is_5(monkeypatch: pytest.MonkeyPatch) -> None:
    def hungry(_path: object) -> None:
        raise MemoryError

    monkeypatch.setattr(reshard, "read_strategy", hungry)
    result = call("strategy", "show", "x", "--json")
    assert (result.exit_code, json.loads(result.stdout)["error"]["code"]) == (5, BudgetError.code)


def test_an_empty_path_is_not_a_directory(case: Case) -> None:
    for arguments in (["inspect", ""], ["transform", case.source, ""], ["transform", "", "out"]):
        failed(2, "usage", *arguments)


def test_a_plan_replaces_no_file_unasked(case: Case, tmp_path: Path) -> None:
    before = case.target_strategy.read_bytes()
    taken = tmp_path / "dst.ckpt"
    taken.write_bytes(before)
    words = ["plan", case.source, "--source-strategy", case.source_strategy, "--target-strategy", taken, "-o"]
    assert call(*words, taken).exit_code == 6
    assert taken.read_bytes() == before
    os.mkfifo(tmp_path / "fifo")
    for more in ([], ["--overwrite"]):
        failed(6, "not-a-file", *words, tmp_path / "fifo", *more, places=(tmp_path / "fifo",))
    (tmp_path / "plan.json").write_text("")
    assert call(*words, tmp_path / "plan.json", "--overwrite").exit_code == 0
    failed(
        4, "not-a-strategy", "strategy", "show", tmp_path / "plan.json",
        places=(tmp_path / "plan.json", "reshard run"),
    )  # fmt: skip


def test_ranks_of_an_older_target_are_reported(case: Case, tmp_path: Path) -> None:
    same = ["--source-strategy", case.source_strategy, "--target-strategy", case.source_strategy]
    assert call("transform", case.source, tmp_path / "out", *same).exit_code == 0
    shutil.copytree(tmp_path / "out", tmp_path / "copy", ignore=shutil.ignore_patterns(".reshard"))
    replaced = done("transform", case.source, tmp_path / "out", *case.strategies, "--overwrite", "--json")
    assert json.loads(replaced.stdout)["removed"] == [f"rank_{rank}/checkpoint_{rank}.ckpt" for rank in range(4, 8)]
    assert sorted(path.name for path in (tmp_path / "out").glob("rank_*")) == [f"rank_{rank}" for rank in range(4)]
    before = tree(tmp_path / "copy")
    failed(
        6, "other-ranks", "transform", case.source, tmp_path / "copy", *case.strategies, "--overwrite",
        places=("rank_4/checkpoint_4.ckpt, rank_5/checkpoint_5.ckpt",),
    )  # fmt: skip
    assert tree(tmp_path / "copy") == before, "no ledger says that this program wrote them"
    for rank in range(4):
        shutil.rmtree(tmp_path / "copy" / f"rank_{rank}")
    result = call("transform", case.source, tmp_path / "copy", *case.strategies)
    assert result.exit_code == 0
    assert "has rank_4/checkpoint_4.ckpt, rank_5/checkpoint_5.ckpt" in result.stderr
    assert "of ranks that are not this target's" in result.stderr
    assert next_command(result) == []
    for rank in range(4, 8):
        shutil.rmtree(tmp_path / "copy" / f"rank_{rank}")
    assert next_command(call("transform", case.source, tmp_path / "copy", *case.strategies))


def test_what_verify_says_of_a_target_names_options_of_the_target(case: Case, tmp_path: Path) -> None:
    shutil.copytree(case.source, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "rank_1")
    failed(
        4, "missing-replicas", "verify", tmp_path / "out", "--target-strategy", case.source_strategy,
        places=("rank 1", "--target-partial"),
    )  # fmt: skip
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "notes.txt").touch()
    failed(4, "no-checkpoint", "verify", tmp_path / "none", places=("--target-rank-pattern",))


def test_the_directory_with_rank_directories_is_one_further_in(case: Case, tmp_path: Path) -> None:
    shutil.copytree(case.source, tmp_path / "run" / "src")
    failed(4, "no-checkpoint", "inspect", tmp_path / "run", places=(f"{tmp_path}/run/src",))
    failed(4, "strategy-file", "inspect", case.source_strategy, places=("reshard strategy show",))


@pytest.mark.parametrize("prefix", ["{rank}x", ".", "a/b"])
def test_a_prefix_under_which_nothing_would_be_found(case: Case, tmp_path: Path, prefix: str) -> None:
    failed(
        2, "bad-name", "transform", case.source, tmp_path / "out", *case.strategies, "--prefix", prefix,
        places=(repr(prefix),),
    )  # fmt: skip


@pytest.mark.parametrize("command", ["transform --dry-run", "plan", "check"])
def test_a_strategy_that_the_contents_contradict_is_4(tmp_path: Path, command: str) -> None:
    """It says "whole on every rank" of what is split; rank 0's rows would be written as the whole tensor."""
    full = numbers({"w": (8, 4), "v": (8, 4)})
    rows, whole = Layout.of([4], [0, -1]), Layout.of([4], [-1, -1])
    source = write_ranks(tmp_path / "src", full, Strategy.of({"w": rows, "v": rows}))
    reshard.write_strategy(Strategy.of({"w": whole, "v": rows}), tmp_path / "wrong.ckpt")
    name, _, option = command.partition(" ")
    given = ["--source-strategy", tmp_path / "wrong.ckpt"]
    words: list[str | Path] = {
        "transform": ["transform", source, tmp_path / "out", *given, *([option] if option else [])],
        "plan": ["plan", source, *given, "-o", tmp_path / "plan.json"],
        "check": ["strategy", "check", tmp_path / "wrong.ckpt", source],
    }[name]
    failed(4, "replicas-differ", *words, places=("tensor 'w'", "[0:2, 0:4]", "rank 0", "rank 1"))
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_a_deduplicated_target_is_verified_as_one(case: Case, tmp_path: Path, format: str) -> None:
    """Only .ckpt files need the option, where the ledger is not asked: the others say so themselves."""
    same = ["--source-strategy", case.source_strategy, "--target-strategy", case.source_strategy]
    result = call(
        "transform", case.source, tmp_path / "out", *same, "--format", format, "--remove-redundancy", "--json"
    )
    proposed = shlex.split(json.loads(result.stdout)["verify"])
    assert proposed == ["reshard", "verify", f"{tmp_path}/out"]
    assert call(*proposed[1:]).exit_code == 0
    structure = ["verify", tmp_path / "out", "--target-strategy", case.source_strategy]
    every_bit = [*structure, "--against", case.source, "--source-strategy", case.source_strategy]
    assert call(*every_bit).exit_code == (3 if format == "ckpt" else 0)
    assert call(*every_bit, "--deduplicated").exit_code == 0
    assert call(*structure).exit_code == (4 if format == "ckpt" else 0)
    assert call(*structure, "--deduplicated").exit_code == 0
    failed(
        2, "conflicting-options", *structure[:2], "--manifest", "m.json", "--deduplicated", places=("--deduplicated",)
    )


def test_what_was_looked_at_is_said(tmp_path: Path) -> None:
    whole = Strategy.of({"w": Layout.of([4], [-1, -1]), "large": Layout.of([4], [-1, -1])})
    source = write_ranks(tmp_path / "src", numbers({"w": (8, 4), "large": (64, 1024)}), whole)
    reshard.write_strategy(whole, tmp_path / "s.ckpt")
    given = ["inspect", source, "--source-strategy", tmp_path / "s.ckpt"]
    assert "all 2 tensors; all 6 replicas, 3 of them bit for bit; verify compares all" in done(*given).output
    sampled = {"tensors": 2, "of_tensors": 2, "copies": 6, "whole": 3, "of_copies": 6}
    assert json.loads(done(*given, "--json").stdout)["sampled"] == sampled
