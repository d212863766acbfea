"""Join the tensor-parallel parts of a DeepSpeed checkpoint.

The axis along which a tensor is cut is in no file, unless the training recorded patterns of names
(`universal_checkpoint_info`), as Megatron-DeepSpeed and DeepSpeed's AutoTP do: replicated parameters, those that are
cut by columns of their layer, and those of two parts in each rank. All others are cut along the first axis. A user's
rules win. States are cut as their weights.

Source: DeepSpeed 0.19.8 `checkpoint/ds_to_universal.py` (`merge_tp_slices`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.errors import Option, SourceError, StrategyError, Text, names
from reshard.layout.axes import position, row_major
from reshard.readers.deepspeed.values import optional_table, whole_number
from reshard.readers.listed import BlockList
from reshard.readers.torch_save.cuts import COLUMNS, GATE_AND_UP, ROWS, WHOLE, Cuts, cut_by
from reshard.source.checkpoint import TensorSpec
from reshard.source.reshape import laid

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from reshard.formats.entries import Extent
    from reshard.layout.block import Block
    from reshard.readers.deepspeed.flat import Flat, Stored
    from reshard.readers.deepspeed.model import ModelStates
    from reshard.readers.deepspeed.part import Part
    from reshard.readers.torch_save.cuts import Cut, Piece
    from reshard.source.checkpoint import Tensor

PATTERNS = "universal_checkpoint_info"
"""The patterns of names in the model states."""

_KINDS = {
    "tp_replicated_parameter_patterns": WHOLE,
    "parameter_with_2_sub_params_cat_dim_0": GATE_AND_UP,
    "parameter_with_row_parallelism_patterns": ROWS,
}
_UNSUPPORTED = ("parameter_to_average_patterns", "parameter_with_sub_params", "affine_map")
_DIMENSIONS = "checkpoint_parallel_dimensions"
_SIMPLE = re.compile(r"\^?(?:[\w\-/ ]|\\?\.|(?:\\d|\[0-9\]|\.)[+*])*\$?")
_MOST_REPEATS = 3  # of a pattern: the time to match it grows with the length of a name to this power
_MOST_PATTERNS = 1 << 10


def cuts_of(model: ModelStates, rules: Mapping[str, str] | None, count: int, weights: Collection[str]) -> Cuts:
    """Return how tensors are cut.

    Args:
        model: the model states of the first part.
        rules: the user's rules, by name or glob.
        count: the number of parts.
        weights: the names of weights; states are cut as these.

    Raises:
        SourceError: neither the files nor the user say it, or the parts are of a pipeline.
        StrategyError: a rule matches no tensor.
    """
    path = model.file.path
    dimensions = optional_table(model.others, _DIMENSIONS)
    stages = whole_number(dimensions.get("pp_degree"))
    if stages is not None and stages > 1:
        raise SourceError(
            f"{path} is of a training with {stages} pipeline stages, which is not supported", code="unsupported-layout"
        )
    patterns = optional_table(model.others, PATTERNS)
    if not patterns and not rules:
        raise SourceError(
            f"{path} is of {count} tensor-parallel parts, and does not say how tensors are cut", code="no-layout",
            facts=[f"its model states have no {PATTERNS}"],
            hint=Text("give ", Option("layout", "NAME", "RULE"), ", or ", Option("strategy")),
        )  # fmt: skip
    if used := [name for name in _UNSUPPORTED if patterns.get(name)]:
        raise SourceError(f"{path} has {names(used)}, which is not supported", code="unsupported-layout")
    return Cuts(_table(patterns, path) if patterns else lambda _: None, rules, weights)


def _table(patterns: Mapping[str, Any], path: str) -> Callable[[str], str]:
    """Return the function from names to rules that patterns define; raise `SourceError` for unusual ones."""
    compiled: list[tuple[re.Pattern[str], str]] = []
    for kind, rule in _KINDS.items():
        for pattern in patterns.get(kind) or ():
            simple = isinstance(pattern, str) and len(pattern) <= 1 << 10 and _SIMPLE.fullmatch(pattern)
            if not simple or len(re.findall(r"[+*]", pattern)) > _MOST_REPEATS or len(compiled) > _MOST_PATTERNS:
                raise SourceError(
                    f"{path} has the pattern {pattern!r:.100} in {kind}, which is not supported", code="bad-pattern"
                )
            compiled.append((re.compile(pattern), rule))
    return lambda name: next((rule for pattern, rule in compiled if pattern.match(name)), COLUMNS)


class Joined(NamedTuple):
    """Tensors joined from parts.

    Attributes:
        tensors: the tensors.
        unreadable: names that cannot be joined, with the reason.
        rules: the rules of tensors that are cut.
    """

    tensors: dict[str, Tensor]
    unreadable: dict[str, str]
    rules: dict[str, str]


def join(parts: Sequence[Part], cuts: Cuts, weights: Collection[str]) -> Joined:
    """Return whole tensors.

    Args:
        parts: the parts, in order.
        cuts: how tensors are cut.
        weights: the names of weights; `KIND.NAME` is a state of one, and cut like it.

    Raises:
        StrategyError: a rule of the user does not fit a tensor.
    """
    block_list = BlockList()
    result = Joined({}, {}, {})
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


def _joined(name: str, locations: Sequence[Flat | Stored], cut: Cut, block_list: BlockList) -> Tensor:
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


def _moved(location: Flat | Stored, pieces: Sequence[Piece], itemsize: int) -> Iterator[tuple[Block, Extent]]:
    """Yield the blocks of a part where they are in the whole tensor."""
    for local, extent in location.pieces():
        for piece in pieces:
            inside = local & piece.inside if local.start else local
            if inside is None:
                continue
            strides = extent.strides or row_major(local.shape)
            begin = position(inside.start, local.start, strides)
            shift = [a - b for a, b in zip(piece.block.start, piece.inside.start, strict=True)]
            block = type(local)(
                tuple(a + b for a, b in zip(inside.start, shift, strict=True)),
                tuple(a + b for a, b in zip(inside.stop, shift, strict=True)),
            )
            whole = inside == local
            yield block, extent if whole else laid(extent, begin * itemsize, inside.shape, strides, itemsize)
