"""Codes of errors: each place that makes an error names the cause in a literal, which scripts can rely on."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import reshard
from reshard import errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PACKAGE = Path(reshard.__file__).parent
CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

ALLOWED = {
    "errors.py: changed": "the same error in other words",
    "errors.py: about": "the same error with a subject",
    "errors.py: raise_if_any": "the faults have codes",
}
"""Functions that make an error without a literal code, with the reason."""

MOST_EXIT_CODES = 5
"""How many exit codes may share a code: a cause such as a name that is wrong may be an option's, or a file's."""


@cache
def trees() -> Mapping[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def exit_codes() -> Mapping[str, int]:
    """Return the exit codes of the error classes, those that modules of their own define included."""
    codes = {
        name: kind.exit_code
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.ReshardError)
    }
    classes = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    count = 0
    while count != len(codes):
        count = len(codes)
        for node in classes:
            bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in codes]
            if bases:
                codes.setdefault(node.name, codes[bases[0]])
    return codes


def literals(node: ast.expr | None, variables: Mapping[str, list[ast.expr]]) -> list[str] | None:
    """Return the codes that an expression may be; None if one of them is not known here.

    The code of a caught error is none of its own.
    """
    match node:
        case ast.Constant(value=str(code)):
            return [code]
        case ast.Attribute(attr="code"):
            return []
        case ast.IfExp(body=first, orelse=second):
            choices = [first, second]
        case ast.Name(id=name) if name in variables:
            choices = variables[name]
        case _:
            return None
    codes = [literals(choice, {}) for choice in choices]
    return None if None in codes else [code for each in codes for code in each or []]


def errors_made(path: Path, tree: ast.AST) -> Iterator[tuple[str, str, str, list[str] | None]]:
    """Yield where errors are made in a module: the function, the place, the class and the codes."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node): function for function in functions for node in ast.walk(function)}  # the innermost comes last
    raised = {id(node.exc) for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        if name not in exit_codes() and not (name == "kind" and id(call) in raised):
            continue
        function = inside.get(id(call))
        variables = defaultdict(list)
        for node in ast.walk(function or tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                variables[node.targets[0].id].append(node.value)
        code = next((keyword.value for keyword in call.keywords if keyword.arg == "code"), None)
        where = f"{path.relative_to(PACKAGE)}: {function.name if function else ''}"
        yield where, f"{path.relative_to(PACKAGE)}:{call.lineno}", name, literals(code, variables)


@cache
def all_made() -> list[tuple[str, str, str, list[str] | None]]:
    return [made for path, tree in trees().items() for made in errors_made(path, tree)]


def test_each_error_has_a_literal_code() -> None:
    assert len(all_made()) > 500
    without = [place for where, place, _, codes in all_made() if codes is None and where not in ALLOWED]
    assert not without, f"no literal code= at {without}"


def test_the_places_that_are_excepted_exist() -> None:
    functions = {
        f"{path.relative_to(PACKAGE)}: {node.name}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }
    assert ALLOWED.keys() <= functions


def test_codes_are_words_joined_by_hyphens() -> None:
    codes = {code for _, _, _, codes in all_made() for code in codes or []}
    for tree in trees().values():  # those of faults, and of classes
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "code" and isinstance(node.value, ast.Constant):
                codes.add(node.value.value)
    codes |= {kind.code for _, kind in inspect.getmembers(errors, inspect.isclass) if hasattr(kind, "code")}
    assert [code for code in sorted(codes) if not CODE.fullmatch(code)] == []


def test_a_code_has_few_exit_codes() -> None:
    """A script that looks at the code alone seldom has to look at the exit status, too."""
    by_code = defaultdict(set)
    for _, _, name, codes in all_made():
        for code in codes or []:
            by_code[code] |= {exit_codes()[name]} if name in exit_codes() else set()
    many = {code: sorted(found) for code, found in sorted(by_code.items()) if len(found) > 2}
    print("codes of more than two exit codes:", many)
    assert max(map(len, by_code.values())) <= MOST_EXIT_CODES


@pytest.mark.parametrize(
    ("source", "codes"),
    [
        ('raise UsageError("x")', None),
        ('raise UsageError("x", code=text)', None),
        ('raise UsageError("x", code="a" if y else text)', None),
        ('raise kind("x")', None),
        ('error = UsageError("x")', None),
        ('raise UsageError("x", code="a-b")', ["a-b"]),
        ('raise UsageError("x", code="a" if y else "b")', ["a", "b"]),
        ('code = "c"\nraise UsageError("x", code=code)', ["c"]),
        ("raise SourceError(error.message, code=error.code)", []),
    ],
)
def test_a_place_without_a_literal_is_found(source: str, codes: list[str] | None) -> None:
    assert [made[3] for made in errors_made(PACKAGE / "x.py", ast.parse(source))] == [codes]
