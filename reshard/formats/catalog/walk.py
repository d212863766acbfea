"""The tree of directories in which checkpoints are looked for: names, sizes and times, listed once.

Hidden directories are left out. Links are followed, and each directory is listed once, so that circles of links end. An
object store is asked for all files below the root at once.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.core.listing import RANK_DIRECTORY
from reshard.core.model.findings import Directory, FileStat
from reshard.core.storage.base import similar
from reshard.core.storage.places import LocalPath, RemotePath
from reshard.core.storage.urls.listings import listings
from reshard.errors import SourceError
from reshard.siblings import keeping_siblings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.core.storage.places import Place

_DEEPEST = 64


@contextmanager
def listed(root: Place) -> Iterator[Directory]:
    """List all below a directory; at a URL, readers are answered from this list until the end.

    Raises:
        SourceError: it does not exist, is a file, or cannot be listed.
    """
    if isinstance(root, RemotePath):
        with listings.kept(root.url) as files, keeping_siblings():
            directory = Directory(root)
            for url, info in files.items():
                _add(directory, url.removeprefix(f"{root.url}/").split("/"), FileStat(info.nbytes, info.modified))
            if files:
                yield directory
                return
        root.require_bucket()
        raise _missing(root, is_file=root.is_file())
    if not root.is_dir():
        raise _missing(root, is_file=root.exists())
    with keeping_siblings():
        yield _walked(root)


def _missing(root: Place, *, is_file: bool) -> SourceError:
    if is_file:
        return SourceError(
            f"{root} is a file; expected a directory", code="not-a-directory", hint=f"reshard inspect {root}"
        )
    return SourceError(f"{root} does not exist", code="not-found", hint=similar(root))


def _add(directory: Directory, names: list[str], state: FileStat) -> None:
    """Add a file by the names in its path, unless one is invalid."""
    *above, name = names
    if {"", ".", ".."}.intersection(names) or len(names) > _DEEPEST:
        return
    for part in above:
        if part.startswith("."):
            directory.hidden += [] if part in directory.hidden else [part]
            return
        directory = directory.below.setdefault(part, Directory(directory.place / part))
    directory.files[name] = state


def _walked(root: LocalPath) -> Directory:
    """Return a local directory with all below it.

    Links are followed last, so that a directory keeps its own path.
    """
    top = Directory(root)
    visited: dict[tuple[int, int], Directory | None]
    visited = {_identity(above): None for above in root.resolve().parents}  # a link to one of them leads out
    waiting, links = [(top, 0)], list[tuple[Directory, int]]()
    while waiting or links:
        directory, depth = waiting.pop() if waiting else links.pop(0)
        try:
            identity = _identity(directory.place)
            if identity in visited:
                _link_of_rank(directory, visited[identity])
                continue
            visited[identity] = directory
            with os.scandir(str(directory.place)) as entries:
                for entry in entries:
                    _enter(directory, depth, entry, links if entry.is_symlink() else waiting)
        except OSError as error:
            directory.problem = error.strerror or str(error)
    return top


def _link_of_rank(link: Directory, original: Directory | None) -> None:
    """Give the files of a directory to a link that says that they are of a rank."""
    if original is not None and RANK_DIRECTORY.fullmatch(link.place.name):
        link.files = dict(original.files)
        if not RANK_DIRECTORY.fullmatch(original.place.name):
            original.files.clear()  # they are no model


def _enter(directory: Directory, depth: int, entry: os.DirEntry[str], waiting: list[tuple[Directory, int]]) -> None:
    """Add an entry to its directory; a directory waits until it is listed."""
    try:
        if not entry.is_dir():
            if "\n" in entry.name:  # readers refuse such files, and open such directories
                return
            status = entry.stat()
            directory.files[entry.name] = FileStat(status.st_size, status.st_mtime)
        elif entry.name.startswith("."):
            directory.hidden.append(entry.name)
        elif depth < _DEEPEST:
            directory.below[entry.name] = below = Directory(LocalPath(entry.path))
            waiting.append((below, depth + 1))
    except OSError:  # a broken link, or a circle of links
        directory.files[entry.name] = FileStat(0, 0.0)


def _identity(path: Place | Path) -> tuple[int, int]:
    status = Path(str(path)).stat()
    return status.st_dev, status.st_ino
