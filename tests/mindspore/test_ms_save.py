"""save_checkpoint: what it takes and what it writes, the names of files, and what is refused."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import helpers
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from ms_files import (
    KEY,
    refused_as_mindspore,
    warnings_logged,  # noqa: F401 -- applies to every test here
)
from refusals import refused

import reshard
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
    with refused(ValueError, "no-tensors", "0 entries", tmp_path / "x.safetensors"):
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


def test_unknown_options_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"incremental": False, "global_step_num": 3, "colour": 3}
    ms.save_checkpoint({"w": np.zeros(1)}, tmp_path / "x", async_save="process", integrated_save=False, **options)
    assert "no argument is called colour" in caplog.text
    assert (tmp_path / "x.ckpt").is_file()


@pytest.mark.parametrize(
    ("error", "code", "place", "arguments"),
    [
        (TypeError, "", "save_obj", {"save_obj": "x"}),
        (TypeError, "", "save_obj", {"save_obj": 3}),
        (TypeError, "", "save_obj[0]", {"save_obj": [3]}),
        (TypeError, "", "save_obj[0]", {"save_obj": [{"name": "w"}]}),
        (TypeError, "", "int (3)", {"save_obj": [{"name": 3, "data": np.zeros(1)}]}),
        (TypeError, "", "int (3)", {"save_obj": {3: np.zeros(1)}}),
        (TypeError, "", "'w'", {"save_obj": {"w": 3}}),
        (TypeError, "", "'w'", {"save_obj": {"w": np.array(["text"])}}),
        (TypeError, "", "ckpt_file_name", {"ckpt_file_name": 3}),
        (TypeError, "", "integrated_save", {"integrated_save": 3}),
        (TypeError, "", "async_save", {"async_save": 3}),
        (ValueError, "bad-value", "async_save", {"async_save": "later"}),
        (TypeError, "", "append_dict", {"append_dict": 3}),
        (TypeError, "", "append_dict['x']", {"append_dict": {"x": [1]}}),
        (TypeError, "", "append_dict[3]", {"append_dict": {3: 1}}),
        (ValueError, "usage", "enc_key", {"enc_key": "text"}),
        (ValueError, "unknown-mode", "'XX'", {"enc_key": KEY, "enc_mode": "XX"}),
        (ValueError, "bad-key", "5 bytes", {"enc_key": b"short"}),
        (ValueError, "usage", "enc_mode", {"enc_mode": 3}),
        (ValueError, "not-encryptable", "enc_key", {"enc_key": KEY, "format": "safetensors"}),
        (ValueError, "usage", "crc_check", {"crc_check": 1}),
        (ValueError, "usage", "remove_redundancy", {"remove_redundancy": 1}),
        (ValueError, "unknown-format", "'zarr'", {"format": "zarr"}),
        (
            ValueError,
            "unsupported-dtype",
            "'w'",
            {"save_obj": {"w": np.zeros(2, ml_dtypes.float8_e5m2)}},
        ),
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
