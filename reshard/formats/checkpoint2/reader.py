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
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Literal

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
    from collections.abc import Mapping, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.entries import Entry
    from reshard.core.storage.places import Place

NAME = "Checkpoint 2.0"

_LARGEST = 1 << 20
_NOWHERE = array("i")
_BLOCK, _WHOLE, _OTHER = range(3)  # the part of a tensor that a file has


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
    numbers: dict[tuple[str, int], set[int]] = {}
    for match in filter(None, map(FILES.files.fullmatch, listing)):
        key = f"{match['prefix']}{match['kind']}", int(match["count"])
        numbers.setdefault(key, set()).add(int(match["number"]))
    for (kind, count), present in numbers.items():
        if missing := [number for number in range(count) if number not in present]:
            fault = f"has no file {names(missing)} of {count}, and there is no {METADATA}"
            faults.add(f"{kind}-*-{count:07d}.safetensors", fault, code="missing-shards", hint=COPY_AGAIN)
    faults.raise_if_any(SourceError)
    files, ranks = indexed({0: sorted(directory / name for name in listing)}, None)
    path_of: dict[str, str] = {}
    for file in files:
        for name in file.index.entries:
            other = path_of.setdefault(name, file.path)
            if other != file.path:
                fault = f"is in both {other} and {file.path}, and there is no {METADATA}"
                faults.add(f"tensor {name!r}", fault, code="duplicate-name")
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


class _Joined:
    """Joins metadata and files: a file has the block that the layout gives its rank, if not the whole tensor."""

    def __init__(self, directory: Place, listing: set[str]) -> None:
        self.directory, self.listing = directory, listing
        self.metadata = metadata = Metadata(directory / METADATA)
        self.missing = metadata.files.keys() - listing
        matches = map(FILES.files.fullmatch, metadata.files)
        if self.missing != {match[0] for match in matches if match and match["kind"] == "opt"}:
            faults = Faults(str(directory))
            for name in sorted(self.missing):
                faults.add(name, f"is missing; {METADATA} names it", code="missing-file", hint=COPY_AGAIN)
            faults.raise_if_any(SourceError)
        present = sorted((metadata.ranks[number], name) for name, number in metadata.files.items() if name in listing)
        by_rank: dict[int, list[Place]] = {}
        for rank, name in present:
            by_rank.setdefault(rank, []).append(directory / name)
        self.files, self.ranks = indexed(by_rank, None)
        self.number = {metadata.files[name]: number for number, (_, name) in enumerate(present)}
        self.by_header = by_header(self.files, range(len(self.files)))
        self.in_files: dict[str, dict[int, Entry]] = {}  # by name, and by the number of the header
        for header, alike in enumerate(self.by_header):
            for name, entry in self.files[alike[0]].index.entries.items():
                self.in_files.setdefault(name, {})[header] = entry
        self.tensors: dict[str, Tensor] = {}
        self.unreadable: dict[str, str] = {}
        self.arranged: dict[str, Arranged] = {}
        self.unlisted: list[str] = []
        self._found: dict[tuple[object, ...], tuple[Sharding, tuple[int, ...]] | SourceError] = {}

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint."""
        common, warnings = _common(self.directory)
        if absent := self._absent():
            warnings.append(f"no file of the optimizer is there: {len(absent)} tensors are left out")
        for name, described in self.metadata.listed.items():
            if name not in absent:
                self._add(name, described)
        for name in self.in_files:
            if name not in self.metadata.listed:
                self._add_unlisted(name)
        if not self.tensors:
            raise SourceError(f"{self.directory}: {nothing_readable(self.unreadable)}", code="no-tensors")
        if unnamed := sorted(self.listing - self.metadata.files.keys()):
            warnings.append(f"{METADATA} does not name {names(unnamed, most=3)}, which is not read")
        if self.unlisted:
            unlisted = f"{METADATA} does not list {names(self.unlisted, most=3)}"
            warnings.append(f"{unlisted}, which files have and are read, and MindSpore Transformers does not load")
        devices = self.metadata.devices
        arrangement = Arrangement(self.arranged, range(devices), devices) if self.arranged else None
        return Checkpoint(
            str(self.directory), self.tensors, self.files, self.ranks, warnings=tuple(warnings),
            unreadable=self.unreadable, extras=Extras(METADATA, arrangement, common=common),
        )  # fmt: skip

    def _absent(self) -> set[str]:
        """Return the names of optimizer states whose files are all missing."""
        numbers = {self.metadata.files[name] for name in self.missing}
        return {
            name
            for name, places in self.metadata.places.items()
            if numbers and name not in self.in_files and numbers.issuperset(places[1::NUMBERS])
        }

    def _add(self, name: str, described: Described) -> None:
        """Add a tensor that the metadata list."""
        if described.reason:
            self.unreadable[name] = described.reason
            return
        places = self.metadata.places.get(name, _NOWHERE)
        self.arranged[name] = self._arranged(described, places)
        try:
            self.tensors[name] = self._tensor(name, described, places)
        except SourceError as error:
            self.unreadable[name] = error.message

    def _add_unlisted(self, name: str) -> None:
        """Add a tensor that only files have.

        It is an optimizer state cut like its weight, or a tensor whole on every rank.
        """
        entry = next(iter(self.in_files[name].values()))
        weight_name = name.partition(".")[2]
        weight = self.metadata.listed.get(weight_name)
        if prod(entry.shape) > 1 and not name.startswith("accu_grads."):
            self.unlisted.append(name)
        if weight is not None and weight.mesh is not None and not weight.reason:
            with suppress(SourceError):
                self.tensors[name] = self._tensor(name, weight._replace(dtype=""), _NOWHERE)
                self.arranged[name] = self.arranged.get(weight_name, Arranged(()))
                return
        try:
            self.tensors[name] = self._tensor(name, Described("", entry.shape, None, ""), _NOWHERE)
        except SourceError as error:
            self.unreadable[name] = error.message

    def _tensor(self, name: str, described: Described, places: array[int]) -> Tensor:
        """Return a tensor; raise `SourceError` with a predicate if it cannot be read."""
        block = self.metadata.grid(described)[0][0]
        entries = self.in_files.get(name, {})
        parts = tuple((at, _part(entry.shape, block.shape, described.shape)) for at, entry in entries.items())
        key = (described.mesh, described.shape, parts, places.tobytes())
        if key not in self._found:
            self._found[key] = self._sharding(described, parts, places)
        found = self._found[key]
        if isinstance(found, SourceError):
            raise found
        sharding, firsts = found
        stored = [self.files[number].index.entries[name] for number in firsts]
        dtypes = {entry.dtype.name for entry in stored}
        if dtypes != {described.dtype or stored[0].dtype.name}:
            expected = f" and {described.dtype} in {METADATA}" if described.dtype else "; expected one dtype"
            raise SourceError(f"is {names(sorted(dtypes))} in the files{expected}", code="mixed-dtypes")
        if len({entry.text for entry in stored}) > 1:
            raise SourceError("is text that differs between the ranks", code="ranks-disagree")
        spec, runs = TensorSpec(name, stored[0].dtype, described.shape), tuple(entry.runs for entry in stored)
        return Tensor(spec, sharding, runs, listed=described.mesh is not None, text=stored[0].text)

    def _sharding(
        self, described: Described, in_headers: tuple[tuple[int, int], ...], places: array[int]
    ) -> tuple[Sharding, tuple[int, ...]] | SourceError:
        """Return the files of each block, for all tensors of one layout that the same files hold in the same way.

        Files that the metadata name for the tensor come first; the others count if those lack a block.
        """
        parts = {file: part for header, part in in_headers for file in self.by_header[header]}
        others, are_wrong = self.metadata.outside(described, places)
        numbers = {} if are_wrong else dict(others)
        named = {self.number[file] for file in places[1::NUMBERS] if file in self.number}
        for chosen in ({file: part for file, part in parts.items() if file in named}, parts):
            try:
                return self._in_files(described, chosen, numbers)
            except SourceError as error:
                fault = error
        if are_wrong:
            return SourceError(
                f"{fault.message}: they were lost when it was saved (remove_redundancy)", code="missing-blocks"
            )
        return fault

    def _in_files(
        self, described: Described, parts: Mapping[int, int], numbers: Mapping[int, int]
    ) -> tuple[Sharding, tuple[int, ...]]:
        """Return the blocks with their files, and a file of each distinct header; raise `SourceError` if some lack.

        Args:
            described: the tensor.
            parts: which part each file has.
            numbers: the numbers of the blocks of ranks that are not in the layout; if no other rank has the block.
        """
        blocks, _ = self.metadata.grid(described)
        if others := [self.files[file].path for file, part in parts.items() if part == _OTHER]:
            fault = f"is of another shape in {names(others, most=3)}; expected {shape_text(blocks[0].shape)}"
            raise SourceError(fault, code="wrong-shape")
        replicas = self._cut_files(described, [file for file, part in parts.items() if part == _BLOCK], numbers)
        whole = [file for file, part in parts.items() if part == _WHOLE]
        if whole and any(replicas):
            raise SourceError("is whole in some files and cut in others", code="wrong-shape")
        if whole:  # saved with integrated_save, which ignores the layout
            blocks, replicas = (Block.whole(described.shape),), [whole]
        if lost := [block for block, files in zip(blocks, replicas, strict=True) if not files]:
            fault = f"lacks {len(lost)} of its {len(blocks)} blocks, which no file has, such as {lost[0]}"
            raise SourceError(fault, code="missing-blocks")
        at, firsts = where(self.files, sorted({file for files in replicas for file in files}))
        copies = tuple(tuple(at[file] for file in sorted(files)) for files in replicas)
        return Sharding(blocks, copies), firsts

    def _cut_files(self, described: Described, files: Sequence[int], numbers: Mapping[int, int]) -> list[list[int]]:
        """Return which of the files have each block, by the layout, or by its number."""
        blocks, of_rank = self.metadata.grid(described)
        replicas: list[list[int]] = [[] for _ in blocks]
        outside = []
        for file in files:
            block = 0 if described.mesh is None else of_rank.get(self.ranks[file])
            if block is None:
                outside.append(file)
            else:
                replicas[block].append(file)
        for file in outside:
            number = numbers.get(self.ranks[file], len(blocks))
            if number < len(blocks) and not replicas[number]:
                replicas[number].append(file)
        return replicas

    def _arranged(self, described: Described, places: array[int]) -> Arranged:
        """Return the layout and the ranks of a tensor, without ranks if the layout does not tell their blocks."""
        others, are_wrong = self.metadata.outside(described, places)
        if described.mesh is None:
            return Arranged((), described.shape, others)
        _, of_rank = self.metadata.grid(described)
        ranks = described.mesh.ranks
        expected = [of_rank[rank] for rank in ranks] * (len(others) // len(ranks))
        if [number for _, number in others] != expected or (others and are_wrong):
            return Arranged((replace(described.mesh, ranks=()),))
        return Arranged((described.mesh,), described.shape, others)


def _part(shape: Shape, block: Shape, whole: Shape) -> int:
    """Return which part of a tensor is stored; scalars are stored as (1,)."""
    if shape == block or (not block and shape == (1,)):
        return _BLOCK
    return _WHOLE if shape == whole else _OTHER
