"""The structure that DESIGN section 6 promises: imports point one way, and few of them happen at once."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import reshard

PACKAGE = Path(reshard.__file__).parent

# A module may import those of its own line and of the lines below it.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"cli_plan"},
    {"cli_strategy", "cli_write", "cli_verify"},
    {"mindspore"},
    {"mindspore.parallel"},
    {"mindspore.unified"},
    {"mindspore.transform"},
    {"mindspore.arguments", "mindspore.slices"},
    {"mindspore.strategy"},
    {"mindspore.convert"},
    {"mindspore.save_load"},
    {"mindspore.network", "mindspore.write"},
    {"mindspore.communication", "mindspore.context"},
    {"mindspore.parameter"},
    {"mindspore.launch", "mindspore.foreign", "mindspore.absent"},
    {"demo"},
    {"verdict"},
    {"verification"},
    {"cli_written"},
    {"cli_words", "cli_manifest"},
    {"progress"},
    {"cli_options", "terminal"},
    {"show.notebook"},
    {"report"},
    {"run", "show", "convert", "plan_file", "groups"},
    {"cluster"},
    {"show.blocks", "show.flow"},
    {"show.picture"},
    {"show.markup", "show.plans"},
    {"show.checkpoints"},
    {"show.strategies"},
    {"show.words"},
    {"show.folding"},
    {"graph", "arrays", "resume", "run_manifest"},
    {"tasks"},
    {"receipts", "target_check"},
    {"source", "move", "compare", "matching", "manifest_files", "structure", "chunk_task", "file_task", "ownership"},
    {"zarr_source"},
    {"zarr_files"},
    {"contents", "replicas"},
    {"join"},
    {"zarr_planner"},
    {"planner"},
    {"plan"},
    {"strategy_diff"},
    {"rank_files", "selection", "headers"},
    {"zarr_chunks"},
    {"formats.ckpt", "formats.safetensors", "formats.directories", "formats.unified", "formats.zarr"},
    {"formats"},
    {"bands", "checkpoint", "cipher", "target_files", "manifest", "difference"},
    {"remote_journal"},
    {"store_journal"},
    {"remote_store", "journal"},
    {"fingerprint"},
    {"store"},
    {"page_cache"},
    {"strategy_file", "rules_file"},
    {"rules"},
    {"strategy", "proto", "redundancy", "operators", "needed"},
    {"layout"},
    {"schema"},
    {"untrusted", "small_file"},
    {"block", "dtypes", "checksum", "remote", "threads"},
    {"entry", "errors"},
]

# One-line conveniences that look upward: `checkpoint["w"]`, `plan.rank`, `plan.graph`, `plan.run`, `_repr_html_`,
# `picture`, the registry of formats, the command itself; and names for type checkers only do not count.
UPWARD = {("checkpoint", "arrays"), ("plan", "arrays"), ("plan", "graph"), ("plan", "tasks"), ("plan", "run"),
          ("plan", "planner"), ("plan", "plan_file"), ("plan", "progress"), ("plan", "ownership"),
          ("checkpoint", "groups"), ("checkpoint", "show.blocks"), ("layout", "show.blocks"),
          ("strategy", "show.blocks"), ("plan", "show.flow"), ("checkpoint", "show.notebook"),
          ("layout", "show.notebook"), ("strategy", "show.notebook"), ("plan", "show.notebook"),
          ("groups", "show.notebook"), ("run", "show.notebook"), ("graph", "show.notebook"),
          ("strategy", "rules"), ("rules", "selection"), ("formats", "formats.ckpt"),
          ("formats", "formats.safetensors"), ("plan", "zarr_planner"),
          ("entry", "cli"), ("checkpoint", "plan"), ("checkpoint", "formats.zarr")}  # fmt: skip

DASK_USERS = {"cluster", "graph", "arrays", "run"}


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """The modules that a file imports, anywhere but for type checkers alone."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py") if module_name(path) != "__init__"}


def test_imports_point_one_way() -> None:
    level = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    assert set(MODULES) - {"proto.__main__"} == set(level), "a new module has its place in LAYERS"
    wrong = []
    for name, path in MODULES.items():
        for imported in imports(path):
            other = imported.removeprefix("reshard.")
            known = imported.startswith("reshard.") and other in level and name in level
            if known and level[other] < level[name] and (name, other) not in UPWARD:
                wrong.append((name, other))
    assert not wrong


def test_few_modules_know_dask() -> None:
    users = {
        name for name, path in MODULES.items() if any(i.split(".")[0] in {"dask", "distributed"} for i in imports(path))
    }
    assert users <= DASK_USERS


def loaded_by(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in done.stdout.split()}


def test_importing_reshard_imports_nothing_heavy() -> None:
    assert loaded_by("import reshard; reshard.Strategy, reshard.read_strategy").isdisjoint(
        {"numpy", "dask", "zarr", "ml_dtypes", "google", "distributed"}
    )


def test_every_public_name_is_there() -> None:
    for name in reshard.__all__:
        assert getattr(reshard, name) is not None
    assert set(reshard.__all__) <= set(dir(reshard))
