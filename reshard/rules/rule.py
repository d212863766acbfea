"""One rule: its patterns, verb and numbers, parsed from a rules file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard.errors import Faults, UsageError, names
from reshard.rules.fused_layout import AxisCut
from reshard.rules.patterns import Pattern
from reshard.spelling import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.rules.numbers import Numbers

_MOST_AXES = 32
_OPTIONS = {
    "rename": set(), "stack": set(), "transpose": {"rows", "columns", "halves"}, "tie": set(),
    "concat": {"axis", "sizes"},
    "interleave": {"axis", "sizes", "groups", "halves"},
    "pad": {"axis", "size", "to", "multiple"},
}  # fmt: skip
_OF_ALL = {"by", "flat", "transposed", "at"}

Number = int | str


@dataclass(frozen=True, slots=True)
class Rule:
    """A mapping between tensors of the two sides.

    Attributes:
        key_path: its path in the file.
        fused_side: the side that has the fused tensor, 0 or 1.
        parts: the names of the parts, on the other side; empty if that side has no counterpart.
        fused: the name of the fused tensor.
        verb: the operation; a key of `_OPTIONS`.
        axis: the axis that is cut.
        sizes, groups, halves, size, padded, multiple: as in `fused_layout.AxisCut`, but numbers or expressions.
        by: the words that become axes in front, each with its count, if the file has it.
        flat: the axes in front and the first dimension are one.
        transposed: the last two dimensions of the parts are swapped.
        at: the dimension at which the axes of `by` are.
        rows, columns: the axes that the rows and the columns of a transposed matrix are; empty for one.
        optional: the rule need not match any tensor.
    """

    key_path: str
    fused_side: int
    parts: tuple[Pattern, ...]
    fused: Pattern
    verb: str = "rename"
    axis: int = 0
    sizes: tuple[Number, ...] | None = None
    groups: Number | None = None
    halves: Number | None = None
    size: Number | None = None
    padded: Number | None = None
    multiple: Number | None = None
    by: tuple[tuple[str, Number | None], ...] = ()
    flat: bool = False
    transposed: bool = False
    at: int = 0
    rows: tuple[Number, ...] = ()
    columns: tuple[Number, ...] = ()
    optional: bool = False

    @property
    def is_name_only(self) -> bool:
        """Return whether the rule only renames tensors."""
        return self.verb in {"rename", "tie"} and not (self.by or self.transposed)

    def side(self, side: int) -> tuple[Pattern, ...]:
        """Return the patterns of one side."""
        return (self.fused,) if side == self.fused_side else self.parts

    def cut(self, numbers: Numbers, *, scale: int = 1) -> AxisCut:
        """Evaluate the numbers of the cut; None where the value follows from the shapes.

        Args:
            numbers: the values of words.
            scale: the number of rows that count as one: a scale of a quantised weight covers a block of its rows.

        Raises:
            UsageError: a value is not a number.
        """

        def evaluated(expression: Number | None) -> int | None:
            if expression is None:
                return None
            value = numbers.value(expression)
            if value < 1:
                raise UsageError(f"has {expression!r:.60}, which is {value}; expected at least 1", code="out-of-range")
            return value

        def rows(expression: Number | None) -> int | None:
            value = evaluated(expression)
            return None if value is None else -(-value // scale)

        def known(expressions: tuple[Number, ...]) -> tuple[int | None, ...]:
            """Return the extents of axes, None for those that need a `config.json` that is not there."""
            extents: list[int | None] = []
            for expression in expressions:
                try:
                    extents.append(evaluated(expression))
                except UsageError as error:
                    if error.code == "out-of-range":
                        raise
                    extents.append(None)
            return tuple(extents)

        of_parts = None if self.sizes is None else tuple(rows(size) or 0 for size in self.sizes)
        return AxisCut(
            self.axis, self.verb == "interleave", of_parts, evaluated(self.groups), evaluated(self.halves) or 0,
            self.verb == "pad", rows(self.size), rows(self.padded), evaluated(self.multiple) if scale == 1 else None,
            known(self.rows), known(self.columns),
        )  # fmt: skip


def is_word(value: object) -> bool:
    """Return whether a value can name a number."""
    return isinstance(value, str) and value.isidentifier() and value != "config"


def is_number(value: object) -> bool:
    """Return whether a value is an integer, or text that may be an expression."""
    return isinstance(value, (int, str)) and not isinstance(value, bool)


def parse_rule(item: object, key_path: str, sides: tuple[str, str], faults: Faults) -> Rule | None:
    """Parse a rule; report faults and return None if it is invalid."""
    before = faults.count
    if not isinstance(item, Mapping) or not set(sides) <= item.keys() <= {*sides, "optional"}:
        expected = f"expected {sides[0]}, {sides[1]} and perhaps optional"
        faults.add(key_path, f"is {item!r:.80}; {expected}", code="bad-rule")
        return None
    values = [item[side] for side in sides]
    verbs = [n for n, value in enumerate(values) if isinstance(value, Mapping)]
    absent = [n for n, value in enumerate(values) if value is None]
    if len(verbs) + len(absent) > 1 or [] in values or all(isinstance(value, list) for value in values):
        faults.add(
            key_path, "has a verb, a list or nothing on both sides, or an empty list; expected names on one side",
            code="no-names",
        )  # fmt: skip
        return None
    fused_side = verbs[0] if verbs else 1 - absent[0] if absent else int(not isinstance(values[1], list))
    fused_path, parts_path = f"{key_path}.{sides[fused_side]}", f"{key_path}.{sides[1 - fused_side]}"
    optional = item.get("optional", False)
    if not isinstance(optional, bool):
        faults.unexpected(f"{key_path}.optional", optional, "true or false")
    verb, options = "rename", dict[str, Any]()
    name = values[fused_side]
    if verbs:
        options = dict(name)
        verb_keys = [key for key in options if key in _OPTIONS]
        if len(verb_keys) != 1:
            expected = f"expected one of {names(_OPTIONS, most=9)} with a name"
            faults.add(fused_path, f"is {name!r:.80}; {expected}", code="unknown-verb")
            return None
        verb = verb_keys[0]
        name = options.pop(verb)
    counterpart = values[1 - fused_side]
    parts = [] if counterpart is None else counterpart if isinstance(counterpart, list) else [counterpart]
    fused = _pattern(name, fused_path, faults)
    patterns = [_pattern(part, parts_path, faults) for part in parts]
    expected_keys = _OPTIONS[verb] | (_OF_ALL - {"transposed"} if verb == "transpose" else _OF_ALL)
    for key in (key for key in options if key not in expected_keys):
        faults.add(
            f"{fused_path}.{key}",
            f"is unknown; expected {names(sorted(expected_keys), most=9)}",
            code="unknown-key",
            hint=did_you_mean(key, sorted(expected_keys)),
        )
    fields = _fields(options, fused_path, faults)
    transposed = verb == "transpose" or options.get("transposed", False)
    if not isinstance(transposed, bool):
        faults.unexpected(f"{fused_path}.transposed", transposed, "true or false")
    if faults.count > before or fused is None:
        return None
    rule = Rule(
        key_path, fused_side, tuple(pattern for pattern in patterns if pattern), fused, verb, transposed=transposed,
        optional=optional, **fields,
    )  # fmt: skip
    try:
        _check_options(rule)
        _check_words(rule)
    except UsageError as error:
        faults.add(key_path, error)
        return None
    return rule


def _pattern(text: object, key_path: str, faults: Faults) -> Pattern | None:
    if not isinstance(text, str):
        faults.unexpected(key_path, text, "the name of a tensor")
        return None
    try:
        return Pattern(text)
    except UsageError as error:
        faults.add(key_path, error)
        return None


def _fields(options: Mapping[str, Any], key_path: str, faults: Faults) -> dict[str, Any]:
    """Parse the options of a verb."""

    def checked(key: str, expected: str, valid: Callable[[Any], bool]) -> Any:
        value = options.get(key)
        if value is not None and not valid(value):
            faults.unexpected(f"{key_path}.{key}", value, expected, code="bad-value")
            return None
        return value

    by = options.get("by", [])
    words = by if isinstance(by, (list, Mapping)) else [by]
    counted = list(words.items() if isinstance(words, Mapping) else [(word, None) for word in words])
    valid = all(is_word(word) and (count is None or is_number(count)) for word, count in counted)
    if not valid or len({word for word, _ in counted}) < len(counted):
        expected = "a word, a list of words, or words with how many there are"
        faults.unexpected(f"{key_path}.by", by, expected, code="bad-value")
    sizes = checked("sizes", "a list of numbers or expressions", _is_list)
    axes = {word: checked(word, "a list of numbers or expressions", _is_list) or () for word in ("rows", "columns")}
    for word, values in {"sizes": sizes or (), **axes}.items():
        for value in values:
            if not is_number(value):
                fault = f"has {value!r:.60}; expected a number or an expression"
                faults.add(f"{key_path}.{word}", fault, code="bad-value")
    number = "a number or an expression"
    return {
        "axis": checked("axis", "a small whole number", lambda value: _is_small(value, -_MOST_AXES)) or 0,
        "sizes": None if sizes is None else tuple(sizes),
        "groups": checked("groups", number, is_number),
        "halves": checked("halves", "a number from 2 on, or an expression", _is_halves),
        "at": checked("at", "a small whole number from 0 on", lambda value: _is_small(value, 0)) or 0,
        "rows": tuple(axes["rows"]),
        "columns": tuple(axes["columns"]),
        "size": checked("size", number, is_number),
        "padded": checked("to", number, is_number),
        "multiple": checked("multiple", number, is_number),
        "by": tuple(counted),
        "flat": bool(checked("flat", "true or false", lambda value: isinstance(value, bool))),
    }


def _is_list(value: object) -> bool:
    return isinstance(value, list) and 0 < len(value) <= _MOST_AXES


def _is_halves(value: object) -> bool:
    return is_number(value) and not (isinstance(value, int) and value <= 1)


def _is_small(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MOST_AXES


def _check_options(rule: Rule) -> None:
    """Check that the options of a rule agree with each other and its verb.

    Raises:
        UsageError: they do not; the message is a predicate.
    """
    count, sizes = len(rule.parts), rule.sizes
    has_halves = rule.halves is not None
    if rule.verb == "interleave" and count == 1 and not has_halves:
        raise UsageError(
            "interleaves one part", code="missing-option", hint="set `halves` to the number of pieces of a group"
        )
    if has_halves and sizes is not None:
        raise UsageError(
            "has both halves and sizes", code="conflicting-options", hint="halves are equal: leave `sizes` out"
        )
    if rule.verb == "transpose":
        if has_halves and not rule.rows:
            raise UsageError("has halves without rows", code="missing-option", hint="set `rows` to the axes of rows")
    elif has_halves and rule.groups is None:
        raise UsageError("has halves without groups", code="missing-option", hint="set `groups` to their number")
    if has_halves and count > 1:
        raise UsageError("has both halves and several parts", code="conflicting-options")
    if rule.verb not in {"concat", "interleave", "tie"} and count > 1:
        raise UsageError(
            f"has {count} parts; {rule.verb} takes one", code="wrong-count",
            hint="concat, interleave and tie take several",
        )  # fmt: skip
    if rule.verb == "tie" and (rule.by or rule.transposed):
        raise UsageError("ties tensors, and has by or transposed", code="conflicting-options")
    if sizes is not None and len(sizes) != count:
        raise UsageError(f"has {len(sizes)} sizes for {count} parts; expected one for each", code="wrong-count")


def _check_words(rule: Rule) -> None:
    """Check that the words in a rule's names fit its `by`.

    Raises:
        UsageError: they do not; the message is a predicate.
    """
    by, fused_words = {word for word, _ in rule.by}, set(rule.fused.words)
    if rule.verb == "stack" and not by:
        raise UsageError("stacks without by", code="missing-option", hint="name in `by` the words that become axes")
    if rule.at and (rule.flat or not by):
        raise UsageError(
            "has `at` without by, or with flat", code="conflicting-options",
            hint="`at` is where the axes of `by` are in the tensor",
        )  # fmt: skip
    if rule.flat and not by:
        raise UsageError("is flat without by", code="missing-option", hint="name in `by` the words that become rows")
    if by & fused_words:
        raise UsageError(
            f"has {names(sorted(by & fused_words))} both in by and in the name of what is made",
            code="conflicting-options",
        )
    for part in rule.parts:
        if alone := (set(part.words) ^ fused_words) - by or by - set(part.words):
            raise UsageError(
                f"has {names(sorted(alone))} in one name but not in the other", code="unmatched-word",
                hint="name in `by` the words that become axes",
            )  # fmt: skip
