"""Open a checkpoint again with the options in a provenance record; headers are read again."""

from __future__ import annotations

from dataclasses import asdict, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from reshard.core.model.assemble import assemble
from reshard.core.model.checkpoint import Checkpoint, unreadable_in
from reshard.core.model.facts import Opening
from reshard.core.open import is_described
from reshard.core.open import open as open_checkpoint
from reshard.core.rank_files import Step
from reshard.core.storage.places import as_place
from reshard.errors import SourceError, names
from reshard.kits.headers import index_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reshard.core.records.made import Made
    from reshard.core.records.provenance import InputRecord, SourceRecord
    from reshard.core.storage.cipher import Cipher
    from reshard.core.storage.places import Place
    from reshard.strategy.strategy import Strategy


def reopen(record: SourceRecord, root: Place | None = None, *, cipher: Cipher | None = None) -> Checkpoint:
    """Open a source again; contents are not sampled, as the record has the results.

    Args:
        record: the record of the source.
        root: the source, if the record has paths below it; else its paths are absolute.
        cipher: decrypts the files.

    Raises:
        SourceError: a file is not valid, or headers contradict the strategy; or a computation is not valid.
        ValueError: the strategy is not valid.
    """
    if record.computation is not None:
        return recomputed(record, lambda source: reopen(source, cipher=cipher if source.encrypted else None))
    top = record.root if root is None else str(root)
    if record.described_by:
        checkpoint = open_checkpoint(top, layouts=record.rules, contents=False, cipher=cipher)
    else:
        paths = {
            rank: [as_place(path) if root is None else root / path for path in of_rank]
            for rank, of_rank in record.paths().items()
        }
        as_place(top).refresh()
        strategy = record.strategy.read() if record.strategy else None
        checkpoint = _assembled(top, paths, strategy, record.stage, partial=record.partial, cipher=cipher)
    varying = set(record.varying)
    tensors = {
        name: tensor._replace(varies=name in varying and not tensor.listed)
        for name, tensor in checkpoint.tensors.items()
    }
    opening = replace(checkpoint.opening, elsewhere=frozenset(record.elsewhere), by_file=record.by_file)
    return replace(checkpoint, tensors=tensors, opening=opening).without(set(record.left_out))


def recomputed(record: SourceRecord, open_source: Callable[[SourceRecord], Checkpoint]) -> Checkpoint:
    """Compute a checkpoint again from its inputs; computed tensors are checked when they are read.

    Args:
        record: the record of a computed source.
        open_source: opens a source that is in files.

    Raises:
        SourceError: an input cannot be opened, or no longer goes with the others; or the record is not valid.
    """
    computation = record.computation
    if computation is None:
        return open_source(record)
    try:
        inputs = tuple(_input(each, open_source) for each in computation.inputs)
        checkpoint = _computed(computation.kind, inputs, computation.options)
    except SourceError:
        raise
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise SourceError(
            f"the record of a computed checkpoint ({record.title}) is not valid", code="bad-ledger", facts=[f"{error}"]
        ) from None
    return checkpoint.without(set(record.left_out))


def _input(record: InputRecord, open_source: Callable[[SourceRecord], Checkpoint]) -> Checkpoint:
    """Return an input of a computation, with its adapter and rules."""
    checkpoint = recomputed(record.source, open_source)
    if record.lora is not None:
        from reshard.rules.lora import LoRA  # seldom
        from reshard.rules.lora.merge import merged

        checkpoint = merged(checkpoint, LoRA(**asdict(record.lora)))
    if record.rules is not None:
        from reshard.rules.rules import Rules  # seldom

        checkpoint = Rules.of(record.rules).derived(checkpoint).checkpoint
    return checkpoint.without(set(record.left_out))


_COMPUTATIONS = {
    "astype": "cast", "average": "average", "dequantize": "quantized.dequantize", "scale": "scale",
}  # fmt: skip
"""The modules of `expressions` with the function of each computation, which are seldom needed."""


def _computed(kind: str, inputs: tuple[Checkpoint, ...], options: Mapping[str, Any]) -> Checkpoint:
    """Compute a checkpoint again.

    Raises:
        SourceError: the kind is not known, or its arrays are in no file.
    """
    if kind == "assign":
        raise SourceError("its arrays are in no file", code="array-not-here", facts=[names(options["names"], most=3)])
    if kind not in _COMPUTATIONS:
        raise SourceError(f"{kind!r:.60} is not a known computation", code="bad-ledger")
    module = import_module(f"reshard.expressions.{_COMPUTATIONS[kind]}")
    compute: Callable[..., Checkpoint] = getattr(module, kind)
    if kind == "average":
        return compute(inputs, **options, compare=False)
    (source,) = inputs
    return compute(source, **options)


def reopen_target(made: Made, cipher: Cipher | None) -> Checkpoint:
    """Open a target with the options in its ledger; raise `SourceError` on failure."""
    ranks = {rank: [as_place(path) for path in paths] for rank, paths in made.ranks.items()}
    if is_described(made.target) or (made.strategy is None and len(ranks) == 1):
        return open_checkpoint(made.target, contents=False, cipher=cipher)
    strategy, stage = made.own_strategy, made.provenance.target.stage
    partial = strategy is not None and len(ranks) < len(strategy.ranks)
    return _assembled(made.root, ranks, strategy, stage, partial=partial, cipher=cipher)


def _assembled(
    root: str, paths: Mapping[int, Sequence[Place]], strategy: Strategy | None, stage: int | None, *, partial: bool,
    cipher: Cipher | None,
) -> Checkpoint:  # fmt: skip
    """Open the files of each rank; several ranks without a strategy have no tensors."""
    files, ranks, _, _, cipher = index_ranks(paths, cipher, [])
    is_known = strategy is not None or len(paths) == 1
    tensors = assemble(root, files, ranks, strategy, partial=partial) if is_known else {}
    step = Step.of(path for of_rank in paths.values() for path in of_rank)
    opening = Opening(stage, partial=partial, step=step)
    return Checkpoint(root, tensors, files, ranks, strategy, (), unreadable_in(files), cipher, opening=opening)
