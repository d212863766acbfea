"""What every format does, of checkpoints that other programs wrote or that are made by hand, against numpy.

A format of which something is particular has tests of its own for that.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from fnmatch import fnmatch
from glob import escape
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cases import CASES, Case
from checkpoints import tree
from commands import call, done
from faulty import raising
from remotes import put
from stopped_runs import StoppedError, stop_after
from written import READERS, below, of_safetensors, told

import reshard
from reshard.core.plan import budget
from reshard.core.run.state import session
from reshard.errors import ReshardError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from cases import Truth
    from faulty import Faults

    Made = Callable[[Case], tuple[Path, Truth]]

FOUND = {3, 4}  # it differs; it cannot be read
HALVES = {"bfloat16": "uint16", "float16": "uint16"}  # Python's unpickler knows their size alone


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("conformance")


@pytest.fixture
def made(originals: Path, mindspore_data: Path, tmp_path: Path) -> Made:
    """Returns a copy of a checkpoint, and its truth; each is made once."""

    def make(case: Case) -> tuple[Path, Truth]:
        root = originals / case.name.replace(" ", "_")
        if root not in MADE:
            root.mkdir()
            MADE[root] = case.make(root, mindspore_data)
        path, truth = MADE[root]
        shutil.copytree(root, tmp_path / "source", dirs_exist_ok=True)
        return tmp_path / "source" / path.relative_to(root), truth

    return make


MADE: dict[Path, tuple[Path, Truth]] = {}
AGAIN = [case for case in CASES if case.again]
EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
EVERY_AGAIN = pytest.mark.parametrize("case", AGAIN, ids=lambda case: case.name)
EVERY_TARGET = pytest.mark.parametrize(
    "case", {case.again: case for case in reversed(AGAIN)}.values(), ids=lambda case: case.again
)


def opened(case: Case, path: Path | str) -> reshard.Checkpoint:
    return reshard.open(path, **case.opening)


def options(case: Case, tmp_path: Path) -> list[str]:
    """What a command that converts a case needs to know besides."""
    dropped = [text for pattern in case.drop for text in ("--drop", pattern)]
    if "strategy" not in case.opening:
        return dropped
    reshard.write_strategy(case.opening["strategy"], tmp_path / "strategy.ckpt")
    return [*dropped, "--source-strategy", str(tmp_path / "strategy.ckpt")]


def own_options(case: Case) -> list[str]:
    return ["--target-step", "5"] if case.again == "checkpoint2" else []


def values(checkpoint: reshard.Checkpoint) -> dict[str, Any]:
    return {name: told(checkpoint[name].compute()) for name in checkpoint}


def all_of(truth: Truth) -> dict[str, Any]:
    return {name: told(array) for name, array in truth.items()}


@EVERY
def test_it_is_what_was_saved(case: Case, made: Made) -> None:
    path, truth = made(case)
    source = opened(case, path)
    assert values(source) == all_of(truth)
    rng = np.random.default_rng(0)
    for name in islice((name for name in source if truth[name].ndim), 12):
        for _ in range(4):
            ends = [sorted(rng.integers(0, extent + 1, 2)) for extent in truth[name].shape]
            box = tuple(slice(int(start), int(stop)) for start, stop in ends)
            assert told(source[name][box].compute()) == told(truth[name][box])


@EVERY
def test_it_is_read_at_a_url(case: Case, made: Made, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path, truth = made(case)
    url = put(tmp_path / "source", f"memory://{abs(hash(request.node.nodeid))}")
    assert values(opened(case, f"{url}/{path.relative_to(tmp_path / 'source')}")) == all_of(truth)


@EVERY
def test_it_is_listed_and_shown(case: Case, made: Made, tmp_path: Path) -> None:
    path, truth = made(case)
    (row,) = reshard.runs(path.parent)
    assert row.state == case.state, row.reason
    strategy = [text for text in options(case, tmp_path) if text not in {"--drop", *case.drop}]
    shown = json.loads(done("inspect", path, *strategy, "--json").stdout)
    assert {each["name"]: (each["dtype"], tuple(each["shape"])) for each in shown["tensors"]} == {
        name: (array.dtype.name, array.shape) for name, array in truth.items()
    }


@EVERY
@pytest.mark.parametrize("to", ["safetensors", "zarr", "hf"])
def test_it_is_converted(case: Case, to: str, made: Made, tmp_path: Path) -> None:
    """Read back by the libraries of zarr and safetensors; a byte that changes is found; a plan gives the same bytes."""
    path, truth = made(case)
    kept = {name: array for name, array in truth.items() if not any(fnmatch(name, each) for each in case.drop)}
    out = tmp_path / "out"
    if to == "safetensors" and path.is_file():
        out = tmp_path / "out.safetensors"
    more = ["--to", to, *options(case, tmp_path)]
    done("convert", path, out, *more)
    assert (of_safetensors([out]) if out.is_file() else READERS[to](out)) == all_of(kept)
    assert values(reshard.open(out)) == all_of(kept)
    if out.is_dir():  # one file needs no plan
        done("plan", path, *more, "-o", tmp_path / "plan.json")
        done("run", tmp_path / "plan.json", tmp_path / "planned")
        assert tree(tmp_path / "planned") == tree(out)
    done("verify", out)
    spoil(max(below(out), key=size))
    against = ["--against", path] if out.is_file() else []  # one file has no ledger beside it
    assert call("verify", out, *against).exit_code in FOUND


def size(file: Path) -> int:
    return file.stat().st_size


def spoil(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


@EVERY
@pytest.mark.parametrize("to", ["safetensors", "zarr", "hf", "again"])
def test_files_are_read_without_being_written(case: Case, to: str, made: Made, tmp_path: Path) -> None:
    """Byte for byte what a run writes: whole, in ranges, as files that seek, and by fsspec."""
    path, _ = made(case)
    if to == "again" and not case.again:
        return
    step = {"target_step": 5} if (to, case.again) == ("again", "checkpoint2") else {}
    plan = reshard.plan(opened(case, path), to=case.again if to == "again" else to, drop=case.drop, **step)
    plan.run(tmp_path / "out", ledger=False)
    files = plan.filesystem()
    assert dict(plan.files) == {
        file.relative_to(tmp_path / "out").as_posix(): size(file) for file in below(tmp_path / "out")
    }
    assert sorted(files.find("")) == sorted(plan.files)
    rng = np.random.default_rng(0)
    for name in plan.files:
        content = (tmp_path / "out" / name).read_bytes()
        ends = [sorted(rng.integers(0, len(content) + 1, 2)) for _ in range(4)]
        assert [plan.read(name, start, stop - start) for start, stop in ends] == [content[a:b] for a, b in ends]
        assert plan.read(name) == content
        start, stop = ends[0]
        assert files.cat_file(name, start, stop) == content[start:stop]
        with plan.open(name) as file:
            file.seek(int(start))
            assert file.read() == content[start:]


@EVERY_AGAIN
def test_its_own_format_is_made_of_it(case: Case, made: Made, tmp_path: Path) -> None:
    """Read by other libraries, and by reshard as the format that it is."""
    path, truth = made(case)
    out = tmp_path / "out"
    done("convert", path, out, "--to", case.again, *options(case, tmp_path), *own_options(case))
    found, expected = READERS[case.again](out), all_of(truth)
    if case.again == "deepspeed-universal":
        expected = {name: (HALVES.get(dtype, dtype), *rest) for name, (dtype, *rest) in expected.items()}
    assert found == expected
    again = reshard.open(out)
    assert again.format == case.again
    assert values(again) == all_of(truth)
    done("verify", out)


@EVERY
def test_names_are_chosen_and_changed(case: Case, made: Made, tmp_path: Path) -> None:
    path, truth = made(case)
    source = opened(case, path)
    name = next(name for name in source if not any(fnmatch(name, each) for each in case.drop))
    selection = reshard.Selection(include=(escape(name),), name_map={name: "other.name"})
    reshard.plan(source, to="hf", selection=selection).run(tmp_path / "out")
    assert READERS["hf"](tmp_path / "out") == {"other.name": told(truth[name])}


HOSTILE = ["../up", "/root", "a/../../b", "a\nb", "a" * 4000, ".", "..", "con/aux", "\u202e", "a\\..\\..\\b", " "]


@EVERY_TARGET
@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_a_name_leads_nowhere(case: Case, name: str, made: Made, tmp_path: Path) -> None:
    """It is written below the target and read back, or refused."""
    path, truth = made(case)
    source = opened(case, path)
    old = next(each for each in source if truth[each].ndim)
    before = set(tmp_path.rglob("*"))
    try:
        selection = reshard.Selection(name_map={old: name})
        step = {"target_step": 5} if case.again == "checkpoint2" else {}
        reshard.plan(source, to=case.again, selection=selection, **step).run(tmp_path / "out")
    except ReshardError:
        assert not (tmp_path / "out").exists()
    else:
        assert told(reshard.open(tmp_path / "out")[name].compute()) == told(truth[old])
    beside = {each for each in set(tmp_path.rglob("*")) - before if not each.is_relative_to(tmp_path / "out")}
    assert {each.relative_to(tmp_path).parts[0] for each in beside} <= {"out.reshard"}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the work into many tasks, and note at once what is done."""
    monkeypatch.setattr(budget, "TASK_BYTES", 512)
    monkeypatch.setattr(budget, "BAND_BYTES", 256)
    monkeypatch.setattr(session, "FLUSH_SECONDS", 0)


@EVERY_TARGET
@pytest.mark.usefixtures("small")
def test_a_run_that_is_stopped_or_finds_a_full_disk_is_resumed(
    case: Case, made: Made, tmp_path: Path, faults: Faults
) -> None:
    """What is there meanwhile is not taken for a checkpoint; afterwards it is, byte for byte, that of one run."""
    path, truth = made(case)
    step = {"target_step": 5} if case.again == "checkpoint2" else {}
    plan = reshard.plan(opened(case, path), to=case.again, **step)
    plan.run(tmp_path / "once")
    with pytest.raises(StoppedError):
        plan.run(tmp_path / "out", progress=stop_after(2), threads=1)
    assert not any(row.state == "complete" for row in reshard.runs(tmp_path) if row.path == str(tmp_path / "out"))
    full = raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with faults.broken(0, full, "write_at", after=True), pytest.raises((ReshardError, OSError)):
        plan.run(tmp_path / "out", threads=1)
    assert not any(row.state == "complete" for row in reshard.runs(tmp_path) if row.path == str(tmp_path / "out"))
    plan.run(tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "once")
    assert values(reshard.open(tmp_path / "out")) == all_of(truth)


def outcome(case: Case, path: Path, truth: Mapping[str, Any], *, gone: bool = False) -> str:
    """Open and read a spoiled checkpoint: it is refused, or all that can be read is right.

    No tensor is missing without a word, but if a file is gone that nothing else names, such as an array's metadata.
    """
    try:
        source = opened(case, path)
        found = values(source)
    except ReshardError:
        return "refused"
    expected = all_of(truth)
    assert {name: value for name, value in found.items() if value != expected.get(name)} == {}
    missing = truth.keys() - found.keys()
    assert missing <= source.unreadable.keys() or source.warnings or gone, missing
    return "refused in part" if missing else "right"


def some_files(path: Path) -> list[Path]:
    every = below(path)
    return every[:: max(1, len(every) // 8)]


@EVERY
@pytest.mark.parametrize("left", [0, 0.5, None], ids=["empty", "half", "missing"])
def test_a_file_that_is_cut_short_gives_no_wrong_value(case: Case, left: float | None, made: Made) -> None:
    path, truth = made(case)
    for file in some_files(path):
        content = file.read_bytes()
        if left is None:
            if case.unmissed and fnmatch(file.name, case.unmissed):
                continue
            file.unlink()
        else:
            file.write_bytes(content[: int(len(content) * left)])
        outcome(case, path, truth, gone=left is None)
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)


@pytest.mark.parametrize("case", [case for case in CASES if case.metadata], ids=lambda case: case.name)
def test_metadata_that_are_cut_short_are_refused(case: Case, made: Made) -> None:
    path, truth = made(case)
    for file in (file for pattern in case.metadata for file in path.glob(pattern)):
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        assert outcome(case, path, truth) != "right", file
        file.write_bytes(content)
