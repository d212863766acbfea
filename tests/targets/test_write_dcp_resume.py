"""Runs to distributed checkpoints that are stopped: what they wrote is of use to the next one if its sums are right."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from checkpoints import numbers, write_file
from stopped_runs import small_tasks, stopped  # noqa: F401 -- a fixture for all tests here
from written_dcp import assert_whole

import reshard

if TYPE_CHECKING:
    from pathlib import Path

FULL = numbers({f"w{number}": (16, 8) for number in range(6)})


@pytest.fixture
def plan(tmp_path: Path) -> reshard.Plan:
    checkpoint = reshard.open(write_file(tmp_path / "src.safetensors", FULL))
    return reshard.plan(checkpoint, files=reshard.DCP(max_shard_size=512))


def unfinished(target: Path) -> list[Path]:
    return sorted(target.glob("*.partial"))


@pytest.fixture(params=["tensor", "file"])
def stopped_at(request: pytest.FixtureRequest, plan: reshard.Plan, tmp_path: Path) -> str:
    """Stop a run when it has written two files, and return its partition."""
    made = len(plan._record.files) if request.param == "tensor" else 0  # these receipts come first
    stopped(plan, tmp_path / "out", tasks=made + 2, partition=request.param)
    return str(request.param)


@pytest.mark.parametrize("where", ["sum", "sum of the directory", "contents"])
def test_a_file_with_a_wrong_byte_is_written_again(
    where: str, plan: reshard.Plan, tmp_path: Path, stopped_at: str
) -> None:
    number, path = next((n, p) for p in unfinished(tmp_path / "out") for n in range(6) if f"__0_{n}." in p.name)
    (sums,) = plan._record.files[number].layout.crcs
    place = {"sum": sums.places[0], "sum of the directory": sums.places[1], "contents": sums.begin}[where]
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    plan.run(tmp_path / "out", threads=1, partition=stopped_at)
    assert_whole(tmp_path / "out", FULL)


@pytest.mark.parametrize("tasks", range(2, 10))
def test_sums_of_what_two_runs_wrote(tasks: int, tmp_path: Path) -> None:
    """A run knows the sums of what it writes; of what is there already it must look."""
    full = numbers({"w": (32, 32)})
    plan = reshard.plan(reshard.open(write_file(tmp_path / "src.safetensors", full)), files=reshard.DCP())
    stopped(plan, tmp_path / "out", tasks=tasks)
    report = plan.run(tmp_path / "out")
    assert report.resumed == (tasks - 1) * 512  # two files are made first, and what comes with the last is noted
    assert_whole(tmp_path / "out", full)
    shutil.rmtree(tmp_path / "out" / ".reshard")  # with it, the source would be compared and no sum
    found = reshard.verify(tmp_path / "out")
    assert found.equal
    assert found.bytes_read > 32 * 32 * 4
