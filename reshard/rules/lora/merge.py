"""Merge an adapter into the weights of a checkpoint: each becomes an expression, computed on reading."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from reshard.core.layout.block import shape_text
from reshard.core.model.facts import Origin
from reshard.core.storage.cipher import store_of
from reshard.errors import Faults, Option, SourceError, Text, UsageError, names
from reshard.expressions.computed import computed
from reshard.expressions.in_place import InPlace
from reshard.expressions.operand import Operand
from reshard.rules.lora.adapter import read_adapter
from reshard.rules.lora.low_rank import LowRank, Matrices
from reshard.rules.lora.parts import Copy, Pair
from reshard.rules.lora.tied import resolve, sharing
from reshard.strategy.names import no_match

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.core.model.checkpoint import Checkpoint, Tensor
    from reshard.rules.lora import LoRA
    from reshard.rules.lora.parts import Adapter
    from reshard.rules.lora.tied import Resolved

_DTYPES = {"float32", "float16", "bfloat16"}
_SAMPLE = 4096


def merged(source: Checkpoint, lora: LoRA) -> Checkpoint:
    """Return a checkpoint with an adapter merged into its weights: see `Checkpoint.merge_lora`."""
    adapter = read_adapter(lora)
    if lora.digest not in {"", adapter.digest}:
        raise SourceError(
            f"{lora.root} is not the LoRA adapter that was planned or merged", code="different-adapter",
            hint="give that adapter",
        )  # fmt: skip
    return merge(source, adapter, replace(lora, digest=adapter.digest))


def merge(source: Checkpoint, adapter: Adapter, lora: LoRA) -> Checkpoint:
    """Return a checkpoint with an adapter merged into its weights.

    The masters of a weight, as optimizers keep them in float32, become what the weight becomes.

    Raises:
        SourceError: a weight is missing, has another shape, or has no float dtype; all faults at once.
        UsageError: the checkpoint is one stage of a pipeline, or was already derived from another; nothing is changed.
    """
    source.require_whole()
    _require_effect(adapter)
    if source.origin is not None:
        raise UsageError(
            f"{source.root} already has other names or an adapter", code="already-derived",
            hint="merge one adapter, before everything else",
        )  # fmt: skip
    if source.opening.stage is not None:
        raise UsageError(
            f"{source.root} is one stage of a pipeline; an adapter needs all", code="one-stage",
            hint="open all stages",
        )  # fmt: skip
    resolved = resolve(source, adapter, lora.tied)
    tensors = resolved.source.tensors
    products, copies = _of_weights(source, resolved, adapter)
    left_out = {pair.weight: pair for pair in resolved.pairs if pair.weight in source.left_out}
    products, unmerged = _with_masters(products, resolved, left_out)
    if not products:
        raise _no_effect(source, adapter)
    matrices = Matrices(adapter)
    expressions = {
        name: InPlace(
            Operand(resolved.source, name),
            LowRank(name, matrices, tuple(products.get(name, ())), tuple(copies.get(name, ()))),
        )
        for name in tensors
        if name in products or name in copies
    }
    origin = Origin(source, None, frozenset(), lora, (), frozenset(products))
    result = replace(computed(resolved.source, expressions), origin=origin)
    if unmerged:
        warning = f"the adapter is merged into weights, and not into {names(unmerged, most=3)}: no matrix of its shape"
        result = replace(result, warnings=(*result.warnings, warning))
    _compare_samples(result, copies)
    return result


def _of_weights(
    source: Checkpoint, resolved: Resolved, adapter: Adapter
) -> tuple[dict[str, list[Pair]], dict[str, list[Copy]]]:
    """Return the products that are added to each weight, and the copies that it is compared with.

    Raises:
        SourceError: a weight is missing, has another shape, or has no float dtype; all faults at once.
    """
    faults = Faults(adapter.file.path)
    tensors = resolved.source.tensors
    products: dict[str, list[Pair]] = {}
    copies: dict[str, list[Copy]] = {}
    items: tuple[Pair | Copy, ...] = (*resolved.copies, *resolved.pairs)
    for item in items:
        item_text = f"tensor {item.name!r}" if isinstance(item, Copy) else f"layer {item.weight!r}"
        tensor = tensors.get(item.weight)
        if tensor is None:
            if item.weight not in source.left_out:
                faults.add(item_text, partial(_no_match, item.weight, source), code="no-match")
        elif fault := _fault(tensor, item, adapter, source.root):
            faults.add(item_text, fault)
        elif isinstance(item, Copy):
            copies.setdefault(item.weight, []).append(item)
        else:
            try:
                for name in sharing(item.weight, resolved):
                    products.setdefault(name, []).append(item)
            except SourceError as error:
                faults.add(item_text, error)
    faults.raise_if_any(SourceError)
    return products, copies


def _require_effect(adapter: Adapter) -> None:
    """Refuse an adapter that adds nothing, as its alpha is 0."""
    if not any(pair.scale for pair in adapter.pairs):
        raise UsageError(
            f"the adapter in {adapter.file.path} has an alpha of 0, and changes nothing", code="no-effect",
            hint=Text("give another ", Option("lora_alpha"), ", or leave the adapter out"),
        )  # fmt: skip


def _no_effect(source: Checkpoint, adapter: Adapter) -> UsageError:
    """Return the error for an adapter whose weights were all left out."""
    return UsageError(
        f"the adapter changes no tensor that is left of {source.root}", code="no-effect",
        facts=[f"it changes {names(sorted(pair.weight for pair in adapter.pairs), most=3)}"],
        hint="merge it first, and choose tensors afterwards",
    )  # fmt: skip


def _with_masters(
    products: Mapping[str, list[Pair]], resolved: Resolved, left_out: Mapping[str, Pair]
) -> tuple[dict[str, list[Pair]], list[str]]:
    """Return products of weights and of their masters, and the masters that have another shape or no float dtype.

    Args:
        products: the products of each weight.
        resolved: the checkpoint.
        left_out: the pairs of weights that were left out, by name; their masters may be there.
    """
    tensors, result, odd = resolved.source.tensors, dict(products), []
    for weight, masters in resolved.masters.items():
        if weight not in products and weight not in left_out:
            continue
        pairs = products.get(weight) or [left_out[weight]]
        shape = pairs[0].shape[::-1] if pairs[0].transposed else pairs[0].shape
        for name in masters:
            spec = tensors[name].spec
            if (
                spec.shape == (tensors[weight].spec.shape if weight in tensors else shape)
                and spec.dtype.name in _DTYPES
            ):
                result[name] = pairs
            else:
                odd.append(name)
    return result, odd


def _compare_samples(merged: Checkpoint, copies: Mapping[str, object]) -> None:
    """Read the ends of weights with a copy, which compares them.

    Raises:
        SourceError: they differ.
    """
    store = store_of(merged.coding)
    for name in copies:
        tensor = merged.tensors[name]
        stored = [at for _, replicas in tensor.shards for at in replicas]
        for at in (*stored[:1], *stored[-1:]):
            ((begin, nbytes),) = at.runs
            length = min(_SAMPLE, nbytes)
            for offset in {begin, begin + nbytes - length}:
                store.read_into(merged.files[at.file].path, offset, memoryview(bytearray(length)))


def _no_match(weight: str, source: Checkpoint) -> str:
    return f"{no_match(weight, source.all_names)}, in {source.root}"


def _fault(tensor: Tensor, item: Pair | Copy, adapter: Adapter, root: str) -> SourceError | None:
    """Return an error if an item does not fit a tensor, or None."""
    dtype, shape = tensor.spec.dtype, tensor.spec.shape
    expected = item.shape if isinstance(item, Pair) else adapter.file.index.entries[item.name].shape
    expected = expected[::-1] if item.transposed else expected
    here = f"{dtype} {shape_text(shape)} in {root}"
    if isinstance(item, Copy) and (shape != expected or len(shape) not in {1, 2}):
        return SourceError(
            f"is {shape_text(expected)}, but {item.weight} is {here}", code="different-model",
            facts=["the adapter was trained on another model or vocabulary"],
        )  # fmt: skip
    if shape != expected:
        return SourceError(f"is {here}; expected {shape_text(expected)}", code="wrong-shape")
    if dtype.name not in _DTYPES:
        return SourceError(f"is {here}; expected {', '.join(sorted(_DTYPES))}", code="wrong-dtype")
    return None
