"""Going on with a run: what its journal is believed, who may write into a target, what is written again."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import assert_rank_files, numbers, tree, write_ranks
from click.testing import CliRunner, Result
from generators import Model, models
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard
from reshard import Layout, Strategy, fingerprint, journal, planner, receipts, resume
from reshard.bands import Recipe
from reshard.block import Block
from reshard.checksum import crc32c
from reshard.cli import cli
from reshard.errors import BudgetError, ChangedError, ReshardError, SourceError, TargetError
from reshard.journal import DIRECTORY, Journal, digests
from reshard.resume import remaining
from reshard.store import PARTIAL, LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reshard.plan import Plan
    from reshard.remote import Status

FULL = numbers({"w": (48, 16), "b": (24,), "c": (12, 8)})
SOURCE = Strategy.of({"w": Layout.of([4], [0, -1]), "b": Layout.of([4], [-1]), "c": Layout.of([4], [-1, 0])})
TARGET = Strategy.of({"w": Layout.of([2], [-1, 0]), "b": Layout.of([2], [0]), "c": Layout.of([2], [0, -1])})


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the work so fine that a small model has many bands and tasks, and note every receipt at once."""
    monkeypatch.setattr(planner, "TASK_BYTES", 512)
    monkeypatch.setattr(planner, "BAND_BYTES", 256)
    monkeypatch.setattr(resume, "FLUSH_SECONDS", 0)


@pytest.fixture
def source(tmp_path: Path) -> reshard.Checkpoint:
    return reshard.open(write_ranks(tmp_path / "src", FULL, SOURCE), strategy=SOURCE)


class StoppedError(Exception):
    """What ends a run in the middle."""


def stop_after(tasks: int) -> Callable[[object], None]:
    """End a run when so many tasks have told of their work."""
    left = iter(range(tasks))

    def progress(_: object) -> None:
        if next(left, None) is None:
            raise StoppedError

    return progress


def stopped(plan: Plan, target: Path, tasks: int = 6, **options: Any) -> None:
    """Run a plan, and end it in the middle as a kill would: with its receipts noted."""
    with pytest.raises(StoppedError):
        plan.run(target, progress=stop_after(tasks), threads=1, **options)


class Written:
    """Counts what is written into unfinished files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranges: list[tuple[str, int, int]] = []
        original = LocalStore.write_at

        def write_at(store: LocalStore, path: str, offset: int, buffer: memoryview) -> None:
            self.ranges.append((path, offset, offset + len(buffer)))
            original(store, path, offset, buffer)

        monkeypatch.setattr(LocalStore, "write_at", write_at)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Written:
    return Written(monkeypatch)


# --- what is left ---------------------------------------------------------------------------------------------------


@st.composite
def blocks(draw: st.DrawFn) -> tuple[tuple[int, ...], Block]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    edges = [sorted(draw(st.tuples(st.integers(0, extent), st.integers(0, extent)))) for extent in shape]
    return shape, Block(tuple(a for a, _ in edges), tuple(b for _, b in edges))


@given(blocks(), st.data())
def test_elements_before_a_row(given_block: tuple[tuple[int, ...], Block], data: st.DataObject) -> None:
    shape, block = given_block
    recipe = Recipe.of(shape, [Block.whole(shape)], [block])
    inside = np.zeros(shape, bool)
    inside[tuple(slice(a, b) for a, b in zip(block.start, block.stop, strict=True))] = True
    axis = data.draw(st.integers(0, len(shape) - 1))
    rows = inside.reshape(recipe.rows(axis), -1)
    for row in range(len(rows) + 1):
        assert recipe.before(0, axis, row) == rows[:row].sum()


@settings(max_examples=25)
@given(models(), st.data())
def test_only_what_is_not_there_is_written_again(
    tmp_path_factory: pytest.TempPathFactory, model: Model, data: st.DataObject
) -> None:
    """Stop anywhere, spoil some of what was written, cut journals short; then the rest gives the same bytes."""
    root = tmp_path_factory.mktemp("run")
    full = numbers(model.shapes, "int16")
    checkpoint = reshard.open(write_ranks(root / "src", full, model.source), strategy=model.source)
    plan = reshard.plan(checkpoint, model.target)
    plan.run(root / "undisturbed", fsync=False)
    with suppress(StoppedError):
        progress = stop_after(data.draw(st.integers(0, len(plan.tasks))))
        plan.run(root / "out", progress=progress, threads=1, fsync=False, checksums=True)
    noted = Journal(str(root / "out"))
    finished = [number for number, file in enumerate(plan.files) if (root / "out" / file.path).exists()]
    good = {}
    for number, file in enumerate(plan.files):
        path = root / "out" / (file.path + PARTIAL)
        if not path.exists():
            continue
        if data.draw(st.booleans()):
            line = Path(noted.path(file.path))
            os.truncate(line, line.stat().st_size - data.draw(st.integers(1, 20)))
        content = bytearray(path.read_bytes())
        spoiled = data.draw(st.sets(st.integers(0, len(content) - 1), max_size=2))
        for place in spoiled:
            content[place] ^= 0x55
        path.write_bytes(content)
        good[number] = resume._spans(
            (begin, nbytes, crc)
            for begin, nbytes, crc in noted.read(file.path).wrote
            if not any(begin <= place < begin + nbytes for place in spoiled)
        )
    report = plan.run(root / "out", fsync=False)
    assert tree(root / "out") == tree(root / "undisturbed")
    left = remaining(plan, finished, good, str(root / "out"))
    assert report.bytes_written == resume._bytes_left(left) == plan.stats.bytes_written - report.resumed


def test_notes_of_many_ranges_are_lines_of_a_length_that_is_read(tmp_path: Path) -> None:
    noted = Journal(str(tmp_path))
    ranges = [(4096 * number, 4096, 0xFFFFFFFF - number) for number in range(10_000)]
    noted.begin("a", "digest", 1 << 40, wrote=ranges[:9000])
    noted.wrote("a", ranges[9000:])
    assert noted.read("a").wrote == ranges
    assert max(map(len, Path(noted.path("a")).read_text().splitlines())) < journal._LONGEST_LINE / 4


@pytest.mark.parametrize("limit", ["_MOST_RANGES", "_MOST_BYTES"])
def test_what_is_noted_beyond_a_limit_is_not_known(limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Journal(str(tmp_path))
    noted.begin("a", "digest", 100)
    for number in range(9):
        noted.wrote("a", [(number, 1, 0)])
    monkeypatch.setattr(journal, limit, 3 if limit == "_MOST_RANGES" else 120)
    assert 0 < len(noted.read("a").wrote) < 9
    assert noted.read("a").digest == "digest"


@pytest.mark.parametrize("wrote", [[-1, 4, 0], [0, 0, 0], [0, 4, -1], [0, 4, 1 << 32], [1 << 63, 4, 0], [0, 4]])
def test_what_is_no_range_ends_a_journal(wrote: list[int], tmp_path: Path) -> None:
    noted = Journal(str(tmp_path))
    noted.begin("a", "digest", 100)
    noted.wrote("a", [(0, 1, 0)])
    with Path(noted.path("a")).open("a") as file:
        file.write(json.dumps({"wrote": [wrote]}) + "\n" + json.dumps({"ready": [1, 1]}) + "\n")
    record = noted.read("a")
    assert (record.wrote, record.ready) == ([(0, 1, 0)], None)


def test_what_is_verified_is_not_written_again(source: reshard.Checkpoint, tmp_path: Path, written: Written) -> None:
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "undisturbed")
    stopped(plan, tmp_path / "out")
    noted = Journal(str(tmp_path / "out"))
    good = {f"{tmp_path}/out/{file.path}": resume._spans(noted.read(file.path).wrote) for file in plan.files}
    assert sum(end - begin for spans in good.values() for begin, end in spans) > 1000
    written.ranges.clear()
    report = plan.run(tmp_path / "out")
    assert 1000 < report.resumed < plan.stats.bytes_written == report.resumed + report.bytes_written
    literals = {(f"{tmp_path}/out/{file.path}", offset) for file in plan.files for offset, _ in file.layout.literals}
    for path, begin, end in written.ranges:
        assert (path, begin) in literals or not resume._covers(good[path], begin, end)
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


@pytest.mark.parametrize("ownership", ["tensor", "file"])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_finished_file_that_was_removed_is_made_again(
    source: reshard.Checkpoint, tmp_path: Path, written: Written, ownership: str, missing: int
) -> None:
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "out", ownership=ownership)
    before = tree(tmp_path / "out")
    (tmp_path / "out" / plan.files[missing].path).unlink()
    written.ranges.clear()
    plan.run(tmp_path / "out", ownership=ownership)
    assert tree(tmp_path / "out") == before
    assert {path for path, _, _ in written.ranges} == {f"{tmp_path}/out/{plan.files[missing].path}"}


def test_files_in_order_are_gone_on_with_file_by_file(
    source: reshard.Checkpoint, tmp_path: Path, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reshard.ownership, "FILES_AT_ONCE", 1)
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "undisturbed")
    stopped(plan, tmp_path / "out", tasks=0, ownership="file")
    written.ranges.clear()
    report = plan.run(tmp_path / "out", ownership="file")
    assert 0 < report.resumed < plan.stats.bytes_written
    assert len({path for path, _, _ in written.ranges}) == 1
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


@pytest.mark.parametrize("first", ["tensor", "file"])
def test_ownership_may_change_between_runs(
    source: reshard.Checkpoint, tmp_path: Path, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reshard.ownership, "FILES_AT_ONCE", 1)
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "undisturbed")
    stopped(plan, tmp_path / "out", tasks=0 if first == "file" else 6, ownership=first)
    plan.run(tmp_path / "out", ownership="tensor" if first == "file" else "file")
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


def test_the_tasks_of_the_next_run_may_be_others(
    source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges of files are noted, not tasks: another budget of memory is no other plan."""
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "undisturbed")
    stopped(plan, tmp_path / "out")
    monkeypatch.setattr(planner, "TASK_BYTES", 700)
    monkeypatch.setattr(planner, "BAND_BYTES", 64)
    report = reshard.plan(source, TARGET).run(tmp_path / "out")
    assert report.resumed > 0
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


@pytest.mark.parametrize(
    "options",
    [
        {"link_replicas": True},
        {"files": reshard.MindSporeSet(2000), "format": "safetensors"},
        {"files": reshard.HuggingFaceSet(2000), "format": "safetensors"},
        {"format": "ckpt"},
        {"selection": reshard.Selection(cast={"float32": "bfloat16"})},
        {"remove_redundancy": True},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("how", [{}, {"drop_cache": True}, {"fsync": False}, {"fsync": False, "checksums": True}])
def test_every_kind_of_target_is_gone_on_with(
    source: reshard.Checkpoint, tmp_path: Path, options: dict[str, Any], how: dict[str, bool]
) -> None:
    replicated = Strategy.of({name: Layout.of([2, 2], [0] + [-1] * (a.ndim - 1)) for name, a in FULL.items()})
    target = None if "files" in options else replicated
    plan = reshard.plan(source, target, **options)
    plan.run(tmp_path / "undisturbed")
    stopped(plan, tmp_path / "out", **how)
    report = plan.run(tmp_path / "out", **how)
    assert (report.resumed > 0) == (how.get("checksums", how.get("fsync", True)))
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")
    again = plan.run(tmp_path / "out", **how)
    assert again.finished == len(plan.files)
    assert again.bytes_written == 0


@pytest.mark.parametrize("fsync", [True, False])
@pytest.mark.parametrize("named", [1, 2])
def test_a_run_that_fails_between_two_names_is_gone_on_with(
    source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool, named: int
) -> None:
    plan = reshard.plan(source, files=reshard.MindSporeSet(2000), format="safetensors")
    plan.run(tmp_path / "undisturbed")
    real, left = os.replace, iter(range(named))

    def replace(old: str, new: str) -> None:
        if next(left, None) is None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(TargetError, match="cannot be given its final name") as caught:
            plan.run(tmp_path / "out", fsync=fsync)
    assert "the same command goes on from there" in caught.value.__notes__[0]
    made = {name: content for name, content in tree(tmp_path / "out").items() if not name.endswith(PARTIAL)}
    assert len(made) == named
    assert made.items() <= tree(tmp_path / "undisturbed").items()
    report = plan.run(tmp_path / "out", fsync=fsync)
    assert report.finished == named
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


def test_checksums_are_of_what_is_there(source: reshard.Checkpoint, tmp_path: Path) -> None:
    plan = reshard.plan(source, TARGET)
    stopped(plan, tmp_path / "out")
    expected = {
        file.path: {
            name: crc32c(b"".join(content[offset : offset + nbytes] for offset, nbytes in runs))
            for name, runs in file.layout.places.items()
        }
        for file in plan.files
        for content in [plan_bytes(plan, tmp_path)[file.path]]
    }
    assert plan.run(tmp_path / "out").checksums == expected
    assert plan.run(tmp_path / "out").checksums == expected


def plan_bytes(plan: Plan, root: Path) -> dict[str, bytes]:
    plan.run(root / "undisturbed")
    return tree(root / "undisturbed")


def test_no_checksum_is_made_up(source: reshard.Checkpoint, tmp_path: Path) -> None:
    """A run without them finished the files; the next one has none to tell."""
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "out", checksums=False)
    assert plan.run(tmp_path / "out").checksums == {file.path: {} for file in plan.files}


@pytest.mark.parametrize(
    "wrote", [[(0, 4, 1)], [(0, 4, 1), (5, 3, 1)], [(4, 4, 1)], [(0, 9, 1)], [], [(0, 6, 1), (4, 4, 1)]]
)
def test_ranges_that_do_not_make_up_a_block(wrote: list[tuple[int, int, int]]) -> None:
    assert receipts.sum_of([(0, 8)], receipts.longest(wrote)) is None


def test_the_longest_ranges_make_up_a_block() -> None:
    content = bytes(range(20))
    wrote = [(b, n, crc32c(content[b : b + n])) for b, n in ((0, 3), (0, 5), (3, 4), (5, 5), (12, 8))]
    assert receipts.sum_of([(0, 10), (12, 8)], receipts.longest(wrote)) == crc32c(content[:10] + content[12:])


# --- what is there already ------------------------------------------------------------------------------------------


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="reshard")


@pytest.fixture
def command(source: reshard.Checkpoint, tmp_path: Path) -> list[str | Path]:
    reshard.write_strategy(SOURCE, tmp_path / "source.ckpt")
    reshard.write_strategy(TARGET, tmp_path / "target.ckpt")
    strategies: list[str | Path] = [
        "--source-strategy", tmp_path / "source.ckpt", "--target-strategy", tmp_path / "target.ckpt",
    ]  # fmt: skip
    return ["transform", tmp_path / "src", tmp_path / "out", *strategies]


def times(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in root.rglob("*.safetensors")}


def test_over_a_finished_target_nothing_is_left_to_do(command: list[str | Path], tmp_path: Path) -> None:
    assert call(*command).exit_code == 0
    before = times(tmp_path / "out")
    again = call(*command)
    assert again.exit_code == 0
    assert "nothing is left to do" in again.output
    assert call(*command, "--overwrite").exit_code == 0
    assert times(tmp_path / "out") == before
    assert call(*command, "--restart").exit_code == 0
    assert times(tmp_path / "out").keys() == before.keys()
    assert not times(tmp_path / "out").items() & before.items()


def test_a_changed_source_is_refused(command: list[str | Path], tmp_path: Path) -> None:
    assert call(*command).exit_code == 0
    full = {name: array + 1 for name, array in FULL.items()}
    write_ranks(tmp_path / "src", full, SOURCE)
    refused = call(*command)
    assert refused.exit_code == 6
    assert "or from sources that changed since; begin anew with --restart" in refused.output
    assert_rank_files(tmp_path / "out", FULL, TARGET)
    assert call(*command, "--restart").exit_code == 0
    assert_rank_files(tmp_path / "out", full, TARGET)


def test_a_source_that_was_touched_is_refused(source: reshard.Checkpoint, tmp_path: Path) -> None:
    plan = reshard.plan(source, TARGET)
    stopped(plan, tmp_path / "out")
    path = Path(source.files[0].path)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    plan = reshard.plan(reshard.open(tmp_path / "src", strategy=SOURCE), TARGET)
    with pytest.raises(TargetError, match="begin anew with --restart"):
        plan.run(tmp_path / "out")
    plan.run(tmp_path / "out", restart=True)
    assert_rank_files(tmp_path / "out", FULL, TARGET)


def test_a_changed_plan_is_refused(command: list[str | Path], tmp_path: Path) -> None:
    assert call(*command).exit_code == 0
    before = tree(tmp_path / "out")
    refused = call(*command, "--cast", "float32=float16")
    assert refused.exit_code == 6
    assert "were written by a run of another plan" in refused.output
    assert tree(tmp_path / "out") == before
    assert call(*command, "--cast", "float32=float16", "--restart").exit_code == 0
    assert tree(tmp_path / "out") != before


def test_a_begun_target_of_another_plan_is_refused(source: reshard.Checkpoint, tmp_path: Path) -> None:
    stopped(reshard.plan(source, TARGET), tmp_path / "out")
    other = reshard.plan(source, TARGET, selection=reshard.Selection(cast={"float32": "float64"}))
    with pytest.raises(TargetError, match="another plan"):
        other.run(tmp_path / "out")
    other.run(tmp_path / "out", restart=True)
    other.run(tmp_path / "undisturbed")
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


def test_somebody_elses_file_needs_overwrite(command: list[str | Path], tmp_path: Path) -> None:
    foreign = tmp_path / "out" / "rank_1" / "checkpoint_1.safetensors"
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"theirs")
    for more in ([], ["--restart"]):
        refused = call(*command, *more)
        assert refused.exit_code == 6
        assert "with --overwrite" in refused.output
        assert tree(tmp_path / "out") == {"rank_1/checkpoint_1.safetensors": b"theirs"}
    assert call(*command, "--overwrite").exit_code == 0
    assert_rank_files(tmp_path / "out", FULL, TARGET)


@pytest.mark.parametrize("link", [False, True])
def test_a_finished_file_that_was_changed_is_somebody_elses(
    source: reshard.Checkpoint, tmp_path: Path, link: bool
) -> None:
    target = Strategy.of({name: Layout.of([2], [-1] * array.ndim) for name, array in FULL.items()})
    plan = reshard.plan(source, target, link_replicas=True)
    plan.run(tmp_path / "out")
    path = tmp_path / "out" / plan.files[link].path
    path.unlink()
    path.write_bytes(b"edited")
    with pytest.raises(TargetError, match="with --overwrite"):
        plan.run(tmp_path / "out")
    assert path.read_bytes() == b"edited"


def test_a_restart_that_is_stopped_may_be_typed_again(source: reshard.Checkpoint, tmp_path: Path) -> None:
    """The files that it replaces are still those of the run before, and not somebody else's."""
    old = reshard.plan(source, TARGET, selection=reshard.Selection(cast={"float32": "float64"}))
    old.run(tmp_path / "out")
    plan = reshard.plan(source, TARGET)
    for tasks in (0, 6):
        stopped(plan, tmp_path / "out", tasks, restart=True)
        assert len(times(tmp_path / "out")) == 2
    report = plan.run(tmp_path / "out")
    assert report.resumed > 0
    assert_rank_files(tmp_path / "out", FULL, TARGET)


def test_other_ranks_may_be_written_into_the_same_target(source: reshard.Checkpoint, tmp_path: Path) -> None:
    for ranks in ([0], [1], [0, 1]):
        report = reshard.plan(source, TARGET, ranks=ranks).run(tmp_path / "out")
    assert report.finished == 2, "what other runs finished is as this one would make it"
    assert_rank_files(tmp_path / "out", FULL, TARGET)


# --- sources that change under a run --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["gone", "content"])
@pytest.mark.parametrize("ownership", ["tensor", "file"])
def test_a_source_that_changes_during_the_run(
    source: reshard.Checkpoint, tmp_path: Path, how: str, ownership: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, path, turns = LocalStore.write_at, Path(source.files[1].path), iter(range(20))

    def write_at(*arguments: Any) -> None:
        if next(turns, None) == 10:
            if how == "gone":
                path.unlink()
            else:
                path.write_bytes(bytes(path.stat().st_size))
                os.utime(path, ns=(0, 0))
        real(*arguments)

    monkeypatch.setattr(LocalStore, "write_at", write_at)
    with pytest.raises(ChangedError) as caught:
        reshard.plan(source, TARGET).run(tmp_path / "out", ownership=ownership, threads=1)
    assert str(path) in str(caught.value)
    assert tree(tmp_path / "out") == {}
    assert not list(tmp_path.glob("out/.reshard/*.jsonl"))


@pytest.mark.parametrize("ends", [True, False], ids=["finished", "stopped"])
def test_a_source_with_another_header_is_another(source: reshard.Checkpoint, tmp_path: Path, ends: bool) -> None:
    """Though it has the size and the time that it had: two tensors of as many bytes lie the other way round."""
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "out") if ends else stopped(plan, tmp_path / "out")
    before = tree(tmp_path / "out")
    path = Path(source.files[1].path)
    status, old = path.stat(), source.files[1].index.entries
    spans = {name: old[name].runs[0] for name in ("b", "c")}
    assert spans["b"][1] == spans["c"][1]
    content = path.read_bytes()
    start = int.from_bytes(content[:8], "little") + 8
    header = json.loads(content[8:start])
    header["b"]["data_offsets"], header["c"]["data_offsets"] = (header[name]["data_offsets"] for name in ("c", "b"))
    new = json.dumps(header, separators=(",", ":")).encode().ljust(start - 8)
    assert len(new) == start - 8
    path.write_bytes(content[:8] + new + content[start:])
    os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
    changed = reshard.plan(reshard.open(tmp_path / "src", strategy=SOURCE), TARGET)
    with pytest.raises(TargetError, match="from sources that changed since; begin anew with --restart"):
        changed.run(tmp_path / "out")
    assert tree(tmp_path / "out") == before
    changed.run(tmp_path / "out", restart=True)
    changed.run(tmp_path / "fresh")
    assert tree(tmp_path / "out") == tree(tmp_path / "fresh")


def test_a_header_that_is_shared_is_digested_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header has up to ten thousand tensors; those of ranks alike are one object."""
    replicas = Strategy.of({name: Layout.of([8], [-1] * array.ndim) for name, array in FULL.items()})
    source = reshard.open(write_ranks(tmp_path / "src", FULL, replicas), strategy=replicas)
    real, digested = fingerprint._entries_digest, []

    def entries_digest(entries: Any) -> str:
        digested.append(entries)
        return real(entries)

    monkeypatch.setattr(fingerprint, "_entries_digest", entries_digest)
    digests(reshard.plan(source, TARGET))
    assert len(digested) == 1
    assert len({*fingerprint.index_digests([source.files[0].index._replace(crc=crc) for crc in (1, 2, 3)])}) == 3
    assert len(digested) == 2


@pytest.mark.parametrize("ownership", ["tensor", "file"])
def test_nothing_is_kept_of_a_source_that_is_cut_short_during_the_run(
    source: reshard.Checkpoint, tmp_path: Path, ownership: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says is true: whole again, though of another time, the same command makes everything anew."""
    path = Path(source.files[1].path)
    content, real, turns = path.read_bytes(), LocalStore.write_at, iter(range(20))

    def write_at(*arguments: Any) -> None:
        if next(turns, None) == 10:
            os.truncate(path, len(content) // 4)
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "write_at", write_at)
        with pytest.raises(ReshardError) as caught:
            reshard.plan(source, TARGET).run(tmp_path / "out", ownership=ownership, threads=1)
    said = "; ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert str(path) in said
    assert "goes on from there" not in said
    assert said.endswith("start again")
    assert tree(tmp_path / "out") == {}
    path.write_bytes(content)
    again = reshard.plan(reshard.open(tmp_path / "src", strategy=SOURCE), TARGET).run(tmp_path / "out")
    assert again.resumed == 0
    assert_rank_files(tmp_path / "out", FULL, TARGET)


def test_finished_files_of_a_source_that_changes_are_told(
    source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier run made them: the next one is refused without an option, and the error of this one names it."""
    reshard.plan(source, TARGET, ranks=[0]).run(tmp_path / "out")
    path, real, turns = Path(source.files[1].path), LocalStore.write_at, iter(range(20))

    def write_at(*arguments: Any) -> None:
        if next(turns, None) == 4:
            os.utime(path, ns=(0, 0))
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "write_at", write_at)
        with pytest.raises(ChangedError) as caught:
            reshard.plan(source, TARGET).run(tmp_path / "out", threads=1)
    assert str(caught.value).endswith("start again")
    assert caught.value.__notes__ == ["with --restart, since files that were made of it before are there"]
    assert len(tree(tmp_path / "out")) == 1
    plan = reshard.plan(reshard.open(tmp_path / "src", strategy=SOURCE), TARGET)
    with pytest.raises(TargetError, match="begin anew with --restart"):
        plan.run(tmp_path / "out")
    plan.run(tmp_path / "out", restart=True)
    assert_rank_files(tmp_path / "out", FULL, TARGET)


def test_a_source_that_was_another_for_a_while(source: reshard.Checkpoint, tmp_path: Path) -> None:
    """It is as it was when the run has failed; but what was read meanwhile is not of it."""
    plan, path = reshard.plan(source, TARGET), Path(source.files[1].path)
    error = ChangedError(f"{path}: changed since it was opened; start again")
    stopped(plan, tmp_path / "out")
    session = resume.Session(plan, str(tmp_path / "out"), overwrite=False, restart=False, threads=1)
    assert session.resumed > 0
    session.failed(error, {})
    session.close()
    assert not hasattr(error, "__notes__")
    assert tree(tmp_path / "out") == {}
    assert plan.run(tmp_path / "out").resumed == 0


def test_a_source_out_of_reach_has_not_changed(
    source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system that is gone for a while: what is written is kept, and the same command goes on."""
    plan = reshard.plan(source, TARGET)
    real, gone = LocalStore.status, False

    def status(store: LocalStore, path: str) -> Status:
        if gone:
            raise SourceError(f"{path}: cannot be read: Stale file handle")
        return real(store, path)

    def away(event: Any) -> None:
        nonlocal gone
        gone = event.written == event.total

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "status", status)
        with pytest.raises(SourceError, match="Stale file handle") as caught:
            plan.run(tmp_path / "out", progress=away)
    assert not isinstance(caught.value, ChangedError)
    total = plan.stats.bytes_written
    (note,) = caught.value.__notes__
    assert note.startswith(f"{total} of {total} bytes are written and kept; the same command goes on from there")
    assert plan.run(tmp_path / "out").resumed == total
    plan.run(tmp_path / "undisturbed")
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


def test_a_source_cut_short_is_refused_afterwards(source: reshard.Checkpoint, tmp_path: Path) -> None:
    plan = reshard.plan(source, TARGET)
    stopped(plan, tmp_path / "out")
    path = Path(source.files[0].path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ReshardError):
        plan.run(tmp_path / "out")
    with pytest.raises(SourceError):
        reshard.open(tmp_path / "src", strategy=SOURCE)
    assert not times(tmp_path / "out")


# --- locks ----------------------------------------------------------------------------------------------------------


_HOLD = """
import sys
from reshard.journal import Journal
Journal(sys.argv[1]).lock(sys.argv[2:])
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_process(tmp_path: Path) -> Iterator[Callable[[list[str]], subprocess.Popen[str]]]:
    """Start a process that locks some files, until it is killed."""
    with ExitStack() as stack:

        def start(files: list[str]) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", _HOLD, tmp_path / "out", *files],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            stack.enter_context(process)
            assert process.stdout is not None
            assert process.stdout.readline() == "locked\n"
            return process

        yield start


def test_locks_of_another_process(
    source: reshard.Checkpoint, tmp_path: Path, other_process: Callable[[list[str]], subprocess.Popen[str]]
) -> None:
    paths = [file.path for file in reshard.plan(source, TARGET).files]
    process = other_process(paths[:1])
    with pytest.raises(TargetError, match=f"another run writes {paths[0]}; wait for its end"):
        reshard.plan(source, TARGET).run(tmp_path / "out")
    reshard.plan(source, TARGET, ranks=[1]).run(tmp_path / "out")
    assert tree(tmp_path / "out").keys() == {paths[1]}
    process.kill()
    process.wait()
    reshard.plan(source, TARGET, ranks=[0]).run(tmp_path / "out")
    assert_rank_files(tmp_path / "out", FULL, TARGET)


def test_two_runs_of_one_process(source: reshard.Checkpoint, tmp_path: Path) -> None:
    """One begins in the middle of the other: of the same files it is refused, of another rank's it succeeds."""
    plan = reshard.plan(source, TARGET, ranks=[0])
    other = reshard.plan(source, TARGET, ranks=[1])
    refused = []

    def progress(_: object) -> None:
        if not refused:
            with pytest.raises(TargetError, match="another run writes") as caught:
                reshard.plan(source, TARGET, ranks=[0]).run(tmp_path / "out")
            refused.append(caught.value)
            thread = threading.Thread(target=other.run, args=(tmp_path / "out",))
            thread.start()
            thread.join()

    plan.run(tmp_path / "out", progress=progress)
    assert refused
    assert_rank_files(tmp_path / "out", FULL, TARGET)


def test_locks_are_taken_while_others_remove_the_lock_file(tmp_path: Path) -> None:
    """The last one to give up its locks removes the file they are on, just when another opens it."""
    held = []
    failures = []

    def lock(number: int) -> None:
        for _ in range(100):
            one = Journal(str(tmp_path / "out"))
            try:
                one.lock([f"{number % 2}"])
            except TargetError:
                continue
            held.append(number % 2)
            if held.count(number % 2) > 1:
                failures.append(number)
            held.remove(number % 2)
            one.unlock()

    threads = [threading.Thread(target=lock, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# --- journals that lie ----------------------------------------------------------------------------------------------

LINES = [
    b"", b"\n\n", b"{", b"null\n", b"[]\n", b"\xff\xfe\n", b"{}\n" * 1000, b"[" * 100_000,
    b'{"reshard": 2, "digest": "DIGEST"}\n',
    b'{"reshard": 1}\n',
    b'{"reshard": 1, "digest": {"a": 1}}\n',
    b'{"reshard": 1, "digest": "DIGEST", "replaces": 3}\n',
    b'{"reshard": 1, "digest": "DIGEST"}\n{"wrote": [[0, 1e400, 0]]}\n',
    b'{"reshard": 1, "digest": "DIGEST"}\n{"wrote": [[1e400, 1, 0]]}\n{"ready": [NaN, 0]}\n',
    b'{"reshard": 1, "digest": "DIGEST"}\n{"wrote": [[-8, 16, 0], [0, 99999999999999999999, 0], [0, 0, 0]]}\n',
    b'{"reshard": 1, "digest": "DIGEST"}\n{"wrote": [[0, ' + b"9" * 5000 + b", 0]]}\n",
    b'{"reshard": 1, "digest": "DIGEST"}\n{"wrote": {"a": 1}}\n{"wrote": "abc"}\n',
    b'{"reshard": 1, "digest": "DIGEST"}\n{"wrote": [[0, SIZE, 1]]}\n',
    b'{"reshard": 1, "digest": "DIGEST"}\n{"ready": [SIZE, 0]}\n',
    b'{"reshard": 1, "digest": "DIGEST", "replaces": [SIZE, 0]}\n{"ready": [SIZE, 0]}\n{"ready": 7}\n',
]  # fmt: skip


@pytest.mark.parametrize("content", LINES, ids=lambda content: content[:60].decode("ascii", "replace"))
def test_a_journal_that_lies(source: reshard.Checkpoint, tmp_path: Path, content: bytes) -> None:
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "undisturbed")
    noted = Journal(str(tmp_path / "out"))
    for file, digest in zip(plan.files, digests(plan), strict=True):
        path = Path(noted.path(file.path))
        path.parent.mkdir(parents=True, exist_ok=True)
        size = str(file.layout.size).encode()
        path.write_bytes(content.replace(b"DIGEST", digest.encode()).replace(b"SIZE", size))
        partial = tmp_path / "out" / (file.path + PARTIAL)
        partial.parent.mkdir(exist_ok=True)
        partial.write_bytes(os.urandom(file.layout.size))
    if b'"reshard": 2' in content or b'"digest": {' in content:
        with pytest.raises(TargetError, match="begin anew with --restart"):
            plan.run(tmp_path / "out")
        plan.run(tmp_path / "out", restart=True)
    plan.run(tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


@pytest.mark.parametrize("kind", ["symlink", "hard link", "fifo", "directory"])
@pytest.mark.parametrize("place", ["journal", "partial", "lock", "the directory"])
def test_other_things_in_the_place_of_files(source: reshard.Checkpoint, tmp_path: Path, kind: str, place: str) -> None:
    """Nothing is written through them; the run succeeds, or says in a sentence what is in its way."""
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "undisturbed")
    stopped(plan, tmp_path / "out")
    file = plan.files[0].path
    path = {
        "journal": Path(Journal(str(tmp_path / "out")).path(file)),
        "partial": tmp_path / "out" / (file + PARTIAL),
        "lock": tmp_path / "out" / DIRECTORY / "lock",
        "the directory": tmp_path / "out" / DIRECTORY,
    }[place]
    outside = tmp_path / "outside"
    path.rename(outside)
    before = tree(outside) if outside.is_dir() else outside.read_bytes()
    if kind == "symlink":
        path.symlink_to(outside)
    elif kind == "hard link" and outside.is_file():
        path.hardlink_to(outside)
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    said = ""
    try:
        plan.run(tmp_path / "out")
    except TargetError as error:
        said = str(error)
    assert said == "" or (str(path.parent) in said and "\n" not in said)
    assert said != "" or tree(tmp_path / "out") == tree(tmp_path / "undisturbed")
    assert (tree(outside) if outside.is_dir() else outside.read_bytes()) == before


# --- room -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the disk have so much room."""

    def set_to(nbytes: int) -> None:
        real = os.statvfs("/")
        fake = os.statvfs_result((1, 1, *real[2:4], nbytes, *real[5:]))
        monkeypatch.setattr(os, "statvfs", lambda _: fake)

    return set_to


def test_room_is_looked_for_before_the_first_byte(
    source: reshard.Checkpoint, tmp_path: Path, room: Callable[[int], None], written: Written
) -> None:
    plan = reshard.plan(source, TARGET)
    room(plan.stats.target_bytes - 1)
    with pytest.raises(BudgetError, match=f"take {plan.stats.target_bytes} bytes more") as caught:
        plan.run(tmp_path / "deep" / "out")
    assert caught.value.exit_code == 5
    assert not written.ranges
    assert not (tmp_path / "deep" / "out").exists()
    room(plan.stats.target_bytes)
    plan.run(tmp_path / "deep" / "out")


@pytest.mark.parametrize("fsync", [True, False])
def test_what_an_earlier_run_took_counts(
    source: reshard.Checkpoint, tmp_path: Path, room: Callable[[int], None], fsync: bool
) -> None:
    """Unfinished files have all their space: gone on with or made anew, they need no more of it."""
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "undisturbed")
    for file in plan.files:
        (tmp_path / "out" / file.path).parent.mkdir(parents=True)
        (tmp_path / "out" / (file.path + PARTIAL)).write_bytes(bytes(file.layout.size))
    room(0)
    plan.run(tmp_path / "out", fsync=fsync)
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


def test_a_full_disk_keeps_what_was_written(
    source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And when it is full still at the next run, that loses nothing either."""
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "undisturbed")
    stopped(plan, tmp_path / "out")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(BudgetError, match="no room") as caught:
            plan.run(tmp_path / "out")
    assert "bytes are written and kept" in caught.value.__notes__[0]
    assert plan.run(tmp_path / "out").resumed > 0
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


def test_a_journal_that_cannot_be_written_is_a_full_disk(
    source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write

    def write(descriptor: int, content: bytes) -> int:
        if b'"ready"' in content:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, content[: max(1, len(content) // 2)])  # and comes short

    plan = reshard.plan(source, TARGET)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(BudgetError, match=r"\.jsonl: no room"):
            plan.run(tmp_path / "out")
    assert not times(tmp_path / "out")
    assert plan.run(tmp_path / "out").resumed == plan.stats.bytes_written
    assert_rank_files(tmp_path / "out", FULL, TARGET)


# --- signals --------------------------------------------------------------------------------------------------------

_SIGNALLED = """
import os, sys
from reshard import planner, resume
from reshard.store import LocalStore
planner.TASK_BYTES, planner.BAND_BYTES, resume.FLUSH_SECONDS = 512, 256, 0
original, count = getattr(LocalStore, sys.argv[2]), iter(range(10**6))
def method(*arguments, **options):
    if next(count) == int(sys.argv[3]):
        os.kill(os.getpid(), int(sys.argv[1]))
    return original(*arguments, **options)
setattr(LocalStore, sys.argv[2], method)
from reshard.cli import main
main(sys.argv[4:])
"""


@pytest.mark.parametrize(
    ("number", "code", "operation", "at"),
    [(signal.SIGTERM, 143, "write_at", 14), (signal.SIGINT, 130, "commit", 0)],
)
def test_a_stopped_run_says_how_far_it_is(
    command: list[str | Path], tmp_path: Path, number: int, code: int, operation: str, at: int
) -> None:
    total = reshard.plan(reshard.open(tmp_path / "src", strategy=SOURCE), TARGET).stats.bytes_written
    ended = subprocess.run(
        [sys.executable, "-c", _SIGNALLED, str(number), operation, str(at), *map(str, command), "--threads", "1"],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == code
    begin, bytes_kept, rest = ended.stderr.replace(" of ", "; ", 1).split("; ", 2)
    assert begin in {"stopped by SIGTERM", "interrupted"}
    assert 0 < int(bytes_kept) <= total
    assert rest == (
        f"{total} bytes are written and kept; the same command goes on from there (with --restart from the beginning)\n"
    )
    done = call(*command)
    assert done.exit_code == 0
    assert_rank_files(tmp_path / "out", FULL, TARGET)


def test_journals_have_names_of_their_own(tmp_path: Path) -> None:
    noted = Journal(str(tmp_path))
    files = ["a/b", "a%2Fb", "a b", "x" * 250, "x" * 251, "ω/\udc80", "../a", ".reshard/lock"]
    paths = {noted.path(file) for file in files}
    assert len(paths) == len(files)
    assert {Path(path).parent for path in paths} == {tmp_path / DIRECTORY}
    for file in files:
        noted.begin(file, file.encode("utf-8", "surrogateescape").hex(), 1)
        noted.wrote(file, [(0, 1, 2)])
    for file in files:
        assert noted.read(file).digest == file.encode("utf-8", "surrogateescape").hex()
        assert noted.read(file).wrote == [(0, 1, 2)]


def test_a_journal_travels_without_its_locks(tmp_path: Path) -> None:
    import pickle

    one = Journal(str(tmp_path / "out"))
    one.lock(["a"])
    pickle.loads(pickle.dumps(one)).unlock()  # noqa: S301 -- our own
    with pytest.raises(TargetError, match="another run"):
        Journal(str(tmp_path / "out")).lock(["a"])
    one.unlock()
    assert not (tmp_path / "out").exists()
