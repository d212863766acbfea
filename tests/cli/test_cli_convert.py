"""`reshard unify` and `convert`: whole tensors in a set, other formats of the same files, and the way back."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import helpers
import numpy as np
import pytest
from checkpoints import tree, write_file
from commands import Case, call, done, names_in, next_command, proposed
from refusals import failed

from reshard.strategy.proto import message_class

if TYPE_CHECKING:
    from pathlib import Path

WEIGHTS = {f"net.layer{i}.{kind}" for i in (1, 2, 3) for kind in ("weight", "bias")}


@pytest.mark.parametrize("style", ["mindspore", "huggingface"])
def test_unify_and_split_again(case: Case, tmp_path: Path, style: str) -> None:
    result = done(
        "unify", case.source, tmp_path / "set", "--source-strategy", case.source_strategy, "--style", style,
        "--max-shard-size", "4kB", "-v",
    )  # fmt: skip
    assert len(list((tmp_path / "set").glob("*.safetensors"))) > 3
    assert names_in(tmp_path / "set") == names_in(case.source)
    assert "15 tensors, 14.9 kB" in done(*proposed(result)).stdout
    done("transform", tmp_path / "set", tmp_path / "a", "--target-strategy", case.target_strategy, "--format", "ckpt")
    done("transform", case.source, tmp_path / "b", *case.strategies)
    for rank in range(4):
        place = f"rank_{rank}/checkpoint_{rank}.ckpt"
        assert helpers.read_rank_file(tmp_path / "a" / place) == helpers.read_rank_file(tmp_path / "b" / place)


def test_unify_only_weights(case: Case, tmp_path: Path) -> None:
    command = ["unify", case.source, tmp_path, "--source-strategy", case.source_strategy, "--weights-only"]
    planned = json.loads(done(*command, "--dry-run", "--json").stdout)
    assert tree(tmp_path) == {}
    done(*command)
    assert sorted(tree(tmp_path)) == ["param_name_map.json", "part0.safetensors"]
    assert {file["path"]: file["nbytes"] for file in planned["files"]} == {
        name: len(content) for name, content in tree(tmp_path).items()
    }
    assert names_in(tmp_path) == WEIGHTS


def test_a_set_is_not_mixed_with_another(case: Case, tmp_path: Path) -> None:
    command = ["unify", case.source, tmp_path, "--source-strategy", case.source_strategy]
    done(*command)
    before = tree(tmp_path)
    failed(6, "other-set", *command, "--style", "huggingface", places=("hyper_param.safetensors", "part0.safetensors"))
    done(*command)
    assert tree(tmp_path) == before
    done(*command, "--overwrite")
    assert tree(tmp_path) == before
    (tmp_path / "part7.safetensors").write_bytes(b"of another program")
    failed(6, "other-set", *command, "--weights-only", "--overwrite", places=("part7.safetensors",))
    assert tree(tmp_path) == {**before, "part7.safetensors": b"of another program"}


def test_convert_there_and_back(case: Case, tmp_path: Path) -> None:
    result = done("convert", case.source, tmp_path / "a", "--to", "safetensors", "-v")
    assert sorted(tree(tmp_path / "a")) == [f"rank_{r}/net.safetensors" for r in range(8)]
    assert "8 ranks (0-7)" in done(*proposed(result)).stdout
    done("convert", tmp_path / "a", tmp_path / "b", "--format", "ckpt")
    for rank in range(8):
        found, expected = (
            helpers.read_rank_file(root / f"rank_{rank}" / "net.ckpt") for root in (tmp_path / "b", case.source)
        )
        assert found == expected


def test_convert_beside_the_source(case: Case, tmp_path: Path) -> None:
    shutil.copytree(case.source, tmp_path / "src")
    result = done("convert", tmp_path / "src", tmp_path / "src", "--format", "safetensors")
    assert next_command(result) == [], "both are there"
    assert "8 safetensors files" in done("inspect", tmp_path / "src", "--suffix", ".safetensors").stdout
    assert call("convert", case.source, case.source, "--format", "ckpt").exit_code == 6  # the sources themselves
    assert len(tree(tmp_path / "src")) == 16


def test_convert_one_file(case: Case, tmp_path: Path) -> None:
    source = case.source / "rank_3" / "net.ckpt"
    result = done("convert", source, tmp_path / "new" / "three.safetensors", "--to", "safetensors", "-v")
    assert list(tree(tmp_path)) == ["new/three.safetensors"]
    assert helpers.read_rank_file(tmp_path / "new" / "three.safetensors") == helpers.read_rank_file(source)
    assert "15 tensors" in done(*proposed(result)).stdout
    failed(
        6, "is-directory", "convert", source, tmp_path / "new", "--to", "safetensors", places=("new/net.safetensors",)
    )


@pytest.mark.parametrize("to", ["ckpt", "safetensors"])
@pytest.mark.parametrize("name", ["out", "out.bin", "out.v2", ".ckpt"])
def test_one_file_has_the_extension_that_programs_expect(case: Case, tmp_path: Path, to: str, name: str) -> None:
    """MindSpore's load_checkpoint refuses any other name."""
    for more in ((), ("--same-ranks",), ("--include", "*")):
        failed(
            2, "wrong-extension", "convert", case.source / "rank_3" / "net.ckpt", tmp_path / name, "--to", to, *more,
            places=(f"{name}.{to}",),
        )  # fmt: skip
    assert not tree(tmp_path)


def test_convert_is_one_run(case: Case, tmp_path: Path) -> None:
    command = ["convert", case.source, tmp_path, "--format", "safetensors"]
    (tmp_path / "rank_5").mkdir()
    (tmp_path / "rank_5" / "net.safetensors").write_bytes(b"mine")
    refused = call(*command)
    assert refused.exit_code == 6
    assert list(tree(tmp_path)) == ["rank_5/net.safetensors"]
    assert "1 target file would be in the way" in done(*command, "--dry-run").stderr
    data = json.loads(done(*command, "--overwrite", "--json").stdout)
    assert data["ranks"] == list(range(8))
    assert data["bytes_read"] == data["bytes_written"] == data["bytes_needed"]
    assert [file["rank"] for file in data["files"]] == list(range(8))


def test_convert_keeps_uneven_ranks_texts_and_marks(tmp_path: Path) -> None:
    """Ranks of a pipeline hold other tensors; replicas may be stored once, which the files say of themselves."""
    one, two = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4, dtype=np.int8)
    write_file(tmp_path / "src" / "rank_0" / "x-1_2.safetensors", {"a": one, "t": "größe"}, remove_redundancy="True")
    write_file(tmp_path / "src" / "rank_1" / "x-1_2.safetensors", {"a": one[:1], "b": two}, remove_redundancy="True")
    done("convert", tmp_path / "src", tmp_path / "a", "--format", "ckpt")
    done("convert", tmp_path / "src", tmp_path / "b", "--format", "safetensors")
    for rank in range(2):
        place = f"rank_{rank}/x-1_2.safetensors"
        assert (tmp_path / "b" / place).read_bytes() == (tmp_path / "src" / place).read_bytes()
    zero, first = (helpers.read_rank_file(tmp_path / "a" / f"rank_{r}" / "x-1_2.ckpt") for r in range(2))
    assert zero["a"] == ("float32", (2, 3), one.tobytes())
    assert zero["t"][2].decode("utf-32-le") == "größe"
    assert first == {"a": ("float32", (1, 3), one[:1].tobytes()), "b": ("int8", (4,), two.tobytes())}


def test_convert_takes_other_names_and_refuses_sets(case: Case, tmp_path: Path) -> None:
    write_file(tmp_path / "src" / "node0" / "a.ckpt", {"w": np.ones(2, np.float32)}, "ckpt")
    write_file(tmp_path / "src" / "node0" / "b.ckpt", {"w": np.ones(2, np.float32)}, "ckpt")
    result = done(
        "convert", tmp_path / "src", tmp_path / "dst", "--format", "safetensors", "--rank-pattern", "node{rank}/*",
        "--suffix", "b", "--same-ranks",
    )  # fmt: skip
    assert list(tree(tmp_path / "dst")) == ["node0/b.safetensors"]
    assert next_command(result) == [], "the files are not where ranks usually are"
    assert "1 tensor" in done("inspect", tmp_path / "dst", "--rank-pattern", "node{rank}/*").stdout
    done("unify", case.source, tmp_path / "set", "--source-strategy", case.source_strategy)
    done("convert", tmp_path / "set", tmp_path / "x", "--to", "ckpt")
    assert list(tree(tmp_path / "x")) == ["rank_0/checkpoint_0.ckpt"]
    failed(
        2, "not-convertible", "convert", tmp_path / "set", tmp_path / "y", "--to", "ckpt", "--same-ranks",
        places=(tmp_path / "set", "--same-ranks"),
    )  # fmt: skip


def test_one_converted_file_among_others_is_verified(case: Case, tmp_path: Path) -> None:
    for rank in (2, 5):
        target = tmp_path / f"{rank}.safetensors"
        result = done("convert", case.source / f"rank_{rank}" / "net.ckpt", target, "--format", "safetensors")
        source = case.source / f"rank_{rank}" / "net.ckpt"
        assert next_command(result) == ["verify", str(target), "--against", str(source)]
        assert done(*next_command(result)).stdout == f"verified: {target} = {source}; every bit of 15 tensors\n"


def test_what_a_conversion_dropped_is_not_missed(tmp_path: Path) -> None:
    table: Any = message_class("Checkpoint")()
    table.value.add(tag="a[0]").maptensor.tensor.add(tensor_type="Int32", tensor_content=b"keys")
    for rank in range(2):
        path = tmp_path / "src" / f"rank_{rank}" / "a.ckpt"
        write_file(path, {"b": np.ones(2, np.float64)}, "ckpt")
        path.write_bytes(table.SerializeToString() + path.read_bytes())
    done("convert", tmp_path / "src", tmp_path / "dst", "--format", "safetensors", "--drop", "a[[]0]")
    assert set(helpers.read_rank_file(tmp_path / "dst" / "rank_1" / "a.safetensors")) == {"b"}
    assert done("verify", tmp_path / "dst").exit_code == 0
