"""`reshard plan` and `run`: what they print, what they write, what they refuse."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tree
from commands import Case, call, done
from refusals import failed

import reshard
from reshard import Selection
from reshard.kits.files import index_file


def saved(case: Case, tmp_path: Path, *options: str | Path) -> Path:
    """A plan of the tutorial's case, whose source is then elsewhere."""
    shutil.copytree(case.source, tmp_path / "src")
    done("plan", tmp_path / "src", *options, "-o", tmp_path / "plan.json")
    (tmp_path / "src").rename(tmp_path / "moved")
    return tmp_path / "plan.json"


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--format", "safetensors", "--ranks", "0,2-3", "--prefix", "x"],
        ["--remove-redundancy"],
        ["--link-replicas", "--memory", "64MB"],
        ["--weights-only", "--cast", "float32=bfloat16", "--exclude", "*layer3*"],
    ],
)
def test_what_is_planned_is_what_transform_does(case: Case, tmp_path: Path, options: list[str]) -> None:
    done("transform", case.source, tmp_path / "direct", *case.strategies, *options)
    path = saved(case, tmp_path, *case.strategies, *options)
    done("run", path, tmp_path / "dst", "--source", tmp_path / "moved")
    assert tree(tmp_path / "dst") == tree(tmp_path / "direct")


def test_a_plan_is_shown_as_a_dry_run_is(case: Case, tmp_path: Path) -> None:
    shown = done("plan", case.source, tmp_path / "dst", *case.strategies)
    dry = done("convert", case.source, tmp_path / "dst", *case.strategies, "--dry-run")
    assert shown.stdout == dry.stdout
    assert shown.stderr == dry.stderr == "format: ckpt, as the source\n"
    data = json.loads(done("plan", case.source, tmp_path / "dst", *case.strategies, "--json").stdout)
    assert data == json.loads(
        done("transform", case.source, tmp_path / "dst", *case.strategies, "--dry-run", "--json").stdout
    )
    assert not list(tmp_path.iterdir())


def test_run_takes_the_options_of_transform(case: Case, tmp_path: Path) -> None:
    path = saved(case, tmp_path, *case.strategies)
    command = ["run", path, tmp_path / "dst", "--source", tmp_path / "moved"]
    planned = json.loads(done(*command, "--dry-run", "--json").stdout)
    assert not (tmp_path / "dst").exists()
    ran = json.loads(done(*command, "--json", "--scheduler", "synchronous", "--no-fsync").stdout)
    assert list(ran) == list(planned)
    assert ran["verify"] == f"reshard verify {tmp_path}/dst"
    assert ran["measured_memory"] > 0
    (tmp_path / "dst" / "rank_1" / "checkpoint_1.ckpt").write_bytes(b"other")
    assert call(*command).exit_code == 6
    done(*command, "--overwrite", "-q")


def test_a_target_below_the_current_directory_may_be_planned(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done("plan", case.source, "made/dst", *case.strategies, "-o", "plan.json")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    done("run", "../plan.json")
    assert len(tree(tmp_path / "there" / "made" / "dst")) == 4
    done("run", "../plan.json", "other")
    assert tree(Path("other")) == tree(Path("made/dst"))


@pytest.mark.parametrize("target", ["/somewhere", "../somewhere", "a/../../b"])
def test_no_other_target_may_be_planned(case: Case, tmp_path: Path, target: str) -> None:
    failed(
        2, "outside-directory", "plan", case.source, target, *case.strategies, "-o", tmp_path / "plan.json",
        places=(repr(target),),
    )  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_run_needs_a_target_and_the_source(case: Case, tmp_path: Path) -> None:
    path = saved(case, tmp_path, *case.strategies)
    failed(2, "no-target", "run", path, places=(f"reshard run {path} TARGET",))
    failed(4, "not-found", "run", path, tmp_path / "dst", places=("rank_0/net.ckpt", "--source"))
    assert not (tmp_path / "dst").exists()


def test_another_source_is_refused(case: Case, tmp_path: Path) -> None:
    path = saved(case, tmp_path, *case.strategies)
    file = tmp_path / "moved" / "rank_5" / "net.ckpt"
    content = bytearray(file.read_bytes())
    entry = index_file(str(file)).entries["net.layer1.weight"]
    content[entry.runs[0][0]] ^= 1
    file.write_bytes(content)
    failed(
        6, "source-changed", "run", path, tmp_path / "dst", "--source", tmp_path / "moved",
        places=("rank_5/net.ckpt",),
    )  # fmt: skip
    assert not (tmp_path / "dst").exists()


def test_what_is_not_a_plan_is_refused(case: Case, tmp_path: Path) -> None:
    refused = failed(4, "not-a-plan", "run", case.source_strategy, tmp_path / "dst", places=(case.source_strategy,))
    assert refused.stderr.count("error: ") == 1


def verified(line: str) -> int:
    """Type the command that a report proposes; return its exit code."""
    assert line.startswith("next: reshard verify "), line
    return call(*shlex.split(line.removeprefix("next: reshard "))).exit_code


IN_PYTHON = {
    "one": (["{first}"], Selection(), None),
    "included": (["*layer*"], Selection(include=("*.weight*",)), None),
    "renamed and cast": (["*layer*"], Selection(name_map={"net.*": "model.*"}, cast={"float32": "bfloat16"}), None),
    "a set": (["*layer*"], Selection(), reshard.HuggingFaceSet()),
    "zarr": (["*layer*"], Selection(), reshard.ZarrGroup()),
}


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(("patterns", "selection", "files"), IN_PYTHON.values(), ids=IN_PYTHON)
def test_the_command_verifies_what_was_planned_in_python(
    case: Case, tmp_path: Path, patterns: list[str], selection: Selection, files: Any, cut: bool
) -> None:
    """Of some tensors of a checkpoint, which a plan file holds and no option said."""
    source = reshard.open(case.source, strategy=case.source_strategy)
    some = source.sel(*(pattern.format(first=next(iter(source))) for pattern in patterns))
    target = reshard.read_strategy(case.target_strategy) if cut and not files and not selection.name_map else None
    reshard.plan(some, target, files=files, selection=selection).save(tmp_path / "plan.json")
    ran = done("run", tmp_path / "plan.json", tmp_path / "dst")
    line = ran.stdout.splitlines()[-1]
    assert verified(line) == 0
    name = next(name for name, tensor in some.tensors.items() if tensor.spec.nbytes > 100)
    extent = source.tensors[name].shards[0].replicas[0]
    path, offset = Path(source._record.files[extent.file].path), extent.runs[0][0]
    content = path.read_bytes()
    try:  # the command looks at what was converted
        path.write_bytes(content[:offset] + bytes(64) + content[offset + 64 :])
        assert verified(line) == (3 if name in selected_names(some, selection) else 0)
    finally:
        path.write_bytes(content)


def selected_names(source: reshard.Checkpoint, selection: Selection) -> set[str]:
    return {each.source_name for each in reshard.plan(source, selection=selection)._record.transfers}
