"""With MindSpore installed: it loads what is written here, and its own functions go on from there.

python -m venv ms && ms/bin/pip install mindspore==2.10.0 numpy==1.26.4 safetensors ml_dtypes
RESHARD_MINDSPORE_PYTHON=ms/bin/python pytest -m mindspore
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import helpers
import mindspore_objects
import numpy as np
import pytest
from ms_files import KEY, MODES, tensors

import reshard
import reshard.mindspore as ms

PYTHON = os.environ.get("RESHARD_MINDSPORE_PYTHON", "")

pytestmark = [
    pytest.mark.mindspore,
    pytest.mark.skipif(not PYTHON, reason="RESHARD_MINDSPORE_PYTHON names no Python that has MindSpore"),
]

LOAD = """
import hashlib, json, sys
import mindspore as ms
found = []
for path, options in json.loads(sys.argv[1]):
    if "dec_key" in options:
        options["dec_key"] = bytes.fromhex(options["dec_key"])
    found.append({})
    for name, p in ms.load_checkpoint(path, **options).items():
        if isinstance(p, str):
            found[-1][name] = ["str", [], p]
            continue
        content = p.data.asnumpy() if p.dtype != ms.bfloat16 else p.data.view(ms.uint16).asnumpy()
        found[-1][name] = [str(p.dtype).lower(), list(p.shape), hashlib.sha256(content.tobytes()).hexdigest()]
print("RESULT" + json.dumps(found))
"""

SIGNATURES = """
import inspect, json
import mindspore as ms, mindspore.parallel as p
names = ["transform_checkpoints", "transform_checkpoint_by_rank", "rank_list_for_transform", "convert_checkpoints",
         "convert_checkpoint_by_rank", "rank_list_for_convert", "load_segmented_checkpoints", "unified_safetensors",
         "load_distributed_checkpoint"]
found = {n: [[a.name, repr(a.default)] for a in inspect.signature(getattr(p, n)).parameters.values()] for n in names}
print("RESULT" + json.dumps(found))
"""


def mindspore(*arguments: str, **environment: str) -> str:
    """Run a Python that has MindSpore; return what it prints after RESULT."""
    done = subprocess.run(
        [PYTHON, *arguments], capture_output=True, text=True, check=False,
        env={**os.environ, "GLOG_v": "3", "PYTHONWARNINGS": "ignore", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.partition("RESULT")[2]


def loaded(files: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """What MindSpore loads of files with these options."""
    found: list[dict[str, Any]] = json.loads(mindspore("-c", LOAD, json.dumps(files)))
    return found


def shown(dtype: str, shape: tuple[int, ...], content: bytes) -> list[Any]:
    return [dtype, list(shape), hashlib.sha256(content).hexdigest()]


def convert(case: Path, target: Path, format: str) -> reshard.Plan:
    meta = helpers.load_meta(case)
    before, after = (
        reshard.read_strategy(case / meta[side]["strategy_file"]) if meta[side]["strategy_file"] else None
        for side in ("src", "dst")
    )
    plan = reshard.plan(
        reshard.open(case / "src_ckpt", strategy=before), after, to=format, drop=["*"], allow_missing=["*"]
    )
    plan.run(target / format)
    return plan


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_mindspore_loads_what_is_written(mindspore_data: Path, tmp_path: Path, format: str) -> None:
    """Every case, three ranks of each."""
    files = []
    for name in helpers.case_names():
        if not name.startswith("lost"):
            convert(mindspore_data / "cases" / name, tmp_path / name, format)
            files += sorted((tmp_path / name).rglob(f"checkpoint_*.{format}"))[:3]
    for path, found in zip(files, loaded([(str(path), {"format": format}) for path in files]), strict=True):
        assert found == {name: shown(*stored) for name, stored in helpers.read_rank_file(path).items()}, path


def test_mindspore_loads_what_is_saved_here(tmp_path: Path) -> None:
    given = tensors()
    append = {"epoch": 3, "lr": 0.5, "flag": True, "note": "漢字 😀", "empty": ""}
    stored = {
        **given, **append, "epoch": np.array(3), "lr": np.array(0.5, np.float32), "flag": np.array(True),
    }  # fmt: skip
    files: list[tuple[str, dict[str, Any]]] = []
    expected: list[dict[str, Any]] = []

    def save(name: str, saved: dict[str, Any], load: dict[str, Any], **options: Any) -> None:
        ms.save_checkpoint(saved, tmp_path / name, **options)
        files.append((str(tmp_path / name), load))
        expected.append(stored if options.get("append_dict") else saved)

    save("plain.ckpt", given, {}, append_dict=append)
    save("crc.ckpt", given, {"crc_check": True}, append_dict=append, crc_check=True)
    for mode in MODES:
        for crc in (False, True):
            save(
                f"{mode}-{crc}.ckpt", given, {"dec_key": KEY.hex(), "dec_mode": mode, "crc_check": crc},
                append_dict=append, enc_key=KEY, enc_mode=mode, crc_check=crc,
            )  # fmt: skip
    for nbytes in (24, 32):
        key = bytes(range(nbytes))
        save(f"gcm-{nbytes}.ckpt", given, {"dec_key": key.hex()}, enc_key=key)
    save("plain.safetensors", given, {"format": "safetensors"}, format="safetensors")
    # MindSpore cannot make bytes of bfloat16 for a CRC
    without_bf = {name: array for name, array in given.items() if name != "bf"}
    load = {"format": "safetensors", "crc_check": True}
    save("crc.safetensors", without_bf, load, format="safetensors", crc_check=True)
    for (path, _), found, saved in zip(files, loaded(files), expected, strict=True):
        assert found == {
            name: ["str", [], value]
            if isinstance(value, str)
            else shown(value.dtype.name, value.shape, value.tobytes())
            for name, value in saved.items()
        }, path


def test_the_signatures_are_mindspores() -> None:
    for name, parameters in json.loads(mindspore("-c", SIGNATURES)).items():
        own = inspect.signature(getattr(ms, name)).parameters.values()
        assert [[each.name, repr(each.default)] for each in own] == parameters, name


def test_mindspores_own_objects_are_taken_wherever_ours_are(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(Path(reshard.__file__).parent.parent), str(Path(__file__).parent)])
    found = mindspore(mindspore_objects.__file__, str(tmp_path), PYTHONPATH=paths)
    assert int(found) == len(mindspore_objects.CHECKS)


UNIFY = """
import sys
import mindspore as ms
ms.unified_safetensors(sys.argv[1], sys.argv[2], sys.argv[3], merge_with_redundancy=False)
"""


def test_mindspore_merges_what_is_stored_once_here(mindspore_data: Path, tmp_path: Path) -> None:
    folder = mindspore_data / "real" / "tut_src8"
    strategy = reshard.read_strategy(folder / "strategy_0.ckpt")
    source = reshard.open(folder / "safetensors", strategy=strategy)
    reshard.plan(source, strategy, remove_redundancy=True).run(tmp_path / "once")
    mindspore("-c", UNIFY, str(tmp_path / "once"), str(folder / "strategy_0.ckpt"), str(tmp_path / "unified"))
    full, found = helpers.load_full(folder), reshard.open(tmp_path / "unified")
    listed = [name for name in full if name in strategy.tensors]
    assert listed
    for name in listed:
        assert np.array_equal(found[name].compute(), full[name]), name
