"""Hostile checkpoint files: `.ckpt`, safetensors, encrypted ones, what is not a regular file, and odd names."""

from __future__ import annotations

import json
from functools import partial

from item import FILE, Item
from makers import TENSORS, W, block, field, fifo, link, proto, repeated, sparse, st, tensor, unreadable, varint

ODD = (
    "inspect {bad}",
    "inspect {bad} --json",
    "inspect {set} --layout *=whole",
    "convert {bad} {out} --to hf --dry-run",
    "convert --to=mindspore {bad} {out}",
    "convert {bad} {out} --to hf",
    "convert {bad} {out}/a.ckpt --to ckpt",
    "convert {bad} {out}/a.safetensors --to safetensors",
    ".open {bad}",
    ".convert_file {bad} {out}",
)
KEYED = (".open_with_key {bad}", ".load_with_key {bad}")
WHOLE = ("inspect {bad}", "convert {bad} {out} --to hf", "convert --to=mindspore {bad} {out}", ".open {bad}")
ONE_FILE = tuple(command for command in FILE if "{set}" not in command)
HEAVY = ("inspect {bad}", "convert {bad} {out} --to hf", ".open_rank {bad}")  # where every command takes a while

# fmt: off

CKPT = [
    Item("empty value", field(1, b""), "not-a-checkpoint @ with 0a"),
    Item("cut in the contents", W[:-1], "truncated @ 20 bytes of 21"),
    Item("cut in a varint", W + b"\x0a\x80", "truncated @ byte 22"),
    Item("a byte too many", W + b"\0", "truncated @ byte 22"),
    Item("another file behind", W + b"PK\x03\x04", "unknown-field @ field 10"),
    Item("a varint that does not end", b"\x0a" + b"\xff" * 64, "truncated @ byte 1"),
    Item("a length of 2^64 - 1", b"\x0a" + varint((1 << 64) - 1), "truncated @ of 18446744073709551626"),
    Item("a tensor longer than its message", field(1, field(1, b"w") + b"\x12\x7f\x08\x04"), "truncated @ of 134"),
    Item("a negative dim", proto(dims=[-1]), "unreadable-tensor @ [-1]"),
    Item("dims whose product overflows", proto(dims=[1 << 62, 1 << 62]), "unreadable-tensor @ [4611686018427387904, 4611686018427387904]"),
    Item("a million dims", field(1, field(1, b"w") + field(2, field(1, b"\x01" * 1_000_000))), "unreadable-tensor"),
    Item("sizes that lie", proto(dims=[5]), "unreadable-tensor @ tensor 'w'"),
    Item("dims [0] of several elements", proto(dims=[0]), "unreadable-tensor @ tensor 'w'"),
    Item("no name", proto(name=b""), "not-a-checkpoint @ byte 20"),
    Item("a name that is not UTF-8", proto(name=b"\xff\xfe"), "bad-name @ byte 4"),
    Item("a name with half of a surrogate pair", proto(name=b"w\xed\xa0\x80"), "bad-name @ byte 4"),
    Item("a name of 5,000 bytes", proto(name=b"w" * 5000), "name-too-long @ most 4096"),
    Item("an unknown dtype", proto(kind=b"Float8"), "unreadable-tensor @ tensor 'w'"),
    Item("a dtype with an escape sequence", proto(kind=b"\x1b[2J"), "unreadable-tensor @ tensor 'w'"),
    Item("no tensor", field(1, field(1, b"w")), "not-a-checkpoint @ byte 5"),
    Item("two names in a value", field(1, field(1, b"w") + field(1, b"v") + field(2, b"")), "unknown-field @ field 1"),
    Item("an unknown field in a value", field(1, W[2:] + field(9, 1)), "unknown-field @ byte 21"),
    Item("an unknown field", W + field(2, 1), "unknown-field @ byte 21"),
    Item("groups in groups", W + b"\x0b" * 100_000, "corrupt @ byte 21"),
    Item("messages in messages", b"".join([b"\x0a" + varint(300_000 - 4 * n) for n in range(50_000)]).ljust(300_004, b"\0"), "name-too-long @ of 299996"),
    Item("a name twice", W + proto(b"v") + W, "duplicate-name @ tensor 'w'"),
    Item("parts out of order", proto(dims=[8]) + proto(b"v") + proto(dims=[8]), "duplicate-name @ tensor 'w'"),
    Item("parts of two dtypes", proto(dims=[8]) + proto(dims=[8], kind=b"UInt8"), "corrupt @ tensor 'w'"),
    Item("one part too few", proto(dims=[12]) * 2, "unreadable-tensor @ tensor 'w'"),
    Item("20,000 empty parts", repeated(b"", proto(content=b""), 20_000), "unreadable-tensor @ tensor 'w'", HEAVY),
    Item("text that is not UTF-32", proto(kind=b"str", dims=[0], content=b"abc"), "unreadable-tensor @ tensor 'w'"),
    Item("text of 20 MB", lambda path: path.write_bytes(proto(kind=b"str", dims=[0], content=bytes(20_000_000))) and None, "unreadable-tensor @ most 16777216"),
    Item("a trailer in the middle", W + b"crc_num" + bytes(10) + W, "corrupt @ byte 21"),
    Item("only a map parameter", field(1, field(1, b"table") + field(3, b"")), "unreadable-tensor @ 'table'", WHOLE),
    Item("a tensor that is a map too", field(1, W[2:] + field(3, b"")), "corrupt @ 'w'"),
    Item("10 GB and nothing in it", sparse(b"\x0a", 10 << 30), "not-a-checkpoint @ byte 2"),
    Item("10 GB in one field", sparse(b"\x0a" + varint((10 << 30) - 6), 10 << 30), "unknown-field @ field 0"),
    Item("encrypted: a head truncated", b"\xd8\x5e\x3a\x7f" + b"\0" * 10, "encrypted"),
]

SAFETENSORS = [
    Item("empty", b"", "empty-file", file="bad.safetensors"),
    Item("only a length", bytes(8), "not-a-checkpoint @ with 00"),
    Item("a header of 2^63 bytes", st(TENSORS, length=1 << 63), "not-a-checkpoint @ with 00"),
    Item("a header longer than the file", st(TENSORS, b"abcd", length=500), "truncated @ has 72"),
    Item("a header of 1 GB in a sparse file", sparse(st(TENSORS, length=1 << 30), 2 << 30), "corrupt @ 1073741824 bytes"),
    Item("a header of 90 MB of nothing", sparse(st(TENSORS, length=90_000_000), 2 << 30), "not-json @ UTF-8", HEAVY),
    Item("a header that is not JSON", st(b"{]"), "not-json @ UTF-8"),
    Item("a header that is not UTF-8", st(b'{"\xff":1}'), "not-json @ UTF-8"),
    Item("a name with half of a surrogate pair", st({"w\ud800": tensor(0, 4)}, b"abcd"), "bad-name @ 'w\\ud800'"),
    Item("surrogates in UTF-8", st(b'{"__metadata__":{"a":"\xed\xa0\x80"},"w":{"dtype":"I8","shape":[0],"data_offsets":[0,0]}}'), "not-json @ UTF-8"),
    Item("notes with half of a surrogate pair", st({"__metadata__": {"a": "\ud800"}, **TENSORS}, b"abcd"), "bad-metadata @ UTF-8"),
    Item("text with half of a surrogate pair", st({"__metadata__": {"reshard.str": '{"a": "\\ud800"}'}, **TENSORS}, b"abcd"), "bad-metadata @ 'reshard.str'"),
    Item("text in text in text", st({"__metadata__": {"reshard.str": '{"a":' * 50_000}}), "bad-metadata @ 'reshard.str'"),
    Item("deep JSON", st(b'{"a":' * 50_000), "not-json @ UTF-8"),
    Item("a number of 5,000 digits", st(b'{"w":{"dtype":"I8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}', b"abcd"), "not-json @ UTF-8"),
    Item("NaN in a shape", st(b'{"w":{"dtype":"I8","shape":[NaN],"data_offsets":[0,4]}}', b"abcd"), "bad-header @ tensor 'w'"),
    Item("NaN in the notes", st(b'{"__metadata__":{"a":NaN}}'), "bad-metadata @ UTF-8"),
    Item("a negative dim", st({"w": tensor(0, 4, [-4])}, b"abcd"), "bad-header @ tensor 'w'"),
    Item("a shape whose product overflows", st({"w": tensor(0, 4, [1 << 62, 1 << 62])}, b"abcd"), "unreadable-tensor @ [4611686018427387904, 4611686018427387904]"),
    Item("no elements of huge extents", st({"w": tensor(0, 0, [1 << 62, 1 << 62, 0])}), "unreadable-tensor @ [4611686018427387904"),
    Item("65 dims", st({"w": tensor(0, 1, [1] * 65)}, b"a"), "unreadable-tensor"),
    Item("a million dims", lambda path: path.write_bytes(st({"w": tensor(0, 4, [300] * 1_000_000)}, b"abcd")) and None, "unreadable-tensor", HEAVY),
    Item("an unknown dtype", st({"w": tensor(0, 4, dtype="F3")}, b"abcd"), "unreadable-tensor @ tensor 'w'"),
    Item("a dtype with an escape sequence", st({"w": tensor(0, 4, dtype="\x1b[2J\n")}, b"abcd"), "unreadable-tensor @ '\\x1b[2J\\n'"),
    Item("a name of 1 MB", st({"w" * 1_000_000: tensor(0, 4)}, b"abcd"), "name-too-long @ of 1000000"),
    Item("offsets that overlap", st({"v": tensor(0, 4), "w": tensor(2, 6)}, b"abcdef"), "bad-offsets @ tensor 'w'"),
    Item("offsets with a gap", st({"v": tensor(0, 2), "w": tensor(4, 6)}, b"abcdef"), "bad-offsets @ tensor 'w'"),
    Item("offsets that end before they begin", st({"w": tensor(4, 0, [4])}, b"abcd"), "bad-offsets @ tensor 'w'"),
    Item("offsets behind the file", st({"w": tensor(0, 5)}, b"abcd"), "truncated @ of 73"),
    Item("offsets of 2^64", st({"w": tensor(1 << 64, (1 << 64) + 4, [4])}, b"abcd"), "bad-header @ tensor 'w'"),
    Item("bytes behind the tensors", st(TENSORS, b"abcde"), "trailing-bytes @ describes 72"),
    Item("nothing at all", st({}), "no-tensors", WHOLE),
    Item("a name twice", st(b'{"w":{"dtype":"I8","shape":[2],"data_offsets":[0,2]},"w":{"dtype":"I8","shape":[2],"data_offsets":[2,4]}}', b"abcd"), "duplicate-name @ 'w'"),
    Item("a dtype twice", st(b'{"w":{"dtype":"I8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', b"abcd"), "duplicate-name @ 'dtype'"),
    Item("notes twice", st(b'{"__metadata__":{"a":"b"},"__metadata__":{"a":"c"}}'), "duplicate-name @ '__metadata__'"),
    Item("a tensor that is a list", st({"w": [1]}), "bad-header @ tensor 'w'"),
    Item("a tensor and text of one name", st({"__metadata__": {"reshard.str": '{"w": ""}'}, **TENSORS}, b"abcd"), "duplicate-name @ 'w'"),
    Item("4 MB of empty lists", lambda path: path.write_bytes(st(b'{"w":[' + b"[]," * 1_300_000 + b"[]]}")) and None, "bad-header @ tensor 'w'", HEAVY),
    Item("a zip archive", b"PK\x03\x04" + bytes(60), "truncated|unsupported-format|not-a-checkpoint"),
    Item("a pickle", b"\x80\x02cos\nsystem\n(S'echo pwned'\ntR.", "not-a-checkpoint @ with 80"),
]

KINDS = [
    Item("a FIFO", fifo, "not-a-file", ONE_FILE),
    Item("a device that does not end", link("/dev/zero"), "not-a-file", ONE_FILE),
    Item("a link to itself", link("bad.ckpt"), "cannot-read", ONE_FILE[:-2]),
    Item("a link to nothing", link("nowhere"), "not-found", ONE_FILE[:-2]),
    Item("a file without permission", unreadable, "cannot-read"),
]

encrypted = partial(Item, commands=KEYED)

ENCRYPTED = [
    encrypted("not encrypted", W, "not-encrypted"),
    encrypted("a head truncated", block(b"x" * 32)[:20], "corrupt @ byte 0"),
    encrypted("a block of 2^31 - 1 bytes", block(b"", length=(1 << 31) - 1), "corrupt @ byte 0"),
    encrypted("a block of -1 bytes", block(b"x" * 32, length=-1), "corrupt @ byte 0"),
    encrypted("an IV of 2^31 - 1 bytes", block(b"x" * 32, iv=(1 << 31) - 1), "corrupt @ byte 0"),
    encrypted("a tag that is wrong", block(b"x" * 32), "wrong-key"),
    Item("a block of 2 GB that is not there", sparse(block(b"", length=(1 << 31) - 100), (1 << 31) - 100 + 48), "wrong-key", KEYED, slow=True, seconds=60),
    encrypted("another mode", block(b"x" * 32, magic=0x7F3A5ED9), "wrong-mode"),
    encrypted("an unknown mode behind a block", block(b"x" * 32) + block(b"x" * 32, magic=1), "corrupt @ byte 80"),
    Item("100,000 blocks of a byte", repeated(b"", block(b"x"), 100_000), "wrong-key", KEYED, slow=True, seconds=60),
]

# Names that are odd and valid.
_ODD = ["../x", "/etc/x", "..", ".", " ", "a\nerror: no", "\x1b[2J", "<script>", "\u202e", "\x7f", "{w}", "%s", "w" * 4096, "1." * 2000, "." * 4000]

NAMED = [
    Item("odd names in a .ckpt file", b"".join(proto(name.encode()) for name in _ODD), "", ODD, 0),
    Item("odd names in a safetensors file", st({name: tensor(4 * n, 4 * n + 4) for n, name in enumerate(_ODD)}, b"abcd" * len(_ODD)), "", ODD, 0),
    Item("odd texts", st({"__metadata__": {"reshard.str": json.dumps({name: name for name in _ODD}), "\x1b[2J": "\nerror: no"}, "w": tensor(0, 4)}, b"abcd"), "", ODD, 0),
    Item("5,000 names next to one of 4,096 bytes", b"".join(proto(f"{n:x}-{n % 7:x}{n:o}g".encode()) for n in range(5000)) + proto(b"w" * 4096), "", ("inspect {bad}",), 0),
    Item("a million tensors in a .ckpt file", lambda path: path.write_bytes(b"".join(proto(b"%d" % n) for n in range(1_000_000))) and None, "", ("inspect {bad}", ".open {bad}"), 0, slow=True, headroom=1_500_000_000, seconds=200),
    Item("a million tensors in a safetensors file", lambda path: path.write_bytes(st({f"{n}": tensor(n, n + 1) for n in range(1_000_000)}, bytes(1_000_000))) and None, "", ("inspect {bad}", ".open {bad}"), 0, slow=True, headroom=2_500_000_000, seconds=200),
]
