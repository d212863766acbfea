"""The command line: what goes to stdout, what to stderr, every exit code, signals, and how quick `--help` is."""

from __future__ import annotations

import errno
import inspect
import json
import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import helpers
import numpy as np
import pytest
from checkpoints import write_file
from click.testing import CliRunner, Result

import reshard
from reshard.cli import cli

if TYPE_CHECKING:
    from collections.abc import Sequence

# click before 8.2 mixes stderr into stdout unless it is told not to.
_SEPARATE = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}


@dataclass(frozen=True)
class Case:
    """The tutorial's 8 ranks and 4 ranks, from MindSpore."""

    source: Path
    source_strategy: Path
    target_strategy: Path

    @property
    def strategies(self) -> list[str | Path]:
        return ["--source-strategy", self.source_strategy, "--target-strategy", self.target_strategy]


@pytest.fixture(scope="session")
def case(mindspore_data: Path) -> Case:
    real = mindspore_data / "real"
    source = real / "tut_src8"
    return Case(source / "ckpt", source / "strategy_0.ckpt", real / "tut_dst4_opt" / "strategy_0.ckpt")


def call(*arguments: str | Path) -> Result:
    return CliRunner(**_SEPARATE).invoke(cli, [str(argument) for argument in arguments], prog_name="reshard")


def done(*arguments: str | Path) -> Result:
    result = call(*arguments)
    assert result.exit_code == 0, result.stderr
    return result


def contents(root: Path) -> dict[str, bytes]:
    """What is in a directory, but for the journals of runs."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and ".reshard" not in path.relative_to(root).parts
    }


# --- transform --------------------------------------------------------------------------------------------------


def test_transform_writes_files_and_says_so(case: Case, tmp_path: Path) -> None:
    result = done("transform", case.source, tmp_path / "dst", *case.strategies)
    assert sorted(contents(tmp_path)) == [f"dst/rank_{r}/checkpoint_{r}.ckpt" for r in range(4)]
    assert f"wrote 4 files (ckpt) for 4 ranks (0-3) to {tmp_path}/dst\n" in result.stdout
    assert "read 14.9 kB from 2 files, wrote 17.3 kB in " in result.stdout
    assert result.stderr == (
        f"to look at it: reshard inspect {tmp_path}/dst --source-strategy {case.target_strategy}\n"
    )


def test_the_command_it_proposes_works(case: Case, tmp_path: Path) -> None:
    result = done("transform", case.source, tmp_path / "dst", *case.strategies)
    proposed = result.stderr.split("reshard ", 1)[1].split()
    assert "15 tensors, 14.9 kB in whole tensors" in done(*proposed).stdout
    some = done("transform", case.source, tmp_path / "some", *case.strategies, "--ranks", "1,3")
    assert some.stderr.endswith(" --partial\n")
    assert "2 ranks (1,3)" in done(*some.stderr.split("reshard ", 1)[1].split()).stdout


def test_a_dry_run_writes_nothing(case: Case, tmp_path: Path) -> None:
    result = done("transform", case.source, tmp_path / "dst", *case.strategies, "--dry-run")
    assert not list(tmp_path.iterdir())
    assert "read     14.9 kB from 2 files, 1.00 x what is needed\nwrite    17.3 kB to 4 files\n" in result.stdout
    assert "dropped  none\nmissing  none\n" in result.stdout
    assert f"{tmp_path}/dst/rank_3/checkpoint_3.ckpt  4.3 kB" in result.stdout
    assert result.stderr == ""


def test_a_dry_run_tells_what_is_in_the_way(case: Case, tmp_path: Path) -> None:
    command = ["transform", case.source, tmp_path, *case.strategies]
    done(*command, "--ranks", "2")
    assert done(*command, "--dry-run").stderr == "notice: 1 target file would be in the way; a run needs --overwrite\n"
    assert done(*command, "--dry-run", "--overwrite").stderr == ""


def test_json_has_the_same_keys_before_and_after(case: Case, tmp_path: Path) -> None:
    command = ["transform", case.source, tmp_path / "dst", *case.strategies, "--json"]
    before = json.loads(done(*command, "--dry-run").stdout)
    after = json.loads(done(*command).stdout)
    assert list(before) == list(after)
    assert before["seconds"] is None
    assert after["seconds"] > 0
    assert (before["measured_memory"], before["verify"]) == (None, None)
    same = set(before) - {"dry_run", "seconds", "measured_memory", "checksums", "resumed", "verify"}
    assert {key: before[key] for key in same} == {key: after[key] for key in same}
    assert set(before) == {
        "dry_run", "source", "target", "format", "ranks", "tensors", "bytes_needed", "bytes_read", "bytes_written",
        "target_bytes",
        "source_files", "target_files", "tasks", "peak_memory", "ownership", "read_amplification", "seconds", "dropped",
        "missing", "notices", "files", "replicas", "links", "measured_memory", "checksums", "resumed", "verify",
        "manifest",
    }  # fmt: skip
    assert before["files"][3] == {"rank": 3, "path": "rank_3/checkpoint_3.ckpt", "nbytes": 4321}
    sizes = {name.removeprefix("dst/"): len(content) for name, content in contents(tmp_path).items()}
    assert {file["path"]: file["nbytes"] for file in after["files"]} == sizes


def test_json_keys_are_documented() -> None:
    text = " ".join(call("transform", "--help").stdout.split())
    for key in (
        "read_amplification",
        "peak_memory",
        "seconds (null in a dry run)",
        "files: rank, path,",
        "measured_memory",
    ):
        assert key in text


def test_existing_files_are_refused(case: Case, tmp_path: Path) -> None:
    command = ["transform", case.source, tmp_path, *case.strategies]
    done(*command)
    before = contents(tmp_path)
    (tmp_path / "rank_0" / "checkpoint_0.ckpt").write_bytes(b"old")
    refused = call(*command)
    assert refused.exit_code == 6
    assert "rank_0/checkpoint_0.ckpt" in refused.stderr
    assert "--overwrite" in refused.stderr
    done(*command, "--overwrite")
    assert contents(tmp_path) == before


def test_quiet_says_nothing(case: Case, tmp_path: Path) -> None:
    result = done("transform", case.source, tmp_path, *case.strategies, "-q")
    assert (result.stdout, result.stderr) == ("", "")


@pytest.mark.parametrize(
    "options", [["--threads", "1"], ["--threads", "3"], ["--scheduler", "synchronous"], ["--no-fsync"]]
)
def test_how_it_runs_does_not_change_a_byte(case: Case, tmp_path: Path, options: list[str]) -> None:
    done("transform", case.source, tmp_path / "a", *case.strategies)
    done("transform", case.source, tmp_path / "b", *case.strategies, *options)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_ranks_format_and_prefix(case: Case, tmp_path: Path) -> None:
    done(
        "transform", case.source, tmp_path, *case.strategies,
        "--ranks", "0,2-3", "--format", "safetensors", "--prefix", "net-",
    )  # fmt: skip
    assert sorted(contents(tmp_path)) == [f"rank_{r}/net-{r}.safetensors" for r in (0, 2, 3)]


def test_either_strategy_may_be_left_out(case: Case, tmp_path: Path) -> None:
    done("transform", case.source, tmp_path / "whole", "--source-strategy", case.source_strategy)
    done("transform", tmp_path / "whole", tmp_path / "a", "--target-strategy", case.target_strategy)
    done("transform", case.source, tmp_path / "b", *case.strategies)
    assert list(contents(tmp_path / "whole")) == ["rank_0/checkpoint_0.ckpt"]
    for rank in range(4):
        first = reshard.open(tmp_path / "a" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt")
        second = reshard.open(tmp_path / "b" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt")
        assert {name: first[name].compute().tobytes() for name in first} == {
            name: second[name].compute().tobytes() for name in second
        }


def test_a_strategy_may_be_a_directory(case: Case, tmp_path: Path) -> None:
    folder = tmp_path / "strategies"
    folder.mkdir()
    for path in case.source_strategy.parent.glob("strategy_*.ckpt"):
        shutil.copy(path, folder)
    assert len(list(folder.iterdir())) == 8
    strategies = ["--source-strategy", folder, "--target-strategy", case.target_strategy]
    done("transform", case.source, tmp_path / "a", *strategies)
    done("transform", case.source, tmp_path / "b", *case.strategies)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def lacking(case: Case, tmp_path: Path, side: str, *absent: str) -> list[str | Path]:
    """The options of both strategies, one of which lacks some tensors."""
    path = tmp_path / "lacking.ckpt"
    found = reshard.read_strategy(case.source_strategy if side == "source" else case.target_strategy)
    for name in absent:
        found = found.with_layout(name, None)
    reshard.write_strategy(found, path)
    changed = {"source": case.source_strategy, "target": case.target_strategy, side: path}
    return ["--source-strategy", changed["source"], "--target-strategy", changed["target"]]


def test_a_weight_is_dropped_only_when_told_to(case: Case, tmp_path: Path) -> None:
    strategies = lacking(case, tmp_path, "target", "net.layer2.weight", "moments.net.layer2.weight")
    refused = call("transform", case.source, tmp_path / "dst", *strategies)
    assert refused.exit_code == 4
    assert "--drop 'net.layer2.weight'" in refused.stderr
    assert "moments" not in refused.stderr
    result = done("transform", case.source, tmp_path / "dst", *strategies, "--drop", "net.layer2.*")
    assert (
        "dropped, because the target does not have it: 2 names: net.layer2.weight, moments.net.layer2.weight\n"
        in result.stdout
    )


def test_a_weight_is_missing_only_when_told_to(case: Case, tmp_path: Path) -> None:
    strategies = lacking(case, tmp_path, "target")
    target = reshard.read_strategy(strategies[3])
    target = target.with_layout("lora.a", target.tensors["net.layer2.weight"][0].layout)
    reshard.write_strategy(target, strategies[3])
    refused = call("transform", case.source, tmp_path / "dst", *strategies)
    assert refused.exit_code == 4
    assert "--allow-missing 'lora.a'" in refused.stderr
    result = done("transform", case.source, tmp_path / "dst", *strategies, "--allow-missing", "lora.*", "--json")
    assert json.loads(result.stdout)["missing"] == ["lora.a"]


def test_a_layout_by_hand_stands_in_for_the_strategy(case: Case, tmp_path: Path) -> None:
    strategies = lacking(case, tmp_path, "source", "net.layer1.weight")
    refused = call("transform", case.source, tmp_path / "a", *strategies)
    assert refused.exit_code == 4
    assert "--layout 'net.layer1.weight=RULE'" in refused.stderr
    done("transform", case.source, tmp_path / "a", *strategies, "--layout", "net.layer1.weight=2,2,2:-1,1")
    done("transform", case.source, tmp_path / "b", *case.strategies)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_other_names_of_ranks_and_steps(case: Case, tmp_path: Path) -> None:
    for rank in range(8):
        folder = tmp_path / "src" / f"node{rank}"
        folder.mkdir(parents=True)
        for name in ("a.ckpt", "b.ckpt"):
            shutil.copy(case.source / f"rank_{rank}" / "net.ckpt", folder / name)
    command = ["transform", tmp_path / "src", tmp_path / "a", *case.strategies, "--rank-pattern", "node{rank}/*.ckpt"]
    refused = call(*command)
    assert refused.exit_code == 4
    assert "--suffix" in refused.stderr
    done(*command, "--suffix", "b")
    done("transform", case.source, tmp_path / "b", *case.strategies)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    shown = done("inspect", tmp_path / "src", "--rank-pattern", "node{rank}/*", "--suffix", "a")
    assert "8 ranks (0-7)" in shown.stdout


def proposed(result: Result) -> list[str]:
    """The command that is proposed to look at what was written."""
    return shlex.split(result.stderr.split("to look at it: reshard ", 1)[1])


def test_the_command_it_proposes_tells_formats_apart(case: Case, tmp_path: Path) -> None:
    command = ["transform", case.source, tmp_path, *case.strategies]
    assert "--suffix" not in proposed(done(*command))
    second = proposed(done(*command, "--format", "safetensors"))
    assert second[-1:] == ["--suffix=.safetensors"]
    assert "4 files (safetensors), 4 ranks (0-3)" in done(*second).stdout
    third = proposed(done(*command, "--prefix", "net_"))
    assert third[-1:] == ["--rank-pattern=rank_{rank}/net_{rank}*.ckpt"]
    assert "4 files (ckpt), 4 ranks (0-3)" in done(*third).stdout
    refused = call("inspect", tmp_path)
    assert refused.exit_code == 4
    assert "choose with --suffix\n" in refused.stderr


def test_formats_side_by_side_are_told_apart_by_a_suffix_that_is_named(case: Case, tmp_path: Path) -> None:
    for format in ("ckpt", "safetensors"):
        done("transform", case.source, tmp_path, *case.strategies, "--format", format)
    refused = call("inspect", tmp_path)
    assert refused.stderr.endswith("expected one; choose with --suffix .safetensors\n")
    assert "safetensors" in done("inspect", tmp_path, "--suffix", ".safetensors").stdout


# --- selection --------------------------------------------------------------------------------------------------


def names_in(root: Path) -> set[str]:
    files = [path for path in root.rglob("*.*") if path.suffix in {".safetensors", ".ckpt"}]
    return {name for path in files for name in helpers.read_rank_file(path)}


WEIGHTS = {f"net.layer{i}.{kind}" for i in (1, 2, 3) for kind in ("weight", "bias")}


def test_selection_options(case: Case, tmp_path: Path) -> None:
    command = ["transform", case.source, tmp_path / "a", *case.strategies, "--weights-only"]
    done(*command, "--include", "net.layer[12].*@4", "--exclude", "*.bias@6", "--cast", "float32=bfloat16")
    assert names_in(tmp_path / "a") == {"net.layer1.weight", "net.layer2.weight"}
    found = reshard.open(tmp_path / "a", strategy=case.target_strategy)
    whole = reshard.open(case.source, strategy=case.source_strategy)
    for name in found:
        assert found.tensors[name].spec.dtype.name == "bfloat16"
        expected = whole[name].compute().astype(found[name].dtype)
        assert found[name].compute().tobytes() == expected.tobytes()


def test_names_from_a_file(case: Case, tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text(json.dumps({"net.*.weight": "model.*.w", "net.layer1.bias": "b"}))
    done(
        "transform", case.source, tmp_path / "a", "--source-strategy", case.source_strategy,
        "--name-map", tmp_path / "names.json",
    )  # fmt: skip
    assert names_in(tmp_path / "a") >= {"model.layer1.w", "moments.model.layer1.w", "b", "moments.b", "global_step"}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "is not JSON"),
        ("[]", "is a JSON list"),
        ('{"a": 1, "b": null, "c": "d", "c": "e"}', "has 3 faults"),
        ('{"net.layer1.bias": "x", "net.layer2.bias": "x"}', "is given to net.layer1.bias, net.layer2.bias"),
        ('{"gone": "x"}', "is no tensor of the source"),
        (None, "cannot be read: No such file"),
    ],
)
def test_name_maps_that_are_none(case: Case, tmp_path: Path, content: str | None, told: str) -> None:
    if content is not None:
        (tmp_path / "names.json").write_text(content)
    command = ["transform", case.source, tmp_path / "a", *case.strategies, "--name-map", tmp_path / "names.json"]
    refused = call(*command)
    assert refused.exit_code == 2
    assert told in refused.stderr
    assert not (tmp_path / "a").exists()


def test_what_selects_nothing_is_2(case: Case, tmp_path: Path) -> None:
    for options in (["--include", "nothing*"], ["--include", "net.*@1"], ["--cast", "float32=int8"], ["--cast", "a=b"]):
        refused = call("transform", case.source, tmp_path, *case.strategies, *options)
        assert refused.exit_code == 2, options
        assert refused.stderr.startswith("error: ")


def test_replicas_stored_once_are_read_back(case: Case, tmp_path: Path) -> None:
    command = ["transform", case.source, tmp_path / "once", "--source-strategy", case.source_strategy]
    done(*command, "--target-strategy", case.source_strategy, "--format", "safetensors", "--remove-redundancy")
    whole = sum(len(content) for content in contents(case.source).values())
    assert sum(len(content) for content in contents(tmp_path / "once").values()) < whole / 2
    done("transform", tmp_path / "once", tmp_path / "a", *case.strategies, "--format", "ckpt")
    done("transform", case.source, tmp_path / "b", *case.strategies)
    for path in sorted((tmp_path / "a").rglob("*.ckpt")):
        expected = tmp_path / "b" / path.relative_to(tmp_path / "a")
        assert helpers.read_rank_file(path) == helpers.read_rank_file(expected)


def test_links_and_memory(case: Case, tmp_path: Path) -> None:
    command = ["transform", case.source, tmp_path / "a", "--source-strategy", case.source_strategy]
    done(*command, "--target-strategy", case.source_strategy, "--link-replicas", "--memory", "1GiB")
    done("transform", tmp_path / "a", tmp_path / "b", *case.strategies)
    refused = call(*command, "--memory", "1MB")
    assert refused.exit_code == 5


def test_one_stage_and_part_of_a_source(mindspore_data: Path, case: Case, tmp_path: Path) -> None:
    shutil.copytree(case.source, tmp_path / "src")
    for rank in (4, 5, 6, 7):  # replicas of the others
        shutil.rmtree(tmp_path / "src" / f"rank_{rank}")
    command = ["transform", tmp_path / "src", tmp_path / "a", *case.strategies]
    refused = call(*command)
    assert refused.exit_code == 4
    assert "--partial" in refused.stderr
    done(*command, "--partial")
    done("transform", case.source, tmp_path / "b", *case.strategies)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert call("inspect", case.source, "--stage", "1").exit_code == 2
    assert call("inspect", case.source, "--source-strategy", case.source_strategy, "--stage", "1").exit_code in {2, 4}


# --- unify and convert ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["mindspore", "huggingface"])
def test_unify_and_split_again(case: Case, tmp_path: Path, style: str) -> None:
    result = done(
        "unify", case.source, tmp_path / "set", "--source-strategy", case.source_strategy, "--style", style,
        "--max-shard-size", "4kB",
    )  # fmt: skip
    assert len(list((tmp_path / "set").glob("*.safetensors"))) > 3
    assert names_in(tmp_path / "set") == names_in(case.source)
    assert "15 tensors, 14.9 kB in whole tensors" in done(*proposed(result)).stdout
    done("transform", tmp_path / "set", tmp_path / "a", "--target-strategy", case.target_strategy, "--format", "ckpt")
    done("transform", case.source, tmp_path / "b", *case.strategies)
    for rank in range(4):
        place = f"rank_{rank}/checkpoint_{rank}.ckpt"
        assert helpers.read_rank_file(tmp_path / "a" / place) == helpers.read_rank_file(tmp_path / "b" / place)


def test_unify_only_weights(case: Case, tmp_path: Path) -> None:
    command = ["unify", case.source, tmp_path, "--source-strategy", case.source_strategy, "--weights-only"]
    planned = json.loads(done(*command, "--dry-run", "--json").stdout)
    assert contents(tmp_path) == {}
    done(*command)
    assert sorted(contents(tmp_path)) == ["param_name_map.json", "part0.safetensors"]
    assert {file["path"]: file["nbytes"] for file in planned["files"]} == {
        name: len(content) for name, content in contents(tmp_path).items()
    }
    assert names_in(tmp_path) == WEIGHTS


def test_a_set_is_not_mixed_with_another(case: Case, tmp_path: Path) -> None:
    command = ["unify", case.source, tmp_path, "--source-strategy", case.source_strategy]
    done(*command)
    before = contents(tmp_path)
    for options in (["--style", "huggingface"], ["--weights-only", "--overwrite"]):
        refused = call(*command, *options)
        assert refused.exit_code == 6
        assert "of another set" in refused.stderr
    done(*command)
    assert contents(tmp_path) == before
    done(*command, "--overwrite")


def test_convert_there_and_back(case: Case, tmp_path: Path) -> None:
    result = done("convert", case.source, tmp_path / "a", "--format", "safetensors")
    assert sorted(contents(tmp_path / "a")) == [f"rank_{r}/net.safetensors" for r in range(8)]
    assert "8 ranks (0-7)" in done(*proposed(result)).stdout
    done("convert", tmp_path / "a", tmp_path / "b", "--format", "ckpt")
    for rank in range(8):
        found, expected = (
            helpers.read_rank_file(root / f"rank_{rank}" / "net.ckpt") for root in (tmp_path / "b", case.source)
        )
        assert found == expected


def test_convert_beside_the_source(case: Case, tmp_path: Path) -> None:
    shutil.copytree(case.source, tmp_path / "src")
    result = done("convert", tmp_path / "src", tmp_path / "src", "--format", "safetensors")
    assert "8 files (safetensors)" in done(*proposed(result)).stdout
    assert call("convert", case.source, case.source, "--format", "ckpt").exit_code == 6  # the sources themselves
    assert len(contents(tmp_path / "src")) == 16


def test_convert_one_file(case: Case, tmp_path: Path) -> None:
    source = case.source / "rank_3" / "net.ckpt"
    result = done("convert", source, tmp_path / "new" / "three.bin", "--format", "safetensors")
    assert list(contents(tmp_path)) == ["new/three.bin"]
    assert helpers.read_rank_file(tmp_path / "new" / "three.bin") == helpers.read_rank_file(source)
    assert "15 tensors" in done(*proposed(result)).stdout
    refused = call("convert", source, tmp_path / "new", "--format", "safetensors")
    assert refused.exit_code == 6
    assert "expected the name of a file" in refused.stderr


def test_convert_is_one_run(case: Case, tmp_path: Path) -> None:
    command = ["convert", case.source, tmp_path, "--format", "safetensors"]
    (tmp_path / "rank_5").mkdir()
    (tmp_path / "rank_5" / "net.safetensors").write_bytes(b"mine")
    refused = call(*command)
    assert refused.exit_code == 6
    assert list(contents(tmp_path)) == ["rank_5/net.safetensors"]
    assert "1 target file would be in the way" in done(*command, "--dry-run").stderr
    data = json.loads(done(*command, "--overwrite", "--json").stdout)
    assert data["ranks"] == list(range(8))
    assert data["bytes_read"] == data["bytes_written"] == data["bytes_needed"]
    assert [file["rank"] for file in data["files"]] == list(range(8))


def test_convert_keeps_uneven_ranks_texts_and_marks(tmp_path: Path) -> None:
    """Ranks of a pipeline hold other tensors; replicas may be stored once, which the files say of themselves."""
    one, two = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4, dtype=np.int8)
    write_file(tmp_path / "src" / "rank_0" / "x-1_2.safetensors", {"a": one, "t": "größe"}, remove_redundancy="True")
    write_file(tmp_path / "src" / "rank_1" / "x-1_2.safetensors", {"a": one[:1], "b": two}, remove_redundancy="True")
    done("convert", tmp_path / "src", tmp_path / "a", "--format", "ckpt")
    done("convert", tmp_path / "src", tmp_path / "b", "--format", "safetensors")
    for rank in range(2):
        place = f"rank_{rank}/x-1_2.safetensors"
        assert (tmp_path / "b" / place).read_bytes() == (tmp_path / "src" / place).read_bytes()
    zero, first = (helpers.read_rank_file(tmp_path / "a" / f"rank_{r}" / "x-1_2.ckpt") for r in range(2))
    assert zero["a"] == ("float32", (2, 3), one.tobytes())
    assert zero["t"][2].decode("utf-32-le") == "größe"
    assert first == {"a": ("float32", (1, 3), one[:1].tobytes()), "b": ("int8", (4,), two.tobytes())}


def test_convert_takes_other_names_and_refuses_sets(case: Case, tmp_path: Path) -> None:
    write_file(tmp_path / "src" / "node0" / "a.ckpt", {"w": np.ones(2, np.float32)}, "ckpt")
    write_file(tmp_path / "src" / "node0" / "b.ckpt", {"w": np.ones(2, np.float32)}, "ckpt")
    result = done(
        "convert", tmp_path / "src", tmp_path / "dst", "--format", "safetensors", "--rank-pattern", "node{rank}/*",
        "--suffix", "b",
    )  # fmt: skip
    assert list(contents(tmp_path / "dst")) == ["node0/b.safetensors"]
    assert "1 tensor" in done(*proposed(result)).stdout
    done("unify", case.source, tmp_path / "set", "--source-strategy", case.source_strategy)
    refused = call("convert", tmp_path / "set", tmp_path / "x", "--format", "ckpt")
    assert refused.exit_code == 2
    assert "is a unified set" in refused.stderr


# --- inspect and strategy ---------------------------------------------------------------------------------------


def test_inspect_with_a_strategy(case: Case) -> None:
    result = done("inspect", case.source, "--source-strategy", case.source_strategy)
    assert "net.layer1.weight                1  float32  [16, 32]  2.0 kB" in result.stdout
    assert result.stderr == ""
    data = json.loads(done("inspect", case.source, "--source-strategy", case.source_strategy, "--json").stdout)
    assert data["ranks"] == list(range(8))
    weight = next(tensor for tensor in data["tensors"] if tensor["name"] == "net.layer1.weight")
    assert (weight["dtype"], weight["shape"], weight["nbytes"]) == ("float32", [16, 32], 2048)
    assert weight["layouts"][0]["dev_matrix"] == [2, 2, 2]
    assert weight["shards"][0] == {"start": [0, 0], "stop": [16, 16], "ranks": [0, 1, 4, 5]}


def test_inspect_without_a_strategy_shows_the_files(case: Case) -> None:
    result = done("inspect", case.source)
    assert "ranks 0-7: each 15 tensors" in result.stdout
    assert "[16, 16]" in result.stdout
    assert "a strategy (--source-strategy) would tell the whole tensors" in result.stderr
    data = json.loads(done("inspect", case.source, "--json").stdout)
    assert data["groups"][0]["ranks"] == list(range(8))


def test_inspect_one_file(case: Case) -> None:
    result = done("inspect", case.source / "rank_3" / "net.ckpt")
    assert "15 tensors, 11.9 kB in whole tensors" in result.stdout


def test_a_layout_may_be_given_as_it_is_shown(case: Case, tmp_path: Path) -> None:
    strategies = lacking(case, tmp_path, "source", "net.layer1.weight")
    done("transform", case.source, tmp_path / "a", *strategies, "--layout", "net.layer1.weight=[2, 2, 2] map [-1, 1]")
    done("transform", case.source, tmp_path / "b", *case.strategies)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    shown = done("inspect", case.source, "--source-strategy", case.source_strategy).stdout
    assert "[2, 2, 2] map [-1, 1]" in shown
    assert "layout: [extents of the device axes] map [the axis that cuts" in shown


def on_a_terminal(columns: int, *arguments: str | Path) -> str:
    """What a command writes to a terminal of so many columns."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "reshard", *map(str, arguments)],
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": str(columns)},
    )
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # Linux's way to say that the other side is closed
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    assert process.wait() == 0
    return shown.decode()


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_inspect_fits_the_terminal(case: Case, columns: int) -> None:
    shown = on_a_terminal(columns, "inspect", case.source, "--source-strategy", case.source_strategy)
    table = shown.splitlines()[2:-6]
    assert all(len(line) <= columns for line in table), max(table, key=len)
    assert "[2, 2, 2] map [-1, 1]  2 x 4" in shown or columns >= 100
    assert ("moments.net.layer{1-2}.bias" in shown) == (columns > 60)
    files = on_a_terminal(columns, "inspect", case.source).splitlines()
    assert all(len(line) <= max(columns, 80) for line in files[3:])


def test_strategy_show_of_what_is_none(case: Case, tmp_path: Path) -> None:
    write_file(tmp_path / "x.safetensors", {"w": np.ones(2, np.float32)})
    for path in (case.source / "rank_0" / "net.ckpt", tmp_path / "x.safetensors"):
        refused = call("strategy", "show", path)
        assert refused.exit_code == 4
        assert "looks like a checkpoint, no strategy file; `reshard inspect` shows" in refused.stderr
    refused = call("strategy", "show", "/dev/zero")
    assert refused.exit_code == 4
    assert "is no regular file" in refused.stderr
    with (tmp_path / "huge.ckpt").open("wb") as file:
        file.truncate((1 << 30) + 1)
    refused = call("strategy", "show", tmp_path / "huge.ckpt")
    assert refused.exit_code == 4
    assert "has more than 67108864 bytes" in refused.stderr


def test_strategy_show_explains_its_words(case: Case) -> None:
    shown = done("strategy", "show", case.target_strategy).stdout
    assert "map [-1, 0] opt -1" in shown
    assert "-1 none] opt N: rows are cut once more for the optimizer" in shown


def test_strategy_show(case: Case) -> None:
    result = done("strategy", "show", case.target_strategy)
    assert "12 tensors over 4 ranks (0-3): 1 stage of 4 devices" in result.stdout
    data = json.loads(done("strategy", "show", case.target_strategy, "--json").stdout)
    assert data["ranks"] == [0, 1, 2, 3]
    assert {tensor["layout"]["opt_weight_shard_size"] for tensor in data["tensors"]} == {-1}


def test_strategy_merge(mindspore_data: Path, tmp_path: Path) -> None:
    parts = mindspore_data / "strategies" / "pipe_tut8_ckpt"
    output = tmp_path / "merged.ckpt"
    result = done("strategy", "merge", parts, "-o", output)
    assert result.stdout.startswith(f"wrote {output}: ")
    assert "8 ranks in 2 stages" in result.stdout
    reference = reshard.read_strategy(mindspore_data / "merged" / "pipe_tut8.ckpt")
    assert reshard.read_strategy(output).tensors == reference.tensors
    refused = call("strategy", "merge", parts, "-o", output)
    assert refused.exit_code == 6
    assert "--overwrite" in refused.stderr
    done("strategy", "merge", parts, "-o", output, "--overwrite")


def test_a_merged_file_may_not_lie_among_its_parts(mindspore_data: Path, tmp_path: Path) -> None:
    shutil.copytree(mindspore_data / "strategies" / "pipe_tut8_ckpt", tmp_path / "parts")
    refused = call("strategy", "merge", tmp_path / "parts", "-o", tmp_path / "parts" / "merged.ckpt")
    assert refused.exit_code == 2
    assert not (tmp_path / "parts" / "merged.ckpt").exists()


# --- demo -------------------------------------------------------------------------------------------------------


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        result = done("demo")
        assert "all 14,960 bytes of their 60 tensors are equal" in result.stdout
        assert "What to type next" in result.stdout
    assert (tmp_path / "reshard-demo" / "dst_checkpoints" / "rank_3" / "checkpoint_3.ckpt").is_file()


def test_demo_exits_3_when_a_byte_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from reshard import demo

    honest = demo.transform

    def tampered(directory: Path) -> object:
        report = honest(directory)
        path = directory / "dst_checkpoints" / "rank_2" / "checkpoint_2.ckpt"
        content = bytearray(path.read_bytes())
        content[content.index(b"net.layer2.weight") + 60] ^= 1
        path.write_bytes(content)
        return report

    monkeypatch.setattr(demo, "transform", tampered)
    result = call("demo", tmp_path / "d")
    assert result.exit_code == 3
    assert "checkpoint_2.ckpt: tensor 'net.layer2.weight' differs from its slice of the whole tensor" in result.stderr


def test_demo_refuses_a_folder_that_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    assert call("demo", tmp_path).exit_code == 6


# --- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["transform", "a"],
        ["transform", "a", "b", "--ranks", "x"],
        ["transform", "a", "b", "--ranks", "5-3"],
        ["transform", "a", "b", "--ranks", "0-99999999999999"],
        ["transform", "a", "b", "--layout", "no-rule"],
        ["transform", "a", "b", "--threads", "0"],
        ["transform", "a", "b", "--format", "pickle"],
        ["transform", "a", "b", "--cast", "float32"],
        ["transform", "a", "b", "--cast", "float32=float16", "--cast", "float32=bfloat16"],
        ["transform", "a", "b", "--memory", "much"],
        ["transform", "a", "b", "--stage", "-1"],
        ["unify", "a", "b", "--style", "torch"],
        ["unify", "a", "b", "--max-shard-size", "4 elephants"],
        ["convert", "a", "b"],
        ["inspect"],
        ["nonsense"],
        ["strategy", "merge", "a"],
    ],
)
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert "Error: " in result.stderr


def test_a_rank_outside_the_target_is_2(case: Case, tmp_path: Path) -> None:
    result = call("transform", case.source, tmp_path, *case.strategies, "--ranks", "4")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: rank 4 is asked for")


def test_an_incomplete_source_is_4(case: Case, tmp_path: Path) -> None:
    shutil.copytree(case.source, tmp_path / "src")
    for rank in (0, 1, 4, 5):
        shutil.rmtree(tmp_path / "src" / f"rank_{rank}")
    result = call("transform", tmp_path / "src", tmp_path / "dst", *case.strategies)
    assert result.exit_code == 4
    assert result.stderr.startswith("error: ")
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    "arguments", [["inspect", "/nonexistent"], ["strategy", "show", "/nonexistent"], ["strategy", "show", __file__]]
)
def test_a_bad_source_or_strategy_is_4(arguments: list[str]) -> None:
    result = call(*arguments)
    assert result.exit_code == 4
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr


def test_a_full_disk_is_5(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int, _offset: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    result = call("transform", case.source, tmp_path, *case.strategies)
    assert result.exit_code == 5
    assert "No space left on device" in result.stderr
    assert contents(tmp_path) == {}


def test_a_directory_that_cannot_be_made_is_no_traceback(case: Case, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = call("transform", case.source, tmp_path / "file" / "dst", *case.strategies)
    assert result.exit_code == 6
    assert result.stderr.startswith("error: ")


def test_control_characters_of_a_file_do_not_reach_the_terminal(tmp_path: Path) -> None:
    bad = tmp_path / "x.json"
    bad.write_text(json.dumps({"parallel_layout_item": {"w\x1b[31m\u202e": {"dev_matrix": [0], "tensor_map": [0]}}}))
    result = call("strategy", "show", bad)
    assert result.exit_code == 4
    assert "\x1b" not in result.stderr
    assert "\u202e" not in result.stderr
    assert "w\\x1b[31m\\u202e" in result.stderr


def test_a_fault_of_our_own_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_path: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(reshard, "read_strategy", broken)
    result = call("strategy", "show", "x")
    assert result.exit_code == 1
    assert result.stderr == (
        "error: unexpected RuntimeError: first line (a fault of reshard; add --debug to see where)\n"
    )


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
    result = call("strategy", "show", "x")
    assert (result.exit_code, result.stderr) == (5, "error: memory does not suffice\n")


# --- processes: entry points, imports, signals, terminals --------------------------------------------------------

_HELPS = [
    ["--help"], ["transform", "--help"], ["inspect", "-h"], ["strategy", "--help"], ["strategy", "show", "--help"],
    ["strategy", "merge", "--help"], ["unify", "--help"], ["convert", "-h"], ["demo", "--help"], ["--version"],
]  # fmt: skip


def test_help_imports_nothing_heavy() -> None:
    code = f"""
import sys
import reshard
from reshard.cli import main
for arguments in {_HELPS!r}:
    try:
        main(arguments)
    except SystemExit as stopped:
        assert not stopped.code, arguments
heavy = {{"numpy", "dask", "zarr", "distributed", "google.protobuf", "ml_dtypes", "rich"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)


@pytest.mark.parametrize("arguments", _HELPS[:-1])
def test_every_help_has_an_example(arguments: list[str]) -> None:
    text = call(*arguments).stdout
    assert "\n  reshard " in text or arguments == ["strategy", "--help"]
    assert all(len(line) <= 80 for line in text.splitlines())


def script(name: str) -> list[str]:
    found = Path(sys.executable).with_name(name)
    if not found.exists():
        pytest.skip(f"{name} is not installed beside Python")
    return [str(found)]


@pytest.mark.parametrize("entry", ["reshard", "python -m", "dask"])
def test_entry_points(entry: str, case: Case) -> None:
    command = {
        "reshard": lambda: script("reshard"),
        "python -m": lambda: [sys.executable, "-m", "reshard"],
        "dask": lambda: [*script("dask"), "reshard"],
    }[entry]()
    shown = subprocess.run(
        [*command, "strategy", "show", case.target_strategy], check=True, capture_output=True, text=True
    )
    assert "12 tensors over 4 ranks" in shown.stdout
    refused = subprocess.run([*command, "inspect", "/nonexistent"], check=False, capture_output=True, text=True)
    assert refused.returncode == 4
    assert refused.stderr.startswith("error: /nonexistent: ")


def test_commands_are_proposed_as_they_were_called(case: Case, tmp_path: Path) -> None:
    """A folder of programs that is not on the PATH: `reshard` alone would not be found."""
    (called,) = script("reshard")
    for path, expected in ((os.environ["PATH"], called), (f"{Path(called).parent}:{os.environ['PATH']}", "reshard")):
        if path == os.environ["PATH"] and shutil.which("reshard"):
            continue
        environment = {**os.environ, "PATH": path}
        shown = subprocess.run(
            [called, "demo", tmp_path / "demo"], check=True, capture_output=True, text=True, env=environment
        )
        assert f"\n  {expected} inspect " in shown.stdout
    module = subprocess.run(
        [sys.executable, "-m", "reshard", "convert", case.source, tmp_path / "x", "--format", "ckpt"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert module.stderr == f"to look at it: {sys.executable} -m reshard inspect {tmp_path / 'x'}\n"


def test_a_reader_that_goes_away_is_no_error_message(case: Case) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "reshard", "inspect", case.source, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert "rror" not in process.stderr.read()
    process.stderr.close()
    process.wait()


_SLOW = """
import os, sys, time
from reshard.store import LocalStore

def slow(name, seconds):
    original = getattr(LocalStore, name)
    def method(self, *args, **kwargs):
        os.write(2, name.encode() + b"\\n")  # at once: several threads do
        time.sleep(seconds)
        return original(self, *args, **kwargs)
    setattr(LocalStore, name, method)

slow({name!r}, {seconds})
if {plain!r}:
    sys.modules["rich"] = None
from reshard.cli import main
main(sys.argv[1:])
"""


def slowly(name: str, seconds: float, arguments: Sequence[str | Path], *, plain: bool = False) -> list[str]:
    """A `reshard` whose store takes its time, and tells on stderr when it does."""
    code = _SLOW.format(name=name, seconds=seconds, plain=plain)
    return [sys.executable, "-c", code, *map(str, arguments)]


def heed_signals() -> None:
    """A shell starts its background jobs with some signals ignored, and whoever starts these tests may be one."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def stopped_at(name: str, seconds: float, number: int, arguments: Sequence[str | Path]) -> tuple[int, str]:
    """Send signals to a run as soon as it is at that operation; return its exit code and its last line."""
    process = subprocess.Popen(
        slowly(name, seconds, arguments),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_signals,  # noqa: PLW1509
    )
    assert process.stderr is not None
    assert process.stderr.readline() == f"{name}\n"
    process.send_signal(number)
    time.sleep(0.05)
    process.send_signal(number)  # the impatient one: it must not disturb the cleaning up
    lines = process.stderr.read().splitlines()
    process.stderr.close()
    return process.wait(), [line for line in lines if line != name][-1]


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "stopped by SIGTERM"),
        (signal.SIGHUP, 129, "stopped by SIGHUP"),
    ],
)
def test_a_stopped_run_leaves_no_unfinished_file_and_can_be_typed_again(
    case: Case, tmp_path: Path, number: int, code: int, word: str
) -> None:
    command: list[str | Path] = ["transform", case.source, tmp_path, *case.strategies]
    returned, said = stopped_at("write_at", 0.01, number, command)
    assert returned == code
    assert said == f"{word}; unfinished files are removed; the same command starts from the beginning"
    assert contents(tmp_path) == {}
    done(*command)


def test_a_run_stopped_at_its_end_tells_what_to_type(case: Case, tmp_path: Path) -> None:
    command: list[str | Path] = ["transform", case.source, tmp_path, *case.strategies]
    returned, _ = stopped_at("commit", 0.1, signal.SIGTERM, command)
    assert returned == 143
    done(*command)
    assert len(contents(tmp_path)) == 4


def test_an_ignored_signal_stays_ignored(case: Case, tmp_path: Path) -> None:
    """Under nohup a job goes on when the terminal goes away."""
    process = subprocess.Popen(
        ["nohup", *slowly("write_at", 0.005, ["transform", case.source, tmp_path, *case.strategies])],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while (line := process.stderr.readline()) != "write_at\n":
        assert line, "it ended before it wrote"
    process.send_signal(signal.SIGHUP)
    process.stderr.read()
    process.stderr.close()
    assert process.wait() == 0
    assert len(contents(tmp_path)) == 4


@pytest.mark.parametrize("plain", [False, True], ids=["rich", "plain"])
def test_progress_on_a_terminal(case: Case, tmp_path: Path, plain: bool) -> None:
    if not plain:
        pytest.importorskip("rich")
    ours, theirs = pty.openpty()
    arguments: list[str | Path] = ["transform", case.source, tmp_path, *case.strategies]
    process = subprocess.Popen(
        slowly("commit", 0.02, arguments, plain=plain),
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # Linux's way to say that the other side is closed
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert process.stdout is not None
    assert b"wrote 4 files" in process.stdout.read()
    process.stdout.close()
    assert process.wait() == 0
    text = shown.decode()
    assert "100%" in text
    assert "15.0 kB of 15.0 kB, " in text
    assert "/s, 0:00:00 left" in text
    assert ("writing" in text) != plain


def test_no_progress_where_there_is_no_terminal(case: Case, tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "reshard", "transform", case.source, tmp_path, *case.strategies],
        check=True,
        capture_output=True,
        text=True,
    )
    assert finished.stderr.startswith("to look at it: ")
    assert len(finished.stderr.splitlines()) == 1
