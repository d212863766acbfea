"""Hostile directories: indexes of unified sets, and rank directories."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

from item import Item
from makers import TENSORS, W, fifo, link, proto, sparse, st, tensor, tree, unreadable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DIRECTORY = (
    "inspect {bad}",
    "inspect {bad} --json",
    "convert {bad} {out}",
    "convert --to=mindspore {bad} {out}",
    ".open {bad}",
)
SHARDED = (
    "inspect {bad} --source-strategy {strategy}",
    "convert {bad} {out} --source-strategy {strategy}",
    "convert --to=mindspore {bad} {out} --source-strategy {strategy}",
)

# fmt: off

_INDEX = "model.safetensors.index.json"


def index(weight_map: object, name: str = _INDEX, **files: bytes | Callable[[Path], None]) -> Callable[[Path], None]:
    """A unified set with any index."""
    return tree({name: json.dumps({"weight_map": weight_map}).encode(), "a.safetensors": st(TENSORS, b"abcd"), **files})


a_set = partial(Item, commands=DIRECTORY, file="bad")
ranks = partial(Item, commands=SHARDED, file="bad")

SETS = [
    a_set("a file above", index({"w": "../a.safetensors"}), "bad-name @ '../a.safetensors'"),
    a_set("an absolute path", index({"w": "/etc/passwd"}), "bad-name @ '/etc/passwd'"),
    a_set("the directory above", index({"w": ".."}), "bad-name @ '..'"),
    a_set("a backslash", index({"w": "..\\a.safetensors"}), "not-found @ '..\\\\a.safetensors'"),
    a_set("the index itself", index({"w": _INDEX}), "not-a-checkpoint @ with 7b"),
    a_set("a link to itself", index({"w": "b"}, b=link("b")), "not-found @ file 'b'"),
    a_set("a file that is not there", index({"w": "b"}), "not-found @ file 'b'"),
    a_set("a name of 10,000 characters", index({"w": "b" * 10_000}), "not-found"),
    a_set("a name with half of a surrogate pair", index({"w": "\ud800"}), "not-found @ '\\ud800'"),
    a_set("a name with control characters", index({"w": "\x1b[2J\nerror: no"}), "not-found @ '\\x1b[2J\\nerror: no'"),
    a_set("a FIFO", index({"w": "b"}, b=fifo), "not-found @ file 'b'"),
    a_set("a tensor that is not in its file", index({"w": "a.safetensors", "v": "a.safetensors"}), "missing-tensor @ tensor 'v'"),
    a_set("a tensor in another file", index({"w": "b.safetensors"}, **{"b.safetensors": st({"v": tensor(0, 0)})}), "missing-tensor @ tensor 'w'"),
    a_set("a tensor in two files", index({"w": "a.safetensors", "v": "b.safetensors"}, **{"b.safetensors": st({"v": tensor(0, 0), "w": tensor(0, 4)}, b"abcd")}), "duplicate-name @ tensor 'w'"),
    a_set("a tensor twice in the index", tree({_INDEX: b'{"weight_map":{"w":"a","w":"b"}}'}), "duplicate-name @ tensor 'w'"),
    a_set("no map", index([]), "bad-index @ model.safetensors.index.json"),
    a_set("an empty map", index({}), "no-tensors"),
    a_set("not UTF-8", tree({_INDEX: b'{"\xff":1}'}), "not-json @ model.safetensors.index.json"),
    a_set("an index of 2 GB", tree({_INDEX: sparse(b"{", 2 << 30)}), "too-large @ than 67108864"),
    a_set("MindSpore's index, a file above", index({"w": "../a.safetensors"}, "param_name_map.json"), "bad-name @ '../a.safetensors'"),
    a_set("two indexes", index({"w": "a.safetensors"}, **{"param_name_map.json": b"{}"}), "several-checkpoints"),
    a_set("an index without permission", tree({_INDEX: unreadable}), "cannot-read"),
    a_set("an empty directory", tree({}), "empty-directory"),
]

RANKS = [
    ranks("a rank directory that is a link to itself", tree({"rank_0/a.ckpt": W, "rank_1": link("rank_1")}), "missing-ranks @ rank 1"),
    ranks("a rank's file that is a FIFO", tree({"rank_0/a.ckpt": W, "rank_1/a.ckpt": fifo}), "missing-ranks @ rank 1"),
    ranks("a rank directory elsewhere", tree({"rank_0/a.ckpt": W, "b/a.ckpt": proto(content=b"efgh"), "rank_1": link("b")}), "", code=0),
    ranks("a rank twice", tree({"rank_0/a.ckpt": W, "rank_1/a.ckpt": W, "rank_01/a.ckpt": W}), "duplicate-rank @ and '1'"),
    ranks("a rank of 200 digits", tree({"rank_0/a.ckpt": W, f"rank_1{'0' * 199}/a.ckpt": W}), "strategy-mismatch @ ranks 0"),
    Item("a rank of one billion, whole", tree({"rank_0/a.ckpt": W, "rank_1000000000/a.ckpt": W}), "too-large @ [1000000001]", ("inspect {bad} --layout *=whole", "convert {bad} {out} --layout *=split:0"), file="bad"),
    ranks("a file name with a line break", tree({"rank_0/a\nerror: no.ckpt": b"\x0a\x05", "rank_1/a\nerror: no.ckpt": b"\x0a\x05"}), "bad-name @ 'a\\nerror: no.ckpt'"),
    ranks("a rank's file of another shape", tree({"rank_0/a.ckpt": W, "rank_1/a.ckpt": proto(dims=[2], content=b"ab")}), "wrong-shape @ tensor 'w'"),
    ranks("a rank's file of another dtype", tree({"rank_0/a.ckpt": W, "rank_1/a.ckpt": proto(kind=b"UInt8")}), "mixed-dtypes @ tensor 'w'"),
    ranks("a rank directory without permission", tree({"rank_0/a.ckpt": W, "rank_1": lambda path: path.mkdir(0)}), "cannot-read @ rank_1"),
    ranks("a directory without permission", lambda path: path.mkdir(0), "cannot-read"),
]
