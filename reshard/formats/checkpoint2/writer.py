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
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BytesIO
from math import inf, prod
from typing import TYPE_CHECKING, Any

from reshard.arguments import checked_fields
from reshard.core.layout.arrangement import Arranged
from reshard.core.layout.mesh import Mesh
from reshard.core.model.entries import ShardFiles, wants
from reshard.core.runs import iteration_of
from reshard.core.storage.cipher import store_of
from reshard.core.storage.places import as_place
from reshard.core.storage.small import parse_json
from reshard.core.target import (
    MAX_SHARD_BYTES,
    MOST_STEPS,
    TargetFile,
    check_size,
    check_step,
    literal,
    one_after_the_other,
)
from reshard.errors import LayoutError, Option, Text, UsageError, names
from reshard.formats.checkpoint2.names import COMMON, FILES, METADATA
from reshard.formats.dcp.names import TRACKER
from reshard.formats.ranks.writer import Ranks, copied_whole
from reshard.kits import safetensors
from reshard.strategy.names import TRAINING_STATE, optimizer_states

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

PREFIX = "checkpoint"
"""Default prefix of file names, as in mindformers' dynamic-graph mode."""

_COMMON_KEYS = (
    "epoch_num", "step_num", "global_step", "loss_scale", "global_batch_size", "consumed_samples", "ckpt_status",
)  # fmt: skip
"""Keys of mindformers' `CommonInfo`, which refuses any other key."""

_NEWER_KEYS = {"consumed_samples", "ckpt_status"}  # a training may leave these out, too
_LONGEST_PREFIX = 200  # a file name may have 255 bytes
_LARGEST_GROUP = 64
_PLACE_BYTES = 250  # resident memory of making the metadata, for a rank that stores a block
_RANK_BYTES = 20  # the same for the number of a rank
_BREAKING = re.compile("[,()'\"\\\\]")


@checked_fields
@dataclass(frozen=True, slots=True)
class Checkpoint2:
    """The files of a Checkpoint 2.0.

    These are `iteration_N/PREFIX-model-K-of.safetensors` and so on, `common.json`, `metadata.json` of blocks, and the
    tracker.

    Attributes:
        step: N, the number of steps done; by default the source's step.
        prefix: the prefix of file names, or `""`; by default the source's prefix, else `checkpoint`.
        max_shard_size: how many bytes of whole tensors a file may hold, unless one tensor has more. Blocks are in a
            file of weights and a file of states for each rank.
        common: the contents of `common.json`; by default the source's file, or made from the source's progress.

    >>> source = reshard.open("src_checkpoints", strategy="src_strategy.ckpt")
    >>> report = reshard.plan(source, "dst_strategy.ckpt", files=reshard.Checkpoint2(step=4)).run("run")
    >>> report.files[0]
    'iteration_00000004/checkpoint-model-0000000-0000004.safetensors'
    """

    step: int | None = None
    prefix: str | None = None
    max_shard_size: int = MAX_SHARD_BYTES
    common: str | None = None

    def __post_init__(self) -> None:
        check_size(self.max_shard_size)
        check_step(self.step)
        try:
            _parse_common(self.common or "{}")
        except ValueError as error:
            raise UsageError(
                f"common is not a JSON object, as {COMMON} is", code="not-json", facts=[str(error)]
            ) from None
        prefix = self.prefix or ""
        signs = prefix.startswith(".") or any(sign in prefix for sign in "/\\{}")
        if not prefix.isprintable() or signs or len(prefix.encode()) > _LONGEST_PREFIX:
            raise UsageError(
                f"prefix {prefix!r:.60} cannot begin a file name", code="bad-name", hint="give e.g. 'checkpoint'"
            )

    def of(self, source: Checkpoint) -> Checkpoint2:
        """Return a copy with missing values filled in from a source.

        Raises:
            UsageError: the step is unknown.
        """
        progress = _progress(source)
        step = progress["global_step"] if self.step is None else self.step
        if step is None:
            raise UsageError(
                f"{source.root} does not say how many steps were done", code="missing-step",
                hint=Text("give ", Option("target_step")),
            )  # fmt: skip
        prefix, common = self.prefix, self.common
        if prefix is None:
            matches = (FILES.files.fullmatch(as_place(file.path).name) for file in source.files)
            prefix = next((match["prefix"].removesuffix("-") for match in matches if match), PREFIX)
        if common is None:
            common = _common(source)
        if common is None:
            common = json.dumps(dict.fromkeys(_COMMON_KEYS) | progress | {"global_step": step}, indent=4)
        return replace(self, step=step, prefix=prefix, common=common)

    @property
    def directory(self) -> str:
        """Name of the iteration's directory."""
        return f"iteration_{self.step:08d}"

    def path(self, kind: str, extension: str) -> str:
        """Return the path of a kind of files, with placeholders for number and count."""
        prefix = f"{self.prefix}-" if self.prefix else ""
        return f"{self.directory}/{prefix}{kind}-{{number:07d}}-{{count:07d}}{extension}"

    def shard_files(self, tensors: Sequence[SizedTensor], extension: str) -> ShardFiles:
        """Fill one file after the other, files of weights first."""
        paths: list[str] = []
        file_of: dict[str, int] = {}
        for kind, kind_tensors in _kinds(tensors):
            numbers = one_after_the_other(kind_tensors, self.max_shard_size)
            file_of |= {name: len(paths) + number for name, number in numbers.items()}
            count = max(numbers.values()) + 1
            paths += [self.path(kind, extension).format(number=number, count=count) for number in range(count)]
        return ShardFiles(tuple(paths), file_of, notes=_NOTES)


_NOTES = {"format": "ms"}


@dataclass(frozen=True, slots=True)
class _FilesOfRanks:
    """A file of weights and one of states for each rank."""

    files: Checkpoint2

    def shard_files(self, tensors: Sequence[SizedTensor], extension: str) -> ShardFiles:
        kinds = _kinds(tensors)
        part_of = {tensor.name: part for part, (_, kind_tensors) in enumerate(kinds) for tensor in kind_tensors}
        return ShardFiles(
            tuple(self.files.path(kind, extension) for kind, _ in kinds), part_of, notes=_NOTES, numbered=True
        )


def _kinds(tensors: Sequence[SizedTensor]) -> list[tuple[str, list[SizedTensor]]]:
    """Return the tensors of each kind of file; text belongs to the weights."""
    states = optimizer_states({tensor.name for tensor in tensors})
    tensors_of: dict[str, list[SizedTensor]] = {"model": [], "opt": []}
    for tensor in tensors:
        is_state = tensor.name in states or tensor.name in TRAINING_STATE
        tensors_of["opt" if is_state and not tensor.is_text else "model"].append(tensor)
    return [(kind, kind_tensors) for kind, kind_tensors in tensors_of.items() if kind_tensors]


class Checkpoint2Target(Ranks):
    """The files of an iteration, its metadata and the tracker file."""

    format = safetensors.NAME

    def __init__(self, inputs: TargetInputs) -> None:
        request, items, arrangement, faults = inputs.request, inputs.items, inputs.arrangement, inputs.faults
        self._layout, self._arrangement = request.files, arrangement
        self._full = None if arrangement is None else _completed(arrangement, items, faults)
        if self._full is not None:
            files = _FilesOfRanks(request.files)
            request = replace(request, files=files)
        super().__init__(inputs._replace(request=request, arrangement=self._full))
        if self._full is not None:
            for item in items:
                if _BREAKING.search(item.name) or not item.name.isprintable() or item.name != item.name.strip():
                    faults.add(
                        f"tensor {item.name!r}",
                        "has a comma, bracket, quote, control character, or space at an end, "
                        "so mindformers could not read the metadata",
                        code="bad-name", hint="rename it",
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
        metadata_files = [TargetFile(first, f"{directory}/{name}", literal(text), last=True) for name, text in contents]
        tracker = literal(f"{self._layout.step}".encode())
        return (*tensor_files, *metadata_files, TargetFile(first, TRACKER, tracker, last=True, pointer=True))

    def warnings(self) -> tuple[str, ...]:
        """Warn of tensors that all ranks get whole, and of faults of `common.json`."""
        result = copied_whole(self._source, self._arrangement, self._items)
        common = _parse_common(self._layout.common or "{}")
        unknown = [key for key in _COMMON_KEYS if key not in _NEWER_KEYS and common.get(key) is None]
        if unknown and self._layout.common != _common(self._source):
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
            tensors[name] = _of_one_stage(arrangement, arranged, item, faults)
        elif not (arrangement.lists_all or item.tensor.varies):
            tensors[name] = Arranged(())
    return replace(arrangement, tensors=tensors)


def _of_one_stage(arrangement: Arrangement, arranged: Arranged, item: TargetTensor, faults: Faults) -> Arranged:
    """Return the arrangement of a tensor in one stage, if the blocks of others are different."""
    name, shape = item.name, item.tensor.spec.shape
    if item.tensor.text is not None or not arranged.meshes:
        return arranged
    try:
        first = _mesh(arranged)
        if first and len(arranged.meshes) > 1 and first.grid(shape).blocks != arrangement.grid(name, shape).blocks:
            return arranged._replace(meshes=(first,))
    except LayoutError as error:
        faults.add(f"tensor {name!r}", error)
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
    return {
        "properties": {
            "dtype": dtype,
            "replica_id": replicas,
            "allow_shape_mismatch": False,
            "allow_to_save": True,
        },
        "global_shape": shape,
        "axis_fragmentations": mesh.layout.splits if mesh else [1] * len(shape),
        "layout": layout,
        "chunk": [{"global_offset": [number], "local_shape": grid.blocks[number].shape} for number in numbers],
    }


def _json(content: object) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


def _parse_common(common: str) -> dict[str, Any]:
    """Parse `common.json`; raise `ValueError` if it is not a JSON object."""
    parsed = parse_json(common.encode(), [])
    if not isinstance(parsed, dict):
        raise ValueError("it is not an object")  # noqa: TRY004 -- it is about a file's contents
    return parsed


def _common(source: Checkpoint) -> str | None:
    """Return the contents of `common.json` of a source, or of the one that a store was made of; None without it."""
    with suppress(ValueError):  # any program may have written a store
        if source.extras.common and _parse_common(source.extras.common):
            return source.extras.common
    return None


def _iteration(source: Checkpoint) -> int | None:
    """Return the steps done, by the directory name, `common.json` or a DCP, or None."""
    if source.extras.described_by and source.format is not None and source.format.has_steps:
        number = iteration_of(as_place(source.root), numbered=source.format.is_numbered)
        if number is not None:
            return number
    from reshard.kits.torch.objects import iteration  # not on every start

    common = _common(source)
    step = _parse_common(common).get("global_step") if common else iteration(source)
    return step if type(step) is int and 0 <= step < MOST_STEPS else None


def _progress(source: Checkpoint) -> dict[str, Any]:
    """Return the training's progress by key of `common.json`; unknown values are None.

    File names count steps from the beginning of the epoch.
    """
    progress: dict[str, Any] = {key: _number(source, key, int) for key in ("epoch_num", "step_num", "global_step")}
    progress["loss_scale"] = _number(source, "loss_scale", int, float)
    if source.opening.step is not None:
        epoch, step = map(int, source.opening.step.name.split("_"))
        from_name = {"epoch_num": epoch, "step_num": step} | ({"global_step": step} if epoch == 1 else {})
        progress = {key: from_name.get(key) if value is None else value for key, value in progress.items()}
    iteration = _iteration(source)
    return progress if iteration is None else progress | {"global_step": iteration}


def _number(source: Checkpoint, name: str, *types: type) -> int | float | None:
    """Return the value of a tensor with one number of `types`, or None if below 0."""
    tensor = source.tensors.get(name)
    if tensor is None or tensor.text is not None or tensor.varies or prod(tensor.spec.shape) != 1:
        return None
    import numpy as np  # not on every start

    at = tensor.sharding.replicas[0][0]
    content = bytearray(tensor.spec.dtype.itemsize)
    path = source.files[at.file].path
    store_of(source.coding).read(wants(path, tensor.runs[at.runs_index], 0, memoryview(content)))
    value = np.frombuffer(content, tensor.spec.dtype.numpy())[0].item()
    return value if type(value) in types and 0 <= value < inf else None
