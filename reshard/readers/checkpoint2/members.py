"""Reading a JSON object of objects member by member: one of any length takes the memory of its longest member."""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections import Counter
from typing import TYPE_CHECKING, Any

from reshard.formats.entries import RangeReader

if TYPE_CHECKING:
    from collections.abc import Iterator

_PIECE = 1 << 20
_LONGEST = 1 << 26  # characters of one member
_NEXT_KEY = re.compile(r'[ \t\n\r]*,[ \t\n\r]*"([^"\\\x00-\x1f]*)"[ \t\n\r]*:')  # one without escapes
_BEHIND = {*" \t\n\r:,]}"}
_SPACE = {"", *" \t\n\r"}
_CHARACTER = re.compile(r"[^ \t\n\r]")


def members(path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the members of the objects in a JSON object: the outer key, the inner key, the value.

    Values of the outer object that are not objects come with an empty inner key.

    Raises:
        ValueError: it is not such JSON, or an object has a key twice.
        SourceError: the file cannot be read.

    >>> from pathlib import Path
    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp(), "a.json")
    >>> _ = path.write_text('{"a": {"b": [1], "c": 2}, "d": null}')
    >>> list(members(str(path)))
    [('a', 'b', [1]), ('a', 'c', 2), ('d', '', None)]
    """
    text = _Text(RangeReader(path, window=_PIECE))
    for key in text.names():
        if text.next() != "{":
            yield key, "", text.value()
            continue
        for name in text.names():
            yield key, name, text.value()
    if text.next():
        raise ValueError("something follows the object")


class _Text:
    """The text of a file, of which a piece is held."""

    def __init__(self, reader: RangeReader) -> None:
        self._reader, self._read = reader, 0
        self._decode = getincrementaldecoder("utf-8-sig")().decode
        self._held, self._at = "", 0
        self._scan = json.JSONDecoder(object_pairs_hook=_once).raw_decode

    def names(self) -> Iterator[str]:
        """Yield the keys of the object that comes; whoever takes one takes its value before the next."""
        self._take("{")
        seen: set[int] = set()  # hashes, as keys may be millions
        while True:
            plain = _NEXT_KEY.match(self._held, self._at) if seen else None
            if plain:
                key, self._at = plain[1], plain.end()
            elif self.next() == "}":
                break
            else:
                if seen:
                    self._take(",")
                key = self.value()
                if not isinstance(key, str):
                    raise ValueError(f"{key!r:.60} is the key of an object; expected text")
                self._take(":")
            if hash(key) in seen:
                raise ValueError(f"the key {key!r:.60} is there twice in an object")
            seen.add(hash(key))
            yield key
        self._take("}")

    def next(self) -> str:
        """Return the next character that is not white space, which stays; empty at the end."""
        while True:
            if self._held[self._at : self._at + 1] not in _SPACE:
                return self._held[self._at]
            found = _CHARACTER.search(self._held, self._at)
            self._at = found.start() if found else len(self._held)
            if self._at < len(self._held) or not self._more(_PIECE):
                return self._held[self._at : self._at + 1]

    def _take(self, character: str) -> None:
        found = self.next()
        if found != character:
            raise ValueError(f"{found or 'the end'!r} is there; expected {character!r}")
        self._at += 1

    def value(self) -> Any:
        """Return the value that comes."""
        self.next()
        length = _PIECE
        while True:
            try:
                value, end = self._scan(self._held, self._at)
            except RecursionError:
                raise ValueError("it is nested too deeply") from None
            except json.JSONDecodeError as error:
                too_long = len(self._held) - self._at > _LONGEST
                if too_long or not self._more(length):
                    limit = f" in the {_LONGEST} characters that a value may have" if too_long else ""
                    raise ValueError(f"it is not JSON{limit}: {error.msg}") from None
            else:
                nbytes = end - self._at
                if self._held[end : end + 1] in _BEHIND or not self._more(length):  # a number may go on
                    self._at += nbytes
                    return value
            length *= 2

    def _more(self, nbytes: int) -> bool:
        """Hold more of the text; return whether there was any."""
        content = self._reader.upto(self._read, nbytes)
        self._read += len(content)
        self._held = self._held[self._at :] + self._decode(content, final=not content)
        self._at = 0
        return bool(content)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {name!r:.60} is there twice in an object")
    return found
