"""Evaluate numbers in rules: integers, names in `let`, fields of a model's `config.json`, and arithmetic."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import add, floordiv, mul, sub
from typing import TYPE_CHECKING, Any

from reshard.core.storage.small import parse_json, read_small
from reshard.errors import Option, Text, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.core.storage.places import Place

_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.Div: floordiv,
}
_LONGEST = 200
_MOST = 1 << 40
_DEEPEST = 20


class UnknownError(UsageError):
    """A name in an expression has no value."""

    code = "unknown-number"


@dataclass(frozen=True, slots=True)
class Numbers:
    """The values of names in expressions.

    Attributes:
        let: names and their values: numbers, or expressions with other names.
        config: the fields of a model's configuration, for `config.NAME`.

    >>> numbers = Numbers({"head": "config.head_dim | config.hidden_size / heads", "heads": 4}, {"hidden_size": 32})
    >>> numbers.value("heads * head - 1"), numbers.value(7)
    (31, 7)
    """

    let: Mapping[str, int | str]
    config: Mapping[str, Any] = field(default_factory=dict)

    def value(self, expression: int | str) -> int:
        """Evaluate a number or an expression.

        Raises:
            UnknownError: a name has no value.
            UsageError: it is not an expression, or its value is not a whole number.
        """
        return self._of(expression, 0, {})

    def _of(self, expression: object, depth: int, cache: dict[str, int]) -> int:
        if isinstance(expression, int) and not isinstance(expression, bool):
            return expression
        if not isinstance(expression, str) or len(expression) > _LONGEST or depth > _DEEPEST:
            raise UsageError(
                f"has {expression!r:.60}, which is not a number, is too long, or refers to too many others",
                code="bad-number",
            )
        try:
            tree = ast.parse(expression.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise UsageError(
                f"has {expression!r:.60}, which is not an expression such as heads / groups * head", code="bad-number"
            ) from None
        return self._evaluated(tree, expression, depth, cache)

    def _evaluated(self, node: ast.expr, text: str, depth: int, cache: dict[str, int]) -> int:
        match node:
            case ast.Constant(value=int(value)) if not isinstance(value, bool) and abs(value) <= _MOST:
                return value
            case ast.Name(id=name):
                if name not in self.let:
                    raise UnknownError(
                        f"needs {name}, which is not in let", code="unknown-number",
                        hint=Text("give it a value: ", Option("let", name)),
                    )  # fmt: skip
                if name not in cache:  # evaluated once, as a few lines may refer to it exponentially often
                    cache[name] = self._of(self.let[name], depth + 1, cache)
                return cache[name]
            case ast.Attribute():
                return self._of_config(node, text)
            case ast.BinOp(left=first, op=ast.BitOr(), right=second):
                try:
                    return self._evaluated(first, text, depth, cache)
                except UnknownError:
                    return self._evaluated(second, text, depth, cache)
            case ast.BinOp(left=first, op=op, right=second) if type(op) in _ARITHMETIC:
                a, b = self._evaluated(first, text, depth, cache), self._evaluated(second, text, depth, cache)
                if isinstance(op, ast.Div) and (not b or a % b):
                    raise UsageError(f"has {text!r:.60}, and {a} / {b} is not a whole number", code="not-divisible")
                if abs(result := _ARITHMETIC[type(op)](a, b)) <= _MOST:
                    return result
        raise UsageError(
            f"has {text!r:.60}; expected only whole numbers, words, config.NAME and + - * / |", code="bad-number"
        )

    def _of_config(self, node: ast.expr, text: str) -> int:
        path: list[str] = []
        while isinstance(node, ast.Attribute):
            path.append(node.attr)
            node = node.value
        if not (isinstance(node, ast.Name) and node.id == "config"):
            raise UsageError(f"has {text!r:.60}; a dot may follow config only", code="bad-number")
        value: Any = self.config
        for key in reversed(path):
            value = value.get(key) if hasattr(value, "get") else None
        if isinstance(value, bool) or not isinstance(value, int):
            name = ".".join(["config", *reversed(path)])
            problem = "is missing" if value is None else f"is {value!r:.40}"
            raise UnknownError(
                f"needs {name}, which {problem}", code="unknown-number",
                hint=Text("give the model's configuration: ", Option("model_config")),
            )  # fmt: skip
        return value


def read_config(location: Place) -> Any:
    """Read a model's configuration.

    Raises:
        UsageError: it cannot be read, or is not JSON.
    """
    content = read_small(location, "model configuration", 1 << 22, UsageError)
    try:
        return parse_json(content, [])
    except ValueError as error:
        raise UsageError(f"{location} is not JSON", code="not-json", facts=[str(error)]) from None


def numbers_in(config: object) -> dict[str, Any]:
    """Return only the numbers of a configuration, as rules need nothing else."""
    if not isinstance(config, Mapping):
        raise UsageError(
            f"the model configuration is a {type(config).__name__}; expected a JSON object", code="wrong-type"
        )
    numbers: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, int) and not isinstance(value, bool):
            numbers[str(key)] = value
        elif isinstance(value, Mapping) and (below := numbers_in(value)):
            numbers[str(key)] = below
    return numbers
