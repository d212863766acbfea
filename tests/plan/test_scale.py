"""Planning and looking at scale, on sparse files with real headers; no data is read.

Bounds are in processor seconds with room for a busy machine. Memory is that of whole processes and counts indexes, plan
and graph; these bounds are strict.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import hollow
import pytest
from measure import RESHARD, measured, planning
from samples import sampled

if TYPE_CHECKING:
    from pathlib import Path

ROOM = 6
"""How much slower a busy machine may be than the promise is for."""


@pytest.fixture(scope="module")
def sixty_four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """64 ranks of 10,000 tensors, to become 48: the source and both strategies."""
    return hollow.prepare(tmp_path_factory.mktemp("scale"), 10_000, (8, 8, 1), (6, 8, 1))


def test_ten_thousand_tensors_over_64_ranks_are_planned_in_2_seconds_and_200_mb(sixty_four: tuple[Path, ...]) -> None:
    took = planning(*sixty_four)
    assert took.files == 48
    assert took.cpu < 2 * ROOM
    assert took.peak < 200e6
    assert took.nodes <= 20_000


def test_the_whole_command_tells_what_it_would_do(sixty_four: tuple[Path, ...]) -> None:
    source, before, after = map(str, sixty_four)
    strategies = ["--source-strategy", before, "--target-strategy", after]
    took = measured(*RESHARD, "transform", source, f"{source}.out", *strategies, "--dry-run", "--json")
    assert took.code == 0, took.err
    told = json.loads(took.out)
    assert (told["tensors"], told["source_files"], told["target_files"]) == (10_000, 64, 48)
    assert told["read_amplification"] == 1
    assert took.cpu < 2 * ROOM
    assert took.peak < 200e6
    assert told["peak_memory"] < 200e6


@pytest.mark.parametrize(
    ("options", "strategy"), sampled([([], True), (["--json"], True), ([], False), (["--json"], False)], 3)
)
def test_inspect_takes_3_seconds(sixty_four: tuple[Path, ...], options: list[str], strategy: bool) -> None:
    source, before, _ = map(str, sixty_four)
    took = measured(*RESHARD, "inspect", source, *(["--source-strategy", before] if strategy else []), *options)
    assert took.code == 0, took.err
    assert took.cpu < 3 * ROOM
    assert took.peak < 200e6
    if options:
        told = json.loads(took.out)
        assert len(told["files"]) == 64
        assert len(told["tensors"] if strategy else told["groups"][0]["tensors"]) == 10_000
    else:
        assert "64 safetensors files, 64 ranks (0-63)" in took.out
        assert "model.layers.{0-369}.feed_forward.w2.weight" in took.out


@pytest.mark.slow
def test_inspect_of_ckpt_files_takes_as_little(tmp_path: Path) -> None:
    source, before, _ = map(str, hollow.prepare(tmp_path, 10_000, (8, 8, 1), (6, 8, 1), "ckpt"))
    measured(*RESHARD, "inspect", source)  # 640,000 heads from the disk
    took = measured(*RESHARD, "inspect", source, "--source-strategy", before)
    assert took.code == 0, took.err
    assert took.own < 3 * ROOM  # reading 640,000 heads takes the kernel 3 to 30 s
    assert took.peak < 200e6


@pytest.mark.slow
def test_a_thousand_tensors_from_4096_to_3072_ranks_in_30_seconds_and_1_gb(tmp_path: Path) -> None:
    """Tensor, optimizer and pipeline parallel: 8 stages of 64 x 8 become 6; the graph is included."""
    took = planning(*hollow.prepare(tmp_path, 1_000, (64, 8, 8), (64, 8, 6)))
    assert took.files == 3072
    assert took.cpu < 30
    assert took.peak < 1e9
    assert took.nodes <= 20_000


@pytest.mark.slow
def test_twice_the_ranks_cost_less_than_three_times(tmp_path: Path) -> None:
    costs = []
    for stages in (2, 4):
        before, after = (16, 8, stages), (12, 8, stages)
        took = planning(*hollow.prepare(tmp_path / f"{stages}", 1_000, before, after))
        assert took.files == 96 * stages
        costs.append(took)
    assert costs[1].cpu < 3 * costs[0].cpu + 0.1
    assert costs[1].peak < 3 * costs[0].peak


@pytest.mark.slow
def test_twice_the_tensors_cost_less_than_three_times(tmp_path: Path) -> None:
    costs = [planning(*hollow.prepare(tmp_path / f"{n}", n, (8, 8, 1), (6, 8, 1))) for n in (2_000, 4_000)]
    assert costs[1].cpu < 3 * costs[0].cpu + 0.1
    assert costs[1].peak < 3 * costs[0].peak


@pytest.mark.parametrize("what", ["import reshard", "from reshard.cli.main import main; main(['--help'])"])
def test_neither_import_nor_help_imports_numpy_or_dask(what: str) -> None:
    script = f"""
import sys
try:
    {what}
except SystemExit as end:
    assert not end.code
print(sorted({{"numpy", "dask", "zarr", "distributed"}} & {{name.split(".")[0] for name in sys.modules}}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
