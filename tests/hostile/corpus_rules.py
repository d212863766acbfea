"""Hostile rules files."""

from __future__ import annotations

from functools import partial

from item import Item, not_to_be_read
from makers import sparse

RULES = ("strategy make {bad} --like {file} -o {out}",)

# fmt: off

_LAUGHS = b"a: &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n".encode() for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)

rules = partial(Item, commands=RULES, code=2, file="bad.yaml")

RULES_FILES = [
    rules("a billion laughs", b"mesh: {mp: 2}\nrules: {w: [mp]}\n" + _LAUGHS, "not-yaml @ line 4"),
    rules("a list in itself", b"mesh: &a [*a]\nrules: {}\n", "not-yaml @ line 1"),
    rules("a Python object", b"mesh: !!python/object/apply:os.system ['echo pwned']\n", "not-yaml @ line 1"),
    rules("an unknown tag", b"mesh: !exec x\n", "not-yaml @ '!exec'"),
    rules("a tag that does not fit", b"mesh: !!int ''\n", "not-yaml"),
    rules("deep lists", b"mesh: " + b"[" * 50_000, "too-deep"),
    rules("two documents", b"mesh: {mp: 2}\n---\nrules: {}\n", "not-yaml @ line 2"),
    rules("not UTF-8", b"mesh: \xff\n", "not-yaml @ x00ff"),
    rules("a list for a key", b"? [a]\n: b\n", "not-yaml @ line 1"),
    rules("a huge number", b"mesh: {mp: 0x" + b"f" * 5000 + b"}\nrules: {w: [mp]}\n", "not-yaml @ of 5002"),
    rules("a large number", b"mesh: {mp: 0x" + b"f" * 1500 + b"}\nrules: {w: [mp]}\n", "out-of-range @ is 151347058230423707251341006732939195542348235662207750883638"),
    rules("no devices", b"mesh: {mp: 0}\nrules: {w: [mp]}\n", "out-of-range @ $.mesh.mp"),
    rules("an axis twice", b"mesh: {mp: 2}\nrules: {w: [[mp, mp]]}\n", "repeated-axis @ $.rules['w'][0]"),
    rules("a stage of one billion", b"mesh: {mp: 2}\nrules: {w: [mp]}\npipeline: {w: 1000000000}\n", "bad-stage @ $.pipeline['w']"),
    rules("a million devices of an operator", b"devices: 1000000\noperators: {w: {matmul: [[1000000, 1], [1, 1]]}}\n", "out-of-range @ $.operators['w']"),
    rules("operators of huge numbers", b"devices: 8\noperators: {w: {matmul: [[0x" + b"f" * 1500 + b", 1], [1, 0x" + b"f" * 1500 + b"]]}}\n", "out-of-range @ to 131072"),
    rules("a key twice", b"mesh: {mp: 2}\nmesh: {mp: 4}\nrules: {}\n", "duplicate-key @ line 2"),
    rules("empty", b"", "wrong-type"),
    rules("a file of 2 GB", sparse(b"mesh: {}", 2 << 30), "too-large @ than 1048576"),
    *not_to_be_read(rules),
]
