"""Check the arguments of public functions against their annotations, so that a wrong one is named at once.

Numbers, texts and collections of other libraries become those of Python, which JSON, pickles and `if` are written for:
`numpy.int64`, a text of an `Enum`, a `pandas.Index`, a generator.

Annotations are texts here, and are parsed when a function is called first. Classes are compared by their names, so that
nothing is imported for them.
"""

from __future__ import annotations

import os
import re
from ast import literal_eval
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, wraps
from importlib import import_module
from operator import index
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from reshard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

P = ParamSpec("P")
T = TypeVar("T")

_ELSEWHERE = {"Checkpoint", "int | str | None"}
"""Annotations that other code checks: `api.checkpoints.record_of`, `sizes.size_of`."""

_SECRET = {"cipher", "source_cipher", "storage_options", "target_cipher"}
"""Arguments whose values no message shows."""

_ALIASES = {
    "AnyName": "str | os.PathLike[str] | RemotePath",
    "AnyFiles": "TargetFiles | Options",
    "DTypeLike": "str | type | dtype",
    "Globs": "str | Iterable[str]",
    "Number": "int | str",
    "Shape": "Sequence[int]",
}

_WORDS = {
    "AnyName": "a path", "os.PathLike": "a path", "Globs": "a glob or a list of globs", "str": "a text",
    "AnyFiles": "the options of a format", "bool": "True or False", "int": "a whole number",
    "float": "a number", "Callable": "a function", "DTypeLike": "a dtype", "Any": "anything",
}  # fmt: skip


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a public function: an argument that its annotation does not allow is refused by its name.

    >>> @checked
    ... def repeat(text: str, times: int | None = None) -> str:
    ...     return text * (times or 1)
    >>> repeat("a", times="2")
    Traceback (most recent call last):
    ...
    reshard.errors.UsageError: times is '2'; expected a whole number
    """
    code = function.__code__
    positional = code.co_varnames[: code.co_argcount]
    others = code.co_varnames[code.co_argcount + code.co_kwonlyargcount] if code.co_flags & 4 else ""
    annotations = function.__annotations__
    by_position_only = set(positional[: code.co_posonlyargcount])
    shared = _OF_KIND.fullmatch(annotations.get("options", ""))

    @wraps(function)
    def checking(*args: P.args, **kwargs: P.kwargs) -> T:
        values: list[Any] = []
        for number, value in enumerate(args):
            name = positional[number] if number < len(positional) else others
            values.append(argument(name, annotations.get(name, "Any"), value))
        known = {**_annotations_of(shared[1]), **annotations} if shared and kwargs else annotations
        options: dict[str, Any] = {
            name: value if name in by_position_only else argument(name, known.get(name, "Any"), value)
            for name, value in kwargs.items()
        }
        return function(*values, **options)

    return checking


_OF_KIND = re.compile(r"Unpack\[(\w+)\]")


@cache
def _annotations_of(kind: str) -> Mapping[str, str]:
    """Return the annotations of a class of `reshard.api.options`, as texts."""
    options = import_module("reshard.api.options")
    return {
        name: getattr(each, "__forward_arg__", each) for name, each in getattr(options, kind).__annotations__.items()
    }


def checked_fields(kind: type[T]) -> type[T]:
    """Decorate a public dataclass: fields are checked like the arguments of a function."""
    kind.__init__ = checked(kind.__init__)  # type: ignore[method-assign]
    return kind


class _RefusedError(Exception):
    """An annotation does not allow a value."""


def argument(name: str, annotation: str, value: object) -> Any:
    """Return an argument in Python's own types.

    Args:
        name: its name.
        annotation: what it may be, as in a signature.
        value: the argument.

    Raises:
        UsageError: its annotation does not allow it.
    """
    if annotation in _ELSEWHERE:
        return value
    try:
        return _plain(annotation, value)
    except _RefusedError:
        expected = " or ".join(dict.fromkeys(_in_words(part) for part in _parts(annotation, "|") if part != "None"))
        shown = f"of type {type(value).__name__}" if name in _SECRET else f"{value!r:.60}"
        raise UsageError(f"{name} is {shown}; expected {expected}", code="bad-argument") from None


def _plain(annotation: str, value: Any) -> Any:
    """Return a value in Python's own types; raise `_RefusedError` if an annotation does not allow it."""
    for part in _parts(annotation, "|"):
        with suppress(_RefusedError, TypeError, ValueError, OverflowError):  # also of what converts a value
            return _plain_of_one(part, value)
    raise _RefusedError


def _plain_of_one(part: str, value: Any) -> Any:  # noqa: PLR0911, PLR0912 -- a table
    """Return a value in Python's own types, if a part of an annotation allows it."""
    if part in _ALIASES:
        return _plain(_ALIASES[part], value)
    name, _, inner = part.removesuffix("]").partition("[")
    match name:
        case "Any":
            return value
        case "None" if value is None:
            return None
        case "bool" if type(value).__name__ in {"bool", "bool_"}:
            return bool(value)
        case "int":
            if isinstance(value, bool):
                raise _RefusedError
            return index(value)
        case "float" if hasattr(value, "__float__") and not isinstance(value, bool):
            return value if type(value) is int else float(value)
        case "str" if isinstance(value, str):
            return str.__str__(value)
        case "os.PathLike" if isinstance(value, os.PathLike):
            return value
        case "TargetFiles" if hasattr(value, "shard_files") and not isinstance(value, type):  # anyone may write one
            return value
        case "Callable" if callable(value):
            return value
        case "Literal":
            value = str.__str__(value) if isinstance(value, str) else value
            if any(type(value) is type(each) and value == each for each in literal_eval(f"({inner},)")):
                return value
        case "Mapping" if isinstance(value, Mapping):
            return _plain_mapping(inner, value)
        case "Iterable" | "Sequence" | "Collection" if not isinstance(value, (str, bytes, Mapping)):
            return _plain_items(inner, value)
        case _ if any(each.__name__ == name.rpartition(".")[2] for each in type(value).__mro__):
            return value
    raise _RefusedError


def _plain_mapping(inner: str, value: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return a mapping itself if its keys and values are Python's own, since it may be a `Checkpoint`; else a dict."""
    key, item = _parts(inner, ",")
    pairs = {_plain(key, old): _plain(item, new) for old, new in value.items()}
    return value if _is_same(pairs, value) and _is_same(pairs.values(), value.values()) else pairs


def _plain_items(inner: str, value: Iterable[Any]) -> Iterable[Any]:
    """Return a collection itself if its items are Python's own; else a tuple."""
    items = tuple(value if inner in _ELSEWHERE else (_plain(inner, item) for item in value))
    return value if type(value) in {list, tuple, set, frozenset} and _is_same(items, value) else items


def _is_same(items: Iterable[object], others: Iterable[object]) -> bool:
    return all(item is other for item, other in zip(items, others, strict=True))


@cache
def _parts(annotation: str, separator: str) -> tuple[str, ...]:
    """Split an annotation at separators that are not in brackets.

    >>> _parts("Mapping[str, str | None] | None", "|")
    ('Mapping[str, str | None]', 'None')
    """
    parts, depth = [""], 0
    for char in annotation:
        depth += (char == "[") - (char == "]")
        if char == separator and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return tuple(part.strip() for part in parts)


def _in_words(part: str) -> str:
    name, _, inner = part.removesuffix("]").partition("[")
    if name == "Literal":
        return inner
    if name == "Mapping":
        key, item = (_in_words(each).removeprefix("a ") for each in _parts(inner, ","))
        return f"a dict of {key} to {item}"
    if name in {"Iterable", "Sequence", "Collection"}:
        return f"a list of {inner}"
    return _WORDS.get(name, f"{'an' if name[0] in 'AEIOU' else 'a'} {name}")
