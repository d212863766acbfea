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
from refusals import check, failed, refused
from saves_files import tensor, write_save

import reshard
from reshard import Layout, Strategy
from reshard.errors import SourceError, UsageError
from reshard.formats.sets.options import HuggingFaceSet, MindSporeSet

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHAPES = {"a": (8, 4), "b": (4, 8)}
FULL = numbers(SHAPES)
ROWS = Strategy.of(dict.fromkeys(SHAPES, Layout.of([4], [0, -1])))
WHOLE = {"a": FULL["a"][:4], "b": FULL["b"]}
"""A rank's block and a whole tensor: from inside they look alike."""

METADATA = json.dumps({"state_dict_metadata": {"a": {"properties": {"dtype": "Float32"}}}, "storage_data": {}})
PICKLE = b"\x80\x04\x95\x0f\x00\x00\x00\x00\x00\x00\x00."
OFFSETS = json.dumps({"a": {"saved_offsets": [4, 0]}})


def checkpoint2(root: Path) -> None:
    for rank in range(2):
        for kind in ("model", "opt"):
            write_file(root / f"tiny-{kind}-{rank:07d}-0000002.safetensors", WHOLE)
    (root / "metadata.json").write_text(METADATA)
    (root / "common.json").write_text("{}")


def checkpoint2_of_one(root: Path) -> None:
    for kind in ("model", "opt"):
        write_file(root / f"{kind}-0000000-0000001.safetensors", WHOLE)


def checkpoint2_under_other_names(root: Path) -> None:
    """Its own reader takes file names from the metadata, whatever they are."""
    write_file(root / "mine.safetensors", WHOLE)
    (root / "metadata.json").write_text(METADATA)


def torch_dcp(root: Path) -> None:
    """With `serialization_format=SAFETENSORS` what `.distcp` names are safetensors files."""
    for rank in range(2):
        write_file(root / f"__{rank}_0.distcp", WHOLE, DCP_SHARDING_INFO=OFFSETS)
    (root / ".metadata").write_bytes(PICKLE)


def torch_dcp_unfinished(root: Path) -> None:
    write_file(root / "__0_0.distcp", WHOLE)


def hyper_dcp(root: Path) -> None:
    for rank in range(2):
        write_file(root / f"_rank{rank}_.safetensors", WHOLE)
    (root / ".metadata").write_bytes(PICKLE)


def hyper_dcp_by_rank(root: Path) -> None:
    for rank in range(2):
        write_file(root / f"_rank{rank}_.safetensors", WHOLE)
        (root / f".rank{rank}_metadata").write_bytes(PICKLE)


def beside_a_pickle(root: Path) -> None:
    write_file(root / "mine.safetensors", WHOLE)
    (root / ".metadata").write_bytes(PICKLE)


def blocks_for_hugging_face(root: Path) -> None:
    for rank in range(2):
        path = root / f"shard-0000{rank + 1}-model-00001-of-00001.safetensors"
        write_file(path, WHOLE, DCP_SHARDING_INFO=OFFSETS)


def blocks_that_say_so(root: Path) -> None:
    write_file(root / "mine.safetensors", WHOLE, DCP_SHARDING_INFO=OFFSETS)


def shards_without_their_index(root: Path) -> None:
    for number in range(2):
        write_file(root / f"model-0000{number + 1}-of-00002.safetensors", WHOLE)


def a_shard_without_the_others(root: Path) -> None:
    write_file(root / "diffusion_model-00002-of-00011.safetensors", WHOLE)


def parts_without_their_index(root: Path) -> None:
    for number in range(2):
        write_file(root / f"part{number}.safetensors", WHOLE)


def a_part_without_the_others(root: Path) -> None:
    write_file(root / "part0.safetensors", WHOLE)


def hyper_parameters_alone(root: Path) -> None:
    write_file(root / "hyper_param.safetensors", WHOLE)


DIRECTORIES = [
    blocks_that_say_so, shards_without_their_index, a_shard_without_the_others,
    parts_without_their_index, a_part_without_the_others, hyper_parameters_alone,
]  # fmt: skip

DESCRIBED = {
    checkpoint2: "Checkpoint 2.0",
    checkpoint2_of_one: "Checkpoint 2.0",
    checkpoint2_under_other_names: "Checkpoint 2.0",
    torch_dcp: "(DCP)",
    torch_dcp_unfinished: "(DCP)",
    hyper_dcp: "(DCP)",
    hyper_dcp_by_rank: "(DCP)",
    beside_a_pickle: "(DCP)",
    blocks_for_hugging_face: "Hugging Face",
}
"""These are read with their directories, by rooms of `readers`."""

SAID = {
    "blocks": "DCP_SHARDING_INFO",
    "shards": "model-0000",
    "a_shard": "model-0000",
    "parts": "/part",
    "a_part": "/part",
    "hyper_parameters": "hyper_param.safetensors",
}


def said_of(make: Callable[[Path], None]) -> str:
    return next(said for begin, said in SAID.items() if make.__name__.startswith(begin))


def weights_in(root: Path) -> list[Path]:
    return [path for path in sorted(root.iterdir()) if path.suffix in {".safetensors", ".distcp"}]


@pytest.fixture(params=DIRECTORIES, ids=lambda make: make.__name__)
def foreign(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A directory of another format, and what is to be said of it."""
    root = tmp_path / "src"
    root.mkdir()
    request.param(root)
    return root, said_of(request.param)


def test_a_directory_of_another_format_is_refused_by_every_command(foreign: tuple[Path, str], tmp_path: Path) -> None:
    root, said = foreign
    rules = tmp_path / "rules.yaml"
    rules.write_text("mesh: {dp: 2}\nrules: {a: [dp, null]}\n")
    out = tmp_path / "out"
    for command in (
        ["inspect", root],
        ["convert", root, out],
        ["convert", "--to=mindspore", root, out],
        ["convert", root, out, "--to", "ckpt"],
        ["plan", root],
        ["verify", root],
        ["strategy", "make", rules, "--like", root, "-o", tmp_path / "made.ckpt"],
    ):
        result = failed(4, "one-of-several", *command, places=(said,))
        assert "--suffix" not in result.stderr
    assert not out.exists()


def test_no_option_makes_rank_files_of_it(foreign: tuple[Path, str], tmp_path: Path) -> None:
    """One file of each, as the error proposed; and all, by a pattern of their names."""
    root, said = foreign
    files = weights_in(root)
    for path in files:
        failed(
            4,
            "one-of-several",
            "convert",
            "--to=mindspore",
            root,
            tmp_path / "out",
            "--suffix",
            path.stem,
            places=(said,),
        )
    for rank_pattern in {path.name.replace("0", "{rank}", 1) for path in files if "0" in path.name}:
        if "{rank}" in rank_pattern and not rank_pattern.startswith("part"):  # `--prefix part` makes such
            failed(4, "one-of-several", "inspect", root, "--rank-pattern", rank_pattern, places=(said,))


def test_one_of_its_files_is_refused_by_itself(foreign: tuple[Path, str], tmp_path: Path) -> None:
    root, said = foreign
    for path in weights_in(root):
        for command in (["inspect", path], ["convert", "--to=mindspore", path, tmp_path / "out"], ["verify", path],
                        ["convert", path, tmp_path / "out.ckpt", "--to", "ckpt"]):  # fmt: skip
            failed(4, "one-of-several", *command, places=(said,))
        with refused(SourceError, "one-of-several"):
            reshard.open({0: path})
        with chdir(root), refused(SourceError, "one-of-several"):
            reshard.open(path.name)


def test_it_is_recognised_at_a_url(foreign: tuple[Path, str]) -> None:
    root, said = foreign
    url = f"memory://directories/{root.parent.name}"
    fs, place = url_to_fs(url)
    for path in root.iterdir():
        fs.pipe(f"{place}/{path.name}", path.read_bytes())
    for where in (url, f"{url}/{weights_in(root)[0].name}"):
        with refused(SourceError, "one-of-several", said):
            reshard.open(where)


@pytest.mark.parametrize("make", DESCRIBED, ids=lambda make: make.__name__)
def test_a_file_of_what_describes_itself_is_refused_by_itself(make: Callable[[Path], None], tmp_path: Path) -> None:
    root = tmp_path / "src"
    root.mkdir()
    make(root)
    for path in weights_in(root):
        for command in (["inspect", path], ["convert", "--to=mindspore", path, tmp_path / "out"], ["verify", path]):
            failed(4, "one-of-several", *command, places=(DESCRIBED[make],))
        with pytest.raises(SourceError) as caught:
            reshard.open({0: path})
        check(caught.value, "one-of-several", path)
        for options in ({"suffix": path.stem}, {"rank_pattern": path.name.replace("0", "{rank}", 1)}):
            with refused(UsageError, "self-described", root):
                reshard.open(root, **options)
    result = call("convert", root, tmp_path / "out", "--to", "ckpt")
    assert result.exit_code == 4


@pytest.mark.parametrize("make", [torch_dcp, torch_dcp_unfinished, hyper_dcp, hyper_dcp_by_rank, beside_a_pickle])
def test_metadata_that_are_nothing_are_refused(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path)
    for command in (
        ["inspect", tmp_path],
        ["convert", "--to=mindspore", tmp_path, tmp_path / "out"],
        ["verify", tmp_path],
    ):
        failed(4, "bad-pickle" if list(tmp_path.glob("**/*metadata")) else "unfinished", *command, places=("metadata",))


def test_a_tracker_without_iterations(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpoint_iteration.txt").write_text("4")
    with refused(SourceError, "one-of-several"):
        reshard.open(tmp_path)
    write_file(tmp_path / "exported.safetensors", FULL)
    assert set(reshard.open(tmp_path)) == set(FULL)


def test_blocks_that_an_index_names_are_refused(tmp_path: Path) -> None:
    blocks_that_say_so(tmp_path)
    index = {"weight_map": dict.fromkeys(WHOLE, "mine.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with refused(SourceError, "one-of-several"):
        reshard.open(tmp_path)


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


@pytest.mark.parametrize("style", [MindSporeSet, HuggingFaceSet])
def test_the_only_file_of_a_set_is_all_of_it(tmp_path: Path, style: type[MindSporeSet | HuggingFaceSet]) -> None:
    source = reshard.open(write_ranks(tmp_path / "src", FULL, ROWS), strategy=ROWS)
    plan_with(source, files=style(), format="safetensors").run(tmp_path / "set")
    (path,) = (tmp_path / "set").glob("*.safetensors")
    assert set(reshard.open(path)) == set(FULL)


def test_what_an_index_beside_does_not_name_is_its_own(tmp_path: Path) -> None:
    shards_without_their_index(tmp_path)
    index = {"weight_map": {"x": "model-00001-of-00002.safetensors", "y": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    write_file(tmp_path / "consolidated.safetensors", FULL)
    write_file(tmp_path / "one-00001-of-00001.safetensors", FULL)
    for name in ("consolidated", "one-00001-of-00001"):
        assert set(reshard.open(tmp_path / f"{name}.safetensors")) == set(FULL)


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
    with (
        chdir(ranks / "rank_3"),
        refused(SourceError, "one-rank", "rank 3", "ranks 0-2"),
    ):
        reshard.plan(reshard.open("checkpoint_3.safetensors"))


def test_one_rank_can_be_looked_at_and_converted(ranks: Path, tmp_path: Path) -> None:
    path = ranks / "rank_3" / "checkpoint_3.safetensors"
    seen = done("inspect", path)
    assert "rank 3 according to its path" in seen.stderr
    assert "rank 3 according to its path" in json.loads(done("inspect", path, "--json").stdout)["warnings"][0]
    assert reshard.open(path)["a"].shape == (2, 4)
    done("convert", path, tmp_path / "one.ckpt", "--to", "ckpt")
    done("verify", tmp_path / "one.ckpt", "--against", path)


def test_one_rank_whose_tensors_are_said_to_be_whole(ranks: Path, tmp_path: Path) -> None:
    path = ranks / "rank_3" / "checkpoint_3.safetensors"
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
    failed(
        4,
        "one-rank",
        "convert",
        "--to=mindspore",
        tmp_path / "src",
        tmp_path / "out",
        places=("net_part1.safetensors",),
    )
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


def test_a_link_to_one_of_several_is_one_of_several(tmp_path: Path) -> None:
    shard = write_file(tmp_path / "set" / "model-00001-of-00009.safetensors", FULL)
    link = tmp_path / "link.safetensors"
    link.symlink_to(shard)
    for opened in (link, {0: link}):
        with refused(SourceError, "one-of-several"):
            reshard.open(opened)


@pytest.mark.parametrize("beside", [True, False], ids=["beside", "gone"])
def test_an_index_that_does_not_name_every_shard_is_refused(tmp_path: Path, beside: bool) -> None:
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    for number, name in enumerate(names if beside else names[:2]):
        write_file(tmp_path / name, {f"w{number}": FULL["a"]})
    content = {"metadata": {}, "weight_map": {"w0": names[0], "w1": names[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    with refused(SourceError, "missing-shards", "-of-00003", "named 2", "expected 3"):
        reshard.open(tmp_path)
