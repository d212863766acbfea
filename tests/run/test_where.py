"""Where tasks run: the current client, a cluster, dask's words and configuration; the report says where it was."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import dask.threaded
import numpy as np
import pytest
from checkpoints import numbers, tree, write_ranks
from clusters import cluster
from commands import call, done
from refusals import failed, refused

import reshard
from reshard import Layout, Strategy
from reshard.core.run import executor
from reshard.errors import ReshardError, SourceError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from clusters import Cluster

distributed = pytest.importorskip("distributed")

SHAPES = {f"layers.{i}.w": (48, 36) for i in range(4)}
FULL = numbers(SHAPES)
BEFORE, AFTER = (Strategy.of({name: Layout.of([n], [0, -1]) for name in SHAPES}) for n in (4, 3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("where")
    write_ranks(folder / "src", FULL, BEFORE)
    reshard.write_strategy(BEFORE, folder / "before.ckpt")
    reshard.write_strategy(AFTER, folder / "after.ckpt")
    return folder


@pytest.fixture(scope="module")
def made(folder: Path) -> reshard.Plan:
    return reshard.plan(reshard.open(folder / "src", strategy=BEFORE), AFTER)


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Cluster]:
    with cluster(folder, 1) as running:
        yield running


def local_cluster() -> Any:
    return distributed.LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0")


@pytest.fixture
def current() -> Iterator[Any]:
    """The current client, of a worker in this process."""
    with local_cluster() as cluster, distributed.Client(cluster) as client:
        yield client


def address(client: Any) -> str:
    return str(client.scheduler.address)


def test_the_current_client(made: reshard.Plan, tmp_path: Path, current: Any) -> None:
    assert made.run(tmp_path / "a").ran_on == f"cluster {address(current)} (1 worker, 1 thread)"
    assert made.run(tmp_path / "b", client="threads").ran_on.endswith("threads")
    assert made.run(tmp_path / "c", client="dask.distributed").ran_on.startswith(f"cluster {address(current)}")
    with dask.config.set(scheduler="sync"):
        assert made.run(tmp_path / "d").ran_on == "the calling thread"
    with local_cluster() as other, distributed.Client(other, set_as_default=False) as client:
        with client.as_current():
            assert address(client) in made.run(tmp_path / "e").ran_on
        assert address(current) in made.run(tmp_path / "f").ran_on
    assert all(tree(tmp_path / name) == tree(tmp_path / "a") for name in "bcdef")


def test_arrays_whose_chunks_a_cluster_holds(tmp_path: Path, current: Any) -> None:
    full = np.arange(64, dtype=np.float32).reshape(8, 8)
    array = da.from_array(full, chunks=(3, 5)).persist(scheduler=current)
    strategy = Strategy.of({"w": Layout.of([2], [0, -1])})
    for name, client in (("a", None), ("b", "threads"), ("c", "sync")):
        reshard.write({"w": array, "v": array.T + 1}, tmp_path / name, client=client)
        written = reshard.open(tmp_path / name)
        assert np.array_equal(written["w"].compute(), full), name
        assert np.array_equal(written["v"].compute(), full.T + 1), name
    source = reshard.open(tmp_path / "a").sel("w").assign(w=array)
    plan = reshard.plan(source, strategy, to="safetensors")
    current.compute(plan.graph(tmp_path / "graph")).result()
    assert np.array_equal(reshard.open(tmp_path / "graph", strategy=strategy)["w"].compute(), full)
    assert source.stats(client="threads")["w"].max == 63
    with refused(SourceError, "array-not-here", "'w'"):
        source.stats()


def run_in_a_task(plan: reshard.Plan, out: str, *, as_worker_client: bool) -> str:
    """In a task of a worker: run a plan."""
    if as_worker_client:
        with distributed.worker_client():
            return plan.run(out).ran_on
    return plan.run(out).ran_on


@pytest.mark.parametrize("as_worker_client", [False, True])
def test_a_run_inside_a_task(made: reshard.Plan, tmp_path: Path, running: Cluster, as_worker_client: bool) -> None:
    """The worker has one thread, which the tasks of the run need."""
    with distributed.Client(running.address, set_as_default=False) as client:
        future = client.submit(run_in_a_task, made, str(tmp_path / "out"), as_worker_client=as_worker_client)
        assert future.result(timeout=60) == f"cluster {running.address} (1 worker, 1 thread)"
    made.run(tmp_path / "expected", client="threads")
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


@pytest.mark.parametrize("what", ["cluster", "address", "host and port", "file", "path", "client"])
def test_a_cluster_by_what_names_it(made: reshard.Plan, tmp_path: Path, running: Cluster, what: str) -> None:
    if what == "cluster":
        with local_cluster() as local:
            assert made.run(tmp_path / "out", client=local).ran_on.startswith(f"cluster {local.scheduler_address}")
            assert local.status.name == "running"  # it is the caller's
        return
    with distributed.Client(running.address, set_as_default=False) as client:
        names: dict[str, Any] = {
            "address": running.address,
            "host and port": running.address.removeprefix("tcp://"),
            "file": str(running.folder / "scheduler.json"),
            "path": running.folder / "scheduler.json",
            "client": client,
        }
        assert (
            made.run(tmp_path / "out", client=names[what]).ran_on == f"cluster {running.address} (1 worker, 1 thread)"
        )
        assert client.status == "running"


WORDS: list[tuple[Any, str]] = [
    ("threading", "2 threads"),
    ("sync", "the calling thread"),
    ("Single-Threaded", "the calling thread"),
    (dask.threaded.get, "dask.threaded"),
    (dask.get, "dask.local"),
    (ThreadPoolExecutor(2), "ThreadPoolExecutor"),
]


@pytest.mark.parametrize(
    ("value", "ran_on", "argument"),
    [
        *((*word, "client") for word in WORDS),
        *((*word, "configuration") for word in WORDS[2:]),
    ],
)
def test_words_of_dask(made: reshard.Plan, tmp_path: Path, value: Any, ran_on: str, argument: str) -> None:
    if argument == "configuration":
        with dask.config.set(scheduler=value):
            report = made.run(tmp_path / "out", threads=2)
    else:
        report = made.run(tmp_path / "out", threads=2, **{argument: value})
    assert report.ran_on == ran_on
    assert f"on {ran_on}" in report._repr_html_()
    assert report.bytes_written == made.stats.bytes_written


def test_processes(made: reshard.Plan, tmp_path: Path) -> None:
    report = made.run(tmp_path / "b", client="multiprocessing", threads=1)
    assert report.ran_on.startswith("cluster tcp://127.0.0.1:")
    assert all("MainThread" not in receipt.worker for receipt in report.receipts if receipt.task.startswith("move"))
    made.run(tmp_path / "a", client="sync")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_what_is_no_scheduler_is_refused_before_anything_is_written(
    made: reshard.Plan, tmp_path: Path, running: Cluster
) -> None:
    (tmp_path / "other.json").write_text("{}")
    out = tmp_path / "out"
    refusals: list[tuple[Any, str]] = [
        ("quick", "unknown-scheduler"), (7, "unknown-scheduler"), (object(), "unknown-scheduler"),
        ("distributed", "no-client"), (str(tmp_path / "none.json"), "no-such-cluster"),
        (tmp_path / "other.json", "no-such-cluster"),
    ]  # fmt: skip
    for value, code in refusals:
        with refused(UsageError, code):
            made.run(out, client=value)
    with dask.config.set(scheduler="quick"), refused(UsageError, "unknown-scheduler", "quick"):
        made.run(out)
    with refused(UsageError, "out-of-range", "threads is 0"):
        made.run(out, threads=0)
    client = distributed.Client(running.address, set_as_default=False)
    client.close()
    with refused(ReshardError, "not-reachable"):
        made.run(out, client=client)
    local = local_cluster()
    local.close()
    with refused(ReshardError, "not-reachable"):
        made.run(out, client=local)

    async def in_a_loop() -> None:
        async with distributed.Client(running.address, asynchronous=True, set_as_default=False) as client:
            with refused(UsageError, "asynchronous-client"):
                made.run(out, client=client)

    import asyncio

    asyncio.run(in_a_loop())
    assert not out.exists()


READS: dict[str, Callable[[reshard.Checkpoint, Any], object]] = {
    "stats": lambda source, client: source.stats(client=client),
    "diff": lambda source, client: reshard.diff(source, source, client=client),
    "verify": lambda source, client: reshard.verify(source, against=source, client=client),
}


@pytest.mark.parametrize("call", READS)
def test_what_reads_runs_there_too(folder: Path, current: Any, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = reshard.open(folder / "src", strategy=BEFORE)

    def not_there(*_arguments: object, **_options: object) -> None:
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(executor, "map_ordered", not_there)
        READS[call](source, None)  # on the current client
        READS[call](source, current.cluster)
        patch.setattr(distributed.Client, "submit", not_there)
        READS[call](source, "sync")
        READS[call](source, dask.get)
        with dask.config.set(scheduler="synchronous"):
            READS[call](source, None)
        with pytest.raises(AssertionError):
            READS[call](source, "threads")
    READS[call](source, "threads")
    with refused(UsageError, "unknown-scheduler"):
        READS[call](source, "quick")


def converted(folder: Path, out: Path, *options: str) -> Any:
    return done("convert", folder / "src", out, "--source-strategy", folder / "before.ckpt", "--target-strategy",
                folder / "after.ckpt", *options)  # fmt: skip


def test_the_command(folder: Path, tmp_path: Path, running: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    there = f"cluster {running.address} (1 worker, 1 thread)"
    file = str(running.folder / "scheduler.json")
    assert f"ran on {there}" in converted(folder, tmp_path / "a", "--cluster", file).stdout
    assert "on the calling thread" in converted(folder, tmp_path / "b", "--cluster", "sync", "-v").stdout
    assert "on the calling thread" in converted(folder, tmp_path / "c", "--cluster", "single-threaded", "-v").stdout
    assert "ran on" not in converted(folder, tmp_path / "d").stdout
    for value in (running.address, file):
        monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", value)
        out = tmp_path / f"e{len(value)}"
        assert json.loads(converted(folder, out, "--json").stdout)["ran_on"] == there
        assert "cluster: 1 worker; dashboard: " in done("stats", out, "--source-strategy", folder / "after.ckpt").stderr
    result = converted(folder, tmp_path / "f", "--cluster", "threads", "--threads", "2", "--json")
    assert json.loads(result.stdout)["ran_on"] == "2 threads"
    # A check of the target alone needs no cluster, and does not refuse one that the environment names.
    assert call("verify", tmp_path / "a", "--target-strategy", folder / "after.ckpt").exit_code == 0
    failed(2, "conflicting-options", "convert", folder / "src", tmp_path / "g", "--cluster", file, "--threads", "2")
    failed(2, "usage", "convert", folder / "src", tmp_path / "g", "--cluster", "nowhere.json")
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "tcp://127.0.0.1:9")
    monkeypatch.setattr("reshard.core.run.clusters.connect.REACHED_WITHIN", 1)
    failed(1, "not-reachable", "stats", folder / "src", "--source-strategy", folder / "before.ckpt")
