"""Loading, saving and converting single files under MindSpore's names, against its own files and its own code."""

from __future__ import annotations

import io
import json
import logging
import zlib
from pathlib import Path
from typing import Any

import helpers
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from checkpoints import write_file
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from test_mindspore_peer import PYTHON, mindspore

import reshard.formats.ckpt
import reshard.mindspore as ms
from reshard.errors import SourceError, UsageError
from reshard.mindspore import Parameter, Tensor
from reshard.mindspore.network import NetworkError

Array = np.ndarray[Any, np.dtype[Any]]

KEY = b"0123456789ABCDEF"
MODES = ["AES-GCM", "AES-CBC", "SM4-CBC"]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
RNG = np.random.default_rng(3)


def tensors() -> dict[str, Array]:
    """One tensor of every kind that both formats have, a scalar and one without elements among them."""
    found: dict[str, Array] = {
        f"layer.{name}": RNG.integers(0, 2, (3, 5)).astype(name)
        if name == "bool"
        else RNG.integers(0, 100, (2, 3)).astype(name)
        for name in ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
    }
    for name in ("float16", "float32", "float64"):
        found[f"layer.{name}"] = RNG.standard_normal((4, 3)).astype(name)
    found["bf"] = RNG.standard_normal((7,)).astype(BFLOAT16)
    found["step"] = np.array(7, np.int64)
    found["rate"] = np.array(0.25, np.float32)
    return found


def assert_same(loaded: dict[str, Any], expected: dict[str, Any]) -> None:
    """Names, dtypes, shapes and bits are equal."""
    assert set(loaded) == set(expected)
    for name, value in expected.items():
        if isinstance(value, str):
            assert loaded[name] == value
        else:
            array = loaded[name].asnumpy()
            assert (array.dtype, array.shape, array.tobytes()) == (value.dtype, value.shape, value.tobytes()), name
            assert loaded[name].name == name


# --- MindSpore's own files ---


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


# --- there and back ---


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
    monkeypatch.setattr("reshard.cipher.BLOCK_BYTES", 100)  # many blocks
    path = str(tmp_path / "x.ckpt")
    ms.save_checkpoint(tensors_ := tensors(), path, enc_key=KEY, enc_mode=mode, crc_check=crc)
    assert b"layer.float32" not in (tmp_path / "x.ckpt").read_bytes()
    assert_same(ms.load_checkpoint(path, dec_key=KEY, dec_mode=mode, crc_check=True), tensors_)
    assert ("carries no CRC" in caplog.text) is not crc
    assert_same(ms.load_checkpoint_async(path, dec_key=KEY, dec_mode=mode).result(), tensors_)


def test_a_tensor_in_several_messages_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MindSpore cuts at 512 MiB; here at 50 bytes, amid rows and elements."""
    monkeypatch.setattr(reshard.formats.ckpt, "PART_BYTES", 50)
    monkeypatch.setattr("reshard.mindspore.write.PIECE_BYTES", 7)
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


# --- save_checkpoint ---


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
    with pytest.raises(ValueError, match="is empty"):
        ms.load_checkpoint(str(tmp_path / "x.ckpt"))
    with pytest.raises(ValueError, match="nothing is left to load"):
        ms.load_checkpoint(str(tmp_path / "x.safetensors"), format="safetensors")


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.ckpt"
    ms.save_checkpoint({"w": np.zeros(3, np.float32)}, path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr("reshard.store.os.pwrite", fail)
    with pytest.raises(reshard.ReshardError, match="cannot be written"):
        ms.save_checkpoint({"w": np.ones(3, np.float32)}, path)
    assert [p.name for p in tmp_path.iterdir()] == ["x.ckpt"]
    assert path.read_bytes() == before


def test_unknown_options_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"incremental": False, "global_step_num": 3, "colour": 3}
    ms.save_checkpoint({"w": np.zeros(1)}, tmp_path / "x", async_save="process", integrated_save=False, **options)
    assert "no argument is called colour" in caplog.text
    assert (tmp_path / "x.ckpt").is_file()


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (TypeError, {"save_obj": "x"}),
        (TypeError, {"save_obj": 3}),
        (TypeError, {"save_obj": [3]}),
        (TypeError, {"save_obj": [{"name": "w"}]}),
        (TypeError, {"save_obj": [{"name": 3, "data": np.zeros(1)}]}),
        (TypeError, {"save_obj": {3: np.zeros(1)}}),
        (TypeError, {"save_obj": {"w": 3}}),
        (TypeError, {"save_obj": {"w": np.array(["text"])}}),
        (TypeError, {"ckpt_file_name": 3}),
        (TypeError, {"integrated_save": 3}),
        (TypeError, {"async_save": 3}),
        (ValueError, {"async_save": "later"}),
        (TypeError, {"append_dict": 3}),
        (TypeError, {"append_dict": {"x": [1]}}),
        (TypeError, {"append_dict": {3: 1}}),
        (ValueError, {"enc_key": "text"}),
        (ValueError, {"enc_key": KEY, "enc_mode": "XX"}),
        (ValueError, {"enc_key": b"short"}),
        (ValueError, {"enc_mode": 3}),
        (ValueError, {"enc_key": KEY, "format": "safetensors"}),
        (ValueError, {"crc_check": 1}),
        (ValueError, {"remove_redundancy": 1}),
        (ValueError, {"format": "zarr"}),
        (ValueError, {"save_obj": {"w": np.zeros(2, ml_dtypes.float8_e5m2)}}),  # no such type in a .ckpt
    ],
)
def test_wrong_arguments_to_save_raise_what_mindspore_raises(
    tmp_path: Path, error: type[Exception], arguments: dict[str, Any]
) -> None:
    call: dict[str, Any] = {"save_obj": {"w": np.zeros(2)}, "ckpt_file_name": str(tmp_path / "x"), **arguments}
    with pytest.raises(error):
        ms.save_checkpoint(call.pop("save_obj"), call.pop("ckpt_file_name"), **call)
    assert not list(tmp_path.iterdir())


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        ms.save_checkpoint({"w": np.zeros(2)}, str(tmp_path))


# --- load_checkpoint ---


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
    with pytest.raises(SourceError, match="cut short or corrupt"):
        ms.load_checkpoint(io.BytesIO(content[:20]), format="safetensors")
    with pytest.raises(TypeError, match="BytesIO"):
        ms.load_checkpoint(io.BytesIO(content))


def ms_arrays(loaded: dict[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, str) else value.asnumpy() for name, value in loaded.items()}


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (ValueError, {"ckpt_file_name": "nofile.ckpt"}),
        (ValueError, {"format": "safetensors"}),
        (ValueError, {"format": "zarr"}),
        (TypeError, {"ckpt_file_name": 3}),
        (TypeError, {"filter_prefix": 3}),
        (TypeError, {"specify_prefix": ["fc", 3]}),
        (ValueError, {"filter_prefix": []}),
        (ValueError, {"filter_prefix": ""}),
        (ValueError, {"specify_prefix": "nothing"}),
        (ValueError, {"choice_func": lambda _: False}),
        (ValueError, {"dec_key": "text"}),
        (ValueError, {"dec_key": KEY}),  # the file is not encrypted
        (ValueError, {"crc_check": 3}),
        (ValueError, {"remove_redundancy": 3}),
        (TypeError, {"net": 3}),
    ],
)
def test_wrong_arguments_to_load_raise_what_mindspore_raises(
    file: str, error: type[Exception], arguments: dict[str, Any]
) -> None:
    call: dict[str, Any] = {"ckpt_file_name": file, **arguments}
    with pytest.raises(error):
        ms.load_checkpoint(call.pop("ckpt_file_name"), **call)


def test_an_encrypted_file_without_a_key_says_so(recorded: Path) -> None:
    with pytest.raises(ValueError, match=r"is encrypted \(AES-GCM\)"):
        ms.load_checkpoint(str(recorded / "aes-gcm.ckpt"))
    with pytest.raises(ValueError, match="is encrypted in mode AES-GCM; the mode given is AES-CBC"):
        ms.load_checkpoint(str(recorded / "aes-gcm.ckpt"), dec_key=KEY, dec_mode="AES-CBC")
    with pytest.raises(ValueError, match="safetensors files are not encrypted"):
        ms.load_checkpoint(str(recorded / "crc.safetensors"), dec_key=KEY, format="safetensors")


def test_a_wrong_key_never_loads(recorded: Path) -> None:
    """Of 1,000 wrong keys some pass the padding, and are found by what comes out."""
    messages = set()
    for number in range(1000):
        with pytest.raises(ValueError, match="key") as raised:
            ms.load_checkpoint(str(recorded / "aes-cbc.ckpt"), dec_key=number.to_bytes(16, "big"), dec_mode="AES-CBC")
        messages.add("it may be that the key is wrong" in str(raised.value))
    assert messages == {True, False}


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_a_crc_that_differs_is_an_error_where_it_is_asked_for(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"x.{format}"
    ms.save_checkpoint({"w": np.arange(9, dtype=np.float32)}, path, crc_check=True, format=format)
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    assert list(ms.load_checkpoint(str(path), format=format)) == ["w"]
    with pytest.raises(ValueError, match="do not have the CRC"):
        ms.load_checkpoint(str(path), crc_check=True, format=format)


def test_the_crc_of_an_integer_without_dimensions_is_mindspores_mistake(tmp_path: Path) -> None:
    """`bytes(np.array(5))` is five zeros: MindSpore 2.10 stores the CRC of those, and compares it."""
    for value, covered in ((5, bytes(5)), (0, b""), (-1, b"\xff" * 8), (1 << 40, (1 << 40).to_bytes(8, "little"))):
        ms.save_checkpoint({"s": np.array(value)}, tmp_path / "x", crc_check=True, format="safetensors")
        with safetensors.safe_open(tmp_path / "x.safetensors", "np") as opened:
            assert opened.metadata()["crc_num"] == str(zlib.crc32(b"s" + covered))
        ms.load_checkpoint(tmp_path / "x.safetensors", crc_check=True, format="safetensors")
    by_bytes = str(zlib.crc32(b"s" + (5).to_bytes(8, "little")))
    write_file(tmp_path / "y.safetensors", {"s": np.array(5)}, crc_num=by_bytes)  # as anybody else would have it
    ms.load_checkpoint(tmp_path / "y.safetensors", crc_check=True, format="safetensors")


def test_loading_in_a_thread(file: str, tmp_path: Path) -> None:
    future = ms.load_checkpoint_async(file, choice_func=lambda name: name == "fc.w")
    assert list(future.result()) == ["fc.w"]
    assert len(ms.load_checkpoint_async(tmp_path / "x.safetensors").result()) == 3
    with pytest.raises(ValueError, match="does not exist"):
        ms.load_checkpoint_async("nofile.ckpt").result()


def test_loading_into_a_network(file: str) -> None:
    net = {"conv1.w": np.ones(2, np.float32), "other": np.zeros(1, np.float32)}
    ms.load_checkpoint(file, net)
    assert net["conv1.w"].tolist() == [0, 0]


# --- load_param_into_net ---

Place = Parameter | Array


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


def test_gradient_accumulators_are_not_listed() -> None:
    class Accumulating(Net):
        def parameters_and_names(self) -> list[tuple[str, Parameter]]:
            return [("", parameter(0, "accu_grads.w")), ("", parameter(0, "w"))]

    assert ms.load_param_into_net(Accumulating(), {"x.y": parameter(1, "x.y")}) == (["w"], ["x.y"])


def test_shapes_must_agree_but_for_ones_at_the_end() -> None:
    net = Net(w=[0, 0], b=0)
    ms.load_param_into_net(net, {"w": parameter([[[1]], [[2]]]), "b": parameter([3], "b")})
    assert net.values() == {"w": [1, 2], "b": 3}
    for wrong in ([1, 2, 3], [[1, 2]], [[1], [2], [3]], 1):
        with pytest.raises(RuntimeError, match=r"'w' has shape \(2,\) in the network and"):
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
    with pytest.raises(NetworkError, match="strict_load converts nothing"):
        ms.load_param_into_net(net, checkpoint, strict_load=True)


def test_integers_do_not_become_floats() -> None:
    with pytest.raises(NetworkError, match="'w' is float32 in the network and int32 in the checkpoint"):
        ms.load_param_into_net(Net(w=[0, 0]), {"w": parameter([1, 2], dtype="int32")})
    net = {"w": np.zeros(2, np.int8)}
    ms.load_param_into_net(net, {"w": parameter([1, 2], dtype="int64")})
    assert net["w"].tolist() == [1, 2]


def test_a_mapping_of_arrays_is_written_in_place() -> None:
    array, tensor = np.zeros(2, np.float32), Tensor(np.zeros(2, np.float32))
    assert ms.load_param_into_net({"a": array, "t": tensor}, {"a": np.ones(2, np.float32), "t": parameter([2, 2])}) == (
        [], [],
    )  # fmt: skip
    assert (array.tolist(), tensor.asnumpy().tolist()) == ([1, 1], [2, 2])


def test_an_object_that_only_can_set_data_is_given_a_tensor() -> None:
    class Own:
        name, shape, dtype = "w", (2,), "float32"

        def set_data(self, data: Tensor) -> None:
            self.given = data

    own = Own()

    class Holder:
        def parameters_and_names(self) -> list[tuple[str, Own]]:
            return [("w", own)]

    assert ms.load_param_into_net(Holder(), {"w": parameter([1, 2])}, remove_redundancy=True) == ([], [])
    assert own.given.asnumpy().tolist() == [1, 2]


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (TypeError, (3, {})),
        (TypeError, ({}, [])),
        (TypeError, ({}, {3: parameter(1)})),
        (TypeError, ({}, {"w": 3})),
        (TypeError, ({"w": np.zeros(1)}, {"w": object()})),
        (TypeError, ({}, {}, 3)),
        (ValueError, ({}, {}, False, 3)),
    ],
)
def test_wrong_arguments_to_load_into_raise_what_mindspore_raises(
    error: type[Exception], arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(error):
        ms.load_param_into_net(*arguments)


def test_a_torch_module_is_loaded_and_saved(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    module[0].to(torch.bfloat16)
    ms.save_checkpoint(module, tmp_path / "x")
    saved = ms.load_checkpoint(tmp_path / "x.ckpt")
    assert saved["0.weight"].dtype == ms.bfloat16
    assert {"1.running_mean", "1.num_batches_tracked"} <= set(saved)
    assert_same(saved, {
        name: t.detach().view(torch.int16).numpy().view(BFLOAT16) if t.dtype == torch.bfloat16 else t.detach().numpy()
        for name, t in module.state_dict().items()
    })  # fmt: skip
    other = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    other[0].to(torch.bfloat16)
    saved["1.num_batches_tracked"].set_data(5)
    assert ms.load_param_into_net(other, {f"net.{name}": value for name, value in saved.items()}) == ([], [])
    assert torch.equal(module[0].weight, other[0].weight)
    assert int(other[1].num_batches_tracked) == 5
    assert other[0].weight.requires_grad
    assert ms.load_param_into_net(other[0].float(), {"weight": saved["0.weight"]}, False) == (["bias"], [])


# --- conversion ---


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    for rank in range(2):
        for name in (f"a-{rank}.ckpt", f"b-{rank}.ckpt"):
            ms.save_checkpoint(
                {"w": np.full(3, rank, np.float32), "v": np.full(2, 10 + rank, np.int8)},
                tmp_path / f"src/rank_{rank}/{name}",
                append_dict={"note": f"rank {rank}"},
            )
    (tmp_path / "src/rank_0/graph.meta").write_text("")
    (tmp_path / "src/other").mkdir()
    return tmp_path / "src"


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_rank_directories_are_converted_and_back(ranks: Path, tmp_path: Path) -> None:
    ms.ckpt_to_safetensors(str(ranks), str(tmp_path / "st"), processes_num=3)
    assert files(tmp_path / "st") == [f"rank_{r}/{n}-{r}.safetensors" for r in range(2) for n in "ab"]
    for name in files(tmp_path / "st"):
        before = ms.load_checkpoint(str(ranks / name).replace(".safetensors", ".ckpt"))
        assert_same(ms.load_checkpoint(str(tmp_path / "st" / name), format="safetensors"), ms_arrays(before))
    ms.safetensors_to_ckpt(tmp_path / "st", tmp_path / "back")
    for name in files(tmp_path / "back"):
        # in the order of names, text too, as MindSpore loads safetensors
        assert list(ms.load_checkpoint(tmp_path / "back" / name)) == ["note", "v", "w"]
        assert_same(ms.load_checkpoint(tmp_path / "back" / name), ms_arrays(ms.load_checkpoint(ranks / name)))


def test_only_files_whose_names_match_are_converted_beside_their_sources(ranks: Path) -> None:
    ms.ckpt_to_safetensors(ranks, file_name_regex="^b-")
    assert [name for name in files(ranks) if name.endswith("s")] == [
        "rank_0/b-0.safetensors", "rank_1/b-1.safetensors",
    ]  # fmt: skip
    with pytest.raises(SourceError, match="no file to convert; expected names that end with .ckpt and contain 'c-'"):
        ms.ckpt_to_safetensors(ranks, file_name_regex="c-")


def test_one_file_is_converted(ranks: Path, tmp_path: Path) -> None:
    ms.ckpt_to_safetensors(str(ranks / "rank_0/a-0.ckpt"), str(tmp_path / "new"))
    assert files(tmp_path / "new") == ["a-0.safetensors"]
    ms.safetensors_to_ckpt(tmp_path / "new/a-0.safetensors", name_map={"w": "z"})
    assert list(ms.load_checkpoint(tmp_path / "new/a-0.ckpt")) == ["note", "v", "z"]


def test_names_may_be_swapped_but_not_collide(ranks: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = ranks / "rank_1/a-1.ckpt"
    ms.ckpt_to_safetensors(source, tmp_path / "st", {"w": "v", "v": "w", "x": "y"})
    loaded = ms.load_checkpoint(tmp_path / "st/a-1.safetensors", format="safetensors")
    assert (loaded["v"].asnumpy().tolist(), loaded["w"].asnumpy().tolist()) == ([1, 1, 1], [11, 11])
    assert "no file has 'x'" in caplog.text
    with pytest.raises(UsageError, match="name 'v': is that of 'w', 'v' after the name map"):
        ms.ckpt_to_safetensors(source, tmp_path / "no", {"w": "v"})
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("mode", MODES)
def test_encrypted_files_are_converted_with_their_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setattr("reshard.cipher.BLOCK_BYTES", 64)
    path = tmp_path / "x.ckpt"
    given = tensors()
    ms.save_checkpoint(given, path, enc_key=KEY, enc_mode=mode)
    ms.ckpt_to_safetensors(path, dec_key=KEY, dec_mode=mode)
    assert_same(ms.load_checkpoint(tmp_path / "x.safetensors", format="safetensors"), given)
    for key in (None, b"another key here"):
        with pytest.raises(ValueError, match="key"):
            ms.ckpt_to_safetensors(path, tmp_path / "new", dec_key=key, dec_mode=mode)
    assert not (tmp_path / "new").exists()


def test_mindspores_own_files_are_converted_to_what_it_saved(mindspore_data: Path, tmp_path: Path) -> None:
    """Rank files of the recorded cases, of which MindSpore saved both formats."""
    pairs = 0
    for source in sorted((mindspore_data / "cases").glob("*/src_ckpt")):
        other = source.parent / "src_safetensors"
        if other.is_dir() and not source.parent.name.startswith("lost"):
            target = tmp_path / source.parent.name
            ms.ckpt_to_safetensors(source, target)
            for name in set(files(target)) & set(files(other)):
                found, expected = (helpers.read_rank_file(root / name) for root in (target, other))
                assert found == expected, (source, name)
                pairs += 1
    assert pairs > 100


@pytest.mark.parametrize(
    "arguments",
    [
        {"file_path": "nothing"},
        {"file_path": "rank_0/graph.meta"},
        {"file_path": "other"},
        {"file_path": "rank_0/a-0.ckpt", "file_name_regex": "b-"},
        {"file_name_regex": "("},
        {"save_path": "out.ckpt"},
        {"save_path": 3},
        {"name_map": [("w", "v")]},
        {"name_map": {"w": 3}},
        {"processes_num": 0},
        {"processes_num": "2"},
    ],
)
def test_wrong_arguments_to_conversion_are_value_errors(
    ranks: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    monkeypatch.chdir(ranks)
    before = files(ranks)
    with pytest.raises(ValueError):  # noqa: PT011 -- of several kinds
        ms.ckpt_to_safetensors(**{"file_path": ".", **arguments})
    assert files(ranks) == before


def test_a_map_parameter_is_left_out_with_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    message = b"\x0a\x07\x0a\x03map\x1a\x00"  # a Value with a tag and an empty maptensor
    ms.save_checkpoint({"w": np.zeros(1, np.float32)}, tmp_path / "x.ckpt")
    (tmp_path / "x.ckpt").write_bytes((tmp_path / "x.ckpt").read_bytes() + message)
    assert list(ms.load_checkpoint(tmp_path / "x.ckpt")) == ["w"]
    ms.ckpt_to_safetensors(tmp_path / "x.ckpt")
    assert caplog.text.count("'map' is a map parameter (a hash table), which has no layout; it is left out") == 2


# --- with MindSpore ---

needs_mindspore = [
    pytest.mark.mindspore,
    pytest.mark.skipif(not PYTHON, reason="RESHARD_MINDSPORE_PYTHON names no Python that has MindSpore"),
]

COMMON = """
import json, sys
import mindspore as ms, numpy as np
names = dict(bool="bool_")
def bits(p):
    if isinstance(p, str):
        return ["str", [], p]
    data = p.data if p.dtype != ms.bfloat16 else p.data.view(ms.uint16)
    return [str(p.dtype).lower(), list(p.shape), data.asnumpy().tobytes().hex()]
def of(dtype, shape, content):
    array = np.frombuffer(bytes.fromhex(content), "uint16" if dtype == "bfloat16" else dtype).reshape(shape)
    tensor = ms.Tensor(array)
    return tensor.view(ms.bfloat16) if dtype == "bfloat16" else tensor
"""

LOAD = (
    COMMON
    + """
found = [
    {name: bits(p) for name, p in ms.load_checkpoint(path, **{k: bytes.fromhex(v) if k == "dec_key" else v
     for k, v in options.items()}).items()} for path, options in json.loads(sys.argv[1])
]
print("RESULT" + json.dumps(found))
"""
)

SAVE = (
    COMMON
    + """
tensors, append, calls = json.loads(sys.argv[1])
saved = {name: ms.Parameter(of(*item), name=name) for name, item in tensors.items()}
for path, options in calls:
    ms.save_checkpoint(saved, path, append_dict=append, **{k: bytes.fromhex(v) if k == "enc_key" else v
                       for k, v in options.items()})
"""
)

INTO = (
    COMMON
    + """
sys.path.insert(0, sys.argv[2])
try:
    import ml_dtypes
except ImportError:
    print("LACKING")
    sys.exit()
import reshard.mindspore as rs
class Net(ms.nn.Cell):
    def __init__(self):
        super().__init__()
        self.w = ms.Parameter(ms.Tensor(np.zeros((7,), np.float32)).astype(ms.bfloat16), name="bf")
        self.v = ms.Parameter(ms.Tensor(np.zeros((4, 3), np.float32)), name="layer.float32")
        self.u = ms.Parameter(ms.Tensor(np.zeros((4, 3), np.float32)), name="other")
net = Net()
lists = rs.load_param_into_net(net, rs.load_checkpoint(sys.argv[1]))
rs.save_checkpoint(net, sys.argv[1] + ".again.ckpt")
print("RESULT" + json.dumps([lists, {p.name: bits(p) for p in net.get_parameters()}]))
"""
)

APPEND = {"epoch": 3, "lr": 0.5, "flag": True, "note": "漢字 😀", "empty": ""}


def as_json(given: dict[str, Any]) -> dict[str, Any]:
    return {
        name: ["str", [], value]
        if isinstance(value, str)
        else [value.dtype.name, list(value.shape), value.tobytes().hex()]
        for name, value in given.items()
    }


def appended() -> dict[str, Any]:
    return {**APPEND, "epoch": np.array(3), "lr": np.array(0.5, np.float32), "flag": np.array(True)}


class TestBesideMindSpore:
    """MindSpore loads what is saved here, and the reverse."""

    pytestmark = needs_mindspore

    def test_mindspore_loads_what_is_saved_here(self, tmp_path: Path) -> None:
        given = tensors()
        without_bf = {name: array for name, array in given.items() if name != "bf"}
        files: list[tuple[str, dict[str, Any]]] = []
        expected: list[dict[str, Any]] = []

        def save(name: str, saved: dict[str, Any], load: dict[str, Any], **options: Any) -> None:
            path = str(tmp_path / name)
            ms.save_checkpoint(saved, path, **options)
            files.append((path, load))
            expected.append(saved | (appended() if options.get("append_dict") else {}))

        save("plain.ckpt", given, {}, append_dict=APPEND)
        save("crc.ckpt", given, {"crc_check": True}, append_dict=APPEND, crc_check=True)
        for mode in MODES:
            for crc in (False, True):
                save(
                    f"{mode}-{crc}.ckpt", given, {"dec_key": KEY.hex(), "dec_mode": mode, "crc_check": crc},
                    append_dict=APPEND, enc_key=KEY, enc_mode=mode, crc_check=crc,
                )  # fmt: skip
        for nbytes in (24, 32):
            key = bytes(range(nbytes))
            save(f"gcm-{nbytes}.ckpt", given, {"dec_key": key.hex()}, enc_key=key)
        save("plain.safetensors", given, {"format": "safetensors"}, format="safetensors")
        # MindSpore cannot make bytes of bfloat16 for a CRC
        load = {"format": "safetensors", "crc_check": True}
        save("crc.safetensors", without_bf, load, format="safetensors", crc_check=True)
        printed = mindspore(LOAD, json.dumps(files))
        for path, found, saved in zip(files, json.loads(printed.split("RESULT")[1]), expected, strict=True):
            assert found == as_json(saved), path

    def test_what_mindspore_saves_is_loaded_here(self, tmp_path: Path) -> None:
        given = tensors()
        del given["step"], given["rate"]
        with_scalars = {**given, "step": np.array(7, np.int64), "rate": np.array(0.25, np.float32)}
        calls: list[tuple[str, dict[str, Any]]] = [
            ("plain.ckpt", {}), ("crc.ckpt", {"crc_check": True}),
            *((f"{mode}.ckpt", {"enc_key": KEY.hex(), "enc_mode": mode}) for mode in MODES),
        ]  # fmt: skip
        numbers = {name: value for name, value in APPEND.items() if not isinstance(value, str)}
        without_bf = {name: array for name, array in with_scalars.items() if name != "bf"}
        for tensors_, append, some in (
            (with_scalars, APPEND, calls),
            (with_scalars, numbers, [("plain.safetensors", {"format": "safetensors"})]),
            (without_bf, numbers, [("crc.safetensors", {"format": "safetensors", "crc_check": True})]),
        ):
            paths = [(str(tmp_path / name), options) for name, options in some]
            mindspore(SAVE, json.dumps([as_json(tensors_), append, paths]))
            for path, options in paths:
                loaded = ms.load_checkpoint(
                    path, dec_key=KEY if "enc_key" in options else None, dec_mode=options.get("enc_mode", "AES-GCM"),
                    crc_check=options.get("crc_check", False), format=options.get("format", "ckpt"),
                )  # fmt: skip
                assert_same(loaded, {**tensors_, **{name: appended()[name] for name in append}})
                if "enc_key" not in options:
                    again = str(tmp_path / "again") + "." + options.get("format", "ckpt")
                    ms.save_checkpoint(tensors_, again, append_dict=append, **options)
                    if "format" not in options:
                        assert Path(again).read_bytes() == Path(path).read_bytes()
                    else:
                        assert safetensors_parts(again) == safetensors_parts(path)

    def test_several_encrypted_blocks_both_ways(self, tmp_path: Path) -> None:
        """150 MB: three blocks, the last one short."""
        given = {"w": RNG.integers(0, 1 << 30, (37, 1_000_003)).astype(np.int32), "v": np.arange(5, dtype=np.int32)}
        plain, path = str(tmp_path / "plain.ckpt"), str(tmp_path / "x.ckpt")
        ms.save_checkpoint(given, plain)
        script = """
import sys, mindspore as ms
plain, path, mode = sys.argv[1:]
key = b"0123456789ABCDEF"
loaded, given = ms.load_checkpoint(path, dec_key=key, dec_mode=mode), ms.load_checkpoint(plain)
assert all((loaded[name].asnumpy() == given[name].asnumpy()).all() for name in ("w", "v"))
ms.save_checkpoint(given, path, enc_key=key, enc_mode=mode)
"""
        for mode in MODES:
            ms.save_checkpoint(given, path, enc_key=KEY, enc_mode=mode)
            mindspore(script, plain, path, mode)
            assert_same(ms.load_checkpoint(path, dec_key=KEY, dec_mode=mode), given)
            Path(path).unlink()

    def test_a_mindspore_network_is_loaded_and_saved(self, tmp_path: Path) -> None:
        given = tensors()
        ms.save_checkpoint(given, tmp_path / "x.ckpt")
        printed = mindspore(INTO, str(tmp_path / "x.ckpt"), str(Path(reshard.__file__).parent.parent))
        if "LACKING" in printed:
            pytest.skip("the Python that has MindSpore has no ml_dtypes, which reshard needs")
        lists, values = json.loads(printed.split("RESULT")[1])
        assert lists == [["other"], [name for name in given if name not in {"bf", "layer.float32"}]]
        assert {name: values[name] for name in ("bf", "layer.float32")} == {
            name: value for name, value in as_json(given).items() if name in {"bf", "layer.float32"}
        }
        again = ms.load_checkpoint(str(tmp_path / "x.ckpt.again.ckpt"))
        assert as_json(ms_arrays(again)) == values

    def test_the_lists_are_mindspores(self) -> None:
        script = """
import json, sys, mindspore as ms, numpy as np
class Net(ms.nn.Cell):
    def __init__(self, names):
        super().__init__()
        for n, name in enumerate(names):
            setattr(self, f"p{n}", ms.Parameter(ms.Tensor(np.zeros(2, np.float32)), name=name))
print("RESULT" + json.dumps([
    ms.load_param_into_net(
        Net(net), {n: ms.Parameter(ms.Tensor(np.ones(2, np.float32)), name=n) for n in given}, strict)
    for net, given, strict in json.loads(sys.argv[1])
]))
"""
        calls = [
            (["w", "b"], ["w", "x"], False), (["w", "b"], ["net.w", "net.b"], True),
            (["w", "accu_grads.w"], ["v"], False), (["w"], [], False), (["a.w", "a.b"], ["a.w", "a.b"], True),
        ]  # fmt: skip
        theirs = json.loads(mindspore(script, json.dumps(calls)).split("RESULT")[1])
        ours = [
            ms.load_param_into_net(
                {name: np.zeros(2, np.float32) for name in net},
                {name: np.ones(2, np.float32) for name in given},
                strict,
            )
            for net, given, strict in calls
        ]
        assert [list(pair) for pair in ours] == theirs


def safetensors_parts(path: str) -> tuple[Any, bytes]:
    """Header and contents; the library stores metadata in no fixed order."""
    content = Path(path).read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "reshard.mindspore")
