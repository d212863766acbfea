"""The page cache: glances that leave nothing in it, what is dropped of it, when the disk begins and is waited for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from checkpoints import tree
from eight_ranks import TARGET, small_tasks, source
from refusals import refused
from stores import read, store

import reshard
from reshard.core.run import tasks
from reshard.core.storage.base import PARTIAL
from reshard.core.storage.page_cache import sync_file_range
from reshard.errors import SourceError

if TYPE_CHECKING:
    from faulty import Faults

    from reshard.core.storage.local import LocalStore

__all__ = ["small_tasks", "source", "store"]  # fixtures, for pytest to find

TRIES = 20  # the kernel keeps a page that it uses itself just then, as to write others to the disk


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


def evict(path: Path) -> None:
    """Leave nothing of a file in the page cache; skip where the file system does not, as tmpfs, or cannot tell."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if is_cached(path) is not False:
            pytest.skip("the file system keeps it, or cannot tell")
        file.read(1)  # which looking may have begun
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("how", ["read", "compared"])
def test_glances_at_a_cold_file_leave_nothing_in_the_page_cache(store: LocalStore, tmp_path: Path, how: str) -> None:
    path, content = tmp_path / "a", os.urandom(1 << 20)

    def glance() -> set[tuple[str, int]]:
        if how == "read":
            assert read(store, path, 700_000, 4096) == content[700_000:704_096]
        else:
            assert store.holds(str(path), [(700_000, content[700_000:704_096])])
        return set(store._glances.misses)

    path.write_bytes(content)
    for _ in range(TRIES):
        evict(path)
        found = [glance()]
        store.drop_glances({str(path)})
        found.append(glance())  # from the disk again
        if all(found):
            break
    assert found == [{(str(path), 10)}] * 2
    store._glances.misses.clear()
    assert not glance()  # in the cache now
    store.drop_glances({str(path)})
    assert not glance()  # and left there, since it had it


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


def test_a_part_of_a_file_leaves_the_page_cache(store: LocalStore, tmp_path: Path) -> None:
    path, content = tmp_path / "a", os.urandom(8 << 20)
    middle = 4 << 20
    path.write_bytes(content)
    for _ in range(TRIES):
        evict(path)
        assert read(store, path, 0, len(content)) == content
        store.drop_cache(str(path), 2_000_000, 6_500_000)
        assert (
            read(store, path, 0, 4096) + read(store, path, 8_000_000, 4096)
            == content[:4096] + content[8_000_000:][:4096]
        )
        assert not store._glances.misses
        assert read(store, path, middle, 100) == content[middle:][:100]
        if store._glances.misses:
            break
    assert store._glances.misses == {(str(path), middle >> 16)}


def test_writeback_is_started(store: LocalStore, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    store.create(store.unfinished(path), 1 << 20)
    store.sink(store.unfinished(path), sized=True).write_at(0, memoryview(os.urandom(1 << 20)))
    start = sync_file_range()
    assert (start is not None) == (sys.platform == "linux")
    if start is not None:
        with Path(path + PARTIAL).open("rb+") as file:
            assert start(file.fileno(), 0, 0, 2) == 0
    store.start_writeback(store.unfinished(path))
    store.discard(store.unfinished(path))


def test_the_disk_begins_while_more_is_moved(
    source: reshard.Checkpoint, tmp_path: Path, small_tasks: None, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each task that wrote much of its files has them written back; without fsync nobody asks for that."""
    made = reshard.plan(source, TARGET)
    made.run(tmp_path / "not asked", fsync=False)
    assert not faults.of("start_writeback")
    made.run(tmp_path / "asked")
    begun = [call.path for call in faults.of("start_writeback")]
    assert set(begun) == {f"{tmp_path}/asked/{file.path}" for file in made._record.files}
    assert len(begun) > len(made._record.files)
    monkeypatch.setattr(tasks, "WRITEBACK_FILES", len(made._record.files) - 1)
    faults.clear()
    made.run(tmp_path / "many")
    assert not faults.of("start_writeback")
    monkeypatch.undo()
    monkeypatch.setattr("reshard.core.storage.page_cache.sync_file_range", lambda: None)  # another system
    made.run(tmp_path / "elsewhere")
    assert tree(tmp_path / "elsewhere") == tree(tmp_path / "asked") == tree(tmp_path / "many")


@pytest.mark.parametrize("fsync", [True, False])
def test_the_disk_is_waited_for_now_and_then_where_the_page_cache_is_to_stay_free(
    source: reshard.Checkpoint, tmp_path: Path, small_tasks: None, monkeypatch: pytest.MonkeyPatch, fsync: bool
) -> None:
    fdatasync, waited = os.fdatasync, 0

    def counted(fd: int) -> None:
        nonlocal waited
        waited += 1
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", counted)
    made = reshard.plan(source, TARGET)
    for every, times in ((len(made._record.tasks) + 1, 1), (len(made._record.tasks), 2)):
        monkeypatch.setattr(tasks, "SYNC_TASKS", every)
        waited = 0
        made.run(tmp_path / f"{every}", drop_cache=True, fsync=fsync)
        assert waited == times * len(made._record.files)


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
