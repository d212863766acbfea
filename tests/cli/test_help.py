"""Help in groups, completion in shells, and the versions for a bug report."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
from commands import call
from refusals import failed

from reshard.cli.commands import Command, GroupedOption
from reshard.cli.main import cli

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]


def commands(group: click.Group = cli, *path: str) -> Iterator[tuple[tuple[str, ...], Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        else:
            assert isinstance(command, Command)
            yield (*path, name), command


COMMANDS = dict(commands())


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_option_is_in_a_group(path: tuple[str, ...]) -> None:
    ours = [param for param in COMMANDS[path].params if isinstance(param, click.Option)]
    assert ours
    assert {param.name for param in ours if not isinstance(param, GroupedOption)} == set()
    assert {param.name for param in ours if not param.help} == set()


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_all_has_every_option(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    some, every = call(*path, "--help").stdout, call(*path, "--help-all").stdout
    for param in COMMANDS[path].params:
        if isinstance(param, GroupedOption):
            shown = re.compile(rf"^  (?:-\w, )?{re.escape(param.opts[0])}\b(?!-)", re.MULTILINE)
            assert bool(shown.search(every)) != param.hidden, param.opts
            assert bool(shown.search(some)) == param.in_short_help
    assert all(len(line) <= 80 for line in every.splitlines())
    headings = re.findall(r"^(\w+):$", every, flags=re.MULTILINE)
    assert headings == [*dict.fromkeys(headings)]
    assert ("The object of --json" in every) == ("--json" in every)
    assert "The object of --json" not in some


@pytest.mark.parametrize("command", ["convert", "plan"])
@pytest.mark.parametrize("columns", [80, 90, 100])
def test_help_fits_one_screen(command: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = call(command, "--help").stdout
    assert text.count("\n") <= 45
    groups = [text.index(f"\n{heading}:\n") for heading in ("Source", "Target", "Tensors", "Running", "Output")]
    assert groups == sorted(groups)
    assert "\n  reshard " in text[groups[-1] :]


def test_help_has_the_first_sentence_and_the_default() -> None:
    text = " ".join(call("convert", "--help").stdout.split())
    assert "which options they take. [default: as TARGET is named, else as SOURCE]" in text
    assert "checkpoint2: how many steps the training has done" in " ".join(call("convert", "--help-all").stdout.split())


def test_versions_are_of_what_it_is_built_on() -> None:
    text = call("--version", "--verbose").stdout
    assert text == call("--verbose", "--version").stdout
    assert text.startswith(call("--version").stdout)
    assert f"{sys.version_info.major}.{sys.version_info.minor}." in text
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["distributed"], *extras["crypto"], *extras["rich"]]
    names = {re.split(r"[>=<\[ ]", text)[0] for text in needed}
    assert names
    assert {
        name
        for name in names
        if not re.search(rf"^{re.sub('[-_.]', '[-_.]', name)} [0-9]", text, flags=re.MULTILINE | re.IGNORECASE)
    } <= {
        "cryptography",
        *(["backports.zstd"] if sys.version_info >= (3, 14) else []),
    }


def test_verbose_alone_is_refused() -> None:
    failed(2, "missing-option", "--verbose", "demo", places=("--version",))


BASH = """
eval "$(_RESHARD_COMPLETE=bash_source reshard)"
compopt() {{ echo paths; }}
COMP_WORDS=({line} {last}); COMP_CWORD=$(({count} - 1))
_reshard_completion reshard
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("line", "last", "expected"),
    [
        ("reshard", "con", ["convert"]),
        ("reshard strategy", "m", ["merge", "make"]),
        ("reshard convert a b", "--target-st", ["--target-strategy", "--target-stage", "--target-step"]),
        (
            "reshard convert a b --to",
            "",
            ["ckpt", "safetensors", "hf", "mindspore", "dcp", "checkpoint2", "deepspeed-universal", "orbax", "zarr"],
        ),
        ("reshard inspect", "src_ch", ["paths"]),  # bash completes both files and directories
        ("reshard verify a --manifest", "m", ["paths"]),
    ],
)
def test_shells_complete(line: str, last: str, expected: list[str]) -> None:
    here = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    if not shutil.which("reshard", path=here["PATH"]):
        pytest.skip("reshard is not installed next to Python")
    words = BASH.format(line=line, last=last or "''", count=len(line.split()) + 1)
    done = subprocess.run(["bash", "-c", words], env=here, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == sorted(expected)
    if shutil.which("fish") and expected[0] != "paths":
        typed = f"_RESHARD_COMPLETE=fish_source reshard | source; complete -C '{line} {last}'"
        done = subprocess.run(
            ["fish", "--no-config", "-c", typed], env=here, capture_output=True, text=True, check=True
        )
        assert sorted(line.split("\t")[0] for line in done.stdout.splitlines()) == sorted(expected)
