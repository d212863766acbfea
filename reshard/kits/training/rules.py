"""Compare rules with what Megatron-LM's files state of the training, and with the shapes of Megatron's tensors.

Shapes alone do not show where the rows of a fused tensor belong: sixteen rows may be two heads or four. So each number
by which a rule cuts a tensor of Megatron is compared with the arguments, and a disagreement is a fault. An argument
that is missing or None is unknown.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reshard.core.layout.block import shape_text
from reshard.errors import SourceError, UsageError
from reshard.kits.training.arguments import Arguments, shape_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.errors import Faults
    from reshard.rules.matching import Use
    from reshard.rules.rule import Rule
    from reshard.rules.rules import Rules

_OF_MODEL = re.compile(r"(?:embedding|decoder|output_layer)\.")
_IN_LAYER = re.compile(r"decoder\.layers\.(?:(\d{1,9})\.)?")
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
    try:
        arguments = Arguments.of(source.extras.arguments)
    except SourceError as error:
        faults.add(source.root, error)
        return
    for use in uses:
        if side == use.rule.fused_side:
            for name in use.sources:
                for fault, hint in _faults_of(source, rules, use.rule, name, arguments):
                    faults.add(f"tensor {name!r}", fault, code=_DIFFERENT, hint=hint, alike=fault)
    if source.extras.arguments:
        for fault in _faults_of_model(source, rules, uses, arguments):
            faults.add(source.root, fault, code=_DIFFERENT, alike=fault)


def _faults_of(
    source: Checkpoint, rules: Rules, rule: Rule, name: str, arguments: Arguments
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with how a rule cuts a tensor, and a hint."""
    shape = source.tensors[name].spec.shape
    if not shape:  # the step of a state, which no rule cuts
        return
    if ".linear_fc1." in name and len(rule.parts) == 2:
        yield from _faults_of_gate(source, rules, rule, name, arguments)
    elif ".linear_qkv." in name and rule.verb == "interleave":
        for fault in _faults_of_heads(rules, rule, arguments):
            yield fault, ""
    elif rule.verb == "pad" and name.endswith((_HEAD, _EMBEDDING)):
        size = _number(rules, rule.size)
        if size is not None and arguments.vocab_size is not None and arguments.vocab_size > size:
            yield f"has vocab_size {arguments.vocab_size} by args; {rule.key_path} keeps {size} rows", ""
    expected = shape_of(name, arguments.shapes()) if _OF_MODEL.match(name) else None
    if expected and any(size not in {None, extent} for size, extent in zip(expected[::-1], shape[::-1], strict=False)):
        text = ", ".join("?" if size is None else str(size) for size in expected)
        yield f"is {shape_text(shape)}; args say [{text}] for each layer", ""
    if ".experts.experts.linear_" in name and len(shape) > 2 and arguments.num_experts not in {None, shape[-3]}:
        yield f"has {shape[-3]} experts; args say num_experts {arguments.num_experts}", ""


def _faults_of_gate(
    source: Checkpoint, rules: Rules, rule: Rule, name: str, arguments: Arguments
) -> Iterator[tuple[str, str]]:
    """Yield why the first layer of an MLP is not a gate and an up projection as a rule cuts it."""
    second = source.tensors.get(name.replace(".linear_fc1.", ".linear_fc2."))
    rows = source.tensors[name].spec.shape[-2:][0]
    if second is not None and name.endswith("weight") and len(second.spec.shape) > 1:
        columns = second.spec.shape[-1]
        if rows == columns:
            yield f"has {rows} rows, and linear_fc2 {columns} columns: it is not a gate and an up projection", ""
            return
    if arguments.is_gated is False:
        yield f"is a gate and an up projection by {rule.key_path}; args say {arguments.gating}", ""
    argument = "moe_shared_expert_glu_interleave_size" if ".shared_experts." in name else "moe_mlp_glu_interleave_size"
    size = getattr(arguments, argument) if "experts." in name else None
    groups = _number(rules, rule.groups) if rule.verb == "interleave" else None
    if size and (rule.verb != "interleave" or groups is None or groups * 2 * size != rows):
        fault = f"has {size} rows of the gate and {size} of the up projection in turn by args ({argument}); "
        hint = f"in a copy of the rules, write interleave with groups: {max(rows // (2 * size), 1)} in place of concat"
        yield fault + f"{rule.key_path} cuts it otherwise", hint


def _faults_of_heads(rules: Rules, rule: Rule, arguments: Arguments) -> Iterator[str]:
    """Yield how the numbers of heads in a rule and in the arguments differ."""
    if arguments.rotary_interleaved:
        yield f"has rows in another order by args (rotary_interleaved True) than {rule.key_path} takes"
    groups, width, heads = arguments.groups, arguments.head_width, arguments.num_attention_heads
    sizes = [_number(rules, size) for size in rule.sizes or ()]
    ruled_groups = _number(rules, rule.groups)
    if groups and ruled_groups not in {None, groups}:
        yield f"has {groups} groups by args; {rule.key_path} takes {ruled_groups}"
    elif len(sizes) == 3:
        gates = 2 if arguments.attention_output_gate else 1  # each query has one
        queries = heads // groups * gates * sizes[1] if heads and groups and sizes[1] else None
        for size, expected, what in zip(sizes, (queries, width, width), ("queries", "keys", "values"), strict=True):
            if expected and size not in {None, expected}:
                yield f"has {expected} rows of {what} in each group by args; {rule.key_path} takes {size}"
                return


def _faults_of_model(source: Checkpoint, rules: Rules, uses: Sequence[Use], arguments: Arguments) -> Iterator[str]:
    """Yield how the tensors of the model and the arguments differ."""
    sources = [(name, use) for use in uses for name in use.sources]
    layers = {
        int(match[1]) + 1 if match[1] else source.tensors[name].spec.shape[0]
        for name, use in sources
        if (match := _IN_LAYER.match(name)) and (match[1] or use.rule.by) and source.tensors[name].spec.shape
    }
    if not source.left_out and layers and arguments.num_layers not in {None, max(layers)}:
        yield f"has {max(layers)} layers; args say num_layers {arguments.num_layers}"
    names = {*source.all_names}
    is_untied = arguments.untie_embeddings_and_output_weights
    if is_untied and _EMBEDDING in names and _HEAD not in names | source.left_out:
        yield f"lacks {_HEAD}; args say that it is not tied to the embedding"
    if is_untied is False and _HEAD in names:
        yield f"has {_HEAD}; args say that it is tied to the embedding"
    if arguments.mtp_num_layers and not source.left_out and not any(name.startswith("mtp.") for name in names):
        yield f"has no layer of mtp; args say mtp_num_layers {arguments.mtp_num_layers}"
    if arguments.apply_layernorm_1p and rules.is_built_in:
        norm = next((name for name, _ in sources if _NORM.search(name)), "")
        if norm:
            yield f"has norms less 1 by args (apply_layernorm_1p True), such as {norm}; {rules.root} adds nothing"


def _number(rules: Rules, expression: int | str | None) -> int | None:
    """Return the value of a number in a rule; None if it has none, which is reported elsewhere."""
    try:
        return None if expression is None else rules.numbers.value(expression)
    except UsageError:
        return None
