"""Plans: which bytes go where, known before anything is read or written.

`plan` is pure: it opens no file, reads no clock and knows no scheduler. A plan is small (a few bytes a tensor and
rank), because everything that tensors have in common is worked out once and shared: grids, recipes, holders, and the
layouts of target files with equal contents.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.block import Block
from reshard.errors import StrategyError, UsageError, names
from reshard.selection import Selection, globs
from reshard.strategy import ALL_STAGES

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping

    from reshard.arrays import RankArrays
    from reshard.bands import Recipe
    from reshard.checkpoint import Checkpoint
    from reshard.dtypes import DType
    from reshard.formats import FileLayout
    from reshard.graph import Graph
    from reshard.remote import RemotePath
    from reshard.run import Progress, Report
    from reshard.show.picture import Picture
    from reshard.store import TargetCoding
    from reshard.strategy import Strategy
    from reshard.target_files import TargetFiles


class TargetFile(NamedTuple):
    """A file to be written.

    Attributes:
        rank: the target rank that it is for.
        path: where it goes, below the target directory.
        layout: its size, its own bytes and the places of the contents; shared by ranks with equal contents.
        last: it gets its name after all others: the index of a unified set.
        link: the path of the file that it is a link to, where replicas are linked; nothing is written then.
        done: it is there already, as it shall be; nothing is written then either.
    """

    rank: int
    path: str
    layout: FileLayout
    last: bool = False
    link: str | None = None
    done: bool = False


class Move(NamedTuple):
    """One tensor's way from source files to target files.

    Attributes:
        name: the tensor's name in the target files.
        source_name: its name in the source files.
        dtype: kind of the elements in the source; they travel as bits.
        target_dtype: kind of the elements in the target, the same unless they are cast.
        recipe: which rows and columns go where; shared by tensors of equal shape and layouts.
        axis: the axis along which bands are cut.
        holders: for each source block of the recipe, the source file to read it from.
        targets: for each target block of the recipe, the target files that get it: replicas of one another.
        starts: where each target block begins in its place in the file, in bytes, where a file has several (the
            chunks of a zarr shard); else empty.
        grain: how many rows whole files have, in a multiple of which tasks are cut where files must be written whole.
    """

    name: str
    source_name: str
    dtype: DType
    target_dtype: DType
    recipe: Recipe
    axis: int
    holders: tuple[int, ...]
    targets: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...] = ()
    grain: int = 1


class Held(NamedTuple):
    """What a target rank will hold of a tensor.

    Attributes:
        source_name: the tensor's name in the source.
        block: the part of it.
        dtype: kind of the elements in the target.
        holder: the source file that it comes from, where copies differ; else None.
    """

    source_name: str
    block: Block
    dtype: DType
    holder: int | None = None


class Piece(NamedTuple):
    """Some rows of one move: the part of a task."""

    move: int
    start: int
    stop: int


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
    """What a plan was asked for; with its source, all that it is made from. See `plan`."""

    target: Strategy | None
    format: str
    files: TargetFiles
    ranks: tuple[int, ...] | None
    selection: Selection
    remove_redundancy: bool
    link_replicas: bool
    memory: int | None
    stage: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """All that a conversion will do.

    Attributes:
        source: the checkpoint that is read.
        files: the files to be written.
        moves: one for each tensor (several for a copy whose source differs from rank to rank).
        tasks: how the moves are shared out; each is done by one thread from beginning to end.
        stats: what it costs.
        format: name of the target files' format.
        ranks: the ranks of the target that are written.
        band_bytes: the most bytes of a tensor that a thread reads at once.
        threads: the most threads that a run has, which the prediction of memory is for.
        dropped: names in the source that the target does not have.
        missing: names in the target that the source does not have.
        texts: target name to value of the `str` entries, which every rank gets.
        groups: where files are written one by one (see `ownership`), the numbers of the files that a task writes side
            by side; none where tasks write parts of all files.
        notices: what a user should know though it is no error.
        request: what was asked for; None where the plan was put together from others.
        coding: how the target files are coded; None where their contents are plain.
        alone: the target directory may have nothing else in it.
    """

    source: Checkpoint
    files: tuple[TargetFile, ...]
    moves: tuple[Move, ...]
    tasks: tuple[tuple[Piece, ...], ...]
    stats: Stats
    format: str
    ranks: tuple[int, ...]
    band_bytes: int
    threads: int
    dropped: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    request: Request | None = None

    @property
    def replicas(self) -> int:
        """How many blocks are written for one more rank, beyond the first that gets them; linked files write none."""
        copies: dict[int, int] = {}  # by identity: tensors share these
        for move in self.moves:
            if id(move.targets) not in copies:
                copies[id(move.targets)] = sum(max(len(files) - 1, 0) for files in move.targets)
        return sum(copies[id(move.targets)] for move in self.moves)

    coding: TargetCoding | None = None
    alone: bool = False

    def coded(self, file: TargetFile) -> tuple[str, ...]:
        """Return what tells how a target file is coded; nothing of one whose contents are plain."""
        found = self.coding and self.coding.of(file.path)
        return (found,) if found else ()

    def source_ranks(self) -> tuple[int, ...]:
        """Return the ranks whose files are read, ascending."""
        return tuple(sorted({self.source.ranks[number] for move in self.moves for number in move.holders}))

    def blocks(self, rank: int) -> dict[str, Held]:
        """Return what a target rank will hold, by target name; text is not among it (see `texts`)."""
        numbers = {number for number, file in enumerate(self.files) if file.rank == rank}
        found = {}
        for move in self.moves:
            tensor = self.source.tensors[move.source_name]
            for block, files in zip(move.recipe.targets, move.targets, strict=True):
                if not numbers.isdisjoint(files):
                    holder = move.holders[0] if tensor.varies else None
                    several = move.name in found or not tensor.spec.shape  # the chunks of a zarr array
                    whole_or_part = Block.whole(tensor.spec.shape) if several else block
                    found[move.name] = Held(move.source_name, whole_or_part, move.target_dtype, holder)
        return found

    def rank(self, rank: int) -> RankArrays:
        """Return what a target rank will hold, as a mapping of names to lazy dask arrays.

        Raises:
            UsageError: the plan does not write this rank.
        """
        from reshard.arrays import RankArrays  # upward: a convenience, see DESIGN section 6

        if rank not in self.ranks:
            raise UsageError(f"rank {rank} is not written by this plan; its ranks are {names(self.ranks)}")
        return RankArrays(self.source, self.blocks(rank), self.texts)

    def graph(
        self, directory: str | os.PathLike[str] | RemotePath, *, fsync: bool = True, ownership: str | None = None
    ) -> Graph:
        """Return the one dask graph that writes the target files below a directory, as a dask collection."""
        from reshard.graph import Graph  # upward, as above
        from reshard.ownership import owned
        from reshard.tasks import How

        # Whoever computes it may do so in several processes.
        return Graph(owned(self, ownership, str(directory)), str(directory), How(fsync=fsync, apart=True))

    def picture(self, name: str | None = None) -> Picture:
        """Draw what is moved: source files, tensors and target files, or blocks and row bands of one tensor.

        Args:
            name: the tensor, by its name in the target or the source; all by default.

        Raises:
            UsageError: the plan does not move such a tensor.
        """
        from reshard.show.flow import plan_picture  # upward, as above

        if name is not None and not any(name in {move.name, move.source_name} for move in self.moves):
            alike = get_close_matches(name, (move.name for move in self.moves), n=3)
            raise UsageError(f"the plan moves no tensor {name!r}{f'; did you mean {names(alike)}?' if alike else ''}")
        return plan_picture(self, name)

    def run(
        self,
        directory: str | os.PathLike[str] | RemotePath,
        *,
        client: Any = None,
        scheduler: str | None = None,
        threads: int | None = None,
        fsync: bool = True,
        drop_cache: bool | None = None,
        overwrite: bool = False,
        restart: bool = False,
        checksums: bool | None = None,
        journal: bool = True,
        ownership: str | None = None,
        progress: Callable[[Progress], None] | bool | None = None,
    ) -> Report:
        """Write the target files below a directory: `reshard.run.run`, which tells of the options and errors.

        `progress=True` shows a bar, in a notebook or on a terminal.
        """
        from reshard.progress import shown  # upward, as above
        from reshard.run import run

        with shown() if progress is True else nullcontext(progress or None) as told:
            return run(
                self,
                directory,
                client=client,
                scheduler=scheduler,
                threads=threads,
                fsync=fsync,
                drop_cache=drop_cache,
                overwrite=overwrite,
                restart=restart,
                checksums=checksums,
                journal=journal,
                ownership=ownership,
                progress=told,
            )

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write a plan file, which `reshard.read_plan` and `reshard run` read: `reshard.plan_file.save`."""
        from reshard.plan_file import save  # upward, as above

        save(self, path, overwrite=overwrite)

    def _repr_html_(self) -> str:
        from reshard.show.notebook import plan_html  # upward, as above

        return plan_html(self)

    def __repr__(self) -> str:
        stats = self.stats
        return (
            f"<Plan: {stats.tensors} tensors to {stats.target_files} {self.format} files, "
            f"{stats.bytes_read} bytes to read, {stats.target_bytes} to write>"
        )


def plan(
    source: Checkpoint,
    target: Strategy | None = None,
    *,
    format: str | None = None,  # noqa: A002 -- the word of every such tool
    prefix: str = "checkpoint_",
    files: TargetFiles | None = None,
    ranks: Iterable[int] | None = None,
    stage: int | None = None,
    selection: Selection | None = None,
    drop: Iterable[str] = (),
    allow_missing: Iterable[str] = (),
    remove_redundancy: bool = False,
    link_replicas: bool = False,
    memory: int | None = None,
    threads: int | None = None,
) -> Plan:
    """Plan how a checkpoint becomes that of another strategy.

    Args:
        source: the checkpoint to convert.
        target: which rank shall hold which block; None for one rank of whole tensors.
        format: `safetensors` or `ckpt`; by default the source's, and safetensors where that is mixed or zarr. `zarr`
            for one group of whole tensors, without a target strategy.
        prefix: target files are `rank_<r>/<prefix><r>.<ext>`, with `_part<stage>` behind the rank where the source
            is one stage of a pipeline.
        files: another way to lay out the target's files (see `target_files`), such as a unified set or a `ZarrGroup`.
        ranks: only these ranks of the target; by default all.
        stage: only the ranks of this stage of the target's pipeline. A strategy of one stage is refused without it,
            where it, or the files that were beside it, tell that there are others; what it does not name is dropped.
        selection: less than all tensors, under other names, as other dtypes.
        drop: globs of weights that the target may lack though the source has them; beside the selection's.
        allow_missing: globs of weights that the source may lack though the target has them; likewise.
        remove_redundancy: store each block of a listed tensor on one of the ranks that would hold it.
        link_replicas: make target files that are equal in every byte links to one file: copies that share their
            blocks where the file system has them, else hard links.
        memory: resident memory in bytes that a run may take at its peak; by default about 100 MB are enough, and some
            kB a tensor.
        threads: the most threads that a run may have, fewer where `memory` is for fewer; by default 4.

    Raises:
        SourceError: weights are missing or would be dropped; all at once.
            Also a target layout that does not fit a tensor's shape, or a source that seems to be one rank of several.
        StrategyError: the target is one stage of a pipeline and `stage` is not given, or has no such stage.
        BudgetError: `memory` is too little; the least that works is told.
        UsageError: unknown format, rank or an unsound prefix.
    """
    if isinstance(source, (str, bytes)) or hasattr(source, "__fspath__"):
        raise UsageError(f"source is {source!r}; expected a Checkpoint: open it with reshard.open")
    if isinstance(memory, str):
        raise UsageError(f"memory is {memory!r}; expected a number of bytes")
    if threads is not None and threads < 1:
        raise UsageError(f"threads is {threads}; expected at least 1")
    if isinstance(target, (str, bytes)) or hasattr(target, "__fspath__"):
        raise UsageError(f"target is {target!r}; expected a Strategy: read the file with reshard.read_strategy")
    source.require_whole()
    from reshard.formats.zarr import NAME as ZARR
    from reshard.formats.zarr import ZarrGroup
    from reshard.planner import Planner  # it makes what is defined here
    from reshard.target_files import RankFiles

    wishes = selection or Selection()
    wishes = replace(wishes, drop=wishes.drop + globs(drop), allow_missing=wishes.allow_missing + globs(allow_missing))
    if format == ZARR or isinstance(files, ZarrGroup):
        from reshard.zarr_planner import ZarrPlanner  # likewise

        files = files or ZarrGroup()
        if target or ranks or stage is not None or remove_redundancy or link_replicas:
            raise UsageError("a zarr store holds whole tensors: no target strategy, ranks, redundancy or links")
        if format not in {None, ZARR} or not isinstance(files, ZarrGroup):
            raise UsageError(f"format {format} and {type(files).__name__} do not go together")
        made = ZarrPlanner(source, files, wishes=wishes, memory=memory, threads=threads).plan()
        request = Request(None, ZARR, files, None, wishes, remove_redundancy=False, link_replicas=False, memory=memory)
        return replace(made, request=request)
    if files is None:
        files = RankFiles(prefix, "" if source.part is None else f"_part{source.part}")
    if ranks is not None:
        ranks = tuple(ranks)
    target, wanted = _of_stage(target, stage, ranks)
    made = Planner(
        source,
        target,
        format=format,
        files=files,
        ranks=wanted,
        wishes=wishes,
        remove_redundancy=remove_redundancy,
        link_replicas=link_replicas,
        memory=memory,
        threads=threads,
    ).plan()
    request = Request(target, made.format, files, ranks, wishes, remove_redundancy, link_replicas, memory, stage)
    return replace(made, request=request)


def _of_stage(
    target: Strategy | None, stage: int | None, ranks: Iterable[int] | None
) -> tuple[Strategy | None, tuple[int, ...] | None]:
    """Return the strategy and the ranks of a target, of which only one stage may be asked for.

    Raises:
        StrategyError: the strategy is that of one stage and none is asked for, or does not have the one that is.
        UsageError: ranks of other stages are asked for, or there is no strategy.
    """
    wanted = None if ranks is None else tuple(ranks)
    if stage is None:
        if target is not None and target.others:
            number = target.stages.start
            raise StrategyError(
                f"the target strategy is that of stage {number} of a pipeline, which has others; give {ALL_STAGES}, or "
                f"--target-stage {number} (stage=) if only the ranks of this one are wanted"
            )
        return target, wanted
    if target is None:
        raise UsageError(f"stage {stage} of the target is asked for, and no strategy says which ranks it has")
    one = target.of_stage(stage)
    outside = set(wanted or ()).difference(one.ranks)
    if outside:
        raise UsageError(f"rank {names(sorted(outside))} is asked for; stage {stage} has the ranks {names(one.ranks)}")
    if len(target.stages) == 1:
        return one, wanted
    return target, tuple(one.ranks) if wanted is None else wanted  # all of it says which tensors other stages have
