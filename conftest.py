"""Examples of docstrings run in a folder with the files that `reshard demo` makes, as those of the guides do."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

import reshard

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def demo_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `reshard demo` makes, without what it converts."""
    return reshard.demo("mindspore", tmp_path_factory.mktemp("examples"))


@pytest.fixture(autouse=True)
def _examples(
    request: pytest.FixtureRequest, doctest_namespace: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(request.node, pytest.DoctestItem):
        import reshard.mindspore  # at the top, it would import more while doctest looks through the package

        folder = request.getfixturevalue("tmp_path") / "reshard-demo"
        shutil.copytree(request.getfixturevalue("demo_files"), folder)
        monkeypatch.chdir(folder)
        doctest_namespace.update(reshard=reshard, ms=reshard.mindspore)
