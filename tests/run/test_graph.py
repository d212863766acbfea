"""The graph of a plan as a dask collection, whose small tasks are joined for clusters, on threads and on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dask
import pytest
from checkpoints import numbers, tree, write_ranks
from clusters import client_of, cluster
from dask.graph_manipulation import bind, clone
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from refusals import refused
from remotes import get

import reshard
from reshard import Layout, Strategy
from reshard.core.plan import budget, partition
from reshard.core.plan.uploads import sending
from reshard.core.run import graph
from reshard.core.run.settings import TaskOptions
from reshard.errors import ChangedError, TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from reshard.core.plan.plan import Plan


distributed = pytest.importorskip("distributed")

SHAPES = {f"layers.{i}.w": (48, 36) for i in range(4)}
FULL = numbers(SHAPES)
BEFORE, AFTER = (Strategy.of({name: Layout.of([n], [0, -1]) for name in SHAPES}) for n in (4, 3))

STAGES = ["plan", "create", "move", "check", "close", "commit", "index"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> reshard.Plan:
    source = write_ranks(tmp_path_factory.mktemp("graph") / "src", FULL, BEFORE)
    return reshard.plan(reshard.open(source, strategy=BEFORE), AFTER)


@pytest.fixture(scope="module")
def expected(made: reshard.Plan, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("expected") / "out"
    made.run(out)
    return tree(out)


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture(params=["threads", "cluster"])
def scheduler(request: pytest.FixtureRequest) -> Any:
    """What dask takes as the scheduler of `compute`."""
    return "threads" if request.param == "threads" else request.getfixturevalue("client")


def test_a_layer_for_each_stage(made: reshard.Plan, tmp_path: Path) -> None:
    graph = made.graph(tmp_path / "out")
    assert isinstance(graph.dask, HighLevelGraph)
    graph.dask.validate()  # keys, and dependencies between layers
    assert [name.split("-")[1] for name in graph.dask.layers] == STAGES
    assert all(isinstance(layer, MaterializedLayer) for layer in graph.dask.layers.values())
    assert graph.__dask_layers__() == (list(graph.dask.layers)[-1],)
    assert "reshard-move" in graph.dask._repr_html_()
    by_file = made.graph(tmp_path / "out", partition="file").dask
    by_file.validate()
    assert [name.split("-")[1] for name in by_file.layers][1] == "files"


COMPUTED: dict[str, Callable[[Any, Any], Any]] = {
    "compute": lambda graph, scheduler: graph.compute(scheduler=scheduler),
    "optimized clone": lambda graph, scheduler: dask.optimize(clone(graph))[0].compute(scheduler=scheduler),
    "persist": lambda graph, scheduler: dask.persist(graph, scheduler=scheduler)[0].compute(scheduler=scheduler),
    "with another": lambda graph, scheduler: dask.compute(graph, dask.delayed(1), scheduler=scheduler)[0],
}


@pytest.mark.parametrize("way", COMPUTED)
def test_dask_computes_it(
    made: reshard.Plan, expected: dict[str, bytes], tmp_path: Path, scheduler: Any, way: str
) -> None:
    report = COMPUTED[way](made.graph(tmp_path / "out"), scheduler)
    assert report.bytes_written == made.stats.bytes_written
    assert tree(tmp_path / "out") == expected


def test_two_graphs_and_one_after_another(
    made: reshard.Plan, expected: dict[str, bytes], tmp_path: Path, scheduler: Any
) -> None:
    first, second, third = (made.graph(tmp_path / name) for name in "abc")
    reports = dask.compute(first, second, scheduler=scheduler)
    assert [report.directory for report in reports] == [str(tmp_path / name) for name in "ab"]
    after = bind(third, made.graph(tmp_path / "d"))
    after.dask.validate()
    assert after.__dask_tokenize__() != third.__dask_tokenize__()
    assert clone(third).kinds() == third.kinds()
    after.compute(scheduler=scheduler)
    assert all(tree(tmp_path / name) == expected for name in "abcd")
    times = {name: [path.stat().st_mtime_ns for path in (tmp_path / name).rglob("*.safetensors")] for name in "cd"}
    assert max(times["d"]) <= min(times["c"])


def test_a_client_computes_and_persists_it(
    made: reshard.Plan, expected: dict[str, bytes], tmp_path: Path, client: Any
) -> None:
    report = client.compute(made.graph(tmp_path / "a")).result()
    assert report.bytes_written == made.stats.bytes_written
    assert report.peak_memory == 0  # a worker made the report, and this process is not measured there
    persisted = client.persist(made.graph(tmp_path / "b"))
    assert persisted.compute(scheduler=client).receipts == persisted.compute(scheduler=client).receipts
    assert tree(tmp_path / "a") == tree(tmp_path / "b") == expected


def annotations(dask_scheduler: Any) -> list[dict[str, Any]]:
    """On the scheduler: what the tasks of graphs are annotated with."""
    return [
        dict(task.annotations or {}) for key, task in dask_scheduler.tasks.items() if str(key).startswith("reshard-")
    ]


@pytest.mark.parametrize("where", ["graph", "compute"])
def test_annotations_reach_the_tasks(made: reshard.Plan, tmp_path: Path, client: Any, where: str) -> None:
    if where == "graph":
        with dask.annotate(priority=7):
            graph = made.graph(tmp_path / "out")
        future = client.compute(graph)
    else:
        graph = made.graph(tmp_path / "out")
        with dask.annotate(priority=7):
            future = client.compute(graph)
        assert not any(layer.annotations for layer in graph.dask.layers.values())  # it was of that call
    future.result()
    expected = {"priority": 7}
    seen = client.run_on_scheduler(annotations)
    assert seen.count(expected) >= len(graph.dask) - len(made._record.files)  # dask forgets tasks that are done
    if where == "graph":
        assert all(layer.annotations == expected for layer in clone(graph).dask.layers.values())
        assert all(layer.annotations == expected for layer in dask.optimize(graph)[0].dask.layers.values())


def test_files_that_exist_are_refused_when_it_is_made(
    made: reshard.Plan, expected: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    made.run(out)
    written = tree(out)
    file = next(iter(expected))
    for by in ("tensor", "file"):
        with refused(TargetError, "already-exists", out, file, "overwrite=True"):
            made.graph(out, partition=by)
    assert tree(out) == written
    (out / file).write_bytes(b"foreign")
    with refused(TargetError, "already-exists", out, file):
        made.graph(out)
    made.graph(out, overwrite=True).compute()
    assert tree(out) == written
    url = "memory://graph-refused"
    made.run(url)
    before = get(url)
    with refused(TargetError, "already-exists", url):
        made.graph(url)
    assert get(url) == before


def test_what_a_run_refuses_is_refused_when_it_is_made(made: reshard.Plan, tmp_path: Path) -> None:
    root = made._record.source.root
    with refused(TargetError, "overlaps", root):
        made.graph(f"{root}/inside")
    with refused(TargetError, "not-a-directory", "file"):
        (tmp_path / "file").write_text("")
        made.graph(tmp_path / "file")

    def refused_meanwhile(_event: object) -> None:
        with refused(TargetError, "locked", tmp_path / "out"):
            made.graph(tmp_path / "out", overwrite=True)

    made.run(tmp_path / "out", progress=refused_meanwhile)
    made.graph(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    source = write_ranks(tmp_path / "src", FULL, BEFORE)
    changed = reshard.plan(reshard.open(source, strategy=BEFORE), AFTER)
    next(source.rglob("*.safetensors")).touch()
    with refused(ChangedError, "source-changed", source):
        changed.graph(tmp_path / "never")


LAYERS = numbers({f"layers.{i}.w": (24, 16) for i in range(40)})
SEVERAL = TaskOptions(multi_process=True)


def split(ranks: int, axis: int) -> Strategy:
    return Strategy.of({name: Layout.of([ranks], [0 if dim == axis else -1 for dim in range(2)]) for name in LAYERS})


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> reshard.Plan:
    """A plan of 40 tasks, of which at least 8 are left when they are joined."""
    monkeypatch.setattr(budget, "TASK_BYTES", 1)
    monkeypatch.setattr(budget, "MOST_TASKS", 40)
    monkeypatch.setattr(graph, "ENOUGH_TASKS", 8)
    root = write_ranks(tmp_path / "src", LAYERS, split(8, 0))
    return reshard.plan(reshard.open(root, strategy=split(8, 0)), split(16, 1))


def joined(plan: Plan, options: TaskOptions = SEVERAL) -> Plan:
    return graph.Graph(plan, "/out", options).plan


def test_a_collection_of_joined_tasks(small: reshard.Plan, tmp_path: Path) -> None:
    small.run(tmp_path / "expected", client="threads")
    collection = small.graph(tmp_path / "out")
    assert collection.kinds()["move"] == 8
    report = collection.compute()
    assert (report.bytes_read, report.bytes_written) == (small.stats.bytes_read, small.stats.bytes_written)
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


@pytest.mark.parametrize("format", ["safetensors", "zarr"])
def test_joined_tasks_at_a_url(small: reshard.Plan, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    """A dask scheduler may use several processes."""
    monkeypatch.setattr(sending, "STREAMS_AT_ONCE", 1)
    source = reshard.Checkpoint(small._record.source)
    plan = reshard.plan(source, split(16, 1)) if format == "safetensors" else reshard.plan(source, to="zarr")
    urls = [f"memory://joined-{format}-{scheduler}" for scheduler in ("threads", "dask")]
    plan.run(urls[0], client="threads")
    report = plan.run(urls[1], client=dask.get)
    assert 8 <= sum(receipt.task.startswith("files") for receipt in report.receipts) < 16
    assert get(urls[0]) == get(urls[1])


@pytest.mark.slow
def test_joined_tasks_on_a_cluster(small: reshard.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has one receipt; one is lost with the worker that has it."""
    pytest.importorskip("distributed")
    monkeypatch.setattr(partition, "FILES_AT_ONCE", 1)
    small.run(tmp_path / "expected", client="threads")
    with cluster(tmp_path, 2) as one, client_of(one.address, 2) as client:
        for by in ("tensor", "file"):
            told: list[Any] = []
            report = small.run(tmp_path / by, client=client, progress=told.append, partition=by)
            assert tree(tmp_path / by) == tree(tmp_path / "expected")
            kinds = [receipt.task.partition(" ")[0] for receipt in report.receipts]
            assert kinds.count("move") + kinds.count("files") == 8
            assert report.bytes_written == told[-1].written == told[-1].total == small.stats.bytes_written
            assert report.manifest()

        def kill(event: Any) -> None:
            if event.written and one.workers[0].poll() is None:
                one.workers[0].kill()
                one.workers[0].wait()

        small.run(tmp_path / "one worker", client=client, progress=kill)
    assert tree(tmp_path / "one worker") == tree(tmp_path / "expected")
