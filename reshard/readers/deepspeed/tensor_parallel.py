"""Join the tensor-parallel parts of a DeepSpeed checkpoint.

The axis along which a tensor is cut is in no file, unless the training recorded patterns of names
(`universal_checkpoint_info`), as Megatron-DeepSpeed and DeepSpeed's AutoTP do: of replicated parameters, of parameters
that are cut by the columns of a matrix, and of two fused ones in each rank. The rest are cut along the first axis.
AutoTP also records the blocks themselves (`affine`). A user's rules win. States are cut as their weights.

Source: DeepSpeed 0.19.8 `checkpoint/ds_to_universal.py` (`merge_tp_slices`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import Option, SourceError, StrategyError, Text, names
from reshard.layout.axes import position, row_major
from reshard.layout.block import LONGEST_NAME, Block
from reshard.readers.deepspeed.affine import VERSION, affine_cut
from reshard.readers.deepspeed.pickled import optional_table, table, whole_number
from reshard.readers.listed import BlockList
from reshard.readers.pickles import Pairs, describe
from reshard.readers.torch_save.cuts import COLUMNS, GATE_AND_UP, ROWS, WHOLE, Cuts, cut_by
from reshard.source.checkpoint import TensorSpec
from reshard.source.reshape import laid

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from reshard.formats.entries import Extent
    from reshard.layout.block import Shape
    from reshard.readers.deepspeed.flat import Flat, WholeTensor
    from reshard.readers.deepspeed.model import ModelStates
    from reshard.readers.deepspeed.part import PartTensors
    from reshard.readers.torch_save.cuts import CutPiece, TensorCut
    from reshard.source.checkpoint import Tensor

PATTERNS = "universal_checkpoint_info"
"""The patterns of names in the model states."""

_KINDS = {
    "tp_replicated_parameter_patterns": WHOLE,
    "parameter_with_2_sub_params_cat_dim_0": GATE_AND_UP,
    "parameter_with_row_parallelism_patterns": ROWS,
}
_AFFINE = "affine_map"
_UNSUPPORTED = ("parameter_to_average_patterns", "parameter_with_sub_params", "autotp_unsupported_parameter_patterns")
_DIMENSIONS = "checkpoint_parallel_dimensions"
_SIMPLE = re.compile(r"\^?(?:[\w\-/ ]|\\?\.|(?:\\d|\[0-9\]|\.)[+*])*\$?")
_ESCAPED = re.compile(r"\^((?:\w|\\[^\w\n])*)\$")  # as `re.escape` writes a name
_MOST_REPEATS = 3  # of a pattern: the time to match it grows with the length of a name to this power
_MOST_PATTERNS = 1 << 8


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
        if isinstance(pattern, str) and len(pattern) <= LONGEST_NAME:
            if escaped := _ESCAPED.fullmatch(pattern):
                self._names.setdefault(re.sub(r"\\(.)", r"\1", escaped[1]), value)
                return
            repeats = len(re.findall(r"[+*]", pattern))
            if _SIMPLE.fullmatch(pattern) and repeats <= _MOST_REPEATS and len(self._others) < _MOST_PATTERNS:
                self._others.append((re.compile(pattern), value))
                return
        raise SourceError(
            f"{self._path} has the pattern {describe(pattern)}, which is not supported", code="bad-pattern"
        )

    def get(self, name: str) -> object:
        """Return the value of a name, or None."""
        if name in self._names:
            return self._names[name]
        return next((value for pattern, value in self._others if pattern.match(name)), None)


class Recorded:
    """How a training recorded that tensors are cut.

    Attributes:
        is_known: whether it recorded anything.
        unsupported: parameters that were cut in ways that are not supported.
        maps: the affine maps of parameters.
    """

    def __init__(self, model: ModelStates) -> None:
        """Read the patterns in model states; raise `SourceError` if they are not supported."""
        path = model.file.path
        values = optional_table(model.others, PATTERNS)
        self.is_known = bool(values)
        self._rules, self.unsupported, self.maps = NamePatterns(path), NamePatterns(path), NamePatterns(path)
        for kind, rule in _KINDS.items():
            for pattern in values.get(kind) or ():
                self._rules.add(pattern, rule)
        for kind in _UNSUPPORTED:
            for pattern in _patterns_of(values.get(kind)):
                self.unsupported.add(pattern, kind)
        affine = optional_table(values, _AFFINE)
        version = whole_number(affine.get("version"))
        if affine and version is not None and version <= VERSION:
            for pattern, value in optional_table(affine, "params").items():
                self.maps.add(pattern, value)

    def rule(self, name: str) -> str | None:
        """Return the rule of a weight by the patterns; None if nothing is recorded."""
        rule = self._rules.get(name)
        return rule if isinstance(rule, str) else COLUMNS if self.is_known else None


def _patterns_of(value: object) -> Iterator[object]:
    """Yield the patterns of a list, of the keys of a dict, or of a list of dicts with lists of patterns."""
    if isinstance(value, Pairs):
        yield from value[::2]
    for item in value if isinstance(value, list) and not isinstance(value, Pairs) else ():
        listed = table(item, "patterns").get("patterns") if isinstance(item, Pairs) else [item]
        yield from listed if isinstance(listed, list) else ()


class TensorCuts:
    """How the tensors of a checkpoint are cut: as the user says, else by affine maps, else by patterns.

    Args:
        model: the model states of the first part.
        rules: the user's rules, by name or glob.
        count: the number of parts.
        weights: the names of weights; states are cut as these.

    Raises:
        SourceError: neither the files nor the user say it, or the parts are of a pipeline.
        StrategyError: a rule matches no tensor.
    """

    def __init__(
        self, model: ModelStates, rules: Mapping[str, str] | None, count: int, weights: Collection[str]
    ) -> None:
        path = model.file.path
        stages = whole_number(optional_table(model.others, _DIMENSIONS).get("pp_degree"))
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
        self._cuts = Cuts(self._recorded.rule, rules, weights)
        self._affine: dict[tuple[str, tuple[Shape, ...]], TensorCut] = {}

    def of(self, weight: str, shapes: Sequence[Shape]) -> TensorCut:
        """Return how the parts of a weight make the whole.

        Raises:
            SourceError: it is cut in an unsupported way, or its parts do not fit together.
            StrategyError: a rule of the user does not fit the parts.
        """
        if not self._cuts.is_ruled(weight):
            if (affine := self._recorded.maps.get(weight)) is not None:
                key = weight, tuple(shapes)
                if key not in self._affine:  # states are cut as their weight
                    self._affine[key] = affine_cut(affine, shapes)
                return self._affine[key]
            if (kind := self._recorded.unsupported.get(weight)) is not None:
                raise SourceError(
                    Text(f"is cut as {kind} say, which is not supported; give ", Option("layout", weight, "RULE")),
                    code="unsupported-layout",
                )
        return self._cuts.of(weight, shapes)


class JoinedTensors(NamedTuple):
    """Tensors joined from parts.

    Attributes:
        tensors: the tensors.
        unreadable: names that cannot be joined, with the reason.
        rules: the rules of tensors that are cut.
    """

    tensors: dict[str, Tensor]
    unreadable: dict[str, str]
    rules: dict[str, str]


def join(parts: Sequence[PartTensors], cuts: TensorCuts, weights: Collection[str]) -> JoinedTensors:
    """Return whole tensors.

    Args:
        parts: the parts, in order.
        cuts: how tensors are cut.
        weights: the names of weights; `KIND.NAME` is a state of one, and cut like it.

    Raises:
        StrategyError: a rule of the user does not fit a tensor.
    """
    block_list = BlockList()
    result = JoinedTensors({}, {}, {})
    for name in dict.fromkeys(name for part in parts for name in part.located):
        state_of = name.partition(".")[2]
        is_state = name not in weights and state_of in weights
        try:
            locations = [part.located[name] for part in parts if name in part.located]
            if len(locations) < len(parts):
                missing = names([number for number, part in enumerate(parts) if name not in part.located])
                raise SourceError(f"has no part {missing} of {len(parts)}", code="missing-blocks")  # noqa: TRY301
            shapes = [location.shape for location in locations]
            is_number = is_state and not shapes[0]  # the step
            cut = cut_by(WHOLE, tuple(shapes)) if is_number else cuts.of(state_of if is_state else name, shapes)
            result.tensors[name] = _joined(name, locations, cut, block_list)
            if cut.is_cut:
                result.rules[name] = cut.rule
        except StrategyError:
            raise
        except SourceError as error:
            result.unreadable[name] = error.message
    return result


def _joined(name: str, locations: Sequence[Flat | WholeTensor], cut: TensorCut, block_list: BlockList) -> Tensor:
    """Return a whole tensor; raise `SourceError` if its parts do not fit together."""
    dtypes = {location.dtype.name: location.dtype for location in locations}
    if len(dtypes) > 1:
        raise SourceError(f"is {names(sorted(dtypes))} in different parts", code="mixed-dtypes")
    (dtype,) = dtypes.values()
    blocks = [
        moved
        for location, pieces in zip(locations, cut.pieces, strict=True)
        for moved in _moved(location, pieces, dtype.itemsize)
    ]
    tensor = block_list.tensor(TensorSpec(name, dtype, cut.shape), blocks)
    if isinstance(tensor, str):
        raise SourceError(tensor, code="missing-blocks")
    return tensor


def _moved(location: Flat | WholeTensor, pieces: Sequence[CutPiece], itemsize: int) -> Iterator[tuple[Block, Extent]]:
    """Yield the blocks of a part as blocks of the whole tensor."""
    for local, extent in location.pieces():
        for piece in pieces:
            inside = local & piece.inside if local.start else local
            if inside is None:
                continue
            strides = extent.strides or row_major(local.shape)
            begin = position(inside.start, local.start, strides)
            shift = [a - b for a, b in zip(piece.block.start, piece.inside.start, strict=True)]
            block = Block(
                tuple(a + b for a, b in zip(inside.start, shift, strict=True)),
                tuple(a + b for a, b in zip(inside.stop, shift, strict=True)),
            )
            whole = inside == local
            yield block, extent if whole else laid(extent, begin * itemsize, inside.shape, strides, itemsize)
