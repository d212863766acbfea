"""The notebooks run from the first cell to the last, show their result first, and need only what users have."""

from __future__ import annotations

import ast
import re
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from notebooks_made import FOLDER, executed
from samples import slow

if TYPE_CHECKING:
    from pathlib import Path

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ENDS = {
    "1_look": ("image/svg+xml", "rank"),
    "2_reshard": ("text/html", "every bit of"),
    "3_cluster": ("text/plain", "4 of 4 files are the same"),
    "4_larger_than_memory": ("text/plain", "of 100 MB"),
    "5_believable_size": ("text/plain", "2,169 tensors on 512 ranks"),
    "6_pytorch": ("text/html", "every bit of 21 tensors"),
    "7_compute": ("text/plain", "equal bit for bit: True"),
}
LONG = set(ENDS) - {"1_look"}  # `.ci/run` runs them
LIBRARIES = {"dask", "distributed", "numpy", "reshard", "safetensors", "zarr"}
SYSTEM = {"os", "signal"}  # to kill a worker of a cluster


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_of(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def words(output: Any, kind: str) -> str:
    if kind == "text/plain" and "text" in output:
        return str(output["text"])
    found = output.get("data", {})
    return str(found.get(kind) or found.get("text/html", ""))


def test_every_notebook_is_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(ENDS)


@pytest.mark.parametrize("name", ENDS)
def test_what_is_stored_was_run_and_is_small(name: str) -> None:
    path = FOLDER / f"{name}.ipynb"
    notebook = read(name)
    counts = [cell.execution_count for cell in code_of(notebook)]
    assert counts == list(range(1, len(counts) + 1))
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    assert path.stat().st_size < 450_000
    assert notebook.cells[-1].source.startswith("## Next\n"), "it ends with what to do next"


def test_notebooks_lead_to_each_other() -> None:
    """Each links to the one before, the one after and the list of all; all links are of files that are there."""
    for before, after in pairwise(ENDS):
        assert f"]({after}.ipynb)" in read(before).cells[-1].source
        assert f"]({before}.ipynb)" in read(after).cells[-1].source
    for name in ENDS:
        links = [link for cell in read(name).cells for link in re.findall(r"\]\(([^)]+)\)", cell.source)]
        assert "README.md" in links
        assert all((FOLDER / link).is_file() for link in links if cell_link(link))
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"]({name}.ipynb)" in listed for name in ENDS)


def cell_link(link: str) -> bool:
    return link.endswith((".ipynb", ".md"))


@pytest.mark.parametrize("name", ENDS)
def test_it_needs_what_users_have(name: str) -> None:
    """No private names, no patches, no other processes than a cluster's."""
    modules, names = set(), set()
    for node in ast.walk(ast.parse("\n".join(cell.source for cell in code_of(read(name))))):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
        elif isinstance(node, ast.Attribute):
            assert isinstance(node.ctx, ast.Load), "nothing is patched"
            names.add(node.attr)
    assert {module.partition(".")[0] for module in modules} <= LIBRARIES | SYSTEM
    assert not {module for module in modules if module.startswith("reshard.")}
    assert not {each for each in names if each.startswith("_")}


@pytest.mark.parametrize("name", [slow(name) if name in LONG else name for name in ENDS])
def test_it_runs(name: str, tmp_path: Path) -> None:
    began = time.monotonic()
    notebook = executed(name, tmp_path)
    print(f"{name}: {time.monotonic() - began:.1f} s")
    kind, word = ENDS[name]
    last = [cell for cell in code_of(notebook) if cell.outputs][-1]
    assert word in "".join(words(output, kind) for output in last.outputs)


def test_progress_is_a_bar_in_a_cell(tmp_path: Path) -> None:
    code = f"""
import numpy as np
from safetensors.numpy import save_file
import reshard
save_file({{"w": np.arange(1000)}}, {str(tmp_path / "a.safetensors")!r})
reshard.plan(reshard.open({str(tmp_path / "a.safetensors")!r})).run({str(tmp_path / "out")!r}, progress=True)
"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    bar = outputs(notebook)[0]
    assert '<progress value="1.000" max="1">' in bar["data"]["text/html"]
    assert bar["data"]["text/plain"].startswith("written: 8.0 kB of 8.0 kB")
