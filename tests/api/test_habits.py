"""What users of Python and IPython expect of any library: completions, data frames, `with`, `~`, warnings, logs."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import write_ranks
from commands import call
from refusals import refused
from safetensors.numpy import save_file
from stopped_runs import SOURCE as STRATEGY
from stopped_runs import TARGET, small_tasks, source, stopped

import reshard
from reshard.core.storage.local import local_store
from reshard.errors import MissingNameError, ReshardError, UsageError

__all__ = ["small_tasks", "source"]  # fixtures, for pytest to find

VALUES = {"layers.0.w": np.arange(8, dtype=np.float32).reshape(2, 4), "layers.1.w": np.full((2, 4), np.nan, np.float32)}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    save_file(VALUES, tmp_path / "whole.safetensors")
    return tmp_path / "whole.safetensors"


# --- names ---


def test_names_are_completed(source: reshard.Checkpoint) -> None:
    plan = reshard.plan(source, TARGET)
    for mapping in (source, source.rank(0), plan.rank(1), source.groups()):
        assert mapping._ipython_key_completions_() == list(mapping)
    assert source._ipython_key_completions_() == ["b", "c", "w"]


def test_a_glob_in_place_of_a_name_leads_to_sel(source: reshard.Checkpoint) -> None:
    with refused(MissingNameError, "no-such-tensor", "sel('layers.*')") as caught:
        source["layers.*"]
    assert isinstance(caught.value, KeyError)
    for mapping in (source.rank(0), reshard.plan(source).rank(0), source.groups()):
        with refused(MissingNameError, "no-such-tensor", "'v'"):
            mapping["v"]
    assert source.get("v") is None


# --- data frames ---


def test_results_are_data_frames(source: reshard.Checkpoint, whole: Path, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    frame = source.to_dataframe()
    assert list(frame["name"]) == ["b", "c", "w"]
    assert list(frame["shape"]) == [(24,), (12, 8), (48, 16)]
    assert list(frame["nbytes"]) == [source[name].nbytes for name in ("b", "c", "w")]
    assert list(frame["blocks"]) == [1, 4, 4]
    assert set(frame["kind"]) == {"weights"}
    assert frame["cut"].nunique() == 3

    casts = {str(source["w"].dtype): "float64"}
    plan = reshard.plan(source, format="hf", cast=casts, name_map={"c": "d"}).to_dataframe().set_index("name")
    assert plan.loc["w", ["dtype", "source_dtype"]].tolist() == ["float64", str(source["w"].dtype)]
    assert plan.loc["w", "nbytes"] == 48 * 16 * 8
    assert plan.loc["d", ["source_name", "blocks"]].tolist() == ["c", 1]
    assert list(reshard.plan(source, TARGET).to_dataframe()["blocks"]) == [2, 2, 2]

    stats = reshard.open(whole).stats().to_dataframe().set_index("name")
    assert stats.loc["layers.0.w", "mean"] == VALUES["layers.0.w"].mean()
    assert stats.loc["layers.1.w", "nans"] == 8

    reshard.write({"layers.0.w": VALUES["layers.0.w"] + np.float32(2)}, tmp_path / "other", format="hf")
    diff = reshard.diff(whole, tmp_path / "other").to_dataframe()
    assert diff[["name", "max_abs", "within"]].to_numpy().tolist() == [["layers.0.w", 2.0, False]]

    runs = reshard.runs(tmp_path).to_dataframe()
    assert str(tmp_path / "other") in set(runs["path"])
    assert (runs["modified"].dt.year >= 2024).all()


def test_a_data_frame_needs_pandas(source: reshard.Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with refused(ReshardError, "library-missing", "pandas"):
        source.to_dataframe()


# --- dtypes, lists of names, and comparing mappings ---


def test_dtypes_of_numpy_are_taken(whole: Path) -> None:
    source = reshard.open(whole)
    name = "layers.0.w"
    for dtype in (np.float16, np.dtype("float16"), ml_dtypes.bfloat16, float, "bf16"):
        wanted = np.dtype(ml_dtypes.bfloat16 if dtype == "bf16" else dtype)
        assert source.astype(dtype)[name].dtype == reshard.average([source, source], dtype=dtype)[name].dtype == wanted
        assert np.array_equal(np.asarray(source.astype(dtype)[name]), VALUES[name].astype(wanted))
    assert list(source.sel(dtype=np.float32)) == list(VALUES)
    assert not source.sel(dtype=np.dtype("int8"))
    for wrong in (object, np.str_, np.int8):
        with pytest.raises(UsageError):
            source.astype(wrong)


def test_a_list_is_no_name(whole: Path) -> None:
    source = reshard.open(whole)
    for key in (["layers.0.w", "layers.1.w"], slice(2), np.arange(2)):
        with refused(MissingNameError, "no-such-tensor"):
            source[key]  # type: ignore[index]


# --- with ---


def test_with_closes_the_files(whole: Path) -> None:
    def is_open() -> bool:
        return str(whole) in {os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()}

    with reshard.open(whole) as opened:
        first = opened["layers.0.w"].compute(scheduler="synchronous")
        local_store().read_into(str(whole), 0, memoryview(bytearray(8)))
        assert is_open()
    assert not is_open()
    assert np.array_equal(first, VALUES["layers.0.w"])
    assert np.array_equal(opened["layers.0.w"].compute(), VALUES["layers.0.w"])


# --- ~ ---


def test_home_is_expanded(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    opened = reshard.open("~/whole.safetensors")
    assert set(opened) == set(VALUES)
    reshard.convert("~/whole.safetensors", "~/out", to="hf")
    assert reshard.verify("~/out", against=Path("~/whole.safetensors"))
    assert len(reshard.runs("~")) == 2
    plan = reshard.plan(opened, format="hf")
    plan.save("~/plan.json")
    reshard.read_plan("~/plan.json").run("~/again")
    reshard.write_strategy(STRATEGY, "~/strategy.ckpt")
    assert reshard.read_strategy("~/strategy.ckpt").tensors.keys() == STRATEGY.tensors.keys()
    opened.picture("layers.0.w").save("~/picture.svg")
    reshard.demo("mindspore", "~/demo")
    reshard.write_manifest(reshard.make_manifest("~/out"), "~/sums.json")
    assert call("convert", "~/whole.safetensors", "~/by_command", "--to", "hf").exit_code == 0
    written = {"out", "plan.json", "again", "strategy.ckpt", "picture.svg", "demo", "sums.json", "by_command"}
    assert written <= {path.name for path in tmp_path.iterdir()}
    assert not (tmp_path / "~").exists()


# --- warnings ---


@pytest.fixture
def stale(tmp_path: Path) -> Path:
    """Ranks of which only one has the newest step, so that opening them warns."""
    full = {"w": np.arange(48 * 16).reshape(48, 16).astype(np.float32)}
    strategy = reshard.Strategy.of({"w": STRATEGY.tensors["w"][0].layout})
    root = write_ranks(tmp_path / "stale", full, strategy, name="net-2_5")
    save_file(full, root / "rank_1" / "net-3_1.safetensors")
    reshard.write_strategy(strategy, tmp_path / "strategy.ckpt")
    return root


def test_a_warning_points_at_the_line_of_the_user(stale: Path, tmp_path: Path) -> None:
    strategy = tmp_path / "strategy.ckpt"
    with pytest.warns(reshard.ReshardWarning) as caught:
        opened = reshard.open(stale, strategy=strategy)
    assert [str(each.message) for each in caught] == list(opened.warnings)
    assert [(each.filename, each.lineno) for each in caught] == [(__file__, line_of("opened = reshard.open(stale"))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what was said once is not said again
        plan = reshard.plan(opened, format="hf")
        plan.run(tmp_path / "out")
        opened.scale("w", factor=2.0)
        reshard.convert(opened, tmp_path / "zarr", to="zarr")
    with pytest.warns(reshard.ReshardWarning) as caught:
        report = reshard.convert(stale, tmp_path / "hf", source_strategy=strategy, to="hf")
    assert [str(each.message) for each in caught] == list(report.warnings)
    assert {each.filename for each in caught} == {__file__}


def test_a_command_prints_a_warning_once(stale: Path, tmp_path: Path) -> None:
    arguments = ["convert", stale, tmp_path / "out", "--source-strategy", tmp_path / "strategy.ckpt", "--to", "hf"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = call(*arguments)
    assert result.exit_code == 0
    assert result.stderr.count("3_1") == 1


def line_of(text: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip().startswith(text))


# --- the log ---


def test_the_log_tells_of_files_that_are_resumed(
    source: reshard.Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = reshard.plan(source, TARGET)
    stopped(plan, tmp_path / "out", checksums=True)
    with caplog.at_level(logging.INFO, "reshard"):
        report = plan.run(tmp_path / "out")
    assert report.resumed
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert any(str(tmp_path / "out") in message for message in messages)
    assert len(messages) <= len(report.files)
    caplog.clear()
    with caplog.at_level(logging.INFO, "reshard"):
        plan.run(tmp_path / "out")
    assert len(caplog.records) == len(report.files)


# --- errors in IPython ---


def printed(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "TERM": "dumb"}
    )
    return done.stdout + done.stderr


def test_an_error_in_ipython_is_its_own_lines(whole: Path) -> None:
    code = f"""
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors="nocolor")
shell.run_cell("import reshard\\nsource = reshard.open({str(whole)!r})", store_history=True)
for cell in ("reshard.open('nowhere')", "1\\nsource['layers.*']", "%tb"):
    print("====")
    shell.run_cell(cell, store_history=True)
"""
    _, path, name, whole_stack = printed(code).split("====\n")
    lines = name.strip().splitlines()
    assert len(lines) <= 3
    assert lines[0].endswith("line 2: source['layers.*']")
    assert "In[3]" in lines[0]
    assert lines[1].startswith("MissingNameError: ")
    assert "sel('layers.*')" in lines[2]
    assert len(path.strip().splitlines()) <= 3
    assert "checkpoints.py" in whole_stack
    assert len(whole_stack.splitlines()) > 10
