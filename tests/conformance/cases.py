"""One recorded or hand-written checkpoint of each format, with its truth: the bits of whole tensors by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from checkpoints import numbers, write_file, write_ranks
from saves_files import tensor, write_save

from reshard import Layout, Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

FULL = {**numbers({"a": (8, 6), "b": (16,), "c": (4, 4, 2)}), "n": np.arange(8, dtype=np.int64)}
STRATEGY = Strategy.of(
    {
        "a": Layout.of([4], [0, -1]),
        "b": Layout.of([4], [0]),
        "c": Layout.of([4], [0, -1, -1]),
        "n": Layout.of([4], [0]),
    }
)


@dataclass(frozen=True)
class Case:
    """A checkpoint.

    Attributes:
        name: its name in tests, the format first.
        make: puts it into a directory, and returns what is opened and the bits of its tensors by name.
        opening: keywords of opening it.
        state: what `runs` says of it.
        again: the word of its format as a target, if a target of it is made from the checkpoint itself.
        metadata: names of files that every reader needs.
        partly: the tensors of the truth need not all be readable.
        unmissed: a pattern of files whose absence cannot be told; `runs` says so of such a checkpoint.
    """

    name: str
    make: Callable[[Path, Path], tuple[Path, Mapping[str, Any]]]
    opening: dict[str, Any] = field(default_factory=dict)
    state: str = "complete"
    again: str = ""
    metadata: tuple[str, ...] = ()
    partly: bool = False
    unmissed: str = ""


def bits(array: Any) -> Any:
    """Return the bits of an array, whatever its dtype is."""
    array = np.asarray(array)
    return array if array.dtype == bool else array.reshape(array.shape).view(f"u{array.dtype.itemsize}")


def recorded(case: str, inside: str = "checkpoint", **renamed: str) -> Callable[[Path, Path], tuple[Path, Any]]:
    """Return a maker of a copy of a recorded case; `renamed` are beginnings of names, and what they are in reshard."""

    def make(root: Path, data: Path) -> tuple[Path, dict[str, Any]]:
        shutil.copytree(data / case / inside, root / "checkpoint")
        with np.load(data / case / "full.npz") as arrays:
            truth = {name.replace("\\", "/"): bits(arrays[name]) for name in arrays.files}
        for old, new in renamed.items():
            truth = {new + name[len(old) :] if name.startswith(old) else name: array for name, array in truth.items()}
        return root / "checkpoint", truth

    return make


def by_hand(write: Callable[[Path], Path]) -> Callable[[Path, Path], tuple[Path, Any]]:
    """Return a maker of a checkpoint of `FULL`."""
    return lambda root, _data: (write(root), {name: bits(array) for name, array in FULL.items()})


def ranks(encoding: str) -> Callable[[Path], Path]:
    return lambda root: write_ranks(root / "checkpoint", FULL, STRATEGY, encoding)


def one_file(root: Path) -> Path:
    return write_file(root / "model.safetensors", FULL)


def hugging_face(root: Path) -> Path:
    halves = [dict(list(FULL.items())[:2]), dict(list(FULL.items())[2:])]
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, half in zip(names, halves, strict=True):
        write_file(root / "checkpoint" / name, half)
    weight_map = {name: names[number] for number, half in enumerate(halves) for name in half}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (root / "checkpoint/model.safetensors.index.json").write_text(json.dumps(index))
    return root / "checkpoint"


def mindspore(root: Path) -> Path:
    write_file(root / "checkpoint/part0.safetensors", FULL)
    (root / "checkpoint/param_name_map.json").write_text(json.dumps(dict.fromkeys(FULL, "part0.safetensors")))
    return root / "checkpoint"


def zarr_3(root: Path) -> Path:
    group = zarr.create_group(root / "checkpoint")
    for name, array in FULL.items():
        chunks = tuple(-(-extent // 2) for extent in array.shape)
        group.create_array(name, data=array, chunks=chunks, compressors=None)
    return root / "checkpoint"


def zarr_2(root: Path) -> Path:
    group = zarr.create_group(root / "checkpoint", zarr_format=2)
    for name, array in FULL.items():
        group.create_array(name, data=array, chunks=array.shape)
    return root / "checkpoint"


def save(root: Path) -> Path:
    return write_save(root / "model.pt", {name: tensor(array) for name, array in FULL.items()}) or root / "model.pt"


def bin_set(root: Path) -> Path:
    (root / "checkpoint").mkdir()
    halves = [dict(list(FULL.items())[:2]), dict(list(FULL.items())[2:])]
    names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    for name, half in zip(names, halves, strict=True):
        write_save(root / "checkpoint" / name, {key: tensor(array) for key, array in half.items()})
    weight_map = {name: names[number] for number, half in enumerate(halves) for name in half}
    index = {"metadata": {}, "weight_map": weight_map}
    (root / "checkpoint/pytorch_model.bin.index.json").write_text(json.dumps(index))
    return root / "checkpoint"


CASES = [
    Case("ranks of safetensors", by_hand(ranks("safetensors")), {"strategy": STRATEGY}, "unknown", "safetensors"),
    Case("ranks of ckpt", by_hand(ranks("ckpt")), {"strategy": STRATEGY}, "unknown", "ckpt"),
    Case("one file", by_hand(one_file)),
    Case("hf", by_hand(hugging_face), again="hf", metadata=("model.safetensors.index.json",)),
    Case("mindspore", by_hand(mindspore), again="mindspore", metadata=("param_name_map.json",)),
    Case("zarr", by_hand(zarr_3), {}, "unknown", "zarr", ("zarr.json", "a/zarr.json"), unmissed="[0-9]"),
    Case("zarr of format 2", by_hand(zarr_2), {}, "unknown", "", (".zgroup", "a/.zarray"), unmissed="[0-9]*"),
    Case("torch.save", by_hand(save)),
    Case("torch.save, a set", by_hand(bin_set), metadata=("pytorch_model.bin.index.json",)),
    Case("checkpoint2", recorded("checkpoint2/graph_dp2_tp4"), again="checkpoint2", metadata=("*/metadata.json",)),
    Case("checkpoint2 of one rank", recorded("checkpoint2/graph_1"), again="checkpoint2"),
    Case("dcp", recorded("dcp/tp"), again="dcp", metadata=(".metadata",)),
    Case("dcp of FSDP", recorded("dcp/fsdp2_uneven"), again="dcp", metadata=(".metadata",)),
    Case("dcp of Megatron-Core", recorded("dcp/mcore_tp2_pp2"), again="dcp", metadata=(".metadata",), partly=True),
    Case("dcp for Hugging Face", recorded("dcp/hf_sharded"), state="unknown", unmissed="*.safetensors"),
    Case("deepspeed", recorded("deepspeed/s2_dp2_bf16", **{"module.": ""}), again="deepspeed-universal", partly=True),
    Case("megatron", recorded("megatron_legacy/plain")),
    Case("orbax", recorded("orbax/mesh4x2_files_zarr2"), {}, "unknown", "orbax", ("_METADATA",)),
    Case("orbax in a database", recorded("orbax/mesh4x2_ocdbt_zarr2"), metadata=("_METADATA", "manifest.ocdbt")),
]
