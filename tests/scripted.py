"""A web server for tests that gives the replies that a test says, in order, and notes what it was asked."""

from __future__ import annotations

import ssl
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.storage.urls import connections

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


class Asked(NamedTuple):
    """A request: its method, what it names as it was sent, its headers with names in lower case, and its body."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    connection: int


class Answer(NamedTuple):
    """A reply: its status, headers and body.

    Attributes:
        hangs_up: the connection is closed afterwards, without a word.
        cut: the body that is really sent, if it is not the one whose length is announced.
    """

    status: int = 200
    headers: Mapping[str, str] = {}
    body: bytes = b""
    hangs_up: bool = False
    cut: bytes | None = None


def error(code: str, status: int = 400, **headers: str) -> Answer:
    """A refusal as S3 sends it."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, names, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())


class ScriptedServer:
    """The server; `answers` are used up in order, then `answer` is asked, which by default has an empty reply."""

    def __init__(self, certificate: Path | None = None) -> None:
        self.asked: list[Asked] = []
        self.answers: deque[Answer] = deque()
        self.answer: Callable[[Asked], Answer] = lambda _: Answer()
        server = self

        class Handler(_Handler):
            script = server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self.address = f"127.0.0.1:{self._http.server_address[1]}"
        self.url = f"{'https' if certificate else 'http'}://{self.address}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """End it."""
        self._http.shutdown()
        self._http.server_close()


def close_idle() -> None:
    """Close all connections of this process that are not in use."""
    for waiting in connections._idle.values():
        while waiting:
            waiting.pop().close()


class QuietHandler(BaseHTTPRequestHandler):
    """Keeps connections open, and says nothing of those that break."""

    protocol_version = "HTTP/1.1"

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


class _Handler(QuietHandler):
    script: ScriptedServer

    def _serve(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(int(headers.get("content-length", 0)))
        asked = Asked(self.command, self.path, headers, body, self.client_address[1])
        self.script.asked.append(asked)
        answer = self.script.answers.popleft() if self.script.answers else self.script.answer(asked)
        self.send_response_only(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if "content-length" not in answer.headers:
            self.send_header("content-length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body if answer.cut is None else answer.cut)
        self.close_connection = answer.hangs_up or answer.cut is not None

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_CONNECT = _serve  # noqa: N815 -- as the library calls them
