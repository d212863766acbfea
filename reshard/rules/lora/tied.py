"""Handle tied weights: tensors that are one in the model, such as an embedding and the head.

PEFT trains the adapter of a tied weight as if the other were separate. Its `merge_and_unload` changes both in place,
which gives another model than the trained one. The user has to choose. Two weights are tied if they have one storage
in a file of `torch.save`, if the head is not stored, or if the model's `config.json` says so.

Tensors that share bytes in a file may be tied without being equal, such as a fused weight and its parts. These can only
be untied.

Sources: PEFT 0.21.2, `tuners/tuners_utils.py` (`_check_merge_allowed`), `tuners/lora/model.py` (`_add_targets_to_tie`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from reshard.core.storage.places import as_place
from reshard.errors import Option, SourceError, Text, UsageError, names
from reshard.rules.lora.conv1d import oriented
from reshard.rules.numbers import read_config
from reshard.strategy.names import optimizer_states, role_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.facts import Extras
    from reshard.rules.lora.parts import Adapter, Copy, Pair

T = TypeVar("T")

_HEAD, _EMBEDDINGS = "lm_head.weight", ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")
_WITH_HEAD = ("ForCausalLM", "ForConditionalGeneration")
_SHARING = "torch.save"
"""The only format in which two tensors may have the same bytes."""


class Resolved(NamedTuple):
    """A checkpoint and an adapter after tied weights were resolved.

    Attributes:
        source: the checkpoint, in which an untied weight is a tensor.
        pairs: the products that are added to weights.
        copies: the copies that are compared with tensors.
        shared: groups of tensors with the same bytes, which get each other's products.
        masters: the masters of weights in the optimizer, by the name of the weight.
    """

    source: Checkpoint
    pairs: tuple[Pair, ...]
    copies: tuple[Copy, ...]
    shared: tuple[tuple[str, ...], ...]
    masters: Mapping[str, list[str]]


class _TiedWeights(NamedTuple):
    """Tied weights, and whether they have the same bytes."""

    names: tuple[str, ...]
    one_storage: bool


def resolve(source: Checkpoint, adapter: Adapter, choice: str) -> Resolved:
    """Resolve tied weights of a checkpoint before an adapter is merged.

    Args:
        source: the checkpoint.
        adapter: the adapter to merge into it.
        choice: see `LoRA.tied`.

    Raises:
        UsageError: the adapter changes tied weights differently, and there is no choice; or no weights are tied, and
            there is one.
        SourceError: it is not known which way a product is added to a square weight.
    """
    pairs = {pair.weight: pair for pair in adapter.pairs}
    tensors, head, embedding = dict(source.tensors), *_head_and_embedding(source, pairs)
    absent = bool(head) and not (head in source.all_names or head in source.left_out)
    if absent and embedding in tensors:
        tensors[head] = tensors[embedding]._replace(spec=tensors[embedding].spec._replace(name=head))
    masters = _masters(source)
    known = {weight: tensors[of_weight[0]] for weight, of_weight in masters.items()} | tensors
    pairs = {pair.weight: pair for pair in oriented(source, known, adapter.pairs, adapter.file.path)}
    no_weights = {name for of_weight in masters.values() for name in of_weight}
    groups = [_TiedWeights(tied, one_storage=True) for tied in _sharing(source, pairs, no_weights)]
    if head in tensors and embedding in tensors and not any(head in group.names for group in groups):
        groups.append(_TiedWeights((embedding, head), one_storage=absent))
    if choice and not groups:
        raise UsageError(
            f"the adapter changes no tied weights of {source.root}", code="no-effect",
            hint=Text("leave ", Option("lora_tied", choice), " out"),
        )  # fmt: skip
    merged, warnings, untied, shared = list(pairs.values()), list[str](), list[str](), list[tuple[str, ...]]()
    for group in groups:
        changed = [name for name in group.names if name in pairs]
        alike = len(changed) == len(group.names) and _are_alike(adapter, [pairs[name] for name in changed])
        if alike and not (group.one_storage and len({tensors[name].shards for name in changed}) > 1):
            merged = [pair for pair in merged if not (group.one_storage and pair.weight in changed[1:])]
            shared += [group.names] if group.one_storage else []
        elif not choice:
            how_changed = f"only {names(changed)}" if len(changed) < len(group.names) else "each differently"
            raise UsageError(
                f"{names(group.names)} are tied in {source.root}, and the adapter changes {how_changed}",
                code="tied-weights",
                hint=Text(
                    "give ", Option("lora_tied", "untie"), " to store each as it was trained, or ",
                    Option("lora_tied", "both"), " to change both, as PEFT's merge_and_unload does",
                ),
            )  # fmt: skip
        elif choice == "untie":
            untied += changed if group.one_storage else []
            warnings.append(
                f"{names(group.names)} are no longer tied; set tie_word_embeddings to false in the model's config.json"
            )
        elif group.one_storage:
            shared.append(group.names)
        else:
            merged += [
                pairs[name]._replace(weight=tied_name)
                for name in changed
                for tied_name in group.names
                if tied_name != name
            ]
    copies, extras = adapter.copies, source.extras
    if absent and not {head, embedding} & set(untied):
        tensors.pop(head, None)
        merged = [pair._replace(weight=embedding) if pair.weight == head else pair for pair in merged]
        copies = tuple(copy._replace(weight=embedding) if copy.weight == head else copy for copy in copies)
    elif absent:
        extras = _with_head(extras, head, embedding)
    of_heads = {pair.a for pair in adapter.pairs if _ends(pair.weight, _HEAD)}
    merged.sort(key=lambda pair: pair.a in of_heads)  # PEFT adds them last, which matters if both get both
    warnings = [*source.warnings, *warnings]
    source = replace(source, tensors=tensors, extras=extras, warnings=tuple(warnings))
    shared = [group for group in shared if tensors.keys() >= {*group}]
    return Resolved(source, tuple(merged), copies, tuple(shared), masters)


def _masters(source: Checkpoint) -> dict[str, list[str]]:
    """Return the masters of weights, which an optimizer keeps in float32, by the name of the weight."""
    masters: dict[str, list[str]] = {}
    for name, state in optimizer_states({*source.all_names, *source.left_out}).items():
        if name in source.tensors and role_of(state) == "masters":
            masters.setdefault(state.weight, []).append(name)
    return masters


def sharing(weight: str, resolved: Resolved) -> tuple[str, ...]:
    """Return the names of a weight and of the tensors that get its products, as they are the same bytes.

    Raises:
        SourceError: a tensor has only a part of these bytes, or has them in another order.
    """
    group = next((group for group in resolved.shared if weight in group), (weight,))
    tensors = resolved.source.tensors
    for name in group:
        if tensors[name].shards != tensors[weight].shards or tensors[name].spec.dtype != tensors[weight].spec.dtype:
            raise SourceError(
                f"shares bytes with {name}, which is another tensor", code="unsupported-strides",
                hint=Text("give ", Option("lora_tied", "untie")),
            )  # fmt: skip
    return (weight, *(name for name in group if name != weight))


def _with_head(extras: Extras, head: str, embedding: str) -> Extras:
    """Return the extras with the head arranged as the embedding."""
    arrangement = extras.arrangement
    if arrangement is None or embedding not in arrangement.tensors:
        return extras
    tensors = {**arrangement.tensors, head: arrangement.tensors[embedding]}
    return replace(extras, arrangement=replace(arrangement, tensors=tensors))


def _head_and_embedding(source: Checkpoint, weights: Collection[str]) -> tuple[str, str]:
    """Return the names of a tied head and embedding, or "" for both.

    They count only if an adapter changes one of them.
    """
    states = optimizer_states(source.all_names, source.opening.states)
    weight_names = [name for name in (*source.tensors, *source.left_out) if name not in states]
    embeddings = [name for name in weight_names if _ends(name, *_EMBEDDINGS)]
    head = next((name for name in (*weights, *weight_names) if _ends(name, _HEAD)), _HEAD)
    if len(embeddings) != 1 or not {head, *embeddings} & set(weights):
        return "", ""
    absent = head not in source.all_names and head not in source.left_out
    is_tied = (absent and head in weights) or _config_ties(source, absent=absent)
    return (head, embeddings[0]) if is_tied else ("", "")


def _ends(name: str, *ends: str) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _config_ties(source: Checkpoint, *, absent: bool) -> bool:
    """Return whether the model's configuration ties the head.

    Without the option, the head is tied if it is not stored.
    """
    root = as_place(source.root)
    path = (root.parent if root.is_file() else root) / "config.json"
    if not path.is_file():
        return False
    config = read_config(path)
    if not isinstance(config, Mapping):
        raise UsageError(f"{path} is a {type(config).__name__}; expected a JSON object", code="wrong-type")
    inner = config.get("text_config")
    ties = config.get("tie_word_embeddings", inner.get("tie_word_embeddings") if isinstance(inner, Mapping) else None)
    if ties is None and absent:
        classes = config.get("architectures")
        return isinstance(classes, list) and any(str(name).endswith(_WITH_HEAD) for name in classes)
    return ties is True


def _sharing(source: Checkpoint, weights: Collection[str], no_weights: Collection[str]) -> Iterator[tuple[str, ...]]:
    """Yield groups of tensors that share bytes, without `no_weights`, if one of them is among `weights`."""
    if not any(file.index.format == _SHARING for file in source.files):
        return
    parent: dict[str, str] = {}

    def first(name: str) -> str:
        while (above := parent.setdefault(name, name)) != name:
            parent[name] = name = parent[above]
        return name

    reached, last = (-1, 0), ""
    extents = (
        (at.file, begin, nbytes, name)
        for name, tensor in source.tensors.items()
        for replicas in tensor.sharding.replicas
        for at in replicas
        for begin, nbytes in tensor.runs[at.runs_index]
    )
    for file, begin, nbytes, name in sorted(extent for extent in extents if extent[2]):
        if (file, begin) < reached:
            parent[first(name)] = first(last)
        if (file, begin + nbytes) > reached:
            reached, last = (file, begin + nbytes), name
    groups: dict[str, list[str]] = {}
    for name in source.tensors:
        if name not in no_weights:
            groups.setdefault(first(name), []).append(name)
    yield from (tuple(group) for group in groups.values() if len(group) > 1 and any(name in weights for name in group))


def _are_alike(adapter: Adapter, pairs: list[Pair]) -> bool:
    """Return whether all pairs have the same product, as with `ensure_weight_tying`."""
    import numpy as np

    first = pairs[0]
    shape = first.shape[::-1] if first.transposed else first.shape
    for pair in pairs[1:]:
        pair_shape = pair.shape[::-1] if pair.transposed else pair.shape
        if (pair_shape, pair.rank, pair.scale) != (shape, first.rank, first.scale):
            return False
        a, b = adapter.matrix(pair.a), adapter.matrix(pair.b)
        if pair.transposed != first.transposed:
            a, b = b.T, a.T
        if not (np.array_equal(a, adapter.matrix(first.a)) and np.array_equal(b, adapter.matrix(first.b))):
            return False
    return True
