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
from checkpoints import write_file
from commands import call

import reshard
from reshard.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def lying(tmp_path: Path) -> Path:
    path = write_file(tmp_path / "w.safetensors", {"w": np.arange(48, dtype=np.float32).reshape(8, 6)})
    reshard.open(path).to_zarr(tmp_path / "plain", chunk_size=48, shard_size=0)
    reshard.open(path).to_zarr(tmp_path / "sharded", chunk_size=48, shard_size=96)
    reshard.open(path).to_zarr(tmp_path / "zstd", chunk_size=48, shard_size=0, compression="zstd")
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
    "another format": ({"zarr_format": 2}, "is not metadata of zarr's format 3"),
    "larger chunks than its files": ({"chunk_grid": grid_of(4, 6)}, "has 48 bytes; a chunk of float32 .* has 96"),
    "another dtype in the attributes": ({"attributes": {"reshard": {"dtype": "float64"}}}, "says dtype 'float64'"),
    "a fill value of another kind": ({"fill_value": {"a": 1}}, "which is not a float32"),
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
    ids=["empty", "noise", "less", "more", "a bomb", "truncated", "damaged"],
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


def test_whatever_else_is_in_a_store_is_a_file_or_a_directory(lying: Path) -> None:
    """Also where no chunk would be; and a directory is not taken for an absent chunk."""
    array = zarr.open_group(lying / "foreign", mode="w").create_array("w", shape=(8, 6), chunks=(2, 6), dtype="int8")
    array[...] = 1
    assert reshard.open(lying / "foreign")["w"].sum().compute() == 48
    stray = lying / "foreign" / "w" / "stray"
    stray.symlink_to(lying / "outside")
    with pytest.raises(SourceError, match=r"stray: is a link; those in a zarr store are not followed"):
        reshard.open(lying / "foreign")
    stray.unlink()
    os.mkfifo(stray)
    with pytest.raises(SourceError, match=r"stray: is not a regular file"):
        reshard.open(lying / "foreign")
    stray.unlink()
    chunk = lying / "foreign" / "w" / "c" / "1" / "0"
    chunk.unlink()
    chunk.mkdir()
    with pytest.raises(SourceError, match=r"c/1/0: is not a regular file; expected a chunk"):
        reshard.open(lying / "foreign")


def test_a_group_that_lies_about_its_arrays(lying: Path) -> None:
    root = lying / "plain" / "zarr.json"
    whole = json.loads(root.read_text())
    own = whole["attributes"]["reshard"]
    for changed, match in (
        ({"tensors": ["w", "v"]}, "tensor 'v' is in the list of the group, and has no array"),
        ({"texts": {"w": "text"}}, "is both an array and a text"),
        ({"texts": {"t": 1}}, "not an object of strings"),
        ({"notes": []}, "not an object of strings"),
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


# --- what was lost, and what nobody knows ---


@pytest.mark.parametrize(("store", "chunk"), [("plain", "c.1.0"), ("zstd", "c.3.0"), ("sharded", "c.0.0")])
def test_a_lost_chunk_of_an_own_store(lying: Path, store: str, chunk: str) -> None:
    """It was read as zeros, as zarr reads absent chunks; but reshard writes every chunk."""
    (lying / store / "w" / chunk).unlink()
    strategy = reshard.Strategy.of({"w": reshard.Layout.of([2], [0, -1])})
    reshard.write_strategy(strategy, lying / "t.ckpt")
    for words in (
        ["transform", lying / store, lying / "out", "--target-strategy", lying / "t.ckpt"],
        ["inspect", lying / store],
        ["verify", lying / store],
        ["verify", lying / store, "--against", lying / "w.safetensors"],
    ):
        refused = call(*words)
        assert refused.exit_code == 4
        assert f"w/{chunk}: is not there: reshard wrote every chunk of tensor 'w'" in refused.stderr
    assert not (lying / "out").exists()


def test_a_lost_chunk_in_the_index_of_an_own_shard(lying: Path) -> None:
    path = lying / "sharded" / "w" / "c.1.0"
    path.write_bytes(path.read_bytes()[:-36] + index_of((0, 48), ((1 << 64) - 1, (1 << 64) - 1)))
    with pytest.raises(SourceError, match=r"c\.1\.0: has no chunk 1 in its index: reshard wrote every chunk"):
        reshard.open(lying / "sharded")


def renamed(path: Path, old: str, new: str) -> None:
    """Misspell a key."""
    content = path.read_text()
    assert f'"{old}":' in content
    path.write_text(content.replace(f'"{old}":', f'"{new}":'))


@pytest.mark.parametrize(
    ("store", "file", "key", "match"),
    [
        ("plain", "w", "separator", "has default.sEparator, which is not known; expected separator"),
        ("plain", "w", "endian", "has bytes.eNdian, which is not known"),
        ("plain", "w", "configuration", "has cOnfiguration, which is not known|lacks what describes an array"),
        ("plain", "w", "fill_value", "has fIll_value, which is not known"),
        ("plain", "w", "attributes", "has aTtributes, which is not known"),
        ("plain", "w", "dtype", "has attributes.reshard.dType, which is not known; expected dtype, layout"),
        ("plain", "w", "listed", "has attributes.reshard.lIsted, which is not known"),
        ("plain", "w", "reshard", "has no notes of reshard .*which wrote it"),
        ("sharded", "w", "index_location", "has sharding_indexed.iNdex_location, which is not known"),
        ("zstd", "w", "level", "has zstd.lEvel, which is not known"),
        ("plain", ".", "attributes", "has aTtributes, which is not known"),
        ("plain", ".", "texts", "has attributes.reshard.tExts, which is not known"),
        ("plain", ".", "reshard", "has no notes of reshard .*and array 'w' has"),
    ],
)
def test_a_misspelt_key(lying: Path, store: str, file: str, key: str, match: str) -> None:
    renamed(lying / store / file / "zarr.json", key, key[0] + key[1].upper() + key[2:])
    with pytest.raises(SourceError, match=match):
        reshard.open(lying / store)


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"more": {"must_understand": True}}, "has more, which is not known"),
        ({"more": None}, "has more, which is not known"),
        ({"storage_transformers": [{"name": "mine"}]}, "has storage transformers"),
        ({"attributes": []}, r"its attributes are \[\]; expected an object"),
        ({"attributes": {"reshard": 1}}, "expected an object, and one in 'reshard'"),
        ({"codecs": [{"name": "bytes", "endian": "big"}]}, "has endian, which is not known"),
        ({"codecs": [{"configuration": {}}]}, "expected a name and an object of options"),
    ],
)
def test_what_must_be_understood(lying: Path, keys: dict[str, Any], match: str) -> None:
    path = lying / "plain" / "w" / "zarr.json"
    change(path, more={"must_understand": False}, dimension_names=["rows", None])
    assert reshard.open(lying / "plain")["w"].compute().sum() == np.arange(48).sum()
    change(path, **keys)
    with pytest.raises(SourceError, match=match):
        reshard.open(lying / "plain")


def test_an_index_at_neither_end(lying: Path) -> None:
    path = lying / "sharded" / "w" / "zarr.json"
    path.write_text(path.read_text().replace('"end"', '"eMd"'))
    with pytest.raises(SourceError, match="has index_location 'eMd'; expected 'start' or 'end'"):
        reshard.open(lying / "sharded")


def test_an_array_of_an_own_store_has_a_dtype_that_is_known(lying: Path) -> None:
    change(lying / "plain" / "w" / "zarr.json", data_type="uinu8")
    with pytest.raises(SourceError, match="is of zarr's dtype 'uinu8', which reshard never writes"):
        reshard.open(lying / "plain")
