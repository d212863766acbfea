"""The ledger: what is noted, which of it is believed, which logs stay, and ledgers that lie."""

from __future__ import annotations

import os
from array import array
from typing import TYPE_CHECKING

import pytest
from checkpoints import tree
from fsspec.implementations.memory import MemoryFileSystem
from refusals import refused
from stopped_runs import TARGET, small_tasks, source

import reshard
from reshard.core.plan.plan import file_digests
from reshard.core.records import logs as records
from reshard.core.records.logs import DIRECTORY, Record, known
from reshard.core.run.state.ledger import Ledger
from reshard.core.run.state.sums import longest, sum_of
from reshard.core.storage.base import unfinished_path
from reshard.core.storage.crc import crc32c
from reshard.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["small_tasks", "source"]  # fixtures, for pytest to find


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


@pytest.mark.parametrize(
    "wrote", [[(0, 4, 1)], [(0, 4, 1), (5, 3, 1)], [(4, 4, 1)], [(0, 9, 1)], [], [(0, 6, 1), (4, 4, 1)]]
)
def test_ranges_that_do_not_make_up_a_block(wrote: list[tuple[int, int, int]]) -> None:
    assert sum_of([(0, 8)], longest(wrote)) is None


def test_the_longest_ranges_make_up_a_block() -> None:
    content = bytes(range(20))
    wrote = [(b, n, crc32c(content[b : b + n])) for b, n in ((0, 3), (0, 5), (3, 4), (5, 5), (12, 8))]
    assert sum_of([(0, 10), (12, 8)], longest(wrote)) == crc32c(content[:10] + content[12:])


HEAD_OF_LOG = b'{"reshard": 1}\n'
BEGUN_LOG = HEAD_OF_LOG + b'{"file": "FILE", "digest": "DIGEST", "size": SIZE}\n'

LINES = [
    b"", b"\n\n", b"{", b"null\n", b"[]\n", b"\xff\xfe\n", b"{}\n" * 1000, b"[" * 100_000,
    b'{"reshard": 2}\n{"file": "FILE", "digest": "DIGEST", "size": SIZE}\n',
    HEAD_OF_LOG,
    b'{"file": "FILE", "digest": "DIGEST", "size": SIZE}\n',
    HEAD_OF_LOG + b'{"file": ["FILE"], "digest": "DIGEST", "size": SIZE}\n{"file": {}}\n{"file": "FILE"}\n',
    HEAD_OF_LOG + b'{"file": "../../outside", "digest": "DIGEST", "size": SIZE}\n',
    HEAD_OF_LOG + b'{"file": "FILE", "digest": "DIGEST"}\n',
    HEAD_OF_LOG + b'{"file": "FILE", "wrote": [[0, 8, 0]]}\n',
    HEAD_OF_LOG + b'{"file": "FILE", "digest": {"a": 1}, "size": 1}\n',
    HEAD_OF_LOG + b'{"file": "FILE", "digest": "DIGEST", "size": SIZE, "replaces": 3}\n',
    HEAD_OF_LOG + b'{"file": "FILE", "digest": "DIGEST", "size": SIZE, "rank": -1}\n',
    b'{"reshard": 1, "made": "../../outside"}\n{"file": "FILE", "digest": "DIGEST", "size": SIZE}\n',
    BEGUN_LOG + b'{"file": "FILE", "wrote": [[0, 1e400, 0]]}\n',
    BEGUN_LOG + b'{"file": "FILE", "wrote": [[1e400, 1, 0]]}\n{"file": "FILE", "ready": [NaN, 0]}\n',
    BEGUN_LOG + b'{"file": "FILE", "wrote": [[-8, 16, 0], [0, 99999999999999999999, 0], [0, 0, 0]]}\n',
    BEGUN_LOG + b'{"file": "FILE", "wrote": [[0, ' + b"9" * 5000 + b", 0]]}\n",
    BEGUN_LOG + b'{"file": "FILE", "wrote": {"a": 1}}\n{"file": "FILE", "wrote": "abc"}\n',
    BEGUN_LOG + b'{"file": "FILE", "wrote": [[0, SIZE, 1]]}\n',
    BEGUN_LOG + b'{"file": "FILE", "ready": [SIZE, 0]}\n',
    BEGUN_LOG + b'{"file": "FILE", "ready": [SIZE, 0]}\n{"file": "FILE", "ready": 7}\n',
]  # fmt: skip


@pytest.mark.parametrize("content", LINES, ids=lambda content: content[-90:].decode("ascii", "replace"))
def test_a_ledger_that_lies(source: reshard.Checkpoint, tmp_path: Path, content: bytes) -> None:
    plan = reshard.plan(source, TARGET)
    plan.run(tmp_path / "undisturbed")
    directory = tmp_path / "out" / DIRECTORY
    directory.mkdir(parents=True)
    for number, (file, digest) in enumerate(zip(plan._record.files, file_digests(plan._record), strict=True)):
        size = str(file.layout.size).encode()
        lines = content.replace(b"DIGEST", digest.encode()).replace(b"SIZE", size).replace(b"FILE", file.path.encode())
        (directory / f"0000000{number}-0123abcd.jsonl").write_bytes(lines)
        partial = tmp_path / "out" / unfinished_path(file.path, digest)
        partial.parent.mkdir(exist_ok=True)
        partial.write_bytes(os.urandom(file.layout.size))
    if b'"reshard": 2' in content or (b'"digest": {' in content and b"size" in content):
        with refused(TargetError, "other-run", "restart=True"):
            plan.run(tmp_path / "out")
        plan.run(tmp_path / "out", restart=True)
    plan.run(tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")
