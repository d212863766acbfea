"""The transcripts in `transcripts/`, each typed in a fresh folder of the demo (see `tests/transcript.py`)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from samples import slow
from transcript import check, typed

TRANSCRIPTS = Path(__file__).parent / "transcripts"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("typed")
    subprocess.run([sys.executable, "-m", "reshard", "demo"], cwd=folder, check=True, capture_output=True)
    return folder / "reshard-demo"


@pytest.mark.parametrize("start", ["forked", slow(None)])
@pytest.mark.parametrize("name", sorted(path.stem for path in TRANSCRIPTS.glob("*.txt")))
def test_a_transcript(demo: Path, tmp_path: Path, name: str, start: str | None, request: pytest.FixtureRequest) -> None:
    """With a `reshard` that starts at once, and when it is slow with the real one."""
    folder = tmp_path / "reshard-demo"
    shutil.copytree(demo, folder, symlinks=True)
    commands = typed((TRANSCRIPTS / f"{name}.txt").read_text())
    assert commands
    check(commands, folder, *([request.getfixturevalue(start)] if start else []))
