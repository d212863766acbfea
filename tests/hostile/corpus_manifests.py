"""Hostile manifests, and directories compared with a manifest."""

from __future__ import annotations

import json
from functools import partial

from item import Item, not_to_be_read
from makers import fifo, link, proto, repeated, sparse, sums, tree, unreadable

MANIFEST = ("verify {file} --manifest {bad}", "verify {ranks} --target-strategy {strategy} --manifest {bad}")

# fmt: off

a_manifest = partial(Item, commands=MANIFEST, file="bad.json")
a_folder = partial(Item, commands=("verify {bad} --manifest {bad}/m.json", "verify {bad} --manifest {bad}/m.json --json"), code=3, file="bad")
_LISTED = sums("a.ckpt", json.dumps({"nbytes": len(proto()), "crc32c": "daaea1cc", "tensors": {"w": ["int8", [4], "92c80a31"]}}))

MANIFESTS = [
    a_manifest("empty", b"", "not-json @ column 1"),
    a_manifest("deep JSON", b'{"a":' * 50_000, "bad-name-map|not-json"),
    a_manifest("a key twice", b'{"reshard_manifest": 2, "reshard_manifest": 2, "files": {}}', "duplicate-key"),
    a_manifest("a file twice", b'{"reshard_manifest": 2, "files": {"a": {"nbytes": 1, "crc32c": "00000000"}, "a": {"nbytes": 2, "crc32c": "00000000"}}}', "duplicate-key"),
    a_manifest("a million keys, one twice", repeated(b'{"a":1', b',"a":1', 1_000_000, b"}"), "not-a-manifest @ 'reshard_manifest'", commands=MANIFEST[:1]),
    a_manifest("a version to come", b'{"reshard_manifest": 3, "files": {}}', "unsupported-version @ expected 2"),
    a_manifest("a file above", sums("../file.ckpt"), "outside-directory @ 'rank_0/checkpoint_0.ckpt'"),
    a_manifest("a path with control characters", sums("\x1b[2J\nerror: no"), "outside-directory @ 'rank_0/checkpoint_0.ckpt'"),
    a_manifest("a path of 10,000 characters", sums("a" * 10_000), "name-too-long @ has 10000"),
    a_manifest("a name of 10,000 characters", sums("a", '{"nbytes": 1, "crc32c": "00000000", "tensors": {"' + "w" * 10_000 + '": ["int8", [4], "00000000"]}}'), "name-too-long @ $.files['a'].tensors['wwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwww]"),
    a_manifest("a path above, 300,000 times", repeated(b'{"reshard_manifest": 2, "files": {"../a": {}', b',"../a": {}', 300_000, b"}}"), "duplicate-key @ has 3", commands=MANIFEST[:1]),
    a_manifest("a size of 4,000 digits", sums("a", '{"nbytes": ' + "9" * 4000 + ', "crc32c": "00000000"}'), "bad-entry @ $.files['a']"),
    a_manifest("a negative size", sums("a", '{"nbytes": -1, "crc32c": "00000000"}'), "bad-entry @ $.files['a']"),
    a_manifest("a checksum of Arabic digits", sums("a", '{"nbytes": 1, "crc32c": "\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660"}'), "bad-entry @ $.files['a']"),
    a_manifest("an unknown dtype", sums("a", '{"nbytes": 1, "crc32c": "00000000", "tensors": {"w": ["int3", [4], "00000000"]}}'), "bad-tensor @ $.files['a'].tensors['w']"),
    a_manifest("a shape of 10,000 dimensions", sums("a", '{"nbytes": 1, "crc32c": "00000000", "tensors": {"w": ["int8", [' + "1," * 9_999 + '1], "00000000"]}}'), "bad-tensor @ $.files['a'].tensors['w']"),
    a_manifest("a negative dimension", sums("a", '{"nbytes": 1, "crc32c": "00000000", "tensors": {"w": ["int8", [-4], "00000000"]}}'), "bad-tensor @ $.files['a'].tensors['w']"),
    a_manifest("not UTF-8", b'{"\xff":1}', "not-json @ position 2"),
    a_manifest("a file of 2 GB", sparse(b"{", 2 << 30), "too-large @ than 268435456"),
    *not_to_be_read(a_manifest),
    a_manifest("a directory", tree({"a": b""}), "not-a-file"),
    a_manifest("files that are not there", sums("rank_9/a.ckpt"), "differs from item/bad.json: ", code=3),
    a_manifest("a huge size", sums("file.ckpt", '{"nbytes": 4611686018427387903, "crc32c": "00000000", "tensors": {"w": ["int8", [4611686018427387903], "00000000"]}}'), "valid/file.ckpt differs from item/bad.json: ", commands=MANIFEST[:1], code=3),
    a_manifest("tensors of other shapes", sums("file.ckpt", '{"nbytes": 21, "crc32c": "00000000", "tensors": {"w": ["int8", [4611686018427387903], "00000000"], "\\u001b[2J\\nerror: no": ["int8", [], "00000000"]}}'), "valid/file.ckpt differs from item/bad.json: ", commands=MANIFEST[:1], code=3),
]

FOLDERS = [
    a_folder("as it should be, in odd company", tree({"m.json": _LISTED, "a.ckpt": proto(), "loop": link("."), "b/c": link("../.."), "closed": lambda path: path.mkdir(0), "\x1b[2J\nerror: no.ckpt": fifo}), "", code=0),
    a_folder("a file that leads out", tree({"m.json": _LISTED, "a.ckpt": link("../outside/keep")}), "differs from item/bad/m.json: "),
    a_folder("a file that is a FIFO", tree({"m.json": _LISTED, "a.ckpt": fifo}), "differs from item/bad/m.json: "),
    a_folder("a file that is a directory", tree({"m.json": _LISTED, "a.ckpt/b": b""}), "differs from item/bad/m.json: "),
    a_folder("a file without permission", tree({"m.json": _LISTED, "a.ckpt": unreadable}), "differs from item/bad/m.json: "),
    a_folder("a file of no format", tree({"m.json": _LISTED, "a.ckpt": b"x" * len(proto())}), "differs from item/bad/m.json: "),
    a_folder("a file of other bytes", tree({"m.json": _LISTED, "a.ckpt": proto(content=b"efgh")}), "differs from item/bad/m.json: "),
    a_folder("an index of 2 GB of nothing", tree({"m.json": sums("a.json", '{"nbytes": 2147483648, "crc32c": "00000000"}'), "a.json": sparse(b"", 2 << 30)}), "differs from item/bad/m.json: ", slow=True, seconds=60),
]
