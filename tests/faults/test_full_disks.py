"""A real small disk that another program fills in the middle of a first run: what is written is kept."""

from __future__ import annotations

import errno
import os
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import plan_with
from safetensors.numpy import save_file

import reshard
from reshard.core.plan import budget
from reshard.errors import BudgetError
from reshard.formats.dcp.names import DCP
from reshard.formats.sets.options import HuggingFaceSet
from reshard.formats.zarr.layout import ZarrGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

FULL = {f"layers.{number}.weight": np.full((64, 64), number, np.float32) for number in range(300)}

FORMATS: dict[str, Callable[[], Any]] = {
    "small files": lambda: HuggingFaceSet(max_shard_size=200_000),
    "one file": lambda: HuggingFaceSet(max_shard_size=10**9),
    "dcp": DCP,
    "zarr": ZarrGroup,
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(path)], check=False, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no small tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass


@pytest.mark.parametrize("allocates", [True, False])
@pytest.mark.parametrize("written", FORMATS)
def test_what_is_written_is_kept(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, allocates: bool
) -> None:
    """The log of a first run had no room, so that all was lost; or a run whose files had room failed for its log."""
    monkeypatch.setattr(budget, "TASK_BYTES", 100_000)
    real, target = os.posix_fallocate, disk / "out"

    def allocate(descriptor: int, offset: int, size: int) -> None:
        if not allocates and ".jsonl" not in os.readlink(f"/proc/self/fd/{descriptor}"):  # noqa: PTH115
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        real(descriptor, offset, size)

    def progress(event: reshard.Progress) -> None:
        if event.written > event.total / 2 and not (disk / "filler").exists():
            fill(disk / "filler")

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    (tmp_path / "src").mkdir()
    save_file(FULL, tmp_path / "src" / "model.safetensors")
    plan = plan_with(reshard.open(tmp_path / "src"), files=FORMATS[written]())
    if allocates:
        assert plan.run(target, progress=progress, threads=1).resumed == 0
    else:
        with pytest.raises(BudgetError):
            plan.run(target, progress=progress, threads=1)
    (disk / "filler").unlink()
    assert plan.run(target).resumed >= plan.stats.bytes_written / 2
    again = reshard.open(target)
    assert set(again) == set(FULL)
    for name, array in FULL.items():
        assert np.array_equal(again[name].compute(), array)
