"""Listings of directories at URLs, kept until they are refreshed: one request tells of a thousand files."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from reshard.core.storage.urls.retries import ask
from reshard.core.storage.urls.schemes import client_at
from reshard.errors import GoneError, SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from reshard.core.storage.base import Status
    from reshard.core.storage.urls.clients import Info, ListingPage

T = TypeVar("T")


class _Tree:
    """The files below a directory, and the names in each directory, by URL."""

    def __init__(self, root: str, files: Mapping[str, Info]) -> None:
        self.root, self.files = root, dict(files)
        self.levels: dict[str, dict[str, None]] = {}
        for url in self.files:
            above, _, name = url.rpartition("/")
            while len(above) >= len(root) and name not in (level := self.levels.setdefault(above, {})):
                level[name] = None
                above, _, name = above.rpartition("/")

    def below(self, url: str) -> Iterator[str]:
        """Yield the URLs of the files below a directory."""
        for name in self.levels.get(url, ()):
            path = f"{url}/{name}"
            yield from (path,) if path in self.files else ()
            yield from self.below(path)


class Listings:
    """The files below directories, as they were listed last.

    Only whole listings are kept, by URL of the directory; the files of a directory are in the listing of any directory
    above it, too.
    """

    def __init__(self) -> None:
        self._deep: dict[str, dict[str, Info]] = {}
        self._kept: _Tree | None = None

    @contextmanager
    def kept(self, url: str) -> Iterator[Mapping[str, Info]]:
        """List a directory, yield its files, and answer from this list until the end of the block.

        Raises:
            SourceError: it cannot be listed.
        """
        self._kept = _Tree(url, self.now(url))
        try:
            yield self._kept.files
        finally:
            self._kept = None

    def _tree_of(self, url: str) -> _Tree | None:
        """Return the list that is kept, if it has all files at or below a URL."""
        tree = self._kept
        return tree if tree and f"{url}/".startswith(f"{tree.root}/") else None

    def forget(self, url: str) -> None:
        """Forget the listings that may have a file, or files below it."""
        for directory in [*self._deep]:
            if f"{url}/".startswith(f"{directory}/") or f"{directory}/".startswith(f"{url}/"):
                self._deep.pop(directory, None)

    def _listing_of(self, url: str) -> dict[str, Info] | None:
        """Return a listing that has all files at or below a URL."""
        if tree := self._tree_of(url):
            return tree.files
        for directory, files in [*self._deep.items()]:
            if url.startswith(f"{directory}/") or url == directory:
                return files
        return None

    def files(self, url: str) -> dict[str, Info]:
        """Return the files below a directory, by their URLs.

        Raises:
            SourceError: it cannot be listed.
        """
        if self._tree_of(url):
            return self.now(url)
        files = self._listing_of(url)
        if files is None:
            files = self.now(url)
            if files:  # otherwise it may be a file
                self._deep[url] = files
        return {path: info for path, info in files.items() if path.startswith(f"{url}/")}

    def now(self, url: str) -> dict[str, Info]:
        """Return the files below a directory as they are now, by their URLs; other listings are kept.

        Raises:
            SourceError: it cannot be listed.
        """
        if tree := self._tree_of(url):
            return {path: tree.files[path] for path in tree.below(url)}
        with suppress(GoneError):  # there is no bucket; `require_bucket` says so
            return _listed(url, deep=True)[0]
        return {}

    def level(self, url: str) -> list[str]:
        """Return the names of the files and directories in a directory.

        Raises:
            SourceError: it cannot be listed.
        """
        if tree := self._tree_of(url):
            return list(tree.levels.get(url, ()))
        files = self._listing_of(url)
        if files is not None:
            below = (path[len(url) + 1 :] for path in files if path.startswith(f"{url}/"))
            return list(dict.fromkeys(path.partition("/")[0] for path in below))
        files, directories = _listed(url, deep=False)
        return [path[len(url) + 1 :] for path in (*files, *directories)]

    def kind(self, url: str) -> str:
        """Return `file` or `directory`; "" if nothing is there.

        Raises:
            SourceError: the store cannot be reached.
        """
        if tree := self._tree_of(url):
            return "file" if url in tree.files else "directory" if url in tree.levels else ""
        files = self._listing_of(url)
        if files is None:
            with suppress(GoneError):
                self.status(url)
                return "file"
            with suppress(GoneError):  # there is no bucket; `require_bucket` says so
                return "directory" if self._first_page(url).files else ""
            return ""
        if url in files:
            return "file"
        return "directory" if any(path.startswith(f"{url}/") for path in files) else ""

    def _first_page(self, url: str) -> ListingPage:
        """Return the first page of a listing; keep it if it is the only one."""
        client, key = client_at(url)
        page = ask(url, "listed", partial(client.page, key, "", deep=True), nbytes=None)
        if page.files and not page.next:
            self._deep[url] = _by_url(url, key, page.files)
        return page

    def status(self, url: str) -> Status:
        """Return the state of a file as it was listed; ask for it if it was not.

        Raises:
            SourceError: it does not exist, or the store cannot be reached.
        """
        files = self._listing_of(url)
        if files is not None and url in files and files[url].version:
            return files[url].status
        return self.status_now(url)

    @staticmethod
    def status_now(url: str) -> Status:
        """Return the state of a file as it is now.

        Raises:
            SourceError: it does not exist, or the store cannot be reached.
        """
        client, key = client_at(url)
        if not key:
            raise GoneError(f"{url} does not exist", code="not-found")
        return ask(url, "looked at", partial(client.info, key)).status

    def require_bucket(self, url: str) -> None:
        """Raise a `SourceError` if the bucket of a URL does not exist."""
        client, key = client_at(url)
        try:
            ask(url, "listed", partial(client.page, key, "", deep=False), nbytes=None)
        except SourceError as error:  # later reads report other errors
            if error.code == "no-such-bucket":
                raise SourceError(error.message, code="no-such-bucket", hint=error.hint) from None


def _listed(url: str, *, deep: bool) -> tuple[dict[str, Info], list[str]]:
    """Return all files below a directory, and its directories if not `deep`, by their URLs."""
    client, key = client_at(url)
    files: dict[str, Info] = {}
    directories: list[str] = []
    token = ""
    while True:  # one level takes a file system few requests, all levels any number
        page = ask(url, "listed", partial(client.page, key, token, deep=deep), nbytes=None if deep else 0)
        files |= _by_url(url, key, page.files)
        directories += _by_url(url, key, dict.fromkeys(page.directories))
        if page.next and page.next == token:
            raise SourceError(f"{url} cannot be listed: the store repeats itself", code="store-error")
        token = page.next
        if not token:
            return files, directories


def _by_url(url: str, key: str, files: Mapping[str, T]) -> dict[str, T]:
    """Return files by URL instead of by key."""
    return {f"{url}/{name[len(key) :].strip('/')}": info for name, info in files.items()}


listings = Listings()
