"""Faults on purpose: many runs of the real command, each with one fault, and then the same command again.

Whatever the fault: no file has a final name that is not what an undisturbed run writes, every error is one sentence
with its exit code, and the same command, typed again, ends with the bytes of an undisturbed run.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import numbers, plan_with, tree, write_ranks
from commands import heed_signals
from injected import change
from safetensors.numpy import save_file

import reshard
from reshard import Layout, Strategy
from reshard.core.plan import budget
from reshard.core.storage.base import PARTIAL
from reshard.errors import BudgetError
from reshard.formats.dcp.names import DCP
from reshard.formats.sets.options import HuggingFaceSet
from reshard.formats.zarr.layout import ZarrGroup
from reshard.strategy.files import write_strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reshard.core.run.run import Progress


pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WRAPPER = Path(__file__).with_name("injected.py")
SEEDS = 8  # of each kind of fault

FULL = numbers({"net.w": (48, 32), "net.b": (96,), "net.v": (24, 8, 4)})
SOURCE = Strategy.of({
    "net.w": Layout.of([4], [0, -1]), "net.b": Layout.of([4], [-1]), "net.v": Layout.of([2, 2], [1, 0, -1])
})  # fmt: skip
TARGETS = {
    "rows": Strategy.of({
        "net.w": Layout.of([2], [0, -1]), "net.b": Layout.of([2], [0]), "net.v": Layout.of([2], [0, -1, -1])
    }),
    "columns": Strategy.of({
        "net.w": Layout.of([3], [-1, -1], -1), "net.b": Layout.of([3], [0]), "net.v": Layout.of([3], [0, -1, -1])
    }),
    "replicas": Strategy.of({
        "net.w": Layout.of([2, 2], [-1, 0]), "net.b": Layout.of([2, 2], [-1]), "net.v": Layout.of([2, 2], [0, -1, -1])
    }),
}  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    """A command, but for its paths, and the options that only its first run gets."""

    name: str
    source: str
    words: tuple[str, ...]
    is_by_file: bool = False
    before: str = ""  # what is in the target before: `foreign` files, or those of `another` plan

    @property
    def keeps_ranks(self) -> bool:
        """Each rank keeps its blocks, so that no strategy is given, and fewer ranks are a checkpoint, too."""
        return "--same-ranks" in self.words

    def __str__(self) -> str:
        return self.name


def to(target: str, *words: str) -> tuple[str, ...]:
    return (f"--target-strategy={target}.ckpt", *words)


SCENARIOS = [
    Scenario("rows", "safetensors", to("rows")),
    Scenario("columns", "ckpt", to("columns")),
    Scenario("to ckpt", "safetensors", to("columns", "--to=ckpt", "--tune=drop-cache=yes")),
    Scenario("by file", "ckpt", to("columns", "--to=safetensors"), is_by_file=True),
    Scenario("stored once", "safetensors", to("replicas", "--remove-redundancy", "--threads=1")),
    Scenario("no fsync", "safetensors", to("rows", "--tune=fsync=no")),
    Scenario("no fsync, by file", "safetensors", to("rows", "--tune=fsync=no"), is_by_file=True),
    Scenario("set", "safetensors", ("--to=mindspore", "--max-shard-size=4kB")),
    Scenario("set, cast", "ckpt", ("--to=hf", "--max-shard-size=3kB", "--cast=float32=bfloat16")),
    Scenario("same ranks", "ckpt", ("--same-ranks", "--to=safetensors")),
    Scenario("overwrite", "safetensors", to("rows", "--overwrite"), before="foreign"),
    Scenario("restart", "safetensors", to("rows", "--restart"), before="another"),
    Scenario("synchronous", "ckpt", to("columns", "--cluster=synchronous")),
]


@dataclass
class Ended:
    """How a command ended, and what it did."""

    code: int
    said: str
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def last(self) -> str:
        return self.said.splitlines()[-1]


@dataclass
class World:
    """Sources and undisturbed results."""

    root: Path
    undisturbed: dict[str, dict[str, bytes]] = field(default_factory=dict)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)

    def words(self, scenario: Scenario, source: Path, target: Path, *more: str) -> list[str]:
        strategy = [f"--source-strategy={self.root / 'source.ckpt'}"] if not scenario.keeps_ranks else []
        given = [
            word.replace("--target-strategy=", f"--target-strategy={self.root}/") for word in (*scenario.words, *more)
        ]
        how = ["by-file"] if scenario.is_by_file else []
        return [*how, "convert", str(source), str(target), *strategy, *given]

    def run(self, fault: dict[str, Any], words: list[str], note: Path) -> Ended:
        note.unlink(missing_ok=True)
        done = subprocess.run(
            [sys.executable, WRAPPER, json.dumps({**fault, "note": str(note)}), *words],
            check=False, capture_output=True, text=True, timeout=120, preexec_fn=heed_signals,
        )  # fmt: skip
        counts = json.loads(note.read_text()) if note.exists() else {}
        said = "\n".join(
            line
            for line in done.stderr.splitlines()
            if not line.startswith(("warning: ", "format: ", "nothing says how "))
        )
        return Ended(done.returncode, said, counts)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("faults"))
    for name, strategy in {"source": SOURCE, **TARGETS}.items():
        write_strategy(strategy, world.root / f"{name}.ckpt")
    for format in ("safetensors", "ckpt"):
        write_ranks(world.root / format, FULL, SOURCE, format, also=numbers({"step": (1,)}, "int64"))
    for scenario in SCENARIOS:
        target = world.root / "undisturbed" / scenario.name
        made = world.run({}, world.words(scenario, world.root / scenario.source, target), world.root / "note")
        assert made.code == 0, made.said
        world.undisturbed[scenario.name] = tree(target)
        world.counts[scenario.name] = made.counts
    return world


@dataclass
class Trial:
    """A target that a fault happens to: with a source of its own, which may be changed."""

    world: World
    scenario: Scenario
    root: Path
    random: random.Random
    foreign: dict[str, bytes] = field(default_factory=dict)  # what else may have a final name
    fresh: dict[str, bytes] = field(default_factory=dict)  # what is made of the source after its change
    may_need: tuple[str, ...] = ()  # options that the next run may be told to add
    snapshot: dict[Path, bytes] = field(default_factory=dict)  # files that no run may change

    def __post_init__(self) -> None:
        shutil.copytree(self.world.root / self.scenario.source, self.source)  # with times
        self.expected = self.world.undisturbed[self.scenario.name]
        if self.scenario.before == "foreign":
            for name in self.random.sample(sorted(self.expected), 1):
                (self.target / name).parent.mkdir(parents=True)
                (self.target / name).write_bytes(b"somebody else's")
        elif self.scenario.before == "another":
            another = self.world.words(self.scenario, self.source, self.target, "--cast=float32=float16")
            assert self.world.run({}, another, self.root / "note").code == 0
        self.foreign = tree(self.target)

    @property
    def source(self) -> Path:
        return self.root / "source"

    @property
    def target(self) -> Path:
        return self.root / "target"

    @property
    def counts(self) -> dict[str, int]:
        return self.world.counts[self.scenario.name]

    def a_source_file(self) -> Path:
        return self.random.choice(sorted(path for path in self.source.rglob("*") if path.is_file()))

    def run(self, fault: dict[str, Any] | None = None, *more: str) -> Ended:
        words = self.world.words(self.scenario, self.source, self.target, *more)
        ended = self.world.run(fault or {}, words, self.root / "note")
        self.check(ended)
        return ended

    def check(self, ended: Ended) -> None:
        """Nothing wrong under a final name; one sentence; the exit code that goes with it."""
        if ended.code == 0:
            assert ended.said == ""
        elif ended.code != -signal.SIGKILL:
            assert len(re.findall(r"^(?:error: |interrupted|stopped by )", ended.said, re.MULTILINE)) == 1, ended.said
            begin = {130: "interrupted", 143: "stopped by SIGTERM"}.get(ended.code, "error: ")
            assert ended.said.startswith(begin), (ended.code, ended.said)
            assert ended.code in {4, 5, 6, 130, 143}, (ended.code, ended.said)
            assert "unexpected" not in ended.said
        for name, content in tree(self.target).items():
            if not name.endswith(PARTIAL):
                right = [some[name] for some in (self.expected, self.fresh, self.foreign) if name in some]
                assert content in right, f"{name} is wrong"

    def end(self) -> tuple[int, bool]:
        """Type the same command until it is done, adding what it says; return the bytes written, and if it did."""
        more: list[str] = []
        while (ended := self.run({}, *more)).code:
            (advice,) = re.findall(r"(?:with|pass) (--restart|--overwrite)\b", ended.said)
            assert advice in self.may_need, ended.said
            assert advice not in more, ended.said
            more.append(advice)
        assert tree(self.target) == self.expected
        assert {path: path.read_bytes() for path in self.snapshot} == self.snapshot
        return ended.counts.get("bytes", 0), bool(more)


def operation_of(trial: Trial, *names: str) -> tuple[str, int]:
    """Choose one of the operations of a run."""
    name = trial.random.choice([name for name in names if trial.counts.get(name)] or [names[0]])
    return name, late(trial, max(trial.counts.get(name, 0), 1))


def late(trial: Trial, count: int) -> int:
    """Choose one of so many, rather a later one: the first ones only read headers."""
    return max(trial.random.randrange(count) for _ in range(2))


def any_moment(trial: Trial) -> dict[str, Any]:
    return {"operation": "any", "at": late(trial, sum(trial.counts.values()) - trial.counts["bytes"])}


def killed(trial: Trial) -> Ended:
    ended = trial.run({"kind": "kill", **any_moment(trial)})
    assert ended.code in {-signal.SIGKILL, 0}
    return ended


def signalled(number: int, trial: Trial) -> Ended:
    ended = trial.run({"kind": "signal", "signal": number, **any_moment(trial)})
    assert ended.code in {128 + number, 0}
    if ended.code and "the same command" not in ended.said:  # before the run took its files
        assert ended.said in {"interrupted; nothing was written", "stopped by SIGTERM; nothing was written"}
        assert ended.counts.get("bytes", 0) == 0
    return ended


def fails(code: int, exits: set[int], names: tuple[str, ...], trial: Trial) -> Ended:
    name, at = operation_of(trial, *names)
    ended = trial.run({"kind": "fails", "operation": name, "at": at, "errno": code})
    assert ended.code in exits, ended.said
    return ended


def short(name: str, trial: Trial) -> Ended:
    """Less is done than asked for: the store asks for the rest."""
    name, at = operation_of(trial, name)
    ended = trial.run({"kind": "short", "operation": name, "at": at})
    assert ended.code == 0
    return ended


def ends(trial: Trial) -> Ended:
    name, at = operation_of(trial, "preadv")
    ended = trial.run({"kind": "ends", "operation": name, "at": at})
    assert ended.code == 4
    return ended


def source_changes(how: str, trial: Trial) -> Ended:
    """Then it is put back, or the run is made again of what it is now."""
    path = trial.a_source_file()
    kept = trial.root / "kept"
    shutil.copy2(path, kept)
    goes_on = how not in {"cut", "remove"}
    if goes_on:
        change(path, how)
        words = trial.world.words(trial.scenario, trial.source, trial.root / "fresh")
        assert trial.world.run({}, words, trial.root / "note").code == 0
        trial.fresh = tree(trial.root / "fresh")
        path.unlink()
        shutil.copy2(kept, path)
    ended = trial.run({"kind": "change", "change": how, "path": str(path), **any_moment(trial)})
    # What is left of a run that fails is not a hindrance, unless it says so.
    trial.may_need = ("--restart",) if not ended.code or re.search("(with|pass) --restart", ended.said) else ()
    if ended.code == 0:  # too late, when names were given; or in time, before it was opened
        assert tree(trial.target) in (trial.expected, trial.fresh)
    else:
        assert ended.code in {4, 6}, ended.said
    if goes_on and trial.random.random() < 0.5:
        trial.expected, trial.fresh = trial.fresh, trial.expected
        return ended
    if not goes_on and not trial.scenario.keeps_ranks:
        assert trial.run().code in {4, 6}
    shutil.copy2(kept, path)
    return ended


def rank_removed(trial: Trial) -> Ended:
    """Between two runs: refused by name, and resumed when it is back."""
    killed(trial)
    path = trial.a_source_file().parent
    away = trial.root / "away"
    path.rename(away)
    ended = trial.run()
    assert ended.code == 4 or trial.scenario.keeps_ranks, ended.said
    if ended.code == 0:  # a conversion of fewer ranks is one as well
        assert {name for name in tree(trial.target) if not name.endswith(PARTIAL)} <= trial.expected.keys()
    away.rename(path)
    return ended


def between(spoil: Callable[[Trial], None], trial: Trial) -> Ended:
    ended = trial.run({"kind": trial.random.choice(["kill", "signal"]), "signal": signal.SIGTERM, **any_moment(trial)})
    spoil(trial)
    return ended


def some_file(trial: Trial, pattern: str) -> Path | None:
    found = sorted(path for path in trial.target.rglob(pattern) if path.is_file())
    return trial.random.choice(found) if found else None


def ledger_cut(trial: Trial) -> None:
    path = some_file(trial, ".reshard/*.jsonl")
    if path:
        os.truncate(path, late(trial, path.stat().st_size + 1))
    trial.may_need = ("--overwrite",)


def ledger_gone(trial: Trial) -> None:
    shutil.rmtree(trial.target / ".reshard", ignore_errors=True)
    trial.may_need = ("--overwrite",)


def partial_spoiled(trial: Trial) -> None:
    for path in trial.target.rglob(f"*{PARTIAL}"):
        if not path.stat().st_size:
            continue
        if trial.random.random() < 0.2:
            os.truncate(path, trial.random.randrange(path.stat().st_size))
            continue
        with path.open("r+b") as file:
            for _ in range(3):
                file.seek(trial.random.randrange(path.stat().st_size))
                file.write(trial.random.randbytes(1))


def partial_shared(trial: Trial) -> None:
    """As `cp -al` leaves it: each file has a second name, and must not be written into."""
    for path in trial.target.rglob("*"):
        if path.is_file():
            name = trial.root / f"snapshot-{path.stat().st_ino}"
            if not name.exists():
                name.hardlink_to(path)
            trial.snapshot[name] = path.read_bytes()


FAULTS: dict[str, Any] = {
    "SIGKILL": killed,
    "SIGTERM": partial(signalled, signal.SIGTERM),
    "SIGINT": partial(signalled, signal.SIGINT),
    "disk full": partial(fails, errno.ENOSPC, {5}, ("pwrite",)),
    "no room for a file": partial(fails, errno.ENOSPC, {0, 5}, ("posix_fallocate",)),  # 0: none for the log alone
    "ledger cannot be written": partial(fails, errno.ENOSPC, {5}, ("write",)),
    "read fails": partial(fails, errno.EIO, {4}, ("preadv",)),
    "read ends early": ends,
    "read comes short": partial(short, "preadv"),
    "write comes short": partial(short, "pwrite"),
    "ledger comes short": partial(short, "write"),
    "write fails": partial(fails, errno.EIO, {6}, ("pwrite",)),
    "fsync fails": partial(fails, errno.EIO, {0, 6}, ("fsync",)),
    "rename fails": partial(fails, errno.EIO, {6}, ("replace",)),
    "link fails": partial(fails, errno.EMLINK, {0, 6}, ("link", "replace")),
    "source changed": partial(source_changes, "content"),
    "source touched": partial(source_changes, "touch"),
    "source truncated": partial(source_changes, "cut"),
    "source removed": partial(source_changes, "remove"),
    "source replaced": partial(source_changes, "replace"),
    "rank removed": rank_removed,
    "ledger truncated": partial(between, ledger_cut),
    "ledger deleted": partial(between, ledger_gone),
    "unfinished file spoiled": partial(between, partial_spoiled),
    "unfinished file has another name": partial(between, partial_shared),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_faults(world: World, kind: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    def one(seed: int) -> tuple[bool, bool, bool]:
        chosen = random.Random(f"{kind} {seed}")  # noqa: S311
        scenario = SCENARIOS[(seed + list(FAULTS).index(kind)) % len(SCENARIOS)]
        trial = Trial(world, scenario, tmp_path / str(seed), chosen)
        try:
            ended = FAULTS[kind](trial)
            written, restarted = trial.end()
        except AssertionError as error:
            error.add_note(f"{kind}, seed {seed}, {scenario}")
            raise
        shutil.rmtree(trial.root)
        return ended.code != 0, ended.code != 0 and written < trial.counts["bytes"], restarted

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(one, range(SEEDS)))
    record_property("faults", (kind, SEEDS, *(sum(result[place] for result in results) for place in range(3))))


LIES: dict[str, dict[str, bool]] = {
    "disk too small": {},
    "disk too small, seems large": {"statvfs": True},  # as quotas do
    "disk too small, space not taken before": {"statvfs": True, "fallocate": False},
}


def mount(*words: str) -> None:
    done = subprocess.run(["mount", "-t", "tmpfs", *words], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no small tmpfs can be mounted here: {done.stderr.strip()}")


@pytest.mark.parametrize("kind", LIES)
def test_small_disks(world: World, kind: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    stopped = resumed = 0
    sizes = [8, 16, 20, 24]  # kB; the target takes 16, and its ledgers a page each
    for size in sizes:
        trial = Trial(world, SCENARIOS[0], tmp_path / f"{size}", random.Random(size))  # noqa: S311
        trial.target.mkdir()
        mount("-o", f"size={size}k", "tmpfs", str(trial.target))
        try:
            ended = trial.run(LIES[kind])
            assert ended.code in {0, 5}, ended.said
            assert ended.code == 5 or size > 16
            mount("-o", "remount,size=1m", "tmpfs", str(trial.target))
            written, _ = trial.end()
        finally:
            subprocess.run(["umount", "--lazy", trial.target], check=True)
        stopped += ended.code != 0
        resumed += ended.code != 0 and written < trial.counts["bytes"]
    record_property("faults", (kind, len(sizes), stopped, resumed, 0))


def test_a_worker_is_killed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """Its tasks run again on the other one, or on the one that is started in its place."""
    from distributed import Client, LocalCluster

    monkeypatch.setattr(budget, "TASK_BYTES", 1024)
    monkeypatch.setattr(budget, "BAND_BYTES", 512)
    source = reshard.open(world.root / "safetensors", strategy=SOURCE)
    plan = reshard.plan(source, TARGETS["columns"])
    moments = [1, 4, 9]
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        for moment in moments:
            client.wait_for_workers(2)
            told = []

            def kill(state: Progress, told: list[object] = told, moment: int = moment) -> None:
                told.append(state)
                if len(told) == moment:
                    os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)

            plan.run(tmp_path / f"{moment}", client=client, progress=kill)
            assert len(told) > moment, "it was killed in the middle"
            plan.run(tmp_path / "undisturbed")
            assert tree(tmp_path / f"{moment}") == tree(tmp_path / "undisturbed")
    record_property("faults", ("worker killed", len(moments), 0, 0, 0))


def test_a_command_on_a_cluster_is_stopped(
    world: World, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    scenario = Scenario("rows", "safetensors", to("rows", "--cluster=local:2", "--quiet"))
    resumed = 0
    faults = [{"kind": "kill"}, {"kind": "signal", "signal": signal.SIGTERM}]
    for number, fault in enumerate(faults):
        trial = Trial(world, scenario, tmp_path / f"{number}", random.Random(number))  # noqa: S311
        ended = trial.run({**fault, "operation": "write", "at": 5})  # receipts are noted by then
        assert ended.code in {-signal.SIGKILL, 143}, ended.said
        again = trial.run()
        assert again.code == 0
        resumed += again.counts["write"] < world.counts["rows"]["write"]
        assert tree(trial.target) == trial.expected
    record_property("faults", ("command on a cluster stopped", len(faults), len(faults), resumed, 0))


LAYERS = {f"layers.{number}.weight": np.full((64, 64), number, np.float32) for number in range(300)}

WRITTEN: dict[str, Callable[[], Any]] = {
    "small files": lambda: HuggingFaceSet(max_shard_size=200_000),
    "one file": lambda: HuggingFaceSet(max_shard_size=10**9),
    "dcp": DCP,
    "zarr": ZarrGroup,
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    mount("-o", "size=12m", "tmpfs", str(path))
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass


@pytest.mark.parametrize("allocates", [True, False])
@pytest.mark.parametrize("written", WRITTEN)
def test_what_is_written_is_kept(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, allocates: bool
) -> None:
    """The log of a first run had no room, so that all was lost; or a run whose files had room failed for its log."""
    monkeypatch.setattr(budget, "TASK_BYTES", 100_000)
    real, target = os.posix_fallocate, disk / "out"

    def allocate(descriptor: int, offset: int, size: int) -> None:
        if not allocates and ".jsonl" not in os.readlink(f"/proc/self/fd/{descriptor}"):  # noqa: PTH115
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        real(descriptor, offset, size)

    def progress(event: reshard.Progress) -> None:
        if event.written > event.total / 2 and not (disk / "filler").exists():
            fill(disk / "filler")

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    (tmp_path / "src").mkdir()
    save_file(LAYERS, tmp_path / "src" / "model.safetensors")
    plan = plan_with(reshard.open(tmp_path / "src"), files=WRITTEN[written]())
    if allocates:
        assert plan.run(target, progress=progress, threads=1).resumed == 0
    else:
        with pytest.raises(BudgetError):
            plan.run(target, progress=progress, threads=1)
    (disk / "filler").unlink()
    assert plan.run(target).resumed >= plan.stats.bytes_written / 2
    again = reshard.open(target)
    assert set(again) == set(LAYERS)
    for name, array in LAYERS.items():
        assert np.array_equal(again[name].compute(), array)
