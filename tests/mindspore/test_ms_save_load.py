"""What save_checkpoint saves load_checkpoint loads: both formats, all modes of encryption, tensors in several parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import helpers
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from ms_files import (
    KEY,
    MODES,
    Array,
    assert_same,
    tensors,
    warnings_logged,  # noqa: F401 -- applies to every test here
)

import reshard.kits.ckpt
import reshard.mindspore as ms
from reshard.mindspore import Parameter, Tensor

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
@pytest.mark.parametrize("crc", [False, True])
def test_what_is_saved_comes_back(tmp_path: Path, format: str, crc: bool) -> None:
    given = tensors()
    given["none"] = np.zeros((0, 3), np.float32)
    append = {
        "epoch": 3,
        "lr": 0.5,
        "flag": True,
        "note": "漢字 😀",
        "empty": "",
        "extra": Parameter(Tensor([1.0]), "e"),
    }
    path = str(tmp_path / f"x.{format}")
    ms.save_checkpoint(given, path, append_dict=append, crc_check=crc, format=format)
    loaded = ms.load_checkpoint(path, crc_check=crc, format=format)
    expected: dict[str, Any] = {
        **given, "epoch": np.array(3), "lr": np.array(0.5, np.float32), "flag": np.array(True), "note": "漢字 😀",
        "empty": "", "extra": np.array([1.0], np.float32),
    }  # fmt: skip
    assert_same(loaded, expected)
    assert list(loaded) == (list(expected) if format == "ckpt" else sorted(expected))
    assert [p.name for p in tmp_path.iterdir()] == [f"x.{format}"]


@given(
    arrays=st.dictionaries(
        st.text("abc.漢", min_size=1),
        npst.arrays(
            st.sampled_from(["float32", "int8", "uint16", "bool", "int64"]),
            npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
        ),
        min_size=1,
        max_size=4,
    ),
    format=st.sampled_from(["ckpt", "safetensors"]),
    crc=st.booleans(),
)
def test_any_arrays_come_back(
    tmp_path_factory: pytest.TempPathFactory, arrays: dict[str, Array], format: str, crc: bool
) -> None:
    path = str(tmp_path_factory.mktemp("any") / f"x.{format}")
    ms.save_checkpoint(arrays, path, crc_check=crc, format=format)
    assert_same(ms.load_checkpoint(path, crc_check=crc, format=format), arrays)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("crc", [False, True])
def test_what_is_encrypted_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str, crc: bool
) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setattr("reshard.core.storage.cipher.BLOCK_BYTES", 100)  # many blocks
    path = str(tmp_path / "x.ckpt")
    ms.save_checkpoint(tensors_ := tensors(), path, enc_key=KEY, enc_mode=mode, crc_check=crc)
    assert b"layer.float32" not in (tmp_path / "x.ckpt").read_bytes()
    assert_same(ms.load_checkpoint(path, dec_key=KEY, dec_mode=mode, crc_check=True), tensors_)
    assert ("carries no CRC" in caplog.text) is not crc
    assert_same(ms.load_checkpoint_async(path, dec_key=KEY, dec_mode=mode).result(), tensors_)


def test_a_tensor_in_several_messages_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MindSpore cuts at 512 MiB; here at 50 bytes, amid rows and elements."""
    monkeypatch.setattr(reshard.kits.ckpt, "PART_BYTES", 50)
    monkeypatch.setattr("reshard.mindspore.save_load.PIECE_BYTES", 7)
    given = {"w": np.arange(100, dtype=np.float32).reshape(10, 10), "v": np.arange(3, dtype=np.int64)}
    ms.save_checkpoint(given, str(tmp_path / "x.ckpt"), crc_check=True)
    assert_same(ms.load_checkpoint(str(tmp_path / "x.ckpt"), crc_check=True), given)
    assert helpers.read_rank_file(tmp_path / "x.ckpt")["w"][2] == given["w"].tobytes()
    ms.ckpt_to_safetensors(tmp_path / "x.ckpt")
    assert_same(ms.load_checkpoint(str(tmp_path / "x.safetensors"), format="safetensors"), given)


def test_int4_stays_int4(tmp_path: Path) -> None:
    tensor = Tensor(np.array([1, -2, 119], np.int8), ms.qint4x2)
    for format in ("ckpt", "safetensors"):
        path = str(tmp_path / f"x.{format}")
        ms.save_checkpoint({"q": tensor}, path, format=format)
        assert ms.load_checkpoint(path, format=format)["q"].dtype == ms.qint4x2
        assert helpers.read_rank_file(tmp_path / f"x.{format}")["q"] == ("int4", (3,), b"\x01\xfe\x77")
