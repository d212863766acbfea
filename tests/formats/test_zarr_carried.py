"""What is not a tensor goes through a zarr store and back: files of a set, and objects of a distributed checkpoint."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
from checkpoints import tree
from commands import done
from refusals import failed
from safetensors.numpy import load_file, save_file

import reshard

if TYPE_CHECKING:
    from collections.abc import Callable

BESIDE = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": '{"é": 1}'.encode(),
    "README.md": b"# A model\n",
    "merges.txt": b"\x00\xff not text",
}
SHARDS = [{f"layers.{shard}.{name}": np.full((8, 8), shard, np.float32) for name in "abc"} for shard in range(4)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A set of four files, as transformers writes it."""
    root = tmp_path / "src"
    root.mkdir()
    places = {}
    for number, tensors in enumerate(SHARDS, 1):
        name = f"model-{number:05d}-of-00004.safetensors"
        save_file(tensors, root / name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": 12 * 256}, "weight_map": places}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, content in BESIDE.items():
        (root / name).write_bytes(content)
    return root


def shards(root: Path) -> list[list[str]]:
    return [sorted(load_file(path)) for path in sorted(root.glob("*.safetensors"))]


def beside(root: Path) -> dict[str, bytes]:
    return {name: content for name, content in tree(root).items() if name in BESIDE}


@pytest.mark.parametrize("words", [[], ["--compression=zstd"], ["--chunk-size=128B"]])
def test_a_set_comes_back_as_it_was(source: Path, tmp_path: Path, words: list[str]) -> None:
    store = tmp_path / "store.zarr"
    done("convert", source, store, *words)
    done("convert", store, tmp_path / "back", "--to=hf")
    assert beside(tmp_path / "back") == BESIDE
    assert shards(tmp_path / "back") == shards(source) == [sorted(tensors) for tensors in SHARDS]
    done("convert", store, tmp_path / "one", "--to=hf", "--max-shard-size=1GB")
    assert shards(tmp_path / "one") == [sorted(name for tensors in SHARDS for name in tensors)]
    assert sorted(reshard.open(store)) == sorted(name for tensors in SHARDS for name in tensors)
    done("verify", store)
    done("verify", tmp_path / "back", "--against", source)


def test_a_cast_is_in_the_configuration_that_is_carried(source: Path, tmp_path: Path) -> None:
    (source / "config.json").write_text('{"torch_dtype": "float32"}')
    done("convert", source, tmp_path / "store.zarr", "--cast", "float32=bfloat16")
    done("convert", tmp_path / "store.zarr", tmp_path / "back", "--to=hf")
    assert json.loads((tmp_path / "back/config.json").read_text()) == {"torch_dtype": "bfloat16"}


def test_zarr_reads_the_store_without_a_warning(source: Path, tmp_path: Path) -> None:
    done("convert", source, tmp_path / "store.zarr")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        members = dict(zarr.open_group(tmp_path / "store.zarr", mode="r").members())
    carried = members.pop("%carried")
    assert isinstance(carried, zarr.Array)
    assert bytes(np.asarray(carried[:])) == b"".join(BESIDE[name] for name in sorted(BESIDE))
    assert sorted(members) == sorted(name for tensors in SHARDS for name in tensors)


def test_a_store_of_nothing_else_has_no_such_array(tmp_path: Path) -> None:
    save_file(SHARDS[0], tmp_path / "a.safetensors")
    done("convert", tmp_path / "a.safetensors", tmp_path / "store.zarr")
    assert not (tmp_path / "store.zarr/%carried").exists()


def test_a_tensor_may_have_its_name(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    save_file({"%carried": SHARDS[0]["layers.0.a"]}, tmp_path / "src/model.safetensors")
    (tmp_path / "src/config.json").write_bytes(BESIDE["config.json"])
    done("convert", tmp_path / "src", tmp_path / "store.zarr")
    done("convert", tmp_path / "store.zarr", tmp_path / "back", "--to=hf")
    assert shards(tmp_path / "back") == [["%carried"]]
    assert beside(tmp_path / "back") == {"config.json": BESIDE["config.json"]}


@pytest.mark.parametrize("lie", [
    {"files": {"config.json": 5}}, {"files": {"config.json": -1}}, {"files": []}, {"objects": {"a": True}},
    {"beside": {"evil.json": 0}}, {"paths": []}, {"paths": {"a": []}}, {"paths": {"a": [1.5]}},
    {"shard_size": -1}, {"shard_size": "4"}, {"more": {}},
])  # fmt: skip
def test_a_store_that_lies_is_refused(source: Path, tmp_path: Path, lie: dict[str, Any]) -> None:
    done("convert", source, tmp_path / "store.zarr")
    path = tmp_path / "store.zarr/%carried/zarr.json"
    content = json.loads(path.read_text())
    content["attributes"]["reshard"]["carried"] |= lie
    path.write_text(json.dumps(content))
    failed(4, "bad-metadata", "inspect", tmp_path / "store.zarr", places=("%carried",))


def test_no_name_leads_out_of_the_target(source: Path, tmp_path: Path) -> None:
    done("convert", source, tmp_path / "store.zarr")
    path = tmp_path / "store.zarr/%carried/zarr.json"
    text = path.read_text()
    for name in ("../evil.json", "sub/evil.json", ".evil.json", "model.safetensors.index.json", "evil.so"):
        path.write_text(text.replace('"tokenizer.json"', json.dumps(name)))
        done("convert", tmp_path / "store.zarr", tmp_path / "deep/back", "--to=hf", "--overwrite")
        assert "tokenizer.json" not in tree(tmp_path / "deep/back")
        assert not [place for place in tree(tmp_path) if "evil" in place]


@pytest.fixture
def root(mindspore_data: Path) -> Callable[[str], Path]:
    return lambda name: mindspore_data / "dcp" / name / "checkpoint"


@pytest.mark.parametrize("name", ["fsdp2_uneven", "kinds", "mcore_tp2_pp2"])
def test_objects_of_a_distributed_checkpoint_come_back(root: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    before = reshard.open(root(name))._record.extras
    done("convert", root(name), tmp_path / "store.zarr")
    done("convert", tmp_path / "store.zarr", tmp_path / "back", "--to=dcp")
    after = reshard.open(tmp_path / "back")._record.extras
    assert before.objects.keys() == after.objects.keys()
    for key, item in before.objects.items():
        written = after.objects[key]
        with Path(item.path).open("rb") as old, Path(written.path).open("rb") as new:
            old.seek(item.begin)
            new.seek(written.begin)
            assert old.read(item.nbytes) == new.read(written.nbytes)
    for key in before.beside:
        assert (tmp_path / "back" / key).read_bytes() == (root(name) / key).read_bytes()
    assert after.paths == before.paths
    assert after.bound == before.bound


def test_renamed_objects_are_stored_under_their_new_names(root: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text('{"optim.*": "opt.*"}')
    done("convert", root("fsdp2_uneven"), tmp_path / "store.zarr", "--name-map", tmp_path / "map.json")
    objects = reshard.open(tmp_path / "store.zarr")._record.extras.objects
    assert {name.partition(".")[0] for name in objects if "param_groups" in name} == {"opt"}


@pytest.mark.parametrize("to", ["hf", "orbax", "safetensors"])
def test_what_is_lost_is_said(root: Callable[[str], Path], source: Path, tmp_path: Path, to: str) -> None:
    said = done("convert", root("fsdp2_uneven"), tmp_path / "out", "--to", to).output
    assert "warning: optim.param_groups.0.lr, " in said
    said = done("convert", source, tmp_path / "other", "--to", to).output
    assert ("left out: README.md, " in said) == (to != "hf")
