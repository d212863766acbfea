"""Next to MindSpore itself: it loads what is saved here, and the reverse, and networks of its own are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ms_files import (
    KEY,
    MODES,
    assert_same,
    tensors,
    warnings_logged,  # noqa: F401 -- applies to every test here
)
from test_mindspore_peer import PYTHON, mindspore

import reshard.mindspore as ms

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
