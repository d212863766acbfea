"""What a report proposes to type: quoted, complete, and understood by the commands."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.cli.options import selection_options, source_options
from reshard.cli.written import inspect_command, reading_words, selection_words, verify_command
from reshard.plan.select import Selection

READING = {"rank_pattern": "rank_{rank}/*", "suffix": None, "layouts": {}, "stage": None, "partial": False}
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=6)


@click.command()
@source_options
@selection_options
def said(**given: Any) -> dict[str, Any]:
    return given


def understood(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = said.main(words, standalone_mode=False)
    return found


def test_what_was_not_given_needs_no_word() -> None:
    assert reading_words(READING) == selection_words(Selection(), None) == []


@given(
    reading=st.fixed_dictionaries(
        {
            "rank_pattern": TEXTS,
            "suffix": st.none() | TEXTS,
            "layouts": st.dictionaries(TEXTS, TEXTS.filter(lambda rule: "=" not in rule), max_size=2),
            "stage": st.none() | st.integers(0, 9),
            "partial": st.booleans(),
        }
    ),
    globs=st.lists(st.lists(TEXTS, max_size=2).map(tuple), min_size=4, max_size=4),
    weights_only=st.booleans(),
)
def test_the_words_mean_what_they_were_made_from(
    reading: dict[str, Any], globs: list[tuple[str, ...]], weights_only: bool
) -> None:
    include, exclude, drop, allow_missing = globs
    selection = Selection(
        include, exclude, weights_only, cast={"float32": "bfloat16"}, drop=drop, allow_missing=allow_missing
    )
    words = shlex.split(shlex.join([*reading_words(reading), *selection_words(selection, None)]))
    assert understood(words) == {**reading, "source_strategy": None, "selection": selection}


def test_a_map_of_names_is_told_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "my names.json"
    path.write_text('{"a": "b"}')
    selection = Selection(names={"a": "b"})
    assert understood(selection_words(selection, str(path)))["selection"] == selection
    assert selection_words(selection, None) == ["--name-map=FILE"]


@pytest.mark.parametrize("strategy", [None, Path("t;rm -rf")])
def test_commands_are_quoted(strategy: Path | None) -> None:
    verify = verify_command(Path("a b/$x"), strategy, ["--partial", "--suffix=.st"], "it's", ["--stage=1"])
    there = ["--target-strategy", "t;rm -rf"] if strategy else []
    found = shlex.split(verify)
    assert found[found.index("verify") :] == [
        "verify", "a b/$x", *there, "--target-partial", "--target-suffix=.st", "--against", "it's", "--stage=1"
    ]  # fmt: skip
    found = shlex.split(inspect_command(Path("a b"), strategy, ["--partial"]))
    there = ["--source-strategy", "t;rm -rf"] if strategy else []
    assert found[found.index("inspect") :] == ["inspect", "a b", *there, "--partial"]
