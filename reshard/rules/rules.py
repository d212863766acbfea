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

`{layer}` matches a number, `*` one dotted part of a name. One side of a rule has a fused tensor and a verb: `rename`,
`stack`, `concat`, `interleave`, `transpose`, `pad` or `tie`. Each verb takes the options `by` (numbers that become axes
in front: a word, a list of words, or words with counts), `flat: true` (these axes and the first one are one), and
`transposed: true` (the last two axes of the parts are swapped). If several rules match a name, the one with the fewest
words and stars is used: a rule for layer 61 wins over a rule for every `{layer}`.

Without `sizes` the parts of `concat` and `interleave` are equal; unequal ones are refused. A word has one range in the
whole file, so that a missing tensor of one layer is noticed, even if its rule is `optional`. Layers of two kinds have
two words: `{dense}` and `{moe}`, in addition to `{layer}` for tensors of all layers. If the model's `config.json` is
known, the number of layers is its `num_hidden_layers`.

Rules for some models are in `examples`; use them by name, such as `llama-hf-mcore`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.errors import Faults, UsageError, names
from reshard.rules.equation import Cut
from reshard.rules.names import Pattern, families
from reshard.rules.numbers import Numbers
from reshard.storage.places import as_place
from reshard.storage.small import parse_json, read_small, read_yaml
from reshard.strategy.names import optimizer_states

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from reshard.rules.derive import Derived
    from reshard.source.checkpoint import Checkpoint
    from reshard.storage.places import AnyName, Place

VERSION = 1
HEADER = "reshard-rules"
_MOST_RULES = 10_000
_MOST_AXES = 32
_KEYS = {HEADER, "sides", "source", "let", "config", "rules"}
_OPTIONS = {
    "rename": set(), "stack": set(), "transpose": set(), "tie": set(),
    "concat": {"axis", "sizes"},
    "interleave": {"axis", "sizes", "groups", "halves"},
    "pad": {"axis", "size", "to", "multiple"},
}  # fmt: skip
_OF_ALL = {"by", "flat", "transposed"}

Number = int | str


@dataclass(frozen=True, slots=True)
class Rule:
    """A mapping between tensors of the two sides.

    Attributes:
        where: its path in the file.
        made: the side that has the fused tensor, 0 or 1.
        parts: the names of the parts, on the other side; empty if that side has no counterpart.
        fused: the name of the fused tensor.
        verb: the operation; a key of `_OPTIONS`.
        axis: the axis that is cut.
        sizes, groups, halves, size, padded, multiple: see `equation.Cut`; numbers or expressions, as in the file.
        by: the words that become axes in front, each with its count, if the file has it.
        flat: the axes in front and the first dimension are one.
        transposed: the last two dimensions of the parts are swapped.
        optional: the rule need not match any tensor.
    """

    where: str
    made: int
    parts: tuple[Pattern, ...]
    fused: Pattern
    verb: str = "rename"
    axis: int = 0
    sizes: tuple[Number, ...] | None = None
    groups: Number | None = None
    halves: int = 0
    size: Number | None = None
    padded: Number | None = None
    multiple: Number | None = None
    by: tuple[tuple[str, Number | None], ...] = ()
    flat: bool = False
    transposed: bool = False
    optional: bool = False

    @property
    def is_name_only(self) -> bool:
        """Return whether the rule only renames tensors."""
        return self.verb in {"rename", "tie"} and not (self.by or self.transposed)

    def side(self, side: int) -> tuple[Pattern, ...]:
        """Return the patterns of one side."""
        return (self.fused,) if side == self.made else self.parts

    def cut(self, numbers: Numbers, *, scale: int = 1) -> Cut:
        """Evaluate the numbers of the cut; None if the shapes have to tell.

        Args:
            numbers: the values of words.
            scale: the number of rows that count as one: a scale of a quantised weight covers a block of its rows.

        Raises:
            UsageError: a value is not a number.
        """

        def evaluated(expression: Number | None) -> int | None:
            if expression is None:
                return None
            value = numbers.value(expression)
            if value < 1:
                raise UsageError(f"has {expression!r:.60}, which is {value}; expected at least 1", code="out-of-range")
            return value

        def rows(expression: Number | None) -> int | None:
            value = evaluated(expression)
            return None if value is None else -(-value // scale)

        of_parts = None if self.sizes is None else tuple(rows(size) or 0 for size in self.sizes)
        return Cut(
            self.axis, self.verb == "interleave", of_parts, evaluated(self.groups), self.halves, self.verb == "pad",
            rows(self.size), rows(self.padded), evaluated(self.multiple) if scale == 1 else None,
        )  # fmt: skip


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
    """

    sides: tuple[str, str]
    rules: tuple[Rule, ...]
    numbers: Numbers
    source: str = ""
    root: str = "rules"
    content: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
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
        if config is not None and not isinstance(config, (Mapping, list, int, float)):
            config_content = read_config(as_place(config))
        data = {**top, "config": plain(config_content)} if isinstance(top, Mapping) else top
        if let and isinstance(data, dict):
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
            faults.add(f"$.{key}", f"is unknown; expected {names(sorted(_KEYS), most=9)}", code="unknown-key")
        sides: Any = data.get("sides")
        items: Any = data.get("rules")
        let = data.get("let") or {}
        if not (_is_texts(sides) and len(set(sides)) == len(sides) == 2 and "optional" not in sides):
            expected = "expected the names of the two sides, such as [hf, mcore]"
            faults.add("$.sides", f"is {sides!r:.60}; {expected}", code="bad-value")
        if not isinstance(items, list) or not items or len(items) > _MOST_RULES:
            length = f" of {len(items):,}" if isinstance(items, list) else ""
            faults.add(
                "$.rules", f"is a {type(items).__name__}{length}; expected a list of 1 to {_MOST_RULES:,} rules",
                code="bad-value",
            )  # fmt: skip
        if not isinstance(let, Mapping) or not all(_is_word(key) and _is_number(let[key]) for key in let):
            faults.add("$.let", "is wrong; expected words, and for each a number or an expression", code="bad-value")
        faults.raise_if_any(UsageError)
        both = (sides[0], sides[1])
        source = source or data.get("source") or ""
        if source and source not in both:
            raise UsageError(f"{root} has no side {source!r}", code="no-such-side", hint=f"choose {' or '.join(both)}")
        rules = [_rule(item, f"$.rules[{n}]", both, faults) for n, item in enumerate(items)]
        faults.raise_if_any(UsageError)
        numbers = Numbers(dict(let), data.get("config") or {})
        return cls(both, tuple(rule for rule in rules if rule), numbers, source, root, dict(data))

    def side_of(self, source: Checkpoint) -> int:
        """Return the side of a checkpoint: the one that matches more of its names.

        Raises:
            UsageError: neither side matches, or both match equally well.
        """
        if self.source:
            return self.sides.index(self.source)
        counts = self._matches(source.tensors)
        if not any(counts):  # no weights match; the weights of optimizer states have several possible names
            states = optimizer_states(source.every)
            counts = self._matches(weight for name in source.tensors for _, weight in families(name, states))
        if not any(counts):
            patterns = names((rule.side(rule.made)[0].text for rule in self.rules), most=3)
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

    def derived(self, source: Checkpoint) -> Derived:
        """Apply the rules to a checkpoint, as `Checkpoint.derive` does.

        The result also has the use of each rule.
        """
        from reshard.rules.derive import derive  # above this module

        return derive(source, self)

    def data(self) -> dict[str, Any]:
        """Return the rules as JSON data, which `of` reads."""
        return {**self.content, **({"source": self.source} if self.source else {}), "config": dict(self.numbers.config)}

    def inverted(self) -> Rules:
        """Return the same rules with the sides swapped.

        If the rules have a source side, the other side becomes the source.
        """
        sides = self.sides[::-1]
        source = next((side for side in self.sides if self.source and side != self.source), "")
        rules = tuple(replace(rule, made=1 - rule.made) for rule in self.rules)
        return replace(
            self, sides=(sides[0], sides[1]), rules=rules, source=source, content={**self.content, "sides": [*sides]}
        )


def examples() -> dict[str, str]:
    """Return the names of the built-in rules, each with its model and programs.

    >>> examples()["llama-hf-mindformers"]
    "Llama: Hugging Face <-> MindSpore Transformers' LlamaForCausalLM (qkv_concat: false)"
    """
    files = sorted((Path(__file__).parent / "examples").glob("*.yaml"))
    return {path.stem: path.read_text("utf-8").partition("\n")[0].strip("# .") for path in files}


def _nearest(name: str) -> list[str]:
    """Return the names of built-in rules that resemble a name, or else all names."""
    from difflib import get_close_matches  # on errors only

    words = re.split(r"[\W_]+", name.lower())
    alike = [built_in for built_in in examples() if any(get_close_matches(word, built_in.split("-")) for word in words)]
    return alike or list(examples())


def not_built_in(name: str) -> UsageError:
    """Return the error for a name that is neither a file nor that of built-in rules."""
    return UsageError(
        f"{name} is neither a file nor the name of built-in rules", code="not-found",
        hint=f"built-in rules: {names(_nearest(name), most=6)}",
    )  # fmt: skip


def example(name: str) -> Path | None:
    """Return the file of built-in rules, or None if there are no rules of this name.

    >>> example("llama-hf-mcore").name, example("llama")
    ('llama-hf-mcore.yaml', None)
    """
    return next((path for path in (Path(__file__).parent / "examples").glob("*.yaml") if path.stem == name), None)


def read_config(location: Place) -> Any:
    """Read a model's configuration.

    Raises:
        UsageError: it cannot be read, or is not JSON.
    """
    content = read_small(location, "model configuration", 1 << 22, UsageError)
    try:
        return parse_json(content, [])
    except ValueError as error:
        raise UsageError(f"{location} is not JSON", code="not-json", facts=[str(error)]) from None


def plain(config: object) -> dict[str, Any]:
    """Return only the numbers of a configuration, as rules need nothing else."""
    if not isinstance(config, Mapping):
        raise UsageError(
            f"the model configuration is a {type(config).__name__}; expected a JSON object", code="wrong-type"
        )
    numbers: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, int) and not isinstance(value, bool):
            numbers[str(key)] = value
        elif isinstance(value, Mapping) and (below := plain(value)):
            numbers[str(key)] = below
    return numbers


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


def _is_word(value: object) -> bool:
    return isinstance(value, str) and value.isidentifier() and value != "config"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, str)) and not isinstance(value, bool)


def _rule(item: object, key_path: str, sides: tuple[str, str], faults: Faults) -> Rule | None:
    """Parse a rule; report faults and return None if it is invalid."""
    before = faults.count
    if not isinstance(item, Mapping) or not set(sides) <= item.keys() <= {*sides, "optional"}:
        expected = f"expected {sides[0]}, {sides[1]} and perhaps optional"
        faults.add(key_path, f"is {item!r:.80}; {expected}", code="bad-rule")
        return None
    values = [item[side] for side in sides]
    verbs = [n for n, value in enumerate(values) if isinstance(value, Mapping)]
    absent = [n for n, value in enumerate(values) if value is None]
    if len(verbs) + len(absent) > 1 or [] in values or all(isinstance(value, list) for value in values):
        faults.add(
            key_path, "has a verb, a list or nothing on both sides, or an empty list; expected names on one side",
            code="no-names",
        )  # fmt: skip
        return None
    fused_side = verbs[0] if verbs else 1 - absent[0] if absent else int(not isinstance(values[1], list))
    if not isinstance(item.get("optional", False), bool):
        faults.add(f"{key_path}.optional", f"is {item['optional']!r:.60}; expected true or false", code="wrong-type")
    verb, options = "rename", dict[str, Any]()
    name = values[fused_side]
    if verbs:
        options = dict(name)
        verb_keys = [key for key in options if key in _OPTIONS]
        if len(verb_keys) != 1:
            expected = f"expected one of {names(_OPTIONS, most=9)} with a name"
            faults.add(f"{key_path}.{sides[fused_side]}", f"is {name!r:.80}; {expected}", code="unknown-verb")
            return None
        verb = verb_keys[0]
        name = options.pop(verb)
    counterpart = values[1 - fused_side]
    parts = [] if counterpart is None else counterpart if isinstance(counterpart, list) else [counterpart]
    fused = _pattern(name, f"{key_path}.{sides[fused_side]}", faults)
    patterns = [_pattern(part, f"{key_path}.{sides[1 - fused_side]}", faults) for part in parts]
    for key in (key for key in options if key not in _OPTIONS[verb] | _OF_ALL):
        expected = f"expected {names(sorted(_OPTIONS[verb] | _OF_ALL), most=9)}"
        faults.add(f"{key_path}.{sides[fused_side]}.{key}", f"is unknown; {expected}", code="unknown-key")
    fields = _fields(options, f"{key_path}.{sides[fused_side]}", faults)
    transposed = verb == "transpose" or options.get("transposed", False)
    if not isinstance(transposed, bool):
        expected = "expected true or false"
        faults.add(
            f"{key_path}.{sides[fused_side]}.transposed", f"is {transposed!r:.60}; {expected}", code="wrong-type"
        )
    if faults.count > before or fused is None:
        return None
    rule = Rule(
        key_path, fused_side, tuple(pattern for pattern in patterns if pattern), fused, verb, transposed=transposed,
        optional=item.get("optional", False), **fields,
    )  # fmt: skip
    try:
        _check_options(rule)
        _check_words(rule)
    except UsageError as error:
        faults.add(key_path, error)
        return None
    return rule


def _pattern(text: object, key_path: str, faults: Faults) -> Pattern | None:
    if not isinstance(text, str):
        faults.add(key_path, f"is {text!r:.60}; expected the name of a tensor", code="wrong-type")
        return None
    try:
        return Pattern(text)
    except UsageError as error:
        faults.add(key_path, error)
        return None


def _fields(options: Mapping[str, Any], key_path: str, faults: Faults) -> dict[str, Any]:
    """Parse the options of a verb."""

    def checked(key: str, expected: str, valid: Callable[[Any], bool]) -> Any:
        value = options.get(key)
        if value is not None and not valid(value):
            faults.add(f"{key_path}.{key}", f"is {value!r:.60}; expected {expected}", code="bad-value")
            return None
        return value

    by = options.get("by", [])
    words = by if isinstance(by, (list, Mapping)) else [by]
    counted = list(words.items() if isinstance(words, Mapping) else [(word, None) for word in words])
    valid = all(_is_word(word) and (count is None or _is_number(count)) for word, count in counted)
    if not valid or len({word for word, _ in counted}) < len(counted):
        expected = "expected a word, a list of words, or words with how many there are"
        faults.add(f"{key_path}.by", f"is {by!r:.60}; {expected}", code="bad-value")
    sizes = checked("sizes", "a list of numbers or expressions", lambda value: isinstance(value, list) and bool(value))
    for size in sizes or ():
        if not _is_number(size):
            faults.add(f"{key_path}.sizes", f"has {size!r:.60}; expected a number or an expression", code="bad-value")
    number = "a number or an expression"
    return {
        "axis": checked("axis", "a small whole number", lambda value: _is_small(value, -_MOST_AXES)) or 0,
        "sizes": None if sizes is None else tuple(sizes),
        "groups": checked("groups", number, _is_number),
        "halves": checked("halves", "a small whole number from 2 on", lambda value: _is_small(value, 2)) or 0,
        "size": checked("size", number, _is_number),
        "padded": checked("to", number, _is_number),
        "multiple": checked("multiple", number, _is_number),
        "by": tuple(counted),
        "flat": bool(checked("flat", "true or false", lambda value: isinstance(value, bool))),
    }


def _is_small(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MOST_AXES


def _check_options(rule: Rule) -> None:
    """Check that the options of a rule agree with each other and its verb.

    Raises:
        UsageError: they do not; the message is a predicate.
    """
    count, sizes = len(rule.parts), rule.sizes
    if rule.verb == "interleave" and count == 1 and not rule.halves:
        raise UsageError(
            "interleaves one part", code="missing-option", hint="say with halves how many pieces a group has"
        )
    if rule.halves and rule.groups is None:
        raise UsageError("has halves without groups", code="missing-option", hint="say with groups how many there are")
    if rule.halves and count > 1:
        raise UsageError("has both halves and several parts", code="conflicting-options")
    if rule.verb not in {"concat", "interleave", "tie"} and count > 1:
        raise UsageError(
            f"has {count} parts; {rule.verb} takes one", code="wrong-count",
            hint="concat, interleave and tie take several",
        )  # fmt: skip
    if rule.verb == "tie" and (rule.by or rule.transposed):
        raise UsageError("ties tensors, and has by or transposed", code="conflicting-options")
    if sizes is not None and len(sizes) != count:
        raise UsageError(f"has {len(sizes)} sizes for {count} parts; expected one for each", code="wrong-count")


def _check_words(rule: Rule) -> None:
    """Check that the words in a rule's names fit its `by`.

    Raises:
        UsageError: they do not; the message is a predicate.
    """
    by, fused_words = {word for word, _ in rule.by}, set(rule.fused.words)
    if rule.verb == "stack" and not by:
        raise UsageError("stacks without by", code="missing-option", hint="say with by which numbers become axes")
    if rule.flat and not by:
        raise UsageError("is flat without by", code="missing-option", hint="say with by which numbers become rows")
    if by & fused_words:
        raise UsageError(
            f"has {names(sorted(by & fused_words))} both in by and in the name of what is made",
            code="conflicting-options",
        )
    for part in rule.parts:
        if alone := (set(part.words) ^ fused_words) - by or by - set(part.words):
            raise UsageError(
                f"has {names(sorted(alone))} in one name but not in the other", code="unmatched-word",
                hint="name in by what becomes an axis",
            )  # fmt: skip
