"""A Checkpoint 2.0 of MindSpore Transformers: an iteration in a run directory.

Whole tensors need no metadata: mindformers loads them on every mesh. `metadata.json` locates blocks, and mindformers
reads its keys by position; its two halves are joined by the number of a block in row-major order. A tensor that stages
cut differently is stored in the layout of the first stage, since there is one layout for each name.

Tensor files get their names first, then `metadata.json` and `common.json`, and finally the tracker file, which names
the iteration.

Sources: mindformers 2.1.0 `checkpoint/{checkpoint,metadata,sharded_tensor,utils}.py`, and its own files
(`tests/data/checkpoint2`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from io import BytesIO
from typing import TYPE_CHECKING, Any

from reshard.core.layout.arrangement import Arranged
from reshard.core.layout.mesh import Mesh
from reshard.core.model.entries import ShardFiles
from reshard.core.target import TargetFile, literal
from reshard.errors import LayoutError, UsageError, names
from reshard.formats.checkpoint2.names import COMMON, METADATA, TRACKER
from reshard.formats.checkpoint2.options import COMMON_KEYS, NOTES, Checkpoint2, common_of, kinds_of, parse_common
from reshard.formats.ranks.writer import Ranks, copied_whole
from reshard.kits import safetensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reshard.core.layout.arrangement import Arrangement
    from reshard.core.layout.block import Shape
    from reshard.core.layout.grid import Grid
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.entries import SizedTensor
    from reshard.core.plan.plan import Request
    from reshard.core.target import Assigned, TargetInputs, TargetTensor
    from reshard.errors import Faults


_LARGEST_GROUP = 64
_PLACE_BYTES = 250  # resident memory of making the metadata, for a rank that stores a block
_RANK_BYTES = 20  # the same for the number of a rank
_BREAKING = re.compile("[,()'\"\\\\]")


@dataclass(frozen=True, slots=True)
class _FilesOfRanks:
    """A file of weights and one of states for each rank."""

    files: Checkpoint2

    def shard_files(self, tensors: Sequence[SizedTensor], extension: str) -> ShardFiles:
        kinds = kinds_of(tensors)
        part_of = {tensor.name: part for part, (_, kind_tensors) in enumerate(kinds) for tensor in kind_tensors}
        paths = tuple(self.files.path(kind, extension) for kind, _ in kinds)
        return ShardFiles(paths, part_of, notes=NOTES, numbered=True)


class Checkpoint2Target(Ranks):
    """The files of an iteration, its metadata and the tracker file."""

    format = safetensors.NAME

    def __init__(self, inputs: TargetInputs) -> None:
        request, items, arrangement, faults = inputs.request, inputs.items, inputs.arrangement, inputs.faults
        self._layout, self._arrangement = request.files, arrangement
        self._full = None if arrangement is None else _completed(arrangement, items, faults)
        if self._full is not None:
            request = replace(request, files=_FilesOfRanks(request.files))
        super().__init__(inputs._replace(request=request, arrangement=self._full))
        if self._full is None:
            return
        for item in items:
            if _BREAKING.search(item.name) or not item.name.isprintable() or item.name != item.name.strip():
                faults.add(
                    f"tensor {item.name!r}",
                    "has a comma, bracket, quote, control character, or space at an end, "
                    "so mindformers could not read the metadata", code="bad-name", hint="rename it",
                )  # fmt: skip
        self.memory = (("metadata", sum(self._metadata_bytes(self._full))),)

    @classmethod
    def settled(cls, request: Request, source: Checkpoint) -> Request:
        """Return the request, with the files completed from the source."""
        if request.is_partial:
            raise UsageError("a Checkpoint 2.0 has all ranks", code="needs-all-ranks", hint="leave ranks and stage out")
        return replace(request, files=request.files.of(source))

    def files(self, assigned: Sequence[Assigned], texts: Sequence[TargetTensor]) -> tuple[TargetFile, ...]:
        """Lay out every file, and make the metadata and the tracker file."""
        tensor_files = super().files(assigned, texts)
        first, directory = self.ranks[0], self._layout.directory
        contents = [(COMMON, (self._layout.common or "").encode())]
        if self._full is not None:
            contents.insert(0, (METADATA, self._metadata(self._full)))
        metadata_files = [
            TargetFile(first, f"{directory}/{name}", literal(text), publish="index") for name, text in contents
        ]
        tracker = literal(f"{self._layout.step}".encode())
        return (*tensor_files, *metadata_files, TargetFile(first, TRACKER, tracker, publish="pointer"))

    def warnings(self) -> tuple[str, ...]:
        """Warn of tensors that all ranks get whole, and of faults of `common.json`."""
        result = copied_whole(self._source, self._arrangement, self._items)
        common = parse_common(self._layout.common or "{}")
        unknown = [key for key in COMMON_KEYS[:-2] if common.get(key) is None]
        if unknown and self._layout.common != common_of(self._source):
            result += (f"{COMMON} says null for what is not known: {names(unknown)}",)
        if common.get("global_step") not in (None, self._layout.step):
            result += (
                f"{COMMON} has global_step {common['global_step']!r:.60}, and the iteration is {self._layout.step}",
            )
        return result

    def _stored_at(self, ranks: Sequence[int], group: Sequence[int], part: int) -> Iterator[dict[str, Any]]:
        """Yield the storage entries of a block, with the ranks that may read it there.

        If many ranks store the block, each entry names only its own rank; naming all in each would take gigabytes.
        """
        for rank in ranks:
            name = self.path(rank, part).rpartition("/")[2]
            readers = [rank] if _finds_own(ranks, group) else group
            yield {"file_name": name, "storage_rank": rank, "rank_group": readers}

    def _metadata_bytes(self, target: Arrangement) -> Iterator[int]:
        """Yield the approximate memory of each block's storage entries and their ranks.

        The layout of its tensor names the ranks that hold it twice more: as ranks, and as replica numbers.
        """
        for item in self._items:
            name, shape = item.name, item.tensor.spec.shape
            stored = self.stored(name, shape) if self.cuts(name) and item.tensor.text is None else None
            if stored is not None:
                for ranks, group in zip(stored.ranks, target.grid(name, shape).ranks, strict=True):
                    named = len(ranks) if _finds_own(ranks, group) else len(ranks) * len(group)
                    yield _PLACE_BYTES * len(ranks) + _RANK_BYTES * (named + 2 * len(group))

    def _metadata(self, target: Arrangement) -> bytes:
        """Return the metadata; similar tensors share their JSON texts."""
        described: dict[tuple[str, Shape, Grid, Mesh | None], str] = {}
        entries_of: dict[tuple[Grid, Grid, int], list[str]] = {}
        tensors, entries = [], BytesIO()
        for item in self._items:
            name, shape = item.name, item.tensor.spec.shape
            if not self.cuts(name) or item.tensor.text is not None:
                continue
            stored, grid, mesh = self.stored(name, shape), target.grid(name, shape), _mesh(target.tensors[name])
            assert stored is not None  # noqa: S101 -- otherwise it is a fault
            key = (item.dtype.mindspore or item.dtype.name.replace("_", ""), shape, grid, mesh)
            if key not in described:
                described[key] = _json(_described(*key))
            tensors.append(f"{_json(name)}:{described[key]}")
            part = self.part_of(name)
            if (stored, grid, part) not in entries_of:
                blocks = zip(stored.ranks, grid.ranks, strict=True)
                entries_of[stored, grid, part] = [
                    _json(list(self._stored_at(storing, group, part))) for storing, group in blocks
                ]
            for number, text in enumerate(entries_of[stored, grid, part]):
                entries.write(f"{',' if entries.tell() else ''}{_json(str((name, (number,))))}:{text}".encode())
        head = f'{{"state_dict_metadata":{{{",".join(tensors)}}},"storage_data":{{'
        return b"".join((head.encode(), entries.getvalue(), b"}}"))


def _finds_own(ranks: Sequence[int], group: Sequence[int]) -> bool:
    """Return whether each rank that holds a block is directed to its own file only."""
    return ranks == group and len(group) > _LARGEST_GROUP


def _completed(arrangement: Arrangement, items: Iterable[TargetTensor], faults: Faults) -> Arrangement:
    """Return the arrangement of all tensors that the metadata list, each with the layout of one stage.

    A tensor that the strategy does not name is whole on every rank. Copies that differ by rank are not listed.
    """
    tensors: dict[str, Arranged] = {}
    for item in items:
        name, arranged = item.name, arrangement.tensors.get(item.name)
        if arranged is not None:
            tensors[name] = arranged
            try:
                if item.tensor.text is None:
                    tensors[name] = _of_one_stage(arrangement, arranged, name, item.tensor.spec.shape)
            except LayoutError as error:
                faults.add(f"tensor {name!r}", error)
        elif not (arrangement.lists_all or item.tensor.varies):
            tensors[name] = Arranged(())
    return replace(arrangement, tensors=tensors)


def _of_one_stage(arrangement: Arrangement, arranged: Arranged, name: str, shape: Shape) -> Arranged:
    """Return the arrangement of a tensor in the first stage, if the blocks of others are different."""
    first = _mesh(arranged)
    if first and len(arranged.meshes) > 1 and first.grid(shape).blocks != arrangement.grid(name, shape).blocks:
        return arranged._replace(meshes=(first,))
    return arranged


def _mesh(arranged: Arranged) -> Mesh | None:
    """Return the first mesh of a tensor, or None if it is whole on all its ranks.

    Raises:
        LayoutError: blocks are of several sizes, or the part of the optimizer cannot be folded into the layout.
    """
    if not arranged.meshes:
        return None
    mesh = arranged.meshes[0]
    if mesh.layout.param_split_shape:
        raise LayoutError(
            "has blocks of several sizes, which the metadata of a Checkpoint 2.0 cannot describe",
            code="unequal-blocks",
        )
    layout = mesh.layout.folded()
    return mesh if layout == mesh.layout else Mesh.of(layout, mesh.ranks[0])


def _described(dtype: str, shape: Shape, grid: Grid, mesh: Mesh | None) -> dict[str, Any]:
    """Return the metadata of a tensor, with blocks in the order of their lowest ranks."""
    replicas: int | list[int] = 0
    layout = None
    if mesh is not None:
        of_rank = {rank: number for number, ranks in enumerate(grid.ranks) for rank in ranks}
        counts: dict[int, int] = {}
        replicas = []
        for number in (of_rank[rank] for rank in mesh.ranks):
            replicas.append(counts.get(number, 0))
            counts[number] = replicas[-1] + 1
        layout = {  # in the order in which mindformers reads them
            "device_matrix": mesh.layout.dev_matrix,
            "tensor_map": [axes if len(axes) > 1 else axes[0] if axes else -1 for axes in mesh.layout.tensor_map],
            "interleaved_parallel": False,
            "alias_name": mesh.axes,
            "rank_list": mesh.ranks,
        }
    numbers = sorted(range(len(grid.blocks)), key=lambda number: grid.ranks[number][0])
    properties = {"dtype": dtype, "replica_id": replicas, "allow_shape_mismatch": False, "allow_to_save": True}
    return {
        "properties": properties,
        "global_shape": shape,
        "axis_fragmentations": mesh.layout.splits if mesh else [1] * len(shape),
        "layout": layout,
        "chunk": [{"global_offset": [number], "local_shape": grid.blocks[number].shape} for number in numbers],
    }


def _json(content: object) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))
