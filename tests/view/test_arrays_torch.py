"""With PyTorch installed: what the guide says of bfloat16 and float8 arrays makes tensors of the same values.

RESHARD_TORCH_PYTHON=torch/bin/python pytest -m torch
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import numpy as np
import pytest

import reshard

if TYPE_CHECKING:
    from pathlib import Path

PYTHON = os.environ.get("RESHARD_TORCH_PYTHON", "")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not PYTHON, reason="RESHARD_TORCH_PYTHON names no Python that has PyTorch"),
]

COMPARED = """
import sys
import numpy as np, torch

full = torch.from_numpy(np.load("full.npy"))
for name in sys.argv[1:]:
    dtype = getattr(torch, name)
    tensor = torch.from_numpy(np.load(f"{name}.npy")).view(dtype)
    assert torch.equal(tensor.float(), full.to(dtype).float()), name
    bits = torch.int16 if name == "bfloat16" else torch.uint8
    assert np.array_equal(tensor.view(bits).numpy(), np.load(f"{name}.npy")), name
"""


def test_bits_become_tensors(tmp_path: Path) -> None:
    full = np.random.default_rng(5).normal(size=(8, 6)).astype(np.float32)
    np.save(tmp_path / "full.npy", full)
    reshard.write({"w": full}, tmp_path / "full", to="hf")
    dtypes = {"bfloat16": np.int16, "float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8}
    for name, bits in dtypes.items():
        reshard.convert(tmp_path / "full", tmp_path / name, to="hf", cast={"float32": name})
        np.save(tmp_path / f"{name}.npy", reshard.open(tmp_path / name)["w"].compute().view(bits))
    subprocess.run([PYTHON, "-c", COMPARED, *dtypes], cwd=tmp_path, check=True)
