"""Rules files: names, numbers, and what in a file is refused, with its place in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import reshard
from reshard import Rules
from reshard.errors import SourceError, UsageError
from reshard.rules.names import Family, Pattern, families
from reshard.rules.numbers import Numbers, UnknownError
from reshard.rules.rules import example
from reshard.strategy.names import optimizer_states

if TYPE_CHECKING:
    from pathlib import Path

HEAD = "reshard-rules: 1\nsides: [a, b]\n"


def refused(tmp_path: Path, text: str, **options: Any) -> str:
    """What is said of a file."""
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        Rules.read(path, **options)
    return str(error.value).replace(f"{path}: ", "").replace(str(tmp_path), "…")


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
    with pytest.raises(ValueError, match=r"is empty|letters|brace|star"):
        Pattern(text)


def test_a_pattern_has_few_words() -> None:
    with pytest.raises(ValueError, match="more than 8"):
        Pattern(".".join(f"{{n{number}}}" for number in range(9)))


def test_states_and_scales_have_the_name_of_a_weight() -> None:
    assert (Family("optimizer.state.exp_avg."), "w") in families("optimizer.state.exp_avg.w", {})
    assert (Family("optim.state.", ".exp_avg"), "w") in families("optim.state.w.exp_avg", {})
    assert (Family("", "_scale_inv"), "w") in families("w_scale_inv", {})
    assert list(families("backbone.w", {})) == [(Family(), "backbone.w")]
    every = ["model.w", "optim.state.w.exp_avg", "adam_m.model.w", "vision.model.w", "vision.x", "vision.y"]
    states = optimizer_states(every)
    assert (Family("optim.state.", ".exp_avg"), "w") in families("optim.state.w.exp_avg", states)
    assert Family("optim.state.", ".exp_avg", "model.").of("model.v") == "optim.state.v.exp_avg"
    assert list(families("vision.model.w", states)) == [(Family(), "vision.model.w")]


def test_a_word_in_front_is_not_that_of_an_optimizer(tmp_path: Path) -> None:
    """`*` is one dotted part, and what no rule names is said, be it named like what one names."""
    source = {"norm.weight": np.ones(3), "vision.encoder.norm.weight": np.ones(3)}
    save_file(source, tmp_path / "model.safetensors")
    rules = Rules.of({"reshard-rules": 1, "sides": ["a", "b"], "rules": [{"a": "norm.weight", "b": "n"}]})
    with pytest.raises(SourceError, match=r"'vision.encoder.norm.weight': is in no rule"):
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
    with pytest.raises(UnknownError, match="needs"):
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
    with pytest.raises(ValueError, match="^(has|needs) "):
        NUMBERS.value(given)


def test_words_that_go_round() -> None:
    with pytest.raises(ValueError, match="of too many others"):
        Numbers({"a": "b", "b": "a"}).value("a")
    with pytest.raises(ValueError, match="of too many others"):
        Numbers({f"a{n}": f"a{n + 1}" for n in range(60)} | {"a60": 1}).value("a0")
    blown = {f"a{n}": " + ".join([f"a{n + 1}"] * 20) for n in range(15)} | {"a15": 0}
    assert Numbers(blown).value("a0") == 0, "each word is worked out once"


# --- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no keys; expected rules, with the keys reshard-rules (1), sides and rules"),
        ("[]", "has no keys"),
        ("a: 1", "has reshard-rules None; expected rules"),
        ("reshard-rules: 2\nsides: [a, b]\nrules: []", "has reshard-rules 2; expected rules"),
        ("x: [", "is not YAML: line 1: "),
        ("mesh: {}\noperators: {}", "says how tensors are cut among ranks; expected rules of their names and shapes"),
        (HEAD + "rules: &a [*a]", "is not YAML: line 3: has an alias"),
        (HEAD + "rules: [{a: *x, b: u}]", "put a name that begins with * in quotes"),
        (HEAD + "rules: [{a: !!python/object:os.system x, b: u}]", "could not determine a constructor"),
        (HEAD + "rules: [{a: x, b: {concat: a.{l}.w, by: e}}]", "is not YAML: line 3: while parsing a flow mapping"),
        (HEAD + "rules:\n - {a: x, a: z, b: y}", "line 4: has the key 'a' a second time"),
        (HEAD + "rules: " + "[rules: " * 3000, "nested too deeply"),
        (HEAD + "rules: []", "$.rules: is a list; expected a list of rules, 10,000 at most"),
        (HEAD + "rules: {}", "$.rules: is a dict"),
        (HEAD + "rules: [" + "{a: x, b: y}," * 10_001 + "]", "10,000 at most"),
        ("reshard-rules: 1\nrules: [{a: x, b: y}]", "$.sides: is None; expected the names of the two sides"),
        ("reshard-rules: 1\nsides: [a, a]\nrules: [{a: x}]", "$.sides: is ['a', 'a']"),
        ("reshard-rules: 1\nsides: [a, optional]\nrules: [{a: x}]", "$.sides: is"),
        ("reshard-rules: 1\nsides: [a, b, a]\nrules: [{a: x}]", "$.sides: is"),
        (HEAD + "more: 1\nrules: [{a: x, b: y}]", "$.more: is not known; expected config, let, reshard-rules, rules"),
        (HEAD + "let: [1]\nrules: [{a: x, b: y}]", "$.let: expected words, and for each a number or an expression"),
        (HEAD + "let: {config: 1}\nrules: [{a: x, b: y}]", "$.let: "),
        (HEAD + "let: {x: 1.5}\nrules: [{a: x, b: y}]", "$.let: "),
        (HEAD + "let: {x: true}\nrules: [{a: x, b: y}]", "$.let: "),
        (HEAD + "config: none.json\nrules: [{a: x, b: y}]", "…/none.json: cannot be read: No such file or directory"),
        (HEAD + "config: [1]\nrules: [{a: x, b: y}]", "the model configuration is a list; expected a JSON object"),
    ],
)
def test_what_is_not_rules(tmp_path: Path, text: str, said: str) -> None:
    assert said in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("5", ": is 5; expected a, b and perhaps optional"),
        ("{a: x}", ": is {'a': 'x'}; expected a, b and perhaps optional"),
        ("{a: x, b: y, c: z}", ": is {'a': 'x', 'b': 'y', 'c': 'z'}; expected a, b and perhaps optional"),
        ("{a: x, b: y, optional: 1}", ".optional: expected true or false"),
        ("{a: {stack: x}, b: {stack: y}}", ": has a verb, a list or nothing on both sides"),
        ("{a: null, b: null}", ": has a verb, a list or nothing on both sides"),
        ("{a: {stack: x, by: l}, b: null}", ": has a verb, a list or nothing on both sides"),
        ("{a: [x, y], b: [u, v]}", ": has a verb, a list or nothing on both sides, or an empty list"),
        ("{a: [], b: u}", ": has a verb, a list or nothing on both sides, or an empty list"),
        ("{a: [x, y], b: null}", ".a: is ['x', 'y']; expected the name of a tensor"),
        ("{a: 5, b: u}", ".a: is 5; expected the name of a tensor"),
        ("{a: yes, b: u}", ".a: is True; expected the name of a tensor"),
        ("{a: '', b: u}", ".a: is empty"),
        ("{a: 'x{l', b: u}", ".a: has a brace that is not part of a word in braces, such as {layer}"),
        ("{a: 'x*', b: u}", ".a: has a star that is not a whole dotted part"),
        ("{a: [x, y], b: z}", ": has 2 parts; rename is of one: concat, interleave and tie are of several"),
        ("{a: 'x{l}', b: u}", ": has l in one name and not in the other; name in by what becomes an axis"),
        ("{a: 'x.*', b: '*.u.*'}", ": has *2 in one name and not in the other"),
        ("{a: 'x{l}', b: 'u{k}'}", ": has k, l in one name and not in the other"),
        ("{a: 'x{l}', b: {stack: u}}", ": stacks; say with by which numbers become axes"),
        ("{a: 'x{l}', b: {stack: u, by: k}}", ": has l in one name and not in the other"),
        ("{a: 'x{l}', b: {stack: 'u{l}', by: l}}", ": has l in by and in the name of what is made"),
        ("{a: 'x{l}', b: {stack: u, by: 5}}", ".b.by: is 5; expected a word, a list of words, or words with how many"),
        ("{a: 'x{l}', b: {stack: u, by: [l, l]}}", ".b.by: is ['l', 'l']"),
        ("{a: 'x{l}', b: {stack: u, by: [[l]]}}", ".b.by: is [['l']]"),
        ("{a: 'x{l}', b: {stack: u, by: {l: 1.5}}}", ".b.by: is {'l': 1.5}"),
        ("{a: x, b: {join: u}}", ".b: is {'join': 'u'}; expected one of rename, stack, transpose, tie, concat"),
        ("{a: x, b: {concat: u, pad: v}}", ".b: is {'concat': 'u', 'pad': 'v'}; expected one of"),
        ("{a: x, b: {concat: u, group: 2}}", ".b.group: is not known; expected axis, by, flat, sizes, transposed"),
        ("{a: [x, y], b: {concat: u, axis: a}}", ".b.axis: is 'a'; expected a small whole number"),
        ("{a: [x, y], b: {concat: u, axis: 99}}", ".b.axis: is 99"),
        ("{a: [x, y], b: {concat: u, axis: true}}", ".b.axis: is True"),
        ("{a: [x, y], b: {concat: u, sizes: 5}}", ".b.sizes: is 5; expected a list of numbers or expressions"),
        ("{a: [x, y], b: {concat: u, sizes: [1.5, 2]}}", ".b.sizes: has 1.5; expected a number or an expression"),
        ("{a: [x, y], b: {concat: u, sizes: [1, 2, 3]}}", ": has 3 sizes and 2 parts; expected one for each"),
        ("{a: [x, y], b: {interleave: u, groups: [1]}}", ".b.groups: is [1]; expected a number or an expression"),
        ("{a: x, b: {interleave: u}}", ": interleaves one part; say with halves how many pieces a group has"),
        ("{a: x, b: {interleave: u, halves: 2}}", ": has halves; say with groups how many of them there are"),
        ("{a: x, b: {interleave: u, halves: 1, groups: 2}}", ".b.halves: is 1; expected a small whole number from 2"),
        ("{a: [x, y], b: {interleave: u, halves: 2, groups: 2}}", ": has halves and several parts"),
        ("{a: [x, y], b: {pad: u, to: 5}}", ": has 2 parts; pad is of one"),
        ("{a: ['x{l}', 'y{l}'], b: {tie: u, by: l}}", ": ties; what is equal has no by and is not transposed"),
        ("{a: x, b: {rename: u, flat: true}}", ": is flat; say with by which numbers become rows"),
        ("{a: x, b: {rename: u, flat: 1}}", ".b.flat: is 1; expected true or false"),
        ("{a: x, b: {rename: u, transposed: 1}}", ".b.transposed: is 1; expected true or false"),
    ],
)
def test_a_rule_that_is_refused(tmp_path: Path, rule: str, said: str) -> None:
    text = refused(tmp_path, f"{HEAD}rules:\n  - {{a: fine, b: fine_too}}\n  - {rule}\n")
    assert f"$.rules[1]{said}" in text


def test_all_faults_at_once(tmp_path: Path) -> None:
    text = refused(tmp_path, HEAD + "rules: [{a: x}, {a: x, b: {pad: u, to: []}}, {a: x, b: y}, 3]")
    assert "3 faults" in text
    assert all(f"$.rules[{number}]" in text for number in (0, 1, 3))


def test_a_side_that_it_has_not(tmp_path: Path) -> None:
    assert "has the sides a, b; 'c' is neither" in refused(tmp_path, HEAD + "rules: [{a: x, b: y}]", source="c")


@pytest.mark.parametrize(("content", "said"), [("{", "is not JSON"), ("[]", "is a list; expected a JSON object")])
def test_a_configuration_that_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "config.json").write_text(content)
    text = HEAD + "rules: [{a: x, b: y}]"
    assert said in refused(tmp_path, text, config=tmp_path / "config.json")
    assert said in refused(tmp_path, text + "\nconfig: config.json")


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
