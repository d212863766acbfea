"""Destinations: what lays out the files of a target, and says which blocks of which tensors go into each.

`plan.build` asks one: for every tensor which blocks are wanted, and in which of its files; then, when it is known which
blocks these are, for the files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from reshard.formats.entries import FileLayout

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from reshard.dtypes import DType
    from reshard.errors import Faults
    from reshard.formats.entries import Where
    from reshard.layout.block import Block, Shape
    from reshard.layout.layout import Grid
    from reshard.layout.mesh import Mesh
    from reshard.plan.budget import Share
    from reshard.plan.build import Routed
    from reshard.plan.plan import Request
    from reshard.source.checkpoint import Checkpoint, SourceFile, Tensor
    from reshard.storage.base import TargetCoding
    from reshard.storage.cipher import Cipher


class Item(NamedTuple):
    """A tensor that is planned: its name in the target, the tensor of the source, its dtype in the target."""

    name: str
    tensor: Tensor
    dtype: DType


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """The blocks of a tensor that are wanted; equal only to itself, since tensors share it.

    Attributes:
        blocks: the blocks.
        files: for each, the numbers of the target files that get it.
        unit_rows: how many rows of the tensor whole files have, where each is written by one task; else 0.
    """

    blocks: tuple[Block, ...]
    files: tuple[tuple[int, ...], ...]
    unit_rows: int = 0


class TargetFile(NamedTuple):
    """A file to be written.

    Attributes:
        rank: the target rank that it is for.
        path: where it goes, below the target directory.
        layout: its size, its own bytes and the places of the contents; shared by ranks with equal contents.
        last: it gets its name after all others, and after those of its kind before it: the index of a unified set.
        pointer: it says which of several checkpoints of a directory is meant: it is replaced whoever's it is, and stays
            until then where another is meant.
        link: the path of the file that it is a link to: of the target, where replicas are linked, or of the source, an
            absolute one; nothing is written then.
        done: it is there already, as it shall be; nothing is written then either.
    """

    rank: int
    path: str
    layout: FileLayout
    last: bool = False
    pointer: bool = False
    link: str | None = None
    done: bool = False


class Arrangement(Protocol):
    """Which rank of a target is to hold which block of which tensor, such as a `Strategy`."""

    @property
    def tensors(self) -> Mapping[str, object]:
        """The tensors, by their names."""

    @property
    def ranks(self) -> range:
        """The ranks."""

    @property
    def devices(self) -> int:
        """How many ranks store a block once where that is asked for: those of a stage."""

    def grid(self, name: str, shape: Shape) -> Grid:
        """Return which ranks hold which block of a tensor; raise `LayoutError` where that does not fit its shape."""

    def shape_of(self, name: str) -> Shape | None:
        """Return the whole shape that is expected of a tensor; None where that is not said."""

    def meshes(self, name: str, shape: Shape) -> tuple[Mesh, ...]:
        """Return how a tensor is cut over which ranks, in each stage; none where all ranks that hold it have all."""


class Destination(Protocol):
    """A way to lay out the files of a target.

    Attributes:
        format: the name of the files' format; of the class the only one that there may be, empty where there are more.
        ranks: the ranks of the target that are written.
        exclusive: the target directory may have nothing else in it.
        coding: how the files are encoded; None where their contents are plain.
        cipher: encrypts the files; None where they are plain.
        memory: what it takes besides what every plan does.
        carried: the names of the source's objects that are carried byte for byte.
        carries: objects, and tensors that are bound to the source's format, go there, too.
        links: its files are links to those of the source, so that nothing is moved.
        dropped: names in the source that cannot be linked, and need not be.
    """

    format: str = ""
    ranks: tuple[int, ...]
    exclusive: bool = False
    coding: TargetCoding | None = None
    cipher: Cipher | None = None
    memory: tuple[Share, ...] = ()
    carried: Collection[str] = ()
    carries: bool = False
    links: bool = False
    dropped: tuple[str, ...] = ()

    def __init__(
        self, source: Checkpoint, request: Request, items: Sequence[Item], objects: Mapping[str, str], faults: Faults, /
    ) -> None:
        """Find out what goes where.

        Args:
            source: the checkpoint that is read.
            request: what is asked for, settled.
            items: the tensors that are planned.
            objects: old names to new ones of what is carried, where that can be.
            faults: gets what is wrong with it.
        """

    @classmethod
    def settled(cls, request: Request, _source: Checkpoint, /) -> Request:
        """Return what is asked for, with what that leaves open.

        Raises:
            UsageError: it does not go together, or with the source.
        """
        return request

    def wanted(self, item: Item) -> Wanted | None:
        """Return which blocks of a tensor are wanted and where; None where a fault was found, which is kept."""

    def cuts(self, name: str) -> bool:  # noqa: ARG002 -- some look for it
        """Return whether it says itself how a tensor is cut, so that a copy may not differ from rank to rank."""
        return False

    def copies(self, item: Item, read: Mapping[int, set[int]]) -> Sequence[tuple[Where, Wanted]]:  # noqa: ARG002 -- likewise
        """Return, for a tensor whose copies differ, which of them is read for which files: that of the lowest rank.

        Args:
            item: the tensor.
            read: for each target file, the source files that are read for it anyway.
        """
        wanted = self.wanted(item)
        return [(item.tensor.sharding.replicas[0][0], wanted)] if wanted else []

    def files(self, routed: Sequence[Routed], texts: Sequence[Item]) -> tuple[TargetFile, ...]:
        """Lay out every file; those with equal contents share a layout."""

    def warnings(self) -> tuple[str, ...]:
        """Return what a user should know of what is written; nothing as a rule."""
        return ()


def literal(content: bytes) -> FileLayout:
    """Return the layout of a file without tensors."""
    return FileLayout(len(content), ((0, content),))


def merged_notes(files: Sequence[SourceFile], more: Mapping[str, str], *, deduplicated: bool) -> dict[str, str]:
    """Return the notes of source files, the first one's first; MindSpore marks its safetensors files with `format`."""
    notes = {"format": "ms"}
    for file in reversed(files):
        notes.update(file.index.metadata)
    notes.update(more)
    if deduplicated:
        notes["remove_redundancy"] = "True"
    return notes
