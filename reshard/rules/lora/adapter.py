"""The adapter that PEFT saves: a configuration, and in a safetensors file two matrices for each weight.

To a weight of `out` rows and `in` columns comes `scale * B @ A`, with A of r rows and `in` columns and B of `out` rows
and r columns; `scale` is alpha / r, or alpha / sqrt(r) (rslora). Of an embedding, and of the layers that
`fan_in_fan_out` is about, the transposed of that.

Next to an adapter of an embedding or a head, PEFT saves the weight that it was trained on (`save_embedding_layers`).

Sources: PEFT 0.17 and 0.21, `tuners/lora/{config,model,layer}.py`, `utils/{save_and_load,other}.py`
(`get_pattern_key`).
"""

from __future__ import annotations

import re
from hashlib import sha256
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.errors import Faults, Option, SourceError, Text, names
from reshard.rules.lora import is_alpha
from reshard.rules.lora.parts import Adapter, Copy, Pair
from reshard.source.headers import read_indexes
from reshard.storage.places import any_store, as_place
from reshard.storage.small import parse_json, read_small

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.rules.lora import LoRA
    from reshard.source.checkpoint import SourceFile
    from reshard.storage.places import Place

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
_OTHERWISE = {
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
"""What merging one product into each weight would not do justice to."""

_INITS = {"gaussian", "eva", "orthogonal"}
_MOST_RANK = 1 << 20
_FLAGS = ("use_rslora", "fan_in_fan_out")
_MOST_PATTERNS, _LONGEST, _MOST_REPEATS = 100, 500, 2
_PLAIN = re.compile(r"[\w.\-]+")
_PIECE = 4 << 20


class _Config(NamedTuple):
    """What a configuration says: the rank and alpha of each module, and how they are used."""

    ranks: _Patterns
    alphas: _Patterns
    root_of_rank: bool
    transposed: bool


def read_adapter(lora: LoRA) -> Adapter:
    """Read what an adapter has for which weight; of the matrices only the digest is taken.

    Raises:
        SourceError: it is not there, is not one that can be merged into weights, or contradicts itself; all faults at
            once.
    """
    root = as_place(lora.root)
    config = _config(root, lora.alpha)
    if not (root / WEIGHTS).is_file():
        other = f"has {PICKLED}, a pickle, which is not read; " if (root / PICKLED).is_file() else ""
        raise SourceError(f"{root}: {other}expected {WEIGHTS}; save the adapter with safe_serialization=True")
    (file,), _ = read_indexes({0: [root / WEIGHTS]}, None)
    pairs, copies = _pairs(file, config)
    found = sha256(repr([(pair.weight, pair.rank, pair.scale, pair.transposed) for pair in pairs]).encode())
    found.update(lora.tied.encode())
    for begin in range(0, file.nbytes, _PIECE):
        content = bytearray(min(_PIECE, file.nbytes - begin))
        any_store().read_into(file.path, begin, memoryview(content))
        found.update(content)
    return Adapter(file, pairs, copies, found.hexdigest())


def _config(root: Place, alpha: float | None) -> _Config:
    path = root / CONFIG
    if not path.is_file():
        raise SourceError(f"{root}: has no {CONFIG}; expected the directory of a LoRA adapter that PEFT saved")
    repeated: list[str] = []
    try:
        given = parse_json(read_small(path, "adapter configuration", 1 << 22, SourceError), repeated)
    except ValueError as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"{path}: is not JSON: {error}") from None
    if repeated or not isinstance(given, dict):
        raise SourceError(f"{path}: expected a JSON object in which each key is once; found {names(repeated) or given}")
    faults = Faults(str(path))
    if given.get("peft_type") != "LORA":
        faults.add("peft_type", f"is {given.get('peft_type')!r:.40}; expected LORA")
    for key, why in _OTHERWISE.items():
        if given.get(key):
            faults.add(key, f"is {given[key]!r:.60}: {why}, and is not merged; merge it with PEFT")
    if given.get("bias", "none") != "none":
        faults.add("bias", f"is {given['bias']!r:.40}: biases were trained too, and are not merged; merge it with PEFT")
    init = given.get("init_lora_weights")
    if isinstance(init, str) and init not in _INITS:
        faults.add(
            "init_lora_weights", f"is {init!r:.40}, which changes the weights of the model; convert it with PEFT"
        )

    def checked(key: str, default: Any, what: str, valid: Any) -> Any:
        found = given.get(key)
        if found is not None and not valid(found):
            faults.add(key, f"is {found!r:.60}; expected {what}")
        return default if found is None else found

    rank = checked("r", 0, f"a whole number from 1 to {_MOST_RANK:,}", _is_rank)
    said = checked("lora_alpha", None, "a number", is_alpha)
    ranks = checked(
        "rank_pattern", {}, "names or simple patterns, and a rank for each", lambda one: _is_map(one, _is_rank)
    )
    alphas = checked(
        "alpha_pattern", {}, "names or simple patterns, and an alpha for each", lambda one: _is_map(one, is_alpha)
    )
    flags = [checked(key, False, "true or false", lambda one: isinstance(one, bool)) for key in _FLAGS]
    if not rank:
        faults.add("r", "is missing; expected the rank")
    if said is None and alpha is None:
        faults.add("lora_alpha", Text("is missing, and nothing else says how strong the adapter is; give ",
                                      Option("lora_alpha")))  # fmt: skip
    faults.raise_if_any(SourceError)
    return _Config(_Patterns(ranks, rank), _Patterns(alphas, said if alpha is None else alpha), *flags)


def _is_rank(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= _MOST_RANK


def _is_map(given: object, valid: Any) -> bool:
    return (
        isinstance(given, dict)
        and sum(not _PLAIN.fullmatch(key) for key in given) <= _MOST_PATTERNS
        and all((_PLAIN.fullmatch(key) or _is_pattern(key)) and valid(value) for key, value in given.items())
    )


def _is_pattern(text: str) -> bool:
    """Return whether text is a name, or a pattern that takes no time: without groups, and with few repetitions."""
    simple = len(text) <= _LONGEST and not re.search(r"[^\w.\-^$\\*+?\[\]]", text)
    if not simple or len(re.findall(r"[*+?]", text)) > _MOST_REPEATS:
        return False
    try:
        re.compile(text)
    except re.error:
        return False
    return True


class _Patterns:
    """What is said of modules by the ends of their names: the first that matches counts, as in PEFT.

    >>> _Patterns({"0.k_proj": 1, r".*[qk]_proj": 2}, 3).of("layers.0.k_proj"), _Patterns({"proj": 2}, 3).of("k_proj")
    (1, 3)
    """

    def __init__(self, said: Mapping[str, Any], default: Any) -> None:
        self._default = default
        every = list(enumerate(said.items()))  # of experts there are thousands, of patterns few
        self._names = {key: (number, value) for number, (key, value) in every if _PLAIN.fullmatch(key)}
        self._patterns = [
            (number, re.compile(rf"(.*\.)?({key})$"), value)
            for number, (key, value) in every
            if not _PLAIN.fullmatch(key)
        ]

    def of(self, module: str) -> Any:
        """Return what is said of a module."""
        parts = module.split(".")
        ends = (".".join(parts[number:]) for number in range(len(parts)))
        found = [self._names[end] for end in ends if end in self._names]
        found += [(number, value) for number, pattern, value in self._patterns if pattern.match(module)]
        return min(found)[1] if found else self._default


def _pairs(file: SourceFile, config: _Config) -> tuple[tuple[Pair, ...], tuple[Copy, ...]]:
    """Return the pairs of an adapter's tensors, and the copies of the model's; each tensor must be one or the other."""
    faults = Faults(file.path)
    copies: list[Copy] = []
    found: dict[tuple[str, bool], dict[str, str]] = {}
    for name in (*file.index.entries, *dict(file.index.unreadable)):
        match = _NAME.fullmatch(name)
        if match is None or len(name) > _LONGEST:
            if copy := _copy(name):
                copies.append(copy)
                if fault := _dtype_fault(file, name):
                    faults.add(f"tensor {name!r}", fault)
            else:
                faults.add(f"tensor {name!r:.200}", "is neither lora_A nor lora_B of a layer, and is not merged")
            continue
        sides = found.setdefault((match["module"], match["side"] is None), {})
        side = match["side"] or match["embedding"]
        if side in sides:
            faults.add(f"tensor {name!r}", f"is that of {match['module']} once more, next to {sides[side]!r}")
        sides[side] = name
    if not found:
        faults.add("it", "has no tensors; expected lora_A and lora_B of each layer")
    pairs = []
    for (module, embedding), sides in found.items():
        try:
            pairs.append(_pair(file, config, module, sides, embedding=embedding))
        except ValueError as error:
            faults.add(f"layer {module!r}", str(error))
    every = [pair.weight for pair in pairs]
    for weight in {name for name in every if every.count(name) > 1} if len(set(every)) < len(every) else ():
        faults.add(f"layer {weight!r}", "has two pairs, one of them as an embedding; expected one")
    faults.raise_if_any(SourceError)
    return tuple(pairs), tuple(copies)


def _copy(name: str) -> Copy | None:
    """Return what tensor of the model one of the adapter's file is a copy of.

    >>> _copy("base_model.model.lm_head.base_layer.weight"), _copy("lm_head.lora_C.weight")
    (Copy(weight='lm_head.weight', name='base_model.model.lm_head.base_layer.weight', transposed=False), None)
    """
    match = _COPY.fullmatch(name)
    if match is None or len(name) > _LONGEST or ".lora_" in name:
        return None
    return Copy(match["weight"] or f"{match['layer']}.{match['kind']}", name)


def _dtype_fault(file: SourceFile, name: str) -> str:
    """Return why a tensor of an adapter is not of a dtype that is read, or ""."""
    entry = file.index.entries.get(name)
    if entry is not None and entry.dtype.name in _DTYPES:
        return ""
    dtype = dict(file.index.unreadable)[name] if entry is None else f"is {entry.dtype}"
    return f"{dtype}; expected {names(sorted(_DTYPES))}"


def _pair(file: SourceFile, config: _Config, module: str, sides: Mapping[str, str], *, embedding: bool) -> Pair:
    if absent := {"A", "B"} - sides.keys():
        raise ValueError(f"has no lora_{'embedding_' if embedding else ''}{absent.pop()}; expected A and B")
    for name in sides.values():
        if fault := _dtype_fault(file, name):
            raise ValueError(f"{name} {fault}")
    a, b = (file.index.entries[sides[side]].shape for side in "AB")
    rank = config.ranks.of(module)
    if len(a) != 2 or len(b) != 2 or (a[0], b[1]) != (rank, rank):
        raise ValueError(f"has A {[*a]} and B {[*b]}; expected [{rank}, in] and [out, {rank}], as {CONFIG} says")
    scale = config.alphas.of(module) / (sqrt(rank) if config.root_of_rank else rank)
    transposed = embedding or config.transposed
    return Pair(f"{module}.weight", sides["A"], sides["B"], (b[0], a[1]), rank, scale, transposed)
