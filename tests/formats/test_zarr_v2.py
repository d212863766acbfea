"""Stores of zarr's format 2, as zarr-python and xarray write them, against the values that these read."""

from __future__ import annotations

import json
import warnings
from itertools import product
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numcodecs
import numpy as np
import pytest
import zarr
from refusals import refused
from remotes import at_urls, put
from samples import sampled
from zarr_stores import assert_same

import reshard
from reshard.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"compressors": None},
    "zstd": {"compressors": numcodecs.Zstd(3)},
    "zstd checksum": {"compressors": numcodecs.Zstd(3, checksum=True)},
    "blosc": {"compressors": numcodecs.Blosc("lz4", shuffle=2)},
    "zlib": {"compressors": numcodecs.Zlib(1)},
    "gzip": {"compressors": numcodecs.GZip(1)},
    "bz2": {"compressors": numcodecs.BZ2(1)},
    "lzma": {"compressors": numcodecs.LZMA()},
    "lz4": {"compressors": numcodecs.LZ4()},
    "columns": {"compressors": None, "order": "F"},
    "columns zlib": {"compressors": numcodecs.Zlib(1), "order": "F"},
    "directories": {"compressors": None, "chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "default": {},
}
DTYPES = ("<f4", ">f4", "<f2", ">i8", "|i1", "|b1", "<c8", ">c8")


def group_v2(path: Path) -> zarr.Group:
    return zarr.open_group(path, mode="w", zarr_format=2)


def values(dtype: str, shape: tuple[int, ...] = (10, 7)) -> np.ndarray[Any, Any]:
    return np.random.default_rng(3).integers(0, 2 if dtype == "bool" else 100, shape).astype(dtype)


@pytest.mark.parametrize(("kind", "dtype"), sampled(product(KINDS, DTYPES), 5))
def test_stores_of_format_2(tmp_path: Path, kind: str, dtype: str) -> None:
    value = values(dtype)
    group = group_v2(tmp_path / "z")
    group.create_array("w", shape=value.shape, dtype=dtype, chunks=(4, 3), **KINDS[kind])[...] = value
    group.create_group("a").create_group("b").create_array(
        "line", shape=(5,), dtype=dtype, chunks=(5,), **{key: v for key, v in KINDS[kind].items() if key != "order"}
    )[...] = value[0, :5]
    group.create_array("scalar", shape=(), dtype=dtype)[...] = value[0, 0]
    metadata = json.loads((tmp_path / "z/w/.zarray").read_text())
    assert (metadata["dtype"], metadata["order"]) == (dtype, "F" if "columns" in kind else "C")
    own = reshard.open(tmp_path / "z")
    native = np.dtype(dtype).newbyteorder("<")
    expected = {"w": value, "a/b/line": value[0, :5], "scalar": value[0, 0]}
    assert set(own) == expected.keys()
    for name, each in expected.items():
        assert own[name].dtype == native
        assert_same(own[name].compute(), each.astype(native))
    assert_same(own["w"][3:9, 2:5].compute(), value[3:9, 2:5].astype(native))
    reshard.plan(own).run(tmp_path / "out")
    again = reshard.open(tmp_path / "out")
    assert_same(again["w"].compute(), value.astype(native))


@at_urls("consolidated", [False, True], 2)
def test_a_store_at_a_url(root: str, tmp_path: Path, consolidated: bool) -> None:
    value = values("float32")
    group = group_v2(tmp_path / "z")
    group.create_group("a").create_array("w", shape=(10, 7), dtype="f4", chunks=(4, 3))[...] = value
    if consolidated:
        zarr.consolidate_metadata(tmp_path / "z", zarr_format=2)
        assert (tmp_path / "z/.zmetadata").exists()
    put(tmp_path / "z", f"{root}/z")
    assert_same(reshard.open(f"{root}/z")["a/w"].compute(), value)


@pytest.mark.parametrize(("fill", "dtype"), [(2.5, "<f4"), (2.5, ">f4"), (np.nan, "<f8"), (7, "|u1"), (None, "<i4")])
def test_absent_chunks_are_the_fill_value(tmp_path: Path, fill: Any, dtype: str) -> None:
    array = group_v2(tmp_path / "z").create_array("w", shape=(8, 9), dtype=dtype, chunks=(4, 3), fill_value=fill)
    array[4:, 3:6] = 1
    own = reshard.open(tmp_path / "z")
    assert "5 chunks of w" in own.warnings[0]
    assert_same(own["w"].compute(), np.asarray(array[...]).astype(np.dtype(dtype).newbyteorder("<")))


@pytest.mark.parametrize("version", [2, 3])
def test_a_dataset_of_xarray(tmp_path: Path, version: int) -> None:
    """Numbers are read; texts, among the coordinates, are listed with the reason."""
    xarray = pytest.importorskip("xarray")
    temperature = np.random.default_rng(1).standard_normal((3, 4, 5))
    dataset = xarray.Dataset(
        {"temperature": (("time", "x", "y"), temperature), "count": (("x",), np.arange(4))},
        coords={"time": np.arange("2026-01-01", "2026-01-04", dtype="datetime64[D]").astype("datetime64[ns]"),
                "x": ["a", "b", "c", "d"], "y": np.linspace(0, 1, 5), "where": "here"},
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr's, about texts and consolidated metadata in version 3
        dataset.to_zarr(tmp_path / "z", zarr_format=version)
    own = reshard.open(tmp_path / "z")
    assert set(own) == {"temperature", "count", "time", "y"}
    assert own.unreadable.keys() == {"x", "where"}
    assert_same(own["temperature"].compute(), temperature)
    assert_same(own["count"].compute(), np.arange(4))
    assert_same(own["y"].compute(), np.linspace(0, 1, 5))
    with refused(SourceError, "unreadable-tensor", "'x'"):
        reshard.plan(own)
    reshard.plan(own, drop=["x", "where"]).run(tmp_path / "out")


def test_what_is_not_read_is_listed_with_the_reason(tmp_path: Path) -> None:
    group = group_v2(tmp_path / "z")
    group.create_array("w", shape=(4,), dtype="f4")[...] = 1
    group.create_array("filtered", shape=(4,), dtype="i4", filters=[numcodecs.Delta("i4")])[...] = [1, 2, 3, 4]
    group.create_array("pairs", shape=(4,), dtype=[("a", "<f4"), ("b", "<i4")])
    group.create_array("texts", shape=(4,), dtype="<U5")
    own = reshard.open(tmp_path / "z")
    assert set(own) == {"w"}
    assert own.unreadable.keys() == {"filtered", "pairs", "texts"}
    assert "delta" in own.unreadable["filtered"]


@pytest.mark.parametrize(
    ("changed", "code"),
    [({"zarr_format": 3}, "bad-metadata"), ({"order": "A"}, "bad-metadata"), ({"chunks": [4]}, "wrong-shape"),
     ({"chunks": [0, 3]}, "bad-shape"), ({"shape": [-1, 7]}, "bad-shape"), ({"shape": "x"}, "bad-metadata"),
     ({"dimension_separator": ".."}, "bad-metadata"), ({"more": 1}, "unknown-key"), ({"fill_value": "x"}, "bad-value"),
     (None, "not-json")],
)  # fmt: skip
def test_metadata_that_are_not_valid(tmp_path: Path, changed: dict[str, Any] | None, code: str) -> None:
    group_v2(tmp_path / "z").create_array("w", shape=(10, 7), dtype="f4", chunks=(4, 3), compressors=None)[...] = 1
    path = tmp_path / "z/w/.zarray"
    path.write_text("{" if changed is None else json.dumps({**json.loads(path.read_text()), **changed}))
    with refused(SourceError, code, "z/w/.zarray"):
        reshard.open(tmp_path / "z")


def test_a_damaged_chunk_and_a_short_one(tmp_path: Path) -> None:
    group = group_v2(tmp_path / "z")
    group.create_array("w", shape=(4,), dtype="f4", compressors=numcodecs.Zlib())[...] = 1
    (tmp_path / "z/w/0").write_bytes(b"damaged")
    with refused(SourceError, "bad-chunk", "z/w/0"):
        reshard.open(tmp_path / "z")["w"].compute()
    group.create_array("plain", shape=(4,), dtype="f4", compressors=None)[...] = 1
    (tmp_path / "z/plain/0").write_bytes(b"short")
    with refused(SourceError, "truncated", "z/plain/0"):
        reshard.open(tmp_path / "z")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "compressors" in KINDS[kind] and "columns" not in kind])
@pytest.mark.parametrize("dtype", ["f4", "u1"])
def test_a_chunk_that_is_cut_anywhere(tmp_path: Path, kind: str, dtype: str) -> None:
    """Blosc copies what it cannot compress, and its decoder reads on past the end of such a chunk."""
    value = np.random.default_rng(1).integers(0, 256, 64, np.uint8).view(dtype)
    group_v2(tmp_path / "z").create_array("w", shape=value.shape, dtype=dtype, **KINDS[kind])[...] = value
    (file,) = (tmp_path / "z/w").rglob("0")
    content = file.read_bytes()
    for end in {*range(0, len(content), 5), 1, 15, 16, 17, len(content) - 1}:
        file.write_bytes(content[:end])
        with pytest.raises(SourceError) as raised:
            reshard.open(tmp_path / "z")["w"].compute()
        assert {*raised.value.codes} <= {"bad-chunk", "truncated"}
    file.write_bytes(content)
    assert_same(reshard.open(tmp_path / "z")["w"].compute(), value)


def test_a_chunk_of_blosc_of_format_3_that_is_cut(tmp_path: Path) -> None:
    value = np.random.default_rng(1).integers(0, 256, 64, np.uint8)
    group = zarr.create_group(tmp_path / "z")
    group.create_array("w", data=value, chunks=(64,), compressors=zarr.codecs.BloscCodec())
    file = tmp_path / "z/w/c/0"
    content = file.read_bytes()
    for end in (0, 3, 15, 16, 40, len(content) - 1):
        file.write_bytes(content[:end])
        with refused(SourceError, "bad-chunk", "w/c/0"):
            reshard.open(tmp_path / "z")["w"].compute()


def test_one_array_is_not_a_store_of_tensors(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "z", shape=(4,), dtype="f4", zarr_format=2)
    with refused(SourceError, "not-a-group", "z/.zarray"):
        reshard.open(tmp_path / "z")


def test_arrays_without_the_metadata_of_groups_between(tmp_path: Path) -> None:
    """Programs other than zarr-python leave these out."""
    group_v2(tmp_path / "z").create_group("a").create_array("w", shape=(4,), dtype="f4")[...] = 1
    (tmp_path / "z/a/.zgroup").unlink()
    assert_same(reshard.open(tmp_path / "z")["a/w"].compute(), np.ones(4, np.float32))


@pytest.mark.parametrize("compressor", [None, {"id": "zlib", "level": 1}, {"id": "blosc", "cname": "lz4"}])
def test_bfloat16_of_tensorstore(tmp_path: Path, compressor: dict[str, Any] | None) -> None:
    """TensorStore names dtypes that numpy lacks, which zarr-python refuses."""
    tensorstore = pytest.importorskip("tensorstore")
    value = np.random.default_rng(0).standard_normal((6, 5)).astype(ml_dtypes.bfloat16)
    spec = {
        "driver": "zarr", "kvstore": {"driver": "file", "path": f"{tmp_path}/z/w/"},
        "metadata": {"dtype": "bfloat16", "shape": [6, 5], "chunks": [4, 3], "compressor": compressor},
    }  # fmt: skip
    group_v2(tmp_path / "z")
    tensorstore.open(spec, create=True).result().write(value).result()
    own = reshard.open(tmp_path / "z")
    assert own["w"].dtype == ml_dtypes.bfloat16
    assert_same(own["w"].compute(), value)
