"""Numbers in rules: whole ones, names that `let` gives a value, fields of a model's `config.json`, and arithmetic."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from operator import add, floordiv, mul, sub
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_DONE: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.Div: floordiv,
}
_LONGEST = 200
_MOST = 1 << 40
_DEEPEST = 20


class UnknownError(ValueError):
    """A number that nothing says."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"needs {name}, which {problem}; give it a value in let, or the model's config.json")


@dataclass(frozen=True, slots=True)
class Numbers:
    """What numbers are.

    Attributes:
        let: names and their values: numbers, or expressions of others.
        config: the fields of a model's configuration, which `config.NAME` means.

    >>> numbers = Numbers({"head": "config.head_dim | config.hidden_size / heads", "heads": 4}, {"hidden_size": 32})
    >>> numbers.value("heads * head - 1"), numbers.value(7)
    (31, 7)
    """

    let: Mapping[str, int | str]
    config: Mapping[str, Any] = field(default_factory=dict)

    def value(self, given: int | str) -> int:
        """Return the number that is meant.

        Raises:
            UnknownError: it is a name that nothing gives a value.
            ValueError: it is not an expression, or not of a whole number.
        """
        return self._of(given, 0, {})

    def _of(self, given: object, depth: int, known: dict[str, int]) -> int:
        if isinstance(given, int) and not isinstance(given, bool):
            return given
        if not isinstance(given, str) or len(given) > _LONGEST or depth > _DEEPEST:
            raise ValueError(f"has {given!r:.60}, which is not a number, too long, or of too many others")
        try:
            tree = ast.parse(given.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ValueError(f"has {given!r:.60}, which is not an expression, such as heads / groups * head") from None
        return self._evaluated(tree, given, depth, known)

    def _evaluated(self, node: ast.expr, text: str, depth: int, known: dict[str, int]) -> int:
        match node:
            case ast.Constant(value=int(value)) if not isinstance(value, bool) and abs(value) <= _MOST:
                return value
            case ast.Name(id=name):
                if name not in self.let:
                    raise UnknownError(name, "is not in let")
                if name not in known:  # once, though a few lines may name it more often than could be counted
                    known[name] = self._of(self.let[name], depth + 1, known)
                return known[name]
            case ast.Attribute():
                return self._of_config(node, text)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                try:
                    return self._evaluated(left, text, depth, known)
                except UnknownError:
                    return self._evaluated(right, text, depth, known)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _DONE:
                a, b = self._evaluated(left, text, depth, known), self._evaluated(right, text, depth, known)
                if isinstance(op, ast.Div) and (not b or a % b):
                    raise ValueError(f"has {text!r:.60}, and {a} / {b} is not a whole number")
                if abs(found := _DONE[type(op)](a, b)) <= _MOST:
                    return found
        raise ValueError(f"has {text!r:.60}; expected whole numbers, words, config.NAME and + - * / | alone")

    def _of_config(self, node: ast.expr, text: str) -> int:
        path: list[str] = []
        while isinstance(node, ast.Attribute):
            path.append(node.attr)
            node = node.value
        if not (isinstance(node, ast.Name) and node.id == "config"):
            raise ValueError(f"has {text!r:.60}, with a dot behind something else than config")
        found: Any = self.config
        for key in reversed(path):
            found = found.get(key) if hasattr(found, "get") else None
        if isinstance(found, bool) or not isinstance(found, int):
            name = ".".join(["config", *reversed(path)])
            raise UnknownError(name, f"is {'not there' if found is None else f'{found!r:.40}'}")
        return found
