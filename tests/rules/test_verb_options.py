"""Every verb with every option: it acts as docs/reference/rules.md says, by numpy, or it is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import write_file
from random_rules import VERBS, sample
from refusals import refused

import reshard
from reshard import Rules
from reshard.errors import UsageError

if TYPE_CHECKING:
    from helpers import Array

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
