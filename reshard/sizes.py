"""Sizes as people write them, such as `4GB` or `512MiB`: the one parser of the command line and of Python."""

from __future__ import annotations

import re
from numbers import Integral

from reshard.errors import UsageError

_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?:(?P<power>[kMGTP])(?P<binary>i?))?B?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes that a text means, in decimal or binary units; only 0 needs no unit.

    Raises:
        UsageError: it is not a size, or has no unit.

    >>> parse_size("4GB"), parse_size("512 MiB"), parse_size("1.5kB"), parse_size("0")
    (4000000000, 536870912, 1500, 0)
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise UsageError(f"{text!r} is not a size, such as 4GB or 512MiB", code="bad-size")
    if match["number"] == match[0] and float(match[0]):
        raise UsageError(f"{match[0]} has no unit; write {match[0]}GB or {match[0]}MB", code="bad-size")
    power = "kmgtp".index(match["power"].lower()) + 1 if match["power"] else 0
    return int(float(match["number"]) * (1024 if match["binary"] else 1000) ** power)


def size_of(size: int | str | None, name: str) -> int | None:
    """Return a size in bytes that is a number or a text; None if there is none.

    Args:
        size: the size.
        name: what the argument is called, for the error.

    Raises:
        UsageError: it is not a size.

    >>> size_of("1GB", "memory"), size_of(10, "memory"), size_of(None, "memory")
    (1000000000, 10, None)
    """
    if isinstance(size, Integral) and not isinstance(size, bool) and size >= 0:
        return int(size)
    if size is not None and not isinstance(size, str):
        raise UsageError(f"{name}: {size!r:.60} is not a size, such as 4GB or 512MiB", code="bad-size")
    if size is None:
        return None
    try:
        return parse_size(size)
    except UsageError as error:
        raise error.about(name) from None


def counted(number: int, noun: str) -> str:
    """Write a number and its noun, in the plural if needed.

    >>> counted(1, "file"), counted(1200, "tensor"), counted(2, "process")
    ('1 file', '1200 tensors', '2 processes')
    """
    plural = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{plural}"
