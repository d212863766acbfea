"""The notebooks with what their cells show today: each is run in an empty folder.

python tests/notebooks_made.py             # runs all again, and stores what they show
python tests/notebooks_made.py 1_look ...  # or some
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "notebooks"


def executed(name: str, folder: Path) -> Any:
    """Return a notebook with the outputs of running it in a folder."""
    import nbclient  # an extra
    import nbformat

    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = []
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", record_timing=False, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    return notebook


if __name__ == "__main__":
    import nbformat

    folder = Path(tempfile.gettempdir(), "reshard-notebooks")  # always the same, since reports show where files are
    for name in sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        folder.mkdir()
        try:
            notebook = executed(name, folder)
        finally:
            shutil.rmtree(folder)
        nbformat.write(notebook, FOLDER / f"{name}.ipynb")
        print(name)
