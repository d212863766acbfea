"""Show the effect of rules: the rows of fused tensors by part, and the tensors of each rule."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.layout.block import shape_text
from reshard.errors import UsageError, names, printable
from reshard.strategy.names import no_match

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.rules.derive import Derived, Fused

_MOST_BANDS = 24


class RowBand(NamedTuple):
    """Rows of a fused tensor along the axis that is cut, and their part.

    Attributes:
        start, stop: the rows.
        part: the number of their part; -1 for padding.
        first: the first of these rows in the part, in which they are consecutive.
        step: the step between the rows.
    """

    start: int
    stop: int
    part: int
    first: int
    step: int = 1

    @property
    def rows(self) -> range:
        """Return the rows of the fused tensor."""
        return range(self.start, self.stop, self.step)


@dataclass(frozen=True, slots=True)
class Fusion:
    """The composition of a fused tensor: a table of its rows.

    Attributes:
        name: the name of the fused tensor.
        shape: its shape.
        dtype: the name of its dtype.
        verb: the verb of the rule.
        parts: the names of its parts, with words in braces for numbers that are axes.
        shapes: the shape of each part.
        axis: the axis that is cut.
        rows: the number of rows along it.
        bands: its rows, in ascending order.
        transposed: the last two dimensions of the parts are swapped.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    verb: str
    parts: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    axis: int
    rows: int
    bands: tuple[RowBand, ...]
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
            source = f"{printable(self.parts[band.part])} {band.first}-{band.first + len(band.rows) - 1}"
            step = f" in steps of {band.step}" if band.step > 1 else ""
            lines.append(f"  {f'{first}-{last}':<{width}}{step}  {source if band.part >= 0 else 'padding'}")
        if len(self.bands) > _MOST_BANDS:
            lines.append(f"  and so on: {len(self.bands)} runs of rows in all")
        return "\n".join(lines)


def fusion_of(derived: Derived, name: str) -> Fusion:
    """Return the composition of a fused tensor.

    Args:
        derived: the result of applying rules to a checkpoint.
        name: the name of the fused tensor, or of a part of it.

    Raises:
        UsageError: the rules neither fuse nor split such a tensor.
    """
    tensors = derived.fused
    fused = tensors.get(name) or next((tensor for tensor in tensors.values() if name in tensor.parts), None)
    if fused is None:
        raise UsageError(
            f"the rules neither fuse nor split {name!r} in {derived.checkpoint.root}", code="no-match",
            facts=[f"{name!r} {no_match(name, tensors)}"],
        )  # fmt: skip
    layout, rule = fused.layout, fused.use.rule
    bands = list(_bands(fused))
    axis = rule.axis if rule.axis >= 0 else rule.axis + len(layout.axes)
    before = 0 if layout.flat or axis < layout.at else len(layout.front)
    rows = layout.shape[axis + before] if layout.axes else 1
    rows //= prod(layout.front) if layout.flat and axis == 0 else 1
    return Fusion(
        fused.name, layout.shape, fused.dtype, rule.verb,
        tuple(fused.use.family.of(pattern.text) for pattern in rule.parts),
        tuple(part.shape for part in layout.parts), axis, rows, tuple(bands), rule.transposed,
    )  # fmt: skip


def _bands(fused: Fused) -> Iterator[RowBand]:
    """Yield the rows of a fused tensor in ascending order."""
    layout = fused.layout
    axis = fused.use.rule.axis % max(len(layout.axes), 1)
    if not layout.axes or (len(layout.parts) == 1 and layout.axes[axis] == 1 and not layout.padding):
        return
    at, count = sum(layout.axes[:axis]), layout.axes[axis]
    extents = layout.space[at : at + count]
    if count == 3:
        groups, within, pieces = extents
        for number in range(groups * pieces):
            start = number // pieces * within * pieces
            yield RowBand(start + number % pieces, start + within * pieces, 0, number * within, pieces)
        return
    groups = extents[0] if count > 1 else 1
    spans = [(part.region.start[at + count - 1], part.region.stop[at + count - 1]) for part in layout.parts]
    if groups > 1 and len(spans) == extents[-1]:  # row by row
        yield from (
            RowBand(start, groups * len(spans), number, 0, len(spans)) for number, (start, _) in enumerate(spans)
        )
        return
    for group in range(groups):
        for number, (start, stop) in enumerate(spans):
            yield RowBand(group * extents[-1] + start, group * extents[-1] + stop, number, group * (stop - start))
        if layout.padding:
            yield RowBand(layout.padding.start[at], layout.padding.stop[at], -1, 0)


def table(derived: Derived) -> list[tuple[str, str, int, str, int, str]]:
    """Return a table row for each rule that was applied.

    A row has the rule's path in the file and its verb, then the number and names of its source tensors, then the number
    and names of the resulting tensors.
    """
    return [
        (
            use.rule.key_path.removeprefix("$."),
            use.rule.verb,
            len(use.sources),
            use.family.of(names((pattern.text for pattern in use.rule.side(derived.side)), most=1)),
            len(use.targets),
            use.family.of(names((pattern.text for pattern in use.rule.side(1 - derived.side)), most=1)),
        )
        for use in derived.uses
    ]
