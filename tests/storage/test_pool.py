"""The buffers of requests, and batches that are read ahead into them."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from scripted import close_idle

from reshard.core.storage import places
from reshard.core.storage.places import any_store, in_batches
from reshard.core.storage.urls import connections, remote, retries
from reshard.core.storage.urls import pool as pools
from reshard.core.storage.urls.pool import SLAB_BYTES, Pool
from reshard.core.storage.urls.remote import Fetch, remote_store
from reshard.core.storage.urls.s3 import sink as sinks
from reshard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.core.storage.base import ReadStore, Want

CONTENT = bytes(range(256)) * 40
URL = "memory://pool/content"
STEP = 512

Step = tuple[int, "ReadStore", "list[Want]"]


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    """A pool of its own, with three shared buffers for reading and three for sending."""
    made = Pool()
    made.limit(6 * SLAB_BYTES, reads=True, sends=True)
    for module in (pools, places, sinks, remote):
        monkeypatch.setattr(module, "pool", made)
    fsspec.filesystem("memory").pipe_file("/pool/content", CONTENT)
    return made


def shared(pool: Pool) -> tuple[int, int]:
    """Return how many shared buffers a pool can give for reading and for sending; it has them again then."""
    counts = []
    for sends in (False, True):
        slabs = []
        while (slab := pool.take(own=False, sends=sends)) is not None:
            slabs.append(slab)
        for slab in slabs:
            pool.give(slab)
        counts.append(len(slabs))
    return counts[0], counts[1]


def steps(count: int, begun: list[int] | None = None, buffer: bytearray | None = None) -> Iterator[Step]:
    """Steps that read the contents piece by piece into one buffer."""
    view = memoryview(buffer if buffer is not None else bytearray(STEP))
    for number in range(count):
        if begun is not None:
            begun.append(number)
        yield number, any_store(), [(URL, number * STEP, view)]


def test_batches_are_read_ahead_up_to_the_limit(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the pool has buffers; then a step after a step."""
    monkeypatch.setattr(places, "SLAB_BYTES", 2 * STEP)
    begun: list[int] = []
    buffer = bytearray(STEP)
    ahead = 0
    for number in in_batches(steps(20, begun, buffer)):
        assert buffer == CONTENT[number * STEP :][:STEP]
        ahead = max(ahead, begun[-1] - number)
    assert begun == list(range(20))
    assert 2 * 2 <= ahead <= 2 * (3 + 1) + 1  # three batches of two in flight, and one that is collected
    assert shared(pool) == (3, 3)


@pytest.mark.parametrize("shared_buffers", [0, 1, 3])
def test_contents_are_right_with_any_limit(pool: Pool, shared_buffers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "SLAB_BYTES", 3 * STEP)
    pool.limit(shared_buffers * SLAB_BYTES, reads=True, sends=False)
    buffer = bytearray(STEP)
    read = [(number, bytes(buffer)) for number in in_batches(steps(17, None, buffer))]
    assert read == [(number, CONTENT[number * STEP :][:STEP]) for number in range(17)]
    assert shared(pool) == (shared_buffers, 0)


@pytest.mark.parametrize("stop", ["error", "end", "interrupt", "steps"])
def test_buffers_are_returned(pool: Pool, monkeypatch: pytest.MonkeyPatch, stop: str) -> None:
    """After an error of a read, if the batches are not read to their end, and after an interrupt."""
    monkeypatch.setattr(places, "SLAB_BYTES", STEP)

    def until_interrupted() -> Iterator[Step]:
        yield from steps(3)
        raise KeyboardInterrupt

    for _ in range(5):
        if stop == "error":
            with refused(SourceError, "truncated"):
                list(in_batches(steps(len(CONTENT) // STEP + 2)))
        elif stop == "steps":
            with pytest.raises(KeyboardInterrupt):
                list(in_batches(until_interrupted()))
        else:
            batches = in_batches(steps(10))
            assert next(batches) == 0
            if stop == "end":
                batches.close()  # type: ignore[attr-defined]
            else:
                with pytest.raises(KeyboardInterrupt):
                    batches.throw(KeyboardInterrupt())  # type: ignore[attr-defined]
        assert shared(pool) == (3, 3)


@pytest.mark.parametrize("stop", ["finish", "abort", "error"])
def test_buffers_are_returned_by_files_that_are_sent(
    pool: Pool, bucket: str, stop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of more parts than the pool has buffers is sent."""
    sink = remote_store().create(f"{bucket}/x", 6 * SLAB_BYTES)
    if stop == "error":
        monkeypatch.setattr(retries, "TRIES", 1)
        monkeypatch.setattr(sinks.PartsSink, "_await_first", raising)
    try:
        for number in range(6):
            sink.write_at(number * SLAB_BYTES, bytes(SLAB_BYTES))
    except OSError:
        assert stop == "error"
    else:
        assert stop != "error"
    if stop == "finish":
        sink.finish(durable=True)
    else:
        sink.abort()
    assert shared(pool) == (3, 3)
    assert bool(remote_store().contents(f"{bucket}/x")) == (stop == "finish")


def raising(_sink: object) -> None:
    raise OSError("the network is gone")


def test_threads_that_read_and_send_without_shared_buffers_go_on(
    pool: Pool, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.limit(0, reads=True, sends=True)
    monkeypatch.setattr(places, "SLAB_BYTES", 2 * STEP)
    content = CONTENT * (2 * SLAB_BYTES // len(CONTENT) + 1)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            sink = remote_store().create(f"{bucket}/{number}", len(content))
            position, buffer = 0, bytearray(STEP)
            for step in in_batches(steps(16, None, buffer)):
                assert buffer == CONTENT[step * STEP :][:STEP]
                piece = content[position : position + len(content) // 15]
                sink.write_at(position, piece)
                position += len(piece)
            assert position == len(content)
            sink.finish(durable=True)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures
    for number in range(4):
        assert remote_store().contents(f"{bucket}/{number}") == content
    assert shared(pool) == (0, 0)


@given(
    pieces=st.lists(st.tuples(st.integers(0, len(CONTENT) - 1), st.integers(0, 700)), max_size=20),
    most=st.sampled_from([1000, SLAB_BYTES]), size=st.sampled_from([300, 8 << 20]),
)  # fmt: skip
def test_any_ranges_are_fetched(pieces: list[tuple[int, int]], most: int, size: int) -> None:
    """Overlapping and empty ones too, in any order, and more than a buffer holds."""
    fsspec.filesystem("memory").pipe_file("/pool/content", CONTENT)
    pool = Pool()
    wants = [(URL, offset, memoryview(bytearray(min(nbytes, len(CONTENT) - offset)))) for offset, nbytes in pieces]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "pool", pool)
        patch.setattr(remote, "SLAB_BYTES", most)
        patch.setattr(remote.speed, "request_bytes", lambda: size)
        slab = pool.take(own=True, sends=False)
        assert slab
        fetch = Fetch(wants, slab)
        for want in reversed(wants):
            fetch.fill(want)
        fetch.close()
    assert all(buffer == CONTENT[offset : offset + len(buffer)] for _, offset, buffer in wants)


def test_a_forked_process_starts_its_own_threads_and_connections() -> None:
    """Threads do not live in the copy, and two processes must not talk on one connection."""
    retries.ask("memory://x", "read", lambda: None)
    close_idle()  # of other tests
    connections._idle["http", "host", ""].append(None)  # type: ignore[arg-type]
    child = os.fork()
    if not child:
        is_right = not any(connections._idle.values())
        retries.ask("memory://x", "read", lambda: None)
        os._exit(0 if is_right else 1)
    connections._idle.clear()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_library_that_wakes_up_late_writes_nothing(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request succeeded on another thread, so its buffer is in use for something else."""
    monkeypatch.setenv("RESHARD_STALL_SECONDS", "0.1")
    monkeypatch.setattr(retries, "_FIRST_DELAY", 0.01)
    memory = fsspec.filesystem("memory")
    wakes, woke, read = threading.Event(), threading.Event(), type(memory).cat_file
    calls: list[None] = []

    def cat_file(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == 1:
            wakes.wait(20)
            woke.set()
        return read(*arguments, **options)

    monkeypatch.setattr(type(memory), "cat_file", cat_file)
    buffer = bytearray(STEP)
    remote_store().read_into(URL, 0, memoryview(buffer))
    assert buffer == CONTENT[:STEP]
    assert len(calls) == 2
    buffer[:] = bytes(STEP)  # it is used again
    wakes.set()
    assert woke.wait(20)
    time.sleep(0.05)
    assert buffer == bytes(STEP)
