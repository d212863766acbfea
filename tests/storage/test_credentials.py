"""Where credentials, regions and addresses of S3 are looked for, and what happens if there are none or they expire."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from refusals import refused
from scripted import Answer, Asked, ScriptedServer, error

from reshard.core.storage.urls import retries
from reshard.core.storage.urls.remote import remote_store
from reshard.core.storage.urls.s3 import aws
from reshard.core.storage.urls.s3.aws import Keys
from reshard.errors import SourceError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
def store(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
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


def test_files_elsewhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(home / "keys"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(home / "settings"))
    profile(home / "keys", "default", Keys("K", "k"))
    profile(home / "settings", "default", region="eu-west-2")
    assert (aws.keys("bucket"), aws.region("bucket")) == (Keys("K", "k"), "eu-west-2")


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


def test_no_credentials(store: ScriptedServer) -> None:
    with refused(SourceError, "no-access", "s3://b/x", "AWS_ACCESS_KEY_ID"):
        remote_store().status("s3://b/x")
    assert not store.asked


def test_a_profile_that_does_not_exist(store: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with refused(SourceError, "no-access", "s3://b/x", "AWS_PROFILE"):
        remote_store().status("s3://b/x")


def test_a_profile_that_cannot_be_read(home: Path) -> None:
    (home / ".aws/credentials").write_text("no section")
    aws.renew()
    with refused(UsageError, "bad-value", ".aws/credentials"):
        remote_store().status("s3://b/x")


def test_requests_without_signatures(store: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    store.answers.append(Answer(headers={"content-length": "7", "etag": '"e"'}))
    assert remote_store().status("s3://b/x").nbytes == 7
    assert not {"authorization", "x-amz-date"} & set(store.asked[0].headers)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_expired_credentials_are_looked_for_again(home: Path, store: ScriptedServer, method: str) -> None:
    """A reply to HEAD has no body that says why."""
    profile(home / ".aws/credentials", "default", Keys("A", "a", "old"))

    def answer(asked: Asked) -> Answer:
        if asked.headers["x-amz-security-token"] == "new":
            return Answer(headers={"content-length": "3"}, body=b"abc")
        content = (home / ".aws/credentials").read_text()
        (home / ".aws/credentials").write_text(content.replace("old", "new"))
        return error("ExpiredToken")

    store.answer = answer
    if method == "GET":
        assert remote_store().contents("s3://b/x") == b"abc"
    else:
        assert remote_store().status("s3://b/x").nbytes == 3
    assert len(store.asked) <= 3


def test_credentials_that_stay_expired(store: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "A")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a")
    store.answer = lambda _: error("ExpiredToken")
    with refused(SourceError, "store-not-answering", "ExpiredToken"):
        remote_store().contents("s3://b/x")


@pytest.mark.parametrize("code", ["AccessDenied", "SignatureDoesNotMatch", "InvalidAccessKeyId"])
def test_a_refusal_is_final(store: ScriptedServer, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "A")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a")
    store.answer = lambda _: error(code, 403)
    with refused(SourceError, "no-access", "s3://b/x", code):
        remote_store().contents("s3://b/x")
    assert len(store.asked) == 1
