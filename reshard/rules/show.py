"""What rules do, for eyes: which rows of a fused tensor are which rows of which part, and what each rule was about."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import UsageError, names, printable
from reshard.layout.block import shape_text
from reshard.strategy.names import no_match
from reshard.upward import upward

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.rules.derive import Derived, Fused

_MOST_BANDS = 24


class Band(NamedTuple):
    """Rows of a fused tensor along the axis that is cut, and what they are.

    Attributes:
        start, stop: the rows.
        part: the number of the part that has them; -1 of padding.
        first: the first of the part's rows that they are, one after the other.
        step: how many rows it is from one of them to the next.
    """

    start: int
    stop: int
    part: int
    first: int
    step: int = 1

    @property
    def rows(self) -> range:
        """Its rows."""
        return range(self.start, self.stop, self.step)


@dataclass(frozen=True, slots=True)
class Fusion:
    """How one fused tensor is made of its parts: a table of its rows, drawn in a notebook.

    Attributes:
        name: of the fused tensor.
        shape: its shape.
        dtype: the name of its dtype.
        verb: of the rule.
        parts: the names of its parts, with words in braces for numbers that are axes.
        shapes: the shape of each.
        axis: the axis that is cut.
        rows: how many there are along it.
        bands: its rows, from the first on.
        transposed: the parts have their last two dimensions the other way round.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    verb: str
    parts: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    axis: int
    rows: int
    bands: tuple[Band, ...]
    transposed: bool

    def __str__(self) -> str:
        lines = [f"{printable(self.name)} {shape_text(self.shape)} {self.dtype}: {self.verb} of"]
        lines += [
            f"  {printable(part)} {shape_text(shape)}" for part, shape in zip(self.parts, self.shapes, strict=True)
        ]
        if not self.bands:
            return "\n".join(lines)
        lines.append(f"its {self.rows} rows along axis {self.axis}{', of parts transposed' * self.transposed}:")
        width = len(f"{self.rows}-{self.rows}")
        for band in self.bands[:_MOST_BANDS]:
            first, last = band.rows[0], band.rows[-1]
            own = f"{printable(self.parts[band.part])} {band.first}-{band.first + len(band.rows) - 1}"
            step = f" in steps of {band.step}" if band.step > 1 else ""
            lines.append(f"  {f'{first}-{last}':<{width}}{step}  {own if band.part >= 0 else 'padding'}")
        if len(self.bands) > _MOST_BANDS:
            lines.append(f"  and so on: {len(self.bands)} runs of rows in all")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return str(upward("html")(self))


def shown(derived: Derived, name: str) -> Fusion:
    """Return how a fused tensor is made of its parts, or is split into them.

    Args:
        derived: what rules made of a checkpoint.
        name: of the fused tensor, or of a part of it.

    Raises:
        UsageError: the rules neither fuse nor split such a tensor.
    """
    every = derived.fused
    fused = every.get(name) or next((tensor for tensor in every.values() if name in tensor.parts), None)
    if fused is None:
        raise UsageError(
            f"the rules neither fuse nor split {name!r} in {derived.checkpoint.root}", code="no-match",
            facts=[f"{name!r} {no_match(name, every)}"],
        )  # fmt: skip
    return _fusion(fused)


def _fusion(made: Fused) -> Fusion:
    equation, rule = made.equation, made.use.rule
    bands = list(_bands(made))
    axis = rule.axis if rule.axis >= 0 else rule.axis + len(equation.axes)
    rows = equation.shape[axis + (0 if equation.flat else len(equation.front))] if equation.axes else 1
    rows //= prod(equation.front) if equation.flat and axis == 0 else 1
    return Fusion(
        made.name, equation.shape, made.dtype, rule.verb,
        tuple(made.use.family.of(pattern.text) for pattern in rule.parts), tuple(part.shape for part in equation.parts),
        axis, rows, tuple(bands), rule.transposed,
    )  # fmt: skip


def _axis(made: Fused) -> int:
    return made.use.rule.axis % max(len(made.equation.axes), 1)


def _bands(made: Fused) -> Iterator[Band]:
    """Yield the rows of a fused tensor, from the first on."""
    equation, axis = made.equation, _axis(made)
    if not equation.axes or (len(equation.parts) == 1 and equation.axes[axis] == 1 and not equation.padding):
        return
    at, count = sum(equation.axes[:axis]), equation.axes[axis]
    extents = equation.space[at : at + count]
    if count == 3:
        groups, within, pieces = extents
        for number in range(groups * pieces):
            start = number // pieces * within * pieces
            yield Band(start + number % pieces, start + within * pieces, 0, number * within, pieces)
        return
    groups = extents[0] if count > 1 else 1
    spans = [(part.region.start[at + count - 1], part.region.stop[at + count - 1]) for part in equation.parts]
    if groups > 1 and len(spans) == extents[-1]:  # row by row
        yield from (Band(start, groups * len(spans), number, 0, len(spans)) for number, (start, _) in enumerate(spans))
        return
    for group in range(groups):
        for number, (start, stop) in enumerate(spans):
            yield Band(group * extents[-1] + start, group * extents[-1] + stop, number, group * (stop - start))
        if equation.padding:
            yield Band(equation.padding.start[at], equation.padding.stop[at], -1, 0)


def table(derived: Derived) -> list[tuple[str, str, int, str, int, str]]:
    """Return a row for each rule that was about something: its place, verb, how many tensors it took, and made of."""
    return [
        (
            use.rule.where.removeprefix("$."),
            use.rule.verb,
            len(use.sources),
            use.family.of(names((pattern.text for pattern in use.rule.side(derived.side)), most=1)),
            len(use.targets),
            use.family.of(names((pattern.text for pattern in use.rule.side(1 - derived.side)), most=1)),
        )
        for use in derived.uses
    ]
