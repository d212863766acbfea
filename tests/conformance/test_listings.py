"""What opens a directory, and what is listed in it: whole recorded checkpoints, spoiled ones, and small files by hand.

The rows of `listings.json` have the files of a directory, what is opened, and the answers. `detection.json` has each
format beside each other one. `python tests/conformance/test_listings.py --record` records today's answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import pytest
import zarr
from commands import call
from helpers import unpack
from orbax_files import write_orbax
from safetensors.numpy import save_file
from saves_files import tensor, write_save

import reshard

if TYPE_CHECKING:
    from collections.abc import Callable

TABLE = Path(__file__).with_name("listings.json")
ROWS: dict[str, dict[str, Any]] = json.loads(TABLE.read_text())
FIRST_TIME = 1_700_000_000
ARRAY = np.arange(8, dtype=np.float32).reshape(2, 4)


def arrays(names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), ARRAY)


def field(number: int, content: bytes) -> bytes:
    """Return a field of a protobuf message, of fewer than 128 bytes."""
    return bytes([number << 3 | 2, len(content)]) + content


def ckpt(names: str) -> bytes:
    """Return a checkpoint file of MindSpore."""
    dims = b"".join(bytes([1 << 3, size]) for size in ARRAY.shape)
    value = dims + field(2, b"Float32") + field(3, ARRAY.tobytes())
    return b"".join(field(1, field(1, name.encode()) + field(2, value)) for name in names.split())


def write_zarr(path: Path, names: str) -> None:
    zarr.create_group(path)
    for name in names.split():
        zarr.create_array(path / name, data=ARRAY, compressors=None)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def convert(path: Path, to: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        save_file(arrays("a b"), Path(directory) / "model.safetensors")
        options: dict[str, Any] = {"to": to}
        if to == "ranks":
            layout = reshard.Layout.of([2], [0, -1])
            options = {"to": "safetensors", "target_strategy": reshard.Strategy.of(dict.fromkeys("ab", layout))}
        elif to == "checkpoint2":
            options["target_step"] = 5
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the step alone, Checkpoint 2.0 has nothing else to say
            reshard.convert(Path(directory) / "model.safetensors", path, **options)


class StoppedError(Exception):
    """Ends a run."""


def stop(path: Path, _: str) -> None:
    """Leave a target as a run does that ends in the middle, at its sixth progress."""
    progresses = iter(range(5))

    def progress(_: object) -> None:
        if next(progresses, None) is None:
            raise StoppedError

    with tempfile.TemporaryDirectory() as directory, contextlib.suppress(StoppedError):
        source = Path(directory) / "model.safetensors"
        save_file(arrays("a b c d"), source)
        reshard.convert(source, path, to="hf", max_shard_size=ARRAY.nbytes, progress=progress, threads=1)


def link(path: Path, target: str) -> None:
    path.symlink_to(target)


WRITERS: dict[str, Callable[[Path, str], object]] = {
    "dir": lambda path, _: path.mkdir(),
    "empty": lambda path, _: path.write_bytes(b""),
    "text": lambda path, text: path.write_text(text),
    "json": lambda path, text: path.write_text(text),
    "pickle": lambda path, _: path.write_bytes(pickle.dumps({}, 4)),
    "gguf": lambda path, _: path.write_bytes(b"GGUF\3\0\0\0" + bytes(16)),
    "npy": lambda path, _: np.save(path, ARRAY),
    "npz": lambda path, _: np.savez(path, w=ARRAY),
    "safetensors": lambda path, names: save_file(arrays(names), path),
    "blocks": lambda path, names: save_file(arrays(names), path, {"DCP_SHARDING_INFO": "{}"}),
    "ckpt": lambda path, names: path.write_bytes(ckpt(names)),
    "torch.save": lambda path, names: write_save(path, {name: tensor(ARRAY) for name in names.split()}),
    "zarr": write_zarr,
    "array": lambda path, _: zarr.create_array(path, data=ARRAY, compressors=None),
    "orbax": lambda path, names: write_orbax(path, arrays(names)),
    "link": link,
    "gone": lambda path, _: remove(path),
    "cut": lambda path, _: path.write_bytes(path.read_bytes()[:-1]),
    "converted": convert,
    "stopped": stop,
}
"""Writes an entry, by the first word of its description."""


def copy(source: Path, path: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, path, dirs_exist_ok=True)
    else:
        shutil.copy(source, path)


def build(root: Path, files: dict[str, str], recorded: Path) -> None:
    """Write a listing; the later an entry stands in it, the later its files changed."""
    for minute, (name, content) in enumerate(files.items()):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        word, _, rest = content.partition(" ")
        if word == "recorded":
            copy(recorded / rest, path)
        else:
            WRITERS[word](path, rest)
        for file in [path, *path.rglob("*")] if path.is_dir() and word != "link" else [path]:
            if file.is_file() and not file.is_symlink():
                os.utime(file, (FIRST_TIME + 60 * minute,) * 2)


def opened(root: Path, row: dict[str, Any]) -> Any:
    """Return what a path is opened as, or the code of the error."""
    options = {"step": row["iteration"]} if "iteration" in row else {}
    try:
        checkpoint = reshard.open(root / row.get("open", ""), **options)
    except reshard.ReshardError as error:
        return error.codes[0]
    return {
        "root": os.path.relpath(checkpoint.root, root),
        "format": checkpoint.format,
        "tensors": len(checkpoint),
        "ranks": len(set(checkpoint.ranks)),
        "unreadable": len(checkpoint.unreadable),
        "warnings": len(checkpoint.warnings),
    }


def listed(root: Path) -> list[Any]:
    """Return the checkpoints in a directory, or the code of the error."""
    try:
        runs = [*reshard.runs(root)]
    except reshard.ReshardError as error:
        return [error.codes[0]]
    return sorted(
        [os.path.relpath(run.path, root), run.format, run.step, run.state]
        + [word for word in ("newest", "last") if getattr(run, word)]
        for run in runs
    )


def answers(row: dict[str, Any], root: Path, recorded: Path) -> dict[str, Any]:
    root.mkdir(parents=True)
    build(root, row["files"], recorded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {"opens": opened(root, row), "runs": listed(root)}


@pytest.mark.parametrize("name", ROWS)
def test_what_opens(name: str, tmp_path: Path, mindspore_data: Path) -> None:
    row, root = ROWS[name], tmp_path / "above/here"
    assert answers(row, root, mindspore_data) == {key: row[key] for key in ("opens", "runs")}
    newest = [str(root / run[0]) for run in row["runs"] if "newest" in run]
    result = call("runs", root, "--newest")
    assert (result.exit_code == 0) == bool(newest)
    assert not newest or result.stdout == f"{newest[0]}\n"


def written(row: dict[str, Any]) -> str:
    """Return a row as JSON, a field a line."""
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in row.items()) + "\n}"


if __name__ == "__main__" and "--record" in sys.argv:
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory).resolve()
        unpack(base)
        for number, listing in enumerate(ROWS.values()):
            listing.update(answers(listing, base / f"listing_{number}/above/here", base))
    TABLE.write_text("{\n" + ",\n".join(f"{json.dumps(name)}: {written(row)}" for name, row in ROWS.items()) + "\n}\n")
