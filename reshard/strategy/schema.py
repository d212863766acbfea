"""Validate this program's own JSON files against schemas, before they are used.

A schema is plain data: a `Kind` of value; `[kind]` for a list of such values; `(kind, kind)` for a list of exactly two
values; a dict of an object's keys and their kinds, all required and no others allowed; `{TEXT: kind}` for an object of
any keys; and `Maybe(kind)` for a value or null.
"""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.storage.small import is_text, parse_json

if TYPE_CHECKING:
    from collections.abc import Callable


class Kind(NamedTuple):
    """A kind of value: its name in messages, and a predicate that recognizes it."""

    called: str
    holds: Callable[[Any], bool]


class Maybe(NamedTuple):
    """A value of some schema, or null."""

    schema: object


def _is_text(value: object) -> bool:
    """Return whether a value is text without null bytes or lone surrogates."""
    return isinstance(value, str) and "\0" not in value and is_text(value)


def _is_line(value: object) -> bool:
    """Return whether a value is one line of text, so that it cannot fake output."""
    return _is_text(value) and len(str(value).splitlines()) <= 1 and "\n" not in str(value)


def is_inner_path(path: str) -> bool:
    """Return whether a path stays inside its directory; links are not resolved.

    >>> [is_inner_path(path) for path in ("rank_0/a.ckpt", "a/../../b", "/etc/passwd")]
    [True, False, False]
    """
    parts = PurePosixPath(path)
    return not parts.is_absolute() and ".." not in parts.parts


ANY = Kind("anything", lambda _: True)
COUNT = Kind("a whole number, from 0 on", lambda value: type(value) is int and 0 <= value < 1 << 63)
NUMBER = Kind("a whole number", lambda value: type(value) is int and -1 << 63 <= value < 1 << 63)
FLAG = Kind("true or false", lambda value: type(value) is bool)
TEXT = Kind("text", _is_text)
LINE = Kind("text without a line break", _is_line)
INNER_PATH = Kind(
    "a path that stays below its directory", lambda value: _is_line(value) and bool(value) and is_inner_path(str(value))
)


def parse(content: bytes) -> Any:
    """Parse JSON without repeated keys.

    Raises:
        ValueError: it is not JSON, nested absurdly deep, or an object has a key twice.
    """
    repeated: list[str] = []
    try:
        value = parse_json(content, repeated)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if repeated:
        raise ValueError(f"the key {repeated[0]!r:.60} is there twice in an object")
    return value


def check(value: object, schema: object, key_path: str = "$") -> None:
    """Validate a JSON value against a schema.

    Raises:
        ValueError: it does not fit; the message has the first wrong path, its value and the expected kind.

    >>> check({"a": [1, 2]}, {"a": [COUNT], "b": Maybe(TEXT)})
    Traceback (most recent call last):
    ...
    ValueError: $ has no 'b'
    >>> check({"a": [1, -2]}, {"a": [COUNT]})
    Traceback (most recent call last):
    ...
    ValueError: $.a[1] is -2; expected a whole number, from 0 on
    """
    if isinstance(schema, Kind):
        if not schema.holds(value):
            raise ValueError(f"{key_path} is {value!r:.60}; expected {schema.called}")
    elif isinstance(schema, Maybe):
        if value is not None:
            check(value, schema.schema, key_path)
    elif isinstance(schema, list | tuple):
        if not isinstance(value, list) or (isinstance(schema, tuple) and len(value) != len(schema)):
            length = f"of {len(schema)} items" if isinstance(schema, tuple) else "of any length"
            raise ValueError(f"{key_path} is {value!r:.60}; expected a list {length}")
        schemas = schema if isinstance(schema, tuple) else schema * len(value)
        for number, (item, kind) in enumerate(zip(value, schemas, strict=True)):
            check(item, kind, f"{key_path}[{number}]")
    elif isinstance(schema, dict):
        _check_object(value, schema, key_path)


def _check_object(value: object, schema: dict[Any, object], key_path: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{key_path} is {value!r:.60}; expected an object")  # noqa: TRY004 -- the file's fault
    if TEXT in schema:
        for key, item in value.items():
            check(key, TEXT, f"a key of {key_path}")
            check(item, schema[TEXT], f"{key_path}[{key!r:.60}]")
        return
    for key in schema:
        if key not in value:
            raise ValueError(f"{key_path} has no {key!r}")
    for key, item in value.items():
        if key not in schema:
            raise ValueError(f"{key_path} has {key!r:.60}, which is not known")
        check(item, schema[key], f"{key_path}.{key}")
