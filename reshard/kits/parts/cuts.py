"""How tensor-parallel parts make whole tensors: by a table of names, or by the user's rules in its place.

Programs that train with tensor parallelism save the parts of each rank, and often not the axis along which they cut a
tensor. The axis follows from the layer, so from the name. A rule is a text, as in the argument `layout` of
`reshard.open`, with the parts instead of ranks:

* `split:0`: columns of a linear layer (in PyTorch the first axis), rows of an embedding;
* `split:1`: rows of a linear layer;
* `whole`: each part is the whole tensor;
* `gate-and-up`: each part is its gate and its up projection one after the other, and so is the whole tensor;
* `copy`: as `whole`, but the values may differ.

Sources: Megatron-LM `megatron/core/tensor_parallel/layers.py`, Meta's `llama/model.py`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.layout.block import Block, is_possible, shape_text
from reshard.core.layout.layout import Layout
from reshard.errors import LayoutError, Option, SourceError, StrategyError, Text
from reshard.strategy.files import read_strategy
from reshard.strategy.names import check_layouts, matching
from reshard.strategy.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.listing import OpenOptions

COLUMNS, ROWS, WHOLE = "split:0", "split:1", "whole"

GATE_AND_UP = "gate-and-up"
"""The rule of a layer of two fused ones, which are cut each by itself."""

COPY = "copy"
"""The rule of a tensor whose value differs by part."""

LLAMA: Mapping[str, tuple[str, ...]] = {
    COLUMNS: (
        ".attention.wq.weight", ".attention.wk.weight", ".attention.wv.weight", ".feed_forward.w1.weight",
        ".feed_forward.w3.weight", ".output.weight",
    ),
    ROWS: (".attention.wo.weight", ".feed_forward.w2.weight"),
    WHOLE: ("norm.weight", ".rope.freqs"),
}  # fmt: skip
"""Endings of names in Meta's files by rule. The embedding is cut along another axis since Llama 3."""


def rule_in(table: Mapping[str, tuple[str, ...]], name: str) -> str | None:
    """Return the rule of a name in a table of endings, or None.

    >>> rule_in(LLAMA, "output.weight"), rule_in(LLAMA, "input.weight")
    ('split:0', None)
    """
    return next((rule for rule, endings in table.items() if f".{name}".endswith(endings)), None)


class CutPiece(NamedTuple):
    """A block of a part: its box in the whole tensor, and its box in the part."""

    block: Block
    inside: Block


class TensorCut(NamedTuple):
    """How parts make a whole tensor.

    Attributes:
        shape: the shape of the whole tensor.
        rule: the rule.
        pieces: the blocks of each part. Parts with the same block are replicas.
    """

    shape: Shape
    rule: str
    pieces: tuple[tuple[CutPiece, ...], ...]


class Cuts:
    """The cuts of all tensors of a checkpoint.

    Args:
        table: returns the rule of a name; None if it is unknown.
        rules: the user's rules by name or glob, which win; the last one that matches counts.
        names: the names of all tensors.

    Raises:
        StrategyError: a rule of the user matches no tensor, or later ones take all that it matches.
    """

    def __init__(
        self, table: Callable[[str], str | None], rules: Mapping[str, str] | None, names: Collection[str]
    ) -> None:
        self._table = table
        self._ruled: dict[str, tuple[str, str]] = {}
        check_layouts(rules or {}, names)
        for pattern, rule in (rules or {}).items():
            self._ruled.update(dict.fromkeys(matching(pattern, names), (pattern, rule)))

    def is_ruled(self, name: str) -> bool:
        """Return whether the user says how a tensor is cut."""
        return name in self._ruled

    def of(self, name: str, shapes: Sequence[Shape]) -> TensorCut:
        """Return how parts of these shapes make a tensor.

        Raises:
            SourceError: no rule is known and there are several parts, or they do not fit together.
            StrategyError: a rule of the user does not fit the parts.
        """
        pattern, rule = self._ruled.get(name, ("", ""))
        if pattern and (shapes[0] or name == pattern or rule == COPY):  # a glob that cuts does not apply to scalars
            try:
                return cut_by(rule, tuple(shapes))
            except SourceError as error:
                about = error.about(Option("layout", pattern, rule), f": tensor {name!r}")
                raise StrategyError(about.message, code=error.code, facts=error.facts, hint=error.hint) from None
        table_rule = self._table(name)
        if table_rule is None and len(shapes) > 1 and any(shapes):
            raise SourceError(
                Text("is in parts, and nothing says how it is cut; give ", Option("layout", "NAME", "RULE")),
                code="no-layout",
            )
        return cut_by(table_rule or WHOLE, tuple(shapes))


@lru_cache(maxsize=1 << 10)  # layers are alike
def cut_by(rule: str, shapes: tuple[Shape, ...]) -> TensorCut:
    """Return how parts of these shapes make a whole tensor by a rule.

    Raises:
        SourceError: it is not a rule for such parts, or their shapes differ.

    >>> [str(piece.block) for part in cut_by("gate-and-up", ((4, 3), (4, 3))).pieces for piece in part]
    ['[0:2, 0:3]', '[4:6, 0:3]', '[2:4, 0:3]', '[6:8, 0:3]']
    """
    first, count = shapes[0], len(shapes)
    if other := next((part for part in range(count) if shapes[part] != first), 0):
        raise SourceError(
            f"has parts of shape {shape_text(first)} and {shape_text(shapes[other])} (parts 0 and {other})",
            code="ranks-disagree",
        )
    if rule == GATE_AND_UP:
        return _gate_and_up(first, count)
    layout = Layout.parse(WHOLE if rule == COPY else rule, len(first), count)
    if layout.devices != count:
        raise LayoutError(f"rule {rule!r} is for {layout.devices} parts; the files have {count}", code="devices-differ")
    shape = layout.full_shape(first)
    grid = layout.grid(shape)
    blocks = {part: block for block, parts in zip(grid.blocks, grid.ranks, strict=True) for part in parts}
    return TensorCut(shape, rule, tuple((CutPiece(blocks[part], Block.whole(first)),) for part in range(count)))


def _gate_and_up(part: Shape, count: int) -> TensorCut:
    """Return how parts make the whole tensor if each is [gate; up]."""
    if not part or part[0] % 2:
        raise LayoutError(
            f"a part of shape {shape_text(part)} is not a gate and an up projection", code="not-divisible"
        )
    rows, rest = part[0] // 2, part[1:]
    shape = (part[0] * count, *rest)
    if not is_possible(shape):
        raise LayoutError(f"{count} parts of {shape_text(part)} make no possible array", code="bad-shape")

    def block(begin: int) -> Block:
        return Block((begin, *(0 for _ in rest)), (begin + rows, *rest))

    pieces = (
        tuple(CutPiece(block((half * count + number) * rows), block(half * rows)) for half in (0, 1))
        for number in range(count)
    )
    return TensorCut(shape, GATE_AND_UP, tuple(pieces))


def rules_over_parts(options: OpenOptions) -> Mapping[str, str] | None:
    """Return how the user says that tensor-parallel parts are cut, as rules over the parts; None for nothing.

    Layouts win over the strategy, whose devices are the parts.

    Raises:
        StrategyError: the strategy cannot be read, or a layout cannot be written as a rule.
    """
    strategy, layouts = options.strategy, options.layouts
    if strategy is None:
        return dict(layouts) if layouts else None
    if not isinstance(strategy, Strategy):
        strategy = read_strategy(strategy)
    rules = {}
    for name, (placed, *_) in strategy.tensors.items():
        rules[name] = placed.layout.rule
        if placed.expanded or placed.layout.param_split_shape or placed.layout.field:
            raise StrategyError(
                f"the layout of {name!r} is uneven, interleaved or of an unknown shape", code="unsupported-layout"
            )
    return {**rules, **layouts}
