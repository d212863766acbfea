"""Check the numbers in names, so that a tensor that was lost is noticed.

* A word in braces has one range: it has the same numbers in all rules of a file. If the layers of a model are of two
  kinds, each kind has its own word. Each optimizer state has its own ranges, because some layers may be frozen.
* If the model has a `config.json`, the number of layers is its `num_hidden_layers`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import islice, product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.errors import SourceError, names
from reshard.strategy.names import ranges_text

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    from reshard.rules.patterns import Family
    from reshard.rules.rule import Rule

_MOST_NAMES = 3


class _Series(NamedTuple):
    """The names of one part of one rule, which differ only in numbers.

    Attributes:
        rule: the rule.
        numbers: the values of its words, in the order of the words; one tuple for each name.
    """

    rule: Rule
    numbers: set[tuple[int, ...]]


class Ranges:
    """The numbers that rules match in the names of parts."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, Family, int, tuple[str, ...]], _Series] = {}

    def add(self, rule: Rule, family: Family, part: int, bound: Mapping[str, int | str]) -> None:
        """Add one name, given the values of its words and stars."""
        words = rule.parts[part].words
        stars = tuple(str(bound[word]) for word in words if word[0] == "*")
        series = self._series.setdefault((rule.key_path, family, part, stars), _Series(rule, set()))
        series.numbers.add(tuple(int(bound[word]) for word in words if word[0] != "*"))

    def lost(self, present: tuple[Container[str], Container[str]], side: int) -> Iterator[tuple[str, SourceError]]:
        """Yield an error for each rule that lacks numbers of a word.

        It comes with the rule's path in the file. A rule lacks a number if other rules have it for the same word.

        Args:
            present: the names on both sides. A name that matches a more specific rule is not lost.
            side: the side of the source.
        """
        ranges: dict[tuple[Family, str], set[int]] = {}
        for (_, family, part, _), (rule, numbers) in self._series.items():
            for position, word in enumerate(_words(rule, part)):
                ranges.setdefault((family, word), set()).update(index[position] for index in numbers)
        for (rule_path, family, part, stars), (rule, numbers) in self._series.items():
            words = _words(rule, part)
            spans = [sorted(ranges[family, word]) for word in words]
            if prod(map(len, spans)) == len(numbers):
                continue
            of_stars = {f"*{number}": star for number, star in enumerate(stars, 1)}
            absent = (
                name
                for index in product(*spans)
                if index not in numbers
                and (name := _absent(rule, family, part, {**of_stars, **dict(zip(words, index, strict=True))}, present,
                                     side))
            )  # fmt: skip
            if missing := list(islice(absent, _MOST_NAMES + 1)):
                bounds = " and ".join(
                    f"{{{word}}} is {ranges_text(span)}" for word, span in zip(words, spans, strict=True)
                )
                lacks = f"lacks {names(map(repr, missing[:_MOST_NAMES]))}{' and more' * (len(missing) > _MOST_NAMES)}"
                yield rule_path, SourceError(
                    f"{lacks}, but {bounds} in the rules", code="missing-tensor",
                    hint="if no tensor is lost, use another word in this rule",
                )  # fmt: skip


def _words(rule: Rule, part: int) -> list[str]:
    return [word for word in rule.parts[part].words if word[0] != "*"]


def _absent(
    rule: Rule, family: Family, part: int, bound: Mapping[str, int | str],
    present: tuple[Container[str], Container[str]], side: int,
) -> str:  # fmt: skip
    """Return a lost name, as in the source if known; "" if another rule has it."""
    makes_parts = side == rule.fused_side
    of_parts, of_fused = family.source_name, family.of
    if makes_parts:
        of_parts, of_fused = of_fused, of_parts
    name = of_parts(rule.parts[part].write(bound))
    if name in present[1 - rule.fused_side]:
        return ""
    if rule.by:
        return name
    fused = of_fused(rule.fused.write(bound))
    if fused in present[rule.fused_side]:
        return ""
    return fused if makes_parts else name


def layers_fault(weights: Iterable[str], config: Mapping[str, Any]) -> SourceError | None:
    """Return an error if a configuration has another number of layers, or None.

    The first number in a name counts layers. There may be several kinds of layers, such as an encoder's and a
    decoder's: the number of one kind must be as in the configuration. Additional layers, which predict more tokens, may
    be left out.

    Args:
        weights: names of weights.
        config: the numbers in the configuration.

    >>> print(layers_fault(["layers.0.w", "layers.1.w", "norm"], {"num_hidden_layers": 3}))
    has layers 0-1 of layers.*; num_hidden_layers in config.json is 3
    hint: give the whole source, or its own config.json
    """
    nested = config.get("text_config")
    fields = nested if "num_hidden_layers" not in config and isinstance(nested, Mapping) else config
    count, extra = (fields.get(key) for key in ("num_hidden_layers", "num_nextn_predict_layers"))
    layers: dict[str, set[int]] = {}
    names_of = Counter[str]()
    for name in weights:
        pieces = name.split(".")
        position = next((at for at, piece in enumerate(pieces) if piece.isdecimal()), None)
        if position is not None:
            prefix = "".join(f"{piece}." for piece in pieces[:position])
            layers.setdefault(prefix, set()).add(int(pieces[position]))
            names_of[prefix] += 1
    if not isinstance(count, int) or not layers:
        return None
    counts = {count, count + extra} if isinstance(extra, int) else {count}
    if any(len(numbers) == max(numbers) + 1 in counts for numbers in layers.values()):
        return None
    prefix = names_of.most_common(1)[0][0]
    numbers_text = ranges_text(sorted(layers[prefix]))
    return SourceError(
        f"has layers {numbers_text} of {prefix}*; num_hidden_layers in config.json is {count}", code="missing-layers",
        hint="give the whole source, or its own config.json",
    )  # fmt: skip
