"""Find parameters in the partitions of ZeRO's optimizers.

Stages 1 and 2, and `BF16_Optimizer`: the parameters of a group lie one behind the other, each perhaps followed by
padding (`param_alignment_paddings`), and all by padding at the end; rank d has part d of equal parts. A part is stored
with the padding at its end, or without. `param_slice_mappings` is not used: with round-robin gradients it is wrong.

Stage 3: each parameter is cut by itself, in equal parts, and the last ones are padded; a rank's buffer of a sub-group
has its parts of the parameters, one behind the other.

Sources: DeepSpeed 0.19.8 `runtime/zero/stage_1_and_2.py`, `stage3.py` and `runtime/bf16_optimizer.py`, and files of
0.14.5 to 0.19.8 (`tests/data/deepspeed`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.layout.block import flat_boxes
from reshard.core.model.entries import Extent
from reshard.errors import SourceError
from reshard.formats.deepspeed.pickled import flat, numbered, scalar, table, whole_number
from reshard.kits.torch.dtensors import is_tensor
from reshard.kits.torch.file import FileTensor
from reshard.kits.torch.pickles import Pairs, describe, numbers
from reshard.kits.torch.tensors import Rebuilt

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from reshard.core.layout.block import Block, Shape
    from reshard.core.model.entries import Entry
    from reshard.dtypes import DType
    from reshard.kits.torch.file import TorchFile

_KEPT = ("zero_stage", "partition_count", "param_alignment_paddings", "ds_zero_partition_groups")

_MOST_KINDS, _LONGEST_KIND = 64, 256  # of states: each is a tensor, and a part of a name, of each parameter

_PADDING = 2  # elements of each rank: a group is padded to a multiple of these
_ALIGNMENT = 8  # elements of each parameter: a group may have room to align it

MASTERS = "fp32"
"""The kind of state that is a parameter in float32."""


class RankBuffers(NamedTuple):
    """The flat buffers of a rank: by group, then by kind of state.

    Attributes:
        file: the file, without its value.
        number: its number in the checkpoint.
        groups: the flat buffers of each group (or sub-group), by kind of state: `fp32`, `exp_avg` and so on.
        scalars: the states that are a single number, such as `step`, in the same way.
        refused: kinds of state that are not flat tensors, in the same way, with the reason.
        values: the values of the optimizer that say how it is cut.
    """

    file: TorchFile
    number: int
    groups: Sequence[Mapping[str, FileTensor]]
    scalars: Sequence[Mapping[str, FileTensor | float]]
    refused: Sequence[Mapping[str, str]]
    values: Mapping[str, Any]

    @classmethod
    def of(cls, file: TorchFile, number: int) -> RankBuffers:
        """Interpret a file of optimizer states; raise `SourceError` if it is not valid."""
        try:
            values = table(table(file.value, "optimizer states").get("optimizer_state_dict"), "optimizer_state_dict")
            stage3 = "fp32_flat_groups" in values
            masters = "fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups"
            state = values.get("optimizer_state_dict" if stage3 else "base_optimizer_state")
            if not isinstance(state, list) or isinstance(state, Pairs):  # a dict of torch's, or the lean states
                state = table(state, "the optimizer's states").get("state")
            states = numbered(state, "states of groups")
            tensors, scalars, refused = [], [], []
            for group, tensor in enumerate(numbered(values.get(masters), masters)):
                of_group = states[group] if group < len(states) else None
                kinds = table(of_group, f"the states of group {group}") if of_group else {}
                if len(kinds) > _MOST_KINDS or any(len(kind) > _LONGEST_KIND for kind in kinds):
                    raise SourceError(f"has {len(kinds):,} kinds of states, or long ones", code="too-large")  # noqa: TRY301
                buffers, single, reasons = _states(kinds)
                tensors.append({MASTERS: flat(tensor, f"{masters}[{group}]")})
                tensors[-1] |= {kind: buffer for kind, buffer in buffers.items() if kind != MASTERS}
                scalars.append(single)
                refused.append(reasons)
            used = [*(t for each in tensors for t in each.values()), *(t for each in scalars for t in each.values())]
            storages = file.storages({value.record for value in used if isinstance(value, Rebuilt)})

            def stored(tensor: Rebuilt) -> FileTensor:
                return FileTensor.of(tensor, number, storages[tensor.record])

            groups = [{kind: stored(tensor) for kind, tensor in each.items()} for each in tensors]
            singles = [
                {kind: stored(value) if isinstance(value, Rebuilt) else value for kind, value in each.items()}
                for each in scalars
            ]
        except SourceError as error:
            raise error.about(file.path) from None
        kept = {name: values.get(name) for name in _KEPT}
        return cls(file._replace(value=None), number, groups, singles, refused, kept)

    @property
    def stage(self) -> int:
        """Return the stage of ZeRO; 1 for `BF16_Optimizer`, which does not name it."""
        return whole_number(self.values.get("zero_stage")) or 1

    def partition_counts(self) -> list[int]:
        """Return the number of partitions of each group."""
        count = self.values.get("partition_count")
        counts = [whole_number(each) for each in (count if isinstance(count, list | tuple) else [count])]
        if None in counts or not counts:
            raise SourceError(
                f"{self.file.path} has {describe(count)} for partition_count; expected whole numbers", code="bad-value"
            )
        return [each or 0 for each in counts]

    def entries(self) -> dict[str, Entry]:
        """Return the entry of each buffer, by a name."""
        return {
            f"{kind}.{number}": tensor.entry
            for number, of_group in enumerate(self.groups)
            for kind, tensor in of_group.items()
        }


def _states(values: Mapping[str, Any]) -> tuple[dict[str, Rebuilt], dict[str, Rebuilt | float], dict[str, str]]:
    """Sort the states of a group into flat buffers, single numbers, and those that are refused."""
    buffers: dict[str, Rebuilt] = {}
    single: dict[str, Rebuilt | float] = {}
    refused: dict[str, str] = {}
    for kind, value in values.items():
        number_or_tensor = scalar(value)
        if isinstance(number_or_tensor, Rebuilt) and number_or_tensor.shape:
            number_or_tensor = None  # a flat buffer of one element
        if number_or_tensor is not None:
            single[kind] = number_or_tensor
        elif is_tensor(value):
            try:
                buffers[kind] = flat(value, kind)
            except SourceError as error:
                refused[kind] = f"cannot be cut out of its buffer: {error.message}"
        elif value is not None:
            refused[kind] = f"is {describe(value)}, not a tensor or a number"
    return buffers, single, refused


def states_by_name(
    ranks: Sequence[RankBuffers], shapes: Sequence[Mapping[str, Shape]], skipped: Collection[int]
) -> Iterator[tuple[str, str, Flat | FileTensor | float | str]]:
    """Yield the states of each parameter: its name, the kind of state, and its location or value.

    Of a state that cannot be read, the last is the reason.

    Args:
        ranks: the buffers of all data-parallel ranks, in order.
        shapes: the shapes of the parameters of each group (or sub-group), in the order of the buffers.
        skipped: groups to leave out.

    Raises:
        SourceError: the sizes of buffers contradict the shapes.
    """
    first = ranks[0]
    if any(len(buffers.groups) != len(shapes) for buffers in ranks):
        counts = sorted({len(buffers.groups) for buffers in ranks})
        raise SourceError(
            f"{first.file.path} has {counts[0]} groups of parameters; param_shapes has {len(shapes)}",
            code="wrong-shape",
        )
    for group, of_group in enumerate(shapes):
        if group in skipped:
            continue
        kinds = list(first.groups[group])
        if any(set(buffers.groups[group]) != set(kinds) for buffers in ranks):
            raise SourceError(f"{first.file.path}: ranks have different states of group {group}", code="ranks-disagree")
        locate = _parameters_cut if first.stage == 3 else _group_cut
        refused = dict(first.refused[group])
        for kind in kinds:
            try:
                for name, located in locate(ranks, group, kind, of_group):
                    yield name, kind, located
            except SourceError as error:
                if kind == MASTERS:
                    raise
                refused[kind] = f"cannot be cut out of its buffer: {error.message}"
        for kind, reason in refused.items():
            for name in of_group:
                yield name, kind, reason
        for kind, value in first.scalars[group].items():
            single = value._replace(shape=()) if isinstance(value, FileTensor) else value
            for name in of_group:
                yield name, kind, single


def _ranges(ranks: Sequence[RankBuffers], group: int, kind: str) -> tuple[DType, list[int], list[int]]:
    """Return the dtype of a kind of state, the file of each rank, and the offset of its buffer in it."""
    buffers = [each.groups[group][kind] for each in ranks]
    return buffers[0].dtype, [each.number for each in ranks], [buffer.begin for buffer in buffers]


def _lengths(ranks: Sequence[RankBuffers], group: int, kind: str) -> list[int]:
    dtypes = {buffers.groups[group][kind].dtype.name for buffers in ranks}
    if len(dtypes) > 1:
        raise SourceError(
            f"{ranks[0].file.path}: {kind} is of {' and '.join(sorted(dtypes))} in different ranks", code="mixed-dtypes"
        )
    return [buffers.groups[group][kind].shape[0] for buffers in ranks]


def _group_cut(
    ranks: Sequence[RankBuffers], group: int, kind: str, shapes: Mapping[str, Shape]
) -> Iterator[tuple[str, Flat]]:
    """Yield parameters in a group that is cut as one vector."""
    gaps = _alignment_paddings(ranks, group, len(shapes))
    begins, total = [], 0
    for shape, gap in zip(shapes.values(), gaps, strict=True):
        begins.append(total)
        total += prod(shape) + gap
    lengths, masters = _lengths(ranks, group, kind), _lengths(ranks, group, MASTERS)
    size = masters[0]  # of a part with its padding, unless all elements are in the first part
    if not any(masters[1:]):
        size = max(size, min(max(lengths), total + _PADDING - 1))
    for number, length in enumerate(lengths):
        filled = min(max(total - number * size, 0), size)
        if length not in {size, filled}:
            raise SourceError(
                f"{ranks[number].file.path}: {kind} of group {group} has {length:,} elements; by param_shapes, "
                f"expected {filled:,}, or {size:,} with padding",
                code="wrong-shape",
            )
    if not 0 <= size * len(ranks) - total < _PADDING * len(ranks) + _ALIGNMENT * len(shapes):
        raise SourceError(
            f"{ranks[0].file.path}: {kind} of group {group} has {size * len(ranks):,} elements in all ranks; by "
            f"param_shapes, expected {total:,} and a little padding",
            code="wrong-shape",
        )
    dtype, files, starts = _ranges(ranks, group, kind)
    for (name, shape), begin in zip(shapes.items(), begins, strict=True):
        end = begin + prod(shape)
        if begin == end:
            yield name, Flat(dtype, shape, (), (), ())
            continue
        numbers_of_ranks = range(begin // size, (end - 1) // size + 1)
        yield name, Flat(
            dtype, shape,
            tuple(min(end, (number + 1) * size) - begin for number in numbers_of_ranks),
            tuple(files[number] for number in numbers_of_ranks),
            tuple(starts[number] + max(begin - number * size, 0) * dtype.itemsize for number in numbers_of_ranks),
        )  # fmt: skip


def _alignment_paddings(ranks: Sequence[RankBuffers], group: int, count: int) -> tuple[int, ...]:
    """Return the padding behind each parameter of a group; DeepSpeed before 0.19 has none."""
    try:
        every = [_of_group(buffers, group) for buffers in ranks]
        recorded = {numbers(each, count) for each in every if each is not None}
    except SourceError as error:
        raise error.about(ranks[0].file.path) from None
    if not recorded:
        return (0,) * count
    if len(recorded) > 1 or len(paddings := recorded.pop()) != count:
        raise SourceError(
            f"{ranks[0].file.path}: param_alignment_paddings of group {group} differ between ranks, or are not of its "
            f"{count} parameters",
            code="ranks-disagree",
        )
    return paddings


def _of_group(buffers: RankBuffers, group: int) -> object:
    paddings = buffers.values.get("param_alignment_paddings")
    return paddings[group] if isinstance(paddings, list) and group < len(paddings) else None


def _parameters_cut(
    ranks: Sequence[RankBuffers], group: int, kind: str, shapes: Mapping[str, Shape]
) -> Iterator[tuple[str, Flat]]:
    """Yield parameters that are each cut by themselves."""
    count = len(ranks)
    sizes = {name: -(-prod(shape) // count) for name, shape in shapes.items()}
    expected = sum(sizes.values())
    for buffers, length in zip(ranks, _lengths(ranks, group, kind), strict=True):
        if length != expected:
            raise SourceError(
                f"{buffers.file.path}: {kind} of sub-group {group} has {length:,} elements; by param_shapes, expected "
                f"{expected:,}",
                code="wrong-shape",
            )
    dtype, files, starts = _ranges(ranks, group, kind)
    begin = 0
    for name, shape in shapes.items():
        yield name, cut_by_itself(dtype, shape, files, [start + begin * dtype.itemsize for start in starts])
        begin += sizes[name]


def cut_by_itself(dtype: DType, shape: Shape, files: Sequence[int], begins: Sequence[int]) -> Flat:
    """Return a parameter that is cut in equal parts, one of each rank, the last ones padded.

    Args:
        dtype: its dtype.
        shape: its shape.
        files: the number of each rank's file.
        begins: the offset of each rank's part in its file.
    """
    total = prod(shape)
    size = max(-(-total // len(files)), 1)
    used = -(-total // size)  # ranks with elements
    ends = tuple(min((number + 1) * size, total) for number in range(used))
    return Flat(dtype, shape, ends, tuple(files[:used]), tuple(begins[:used]))


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """The boxes of a tensor that is cut into ranges of its elements; shared by tensors that are cut alike.

    Attributes:
        blocks: the boxes, in row-major order.
        ranges: the number of the range that contains each.
        offsets: the offset of each in its range, in elements.
        sizes: the number of elements of each.
    """

    blocks: tuple[Block, ...]
    ranges: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@lru_cache(maxsize=1 << 12)
def fragments(shape: Shape, ends: tuple[int, ...]) -> Fragments:
    """Return the boxes of a tensor whose ranges end at these elements; the last end is its size.

    >>> cut = fragments((2, 3), (4, 6))
    >>> [(str(block), number, offset) for block, number, offset in zip(cut.blocks, cut.ranges, cut.offsets)]
    [('[0:1, 0:3]', 0, 0), ('[1:2, 0:1]', 0, 3), ('[1:2, 1:3]', 1, 0)]
    """
    blocks: list[Block] = []
    numbers: list[int] = []
    offsets: list[int] = []
    sizes: list[int] = []
    begin = 0
    for number, end in enumerate(ends):
        offset = 0
        for box in flat_boxes(shape, begin, end):
            blocks.append(box)
            numbers.append(number)
            offsets.append(offset)
            sizes.append(box.size)
            offset += sizes[-1]
        begin = end
    return Fragments(tuple(blocks), tuple(numbers), tuple(offsets), tuple(sizes))


class Flat(NamedTuple):
    """A tensor in ranges of flat buffers.

    Attributes:
        dtype: the dtype of its elements.
        shape: its shape.
        ends: the end of each range, in elements of the tensor.
        files: the number of the file of each range.
        begins: the offset of each range in its file, in bytes.
    """

    dtype: DType
    shape: Shape
    ends: tuple[int, ...]
    files: tuple[int, ...]
    begins: tuple[int, ...]

    def pieces(self) -> Iterator[tuple[Block, Extent]]:
        """Yield its boxes, each with the extent of its bytes."""
        cut, width = fragments(self.shape, self.ends), self.dtype.itemsize
        for block, number, offset, size in zip(cut.blocks, cut.ranges, cut.offsets, cut.sizes, strict=True):
            yield block, Extent(self.files[number], ((self.begins[number] + offset * width, size * width),))
