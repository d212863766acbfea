"""How a DeepSpeed checkpoint says that tensor-parallel parts are cut.

The axis along which a tensor is cut is in no file, unless the training recorded patterns of names
(`universal_checkpoint_info`), as Megatron-DeepSpeed and DeepSpeed's AutoTP do: of replicated parameters, of parameters
that are cut by the columns of a matrix, and of two fused ones in each rank. The rest are cut along the first axis.
AutoTP also records the blocks themselves (`affine`). A user's rules win. States are cut as their weights.

Source: DeepSpeed 0.19.8 `checkpoint/ds_to_universal.py` (`merge_tp_slices`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.core.layout.axes import row_major
from reshard.core.layout.block import LONGEST_NAME, Block, is_possible
from reshard.errors import Option, SourceError, Text
from reshard.formats.deepspeed.buffers import numbered
from reshard.formats.deepspeed.model import optional_table, table, whole_number
from reshard.kits.parts.cuts import COLUMNS, GATE_AND_UP, ROWS, WHOLE, CutPiece, Cuts, TensorCut, cut_by
from reshard.kits.torch.pickles import Pairs, describe, numbers

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from reshard.core.layout.block import Shape
    from reshard.formats.deepspeed.model import ModelStates

PATTERNS = "universal_checkpoint_info"
"""The patterns of names in the model states."""

_KINDS = {
    "tp_replicated_parameter_patterns": WHOLE,
    "parameter_with_2_sub_params_cat_dim_0": GATE_AND_UP,
    "parameter_with_row_parallelism_patterns": ROWS,
}
_UNSUPPORTED = ("parameter_to_average_patterns", "parameter_with_sub_params", "autotp_unsupported_parameter_patterns")
_SIMPLE = re.compile(r"\^?(?:[\w\-/ ]|\\?\.|(?:\\d|\[0-9\]|\.)[+*])*\$?")
_ESCAPED = re.compile(r"\^((?:\w|\\[^\w\n])*)\$")  # as `re.escape` writes a name
_MOST_REPEATS = 3  # of a pattern: the time to match it grows with the length of a name to this power
_MOST_PATTERNS = 1 << 8
_MAP = "an affine map"
_MAP_VERSIONS = {0, 1}
_MOST_PIECES = 1 << 10  # of a part


class NamePatterns:
    """Patterns for names of tensors, each with a value; the first one that matches counts.

    Patterns are regular expressions in a file, which could take for ever to match. So only exact names and simple ones
    are supported.
    """

    def __init__(self, path: str) -> None:
        """Begin without patterns; `path` is the file, for messages."""
        self._path = path
        self._names: dict[str, object] = {}
        self._others: list[tuple[re.Pattern[str], object]] = []

    def add(self, pattern: object, value: object) -> None:
        """Add a pattern; raise `SourceError` if it is not supported."""
        text = pattern if isinstance(pattern, str) and len(pattern) <= LONGEST_NAME else "("
        is_cheap = len(re.findall(r"[+*]", text)) <= _MOST_REPEATS and len(self._others) < _MOST_PATTERNS
        if escaped := _ESCAPED.fullmatch(text):
            self._names.setdefault(re.sub(r"\\(.)", r"\1", escaped[1]), value)
        elif is_cheap and _SIMPLE.fullmatch(text):
            self._others.append((re.compile(text), value))
        else:
            raise SourceError(
                f"{self._path} has the pattern {describe(pattern)}, which is not supported", code="bad-pattern"
            )

    def get(self, name: str) -> Any:
        """Return the value of a name, or None."""
        if name in self._names:
            return self._names[name]
        return next((value for pattern, value in self._others if pattern.match(name)), None)


class Recorded:
    """How a training recorded that tensors are cut; raise `SourceError` if its patterns are not supported.

    Attributes:
        is_known: whether it recorded anything.
        unsupported: parameters that were cut in ways that are not supported.
        maps: the affine maps of parameters.
    """

    def __init__(self, model: ModelStates) -> None:
        path = model.file.path
        values = optional_table(model.others, PATTERNS)
        self.is_known = bool(values)
        self._rules, self.unsupported, self.maps = NamePatterns(path), NamePatterns(path), NamePatterns(path)
        for kind, rule in _KINDS.items():
            for pattern in patterns_of(values.get(kind)):
                self._rules.add(pattern, rule)
        for kind in _UNSUPPORTED:
            for pattern in patterns_of(values.get(kind)):
                self.unsupported.add(pattern, kind)
        affine = optional_table(values, "affine_map")
        if whole_number(affine.get("version")) in _MAP_VERSIONS:
            for pattern, value in optional_table(affine, "params").items():
                self.maps.add(pattern, value)

    def rule(self, name: str) -> str | None:
        """Return the rule of a weight by the patterns; None if nothing is recorded."""
        return self._rules.get(name) or (COLUMNS if self.is_known else None)


def patterns_of(value: object) -> Iterator[object]:
    """Yield the patterns of a list, of the keys of a dict, or of a list of dicts with lists of patterns."""
    if isinstance(value, Pairs):
        yield from value[::2]
    elif isinstance(value, list):
        for item in value:
            listed = table(item, "patterns").get("patterns") if isinstance(item, Pairs) else [item]
            yield from listed if isinstance(listed, list) else ()


class TensorCuts:
    """How the tensors of a checkpoint are cut: as the user says, else by affine maps, else by patterns.

    Model states are of the first part, and `KIND.NAME` is a state of a weight, and cut like it.

    Raises:
        SourceError: neither the files nor the user say it, or the parts are of a pipeline.
        StrategyError: a rule matches no tensor.
    """

    def __init__(
        self, model: ModelStates, rules: Mapping[str, str] | None, count: int, weights: Collection[str]
    ) -> None:
        path = model.file.path
        stages = whole_number(optional_table(model.others, "checkpoint_parallel_dimensions").get("pp_degree"))
        if stages is not None and stages > 1:
            raise SourceError(
                f"{path} is of a training with {stages} pipeline stages, which is not supported",
                code="unsupported-layout",
            )
        self._recorded = Recorded(model)
        if not self._recorded.is_known and not rules:
            raise SourceError(
                f"{path} is of {count} tensor-parallel parts, and does not say how tensors are cut", code="no-layout",
                facts=[f"its model states have no {PATTERNS}"],
                hint=Text("give ", Option("layout", "NAME", "RULE"), ", or ", Option("strategy")),
            )  # fmt: skip
        self._weights = weights
        self._cuts = Cuts(self._recorded.rule, rules, weights)

    def of(self, name: str, shapes: Sequence[Shape]) -> TensorCut:
        """See `PartCuts`."""
        weight = self._weight(name)
        if weight != name and not shapes[0]:  # the step
            return cut_by(WHOLE, tuple(shapes))
        if not self._cuts.is_ruled(weight):
            if (affine := self._recorded.maps.get(weight)) is not None:
                return affine_cut(affine, shapes)
            if (kind := self._recorded.unsupported.get(weight)) is not None:
                raise SourceError(
                    Text(f"is cut as {kind} say, which is not supported; give ", Option("layout", weight, "RULE")),
                    code="unsupported-layout",
                )
        return self._cuts.of(weight, shapes)

    def _weight(self, name: str) -> str:
        """Return the name of the weight that a tensor is a state of, or is itself."""
        state_of = name.partition(".")[2]
        return state_of if name not in self._weights and state_of in self._weights else name


def affine_cut(value: object, shapes: Sequence[Shape]) -> TensorCut:
    """Return how parts make a whole parameter by its pickled map; raise `SourceError` if it does not describe boxes."""
    content = table(value, _MAP)
    whole = numbers(content.get("logical_shape"))
    parts = [table(part, _MAP) for part in numbered(content.get("ranks"), _MAP)]
    if [numbers(part.get("shard_shape")) for part in parts] != [*shapes] or not is_possible(whole):
        raise SourceError("has an affine map that is of other parts", code="wrong-shape")
    pieces = []
    for part, shape in zip(parts, shapes, strict=True):
        listed = part.get("pieces")
        if not isinstance(listed, list) or not 0 < len(listed) <= _MOST_PIECES:
            raise SourceError(f"has {describe(listed)} for the pieces of a part", code="unsupported-layout")
        pieces.append(tuple(_piece(table(piece, _MAP), whole, shape) for piece in listed))
    return TensorCut(whole, "affine map", tuple(pieces))


def _piece(piece: Mapping[str, Any], whole: Shape, part: Shape) -> CutPiece:
    if piece.get("scale", 1.0) != 1:
        raise SourceError(f"has a part that is scaled by {describe(piece['scale'])}", code="unsupported-layout")
    extents = numbers(piece.get("shape"))
    return CutPiece(_box(piece.get("source"), extents, whole), _box(piece.get("dest"), extents, part))


def _box(location: Any, extents: Shape, shape: Shape) -> Block:
    """Return the box of an offset and strides; raise `SourceError` if it is not one."""
    try:
        offset, strides = location
        start = [int(at) for at in np.unravel_index(offset, shape)]
        stop = [at + extent for at, extent in zip(start, extents, strict=True)]
        steps = zip(strides, row_major(shape), extents, strict=True)
        is_box = all(step == axis or extent == 1 for step, axis, extent in steps)
    except (ArithmeticError, TypeError, ValueError):
        is_box = False
    if not is_box or any(end > extent for end, extent in zip(stop, shape, strict=True)):
        raise SourceError("has a part that is not made of boxes", code="unsupported-layout")
    return Block(tuple(start), tuple(stop))
