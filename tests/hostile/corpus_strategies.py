"""Hostile strategy files: protobuf and JSON ones, and such as do not fit the checkpoint."""

from __future__ import annotations

from functools import partial

from item import Item
from makers import (
    edited,
    fifo,
    layout,
    layouts,
    link,
    proto,
    repeated,
    sparse,
    strategy,
    unreadable,
    varint,
)

STRATEGY = (
    "strategy show {bad}",
    "strategy show {bad} --json",
    "strategy diff {bad} {strategy}",
    "strategy diff {strategy} {bad} --json",
    "strategy merge {dir} -o {out}",
    "strategy make {rules} --like {ranks} --source-strategy {bad} -o {out}",
    "inspect {ranks} --source-strategy {bad}",
    "convert {ranks} {out} --source-strategy {bad}",
    "convert {ranks} {out} --source-strategy {strategy} --target-strategy {bad}",
    "convert --to=mindspore {ranks} {out} --source-strategy {bad}",
    "verify {ranks} --target-strategy {bad}",
    ".read_strategy {bad}",
    ".rank_list_for_transform {bad} {strategy}",
    ".rank_list_for_transform {strategy} {bad}",
    ".merge_pipeline_strategys {dir} {out}",
    ".get_parameter_redundancy {bad}",
)
ONE_STRATEGY = tuple(command for command in STRATEGY if "{dir}" not in command and "rank_list" not in command)

# fmt: off

_MILLION_AXES = [1] * 1_000_000

a_strategy = partial(Item, commands=STRATEGY)
a_json = partial(Item, commands=STRATEGY, file="bad.json")
one_json = partial(Item, commands=ONE_STRATEGY, file="bad.json")

PROTOBUF = [
    a_strategy("empty", b"", "empty-file"),
    a_strategy("a length that does not end", b"\x1a" + b"\xff" * 30, "not-a-strategy"),
    a_strategy("a length of 2^63", b"\x1a" + varint(1 << 63), "not-a-strategy"),
    a_strategy("groups in groups", b"\x08\x02" + b"\x7b" * 100_000, "not-a-strategy"),
    Item("1 MB of empty layouts", repeated(b"\x08\x02", b"\x1a\x00", 500_000), "parallel_layout_item[0].param_name is missing; the file is truncated or not a strategy file", ("strategy show {bad}", ".read_strategy {bad}"), slow=True),
    a_strategy("a name that is not UTF-8", edited([2], [0]).replace(b"\x0a\x01w", b"\x0a\x01\xff"), "not-utf-8 @ parallel_layout_item[0].param_name"),
    a_strategy("a name of 5,000 bytes", strategy(**{"w" * 5000: ([2], [0])}).SerializeToString(), "name-too-long @ 5000 characters"),
    a_strategy("a name with control characters, twice", strategy(**{"\x1b[2J\nerror: w": ([2], [0])}).SerializeToString() + strategy(**{"\x1b[2J\nerror: w": ([2], [0])}).SerializeToString()[2:], "duplicate-name @ '\\x1b[2J\\nerror: w'"),
    a_strategy("a tensor twice", edited([2], [0]) + edited([2], [0])[2:], "duplicate-name"),
    a_strategy("no devices", edited([0], [0]), "out-of-range @ least 1"),
    a_strategy("2^32 - 1 devices", edited([(1 << 32) - 1], [0]), "too-large @ [4294967295]"),
    a_strategy("devices of 5,000 digits", edited([(1 << 32) - 1] * 520, [0]), "too-large @ has 520"),
    Item("a million axes", edited([(1 << 32) - 1] * 1_000_000, [0]), "too-large @ has 1000000", ("strategy show {bad}", ".read_strategy {bad}")),
    Item("a million dimensions", edited([2], [-1] * 1_000_000), "too-large @ has 1000000", ("strategy show {bad}", ".read_strategy {bad}")),
    a_strategy("an axis out of range", edited([2], [1]), "out-of-range @ tensor_map[0]"),
    a_strategy("an axis twice", edited([2], [0, 0]), "repeated-axis @ tensor_map[1]"),
    a_strategy("optimizer shards below -1", edited([2], [-1], opt_weight_shard_size=-2), "out-of-range @ expected -1"),
    a_strategy("two numbers of devices", strategy(w=([2], [0]), v=([4], [0])).SerializeToString(), "devices-differ @ [4] has"),
    a_strategy("65,536 stages of 2^16 devices", strategy(**{"0-w": ([1 << 16], [0]), "65535-w": ([1 << 16], [0])}).SerializeToString(), "too-many-ranks @ 1048576 ranks"),
    a_strategy("a stage of 99,999,999", strategy(**{"99999999-w": ([2], [0])}).SerializeToString(), "out-of-range @ stage 99999999"),
    a_strategy("a pickle", b"\x80\x02cos\nsystem\n(S'echo pwned'\ntR.", "not-a-strategy"),
    a_strategy("a checkpoint", proto(), "not-a-strategy"),
    a_strategy("a file of 2 GB", sparse(edited([2], [0]), 2 << 30), "too-large @ than 67108864"),
]

# What is valid in itself, and of no use for the valid checkpoint, whose tensor w has 8 elements on 2 ranks.
_USES = tuple(command for command in STRATEGY if "{ranks}" in command and "--target" not in command)
_TARGETS = ("convert {file} {out} --target-strategy {bad}", "convert {file} {out} --target-strategy {bad} --dry-run")

unfit = partial(Item, commands=_USES)

UNFIT = [
    unfit("three dimensions for one", edited([2], [0, -1, -1]), "wrong-dimensions @ dimensions [4]"),
    unfit("2^17 devices", edited([1 << 17], [0]), "strategy-mismatch @ describes 131072"),
    unfit("65,536 stages", strategy(**{f"{stage}-w": ([2], [0]) for stage in (0, 65_535)}).SerializeToString(), "strategy-mismatch @ describes 131072"),
    unfit("optimizer shards that do not divide", edited([2], [-1], opt_weight_shard_size=3), "not-divisible @ tensor 'w'"),
    unfit("interleaved rows", edited([2], [0], field=2), "unsupported-layout @ tensor 'w'"),
    unfit("sizes of rows below 0", edited([2], [0], param_split_shape=[9, -1]), "wrong-sizes @ dimension 0"),
    unfit("sizes of rows of 2^63 - 1", edited([2], [0], param_split_shape=[(1 << 63) - 1] * 2), "bad-shape @ tensor 'w'"),
    Item("a target of 2^17 devices that split 4 rows", edited([1 << 17], [0]), "not-divisible @ dimension 0", _TARGETS),
    Item("a target of other names", strategy(v=([2], [0])).SerializeToString(), "missing-tensor @ missing 'v'", _TARGETS),
]

JSON = [
    a_json("empty", b"", "empty-file"),
    a_json("cut", layout()[:-1], "bad-name-map|not-json"),
    a_json("deep lists", b'{"a":' + b"[" * 100_000, "bad-name-map|not-json"),
    a_json("not UTF-8", b'{"\xff":1}', "bad-name-map|not-json"),
    a_json("a key twice", layout().replace(b'"field": 0', b'"field": 0, "field": 1'), "duplicate-key"),
    a_json("a number of 5,000 digits", layout().replace(b"[2]", b"[" + b"9" * 5000 + b"]"), "not-json"),
    a_json("a number of 4,000 digits", layout(dev_matrix=[10**4000]), "out-of-range @ holds 100000000000000000000000000000000000000000000000000000000000"),
    a_json("NaN", layout(dev_matrix=[float("nan")]), "wrong-type @ $.parallel_layout_item.w.dev_matrix"),
    a_json("text for a list", layout(tensor_map="0"), "wrong-type @ $.parallel_layout_item.w.tensor_map"),
    a_json("no devices", layout(dev_matrix=[0]), "out-of-range @ $.parallel_layout_item.w"),
    a_json("a negative size", layout(tensor_shape=[-4]), "out-of-range @ $.parallel_layout_item.w.tensor_shape"),
    a_json("an axis out of range", layout(tensor_map=[1]), "out-of-range @ $.parallel_layout_item.w"),
    a_json("an axis twice", layout(tensor_map=[0, 0], tensor_shape=[4, 4]), "repeated-axis @ $.parallel_layout_item.w"),
    a_json("a shape of other dimensions", layout(tensor_shape=[4, 4]), "wrong-dimensions @ $.parallel_layout_item.w.tensor_shape"),
    a_json("a name with half of a surrogate pair", layouts({"\ud800": {"dev_matrix": [2], "tensor_map": [0]}}), "bad-name @ $.parallel_layout_item.'\\ud800'"),
    a_json("1,000 dimensions of one device each", layout(dev_matrix=[1] * 1000, tensor_map=list(range(1000)), tensor_shape=[1] * 1000), "too-large @ $.parallel_layout_item.w"),
    Item("2 MB of empty lists", layout(more=[[]] * 500_000), "", ("strategy show {bad}",), 0, "bad.json"),
    a_json("a file of 2 GB", sparse(layout(), 2 << 30), "too-large @ than 67108864"),
    one_json("a FIFO", fifo, "not-a-file"),
    one_json("a device that does not end", link("/dev/zero"), "not-a-file"),
    one_json("a link to itself", link("bad.json"), "cannot-read"),
    a_json("a file without permission", unreadable, "cannot-read"),
]
