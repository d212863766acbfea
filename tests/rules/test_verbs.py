"""What each verb makes, both ways, on numbers that can be read; and what does not add up is refused, with why."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import write_file, write_ranks
from random_rules import VERBS, sample
from refusals import failed, refused
from truths import assert_arrays

import reshard
from reshard import Layout, Rules, Strategy
from reshard.errors import SourceError, UsageError

if TYPE_CHECKING:
    from helpers import Array


def rules(*items: dict[str, Any], let: dict[str, Any] | None = None, source: str = "") -> Rules:
    content = {"reshard-rules": 1, "sides": ["a", "b"], "let": let or {}, "rules": list(items)}
    return Rules.of(content, source=source)


def opened(tmp_path: Path, tensors: dict[str, Any]) -> reshard.Checkpoint:
    """A checkpoint of tensors: arrays, or shapes of ones that hold numbers from 0 on."""
    arrays = {
        name: value if isinstance(value, np.ndarray) else np.arange(np.prod(value), dtype=np.float32).reshape(value)
        for name, value in tensors.items()
    }
    return reshard.open(write_file(tmp_path / "source.safetensors", arrays))


def rows(*values: float) -> Array:
    return np.array([[value, -value] for value in values], np.float32)


@pytest.mark.parametrize(
    ("rule", "parts", "made"),
    [
        ({"a": "x", "b": "y"}, {"x": rows(1, 2)}, {"y": rows(1, 2)}),
        (
            {"a": "x.{l}", "b": {"stack": "y", "by": "l"}},
            {"x.0": rows(1, 2), "x.1": rows(3, 4)},
            {"y": np.stack([rows(1, 2), rows(3, 4)])},
        ),
        (
            {"a": ["x", "z"], "b": {"concat": "y", "sizes": [1, 3]}},
            {"x": rows(1), "z": rows(2, 3, 4)},
            {"y": rows(1, 2, 3, 4)},
        ),
        (
            {"a": ["x", "z"], "b": {"interleave": "y"}},
            {"x": rows(1, 2), "z": rows(3, 4)},
            {"y": rows(1, 3, 2, 4)},
        ),
        (
            {"a": ["q", "k", "v"], "b": {"interleave": "y", "groups": 2, "sizes": [2, 1, 1]}},
            {"q": rows(1, 2, 3, 4), "k": rows(5, 6), "v": rows(7, 8)},
            {"y": rows(1, 2, 5, 7, 3, 4, 6, 8)},
        ),
        (  # of two heads: each has the first halves of its pairs, then the second ones; RoPE
            {"a": "x", "b": {"interleave": "y", "groups": 2, "halves": 2}},
            {"x": rows(1, 2, 3, 4, 5, 6, 7, 8)},
            {"y": rows(1, 3, 2, 4, 5, 7, 6, 8)},
        ),
        (
            {"a": "x", "b": {"transpose": "y"}},
            {"x": rows(1, 2, 3)},
            {"y": np.array([[1, 2, 3], [-1, -2, -3]], np.float32)},
        ),
        (
            {"a": "x", "b": {"pad": "y", "size": 3, "multiple": 4}},
            {"x": rows(1, 2, 3)},
            {"y": rows(1, 2, 3, 0) * np.float32(1)},
        ),
        ({"a": ["x", "z"], "b": {"tie": "y"}}, {"x": rows(1, 2), "z": rows(1, 2)}, {"y": rows(1, 2)}),
    ],
)
def test_both_ways(tmp_path: Path, rule: dict[str, Any], parts: dict[str, Array], made: dict[str, Array]) -> None:
    if "y" in made and "pad" in str(rule):
        made["y"][len(parts["x"]) :] = 0
    some = rules(rule)
    assert_arrays(opened(tmp_path, parts).derive(some), made)
    assert_arrays(opened(tmp_path, made).derive(some), parts)
    assert_arrays(opened(tmp_path, parts).derive(some.inverted()), made)


def test_what_follows_a_weight(tmp_path: Path) -> None:
    """States, whose names say so before or behind; the step of each; what every rank has of the training."""
    some = rules({"a": ["x", "z"], "b": {"concat": "y", "sizes": [1, 2]}}, {"a": "*.inv_freq", "b": None})
    parts = {"x": rows(1), "z": rows(2, 3)}
    step = np.array(7, np.float32)
    given = {
        **parts, "x.exp_avg": rows(4), "z.exp_avg": rows(5, 6), "adam_m.x": rows(7), "adam_m.z": rows(8, 9),
        "x.step": step, "z.step": step, "global_step": np.array([3], np.int32), "rope.inv_freq": rows(0),
    }  # fmt: skip
    made = {
        "y": rows(1, 2, 3), "y.exp_avg": rows(4, 5, 6), "adam_m.y": rows(7, 8, 9), "y.step": step,
        "global_step": given["global_step"],
    }  # fmt: skip
    found = some.derived(opened(tmp_path, given)._record)
    assert_arrays(reshard.Checkpoint(found.checkpoint), made)
    assert (found.dropped, found.kept) == (("rope.inv_freq",), ("global_step",))
    del given["rope.inv_freq"]
    assert_arrays(opened(tmp_path, made).derive(some), given)


def test_of_several_rules_the_nearest(tmp_path: Path) -> None:
    some = rules(
        {"a": "layers.{l}.*.w", "b": "h.{l}.*.w"},
        {"a": "layers.{l}.norm.w", "b": "h.{l}.layernorm.w"},
        {"a": "layers.2.norm.w", "b": "last.w"},
    )
    one = {"layers.1.mlp.w": rows(1), "layers.1.norm.w": rows(2), "layers.2.norm.w": rows(3)}
    two = {"h.1.mlp.w": rows(1), "h.1.layernorm.w": rows(2), "last.w": rows(3)}
    assert_arrays(opened(tmp_path, one).derive(some), two)
    assert_arrays(opened(tmp_path, two).derive(some), one)


W = (4, 6)
CONCAT = {"a": ["x", "z"], "b": {"concat": "y"}}
STACK = {"a": "x.{l}", "b": {"stack": "y", "by": "l"}}
TIE = {"a": ["x", "z"], "b": {"tie": "y"}}


def interleave(**options: Any) -> dict[str, Any]:
    return {"a": ["x", "z"], "b": {"interleave": "y", **options}}


def pad(**options: Any) -> dict[str, Any]:
    return {"a": "x", "b": {"pad": "y", **options}}


@pytest.mark.parametrize(
    ("tensors", "rule", "expected"),
    [
        ({"x": W, "z": W, "q": W}, CONCAT, ("unmatched-tensor", "'q'")),
        ({"x": W}, CONCAT, ("missing-tensor", "'z'")),
        ({"x.0": W, "x.2": W}, STACK, ("missing-tensor", "'x.1'", "x.0", "x.2")),
        ({"x.0": W}, {"a": "x.{l}", "b": {"stack": "y", "by": {"l": 10**9}}}, ("missing-tensor", "'x.1'")),
        ({"x.0": W, "x.1": W}, {"a": "x.{l}", "b": {"stack": "y", "by": {"l": 1}}}, ("wrong-count", "2 parts", "[1]")),
        ({"y": W}, {"a": "x.{l}", "b": {"stack": "y", "by": {"l": 3}}}, ("wrong-shape", "[4, 6]", "[3]")),
        ({"y": (2**18, 1)}, STACK, ("too-many-tensors", "262,144", "131,072")),
        (
            {"y.step": (), "y": W},
            {"a": "x.{l}", "b": {"stack": "y", "by": {"l": 10**9}}},
            ("too-many-tensors", "1,000,000,000"),
        ),
        ({"y.step": ()}, STACK, ("unknown-count", "y.step")),
        ({"y": W}, {"a": "x.{l}", "b": {"stack": "y", "by": {"l": 0}}}, ("out-of-range", "0 of", "least 1")),
        ({"y": W}, {"a": "x.{l}", "b": {"stack": "y", "by": "l", "flat": True}}, ("unknown-count", "by")),
        (
            {"y": W},
            {"a": "x.{l}", "b": {"stack": "y", "by": {"l": 3}, "flat": True}},
            ("not-divisible", "3 equal"),
        ),
        ({"y": (4,)}, {"a": "x.{l}.{e}", "b": {"stack": "y", "by": ["l", "e"]}}, ("wrong-shape", "[4]", "2 axes")),
        ({"x.0": W, "x.1": (4, 7)}, STACK, ("wrong-shape", "x.{l}", "[4, 6]", "[4, 7]")),
        ({"x": W, "z": (4, 7)}, CONCAT, ("wrong-shape", "[4, 6]", "[4, 7]")),
        ({"x": W, "z": np.zeros(W, np.float16)}, CONCAT, ("wrong-dtype", "float16", "float32")),
        ({"x": (6, 2), "z": (2, 2)}, CONCAT, ("missing-sizes", "6 and", "2 rows")),
        ({"x": (6, 2), "z": (2, 2)}, interleave(groups=2), ("missing-sizes", "6 and", "2 rows")),
        (
            {"y": (12, 2)},
            {"a": ["q", "k", "v"], "b": {"interleave": "y", "groups": 2}},
            ("missing-sizes", "3 parts", "12 rows"),
        ),
        (
            {"y": (10, 2)},
            {"a": ["x", "z"], "b": {"concat": "y", "sizes": [4, 5]}},
            ("row-mismatch", "10 rows", "1 groups", "[4, 5]"),
        ),
        (
            {"x": (4, 2), "z": (6, 2)},
            {"a": ["x", "z"], "b": {"concat": "y", "sizes": [5, 5]}},
            ("row-mismatch", "[4, 6]"),
        ),
        ({"x": W, "z": W}, {"a": ["x", "z"], "b": {"concat": "y", "axis": 2}}, ("out-of-range", "axis 2", "[4, 6]")),
        ({"y": (12, 2)}, interleave(groups=0), ("out-of-range", "has 0", "is 0", "least 1")),
        ({"y": (12, 2)}, interleave(groups="heads / 5"), ("not-divisible", "'heads / 5'", "and 4", "5 is")),
        ({"y": (12, 2)}, interleave(groups="other"), ("unknown-number", "needs other", "let")),
        ({"y": (12, 2)}, interleave(groups="exit(1)"), ("bad-number", "'exit(1)'", "config.NAME")),
        (
            {"x": (10, 2)},
            {"a": "x", "b": {"interleave": "y", "groups": 3, "halves": 2}},
            ("not-divisible", "3 groups", "of 2"),
        ),
        ({"x": (10, 2)}, pad(to=8), ("row-mismatch", "10 rows", "8 with")),
        ({"x": (10, 2)}, pad(size=10), ("missing-size", "multiple")),
        ({"x": (9, 2)}, pad(size=10, to=16), ("row-mismatch", "9 rows", "says 10")),
        ({"x": (4,)}, {"a": "x", "b": {"transpose": "y"}}, ("wrong-dimensions", "[4]")),
        ({"y": ()}, CONCAT, ("wrong-dimensions",)),
        ({"x": np.ones(W), "z": np.zeros(W)}, TIE, ("not-equal", "'x'", "'z'")),
        ({"x": np.zeros(W), "z": np.zeros(W, np.float32)}, TIE, ("not-equal",)),
        ({"x": np.array(1.0), "z": np.array(2.0)}, TIE, ("not-equal",)),
        (
            {"x": W, "z": W, "x.step": np.array(1.0), "z.step": np.array(2.0)},
            CONCAT,
            ("not-equal", "y.step", "'x.step'", "'z.step'"),
        ),
        ({"x": W, "z": W, "x.exp_avg": W}, CONCAT, ("missing-tensor", "y.exp_avg", "'z.exp_avg'", "x.exp_avg")),
        ({"y": (11, 2)}, CONCAT, ("not-divisible", "11 rows", "2 equal")),
        ({"y": (10, 2)}, pad(to=10), ("missing-size", "set `size`")),
        ({"y": (12, 2)}, pad(size=10, to=16), ("row-mismatch", "12 rows", "says 16")),
    ],
)
def test_what_does_not_add_up(
    tmp_path: Path, tensors: dict[str, Any], rule: dict[str, Any], expected: tuple[str, ...]
) -> None:
    with refused(SourceError, *expected) as error:
        opened(tmp_path, tensors).derive(rules(rule, let={"heads": 4}))
    assert "$.rules[0]" in str(error.value) or "tensor 'q'" in str(error.value)


SCALED = {"x": (256, 256), "z": (256, 256), "x_scale_inv": (2, 2), "z_scale_inv": (2, 2)}


@pytest.mark.parametrize(
    ("tensors", "rule", "expected"),
    [
        (
            {"x": (200, 256), "x_scale_inv": (2, 2), "z": (200, 256), "z_scale_inv": (2, 2)},
            CONCAT,
            ("not-divisible", "200"),
        ),
        ({"y": (400, 256), "y_scale_inv": (4, 2)}, CONCAT, ("not-divisible", "y_scale_inv", "200")),
        (SCALED, interleave(), ("not-divisible", "row 1 of")),
        (SCALED, interleave(groups=4), ("not-divisible", "64 of")),
        (
            {**SCALED, "z_scale_inv": (2, 3)},
            CONCAT,
            ("wrong-shape", "[2, 3]", "'z'", "[256, 256]", "[2, 2]"),
        ),
        (
            {"x": (256, 200), "z": (256, 256), "x_scale_inv": (2, 2), "z_scale_inv": (2, 2)},
            {"a": ["x", "z"], "b": {"concat": "y", "axis": 1, "sizes": [200, 256]}},
            ("not-divisible", "200"),
        ),
        (
            {"x.0": (100, 128), "x.1": (100, 128), "x.0_scale_inv": (1, 1), "x.1_scale_inv": (1, 1)},
            {"a": "x.{e}", "b": {"stack": "y", "by": "e", "flat": True}},
            ("not-divisible", "100"),
        ),
    ],
)
def test_scales_whose_blocks_would_be_cut(
    tmp_path: Path, tensors: dict[str, Any], rule: dict[str, Any], expected: tuple[str, ...]
) -> None:
    with refused(SourceError, *expected):
        opened(tmp_path, tensors).derive(rules(rule))


def test_scales_without_their_weights(tmp_path: Path) -> None:
    scales = {name: shape for name, shape in SCALED.items() if "scale" in name}
    with refused(SourceError, "missing-tensor", "'x'"):
        opened(tmp_path, {"w": W, **scales}).derive(rules(CONCAT, {"a": "w", "b": "v"}))


@pytest.mark.parametrize("options", [{"sizes": [128, 128], "groups": 2}, {"groups": 2}, {"groups": 1}])
def test_scales_follow_their_weights(tmp_path: Path, options: dict[str, Any]) -> None:
    """What is done to 128 rows of weights is done to one of scales; the last block may be short."""
    some = rules(interleave(**options))
    both = {
        **SCALED,
        **{name: np.ascontiguousarray(rows(*range(2)) + n) for n, name in enumerate(["x_scale_inv", "z_scale_inv"])},
    }
    derived = opened(tmp_path, both).derive(some)
    weights, scales = np.asarray(derived["y"]), np.asarray(derived["y_scale_inv"])
    of = {"x": np.arange(256 * 256, dtype=np.float32).reshape(256, 256)}
    order = [0, 2, 1, 3] if options["groups"] == 2 else [0, 1, 2, 3]
    parts = [of["x"][:128], of["x"][128:], of["x"][:128], of["x"][128:]]
    assert np.array_equal(weights, np.concatenate([parts[n] for n in order]))
    assert np.array_equal(scales, np.concatenate([both["x_scale_inv"], both["z_scale_inv"]])[order])
    short = {"x": (256, 6), "z": (200, 6), "x_scale_inv": (2, 1), "z_scale_inv": (2, 1)}
    sized = {"a": ["x", "z"], "b": {"concat": "y", "sizes": [256, 200]}}
    joined = opened(tmp_path, short).derive(rules(sized))
    assert (joined["y"].shape, joined["y_scale_inv"].shape) == ((456, 6), (4, 1))
    small = rules({"a": ["x", "z"], "b": {"concat": "y", "sizes": [8, 4]}}, let={"scale_block": 4})
    assert opened(tmp_path, {"x": (8, 4), "z": (4, 4), "x_scale_inv": (2, 1), "z_scale_inv": (1, 1)}).derive(small)


@pytest.mark.parametrize(
    ("block", "expected"),
    [(0, ("out-of-range", "$.let.scale_block", "is 0")), ("n", ("unknown-number", "scale_block", "needs n"))],
)
def test_a_size_of_scales_that_is_none(tmp_path: Path, block: object, expected: tuple[str, ...]) -> None:
    with refused(UsageError, *expected):
        opened(tmp_path, SCALED).derive(rules(CONCAT, let={"scale_block": block}))


def test_rules_that_are_in_each_others_way(tmp_path: Path) -> None:
    two = {"x.1": W, "q": W}
    same = rules({"a": "x.{l}", "b": "y.{l}"}, {"a": "x.{k}", "b": "z.{k}"}, {"a": "q", "b": "r"})
    with refused(SourceError, "ambiguous-rules", "'x.1'", "$.rules[0]", "$.rules[1]"):
        opened(tmp_path, two).derive(same)
    with refused(SourceError, "duplicate-name", "'r'", "$.rules[0]", "$.rules[1]"):
        opened(tmp_path, two).derive(rules({"a": "x.1", "b": "r"}, {"a": "q", "b": "r"}))
    kept = {"x": W, "global_step": np.array([1], np.int32)}
    with refused(SourceError, "duplicate-name", "'global_step'"):
        opened(tmp_path, kept).derive(rules({"a": "x", "b": "global_step"}, source="a"))
    with refused(SourceError, "no-match", "$.rules[1]", "absent.{l}"):
        opened(tmp_path, {"q": W}).derive(rules({"a": "q", "b": "r"}, {"a": "absent.{l}", "b": "r.{l}"}))


def test_which_side_is_the_source(tmp_path: Path) -> None:
    with refused(UsageError, "no-match", "has q", "names y"):
        opened(tmp_path, {"q": W}).derive(rules({"a": "x", "b": "y"}))
    turned = rules({"a": "x", "b": {"transpose": "x"}})
    with refused(UsageError, "ambiguous-side", "a or b"):
        opened(tmp_path, {"x": W}).derive(turned)
    for side in ("a", "b"):
        some = rules({"a": "x", "b": {"transpose": "x"}}, source=side)
        assert opened(tmp_path, {"x": W}).derive(some)["x"].shape == (6, 4)


def test_twice_is_refused(tmp_path: Path) -> None:
    one = opened(tmp_path, {"x": W}).derive(rules({"a": "x", "b": "y"}))
    with refused(UsageError, "already-derived"):
        one.derive(rules({"a": "y", "b": "z"}))


def test_one_stage_is_refused(tmp_path: Path) -> None:
    layout = Layout.of([2], [0, -1])
    strategy = Strategy.of({"x": {0: layout}, "z": {1: layout}})
    full = {"x": np.ones(W, np.float32), "z": np.ones(W, np.float32)}
    stage = reshard.open(write_ranks(tmp_path, full, strategy), strategy=strategy, stage=1)
    with refused(UsageError, "one-stage"):
        stage.derive(rules(CONCAT))
    assert reshard.open(tmp_path, strategy=strategy).derive(rules(CONCAT))["y"].shape == (8, 6)


def test_what_is_no_tensor_of_its_own(tmp_path: Path) -> None:
    """Text may have another name and nothing else; of what each rank has of its own, one is taken, which is said."""
    stack, rename = rules({"a": "x.{l}", "b": {"stack": "y", "by": "l"}}), rules({"a": "x.{l}", "b": "y.{l}"})
    texts = reshard.open(write_file(tmp_path / "texts.ckpt", {"x.0": "one", "x.1": "two"}, "ckpt"))
    assert texts.derive(rename).tensors["y.1"].text == "two"
    for rank in (0, 1):
        own = {"x.0": rows(rank), "x.1": rows(rank)}
        write_file(tmp_path / f"rank_{rank}" / f"checkpoint_{rank}.safetensors", {"w": rows(rank), **own})
    strategy = Strategy.of({"w": Layout.of([2], [0, -1])})
    varying = reshard.open(tmp_path, strategy=strategy, layout={"x.*": "copy"}).sel("x.*")
    assert varying.derive(rename).tensors["y.0"].varies
    with refused(SourceError, "not-a-tensor", "'x.0'"):
        texts.derive(stack)
    assert "x.1 is taken from one rank; those of others may be different" in varying.derive(stack).warnings


def test_the_other_kind_of_rules(tmp_path: Path) -> None:
    """Rules of layouts are not rules of tensors; either is said to be the other."""
    source = write_file(tmp_path / "source.safetensors", {"x": np.ones(W, np.float32)})
    layouts, tensors = tmp_path / "layouts.yaml", tmp_path / "tensors.yaml"
    layouts.write_text("mesh: {tp: 2}\noperators: {x: MatMul}\n")
    tensors.write_text("reshard-rules: 1\nsides: [a, b]\nrules: [{a: x, b: y}]\n")
    failed(2, "not-rules", "plan", source, "--rules", layouts, places=(layouts,))
    failed(2, "wrong-kind", "plan", source, "--target-strategy", tensors, places=(tensors,))


# --- Every verb with every option: it acts as docs/reference/rules.md says, by numpy, or it is refused ---

OF_ALL = {"by": {"l": 2}, "at": 1, "flat": True, "transposed": True}
VALUES: dict[str, Any] = {
    **OF_ALL, "axis": 1, "sizes": [1, 1], "groups": 2, "halves": 2, "rows": [2, 2], "columns": [2, 2], "size": 3,
    "to": 4, "multiple": 4,
}  # fmt: skip
EXCEPTIONS = {"tie": set(OF_ALL), "transpose": {"transposed"}}


def documented() -> dict[str, set[str]]:
    """The options of each verb in the table of the reference; those of every verb are in a sentence below it."""
    text = (Path(reshard.__file__).parents[1] / "docs" / "reference" / "rules.md").read_text()
    options = {"rename": set[str]()}
    for row in re.findall(r"^\| `(\w+)` \|.*\|(.*)\|$", text, re.MULTILINE):
        options[row[0]] = set(re.findall(r"`(\w+)`", row[1]))
    del options["null"]
    return {verb: (options[verb] | set(OF_ALL)) - EXCEPTIONS.get(verb, set()) for verb in options}


def test_the_reference_names_every_verb() -> None:
    assert set(documented()) == set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_options_act_as_the_reference_says(tmp_path: Path, verb: str) -> None:
    """Both ways; over all samples, each option of the verb is used."""
    used: set[str] = set()
    for seed in range(20):
        rng = np.random.default_rng([seed, *map(ord, verb)])
        of_rule = sample(rng, verb)
        used |= of_rule.rule["b"].keys() - {verb}
        for number, (given, expected) in enumerate(((of_rule.parts, of_rule.fused), (of_rule.fused, of_rule.parts))):
            (folder := tmp_path / f"{seed}-{number}").mkdir()  # files side by side may be of one model's ranks
            path = write_file(folder / "model.safetensors", given)
            assert_exact(reshard.open(path).derive(of_rule.rules), expected, of_rule.rule)
    assert used == documented()[verb]


def assert_exact(checkpoint: reshard.Checkpoint, expected: dict[str, Array], rule: dict[str, Any]) -> None:
    assert set(checkpoint) == set(expected), rule
    for name, array in expected.items():
        content = checkpoint[name].compute()
        assert content.shape == array.shape, (rule, name)
        assert np.array_equal(content, array), (rule, name)


@pytest.mark.parametrize("option", VALUES)
@pytest.mark.parametrize("verb", VERBS)
def test_other_options_are_refused(verb: str, option: str) -> None:
    if option in documented()[verb]:
        return
    names = ["x.{l}", "z.{l}"] if option == "by" else ["x", "z"]
    rule = {
        "a": names if verb in {"concat", "interleave", "tie"} else names[0],
        "b": {verb: "y", option: VALUES[option]},
    }
    with pytest.raises(UsageError) as caught:
        Rules.of({"reshard-rules": 1, "sides": ["a", "b"], "rules": [rule]})
    assert {*caught.value.codes} <= {"unknown-key", "conflicting-options", "missing-option"}, caught.value


@pytest.mark.parametrize(
    ("part", "options", "code"),
    [
        ("x", {"interleave": "y", "groups": 2, "halves": 2, "sizes": [4]}, "conflicting-options"),
        ("x", {"transpose": "y", "transposed": True}, "unknown-key"),
        ("x", {"transpose": "y", "transposed": False}, "unknown-key"),
        ("x", {"transpose": "y", "halves": 2}, "missing-option"),
        ("x", {"transpose": "y", "halves": 2, "columns": [2, 2]}, "missing-option"),
        ("x", {"rename": "y", "flat": True}, "missing-option"),
        ("x", {"rename": "y", "at": 1}, "conflicting-options"),
        ("x.{l}", {"stack": "y", "by": "l", "at": 1, "flat": True}, "conflicting-options"),
    ],
)
def test_options_that_another_one_leaves_without_effect_are_refused(part: str, options: Any, code: str) -> None:
    with refused(UsageError, code):
        Rules.of({"reshard-rules": 1, "sides": ["a", "b"], "rules": [{"a": part, "b": options}]})
