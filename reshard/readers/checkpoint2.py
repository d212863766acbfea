"""Opening a Checkpoint 2.0 of MindSpore Transformers: its metadata list the places of every block.

`metadata.json` says of each tensor its layout, and for each of its blocks, by number, the files that hold it and whose
ranks' they are. `global_offset` there is the number of a block, row by row, and not an offset. Where layout and number
contradict each other the layout is right: each rank saves what its layout gives it, and mindformers' own loader goes by
layouts too. What is believed is compared with the headers of the files.

A directory without `metadata.json` has whole tensors, in files of which all must be there.

Sources: mindformers 2.1.0 `checkpoint/{checkpoint,metadata,sharded_tensor,fully_parallel,reshard}.py`, and what its
code writes and reads, run (`tests/data/checkpoint2`).
"""

from __future__ import annotations

import re
from array import array
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from reshard.errors import Faults, LayoutError, Option, SourceError, Text, names
from reshard.formats.directories import CHECKPOINT2, ITERATION, TRACKER
from reshard.layout.block import Block, shape_text
from reshard.layout.layout import Layout
from reshard.readers.members import members
from reshard.source.assemble import assemble_whole, where
from reshard.source.checkpoint import Checkpoint, Sharding, Tensor, TensorSpec
from reshard.source.headers import indexed
from reshard.source.probe import compare_contents
from reshard.storage.small import parse_json, read_small

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.formats.entries import Entry
    from reshard.layout.block import Shape
    from reshard.storage.places import Place

METADATA = "metadata.json"
COMMON = "common.json"

_KEY = re.compile(r"""\((?:'(?P<single>.*)'|"(?P<double>.*)"), \((?P<number>\d{1,18}),\)\)""", re.DOTALL)
_LARGEST = 1 << 20
_MOST_AXES = 64


def _chosen(root: Place, there: Sequence[str], iteration: int | None) -> Place:
    """Return the directory of a checkpoint: itself, or an iteration of a run, by number or the last that it names.

    Args:
        root: the directory.
        there: the names of what is in it.
        iteration: which iteration; by default that which the run names as the last.

    Raises:
        SourceError: it is not there, or the run names none.
    """
    known = {int(match[1]): root / name for name in there if (match := ITERATION.fullmatch(name))}
    if not known:
        if iteration not in {None, _number_of(root)}:
            raise SourceError(f"{root}: is one checkpoint; expected a run that has iteration {iteration}; open that")
        return root
    held = f"iteration{'s' * (len(known) > 1)} {names(sorted(known))}"
    if iteration is None:
        if TRACKER not in there:
            unnamed = f"{root}: has {held}, and no {TRACKER} that says which is complete; give e.g. "
            raise SourceError(Text(unnamed, Option("iteration", max(known))))
        text = read_small(root / TRACKER, "number of an iteration", 64, SourceError)
        if not re.fullmatch(rb"\s*\d{1,18}\s*", text):
            raise SourceError(f"{root / TRACKER}: has {text!r:.60}; expected the number of an iteration")
        iteration = int(text)
        held = f"{TRACKER} names it, and {held} is there"
    if iteration not in known:
        raise SourceError(f"{root}: has no iteration {iteration}; {held}")
    return known[iteration]


def _number_of(place: Place) -> int | None:
    match = ITERATION.fullmatch(place.absolute().name)
    return int(match[1]) if match else None


class Iteration(NamedTuple):
    """A checkpoint of a run.

    Attributes:
        number: how many steps were done.
        root: its directory.
        nbytes: the size of its files.
        is_last: the run names it as its last.
        problem: why it cannot be read, such as a file that is not there; empty where it is complete.
        warnings: what else is known of it, such as that the training was not healthy.
    """

    number: int
    root: str
    nbytes: int
    is_last: bool
    problem: str
    warnings: tuple[str, ...]


def iterations(root: Place, there: Sequence[str]) -> list[Iteration]:
    """Return the checkpoints in the directory of a run, ascending; headers are read, to see whether all is there."""
    known = sorted((int(match[1]), root / name) for name in there if (match := ITERATION.fullmatch(name)))
    if not known:
        return []
    try:
        last = _chosen(root, there, None)
    except SourceError:
        last = None
    found = []
    for number, place in known:
        problem, warnings = "", tuple[str, ...]()
        try:
            warnings = open_checkpoint2(place, place.names(), contents=False).warnings
        except SourceError as error:
            problem = str(error).removeprefix(f"{place}: ")
        nbytes = sum(file.status().nbytes for file in place.files(depth=1) if file.suffix == ".safetensors")
        found.append(Iteration(number, str(place), nbytes, place == last, problem, warnings))
    return found


def open_checkpoint2(
    root: Place, there: Sequence[str], iteration: int | None = None, *, contents: bool | Literal["blocks"] = True
) -> Checkpoint:
    """Open a Checkpoint 2.0, reading its metadata and the headers of its files.

    A tensor of which blocks are lost or cannot be told is unreadable, with the reason: a plan needs it dropped by name.

    Args:
        root: its directory, or that of the run.
        there: the names of what is in it.
        iteration: which iteration of a run; by default that which the run names as the last.
        contents: compare samples of replicas and of different blocks; `blocks` compares the latter alone.

    Raises:
        SourceError: there is no such iteration, it is incomplete, or the metadata contradict the files; all at once.
    """
    place = _chosen(root, there, iteration)
    files = {name for name in place.names() if name.endswith(".safetensors")}
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
                    f"{prefix}{kind}-*-{count:07d}.safetensors", f"has no number {names(missing)} of {count}, and "
                    f"there is no {METADATA}; was saving it interrupted?"
                )  # fmt: skip
    faults.raise_if_any(SourceError)
    files, ranks = indexed({0: sorted(place / name for name in there)}, None)
    held: dict[str, str] = {}
    for file in files:
        for name in file.index.entries:
            if name in held:
                expected = f"expected whole tensors, each in one file, as there is no {METADATA}"
                faults.add(f"tensor {name!r}", f"is in {held[name]} and {file.path}; {expected}")
            held[name] = file.path
    faults.raise_if_any(SourceError)
    tensors = assemble_whole(str(place), files, ranks, range(len(files)))
    return Checkpoint(str(place), tensors, files, ranks, warnings=tuple(_health(place)), described_by=COMMON)


def _health(place: Place) -> Iterator[str]:
    """Yield what the run says of its state: a training that is not healthy saves it with the checkpoint."""
    if not (place / COMMON).is_file():
        yield f"{place}: has no {COMMON}, so that the step of the training is not known"
        return
    try:
        content = parse_json(read_small(place / COMMON, COMMON, _LARGEST, SourceError), [])
    except ValueError as error:
        raise SourceError(f"{place / COMMON}: is not JSON: {error}") from None
    if isinstance(content, dict) and content.get("ckpt_status") == 1:
        yield f"{place}: is of a training that was not healthy when it was saved (ckpt_status 1 in {COMMON})"


class _Mesh(NamedTuple):
    """How a tensor is cut, and the rank of each device."""

    layout: Layout
    ranks: tuple[int, ...]


class _Listed(NamedTuple):
    """A tensor as the metadata list it.

    Attributes:
        dtype: its name; empty where it is not known.
        shape: of the whole tensor.
        mesh: the number of its mesh; None where every place has it whole.
        reason: why it cannot be read; else empty.
    """

    dtype: str
    shape: Shape
    mesh: int | None
    reason: str


class _Cut(NamedTuple):
    """Blocks, and the files that have each, by their numbers.

    Attributes:
        sharding: of these.
        firsts: a file of each header.
        contradicts: the numbers of blocks are not those that the layout gives.
        reason: why it cannot be read; else empty.
    """

    sharding: Sharding
    firsts: tuple[int, ...]
    contradicts: bool
    reason: str


class _Metadata:
    """What `metadata.json` says.

    Attributes:
        listed: the tensors.
        places: where the blocks of each are: the number of the block, of the file and of the rank, again and again.
        files: the names of the files, each with its number.
        ranks: the rank of each file.
    """

    def __init__(self, path: Place) -> None:
        self.listed: dict[str, _Listed] = {}
        self.places: dict[str, array[int]] = {}
        self.files: dict[str, int] = {}
        self.ranks: list[int] = []
        self.meshes: dict[_Mesh, int] = {}
        where = ""
        try:
            for section, name, value in members(str(path)):
                where = f"{section}.{name}: "
                if section == "state_dict_metadata":
                    self.listed[name] = self._listed(value)
                elif section == "storage_data":
                    self._place(name, value)
        except (ValueError, KeyError, TypeError, LayoutError) as error:
            said = f"has no {error}" if isinstance(error, KeyError) else str(error)
            raise SourceError(f"{path}: {where}{said}") from None
        if unknown := [name for name in self.places if name not in self.listed]:
            raise SourceError(f"{path}: has places of {names(map(repr, unknown), most=3)}, and no such tensor")

    def _listed(self, value: dict[str, Any]) -> _Listed:
        shape = _numbers(value["global_shape"])
        dtype = value["properties"]["dtype"].lower()
        layout = value.get("layout")
        if layout is None:
            return _Listed(dtype, shape, None, "")
        tensor_map = [entry if isinstance(entry, int) else _numbers(entry) for entry in layout["tensor_map"]]
        mesh = _Mesh(Layout.of(_numbers(layout["device_matrix"]), tensor_map), _numbers(layout["rank_list"]))
        if len(set(mesh.ranks)) != prod(mesh.layout.dev_matrix) or len(set(mesh.ranks)) < len(mesh.ranks):
            raise ValueError(f"rank_list has {len(mesh.ranks)} ranks; expected one for each device")
        if len(mesh.layout.tensor_map) != len(shape):
            raise ValueError(f"tensor_map is of {len(mesh.layout.tensor_map)} dimensions; the shape has {len(shape)}")
        reason = ""
        if layout.get("interleaved_parallel"):
            reason = "is interleaved within each card (interleaved_parallel), which is not read"
        else:
            uneven = [dim for dim, ways in enumerate(mesh.layout.splits) if shape[dim] % ways]
            if uneven:
                dim, ways = uneven[0], mesh.layout.splits[uneven[0]]
                reason = (
                    f"has {shape[dim]} elements in dimension {dim}, which {ways} blocks do not divide; the format "
                    f"keeps {shape[dim] // ways} in each, so that {shape[dim] % ways} are lost"
                )
        return _Listed(dtype, shape, self.meshes.setdefault(mesh, len(self.meshes)), reason)

    def _place(self, key: str, value: list[dict[str, Any]]) -> None:
        name, number = _read_key(key)
        places = self.places.setdefault(name, array("q"))
        for place in value:
            file, rank = place["file_name"], place["storage_rank"]
            if not isinstance(file, str) or "/" in file or "\\" in file or not file.endswith(".safetensors"):
                raise ValueError(f"file_name is {file!r:.80}; expected a safetensors file in the same directory")
            if type(rank) is not int or not 0 <= rank < 1 << 31:
                raise ValueError(f"storage_rank is {rank!r:.60}; expected the number of a rank")
            if self.files.setdefault(file, len(self.files)) == len(self.ranks):
                self.ranks.append(rank)
            elif self.ranks[self.files[file]] != rank:
                raise ValueError(f"{file} is of rank {rank} here, and of rank {self.ranks[self.files[file]]} before")
            places.extend((number, self.files[file], rank))


def _numbers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(number) is not int or number < 0 for number in value):
        raise ValueError(f"{value!r:.60} is there; expected whole numbers")
    return tuple(value)


def _read_key(key: str) -> tuple[str, int]:
    """Return the name and the number of a block that a key of `storage_data` is of, as Python writes such a tuple.

    >>> _read_key("('a.b', (3,))"), _read_key(str(("it's", (0,))))
    (('a.b', 3), ("it's", 0))
    """
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError(f"the key {key!r:.80} is not a name and the number of a block")
    name = match["single"] if match["single"] is not None else match["double"]
    if "\\" in name:
        from ast import literal_eval

        try:
            name = literal_eval(key)[0]
        except (SyntaxError, RecursionError, MemoryError):
            raise ValueError(f"the key {key!r:.80} is not a name and the number of a block") from None
    return name, int(match["number"])


class _Joined:
    """Joins metadata and files."""

    def __init__(self, place: Place, there: set[str]) -> None:
        self.place, self.there = place, there
        self.faults = Faults(str(place))
        self.said = _Metadata(place / METADATA)
        self.warnings = list(_health(place))
        self.unreadable: dict[str, str] = {}
        self.contradicting: list[str] = []
        self._cuts: dict[tuple[int | None, Shape, bytes], _Cut] = {}
        self._grids: dict[tuple[int, Shape], tuple[tuple[Block, ...], dict[int, int]]] = {}

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint."""
        said = self.said
        absent = self._absent()
        present = sorted((said.ranks[number], name) for name, number in said.files.items() if name in self.there)
        by_rank: dict[int, list[Place]] = {}
        for rank, name in present:
            by_rank.setdefault(rank, []).append(self.place / name)
        self.files, self.ranks = indexed(by_rank, None)
        self.number = {said.files[name]: number for number, (_, name) in enumerate(present)}
        tensors: dict[str, Tensor] = {}
        for name, one in said.listed.items():
            if name in absent:
                continue
            found = one.reason or self._tensor(name, one)
            if isinstance(found, Tensor):
                tensors[name] = found
            else:
                self.unreadable[name] = found
        self._add_unlisted(tensors)
        self.faults.raise_if_any(SourceError)
        if not tensors:
            raise SourceError(f"{self.place}: holds no tensor that can be read; was saving it interrupted?")
        if self.contradicting:
            self.warnings.append(
                f"{METADATA} numbers the blocks of {names(self.contradicting, most=3)} otherwise than their layouts "
                "say, which are taken, as MindSpore Transformers does"
            )
        if others := sorted(self.there - said.files.keys()):
            self.warnings.append(f"{METADATA} does not name {names(others, most=3)}, which is not read")
        return Checkpoint(
            str(self.place), tensors, self.files, self.ranks, warnings=tuple(self.warnings),
            unreadable=self.unreadable, described_by=METADATA, layouts=self._layouts(tensors),
        )  # fmt: skip

    def _layouts(self, tensors: Mapping[str, Tensor]) -> dict[str, Layout]:
        """Return how tensors are cut that the metadata give a layout."""
        layouts = [mesh.layout for mesh in self.said.meshes]
        meshes = ((name, one.mesh) for name, one in self.said.listed.items() if name in tensors)
        return {name: layouts[mesh] for name, mesh in meshes if mesh is not None}

    def _absent(self) -> set[str]:
        """Return the optimizer states of a checkpoint of which all such files are left out; refuse other gaps."""
        gone = {name: number for name, number in self.said.files.items() if name not in self.there}
        matches = map(CHECKPOINT2.files.fullmatch, self.said.files)
        if gone and gone.keys() == {match[0] for match in matches if match and match["kind"] == "opt"}:
            numbers = set(gone.values())
            states = {name for name, places in self.said.places.items() if numbers.issuperset(places[1::3])}
            self.warnings.append(f"no file of the optimizer is there: {len(states)} tensors are left out")
            return states
        for name in gone:
            self.faults.add(name, f"is not there, and {METADATA} names it; was saving it interrupted?")
        self.faults.raise_if_any(SourceError)
        return set()

    def _tensor(self, name: str, one: _Listed) -> Tensor | str:
        """Return a tensor, or why it cannot be read."""
        places = self.said.places.get(name, array("q"))
        key = (one.mesh, one.shape, places.tobytes())
        cut = self._cuts.get(key)
        if cut is None:
            cut = self._cuts[key] = self._cut(one, places)
        if cut.contradicts:
            self.contradicting.append(name)
        if cut.reason:
            return cut.reason
        entries = [self.files[number].index.entries.get(name) for number in cut.firsts]
        shape = cut.sharding.blocks[0].shape
        if not all(entry and _is_block(entry.shape, shape) for entry in entries):
            cut = self._elsewhere(name, one, cut)
            if cut.reason:
                return cut.reason
            entries = [self.files[number].index.entries[name] for number in cut.firsts]
        held = [entry for entry in entries if entry is not None]
        dtypes = {entry.dtype for entry in held}
        if len(dtypes) > 1 or (one.dtype and one.dtype not in {dtype.name for dtype in dtypes}):
            return f"is {names(sorted(dtype.name for dtype in dtypes))} in the files and {one.dtype} in {METADATA}"
        spec, runs = TensorSpec(name, held[0].dtype, one.shape), tuple(entry.runs for entry in held)
        return Tensor(spec, cut.sharding, runs, listed=one.mesh is not None)

    def _cut(self, one: _Listed, places: Sequence[int]) -> _Cut:
        """Return where the blocks of tensors of some shape, mesh and places are."""
        blocks, of_rank = self._grid(one)
        replicas: list[list[int]] = [[] for _ in blocks]
        others: list[tuple[int, int]] = []
        contradicts = False
        for number, file, rank in zip(places[::3], places[1::3], places[2::3], strict=True):
            block = 0 if one.mesh is None else of_rank.get(rank)
            if block is None:  # of a rank that the one layout in the metadata is not about
                others.append((number, file))
                continue
            contradicts |= block != number
            replicas[block].append(self.number[file])
        for number, file in () if contradicts else others:
            if number < len(blocks) and not replicas[number]:
                replicas[number].append(self.number[file])
        lost = [number for number, some in enumerate(replicas) if not some]
        reason = ""
        if lost:
            reason = f"lacks {len(lost)} of its {len(blocks)} blocks, which no file has, such as {blocks[lost[0]]}" + (
                ": they were lost when it was saved (remove_redundancy)" if contradicts else ""
            )
        return self._found(blocks, replicas, contradicts=contradicts, reason=reason)

    def _found(
        self, blocks: Sequence[Block], replicas: Sequence[Sequence[int]], *, contradicts: bool, reason: str = ""
    ) -> _Cut:
        at, firsts = where(self.files, sorted({number for some in replicas for number in some}))
        sharding = Sharding(tuple(blocks), tuple(tuple(at[number] for number in sorted(some)) for some in replicas))
        return _Cut(sharding, firsts, contradicts, reason)

    def _grid(self, one: _Listed) -> tuple[tuple[Block, ...], dict[int, int]]:
        """Return the blocks of a tensor, and the number of that which each rank has."""
        if one.mesh is None:
            return (Block.whole(one.shape),), {}
        if (one.mesh, one.shape) not in self._grids:
            mesh = list(self.said.meshes)[one.mesh]
            grid = mesh.layout.grid(one.shape)
            of_rank = {mesh.ranks[device]: number for number, some in enumerate(grid.ranks) for device in some}
            self._grids[one.mesh, one.shape] = grid.blocks, of_rank
        return self._grids[one.mesh, one.shape]

    def _elsewhere(self, name: str, one: _Listed, cut: _Cut) -> _Cut:
        """Return where the blocks of a tensor are that is not as the metadata say: in a rank's other file, or whole."""
        of_rank: dict[int, list[int]] = {}
        for number, rank in enumerate(self.ranks):
            of_rank.setdefault(rank, []).append(number)
        found: list[list[int]] = []
        whole: list[int] = []
        for block, some in zip(cut.sharding.blocks, cut.sharding.replicas, strict=True):
            held: list[int] = []
            for at in some:
                for number in of_rank[self.ranks[at.file]]:
                    entry = self.files[number].index.entries.get(name)
                    if entry is None:
                        continue
                    if not (_is_block(entry.shape, block.shape) or entry.shape == one.shape):
                        reason = f"is of shape {shape_text(entry.shape)} in {self.files[number].path}; expected {block}"
                        return cut._replace(reason=reason)
                    (held if _is_block(entry.shape, block.shape) else whole).append(number)
            found.append(held)
        if whole and not any(found):  # saved with integrated_save, whatever the layout says
            return self._found([Block.whole(one.shape)], [whole], contradicts=False)
        if whole or not all(found):
            lacking = "whole in some files and cut in others" if whole else "not in the files that should have it"
            return cut._replace(reason=f"is {lacking}, as {METADATA} says")
        return self._found(cut.sharding.blocks, found, contradicts=False)

    def _add_unlisted(self, tensors: dict[str, Tensor]) -> None:
        """Add what is in the files and not in the metadata: states that lie as their weights, and single values."""
        replicas: dict[str, list[int]] = {}
        for number, file in enumerate(self.files):
            for name in file.index.entries:
                if name not in self.said.listed:
                    replicas.setdefault(name, []).append(number)
        for name, some in replicas.items():
            found = self._as_weight(name, some, tensors)
            if found is not None:
                tensors[name] = found
                continue
            entries = [self.files[number].index.entries[name] for number in some]
            if len({(entry.dtype, entry.shape) for entry in entries}) > 1:
                self.unreadable[name] = f"is of several shapes or dtypes, and {METADATA} does not say what it is"
                continue
            at, firsts = where(self.files, some)
            sharding = Sharding((Block.whole(entries[0].shape),), (tuple(at[number] for number in some),))
            runs = tuple(self.files[number].index.entries[name].runs for number in firsts)
            spec = TensorSpec(name, entries[0].dtype, entries[0].shape)
            tensors[name] = Tensor(spec, sharding, runs, listed=False)

    def _as_weight(self, name: str, some: Sequence[int], tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Return a tensor that lies as the weight whose name is a part of its own; None where none does."""
        weight = tensors.get(name.partition(".")[2])
        if weight is None or not weight.listed:
            return None
        of_rank = {self.ranks[number]: number for number in some}
        blocks = weight.sharding.blocks
        entries: list[Entry] = [self.files[number].index.entries[name] for number in some]
        if any(not _is_block(entry.shape, blocks[0].shape) or entry.dtype != entries[0].dtype for entry in entries):
            return None
        replicas = [
            [of_rank[self.ranks[at.file]] for at in held if self.ranks[at.file] in of_rank]
            for held in weight.sharding.replicas
        ]
        if not all(replicas):
            return None
        cut = self._found(blocks, replicas, contradicts=False)
        runs = tuple(self.files[number].index.entries[name].runs for number in cut.firsts)
        return Tensor(TensorSpec(name, entries[0].dtype, weight.spec.shape), cut.sharding, runs)


def _is_block(shape: Shape, block: Shape) -> bool:
    """Return whether a file's part of a tensor is a block; a single value without dimensions is written with one."""
    return shape == block or (not block and shape == (1,))
