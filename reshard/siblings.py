"""The names next to a file, in tables that answer for every file of a directory.

A file is one of several if others have similar names. To compare each name with all others would take hours for a
directory of many files.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reshard.errors import SourceError

if TYPE_CHECKING:
    import re
    from collections.abc import Iterator, Sequence

    from reshard.core.storage.places import Place


@dataclass(slots=True)
class Alike:
    """Names that differ in one number.

    Attributes:
        names: the names, by this number.
        highest: the highest number.
    """

    names: dict[int, str] = field(default_factory=dict)
    highest: int = -1


class Siblings:
    """The names in a directory.

    Attributes:
        names: the names as keys, in the order of the directory.
        known: what else was found out about the directory, for as long as this is kept.
    """

    def __init__(self, directory: Place) -> None:
        listing: Sequence[str] = ()
        with suppress(SourceError, OSError):  # the directory may be unreadable
            listing = directory.names()
        self.names = dict.fromkeys(listing)
        self.known: dict[str, Any] = {}
        self._alike: dict[re.Pattern[str], dict[tuple[str, str], Alike]] = {}
        self._matching: dict[re.Pattern[str], list[str]] = {}

    def matching(self, pattern: re.Pattern[str]) -> list[str]:
        """Return the names that a pattern matches as a whole."""
        if pattern not in self._matching:
            self._matching[pattern] = [*filter(pattern.fullmatch, self.names)]
        return self._matching[pattern]

    def alike(self, number: re.Pattern[str], before: str, after: str) -> Alike:
        """Return the names that differ only in a number.

        Args:
            number: a pattern whose group `number` matches the number.
            before: the name before the number.
            after: the name behind it.
        """
        if number not in self._alike:
            table = self._alike[number] = defaultdict(Alike)
            for name in self.names:
                for match in number.finditer(name):
                    alike = table[name[: match.start("number")], name[match.end("number") :]]
                    alike.names[int(match["number"])] = name
                    alike.highest = max(alike.highest, int(match["number"]))
        return self._alike[number].get((before, after), Alike())


_KEPT: ContextVar[dict[str, Siblings] | None] = ContextVar("kept", default=None)


def siblings_of(directory: Place) -> Siblings:
    """Return the names in a directory."""
    kept = _KEPT.get()
    if kept is None:
        return Siblings(directory)
    key = str(directory)
    if key not in kept:
        kept[key] = Siblings(directory)
    return kept[key]


@contextmanager
def keeping_siblings() -> Iterator[None]:
    """List each directory once in this thread; for looking at many of its files."""
    token = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(token)
