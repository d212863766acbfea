"""zarr stores that zarr wrote: whatever their chunks, shards and codecs, they are read as zarr reads them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numcodecs.zstd
import numpy as np
import pytest
import zarr
from commands import call
from refusals import refused
from zarr_stores import OPTIONS, assert_same, tasks

import reshard
from reshard import Layout, Strategy
from reshard.errors import SourceError
from reshard.formats.zarr import blocks as zarr_array

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["tasks"]  # fixtures, for pytest to find

DTYPES = ["float32", "int16", "bool", "complex64"]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, marks=[] if (row - column) % len(DTYPES) == 0 else pytest.mark.slow)
        for row, kind in enumerate(OPTIONS)
        for column, dtype in enumerate(DTYPES)
    ],
)
def test_stores_that_zarr_wrote(tmp_path: Path, kind: str, dtype: str, tasks: None) -> None:
    """Whole arrays, arrays with absent chunks, and slices; also as a source."""
    options = OPTIONS[kind]
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


@pytest.mark.parametrize("options", ["plain", "whole", "shards", "zstd", "gzip"])
def test_edges_of_more_rows_than_are_listed(tmp_path: Path, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of a chunk within the tensor is strided then."""
    monkeypatch.setattr(zarr_array, "_MOST_RUNS", 1)
    value = np.arange(160, dtype=np.int16).reshape(20, 8)
    array = zarr.open_group(tmp_path / "z", mode="w").create_array(
        "w", shape=(20, 8), dtype="int16", **OPTIONS[options]
    )
    array[...] = value
    own = reshard.open(tmp_path / "z")
    assert_same(own["w"].compute(), value)
    assert_same(own["w"][1:9:3, 2:6].compute(), value[1:9:3, 2:6])
    reshard.plan(own).run(tmp_path / "out", threads=2)
    assert_same(reshard.open(tmp_path / "out")["w"].compute(), value)


@pytest.mark.parametrize("index_codecs", [[zarr.codecs.BytesCodec()], [zarr.codecs.BytesCodec(endian="big")]])
def test_shards_whose_index_only_zarr_reads(tmp_path: Path, index_codecs: list[Any]) -> None:
    value = np.arange(70, dtype=np.int32).reshape(10, 7)
    codec = zarr.codecs.ShardingCodec(
        chunk_shape=(2, 3), codecs=[zarr.codecs.BytesCodec(), zarr.codecs.ZstdCodec()], index_codecs=index_codecs
    )
    array = zarr.open_group(tmp_path / "z", mode="w").create_array(
        "w", shape=(10, 7), dtype="int32", chunks=(4, 6), serializer=codec, compressors=None
    )
    array[...] = value
    assert_same(reshard.open(tmp_path / "z")["w"].compute(), value)


def test_chunks_of_several_frames(tmp_path: Path) -> None:
    value = np.arange(64, dtype=np.int32)
    array = zarr.open_group(tmp_path / "z", mode="w").create_array(
        "w", shape=(64,), dtype="int32", compressors=zarr.codecs.ZstdCodec()
    )
    array[...] = value
    frames = [bytes(numcodecs.zstd.compress(value[half].tobytes(), 1)) for half in (slice(0, 9), slice(9, 64))]
    (tmp_path / "z" / "w" / "c" / "0").write_bytes(b"".join(frames))
    assert_same(reshard.open(tmp_path / "z")["w"].compute(), value)
    (tmp_path / "z" / "w" / "c" / "0").write_bytes(b"".join(frames) + b"more")
    with refused(SourceError, "bad-chunk", "chunk 0"):
        reshard.open(tmp_path / "z")["w"].compute()


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


@pytest.mark.parametrize(("error", "reason"), [(MemoryError(), "too little memory"), (EOFError(), "EOFError")])
def test_what_has_no_text_is_given_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    """As of a chunk of gzip that is a bomb."""
    group = zarr.open_group(tmp_path / "z", mode="w")
    group.create_array("w", shape=(4,), dtype="int32", compressors=zarr.codecs.GzipCodec())[...] = 1

    def decode(*_: Any) -> None:
        raise error

    monkeypatch.setattr("numcodecs.gzip.GZip.decode", decode)
    with refused(SourceError, "bad-chunk", "chunk 0", tmp_path / "z" / "w" / "c" / "0", reason):
        reshard.open(tmp_path / "z")["w"].compute()


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


@pytest.mark.parametrize(
    ("options", "absent"),
    [("plain", 5), ("shards", 10), ("zstd", 5), ("zstd shards", 10), ("gzip", 5), ("blosc shards", 10)],
)
def test_how_many_chunks_are_absent_is_said(tmp_path: Path, options: str, absent: int) -> None:
    """Of rows 0 to 7 nothing is written, but columns 3 to 5 of rows 4 to 7."""
    array = zarr.open_group(tmp_path / "z", mode="w").create_array(
        "w", shape=(8, 9), dtype="int8", **{**OPTIONS[options], "fill_value": 0}
    )
    array[4:, 3:6] = 1
    notice = f"{absent} chunks of w"
    own = reshard.open(tmp_path / "z")
    assert notice in own.warnings[0]
    assert notice in reshard.plan(own).warnings[0]
    assert notice in call("verify", tmp_path / "z").stderr


def test_dtypes_that_no_checkpoint_has_are_not_readable(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "z", mode="w")
    group.create_array("w", shape=(4,), dtype="float32")[...] = 1
    group.create_array("c", shape=(4,), dtype="complex128")[...] = 1
    own = reshard.open(tmp_path / "z")
    assert set(own) == {"w"}
    with refused(SourceError, "unreadable-tensor", "tensor 'c'", "complex128", "drop='c'"):
        reshard.plan(own)
    reshard.plan(own, drop=["c"]).run(tmp_path / "out")
