"""Opening a Checkpoint 2.0 of MindSpore Transformers: its metadata list the places of every block.

`metadata.json` says of each tensor its layout, and for each of its blocks, by number, the files that hold it and whose
ranks' they are. `global_offset` there is the number of a block, row by row, and not an offset. Where layout and number
contradict each other the layout is right: each rank saves what its layout gives it, and mindformers' own loader goes by
layouts too. Ranks that are said to have the same block must be given it by the layout; where they are not, replicas
were mistaken for each other, and blocks may be lost. What is believed is compared with the headers of the files.

A directory without `metadata.json` has whole tensors, in files of which all must be there.

Sources: mindformers 2.1.0 `checkpoint/{checkpoint,metadata,sharded_tensor,fully_parallel,reshard}.py`, and what its
code writes and reads, run (`tests/data/checkpoint2`).
"""

from __future__ import annotations

from array import array
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

from reshard.errors import Faults, SourceError, names
from reshard.formats.directories import CHECKPOINT2
from reshard.layout.block import Block, shape_text
from reshard.readers.checkpoint2.metadata import METADATA, NUMBERS, Described, Metadata
from reshard.readers.listed import nothing_readable
from reshard.source.assemble import assemble_whole, by_header, where
from reshard.source.checkpoint import Checkpoint, Extras, Sharding, Tensor, TensorSpec
from reshard.source.headers import indexed
from reshard.source.probe import compare_contents
from reshard.storage.small import parse_json, read_small

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.formats.entries import Entry
    from reshard.layout.block import Shape
    from reshard.storage.places import Place

NAME = "Checkpoint 2.0"
COMMON = "common.json"

_LARGEST = 1 << 20
_NONE, _BLOCK, _WHOLE, _OTHER = range(4)  # what a file has of a tensor


def open_checkpoint2(place: Place, there: Sequence[str], *, contents: bool | Literal["blocks"] = True) -> Checkpoint:
    """Open a Checkpoint 2.0, reading its metadata and the headers of its files.

    A tensor of which blocks are lost or cannot be told is unreadable, with the reason: a plan needs it dropped by name.

    Args:
        place: its directory.
        there: the names of what is in it.
        contents: compare samples of replicas and of different blocks; `blocks` compares the latter alone.

    Raises:
        SourceError: it is incomplete, or the metadata contradict the files; all at once.
    """
    files = {name for name in there if name.endswith(".safetensors")}
    found = _Joined(place, files).checkpoint() if (place / METADATA).is_file() else _whole(place, files)
    return compare_contents(found, {}, contents=contents)


def _whole(place: Place, there: set[str]) -> Checkpoint:
    """Open files of whole tensors, of which all must be there."""
    faults = Faults(str(place))
    counts: dict[tuple[str, str], dict[int, set[int]]] = {}
    for match in filter(None, map(CHECKPOINT2.files.fullmatch, there)):
        of_kind = counts.setdefault((match["prefix"], match["kind"]), {})
        of_kind.setdefault(int(match["count"]), set()).add(int(match["number"]))
    for (prefix, kind), by_count in counts.items():
        for count, numbers in by_count.items():
            if missing := [number for number in range(count) if number not in numbers]:
                faults.add(
                    f"{prefix}{kind}-*-{count:07d}.safetensors",
                    f"lacks number {names(missing)} of {count}, and there is no {METADATA}",
                    code="missing-shards",
                )
    faults.raise_if_any(SourceError)
    files, ranks = indexed({0: sorted(place / name for name in there)}, None)
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
    tensors = assemble_whole(str(place), files, ranks, range(len(files)))
    return Checkpoint(str(place), tensors, files, ranks, warnings=tuple(_health(place)), extras=Extras(NAME))


def _health(place: Place) -> Iterator[str]:
    """Yield what the run says of its state: a training that is not healthy saves it with the checkpoint."""
    if not (place / COMMON).is_file():
        yield f"{place} has no {COMMON}, so the step of the training is unknown"
        return
    try:
        content = parse_json(read_small(place / COMMON, COMMON, _LARGEST, SourceError), [])
    except ValueError as error:
        raise SourceError(f"{place / COMMON} is not JSON", code="not-json", facts=[str(error)]) from None
    if not isinstance(content, dict):
        raise SourceError(
            f"{place / COMMON} holds a JSON {type(content).__name__}; expected an object", code="wrong-type"
        )
    if content.get("ckpt_status") == 1:
        yield f"{place} was saved by a training that was not healthy (ckpt_status 1 in {COMMON})"


class _Cut(NamedTuple):
    """Blocks, and the files that have each, by their numbers.

    Attributes:
        sharding: of these.
        firsts: a file of each header.
        contradicts: the numbers of blocks are not those that the layout gives.
        holders: as in `Checkpoint`.
        reason: why it cannot be read; else empty.
    """

    sharding: Sharding
    firsts: tuple[int, ...]
    contradicts: bool = False
    holders: tuple[int, ...] = ()
    reason: str = ""


class _Joined:
    """Joins metadata and files: a block is where the metadata say, else where the layout gives it to a file's rank."""

    def __init__(self, place: Place, there: set[str]) -> None:
        self.place, self.there = place, there
        self.said = said = Metadata(place / METADATA)
        self.gone = {name for name in said.files if name not in there}
        self._refuse_gaps()
        present = sorted((said.ranks[number], name) for name, number in said.files.items() if name in there)
        by_rank: dict[int, list[Place]] = {}
        for rank, name in present:
            by_rank.setdefault(rank, []).append(place / name)
        self.files, self.ranks = indexed(by_rank, None)
        self.number = {said.files[name]: number for number, (_, name) in enumerate(present)}
        groups = by_header(self.files, range(len(self.files)))
        self.alike = [(self.files[some[0]].index.entries, some) for some in groups]
        self.tensors: dict[str, Tensor] = {}
        self.unreadable: dict[str, str] = {}
        self.holders: dict[str, tuple[int, ...]] = {}
        self.contradicting: list[str] = []
        self.unlisted: list[str] = []
        self._placed: dict[tuple[int | None, Shape, bytes], _Cut] = {}
        self._found: dict[tuple[int | None, Shape, bytes], _Cut] = {}
        self._grids: dict[tuple[int, Shape], tuple[tuple[Block, ...], dict[int, int]]] = {}
        self._held: dict[tuple[int | None, Shape, int], tuple[set[int], tuple[int, ...]]] = {}

    def _refuse_gaps(self) -> None:
        """Check that all files are there; but all of the optimizer may be left out."""
        faults = Faults(str(self.place))
        matches = map(CHECKPOINT2.files.fullmatch, self.said.files)
        if self.gone != {match[0] for match in matches if match and match["kind"] == "opt"}:
            for name in self.gone:
                faults.add(name, f"is missing; {METADATA} names it", code="missing-file")
        faults.raise_if_any(SourceError)

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint."""
        warnings = list(_health(self.place))
        if absent := self._absent():
            warnings.append(f"no file of the optimizer is there: {len(absent)} tensors are left out")
        for name, one in self.said.listed.items():
            if name not in absent:
                self._add(name, one.reason or self._tensor(name, one))
        for name in dict.fromkeys(name for entries, _ in self.alike for name in entries):
            if name not in self.said.listed:
                self._add_unlisted(name)
        if not self.tensors:
            raise SourceError(f"{self.place}: {nothing_readable(self.unreadable)}", code="no-tensors")
        if others := sorted(self.there - self.said.files.keys()):
            warnings.append(f"{METADATA} does not name {names(others, most=3)}, which is not read")
        defects = tuple(self._defects())
        layouts = [mesh.layout for mesh in self.said.meshes]
        listed = ((name, self.said.listed.get(name) or self.said.listed[_weight(name)]) for name in self.holders)
        of_tensors = {name: layouts[one.mesh] for name, one in listed if one.mesh is not None}
        return Checkpoint(
            str(self.place), self.tensors, self.files, self.ranks, warnings=(*defects, *warnings),
            unreadable=self.unreadable, extras=Extras(METADATA, of_tensors, self.holders, defects),
        )  # fmt: skip

    def _defects(self) -> Iterator[str]:
        """Yield what the metadata say wrongly though all of it can be read."""
        if self.contradicting:
            yield (
                f"{METADATA}: numbers the blocks of {names(self.contradicting, most=3)} otherwise than their layouts "
                "say, by which they are read, as MindSpore Transformers does; nothing is lost"
            )
        if self.unlisted:
            yield (
                f"{METADATA}: does not list {names(self.unlisted, most=3)}, which files have and are read, and "
                "MindSpore Transformers does not load"
            )

    def _add(self, name: str, found: Tensor | str) -> None:
        if isinstance(found, Tensor):
            self.tensors[name] = found
        else:
            self.unreadable[name] = found

    def _absent(self) -> set[str]:
        """Return the optimizer states of a checkpoint of which all such files are left out."""
        numbers = {self.said.files[name] for name in self.gone}
        there = {name for entries, _ in self.alike for name in entries}
        return {
            name
            for name, places in self.said.places.items()
            if numbers and name not in there and numbers.issuperset(places[1::NUMBERS])
        }

    def _tensor(self, name: str, one: Described) -> Tensor | str:
        """Return a tensor, or why it cannot be read."""
        places = self.said.places.get(name, array("i"))
        key = (one.mesh, one.shape, places.tobytes())
        cut = self._placed.get(key)
        if cut is None:
            cut = self._placed[key] = self._in_places(one, places)
        self.holders[name] = cut.holders
        shape = cut.sharding.blocks[0].shape
        entries = [self.files[number].index.entries.get(name) for number in cut.firsts]
        if cut.reason or not all(entry and _is_block(entry.shape, shape) for entry in entries):
            found = self._in_files(name, one)
            cut = found._replace(reason=found.reason and (cut.reason or found.reason), contradicts=cut.contradicts)
        if cut.contradicts and not cut.reason:
            self.contradicting.append(name)
        return self._of(name, one, cut)

    def _of(self, name: str, one: Described, cut: _Cut) -> Tensor | str:
        """Return a tensor whose blocks are known, or why it cannot be read."""
        if cut.reason:
            return cut.reason
        held = [self.files[number].index.entries[name] for number in cut.firsts]
        dtypes = {entry.dtype.name: entry.dtype for entry in held}
        if dtypes.keys() != {one.dtype or held[0].dtype.name}:
            listed = f" and {one.dtype} in {METADATA}" if one.dtype else "; expected one dtype"
            return f"is {names(sorted(dtypes))} in the files{listed}"
        if len({entry.text for entry in held}) > 1:
            return "is text that differs between the ranks"
        spec, runs = TensorSpec(name, held[0].dtype, one.shape), tuple(entry.runs for entry in held)
        return Tensor(spec, cut.sharding, runs, listed=one.mesh is not None, text=held[0].text)

    def _in_places(self, one: Described, places: Sequence[int]) -> _Cut:
        """Return where the blocks of tensors of some shape, mesh and places are, by the metadata."""
        blocks, of_rank = self._grid(one)
        replicas: list[list[int]] = [[] for _ in blocks]
        others: list[tuple[int, int]] = []
        outside: dict[int, int] = {}  # ranks that the one layout in the metadata is not about, and their blocks
        contradicts = False
        for number, file, rank, group in zip(*(places[at::NUMBERS] for at in range(NUMBERS)), strict=True):
            held, others_of_group = self._held_by(one, group)
            contradicts |= not held <= {number}
            outside |= dict.fromkeys(others_of_group, number)
            block = 0 if one.mesh is None else of_rank.get(rank)
            if file not in self.number:
                continue
            if block is None:
                others.append((number, self.number[file]))
            else:
                replicas[block].append(self.number[file])
        for number, at in () if contradicts else others:
            if number < len(blocks) and not replicas[number]:
                replicas[number].append(at)
        lost = [number for number, some in enumerate(replicas) if not some]
        reason = ""
        if lost:
            reason = f"lacks {len(lost)} of its {len(blocks)} blocks, which no file has, such as {blocks[lost[0]]}" + (
                ": they were lost when it was saved (remove_redundancy)" if contradicts else ""
            )
        cut = self._cut(blocks, replicas, reason)
        holders = self._holders(one, of_rank, outside, contradicts=contradicts)
        return cut._replace(contradicts=contradicts, holders=holders)

    def _held_by(self, one: Described, group: int) -> tuple[set[int], tuple[int, ...]]:
        """Return the blocks that the layout gives the ranks of a group, and those that it is not about."""
        key = (one.mesh, one.shape, group)
        if key not in self._held:
            _, of_rank = self._grid(one)
            ranks = self.said.groups[group]
            blocks = {of_rank[rank] for rank in ranks if rank in of_rank} if one.mesh is not None else {0}
            self._held[key] = blocks, tuple(rank for rank in ranks if rank not in of_rank)
        return self._held[key]

    def _holders(
        self, one: Described, of_rank: Mapping[int, int], outside: Mapping[int, int], *, contradicts: bool
    ) -> tuple[int, ...]:
        """Return the ranks that hold a tensor; none where the layout does not say which block some of them do."""
        others = tuple(sorted(outside))
        if one.mesh is None:
            return others
        ranks = list(self.said.meshes)[one.mesh].ranks
        expected = [of_rank[rank] for rank in ranks] * (len(others) // len(ranks))
        fits = [outside[rank] for rank in others] == expected and not (others and contradicts)
        return (*ranks, *others) if fits else ()

    def _cut(self, blocks: Sequence[Block], replicas: Sequence[Sequence[int]], reason: str = "") -> _Cut:
        at, firsts = where(self.files, sorted({number for some in replicas for number in some}))
        sharding = Sharding(tuple(blocks), tuple(tuple(at[number] for number in sorted(some)) for some in replicas))
        return _Cut(sharding, firsts, reason=reason)

    def _grid(self, one: Described) -> tuple[tuple[Block, ...], dict[int, int]]:
        """Return the blocks of a tensor, and the number of that which each rank has."""
        if one.mesh is None:
            return (Block.whole(one.shape),), {}
        if (one.mesh, one.shape) not in self._grids:
            mesh = list(self.said.meshes)[one.mesh]
            grid = mesh.layout.grid(one.shape)
            of_rank = {mesh.ranks[device]: number for number, some in enumerate(grid.ranks) for device in some}
            self._grids[one.mesh, one.shape] = grid.blocks, of_rank
        return self._grids[one.mesh, one.shape]

    def _in_files(self, name: str, one: Described) -> _Cut:
        """Return where a tensor is that is not where the metadata say: each rank's files have its block, or all of it.

        What is worked out for one serves all that the same files have alike.
        """
        blocks, of_rank = self._grid(one)
        kinds = bytes(_kind(entries.get(name), blocks[0].shape, one.shape) for entries, _ in self.alike)
        if _OTHER in kinds:
            entries, some = self.alike[kinds.index(_OTHER)]
            found = f"{shape_text(entries[name].shape)} in {self.files[some[0]].path}"
            return self._cut(blocks, [], f"is of shape {found}; expected {shape_text(blocks[0].shape)}")
        key = (one.mesh, one.shape, kinds)
        if key not in self._found:
            replicas: list[list[int]] = [[] for _ in blocks]
            whole: list[int] = []
            for kind, (_, some) in zip(kinds, self.alike, strict=True):
                whole += some if kind == _WHOLE else ()
                for number in some if kind == _BLOCK else ():
                    block = 0 if one.mesh is None else of_rank.get(self.ranks[number])
                    if block is not None:
                        replicas[block].append(number)
            if whole and not any(replicas):  # saved with integrated_save, whatever the layout says
                self._found[key] = self._cut([Block.whole(one.shape)], [whole])
            else:
                lacking = "whole in some files and cut in others" if whole else "not in the files that should have it"
                reason = "" if all(replicas) and not whole else f"is {lacking}, as {METADATA} says"
                self._found[key] = self._cut(blocks, replicas, reason)
        return self._found[key]

    def _add_unlisted(self, name: str) -> None:
        """Add what is in files and not in the metadata: a state that lies as its weight, or the same on every rank."""
        entry = next(entries[name] for entries, _ in self.alike if name in entries)
        weight = self.said.listed.get(_weight(name))
        found: Tensor | str = ""
        if weight is not None and weight.mesh is not None and not weight.reason:
            found = self._of(name, weight._replace(dtype=""), self._in_files(name, weight))
        if isinstance(found, Tensor):
            self.holders[name] = self.holders.get(_weight(name), ())
        else:
            one = Described("", entry.shape, None, "")
            found = self._of(name, one, self._in_files(name, one))
        self._add(name, found)
        if prod(entry.shape) > 1 and not name.startswith("accu_grads."):
            self.unlisted.append(name)


def _weight(name: str) -> str:
    """Return the name of the weight that a state of the optimizer is of."""
    return name.partition(".")[2]


def _kind(entry: Entry | None, block: Shape, whole: Shape) -> int:
    if entry is None:
        return _NONE
    return _BLOCK if _is_block(entry.shape, block) else _WHOLE if entry.shape == whole else _OTHER


def _is_block(shape: Shape, block: Shape) -> bool:
    """Return whether a file's part of a tensor is a block; a single value without dimensions is written with one."""
    return shape == block or (not block and shape == (1,))
