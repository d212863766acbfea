"""`reshard strategy show`, `merge`, `make` and `diff`: on the tutorial's files, by MindSpore."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import assert_equal, write_file
from commands import Case, call, done
from refusals import failed, refused

import reshard
from reshard.core.layout.layout import Layout
from reshard.errors import UsageError
from reshard.strategy.diff import diff
from reshard.strategy.rules import layouts_from_file
from reshard.strategy.strategy import Strategy

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

SHAPES = {"w": (8, 8), "b": (8,), "moments.w": (8, 8)}
RULES = """
mesh: {dp: 2, mp: 2}
rules:
  "*layer1.weight": [mp]
  "*layer3.weight": [null, mp]
optimizer_parallel: true
parallel_optimizer_threshold: 0
"""
OPERATORS = """
devices: 4
operators:
  "*layer1.weight": {matmul: [[2, 2], [2, 1]]}
  "*layer3.weight": {matmul: [[2, 1], [1, 2]], transpose_b: false}
optimizer_parallel: true
parallel_optimizer_threshold: 0
"""


@pytest.fixture
def real(mindspore_data: Path) -> Path:
    return mindspore_data / "real"


def source(real: Path) -> list[str | Path]:
    return [real / "tut_src8" / "ckpt", "--source-strategy", real / "tut_src8" / "strategy_0.ckpt"]


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# show and merge


def test_strategy_show_of_what_is_none(case: Case, tmp_path: Path) -> None:
    write_file(tmp_path / "x.safetensors", {"w": np.ones(2, np.float32)})
    for path in (case.source / "rank_0" / "net.ckpt", tmp_path / "x.safetensors"):
        failed(4, "not-a-strategy", "strategy", "show", path, places=(path, f"reshard inspect {path}"))
    failed(4, "not-a-file", "strategy", "show", "/dev/zero", places=("/dev/zero",))
    with (tmp_path / "huge.ckpt").open("wb") as file:
        file.truncate((1 << 30) + 1)
    failed(4, "too-large", "strategy", "show", tmp_path / "huge.ckpt", places=("huge.ckpt", "67108864"))


NO_STRATEGY = {
    "flow": '{mesh: {mp: 2}, rules: {"a.weight": [mp, null]}}',
    "json": '{"mesh": {"mp": 2}, "rules": {"a.weight": ["mp", null]}}',
    "block": "# a comment\nmesh: {mp: 2}\nrules:\n  a.weight: [mp, null]\n",
    "operators": "devices: 2\noperators:\n  a: {relu: [[2]]}\n",
    "names": "reshard-rules: 1\nsides: [a, b]\nrules: []\n",
}


@pytest.mark.parametrize(
    ("name", "suffix"), [*((name, ".yaml") for name in NO_STRATEGY), ("flow", ".json"), ("block", ".txt")]
)
def test_rules_are_not_a_strategy_of_a_source(case: Case, tmp_path: Path, name: str, suffix: str) -> None:
    """The hint names an option that the command takes, and no command that needs what is missing."""
    path = tmp_path / f"rules{suffix}"
    path.write_text(NO_STRATEGY[name])
    option = "--rules" if name == "names" else "--layout"
    words = ("convert", case.source, tmp_path / "out", "--to", "hf", "--source-strategy", path)
    failed(4, "not-a-strategy", *words, places=(path, option))


def test_strategy_show(case: Case) -> None:
    result = done("strategy", "show", case.target_strategy)
    assert "12 tensors over 4 ranks (0-3): 1 stage of 4 devices" in result.stdout
    data = json.loads(done("strategy", "show", case.target_strategy, "--json").stdout)
    assert data["ranks"] == [0, 1, 2, 3]
    assert {tensor["layout"]["opt_weight_shard_size"] for tensor in data["tensors"]} == {-1}


def test_strategy_merge(mindspore_data: Path, tmp_path: Path) -> None:
    parts = mindspore_data / "strategies" / "pipe_tut8_ckpt"
    output = tmp_path / "merged.ckpt"
    result = done("strategy", "merge", parts, "-o", output)
    assert result.stdout.startswith(f"wrote {output}: ")
    assert "8 ranks in 2 stages" in result.stdout
    reference = reshard.read_strategy(mindspore_data / "merged" / "pipe_tut8.ckpt")
    assert reshard.read_strategy(output).tensors == reference.tensors
    failed(6, "already-exists", "strategy", "merge", parts, "-o", output, places=(output, "--overwrite"))
    done("strategy", "merge", parts, "-o", output, "--overwrite")


def test_a_merged_file_may_not_lie_among_its_parts(mindspore_data: Path, tmp_path: Path) -> None:
    shutil.copytree(mindspore_data / "strategies" / "pipe_tut8_ckpt", tmp_path / "parts")
    refused = call("strategy", "merge", tmp_path / "parts", "-o", tmp_path / "parts" / "merged.ckpt")
    assert refused.exit_code == 2
    assert not (tmp_path / "parts" / "merged.ckpt").exists()


# make


@pytest.mark.parametrize("text", [RULES, OPERATORS], ids=["rules", "operators"])
@pytest.mark.parametrize("ending", [".ckpt", ".json"])
def test_make_writes_what_mindspore_compiles(real: Path, tmp_path: Path, text: str, ending: str) -> None:
    """The tutorial's target: 4 cards, another MatMul strategy, optimizer parallel. And a transform takes it."""
    rules, output = written(tmp_path / "rules.yaml", text), tmp_path / f"dst{ending}"
    result = done("strategy", "make", rules, "--like", *source(real), "-o", output)
    assert result.stdout == f"wrote {output}: 12 tensors over 4 ranks in 1 stage\n"
    compiled = real / "tut_dst4_opt" / "strategy_0.ckpt"
    compared = done("strategy", "diff", output, compiled)
    assert compared.stdout.splitlines()[-1] == "every rank holds the same blocks of 12 tensors"
    if text is OPERATORS:
        assert len(compared.stdout.splitlines()) == 1  # field for field
    if ending == ".json":
        layouts = json.loads(output.read_text())["parallel_layout_item"]
        assert layouts["net.layer1.weight"]["tensor_shape"] == [16, 32]
    done("convert", *source(real), tmp_path / "out", "--target-strategy", output)


def test_make_takes_drop_without_rules_and_predict_with_them(real: Path, tmp_path: Path) -> None:
    rules, output = written(tmp_path / "r.yaml", RULES), tmp_path / "dst.ckpt"
    like = ("--like", *source(real), "-o", output)
    failed(2, "no-effect", "strategy", "make", rules, *like, "--drop", "x", places=("--drop",))
    failed(2, "no-effect", "strategy", "make", *like, "--predict", "--drop", "x", places=("--predict",))
    assert not output.exists()


def test_make_replaces_nothing_unasked(real: Path, tmp_path: Path) -> None:
    rules, output = written(tmp_path / "r.yaml", RULES), written(tmp_path / "dst.ckpt", "mine")
    failed(6, "already-exists", "strategy", "make", rules, "--like", *source(real), "-o", output, places=(output,))
    assert output.read_text() == "mine"
    done("strategy", "make", rules, "--like", *source(real), "-o", output, "--overwrite")


@pytest.mark.parametrize(
    ("text", "codes", "places"),
    [
        ("- mesh", ["wrong-type"], ["YAML list"]),
        ("mesh: {dp: 2", ["not-yaml"], ["line 1"]),
        ("mesh: !!python/object:os.system {}", ["not-yaml"], ["line 1", "python/object:os.system"]),
        ("mesh: {dp: 2}", ["missing-key"], ["$.rules", "mesh, rules, or devices, operators"]),
        ("devices: 4", ["missing-key"], ["$.operators"]),
        ("mesh: {dp: 4}\nrules: {}\ndevices: 4\nopimizer: 1", ["unknown-key"], ["2 faults", "$.devices", "$.opimizer"]),
        (
            "mesh: {dp: 2, dp: 3}\nrules:\n  w: [dp]\n  w: []\n",
            ["duplicate-key"],
            ["2 faults", "line 1, key 'dp'", "line 4, key 'w'"],
        ),
        (
            "mesh: {a: 2}\nrules: {w: {mesh: {b: 4}, layout: [a]}}",
            ["devices-differ", "unknown-axis"],
            ["$.rules['w'].mesh has 4", "$.rules['w'].layout[0]", "'a'"],
        ),
        ("devices: 4\noperators: {w: [1]}", ["unknown-operator"], ["$.operators['w'] is [1]", "matmul, batch_matmul"]),
        (
            "devices: 4\noperators: {w: {matmul: [[1, 1], [1, 2]], transpose: 1}}",
            ["wrong-type"],
            ["'transpose': 1", "transpose_b"],
        ),
        (
            "devices: 4\noperators: {w: {matmul: [[1, 1], [2, 2]]}}",
            ["inputs-disagree"],
            ["$.operators['w']", " k ", " 1 and 2 "],
        ),
        ("\x00", ["not-yaml"], ["#x0000"]),
        (
            "mesh: {a: 2}\nrules: {w: {mesh: {b: x}, layout: 3}}",
            ["out-of-range", "devices-differ", "wrong-type"],
            ["$.rules['w'].mesh.b is 'x'", "$.rules['w'].layout is 3"],
        ),
        ("mesh: {a: 2}\nrules: {w: {mesh: {b: 2}}}", ["wrong-type"], ["$.rules['w'] is {'mesh': {'b': 2}}"]),
        ("devices: 4\noperators: [1]", ["wrong-type"], ["$.operators is [1]"]),
    ],
)
def test_rules_files_that_are_none(tmp_path: Path, text: str, codes: list[str], places: list[str]) -> None:
    rules = written(tmp_path / "rules.yaml", text)
    with refused(UsageError, codes[0], rules, *places) as caught:
        layouts_from_file(rules, SHAPES)
    assert (caught.value.exit_code, caught.value.codes) == (2, tuple(codes))


def test_a_rule_may_leave_a_tensor_out(tmp_path: Path) -> None:
    rules = written(tmp_path / "rules.yaml", "mesh: {dp: 2}\nrules: {b: null}\n")
    assert list(layouts_from_file(rules, SHAPES)[0]) == ["w", "moments.w"]
    operators = written(tmp_path / "operators.yaml", "devices: 2\noperators: {b: null}\n")
    assert list(layouts_from_file(operators, SHAPES, predict=True)[0]) == ["w"]


def test_a_rule_with_a_mesh_of_its_own(tmp_path: Path) -> None:
    text = "mesh: {dp: 2, mp: 4}\nrules: {w: [mp], b: {mesh: {edp: 4, ep: 2}, layout: [ep]}}\n"
    layouts, shapes = layouts_from_file(written(tmp_path / "rules.yaml", text), SHAPES)
    made = Strategy.of(layouts, shapes=shapes)
    assert [str(made.tensors[name][0].layout) for name in ("w", "b")] == ["[2, 4] map [0, -1]", "[4, 2] map [0]"]


def test_rules_in_place_of_a_target_strategy(real: Path, tmp_path: Path) -> None:
    """They are for the names that the tensors get."""
    names = written(tmp_path / "names.json", '{"net.layer1.*": "model.first.*"}')
    text = 'mesh: {dp: 2, mp: 2}\nrules: {"model.first.weight": [mp], "*.layer2.weight": [[mp, dp]]}\n'
    rules = written(tmp_path / "rules.yaml", text)
    done("convert", *source(real), tmp_path / "out", "--target-strategy", rules, "--name-map", names)
    made = reshard.open(tmp_path / "out").strategy
    assert made is not None
    assert str(made.tensors["model.first.weight"][0].layout) == "[2, 2] map [0, -1]"
    assert made.tensors["net.layer2.weight"][0].layout.tensor_map == ((0, 1), ())
    assert "global_step" not in made.tensors
    done("verify", tmp_path / "out")


# diff


def compared(tmp_path: Path, a: Strategy, b: Strategy, *options: str) -> Result:
    reshard.write_strategy(a, tmp_path / "a.ckpt")
    reshard.write_strategy(b, tmp_path / "b.ckpt")
    return call("strategy", "diff", tmp_path / "a.ckpt", tmp_path / "b.ckpt", *options)


def test_diff_tells_blocks_from_fields(tmp_path: Path) -> None:
    """`[8]` and `[2, 4]` that split nothing are the same blocks; a name that one lacks, and other blocks, are not."""
    first = {f"h.{n}.w": Layout.of([8], [0, -1]) for n in range(3)}
    a = Strategy.of({**first, "b": Layout.of([8], [-1]), "o": Layout.of([8], [-1], -1), "only.a": Layout.of([8], [])})
    second = {f"h.{n}.w": Layout.of([2, 4], [0, -1]) for n in range(3)}
    b = Strategy.of({**second, "b": Layout.of([2, 4], [-1]), "o": Layout.of([8], [-1], 8)})
    result = compared(tmp_path, a, b)
    assert result.exit_code == 3
    assert result.stdout.splitlines() == [
        f"only in A ({tmp_path}/a.ckpt):",
        "  only.a",
        "other blocks:",
        "  A rows / 8",
        "  B rows / 4 × 2 copies",
        "    h.{0-2}.w",
        "the same blocks, written otherwise:",
        "  A whole × 8 copies   # [8] map [-1]",
        "  B whole × 8 copies   # [2, 4] map [-1]",
        "    b",
        "the same blocks, written otherwise:",
        "  A rows / 8 (8 for the optimizer)   # [8] map [-1] opt -1",
        "  B rows / 8 (8 for the optimizer)   # [8] map [-1] opt 8",
        "    o",
    ]


def test_diff_of_equal_blocks_exits_with_0(tmp_path: Path) -> None:
    result = compared(tmp_path, Strategy.of({"w": Layout.of([8], [-1])}), Strategy.of({"w": Layout.of([2, 4], [-1])}))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-1] == "every rank holds the same blocks of 1 tensor"


def test_diff_of_other_numbers_of_ranks(tmp_path: Path) -> None:
    result = compared(tmp_path, Strategy.of({"w": Layout.of([8], [-1])}), Strategy.of({"w": Layout.of([4], [-1])}))
    assert result.exit_code == 3
    assert result.stdout.splitlines()[0] == "A is for 8 ranks, B for 4"


def test_diff_of_a_pipeline(tmp_path: Path) -> None:
    rows, columns = Layout.of([2], [0, -1]), Layout.of([2], [-1, 0])
    result = compared(tmp_path, Strategy.of({"w": {0: rows, 1: rows}, "v": {1: rows}}),
                      Strategy.of({"w": {0: rows, 1: columns}, "v": {0: rows}}))  # fmt: skip
    lines = result.stdout.splitlines()
    assert lines[:2] == [f"only in A ({tmp_path}/a.ckpt):", "  v, stage 1"]
    assert "other blocks, stage 1:" in lines
    result = compared(tmp_path, Strategy.of({"w": {0: rows, 1: rows}, "v": {0: rows}}), Strategy.of({"w": rows}))
    assert "  v, stage 0" in result.stdout.splitlines()


def test_diff_as_json(tmp_path: Path) -> None:
    a, b = Strategy.of({"w": Layout.of([2], [0]), "a": Layout.of([2], [0])}), Strategy.of({"w": Layout.of([2], [-1])})
    found: dict[str, Any] = json.loads(compared(tmp_path, a, b, "--json").stdout)
    assert found.keys() == {"schema", "error", "same", "ranks_a", "ranks_b", "only_a", "only_b", "blocks", "fields"}
    assert (found["same"], found["only_a"], found["fields"]) == (False, [{"name": "a", "stage": 0}], [])
    assert found["blocks"][0]["a"]["tensor_map"] == [[0]]


def test_layouts_that_no_grid_has_are_compared_by_their_numbers() -> None:
    interleaved, uneven = Layout.of([2], [0], field=2), Layout.of([2], [0], param_split_shape=[3, 5])
    a = Strategy.of({"i": interleaved, "u": uneven, "bad": Layout.of([2], [0], 3)})
    assert diff(a, a).same
    b = Strategy.of({"i": Layout.of([2], [0]), "u": Layout.of([2], [0]), "bad": Layout.of([2], [0])})
    assert [change.name for change in diff(a, b).blocks] == ["i", "u", "bad"]


@pytest.mark.parametrize("kind", ["set", "zarr"])
def test_a_made_strategy_is_one_for_a_checkpoint_2(tmp_path: Path, kind: str) -> None:
    """The count of steps is left out whatever the source; a Checkpoint 2.0 may have it in common.json alone."""
    full = {"a.w": np.arange(64, dtype=np.float32).reshape(8, 8), "global_step": np.array([3], np.int32)}
    write_file(tmp_path / "net.safetensors", full)
    ways = {"set": [], "zarr": ["--to", "zarr"]}
    done("convert", "--to=mindspore", tmp_path / "net.safetensors", tmp_path / "src", *ways[kind])
    rules = written(tmp_path / "r.yaml", "mesh: {x: 2}\nrules: {a.w: [x]}\n")
    done("strategy", "make", rules, "--like", tmp_path / "src", "-o", tmp_path / "s.ckpt")
    assert set(reshard.read_strategy(tmp_path / "s.ckpt").tensors) == {"a.w"}
    words = ["--to", "checkpoint2", "--target-strategy", tmp_path / "s.ckpt"]
    done("convert", tmp_path / "src", tmp_path / "cut", *words)
    assert_equal(reshard.open(tmp_path / "cut"), full)
    write_file(tmp_path / "weights.safetensors", {"a.w": full["a.w"]})
    done("convert", tmp_path / "weights.safetensors", tmp_path / "cut2", *words, "--target-step", "3")
    by_rule = written(tmp_path / "more.yaml", "mesh: {x: 2}\nrules: {a.w: [x], global_step: []}\n")
    done("strategy", "make", by_rule, "--like", tmp_path / "src", "-o", tmp_path / "more.ckpt")
    assert set(reshard.read_strategy(tmp_path / "more.ckpt").tensors) == {"a.w", "global_step"}


@pytest.mark.parametrize(("threshold", "is_warned"), [(64, True), (1, False)])
def test_make_says_that_optimizer_parallel_cut_nothing(tmp_path: Path, threshold: int, is_warned: bool) -> None:
    """A weight of 4 KB: of no effect by default, at 64 KB."""
    weight = write_file(tmp_path / "w.safetensors", {"w": np.zeros((32, 32), np.float32)})
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        f"mesh: {{dp: 4}}\noptimizer_parallel: true\nparallel_optimizer_threshold: {threshold}\nrules: {{}}\n"
    )
    result = done("strategy", "make", rules, "--like", weight, "-o", tmp_path / "s.json")
    assert ("warning: optimizer_parallel" in result.stderr) == is_warned
    made = json.loads((tmp_path / "s.json").read_text())["parallel_layout_item"]["w"]
    assert bool(made["opt_weight_shard_size"]) != is_warned
