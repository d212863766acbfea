"""Read rules files: YAML that maps the tensors of two programs to each other.

    reshard-rules: 1
    sides: [hf, mcore]                  # names of the two sides; either may be the source
    let: {heads: config.num_attention_heads, groups: config.num_key_value_heads, head: config.head_dim}
    rules:
      - hf: model.norm.weight           # the same tensor by another name
        mcore: decoder.final_layernorm.weight
      - hf: model.layers.{layer}.input_layernorm.weight
        mcore: {stack: decoder.layers.self_attention.linear_qkv.layer_norm_weight, by: layer}
      - hf:
          - model.layers.{layer}.self_attn.q_proj.weight
          - model.layers.{layer}.self_attn.k_proj.weight
          - model.layers.{layer}.self_attn.v_proj.weight
        mcore:                          # for each group some rows of each
          interleave: decoder.layers.self_attention.linear_qkv.weight
          by: layer
          groups: groups
          sizes: [heads / groups * head, head, head]
      - hf: ["model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"]
        mcore: {concat: decoder.layers.mlp.linear_fc1.weight, by: layer}
      - hf: lm_head.weight
        mcore: {pad: output_layer.weight, size: config.vocab_size, multiple: 128}
      - hf: "*.rotary_emb.inv_freq"     # has no counterpart
        mcore: null

A placeholder `{layer}` (called a word below) matches a number, `*` one dotted part of a name; keys of `let` are
constants. One side of a rule has a fused tensor and a verb: `rename`, `stack`, `concat`, `interleave`, `transpose`,
`pad` or `tie`. Each verb takes the options `by` (numbers that become axes in front: a word, a list of words, or words
with counts), `at: 1` (these axes are behind the first one), `flat: true` (these axes and the first one are one), and
`transposed: true` (the last two axes of the parts are swapped). `rows` and `columns` of `transpose` are the axes that
the rows and columns of the part are in the tensor: a kernel of JAX has an axis of heads. If several rules match a name,
the one with the fewest words and stars is used: a rule for layer 61 wins over a rule for every `{layer}`.

Without `sizes` the parts of `concat` and `interleave` must be equal; to split more than two, `sizes` is required
(except for `interleave` without `groups`). A word has one range in the whole file, so that a missing tensor of one
layer is noticed, even if its rule is `optional`. Layers of two kinds have two words: `{dense}` and `{moe}`, in addition
to `{layer}` for tensors of all layers. If the model's `config.json` is known, the number of layers is its
`num_hidden_layers`.

Rules for some models are in `examples`; use them by name, such as `llama-hf-mcore`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.arguments import checked
from reshard.core.storage.base import similar
from reshard.core.storage.places import RemotePath, as_place
from reshard.core.storage.small import read_yaml
from reshard.errors import Faults, UsageError, names
from reshard.rules.numbers import Numbers, numbers_in, read_config
from reshard.rules.patterns import families
from reshard.rules.rule import Rule, is_number, is_word, parse_rule
from reshard.spelling import did_you_mean, nearest
from reshard.strategy.names import optimizer_states

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.storage.places import AnyName
    from reshard.rules.derive import Derived
    from reshard.rules.rule import Number

VERSION = 1
HEADER = "reshard-rules"
_MOST_RULES = 10_000
_KEYS = {HEADER, "sides", "source", "let", "config", "note", "rules"}


@dataclass(frozen=True, slots=True)
class Rules:
    """Mappings between the tensors of two programs; see the module.

    Attributes:
        sides: the names of the two sides.
        rules: the rules.
        numbers: the values of words in them.
        source: the side of the source; empty to choose it by the names in the source.
        root: the file or built-in rules they come from, for messages.
        content: the contents of the file.

    >>> rule = {"ours": "net.layer{n}.weight", "hf": "layers.{n}.weight"}
    >>> rules = reshard.Rules.of({"reshard-rules": 1, "sides": ["ours", "hf"], "rules": [rule]})
    >>> source = reshard.open("src_checkpoints", strategy="src_strategy.ckpt")
    >>> list(source.sel("net.*.weight").derive(rules))
    ['layers.1.weight', 'layers.2.weight', 'layers.3.weight']
    """

    sides: tuple[str, str]
    rules: tuple[Rule, ...]
    numbers: Numbers
    source: str = ""
    root: str = "rules"
    content: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    @checked
    def read(
        cls,
        path: AnyName,
        *,
        config: AnyName | Mapping[str, Any] | None = None,
        let: Mapping[str, Number] | None = None,
        source: str = "",
    ) -> Rules:
        """Read a rules file.

        Args:
            path: the YAML file, or the name of an example.
            config: the `config.json` of a model, or its contents, for `config.NAME`; by default the one in the file.
            let: values of words, which replace the file's.
            source: the side of the source.

        Raises:
            UsageError: a file cannot be read or is not a rules file; all faults at once, each with its path.
        """
        location = as_place(path)
        if (shipped := example(str(path))) and not location.is_file():
            location = as_place(shipped)
        elif location.name == str(path) and not location.suffix and not location.is_there():
            raise not_built_in(str(path))
        faults = Faults(str(path))
        top = read_yaml(location, "rules file", faults)
        faults.raise_if_any(UsageError)
        if isinstance(top, Mapping) and {"mesh", "operators"} & top.keys() and HEADER not in top:
            raise UsageError(
                f"{path} describes how tensors are sharded, not their names and shapes", code="not-rules",
                facts=[f"expected the key {HEADER}"],
            )  # fmt: skip
        if config is None and isinstance(top, Mapping):
            value = top.get("config")
            config = location.parent / value if isinstance(value, str) else value
        config_content: Any = config or {}
        if isinstance(config, str | os.PathLike | RemotePath):
            config_content = read_config(as_place(config))
        data = {**top, "config": numbers_in(config_content)} if isinstance(top, Mapping) else top
        if let and isinstance(data, dict) and isinstance(data.get("let") or {}, Mapping):
            _refuse_unused(let, data, str(path))
            data["let"] = {**(data.get("let") or {}), **let}
        return cls.of(data, root=str(path), source=source)

    @classmethod
    def of(cls, data: object, *, root: str = "rules", source: str = "") -> Rules:
        """Build rules from the contents of a rules file.

        Raises:
            UsageError: the contents are not rules; all faults at once, each with its path.
        """
        faults = Faults(root)
        if not isinstance(data, Mapping) or data.get(HEADER) != VERSION:
            problem = f"has {HEADER} {data.get(HEADER)!r:.40}" if isinstance(data, Mapping) else "has no keys"
            raise UsageError(
                f"{root} {problem}; it is not a rules file", code="not-rules",
                facts=[f"expected the keys {HEADER} ({VERSION}), sides and rules"],
            )  # fmt: skip
        for key in (key for key in data if key not in _KEYS):
            expected = names(sorted(_KEYS), most=9)
            hint = did_you_mean(key, sorted(_KEYS))
            faults.add(f"$.{key}", f"is unknown; expected {expected}", code="unknown-key", hint=hint)
        sides: Any = data.get("sides")
        items: Any = data.get("rules")
        let = data.get("let") or {}
        if not (_is_pair(sides) and "optional" not in sides):
            faults.unexpected("$.sides", sides, "the names of the two sides, such as [hf, mcore]", code="bad-value")
        if not isinstance(items, list) or not items or len(items) > _MOST_RULES:
            length = f" of {len(items):,}" if isinstance(items, list) else ""
            faults.add(
                "$.rules", f"is a {type(items).__name__}{length}; expected a list of 1 to {_MOST_RULES:,} rules",
                code="bad-value",
            )  # fmt: skip
        if not isinstance(data.get("note", ""), str):
            faults.unexpected("$.note", data["note"], "a text")
        if not isinstance(let, Mapping) or not all(is_word(key) and is_number(let[key]) for key in let):
            faults.add("$.let", "is wrong; expected words, and for each a number or an expression", code="bad-value")
        faults.raise_if_any(UsageError)
        both = (sides[0], sides[1])
        source = source or data.get("source") or ""
        if source and source not in both:
            raise UsageError(f"{root} has no side {source!r}", code="no-such-side", hint=f"choose {' or '.join(both)}")
        rules = [parse_rule(item, f"$.rules[{n}]", both, faults) for n, item in enumerate(items)]
        faults.raise_if_any(UsageError)
        numbers = Numbers(dict(let), data.get("config") or {})
        return cls(both, tuple(rule for rule in rules if rule), numbers, source, root, dict(data))

    @property
    def is_built_in(self) -> bool:
        """Return whether these are rules that come with the program."""
        return example(self.root) is not None

    def side_of(self, source: Checkpoint) -> int:
        """Return the side of a checkpoint: the one that matches more of its names.

        Raises:
            UsageError: neither side matches, or both match equally well.
        """
        if self.source:
            return self.sides.index(self.source)
        counts = self._matches(source.tensors)
        if not any(counts):  # no weights match; the weights of optimizer states have several possible names
            states = optimizer_states(source.all_names, source.opening.states)
            counts = self._matches(weight for name in source.tensors for _, weight in families(name, states))
        if not any(counts):
            patterns = names((rule.side(rule.fused_side)[0].text for rule in self.rules), most=3)
            raise UsageError(
                f"{self.root} names no tensor of {source.root}", code="no-match",
                facts=[f"{source.root} has {names(source.tensors, most=3)}", f"{self.root} names {patterns}"],
            )  # fmt: skip
        if counts[0] == counts[1]:
            raise UsageError(
                f"the names in {source.root} fit both sides of {self.root}", code="ambiguous-side",
                hint=f"say which is the source: {' or '.join(self.sides)}",
            )  # fmt: skip
        return int(counts[1] > counts[0])

    def _matches(self, weights: Iterable[str]) -> list[int]:
        """Return the number of names that match each side."""
        counts = [0, 0]
        for name in weights:
            for side in range(2):
                counts[side] += any(p.match(name) is not None for rule in self.rules for p in rule.side(side))
        return counts

    def derived(self, source: Checkpoint, drop: Iterable[str] = ()) -> Derived:
        """Apply the rules to a checkpoint, as `Checkpoint.derive` does; `drop` is as for `derive`.

        The result also has the use of each rule.
        """
        from reshard.rules.derive import derive  # above this module

        return derive(source, self, drop)

    def data(self) -> dict[str, Any]:
        """Return the rules as JSON data, which `of` reads."""
        return {**self.content, **({"source": self.source} if self.source else {}), "config": dict(self.numbers.config)}


def examples() -> dict[str, str]:
    """Return the names of the built-in rules, each with its model and programs.

    >>> examples()["llama-hf-mindformers"]
    "Llama: Hugging Face <-> MindSpore Transformers' LlamaForCausalLM (qkv_concat: false)"
    """
    return {
        path.stem: path.read_text("utf-8").partition("\n")[0].strip("# .")
        for path in sorted(_example_files(), key=lambda path: path.stem)
    }


def not_built_in(name: str) -> UsageError:
    """Return the error for a name of neither a file nor built-in rules; its hint has similar names."""
    words = re.split(r"[\W_]+", name.lower())
    alike = [built_in for built_in in examples() if any(nearest(word, built_in.split("-")) for word in words)]
    meant = did_you_mean(name, examples()) or similar(name)
    return UsageError(
        f"{name} is neither a file nor the name of built-in rules", code="not-found",
        hint=meant or f"built-in rules: {names(alike or list(examples()), most=6)}",
    )  # fmt: skip


def example(name: str) -> Path | None:
    """Return the file of built-in rules, or None if there are no rules of this name.

    >>> example("llama-hf-mcore").name, example("llama")
    ('llama-hf-mcore.yaml', None)
    """
    return next((path for path in _example_files() if path.stem == name), None)


def _refuse_unused(let: Mapping[str, Number], data: Mapping[str, Any], root: str) -> None:
    """Refuse values of words that rules do not use."""
    own = data.get("let") or {}
    words = {*own, *re.findall(r"[A-Za-z_]\w*", repr((data.get("rules"), own))), "scale_block"}
    if unused := [word for word in let if word not in words]:
        raise UsageError(
            f"{root} uses no word {names(map(repr, unused))}", code="no-effect",
            hint=f"its words are {names(own, most=9)}" if own else "it has no words with values",
        )  # fmt: skip


def _example_files() -> Iterable[Path]:
    return (Path(__file__).parent / "examples").glob("*.yaml")


def _is_pair(value: object) -> bool:
    """Return whether a value is a list of two different texts."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value) and len({*value}) == len(value) == 2
