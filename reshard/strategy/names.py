"""Names of tensors: find optimizer states and their weights, match patterns, fold layers into one line."""

from __future__ import annotations

import re
from collections import Counter
from fnmatch import fnmatchcase
from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from reshard.errors import Option, StrategyError, Text, names
from reshard.spelling import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.model.checkpoint import Tensor
    from reshard.strategy.strategy import Strategy


ALL_STAGES = "the directory of its strategy files, or the merged file"
"""The alternative to the strategy file of one pipeline stage, for messages."""


# Parameters and `append_dict` entries of the optimizers, loss scaling and callbacks of MindSpore 2.10.
TRAINING_STATE = {
    "global_step", "learning_rate", "momentum", "weight_decay", "beta1", "beta2", "beta1_power", "beta2_power",
    "loss_scale", "scale_sense", "epoch_num", "step_num", "current_iterator_step", "last_overflow_iterator_step",
}  # fmt: skip


_ACCUMULATED = "accu_grads"
_STEP = "step"  # JAX's count of steps, next to the states of optax
OPTAX, PARAMS = "opt_state.", "params."  # the prefix of all states of JAX's optax, and one that weights may have
MODEL = "model."  # the prefix of weights that PyTorch's programs save next to `optim`

_OPTIMIZER_STATE = re.compile(
    r"(?P<before>(?:optim(?:izer)?\.)?(?:state|param_groups|distributed)\.)(?P<rest>.+)", re.DOTALL
)
_ADAPTIVE = ("exp_avg", "exp_avg_sq", "momentum_buffer", "exp_inf", "square_avg", "acc_delta")
_KINDS = {*_ADAPTIVE, "max_exp_avg_sq", "param", "fp32_param", "step"}
"""The kinds of state in PyTorch's optimizers and in distributed ones of its programs; no model uses the first names."""


_MASTERS = {"fp32", "fp32_param", "main_param", "master", "master_param", "param"}
STEPS = {
    "count", "current_iterator_step", "epoch_num", "global_step", "iteration", "last_overflow_iterator_step", "step",
    "step_num",
}  # fmt: skip
"""Last parts of the names of counters of steps."""

_NO_MOMENTS = {_ACCUMULATED, "param_groups", "hyperparams"}


_PREFIXES = frozenset({
    "accum", "accum_update", "accu_grads", "ax", "delta_weight", "exp_avg", "exp_avg_insta_col", "exp_avg_insta_row",
    "exp_avg_res_col", "exp_avg_res_row", "exp_avg_sq", "exp_avg_sq_col", "exp_avg_sq_row", "exp_inf", "fp32",
    "fp32_param", "fp32_params", "grad_accumulation", "grad_avg", "m", "main_grad", "main_param", "main_params",
    "master", "master_param", "master_params", "max_exp_avg_sq", "mean_grad", "mean_square", "moment", "moment1",
    "moment2", "moments", "momentum", "momentum_buf", "momentum_buffer", "momentums", "mu", "nu", "square_avg",
    "step", "v", "velocity", "vhat",
})  # fmt: skip
"""Words before the name of a weight in the names of optimizer states: of MindSpore, PyTorch's programs, and optax."""

_OF_OPTIMIZER = re.compile(r"(?:adamw?|came|lamb|lars|lion|muon|sgd)_\w+")
_BESIDE = {"linear": "moments", "stat": "accum", "prev": "step_size", "step_size": "prev"}
"""Words that are states only beside others of the same optimizer (FTRL, SGD, Rprop), as modules are called so, too."""

_OPTIMIZERS = frozenset({"opt", "optim", "optimizer"})


class State(NamedTuple):
    """The parts of the name of an optimizer state.

    Attributes:
        weight: the name of the weight.
        prefix: the name of the state before that of the weight.
        suffix: the name of the state after that of the weight.
        outer: the prefix of the weight's own name that the name of the state omits.
    """

    weight: str
    prefix: str
    suffix: str = ""
    outer: str = ""

    @property
    def kind(self) -> str:
        """Return the name of the state without the name of the weight."""
        return f"{self.prefix.rstrip('.')}{self.suffix}"

    def of(self, weight: str, *, omits: bool = True) -> str:
        """Return the name of the same state of another weight.

        The prefix of the weight that this state's name omits (`outer`) is omitted there, too, unless `omits` is False:
        then it is a part of the name in the model.

        >>> state = State("model.a.w", "optim.state.", ".step", "model.")
        >>> state.of("model.b.w"), state.of("net.a.w"), state.of("c.w"), state.of("model.b.w", omits=False)
        ('optim.state.b.w.step', 'optim.state.a.w.step', 'optim.state.c.w.step', 'optim.state.model.b.w.step')
        """
        inner = self.weight.removeprefix(self.outer)
        if not self.outer or inner not in {weight, weight.partition(".")[2]}:
            inner = weight.removeprefix(self.outer) if omits else weight
        return f"{self.prefix}{inner}{self.suffix}"


def optimizer_states(names: Collection[str], words: Collection[str] = ()) -> dict[str, State]:
    """Return the names of optimizer states, each with its parts.

    In distributed checkpoints of PyTorch the state of an optimizer is flattened: `optim.state.`, or `state.` alone
    (torchtitan), the name of a weight without the prefix of the model, and the kind of state; or `optimizer.state.`,
    the kind, and the name (Megatron). In JAX's it is `opt_state.`, maybe numbers, the kind, and the name, which may
    omit its first `params.`. In other checkpoints a state is a word of an optimizer and a weight's name, and all of
    `accu_grads.*` are states. A copy of the weights under any other prefix (`ema.fc`, `target_encoder.fc`) is weights.
    A word counts only if most names with it end with the name of a weight: a module may be called `m`.

    Args:
        names: the names of all tensors.
        words: further words before the names of weights that are states, as the format says.

    >>> names = ["fc", "conv", "adam_m.fc", "adam_m.conv", "ema.fc", "ema.conv", "m.fc", "m.conv1", "m.conv2"]
    >>> {name: state.weight for name, state in optimizer_states(names).items()}
    {'adam_m.fc': 'fc', 'adam_m.conv': 'conv'}
    >>> names = ["model.w", "optim.state.w.exp_avg", "state.model.w.step", "optimizer.state.exp_avg.model.w", "state.p"]
    >>> for state in optimizer_states(names).values():
    ...     print(state.weight, state.kind)
    model.w optim.state.exp_avg
    model.w state.step
    model.w optimizer.state.exp_avg
    """
    prefixes: Counter[str] = Counter()
    states: dict[str, State] = {}
    candidates: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        if (state := _of_optimizer(name, names)) is not None:
            states[name] = state
            continue
        for prefix, rest in _splits(name):
            if not _is_of_optimizer(prefix, words):
                continue
            prefixes[prefix] += 1
            if rest in names or prefix == _ACCUMULATED:
                candidates.setdefault(name, []).append((prefix, rest))
    if any(name.startswith(OPTAX) for name in states) and _STEP in names:
        states[_STEP] = State("", OPTAX)
    before_weight = Counter(prefix for splits in candidates.values() for prefix, _ in splits)
    return states | {
        name: State(rest, f"{prefix}.")
        for name, splits in candidates.items()
        for prefix, rest in reversed(splits)  # the longest name counts
        if 2 * before_weight[prefix] >= prefixes[prefix] and _BESIDE.get(prefix, prefix) in before_weight
    }


def _is_of_optimizer(prefix: str, words: Collection[str]) -> bool:
    """Return whether a prefix is a word of an optimizer, perhaps below a word for all of the optimizer."""
    outer, _, word = prefix.rpartition(".")
    is_word = word in _PREFIXES or word in _BESIDE or word in words or _OF_OPTIMIZER.fullmatch(word) is not None
    return is_word and (not outer or outer in _OPTIMIZERS)


def omitted(states: Iterable[State], rename: Callable[[str], str]) -> set[str]:
    """Return the prefixes of weights that names of states omit and that all these weights have under new names, too."""
    outers: dict[str, bool] = {}
    for state in states:
        if outers.get(state.outer, True):
            outers[state.outer] = rename(state.weight).startswith(state.outer)
    return {outer for outer, kept in outers.items() if kept}


def role_of(state: State) -> str:
    """Return the role of an optimizer state: `moments`, `masters` or `steps`, else "".

    >>> names = ["w", "exp_avg.w", "fp32.w", "optim.state.w.step", "opt_state.0.count", "optim.param_groups.w.lr"]
    >>> {name: role_of(state) for name, state in optimizer_states(names).items()}  # doctest: +NORMALIZE_WHITESPACE
    {'optim.state.w.step': 'steps', 'opt_state.0.count': 'steps', 'optim.param_groups.w.lr': '',
     'exp_avg.w': 'moments', 'fp32.w': 'masters'}
    """
    word = state.kind.rpartition(".")[2]
    if word in STEPS or (f"{word}." == OPTAX and (state.weight.rpartition(".")[2] or _STEP) in STEPS):
        return "steps"
    if word in _MASTERS:
        return "masters"
    return "" if _NO_MOMENTS.intersection(state.kind.split(".")) else "moments"


def _of_optimizer(name: str, names: Collection[str]) -> State | None:
    """Split a state's name in a distributed checkpoint; return None for other names."""
    if name.startswith(OPTAX):
        weights = ((outer + rest, prefix, outer) for prefix, rest in _splits(name) for outer in ("", PARAMS))
        of_weight = (State(weight, f"{prefix}.", "", outer) for weight, prefix, outer in weights if weight in names)
        return next(of_weight, State(name.removeprefix(OPTAX), OPTAX))
    match = _OPTIMIZER_STATE.fullmatch(name)
    if match is None:
        return None
    before, rest = match["before"], match["rest"]
    weight, _, kind = rest.rpartition(".")
    for outer in ("", MODEL):
        if outer + weight in names:
            return State(outer + weight, before, f".{kind}", outer)
    is_sure = before.startswith("optim")
    first, _, after_first = rest.partition(".")
    if is_sure and first in _KINDS and after_first:
        return State(after_first, f"{before}{first}.")
    if is_sure or any(f"{before}{weight}.{state_kind}" in names for state_kind in _ADAPTIVE):
        return State(weight, before, f".{kind}") if weight else State(rest, before)
    return None


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """Yield the texts before and after each of the first four dots of a name.

    No prefix of an optimizer has more dots.
    """
    dot = name.find(".")
    for _ in range(4):
        if dot < 0:
            return
        yield name[:dot], name[dot + 1 :]
        dot = name.find(".", dot + 1)


def is_training_state(name: str, tensor: Tensor | None) -> bool:
    """Return whether a tensor is text or a single number of a well-known name.

    Such a tensor is neither a weight nor the state of a weight.
    """
    if tensor is None:
        return False
    return tensor.text is not None or is_step(name, tensor.spec.shape)


def is_step(name: str, shape: Shape) -> bool:
    """Return whether a tensor is a single number such as `global_step`."""
    is_known = name.rpartition(".")[2] in TRAINING_STATE or name.startswith(OPTAX)
    return prod(shape) == 1 and is_known


def one_stage_advice(strategy: Strategy, names: Collection[str], states: Collection[str]) -> str:
    """Return a hint for weights that a strategy lacks, or "".

    If the model has all tensors of the strategy, the strategy may cover a single stage only.
    """
    may_be_one_stage = len(strategy.stages) == 1 and all(name in names or name in states for name in strategy.tensors)
    return f"if the strategy is that of one stage of a pipeline, give {ALL_STAGES}" if may_be_one_stage else ""


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether any pattern is a name, or a glob that matches it.

    >>> matches("layers.3.w", ["layers.*"])
    True
    """
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def matching(pattern: str, names: Collection[str]) -> list[str]:
    """Return the names matching a pattern; an exact name wins over a glob.

    >>> matching("layers.*", ["layers.0.w", "layers.1.w", "norm"]), matching("w[0]", ["w[0]", "w0"])
    (['layers.0.w', 'layers.1.w'], ['w[0]'])
    """
    return [pattern] if pattern in names else [name for name in names if fnmatchcase(name, pattern)]


_LONGEST_ALIKE = 300  # longer names are not compared with a missing one, which is slow
_NUMBER = re.compile(r"\d+")
_EXPRESSION_STARS = re.compile(r"(?:\\d|\[0-9\]|\.)[*+]|\\d")  # the equivalents of a star in regular expressions
_EXPRESSION_SIGNS = re.compile(r"[\\^$()]")
_EXPRESSION_ONLY = re.compile(r"[\\^$()|+]|^\.\*")  # syntax of regular expressions that globs do not use


def no_match(pattern: str, known_names: Collection[str]) -> str:
    r"""Explain that a pattern matches no name, and give the nearest name or glob that does.

    >>> no_match("layer.0.wq", ["layers.0.wq", "layers.1.wq", "norm"])
    "matches no tensor; did you mean 'layers.0.wq'?"
    >>> no_match("layer.*", ["layers.0.wq", "layers.1.wq", "norm"])
    "matches no tensor; did you mean 'layers.*'?"
    >>> no_match(r"layers\.(\d+)\.w", ["layers.0.wq", "layers.1.wq", "norm"])
    "matches no tensor; did you mean 'layers.*.wq'? * stands for any text, regular expressions are not known"
    """
    is_expression = bool(_EXPRESSION_ONLY.search(pattern))
    plain = _EXPRESSION_SIGNS.sub("", _EXPRESSION_STARS.sub("*", pattern)) if is_expression else pattern
    meant = _nearest_glob(plain, known_names)
    suggestion = f"did you mean {meant!r}?" if meant else f"there are {names(known_names)}"
    hint = f"{'' if meant else ';'} * stands for any text, regular expressions are not known" if is_expression else ""
    return f"matches no tensor; {suggestion}{hint}"


def _nearest_glob(pattern: str, known_names: Collection[str]) -> str:
    """Return the name, or the glob with the pattern's stars, that is nearest to it; "" if none is near."""
    known = [name for name in known_names if len(name) <= _LONGEST_ALIKE]
    if "*" in pattern:
        globs = dict.fromkeys(glob for name in known for glob in _with_words(pattern, name) if fnmatchcase(name, glob))
        if meant := nearest(pattern, globs):
            return meant[0]
    starred = dict.fromkeys(_NUMBER.sub("*", name) for name in known)
    meant = nearest(_NUMBER.sub("*", pattern), starred, cutoff=0.4)
    if not meant or "*" in pattern:
        return meant[0] if meant else ""
    return nearest(pattern, (name for name in known if _NUMBER.sub("*", name) == meant[0]), cutoff=0.0)[0]


def _with_words(pattern: str, name: str) -> Iterator[str]:
    """Yield a pattern with the dotted parts of a name in place of its own, counted from each end.

    Parts with stars are kept.

    >>> [*_with_words("layr.*.w", "layers.0.wq")], [*_with_words("*.wieght", "layers.0.weight")]
    (['layers.*.wq', 'layers.*.wq'], ['*.0', '*.weight'])
    """
    parts, words = pattern.split("."), name.split(".")
    if len(parts) <= len(words):
        for aligned in (words[: len(parts)], words[-len(parts) :]):
            yield ".".join(part if "*" in part else word for part, word in zip(parts, aligned, strict=True))


def check_layouts(rules: Mapping[str, str], known_names: Collection[str]) -> None:
    """Check that each rule of `layout` is used; the last one that matches a tensor counts.

    Raises:
        StrategyError: a rule matches no tensor, or later ones take all that it matches.
    """
    takers = {name: pattern for pattern in rules for name in matching(pattern, known_names)}
    used = {*takers.values()}
    for pattern, rule in rules.items():
        if pattern in used:
            continue
        option = Option("layout", pattern, rule)
        if not matching(pattern, known_names):
            raise StrategyError(Text(option, " ", no_match(pattern, known_names)), code="no-match")
        raise StrategyError(
            Text(option, " is never used: a later rule takes its tensors"), code="unused-pattern",
            hint="of several rules the last one counts: write the one for more tensors first",
        )  # fmt: skip


_INTEGER = re.compile(r"([0-9]{1,18})")  # longer runs of digits are cut, because int() of a huge one is slow
_MOST_NUMBERS = 16  # of a name; the work grows with their square
_MOST_RUNS = 8

KindT = TypeVar("KindT", bound="Hashable")


def natural(name: str) -> tuple[str | int, ...]:
    """Return a sort key of a name that orders numbers by their value.

    >>> sorted(["h.10.w", "h.9.w", "h"], key=natural)
    ['h', 'h.9.w', 'h.10.w']
    """
    return tuple(int(part) if number % 2 else part for number, part in enumerate(_INTEGER.split(name)))


def ranges_text(numbers: Iterable[int | str], *, most: int = _MOST_RUNS) -> str:
    """Write ascending integers as runs; show only the first few runs.

    >>> ranges_text([0, 1, 2, 5, 7, 8]), ranges_text(["08", "09", "10"]), ranges_text(range(0, 40, 2))
    ('0-2,5,7-8', '08-10', '0,2,4,6,8,10,12,14,...')
    """
    runs: list[tuple[int | str, int | str]] = []
    for number in numbers:
        if runs and int(number) == int(runs[-1][1]) + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    texts = [f"{a}" if a == b else f"{a}-{b}" for a, b in runs[:most]]
    return ",".join([*texts, "..."] if len(runs) > most else texts)


def ranks_text(ranks: Iterable[int]) -> str:
    """Write ranks for a message, as runs.

    >>> ranks_text([4]), ranks_text({6, 4, 5, 9})
    ('rank 4', 'ranks 4-6,9')
    """
    distinct = sorted(set(ranks))
    return f"rank{'s' * (len(distinct) != 1)} {ranges_text(distinct)}"


def group_names(items: Iterable[tuple[str, KindT]]) -> list[tuple[str, KindT, int]]:
    """Fold names of one kind that differ only in integers.

    Args:
        items: names, each with its kind.

    Returns:
        for each folded name, its kind and the number of names it stands for, in order of first appearance. A row with
        several ranges stands for all their combinations; each is one of the names.

    >>> names = [f"h.{i}.{w}" for i in range(3) for w in ("wq", "wk")] + ["h.7.wq", "ln"]
    >>> group_names((name, None) for name in names)
    [('h.{0-2,7}.wq', None, 4), ('h.{0-2}.wk', None, 3), ('ln', None, 1)]
    """
    return [(name, kind, len(members)) for name, kind, members in group_members(items)]


def group_members(items: Iterable[tuple[str, KindT]]) -> list[tuple[str, KindT, list[str]]]:
    """Fold names, and return each folded name with its kind and members.

    >>> group_members([("h.0.w", None), ("h.1.w", None), ("ln", None)])
    [('h.{0-1}.w', None, ['h.0.w', 'h.1.w']), ('ln', None, ['ln'])]
    """
    groups: dict[tuple[tuple[str, ...], KindT], list[tuple[str, ...]]] = {}
    for name, kind in items:
        parts = _INTEGER.split(name, _MOST_NUMBERS)
        groups.setdefault((tuple(parts[::2]), kind), []).append(tuple(parts[1::2]))
    return [
        (
            _joined(texts, [values[0] if len(values) == 1 else f"{{{ranges_text(values)}}}" for values in box]),
            kind,
            [_joined(texts, point) for point in product(*box)],
        )
        for (texts, kind), numbers in groups.items()
        for box in _boxes(numbers)
    ]


def _joined(texts: Sequence[str], between: Sequence[str]) -> str:
    return "".join(a + b for a, b in zip(texts, [*between, ""], strict=True))


def _boxes(numbers: Sequence[tuple[str, ...]]) -> list[tuple[tuple[str, ...], ...]]:
    """Join lattice points into boxes, axis by axis from the last.

    Each point is in exactly one box.
    """
    boxes: list[tuple[tuple[str, ...], ...]] = [tuple((number,) for number in point) for point in numbers]
    for axis in reversed(range(len(numbers[0]))):
        joined: dict[tuple[tuple[str, ...], ...], list[str]] = {}
        for box in boxes:
            joined.setdefault((*box[:axis], *box[axis + 1 :]), []).extend(box[axis])
        boxes = [
            (*rest[:axis], tuple(sorted(values, key=lambda value: (int(value), value))), *rest[axis:])
            for rest, values in joined.items()
        ]
    return boxes
