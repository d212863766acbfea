"""`reshard.verify`, as users call it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.api.asked import refuse_options_of_paths
from reshard.api.checkpoints import Checkpoint, record_of
from reshard.api.choices import progress_of, selection_of
from reshard.api.options import SelectionKeywords, VerifyOptions, taken, unexpected
from reshard.arguments import checked
from reshard.core.run.clusters.where import refuse_unshared
from reshard.core.storage.urls.s3.options import use_options
from reshard.core.verify.verify import as_it_is
from reshard.core.verify.verify import verify as verify_record
from reshard.sizes import size_of

if TYPE_CHECKING:
    from typing import Unpack

    from reshard.core.model.checkpoint import Checkpoint as Record
    from reshard.core.storage.places import AnyName
    from reshard.core.verify.verification import Verification
    from reshard.strategy.strategy import Strategy


@checked
def verify(
    target: AnyName | Checkpoint,
    target_strategy: Strategy | AnyName | None = None,
    *,
    against: AnyName | Checkpoint | None = None,
    source_strategy: Strategy | AnyName | None = None,
    **options: Unpack[VerifyOptions],
) -> Verification:
    """Verify a checkpoint alone, against its source, or against a manifest.

    By itself: structure and stored checksums. Against its source or a manifest: every bit.

    A path alone is enough if reshard wrote the files: its ledger names the source and the options. If the source is
    gone, sizes and checksums are compared with those in the ledger.

    Two checkpoints of rank directories without strategies are compared rank by rank.

    Args:
        target: the checkpoint to verify: a path as for `reshard.open`, or a checkpoint that was opened with
            `contents=False`, so that differing copies are reported here rather than refused there.
        target_strategy: the strategy of the target, if that is a path; by default the one in its ledger.
        against: the source, a path or a checkpoint, or any checkpoint that should have the same values. If the
            ledgers show that one was made from the other, they are compared in that direction.
        source_strategy: the strategy of the source, if that is a path.
        options: as in `help(reshard.api.options)`: `include`, `exclude`, `weights_only`, `name_map`, `cast`, `drop`,
            `allow_missing`, `rules`, `lora`, `selection`, by which the target was made from the source, by default as
            the ledgers say; `cipher`, `target_cipher`, `manifest`, `as_is`, `sample`, `partial`, `deduplicated`,
            `independent`, `memory`, `threads`, `client`, `progress`, `storage_options`.

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
    given: dict[str, Any] = {**options}
    selection = selection_of(**taken(given, SelectionKeywords))
    cipher, target_cipher = given.pop("cipher", None), given.pop("target_cipher", None)
    advice = "leave it out; another checkpoint to compare with is against="
    refuse_options_of_paths(target, advice, target_strategy=target_strategy, target_cipher=target_cipher)
    refuse_options_of_paths(against, source_strategy=source_strategy, cipher=cipher)
    sides = [side for side in (target, against) if side is not None]
    use_options(given.pop("storage_options", None), *(side for side in sides if not isinstance(side, Checkpoint)))
    refuse_unshared(given.get("client"), (side.root if isinstance(side, Checkpoint) else side for side in sides))
    if given.pop("as_is", False):
        selection = as_it_is(selection, against)
    progress, memory = given.pop("progress", None), size_of(given.pop("memory", None), "memory")
    if unknown := given.keys() - VerifyOptions.__annotations__.keys():
        raise unexpected("verify", min(unknown))
    with progress_of(progress) as callback:
        return verify_record(
            _opened(target), target_strategy, against=_opened(against), source_strategy=source_strategy,
            cipher=target_cipher, source_cipher=cipher, selection=selection, memory=memory, progress=callback, **given,
        )  # fmt: skip


def _opened(side: Any) -> Any:
    """Return a path as it is, and the record of a checkpoint."""
    opened: Record | AnyName | None = record_of(side) if isinstance(side, Checkpoint) else side
    return opened
