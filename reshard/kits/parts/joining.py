"""Join the parts of tensor-parallel ranks to whole tensors, as `cuts` says."""

from __future__ import annotations

from dataclasses import replace
from operator import add
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from reshard.core.layout.block import Block, shape_text
from reshard.core.model.checkpoint import Checkpoint, TensorSpec
from reshard.core.model.facts import Extras, Object, Opening
from reshard.core.model.probe import compare_contents
from reshard.core.model.reshape import part_extent
from reshard.core.model.table import Blocks, common_dtype, nothing_readable
from reshard.errors import Faults, Option, SourceError, StrategyError, Text, names
from reshard.kits.parts.cuts import WHOLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import SourceFile, Tensor
    from reshard.core.model.entries import Extent
    from reshard.core.storage.places import Place
    from reshard.dtypes import DType
    from reshard.kits.parts.cuts import CutPiece, TensorCut

TABLE = "the table of names"
"""What describes the blocks: `Extras.described_by`."""


class StoredPart(Protocol):
    """A part of a tensor, in one file or in several."""

    @property
    def dtype(self) -> DType:
        """The dtype of its elements."""

    @property
    def shape(self) -> Shape:
        """The shape of the part."""

    def pieces(self) -> Iterator[tuple[Block, Extent]]:
        """Yield its blocks, each with the extent of its bytes."""


class JoinedParts(NamedTuple):
    """Tensors joined from parts.

    Attributes:
        tensors: the tensors by name.
        unreadable: the names of tensors that cannot be joined, with the reason.
        ruled: the rules of the tensors that are cut, or differ by rank.
    """

    tensors: dict[str, Tensor]
    unreadable: dict[str, str]
    ruled: dict[str, str]

    def __or__(self, other: JoinedParts) -> JoinedParts:
        """Return the tensors of both."""
        return JoinedParts(self.tensors | other.tensors, self.unreadable | other.unreadable, self.ruled | other.ruled)


def join(
    sets: Mapping[str, Sequence[Mapping[int, StoredPart]]],
    count: int,
    cut_of: Callable[[str, Sequence[Shape]], TensorCut],
) -> JoinedParts:
    """Join the parts of each tensor.

    Args:
        sets: the parts of each tensor by number. A tensor of several pipeline stages has several sets of parts, which
            are replicas.
        count: the number of parts.
        cut_of: returns how parts of these shapes make a tensor, by its name; see `cuts.Cuts.of`.

    Raises:
        StrategyError: a rule of the user does not fit a tensor.
    """
    block_list = Blocks()
    result = JoinedParts({}, {}, {})
    for name, of_stages in sets.items():
        try:
            complete = [_complete(parts, count) for parts in of_stages]
            cut = cut_of(name, [part.shape for part in complete[0]])
            result.tensors[name] = _tensor(name, complete, cut, block_list)
            if cut.rule != WHOLE:
                result.ruled[name] = cut.rule
        except StrategyError:
            raise
        except SourceError as error:
            result.unreadable[name] = error.message
    return result


def _complete(parts: Mapping[int, StoredPart], count: int) -> list[StoredPart]:
    """Return the parts in order; raise `SourceError` if one is missing."""
    if len(parts) < count:
        missing = next(number for number in range(count) if number not in parts)
        raise SourceError(f"has {len(parts)} of {count} parts, and not part {missing}", code="missing-blocks")
    return [parts[number] for number in range(count)]


def _tensor(name: str, sets: Sequence[Sequence[StoredPart]], cut: TensorCut, block_list: Blocks) -> Tensor:
    """Return a tensor; raise `SourceError` if its parts do not fit together."""
    dtype = common_dtype(part.dtype for parts in sets for part in parts)
    shapes = dict.fromkeys(part.shape for parts in sets for part in parts)
    if len({tuple(part.shape for part in parts) for parts in sets}) > 1:
        raise SourceError(f"has parts of shape {names(map(shape_text, shapes), most=3)}", code="ranks-disagree")
    blocks = (
        moved
        for parts in sets
        for part, pieces in zip(parts, cut.pieces, strict=True)
        for moved in _moved(part, pieces)
    )
    return block_list.tensor(TensorSpec(name, dtype, cut.shape), blocks)


def _moved(part: StoredPart, pieces: Sequence[CutPiece]) -> Iterator[tuple[Block, Extent]]:
    """Yield the blocks of a part as blocks of the whole tensor."""
    for block, extent in part.pieces():
        for piece in pieces:
            if block == piece.inside:
                yield piece.block, extent
            elif (inside := block & piece.inside) is not None:
                shift = [to - at for to, at in zip(piece.block.start, piece.inside.start, strict=True)]
                start, stop = (tuple(map(add, corner, shift)) for corner in (inside.start, inside.stop))
                yield Block(start, stop), part_extent(extent, block, inside, part.dtype.itemsize)


def check_shapes(
    root: Place, tensors: Mapping[str, Tensor], expected: Mapping[str, Sequence[int | None]], said_by: str
) -> None:
    """Compare the shapes of whole tensors with the sizes that a file tells.

    Args:
        root: the directory, for messages.
        tensors: the tensors.
        expected: the shape of some of them, None for an unknown extent.
        said_by: what tells the sizes.

    Raises:
        SourceError: shapes differ; all faults at once.
    """
    faults = Faults(str(root))
    for name, shape in expected.items():
        actual: Shape = tensors[name].spec.shape
        if len(actual) != len(shape) or any(size not in {None, actual[axis]} for axis, size in enumerate(shape)):
            expected_text = ", ".join("?" if size is None else str(size) for size in shape)
            fault = f"is {shape_text(actual)} by its parts; {said_by} says [{expected_text}]"
            faults.add(f"tensor {name!r}", fault, code="wrong-shape")
    faults.raise_if_any(SourceError)


def opened(
    root: Place,
    files: Sequence[SourceFile],
    parts: JoinedParts,
    *,
    objects: Mapping[str, str],
    rules: Mapping[str, str] | None,
    contents: bool | Literal["blocks"],
    arguments: Mapping[str, object] | None = None,
) -> Checkpoint:
    """Return the checkpoint of joined parts, after comparing samples of replicas.

    Args:
        root: the directory.
        files: the files, one of each rank.
        parts: the tensors.
        objects: the names of values that are not read, described.
        rules: the user's rules.
        contents: compare samples.
        arguments: what the files state of the training.

    Raises:
        SourceError: no tensor can be read, replicas of blocks differ, or every part has all of a tensor that is cut.
    """
    if not parts.tensors:
        raise SourceError(f"{root}: {nothing_readable(parts.unreadable)}", code="no-tensors")
    known = parts.tensors.keys() | parts.unreadable.keys()
    unread = {name: Object(problem=kind) for name, kind in objects.items() if name not in known}
    checkpoint = Checkpoint(
        str(root), parts.tensors, tuple(files), tuple(range(len(files))), unreadable=parts.unreadable,
        extras=Extras(TABLE, objects=unread, arguments=arguments or {}), opening=Opening(rules=rules or {}),
    )  # fmt: skip
    return with_replicas_compared(checkpoint, parts, contents=contents)


def with_replicas_compared(
    checkpoint: Checkpoint, parts: JoinedParts, *, contents: bool | Literal["blocks"]
) -> Checkpoint:
    """Compare samples of replicas of joined tensors; make those unreadable that differ.

    Raises:
        SourceError: every part has all of a tensor that is cut.
    """
    compared = compare_contents(checkpoint, parts.ruled, contents=contents)
    differing = {
        name: Text(reason, "; give its rule with ", Option("layout", "NAME", "RULE"))
        for name, reason in compared.unreadable.items()
        if name in parts.tensors
    }
    return replace(compared, unreadable={**compared.unreadable, **differing})
