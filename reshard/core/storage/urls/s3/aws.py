"""Settings and credentials of S3, and the signatures of requests (AWS Signature Version 4).

They are the `storage_options` of a bucket (`options`); what these leave out is looked for where Amazon's own tools
look: environment variables, then the profile (`AWS_PROFILE`) in `~/.aws/credentials` and `~/.aws/config`. Roles of
machines and containers, single sign-on and other processes are left to botocore, which also renews such credentials, if
it is installed.
"""

from __future__ import annotations

import configparser
import hashlib
import hmac
import os
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, urlsplit

from reshard.core.storage.urls.s3.options import options_of
from reshard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

_UNSIGNED = "UNSIGNED-PAYLOAD"  # bodies have checksums of their own


class Keys(NamedTuple):
    """A key with its secret and, if it is temporary, its session token."""

    access: str
    secret: str
    token: str = ""


def _profile() -> Mapping[str, str]:
    """Return the settings of the profile in the files of Amazon's tools."""
    name = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"
    config = os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")
    shared = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    return _settings(name, os.path.expanduser(config), os.path.expanduser(shared))


@lru_cache(maxsize=4)
def _settings(profile: str, config: str, shared: str) -> Mapping[str, str]:
    settings: dict[str, str] = {}
    for path, section in ((config, f"profile {profile}"), (config, profile), (shared, profile)):
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read(path)
        except (configparser.Error, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {path}: {error.args[0]!r:.200}", code="bad-value") from None
        if parser.has_section(section):
            settings |= {key: value.strip() for key, value in parser.items(section)}
    return settings


def endpoint(bucket: str) -> str:
    """Return the URL of the S3 service of a bucket, or "" for Amazon's.

    Raises:
        UsageError: it is not a URL.
    """
    if own := options_of(bucket).endpoint_url:
        return own
    url = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or _profile().get("endpoint_url")
    url = (url or "").rstrip("/")
    if url and not url.startswith(("http://", "https://")):
        raise UsageError(
            "the URL of the S3 service (AWS_ENDPOINT_URL, or endpoint_url of the profile) has no http:// or https://",
            code="bad-value",
        )
    return url


def region(bucket: str) -> str:
    """Return the region of the S3 service of a bucket."""
    if own := options_of(bucket).region:
        return own
    named = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or _profile().get("region")
    return named or "us-east-1"


def is_virtual(bucket: str) -> bool | None:
    """Return whether a bucket is in the host name of requests, not in their path; None if nobody says it."""
    style = options_of(bucket).addressing_style or _s3_settings().get("addressing_style", "")
    if _is_set("AWS_VIRTUAL_HOSTED_STYLE_REQUEST") and not options_of(bucket).addressing_style:
        return True
    return None if style in {"", "auto"} else style == "virtual"


def _s3_settings() -> Mapping[str, str]:
    """Return the indented lines below `s3 =` in the profile."""
    pairs = (line.partition("=") for line in _profile().get("s3", "").splitlines())
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in {"1", "true", "yes"}


def payer(bucket: str) -> dict[str, str]:
    """Return the header of every request to a bucket whose requester pays."""
    pays = options_of(bucket).requester_pays or _is_set("AWS_REQUEST_PAYER")
    return {"x-amz-request-payer": "requester"} if pays else {}


def encryption(bucket: str) -> dict[str, str]:
    """Return the headers that say how the store encrypts a new object."""
    own = options_of(bucket)
    how = own.encryption or os.environ.get("AWS_SERVER_SIDE_ENCRYPTION", "")
    key = own.encryption_key or os.environ.get("AWS_SSE_KMS_KEY_ID", "")
    headers = {"x-amz-server-side-encryption": how or "aws:kms"} if how or key else {}
    return headers | ({"x-amz-server-side-encryption-aws-kms-key-id": key} if key else {})


def keys(bucket: str) -> Keys | None:
    """Return the credentials for a bucket; None if requests are not to be signed.

    Raises:
        PermissionError: there are none.
    """
    own = options_of(bucket)
    if own.anon:
        return None
    if own.key:
        return Keys(own.key, own.secret, own.token)
    if _is_set("AWS_SKIP_SIGNATURE"):
        return None
    access, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    if access and secret:
        return Keys(access, secret, os.environ.get("AWS_SESSION_TOKEN", ""))
    if source := _botocore(os.environ.get("AWS_PROFILE", "")):
        frozen = source.get_frozen_credentials()  # which renews them in time
        return Keys(frozen.access_key, frozen.secret_key, frozen.token or "")
    profile = _profile()
    if "aws_access_key_id" in profile and "aws_secret_access_key" in profile:
        token = profile.get("aws_session_token", "")
        return Keys(profile["aws_access_key_id"], profile["aws_secret_access_key"], token)
    raise PermissionError("there are no credentials")


@lru_cache(maxsize=1)
def _botocore(_profile: str) -> Any:
    """Return botocore's credentials; None if it is not installed or has none."""
    try:
        from botocore.exceptions import ProfileNotFound  # slow, and only for keys that are not in the environment
        from botocore.session import Session
    except ImportError:
        return None
    try:
        return Session().get_credentials()
    except ProfileNotFound as error:
        raise PermissionError(str(error)) from None


def renew() -> None:
    """Look for credentials again, since the last ones have expired."""
    _botocore.cache_clear()
    _settings.cache_clear()


@lru_cache(maxsize=16)
def _signing_key(secret: str, date: str, region: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in (date, region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def encoded(key: str) -> str:
    """Return a key or a value as it is in the URL of a request.

    >>> encoded("run 1/a+b")
    'run%201/a%2Bb'
    """
    return quote(key, safe="/-_.~")


def query_of(parameters: Mapping[str, str]) -> str:
    """Return the query of a URL, in the order in which it is signed."""
    return "&".join(
        f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in sorted(parameters.items())
    )


def signed(
    method: str, url: str, headers: Mapping[str, str], signer: Keys | None, region: str, now: datetime | None = None
) -> dict[str, str]:
    """Return the headers of a request with its signature.

    Args:
        method: the HTTP method.
        url: the encoded URL, with its query as from `query_of`.
        headers: the headers to sign, with names in lower case.
        signer: the credentials; None for a request without a signature.
        region: the region of the service.
        now: the time of the request.
    """
    _, address, path, query, _ = urlsplit(url)
    headers = {"host": address, **headers}
    if signer is None:
        return headers
    time = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    headers.setdefault("x-amz-content-sha256", _UNSIGNED)
    headers["x-amz-date"] = time
    if signer.token:
        headers["x-amz-security-token"] = signer.token
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{' '.join(headers[name].split())}\n" for name in sorted(headers))
    request = "\n".join((method, path or "/", query, lines, names, headers["x-amz-content-sha256"]))
    scope = f"{time[:8]}/{region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{time}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    signature = hmac.digest(_signing_key(signer.secret, time[:8], region), text.encode(), "sha256").hex()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={signer.access}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return headers
