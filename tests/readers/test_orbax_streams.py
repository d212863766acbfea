"""Chunks of Orbax's checkpoints that are decoded piece by piece, each once and with prefetching."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pytest
from checkpoints import assert_equal
from commands import done
from orbax_files import Database, add_array, write_orbax, write_tree
from refusals import one_line

import reshard
from reshard.core.open import open as open_record
from reshard.core.plan import budget
from reshard.core.storage.local import LocalStore
from reshard.formats.zarr import blocks
from reshard.kits import chunks

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All compressed chunks in files are decoded piece by piece."""
    monkeypatch.setattr(blocks, "LONGEST_WHOLE", 0)
    monkeypatch.setattr(chunks, "_PIECE_BYTES", 1000)


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("zarr3", [False, True])
@pytest.mark.parametrize("chunk", [(40, 30), (20, 15), (7, 30), (40, 7)])
def test_long_chunks_are_decoded_piece_by_piece(tmp_path: Path, zarr3: bool, chunk: tuple[int, int]) -> None:
    """In order, backwards, in steps, side by side, and in the order of another program."""
    store = Database(tmp_path / "in", inline=0)
    w = np.random.default_rng(0).integers(0, 50, (40, 30)).astype(np.float32)
    add_array(store, "w", w, chunk, zarr3=zarr3)
    store.finish()
    write_tree(tmp_path / "in", [("w",)])
    source = reshard.open(tmp_path / "in")
    assert_equal(source, {"w": w})
    for index in (np.s_[::-1], np.s_[3:37:5, 2:29:3], np.s_[30:, :4], np.s_[:4, 20:], np.s_[39, 29]):
        assert source["w"][index].compute().tobytes() == w[index].tobytes()
    done("convert", tmp_path / "in", tmp_path / "out", "--to", "hf")
    assert_equal(reshard.open(tmp_path / "out"), {"w": w})
    (tmp_path / "rules.yaml").write_text("{reshard-rules: 1, sides: [a, b], rules: [{a: w, b: {transpose: v}}]}")
    result = done("convert", tmp_path / "in", tmp_path / "b", "--to", "hf", "--rules", tmp_path / "rules.yaml")
    assert "decoded several times" in one_line(result.stderr)
    assert_equal(reshard.open(tmp_path / "b"), {"v": np.ascontiguousarray(w.T)})


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize(("chunk", "count", "tasks"), [((10, 15), 8, 2), ((40, 1), 30, 1)])
def test_each_long_chunk_is_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: tuple[int, int], count: int, tasks: int
) -> None:
    """Tasks are cut where chunks begin, and all chunks that share rows are open."""
    monkeypatch.setattr(budget, "TASK_BYTES", 1500)
    monkeypatch.setattr(budget, "BAND_BYTES", 500)
    full = write_orbax(tmp_path / "in", {"w": np.arange(1200, dtype=np.float32).reshape(40, 30)}, chunk=chunk, inline=0)
    opened = []

    real = chunks.DecodingStore._pieces

    def pieces(store: chunks.DecodingStore, one: chunks.Chunk, path: str) -> Any:
        opened.append((path, one.offset))
        return real(store, one, path)

    monkeypatch.setattr(chunks.DecodingStore, "_pieces", pieces)
    plan = reshard.plan(reshard.open(tmp_path / "in"), to="safetensors")
    assert plan.stats.tasks == tasks
    plan.run(tmp_path / "out", fsync=False)
    assert len(opened) == len(set(opened)) == count
    assert_equal(reshard.open(tmp_path / "out"), full)
    opened.clear()
    assert reshard.verify(tmp_path / "out", against=tmp_path / "in", threads=2).equal
    assert len(opened) == len(set(opened)) == count


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("threads", [1, 2])
def test_chunks_of_later_tasks_are_prefetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """When a task begins, those of the task that comes `threads` later; never if other processes may do it."""
    monkeypatch.setattr(budget, "TASK_BYTES", 1199)
    full = write_orbax(
        tmp_path / "in", {"w": np.arange(1200, dtype=np.float32).reshape(40, 30)}, chunk=(10, 15), inline=0
    )
    coding = open_record(tmp_path / "in").coding
    assert isinstance(coding, chunks.Decoding)
    frames = [(path, *each[:2]) for path, encoded in coding.chunks.items() for each in encoded]
    hints: list[tuple[str, int, int]] = []
    monkeypatch.setattr(LocalStore, "prefetch", lambda _store, *hint: hints.append(hint))
    plan = reshard.plan(reshard.open(tmp_path / "in"), to="safetensors")
    assert plan.stats.tasks == 4
    plan.run(tmp_path / "out", threads=threads, fsync=False)
    assert sorted(hints) == sorted(frames)[threads * len(frames) // 4 :]
    assert_equal(reshard.open(tmp_path / "out"), full)
    hints.clear()
    plan.run(tmp_path / "cluster", client=dask.get, fsync=False)  # other processes may do the next task
    assert not hints


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("zarr3", [False, True])
def test_long_chunks_in_memory_are_never_whole(tmp_path: Path, zarr3: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those within a node, as zeros are, and those of the fill value."""
    full = np.arange(1200, dtype=np.int32).reshape(40, 30)
    full[:20], full[20:, 15:] = 0, 7
    store = Database(tmp_path / "in", inline=1 << 20)
    absent = "c/1/1" if zarr3 else "1.1"
    add_array(store, "w", full, (20, 15), zarr3=zarr3, fill=7, absent=[absent])
    store.finish()
    write_tree(tmp_path / "in", [("w",)], store_array_data_equal_to_fill_value=False)
    monkeypatch.setattr(chunks, "zstd_content", None)
    source = reshard.open(tmp_path / "in")
    assert_equal(source, {"w": full})
    for index in (np.s_[::-1], np.s_[3:37:5, 2:29:3], np.s_[39, 29]):
        assert source["w"][index].compute().tobytes() == full[index].tobytes()
    done("convert", tmp_path / "in", tmp_path / "out", "--to", "hf")
    assert_equal(reshard.open(tmp_path / "out"), {"w": full})


def test_a_thread_holds_chunks_and_streams_within_one_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "LONGEST_WHOLE", 900)
    monkeypatch.setattr(chunks, "_WINDOW_BYTES", 0)
    monkeypatch.setattr(chunks, "_PIECE_BYTES", 1000)
    store = Database(tmp_path, inline=0)
    long, short = np.arange(1200, dtype=np.float32).reshape(40, 30), np.arange(200, dtype=np.float32).reshape(10, 20)
    add_array(store, "long", long, (40, 6))
    add_array(store, "short", short, (10, 5))
    store.finish()
    write_tree(tmp_path, [("long",), ("short",)])
    coding = open_record(tmp_path).coding
    assert isinstance(coding, chunks.Decoding)
    decoded = coding.store()
    for path, encoded in coding.chunks.items():
        for number in range(1, len(encoded) + 1):
            decoded.read_into(path, number * chunks.STRIDE, memoryview(bytearray(4)))
            held = list(map(chunks._held_bytes, decoded._cache.entries.values()))
            assert sum(held) == decoded._cache.nbytes <= coding.held_bytes == 4800


@pytest.mark.parametrize("rules", [False, True])
def test_a_warning_only_of_chunks_that_are_decoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: bool
) -> None:
    """Not of strided ones, such as the last chunk of a row, whose elements are needed in order and once."""
    monkeypatch.setattr("reshard.formats.zarr.blocks._MOST_RUNS", 1)
    write_orbax(tmp_path / "in", {"w": np.arange(280, dtype=np.float32).reshape(40, 7)}, chunk=(40, 4), inline=0)
    (tmp_path / "rules.yaml").write_text("{reshard-rules: 1, sides: [a, b], rules: [{a: w, b: {transpose: v}}]}")
    options = ("--rules", tmp_path / "rules.yaml") if rules else ()
    result = done("convert", tmp_path / "in", tmp_path / "out", "--to", "hf", *options)
    assert ("1 tensor needs" in one_line(result.stderr)) == rules == ("warning" in result.stderr)
