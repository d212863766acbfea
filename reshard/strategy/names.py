"""Names of tensors: which are optimizer states, and of which weight; which a pattern matches."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from reshard.source.checkpoint import Tensor
    from reshard.strategy.strategy import Strategy


ALL_STAGES = "the directory of its strategy files, or the merged file"
"""What to give in place of the strategy file of one stage of a pipeline, for messages."""


# What optimizers, loss scaling and callbacks of MindSpore 2.10 keep as parameters or `append_dict` entries.
_TRAINING_STATE = {
    "global_step", "learning_rate", "momentum", "weight_decay", "beta1", "beta2", "beta1_power", "beta2_power",
    "loss_scale", "scale_sense", "epoch_num", "step_num", "current_iterator_step", "last_overflow_iterator_step",
}  # fmt: skip


def optimizer_states(known: Collection[str]) -> dict[str, str]:
    """Return those of some names that are of optimizer states, each with its weight's name.

    Such a name is a prefix and a weight's name; all of `accu_grads.*` are such. A prefix of the optimizer stands before
    weights' names: `backbone.fc` is no state of `fc` if most of what else is in `backbone` is none of a weight.

    >>> optimizer_states(["fc", "conv", "adam_m.fc", "adam_m.conv", "backbone.fc", "backbone.conv1", "backbone.conv2"])
    {'adam_m.fc': 'fc', 'adam_m.conv': 'conv'}
    """
    every: Counter[str] = Counter()
    candidates: dict[str, list[tuple[str, str]]] = {}
    for name in known:
        for prefix, rest in _splits(name):
            every[prefix] += 1
            if rest in known or prefix == "accu_grads":
                candidates.setdefault(name, []).append((prefix, rest))
    before_weight = Counter(prefix for some in candidates.values() for prefix, _ in some)
    return {
        name: rest
        for name, some in candidates.items()
        for prefix, rest in reversed(some)  # the longest name counts
        if 2 * before_weight[prefix] >= every[prefix]
    }


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """Yield what stands before and behind each of the first dots of a name; no optimizer's prefix has more."""
    dot = name.find(".")
    for _ in range(4):
        if dot < 0:
            return
        yield name[:dot], name[dot + 1 :]
        dot = name.find(".", dot + 1)


def is_training_state(name: str, tensor: Tensor | None) -> bool:
    """Tell what is neither weight nor state of one: text, and single numbers of well-known names."""
    if tensor is None:
        return False
    return tensor.text is not None or (prod(tensor.spec.shape) == 1 and name.rpartition(".")[2] in _TRAINING_STATE)


def one_stage_advice(strategy: Strategy, known: Collection[str], states: Collection[str]) -> str:
    """Return what to give where a strategy does not name weights of a model that has all of its own, or nothing."""
    some = len(strategy.stages) == 1 and all(name in known or name in states for name in strategy.tensors)
    return f"if the strategy is that of one stage of a pipeline, give {ALL_STAGES}" if some else ""


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether any pattern is a name, or a glob that matches it.

    >>> matches("layers.3.w", ["layers.*"])
    True
    """
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)
