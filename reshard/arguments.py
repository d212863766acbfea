"""Check the arguments of public functions against their annotations, so that a wrong one is named at once.

Annotations are texts here, and are parsed when a function is called first. Classes are compared by their names, so that
nothing is imported for them.
"""

from __future__ import annotations

import os
from ast import literal_eval
from collections.abc import Iterable, Mapping
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from reshard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")

_ELSEWHERE = {"Checkpoint", "int | str | None"}
"""Annotations that other code checks: `api.checkpoints.record_of`, `sizes.size_of`."""

_ALIASES = {
    "AnyName": "str | os.PathLike[str] | RemotePath",
    "AnyFiles": "TargetFiles | Checkpoint2 | ZarrGroup | DCP | LinkedDCP | DeepSpeedUniversal",
    "DTypeLike": "str | type | dtype",
    "Globs": "str | Iterable[str]",
    "Number": "int | str",
    "Shape": "Sequence[int]",
}

_WORDS = {
    "AnyName": "a path", "os.PathLike": "a path", "Globs": "a glob or a list of globs", "str": "a text",
    "AnyFiles": "an object such as HuggingFaceSet()", "bool": "True or False", "int": "a whole number",
    "float": "a number", "Callable": "a function", "DTypeLike": "a dtype",
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

    @wraps(function)
    def checking(*args: P.args, **kwargs: P.kwargs) -> T:
        for number, value in enumerate(args):
            name = positional[number] if number < len(positional) else others
            _check(name, annotations.get(name, "Any"), value)
        for name, value in kwargs.items():
            if name not in by_position_only:
                _check(name, annotations.get(name, "Any"), value)
        return function(*args, **kwargs)

    return checking


def checked_fields(kind: type[T]) -> type[T]:
    """Decorate a public dataclass: fields are checked like the arguments of a function."""
    kind.__init__ = checked(kind.__init__)  # type: ignore[method-assign]
    return kind


def _check(name: str, annotation: str, value: object) -> None:
    if annotation not in _ELSEWHERE and not _allows(annotation, value):
        expected = " or ".join(dict.fromkeys(_in_words(part) for part in _parts(annotation, "|") if part != "None"))
        raise UsageError(f"{name} is {value!r:.60}; expected {expected}", code="bad-argument")


def _allows(annotation: str, value: object) -> bool:
    return any(_allows_one(part, value) for part in _parts(annotation, "|"))


def _allows_one(part: str, value: Any) -> bool:  # noqa: PLR0911, PLR0912 -- a table
    """Return whether a part of an annotation allows a value."""
    if part in _ALIASES:
        return _allows(_ALIASES[part], value)
    name, _, inner = part.removesuffix("]").partition("[")
    match name:
        case "Any":
            return True
        case "None":
            return value is None
        case "bool":
            return type(value).__name__ in {"bool", "bool_"}
        case "int" | "float":
            return hasattr(value, "__index__" if name == "int" else "__float__") and not isinstance(value, bool)
        case "str":
            return isinstance(value, str)
        case "os.PathLike":
            return isinstance(value, os.PathLike)
        case "TargetFiles":  # anyone may write one
            return hasattr(value, "shard_files")
        case "Callable":
            return callable(value)
        case "Literal":
            return any(type(value) is type(each) and value == each for each in literal_eval(f"({inner},)"))
        case "Mapping":
            key, item = _parts(inner, ",")
            pairs = value.items() if isinstance(value, Mapping) else ()
            return isinstance(value, Mapping) and all(_allows(key, old) and _allows(item, new) for old, new in pairs)
        case "Iterable" | "Sequence" | "Collection":
            if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
                return False
            is_read = isinstance(value, (list, tuple, set, frozenset)) and inner not in _ELSEWHERE
            return not is_read or all(_allows(inner, item) for item in value)
    return any(each.__name__ == name.rpartition(".")[2] for each in type(value).__mro__)


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
        key, item = (_in_words(part).removeprefix("a ") for part in _parts(inner, ","))
        return f"a dict of {key} to {item}"
    if name in {"Iterable", "Sequence", "Collection"}:
        return f"a list of {inner}"
    return _WORDS.get(name, f"{'an' if name[0] in 'AEIOU' else 'a'} {name}")
