"""One recorded or hand-written checkpoint of each format, with its truth: whole tensors by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import zarr
from checkpoints import blocks, numbers
from helpers import MINDSPORE_NAMES, library_safetensors, message_class
from saves_files import tensor, write_save
from tensor_parallel import llama, megatron, write_llama, write_megatron

from reshard import Layout, Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Truth = Mapping[str, np.ndarray[Any, Any]]
    Make = Callable[[Path, Path], tuple[Path, Truth]]

FULL = {**numbers({"a": (8, 6), "b": (16,), "c": (4, 4, 2)}), "n": np.arange(8, dtype=np.int64)}
STRATEGY = Strategy.of(
    {
        "a": Layout.of([4], [0, -1]),
        "b": Layout.of([4], [0]),
        "c": Layout.of([4], [0, -1, -1]),
        "n": Layout.of([4], [0]),
    }
)
STAGES = Strategy.of(
    {
        "a": {0: Layout.of([2, 2], [(0, 1), -1])},
        "b": {1: Layout.of([2, 2], [0])},
        "c": {0: Layout.of([2, 2], [1, 0, -1])},
        "n": {1: Layout.of([2, 2], [-1], -1)},
    }
)


@dataclass(frozen=True)
class Case:
    """A checkpoint.

    Attributes:
        name: its name in tests, the format first.
        make: puts it into a directory, and returns what is opened and its tensors by name.
        opening: keywords of opening it.
        state: what `runs` says of it.
        again: the word of its format as a target, if a target of it is made from the checkpoint itself.
        metadata: names of files that every reader needs.
        unmissed: a pattern of files whose absence cannot be told; `runs` says so of such a checkpoint.
        drop: what no other format has, as patterns of names.
    """

    name: str
    make: Make
    opening: dict[str, Any] = field(default_factory=dict)
    state: str = "complete"
    again: str = ""
    metadata: tuple[str, ...] = ()
    unmissed: str = ""
    drop: tuple[str, ...] = ()


def of_dtype(array: Any, dtype: str) -> Any:
    """Return an array of this dtype; numpy stores those that it has not as numbers of their size."""
    return array if array.dtype.name == dtype else array.view(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def recorded(case: str, inside: str = "checkpoint", **renamed: str) -> Make:
    """Return a maker of a copy of a recorded case; `renamed` are beginnings of names, and what they are in reshard."""

    def make(root: Path, data: Path) -> tuple[Path, Truth]:
        shutil.copytree(data / case / inside, root / "checkpoint")
        about = next(path for name in ("info.json", "meta.json") if (path := data / case / name).exists())
        dtypes = json.loads(about.read_text()).get("dtypes", {})
        with np.load(data / case / "full.npz") as arrays:
            truth = {name: of_dtype(arrays[name], dtypes.get(name, arrays[name].dtype.name)) for name in arrays.files}
        truth = {name.replace("\\", "/"): array for name, array in truth.items()}
        for old, new in renamed.items():
            truth = {new + name[len(old) :] if name.startswith(old) else name: array for name, array in truth.items()}
        return root / "checkpoint", truth

    return make


def by_hand(write: Callable[[Path], Path]) -> Make:
    """Return a maker of a checkpoint of `FULL`."""
    return lambda root, _data: (write(root), FULL)


def parts_of_meta(root: Path, _data: Path) -> tuple[Path, Truth]:
    full = llama()
    return write_llama(root / "checkpoint", full), full


def virtual_stages(root: Path, _data: Path) -> tuple[Path, Truth]:
    full = megatron()
    return write_megatron(root / "checkpoint/iter_0000005", full, [[1, 1], [1, 1]]), full


def write_file(path: Path, tensors: Truth) -> Path:
    """Write a file by the library safetensors, or, for MindSpore, by protobuf."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        stored = {name: (array.dtype.name, array.shape, array.tobytes()) for name, array in tensors.items()}
        path.write_bytes(library_safetensors(stored, {"format": "ms"}))
        return path
    message: Any = message_class("Checkpoint")()
    kinds = {dtype: kind for kind, dtype in MINDSPORE_NAMES.items()}
    for name, array in tensors.items():
        value = message.value.add()
        value.tag = name
        value.tensor.dims.extend(array.shape)
        value.tensor.tensor_type = kinds[array.dtype.name]
        value.tensor.tensor_content = array.tobytes()
    path.write_bytes(message.SerializeToString())
    return path


def ranks(encoding: str, strategy: Strategy = STRATEGY) -> Callable[[Path], Path]:
    def write(root: Path) -> Path:
        for rank in strategy.ranks:
            write_file(root / f"checkpoint/rank_{rank}/net_{rank}.{encoding}", blocks(FULL, strategy, rank))
        return root / "checkpoint"

    return write


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


MODULE = {"module.": ""}

CASES = [
    Case("ranks of safetensors", by_hand(ranks("safetensors")), {"strategy": STRATEGY}, "unknown", "safetensors"),
    Case("ranks of ckpt", by_hand(ranks("ckpt")), {"strategy": STRATEGY}, "unknown", "ckpt"),
    Case("ranks in two stages", by_hand(ranks("ckpt", STAGES)), {"strategy": STAGES}, "unknown"),
    Case("one file", by_hand(one_file)),
    Case("hf", by_hand(hugging_face), again="hf", metadata=("model.safetensors.index.json",)),
    Case("mindspore", by_hand(mindspore), again="mindspore", metadata=("param_name_map.json",)),
    Case("zarr", by_hand(zarr_3), {}, "unknown", "zarr", ("zarr.json", "a/zarr.json"), unmissed="[0-9]"),
    Case("zarr of format 2", by_hand(zarr_2), {}, "unknown", "", (".zgroup", "a/.zarray"), unmissed="[0-9]*"),
    Case("torch.save", by_hand(save)),
    Case("torch.save, a set", by_hand(bin_set), metadata=("pytorch_model.bin.index.json",)),
    Case("torch.save by rank", recorded("dcp/verl_like")),
    Case("torch.save, parts of Meta", parts_of_meta),
    Case("checkpoint2", recorded("checkpoint2/graph_dp2_tp4"), again="checkpoint2", metadata=("*/metadata.json",)),
    Case("checkpoint2 of one rank", recorded("checkpoint2/graph_1"), again="checkpoint2"),
    Case("checkpoint2 of stages", recorded("checkpoint2/graph_dp2_tp2_pp2_zero"), again="checkpoint2"),
    Case("checkpoint2 of PyNative", recorded("checkpoint2/pynative_fsdp2_tp2"), again="checkpoint2"),
    Case("dcp", recorded("dcp/tp"), again="dcp", metadata=(".metadata",)),
    Case("dcp of FSDP", recorded("dcp/fsdp2_uneven"), again="dcp", metadata=(".metadata",)),
    Case("dcp of every dtype", recorded("dcp/kinds"), again="dcp", metadata=(".metadata",)),
    Case("dcp in zstd", recorded("dcp/zstd"), again="dcp", metadata=(".metadata",)),
    Case("dcp in safetensors", recorded("dcp/safetensors_format"), again="dcp", metadata=(".metadata",)),
    Case("dcp of Megatron-Core", recorded("dcp/mcore_tp2_pp2"), again="dcp", metadata=(".metadata",)),
    Case("dcp for Hugging Face", recorded("dcp/hf_sharded"), state="unknown", unmissed="*.safetensors"),
    Case("dcp of hyper-parallel", recorded("checkpoint2/dcp_fsdp2_tp2", "global_step_4"), metadata=(".metadata",)),
    Case("dcp of hyper-parallel by rank", recorded("checkpoint2/dcp_fsdp2_by_rank", "global_step_4")),
    Case("deepspeed, stage 2", recorded("deepspeed/s2_dp2_bf16", **MODULE), again="deepspeed-universal"),
    Case("deepspeed, stage 3", recorded("deepspeed/s3_dp2_bf16", **MODULE), again="deepspeed-universal"),
    Case("deepspeed in parts", recorded("deepspeed_parts/autotp_s1_tp2_dp2", **MODULE)),
    Case("deepspeed, universal", recorded("deepspeed/universal_s3_dp2_bf16", **MODULE), again="deepspeed-universal"),
    Case("megatron", recorded("megatron_legacy/plain")),
    Case("megatron of virtual stages", virtual_stages),
    Case("orbax", recorded("orbax/mesh4x2_files_zarr2"), {}, "unknown", "orbax", ("_METADATA",)),
    Case("orbax of zarr 3", recorded("orbax/mesh2x2x2_files_zarr3"), {}, "unknown", "orbax", ("_METADATA",)),
    Case("orbax in a database", recorded("orbax/mesh4x2_ocdbt_zarr2"), metadata=("_METADATA", "manifest.ocdbt")),
]
