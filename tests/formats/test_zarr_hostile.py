"""zarr stores that lie: each is refused with a sentence, and no link is followed."""

from __future__ import annotations

import json
import os
import shutil
import struct
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np
import pytest
import zarr
from checkpoints import plan_with, write_file
from refusals import failed, refused

import reshard
from reshard.errors import SourceError
from reshard.formats.zarr.layout import ZarrGroup

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def lying(tmp_path: Path) -> Path:
    path = write_file(tmp_path / "w.safetensors", {"w": np.arange(48, dtype=np.float32).reshape(8, 6)})
    plan_with(reshard.open(path), files=ZarrGroup(chunk_size=48, shard_size=0)).run(tmp_path / "plain")
    plan_with(reshard.open(path), files=ZarrGroup(chunk_size=48, shard_size=96)).run(tmp_path / "sharded")
    plan_with(reshard.open(path), files=ZarrGroup(chunk_size=48, shard_size=0, compression="zstd")).run(
        tmp_path / "zstd"
    )
    return tmp_path


def change(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def grid_of(*chunk: Any) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}


def sharded(codecs: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
    index = [{"name": "bytes"}, {"name": "crc32c"}]
    configuration = {"chunk_shape": [2, 6], "codecs": codecs, "index_codecs": index, **options}
    return [{"name": "sharding_indexed", "configuration": configuration}]


METADATA_LIES: dict[str, tuple[dict[str, Any], str]] = {
    "an absurd shape": ({"shape": [1 << 70, 6]}, "bad-shape"),
    "a product that overflows": ({"shape": [1 << 40, 1 << 40]}, "bad-shape"),
    "negative": ({"shape": [-8, 6]}, "bad-shape"),
    "not numbers": ({"shape": ["8", 6]}, "bad-shape"),
    "true": ({"shape": [True, 6]}, "bad-shape"),
    "too many dims": ({"shape": [1] * 99, "chunk_grid": grid_of(*[1] * 99)}, "bad-shape"),
    "a chunk of nothing": ({"chunk_grid": grid_of(0, 6)}, "bad-shape"),
    "a chunk of another rank": ({"chunk_grid": grid_of(2, 6, 1)}, "wrong-shape"),
    "too many chunks": ({"shape": [1 << 30, 1 << 20], "chunk_grid": grid_of(1, 1)}, "too-many-blocks"),
    "another grid": ({"chunk_grid": {"name": "rectilinear"}}, "bad-metadata"),
    "other names": ({"chunk_key_encoding": {"name": "mine"}}, "bad-metadata"),
    "a separator that leads away": (
        {"chunk_key_encoding": {"name": "default", "configuration": {"separator": "/../../"}}}, "bad-metadata"),
    "no codecs": ({"codecs": None}, "bad-metadata"),
    "another format": ({"zarr_format": 2}, "bad-metadata"),
    "larger chunks than its files": ({"chunk_grid": grid_of(4, 6)}, "truncated"),
    "another dtype in the attributes": ({"attributes": {"reshard": {"dtype": "float64"}}}, "wrong-dtype"),
    "a fill value of another kind": ({"fill_value": {"a": 1}}, "bad-value"),
    "storage transformers": ({"storage_transformers": [{"name": "mine"}]}, "unsupported-storage"),
    "a dtype that reshard never writes": ({"data_type": "uinu8"}, "unknown-dtype"),
    # What the outer compressor makes may be a thousand times the file, and what the inner one makes again.
    "zstd twice": (
        {"codecs": [{"name": "bytes"}, {"name": "zstd"}, {"name": "crc32c"}, {"name": "zstd"}]}, "unsupported-storage"),
    "lzma in gzip": (
        {"codecs": [{"name": "bytes"}, {"name": "numcodecs.lzma"}, {"name": "gzip"}]}, "unsupported-storage"),
    "compressed shards": (
        {"codecs": [*sharded([{"name": "bytes"}, {"name": "gzip"}]), {"name": "blosc"}]}, "unsupported-storage"),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "code"), METADATA_LIES.values(), ids=METADATA_LIES)
def test_metadata_that_lie(lying: Path, keys: dict[str, Any], code: str) -> None:
    change(lying / "plain" / "w" / "zarr.json", **keys)
    with refused(SourceError, code, "plain/w/") as caught:
        reshard.open(lying / "plain")
    assert "\n" not in caught.value.message


def test_a_chunk_that_is_cut_short_or_too_long(lying: Path) -> None:
    path = lying / "plain" / "w" / "c.1.0"
    whole = path.read_bytes()
    for content, code, places in (
        (whole[:-1], "truncated", ("47 bytes of 48",)),
        (whole + b"x", "wrong-size", ("float32 [2, 6]", "48")),
        (b"", "truncated", ("0 bytes of 48",)),
    ):
        path.write_bytes(content)
        with refused(SourceError, code, "c.1.0", *places):
            reshard.open(lying / "plain")


def index_of(*spans: tuple[int, int]) -> bytes:
    content = b"".join(struct.pack("<QQ", *span) for span in spans)
    return content + struct.pack("<I", google_crc32c.value(content))


@pytest.mark.parametrize(
    ("index", "code", "place"),
    [
        (index_of((0, 48), (48, 48))[:-1] + b"x", "wrong-checksum", "c.0.0"),
        (index_of((0, 48), (60, 48)), "out-of-range", "chunk 1 at bytes 60 to 108"),
        (index_of((0, 47), (48, 48)), "out-of-range", "chunk 0 at bytes 0 to 47"),
        (index_of((1 << 63, 48), (48, 48)), "out-of-range", "chunk 0"),
        (index_of((1 << 64) - 1 and ((1 << 64) - 1, 48), (48, 48)), "out-of-range", "chunk 0"),
    ],
)
def test_an_index_that_lies(lying: Path, index: bytes, code: str, place: str) -> None:
    path = lying / "sharded" / "w" / "c.0.0"
    path.write_bytes(path.read_bytes()[:-36] + index)
    with refused(SourceError, code, place):
        reshard.open(lying / "sharded")
    path.write_bytes(b"short")
    with refused(SourceError, "truncated", "c.0.0", "5 bytes of 36"):
        reshard.open(lying / "sharded")


def compressed(nbytes: int) -> bytes:
    from numcodecs import zstd

    return bytes(zstd.compress(bytes(nbytes), 1))


@pytest.mark.parametrize(
    "content",
    [b"", b"not zstd at all", compressed(47), compressed(49), compressed(1 << 28), compressed(48)[:-2],
     compressed(48)[:5] + b"\xff" * 12],
    ids=["empty", "noise", "less", "more", "a bomb", "truncated", "damaged"],
)  # fmt: skip
def test_compressed_chunks_that_lie(lying: Path, content: bytes) -> None:
    (lying / "zstd" / "w" / "c.2.0").write_bytes(content)
    own = reshard.open(lying / "zstd")
    with refused(SourceError, "bad-chunk", "c.2.0", "chunk 0"):
        reshard.plan(own).run(lying / "out")
    with refused(SourceError, "bad-chunk", "c.2.0", "chunk 0"):
        own["w"].compute(scheduler="synchronous")
    assert not list((lying / "out").rglob("*"))


def test_a_codec_that_zarr_does_not_know(lying: Path) -> None:
    change(lying / "plain" / "w" / "zarr.json", codecs=[{"name": "bytes"}, {"name": "nobody.knows"}])
    with refused(SourceError, "bad-chunk", "chunk 0"):
        reshard.open(lying / "plain")["w"].compute(scheduler="synchronous")


def test_codecs_in_codecs(lying: Path) -> None:
    """However deep they are, also where the metadata can be read but no longer be written for zarr."""
    file = lying / "plain" / "w" / "zarr.json"
    change(file, codecs="here")
    text = file.read_text()
    for depth in range(900, 1000):
        file.write_text(text.replace('"here"', "[" * depth + "]" * depth))
        with pytest.raises(SourceError):
            reshard.open(lying / "plain")["w"].compute(scheduler="synchronous")


@pytest.mark.parametrize("which", ["w", "w/zarr.json", "w/c", "w/c/1", "w/c/1/0", "zarr.json"])
def test_links_are_not_followed(lying: Path, which: str) -> None:
    array = zarr.open_group(lying / "slashes", mode="w").create_array("w", shape=(8, 6), chunks=(2, 6), dtype="int8")
    array[...] = 1
    path = lying / "slashes" / which
    path.rename(lying / "outside")
    path.symlink_to(lying / "outside")
    with refused(SourceError, "not-a-file"):
        reshard.open(lying / "slashes")


def test_whatever_else_is_in_a_store_is_a_file_or_a_directory(lying: Path) -> None:
    """Also where no chunk would be; and a directory is not taken for an absent chunk."""
    array = zarr.open_group(lying / "foreign", mode="w").create_array("w", shape=(8, 6), chunks=(2, 6), dtype="int8")
    array[...] = 1
    assert reshard.open(lying / "foreign")["w"].sum().compute() == 48
    stray = lying / "foreign" / "w" / "stray"
    stray.symlink_to(lying / "outside")
    with refused(SourceError, "not-a-file"):
        reshard.open(lying / "foreign")
    stray.unlink()
    os.mkfifo(stray)
    with refused(SourceError, "not-a-file"):
        reshard.open(lying / "foreign")
    stray.unlink()
    chunk = lying / "foreign" / "w" / "c" / "1" / "0"
    chunk.unlink()
    chunk.mkdir()
    with refused(SourceError, "not-a-file", "c/1/0"):
        reshard.open(lying / "foreign")


def test_a_group_that_lies_about_its_arrays(lying: Path) -> None:
    root = lying / "plain" / "zarr.json"
    whole = json.loads(root.read_text())
    own = whole["attributes"]["reshard"]
    for changed, code, name in (
        ({"tensors": ["w", "v"]}, "missing-tensor", "'v'"),
        ({"texts": {"w": "text"}}, "duplicate-name", "'w'"),
    ):
        root.write_text(json.dumps({**whole, "attributes": {"reshard": own | changed}}))
        with refused(SourceError, code, "/plain", name):
            reshard.open(lying / "plain")
    for changed in ({"texts": {"t": 1}}, {"notes": []}):
        root.write_text(json.dumps({**whole, "attributes": {"reshard": own | changed}}))
        with refused(SourceError, "bad-metadata", "plain/zarr.json"):
            reshard.open(lying / "plain")
    shutil.copytree(lying / "plain" / "w", lying / "plain" / "x")
    change(lying / "plain" / "x" / "zarr.json", attributes={"reshard": {"name": "w"}})
    root.write_text(json.dumps(whole))
    with refused(SourceError, "bad-name", "plain/x", "'w'"):
        reshard.open(lying / "plain")
    root.write_text("[" * 100_000)
    with refused(SourceError, "not-json"):
        reshard.open(lying / "plain")
    root.write_bytes((lying / "plain" / "w" / "zarr.json").read_bytes())
    with refused(SourceError, "not-a-group", root, "'array'"):
        reshard.open(lying / "plain")


# --- what was lost, and what nobody knows ---


@pytest.mark.parametrize(("store", "chunk"), [("plain", "c.1.0"), ("zstd", "c.3.0"), ("sharded", "c.0.0")])
def test_a_lost_chunk_of_an_own_store(lying: Path, store: str, chunk: str) -> None:
    """It was read as zeros, as zarr reads absent chunks; but reshard writes every chunk."""
    (lying / store / "w" / chunk).unlink()
    strategy = reshard.Strategy.of({"w": reshard.Layout.of([2], [0, -1])})
    reshard.write_strategy(strategy, lying / "t.ckpt")
    for words in (
        ["convert", lying / store, lying / "out", "--target-strategy", lying / "t.ckpt"],
        ["inspect", lying / store],
        ["verify", lying / store],
        ["verify", lying / store, "--against", lying / "w.safetensors"],
    ):
        failed(4, "missing-chunk", *words, places=(f"w/{chunk}",))
    assert not (lying / "out").exists()


def test_a_lost_chunk_in_the_index_of_an_own_shard(lying: Path) -> None:
    path = lying / "sharded" / "w" / "c.1.0"
    path.write_bytes(path.read_bytes()[:-36] + index_of((0, 48), ((1 << 64) - 1, (1 << 64) - 1)))
    with refused(SourceError, "missing-chunk", "c.1.0", "chunk 1"):
        reshard.open(lying / "sharded")


@pytest.mark.parametrize(
    ("file", "key", "code", "place"),
    [
        ("plain/w", "separator", "unknown-key", "default.sEparator"),
        ("plain/w", "endian", "bad-chunk", "w/c."),
        ("plain/w", "fill_value", "unknown-key", "fIll_value"),
        ("plain/w", "attributes", "unknown-key", "aTtributes"),
        ("plain/w", "dtype", "unknown-key", "attributes.reshard.dType"),
        ("plain/w", "listed", "unknown-key", "attributes.reshard.lIsted"),
        ("sharded/w", "index_location", "bad-chunk", "w/c."),
        ("zstd/w", "level", "bad-chunk", "w/c."),
        ("plain", "attributes", "unknown-key", "aTtributes"),
        ("plain", "texts", "unknown-key", "attributes.reshard.tExts"),
        ("plain/w", "configuration", "bad-metadata", "w/zarr.json"),
        ("plain/w", "reshard", "missing-notes", "w/zarr.json"),
        ("plain", "reshard", "missing-notes", "array 'w'"),
    ],
)
def test_a_misspelt_key(lying: Path, file: str, key: str, code: str, place: str) -> None:
    path = lying / file / "zarr.json"
    content = path.read_text()
    assert f'"{key}":' in content
    path.write_text(content.replace(f'"{key}":', f'"{key[0]}{key[1].upper()}{key[2:]}":'))
    with refused(SourceError, code, place):
        reshard.open(lying / file.partition("/")[0])["w"].compute(scheduler="synchronous")


@pytest.mark.parametrize(
    ("keys", "code", "place"),
    [
        ({"more": {"must_understand": True}}, "unknown-key", "more"),
        ({"more": None}, "unknown-key", "more"),
        ({"attributes": []}, "bad-metadata", "attributes []"),
        ({"attributes": {"reshard": 1}}, "bad-metadata", "'reshard'"),
        ({"codecs": [{"configuration": {}}]}, "bad-chunk", "w/c."),
        ({"codecs": sharded([{"name": "bytes"}], index_location="eMd")}, "bad-chunk", "w/c."),
    ],
)
def test_what_must_be_understood(lying: Path, keys: dict[str, Any], code: str, place: str) -> None:
    path = lying / "plain" / "w" / "zarr.json"
    change(path, more={"must_understand": False}, dimension_names=["rows", None])
    assert reshard.open(lying / "plain")["w"].compute().sum() == np.arange(48).sum()
    change(path, **keys)
    with refused(SourceError, code, place):
        reshard.open(lying / "plain")["w"].compute(scheduler="synchronous")
