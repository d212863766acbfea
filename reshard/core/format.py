"""The interface of a format of checkpoints.

A format finds a checkpoint by the names in a directory, and opens it: a `Checkpoint` lists each tensor, its blocks, and
the byte ranges of each block. A format that can be written has a `Target`, which lays out files. Everything else is the
core's: planning, reading, writing, verifying.

`reshard.formats` has the list of formats. A package adds one by the entry point group `reshard.formats`, or by
`reshard.formats.register`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from reshard.core.listing import Contents, FileNames, Listing, OpenOptions, RunLayout
from reshard.core.model.checkpoint import IndexedFiles
from reshard.core.model.findings import Candidate, Findings, by_opening
from reshard.core.storage.cipher import required
from reshard.errors import ReshardError, SourceError, UsageError
from reshard.messages import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from reshard.core.layout.arrangement import Arrangement
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.findings import Directory
    from reshard.core.model.objects import Objects
    from reshard.core.options import Options
    from reshard.core.storage.places import AnyName, Place
    from reshard.core.target import Target

GROUP = "reshard.formats"
"""The entry point group in which packages name their formats."""

_USUAL = re.compile(r"rank_\d+|\..*", re.DOTALL)
_registered: list[Format] = []


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A checkpoint that a format recognised by its names.

    Attributes:
        format: the format.
        here: its directory or file.
        files: the paths of its files below the directory, if the format lists them.
        variant: which kind of the format it is, in the format's own words.
        by_rank: the files of ranks, if they were named one by one.
    """

    format: Format
    here: Listing
    files: Sequence[str] = ()
    variant: str = ""
    by_rank: Mapping[int, AnyName] | None = None

    @property
    def place(self) -> Place:
        """Return its directory or file."""
        return self.here.place

    @property
    def source(self) -> Place | Mapping[int, AnyName]:
        """Return its directory or file, or the files of ranks that were named."""
        return self.place if self.by_rank is None else self.by_rank

    def open(self, options: OpenOptions | None = None, *, contents: Contents = True) -> Checkpoint:
        """Open it.

        Raises:
            SourceError: it is not valid.
            UsageError: the format does not take an option.
        """
        options = options or OpenOptions()
        given = {*options.given} | ({"strategy"} if options.strategy is not None else set())
        takes = self.format.takes | {"step"}
        if given - takes or ("cipher" not in takes and required(options.cipher)):
            raise options_refused(self.place)
        try:
            checkpoint = self.format.open(self, options, contents=contents)
        except (ReshardError, OSError, MemoryError):
            raise
        except Exception as error:
            if _is_own(self.format):
                raise
            raise SourceError(
                f"{self.place} is not valid as {self.format.title}: {type(error).__name__}: {error}",
                code="not-a-checkpoint",
            ) from error
        return checkpoint if checkpoint.format is not None else replace(checkpoint, format=self.format)


class Format:
    """A format of checkpoints; a subclass for each, of which one object is registered.

    Attributes:
        name: the word for it: the value of `to`, and what plan files and `--json` say.
        title: its name in tables and messages.
        extends: the names of formats that it builds on, and before which it is asked.
        runs: how the steps of a run lie side by side.
        of_tensors: the extensions of its files of tensors, of the targets that this program writes.
        parts: names of files of which one alone is no checkpoint.
        unfinished_mark: what is in the name of a step that is being written; empty if nothing is.
        takes: the options of opening that it understands, besides `contents`.
        is_deep: its files are in subdirectories, too.
        block_bytes: the memory that each block of a tensor takes, beyond that of every format.
        entry_bytes: the same for each entry of a file.
        is_numbered: the name of a step may be any prefix and a number.
        carries: it can hold objects that are not tensors, of other formats, too.
        describes: its files say how tensors are cut, so that it needs no strategy.
        has_steps: a checkpoint may be asked for by the number of its step.
        aliases: other words for it.
        whole: what a target is called that holds whole tensors only, such as `a zarr store`; empty if it holds blocks.
        encoding: the format of the files of a target; empty if it has its own.
        extension: the extension of a name by which a target is of this format, without a dot; empty for none.
        one_file: a target may be one file.
        called: what a target is called, such as `a zarr store`; empty if it is just its files.
        takes_layouts: a target may be cut as another checkpoint says, in place of a strategy.
    """

    name: str
    title: str
    extends: tuple[str, ...] = ()
    runs: tuple[RunLayout, ...] = ()
    of_tensors: frozenset[str] = frozenset({".safetensors"})
    parts: tuple[FileNames, ...] = ()
    unfinished_mark: str = ""
    takes: frozenset[str] = frozenset()
    is_deep: bool = False
    block_bytes: int = 0
    entry_bytes: int = 0
    is_numbered: bool = False
    carries: bool = False
    describes: bool = True
    has_steps: bool = True
    aliases: tuple[str, ...] = ()
    whole: str = ""
    encoding: str = ""
    extension: str = ""
    one_file: bool = False
    called: str = ""
    takes_layouts: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.name, self.title)

    def __repr__(self) -> str:
        return f"<Format {self.name}>"

    @property
    def options(self) -> type[Options] | None:
        """Return the class of its options as a target; None if it is only read."""
        return None

    def target(self, options: Options) -> type[Target]:
        """Return how it is written with some options."""
        raise NotImplementedError

    def find(self, here: Listing) -> Found | None:  # noqa: ARG002 -- subclasses use it
        """Return the checkpoint in a directory, or of a file, by its names; None if it is none of this format.

        Only the first bytes of small files are read.
        """
        return None

    def open(self, found: Found, options: OpenOptions, *, contents: Contents) -> Checkpoint:
        """Open what `find` found.

        Raises:
            SourceError: it is not valid.
        """
        raise NotImplementedError

    def headers(self, found: Found, options: OpenOptions) -> IndexedFiles:
        """Return the files of a checkpoint with their headers; no strategy is needed.

        Raises:
            SourceError: they are not valid.
            UsageError: an option says how a checkpoint is cut that says that itself.
        """
        if options.given:
            raise options_refused(found.place)
        opened = found.open(contents=False)
        return IndexedFiles(opened.files, opened.ranks, [*opened.warnings], opened.opening.step)

    def files_by_rank(self, found: Found, options: OpenOptions) -> Mapping[int, Sequence[Place]]:  # noqa: ARG002 -- subclasses use it
        """Return the files of tensors in a directory, by rank if their names tell it; no header is read.

        Raises:
            SourceError: there are none, or several checkpoints.
        """
        return {0: [file for file in found.place.files(depth=1) if file.suffix in self.of_tensors]}

    def marks(self, name: str) -> bool:  # noqa: ARG002 -- subclasses use it
        """Return whether a file of this name marks a directory that has nothing else in it, finished or not."""
        return False

    def word_of(self, checkpoint: Checkpoint) -> str:  # noqa: ARG002 -- subclasses use it
        """Return the word of `to` for a target like a checkpoint of this format."""
        return self.name

    def layouts(self, place: Place) -> Arrangement | None:  # noqa: ARG002 -- subclasses use it
        """Return how the tensors of a checkpoint are cut, by its metadata alone; None if they do not say it."""
        return None

    def notes(self, names: Iterable[str]) -> Sequence[str]:  # noqa: ARG002 -- subclasses use it
        """Return notes for the user about a target with tensors of these names."""
        return ()

    def metadata_of(self, checkpoint: Checkpoint) -> Sequence[str]:  # noqa: ARG002 -- subclasses use it
        """Return the paths of further files of metadata, which a plan file notes like those of tensors."""
        return ()

    def owns(self, name: str) -> bool:
        """Return whether a file of this name belongs to a checkpoint of several files."""
        own = (part for part in self.parts if part.when.isdisjoint({"alone", "foreign"}))
        return any(name in part.marks or part.files.fullmatch(name) for part in own)

    # --- of what a program has opened with the format's own library ---------------------------------------------

    def knows(self, value: object) -> bool:  # noqa: ARG002 -- subclasses use it
        """Return whether a value is a checkpoint that the format's own library has opened."""
        return False

    def path_of(self, value: Any) -> str | None:  # noqa: ARG002 -- subclasses use it
        """Return the local path of such a value; None if it is elsewhere."""
        return None

    def arrays_of(self, value: Any) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        """Return the dask arrays of such a value by name, and the reason for each that cannot be read."""
        raise NotImplementedError

    # --- of runs ------------------------------------------------------------------------------------------------

    def listed(self, tree: Directory) -> Iterator[tuple[Candidate, Iterable[str]]]:
        """Yield the checkpoints in a directory, for `reshard runs`, each with the subdirectories that belong to it."""
        if found := _first([self], Listing(tree.place, tree.names)):
            yield self.candidate(tree, partial(self.complete, found, tree)), tree.below if self.is_deep else ()

    def candidate(self, tree: Directory, examine: Callable[[], Findings], **more: Any) -> Candidate:
        """Return a directory as a checkpoint that `examine` looks at."""
        files = [*tree.every_file()] if self.is_deep else [*tree.files.values()]
        return Candidate(tree.place, self.title, "", files, examine, is_numbered=self.is_numbered, **more)

    def remains(self, tree: Directory) -> str:  # noqa: ARG002 -- subclasses use it
        """Return why a directory that `find` does not recognise is an incomplete checkpoint of this format, or ""."""
        return ""

    def complete(self, found: Found, tree: Directory) -> Findings:  # noqa: ARG002 -- subclasses use it
        """Return whether a checkpoint is complete; by default, if it opens without a warning."""
        return by_opening(partial(found.open, contents=False), found.place)

    def unfinished(self, here: Listing) -> str:  # noqa: ARG002 -- subclasses use it
        """Return why the directory of a step is not finished, or ""."""
        return ""

    # --- what is not a tensor -----------------------------------------------------------------------------------

    def objects(self, checkpoint: Checkpoint) -> Objects:
        """Return the objects of a checkpoint that are not tensors; by default their bytes."""
        from reshard.core.model.objects import Objects  # rarely needed

        return Objects(checkpoint)


def options_refused(path: object) -> UsageError:
    """Return the error for options that say how a checkpoint is cut, if it says that itself."""
    return UsageError(
        f"{path} describes its own blocks",
        code="self-described",
        hint="leave the strategy, layout, stage, suffix, pattern, key and partial out",
    )


# --- the list of formats ------------------------------------------------------------------------------------------


def _unpickled(name: str, title: str) -> Format:
    """Return a format with a name; on a worker of a cluster that does not have it, one that does nothing."""
    for each in formats():
        if each.name == name:
            return each
    other = Format()
    other.name, other.title = name, title
    return other


@cache
def _built_in() -> tuple[Format, ...]:
    names = import_module("reshard.formats").BUILT_IN
    return tuple(each for name in names for each in import_module(f"reshard.{name}").FORMATS)


@cache
def _loaded() -> tuple[tuple[Format, ...], Mapping[str, str]]:
    """Return the formats that packages name in their entry points, and why others cannot be loaded."""
    from importlib.metadata import entry_points  # it takes 50 ms

    found, faults = list[Format](), {}
    for entry in entry_points(group=GROUP):
        try:
            found.append(_checked(entry.load()))
        except Exception as error:
            package = entry.dist.name if entry.dist else "a package"
            faults[entry.name] = f"{package} cannot load {entry.value}: {type(error).__name__}: {error}"
    return tuple(found), faults


def _of_packages() -> tuple[Format, ...]:
    """Return the formats that packages name; those that cannot be loaded are warned of."""
    found, faults = _loaded()
    warn([f"the format {name!r} is left out: {why}" for name, why in faults.items()])
    return found


def faulty_formats() -> Mapping[str, str]:
    """Return why formats of packages cannot be loaded, by the name in the entry point."""
    return _loaded()[1]


def _checked(format_: Any) -> Format:
    """Return a format; raise `UsageError` if it is none, or has the name of another one."""
    if not isinstance(format_, Format):
        raise UsageError(f"{format_!r:.80} is no object of a subclass of Format", code="bad-format")
    if any(each.name == format_.name for each in (*_built_in(), *_registered)):
        raise UsageError(f"there is a format {format_.name!r} already", code="bad-format", hint="give it another name")
    return format_


def register(format_: Format) -> None:
    """Add a format to the list: before those that it extends, else before sets and files of ranks.

    Raises:
        UsageError: it is no format, or has the name of another one.

    >>> class Notes(Format):
    ...     name, title = "notes", "Notes"
    >>> register(Notes())
    >>> named("notes").title
    'Notes'
    """
    _registered.append(_checked(format_))


def formats(*, packages: bool = False) -> tuple[Format, ...]:
    """Return the formats, in the order in which they are asked.

    Args:
        packages: load those that packages name in their entry points, too.
    """
    others = (*_registered, *(_of_packages() if packages else ()))
    if not others:
        return _built_in()
    result = list(_built_in())
    for each in others:
        before = {*each.extends} or {known.name for known in result if not known.describes}
        result.insert(next(number for number, known in enumerate(result) if known.name in before), each)
    return tuple(result)


def named(name: str) -> Format:
    """Return the format with a name.

    Raises:
        UsageError: there is none.
    """
    for packages in (False, True):
        for each in formats(packages=packages):
            if each.name == name:
                return each
    known = ", ".join(each.name for each in formats(packages=True))
    raise UsageError(f"unknown format {name!r:.60}; known are {known}", code="unknown-format")


def targets(*, packages: bool = False) -> tuple[Format, ...]:
    """Return the formats that can be written; arguments as for `formats`."""
    return tuple(each for each in reversed(formats(packages=packages)) if each.options is not None)


def written(word: str) -> Format:
    """Return the format of a target by its word or an alias.

    Raises:
        UsageError: there is none that can be written.

    >>> written("huggingface").name, written("ckpt").name
    ('hf', 'ckpt')
    """
    for packages in (False, True):
        for each in targets(packages=packages):
            if word == each.name or word in each.aliases:
                return each
    known = ", ".join(each.name for each in targets(packages=True))
    raise UsageError(f"unknown format {word!r:.60}; known are {known}", code="unknown-format")


def knowing(value: object) -> Format | None:
    """Return the format whose own library has opened a value, such as a `zarr.Group`; None for paths."""
    return next((each for each in formats() if each.knows(value)), None)


def format_of(options: object) -> Format | None:
    """Return the format of the options of a target; None if they are of none."""
    for packages in (False, True):
        for each in targets(packages=packages):
            if type(options) is each.options:
                return each
    return None


def find(here: Listing, step: int | None = None) -> Found:
    """Return the checkpoint in a directory, or of a file, as the first format that recognises it finds it.

    What no other format recognises is taken for files of ranks, which are opened by a strategy.

    Args:
        here: the directory, or a file.
        step: the step that is asked for, which stores do not have.
    """
    known = [each for each in formats() if step is None or each.has_steps]
    asked = [each for each in known if each.describes]
    others = [each for each in known if not each.describes]
    found = _first(asked, here)
    if found is None and not (here.names and all(map(_USUAL.fullmatch, here.names))):
        found = _first(_of_packages(), here)
    return found or _first(others, here) or Found(others[-1], here)


def parts_of_several() -> tuple[FileNames, ...]:
    """Return the names of files of which one alone is no checkpoint, of all formats."""
    return tuple(part for each in formats() for part in each.parts)


def is_of_several(name: str) -> bool:
    """Return whether a file name is of a checkpoint of several files, or of a set, or its index.

    >>> [is_of_several(name) for name in ("part7.safetensors", "model-00001-of-00001.safetensors", "net.safetensors")]
    [True, True, False]
    """
    return any(each.owns(name) for each in formats())


def marked(names: Iterable[str]) -> Format | None:
    """Return the format of a directory that has nothing else in it, finished or not, by the names in it."""
    names = list(names)
    return next((each for each in formats() if any(map(each.marks, names))), None)


def _first(asked: Iterable[Format], here: Listing) -> Found | None:
    """Return the find of the first format that recognises a checkpoint. A package's format that fails is skipped."""
    for each in asked:
        try:
            if found := each.find(here):
                return found
        except Exception as error:
            if _is_own(each):
                raise
            warn([f"the format {each.name!r} is left out: {type(error).__name__}: {error}"])
    return None


def _is_own(format_: Format) -> bool:
    """Return whether a format is one of this program, not of another package."""
    return type(format_).__module__.partition(".")[0] == __name__.partition(".")[0]
