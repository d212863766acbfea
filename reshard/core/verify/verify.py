"""Verify a checkpoint alone, against its source, or against a manifest.

* Alone: every rank exists and has the tensors that the strategy assigns to it, headers are valid, blocks exist and
  cover each tensor once, names and shapes match the strategy. Headers are read, and contents if files contain checksums
  of them (`sums`). Replicas are compared in full in distributed checkpoints of PyTorch, else in samples.
* Against a source: every rank has exactly the bits that a conversion with the same options would have written, and
  replicas agree on both sides (`compare`).
* Against a manifest: sizes and checksums match (`by_manifest`); checksums cover every bit of a file.

`Verification.unchecked` lists what was not checked.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from random import SystemRandom
from typing import TYPE_CHECKING, Any

from reshard import environment
from reshard.core.model.checkpoint import Checkpoint
from reshard.core.model.reshape import with_shapes
from reshard.core.open import made_at
from reshard.core.plan.budget import comparison_budget
from reshard.core.plan.changes import cast_advice, changes
from reshard.core.plan.inputs import Selection
from reshard.core.rank_files import rank_of
from reshard.core.records.logs import leftovers
from reshard.core.storage.cipher import required
from reshard.core.storage.places import as_place
from reshard.core.verify.by_manifest import verify_files
from reshard.core.verify.match import compares_notes, match, pairs_of_ranks
from reshard.core.verify.structure import check_structure
from reshard.core.verify.sums import check_carried, progress_callback, thread_count
from reshard.core.verify.verification import Comparison, Counts, Verification
from reshard.errors import GoneError, Option, SourceError, Text, UsageError, bytes_text, joined, names
from reshard.kits.indexes import read_index
from reshard.kits.safetensors_library import check_by_library

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reshard.core.model.facts import SampleStats
    from reshard.core.records.made import Made
    from reshard.core.run.settings import Progress
    from reshard.core.storage.cipher import Cipher
    from reshard.core.storage.places import AnyName
    from reshard.core.verify.compare import Check
    from reshard.core.verify.difference import Difference
    from reshard.core.verify.manifest import Manifest
    from reshard.core.verify.sides import Sides
    from reshard.core.verify.sums import OnProgress, SumsChecked
    from reshard.strategy.strategy import Strategy

_ALWAYS_UNCHECKED = "checksums that files carry (crc_num), and how text entries are stored"


@dataclass(frozen=True, slots=True)
class _Options:
    """Options of `verify` for reading contents, and the progress callback."""

    memory: int | None
    threads: int
    client: Any
    on_progress: OnProgress
    sample: float | None
    independent: bool = False


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
    partial: bool = False,
    deduplicated: bool = False,
    independent: bool = False,
    memory: int | None = None,
    threads: int | None = None,
    client: Any = None,
    progress: Callable[[Progress], None] | None = None,
) -> Verification:
    """Verify a checkpoint; see `reshard.verify`.

    Unlike there, `memory` is in bytes, and `selection` is a `Selection`.
    """
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
    _refuse_unused_selection(selection, against)
    options = _Options(
        environment.memory(memory), thread_count(threads), client, progress_callback(progress, began), sample,
        independent,
    )  # fmt: skip
    made = (
        None if manifest is not None else _made(target, strategy, against, selection, partial=partial or deduplicated)
    )
    _check_sample(sample, against if made is None else made)
    _refuse_unused_library(independent=independent, is_compared=against is not None or made is not None)
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
        _refuse_unused(target, memory, client, source_cipher)
        result = verify_files(
            as_place(target), manifest, partial=partial, threads=options.threads, progress=options.on_progress
        )
    elif made is not None:
        result = _against_made(made, cipher, source_cipher, options)
    else:
        from reshard.core.verify.sides import opened, sides_of

        if not isinstance(target, Checkpoint) and (strategy is not None or against is None):
            target = opened(target, strategy, cipher=cipher)
        if against is not None:
            if not isinstance(against, Checkpoint) and source_strategy is not None:
                against = opened(against, source_strategy, what="source", cipher=source_cipher)
            sides = sides_of(
                target, against, selection, deduplicated=deduplicated, cipher=cipher, against_cipher=source_cipher
            )
            result = _against_source(sides, options)
            if not result.linked and any(file.index.sums is not None for file in sides.target.files):
                rest = f"values are compared, not the checksums in the files of {sides.target.root}"
                note = joined("; ", [*([result.note] if result.note else []), rest])
                result = replace(result, compared=replace(result.compared, note=note))
        elif isinstance(target, Checkpoint):
            reads = any(file.index.sums is not None for file in target.files)
            _refuse_unused(target.root, memory, None if reads else client, source_cipher)
            result = _alone(target, selection or Selection(), deduplicated, options)
    return replace(result, seconds=time.perf_counter() - began)


def as_it_is(selection: Selection | None, against: object) -> Selection:
    """Return the selection of a comparison without changes, ignoring ledgers.

    Raises:
        UsageError: there is no source, or changes are requested, too.
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
    """Reject a sample that is not a share, or without a source."""
    if sample is not None and not 0 < sample <= 1:
        raise UsageError(f"sample is {sample}; expected a share above 0, up to 1", code="out-of-range")
    if sample is not None and source is None:
        hint = Text("add ", Option("against"), ", or leave it out")
        raise UsageError(Text(Option("sample"), " is for a comparison with a source"), code="needs-source", hint=hint)


def _refuse_unused(target: AnyName, memory: int | None, client: Any, source_cipher: Cipher | None) -> None:
    """Reject options that need a comparison with a source."""
    arguments = (
        (Option("memory"), memory, ""),
        (Option("client"), client, ", or for checking checksums in files"),
        (Option("source_key"), required(source_cipher), ""),
    )
    for option, value, also in arguments:
        if value is not None:
            raise UsageError(
                Text(option, " is only for a comparison with a source", also),
                code="needs-source",
                facts=[f"{target} is compared with none"],
                hint="name a source, or leave the option out",
            )


def _refuse_unused_library(*, independent: bool, is_compared: bool) -> None:
    """Reject the option `independent` without a source."""
    if independent and not is_compared:
        raise UsageError(
            "the safetensors library reads what is compared with a source, and there is none", code="needs-source",
            hint=Text("give ", Option("against")),
        )  # fmt: skip


def _refuse_unused_selection(selection: Selection | None, against: object) -> None:
    """Reject a selection with names, casts or rules without a source."""
    changes_only = replace(selection or Selection(), drop=(), allow_missing=())
    if against is None and changes_only != Selection():
        raise UsageError(
            "names, casts and rules are only for a comparison with a source",
            code="needs-source",
            hint=Text("name one with ", Option("against"), ", or leave them out: a ledger already records them"),
        )


def _made(
    target: AnyName | Checkpoint, strategy: object, against: object, selection: Selection | None, *, partial: bool
) -> Made | None:
    """Return the provenance of a target, unless other arguments override it."""
    if isinstance(target, Checkpoint) or strategy is not None or against is not None or selection is not None:
        return None
    return None if partial else made_at(target)


def _against_made(made: Made, cipher: Cipher | None, source_cipher: Cipher | None, options: _Options) -> Verification:
    """Compare a target with the source in its ledger, or with the checksums in it."""
    from reshard.core.reopen import reopen_target
    from reshard.core.verify.recorded import keys_of, source_of  # lazy import: rarely needed
    from reshard.core.verify.sides import Sides, options_of

    key_given = required(source_cipher)
    cipher, source_cipher = keys_of(made, cipher, source_cipher)
    record = made.provenance
    try:
        source, selection = source_of(made, source_cipher)
    except SourceError as error:
        may_be_gone = key_given is None and isinstance(error, GoneError)
        if options.independent or record.target.encryption or (required(source_cipher) and not may_be_gone):
            raise
        return _against_checksums(made, record.source.title, error, options)
    with options_of("target"):
        target = reopen_target(made, cipher)
    return _against_source(Sides(target, source, selection, record.target.remove_redundancy), options)


def _against_checksums(made: Made, source_root: str, error: SourceError, options: _Options) -> Verification:
    """Compare a target with the checksums in its ledger, as its source cannot be opened."""
    from reshard.core.verify.recorded import check_sums

    differences, count, read = check_sums(made, threads=options.threads, on_progress=options.on_progress)
    extent = "in full " if options.sample is not None else ""
    ledger = f"compared {extent}with the sizes and checksums that its ledger has, not with {source_root}: "
    warning = Text(ledger, joined("; ", [Text(error.message), *map(Text, error.facts)]))
    return Verification(
        made.target,
        tuple(made.ranks),
        Counts(len(made.records), 0, count, read, read),
        Comparison("its ledger", by_checksums=True),
        differences,
        warnings=(warning, *leftovers(as_place(made.target))),
        unchecked=("headers, and what has no checksum", _ALWAYS_UNCHECKED),
    )


def _alone(target: Checkpoint, selection: Selection, deduplicated: bool, options: _Options) -> Verification:
    """Check headers (faults raise), then checksums in the files, then replicas (all or samples)."""
    warnings, invalid = [], None
    try:
        warnings = check_structure(target, selection, deduplicated=deduplicated)
    except SourceError as error:
        if "unreadable-tensor" not in error.codes:
            raise
        invalid = error
    carried = check_carried(target, threads=options.threads, on_progress=options.on_progress, client=options.client)
    if invalid is not None:  # its checksums say more than its headers
        if not carried.differences:
            raise invalid
        warnings = [invalid.message, *invalid.facts]
    differences, nbytes, statistics = list(carried.differences), carried.nbytes, None
    several = [
        name for name, tensor in target.tensors.items() if any(len(copies) > 1 for copies in tensor.sharding.replicas)
    ]
    if several and target.extras.described_by and (nbytes or target.extras.arrangement is None):
        from reshard.core.verify.compare.every_replica import compare_replicas  # lazy import: needs numpy

        compared = compare_replicas(target, several, options.threads, options.client, options.on_progress)
        differences += compared.differences
        nbytes += compared.nbytes
    elif several:
        from reshard.core.verify.compare.samples import sample_replicas

        torn, statistics = sample_replicas(target)
        differences += torn
    unnamed = () if target.strategy or target.extras.described_by else ("names and shapes, as there is no strategy",)
    tensors = len(target.tensors) or len({name for file in target.files for name in file.index.entries})
    copies = sum(len(file.index.entries) for file in target.files)
    return Verification(
        target.root,
        tuple(sorted(set(target.ranks))),
        Counts(len(target.files), tensors, copies, nbytes, nbytes),
        differences=tuple(differences),
        warnings=(*warnings, *leftovers(as_place(target.root))),
        unchecked=(*_unread(target, carried, statistics), *unnamed),
        step=target.opening.step,
        complete=_says_what_it_has(target),
        by_ranks=any(rank_of(as_place(file.path)) for file in target.files),
        summed_bytes=carried.nbytes,
    )


def _says_what_it_has(target: Checkpoint) -> bool:
    """Return whether a strategy, metadata or an index lists the expected tensors."""
    if target.strategy or target.extras.described_by:
        return True
    root = as_place(target.root)
    return root.is_dir() and read_index(root) is not None


def _unread(target: Checkpoint, carried: SumsChecked, statistics: SampleStats | None) -> Iterator[str]:
    """Yield descriptions of parts of files that were not checked."""
    if not carried.nbytes:
        sampled = (
            f", but for samples of {statistics.copies:,} of {statistics.of_copies:,} replicas" if statistics else ""
        )
        advice = ""
        with suppress(SourceError):
            if made_at(target.root) is not None:
                advice = " (its ledger names a source: run `verify` with the path alone to compare every bit with it)"
        yield f"contents{sampled}{advice}"
    elif carried.rest > 0:
        yield f"{bytes_text(carried.rest)} of the files, which have no checksums"
    if carried.bare:
        yield f"contents of {names(carried.bare, most=3)}, which were saved without checksums"
    if target.extras.beside:
        yield f"{names(target.extras.beside)} beside the tensors"
    if any(file.index.sums is None for file in target.files):
        yield "notes (__metadata__)"
        yield _ALWAYS_UNCHECKED
    if carried.nbytes and target.extras.described_by and target.extras.described_by != target.file_format:
        yield f"{target.extras.described_by}, which carries no checksum of itself"


def _against_source(sides: Sides, options: _Options) -> Verification:
    """Compare the target with the result of converting the source."""
    from reshard.core.verify.compare import checks, compare  # lazy import: needs numpy
    from reshard.core.verify.compare.linked import check_sums, without_linked
    from reshard.core.verify.compare.ties import compare_ties

    target, source, selection, deduplicated, note = sides
    sample, seed = options.sample, SystemRandom().randrange(1 << 32)
    checked, unread = check_by_library(target, options.threads) if options.independent else (0, [])
    budget = comparison_budget(
        (source, target), casts=bool(selection.cast), memory=options.memory, threads=options.threads
    )
    all_checks: list[Check] = []
    differences: list[Difference] = []
    dropped: list[str] = []
    left_out: list[str] = []
    pairs: dict[str, str] = {}
    absent = 0
    warnings = [*source.warnings, *target.warnings]
    if target.extras.described_by:  # it may stack experts in another shape
        named = selection.renamed(list(source.tensors), source.all_names, words=source.opening.states)
        target_shapes = {name: target.tensors[new].spec.shape for name, new in named.items() if new in target.tensors}
        source, restacked = with_shapes(source, target_shapes)
        warnings += restacked
    for one_source, one_target, rank in pairs_of_ranks(source, target):
        matched = match(one_source, one_target, selection, rank=rank, deduplicated=deduplicated)
        all_checks += checks(one_source, one_target, matched.pairs, budget.band_bytes)
        differences += matched.differences
        dropped += matched.dropped
        left_out += matched.left_out
        warnings += matched.warnings
        pairs |= matched.pairs
        absent += matched.absent
    linked = without_linked(source, target, all_checks)
    compared = compare(
        source, target, linked.checks, budget, options.client, options.on_progress, sample=sample, seed=seed
    )
    ties = compare_ties(
        source,
        {check.source_name for check in all_checks},
        budget,
        options.client,
        options.on_progress,
        sample=sample,
        seed=seed,
    )
    differences += [*compared.differences, *ties.differences]
    summed = 0
    if linked.tensors and sample is None:
        carried = check_sums(target, linked, options.threads, options.on_progress, options.client)
        differences += carried.differences
        summed = carried.nbytes
    warnings += [
        f"{name} differs between the ranks of the source; any of its values will do" for name in compared.varying
    ]
    counts = Counts(
        len(target.files),
        len({check.name for check in all_checks} - linked.tensors),
        sum(len(copies) for check in all_checks for copies in check.transfer.route.writes),
        compared.nbytes + ties.nbytes,
        compared.total_bytes + ties.total_bytes,
        absent,
        len(linked.tensors),
        summed,
    )
    comparison = Comparison(
        source.title,
        source.opening.step,
        changes(source, selection, pairs.items()),
        joined(
            "; ",
            [*([note] if note else []), *([] if selection.cast else _casts(differences, (target.root, source.root)))],
        ),
        sample,
        independent=checked,
    )
    return Verification(
        target.root,
        tuple(sorted(set(target.ranks))),
        counts,
        comparison,
        tuple(differences),
        tuple(dict.fromkeys(dropped)),
        tuple(dict.fromkeys(left_out)),
        (*dict.fromkeys(warnings), *leftovers(as_place(target.root))),
        (
            *([] if compares_notes(source, target) else ["notes (__metadata__)"]),
            _ALWAYS_UNCHECKED,
            *unread,
        ),
        step=target.opening.step,
    )


def _casts(differences: list[Difference], sides: tuple[str, str]) -> Iterator[Text]:
    """Yield advice on comparing tensors whose dtypes differ."""
    pairs = Counter((difference.found, difference.expected) for difference in differences if difference.kind == "dtype")
    for (actual, expected), count in pairs.items():
        if actual and expected and (advice := cast_advice(actual, expected, count, sides)):
            yield advice
