"""Files of Orbax that lie: one error with a code, in little time and memory."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import assert_equal
from numcodecs import zstd
from orbax_files import (
    MANIFEST_MAGIC,
    NODE_MAGIC,
    Database,
    add_array,
    encoded,
    framed,
    interior,
    leaf,
    manifest,
    numbers,
    table,
    varint,
    varints,
    write_orbax,
    write_tree,
)
from refusals import refused
from samples import slow

import reshard
from reshard.errors import ReshardError, SourceError
from reshard.formats.orbax import ocdbt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

W = np.arange(48, dtype=np.float32).reshape(6, 8)
METADATA = {
    "chunks": [6, 8], "compressor": None, "dimension_separator": ".", "dtype": "<f4", "fill_value": None,
    "filters": None, "order": "C", "shape": [6, 8], "zarr_format": 2,
}  # fmt: skip
NAMED = '{"sharding_type": "NamedSharding", "shape": '
ARRAY = {b"w/.zarray": json.dumps(METADATA).encode()}


@pytest.fixture(autouse=True)
def _bounded() -> Iterator[None]:
    """Every test ends soon, in little memory."""
    tracemalloc.start()
    begin = time.perf_counter()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert time.perf_counter() - begin < 30
    assert peak < 300e6


def write_nodes(root: Path, *nodes: bytes, height: int = 0, at: int | None = None) -> None:
    """Write nodes into one file; the last, or the one at an offset, is the root."""
    (root / "d").mkdir(parents=True)
    (root / "d" / "n").write_bytes(b"".join(nodes))
    offset = sum(map(len, nodes[:-1])) if at is None else at
    (root / "manifest.ocdbt").write_bytes(manifest(("d/n", offset, len(nodes[-1]), height)))
    write_tree(root, [("w",)])


def node(body: bytes, *, compressed: bool = False) -> bytes:
    return framed(NODE_MAGIC, body, compressed=compressed)


def levels(count: int) -> list[bytes]:
    """Levels of nodes, each with a hundred references to the one below."""
    nodes, offset = [FIRST], 0
    for height in range(1, count + 1):
        below = [("d/n", offset, len(nodes[-1]), 0, b"w%02d" % number) for number in range(100)]
        offset += len(nodes[-1])
        nodes.append(node(interior(height, below)))
    return nodes


def over(first: bytes, second: bytes) -> list[bytes]:
    """Return two equal leaves, and the node over them with the first key of each."""
    places = [("d/n", 0, len(WHOLE), 0, first), ("d/n", len(WHOLE), len(WHOLE), 0, second)]
    return [WHOLE, WHOLE, node(interior(1, places))]


FIRST, WHOLE = node(leaf(ARRAY)), node(leaf(ARRAY | {b"w/0.0": W.tobytes()}))
BASE = {"../secret": "../"}
OWN_BYTES = len(node(interior(1, [("d/n", len(FIRST), 50, 0, b"w")])))
NODES: dict[str, tuple[list[bytes], int, str, str]] = {
    # Each node is below one that is higher by one, so that none can be below itself.
    "a tree that contains itself": (
        [FIRST, node(interior(1, [("d/n", len(FIRST), OWN_BYTES, 0, b"w")]))], 1, "corrupt", "d/n"),
    "100^10 references": (levels(10), 10, "corrupt", "d/n"),
    "a key in two nodes": (over(b"a", b"b"), 1, "corrupt", "d/n"),
    "keys that do not ascend": (over(b"b", b"a"), 1, "corrupt", "d/n"),
    "a wrong checksum": ([WHOLE[:40] + b"!" + WHOLE[41:]], 0, "corrupt", "d/n"),
    "a base path that leads out": (
        [node(leaf(ARRAY | {b"w/0.0": ("../secret", 0, W.nbytes)}, BASE))], 0, "outside-directory", "../secret"),
    **{
        f"a value at {place}": ([node(leaf(ARRAY | {b"w/0.0": ("d/n", *place)}))], 0, "truncated", "d/n")
        for place in ((1 << 63, 5), (0, 1 << 62), ((1 << 64) - 1, (1 << 64) - 1))
    },
}  # fmt: skip


@pytest.mark.parametrize(("nodes", "height", "code", "place"), NODES.values(), ids=NODES)
def test_nodes_that_lie(tmp_path: Path, nodes: list[bytes], height: int, code: str, place: str) -> None:
    (tmp_path / "secret").write_bytes(W.tobytes() * 20)
    write_nodes(tmp_path / "in", *nodes, height=height)
    with refused(SourceError, code, place):
        reshard.open(tmp_path / "in")


def test_what_is_written_here_can_be_read(tmp_path: Path) -> None:
    write_nodes(tmp_path, node(leaf(ARRAY | {b"w/0.0": W.tobytes()})))
    assert_equal(reshard.open(tmp_path), {"w": W})


@pytest.mark.parametrize(
    "path", ["../secret", "/etc/passwd", "d/../../secret", "d/n/../n", "", "d", "d\0n", "x" * 5000]
)
def test_a_path_that_leads_out_or_nowhere(tmp_path: Path, path: str) -> None:
    (tmp_path / "secret").write_bytes(W.tobytes() * 20)
    write_nodes(tmp_path / "in", node(leaf(ARRAY | {b"w/0.0": (path, 0, W.nbytes)})))
    with pytest.raises(SourceError) as caught:
        reshard.open(tmp_path / "in")
    assert set(caught.value.codes) <= {"outside-directory", "missing-file", "not-a-file", "corrupt"}


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(W.tobytes() * 20)
    write_nodes(tmp_path / "in", node(leaf(ARRAY | {b"w/0.0": ("d/link", 0, W.nbytes)})))
    (tmp_path / "in" / "d" / "link").symlink_to(tmp_path / "secret")
    with refused(SourceError, "not-a-file", "link"):
        reshard.open(tmp_path / "in")


def test_a_tree_of_the_greatest_height(tmp_path: Path) -> None:
    nodes = [node(leaf(ARRAY | {b"w/0.0": W.tobytes()}))]
    offset = 0
    for height in range(1, 256):
        below = [("d/n", offset, len(nodes[-1]), 0, b"w")]
        offset += len(nodes[-1])
        nodes.append(node(interior(height, below)))
    write_nodes(tmp_path, *nodes, height=255)
    assert_equal(reshard.open(tmp_path), {"w": W})


@pytest.mark.parametrize("nbytes", [600 << 20, 1 << 30])
def test_a_node_that_decodes_to_more_than_any_has(tmp_path: Path, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ocdbt, "_LARGEST_TREE", 1 << 20)
    write_nodes(tmp_path, framed(NODE_MAGIC, bytes(nbytes >> 6), compressed=True))
    with refused(SourceError, "corrupt", "d/n"):
        reshard.open(tmp_path)


@pytest.mark.parametrize("count", [1 << 20, 1 << 40, (1 << 64) - 1])
def test_counts_that_no_node_can_have(tmp_path: Path, count: int) -> None:
    body = leaf(ARRAY)
    wrong = [
        b"\0" + varint(count),  # files
        b"\0" + table([], {}) + varint(count),  # keys
        b"\0" + table([], {}) + varints([1, count]),  # the length of a key
        body[:2] + b"\xff" * 20,
        b"\0" + table([], {}) + varints([1, 1]) + b"w" + varint(count) + b"\0",
    ]
    for number, each in enumerate(wrong):
        write_nodes(tmp_path / str(number), node(each))
        with refused(SourceError, "corrupt", "d/n"):
            reshard.open(tmp_path / str(number))


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\0" * 18, bytes(5 << 20), manifest(None)[:-1], manifest(("d/n", 0, 1 << 60, 0)),
        manifest(("d/x", 0, 50, 0)), manifest(("../d/n", 0, 50, 0)), manifest(("d/n", 0, 17, 0)),
        framed(MANIFEST_MAGIC, b""), framed(MANIFEST_MAGIC, bytes(16) + b"\1"), framed(NODE_MAGIC, bytes(30)),
        framed(MANIFEST_MAGIC, bytes(16) + varints([0, 1, 1]) + b"\4\0" + table([], {}) + varint(0)),
        framed(MANIFEST_MAGIC, bytes(16) + varints([0, 1, 1]) + b"\4\0" + varint(1 << 60)),
    ],
    ids=range(13),
)  # fmt: skip
def test_manifests_that_are_none(tmp_path: Path, content: bytes) -> None:
    write_nodes(tmp_path, node(leaf(ARRAY)))
    (tmp_path / "manifest.ocdbt").write_bytes(content)
    with pytest.raises(SourceError) as caught:
        reshard.open(tmp_path)
    assert set(caught.value.codes) <= {
        "corrupt", "truncated", "missing-file", "outside-directory", "unsupported-version",
    }  # fmt: skip


def test_an_empty_database(tmp_path: Path) -> None:
    write_nodes(tmp_path, node(leaf(ARRAY)))
    (tmp_path / "manifest.ocdbt").write_bytes(manifest(None))
    with refused(SourceError, "no-tensors", "w"):
        reshard.open(tmp_path)


@pytest.fixture(params=[False, True])
def streamed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks in files are decoded piece by piece, or whole."""
    if request.param:
        monkeypatch.setattr("reshard.formats.zarr.blocks.LONGEST_WHOLE", 0)


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("far", [False, True])
def test_a_chunk_that_decodes_to_more_or_less_than_it_has(tmp_path: Path, far: bool) -> None:
    for number, content in enumerate((bytes(1 << 26), bytes(W.nbytes - 1), b"")):
        store = Database(tmp_path / str(number), inline=0 if far else 1 << 20)
        store.add("w/.zarray", json.dumps(METADATA | {"compressor": {"id": "zstd"}}).encode())
        store.add("w/0.0", zstd.compress(content, 1))
        store.finish()
        write_tree(tmp_path / str(number), [("w",)])
        source = reshard.open(tmp_path / str(number))
        with refused(SourceError, "bad-chunk"):
            source["w"].compute()
        with refused(SourceError, "bad-chunk"):
            reshard.plan(source, to="hf").run(tmp_path / f"out{number}", fsync=False)


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize(
    "value", [b"", b"\x28\xb5\x2f\xfd", os.urandom(100), encoded(W, 1)[:-3], encoded(W, 1) * 2], ids=range(5)
)
def test_a_chunk_that_is_not_one_frame(tmp_path: Path, value: bytes) -> None:
    store = Database(tmp_path, inline=0)
    store.add("w/.zarray", json.dumps(METADATA | {"compressor": {"id": "zstd"}}).encode())
    store.add("w/0.0", value)
    store.finish()
    write_tree(tmp_path, [("w",)])
    with refused(SourceError, "bad-chunk"):
        reshard.open(tmp_path)["w"].compute()


def test_shapes_of_chunks_that_no_disk_holds(tmp_path: Path) -> None:
    for number, shape in enumerate(([1 << 45], [1 << 61], [1 << 70])):
        store = Database(tmp_path / str(number))
        store.add("w/.zarray", json.dumps(METADATA | {"shape": shape, "chunks": shape}).encode())
        store.add("w/0", b"")
        store.finish()
        write_tree(tmp_path / str(number), [("w",)])
        with refused(SourceError, "no-tensors", "w"):
            reshard.open(tmp_path / str(number))


def test_many_absent_chunks(tmp_path: Path) -> None:
    """A small file may describe any number of them."""
    store = Database(tmp_path)
    for name in range(40):
        store.add(f"w{name}/.zarray", json.dumps(METADATA | {"shape": [1 << 19], "chunks": [1]}).encode())
    store.finish()
    write_tree(tmp_path, [(f"w{name}",) for name in range(40)])
    with pytest.raises(SourceError) as caught:
        reshard.open(tmp_path)
    assert caught.value.code == "no-tensors"


@pytest.mark.parametrize(
    "key",
    [
        "'a'", "(1,)", "()", "('a', 2)", "__import__('os').system('false')", "(" * 5000, "(('a',),)", "('a'", "",
        "('" + "a" * 9000 + "',)", "(" + "'a'," * 3000 + ")", "('\\ud800',)", "[x for x in ()]", "('',)",
    ],
    ids=lambda key: key[:20],
)  # fmt: skip
def test_keys_of_the_tree_that_are_no_tuples(tmp_path: Path, key: str) -> None:
    write_orbax(tmp_path, {"a": W})
    value = {"value_metadata": {"value_type": "jax.Array", "skip_deserialize": False}}
    (tmp_path / "_METADATA").write_text(json.dumps({"tree_metadata": {key: value}, "use_ocdbt": True}))
    with pytest.raises(SourceError) as caught:
        reshard.open(tmp_path)
    assert set(caught.value.codes) <= {"bad-metadata", "bad-name"}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"{", b"[" * 100000, b"\xff", b'{"tree_metadata": []}', b'{"tree_metadata": {"(\'a\',)": 1}}',
        b'{"tree_metadata": {"(\'a\',)": {"value_metadata": {"value_type": 1}}}}', b'{"a": 1, "a": 2}',
        b'{"tree_metadata": {}, "n": ' + b"9" * 10000 + b"}",
    ],
    ids=range(10),
)  # fmt: skip
def test_metadata_that_are_none(tmp_path: Path, content: bytes) -> None:
    write_orbax(tmp_path, {"a": W})
    (tmp_path / "_METADATA").write_bytes(content)
    with pytest.raises(SourceError) as caught:
        reshard.open(tmp_path)
    assert set(caught.value.codes) <= {"bad-metadata", "not-json", "wrong-type", "duplicate-key", "no-tensors"}


@pytest.mark.parametrize(
    "sharding",
    [
        1, "", "[" * 9999, '{"sharding_type": "NamedSharding"}', NAMED,
        NAMED + '[1e9], "axis_names": ["x"], "partition_spec": []}',
        NAMED + '[100000000], "axis_names": ["x"], "partition_spec": []}',
        NAMED + '[2, 2], "axis_names": ["x", "x"], "partition_spec": ["x", "x"]}',
        NAMED + '[2], "axis_names": ["x"], "partition_spec": [{"a": 1}]}',
        NAMED + '[2], "axis_names": [[]], "partition_spec": []}',
        NAMED + '[7], "axis_names": ["x"], "partition_spec": ["x"]}',
        NAMED + '[2], "axis_names": ["x"], "partition_spec": ["x"], "device_mesh": {"mesh": [{"id": -1}]}}',
    ],
    ids=range(12),
)  # fmt: skip
def test_shardings_of_any_kind_are_no_error(tmp_path: Path, sharding: Any) -> None:
    write_orbax(tmp_path, {"a": W})
    (tmp_path / "_sharding").write_text(json.dumps({"YQ==": sharding, "%": "", "/w==": ""}))
    assert_equal(reshard.open(tmp_path), {"a": W})


@pytest.mark.parametrize("zarr3", [False, True])
@pytest.mark.parametrize("level", [None, 1])
@pytest.mark.parametrize("seed", [0, slow(1), slow(2), slow(3)])
def test_any_flipped_byte_is_noticed_or_gives_what_it_says(
    tmp_path: Path, zarr3: bool, level: int | None, seed: int
) -> None:
    """Never an error of another kind; values of plain chunks have no checksum."""
    full = numbers()
    store = Database(tmp_path, file_bytes=2000, per_node=7)
    for name, array in full.items():
        add_array(store, name, array, tuple(max(2, n // 2) for n in array.shape), zarr3=zarr3, level=level)
    store.finish()
    write_tree(tmp_path, [name.split(".") for name in full])
    random = Random(seed)  # noqa: S311
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    for _ in range(20):
        path = random.choice(files)
        content = bytearray(path.read_bytes())
        at = random.randrange(len(content))
        before, content[at] = content[at], content[at] ^ 1 << random.randrange(8)
        path.write_bytes(content)
        with suppress(ReshardError):
            source = reshard.open(tmp_path)
            for name in source:
                source[name].compute()
        content[at] = before
        path.write_bytes(content)


@pytest.mark.parametrize("prefix", [0, 60000], ids=["many", "long"])
def test_keys_that_take_more_memory_than_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: int
) -> None:
    """A list of keys that share prefixes, compressed, takes a small part of its size."""
    monkeypatch.setattr(ocdbt, "_LARGEST_TREE", 64 << 20)
    count = 20_000 if prefix else 12_000_000
    lengths = (varint(prefix + 2) + b"\2" * (count - 1)) if prefix else b"\0" * count
    keys = b"".join(number.to_bytes(2, "big") for number in range(count)) if prefix else b""
    body = b"\0" + table(["d/n"], {}) + varint(count) + varint(prefix) * (count - 1) + lengths + b"k" * prefix + keys
    write_nodes(tmp_path, node(body + b"\0" * (2 * count if prefix else 0), compressed=True))
    assert (tmp_path / "d" / "n").stat().st_size < 1e6
    with refused(SourceError, "corrupt", "d/n"):
        reshard.open(tmp_path)
