"""The journal of a run: what is noted, which of it is believed, and which receipts make up a block."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stopped_runs import small_tasks

from reshard.run import journal, receipts
from reshard.run.journal import DIRECTORY, Journal
from reshard.storage.crc32c import crc32c

__all__ = ["small_tasks"]  # fixtures, for pytest to find


def test_notes_of_many_ranges_are_lines_of_a_length_that_is_read(tmp_path: Path) -> None:
    noted = Journal(str(tmp_path))
    ranges = [(4096 * number, 4096, 0xFFFFFFFF - number) for number in range(10_000)]
    noted.begin("a", "digest", 1 << 40, wrote=ranges[:9000])
    noted.wrote("a", ranges[9000:])
    assert noted.read("a").wrote == ranges
    assert max(map(len, Path(noted.path("a")).read_text().splitlines())) < journal._LONGEST_LINE / 4


@pytest.mark.parametrize("limit", ["_MOST_RANGES", "_MOST_BYTES"])
def test_what_is_noted_beyond_a_limit_is_not_known(limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Journal(str(tmp_path))
    noted.begin("a", "digest", 100)
    for number in range(9):
        noted.wrote("a", [(number, 1, 0)])
    monkeypatch.setattr(journal, limit, 3 if limit == "_MOST_RANGES" else 120)
    assert 0 < len(noted.read("a").wrote) < 9
    assert noted.read("a").digest == "digest"


@pytest.mark.parametrize("wrote", [[-1, 4, 0], [0, 0, 0], [0, 4, -1], [0, 4, 1 << 32], [1 << 63, 4, 0], [0, 4]])
def test_what_is_no_range_ends_a_journal(wrote: list[int], tmp_path: Path) -> None:
    noted = Journal(str(tmp_path))
    noted.begin("a", "digest", 100)
    noted.wrote("a", [(0, 1, 0)])
    with Path(noted.path("a")).open("a") as file:
        file.write(json.dumps({"wrote": [wrote]}) + "\n" + json.dumps({"ready": [1, 1]}) + "\n")
    record = noted.read("a")
    assert (record.wrote, record.ready) == ([(0, 1, 0)], None)


@pytest.mark.parametrize(
    "wrote", [[(0, 4, 1)], [(0, 4, 1), (5, 3, 1)], [(4, 4, 1)], [(0, 9, 1)], [], [(0, 6, 1), (4, 4, 1)]]
)
def test_ranges_that_do_not_make_up_a_block(wrote: list[tuple[int, int, int]]) -> None:
    assert receipts.sum_of([(0, 8)], receipts.longest(wrote)) is None


def test_the_longest_ranges_make_up_a_block() -> None:
    content = bytes(range(20))
    wrote = [(b, n, crc32c(content[b : b + n])) for b, n in ((0, 3), (0, 5), (3, 4), (5, 5), (12, 8))]
    assert receipts.sum_of([(0, 10), (12, 8)], receipts.longest(wrote)) == crc32c(content[:10] + content[12:])


def test_journals_have_names_of_their_own(tmp_path: Path) -> None:
    noted = Journal(str(tmp_path))
    files = ["a/b", "a%2Fb", "a b", "x" * 250, "x" * 251, "ω/\udc80", "../a", ".reshard/lock"]
    paths = {noted.path(file) for file in files}
    assert len(paths) == len(files)
    assert {Path(path).parent for path in paths} == {tmp_path / DIRECTORY}
    for file in files:
        noted.begin(file, file.encode("utf-8", "surrogateescape").hex(), 1)
        noted.wrote(file, [(0, 1, 2)])
    for file in files:
        assert noted.read(file).digest == file.encode("utf-8", "surrogateescape").hex()
        assert noted.read(file).wrote == [(0, 1, 2)]
