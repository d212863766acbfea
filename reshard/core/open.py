"""Open a source: the first format that recognises it opens it. Read the ledger of one that is a target."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from reshard.core.format import Found, find, formats, marked
from reshard.core.listing import RANK_PATTERN, Listing, OpenOptions
from reshard.core.records.logs import DIRECTORY, UNREADABLE_LEDGER, leftovers, unfinished
from reshard.core.records.made import made_of
from reshard.core.runs import iteration_at, iteration_of
from reshard.core.storage.base import reading
from reshard.core.storage.places import AnyName, as_place
from reshard.errors import SourceError, UnansweredError
from reshard.expressions.quantized.methods import noting_method
from reshard.kits.indexes import HYPER_FILES, set_indexes

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reshard.core.listing import Contents
    from reshard.core.model.checkpoint import Checkpoint, IndexedFiles, SourceFile
    from reshard.core.records.made import Made
    from reshard.core.storage.cipher import Cipher
    from reshard.core.storage.places import Place


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
            with suppress(SourceError, OSError):
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
    path: AnyName | Mapping[int, AnyName], /, *, contents: Contents = True, **options: Any
) -> Checkpoint:
    """Open a checkpoint.

    Args:
        path: a directory or a file, or files by rank.
        contents: sample the contents.
        options: as in `OpenOptions`.
    """
    asked = OpenOptions(**{name: value for name, value in options.items() if name != "layouts" or value is not None})
    found = _found(path, asked.step)
    is_one = found.format.describes and "step" not in found.format.takes
    if is_one and asked.step not in {None, iteration_of(found.place, numbered=True)}:
        raise SourceError(
            f"{found.place} is one checkpoint, not a run with step {asked.step}",
            code="no-such-iteration",
            hint="open the directory of the run",
        )
    return found.open(asked, contents=contents)


def _found(path: AnyName | Mapping[int, AnyName], step: int | None = None) -> Found:
    """Return a checkpoint by its names; files by rank are of the last format, which takes any files."""
    if not isinstance(path, Mapping):
        return find(Listing(as_place(path)), step)
    above = as_place(next(iter(path.values()), "")).parent
    return Found(formats()[-1], Listing(above, ()), by_rank=path)


def is_described(path: AnyName, names: Sequence[str] | None = None) -> bool:
    """Return whether a checkpoint says how its tensors are cut; no header is read."""
    return find(Listing(as_place(path), names)).format.describes


def files_read(path: AnyName, files: Iterable[SourceFile]) -> list[AnyName]:
    """Return every path that opening a checkpoint reads.

    They are its files and index, or all files there if it describes its own blocks.
    """
    root = as_place(path)
    paths: list[AnyName] = [file.path for file in files]
    if is_described(root):
        trackers = {layout.tracker for each in formats() for layout in each.runs} - {""}
        return [root, *root.files(), *(root.absolute().parent / tracker for tracker in sorted(trackers))]
    return [*paths, *(root / name for name in (*set_indexes(root.names()), *HYPER_FILES))]


def files_of_sources(checkpoint: Checkpoint) -> list[AnyName]:
    """Return every path that opening a checkpoint reads, or that the checkpoints from which it is computed read."""
    return [path for source in checkpoint.sources for path in files_read(source.root, source.files)]


@_resumable
@reading(SourceError)
def has_several_ranks(path: AnyName, rank_pattern: str = RANK_PATTERN, suffix: str | None = None) -> bool:
    """Return whether a checkpoint needs a strategy, as it has several ranks; no header is read.

    Raises:
        SourceError: no files, no step that every rank has.
    """
    found = _found(path)
    options = OpenOptions(rank_pattern=rank_pattern, suffix=suffix)
    return not found.format.describes and len(found.format.files_by_rank(found, options)) > 1


@_resumable
@reading(SourceError)
def read_headers(path: AnyName | Mapping[int, AnyName], /, **of_files: Any) -> IndexedFiles:
    """Read the headers of a checkpoint's files; no strategy is needed.

    Args:
        path: a directory or a file, or files by rank.
        of_files: as in `OpenOptions.of_files`.

    Raises:
        SourceError: no files, no step that every rank has, a file that is not valid.
    """
    found = _found(path)
    return found.format.headers(found, OpenOptions(**of_files))


# --- ledgers ----------------------------------------------------------------------------------------------------------


def made_at(path: AnyName, listing: Sequence[str] | None = None, *, mixed: bool = False) -> Made | None:
    """Return the provenance in a target's ledger, or None if the target has files that it does not list.

    Args:
        path: the target.
        listing: the names of its entries, if known.
        mixed: accept a directory that has other files, too; `Made.change` then names them.

    Raises:
        SourceError: its ledger exists, and cannot be read or is damaged.
    """
    root = as_place(path)
    try:
        listing = root.names() if listing is None else listing
        directory = iteration_at(root, listing)
        ledger = made_of(directory, listing if directory == root else None)
        if ledger is None or not listing or marked(listing):
            return ledger
        found = find(Listing(directory, listing if directory == root else None))
        files_by_rank = found.format.files_by_rank(found, OpenOptions())
    except SourceError as error:
        if error.code == UNREADABLE_LEDGER:
            raise
        return None  # several checkpoints in one directory, or missing ranks, which reading the files reports
    recorded = {f"{ledger.root}/{file}" for file in ledger.records}
    is_recorded = [str(file.absolute()) in recorded for files in files_by_rank.values() for file in files]
    return ledger if (any if mixed else all)(is_recorded) else None


def with_strategy(root: Place, listing: Sequence[str]) -> Made | None:
    """Return the provenance of a target with a strategy, or None.

    Files may have changed, and other files may have been added.
    """
    ledger = made_at(root, listing, mixed=True) if listing else None
    return ledger if ledger is not None and ledger.strategy else None


class LedgerLayout(NamedTuple):
    """Whether a checkpoint's ledger gives its strategy; if not, how files changed."""

    is_known: bool
    change: str = ""


def ledger_layout(path: AnyName, cipher: Cipher | None = None) -> LedgerLayout:
    """Return whether the ledger of a target gives its layout.

    Raises:
        SourceError: files changed, and a header cannot be read.
    """
    ledger = with_strategy(as_place(path), as_place(path).names())
    if ledger is None or (ledger.is_as_noted() and made_at(path) is not None):
        return LedgerLayout(ledger is not None)
    change = ledger.change(read_headers(path, cipher=cipher).files)
    return LedgerLayout(not change, change)
