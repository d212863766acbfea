"""The ledger: what is noted, which of it is believed, which logs stay, and which receipts make up a block."""

from __future__ import annotations

import json
from array import array
from typing import TYPE_CHECKING

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from stopped_runs import small_tasks

from reshard.core.records import logs as records
from reshard.core.records.logs import DIRECTORY, Record, known
from reshard.core.run.state.ledger import Ledger
from reshard.core.run.state.sums import longest, sum_of
from reshard.core.storage.crc import crc32c

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["small_tasks"]  # fixtures, for pytest to find


def wrote(ranges: Iterable[tuple[int, int, int]]) -> array[int]:
    return array("Q", [number for some in ranges for number in some])


def logs(root: Path) -> list[Path]:
    return sorted((root / DIRECTORY).glob("*.jsonl"))


@pytest.fixture(params=["local", "url"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "local" else f"memory://{abs(hash(request.node.nodeid))}"


def test_what_is_noted_is_known(root: str) -> None:
    ledger = Ledger(root, sources="then")
    files = ["a/c/0", "b", "ω/\udc80", "../a", "x" * 300, ".reshard/lock"]
    ledger.add({file: Record(f"digest {n}", n, wrote([(0, 1, n)]), rank=n) for n, file in enumerate(files)})
    ledger.add({file: Record(wrote=wrote([(8, 2, 3)])) for file in files})
    ledger.add({"b": Record(ready=(1, 2), boot="b")}, durable=True)
    found = known(root).records
    assert list(found) == files
    assert found["b"] == Record("digest 1", 1, wrote([(0, 1, 1), (8, 2, 3)]), (1, 2), boot="b", sources="then", rank=1)
    assert known(root, files[:1]).records == {files[0]: found[files[0]]}
    assert Ledger(root).load(files) == found


def test_the_newest_record_of_a_file_counts(root: str) -> None:
    """Of several runs, which wrote some of the files each."""
    first, second = Ledger(root), Ledger(root)
    first.add({file: Record("old", 1, wrote([(0, 1, 1)]), ready=(1, 1)) for file in "ab"})
    second.load("b")
    second.add({"b": Record("new", 2, replaces=(1, 1))})
    found = known(root)
    assert found.records["a"] == Record("old", 1, wrote([(0, 1, 1)]), ready=(1, 1))
    assert found.records["b"] == Record("new", 2, replaces=(1, 1))
    assert [sorted(files) for files in found.logs.values()] == [["a", "b"], ["b"]]


def test_a_log_goes_when_another_tells_of_all_its_files(root: str) -> None:
    for number, files in enumerate(["a", "b", "abc"]):
        ledger = Ledger(root)
        ledger.load(files)
        ledger.add({file: Record(f"digest {number}", 1) for file in files})
    assert [sorted(files) for files in known(root).logs.values()] == [["a", "b", "c"]]


def test_what_is_forgotten_is_not_known(root: str) -> None:
    old = Ledger(root)
    old.add({file: Record("old", 1) for file in "ab"})
    new = Ledger(root)
    new.load("bc")
    new.add({file: Record("new", 1) for file in "bc"})
    new.forget("bc")
    assert known(root).records == {"a": Record("old", 1)}
    old.forget("ab")
    assert known(root).records == {}


def test_a_log_of_nothing_goes(root: str) -> None:
    ledger = Ledger(root)
    ledger.add({file: Record("digest", 1) for file in "ab"})
    ledger.forget("c")
    ledger.forget("a")
    assert list(known(root).records) == ["b"]
    ledger.forget("b")
    assert known(root).logs == {}


def test_without_being_kept_it_says_nothing(root: str) -> None:
    Ledger(root).add({"a": Record("digest", 1)})
    ledger = Ledger(root, keeps=False)
    assert ledger.load("a") == {}
    ledger.add({"a": Record("other", 1)})
    ledger.forget("a")
    assert known(root).records == {"a": Record("digest", 1)}


def test_at_a_url_its_parts_become_one_object(request: pytest.FixtureRequest) -> None:
    url = f"memory://{abs(hash(request.node.nodeid))}"
    ledger = Ledger(url)
    ledger.hold(["a"])
    ledger.add({"a": Record("digest", 1)})
    for number in range(3):
        ledger.add({"a": Record(wrote=wrote([(number, 1, 0)]))})
    before = known(url).records
    assert len(before["a"].wrote) == 9
    ledger.release()
    assert known(url).records == before
    assert len(MemoryFileSystem().find(url.removeprefix("memory:/"))) == 1


def test_a_torn_line_takes_no_other_with_it(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path))
    ledger.add({file: Record("digest", 1) for file in "ab"})
    with logs(tmp_path)[0].open("ab") as file:
        file.write(b'{"file":"a","rea')  # the disk was full
    ledger.add({"b": Record(ready=(0, 1))})
    found = known(str(tmp_path)).records
    assert (found["a"].ready, found["b"].ready) == (None, (0, 1))


def test_a_copy_made_of_links_stays_as_it_is(tmp_path: Path) -> None:
    Ledger(str(tmp_path)).add({"a": Record("digest", 1)})
    (tmp_path / "copy").hardlink_to(logs(tmp_path)[0])
    before = (tmp_path / "copy").read_bytes()
    ledger = Ledger(str(tmp_path))
    ledger.load("a")
    ledger.add({"a": Record(ready=(1, 1))})
    assert (tmp_path / "copy").read_bytes() == before
    assert known(str(tmp_path)).records["a"].ready == (1, 1)


def test_notes_of_many_ranges_are_lines_of_a_length_that_is_read(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path))
    ranges = [(4096 * number, 4096, 0xFFFFFFFF - number) for number in range(10_000)]
    ledger.add({"a": Record("digest", 1 << 40, wrote(ranges[:9000]))})
    ledger.add({"a": Record(wrote=wrote(ranges[9000:]))})
    assert list(known(str(tmp_path)).records["a"].ranges) == ranges
    assert max(map(len, logs(tmp_path)[0].read_text().splitlines())) < records._LONGEST_LINE / 4


@pytest.mark.parametrize("limit", ["_MOST_RANGES", "_MOST_BYTES"])
def test_what_is_noted_beyond_a_limit_is_not_known(limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(str(tmp_path))
    ledger.add({"a": Record("digest", 100)})
    for number in range(9):
        ledger.add({"a": Record(wrote=wrote([(number, 1, 0)]))})
    monkeypatch.setattr(records, limit, 3 if limit == "_MOST_RANGES" else 250)
    found = known(str(tmp_path)).records["a"]
    assert 0 < len(found.wrote) < 27
    assert found.digest == "digest"


@pytest.mark.parametrize("some", [[-1, 4, 0], [0, 0, 0], [0, 4, -1], [0, 4, 1 << 32], [1 << 63, 4, 0], [0, 4]])
def test_what_is_not_a_range_is_passed_by(some: list[int], tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path))
    ledger.add({"a": Record("digest", 100, wrote([(0, 1, 0)]))})
    with logs(tmp_path)[0].open("a") as file:
        file.write(json.dumps({"file": "a", "wrote": [[1, 1, 1], some], "ready": [1, 1]}) + "\n")
    assert known(str(tmp_path)).records["a"] == Record("digest", 100, wrote([(0, 1, 0)]))


@pytest.mark.parametrize(
    "wrote", [[(0, 4, 1)], [(0, 4, 1), (5, 3, 1)], [(4, 4, 1)], [(0, 9, 1)], [], [(0, 6, 1), (4, 4, 1)]]
)
def test_ranges_that_do_not_make_up_a_block(wrote: list[tuple[int, int, int]]) -> None:
    assert sum_of([(0, 8)], longest(wrote)) is None


def test_the_longest_ranges_make_up_a_block() -> None:
    content = bytes(range(20))
    wrote = [(b, n, crc32c(content[b : b + n])) for b, n in ((0, 3), (0, 5), (3, 4), (5, 5), (12, 8))]
    assert sum_of([(0, 10), (12, 8)], longest(wrote)) == crc32c(content[:10] + content[12:])
