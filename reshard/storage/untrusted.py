"""Reading what nobody vouches for: regular files only, of small ones no more than they may have, and JSON once.

To open a FIFO waits for a writer that may never come, and a device may have no end.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import contextmanager
from stat import S_ISREG
from typing import TYPE_CHECKING, Any

from reshard.storage.remote import RemotePath

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.errors import ReshardError


@contextmanager
def reading(error: type[ReshardError], path: object = None) -> Iterator[None]:
    """Turn what the system refuses (permissions, loops of links, names that are too long) into an error of a kind.

    Args:
        error: the kind.
        path: what is read, where the system does not say.
    """
    try:
        yield
    except OSError as failed:
        raise error(f"{failed.filename or path or 'a file'}: cannot be read: {failed.strerror}") from failed


def open_regular(path: str | os.PathLike[str], error: type[ReshardError]) -> int:
    """Open a regular file for reading, through links, and return its descriptor.

    Raises:
        ReshardError: of the kind given: there is no such file, it may not be read, or it is something else.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as failed:
        raise error(f"{path}: cannot be read: {failed.strerror}") from failed
    except ValueError as failed:  # a zero byte, or half of a surrogate pair, which no path can have
        raise error(f"{str(path)!r}: cannot be read: {failed}") from None
    if not S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise error(f"{path}: is no regular file but a directory, a pipe or a device")
    return fd


def read_small(path: str | os.PathLike[str] | RemotePath, what: str, most: int, error: type[ReshardError]) -> bytes:
    """Return the contents of a regular file that is held in memory.

    Args:
        path: the file, which may be at a URL.
        what: what it should be, for messages.
        most: so many bytes and no more are taken.
        error: what is raised.

    Raises:
        ReshardError: of the kind given: as for `open_regular`, or the file is larger.
    """
    if isinstance(path, RemotePath):
        if path.status().nbytes > most:
            raise error(f"{path}: has more than {most} bytes, which no {what} has")
        return path.read_bytes()
    try:
        with os.fdopen(open_regular(path, error), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            large = size > most
            content = b"" if large else file.read(size + 1)  # not `most`: so much memory would be taken, at once
            while not large and len(content) <= most and (more := file.read(1 << 20)):
                content += more  # a file of /proc says nothing of its size
    except OSError as failed:
        raise error(f"{path}: cannot be read: {failed.strerror}") from None
    if large or len(content) > most:
        raise error(f"{path}: has more than {most} bytes, which no {what} has")
    return content


def parse_json(content: bytes, repeated: list[str]) -> Any:
    """Return what JSON in UTF-8 says.

    Args:
        content: the JSON.
        repeated: gets the names that stand twice in one object; of these, one reader takes the first and another the
            last.

    Raises:
        ValueError: it is not JSON, not UTF-8, too deep, or has a number of thousands of digits.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            repeated.extend(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        return found

    try:
        return json.loads(content.decode("utf-8-sig"), object_pairs_hook=once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:
        raise ValueError("it has a number of thousands of digits") from None


def is_text(text: str) -> bool:
    r"""Return whether a string can be UTF-8: JSON can have half of a surrogate pair, and nothing else can.

    >>> is_text("größe"), is_text("\ud800")
    (True, False)
    """
    return text.isascii() or text.encode(errors="replace").decode() == text
