"""Tell which layers of a model have the transposed weights of Conv1D.

GPT-2 and its relatives store the weights of Conv1D, `in` rows and `out` columns, next to those of Linear, `out` rows
and `in` columns. PEFT saves one `fan_in_fan_out`, that of the layer it wrapped last, so it is only the last evidence:

1. The shape of the weight, unless it is square.
2. Layers of the same name, such as `c_proj`, whose weights are not square: their shapes with the adapter or a bias.
3. The `model_type` in the model's `config.json`, and the name of the layer.
4. `fan_in_fan_out`, if all layers of the adapter have one name, or if it agrees with the name of the layer. A model in
   which other layers are Conv1D, as shapes tell, may have more of them, so that false does not suffice there.

Sources: transformers 5, `pytorch_utils.Conv1D` and the models that use it; PEFT 0.21.2, `tuners/lora/model.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reshard.core.storage.places import as_place
from reshard.errors import Faults, SourceError
from reshard.rules.numbers import read_config

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from reshard.core.model.checkpoint import Checkpoint, Tensor
    from reshard.rules.lora.parts import Pair

_MODELS = {"clvp", "clvp_decoder", "decision_transformer", "gpt2", "imagegpt", "openai-gpt"}
_LAYERS = {"c_attn", "c_fc", "c_proj", "q_attn"}
"""The models with Conv1D, and the names of their layers of that kind."""


def oriented(source: Checkpoint, tensors: Mapping[str, Tensor], pairs: Iterable[Pair], path: str) -> list[Pair]:
    """Return the pairs, each transposed if its layer is a Conv1D or an embedding.

    Args:
        source: the checkpoint.
        tensors: its tensors, by name.
        pairs: the pairs of an adapter.
        path: the file of the adapter, for messages.

    Raises:
        SourceError: nothing tells the kind of a layer with a square weight.
    """
    layers = [pair for pair in pairs if not pair.embedding]
    kinds = _kinds_by_shape(tensors, layers)
    config = _ConfigKinds(source)
    alone = len({_last(pair.weight) for pair in layers}) == 1
    faults = Faults(path)
    result = []
    for pair in pairs:
        is_transposed: bool | None = pair.transposed
        tensor = tensors.get(pair.weight)
        if not pair.embedding and tensor is not None:
            is_transposed = _by_shape(pair, tensor.spec.shape)
            if is_transposed is None and tensor.spec.shape == pair.shape:
                is_transposed = _of_square(pair, kinds, config, alone=alone)
                if is_transposed is None:
                    faults.add(f"layer {pair.weight!r}", _unknown(pair))
            elif is_transposed is None:  # neither way fits
                is_transposed = pair.transposed
        result.append(pair._replace(transposed=bool(is_transposed)))
    faults.raise_if_any(SourceError)
    return result


def _by_shape(pair: Pair, shape: tuple[int, ...]) -> bool | None:
    """Return whether a product is added transposed; None if the shape does not tell."""
    if pair.shape == pair.shape[::-1] or shape not in {pair.shape, pair.shape[::-1]}:
        return None
    return shape != pair.shape


def _of_square(pair: Pair, kinds: Mapping[str, set[bool]], config: _ConfigKinds, *, alone: bool) -> bool | None:
    """Return whether a layer with a square weight is a Conv1D; None if nothing tells."""
    layer = _last(pair.weight)
    by_shape = kinds.get(layer, set())
    if len(by_shape) == 1:
        return next(iter(by_shape))
    by_config = config.of(layer)
    if by_config is not None:
        return by_config
    others = {kind for of_layer in kinds.values() for kind in of_layer}
    agrees = layer in _LAYERS if pair.transposed else layer not in _LAYERS and True not in others
    return pair.transposed if alone or agrees else None


def _kinds_by_shape(tensors: Mapping[str, Tensor], pairs: Iterable[Pair]) -> dict[str, set[bool]]:
    """Return the kinds that shapes tell, by the last part of the names of layers: True for Conv1D."""
    kinds: dict[str, set[bool]] = {}
    for pair in pairs:
        tensor = tensors.get(pair.weight)
        if tensor is not None and (kind := _by_shape(pair, tensor.spec.shape)) is not None:
            kinds.setdefault(_last(pair.weight), set()).add(kind)
    for name, kind in _kinds_by_bias(tensors):
        kinds.setdefault(_last(name), set()).add(kind)
    return kinds


def _kinds_by_bias(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, bool]]:
    """Yield weights that are not square and have a bias, and whether the bias has an element for each column."""
    for name, tensor in tensors.items():
        bias = tensors.get(f"{name.removesuffix('.weight')}.bias")
        shape = tensor.spec.shape
        if not name.endswith(".weight") or bias is None or len(shape) != 2 or shape[0] == shape[1]:
            continue
        if bias.spec.shape in {shape[:1], shape[1:]}:
            yield name, bias.spec.shape == shape[1:]


class _ConfigKinds:
    """The kinds of layers according to a model's configuration, which is read when it is needed."""

    def __init__(self, source: Checkpoint) -> None:
        root = as_place(source.root)
        self._path = (root.parent if root.is_file() else root) / "config.json"
        self._models: set[str] | None = None

    def of(self, layer: str) -> bool | None:
        """Return whether a layer of this name is a Conv1D; None if the model is unknown."""
        if self._models is None:
            self._models = set(_model_types(read_config(self._path))) if self._path.is_file() else set()
        return layer in _LAYERS and not _MODELS.isdisjoint(self._models) if self._models else None


def _model_types(config: Any) -> Iterator[str]:
    """Yield the types of a model and of its parts, such as a decoder."""
    if isinstance(config, Mapping):
        if isinstance(config.get("model_type"), str):
            yield config["model_type"]
        for part in config.values():
            yield from _model_types(part)


def _last(weight: str) -> str:
    return weight.removesuffix(".weight").rpartition(".")[2]


def _unknown(pair: Pair) -> SourceError:
    said = "true" if pair.transposed else "false"
    return SourceError(
        f"is {pair.shape[0]} x {pair.shape[1]}, and nothing says whether it is of Conv1D or of Linear",
        code="unknown-kind", facts=[f"fan_in_fan_out is {said}, which PEFT saves for the last of several layers"],
        hint="put the model's config.json, with its model_type, next to the checkpoint",
    )  # fmt: skip
