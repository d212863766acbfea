"""zarr stores: written by the band engine, and what zarr and everything here makes of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import zarr
from checkpoints import places, plan_with, tree, write_file
from commands import call
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from zarr_stores import ALSO, FULL, GROUPS, SOURCE, TARGET, assert_same, source, tasks

import reshard
from reshard.core.model.entries import Content
from reshard.core.plan import budget
from reshard.dtypes import BFLOAT16, BY_NAME
from reshard.errors import ReshardError, SourceError, TargetError, UsageError
from reshard.formats.zarr import layout as format_zarr
from reshard.formats.zarr.blocks import clipped
from reshard.formats.zarr.layout import ZarrGroup
from reshard.kits.files import by_name

if TYPE_CHECKING:
    from faulty import Faults


__all__ = ["source", "tasks"]  # fixtures, for pytest to find


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_there_and_back(source: reshard.Checkpoint, tmp_path: Path, group: ZarrGroup, tasks: None) -> None:
    """zarr reads what is written, and so do we: as arrays, and as a source that gives what the first source does."""
    store = tmp_path / "model.zarr"
    plan = plan_with(source, files=group)
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
    plan_with(source, files=group).run(first, client="synchronous")
    monkeypatch.setattr(budget, "BAND_BYTES", 64)
    monkeypatch.setattr(budget, "TASK_BYTES", 512)
    moved = shutil.copytree(source.root, tmp_path / "elsewhere")
    for attempt in range(4):
        again = plan_with(reshard.open(moved, strategy=SOURCE), files=group)
        again.run(tmp_path / f"{attempt}", threads=4, fsync=False)
        assert tree(tmp_path / f"{attempt}") == tree(first)


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_metadata_are_what_zarr_itself_writes(source: reshard.Checkpoint, tmp_path: Path, group: ZarrGroup) -> None:
    store = tmp_path / "model.zarr"
    plan_with(source, files=group).run(store)
    theirs = zarr.open_group(tmp_path / "theirs.zarr", mode="w")
    theirs.update_attributes(json.loads((store / "zarr.json").read_text())["attributes"])
    for name, array in zarr.open_group(store, mode="r").members():
        assert isinstance(array, zarr.Array)
        theirs.create_array(
            name, shape=array.shape, dtype=array.dtype, chunks=array.chunks, shards=array.shards,
            compressors=array.compressors or None, filters=None, attributes=dict(array.attrs),
            chunk_key_encoding={"name": "default", "separator": "."}, dimension_names=array.metadata.dimension_names,
        )  # fmt: skip
    with pytest.warns(UserWarning, match="Consolidated"):  # of zarr's: version 3 does not define them yet
        zarr.consolidate_metadata(theirs.store)
    found = {path.relative_to(store): path.read_bytes() for path in store.rglob("zarr.json")}
    expected = {
        path.relative_to(theirs.store.root): path.read_bytes() for path in Path(theirs.store.root).rglob("zarr.json")
    }  # type: ignore[attr-defined]
    assert {path: json.loads(content) for path, content in found.items()} == {
        path: json.loads(content) for path, content in expected.items()
    }


@pytest.mark.parametrize("group", [g for g in GROUPS.values() if g.compression is None])
def test_chunks_are_what_zarr_itself_writes(source: reshard.Checkpoint, tmp_path: Path, group: ZarrGroup) -> None:
    """Byte for byte; of shards zarr orders the chunks otherwise, so they are read back above."""
    store = tmp_path / "model.zarr"
    plan_with(source, files=group).run(store)
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
    plan_with(source, files=ZarrGroup(shard_size=0)).run(tmp_path / "z")
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
    for name, ((offset, nbytes),) in places(layout).items():
        written[offset : offset + nbytes] = whole[name].tobytes()
    (tmp_path / "all.safetensors").write_bytes(written)
    for compression in (None, "zstd"):
        store = tmp_path / f"{compression}.zarr"
        reshard.open(tmp_path / "all.safetensors").to_zarr(store, chunk_size=20, compression=compression)
        own = reshard.open(store)
        assert {name: tensor.spec.dtype.name for name, tensor in own.tensors.items()} == {name: name for name in kinds}
        reshard.plan(own).run(tmp_path / "back", overwrite=True)
        assert (tmp_path / "back/rank_0/checkpoint_0.safetensors").read_bytes()[-24:] == written[-24:]
        again = reshard.open(tmp_path / "back")
        for name in kinds:
            assert_same(again[name].compute(), own[name].compute())
            assert own[name].compute().tobytes() == whole[name].tobytes()
    assert reshard.open(store)["bfloat16"].dtype == ml_dtypes.bfloat16


def test_a_name_too_long_for_a_directory(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.safetensors", {"x" * 300: np.zeros(2, np.float32)})
    with refused(UsageError, "name-too-long", "300 bytes", "most 255"):
        reshard.open(path).to_zarr(tmp_path / "z")
    assert not (tmp_path / "z").exists()


@given(name=st.text(min_size=0, max_size=20), other=st.text(max_size=20))
def test_escaped_names_are_those_of_one_directory_each(name: str, other: str) -> None:
    text = format_zarr.escaped(name)
    assert Path("root", text).parent == Path("root")
    assert text
    assert not text.startswith((".", "__", "zarr.json"))
    assert (text == format_zarr.escaped(other)) == (name == other)


@given(shape=st.lists(st.integers(1, 12), max_size=4).map(tuple), most=st.integers(0, 3000))
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
    extent = clipped(0, 3, chunk, shape, 2)
    assert not extent.strides
    found = b"".join(content[offset : offset + nbytes] for offset, nbytes in extent.runs)
    assert found == np.ascontiguousarray(whole[tuple(map(slice, shape))]).tobytes()


def test_what_contradicts_itself_is_refused(source: reshard.Checkpoint) -> None:
    for files, code in (({"chunk_size": 0}, "out-of-range"),
                        ({"compression": "gzip"}, "unknown-compression"),
                        ({"compression": "zstd:99"}, "unknown-compression"),
                        ({"compression": "zstd:fast"}, "unknown-compression")):  # fmt: skip
        with refused(UsageError, code, next(iter(files.values()))):
            ZarrGroup(**files)  # type: ignore[arg-type]
    for options in ({"ranks": [0]}, {"remove_redundancy": True}):
        with refused(UsageError, "option-of-another-format", next(iter(options))):
            reshard.plan(source, to="zarr", **options)  # type: ignore[arg-type]
    with refused(UsageError, "option-of-another-format", "strategy"):
        reshard.plan(source, TARGET, to="zarr")


def test_the_rank_of_a_plan_is_whole(source: reshard.Checkpoint) -> None:
    rank = reshard.plan(source, to="zarr").rank(0)
    assert_same(rank["layers.0.wo"].compute(), FULL["layers.0.wo"])


def test_slices_read_their_bytes_only(source: reshard.Checkpoint, tmp_path: Path, faults: Faults) -> None:
    source.to_zarr(tmp_path / "z")
    own = reshard.open(tmp_path / "z")
    faults.clear()
    assert_same(own["layers.0.wq"][2:4].compute(), FULL["layers.0.wq"][2:4])
    assert sum(call.nbytes for call in faults.of("read_into")) == 2 * 6 * 4


def test_what_a_store_is_not_made_for_is_refused(source: reshard.Checkpoint, tmp_path: Path) -> None:
    plan = reshard.plan(source, to="zarr")
    with refused(UsageError, "wrong-partition", tmp_path / "z", "'file'"):
        plan.run(tmp_path / "z", partition="file")
    plan.run(tmp_path / "z")
    with refused(UsageError, "no-manifest", tmp_path / "z"):
        reshard.Manifest.make(tmp_path / "z")
    assert reshard.open(f"file://{tmp_path}/z").format == "zarr"


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_a_plan_of_a_store_can_be_saved(source: reshard.Checkpoint, tmp_path: Path, group: ZarrGroup) -> None:
    """And does the same where the store is a copy, or is reached through a link."""
    plan_with(source, files=group).run(tmp_path / "z")
    (tmp_path / "link").symlink_to(tmp_path / "z")
    plan = reshard.plan(reshard.open(tmp_path / "link"), TARGET, to="safetensors")
    plan.run(tmp_path / "direct")
    plan.save(tmp_path / "plan.json")
    shutil.copytree(tmp_path / "z", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "z")
    again = reshard.read_plan(tmp_path / "plan.json", source=tmp_path / "elsewhere")
    again.run(tmp_path / "again")
    assert tree(tmp_path / "again") == tree(tmp_path / "direct")
    again.save(tmp_path / "again.json")
    first, second = (json.loads((tmp_path / name).read_bytes()) for name in ("plan.json", "again.json"))
    assert second["provenance"]["source"].pop("root") != first["provenance"]["source"].pop("root")
    assert second == first


def _other_contents(store: Path) -> None:
    path = store / "layers.0.wo" / "c.0.1"
    path.write_bytes(bytes(path.stat().st_size))


def _another_chunk(store: Path) -> None:
    (store / "layers.0.wo" / "c.0.1").unlink()  # absent ones are zeros


def _another_codec(store: Path) -> None:
    path = store / "layers.0.wo" / "zarr.json"
    before = path.read_text()
    path.write_text(before.replace('"little"', '"big"   '))
    assert len(path.read_text()) == len(before)
    assert path.read_text() != before


def _another_array(store: Path) -> None:
    shutil.copytree(store / "norm", store / "more")


@pytest.mark.parametrize(
    ("change", "kind", "code", "place"),
    [
        (_other_contents, TargetError, "source-changed", "c.0.1"),
        (_another_chunk, SourceError, "not-found", "c.0.1"),
        (_another_codec, TargetError, "source-changed", "layers.0.wo/zarr.json"),
        (_another_array, TargetError, "files-added", "more/zarr.json"),
        (shutil.rmtree, SourceError, "not-found", "z"),
    ],
)
def test_a_store_that_is_not_what_was_planned_with_is_refused(
    source: reshard.Checkpoint, tmp_path: Path, change: Any, kind: type[ReshardError], code: str, place: str
) -> None:
    """Also where its sizes are what they were: how chunks are encoded is in the metadata alone."""
    store = tmp_path / "z"
    plan_with(source, files=ZarrGroup(shard_size=0)).run(store)
    reshard.plan(reshard.open(store), TARGET, to="safetensors").save(tmp_path / "plan.json")
    reshard.read_plan(tmp_path / "plan.json")
    change(store)
    with refused(kind, code, place):
        reshard.read_plan(tmp_path / "plan.json")


def test_on_a_cluster(source: reshard.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = GROUPS["zstd shards"]
    distributed = pytest.importorskip("distributed")
    monkeypatch.setattr(budget, "TASK_BYTES", 512)
    plan_with(source, files=group).run(tmp_path / "here")
    with (
        distributed.LocalCluster(2, threads_per_worker=1, processes=True, dashboard_address=":0") as cluster,
        distributed.Client(cluster) as client,
    ):
        plan_with(source, files=group).run(tmp_path / "there", client=client)
        assert tree(tmp_path / "there") == tree(tmp_path / "here")
        reshard.plan(reshard.open(tmp_path / "there"), TARGET).run(tmp_path / "out", client=client)
    reshard.plan(source, TARGET).run(tmp_path / "direct")
    assert tree(tmp_path / "out") == tree(tmp_path / "direct")


def test_the_name_of_a_target_says_its_format(source: reshard.Checkpoint, tmp_path: Path) -> None:
    """No directory of safetensors files is called z.zarr, nor a safetensors file x.ckpt."""
    words = ["convert", write_file(tmp_path / "net.safetensors", FULL)]
    assert call(*words, tmp_path / "z.zarr").exit_code == 0
    assert reshard.open(tmp_path / "z.zarr").format == "zarr"
    store = tmp_path / "other.zarr"
    commands = [
        [*words, store, "--to", "safetensors"],
        [*words, store, "--to", "dcp"],
        [*words, store, "--to", "hf"],
        [*words, store, "--to", "ckpt"],
        ["convert", words[1], tmp_path / "other.ckpt", "--to", "safetensors"],
        ["convert", words[1], tmp_path / "other.safetensors", "--to", "ckpt"],
    ]
    before = set(tree(tmp_path))
    for command in commands:
        assert call(*command).exit_code == 2, command
    with refused(UsageError, "wrong-extension", "other.zarr"):
        reshard.plan(source, TARGET).run(store)
    assert set(tree(tmp_path)) == before
    assert call("convert", words[1], tmp_path / "net.ckpt", "--to", "ckpt").exit_code == 0
