"""Dtypes narrower than a byte, and tensors that cannot be read beside others that can."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import safetensors
from commands import done
from format_files import message, st_file
from refusals import failed, refused

import reshard
from reshard import Layout, Rules, Strategy, mindspore

if TYPE_CHECKING:
    from pathlib import Path

Stored = dict[str, tuple[str, list[int], bytes]]
"""Tensors as safetensors' own dtype and shape, and their bytes."""

F4: Stored = {"w": ("F4", [4, 16], bytes(range(32))), "norm": ("F32", [1], b"abcd")}
F6: Stored = {"six": ("F6_E2M3", [4, 8], bytes(range(24))), "sex": ("F6_E3M2", [2, 4], b"abcdef")}
OTHERS: Stored = {"scale": ("F8_E8M0", [4, 1], b"abcd"), "c": ("C64", [1], bytes(8))}
GOOD: Stored = {"norm": ("F32", [1], b"abcd")}

UNREADABLE: Stored = {
    "dtype": ("F3", [4], b"abc"),
    "size": ("F32", [4, 4], bytes(60)),
    "row": ("F4", [2, 1], b"a"),
    "shape": ("U8", [1 << 62, 1 << 62, 0], b""),
}
"""Tensors that no reader can make anything of; the library alone reads rows of half a byte."""


def saved(path: Path, stored: Stored) -> Path:
    header, body = {}, b""
    for name, (dtype, shape, content) in stored.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(content)]}
        body += content
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(st_file(header, body))
    return path


def by_library(path: Path) -> Stored:
    """Read a file, or the single file of a set, with the library."""
    (file,) = [path] if path.is_file() else path.glob("*.safetensors")
    tensors = safetensors.deserialize(file.read_bytes())
    return {name: (each["dtype"], each["shape"], bytes(each["data"])) for name, each in tensors}


def test_bits_and_shapes_stay_as_the_library_reads_them(tmp_path: Path) -> None:
    source = saved(tmp_path / "m.safetensors", F4 | F6 | OTHERS)
    done("convert", source, tmp_path / "store.zarr", "--to", "zarr")
    done("convert", tmp_path / "store.zarr", tmp_path / "set", "--to", "hf")
    assert by_library(tmp_path / "set") == by_library(source) == F4 | F6 | OTHERS
    assert "every bit" in done("verify", tmp_path / "set").stdout
    totals = {row["dtype"]: row["parameters"] for row in json.loads(done("inspect", source, "--json").stdout)["totals"]}
    assert (totals["float4_e2m1fn_x2"], totals["float6_e2m3fn_bytes"]) == (64, 32)


def test_a_dcp_has_the_first_and_not_the_others(tmp_path: Path) -> None:
    source = saved(tmp_path / "m.safetensors", F4 | F6)
    failed(2, "unsupported-dtype", "convert", source, tmp_path / "dcp", "--to", "dcp", places=("six",))
    done("convert", source, tmp_path / "dcp", "--to", "dcp", "--exclude", "s?x")
    assert b"float4_e2m1fn_x2" in (tmp_path / "dcp" / ".metadata").read_bytes()
    assert F4["w"][2] in (tmp_path / "dcp" / "__0_0.distcp").read_bytes()
    done("convert", tmp_path / "dcp", tmp_path / "set", "--to", "hf")
    assert by_library(tmp_path / "set") == F4
    failed(2, "unsupported-dtype", "convert", source, tmp_path / "x.ckpt", places=("w",))


def test_cuts_are_between_values(tmp_path: Path) -> None:
    source = reshard.open(saved(tmp_path / "m.safetensors", {"w": F4["w"], "six": F6["six"]}))
    rows, thirds = Layout.of([2], [0, -1]), Layout.of([3], [-1, 0])
    reshard.plan(source, Strategy.of({"w": rows, "six": rows})).run(tmp_path / "ranks")
    halves = [by_library(tmp_path / "ranks" / f"rank_{rank}") for rank in (0, 1)]
    assert [half["w"][:2] for half in halves] == [("F4", [2, 16])] * 2
    assert b"".join(half["w"][2] for half in halves) == F4["w"][2]
    assert b"".join(half["six"][2] for half in halves) == F6["six"][2]
    with refused(reshard.UsageError, "not-divisible", "six"):
        reshard.plan(source, Strategy.of({"six": thirds, "w": Layout.of([3], [-1, -1])}))


def test_such_values_are_not_computed_with(tmp_path: Path) -> None:
    source = saved(tmp_path / "m.safetensors", F4)
    for dtypes in ("float4_e2m1fn_x2=uint8", "f4=bf16", "float32=f4"):
        failed(2, "unsupported-cast", "convert", source, tmp_path / "out", "--cast", dtypes)
    failed(4, "not-averageable", "average", source, source, tmp_path / "out")
    assert "w: is float4_e2m1fn_x2" in done("stats", source).stdout
    rules = [{"a": ["x", "y"], "b": {"concat": "w"}}, {"a": "norm", "b": "norm"}]
    with refused(reshard.ReshardError, "unsupported-dtype", "w"):
        reshard.open(source).derive(Rules.of({"reshard-rules": 1, "sides": ["a", "b"], "rules": rules}))


@pytest.mark.parametrize("name", UNREADABLE)
def test_one_tensor_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    source = saved(tmp_path / "m.safetensors", GOOD | {name: UNREADABLE[name]})
    assert name in done("inspect", source).stdout
    failed(4, "unreadable-tensor", "convert", source, tmp_path / "out", "--to", "hf", places=(name, "--drop"))
    for number, choice in enumerate((("--drop", name), ("--include", "norm"), ("--exclude", name))):
        done("convert", source, tmp_path / f"{number}", "--to", "hf", *choice)
        assert by_library(tmp_path / f"{number}") == GOOD
    failed(4, "unreadable-tensor", "inspect", saved(tmp_path / "alone.safetensors", {name: UNREADABLE[name]}))


def test_a_shard_without_anything_to_read(tmp_path: Path) -> None:
    names = ("norm", "dtype")
    files = {name: f"model-0000{number}-of-00002.safetensors" for number, name in enumerate(names, 1)}
    for name, file in files.items():
        saved(tmp_path / "set" / file, {name: (GOOD | UNREADABLE)[name]})
    (tmp_path / "set" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert "dtype" in done("inspect", tmp_path / "set").stdout
    done("convert", tmp_path / "set", tmp_path / "out", "--drop", "dtype")
    assert by_library(tmp_path / "out") == GOOD


@pytest.mark.parametrize(
    "bad",
    [("Int7", [1], b"a"), ("Int32", [3], b"abcd"), ("Int8", [1] * 65, b"a"), ("str", [0], b"abc")],
    ids=["dtype", "size", "shape", "text"],
)
def test_one_tensor_of_a_ckpt_that_cannot_be_read(tmp_path: Path, bad: tuple[str, list[int], bytes]) -> None:
    source = tmp_path / "m.ckpt"
    source.write_bytes(message("norm", "Float32", [1], b"abcd") + message("bad", *bad))
    assert "bad" in done("inspect", source).stdout
    failed(4, "unreadable-tensor", "convert", source, tmp_path / "out", "--to", "hf", places=("bad",))
    with refused(reshard.SourceError, "unreadable-tensor", "bad"):
        mindspore.load_checkpoint(str(source))
    with refused(reshard.SourceError, "unreadable-tensor", "bad"):
        mindspore.ckpt_to_safetensors(str(source), str(tmp_path))
    assert set(mindspore.load_checkpoint(str(source), specify_prefix="norm")) == {"norm"}
    done("convert", source, tmp_path / "out", "--to", "hf", "--drop", "bad")
    assert by_library(tmp_path / "out") == GOOD


def test_a_tensor_named_to_drop_is_left_out(tmp_path: Path) -> None:
    """Without a target strategy; a glob says only what the target may lack."""
    source = saved(tmp_path / "m.safetensors", F4)
    done("convert", source, tmp_path / "out", "--to", "hf", "--drop", "w", "--drop", "*")
    assert by_library(tmp_path / "out") == GOOD
    assert "every bit" in done("verify", tmp_path / "out").stdout
