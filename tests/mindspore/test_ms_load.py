"""load_checkpoint: MindSpore's own files, files whole and in part, keys and CRCs, and what is refused."""

from __future__ import annotations

import io
import json
import zlib
from pathlib import Path
from typing import Any

import helpers
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from ms_files import (
    KEY,
    assert_same,
    ms_arrays,
    refused_as_mindspore,
    warnings_logged,  # noqa: F401 -- applies to every test here
)
from refusals import refused

import reshard.mindspore as ms
from reshard.errors import SourceError
from reshard.mindspore import Parameter
from reshard.mindspore.network import NetworkError


@pytest.fixture
def recorded(mindspore_data: Path) -> Path:
    return mindspore_data / "encrypted"


def test_mindspores_files_are_loaded_and_saved_again_to_the_byte(recorded: Path, tmp_path: Path) -> None:
    full = helpers.load_full(recorded)
    for name, crc in (("plain", False), ("crc", True)):
        loaded = ms.load_checkpoint(str(recorded / f"{name}.ckpt"), crc_check=crc)
        assert_same({key: loaded[key] for key in full}, full)
        ms.save_checkpoint(loaded, str(tmp_path / name), crc_check=crc)
        assert (tmp_path / f"{name}.ckpt").read_bytes() == (recorded / f"{name}.ckpt").read_bytes()


def test_a_safetensors_file_with_a_crc_is_loaded_and_gets_the_same_crc(recorded: Path, tmp_path: Path) -> None:
    loaded = ms.load_checkpoint(str(recorded / "crc.safetensors"), format="safetensors", crc_check=True)
    assert list(loaded) == sorted(loaded)
    assert_same(loaded, helpers.load_full(recorded))
    ms.save_checkpoint(loaded, str(tmp_path / "again"), crc_check=True, format="safetensors")
    found, expected = (path.read_bytes() for path in (tmp_path / "again.safetensors", recorded / "crc.safetensors"))
    length = int.from_bytes(expected[:8], "little")
    assert json.loads(found[8 : 8 + length]) == json.loads(expected[8 : 8 + length])
    assert found[8 + length :] == expected[8 + length :]


@pytest.mark.parametrize(
    ("name", "mode", "key"),
    [("aes-gcm", "AES-GCM", KEY), ("aes-cbc", "AES-CBC", KEY), ("sm4-cbc", "SM4-CBC", KEY),
     ("aes-gcm-192", "AES-GCM", bytes(range(24))), ("aes-gcm-256", "AES-GCM", bytes(range(32)))],
)  # fmt: skip
def test_mindspores_encrypted_files_are_loaded(recorded: Path, name: str, mode: str, key: bytes) -> None:
    loaded = ms.load_checkpoint(str(recorded / f"{name}.ckpt"), dec_key=key, dec_mode=mode)
    full = helpers.load_full(recorded)
    assert_same({key: loaded[key] for key in full}, full)
    if "note" in loaded:
        assert isinstance(loaded["note"], str)
        assert [loaded[key].dtype for key in ("epoch_num", "lr", "flag")] == [ms.int64, ms.float32, ms.bool_]


def test_a_file_of_a_deduplicated_set_says_that_it_lacks_some(
    mindspore_data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = mindspore_data / "deduplicated/tut_src8/rank_0/net.safetensors"
    assert ms.load_checkpoint(path, format="safetensors")
    assert f"{path}: is one of a de-duplicated set; it lacks what other ranks store for this one" in caplog.text


@pytest.fixture
def file(tmp_path: Path) -> str:
    given = {"conv1.w": np.zeros(2, np.float32), "conv2.w": np.ones(2, np.float32), "fc.w": np.ones(1, np.float32)}
    for format in ("ckpt", "safetensors"):
        ms.save_checkpoint(given, str(tmp_path / "x"), format=format)
    return str(tmp_path / "x.ckpt")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"filter_prefix": "conv1"}, ["conv2.w", "fc.w"]),
        ({"filter_prefix": ["conv1", "fc"]}, ["conv2.w"]),
        ({"specify_prefix": ("conv",)}, ["conv1.w", "conv2.w"]),
        ({"specify_prefix": "conv", "filter_prefix": "conv1"}, ["conv2.w"]),
        ({"choice_func": lambda name: name.endswith("2.w")}, ["conv2.w"]),
        ({"choice_func": lambda _: False, "specify_prefix": "fc"}, ["fc.w"]),
    ],
)
def test_part_of_a_file_is_loaded(file: str, arguments: dict[str, Any], names: list[str]) -> None:
    assert list(ms.load_checkpoint(file, **arguments)) == names
    other = file.replace(".ckpt", ".safetensors")
    assert list(ms.load_checkpoint(other, format="safetensors", **arguments)) == names


def test_a_file_in_memory_is_loaded(file: str) -> None:
    content = Path(file).with_suffix(".safetensors").read_bytes()
    loaded = ms.load_checkpoint(io.BytesIO(content), format="safetensors")
    assert_same(loaded, ms_arrays(ms.load_checkpoint(file)))
    with refused(SourceError, "truncated", "20 bytes of "):
        ms.load_checkpoint(io.BytesIO(content[:20]), format="safetensors")


@pytest.mark.parametrize(
    ("error", "code", "place", "arguments"),
    [
        (ValueError, "not-found", "nofile.ckpt", {"ckpt_file_name": "nofile.ckpt"}),
        (ValueError, "wrong-extension", "x.ckpt", {"format": "safetensors"}),
        (ValueError, "unknown-format", "'zarr'", {"format": "zarr"}),
        (TypeError, "", "ckpt_file_name", {"ckpt_file_name": 3}),
        (TypeError, "", "int", {"filter_prefix": 3}),
        (ValueError, "empty-value", "filter_prefix", {"filter_prefix": []}),
        (ValueError, "no-tensors", "x.ckpt", {"specify_prefix": "nothing"}),
        (ValueError, "bad-key", "key", {"dec_key": "text"}),
        (ValueError, "not-encrypted", "x.ckpt", {"dec_key": KEY}),  # the file is not encrypted
        (TypeError, "", "net is", {"net": 3}),
    ],
)
def test_wrong_arguments_to_load_raise_what_mindspore_raises(
    file: str, error: type[Exception], code: str, place: str, arguments: dict[str, Any]
) -> None:
    call: dict[str, Any] = {"ckpt_file_name": file, **arguments}
    with refused_as_mindspore(error, code, place):
        ms.load_checkpoint(call.pop("ckpt_file_name"), **call)


def test_an_encrypted_file_without_a_key_says_so(recorded: Path) -> None:
    with refused(ValueError, "encrypted", "AES-GCM"):
        ms.load_checkpoint(str(recorded / "aes-gcm.ckpt"))
    with refused(ValueError, "wrong-mode", "AES-GCM", "AES-CBC"):
        ms.load_checkpoint(str(recorded / "aes-gcm.ckpt"), dec_key=KEY, dec_mode="AES-CBC")
    with refused(ValueError, "not-encryptable"):
        ms.load_checkpoint(str(recorded / "crc.safetensors"), dec_key=KEY, format="safetensors")


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_a_crc_that_differs_is_an_error_where_it_is_asked_for(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"x.{format}"
    ms.save_checkpoint({"w": np.arange(9, dtype=np.float32)}, path, crc_check=True, format=format)
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    assert list(ms.load_checkpoint(str(path), format=format)) == ["w"]
    with refused(ValueError, "wrong-checksum", path):
        ms.load_checkpoint(str(path), crc_check=True, format=format)


def test_the_crc_of_an_integer_without_dimensions_is_mindspores_mistake(tmp_path: Path) -> None:
    """`bytes(np.array(5))` is five zeros: MindSpore 2.10 stores the CRC of those, and compares it."""
    for value, covered in ((5, bytes(5)), (0, b""), (-1, b"\xff" * 8), (1 << 40, (1 << 40).to_bytes(8, "little"))):
        ms.save_checkpoint({"s": np.array(value)}, tmp_path / "x", crc_check=True, format="safetensors")
        with safetensors.safe_open(tmp_path / "x.safetensors", "np") as opened:
            assert opened.metadata()["crc_num"] == str(zlib.crc32(b"s" + covered))
        ms.load_checkpoint(tmp_path / "x.safetensors", crc_check=True, format="safetensors")


def test_loading_in_a_thread(file: str, tmp_path: Path) -> None:
    future = ms.load_checkpoint_async(file, choice_func=lambda name: name == "fc.w")
    assert list(future.result()) == ["fc.w"]
    assert len(ms.load_checkpoint_async(tmp_path / "x.safetensors").result()) == 3
    with refused(ValueError, "not-found", "nofile.ckpt"):
        ms.load_checkpoint_async("nofile.ckpt").result()


def test_loading_into_a_network(file: str) -> None:
    net = Net(**{"conv1.w": [1, 1], "other": [0]})
    ms.load_checkpoint(file, net)
    assert net.values()["conv1.w"] == [0, 0]


# --- load_param_into_net ---


def parameter(value: Any, name: str = "w", dtype: str = "float32") -> Parameter:
    return Parameter(np.array(value, dtype), name)


class Net:
    """A network of one's own."""

    def __init__(self, **values: Any) -> None:
        self.parameters = [Parameter(np.array(value, np.float32), name) for name, value in values.items()]

    def parameters_and_names(self) -> list[tuple[str, Parameter]]:
        return [(f"scope.{parameter.name}", parameter) for parameter in self.parameters]

    def values(self) -> dict[str, Any]:
        return {parameter.name: parameter.asnumpy().tolist() for parameter in self.parameters}


def test_parameters_go_to_their_names_and_two_lists_come_back() -> None:
    net = Net(w=[0, 0], b=[0])
    checkpoint = {"w": parameter([1, 2]), "step": parameter(3, "step"), "note": "text"}
    assert ms.load_param_into_net(net, checkpoint) == (["b"], ["step", "note"])
    assert net.values() == {"w": [1, 2], "b": [0]}


def test_a_longer_name_is_taken_unless_strict() -> None:
    checkpoint = {"net.w": parameter([1, 2]), "net.b": parameter([3], "net.b"), "ema.x": parameter(4, "ema.x")}
    net = Net(w=[0, 0], b=[0], x=0)
    assert ms.load_param_into_net(net, checkpoint) == ([], [])
    assert net.values() == {"w": [1, 2], "b": [3], "x": 4}
    net = Net(w=[0, 0], b=[0])
    assert ms.load_param_into_net(net, checkpoint, strict_load=True) == (["w", "b"], ["net.w", "net.b", "ema.x"])
    assert net.values() == {"w": [0, 0], "b": [0]}


def test_of_longer_names_the_weights_are_taken_not_the_states() -> None:
    """Safetensors files are read in the order of names, so that `moment1.net.w` comes first; MindSpore takes it."""
    checkpoint = {f"{prefix}{n}": parameter([k], n) for k, prefix in enumerate(("moment1.net.", "net.")) for n in "wb"}
    net = Net(w=[5], b=[5])
    assert ms.load_param_into_net(net, checkpoint) == ([], ["moment1.net.w", "moment1.net.b"])
    assert net.values() == {"w": [1], "b": [1]}
    net = Net(w=[5], b=[5])
    either = {"conv.w": parameter([1]), "dense.w": parameter([2]), "net.b": parameter([3])}
    assert ms.load_param_into_net(net, either) == (["w"], ["conv.w", "dense.w"])
    assert net.values() == {"w": [5], "b": [3]}


def test_integers_that_do_not_fit_are_not_made_others() -> None:
    net = {"i": parameter([0, 0], "i", "int8")}
    with refused(NetworkError, "out-of-range", "'i'", "int8"):
        ms.load_param_into_net(net, {"i": np.array([300, 1])})
    ms.load_param_into_net(net, {"i": np.array([-128, 127])})
    assert net["i"].asnumpy().tolist() == [-128, 127]


def test_shapes_must_agree_but_for_ones_at_the_end() -> None:
    net = Net(w=[0, 0], b=0)
    ms.load_param_into_net(net, {"w": parameter([[[1]], [[2]]]), "b": parameter([3], "b")})
    assert net.values() == {"w": [1, 2], "b": 3}
    for wrong in ([1, 2, 3], [[1, 2]], [[1], [2], [3]], 1):
        with refused(RuntimeError, "wrong-shape", "'w'", "(2,)", np.shape(wrong)):
            ms.load_param_into_net(net, {"w": parameter(wrong), "b": parameter(4, "b")})
    assert net.values() == {"w": [1, 2], "b": 3}  # all are checked before one is set


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16"])
def test_floats_are_converted_unless_strict(dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = {"w": Parameter(np.array([1.5, 2.5]).astype(getattr(ml_dtypes, dtype, dtype)), "w")}
    net = Net(w=[0, 0])
    assert ms.load_param_into_net(net, checkpoint) == ([], [])
    assert net.parameters[0].dtype == ms.float32
    assert net.values() == {"w": [1.5, 2.5]}
    assert f"'w' is {dtype} in the checkpoint; converted to the network's float32" in caplog.text
    with refused(NetworkError, "wrong-dtype", "'w'", "float32", dtype, "strict_load"):
        ms.load_param_into_net(net, checkpoint, strict_load=True)


def test_integers_do_not_become_floats() -> None:
    with refused(NetworkError, "wrong-dtype", "'w'", "float32", "int32"):
        ms.load_param_into_net(Net(w=[0, 0]), {"w": parameter([1, 2], dtype="int32")})
    net = {"w": parameter([0, 0], dtype="int8")}
    ms.load_param_into_net(net, {"w": parameter([1, 2], dtype="int64")})
    assert net["w"].asnumpy().tolist() == [1, 2]


@pytest.mark.parametrize(
    ("error", "code", "place", "arguments"),
    [
        (TypeError, "", "net is", (3, {})),
        (TypeError, "", "parameter_dict", ({}, [])),
        (TypeError, "", "'w'", ({"w": parameter([0])}, {"w": object()})),
        (TypeError, "", "net has arrays", ({"w": np.zeros(1)}, {"w": parameter([1])})),
    ],
)
def test_wrong_arguments_to_load_into_raise_what_mindspore_raises(
    error: type[Exception], code: str, place: str, arguments: tuple[Any, ...]
) -> None:
    with refused_as_mindspore(error, code, place):
        ms.load_param_into_net(*arguments)
