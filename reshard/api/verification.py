"""`reshard.verify`, as users call it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.api.checkpoints import Checkpoint, record_of
from reshard.api.choices import progress_of, selection_of
from reshard.sizes import size_of
from reshard.verify.verify import as_it_is
from reshard.verify.verify import verify as verify_record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reshard.api.choices import Globs
    from reshard.plan.select import Selection
    from reshard.rules.lora import LoRA
    from reshard.rules.rules import Rules
    from reshard.run.run import Progress
    from reshard.source.checkpoint import Checkpoint as Record
    from reshard.storage.cipher import Cipher
    from reshard.storage.places import AnyName
    from reshard.strategy.strategy import Strategy
    from reshard.verify.manifest import Manifest
    from reshard.verify.verify import Verification


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
    include: Globs = (),
    exclude: Globs = (),
    weights_only: bool = False,
    name_map: Mapping[str, str] | None = None,
    cast: Mapping[str, str] | None = None,
    drop: Globs = (),
    allow_missing: Globs = (),
    rules: Rules | Mapping[str, Any] | AnyName | None = None,
    lora: LoRA | AnyName | None = None,
    as_is: bool = False,
    sample: float | None = None,
    seed: int | None = None,
    partial: bool = False,
    deduplicated: bool = False,
    independent: bool = False,
    memory: int | str | None = None,
    threads: int | None = None,
    client: Any = None,
    progress: Callable[[Progress], None] | bool | None = None,
) -> Verification:
    """Verify a checkpoint: its structure and the checksums in it, or every bit against its source or a manifest.

    A path alone is enough if a run of this program wrote the files: its ledger says what from, and how. If the
    source is gone, sizes and checksums are compared with those of the run.

    Two checkpoints of rank directories without strategies are compared rank by rank.

    Args:
        target: what is verified: a path as for `reshard.open`, or a checkpoint, opened with `contents=False` so that
            copies that differ are found here and refused there.
        strategy: of the target, if that is a path; by default as its ledger says.
        against: the source, a path or a checkpoint, or any checkpoint that should have the same values. Ledgers of
            both say how one is made of the other: they are compared in that direction.
        source_strategy: of the source, if that is a path.
        cipher: decrypts the target, if that is a path.
        source_cipher: decrypts the source, if that is a path, or the one that the ledger names.
        manifest: the manifest of the target's files, in place of a source; no strategy is needed.
        selection: what was selected, renamed, cast, merged and made by rules on the way from source to target; None
            to take that from the ledgers, to which `drop` and `allow_missing` alone are added. Or the keywords that
            make one:
        include: as in `reshard.Selection`.
        exclude: as in `reshard.Selection`.
        weights_only: as in `reshard.Selection`.
        name_map: as in `reshard.Selection`.
        cast: as in `reshard.Selection`.
        drop: as in `reshard.Selection`.
        allow_missing: as in `reshard.Selection`.
        rules: as in `reshard.Selection`, or a rules file.
        lora: as in `reshard.Selection`, or the directory of an adapter.
        as_is: compare the two as they are, whatever their ledgers say of changes on the way.
        sample: the share of rows to compare, more than 0 and at most 1; by default all. Of every tensor something is
            compared.
        seed: of the random choice of rows; by default a new one, which the result reports.
        partial: files of the manifest may be missing; a checkpoint of some ranks only is opened so.
        deduplicated: the target stores each replica once (`remove_redundancy`), on any of the ranks that the strategy
            gives it to. safetensors files say so themselves; `.ckpt` files cannot.
        independent: read the target's safetensors files with Hugging Face's library `safetensors` in place of this
            program's own reader.
        memory: the most resident memory to use, in bytes or as `"1GB"`.
        threads: how many; by default one for each available processor, at most 4.
        client: a `distributed.Client`, whose workers read; they must reach what is read by the same paths.
        progress: called with bytes compared (as `written`) and to be compared; True shows a bar.

    Returns:
        what was found; true if all is as it should be.

    Raises:
        reshard.SourceError: a checkpoint that cannot be compared at all: files missing, headers that are corrupt or
            contradict the strategy, a block in no file; all faults at once.
        reshard.UsageError: a selection that matches nothing, an invalid sample, an option that would do nothing; a key
            is missing that the ledger says is needed.
        reshard.BudgetError: `memory` is too little.
    """
    selection = selection_of(
        selection, include=include, exclude=exclude, weights_only=weights_only, name_map=name_map, cast=cast, drop=drop,
        allow_missing=allow_missing, rules=rules, lora=lora,
    )  # fmt: skip
    if as_is:
        selection = as_it_is(selection, against)
    with progress_of(progress) as callback:
        return verify_record(
            _opened(target), strategy, against=_opened(against), source_strategy=source_strategy, cipher=cipher,
            source_cipher=source_cipher, manifest=manifest, selection=selection, sample=sample, seed=seed,
            partial=partial, deduplicated=deduplicated, independent=independent, memory=size_of(memory, "memory"),
            threads=threads, client=client, progress=callback,
        )  # fmt: skip


def _opened(side: Any) -> Any:
    """Return a side as the shelves below take it: a path, or what is known of a checkpoint."""
    opened: Record | AnyName | None = record_of(side) if isinstance(side, Checkpoint) else side
    return opened
