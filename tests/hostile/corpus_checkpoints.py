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
HEAVY = ("inspect {bad}", "transform {bad} {out}", ".open_rank {bad}")  # where every command takes a while

# fmt: off

CKPT = [
    Item("empty value", field(1, b""), "is of no known checkpoint format (it begins with 0a 00); expected safetensors or MindSpore .ckpt"),
    Item("cut in the contents", W[:-1], "byte 0: a field of 19 bytes is expected; 18 are left (truncated?)"),
    Item("cut in a varint", W + b"\x0a\x80", "byte 22: a number does not end (truncated or corrupt)"),
    Item("cut in the name", W[:4], "byte 0: a field of 19 bytes is expected; 2 are left (truncated?)"),
    Item("a byte too many", W + b"\0", "byte 22: a number does not end (truncated or corrupt)"),
    Item("another file behind", W + b"PK\x03\x04", "byte 21: field 10 is none that a checkpoint has, or stands there twice; corrupt, or of a MindSpore newer than this program"),
    Item("a varint that does not end", b"\x0a" + b"\xff" * 64, "byte 1: a number does not end (truncated or corrupt)"),
    Item("a length of 2^63", b"\x0a" + varint(1 << 63), "byte 0: a field of 9223372036854775808 bytes is expected; 0 are left (truncated?)"),
    Item("a length of 2^64 - 1", b"\x0a" + varint((1 << 64) - 1), "byte 0: a field of 18446744073709551615 bytes is expected; 0 are left (truncated?)"),
    Item("a tensor longer than its message", field(1, field(1, b"w") + b"\x12\x7f\x08\x04"), "byte 5: a field of 127 bytes is expected; 2 are left (truncated?)"),
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
    Item("two tensors in a value", field(1, W[2:] + W[5:]), "byte 21: field 2 is none that a tensor of a checkpoint has, or stands there twice; corrupt, or of a MindSpore newer than this program"),
    Item("an unknown field in a value", field(1, W[2:] + field(9, 1)), "byte 21: field 9 is none that a tensor of a checkpoint has, or stands there twice; corrupt, or of a MindSpore newer than this program"),
    Item("an unknown field in a tensor", field(1, field(1, b"w") + field(2, field(9, 1) + field(1, 4) + field(2, b"Int8") + field(3, b"abcd"))), "byte 7: field 9 is none that a tensor of a checkpoint has, or stands there twice; corrupt, or of a MindSpore newer than this program"),
    Item("an unknown field", W + field(2, 1), "byte 21: field 2 is none that a checkpoint has, or stands there twice; corrupt, or of a MindSpore newer than this program"),
    Item("a group", W + b"\x0b\x0c", "byte 21: 0xb begins no field; not a MindSpore checkpoint, or corrupt"),
    Item("groups in groups", W + b"\x0b" * 100_000, "byte 21: 0xb begins no field; not a MindSpore checkpoint, or corrupt"),
    Item("messages in messages", b"".join([b"\x0a" + varint(300_000 - 4 * n) for n in range(50_000)]).ljust(300_004, b"\0"), "byte 8: a name of 299996 bytes; at most 4096 are taken"),
    Item("a name twice", W + proto(b"v") + W, "tensor 'w' is there a second time, at byte 42"),
    Item("parts out of order", proto(dims=[8]) + proto(b"v") + proto(dims=[8]), "tensor 'w' is there a second time, at byte 42"),
    Item("parts of two shapes", proto(dims=[8]) + proto(dims=[4, 2]), "tensor 'w' goes on at byte 23 as int8 [4, 2]; it began as int8 [8]"),
    Item("parts of two dtypes", proto(dims=[8]) + proto(dims=[8], kind=b"UInt8"), "tensor 'w' goes on at byte 23 as uint8 [8]; it began as int8 [8]"),
    Item("one part too many", proto(dims=[8]) * 3, "tensor 'w' has 12 bytes; int8 [8] has 8"),
    Item("one part too few", proto(dims=[12]) * 2, "tensor 'w' has 8 bytes; int8 [12] has 12"),
    Item("20,000 empty parts", repeated(b"", proto(content=b""), 20_000), "tensor 'w' has 0 bytes; int8 [4] has 4", HEAVY),
    Item("text that is not UTF-32", proto(kind=b"str", dims=[0], content=b"abc"), "text entry 'w' is not UTF-32: truncated data"),
    Item("text with half of a surrogate pair", proto(kind=b"str", dims=[0], content=b"\0\xd8\0\0"), "text entry 'w' is not UTF-32: code point in surrogate code point range(0xd800, 0xe000)"),
    Item("text of 20 MB", lambda path: path.write_bytes(proto(kind=b"str", dims=[0], content=bytes(20_000_000))) and None, "text entry 'w' has 20000000 bytes; at most 16777216 are taken"),
    Item("a trailer in the middle", W + b"crc_num" + bytes(10) + W, "byte 21: 0x63 begins no field; not a MindSpore checkpoint, or corrupt"),
    Item("a trailer truncated", W + b"crc_num" + bytes(9), "byte 21: 0x63 begins no field; not a MindSpore checkpoint, or corrupt"),
    Item("only a map parameter", field(1, field(1, b"table") + field(3, b"")), "holds no tensor; was saving it interrupted?", WHOLE),
    Item("a tensor that is a map too", field(1, W[2:] + field(3, b"")), "'w' is both a tensor and a map parameter; corrupt"),
    Item("a thousand fields in a value", field(1, field(15, 1) * 1000), "byte 3: field 15 is none that a tensor of a checkpoint has, or stands there twice; corrupt, or of a MindSpore newer than this program"),
    Item("10 GB and nothing in it", sparse(b"\x0a", 10 << 30), "the message that ends at byte 2 has no name; not a MindSpore checkpoint"),
    Item("10 GB in one field", sparse(b"\x0a" + varint((10 << 30) - 6), 10 << 30), "byte 6: field 0 is none that a tensor of a checkpoint has, or stands there twice; corrupt, or of a MindSpore newer than this program"),
    Item("encrypted: a head truncated", b"\xd8\x5e\x3a\x7f" + b"\0" * 10, "is encrypted (AES-GCM); open it with its key: "),
    Item("encrypted: a block longer than the file", b"\xd9\x5e\x3a\x7f" + b"\xff\xff\xff\x7f" * 8, "is encrypted (AES-CBC); open it with its key: "),
]

SAFETENSORS = [
    Item("empty", b"", "is empty; a checkpoint was expected (was saving it interrupted?)", file="bad.safetensors"),
    Item("only a length", bytes(8), "is of no known checkpoint format (it begins with 00 00 00 00 00 00 00 00); expected safetensors or MindSpore .ckpt"),
    Item("a header of 2^63 bytes", st(TENSORS, length=1 << 63), "is of no known checkpoint format (it begins with 00 00 00 00 00 00 00 80); expected safetensors or MindSpore .ckpt"),
    Item("a header of 2^64 - 1 bytes", st(TENSORS, length=(1 << 64) - 1), "is of no known checkpoint format (it begins with ff ff ff ff ff ff ff ff); expected safetensors or MindSpore .ckpt"),
    Item("a header longer than the file", st(TENSORS, b"abcd", length=500), "its header is said to be 500 bytes long; the file has 72 (and headers may have 100000000); it is truncated or corrupt"),
    Item("a header of 1 GB in a sparse file", sparse(st(TENSORS, length=1 << 30), 2 << 30), "its header is said to be 1073741824 bytes long; the file has 2147483648 (and headers may have 100000000); it is truncated or corrupt"),
    Item("a header of 90 MB of nothing", sparse(st(TENSORS, length=90_000_000), 2 << 30), "its header is not JSON in UTF-8:", HEAVY),
    Item("a header that ends in the data", st(TENSORS, b"abcd", length=len(json.dumps(TENSORS)) + 2), "its header is not JSON in UTF-8:"),
    Item("a header that is not JSON", st(b"{]"), "its header is not JSON in UTF-8:"),
    Item("a header in UTF-16", st("{}".encode("utf-16-le")), "its header is not JSON in UTF-8:"),
    Item("a header that is not UTF-8", st(b'{"\xff":1}'), "its header is not JSON in UTF-8:"),
    Item("a name with half of a surrogate pair", st({"w\ud800": tensor(0, 4)}, b"abcd"), "tensor 'w\\ud800': has half of a surrogate pair in its name, which is not UTF-8"),
    Item("surrogates in UTF-8", st(b'{"__metadata__":{"a":"\xed\xa0\x80"},"w":{"dtype":"I8","shape":[0],"data_offsets":[0,0]}}'), "its header is not JSON in UTF-8:"),
    Item("notes with half of a surrogate pair", st({"__metadata__": {"a": "\ud800"}, **TENSORS}, b"abcd"), "its __metadata__ is not an object of strings in UTF-8"),
    Item("text with half of a surrogate pair", st({"__metadata__": {"reshard.str": '{"a": "\\ud800"}'}, **TENSORS}, b"abcd"), "its __metadata__['reshard.str'] is not a JSON object of strings"),
    Item("text in text in text", st({"__metadata__": {"reshard.str": '{"a":' * 50_000}}), "its __metadata__['reshard.str'] is not a JSON object of strings"),
    Item("deep JSON", st(b'{"a":' * 50_000), "its header is not JSON in UTF-8: it is nested too deeply"),
    Item("deep lists", st(b'{"w":' + b"[" * 100_000), "its header is not JSON in UTF-8: it is nested too deeply"),
    Item("a number of 5,000 digits", st(b'{"w":{"dtype":"I8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}', b"abcd"), "its header is not JSON in UTF-8: it has a number of thousands of digits"),
    Item("two numbers of 4,000 digits", st(b'{"w":{"dtype":"I8","shape":[' + b"9" * 4000 + b"," + b"9" * 4000 + b'],"data_offsets":[0,4]}}', b"abcd"), "tensor 'w': has no valid dtype, shape and data_offsets in the header"),
    Item("an offset of 4,000 digits", st(b'{"w":{"dtype":"I8","shape":[4],"data_offsets":[0,' + b"9" * 4000 + b']}}', b"abcd"), "tensor 'w': has no valid dtype, shape and data_offsets in the header"),
    Item("NaN in a shape", st(b'{"w":{"dtype":"I8","shape":[NaN],"data_offsets":[0,4]}}', b"abcd"), "tensor 'w': has no valid dtype, shape and data_offsets in the header"),
    Item("Infinity in an offset", st(b'{"w":{"dtype":"I8","shape":[4],"data_offsets":[0,Infinity]}}', b"abcd"), "tensor 'w': has no valid dtype, shape and data_offsets in the header"),
    Item("NaN in the notes", st(b'{"__metadata__":{"a":NaN}}'), "its __metadata__ is not an object of strings in UTF-8"),
    Item("a negative dim", st({"w": tensor(0, 4, [-4])}, b"abcd"), "tensor 'w': has no valid dtype, shape and data_offsets in the header"),
    Item("two negative dims", st({"w": tensor(0, 4, [-2, -2])}, b"abcd"), "tensor 'w': has no valid dtype, shape and data_offsets in the header"),
    Item("a shape whose product overflows", st({"w": tensor(0, 4, [1 << 62, 1 << 62])}, b"abcd"), "tensor 'w': has the shape [4611686018427387904, 4611686018427387904], which no array can have"),
    Item("a product that is 4 modulo 2^64", st({"w": tensor(0, 4, [(1 << 62) + 1, 4])}, b"abcd"), "tensor 'w': has the shape [4611686018427387905, 4], which no array can have"),
    Item("no elements of huge extents", st({"w": tensor(0, 0, [1 << 62, 1 << 62, 0])}), "tensor 'w': has the shape [4611686018427387904, 4611686018427387904, 0], which no array can have"),
    Item("an extent of 2^63", st({"w": tensor(0, 0, [1 << 63, 0])}), "tensor 'w': has no valid dtype, shape and data_offsets in the header"),
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
    Item("offsets of 2^64", st({"w": tensor(1 << 64, (1 << 64) + 4, [4])}, b"abcd"), "tensor 'w': has no valid dtype, shape and data_offsets in the header"),
    Item("bytes behind the tensors", st(TENSORS, b"abcde"), "end: the file has 73 bytes; its header describes 72"),
    Item("bytes and no tensor", st({}, b"abcde"), "end: the file has 15 bytes; its header describes 10"),
    Item("nothing at all", st({}), "holds no tensor; was saving it interrupted?", WHOLE),
    Item("a name twice", st(b'{"w":{"dtype":"I8","shape":[2],"data_offsets":[0,2]},"w":{"dtype":"I8","shape":[2],"data_offsets":[2,4]}}', b"abcd"), "'w': stands twice in one object of the header"),
    Item("a name twice, without bytes", st(b'{"w":{"dtype":"I8","shape":[0],"data_offsets":[0,0]},"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'), "'w': stands twice in one object of the header"),
    Item("a dtype twice", st(b'{"w":{"dtype":"I8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', b"abcd"), "'dtype': stands twice in one object of the header"),
    Item("notes twice", st(b'{"__metadata__":{"a":"b"},"__metadata__":{"a":"c"}}'), "'__metadata__': stands twice in one object of the header"),
    Item("notes that are not text", st({"__metadata__": {"a": 1}}), "its __metadata__ is not an object of strings in UTF-8"),
    Item("a tensor that is a list", st({"w": [1]}), "tensor 'w': has no valid dtype, shape and data_offsets in the header"),
    Item("a tensor and text of one name", st({"__metadata__": {"reshard.str": '{"w": ""}'}, **TENSORS}, b"abcd"), "'w' is both a tensor and a text entry of its __metadata__"),
    Item("4 MB of empty lists", lambda path: path.write_bytes(st(b'{"w":[' + b"[]," * 1_300_000 + b"[]]}")) and None, "tensor 'w': has no valid dtype, shape and data_offsets in the header", HEAVY),
    Item("a zip archive", b"PK\x03\x04" + bytes(60), "is of no known checkpoint format (it begins with 50 4b 03 04 00 00 00 00); expected safetensors or MindSpore .ckpt"),
    Item("a pickle", b"\x80\x02cos\nsystem\n(S'echo pwned'\ntR.", "is of no known checkpoint format (it begins with 80 02 63 6f 73 0a 73 79); expected safetensors or MindSpore .ckpt"),
]

KINDS = [
    Item("a FIFO", fifo, "is not a regular file but a directory, a pipe or a device", ONE_FILE),
    Item("a device that does not end", link("/dev/zero"), "is not a regular file but a directory, a pipe or a device", ONE_FILE),
    Item("a link to itself", link("bad.ckpt"), "cannot be read: Too many levels of symbolic links", ONE_FILE[:-2]),
    Item("a link to nothing", link("nowhere"), "cannot be read: No such file or directory", ONE_FILE[:-2]),
    Item("a file without permission", unreadable, "cannot be read: Permission denied"),
]

encrypted = partial(Item, commands=KEYED)

ENCRYPTED = [
    encrypted("not encrypted", W, "is not encrypted; leave the key out"),
    encrypted("a head truncated", block(b"x" * 32)[:20], "byte 0: no encrypted block; truncated or corrupt"),
    encrypted("contents truncated", block(b"x" * 32)[:-1], "byte 0: no encrypted block; truncated or corrupt"),
    encrypted("a block of 2^31 - 1 bytes", block(b"", length=(1 << 31) - 1), "byte 0: no encrypted block; truncated or corrupt"),
    encrypted("a block of -1 bytes", block(b"x" * 32, length=-1), "byte 0: no encrypted block; truncated or corrupt"),
    encrypted("a block of no bytes", block(b""), "byte 0: no encrypted block; truncated or corrupt"),
    encrypted("an IV of 2^31 - 1 bytes", block(b"x" * 32, iv=(1 << 31) - 1), "byte 0: no encrypted block; truncated or corrupt"),
    encrypted("a tag that is wrong", block(b"x" * 32), "cannot be decrypted with this key; it is wrong, or the file was changed"),
    Item("a block of 2 GB that is not there", sparse(block(b"", length=(1 << 31) - 100), (1 << 31) - 100 + 48), "cannot be decrypted with this key; it is wrong, or the file was changed", KEYED, slow=True, seconds=60),
    encrypted("another mode", block(b"x" * 32, magic=0x7F3A5ED9), "is encrypted in mode AES-CBC; the mode given is AES-GCM"),
    encrypted("an unknown mode behind a block", block(b"x" * 32) + block(b"x" * 32, magic=1), "byte 80: no encrypted block; truncated or corrupt"),
    Item("100,000 blocks of a byte", repeated(b"", block(b"x"), 100_000), "cannot be decrypted with this key; it is wrong, or the file was changed", KEYED, slow=True, seconds=60),
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
    Item("20,000 tensors in a .ckpt file", lambda path: path.write_bytes(b"".join(proto(b"%d" % n) for n in range(20_000))) and None, "", ("inspect {bad}",), 0, slow=True),
]
