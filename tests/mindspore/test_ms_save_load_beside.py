"""Next to MindSpore itself: it loads what is saved here, and the reverse, and networks of its own are loaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from ms_files import (
    KEY,
    MODES,
    tensors,
    warnings_logged,  # noqa: F401 -- applies to every test here
)
from test_mindspore_peer import PYTHON, mindspore

import reshard.mindspore as ms

if TYPE_CHECKING:
    from pathlib import Path

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
