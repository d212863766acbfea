"""Sets of whole tensors in files of `torch.save`, as Hugging Face's `pytorch_model`: all of a set, or an error."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import assert_equal, numbers, write_file
from refusals import failed, refused
from saves_files import Made, Storage, tensor, write_save

import reshard
from reshard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FULL = numbers({"model.embed.weight": (6, 4), "model.h.0.w": (4, 4), "model.norm": (5,), "lm_head.weight": (6, 4)})
FIRST, LAST = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
INDEX = "pytorch_model.bin.index.json"


def write_set(root: Path, files: tuple[str, ...] = (FIRST, LAST), index: str = INDEX) -> Path:
    """Write a set of two files, with its index if that has a name."""
    weight_map = {name: files[number // 2] for number, name in enumerate(FULL)}
    for file in files:
        write_save(root / file, {name: tensor(FULL[name]) for name in FULL if weight_map[name] == file})
    if index:
        (root / index).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return root


@pytest.mark.parametrize(
    ("files", "index"),
    [
        ((FIRST, LAST), INDEX),
        ((FIRST, LAST), ""),
        (
            ("diffusion_pytorch_model.fp16-00001-of-00002.bin", "diffusion_pytorch_model.fp16-00002-of-00002.bin"),
            "diffusion_pytorch_model.bin.index.fp16.json",
        ),
        (("model-00001-of-00002.pt", "model-00002-of-00002.pt"), ""),
        (("00001-of-00002.pth", "00002-of-00002.pth"), "model.pth.index.json"),
        (("first.bin", "last.bin"), INDEX),
    ],
)
def test_a_set_is_its_whole_tensors(tmp_path: Path, files: tuple[str, ...], index: str) -> None:
    write_set(tmp_path, files, index)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "training_args.bin").write_bytes(b"another program's")
    source = reshard.open(tmp_path)
    assert_equal(source, FULL)
    assert not source.warnings
    assert not source.unreadable
    assert set(source.ranks) == {0}
    for file in files:
        with refused(SourceError, "one-of-several", file):
            reshard.open(tmp_path / file)


def test_tied_tensors_and_objects_of_a_file(tmp_path: Path) -> None:
    storage = Storage(FULL["lm_head.weight"].reshape(-1))
    tied = tensor(FULL["lm_head.weight"], storage=storage)
    write_save(tmp_path / FIRST, {"a": tied, "b": tied, "note": "x"})
    write_save(tmp_path / LAST, {"c": tensor(FULL["model.norm"]), "odd": Made("Mine", tied, module="mine")})
    source = reshard.open(tmp_path)
    assert_equal(source, {"a": FULL["lm_head.weight"], "b": FULL["lm_head.weight"], "c": FULL["model.norm"]})
    assert set(source.unreadable) == {"odd"}
    assert set(source._record.extras.objects) == {"note"}


def test_beside_files_that_are_preferred(tmp_path: Path) -> None:
    """As most models on the hub have both."""
    write_set(tmp_path)
    write_file(tmp_path / "model.safetensors", {"x": np.zeros(2, np.float32)})
    assert set(reshard.open(tmp_path)) == {"x"}
    with refused(SourceError, "one-of-several"):
        reshard.open(tmp_path / FIRST)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"x": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(reshard.open(tmp_path)) == {"x"}
    for path in tmp_path.glob("model*"):
        path.unlink()
    assert_equal(reshard.open(tmp_path), FULL)


def test_a_strategy_is_not_for_whole_tensors(tmp_path: Path) -> None:
    with refused(reshard.UsageError, "self-described", tmp_path):
        reshard.open(write_set(tmp_path), layout={"*": "split:0"})


# --- sets that are not complete, or two ---


def mapped(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Changes the map of the index."""

    def spoil(root: Path) -> None:
        content = json.loads((root / INDEX).read_text())
        change(content["weight_map"])
        (root / INDEX).write_text(json.dumps(content))

    return spoil


def without_index(then: Callable[[Path], object]) -> Callable[[Path], None]:
    def spoil(root: Path) -> None:
        (root / INDEX).unlink()
        then(root)

    return spoil


def copied(name: str) -> Callable[[Path], object]:
    return lambda root: shutil.copy(root / LAST, root / name)


BROKEN: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a file that is missing": (lambda root: (root / LAST).unlink(), "not-found", LAST),
    "a name outside": (mapped(lambda of: of.update(x="../x.bin")), "bad-name", "../x.bin"),
    "an absolute name": (mapped(lambda of: of.update(x="/etc/x.bin")), "bad-name", "/etc/x.bin"),
    "no name": (mapped(lambda of: of.update(x="")), "bad-name", "''"),
    "a number for a name": (mapped(lambda of: of.update(x=7)), "bad-index", INDEX),
    "a tensor in another file": (
        mapped(lambda of: of.update({"lm_head.weight": FIRST})), "missing-tensor", "lm_head.weight",
    ),
    "a tensor in no file": (mapped(lambda of: of.update(x=FIRST)), "missing-tensor", "'x'"),
    "shards that no tensor names": (mapped(lambda of: [*map(of.pop, list(of)[2:])]), "missing-shards", "00002"),
    "a file of another set": (copied("other-00003-of-00003.bin"), "several-checkpoints", "other-00003-of-00003.bin"),
    "two indexes": (lambda root: shutil.copy(root / INDEX, root / "x.bin.index.json"), "several-checkpoints", "x.bin"),
    "an index that is no JSON": (lambda root: (root / INDEX).write_text("{"), "not-json", INDEX),
    "an index of a list": (lambda root: (root / INDEX).write_text("[]"), "bad-index", INDEX),
    "a tensor twice in the index": (
        lambda root: (root / INDEX).write_text('{"weight_map": {"a": "x", "a": "y"}}'), "duplicate-name", "'a'",
    ),
    "a tensor in two files": (
        lambda root: write_save(root / FIRST, {name: tensor(array) for name, array in FULL.items()}),
        "duplicate-name", "lm_head.weight",
    ),
    "no index, and a file that is missing": (
        without_index(lambda root: (root / FIRST).unlink()), "missing-shards", "1 of 2",
    ),
    "no index, and two sets": (
        without_index(copied("other-00001-of-00002.bin")), "several-checkpoints", "other-00001-of-00002.bin",
    ),
    "no index, and a number beyond": (
        without_index(copied("pytorch_model-00003-of-00002.bin")), "several-checkpoints", "00003-of-00002",
    ),
    "no index, and a number twice": (
        without_index(copied("pytorch_model-000002-of-00002.bin")), "several-checkpoints", "pytorch_model-000002",
    ),
    "no index, and the same tensors twice": (
        without_index(lambda root: shutil.copy(root / FIRST, root / LAST)), "duplicate-name", "model.embed.weight",
    ),
    "no index, and shards without end": (
        without_index(
            lambda root: [(root / FIRST).rename(root / "model-00001-of-999999999.bin"), (root / LAST).unlink()]
        ),
        "missing-shards", "of 999999999",
    ),
    "a file that is damaged": (lambda root: (root / LAST).write_bytes(b"GIF89a"), "corrupt", LAST),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_set_that_is_not_whole(tmp_path: Path, name: str) -> None:
    spoil, code, place = BROKEN[name]
    root = write_set(tmp_path / "src")
    spoil(root)
    with refused(SourceError, code, place):
        reshard.open(root)
    failed(4, code, "convert", "--to=mindspore", root, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()
