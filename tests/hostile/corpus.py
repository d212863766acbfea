"""Hostile and broken input, as a table: what each thing is, and the one line that every command says of it.

An item makes a file or a directory `bad`, and names the commands that may meet it. Each of them ends with the item's
exit code and says its sentence; `child.py` runs them under a limit of memory and of time. An item without a sentence
is odd and sound: it is read, and nothing of it reaches the terminal raw or the disk elsewhere.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from makers import (
    a_plan_file,
    block,
    edited,
    field,
    fifo,
    layout,
    layouts,
    link,
    planned_strategy,
    proto,
    repeated,
    sparse,
    st,
    strategy,
    sums,
    tensor,
    tree,
    unreadable,
    varint,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# --- what commands are run ---------------------------------------------------------------------------------------

# {bad}: the item; {set}: two rank directories that both have it; {dir}: a directory that has it alone; {out}: a target.
# {file}, {ranks}, {strategy}: a sound checkpoint file, a set of two ranks, and the strategy of the set.
# What begins with a dot is a function of `child.API`.
FILE = (
    "inspect {bad}",
    "inspect {bad} --json",
    "inspect {bad} --layout *=whole",
    "inspect {set} --source-strategy {strategy}",
    "transform {bad} {out}",
    "transform {bad} {out} --target-strategy {strategy}",
    "transform {bad} {out} --dry-run",
    "transform {set} {out} --source-strategy {strategy}",
    "unify {bad} {out}",
    "unify {set} {out} --source-strategy {strategy} --style huggingface",
    "convert {bad} {out}/a --format ckpt",
    "convert {set} {out} --format safetensors",
    "strategy make {rules} --like {bad} -o {out}",
    "strategy check {strategy} {bad}",
    "verify {bad}",
    "verify {file} --against {bad}",
    ".open {bad}",
    ".open_rank {bad}",
    ".load_checkpoint {bad}",
    ".convert_file {bad} {out}",
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
ODD = (
    "inspect {bad}",
    "inspect {bad} --json",
    "inspect {set} --layout *=whole",
    "transform {bad} {out}",
    "transform {bad} {out} --dry-run",
    "unify {bad} {out}",
    "unify {bad} {out} --style huggingface",
    "convert {bad} {out}/a --format ckpt",
    "convert {bad} {out}/a --format safetensors",
    ".open {bad}",
    ".convert_file {bad} {out}",
)
KEYED = (".open_with_key {bad}", ".load_with_key {bad}")
WHOLE = ("inspect {bad}", "transform {bad} {out}", "unify {bad} {out}", ".open {bad}")
ONE_FILE = tuple(command for command in FILE if "{set}" not in command)
ONE_STRATEGY = tuple(command for command in STRATEGY if "{dir}" not in command and "rank_list" not in command)
HEAVY = ("inspect {bad}", "transform {bad} {out}", ".open_rank {bad}")  # where every command takes a while
RULES = ("strategy make {bad} --like {file} -o {out}",)
PLAN = ("run {bad} {out}", "run {bad} {out} --dry-run")
MANIFEST = ("verify {file} --manifest {bad}", "verify {ranks} --target-strategy {strategy} --manifest {bad}")
NAMES = ("transform {file} {out} --name-map {bad}", "unify {file} {out} --name-map {bad}")


@dataclass(frozen=True, slots=True)
class Item:
    """One hostile thing.

    Attributes:
        name: what it is.
        content: its bytes, or what makes it at a path.
        says: what every command must say, after the path of the file; empty where the item is accepted.
        commands: what meets it.
        code: the exit code of the commands.
        file: what it is called.
        slow: for the slow suite.
        headroom: bytes of address space that a command may take.
        seconds: how long a command may take, on a machine that does other things too.
    """

    name: str
    content: bytes | Callable[[Path], None]
    says: str
    commands: tuple[str, ...] = FILE
    code: int = 4
    file: str = "bad.ckpt"
    slow: bool = False
    headroom: int = 250_000_000
    seconds: int = 10

    def make(self, directory: Path) -> Path:
        """Make the item below a directory."""
        path = directory / self.file
        if isinstance(self.content, bytes):
            path.write_bytes(self.content)
        else:
            self.content(path)
        return path


def not_to_be_read(make: Callable[..., Item]) -> list[Item]:
    """Whatever small file is expected."""
    return [
        make("a FIFO", fifo, "is no regular file but a directory, a pipe or a device"),
        make("a device that does not end", link("/dev/zero"), "is no regular file but a directory, a pipe or a device"),
        make("a file without permission", unreadable, "cannot be read: Permission denied"),
    ]


# fmt: off
# --- checkpoint files --------------------------------------------------------------------------------------------

_W = proto()
_TENSORS = {"w": tensor(0, 4)}

CKPT = [
    Item("empty value", field(1, b""), "is of no known checkpoint format (it begins with 0a 00); expected safetensors or MindSpore .ckpt"),
    Item("cut in the contents", _W[:-1], "byte 0: a field of 19 bytes is expected; 18 are left (cut short?)"),
    Item("cut in a varint", _W + b"\x0a\x80", "byte 22: a number does not end (cut short or corrupt)"),
    Item("cut in the name", _W[:4], "byte 0: a field of 19 bytes is expected; 2 are left (cut short?)"),
    Item("a byte too many", _W + b"\0", "byte 22: a number does not end (cut short or corrupt)"),
    Item("another file behind", _W + b"PK\x03\x04", "byte 21: field 10 is none that a checkpoint has, or stands there twice; corrupt, or of a MindSpore newer than this program"),
    Item("a varint that does not end", b"\x0a" + b"\xff" * 64, "byte 1: a number does not end (cut short or corrupt)"),
    Item("a length of 2^63", b"\x0a" + varint(1 << 63), "byte 0: a field of 9223372036854775808 bytes is expected; 0 are left (cut short?)"),
    Item("a length of 2^64 - 1", b"\x0a" + varint((1 << 64) - 1), "byte 0: a field of 18446744073709551615 bytes is expected; 0 are left (cut short?)"),
    Item("a tensor longer than its message", field(1, field(1, b"w") + b"\x12\x7f\x08\x04"), "byte 5: a field of 127 bytes is expected; 2 are left (cut short?)"),
    Item("a negative dim", proto(dims=[-1]), "the tensor that ends at byte 30 has dims [-1], which no array can have"),
    Item("dims whose product overflows", proto(dims=[1 << 62, 1 << 62]), "the tensor that ends at byte 39 has dims [4611686018427387904, 4611686018427387904], which no array can have"),
    Item("a product that is 0 modulo 2^64", proto(dims=[1 << 32, 1 << 32], content=b""), "the tensor that ends at byte 27 has dims [4294967296, 4294967296], which no array can have"),
    Item("no elements of huge extents", proto(dims=[1 << 62, 1 << 62, 0], content=b""), "the tensor that ends at byte 37 has dims [4611686018427387904, 4611686018427387904, 0], which no array can have"),
    Item("65 dims", proto(dims=[1] * 65, content=b"a"), ", which no array can have"),
    Item("a million dims", field(1, field(1, b"w") + field(2, field(1, b"\x01" * 1_000_000))), ", which no array can have"),
    Item("sizes that lie", proto(dims=[5]), "tensor 'w' has 4 bytes; int8 [5] has 5"),
    Item("dims [0] of several elements", proto(dims=[0]), "tensor 'w' has 4 bytes; int8 [0] has 0"),
    Item("no name", proto(name=b""), "the message that ends at byte 20 has no name; not a MindSpore checkpoint"),
    Item("a name that is not UTF-8", proto(name=b"\xff\xfe"), "byte 4: a name is not UTF-8"),
    Item("a name with half of a surrogate pair", proto(name=b"w\xed\xa0\x80"), "byte 4: a name is not UTF-8"),
    Item("a name of 5,000 bytes", proto(name=b"w" * 5000), "byte 6: a name of 5000 bytes; at most 4096 are taken"),
    Item("an unknown dtype", proto(kind=b"Float8"), "tensor 'w' has type 'Float8'; known are str, "),
    Item("a dtype of 4 kB", proto(kind=b"F" * 4096), "tensor 'w' has type 'FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF; known are str, "),
    Item("a dtype with an escape sequence", proto(kind=b"\x1b[2J"), "tensor 'w' has type '\\x1b[2J'; known are str, "),
    Item("no tensor", field(1, field(1, b"w")), "the message that ends at byte 5 has no tensor; not a MindSpore checkpoint"),
    Item("no contents", field(1, field(1, b"w") + field(2, field(1, 4))), "the message that ends at byte 9 has no tensor_type or tensor_content; not a MindSpore checkpoint"),
    Item("two names in a value", field(1, field(1, b"w") + field(1, b"v") + field(2, b"")), "byte 5: field 1 is none that a tensor of a checkpoint has, or stands there twice; corrupt, or of a MindSpore newer than this program"),
    Item("two tensors in a value", field(1, _W[2:] + _W[5:]), "byte 21: field 2 is none that a tensor of a checkpoint has, or stands there twice; corrupt, or of a MindSpore newer than this program"),
    Item("an unknown field in a value", field(1, _W[2:] + field(9, 1)), "byte 21: field 9 is none that a tensor of a checkpoint has, or stands there twice; corrupt, or of a MindSpore newer than this program"),
    Item("an unknown field in a tensor", field(1, field(1, b"w") + field(2, field(9, 1) + field(1, 4) + field(2, b"Int8") + field(3, b"abcd"))), "byte 7: field 9 is none that a tensor of a checkpoint has, or stands there twice; corrupt, or of a MindSpore newer than this program"),
    Item("an unknown field", _W + field(2, 1), "byte 21: field 2 is none that a checkpoint has, or stands there twice; corrupt, or of a MindSpore newer than this program"),
    Item("a group", _W + b"\x0b\x0c", "byte 21: 0xb begins no field; not a MindSpore checkpoint, or corrupt"),
    Item("groups in groups", _W + b"\x0b" * 100_000, "byte 21: 0xb begins no field; not a MindSpore checkpoint, or corrupt"),
    Item("messages in messages", b"".join([b"\x0a" + varint(300_000 - 4 * n) for n in range(50_000)]).ljust(300_004, b"\0"), "byte 8: a name of 299996 bytes; at most 4096 are taken"),
    Item("a name twice", _W + proto(b"v") + _W, "tensor 'w' is there a second time, at byte 42"),
    Item("parts out of order", proto(dims=[8]) + proto(b"v") + proto(dims=[8]), "tensor 'w' is there a second time, at byte 42"),
    Item("parts of two shapes", proto(dims=[8]) + proto(dims=[4, 2]), "tensor 'w' goes on at byte 23 as int8 [4, 2]; it began as int8 [8]"),
    Item("parts of two dtypes", proto(dims=[8]) + proto(dims=[8], kind=b"UInt8"), "tensor 'w' goes on at byte 23 as uint8 [8]; it began as int8 [8]"),
    Item("one part too many", proto(dims=[8]) * 3, "tensor 'w' has 12 bytes; int8 [8] has 8"),
    Item("one part too few", proto(dims=[12]) * 2, "tensor 'w' has 8 bytes; int8 [12] has 12"),
    Item("20,000 empty parts", repeated(b"", proto(content=b""), 20_000), "tensor 'w' has 0 bytes; int8 [4] has 4", HEAVY),
    Item("text that is not UTF-32", proto(kind=b"str", dims=[0], content=b"abc"), "text entry 'w' is not UTF-32: truncated data"),
    Item("text with half of a surrogate pair", proto(kind=b"str", dims=[0], content=b"\0\xd8\0\0"), "text entry 'w' is not UTF-32: code point in surrogate code point range(0xd800, 0xe000)"),
    Item("text of 20 MB", lambda path: path.write_bytes(proto(kind=b"str", dims=[0], content=bytes(20_000_000))) and None, "text entry 'w' has 20000000 bytes; at most 16777216 are taken"),
    Item("a trailer in the middle", _W + b"crc_num" + bytes(10) + _W, "byte 21: 0x63 begins no field; not a MindSpore checkpoint, or corrupt"),
    Item("a trailer cut short", _W + b"crc_num" + bytes(9), "byte 21: 0x63 begins no field; not a MindSpore checkpoint, or corrupt"),
    Item("only a map parameter", field(1, field(1, b"table") + field(3, b"")), "holds no tensor; was saving it interrupted?", WHOLE),
    Item("a tensor that is a map too", field(1, _W[2:] + field(3, b"")), "'w' is both a tensor and a map parameter; corrupt"),
    Item("a thousand fields in a value", field(1, field(15, 1) * 1000), "byte 3: field 15 is none that a tensor of a checkpoint has, or stands there twice; corrupt, or of a MindSpore newer than this program"),
    Item("10 GB and nothing in it", sparse(b"\x0a", 10 << 30), "the message that ends at byte 2 has no name; not a MindSpore checkpoint"),
    Item("10 GB in one field", sparse(b"\x0a" + varint((10 << 30) - 6), 10 << 30), "byte 6: field 0 is none that a tensor of a checkpoint has, or stands there twice; corrupt, or of a MindSpore newer than this program"),
    Item("encrypted: a head cut short", b"\xd8\x5e\x3a\x7f" + b"\0" * 10, "is encrypted (AES-GCM); open it with its key: reshard.open(..., cipher=reshard.Cipher('AES-GCM', key))"),
    Item("encrypted: a block longer than the file", b"\xd9\x5e\x3a\x7f" + b"\xff\xff\xff\x7f" * 8, "is encrypted (AES-CBC); open it with its key: reshard.open(..., cipher=reshard.Cipher('AES-CBC', key))"),
]

SAFETENSORS = [
    Item("empty", b"", "is empty; a checkpoint was expected (was saving it interrupted?)", file="bad.safetensors"),
    Item("only a length", bytes(8), "is of no known checkpoint format (it begins with 00 00 00 00 00 00 00 00); expected safetensors or MindSpore .ckpt"),
    Item("a header of 2^63 bytes", st(_TENSORS, length=1 << 63), "is of no known checkpoint format (it begins with 00 00 00 00 00 00 00 80); expected safetensors or MindSpore .ckpt"),
    Item("a header of 2^64 - 1 bytes", st(_TENSORS, length=(1 << 64) - 1), "is of no known checkpoint format (it begins with ff ff ff ff ff ff ff ff); expected safetensors or MindSpore .ckpt"),
    Item("a header longer than the file", st(_TENSORS, b"abcd", length=500), "its header is said to be 500 bytes long; the file has 72 (and headers may have 100000000); it is cut short or corrupt"),
    Item("a header of 1 GB in a sparse file", sparse(st(_TENSORS, length=1 << 30), 2 << 30), "its header is said to be 1073741824 bytes long; the file has 2147483648 (and headers may have 100000000); it is cut short or corrupt"),
    Item("a header of 90 MB of nothing", sparse(st(_TENSORS, length=90_000_000), 2 << 30), "its header is not JSON in UTF-8:", HEAVY),
    Item("a header that ends in the data", st(_TENSORS, b"abcd", length=len(json.dumps(_TENSORS)) + 2), "its header is not JSON in UTF-8:"),
    Item("a header that is not JSON", st(b"{]"), "its header is not JSON in UTF-8:"),
    Item("a header in UTF-16", st("{}".encode("utf-16-le")), "its header is not JSON in UTF-8:"),
    Item("a header that is not UTF-8", st(b'{"\xff":1}'), "its header is not JSON in UTF-8:"),
    Item("a name with half of a surrogate pair", st({"w\ud800": tensor(0, 4)}, b"abcd"), "tensor 'w\\ud800': has half of a surrogate pair in its name, which is not UTF-8"),
    Item("surrogates in UTF-8", st(b'{"__metadata__":{"a":"\xed\xa0\x80"},"w":{"dtype":"I8","shape":[0],"data_offsets":[0,0]}}'), "its header is not JSON in UTF-8:"),
    Item("notes with half of a surrogate pair", st({"__metadata__": {"a": "\ud800"}, **_TENSORS}, b"abcd"), "its __metadata__ is not an object of strings in UTF-8"),
    Item("text with half of a surrogate pair", st({"__metadata__": {"reshard.str": '{"a": "\\ud800"}'}, **_TENSORS}, b"abcd"), "its __metadata__['reshard.str'] is not a JSON object of strings"),
    Item("text in text in text", st({"__metadata__": {"reshard.str": '{"a":' * 50_000}}), "its __metadata__['reshard.str'] is not a JSON object of strings"),
    Item("deep JSON", st(b'{"a":' * 50_000), "its header is not JSON in UTF-8: it is nested too deeply"),
    Item("deep lists", st(b'{"w":' + b"[" * 100_000), "its header is not JSON in UTF-8: it is nested too deeply"),
    Item("a number of 5,000 digits", st(b'{"w":{"dtype":"I8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}', b"abcd"), "its header is not JSON in UTF-8: it has a number of thousands of digits"),
    Item("two numbers of 4,000 digits", st(b'{"w":{"dtype":"I8","shape":[' + b"9" * 4000 + b"," + b"9" * 4000 + b'],"data_offsets":[0,4]}}', b"abcd"), "tensor 'w': has no sound dtype, shape and data_offsets in the header"),
    Item("an offset of 4,000 digits", st(b'{"w":{"dtype":"I8","shape":[4],"data_offsets":[0,' + b"9" * 4000 + b']}}', b"abcd"), "tensor 'w': has no sound dtype, shape and data_offsets in the header"),
    Item("NaN in a shape", st(b'{"w":{"dtype":"I8","shape":[NaN],"data_offsets":[0,4]}}', b"abcd"), "tensor 'w': has no sound dtype, shape and data_offsets in the header"),
    Item("Infinity in an offset", st(b'{"w":{"dtype":"I8","shape":[4],"data_offsets":[0,Infinity]}}', b"abcd"), "tensor 'w': has no sound dtype, shape and data_offsets in the header"),
    Item("NaN in the notes", st(b'{"__metadata__":{"a":NaN}}'), "its __metadata__ is not an object of strings in UTF-8"),
    Item("a negative dim", st({"w": tensor(0, 4, [-4])}, b"abcd"), "tensor 'w': has no sound dtype, shape and data_offsets in the header"),
    Item("two negative dims", st({"w": tensor(0, 4, [-2, -2])}, b"abcd"), "tensor 'w': has no sound dtype, shape and data_offsets in the header"),
    Item("a shape whose product overflows", st({"w": tensor(0, 4, [1 << 62, 1 << 62])}, b"abcd"), "tensor 'w': has the shape [4611686018427387904, 4611686018427387904], which no array can have"),
    Item("a product that is 4 modulo 2^64", st({"w": tensor(0, 4, [(1 << 62) + 1, 4])}, b"abcd"), "tensor 'w': has the shape [4611686018427387905, 4], which no array can have"),
    Item("no elements of huge extents", st({"w": tensor(0, 0, [1 << 62, 1 << 62, 0])}), "tensor 'w': has the shape [4611686018427387904, 4611686018427387904, 0], which no array can have"),
    Item("an extent of 2^63", st({"w": tensor(0, 0, [1 << 63, 0])}), "tensor 'w': has no sound dtype, shape and data_offsets in the header"),
    Item("65 dims", st({"w": tensor(0, 1, [1] * 65)}, b"a"), ", which no array can have"),
    Item("a million dims", lambda path: path.write_bytes(st({"w": tensor(0, 4, [300] * 1_000_000)}, b"abcd")) and None, ", which no array can have", HEAVY),
    Item("an unknown dtype", st({"w": tensor(0, 4, dtype="F3")}, b"abcd"), "tensor 'w': has dtype 'F3'; known are BOOL, "),
    Item("a dtype with an escape sequence", st({"w": tensor(0, 4, dtype="\x1b[2J\n")}, b"abcd"), "tensor 'w': has dtype '\\x1b[2J\\n'; known are BOOL, "),
    Item("a dtype of 1 MB", st({"w": tensor(0, 4, dtype="F" * 1_000_000)}, b"abcd"), "tensor 'w': has dtype 'FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF; known are BOOL, "),
    Item("a name of 1 MB", st({"w" * 1_000_000: tensor(0, 4)}, b"abcd"), ": has a name of 1000000 characters; at most 4096 bytes are taken"),
    Item("offsets that overlap", st({"v": tensor(0, 4), "w": tensor(2, 6)}, b"abcdef"), "tensor 'w': begins at byte 2 of the data; expected 4 (an overlap)"),
    Item("offsets that overlap whole", st({"v": tensor(0, 4), "w": tensor(0, 4)}, b"abcd"), "tensor 'w': begins at byte 0 of the data; expected 4 (an overlap)"),
    Item("offsets with a gap", st({"v": tensor(0, 2), "w": tensor(4, 6)}, b"abcdef"), "tensor 'w': begins at byte 4 of the data; expected 2 (a gap)"),
    Item("offsets that end before they begin", st({"w": tensor(4, 0, [4])}, b"abcd"), "tensor 'w': occupies -4 bytes; int8 [4] has 4"),
    Item("offsets behind the file", st({"w": tensor(0, 5)}, b"abcd"), "end: the file has 72 bytes; its header describes 73"),
    Item("offsets of 2^64", st({"w": tensor(1 << 64, (1 << 64) + 4, [4])}, b"abcd"), "tensor 'w': has no sound dtype, shape and data_offsets in the header"),
    Item("bytes behind the tensors", st(_TENSORS, b"abcde"), "end: the file has 73 bytes; its header describes 72"),
    Item("bytes and no tensor", st({}, b"abcde"), "end: the file has 15 bytes; its header describes 10"),
    Item("nothing at all", st({}), "holds no tensor; was saving it interrupted?", WHOLE),
    Item("a name twice", st(b'{"w":{"dtype":"I8","shape":[2],"data_offsets":[0,2]},"w":{"dtype":"I8","shape":[2],"data_offsets":[2,4]}}', b"abcd"), "'w': stands twice in one object of the header"),
    Item("a name twice, without bytes", st(b'{"w":{"dtype":"I8","shape":[0],"data_offsets":[0,0]},"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'), "'w': stands twice in one object of the header"),
    Item("a dtype twice", st(b'{"w":{"dtype":"I8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', b"abcd"), "'dtype': stands twice in one object of the header"),
    Item("notes twice", st(b'{"__metadata__":{"a":"b"},"__metadata__":{"a":"c"}}'), "'__metadata__': stands twice in one object of the header"),
    Item("notes that are no text", st({"__metadata__": {"a": 1}}), "its __metadata__ is not an object of strings in UTF-8"),
    Item("a tensor that is a list", st({"w": [1]}), "tensor 'w': has no sound dtype, shape and data_offsets in the header"),
    Item("a tensor and text of one name", st({"__metadata__": {"reshard.str": '{"w": ""}'}, **_TENSORS}, b"abcd"), "'w' is both a tensor and a text entry of its __metadata__"),
    Item("4 MB of empty lists", lambda path: path.write_bytes(st(b'{"w":[' + b"[]," * 1_300_000 + b"[]]}")) and None, "tensor 'w': has no sound dtype, shape and data_offsets in the header", HEAVY),
    Item("a zip archive", b"PK\x03\x04" + bytes(60), "is of no known checkpoint format (it begins with 50 4b 03 04 00 00 00 00); expected safetensors or MindSpore .ckpt"),
    Item("a pickle", b"\x80\x02cos\nsystem\n(S'echo pwned'\ntR.", "is of no known checkpoint format (it begins with 80 02 63 6f 73 0a 73 79); expected safetensors or MindSpore .ckpt"),
]

KINDS = [
    Item("a FIFO", fifo, "is no regular file but a directory, a pipe or a device", ONE_FILE),
    Item("a device that does not end", link("/dev/zero"), "is no regular file but a directory, a pipe or a device", ONE_FILE),
    Item("a link to itself", link("bad.ckpt"), "cannot be read: Too many levels of symbolic links", ONE_FILE[:-2]),
    Item("a link to nothing", link("nowhere"), "cannot be read: No such file or directory", ONE_FILE[:-2]),
    Item("a file without permission", unreadable, "cannot be read: Permission denied"),
]



encrypted = partial(Item, commands=KEYED)

ENCRYPTED = [
    encrypted("not encrypted", _W, "is not encrypted; leave the key out"),
    encrypted("a head cut short", block(b"x" * 32)[:20], "byte 0: no encrypted block; cut short or corrupt"),
    encrypted("contents cut short", block(b"x" * 32)[:-1], "byte 0: no encrypted block; cut short or corrupt"),
    encrypted("a block of 2^31 - 1 bytes", block(b"", length=(1 << 31) - 1), "byte 0: no encrypted block; cut short or corrupt"),
    encrypted("a block of -1 bytes", block(b"x" * 32, length=-1), "byte 0: no encrypted block; cut short or corrupt"),
    encrypted("a block of no bytes", block(b""), "byte 0: no encrypted block; cut short or corrupt"),
    encrypted("an IV of 2^31 - 1 bytes", block(b"x" * 32, iv=(1 << 31) - 1), "byte 0: no encrypted block; cut short or corrupt"),
    encrypted("a tag that is wrong", block(b"x" * 32), "cannot be decrypted with this key; it is wrong, or the file was changed"),
    Item("a block of 2 GB that is not there", sparse(block(b"", length=(1 << 31) - 100), (1 << 31) - 100 + 48), "cannot be decrypted with this key; it is wrong, or the file was changed", KEYED, slow=True, seconds=60),
    encrypted("another mode", block(b"x" * 32, magic=0x7F3A5ED9), "is encrypted in mode AES-CBC; the mode given is AES-GCM"),
    encrypted("an unknown mode behind a block", block(b"x" * 32) + block(b"x" * 32, magic=1), "byte 80: no encrypted block; cut short or corrupt"),
    Item("100,000 blocks of a byte", repeated(b"", block(b"x"), 100_000), "cannot be decrypted with this key; it is wrong, or the file was changed", KEYED, slow=True, seconds=60),
]

# Names that are odd and sound.
_ODD = ["../x", "/etc/x", "..", ".", " ", "a\nerror: no", "\x1b[2J", "<script>", "\u202e", "\x7f", "{w}", "%s", "w" * 4096, "1." * 2000, "." * 4000]

NAMED = [
    Item("odd names in a .ckpt file", b"".join(proto(name.encode()) for name in _ODD), "", ODD, 0),
    Item("odd names in a safetensors file", st({name: tensor(4 * n, 4 * n + 4) for n, name in enumerate(_ODD)}, b"abcd" * len(_ODD)), "", ODD, 0),
    Item("odd texts", st({"__metadata__": {"reshard.str": json.dumps({name: name for name in _ODD}), "\x1b[2J": "\nerror: no"}, "w": tensor(0, 4)}, b"abcd"), "", ODD, 0),
    Item("5,000 names beside one of 4,096 bytes", b"".join(proto(f"{n:x}-{n % 7:x}{n:o}g".encode()) for n in range(5000)) + proto(b"w" * 4096), "", ("inspect {bad}",), 0),
    Item("a million tensors in a .ckpt file", lambda path: path.write_bytes(b"".join(proto(b"%d" % n) for n in range(1_000_000))) and None, "", ("inspect {bad}", ".open {bad}"), 0, slow=True, headroom=1_500_000_000, seconds=200),
    Item("a million tensors in a safetensors file", lambda path: path.write_bytes(st({f"{n}": tensor(n, n + 1) for n in range(1_000_000)}, bytes(1_000_000))) and None, "", ("inspect {bad}", ".open {bad}"), 0, slow=True, headroom=2_500_000_000, seconds=200),
    Item("20,000 tensors in a .ckpt file", lambda path: path.write_bytes(b"".join(proto(b"%d" % n) for n in range(20_000))) and None, "", ("inspect {bad}",), 0),
]

# --- strategy files ----------------------------------------------------------------------------------------------

_MILLION_AXES = [1] * 1_000_000

a_strategy = partial(Item, commands=STRATEGY)
a_json = partial(Item, commands=STRATEGY, file="bad.json")
one_json = partial(Item, commands=ONE_STRATEGY, file="bad.json")

PROTOBUF = [
    a_strategy("empty", b"", "is empty; a strategy file was expected (was saving it interrupted?)"),
    a_strategy("a length that does not end", b"\x1a" + b"\xff" * 30, "is neither a protobuf strategy file nor JSON"),
    a_strategy("cut", edited([2], [0])[:-1], "is neither a protobuf strategy file nor JSON"),
    a_strategy("a length of 2^63", b"\x1a" + varint(1 << 63), "is neither a protobuf strategy file nor JSON"),
    a_strategy("groups in groups", b"\x08\x02" + b"\x7b" * 100_000, "is neither a protobuf strategy file nor JSON"),
    a_strategy("messages in messages", b"\x08\x02" + b"\x1a\x7f" * 100_000, "is neither a protobuf strategy file nor JSON"),
    Item("1 MB of empty layouts", repeated(b"\x08\x02", b"\x1a\x00", 500_000), "parallel_layout_item[0].param_name: is missing; the file is cut short, or no strategy file", ("strategy show {bad}", ".read_strategy {bad}")),
    Item("1 MB of empty operators", repeated(edited([2], [0]), b"\x12\x00", 500_000), "parallel_strategy_item[0].node_name: is missing; the file is cut short, or no strategy file", ("strategy show {bad}", ".read_strategy {bad}")),
    a_strategy("a name that is not UTF-8", edited([2], [0]).replace(b"\x0a\x01w", b"\x0a\x01\xff"), "parallel_layout_item[0].param_name: is b'\\xff', which is not UTF-8"),
    a_strategy("a name of 5,000 bytes", strategy(**{"w" * 5000: ([2], [0])}).SerializeToString(), "'wwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwww…: is a name of 5000 characters; at most 4096 bytes"),
    a_strategy("a name with control characters, twice", strategy(**{"\x1b[2J\nerror: w": ([2], [0])}).SerializeToString() + strategy(**{"\x1b[2J\nerror: w": ([2], [0])}).SerializeToString()[2:], "'\\x1b[2J\\nerror: w': is listed a second time"),
    a_strategy("a tensor twice", edited([2], [0]) + edited([2], [0])[2:], "w: is listed a second time"),
    a_strategy("no devices", edited([0], [0]), "w: dev_matrix is [0]; expected extents of at least 1"),
    a_strategy("no device axes", edited([], [0]), "w: dev_matrix is []; expected extents of at least 1"),
    a_strategy("2^32 - 1 devices", edited([(1 << 32) - 1], [0]), "w: dev_matrix [4294967295] is of more than 131072 devices, which is taken for a corrupt file"),
    a_strategy("2^64 devices", edited([1 << 16] * 4, [0]), "w: dev_matrix [65536, 65536, 65536, 65536] is of more than 131072 devices, which is taken for a corrupt file"),
    a_strategy("devices of 5,000 digits", edited([(1 << 32) - 1] * 520, [0]), "w: dev_matrix has 520 entries; more than 64 is taken for a corrupt file"),
    Item("a million axes", edited([(1 << 32) - 1] * 1_000_000, [0]), "w: dev_matrix has 1000000 entries; more than 64 is taken for a corrupt file", ("strategy show {bad}", ".read_strategy {bad}")),
    Item("a million axes of one device", edited(_MILLION_AXES, [0]), "w: dev_matrix has 1000000 entries; more than 64 is taken for a corrupt file", ("strategy show {bad}", ".read_strategy {bad}")),
    Item("a million dimensions", edited([2], [-1] * 1_000_000), "w: tensor_map has 1000000 entries; more than 64 is taken for a corrupt file", ("strategy show {bad}", ".read_strategy {bad}")),
    a_strategy("an axis out of range", edited([2], [1]), "w: tensor_map[0] is 1; expected -1 to 0 for dev_matrix [2]"),
    a_strategy("a negative axis", edited([2], [-2]), "w: tensor_map[0] is -2; expected -1 to 0 for dev_matrix [2]"),
    a_strategy("an axis of 2^31 - 1", edited([2], [(1 << 31) - 1]), "w: tensor_map[0] is 2147483647; expected -1 to 0 for dev_matrix [2]"),
    a_strategy("an axis twice", edited([2], [0, 0]), "w: tensor_map[1] uses device axis 0 a second time"),
    a_strategy("an axis twice, in two entries", edited([2], [0], tensor_map=[0]), "w: tensor_map[1] uses device axis 0 a second time"),
    a_strategy("optimizer shards below -1", edited([2], [-1], opt_weight_shard_size=-2), "w: opt_weight_shard_size is -2; expected -1 or more"),
    a_strategy("two numbers of devices", strategy(w=([2], [0]), v=([4], [0])).SerializeToString(), "v.dev_matrix: [4] has 4 devices; the tensors before it have 2"),
    a_strategy("65,536 stages of 2^16 devices", strategy(**{"0-w": ([1 << 16], [0]), "65535-w": ([1 << 16], [0])}).SerializeToString(), "stages: are 65536 of 65536 devices; more than 1048576 ranks are not taken"),
    a_strategy("a stage of 99,999,999", strategy(**{"99999999-w": ([2], [0])}).SerializeToString(), "stage 99999999: is more than any pipeline has"),
    a_strategy("a stage of 1,000 digits", strategy(**{"9" * 1000 + "-w": ([2], [0])}).SerializeToString(), "stage 999999999: is more than any pipeline has"),
    a_strategy("a zip archive", b"PK\x03\x04" + bytes(60), "is neither a protobuf strategy file nor JSON"),
    a_strategy("a pickle", b"\x80\x02cos\nsystem\n(S'echo pwned'\ntR.", "is neither a protobuf strategy file nor JSON"),
    a_strategy("a checkpoint", proto(), "looks like a checkpoint, no strategy file; `reshard inspect` shows its tensors"),
    a_strategy("a safetensors file", st(_TENSORS, b"abcd"), "looks like a checkpoint, no strategy file; `reshard inspect` shows its tensors"),
    a_strategy("a file of 2 GB", sparse(edited([2], [0]), 2 << 30), "has more than 67108864 bytes, which no strategy file has"),
]

# What is sound in itself, and of no use for the sound checkpoint, whose tensor w has 8 elements on 2 ranks.
_USES = tuple(command for command in STRATEGY if "{ranks}" in command and "--target" not in command)
_TARGETS = ("transform {file} {out} --target-strategy {bad}", "transform {file} {out} --target-strategy {bad} --dry-run")

unfit = partial(Item, commands=_USES)

UNFIT = [
    unfit("three dimensions for one", edited([2], [0, -1, -1]), "ranks: /sound/ranks/rank_0/a.ckpt: tensor 'w': the files store 1 dimensions [4], the layout has 3 (tensor_map [0, -1, -1])"),
    unfit("2^17 devices", edited([1 << 17], [0]), "ranks: has 2 ranks; the strategy describes 131072, which is none of this checkpoint; give its own, or --partial"),
    unfit("2^17 devices, each a replica", edited([1 << 17], [-1]), "ranks: has 2 ranks; the strategy describes 131072, which is none of this checkpoint; give its own, or --partial"),
    unfit("65,536 stages", strategy(**{f"{stage}-w": ([2], [0]) for stage in (0, 65_535)}).SerializeToString(), "ranks: has 2 ranks; the strategy describes 131072, which is none of this checkpoint; give its own, or --partial"),
    unfit("optimizer shards that do not divide", edited([2], [-1], opt_weight_shard_size=3), "ranks: /sound/ranks/rank_0/a.ckpt: tensor 'w': opt_weight_shard_size 3 does not divide the 2 devices that share a block (dev_matrix [2], tensor_map [-1])"),
    unfit("interleaved rows", edited([2], [0], field=2), "ranks: /sound/ranks/rank_0/a.ckpt: tensor 'w': field is 2: its rows are interleaved by device, which no block describes"),
    unfit("sizes of rows below 0", edited([2], [0], param_split_shape=[9, -1]), "ranks: /sound/ranks/rank_0/a.ckpt: tensor 'w': dimension 0 of size 8 is split 2 ways, which param_split_shape [9, -1] does not describe"),
    unfit("sizes of rows of 2^63 - 1", edited([2], [0], param_split_shape=[(1 << 63) - 1] * 2), "ranks: /sound/ranks/rank_0/a.ckpt: tensor 'w': the files store [4], of which the layout [2] map [0] makes no array"),
    unfit("2^17 sizes of rows", edited([1 << 17], [0], param_split_shape=[1] * (1 << 17)), "ranks: has 2 ranks; the strategy describes 131072, which is none of this checkpoint; give its own, or --partial"),
    Item("a target of 2^17 devices that split 4 rows", edited([1 << 17], [0]), "file.ckpt: tensor 'w': dimension 0 of size 4 does not divide into 131072", _TARGETS),
    Item("a target that shards 4 rows by 3", edited([3], [0]), "file.ckpt: tensor 'w': dimension 0 of size 4 does not divide into 3", _TARGETS),
    Item("a target of other names", strategy(v=([2], [0])).SerializeToString(), "file.ckpt: tensor 'v': is in the strategy and in no source file; to go on without it give --allow-missing 'v'", _TARGETS),
]

JSON = [
    a_json("empty", b"", "is empty; a strategy file was expected (was saving it interrupted?)"),
    a_json("cut", layout()[:-1], "is not JSON:"),
    a_json("deep lists", b'{"a":' + b"[" * 100_000, "is not JSON: it is nested too deeply"),
    a_json("deep objects", b'{"a":' * 100_000, "is not JSON: it is nested too deeply"),
    a_json("a list", b"[]", "is a JSON list; expected an object"),
    a_json("in UTF-16", layout().decode().encode("utf-16"), "is not JSON:"),
    a_json("not UTF-8", b'{"\xff":1}', "is not JSON:"),
    a_json("a key twice", layout().replace(b'"field": 0', b'"field": 0, "field": 1'), "field: is listed a second time"),
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
    a_json("an axis twice", layout(tensor_map=[0, 0], tensor_shape=[4, 4]), "$.parallel_layout_item.w: tensor_map[1] uses device axis 0 a second time"),
    a_json("a shape of other dimensions", layout(tensor_shape=[4, 4]), "$.parallel_layout_item.w.tensor_shape: is [4, 4], of 2 dimensions; tensor_map has 1"),
    a_json("a name with half of a surrogate pair", layouts({"\ud800": {"dev_matrix": [2], "tensor_map": [0]}}), "$.parallel_layout_item.'\\ud800': is no name; half of a surrogate pair stands alone in it"),
    a_json("no layouts", layouts([]), "$.parallel_layout_item: is a list; expected an object"),
    a_json("1,000 dimensions of one device each", layout(dev_matrix=[1] * 1000, tensor_map=list(range(1000)), tensor_shape=[1] * 1000), "$.parallel_layout_item.w: dev_matrix has 1000 entries; more than 64 is taken for a corrupt file"),
    Item("2 MB of empty lists", layout(more=[[]] * 500_000), "", ("strategy check {bad} {file}", "strategy show {bad}"), 0, "bad.json"),
    a_json("a file of 2 GB", sparse(layout(), 2 << 30), "has more than 67108864 bytes, which no strategy file has"),
    one_json("a FIFO", fifo, "is no regular file but a directory, a pipe or a device"),
    one_json("a device that does not end", link("/dev/zero"), "is no regular file but a directory, a pipe or a device"),
    one_json("a link to itself", link("bad.json"), "cannot be read: Too many levels of symbolic links"),
    a_json("a file without permission", unreadable, "cannot be read: Permission denied"),
]

# --- directories -------------------------------------------------------------------------------------------------

_INDEX = "model.safetensors.index.json"


def index(weight_map: object, name: str = _INDEX, **files: bytes | Callable[[Path], None]) -> Callable[[Path], None]:
    """A unified set with any index."""
    return tree({name: json.dumps({"weight_map": weight_map}).encode(), "a.safetensors": st(_TENSORS, b"abcd"), **files})


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
    a_set("an empty directory", tree({}), "has no checkpoint at 'rank_0/*.safetensors' and so on; give --rank-pattern for other names"),
]

RANKS = [
    ranks("a rank directory that is a link to itself", tree({"rank_0/a.ckpt": _W, "rank_1": link("rank_1")}), "rank 1: has no file; it is needed for 1 tensors (w)"),
    ranks("a rank directory that is a link to the directory above", tree({"rank_0/a.ckpt": _W, "rank_1": link("..")}), "rank 1: has no file; it is needed for 1 tensors (w)"),
    ranks("a rank's file that is a FIFO", tree({"rank_0/a.ckpt": _W, "rank_1/a.ckpt": fifo}), "rank 1: has no file; it is needed for 1 tensors (w)"),
    ranks("a rank's file that is a directory", tree({"rank_0/a.ckpt": _W, "rank_1/a.ckpt/b": _W}), "rank 1: has no file; it is needed for 1 tensors (w)"),
    ranks("a rank directory elsewhere", tree({"rank_0/a.ckpt": _W, "b/a.ckpt": proto(content=b"efgh"), "rank_1": link("b")}), "", code=0),
    ranks("a rank twice", tree({"rank_0/a.ckpt": _W, "rank_1/a.ckpt": _W, "rank_01/a.ckpt": _W}), "rank 1 is there twice, as '01' and '1'"),
    ranks("a rank of 200 digits", tree({"rank_0/a.ckpt": _W, f"rank_1{'0' * 199}/a.ckpt": _W}), "; the strategy describes ranks 0 to 1; give the strategy of all 2 ranks"),
    Item("a rank of one billion, whole", tree({"rank_0/a.ckpt": _W, "rank_1000000000/a.ckpt": _W}), "dev_matrix [1000000001] is of more than 131072 devices, which is taken for a corrupt file", ("inspect {bad} --layout *=whole", "transform {bad} {out} --layout *=split:0"), file="bad"),
    ranks("a file name with a line break", tree({"rank_0/a\nerror: no.ckpt": b"\x0a\x05", "rank_1/a\nerror: no.ckpt": b"\x0a\x05"}), "rank_0: the file name 'a\\nerror: no.ckpt' has a line break; rename the file"),
    ranks("a rank's file of another shape", tree({"rank_0/a.ckpt": _W, "rank_1/a.ckpt": proto(dims=[2], content=b"ab")}), "/item/bad/rank_1/a.ckpt: tensor 'w' has shape [2]; the strategy and the other ranks say [4]"),
    ranks("a rank's file of another dtype", tree({"rank_0/a.ckpt": _W, "rank_1/a.ckpt": proto(kind=b"UInt8")}), "/item/bad/rank_1/a.ckpt: tensor 'w' is uint8; other ranks have int8"),
    ranks("a rank directory without permission", tree({"rank_0/a.ckpt": _W, "rank_1": lambda path: path.mkdir(0)}), "rank 1: has no file; it is needed for 1 tensors (w)"),
    ranks("a directory without permission", lambda path: path.mkdir(0), "param_name_map.json: cannot be read: Permission denied"),
]

# --- targets -----------------------------------------------------------------------------------------------------

_TO_RANKS = "transform {ranks} {out} --source-strategy {strategy} --target-strategy {strategy}"
_TO_FILE = "convert {file} {out}/a.ckpt --format ckpt"
_JOURNAL = ".reshard/rank_0%2Fcheckpoint_0.ckpt.jsonl"
_BEGUN = b'{"reshard":1,"digest":"a","size":21}\n'

_SUMMED = f"{_TO_RANKS} --write-manifest {{out}}/m.json"
a_target = partial(Item, commands=(_TO_RANKS, f"{_TO_RANKS} --overwrite", _SUMMED), code=6, file="out")

TARGETS = [
    Item("a prefix that leads out", tree({}), "is no beginning of a file name; expected one such as 'checkpoint_'", (f"{_TO_RANKS} --prefix ../x", f"{_TO_RANKS} --prefix ../../outside/x", f"{_TO_RANKS} --prefix /x", f"{_TO_RANKS} --prefix x/y", ".transform_with_prefix {ranks} {out} {strategy} ../x"), 2, "out"),
    Item("a prefix with an escape sequence", tree({}), "prefix '\\x1b[2J' is no beginning of a file name; expected one such as 'checkpoint_'", (f"{_TO_RANKS} --prefix \x1b[2J",), 2, "out"),
    Item("a prefix of 300 characters", tree({}), ".ckpt.partial: cannot be made: File name too long", (f"{_TO_RANKS} --prefix {'x' * 300}",), 6, "out"),
    a_target("a rank directory that leads out", tree({"rank_0": link("../outside")}), "rank_0/checkpoint_0.ckpt: leads out of the target directory, to /item/outside/checkpoint_0.ckpt; remove the link"),
    a_target("a rank directory that leads above", tree({"rank_1": link("..")}), "rank_1/checkpoint_1.ckpt: leads out of the target directory, to /item/checkpoint_1.ckpt; remove the link"),
    a_target("a rank directory that is a link to itself", tree({"rank_0": link("rank_0")}), "rank_0/checkpoint_0.ckpt.partial: cannot be made: File exists"),
    a_target("a rank directory that is a file", tree({"rank_0": b""}), "rank_0/checkpoint_0.ckpt.partial: cannot be made: File exists"),
    a_target("a file that leads out", tree({"rank_0/checkpoint_0.ckpt": link("../../outside/keep")}), "rank_0/checkpoint_0.ckpt: leads out of the target directory, to /item/outside/keep; remove the link"),
    a_target("a file that leads to nothing outside", tree({"rank_0/checkpoint_0.ckpt": link("../../outside/new")}), "rank_0/checkpoint_0.ckpt: leads out of the target directory, to /item/outside/new; remove the link"),
    a_target("an unfinished file that leads out", tree({"rank_0/checkpoint_0.ckpt.partial": link("../../outside/keep")}), "", code=0),  # it is no run's own, and removed
    a_target("an unfinished file that is a FIFO", tree({"rank_0/checkpoint_0.ckpt.partial": fifo}), "", code=0),
    a_target("journals that lead out", tree({".reshard": link("../outside")}), ".reshard: is a link; remove it, or choose another target directory"),
    a_target("journals that lead to nothing", tree({".reshard": link("../outside/new")}), ".reshard: is a link; remove it, or choose another target directory"),
    a_target("journals that are a file", tree({".reshard": b""}), ".reshard/lock: cannot be written: File exists"),
    a_target("journals without permission", tree({".reshard": lambda path: path.mkdir(0)}), ".reshard/lock: cannot be written: Permission denied"),
    a_target("a lock that leads out", tree({".reshard/lock": link("../../outside/keep")}), ".reshard/lock: is a link; remove it, or choose another target directory"),
    a_target("a lock that is a FIFO", tree({".reshard/lock": fifo}), "", code=0),
    a_target("a lock that is a directory", tree({".reshard/lock/x": b""}), ".reshard/lock: cannot be written: Is a directory"),
    a_target("a lock without permission", tree({".reshard/lock": unreadable}), ".reshard/lock: cannot be written: Permission denied"),
    a_target("a journal that leads out", tree({_JOURNAL: link("../../outside/keep")}), "", code=0),
    a_target("a journal that leads to nothing outside", tree({_JOURNAL: link("../../outside/new")}), "", code=0),
    a_target("a journal that is a FIFO", tree({_JOURNAL: fifo}), "", code=0),
    a_target("a journal that is a directory", tree({_JOURNAL + "/x": b""}), ".reshard/rank_0%2Fcheckpoint_0.ckpt.jsonl: cannot be written: File exists"),
    a_target("a journal without permission", tree({_JOURNAL: unreadable}), "", code=0),
    a_target("a journal of 2 GB of nothing", tree({_JOURNAL: sparse(b"", 2 << 30)}), "", code=0),
    a_target("a journal of a line of 300 MB", tree({_JOURNAL: repeated(_BEGUN + b'{"wrote":[', b"[0,1,1],", 40_000_000)}), "", code=0, slow=True),
    a_target("a journal of ten million ranges", tree({_JOURNAL: repeated(_BEGUN, b'{"wrote":[[0,1,1],[1,1,1],[2,1,1],[3,1,1]]}\n', 2_500_000)}), "", code=0, seconds=30),
    a_target("a journal of two million empty lines", tree({_JOURNAL: repeated(_BEGUN, b"{}\n", 2_000_000)}), "", code=0, seconds=30),
    a_target("a journal of deep JSON", tree({_JOURNAL: b"[" * 100_000}), "", code=0),
    a_target("a journal of deep objects", tree({_JOURNAL: _BEGUN + b'{"a":' * 100_000}), "", code=0),
    a_target("a journal that is not UTF-8", tree({_JOURNAL: _BEGUN + b"\xff\xfe"}), "", code=0),
    a_target("a journal of a list", tree({_JOURNAL: b"[]\n"}), "", code=0),
    a_target("a journal of a version to come", tree({_JOURNAL: b'{"reshard":2,"digest":"a","size":21}\n'}), "", code=0),
    a_target("a journal of huge numbers", tree({_JOURNAL: _BEGUN + b'{"wrote":[[' + b"9" * 4000 + b',1,1],[0,1e308,1]]}\n{"ready":[' + b"9" * 4000 + b",1]}\n"}), "", code=0),
    a_target("a journal of numbers of 5,000 digits", tree({_JOURNAL: _BEGUN + b'{"wrote":[[' + b"9" * 5000 + b",1,1]]}\n"}), "", code=0),
    a_target("a journal of Infinity", tree({_JOURNAL: _BEGUN + b'{"wrote":[[Infinity,NaN,-Infinity]]}\n'}), "", code=0),
    a_target("an unfinished file of another plan", tree({_JOURNAL: _BEGUN, "rank_0/checkpoint_0.ckpt.partial": b"x"}), "rank_0/checkpoint_0.ckpt was written by a run of another plan, or from sources that changed since; begin anew with --restart, or choose another target", commands=(_TO_RANKS,)),
    a_target("a finished file, says its journal", tree({_JOURNAL: _BEGUN + b'{"ready":[2,0]}\n', "rank_0/checkpoint_0.ckpt": b"xy"}), "has rank_0/checkpoint_0.ckpt already; choose another target directory, or replace it with --overwrite", commands=(_TO_RANKS, f"{_TO_RANKS} --restart")),
    a_target("other journals", tree({".reshard/\x1b[2J\nerror: no.jsonl": b"x", ".reshard/a": link("/dev/zero")}), "", code=0),
    Item("a part of a set that leads out", tree({"part0.safetensors": link("../outside/keep")}), "part0.safetensors: leads out of the target directory, to /item/outside/keep; remove the link", ("unify {ranks} {out} --source-strategy {strategy} --overwrite",), 6, "out"),
    Item("an index that leads out", tree({"param_name_map.json": link("../outside/keep")}), "param_name_map.json: leads out of the target directory, to /item/outside/keep; remove the link", ("unify {ranks} {out} --source-strategy {strategy} --overwrite",), 6, "out"),
    Item("a converted file that leads out", tree({"a.ckpt": link("../outside/keep")}), "a.ckpt: leads out of the target directory, to /item/outside/keep; remove the link", (_TO_FILE, f"{_TO_FILE} --overwrite"), 6, "out"),
    Item("a strategy's unfinished file that leads out", tree({"s.ckpt.partial": link("../outside/keep")}), "", ("strategy merge {strategies} -o {out}/s.ckpt", "strategy make {rules} --like {file} -o {out}/s.ckpt"), 0, "out"),
    Item("a strategy file that leads out", tree({"s.ckpt": link("../outside/keep")}), "", ("strategy merge {strategies} -o {out}/s.ckpt --overwrite",), 0, "out"),
    a_target("a manifest that leads out", tree({"m.json": link("../outside/keep")}), "m.json: is there already; choose another name, or replace it with --overwrite", commands=(_SUMMED,)),
    a_target("a manifest that leads out and is replaced", tree({"m.json": link("../outside/keep")}), "", commands=(f"{_SUMMED} --overwrite",), code=0),
    a_target("a manifest that is a FIFO", tree({"m.json": fifo}), "", commands=(f"{_SUMMED} --overwrite",), code=0),
    a_target("a manifest that is a directory", tree({"m.json/a": b""}), "m.json: is a directory; expected the name of a file for the manifest", commands=(_SUMMED, f"{_SUMMED} --overwrite")),
    a_target("an unfinished manifest that leads out", tree({"m.json.partial": link("../outside/keep")}), "", commands=(_SUMMED,), code=0),
    a_target("a target that is a file", b"", "/item/out/.reshard/lock: cannot be written: Not a directory"),
    a_target("a target that is a FIFO", fifo, "/item/out/.reshard/lock: cannot be written: Not a directory"),
    a_target("a target that is a link to itself", link("out"), "/item/out/.reshard/lock: cannot be written: Too many levels of symbolic links"),
    a_target("a target without permission", lambda path: path.mkdir(0o500), "/item/out/.reshard/lock: cannot be written: Permission denied"),
]

# --- rules, and maps of names ------------------------------------------------------------------------------------

_LAUGHS = b"a: &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n".encode() for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)

rules = partial(Item, commands=RULES, code=2, file="bad.yaml")
a_map = partial(Item, commands=NAMES, code=2, file="bad.json")

RULES_FILES = [
    rules("a billion laughs", b"mesh: {mp: 2}\nrules: {w: [mp]}\n" + _LAUGHS, "is not YAML: line 4 has the alias *a; write it out"),
    rules("a list in itself", b"mesh: &a [*a]\nrules: {}\n", "is not YAML: line 1 has the alias *a; write it out"),
    rules("merged mappings", b"a: &a {x: 1}\nmesh: {<<: [*a, *a]}\n", "is not YAML: line 2 has the alias *a; write it out"),
    rules("a Python object", b"mesh: !!python/object/apply:os.system ['echo pwned']\n", "is not YAML: could not determine a constructor for the tag 'tag:yaml.org,2002:python/object/apply:os.system'"),
    rules("a Python name", b"mesh: !!python/name:os.system\n", "is not YAML: could not determine a constructor for the tag 'tag:yaml.org,2002:python/name:os.system'"),
    rules("an unknown tag", b"mesh: !exec x\n", "is not YAML: could not determine a constructor for the tag '!exec'"),
    rules("a tag that does not fit", b"mesh: !!int ''\n", "is not YAML: a value does not fit the tag before it"),
    rules("another tag that does not fit", b"mesh: !!bool x\n", "is not YAML: a value does not fit the tag before it"),
    rules("a time that is none", b"mesh: !!timestamp x\n", "is not YAML: a value does not fit the tag before it"),
    rules("deep lists", b"mesh: " + b"[" * 50_000, "is not YAML: it is nested too deeply"),
    rules("deep blocks", b"- " * 20_000, "is not YAML: it is nested too deeply"),
    rules("two documents", b"mesh: {mp: 2}\n---\nrules: {}\n", "is not YAML: expected a single document in the stream"),
    rules("not UTF-8", b"mesh: \xff\n", "is not YAML: unacceptable character #x00ff: invalid start byte"),
    rules("a list for a key", b"? [a]\n: b\n", "is not YAML: while constructing a mapping"),
    rules("a huge number", b"mesh: {mp: 0x" + b"f" * 5000 + b"}\nrules: {w: [mp]}\n", "is not YAML: line 1 has a text of 5002 characters"),
    rules("a large number", b"mesh: {mp: 0x" + b"f" * 1500 + b"}\nrules: {w: [mp]}\n", "$.mesh.mp: is 151347058230423707251341006732939195542348235662207750883638; expected a number from 1 to 131072"),
    rules("large numbers multiplied", b"mesh: {mp: 0x" + b"f" * 1500 + b", dp: 0x" + b"f" * 1500 + b", pp: 0x" + b"f" * 1500 + b"}\nrules: {w: [mp]}\n", "$.mesh.mp: is 151347058230423707251341006732939195542348235662207750883638; expected a number from 1 to 131072"),
    rules("no devices", b"mesh: {mp: 0}\nrules: {w: [mp]}\n", "$.mesh.mp: is 0; expected a number from 1 to 131072"),
    rules("an axis twice", b"mesh: {mp: 2}\nrules: {w: [[mp, mp]]}\n", "$.rules['w'][0]: uses the axis 'mp' a second time"),
    rules("a stage of one billion", b"mesh: {mp: 2}\nrules: {w: [mp]}\npipeline: {w: 1000000000}\n", "$.pipeline['w']: is 1000000000; expected a stage, counted from 0, or several"),
    rules("a million devices of an operator", b"devices: 1000000\noperators: {w: {matmul: [[1000000, 1], [1, 1]]}}\n", "$.operators['w']: strategy ((1000000, 1), (1, 1)) of MatMul has to be of integers from 1 to 131072"),
    rules("operators of huge numbers", b"devices: 8\noperators: {w: {matmul: [[0x" + b"f" * 1500 + b", 1], [1, 0x" + b"f" * 1500 + b"]]}}\n", "of MatMul has to be of integers from 1 to 131072"),
    rules("a huge number of devices", b"devices: 0x" + b"f" * 1500 + b"\noperators: {w: {matmul: [[2, 1], [1, 1]]}}\n", "$.devices: is 151347058230423707251341006732939195542348235662207750883638; expected a number from 1 to 131072"),
    rules("a key twice", b"mesh: {mp: 2}\nmesh: {mp: 4}\nrules: {}\n", "line 2: has the key 'mesh' a second time"),
    rules("empty", b"", "is a YAML NoneType; expected a mapping with the keys mesh and rules"),
    rules("a file of 2 GB", sparse(b"mesh: {}", 2 << 30), "has more than 1048576 bytes, which no rules file has"),
    *not_to_be_read(rules),
]

NAME_MAPS = [
    a_map("deep JSON", b'{"a":' * 50_000, "is not JSON: it is nested too deeply"),
    a_map("a name twice", b'{"w": "a", "w": "b"}', "name 'w': is there twice"),
    a_map("a number for a name", b'{"w": 1}', "name 'w': becomes a JSON int; expected the new name"),
    a_map("half of a surrogate pair", b'{"w": "\\ud800"}', "name 'w': becomes '\\ud800'; expected text of 1 to 4096 bytes in UTF-8"),
    a_map("not UTF-8", b'{"w": "\xff"}', "is not JSON:"),
    a_map("a list", b"[]", "is a JSON list; expected {\"old name\": \"new name\"}"),
    a_map("a file of 2 GB", sparse(b"{", 2 << 30), "has more than 67108864 bytes, which no name map has"),
    *not_to_be_read(a_map),
]

# --- plan files, and manifests -----------------------------------------------------------------------------------

a_plan = partial(Item, commands=PLAN, file="bad.json")
a_manifest = partial(Item, commands=MANIFEST, file="bad.json")
a_folder = partial(Item, commands=("verify {bad} --manifest {bad}/m.json", "verify {bad} --manifest {bad}/m.json --json"), code=3, file="bad")
_FILE = ("file.ckpt", len(proto()), 0, "0" * 32)
_LISTED = sums("a.ckpt", json.dumps({"nbytes": len(proto()), "tensors": {"w": ["int8", [4], "92c80a31"]}}))

PLANS = [
    a_plan("empty", b"", "is no sound plan file: it is not JSON: Expecting value: line 1 column 1 (char 0)"),
    a_plan("a list", b"[]", "is no sound plan file: it has no key 'reshard_plan'; expected what `reshard plan -o FILE` writes"),
    a_plan("deep JSON", b'{"a":' * 50_000, "is no sound plan file: it is nested too deeply"),
    a_plan("a key twice", b'{"reshard_plan": 1, "reshard_plan": 2}', "is no sound plan file: the key 'reshard_plan' is there twice in an object"),
    a_plan("a million keys, one twice", repeated(b'{"a":1', b',"a":1', 1_000_000, b"}"), "is no sound plan file: the key 'a' is there twice in an object", commands=PLAN[:1]),
    a_plan("a million lists", repeated(b'{"reshard_plan":1,"files":[[]', b",[]", 1_000_000, b"]}"), "is no sound plan file: $ has no 'made_by'", commands=PLAN[:1]),
    a_plan("a version of 4,000 digits", b'{"reshard_plan": ' + b"9" * 4000 + b"}", "is no sound plan file: it is of version 999999999999999999999999999999999999999999999999999999999999; this reshard reads version 1; plan again"),
    a_plan("a version of 5,000 digits", b'{"reshard_plan": ' + b"9" * 5000 + b"}", "is no sound plan file: it has a number of thousands of digits"),
    a_plan("a key with control characters", b'{"reshard_plan": 1, "\\u001b[2J\\nerror: no": 1}', "is no sound plan file: $ has no 'made_by'"),
    a_plan("not UTF-8", b'{"\xff":1}', "is no sound plan file: it is not JSON: 'utf-8' codec can't decode byte 0xff in position 2: invalid start byte"),
    a_plan("a checkpoint", proto(), "is no sound plan file: it is not JSON: Expecting value: line 2 column 1 (char 1)"),
    a_plan("a source of other headers", a_plan_file(), "/sound: file.ckpt: has other tensors, in its header, than when it was planned; they are not the files that were planned with; give those, or plan again", code=6),
    a_plan("a source elsewhere", a_plan_file(files=[[0, "../file.ckpt", *_FILE[1:]]]), "is no sound plan file: $.source.files[0][1] is '../file.ckpt'; expected a path that stays below its directory"),
    a_plan("an absolute path", a_plan_file(files=[[0, "/etc/passwd", *_FILE[1:]]]), "is no sound plan file: $.source.files[0][1] is '/etc/passwd'; expected a path that stays below its directory"),
    a_plan("a source that is a device", a_plan_file(root="/dev", files=[[0, "zero", 0, 0, "0" * 32]]), "/dev: zero: is no regular file; say where the source is: --source DIRECTORY, or source="),
    a_plan("a source that is not there", a_plan_file(root="/nowhere\x1b[2J"), "/nowhere\\x1b[2J: file.ckpt: cannot be found (No such file or directory); say where the source is: --source DIRECTORY, or source="),
    a_plan("a source with a line break", a_plan_file(root="/nowhere\nerror: no"), "is no sound plan file: $.source.root is '/nowhere\\nerror: no'; expected text without a line break"),
    a_plan("a notice with a line break", a_plan_file(notices=["a\nerror: no"]), "is no sound plan file: $.source.notices[0] is 'a\\nerror: no'; expected text without a line break"),
    a_plan("a file with a line break", a_plan_file(files=[[0, "a\nerror: no", *_FILE[1:]]]), "is no sound plan file: $.source.files[0][1] is 'a\\nerror: no'; expected a path that stays below its directory"),
    a_plan("a source of another size", a_plan_file(files=[[0, "file.ckpt", 22, 0, "0" * 32]]), "/sound: file.ckpt: has 21 bytes; it had 22 when it was planned; they are not the files that were planned with; give those, or plan again", code=6),
    a_plan("a source with half of a surrogate pair", a_plan_file(root="/\ud800"), "is no sound plan file: $.source.root is '/\\ud800'; expected text without a line break"),
    a_plan("a rank of one billion", a_plan_file(files=[[10**9, *_FILE]]), "is no sound plan file: $.source.files[0] is of rank 1000000000 and header 0, which cannot be"),
    a_plan("a size of 2^64", a_plan_file(files=[[0, "file.ckpt", 1 << 64, 0, "0" * 32]]), "is no sound plan file: $.source.files[0][2] is 18446744073709551616; expected a whole number, from 0 on"),
    a_plan("a header that is not listed", a_plan_file(files=[[0, "file.ckpt", 21, 1, "0" * 32]]), "is no sound plan file: $.source.files[0] is of rank 0 and header 1, which cannot be"),
    a_plan("billions of devices", a_plan_file(strategy=planned_strategy(devices=1 << 40)), "is no sound plan file: a strategy of 1099511627776 devices in stages 0 to 0 cannot be"),
    a_plan("billions of stages", a_plan_file(strategy=planned_strategy(stages=[0, 1 << 40])), "is no sound plan file: a strategy of 2 devices in stages 0 to 1099511627775 cannot be"),
    a_plan("a device matrix of billions", a_plan_file(strategy=planned_strategy(matrix=[1 << 50])), "is no sound plan file: dev_matrix [1125899906842624] is of more than 131072 devices, which is taken for a corrupt file"),
    a_plan("an axis out of range", a_plan_file(strategy=planned_strategy(axes=[[7]])), "is no sound plan file: tensor_map[0] is 7; expected -1 to 0 for dev_matrix [2]"),
    a_plan("an axis twice", a_plan_file(strategy=planned_strategy(axes=[[0], [0]])), "is no sound plan file: tensor_map[1] uses device axis 0 a second time"),
    a_plan("a file of 2 GB", sparse(b"{", 2 << 30), "has more than 268435456 bytes, which no plan file has"),
    a_plan("a file of 200 MB of nothing", sparse(b"{", 200_000_000), "is no sound plan file: it is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)", commands=PLAN[:1], headroom=1_500_000_000, slow=True),
    *not_to_be_read(a_plan),
    a_plan("a directory", tree({"a": b""}), "is no regular file but a directory, a pipe or a device"),
]

MANIFESTS = [
    a_manifest("empty", b"", "is not JSON: Expecting value: line 1 column 1 (char 0)"),
    a_manifest("a list", b"[]", "is none; expected a JSON object with the key 'reshard_manifest'"),
    a_manifest("deep JSON", b'{"a":' * 50_000, "is not JSON: it is nested too deeply"),
    a_manifest("a key twice", b'{"reshard_manifest": 1, "reshard_manifest": 1, "files": {}}', "$: has reshard_manifest twice in one object"),
    a_manifest("a file twice", b'{"reshard_manifest": 1, "files": {"a": {"nbytes": 1, "crc32c": "00000000"}, "a": {"nbytes": 2, "crc32c": "00000000"}}}', "$: has a twice in one object"),
    a_manifest("a million keys, one twice", repeated(b'{"a":1', b',"a":1', 1_000_000, b"}"), "is none; expected a JSON object with the key 'reshard_manifest'", commands=MANIFEST[:1]),
    a_manifest("a version to come", b'{"reshard_manifest": 2, "files": {}}', "is of version 2; known is 1: use a newer reshard"),
    a_manifest("a file above", sums("../file.ckpt"), "path '../file.ckpt': is no path below a directory, such as 'rank_0/checkpoint_0.ckpt'"),
    a_manifest("an absolute path", sums("/etc/passwd"), "path '/etc/passwd': is no path below a directory, such as 'rank_0/checkpoint_0.ckpt'"),
    a_manifest("the directory itself", sums("."), "path '.': is no path below a directory, such as 'rank_0/checkpoint_0.ckpt'"),
    a_manifest("a path with control characters", sums("\x1b[2J\nerror: no"), "path '\\x1b[2J\\nerror: no': is no path below a directory, such as 'rank_0/checkpoint_0.ckpt'"),
    a_manifest("a path with half of a surrogate pair", sums("\ud800"), "path '\\ud800': is no path below a directory, such as 'rank_0/checkpoint_0.ckpt'"),
    a_manifest("a path of 10,000 characters", sums("a" * 10_000), "path 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa: has 10000 characters; at most 4096 bytes are taken"),
    a_manifest("a name of 10,000 characters", sums("a", '{"nbytes": 1, "tensors": {"' + "w" * 10_000 + '": ["int8", [4], "00000000"]}}'), "$.files['a'].tensors['wwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwww]: is a name of 10000 characters; at most 4096 bytes are taken"),
    a_manifest("a path above, 300,000 times", repeated(b'{"reshard_manifest": 1, "files": {"../a": {}', b',"../a": {}', 300_000, b"}}"), "has 3 faults:", commands=MANIFEST[:1]),
    a_manifest("a size of 4,000 digits", sums("a", '{"nbytes": ' + "9" * 4000 + ', "crc32c": "00000000"}'), "$.files['a']: is no object of 'nbytes' and either 'tensors' or 'crc32c'"),
    a_manifest("a size of 5,000 digits", sums("a", '{"nbytes": ' + "9" * 5000 + ', "crc32c": "00000000"}'), "is not JSON: it has a number of thousands of digits"),
    a_manifest("a negative size", sums("a", '{"nbytes": -1, "crc32c": "00000000"}'), "$.files['a']: is no object of 'nbytes' and either 'tensors' or 'crc32c'"),
    a_manifest("a checksum of Arabic digits", sums("a", '{"nbytes": 1, "crc32c": "\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660"}'), "$.files['a']: is no object of 'nbytes' and either 'tensors' or 'crc32c'"),
    a_manifest("a checksum of nine digits", sums("a", '{"nbytes": 1, "crc32c": "000000000"}'), "$.files['a']: is no object of 'nbytes' and either 'tensors' or 'crc32c'"),
    a_manifest("an unknown dtype", sums("a", '{"nbytes": 1, "tensors": {"w": ["int3", [4], "00000000"]}}'), "$.files['a'].tensors['w']: is no dtype, shape and CRC-32C, such as [\"float32\", [2, 8], \"8a9136aa\"]"),
    a_manifest("a shape of 10,000 dimensions", sums("a", '{"nbytes": 1, "tensors": {"w": ["int8", [' + "1," * 9_999 + '1], "00000000"]}}'), "$.files['a'].tensors['w']: is no dtype, shape and CRC-32C, such as [\"float32\", [2, 8], \"8a9136aa\"]"),
    a_manifest("a negative dimension", sums("a", '{"nbytes": 1, "tensors": {"w": ["int8", [-4], "00000000"]}}'), "$.files['a'].tensors['w']: is no dtype, shape and CRC-32C, such as [\"float32\", [2, 8], \"8a9136aa\"]"),
    a_manifest("not UTF-8", b'{"\xff":1}', "is not JSON: 'utf-8' codec can't decode byte 0xff in position 2: invalid start byte"),
    a_manifest("a checkpoint", proto(), "is not JSON: Expecting value: line 2 column 1 (char 1)"),
    a_manifest("a file of 2 GB", sparse(b"{", 2 << 30), "has more than 268435456 bytes, which no manifest has"),
    *not_to_be_read(a_manifest),
    a_manifest("a directory", tree({"a": b""}), "is no regular file but a directory, a pipe or a device"),
    a_manifest("files that are not there", sums("rank_9/a.ckpt"), "is not what /item/bad.json says: 1 difference, in rank_9/a.ckpt", code=3),
    a_manifest("a huge size", sums("file.ckpt", '{"nbytes": 4611686018427387903, "tensors": {"w": ["int8", [4611686018427387903], "00000000"]}}'), "/sound/file.ckpt is not what /item/bad.json says: 1 difference, in file.ckpt", commands=MANIFEST[:1], code=3),
    a_manifest("tensors of other shapes", sums("file.ckpt", '{"nbytes": 21, "tensors": {"w": ["int8", [4611686018427387903], "00000000"], "\\u001b[2J\\nerror: no": ["int8", [], "00000000"]}}'), "/sound/file.ckpt is not what /item/bad.json says: 2 differences, in w, '\\x1b[2J\\nerror: no', in file.ckpt", commands=MANIFEST[:1], code=3),
]

FOLDERS = [
    a_folder("as it should be, in odd company", tree({"m.json": _LISTED, "a.ckpt": proto(), "loop": link("."), "b/c": link("../.."), "closed": lambda path: path.mkdir(0), "\x1b[2J\nerror: no.ckpt": fifo}), "", code=0),
    a_folder("a file that leads out", tree({"m.json": _LISTED, "a.ckpt": link("../outside/keep")}), "is not what /item/bad/m.json says: 1 difference, in a.ckpt"),
    a_folder("a file that leads to nothing outside", tree({"m.json": _LISTED, "a.ckpt": link("../outside/new")}), "is not what /item/bad/m.json says: 1 difference, in a.ckpt"),
    a_folder("a file that is a FIFO", tree({"m.json": _LISTED, "a.ckpt": fifo}), "is not what /item/bad/m.json says: 1 difference, in a.ckpt"),
    a_folder("a file that is a directory", tree({"m.json": _LISTED, "a.ckpt/b": b""}), "is not what /item/bad/m.json says: 1 difference, in a.ckpt"),
    a_folder("a file without permission", tree({"m.json": _LISTED, "a.ckpt": unreadable}), "is not what /item/bad/m.json says: 1 difference, in a.ckpt"),
    a_folder("a file of no format", tree({"m.json": _LISTED, "a.ckpt": b"x" * len(proto())}), "is not what /item/bad/m.json says: 1 difference, in a.ckpt"),
    a_folder("a file of other bytes", tree({"m.json": _LISTED, "a.ckpt": proto(content=b"efgh")}), "is not what /item/bad/m.json says: 1 difference, in w, in a.ckpt"),
    a_folder("an index of 2 GB of nothing", tree({"m.json": sums("a.json", '{"nbytes": 2147483648, "crc32c": "00000000"}'), "a.json": sparse(b"", 2 << 30)}), "is not what /item/bad/m.json says: 1 difference, in a.json", slow=True, seconds=60),
]

# fmt: on


def items() -> dict[str, list[Item]]:
    """All items, by the group that one child process runs."""
    return {
        "ckpt": CKPT, "safetensors": SAFETENSORS, "kinds": KINDS, "protobuf": PROTOBUF, "unfit": UNFIT, "json": JSON,
        "sets": SETS, "ranks": RANKS, "rules": RULES_FILES, "names": NAME_MAPS, "encrypted": ENCRYPTED, "named": NAMED, "targets": TARGETS,
        "plans": PLANS, "manifests": MANIFESTS, "folders": FOLDERS,
    }  # fmt: skip
