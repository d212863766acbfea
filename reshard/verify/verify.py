"""`reshard.verify`: is a checkpoint valid, is it that which another became, are its files those of a manifest.

* Alone: every rank is there and has what the strategy gives it, headers are valid, every block is there and covers its
  tensor once, names and shapes are as the strategy says. Headers are read, and contents where files carry checksums of
  them (`sums`), as PyTorch's distributed checkpoints do; then replicas are compared, too.
* Against a source: what a conversion with the same options would have written is what is there, on every rank, bit for
  bit, and replicas agree on both sides (`compare`).
* Against a manifest: sizes and checksums are what they were (`manifest_files`); every bit of a file is in one of them.

What a way does not look at is in `Verification.unchecked`.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace
from random import SystemRandom
from typing import TYPE_CHECKING, Any

from reshard.errors import EncryptedError, GoneError, Option, SourceError, Text, UsageError, bytes_text, joined, names
from reshard.formats.rank_dirs import EXTENSIONS, RANK_PATTERN, leftovers, rank_of
from reshard.formats.sets import SET_INDEXES, read_index
from reshard.formats.zarr import NAME as ZARR
from reshard.plan.budget import comparison_budget
from reshard.plan.changes import cast_advice, changes
from reshard.plan.select import Selection
from reshard.readers.open import made_at, read_headers
from reshard.readers.safetensors_library import SafetensorsLibrary, by_library
from reshard.source.checkpoint import Checkpoint
from reshard.source.reshape import with_shapes
from reshard.storage.cipher import required
from reshard.storage.places import as_place
from reshard.upward import upward
from reshard.verify.manifest import Manifest, read_manifest
from reshard.verify.manifest_files import check_files, sum_files
from reshard.verify.match import compares_notes, match, pairs_of_ranks
from reshard.verify.structure import check_structure
from reshard.verify.sums import check_carried, thread_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reshard.formats.rank_dirs import Step
    from reshard.plan.changes import Change
    from reshard.run.run import Progress
    from reshard.source.checkpoint import Looked
    from reshard.source.made import Made
    from reshard.storage.cipher import Cipher
    from reshard.storage.places import AnyName, Place
    from reshard.strategy.strategy import Strategy
    from reshard.verify.compare import Check
    from reshard.verify.difference import Difference
    from reshard.verify.sides import Sides
    from reshard.verify.sums import SumsChecked

    OnProgress = Callable[[int, int], None]
    """Gets the bytes done and the bytes to be done."""

_NEVER = "checksums that files carry (crc_num), and how text entries are stored"


@dataclass(frozen=True, slots=True)
class _How:
    """How contents are read: with which of the options of `verify`, and what reports progress."""

    memory: int | None
    threads: int
    client: Any
    on_progress: OnProgress
    sample: float | None
    seed: int | None
    independent: bool = False


@dataclass(frozen=True, slots=True)
class Verification:
    """What was verified, and what is not as it should be.

    Attributes:
        target: the directory or file that was looked at.
        against: the source that it was compared with, or the manifest; None where it was verified alone.
        ranks: ranks whose files were looked at; none for a manifest, which knows of none.
        files: how many files of the target were looked at.
        tensors: how many tensors were looked at.
        copies: how many blocks in files were looked at or compared with others, replicas included.
        bytes_read: bytes of contents read, of both sides; against a manifest, or alone, bytes of the files.
        total_bytes: what a comparison of all rows reads.
        differences: what is not as it should be.
        dropped: tensors of the source that the target may lack, and lacks.
        left_out: tensors of the target that were not asked for.
        sample: the share of rows that was compared; None for all.
        seed: of the sample.
        warnings: warnings; not differences.
        seconds: how long it took.
        unchecked: what of the files was not looked at, and could be anything.
        step: which of the checkpoints of a training run the target is; None where the names of its files do not say.
        against_step: likewise of the source.
        by_checksums: sizes and checksums were compared, those that the ledger has, because the source is gone.
        changes: in what the target is not its source, as asked for, or as ledgers say.
        note: why these two are compared, and in this order, if ledgers say so; how to compare what cannot be.
        absent: how many blocks are in no file of one side, and were not compared.
        complete: nothing that should be there is missing, as a strategy, an index, a source or a manifest says.
        by_ranks: the files are in rank directories.
        independent: how many files of the target were read with the library safetensors, not by this program's reader.
    """

    target: str
    against: str | None
    ranks: tuple[int, ...]
    files: int
    tensors: int
    copies: int
    bytes_read: int = 0
    total_bytes: int = 0
    differences: tuple[Difference, ...] = ()
    dropped: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    sample: float | None = None
    seed: int | None = None
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    unchecked: tuple[str, ...] = ()
    step: Step | None = None
    against_step: Step | None = None
    by_checksums: bool = False
    changes: tuple[Change, ...] = ()
    note: str = ""
    absent: int = 0
    complete: bool = True
    by_ranks: bool = False
    independent: int = 0

    @property
    def equal(self) -> bool:
        """Everything that was looked at is as it should be."""
        return not self.differences

    def __bool__(self) -> bool:
        return self.equal

    def __repr__(self) -> str:
        found = f"{len(self.differences)} differences" if self.differences else "as it should be"
        against = f" against {names([self.against])}" if self.against else ""
        of = f"{names([self.target])}{against}"
        return f"<Verification of {of}: {found}, {self.tensors} tensors, {self.bytes_read} bytes>"

    def _repr_html_(self) -> str:
        return str(upward("html")(self))


def verify(
    target: AnyName | Checkpoint,
    strategy: Strategy | AnyName | None = None,
    *,
    against: AnyName | Checkpoint | None = None,
    source_strategy: Strategy | AnyName | None = None,
    cipher: Cipher | None = None,
    source_cipher: Cipher | None = None,
    manifest: Manifest | AnyName | None = None,
    selection: Selection | None = None,
    sample: float | None = None,
    seed: int | None = None,
    partial: bool = False,
    deduplicated: bool = False,
    independent: bool = False,
    memory: int | None = None,
    threads: int | None = None,
    client: Any = None,
    progress: Callable[[Progress], None] | None = None,
) -> Verification:
    """Verify a checkpoint: `reshard.verify` says what the arguments are; memory is in bytes, a selection is one."""
    began = time.perf_counter()
    if against is not None and manifest is not None:
        raise UsageError(
            "a target is compared with a source or with a manifest, not with both",
            code="conflicting-options",
            hint="leave one out",
        )
    if deduplicated and manifest is not None:
        raise UsageError(
            Text(Option("deduplicated"), " does not go with a manifest, which says what each file holds"),
            code="conflicting-options",
            hint="leave one out",
        )
    _refuse_idle_selection(selection, against)
    how = _How(memory, thread_count(threads), client, _on_progress(progress, began), sample, seed, independent)
    made = (
        None if manifest is not None else _made(target, strategy, against, selection, partial=partial or deduplicated)
    )
    _check_sample(sample, against if made is None else made)
    _refuse_idle_library(independent=independent, is_compared=against is not None or made is not None)
    if manifest is not None:
        if isinstance(target, Checkpoint):
            raise UsageError(
                "a manifest is of files, not of an open checkpoint",
                code="wrong-type",
                hint="name the directory that the files are in",
            )
        if required(cipher):
            raise UsageError(
                "a manifest is of files that are not encrypted",
                code="conflicting-options",
                hint=Text("leave out ", Option("target_key")),
            )
        _refuse_idle(target, memory, client, source_cipher)
        found = _against_manifest(as_place(target), manifest, partial, how)
    elif made is not None:
        found = _against_made(made, cipher, source_cipher, how)
    else:
        from reshard.verify.sides import opened, sides_of

        if not isinstance(target, Checkpoint) and (strategy is not None or against is None):
            target = opened(target, strategy, cipher=cipher)
        if against is not None:
            if not isinstance(against, Checkpoint) and source_strategy is not None:
                against = opened(against, source_strategy, what="source", cipher=source_cipher)
            sides = sides_of(
                target, against, selection, deduplicated=deduplicated, cipher=cipher, against_cipher=source_cipher
            )
            found = _against_source(sides, how)
            if any(file.index.sums is not None for file in sides.target.files):
                rest = f"values are compared, not the checksums in the files of {sides.target.root}"
                found = replace(found, note=joined("; ", [*([found.note] if found.note else []), rest]))
        elif isinstance(target, Checkpoint):
            reads = any(file.index.sums is not None for file in target.files)
            _refuse_idle(target.root, memory, None if reads else client, source_cipher)
            found = _alone(target, selection or Selection(), deduplicated, how)
    return replace(found, seconds=time.perf_counter() - began)


def as_it_is(selection: Selection | None, against: object) -> Selection:
    """Return the selection of a comparison without changes, whatever ledgers say.

    Raises:
        UsageError: there is no source, or changes are asked for, too.
    """
    if against is None:
        raise UsageError(
            Text(Option("as_is"), " is for a comparison with a source"), code="needs-source",
            hint=Text("add ", Option("against")),
        )  # fmt: skip
    if selection is not None and selection != Selection():
        raise UsageError(
            Text(Option("as_is"), " is for a comparison without changes"), code="conflicting-options",
            hint=Text("leave ", Option("as_is"), " out, or what selects and changes tensors"),
        )  # fmt: skip
    return Selection()


def _check_sample(sample: float | None, source: object) -> None:
    """Refuse a sample that is no share, or that nothing is taken of."""
    if sample is not None and not 0 < sample <= 1:
        raise UsageError(f"sample is {sample}; expected a share above 0, up to 1", code="out-of-range")
    if sample is not None and source is None:
        raise UsageError(
            Text(Option("sample"), " is for a comparison with a source"),
            code="needs-source",
            hint=Text("add ", Option("against"), ", or leave it out"),
        )


def _refuse_idle(target: AnyName, memory: int | None, client: Any, source_cipher: Cipher | None) -> None:
    """Refuse what only a comparison with a source obeys."""
    given = ((Option("memory"), memory), (Option("client"), client), (Option("source_key"), required(source_cipher)))
    for option, value in given:
        if value is not None:
            raise UsageError(
                Text(option, " is only for a comparison with a source"),
                code="needs-source",
                facts=[f"{target} is compared with none"],
                hint="name a source, or leave the option out",
            )


def _refuse_idle_library(*, independent: bool, is_compared: bool) -> None:
    """Refuse to read files with the library that are compared with no source."""
    if independent and not is_compared:
        raise UsageError(
            "the safetensors library reads what is compared with a source, and there is none", code="needs-source",
            hint=Text("give ", Option("against")),
        )  # fmt: skip


def _refuse_idle_selection(selection: Selection | None, against: object) -> None:
    """Refuse to select, rename or cast what is compared with no source."""
    asked = replace(selection or Selection(), drop=(), allow_missing=())
    if against is None and asked != Selection():
        raise UsageError(
            "names, casts and rules are only for a comparison with a source",
            code="needs-source",
            hint=Text("name one with ", Option("against"), ", or leave them out: a ledger knows its own"),
        )


def _made(
    target: AnyName | Checkpoint, strategy: object, against: object, selection: Selection | None, *, partial: bool
) -> Made | None:
    """Return what the ledger of a target says, where nothing else is given that would say otherwise."""
    if isinstance(target, Checkpoint) or strategy is not None or against is not None or selection is not None:
        return None
    return None if partial else made_at(target)


def _against_made(made: Made, cipher: Cipher | None, source_cipher: Cipher | None, how: _How) -> Verification:
    """Compare a target with what it was made from, as its ledger says it, or with the checksums there."""
    from reshard.verify.made import check_sums, keys_of, source_of, target_of  # not on every start
    from reshard.verify.sides import Sides

    asked = required(source_cipher)
    cipher, source_cipher = keys_of(made, cipher, source_cipher)
    given = made.content["source"]["root"]
    try:
        source, selection, deduplicated = source_of(made, source_cipher)
    except SourceError as error:
        may_be_gone = asked is None and isinstance(error, GoneError)
        if how.independent or made.content["target"]["encrypted"] or (required(source_cipher) and not may_be_gone):
            raise
        differences, count, read = check_sums(made, threads=how.threads, on_progress=how.on_progress)
        warning = Text(f"compared with the sizes and checksums that its ledger has, not with {given}: ", error.text)
        return Verification(
            made.target,
            "its ledger",
            tuple(made.ranks),
            len(made.records),
            0,
            count,
            read,
            read,
            differences,
            warnings=(warning, *leftovers(as_place(made.target))),
            unchecked=("headers, and what has no checksum", _NEVER),
            by_checksums=True,
        )
    try:
        target = target_of(made, cipher)
    except SourceError as error:
        raise error.changed(lambda text: Text(text).map(lambda option: option.of("target"))) from None
    return _against_source(Sides(target, source, selection, deduplicated), how)


def make_manifest(
    target: AnyName,
    *,
    rank_pattern: str = RANK_PATTERN,
    suffix: str | None = None,
    threads: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Manifest:
    """Read the files of a checkpoint, and return their manifest; no strategy is needed.

    Args:
        target: as for `reshard.open`; paths in the manifest are below it, or next to it if it is a file.
        rank_pattern: as for `reshard.open`.
        suffix: likewise.
        threads: how many; by default one for each available processor, at most 4.
        progress: called with bytes read (as `written`) and to be read.

    Raises:
        SourceError: a file cannot be read, or is corrupt.
        UsageError: it is a zarr store, or encrypted.
    """
    on_progress = _on_progress(progress, time.perf_counter())
    try:
        files = read_headers(target, rank_pattern=rank_pattern, suffix=suffix).files
    except EncryptedError:
        raise UsageError(
            f"{target} is encrypted, and a manifest is of files that are not",
            code="encrypted",
            hint="compare it with its source",
        ) from None
    if files[0].index.format == ZARR:
        raise UsageError(
            f"{target} is a zarr store, and a manifest is of checkpoint files",
            code="no-manifest",
            hint="compare it with its source",
        )
    place = as_place(target)
    root = place if place.is_dir() else place.parent
    others = [name for name in SET_INDEXES if root == place and (root / name).is_file()]
    return sum_files(root, files, others, threads=thread_count(threads), progress=on_progress)


def _on_progress(progress: Callable[[Progress], None] | None, began: float) -> OnProgress:
    """Return what reports progress to a user's callback."""
    if progress is None:
        return lambda _done, _total: None
    from reshard.run.run import Progress  # it brings dask, which nothing else here needs

    return lambda done, total: progress(Progress(done, total, time.perf_counter() - began))


def _alone(target: Checkpoint, selection: Selection, deduplicated: bool, how: _How) -> Verification:
    """Check all that headers tell, of which what is not valid is an error; then the checksums that files carry."""
    warnings = check_structure(target, selection, deduplicated=deduplicated)
    carried = check_carried(target, threads=how.threads, on_progress=how.on_progress, client=how.client)
    differences, nbytes, looked = list(carried.differences), carried.nbytes, None
    several = [name for name, one in target.tensors.items() if any(len(some) > 1 for some in one.sharding.replicas)]
    if several and target.extras.described_by and (nbytes or not target.extras.holders):
        from reshard.verify.compare.replicas import compare_replicas  # it brings numpy

        compared = compare_replicas(target, several, how.threads, how.client, how.on_progress)
        differences += compared.differences
        nbytes += compared.nbytes
    elif several:
        from reshard.verify.compare.samples import sample_replicas

        torn, looked = sample_replicas(target)
        differences += torn
    unnamed = () if target.strategy or target.extras.described_by else ("names and shapes, which no strategy tells",)
    return Verification(
        target.root,
        None,
        tuple(sorted(set(target.ranks))),
        len(target.files),
        len(target.tensors) or len({name for file in target.files for name in file.index.entries}),
        sum(len(file.index.entries) for file in target.files),
        nbytes,
        nbytes,
        tuple(differences),
        warnings=(*warnings, *leftovers(as_place(target.root))),
        unchecked=(*_unread(target, carried, looked), *unnamed),
        step=target.opening.step,
        complete=_says_what_it_has(target),
        by_ranks=any(rank_of(as_place(file.path)) for file in target.files),
    )


def _says_what_it_has(target: Checkpoint) -> bool:
    """Return whether anything says what a checkpoint should have: a strategy, metadata, or the index of a set."""
    if target.strategy or target.extras.described_by:
        return True
    root = as_place(target.root)
    return root.is_dir() and read_index(root) is not None


def _unread(target: Checkpoint, carried: SumsChecked, looked: Looked | None) -> Iterator[str]:
    """Yield what of files was not looked at, or has nothing to be compared with."""
    if not carried.nbytes and not carried.unread:
        sampled = f", but for samples of {looked.copies:,} of {looked.of_copies:,} replicas" if looked else ""
        more = " (its ledger names a source: verified by its path alone, every bit is compared with that)"
        yield f"contents{sampled}{more if made_at(target.root) is not None else ''}"
    elif carried.rest > 0:
        yield f"{bytes_text(carried.rest)} of the files, which carry no checksums of them"
    if carried.unread:
        yield f"contents of {names(carried.unread, most=3)}: objects in zstd streams that decode to more than 1 GB"
    if carried.bare:
        yield f"contents of {names(carried.bare, most=3)}, of which PyTorch was told to make no checksums"
    if target.extras.beside:
        yield f"{names(target.extras.beside)} beside the tensors"
    if any(file.index.sums is None for file in target.files):
        yield "notes (__metadata__)"
        yield _NEVER
    if carried.nbytes and target.extras.described_by and target.extras.described_by != target.format:
        yield f"{target.extras.described_by}, which carries no checksum of itself"


def _against_source(sides: Sides, how: _How) -> Verification:
    """Compare what a conversion of the source would have made with what is there."""
    from reshard.verify.compare import checks, compare  # it brings numpy
    from reshard.verify.compare.ties import compare_ties

    target, source, selection, deduplicated, note = sides
    sample, seed = how.sample, how.seed
    if sample is not None and seed is None:
        seed = SystemRandom().randrange(1 << 32)
    if how.independent:
        target = by_library(target)
    budget = comparison_budget((source, target), casts=bool(selection.cast), memory=how.memory, threads=how.threads)
    every: list[Check] = []
    differences: list[Difference] = []
    dropped: list[str] = []
    left_out: list[str] = []
    pairs: dict[str, str] = {}
    absent = 0
    warnings = [*source.warnings, *target.warnings]
    if target.extras.described_by:  # by which experts may be stacked otherwise
        named = selection.renamed(list(source.tensors), source.every)
        there = {name: target.tensors[new].spec.shape for name, new in named.items() if new in target.tensors}
        source, restacked = with_shapes(source, there)
        warnings += restacked
    for one_source, one_target, rank in pairs_of_ranks(source, target):
        matched = match(one_source, one_target, selection, rank=rank, deduplicated=deduplicated)
        every += checks(one_source, one_target, matched.pairs, budget.band_bytes)
        differences += matched.differences
        dropped += matched.dropped
        left_out += matched.left_out
        warnings += matched.warnings
        pairs |= matched.pairs
        absent += matched.absent
    compared = compare(source, target, every, budget, how.client, how.on_progress, sample=sample, seed=seed)
    ties = compare_ties(
        source, {check.source_name for check in every}, budget, how.client, how.on_progress, sample=sample, seed=seed
    )
    differences += [*compared.differences, *ties.differences]
    warnings += [
        f"{name} differs between the ranks of the source; any of its values will do" for name in compared.varying
    ]
    return Verification(
        target.root,
        source.root,
        tuple(sorted(set(target.ranks))),
        len(target.files),
        len({check.name for check in every}),
        sum(len(copies) for check in every for copies in check.move.way.writes),
        compared.nbytes + ties.nbytes,
        compared.total_bytes + ties.total_bytes,
        tuple(differences),
        tuple(dict.fromkeys(dropped)),
        tuple(dict.fromkeys(left_out)),
        sample,
        seed if sample is not None else None,
        (*dict.fromkeys(warnings), *leftovers(as_place(target.root))),
        unchecked=(
            "the note `format`" if compares_notes(source, target) else "notes (__metadata__)",
            _NEVER,
            *_unread_by_library(target),
        ),
        step=target.opening.step,
        against_step=source.opening.step,
        changes=changes(source, selection, pairs.items()),
        note=joined("; ", [*([note] if note else []), *([] if selection.cast else _casts(differences))]),
        absent=absent,
        independent=_read_by_library(target) if how.independent else 0,
    )


def _read_by_library(target: Checkpoint) -> int:
    """Return how many files the library reads."""
    return len(target.coding.tensors) if isinstance(target.coding, SafetensorsLibrary) else 0


def _unread_by_library(target: Checkpoint) -> Iterator[str]:
    """Yield what the library cannot read, of what it was to read."""
    if isinstance(target.coding, SafetensorsLibrary) and target.coding.unread:
        yield f"{names(target.coding.unread, most=3)} by the safetensors library, as numpy has no float8"


def _casts(differences: list[Difference]) -> Iterator[Text]:
    """Yield how to compare tensors whose dtypes differ."""
    pairs = Counter((one.found, one.expected) for one in differences if one.kind == "dtype")
    for (found, expected), count in pairs.items():
        if found and expected and (advice := cast_advice(found, expected, count)):
            yield advice


def _against_manifest(target: Place, manifest: Manifest | AnyName, partial: bool, how: _How) -> Verification:
    """Compare files with a manifest."""
    known = manifest if isinstance(manifest, Manifest) else read_manifest(manifest)
    target.refresh()
    root = target if target.is_dir() else target.parent
    warnings = leftovers(target)
    files = [path for path in root.files() if path.suffix in EXTENSIONS] if root == target else []
    others = sorted({path.relative_to(str(root)).as_posix() for path in files} - set(known.files))
    warnings += [f"{names(others, most=3)}: not in the manifest, and not checked"] if others else []
    checked = check_files(root, known, partial=partial, threads=how.threads, progress=how.on_progress)
    absent = len(known.files) - len(checked.paths)
    if absent and partial:
        warnings.append(f"{absent} of the {len(known.files)} files of the manifest are not here")
    return Verification(
        str(target),
        "a manifest" if isinstance(manifest, Manifest) else str(manifest),
        (),
        len(checked.paths),
        len({name for path in checked.paths for name in known.files[path].tensors}),
        sum(len(known.files[path].tensors) for path in checked.paths),
        checked.read,
        checked.read,
        checked.differences,
        warnings=tuple(warnings),
    )
