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

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.layout.block import flat_boxes
from reshard.core.model.entries import Extent
from reshard.errors import SourceError
from reshard.formats.deepspeed.model import MASTERS, flat, table, whole_number
from reshard.kits.torch.dtensors import is_tensor
from reshard.kits.torch.file import FileTensor
from reshard.kits.torch.pickles import Pairs, describe, numbers
from reshard.kits.torch.tensors import Rebuilt, rebuilt

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from reshard.core.layout.block import Block, Shape
    from reshard.core.model.entries import Entry
    from reshard.dtypes import DType
    from reshard.kits.torch.file import TorchFile

Buffers = Sequence[Mapping[str, FileTensor]]
"""The flat buffers of a group in each rank, by kind of state."""

_MOST_KINDS, _LONGEST_KIND = 64, 256  # of states: each is a tensor, and a part of a name, of each parameter
_LARGEST = 1 << 62  # of a number of steps, or another single number

_PADDING = 2  # elements of each rank: a group is padded to a multiple of these
_ALIGNMENT = 8  # elements of each parameter: a group may have room to align it


class RankStates(NamedTuple):
    """The optimizer states of a rank.

    Attributes:
        file: the file, without its value.
        number: its number in the checkpoint.
        groups: the states of each group (or sub-group), by kind (`fp32`, `exp_avg` and so on): a flat buffer; a number,
            or a tensor without dimensions, such as `step`; or the reason why it is not read.
        stage: the stage of ZeRO; 1 for `BF16_Optimizer`, which does not name it.
        counts: the number of partitions of each group.
        paddings: the padding behind each parameter of each group, if it is recorded.
    """

    file: TorchFile
    number: int
    groups: Sequence[Mapping[str, FileTensor | float | str]]
    stage: int
    counts: Sequence[int]
    paddings: Sequence[object]

    @classmethod
    def of(cls, file: TorchFile, number: int) -> RankStates:
        """Interpret a file of optimizer states; raise `SourceError` if it is not valid."""
        values = table(table(file.value, "optimizer states").get("optimizer_state_dict"), "optimizer_state_dict")
        groups = list(_groups(values))
        states = [state for group in groups for state in group.values()]
        storages = file.storages({state.record for state in states if isinstance(state, Rebuilt)})

        def stored(state: Rebuilt | float | str) -> FileTensor | float | str:
            return FileTensor.of(state, number, storages[state.record]) if isinstance(state, Rebuilt) else state

        paddings = values.get("param_alignment_paddings")
        return cls(
            file._replace(value=None), number,
            [{kind: stored(state) for kind, state in group.items()} for group in groups],
            whole_number(values.get("zero_stage")) or 1, _partition_counts(values),
            paddings if isinstance(paddings, list) else [],
        )  # fmt: skip

    def buffers(self, group: int) -> dict[str, FileTensor]:
        """Return the flat buffers of a group, by kind of state."""
        return {kind: s for kind, s in self.groups[group].items() if isinstance(s, FileTensor) and s.shape}

    def entries(self) -> dict[str, Entry]:
        """Return the entry of each flat buffer, by a name."""
        return {
            f"{kind}.{group}": buffer.entry
            for group in range(len(self.groups))
            for kind, buffer in self.buffers(group).items()
        }


def _partition_counts(values: Mapping[str, Any]) -> list[int]:
    """Return the number of partitions of each group."""
    listed = values.get("partition_count")
    counts = [whole_number(each) for each in (listed if isinstance(listed, list | tuple) else [listed])]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts) or not known:
        raise SourceError(f"has {describe(listed)} for partition_count; expected whole numbers", code="bad-value")
    for of_group in numbered(values.get("ds_zero_partition_groups") or [], "ds_zero_partition_groups"):
        if table(of_group, "ds_zero_partition_groups").get("partition_count") not in [None, *known]:
            raise SourceError("is cut within groups of ranks, which is not supported", code="unsupported-layout")
    return known


def _groups(values: Mapping[str, Any]) -> Iterator[dict[str, Rebuilt | float | str]]:
    """Yield the states of each group, as `RankStates` has them."""
    is_partitioned = "fp32_flat_groups" in values  # by stage 3
    masters = "fp32_flat_groups" if is_partitioned else "single_partition_of_fp32_groups"
    state = values.get("optimizer_state_dict" if is_partitioned else "base_optimizer_state")
    if not isinstance(state, list) or isinstance(state, Pairs):  # a dict of torch's, or the lean states
        state = table(state, "the optimizer's states").get("state")
    states = numbered(state, "states of groups")
    for group, master in enumerate(numbered(values.get(masters), masters)):
        of_group = states[group] if group < len(states) else None
        kinds = table(of_group, f"the states of group {group}") if of_group else {}
        if len(kinds) > _MOST_KINDS or any(len(kind) > _LONGEST_KIND for kind in kinds):
            raise SourceError(f"has {len(kinds):,} kinds of states, or long ones", code="too-large")
        yield {
            **{kind: _state(value, kind) for kind, value in kinds.items() if value is not None},
            MASTERS: flat(master, f"{masters}[{group}]"),
        }


def _state(value: object, kind: str) -> Rebuilt | float | str:
    """Return a flat buffer, a single number, or the reason why a state is neither."""
    if (number := single(value)) is not None:
        return number
    try:
        return flat(value, kind)
    except SourceError as error:
        return f"cannot be cut out of its buffer: {error.message}"


def numbered(value: object, name: str) -> list[Any]:
    """Return the values of a list, or of a dict whose keys are 0, 1 and so on; None for each that is absent.

    Raises:
        SourceError: it is another value.
    """
    if isinstance(value, Pairs):
        items = {key: item for key, item in value.items() if type(key) is int and 0 <= key < len(value)}
        if 2 * len(items) != len(value):
            raise SourceError(f"has {name} that are not numbered from 0", code="bad-value")
        return [items.get(number) for number in range(max(items, default=-1) + 1)]
    if isinstance(value, list | tuple):
        return list(value)
    raise SourceError(f"has {describe(value)} for {name}; expected a list", code="bad-value")


def single(value: object) -> Rebuilt | float | None:
    """Return a number, or a tensor without dimensions; None for other values."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value if abs(value) <= _LARGEST else None
    try:
        tensor = rebuilt(value) if is_tensor(value) else None
    except SourceError:
        return None
    return tensor if tensor is not None and not tensor.shape else None


def states_by_name(
    ranks: Sequence[RankStates], shapes: Sequence[Mapping[str, Shape]], skipped: Collection[int]
) -> Iterator[tuple[str, str, Flat | FileTensor | float | str]]:
    """Yield the states of each parameter: its name, the kind of state, and its location, its value, or why it has none.

    Ranks are in order, and shapes by group (or sub-group) in the order of the buffers; skipped groups are left out.

    Raises:
        SourceError: the sizes of buffers contradict the shapes. The message does not name the file.
    """
    groups = {len(rank.groups) for rank in ranks}
    if groups != {len(shapes)}:
        raise SourceError(f"has {min(groups)} groups of parameters; param_shapes has {len(shapes)}", code="wrong-shape")
    locate = _parameters_cut if ranks[0].stage == 3 else _group_cut
    for group, of_group in enumerate(shapes):
        if group in skipped:
            continue
        buffers = [rank.buffers(group) for rank in ranks]
        if any(each.keys() != buffers[0].keys() for each in buffers):
            raise SourceError(f"and other ranks have different states of group {group}", code="ranks-disagree")
        gaps = _paddings(ranks[0], group, len(of_group))
        for kind, state in ranks[0].groups[group].items():
            states: Sequence[Flat | FileTensor | float | str] = [state] * len(of_group)
            if kind in buffers[0]:
                try:
                    states = locate(ranks, kind, buffers, [*of_group.values()], gaps)
                except SourceError as error:
                    if kind == MASTERS:
                        raise
                    states = [f"cannot be cut out of its buffer: {error.message}"] * len(of_group)
            for name, each in zip(of_group, states, strict=True):
                yield name, kind, each


def _paddings(rank: RankStates, group: int, count: int) -> Sequence[int]:
    """Return the padding behind each parameter of a group; DeepSpeed before 0.19 has none."""
    recorded = rank.paddings[group] if group < len(rank.paddings) else None
    gaps = [0] * count if recorded is None else numbers(recorded, count)
    if len(gaps) != count:
        raise SourceError(f"has {len(gaps)} param_alignment_paddings of {count} parameters", code="wrong-shape")
    return gaps


def _group_cut(
    ranks: Sequence[RankStates], kind: str, buffers: Buffers, shapes: Sequence[Shape], gaps: Sequence[int]
) -> list[Flat]:
    """Return the parameters of a group that is cut as one vector."""
    begins = list(accumulate((prod(shape) + gap for shape, gap in zip(shapes, gaps, strict=True)), initial=0))
    total, count = begins.pop(), len(ranks)
    masters, lengths = ([of_rank[each].shape[0] for of_rank in buffers] for each in (MASTERS, kind))
    size = masters[0]  # of a part with its padding, unless all elements are in the first part
    if not any(masters[1:]):
        size = max(size, min(max(lengths), total + _PADDING - 1))
    for number, length in enumerate(lengths):
        _check_length(kind, number, length, size, min(max(total - number * size, 0), size))
    if not 0 <= size * count - total < _PADDING * count + _ALIGNMENT * len(shapes):
        raise SourceError(
            f"has {kind} of {size * count:,} elements in all ranks; by param_shapes, expected {total:,} and a little "
            "padding",
            code="wrong-shape",
        )
    dtype, starts = _places(kind, buffers)
    files = [rank.number for rank in ranks]
    return [Flat.of(dtype, shape, begin, size, files, starts) for shape, begin in zip(shapes, begins, strict=True)]


def _parameters_cut(
    ranks: Sequence[RankStates], kind: str, buffers: Buffers, shapes: Sequence[Shape], _gaps: Sequence[int]
) -> list[Flat]:
    """Return parameters that are each cut by themselves."""
    begins = list(accumulate((-(-prod(shape) // len(ranks)) for shape in shapes), initial=0))
    total = begins.pop()
    for number, of_rank in enumerate(buffers):
        _check_length(kind, number, of_rank[kind].shape[0], total)
    dtype, starts = _places(kind, buffers)
    files = [rank.number for rank in ranks]
    return [
        Flat.of_parts(dtype, shape, files, [start + begin * dtype.itemsize for start in starts])
        for shape, begin in zip(shapes, begins, strict=True)
    ]


def _check_length(kind: str, number: int, length: int, *expected: int) -> None:
    if length not in expected:
        sizes = " or ".join(f"{each:,}" for each in expected)
        raise SourceError(
            f"has {kind} of {length:,} elements in rank {number}; by param_shapes, expected {sizes}", code="wrong-shape"
        )


def _places(kind: str, buffers: Buffers) -> tuple[DType, list[int]]:
    """Return the dtype of a kind of state, and the offset of each rank's buffer in its file."""
    dtypes = {of_rank[kind].dtype.name for of_rank in buffers}
    if len(dtypes) > 1:
        raise SourceError(f"has {kind} of {' and '.join(sorted(dtypes))} in different ranks", code="mixed-dtypes")
    return buffers[0][kind].dtype, [of_rank[kind].begin for of_rank in buffers]


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

    @classmethod
    def of(cls, dtype: DType, shape: Shape, begin: int, size: int, files: Sequence[int], starts: Sequence[int]) -> Flat:
        """Return a tensor from element `begin` on of a vector, which is cut in parts of `size` elements.

        Each part has the number of its file, and its offset there in bytes.
        """
        end = begin + prod(shape)
        parts = range(begin // size, -(-end // size)) if end > begin else range(0)
        return cls(
            dtype, shape,
            tuple(min(end, (part + 1) * size) - begin for part in parts),
            tuple(files[part] for part in parts),
            tuple(starts[part] + max(begin - part * size, 0) * dtype.itemsize for part in parts),
        )  # fmt: skip

    @classmethod
    def of_parts(cls, dtype: DType, shape: Shape, files: Sequence[int], starts: Sequence[int]) -> Flat:
        """Return a tensor that is cut in equal parts, the last ones padded."""
        return cls.of(dtype, shape, 0, -(-prod(shape) // len(files)), files, starts)

    def pieces(self) -> Iterator[tuple[Block, Extent]]:
        """Yield its boxes, each with the extent of its bytes."""
        width = self.dtype.itemsize
        for block, number, offset, size in boxes(self.shape, self.ends):
            yield block, Extent(self.files[number], ((self.begins[number] + offset * width, size * width),))


@lru_cache(maxsize=1 << 12)  # tensors that are cut alike share their boxes
def boxes(shape: Shape, ends: tuple[int, ...]) -> tuple[tuple[Block, int, int, int], ...]:
    """Return the boxes of a tensor whose ranges end at these elements, in row-major order.

    Each is with the number of the range that contains it, its offset there, and its size, in elements.

    >>> [(str(block), *where) for block, *where in boxes((2, 3), (4, 6))]
    [('[0:1, 0:3]', 0, 0, 3), ('[1:2, 0:1]', 0, 3, 1), ('[1:2, 1:3]', 1, 0, 2)]
    """
    result = []
    begin = 0
    for number, end in enumerate(ends):
        offset = 0
        for box in flat_boxes(shape, begin, end):
            result.append((box, number, offset, box.size))
            offset += box.size
        begin = end
    return tuple(result)
