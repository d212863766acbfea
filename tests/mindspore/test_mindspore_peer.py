"""With MindSpore installed: it loads what is written here, and its own functions go on from there.

python -m venv ms && ms/bin/pip install mindspore==2.10.0 numpy==1.26.4 safetensors ml_dtypes
RESHARD_MINDSPORE_PYTHON=ms/bin/python pytest -m mindspore
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import helpers
import numpy as np
import pytest

import reshard

if TYPE_CHECKING:
    from pathlib import Path

PYTHON = os.environ.get("RESHARD_MINDSPORE_PYTHON", "")

pytestmark = [
    pytest.mark.mindspore,
    pytest.mark.skipif(not PYTHON, reason="RESHARD_MINDSPORE_PYTHON names no Python that has MindSpore"),
]

LOAD = """
import hashlib, json, sys
import mindspore as ms, numpy as np
found = {}
for path, format in json.loads(sys.argv[1]):
    loaded = ms.load_checkpoint(path, format=format)
    found[path] = {}
    for name, p in loaded.items():
        if isinstance(p, str):
            found[path][name] = ["str", [], p]
            continue
        content = (p.data.asnumpy() if p.dtype != ms.bfloat16 else p.data.view(ms.uint16).asnumpy())
        found[path][name] = [str(p.dtype).lower(), list(p.shape), hashlib.sha256(content.tobytes()).hexdigest()]
print("RESULT" + json.dumps(found))
"""


def mindspore(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [PYTHON, "-c", script, *arguments],
        capture_output=True, text=True, check=False, env={**os.environ, "GLOG_v": "3", "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def convert(case: Path, target: Path, format: str) -> reshard.Plan:
    meta = helpers.load_meta(case)
    before, after = (
        reshard.read_strategy(case / meta[side]["strategy_file"]) if meta[side]["strategy_file"] else None
        for side in ("src", "dst")
    )
    plan = reshard.plan(
        reshard.open(case / "src_ckpt", strategy=before), after, format=format, drop=["*"], allow_missing=["*"]
    )
    plan.run(target / format)
    return plan


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_mindspore_loads_what_is_written(mindspore_data: Path, tmp_path: Path, format: str) -> None:
    """Every case, three ranks of each."""
    import hashlib

    files = []
    for name in helpers.case_names():
        if not name.startswith("lost"):
            convert(mindspore_data / "cases" / name, tmp_path / name, format)
            files += sorted((tmp_path / name).rglob(f"checkpoint_*.{format}"))[:3]
    printed = mindspore(LOAD, json.dumps([(str(path), format) for path in files]))
    found = json.loads(printed.split("RESULT")[1])
    for path in files:
        ours = helpers.read_rank_file(path)
        theirs = found[str(path)]
        assert set(ours) == set(theirs)
        for name, (dtype, shape, content) in ours.items():
            assert theirs[name] == [dtype, list(shape), hashlib.sha256(content).hexdigest()], (path, name)


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
    mindspore(UNIFY, str(tmp_path / "once"), str(folder / "strategy_0.ckpt"), str(tmp_path / "unified"))
    full, found = helpers.load_full(folder), reshard.open(tmp_path / "unified")
    listed = [name for name in full if name in strategy.tensors]
    assert listed
    for name in listed:
        assert np.array_equal(found[name].compute(), full[name]), name
