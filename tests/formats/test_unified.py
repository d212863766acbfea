"""Unified sets: whole tensors in a few files with an index, in both styles, written and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import helpers
import numpy as np
import pytest
from checkpoints import Array, numbers, plan_with, tree, write_file, write_ranks
from refusals import failed, refused
from safetensors import safe_open
from safetensors.numpy import load_file

import reshard
from reshard import Layout, Selection, Strategy
from reshard.core.plan import budget
from reshard.errors import SourceError, UsageError
from reshard.formats.sets.options import HuggingFaceSet, MindSporeSet

if TYPE_CHECKING:
    from faulty import Faults

ROWS, COLUMNS = Layout.of([4], [0, -1]), Layout.of([4], [-1, 0])
SHAPES = {"a": (8, 8), "b": (16, 8), "c": (4, 4), "moments.a": (8, 8)}
FULL = numbers(SHAPES)
SOURCE = Strategy.of(dict.fromkeys(SHAPES, ROWS))
ALSO: dict[str, Array | str] = {"global_step": np.array(7, np.int32), "run": "größe"}
STYLES = {"mindspore": MindSporeSet, "huggingface": HuggingFaceSet}
INDEXES = {"mindspore": "param_name_map.json", "huggingface": "model.safetensors.index.json"}


@pytest.fixture
def source(tmp_path: Path) -> reshard.Checkpoint:
    return reshard.open(write_ranks(tmp_path / "src", FULL, SOURCE, also=ALSO), strategy=SOURCE)


def unified(source: reshard.Checkpoint, root: Path, style: str, size: int, **options: object) -> Path:
    plan_with(source, format="safetensors", files=STYLES[style](size), **options).run(root)  # type: ignore[arg-type]
    return root


def index_of(root: Path, style: str) -> dict[str, str]:
    found: dict[str, str] = json.loads((root / INDEXES[style]).read_text())["weight_map"]
    return found


def library_reads(root: Path) -> dict[str, Array]:
    return {name: value for path in root.glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("size", [1, 300, 600, 4_000_000_000])
def test_it_is_whole_to_the_library_and_to_us(
    source: reshard.Checkpoint, tmp_path: Path, style: str, size: int
) -> None:
    root = unified(source, tmp_path / "set", style, size)
    found = library_reads(root)
    assert set(found) == {*FULL, "global_step"}
    assert all(np.array_equal(found[name], value) for name, value in FULL.items())
    for name, file in index_of(root, style).items():
        with safe_open(root / file, "np") as opened:
            assert name in opened.keys()  # noqa: SIM118 -- the library's object is not a mapping
    again = reshard.open(root)
    assert all(np.array_equal(again[name].compute(), value) for name, value in FULL.items())
    assert again.tensors["run"].text == "größe"


def test_names_in_mindspores_style(source: reshard.Checkpoint, tmp_path: Path) -> None:
    root = unified(source, tmp_path / "set", "mindspore", 600)
    assert sorted(tree(root)) == ["hyper_param.safetensors", "param_name_map.json", "part0.safetensors",
                                  "part1.safetensors"]  # fmt: skip
    assert set(index_of(root, "mindspore")) == set(FULL)
    assert set(load_file(root / "hyper_param.safetensors")) == {"global_step"}
    assert json.loads((root / "param_name_map.json").read_text())["metadata"] == {
        "total_size": 1088, "hyper_param": "hyper_param.safetensors"
    }  # fmt: skip


def test_hyper_parameters_that_are_lost(source: reshard.Checkpoint, tmp_path: Path) -> None:
    """MindSpore's map does not name them, so that a set without them was taken for whole: no step, no texts."""
    root = unified(source, tmp_path / "set", "mindspore", 600)
    (root / "hyper_param.safetensors").unlink()
    for words in (["convert", root, tmp_path / "out"], ["inspect", root], ["verify", root]):
        failed(4, "not-found", *words, places=("param_name_map.json", "file 'hyper_param.safetensors'"))
    index = root / "param_name_map.json"
    index.write_text(index.read_text().replace("hyper_param.safetensors", "../x"))
    with refused(SourceError, "bad-value", "metadata.hyper_param", "'../x'", "hyper_param.safetensors"):
        reshard.open(root)


def test_a_set_without_hyper_parameters_names_none(source: reshard.Checkpoint, tmp_path: Path) -> None:
    root = tmp_path / "set"
    unified(source, root, "mindspore", 600, selection=Selection(include=tuple(FULL)))
    assert json.loads((root / "param_name_map.json").read_text())["metadata"].keys() == {"total_size"}
    assert set(reshard.open(root)) == set(FULL)


def test_names_in_hugging_faces_style(source: reshard.Checkpoint, tmp_path: Path) -> None:
    root = unified(source, tmp_path / "set", "huggingface", 600)
    files = sorted(path.name for path in root.glob("*.safetensors"))
    assert files == [f"model-{k:05d}-of-{len(files):05d}.safetensors" for k in range(1, len(files) + 1)]
    index = json.loads((root / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {*FULL, "global_step"}
    assert index["metadata"]["total_size"] == 1088 + 4
    for file in files:
        with safe_open(root / file, "np") as opened:
            assert opened.metadata()["format"] == "pt"  # transformers refuses "ms"


def test_the_index_gets_its_name_last(source: reshard.Checkpoint, tmp_path: Path, faults: Faults) -> None:
    for style, index in INDEXES.items():
        faults.clear()
        unified(source, tmp_path / style, style, 300)
        named = [Path(call.path).name for call in faults.of("publish")]
        assert len(named) > 3
        assert named[-1] == index


def test_a_file_larger_than_all_buffers_is_written_in_bands(
    tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 KB in one file, by threads that may hold 4 KB each."""
    full = numbers({"w": (256, 256)})
    strategy = Strategy.of({"w": COLUMNS})
    source = reshard.open(write_ranks(tmp_path / "src", full, strategy), strategy=strategy)
    monkeypatch.setattr(budget, "BAND_BYTES", 4096)
    faults.clear()
    root = unified(source, tmp_path / "set", "mindspore", 1 << 30)
    largest = [call.nbytes for call in faults.of("read_into")]
    assert max(largest) <= 4096
    assert sum(largest) == full["w"].nbytes
    assert np.array_equal(load_file(root / "part0.safetensors")["w"], full["w"])


# --- against MindSpore's own ---


@pytest.mark.parametrize("case", ["basic_1", "bf16_1", "pipe_1", "pipeopt_3"])
def test_mindspores_sets_are_read_and_ours_have_its_names(mindspore_data: Path, tmp_path: Path, case: str) -> None:
    folder = mindspore_data / "cases" / case
    theirs = folder / "unified"
    full = helpers.load_full(folder)
    opened = reshard.open(theirs)
    assert {name for name in full if name in opened} == set(opened) & set(full)
    meta = helpers.load_meta(folder)
    # Where MindSpore's call differs from the reference, its file does; those tensors are told in the case.
    wrong = {
        item if isinstance(item, str) else item[0]
        for call in meta["calls"]
        if call.get("out") == "unified"
        for item in call.get("differs_from_reference") or []
    }
    for name, value in full.items():
        if name in opened and not any(name in item for item in wrong):
            assert opened[name].compute().tobytes() == value.tobytes(), name
    strategies = sorted(folder.glob("src_strategy*"))
    strategy = reshard.read_strategy(strategies[0])
    ours = unified(reshard.open(folder / "src_ckpt", strategy=strategy), tmp_path / "set", "mindspore", 4_000_000_000)
    index = json.loads((ours / "param_name_map.json").read_text())
    reference = json.loads((theirs / "param_name_map.json").read_text())
    assert set(index["weight_map"]) >= set(reference["weight_map"])
    assert set(index["weight_map"].values()) == set(reference["weight_map"].values())
    assert set(load_file(ours / "hyper_param.safetensors")) >= set(load_file(theirs / "hyper_param.safetensors"))


# --- what is refused ---


def a_set(root: Path, weight_map: object, style: str = "huggingface") -> Path:
    write_file(root / "x.safetensors", {"a": FULL["a"]})
    write_file(root / "y.safetensors", {"b": FULL["b"]})
    (root / INDEXES[style]).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return root


def test_an_index_by_hand_is_read(tmp_path: Path) -> None:
    root = a_set(tmp_path, {"a": "x.safetensors", "b": "y.safetensors"})
    assert set(reshard.open(root)) == {"a", "b"}
    # An older param_name_map.json is the map alone.
    (root / INDEXES["huggingface"]).unlink()
    (root / INDEXES["mindspore"]).write_text(json.dumps({"a": "x.safetensors"}))
    assert set(reshard.open(root)) == {"a"}


@pytest.mark.parametrize(
    ("weight_map", "code", "place"),
    [
        ({"a": "x.safetensors", "b": "gone.safetensors"}, "not-found", "file 'gone.safetensors'"),
        ({"a": "../x.safetensors"}, "bad-name", "file '../x.safetensors'"),
        ({"a": "/etc/passwd"}, "bad-name", "file '/etc/passwd'"),
        ({"a": ".."}, "bad-name", "file '..'"),
        ({"a": "x\0y"}, "not-found", r"x\x00y"),
        ({}, "no-tensors", ""),
        ({"a": 3}, "bad-index", "weight_map"),
        (["a"], "bad-index", "weight_map"),
        ("a", "bad-index", "weight_map"),
        ({"a": "model.safetensors.index.json"}, "not-a-checkpoint", "model.safetensors.index.json"),
        ({"a": "x.safetensors", "b": "x.safetensors"}, "missing-tensor", "'b'"),
        (b"", "not-json", "index.json"),
        (b"\xff\xfe", "not-json", "index.json"),
        (b"[" * 100_000, "not-json", "index.json"),
        (b"[1]", "bad-index", "index.json"),
        (b'{"weight_map": {"a": null}}', "bad-index", "index.json"),
        (b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "duplicate-name", "tensor 'a'"),
    ],
)
def test_bad_indexes(tmp_path: Path, weight_map: object, code: str, place: str) -> None:
    root = a_set(tmp_path, {} if isinstance(weight_map, bytes) else weight_map)
    if isinstance(weight_map, bytes):
        (root / INDEXES["huggingface"]).write_bytes(weight_map)
    with refused(SourceError, code, place):
        reshard.open(root)


def test_all_faults_of_an_index_are_told_at_once(tmp_path: Path) -> None:
    with refused(SourceError, "not-found", "'gone'", "'sub/gone'") as caught:
        reshard.open(a_set(tmp_path, {"a": "gone", "b": "sub/gone"}))
    assert caught.value.codes == ("not-found", "bad-name")


def test_a_tensor_in_two_files_of_a_set_is_refused(tmp_path: Path) -> None:
    """One of them is from an older set; the index says which, but a reader that trusts it may be wrong all the same."""
    root = a_set(tmp_path, {"a": "x.safetensors", "b": "y.safetensors"})
    write_file(root / "x.safetensors", {"a": FULL["a"], "b": FULL["b"] + 1})
    with refused(SourceError, "duplicate-name", "'b'", "x.safetensors, y.safetensors"):
        reshard.open(root)


def test_two_indexes_in_a_directory_are_refused(tmp_path: Path) -> None:
    a_set(tmp_path, {"a": "x.safetensors"})
    a_set(tmp_path, {"a": "x.safetensors"}, "mindspore")
    with refused(SourceError, "several-checkpoints"):
        reshard.open(tmp_path)


@pytest.mark.parametrize("style", STYLES)
def test_a_size_below_a_byte_is_refused(style: str) -> None:
    with refused(UsageError, "out-of-range", "least 1"):
        STYLES[style](0)
