"""Open a source: find its files, read their headers, apply a strategy, and sample the contents."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial as applied
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

from reshard.core.model.assemble import assemble
from reshard.core.model.checkpoint import Checkpoint, SourceFile, unreadable_in
from reshard.core.model.facts import Opening
from reshard.core.model.probe import compare_contents
from reshard.core.records.logs import DIRECTORY, UNREADABLE_LEDGER, unfinished
from reshard.core.records.made import made_of
from reshard.core.storage.base import COPY_AGAIN, reading
from reshard.core.storage.cipher import required
from reshard.core.storage.places import AnyName, Place, as_place
from reshard.errors import Option, SourceError, Text, UnansweredError, UsageError
from reshard.expressions.quantized.methods import noting_method
from reshard.formats.directories import (
    PARTS,
    RUN_FORMATS,
    refuse_directory,
    refuse_one_of_several,
)
from reshard.formats.openers import options_refused, refuse_options_of_ranks, self_described
from reshard.formats.ranks.directories import RANK_DIRECTORY, RANK_PATTERN, Step, leftovers, rank_files
from reshard.formats.ranks.one_of_ranks import one_of_ranks, refuse_one_of_ranks, refuse_parts_of_ranks
from reshard.formats.ranks.reader import (
    IndexedFiles,
    changed_text,
    check_files,
    index_ranks,
    left_of_several,
    lone_rank,
    one_stage,
    refuse_other_strategy,
    rules_over_parts,
    with_rules,
)
from reshard.formats.runs import iteration_at
from reshard.formats.sets.names import HYPER_FILES, check_members, read_index, set_indexes
from reshard.formats.zarr.files import is_of_store
from reshard.strategy.files import read_strategy
from reshard.strategy.names import ranks_text
from reshard.strategy.strategy import Strategy

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.records.made import Made
    from reshard.core.storage.cipher import Cipher
    from reshard.formats.openers import Opener


_WHOLE = {"*": "whole"}
"""The layouts of a file that has all of a model, whatever is next to it."""


def _resumable(opens: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate a function that reads a source: an error about an unfinished target says how to resume it."""

    @wraps(opens)
    def opening(path: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return opens(path, *args, **kwargs)
        except UnansweredError:
            raise  # the store would not answer another request either
        except SourceError:
            if isinstance(path, Mapping):
                raise
            root = as_place(str(path))
            progress = None
            with suppress(SourceError):  # the first error says more
                progress = unfinished(str(root.absolute())) if DIRECTORY in root.names() else None
            if progress is None:
                raise
            raise SourceError(
                f"{root} is unfinished", code="unfinished", facts=[progress.text, *leftovers(root)], hint=progress.hint
            ) from None

    return opening


@noting_method
@_resumable
def open(  # noqa: A001 -- reshard.open, as zarr.open and xarray.open_dataset
    path: AnyName | Mapping[int, AnyName],
    *,
    strategy: Strategy | AnyName | None = None,
    rank_pattern: str = RANK_PATTERN,
    suffix: str | None = None,
    layouts: Mapping[str, str] | None = None,
    stage: int | Literal["own"] | None = None,
    partial: bool = False,
    iteration: int | None = None,
    cipher: Cipher | None = None,
    contents: bool | Literal["blocks"] = True,
) -> Checkpoint:
    """Open a checkpoint, with the arguments of `reshard.open` (`layouts` is its `layout`)."""
    unnamed = suffix is None and rank_pattern == RANK_PATTERN
    listing = [] if isinstance(path, Mapping) else as_place(path).names()
    opener = None if isinstance(path, Mapping) else self_described(as_place(path), iteration, listing)
    if opener is not None:
        if not (stage is None and unnamed) or partial or required(cipher):
            raise options_refused(path)
        return _opened(opener, rules_over_parts(strategy, layouts), contents=contents)
    _refuse_unused(
        path, listing, iteration,
        {"rank_pattern": rank_pattern, "suffix": suffix, "layouts": layouts, "stage": stage, "partial": partial},
    )  # fmt: skip
    files, ranks, warnings, step, cipher = _read_undescribed(path, listing, rank_pattern, suffix, cipher)
    is_described = bool(strategy or layouts or set_indexes(listing))
    ledger = None if isinstance(path, Mapping) else _ledger(as_place(path), listing, warnings if is_described else None)
    numbered = "" if is_described or rank_pattern != RANK_PATTERN else _one_rank(files, cipher, warnings)
    change = ledger.change(files, partial=partial) if ledger else ""
    ledger_strategy = ledger.strategy if ledger and not change else None  # the layout in the ledger
    root = str(as_place(next(iter(path.values()), ".")).parent if isinstance(path, Mapping) else as_place(path))
    if strategy is not None and not isinstance(strategy, Strategy):
        strategy = read_strategy(strategy)
    by_ledger = strategy is None and stage is None and unnamed and ledger_strategy is not None
    if by_ledger and ledger and ledger_strategy:
        strategy, stage = ledger_strategy, ledger.provenance.target.stage
        partial = partial or len(set(ranks)) < len(
            (ledger_strategy if stage is None else ledger_strategy.of_stage(stage)).ranks
        )
    change = change if unnamed and strategy is None else ""
    warnings += [changed_text(root, change)] if change else []
    lone_reason = ""
    if not (layouts or by_ledger) and len(set(ranks)) == 1:
        lone_reason = lone_rank(path, strategy, files, ranks[0], warnings) or left_of_several(root, ledger, change)
    strategy, ruled, confirmed = with_rules(strategy, layouts or {}, files, ranks)
    full_strategy = strategy
    strategy, part = one_stage(root, strategy, stage, files, ranks, warnings)
    if strategy is None and len(set(ranks)) > 1:
        from reshard.formats.ranks.beside import unknown_layout  # on this error only

        again = applied(open, path, rank_pattern=rank_pattern, suffix=suffix, partial=partial, cipher=cipher)
        raise unknown_layout(root, ranks, change, lambda candidate: again(strategy=candidate))
    other_stage_names: set[str] = set()
    if strategy is not None and part is not None:
        inside = [number for number, rank in enumerate(ranks) if rank in strategy.ranks]
        if not inside:
            raise SourceError(
                f"{root} has no file of stage {part}",
                code="missing-ranks",
                facts=[f"the stage has {ranks_text(strategy.ranks)}; the files are of {ranks_text(ranks)}"],
                hint=COPY_AGAIN,
            )
        other_stage_names.update(
            full_strategy.tensors if full_strategy else (), *(file.index.entries for file in files)
        )
        files, ranks = tuple(files[n] for n in inside), tuple(ranks[n] for n in inside)
        other_stage_names.difference_update(strategy.tensors, *(file.index.entries for file in files))
    if not any(file.index.entries for file in files):
        raise SourceError(f"{root} has no tensor", code="no-tensors")
    with _explained(path, knows=ledger_strategy is not None and not (by_ledger or layouts)):
        tensors = assemble(root, files, ranks, strategy, partial=partial)
    if ledger_strategy and strategy is not None and part is None and (layouts or not by_ledger):
        refuse_other_strategy(root, strategy, ledger_strategy, tensors, ruled)
    opening = Opening(
        part,
        frozenset(other_stage_names),
        partial,
        by_file=isinstance(path, Mapping),
        lone_rank=lone_reason,
        numbered=numbered,
        step=step,
    )
    checkpoint = Checkpoint(
        root, tensors, files, ranks, strategy, tuple(warnings), unreadable_in(files), cipher, opening=opening
    )
    return compare_contents(checkpoint, ruled, confirmed, contents=contents)


def _refuse_unused(
    path: AnyName | Mapping[int, AnyName], listing: Sequence[str], iteration: int | None, options: Mapping[str, Any]
) -> None:
    """Refuse an iteration, and options for files of ranks if there are none; the source does not describe itself."""
    if not isinstance(path, Mapping):
        refuse_options_of_ranks(as_place(path), listing, **options)
    if iteration is not None:
        raise UsageError(
            f"{path} has no iterations",
            code="no-iterations",
            hint=Text("leave ", Option("iteration", iteration), " out"),
        )


def _opened(opener: Opener, rules: Mapping[str, str] | None, *, contents: bool | Literal["blocks"]) -> Checkpoint:
    """Open a checkpoint that describes its own blocks, or a file of whole tensors; `rules` are the user's."""
    if opener.file is None:
        return opener(contents=contents, rules=rules)
    if rules == _WHOLE:
        checkpoint = opener(contents=contents)
        return replace(checkpoint, opening=replace(checkpoint.opening, rules=rules))
    if rules is None:
        refuse_one_of_ranks(opener.file)
    checkpoint = opener(contents=contents, rules=rules)
    if reason := one_of_ranks(opener.file, _saved_shapes):
        warnings = (*checkpoint.warnings, reason)
        return replace(checkpoint, warnings=warnings, opening=replace(checkpoint.opening, numbered=reason))
    return checkpoint


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


def _saved_shapes(path: Place) -> dict[str, Shape]:
    """Return the shapes of the tensors in a file of `torch.save`."""
    from reshard.formats.torch_save.saves import open_save  # not on every start

    return {name: tensor.spec.shape for name, tensor in open_save(path, contents=False).tensors.items()}


def _shapes(path: Place, cipher: Cipher | None) -> dict[str, Shape]:
    """Return the shapes of the tensors in another file, by its header."""
    (file,) = index_ranks({0: [path]}, cipher, []).files
    return {name: entry.shape for name, entry in file.index.entries.items()}


@contextmanager
def _explained(path: AnyName | Mapping[int, AnyName], *, knows: bool) -> Iterator[None]:
    """Add facts about the directory to a SourceError.

    They are unfinished files, and that the ledger has a layout.

    Raises:
        SourceError: the error, with these facts.
    """
    try:
        yield
    except SourceError as error:
        if not isinstance(path, Mapping):
            error.facts += tuple(leftovers(as_place(path)))
        if knows:
            error.hint = Text("its ledger knows its layout: leave ", Option("strategy"), " out")
        raise


def made_at(
    path: AnyName, listing: Sequence[str] | None = None, *, mixed: bool = False, described: bool | None = None
) -> Made | None:
    """Return the provenance in a target's ledger, or None if the target has files that it does not list.

    Args:
        path: the target.
        listing: the names of its entries, if known.
        mixed: accept a directory that has other files, too; `Made.change` then names them.
        described: whether the path describes its own blocks, if that is known.

    Raises:
        SourceError: its ledger exists, and cannot be read or is damaged.
    """
    root = as_place(path)
    try:
        listing = root.names() if listing is None else listing
        directory = root if described is False else iteration_at(root, listing)
        ledger = made_of(directory, listing if directory == root else None)
        if ledger is None or not listing or any(map(is_of_store, listing)):
            return ledger
        if described or (described is None and self_described(directory)):
            files_by_rank = {
                0: [file for file in directory.files(depth=1) if file.suffix in {".safetensors", ".distcp"}]
            }
        else:
            unified = read_index(root)
            files_by_rank = {0: unified[0]} if unified else rank_files(root, RANK_PATTERN, None, [])[0]
    except SourceError as error:
        if error.code == UNREADABLE_LEDGER:
            raise
        return None  # several checkpoints in one directory, or missing ranks, which reading the files reports
    recorded = {f"{ledger.root}/{file}" for file in ledger.records}
    is_recorded = [str(file.absolute()) in recorded for files in files_by_rank.values() for file in files]
    return ledger if (any if mixed else all)(is_recorded) else None


class LedgerLayout(NamedTuple):
    """Whether a checkpoint's ledger gives its strategy; if not, how files changed."""

    is_known: bool
    change: str = ""


def ledger_layout(path: AnyName, cipher: Cipher | None = None, *, described: bool | None = None) -> LedgerLayout:
    """Return whether the ledger of a target gives its layout; `described` is as for `made_at`.

    Raises:
        SourceError: files changed, and a header cannot be read.
    """
    ledger = _with_strategy(as_place(path), as_place(path).names(), described=described)
    if ledger is None or (ledger.is_as_noted() and made_at(path, described=described) is not None):
        return LedgerLayout(ledger is not None)
    change = ledger.change(read_headers(path, cipher=cipher).files)
    return LedgerLayout(not change, change)


def _ledger(root: Place, listing: Sequence[str], warnings: list[str] | None) -> Made | None:
    """Return the provenance of ranks with a strategy, or None.

    Args:
        root: the directory.
        listing: the names of its entries.
        warnings: gets a warning if the ledger cannot be read; None if the layout depends on it.
    """
    try:
        return _with_strategy(root, listing, described=False)
    except SourceError as error:
        if error.code != UNREADABLE_LEDGER or warnings is None:
            raise
        warnings.append(error.message)
        return None


def _with_strategy(root: Place, listing: Sequence[str], *, described: bool | None) -> Made | None:
    """Return the provenance of a target with a strategy, or None.

    Files may have changed, and other files may have been added.
    """
    ledger = made_at(root, listing, mixed=True, described=described) if listing else None
    return ledger if ledger is not None and ledger.strategy else None


def files_read(path: AnyName, files: Iterable[SourceFile]) -> list[AnyName]:
    """Return every path that opening a checkpoint reads.

    They are its files and index, or all files there if it describes its own blocks.
    """
    root = as_place(path)
    paths: list[AnyName] = [file.path for file in files]
    if self_described(root):
        return [root, *root.files(), *(root.absolute().parent / run.tracker for run in RUN_FORMATS)]
    return [*paths, *(root / name for name in (*set_indexes(root.names()), *HYPER_FILES))]


def files_of_sources(checkpoint: Checkpoint) -> list[AnyName]:
    """Return every path that opening a checkpoint reads, or that the checkpoints from which it is computed read."""
    return [path for source in checkpoint.sources for path in files_read(source.root, source.files)]


def _indexes(listing: Sequence[str], suffix: str | None) -> list[str]:
    """Return the names of the indexes of sets, of those with a suffix if there are several."""
    indexes = set_indexes(listing)
    of_suffix = [name for name in indexes if suffix is not None and name.removesuffix(".json").endswith(suffix)]
    of_suffix = of_suffix or [name for name in indexes if suffix is not None and name.endswith(suffix)]
    return of_suffix if len(indexes) > 1 and of_suffix else indexes


@_resumable
@reading(SourceError)
def has_several_ranks(path: AnyName, rank_pattern: str = RANK_PATTERN, suffix: str | None = None) -> bool:
    """Return whether a checkpoint has several ranks, by file names; no header is read.

    Raises:
        SourceError: no files, no step that every rank has.
    """
    root = as_place(path)
    if self_described(root):
        return False
    refuse_options_of_ranks(root, listing := root.names(), rank_pattern=rank_pattern, suffix=suffix)
    if read_index(root, _indexes(listing, suffix)):
        return False
    with _told_of_ranks(root):
        return len(rank_files(root, rank_pattern, suffix, [])[0]) > 1


@contextmanager
def _told_of_ranks(root: Place) -> Iterator[None]:
    """Raise another error for a directory of several checkpoints if they are parts of ranks, by their names."""
    try:
        yield
    except SourceError as error:
        if "several-checkpoints" in error.codes:
            refuse_parts_of_ranks(root)
        raise


@_resumable
@reading(SourceError)
def read_headers(
    path: AnyName | Mapping[int, AnyName],
    *,
    rank_pattern: str = RANK_PATTERN,
    suffix: str | None = None,
    cipher: Cipher | None = None,
) -> IndexedFiles:
    """Read the headers of a checkpoint's files; no strategy is needed.

    Raises:
        SourceError: no files, no step that every rank has, a file that is not valid.
    """
    listing: Sequence[str] = ()
    if not isinstance(path, Mapping):
        path = as_place(path)
        listing = path.names()
        if opener := self_described(path, listing=listing):
            if not (suffix is None and rank_pattern == RANK_PATTERN):
                raise options_refused(path)
            opened = opener(contents=False)
            return IndexedFiles(opened.files, opened.ranks, list(opened.warnings), opened.opening.step)
        refuse_options_of_ranks(path, listing, rank_pattern=rank_pattern, suffix=suffix)
    return _read_undescribed(path, listing, rank_pattern, suffix, cipher)


@reading(SourceError)
def _read_undescribed(
    path: AnyName | Mapping[int, AnyName],
    listing: Sequence[str],
    rank_pattern: str,
    suffix: str | None,
    cipher: Cipher | None,
) -> IndexedFiles:
    """Read the headers of files that do not describe their blocks: of ranks, or of a unified set."""
    warnings: list[str] = []
    if isinstance(path, Mapping):
        check_files(path, rank_pattern, suffix)
        chosen = {rank: as_place(path[rank]) for rank in sorted(path)}
        for file in chosen.values():
            if len(chosen) == 1:
                refuse_one_of_several(file)
            refuse_directory(file.parent, [file.name], besides=[PARTS])
        return index_ranks({rank: [file] for rank, file in chosen.items()}, cipher, warnings, Step.of(chosen.values()))
    root = as_place(path)
    unified = read_index(root, _indexes(listing, suffix))
    if unified is None:
        is_directory = bool(listing) or root.is_dir()
        with _told_of_ranks(root):
            of_ranks, step = rank_files(root, rank_pattern, suffix, warnings, is_directory=is_directory)
        return index_ranks(of_ranks, cipher, warnings, step)
    paths, weight_map = unified
    result = index_ranks({0: paths}, cipher, warnings)
    members = {
        path.name: [*file.index.entries, *dict(file.index.unreadable)]
        for path, file in zip(paths, result.files, strict=True)
    }
    check_members(root, weight_map, members)
    return result
