"""`reshard inspect`: with a strategy and without, of one file, and as wide as the terminal is."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoints import write_file
from commands import Case, call, done
from refusals import failed

if TYPE_CHECKING:
    from pathlib import Path


def test_inspect_with_a_strategy(case: Case) -> None:
    result = done("inspect", case.source, "--source-strategy", case.source_strategy)
    assert "net.layer1.weight                1  float32  [16, 32]  2.0 kB" in result.stdout
    assert result.stderr == ""
    data = json.loads(done("inspect", case.source, "--source-strategy", case.source_strategy, "--json").stdout)
    assert data["ranks"] == list(range(8))
    weight = next(tensor for tensor in data["tensors"] if tensor["name"] == "net.layer1.weight")
    assert (weight["dtype"], weight["shape"], weight["nbytes"]) == ("float32", [16, 32], 2048)
    assert weight["layouts"][0]["dev_matrix"] == [2, 2, 2]
    assert weight["shards"][0] == {"start": [0, 0], "stop": [16, 16], "ranks": [0, 1, 4, 5]}


def test_inspect_without_a_strategy_shows_the_files(case: Case) -> None:
    result = done("inspect", case.source)
    assert "ranks 0-7: each 15 tensors" in result.stdout
    assert "[16, 16]" in result.stdout
    assert "--source-strategy shows whole tensors" in result.stderr
    data = json.loads(done("inspect", case.source, "--json").stdout)
    assert data["groups"][0]["ranks"] == list(range(8))


def test_inspect_one_file(case: Case) -> None:
    result = done("inspect", case.source / "rank_3" / "net.ckpt")
    assert "\n15 tensors, 11.9 kB\n" in result.stdout


def on_a_terminal(columns: int, *arguments: str | Path) -> str:
    """What a command writes to a terminal of so many columns."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "reshard", *map(str, arguments)],
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": str(columns)},
    )
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # Linux's way to say that the other side is closed
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    assert process.wait() == 0
    return shown.decode()


@pytest.mark.parametrize("columns", [60, 200])
def test_inspect_fits_the_terminal(case: Case, columns: int) -> None:
    shown = on_a_terminal(columns, "inspect", case.source, "--source-strategy", case.source_strategy)
    _, table, sums, _ = shown.replace("\r", "").split("\n\n")
    lines = [*table.splitlines(), *sums.splitlines()]
    assert all(len(line) <= columns for line in lines), max(lines, key=len)
    assert "columns / 2 × 4 copies" in shown
    assert ("moments.net.layer{1-2}.bias" in shown) == (columns > 60)
    files = on_a_terminal(columns, "inspect", case.source).splitlines()
    assert all(len(line) <= max(columns, 80) for line in files[3:])


def test_raw_shows_the_numbers_of_strategy_files(case: Case) -> None:
    command = ["inspect", case.source, "--source-strategy", case.source_strategy]
    assert "[2, 2, 2] map [-1, 1]" not in done(*command).stdout
    shown = done(*command, "--raw").stdout
    assert "[2, 2, 2] map [-1, 1]" in shown
    assert "layout: [extents of the device axes] map [the axis that cuts" in shown


def test_a_picture_has_the_ranks_of_each_block(case: Case) -> None:
    shown = done(
        "inspect", case.source, "--source-strategy", case.source_strategy, "--picture", "net.layer1.weight"
    ).stdout
    assert re.search("░ 0-1,4-5 ░+▓+ 2-3,6-7 ▓", shown)
    failed(
        2, "unknown-tensor", "inspect", case.source, "--source-strategy", case.source_strategy, "--picture",
        "net.layer1.weigth",
        places=("net.layer1.weigth",),
    )  # fmt: skip


def piped(columns: str | None, *arguments: str | Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    environment |= {} if columns is None else {"COLUMNS": columns}
    command = [sys.executable, "-m", "reshard", *map(str, arguments)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


LONG = "model." + "block." * 50 + "weight"


def test_a_pipe_has_whole_names_unless_columns_says_how_wide_it_is(tmp_path: Path) -> None:
    path = write_file(tmp_path / "net.safetensors", {LONG: np.zeros((1000, 4)), "w": np.zeros(3)})
    for columns in (None, "wide"):
        assert f"{LONG}      1  float64  [1000, 4]  32.0 kB\n" in piped(columns, "inspect", path)
    shown = piped("80", "inspect", path).splitlines()[2:]
    assert max(map(len, shown)) == 80
    assert shown[1].startswith("model.block.bl")
    assert shown[1].endswith("ck.weight      1  float64  [1000, 4]  32.0 kB")


HOSTILE = ['say "no"', "two\nlines", "a,b", "=1+1", "-x", "@y", "＝z", "\x1b[2J", "größe"]


def test_names_are_safe_data_in_csv(tmp_path: Path) -> None:
    path = write_file(tmp_path / "net.safetensors", {name: np.zeros((2, 3), np.float32) for name in HOSTILE})
    process = [sys.executable, "-m", "reshard", "inspect", path, "--csv"]
    raw = subprocess.run(process, check=True, capture_output=True).stdout.decode()
    assert raw.startswith("name,kind,dtype,shape,parameters,nbytes,layout,blocks,replicas\r\n")
    rows = list(csv.DictReader(io.StringIO(raw, newline="")))
    safe = [f"'{name}" if name[0] in "=-@＝" else name for name in HOSTILE]
    assert {row["name"] for row in rows} == set(safe)
    assert {(row["kind"], row["dtype"], row["shape"], row["parameters"], row["nbytes"]) for row in rows} == {
        ("weights", "float32", "[2, 3]", "6", "24")
    }
    assert "\x1b" not in on_a_terminal(80, "inspect", path, "--csv")


def test_csv_of_ranks_has_a_row_for_each_tensor_of_ranks_alike(case: Case) -> None:
    given = ["inspect", case.source, "--source-strategy", case.source_strategy]
    whole = list(csv.DictReader(io.StringIO(done(*given, "--csv").stdout)))
    assert len(whole) == 15
    assert whole[0] == {
        "name": "net.layer1.weight", "kind": "weights", "dtype": "float32", "shape": "[16, 32]", "parameters": "512",
        "nbytes": "2048", "layout": "[2, 2, 2] map [-1, 1]", "blocks": "2", "replicas": "4",
    }  # fmt: skip
    held = list(csv.DictReader(io.StringIO(done("inspect", case.source, "--csv").stdout)))
    assert {row["ranks"] for row in held} == {"0-7"}
    assert (held[0]["shape"], held[0]["nbytes"]) == ("[16, 16]", "1024")
    assert call("inspect", case.source, "--csv", "--json").exit_code == 2


@pytest.mark.parametrize("strategy", [True, False])
def test_sums_by_kind_are_the_sums_of_the_tensors(case: Case, strategy: bool) -> None:
    given = ["inspect", case.source, *(["--source-strategy", case.source_strategy] if strategy else [])]
    data = json.loads(done(*given, "--json").stdout)
    found = data if strategy else data["groups"][0]
    assert [(one["kind"], one["dtype"], one["tensors"]) for one in found["totals"]] == [
        ("weights", "float32", 6), ("moments", "float32", 6), ("other", "int32", 1), ("other", "float32", 2),
    ]  # fmt: skip
    assert sum(one["nbytes"] for one in found["totals"]) == sum(one["nbytes"] for one in found["tensors"])
    assert sum(one["parameters"] for one in found["totals"]) == sum(prod(one["shape"]) for one in found["tensors"])


def test_rows_are_sorted_and_chosen_in_each_form(case: Case) -> None:
    given = ["inspect", case.source, "--match", "moments.*", "--match", "learning_rate"]
    for more in ([], ["--source-strategy", case.source_strategy]):
        data = json.loads(done(*given, *more, "--sort", "bytes", "--json").stdout)
        found = data if more else data["groups"][0]
        sizes = [one["nbytes"] for one in found["tensors"]]
        assert len(sizes) == 7
        assert sizes == sorted(sizes, reverse=True)
        assert [one["kind"] for one in found["totals"]] == ["moments", "other"]
        shown = done(*given, *more, "--sort", "name").stdout
        assert "7 of 15 tensors, " in shown
        places = [
            shown.index(name) for name in ("learning_rate", "moments.net.layer{1-2}.bias", "moments.net.layer3.w")
        ]
        assert places == sorted(places)
        failed(
            2, "no-match", "inspect", case.source, *more, "--match", "moment.*", places=("'moment.*'", "'moments.*'")
        )


def test_a_file_of_a_rank_that_the_ledger_knows(case: Case, tmp_path: Path) -> None:
    done(
        "transform", case.source, tmp_path / "out",
        "--source-strategy", case.source_strategy, "--target-strategy", case.target_strategy,
    )  # fmt: skip
    shutil.move(tmp_path / "out" / "rank_1", tmp_path / "rank_1")
    lone = done("inspect", tmp_path / "rank_1")
    assert "is of rank 1 according to its path; its tensors are taken for whole ones" in lone.stderr
    for rank in (0, 3):
        shutil.rmtree(tmp_path / "out" / f"rank_{rank}")
    known = done("inspect", tmp_path / "out" / "rank_2", "--json")
    assert "is of rank 2, as the ledger of the directory above says" in known.stderr
    assert json.loads(known.stdout)["ranks"] == [2]
    file = next((tmp_path / "out" / "rank_2").iterdir())
    os.utime(file, (1, 1))
    assert "as the ledger of the directory above says" in done("inspect", file).stderr
    write_file(file, {"w": np.zeros(4, np.float32)}, "ckpt")
    assert "is of rank 2 according to its path; its tensors are taken" in done("inspect", file).stderr


@pytest.mark.parametrize("way", [["--format", "zarr"], ["--style", "huggingface"]], ids=["zarr", "huggingface"])
def test_what_is_whole_by_itself_has_sums_and_rows_at_a_url_too(case: Case, tmp_path: Path, way: list[str]) -> None:
    target = f"memory://looked-at/{tmp_path.name}"
    done("unify", case.source, target, "--source-strategy", case.source_strategy, *way)
    whole = json.loads(done("inspect", case.source, "--source-strategy", case.source_strategy, "--json").stdout)
    found = json.loads(done("inspect", target, "--json", "--sort", "name").stdout)
    sums, expected = ({tuple(one.values()) for one in data["totals"]} for data in (found, whole))
    assert sums == expected
    rows = list(csv.DictReader(io.StringIO(done("inspect", target, "--csv", "--sort", "name").stdout)))
    assert [row["name"] for row in rows] == [one["name"] for one in found["tensors"]]
    assert {row["layout"] for row in rows} == {""}
    shown = done("inspect", target, "--match", "net.*").stdout
    assert "\n6 of 15 tensors, 7.5 kB\n" in shown
    assert ("layout" in shown) == ("zarr" in way)  # chunks are the blocks of its source
