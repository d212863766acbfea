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
            ValueError: something is not a number.
        """

        def known(given: Number | None) -> int | None:
            if given is None:
                return None
            found = numbers.value(given)
            if found < 1:
                raise ValueError(f"has {given!r:.60}, which is {found}; expected at least 1")
            return found

        def rows(given: Number | None) -> int | None:
            found = known(given)
            return None if found is None else -(-found // scale)

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
        faults = Faults(str(path))
        top = read_yaml(place, "rules file", faults)
        faults.raise_if_any(UsageError)
        if isinstance(top, Mapping) and {"mesh", "operators"} & top.keys() and HEADER not in top:
            raise UsageError(
                f"{path}: says how tensors are cut among ranks; expected rules of their names and shapes, with the key "
                f"{HEADER}"
            )
        if config is None and isinstance(top, Mapping):
            said = top.get("config")
            config = place.parent / said if isinstance(said, str) else said
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
            found = f"has {HEADER} {data.get(HEADER)!r:.40}" if isinstance(data, Mapping) else "has no keys"
            raise UsageError(f"{root}: {found}; expected rules, with the keys {HEADER} ({VERSION}), sides and rules")
        for key in data.keys() - _KEYS:
            faults.add(f"$.{key}", f"is not known; expected {names(sorted(_KEYS), most=9)}")
        sides: Any = data.get("sides")
        given: Any = data.get("rules")
        let = data.get("let") or {}
        if not (_is_texts(sides) and len(set(sides)) == len(sides) == 2 and "optional" not in sides):
            faults.add("$.sides", f"is {sides!r:.60}; expected the names of the two sides, such as [hf, mcore]")
        if not isinstance(given, list) or not given or len(given) > _MOST_RULES:
            faults.add("$.rules", f"is a {type(given).__name__}; expected a list of rules, {_MOST_RULES:,} at most")
        if not isinstance(let, Mapping) or not all(_is_word(key) and _is_number(let[key]) for key in let):
            faults.add("$.let", "expected words, and for each a number or an expression")
        faults.raise_if_any(UsageError)
        both = (sides[0], sides[1])
        source = source or data.get("source") or ""
        if source and source not in both:
            raise UsageError(f"{root}: has the sides {names(both)}; {source!r} is neither")
        rules = [_rule(item, f"$.rules[{n}]", both, faults) for n, item in enumerate(given)]
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
                f"{source.root}: has {names(source.tensors, most=3)}; {self.root} names none of them: {shown}"
            )
        if counts[0] == counts[1]:
            raise UsageError(
                f"{self.root}: the names of {source.root} are those of both sides ({names(self.sides)}); say which is "
                "the source"
            )
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
        raise UsageError(f"{place}: is not JSON: {error}") from None


def plain(config: object) -> dict[str, Any]:
    """Return the numbers of a configuration, which is all that rules ask for."""
    if not isinstance(config, Mapping):
        raise UsageError(f"the model configuration is a {type(config).__name__}; expected a JSON object")
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, int) and not isinstance(value, bool):
            found[str(key)] = value
        elif isinstance(value, Mapping) and (below := plain(value)):
            found[str(key)] = below
    return found


def _is_texts(given: object) -> bool:
    return isinstance(given, list) and bool(given) and all(isinstance(item, str) for item in given)


def _is_word(given: object) -> bool:
    return isinstance(given, str) and given.isidentifier() and given != "config"


def _is_number(given: object) -> bool:
    return isinstance(given, (int, str)) and not isinstance(given, bool)


def _rule(item: object, where: str, sides: tuple[str, str], faults: Faults) -> Rule | None:
    """Return a rule as the file has it; None where faults were found."""
    before = faults.count
    if not isinstance(item, Mapping) or not set(sides) <= item.keys() <= {*sides, "optional"}:
        faults.add(where, f"is {item!r:.80}; expected {sides[0]}, {sides[1]} and perhaps optional")
        return None
    given = [item[side] for side in sides]
    verbs = [n for n, one in enumerate(given) if isinstance(one, Mapping)]
    absent = [n for n, one in enumerate(given) if one is None]
    if len(verbs) + len(absent) > 1 or [] in given or all(isinstance(one, list) for one in given):
        faults.add(where, "has a verb, a list or nothing on both sides, or an empty list; expected names on one")
        return None
    made = verbs[0] if verbs else 1 - absent[0] if absent else int(not isinstance(given[1], list))
    if not isinstance(item.get("optional", False), bool):
        faults.add(f"{where}.optional", "expected true or false")
    verb, options = "rename", dict[str, Any]()
    name = given[made]
    if verbs:
        options = dict(name)
        known = [key for key in options if key in _OPTIONS]
        if len(known) != 1:
            faults.add(
                f"{where}.{sides[made]}", f"is {name!r:.80}; expected one of {names(_OPTIONS, most=9)} with a name"
            )
            return None
        verb = known[0]
        name = options.pop(verb)
    others = given[1 - made]
    parts = [] if others is None else others if isinstance(others, list) else [others]
    fused = _pattern(name, f"{where}.{sides[made]}", faults)
    patterns = [_pattern(part, f"{where}.{sides[1 - made]}", faults) for part in parts]
    for key in options.keys() - _OPTIONS[verb] - _OF_ALL:
        faults.add(
            f"{where}.{sides[made]}.{key}", f"is not known; expected {names(sorted(_OPTIONS[verb] | _OF_ALL), most=9)}"
        )
    fields = _fields(options, f"{where}.{sides[made]}", faults)
    transposed = verb == "transpose" or options.get("transposed", False)
    if not isinstance(transposed, bool):
        faults.add(f"{where}.{sides[made]}.transposed", f"is {transposed!r:.60}; expected true or false")
    if faults.count > before or fused is None:
        return None
    rule = Rule(
        where, made, tuple(one for one in patterns if one), fused, verb, transposed=transposed,
        optional=item.get("optional", False), **fields,
    )  # fmt: skip
    if fault := _misfit(rule):
        faults.add(where, fault)
        return None
    return rule


def _pattern(text: object, where: str, faults: Faults) -> Pattern | None:
    if not isinstance(text, str):
        faults.add(where, f"is {text!r:.60}; expected the name of a tensor")
        return None
    try:
        return Pattern(text)
    except ValueError as error:
        faults.add(where, str(error))
        return None


def _fields(options: Mapping[str, Any], where: str, faults: Faults) -> dict[str, Any]:
    """Return what a verb's options say."""

    def checked(key: str, what: str, valid: Callable[[Any], bool]) -> Any:
        given = options.get(key)
        if given is not None and not valid(given):
            faults.add(f"{where}.{key}", f"is {given!r:.60}; expected {what}")
            return None
        return given

    by = options.get("by", [])
    listed = by if isinstance(by, (list, Mapping)) else [by]
    counted = list(listed.items() if isinstance(listed, Mapping) else [(word, None) for word in listed])
    valid = all(_is_word(word) and (count is None or _is_number(count)) for word, count in counted)
    if not valid or len({word for word, _ in counted}) < len(counted):
        faults.add(f"{where}.by", f"is {by!r:.60}; expected a word, a list of words, or words with how many there are")
    sizes = checked("sizes", "a list of numbers or expressions", lambda given: isinstance(given, list) and bool(given))
    for size in sizes or ():
        if not _is_number(size):
            faults.add(f"{where}.sizes", f"has {size!r:.60}; expected a number or an expression")
    number = "a number or an expression"
    return {
        "axis": checked("axis", "a small whole number", lambda given: _is_small(given, -_MOST_AXES)) or 0,
        "sizes": None if sizes is None else tuple(sizes),
        "groups": checked("groups", number, _is_number),
        "halves": checked("halves", "a small whole number from 2 on", lambda given: _is_small(given, 2)) or 0,
        "size": checked("size", number, _is_number),
        "padded": checked("to", number, _is_number),
        "multiple": checked("multiple", number, _is_number),
        "by": tuple(counted),
        "flat": bool(checked("flat", "true or false", lambda given: isinstance(given, bool))),
    }


def _is_small(given: object, least: int) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and least <= given <= _MOST_AXES


def _misfit(rule: Rule) -> str:
    """Return what in a rule does not go together; nothing as a rule."""
    by, made = {word for word, _ in rule.by}, set(rule.fused.words)
    one = rule.verb not in {"concat", "interleave", "tie"}
    wrong = {
        "interleaves one part; say with halves how many pieces a group has": (
            rule.verb == "interleave" and len(rule.parts) == 1 and not rule.halves
        ),
        "has halves; say with groups how many of them there are": rule.halves and rule.groups is None,
        "has halves and several parts; expected one of these": rule.halves and len(rule.parts) > 1,
        f"has {len(rule.parts)} parts; {rule.verb} is of one: concat, interleave and tie are of several": (
            one and len(rule.parts) > 1
        ),
        "stacks; say with by which numbers become axes": rule.verb == "stack" and not by,
        "ties; what is equal has no by and is not transposed": rule.verb == "tie" and (by or rule.transposed),
        f"has {len(rule.sizes or ())} sizes and {len(rule.parts)} parts; expected one for each": (
            rule.sizes is not None and len(rule.sizes) != len(rule.parts)
        ),
        "is flat; say with by which numbers become rows": rule.flat and not by,
        f"has {names(sorted(by & made))} in by and in the name of what is made": by & made,
    }
    for part in rule.parts:
        alone = (set(part.words) ^ made) - by or by - set(part.words)
        said = f"has {names(sorted(alone))} in one name and not in the other; name in by what becomes an axis"
        wrong[said] = bool(alone)
    return next((text for text, is_so in wrong.items() if is_so), "")
