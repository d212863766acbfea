"""`reshard transform`: what it writes, what goes to stdout and what to stderr, and which tensors it takes."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from checkpoints import tree
from commands import Case, call, done, names_in, proposed
from refusals import failed

import reshard

if TYPE_CHECKING:
    from pathlib import Path


# --- convert ----------------------------------------------------------------------------------------------------


def test_convert_writes_files_and_says_so(case: Case, tmp_path: Path) -> None:
    result = done("convert", case.source, tmp_path / "dst", *case.strategies, "--to", "ckpt")
    assert sorted(tree(tmp_path)) == [f"dst/rank_{r}/checkpoint_{r}.ckpt" for r in range(4)]
    wrote, checked, following = result.stdout.splitlines()
    assert wrote.startswith(f"wrote 4 ckpt files for 4 ranks to {tmp_path}/dst   17.3 kB in ")
    assert checked.startswith("  15 tensors; all 80 replicas sampled; every block checksummed; peak memory ")
    assert following == f"next: reshard verify {tmp_path}/dst"
    assert result.stderr == ""


def test_the_command_it_proposes_works(case: Case, tmp_path: Path) -> None:
    result = done("convert", case.source, tmp_path / "dst", *case.strategies, "-v")
    assert "15 tensors, 14.9 kB in whole tensors" in done(*proposed(result)).stdout
    some = done("convert", case.source, tmp_path / "some", *case.strategies, "--ranks", "1,3", "-v")
    assert "2 ranks (1,3)" in done(*proposed(some)).stdout


def test_a_dry_run_writes_nothing(case: Case, tmp_path: Path) -> None:
    result = done("convert", case.source, tmp_path / "dst", *case.strategies, "--to", "ckpt", "--dry-run", "-v")
    assert not list(tmp_path.iterdir())
    assert "read     14.9 kB, 2 files\nwrite    17.3 kB, 4 files, 4 ranks (0-3)\n" in result.stdout
    assert "dropped" not in result.stdout
    assert f"{tmp_path}/dst/rank_3/checkpoint_3.ckpt  4.3 kB" in result.stdout
    assert result.stderr == ""


def test_a_dry_run_refuses_what_a_run_does(case: Case, tmp_path: Path) -> None:
    command: list[str | Path] = ["convert", case.source, tmp_path / "dst", *case.strategies, "--quiet"]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "rank_2").symlink_to(tmp_path / "elsewhere")
    for options in (["--dry-run"], [], ["--dry-run", "--overwrite"]):
        failed(6, "outside-directory", *command, *options, places=("rank_2/checkpoint_2.ckpt", tmp_path / "elsewhere"))
        assert [path.name for path in (tmp_path / "dst").iterdir()] == ["rank_2"]


def test_a_dry_run_tells_what_a_run_would_find(case: Case, tmp_path: Path) -> None:
    command = ["convert", case.source, tmp_path, *case.strategies, "--to", "ckpt"]
    done(*command, "--ranks", "2")
    kept = "would be kept unread, finished by an earlier run; reshard verify reads every bit\n"
    assert done(*command, "--dry-run").stderr == f"warning: 1 target file {kept}"
    assert done(*command, "--dry-run", "--restart").stderr == ""
    before = list(tree(tmp_path))
    other = done(*command, "--dry-run", "--cast", "float32=float16").stderr
    assert other == (
        "warning: 1 target file would be refused, made by another plan or from other sources; a run needs --restart\n"
    )
    assert call(*command, "--cast", "float32=float16").exit_code == 6
    (tmp_path / "rank_1").mkdir()
    (tmp_path / "rank_1" / "checkpoint_1.ckpt").write_bytes(b"mine")
    both = done(*command, "--dry-run").stderr
    assert "warning: 1 target file would be in the way; a run needs --overwrite\n" in both
    assert call(*command).exit_code == 6
    assert done(*command, "--dry-run", "--overwrite").stderr == f"warning: 1 target file {kept}"
    assert list(tree(tmp_path)) == sorted([*before, "rank_1/checkpoint_1.ckpt"])
    assert "resumed from" in done(*command, "--overwrite").stdout
    assert done(*command, "--dry-run").stderr == f"warning: 4 target files {kept}"


def test_json_has_the_same_keys_before_and_after(case: Case, tmp_path: Path) -> None:
    command = ["convert", case.source, tmp_path / "dst", *case.strategies, "--json"]
    before = json.loads(done(*command, "--dry-run").stdout)
    after = json.loads(done(*command).stdout)
    assert list(before) == list(after)
    assert {key for key in before if before[key] != after[key]} == {
        "dry_run", "seconds", "ran_on", "measured_memory", "checksums", "resumed", "finished", "removed", "verify",
    }  # fmt: skip
    assert set(before) == {
        "dry_run", "source", "target", "encryption", "format", "ranks", "tensors", "bytes_needed", "bytes_read",
        "bytes_written", "target_bytes", "step", "left_out", "schema", "source_files", "target_files", "tasks",
        "peak_memory", "partition", "read_amplification", "seconds", "ran_on", "dropped", "missing", "warnings",
        "sampled", "files", "replicas", "links", "measured_memory", "checksums", "resumed", "finished", "verify",
        "manifest", "changes", "removed", "bytes_copied", "requests",
    }  # fmt: skip
    assert (before["seconds"], before["measured_memory"], before["verify"]) == (None, None, None)
    assert after["seconds"] > 0
    assert before["files"][3] == {"rank": 3, "path": "rank_3/checkpoint_3.ckpt", "nbytes": 4321}
    sizes = {name.removeprefix("dst/"): len(content) for name, content in tree(tmp_path).items()}
    assert {file["path"]: file["nbytes"] for file in after["files"]} == sizes


def test_existing_files_are_refused(case: Case, tmp_path: Path) -> None:
    command = ["convert", case.source, tmp_path, *case.strategies]
    done(*command)
    before = tree(tmp_path)
    (tmp_path / "rank_0" / "checkpoint_0.ckpt").write_bytes(b"old")
    failed(6, "already-exists", *command, places=("rank_0/checkpoint_0.ckpt", "--overwrite"))
    done(*command, "--overwrite")
    assert tree(tmp_path) == before


def test_quiet_says_nothing(case: Case, tmp_path: Path) -> None:
    result = done("convert", case.source, tmp_path, *case.strategies, "-q")
    assert (result.stdout, result.stderr) == ("", "")


def test_ranks_format_and_prefix(case: Case, tmp_path: Path) -> None:
    done(
        "convert", case.source, tmp_path, *case.strategies,
        "--ranks", "0,2-3", "--to", "safetensors", "--prefix", "net-",
    )  # fmt: skip
    assert sorted(tree(tmp_path)) == [f"rank_{r}/net-{r}.safetensors" for r in (0, 2, 3)]


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
    refused = failed(
        4, "not-in-strategy", "convert", case.source, tmp_path / "dst", *strategies,
        places=("--drop 'net.layer2.weight'",),
    )  # fmt: skip
    assert "moments" not in refused.stderr
    result = done("convert", case.source, tmp_path / "dst", *strategies, "--drop", "net.layer2.*")
    assert "13 tensors (2 dropped)" in result.stdout


def test_a_weight_is_missing_only_when_told_to(case: Case, tmp_path: Path) -> None:
    strategies = lacking(case, tmp_path, "target")
    target = reshard.read_strategy(strategies[3])
    target = target.with_layout("lora.a", target.tensors["net.layer2.weight"][0].layout)
    reshard.write_strategy(target, strategies[3])
    failed(
        4, "missing-tensor", "convert", case.source, tmp_path / "dst", *strategies,
        places=("--allow-missing 'lora.a'",),
    )  # fmt: skip
    result = done("convert", case.source, tmp_path / "dst", *strategies, "--allow-missing", "lora.*", "--json")
    assert json.loads(result.stdout)["missing"] == ["lora.a"]


def test_a_layout_by_hand_stands_in_for_the_strategy(case: Case, tmp_path: Path) -> None:
    strategies = lacking(case, tmp_path, "source", "net.layer1.weight")
    failed(
        4, "unlisted-tensor", "convert", case.source, tmp_path / "a", *strategies,
        places=("--layout 'net.layer1.weight=RULE'",),
    )  # fmt: skip
    done("convert", case.source, tmp_path / "b", *case.strategies)
    done("convert", case.source, tmp_path / "c", *strategies, "--layout", "net.layer1.weight=2,2,2:-1,1")
    assert tree(tmp_path / "c") == tree(tmp_path / "b")


def test_other_names_of_ranks_and_steps(case: Case, tmp_path: Path) -> None:
    for rank in range(8):
        folder = tmp_path / "src" / f"node{rank}"
        folder.mkdir(parents=True)
        for name in ("a.ckpt", "b.ckpt"):
            shutil.copy(case.source / f"rank_{rank}" / "net.ckpt", folder / name)
    command = ["convert", tmp_path / "src", tmp_path / "a", *case.strategies, "--rank-pattern", "node{rank}/*.ckpt"]
    failed(4, "several-checkpoints", *command, places=("a.ckpt, b.ckpt", "--suffix"))
    done(*command, "--suffix", "b")
    done("convert", case.source, tmp_path / "b", *case.strategies)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    shown = done("inspect", tmp_path / "src", "--rank-pattern", "node{rank}/*", "--suffix", "a")
    assert "8 ranks (0-7)" in shown.stdout


def test_two_checkpoints_in_one_directory_are_told_apart_by_options(case: Case, tmp_path: Path) -> None:
    """They were copied there; a conversion refuses to write the second."""
    command = ["convert", case.source, tmp_path, *case.strategies]
    assert "4 ckpt files, 4 ranks (0-3)" in done(*proposed(done(*command, "-v"))).stdout
    for more in (["--to", "safetensors"], ["--prefix", "net_"]):
        failed(6, "other-checkpoint", *command, *more, places=(tmp_path,))
        done("convert", case.source, tmp_path / "apart", *case.strategies, *more)
        shutil.rmtree(tmp_path / "apart" / ".reshard")
        shutil.copytree(tmp_path / "apart", tmp_path, dirs_exist_ok=True)
        shutil.rmtree(tmp_path / "apart")
    second = ["--suffix", ".safetensors", "--source-strategy", case.target_strategy]
    assert "4 safetensors files, 4 ranks (0-3)" in done("inspect", tmp_path, *second).stdout
    third = ["--rank-pattern", "rank_{rank}/net_{rank}*.ckpt", "--source-strategy", case.target_strategy]
    assert "4 ckpt files, 4 ranks (0-3)" in done("inspect", tmp_path, *third).stdout
    failed(4, "several-checkpoints", "inspect", tmp_path, places=("--suffix\n",))


# --- selection --------------------------------------------------------------------------------------------------


def test_selection_options(case: Case, tmp_path: Path) -> None:
    command = ["convert", case.source, tmp_path / "a", *case.strategies, "--weights-only"]
    done(*command, "--include", "net.layer[12].*@4", "--exclude", "*.bias@6", "--cast", "float32=bfloat16")
    assert names_in(tmp_path / "a") == {"net.layer1.weight", "net.layer2.weight"}
    found = reshard.open(tmp_path / "a", strategy=case.target_strategy)
    whole = reshard.open(case.source, strategy=case.source_strategy)
    for name in found:
        assert found.tensors[name].spec.dtype.name == "bfloat16"
        expected = whole[name].compute().astype(found[name].dtype)
        assert found[name].compute().tobytes() == expected.tobytes()


def test_weights_only(case: Case, tmp_path: Path) -> None:
    done("convert", case.source, tmp_path / "a", *case.strategies, "--weights-only")
    assert names_in(tmp_path / "a") == {f"net.layer{n}.{kind}" for n in (1, 2, 3) for kind in ("weight", "bias")}


def test_names_from_a_file(case: Case, tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text(json.dumps({"net.*.weight": "model.*.w", "net.layer1.bias": "b"}))
    done(
        "convert", case.source, tmp_path / "a", "--source-strategy", case.source_strategy,
        "--name-map", tmp_path / "names.json",
    )  # fmt: skip
    assert names_in(tmp_path / "a") >= {"model.layer1.w", "moments.model.layer1.w", "b", "moments.b", "global_step"}


@pytest.mark.parametrize(
    ("content", "code", "told"),
    [
        ("{", "bad-name-map", "names.json"),
        ("[]", "bad-name-map", "JSON list"),
        ('{"a": 1, "b": null, "c": "d", "c": "e"}', "bad-name-map", "3 faults"),
        ('{"net.layer1.bias": "x", "net.layer2.bias": "x"}', "duplicate-name", "net.layer1.bias, net.layer2.bias"),
        ('{"gone": "x"}', "no-match", "'gone'"),
        (None, "not-found", "names.json"),
    ],
)
def test_name_maps_that_are_none(case: Case, tmp_path: Path, content: str | None, code: str, told: str) -> None:
    if content is not None:
        (tmp_path / "names.json").write_text(content)
    command = ["convert", case.source, tmp_path / "a", *case.strategies, "--name-map", tmp_path / "names.json"]
    failed(2, code, *command, places=(told,))
    assert not (tmp_path / "a").exists()


def test_what_selects_nothing_is_2(case: Case, tmp_path: Path) -> None:
    for options, code, place in (
        (["--include", "nothing*"], "no-match", "nothing*"),
        (["--include", "net.*@1"], "wrong-count", "net.*@1"),
        (["--cast", "float32=int8"], "unsupported-cast", "float32=int8"),
        (["--cast", "a=b"], "unknown-dtype", "'a'"),
    ):
        failed(2, code, "convert", case.source, tmp_path, *case.strategies, *options, places=(place,))


def test_memory_is_a_limit(case: Case, tmp_path: Path) -> None:
    command = ["convert", case.source, tmp_path / "a", "--source-strategy", case.source_strategy]
    done(*command, "--target-strategy", case.source_strategy, "--memory", "1GiB")
    done("convert", tmp_path / "a", tmp_path / "b", *case.strategies)
    failed(5, "not-enough-memory", *command, "--memory", "1MB", places=("'net.layer2.weight'",))


def test_one_stage_and_part_of_a_source(mindspore_data: Path, case: Case, tmp_path: Path) -> None:
    shutil.copytree(case.source, tmp_path / "src")
    for rank in (4, 5, 6, 7):  # replicas of the others
        shutil.rmtree(tmp_path / "src" / f"rank_{rank}")
    command = ["convert", tmp_path / "src", tmp_path / "a", *case.strategies]
    failed(4, "missing-replicas", *command, places=("ranks 4-7", "--partial"))
    done(*command, "--partial")
    done("convert", case.source, tmp_path / "b", *case.strategies)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert call("inspect", case.source, "--stage", "1").exit_code == 2
    assert call("inspect", case.source, "--source-strategy", case.source_strategy, "--stage", "1").exit_code in {2, 4}
