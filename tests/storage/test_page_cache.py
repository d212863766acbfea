"""The page cache: glances that leave nothing in it, what is dropped of it, when the disk begins and is waited for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints import tree
from eight_ranks import TARGET, small_tasks, source
from refusals import refused
from stores import read, store

import reshard
from reshard.errors import SourceError

if TYPE_CHECKING:
    import pytest

    from reshard.core.storage.local import LocalStore

__all__ = ["small_tasks", "source", "store"]  # fixtures, for pytest to find


def is_cached(path: Path) -> bool | None:
    """Return whether the page cache has the beginning of a file; None where that is not known, or is memory."""
    with path.open("rb") as file:
        try:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return None
    filesystem = subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True, check=True).stdout
    return None if filesystem.strip() == "tmpfs" else True


def test_glances_where_the_cache_cannot_be_asked(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reshard.core.storage.page_cache._NOWAIT", 1 << 30)  # a flag that no kernel knows
    path = tmp_path / "a"
    path.write_bytes(b"abcdef")
    assert read(store, path, 2, 3) == b"cde"
    assert store.holds(str(path), [(0, b"ab"), (4, b"ef")])
    assert not store.holds(str(path), [(0, b"ab"), (4, b"e!")])
    assert not store.holds(str(path), [(4, b"efg")])
    with refused(SourceError, "truncated", "6 bytes of 7"):
        read(store, path, 4, 3)


def test_the_page_cache_is_left_as_it_was(source: reshard.Checkpoint, tmp_path: Path, small_tasks: None) -> None:
    made = reshard.plan(source, TARGET)
    made.run(tmp_path / "kept")
    for _ in range(5):  # the kernel keeps a page that it uses itself just then
        made.run(tmp_path / "dropped", drop_cache=True, overwrite=True, restart=True)
        files = [Path(file.path) for file in source._record.files] + list((tmp_path / "dropped").rglob("*.ckpt"))
        assert len(files) == 8 + 6
        cached = [path for path in files if is_cached(path)]
        if not cached:
            break
    assert not cached
    assert tree(tmp_path / "dropped") == tree(tmp_path / "kept")
