"""zarr stores: written by the band engine and read by zarr; written by zarr and read here; and those that lie."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c
import ml_dtypes
import numpy as np
import pytest
import zarr
from checkpoints import Array, blocks_of, numbers, tree, write_file, write_ranks
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard import Layout, Selection, Strategy, ZarrGroup, planner
from reshard.block import Block
from reshard.cli import cli
from reshard.dtypes import BFLOAT16, BY_NAME
from reshard.errors import BudgetError, SourceError, TargetError, UsageError
from reshard.formats import Content, by_name
from reshard.formats import zarr as format_zarr
from reshard.graph import How, commit_files, create_files, move_task, withdraw_index
from reshard.resume import Session
from reshard.zarr_planner import provenance
from reshard.zarr_source import clipped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reshard.run import Progress

SHAPES = {"layers.0.wq": (8, 6), "layers.0.wo": (40, 30), "experts": (4, 6, 10), "norm": (7,)}
ROWS, COLUMNS = Layout.of([2], [0, -1]), Layout.of([2], [-1, 0])
SOURCE = Strategy.of(
    {
        "layers.0.wq": Layout.of([2], [0, -1]),
        "layers.0.wo": COLUMNS,
        "bits": ROWS,
        "experts": Layout.of([2], [-1, 0, -1]),
    }
)
TARGET = Strategy.of(
    {"layers.0.wq": Layout.of([3], [-1, 0]), "layers.0.wo": Layout.of([3], [-1, 0]), "bits": Layout.of([3], [-1, -1]),
     "experts": Layout.of([3], [-1, 0, -1])}
)  # fmt: skip
FULL = numbers({name: SHAPES[name] for name in ("layers.0.wq", "layers.0.wo", "experts")})
FULL["bits"] = np.arange(64, dtype=np.uint16).reshape(8, 8)  # stands for bfloat16
ALSO: dict[str, Array | str] = {
    "norm": np.arange(7, dtype=np.float32), "global_step": np.array(7, np.int32), "none": np.zeros((0, 3), np.float32),
    "run": "größe",
}  # fmt: skip
GROUPS = {
    "blocks": ZarrGroup(),
    "a file a chunk": ZarrGroup(shard_bytes=0),
    "chunks": ZarrGroup(chunk_bytes=100),
    "odd shards": ZarrGroup(chunk_bytes=100, shard_bytes=300),
    "zstd": ZarrGroup(compression="zstd:3"),
    "zstd chunks": ZarrGroup(chunk_bytes=100, shard_bytes=0, compression="zstd"),
    "zstd shards": ZarrGroup(chunk_bytes=100, shard_bytes=700, compression="zstd:-3"),
}


@pytest.fixture
def source(tmp_path: Path) -> reshard.Checkpoint:
    return reshard.open(write_ranks(tmp_path / "src", FULL, SOURCE, also=ALSO), strategy=SOURCE)


@pytest.fixture(params=["whole", "small"])
def tasks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with bands of a few rows, and many tasks."""
    if request.param == "small":
        monkeypatch.setattr(planner, "BAND_BYTES", 64)
        monkeypatch.setattr(planner, "TASK_BYTES", 512)


def bits(value: Any) -> Array:
    array = np.asarray(value)
    return array.view(f"V{array.itemsize}") if array.shape else array


def assert_same(found: Any, expected: Any) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


# --- written here -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_there_and_back(source: reshard.Checkpoint, tmp_path: Path, group: ZarrGroup, tasks: None) -> None:
    """zarr reads what is written, and so do we: as arrays, and as a source that gives what the first source does."""
    store = tmp_path / "model.zarr"
    plan = reshard.plan(source, files=group)
    report = plan.run(store, threads=3)
    assert report.bytes_read == plan.stats.bytes_read == sum(v.nbytes for v in FULL.values()) + 7 * 4 + 4
    opened, own = zarr.open_group(store, mode="r"), reshard.open(store)
    whole = {**FULL, **{name: value for name, value in ALSO.items() if not isinstance(value, str)}}
    assert {name for name, _ in opened.members()} == set(whole)
    for name, value in whole.items():
        assert_same(opened[name][...], value)
        assert_same(own[name].compute(), value)
        if value.ndim > 1 and value.size:
            assert_same(own[name][1:4:2, ..., 1:3].compute(), value[1:4:2, ..., 1:3])
    assert own.tensors["run"].text == "größe"
    assert own.tensors["bits"].spec.dtype.name == "bfloat16"
    assert set(own) == set(source)
    assert {name: own.tensors[name].listed for name in own} == {name: source.tensors[name].listed for name in source}
    reshard.plan(own, TARGET).run(tmp_path / "via")
    reshard.plan(source, TARGET).run(tmp_path / "direct")
    assert tree(tmp_path / "via") == tree(tmp_path / "direct")


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_the_same_bytes_whoever_writes_them(
    source: reshard.Checkpoint, tmp_path: Path, group: ZarrGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "first"
    reshard.plan(source, files=group).run(first, scheduler="synchronous")
    monkeypatch.setattr(planner, "BAND_BYTES", 64)
    monkeypatch.setattr(planner, "TASK_BYTES", 512)
    moved = shutil.copytree(source.root, tmp_path / "elsewhere")
    for attempt in range(4):
        again = reshard.plan(reshard.open(moved, strategy=SOURCE), files=group)
        again.run(tmp_path / f"{attempt}", threads=4, fsync=False)
        assert tree(tmp_path / f"{attempt}") == tree(first)


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_metadata_are_what_zarr_itself_writes(source: reshard.Checkpoint, tmp_path: Path, group: ZarrGroup) -> None:
    store = tmp_path / "model.zarr"
    reshard.plan(source, files=group).run(store)
    theirs = zarr.open_group(tmp_path / "theirs.zarr", mode="w")
    theirs.update_attributes(json.loads((store / "zarr.json").read_text())["attributes"])
    for name, array in zarr.open_group(store, mode="r").members():
        assert isinstance(array, zarr.Array)
        theirs.create_array(
            name, shape=array.shape, dtype=array.dtype, chunks=array.chunks, shards=array.shards,
            compressors=array.compressors or None, filters=None, attributes=dict(array.attrs),
            chunk_key_encoding={"name": "default", "separator": "."},
        )  # fmt: skip
    found = {path.relative_to(store): path.read_bytes() for path in store.rglob("zarr.json")}
    expected = {
        path.relative_to(theirs.store.root): path.read_bytes() for path in Path(theirs.store.root).rglob("zarr.json")
    }  # type: ignore[attr-defined]
    assert {path: json.loads(content) for path, content in found.items()} == {
        path: {
            key: value for key, value in json.loads(content).items() if (key, value) != ("consolidated_metadata", None)
        }
        for path, content in expected.items()
    }  # zarr 3.0 says that there is none


@pytest.mark.parametrize("group", [g for g in GROUPS.values() if g.compression is None])
def test_chunks_are_what_zarr_itself_writes(source: reshard.Checkpoint, tmp_path: Path, group: ZarrGroup) -> None:
    """Byte for byte; of shards zarr orders the chunks otherwise, so they are read back above."""
    store = tmp_path / "model.zarr"
    reshard.plan(source, files=group).run(store)
    for name, array in zarr.open_group(store, mode="r").members():
        assert isinstance(array, zarr.Array)
        if array.shards is None:
            theirs = zarr.create_array(
                tmp_path / "theirs" / name, shape=array.shape, dtype=array.dtype, chunks=array.chunks, compressors=None,
                config={"write_empty_chunks": True}, chunk_key_encoding={"name": "default", "separator": "."},
            )  # fmt: skip
            theirs[...] = array[...]
            ours = {k: v for k, v in tree(store / name).items() if k != "zarr.json"}
            assert ours == {k: v for k, v in tree(tmp_path / "theirs" / name).items() if k != "zarr.json"}


def test_chunks_are_the_source_blocks(source: reshard.Checkpoint, tmp_path: Path) -> None:
    source.to_zarr(tmp_path / "z", shard_bytes=0)
    own = reshard.open(tmp_path / "z")
    for name in FULL:
        assert [shard.block for shard in own.tensors[name].shards] == [s.block for s in source.tensors[name].shards]
    attributes = zarr.open_group(tmp_path / "z", mode="r")["layers.0.wo"].attrs["reshard"]
    assert attributes == {"dtype": "float32", "listed": True, "layout": "[2] map [-1, 0]"}


def test_every_dtype_survives(tmp_path: Path) -> None:
    kinds = {name: dtype for name, dtype in BY_NAME.items() if name != "str" and dtype.safetensors is not None}
    content = np.random.default_rng(0).bytes(8 * 24)
    whole = {
        name: np.frombuffer(content[: 24 * dtype.itemsize], np.uint8).reshape(4, 6, dtype.itemsize)
        for name, dtype in kinds.items()
    }
    layout = by_name("safetensors").lay_out([Content(name, kind, (4, 6)) for name, kind in kinds.items()], {})
    written = bytearray(layout.size)
    for offset, literal in layout.literals:
        written[offset : offset + len(literal)] = literal
    for name, ((offset, nbytes),) in layout.places.items():
        written[offset : offset + nbytes] = whole[name].tobytes()
    (tmp_path / "all.safetensors").write_bytes(written)
    for compression in (None, "zstd"):
        store = tmp_path / f"{compression}.zarr"
        reshard.open(tmp_path / "all.safetensors").to_zarr(store, chunk_bytes=20, compression=compression)
        own = reshard.open(store)
        assert {name: tensor.spec.dtype.name for name, tensor in own.tensors.items()} == {name: name for name in kinds}
        reshard.plan(own).run(tmp_path / "back", overwrite=True)
        assert (tmp_path / "back/rank_0/checkpoint_0.safetensors").read_bytes()[-24:] == written[-24:]
        again = reshard.open(tmp_path / "back")
        for name in kinds:
            assert_same(again[name].compute(), own[name].compute())
            assert own[name].compute().tobytes() == whole[name].tobytes()
    assert reshard.open(store)["bfloat16"].dtype == ml_dtypes.bfloat16


HOSTILE = ["../x", "a/b", "/etc/passwd", ".", "..", "zarr.json", "zarr.json.partial", "__reserved", "c", "%41", "ä ö",
           "a\nb", "\x1b[31m", ".zgroup", "a\\b", "<b>"]  # fmt: skip


def test_names_that_lead_astray_stay_in_the_store(tmp_path: Path) -> None:
    full = {name: np.full((2, 3), number, np.float32) for number, name in enumerate(HOSTILE)}
    path = write_file(tmp_path / "in" / "a.safetensors", full)
    reshard.open(path).to_zarr(tmp_path / "out" / "model.zarr")
    assert {p.name for p in tmp_path.iterdir()} == {"in", "out"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"model.zarr"}
    own = reshard.open(tmp_path / "out" / "model.zarr")
    assert set(own) == set(HOSTILE)
    assert all(np.array_equal(own[name].compute(), value) for name, value in full.items())
    for name, array in zarr.open_group(tmp_path / "out" / "model.zarr", mode="r").members():
        assert isinstance(array, zarr.Array)
        real = array.attrs["reshard"].get("name", name)  # type: ignore[union-attr]
        assert np.array_equal(array[...], full[real])


def test_a_name_too_long_for_a_directory(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.safetensors", {"x" * 300: np.zeros(2, np.float32)})
    with pytest.raises(UsageError, match="is 300 bytes as that of a directory; at most 255"):
        reshard.open(path).to_zarr(tmp_path / "z")
    assert not (tmp_path / "z").exists()


@given(name=st.text(min_size=0, max_size=20), other=st.text(max_size=20))
def test_escaped_names_are_those_of_one_directory_each(name: str, other: str) -> None:
    text = format_zarr.escaped(name)
    assert Path("root", text).parent == Path("root")
    assert text
    assert not text.startswith((".", "__", "zarr.json"))
    assert (text == format_zarr.escaped(other)) == (name == other)


@given(shape=st.lists(st.integers(1, 40), max_size=4).map(tuple), most=st.integers(0, 3000))
def test_chunks_cut(shape: tuple[int, ...], most: int) -> None:
    chunk = format_zarr.cut(shape, most)
    assert len(chunk) == len(shape)
    assert all(1 <= part <= extent for part, extent in zip(chunk, shape, strict=True))
    assert np.prod(chunk) <= max(most, 1)
    array = format_zarr.Array(shape, BFLOAT16, chunk, None, None)
    covered = np.zeros(shape, int)
    for block in array.blocks:
        covered[block.within(block.whole(shape))] += 1
    assert (covered == 1).all()


@given(chunk=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), data=st.data())
def test_clipped_chunks_lie_where_numpy_has_them(chunk: tuple[int, ...], data: st.DataObject) -> None:
    shape = tuple(data.draw(st.integers(1, extent)) for extent in chunk)
    whole = np.arange(np.prod(chunk), dtype=np.uint16).reshape(chunk)
    content = b"xyz" + whole.tobytes()
    runs = clipped(3, chunk, shape, 2)
    assert runs is not None
    found = b"".join(content[offset : offset + nbytes] for offset, nbytes in runs)
    assert found == np.ascontiguousarray(whole[tuple(map(slice, shape))]).tobytes()


def test_what_contradicts_itself_is_refused(source: reshard.Checkpoint) -> None:
    for files, match in (({"chunk_bytes": 0}, "at least 1"), ({"shard_bytes": -1}, "at least 0"),
                         ({"compression": "gzip"}, "expected zstd"), ({"compression": "zstd:99"}, "at most 22"),
                         ({"compression": "zstd:fast"}, "expected zstd")):  # fmt: skip
        with pytest.raises(UsageError, match=match):
            ZarrGroup(**files)  # type: ignore[arg-type]
    for options in ({"ranks": [0]}, {"remove_redundancy": True}, {"link_replicas": True}):
        with pytest.raises(UsageError, match="holds whole tensors"):
            reshard.plan(source, format="zarr", **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="holds whole tensors"):
        reshard.plan(source, TARGET, format="zarr")
    with pytest.raises(UsageError, match="do not go together"):
        reshard.plan(source, format="ckpt", files=ZarrGroup())


def test_selection_casts_and_names(source: reshard.Checkpoint, tmp_path: Path) -> None:
    wishes = Selection(include=("layers.*",), names={"layers.0.*": "model.*"}, cast={"float32": "bfloat16"})
    source.to_zarr(tmp_path / "z", selection=wishes, compression="zstd")
    own = reshard.open(tmp_path / "z")
    assert set(own) == {"model.wq", "model.wo"}
    assert_same(own["model.wo"].compute(), FULL["layers.0.wo"].astype(ml_dtypes.bfloat16))


def test_the_rank_of_a_plan_is_whole(source: reshard.Checkpoint) -> None:
    rank = reshard.plan(source, files=ZarrGroup()).rank(0)
    assert_same(rank["layers.0.wo"].compute(), FULL["layers.0.wo"])


# --- finished or not --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_the_group_is_there_when_all_is(
    source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None
) -> None:
    store = tmp_path / "z"
    order: list[str] = []
    real = os.replace

    def replace(old: str, new: str) -> None:
        assert old == new + ".partial"
        order.append(new)
        real(old, new)

    monkeypatch.setattr(os, "replace", replace)
    source.to_zarr(store, compression=compression)
    assert order[-1] == f"{store}/zarr.json"
    assert set(order) == {str(path) for path in store.rglob("*") if path.is_file()}


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_failure_leaves_nothing(
    source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None
) -> None:
    store = tmp_path / "z"
    real, count = os.pwrite, 0

    def pwrite(fd: int, content: memoryview, offset: int) -> int:
        nonlocal count
        count += 1
        if count == 12:
            raise OSError(28, "No space left on device")
        return real(fd, content, offset)

    plan = reshard.plan(source, files=ZarrGroup(chunk_bytes=400, compression=compression))
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", pwrite)
        with pytest.raises(BudgetError, match="No space left"):
            plan.run(store)
    assert not list(store.rglob("*"))
    plan.run(store)  # the same plan again: nothing of the failed run is remembered
    assert_same(reshard.open(store)["layers.0.wo"].compute(), FULL["layers.0.wo"])


class Killed(BaseException):
    """Ends a run as a kill does, with no time to clean up."""


@pytest.fixture
def unclean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed run notes what it wrote, and leaves everything as it is."""
    monkeypatch.setattr(Session, "failed", lambda session, _error, *_changed: session.flush())


def killed_at(call: int, name: str, run: Callable[[], object]) -> int:
    """Have a run end at a call of a function of `os`; return how many there were."""
    real, count = getattr(os, name), 0

    def killing(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            raise Killed
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, name, killing)
        if call:
            with pytest.raises(Killed):
                run()
        else:
            run()
    return count


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize(("name", "share"), [("pwrite", 0.7), ("pwrite", 1), ("replace", 0.3), ("replace", 1)])
@pytest.mark.usefixtures("unclean")
def test_a_run_goes_on_where_one_was_killed(
    source: reshard.Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: ZarrGroup,
    name: str,
    share: float,
) -> None:
    """Ranges of plain files, and whole files of any kind; at the end nothing but the store is there."""
    monkeypatch.setattr(planner, "TASK_BYTES", 512)
    plan = reshard.plan(source, files=group)
    count = killed_at(0, name, lambda: plan.run(tmp_path / "whole", scheduler="synchronous"))
    store = tmp_path / "z"
    killed_at(round(share * count), name, lambda: plan.run(store, scheduler="synchronous"))
    assert (store / ".reshard").is_dir()
    with pytest.raises(SourceError, match="unfinished"):
        reshard.open(store)
    report = plan.run(store)
    assert report.resumed + report.bytes_written == plan.stats.bytes_written
    if name == "replace" and (share == 1 or not plan.coding):
        assert report.resumed == plan.stats.bytes_written
    elif not plan.coding or name == "replace":
        assert 0 < report.resumed < plan.stats.bytes_written
    assert tree(store) == tree(tmp_path / "whole")


@pytest.mark.usefixtures("unclean")
def test_chunks_of_another_coding_are_not_gone_on_with(source: reshard.Checkpoint, tmp_path: Path) -> None:
    """A plain chunk that has its name already, and would be at the same path compressed, is not taken for that."""
    store = tmp_path / "z"
    killed_at(6, "replace", lambda: source.to_zarr(store, shard_bytes=0))
    with pytest.raises(TargetError, match="by a run of another plan"):
        source.to_zarr(store, shard_bytes=0, compression="zstd")
    source.to_zarr(store, shard_bytes=0, compression="zstd", restart=True)
    assert_same(reshard.open(store)["layers.0.wo"].compute(), FULL["layers.0.wo"])
    assert not (store / ".reshard").exists()


def test_without_a_journal_nothing_of_an_unfinished_file_stays(source: reshard.Checkpoint, tmp_path: Path) -> None:
    plan = reshard.plan(source, files=GROUPS["chunks"])  # of which some go beyond their tensor
    plan.run(tmp_path / "whole")
    for file in plan.files:
        path = tmp_path / "z" / f"{file.path}.partial"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * file.layout.size)
    plan.run(tmp_path / "z", journal=False)
    assert tree(tmp_path / "z") == tree(tmp_path / "whole")


def test_making_files_again_leaves_what_is_in_them(source: reshard.Checkpoint, tmp_path: Path) -> None:
    """As on a cluster that lost the worker with the receipts of that, while others were writing."""
    plan = reshard.plan(source, files=GROUPS["zstd shards"])
    plan.run(tmp_path / "whole")
    root, how = str(tmp_path / "z"), How(fsync=False)
    every = range(len(plan.files))
    create_files(plan, every, root, how)
    for number in range(len(plan.tasks)):
        move_task(plan, number, root, how, None)
        create_files(plan, every, root, how)
    withdraw_index(plan, root, None)
    commit_files(plan, every, root, how, None)
    assert tree(tmp_path / "z") == tree(tmp_path / "whole")


def test_an_unfinished_store_is_told(source: reshard.Checkpoint, tmp_path: Path) -> None:
    source.to_zarr(tmp_path / "z")
    (tmp_path / "z" / "zarr.json").rename(tmp_path / "z" / "zarr.json.partial")
    with pytest.raises(SourceError, match=r"unfinished: it has no zarr\.json at its root"):
        reshard.open(tmp_path / "z")


def test_another_store_in_the_way(source: reshard.Checkpoint, tmp_path: Path) -> None:
    store = tmp_path / "z"
    source.to_zarr(store, chunk_bytes=400)
    assert not (store / ".reshard").exists()  # zarr would warn of it
    with pytest.raises(TargetError, match="already; choose another"):
        source.to_zarr(store, chunk_bytes=400)
    source.to_zarr(store, chunk_bytes=400, overwrite=True)
    for overwrite in (False, True):  # chunks of the old one would be taken for the new one's
        with pytest.raises(TargetError, match="beside; choose another directory, or remove it"):
            source.to_zarr(store, selection=Selection(include=("bits",)), overwrite=overwrite)
    assert_same(reshard.open(store)["layers.0.wo"].compute(), FULL["layers.0.wo"])


def test_a_store_that_is_written_anew_has_no_group_meanwhile(
    source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "z"
    source.to_zarr(store)
    real = os.replace

    def replace(old: str, new: str) -> None:
        assert not (store / "zarr.json").exists()
        real(old, new)

    monkeypatch.setattr(os, "replace", replace)
    source.to_zarr(store, overwrite=True)
    assert_same(reshard.open(store)["bits"].compute().view(np.uint16), FULL["bits"])


def test_a_copy_that_differs_between_the_ranks_is_that_of_the_first(tmp_path: Path) -> None:
    for rank in range(2):
        state = {"w": np.zeros((2, 2), np.float32) + rank, "state": np.arange(4, dtype=np.int32) + rank}
        write_file(tmp_path / "src" / f"rank_{rank}" / "a.safetensors", state)
    strategy = Strategy.of({"w": Layout.of([2], [0, -1])})
    source = reshard.open(tmp_path / "src", strategy=strategy, layouts={"state": "copy"})
    source.to_zarr(tmp_path / "z")
    assert reshard.open(tmp_path / "z")["state"].compute().tolist() == [0, 1, 2, 3]


# --- written by zarr --------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"chunks": (4, 3), "compressors": None},
    "whole": {"chunks": (10, 7), "compressors": None},
    "shards": {"chunks": (2, 3), "shards": (4, 6), "compressors": None},
    "row shards": {"chunks": (1, 7), "shards": (4, 7), "compressors": None},
    "dots": {"chunks": (4, 3), "compressors": None, "chunk_key_encoding": {"name": "default", "separator": "."}},
    "v2 keys": {"chunks": (4, 3), "compressors": None, "chunk_key_encoding": {"name": "v2", "separator": "."}},
    "zstd": {"chunks": (4, 3), "compressors": zarr.codecs.ZstdCodec(level=1)},
    "zstd checksum": {"chunks": (4, 3), "compressors": zarr.codecs.ZstdCodec(level=1, checksum=True)},
    "zstd shards": {"chunks": (2, 3), "shards": (4, 6), "compressors": zarr.codecs.ZstdCodec()},
    "gzip": {"chunks": (4, 3), "compressors": zarr.codecs.GzipCodec()},
    "blosc shards": {"chunks": (2, 3), "shards": (4, 6), "compressors": zarr.codecs.BloscCodec()},
    "big endian": {"chunks": (4, 3), "compressors": None, "serializer": zarr.codecs.BytesCodec(endian="big")},
    "transposed": {"chunks": (4, 3), "compressors": None, "filters": [zarr.codecs.TransposeCodec(order=(1, 0))]},
    "default": {"chunks": (3, 3)},
}


@pytest.mark.parametrize("dtype", ["float32", "int16", "bool", "complex64"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_stores_that_zarr_wrote(tmp_path: Path, options: dict[str, Any], dtype: str, tasks: None) -> None:
    """Whole arrays, arrays with absent chunks, and slices; also as a source."""
    value = np.random.default_rng(0).integers(1, 100, (10, 7)).astype(dtype)
    sparse = np.full((10, 7), 1, dtype)
    sparse[3:5, 2:4] = value[3:5, 2:4]
    fill = 1.5 - 2j if dtype == "complex64" else 2.5 if dtype == "float32" else 1
    group = zarr.open_group(tmp_path / "z", mode="w")
    for name, content in (("full", value), ("layers/0/sparse", sparse)):
        array = group.create_array(name, shape=(10, 7), dtype=dtype, fill_value=fill, **options)
        if name == "full":
            array[...] = content
        else:
            array[3:5, 2:4] = content[3:5, 2:4]
            sparse = np.asarray(array[...])
    expected = {"full": value, "layers/0/sparse": sparse}
    own = reshard.open(tmp_path / "z")
    assert set(own) == set(expected)
    for name, content in expected.items():
        assert_same(own[name].compute(), content)
        assert_same(own[name][1:9:3, 2:6].compute(), content[1:9:3, 2:6])
    target = Strategy.of({name: Layout.of([5], [0, -1]) for name in expected})
    reshard.plan(own, target).run(tmp_path / "out", threads=2)
    for rank in range(5):
        found = reshard.open(tmp_path / "out" / f"rank_{rank}")
        for name, content in expected.items():
            assert_same(found[name].compute(), content[2 * rank : 2 * rank + 2])


@pytest.mark.parametrize("location", ["start", "end"])
def test_an_index_at_either_end_of_a_shard(tmp_path: Path, location: str) -> None:
    value = np.arange(70, dtype=np.int32).reshape(10, 7)
    codec = zarr.codecs.ShardingCodec(chunk_shape=(2, 3), codecs=[zarr.codecs.BytesCodec()], index_location=location)
    array = zarr.create_array(
        tmp_path / "z" / "w", shape=(10, 7), dtype="int32", chunks=(4, 6), serializer=codec, compressors=None
    )
    array[...] = value
    (tmp_path / "z" / "zarr.json").write_text('{"attributes": {}, "zarr_format": 3, "node_type": "group"}')
    assert np.array_equal(reshard.open(tmp_path / "z")["w"].compute(), value)


@pytest.mark.parametrize(
    ("fill", "dtype"),
    [("NaN", "float32"), ("-Infinity", "float64"), ("0x7fc00001", "float32"), (-3, "int8"), (True, "bool"),
     (-0.0, "float16")],
)  # fmt: skip
def test_absent_chunks_are_the_fill_value(tmp_path: Path, fill: Any, dtype: str) -> None:
    zarr.open_group(tmp_path / "z", mode="w").create_array("w", shape=(5, 4), dtype=dtype, chunks=(2, 2))
    path = tmp_path / "z" / "w" / "zarr.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "fill_value": fill}))
    found = reshard.open(tmp_path / "z")["w"].compute()
    if str(fill).startswith("0x"):  # bits, which zarr 3.0 does not read
        expected = np.full((5, 4), int(fill, 16), np.uint32).view(dtype)
    else:
        expected = np.asarray(zarr.open_array(tmp_path / "z" / "w", mode="r")[...])
    assert_same(found, expected)
    reshard.plan(reshard.open(tmp_path / "z")).run(tmp_path / "out")
    assert_same(reshard.open(tmp_path / "out")["w"].compute(), expected)


def test_slices_read_their_bytes_only(
    source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.to_zarr(tmp_path / "z")
    own = reshard.open(tmp_path / "z")
    read = 0
    real = reshard.store.LocalStore.read_into

    def counted(self: object, path: str, offset: int, buffer: memoryview) -> None:
        nonlocal read
        read += len(buffer)
        real(self, path, offset, buffer)  # type: ignore[arg-type]

    monkeypatch.setattr(reshard.store.LocalStore, "read_into", counted)
    assert_same(own["layers.0.wq"][2:4].compute(), FULL["layers.0.wq"][2:4])
    assert read == 2 * 6 * 4


def test_dtypes_that_no_checkpoint_has_are_not_readable(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "z", mode="w")
    group.create_array("w", shape=(4,), dtype="float32")[...] = 1
    group.create_array("c", shape=(4,), dtype="complex128")[...] = 1
    own = reshard.open(tmp_path / "z")
    assert set(own) == {"w"}
    with pytest.raises(SourceError, match="is of zarr's dtype 'complex128'.*--drop 'c'"):
        reshard.plan(own)
    reshard.plan(own, drop=["c"]).run(tmp_path / "out")


# --- stores that lie --------------------------------------------------------------------------------------------


@pytest.fixture
def lying(tmp_path: Path) -> Path:
    path = write_file(tmp_path / "w.safetensors", {"w": np.arange(48, dtype=np.float32).reshape(8, 6)})
    reshard.open(path).to_zarr(tmp_path / "plain", chunk_bytes=48, shard_bytes=0)
    reshard.open(path).to_zarr(tmp_path / "sharded", chunk_bytes=48, shard_bytes=96)
    reshard.open(path).to_zarr(tmp_path / "zstd", chunk_bytes=48, shard_bytes=0, compression="zstd")
    return tmp_path


def change(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def grid_of(*chunk: Any) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}


METADATA_LIES: dict[str, tuple[dict[str, Any], str]] = {
    "an absurd shape": ({"shape": [1 << 70, 6]}, "which is none"),
    "a product that overflows": ({"shape": [1 << 40, 1 << 40]}, "more bytes than any disk holds"),
    "negative": ({"shape": [-8, 6]}, "which is none"),
    "not numbers": ({"shape": ["8", 6]}, "which is none"),
    "true": ({"shape": [True, 6]}, "chunks|which is none"),
    "too many dims": ({"shape": [1] * 99, "chunk_grid": grid_of(*[1] * 99)}, "which is none"),
    "a chunk of nothing": ({"chunk_grid": grid_of(0, 6)}, "which is none"),
    "a chunk of another rank": ({"chunk_grid": grid_of(2, 6, 1)}, "do not fit each other"),
    "too many chunks": ({"shape": [1 << 30, 1 << 20], "chunk_grid": grid_of(1, 1)}, "at most 1048576 are taken"),
    "another grid": ({"chunk_grid": {"name": "rectilinear"}}, "chunk grid or names of another kind"),
    "other names": ({"chunk_key_encoding": {"name": "mine"}}, "names of another kind"),
    "a separator that leads away": (
        {"chunk_key_encoding": {"name": "default", "configuration": {"separator": "/../../"}}}, "separates"),
    "no codecs": ({"codecs": None}, "lacks what describes an array"),
    "another format": ({"zarr_format": 2}, "is no metadata of zarr's format 3"),
    "larger chunks than its files": ({"chunk_grid": grid_of(4, 6)}, "has 48 bytes; a chunk of float32 .* has 96"),
    "another dtype in the attributes": ({"attributes": {"reshard": {"dtype": "float64"}}}, "says dtype 'float64'"),
    "a fill value of another kind": ({"fill_value": {"a": 1}}, "which is no float32"),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "match"), METADATA_LIES.values(), ids=METADATA_LIES)
def test_metadata_that_lie(lying: Path, keys: dict[str, Any], match: str) -> None:
    change(lying / "plain" / "w" / "zarr.json", **keys)
    with pytest.raises(SourceError, match=match) as caught:
        reshard.open(lying / "plain")
    assert "\n" not in str(caught.value)


def test_a_chunk_that_is_cut_short_or_too_long(lying: Path) -> None:
    path = lying / "plain" / "w" / "c.1.0"
    for content in (path.read_bytes()[:-1], path.read_bytes() + b"x", b""):
        path.write_bytes(content)
        with pytest.raises(SourceError, match=r"c\.1\.0: has \d+ bytes; a chunk of float32 \[2, 6\] has 48"):
            reshard.open(lying / "plain")


def index_of(*spans: tuple[int, int]) -> bytes:
    content = b"".join(struct.pack("<QQ", *span) for span in spans)
    return content + struct.pack("<I", google_crc32c.value(content))


@pytest.mark.parametrize(
    ("index", "match"),
    [
        (index_of((0, 48), (48, 48))[:-1] + b"x", "checksum"),
        (index_of((0, 48), (60, 48)), "chunk 1 is said to be 48 bytes at 60"),
        (index_of((0, 47), (48, 48)), "chunk 0 is said to be 47 bytes at 0; expected 48"),
        (index_of((1 << 63, 48), (48, 48)), "chunk 0 is said"),
        (index_of((1 << 64) - 1 and ((1 << 64) - 1, 48), (48, 48)), "chunk 0 is said"),
    ],
)
def test_an_index_that_lies(lying: Path, index: bytes, match: str) -> None:
    path = lying / "sharded" / "w" / "c.0.0"
    path.write_bytes(path.read_bytes()[:-36] + index)
    with pytest.raises(SourceError, match=match):
        reshard.open(lying / "sharded")
    path.write_bytes(b"short")
    with pytest.raises(SourceError, match="the index alone of 2 chunks has 36"):
        reshard.open(lying / "sharded")


def compressed(nbytes: int) -> bytes:
    from numcodecs import zstd

    return bytes(zstd.compress(bytes(nbytes), 1))


@pytest.mark.parametrize(
    "content",
    [b"", b"not zstd at all", compressed(47), compressed(49), compressed(1 << 28), compressed(48)[:-2],
     compressed(48)[:5] + b"\xff" * 12],
    ids=["empty", "noise", "less", "more", "a bomb", "cut short", "damaged"],
)  # fmt: skip
def test_compressed_chunks_that_lie(lying: Path, content: bytes) -> None:
    (lying / "zstd" / "w" / "c.2.0").write_bytes(content)
    own = reshard.open(lying / "zstd")
    with pytest.raises(SourceError, match=r"c\.2\.0: chunk 0 cannot be decoded"):
        reshard.plan(own).run(lying / "out")
    with pytest.raises(SourceError, match=r"c\.2\.0: chunk 0 cannot be decoded"):
        own["w"].compute(scheduler="synchronous")
    assert not list((lying / "out").rglob("*"))


def test_a_codec_that_zarr_does_not_know(lying: Path) -> None:
    change(lying / "plain" / "w" / "zarr.json", codecs=[{"name": "bytes"}, {"name": "nobody.knows"}])
    with pytest.raises(SourceError, match="chunk 0 cannot be decoded: .*nobody"):
        reshard.open(lying / "plain")["w"].compute(scheduler="synchronous")


@pytest.mark.parametrize("which", ["w", "w/zarr.json", "w/c", "w/c/1", "w/c/1/0", "zarr.json"])
def test_links_are_not_followed(lying: Path, which: str) -> None:
    array = zarr.open_group(lying / "slashes", mode="w").create_array("w", shape=(8, 6), chunks=(2, 6), dtype="int8")
    array[...] = 1
    path = lying / "slashes" / which
    path.rename(lying / "outside")
    path.symlink_to(lying / "outside")
    with pytest.raises(SourceError, match="is a link; those in a zarr store are not followed"):
        reshard.open(lying / "slashes")


def test_a_group_that_lies_about_its_arrays(lying: Path) -> None:
    root = lying / "plain" / "zarr.json"
    whole = json.loads(root.read_text())
    own = whole["attributes"]["reshard"]
    for changed, match in (
        ({"tensors": ["w", "v"]}, "tensor 'v' is in the list of the group, and has no array"),
        ({"texts": {"w": "text"}}, "is both an array and a text"),
        ({"texts": {"t": 1}}, "no object of strings"),
        ({"notes": []}, "no object of strings"),
    ):
        root.write_text(json.dumps({**whole, "attributes": {"reshard": own | changed}}))
        with pytest.raises(SourceError, match=match):
            reshard.open(lying / "plain")
    shutil.copytree(lying / "plain" / "w", lying / "plain" / "x")
    change(lying / "plain" / "x" / "zarr.json", attributes={"reshard": {"name": "w"}})
    root.write_text(json.dumps(whole))
    with pytest.raises(SourceError, match="tensor 'w' is there a second time"):
        reshard.open(lying / "plain")
    root.write_text("[" * 100_000)
    with pytest.raises(SourceError, match="cannot be read as JSON"):
        reshard.open(lying / "plain")
    root.write_bytes((lying / "plain" / "w" / "zarr.json").read_bytes())
    with pytest.raises(SourceError, match="is of 'array'; expected the group"):
        reshard.open(lying / "plain")


def test_the_older_format_is_told(tmp_path: Path) -> None:
    zarr.open_group(tmp_path / "z", mode="w", zarr_format=2)
    with pytest.raises(SourceError, match="of zarr's format 2; expected 3"):
        reshard.open(tmp_path / "z")


def test_a_store_takes_no_strategy_and_is_not_converted(source: reshard.Checkpoint, tmp_path: Path) -> None:
    source.to_zarr(tmp_path / "z")
    with pytest.raises(UsageError, match="is a zarr store of whole tensors; give no strategy"):
        reshard.open(tmp_path / "z", strategy=SOURCE)
    done = invoke("convert", tmp_path / "z", tmp_path / "out", "--format", "ckpt")
    assert done.exit_code == 2
    assert "is a zarr store; `reshard transform`" in done.output


def test_what_a_store_is_not_made_for_is_refused(source: reshard.Checkpoint, tmp_path: Path) -> None:
    plan = reshard.plan(source, files=ZarrGroup())
    with pytest.raises(UsageError, match="in a local directory is written by tensor; leave ownership 'file' out"):
        plan.run(tmp_path / "z", ownership="file")
    plan.run(tmp_path / "z")
    with pytest.raises(UsageError, match="a manifest is of checkpoint files"):
        reshard.make_manifest(tmp_path / "z")
    with pytest.raises(UsageError, match="a plan of one cannot be saved"):
        reshard.plan(reshard.open(tmp_path / "z"), TARGET).save(tmp_path / "plan.json")
    assert reshard.open(f"file://{tmp_path}/z").format == "zarr"


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_a_plan_file_makes_the_same_store(source: reshard.Checkpoint, tmp_path: Path, group: ZarrGroup) -> None:
    plan = reshard.plan(source, files=group)
    plan.save(tmp_path / "plan.json")
    plan.run(tmp_path / "z")
    moved = shutil.copytree(source.root, tmp_path / "elsewhere")
    shutil.rmtree(source.root)
    reshard.read_plan(tmp_path / "plan.json", source=moved).run(tmp_path / "again")
    assert tree(tmp_path / "again") == tree(tmp_path / "z")


def test_a_plan_with_times_is_of_its_own_files(source: reshard.Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="with the times of its source files cannot be saved"):
        reshard.plan(source, files=ZarrGroup(times=True)).save(tmp_path / "plan.json")


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_store_is_verified_against_its_source(
    source: reshard.Checkpoint, tmp_path: Path, compression: str | None
) -> None:
    source.to_zarr(tmp_path / "z", compression=compression)
    assert reshard.verify(tmp_path / "z")
    found = reshard.verify(tmp_path / "z", against=source.root, source_strategy=SOURCE)
    assert found, found
    reshard.plan(reshard.open(tmp_path / "z"), TARGET).run(tmp_path / "out")
    assert reshard.verify(tmp_path / "out", TARGET, against=tmp_path / "z")
    changed = {**FULL, "layers.0.wo": FULL["layers.0.wo"] + np.eye(40, 30, dtype=np.float32)}
    other = write_ranks(tmp_path / "other", changed, SOURCE, also=ALSO)
    found = reshard.verify(tmp_path / "z", against=other, source_strategy=SOURCE)
    assert {difference.name for difference in found.differences} == {"layers.0.wo"}


# --- the command line -------------------------------------------------------------------------------------------


@pytest.fixture
def strategies(tmp_path: Path) -> tuple[Path, Path]:
    reshard.write_strategy(SOURCE, tmp_path / "source.ckpt")
    reshard.write_strategy(TARGET, tmp_path / "target.ckpt")
    return tmp_path / "source.ckpt", tmp_path / "target.ckpt"


def test_unify_to_zarr_and_split_again(
    source: reshard.Checkpoint, tmp_path: Path, strategies: tuple[Path, Path]
) -> None:
    store = tmp_path / "m.zarr"
    done = invoke(
        "unify", source.root, store, "--source-strategy", strategies[0], "--format", "zarr", "--chunk-size", "1kB",
        "--shard-size", "0", "--compression", "zstd:5",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    codecs = json.loads((store / "layers.0.wo" / "zarr.json").read_text())["codecs"]
    assert codecs[1] == {"name": "zstd", "configuration": {"level": 5, "checksum": False}}
    (proposed,) = [line for line in done.output.splitlines() if line.startswith("to verify it: ")]
    checked = invoke(*shlex.split(proposed.partition(": ")[2])[1:])
    assert checked.exit_code == 0, checked.output
    shown = invoke("inspect", store)
    assert shown.exit_code == 0
    assert "zarr" in shown.output
    assert invoke("transform", store, tmp_path / "out", "--target-strategy", strategies[1]).exit_code == 0
    reshard.plan(source, TARGET).run(tmp_path / "direct")
    assert tree(tmp_path / "out") == tree(tmp_path / "direct")


def test_options_of_the_other_format_are_refused(source: reshard.Checkpoint, tmp_path: Path) -> None:
    for options in (["--chunk-size", "1MB"], ["--format", "zarr", "--style", "huggingface"], ["--shard-size", "0"],
                    ["--format", "zarr", "--max-shard-size", "1GB"], ["--compression", "zstd"]):  # fmt: skip
        done = invoke("unify", source.root, tmp_path / "out", *options)
        assert done.exit_code == 2
        assert "are of --format zarr" in done.output


def test_via_zarr_and_again_without_the_source(
    source: reshard.Checkpoint, tmp_path: Path, strategies: tuple[Path, Path]
) -> None:
    store = tmp_path / "m.zarr"
    common = ["--source-strategy", strategies[0], "--target-strategy", strategies[1], "--via-zarr", store]
    reshard.plan(source, TARGET).run(tmp_path / "direct")
    dry = invoke("transform", source.root, tmp_path / "one", *common, "--dry-run", "--json")
    assert json.loads(dry.output)["format"] == "zarr"
    assert not store.exists()
    done = invoke("transform", source.root, tmp_path / "one", *common)
    assert done.exit_code == 0, done.output
    assert tree(tmp_path / "one") == tree(tmp_path / "direct")
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    done = invoke("transform", source.root, tmp_path / "two", *common)
    assert "is finished and of this source; it is used as it is" in done.output
    shutil.move(source.root, tmp_path / "gone")
    done = invoke("transform", source.root, tmp_path / "three", *common)
    assert done.exit_code == 0, done.output
    assert "is not there" in done.output
    assert before == {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    assert tree(tmp_path / "one") == tree(tmp_path / "two") == tree(tmp_path / "three")


def test_via_zarr_refuses_the_store_of_another_source(
    source: reshard.Checkpoint, tmp_path: Path, strategies: tuple[Path, Path]
) -> None:
    common = ["--source-strategy", strategies[0], "--target-strategy", strategies[1], "--via-zarr", tmp_path / "m.zarr"]
    assert invoke("transform", source.root, tmp_path / "one", *common).exit_code == 0
    Path(source.files[0].path).touch()
    done = invoke("transform", source.root, tmp_path / "two", *common)
    assert done.exit_code == 6
    assert "is finished, and of another source" in done.output
    assert not (tmp_path / "two").exists()


def test_via_zarr_goes_on_where_the_first_step_was_killed(
    source: reshard.Checkpoint, tmp_path: Path, strategies: tuple[Path, Path]
) -> None:
    store = tmp_path / "m.zarr"
    reshard.plan(source, files=ZarrGroup(times=True)).run(store)
    (store / "zarr.json").unlink()  # some files named, others not
    for path in list(store.rglob("c.*"))[::2]:
        path.rename(f"{path}.partial")
    common = ["--source-strategy", strategies[0], "--target-strategy", strategies[1], "--via-zarr", store]
    done = invoke("transform", source.root, tmp_path / "one", *common, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["source"] == str(store)
    reshard.plan(source, TARGET).run(tmp_path / "direct")
    assert tree(tmp_path / "one") == tree(tmp_path / "direct")
    assert not list(store.rglob("*.partial"))


def test_provenance_without_times_is_the_same_everywhere(source: reshard.Checkpoint, tmp_path: Path) -> None:
    moved = reshard.open(shutil.copytree(source.root, tmp_path / "else" / "where"), strategy=SOURCE)
    assert provenance(moved, times=False) == provenance(source, times=False)
    assert "mtime_ns" not in str(provenance(source, times=False))
    assert [file["path"] for file in provenance(source, times=True)["sources"]] == [
        f"rank_{rank}/checkpoint_{rank}.safetensors" for rank in range(2)
    ]


# --- machines and memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [GROUPS["odd shards"], GROUPS["zstd shards"]], ids=["plain", "zstd"])
def test_on_a_cluster(
    source: reshard.Checkpoint, tmp_path: Path, group: ZarrGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed = pytest.importorskip("distributed")
    monkeypatch.setattr(planner, "TASK_BYTES", 512)
    reshard.plan(source, files=group).run(tmp_path / "here")
    with (
        distributed.LocalCluster(2, threads_per_worker=1, processes=True, dashboard_address=":0") as cluster,
        distributed.Client(cluster) as client,
    ):
        reshard.plan(source, files=group).run(tmp_path / "there", client=client)
        assert tree(tmp_path / "there") == tree(tmp_path / "here")
        reshard.plan(reshard.open(tmp_path / "there"), TARGET).run(tmp_path / "out", client=client)
    reshard.plan(source, TARGET).run(tmp_path / "direct")
    assert tree(tmp_path / "out") == tree(tmp_path / "direct")


def test_progress_counts_contents(source: reshard.Checkpoint, tmp_path: Path) -> None:
    told: list[Progress] = []
    plan = reshard.plan(source, files=ZarrGroup(compression="zstd"))
    plan.run(tmp_path / "z", progress=told.append)
    assert told[-1].written == told[-1].total == plan.stats.bytes_written


def test_memory_that_is_too_little_is_told(source: reshard.Checkpoint) -> None:
    with pytest.raises(BudgetError, match="the least that works is") as caught:
        reshard.plan(source, files=ZarrGroup(compression="zstd"), memory=60 << 20)
    least = int(str(caught.value).split("the least that works is ")[1].split(":")[0])
    assert reshard.plan(source, files=ZarrGroup(compression="zstd"), memory=least).threads == 1


CAP = 512 << 20
BIG = {
    "embedding": (40_000, 8_192),
    "layers.0.w": (16_384, 12_288),
    "layers.1.w": (12_288, 16_384),
    "layers.2.w": (24_576, 16_384),
}


def big_rows(name: str, rows: range, columns: slice = slice(None)) -> Array:
    """Some rows of a tensor of the big model; every element depends on its place."""
    start = sum(map(ord, name))
    row = np.arange(rows.start, rows.stop, dtype=np.uint32)[:, None] * 40503
    return ((row + np.arange(BIG[name][1], dtype=np.uint32)[columns] * 30011 + start) >> 3).astype(np.uint16)


def watched(*command: str | Path) -> int:
    """Run a command that is killed where it takes more than the cap; return its peak memory."""
    process = subprocess.Popen([sys.executable, "-m", "reshard", *map(str, command)], stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            break
        for line in status.splitlines():
            if line.startswith("VmHWM"):
                peak = max(peak, int(line.split()[1]) * 1024)
        if peak > CAP:
            process.kill()
            process.wait()
            pytest.fail(f"{command[0]} took {peak >> 20} MiB; the cap is {CAP >> 20}")
        time.sleep(0.005)
    assert process.wait() == 0
    return peak


@pytest.mark.slow
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_model_four_times_the_memory(
    tmp_path: Path, compression: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unified, stored and split again by commands that are killed above the cap; compared by streamed hashes."""
    assert 2 * sum(rows * columns for rows, columns in BIG.values()) > 4 * CAP
    before = Strategy.of({name: Layout.of([2], [0, -1] if "1" in name else [-1, 0]) for name in BIG})
    after = Strategy.of({name: Layout.of([4], [-1, 0] if "1" in name else [0, -1]) for name in BIG})
    for rank in range(2):
        shapes = {name: block.shape for name, block in blocks_of(BIG, before, rank).items()}
        layout = by_name("safetensors").lay_out([Content(n, BFLOAT16, shape) for n, shape in shapes.items()], {})
        path = tmp_path / "src" / f"rank_{rank}" / "w.safetensors"
        path.parent.mkdir(parents=True)
        with path.open("wb") as file:
            file.write(layout.literals[0][1])
            for name, ((offset, _),) in layout.places.items():
                file.seek(offset)
                block = blocks_of(BIG, before, rank)[name]
                for start in range(block.start[0], block.stop[0], 512):
                    rows = range(start, min(start + 512, block.stop[0]))
                    file.write(big_rows(name, rows, slice(block.start[1], block.stop[1])).tobytes())
    reshard.write_strategy(before, tmp_path / "before.ckpt")
    reshard.write_strategy(after, tmp_path / "after.ckpt")
    store = tmp_path / "model.zarr"
    options = ["--memory", "512MiB", "--no-fsync", "--drop-cache", "-q"]
    unify = ["unify", tmp_path / "src", store, "--source-strategy", tmp_path / "before.ckpt", "--format", "zarr"]
    unify += ["--compression", compression] if compression else []
    split = ["transform", store, tmp_path / "out", "--target-strategy", tmp_path / "after.ckpt"]
    told = []
    for command in (unify, split):
        predicted = json.loads(invoke(*command, "--memory", "512MiB", "--dry-run", "--json").stdout)["peak_memory"]
        peak = watched(*command, *options)
        assert peak <= predicted <= CAP
        told.append(f"{command[0]}: peak {peak / 1e6:.0f} MB of {predicted / 1e6:.0f} MB predicted")
    with capsys.disabled():
        print(f"\n{sum(2 * a * b for a, b in BIG.values()) / 1e9:.1f} GB, compression {compression}: {'; '.join(told)}")
    shutil.rmtree(tmp_path / "src")
    for rank in range(4):
        found = reshard.open(tmp_path / "out" / f"rank_{rank}")
        for name, block in blocks_of(BIG, after, rank).items():
            hashes = [hashlib.blake2b(), hashlib.blake2b()]
            for start in range(block.start[0], block.stop[0], 512):
                rows = range(start, min(start + 512, block.stop[0]))
                hashes[0].update(big_rows(name, rows, slice(block.start[1], block.stop[1])).tobytes())
                held = found[name][start - block.start[0] : rows.stop - block.start[0]]
                hashes[1].update(held.compute(scheduler="synchronous").tobytes())
            assert hashes[0].digest() == hashes[1].digest(), (rank, name)
    shutil.rmtree(tmp_path)


HUGE = {"embedding": (151_936, 8_192)} | {
    f"layers.{i}.{name}": shape
    for i in range(12)
    for name, shape in {"w1": (28_672, 8_192), "w2": (8_192, 28_672), "w3": (28_672, 8_192)}.items()
}
HUGE_STAGES = 2.25
"""The store and the target are there at once, whole; of the source only what is no hole."""


def patches(name: str) -> list[tuple[int, int, Array]]:
    """Blocks at random places of a tensor of the huge model, with numbers that are not zero; the rest of it is."""
    random = np.random.default_rng(sum(map(ord, name)))
    found = []
    for _ in range(48):
        rows, columns = (min(extent, int(random.integers(1, 700))) for extent in HUGE[name])
        row, column = (int(random.integers(0, a - b + 1)) for a, b in zip(HUGE[name], (rows, columns), strict=True))
        found.append((row, column, random.integers(1, 1 << 16, (rows, columns), np.uint16)))
    return found


def pieces(name: str, block: Block) -> Iterator[tuple[int, int, Array]]:
    """What of the patches is in a block: row and column within it, and the numbers."""
    for row, column, values in patches(name):
        both = Block((row, column), (row + values.shape[0], column + values.shape[1])) & block
        if both:
            within = values[both.start[0] - row : both.stop[0] - row, both.start[1] - column : both.stop[1] - column]
            yield both.start[0] - block.start[0], both.start[1] - block.start[1], within


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_model_forty_times_the_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """20 GB with blocks of numbers at random places, so that holes that are skipped, or moved, cannot pass."""
    nbytes = sum(2 * rows * columns for rows, columns in HUGE.values())
    assert nbytes > 36 * CAP
    free = shutil.disk_usage(tmp_path).free
    if free < HUGE_STAGES * nbytes:
        pytest.skip(f"{tmp_path} has {free / 1e9:.0f} GB of the {HUGE_STAGES * nbytes / 1e9:.0f} GB that it takes")
    rows, columns = [0, -1], [-1, 0]
    before = Strategy.of({name: Layout.of([4], columns if "w2" in name else rows) for name in HUGE})
    after = Strategy.of({name: Layout.of([8], rows if "w2" in name else columns) for name in HUGE})
    for rank in range(4):
        blocks = blocks_of(HUGE, before, rank)
        layout = by_name("safetensors").lay_out([Content(n, BFLOAT16, b.shape) for n, b in blocks.items()], {})
        path = tmp_path / "src" / f"rank_{rank}" / "w.safetensors"
        path.parent.mkdir(parents=True)
        with path.open("wb") as file:
            file.truncate(layout.size)
            file.write(layout.literals[0][1])
            for name, ((offset, _),) in layout.places.items():
                for row, column, values in pieces(name, blocks[name]):
                    for place, some in enumerate(values, row):
                        os.pwrite(file.fileno(), some, offset + 2 * (place * blocks[name].shape[1] + column))
    reshard.write_strategy(before, tmp_path / "before.ckpt")
    reshard.write_strategy(after, tmp_path / "after.ckpt")
    store, out = tmp_path / "model.zarr", tmp_path / "out"
    options = ["--memory", "512MiB", "--no-fsync", "--drop-cache", "-q"]
    told = []
    for command, done_with in (
        (["unify", tmp_path / "src", store, "--source-strategy", tmp_path / "before.ckpt", "--format", "zarr"], "src"),
        (["transform", store, out, "--target-strategy", tmp_path / "after.ckpt"], "model.zarr"),
    ):
        began = time.monotonic()
        peak = watched(*command, *options)
        told.append(f"{command[0]}: peak {peak / 1e6:.0f} MB, {time.monotonic() - began:.0f} s")
        shutil.rmtree(tmp_path / done_with)
    with capsys.disabled():
        print(f"\n{nbytes / 1e9:.1f} GB within {CAP >> 20} MiB: {'; '.join(told)}")
    for rank in range(8):
        found = reshard.open(out / f"rank_{rank}")
        for name, block in blocks_of(HUGE, after, rank).items():
            own = list(pieces(name, block))
            for start in range(0, block.shape[0], 4096):
                held = found[name][start : start + 4096].compute(scheduler="synchronous").view(np.uint16)
                expected = np.zeros(held.shape, np.uint16)
                for row, column, values in own:
                    first, last = max(row, start), min(row + len(values), start + 4096)
                    if first < last:
                        part = values[first - row : last - row]
                        expected[first - start : last - start, column : column + part.shape[1]] = part
                assert np.array_equal(held, expected), (rank, name, start)
        shutil.rmtree(out / f"rank_{rank}")
