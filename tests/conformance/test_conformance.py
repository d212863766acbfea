"""What every format does, of checkpoints that other programs wrote or that are made by hand, against numpy.

A format of which something is particular has tests of its own for that.
"""

from __future__ import annotations

import json
import math
import shutil
from fnmatch import fnmatch
from glob import escape
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
from cases import CASES, Case, bits
from checkpoints import tree
from commands import call, done
from safetensors import deserialize

import reshard
from reshard.errors import ReshardError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    Made = Callable[[Case], tuple[Path, Mapping[str, Any]]]

FOUND = {3, 4}  # it differs; it cannot be read


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("conformance")


@pytest.fixture
def made(originals: Path, mindspore_data: Path, tmp_path: Path) -> Made:
    """Returns a copy of a checkpoint, and its truth; each is made once."""

    def make(case: Case) -> tuple[Path, Mapping[str, Any]]:
        root = originals / case.name.replace(" ", "_")
        if root not in MADE:
            root.mkdir()
            MADE[root] = case.make(root, mindspore_data)
        path, truth = MADE[root]
        shutil.copytree(root, tmp_path / "source", dirs_exist_ok=True)
        return tmp_path / "source" / path.relative_to(root), truth

    return make


MADE: dict[Path, tuple[Path, Mapping[str, Any]]] = {}
EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def opened(case: Case, path: Path) -> reshard.Checkpoint:
    return reshard.open(path, **case.opening)


def strategy_of(case: Case, tmp_path: Path) -> list[str]:
    """The strategy of a case as arguments of a command."""
    if "strategy" not in case.opening:
        return []
    reshard.write_strategy(case.opening["strategy"], tmp_path / "strategy.json")
    return ["--source-strategy", str(tmp_path / "strategy.json")]


def check(found: Mapping[str, Any], truth: Mapping[str, Any], *, partly: bool = False) -> int:
    """Compare the bits of tensors; return how many were compared."""
    shared = found.keys() & truth.keys()
    assert shared
    assert partly or found.keys() == truth.keys()
    for name in shared:
        value = bits(found[name])
        assert value.shape == truth[name].shape, name
        assert value.dtype.itemsize == truth[name].dtype.itemsize, name
        assert np.array_equal(value, truth[name]), name
    return len(shared)


def values(checkpoint: reshard.Checkpoint) -> dict[str, Any]:
    return {name: np.asarray(checkpoint[name].compute()) for name in checkpoint}


@EVERY
def test_it_is_what_was_saved(case: Case, made: Made) -> None:
    path, truth = made(case)
    source = opened(case, path)
    assert check(values(source), truth, partly=case.partly)


@EVERY
def test_boxes_of_it_are_what_numpy_cuts(case: Case, made: Made) -> None:
    path, truth = made(case)
    source, rng = opened(case, path), np.random.default_rng(0)
    for name in islice((name for name in source if name in truth and truth[name].ndim), 12):
        for _ in range(4):
            ends = [sorted(rng.integers(0, extent + 1, 2)) for extent in truth[name].shape]
            box = tuple(slice(int(start), int(stop)) for start, stop in ends)
            assert np.array_equal(bits(source[name][box].compute()), truth[name][box])


@EVERY
def test_it_is_listed_and_shown(case: Case, made: Made, tmp_path: Path) -> None:
    path, truth = made(case)
    (row,) = reshard.runs(path.parent)
    assert row.state == case.state, row.reason
    shown = json.loads(done("inspect", path, *strategy_of(case, tmp_path), "--json").stdout)
    shapes = {each["name"]: tuple(each["shape"]) for each in shown["tensors"]}
    assert all(shapes[name] == truth[name].shape for name in shapes.keys() & truth.keys())


def drops(source: reshard.Checkpoint) -> list[str]:
    """The options that leave out what no other format has."""
    return [text for name in (*source.unreadable, *source._record.extras.bound) for text in ("--drop", name)]


@EVERY
@pytest.mark.parametrize("to", ["safetensors", "zarr", "hf"])
def test_it_is_converted(case: Case, to: str, made: Made, tmp_path: Path) -> None:
    """Read back by the libraries of zarr and safetensors; a byte that changes is found."""
    path, truth = made(case)
    source = opened(case, path)
    truth = {name: truth[name] for name in source if name in truth}
    one_file = to == "safetensors" and path.is_file()
    out = tmp_path / ("out.zarr" if to == "zarr" else "out.safetensors" if one_file else "out")
    done("convert", path, out, "--to", to, *strategy_of(case, tmp_path), *drops(source))
    check(of_zarr(out) if to == "zarr" else of_safetensors(files_below(out)), truth)
    assert check(values(reshard.open(out)), truth) == len(truth)
    done("verify", out)
    spoil(max((file for file in files_below(out) if ".reshard" not in file.parts), key=size))
    against = ["--against", path] if one_file else []  # one file has no ledger beside it
    assert call("verify", out, *against).exit_code in FOUND


def of_zarr(store: Path) -> dict[str, Any]:
    """What zarr reads; what a checkpoint carries beside its tensors is in `%carried`."""
    members = zarr.open_group(store, mode="r").members(max_depth=None)
    arrays = {name: array for name, array in members if isinstance(array, zarr.Array)}
    return {
        array.attrs.get("reshard", {}).get("name", name): array[...]
        for name, array in arrays.items()
        if name != "%carried"
    }


def of_safetensors(files: Iterable[Path]) -> dict[str, Any]:
    """The bits that Hugging Face's library reads, of any dtype."""
    found = {}
    for file in files:
        for name, tensor in deserialize(file.read_bytes()) if file.suffix == ".safetensors" else ():
            dtype = np.dtype("?") if tensor["dtype"] == "BOOL" else np.dtype(f"u{itemsize(tensor)}")
            found[name] = np.frombuffer(tensor["data"], dtype).reshape(tensor["shape"])
    return found


def itemsize(tensor: Mapping[str, Any]) -> int:
    return len(tensor["data"]) // math.prod(tensor["shape"]) if math.prod(tensor["shape"]) else 1


def files_below(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def size(file: Path) -> int:
    return file.stat().st_size


def spoil(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


@EVERY
def test_a_plan_of_it_gives_the_same_bytes(case: Case, made: Made, tmp_path: Path) -> None:
    path, _ = made(case)
    dropped = drops(opened(case, path))
    done("convert", path, tmp_path / "out", "--to", "hf", *strategy_of(case, tmp_path), *dropped)
    done("plan", path, "--to", "hf", *strategy_of(case, tmp_path), *dropped, "-o", tmp_path / "plan.json")
    done("run", tmp_path / "plan.json", tmp_path / "planned")
    assert weights(tmp_path / "out") == weights(tmp_path / "planned")


def weights(path: Path) -> dict[str, bytes]:
    """The files of a target without its ledger, which has times."""
    return {name: content for name, content in tree(path).items() if not name.startswith(".reshard")}


@pytest.mark.parametrize("case", [case for case in CASES if case.again], ids=lambda case: case.name)
def test_its_own_format_is_made_of_it(case: Case, made: Made, tmp_path: Path) -> None:
    path, truth = made(case)
    source = opened(case, path)
    options = ["--target-step", "5"] if case.again == "checkpoint2" else []
    done("convert", path, tmp_path / "out", "--to", case.again, *strategy_of(case, tmp_path), *options)
    again = reshard.open(tmp_path / "out")
    assert again.format == case.again or (case.again, again.format) == ("safetensors", "safetensors")
    check(values(again), {name: truth[name] for name in source if name in truth}, partly=case.partly)
    done("verify", tmp_path / "out")


@EVERY
def test_names_are_chosen_and_changed(case: Case, made: Made, tmp_path: Path) -> None:
    path, truth = made(case)
    source = opened(case, path)
    name = next(name for name in source if name in truth)
    selection = reshard.Selection(include=(escape(name),), name_map={name: "other.name"})
    reshard.plan(source, format="hf", selection=selection).run(tmp_path / "out")
    assert check(values(reshard.open(tmp_path / "out")), {"other.name": truth[name]}) == 1


def outcome(case: Case, path: Path, truth: Mapping[str, Any], *, gone: bool = False) -> str:
    """Open and read a spoiled checkpoint: it is refused, or all that can be read is right.

    No tensor is missing without a word, but if a file is gone that nothing else names, such as an array's metadata.
    """
    try:
        source = opened(case, path)
        found = values(source)
    except ReshardError:
        return "refused"
    for name in found.keys() & truth.keys():
        assert np.array_equal(bits(found[name]), truth[name]), f"{name} is wrong"
    missing = truth.keys() - found.keys()
    assert missing <= source.unreadable.keys() or source.warnings or gone or case.partly, missing
    return "refused in part" if missing else "right"


def some_files(path: Path) -> list[Path]:
    every = files_below(path)
    return every[:: max(1, len(every) // 8)]


@EVERY
@pytest.mark.parametrize("left", [0, 0.5, None], ids=["empty", "half", "missing"])
def test_a_file_that_is_cut_short_gives_no_wrong_value(case: Case, left: float | None, made: Made) -> None:
    path, truth = made(case)
    for file in some_files(path):
        content = file.read_bytes()
        if left is None:
            if case.unmissed and fnmatch(file.name, case.unmissed):
                continue
            file.unlink()
        else:
            file.write_bytes(content[: int(len(content) * left)])
        outcome(case, path, truth, gone=left is None)
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)


@pytest.mark.parametrize("case", [case for case in CASES if case.metadata], ids=lambda case: case.name)
def test_metadata_that_are_cut_short_are_refused(case: Case, made: Made) -> None:
    path, truth = made(case)
    for file in (file for pattern in case.metadata for file in path.glob(pattern)):
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        assert outcome(case, path, truth) != "right", file
        file.write_bytes(content)
