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

import reshard
from reshard.strategy.proto import message_class

if TYPE_CHECKING:
    from pathlib import Path


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


# --- `reshard convert`: which format is written, what is refused, and that the verbs of old are the same  ---


@pytest.fixture
def dst(case: Case, tmp_path: Path) -> Path:
    """What reshard wrote, with a ledger: 4 ranks."""
    done("convert", case.source, tmp_path / "dst", *case.strategies)
    return tmp_path / "dst"


SETS = {
    "hf": ("model-00001-of-00001.safetensors", "model.safetensors.index.json"),
    "mindspore": ("hyper_param.safetensors", "param_name_map.json", "part0.safetensors"),
    "ckpt": ("rank_0/checkpoint_0.ckpt",),
    "safetensors": ("rank_0/checkpoint_0.safetensors",),
    "dcp": (".metadata", "__0_0.distcp"),
}


@pytest.mark.parametrize("to", SETS)
def test_without_a_target_strategy_it_has_whole_tensors(dst: Path, tmp_path: Path, to: str) -> None:
    result = done("convert", dst, tmp_path / "out", "--to", to)
    assert tuple(sorted(path for path in tree(tmp_path / "out"))) == SETS[to]
    assert "format: " not in result.stderr, "it was given"
    assert reshard.open(tmp_path / "out").nbytes == reshard.open(dst).nbytes
    assert done("verify", tmp_path / "out").exit_code == 0


@pytest.mark.parametrize(
    ("verb", "to", "old"),
    [
        ("transform", ("--to", "safetensors"), ("--format", "safetensors")),
        ("transform", ("--to", "dcp"), ("--format", "dcp")),
        ("transform", ("--to", "checkpoint2", "--target-step", "3"), ("--style", "checkpoint2", "--target-step", "3")),
        ("unify", ("--to", "mindspore"), ()),
        ("unify", ("--to", "hf"), ("--style", "huggingface")),
        ("unify", ("--to", "hf", "--max-shard-size", "4kB"), ("--style", "hf", "--max-shard-size", "4kB")),
        ("unify", ("--to", "zarr", "--chunk-size", "1kB"), ("--format", "zarr", "--chunk-size", "1kB")),
    ],
)
def test_the_verbs_of_old_are_the_same(
    case: Case, tmp_path: Path, verb: str, to: tuple[str, ...], old: tuple[str, ...]
) -> None:
    strategies = case.strategies if verb == "transform" else case.strategies[:2]
    done("convert", case.source, tmp_path / "a", *strategies, *to)
    done(verb, case.source, tmp_path / "b", *strategies, *old)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_the_format_is_that_of_the_name_of_the_target(dst: Path, tmp_path: Path) -> None:
    for name, format in (("x.zarr", "zarr"), ("x.safetensors", "safetensors"), ("x.ckpt", "ckpt")):
        result = done("convert", dst, tmp_path / name)
        assert result.stderr.startswith(f"format: {format}, as {name}")
        assert reshard.open(tmp_path / name).format == format
        assert reshard.open(tmp_path / name).nbytes == reshard.open(dst).nbytes
    assert (tmp_path / "x.ckpt").is_file()
    assert done("verify", tmp_path / "x.ckpt", "--against", dst).exit_code == 0


def test_else_the_format_is_that_of_the_source(case: Case, dst: Path, tmp_path: Path) -> None:
    cut = ["--target-strategy", case.target_strategy]
    for to in ("safetensors", "hf", "mindspore", "zarr", "dcp", "checkpoint2"):
        step = ["--target-step", "7"] if to == "checkpoint2" else []
        done("convert", dst, tmp_path / to, "--to", to, *step)
        again = done("convert", tmp_path / to, tmp_path / f"again_{to}", *step)
        assert again.stderr.splitlines()[0] == f"format: {to}, as the source"
        if to != "zarr":  # a finished store is replaced, or refused
            same = done("convert", tmp_path / to, tmp_path / f"again_{to}", "--to", to, *step)
            assert same.stdout.startswith("nothing is left to do")
        ranks = done("convert", tmp_path / to, tmp_path / f"cut_{to}", *cut, *step)
        kept = to not in {"hf", "mindspore", "zarr"}
        assert ranks.stderr.startswith(f"format: {to if kept else 'safetensors'}, as ")


def test_ranks_of_unknown_layout_keep_what_they_have(case: Case, tmp_path: Path) -> None:
    result = done("convert", case.source, tmp_path / "a", "--to", "safetensors")
    assert f"nothing says how {case.source} was sharded" in result.stderr
    assert sorted(tree(tmp_path / "a")) == [f"rank_{rank}/net.safetensors" for rank in range(8)]
    asked = done("convert", case.source, tmp_path / "b", "--to", "safetensors", "--same-ranks")
    assert "nothing says" not in asked.stderr
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    failed(4, "no-layout", "convert", case.source, tmp_path / "c")  # no --to
    failed(4, "no-layout", "convert", case.source, tmp_path / "c", "--to", "hf")
    failed(4, "no-layout", "transform", case.source, tmp_path / "c", "--format", "safetensors")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--cast", "float32=bfloat16"],
        ["--weights-only"],
        ["--include", "net.*"],
        ["--memory", "1GB"],
        ["--prefix", "x"],
    ],
)
def test_what_needs_the_layout_is_refused_without(case: Case, tmp_path: Path, options: list[str]) -> None:
    for more in ([], ["--same-ranks"]):
        words = ["convert", case.source, tmp_path / "a", "--to", "safetensors", *options, *more]
        failed(2, "needs-strategy", *words, places=(options[0],))
    assert not (tmp_path / "a").exists()


def test_what_contradicts_is_refused(case: Case, dst: Path, tmp_path: Path) -> None:
    for code, *words in (
        ["conflicting-options", "--to", "hf", "--format", "ckpt"],
        ["conflicting-options", "--to", "hf", "--style", "mindspore"],
        ["option-of-another-format", "--format", "ckpt", "--style", "mindspore"],
        ["needs-format", "--same-ranks"],
        ["conflicting-options", "--to", "ckpt", "--same-ranks", "--via-zarr", "store"],
    ):
        failed(2, code, "convert", dst, tmp_path / "out", *words)
    cut = ["--target-strategy", case.target_strategy]
    failed(2, "one-file", "convert", dst, tmp_path / "x.ckpt", *cut, places=("--target-strategy", "x.ckpt"))
    failed(2, "wrong-extension", "convert", dst, tmp_path / "x.ckpt", "--to", "safetensors", places=("x.ckpt",))
    assert [path.name for path in tmp_path.iterdir()] == ["dst"]


def test_one_file_may_be_next_to_its_source(dst: Path, tmp_path: Path) -> None:
    done("convert", dst, tmp_path / "one.safetensors")
    assert names_in(tmp_path / "dst") == set(helpers.read_rank_file(tmp_path / "one.safetensors"))
    shutil.copy(tmp_path / "one.safetensors", tmp_path / "two.safetensors")
    done("convert", tmp_path / "two.safetensors", tmp_path / "two.ckpt", "--weights-only")
    assert "global_step" not in helpers.read_rank_file(tmp_path / "two.ckpt")


@pytest.mark.parametrize("to", ["hf", "zarr", "x.safetensors"])
def test_a_plan_is_of_every_format(dst: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    monkeypatch.chdir(tmp_path)
    target = "sub/x.safetensors" if "." in to else f"sub/{to}"
    words = [] if "." in to else ["--to", to]
    done("plan", "dst", target, *words, "-o", "plan.json")
    done("run", "plan.json")
    done("convert", "dst", f"direct/{to}", *words)
    written, direct = (
        {path: content for path, content in tree(tmp_path / place).items() if ".reshard/" not in path}
        for place in ("sub", "direct")
    )
    assert written == direct


def test_errors_are_json_too(case: Case, dst: Path, tmp_path: Path) -> None:
    """One object each, with the version of its schema, of usage, of faults, and of differences."""
    broken = tmp_path / "broken"
    shutil.copytree(dst, broken)
    path = broken / "rank_1" / "checkpoint_1.ckpt"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for words, exit_code, code in (
        (["convert", dst, "x", "--to", "hf", "--ranks", "0"], 2, "option-of-another-format"),
        (["convert", dst], 2, "usage"),
        (["convert", dst, "x", "--nothing"], 2, "usage"),
        (["inspect", dst, "--csv"], 2, "conflicting-options"),
        (["strategy", "diff", case.source_strategy, case.target_strategy], 3, "other-strategy"),
        (["verify", broken, "--against", dst], 3, "different"),
    ):
        result = call(*words[:1], *words[1:], "--json")
        assert result.exit_code == exit_code, result.output
        data = json.loads(result.stdout)
        assert data["schema"] == 1
        assert (data["error"]["code"], data["error"]["exit_code"]) == (code, exit_code)
        assert set(data["error"]) == {"code", "exit_code", "message", "facts", "hint"}
    assert json.loads(done("verify", dst, "--json").stdout)["schema"] == 1


@pytest.mark.parametrize("command", ["convert", "plan", "run", "verify"])
def test_the_schema_and_errors_are_documented(command: str) -> None:
    text = " ".join(call(command, "--help-all").stdout.split())
    assert "schema (of the meaning of these keys, 1)" in text
    assert "error" in text[text.index("The object of --json") :]
