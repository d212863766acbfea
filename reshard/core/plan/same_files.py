"""A target that has each file of the source again, in another format."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from reshard.core.layout.block import Block
from reshard.core.model.entries import Content
from reshard.core.target import Target, TargetBlocks, TargetFile, merged_notes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.entries import FileLayout, Format
    from reshard.core.storage.cipher import Cipher
    from reshard.core.target import Assigned, TargetTensor


class SameFiles(Target):
    """A `Target` that writes each source file again in another format.

    Names are local to each file, so that tensors of several files may have the same name; the tensors of the n-th file
    are in `items[n]`, and go to `paths[n]`.
    """

    def __init__(
        self,
        source: Checkpoint,
        items: Sequence[Sequence[TargetTensor]],
        paths: Sequence[str],
        written: Format,
        cipher: Cipher | None,
    ) -> None:
        self.format = written.NAME
        self.cipher = cipher
        self.ranks = tuple(sorted(set(source.ranks)))
        self._source, self._items, self._paths = source, items, paths
        self._lay_out = written.lay_out
        self._wanted: dict[tuple[Shape, int], TargetBlocks] = {}

    def cuts(self, name: str) -> bool:  # noqa: ARG002 -- as in Target
        """Return True: a file has one copy of a tensor."""
        return True

    def blocks_of(self, item: TargetTensor) -> TargetBlocks:
        """Return the whole tensor of a file as a block for the corresponding file."""
        ((at,),) = item.tensor.sharding.replicas
        key = (item.tensor.spec.shape, at.file)
        if key not in self._wanted:
            self._wanted[key] = TargetBlocks((Block.whole(key[0]),), ((at.file,),))
        return self._wanted[key]

    def files(self, assigned: Sequence[Assigned], texts: Sequence[TargetTensor]) -> tuple[TargetFile, ...]:  # noqa: ARG002 -- as in Target
        """Lay out every file; those with equal contents share a layout."""

        @cache
        def lay_out(contents: tuple[Content, ...], notes: tuple[tuple[str, str], ...]) -> FileLayout:
            return self._lay_out(contents, dict(notes))

        result = []
        source = self._source
        for file, rank, items, path in zip(source.files, source.ranks, self._items, self._paths, strict=True):
            contents = tuple(
                Content(name, dtype, () if tensor.text is not None else tensor.spec.shape, tensor.text)
                for name, tensor, dtype in items
            )
            notes = merged_notes([file], {}, deduplicated=file.index.deduplicated)
            result.append(TargetFile(rank, path, lay_out(contents, tuple(notes.items()))))
        return tuple(result)
