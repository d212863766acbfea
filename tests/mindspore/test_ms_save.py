"""save_checkpoint: what it takes and what it writes, the names of files, and what is refused."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import helpers
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from ms_files import (
    KEY,
    MODES,
    Array,
    assert_same,
    refused_as_mindspore,
    tensors,
    warnings_logged,  # noqa: F401 -- applies to every test here
)
from refusals import refused

import reshard
import reshard.kits.ckpt
import reshard.mindspore as ms
from reshard.mindspore import Parameter, Tensor

if TYPE_CHECKING:
    from pathlib import Path


def test_everything_that_holds_parameters_is_saved(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)

    class Net:
        def parameters_and_names(self) -> list[tuple[str, Parameter]]:
            return [("self.w", Parameter(array, "w")), ("self.b", Parameter(array[0], "b"))]

    w, b = Parameter(array, "w"), Parameter(array[0], "b")
    for number, saved in enumerate(
        (
            Net(), [w, b], {"w": w, "b": b}, {"w": array, "b": Tensor(array[0])},
            [{"name": "w", "data": Tensor(array)}, {"name": "b", "data": b}],
            [{"name": "w", "data": array[::-1]}, {"name": "b", "data": b}, {"name": "w", "data": array}],  # last wins
        )
    ):  # fmt: skip
        ms.save_checkpoint(saved, str(tmp_path / f"{number}"))
        assert list(helpers.read_rank_file(tmp_path / f"{number}.ckpt")) == ["w", "b"]
        assert (tmp_path / f"{number}.ckpt").read_bytes() == (tmp_path / "0.ckpt").read_bytes()


def test_the_name_of_the_file_is_mindspores(tmp_path: Path) -> None:
    array = {"w": np.zeros(2, np.float32)}
    for name, written in (("a", "a.ckpt"), ("b.ckpt", "b.ckpt"), ("c.tmp", "c.tmp.ckpt"), ("my_ckpt", "my_ckpt")):
        ms.save_checkpoint(array, str(tmp_path / name))
        assert (tmp_path / written).is_file()
    ms.save_checkpoint(array, tmp_path / "new" / "d.ckpt", format="safetensors")
    assert (tmp_path / "new" / "d.ckpt.safetensors").is_file()


def test_choice_func_chooses_of_the_object_alone(tmp_path: Path) -> None:
    ms.save_checkpoint(
        {"a": np.zeros(1), "b": np.zeros(1)},
        str(tmp_path / "x"),
        append_dict={"epoch": 1},
        choice_func=lambda n: n == "b",
    )
    assert list(ms.load_checkpoint(str(tmp_path / "x.ckpt"))) == ["b", "epoch"]


def test_a_file_can_be_marked_as_deduplicated(tmp_path: Path) -> None:
    for value in (True, False):
        ms.save_checkpoint({"w": np.zeros(1)}, str(tmp_path / "x"), format="safetensors", remove_redundancy=value)
        with safetensors.safe_open(tmp_path / "x.safetensors", "np") as file:
            assert file.metadata() == {"format": "ms", "remove_redundancy": str(value)}
    loaded = ms.load_checkpoint(str(tmp_path / "x.safetensors"), remove_redundancy=True, format="safetensors")
    assert list(loaded) == ["w"]


def test_an_empty_object_is_saved_as_mindspore_does(tmp_path: Path) -> None:
    ms.save_checkpoint([], str(tmp_path / "x.ckpt"))
    ms.save_checkpoint({}, str(tmp_path / "x"), format="safetensors")
    assert (tmp_path / "x.ckpt").read_bytes() == b""
    assert safetensors.numpy.load((tmp_path / "x.safetensors").read_bytes()) == {}
    with refused(ValueError, "empty-file", tmp_path / "x.ckpt"):
        ms.load_checkpoint(str(tmp_path / "x.ckpt"))
    with refused(ValueError, "no-tensors", tmp_path / "x.safetensors"):
        ms.load_checkpoint(str(tmp_path / "x.safetensors"), format="safetensors")


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.ckpt"
    ms.save_checkpoint({"w": np.zeros(3, np.float32)}, path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr("reshard.core.storage.local.os.pwrite", fail)
    with refused(reshard.ReshardError, "cannot-write", path):
        ms.save_checkpoint({"w": np.ones(3, np.float32)}, path)
    assert [p.name for p in tmp_path.iterdir()] == ["x.ckpt"]
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("error", "code", "place", "arguments"),
    [
        (TypeError, "", "save_obj", {"save_obj": "x"}),
        (TypeError, "", "save_obj[0]", {"save_obj": [3]}),
        (TypeError, "", "'w'", {"save_obj": {"w": 3}}),
        (TypeError, "", "ckpt_file_name", {"ckpt_file_name": 3}),
        (TypeError, "", "append_dict['x']", {"append_dict": {"x": [1]}}),
        (ValueError, "bad-key", "key", {"enc_key": "text"}),
        (ValueError, "unknown-mode", "'XX'", {"enc_key": KEY, "enc_mode": "XX"}),
        (ValueError, "bad-key", "5 bytes", {"enc_key": b"short"}),
        (ValueError, "not-encryptable", "safetensors", {"enc_key": KEY, "format": "safetensors"}),
        (ValueError, "unknown-format", "'zarr'", {"format": "zarr"}),
        (ValueError, "unsupported-dtype", "'w'", {"save_obj": {"w": np.zeros(2, ml_dtypes.float8_e5m2)}}),
    ],
)
def test_wrong_arguments_to_save_raise_what_mindspore_raises(
    tmp_path: Path, error: type[Exception], code: str, place: str, arguments: dict[str, Any]
) -> None:
    call: dict[str, Any] = {"save_obj": {"w": np.zeros(2)}, "ckpt_file_name": str(tmp_path / "x"), **arguments}
    with refused_as_mindspore(error, code, place):
        ms.save_checkpoint(call.pop("save_obj"), call.pop("ckpt_file_name"), **call)
    assert not list(tmp_path.iterdir())


def test_a_directory_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path))):
        ms.save_checkpoint({"w": np.zeros(2)}, str(tmp_path))


# --- what is saved is loaded again ---


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
