"""Read this program's own JSON files into typed records, checking every value before it is used.

A dataclass is a JSON object with exactly its fields; those with defaults may be missing. A named tuple, and a tuple of
fixed length, is a list. Values are `bool`, `int` (64 bits), `str` (without null bytes or lone surrogates), a kind such
as `Count`, `tuple[T, ...]`, `dict[str, T]`, `T | None`, or `Any` for what is checked elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import PurePosixPath
from types import UnionType
from typing import Annotated, Any, NamedTuple, NoReturn, Union, get_args, get_origin, get_type_hints

from reshard.core.storage.small import is_text, parse_json


class FormatError(ValueError):
    """A JSON value is not as expected; `path` is its place, such as `$.files[3]`."""

    def __init__(self, problem: str, path: str) -> None:
        super().__init__(f"{path} {problem}")
        self.problem, self.path = problem, path


class Kind(NamedTuple):
    """A kind of value: its name in messages, a predicate that recognizes it, and a function that converts it."""

    called: str
    holds: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value


def _is_text(value: object) -> bool:
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


def _is_inner_line(value: object) -> bool:
    return _is_line(value) and bool(value) and is_inner_path(str(value))


Count = Annotated[int, Kind("a whole number, from 0 on", lambda value: type(value) is int and 0 <= value < 1 << 63)]
Line = Annotated[str, Kind("text without a line break", _is_line)]
InnerPath = Annotated[str, Kind("a path that stays below its directory", _is_inner_line)]

_KINDS: dict[object, Kind] = {
    bool: Kind("true or false", lambda value: type(value) is bool),
    int: Kind("a whole number", lambda value: type(value) is int and -1 << 63 <= value < 1 << 63),
    str: Kind("text", _is_text),
}


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


def read(kind: Any, value: object, path: str = "$") -> Any:  # noqa: PLR0911 -- a case of types each
    """Return a parsed JSON value as a value of a type.

    Args:
        kind: the type, as in the head of this module.
        value: the parsed JSON.
        path: the place of the value, for messages.

    Raises:
        FormatError: it does not fit; the message has the first wrong path, its value and the expected kind.

    >>> read(tuple[Count, ...], [1, 2])
    (1, 2)
    >>> read(dict[str, tuple[Count, ...]], {"a": [1, -2]})
    Traceback (most recent call last):
    ...
    reshard.core.records.schema.FormatError: $['a'][1] is -2; expected a whole number, from 0 on
    """
    origin, arguments = get_origin(kind), get_args(kind)
    is_optional = origin is UnionType or origin is Union  # of a type and None
    if kind is Any or (is_optional and value is None):
        return value
    if is_optional:
        return read(arguments[0], value, path)
    if origin is Annotated or kind in _KINDS:
        expected = arguments[1] if origin is Annotated else _KINDS[kind]
        return expected.convert(value) if expected.holds(value) else _refuse(value, expected.called, path)
    if origin is tuple and arguments[1:] == (...,):
        if not isinstance(value, list):
            _refuse(value, "a list of any length", path)
        return tuple([read(arguments[0], item, f"{path}[{number}]") for number, item in enumerate(value)])
    if origin is dict:
        for key in _object(value, path):
            if not _is_text(key):
                raise FormatError(f"has the key {key!r:.60}; expected text", path)
        return {key: read(arguments[1], item, f"{path}[{key!r:.200}]") for key, item in _object(value, path).items()}
    if is_dataclass(kind):
        return _record(kind, _object(value, path), path)
    types = arguments if origin is tuple else tuple(_types(kind).values())
    if not isinstance(value, list) or len(value) != len(types):
        _refuse(value, f"a list of {len(types)} items", path)
    items = [read(types[number], item, f"{path}[{number}]") for number, item in enumerate(value)]
    return tuple(items) if origin is tuple else kind(*items)


def to_json(record: object) -> bytes:
    """Return a record as compact JSON that `read` accepts."""
    return json.dumps(record, default=plain, separators=(",", ":")).encode()


def plain(record: Any) -> dict[str, Any]:
    """Return the object of a record or mapping, for `json.dumps`; fields that are None by default are left out."""
    if isinstance(record, Mapping):
        return dict(record)
    values = ((field, getattr(record, field.name)) for field in fields(record))
    return {field.name: value for field, value in values if value is not None or field.default is not None}


@cache
def _types(kind: Any) -> dict[str, Any]:
    """Return the types of the fields of a record."""
    return get_type_hints(kind, include_extras=True)


def _record(kind: Any, value: dict[str, object], path: str) -> Any:
    types = _types(kind)
    for field in fields(kind):
        if field.name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise FormatError(f"has no {field.name!r}", path)
    for key in value:
        if key not in types:
            raise FormatError(f"has {key!r:.60}, which is not known", path)
    return kind(**{key: read(types[key], item, f"{path}.{key}") for key, item in value.items()})


def _object(value: object, path: str) -> dict[str, object]:
    return value if isinstance(value, dict) else _refuse(value, "an object", path)


def _refuse(value: object, expected: str, path: str) -> NoReturn:
    raise FormatError(f"is {value!r:.60}; expected {expected}", path)
