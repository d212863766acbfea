"""Hostile plan files."""

from __future__ import annotations

from functools import partial
from typing import Any

from item import Item, not_to_be_read
from makers import a_plan_file, planned_strategy, proto, repeated, sparse, tree

PLAN = ("run {bad} {out}", "run {bad} {out} --dry-run")

# fmt: off

a_plan = partial(Item, commands=PLAN, file="bad.json")
_FILE = ("file.ckpt", len(proto()), 0, "0" * 32)


def a_pattern(matrix: list[int], ranks: list[int], tensor: tuple[int, list[int], list[list[int]]] = (0, [4], [])) -> dict[str, Any]:
    return {"devices": 3, "meshes": [[matrix, [[0]], ranks, ["a"]]], "tensors": {"w": tensor}}


PLANS = [
    a_plan("empty", b"", "is not a valid plan file: it is not JSON: Expecting value: line 1 column 1 (char 0)"),
    a_plan("a list", b"[]", "is not a valid plan file: it has no key 'reshard_plan'; expected what `reshard plan -o FILE` writes"),
    a_plan("deep JSON", b'{"a":' * 50_000, "is not a valid plan file: it is nested too deeply"),
    a_plan("a key twice", b'{"reshard_plan": 1, "reshard_plan": 2}', "is not a valid plan file: the key 'reshard_plan' is there twice in an object"),
    a_plan("a million keys, one twice", repeated(b'{"a":1', b',"a":1', 1_000_000, b"}"), "is not a valid plan file: the key 'a' is there twice in an object", commands=PLAN[:1]),
    a_plan("a million lists", repeated(b'{"reshard_plan":1,"files":[[]', b",[]", 1_000_000, b"]}"), "is not a valid plan file: $ has no 'made_by'", commands=PLAN[:1]),
    a_plan("a version of 4,000 digits", b'{"reshard_plan": ' + b"9" * 4000 + b"}", "is not a valid plan file: it is of version 999999999999999999999999999999999999999999999999999999999999; this reshard reads version 1; plan again"),
    a_plan("a version of 5,000 digits", b'{"reshard_plan": ' + b"9" * 5000 + b"}", "is not a valid plan file: it has a number of thousands of digits"),
    a_plan("a key with control characters", b'{"reshard_plan": 1, "\\u001b[2J\\nerror: no": 1}', "is not a valid plan file: $ has no 'made_by'"),
    a_plan("not UTF-8", b'{"\xff":1}', "is not a valid plan file: it is not JSON: 'utf-8' codec can't decode byte 0xff in position 2: invalid start byte"),
    a_plan("a checkpoint", proto(), "is not a valid plan file: it is not JSON: Expecting value: line 2 column 1 (char 1)"),
    a_plan("a source of other headers", a_plan_file(), "/valid: file.ckpt: has other tensors, in its header, than when it was planned", code=6),
    a_plan("a source elsewhere", a_plan_file(files=[[0, "../file.ckpt", *_FILE[1:]]]), "is not a valid plan file: $.source.files[0][1] is '../file.ckpt'; expected a path that stays below its directory"),
    a_plan("an absolute path", a_plan_file(files=[[0, "/etc/passwd", *_FILE[1:]]]), "is not a valid plan file: $.source.files[0][1] is '/etc/passwd'; expected a path that stays below its directory"),
    a_plan("a source that is a device", a_plan_file(root="/dev", files=[[0, "zero", 0, 0, "0" * 32]]), "/dev: zero: is not a regular file"),
    a_plan("a source that is not there", a_plan_file(root="/nowhere\x1b[2J"), "/nowhere\\x1b[2J: file.ckpt: cannot be found (No such file or directory)"),
    a_plan("a source with a line break", a_plan_file(root="/nowhere\nerror: no"), "is not a valid plan file: $.source.root is '/nowhere\\nerror: no'; expected text without a line break"),
    a_plan("a notice with a line break", a_plan_file(warnings=["a\nerror: no"]), "is not a valid plan file: $.source.warnings[0] is 'a\\nerror: no'; expected text without a line break"),
    a_plan("a file with a line break", a_plan_file(files=[[0, "a\nerror: no", *_FILE[1:]]]), "is not a valid plan file: $.source.files[0][1] is 'a\\nerror: no'; expected a path that stays below its directory"),
    a_plan("a source of another size", a_plan_file(files=[[0, "file.ckpt", 22, 0, "0" * 32]]), "/valid: file.ckpt: has 21 bytes; it had 22 when it was planned", code=6),
    a_plan("a source with half of a surrogate pair", a_plan_file(root="/\ud800"), "is not a valid plan file: $.source.root is '/\\ud800'; expected text without a line break"),
    a_plan("a rank of one billion", a_plan_file(files=[[10**9, *_FILE]]), "is not a valid plan file: $.source.files[0] is of rank 1000000000 and header 0, which cannot be"),
    a_plan("a size of 2^64", a_plan_file(files=[[0, "file.ckpt", 1 << 64, 0, "0" * 32]]), "is not a valid plan file: $.source.files[0][2] is 18446744073709551616; expected a whole number, from 0 on"),
    a_plan("a header that is not listed", a_plan_file(files=[[0, "file.ckpt", 21, 1, "0" * 32]]), "is not a valid plan file: $.source.files[0] is of rank 0 and header 1, which cannot be"),
    a_plan("billions of devices", a_plan_file(strategy=planned_strategy(devices=1 << 40)), "is not a valid plan file: a strategy of 1099511627776 devices in stages 0 to 0 cannot be"),
    a_plan("billions of stages", a_plan_file(strategy=planned_strategy(stages=[0, 1 << 40])), "is not a valid plan file: a strategy of 2 devices in stages 0 to 1099511627775 cannot be"),
    a_plan("a device matrix of billions", a_plan_file(strategy=planned_strategy(matrix=[1 << 50])), "is not a valid plan file: dev_matrix [1125899906842624] has more than 131072 devices"),
    a_plan("an axis out of range", a_plan_file(strategy=planned_strategy(axes=[[7]])), "is not a valid plan file: tensor_map[0] is 7; expected -1 to 0 for dev_matrix [2]"),
    a_plan("an axis twice", a_plan_file(strategy=planned_strategy(axes=[[0], [0]])), "is not a valid plan file: tensor_map[1] uses device axis 0"),
    a_plan("a pattern of billions of ranks", a_plan_file({"devices": 1 << 40, "meshes": [], "tensors": {}}), "is not a valid plan file: a pattern of 1099511627776 ranks cannot be"),
    a_plan("a mesh of billions", a_plan_file(a_pattern([1 << 50], [0, 1])), "is not a valid plan file: dev_matrix [1125899906842624] has more than 131072 devices"),
    a_plan("a mesh without ranks", a_plan_file(a_pattern([2], [])), "is not a valid plan file: a mesh of a pattern has not one rank for each device"),
    a_plan("a mesh of ranks that are not there", a_plan_file(a_pattern([2], [0, 7])), "is not a valid plan file: a mesh of a pattern has not one rank for each device"),
    a_plan("a mesh of one rank twice", a_plan_file(a_pattern([2], [1, 1])), "is not a valid plan file: a mesh of a pattern has not one rank for each device"),
    a_plan("a tensor of a mesh that is not there", a_plan_file(a_pattern([2], [0, 1], (1, [4], []))), "is not a valid plan file: a tensor of a pattern has a mesh that is not there, or of other dimensions"),
    a_plan("a block that is not there", a_plan_file(a_pattern([2], [0, 1], (0, [4], [[2, 2]]))), "is not a valid plan file: a tensor of a pattern is on a rank, or has a block, that is not there"),
    a_plan("a prefix that leads out of an iteration", a_plan_file(way=("checkpoint2", [1, "../x", 9, "{}"])), "is not a valid plan file: prefix '../x': not the beginning of a file name; expected e.g. 'checkpoint'"),
    a_plan("a common.json that is none", a_plan_file(way=("checkpoint2", [1, "x", 9, "[" * 100_000])), "is not a valid plan file: common is not JSON as common.json has it: it is nested too deeply"),
    a_plan("an iteration of 30 digits", a_plan_file(way=("checkpoint2", [10**30, "x", 9, None])), "is not a valid plan file: $.files.fields[0] is 1000000000000000000000000000000; expected a whole number, from 0 on"),
    a_plan("a file of 2 GB", sparse(b"{", 2 << 30), "too-large @ than 268435456"),
    a_plan("a file of 200 MB of nothing", sparse(b"{", 200_000_000), "is not a valid plan file: it is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)", commands=PLAN[:1], headroom=1_500_000_000, slow=True),
    *not_to_be_read(a_plan),
    a_plan("a directory", tree({"a": b""}), "not-a-file"),
]
