"""Type checkers read a user's script, and refuse what is wrong in one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from samples import slow

import reshard

SCRIPT = Path(__file__).with_name("users_script.py")
PACKAGE = Path(reshard.__file__).parent.parent

WRONG = {
    "a name that does not exist": "from reshard import opne",
    "an attribute that does not exist": "import reshard\nreshard.opne('x')",
    "a private part": "import reshard\nreshard.open('x').holders",
    "an unknown option": "import reshard\nreshard.plan(reshard.open('x')).run('y', ovewrite=True)",
    "a pattern that is a number": "import reshard\nreshard.Selection(include=[1])",
    "an array that is none": "import reshard\nx: int = reshard.open('x')['w']",
    "a path for a checkpoint": "import reshard\nreshard.plan('x')",
}

pytestmark = pytest.mark.timeout(600)


def checked(checker: str, folder: Path) -> set[str]:
    """The names of the files of a folder in which a strict type checker finds an error."""
    environment = os.environ | {"PYTHONPATH": str(PACKAGE), "MYPYPATH": str(PACKAGE)}
    if checker == "mypy":
        command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary", str(folder)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode in {0, 1}, done.stderr
        return {Path(line.partition(":")[0]).name for line in done.stdout.splitlines() if ": error:" in line}
    settings = {"include": ["."], "typeCheckingMode": "strict", "extraPaths": [str(PACKAGE)], "pythonVersion": "3.11"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert all("reshard" not in one["message"] or one["severity"] == "error" for one in found), found
    return {Path(one["file"]).name for one in found if one["severity"] == "error"}


@pytest.mark.parametrize("checker", [slow("mypy"), slow("basedpyright")])
def test_type_checkers_accept_a_users_script_and_refuse_mistakes(checker: str, tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(SCRIPT.read_text())
    for number, text in enumerate(WRONG.values()):
        (tmp_path / f"wrong{number}.py").write_text(f"{text}\n")
    assert checked(checker, tmp_path) == {f"wrong{number}.py" for number in range(len(WRONG))}
