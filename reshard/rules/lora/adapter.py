"""Read adapters that PEFT saved: a configuration, and a safetensors file with two matrices for each weight.

A weight of `out` rows and `in` columns becomes the sum of itself and `scale * B @ A`, with A of r rows and `in` columns
and B of `out` rows and r columns; `scale` is alpha / r, or alpha / sqrt(r) (rslora). For an embedding, and for layers
of Conv1D (`conv1d`), the product is transposed.

With an adapter of an embedding or a head, PEFT also saves the weight that it was trained on (`save_embedding_layers`).

Sources: PEFT 0.17 and 0.21, `tuners/lora/{config,model,layer}.py`, `utils/{save_and_load,other}.py`
(`get_pattern_key`).
"""

from __future__ import annotations

import re
from hashlib import sha256
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.storage.places import any_store, as_place
from reshard.core.storage.small import parse_json, read_small
from reshard.errors import Faults, Option, SourceError, Text, names
from reshard.kits.headers import read_indexes
from reshard.rules.lora import is_alpha
from reshard.rules.lora.parts import Adapter, Copy, Pair

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.core.model.checkpoint import SourceFile
    from reshard.core.storage.places import Place
    from reshard.rules.lora import LoRA

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"

_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_"
    r"(?:(?P<side>[AB])(?:\.[^.]+)?\.weight|embedding_(?P<embedding>[AB])(?:\.[^.]+)?)",
    re.DOTALL,
)
_COPY = re.compile(
    r"(?:base_model\.model\.)?(?:(?P<layer>.+)\.base_layer\.(?P<kind>weight|bias)|(?P<weight>.+\.weight))", re.DOTALL
)
_DTYPES = {"float32", "float16", "bfloat16"}
_UNSUPPORTED = {
    "alora_invocation_tokens": "it acts from some token on only",
    "arrow_config": "it is one of several, chosen for each token",
    "layer_replication": "its model has layers twice",
    "lora_bias": "it adds to biases too",
    "modules_to_save": "it has whole weights of its own",
    "target_parameters": "it is of parameters, not of layers",
    "trainable_token_indices": "it has rows of embeddings of its own",
    "use_dora": "it also scales the rows of the sum (DoRA)",
    "use_qalora": "it is of groups of a quantised weight",
}
"""Adapter options that a plain merge cannot represent."""

_MERGE_HINT = "merge it with PEFT"

_INITS = {"gaussian", "eva", "orthogonal"}
_MOST_RANK = 1 << 20
_FLAGS = ("use_rslora", "fan_in_fan_out")
_MOST_PATTERNS, _LONGEST, _MOST_REPEATS = 100, 500, 2
_PLAIN = re.compile(r"[\w.\-]+")
_PIECE = 4 << 20


class _Config(NamedTuple):
    """The settings of an adapter: the rank and alpha of each module, and their use."""

    ranks: _Patterns
    alphas: _Patterns
    root_of_rank: bool
    transposed: bool


def read_adapter(lora: LoRA) -> Adapter:
    """Read the index and the digest of an adapter, but not its matrices.

    Raises:
        SourceError: it does not exist, cannot be merged into weights, or contradicts itself; all faults at once.
    """
    root = as_place(lora.root)
    config = _config(root, lora.alpha)
    if not (root / WEIGHTS).is_file():
        if (root / PICKLED).is_file():
            raise SourceError(
                f"{root} has {PICKLED}, a pickle, which is not read", code="unsupported-pickle",
                facts=[f"expected {WEIGHTS}"], hint="save the adapter with safe_serialization=True",
            )  # fmt: skip
        raise SourceError(f"{root} has no {WEIGHTS}", code="not-found")
    (file,), _ = read_indexes({0: [root / WEIGHTS]}, None)
    pairs, copies = _pairs(file, config)
    digest = sha256(repr([(pair.weight, pair.rank, pair.scale, pair.transposed) for pair in pairs]).encode())
    digest.update(lora.tied.encode())
    for begin in range(0, file.nbytes, _PIECE):
        content = bytearray(min(_PIECE, file.nbytes - begin))
        any_store().read_into(file.path, begin, memoryview(content))
        digest.update(content)
    return Adapter(file, pairs, copies, digest.hexdigest())


def _config(root: Place, alpha: float | None) -> _Config:
    path = root / CONFIG
    if not path.is_file():
        raise SourceError(
            f"{root} has no {CONFIG}", code="not-an-adapter", hint="give the directory of an adapter that PEFT saved"
        )
    repeated: list[str] = []
    try:
        options = parse_json(read_small(path, "adapter configuration", 1 << 22, SourceError), repeated)
    except ValueError as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"{path} is not JSON", code="not-json", facts=[str(error)]) from None
    if repeated:
        raise SourceError(f"{path} has repeated keys: {names(repeated)}", code="duplicate-key")
    if not isinstance(options, dict):
        raise SourceError(f"{path} is a {type(options).__name__}; expected a JSON object", code="wrong-type")
    faults = Faults(str(path))
    if options.get("peft_type") != "LORA":
        faults.add("peft_type", f"is {options.get('peft_type')!r:.40}; expected LORA", code="not-lora")
    for key, why in _UNSUPPORTED.items():
        if options.get(key):
            faults.add(key, f"is {options[key]!r:.60}; {why}", code="unsupported-adapter", hint=_MERGE_HINT)
    if options.get("bias", "none") != "none":
        faults.add(
            "bias", f"is {options['bias']!r:.40}; biases were trained too", code="unsupported-adapter", hint=_MERGE_HINT
        )
    init = options.get("init_lora_weights")
    if isinstance(init, str) and init not in _INITS:
        faults.add(
            "init_lora_weights", f"is {init!r:.40}, which changes the weights of the model", code="unsupported-init",
            hint="convert it with PEFT",
        )  # fmt: skip

    def checked(key: str, default: Any, expected: str, valid: Any) -> Any:
        value = options.get(key)
        if value is not None and not valid(value):
            faults.add(key, f"is {value!r:.60}; expected {expected}", code="bad-value")
        return default if value is None else value

    rank = checked("r", 0, f"a whole number from 1 to {_MOST_RANK:,}", _is_rank)
    own_alpha = checked("lora_alpha", None, "a number", is_alpha)
    ranks = checked(
        "rank_pattern", {}, "names or simple patterns, and a rank for each", lambda value: _is_map(value, _is_rank)
    )
    alphas = checked(
        "alpha_pattern", {}, "names or simple patterns, and an alpha for each", lambda value: _is_map(value, is_alpha)
    )
    flags = [checked(key, False, "true or false", lambda value: isinstance(value, bool)) for key in _FLAGS]
    if options.get("r") is None:
        faults.add("r", "is missing; expected the rank", code="missing-key")
    if own_alpha is None and alpha is None:
        faults.add(
            "lora_alpha", "is missing, and nothing else says how strong the adapter is", code="missing-alpha",
            hint=Text("give ", Option("lora_alpha")),
        )  # fmt: skip
    faults.raise_if_any(SourceError)
    return _Config(_Patterns(ranks, rank), _Patterns(alphas, own_alpha if alpha is None else alpha), *flags)


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST_RANK


def _is_map(values: object, valid: Any) -> bool:
    return (
        isinstance(values, dict)
        and sum(not _PLAIN.fullmatch(key) for key in values) <= _MOST_PATTERNS
        and all((_PLAIN.fullmatch(key) or _is_pattern(key)) and valid(value) for key, value in values.items())
    )


def _is_pattern(text: str) -> bool:
    """Return whether a text is a name, or a pattern with few repeats and no groups.

    Such patterns match in short time.
    """
    simple = len(text) <= _LONGEST and not re.search(r"[^\w.\-^$\\*+?\[\]]", text)
    if not simple or len(re.findall(r"[*+?]", text)) > _MOST_REPEATS:
        return False
    try:
        re.compile(text)
    except re.error:
        return False
    return True


class _Patterns:
    """Values of modules by the ends of their names; the first match counts.

    >>> _Patterns({"0.k_proj": 1, r".*[qk]_proj": 2}, 3).of("layers.0.k_proj"), _Patterns({"proj": 2}, 3).of("k_proj")
    (1, 3)
    """

    def __init__(self, values: Mapping[str, Any], default: Any) -> None:
        self._default = default
        items = list(enumerate(values.items()))  # there are thousands of experts, but few patterns
        self._names = {key: (number, value) for number, (key, value) in items if _PLAIN.fullmatch(key)}
        self._patterns = [
            (number, re.compile(rf"(.*\.)?({key})$"), value)
            for number, (key, value) in items
            if not _PLAIN.fullmatch(key)
        ]

    def of(self, module: str) -> Any:
        """Return the value of a module."""
        parts = module.split(".")
        ends = (".".join(parts[number:]) for number in range(len(parts)))
        values = [self._names[end] for end in ends if end in self._names]
        values += [(number, value) for number, pattern, value in self._patterns if pattern.match(module)]
        return min(values)[1] if values else self._default


def _pairs(file: SourceFile, config: _Config) -> tuple[tuple[Pair, ...], tuple[Copy, ...]]:
    """Return the pairs and copies in an adapter's file, and refuse other tensors."""
    faults = Faults(file.path)
    copies: list[Copy] = []
    modules: dict[tuple[str, bool], dict[str, str]] = {}
    for name in (*file.index.entries, *dict(file.index.unreadable)):
        match = _NAME.fullmatch(name)
        if match is None or len(name) > _LONGEST:
            if copy := _copy(name):
                copies.append(copy)
                if fault := _dtype_fault(file, name):
                    faults.add(f"tensor {name!r}", fault)
            else:
                faults.add(f"tensor {name!r:.200}", "is neither lora_A nor lora_B of a layer", code="unexpected-tensor")
            continue
        sides = modules.setdefault((match["module"], match["side"] is None), {})
        side = match["side"] or match["embedding"]
        if side in sides:
            faults.add(f"tensor {name!r}", f"repeats {sides[side]!r} of {match['module']}", code="duplicate-name")
        sides[side] = name
    if not modules:
        faults.raise_if_any(SourceError)
        raise SourceError(
            f"{file.path} has no tensors", code="no-tensors", facts=["expected lora_A and lora_B of each layer"]
        )
    pairs = []
    for (module, embedding), sides in modules.items():
        try:
            pairs.append(_pair(file, config, module, sides, embedding=embedding))
        except SourceError as error:
            faults.add(f"layer {module!r}", error)
    weights = [pair.weight for pair in pairs]
    for weight in {name for name in weights if weights.count(name) > 1} if len(set(weights)) < len(weights) else ():
        faults.add(
            f"layer {weight!r}", "has two pairs, one of them as an embedding; expected one", code="duplicate-name"
        )
    faults.raise_if_any(SourceError)
    return tuple(pairs), tuple(copies)


def _copy(name: str) -> Copy | None:
    """Parse the name of a copy of a model's tensor; return None for other names.

    >>> _copy("base_model.model.lm_head.base_layer.weight"), _copy("lm_head.lora_C.weight")
    (Copy(weight='lm_head.weight', name='base_model.model.lm_head.base_layer.weight', transposed=False), None)
    """
    match = _COPY.fullmatch(name)
    if match is None or len(name) > _LONGEST or ".lora_" in name:
        return None
    return Copy(match["weight"] or f"{match['layer']}.{match['kind']}", name)


def _dtype_fault(file: SourceFile, name: str) -> SourceError | None:
    """Return an error if a tensor of an adapter has an unsupported dtype, or None."""
    entry = file.index.entries.get(name)
    if entry is not None and entry.dtype.name in _DTYPES:
        return None
    dtype = dict(file.index.unreadable)[name] if entry is None else f"is {entry.dtype}"
    return SourceError(f"{dtype}; expected {names(sorted(_DTYPES))}", code="wrong-dtype")


def _pair(file: SourceFile, config: _Config, module: str, sides: Mapping[str, str], *, embedding: bool) -> Pair:
    if absent := {"A", "B"} - sides.keys():
        side = f"lora_{'embedding_' if embedding else ''}{absent.pop()}"
        raise SourceError(f"has no {side}; expected A and B", code="missing-tensor")
    for name in sides.values():
        if fault := _dtype_fault(file, name):
            raise fault.about(name)
    a, b = (file.index.entries[sides[side]].shape for side in "AB")
    rank = config.ranks.of(module)
    if len(a) != 2 or len(b) != 2 or (a[0], b[1]) != (rank, rank):
        expected = f"expected [{rank}, in] and [out, {rank}], as {CONFIG} says"
        raise SourceError(f"has A {[*a]} and B {[*b]}; {expected}", code="wrong-shape")
    scale = config.alphas.of(module) / (sqrt(rank) if config.root_of_rank else rank)
    transposed = embedding or config.transposed
    return Pair(f"{module}.weight", sides["A"], sides["B"], (b[0], a[1]), rank, scale, transposed)
