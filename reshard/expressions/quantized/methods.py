"""Find out how the weights of a checkpoint are quantized.

Files next to the tensors say it: `quantization_config` of `config.json`, also in a part such as `text_config`, or a
file of another program. Without one, the names that a method gives its tensors show it. No file is read if no tensor
has a dtype of codes.

Sources: the quantizers of transformers 5, compressed-tensors 0.20, and the sets that AutoGPTQ, AutoAWQ, bitsandbytes,
HQQ, EETQ, quanto, TensorRT Model Optimizer, Quark, FBGEMM, gpt-oss, DeepSeek and Mistral publish.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

from reshard.core.model.facts import Quantized
from reshard.dtypes import E8M0
from reshard.errors import Faults, Option, SourceError, Text, UsageError, names
from reshard.expressions.model_config import config_path, quantizations, read_config
from reshard.kits.indexes import MODEL_CONFIG

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from reshard.core.model.checkpoint import Checkpoint, TensorSpec
    from reshard.core.model.entries import Entry
    from reshard.dtypes import DType

P = ParamSpec("P")

_SCALES = "scales"

DEQUANTIZED = {"fp8", "fbgemm_fp8", "compressed-tensors", "modelopt", "quark", "mistral", _SCALES}
"""The methods whose weights may be float8 with scales."""

OTHER_PROGRAM = "dequantize it with the program that made it"
"""The hint for weights that are not dequantized here."""

_INTEGERS = {"int4", "int8", "uint8", "int16", "uint16", "int32", "uint32"}

_FILES = {
    MODEL_CONFIG: "", "hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq",
    "params.json": "mistral",
}  # fmt: skip
"""The files that say it, and the method of each if it does not say that itself."""

_SETTINGS = (
    "format", "quant_algo", "bits", "w_bit", "nbits", "weights", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type",
    "group_size", "q_group_size", "weight_block_size", "fmt", "qformat_weight", "activation_scheme",
)  # fmt: skip


class _Rule(NamedTuple):
    """The names of a method: the end of a name of codes, and the ends of the others, which replace it."""

    method: str
    codes: str
    others: tuple[str, ...]


_RULES = (
    _Rule("compressed-tensors", "weight_packed", ("weight_scale",)),
    _Rule("gptq", "qweight", ("qzeros", "scales", "g_idx")),
    _Rule("awq", "qweight", ("qzeros", "scales")),
    _Rule("gptq", "qweight", ("scales",)),
    _Rule("eetq", "qweight", ("weight_scales",)),
    _Rule("aqlm", "codes", ("codebooks",)),
    _Rule("bitsandbytes", "weight", ("weight.absmax", "weight.quant_map")),
    _Rule("bitsandbytes", "weight", ("SCB",)),
    _Rule("hqq", "W_q", ("scale",)),
    _Rule("modelopt", "weight", ("weight_scale", "weight_scale_2")),
    _Rule("eetq", "weight", ("weight_scales",)),
    _Rule("quanto", "_data", ("_scale",)),
    _Rule("torchao", "_weight_qdata", ("_weight_scale",)),
    _Rule("mistral", "weight", ("qscale_weight",)),
    _Rule("fp8", "weight", ("weight_scale_inv",)),
    _Rule(_SCALES, "weight", ("weight_scale",)),
    _Rule(_SCALES, "weight", ("scale",)),
)
_BY_WORD = {rule.codes: tuple(each for each in _RULES if each.codes == rule.codes) for rule in _RULES}
_OF_ANY_NAME = (
    _Rule("mxfp4", "_blocks", ("_scales",)),
    _Rule("fp8", "", ("_scale_inv",)),
    _Rule(_SCALES, "", ("_scale",)),
)


class _Match(NamedTuple):
    """A tensor of codes, its method, and the names of its scales and the like."""

    name: str
    method: str
    others: tuple[str, ...]


def is_code(dtype: DType) -> bool:
    """Return whether tensors of a dtype may be codes, which mean nothing without scales."""
    return dtype.name in _INTEGERS or dtype.name.startswith("float8") or bool(dtype.bits)


def noting_method(opens: Callable[P, Checkpoint]) -> Callable[P, Checkpoint]:
    """Decorate a function that opens checkpoints: they know how they are quantized, and a warning says it."""

    @wraps(opens)
    def opening(*args: P.args, **kwargs: P.kwargs) -> Checkpoint:
        return with_method(opens(*args, **kwargs))

    return opening


def with_method(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint that knows how it is quantized, if it is."""
    quantized = _method_of(checkpoint)
    if quantized is None or checkpoint.opening.quantized is not None:
        return checkpoint
    opening = replace(checkpoint.opening, quantized=quantized)
    return replace(checkpoint, opening=opening, warnings=(quantized.text, *checkpoint.warnings))


def without_method(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose weights are plain now."""
    quantized = checkpoint.opening.quantized
    if quantized is None:
        return checkpoint
    warnings = tuple(each for each in checkpoint.warnings if each != quantized.text)
    return replace(checkpoint, opening=replace(checkpoint.opening, quantized=None), warnings=warnings)


def way_out(checkpoint: Checkpoint) -> Text | str:
    """Return the hint for an operation that needs plain weights: the option, or why there is none."""
    quantized = checkpoint.opening.quantized
    if quantized is not None and quantized.problem:
        return f"{quantized.problem}: {OTHER_PROGRAM}"
    return Text("to make plain weights of it first, give ", Option("dequantize", "bfloat16"))


def refuse_parted(checkpoint: Checkpoint, kept: Mapping[str, str]) -> None:
    """Refuse a conversion that parts quantized weights from their scales: neither means anything alone.

    Args:
        checkpoint: the source.
        kept: the new name of each tensor that the target gets.

    Raises:
        UsageError: only one of them is kept, or only one is renamed and the names no longer go together; all at once.
    """
    if checkpoint.opening.quantized is None:
        return
    specs, new_names = _specs_of(checkpoint), {*kept.values()}
    known = dict.fromkeys((*specs, *checkpoint.left_out))
    faults = Faults(checkpoint.root)
    for name in known:
        match = _match(name, known) if name not in specs or is_code(specs[name].dtype) else None
        parts = (name, *match.others) if match else ()
        absent = [part for part in parts if part not in kept]
        if len(absent) == len(parts):
            continue
        if absent:
            first = next(part for part in parts if part in kept)
            fault = f"goes with {names(absent)}, which would be left out"
            faults.add(f"tensor {first!r}", fault, code="parted-scales", hint="choose both or neither")
        elif any(kept[part] == part for part in parts) and not _go_together([kept[part] for part in parts], new_names):
            fault = f"would become {kept[name]!r}, and {names(parts[1:])} {names([kept[part] for part in parts[1:]])}"
            hint = "rename both alike, such as with a star at the end of both names"
            faults.add(f"tensor {name!r}", fault, code="parted-scales", hint=hint)
    faults.raise_if_any(UsageError)


def _go_together(parts: list[str], known: Collection[str]) -> bool:
    """Return whether names show that the first has codes of which the others are the scales and the like."""
    match = _match(parts[0], known)
    return match is not None and {*match.others} == {*parts[1:]}


def _specs_of(checkpoint: Checkpoint) -> dict[str, TensorSpec | Entry]:
    """Return the dtypes and shapes of a checkpoint's tensors, or of its files' if their sharding is unknown."""
    specs: dict[str, TensorSpec | Entry] = {name: tensor.spec for name, tensor in checkpoint.tensors.items()}
    return specs or {name: entry for file in checkpoint.files for name, entry in file.index.entries.items()}


def _method_of(checkpoint: Checkpoint) -> Quantized | None:
    """Return how a checkpoint is quantized, or None."""
    specs = _specs_of(checkpoint)
    dtypes = {name: spec.dtype for name, spec in specs.items()}
    codes = {dtype for dtype in dict.fromkeys(dtypes.values()) if is_code(dtype)}
    coded = [name for name, spec in specs.items() if spec.dtype in codes and len(spec.shape) > 1]
    if not coded:
        return None
    matches = (_match(name, dtypes) for name in coded)
    first, integers = None, ""
    for match in filter(None, matches):
        first = first or match
        if dtypes[match.name].name in _INTEGERS and dtypes[match.others[0]].name != E8M0:
            integers = f"{match.name!r} is {dtypes[match.name]}, and only float8 is dequantized"
            break
    found = next(_said(checkpoint), None)
    if found is not None:
        file, method, settings = found
        source = f"{file} says"
    elif first is not None:
        file, method, settings = "", first.method, ""
        source = f"{first.others[0]!r} shows"
    else:
        return None
    title = f"{dtypes[first.name]} with scales" if first is not None and method == _SCALES else method
    problem = integers if method in DEQUANTIZED else f"{source} {method!r:.60}, which is not dequantized"
    return Quantized(method, file, f"{checkpoint.root} is quantized: {title:.60}{settings}, as {source}", problem)


def _match(name: str, known: Collection[str]) -> _Match | None:
    """Return the method that a name and its neighbours show, or None.

    >>> _match("a.qweight", ["a.qweight", "a.qzeros", "a.scales"])
    _Match(name='a.qweight', method='awq', others=('a.qzeros', 'a.scales'))
    """
    for rule in (*_BY_WORD.get(name.rpartition(".")[2], ()), *_OF_ANY_NAME):
        stem = name.removesuffix(rule.codes)
        others = tuple(stem + end for end in rule.others)
        if name.endswith(rule.codes) and all(other in known for other in others):
            return _Match(name, rule.method, others)
    return None


def _said(checkpoint: Checkpoint) -> Iterator[tuple[str, str, str]]:
    """Yield what files next to a checkpoint say: file, method and settings; a damaged file says nothing."""
    directory = config_path(checkpoint).parent
    for file, method in _FILES.items():
        with suppress(SourceError):
            path = directory / file
            for part in _parts(file, read_config(path)) if path.is_file() else ():
                yield file, _named(part) or method, _settings(part)


def _parts(file: str, content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a file that describe a quantization."""
    if file == MODEL_CONFIG:
        yield from quantizations(content)
    elif isinstance(part := content.get("quantization"), Mapping):
        yield part
    elif {"bits", "w_bit", "q_group_size"} & content.keys():
        yield content


def _named(part: Mapping[str, Any]) -> str:
    """Return the method that a description names, or "" if it names none."""
    if (method := part.get("quant_method")) is not None:
        return method if isinstance(method, str) else repr(method)
    if {"load_in_8bit", "load_in_4bit"} & part.keys():
        return "bitsandbytes"
    return "modelopt" if "quant_algo" in part else ""


def _settings(part: Mapping[str, Any]) -> str:
    """Return the settings of a description in parentheses.

    >>> _settings({"bits": 4, "group_size": 128, "desc_act": True})
    ' (bits 4, group_size 128)'
    """
    values = {key: part[key] for key in _SETTINGS if isinstance(part.get(key), str | int | list)}
    texts = [f"{key} {value}"[:40] for key, value in values.items() if value is not False]
    return f" ({', '.join(texts)})" if texts else ""
