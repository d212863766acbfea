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
    a_plan("empty", b"", "not-a-plan @ column 1"),
    a_plan("deep JSON", b'{"a":' * 50_000, "not-a-plan"),
    a_plan("a key twice", b'{"reshard_plan": 4, "reshard_plan": 4}', "not-a-plan @ 'reshard_plan'"),
    a_plan("a million keys, one twice", repeated(b'{"a":1', b',"a":1', 1_000_000, b"}"), "not-a-plan @ key 'a'", commands=PLAN[:1]),
    a_plan("a version of 4,000 digits", b'{"reshard_plan": ' + b"9" * 4000 + b"}", "not-a-plan @ version 999999999999999999999999999999999999999999999999999999999999"),
    a_plan("a key with control characters", b'{"reshard_plan": 4, "\\u001b[2J\\nerror: no": 1}', "not-a-plan @ 'digest'"),
    a_plan("not UTF-8", b'{"\xff":1}', "not-a-plan @ position 2"),
    a_plan("a source of other headers", a_plan_file(), "header-changed", code=6),
    a_plan("a source elsewhere", a_plan_file(files=[[0, "../file.ckpt", *_FILE[1:]]]), "not-a-plan @ $.provenance.source.files[0][1]"),
    a_plan("an absolute path", a_plan_file(files=[[0, "/etc/passwd", *_FILE[1:]]]), "not-a-plan @ $.provenance.source.files[0][1]"),
    a_plan("a source that is a device", a_plan_file(root="/dev", files=[[0, "zero", 0, 0, "0" * 32]]), "not-a-file"),
    a_plan("a source that is not there", a_plan_file(root="/nowhere\x1b[2J"), "not-found @ nowhere\\x1b[2J"),
    a_plan("a source with a line break", a_plan_file(root="/nowhere\nerror: no"), "not-a-plan @ '/nowhere\\nerror: no'"),
    a_plan("a notice with a line break", a_plan_file(warnings=["a\nerror: no"]), "not-a-plan @ $.warnings[0]"),
    a_plan("a source of another size", a_plan_file(files=[[0, "file.ckpt", 22, 0, "0" * 32]]), "valid: file.ckpt has 21 bytes; it had 22 when it was planned", code=6),
    a_plan("a source with half of a surrogate pair", a_plan_file(root="/\ud800"), "not-a-plan @ $.provenance.source.root"),
    a_plan("a rank of one billion", a_plan_file(files=[[10**9, *_FILE]]), "not-a-plan @ $.provenance.source.files[0]"),
    a_plan("a header that is not listed", a_plan_file(files=[[0, "file.ckpt", 21, 1, "0" * 32]]), "not-a-plan @ $.provenance.source.files[0]"),
    a_plan("billions of devices", a_plan_file(strategy=planned_strategy(devices=1 << 40)), "not-a-plan @ of 1099511627776"),
    a_plan("billions of stages", a_plan_file(strategy=planned_strategy(stages=[0, 1 << 40])), "not-a-plan @ to 1099511627775"),
    a_plan("an axis out of range", a_plan_file(strategy=planned_strategy(axes=[[7]])), "not-a-plan @ tensor_map[0]"),
    a_plan("an axis twice", a_plan_file(strategy=planned_strategy(axes=[[0], [0]])), "not-a-plan @ tensor_map[1]"),
    a_plan("a pattern of billions of ranks", a_plan_file({"devices": 1 << 40, "meshes": [], "tensors": {}}), "not-a-plan @ of 1099511627776"),
    a_plan("a mesh of billions", a_plan_file(a_pattern([1 << 50], [0, 1])), "not-a-plan @ [1125899906842624]"),
    a_plan("a mesh of ranks that are not there", a_plan_file(a_pattern([2], [0, 7])), "not-a-plan"),
    a_plan("a tensor of a mesh that is not there", a_plan_file(a_pattern([2], [0, 1], (1, [4], []))), "not-a-plan"),
    a_plan("a block that is not there", a_plan_file(a_pattern([2], [0, 1], (0, [4], [[2, 2]]))), "not-a-plan"),
    a_plan("ranks in disorder", a_plan_file(files=[[1, *_FILE], [0, *_FILE]]), "not-a-plan @ $.provenance.source.files"),
    a_plan("a file twice", a_plan_file(files=[[0, *_FILE], [0, *_FILE]]), "not-a-plan @ $.provenance.source.files"),
    a_plan("no files", a_plan_file(files=[]), "not-a-plan @ $.provenance.source.files"),
    a_plan("a size that is a fraction", a_plan_file(files=[[0, "file.ckpt", 21.0, 0, "0" * 32]]), "not-a-plan @ is 21.0"),
    a_plan("a size below 0", a_plan_file(files=[[0, "file.ckpt", -1, 0, "0" * 32]]), "not-a-plan @ is -1"),
    a_plan("true for a rank", a_plan_file(files=[[True, *_FILE]]), "not-a-plan @ $.provenance.source.files[0]"),
    a_plan("a file with a null byte", a_plan_file(files=[[0, "a\0b", *_FILE[1:]]]), "not-a-plan @ $.provenance.source.files[0][1]"),
    a_plan("a key that is not known", a_plan_file(more=1), "not-a-plan @ $.provenance.source"),
    a_plan("other devices", a_plan_file(strategy=planned_strategy(devices=8)), "not-a-plan @ 8 devices"),
    a_plan("a strategy without layouts", a_plan_file(strategy=planned_strategy() | {"layouts": []}), "not-a-plan"),
    a_plan("a strategy without places", a_plan_file(strategy=planned_strategy() | {"places": [[]]}), "not-a-plan"),
    a_plan("a tensor of places that are not there", a_plan_file(strategy=planned_strategy() | {"tensors": {"w": 99}}), "not-a-plan"),
    a_plan("a tensor expanded to nothing", a_plan_file(strategy=planned_strategy() | {"places": [[[0, 0, None, True]]]}), "not-a-plan"),
    a_plan("an unknown format", a_plan_file(way=("shell", {})), "not-a-plan @ 'shell'"),
    a_plan("a set of no size", a_plan_file(way=("mindspore", {"max_shard_size": 0})), "not-a-plan @ at least 1"),
    a_plan("a file name that leads out", a_plan_file(way=("ckpt", {"prefix": "", "suffix": "", "name": "../x"})), "not-a-plan @ '../x'"),
    a_plan("a prefix that leads out", a_plan_file(way=("ckpt", {"prefix": "../x", "suffix": "", "name": None})), "not-a-plan @ '../x'"),
    a_plan("a prefix that leads out of an iteration", a_plan_file(way=("checkpoint2", {"step": 1, "prefix": "../x", "common": "{}"})), "not-a-plan @ '../x'"),
    a_plan("a common.json that is none", a_plan_file(way=("checkpoint2", {"step": 1, "prefix": "x", "common": "[" * 100_000})), "not-a-plan"),
    a_plan("an iteration of 30 digits", a_plan_file(way=("checkpoint2", {"step": 10**30})), "not-a-plan @ is 1000000000000000000000000000000"),
    a_plan("a file of 2 GB", sparse(b"{", 2 << 30), "too-large @ than 268435456"),
    a_plan("a file of 200 MB of nothing", sparse(b"{", 200_000_000), "not-a-plan @ is not JSON", commands=PLAN[:1], headroom=1_500_000_000, slow=True),
    *not_to_be_read(a_plan),
    a_plan("a directory", tree({"a": b""}), "not-a-file"),
]
