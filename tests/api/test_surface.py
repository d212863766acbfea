"""What Python users see: few names, and arguments as on the command line."""

from __future__ import annotations

import inspect
import json
from functools import partial
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401 -- registers bfloat16, which is compared
import numpy as np
import pytest
import users_script
from commands import call
from dask.array import Array
from refusals import failed, one_line, refused
from safetensors.numpy import load_file, save_file

import reshard
from reshard import errors, former
from reshard.api import options
from reshard.core.format import targets
from reshard.core.options import takers
from reshard.errors import MissingNameError, StrategyError, UsageError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's files."""
    home = tmp_path_factory.mktemp("demo")
    reshard.demo("mindspore", home)
    return home


@pytest.fixture(scope="module")
def source(home: Path) -> reshard.Checkpoint:
    return reshard.open(home / "src_checkpoints", strategy=home / "src_strategy.ckpt")


def public(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def test_checkpoints_and_plans_show_few_names(source: reshard.Checkpoint) -> None:
    assert public(source) - public({}) | {"get", "items", "keys", "values"} == {
        "array", "assign", "astype", "close", "dequantize", "derive", "format", "groups", "hist", "merge_lora",
        "nbytes", "picture", "rank", "ranks", "read_object", "root", "scale", "sel", "stats", "strategy", "tensors",
        "to_dataframe", "to_strategy", "to_zarr", "unreadable", "warnings", "get", "items", "keys", "values",
    }  # fmt: skip
    assert public(reshard.plan(source)) == {
        "dropped", "files", "filesystem", "format", "graph", "left_out", "missing", "open", "picture", "rank", "ranks",
        "read", "run", "save", "stats", "to_dataframe", "warnings",
    }  # fmt: skip
    assert isinstance(source[next(iter(source))], Array)
    with refused(MissingNameError, "no-such-tensor", "net.layer1.weigth", "net.layer1.weight"):
        source["net.layer1.weigth"]


def test_few_names_are_public_and_every_error_is_one_of_seven() -> None:
    assert len(reshard.__all__) <= 33
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    exported = {name for name in reshard.__all__ if name.endswith("Error")}
    assert len(exported) == 7
    assert all(any(parent.__name__ in exported for parent in kind.__mro__) for kind in kinds)
    with pytest.raises(ImportError):
        exec("from reshard import opne")  # noqa: S102


@pytest.mark.parametrize(
    "function", [reshard.open, reshard.plan, reshard.verify, reshard.convert, reshard.write, reshard.Plan.run]
)
def test_every_option_is_explained_once(function: Any) -> None:
    """In the docstring of the function, which names those of a class of options; each of these explains its own."""
    parameters = inspect.signature(function).parameters
    said = inspect.getdoc(function) or ""
    assert len(said.splitlines()) <= 96  # two screens
    assert all(f"    {name}: " in said for name in parameters if name not in {"self", "options"})
    if "options" in parameters:
        kind = getattr(options, parameters["options"].annotation.removeprefix("Unpack[").removesuffix("]"))
        explained = [inspect.getdoc(each) or "" for each in vars(options).values() if inspect.isclass(each)]
        for name in kind.__annotations__:
            assert f"`{name}`" in said or name in of_formats(), name
            assert sum(f"    {name}: " in each for each in explained) >= 1, name


def of_formats() -> set[str]:
    """The options of single formats, which the classes of options have, too, for editors."""
    found = {*takers(targets())}
    assert found <= options.TargetKeywords.__annotations__.keys()
    return found


@pytest.mark.parametrize("name", former.NAMES)
def test_a_former_name_says_the_new_one(name: str) -> None:
    with pytest.raises(AttributeError, match=f"{name}'; "):
        getattr(reshard, name)


@pytest.mark.parametrize("word", sorted(word for words in former.OPTIONS for word in words.split()))
def test_a_former_word_of_the_command_line_says_the_new_one(word: str) -> None:
    """As a command, and as an option of `convert`; some are commands or options still, of others."""
    advice = next(text for words, text in former.OPTIONS.items() if word in words.split())
    for command in ([word], ["convert", "a", "b", f"--{word}", "c"]):
        said = call(*command)
        assert said.exit_code == 2
        if advice in one_line(said.stderr):
            return
    pytest.fail(said.stderr)


def test_a_former_keyword_says_the_new_one(source: reshard.Checkpoint, tmp_path: Path) -> None:
    given: Any = {"format": "hf"}
    for function in (reshard.plan, partial(reshard.convert, target=tmp_path / "out")):
        with pytest.raises(TypeError, match="'format'; it is to="):
            function(source, **given)
    with pytest.raises(TypeError, match="'seed'; "):
        reshard.verify(source, seed=3)  # type: ignore[call-arg]


def test_a_plan_takes_paths_sizes_words_and_keywords(source: reshard.Checkpoint, home: Path, tmp_path: Path) -> None:
    by_path = reshard.plan(source, home / "dst_strategy.ckpt", memory="1GB")
    read = reshard.plan(source, reshard.read_strategy(home / "dst_strategy.ckpt"), memory=10**9)
    assert by_path.stats == read.stats
    chosen = {"include": ["net.layer1.*"], "name_map": {"net.*": "model.*"}, "cast": {"float32": "bfloat16"}}
    reshard.plan(source, to="hf", max_shard_size="1kB", **chosen).run(tmp_path / "hf")
    names = set(json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())["weight_map"])
    opened = reshard.open(tmp_path / "hf")
    assert names == set(opened) == {name.replace("net.", "model.") for name in source.sel("net.layer1.*")}
    assert {tensor.spec.dtype.name for tensor in opened.tensors.values()} == {"bfloat16"}
    assert reshard.verify(tmp_path / "hf", against=source, memory="1GB", **chosen)
    for format, mark in {"mindspore": "param_name_map.json", "dcp": ".metadata", "zarr": "zarr.json"}.items():
        reshard.plan(source, to=format).run(tmp_path / format)
        assert (tmp_path / format / mark).is_file()
    reshard.plan(source, to="checkpoint2", target_step=3).run(tmp_path / "run")
    assert (tmp_path / "run" / "iteration_00000003").is_dir()


def test_what_contradicts_itself_is_refused(source: reshard.Checkpoint, home: Path) -> None:
    with refused(reshard.UsageError, "option-of-another-format", "strategy"):
        reshard.plan(source, home / "dst_strategy.ckpt", to="hf")
    with refused(reshard.UsageError, "two-selections", "include"):
        reshard.plan(source, selection=reshard.Selection(), include="*")
    with refused(reshard.UsageError, "bad-size", "memory"):
        reshard.plan(source, memory="lots")
    with refused(reshard.UsageError, "not-a-checkpoint", "src"):
        reshard.plan("src")  # type: ignore[arg-type]
    with refused(reshard.UsageError, "option-of-another-format", "max_shard_size"):
        reshard.plan(source, to="zarr", max_shard_size="1GB")


def test_a_format_in_place_of_a_strategy_is_refused_with_the_keyword_that_takes_it(
    source: reshard.Checkpoint, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused(UsageError, "not-a-strategy", "to='dcp'"):
        reshard.plan(source, "dcp")
    assert reshard.plan(source, to="dcp")
    with refused(UsageError, "not-a-strategy", "to='huggingface'"):
        reshard.convert(source, tmp_path / "out", target_strategy="huggingface")
    reshard.write({"w": np.ones((2, 2), np.float32)}, tmp_path / "src", to="hf")
    arguments = ("convert", tmp_path / "src", tmp_path / "out", "--target-strategy", "hf")
    failed(2, "not-a-strategy", *arguments, places=("--to hf",))
    monkeypatch.chdir(tmp_path)
    with refused(StrategyError, "not-found", "dpc"):
        reshard.plan(source, "dpc")


def test_convert_takes_the_format_from_the_name_or_the_source(
    source: reshard.Checkpoint, home: Path, tmp_path: Path
) -> None:
    src, strategy = home / "src_checkpoints", home / "src_strategy.ckpt"
    whole = reshard.convert(src, tmp_path / "whole.safetensors", source_strategy=strategy)
    assert whole.files == ("whole.safetensors",)
    assert set(load_file(tmp_path / "whole.safetensors")) <= set(source)
    assert reshard.convert(tmp_path / "whole.safetensors", tmp_path / "whole.ckpt").files == ("whole.ckpt",)
    assert "zarr.json" in reshard.convert(source, tmp_path / "model.zarr").files
    assert reshard.convert(src, tmp_path / "same", to="safetensors").source_files == 8, "each rank as it is cut"
    ranks = reshard.convert(
        src, tmp_path / "four", source_strategy=strategy, target_strategy=home / "dst_strategy.ckpt"
    )
    assert [name.partition("/")[0] for name in ranks.files] == [f"rank_{rank}" for rank in range(4)]
    assert reshard.open(tmp_path / "four").format == "ckpt", "as the source"
    reshard.convert(tmp_path / "model.zarr", tmp_path / "hf", to="hf", max_shard_size="1MB")
    assert reshard.verify(tmp_path / "hf", against=tmp_path / "whole.safetensors", weights_only=True)
    with refused(reshard.UsageError, "option-of-another-format", "compression"):
        reshard.convert(src, tmp_path / "x", to="hf", compression="zstd")
    with refused(reshard.UsageError, "one-file", "strategy"):
        reshard.convert(src, tmp_path / "x.ckpt", source_strategy=strategy, target_strategy=strategy)


def test_the_safetensors_library_reads_what_was_written(source: reshard.Checkpoint, home: Path, tmp_path: Path) -> None:
    reshard.plan(source, home / "dst_strategy.ckpt", to="safetensors").run(tmp_path / "out")
    found = reshard.verify(tmp_path / "out", independent=True)
    assert found
    assert found.independent == 4
    path = tmp_path / "out" / "rank_2" / "checkpoint_2.safetensors"
    tensors = load_file(path)
    name = "net.layer1.weight"
    tensors[name] = np.negative(tensors[name])
    save_file(tensors, path)
    changed = reshard.verify(tmp_path / "out", against=source, independent=True)
    assert {one.name for one in changed.differences if one.kind == "values"} == {name}
    with refused(reshard.UsageError, "needs-source"):
        reshard.verify(tmp_path / "out" / "rank_0", independent=True)
    with refused(reshard.UsageError, "not-for-the-library"):
        reshard.verify(home / "src_checkpoints", home / "src_strategy.ckpt", against=source, independent=True)


def test_a_users_script_runs(home: Path, tmp_path: Path) -> None:
    users_script.main(home / "src_checkpoints", home / "src_strategy.ckpt", str(home / "dst_strategy.ckpt"), tmp_path)
    assert {"ranks", "computed", "hf", "one.safetensors", "model.zarr", "plan.json"} <= {
        p.name for p in tmp_path.iterdir()
    }
