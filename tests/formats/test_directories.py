"""What is one of several files, or another program's directory, never passes for rank files or whole tensors."""

from __future__ import annotations

import json
from contextlib import chdir
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import numbers, plan_with, tree, write_file, write_ranks
from commands import call, done
from fsspec.core import url_to_fs
from refusals import failed, refused
from saves_files import tensor, write_save

import reshard
from reshard import Layout, Strategy
from reshard.errors import SourceError, UsageError
from reshard.formats.sets.options import HuggingFaceSet, MindSporeSet

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = {"a": (8, 4), "b": (4, 8)}
FULL = numbers(SHAPES)
ROWS = Strategy.of(dict.fromkeys(SHAPES, Layout.of([4], [0, -1])))
WHOLE = {"a": FULL["a"][:4], "b": FULL["b"]}
"""A rank's block and a whole tensor: from inside they look alike."""

METADATA = json.dumps({"state_dict_metadata": {"a": {"properties": {"dtype": "Float32"}}}, "storage_data": {}}).encode()
PICKLE = b"\x80\x04\x95\x0f\x00\x00\x00\x00\x00\x00\x00."
OFFSETS = {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [4, 0]}})}
PLAIN: dict[str, str] = {}

Files = dict[str, bytes | dict[str, str]]
"""The contents of files by name; of those with tensors, the notes in their headers."""

FOREIGN: dict[str, tuple[Files, str]] = {
    "blocks that say so": ({"mine.safetensors": OFFSETS}, "DCP_SHARDING_INFO"),
    "shards": ({f"model-0000{n}-of-00002.safetensors": PLAIN for n in (1, 2)}, "model-0000"),
    "a shard": ({"diffusion_model-00002-of-00011.safetensors": PLAIN}, "model-0000"),
    "parts": ({f"part{n}.safetensors": PLAIN for n in (0, 1)}, "/part"),
    "a part": ({"part0.safetensors": PLAIN}, "/part"),
    "hyper-parameters": ({"hyper_param.safetensors": PLAIN}, "hyper_param.safetensors"),
}
"""Directories of another format, and what is said of them."""

DESCRIBED: dict[str, tuple[Files, str]] = {
    "checkpoint2": (
        {
            **{f"tiny-{kind}-000000{rank}-0000002.safetensors": PLAIN for rank in (0, 1) for kind in ("model", "opt")},
            "metadata.json": METADATA, "common.json": b"{}",
        },
        "Checkpoint 2.0",
    ),
    "checkpoint2 of one": ({f"{kind}-0000000-0000001.safetensors": PLAIN for kind in ("model", "opt")}, "Checkpoint 2"),
    "checkpoint2 by other names": ({"mine.safetensors": PLAIN, "metadata.json": METADATA}, "Checkpoint 2.0"),
    "dcp": ({"__0_0.distcp": OFFSETS, "__1_0.distcp": OFFSETS, ".metadata": PICKLE}, "(DCP)"),
    "dcp unfinished": ({"__0_0.distcp": PLAIN}, "(DCP)"),
    "hyper": ({"_rank0_.safetensors": PLAIN, "_rank1_.safetensors": PLAIN, ".metadata": PICKLE}, "(DCP)"),
    "hyper by rank": (
        {name: content for n in (0, 1) for name, content in {f"_rank{n}_.safetensors": PLAIN,
                                                             f".rank{n}_metadata": PICKLE}.items()}, "(DCP)",
    ),
    "beside a pickle": ({"mine.safetensors": PLAIN, ".metadata": PICKLE}, "(DCP)"),
    "blocks for Hugging Face": (
        {f"shard-0000{n}-model-00001-of-00001.safetensors": OFFSETS for n in (1, 2)}, "Hugging Face",
    ),
}  # fmt: skip
"""Directories that describe themselves; of one of their files, this is said."""


def write(root: Path, files: Files) -> list[Path]:
    """Write files, and return those with tensors."""
    for name, content in files.items():
        if isinstance(content, bytes):
            root.mkdir(exist_ok=True)
            (root / name).write_bytes(content)
        else:
            write_file(root / name, WHOLE, **content)
    return sorted(root / name for name, content in files.items() if not isinstance(content, bytes))


@pytest.mark.parametrize("name", FOREIGN)
def test_a_directory_of_another_format_is_refused_by_every_command(name: str, tmp_path: Path) -> None:
    """And each of its files; one of them by a suffix, or all by a pattern of their names."""
    files, said = FOREIGN[name]
    root, out, rules = tmp_path / "src", tmp_path / "out", tmp_path / "rules.yaml"
    paths = write(root, files)
    rules.write_text("mesh: {dp: 2}\nrules: {a: [dp, null]}\n")
    patterns = {path.name.replace("0", "{rank}", 1) for path in paths if "0" in path.name}
    commands = [
        ["convert", root, out],
        ["convert", root, out, "--to", "ckpt"],
        ["plan", root],
        ["strategy", "make", rules, "--like", root, "-o", tmp_path / "made.ckpt"],
        *(["convert", "--to=mindspore", root, out, "--suffix", path.stem] for path in paths),
        *(["inspect", root, "--rank-pattern", each] for each in patterns if not each.startswith("part")),
    ]
    for path in (root, *paths):
        commands += [["inspect", path], ["convert", "--to=mindspore", path, out], ["verify", path]]
    for command in commands:
        failed(4, "one-of-several", *command, places=(said,))
    assert not out.exists()
    for path in paths:
        with refused(SourceError, "one-of-several"):
            reshard.open({0: path})
        with chdir(root), refused(SourceError, "one-of-several"):
            reshard.open(path.name)


@pytest.mark.parametrize("name", FOREIGN)
def test_it_is_recognised_at_a_url(name: str, tmp_path: Path) -> None:
    files, said = FOREIGN[name]
    url = f"memory://directories/{tmp_path.name}"
    fs, place = url_to_fs(url)
    paths = write(tmp_path, files)
    for path in paths:
        fs.pipe(f"{place}/{path.name}", path.read_bytes())
    for where in (url, f"{url}/{paths[0].name}"):
        with refused(SourceError, "one-of-several", said):
            reshard.open(where)


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_file_of_what_describes_itself_is_refused_by_itself(name: str, tmp_path: Path) -> None:
    files, said = DESCRIBED[name]
    root = tmp_path / "src"
    for path in write(root, files):
        for command in (["inspect", path], ["convert", "--to=mindspore", path, tmp_path / "out"], ["verify", path]):
            failed(4, "one-of-several", *command, places=(said,))
        with refused(SourceError, "one-of-several", path):
            reshard.open({0: path})
        for options in ({"suffix": path.stem}, {"rank_pattern": path.name.replace("0", "{rank}", 1)}):
            with refused(UsageError, "self-described", root):
                reshard.open(root, **options)
    assert call("convert", root, tmp_path / "out", "--to", "ckpt").exit_code == 4


@pytest.mark.parametrize("name", ["dcp", "dcp unfinished", "hyper", "hyper by rank", "beside a pickle"])
def test_metadata_that_are_nothing_are_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path, DESCRIBED[name][0])
    code = "unfinished" if name == "dcp unfinished" else "bad-pickle"
    for command in (["inspect", tmp_path], ["convert", "--to=mindspore", tmp_path, tmp_path / "out"],
                    ["verify", tmp_path]):  # fmt: skip
        failed(4, code, *command, places=("metadata",))


def test_files_of_other_programs_are_no_marks_by_name_alone(tmp_path: Path) -> None:
    write_file(tmp_path / "net.safetensors", FULL)
    (tmp_path / "metadata.json").write_text('{"name": "my model"}')
    (tmp_path / ".metadata").write_text("version: 1")
    assert set(reshard.open(tmp_path)) == set(reshard.open(tmp_path / "net.safetensors")) == set(FULL)


# --- sets and their files ---


@pytest.mark.parametrize("style", [MindSporeSet, HuggingFaceSet])
def test_a_file_of_a_set_is_not_the_set(tmp_path: Path, style: type[MindSporeSet | HuggingFaceSet]) -> None:
    source = reshard.open(write_ranks(tmp_path / "src", FULL, ROWS, also={"step": np.array(7)}), strategy=ROWS)
    plan_with(source, files=style(130), format="safetensors").run(tmp_path / "set")
    files = sorted((tmp_path / "set").glob("*.safetensors"))
    assert len(files) > 1
    for path in files:
        with refused(SourceError, "one-of-several", f"{len(files)} files", ".json"):
            reshard.open(path)
    assert set(reshard.open(tmp_path / "set")) == {*FULL, "step"}
    plan_with(source, files=style(), format="safetensors").run(tmp_path / "whole")
    for path in (tmp_path / "whole").glob("model*.safetensors"):  # the only file of a set is all of it
        assert set(reshard.open(path)) == {*FULL, "step"}


def test_one_of_the_parts_of_a_rank(tmp_path: Path) -> None:
    for part, name in enumerate(SHAPES):
        write_file(tmp_path / f"net_part{part}.ckpt", {name: FULL[name]}, "ckpt")
    write_file(tmp_path / "other_part0.ckpt", FULL, "ckpt")
    assert set(reshard.open(tmp_path, suffix="net")) == set(FULL)
    for part in range(2):
        with refused(SourceError, "one-of-several"):
            reshard.open(tmp_path / f"net_part{part}.ckpt")
        with refused(SourceError, "one-of-several"):
            reshard.open(tmp_path, suffix=f"net_part{part}.ckpt")
    assert set(reshard.open(tmp_path / "other_part0.ckpt")) == set(FULL)
    (tmp_path / "net_part0.ckpt").unlink()
    with refused(SourceError, "one-of-several"):
        reshard.open(tmp_path / "net_part1.ckpt")


def test_ranks_whose_files_are_called_like_parts_are_read(tmp_path: Path) -> None:
    source = reshard.open(write_ranks(tmp_path / "src", FULL, ROWS), strategy=ROWS)
    reshard.plan(source, ROWS, prefix="part").run(tmp_path / "out")
    assert set(reshard.open(tmp_path / "out", strategy=ROWS)) == set(FULL)


# --- one rank of several ---


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    return write_ranks(tmp_path / "src", FULL, ROWS)


@pytest.mark.parametrize("place", ["rank_0/checkpoint_0.safetensors", "rank_3/checkpoint_3.safetensors", "rank_3"])
def test_one_rank_is_not_written_as_the_whole_model(ranks: Path, tmp_path: Path, place: str) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("mesh: {dp: 2}\nrules: {a: [dp, null]}\n")
    write_file(tmp_path / "whole.safetensors", FULL)
    done("strategy", "make", rules, "--like", tmp_path / "whole.safetensors", "-o", tmp_path / "two.ckpt")
    for command in (
        ["convert", ranks / place, tmp_path / "out", "--target-strategy", tmp_path / "two.ckpt"],
        ["convert", "--to=mindspore", ranks / place, tmp_path / "out"],
        ["convert", ranks / place, tmp_path / "out", "--to", "zarr"],
        ["plan", ranks / place],
        ["strategy", "make", rules, "--like", ranks / place, "-o", tmp_path / "made.ckpt"],
    ):
        failed(4, "one-rank", *command, places=(ranks / place, "--layout '*=whole'"))
    assert not (tmp_path / "out").exists()
    with chdir(ranks / "rank_3"), refused(SourceError, "one-rank", "rank 3", "ranks 0-2"):
        reshard.plan(reshard.open("checkpoint_3.safetensors"))


def test_one_rank_can_be_looked_at_and_converted(ranks: Path, tmp_path: Path) -> None:
    path = ranks / "rank_3" / "checkpoint_3.safetensors"
    seen = done("inspect", path)
    assert "rank 3 according to its path" in seen.stderr
    assert "rank 3 according to its path" in json.loads(done("inspect", path, "--json").stdout)["warnings"][0]
    assert reshard.open(path)["a"].shape == (2, 4)
    done("convert", path, tmp_path / "one.ckpt", "--to", "ckpt")
    done("verify", tmp_path / "one.ckpt", "--against", path)
    done("convert", path, tmp_path / "out.ckpt", "--layout", "*=whole")
    assert reshard.open(tmp_path / "out.ckpt")["a"].shape == (2, 4)


def test_a_rank_of_its_own_directory_is_whole(ranks: Path, tmp_path: Path) -> None:
    """As `transform` without a target strategy writes it; other directories next to may be empty."""
    reshard.plan(reshard.open(ranks, strategy=ROWS)).run(tmp_path / "whole")
    (tmp_path / "whole" / "rank_1").mkdir()
    for place in ("", "rank_0", "rank_0/checkpoint_0.safetensors"):
        opened = reshard.open(tmp_path / "whole" / place)
        assert not opened.warnings
        reshard.plan(opened)
    (tmp_path / "whole" / "rank_0").rename(tmp_path / "whole" / "rank_5")
    for place in ("rank_5", "rank_5/checkpoint_0.safetensors"):
        assert "is of rank 5 according to its path" in reshard.open(tmp_path / "whole" / place).warnings[0]


def test_a_strategy_does_not_take_it_for_another_rank(ranks: Path) -> None:
    with refused(SourceError, "one-rank", "checkpoint_3.safetensors", "rank 3", "rank 0"):
        reshard.open(ranks / "rank_3" / "checkpoint_3.safetensors", strategy=ROWS, partial=True)
    assert set(reshard.open(ranks / "rank_0" / "checkpoint_0.safetensors", strategy=ROWS, partial=True)) == set(FULL)


def test_a_deduplicated_file_alone_is_not_the_whole_model(tmp_path: Path) -> None:
    copies = Strategy.of(dict.fromkeys(SHAPES, Layout.of([2], [-1, -1])))
    source = reshard.open(write_ranks(tmp_path / "src", FULL, ROWS), strategy=ROWS)
    reshard.plan(source, copies, remove_redundancy=True).run(tmp_path / "once")
    path = tmp_path / "alone.safetensors"
    (tmp_path / "once" / "rank_1" / "checkpoint_1.safetensors").rename(path)
    some: Any
    for some in (path, {0: path}):
        opened = reshard.open(some)
        assert len(opened) == 1
        with refused(SourceError, "one-rank"):
            reshard.plan(opened)
    assert "is de-duplicated" in done("inspect", path).stderr
    done("convert", path, tmp_path / "alone.ckpt", "--to", "ckpt")
    reshard.plan(reshard.open(path, layout={"*": "whole"}))


def test_rank_directories_in_a_bucket(ranks: Path) -> None:
    url = "memory://lone-rank/src"
    fs, place = url_to_fs(url)
    for name, content in tree(ranks).items():
        fs.pipe(f"{place}/{name}", content)
    with refused(SourceError, "one-rank", "rank 3", "ranks 0-2"):
        reshard.plan(reshard.open(f"{url}/rank_3/checkpoint_3.safetensors"))


def test_one_part_of_a_rank_is_not_written_as_the_model(tmp_path: Path) -> None:
    write_file(tmp_path / "src" / "rank_0" / "net_part1.safetensors", FULL)
    command = "convert", "--to=mindspore", tmp_path / "src", tmp_path / "out"
    failed(4, "one-rank", *command, places=("net_part1.safetensors",))
    assert "is one of several parts" in done("inspect", tmp_path / "src").stderr


SAVED = {
    "pytorch_model-00001-of-00002.bin": "is one of several files that torch.save made of one model",
    "model-00002-of-00002.pt": "is one of several files that torch.save made of one model",
    "mp_rank_01_model_states.pt": "is of a checkpoint of DeepSpeed",
    "mp_rank_00_model_states.pt": "is of a checkpoint of DeepSpeed",
    "zero_pp_rank_0_mp_rank_00_model_states.pt": "is of a checkpoint of DeepSpeed",
    "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": "is of a checkpoint of DeepSpeed",
    "layer_00-model_00-model_states.pt": "is what one rank of several saved of a model",
    "consolidated.01.pth": "is what one rank of several saved of a model",
    "consolidated.00.pth": "consolidated.01.pth next to",
    "mp_rank_00/model_optim_rng.pt": "one of several parts",
    "mp_rank_02_001/model_optim_rng.pt": "one of several parts",
}


@pytest.mark.parametrize("name", SAVED)
def test_one_of_several_files_of_torch_save(tmp_path: Path, name: str) -> None:
    path = write_save(tmp_path / "src" / name, {"w": tensor(FULL["a"])})
    for other in ("mp_rank_01_model_states.pt", "consolidated.01.pth"):
        if name.replace("0", "1")[:8] == other.replace("0", "1")[:8]:
            write_save(path.parent / other, {"w": tensor(FULL["b"])})
    if "/" in name:
        (tmp_path / "src" / "mp_rank_01").mkdir()
    for command in (["convert", "--to=mindspore", path, tmp_path / "out"], ["inspect", path], ["verify", path]):
        failed(4, "one-of-several", *command, places=(SAVED[name],))
    if name.startswith("layer"):
        failed(4, "one-of-several", "convert", "--to=mindspore", path.parent, tmp_path / "out", places=("torch.save",))


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model-00001-of-00001.bin", "consolidated.00.pth", "lora_rank_8.pt",
        "mp_rank_00/model_optim_rng.pt", "epoch_2.pth",
    ],
)  # fmt: skip
def test_a_file_that_has_all_by_its_name(tmp_path: Path, name: str) -> None:
    path = write_save(tmp_path / name, {"w": tensor(FULL["a"])})
    write_save(path.parent / "lora_rank_16.pt", {"w": tensor(FULL["a"])})
    assert set(reshard.open(path)) == {"w"}


def test_files_of_torch_save_next_to_others_do_no_harm(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", FULL)
    write_save(tmp_path / "pytorch_model-00001-of-00002.bin", {"w": tensor(FULL["a"])})
    assert set(reshard.open(tmp_path)) == set(FULL)
    (tmp_path / "model.safetensors").rename(tmp_path.parent / "x.safetensors")
    assert "warning" not in done("convert", "--to=mindspore", tmp_path.parent / "x.safetensors", tmp_path).stderr
