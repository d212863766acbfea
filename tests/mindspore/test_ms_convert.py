"""ckpt_to_safetensors and safetensors_to_ckpt: single files and directories of ranks, and names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from ms_files import (
    assert_same,
    ms_arrays,
    warnings_logged,  # noqa: F401 -- applies to every test here
)
from refusals import refused

import reshard.mindspore as ms
from reshard.errors import SourceError, UsageError

if TYPE_CHECKING:
    from pathlib import Path


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
    with refused(SourceError, "no-checkpoint", ranks, ".ckpt"):
        ms.ckpt_to_safetensors(ranks, file_name_regex="c-")


def test_one_file_is_converted(ranks: Path, tmp_path: Path) -> None:
    ms.ckpt_to_safetensors(str(ranks / "rank_0/a-0.ckpt"), str(tmp_path / "new"))
    assert files(tmp_path / "new") == ["a-0.safetensors"]
    ms.safetensors_to_ckpt(tmp_path / "new/a-0.safetensors", name_map={"w": "z"})
    assert list(ms.load_checkpoint(tmp_path / "new/a-0.ckpt")) == ["note", "v", "z"]


def test_no_file_has_its_name_before_all_are_converted(ranks: Path, tmp_path: Path) -> None:
    (ranks / "rank_1/b-1.ckpt").write_bytes((ranks / "rank_1/b-1.ckpt").read_bytes()[:-1])
    with refused(SourceError, "truncated", ranks / "rank_1/b-1.ckpt"):
        ms.ckpt_to_safetensors(ranks, tmp_path / "st")
    assert not (tmp_path / "st").exists()


def test_names_may_be_swapped_but_not_collide(ranks: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = ranks / "rank_1/a-1.ckpt"
    ms.ckpt_to_safetensors(source, tmp_path / "st", {"w": "v", "v": "w", "x": "y"})
    loaded = ms.load_checkpoint(tmp_path / "st/a-1.safetensors", format="safetensors")
    assert (loaded["v"].asnumpy().tolist(), loaded["w"].asnumpy().tolist()) == ([1, 1, 1], [11, 11])
    assert "no file has 'x'" in caplog.text
    with refused(UsageError, "duplicate-name", "'v'", "w, v"):
        ms.ckpt_to_safetensors(source, tmp_path / "no", {"w": "v"})
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("code", "place", "arguments"),
    [
        ("not-found", "nothing", {"file_path": "nothing.ckpt"}),
        ("no-checkpoint", "rank_0/graph.meta", {"file_path": "rank_0/graph.meta"}),
        ("no-checkpoint", "other", {"file_path": "other"}),
        ("no-checkpoint", "rank_0/a-0.ckpt", {"file_path": "rank_0/a-0.ckpt", "file_name_regex": "b-"}),
        ("not-a-directory", "save_path", {"save_path": "rank_0/graph.meta"}),
        ("out-of-range", "processes_num", {"processes_num": 0}),
    ],
)
def test_what_cannot_be_converted_is_refused(
    ranks: Path, monkeypatch: pytest.MonkeyPatch, code: str, place: str, arguments: dict[str, Any]
) -> None:
    monkeypatch.chdir(ranks)
    before = files(ranks)
    with refused(ValueError, code, place):
        ms.ckpt_to_safetensors(**{"file_path": ".", **arguments})
    assert files(ranks) == before


def test_a_map_parameter_is_left_out_with_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    message = b"\x0a\x07\x0a\x03map\x1a\x00"  # a Value with a tag and an empty maptensor
    ms.save_checkpoint({"w": np.zeros(1, np.float32)}, tmp_path / "x.ckpt")
    (tmp_path / "x.ckpt").write_bytes((tmp_path / "x.ckpt").read_bytes() + message)
    assert list(ms.load_checkpoint(tmp_path / "x.ckpt")) == ["w"]
    ms.ckpt_to_safetensors(tmp_path / "x.ckpt")
    assert caplog.text.count("'map' is a map parameter (a hash table), which has no layout; it is left out") == 2
