"""Running plans: the same bytes on every scheduler, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask
import helpers
import numpy as np
import pytest
from checkpoints import assert_rank_files, numbers, places, tree, write_file, write_ranks
from eight_ranks import FULL, ROWS, TARGET, small_tasks, source
from generators import Model, models
from hypothesis import HealthCheck, given, settings
from refusals import refused
from samples import examples

import reshard
from reshard import Layout, Strategy, plan
from reshard.core.model.entries import Content
from reshard.core.run import engine, graph
from reshard.core.storage import local as store
from reshard.dtypes import BY_NAME
from reshard.errors import SourceError, TargetError, UsageError
from reshard.kits import ckpt

if TYPE_CHECKING:
    from faulty import Faults

    from reshard.core.run.settings import Receipt

__all__ = ["small_tasks", "source"]  # fixtures, for pytest to find


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_the_bytes_are_the_same_on_every_scheduler(
    source: reshard.Checkpoint, tmp_path: Path, small_tasks: None, format: str
) -> None:
    made = reshard.plan(source, TARGET, to=format)
    assert len(made._record.tasks) > 10
    made.run(tmp_path / "sync", client="synchronous")
    for threads in (1, 2, 5):
        made.run(tmp_path / f"{threads}", threads=threads)
        assert tree(tmp_path / f"{threads}") == tree(tmp_path / "sync")
    assert_rank_files(tmp_path / "sync", FULL, TARGET)


@pytest.mark.parametrize("cast", [None, "float32"])
def test_bands_are_worked_out_anew_where_they_are_not_kept(
    tmp_path: Path, small_tasks: None, monkeypatch: pytest.MonkeyPatch, cast: str | None
) -> None:
    """Layers alike share the bands that a thread keeps, next to others of their shapes with other dtypes."""
    shapes = {f"{name}.{i}": FULL[name].shape for name in FULL for i in range(3)}
    full = numbers(shapes, "float64") | {f"half.{i}": numbers({"w": FULL["w"].shape})["w"] for i in range(3)}
    before, after = (
        Strategy.of({name: strategy.tensors[name[0] if name[0] in FULL else "w"][0].layout for name in full})
        for strategy in (ROWS, TARGET)
    )
    opened = reshard.open(write_ranks(tmp_path / "src", full, before), strategy=before)
    made = reshard.plan(opened, after, selection=reshard.Selection(cast={"float64": cast} if cast else {}))
    full = {name: array.astype(cast) if cast and array.dtype == np.float64 else array for name, array in full.items()}
    lay_out, calls = engine._band, []

    def counted(*given: Any, in_order: bool) -> engine.Band:
        calls.append(given)
        return lay_out(*given, in_order=in_order)

    monkeypatch.setattr(engine, "_band", counted)
    laid_out = []
    for kept in (0, 40, 1 << 20):
        monkeypatch.setattr(engine, "VIEWS", kept)
        calls.clear()
        made.run(tmp_path / f"{kept}", threads=1)
        laid_out.append(len(calls))
        assert_rank_files(tmp_path / f"{kept}", full, after)
    assert laid_out == sorted(set(laid_out), reverse=True)


@pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
def test_files_are_read_in_order(
    source: reshard.Checkpoint,
    tmp_path: Path,
    small_tasks: None,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
    scheduler: str,
) -> None:
    """dask alone would take the tasks as they come out of a set, and the disk would wait for each of them."""
    move_task, begun = graph.move_task, []

    def noted(plan: Any, number: int, *given: Any) -> Receipt:
        begun.append(number)
        assert faults.of("drop_glances")
        return move_task(plan, number, *given)

    monkeypatch.setattr(graph, "move_task", noted)
    made = reshard.plan(source, TARGET)
    made.run(tmp_path / "out", client=scheduler, threads=1)
    assert begun == list(range(len(made._record.tasks)))


def test_on_a_distributed_client(source: reshard.Checkpoint, tmp_path: Path, small_tasks: None) -> None:
    from distributed import Client

    told = []
    made = reshard.plan(source, TARGET)
    with Client(processes=False, dashboard_address=":0", n_workers=1, threads_per_worker=2) as client:
        report = made.run(tmp_path / "out", client=client, progress=told.append)
    assert_rank_files(tmp_path / "out", FULL, TARGET)
    assert report.bytes_read == made.stats.bytes_read
    assert told[-1].written == told[-1].total


def test_the_graph_is_a_dask_collection(source: reshard.Checkpoint, tmp_path: Path) -> None:
    made = reshard.plan(source, TARGET)
    collection = made.graph(tmp_path / "out")
    assert dask.is_dask_collection(collection)
    (report,) = dask.compute(collection)
    assert isinstance(report, reshard.Report)
    assert (report.bytes_read, report.bytes_written) == (made.stats.bytes_read, made.stats.bytes_written)
    assert collection.compute().files == report.files
    assert_rank_files(tmp_path / "out", FULL, TARGET)


def test_graph_and_lazy_arrays_give_the_same_bytes(source: reshard.Checkpoint, tmp_path: Path) -> None:
    made = reshard.plan(source, TARGET, to="safetensors")
    made.run(tmp_path / "out")
    for rank in made.ranks:
        lazy = made.rank(rank)
        written = reshard.open(tmp_path / "out" / f"rank_{rank}" / f"checkpoint_{rank}.safetensors")
        assert set(lazy) == set(written)
        for name in lazy:
            assert np.array_equal(lazy[name].compute(), written[name].compute())


def test_progress_adds_up(source: reshard.Checkpoint, tmp_path: Path, small_tasks: None) -> None:
    told: list[Any] = []
    report = reshard.plan(source, TARGET).run(tmp_path / "out", progress=told.append)
    written = [event.written for event in told]
    assert written == sorted(written)
    assert told[-1].written == told[-1].total == report.bytes_written
    assert report.bytes_written == sum(array.nbytes * (3 if name == "w" else 1) for name, array in FULL.items())
    assert len(report.files) == 6


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(models())
def test_any_model_goes_there_and_back(tmp_path_factory: pytest.TempPathFactory, model: Model) -> None:
    root = tmp_path_factory.mktemp("model")
    full = numbers(model.shapes, "float64")
    before = write_ranks(root / "a", full, model.source)
    there = reshard.plan(reshard.open(before, strategy=model.source), model.target, to="ckpt")
    there.run(root / "b", fsync=False)
    assert_rank_files(root / "b", full, model.target)
    back = reshard.plan(reshard.open(root / "b", strategy=model.target), model.source, to="safetensors")
    back.run(root / "c", fsync=False)
    assert tree(root / "c") == tree(root / "a")


def test_64_ranks_to_56(tmp_path: Path) -> None:
    """Not multiples of each other, by hand: 64 = 8 x 8, tensor and optimizer parallel; 56 = 7 x 8 in two stages."""
    full = numbers({"a.w": (112, 64), "b.w": (64, 112), "moments.a.w": (112, 64), "norm": (448,)})
    source = Strategy.of(
        {
            "a.w": Layout.of([8, 8], [-1, 0]),
            "b.w": Layout.of([8, 8], [0, -1], -1),
            "moments.a.w": Layout.of([8, 8], [-1, 0], 8),
            "norm": Layout.of([8, 8], [(1, 0)]),
        }
    )
    target = Strategy.of(
        {
            "a.w": {0: Layout.of([7, 4], [1, 0])},
            "b.w": {1: Layout.of([7, 4], [-1, (0, 1)])},
            "moments.a.w": {0: Layout.of([7, 4], [-1, 0], -1)},
            "norm": {0: Layout.of([28], [0]), 1: Layout.of([28], [-1])},
        }
    )
    made = reshard.plan(reshard.open(write_ranks(tmp_path / "a", full, source), strategy=source), target)
    assert made.stats.read_amplification == 1
    made.run(tmp_path / "b")
    assert_rank_files(tmp_path / "b", full, target)


@pytest.mark.parametrize("dtype", ["bool", "int4", "uint8", "float16", "bfloat16", "int64", "float8_e4m3fn"])
def test_every_width_moves_as_bits(tmp_path: Path, dtype: str) -> None:
    from reshard.core.model.entries import FileIndex
    from reshard.kits.files import by_name

    kind = BY_NAME[dtype]
    bits = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, (8, 8, kind.itemsize), np.uint8)
    for rank in range(2):
        layout = by_name("safetensors").lay_out([Content("w", kind, (4, 8))], {"format": "ms"})
        content = bytearray(layout.size)
        content[: len(layout.literals[0][1])] = layout.literals[0][1]
        ((offset, nbytes),) = places(layout)["w"]
        content[offset : offset + nbytes] = bits[4 * rank : 4 * rank + 4].tobytes()
        (tmp_path / f"a/rank_{rank}").mkdir(parents=True)
        (tmp_path / f"a/rank_{rank}/net.safetensors").write_bytes(content)
    source = reshard.open(tmp_path / "a", strategy=Strategy.of({"w": Layout.of([2], [0, -1])}))
    reshard.plan(source, Strategy.of({"w": Layout.of([2], [-1, 0])})).run(tmp_path / "b")
    for rank in range(2):
        found = reshard.open(tmp_path / f"b/rank_{rank}/checkpoint_{rank}.safetensors")
        assert isinstance(found._record.files[0].index, FileIndex)
        assert found.tensors["w"].spec.dtype is kind
        assert found["w"].compute().tobytes() == bits[:, 4 * rank : 4 * rank + 4].tobytes()


def test_tensors_in_several_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MindSpore cuts contents at 512 MiB, in the middle of a row; here at 100 bytes, in the middle of an element."""
    monkeypatch.setattr(ckpt, "PART_BYTES", 101)
    source = reshard.open(write_ranks(tmp_path / "a", FULL, ROWS, "ckpt"), strategy=ROWS)
    assert len(source._record.files[0].index.entries["w"].runs) > 1
    reshard.plan(source, TARGET).run(tmp_path / "b")
    assert_rank_files(tmp_path / "b", FULL, TARGET)


def test_text_survives_both_formats(tmp_path: Path) -> None:
    strategy = Strategy.of({"b": Layout.of([2], [0])})
    full = {"b": FULL["b"]}
    write_ranks(tmp_path / "a", full, strategy, "ckpt", also={"note": "päd → ✓"})
    for step, format in enumerate(["ckpt", "safetensors", "safetensors", "ckpt"]):
        source = reshard.open(tmp_path / "abcde"[step], strategy=strategy)
        assert source.tensors["note"].text == "päd → ✓"
        reshard.plan(source, strategy, to=format).run(tmp_path / "abcde"[step + 1])
    assert {p.stem: p.read_bytes() for p in (tmp_path / "a").rglob("*.ckpt")} == {
        p.stem: p.read_bytes() for p in (tmp_path / "e").rglob("*.ckpt")
    }


def test_a_thousand_ranks_under_few_open_files(tmp_path: Path) -> None:
    script = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from checkpoints import numbers, write_ranks, assert_rank_files
import reshard
from reshard import Layout, Strategy
before, after = Strategy.of({"w": Layout.of([1200], [0])}), Strategy.of({"w": Layout.of([1000], [0])})
full = numbers({"w": (6000,)})
root = Path(sys.argv[1])
source = reshard.open(write_ranks(root / "a", full, before), strategy=before)
reshard.plan(source, after).run(root / "b", fsync=False)
assert_rank_files(root / "b", full, after)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parents[1])],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# --- what is refused, and what a failure leaves ---


def test_an_existing_target_file_is_refused_without_overwrite(source: reshard.Checkpoint, tmp_path: Path) -> None:
    made = reshard.plan(source, TARGET)
    made.run(tmp_path / "out")
    before = tree(tmp_path / "out")
    (tmp_path / "out/rank_3/checkpoint_3.ckpt").write_bytes(b"mine")
    with refused(TargetError, "already-exists", "rank_3/checkpoint_3.ckpt", "overwrite=True") as caught:
        made.run(tmp_path / "out")
    assert caught.value.exit_code == 6
    assert (tmp_path / "out/rank_3/checkpoint_3.ckpt").read_bytes() == b"mine"
    made.run(tmp_path / "out", overwrite=True)
    assert tree(tmp_path / "out") == before


def test_the_source_is_never_overwritten(source: reshard.Checkpoint, tmp_path: Path) -> None:
    made = reshard.plan(source, ROWS)
    (tmp_path / "link").symlink_to(tmp_path / "src")
    for directory in (tmp_path / "src", tmp_path / "link"):
        with refused(TargetError, "target-is-source", "rank_0"):
            made.run(directory, overwrite=True)


def test_a_link_does_not_lead_out_of_the_target(source: reshard.Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out/rank_0").symlink_to(tmp_path / "elsewhere")
    with refused(TargetError, "outside-directory", tmp_path / "out/rank_0", tmp_path / "elsewhere"):
        reshard.plan(source, TARGET).run(tmp_path / "out")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_replicas_stored_once(tmp_path: Path) -> None:
    """Every block is in one file, as many bytes in each as can be, and what is written opens and converts as all do."""
    shapes = {f"w{i}": (16, 8 + 8 * (i % 3)) for i in range(12)} | {"b": (8,)}
    full = numbers(shapes)
    spread = Strategy.of({name: Layout.of([2, 4], [0] + [-1] * (len(shape) - 1)) for name, shape in shapes.items()})
    path = write_file(tmp_path / "whole.ckpt", {**full, "global_step": np.array(7, np.int32)}, "ckpt")
    for format in ("safetensors", "ckpt"):
        made = reshard.plan(reshard.open(path), spread, to=format, remove_redundancy=True)
        assert made.stats.bytes_written == sum(array.nbytes for array in full.values()) + 8 * 4
        made.run(tmp_path / format)
        sizes = [sum(p.stat().st_size for p in (tmp_path / format / f"rank_{r}").iterdir()) for r in range(8)]
        assert max(sizes) < 1.5 * min(sizes)
        again = reshard.open(tmp_path / format, strategy=spread)
        if format == "safetensors":
            assert all(file.index.deduplicated for file in again._record.files)
        reshard.plan(again, to="ckpt").run(tmp_path / f"{format}_back")
        assert helpers.read_rank_file(tmp_path / f"{format}_back/rank_0/checkpoint_0.ckpt") == helpers.read_rank_file(
            path
        )


def test_no_rank_of_a_deduplicated_set_is_empty(tmp_path: Path) -> None:
    """MindSpore cannot load a file without any tensor."""
    path = write_file(tmp_path / "whole.safetensors", numbers({"w": (4, 4), "b": (2,)}))
    everywhere = Strategy.of({"w": Layout.of([8], [-1, -1]), "b": Layout.of([8], [-1])})
    reshard.plan(reshard.open(path), everywhere, remove_redundancy=True).run(tmp_path / "out")
    held = [list(file.index.entries) for file in reshard.open(tmp_path / "out", strategy=everywhere)._record.files]
    assert sorted(map(len, held)) == [1] * 8
    assert held.count(["w"]) == 1


def test_a_unified_set_does_not_hide_its_source(source: reshard.Checkpoint, tmp_path: Path) -> None:
    made = reshard.plan(source, to="mindspore")
    with refused(TargetError, "overlaps", tmp_path / "src"):
        made.run(tmp_path / "src", overwrite=True)


@pytest.mark.parametrize(("target", "said"), [("src/out", "is inside its source"), (".", "has its source inside")])
def test_a_target_is_apart_from_its_source(source: reshard.Checkpoint, tmp_path: Path, target: str, said: str) -> None:
    before = tree(tmp_path)
    for overwrite in (False, True):
        with refused(TargetError, "overlaps", said):
            reshard.plan(source, TARGET).run(tmp_path / target, overwrite=overwrite)
        assert tree(tmp_path) == before


@pytest.mark.slow
def test_one_tensor_of_16_gb_within_512_mb(tmp_path: Path) -> None:
    """A sparse file with numbers at random places, so that skipping holes cannot pass; peak against prediction."""
    shape = (1 << 17, 1 << 16)  # two bytes each
    layout = ckpt.lay_out([Content("w", BY_NAME["bfloat16"], shape)], {})
    path = tmp_path / "w.ckpt"
    random = np.random.default_rng(0)
    spots = sorted(random.integers(0, shape[0] * shape[1], 200).tolist())
    runs = places(layout)["w"]
    with path.open("wb") as file:
        file.truncate(layout.size)
        for offset, literal in layout.literals:
            os.pwrite(file.fileno(), literal, offset)
        for place in spots:
            part, within = divmod(2 * place, ckpt.PART_BYTES)
            os.pwrite(file.fileno(), (place % 65521 + 1).to_bytes(2, "little"), runs[part][0] + within)
    script = """
import sys
import reshard
from reshard import Layout, Strategy
target = Strategy.of({"w": Layout.of([3, 8], [-1, 0])})
plan = reshard.plan(reshard.open(sys.argv[1]), target, memory=512 << 20, format="safetensors", ranks=[2, 5])
plan.run(sys.argv[2], fsync=False)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(plan.stats.peak_memory, int(peak.split()[1]) * 1024)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(path), str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    predicted, peak = map(int, done.stdout.split())
    assert peak <= predicted <= 512 << 20
    found = {}
    for rank in (2, 5):
        entry = reshard.open(tmp_path / f"out/rank_{rank}/checkpoint_{rank}.safetensors")
        ((offset, nbytes),) = entry._record.files[0].index.entries["w"].runs
        assert nbytes == 2 * shape[0] * shape[1] // 8
        bits = np.memmap(entry._record.files[0].path, np.uint16, offset=offset, mode="r")
        for start in range(0, len(bits), 1 << 26):
            for index in np.flatnonzero(bits[start : start + (1 << 26)]):
                row, column = divmod(start + int(index), shape[1] // 8)
                found[row * shape[1] + rank * shape[1] // 8 + column] = int(bits[start + index])
    expected = {p: p % 65521 + 1 for p in spots if p % shape[1] // (shape[1] // 8) in {2, 5}}
    assert found == expected


def test_an_encrypted_source(tmp_path: Path, mindspore_data: Path) -> None:
    pytest.importorskip("cryptography")
    from reshard.core.storage.cipher import Cipher

    path = mindspore_data / "encrypted" / "aes-gcm.ckpt"
    with refused(SourceError, "encrypted", path):
        reshard.open(path)
    source = reshard.open(path, cipher=Cipher("AES-GCM", b"0123456789ABCDEF"))
    full = np.load(mindspore_data / "encrypted" / "full.npz")
    assert np.array_equal(source["w.f32"].compute(), full["w.f32"])
    reshard.plan(source, Strategy.of({"w.f32": Layout.of([3], [0, -1])})).run(tmp_path)
    written = reshard.open(tmp_path / "rank_1" / "checkpoint_1.ckpt")
    assert np.array_equal(written["w.f32"].compute(), full["w.f32"][2:4])


def test_a_plan_with_nothing_to_move_makes_its_files_first(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.ckpt", {"note": "text", "empty": np.zeros((0, 3), np.float32)}, "ckpt")
    for attempt in range(20):
        reshard.plan(reshard.open(path)).run(tmp_path / f"{attempt}", threads=4)
        assert (tmp_path / f"{attempt}" / "rank_0" / "checkpoint_0.ckpt").read_bytes() == path.read_bytes()


def test_unknown_schedulers_and_no_threads(source: reshard.Checkpoint, tmp_path: Path) -> None:
    made = reshard.plan(source, TARGET)
    with refused(UsageError, "unknown-scheduler", "'quick'"):
        made.run(tmp_path / "out", client="quick")
    with refused(UsageError, "out-of-range", "threads is 0"):
        made.run(tmp_path / "out", threads=0)


def test_handles_are_closed(source: reshard.Checkpoint, tmp_path: Path) -> None:
    reshard.plan(source, TARGET).run(tmp_path / "out")
    assert not store.local_store().files.handles
    assert plan is reshard.plan  # the function, though a module has its name
