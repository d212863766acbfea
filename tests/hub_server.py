"""A stand-in for the Hugging Face Hub: the few requests that huggingface_hub's file system makes, on loopback.

Repositories are in memory. Each commit is atomic and has a number; a revision is a branch, or such a number.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

Tree = dict[str, bytes]

_LARGE = re.compile(r".+\.(?:safetensors|bin|model)")


class Hub:
    """The repositories, and what was asked of them."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Tree]] = {}
        self.commits: list[list[str]] = []  # the paths of each commit
        self.ranges: list[tuple[str, int, int]] = []
        self.requests: list[str] = []
        self.large: dict[str, bytes] = {}
        self.refuses = re.compile("(?!)")  # commits of which paths are refused
        self.endpoint = ""
        self.lock = threading.Lock()

    def create(self, repo: str, files: Tree | None = None, revision: str = "main") -> None:
        self.repos.setdefault(repo, {})[revision] = dict(files or {})

    def files(self, repo: str, revision: str = "main") -> Tree:
        return self.repos[repo][revision]

    @property
    def nbytes(self) -> int:
        return sum(stop - start for _, start, stop in self.ranges)


class _RefusedError(Exception):
    def __init__(self, status: int, code: str = "") -> None:
        super().__init__(code)
        self.status, self.code = status, code


def _oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # noqa: S324 -- git's


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve("GET")

    def do_HEAD(self) -> None:
        self._serve("HEAD")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_PUT(self) -> None:
        self._serve("PUT")

    def _serve(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.headers.get("transfer-encoding") == "chunked":
            body = self._chunks()
        split = urlsplit(self.path)
        with self.hub.lock:
            self.hub.requests.append(f"{method} {split.path}")
        try:
            status, content, headers = self._answer(method, split.path, parse_qs(split.query), body)
        except _RefusedError as refused:
            status, content, headers = refused.status, b"{}", {"X-Error-Code": refused.code} if refused.code else {}
        self.send_response(status)
        for name, value in {"content-type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        if method != "HEAD":
            self.wfile.write(content)

    def _chunks(self) -> bytes:
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _answer(
        self, method: str, path: str, query: dict[str, list[str]], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        hub = self.hub
        if method == "PUT" and (match := re.fullmatch(r"/upload/(\w+)", path)):
            assert hashlib.sha256(body).hexdigest() == match[1]
            hub.large[match[1]] = body
            return 200, b"", {}
        if path == "/api/validate-yaml":
            return 200, b'{"errors": [], "warnings": []}', {}
        if match := re.fullmatch(r"/(?:(?:datasets|spaces)/)?[^/]+/[^/]+\.git/info/lfs/objects/batch", path):
            objects = [
                {**each, "actions": {"upload": {"href": f"{hub.endpoint}/upload/{each['oid']}", "header": {}}}}
                for each in json.loads(body)["objects"]
            ]
            return 200, json.dumps({"transfer": "basic", "objects": objects}).encode(), {}
        if match := re.fullmatch(r"/api/(models|datasets|spaces)/([^/]+/[^/]+)(?:/([a-z-]+)/([^/]+)(?:/(.*))?)?", path):
            kind, name, action, revision, rest = match.groups()
            repo = name if kind == "models" else f"{kind}/{name}"
            return self._api(repo, action or "revision", unquote(revision or "main"), unquote(rest or ""), query, body)
        if match := re.fullmatch(r"/((?:(?:datasets|spaces)/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            content = self._tree(match[1], unquote(match[2])).get(unquote(match[3]))
            if content is None:
                raise _RefusedError(404, "EntryNotFound")
            return self._content(unquote(match[3]), content)
        raise _RefusedError(404, "RepoNotFound")

    def _content(self, path: str, content: bytes) -> tuple[int, bytes, dict[str, str]]:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range") or "bytes=0-")
        assert asked
        start, stop = int(asked[1]), min(int(asked[2] or len(content)) + 1, len(content))
        if start >= len(content) > 0:
            raise _RefusedError(416)
        with self.hub.lock:
            self.hub.ranges.append((path, start, stop))
        part = self.headers.get("range") is not None
        headers = {"content-range": f"bytes {start}-{stop - 1}/{len(content)}"} if part else {}
        return 206 if part else 200, content[start:stop], headers

    def _tree(self, repo: str, revision: str) -> Tree:
        if repo not in self.hub.repos:
            raise _RefusedError(404, "RepoNotFound")
        if revision not in self.hub.repos[repo]:
            raise _RefusedError(404, "RevisionNotFound")
        return self.hub.repos[repo][revision]

    def _api(
        self, repo: str, action: str, revision: str, path: str, query: dict[str, list[str]], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        tree = self._tree(repo, revision)
        result: Any
        if action == "revision":
            result = {"_id": "0", "id": repo, "sha": f"{len(self.hub.commits):040x}", "siblings": []}
        elif action == "tree":
            result = self._listed(tree, path, deep=query.get("recursive", [""])[0].lower() == "true")
        elif action == "paths-info":
            result = [self._entry(name, tree[name]) for name in json.loads(body)["paths"] if name in tree]
        elif action == "preupload":
            result = {
                "files": [
                    {
                        "path": each["path"], "shouldIgnore": False,
                        "uploadMode": "lfs" if _LARGE.fullmatch(each["path"]) else "regular",
                        "oid": _oid(tree[each["path"]]) if each["path"] in tree else None,
                    }
                    for each in json.loads(body)["files"]
                ]
            }  # fmt: skip
        elif action == "commit":
            result = self._commit(repo, revision, [json.loads(line) for line in body.splitlines()])
        else:
            raise _RefusedError(404)
        return 200, json.dumps(result).encode(), {}

    def _entry(self, path: str, content: bytes) -> dict[str, Any]:
        return {"type": "file", "oid": _oid(content), "size": len(content), "path": path}

    def _listed(self, tree: Tree, directory: str, *, deep: bool) -> list[dict[str, Any]]:
        below = directory and f"{directory}/"
        inside = {path: content for path, content in sorted(tree.items()) if path.startswith(below)}
        if directory and not inside:
            raise _RefusedError(404, "EntryNotFound")
        folders = {
            path[: len(below) + match.end() - 1]
            for path in inside
            for match in re.finditer("[^/]+/", path[len(below) :])
            if deep or match.start() == 0
        }
        entries = [{"type": "directory", "oid": "0", "size": 0, "path": folder} for folder in sorted(folders)]
        entries += [self._entry(p, content) for p, content in inside.items() if deep or "/" not in p[len(below) :]]
        return entries

    def _commit(self, repo: str, revision: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
        hub = self.hub
        if not hub.lock.acquire(blocking=False):
            raise _RefusedError(412)  # as the Hub, if two commits meet
        try:
            if any(hub.refuses.search(line["value"].get("path", "")) for line in lines):
                raise _RefusedError(403)
            tree = dict(hub.repos[repo][revision])
            paths = []
            for line in lines:
                value = line["value"]
                if line["key"] == "file":
                    tree[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    tree[value["path"]] = hub.large[value["oid"]]
                elif line["key"] == "deletedFile" and tree.pop(value["path"], None) is None:
                    raise _RefusedError(404, "EntryNotFound")
                if line["key"] != "header":
                    paths.append(value["path"])
            hub.repos[repo][revision] = tree
            hub.commits.append(paths)
            number = f"{len(hub.commits):040x}"
            hub.repos[repo][number] = dict(tree)
        finally:
            hub.lock.release()
        url = f"{hub.endpoint}/{repo}/commit/{number}"
        return {"success": True, "commitOid": number, "commitUrl": url, "hookOutput": ""}


@contextmanager
def serving() -> Iterator[Hub]:
    """Serve a Hub on loopback."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
