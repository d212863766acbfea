"""Pictures of cuts in block characters, for terminals.

1. Tensors that are cut alike share one picture, whatever their shapes; indices are written if the shapes are equal.
2. The first two axes that are cut are drawn, rows downwards; other axes only at their first block.
3. A block is a shaded field with its ranks in it. On a terminal with colours it has the colour of its first rank, as in
   other pictures; the shades are there too, unseen, so that they are copied with the text.
"""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.plan.bands import is_grid
from reshard.errors import printable
from reshard.strategy.names import group_names
from reshard.view.svg import rank_colour
from reshard.view.text import count_text, shortened
from reshard.view.words import blocks_of, cut_words, extents_text, is_computed, ranks_words

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from reshard.core.layout.block import Block, Shape
    from reshard.core.model.checkpoint import Checkpoint, Tensor

_MOST_PICTURES = 12
_MOST_ROWS = 16
_MOST_NAMES = 8
_WIDTH = 80  # columns of a terminal of unknown width
_FIELD = 40  # columns of a picture of few blocks
_LOW = 2  # rows of blocks that have two lines each
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

    @property
    def ellipsis(self) -> str:
        """Return the sign for blocks that are not drawn."""
        return "..." if self.ascii else "…"


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
    nothing = "computed" if is_computed(checkpoint, first) else "no file"
    picture = block_picture(first.spec.shape, *blocks_of(checkpoint, first), canvas, indices=alike, nothing=nothing)
    return [*wrap(printable("  ".join(facts)), canvas.width), *(f"  {name}" for name in folded), *picture]


def block_picture(
    shape: Shape,
    blocks: Sequence[Block],
    ranks: Sequence[Sequence[int]],
    canvas: Canvas,
    *,
    indices: bool = True,
    nothing: str = "no file",
) -> list[str]:
    r"""Draw blocks and the ranks that hold them.

    Args:
        shape: the shape of the whole tensor.
        blocks: distinct blocks; no picture if they are not a grid.
        ranks: the ranks that hold each block.
        canvas: the abilities of the terminal.
        indices: write the indices of the blocks beside them.
        nothing: the label of a block that no rank holds.

    >>> from reshard.core.layout.layout import Layout
    >>> grid = Layout.of([2, 2], [1, 0]).grid((4, 6))
    >>> for line in block_picture(grid.shape, grid.blocks, grid.ranks, Canvas(30)):
    ...     print(line)
           0-2      3-5
      0-1  ░░ 0 ░░░░▓▓ 1 ▓▓▓▓
           ░░░░░░░░░▓▓▓▓▓▓▓▓▓
      2-3  ▓▓ 2 ▓▓▓▓░░ 3 ░░░░
           ▓▓▓▓▓▓▓▓▓░░░░░░░░░
    """
    if not blocks or not is_grid(shape, blocks):
        return [f"  {count_text(len(blocks), 'block')}, which do not form a grid"]
    cut = [axis for axis in range(len(shape)) if any(block.start[axis] for block in blocks)]
    down, right = ([*cut, None, None])[:2]
    if len(cut) == 1 and (cut[0] or len(shape) == 1):
        down, right = None, cut[0]
    holders = {}
    for block, held_by in zip(blocks, ranks, strict=True):
        if not any(start for axis, start in enumerate(block.start) if axis not in {down, right}):
            holders[_corner(block, down), _corner(block, right)] = held_by
    rows, columns = _spans(blocks, down), _spans(blocks, right)
    drawn = rows[:_MOST_ROWS]
    margin = 4 + max(len(title) for _, title in drawn) if indices and down is not None else 2
    room = max(canvas.width - margin - 4, 6)
    least = min(room, _FIELD) // len(columns)
    widths = []
    for column, title in columns:
        labels = [_label(holders.get((row, column), ()), nothing) for row, _ in drawn]
        widths.append(max(least, len(title) + 1 if indices else 0, 4 + max(map(len, labels))))
    while sum(widths) > room and len(widths) > 1:
        widths.pop()
    widths[0] = min(widths[0], room)
    ellipsis = f" {canvas.ellipsis}" if len(widths) < len(columns) else ""
    lines = []
    if indices and right is not None:
        titles = "".join(title.ljust(width) for width, (_, title) in zip(widths, columns, strict=False))
        lines.append(f"{' ' * margin}{titles}".rstrip())
    for number, (row, title) in enumerate(drawn):
        for line in range(2 if cut and len(rows) <= _LOW else 1):
            fields = [
                _field(
                    holders.get((row, column), ()),
                    width,
                    canvas,
                    canvas.shades[(number + n) % 2],
                    nothing,
                    labelled=not line,
                )
                for n, (width, (column, _)) in enumerate(zip(widths, columns, strict=False))
            ]
            head = f"  {title}" if indices and not line else ""
            lines.append(f"{head.ljust(margin)}{''.join(fields)}{ellipsis}")
    return [*lines, f"{' ' * margin}{canvas.ellipsis}"] if len(drawn) < len(rows) else lines


def _corner(block: Block, axis: int | None) -> int:
    return 0 if axis is None else block.start[axis]


def _spans(blocks: Sequence[Block], axis: int | None) -> list[tuple[int, str]]:
    """Return the start of each block along an axis, with the range of its indices as text."""
    if axis is None:
        return [(0, "")]
    spans = sorted({(block.start[axis], block.stop[axis]) for block in blocks})
    return [(start, f"{start}-{stop - 1}" if stop - start > 1 else f"{start}") for start, stop in spans]


def _label(ranks: Sequence[int], nothing: str) -> str:
    return ranks_words(ranks) if ranks else nothing


def _field(ranks: Sequence[int], width: int, canvas: Canvas, shade: str, nothing: str, *, labelled: bool) -> str:
    """Return one line of a block."""
    label = f" {shortened(_label(ranks, nothing), max(width - 4, 3))} "[: width - 2] if labelled else ""
    before, after = shade * 2, shade * (width - 2 - len(label))
    if canvas.paint is None or not ranks:
        return f"{before}{label}{after}"
    fill, ink = map(_terminal_colour, rank_colour(ranks[0]))
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
