"""The structure of the package: imports point down from floor to floor, and few of them happen at once."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import reshard
from reshard.core.format import named
from reshard.upward import HOMES

PACKAGE = Path(reshard.__file__).parent

# From the top down: a module imports those of its own floor and of the floors below it. A floor may have several rooms.
FLOORS = [
    ("cli",), ("mindspore",), ("api",), ("view",), ("compute",), ("core.verify",), ("core.run",), ("core.plan",),
    ("formats",), ("core.reopen",), ("core.open", "core.catalog"), ("core.records", "core.target"), ("core.runs",),
    ("rules",), ("expressions",), ("kits",), ("core.format",), ("core.rank_files",),
    ("core.listing", "core.options"), ("core.model",), ("strategy",), ("core.storage",), ("core.layout",),
]  # fmt: skip
ROOT = {
    "__init__", "__main__", "arguments", "dtypes", "environment", "errors", "former", "messages", "siblings", "sizes",
    "spelling", "upward", "wording",
}  # fmt: skip

UPWARD: set[tuple[str, str]] = set()

MOST_MODULES = 13  # of a folder, with its `__init__`

DASK_USERS = {
    "api.writing", "core.run.clusters.connect", "core.run.clusters.waking", "core.run.clusters.where",
    "core.run.executor", "core.run.graph", "core.run.layers", "core.run.run",
    "formats.zarr.objects", "view.arrays", "view.arrays.low",
}  # fmt: skip


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py") if module_name(path) != "__init__"}


@cache
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
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
            found.add(node.module or "")
    return found


def imported_modules(path: Path) -> set[str]:
    """Those of the package."""
    return {name.removeprefix("reshard.") for name in imports(path) if name.startswith("reshard.")} & set(MODULES)


def room(module: str) -> str:
    first, _, rest = module.partition(".")
    return f"core.{rest.partition('.')[0]}" if first == "core" and rest else first


ROOMS = [name for floor in FLOORS for name in floor]


def test_every_module_is_in_a_room() -> None:
    assert {room(name) for name in MODULES} - set(ROOMS) == (ROOT | {"core"}) - {"__init__"}
    for path in PACKAGE.rglob("__init__.py"):
        assert path.read_text().startswith(('"""', 'r"""'))


def test_imports_point_down() -> None:
    level = {name: number for number, floor in enumerate(FLOORS) for name in floor} | {
        "core": 90,
        "arguments": 90,
        "dtypes": 90,
        "environment": 90,
        "former": 90,
        "siblings": 90,
        "sizes": 90,
        "spelling": 90,
        "upward": 90,
        "errors": 91,
        "messages": 92,
        "wording": 92,
    }
    wrong = [
        (name, other)
        for name, path in MODULES.items()
        for other in imported_modules(path)
        if name != "__main__" and level[room(other)] < level[room(name)]
    ]
    assert set(wrong) == UPWARD


FORMATS = {
    each.name: PACKAGE / each.name for each in (PACKAGE / "formats").iterdir() if (each / "__init__.py").exists()
}

WORDS = re.compile(
    r"dcp|distcp|checkpoint2|orbax|ocdbt|deepspeed|megatron|zarr|hugging_?face|torch_?save|consolidated|universal",
    re.IGNORECASE,
)
NAMING = {
    "api.checkpoints": "`Checkpoint.to_zarr`, as xarray has it",
    "api.demos.examples": "the demo converts between formats",
    "former": "what words of old are now",
    "core.storage.urls.hub": "the package of a service that is called like a format",
}
"""The modules outside of the folders that name a format, and why."""

OF_FORMATS = {
    ("api.checkpoints", "zarr"), ("api.jobs", "ranks"), ("core.plan.make", "sets"),
    ("mindspore.transform", "ranks"), ("mindspore.unified", "ranks"),
    ("mindspore.unified", "sets"),
}  # fmt: skip
"""The modules outside of its folder that import a format: all but a few know files of ranks, the last resort."""

BESIDE = {
    ("checkpoint2", "ranks"), ("dcp", "ranks"), ("deepspeed", "torch_save"),
    ("megatron", "torch_save"), ("ranks", "sets"), ("zarr", "sets"),
}  # fmt: skip
"""The formats that import another one, which they do not extend."""


def names_a_format(path: Path) -> bool:
    """Return whether an identifier, an import or a text that is no docstring has a word of a format."""
    tree = ast.parse(path.read_text())
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    documented = [node for node in ast.walk(tree) if isinstance(node, kinds) and node.body]
    docs = {id(node.body[0].value) for node in documented if isinstance(node.body[0], ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom():
                texts = [node.module or "", *(alias.name for alias in node.names)]
            case ast.Import():
                texts = [alias.name for alias in node.names]
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.FunctionDef(name=text) | ast.ClassDef(name=text):
                texts = [text]
            case ast.Constant(value=str(text)) if id(node) not in docs:
                texts = [text]
            case _:
                texts = []
        if any(map(WORDS.search, texts)):
            return True
    return False


def test_a_format_is_named_in_its_own_folder_only() -> None:
    outside = {
        name: path for name, path in MODULES.items() if name.split(".")[0] not in {"formats", "kits", "mindspore"}
    }
    outside["__init__"] = PACKAGE / "__init__.py"
    assert {name for name, path in outside.items() if names_a_format(path)} == NAMING.keys()


def test_nobody_imports_a_format_but_the_list() -> None:
    """And formats import those that they extend."""
    found, beside = set(), set()
    extended = {
        (path.name, named(other).__class__.__module__.rpartition(".")[2])
        for path in FORMATS.values()
        for each in importlib.import_module(f"reshard.formats.{path.name}").FORMATS
        for other in each.extends
    }
    for name, path in MODULES.items():
        first, _, rest = name.partition(".")
        own = rest.partition(".")[0] if first == "formats" and rest.partition(".")[0] in FORMATS else None
        for other in imported_modules(path):
            folder = other.removeprefix("formats.").partition(".")[0] if other.startswith("formats.") else ""
            if folder in FORMATS and folder != own:
                (found if own is None else beside).add((name if own is None else own, folder))
    assert found == OF_FORMATS
    assert beside - extended == BESIDE


def test_no_module_imports_in_a_circle() -> None:
    """Imports that happen later count, too."""
    edges = {name: imported_modules(path) - {name} for name, path in MODULES.items()}

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            for other in edges[waiting.pop()] - found:
                found.add(other)
                waiting.append(other)
        return found

    below = {name: reached(name) for name in edges}
    cycles = {name: {other for other in below[name] if name in below[other]} for name in edges}
    assert not any(cycles.values())


def test_a_folder_has_few_modules() -> None:
    counts = {path.parent: len(list(path.parent.glob("*.py"))) for path in PACKAGE.rglob("__init__.py")}
    assert {folder: count for folder, count in counts.items() if count > MOST_MODULES} == {}


def test_few_conveniences_look_upward() -> None:
    assert len(HOMES) <= 3
    for home in HOMES.values():
        assert home in MODULES
    users = {name for name, path in MODULES.items() if "reshard.upward.upward" in imports(path)}
    assert users == {
        "compute.differences", "compute.stats", "core.layout.layout", "strategy.strategy",
        "core.run.graph", "core.run.settings", "strategy.diff", "core.verify.verification", "view.svg", "view.tables",
    }  # fmt: skip
    text = "".join(MODULES[name].read_text() for name in users)
    for name in HOMES:
        assert f'upward("{name}")' in text


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


@pytest.mark.parametrize("name", ["plan", "verify"])
def test_a_function_is_not_hidden_by_the_shelf_of_its_name(name: str) -> None:
    script = f"import reshard, reshard.core.plan.bands, reshard.core.verify.manifest\nassert callable(reshard.{name})"
    subprocess.run([sys.executable, "-c", script], check=True)


def imported_by(*arguments: str) -> set[str]:
    """Return the modules that a command imports, by Python's own report."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "reshard", *arguments], capture_output=True, text=True, check=True
    )
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


def test_a_command_imports_what_it_needs(tmp_path: Path) -> None:
    """dask takes jinja2 and psutil where they are installed, and no command needs them."""
    strategy = reshard.Strategy.of({"w": reshard.Layout.of([2], [0, -1])})
    for rank in range(2):
        (tmp_path / f"src/rank_{rank}").mkdir(parents=True)
        save_file({"w": np.zeros((2, 4), np.float32)}, tmp_path / f"src/rank_{rank}/checkpoint_{rank}.safetensors")
    reshard.write_strategy(strategy, tmp_path / "src.json")
    imported = imported_by("convert", str(tmp_path / "src"), str(tmp_path / "dst"), "--source-strategy",
                           str(tmp_path / "src.json"))  # fmt: skip
    assert {"dask.threaded", "reshard.core.run.run"} <= imported
    assert imported.isdisjoint({"jinja2.environment", "psutil._common", "reshard.rules.rules", "reshard.view.data"})
    assert not {name for name in imported_by("verify", str(tmp_path / "dst")) if name.split(".")[0] == "dask"}


def test_dask_is_whole_for_programs_that_import_reshard() -> None:
    """Later imports find what a command leaves out."""
    pytest.importorskip("jinja2")
    pytest.importorskip("psutil")
    script = (
        "from reshard.core.run.executor import import_dask\nimport_dask()\n"
        "import dask, sys\nassert 'psutil' not in sys.modules\nimport jinja2, psutil"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
