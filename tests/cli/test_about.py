"""`reshard help`, `completion` and `version`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import call, done
from refusals import failed
from samples import slow
from terminals import run_in_terminal

from reshard.cli.groups import about

ROOT = Path(__file__).parents[2]


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
    too_long = {"DEV_MATRI", "X:TENSOR_MAP[:OPT_SIZE]"}  # one word, longer than its column
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
