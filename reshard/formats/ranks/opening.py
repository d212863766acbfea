"""Open files of ranks, a set, or a file of whole tensors: apply a strategy, and sample the contents."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial as applied
from typing import TYPE_CHECKING, Literal, NamedTuple

from reshard.core.listing import RANK_DIRECTORY, RANK_PATTERN
from reshard.core.model.assemble import assemble
from reshard.core.model.checkpoint import Checkpoint, SourceFile, unreadable_in
from reshard.core.model.facts import Opening
from reshard.core.model.probe import compare_contents
from reshard.core.records.logs import UNREADABLE_LEDGER
from reshard.core.storage.base import COPY_AGAIN, reading
from reshard.core.storage.places import AnyName, Place, as_place
from reshard.errors import Option, SourceError, Text, UsageError, joined
from reshard.formats.made import with_strategy
from reshard.formats.ranks.directories import Step, leftovers, rank_files
from reshard.formats.ranks.one_of_ranks import one_of_ranks, refuse_one_of_ranks, refuse_parts_of_ranks
from reshard.formats.ranks.one_of_several import refuse_directory, refuse_one_of_several
from reshard.formats.ranks.reader import (
    IndexedFiles,
    changed_text,
    check_files,
    index_ranks,
    left_of_several,
    lone_rank,
    one_stage,
    refuse_other_strategy,
    with_rules,
)
from reshard.kits.indexes import check_members, read_index, set_indexes
from reshard.strategy.files import read_strategy
from reshard.strategy.names import ranks_text
from reshard.strategy.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.listing import Contents, OpenOptions
    from reshard.core.records.made import Made
    from reshard.core.storage.cipher import Cipher


def open_ranks(
    path: Place | Mapping[int, AnyName],
    options: OpenOptions,
    *,
    names: Sequence[str] | None = None,
    contents: Contents = True,
) -> Checkpoint:
    """Open files that do not describe their blocks.

    Args:
        path: a directory or a file, or files by rank.
        options: the options.
        names: the names in the directory, if known.
        contents: sample the contents.

    Raises:
        SourceError: they are not valid, or it is not known how tensors are cut.
    """
    listing: Sequence[str] = ()
    if not isinstance(path, Mapping):
        listing = path.names() if names is None else names
        refuse_unused(path, listing, options)
    files, ranks, warnings, step, cipher = read_files(path, options, listing)
    root = str(as_place(next(iter(path.values()))).parent if isinstance(path, Mapping) else path)
    is_described = bool(options.strategy or options.layouts or set_indexes(listing))
    ledger = _ledger(path, listing, warnings if is_described else None)
    numbered = "" if is_described or options.rank_pattern != RANK_PATTERN else _one_rank(files, cipher, warnings)
    known = _known_layout(root, options, ledger, files, ranks, warnings)
    lone_reason = ""
    if not (options.layouts or known.by_ledger):
        lone_reason = lone_rank(path, known.strategy, files, ranks, warnings)
        lone_reason = lone_reason or left_of_several(root, ranks, ledger, known.change)
    whole, ruled, confirmed = with_rules(known.strategy, options.layouts, files, ranks)
    strategy, part = one_stage(root, whole, known.stage, files, ranks, warnings)
    if strategy is None and len(set(ranks)) > 1:
        again = replace(options, layouts={}, stage=None, cipher=cipher)
        raise _unknown(path, root, ranks, known.change, again)
    files, ranks, elsewhere = _of_stage(root, whole, strategy, part, files, ranks)
    is_other = known.recorded is not None and (bool(options.layouts) or not known.by_ledger)
    with _explained(path, knows=is_other and not options.layouts):
        tensors = assemble(root, files, ranks, strategy, partial=known.partial)
    if known.recorded is not None and is_other and strategy is not None and part is None:
        refuse_other_strategy(root, strategy, known.recorded, tensors, ruled)
    opening = Opening(
        part, elsewhere, known.partial, by_file=isinstance(path, Mapping), lone_rank=lone_reason, numbered=numbered,
        step=step,
    )  # fmt: skip
    checkpoint = Checkpoint(
        root, tensors, files, ranks, strategy, tuple(warnings), unreadable_in(files), cipher, opening=opening
    )
    return compare_contents(checkpoint, ruled, confirmed, contents=contents)


def _unknown(
    path: Place | Mapping[int, AnyName], root: str, ranks: Sequence[int], change: str, options: OpenOptions
) -> SourceError:
    """Return the error for several ranks with an unknown layout; it names the strategies beside them that fit."""
    from reshard.formats.ranks.completeness import unknown_layout  # on this error only

    return unknown_layout(root, ranks, change, lambda fits: open_ranks(path, replace(options, strategy=fits)))


class _KnownLayout(NamedTuple):
    """What is known of a layout before rules.

    Attributes:
        strategy: the strategy that is given, or that of the ledger.
        stage: the pipeline stage that the source is.
        partial: whether ranks may be missing.
        recorded: the strategy in the ledger, if the files are those that it lists.
        by_ledger: whether the strategy is that of the ledger.
        change: why the ledger does not say the layout, though it is there and asked for; else empty.
    """

    strategy: Strategy | None
    stage: int | Literal["own"] | None
    partial: bool
    recorded: Strategy | None = None
    by_ledger: bool = False
    change: str = ""


def _known_layout(
    root: str,
    options: OpenOptions,
    ledger: Made | None,
    files: Sequence[SourceFile],
    ranks: Sequence[int],
    warnings: list[str],
) -> _KnownLayout:
    """Return the layout that the options or the ledger say; add a warning if files changed since."""
    strategy = options.strategy
    if strategy is not None and not isinstance(strategy, Strategy):
        strategy = read_strategy(strategy)
    change = ledger.change(files, partial=options.partial) if ledger else ""
    recorded = ledger.strategy if ledger and not change else None
    unnamed = options.suffix is None and options.rank_pattern == RANK_PATTERN
    if ledger and recorded and unnamed and strategy is None and options.stage is None:
        stage = ledger.provenance.target.stage
        expected = (recorded if stage is None else recorded.of_stage(stage)).ranks
        return _KnownLayout(recorded, stage, options.partial or len({*ranks}) < len(expected), recorded, by_ledger=True)
    change = change if unnamed and strategy is None else ""
    warnings += [changed_text(root, change)] if change else []
    return _KnownLayout(strategy, options.stage, options.partial, recorded, change=change)


def _of_stage(
    root: str,
    whole: Strategy | None,
    strategy: Strategy | None,
    part: int | None,
    files: tuple[SourceFile, ...],
    ranks: tuple[int, ...],
) -> tuple[tuple[SourceFile, ...], tuple[int, ...], frozenset[str]]:
    """Return the files and ranks of a stage, and the names of tensors that only other stages have.

    Raises:
        SourceError: there is no file of the stage, or no tensor.
    """
    elsewhere: set[str] = set()
    if whole is not None and strategy is not None and part is not None:
        inside = [number for number, rank in enumerate(ranks) if rank in strategy.ranks]
        if not inside:
            raise SourceError(
                f"{root} has no file of stage {part}",
                code="missing-ranks",
                facts=[f"the stage has {ranks_text(strategy.ranks)}; the files are of {ranks_text(ranks)}"],
                hint=COPY_AGAIN,
            )
        elsewhere = {*whole.tensors}.union(*(file.index.entries for file in files))
        files, ranks = tuple(files[number] for number in inside), tuple(ranks[number] for number in inside)
        elsewhere = elsewhere.difference(strategy.tensors, *(file.index.entries for file in files))
    if not any(file.index.entries for file in files):
        raise SourceError(f"{root} has no tensor", code="no-tensors")
    return files, ranks, frozenset(elsewhere)


def refuse_unused(path: Place, listing: Sequence[str], options: OpenOptions) -> None:
    """Refuse options for files of ranks, as for `reshard.open`, if a source is one file or a set: they have no effect.

    Args:
        path: the source, which does not describe its own blocks.
        listing: the names of its entries; empty if it is a file.
        options: a suffix has an effect if there are several sets; that all tensors are whole is no contradiction.

    Raises:
        UsageError: such an option was given.
    """
    indexes = set_indexes(listing)
    given = {
        "rank_pattern": options.rank_pattern != RANK_PATTERN,
        "suffix": options.suffix is not None and len(indexes) < 2,
        "layout": bool(indexes and options.layouts and {*options.layouts.values()} != {"whole"}),
        "stage": bool(indexes) and isinstance(options.stage, int),
        "partial": bool(indexes) and options.partial,
    }
    unused = [Text(Option(name)) for name, is_given in given.items() if is_given]
    if unused and (indexes or not listing) and path.is_there():
        what = "a set of whole tensors" if indexes else "one file"
        raise UsageError(
            Text(f"{path} is {what}, and has no use for ", joined(" and ", unused)),
            code="no-effect",
            hint="leave it out" if len(unused) == 1 else "leave them out",
        )
    if options.step is not None:
        raise UsageError(
            f"{path} has no iterations",
            code="no-iterations",
            hint=Text("leave ", Option("step", options.step), " out"),
        )


def _one_rank(files: Sequence[SourceFile], cipher: Cipher | None, warnings: list[str]) -> str:
    """Return why the only file of a source may be one rank's part of a model, or ""; `rank_N` is left to `lone_rank`.

    Raises:
        SourceError: it is one, by its name.
    """
    path = as_place(files[0].path)
    if len(files) > 1 or RANK_DIRECTORY.fullmatch(path.parent.name):
        return ""
    refuse_one_of_ranks(path)
    reason = one_of_ranks(path, applied(_shapes, cipher=cipher))
    warnings += [reason] if reason else []
    return reason


def _shapes(path: Place, cipher: Cipher | None) -> dict[str, Shape]:
    """Return the shapes of the tensors in another file, by its header."""
    (file,) = index_ranks({0: [path]}, cipher, []).files
    return {name: entry.shape for name, entry in file.index.entries.items()}


@contextmanager
def _explained(path: Place | Mapping[int, AnyName], *, knows: bool) -> Iterator[None]:
    """Add facts about the directory to a SourceError.

    They are unfinished files, and that the ledger has a layout.

    Raises:
        SourceError: the error, with these facts.
    """
    try:
        yield
    except SourceError as error:
        if not isinstance(path, Mapping):
            error.facts += tuple(leftovers(path))
        if knows:
            error.hint = Text("its ledger knows its layout: leave ", Option("strategy"), " out")
        raise


def _ledger(path: Place | Mapping[int, AnyName], listing: Sequence[str], warnings: list[str] | None) -> Made | None:
    """Return the provenance of ranks with a strategy, or None.

    Args:
        path: the directory, or files by rank, of which none is looked for.
        listing: the names of its entries.
        warnings: gets a warning if the ledger cannot be read; None if the layout depends on it.
    """
    if isinstance(path, Mapping):
        return None
    try:
        return with_strategy(path, listing, described=False)
    except SourceError as error:
        if error.code != UNREADABLE_LEDGER or warnings is None:
            raise
        warnings.append(error.message)
        return None


def _indexes(listing: Sequence[str], suffix: str | None) -> list[str]:
    """Return the names of the indexes of sets, of those with a suffix if there are several."""
    indexes = set_indexes(listing)
    of_suffix = [name for name in indexes if suffix is not None and name.removesuffix(".json").endswith(suffix)]
    of_suffix = of_suffix or [name for name in indexes if suffix is not None and name.endswith(suffix)]
    return of_suffix if len(indexes) > 1 and of_suffix else indexes


def has_several(root: Place, options: OpenOptions, names: Sequence[str]) -> bool:
    """Return whether there are files of several ranks, by their names."""
    refuse_unused(root, names, options)
    if read_index(root, _indexes(names, options.suffix)):
        return False
    with _told_of_ranks(root):
        return len(rank_files(root, options.rank_pattern, options.suffix, [])[0]) > 1


@contextmanager
def _told_of_ranks(root: Place) -> Iterator[None]:
    """Raise another error for a directory of several checkpoints if they are parts of ranks, by their names."""
    try:
        yield
    except SourceError as error:
        if "several-checkpoints" in error.codes:
            refuse_parts_of_ranks(root)
        raise


@reading(SourceError)
def read_files(
    path: Place | Mapping[int, AnyName], options: OpenOptions, names: Sequence[str] | None = None
) -> IndexedFiles:
    """Read the headers of files that do not describe their blocks: of ranks, or of a unified set.

    Args:
        path: a directory or a file, or files by rank.
        options: how files are found, and the key.
        names: the names in the directory, if known.
    """
    warnings: list[str] = []
    cipher, suffix = options.cipher, options.suffix
    if isinstance(path, Mapping):
        check_files(path, options.rank_pattern, suffix)
        chosen = {rank: as_place(path[rank]) for rank in sorted(path)}
        for file in chosen.values():
            if len(chosen) == 1:
                refuse_one_of_several(file)
            refuse_directory(file.parent, [file.name], "others")
        return index_ranks({rank: [file] for rank, file in chosen.items()}, cipher, warnings, Step.of(chosen.values()))
    listing = path.names() if names is None else names
    unified = read_index(path, _indexes(listing, suffix))
    if unified is None:
        is_directory = bool(listing) or path.is_dir()
        with _told_of_ranks(path):
            of_ranks, step = rank_files(path, options.rank_pattern, suffix, warnings, is_directory=is_directory)
        return index_ranks(of_ranks, cipher, warnings, step)
    paths, weight_map = unified
    result = index_ranks({0: paths}, cipher, warnings)
    members = {
        place.name: [*file.index.entries, *dict(file.index.unreadable)]
        for place, file in zip(paths, result.files, strict=True)
    }
    check_members(path, weight_map, members)
    return result
