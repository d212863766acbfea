"""HTTP connections that are kept open, and requests that move bytes straight out of and into buffers.

A request whose connection makes no progress for `stall_seconds()` fails. The standard library's client is used because
it reads into a given buffer and sends from one: no library holds a copy, and the memory of a run is known. Measured on
2 GB from loopback: 1.5 to 1.6 s, and obstore 1.7 to 1.8 s with 8 MiB more for each request in flight.
"""

from __future__ import annotations

import http.client
import os
import ssl
import time
from base64 import b64encode
from collections import defaultdict, deque
from contextlib import suppress
from functools import lru_cache
from socket import gaierror
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

from reshard.core.storage.urls.failures import stall_seconds
from reshard.core.storage.urls.retries import attempt
from reshard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Buffer = bytes | memoryview

_SENT_AT_ONCE = 1 << 20  # Python's timeout is for a whole `sendall`, so this much must go within a stall
_LARGEST_REPLY = 1 << 30  # of small files, which have limits of their own
_PROXY_VARIABLES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
_CLOSED = (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError, ssl.SSLEOFError)
"""Errors on a connection that the server closed while it was idle: the request did not arrive."""


class Reply(NamedTuple):
    """The response to a request.

    Attributes:
        status: the HTTP status.
        headers: the headers, with names in lower case.
        content: the body; empty if it was read into a buffer.
        nbytes: the number of bytes of the body.
        waited: the seconds from the request to the first byte of the response.
        took: the seconds of the body.
    """

    status: int
    headers: Mapping[str, str]
    content: bytes
    nbytes: int
    waited: float
    took: float


_idle: defaultdict[tuple[str, str, str], deque[http.client.HTTPConnection]] = defaultdict(deque)
"""Open connections that are not in use, by scheme, address and proxy."""

os.register_at_fork(after_in_child=_idle.clear)  # two processes must not talk on one connection


def exchange(
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: Sequence[Buffer] = (),
    into: memoryview | None = None,
) -> Reply:
    """Make one request and return the response.

    Args:
        method: the HTTP method.
        url: the encoded URL.
        headers: the headers, without the length of the body.
        body: the pieces of the body.
        into: the buffer for the body of a successful response; it is filled as far as the body goes.

    Raises:
        OSError, http.client.HTTPException: the connection failed, or stalled.
    """
    scheme, address, path, query, _ = urlsplit(url)
    proxy = _proxy(scheme, address)
    waiting = _idle[scheme, address, proxy]
    target = f"{path or '/'}{'?' if query else ''}{query}"
    if proxy and scheme == "http":
        target = f"{scheme}://{address}{target}"
        headers = {**headers, **_login(proxy)}
    while True:
        connection = _waiting(waiting) if method != "POST" else None  # a lost POST must not be repeated unnoticed
        is_new = connection is None
        connection = connection or _connect(scheme, address, proxy)
        try:
            reply = _once(connection, method, target, headers, body, into)
        except BaseException as error:
            connection.close()
            if is_new or not isinstance(error, _CLOSED) or attempt().is_given_up:
                raise
        else:
            break
    if connection.sock is not None:
        waiting.append(connection)
    return reply


def _waiting(waiting: deque[http.client.HTTPConnection]) -> http.client.HTTPConnection | None:
    try:
        return waiting.pop()
    except IndexError:
        return None


def _once(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    headers: Mapping[str, str],
    body: Sequence[Buffer],
    into: memoryview | None,
) -> Reply:
    """Send a request on a connection and read the response."""
    current = attempt()
    current.connections.append(connection)
    try:
        current.check_wanted()  # it may have been given up while it was connected
        connection.putrequest(method, target, skip_host="host" in headers, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        if body or method in {"PUT", "POST"}:
            connection.putheader("content-length", str(sum(map(len, body))))
        connection.endheaders()
        with suppress(BrokenPipeError, ConnectionResetError):  # a response that came early says why
            for piece in body:
                view = memoryview(piece)
                for begin in range(0, len(view), _SENT_AT_ONCE):
                    connection.send(view[begin : begin + _SENT_AT_ONCE])
        begun = time.perf_counter()
        response = connection.getresponse()
        answered = time.perf_counter()
        names = {name.lower(): value for name, value in response.getheaders()}
        if into is None or response.status >= http.client.MULTIPLE_CHOICES:
            content = response.read(_LARGEST_REPLY)
            nbytes = len(content)
            if response.length:  # `read` with a size does not say so
                raise http.client.IncompleteRead(b"", response.length)
        else:
            content, nbytes = b"", _fill(response, into)
        if not response.isclosed():  # the body was longer than it may be
            connection.close()
        took = time.perf_counter() - answered
        return Reply(response.status, names, content, nbytes, answered - begun, took)
    finally:
        current.connections.clear()


def _fill(response: http.client.HTTPResponse, buffer: memoryview) -> int:
    """Read a body into a buffer, and return how many bytes it had."""
    nbytes = 0
    while nbytes < len(buffer) and (count := response.readinto(buffer[nbytes:])):
        nbytes += count
    if response.length:
        if nbytes < len(buffer):
            raise http.client.IncompleteRead(b"", response.length)
    else:
        response.read(1)  # the end of a chunked body; a longer one is left
    return nbytes


def _connect(scheme: str, address: str, proxy: str) -> http.client.HTTPConnection:
    """Return a new connection."""
    timeout = stall_seconds()
    host = proxy.rpartition("@")[2] or address
    connection = http.client.HTTPConnection(host, timeout=timeout)
    if scheme == "https":
        connection = http.client.HTTPSConnection(host, timeout=timeout, context=_context(_bundle()))
        if proxy:
            connection.set_tunnel(address, headers=_login(proxy))
    try:
        connection.connect()
    except BaseException as error:
        connection.close()
        if isinstance(error, ConnectionError | gaierror):  # which do not name the address
            raise OSError(error.errno, f"{host}: {error.strerror}") from error
        raise
    return connection


def _proxy(scheme: str, address: str) -> str:
    """Return the address of the proxy for requests to an address, with the login if it has one, or ""."""
    if not any(name in os.environ for name in _PROXY_VARIABLES):  # `getproxies` reads all of the environment
        return ""
    from urllib.request import getproxies, proxy_bypass  # slow, and rarely needed

    proxies = getproxies()
    proxy = proxies.get(scheme) or proxies.get("all", "")
    if not proxy or proxy_bypass(address):
        return ""
    return urlsplit(proxy if "://" in proxy else f"http://{proxy}").netloc


def _login(proxy: str) -> dict[str, str]:
    """Return the header that tells a proxy who asks, if it needs one."""
    login = proxy.rpartition("@")[0]
    return {"proxy-authorization": f"Basic {b64encode(unquote(login).encode()).decode()}"} if login else {}


def _bundle() -> str:
    return os.environ.get("AWS_CA_BUNDLE") or os.environ.get("REQUESTS_CA_BUNDLE") or ""


@lru_cache(maxsize=4)
def _context(bundle: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=bundle or None)
    except OSError as error:
        raise UsageError(f"certificates cannot be read from {bundle}: {error}", code="bad-value") from None
