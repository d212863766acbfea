"""Names of tensors: which are optimizer states, and of which weight; which a pattern matches; layers folded to one."""

from __future__ import annotations

import re
from collections import Counter
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import islice, product
from math import prod
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from reshard.errors import names

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence

    from reshard.layout.block import Shape
    from reshard.source.checkpoint import Tensor
    from reshard.strategy.strategy import Strategy


ALL_STAGES = "the directory of its strategy files, or the merged file"
"""What to give in place of the strategy file of one stage of a pipeline, for messages."""


# What optimizers, loss scaling and callbacks of MindSpore 2.10 keep as parameters or `append_dict` entries.
TRAINING_STATE = {
    "global_step", "learning_rate", "momentum", "weight_decay", "beta1", "beta2", "beta1_power", "beta2_power",
    "loss_scale", "scale_sense", "epoch_num", "step_num", "current_iterator_step", "last_overflow_iterator_step",
}  # fmt: skip


_ACCUMULATED = "accu_grads"
_MODEL = "model."  # under which PyTorch's programs save weights next to `optim`

_OF_OPTIMIZER = re.compile(
    r"(?P<before>(?:optim(?:izer)?\.)?(?:state|param_groups|distributed)\.)(?P<rest>.+)", re.DOTALL
)
_ADAPTIVE = ("exp_avg", "exp_avg_sq", "momentum_buffer", "exp_inf", "square_avg", "acc_delta")
_KINDS = {*_ADAPTIVE, "max_exp_avg_sq", "param", "fp32_param", "step"}
"""What PyTorch's optimizers, and Megatron's distributed one, keep of a weight; no model has the first ones."""


USUAL_STATES = frozenset({
    "accum", "accu_grads", "adam_m", "adam_v", "exp_avg", "exp_avg_sq", "main_param", "moment1", "moment2", "moments",
    "momentum", "optim", "optimizer", "square_avg", "state",
})  # fmt: skip
"""First parts of the names of optimizer states, as MindSpore, PyTorch and Megatron call them."""


class State(NamedTuple):
    """What the name of an optimizer state consists of: what stands before and behind the name of its weight.

    Attributes:
        weight: the name of the weight.
        before: what stands before it.
        behind: what stands behind it.
        outer: what the weight's own name begins with, and the state's leaves out.
    """

    weight: str
    before: str
    behind: str = ""
    outer: str = ""

    @property
    def kind(self) -> str:
        """What it is of whichever weight: what is in the name besides."""
        return f"{self.before.rstrip('.')}{self.behind}"

    def of(self, weight: str) -> str:
        """Return the name of the state of a weight that has another name: without the word in front that it leaves out.

        >>> state = State("model.a.w", "optim.state.", ".step", "model.")
        >>> state.of("model.b.w"), state.of("net.a.w"), state.of("c.w")
        ('optim.state.b.w.step', 'optim.state.a.w.step', 'optim.state.c.w.step')
        """
        own = self.weight.removeprefix(self.outer)
        if not self.outer or weight.partition(".")[2] != own:
            own = weight.removeprefix(self.outer)
        return f"{self.before}{own}{self.behind}"


def optimizer_states(known: Collection[str]) -> dict[str, State]:
    """Return those of some names that are of optimizer states, and what each consists of.

    In distributed checkpoints of PyTorch they are what the state of an optimizer is flattened to: `optim.state.`, or
    `state.` alone (torchtitan), the name of a weight without the prefix of the model, and what is kept of it; or
    `optimizer.state.`, what is kept, and the name (Megatron). Elsewhere a name is a prefix and a weight's name; all of
    `accu_grads.*` are such. A prefix of the optimizer stands before weights' names: `backbone.fc` is not a state of
    `fc` if most of what else is in `backbone` is none of a weight.

    >>> names = ["fc", "conv", "adam_m.fc", "adam_m.conv", "backbone.fc", "backbone.conv1", "backbone.conv2"]
    >>> {name: state.weight for name, state in optimizer_states(names).items()}
    {'adam_m.fc': 'fc', 'adam_m.conv': 'conv'}
    >>> names = ["model.w", "optim.state.w.exp_avg", "state.model.w.step", "optimizer.state.exp_avg.model.w", "state.p"]
    >>> for state in optimizer_states(names).values():
    ...     print(state.weight, state.kind)
    model.w optim.state.exp_avg
    model.w state.step
    model.w optimizer.state.exp_avg
    """
    every: Counter[str] = Counter()
    found: dict[str, State] = {}
    candidates: dict[str, list[tuple[str, str]]] = {}
    for name in known:
        if (state := _of_optimizer(name, known)) is not None:
            found[name] = state
            continue
        for prefix, rest in _splits(name):
            every[prefix] += 1
            if rest in known or prefix == _ACCUMULATED:
                candidates.setdefault(name, []).append((prefix, rest))
    before_weight = Counter(prefix for some in candidates.values() for prefix, _ in some)
    return found | {
        name: State(rest, f"{prefix}.")
        for name, some in candidates.items()
        for prefix, rest in reversed(some)  # the longest name counts
        if 2 * before_weight[prefix] >= every[prefix]
    }


def _of_optimizer(name: str, known: Collection[str]) -> State | None:
    """Return what the name of a state in a distributed checkpoint consists of; None of any other name."""
    match = _OF_OPTIMIZER.fullmatch(name)
    if match is None:
        return None
    before, rest = match["before"], match["rest"]
    weight, _, kind = rest.rpartition(".")
    for outer in ("", _MODEL):
        if outer + weight in known:
            return State(outer + weight, before, f".{kind}", outer)
    is_sure = before.startswith("optim")
    first, _, others = rest.partition(".")
    if is_sure and first in _KINDS and others:
        return State(others, f"{before}{first}.")
    if is_sure or any(f"{before}{weight}.{one}" in known for one in _ADAPTIVE):
        return State(weight, before, f".{kind}") if weight else State(rest, before)
    return None


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """Yield what stands before and behind each of the first dots of a name; no optimizer's prefix has more."""
    dot = name.find(".")
    for _ in range(4):
        if dot < 0:
            return
        yield name[:dot], name[dot + 1 :]
        dot = name.find(".", dot + 1)


def is_training_state(name: str, tensor: Tensor | None) -> bool:
    """Return whether a tensor is neither weight nor state of one: text, and single numbers of well-known names."""
    if tensor is None:
        return False
    return tensor.text is not None or is_step(name, tensor.spec.shape)


def is_step(name: str, shape: Shape) -> bool:
    """Return whether it is a single number of a well-known name, such as `global_step`."""
    return prod(shape) == 1 and name.rpartition(".")[2] in TRAINING_STATE


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


def matching(pattern: str, every: Collection[str]) -> list[str]:
    """Return those of some names that a pattern means: the name that it is, else all that it matches as a glob.

    >>> matching("layers.*", ["layers.0.w", "layers.1.w", "norm"]), matching("w[0]", ["w[0]", "w0"])
    (['layers.0.w', 'layers.1.w'], ['w[0]'])
    """
    return [pattern] if pattern in every else [name for name in every if fnmatchcase(name, pattern)]


_MOST_ALIKE, _LONGEST_ALIKE = 1000, 300  # names that are compared with one that is not there, which is slow
_NUMBER = re.compile(r"\d+")
_OTHER_STARS = re.compile(r"(?:\\d|\[0-9\]|\.)[*+]|\\d")  # what regular expressions have for them
_OTHER_SIGNS = re.compile(r"[\\^$()]")
_OF_EXPRESSION = re.compile(r"[\\^$()|+]|^\.\*")  # what no glob of names has


def no_match(pattern: str, every: Collection[str]) -> str:
    r"""Return what to say of a pattern that matches no name: the nearest name, with stars for numbers.

    >>> no_match("layer.0.wq", ["layers.0.wq", "layers.1.wq", "norm"])
    "matches no tensor; nearest is 'layers.*.wq'"
    >>> no_match("layer.*.wq", ["layers.0.wq", "layers.1.wq", "norm"])
    "matches no tensor; nearest is 'layers.*.wq'"
    >>> no_match(r"layers\.(\d+)\.w", ["layers.0.wq", "layers.1.wq", "norm"])
    "matches no tensor; nearest is 'layers.*.wq'; * stands for any text, regular expressions are not known"
    """
    plain = _OTHER_SIGNS.sub("", _OTHER_STARS.sub("*", pattern))
    starred = dict.fromkeys(_NUMBER.sub("*", name) for name in every if len(name) <= _LONGEST_ALIKE)
    alike = get_close_matches(_NUMBER.sub("*", plain), islice(starred, _MOST_ALIKE), n=1, cutoff=0.4)
    what = f"nearest is {alike[0]!r}" if alike else f"there are {names(every)}"
    hint = "; * stands for any text, regular expressions are not known" if _OF_EXPRESSION.search(pattern) else ""
    return f"matches no tensor; {what}{hint}"


_INTEGER = re.compile(r"([0-9]{1,18})")  # longer runs of digits are cut, because int() of a huge one is slow
_MOST_NUMBERS = 16  # of a name; the work grows with their square
_MOST_RUNS = 8

KindT = TypeVar("KindT", bound="Hashable")


def natural(name: str) -> tuple[str | int, ...]:
    """Return what a name is sorted by, numbers in it by their value.

    >>> sorted(["h.10.w", "h.9.w", "h"], key=natural)
    ['h', 'h.9.w', 'h.10.w']
    """
    return tuple(int(part) if number % 2 else part for number, part in enumerate(_INTEGER.split(name)))


def ranges_text(numbers: Iterable[int | str], *, most: int = _MOST_RUNS) -> str:
    """Write ascending integers as runs, the first few of many.

    >>> ranges_text([0, 1, 2, 5, 7, 8]), ranges_text(["08", "09", "10"]), ranges_text(range(0, 40, 2))
    ('0-2,5,7-8', '08-10', '0,2,4,6,8,10,12,14,...')
    """
    runs: list[tuple[int | str, int | str]] = []
    for number in numbers:
        if runs and int(number) == int(runs[-1][1]) + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in runs[:most]]
    return ",".join([*shown, "..."] if len(runs) > most else shown)


def ranks_text(ranks: Iterable[int]) -> str:
    """Write ranks for a message, as runs.

    >>> ranks_text([4]), ranks_text({6, 4, 5, 9})
    ('rank 4', 'ranks 4-6,9')
    """
    distinct = sorted(set(ranks))
    return f"rank{'s' * (len(distinct) != 1)} {ranges_text(distinct)}"


def group_names(items: Iterable[tuple[str, KindT]]) -> list[tuple[str, KindT, int]]:
    """Fold names that differ in nothing but integers, where everything else about them (their kind) is equal.

    Args:
        items: names, each with its kind.

    Returns:
        for each folded name, its kind and how many names it stands for, in order of first appearance. A row with
        several ranges stands for all their combinations, so that nothing is shown that is not there.

    >>> names = [f"h.{i}.{w}" for i in range(3) for w in ("wq", "wk")] + ["h.7.wq", "ln"]
    >>> group_names((name, None) for name in names)
    [('h.{0-2,7}.wq', None, 4), ('h.{0-2}.wk', None, 3), ('ln', None, 1)]
    """
    return [(name, kind, len(members)) for name, kind, members in group_members(items)]


def group_members(items: Iterable[tuple[str, KindT]]) -> list[tuple[str, KindT, list[str]]]:
    """Fold names, and return with each folded one and its kind the names that it stands for.

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
    """Join points of a lattice into boxes, axis after axis from the last; each point is in exactly one."""
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
