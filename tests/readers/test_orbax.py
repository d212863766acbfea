"""Orbax's checkpoints as a source: real ones give the arrays that were saved, or say why not."""

from __future__ import annotations

import json
import shutil
import zlib
from typing import TYPE_CHECKING, Any

import helpers
import ml_dtypes
import numpy as np
import pytest
from checkpoints import assert_equal
from commands import done
from fsspec.core import url_to_fs
from orbax_files import (
    Database,
    Files,
    add_array,
    maxtext,
    numbers,
    truth,
    write_orbax,
    write_tree,
)
from refusals import failed, one_line, refused

import reshard
from reshard.core.catalog import iterations_at
from reshard.core.open import open as open_record
from reshard.errors import SourceError
from reshard.view.words import blocks_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CASES = sorted({path.split("/")[1] for path in helpers.packed_files("orbax")})
W = np.arange(48, dtype=np.float32).reshape(6, 8)


@pytest.fixture
def case(mindspore_data: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copies a case, to be spoilt; returns its directory."""
    return lambda name: shutil.copytree(mindspore_data / "orbax" / name / "checkpoint", tmp_path / name)


def checkpoint_of(case: Path) -> Path:
    return next(case.glob("checkpoint*"))


def last(case: Path) -> dict[str, Any]:
    """The arrays of a case; of a run, those of its last finished step."""
    full = truth(case)
    if case.name != "run":
        return full
    return {name.removeprefix("9/"): value for name, value in full.items() if name.startswith("9/")}


@pytest.mark.parametrize("name", CASES)
def test_real_ones_are_the_arrays_that_were_saved(mindspore_data: Path, name: str) -> None:
    case = mindspore_data / "orbax" / name
    source = reshard.open(checkpoint_of(case))
    assert_equal(source, last(case))
    assert {key: source[key].dtype for key in source} == {key: value.dtype for key, value in last(case).items()}
    assert not source.unreadable
    assert bool(source.warnings) == (name in {"absent_zarr2", "absent_zarr3", "run", "unmerged"})
    assert reshard.verify(checkpoint_of(case)).equal


def test_steps_of_a_run(mindspore_data: Path) -> None:
    case = mindspore_data / "orbax" / "run"
    full, run = truth(case), case / "checkpoint"
    for step in (3, 6, 9):
        expected = {key.partition("/")[2]: value for key, value in full.items() if key.startswith(f"{step}/")}
        assert_equal(reshard.open(run, step=step), expected)
        assert_equal(reshard.open(run / str(step)), expected)
        assert_equal(reshard.open(run / str(step) / "default"), expected)
    newest = reshard.open(run)
    assert newest.root.endswith("/9")
    assert all(text in str(newest.warnings) for text in ("12.orbax-checkpoint-tmp", "13.orbax-checkpoint-tmp"))
    failed(4, "no-such-iteration", "inspect", run, "--step", "12", places=("3, 6, 9", "12.orbax-checkpoint-tmp"))
    assert [(each.step, each.last, each.state) for each in iterations_at(run)] == [
        ("3", False, "complete"), ("6", False, "complete"), ("9", True, "complete"),
        ("12", False, "incomplete"), ("13", False, "incomplete"),
    ]  # fmt: skip


def test_a_step_without_its_end_is_not_read_unless_by_its_path(case: Callable[[str], Path]) -> None:
    """As object stores have it, where a directory has its name from the beginning."""
    run = case("run")
    (run / "9" / "commit_success.txt").unlink()
    assert reshard.open(run).root.endswith("/9")  # the time of its end is in its metadata, too
    metadata = json.loads((run / "9" / "_CHECKPOINT_METADATA").read_text())
    (run / "9" / "_CHECKPOINT_METADATA").write_text(json.dumps(metadata | {"commit_timestamp_nsecs": None}))
    newest = reshard.open(run)
    assert newest.root.endswith("/6")
    assert "9, 12.orbax" in str(newest.warnings)
    failed(4, "unfinished", "inspect", run, "--step", "9", places=("9",))
    by_path = reshard.open(run / "9")
    assert set(by_path) == {"w", "b", "step"}
    assert "not finished" in str(by_path.warnings)
    for name in ("12.orbax-checkpoint-tmp", "13.orbax-checkpoint-tmp"):
        assert "not finished" in str(reshard.open(run / name).warnings)
    shutil.rmtree(run / "3")
    shutil.rmtree(run / "6")
    with refused(SourceError, "no-such-iteration", "9"):
        reshard.open(run)


def test_a_step_with_an_unfinished_item_is_not_finished(case: Callable[[str], Path]) -> None:
    run = case("run")
    (run / "9" / "default").rename(run / "9" / "default.orbax-checkpoint-tmp")
    newest = reshard.open(run)
    assert newest.root.endswith("/6")
    assert "9, 12.orbax" in str(newest.warnings)
    assert "default.orbax-checkpoint-tmp" in str(reshard.open(run / "9").warnings)


def test_layouts_are_those_of_the_mesh(mindspore_data: Path) -> None:
    case = mindspore_data / "orbax" / "mesh2x2x2_ocdbt_zarr2"
    record = open_record(case / "checkpoint")
    extras = record.extras
    blocks, ranks = blocks_of(record, record.tensors["w"])  # those of the devices, although all files are of rank 0
    assert (len(blocks), sorted(sum(ranks, ()))) == (4, [*range(8)])
    assert [str(extras.layout_of(name)) for name in ("w", "big", "deep.bf16", "step")] == [
        "[2, 2, 2] map [(2, 0), -1]", "[2, 2, 2] map [0, 1, 2]", "[2, 2, 2] map [1, 2]", "[2, 2, 2] map []",
    ]  # fmt: skip


def test_strings_are_named_and_paths_are_kept(mindspore_data: Path, tmp_path: Path) -> None:
    case = mindspore_data / "orbax" / "names"
    result = done("inspect", case / "checkpoint")
    assert "text" in result.output
    done("convert", case / "checkpoint", tmp_path / "out", "--to", "dcp")
    assert_equal(reshard.open(tmp_path / "out"), truth(case))


@pytest.mark.parametrize("items", [("state",), ("params", "opt"), ("model.ema", "model")])
def test_items_of_a_step(tmp_path: Path, items: tuple[str, ...]) -> None:
    """One gives its names as they are; several have their own name in front. JSON is no item with arrays."""
    full = {}
    for number, item in enumerate(items):
        arrays = write_orbax(tmp_path / "7" / item, numbers(number))
        full |= {f"{item}.{name}" if len(items) > 1 else name: value for name, value in arrays.items()}
    (tmp_path / "7" / "metadata").mkdir()
    (tmp_path / "7" / "metadata" / "metadata").write_text("{}")
    (tmp_path / "7" / "_CHECKPOINT_METADATA").write_text('{"commit_timestamp_nsecs": 5}')
    assert_equal(reshard.open(tmp_path), full)
    assert_equal(reshard.open(tmp_path / "7"), full)
    assert_equal(reshard.open(tmp_path / "7" / items[0]), numbers(0))


def test_two_items_whose_arrays_have_one_name(tmp_path: Path) -> None:
    write_orbax(tmp_path / "model", {"ema.w": W})
    write_orbax(tmp_path / "model.ema", {"w": W})
    (tmp_path / "_CHECKPOINT_METADATA").write_text('{"commit_timestamp_nsecs": 5}')
    with refused(SourceError, "duplicate-name", "model.ema.w"):
        reshard.open(tmp_path)


def test_unfinished_ones_of_older_versions(tmp_path: Path) -> None:
    """Their names end with a time."""
    write_orbax(tmp_path / "7" / "default", {"w": W})
    step = tmp_path / "8.orbax-checkpoint-tmp-1700000000"
    item = step / "default.orbax-checkpoint-tmp-1700000001"
    write_orbax(item, {"w": W + 1})
    (step / "_CHECKPOINT_METADATA").write_text("{}")
    source = reshard.open(tmp_path)
    assert_equal(source, {"w": W})
    assert step.name in str(source.warnings)
    for path in (step, item):
        source = reshard.open(path)
        assert_equal(source, {"w": W + 1})
        assert "not finished" in str(source.warnings)


def test_an_item_of_an_unfinished_step(mindspore_data: Path) -> None:
    run = mindspore_data / "orbax" / "run" / "checkpoint"
    assert "not finished" in str(reshard.open(run / "13.orbax-checkpoint-tmp" / "default").warnings)


def test_an_array_named_like_the_database_of_a_process(tmp_path: Path) -> None:
    store = Files(tmp_path)
    add_array(store, "ocdbt.process_0", W)
    write_tree(tmp_path, [("ocdbt.process_0",)], use_ocdbt=False)
    assert_equal(reshard.open(tmp_path), {"ocdbt.process_0": W})


def test_a_step_without_arrays(tmp_path: Path) -> None:
    (tmp_path / "7" / "metadata").mkdir(parents=True)
    (tmp_path / "7" / "_CHECKPOINT_METADATA").write_text('{"commit_timestamp_nsecs": 5}')
    with refused(SourceError, "no-tensors", "7"):
        reshard.open(tmp_path)


@pytest.mark.parametrize("per_node", [2, 5, 1000])
@pytest.mark.parametrize("zarr3", [False, True])
@pytest.mark.parametrize("level", [None, 3])
def test_any_tree_and_any_chunks(tmp_path: Path, per_node: int, zarr3: bool, level: int | None) -> None:
    """Trees of several nodes, values within nodes and in several files, partial chunks at the edge, inner chunks."""
    full = numbers()
    store = Database(tmp_path / "in", file_bytes=2000, per_node=per_node, inline=200)
    for name, array in full.items():
        half = tuple(max(2, extent // 2) for extent in array.shape)
        add_array(store, name, array, half, zarr3=zarr3, level=level)
    add_array(store, "params.cut", full["params.big"], (20, 30), zarr3=True, level=level, inner=(10, 6))
    add_array(store, "params.rows", full["params.big"], (20, 30), zarr3=True, level=level, inner=(5, 30))
    store.finish()
    full |= {"params.cut": full["params.big"], "params.rows": full["params.big"]}
    write_tree(tmp_path / "in", [name.split(".") for name in full])
    source = reshard.open(tmp_path / "in")
    assert_equal(source, full)
    assert source["params.w"][2:5, 3, ::2].compute().tobytes() == full["params.w"][2:5, 3, ::2].tobytes()
    reshard.plan(source, to="safetensors").run(tmp_path / "out", fsync=False)
    assert_equal(reshard.open(tmp_path / "out"), full)


def test_plain_and_compressed_chunks_in_one_file(tmp_path: Path) -> None:
    """Plain ones are read in place, whatever is next to them."""
    store = Database(tmp_path, inline=100)
    full = {"a": W, "b": W + 1, "c": W + 2}
    for name, level in (("a", None), ("b", 1), ("c", None)):
        add_array(store, name, full[name], (3, 8), level=level)
    store.finish()
    write_tree(tmp_path, [(name,) for name in full])
    assert_equal(reshard.open(tmp_path), full)


@pytest.mark.parametrize("fill", [None, 0, 2.5])
@pytest.mark.parametrize("zarr3", [False, True])
def test_absent_chunks_are_the_fill_value_or_lost(tmp_path: Path, fill: float | None, zarr3: bool) -> None:
    full = W.copy()
    full[3:, :4] = fill or 0
    key = "c/1/0" if zarr3 else "1.0"
    for stores, directory in ((True, tmp_path / "a"), (False, tmp_path / "b"), (None, tmp_path / "c")):
        store = Files(directory)
        add_array(store, "w", W, (3, 4), zarr3=zarr3, fill=fill, absent=[key])
        add_array(store, "v", W, (3, 4), zarr3=zarr3)
        write_tree(directory, [("w",), ("v",)], use_ocdbt=False, store_array_data_equal_to_fill_value=stores)
    lost = reshard.open(tmp_path / "a")
    assert set(lost) == {"v"}
    assert set(lost.unreadable) == {"w"}
    failed(4, "unreadable-tensor", "convert", tmp_path / "a", tmp_path / "out", "--to", "hf", places=("w",))
    for directory in (tmp_path / "b", tmp_path / "c"):
        source = reshard.open(directory)
        assert_equal(source, {"w": full, "v": W})
        assert any("w" in text for text in source.warnings)
        done("convert", directory, tmp_path / f"{directory.name}-out", "--to", "hf")
        assert_equal(reshard.open(tmp_path / f"{directory.name}-out"), {"w": full, "v": W})


def test_missing_files_are_named(case: Callable[[str], Path]) -> None:
    root = case("two_processes_zarr2")
    shutil.move(root / "ocdbt.process_1", root.parent / "elsewhere")
    with refused(SourceError, "missing-file", "ocdbt.process_1"):
        reshard.open(root)
    shutil.move(root.parent / "elsewhere", root / "ocdbt.process_1")
    file = next((root / "ocdbt.process_1" / "d").iterdir())
    file.write_bytes(file.read_bytes()[:5000])
    with refused(SourceError, "truncated", file.name):
        reshard.open(root)
    (root / "manifest.ocdbt").unlink()
    with refused(SourceError, "truncated", file.name):
        reshard.open(root)
    shutil.rmtree(root / "ocdbt.process_1")
    assert reshard.open(root).unreadable  # the other process has blocks of them
    shutil.rmtree(root / "ocdbt.process_0")
    with refused(SourceError, "missing-file", "manifest.ocdbt"):
        reshard.open(root)


def test_without_its_tree_arrays_have_their_stored_names(case: Callable[[str], Path], mindspore_data: Path) -> None:
    root = case("adam")
    (root / "_METADATA").unlink()
    source = reshard.open(root)
    assert_equal(source, truth(mindspore_data / "orbax" / "adam"))
    assert any("_METADATA" in text for text in source.warnings)


def test_two_arrays_of_one_name(tmp_path: Path) -> None:
    write_orbax(tmp_path, {"a.b.c": W})
    write_tree(tmp_path, [("a.b", "c"), ("a", "b.c")])
    with refused(SourceError, "duplicate-name", "a.b.c"):
        reshard.open(tmp_path)


def test_an_array_that_is_not_in_the_tree(tmp_path: Path) -> None:
    write_orbax(tmp_path, {"a": W, "b": W})
    write_tree(tmp_path, [("a",), ("c",)])
    source = reshard.open(tmp_path)
    assert set(source) == {"a"}
    assert set(source.unreadable) == {"c"}
    assert any("b" in text for text in source.warnings)


CHANGED: list[dict[str, Any]] = [
    {"filters": [{"id": "delta"}]}, {"dtype": "int4"}, {"dtype": [["a", "<f4"]]}, {"chunks": [0, 8]},
    {"chunks": [-3, 8]}, {"chunks": [3]}, {"shape": [1 << 40, 1 << 40]}, {"shape": [1 << 30, 8]},
    {"dimension_separator": "x"}, {"other": 1}, {"zarr_format": 4}, {"fill_value": {}}, {"chunks": [True, 8]},
    {"shape": [6, 8.0]},
]  # fmt: skip


@pytest.mark.parametrize("changed", CHANGED, ids=str)
def test_metadata_of_another_kind_make_an_array_unreadable(tmp_path: Path, changed: dict[str, Any]) -> None:
    store = Database(tmp_path)
    add_array(store, "w", W, (3, 8), **changed)
    add_array(store, "v", W, (3, 8))
    store.finish()
    write_tree(tmp_path, [("w",), ("v",)])
    source = reshard.open(tmp_path)
    assert set(source.unreadable) == {"w"}
    assert_equal(source, {"v": W})


@pytest.mark.parametrize("inline", [0, 1 << 20])
def test_chunks_in_encodings_that_only_zarr_reads(tmp_path: Path, inline: int) -> None:
    """Within a node and in files; Orbax writes none of them, but TensorStore does."""
    store = Database(tmp_path, inline=inline)
    packed = np.frombuffer(zlib.compress(W.tobytes()), np.uint8)
    add_array(store, "big", W.astype(">f4"), (4, 5), level=None)
    add_array(store, "columns", W, level=None, contents=W.T, order="F")
    add_array(store, "zlib", W, level=None, contents=packed, compressor={"id": "zlib", "level": 1})
    add_array(store, "damaged", W, level=None, compressor={"id": "blosc"})
    store.finish()
    write_tree(tmp_path, [("big",), ("columns",), ("zlib",), ("damaged",)])
    source = reshard.open(tmp_path)
    with refused(SourceError, "bad-chunk"):
        source["damaged"].compute()
    assert all(np.array_equal(source[name].compute(), W) for name in ("big", "columns", "zlib"))


def test_strange_names(tmp_path: Path) -> None:
    full = {name: W.astype(ml_dtypes.bfloat16) for name in ("ü n.ï", "a/b", "..", "a..b", "*[x]")}
    store = Database(tmp_path)
    for name, array in full.items():
        add_array(store, name, array, (3, 8))
    store.finish()
    write_tree(tmp_path, [(name,) for name in full])
    assert_equal(reshard.open(tmp_path), full)


def test_at_urls(mindspore_data: Path, bucket: str) -> None:
    for root, name in ((bucket, "mesh4x2_files_zarr2"), (bucket, "two_processes_zarr3"), ("memory:/", "chunks_zarr3")):
        case, url = mindspore_data / "orbax" / name, f"{root}/orbax/{name}"
        files, path = url_to_fs(url)
        files.put(f"{checkpoint_of(case)}/", f"{path}/", recursive=True)
        assert_equal(reshard.open(url), last(case))
        reshard.plan(reshard.open(url), to="hf").run(f"{url}-out")
        assert_equal(reshard.open(f"{url}-out"), last(case))


def test_an_iteration_that_is_not_one(mindspore_data: Path) -> None:
    case = mindspore_data / "orbax" / "maxtext" / "checkpoint"
    result = failed(4, "no-such-iteration", "inspect", case, "--step", "7")
    assert "100" in one_line(result.stderr)
    assert reshard.open(case / "100", step=100).root.endswith("100")


@pytest.mark.parametrize("name", ["maxtext", "adam"])
def test_states_of_optax_are_those_of_their_weights(mindspore_data: Path, tmp_path: Path, name: str) -> None:
    root = mindspore_data / "orbax" / name / "checkpoint"
    full = truth(mindspore_data / "orbax" / name)
    done("convert", root, tmp_path / "weights", "--to", "hf", "--weights-only")
    assert set(reshard.open(tmp_path / "weights")) == {key for key in full if key.startswith("params.")}
    (tmp_path / "map.json").write_text('{"params.*": "net.*"}')
    done("convert", root, tmp_path / "renamed", "--to", "hf", "--name-map", tmp_path / "map.json")
    new = set(reshard.open(tmp_path / "renamed"))
    mu, omitted = ("opt_state.0.mu.", "") if name == "adam" else ("opt_state.mu.", "net.")
    assert all(f"{mu}{key.removeprefix(omitted)}" in new for key in new if key.startswith("net."))


def test_rules_of_maxtext(mindspore_data: Path, tmp_path: Path) -> None:
    """Weights and states by rules, and back to the names and shapes of MaxText."""
    full = truth(mindspore_data / "orbax" / "maxtext")
    root = mindspore_data / "orbax" / "maxtext" / "checkpoint"
    done("convert", root, tmp_path / "hf", "--to", "hf", "--rules", "maxtext-hf")
    hf = {key: value.compute() for key, value in reshard.open(tmp_path / "hf").items()}
    for prefix, outer in (("", "params."), ("opt_state.mu.", "opt_state.mu."), ("opt_state.nu.", "opt_state.nu.")):
        weights = {key.removeprefix(prefix): value for key, value in hf.items() if key.startswith(f"{prefix}model.")}
        weights["lm_head.weight"] = hf[f"{prefix}lm_head.weight"]
        for key, value in maxtext(weights, 4, 2).items():
            assert np.array_equal(value, full[outer + key.removeprefix("params.")]), key
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 3}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    for options in ((), ("--let", "pairs=1")):
        done("convert", root, tmp_path / "a", "--to", "hf", "--rules", "maxtext-hf", *options, "--overwrite")
        (tmp_path / "a" / "config.json").write_text(json.dumps(config))
        back = ("--to", "safetensors", "--rules", "maxtext-hf", *options, "--weights-only", "--overwrite")
        done("convert", tmp_path / "a", tmp_path / "back", *back)
        assert_equal(
            reshard.open(tmp_path / "back"), {key: full[key] for key in full if key.startswith("params.params.")}
        )
