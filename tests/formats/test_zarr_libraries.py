"""What other libraries make of a written zarr store: xarray, zarr-python, dask and TensorStore."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import dask.array as da
import ml_dtypes
import numpy as np
import pytest
import zarr
from checkpoints import assert_equal, plan_with, write_file
from refusals import refused
from zarr_stores import assert_same

import reshard
from reshard.errors import SourceError, UsageError
from reshard.formats.zarr.layout import ZarrGroup

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_RNG = np.random.default_rng(5)
FULL: dict[str, np.ndarray[Any, Any]] = {
    "layers.0.w": _RNG.standard_normal((6, 4)).astype(np.float32),
    "layers.1.w": _RNG.standard_normal((6, 4)).astype(np.float32),
    "square": _RNG.standard_normal((6, 6)).astype(np.float16),
    "cube": np.arange(6 * 6 * 6, dtype=np.int64).reshape(6, 6, 6),
    "norm": np.arange(-3, 3, dtype=np.int8),
    "mask": np.array([True, False]),
    "step": np.array(7, np.int32),
    "none": np.zeros((0, 4), np.float32),
    "half": _RNG.standard_normal((6, 4)).astype(ml_dtypes.bfloat16),
    "eighth": _RNG.standard_normal((2, 3)).astype(ml_dtypes.float8_e4m3fn),
}
STORED = {"half": np.uint16, "eighth": np.uint8}
"""The dtypes that zarr lacks, as integers of their bits."""
GROUPS = {
    "chunks": ZarrGroup(), "files": ZarrGroup(chunk_size=40, shard_size=0),
    "shards": ZarrGroup(chunk_size=40, shard_size=100, compression="zstd"),
}  # fmt: skip


@pytest.fixture(params=GROUPS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = write_file(tmp_path / "a.safetensors", FULL)
    plan_with(reshard.open(path), files=GROUPS[request.param]).run(tmp_path / "z")
    return tmp_path / "z"


def test_xarray_opens_a_model_as_one_dataset(store: Path) -> None:
    xarray = pytest.importorskip("xarray")
    for consolidated in (None, True, False):
        dataset = xarray.open_zarr(store, consolidated=consolidated)
        assert set(dataset) == FULL.keys()
        for name, value in FULL.items():
            assert dataset[name].dtype == STORED.get(name, value.dtype)
            assert_same(dataset[name].values, value)
    sizes = {name: array.sizes for name, array in dataset.items()}
    assert all(len(of_array) == FULL[name].ndim for name, of_array in sizes.items())  # no name twice in an array
    difference = dataset["layers.0.w"] - dataset["layers.1.w"]  # along dimensions of the same names
    assert_same(difference.values, FULL["layers.0.w"] - FULL["layers.1.w"])
    assert dataset["half"].values.view(ml_dtypes.bfloat16).tolist() == FULL["half"].tolist()


def test_zarr_reads_the_metadata_of_all_arrays_at_once(store: Path) -> None:
    group = zarr.open_consolidated(store)
    assert {name for name, _ in group.members()} == FULL.keys()
    for path in store.glob("*/zarr.json"):
        path.rename(path.with_suffix(".away"))
    group = zarr.open_consolidated(store)
    for name, value in FULL.items():
        assert_same(group[name][...], value)
        if value.size:
            assert_same(da.from_zarr(group[name]).compute(scheduler="synchronous"), value)


def test_consolidated_metadata_are_those_of_the_arrays(store: Path) -> None:
    consolidated = json.loads((store / "zarr.json").read_text())["consolidated_metadata"]["metadata"]
    assert consolidated == {path.parent.name: json.loads(path.read_text()) for path in store.glob("*/zarr.json")}


def test_an_array_that_was_changed_since_is_read_from_its_own_metadata(store: Path) -> None:
    """zarr resizes an array and leaves the consolidated metadata as they are; they are not believed."""
    zarr.open_array(store / "norm", mode="r+").resize((3,))
    assert zarr.open_group(store, mode="r")["norm"].shape == (6,)
    assert_same(reshard.open(store)["norm"].compute(), FULL["norm"][:3])


def test_tensorstore_reads_every_array(store: Path) -> None:
    tensorstore = pytest.importorskip("tensorstore")
    for name, value in FULL.items():
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{store / name}/"}}
        array = tensorstore.open(spec, open=True).result()
        assert len({label for label in array.domain.labels if label}) == value.ndim
        assert_same(array.read().result(), value)


def copied(store: Path, to: Any) -> zarr.Group:
    """The store's files in another store of zarr."""
    for path in store.rglob("*"):
        if path.is_file():
            content = zarr.core.buffer.default_buffer_prototype().buffer.from_bytes(path.read_bytes())
            zarr.core.sync.sync(to.set(str(path.relative_to(store)), content))
    return zarr.open_group(to, mode="r")


def memory_store() -> Any:
    return zarr.storage.MemoryStore()


def fsspec_store() -> Any:
    return zarr.storage.FsspecStore.from_url("memory://of-a-group")


def obstore_store() -> Any:
    return zarr.storage.ObjectStore(pytest.importorskip("obstore").store.MemoryStore())


@pytest.mark.parametrize("made", [memory_store, fsspec_store, obstore_store])
def test_a_group_in_any_store_is_opened(store: Path, tmp_path: Path, made: Callable[[], Any]) -> None:
    group = copied(store, made())
    own = reshard.open(group)
    assert set(own) == FULL.keys()
    for name, value in FULL.items():
        assert own[name].dtype == value.dtype
        assert_same(own[name].compute(scheduler="synchronous"), value)
    reshard.convert(own, tmp_path / "out", to="hf")
    written = reshard.open(tmp_path / "out")
    assert all(np.array_equal(written[name].compute(), value) for name, value in FULL.items())
    with refused(UsageError, "self-described"):
        reshard.open(group, layout={"*": "whole"})


def test_a_group_in_a_directory_is_opened_by_its_path(store: Path) -> None:
    own = reshard.open(zarr.open_group(store, mode="r"))
    assert own.format == "zarr"
    assert_equal(own, FULL)
    with refused(UsageError, "bad-argument"):
        reshard.open(zarr.open_array(store / "norm", mode="r"))  # type: ignore[arg-type]


def test_a_group_within_a_group(tmp_path: Path) -> None:
    for name, target in {"local": str(tmp_path / "z"), "memory": memory_store()}.items():
        inner = zarr.open_group(target, mode="w").create_group("a/b")
        inner.create_array("c/w", shape=(4,), dtype=">f4")[...] = [1, 2, 3, 4]
        inner.create_array("double", shape=(4,), dtype="c16")
        own = reshard.open(inner)
        assert set(own) == {"c/w"}, name
        assert own.unreadable.keys() == {"double"}
        assert own["c/w"].compute().tolist() == [1, 2, 3, 4]
    empty = zarr.open_group(memory_store(), mode="w")
    with refused(UsageError, "no-tensors"):
        reshard.open(empty)


def test_a_store_of_zarr_is_written_to(tmp_path: Path) -> None:
    source = reshard.open(write_file(tmp_path / "a.safetensors", FULL))
    source.to_zarr(zarr.storage.LocalStore(tmp_path / "z"))
    opened = zarr.open_group(tmp_path / "z", mode="r")
    assert all(np.array_equal(opened[name][...], FULL[name]) for name in FULL.keys() - STORED.keys())
    with refused(UsageError, "wrong-type"):
        source.to_zarr(memory_store())


@pytest.mark.parametrize(
    ("notes", "code"),
    [
        (5, "bad-metadata"), (None, "bad-metadata"), ({"dtype": "nope"}, "wrong-dtype"), ({"dtype": 5}, "wrong-dtype"),
        ({"dtype": ["a"]}, "wrong-dtype"), ({"dtype": "float64"}, "wrong-dtype"), ({"name": 5}, "bad-name"),
        ({"name": ["a"]}, "bad-name"), ({"name": "v"}, "bad-name"),
    ],
)  # fmt: skip
def test_damaged_notes_in_memory_are_refused(notes: Any, code: str) -> None:
    """A second tensor of the same name replaced the first."""
    group = zarr.open_group(zarr.storage.MemoryStore(), mode="w")
    for name in ("v", "w"):
        group.create_array(name, shape=(2,), dtype="uint16")
    group["w"].attrs["reshard"] = notes
    with refused(SourceError, code):
        reshard.open(group)
