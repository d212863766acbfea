"""Ranges that tasks prefetch for later ones: of files whose gaps other tasks read, each byte once and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import write_file

import reshard
from reshard.core.model.entries import merged
from reshard.core.plan import budget
from reshard.core.storage import page_cache
from reshard.core.storage.local import LocalStore

if TYPE_CHECKING:
    from pathlib import Path

LAYERS, ROWS, COLUMNS = 6, 20, 30
STACKS = {
    name: np.random.default_rng(n).standard_normal((ROWS, LAYERS, COLUMNS)).astype(np.float32)
    for n, name in enumerate(("a", "b", "c"))
}
RULES = {
    "reshard-rules": 1,
    "sides": ["stacked", "layers"],
    "rules": [
        {"stacked": {"transpose": name, "by": "l", "at": 1}, "layers": f"layers.{{l}}.{name}"} for name in STACKS
    ],
}
Hint = tuple[str, int, int]


@pytest.fixture
def hints(monkeypatch: pytest.MonkeyPatch) -> list[Hint]:
    """The ranges that are prefetched, by a plan of one task for each layer."""
    monkeypatch.setattr(budget, "TASK_BYTES", ROWS * COLUMNS * 4)
    found: list[Hint] = []
    monkeypatch.setattr(LocalStore, "prefetch", lambda _store, *hint: found.append(hint))
    return found


def run(folder: Path, threads: int = 1, **options: Any) -> tuple[str, reshard.Checkpoint]:
    path = write_file(folder / "in.safetensors", STACKS)
    plan = reshard.plan(reshard.open(path), rules=RULES, to="safetensors", threads=threads or None)
    plan.run(folder / "out", fsync=False, client=None if threads else "synchronous", **options)
    made = reshard.open(folder / "out")
    for name in made:
        _, layer, stack = name.split(".")
        assert (made[name].compute() == STACKS[stack][:, int(layer)].T).all()
    return str(path), made


@pytest.mark.parametrize("threads", [0, 1, 2, 5])
def test_stacks_are_prefetched_once(tmp_path: Path, hints: list[Hint], threads: int) -> None:
    path, made = run(tmp_path, threads)
    assert len(made) == LAYERS * len(STACKS)
    assert {hint[0] for hint in hints} == {path}
    spans = sorted((offset, offset + nbytes) for _, offset, nbytes in hints)
    total = sum(array.nbytes for array in STACKS.values())
    assert sum(end - begin for begin, end in spans) == total
    assert sum(end - begin for begin, end in merged(spans)) == total


def test_small_reads_that_miss_are_prefetched_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the first is not in the page cache, the others are asked for before it is waited for."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(page_cache, "prefetch_pages", lambda _fd, offset, nbytes: asked.append((offset, nbytes)))
    monkeypatch.setattr(page_cache.Glances, "read", lambda *_: 0)
    content = np.arange(100 * 50, dtype=np.int16).reshape(100, 50)
    path = tmp_path / "a"
    path.write_bytes(content.tobytes())
    out = np.zeros((100, 3), np.int16)
    requests = [(str(path), row * 100 + 8, out[row].view(np.uint8).data) for row in range(100)]
    LocalStore().read(requests[:3])
    assert not asked  # few are read one by one
    for store in (LocalStore(), page_cache.ReadSpans(LocalStore())):
        asked.clear()
        out[:] = 0
        store.read(requests)
        assert (out == content[:, 4:7]).all()
        assert asked == [(row * 100 + 8, 6) for row in range(100)]
