"""What `python -m build` makes: an sdist, a wheel of it, and what whoever installs them gets."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

import pytest
from helpers import extract_all
from packaging.requirements import Requirement

import reshard

ROOT = Path(__file__).parent.parent
NAME = f"reshard-{reshard.__version__}"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, unpacked too, and the wheel, which is built from the sdist."""
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    with tarfile.open(folder / f"{NAME}.tar.gz") as archive:
        extract_all(archive, folder)
    return folder


@pytest.fixture(scope="module")
def empty(built: Path) -> Path:
    """The programs of an environment with nothing but the wheel and what it declares, taken from here."""
    home = built / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (libraries,) = home.glob("lib/python*/site-packages")
    wheel = built / f"{NAME}-py3-none-any.whl"
    for needed in closure(PathDistribution(zipfile.Path(wheel, f"{NAME}.dist-info/")).requires or []):
        for file in needed.files or ():
            top = file.parts[0]
            if top != ".." and not (libraries / top).exists():
                (libraries / top).symlink_to(needed.locate_file(top))
    pip = [sys.executable, "-m", "pip", "--python", home / "bin" / "python"]
    subprocess.run([*pip, "install", "-q", "--no-index", "--no-deps", wheel], check=True, capture_output=True)
    return home / "bin"


def closure(requirements: list[str]) -> list[Distribution]:
    """What is installed here of requirements and of theirs in turn; of extras only those that are asked for."""
    found: dict[str, Distribution] = {}
    waiting = [(Requirement(text), {""}) for text in requirements]
    while waiting:
        wanted, extras = waiting.pop()
        if wanted.marker and not any(wanted.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        if wanted.name not in found or wanted.extras:
            needed = found[wanted.name] = distribution(wanted.name)
            waiting += [(Requirement(text), wanted.extras or {""}) for text in needed.requires or ()]
    return list(found.values())


def files(folder: Path) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_has_the_package_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(built / f"{NAME}-py3-none-any.whl") as wheel:
        notes = {f"{NAME}.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
        pages = {f"reshard/{name}" for name in files(Path("docs"))}
        every = files(Path("reshard")) | pages | notes
        assert set(wheel.namelist()) == every | {f"{NAME}.dist-info/licenses/LICENSE"}


def test_the_sdist_has_what_its_tests_need(built: Path) -> None:
    with tarfile.open(built / f"{NAME}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    rest = {
        "README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "PKG-INFO", "SECURITY.md",
        "pyproject.toml", "conftest.py", "mkdocs.yml", ".gitignore", ".ci/run", ".github/workflows/tests.yml",
    }  # fmt: skip
    assert (
        names == files(Path("reshard")) | files(Path("tests")) | files(Path("notebooks")) | files(Path("docs")) | rest
    )
    some = ["tests/cli/test_demo.py", "tests/test_dtypes.py", "reshard/core/layout"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *some],
        cwd=built / NAME, text=True, check=False, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_the_demo_runs_in_an_empty_environment(empty: Path, tmp_path: Path) -> None:
    def said(*command: str | Path) -> str:
        return subprocess.run(command, cwd=tmp_path, text=True, check=True, capture_output=True).stdout

    demo = said(empty / "reshard", "demo")
    assert "all 14,960 bytes of their 60 tensors are equal" in demo
    assert said(empty / "reshard", "--version") == f"reshard, version {reshard.__version__}\n"
    assert "convert" in said(empty / "python", "-m", "dask", "reshard", "--help")
    assert said(empty / "python", "-c", "import reshard, sys; print(reshard.__file__)").startswith(str(empty.parent))
    assert not said(empty / "python", "-c", "import importlib.util as u; print(u.find_spec('pytest') or '')").strip()
