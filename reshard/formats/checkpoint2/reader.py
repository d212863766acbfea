"""Open a Checkpoint 2.0 of MindSpore Transformers, whose metadata list the location of every block.

`metadata.json` gives the layout of each tensor and, for each block by number, the files that hold it and their ranks.
Its `global_offset` is the number of a block in row-major order, not an offset. If layout and number contradict each
other, the layout is right: each rank saves the block of its layout, and mindformers' own loader uses layouts too. The
layout must give ranks listed with the same block the same block; if it does not, different blocks were mistaken for
replicas when saving, and some may be lost. The result is compared with the headers of the files.

A directory without `metadata.json` has whole tensors, and all its files must be present.

Sources: mindformers 2.1.0 `checkpoint/{checkpoint,metadata,sharded_tensor,fully_parallel,reshard}.py`, and what its
code writes and reads, run (`tests/data/checkpoint2`).
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

from reshard.core.layout.arrangement import Arranged, Arrangement
from reshard.core.layout.block import Block, shape_text
from reshard.core.model.assemble import assemble_whole, by_header, where
from reshard.core.model.checkpoint import Checkpoint, Sharding, Tensor, TensorSpec, unreadable_in
from reshard.core.model.facts import Extras
from reshard.core.model.probe import compare_contents
from reshard.core.model.table import nothing_readable
from reshard.core.storage.base import COPY_AGAIN
from reshard.core.storage.small import parse_json, read_small
from reshard.errors import Faults, SourceError, names
from reshard.formats.checkpoint2.metadata import NUMBERS, Described, Metadata
from reshard.formats.checkpoint2.names import COMMON, FILES, METADATA
from reshard.kits.headers import indexed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.entries import Entry
    from reshard.core.storage.places import Place

NAME = "Checkpoint 2.0"

_LARGEST = 1 << 20
_NONE, _BLOCK, _WHOLE, _OTHER = range(4)  # the part of a tensor that a file has


def open_checkpoint2(
    directory: Place, listing: Sequence[str], *, contents: bool | Literal["blocks"] = True
) -> Checkpoint:
    """Open a Checkpoint 2.0, reading its metadata and the headers of its files.

    A tensor with lost or ambiguous blocks is unreadable, with the reason: a plan needs it dropped by name.

    Args:
        directory: the directory of the checkpoint.
        listing: the names in it.
        contents: compare samples of replicas and of different blocks; `blocks` compares the latter alone.

    Raises:
        SourceError: it is incomplete, or the metadata contradict the files; all at once.
    """
    files = {name for name in listing if name.endswith(".safetensors")}
    checkpoint = (
        _Joined(directory, files).checkpoint() if (directory / METADATA).is_file() else _whole(directory, files)
    )
    return compare_contents(checkpoint, {}, contents=contents)


def _whole(directory: Place, listing: set[str]) -> Checkpoint:
    """Open files of whole tensors, all of which must be present."""
    faults = Faults(str(directory))
    counts: dict[tuple[str, str], dict[int, set[int]]] = {}
    for match in filter(None, map(FILES.files.fullmatch, listing)):
        of_kind = counts.setdefault((match["prefix"], match["kind"]), {})
        of_kind.setdefault(int(match["count"]), set()).add(int(match["number"]))
    for (prefix, kind), by_count in counts.items():
        for count, numbers in by_count.items():
            if missing := [number for number in range(count) if number not in numbers]:
                faults.add(
                    f"{prefix}{kind}-*-{count:07d}.safetensors",
                    f"has no file {names(missing)} of {count}, and there is no {METADATA}",
                    code="missing-shards",
                    hint=COPY_AGAIN,
                )
    faults.raise_if_any(SourceError)
    files, ranks = indexed({0: sorted(directory / name for name in listing)}, None)
    path_of: dict[str, str] = {}
    for file in files:
        for name in file.index.entries:
            if name in path_of:
                faults.add(
                    f"tensor {name!r}",
                    f"is in both {path_of[name]} and {file.path}, and there is no {METADATA}",
                    code="duplicate-name",
                )
            path_of[name] = file.path
    faults.raise_if_any(SourceError)
    tensors = assemble_whole(str(directory), files, ranks, range(len(files)))
    common, warnings = _common(directory)
    return Checkpoint(
        str(directory), tensors, files, ranks, warnings=tuple(warnings), unreadable=unreadable_in(files),
        extras=Extras(NAME, common=common),
    )  # fmt: skip


def _common(directory: Place) -> tuple[str, list[str]]:
    """Return the contents of `common.json`, and warnings, such as that the training was not healthy."""
    path = directory / COMMON
    if not path.is_file():
        return "", [f"{directory} has no {COMMON}, so the step of the training is unknown"]
    raw = read_small(path, COMMON, _LARGEST, SourceError)
    try:
        content = parse_json(raw, [])
    except ValueError as error:
        raise SourceError(f"{path} is not JSON", code="not-json", facts=[str(error)]) from None
    if not isinstance(content, dict):
        raise SourceError(f"{path} holds a JSON {type(content).__name__}; expected an object", code="wrong-type")
    unhealthy = [f"{directory} was saved by a training that was not healthy (ckpt_status 1 in {COMMON})"]
    return raw.decode(), unhealthy if content.get("ckpt_status") == 1 else []


class _Cut(NamedTuple):
    """The blocks of a tensor, and the numbers of the files that hold each.

    Attributes:
        sharding: the blocks and their files.
        firsts: a file of each distinct header.
        contradicts: whether the numbers of blocks differ from those of the layout.
        arranged: the layout and the ranks.
        reason: why it cannot be read, or "".
    """

    sharding: Sharding
    firsts: tuple[int, ...]
    contradicts: bool = False
    arranged: Arranged = Arranged(())
    reason: str = ""


class _Joined:
    """Joins metadata and files.

    Blocks are located by the metadata, else by the layout and the ranks of files.
    """

    def __init__(self, directory: Place, listing: set[str]) -> None:
        self.directory, self.listing = directory, listing
        self.metadata = metadata = Metadata(directory / METADATA)
        self.missing = {name for name in metadata.files if name not in listing}
        self._refuse_gaps()
        present = sorted((metadata.ranks[number], name) for name, number in metadata.files.items() if name in listing)
        by_rank: dict[int, list[Place]] = {}
        for rank, name in present:
            by_rank.setdefault(rank, []).append(directory / name)
        self.files, self.ranks = indexed(by_rank, None)
        self.number = {metadata.files[name]: number for number, (_, name) in enumerate(present)}
        groups = by_header(self.files, range(len(self.files)))
        self.by_header = [(self.files[group[0]].index.entries, group) for group in groups]
        self.tensors: dict[str, Tensor] = {}
        self.unreadable: dict[str, str] = {}
        self.arranged: dict[str, Arranged] = {}
        self.misnumbered: list[str] = []
        self.unlisted: list[str] = []
        self._by_metadata: dict[tuple[int | None, Shape, bytes], _Cut] = {}
        self._by_files: dict[tuple[int | None, Shape, bytes], _Cut] = {}
        self._grids: dict[tuple[int, Shape], tuple[tuple[Block, ...], dict[int, int]]] = {}
        self._by_group: dict[tuple[int | None, Shape, int], tuple[set[int], tuple[int, ...]]] = {}

    def _refuse_gaps(self) -> None:
        """Check that no file is missing, except all files of the optimizer together."""
        faults = Faults(str(self.directory))
        matches = map(FILES.files.fullmatch, self.metadata.files)
        if self.missing != {match[0] for match in matches if match and match["kind"] == "opt"}:
            for name in self.missing:
                faults.add(name, f"is missing; {METADATA} names it", code="missing-file", hint=COPY_AGAIN)
        faults.raise_if_any(SourceError)

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint."""
        common, warnings = _common(self.directory)
        if absent := self._absent():
            warnings.append(f"no file of the optimizer is there: {len(absent)} tensors are left out")
        for name, described in self.metadata.listed.items():
            if name not in absent:
                self._add(name, described.reason or self._tensor(name, described))
        for name in dict.fromkeys(name for entries, _ in self.by_header for name in entries):
            if name not in self.metadata.listed:
                self._add_unlisted(name)
        if not self.tensors:
            raise SourceError(f"{self.directory}: {nothing_readable(self.unreadable)}", code="no-tensors")
        if unnamed := sorted(self.listing - self.metadata.files.keys()):
            warnings.append(f"{METADATA} does not name {names(unnamed, most=3)}, which is not read")
        defects = tuple(self._defects())
        devices = self.metadata.devices
        arrangement = Arrangement(self.arranged, range(devices), devices) if self.arranged else None
        return Checkpoint(
            str(self.directory), self.tensors, self.files, self.ranks, warnings=(*defects, *warnings),
            unreadable=self.unreadable, extras=Extras(METADATA, arrangement, defects, common=common),
        )  # fmt: skip

    def _defects(self) -> Iterator[str]:
        """Yield the mistakes in the metadata that do not prevent reading."""
        if self.misnumbered:
            yield (
                f"{METADATA}: numbers the blocks of {names(self.misnumbered, most=3)} otherwise than their layouts "
                "say, by which they are read, as MindSpore Transformers does; nothing is lost"
            )
        if self.unlisted:
            yield (
                f"{METADATA}: does not list {names(self.unlisted, most=3)}, which files have and are read, and "
                "MindSpore Transformers does not load"
            )

    def _add(self, name: str, tensor: Tensor | str) -> None:
        if isinstance(tensor, Tensor):
            self.tensors[name] = tensor
        else:
            self.unreadable[name] = tensor

    def _absent(self) -> set[str]:
        """Return the names of optimizer states whose files are all missing."""
        numbers = {self.metadata.files[name] for name in self.missing}
        present = {name for entries, _ in self.by_header for name in entries}
        return {
            name
            for name, places in self.metadata.places.items()
            if numbers and name not in present and numbers.issuperset(places[1::NUMBERS])
        }

    def _tensor(self, name: str, described: Described) -> Tensor | str:
        """Return a tensor, or the reason why it cannot be read."""
        places = self.metadata.places.get(name, array("i"))
        key = (described.mesh, described.shape, places.tobytes())
        cut = self._by_metadata.get(key)
        if cut is None:
            cut = self._by_metadata[key] = self._cut_by_metadata(described, places)
        self.arranged[name] = cut.arranged
        shape = cut.sharding.blocks[0].shape
        entries = [self.files[number].index.entries.get(name) for number in cut.firsts]
        if cut.reason or not all(entry and _is_block(entry.shape, shape) for entry in entries):
            by_files = self._cut_by_files(name, described)
            cut = by_files._replace(
                reason=by_files.reason and (cut.reason or by_files.reason), contradicts=cut.contradicts
            )
        if cut.contradicts and not cut.reason:
            self.misnumbered.append(name)
        return self._assembled(name, described, cut)

    def _assembled(self, name: str, described: Described, cut: _Cut) -> Tensor | str:
        """Return a tensor with known blocks, or the reason why it cannot be read."""
        if cut.reason:
            return cut.reason
        stored = [self.files[number].index.entries[name] for number in cut.firsts]
        dtypes = {entry.dtype.name: entry.dtype for entry in stored}
        if dtypes.keys() != {described.dtype or stored[0].dtype.name}:
            expected = f" and {described.dtype} in {METADATA}" if described.dtype else "; expected one dtype"
            return f"is {names(sorted(dtypes))} in the files{expected}"
        if len({entry.text for entry in stored}) > 1:
            return "is text that differs between the ranks"
        spec, runs = TensorSpec(name, stored[0].dtype, described.shape), tuple(entry.runs for entry in stored)
        return Tensor(spec, cut.sharding, runs, listed=described.mesh is not None, text=stored[0].text)

    def _cut_by_metadata(self, described: Described, places: Sequence[int]) -> _Cut:
        """Locate blocks by the metadata, for tensors with one shape, mesh and places."""
        blocks, of_rank = self._grid(described)
        replicas: list[list[int]] = [[] for _ in blocks]
        unplaced: list[tuple[int, int]] = []
        outside: dict[int, int] = {}  # ranks that the layout in the metadata does not cover, and their blocks
        contradicts = False
        for number, file, rank, group in zip(*(places[at::NUMBERS] for at in range(NUMBERS)), strict=True):
            expected, outsiders = self._blocks_of_group(described, group)
            contradicts |= not expected <= {number}
            outside |= dict.fromkeys(outsiders, number)
            block = 0 if described.mesh is None else of_rank.get(rank)
            if file not in self.number:
                continue
            if block is None:
                unplaced.append((number, self.number[file]))
            else:
                replicas[block].append(self.number[file])
        for number, at in () if contradicts else unplaced:
            if number < len(blocks) and not replicas[number]:
                replicas[number].append(at)
        lost = [number for number, files in enumerate(replicas) if not files]
        reason = ""
        if lost:
            reason = f"lacks {len(lost)} of its {len(blocks)} blocks, which no file has, such as {blocks[lost[0]]}" + (
                ": they were lost when it was saved (remove_redundancy)" if contradicts else ""
            )
        cut = self._cut(blocks, replicas, reason)
        arranged = self._arranged(described, of_rank, outside, contradicts=contradicts)
        return cut._replace(contradicts=contradicts, arranged=arranged)

    def _blocks_of_group(self, described: Described, group: int) -> tuple[set[int], tuple[int, ...]]:
        """Return the blocks of a group's ranks by the layout, and the ranks it does not cover."""
        key = (described.mesh, described.shape, group)
        if key not in self._by_group:
            _, of_rank = self._grid(described)
            ranks = self.metadata.groups[group]
            blocks = {of_rank[rank] for rank in ranks if rank in of_rank} if described.mesh is not None else {0}
            self._by_group[key] = blocks, tuple(rank for rank in ranks if rank not in of_rank)
        return self._by_group[key]

    def _arranged(
        self, described: Described, of_rank: Mapping[int, int], outside: Mapping[int, int], *, contradicts: bool
    ) -> Arranged:
        """Return the layout and the ranks of a tensor, without ranks if the layout does not tell their blocks."""
        others = tuple(sorted(outside.items()))
        if described.mesh is None:
            return Arranged((), described.shape, others)
        mesh = list(self.metadata.meshes)[described.mesh]
        expected = [of_rank[rank] for rank in mesh.ranks] * (len(others) // len(mesh.ranks))
        fits = [number for _, number in others] == expected and not (others and contradicts)
        return Arranged((mesh,), described.shape, others) if fits else Arranged((replace(mesh, ranks=()),))

    def _cut(self, blocks: Sequence[Block], replicas: Sequence[Sequence[int]], reason: str = "") -> _Cut:
        at, firsts = where(self.files, sorted({number for copies in replicas for number in copies}))
        sharding = Sharding(tuple(blocks), tuple(tuple(at[number] for number in sorted(copies)) for copies in replicas))
        return _Cut(sharding, firsts, reason=reason)

    def _grid(self, described: Described) -> tuple[tuple[Block, ...], dict[int, int]]:
        """Return the blocks of a tensor, and the number of each rank's block."""
        if described.mesh is None:
            return (Block.whole(described.shape),), {}
        if (described.mesh, described.shape) not in self._grids:
            mesh = list(self.metadata.meshes)[described.mesh]
            grid = mesh.layout.grid(described.shape)
            of_rank = {mesh.ranks[device]: number for number, devices in enumerate(grid.ranks) for device in devices}
            self._grids[described.mesh, described.shape] = grid.blocks, of_rank
        return self._grids[described.mesh, described.shape]

    def _cut_by_files(self, name: str, described: Described) -> _Cut:
        """Locate a tensor by headers, if the metadata misplace it.

        Each file has its rank's block, or the whole tensor.

        The result is cached for tensors that the same files hold in the same way.
        """
        blocks, of_rank = self._grid(described)
        kinds = bytes(_kind(entries.get(name), blocks[0].shape, described.shape) for entries, _ in self.by_header)
        if _OTHER in kinds:
            entries, numbers = self.by_header[kinds.index(_OTHER)]
            shape = f"{shape_text(entries[name].shape)} in {self.files[numbers[0]].path}"
            return self._cut(blocks, [], f"is of shape {shape}; expected {shape_text(blocks[0].shape)}")
        key = (described.mesh, described.shape, kinds)
        if key not in self._by_files:
            replicas: list[list[int]] = [[] for _ in blocks]
            whole: list[int] = []
            for kind, (_, numbers) in zip(kinds, self.by_header, strict=True):
                whole += numbers if kind == _WHOLE else ()
                for number in numbers if kind == _BLOCK else ():
                    block = 0 if described.mesh is None else of_rank.get(self.ranks[number])
                    if block is not None:
                        replicas[block].append(number)
            if whole and not any(replicas):  # saved with integrated_save, which ignores the layout
                self._by_files[key] = self._cut([Block.whole(described.shape)], [whole])
            else:
                lacking = "whole in some files and cut in others" if whole else "not in the files that should have it"
                reason = "" if all(replicas) and not whole else f"is {lacking}, as {METADATA} says"
                self._by_files[key] = self._cut(blocks, replicas, reason)
        return self._by_files[key]

    def _add_unlisted(self, name: str) -> None:
        """Add a tensor that only files have.

        It is an optimizer state cut like its weight, or a tensor whole on every rank.
        """
        entry = next(entries[name] for entries, _ in self.by_header if name in entries)
        weight = self.metadata.listed.get(_weight(name))
        tensor: Tensor | str = ""
        if weight is not None and weight.mesh is not None and not weight.reason:
            tensor = self._assembled(name, weight._replace(dtype=""), self._cut_by_files(name, weight))
        if isinstance(tensor, Tensor):
            self.arranged[name] = self.arranged.get(_weight(name), Arranged(()))
        else:
            described = Described("", entry.shape, None, "")
            tensor = self._assembled(name, described, self._cut_by_files(name, described))
        self._add(name, tensor)
        if prod(entry.shape) > 1 and not name.startswith("accu_grads."):
            self.unlisted.append(name)


def _weight(name: str) -> str:
    """Return the name of the weight of an optimizer state."""
    return name.partition(".")[2]


def _kind(entry: Entry | None, block: Shape, whole: Shape) -> int:
    if entry is None:
        return _NONE
    return _BLOCK if _is_block(entry.shape, block) else _WHOLE if entry.shape == whole else _OTHER


def _is_block(shape: Shape, block: Shape) -> bool:
    """Return whether a stored shape equals a block's; scalars are stored as (1,)."""
    return shape == block or (not block and shape == (1,))
