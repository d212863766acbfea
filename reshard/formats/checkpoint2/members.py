"""Read a JSON object of objects member by member, in the memory of its longest member."""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from typing import TYPE_CHECKING, Any

from reshard.core.model.entries import RangeReader

if TYPE_CHECKING:
    from collections.abc import Iterator

_PIECE = 1 << 20
_LONGEST = 1 << 26  # characters of one member
_BEHIND = {*" \t\n\r:,]}"}
_SPACE = re.compile(r"[ \t\n\r]*")


def members(path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the members of the objects in a JSON object: outer key, inner key, value.

    A value of the outer object that is not an object comes with an empty inner key.

    Raises:
        ValueError: it is not a JSON object.
        SourceError: the file cannot be read.

    >>> from pathlib import Path
    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp(), "a.json")
    >>> _ = path.write_text('{"a": {"b": [1], "c": 2}, "d": null}')
    >>> list(members(str(path)))
    [('a', 'b', [1]), ('a', 'c', 2), ('d', '', None)]
    """
    text = _TextParser(RangeReader(path, window=_PIECE))
    for key in text.names():
        if text.next() == "{":
            for name in text.names():
                yield key, name, text.value()
        else:
            yield key, "", text.value()
    if text.next():
        raise ValueError("something follows the object")


class _TextParser:
    """A parser of the text of a file, which buffers a piece of it."""

    def __init__(self, reader: RangeReader) -> None:
        self._reader, self._read = reader, 0
        self._decode = getincrementaldecoder("utf-8-sig")().decode
        self._buffer, self._at = "", 0
        self._scan = json.JSONDecoder().raw_decode

    def names(self) -> Iterator[str]:
        """Yield the keys of the next object; the caller reads the value of each before the next key."""
        self._take("{")
        separator = ""
        while self.next() != "}":
            self._take(separator)
            name = self.value()
            if not isinstance(name, str):
                raise ValueError(f"{name!r:.60} is the key of an object; expected text")  # noqa: TRY004 -- as for all faults
            self._take(":")
            yield name
            separator = ","
        self._take("}")

    def next(self) -> str:
        """Peek at the next character that is not white space; "" at the end."""
        while True:
            space = _SPACE.match(self._buffer, self._at)
            self._at = space.end() if space else self._at
            if self._at < len(self._buffer) or not self._more(_PIECE):
                return self._buffer[self._at : self._at + 1]

    def value(self) -> Any:
        """Parse and return the next JSON value."""
        self.next()
        nbytes = _PIECE
        while True:
            try:
                value, end = self._scan(self._buffer, self._at)
            except RecursionError:
                raise ValueError("it is nested too deeply") from None
            except json.JSONDecodeError as error:
                if len(self._buffer) - self._at > _LONGEST:
                    raise ValueError(f"a value has more than {_LONGEST} characters") from None
                if not self._more(nbytes):
                    raise ValueError(f"it is not JSON: {error.msg}") from None
            else:
                length = end - self._at
                if self._buffer[end : end + 1] in _BEHIND or not self._more(nbytes):  # a number may continue
                    self._at += length
                    return value
            nbytes *= 2

    def _take(self, character: str) -> None:
        following = self.next()
        if not following.startswith(character):
            raise ValueError(f"{following or 'the end'!r} is there; expected {character!r}")
        self._at += len(character)

    def _more(self, nbytes: int) -> bool:
        """Buffer more of the text; return whether there was any."""
        content = self._reader.upto(self._read, nbytes)
        self._read += len(content)
        self._buffer = self._buffer[self._at :] + self._decode(content, final=not content)
        self._at = 0
        return bool(content)
