"""Opening at a URL: one listing of each kind, one request for the head of a file, no parsing of equal headers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoints import numbers, write_file, write_ranks
from remotes import put

import reshard
from reshard import Layout, Strategy
from reshard.core.run.bound import bind
from reshard.core.run.settings import RunOptions
from reshard.core.run.state.preflight import preflight
from reshard.core.storage.places import as_place
from reshard.core.storage.urls.filesystems import FileSystemClient
from reshard.kits import headers
from reshard.kits.files import index_file

if TYPE_CHECKING:
    from pathlib import Path

RANKS = 6
STRATEGY = Strategy.of({f"layers.{number}.w": Layout.of([RANKS], [0, -1]) for number in range(40)})
FULL = numbers({f"layers.{number}.w": (12, 500) for number in range(40)})


class Counted:
    """The listings, and the ranges that were read, of files at memory:// URLs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pages: list[str] = []
        self.reads: list[tuple[str, int, int]] = []
        page, read_into = FileSystemClient.page, FileSystemClient.read_into

        def listing(client: FileSystemClient, directory: str, token: str, *, deep: bool) -> object:
            self.pages.append(directory)
            return page(client, directory, token, deep=deep)

        def reading(client: FileSystemClient, key: str, offset: int, buffer: memoryview) -> int:
            self.reads.append((key, offset, len(buffer)))
            return read_into(client, key, offset, buffer)

        monkeypatch.setattr(FileSystemClient, "page", listing)
        monkeypatch.setattr(FileSystemClient, "read_into", reading)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose headers are parsed."""
    paths: list[str] = []
    monkeypatch.setattr(headers, "header_of", lambda path, **more: paths.append(path) or index_file(path, **more))
    return paths


@pytest.fixture
def root(request: pytest.FixtureRequest) -> str:
    return f"memory://{abs(hash(request.node.nodeid))}"


def test_ranks_take_one_request_each_and_one_header_is_parsed(
    root: str, tmp_path: Path, counted: Counted, parsed: list[str]
) -> None:
    local = write_ranks(tmp_path, FULL, STRATEGY, "safetensors")
    content = sum(array.nbytes for array in FULL.values()) // RANKS
    header = (local / "rank_0" / "checkpoint_0.safetensors").stat().st_size - content
    source = reshard.open(put(local, root), strategy=STRATEGY, contents=False)
    assert len(counted.pages) == 2
    assert len(counted.reads) == RANKS
    assert len(parsed) == 1
    first, *others = counted.reads
    assert first[1:] == (0, header + content)  # nothing is known yet
    assert {(offset, nbytes) for _, offset, nbytes in others} == {(0, header)}
    assert {(name, tensor.shape) for name, tensor in source.items()} == {(name, x.shape) for name, x in FULL.items()}
    assert np.array_equal(source["layers.7.w"].compute(), FULL["layers.7.w"])


def test_headers_that_differ_are_told_apart(root: str, tmp_path: Path, counted: Counted, parsed: list[str]) -> None:
    """Of equal or other sizes, shorter or much longer than those before."""
    contents = [{"w": np.full(500, rank, np.float32)} for rank in range(2)]
    contents += [{"v": np.full(500, rank, np.float32)} for rank in range(2)]
    contents += [{f"{'long' * 20}.{n}": np.zeros(1, np.float32) for n in range(2000)}, {}, contents[0]]
    paths = [write_file(tmp_path / f"{number}.safetensors", each) for number, each in enumerate(contents)]
    put(tmp_path, root)
    urls = [f"{root}/{path.name}" for path in paths]
    files, _ = headers.read_indexes(dict(enumerate([as_place(url)] for url in urls)), None)
    expected = [index_file(str(path)) for path in paths]
    assert [file.index._replace(header_id=0) for file in files] == expected
    assert parsed == [urls[number] for number in (0, 2, 4, 5, 6)]
    assert files[6].index.entries is files[0].index.entries
    assert len(counted.reads) <= len(urls) + 2  # the long header was not expected


def test_a_new_target_is_listed_at_most_three_times(root: str, tmp_path: Path, counted: Counted) -> None:
    source = reshard.open(write_ranks(tmp_path, FULL, STRATEGY, "safetensors"), strategy=STRATEGY)
    plan = reshard.plan(source, Strategy.of({name: Layout.of([2], [0, -1]) for name in FULL}))._record
    bound = bind(plan, root, RunOptions(), is_whole=True)
    assert not preflight(bound.plan, bound.root, RunOptions()).resumable
    assert len(counted.pages) <= 3
