"""Sources that are another between two runs, with the sizes, headers and times that they had."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoints import tree
from refusals import failed
from remotes import at_urls, get
from safetensors.numpy import load_file, save_file
from stopped_runs import call

from reshard.core.run.state import unchanged

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

NAMES = [f"layers.{number}.weight" for number in range(6)]
COMMAND = ["--to=hf", "--max-shard-size=40kB"]


def write(directory: Path, sign: float) -> Path:
    """Write a source whose size, header and time do not depend on the sign."""
    directory.mkdir(exist_ok=True)
    path = directory / "model.safetensors"
    tensors = {name: sign * np.arange(1, 10001, dtype=np.float32).reshape(100, 100) for name in NAMES}
    save_file(tensors, directory / "new")
    (directory / "new").rename(path)
    os.utime(path, (1, 1))
    return path


def signs(target: Path) -> set[float]:
    tensors: dict[str, NDArray[np.float32]] = {}
    for path in target.glob("*.safetensors"):
        tensors |= load_file(path)
    assert sorted(tensors) == NAMES
    return {float(np.sign(array).min()) for array in tensors.values()}


def in_place(path: Path, content: bytes) -> None:
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, (1, 1))


def moved_over(path: Path, content: bytes) -> None:
    """Replace a file as `rsync --times` does."""
    (path.parent / "received").write_bytes(content)
    os.utime(path.parent / "received", (1, 1))
    (path.parent / "received").rename(path)


def file_linked(path: Path, content: bytes) -> None:
    other = path.parent.with_name("other.safetensors")
    other.write_bytes(content)
    os.utime(other, (1, 1))
    path.unlink()
    path.symlink_to(other)


def directory_linked(path: Path, content: bytes) -> None:
    shutil.copytree(path.parent, path.parent.with_name("other"))
    moved_over(path.parent.with_name("other") / path.name, content)
    path.parent.rename(path.parent.with_name("before"))
    path.parent.symlink_to(path.parent.with_name("other"), target_is_directory=True)


WAYS = [in_place, moved_over, file_linked, directory_linked]


@pytest.fixture(params=["hf", "dcp", "zarr", "zstd", "orbax", "file"])
def command(request: pytest.FixtureRequest, tmp_path: Path) -> list[str | Path]:
    write(tmp_path / "src", 1)
    target, words = {
        "hf": ("out", COMMAND),
        "dcp": ("out", ["--to=dcp"]),
        "zarr": ("out.zarr", []),
        "zstd": ("out.zarr", ["--compression=zstd"]),
        "orbax": ("out", ["--to=orbax"]),
        "file": ("out.safetensors", []),
    }[request.param]
    return ["convert", tmp_path / "src", tmp_path / target, *words]


@pytest.fixture(params=WAYS)
def swap(request: pytest.FixtureRequest) -> Callable[[Path, bytes], object]:
    way: Callable[[Path, bytes], object] = request.param
    return way


@pytest.fixture(params=[False, True], ids=["finished", "begun"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> list[str | Path]:
    """The command of a target that was finished, or of which a killed run had named some files."""
    write(tmp_path / "src", 1)
    words: list[str | Path] = ["convert", tmp_path / "src", tmp_path / "out", *COMMAND]
    assert call(*words).exit_code == 0
    if request.param:
        (tmp_path / "out" / "model.safetensors.index.json").unlink()
        max((tmp_path / "out").glob("*.safetensors")).unlink()
    return words


def test_a_source_that_was_swapped_is_refused(
    tmp_path: Path, swap: Callable[[Path, bytes], object], written: list[str | Path]
) -> None:
    before = tree(tmp_path / "out")
    swap(tmp_path / "src" / "model.safetensors", write(tmp_path / "negative", -1).read_bytes())
    failed(6, "other-run", *written, places=(tmp_path / "out", "--restart"))
    assert "would be refused" in call(*written, "--dry-run").output
    assert tree(tmp_path / "out") == before
    assert call(*written, "--restart").exit_code == 0
    assert signs(tmp_path / "out") == {-1}


def test_a_copy_of_the_source_is_gone_on_with(
    tmp_path: Path, swap: Callable[[Path, bytes], object], written: list[str | Path]
) -> None:
    """It is another file, but has the same bytes: restored, or on a disk that was mounted again."""
    is_begun = not (tmp_path / "out" / "model.safetensors.index.json").exists()
    path = tmp_path / "src" / "model.safetensors"
    swap(path, path.read_bytes())
    again = call(*written)
    assert again.exit_code == 0
    assert ("nothing is left to do" in again.output) is not is_begun
    assert "warning: kept " in again.output
    assert signs(tmp_path / "out") == {1}
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_whatever_the_format(command: list[str | Path], tmp_path: Path) -> None:
    content = write(tmp_path / "negative", -1).read_bytes()
    assert call(*command).exit_code == 0
    again = call(*command)
    assert (again.exit_code, "nothing is left to do" in again.output) == (0, True)
    path = tmp_path / "src" / "model.safetensors"
    moved_over(path, path.read_bytes())
    assert call(*command).exit_code == 0
    before = tree(tmp_path)
    moved_over(path, content)
    is_compressed = "--compression=zstd" in command  # it cannot be compared, and so is written again
    is_file = Path(command[2]).suffix == ".safetensors"  # nothing says who wrote it
    assert call(*command).exit_code == (0 if is_compressed else 6)
    if not is_compressed:
        del before["src/model.safetensors"]
        assert {name: bytes_ for name, bytes_ in tree(tmp_path).items() if name in before} == before
        assert call(*command, "--overwrite" if is_file else "--restart").exit_code == 0
    back = tmp_path / "back.safetensors"
    assert call("convert", command[2], back).exit_code == 0
    assert all((array < 0).all() for array in load_file(back).values())


def test_the_other_files_that_are_read_may_be_swapped_too(tmp_path: Path) -> None:
    """One source of two: the files of the other one are as they were."""
    write(tmp_path / "a", 1)
    path = write(tmp_path / "b", 1)
    words = ["average", tmp_path / "a", tmp_path / "b", tmp_path / "out", "--to=hf"]
    assert call(*words).exit_code == 0
    moved_over(path, write(tmp_path / "negative", -1).read_bytes())
    failed(6, "other-run", *words, places=(tmp_path / "out",))


def test_samples_of_large_files_are_of_each_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there is too much to compare all of it, each tensor is looked at where it begins and where it ends."""
    monkeypatch.setattr(unchanged, "_MOST_BYTES", 1 << 10)
    monkeypatch.setattr(unchanged, "_LEAST_BYTES", 1 << 10)
    path = write(tmp_path / "src", 1)
    words = ["convert", tmp_path / "src", tmp_path / "out", *COMMAND]
    assert call(*words).exit_code == 0
    content = path.read_bytes()
    start = len(content) - len(NAMES) * 40000
    for number in range(len(NAMES)):
        for place in (0, 39996):
            at = start + number * 40000 + place
            moved_over(path, content[:at] + bytes(4) + content[at + 4 :])
            assert call(*words).exit_code == 6
    moved_over(path, content)
    assert call(*words).exit_code == 0


def test_a_file_that_is_not_as_it_would_be_written_is_in_the_way(tmp_path: Path) -> None:
    write(tmp_path / "src", 1)
    target = tmp_path / "one.safetensors"
    words = ["convert", tmp_path / "src", target]
    assert call(*words).exit_code == 0
    content = target.read_bytes()
    for other in (content[:-1], content + b"x", content[:9] + b"y" + content[10:], content[:-1] + b"z", b""):
        target.write_bytes(other)
        failed(6, "already-exists", *words, places=("--overwrite",))
        assert target.read_bytes() == other
    target.write_bytes(content)
    assert "nothing is left to do" in call(*words).output


@at_urls("name", ["one.safetensors", "one.ckpt", "store.zarr", "set"], 2)
def test_over_a_finished_target_at_a_url_nothing_is_left_to_do(root: str, name: str, tmp_path: Path) -> None:
    """A target that is one file was refused, as its ledger is gone once it is finished."""
    path = write(tmp_path / "src", 1)
    words = ["convert", tmp_path / "src", f"{root}/{name}", *(COMMAND if name == "set" else [])]
    assert call(*words).exit_code == 0
    before = get(root)
    again = call(*words)
    assert (again.exit_code, "nothing is left to do" in again.output) == (0, True)
    moved_over(path, write(tmp_path / "negative", -1).read_bytes())
    assert call(*words).exit_code == 6
    assert get(root) == before
