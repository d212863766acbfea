"""Rules files: names, numbers, and what in a file is refused, with its place in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from refusals import refused
from safetensors.numpy import save_file

import reshard
from reshard import Rules
from reshard.errors import SourceError, UsageError
from reshard.rules.numbers import Numbers, UnknownError
from reshard.rules.patterns import Family, Pattern, families
from reshard.rules.rules import example
from reshard.strategy.names import optimizer_states

if TYPE_CHECKING:
    from pathlib import Path

HEAD = "reshard-rules: 1\nsides: [a, b]\n"


def read(tmp_path: Path, text: str, **options: Any) -> Rules:
    """Write a rules file and read it."""
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    return Rules.read(path, **options)


# --- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "name", "bound"),
    [
        ("w", "w", {}),
        ("w", "ww", None),
        ("w", "a.w", None),
        ("a.b", "axb", None),
        ("l.{n}.w", "l.0.w", {"n": 0}),
        ("l.{n}.w", "l.120.w", {"n": 120}),
        ("l.{n}.w", "l.01.w", None),  # which would be written as another name
        ("l.{n}.w", "l.-1.w", None),
        ("l.{n}.w", "l.1234567890.w", None),
        ("l.{n}.w", "l.٣.w", None),
        ("l.{n}.{n}", "l.3.3", {"n": 3}),
        ("l.{n}.{n}", "l.3.4", None),
        ("e{n}_{m}.w", "e3_4.w", {"n": 3, "m": 4}),
        ("l.*.w", "l.attention.w", {"*1": "attention"}),
        ("l.*.w", "l.a.b.w", None),
        ("l.*.w", "l..w", None),
        ("*.{n}.*", "x.1.y", {"*1": "x", "n": 1, "*2": "y"}),
    ],
)
def test_a_name_matches_whole(pattern: str, name: str, bound: dict[str, Any] | None) -> None:
    found = Pattern(pattern).match(name)
    assert found == bound
    if found is not None:
        assert Pattern(pattern).write(found) == name


@pytest.mark.parametrize("text", ["", "x" * 5000, "a{l", "a}l", "a{}", "a{1}", "a{l-1}", "a*", "*a.b", "**", "{a}{b}"])
def test_what_is_not_a_pattern(text: str) -> None:
    with refused(UsageError, "bad-name" if len(text) in {0, 5000} else "bad-pattern"):
        Pattern(text)


def test_a_pattern_has_few_words() -> None:
    with refused(UsageError, "bad-pattern", "8 words"):
        Pattern(".".join(f"{{n{number}}}" for number in range(9)))


def test_states_and_scales_have_the_name_of_a_weight() -> None:
    assert (Family("optimizer.state.exp_avg."), "w") in families("optimizer.state.exp_avg.w", {})
    assert (Family("optim.state.", ".exp_avg"), "w") in families("optim.state.w.exp_avg", {})
    assert (Family("", "_scale_inv"), "w") in families("w_scale_inv", {})
    assert list(families("backbone.w", {})) == [(Family(), "backbone.w")]
    every = ["model.w", "optim.state.w.exp_avg", "adam_m.model.w", "vision.model.w", "vision.x", "vision.y"]
    states = optimizer_states(every)
    assert (Family("optim.state.", ".exp_avg"), "w") in families("optim.state.w.exp_avg", states)
    family = Family("optim.state.", ".exp_avg", "model.", "net.")
    assert (family.source_name("model.v"), family.of("net.v")) == ("optim.state.v.exp_avg",) * 2
    steps = [Family("step."), Family("x.state.step."), Family("", ".step")]
    assert [each for each in (family, *steps) if each.is_step] == steps
    assert list(families("vision.model.w", states)) == [(Family(), "vision.model.w")]


def test_a_word_in_front_is_not_that_of_an_optimizer(tmp_path: Path) -> None:
    """`*` is one dotted part, and what no rule names is said, be it named like what one names."""
    source = {"norm.weight": np.ones(3), "vision.encoder.norm.weight": np.ones(3)}
    save_file(source, tmp_path / "model.safetensors")
    rules = Rules.of({"reshard-rules": 1, "sides": ["a", "b"], "rules": [{"a": "norm.weight", "b": "n"}]})
    with refused(SourceError, "unmatched-tensor", "'vision.encoder.norm.weight'"):
        reshard.open(tmp_path / "model.safetensors").derive(rules)


# --- numbers -------------------------------------------------------------------------------------------------------

NUMBERS = Numbers(
    {"heads": 32, "groups": "config.num_key_value_heads | heads", "head": "config.hidden / heads", "twice": "2*heads"},
    {"hidden": 4096, "text_config": {"depth": 3}, "flag": True, "name": "x", "none": None},
)


@pytest.mark.parametrize(
    ("given", "value"),
    [
        (7, 7),
        ("7", 7),
        ("heads", 32),
        (" heads ", 32),
        ("groups", 32),
        ("head", 128),
        ("heads / 4 * head", 1024),
        ("(heads + twice - 1) * 2", 190),
        ("config.text_config.depth", 3),
        ("config.absent | config.none | 5", 5),
        ("config.hidden | 5", 4096),
        ("heads | 1 / 0", 32),  # the other is not looked at
    ],
)
def test_numbers(given: int | str, value: int) -> None:
    assert NUMBERS.value(given) == value


@pytest.mark.parametrize("given", ["other", "config.absent", "config.flag", "config.name", "config.text_config"])
def test_unknown_numbers(given: str) -> None:
    with refused(UnknownError, "unknown-number", given):
        NUMBERS.value(given)


@pytest.mark.parametrize(
    "given",
    [
        "", "1 +", "heads(1)", "__import__('os').system('true')", "[1][0]", "lambda: 1", "heads if heads else 1",
        "heads ** 2", "heads // 2", "heads % 2", "heads and 1", "-heads", "1.5", "'a'", "True", "heads.real",
        "heads = 1", "1; 2", "heads / 5", "1 / 0", "1099511627776 * 2", "9" * 30, "1 + " * 60 + "1", "x" * 300, "\0",
    ],
)  # fmt: skip
def test_what_is_not_a_number(given: str) -> None:
    with refused(UsageError, "not-divisible" if given in {"heads / 5", "1 / 0"} else "bad-number"):
        NUMBERS.value(given)


def test_words_that_go_round() -> None:
    with refused(ValueError, "bad-number"):
        Numbers({"a": "b", "b": "a"}).value("a")
    with refused(ValueError, "bad-number"):
        Numbers({f"a{n}": f"a{n + 1}" for n in range(60)} | {"a60": 1}).value("a0")
    blown = {f"a{n}": " + ".join([f"a{n + 1}"] * 20) for n in range(15)} | {"a15": 0}
    assert Numbers(blown).value("a0") == 0, "each word is worked out once"


# --- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("not-rules", "reshard-rules (1), sides and rules")),
        ("[]", ("not-rules", "rules.yaml")),
        ("reshard-rules: 2\nsides: [a, b]\nrules: []", ("not-rules", "reshard-rules 2")),
        ("mesh: {}\noperators: {}", ("not-rules", "the key reshard-rules")),
        (HEAD + "rules: []", ("bad-value", "$.rules", "list of 0")),
        ("reshard-rules: 1\nrules: [{a: x, b: y}]", ("bad-value", "$.sides is None")),
        ("reshard-rules: 1\nsides: [a, a]\nrules: [{a: x}]", ("bad-value", "$.sides is ['a', 'a']")),
        (HEAD + "more: 1\nrules: [{a: x, b: y}]", ("unknown-key", "$.more", "config, let, note, reshard-rules, rules")),
        (HEAD + "let: [1]\nrules: [{a: x, b: y}]", ("bad-value", "$.let")),
        (HEAD + "let: {config: 1}\nrules: [{a: x, b: y}]", ("bad-value", "$.let")),
        (HEAD + "let: {x: 1.5}\nrules: [{a: x, b: y}]", ("bad-value", "$.let")),
        (HEAD + "config: [1]\nrules: [{a: x, b: y}]", ("wrong-type", "configuration", "list")),
        (HEAD + "note: 1\nrules: [{a: x, b: y}]", ("wrong-type", "$.note")),
    ],
)
def test_what_is_not_rules(tmp_path: Path, text: str, expected: tuple[str, ...]) -> None:
    with refused(UsageError, *expected):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x: [", ("not-yaml", "line 1")),
        (HEAD + "rules: &a [*a]", ("not-yaml", "line 3", "alias")),
        (HEAD + "rules: [{a: !!python/object:os.system x, b: u}]", ("not-yaml", "line 3", "python/object:os.system")),
        (HEAD + "rules:\n - {a: x, a: z, b: y}", ("duplicate-key", "line 4", "'a'")),
        (HEAD + "rules: " + "[rules: " * 3000, ("too-deep", "rules.yaml")),
        (HEAD + "config: none.json\nrules: [{a: x, b: y}]", ("not-found", "none.json")),
    ],
)
def test_files_that_are_not_read(tmp_path: Path, text: str, expected: tuple[str, ...]) -> None:
    with refused(UsageError, *expected):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("5", ("bad-rule", "is 5")),
        ("{a: x}", ("bad-rule", "'a'", "'x'")),
        ("{a: x, b: y, optional: 1}", ("wrong-type", "optional")),
        ("{a: {stack: x}, b: {stack: y}}", ("no-names",)),
        ("{a: {stack: x, by: l}, b: null}", ("no-names",)),
        ("{a: [x, y], b: [u, v]}", ("no-names",)),
        ("{a: [x, y], b: null}", ("wrong-type", ".a", "'x'", "'y'")),
        ("{a: 5, b: u}", ("wrong-type", ".a", "is 5")),
        ("{a: '', b: u}", ("bad-name", ".a")),
        ("{a: 'x{l', b: u}", ("bad-pattern", ".a", "{layer}")),
        ("{a: [x, y], b: z}", ("wrong-count", "2 parts")),
        ("{a: 'x{l}', b: u}", ("unmatched-word", "has l in")),
        ("{a: 'x{l}', b: 'u{k}'}", ("unmatched-word", "has k, l in")),
        ("{a: 'x{l}', b: {stack: u}}", ("missing-option", "name in `by`")),
        ("{a: 'x{l}', b: {stack: u, by: k}}", ("unmatched-word", "has l in")),
        ("{a: 'x{l}', b: {stack: 'u{l}', by: l}}", ("conflicting-options", "has l both")),
        ("{a: 'x{l}', b: {stack: u, by: 5}}", ("bad-value", ".b.by", "is 5")),
        ("{a: 'x{l}', b: {stack: u, by: [l, l]}}", ("bad-value", ".b.by", "'l'")),
        ("{a: x, b: {join: u}}", ("unknown-verb", ".b", "'join'", "'u'")),
        ("{a: x, b: {concat: u, pad: v}}", ("unknown-verb", ".b", "'concat'", "'u'", "'pad'")),
        ("{a: x, b: {concat: u, group: 2}}", ("unknown-key", ".b.group")),
        ("{a: [x, y], b: {concat: u, axis: a}}", ("bad-value", ".b.axis", "'a'")),
        ("{a: [x, y], b: {concat: u, axis: 99}}", ("bad-value", ".b.axis", "is 99")),
        ("{a: [x, y], b: {concat: u, sizes: [1, 2, 3]}}", ("wrong-count", "3 sizes", "2 parts")),
        ("{a: [x, y], b: {interleave: u, groups: [1]}}", ("bad-value", ".b.groups", "[1]")),
        ("{a: x, b: {interleave: u}}", ("missing-option", "halves")),
        ("{a: x, b: {transpose: u, halves: 2}}", ("missing-option", "rules[1]")),
        ("{a: x, b: {transpose: u, rows: 3}}", ("bad-value", ".b.rows")),
        ("{a: x, b: {stack: u, at: -1}}", ("bad-value", ".b.at")),
        ('{a: "x{n}", b: {stack: u, by: n, at: 1, flat: true}}', ("conflicting-options", "rules[1]")),
        ("{a: x, b: {interleave: u, halves: 1, groups: 2}}", ("bad-value", ".b.halves", "is 1", "from 2")),
        ("{a: [x, y], b: {interleave: u, halves: 2, groups: 2}}", ("conflicting-options", "halves")),
        ("{a: [x, y], b: {pad: u, to: 5}}", ("wrong-count", "2 parts")),
        ("{a: ['x{l}', 'y{l}'], b: {tie: u, by: l}}", ("conflicting-options", "ties")),
        ("{a: x, b: {rename: u, flat: true}}", ("missing-option", "flat", "name in `by`")),
        ("{a: x, b: {rename: u, transposed: 1}}", ("wrong-type", ".b.transposed", "is 1")),
        ("{a: [x, y], b: {concat: u, sizes: [1.5, 2]}}", ("bad-value", ".b.sizes", "1.5")),
        ("{a: x, b: {interleave: u, halves: 2}}", ("missing-option", "groups")),
    ],
)
def test_a_rule_that_is_refused(tmp_path: Path, rule: str, expected: tuple[str, ...]) -> None:
    with refused(UsageError, *expected, "$.rules[1]"):
        read(tmp_path, f"{HEAD}rules:\n  - {{a: fine, b: fine_too}}\n  - {rule}\n")


def test_all_faults_at_once(tmp_path: Path) -> None:
    with refused(UsageError, "bad-rule", *(f"$.rules[{number}]" for number in (0, 1, 3))) as caught:
        read(tmp_path, HEAD + "rules: [{a: x}, {a: x, b: {pad: u, to: []}}, {a: x, b: y}, 3]")
    assert caught.value.codes == ("bad-rule", "bad-value")


def test_a_side_that_it_has_not(tmp_path: Path) -> None:
    with refused(UsageError, "no-such-side", "'c'"):
        read(tmp_path, HEAD + "rules: [{a: x, b: y}]", source="c")


@pytest.mark.parametrize(("content", "code"), [("{", "not-json"), ("[]", "wrong-type")])
def test_a_configuration_that_is_refused(tmp_path: Path, content: str, code: str) -> None:
    (tmp_path / "config.json").write_text(content)
    text = HEAD + "rules: [{a: x, b: y}]"
    with refused(UsageError, code, "config"):
        read(tmp_path, text, config=tmp_path / "config.json")
    with refused(UsageError, code, "config"):
        read(tmp_path, text + "\nconfig: config.json")


def test_where_numbers_come_from(tmp_path: Path) -> None:
    """The file's `let`, in place of it what is given; a configuration by name, by path or as it is."""
    (tmp_path / "config.json").write_text('{"heads": 3, "bias": false, "text": {"depth": 2, "name": "x"}}')
    path = tmp_path / "rules.yaml"
    path.write_text(HEAD + "let: {n: config.heads, m: 1}\nconfig: config.json\nrules: [{a: x, b: y}]")
    rules = Rules.read(path, let={"m": 5})
    assert (rules.numbers.value("n"), rules.numbers.value("m")) == (3, 5)
    assert rules.numbers.config == {"heads": 3, "text": {"depth": 2}}, "nothing but numbers is kept"
    assert Rules.read(path, config={"heads": 4}).numbers.value("n") == 4
    path.write_text(HEAD + "let: {n: config.heads}\nconfig: {heads: 6}\nrules: [{a: x, b: y}]")
    assert Rules.read(path).numbers.value("n") == 6
    assert Rules.of(rules.data(), root=str(path)) == rules
    assert rules.inverted().sides == ("b", "a")
    assert rules.inverted().inverted() == rules


def test_examples_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Rules.read("mixtral-hf-mcore").sides == ("hf", "mcore")
    assert example("nothing") is None
    (tmp_path / "mixtral-hf-mcore").write_text(HEAD + "rules: [{a: x, b: y}]")
    assert Rules.read("mixtral-hf-mcore").sides == ("a", "b"), "a file of that name goes before"
