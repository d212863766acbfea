"""S3 and its compatibles, by plain signed requests.

No Python library offers what large targets need: reading into a given buffer, parts of a file in any order, and copies
of byte ranges on the server. obstore has neither parts nor copies of ranges; botocore has both and copies each body.

Each part and each object is sent with its CRC-32C, unless AWS_REQUEST_CHECKSUM_CALCULATION is `when_required`; the
store refuses damaged ones. Whole objects are checked against the store's checksum when read, if it has one. It has none
for byte ranges of large files.
"""

from __future__ import annotations

import base64
import os
import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from html import escape
from http.client import HTTPException
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from reshard.core.storage.crc import crc32, crc32c
from reshard.core.storage.urls.clients import Info, ListingPage
from reshard.core.storage.urls.connections import Reply, exchange
from reshard.core.storage.urls.failures import StoreError
from reshard.core.storage.urls.pool import speed
from reshard.core.storage.urls.s3 import aws

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from xml.etree.ElementTree import Element

    Buffer = bytes | memoryview

_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired"}
_LARGEST_COPY = 5 << 30  # S3's limit for one copy
_COPIED_PART = 1 << 30

_VIRTUAL = {"SecondLevelDomainForbidden", "VirtualHostDomainRequired"}
"""Codes of stores that take the bucket in the host name alone: Alibaba's OSS, Huawei's OBS."""

_LEAST_SKEW, _MOST_SKEW = 300, 10**9  # seconds; S3 refuses requests that are 15 minutes early or late

_regions: dict[str, str] = {}
"""The regions of buckets that turned out to be elsewhere."""

_virtual: set[str] = set()
"""The buckets that turned out to belong into the host name."""

_skews: dict[str, float] = {}
"""How far the clocks of services are ahead of the one here, in seconds, by the endpoint or ""."""


class Source(NamedTuple):
    """A byte range of an object, to be copied on the server if the object is unchanged.

    Attributes:
        bucket, key: the object.
        etag: the version that the object must have.
        offset, nbytes: the range.
    """

    bucket: str
    key: str
    etag: str
    offset: int
    nbytes: int


class S3Client:
    """The client of one bucket; see `Client`."""

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket

    def _root(self, region: str) -> str:
        """Return the URL of the bucket: in the host name at Amazon, in the path elsewhere, as servers expect."""
        is_virtual = aws.is_virtual(self.bucket)
        if endpoint := aws.endpoint(self.bucket):
            if is_virtual or (is_virtual is None and self.bucket in _virtual):
                return endpoint.replace("://", f"://{self.bucket}.", 1)
            return f"{endpoint}/{self.bucket}"
        domain = f"s3.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"
        is_name = is_virtual or (is_virtual is None and re.fullmatch("[a-z0-9-]+", self.bucket))
        return f"https://{self.bucket}.{domain}" if is_name else f"https://{domain}/{self.bucket}"

    def request(
        self,
        method: str,
        key: str = "",
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Sequence[Buffer] = (),
        into: memoryview | None = None,
    ) -> Reply:
        """Make one signed request.

        Raises:
            FileNotFoundError: the object or the bucket does not exist.
            StoreError: the store refuses the request.
            OSError, HTTPException: the connection failed.
        """
        parameters = f"?{aws.query_of(query)}" if query else ""
        unsigned = {**aws.payer(self.bucket), **(headers or {})}
        learned: set[str] = set()
        while True:
            region = _regions.get(self.bucket) or aws.region(self.bucket)
            url = f"{self._root(region)}/{aws.encoded(key)}{parameters}"
            now = datetime.now(UTC) + timedelta(seconds=_skews.get(aws.endpoint(self.bucket), 0.0))
            reply = exchange(
                method, url, aws.signed(method, url, unsigned, aws.keys(self.bucket), region, now), body, into
            )
            if reply.status < 300:
                return reply
            lesson = self._lesson(reply, region, now)
            if not lesson or lesson in learned:
                raise _error(reply, key)
            learned.add(lesson)

    def _lesson(self, reply: Reply, region: str, now: datetime) -> str:
        """Note what a refusal says of the bucket: its region, its address, or the time there; "" if nothing."""
        elsewhere = reply.headers.get("x-amz-bucket-region", "")
        is_region = re.fullmatch("[a-z0-9-]+", elsewhere)  # it becomes a part of the host name
        if reply.status in {301, 307, 400} and is_region and elsewhere != region:
            _regions[self.bucket] = elsewhere
            return "region"
        if reply.status in {400, 403} and _code(reply) in _VIRTUAL and aws.is_virtual(self.bucket) is None:
            _virtual.add(self.bucket)
            return "address"
        if (
            reply.status == 403
            and (there := _time_of(reply))
            and _LEAST_SKEW < abs((there - now).total_seconds()) < _MOST_SKEW
        ):
            _skews[aws.endpoint(self.bucket)] = (there - datetime.now(UTC)).total_seconds()
            return "time"
        return ""

    def _xml(self, method: str, key: str, query: Mapping[str, str], headers: Mapping[str, str] | None = None,
             body: Sequence[Buffer] = ()) -> Element:  # fmt: skip
        """Make a request whose response is XML; an error may come with the status of a success."""
        reply = self.request(method, key, query, headers, body)
        root = _parsed(reply.content)
        if _tag(root) == "Error":
            raise _error(reply, key)
        return root

    def info(self, key: str) -> Info:
        """See `Client.info`."""
        try:
            headers = self.request("HEAD", key).headers
        except (StoreError, PermissionError) as error:
            if isinstance(error, StoreError) and error.status != 400:
                raise
            self.request("GET", key, headers={"range": "bytes=0-0"})  # this response says why, as with expired tokens
            headers = self.request("HEAD", key).headers
        return Info(int(headers.get("content-length", 0)), headers.get("etag", "").strip('"'))

    def page(self, directory: str, token: str, *, deep: bool) -> ListingPage:
        """See `Client.page`."""
        query = {"list-type": "2", "prefix": f"{directory}/" if directory else ""}
        query |= {} if deep else {"delimiter": "/"}
        query |= {"continuation-token": token} if token else {}
        root = self._xml("GET", "", query)
        files, directories = {}, []
        for child in root:
            if _tag(child) == "Contents" and not (key := _text(child, "Key")).endswith("/"):
                modified = _seconds(_text(child, "LastModified"))
                files[key] = Info(int(_text(child, "Size")), _text(child, "ETag").strip('"'), modified)
            elif _tag(child) == "CommonPrefixes":
                directories.append(_text(child, "Prefix").rstrip("/"))
        more = _text(root, "NextContinuationToken") if _text(root, "IsTruncated") == "true" else ""
        return ListingPage(files, tuple(directories), more)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        """See `Client.read_into`."""
        asked = {"range": f"bytes={offset}-{offset + len(buffer) - 1}"}
        try:
            reply = self.request("GET", key, headers=asked, into=buffer)
        except StoreError as error:
            if error.status == 416:
                return 0
            raise
        speed.add(reply.waited, reply.nbytes, reply.took)
        span, _, total = reply.headers.get("content-range", "").rpartition("/")
        if (reply.status != 206 and offset) or (span and span.split()[-1].partition("-")[0] != str(offset)):
            raise StoreError("NoRanges", "the store ignores byte ranges", reply.status)
        if reply.nbytes < len(buffer) and total.isdigit() and offset + reply.nbytes < int(total):
            raise HTTPException("the store sent less than it was asked for")
        return reply.nbytes

    def get(self, key: str) -> bytes:
        """See `Client.get`."""
        reply = self.request("GET", key, headers={"x-amz-checksum-mode": "ENABLED"})
        for name, function in (("crc32c", crc32c), ("crc32", crc32)):
            carried = reply.headers.get(f"x-amz-checksum-{name}", "-")
            if "-" not in carried and base64.b64decode(carried) != function(reply.content, 0).to_bytes(4, "big"):
                raise HTTPException("the contents do not match the store's checksum")
        return reply.content

    def put(self, key: str, content: bytes | Sequence[Buffer]) -> None:
        """See `Client.put`."""
        body = [content] if isinstance(content, bytes) else content
        self.request("PUT", key, headers=_sums(body) | aws.encryption(self.bucket), body=body)

    def delete(self, key: str) -> None:
        """See `Client.delete`."""
        self.request("DELETE", key)

    def copy(self, key: str, copy: str) -> None:
        """See `Client.copy`."""
        info = self.info(key)
        if info.nbytes <= _LARGEST_COPY:
            source = {"x-amz-copy-source": aws.encoded(f"{self.bucket}/{key}")}
            self._xml("PUT", copy, {}, source | aws.encryption(self.bucket))
            return
        upload = self.begin(copy)
        begins = range(0, info.nbytes, _COPIED_PART)
        sources = [Source(self.bucket, key, info.version, at, min(_COPIED_PART, info.nbytes - at)) for at in begins]
        try:
            parts = {n: self.copy_part(copy, upload, n, source) for n, source in enumerate(sources, 1)}
            self.complete(copy, upload, parts)
        except BaseException:
            self.abort(copy, upload)
            raise

    def begin(self, key: str) -> str:
        """Begin an upload in parts, and return its identifier."""
        sums = {"x-amz-checksum-algorithm": "CRC32C", "x-amz-checksum-type": "FULL_OBJECT"} if _sends_sums() else {}
        return _text(self._xml("POST", key, {"uploads": ""}, sums | aws.encryption(self.bucket)), "UploadId")

    def send_part(self, key: str, upload: str, number: int, body: Sequence[Buffer]) -> str:
        """Send a part, and return its entity tag."""
        query = {"partNumber": str(number), "uploadId": upload}
        if not (tag := self.request("PUT", key, query, _sums(body), body).headers.get("etag", "")):
            raise HTTPException("the response has no entity tag")
        return tag

    def copy_part(self, key: str, upload: str, number: int, source: Source) -> str:
        """Make a part of bytes of an object in the store, and return its entity tag."""
        last = source.offset + source.nbytes - 1
        headers = {
            "x-amz-copy-source": aws.encoded(f"{source.bucket}/{source.key}"),
            "x-amz-copy-source-range": f"bytes={source.offset}-{last}",
            "x-amz-copy-source-if-match": f'"{source.etag}"',
        }
        root = self._xml("PUT", key, {"partNumber": str(number), "uploadId": upload}, headers)
        return _text(root, "ETag")

    def parts(self, key: str, upload: str) -> dict[int, tuple[int, str]]:
        """Return the sizes and entity tags of the parts that an upload has, by number; a store may not tell."""
        parts: dict[int, tuple[int, str]] = {}
        query = {"uploadId": upload}
        while True:
            try:
                root = self._xml("GET", key, query)
            except StoreError as error:
                if error.code in {"NotImplemented", "MethodNotAllowed"}:
                    return {}
                raise
            for child in root:
                if _tag(child) == "Part":
                    parts[int(_text(child, "PartNumber"))] = int(_text(child, "Size")), _text(child, "ETag")
            if _text(root, "IsTruncated") != "true":
                return parts
            query["part-number-marker"] = _text(root, "NextPartNumberMarker")

    def complete(self, key: str, upload: str, parts: Mapping[int, str]) -> None:
        """Make the object of the parts of an upload, given the entity tags by number."""
        names = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(tag, quote=False)}</ETag></Part>"
            for number, tag in sorted(parts.items())
        )
        xmlns = "http://s3.amazonaws.com/doc/2006-03-01/"
        body = f'<CompleteMultipartUpload xmlns="{xmlns}">{names}</CompleteMultipartUpload>'
        self._xml("POST", key, {"uploadId": upload}, {"content-type": "application/xml"}, [body.encode()])

    def abort(self, key: str, upload: str) -> None:
        """End an upload, so that the store drops its parts."""
        self.request("DELETE", key, {"uploadId": upload})


def _sends_sums() -> bool:
    return os.environ.get("AWS_REQUEST_CHECKSUM_CALCULATION", "").lower() != "when_required"


def _sums(body: Iterable[Buffer]) -> dict[str, str]:
    """Return the header with the checksum of a body."""
    if not _sends_sums():
        return {}
    value = 0
    for piece in body:
        value = crc32c(piece, value)
    return {"x-amz-checksum-crc32c": base64.b64encode(value.to_bytes(4, "big")).decode()}


def _error(reply: Reply, key: str) -> Exception:
    """Return the error for an unsuccessful response."""
    root = _parsed(reply.content, or_empty=True)
    code, message = _text(root, "Code"), _text(root, "Message")
    if code == "NoSuchBucket" or (reply.status == 404 and code in {"", "NoSuchKey", "NotFound", "NoSuchUpload"}):
        return FileNotFoundError(f"{code or 'NotFound'}: {quote(key)}")
    if code in _EXPIRED:
        aws.renew()
        return StoreError("ExpiredToken", message, reply.status)
    if reply.status == 403:
        return PermissionError(f"{code or 'Forbidden'}{': ' * bool(message)}{message}")
    return StoreError(code or str(reply.status), message, reply.status)


def _code(reply: Reply) -> str:
    """Return the code of a refusal; "" if the response has none, as to HEAD."""
    return _text(_parsed(reply.content, or_empty=True), "Code")


def _time_of(reply: Reply) -> datetime | None:
    """Return the time of a response by the clock of the store."""
    try:
        time = parsedate_to_datetime(reply.headers.get("date", ""))
    except (ValueError, OverflowError):
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _parsed(content: bytes, *, or_empty: bool = False) -> Element:
    from xml.etree.ElementTree import Element, ParseError, fromstring

    try:
        return fromstring(content.lstrip())  # noqa: S314 -- of the user's own store; expat limits entities
    except ParseError:
        if or_empty:
            return Element("Error")
        raise HTTPException("the response is not XML") from None


def _tag(element: Element) -> str:
    return element.tag.rpartition("}")[2]


def _seconds(text: str) -> float:
    """Return a time such as 2026-01-31T12:00:00.000Z in seconds since 1970; 0 if it is not valid."""
    with suppress(ValueError):
        return datetime.fromisoformat(text).timestamp()
    return 0.0


def _text(element: Element, name: str) -> str:
    return next((child.text or "" for child in element if _tag(child) == name), "")
