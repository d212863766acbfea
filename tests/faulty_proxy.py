"""An HTTP proxy before an S3 server that stalls, cuts, loses, refuses or corrupts what a test says.

It also checks the CRC-32 or CRC-32C that a request carries, as S3 does and moto does not. Whatever stalls does so until
the proxy is closed, for `LONGEST` seconds at most.
"""

from __future__ import annotations

import base64
import http.client
import socket
import threading
import zlib
from http.server import ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import google_crc32c
import pytest
from scripted import QuietHandler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

LONGEST = 120.0
"""How many seconds a stall lasts at most: longer than any test."""

_HEADERS_OF_HOPS = {"connection", "transfer-encoding", "keep-alive", "server", "date", "expect"}

_SUMS: dict[str, Callable[[bytes], int]] = {"crc32": zlib.crc32, "crc32c": google_crc32c.value}


class Seen(NamedTuple):
    """A request: S3's name of the operation, the object's key, and the fault that befell it, if one did."""

    operation: str
    key: str
    fault: str


class Rule:
    """A fault of the requests of an operation for keys that hold a text; of the first `times` of them."""

    def __init__(self, fault: str, operation: str, key: str, times: int) -> None:
        self.fault, self.operation, self.key, self.times = fault, operation, key, times


class FaultyProxy:
    """The proxy.

    Faults are `wait` (no reply ever), `stall` (a reply or an upload stops in its middle), `cut` (a reply ends in its
    middle), `503`, `lose` (done, but the connection ends without a reply), `flip` (of one bit, of the object).
    """

    def __init__(self, server: str) -> None:
        self.seen: list[Seen] = []
        self.stalled = threading.Event()
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._server = urlsplit(server).netloc
        proxy = self

        class Handler(_Handler):
            faults = proxy

        class Server(ThreadingHTTPServer):
            request_queue_size = 64

            def server_bind(self) -> None:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)  # an upload is soon stuck
                super().server_bind()

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Say nothing: clients that give up end connections."""

        self._http = Server(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def on(self, fault: str, operation: str = "", key: str = "", times: int = 1 << 30) -> Rule:
        """Have a fault befall requests."""
        rule = Rule(fault, operation, key, times)
        self._rules.append(rule)
        return rule

    def clear(self) -> None:
        """Have no more faults."""
        self._rules.clear()

    def count(self, operation: str, fault: str | None = None) -> int:
        """Return how many requests of an operation came; with a fault, those that it befell."""
        return sum(each.operation == operation and fault in {None, each.fault} for each in self.seen)

    def fault(self, operation: str, key: str) -> str:
        with self._lock:
            rule = next(
                (rule for rule in self._rules if rule.times and rule.operation in {"", operation} and rule.key in key),
                None,
            )
            if rule:
                rule.times -= 1
            self.seen.append(Seen(operation, key, rule.fault if rule else ""))
        return rule.fault if rule else ""

    def hold(self) -> None:
        """Wait until the proxy is closed."""
        self.stalled.set()
        self._closed.wait(LONGEST)

    def close(self) -> None:
        """End everything."""
        self._closed.set()
        self._http.shutdown()
        self._http.server_close()


class _Handler(QuietHandler):
    faults: FaultyProxy

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        key = parts.path.lstrip("/").partition("/")[2]
        operation = operation_of(self.command, key, query)
        fault = self.faults.fault(operation, key)
        length = int(self.headers.get("Content-Length", 0))
        if fault == "stall" and length:
            self.rfile.read(min(length // 2, 64 << 10))
            self._end()
            return
        body = self.rfile.read(length)
        if fault == "wait":
            self._end()
        elif fault == "503":
            self._refuse(503, "SlowDown")
        else:
            if fault == "flip" and body:
                body = _flipped(body)
            self._forward(body, fault)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815 -- as the library calls them

    def _end(self) -> None:
        self.faults.hold()
        self.close_connection = True

    def _refuse(self, status: int, code: str) -> None:
        content = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _forward(self, body: bytes, fault: str) -> None:
        for name, function in _SUMS.items():
            crc = self.headers.get(f"x-amz-checksum-{name}")
            if crc and base64.b64decode(crc) != function(body).to_bytes(4, "big"):
                self._refuse(400, "BadDigest")
                return
        connection = http.client.HTTPConnection(self.faults._server, timeout=LONGEST)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HEADERS_OF_HOPS}
        if self.command == "PUT" and "x-amz-checksum-crc32c" in self.headers:
            headers["x-amz-sdk-checksum-algorithm"] = "CRC32C"  # without which moto forgets the checksum
        try:
            connection.request(self.command, self.path, body=body or None, headers=headers)
            reply = connection.getresponse()
            content = reply.read()
        finally:
            connection.close()
        if fault == "lose":
            self.close_connection = True
            return
        self.send_response_only(reply.status)
        length = reply.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        for name, value in reply.getheaders():
            if name.lower() not in {*_HEADERS_OF_HOPS, "content-length"}:
                self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", length)
        self.end_headers()
        if fault == "flip" and self.command == "GET":
            content = _flipped(content)
        if fault in {"stall", "cut"}:
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            if fault == "stall":
                self.faults.hold()
            self.close_connection = True
            return
        self.wfile.write(content)


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def operation_of(method: str, key: str, query: Mapping[str, object]) -> str:
    """Return S3's name of what is asked."""
    if not key:
        return (
            "DeleteObjects" if "delete" in query else {"GET": "ListObjects", "PUT": "CreateBucket"}.get(method, method)
        )
    if "uploads" in query:
        return "CreateMultipartUpload"
    if "uploadId" in query:
        return {
            "PUT": "UploadPart",
            "GET": "ListParts",
            "POST": "CompleteMultipartUpload",
            "DELETE": "AbortMultipartUpload",
        }[method]
    return {"GET": "GetObject", "PUT": "PutObject", "DELETE": "DeleteObject", "HEAD": "HeadObject"}[method]


@pytest.fixture
def proxy(server: str) -> Iterator[FaultyProxy]:
    """A proxy before this session's S3 server, which nothing goes through of itself."""
    proxy = FaultyProxy(server)
    yield proxy
    proxy.close()
