"""Hostile strategy files: protobuf and JSON ones, and such as do not fit the checkpoint."""

from __future__ import annotations

from functools import partial

from item import Item
from makers import (
    TENSORS,
    edited,
    fifo,
    layout,
    layouts,
    link,
    proto,
    repeated,
    sparse,
    st,
    strategy,
    unreadable,
    varint,
)

STRATEGY = (
    "strategy show {bad}",
    "strategy show {bad} --json",
    "strategy diff {bad} {strategy}",
    "strategy diff {strategy} {bad} --json",
    "strategy check {bad} {ranks}",
    "strategy merge {dir} -o {out}",
    "strategy make {rules} --like {ranks} --source-strategy {bad} -o {out}",
    "inspect {ranks} --source-strategy {bad}",
    "transform {ranks} {out} --source-strategy {bad}",
    "transform {ranks} {out} --source-strategy {strategy} --target-strategy {bad}",
    "unify {ranks} {out} --source-strategy {bad}",
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
    a_strategy("empty", b"", "is empty; expected a strategy file"),
    a_strategy("a length that does not end", b"\x1a" + b"\xff" * 30, "is not a strategy file"),
    a_strategy("cut", edited([2], [0])[:-1], "is not a strategy file"),
    a_strategy("a length of 2^63", b"\x1a" + varint(1 << 63), "is not a strategy file"),
    a_strategy("groups in groups", b"\x08\x02" + b"\x7b" * 100_000, "is not a strategy file"),
    a_strategy("messages in messages", b"\x08\x02" + b"\x1a\x7f" * 100_000, "is not a strategy file"),
    Item("1 MB of empty layouts", repeated(b"\x08\x02", b"\x1a\x00", 500_000), "parallel_layout_item[0].param_name: is missing; the file is truncated or not a strategy file", ("strategy show {bad}", ".read_strategy {bad}"), slow=True),
    Item("1 MB of empty operators", repeated(edited([2], [0]), b"\x12\x00", 500_000), "parallel_strategy_item[0].node_name: is missing; the file is truncated or not a strategy file", ("strategy show {bad}", ".read_strategy {bad}"), slow=True),
    a_strategy("a name that is not UTF-8", edited([2], [0]).replace(b"\x0a\x01w", b"\x0a\x01\xff"), "parallel_layout_item[0].param_name: is b'\\xff', which is not UTF-8"),
    a_strategy("a name of 5,000 bytes", strategy(**{"w" * 5000: ([2], [0])}).SerializeToString(), "'wwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwww…: is a name of 5000 characters; at most 4096 bytes"),
    a_strategy("a name with control characters, twice", strategy(**{"\x1b[2J\nerror: w": ([2], [0])}).SerializeToString() + strategy(**{"\x1b[2J\nerror: w": ([2], [0])}).SerializeToString()[2:], "'\\x1b[2J\\nerror: w': is listed twice"),
    a_strategy("a tensor twice", edited([2], [0]) + edited([2], [0])[2:], "w: is listed twice"),
    a_strategy("no devices", edited([0], [0]), "w: dev_matrix is [0]; expected extents of at least 1"),
    a_strategy("no device axes", edited([], [0]), "w: dev_matrix is []; expected extents of at least 1"),
    a_strategy("2^32 - 1 devices", edited([(1 << 32) - 1], [0]), "w: dev_matrix [4294967295]"),
    a_strategy("2^64 devices", edited([1 << 16] * 4, [0]), "w: dev_matrix [65536, 65536, 65536, 65536]"),
    a_strategy("devices of 5,000 digits", edited([(1 << 32) - 1] * 520, [0]), "w: dev_matrix has 520 entries"),
    Item("a million axes", edited([(1 << 32) - 1] * 1_000_000, [0]), "w: dev_matrix has 1000000 entries", ("strategy show {bad}", ".read_strategy {bad}")),
    Item("a million axes of one device", edited(_MILLION_AXES, [0]), "w: dev_matrix has 1000000 entries", ("strategy show {bad}", ".read_strategy {bad}")),
    Item("a million dimensions", edited([2], [-1] * 1_000_000), "w: tensor_map has 1000000 entries", ("strategy show {bad}", ".read_strategy {bad}")),
    a_strategy("an axis out of range", edited([2], [1]), "w: tensor_map[0] is 1; expected -1 to 0 for dev_matrix [2]"),
    a_strategy("a negative axis", edited([2], [-2]), "w: tensor_map[0] is -2; expected -1 to 0 for dev_matrix [2]"),
    a_strategy("an axis of 2^31 - 1", edited([2], [(1 << 31) - 1]), "w: tensor_map[0] is 2147483647; expected -1 to 0 for dev_matrix [2]"),
    a_strategy("an axis twice", edited([2], [0, 0]), "w: tensor_map[1] uses device axis 0"),
    a_strategy("an axis twice, in two entries", edited([2], [0], tensor_map=[0]), "w: tensor_map[1] uses device axis 0"),
    a_strategy("optimizer shards below -1", edited([2], [-1], opt_weight_shard_size=-2), "w: opt_weight_shard_size is -2; expected -1 or more"),
    a_strategy("two numbers of devices", strategy(w=([2], [0]), v=([4], [0])).SerializeToString(), "v.dev_matrix: [4] has 4 devices; the tensors before it have 2"),
    a_strategy("65,536 stages of 2^16 devices", strategy(**{"0-w": ([1 << 16], [0]), "65535-w": ([1 << 16], [0])}).SerializeToString(), "stages: are 65536 of 65536 devices; more than 1048576 ranks are not taken"),
    a_strategy("a stage of 99,999,999", strategy(**{"99999999-w": ([2], [0])}).SerializeToString(), "stage 99999999: is more than any pipeline has"),
    a_strategy("a stage of 1,000 digits", strategy(**{"9" * 1000 + "-w": ([2], [0])}).SerializeToString(), "stage 999999999: is more than any pipeline has"),
    a_strategy("a zip archive", b"PK\x03\x04" + bytes(60), "is not a strategy file"),
    a_strategy("a pickle", b"\x80\x02cos\nsystem\n(S'echo pwned'\ntR.", "is not a strategy file"),
    a_strategy("a checkpoint", proto(), "is a checkpoint, not a strategy file"),
    a_strategy("a safetensors file", st(TENSORS, b"abcd"), "is a checkpoint, not a strategy file"),
    a_strategy("a file of 2 GB", sparse(edited([2], [0]), 2 << 30), "too-large @ than 67108864"),
]

# What is valid in itself, and of no use for the valid checkpoint, whose tensor w has 8 elements on 2 ranks.
_USES = tuple(command for command in STRATEGY if "{ranks}" in command and "--target" not in command)
_TARGETS = ("transform {file} {out} --target-strategy {bad}", "transform {file} {out} --target-strategy {bad} --dry-run")

unfit = partial(Item, commands=_USES)

UNFIT = [
    unfit("three dimensions for one", edited([2], [0, -1, -1]), "ranks: tensor 'w': the files store 1 dimensions [4], the layout has 3 (tensor_map [0, -1, -1])"),
    unfit("2^17 devices", edited([1 << 17], [0]), "strategy-mismatch @ describes 131072"),
    unfit("2^17 devices, each a replica", edited([1 << 17], [-1]), "strategy-mismatch @ describes 131072"),
    unfit("65,536 stages", strategy(**{f"{stage}-w": ([2], [0]) for stage in (0, 65_535)}).SerializeToString(), "strategy-mismatch @ describes 131072"),
    unfit("optimizer shards that do not divide", edited([2], [-1], opt_weight_shard_size=3), "tensor 'w': opt_weight_shard_size 3"),
    unfit("interleaved rows", edited([2], [0], field=2), "ranks: tensor 'w': field is 2: its rows are interleaved by device, which no block describes"),
    unfit("sizes of rows below 0", edited([2], [0], param_split_shape=[9, -1]), "ranks: tensor 'w': dimension 0 of size 8 is split 2 ways, which param_split_shape [9, -1] does not describe"),
    unfit("sizes of rows of 2^63 - 1", edited([2], [0], param_split_shape=[(1 << 63) - 1] * 2), "ranks: tensor 'w': the files store [4]"),
    unfit("2^17 sizes of rows", edited([1 << 17], [0], param_split_shape=[1] * (1 << 17)), "strategy-mismatch @ describes 131072"),
    Item("a target of 2^17 devices that split 4 rows", edited([1 << 17], [0]), "file.ckpt: tensor 'w': dimension 0 of size 4 does not divide into 131072", _TARGETS),
    Item("a target that shards 4 rows by 3", edited([3], [0]), "file.ckpt: tensor 'w': dimension 0 of size 4 does not divide into 3", _TARGETS),
    Item("a target of other names", strategy(v=([2], [0])).SerializeToString(), "file.ckpt: tensor 'v': is in the strategy and in no source file; to do without it give --allow-missing 'v'", _TARGETS),
]

JSON = [
    a_json("empty", b"", "is empty; expected a strategy file"),
    a_json("cut", layout()[:-1], "is not JSON:"),
    a_json("deep lists", b'{"a":' + b"[" * 100_000, "is not JSON: it is nested too deeply"),
    a_json("deep objects", b'{"a":' * 100_000, "is not JSON: it is nested too deeply"),
    a_json("a list", b"[]", "is a JSON list; expected an object"),
    a_json("in UTF-16", layout().decode().encode("utf-16"), "is not JSON:"),
    a_json("not UTF-8", b'{"\xff":1}', "is not JSON:"),
    a_json("a key twice", layout().replace(b'"field": 0', b'"field": 0, "field": 1'), "field: is listed twice"),
    a_json("a number of 5,000 digits", layout().replace(b"[2]", b"[" + b"9" * 5000 + b"]"), "is not JSON: it has a number of thousands of digits"),
    a_json("a number of 4,000 digits", layout(dev_matrix=[10**4000]), "$.parallel_layout_item.w.dev_matrix: holds 100000000000000000000000000000000000000000000000000000000000; expected 0 to 4294967295"),
    a_json("an option of 4,000 digits", layout(field=10**4000), "$.parallel_layout_item.w.field: is 100000000000000000000000000000000000000000000000000000000000; expected -2147483648 to 2147483647"),
    a_json("NaN", layout(dev_matrix=[float("nan")]), "$.parallel_layout_item.w.dev_matrix: is [nan]; expected a list of integers"),
    a_json("Infinity", layout(field=float("inf")), "$.parallel_layout_item.w.field: is inf; expected an integer"),
    a_json("1e400", layout().replace(b"[2]", b"[1e400]"), "$.parallel_layout_item.w.dev_matrix: is [inf]; expected a list of integers"),
    a_json("true for 1", layout(dev_matrix=[True]), "$.parallel_layout_item.w.dev_matrix: is [True]; expected a list of integers"),
    a_json("text for a list", layout(tensor_map="0"), "$.parallel_layout_item.w.tensor_map: is '0'; expected a list of integers"),
    a_json("no devices", layout(dev_matrix=[0]), "$.parallel_layout_item.w: dev_matrix is [0]; expected extents of at least 1"),
    a_json("devices below 0", layout(dev_matrix=[-2]), "$.parallel_layout_item.w.dev_matrix: holds -2; expected 0 to 4294967295"),
    a_json("a negative size", layout(tensor_shape=[-4]), "$.parallel_layout_item.w.tensor_shape: holds -4; expected 0 to 9223372036854775807"),
    a_json("an axis out of range", layout(tensor_map=[1]), "$.parallel_layout_item.w: tensor_map[0] is 1; expected -1 to 0 for dev_matrix [2]"),
    a_json("an axis twice", layout(tensor_map=[0, 0], tensor_shape=[4, 4]), "$.parallel_layout_item.w: tensor_map[1] uses device axis 0"),
    a_json("a shape of other dimensions", layout(tensor_shape=[4, 4]), "$.parallel_layout_item.w.tensor_shape: is [4, 4], of 2 dimensions; tensor_map has 1"),
    a_json("a name with half of a surrogate pair", layouts({"\ud800": {"dev_matrix": [2], "tensor_map": [0]}}), "$.parallel_layout_item.'\\ud800': is not a name; half of a surrogate pair stands alone in it"),
    a_json("no layouts", layouts([]), "$.parallel_layout_item: is a list; expected an object"),
    a_json("1,000 dimensions of one device each", layout(dev_matrix=[1] * 1000, tensor_map=list(range(1000)), tensor_shape=[1] * 1000), "$.parallel_layout_item.w: dev_matrix has 1000 entries"),
    Item("2 MB of empty lists", layout(more=[[]] * 500_000), "", ("strategy check {bad} {file}", "strategy show {bad}"), 0, "bad.json"),
    a_json("a file of 2 GB", sparse(layout(), 2 << 30), "too-large @ than 67108864"),
    one_json("a FIFO", fifo, "not-a-file"),
    one_json("a device that does not end", link("/dev/zero"), "not-a-file"),
    one_json("a link to itself", link("bad.json"), "cannot-read"),
    a_json("a file without permission", unreadable, "cannot-read"),
]
