"""The graph of a plan as a dask collection: layers, annotations, copies, and refusals, on threads and on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dask
import pytest
from checkpoints import numbers, tree, write_ranks
from dask.graph_manipulation import bind, clone
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from refusals import refused
from remotes import get

import reshard
from reshard import Layout, Strategy
from reshard.errors import ChangedError, TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

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


def test_chunks_of_assigned_arrays_are_a_layer(tmp_path: Path) -> None:
    import dask.array as da
    import numpy as np

    values = np.arange(6 * 8, dtype=np.float32).reshape(6, 8)
    array = da.from_array(values, chunks=(2, 8)) + 1
    rows = Strategy.of({"w": Layout.of([2], [0, -1])})
    source = reshard.open(write_ranks(tmp_path / "src", {"w": values}, rows), strategy=rows)
    graph = reshard.plan(source.assign({"w": array})).graph(tmp_path / "out")
    graph.dask.validate()
    layers = {name.split("-")[1]: layer for name, layer in graph.dask.layers.items()}
    assert {(array.name, row, 0) for row in range(3)} <= layers["arrays"].keys()
    clone(graph).compute()
    assert np.array_equal(reshard.open(tmp_path / "out")["w"].compute(), values + 1)


COMPUTED: dict[str, Callable[[Any, Any], Any]] = {
    "compute": lambda graph, scheduler: graph.compute(scheduler=scheduler),
    "clone": lambda graph, scheduler: clone(graph).compute(scheduler=scheduler),
    "optimize": lambda graph, scheduler: dask.optimize(graph)[0].compute(scheduler=scheduler),
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
    for partition in ("tensor", "file"):
        with refused(TargetError, "already-exists", out, file, "overwrite=True"):
            made.graph(out, partition=partition)
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
