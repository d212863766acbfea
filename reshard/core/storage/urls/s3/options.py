"""`storage_options` of S3's buckets, as fsspec, pandas and dask spell them; kept in this process alone.

They stand before the environment and the files of Amazon's tools, for all requests to a bucket, until others are given
for it. No plan, ledger or message has them, and no other process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.storage.urls.clients import in_s3
from reshard.errors import ReshardError, UsageError, names
from reshard.spelling import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable


class S3Options(NamedTuple):
    """The options of a bucket.

    Attributes:
        key, secret, token: the credentials; empty to look for them elsewhere.
        endpoint_url: the URL of the service; empty for the one of the environment.
        region: the region; empty for the one of the environment.
        anon: requests are not signed.
        requester_pays: whoever asks pays for requests.
        addressing_style: `virtual`, the bucket is in the host name; or `path`, in the path; empty for what the service
            expects.
        encryption: how the store encrypts what is written, such as `aws:kms`; empty for the bucket's default.
        encryption_key: the identifier of the key; empty for the default one.
    """

    key: str = ""
    secret: str = ""
    token: str = ""
    endpoint_url: str = ""
    region: str = ""
    anon: bool = False
    requester_pays: bool = False
    addressing_style: str = ""
    encryption: str = ""
    encryption_key: str = ""


_NO_OPTIONS = S3Options()
_buckets: dict[str, S3Options] = {}
_FLAGS = {"anon", "requester_pays"}
_TOP = ("key", "secret", "token", "endpoint_url", "region", "anon", "requester_pays")
_NESTED = {
    "client_kwargs": {"endpoint_url": "endpoint_url", "region_name": "region"},
    "s3_additional_kwargs": {"ServerSideEncryption": "encryption", "SSEKMSKeyId": "encryption_key"},
    "config_kwargs": {"addressing_style": "addressing_style"},
}
"""The options that fsspec has in dicts of their own; `config_kwargs` has one more level, `s3`."""


def options_of(bucket: str) -> S3Options:
    """Return the options of a bucket."""
    return _buckets.get(bucket, _NO_OPTIONS)


def use_options(options: Mapping[str, Any] | None, *paths: object) -> None:
    """Use options for the buckets of paths.

    Raises:
        UsageError: an option is not known or not valid, or no path is at `s3://`.
    """
    if not options:
        return
    checked = _checked(options)
    buckets = {_bucket(str(path)) for path in paths if in_s3(str(path))}
    if not buckets:
        raise UsageError(
            f"storage_options are for s3:// alone, and {names(paths)} is elsewhere", code="option-of-another-format",
            hint="other stores look for credentials in the environment, and in the files of their own tools",
        )  # fmt: skip
    _buckets.update(dict.fromkeys(buckets, checked))


def _bucket(url: str) -> str:
    return url.partition("://")[2].partition("/")[0]


def _checked(options: Mapping[str, Any]) -> S3Options:
    if not isinstance(options, Mapping):
        raise UsageError(f"storage_options is a {type(options).__name__}; expected a dict", code="wrong-type")
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name in _NESTED:
            values |= _nested(name, value)
        elif name in _TOP:
            values[name] = value
        else:
            raise _unknown(name)
    for name, value in values.items():
        kind = bool if name in _FLAGS else str
        if value is not None and not isinstance(value, kind):
            raise UsageError(
                f"{name} of storage_options is a {type(value).__name__}; expected {kind.__name__}", code="wrong-type"
            )
    result = S3Options(**{name: value for name, value in values.items() if value is not None})
    if bool(result.key) != bool(result.secret) or (result.token and not result.key) or (result.anon and result.key):
        raise UsageError(
            "storage_options need both key and secret, or neither", code="bad-value",
            facts=["token goes with them, and anon=True without them"],
        )  # fmt: skip
    if result.addressing_style not in {"", "auto", "path", "virtual"}:
        raise UsageError(
            f"addressing_style of storage_options is {result.addressing_style!r:.40}; expected 'virtual' or 'path'",
            code="bad-value",
        )
    if result.endpoint_url and not result.endpoint_url.startswith(("http://", "https://")):
        raise UsageError("endpoint_url of storage_options has no http:// or https://", code="bad-value")
    return result._replace(endpoint_url=result.endpoint_url.rstrip("/"))


def _nested(outer: str, kwargs: object) -> dict[str, Any]:
    """Return the options in a dict of fsspec's, by our names."""
    if outer == "config_kwargs" and isinstance(kwargs, Mapping) and kwargs.keys() == {"s3"}:
        kwargs = kwargs["s3"]
    if not isinstance(kwargs, Mapping):
        raise UsageError(f"{outer} is a {type(kwargs).__name__}; expected a dict", code="wrong-type")
    known = _NESTED[outer]
    for name in kwargs:
        if name not in known:
            raise _unknown(f"{outer}[{name!r:.60}]")
    return {known[name]: value for name, value in kwargs.items()}


def _unknown(name: object) -> UsageError:
    expected = (*_TOP, *_NESTED)
    return UsageError(
        f"storage_options has {name!r:.80}", code="unknown-option",
        facts=[f"expected {names(expected, most=len(expected))}"], hint=did_you_mean(str(name), expected),
    )  # fmt: skip


def share_options(one: str, other: str) -> bool:
    """Return whether two URLs of S3 have the same options, so that one client can serve both."""
    return options_of(_bucket(one)) == options_of(_bucket(other))


def refuse_on_cluster(paths: Iterable[object]) -> None:
    """Refuse a cluster for paths whose options its workers do not have.

    Raises:
        ReshardError: a bucket has options.
    """
    if not _buckets:
        return
    buckets = {_bucket(str(path)) for path in paths if in_s3(str(path))} & _buckets.keys()
    if buckets:
        raise ReshardError(
            f"the workers of a cluster do not have the storage_options of s3://{min(buckets)}",
            code="options-not-there",
            hint="set AWS_ACCESS_KEY_ID and its like in their environment and in this one; leave storage_options out",
        )  # fmt: skip
