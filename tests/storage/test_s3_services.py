"""Services that want more of S3's client: buckets in host names, keys of KMS, requesters who pay, other clocks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from refusals import refused
from scripted import Answer, Asked, ScriptedServer, error

import reshard
from reshard.core.storage.urls import retries
from reshard.core.storage.urls.remote import remote_store
from reshard.core.storage.urls.s3 import aws
from reshard.core.storage.urls.s3 import client as s3
from reshard.core.storage.urls.s3 import options as own
from reshard.errors import SourceError, TargetError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CONTENT = bytes(range(100))
HUGE = 10 << 20  # more than one part
KMS = {"x-amz-server-side-encryption": "aws:kms", "x-amz-server-side-encryption-aws-kms-key-id": "key-1"}
VARIABLES = (
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "AWS_REQUEST_PAYER", "AWS_SERVER_SIDE_ENCRYPTION", "AWS_SSE_KMS_KEY_ID",
    "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_DEFAULT_PROFILE",
    "AWS_SESSION_TOKEN", "AWS_SKIP_SIGNATURE", "no_proxy", "NO_PROXY", "http_proxy", "HTTP_PROXY",
)  # fmt: skip


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ScriptedServer]:
    """The server that all requests go to, as a proxy: it sees the host names that they are for."""
    server = ScriptedServer()
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://oss.invalid:9000")
    monkeypatch.setenv("HTTP_PROXY", server.url)
    for module, name, value in (
        (retries, "_FIRST_DELAY", 0.01), (s3, "_regions", {}), (s3, "_virtual", set()), (s3, "_skews", {}),
        (own, "_buckets", {}),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    aws._settings.cache_clear()
    yield server
    aws._settings.cache_clear()
    server.close()


def read() -> bytes:
    buffer = bytearray(len(CONTENT))
    remote_store().read_into("s3://b/x", 0, memoryview(buffer))
    return bytes(buffer)


def ranged(_: Asked) -> Answer:
    return Answer(206, {"content-range": f"bytes 0-99/{len(CONTENT)}"}, CONTENT)


def write_parts() -> None:
    sink = remote_store().create("s3://b/x", HUGE)
    sink.write_at(0, bytes(HUGE))
    sink.finish(durable=True)


def uploads(asked: Asked) -> Answer:
    """The replies of a store that takes what it is sent."""
    if asked.method == "POST":
        return Answer(body=b"<R><UploadId>u</UploadId></R>")
    body = b"<R><ETag>e</ETag></R>" if "x-amz-copy-source" in asked.headers else b""
    return Answer(headers={"etag": '"e"', "content-length": str(len(body) or 5)}, body=body or bytes(5))


# --- the bucket in the host name ---------------------------------------------------------------------------------


@pytest.mark.parametrize("said", ["variable", "profile", "option"])
def test_a_bucket_in_the_host_name(
    store: ScriptedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str
) -> None:
    if said == "variable":
        monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
    elif said == "profile":
        (tmp_path / "config").write_text("[default]\ns3 =\n  addressing_style = virtual\n  max_queue_size = 9\n")
    else:
        own.use_options({"config_kwargs": {"s3": {"addressing_style": "virtual"}}}, "s3://b/x")
    store.answer = ranged
    assert read() == CONTENT
    (asked,) = store.asked
    assert (asked.target, asked.headers["host"]) == ("http://b.oss.invalid:9000/x", "b.oss.invalid:9000")


@pytest.mark.parametrize("code", ["SecondLevelDomainForbidden", "VirtualHostDomainRequired"])
def test_a_service_that_wants_the_bucket_in_the_host_name_is_asked_so(store: ScriptedServer, code: str) -> None:
    """Once: it is remembered."""
    store.answers.append(error(code, 403))
    store.answer = ranged
    assert read() + read() == CONTENT * 2
    assert [asked.headers["host"].split(":")[0] for asked in store.asked] == [
        "oss.invalid", "b.oss.invalid", "b.oss.invalid",
    ]  # fmt: skip
    own.use_options({"config_kwargs": {"s3": {"addressing_style": "path"}}}, "s3://b/x")
    store.answers.append(error(code, 403))
    with refused(SourceError, "no-access", code):
        read()


def test_a_state_that_is_refused_without_a_word_is_asked_for_again(store: ScriptedServer) -> None:
    """The response to HEAD has no body, and so no code."""
    store.answers += [Answer(403), error("SecondLevelDomainForbidden", 403)]
    store.answer = lambda _: Answer(206, {"content-length": "5", "etag": '"e"'}, bytes(5))
    assert remote_store().status("s3://b/x").nbytes == 5
    assert [asked.method for asked in store.asked] == ["HEAD", "GET", "GET", "HEAD"]


# --- keys of KMS ---------------------------------------------------------------------------------------------------


def begins_an_object(asked: Asked) -> bool:
    return "partNumber" not in asked.target and "uploadId=" not in asked.target and asked.method in {"PUT", "POST"}


def encrypts(asked: Asked) -> Answer:
    """As a bucket whose policy asks for a key; with a part S3 takes no such headers."""
    sent = {name: value for name, value in asked.headers.items() if "server-side-encryption" in name}
    if asked.method in {"PUT", "POST"} and sent != (KMS if begins_an_object(asked) else {}):
        return error("AccessDenied", 403)
    return uploads(asked)


def by_option(_: pytest.MonkeyPatch) -> None:
    words = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "key-1"}
    own.use_options({"s3_additional_kwargs": words}, "s3://b/x")


def by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "aws:kms")
    monkeypatch.setenv("AWS_SSE_KMS_KEY_ID", "key-1")


@pytest.mark.parametrize("say", [by_option, by_environment])
def test_objects_are_encrypted_with_a_key_of_kms(
    store: ScriptedServer, monkeypatch: pytest.MonkeyPatch, say: Callable[[pytest.MonkeyPatch], None]
) -> None:
    store.answer = encrypts
    with refused(TargetError, "no-access", "s3://b/x"):
        remote_store().put("s3://b/x", CONTENT)
    say(monkeypatch)
    remote_store().put("s3://b/x", CONTENT)
    write_parts()
    remote_store().link("s3://b/x", "s3://b/y")
    assert sum("partNumber" in asked.target for asked in store.asked) == 2


def test_another_library_sees_the_key(bucket: str, monkeypatch: pytest.MonkeyPatch, server: str) -> None:
    """That of a whole object and of one in parts, in moto."""
    s3fs = pytest.importorskip("s3fs")
    by_environment(monkeypatch)
    arrays = {"large": np.zeros(HUGE, np.uint8)}
    reshard.write(arrays, f"{bucket}/set", to="hf")
    there = s3fs.S3FileSystem(client_kwargs={"endpoint_url": server})
    for name in ("model-00001-of-00001.safetensors", "model.safetensors.index.json"):
        head = there.call_s3("head_object", Bucket=bucket.removeprefix("s3://"), Key=f"set/{name}")
        assert (head["ServerSideEncryption"], head["SSEKMSKeyId"]) == ("aws:kms", "key-1")


# --- requesters who pay --------------------------------------------------------------------------------------------


def charges(asked: Asked) -> Answer:
    """As a bucket whose owner lets others pay."""
    if asked.headers.get("x-amz-request-payer") != "requester":
        return error("AccessDenied", 403)
    return ranged(asked) if "range" in asked.headers else uploads(asked)


@pytest.mark.parametrize("said", ["variable", "option"])
def test_a_requester_pays(store: ScriptedServer, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    store.answer = charges
    with refused(SourceError, "no-access", "s3://b/x"):
        read()
    if said == "variable":
        monkeypatch.setenv("AWS_REQUEST_PAYER", "true")
    else:
        own.use_options({"requester_pays": True}, "s3://b/x")
    assert read() == CONTENT
    write_parts()
    remote_store().link("s3://b/x", "s3://b/y")
    remote_store().remove("s3://b/y")
    assert "x-amz-request-payer" in store.asked[-1].headers["authorization"]


# --- another clock -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hours", [-3, 2])
@pytest.mark.parametrize("first", ["GET", "HEAD"])
def test_a_clock_that_differs_from_the_services(store: ScriptedServer, hours: int, first: str) -> None:
    """The service tells its time with the refusal; the next requests are right at once."""

    def timed(asked: Asked) -> Answer:
        there = datetime.now(UTC) + timedelta(hours=hours)
        sent = datetime.strptime(asked.headers["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        if abs(sent - there) > timedelta(minutes=15):
            late = error("RequestTimeTooSkewed", 403)
            return late._replace(headers={"date": format_datetime(there, usegmt=True)})
        head = Answer(headers={"content-length": "5", "etag": '"e"'})
        return {"GET": ranged(asked), "HEAD": head}.get(asked.method, Answer())

    store.answer = timed
    if first == "HEAD":
        assert remote_store().status("s3://b/x").nbytes == 5
    assert read() == CONTENT
    assert len(store.asked) == (3 if first == "HEAD" else 2)
    remote_store().put("s3://b/y", CONTENT)
    assert len(store.asked) == (4 if first == "HEAD" else 3)


def test_a_refusal_at_the_right_time_is_one(store: ScriptedServer) -> None:
    now = format_datetime(datetime.now(UTC), usegmt=True)
    store.answer = lambda _: error("AccessDenied", 403)._replace(headers={"date": now})
    with refused(SourceError, "no-access", "s3://b/x"):
        read()
    assert len(store.asked) == 1


# --- options that are none -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"requester_pays": "yes"}, "wrong-type"),
        ({"config_kwargs": {"s3": {"addressing_style": "dns"}}}, "bad-value"),
        ({"config_kwargs": {"signature_version": "s3"}}, "unknown-option"),
        ({"s3_additional_kwargs": {"ACL": "private"}}, "unknown-option"),
        ({"s3_additional_kwargs": "aws:kms"}, "wrong-type"),
        ({"encryption": "aws:kms"}, "unknown-option"),
    ],
)
def test_options_that_are_none(options: dict[str, Any], code: str) -> None:
    with refused(UsageError, code, "storage_options" if code != "wrong-type" else ""):
        own.use_options(options, "s3://b/x")
