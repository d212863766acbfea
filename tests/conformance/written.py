"""Reads what was written as each format without reshard: by libraries of the formats, and Python's unpickler."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorstore
import written_dcp
import zarr
from helpers import SAFETENSORS_NAMES, read_rank_file
from safetensors import deserialize
from stubbed import loaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    Found = dict[str, tuple[str, tuple[int, ...], bytes]]

STATES = ("fp32", "exp_avg", "exp_avg_sq", "step")


def told(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Return dtype, shape and bytes of an array."""
    array = np.asarray(array)
    return array.dtype.name, array.shape, array.tobytes()


def below(path: Path, pattern: str = "*") -> list[Path]:
    """Return the files that are a checkpoint's, without the ledger of the run that wrote it."""
    files = sorted(file for file in path.rglob(pattern) if file.is_file() and ".reshard" not in file.parts)
    return [path] if path.is_file() else files


def of_safetensors(files: Iterable[Path]) -> Found:
    """What Hugging Face's library reads."""
    return {
        name: (SAFETENSORS_NAMES[tensor["dtype"]], tuple(tensor["shape"]), bytes(tensor["data"]))
        for file in files
        for name, tensor in deserialize(file.read_bytes())
    }


def of_set(path: Path) -> Found:
    return of_safetensors(below(path, "*.safetensors"))


def of_ranks(path: Path) -> Found:
    """One rank's file, in either encoding."""
    (file,) = (path / "rank_0").iterdir()
    return read_rank_file(file)


def of_zarr(path: Path) -> Found:
    """What zarr reads; what a checkpoint carries beside its tensors is in `%carried`."""
    found = {}
    for path_name, array in zarr.open_group(path, mode="r").members(max_depth=None):
        if isinstance(array, zarr.Array) and path_name != "%carried":
            about = array.attrs.get("reshard", {})
            content = np.asarray(array[...])
            found[about.get("name", path_name)] = (
                about.get("dtype", content.dtype.name), content.shape, content.tobytes(),
            )  # fmt: skip
    return found


def of_orbax(path: Path) -> Found:
    """What TensorStore reads, with which Orbax reads; the names are those of the tree."""
    tree = json.loads((path / "_METADATA").read_text())["tree_metadata"]
    found = {}
    for entry in tree.values():
        name = ".".join(part["key"] for part in entry["key_metadata"])
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path / name)}}
        found[name] = told(tensorstore.open(spec, read=True).result().read().result())
    return found


def of_dcp(path: Path) -> Found:
    """What Python's unpickler and zipfile read."""
    found = written_dcp.read(path)
    return {
        name: (found.tensors[name].dtype.removeprefix("torch."), array.shape[:-1], array.tobytes())
        for name, array in found.whole().items()
    }


def of_checkpoint2(path: Path) -> Found:
    """What is in the files of the only rank."""
    return {name: value for file in below(path, "*.safetensors") for name, value in read_rank_file(file).items()}


def of_universal(path: Path) -> Found:
    """What is in the files of parameters, and the weights of the model states; halves are without their names."""
    found = {}
    for file in below(path, "zero/*/*.pt"):
        value = loaded(file)
        found[f"{file.stem}.{file.parent.name}"] = told(value["param"] if isinstance(value, dict) else value)
    (states,) = below(path, "mp_rank_00_model_states.pt")
    module = loaded(states)["module"]
    return found | {name: told(value) for name, value in module.items()}


READERS: Mapping[str, Callable[[Path], Found]] = {
    "safetensors": of_ranks, "ckpt": of_ranks, "hf": of_set, "mindspore": of_set, "zarr": of_zarr, "orbax": of_orbax,
    "dcp": of_dcp, "checkpoint2": of_checkpoint2, "deepspeed-universal": of_universal,
}  # fmt: skip
