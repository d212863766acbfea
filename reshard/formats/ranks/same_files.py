"""A target with a file for each source file, with the same tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.core.layout.block import Block
from reshard.core.model.entries import Content, FileLayout
from reshard.core.target import Target, TargetBlocks, TargetFile, merged_notes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.entries import Format
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
        layouts: dict[tuple[tuple[Content, ...], tuple[tuple[str, str], ...]], FileLayout] = {}
        shared: dict[Content, Content] = {}
        result = []
        for file, rank, items, path in zip(
            self._source.files, self._source.ranks, self._items, self._paths, strict=True
        ):
            contents = []
            for name, tensor, dtype in items:
                content = Content(name, dtype, () if tensor.text is not None else tensor.spec.shape, tensor.text)
                contents.append(shared.setdefault(content, content))
            notes = merged_notes([file], {}, deduplicated=file.index.deduplicated)
            key = tuple(contents), tuple(sorted(notes.items()))
            if key not in layouts:
                layouts[key] = self._lay_out(contents, notes)
            result.append(TargetFile(rank, path, layouts[key]))
        return tuple(result)
