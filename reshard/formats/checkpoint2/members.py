"""Read a JSON object of objects member by member, in the memory of its longest member."""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections import Counter
from typing import TYPE_CHECKING, Any

from reshard.core.model.entries import RangeReader

if TYPE_CHECKING:
    from collections.abc import Iterator

_PIECE = 1 << 20
_LONGEST = 1 << 26  # characters of one member
_NEXT_KEY = re.compile(r'[ \t\n\r]*,[ \t\n\r]*"([^"\\\x00-\x1f]*)"[ \t\n\r]*:')  # a key without escapes
_BEHIND = {*" \t\n\r:,]}"}
_SPACE = {"", *" \t\n\r"}
_CHARACTER = re.compile(r"[^ \t\n\r]")


def members(path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the members of the objects in a JSON object: outer key, inner key, value.

    A value of the outer object that is not an object comes with an empty inner key.

    Raises:
        ValueError: it is not a JSON object, or an object has a key twice.
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
        if text.next() != "{":
            yield key, "", text.value()
            continue
        for name in text.names():
            yield key, name, text.value()
    if text.next():
        raise ValueError("something follows the object")


class _TextParser:
    """A parser of the text of a file, which buffers a piece of it."""

    def __init__(self, reader: RangeReader) -> None:
        self._reader, self._read = reader, 0
        self._decode = getincrementaldecoder("utf-8-sig")().decode
        self._buffer, self._at = "", 0
        self._scan = json.JSONDecoder(object_pairs_hook=_once).raw_decode

    def names(self) -> Iterator[str]:
        """Yield the keys of the next object.

        The caller must read the value of each key before the next key.
        """
        self._take("{")
        hashes: set[int] = set()  # hashes, as keys may be millions
        while True:
            plain = _NEXT_KEY.match(self._buffer, self._at) if hashes else None
            if plain:
                key, self._at = plain[1], plain.end()
            elif self.next() == "}":
                break
            else:
                if hashes:
                    self._take(",")
                key = self.value()
                if not isinstance(key, str):
                    raise ValueError(f"{key!r:.60} is the key of an object; expected text")
                self._take(":")
            if hash(key) in hashes:
                raise ValueError(f"the key {key!r:.60} is there twice in an object")
            hashes.add(hash(key))
            yield key
        self._take("}")

    def next(self) -> str:
        """Peek at the next character that is not white space; "" at the end."""
        while True:
            if self._buffer[self._at : self._at + 1] not in _SPACE:
                return self._buffer[self._at]
            match = _CHARACTER.search(self._buffer, self._at)
            self._at = match.start() if match else len(self._buffer)
            if self._at < len(self._buffer) or not self._more(_PIECE):
                return self._buffer[self._at : self._at + 1]

    def _take(self, character: str) -> None:
        following = self.next()
        if following != character:
            raise ValueError(f"{following or 'the end'!r} is there; expected {character!r}")
        self._at += 1

    def value(self) -> Any:
        """Parse and return the next JSON value."""
        self.next()
        length = _PIECE
        while True:
            try:
                value, end = self._scan(self._buffer, self._at)
            except RecursionError:
                raise ValueError("it is nested too deeply") from None
            except json.JSONDecodeError as error:
                too_long = len(self._buffer) - self._at > _LONGEST
                if too_long or not self._more(length):
                    limit = f" in the {_LONGEST} characters that a value may have" if too_long else ""
                    raise ValueError(f"it is not JSON{limit}: {error.msg}") from None
            else:
                nbytes = end - self._at
                if self._buffer[end : end + 1] in _BEHIND or not self._more(length):  # a number may continue
                    self._at += nbytes
                    return value
            length *= 2

    def _more(self, nbytes: int) -> bool:
        """Buffer more of the text; return whether there was any."""
        content = self._reader.upto(self._read, nbytes)
        self._read += len(content)
        self._buffer = self._buffer[self._at :] + self._decode(content, final=not content)
        self._at = 0
        return bool(content)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {name!r:.60} is there twice in an object")
    return result
