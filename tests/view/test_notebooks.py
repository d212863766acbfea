"""The notebooks run from the first cell to the last, and end in what they are for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from samples import slow

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

FOLDER = Path(__file__).parents[2] / "notebooks"
ENDS = {
    "1_look": ("image/svg+xml", "rank"),
    "2_reshard": ("text/html", "every bit of"),
    "3_cluster": ("text/plain", "dashboard while it ran: http://127.0.0.1:"),
    "4_larger_than_memory": ("text/plain", "of 256 MB"),
    "5_believable_size": ("text/plain", "2,166 tensors on 512 ranks"),
    "6_pytorch": ("text/plain", "equal bit for bit: True"),
    "7_compute": ("text/plain", "equal bit for bit: True"),
}
LONG = {"3_cluster", "4_larger_than_memory"}  # half a minute each; `.ci/run` runs them


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
    notebook = nbformat.read(path, as_version=4)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    assert path.stat().st_size < 200_000
    assert notebook.cells[-1].source.startswith("## Next\n"), "it ends with what to do next"


@pytest.mark.parametrize("name", [slow(name) if name in LONG else name for name in ENDS])
def test_it_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    began = time.monotonic()
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    print(f"{name}: {time.monotonic() - began:.1f} s")
    kind, word = ENDS[name]
    last = [cell for cell in notebook.cells if cell.cell_type == "code"][-1]
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
