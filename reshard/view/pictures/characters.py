"""The pen that draws blocks in block characters, for terminals.

1. Tensors that are cut alike share one picture, whatever their shapes; indices are written if the shapes are equal.
2. A row or column of blocks has the same room, however many indices it has; other axes are drawn at their first block.
3. A block is a shaded field with its ranks in it. On a terminal with colours it has the colour of its first rank, as in
   other pictures; the shades are there too, unseen, so that they are copied with the text.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from textwrap import wrap
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import printable
from reshard.strategy.names import group_names
from reshard.view.pictures.blocks import DrawnSide, Frame, panels_of, tensor_side
from reshard.view.text import count_text, shortened
from reshard.view.words import blocks_of, cut_words, extents_text, ranks_words

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from reshard.core.layout.block import Block, Shape
    from reshard.core.model.checkpoint import Checkpoint, Tensor
    from reshard.view.pictures.blocks import Cell

_MOST_PICTURES = 12
_MOST_ROWS = 16
_MOST_NAMES = 8
_WIDTH = 80  # columns of a terminal of unknown width
_FIELD = 40  # columns of a picture of few blocks
_LOW = 2  # rows of blocks that have two lines each
_SHORT = 9  # ranks; more than these need not be all written
_LEVELS = (0, 95, 135, 175, 215, 255)  # of red, green and blue in the 256 colours of a terminal


class Canvas(NamedTuple):
    """The abilities of a terminal.

    Attributes:
        width: its columns.
        paint: colours a text, given the numbers of the background and the text among 256 colours; None without colours.
        ascii: only ASCII can be written.
    """

    width: int = _WIDTH
    paint: Callable[[str, int, int], str] | None = None
    ascii: bool = False

    @property
    def shades(self) -> str:
        """Return the fills of neighbouring blocks."""
        return ".#" if self.ascii else "░▓"


def picture_text(checkpoint: Checkpoint, canvas: Canvas) -> str:
    """Draw the cuts of a checkpoint's tensors, each with the names of its tensors, folded."""
    groups: dict[Hashable, list[Tensor]] = {}
    keys: dict[Hashable, Hashable] = {}
    for tensor in checkpoint.tensors.values():
        words, sharding = cut_words(checkpoint, tensor), tensor.sharding
        if (sharding, words) not in keys:
            blocks, ranks = blocks_of(checkpoint, tensor)
            keys[sharding, words] = words, _relative(tensor.spec.shape, blocks), ranks
        groups.setdefault(keys[sharding, words], []).append(tensor)
    parts = ["\n".join(_part(checkpoint, group, canvas)) for group in [*groups.values()][:_MOST_PICTURES]]
    if len(groups) > _MOST_PICTURES:
        rest = sum(map(len, [*groups.values()][_MOST_PICTURES:]))
        parts.append(f"and {count_text(rest, 'more tensor')}, which are cut in other ways")
    text = "\n\n".join(parts)
    return text.replace("×", "x").encode("ascii", "backslashreplace").decode() if canvas.ascii else text


def _relative(shape: Shape, blocks: Sequence[Block]) -> tuple[tuple[float, ...], ...]:
    """Return the first corner of each block as shares of the whole tensor; () if it is not cut."""
    if len(blocks) == 1:
        return ()
    return tuple(
        tuple(start / extent if extent else 0.0 for start, extent in zip(block.start, shape, strict=True))
        for block in blocks
    )


def _part(checkpoint: Checkpoint, tensors: Sequence[Tensor], canvas: Canvas) -> list[str]:
    """Return the lines of one picture, with its title and its names."""
    first = tensors[0]
    names = [printable(name) for name, _, _ in group_names((tensor.spec.name, None) for tensor in tensors)]
    folded = [shortened(name, canvas.width - 2) for name in names[:_MOST_NAMES]]
    facts = [cut_words(checkpoint, first)]
    alike = len({tensor.spec.shape for tensor in tensors}) == 1
    if alike:
        facts.insert(0, extents_text(first))
    if len(tensors) == 1:
        facts = [folded.pop(), facts[0], first.spec.dtype.name, *facts[1:]]
    if len(names) > _MOST_NAMES:
        folded.append(f"and {len(names) - _MOST_NAMES:,} more")
    picture = block_picture(tensor_side(checkpoint, first), canvas, indices=alike)
    return [*wrap(printable("  ".join(facts)), canvas.width), *(f"  {name}" for name in folded), *picture]


def block_picture(side: DrawnSide, canvas: Canvas, *, indices: bool = True) -> list[str]:
    r"""Draw blocks and the ranks that hold them; of axes beyond two the first slice only.

    Args:
        side: the blocks; no picture if they are no grid, and too many.
        canvas: the abilities of the terminal.
        indices: write the indices of the blocks beside them.

    >>> from reshard.core.layout.layout import Layout
    >>> grid = Layout.of([2, 2], [1, 0]).grid((4, 6))
    >>> for line in block_picture(DrawnSide("", grid.shape, grid.blocks, grid.ranks), Canvas(30)):
    ...     print(line)
           0-2       3-5
      0-1  ░░ 0 ░░░░░▓▓ 1 ▓▓▓▓▓
           ░░░░░░░░░░▓▓▓▓▓▓▓▓▓▓
      2-3  ▓▓ 2 ▓▓▓▓▓░░ 3 ░░░░░
           ▓▓▓▓▓▓▓▓▓▓░░░░░░░░░░
    """
    frame = Frame.of([side])
    digits = max(map(len, map(str, side.shape)), default=1) if indices else 0
    room = max(canvas.width - 8 - 2 * digits, 6)
    least = 4 + max([2 * digits - 2, *(len(ranks_words(ranks)) for ranks in side.ranks if len(ranks) < _SHORT)])
    size = replace(frame, width=room, height=float(_MOST_ROWS * least))
    slice_, cells = panels_of(side, size, len(side.blocks), least)[0]
    rows, columns = _edges(cells, frame.rows), _edges(cells, frame.columns)
    if len(rows) > _MOST_ROWS + 1 or len(columns) - 1 > max(room // least, 1):
        return [f"  {count_text(len(side.blocks), 'block')}, which do not form a grid"]
    wide = min(max(_FIELD // (len(columns) - 1), least), room // (len(columns) - 1))
    tall = 2 if len(side.blocks) > 1 and len(rows) - 1 <= _LOW else 1
    fields = _fields(frame, cells, rows, columns, wide, tall, canvas)
    if indices and len(rows) > 2:
        heads = [head for span in _spans(rows) for head in (f"  {span}", *[""] * (tall - 1))]
        margin = max(map(len, heads)) + 2
    else:
        heads, margin = [""] * len(fields), 2
    lines = [f"{head.ljust(margin)}{line}" for head, line in zip(heads, fields, strict=True)]
    if indices and len(columns) > 2:
        lines.insert(0, (" " * margin + "".join(span.ljust(wide) for span in _spans(columns))).rstrip())
    return [*lines, f"  {slice_}"] if slice_ else lines


def _fields(
    frame: Frame,
    cells: Sequence[Cell],
    rows: Sequence[int],
    columns: Sequence[int],
    wide: int,
    tall: int,
    canvas: Canvas,
) -> list[str]:
    """Return `tall` lines for each row: the fields of its cells from left to right, neighbours in other shades."""
    lines = []
    for top in rows[:-1]:
        inside = [cell for cell in cells if _begins(cell, frame.rows) <= top < _ends(cell, frame.rows)]
        inside.sort(key=lambda cell: _begins(cell, frame.columns))
        for line in range(tall):
            fields = []
            for cell in inside:
                begin = _begins(cell, frame.rows)
                first, last = columns.index(_begins(cell, frame.columns)), columns.index(_ends(cell, frame.columns))
                shade = canvas.shades[(rows.index(begin) + first) % 2]
                is_labelled = begin == top and not line
                fields.append(_field(cell, wide * (last - first), canvas, shade, labelled=is_labelled))
            lines.append("".join(fields))
    return lines


def _begins(cell: Cell, axis: int | None) -> int:
    return 0 if axis is None else cell.block.start[axis]


def _ends(cell: Cell, axis: int | None) -> int:
    return 1 if axis is None else max(cell.block.stop[axis], 1)


def _edges(cells: Sequence[Cell], axis: int | None) -> list[int]:
    return sorted({edge for cell in cells for edge in (_begins(cell, axis), _ends(cell, axis))})


def _spans(edges: Sequence[int]) -> list[str]:
    """Return the ranges of indices between edges as text."""
    return [f"{start}-{stop - 1}" if stop - start > 1 else f"{start}" for start, stop in pairwise(edges)]


def _field(cell: Cell, width: int, canvas: Canvas, shade: str, *, labelled: bool) -> str:
    """Return one line of a block."""
    ranks = cell.ranks
    choices = [ranks_words(ranks), f"{ranks[0]} +{len(ranks) - 1}", f"{ranks[0]}+"] if ranks else [cell.holder]
    caption = next((text for text in choices if len(text) <= width - 4), "") if labelled else ""
    label = f" {caption} " if caption else ""
    before, after = shade * 2, shade * (width - 2 - len(label))
    if canvas.paint is None or not ranks:
        return f"{before}{label}{after}"
    fill, ink = map(_terminal_colour, cell.colours)
    painted = [canvas.paint(before, fill, fill), canvas.paint(label, fill, ink), canvas.paint(after, fill, fill)]
    return "".join(painted if label else [*painted[:1], *painted[2:]])


def _terminal_colour(colour: str) -> int:
    """Return the nearest of the 216 colours of a terminal's cube.

    >>> _terminal_colour("#77aadd"), _terminal_colour("#000000"), _terminal_colour("#ffffff")
    (110, 16, 231)
    """
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    red, green, blue = (min(range(6), key=lambda level: abs(_LEVELS[level] - part)) for part in parts)
    return 16 + 36 * red + 6 * green + blue
