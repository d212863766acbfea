"""Checkpoints with quantized weights, as checkpoints with plain weights.

A quantized weight `X.weight` has its scales in `X.weight_scale_inv` (DeepSeek-V3), `X.scale` (DeepSeek-V4),
`X.weight_scale` (compressed-tensors, Model Optimizer, Quark, FBGEMM) or `X.qscale_weight` (Mistral). The size of blocks
is in the `quantization_config` of the model's `config.json`; without it, the shapes of the scales tell common sizes
apart, and so they do for one scale for each row, or for the tensor. Scales, also those of activations, are not tensors
of the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.layout.block import shape_text
from reshard.core.model.facts import Computation
from reshard.dtypes import E8M0, by_name
from reshard.errors import Faults, Option, SourceError, Text, UsageError, names
from reshard.expressions.computed import computed
from reshard.expressions.model_config import (
    QUANTIZATION,
    config_path,
    quantizations,
    read_config,
    written_config,
)
from reshard.expressions.operand import Operand
from reshard.expressions.quantized.methods import DEQUANTIZED, OTHER_PROGRAM, without_method
from reshard.expressions.quantized.scaled import FLOAT8, PACKED, SCALES, ScaledBlocks, scales_shape

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from reshard.core.model.checkpoint import Checkpoint, TensorSpec
    from reshard.core.model.facts import Quantized
    from reshard.dtypes import DType

RESULTS = ("bfloat16", "float16", "float32")
"""The dtypes of dequantized weights."""

_SUFFIXES = (("", "_scale_inv"), (".weight", ".scale"), ("", "_scale"), (".weight", ".qscale_weight"))
"""The suffix of a weight's name, and the suffix of its scales' name."""

_BESIDE = {
    "activation_scale", "input_scale", "input_scale_ub", "input_zero_point", "input_global_scale", "output_scale",
    "qscale_act", "weight_zero_point",
}  # fmt: skip
"""The last parts of the names of other tensors of a quantized module."""

_OF_CACHES = {"k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "prob_output_scale", *_BESIDE}
"""The last parts of the names of single numbers that belong to no weight, such as those of caches."""

_BLOCKS = ((128, 128), (1, 32))
"""The sizes of blocks that shapes tell apart."""

_PACKED_BLOCK = (1, 32)


class _Quantization(NamedTuple):
    """The part of the model's configuration that describes quantized weights.

    Attributes:
        block: the size of a block; None if it is not given.
        content: the file without its quantization; empty if there is no file.
    """

    block: tuple[int, int] | None = None
    content: bytes = b""


def result_dtype(name: str) -> DType:
    """Return the dtype of dequantized weights.

    Raises:
        UsageError: weights are not dequantized to it.

    >>> str(result_dtype("bf16"))
    'bfloat16'
    """
    dtype = by_name(name, UsageError, RESULTS)
    if dtype.name not in RESULTS:
        raise UsageError(
            f"weights are not dequantized to {dtype}", code="unsupported-dtype", facts=[f"expected {names(RESULTS)}"]
        )
    return dtype


def dequantize(source: Checkpoint, dtype: str = "bfloat16") -> Checkpoint:
    """Return a checkpoint with quantized weights multiplied by their scales, computed when they are read.

    Args:
        source: the checkpoint, in its own names.
        dtype: the dtype of dequantized weights.

    Raises:
        SourceError: a weight has no scales, or not one for each block; nothing is quantized, or not in blocks of float8
            or packed E2M1 values; all faults at once.
        UsageError: weights are not dequantized to this dtype, or rules or an adapter were applied before.
    """
    target = result_dtype(dtype)
    source.require_whole()
    if source.origin is not None:
        raise UsageError(
            f"rules or an adapter were already applied to {source.root}", code="already-derived",
            hint="dequantize first",
        )  # fmt: skip
    quantized = source.opening.quantized
    if quantized is not None and quantized.method not in DEQUANTIZED:
        raise _unsupported(source, quantized)
    config = _config_of(source, target)
    faults = Faults(source.root)
    expressions, scales = {}, set()
    for name, scale in _pairs(source, faults):
        expression = _expression(Operand(source, name), Operand(source, scale), config.block, target, faults)
        scales.add(scale)
        if expression is not None:
            expressions[name] = expression
    faults.raise_if_any(SourceError)
    if not expressions and quantized is not None and quantized.problem:
        raise _unsupported(source, quantized)
    if not expressions:
        raise SourceError(
            f"{source.root} has no quantized weight", code="not-quantized",
            facts=["expected float8 or packed weights, with scales named X.weight_scale_inv or X.scale"],
            hint=Text("if its weights are plain already, leave ", Option("dequantize"), " out"),
        )  # fmt: skip
    result = without_method(computed(source, expressions).without({*scales, *_leftovers(source, expressions)}))
    opening = replace(result.opening, computation=Computation("dequantize", {"dtype": target.name}, (source,)))
    extras = replace(result.extras, model_config=config.content)
    if extras.arrangement is not None and any(expression.packed for expression in expressions.values()):
        extras = replace(extras, arrangement=None)  # it has the shapes of packed weights
    return replace(result, opening=opening, extras=extras)


def _unsupported(source: Checkpoint, quantized: Quantized) -> SourceError:
    """Return the error for a method that is not dequantized."""
    return SourceError(
        f"{source.root} cannot be dequantized: {quantized.problem}", code="unsupported-quantization", hint=OTHER_PROGRAM
    )


def _leftovers(source: Checkpoint, weights: Collection[str]) -> Iterator[str]:
    """Yield the names of tensors that belong to the quantization, and are no scales of weights."""
    modules = {name.removesuffix("weight") for name in weights} | {f"{name}_" for name in weights}
    for name, tensor in source.tensors.items():
        for word in {name.rpartition(".")[2], *(each for each in _BESIDE if name.endswith(f"_{each}"))}:
            is_of_module = word in _BESIDE and name.removesuffix(word) in modules
            if is_of_module or (word in _OF_CACHES and prod(tensor.spec.shape) == 1):
                yield name


def dequantize_each(sources: Sequence[Checkpoint], dtype: str) -> list[Checkpoint]:
    """Dequantize the checkpoints that have quantized weights; return all of them.

    Raises:
        SourceError, UsageError: as for `dequantize`, or no checkpoint has quantized weights.
    """
    result, plain = [], []
    for source in sources:
        try:
            result.append(dequantize(source, dtype))
        except SourceError as error:
            if error.code != "not-quantized":
                raise
            result.append(source)
            plain.append(error)
    if plain and len(plain) == len(sources):
        raise plain[0]
    return result


def _pairs(source: Checkpoint, faults: Faults) -> Iterator[tuple[str, str]]:
    """Yield the quantized weights with the names of their scales; add a fault for each weight without scales."""
    of_weights = set()
    for name, tensor in source.tensors.items():
        dtype = tensor.spec.dtype.name
        candidates = _scale_names(name)
        scale = next((each for each in candidates if each in source.tensors), None)
        if scale is not None and (dtype in FLOAT8 or (dtype in PACKED and _is_e8m0(source, scale))):
            of_weights.add(scale)
            yield name, scale
        elif scale is not None and dtype in PACKED:
            fault = f"is {dtype} with scales in {source.tensors[scale].spec.dtype}; expected {E8M0}"
            faults.add(f"tensor {name!r}", fault, code="unsupported-dtype", hint=OTHER_PROGRAM)
            of_weights.add(scale)
        elif dtype.startswith("float8") and dtype != E8M0 and not _is_of_scales(source, name):
            absent = [each for each in candidates if each in source.left_out or each in source.unreadable]
            fault = f"is {dtype} and has no scales; expected {' or '.join(candidates)}"
            hint = f"{names(absent)} was left out: choose tensors afterwards" if absent else ""
            faults.add(f"tensor {name!r}", fault, code="missing-scale", hint=hint)
    for name in source.tensors:
        weight = name.removesuffix(_SUFFIXES[0][1])
        if weight != name and name not in of_weights:
            kind = f"is {source.tensors[weight].spec.dtype}" if weight in source.tensors else "is not in the checkpoint"
            faults.add(f"tensor {name!r}", f"has scales of {weight!r}, which {kind}", code="unused-scale")


def _is_of_scales(source: Checkpoint, name: str) -> bool:
    """Return whether a tensor has the scales of another one."""
    stems = [name.removesuffix(scales) + end for end, scales in _SUFFIXES if name.endswith(scales)]
    return any(stem in source.all_names or stem in source.left_out for stem in stems) or name.endswith("_scale")


def _is_e8m0(source: Checkpoint, name: str) -> bool:
    return source.tensors[name].spec.dtype.name == E8M0


def _scale_names(name: str) -> list[str]:
    """Return the names that the scales of a weight may have.

    >>> _scale_names("w.weight")
    ['w.weight_scale_inv', 'w.scale', 'w.weight_scale', 'w.qscale_weight']
    >>> _scale_names("experts")
    ['experts_scale_inv', 'experts_scale']
    """
    return [name.removesuffix(end) + scales for end, scales in _SUFFIXES if name.endswith(end)]


def _expression(
    values: Operand, scales: Operand, block: tuple[int, int] | None, dtype: DType, faults: Faults
) -> ScaledBlocks | None:
    """Return the expression of a weight, or None after adding a fault."""
    packed = values.spec.dtype.name in PACKED
    sizes = (_PACKED_BLOCK,) if packed else (block,) if block else _BLOCKS
    try:
        for operand in (values, scales):
            operand.require()
        size = _block_size(values.spec, scales.spec, sizes, packed=packed)
    except SourceError as error:
        faults.add(f"tensor {values.name!r}", error)
        return None
    return ScaledBlocks(values, scales, size, dtype, packed)


def _block_size(
    values: TensorSpec, scales: TensorSpec, sizes: Sequence[tuple[int, int]], *, packed: bool
) -> tuple[int, int]:
    """Return the one of several block sizes that fits the shape of a weight's scales.

    Raises:
        SourceError: no size fits, or the scales have an unsupported dtype.
    """
    if scales.dtype.name not in SCALES:
        raise SourceError(f"has scales in {scales.dtype}; expected {names(SCALES)}", code="unsupported-dtype")
    if len(values.shape) < 2:
        raise SourceError(f"has shape {shape_text(values.shape)}; expected rows and columns", code="wrong-shape")
    shape = (*values.shape[:-1], values.shape[-1] * (2 if packed else 1))
    expected = {size: scales_shape(shape, size) for size in sizes}
    one = (1,) * len(shape)
    stored = one if prod(scales.shape) == 1 else (*scales.shape, 1) if scales.shape == shape[:-1] else scales.shape
    if not packed and stored == (*shape[:-1], 1):
        return 1, max(shape[-1], 1)
    if not packed and stored == one:
        return max(shape[-2], 1), max(shape[-1], 1)
    for size in sizes:
        if expected[size] == scales.shape:  # a block is no larger than the weight, whatever the configuration says
            return min(size[0], max(shape[-2], 1)), min(size[1], max(shape[-1], 1))
    shapes = " or ".join(f"{shape_text(expected[size])} for blocks of {shape_text(size)}" for size in sizes)
    fault = f"has shape {shape_text(shape)} and scales of shape {shape_text(scales.shape)}; expected {shapes}"
    raise SourceError(fault, code="wrong-shape")


def _config_of(source: Checkpoint, dtype: DType) -> _Quantization:
    """Read the model's configuration, if there is one next to the files.

    Raises:
        SourceError: it cannot be read, or its quantization is not valid.
    """
    path = config_path(source)
    if not path.is_file():
        return _Quantization()
    content = read_config(path)
    block = None
    for key in QUANTIZATION:
        if not isinstance(content.get(key), Mapping | None):
            fault = f"{key} of {path} is a {type(content[key]).__name__}; expected a JSON object"
            raise SourceError(fault, code="wrong-type")
    for part in quantizations(content):
        block = _block_of(part, f"the quantization in {path}") or block
    return _Quantization(block, written_config(content, dtype))


def _block_of(quantization: Mapping[str, Any], subject: str) -> tuple[int, int] | None:
    """Return the size of blocks that a configuration gives, or None.

    Raises:
        SourceError: the description or the size is not valid.
    """
    size = quantization.get("weight_block_size") or _block_structure(quantization)
    if size is None:
        return None
    if not (isinstance(size, list) and len(size) == 2 and all(type(each) is int and each > 0 for each in size)):
        raise SourceError(f"{subject} has the weight_block_size {size!r:.60}; expected two numbers", code="bad-value")
    return size[0], size[1]


def _block_structure(quantization: Mapping[str, Any]) -> Any:
    """Return the size of blocks of the first group of compressed-tensors that has one, or None."""
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("block_structure") is not None:
            return weights["block_structure"]
    return None
