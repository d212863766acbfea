"""Plans: which bytes go where, known before anything is read or written.

`plan` is pure: it opens no file, reads no clock and knows no scheduler. A plan is small (a few bytes a tensor and
rank), because everything that tensors have in common is worked out once and shared: their ways, and the layouts of
target files with equal contents. A move knows extents alone; names are for people, and in the files.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.formats.entries import Extent
from reshard.layout.block import Block
from reshard.source.headers import index_digests
from reshard.source.records import digest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.dtypes import DType
    from reshard.formats.entries import FileLayout, Runs, Where
    from reshard.plan.bands import Recipe
    from reshard.plan.budget import Share
    from reshard.plan.select import Selection
    from reshard.source.checkpoint import Checkpoint
    from reshard.storage.base import TargetCoding
    from reshard.storage.cipher import Cipher
    from reshard.strategy.strategy import Strategy
    from reshard.targets.destination import TargetFile
    from reshard.targets.pattern import Pattern


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """How bytes get from source files to target files, for all tensors that are alike in that; equal only to itself.

    Attributes:
        recipe: which rows and columns go where.
        axis: the axis along which bands are cut.
        reads: for each source block of the recipe, where it is read.
        writes: for each target block of the recipe, where it is written: replicas of one another.
        row_multiple: how many rows whole files have; tasks are cut at multiples of it where they write whole files.
        held: for each target block of the recipe the block of the tensor that it is a part of; none where it is that.
    """

    recipe: Recipe
    axis: int
    reads: tuple[Where, ...]
    writes: tuple[tuple[Where, ...], ...]
    row_multiple: int = 1
    held: tuple[Block, ...] = ()

    @property
    def is_strided(self) -> bool:
        """Whether a block lies in strides; of a comparison, one of those that are compared, too."""
        return any(at.strides for some in (self.reads, *self.writes) for at in some)


class Move(NamedTuple):
    """One tensor on its way; what it is called is in `Plan.labels`.

    Attributes:
        way: what it has in common with others.
        dtype: kind of the elements in the source; they travel as bits.
        target_dtype: kind of the elements in the target, the same unless they are cast.
        read_runs: the byte ranges of its blocks in source files; `Way.reads` has numbers of them.
        write_runs: likewise in target files, for `Way.writes`.
    """

    way: Way
    dtype: DType
    target_dtype: DType
    read_runs: tuple[Runs, ...]
    write_runs: tuple[Runs, ...]

    @property
    def recipe(self) -> Recipe:
        """Which rows and columns go where."""
        return self.way.recipe

    @property
    def axis(self) -> int:
        """The axis along which bands are cut."""
        return self.way.axis

    @property
    def rows(self) -> int:
        """How many rows there are along that axis and all before it."""
        return self.way.recipe.rows(self.way.axis)

    @property
    def reads(self) -> tuple[Extent, ...]:
        """For each source block, the extent to read."""
        return tuple(Extent(at.file, self.read_runs[at.runs], at.strides) for at in self.way.reads)

    @property
    def writes(self) -> tuple[tuple[Extent, ...], ...]:
        """For each target block, the extents to write."""
        return tuple(
            tuple(Extent(at.file, self.write_runs[at.runs], at.strides) for at in some) for some in self.way.writes
        )


class Label(NamedTuple):
    """What the tensor of a move is called in the target files, and in the source files."""

    name: str
    source_name: str


class Held(NamedTuple):
    """What a target rank will hold of a tensor.

    Attributes:
        source_name: the tensor's name in the source.
        block: the part of it.
        dtype: kind of the elements in the target.
        replica: the source file that it comes from, where copies differ; else None.
    """

    source_name: str
    block: Block
    dtype: DType
    replica: int | None = None


class Piece(NamedTuple):
    """Some rows of one move."""

    move: int
    start: int
    stop: int


class Task(NamedTuple):
    """A part of the work; one thread does it from beginning to end.

    Attributes:
        pieces: the rows that it moves; where it writes whole files of ranks, `partition.whole_files` knows which.
        files: the numbers of the files that it writes from first byte to last, side by side; none where tasks write
            parts of all files.
    """

    pieces: tuple[Piece, ...] = ()
    files: tuple[int, ...] = ()


class Stats(NamedTuple):
    """What a plan costs. Sizes are in bytes.

    Attributes:
        tensors: how many distinct tensors are moved.
        bytes_needed: distinct bytes of source tensors that the targets hold.
        bytes_read: bytes of contents to be read; more than is needed only where some ranks of a target are wanted.
        bytes_written: bytes of contents to be written, replicas included.
        target_bytes: size of all target files, headers included.
        source_files, target_files: how many files are read and written.
        tasks: how many tasks move bytes.
        peak_memory: resident memory predicted, for as many threads as `Plan.threads`.
    """

    tensors: int
    bytes_needed: int
    bytes_read: int
    bytes_written: int
    target_bytes: int
    source_files: int
    target_files: int
    tasks: int
    peak_memory: int

    @property
    def read_amplification(self) -> float:
        """Bytes read for each byte needed; 1.0 is best."""
        return self.bytes_read / self.bytes_needed if self.bytes_needed else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What a plan was asked for; with its source, all that it is made from. See `make`."""

    target: Strategy | Pattern | None
    format: str
    files: Any  # of `targets.kinds`
    ranks: tuple[int, ...] | None
    selection: Selection
    remove_redundancy: bool
    link_replicas: bool
    memory: int | None
    stage: int | None = None
    cipher: Cipher | None = None

    @property
    def of_some(self) -> bool:
        """Some ranks, or those of a stage, are asked for."""
        return bool(self.ranks) or self.stage is not None

    @property
    def once(self) -> bool:
        """Replicas are to be stored once, or linked."""
        return self.remove_redundancy or self.link_replicas


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Everything that a conversion will do.

    Attributes:
        source: the checkpoint that is read.
        files: the files to be written.
        moves: one for each tensor (several for a copy whose source differs from rank to rank).
        labels: what the tensors of the moves are called.
        tasks: how the work is shared out (see `partition`).
        stats: what it costs.
        format: name of the target files' format.
        ranks: the ranks of the target that are written.
        band_bytes: the most bytes of a tensor that a thread reads at once.
        threads: the most threads that a run has, which the prediction of memory is for.
        dropped: names in the source that the target does not have.
        missing: names in the target that the source does not have.
        left_out: names in the source that the selection does not choose.
        texts: target name to value of the `str` entries, which every rank gets.
        warnings: warnings for the user.
        request: what was asked for; None where the plan was put together from others.
        coding: how the target files are encoded; None where their contents are plain.
        cipher: encrypts the target files; None where they are plain.
        exclusive: the target directory may have nothing else in it.
        alone: the target is one file; the directory is another's, so that nothing else is left there.
        memory: what the prediction of memory consists of (see `budget`).
        digests: what distinguishes the making of each file from that of others, for its name until it is finished:
            where that is resumed, of all that makes its bytes (`file_digests`). Only runs need them.
    """

    source: Checkpoint
    files: tuple[TargetFile, ...]
    moves: tuple[Move, ...]
    labels: tuple[Label, ...]
    tasks: tuple[Task, ...]
    stats: Stats
    format: str
    ranks: tuple[int, ...]
    band_bytes: int
    threads: int
    dropped: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    request: Request | None = None
    coding: TargetCoding | None = None
    cipher: Cipher | None = None
    exclusive: bool = False
    alone: bool = False
    memory: tuple[Share, ...] = ()
    digests: tuple[str, ...] = ()

    @property
    def by_file(self) -> bool:
        """Whether each task writes whole files."""
        return any(task.files for task in self.tasks)

    @property
    def has_crcs(self) -> bool:
        """Whether target files have sums of their own contents."""
        return any(file.layout.crcs for file in self.files)

    @property
    def linked(self) -> set[str]:
        """The paths of the source files that target files are links to."""
        return {file.link for file in self.files if file.link}.intersection(file.path for file in self.source.files)

    @property
    def replicas(self) -> int:
        """How many blocks are written for one more rank, beyond the first that gets them; linked files write none."""
        ways = Counter(move.way for move in self.moves)
        return sum(count * sum(max(len(files) - 1, 0) for files in way.writes) for way, count in ways.items())

    def explain_memory(self) -> dict[str, int]:
        """Return what the predicted peak of memory consists of, in bytes; the sum is `Stats.peak_memory`."""
        return dict(self.memory)

    def encoded(self, file: TargetFile) -> tuple[str, ...]:
        """Return what says how a target file is encoded; nothing for one whose contents are plain."""
        found = self.coding and self.coding.of(file.path)
        return (found,) if found else ()

    def size_of(self, file: TargetFile) -> int:
        """Return the size of a target file; before compression, where there is any."""
        return self.cipher.encrypted_size(file.layout.size) if self.cipher else file.layout.size

    def source_ranks(self) -> tuple[int, ...]:
        """Return the ranks whose files are read, ascending."""
        return tuple(sorted({self.source.ranks[number] for number in self.read_files()}))

    def read_files(self) -> list[int]:
        """Return the numbers of the source files that are read, or linked, ascending."""
        read = {at.file for way in {move.way for move in self.moves} for at in way.reads}
        linked = self.linked
        return sorted(read.union(number for number, file in enumerate(self.source.files) if file.path in linked))

    def blocks(self, rank: int) -> dict[str, Held]:
        """Return what a target rank will hold, by target name; text is not among it (see `texts`)."""
        numbers = {number for number, file in enumerate(self.files) if file.rank == rank}
        found = {}
        for move, label in zip(self.moves, self.labels, strict=True):
            tensor = self.source.tensors[label.source_name]
            held = dict(zip(move.way.held, move.way.writes, strict=True)) if move.way.held else {}
            for block, written in held.items() or zip(move.recipe.targets, move.way.writes, strict=True):
                if any(at.file in numbers for at in written):
                    replica = move.way.reads[0].file if tensor.varies else None
                    several = label.name in found or not tensor.spec.shape  # the chunks of a zarr array
                    whole_or_part = Block.whole(tensor.spec.shape) if several else block
                    found[label.name] = Held(label.source_name, whole_or_part, move.target_dtype, replica)
        return found

    def __repr__(self) -> str:
        stats = self.stats
        return (
            f"<Plan: {stats.tensors} tensors to {stats.target_files} {self.format} files, "
            f"{stats.bytes_read} bytes to read, {stats.target_bytes} to write>"
        )


def plan_digest(plan: Plan) -> str:
    """Return the digest of all that a plan writes: files, their headers, and which bytes of which file go there.

    How the work is shared out (tasks, bands, threads), and where the source is, is not in it.
    """
    sources = [b"%d" % number for number in range(len(plan.source.files))]
    whole = [plan.format, plan.ranks, plan.dropped, plan.missing, dict(plan.texts)]
    files = [(file.rank, file.last) for file in plan.files]
    return digest([whole, files, _file_digests(plan, sources, plan.cipher.mode if plan.cipher else None)])


def file_digests(plan: Plan) -> list[str]:
    """Return, for each target file of a plan, a digest of all that makes its bytes.

    That is its layout and literal bytes, the key that encrypts it, and for each block in it the dtypes, the extents
    that it is made of, and path, size, time and header of their files. What else the plan writes is not in it: other
    ranks of the same target may be written by other plans.
    """
    headers = index_digests([file.index for file in plan.source.files])
    return _file_digests(
        plan,
        [
            repr((file.path, file.nbytes, file.mtime_ns, header)).encode()
            for file, header in zip(plan.source.files, headers, strict=True)
        ],
        # Or a directory would have files of two keys. It says no more of the key than an encrypted file next to it.
        plan.cipher and (plan.cipher.mode, sha256(plan.cipher.key).digest()),
    )


def _file_digests(plan: Plan, sources: Sequence[bytes], encryption: object) -> list[str]:
    """Return a digest for each target file, in which these bytes stand for the source files."""
    lora = plan.source.lora
    more = tuple(one for one in (encryption, lora and lora.digest) if one)
    literals: dict[FileLayout, bytes] = {}
    for layout in {file.layout for file in plan.files}:
        found = sha256()
        for offset, content in layout.literals:
            found.update(b"%d %d:" % (offset, len(content)))
            found.update(content)
        literals[layout] = found.digest()
    made = dict(zip((file.path for file in plan.source.files), sources, strict=True))
    hashes = []
    for file in plan.files:
        link = None if file.link in made else file.link
        own = repr((file.path, file.layout.size, link, *plan.encoded(file), *more)).encode()
        hashes.append(sha256(own + literals[file.layout]))
    known: dict[Way, list[tuple[int, int, bytes]]] = {}  # file, number of runs, what the block is made of
    for move in plan.moves:
        way = move.way
        if way not in known:
            made_of = zip(_made_of(way, sources), way.writes, strict=True)
            known[way] = [(at.file, at.runs, block) for block, written in made_of for at in written]
        own = repr((move.dtype.name, move.target_dtype.name, move.read_runs)).encode()
        in_files = [sha256(own + repr(runs).encode()).digest() for runs in move.write_runs]
        for number, runs, block in known[way]:
            hashes[number].update(in_files[runs] + block)
    # Of a link no block is written: what makes its bytes is what makes the file that it links to.
    made |= {file.path: found.digest() for file, found in zip(plan.files, hashes, strict=True)}
    for file, found in zip(plan.files, hashes, strict=True):
        if file.link is not None:
            found.update(made[file.link])
    return [found.hexdigest() for found in hashes]


def _made_of(way: Way, sources: Sequence[bytes]) -> list[bytes]:
    """Return, for each target block, a digest of it and of all that it is made of."""
    recipe = way.recipe
    rows: dict[tuple[int, int], list[int]] = {}  # source blocks by their first axis, so that few are looked at
    for number, source in enumerate(recipe.sources):
        rows.setdefault((source.start[0], source.stop[0]), []).append(number)
    made_of = []
    for block in recipe.targets:
        near = [some for (start, stop), some in rows.items() if start < block.stop[0] and stop > block.start[0]]
        given = [number for some in near for number in some if recipe.sources[number] & block]
        read = [(recipe.sources[number], *way.reads[number][1:]) for number in given]
        found = sha256(repr((recipe.shape, block, read)).encode())
        for number in given:
            found.update(sources[way.reads[number].file])
        made_of.append(found.digest())
    return made_of


def changes_digest(plan: Plan) -> str:
    """Return a digest of when anything of each source file last changed; empty where that is not known of all.

    Not of the numbers of their inodes, which some network file systems give again.
    """
    changes = [(file.path, file.change[0]) for file in plan.source.files]
    return digest(changes) if all(changed for _, changed in changes) else ""
