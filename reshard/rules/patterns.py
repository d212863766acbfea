"""Patterns for names of tensors, such as `model.layers.{layer}.mlp.experts.{e}.up_proj.weight`.

Tensors that are named after a weight follow its rule: optimizer states, and scales of quantised weights.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.layout.block import LONGEST_NAME
from reshard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from reshard.strategy.names import State

_PLACE = re.compile(r"\{([A-Za-z_]\w{0,40})\}|\*")

_NOT_APART = re.compile(r"[^.]\*|\*[^.]|\}\{")  # there would be many ways to match a name
_MOST_WORDS = 8

SCALES = ("_scale_inv", "_scale")
STEP = ".step"
_KINDS = "exp_avg|exp_avg_sq|max_exp_avg_sq|step|momentum_buffer|param|master_param|fp32_param|fp32"
_STATE = re.compile(
    rf"(?P<before>(?:optim(?:izer)?\.)?state\.(?:(?:{_KINDS})\.)?|(?:{_KINDS}|adam_[mv]|moments?|accu_grads|main_param"
    rf"|(?:muon|lamb|sgd)_\w+)\.|)(?P<weight>.+?)(?P<behind>\.(?:{_KINDS}))?",
    re.DOTALL,
)
"""The usual names of optimizer states, for states without their weight."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A name in which `{word}` matches a number and `*` one dotted part.

    A word has the same value everywhere in a rule. The pattern has to match the whole name.

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
        for placeholder in _PLACE.finditer(self.text):
            regex += re.escape(self.text[at : placeholder.start()])
            at = placeholder.end()
            if placeholder[1] is None:
                stars += 1
                words.append(f"*{stars}")
                regex += f"(?P<s_{stars}>[^.]+)"
            elif placeholder[1] in words:
                regex += f"(?P=w_{placeholder[1]})"
            else:
                words.append(placeholder[1])
                regex += f"(?P<w_{placeholder[1]}>0|[1-9][0-9]{{0,8}})"
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
        """Return the values of the words in a name, or None if it does not match."""
        match = self._regex.fullmatch(name)
        if match is None:
            return None
        return {word: match[f"s_{word[1:]}"] if word[0] == "*" else int(match[f"w_{word}"]) for word in self.words}

    def write(self, bound: Mapping[str, int | str]) -> str:
        """Return the name with these values of the words."""
        stars = iter(range(1, len(self.words) + 1))
        return _PLACE.sub(lambda placeholder: str(bound[placeholder[1] or f"*{next(stars)}"]), self.text)


class Family(NamedTuple):
    """A prefix and a suffix around the names of weights; both are empty for weights.

    Optimizer states and scales have such names.

    Attributes:
        prefix: the text before the name of the weight.
        suffix: the text behind it.
        outer: the beginning of the weights' own names that this family omits in the source.
        new_outer: the same among the names that rules make.

    >>> Family("optim.state.", ".exp_avg").of("w"), Family("adam_m.", "").of("w")
    ('optim.state.w.exp_avg', 'adam_m.w')
    """

    prefix: str = ""
    suffix: str = ""
    outer: str = ""
    new_outer: str = ""

    def of(self, weight: str) -> str:
        """Return the name that rules make of a weight's tensor in this family."""
        return f"{self.prefix}{weight.removeprefix(self.new_outer)}{self.suffix}"

    def source_name(self, weight: str) -> str:
        """Return the name of a weight's tensor in this family in the source."""
        return f"{self.prefix}{weight.removeprefix(self.outer)}{self.suffix}"

    @property
    def is_step(self) -> bool:
        """Return whether its tensors count steps."""
        return self.suffix == STEP or f".{self.prefix}".removesuffix(".").endswith(STEP)


def families(name: str, states: Mapping[str, State]) -> Iterator[tuple[Family, str]]:
    """Yield the possible families of a name: weight, scale or optimizer state.

    Args:
        name: the name of a tensor.
        states: the optimizer states of the checkpoint (`strategy.names.optimizer_states`).

    >>> [weight for _, weight in families("adam_m.w", {})], [weight for _, weight in families("backbone.w", {})]
    (['adam_m.w', 'w'], ['backbone.w'])
    """
    yield Family(), name
    for scale in SCALES:
        if name.endswith(scale):
            yield Family("", scale), name.removesuffix(scale)
    state = states.get(name)
    if state is not None and (
        state.prefix.count(".") == 1 or state.prefix.startswith(("opt_state.", "optim", "state."))
    ):
        inner = state.weight.removeprefix(state.outer)
        for weight in dict.fromkeys((inner, state.weight)):
            yield Family(state.prefix, state.suffix, "" if weight == inner else state.outer), weight
    elif (match := _STATE.fullmatch(name)) and match["weight"] != name:  # a state without its weight
        yield Family(match["before"], match["behind"] or ""), match["weight"]
