"""Compare rules with what Megatron-LM's files state of the training.

Shapes alone do not show where the rows of a fused tensor belong: sixteen rows may be two heads or four. So each number
by which a rule cuts a tensor of Megatron is compared with the arguments, and a disagreement is a fault. An argument
that is missing or None is unknown.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reshard.errors import UsageError
from reshard.kits.training.arguments import Arguments

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.errors import Faults
    from reshard.rules.matching import Use
    from reshard.rules.rule import Rule
    from reshard.rules.rules import Rules

_NORM = re.compile(r"layer_?norm[._]weight\Z|layernorm\.weight\Z")
_HEAD, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
_DIFFERENT = "files-disagree"


def check_arguments(source: Checkpoint, rules: Rules, side: int, uses: Sequence[Use], faults: Faults) -> None:
    """Add a fault for each number of the rules that the source contradicts.

    Args:
        source: the checkpoint.
        rules: the rules.
        side: the side of the checkpoint.
        uses: the applications of the rules.
        faults: collects the faults.
    """
    check = _Check(source, rules, Arguments.of(source.extras.arguments))
    for use in uses:
        for name in use.sources if side == use.rule.fused_side else ():
            if source.tensors[name].spec.shape:  # no rule cuts the step of a state
                for fault, hint in check.tensor(use.rule, name):
                    faults.add(f"tensor {name!r}", fault, code=_DIFFERENT, hint=hint, alike=fault)
    if source.extras.arguments:
        for fault in check.model(uses):
            faults.add(source.root, fault, code=_DIFFERENT, alike=fault)


class _Check:
    """Compares a checkpoint and rules with arguments; each method yields what is wrong."""

    def __init__(self, source: Checkpoint, rules: Rules, arguments: Arguments) -> None:
        self._source, self._rules, self._arguments = source, rules, arguments

    def tensor(self, rule: Rule, name: str) -> Iterator[tuple[str, str]]:
        """Yield what is wrong with how a rule cuts a tensor, and a hint."""
        if ".linear_fc1." in name and len(rule.parts) == 2:
            yield from self._gate(rule, name)
        elif ".linear_qkv." in name and rule.verb == "interleave":
            for fault in self._heads(rule):
                yield fault, ""
        elif rule.verb == "pad" and name.endswith((_HEAD, _EMBEDDING)):
            size, vocabulary = self._number(rule.size), self._arguments["vocab_size"]
            if size is not None and vocabulary is not None and vocabulary > size:
                yield f"has vocab_size {vocabulary} by args; {rule.key_path} keeps {size} rows", ""

    def _gate(self, rule: Rule, name: str) -> Iterator[tuple[str, str]]:
        """Yield why the first layer of an MLP is not a gate and an up projection as a rule cuts it."""
        second = self._source.tensors.get(name.replace(".linear_fc1.", ".linear_fc2."))
        rows = self._source.tensors[name].spec.shape[-2:][0]
        if second is not None and name.endswith("weight") and second.spec.shape[-1:] == (rows,):
            yield f"has {rows} rows, as linear_fc2 has columns: it is not a gate and an up projection", ""
            return
        if self._arguments.is_gated is False:
            yield f"is a gate and an up projection by {rule.key_path}; args say swiglu False", ""
        module = "moe_shared_expert" if ".shared_experts." in name else "moe_mlp"
        argument = f"{module}_glu_interleave_size"
        size = self._arguments[argument] if "experts." in name else None
        groups = self._number(rule.groups) if rule.verb == "interleave" else None
        if size and (groups or 0) * 2 * size != rows:
            fault = f"has {size} rows of the gate and {size} of the up projection in turn by args ({argument})"
            count = max(rows // (2 * size), 1)
            hint = f"in a copy of the rules, write interleave with groups: {count} in place of concat"
            yield f"{fault}; {rule.key_path} cuts it otherwise", hint

    def _heads(self, rule: Rule) -> Iterator[str]:
        """Yield how the numbers of heads in a rule and in the arguments differ."""
        arguments = self._arguments
        if arguments["rotary_interleaved"]:
            yield f"has rows in another order by args (rotary_interleaved True) than {rule.key_path} takes"
        groups, width, heads = arguments.groups, arguments.head_width, arguments["num_attention_heads"]
        sizes = [self._number(size) for size in rule.sizes or ()]
        ruled_groups = self._number(rule.groups)
        if groups and ruled_groups not in {None, groups}:
            yield f"has {groups} groups by args; {rule.key_path} takes {ruled_groups}"
        elif len(sizes) == 3:
            gates = 2 if arguments["attention_output_gate"] else 1  # each query has one
            queries = heads // groups * gates * sizes[1] if heads and groups and sizes[1] else None
            for size, expected, what in zip(sizes, (queries, width, width), ("queries", "keys", "values"), strict=True):
                if expected and size not in {None, expected}:
                    yield f"has {expected} rows of {what} in each group by args; {rule.key_path} takes {size}"
                    return

    def model(self, uses: Sequence[Use]) -> Iterator[str]:
        """Yield what would be missing or wrong in the result, though each tensor is cut as the rules say."""
        names = {*self._source.all_names, *self._source.left_out}
        if self._arguments["untie_embeddings_and_output_weights"] and _EMBEDDING in names and _HEAD not in names:
            yield f"lacks {_HEAD}; args say that it is not tied to the embedding"
        norm = next((name for use in uses for name in use.sources if _NORM.search(name)), "")
        if norm and self._arguments["apply_layernorm_1p"] and self._rules.is_built_in:
            yield f"has norms less 1 by args (apply_layernorm_1p True), such as {norm}; {self._rules.root} adds nothing"

    def _number(self, expression: int | str | None) -> int | None:
        """Return the value of a number in a rule; None if it has none, which is reported elsewhere."""
        try:
            return None if expression is None else self._rules.numbers.value(expression)
        except UsageError:
            return None
