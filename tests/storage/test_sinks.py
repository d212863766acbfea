"""Sinks: a local file is written anywhere, in pieces; one that is sent takes bytes in about their order;
sums of ranges are filled in."""

from __future__ import annotations

import os
import zlib
from typing import TYPE_CHECKING

import pytest
from refusals import refused
from stores import store

from reshard.core.storage.local import WRITE_BYTES, LocalStore
from reshard.core.storage.sinks import Ordered, Sinks, Summing
from reshard.errors import TargetError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["store"]  # a fixture, for pytest to find


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


def test_no_more_waits_than_there_is_room_for() -> None:
    sink = Ordered(Kept, "a", 100, room=2)
    with pytest.raises(AssertionError, match="nearly in order"):
        sink.write_at(50, memoryview(bytearray(3)))


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


def test_one_that_ends_by_itself_is_not_held_any_more() -> None:
    kept = Kept()
    sinks = Sinks(lambda file: Ordered(lambda: kept, str(file), 4, ends=True))
    sinks.write_at(7, 0, b"ab")
    assert list(sinks) == [7]
    sinks.write_at(7, 2, b"cd")
    assert not sinks
    assert (kept.content, kept.state) == (b"abcd", "finished")


def test_an_empty_file_is_begun_and_finished() -> None:
    kept = Kept()
    Ordered(lambda: kept, "a", 0).finish(durable=False)
    assert kept.state == "finished"


def test_giving_up_gives_up_what_is_begun() -> None:
    begun = Kept()
    sinks = Sinks(lambda file: Ordered(lambda: begun, str(file), 4))
    sinks.open([0])  # it is not begun
    sinks.write_at(1, 0, b"ab")
    sinks.abort()
    assert begun.state == "aborted"


@pytest.mark.parametrize("shift", [0, 1000])
def test_long_writes_are_cut_at_multiples(
    store: LocalStore, tmp_path: Path, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With large folios, one that is longer takes several times as long."""
    path = str(tmp_path / "a")
    content = os.urandom(2 * WRITE_BYTES + 5)
    pwrite, pieces = os.pwrite, []

    def noted(fd: int, data: memoryview, offset: int) -> int:
        pieces.append((offset, len(data)))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", noted)
    sink = store.create(store.unfinished(path), shift + len(content))
    sink.write_at(shift, memoryview(content))
    store.publish(store.unfinished(path), path, durable=False)
    assert (tmp_path / "a").read_bytes() == bytes(shift) + content
    assert len(pieces) == 3
    assert all(offset // WRITE_BYTES == (offset + nbytes - 1) // WRITE_BYTES for offset, nbytes in pieces)


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


@pytest.mark.parametrize("size", [1, 3, 4, 100])
def test_sums_of_ranges_are_filled_in(size: int) -> None:
    """Two ranges, of which one has two sums; the bytes come in pieces, sums in one piece each."""
    content = b"head" + b"first range" + bytes(4) + b"second" + b"between" + bytes(4) + b"." + bytes(4) + b"end"
    zeros = [15, 32, 37]
    kept = Kept()
    sink = Summing(kept, [(4, 11, (15,)), (19, 6, (32, 37))], zlib.crc32)
    begin = 0
    while begin < len(content):
        later = [place for place in zeros if place > begin]
        end = begin + 4 if begin in zeros else min([begin + size, *later, len(content)])
        sink.write_at(begin, memoryview(content[begin:end]))
        begin = end
    first, second = (zlib.crc32(some).to_bytes(4, "little") for some in (b"first range", b"second"))
    assert kept.content == b"head" + b"first range" + first + b"second" + b"between" + second + b"." + second + b"end"
    assert not sink.ended
    sink.finish(durable=True)
    assert kept.state == "durable"
    sink.abort()
    assert kept.state == "aborted"


@pytest.mark.parametrize("skipped", [[(0, 12)], [(0, 8)], [(0, 4), (6, 12)], [(2, 7), (8, 11)]])
def test_pieces_that_are_skipped_do_not_wait_for_ever(skipped: list[tuple[int, int]]) -> None:
    """Literals are given first, up to the end of the file; then the zeros between them."""

    class Sparse(Kept):
        def __init__(self) -> None:
            super().__init__()
            self.bytes: dict[int, int] = {}

        def write_at(self, offset: int, data: bytes | memoryview) -> None:
            self.bytes.update(enumerate(bytes(data), offset))

    content = b"ab\0cd\0ef\0ghi"
    kept = Sparse()
    sink = Ordered(lambda: kept, "a", 12, skips=skipped)
    for begin, end in ((0, 2), (3, 5), (6, 8), (9, 12), (2, 3), (5, 6), (8, 9)):
        sink.write_at(begin, content[begin:end])
    sink.finish(durable=False)
    assert all(content[at] == value for at, value in kept.bytes.items())
    needed = set(range(12)).difference(*(range(*span) for span in skipped))
    assert needed <= set(kept.bytes)
