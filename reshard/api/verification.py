"""`reshard.verify`, as users call it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.api.asked import refuse_options_of_paths
from reshard.api.checkpoints import Checkpoint, record_of
from reshard.api.choices import progress_of, selection_of
from reshard.arguments import checked
from reshard.core.run.clusters.where import refuse_unshared
from reshard.core.storage.urls.s3.options import use_options
from reshard.core.verify.verify import as_it_is
from reshard.core.verify.verify import verify as verify_record
from reshard.sizes import size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reshard.api.choices import Globs
    from reshard.core.model.checkpoint import Checkpoint as Record
    from reshard.core.plan.inputs import Selection
    from reshard.core.run.settings import Progress
    from reshard.core.storage.cipher import Cipher
    from reshard.core.storage.places import AnyName
    from reshard.core.verify.manifest import Manifest
    from reshard.core.verify.verification import Verification
    from reshard.rules.lora import LoRA
    from reshard.rules.rules import Rules
    from reshard.strategy.strategy import Strategy


@checked
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
    cast: Mapping[str, str] | Globs | None = None,
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
    storage_options: Mapping[str, Any] | None = None,
) -> Verification:
    """Verify a checkpoint alone, against its source, or against a manifest.

    By itself: structure and stored checksums. Against its source or a manifest: every bit.

    A path alone is enough if reshard wrote the files: its ledger names the source and the options. If the source is
    gone, sizes and checksums are compared with those in the ledger.

    Two checkpoints of rank directories without strategies are compared rank by rank.

    Args:
        target: the checkpoint to verify: a path as for `reshard.open`, or a checkpoint that was opened with
            `contents=False`, so that differing copies are reported here rather than refused there.
        strategy: the strategy of the target, if that is a path; by default the one in its ledger.
        against: the source, a path or a checkpoint, or any checkpoint that should have the same values. If the
            ledgers show that one was made from the other, they are compared in that direction.
        source_strategy: the strategy of the source, if that is a path.
        cipher: decrypts the target, if that is a path.
        source_cipher: decrypts the source, if that is a path, or the one that the ledger names.
        manifest: the manifest of the target's files, in place of a source; no strategy is needed.
        selection: the selection, names, casts, adapter and rules with which the target was made from the source; None
            to take them from the ledgers, to which only `drop` and `allow_missing` can be added. Or the keywords that
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
        as_is: compare the two as they are, ignoring changes that their ledgers record.
        sample: the share of rows to compare, more than 0 and at most 1; by default all. Some rows of every tensor are
            compared.
        seed: the seed of the random choice of rows; by default a new one, which the result reports.
        partial: files of the manifest, or of some ranks of the checkpoint, may be missing.
        deduplicated: the target stores each replica once (`remove_redundancy`), on any of the ranks that the strategy
            gives it to. safetensors files say so themselves; `.ckpt` files cannot.
        independent: read the target's safetensors files with Hugging Face's library `safetensors` in place of this
            program's own reader.
        memory: the most resident memory to use, in bytes or as `"1GB"`.
        threads: the number of threads; by default one for each available processor, at most 4.
        client: as for `Plan.run`: a cluster, whose workers read by the same paths, or threads; by default the current
            client, else threads.
        progress: called with bytes compared (as `written`) and to be compared; True shows a bar.
        storage_options: as for `reshard.open`, for both paths.

    Returns:
        the result, which is true if there is no difference.

    Raises:
        reshard.SourceError: a checkpoint that cannot be compared at all: files missing, headers that are corrupt or
            contradict the strategy, a block in no file; all faults at once.
        reshard.UsageError: a selection that matches nothing, an invalid sample, an option that would have no effect; a
            missing key that is needed according to the ledger.
        reshard.BudgetError: `memory` is too little.

    >>> report = reshard.convert("src_checkpoints", "hf", to="hf", source_strategy="src_strategy.ckpt")
    >>> bool(reshard.verify("hf"))
    True
    >>> bool(reshard.verify("hf", against="src_checkpoints", source_strategy="src_strategy.ckpt"))
    True
    """
    refuse_options_of_paths(
        target, "leave it out; another checkpoint to compare with is against=", strategy=strategy, cipher=cipher
    )
    refuse_options_of_paths(against, source_strategy=source_strategy, source_cipher=source_cipher)
    sides = [side for side in (target, against) if side is not None]
    use_options(storage_options, *(side for side in sides if not isinstance(side, Checkpoint)))
    refuse_unshared(client, (side.root if isinstance(side, Checkpoint) else side for side in sides))
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
    """Return a path as it is, and the record of a checkpoint."""
    opened: Record | AnyName | None = record_of(side) if isinstance(side, Checkpoint) else side
    return opened
