"""What a target may be: by a word, by its name, as its source is; and the options that it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from refusals import refused

import reshard
from reshard.api.formats import CUT, check_options, given_options, named_format, options_of, takes
from reshard.core.format import targets, written
from reshard.core.options import takers
from reshard.errors import UsageError
from reshard.formats.orbax.options import OrbaxTree
from reshard.formats.ranks.options import RankFiles

if TYPE_CHECKING:
    from pathlib import Path

TAKEN_BY = {
    **{
        option: {"safetensors", "ckpt", "dcp", "checkpoint2"}
        for option in ("target_strategy", "ranks", "target_stage", "remove_redundancy")
    },
    "same_ranks": {"safetensors", "ckpt"},
    "prefix": {"safetensors", "ckpt", "checkpoint2"},
    "target_step": {"dcp", "checkpoint2"},
    "max_shard_size": {"hf", "mindspore", "dcp", "checkpoint2"},
    "link": {"dcp"},
    **{option: {"zarr", "orbax"} for option in ("chunk_size", "compression")},
}


def test_the_name_of_a_target_says_what_it_is(tmp_path: Path) -> None:
    named = {name: named_format(tmp_path / name) for name in ("a.zarr", "a.ckpt", "a.safetensors", "a", "a.bin")}
    assert {name: found and found[0].name for name, found in named.items()} == {
        "a.zarr": "zarr", "a.ckpt": "ckpt", "a.safetensors": "safetensors", "a": None, "a.bin": None,
    }  # fmt: skip
    (tmp_path / "a.ckpt").mkdir()
    assert named_format(tmp_path / "a.ckpt") is None


def test_every_word_has_options() -> None:
    kinds = {each.name: type(options_of(each, {})).__name__ for each in targets()}
    assert kinds == {
        "safetensors": "RankFiles", "ckpt": "RankFiles", "hf": "HuggingFaceSet", "mindspore": "MindSporeSet",
        "dcp": "DCP", "checkpoint2": "Checkpoint2", "deepspeed-universal": "DeepSpeedUniversal", "orbax": "OrbaxTree",
        "zarr": "ZarrGroup",
    }  # fmt: skip
    assert options_of(written("ckpt"), {}, "a.ckpt") == RankFiles(name="a.ckpt")
    assert options_of(written("orbax"), {"chunk_size": 8}) == OrbaxTree(8)
    assert written("ms").name == "mindspore"
    with refused(UsageError, "unknown-format", "pth"):
        written("pth")


@pytest.mark.parametrize("word", [each.name for each in targets()])
def test_options_of_other_formats_are_refused(word: str) -> None:
    format_ = written(word)
    for option, words in TAKEN_BY.items():
        if word in words:
            check_options(format_, [option])
        else:
            with refused(UsageError, "option-of-another-format"):
                check_options(format_, [option])


def test_sets_of_whole_tensors_take_no_option_of_ranks() -> None:
    with refused(UsageError, "option-of-another-format", "ranks"):
        check_options(written("hf"), ["ranks", "max_shard_size"])
    assert {*CUT, "same_ranks", *takers(targets())} == TAKEN_BY.keys()
    assert {option: {each.name for each in targets() if takes(each, option)} for option in TAKEN_BY} == TAKEN_BY


def test_keywords_of_formats_are_checked() -> None:
    found = given_options({"max_shard_size": "4GB", "target_step": 5, "prefix": None, "link": False}, "convert")
    assert found == {"max_shard_size": 4_000_000_000, "target_step": 5}
    for wrong in ({"target_step": "five"}, {"compression": 3}, {"link": 1}, {"chunk_size": "big"}):
        with pytest.raises(UsageError):
            given_options(wrong, "convert")
    with pytest.raises(TypeError, match=r"convert\(\) got an unexpected keyword argument 'chunks'"):
        reshard.convert("a", "b", chunks=3)
