"""Hostile target directories: links that lead out, and what is in the way of a run."""

from __future__ import annotations

from functools import partial

from item import Item
from makers import fifo, link, repeated, sparse, tree, unreadable

# fmt: off

_TO_RANKS = "convert {ranks} {out} --source-strategy {strategy} --target-strategy {strategy}"
_TO_FILE = "convert {file} {out}/a.ckpt --to ckpt"
_LOG = ".reshard/00000001-0123abcd.jsonl"
_FILE = b'"file":"rank_0/checkpoint_0.ckpt"'
_BEGUN = b'{"reshard":1}\n{' + _FILE + b',"digest":"a","size":21}\n'

_SUMMED = f"{_TO_RANKS} --write-manifest {{out}}/m.json"
a_target = partial(Item, commands=(_TO_RANKS, f"{_TO_RANKS} --overwrite", _SUMMED), code=6, file="out")

TARGETS = [
    Item("a prefix that leads out", tree({}), "bad-name", (f"{_TO_RANKS} --prefix ../x", f"{_TO_RANKS} --prefix ../../outside/x", f"{_TO_RANKS} --prefix /x", f"{_TO_RANKS} --prefix x/y", ".transform_with_prefix {ranks} {out} {strategy} ../x"), 2, "out"),
    Item("a prefix with an escape sequence", tree({}), "bad-name @ '\\x1b[2J'", (f"{_TO_RANKS} --prefix \x1b[2J",), 2, "out"),
    Item("a prefix of 300 characters", tree({}), "cannot-write", (f"{_TO_RANKS} --prefix {'x' * 300}",), 6, "out"),
    a_target("a rank directory that leads out", tree({"rank_0": link("../outside")}), "outside-directory @ checkpoint_0.ckpt"),
    a_target("a rank directory that is a link to itself", tree({"rank_0": link("rank_0")}), "not-a-directory @ rank_0"),
    a_target("a rank directory that is a file", tree({"rank_0": b""}), "not-a-directory @ rank_0"),
    a_target("a file that leads out", tree({"rank_0/checkpoint_0.ckpt": link("../../outside/keep")}), "outside-directory @ checkpoint_0.ckpt"),
    a_target("an unfinished file that leads out", tree({"rank_0/checkpoint_0.ckpt.partial": link("../../outside/keep")}), "", code=0),  # it is not a run's, and stays
    a_target("another run's unfinished file that leads out", tree({"rank_0/checkpoint_0.ckpt.0123abcd.partial": link("../../outside/keep")}), "", code=0),
    a_target("logs that lead out", tree({".reshard": link("../outside")}), "is-link"),
    a_target("logs that are a file", tree({".reshard": b""}), "cannot-write"),
    a_target("logs without permission", tree({".reshard": lambda path: path.mkdir(0)}), "cannot-write", commands=(_TO_RANKS, _SUMMED)),
    a_target("logs without permission, to be replaced", tree({".reshard": lambda path: path.mkdir(0)}), "unreadable-ledger", commands=(f"{_TO_RANKS} --overwrite",)),
    a_target("a lock that leads out", tree({".reshard/lock": link("../../outside/keep")}), "is-link"),
    a_target("a lock that is a FIFO", tree({".reshard/lock": fifo}), "", code=0),
    a_target("a lock without permission", tree({".reshard/lock": unreadable}), "cannot-write"),
    a_target("a log that leads out", tree({_LOG: link("../../outside/keep")}), "", code=0),
    a_target("a log that is a FIFO", tree({_LOG: fifo}), "", code=0),
    a_target("a log that is a directory", tree({_LOG + "/x": b""}), "", code=0),
    a_target("a log without permission", tree({_LOG: unreadable}), "unreadable-ledger"),
    a_target("a log of 2 GB of nothing", tree({_LOG: sparse(b"", 2 << 30)}), "", code=0),
    a_target("a log of a line of 300 MB", tree({_LOG: repeated(_BEGUN + b'{' + _FILE + b',"wrote":[', b"[0,1,1],", 40_000_000)}), "", code=0, slow=True),
    a_target("a log of ten million ranges", tree({_LOG: repeated(_BEGUN, b'{' + _FILE + b',"wrote":[[0,1,1],[1,1,1],[2,1,1],[3,1,1]]}\n', 2_500_000)}), "", code=0, seconds=30, slow=True),
    a_target("a log of two million empty lines", tree({_LOG: repeated(_BEGUN, b"{}\n", 2_000_000)}), "", code=0, seconds=30, slow=True),
    a_target("a log of deep JSON", tree({_LOG: b"[" * 100_000}), "", code=0),
    a_target("a log that is not UTF-8", tree({_LOG: _BEGUN + b"\xff\xfe"}), "", code=0),
    a_target("a log of a version to come", tree({_LOG: b'{"reshard":2}\n{' + _FILE + b',"digest":"a","size":21}\n'}), "", code=0),
    a_target("a log of huge numbers", tree({_LOG: _BEGUN + b'{' + _FILE + b',"wrote":[[' + b"9" * 4000 + b',1,1],[0,1e308,1]]}\n{' + _FILE + b',"ready":[' + b"9" * 4000 + b",1]}\n"}), "", code=0),
    a_target("an unfinished file of another program", tree({_LOG: _BEGUN, "rank_0/checkpoint_0.ckpt.partial": b"x"}), "", commands=(_TO_RANKS,), code=0),
    a_target("an unfinished file of another run", tree({_LOG: _BEGUN, "rank_0/checkpoint_0.ckpt.0123abcd.partial": b"x"}), "other-run @ checkpoint_0.ckpt", commands=(_TO_RANKS,)),
    a_target("a finished file, says its log", tree({_LOG: _BEGUN + b'{' + _FILE + b',"ready":[2,0]}\n', "rank_0/checkpoint_0.ckpt": b"xy"}), "already-exists @ checkpoint_0.ckpt", commands=(_TO_RANKS, f"{_TO_RANKS} --restart")),
    a_target("other logs", tree({".reshard/\x1b[2J\nerror: no.jsonl": b"x", ".reshard/a": link("/dev/zero")}), "", code=0),
    Item("a part of a set that leads out", tree({"part0.safetensors": link("../outside/keep")}), "outside-directory @ part0.safetensors", ("convert --to=mindspore {ranks} {out} --source-strategy {strategy} --overwrite",), 6, "out"),
    Item("a converted file that leads out", tree({"a.ckpt": link("../outside/keep")}), "outside-directory", (_TO_FILE, f"{_TO_FILE} --overwrite"), 6, "out"),
    Item("a strategy's unfinished file that leads out", tree({"s.ckpt.partial": link("../outside/keep")}), "", ("strategy merge {strategies} -o {out}/s.ckpt", "strategy make {rules} --like {file} -o {out}/s.ckpt"), 0, "out"),
    Item("a strategy file that leads out", tree({"s.ckpt": link("../outside/keep")}), "", ("strategy merge {strategies} -o {out}/s.ckpt --overwrite",), 0, "out"),
    a_target("a manifest that leads out", tree({"m.json": link("../outside/keep")}), "already-exists", commands=(_SUMMED,)),
    a_target("a manifest that leads out and is replaced", tree({"m.json": link("../outside/keep")}), "", commands=(f"{_SUMMED} --overwrite",), code=0),
    a_target("a manifest that is a FIFO", tree({"m.json": fifo}), "not-a-file", commands=(f"{_SUMMED} --overwrite",)),
    a_target("a manifest that is a directory", tree({"m.json/a": b""}), "not-a-file", commands=(_SUMMED, f"{_SUMMED} --overwrite")),
    a_target("an unfinished manifest that leads out", tree({"m.json.partial": link("../outside/keep")}), "", commands=(_SUMMED,), code=0),
    a_target("a target that is a file", b"", "not-a-directory"),
    a_target("a target that is a link to itself", link("out"), "not-a-directory"),
    a_target("a target without permission", lambda path: path.mkdir(0o500), "cannot-write"),
]
