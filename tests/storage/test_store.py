"""The local store and sinks: ranges of files by path, few of them open; bytes that come in about their order."""

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
from reshard.core.storage.sinks import Ordered
from reshard.errors import BudgetError, SourceError, TargetError

__all__ = ["store"]  # fixtures, for pytest to find


def open_files(directory: Path) -> int:
    """Return how many files in a directory this process has open."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            count += link.readlink().is_relative_to(directory)
    return count


def listing(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def write(store: LocalStore, path: Path, offset: int, content: bytes) -> None:
    """Write into an unfinished file."""
    store.sink(store.unfinished(str(path)), sized=True).write_at(offset, memoryview(content))


def make(store: LocalStore, path: Path, size: int, *pieces: tuple[int, bytes]) -> None:
    """Write a file in pieces, and give it its name."""
    store.create(store.unfinished(str(path)), size)
    for offset, content in pieces:
        write(store, path, offset, content)
    store.publish(store.unfinished(str(path)), str(path), durable=False)


def test_a_file_is_written_beside_and_appears_whole(store: LocalStore, tmp_path: Path) -> None:
    path = tmp_path / "rank_0" / "a.ckpt"  # the directory is made too
    store.create(store.unfinished(str(path)), 8)
    write(store, path, 3, b"def")
    write(store, path, 0, b"abc")
    assert listing(path.parent) == ["a.ckpt" + PARTIAL]
    store.publish(store.unfinished(str(path)), str(path), durable=True)
    assert listing(path.parent) == ["a.ckpt"]
    assert path.read_bytes() == b"abcdef\0\0"
    assert store.size(str(path)) == 8
    assert read(store, path, 2, 3) == b"cde"


def test_a_discarded_file_is_gone_and_may_be_discarded_twice(store: LocalStore, tmp_path: Path) -> None:
    path = tmp_path / "a"
    store.create(store.unfinished(str(path)), 4)
    write(store, path, 0, b"abcd")
    for _ in range(2):
        store.discard(store.unfinished(str(path)))
    assert listing(tmp_path) == []


def test_a_file_that_is_made_again_keeps_what_is_in_it(store: LocalStore, tmp_path: Path) -> None:
    # A cluster runs the tasks of a lost worker again, while others go on writing.
    path = tmp_path / "a"
    Path(f"{path}{PARTIAL}").write_bytes(b"remains that are longer")
    store.create(store.unfinished(str(path)), 8)
    write(store, path, 0, b"written")
    make(store, path, 8)
    assert path.read_bytes() == b"written" + b" "


def test_a_partial_file_that_is_a_link_to_a_finished_one_is_made_anew(store: LocalStore, tmp_path: Path) -> None:
    # A run that was killed between linking a replica and giving it its name leaves one.
    (tmp_path / "finished").write_bytes(b"finished")
    os.link(tmp_path / "finished", tmp_path / f"a{PARTIAL}")
    make(store, tmp_path / "a", 3, (0, b"new"))
    assert (tmp_path / "a").read_bytes() == b"new"
    assert (tmp_path / "finished").read_bytes() == b"finished"


def test_a_partial_file_that_somebody_removed_is_not_written_blindly(store: LocalStore, tmp_path: Path) -> None:
    # A notebook: a run was interrupted, the user removed its folder, the same process runs again.
    path = tmp_path / "a"
    store.create(store.unfinished(str(path)), 3)
    write(store, path, 0, b"old")
    Path(f"{path}{PARTIAL}").unlink()
    make(store, path, 3, (0, b"new"))
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
    make(store, path, 100, (0, content))
    assert read(store, path, 0, 100) == content
    assert read(store, path, 95, 5) == content[95:]


def test_a_file_that_ends_early_names_the_byte(store: LocalStore, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    with refused(SourceError, "truncated", "3 bytes of 8"):
        read(store, path, 1, 7)
    assert read(store, path, 3, 0) == b""


def test_what_is_not_a_file_or_not_there(store: LocalStore, tmp_path: Path) -> None:
    with refused(SourceError, "not-found", "/a"):
        store.size(str(tmp_path / "a"))
    with refused(SourceError, "not-a-file", tmp_path):
        read(store, tmp_path, 0, 1)
    with refused(TargetError, "cannot-write", "a.partial"):
        write(store, tmp_path / "a", 0, b"x")
    with refused(TargetError, "cannot-write", "a.partial"):
        store.publish(store.unfinished(str(tmp_path / "a")), str(tmp_path / "a"), durable=False)


@pytest.mark.parametrize("what", ["a directory", "a link", "a file where a directory should be"])
def test_what_is_in_the_way_is_not_written(store: LocalStore, tmp_path: Path, what: str) -> None:
    """Nor is a link followed."""
    path = tmp_path / "rank_0" / "a"
    partial = Path(f"{path}{PARTIAL}")
    (tmp_path / "precious").write_bytes(b"precious")
    if what == "a file where a directory should be":
        path.parent.write_bytes(b"")
    else:
        path.parent.mkdir()
        partial.mkdir() if what == "a directory" else partial.symlink_to(tmp_path / "precious")
    with refused(TargetError, "cannot-write"):
        store.create(store.unfinished(str(path)), 1)
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


def test_a_file_system_refuses_what_it_cannot_hold(store: LocalStore, tmp_path: Path) -> None:
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
    path = tmp_path / "a"
    store.create(store.unfinished(str(path)), 4)
    monkeypatch.setattr(os, "pwrite", fail(errno.ENOSPC))
    with refused(BudgetError, "no-space", "4 B"):
        write(store, path, 0, b"abcd")
    monkeypatch.setattr(os, "pwrite", fail(errno.EIO))
    with refused(TargetError, "cannot-write", "Input/output"):
        write(store, path, 0, b"abcd")
    monkeypatch.setattr(os, "fsync", fail(errno.EIO))
    with refused(TargetError, "cannot-write", "Input/output"):
        store.sync(store.unfinished(str(path)))
    assert not path.exists()


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
        make(store, target, 8, (0, step.to_bytes(8, "big")))
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


def test_a_store_travels_without_its_handles(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    read(store, tmp_path / "a", 0, 1)
    other = pickle.loads(pickle.dumps(store))  # noqa: S301 -- our own
    assert not other.files.handles
    assert read(other, tmp_path / "a", 0, 3) == b"abc"
    other.close()
    assert local_store() is local_store()


class Kept:
    """A sink that keeps what it is given."""

    ended = False

    def __init__(self) -> None:
        self.content = b""
        self.pieces = 0
        self.state = "begun"

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        assert offset == len(self.content)
        self.content += bytes(data)
        self.pieces += 1

    def finish(self, *, durable: bool) -> None:
        self.state = "durable" if durable else "finished"

    def abort(self) -> None:
        self.state = "aborted"


def test_what_comes_early_waits() -> None:
    kept = Kept()
    sink = Ordered(lambda: kept, "a", 9, room=3)
    sink.write_at(3, b"def")  # constant: waits, and takes no room
    buffer = bytearray(b"ghi")
    sink.write_at(6, memoryview(buffer))
    buffer[:] = b"???"  # a mover's buffer is used again
    assert kept.pieces == 0
    sink.write_at(0, memoryview(bytearray(b"abc")))
    assert (kept.content, kept.state) == (b"abcdefghi", "begun")
    sink.finish(durable=True)
    assert (kept.state, sink.ended) == ("durable", True)


@pytest.mark.parametrize(("offset", "size"), [(0, 4), (1, 3), (0, 2)])
def test_a_file_of_which_something_is_missing_is_not_finished(offset: int, size: int) -> None:
    kept = Kept()
    sink = Ordered(lambda: kept, "rank_0/a", size, room=9)
    sink.write_at(offset, memoryview(bytearray(b"abc")[: 3 - offset]))
    if offset == 0 and size == 2:
        sink.write_at(9, b"x")  # beyond the end
    with refused(TargetError, "internal-error", "rank_0/a"):
        sink.finish(durable=False)
    assert not sink.ended


def test_an_empty_file_is_begun_and_finished() -> None:
    kept = Kept()
    Ordered(lambda: kept, "a", 0).finish(durable=False)
    assert kept.state == "finished"


def test_a_file_of_unknown_size_ends_with_its_last_byte(store: LocalStore, tmp_path: Path) -> None:
    """Another task, whose worker was lost, may have written more."""
    path = str(tmp_path / "a")
    store.create(store.unfinished(path), None).write_at(0, b"longer than it should be")
    sink = store.create(store.unfinished(path), None)
    sink.write_at(2, b"cd")
    sink.write_at(0, b"ab")
    sink.finish(durable=True)
    store.publish(store.unfinished(path), path, durable=True)
    assert (tmp_path / "a").read_bytes() == b"abcd"
