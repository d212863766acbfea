"""Plans: all byte transfers, known before anything is read or written.

Building a plan moves no tensor bytes and needs no scheduler. A plan is small (a few bytes a tensor and rank), because
tensors share everything they have in common: their routes, and the layouts of target files with equal contents.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.layout.block import Block
from reshard.core.model.checkpoint import stored_files
from reshard.core.model.digests import digest, index_digests

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.core.layout.arrangement import Arrangement
    from reshard.core.model.checkpoint import Checkpoint, SourceFile
    from reshard.core.model.entries import Extent, FileLayout, Replica, Runs
    from reshard.core.plan.bands import Recipe
    from reshard.core.plan.budget import Share
    from reshard.core.plan.inputs import Selection
    from reshard.core.storage.base import TargetCoding
    from reshard.core.storage.cipher import Cipher
    from reshard.core.storage.urls.s3.upload_parts import Copied
    from reshard.core.target import TargetFile, TargetShape
    from reshard.dtypes import DType
    from reshard.strategy.strategy import Strategy


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """The part of a transfer that similar tensors share. Compared by identity.

    Attributes:
        recipe: which rows and columns go where.
        axis: the axis along which bands are cut.
        reads: the replica to read, for each source block of the recipe.
        writes: the replicas to write, for each target block of the recipe.
        row_multiple: how many rows whole files have; tasks that write whole files are cut at multiples of it.
        held: the block of the tensor that each target block of the recipe is a part of; empty if they are equal.
    """

    recipe: Recipe
    axis: int
    reads: tuple[Replica, ...]
    writes: tuple[tuple[Replica, ...], ...]
    row_multiple: int = 1
    held: tuple[Block, ...] = ()

    @property
    def is_strided(self) -> bool:
        """True if any block is strided, on either side in a comparison."""
        return any(at.strides for extents in (self.reads, *self.writes) for at in extents)


class Transfer(NamedTuple):
    """The transfer of one tensor.

    Attributes:
        route: the blocks and files, which it shares with similar tensors.
        name: the tensor's name in the target files, for messages.
        source_name: its name in the source files.
        dtype: dtype of the elements in the source; they are moved as bits.
        target_dtype: dtype of the elements in the target, the same unless they are cast.
        read_runs: the byte ranges of its blocks in source files, indexed by `Route.reads`.
        write_runs: the byte ranges of its blocks in target files, indexed by `Route.writes`.
        cost: how many bytes of files are read for each byte of the tensor; not 1 if it is computed.
    """

    route: Route
    name: str
    source_name: str
    dtype: DType
    target_dtype: DType
    read_runs: tuple[Runs, ...]
    write_runs: tuple[Runs, ...]
    cost: float = 1.0

    @property
    def recipe(self) -> Recipe:
        """Which rows and columns go where."""
        return self.route.recipe

    @property
    def axis(self) -> int:
        """Axis along which bands are cut."""
        return self.route.axis

    @property
    def rows(self) -> int:
        """Number of rows along `axis` and all axes before it."""
        return self.route.recipe.rows(self.route.axis)

    @property
    def reads(self) -> tuple[Extent, ...]:
        """Extent to read, for each source block."""
        return tuple(replica.extent(self.read_runs) for replica in self.route.reads)

    @property
    def writes(self) -> tuple[tuple[Extent, ...], ...]:
        """Extents to write, for each target block."""
        return tuple(tuple(replica.extent(self.write_runs) for replica in block) for block in self.route.writes)


class RankBlock(NamedTuple):
    """The block of a tensor that a target rank will hold.

    Attributes:
        source_name: the tensor's name in the source.
        block: the block.
        dtype: dtype of the elements in the target.
        source_file: the number of the source file that it comes from, if copies differ; else None.
    """

    source_name: str
    block: Block
    dtype: DType
    source_file: int | None = None


class Piece(NamedTuple):
    """A range of rows of one transfer."""

    transfer: int
    start: int
    stop: int


class Task(NamedTuple):
    """A unit of work that one thread does from beginning to end.

    Attributes:
        pieces: the rows that it moves; empty if it writes whole files of ranks (see `partition.whole_files`).
        files: the numbers of the files that it writes from first byte to last, side by side; empty if tasks write
            parts of all files.
    """

    pieces: tuple[Piece, ...] = ()
    files: tuple[int, ...] = ()


class Stats(NamedTuple):
    """The costs of a plan. Sizes are in bytes.

    Attributes:
        tensors: how many distinct tensors are moved.
        bytes_needed: distinct bytes of source tensors that the targets hold.
        bytes_read: bytes of contents to be read; more than needed if only some ranks are written, or if tasks by
            file read a source byte several times.
        bytes_written: bytes of contents to be written, replicas included.
        target_bytes: size of the target files that are not links, headers included.
        source_files: number of files that are read.
        target_files: number of files that are written, links included.
        tasks: how many tasks move bytes.
        peak_memory: resident memory predicted, for as many threads as `Plan.threads`.
        bytes_copied: bytes that the store of the target copies from source files; they are not read.
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
    bytes_copied: int = 0

    @property
    def read_amplification(self) -> float:
        """Bytes read for each byte needed; 1.0 is best."""
        return self.bytes_read / self.bytes_needed if self.bytes_needed else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """The options of a plan, which is made from them and its source. See `make`."""

    target: Strategy | Arrangement | None
    format: str
    files: Any  # `Options` of a format, or `TargetFiles`
    ranks: tuple[int, ...] | None
    selection: Selection
    remove_redundancy: bool
    memory: int | None
    stage: int | None = None
    cipher: Cipher | None = None

    @property
    def is_partial(self) -> bool:
        """Only a part of the ranks is requested, directly or by stage."""
        return self.ranks is not None or self.stage is not None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Everything that a conversion will do.

    Attributes:
        source: the checkpoint that is read.
        files: the files to be written.
        transfers: one for each tensor (several for a copy whose source differs from rank to rank).
        tasks: the units of work (see `partition`).
        stats: its costs.
        format: name of the target files' format.
        ranks: the ranks of the target that are written.
        band_bytes: the most bytes of a tensor that a thread reads at once.
        threads: the most threads that a run has, which the prediction of memory is for.
        dropped: names in the source that the target does not have.
        missing: names in the target that the source does not have.
        left_out: names in the source that the selection does not choose.
        texts: target name to value of the `str` entries, which every rank gets.
        warnings: warnings for the user.
        request: the options of the plan; None if it was combined from other plans.
        coding: how the target files are encoded; None if their contents are plain.
        cipher: encrypts the target files; None if they are plain.
        shape: what the target files are: a `directory`, a `store`, which has nothing else in it, or one `file`, in a
            directory that belongs to others.
        memory: the parts of the predicted memory (see `budget`).
        shared_bytes: memory of the buffers for requests to URLs that threads share.
        copies: the ranges of target files that their store copies from source files, by file number.
        uploads: the identifiers of uploads that were begun, by file number; only runs have them.
        digests: a digest for each file, used in its temporary name: if the file can be resumed, a digest of everything
            that determines its bytes (`file_digests`). Only runs need them.
    """

    source: Checkpoint
    files: tuple[TargetFile, ...]
    transfers: tuple[Transfer, ...]
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
    shape: TargetShape = "directory"
    memory: tuple[Share, ...] = ()
    shared_bytes: int = 0
    copies: Mapping[int, tuple[Copied, ...]] = field(default_factory=dict)
    uploads: Mapping[int, str] = field(default_factory=dict)
    digests: tuple[str, ...] = ()

    @property
    def by_file(self) -> bool:
        """True if each task writes whole files."""
        return any(task.files for task in self.tasks)

    @property
    def has_crcs(self) -> bool:
        """True if target files store checksums of their own contents."""
        return any(file.layout.crcs for file in self.files)

    @property
    def linked(self) -> set[str]:
        """Paths of the source files that target files link to."""
        return {file.link for file in self.files if file.link}

    @property
    def replicas(self) -> int:
        """Number of copies written beyond the first of each block, without linked files."""
        routes = Counter(transfer.route for transfer in self.transfers)
        return sum(count * sum(max(len(files) - 1, 0) for files in route.writes) for route, count in routes.items())

    def encoded(self, file: TargetFile) -> tuple[str, ...]:
        """Return the encoding of a target file in a tuple; empty if it is plain."""
        encoding = self.coding and self.coding.of(file.path)
        return (encoding,) if encoding else ()

    def size_of(self, file: TargetFile) -> int:
        """Return the size of a target file, before any compression."""
        return self.cipher.encrypted_size(file.layout.size) if self.cipher else file.layout.size

    def read_files(self) -> list[int]:
        """Return the numbers of the source files that are read, or linked, ascending."""
        files, linked = self.source.files, self.linked
        read = {at.file for route in {transfer.route for transfer in self.transfers} for at in route.reads}
        read.update(number for number, file in enumerate(files) if file.path in linked)
        return stored_files(files, read)

    def blocks(self, rank: int) -> dict[str, RankBlock]:
        """Return the blocks that a target rank will hold, by target name, without texts."""
        numbers = {number for number, file in enumerate(self.files) if file.rank == rank}
        result = {}
        for transfer in self.transfers:
            tensor = self.source.tensors[transfer.source_name]
            route = transfer.route
            writes_by_block = dict(zip(route.held, route.writes, strict=True)) if route.held else {}
            for block, written in writes_by_block.items() or zip(route.recipe.targets, route.writes, strict=True):
                if any(at.file in numbers for at in written):
                    source_file = route.reads[0].file if tensor.varies else None
                    if transfer.name in result or not tensor.spec.shape:  # several are the chunks of a zarr array
                        block = Block.whole(tensor.spec.shape)  # noqa: PLW2901 -- of the rank, not of the file
                    held = RankBlock(transfer.source_name, block, transfer.target_dtype, source_file)
                    result[transfer.name] = held
        return result

    def __repr__(self) -> str:
        stats = self.stats
        return (
            f"<Plan: {stats.tensors} tensor{'s' * (stats.tensors != 1)} to {stats.target_files} {self.format} "
            f"file{'s' * (stats.target_files != 1)}, "
            f"{stats.bytes_read} bytes to read, {stats.target_bytes} to write>"
        )


def plan_digest(plan: Plan) -> str:
    """Return a digest of everything that a plan writes.

    It covers the target files, their headers, and the source bytes that go into them. It does not cover how the work
    is divided (tasks, bands, threads), nor the location of the source.
    """
    sources = [b"%d" % number for number in range(len(plan.source.files))]
    whole = [plan.format, plan.ranks, plan.dropped, plan.missing, dict(plan.texts)]
    files = [(file.rank, file.publish != "file") for file in plan.files]
    return digest([whole, files, _file_digests(plan, sources, plan.cipher.mode if plan.cipher else None)])


def file_digests(plan: Plan) -> list[str]:
    """Return a digest of everything that determines the bytes of each target file.

    It covers the file's layout and literal bytes, the key that encrypts it, and for each of its blocks the dtypes, the
    source extents, and path, size, time and header of the source files. It does not cover the plan's other files:
    other ranks of the same target may be written by other plans.
    """
    headers = index_digests([file.index for file in plan.source.files])
    return _file_digests(
        plan,
        [
            repr((file.path, file.nbytes, file.mtime_ns, header)).encode()
            for file, header in zip(plan.source.files, headers, strict=True)
        ],
        # Otherwise a directory could get files of two keys. The digest reveals no more of the key than the files do.
        plan.cipher and (plan.cipher.mode, sha256(plan.cipher.key).digest()),
    )


def _file_digests(plan: Plan, sources: Sequence[bytes], encryption: object) -> list[str]:
    """Return a digest for each target file; `sources` identify the source files."""
    lora = plan.source.lora
    options = tuple(option for option in (encryption, lora and lora.digest) if option)
    sources = _with_inputs(plan.source.files, sources)
    literals: dict[FileLayout, bytes] = {}
    for layout in {file.layout for file in plan.files}:
        content_hash = sha256()
        for offset, content in layout.literals:
            content_hash.update(b"%d %d:" % (offset, len(content)))
            content_hash.update(content)
        literals[layout] = content_hash.digest()
    digest_of_path = dict(zip((file.path for file in plan.source.files), sources, strict=True))
    hashes = []
    for file in plan.files:
        header = repr((file.path, file.layout.size, *plan.encoded(file), *options)).encode()
        hashes.append(sha256(header + literals[file.layout]))
    blocks_by_route: dict[Route, list[tuple[int, int, bytes]]] = {}  # file, number of runs, block digest
    for transfer in plan.transfers:
        route = transfer.route
        if route not in blocks_by_route:
            block_digests = zip(_made_of(route, sources), route.writes, strict=True)
            blocks_by_route[route] = [
                (at.file, at.runs_index, block) for block, written in block_digests for at in written
            ]
        header = repr((transfer.dtype.name, transfer.target_dtype.name, transfer.read_runs)).encode()
        in_files = [sha256(header + repr(runs).encode()).digest() for runs in transfer.write_runs]
        for number, runs, block in blocks_by_route[route]:
            hashes[number].update(in_files[runs] + block)
    for file, content_hash in zip(plan.files, hashes, strict=True):
        if file.link is not None:  # no block is written for it
            content_hash.update(digest_of_path[file.link])
    return [content_hash.hexdigest() for content_hash in hashes]


def _with_inputs(files: Sequence[SourceFile], identities: Sequence[bytes]) -> Sequence[bytes]:
    """Return the identities of source files; that of a computed file covers its inputs."""
    if all(file.inputs is None for file in files):
        return identities
    result = list(identities)
    for number, file in enumerate(files):
        if file.inputs is not None:
            inputs = [result[at] for at in file.inputs]  # they come before it
            result[number] = sha256(repr((file.path, inputs)).encode()).digest()
    return result


def _made_of(route: Route, sources: Sequence[bytes]) -> list[bytes]:
    """Return a digest of each target block and of its source extents."""
    recipe = route.recipe
    rows: dict[tuple[int, int], list[int]] = {}  # numbers of source blocks by first axis, to check few
    for number, source in enumerate(recipe.sources):
        rows.setdefault((source.start[0], source.stop[0]), []).append(number)
    digests = []
    for block in recipe.targets:
        near = [numbers for (start, stop), numbers in rows.items() if start < block.stop[0] and stop > block.start[0]]
        overlapping = [number for numbers in near for number in numbers if recipe.sources[number] & block]
        read = [(recipe.sources[number], *route.reads[number][1:]) for number in overlapping]
        block_hash = sha256(repr((recipe.shape, block, read)).encode())
        for number in overlapping:
            block_hash.update(sources[route.reads[number].file])
        digests.append(block_hash.digest())
    return digests


def changes_digest(plan: Plan) -> str:
    """Return a digest of the change times and inodes of local source files; empty if none is known."""
    changes = [(file.path, file.change) for file in plan.source.files if file.inputs is None and file.change[0]]
    return digest(changes) if changes else ""
