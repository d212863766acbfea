"""What opens a directory: 250 listings, and what opened them before the formats had one list, in `detection.json`.

`python tests/conformance/test_detection.py` records what opens them now.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import pytest
import zarr
from checkpoints import write_file
from orbax_files import write_orbax
from saves_files import tensor, write_save

import reshard

ANSWERS = Path(__file__).with_name("detection.json")
W = {"w": np.arange(8, dtype=np.float32).reshape(2, 4)}
PICKLE = b"\x80\x04\x95\x0f\x00\x00\x00\x00\x00\x00\x00."
BLOCKS = json.dumps({"state_dict_metadata": {"a": {}}, "storage_data": {}}).encode()
INDEX = json.dumps({"metadata": {}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}).encode()
MAP = json.dumps({"w": "part0.safetensors"}).encode()
SAVED_INDEX = json.dumps({"metadata": {}, "weight_map": {"w": "pytorch_model-00001-of-00001.bin"}}).encode()
PARTS = b'{"metadata": {}, "weight_map": {}}'

ST, CKPT, SAVE, ZARR, ARRAY, ORBAX, DIR = "safetensors", "ckpt", "torch.save", "zarr", "array", "orbax", "directory"
Files = dict[str, str | bytes]

KINDS: dict[str, Files] = {
    "zarr": {"": ZARR},
    "orbax": {"": ORBAX},
    "checkpoint2": {"net-model-0000000-0000001.safetensors": ST, "metadata.json": BLOCKS},
    "checkpoint2 whole": {"model-0000000-0000001.safetensors": ST, "opt-0000000-0000001.safetensors": ST},
    "dcp": {".metadata": PICKLE, "__0_0.distcp": b"x"},
    "hyper": {"_rank0_.safetensors": ST, ".rank0_metadata": PICKLE},
    "dcp parts": {f"{part}/{name}": PICKLE for part in ("model", "optim") for name in (".metadata", "__0_0.distcp")},
    "blocks": {"shard-00001-model-00001-of-00001.safetensors": ST},
    "deepspeed": {"mp_rank_00_model_states.pt": SAVE, "zero_pp_rank_0_mp_rank_00_optim_states.pt": SAVE},
    "universal": {"zero/w/fp32.pt": SAVE, "zero/optimizer_state.pt": SAVE, "mp_rank_00_model_states.pt": SAVE},
    "fsdp": {"model_world_size_1_rank_0.pt": SAVE},
    "bin set": {"pytorch_model-00001-of-00001.bin": SAVE, "pytorch_model.bin.index.json": SAVED_INDEX},
    "consolidated": {"consolidated.00.pth": SAVE, "params.json": b"{}"},
    "megatron": {"mp_rank_00/model_optim_rng.pt": SAVE},
    "release": {"latest_checkpointed_iteration.txt": b"release", "release/mp_rank_00/model_optim_rng.pt": SAVE},
    "save": {"net.pt": SAVE},
    "hf": {"model-00001-of-00001.safetensors": ST, "model.safetensors.index.json": INDEX},
    "mindspore": {"part0.safetensors": ST, "param_name_map.json": MAP},
    "ranks": {"rank_0/net.safetensors": ST, "rank_1/net.safetensors": ST},
    "rank files ckpt": {"rank_0/net-1_10.ckpt": CKPT, "rank_1/net-1_10.ckpt": CKPT, "rank_0/net-1_20.ckpt": CKPT},
    "one file": {"net.safetensors": ST},
}  # fmt: skip

ROWS: dict[str, tuple[Files, str]] = {name: (files, "") for name, files in KINDS.items()}
"""The files of each listing, and what is opened: the directory, or a path below it."""

PAIRED = [name for name in KINDS if name not in {"checkpoint2 whole", "hyper", "rank files ckpt", "release"}]
ROWS |= {
    f"{one} + {other}": ({**KINDS[one], **KINDS[other]}, "")
    for one, other in combinations(PAIRED, 2)
    if not {"zarr", "orbax"} <= {one, other}
}


def run(tracker: str, text: bytes, names: list[str], kind: str, *unfinished: str) -> Files:
    steps: Files = {f"{name}/{path}".rstrip("/"): content for name in names for path, content in KINDS[kind].items()}
    return {**({tracker: text} if tracker else {}), **steps, **dict.fromkeys(unfinished, DIR)}


MEGATRON = "latest_checkpointed_iteration.txt"
RUNS: dict[str, Files] = {
    "run of checkpoint2": run(MEGATRON, b"10", ["iteration_00000010", "iteration_00000005"], "checkpoint2 whole"),
    "run of checkpoint2, newer": run(MEGATRON, b"5", ["iteration_00000010", "iteration_00000005"], "checkpoint2 whole"),
    "run of checkpoint2, no tracker": run("", b"", ["iteration_00000010"], "checkpoint2 whole"),
    "run of checkpoint2, bad tracker": run(MEGATRON, b"ten", ["iteration_00000010"], "checkpoint2 whole"),
    "run of checkpoint2, another": run(MEGATRON, b"7", ["iteration_00000010"], "checkpoint2 whole"),
    "run of hyper": run("latest_checkpoint_iteration.txt", b"10", ["global_step_10"], "hyper"),
    "run of megatron core": run(MEGATRON, b"10", ["iter_0000010", "iter_0000020"], "dcp"),
    "run of megatron": run(MEGATRON, b"10", ["iter_0000010"], "megatron"),
    "run of deepspeed": run("latest", b"global_step10", ["global_step10", "global_step20"], "deepspeed"),
    "run of deepspeed, tag": run("latest", b"best", ["best", "global_step20"], "deepspeed"),
    "run of deepspeed, weights": {**run("latest", b"global_step10", ["global_step10"], "deepspeed"), **KINDS["hf"]},
    "run of universal": run("latest_universal", b"global_step10_universal", ["global_step10_universal"], "universal"),
    "run of both": {
        **run("latest", b"global_step10", ["global_step10"], "deepspeed"),
        **run("latest_universal", b"global_step10_universal", ["global_step10_universal"], "universal"),
    },
    "run of orbax": run("", b"", ["100", "200"], "orbax"),
    "run of orbax, prefix": run("", b"", ["ckpt_100", "ckpt_200"], "orbax"),
    "run of orbax, unfinished": run("", b"", ["100"], "orbax", "200.orbax-checkpoint-tmp"),
    "run of torchtitan": run("", b"", ["step-100", "step-200"], "dcp"),
    "run of torchtitan, empty": run("", b"", ["step-100"], "dcp", "step-200"),
    "run of torchtitan, unfinished": {**run("", b"", ["step-100"], "dcp"), "step-200/__0_0.distcp": b"x"},
    "run of numbers of dcp": run("", b"", ["100", "200"], "dcp"),
    "run of zarr": run("", b"", ["100", "200"], "zarr"),
    "run of ranks": run("", b"", ["100", "200"], "ranks"),
    "run of hf": run("", b"", ["checkpoint-100", "checkpoint-200"], "hf"),
    "run below": run("a/latest", b"x", ["b"], "dcp"),
}
ROWS |= {name: (files, "") for name, files in RUNS.items()}
ROWS |= {
    f"one of {name}: {path}": (KINDS[name], path)
    for name, path in [
        ("checkpoint2", "net-model-0000000-0000001.safetensors"), ("dcp", "__0_0.distcp"), ("dcp", ".metadata"),
        ("hyper", "_rank0_.safetensors"), ("blocks", "shard-00001-model-00001-of-00001.safetensors"),
        ("deepspeed", "mp_rank_00_model_states.pt"), ("fsdp", "model_world_size_1_rank_0.pt"),
        ("bin set", "pytorch_model-00001-of-00001.bin"), ("consolidated", "consolidated.00.pth"),
        ("megatron", "mp_rank_00"), ("megatron", "mp_rank_00/model_optim_rng.pt"), ("save", "net.pt"),
        ("hf", "model-00001-of-00001.safetensors"), ("mindspore", "part0.safetensors"), ("ranks", "rank_0"),
        ("ranks", "rank_1/net.safetensors"), ("one file", "net.safetensors"), ("dcp parts", "model"),
    ]
}  # fmt: skip
ROWS |= {
    f"of several: {path}": ({path: content, **dict.fromkeys(beside, content)}, path)
    for path, content, beside in [
        ("mp_rank_01_model.pt", SAVE, ["mp_rank_00_model.pt"]), ("consolidated.01.pth", SAVE, ["consolidated.00.pth"]),
        ("net_part1.ckpt", CKPT, ["net_part0.ckpt"]), ("rank1.pt", SAVE, ["rank0.pt"]), ("tp1.pt", SAVE, ["tp0.pt"]),
        ("net_1.safetensors", ST, ["net_0.safetensors"]), ("step_1.pt", SAVE, ["step_2.pt"]),
        ("model-00002-of-00003.safetensors", ST, []), ("part3.safetensors", ST, ["part4.safetensors"]),
        ("layer_01-model_00-model_states.pt", SAVE, ["layer_02-model_00-model_states.pt"]),
    ]
}  # fmt: skip
ROWS |= {
    name: (files, "")
    for name, files in {
        "nothing": {},
        "hidden": {".git/config": b"", ".cache": DIR},
        "empty step": {"step_5": DIR},
        "gguf": {"x.gguf": b"GGUF"},
        "npz": {"x.npz": b"PK\x03\x04"},
        "npy": {"x.npy": b"\x93NUMPY"},
        "gguf beside": {"x.gguf": b"GGUF", **KINDS["one file"]},
        "vllm": {"model-rank-0-part-0.safetensors": ST, "model-rank-1-part-0.safetensors": ST},
        "tensorrt": {"rank0.engine": b"x", "config.json": b'{"mapping": {"world_size": 2}}'},
        "tensorrt beside": {"config.json": b'{"mapping": {"world_size": 2}}', **KINDS["one file"]},
        "trainer files alone": {"optimizer.pt": SAVE, "scheduler.pt": SAVE},
        "trainer files": {"optimizer.pt": SAVE, "rng_state.pth": SAVE, **KINDS["hf"]},
        "damaged trainer file": {"optimizer.pt": b"PK\x03\x04junk", **KINDS["hf"]},
        "several saves": {"a.pt": SAVE, "b.pt": SAVE},
        "several files": {"a.safetensors": ST, "b.safetensors": ST},
        "a save called ckpt": {"net.ckpt": SAVE},
        "text": {"notes.txt": b"hello", "README.md": b"#"},
        "two sets": {**KINDS["hf"], **KINDS["mindspore"]},
        "two indexes": {**KINDS["hf"], "adapter.safetensors.index.json": INDEX},
        "index without files": {"model.safetensors.index.json": INDEX},
        "map without weights": {"param_name_map.json": PARTS},
        "metadata alone": {".metadata": PICKLE},
        "json alone": {"metadata.json": BLOCKS},
        "other metadata.json": {"metadata.json": b"{}", **KINDS["one file"]},
        "a pickle beside": {".metadata": PICKLE, **KINDS["one file"]},
        "dcp of ranks": {"__0.metadata": PICKLE, "__1.metadata": PICKLE, "__0_0.distcp": b"x", "__1_0.distcp": b"x"},
        "dcp data alone": {"__0_0.distcp": b"x", "__1_0.distcp": b"x"},
        "universal without states": {"zero/w/fp32.pt": SAVE, "zero/w/exp_avg.pt": SAVE},
        "zarr arrays alone": {"w": ARRAY},
        "a rank missing": {"rank_0/net.safetensors": ST, "rank_2/net.safetensors": ST},
        "ranks of two steps": {"rank_0/n-1_1.ckpt": CKPT, "rank_1/n-1_1.ckpt": CKPT, "rank_0/n-1_2.ckpt": CKPT},
        "ranks of two names": {f"rank_{rank}/{name}.ckpt": CKPT for rank in (0, 1) for name in "ab"},
        "rank twice": {"rank_0/a.ckpt": CKPT, "rank_00/a.ckpt": CKPT},
        "empty ranks": {"rank_0": DIR, "rank_1": DIR},
        "rank files flat": {"net_0.ckpt": CKPT, "net_1.ckpt": CKPT},
        "temporary": {"tmp-step_5/net.safetensors": ST, "step_4/net.safetensors": ST},
        "below": {"a/b/net.safetensors": ST},
        "below, several": {"a/net.safetensors": ST, "b/net.pt": SAVE, "c/d/model_world_size_1_rank_0.pt": SAVE},
        "non-ascii": {"größe.safetensors": ST},
        "a directory called like a file": {"net.safetensors/rank_0/a.ckpt": CKPT},
        "partial": {"rank_0/net.safetensors.partial": ST},
        "epoch files": {"epoch_1.safetensors": ST, "epoch_2.safetensors": ST},
        "lightning": {"epoch=1-step=100.ckpt": SAVE},
    }.items()
}  # fmt: skip


def build(root: Path, files: Files) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content == DIR:
            path.mkdir(exist_ok=True)
        elif content in {ZARR, ARRAY}:
            array = path / "w" if content == ZARR else path
            if content == ZARR:
                zarr.create_group(path)
            zarr.create_array(array, data=W["w"], chunks=(1, 4), compressors=None)
        elif content == ORBAX:
            write_orbax(path, W)
        elif content == SAVE:
            write_save(path, {"w": tensor(W["w"])})
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            write_file(path, W, content)


def answers(root: Path, path: str) -> dict[str, Any]:
    """Return what opens a path, or the code of the error; and what lies below the directory."""
    with warnings.catch_warnings(record=True):
        try:
            opened = reshard.open(root / path)
            found: Any = [sorted(opened), len(opened.ranks), len(opened.warnings)]
        except reshard.ReshardError as error:
            found = error.codes[0]
        try:
            runs = reshard.runs(root)
            rows = [
                [str(Path(row.path).relative_to(root)), row.format, row.step, row.state, row.newest] for row in runs
            ]
        except reshard.ReshardError as error:
            rows = [[error.codes[0]]]
    return {"open": found, "runs": sorted(rows)}


def test_there_are_enough() -> None:
    assert len(ROWS) >= 120
    assert ROWS.keys() == json.loads(ANSWERS.read_text()).keys()


@pytest.mark.parametrize("name", ROWS)
def test_what_opens(name: str, tmp_path: Path) -> None:
    files, path = ROWS[name]
    root = tmp_path / "above/here"
    root.mkdir(parents=True)
    build(root, files)
    assert answers(root, path) == json.loads(ANSWERS.read_text())[name]


if __name__ == "__main__":
    recorded = {}
    for row, (files, path) in ROWS.items():
        with tempfile.TemporaryDirectory() as directory:
            here = Path(directory).resolve() / "above/here"
            here.mkdir(parents=True)
            build(here, files)
            recorded[row] = answers(here, path)
    ANSWERS.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in recorded.items()) + "\n}\n")
