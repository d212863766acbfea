"""Writes checkpoints as Orbax does, without it: OCDBT with any tree of nodes, zarr's formats 2 and 3, and faults."""

from __future__ import annotations

import json
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from google_crc32c import value as crc32c
from numcodecs import zstd

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from checkpoints import Array

MANIFEST_MAGIC, NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
INLINE = 1024
ABSENT = (1 << 64) - 1

Far = tuple[str, int, int]
"""A value in a file: the path, the offset and the length."""

Node = tuple[str, int, int, int, bytes]
"""A node: its file, offset, length and height, and its first key."""


def truth(case: Path) -> dict[str, Any]:
    """The tensors of a case by the names that reshard gives them, as arrays of their dtypes."""
    dtypes = json.loads((case / "info.json").read_text())["dtypes"]
    with np.load(case / "full.npz") as arrays:
        return {name: arrays[name].view(np.dtype(dtypes.get(name, arrays[name].dtype.name))) for name in arrays.files}


def varint(value: int) -> bytes:
    """A number in 7 bits a byte, the lowest first."""
    found = b""
    while value > 127:
        found += bytes([value & 127 | 128])
        value >>= 7
    return found + bytes([value])


def varints(values: Sequence[int]) -> bytes:
    return b"".join(map(varint, values))


def framed(magic: int, body: bytes, *, compressed: bool = False) -> bytes:
    """A manifest or a node: header, body and checksum."""
    body = zstd.compress(body, 1) if compressed else body
    head = magic.to_bytes(4, "big") + (len(body) + 18).to_bytes(8, "little") + bytes([0, int(compressed)])
    return head + body + crc32c(head + body).to_bytes(4, "little")


def table(paths: Sequence[str], bases: Mapping[str, str]) -> bytes:
    """A table of data files, without shared prefixes."""
    encoded = [path.encode() for path in paths]
    return b"".join([
        varint(len(encoded)), varints([0] * max(len(encoded) - 1, 0)), varints(list(map(len, encoded))),
        varints([len(bases.get(path, "")) for path in paths]), *encoded,
    ])  # fmt: skip


def keys_of(keys: Sequence[bytes]) -> tuple[bytes, bytes]:
    """The lengths of keys that share prefixes, and their suffixes."""
    shared = [0]
    for before, key in pairwise(keys):
        shared.append(next((n for n, (a, b) in enumerate(zip(before, key, strict=False)) if a != b), len(before)))
    suffixes = [key[n:] for key, n in zip(keys, shared, strict=True)]
    return varints(shared[1:]) + varints(list(map(len, suffixes))), b"".join(suffixes)


def leaf(values: Mapping[bytes, bytes | Far], bases: Mapping[str, str] | None = None) -> bytes:
    """The body of a leaf."""
    keys = sorted(values)
    far = [value for key in keys if isinstance(value := values[key], tuple)]
    paths = sorted({path for path, _, _ in far})
    lengths, suffixes = keys_of(keys)
    sizes = [value[2] if isinstance(value := values[key], tuple) else len(value) for key in keys]
    return b"".join([
        b"\0", table(paths, bases or {}), varint(len(keys)), lengths, suffixes, varints(sizes),
        bytes(isinstance(values[key], tuple) for key in keys), varints([paths.index(path) for path, _, _ in far]),
        varints([offset for _, offset, _ in far]),
        *(value for key in keys if isinstance(value := values[key], bytes)),
    ])  # fmt: skip


def interior(height: int, nodes: Sequence[Node], common: Sequence[int] | None = None) -> bytes:
    """The body of an interior node over nodes, which have whole keys unless `common` says how much they omit."""
    paths = sorted({node[0] for node in nodes})
    lengths, suffixes = keys_of([node[4] for node in nodes])
    return b"".join([
        bytes([height]), table(paths, {}), varint(len(nodes)), lengths, varints(common or [0] * len(nodes)), suffixes,
        varints([paths.index(node[0]) for node in nodes]), varints([node[1] for node in nodes]),
        varints([node[2] for node in nodes]), varints([1] * len(nodes)), varints([1] * len(nodes)),
        varints([0] * len(nodes)),
    ])  # fmt: skip


def manifest(root: tuple[str, int, int, int] | None) -> bytes:
    """A manifest of one version."""
    path, offset, nbytes, height = root or ("", 0, 0, 0)
    body = b"".join([
        bytes(16), varints([0, INLINE, 1 << 20]), b"\4", varint(0), table([path], {}), varint(1), varint(1),
        bytes([height]), varints([0, offset, nbytes, 1, nbytes, 0]), bytes(8), varint(0),
    ])  # fmt: skip
    return framed(MANIFEST_MAGIC, body)


class Database:
    """Writes a database: values are added in any order, and `finish` writes the tree.

    Args:
        root: its directory.
        file_bytes: the most bytes of values in a data file.
        per_node: how many entries a node has.
    """

    def __init__(self, root: Path, *, file_bytes: int = 1 << 30, per_node: int = 1 << 20, inline: int = INLINE) -> None:
        self.root, self.file_bytes, self.per_node, self.inline = root, file_bytes, per_node, inline
        self.values: dict[bytes, bytes | Far] = {}
        self.files = 0
        self.size = file_bytes
        (root / "d").mkdir(parents=True, exist_ok=True)

    def add(self, key: str, value: bytes | memoryview) -> None:
        if len(value) <= self.inline:
            self.values[key.encode()] = bytes(value)
            return
        if self.size >= self.file_bytes:
            self.files, self.size = self.files + 1, 0
        path = f"d/{self.files:032x}"
        with (self.root / path).open("ab") as file:
            file.write(value)
        self.values[key.encode()] = path, self.size, len(value)
        self.size += len(value)

    def finish(self, *, compressed: bool = True) -> None:
        keys = sorted(self.values)
        groups = [keys[n : n + self.per_node] for n in range(0, len(keys), self.per_node)]
        level = [self._write(leaf({k: self.values[k] for k in group}), 0, group[0], compressed) for group in groups]
        height = 0
        while len(level) > 1:
            height += 1
            groups_of_nodes = [level[n : n + self.per_node] for n in range(0, len(level), self.per_node)]
            level = [self._write(interior(height, nodes), height, nodes[0][4], compressed) for nodes in groups_of_nodes]
        (self.root / "manifest.ocdbt").write_bytes(manifest(level[0][:4]))

    def _write(self, body: bytes, height: int, first: bytes, compressed: bool) -> Node:
        content = framed(NODE_MAGIC, body, compressed=compressed)
        path = self.root / "d" / ("f" * 32)
        offset = path.stat().st_size if path.exists() else 0
        with path.open("ab") as file:
            file.write(content)
        return f"d/{'f' * 32}", offset, len(content), height, first


class Files:
    """Writes values to files of their own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def add(self, key: str, value: bytes | memoryview) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value)

    def finish(self) -> None:
        """Do nothing."""


def add_array(
    store: Database | Files, name: str, array: Array, chunk: Sequence[int] | None = None, *, zarr3: bool = False,
    level: int | None = 1, inner: Sequence[int] | None = None, fill: float | None = None, absent: Sequence[str] = (),
    contents: Array | None = None, **changed: Any,
) -> None:  # fmt: skip
    """Write an array: its metadata, some keys of it changed, and its chunks but those that are absent.

    If `contents` are given, all chunks have these.
    """
    chunk = tuple(chunk or array.shape)
    metadata: dict[str, Any]
    if zarr3:
        codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
        if level is not None:
            codecs.append({"name": "zstd", "configuration": {"level": level, "checksum": False}})
        index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        sharding = {"chunk_shape": list(inner or chunk), "codecs": codecs, "index_codecs": index}
        metadata = {
            "shape": array.shape, "data_type": array.dtype.name, "fill_value": fill or 0, "node_type": "array",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}}, "zarr_format": 3,
            "chunk_key_encoding": {"name": "default"},
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        }  # fmt: skip
    else:
        named = array.dtype.name if array.dtype.name == "bfloat16" else array.dtype.str
        metadata = {
            "chunks": chunk, "compressor": None if level is None else {"id": "zstd", "level": level},
            "dimension_separator": ".", "dtype": named, "fill_value": fill, "filters": None, "order": "C",
            "shape": array.shape, "zarr_format": 2,
        }  # fmt: skip
    store.add(f"{name}/{'zarr.json' if zarr3 else '.zarray'}", json.dumps(metadata | changed).encode())
    for cell in product(*(range(-(-a // b)) for a, b in zip(array.shape, chunk, strict=True))):
        key = "/".join(["c", *map(str, cell)]) if zarr3 else ".".join(map(str, cell)) or "0"
        if key not in absent:
            part = padded(array, cell, chunk) if contents is None else contents
            value = shard(part, tuple(inner or chunk), level) if zarr3 else encoded(part, level)
            store.add(f"{name}/{key}", value)


def padded(array: Array, cell: Sequence[int], chunk: Sequence[int]) -> Array:
    """A chunk, with zeros beyond the array."""
    part = array[tuple(slice(n * extent, (n + 1) * extent) for n, extent in zip(cell, chunk, strict=True))]
    if part.shape == tuple(chunk):
        return part
    whole = np.zeros(chunk, array.dtype)
    whole[tuple(map(slice, part.shape))] = part
    return whole


def encoded(part: Array, level: int | None) -> bytes:
    content = np.ascontiguousarray(part).tobytes()
    return content if level is None else zstd.compress(content, level)


def shard(part: Array, inner: Sequence[int], level: int | None) -> bytes:
    """A shard of inner chunks, its index at the end."""
    content, index = b"", b""
    for cell in product(*(range(a // b) for a, b in zip(part.shape, inner, strict=True))):
        chunk = encoded(padded(part, cell, inner), level)
        index += len(content).to_bytes(8, "little") + len(chunk).to_bytes(8, "little")
        content += chunk
    return content + index + crc32c(index).to_bytes(4, "little")


def leaf_of(path: Sequence[str | int], kind: str = "jax.Array") -> tuple[str, dict[str, Any]]:
    """An entry of a tree."""
    keys = [{"key": str(part), "key_type": 1 if isinstance(part, int) else 2} for part in path]
    value = {"value_type": kind, "skip_deserialize": kind in {"None", "Dict"}}
    return str(tuple(map(str, path))), {"key_metadata": keys, "value_metadata": value}


def write_tree(root: Path, paths: Sequence[Sequence[str | int]], **changed: Any) -> None:
    """Write `_METADATA`; a None takes a key out."""
    content = {
        "tree_metadata": dict(map(leaf_of, paths)), "use_ocdbt": True, "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True, "custom_metadata": None,
    } | changed  # fmt: skip
    kept = {key: value for key, value in content.items() if value is not None}
    root.mkdir(parents=True, exist_ok=True)
    (root / "_METADATA").write_text(json.dumps(kept))


def write_orbax(root: Path, arrays: Mapping[str, Array], *, ocdbt: bool = True, **options: Any) -> dict[str, Array]:
    """Write an item of arrays, whose names are paths with dots; return them."""
    kinds = {key: options.pop(key) for key in ("file_bytes", "per_node", "inline") if key in options}
    store = Database(root, **kinds) if ocdbt else Files(root)
    for name, array in arrays.items():
        add_array(store, name, array, **options)
    store.finish()
    write_tree(root, [name.split(".") for name in arrays], use_ocdbt=ocdbt, use_zarr3=options.get("zarr3", False))
    return dict(arrays)


def numbers(seed: int = 0) -> dict[str, Array]:
    """Arrays of some dtypes and shapes."""
    rng = np.random.default_rng(seed)
    return {
        "params.w": rng.standard_normal((7, 6, 5)).astype(np.float32),
        "params.b": rng.standard_normal(40).astype(ml_dtypes.bfloat16),
        "params.big": rng.standard_normal((40, 30)).astype(np.float32),
        "mask": rng.integers(0, 2, (9,)).astype(bool),
        "step": np.array(7, np.int32),
    }  # fmt: skip


def maxtext(hf: Mapping[str, Array], heads: int, groups: int, *, pairs: bool = True) -> dict[str, Array]:
    """What MaxText has of a model of Hugging Face, but that queries are not divided by the root of the head's size.

    Source: MaxText's `checkpoint_conversion/utils/param_mapping.py`, the hooks of Llama 3.1: a kernel is the transposed
    weight, its rows or columns cut into heads; layers are stacked along axis 1; and RoPE turns pairs of
    neighbours in a head, which are half a head apart in Hugging Face.
    """

    def kernel(weight: Array, cut: int, *, rope: bool = False) -> Array:
        made = weight.T.reshape(weight.shape[1], cut, -1) if cut else weight.T
        if rope and pairs:
            first, second = np.split(made, 2, axis=-1)
            made = np.stack([first, second], axis=-1).reshape(made.shape)
        return made

    parts: dict[str, tuple[str, Any]] = {
        "pre_self_attention_layer_norm.scale": ("input_layernorm", lambda x: x),
        "post_self_attention_layer_norm.scale": ("post_attention_layernorm", lambda x: x),
        "self_attention.query.kernel": ("self_attn.q_proj", lambda x: kernel(x, heads, rope=True)),
        "self_attention.key.kernel": ("self_attn.k_proj", lambda x: kernel(x, groups, rope=True)),
        "self_attention.value.kernel": ("self_attn.v_proj", lambda x: kernel(x, groups)),
        "self_attention.out.kernel": ("self_attn.o_proj", lambda x: x.T.reshape(heads, -1, x.shape[0])),
        "self_attention.query_norm.scale": ("self_attn.q_norm", lambda x: x),
        "self_attention.key_norm.scale": ("self_attn.k_norm", lambda x: x),
        "mlp.wi_0.kernel": ("mlp.gate_proj", lambda x: kernel(x, 0)),
        "mlp.wi_1.kernel": ("mlp.up_proj", lambda x: kernel(x, 0)),
        "mlp.wo.kernel": ("mlp.down_proj", lambda x: kernel(x, 0)),
    }
    made = {
        "token_embedder.embedding": hf["model.embed_tokens.weight"],
        "decoder.decoder_norm.scale": hf["model.norm.weight"],
    }
    if "lm_head.weight" in hf:
        made["decoder.logits_dense.kernel"] = hf["lm_head.weight"].T
    layers = 1 + max(int(name.split(".")[2]) for name in hf if name.startswith("model.layers."))
    for name, (part, change) in parts.items():
        if f"model.layers.0.{part}.weight" in hf:
            values = [change(hf[f"model.layers.{n}.{part}.weight"]) for n in range(layers)]
            made[f"decoder.layers.{name}"] = np.stack(values, axis=1)
    return {f"params.params.{name}": np.ascontiguousarray(value) for name, value in made.items()}
