"""MindSpore's own objects are taken wherever ours are: the same checks with a stand-in, and with MindSpore itself."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import mindspore_objects
import mindspore_standin
import ml_dtypes
import numpy as np
import pytest
from test_mindspore_peer import PYTHON

import reshard
import reshard.mindspore as ms


@pytest.mark.parametrize("check", mindspore_objects.CHECKS)
def test_with_a_stand_in(check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mindspore_objects.CHECKS[check](mindspore_standin.installed(monkeypatch), tmp_path)


@pytest.mark.mindspore
@pytest.mark.skipif(not PYTHON, reason="RESHARD_MINDSPORE_PYTHON names no Python that has MindSpore")
def test_with_mindspore_itself(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(Path(reshard.__file__).parent.parent), str(Path(__file__).parent)])
    done = subprocess.run(
        [PYTHON, mindspore_objects.__file__, str(tmp_path)],
        capture_output=True, text=True, check=False,
        env={**os.environ, "GLOG_v": "3", "PYTHONWARNINGS": "ignore", "PYTHONPATH": paths},
    )  # fmt: skip
    if "No module named 'ml_dtypes'" in done.stderr:
        pytest.skip("the Python that has MindSpore has no ml_dtypes, which reshard needs")
    assert f"RESULT {len(mindspore_objects.CHECKS)}" in done.stdout, done.stderr[-3000:]


def test_a_tensor_that_is_not_of_the_dtype_that_it_says_is_refused() -> None:
    class Untrue:
        dtype = "Float32"

        def asnumpy(self) -> np.ndarray[Any, Any]:
            return np.zeros(2, np.int32)

    with pytest.raises(TypeError, match="float32.*int32"):
        ms.Tensor(Untrue())


def test_torch_tensors_become_tensors() -> None:
    torch = pytest.importorskip("torch")
    given = torch.tensor([1.5, -2.0]).to(torch.bfloat16)
    tensor = ms.Tensor(given)
    assert (tensor.dtype, tensor.asnumpy().tolist()) == (ms.bfloat16, [1.5, -2.0])
    assert (ms.Tensor([1.5, -2.0], torch.bfloat16) == given).all()
    assert tensor.asnumpy().dtype == np.dtype(ml_dtypes.bfloat16)
