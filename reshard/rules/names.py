"""Names of tensors with numbers that a rule binds, such as `model.layers.{layer}.mlp.experts.{e}.up_proj.weight`.

What is named after a weight follows its rule: states of the optimizer, and scales of quantised weights.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import UsageError
from reshard.layout.block import LONGEST_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from reshard.strategy.names import State

_PLACE = re.compile(r"\{([A-Za-z_]\w{0,40})\}|\*")

_NOT_APART = re.compile(r"[^.]\*|\*[^.]|\}\{")  # there would be many ways to match a name
_MOST_WORDS = 8

SCALES = ("_scale_inv", "_scale")
STEP = ".step"
_KINDS = "exp_avg|exp_avg_sq|max_exp_avg_sq|step|momentum_buffer|param|master_param|fp32_param"
_STATE = re.compile(
    rf"(?P<before>(?:optim(?:izer)?\.)?state\.(?:(?:{_KINDS})\.)?|(?:{_KINDS}|adam_[mv]|moments?|accu_grads|main_param"
    rf"|(?:muon|lamb|sgd)_\w+)\.|)(?P<weight>.+?)(?P<behind>\.(?:{_KINDS}))?",
    re.DOTALL,
)
"""The names of states of which no weight is there, by what optimizers call them."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A name in which `{word}` stands for a number, the same wherever the rule has it, and `*` for one dotted part.

    It is anchored at both ends.

    >>> pattern = Pattern("layers.{l}.*.weight")
    >>> pattern.match("layers.12.wq.weight"), pattern.match("layers.x.wq.weight"), pattern.match("layers.1.a.b.weight")
    ({'l': 12, '*1': 'wq'}, None, None)
    >>> pattern.write({"l": 3, "*1": "wk"})
    'layers.3.wk.weight'
    """

    text: str
    words: tuple[str, ...] = field(init=False, compare=False)
    _regex: re.Pattern[str] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.text or len(self.text) > LONGEST_NAME:
            problem = f"has {len(self.text)} letters; expected {LONGEST_NAME} at most" if self.text else "is empty"
            raise UsageError(problem, code="bad-name")
        words: list[str] = []
        regex = ""
        at = stars = 0
        for place in _PLACE.finditer(self.text):
            regex += re.escape(self.text[at : place.start()])
            at = place.end()
            if place[1] is None:
                stars += 1
                words.append(f"*{stars}")
                regex += f"(?P<s_{stars}>[^.]+)"
            elif place[1] in words:
                regex += f"(?P=w_{place[1]})"
            else:
                words.append(place[1])
                regex += f"(?P<w_{place[1]}>0|[1-9][0-9]{{0,8}})"
        if _NOT_APART.search(self.text) or len(words) > _MOST_WORDS:
            raise UsageError(
                f"has a star inside a dotted part, adjacent words, or more than {_MOST_WORDS} words", code="bad-pattern"
            )
        rest = self.text[at:]
        if "{" in rest or "}" in rest or "{" in _PLACE.sub("", self.text):
            raise UsageError("has a stray brace", code="bad-pattern", hint="put words in braces, such as {layer}")
        object.__setattr__(self, "words", tuple(words))
        object.__setattr__(self, "_regex", re.compile(regex + re.escape(rest), re.DOTALL))

    def match(self, name: str) -> dict[str, int | str] | None:
        """Return what the words stand for in a name, or None if it does not match."""
        match = self._regex.fullmatch(name)
        if match is None:
            return None
        return {word: match[f"s_{word[1:]}"] if word[0] == "*" else int(match[f"w_{word}"]) for word in self.words}

    def write(self, bound: Mapping[str, int | str]) -> str:
        """Return the name in which the words stand for these."""
        stars = iter(range(1, len(self.words) + 1))
        return _PLACE.sub(lambda place: str(bound[place[1] or f"*{next(stars)}"]), self.text)


class Family(NamedTuple):
    """What stands around the names of weights: that of the weights themselves, or of one of their states.

    >>> Family("optim.state.", ".exp_avg").of("w"), Family("adam_m.", "").of("w")
    ('optim.state.w.exp_avg', 'adam_m.w')
    """

    prefix: str = ""
    suffix: str = ""
    outer: str = ""

    def of(self, weight: str) -> str:
        """Return the name of what belongs to a weight: without the word in front that it leaves out (`outer`)."""
        return f"{self.prefix}{weight.removeprefix(self.outer)}{self.suffix}"


def families(name: str, states: Mapping[str, State]) -> Iterator[tuple[Family, str]]:
    """Yield what a name can be: a weight; else a scale of one, or a state of the optimizer.

    Args:
        name: of a tensor.
        states: those names of the checkpoint that are of states, as `strategy.names.optimizer_states` tells them.

    >>> [weight for _, weight in families("adam_m.w", {})], [weight for _, weight in families("backbone.w", {})]
    (['adam_m.w', 'w'], ['backbone.w'])
    """
    yield Family(), name
    for scale in SCALES:
        if name.endswith(scale):
            yield Family("", scale), name.removesuffix(scale)
    state = states.get(name)
    if state is not None and (state.before.count(".") == 1 or state.before.startswith(("optim", "state."))):
        inner = state.weight.removeprefix(state.outer)
        for weight in dict.fromkeys((inner, state.weight)):
            yield Family(state.before, state.behind, "" if weight == inner else state.outer), weight
    elif (found := _STATE.fullmatch(name)) and found["weight"] != name:  # whose weight is not there
        yield Family(found["before"], found["behind"] or ""), found["weight"]
