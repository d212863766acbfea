"""`storage_options=`: credentials and addresses of buckets, given in Python in place of the environment's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from refusals import refused
from scripted import Answer, Asked, ScriptedServer

import reshard
from reshard.core.storage.places import as_place
from reshard.core.storage.urls import retries
from reshard.core.storage.urls.s3 import client as s3
from reshard.core.storage.urls.s3 import options as own
from reshard.errors import ReshardError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ARRAYS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
LISTING = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
OF_SERVER = {"key": "test", "secret": "test"}
OF_AMAZON = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION")


@pytest.fixture(autouse=True)
def no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "_buckets", {})
    monkeypatch.setattr(s3, "_regions", {})
    monkeypatch.setattr(retries, "_FIRST_DELAY", 0.01)


@pytest.fixture
def options(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The options of a server, of which the environment says nothing."""
    for name in OF_AMAZON:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    yield {**OF_SERVER, "endpoint_url": server, "region": "us-east-1"}
    own._buckets.clear()


@pytest.fixture
def bucket(server: str, request: pytest.FixtureRequest) -> str:
    name = f"own-{abs(hash(request.node.name))}"
    s3fs = pytest.importorskip("s3fs")
    s3fs.S3FileSystem(**OF_SERVER, client_kwargs={"endpoint_url": server}).mkdir(name)
    return f"s3://{name}"


def test_source_and_target_with_options(options: dict[str, Any], bucket: str, tmp_path: Path) -> None:
    """Without them, nothing is found: the environment has neither keys nor an address."""
    reshard.write(ARRAYS, f"{bucket}/set", to="hf", storage_options=options)
    source = reshard.open(f"{bucket}/set", storage_options=options)
    assert np.array_equal(source["w"].compute(), ARRAYS["w"])
    reshard.plan(source, to="safetensors").run(tmp_path / "local")
    assert np.array_equal(reshard.open(tmp_path / "local")["w"].compute(), ARRAYS["w"])
    reshard.plan(reshard.open(tmp_path / "local"), to="hf").run(f"{bucket}/again", storage_options=options)
    reshard.convert(f"{bucket}/again", f"{bucket}/store", to="zarr", storage_options=options)
    reshard.open(tmp_path / "local").to_zarr(f"{bucket}/other", storage_options=options)
    assert reshard.verify(f"{bucket}/again", against=f"{bucket}/set", storage_options=options)
    runs = reshard.runs(bucket, storage_options=options)
    assert {record.path.rpartition("/")[2] for record in runs} == {"set", "again", "store", "other"}


def test_client_kwargs_are_those_of_fsspec(options: dict[str, Any], bucket: str) -> None:
    kwargs = {"endpoint_url": options.pop("endpoint_url"), "region_name": options.pop("region")}
    reshard.write(ARRAYS, f"{bucket}/set", to="hf", storage_options={**options, "client_kwargs": kwargs})
    assert list(reshard.open(f"{bucket}/set")) == ["w"]  # they hold for the bucket


@pytest.fixture
def store() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    server.answer = lambda asked: Answer(200, {}, LISTING) if asked.method == "GET" else Answer(404)
    yield server
    server.close()


def asked_with(store: ScriptedServer, **options: Any) -> Asked:
    with pytest.raises(ReshardError):  # nothing is there
        reshard.open("s3://bucket/run", storage_options={"endpoint_url": store.url, **options})
    return store.asked[-1]


def test_requests_have_the_options(store: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "of the environment")
    mine = {"key": "mine", "secret": "x", "token": "short"}
    headers = asked_with(store, region="eu-west-3", **mine).headers
    assert "Credential=mine/" in headers["authorization"]
    assert "/eu-west-3/s3/" in headers["authorization"]
    assert headers["x-amz-security-token"] == "short"
    as_place("s3://bucket/run").refresh()
    assert "authorization" not in asked_with(store, anon=True).headers
    as_place("s3://bucket/run").refresh()
    assert "Credential=of the environment/" in asked_with(store).headers["authorization"]


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        ({"kye": "a"}, "unknown-option", "kye"),
        ({"client_kwargs": {"verify": False}}, "unknown-option", "verify"),
        ({"key": "a"}, "bad-value", "secret"),
        ({"token": "a"}, "bad-value", "key"),
        ({"anon": True, "key": "a", "secret": "b"}, "bad-value", "anon"),
        ({"anon": "yes"}, "wrong-type", "anon"),
        ({"key": b"a", "secret": "b"}, "wrong-type", "key"),
        ({"endpoint_url": "localhost:9000"}, "bad-value", "endpoint_url"),
        ([("key", "a")], "bad-argument", "storage_options"),
    ],
)
def test_options_that_cannot_be_are_refused(options: Any, code: str, word: str) -> None:
    with refused(UsageError, code, word):
        reshard.open("s3://bucket/run", storage_options=options)
    assert own._buckets == {}


@pytest.mark.parametrize("path", ["gs://bucket/run", "memory://run", "runs/1"])
def test_options_are_for_s3(path: str) -> None:
    with refused(UsageError, "option-of-another-format", path):
        reshard.open(path, storage_options={"anon": True})
    with refused(UsageError, "option-of-another-format", path):
        reshard.write(ARRAYS, path, storage_options={"anon": True})


def test_a_cluster_is_refused(options: dict[str, Any], bucket: str, tmp_path: Path) -> None:
    reshard.write(ARRAYS, f"{bucket}/set", to="hf", storage_options=options)
    source = reshard.open(f"{bucket}/set")
    client: Any = SimpleNamespace(submit=None, scatter=None)  # as a Client has them
    with refused(ReshardError, "options-not-there", bucket):
        reshard.plan(source, to="zarr").run(tmp_path / "out", client=client)
    with refused(ReshardError, "options-not-there", bucket):
        source.stats(client=client)
    with refused(ReshardError, "options-not-there", bucket):
        reshard.diff(source, source, client=client)
    with refused(ReshardError, "options-not-there", bucket):
        reshard.verify(source, client=client)
    assert not (tmp_path / "out").exists()


def test_no_secret_is_written_down(options: dict[str, Any], bucket: str, tmp_path: Path) -> None:
    secret = {**options, "key": "AKIDKEY", "secret": "sEcReTsEcReT"}
    reshard.write(ARRAYS, f"{bucket}/set", to="hf", storage_options=secret)
    reshard.plan(reshard.open(f"{bucket}/set"), to="hf").run(tmp_path / "out")
    texts = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(texts) > 2
    assert not [text for text in texts if b"sEcReT" in text or b"AKIDKEY" in text]


def test_a_store_copies_only_what_the_same_options_reach(options: dict[str, Any], bucket: str, tmp_path: Path) -> None:
    reshard.write(ARRAYS, f"{bucket}/set", to="hf", storage_options=options)
    assert own.share_options(f"{bucket}/set", f"{bucket}/out")
    own.use_options({**options, "endpoint_url": "http://127.0.0.1:1"}, "s3://elsewhere/out")
    assert not own.share_options(f"{bucket}/set", "s3://elsewhere/out")
