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
from commands import call, done
from refusals import failed
from samples import slow
from terminals import run_in_terminal

from reshard.cli.commands import Command, GroupedOption
from reshard.cli.groups import about
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
    assert {param.name for param in ours if not param.help and not param.of_formats} == set()


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_all_has_every_option(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    some, every = call(*path, "--help").stdout, call(*path, "--help-all").stdout
    for param in COMMANDS[path].params:
        if isinstance(param, GroupedOption):
            shown = re.compile(rf"^  (?:-\w, )?{re.escape(param.opts[0])}\b(?!-)", re.MULTILINE)
            for format in param.of_formats:
                assert shown.search(call(*path, "--to", format, "--help").stdout), (param.opts, format)
            assert bool(shown.search(every)) == (not param.hidden and not param.of_formats), param.opts
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
    assert "[default: as TARGET is named, else as SOURCE]" in text
    assert "How many steps the training has done" in " ".join(
        call("convert", "--to", "checkpoint2", "--help").stdout.split()
    )


def test_versions_are_of_what_it_is_built_on() -> None:
    text = call("--version", "--verbose").stdout
    assert text == call("--verbose", "--version").stdout
    assert text.startswith(call("--version").stdout)
    assert f"{sys.version_info.major}.{sys.version_info.minor}." in text
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["distributed"], *extras["crypto"]]
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
    failed(2, "usage", "--verbose", "demo", places=("--verbose",))


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
        ("reshard convert a b", "--target-st", ["--target-strategy", "--target-step"]),
        (
            "reshard convert a b --to",
            "",
            ["ckpt", "safetensors", "hf", "mindspore", "dcp", "checkpoint2", "deepspeed-universal", "orbax", "zarr"],
        ),
        ("reshard inspect", "src_ch", ["paths"]),  # bash completes both files and directories
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


# --- `reshard help`, `completion` and `version` ---


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pages = {
        "guides/zarr.md": "# Work with models larger than memory\n\n<!-- prepare: x -->\nBy \x1b[2J bands.\n",
        "guides/rules.md": "# Change names\n",
        "guides/README.md": "# Guides\n",
        "reference/rules.md": "# The rules language\n",
        "limits.md": "# Limits\n",
    }
    for name, text in pages.items():
        path = tmp_path / "docs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(about, "DOCS", (tmp_path / "nothing", tmp_path / "docs"))
    return tmp_path / "docs"


def test_topics_are_listed_with_their_titles(docs: Path) -> None:
    rows = [re.split(r"\s{2,}", line, maxsplit=1) for line in done("help").stdout.splitlines()]
    assert rows.pop() == ["reshard help NAME prints one."]
    assert rows.pop() == [""]
    assert rows == [
        ["rules", "Change names"],
        ["zarr", "Work with models larger than memory"],
        ["reference/rules", "The rules language"],
        ["limits", "Limits"],
    ]


def test_a_page_is_printed(docs: Path) -> None:
    text = done("help", "zarr").stdout
    assert text == "# Work with models larger than memory\n\nBy \\x1b[2J bands.\n"
    assert done("help", "reference/rules").stdout == "# The rules language\n"


def test_a_command_is_a_topic(docs: Path) -> None:
    assert done("help", "convert").stdout == call("convert", "--help").stdout
    assert done("help", "strategy").stdout.startswith("Usage: reshard strategy ")


def test_another_topic_is_refused_with_the_nearest(docs: Path) -> None:
    failed(2, "no-such-topic", "help", "zar", places=("reshard help zarr",))
    failed(2, "no-such-topic", "help", "../limits")


def test_pages_of_the_repository_are_found() -> None:
    """Each of them, by its name, with a title."""
    written = [path for path in (ROOT / "docs").rglob("*.md") if path.stem != "README"]
    if not written:
        pytest.skip("docs/ is not there")
    known = about.pages()
    assert {page.path for page in known.values()} == set(written)
    assert all(page.title != page.path.stem for page in known.values())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell(shell: str, tmp_path: Path) -> None:
    script = done("completion", shell).stdout
    assert "_RESHARD_COMPLETE" in script
    if shutil.which(shell):
        path = tmp_path / "script"
        path.write_text(script)
        subprocess.run([shell, "-n", path], check=True)
    failed(2, "usage", "completion", "tcsh")


def test_version_is_a_command() -> None:
    assert done("version").stdout == done("--version").stdout
    assert done("version", "-v").stdout == done("--version", "--verbose").stdout


@pytest.mark.parametrize("columns", [60, slow(120)])
@pytest.mark.parametrize("words", ["help lora", "inspect --help-all"])
def test_help_is_broken_at_words(words: str, columns: int) -> None:
    command = [sys.executable, "-m", "reshard", *words.split()]
    wide, narrow = (run_in_terminal(command, width).replace("\r\n", "\n") for width in (1000, columns))
    too_long = {"DEV_MA", "TRIX:TENSOR_MAP[:OPT_SIZE]"}  # one word, longer than its column
    assert {*narrow.split()} - {"\\"} - too_long <= {*wide.split()}
    prose = re.sub(r"^```.*?^```", "", re.sub(r"\x1b\[[0-9]*m", "", narrow), flags=re.DOTALL | re.MULTILINE)
    assert max(map(len, prose.splitlines())) <= columns


def test_errors_and_hints_are_broken_at_words(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"file-with-quite-a-long-name-{name}.safetensors").write_bytes(b"x" * 100)
    command = [sys.executable, "-m", "reshard", "convert", str(tmp_path), "out", "--to", "nothing"]
    lines = run_in_terminal(command, 60, cwd=tmp_path).replace("\r\n", "\n").splitlines()
    assert len(lines) > 2
    assert max(len(re.sub(r"\x1b\[[0-9]*m", "", line)) for line in lines) <= 60
    assert "'deepspeed-universal'," in " ".join(lines).split()
