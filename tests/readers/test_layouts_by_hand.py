"""Layouts given by hand: looked at as those of a strategy, and added to what the ledger knows."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoints import assert_equal, blocks, numbers, write_file, write_ranks
from commands import done
from refusals import failed, refused
from remotes import put

import reshard
from reshard import Layout, Strategy
from reshard.errors import SourceError, StrategyError
from reshard.formats.ranks import completeness

if TYPE_CHECKING:
    from pathlib import Path

FULL = numbers({"w": (16, 32), "b": (32,), "v": (8, 4)})
ROWS = Strategy.of({"w": Layout.of([8], [0, -1]), "b": Layout.of([8], [0]), "v": Layout.of([8], [0, -1])})
COLUMNS = Strategy.of({"w": Layout.of([4], [-1, 0]), "b": Layout.of([4], [0]), "v": Layout.of([4], [-1, -1])})


@pytest.fixture
def replicas(tmp_path: Path) -> Path:
    """Eight ranks, each with all of it."""
    for rank in range(8):
        write_file(tmp_path / "src" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt", FULL, "ckpt")
    return tmp_path / "src"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """What this program wrote, with a ledger."""
    source = reshard.open(write_ranks(tmp_path / "before", FULL, ROWS, "ckpt"), strategy=ROWS)
    reshard.plan(source, COLUMNS).run(tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.parametrize("rules", [{"*": "split:0"}, {"*": "whole", "w": "split:0"}, {"*": "whole", "w": "split:1"}])
def test_blocks_that_are_replicas_are_not_joined(replicas: Path, tmp_path: Path, rules: dict[str, str]) -> None:
    with refused(SourceError, "saved-whole", "'w'", f"'{rules.get('w', 'split:0')}'"):
        reshard.open(replicas, layout=rules)
    typed = [word for name, rule in rules.items() for word in ("--layout", f"{name}={rule}")]
    command = "convert", "--to=mindspore", replicas, tmp_path / "whole", *typed
    failed(4, "saved-whole", *command, places=("--layout '*=whole'",))
    assert not (tmp_path / "whole").exists()
    assert_equal(reshard.open(replicas, layout={"*": "whole"}), FULL)


def test_a_rule_whose_tensors_later_ones_take_is_refused(replicas: Path) -> None:
    for rules in ({"w": "split:0", "*": "whole"}, {"b": "whole", "[bv]": "copy", "b*": "whole", "v": "whole"}):
        with refused(StrategyError, "unused-pattern", next(iter(rules))):
            reshard.open(replicas, layout=rules)
    failed(2, "usage", "inspect", replicas, "--layout", "w=whole", "--layout", "w=copy", places=("w",))
    with refused(StrategyError, "no-match", "'weight'"):
        reshard.open(replicas, layout={"weight": "whole"})


def test_with_a_strategy_too(replicas: Path) -> None:
    whole = Strategy.of({name: Layout.of([8], [-1] * value.ndim) for name, value in FULL.items()})
    with refused(SourceError, "saved-whole", "'w'", "'split:0'"):
        reshard.open(replicas, strategy=whole, layout={"w": "split:0"})


def test_what_differs_is_not_whole(tmp_path: Path) -> None:
    root = write_ranks(tmp_path, FULL, ROWS)
    with refused(SourceError, "replicas-differ-by-rule", "'b'", "'w'", "'whole'", "rank 0 and rank 1"):
        reshard.open(root, layout={"*": "whole"})
    assert_equal(reshard.open(root, layout={"*": "split:0"}), FULL)


@pytest.mark.parametrize("rules", [{"w": "split:1"}, {"b": "split:0"}, {"v": "whole"}, {"w": "4:-1,0", "b": "4:0"}])
def test_one_layout_is_added_to_those_of_the_ledger(out: Path, tmp_path: Path, rules: dict[str, str]) -> None:
    assert_equal(reshard.open(out, layout=rules), FULL)
    typed = [word for name, rule in rules.items() for word in ("--layout", f"{name}={rule}")]
    done("convert", "--to=mindspore", out, tmp_path / "whole", *typed)
    assert_equal(reshard.open(tmp_path / "whole"), FULL)
    for path in out.rglob("*"):  # of a copy, too
        os.utime(path, (1, 1))
    assert_equal(reshard.open(out, layout=rules), FULL)


@pytest.mark.parametrize(
    "rules",
    [{"w": "split:0"}, {"w": "copy"}, {"*": "split:0"}, {"w": "2,2:-1,0"}, {"b": "copy", "w": "split:1"}],
)
@pytest.mark.parametrize("given", [None, COLUMNS])
def test_what_the_ledger_knows_is_not_contradicted(out: Path, rules: dict[str, str], given: Strategy | None) -> None:
    with refused(SourceError, "strategy-mismatch", out):
        reshard.open(out, strategy=given, layout=rules)
    with refused(SourceError, "strategy-mismatch", out, "layout="):
        reshard.open(out, strategy=given, layout=rules, contents=False)
    shutil.rmtree(out / ".reshard")
    reshard.open(out, strategy=COLUMNS, layout=rules, contents=False)


def test_a_tensor_that_the_ledger_does_not_list(tmp_path: Path) -> None:
    """Every rank has a value of its own: the layouts of the others stay known."""
    for rank in range(8):
        tensors = {**blocks(FULL, ROWS, rank), "rng": np.array([rank, 1], np.int64)}
        write_file(tmp_path / "src" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt", tensors, "ckpt")
    source = reshard.open(tmp_path / "src", strategy=ROWS, layout={"rng": "copy"})
    reshard.plan(source, COLUMNS).run(tmp_path / "out")
    with refused(SourceError, "unlisted-tensor", "'rng'"):
        reshard.open(tmp_path / "out")
    opened = reshard.open(tmp_path / "out", layout={"rng": "copy"})
    assert opened.tensors["rng"].varies
    assert_equal(reshard.Checkpoint(opened._record.without(["rng"])), FULL)


# --- the strategy that lies beside a source ---


@pytest.mark.parametrize("place", ["strategy.ckpt", "src/my strategy.json", "src_strategy.ckpt"])
def test_the_strategy_beside_a_source_is_named(tmp_path: Path, place: str) -> None:
    root = write_ranks(tmp_path / "src", FULL, ROWS)
    reshard.write_strategy(ROWS, tmp_path / place)
    reshard.write_strategy(COLUMNS, tmp_path / "dst_strategy.ckpt")
    (tmp_path / "other.json").write_text("{")
    (tmp_path / "not.ckpt").write_bytes(b"\x08\x01" * 1000)
    shown = f"'{tmp_path / place}'" if " " in place else str(tmp_path / place)
    command = "convert", "--to=mindspore", root, tmp_path / "whole"
    result = failed(4, "no-layout", *command, places=(f"--source-strategy {shown}\n",))
    assert "dst_strategy" not in result.stderr
    with refused(SourceError, "no-layout", f"strategy='{tmp_path / place}'"):
        reshard.open(root)
    assert not (tmp_path / "whole").exists()


def test_it_is_relative_as_the_source_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ranks(tmp_path / "src", FULL, ROWS)
    reshard.write_strategy(ROWS, tmp_path / "src_strategy.ckpt")
    monkeypatch.chdir(tmp_path)
    for source, strategy in (("src", "src_strategy.ckpt"), (".", f"{tmp_path}/src_strategy.ckpt")):
        command = "convert", "--to=mindspore", source, tmp_path / "whole"
        failed(4, "no-layout", *command, places=(f"--source-strategy {strategy}",))
        monkeypatch.chdir(tmp_path / "src")


def test_the_strategy_beside_a_source_at_a_url(tmp_path: Path, root: str) -> None:
    source = put(write_ranks(tmp_path / "src", FULL, ROWS), f"{root}/src")
    (tmp_path / "strategies").mkdir()
    reshard.write_strategy(ROWS, tmp_path / "strategies" / "my_strategy.ckpt")
    put(tmp_path / "strategies", root)
    place = f"--source-strategy {root}/my_strategy.ckpt"
    failed(4, "no-layout", "convert", "--to=mindspore", source, tmp_path / "whole", places=(place,))


def test_what_does_not_fit_is_not_named(tmp_path: Path) -> None:
    """Of as many ranks, but the samples refute it; of other ranks; a checkpoint."""
    root = write_ranks(tmp_path / "src", FULL, ROWS)
    wrong = Strategy.of({name: Layout.of([8], [-1] * value.ndim) for name, value in FULL.items()})
    reshard.write_strategy(wrong, tmp_path / "wrong_strategy.ckpt")
    reshard.write_strategy(COLUMNS, tmp_path / "dst_strategy.ckpt")
    shutil.copy(root / "rank_0" / "checkpoint_0.safetensors", tmp_path / "one.ckpt")
    command = "convert", "--to=mindspore", root, tmp_path / "whole"
    result = failed(4, "no-layout", *command, places=("--source-strategy, or --layout '*=RULE'",))
    assert "strategy.ckpt" not in result.stderr


def test_a_directory_of_strategies_of_a_pipeline(tmp_path: Path) -> None:
    one = Layout.of([2], [0, -1])
    stages = Strategy.of({"w": {0: one}, "v": {1: one}})
    full = {name: FULL[name] for name in ("w", "v")}
    root = write_ranks(tmp_path / "src", full, stages)
    (tmp_path / "strategy").mkdir()
    for stage in range(2):
        reshard.write_strategy(stages.of_stage(stage), tmp_path / "strategy" / f"strategy_{stage}.json")
    place = f"--source-strategy {tmp_path}/strategy\n"
    failed(4, "no-layout", "convert", "--to=mindspore", root, tmp_path / "whole", places=(place,))


def test_few_files_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_ranks(tmp_path / "src", FULL, ROWS)
    for number in range(300):
        (tmp_path / f"{number:03}.ckpt").write_bytes(b"\x08\x01")
    (tmp_path / "000_strategy.ckpt").write_bytes(bytes(1 << 20))
    os.truncate(tmp_path / "000_strategy.ckpt", 1 << 40)
    os.mkfifo(tmp_path / "001_strategy.ckpt")
    (tmp_path / "002_strategy.ckpt").symlink_to(tmp_path / "none")
    reshard.write_strategy(ROWS, tmp_path / "my_strategy.ckpt")
    read: list[object] = []
    before = completeness.read_strategy
    monkeypatch.setattr(completeness, "read_strategy", lambda path: read.append(path) or before(path))
    place = f"--source-strategy {tmp_path}/my_strategy.ckpt"
    failed(4, "no-layout", "convert", "--to=mindspore", root, tmp_path / "whole", places=(place,))
    assert 1 <= len(read) <= 16
