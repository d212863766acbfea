"""Files at URLs for tests: an S3 server of its own on loopback, fsspec's memory, and what is asked of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
from checkpoints import numbers, tree
from faulty_proxy import operation_of
from fsspec.implementations.memory import MemoryFileSystem
from samples import sampled

from reshard import Layout, Strategy
from reshard.core.plan.uploads import sending
from reshard.core.records.logs import DIRECTORY, known
from reshard.core.storage.urls.s3.client import S3Client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

ROWS = Strategy.of({"w": Layout.of([4], [0, -1]), "v": Layout.of([4], [0, -1]), "b": Layout.of([4], [-1])})
COLUMNS = Strategy.of({"w": Layout.of([3], [-1, 0]), "v": Layout.of([3], [0, -1]), "b": Layout.of([3], [0])})
FULL = numbers({"w": (64, 48), "v": (24, 12), "b": (12,)})


class Requests:
    """What was asked of a file system: ranges of checkpoints' bytes, and S3's own operations."""

    def __init__(self) -> None:
        self.ranges: list[tuple[str, int, int | None]] = []
        self.operations: list[str] = []

    @property
    def nbytes(self) -> int:
        assert all(end is not None for _, _, end in self.ranges), "a file was read whole"
        return sum((end or 0) - start for _, start, end in self.ranges)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an S3 server in a process of its own; clients find it by the environment."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs", minversion="2025.3")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("moto") / "log"
    # Without the package crc32c, moto gives CRC-32 as CRC-32C.
    (log.parent / "crc32c.py").write_text("from google_crc32c import value as crc32c")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(log.parent), *sys.path])}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=out, stderr=out, env=env
        )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
            }.items():  # fmt: skip
                patch.setenv(name, value)
            yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def bucket(server: str, request: pytest.FixtureRequest) -> str:
    name = f"test-{abs(hash(request.node.nodeid))}"
    fsspec.filesystem("s3").mkdir(name)
    return f"s3://{name}"


@pytest.fixture(params=["memory", "s3"])
def root(request: pytest.FixtureRequest) -> str:
    """A URL below which nothing is."""
    if request.param == "s3":
        return str(request.getfixturevalue("bucket"))
    return f"memory://{abs(hash(request.node.nodeid))}"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Requests:
    """What the S3 and memory file systems are asked for."""
    found = Requests()
    request, cat = S3Client.request, MemoryFileSystem.cat_file

    def requested(
        self: S3Client, method: str, key: str = "", query: Any = None, headers: Any = None, *rest: Any, **options: Any
    ) -> Any:
        operation = operation_of(method, key, query or {})
        found.operations.append(operation)
        if operation == "GetObject" and f"{DIRECTORY}/" not in key:
            start, _, last = (headers or {}).get("range", "bytes=0-").removeprefix("bytes=").partition("-")
            found.ranges.append((key, int(start), int(last) + 1 if last else None))
        return request(self, method, key, query, headers, *rest, **options)

    def counted(self: Any, path: str, start: Any = None, end: Any = None, **more: Any) -> Any:
        if f"{DIRECTORY}/" not in path:
            found.ranges.append((path, start, end))
        return cat(self, path, start=start, end=end, **more)

    monkeypatch.setattr(S3Client, "request", requested)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", counted)
    return found


@pytest.fixture
def several_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams in groups of one, so that a run has several groups."""
    monkeypatch.setattr(sending, "STREAMS_AT_ONCE", 1)


def at_urls(name: str, cases: Iterable[Any], every: int) -> pytest.MarkDecorator:
    """Give a test `root` and a case: each case in memory, and of so many one, when it is slow every one, at S3 too."""
    cases = list(cases)
    at_s3 = sampled([("s3", case) for case in cases], every)
    return pytest.mark.parametrize(("root", name), [*(("memory", case) for case in cases), *at_s3], indirect=["root"])


def put(local: Path, url: str) -> str:
    """Copy a directory to a URL."""
    for name, content in tree(local).items():
        fs, path = fsspec.core.url_to_fs(f"{url}/{name}")
        fs.pipe_file(path, content)
    return url


def get(url: str) -> dict[str, bytes]:
    """Every file below a URL but for the ledger, as `tree` has it."""
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    found = {name[len(root) :].lstrip("/"): name for name in sorted(fs.find(root))}
    return {path: fs.cat_file(name) for path, name in found.items() if not path.startswith(f"{DIRECTORY}/")}


def records(url: str) -> list[str]:
    """The files that the ledger knows to be complete."""
    fsspec.core.url_to_fs(url)[0].invalidate_cache()
    return sorted(file for file, record in known(url).records.items() if record.ready)


def changing(url: str) -> Callable[[Any], None]:
    """What to tell progress to, so that a file changes as soon as something is written."""
    fs, path = fsspec.core.url_to_fs(url)

    def change(event: Any) -> None:
        if event.written:
            fs.pipe_file(path, fs.cat_file(path)[:-1] + b"x")

    return change
