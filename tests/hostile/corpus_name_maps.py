"""Hostile maps of names."""

from __future__ import annotations

from functools import partial

from item import Item, not_to_be_read
from makers import sparse

NAMES = ("convert {file} {out} --name-map {bad}", "convert --to=mindspore {file} {out} --name-map {bad}")

# fmt: off

a_map = partial(Item, commands=NAMES, code=2, file="bad.json")

NAME_MAPS = [
    a_map("deep JSON", b'{"a":' * 50_000, "bad-name-map|not-json"),
    a_map("a name twice", b'{"w": "a", "w": "b"}', "bad-name-map @ name 'w'"),
    a_map("a number for a name", b'{"w": 1}', "bad-name-map @ name 'w'"),
    a_map("half of a surrogate pair", b'{"w": "\\ud800"}', "bad-name-map @ name 'w'"),
    a_map("not UTF-8", b'{"w": "\xff"}', "bad-name-map|not-json"),
    a_map("a list", b"[]", "bad-name-map"),
    a_map("a file of 2 GB", sparse(b"{", 2 << 30), "too-large @ than 67108864"),
    *not_to_be_read(a_map),
]
