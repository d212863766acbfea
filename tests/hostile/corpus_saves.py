"""Hostile files of `torch.save`: pickles, specs of DTensors and directories of zips that lie, or take what they like."""

from __future__ import annotations

import struct
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from corpus_dcp import COMMANDS, archive
from item import Item
from makers import tree
from saves_files import Made, Storage, dtensor, mesh, shard, tensor, write_save

if TYPE_CHECKING:
    from pathlib import Path

ROWS = np.arange(8, dtype=np.float32).reshape(4, 2)
NAME = "model_world_size_1_rank_0.pt"

save = partial(Item, commands=COMMANDS, headroom=100_000_000, seconds=2)

# fmt: off


def alone(state: Any, name: str, says: str, code: int = 4) -> Item:
    def make(path: Path) -> None:
        write_save(path, state)

    return save(name, make, says, code=code, file="bad.pt")


def ranked(placements: Any, over: Any, name: str, says: str, *, shape: tuple[int, ...] = (4, 2), code: int = 4) -> Item:
    """A directory of one rank, that has a tensor of one spec."""
    def make(path: Path) -> None:
        write_save(path, {"w": dtensor(tensor(ROWS), shape, placements, over)})

    return save(name, tree({NAME: make}), says, code=code, file="bad")


def a_mesh(sizes: Any, strides: Any = (1,), ranks: Any = (0,), axes: int = 1) -> Made:
    layout = Made("_FlatLayout", state={"shape": sizes, "stride": strides})
    return Made("DeviceMesh", state={"_layout": Made("_MeshLayout", state={"axes": (layout,) * axes}), "_flatten_rank_map": ranks})


def directory(count: int, nbytes: int, begin: int, entries: bytes = b"") -> bytes:
    """A zip with nothing in it but a directory that says so much of itself."""
    head = b"PK\3\4" + bytes(min(begin, 1 << 24) - 4) + entries
    end = struct.pack("<4sQ12x4Q", b"PK\6\6", 44, count, count, nbytes, begin)
    locator = struct.pack("<4s4xQI", b"PK\6\7", len(head), 1)
    few, small, near = min(count, 0xFFFF), min(nbytes, 0xFFFFFFFF), min(begin, 0xFFFFFFFF)
    return head + end + locator + struct.pack("<4s4x2H2I2x", b"PK\5\6", few, few, small, near)


def entry(name: bytes, header: int, nbytes: int, method: int = 0) -> bytes:
    return struct.pack("<4s6xH8xIIH12xI", b"PK\1\2", method, nbytes, nbytes, len(name), header) + name


def doubled() -> dict[str, Any]:
    found: dict[str, Any] = {"w": 1}
    for _ in range(31):
        found = {"a": found, "b": found}
    return found


def endless() -> list[Any]:
    found: list[Any] = []
    found.append({"a": found})
    return found


ONES = tuple([1] * 50_000)
DIRECTORY = b"".join(entry(b"a/%06d" % number, 38 * number, 0) for number in range(50_000))

SAVES = [
    alone({"w": tensor(ROWS)}, "nothing wrong", "", 0),
    ranked([shard(0)], mesh((1,), 0), "a rank with nothing wrong", "", code=0),
    alone({"w": Made("system", "touch called", module="os")}, "a call", "no-tensors"),
    alone(doubled(), "dicts, each of which has the one before twice", "too-large"),
    alone({"w": endless()}, "a list that has itself", "too-large"),
    alone({str(n): {} for n in range(30_000)}, "30,000 dicts", "no-tensors"),
    alone({"\x1b[2J\nerror: no": 7}, "a name for a terminal", "no-tensors"),
    alone({"w": tensor(ROWS, storage=Storage(ROWS.reshape(-1), 1 << 62))}, "a storage of 2**62 elements", "no-tensors"),
    ranked([shard(0)], a_mesh((1 << 62,)), "a mesh of 2**62", "no-tensors @ the 1"),
    ranked([shard(0)], a_mesh(ONES, ONES), "an axis of 50,000 parts", "no-tensors @ 'w'"),
    ranked([shard(0)], a_mesh((1,), ranks=ONES), "a map of 50,000 ranks", "no-tensors @ 'w'"),
    ranked([shard(1 << 62)], mesh((1,), 0), "dimension 2**62", "no-tensors @ dimension 4611686018427387904"),
    ranked([shard(0, 1 << 62)], mesh((1,), 0), "2**62 pieces", "no-tensors @ most 256", shape=(1 << 50, 2)),
    ranked([shard(0)], mesh((1,), 0), "a shape of 2**62 by 2**62", "no-tensors @ 'w'", shape=(1 << 62, 1 << 62)),
    save("a directory of a million records", directory(1_000_000, 46_000_000, 4, bytes(46_000_000)), "corrupt @ 000 records", file="bad.pt"),
    save("a directory of 50,000 records of nothing", directory(50_000, len(DIRECTORY), 38 * 50_000, DIRECTORY), "corrupt @ 'data.pkl'", file="bad.pt"),
    save("50,000 records that are one", directory(50_000, 50_000 * 54, 38, entry(b"a/000000", 0, 0) * 50_000), "corrupt @ '000000'", file="bad.pt"),
    save("a directory behind its end", directory(1, 46, 1 << 62, entry(b"a", 4, 0)), "corrupt", file="bad.pt"),
    save("a record that is compressed", directory(1, 56, 4, entry(b"a/data.pkl", 0, 0, 8)), "corrupt @ 'data.pkl'", file="bad.pt"),
    save("500,000 things outside", archive(b"]" + (b"(" + b"NQ" * 1000 + b"e") * 500 + b"."), "bad-pickle", file="bad.pt"),
    save("5 million lists", archive(b"]" + (b"(" + b"]" * 1000 + b"e") * 5000 + b"."), "bad-pickle", file="bad.pt"),
    save("zeros", bytes(100_000), "corrupt @ with 00", file="bad.pt"),
    save("the number of ranks is 999,999,999", tree({"model_world_size_999999999_rank_0.pt": b""}), "missing-ranks @ of 999999999", file="bad"),
]
