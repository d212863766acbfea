"""The client of S3, its connections, signatures and credentials, with a server that says what a test says."""

from __future__ import annotations

import datetime as dt
import ipaddress
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from scripted import Answer, Asked, ScriptedServer, close_idle, error

from reshard.core.storage.places import as_place
from reshard.core.storage.urls import retries
from reshard.core.storage.urls.remote import remote_store
from reshard.core.storage.urls.s3 import aws
from reshard.core.storage.urls.s3 import client as s3
from reshard.core.storage.urls.s3.aws import Keys, encoded, query_of, signed
from reshard.core.storage.urls.s3.client import S3Client
from reshard.errors import SourceError, TargetError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


CONTENT = bytes(range(200))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    """A server that S3's requests of this process go to."""
    server = ScriptedServer()
    environment(monkeypatch, server.url)
    yield server
    server.close()


def environment(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setattr(retries, "_FIRST_DELAY", 0.01)
    monkeypatch.setattr(s3, "_regions", {})


def ranged(asked: Asked) -> Answer:
    """Serve a range of the contents, as S3 does."""
    first, _, last = asked.headers["range"].removeprefix("bytes=").partition("-")
    body = CONTENT[int(first) : int(last) + 1]
    return Answer(206, {"content-range": f"bytes {first}-{int(first) + len(body) - 1}/{len(CONTENT)}"}, body)


def read(url: str, offset: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    remote_store().read_into(url, offset, memoryview(buffer))
    return bytes(buffer)


@pytest.mark.parametrize("status", [301, 307, 400])
def test_a_bucket_in_another_region_is_asked_there(store: ScriptedServer, status: int) -> None:
    """Once: the region is kept."""
    store.answers.append(error("PermanentRedirect", status, x_amz_bucket_region="eu-west-3"))
    store.answer = ranged
    assert read("s3://elsewhere/x", 0, 100) + read("s3://elsewhere/x", 100, 100) == CONTENT
    regions = [asked.headers["authorization"].split("/")[2] for asked in store.asked]
    assert regions == ["us-east-1", "eu-west-3", "eu-west-3"]


def test_a_region_that_is_refused_again_is_an_error(store: ScriptedServer) -> None:
    store.answers += [error("PermanentRedirect", 301, x_amz_bucket_region=region) for region in ("a-1", "b-2")]
    with refused(SourceError, "store-error", "PermanentRedirect"):
        read("s3://elsewhere/x", 0, 1)
    assert len(store.asked) == 2


@pytest.mark.parametrize(
    ("bucket", "region", "root"),
    [
        ("bucket", "us-east-1", "https://bucket.s3.us-east-1.amazonaws.com"),
        ("bucket", "cn-north-1", "https://bucket.s3.cn-north-1.amazonaws.com.cn"),
        ("with.dots", "eu-west-1", "https://s3.eu-west-1.amazonaws.com/with.dots"),  # no certificate has such a name
    ],
)
def test_addresses_at_amazon(monkeypatch: pytest.MonkeyPatch, bucket: str, region: str, root: str) -> None:
    environment(monkeypatch, "")
    assert S3Client(bucket)._root(region) == root


@pytest.mark.parametrize(
    "name",
    ["a b.ckpt", "a+b&c=d.ckpt", "été/模型-😀.ckpt", "a#b?c%20d%.ckpt", "a'b\"(c)*!~@:,;$.ckpt", "x//y/./../z.ckpt"],
)
def test_any_name_of_an_object(bucket: str, tmp_path: Path, name: str) -> None:
    """Written, seen by another client, listed, read, copied and removed."""
    url, store = f"{bucket}/{name}", remote_store()
    store.put(url, CONTENT)
    keys = fsspec.filesystem("s3").call_s3("list_objects_v2", Bucket=bucket.removeprefix("s3://"))
    assert [item["Key"] for item in keys["Contents"]] == [name]
    assert store.status(url).nbytes == len(CONTENT)
    assert [file.url for file in as_place(bucket).files()] == [url]
    assert read(url, 50, 100) == CONTENT[50:150]
    sink = store.create(f"{url}.2", 10 << 20)
    sink.write_at(0, bytes(10 << 20))
    sink.finish(durable=True)
    store.link(url, f"{url}.3")
    assert store.contents(f"{url}.3") == CONTENT
    as_place(bucket).refresh()
    assert {file.url for file in as_place(bucket).files()} == {url, f"{url}.2", f"{url}.3"}
    store.remove(url)
    assert store.contents(url) is None


def test_connections_are_kept(store: ScriptedServer) -> None:
    store.answer = ranged
    assert read("s3://b/x", 0, 100) + read("s3://b/x", 100, 100) == CONTENT
    assert len({asked.connection for asked in store.asked}) == 1


def test_a_connection_that_the_server_closed_while_it_was_idle(
    store: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no failed try, and needs no delay."""
    monkeypatch.setattr(retries, "TRIES", 1)
    store.answers += [ranged(Asked("GET", "", {"range": "bytes=0-99"}, b"", 0))._replace(hangs_up=True)]
    store.answer = lambda asked: ranged(asked) if asked.method == "GET" else Answer()
    assert read("s3://b/x", 0, 100) + read("s3://b/x", 100, 100) == CONTENT
    remote_store().put("s3://b/y", b"x")
    assert len({asked.connection for asked in store.asked}) == 2


def test_a_short_reply_that_looks_whole_is_asked_for_again(store: ScriptedServer) -> None:
    store.answers += [Answer(206, {"content-range": "bytes 0-49/200"}, CONTENT[:50])] * 2
    store.answer = ranged
    assert read("s3://b/x", 0, 100) == CONTENT[:100]
    assert len(store.asked) == 3


def test_a_reply_that_ends_early_is_asked_for_again(store: ScriptedServer) -> None:
    """Into a buffer, and one that is kept as it is."""
    cut = ranged(Asked("GET", "", {"range": "bytes=0-99"}, b"", 0))._replace(cut=CONTENT[:60])
    store.answers += [cut, cut]
    store.answer = ranged
    assert read("s3://b/x", 0, 100) == CONTENT[:100]
    for sent in (b"", CONTENT[:60]):
        store.answers += [Answer(body=CONTENT, cut=sent), Answer(body=CONTENT)]
        assert remote_store().contents("s3://b/x") == CONTENT


def test_the_end_of_a_file_is_no_short_reply(store: ScriptedServer) -> None:
    store.answer = ranged
    with refused(SourceError, "truncated", "s3://b/x", "200"):
        read("s3://b/x", 150, 100)
    store.answer = lambda _: error("InvalidRange", 416)
    with refused(SourceError, "truncated", "s3://b/x"):
        read("s3://b/x", 250, 10)
    assert len(store.asked) == 2


def test_a_store_that_ignores_ranges(store: ScriptedServer) -> None:
    """The first bytes are right; others would be wrong."""
    store.answer = lambda _: Answer(200, {}, CONTENT)
    assert read("s3://b/x", 0, 100) == CONTENT[:100]
    with refused(SourceError, "store-error", "s3://b/x"):
        read("s3://b/x", 100, 50)
    store.answer = ranged
    assert read("s3://b/x", 100, 50) == CONTENT[100:150]


def test_no_more_is_read_than_was_asked_for(store: ScriptedServer) -> None:
    """A store that ignores ranges may not say how long its reply is."""
    body = b"c8\r\n" + CONTENT + b"\r\nfffff\r\nand so on"
    store.answers.append(Answer(200, {"transfer-encoding": "chunked"}, body, hangs_up=True))
    assert read("s3://b/x", 0, 200) == CONTENT
    assert len(store.asked) == 1


def test_an_endpoint_that_is_no_url_is_refused(store: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.address)
    with refused(UsageError, "bad-value", "AWS_ENDPOINT_URL"):
        read("s3://b/x", 0, 1)


def test_a_completion_whose_reply_was_lost_on_a_kept_connection(store: ScriptedServer) -> None:
    """It is not repeated unnoticed: the second one would find no upload."""
    size = 10 << 20

    def answer(asked: Asked) -> Answer:
        if asked.method == "POST" and "uploads" in asked.target:
            return Answer(body=b"<R><UploadId>u</UploadId></R>")
        if asked.method == "POST":
            completions.append(asked)
            return Answer(hangs_up=True, body=b"<R/>", cut=b"") if len(completions) == 1 else error("NoSuchUpload", 404)
        return Answer(headers={"etag": '"e"'} | ({"content-length": str(size)} if asked.method == "HEAD" else {}))

    completions: list[Asked] = []
    store.answer = answer
    sink = remote_store().create("s3://b/x", size)
    sink.write_at(0, bytes(size))
    sink.finish(durable=True)
    assert len(completions) == 2
    assert sink.ended


def test_a_refusal_within_a_success(store: ScriptedServer) -> None:
    """S3 answers a completion and a copy before it is done."""
    head = Answer(headers={"content-length": "5", "etag": '"e"'})
    store.answers += [head, error("InternalError", 200), head, Answer(body=b"<R><ETag>e</ETag></R>")]
    remote_store().link("s3://b/x", "s3://b/y")
    assert [asked.method for asked in store.asked] == ["HEAD", "PUT", "HEAD", "PUT"]
    store.answers += [head, error("NoSuchThing", 200)]
    with refused(TargetError, "store-error", "NoSuchThing"):
        remote_store().link("s3://b/x", "s3://b/y")


@pytest.mark.parametrize("login", ["", "me:p%40ss@"])
def test_a_proxy(store: ScriptedServer, monkeypatch: pytest.MonkeyPatch, login: str) -> None:
    """It is asked for the whole URL, and told who asks."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://s3.invalid:9000")
    monkeypatch.setenv("HTTP_PROXY", f"http://{login}{store.address}")
    store.answer = ranged
    assert read("s3://b/x", 0, 100) == CONTENT[:100]
    (asked,) = store.asked
    assert (asked.target, asked.headers["host"]) == ("http://s3.invalid:9000/b/x", "s3.invalid:9000")
    assert asked.headers.get("proxy-authorization", "") == ("Basic bWU6cEBzcw==" if login else "")  # me:p@ss


@pytest.mark.skipif(
    sys.version_info < (3, 11, 4), reason="http.client leaves the proxy's answer open before Python 3.11.4"
)
def test_a_proxy_for_https_is_asked_for_a_tunnel(store: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://s3.invalid")
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:secret@{store.address}")
    store.answer = lambda _: Answer(407)
    with refused(SourceError, "store-error", "s3://b/x", "407"):
        read("s3://b/x", 0, 1)
    (asked,) = store.asked
    assert (asked.method, asked.target) == ("CONNECT", "s3.invalid:443")
    assert asked.headers["proxy-authorization"] == "Basic bWU6c2VjcmV0"


@pytest.mark.parametrize("exception", ["127.0.0.1", "{address}", "localhost,127.0.0.1", "*"])
def test_no_proxy(store: ScriptedServer, monkeypatch: pytest.MonkeyPatch, exception: str) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", exception.format(address=store.address))
    store.answer = ranged
    assert read("s3://b/x", 0, 100) == CONTENT[:100]
    assert store.asked[0].target == "/b/x"


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A self-signed certificate for this machine, with its key."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now - dt.timedelta(1)).not_valid_after(now + dt.timedelta(1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    encodings = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path = tmp_path / "both.pem"
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM) + key.private_bytes(*encodings))
    return path


def test_a_certificate_of_ones_own(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ScriptedServer(certificate)
    environment(monkeypatch, server.url)
    server.answer = ranged
    with refused(SourceError, "store-error", "certificate"):
        read("s3://b/x", 0, 100)
    assert not server.asked
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    assert read("s3://b/x", 0, 100) + read("s3://b/x", 100, 100) == CONTENT
    assert len({asked.connection for asked in server.asked}) == 1
    server.answers.append(Answer(206, {"content-range": "bytes 0-99/200"}, CONTENT[:100], hangs_up=True))
    assert read("s3://b/x", 0, 100) + read("s3://b/x", 100, 100) == CONTENT
    close_idle()
    server.close()
    monkeypatch.setenv("AWS_CA_BUNDLE", "/nowhere")
    with refused(UsageError, "bad-value", "/nowhere"):
        read("s3://b/x", 0, 1)


TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
NAMES = st.text("abcXYZ-019", min_size=1, max_size=10)


@given(
    key=TEXT, query=st.dictionaries(NAMES, TEXT, max_size=4), method=st.sampled_from(["GET", "PUT", "HEAD", "DELETE"]),
    keys=st.builds(Keys, st.text("ABC012", min_size=1), st.text("abc/+=", min_size=1), st.text("abc/+=", max_size=9)),
    region=st.sampled_from(["us-east-1", "eu-west-3"]), span=st.sampled_from([{}, {"range": "bytes=0-9"}]),
    root=st.sampled_from(["https://bucket.s3.amazonaws.com", "http://127.0.0.1:9000/bucket"]),
)  # fmt: skip
def test_botocore_signs_alike(
    key: str, query: dict[str, str], method: str, keys: Keys, region: str, span: dict[str, str], root: str
) -> None:
    auth = pytest.importorskip("botocore.auth")
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    url = f"{root}/{encoded(key)}" + (f"?{query_of(query)}" if query else "")
    request = AWSRequest(method, url, headers=span)
    auth.S3SigV4Auth(Credentials(keys.access, keys.secret, keys.token or None), "s3", region).add_auth(request)
    now = datetime.strptime(request.context["timestamp"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    content = request.headers["X-Amz-Content-SHA256"]
    sent = signed(method, url, span | {"x-amz-content-sha256": content}, keys, region, now)
    assert sent["authorization"] == request.headers["Authorization"]
    assert sent.get("x-amz-security-token", "") == keys.token


VARIABLES = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_DEFAULT_PROFILE",
    "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_SKIP_SIGNATURE", "AWS_REGION", "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3",
)  # fmt: skip


@pytest.fixture(params=["botocore", "alone"])
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A home directory with `.aws` in an environment without credentials, with botocore and without it."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    if request.param == "alone":
        monkeypatch.setitem(sys.modules, "botocore.session", None)
    else:
        pytest.importorskip("botocore")
    (tmp_path / ".aws").mkdir()
    aws.renew()
    yield tmp_path
    aws.renew()


@pytest.fixture
def keyless(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setattr(retries, "_FIRST_DELAY", 0.01)
    yield server
    server.close()


def profile(path: Path, section: str, keys: Keys | None = None, **settings: str) -> None:
    """Add a section to a file of Amazon's tools."""
    if keys is not None:
        settings |= {"aws_access_key_id": keys.access, "aws_secret_access_key": keys.secret}
        settings |= {"aws_session_token": keys.token} if keys.token else {}
    with path.open("a") as file:
        file.write(f"[{section}]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items()))
    aws.renew()


def test_the_environment_comes_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile(home / ".aws/credentials", "default", Keys("P", "p"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "E")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "e")
    assert aws.keys("bucket") == Keys("E", "e")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "t")
    assert aws.keys("bucket") == Keys("E", "e", "t")


def test_profiles(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both files; the shared one comes first."""
    profile(home / ".aws/credentials", "default", Keys("D", "d"))
    assert aws.keys("bucket") == Keys("D", "d")
    profile(home / ".aws/credentials", "x", Keys("X", "x%/+=", "t"))
    profile(home / ".aws/config", "profile x", region="eu-north-1", endpoint_url="http://x:9/")
    profile(home / ".aws/config", "profile y", Keys("Y", "y"))
    monkeypatch.setenv("AWS_PROFILE", "x")
    assert (aws.keys("bucket"), aws.region("bucket"), aws.endpoint("bucket")) == (
        Keys("X", "x%/+=", "t"),
        "eu-north-1",
        "http://x:9",
    )
    monkeypatch.setenv("AWS_PROFILE", "y")
    assert (aws.keys("bucket"), aws.region("bucket"), aws.endpoint("bucket")) == (Keys("Y", "y"), "us-east-1", "")
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.setenv("AWS_DEFAULT_PROFILE", "x")
    aws.renew()
    assert aws.keys("bucket") == Keys("X", "x%/+=", "t")


def test_the_address_and_the_region(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (aws.endpoint("bucket"), aws.region("bucket")) == ("", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://all:1/")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert (aws.endpoint("bucket"), aws.region("bucket")) == ("http://all:1", "eu-west-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3:2/")
    monkeypatch.setenv("AWS_REGION", "eu-west-2")
    assert (aws.endpoint("bucket"), aws.region("bucket")) == ("http://s3:2", "eu-west-2")


@pytest.mark.parametrize("home", ["botocore"], indirect=True)
def test_a_process_that_gives_credentials(home: Path) -> None:
    """Botocore knows more sources."""
    script = home / "give.py"
    script.write_text("""print('{"Version": 1, "AccessKeyId": "C", "SecretAccessKey": "c", "SessionToken": "t"}')""")
    profile(home / ".aws/config", "default", credential_process=f"{sys.executable} {script}")
    assert aws.keys("bucket") == Keys("C", "c", "t")
    script.write_text("raise SystemExit('no one is logged in')")
    aws.renew()
    with refused(SourceError, "no-access", "s3://b/x"):
        remote_store().status("s3://b/x")


@pytest.mark.parametrize("profile", ["", "nobody"])
def test_no_credentials(keyless: ScriptedServer, monkeypatch: pytest.MonkeyPatch, profile: str) -> None:
    """The places that were looked at are named."""
    if profile:
        monkeypatch.setenv("AWS_PROFILE", profile)
    with refused(SourceError, "no-access", "s3://b/x", "AWS_PROFILE" if profile else "AWS_ACCESS_KEY_ID"):
        remote_store().status("s3://b/x")
    assert not keyless.asked


def test_a_profile_that_cannot_be_read(home: Path) -> None:
    (home / ".aws/credentials").write_text("no section")
    aws.renew()
    with refused(UsageError, "bad-value", ".aws/credentials"):
        remote_store().status("s3://b/x")


def test_requests_without_signatures(keyless: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    keyless.answers.append(Answer(headers={"content-length": "7", "etag": '"e"'}))
    assert remote_store().status("s3://b/x").nbytes == 7
    assert not {"authorization", "x-amz-date"} & set(keyless.asked[0].headers)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_expired_credentials_are_looked_for_again(home: Path, keyless: ScriptedServer, method: str) -> None:
    """A reply to HEAD has no body that says why."""
    profile(home / ".aws/credentials", "default", Keys("A", "a", "old"))

    def answer(asked: Asked) -> Answer:
        if asked.headers["x-amz-security-token"] == "new":
            return Answer(headers={"content-length": "3"}, body=b"abc")
        content = (home / ".aws/credentials").read_text()
        (home / ".aws/credentials").write_text(content.replace("old", "new"))
        return error("ExpiredToken")

    keyless.answer = answer
    if method == "GET":
        assert remote_store().contents("s3://b/x") == b"abc"
    else:
        assert remote_store().status("s3://b/x").nbytes == 3
    assert len(keyless.asked) <= 3


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("ExpiredToken", 400, "store-not-answering"),
        *((code, 403, "no-access") for code in ("AccessDenied", "SignatureDoesNotMatch", "InvalidAccessKeyId")),
    ],
)
def test_a_refusal(keyless: ScriptedServer, monkeypatch: pytest.MonkeyPatch, code: str, status: int, said: str) -> None:
    """It is final, but of keys that are expired, which are looked for again."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "A")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a")
    keyless.answer = lambda _: error(code, status)
    with refused(SourceError, said, "s3://b/x", code):
        remote_store().contents("s3://b/x")
    assert (len(keyless.asked) == 1) == (said == "no-access")
