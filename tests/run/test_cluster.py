"""Clusters of real processes: the same bytes, whoever is lost; nothing but receipts and the plan travels."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import by_file
import pytest
from checkpoints import numbers, tree, write_ranks
from clusters import Wire, client_of, cluster, count_plans, nap, plans_counted
from commands import heed_signals, interruptible
from refusals import failed, refused
from remotes import get
from samples import one_in, slow

import reshard
from reshard import Layout, Strategy
from reshard.core.plan import budget
from reshard.core.plan import partition as tasks_of
from reshard.core.plan.plan import file_digests
from reshard.core.run import executor, tasks
from reshard.core.run.clusters import connect, waking, workers
from reshard.core.run.settings import TaskOptions
from reshard.core.storage.local import _LocalSink
from reshard.core.storage.page_cache import cache_of
from reshard.errors import ReshardError, SourceError, TargetError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from faulty import Faults

__all__ = ["interruptible"]  # fixtures, for pytest to find

pytest.importorskip("distributed")

SHAPES = {f"layers.{i}.w": (480, 360) for i in range(12)} | {"norm": (480,)}
FULL = numbers(SHAPES)
BEFORE = Strategy.of({name: Layout.of([8], [0] + [-1] * (len(shape) - 1)) for name, shape in SHAPES.items()})
AFTER = Strategy.of({name: Layout.of([6], [-1] * (len(shape) - 1) + [0]) for name, shape in SHAPES.items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def made(folder: Path) -> reshard.Plan:
    """A plan of many small tasks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "TASK_BYTES", 1 << 16)
        patch.setattr(budget, "BAND_BYTES", 1 << 13)
        source = reshard.open(write_ranks(folder / "src", FULL, BEFORE), strategy=BEFORE)
        return reshard.plan(source, AFTER)


@pytest.fixture(scope="module")
def expected(made: reshard.Plan, folder: Path) -> dict[str, bytes]:
    made.run(folder / "by_threads", client="threads")
    return tree(folder / "by_threads")


@pytest.fixture(scope="module")
def wired(folder: Path) -> Iterator[tuple[Wire, Any]]:
    """A client of a scheduler with two workers, and the wire that all of them reach it by."""
    with cluster(folder, 0) as one:
        wire = Wire(one.address)
        for _ in range(2):
            one.add_worker(wire.address)
        with client_of(wire.address, 2) as client:
            yield wire, client
        wire.close()


def test_only_receipts_and_the_plan_travel(
    made: reshard.Plan, expected: dict[str, bytes], wired: tuple[Wire, Any], tmp_path: Path
) -> None:
    wire, client = wired
    told: list[Any] = []
    client.run(count_plans)
    before = wire.nbytes
    report = made.run(tmp_path / "out", client=client, progress=told.append)
    sent = wire.nbytes - before
    assert tree(tmp_path / "out") == expected
    assert len(made._record.tasks) > 100
    assert report.bytes_read == made.stats.bytes_read == told[-1].written == told[-1].total
    # Each worker rebuilt the plan once, not once a task; or twice, where it had it from the scheduler and the other.
    assert set(client.run(plans_counted).values()) <= {1, 2}
    assert sent < 6144 * len(made._record.tasks) + 10 * len(pickle.dumps(made))
    assert sent < report.bytes_written // 4
    # The same workers once more: what they held open is not what gets its name now.
    smaller = reshard.plan(
        reshard.Checkpoint(made._record.source),
        Strategy.of({"norm": Layout.of([6], [0])}),
        selection=reshard.Selection(("norm",)),
    )
    smaller.run(tmp_path / "out", client=client, overwrite=True)
    made.run(tmp_path / "out", client=client, overwrite=True)
    assert tree(tmp_path / "out") == expected
    made.run(tmp_path / "by_file", client=client, partition="file", fsync=False)
    assert tree(tmp_path / "by_file") == expected


@one_in(6)
def test_a_file_that_was_lost_is_made_anew_by_the_same_workers(
    made: reshard.Plan, expected: dict[str, bytes], wired: tuple[Wire, Any], tmp_path: Path, every: int
) -> None:
    """The one that makes it is not the only one that writes into it; what the others have open is gone."""
    for number, path in enumerate(sorted(expected)[::every]):
        out = tmp_path / str(number)
        made.run(out, client=wired[1])
        (out / path).unlink()
        assert made.run(out, client=wired[1]).finished == len(made._record.files) - 1
        assert tree(out) == expected


@pytest.mark.slow
def test_a_cluster_is_refused_before_anything_is_replaced(made: reshard.Plan, tmp_path: Path) -> None:
    """The same path leads to another directory on the worker; an index at a URL goes before what it is of."""
    source = reshard.open(f"/proc/self/cwd/{os.path.relpath(made._record.source.root)}", strategy=BEFORE)
    plan = reshard.plan(source, to="hf", max_shard_size=200_000)
    url = "memory://refused-before-anything"
    plan.run(url)
    before = get(url)
    (tmp_path / "elsewhere").mkdir()
    with cluster(tmp_path, 0) as one:
        one.add_worker(cwd=tmp_path / "elsewhere")
        with client_of(one.address, 1) as client, refused(SourceError, "not-found", "worker tcp://"):
            plan.run(url, client=client, restart=True)
    assert get(url) == before


def test_workers_of_one_machine_sync_at_the_end(
    made: reshard.Plan, wired: tuple[Wire, Any], tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every task would wait for the disk, and every file be synced many times; elsewhere nobody else can do it."""
    root = str(tmp_path)
    plan = replace(made._record, digests=tuple(file_digests(made._record)))
    here = workers.check_workers(plan, root, wired[1])
    assert here == cache_of(root) != ""
    monkeypatch.setattr(workers, "cache_of", lambda _directory: "this process")
    assert workers.check_workers(plan, root, wired[1]) == ""
    for cached, waited in ((here, 0), ("another machine", len(plan.files)), ("", len(plan.files))):
        how = TaskOptions(multi_process=True, cached=cached)
        tasks.create_files(plan, range(len(plan.files)), root, how)
        assert len(faults.of("sync")) == waited
        faults.clear()
        tasks.move_task(plan, 0, root, how, None)
        assert bool(faults.of("sync")) == bool(waited)
        faults.clear()
        tasks.close_files(plan, range(len(plan.files)), root, how, {}, None)
        assert len(faults.of("sync")) == (len(plan.files) if cached else 0)
        faults.clear()


@pytest.mark.parametrize("partition", ["tensor", "file"])
def test_a_failure_on_a_worker_leaves_nothing(
    made: reshard.Plan, wired: tuple[Wire, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partition: str
) -> None:
    """A source that is truncated under the run: found while reading, whatever other tasks do just then."""
    shutil.copytree(Path(made._record.source.root), tmp_path / "src")
    monkeypatch.setattr(budget, "TASK_BYTES", 1 << 16)
    monkeypatch.setattr(tasks_of, "FILES_AT_ONCE", 1)
    plan = reshard.plan(reshard.open(tmp_path / "src", strategy=BEFORE), AFTER)
    path = Path(plan._record.source.files[7].path)

    check_workers = workers.check_workers

    def then_cut(*given: Any) -> str:
        cached = check_workers(*given)
        os.truncate(path, 1 << 16)
        return cached

    monkeypatch.setattr("reshard.core.run.run.check_workers", then_cut)  # just before they begin
    with pytest.raises((SourceError, TargetError)) as caught:
        plan.run(tmp_path / "out", client=wired[1], partition=partition)
    assert caught.value.code in {"truncated", "source-changed"}
    assert "checkpoint_7.safetensors" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("partition", ["tensor", slow("file")])
def test_a_worker_is_killed_in_the_middle(
    made: reshard.Plan,
    expected: dict[str, bytes],
    tmp_path: Path,
    partition: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its receipts are gone with it, those of making the files among them; others have written into these since."""
    with cluster(tmp_path, 2) as one, client_of(one.address, 2) as client:
        lost: list[str] = []
        victims: list[str] = []

        def kill(event: Any) -> None:
            if lost or event.written < event.total // 3:
                return
            held = {worker: [k for k in keys if "-0" in k] for worker, keys in client.has_what().items()}
            creating = [worker for worker, keys in held.items() if any("-create-" in key for key in keys)]
            if min(map(len, held.values())) <= (10 if partition == "tensor" else 0):
                return  # not before both have been at work
            victim = creating[0] if creating else max(held, key=lambda worker: len(held[worker]))
            name = client.scheduler_info(n_workers=-1)["workers"][victim]["name"]
            lost.extend(held[victim])
            victims.append(victim)
            one.workers[int(name.removeprefix("worker-"))].kill()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tasks_of, "FILES_AT_ONCE", 1)  # six tasks, where one would read least
            report = made.run(tmp_path / "out", client=client, progress=kill, partition=partition)
        assert len(client.scheduler_info(n_workers=-1)["workers"]) <= 1  # one that answers late is dropped for a while
    assert any(("-create-" if partition == "tensor" else "-files-") in key for key in lost)
    logged = [record for record in caplog.records if record.name == "reshard" and record.levelname == "WARNING"]
    assert [victim for victim in victims if any(victim in record.getMessage() for record in logged)]
    assert tree(tmp_path / "out") == expected
    assert report.bytes_written == made.stats.bytes_written
    assert len({receipt.task for receipt in report.receipts}) == len(report.receipts)


def lose_wakes(dask_scheduler: Any) -> None:
    """On the scheduler: leave tasks in the queue until no worker has any, as happens when a worker is lost."""
    real = dask_scheduler.stimulus_queue_slots_maybe_opened

    def lost(*, stimulus_id: str) -> None:
        if dask_scheduler.queued and not any(worker.processing for worker in dask_scheduler.workers.values()):
            dask_scheduler.stimulus_queue_slots_maybe_opened = real

    dask_scheduler.stimulus_queue_slots_maybe_opened = lost


@pytest.mark.slow
@pytest.mark.parametrize("done", [1, 20])
def test_a_scheduler_that_forgot_its_queue_is_woken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int) -> None:
    """At the beginning, and after it was woken many times while its worker was busy."""
    monkeypatch.setattr(waking, "WOKEN_AFTER", 0.02)
    with cluster(tmp_path, 1) as one, client_of(one.address, 1) as client:
        results: list[int] = []

        def add(result: int) -> None:
            results.append(result)
            if len(results) == done:
                client.run_on_scheduler(lose_wakes)

        executor.map_tasks(nap, 0.06, range(done + 6), threads=1, client=client, on_result=add)
    assert sorted(results) == list(range(done + 6))


def test_what_progress_raises_stops_a_run_as_it_is(made: reshard.Plan, tmp_path: Path, wired: tuple[Wire, Any]) -> None:
    """As on threads; nothing is left."""

    class StopNow(Exception):  # noqa: N818 -- a user's
        pass

    def stop(event: Any) -> None:
        if event.written:
            raise StopNow

    for client in (None, wired[1]):
        with pytest.raises(StopNow):
            made.run(tmp_path / "out", client=client, progress=stop)
        assert not list(tmp_path.rglob("*.safetensors"))


def slow_writes() -> None:
    """On a worker: take so long that there is time for something else."""
    real = _LocalSink.write_at

    def write_at(sink: _LocalSink, offset: int, data: memoryview | bytes) -> None:
        time.sleep(0.005)
        real(sink, offset, data)

    _LocalSink.write_at = write_at  # type: ignore[method-assign]


@pytest.mark.slow  # a client looks for its scheduler for half a minute
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("interrupted", [False, True], ids=["alone", "and Ctrl-C"])
def test_a_scheduler_is_lost_in_the_middle(
    made: reshard.Plan, expected: dict[str, bytes], tmp_path: Path, interrupted: bool
) -> None:
    """What was not written has no name, and the next run writes it."""
    with cluster(tmp_path, 1) as one, client_of(one.address, 1) as client:
        client.run(slow_writes)

        def kill(event: Any) -> None:
            if one.scheduler.poll() is None and event.written:
                one.scheduler.kill()
                one.scheduler.wait()
                if interrupted:
                    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()

        with pytest.raises(KeyboardInterrupt if interrupted else ReshardError) as caught:
            made.run(tmp_path / "out", client=client, progress=kill)
        assert interrupted or getattr(caught.value, "code", "") == "cluster-failed"
        one.workers[0].kill()
        one.workers[0].wait()
        assert not list((tmp_path / "out").rglob("*.safetensors"))
    made.run(tmp_path / "out")
    assert tree(tmp_path / "out") == expected


def test_a_worker_that_sees_other_files_is_named(
    made: reshard.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same path leads to another directory on the worker: its own working directory."""
    (tmp_path / "elsewhere").mkdir()
    source = reshard.open(f"/proc/self/cwd/{os.path.relpath(made._record.source.root)}", strategy=BEFORE)
    assert source._record.files[0].path.startswith("/proc/self/cwd/")
    with cluster(tmp_path, 0) as one:
        one.add_worker(cwd=tmp_path / "elsewhere")
        with client_of(one.address, 1) as client:
            with refused(SourceError, "not-found", "worker tcp://", "checkpoint_0.safetensors", "by the same paths"):
                reshard.plan(source, AFTER).run(tmp_path / "out", client=client)
            assert not (tmp_path / "out").exists()
            there = f"/proc/self/cwd/{os.path.relpath(tmp_path)}"
            inside = f"{tmp_path}/"
            monkeypatch.setattr(os.path, "realpath", lambda path: re.sub(f"^{inside}", f"{there}/", str(path)))
            with refused(TargetError, "different-directory", "worker tcp://", "out"):
                made.run(tmp_path / "out", client=client)


def test_a_worker_that_came_late_and_sees_another_target_writes_nothing(
    made: reshard.Plan, tmp_path: Path, wired: tuple[Wire, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not there when workers were looked at; what the task is told of is gone on it."""

    def unseen(*arguments: Any, **options: Any) -> Any:
        (tmp_path / "out" / ".reshard" / "lock").unlink()
        return execute(*arguments, **options)

    execute = executor.execute
    monkeypatch.setattr("reshard.core.run.run.execute", unseen)
    with refused(TargetError, "different-directory", tmp_path / "out"):
        made.run(tmp_path / "out", client=wired[1])
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_cluster_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(connect, "REACHED_WITHIN", 1)
    began = time.monotonic()
    with (
        refused(ReshardError, "not-reachable", "tcp://127.0.0.1:9", "1 s"),
        connect.connected("tcp://127.0.0.1:9"),
    ):
        pass
    with refused(ReshardError, "not-reachable", "nowhere://x"), connect.connected("nowhere://x"):
        pass
    with (
        cluster(tmp_path, 0) as one,
        refused(ReshardError, "no-workers", "1 s", "dask worker tcp"),
        connect.connected(one.address),
    ):
        pass
    assert time.monotonic() - began < 20
    monkeypatch.setitem(sys.modules, "distributed", None)
    with (
        refused(ReshardError, "library-missing", "pip install 'reshard[distributed]'"),
        connect.connected("local"),
    ):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["tensor", "file"])
def test_ctrl_c_in_a_terminal_reaches_workers_too(tmp_path: Path, partition: str) -> None:
    """Whose tasks, half a GB long, end early, without a word of theirs; nothing is left."""
    shapes = {f"w{i}": (8192, 8192) for i in range(4)}
    before, after = (Strategy.of({name: Layout.of([2], split) for name in shapes}) for split in ([0, -1], [-1, 0]))
    write_ranks(tmp_path / "src", numbers(shapes), before)
    reshard.write_strategy(before, tmp_path / "before.ckpt")
    reshard.write_strategy(after, tmp_path / "after.ckpt")
    how = ["-m", "reshard"] if partition == "tensor" else [by_file.__file__]
    command = [
        sys.executable, *how, "convert", "src", "out", "--source-strategy", "before.ckpt",
        "--target-strategy", "after.ckpt", "--cluster", "local:2", "--to", "ckpt",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=heed_signals,  # noqa: PLW1509
    )  # fmt: skip
    while not list(tmp_path.glob("out/rank_*/*.partial")):
        assert process.poll() is None
        time.sleep(0.01)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    assert process.stderr is not None
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 130
    assert time.monotonic() - began < 30
    assert "Traceback" not in said
    assert said.count("\n") == 2  # the dashboard, and the end
    assert not list((tmp_path / "out").rglob("*"))


@pytest.mark.slow
def test_a_run_without_workers_fails(
    made: reshard.Plan, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler would wait for a worker for ever; what was written is resumed."""
    monkeypatch.setattr(waking, "NO_WORKERS_AFTER", 0.5)
    with cluster(tmp_path, 2) as one, client_of(one.address, 2) as client:

        def kill(event: Any) -> None:
            if event.written > event.total // 3:
                for worker in one.workers:
                    worker.kill()

        began = time.monotonic()
        with refused(ReshardError, "no-workers", one.address) as caught:
            made.run(tmp_path / "out", client=client, progress=kill)
        assert caught.value.exit_code == 1
        assert time.monotonic() - began < 20
        with refused(ReshardError, "no-workers", one.address):
            reshard.open(made._record.source.root, strategy=BEFORE).stats(client=client)
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    made.run(tmp_path / "out")
    assert tree(tmp_path / "out") == expected


@pytest.mark.slow
def test_a_worker_that_comes_late_is_waited_for(made: reshard.Plan, expected: dict[str, bytes], tmp_path: Path) -> None:
    """A client may be given before its cluster has workers, as one of a batch system."""
    from distributed import Client

    with cluster(tmp_path, 0) as one, Client(one.address, set_as_default=False) as client:
        threading.Timer(2, one.add_worker).start()
        assert made.run(tmp_path / "out", client=client).bytes_written == made.stats.bytes_written
    assert tree(tmp_path / "out") == expected


def slow_sums() -> None:
    """On a worker: take so long, once all bytes are moved, that there is time for something else."""
    real: Any = tasks.crcs_of_files

    def crcs_of_files(*arguments: Any) -> Any:
        time.sleep(2)
        return real(*arguments)

    tasks.crcs_of_files = crcs_of_files


@pytest.mark.slow
def test_a_graph_of_dask_goes_on_when_a_worker_is_lost(
    made: reshard.Plan, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """Most tasks have to be done again."""
    with cluster(tmp_path, 2) as one, client_of(one.address, 2) as client:
        client.run(slow_sums)
        future = client.compute(made.graph(tmp_path / "out"))
        running: list[str] = []
        while not running:
            assert not future.done()
            running = [
                client.scheduler_info(n_workers=-1)["workers"][worker]["name"]
                for worker, keys in client.processing().items()
                if any("-crcs-" in key for key in keys)
            ]
        one.workers[int(running[0].removeprefix("worker-"))].kill()
        assert future.result(timeout=60).bytes_written == made.stats.bytes_written
    assert tree(tmp_path / "out") == expected


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_command_whose_worker_hangs(made: reshard.Plan, tmp_path: Path) -> None:
    """The first one cancels the run, and waits for the worker, which may write into the target."""
    reshard.write_strategy(BEFORE, tmp_path / "before.ckpt")
    reshard.write_strategy(AFTER, tmp_path / "after.ckpt")
    with cluster(tmp_path, 1) as one, client_of(one.address, 1) as client:
        client.run(slow_writes)
        process = subprocess.Popen(
            [
                sys.executable, "-m", "reshard", "convert", made._record.source.root, "out",
                "--source-strategy", "before.ckpt", "--target-strategy", "after.ckpt", "--cluster", one.address,
            ],
            cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=heed_signals,  # noqa: PLW1509
        )  # fmt: skip
        assert process.stderr is not None
        while not list(tmp_path.glob("out/rank_*/*.partial")):
            assert process.poll() is None
            time.sleep(0.01)
        one.workers[0].send_signal(signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert time.monotonic() - began < 2
        assert "Traceback" not in process.stderr.read()
        process.stderr.close()


FILES = ("ca-file", "client.cert", "client.key")


def test_an_encrypted_connection_needs_a_certificate(made: reshard.Plan, tmp_path: Path) -> None:
    import dask

    reshard.write_strategy(BEFORE, tmp_path / "before.ckpt")
    strategy = tmp_path / "before.ckpt"
    failed(
        1, "no-certificate", "stats", made._record.source.root, "--source-strategy", strategy, "--cluster",
        "tls://127.0.0.1:9", places=("distributed.comm.tls",),
    )  # fmt: skip
    missing = {f"distributed.comm.tls.{name}": str(tmp_path / "none.pem") for name in FILES}
    with dask.config.set(missing), refused(ReshardError, "no-certificate"):
        made.run(tmp_path / "out", client="tls://127.0.0.1:9")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_encrypted_connection_has_the_certificates_of_its_cluster_or_of_dask(
    made: reshard.Plan, tmp_path: Path
) -> None:
    security = pytest.importorskip("distributed").Security
    pytest.importorskip("cryptography")
    import dask
    from distributed import LocalCluster

    temporary = security.temporary()
    contents = (temporary.tls_ca_file, temporary.tls_client_cert, temporary.tls_client_key)
    for name, content in zip(FILES, contents, strict=True):
        (tmp_path / name).write_text(content)
    with LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0", security=temporary) as local:
        address = local.scheduler_address
        assert address.startswith("tls://")
        assert address in made.run(tmp_path / "a", client=local).ran_on
        with dask.config.set({f"distributed.comm.tls.{name}": str(tmp_path / name) for name in FILES}):
            assert address in made.run(tmp_path / "b", client=address).ran_on
