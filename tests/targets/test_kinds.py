"""What a target may be: by a word, by its name, as its source is; and the options that it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from refusals import refused

from reshard.core.model.entries import NamedFile
from reshard.errors import UsageError
from reshard.formats.checkpoint2.writer import Checkpoint2
from reshard.formats.dcp.names import DCP
from reshard.formats.deepspeed.names import DeepSpeedUniversal
from reshard.formats.kinds import CUT, TAKEN_BY, TO, check_options, file_format, files_of, named_word, word_of
from reshard.formats.sets.options import HuggingFaceSet, MindSporeSet
from reshard.formats.zarr.layout import OrbaxTree, ZarrGroup

if TYPE_CHECKING:
    from pathlib import Path


def test_the_name_of_a_target_says_what_it_is(tmp_path: Path) -> None:
    words = {name: named_word(tmp_path / name) for name in ("a.zarr", "a.ckpt", "a.safetensors", "a", "a.bin")}
    assert {name: found and found[0] for name, found in words.items()} == {
        "a.zarr": "zarr", "a.ckpt": "ckpt", "a.safetensors": "safetensors", "a": None, "a.bin": None,
    }  # fmt: skip
    (tmp_path / "a.ckpt").mkdir()
    assert named_word(tmp_path / "a.ckpt") is None


def test_every_word_has_files() -> None:
    kinds = {word: type(files_of(word)) for word in TO}
    assert kinds == {
        "safetensors": type(None), "ckpt": type(None), "hf": HuggingFaceSet, "mindspore": MindSporeSet, "dcp": DCP,
        "checkpoint2": Checkpoint2, "deepspeed-universal": DeepSpeedUniversal,
        "orbax": OrbaxTree, "zarr": ZarrGroup,
    }  # fmt: skip
    assert files_of("ckpt", "a.ckpt") == NamedFile("a.ckpt")
    assert file_format("checkpoint2") is None
    assert word_of("ms") == "mindspore"
    with refused(UsageError, "unknown-format", "pth"):
        word_of("pth")


@pytest.mark.parametrize("word", TO)
def test_options_of_other_formats_are_refused(word: str) -> None:
    for option, words in TAKEN_BY.items():
        if word in words:
            check_options(word, [option, "memory"])
        else:
            with refused(UsageError, "option-of-another-format"):
                check_options(word, [option])


def test_sets_of_whole_tensors_take_no_option_of_ranks() -> None:
    with refused(UsageError, "option-of-another-format", "ranks", "link_replicas"):
        check_options("hf", ["ranks", "link_replicas", "max_shard_size"])
    assert set(CUT) <= set(TAKEN_BY)
