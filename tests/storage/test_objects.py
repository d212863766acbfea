"""The client by obstore, with a store in memory in the place of the clouds, and web servers as sources."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

import numpy as np
import pytest
from checkpoints import tree, write_file, write_ranks
from commands import call, done
from refusals import refused
from remotes import COLUMNS, FULL, ROWS
from scripted import Answer, Asked, ScriptedServer

import reshard
from reshard.core.storage.places import as_place
from reshard.core.storage.urls import failures, schemes
from reshard.core.storage.urls.remote import remote_store
from reshard.errors import SourceError, TargetError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from reshard.core.storage.places import RemotePath


@pytest.fixture(params=["az", "gs"])
def cloud(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A URL of a cloud, whose objects are in memory."""
    stores = pytest.importorskip("obstore.store")
    from reshard.core.storage.urls import obstore_client

    memory = stores.MemoryStore()
    monkeypatch.setattr(obstore_client, "_store", lambda *_: memory)
    schemes._object_client.cache_clear()
    yield f"{request.param}://bucket/run {request.param}"
    schemes._object_client.cache_clear()


def contents(url: str) -> dict[str, bytes]:
    """Every file below a URL but for the ledger."""
    place: RemotePath = as_place(url)  # type: ignore[assignment]
    place.refresh()
    files = {str(file.relative_to(url)): file.read_bytes() for file in place.files()}
    return {name: content for name, content in files.items() if not name.startswith(".reshard/")}


def test_there_and_back(cloud: str, tmp_path: Path) -> None:
    local = write_ranks(tmp_path / "src", FULL, ROWS)
    reshard.plan(reshard.open(local, strategy=ROWS), COLUMNS).run(tmp_path / "out")
    plan = reshard.plan(reshard.open(local, strategy=ROWS), COLUMNS)
    plan.run(f"{cloud}/out")
    assert contents(f"{cloud}/out") == tree(tmp_path / "out")
    assert plan.run(f"{cloud}/out").finished == 3
    assert reshard.verify(f"{cloud}/out")
    with refused(TargetError, "already-exists", f"{cloud}/out"):
        plan.run(f"{cloud}/out", ledger=False)
    reshard.plan(reshard.open(f"{cloud}/out"), ROWS).run(f"{cloud}/back")
    assert contents(f"{cloud}/back") == tree(local)


def test_a_buffer_that_is_used_again_while_a_file_is_sent(cloud: str) -> None:
    """As those of a run are: obstore keeps what it is given."""
    sink = remote_store().create(f"{cloud}/x", 20 << 20)
    buffer = bytearray(1 << 20)
    for number in range(20):
        buffer[:] = bytes([number]) * len(buffer)
        sink.write_at(number << 20, memoryview(buffer))
    buffer[:] = b"\xff" * len(buffer)
    sink.finish(durable=True)
    assert remote_store().contents(f"{cloud}/x") == b"".join(bytes([number]) * (1 << 20) for number in range(20))


def test_a_file_that_nobody_ends_is_never_there(cloud: str) -> None:
    for size in (10, 20 << 20):
        sink = remote_store().create(f"{cloud}/x", size)
        sink.write_at(0, bytes(size // 2))
        sink.abort()
        assert remote_store().contents(f"{cloud}/x") is None
        other = remote_store().create(f"{cloud}/x", size)
        other.write_at(0, bytes(size // 2))
        del other
        assert remote_store().contents(f"{cloud}/x") is None


def test_the_methods_of_a_client(cloud: str) -> None:
    store, place = remote_store(), as_place(cloud)
    assert not place.is_file()
    assert not place.is_dir()
    store.put(f"{cloud}/d/a#b?c%20+.bin", bytes(100))
    place.refresh()
    assert place.is_dir()
    assert [str(file) for file in place.files()] == [f"{cloud}/d/a#b?c%20+.bin"]
    assert place.names() == ["d"]
    status = store.status(f"{cloud}/d/a#b?c%20+.bin")
    assert status.nbytes == 100
    store.put(f"{cloud}/d/a#b?c%20+.bin", bytes(99) + b"x")
    assert store.status(f"{cloud}/d/a#b?c%20+.bin") != status
    with refused(SourceError, "truncated", "a#b"):
        store.read_into(f"{cloud}/d/a#b?c%20+.bin", 90, memoryview(bytearray(20)))
    store.remove(f"{cloud}/d/a#b?c%20+.bin")
    store.remove(f"{cloud}/d/a#b?c%20+.bin")
    with refused(SourceError, "not-found"):
        store.status(f"{cloud}/d/a#b?c%20+.bin")


@pytest.mark.parametrize(
    ("message", "code", "passes"),
    [
        ("Server returned non-2xx status code: 403 Forbidden: AuthorizationFailure", "no-access", False),
        ("Server returned non-2xx status code: 404 Not Found: ContainerNotFound", "no-such-bucket", False),
        ("Server returned non-2xx status code: 400 Bad Request", "store-error", False),
        ("Server returned non-2xx status code: 429 Too Many Requests", "store-error", True),
        ("Server returned non-2xx status code: 503 Service Unavailable", "store-error", True),
        ("HTTP error: error sending request", "store-error", True),
        ("HTTP error: builder error", "store-error", False),
    ],
)
def test_what_obstore_calls_generic(message: str, code: str, passes: bool) -> None:
    error = pytest.importorskip("obstore").exceptions.GenericError(f"Generic MicrosoftAzure error: {message}")
    assert failures.passes(error) == passes
    with refused(SourceError, code, "az://b"), failures.translating("az://b/x", "listed"):
        raise error


@pytest.fixture
def web(tmp_path: Path) -> Iterator[ScriptedServer]:
    """A web server of the files of a directory."""

    def answer(asked: Asked) -> Answer:
        path = tmp_path / unquote(asked.target).lstrip("/")
        if not path.is_file():
            return Answer(404)
        content = path.read_bytes()
        about = {"etag": '"e"', "last-modified": "Fri, 24 May 2013 00:00:00 GMT"}
        if "range" not in asked.headers:
            return Answer(200, about | {"content-length": str(len(content))}, content)
        first, _, last = asked.headers["range"].removeprefix("bytes=").partition("-")
        body = content[int(first) : int(last) + 1]
        return Answer(206, about | {"content-range": f"bytes {first}-{last}/{len(content)}"}, body)

    server = ScriptedServer()
    server.answer = answer
    yield server
    server.close()


def test_a_file_of_a_web_server(web: ScriptedServer, tmp_path: Path) -> None:
    """It is read by ranges; nothing is listed."""
    pytest.importorskip("obstore")
    (tmp_path / "x").mkdir()
    path = write_file(tmp_path / "x" / "a b.safetensors", FULL)
    url = f"{web.url}/x/a b.safetensors"
    source = reshard.open(url)
    assert {name: tensor.shape for name, tensor in source.items()} == {name: full.shape for name, full in FULL.items()}
    assert np.array_equal(source["w"][5:9].compute(), FULL["w"][5:9])
    reshard.plan(source, ROWS).run(tmp_path / "out")
    reshard.plan(reshard.open(path), ROWS).run(tmp_path / "local")
    assert tree(tmp_path / "out") == tree(tmp_path / "local")
    done("convert", "--to=mindspore", url, tmp_path / "unified")
    assert call("inspect", url).exit_code == 0
    with refused(SourceError, "not-found", f"{url}.2"):
        reshard.open(f"{url}.2")
    assert reshard.verify(tmp_path / "out").equal
    assert all("range" in asked.headers for asked in web.asked if asked.method == "GET" and "a%20b" in asked.target)
