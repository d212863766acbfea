"""The files beside the weights of a set go along to a set that is made of it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from checkpoints import assert_equal, numbers, write_file, write_ranks
from commands import done

import reshard
from reshard import Layout, Strategy
from reshard.formats.sets import sidecars

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FULL = numbers({"a.w": (8, 6), "b.w": (8, 6)})
CARRIED = {
    "README.md": b"# card\r\n", "LICENSE": b"mine", "config.json": b'{"model_type": "x",\n "torch_dtype": "float32"}',
    "generation_config.json": b"{}", "tokenizer.json": b"{}", "tokenizer_config.json": b"{}", "vocab.json": b"{}",
    "special_tokens_map.json": b"{}", "merges.txt": b"a b", "tokenizer.model": b"\x00\xff", "modeling_x.py": b"raise",
    "chat_template.jinja": b"{{ x }}", "preprocessor_config.json": b"{}",
}  # fmt: skip
LEFT = {
    "picture.png": b"", ".gitattributes": b"", ".hidden.json": b"{}", "run_manifest.json": b"{}", "optimizer.npz": b"",
    "flax_model.msgpack.index.json": b"{}",
}  # fmt: skip


def model(directory: Path) -> Path:
    source = reshard.open(write_file(directory / "one" / "model.safetensors", FULL))
    reshard.plan(source, to="hf", max_shard_size=200).run(directory / "set", ledger=False)
    for name, content in {**CARRIED, **LEFT}.items():
        (directory / "set" / name).write_bytes(content)
    (directory / "set" / ".git").mkdir()
    (directory / "set" / ".git" / "config.json").write_bytes(b"{}")
    return directory / "set"


def beside(directory: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if path.is_file() and path.suffix != ".safetensors" and path.name not in sidecar_indexes
    }


sidecar_indexes = {"model.safetensors.index.json", "param_name_map.json"}


@pytest.mark.parametrize("to", ["hf", "mindspore"])
def test_they_go_from_set_to_set(tmp_path: Path, to: str) -> None:
    report = reshard.convert(model(tmp_path), tmp_path / "out", to=to, max_shard_size=1000)
    assert beside(tmp_path / "out") == CARRIED
    assert set(report.files) >= set(CARRIED)
    assert_equal(reshard.open(tmp_path / "out"), FULL)
    (tmp_path / "out" / "README.md").write_text("# edited afterwards")
    assert reshard.verify(tmp_path / "out")


def test_one_file_of_weights_is_a_set(tmp_path: Path) -> None:
    source = write_file(tmp_path / "one" / "model.safetensors", FULL).parent
    (source / "config.json").write_bytes(b"{}")
    assert "and 1 file beside" in done("convert", source, tmp_path / "out", "--to", "hf").stdout
    assert beside(tmp_path / "out") == {"config.json": b"{}"}


def test_a_cast_is_told_in_the_configuration(tmp_path: Path) -> None:
    done("convert", model(tmp_path), tmp_path / "out", "--to", "hf", "--cast", "float32=bf16")
    assert json.loads((tmp_path / "out" / "config.json").read_bytes()) == {"model_type": "x", "torch_dtype": "bfloat16"}
    reshard.convert(tmp_path / "set", tmp_path / "half", to="hf", include="a.*")
    assert beside(tmp_path / "half") == CARRIED


@pytest.mark.parametrize("to", ["safetensors", "dcp", "orbax"])
def test_other_targets_get_none_and_say_so(tmp_path: Path, to: str) -> None:
    root = model(tmp_path)
    report = reshard.convert(root, tmp_path / "out", to=to)
    assert not {path.name for path in (tmp_path / "out").rglob("*")} & set(CARRIED)
    assert told(report.warnings) == (len(CARRIED), sorted(CARRIED)[:3])
    store = reshard.convert(root, tmp_path / "store.zarr").directory
    assert told(reshard.plan(reshard.open(store), to=to).warnings) == told(report.warnings)


def test_what_is_left_out_is_on_the_terminal_and_in_html(tmp_path: Path) -> None:
    root = model(tmp_path)
    assert told([done("convert", root, tmp_path / "out", "--to", "dcp", "--dry-run").stderr])[0] == len(CARRIED)
    assert min(CARRIED) in reshard.plan(reshard.open(root), to="dcp")._repr_html_()


@pytest.mark.parametrize("to", ["hf", "mindspore", "zarr"])
def test_targets_that_carry_all_say_nothing(tmp_path: Path, to: str) -> None:
    assert reshard.convert(model(tmp_path), tmp_path / "out", to=to).warnings == ()


def test_a_target_of_another_program_says_what_it_lacks(tmp_path: Path) -> None:
    rules = reshard.Rules.of(
        {"reshard-rules": 1, "sides": ["a", "b"], "rules": [{"a": f"{x}.w", "b": f"{x}.v"} for x in "ab"]}
    )
    report = reshard.convert(model(tmp_path), tmp_path / "out", to="hf", rules=rules)
    assert told(report.warnings) == (len(CARRIED), sorted(CARRIED)[:3])


def told(warnings: Sequence[str]) -> tuple[int, list[str]]:
    """Return how many files are said to be left out, and the names that are given."""
    (text,) = warnings
    number, names = re.search(r"(\d+) files? beside the tensors left out: (.*) and \d+ more", text).groups()
    return int(number), names.split(", ")


def test_ranks_are_no_set(tmp_path: Path) -> None:
    strategy = Strategy.of({name: Layout.of([2], [0, -1]) for name in FULL})
    root = write_ranks(tmp_path / "ranks", FULL, strategy)
    (root / "config.json").write_bytes(b"{}")
    reshard.convert(root, tmp_path / "out", to="hf", source_strategy=strategy)
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_large_file_is_left_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecars, "LARGEST", 20)
    root = model(tmp_path)
    plan = reshard.plan(reshard.open(root), to="hf")
    assert any("config.json" in warning for warning in plan.warnings)
    plan.run(tmp_path / "out")
    assert set(beside(tmp_path / "out")) == set(CARRIED) - {"config.json"}


def test_links_are_followed_to_the_weights_only(tmp_path: Path) -> None:
    """In a cache of the Hub all files are links to `blobs`."""
    (tmp_path / "secret").write_text("key")
    root, blobs = model(tmp_path), tmp_path / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(path for path in root.iterdir() if path.is_file())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../blobs/{number}")
    (root / "NOTICE").symlink_to("LICENSE")
    (root / "LICENCE.txt").symlink_to("../secret")
    report = reshard.convert(root, tmp_path / "out", to="hf")
    assert report.warnings == ("LICENCE.txt: outside the directory, not copied beside the weights",)
    assert not (tmp_path / "out" / "LICENCE.txt").exists()
    assert (tmp_path / "out" / "NOTICE").read_bytes() == CARRIED["LICENSE"]
    assert (tmp_path / "out" / "README.md").read_bytes() == CARRIED["README.md"]
