"""Errors: exit codes, many faults reported at once, and options in the words of whoever reads of them."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
from pathlib import Path
from typing import TypeGuard

import click
import pytest

import reshard
from reshard import errors
from reshard.api import options as options_of_calls
from reshard.api.formats import CUT
from reshard.cli.main import cli
from reshard.cli.terminal import OPTIONS, say
from reshard.core.format import targets
from reshard.core.options import takers
from reshard.errors import PYTHON, Faults, Option, ReshardError, SourceError, Text, Words, joined, spelled


def test_every_kind_has_its_exit_code() -> None:
    kinds = {name: kind.exit_code for name, kind in vars(errors).items() if name.endswith("Error")}
    assert kinds == {
        "ReshardError": 1,
        "UsageError": 2,
        "VerifyError": 3,
        "SourceError": 4,
        "EncryptedError": 4,
        "GoneError": 4,
        "UnansweredError": 1,
        "LayoutError": 4,
        "MissingNameError": 2,
        "StrategyError": 4,
        "PlanError": 4,
        "BudgetError": 5,
        "TargetError": 6,
        "NoBucketError": 1,
        "UnsentError": 1,
        "ChangedError": 6,
    }
    assert all(issubclass(getattr(errors, name), ReshardError) for name in kinds)


def test_a_single_fault_is_one_line() -> None:
    faults = Faults("a.ckpt")
    faults.raise_if_any(SourceError)
    faults.add("tensor 'w'", "is truncated", code="truncated")
    with pytest.raises(SourceError) as caught:
        faults.raise_if_any(SourceError, advice="copy it again")
    assert (caught.value.message, caught.value.facts) == ("a.ckpt: tensor 'w' is truncated", ())
    assert (caught.value.code, caught.value.hint) == ("truncated", "copy it again")


def test_many_causes_are_counted_and_the_first_twenty_shown() -> None:
    faults = Faults("a.ckpt")
    for number in range(23):
        faults.add(f"w{number}", "is wrong")
    with pytest.raises(SourceError) as caught:
        faults.raise_if_any(SourceError, code="wrong-size")
    assert caught.value.message == "a.ckpt has 23 faults"
    assert [fact.split(" is")[0] for fact in caught.value.facts] == [
        *(f"w{number}" for number in range(20)),
        "and 3 more",
    ]
    assert caught.value.codes == ("wrong-size",)


def test_a_cause_is_reported_once_with_one_example_and_a_count() -> None:
    faults = Faults("src")
    for number in range(1000):
        faults.add(f"w{number}", lambda number=number: f"has {number} rows", code="wrong-rows", hint="cut it again")
    faults.add("b", "is missing", code="missing-tensor")
    with pytest.raises(SourceError) as caught:
        faults.raise_if_any(SourceError)
    assert caught.value.facts == ("w0 has 0 rows (likewise w1, w2, w3 and 996 more)", "b is missing")
    assert (caught.value.codes, caught.value.hint) == (("wrong-rows", "missing-tensor"), "cut it again")


def test_an_error_that_is_changed_or_sent_keeps_its_code_facts_and_hint() -> None:
    error = SourceError("w is odd", code="odd", facts=["5 rows"], hint=Text("pass ", Option("drop", "w")))
    sent = pickle.loads(pickle.dumps(error))  # noqa: S301 -- made here
    for one in (sent, error.changed(str), error.about("src").changed(lambda text: text.removeprefix("src: "))):
        assert (type(one), one.code, str(one)) == (SourceError, "odd", str(error))


def test_names_are_listed_as_far_as_one_reads() -> None:
    assert errors.names([]) == ""
    assert errors.names("abcde") == "a, b, c, d, e"
    assert re.fullmatch(r"0, 1, 2, 3, 4 and 95 more", errors.names(range(100)))


def test_a_text_is_in_the_words_of_whoever_reads_it() -> None:
    text = Text("w: differs; give ", Option("layout", "w", "RULE"), ", or ", Option("partial"))
    assert text == "w: differs; give layout={'w': 'RULE'}, or partial=True"
    assert spelled(text, OPTIONS) == "w: differs; give --layout 'w=RULE', or --partial"
    assert spelled("a text that names none", OPTIONS) == "a text that names none"
    assert Text("choose with ", Option("suffix")) == "choose with suffix=..."
    assert Text("choose with ", Option("suffix", ".ckpt")) == "choose with suffix='.ckpt'"


def test_options_of_the_target_have_their_own_names() -> None:
    text = Text(Option("strategy"), " ", Option("suffix", ".ckpt"), " ", Option("overwrite"))
    sides = [text.map(lambda option, side=side: option.of(side)) for side in ("source", "target")]
    assert [spelled(text, OPTIONS) for text in sides] == [
        "--source-strategy --suffix .ckpt --overwrite",
        "--target-strategy --suffix .ckpt --overwrite",
    ]
    assert [str(text) for text in sides] == [
        "source_strategy=... suffix='.ckpt' overwrite=True",
        "target_strategy=... suffix='.ckpt' overwrite=True",
    ]


def test_options_are_known_through_faults_notes_and_pickling(capsys: pytest.CaptureFixture[str]) -> None:
    faults = Faults("src")
    faults.add("tensor 'a'", Text("is odd; give ", Option("drop", "a")))
    faults.add(Text(Option("include", "b*")), "matches nothing")
    with pytest.raises(SourceError) as caught:
        faults.raise_if_any(SourceError, advice=Text("or give ", Option("source")))
    caught.value.add_note(Text("start over with ", Option("restart")))
    error = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 -- made here
    assert str(error) == (
        "src has 2 faults\n  tensor 'a' is odd; give drop='a'\n  include='b*' matches nothing\nhint: or give source=..."
    )
    assert error.__notes__ == ["start over with restart=True"]
    say(joined("; ", [error.text, *error.__notes__]))
    assert capsys.readouterr().err == (
        "src has 2 faults\n  tensor 'a' is odd; give --drop 'a'\n  --include b* matches nothing\n"
        "hint: or give --source DIRECTORY; start over with --restart\n"
    )


def referred_to() -> set[str]:
    """Return the names of all options that the package refers to, and those of them that `Option.of` may make."""
    calls = [
        node
        for path in Path(reshard.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Option"
    ]
    named = {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)}
    return named | {Option(name).of(side).name for name in named for side in ("source", "target")}


def options_of(command: click.Command) -> set[str]:
    """Return the options of a command, and of those below it."""
    found = {option for parameter in command.params for option in parameter.opts}
    if isinstance(command, click.Group):
        context = click.Context(command)
        below = [command.get_command(context, name) for name in command.list_commands(context)]
        found.update(option for one in below if one for option in options_of(one))
    return found


def arguments_of(module: object, names: list[str]) -> set[str]:
    """Return the arguments of the functions and classes of a module, and of the methods of those."""
    some = [getattr(module, name) for name in names]
    some += [method for one in some if isinstance(one, type) for method in vars(one).values() if callable(method)]
    given = {name for record in vars(options_of_calls).values() for name in getattr(record, "__annotations__", {})}
    return given | {name for one in some if callable(one) for name in inspect.signature(one).parameters}


def forms(name: str, words: Words) -> list[str]:
    """Return an option without a value, and with one."""
    return [Option(name).written(words), Option(name, 1234, "1kB").written(words)]


def test_every_option_that_a_text_names_is_one_in_both_worlds() -> None:
    named = referred_to() | {*CUT, *takers(targets())} | {"lora"}
    for words in (PYTHON, OPTIONS):
        assert set(words.exceptions) <= named
        for name in words.exceptions:
            ruled = [words.rule(option) for option in (Option(name), Option(name, 1234, "1kB"))]
            assert ruled != forms(name, words), f"{name} is no exception"
    typed = {form.split()[0] for name in named for form in forms(name, OPTIONS) if " in Python" not in form}
    assert typed <= options_of(cli)
    arguments = arguments_of(reshard, [name for name in reshard.__all__ if not name.endswith(("Error", "Warning"))])
    arguments |= set(inspect.signature(reshard.Rules.read).parameters)
    assert {form.split("=")[0] for name in named for form in forms(name, PYTHON)} <= arguments


OF_OTHERS = {"--dist-ckpt-strictness", "--finetune", "--ckpt-format", "--scheduler-file", "--descriptor"}
"""Options of other programs that texts name."""


def test_every_option_in_the_text_of_a_module_is_one() -> None:
    """In help and messages, which are not all made of an `Option`."""
    known = options_of(cli) | OF_OTHERS | {"--help", "--version", "--depth"}
    for path in sorted(Path(reshard.__file__).parent.rglob("*.py")):
        if path.stem == "former":
            continue
        texts = [node.value for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if is_text(node)]
        named = {flag for text in texts for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+[a-z]", text)}
        assert {flag for flag in named if not flag.startswith("--jp-")} <= known, path


def is_text(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_no_hint_tells_to_remove_a_file_first() -> None:
    """A user who follows a hint must not lose what it was wrong about."""
    hints = [
        text
        for path in sorted(Path(reshard.__file__).parent.rglob("*.py"))
        for text in re.findall(r"""hint ?=.*?["'](remove|delete)\b.*""", path.read_text(encoding="utf-8"))
    ]
    assert hints == []
