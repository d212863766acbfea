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
    "transform {bad} {out}",
    "unify {bad} {out}",
    ".open {bad}",
)
SHARDED = (
    "inspect {bad} --source-strategy {strategy}",
    "transform {bad} {out} --source-strategy {strategy}",
    "unify {bad} {out} --source-strategy {strategy}",
)

# fmt: off

_INDEX = "model.safetensors.index.json"


def index(weight_map: object, name: str = _INDEX, **files: bytes | Callable[[Path], None]) -> Callable[[Path], None]:
    """A unified set with any index."""
    return tree({name: json.dumps({"weight_map": weight_map}).encode(), "a.safetensors": st(TENSORS, b"abcd"), **files})


a_set = partial(Item, commands=DIRECTORY, file="bad")
ranks = partial(Item, commands=SHARDED, file="bad")

SETS = [
    a_set("a file above", index({"w": "../a.safetensors"}), "model.safetensors.index.json: file '../a.safetensors': is not in the same directory; expected a name without a slash"),
    a_set("an absolute path", index({"w": "/etc/passwd"}), "model.safetensors.index.json: file '/etc/passwd': is not in the same directory; expected a name without a slash"),
    a_set("a file below", index({"w": "b/a.safetensors"}), "model.safetensors.index.json: file 'b/a.safetensors': is not in the same directory; expected a name without a slash"),
    a_set("the directory itself", index({"w": "."}), "model.safetensors.index.json: file '.': is not in the same directory; expected a name without a slash"),
    a_set("the directory above", index({"w": ".."}), "model.safetensors.index.json: file '..': is not in the same directory; expected a name without a slash"),
    a_set("a backslash", index({"w": "..\\a.safetensors"}), "model.safetensors.index.json: file '..\\\\a.safetensors': is not there"),
    a_set("no file", index({"w": ""}), "model.safetensors.index.json: file '': is not in the same directory; expected a name without a slash"),
    a_set("the index itself", index({"w": _INDEX}), "model.safetensors.index.json: is of no known checkpoint format (it begins with 7b 22 77 65 69 67 68 74); expected safetensors or MindSpore .ckpt"),
    a_set("a link to the index", index({"w": "b"}, b=link(_INDEX)), "b: is of no known checkpoint format (it begins with 7b 22 77 65 69 67 68 74); expected safetensors or MindSpore .ckpt"),
    a_set("a link to itself", index({"w": "b"}, b=link("b")), "model.safetensors.index.json: file 'b': is not there"),
    a_set("a file that is not there", index({"w": "b"}), "model.safetensors.index.json: file 'b': is not there"),
    a_set("a name of 10,000 characters", index({"w": "b" * 10_000}), "b: is not there"),
    a_set("a name with a zero byte", index({"w": "a\0b"}), "model.safetensors.index.json: file 'a\\x00b': is not there"),
    a_set("a name with half of a surrogate pair", index({"w": "\ud800"}), "model.safetensors.index.json: file '\\ud800': is not there"),
    a_set("a name with control characters", index({"w": "\x1b[2J\nerror: no"}), "model.safetensors.index.json: file '\\x1b[2J\\nerror: no': is not there"),
    a_set("a FIFO", index({"w": "b"}, b=fifo), "model.safetensors.index.json: file 'b': is not there"),
    a_set("a directory", index({"w": "b"}, **{"b/c": b""}), "model.safetensors.index.json: file 'b': is not there"),
    a_set("a tensor that is not in its file", index({"w": "a.safetensors", "v": "a.safetensors"}), "tensor 'v': is not in a.safetensors, where the index says it is"),
    a_set("a tensor in another file", index({"w": "b.safetensors"}, **{"b.safetensors": st({"v": tensor(0, 0)})}), "tensor 'w': is not in b.safetensors, where the index says it is"),
    a_set("a tensor in two files", index({"w": "a.safetensors", "v": "b.safetensors"}, **{"b.safetensors": st({"v": tensor(0, 0), "w": tensor(0, 4)}, b"abcd")}), "tensor 'w': is in a.safetensors, b.safetensors; expected in one file of the set"),
    a_set("a tensor twice in the index", tree({_INDEX: b'{"weight_map":{"w":"a","w":"b"}}'}), "model.safetensors.index.json: tensor 'w': is listed a second time"),
    a_set("no map", index([]), "model.safetensors.index.json: has no weight_map of tensor names to file names"),
    a_set("a map of numbers", index({"w": 1}), "model.safetensors.index.json: has no weight_map of tensor names to file names"),
    a_set("an empty map", index({}), "holds no tensor; was saving it interrupted?"),
    a_set("deep JSON", tree({_INDEX: b'{"a":' * 50_000}), "model.safetensors.index.json: is not JSON: it is nested too deeply"),
    a_set("not UTF-8", tree({_INDEX: b'{"\xff":1}'}), "model.safetensors.index.json: is not JSON:"),
    a_set("an index of 2 GB", tree({_INDEX: sparse(b"{", 2 << 30)}), "model.safetensors.index.json: has more than 67108864 bytes, which no index has"),
    a_set("MindSpore's index, a file above", index({"w": "../a.safetensors"}, "param_name_map.json"), "param_name_map.json: file '../a.safetensors': is not in the same directory; expected a name without a slash"),
    a_set("MindSpore's index, no such tensor", index({"v": "a.safetensors"}, "param_name_map.json"), "tensor 'v': is not in a.safetensors, where the index says it is"),
    a_set("two indexes", index({"w": "a.safetensors"}, **{"param_name_map.json": b"{}"}), "has the indexes of two sets, param_name_map.json, model.safetensors.index.json; move one set to another directory"),
    a_set("an index without permission", tree({_INDEX: unreadable}), "model.safetensors.index.json: cannot be read: Permission denied"),
    a_set("an empty directory", tree({}), "has no checkpoint at 'rank_0/*.ckpt' or 'rank_0/*.safetensors' and so on; give --rank-pattern for other names"),
]

RANKS = [
    ranks("a rank directory that is a link to itself", tree({"rank_0/a.ckpt": W, "rank_1": link("rank_1")}), "rank 1: has no file; it is needed for 1 tensors (w)"),
    ranks("a rank directory that is a link to the directory above", tree({"rank_0/a.ckpt": W, "rank_1": link("..")}), "rank 1: has no file; it is needed for 1 tensors (w)"),
    ranks("a rank's file that is a FIFO", tree({"rank_0/a.ckpt": W, "rank_1/a.ckpt": fifo}), "rank 1: has no file; it is needed for 1 tensors (w)"),
    ranks("a rank's file that is a directory", tree({"rank_0/a.ckpt": W, "rank_1/a.ckpt/b": W}), "rank 1: has no file; it is needed for 1 tensors (w)"),
    ranks("a rank directory elsewhere", tree({"rank_0/a.ckpt": W, "b/a.ckpt": proto(content=b"efgh"), "rank_1": link("b")}), "", code=0),
    ranks("a rank twice", tree({"rank_0/a.ckpt": W, "rank_1/a.ckpt": W, "rank_01/a.ckpt": W}), "rank 1 is there twice, as '01' and '1'"),
    ranks("a rank of 200 digits", tree({"rank_0/a.ckpt": W, f"rank_1{'0' * 199}/a.ckpt": W}), "; the strategy describes ranks 0 to 1; give the strategy of all 2 ranks"),
    Item("a rank of one billion, whole", tree({"rank_0/a.ckpt": W, "rank_1000000000/a.ckpt": W}), "dev_matrix [1000000001] is of more than 131072 devices, which is taken for a corrupt file", ("inspect {bad} --layout *=whole", "transform {bad} {out} --layout *=split:0"), file="bad"),
    ranks("a file name with a line break", tree({"rank_0/a\nerror: no.ckpt": b"\x0a\x05", "rank_1/a\nerror: no.ckpt": b"\x0a\x05"}), "rank_0: the file name 'a\\nerror: no.ckpt' has a line break; rename the file"),
    ranks("a rank's file of another shape", tree({"rank_0/a.ckpt": W, "rank_1/a.ckpt": proto(dims=[2], content=b"ab")}), "/item/bad/rank_1/a.ckpt: tensor 'w' has shape [2]; the strategy and the other ranks say [4]"),
    ranks("a rank's file of another dtype", tree({"rank_0/a.ckpt": W, "rank_1/a.ckpt": proto(kind=b"UInt8")}), "/item/bad/rank_1/a.ckpt: tensor 'w' is uint8; other ranks have int8"),
    ranks("a rank directory without permission", tree({"rank_0/a.ckpt": W, "rank_1": lambda path: path.mkdir(0)}), "rank_1: cannot be read: Permission denied"),
    ranks("a directory without permission", lambda path: path.mkdir(0), "param_name_map.json: cannot be read: Permission denied"),
]
