"""Rules files: YAML that says how the tensors of two programs are made of each other.

    reshard-rules: 1
    sides: [hf, mcore]                  # what the two are called below; neither is the source
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

`{layer}` binds a number, `*` one dotted part of a name. One side of a rule is what is made: its verb is `rename`,
`stack`, `concat`, `interleave`, `transpose`, `pad` or `tie`. To each may be added `by` (numbers that become axes in
front: a word, a list of them, or words with how many there are), `flat: true` (these and the first axis are one), and
`transposed: true` (the parts have the last two axes the other way round). Of several rules with a name, that is taken
which has the fewest words and stars in it: one of layer 61 goes before one of every `{layer}`.

Without `sizes` the parts of `concat` and `interleave` are equal; unequal ones are refused. A word has one range in the
whole file, so that a tensor that one layer lacks is noticed, be its rule `optional` or not. Layers of two kinds have
two words: `{dense}` and `{moe}` besides the `{layer}` of what all have. If the model's `config.json` is known, its
layers are those that `num_hidden_layers` counts.

Files for some models are in `examples`; their names, such as `llama-hf-mcore`, stand for them.
"""

from __future__ import annotations

import difflib
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
    """How the tensors of some names on the two sides are made of each other.

    Attributes:
        where: its place in the file.
        made: which side has what is made, 0 or 1.
        parts: the names of the parts, on the other side; none where that has nothing of it.
        fused: the name of what is made.
        verb: how; one of `_OPTIONS`.
        axis: the axis that is cut.
        sizes, groups, size, padded, multiple: see `equation.Cut`, as the file has them.
        halves: likewise.
        by: the words that become axes in front, each with how many there are, where that is said.
        flat: these and the first dimension are one.
        transposed: the parts have the last two dimensions the other way round.
        optional: no tensor need have its names.
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
        """Whether it gives tensors other names and does nothing else."""
        return self.verb in {"rename", "tie"} and not (self.by or self.transposed)

    def side(self, side: int) -> tuple[Pattern, ...]:
        """Return the names that it has on a side."""
        return (self.fused,) if side == self.made else self.parts

    def cut(self, numbers: Numbers, *, scale: int = 1) -> Cut:
        """Return how it cuts, as numbers; a number that nothing says is None where shapes may tell.

        Args:
            numbers: give words their values.
            scale: how many rows are one: of the scales of a quantised weight, one is of a block of it.

        Raises:
            UsageError: something is not a number.
        """

        def known(expression: Number | None) -> int | None:
            if expression is None:
                return None
            value = numbers.value(expression)
            if value < 1:
                raise UsageError(f"has {expression!r:.60}, which is {value}; expected at least 1", code="out-of-range")
            return value

        def rows(expression: Number | None) -> int | None:
            value = known(expression)
            return None if value is None else -(-value // scale)

        of_parts = None if self.sizes is None else tuple(rows(size) or 0 for size in self.sizes)
        return Cut(
            self.axis, self.verb == "interleave", of_parts, known(self.groups), self.halves, self.verb == "pad",
            rows(self.size), rows(self.padded), known(self.multiple) if scale == 1 else None,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rules:
    """How the tensors of two programs are made of each other; see the module.

    Attributes:
        sides: what the two are called.
        rules: the rules.
        numbers: give words in them their values.
        source: the side that is the source; empty to take that whose names the source has.
        root: where they are from, for messages.
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
            config: the `config.json` of a model, or what is in it, for `config.NAME`; by default what the file names.
            let: values of words, in place of the file's.
            source: the side that is the source.

        Raises:
            UsageError: a file cannot be read, or is not such rules; all faults at once, each with its place.
        """
        place = as_place(path)
        if (shipped := example(str(path))) and not place.is_file():
            place = as_place(shipped)
        elif place.name == str(path) and not place.suffix and not place.is_there():
            raise UsageError(
                f"{path} is neither a file nor the name of built-in rules", code="not-found",
                hint=f"built-in rules: {names(_nearest(str(path)), most=6)}",
            )  # fmt: skip
        faults = Faults(str(path))
        top = read_yaml(place, "rules file", faults)
        faults.raise_if_any(UsageError)
        if isinstance(top, Mapping) and {"mesh", "operators"} & top.keys() and HEADER not in top:
            raise UsageError(
                f"{path} describes how tensors are sharded, not their names and shapes", code="not-rules",
                facts=[f"expected the key {HEADER}"],
            )  # fmt: skip
        if config is None and isinstance(top, Mapping):
            value = top.get("config")
            config = place.parent / value if isinstance(value, str) else value
        read: Any = config or {}
        if config is not None and not isinstance(config, (Mapping, list, int, float)):
            read = read_config(as_place(config))
        data = {**top, "config": plain(read)} if isinstance(top, Mapping) else top
        if let and isinstance(data, dict):
            data["let"] = {**(data.get("let") or {}), **let}
        return cls.of(data, root=str(path), source=source)

    @classmethod
    def of(cls, data: object, *, root: str = "rules", source: str = "") -> Rules:
        """Make rules of what a rules file holds.

        Raises:
            UsageError: it is not such rules; all faults at once, each with its place.
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
        """Return which side a checkpoint is: the one whose names more of its tensors have.

        Raises:
            UsageError: it has the names of neither side, or as many of both.
        """
        if self.source:
            return self.sides.index(self.source)
        counts = self._matches(source.tensors)
        if not any(counts):  # of the weights themselves; those of the optimizer's states have several possible names
            states = optimizer_states(source.every)
            counts = self._matches(weight for name in source.tensors for _, weight in families(name, states))
        if not any(counts):
            shown = names((rule.side(rule.made)[0].text for rule in self.rules), most=3)
            raise UsageError(
                f"{self.root} names no tensor of {source.root}", code="no-match",
                facts=[f"{source.root} has {names(source.tensors, most=3)}", f"{self.root} names {shown}"],
            )  # fmt: skip
        if counts[0] == counts[1]:
            raise UsageError(
                f"the names in {source.root} fit both sides of {self.root}", code="ambiguous-side",
                hint=f"say which is the source: {' or '.join(self.sides)}",
            )  # fmt: skip
        return int(counts[1] > counts[0])

    def _matches(self, weights: Iterable[str]) -> list[int]:
        """Return how many names each side has."""
        counts = [0, 0]
        for name in weights:
            for side in range(2):
                counts[side] += any(p.match(name) is not None for rule in self.rules for p in rule.side(side))
        return counts

    def derived(self, source: Checkpoint) -> Derived:
        """Return what the rules make of a checkpoint, with what each of them did: see `Checkpoint.derive`."""
        from reshard.rules.derive import derive  # above this module

        return derive(source, self)

    def data(self) -> dict[str, Any]:
        """Return the rules as JSON has them; `of` reads it."""
        return {**self.content, **({"source": self.source} if self.source else {}), "config": dict(self.numbers.config)}

    def inverted(self) -> Rules:
        """Return the same rules with the other side first, and that as the source where one was given."""
        other = self.sides[::-1]
        source = next((side for side in self.sides if self.source and side != self.source), "")
        rules = tuple(replace(rule, made=1 - rule.made) for rule in self.rules)
        return replace(
            self, sides=(other[0], other[1]), rules=rules, source=source, content={**self.content, "sides": [*other]}
        )


def examples() -> dict[str, str]:
    """Return the names of the rules that come with the program, and the models and programs they are of.

    >>> examples()["llama-hf-mindformers"]
    "Llama: Hugging Face <-> MindSpore Transformers' LlamaForCausalLM (qkv_concat: false)"
    """
    files = sorted((Path(__file__).parent / "examples").glob("*.yaml"))
    return {path.stem: path.read_text("utf-8").partition("\n")[0].strip("# .") for path in files}


def _nearest(name: str) -> list[str]:
    """Return the names of built-in rules with a part that is like a part of a name; if there is none, all."""
    words = re.split(r"[\W_]+", name.lower())
    alike = [one for one in examples() if any(difflib.get_close_matches(word, one.split("-")) for word in words)]
    return alike or list(examples())


def example(name: str) -> Path | None:
    """Return the rules file that comes with the program under a name; None where none does.

    >>> example("llama-hf-mcore").name, example("llama")
    ('llama-hf-mcore.yaml', None)
    """
    return next((path for path in (Path(__file__).parent / "examples").glob("*.yaml") if path.stem == name), None)


def read_config(place: Place) -> Any:
    """Return what a model's configuration says.

    Raises:
        UsageError: it cannot be read, or is not JSON.
    """
    content = read_small(place, "model configuration", 1 << 22, UsageError)
    try:
        return parse_json(content, [])
    except ValueError as error:
        raise UsageError(f"{place} is not JSON", code="not-json", facts=[str(error)]) from None


def plain(config: object) -> dict[str, Any]:
    """Return the numbers of a configuration, which is all that rules ask for."""
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


def _rule(item: object, where: str, sides: tuple[str, str], faults: Faults) -> Rule | None:
    """Return a rule as the file has it; None where faults were found."""
    before = faults.count
    if not isinstance(item, Mapping) or not set(sides) <= item.keys() <= {*sides, "optional"}:
        expected = f"expected {sides[0]}, {sides[1]} and perhaps optional"
        faults.add(where, f"is {item!r:.80}; {expected}", code="bad-rule")
        return None
    values = [item[side] for side in sides]
    verbs = [n for n, value in enumerate(values) if isinstance(value, Mapping)]
    absent = [n for n, value in enumerate(values) if value is None]
    if len(verbs) + len(absent) > 1 or [] in values or all(isinstance(value, list) for value in values):
        faults.add(
            where, "has a verb, a list or nothing on both sides, or an empty list; expected names on one side",
            code="no-names",
        )  # fmt: skip
        return None
    made = verbs[0] if verbs else 1 - absent[0] if absent else int(not isinstance(values[1], list))
    if not isinstance(item.get("optional", False), bool):
        faults.add(f"{where}.optional", f"is {item['optional']!r:.60}; expected true or false", code="wrong-type")
    verb, options = "rename", dict[str, Any]()
    name = values[made]
    if verbs:
        options = dict(name)
        known = [key for key in options if key in _OPTIONS]
        if len(known) != 1:
            expected = f"expected one of {names(_OPTIONS, most=9)} with a name"
            faults.add(f"{where}.{sides[made]}", f"is {name!r:.80}; {expected}", code="unknown-verb")
            return None
        verb = known[0]
        name = options.pop(verb)
    others = values[1 - made]
    parts = [] if others is None else others if isinstance(others, list) else [others]
    fused = _pattern(name, f"{where}.{sides[made]}", faults)
    patterns = [_pattern(part, f"{where}.{sides[1 - made]}", faults) for part in parts]
    for key in (key for key in options if key not in _OPTIONS[verb] | _OF_ALL):
        expected = f"expected {names(sorted(_OPTIONS[verb] | _OF_ALL), most=9)}"
        faults.add(f"{where}.{sides[made]}.{key}", f"is unknown; {expected}", code="unknown-key")
    fields = _fields(options, f"{where}.{sides[made]}", faults)
    transposed = verb == "transpose" or options.get("transposed", False)
    if not isinstance(transposed, bool):
        expected = "expected true or false"
        faults.add(f"{where}.{sides[made]}.transposed", f"is {transposed!r:.60}; {expected}", code="wrong-type")
    if faults.count > before or fused is None:
        return None
    rule = Rule(
        where, made, tuple(pattern for pattern in patterns if pattern), fused, verb, transposed=transposed,
        optional=item.get("optional", False), **fields,
    )  # fmt: skip
    try:
        _check_options(rule)
        _check_words(rule)
    except UsageError as error:
        faults.add(where, error)
        return None
    return rule


def _pattern(text: object, where: str, faults: Faults) -> Pattern | None:
    if not isinstance(text, str):
        faults.add(where, f"is {text!r:.60}; expected the name of a tensor", code="wrong-type")
        return None
    try:
        return Pattern(text)
    except UsageError as error:
        faults.add(where, error)
        return None


def _fields(options: Mapping[str, Any], where: str, faults: Faults) -> dict[str, Any]:
    """Return what a verb's options say."""

    def checked(key: str, what: str, valid: Callable[[Any], bool]) -> Any:
        value = options.get(key)
        if value is not None and not valid(value):
            faults.add(f"{where}.{key}", f"is {value!r:.60}; expected {what}", code="bad-value")
            return None
        return value

    by = options.get("by", [])
    listed = by if isinstance(by, (list, Mapping)) else [by]
    counted = list(listed.items() if isinstance(listed, Mapping) else [(word, None) for word in listed])
    valid = all(_is_word(word) and (count is None or _is_number(count)) for word, count in counted)
    if not valid or len({word for word, _ in counted}) < len(counted):
        expected = "expected a word, a list of words, or words with how many there are"
        faults.add(f"{where}.by", f"is {by!r:.60}; {expected}", code="bad-value")
    sizes = checked("sizes", "a list of numbers or expressions", lambda value: isinstance(value, list) and bool(value))
    for size in sizes or ():
        if not _is_number(size):
            faults.add(f"{where}.sizes", f"has {size!r:.60}; expected a number or an expression", code="bad-value")
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
    """Raise `UsageError` if the options of a rule contradict each other or its verb; the message is a predicate."""
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
    """Raise `UsageError` if the words in a rule's names do not fit its `by`; the message is a predicate."""
    by, made = {word for word, _ in rule.by}, set(rule.fused.words)
    if rule.verb == "stack" and not by:
        raise UsageError("stacks without by", code="missing-option", hint="say with by which numbers become axes")
    if rule.flat and not by:
        raise UsageError("is flat without by", code="missing-option", hint="say with by which numbers become rows")
    if by & made:
        raise UsageError(
            f"has {names(sorted(by & made))} both in by and in the name of what is made", code="conflicting-options"
        )
    for part in rule.parts:
        if alone := (set(part.words) ^ made) - by or by - set(part.words):
            raise UsageError(
                f"has {names(sorted(alone))} in one name but not in the other", code="unmatched-word",
                hint="name in by what becomes an axis",
            )  # fmt: skip
