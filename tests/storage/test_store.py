"""The store: ranges of files by path, few of them open."""

from __future__ import annotations

import errno
import os
import pickle
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from refusals import refused
from safetensors.numpy import save_file
from stores import read, store

from reshard.core.storage.base import PARTIAL
from reshard.core.storage.local import LocalStore, local_store
from reshard.errors import BudgetError, SourceError, TargetError

__all__ = ["store"]  # a fixture, for pytest to find


def open_files(directory: Path) -> int:
    """Return how many files in a directory this process has open."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            count += link.readlink().is_relative_to(directory)
    return count


def listing(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def test_a_file_is_written_beside_and_appears_whole(store: LocalStore, tmp_path: Path) -> None:
    path = tmp_path / "rank_0" / "a.ckpt"  # the directory is made too
    store.create(store.unfinished(str(path)), 6)
    store.sink(store.unfinished(str(path)), sized=True).write_at(3, memoryview(b"def"))
    store.sink(store.unfinished(str(path)), sized=True).write_at(0, memoryview(b"abc"))
    assert listing(path.parent) == ["a.ckpt" + PARTIAL]
    store.publish(store.unfinished(str(path)), str(path), durable=True)
    assert listing(path.parent) == ["a.ckpt"]
    assert path.read_bytes() == b"abcdef"
    assert store.size(str(path)) == 6
    assert read(store, path, 2, 3) == b"cde"


def test_what_was_not_written_is_zero(store: LocalStore, tmp_path: Path) -> None:
    path = tmp_path / "a"
    store.create(store.unfinished(str(path)), 4)
    store.sink(store.unfinished(str(path)), sized=True).write_at(1, memoryview(b"x"))
    store.publish(store.unfinished(str(path)), str(path), durable=False)
    assert path.read_bytes() == b"\0x\0\0"


def test_a_discarded_file_is_gone_and_may_be_discarded_twice(store: LocalStore, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    store.create(store.unfinished(path), 4)
    store.sink(store.unfinished(path), sized=True).write_at(0, memoryview(b"abcd"))
    store.discard(store.unfinished(path))
    store.discard(store.unfinished(path))
    assert listing(tmp_path) == []


def test_a_file_that_is_made_again_keeps_what_is_in_it(store: LocalStore, tmp_path: Path) -> None:
    # A cluster runs the tasks of a lost worker again, while others go on writing.
    path = tmp_path / "a"
    Path(f"{path}{PARTIAL}").write_bytes(b"remains that are longer")
    store.create(store.unfinished(str(path)), 8)
    store.sink(store.unfinished(str(path)), sized=True).write_at(0, memoryview(b"written"))
    store.create(store.unfinished(str(path)), 8)
    store.publish(store.unfinished(str(path)), str(path), durable=False)
    assert path.read_bytes() == b"written" + b" "


def test_a_partial_file_that_is_a_link_to_a_finished_one_is_made_anew(store: LocalStore, tmp_path: Path) -> None:
    # A run that was killed between linking a replica and giving it its name leaves one.
    (tmp_path / "finished").write_bytes(b"finished")
    os.link(tmp_path / "finished", tmp_path / f"a{PARTIAL}")
    store.create(store.unfinished(str(tmp_path / "a")), 3)
    store.sink(store.unfinished(str(tmp_path / "a")), sized=True).write_at(0, memoryview(b"new"))
    store.publish(store.unfinished(str(tmp_path / "a")), str(tmp_path / "a"), durable=False)
    assert (tmp_path / "a").read_bytes() == b"new"
    assert (tmp_path / "finished").read_bytes() == b"finished"


def test_a_partial_file_that_somebody_removed_is_not_written_blindly(store: LocalStore, tmp_path: Path) -> None:
    # A notebook: a run was interrupted, the user removed its folder, the same process runs again.
    path = tmp_path / "a"
    store.create(store.unfinished(str(path)), 3)
    store.sink(store.unfinished(str(path)), sized=True).write_at(0, memoryview(b"old"))
    Path(f"{path}{PARTIAL}").unlink()
    store.create(store.unfinished(str(path)), 3)
    store.sink(store.unfinished(str(path)), sized=True).write_at(0, memoryview(b"new"))
    store.publish(store.unfinished(str(path)), str(path), durable=False)
    assert path.read_bytes() == b"new"


def test_a_file_that_was_replaced_is_seen_anew_when_its_size_is_asked(store: LocalStore, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    assert read(store, path, 0, 3) == b"old"
    (tmp_path / "b").write_bytes(b"newer")
    (tmp_path / "b").replace(path)
    assert store.size(str(path)) == 5
    assert read(store, path, 0, 5) == b"newer"


def test_short_reads_and_writes_go_on_where_they_stopped(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, *how: preadv(fd, [buffers[0][:3]], *how))
    monkeypatch.setattr(os, "pwrite", lambda fd, buffer, at: pwrite(fd, buffer[:2], at))
    path = tmp_path / "a"
    content = bytes(range(100))
    store.create(store.unfinished(str(path)), 100)
    store.sink(store.unfinished(str(path)), sized=True).write_at(0, memoryview(content))
    store.publish(store.unfinished(str(path)), str(path), durable=False)
    assert read(store, path, 0, 100) == content
    assert read(store, path, 95, 5) == content[95:]


def test_a_file_that_ends_early_names_the_byte(store: LocalStore, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    with refused(SourceError, "truncated", "3 bytes of 8"):
        read(store, path, 1, 7)
    assert read(store, path, 3, 0) == b""


def test_a_file_that_is_not_there(store: LocalStore, tmp_path: Path) -> None:
    with refused(SourceError, "not-found", "/a"):
        store.size(str(tmp_path / "a"))
    with refused(TargetError, "cannot-write", "a.partial"):
        store.sink(store.unfinished(str(tmp_path / "a")), sized=True).write_at(0, memoryview(b"x"))
    with refused(TargetError, "cannot-write", "a.partial"):
        store.publish(store.unfinished(str(tmp_path / "a")), str(tmp_path / "a"), durable=False)


def test_a_directory_is_not_a_file(store: LocalStore, tmp_path: Path) -> None:
    with refused(SourceError, "not-a-file", tmp_path):
        read(store, tmp_path, 0, 1)
    (tmp_path / f"a{PARTIAL}").mkdir()
    with refused(TargetError, "cannot-write", "a.partial"):
        store.create(store.unfinished(str(tmp_path / "a")), 1)


def test_a_file_where_a_directory_should_be(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "rank_0").write_bytes(b"")
    with refused(TargetError, "cannot-write"):
        store.create(store.unfinished(str(tmp_path / "rank_0" / "a")), 1)


def test_a_link_is_not_followed(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / f"a{PARTIAL}").symlink_to(tmp_path / "precious")
    with refused(TargetError, "cannot-write"):
        store.create(store.unfinished(str(tmp_path / "a")), 1)
    assert (tmp_path / "precious").read_bytes() == b"precious"


def fail(code: int) -> object:
    def raising(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    return raising


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_found_at_once_and_nothing_is_left(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", fail(code))
    with refused(BudgetError, "no-space", "a.partial", "4.1 kB") as caught:
        store.create(store.unfinished(str(tmp_path / "a")), 4096)
    sizes = re.findall(r"[0-9.]+ [kMGT]?B\b", str(caught.value))
    assert (len(sizes) == 2) == (code == errno.ENOSPC)  # a quota or a limit says nothing of the disk
    assert listing(tmp_path) == []


def test_a_real_file_system_refuses_what_it_cannot_hold(store: LocalStore, tmp_path: Path) -> None:
    with pytest.raises(BudgetError) as caught:
        store.create(store.unfinished(str(tmp_path / "a")), 1 << 61)
    assert caught.value.code in {"no-space", "file-too-large"}
    assert listing(tmp_path) == []


def test_a_limit_of_file_sizes_is_no_full_disk(tmp_path: Path) -> None:
    """`ulimit -f` limits one file, as some file systems do; there may be room for many."""
    save_file({"w": np.zeros(1 << 16, np.uint8)}, tmp_path / "w.safetensors")
    for words in (["convert", "w.safetensors", "out", "--to=hf"], ["plan", "w.safetensors", "--to=hf", "-o", "p"]):
        limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({1 << 9}, {1 << 9}))"
        code = f"{limit}; import sys; sys.argv[0] = 'reshard'; from reshard.cli.main import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 5
        assert "512 B" in done.stderr
        assert "no room" not in done.stderr
        assert not (tmp_path / words[-1]).exists()


def test_a_disk_that_fills_while_writing(store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "a")
    store.create(store.unfinished(path), 4)
    monkeypatch.setattr(os, "pwrite", fail(errno.ENOSPC))
    with refused(BudgetError, "no-space", "4 B"):
        store.sink(store.unfinished(path), sized=True).write_at(0, memoryview(b"abcd"))
    monkeypatch.setattr(os, "pwrite", fail(errno.EIO))
    with refused(TargetError, "cannot-write", "Input/output"):
        store.sink(store.unfinished(path), sized=True).write_at(0, memoryview(b"abcd"))
    monkeypatch.setattr(os, "fsync", fail(errno.EIO))
    with refused(TargetError, "cannot-write", "Input/output"):
        store.sync(store.unfinished(path))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_allocation_sets_the_size(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", fail(code))
    store.create(store.unfinished(str(tmp_path / "a")), 4096)
    assert (tmp_path / f"a{PARTIAL}").stat().st_size == 4096


def test_a_source_that_cannot_be_read_names_the_byte(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    monkeypatch.setattr(os, "preadv", fail(errno.EIO))
    with refused(SourceError, "cannot-read", "byte 1", "Input/output"):
        read(store, tmp_path / "a", 1, 2)


def test_many_threads_and_files_share_few_handles(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}" for number in range(40)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 64)
    store = LocalStore(most_open=4)
    most, lock = 0, threading.Lock()

    def work(step: int) -> None:
        nonlocal most
        number = step * 7 % 40
        assert read(store, paths[number], step % 60, 4) == bytes([number]) * 4
        target = tmp_path / f"t{step}"
        store.create(store.unfinished(str(target)), 8)
        store.sink(store.unfinished(str(target)), sized=True).write_at(0, memoryview(step.to_bytes(8, "big")))
        store.publish(store.unfinished(str(target)), str(target), durable=False)
        with lock:
            most = max(most, open_files(tmp_path))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(400)))
    # 4 kept, and up to two more for each of 8 threads in the middle of something.
    assert 4 <= most <= 4 + 2 * 8
    assert [int.from_bytes((tmp_path / f"t{step}").read_bytes(), "big") for step in range(400)] == list(range(400))
    store.close()
    assert open_files(tmp_path) == 0


def test_the_files_used_last_stay_open(store: LocalStore, tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / str(number)).write_bytes(b"x")
    for number in [0, 1, 2, 3, 0, 4, 5]:
        read(store, tmp_path / str(number), 0, 1)
    assert [Path(path).name for path, *_ in store.files.handles] == ["3", "0", "4", "5"]


def test_discarding_while_somebody_writes_closes_the_file_after_him(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "a")
    store.create(store.unfinished(path), 4)
    pwrite = os.pwrite

    def slow(fd: int, buffer: memoryview, at: int) -> int:
        store.discard(store.unfinished(path))
        return pwrite(fd, buffer, at)  # the handle is still good

    monkeypatch.setattr(os, "pwrite", slow)
    store.sink(store.unfinished(path), sized=True).write_at(0, memoryview(b"abcd"))
    assert listing(tmp_path) == []
    assert open_files(tmp_path) == 0


def test_a_store_travels_without_its_handles(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    read(store, tmp_path / "a", 0, 1)
    other = pickle.loads(pickle.dumps(store))  # noqa: S301 -- our own
    assert not other.files.handles
    assert read(other, tmp_path / "a", 0, 3) == b"abc"
    other.close()
    assert local_store() is local_store()
