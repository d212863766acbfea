"""Open files of ranks, a set, or a file of whole tensors: apply a strategy, and sample the contents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial as applied
from typing import TYPE_CHECKING, Literal, NamedTuple

from reshard.core.listing import RANK_DIRECTORY, RANK_PATTERN
from reshard.core.model.assemble import assemble
from reshard.core.model.checkpoint import Checkpoint, unreadable_in
from reshard.core.model.facts import Opening
from reshard.core.model.probe import compare_contents
from reshard.core.open import with_strategy
from reshard.core.rank_files import Step
from reshard.core.records.logs import UNREADABLE_LEDGER, leftovers
from reshard.core.records.made import changed_text
from reshard.core.storage.base import COPY_AGAIN, reading
from reshard.core.storage.places import as_place
from reshard.errors import Option, SourceError, Text, UsageError, joined
from reshard.formats.ranks.directories import rank_files
from reshard.formats.ranks.one_of_ranks import one_of_ranks, refuse_one_of_ranks
from reshard.formats.ranks.one_of_several import refuse_directory, refuse_one_of_several
from reshard.formats.ranks.reader import lone_rank, one_stage, refuse_other_strategy, with_rules
from reshard.kits.headers import index_ranks
from reshard.kits.indexes import check_members, read_index, set_indexes
from reshard.strategy.files import read_strategy
from reshard.strategy.names import ranks_text
from reshard.strategy.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.listing import Contents, OpenOptions
    from reshard.core.model.checkpoint import IndexedFiles, SourceFile
    from reshard.core.records.made import Made
    from reshard.core.storage.cipher import Cipher
    from reshard.core.storage.places import AnyName, Place


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
    is_given = isinstance(path, Mapping)
    listing = () if isinstance(path, Mapping) else path.names() if names is None else names
    files, ranks, warnings, step, cipher = read_files(path, options, listing)
    root = _root(path)
    is_described = bool(options.strategy or options.layouts or set_indexes(listing))
    ledger = None if is_given else _ledger(as_place(root), listing, warnings if is_described else None)
    numbered = "" if is_described or options.rank_pattern != RANK_PATTERN else _one_rank(files, cipher, warnings)
    known = _known_layout(root, options, ledger, files, ranks, warnings)
    lone_reason = "" if options.layouts else _lone_rank(path, known, ledger, files, ranks, warnings)
    whole, ruled, confirmed = with_rules(known.strategy, options.layouts, files, ranks)
    strategy, part = one_stage(root, whole, known.stage, files, ranks, warnings)
    if strategy is None and len({*ranks}) > 1:
        raise _unknown_layout(path, root, ranks, known.change, replace(options, layouts={}, stage=None, cipher=cipher))
    files, ranks, elsewhere = _of_stage(root, whole, strategy, part, files, ranks)
    if not any(file.index.entries for file in files):
        raise SourceError(f"{root} has no tensor", code="no-tensors")
    recorded = known.recorded if options.layouts or not known.by_ledger else None
    try:
        tensors = assemble(root, files, ranks, strategy, partial=known.partial)
    except SourceError as error:
        raise _explained(error, path, knows=recorded is not None and not options.layouts) from None
    if recorded is not None and strategy is not None and part is None:
        refuse_other_strategy(root, strategy, recorded, tensors, ruled)
    opening = Opening(
        part, elsewhere, known.partial, by_file=is_given, lone_rank=lone_reason, numbered=numbered, step=step
    )
    checkpoint = Checkpoint(
        root, tensors, files, ranks, strategy, tuple(warnings), unreadable_in(files), cipher, opening=opening
    )
    return compare_contents(checkpoint, ruled, confirmed, contents=contents)


def _root(path: Place | Mapping[int, AnyName]) -> str:
    """Return the directory or file; of files by rank, the directory of the first."""
    return str(as_place(next(iter(path.values()))).parent if isinstance(path, Mapping) else path)


# --- the layout ---------------------------------------------------------------------------------------------------


def _ledger(root: Place, listing: Sequence[str], warnings: list[str] | None) -> Made | None:
    """Return the provenance of ranks with a strategy, or None; warn if it cannot be read, and is not needed."""
    try:
        return with_strategy(root, listing)
    except SourceError as error:
        if error.code != UNREADABLE_LEDGER or warnings is None:
            raise
        warnings.append(error.message)
        return None


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
    is_asked = options.suffix is None and options.rank_pattern == RANK_PATTERN and strategy is None
    if ledger and ledger.own_strategy and recorded and is_asked and options.stage is None:
        is_partial = options.partial or len({*ranks}) < len(ledger.own_strategy.ranks)
        return _KnownLayout(recorded, ledger.provenance.target.stage, is_partial, recorded, by_ledger=True)
    change = change if is_asked else ""
    warnings += [changed_text(root, change)] if change else []
    return _KnownLayout(strategy, options.stage, options.partial, recorded, change=change)


def _unknown_layout(
    path: Place | Mapping[int, AnyName], root: str, ranks: Sequence[int], change: str, again: OpenOptions
) -> SourceError:
    """Return the error for several ranks with an unknown layout, which names the strategies beside them that fit."""
    from reshard.formats.ranks.completeness import unknown_layout  # on this error only

    return unknown_layout(root, ranks, change, lambda fits: open_ranks(path, replace(again, strategy=fits)))


def _explained(error: SourceError, path: Place | Mapping[int, AnyName], *, knows: bool) -> SourceError:
    """Return an error with unfinished files of the directory as facts, and that its ledger `knows` the layout."""
    if not isinstance(path, Mapping):
        error.facts += tuple(leftovers(path))
    if knows:
        error.hint = Text("its ledger knows its layout: leave ", Option("strategy"), " out")
    return error


def _of_stage(
    root: str,
    whole: Strategy | None,
    strategy: Strategy | None,
    part: int | None,
    files: tuple[SourceFile, ...],
    ranks: tuple[int, ...],
) -> tuple[tuple[SourceFile, ...], tuple[int, ...], frozenset[str]]:
    """Return the files and ranks of a stage, and the names of tensors that only other stages have; all without one."""
    if whole is None or strategy is None or part is None:
        return files, ranks, frozenset()
    inside = [number for number, rank in enumerate(ranks) if rank in strategy.ranks]
    if not inside:
        raise SourceError(
            f"{root} has no file of stage {part}",
            code="missing-ranks",
            facts=[f"the stage has {ranks_text(strategy.ranks)}; the files are of {ranks_text(ranks)}"],
            hint=COPY_AGAIN,
        )
    known = {*whole.tensors}.union(*(file.index.entries for file in files))
    files, ranks = tuple(files[number] for number in inside), tuple(ranks[number] for number in inside)
    return files, ranks, frozenset(known.difference(strategy.tensors, *(file.index.entries for file in files)))


def _one_rank(files: Sequence[SourceFile], cipher: Cipher | None, warnings: list[str]) -> str:
    """Return why the only file of a source may be one rank's part of a model, or ""; refuse one that is, by its name.

    In `rank_N`, it is left to `lone_rank`.
    """
    path = as_place(files[0].path)
    if len(files) > 1 or RANK_DIRECTORY.fullmatch(path.parent.name):
        return ""
    refuse_one_of_ranks(path)
    reason = one_of_ranks(path, applied(_shapes, cipher=cipher))
    warnings += [reason] if reason else []
    return reason


def _lone_rank(
    path: Place | Mapping[int, AnyName],
    known: _KnownLayout,
    ledger: Made | None,
    files: Sequence[SourceFile],
    ranks: Sequence[int],
    warnings: list[str],
) -> str:
    """Return why the files of a source seem to be those of one rank of several, or ""; warn of it once."""
    if known.by_ledger:
        return ""
    reason = lone_rank(path, known.strategy, files, ranks, warnings, ledger if known.change else None)
    warnings += [reason] if reason and not known.change else []
    return reason


def _shapes(path: Place, cipher: Cipher | None) -> dict[str, Shape]:
    """Return the shapes of the tensors in another file, by its header."""
    (file,) = index_ranks({0: [path]}, cipher, []).files
    return {name: entry.shape for name, entry in file.index.entries.items()}


# --- the files ----------------------------------------------------------------------------------------------------


@reading(SourceError)
def read_files(
    path: Place | Mapping[int, AnyName], options: OpenOptions, names: Sequence[str] | None = None
) -> IndexedFiles:
    """Read the headers of files that do not describe their blocks: of ranks, or of a unified set.

    Args:
        path: a directory or a file, or files by rank.
        options: how files are found, and the key.
        names: the names in the directory, if known.

    Raises:
        SourceError: there are none, or several checkpoints; a file is not valid.
        UsageError: an option has no effect on such files.
    """
    warnings: list[str] = []
    if isinstance(path, Mapping):
        chosen, step = _given_files(path, options)
        return index_ranks(chosen, options.cipher, warnings, step)
    listing = path.names() if names is None else names
    _refuse_unused(path, listing, options)
    unified = read_index(path, chosen_indexes(set_indexes(listing), options.suffix))
    if unified is None:
        is_directory = bool(listing) or path.is_dir()
        of_ranks, step = rank_files(path, options.rank_pattern, options.suffix, warnings, is_directory=is_directory)
        return index_ranks(of_ranks, options.cipher, warnings, step)
    paths, weight_map = unified
    result = index_ranks({0: paths}, options.cipher, warnings)
    members = {
        place.name: [*file.index.entries, *dict(file.index.unreadable)]
        for place, file in zip(paths, result.files, strict=True)
    }
    check_members(path, weight_map, members)
    return result


def _given_files(files: Mapping[int, AnyName], options: OpenOptions) -> tuple[dict[int, list[Place]], Step | None]:
    """Return the files of ranks that are given by number, and their step; refuse one of several of a checkpoint."""
    if not files or min(files) < 0:
        raise UsageError(f"path is {files!r:.60}; expected files by rank, such as {{0: PATH}}", code="bad-argument")
    if finds := {"rank_pattern", "suffix"} & {*options.given}:
        option = Option(min(finds))
        raise UsageError(Text(option, " finds files, and the files are given"), code="no-effect", hint="leave it out")
    chosen = {rank: as_place(files[rank]) for rank in sorted(files)}
    for file in chosen.values():
        if len(chosen) == 1:
            refuse_one_of_several(file)
        refuse_directory(file.parent, [file.name], "others")
    return {rank: [file] for rank, file in chosen.items()}, Step.of(chosen.values())


def chosen_indexes(indexes: Sequence[str], suffix: str | None) -> Sequence[str]:
    """Return the indexes of sets whose names end with a suffix; all of them if there is one, or if none does."""
    ends = (suffix, f"{suffix}.json") if suffix is not None else ()
    of_suffix = [name for name in indexes if name.endswith(ends)]
    return of_suffix if len(indexes) > 1 and of_suffix else indexes


def _refuse_unused(path: Place, listing: Sequence[str], options: OpenOptions) -> None:
    """Refuse options for files of ranks if a source is one file or a set, on which they have no effect.

    A suffix chooses one of several sets; that all tensors are whole is no contradiction.
    """
    given = {*options.given}
    if "step" in given:
        raise UsageError(
            f"{path} has no iterations",
            code="no-iterations",
            hint=Text("leave ", Option("step", options.step), " out"),
        )
    indexes = set_indexes(listing)
    if listing and not indexes:
        return
    unused = given & {"rank_pattern", "suffix"}
    if indexes:
        unused = given & {"rank_pattern", "suffix", "layouts", "stage", "partial"}
        unused -= {"suffix"} if len(indexes) > 1 else set()
        unused -= {"layouts"} if {*options.layouts.values()} == {"whole"} else set()
        unused -= {"stage"} if options.stage == "own" else set()
    if unused and path.is_there():
        what = "a set of whole tensors" if indexes else "one file"
        texts = [Text(Option(name.removesuffix("s"))) for name in sorted(unused)]
        raise UsageError(
            Text(f"{path} is {what}, and has no use for ", joined(" and ", texts)),
            code="no-effect",
            hint="leave it out" if len(unused) == 1 else "leave them out",
        )
