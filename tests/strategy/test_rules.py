"""Strategies from rules: the blocks that MindSpore gives each rank, and every fault at once."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import helpers
import pytest
from hypothesis import given
from hypothesis import strategies as st
from networks import networks
from refusals import check, refused

from reshard.core.layout.layout import Layout
from reshard.errors import UsageError
from reshard.strategy.files import merge, read_strategy, write_strategy
from reshard.strategy.names import optimizer_states
from reshard.strategy.rules import optimizer_sharded
from reshard.strategy.strategy import Strategy

if TYPE_CHECKING:
    from pathlib import Path

    from networks import Network

MESH = {"dp": 2, "mp": 4}
MODEL = {
    "embedding": (1024, 64),
    **{f"layers.{i}.wq.weight": (512, 256) for i in range(8)},
    **{f"layers.{i}.wo.weight": (256, 512) for i in range(8)},
    **{f"layers.{i}.norm": (256,) for i in range(8)},
    "adam_m.layers.0.wq.weight": (512, 256),
    "accu_grads.layers.0.wq.weight": (512, 256),
    "global_step": (),
}


def layouts(strategy: Strategy) -> dict[str, str]:
    return {name: str(places[0].layout) for name, places in strategy.tensors.items()}


# Examples.


def test_axes_by_name() -> None:
    """Axes are in the mesh's order; an entry may nest several, major first; a shorter rule leaves the rest whole."""
    rules = {"*.wq.weight": ("mp",), "*.wo.weight": (None, ("mp", "dp")), "embedding": (("dp", "mp"), "None")}
    found = layouts(Strategy.from_rules(MODEL, MESH, rules))
    assert found["layers.3.wq.weight"] == "[2, 4] map [0, -1]"
    assert found["layers.3.wo.weight"] == "[2, 4] map [-1, (0, 1)]"
    assert found["embedding"] == "[2, 4] map [(1, 0), -1]"
    assert found["layers.3.norm"] == "[2, 4] map [-1]"


def test_what_is_not_in_the_strategy() -> None:
    """A tensor without dimensions, and what a rule says to leave out, with its optimizer states."""
    found = Strategy.from_rules(MODEL, MESH, {"layers.0.*": None}).tensors
    assert set(MODEL) - set(found) == {
        "layers.0.wq.weight",
        "layers.0.wo.weight",
        "layers.0.norm",
        "adam_m.layers.0.wq.weight",
        "accu_grads.layers.0.wq.weight",
        "global_step",
    }
    assert layouts(Strategy.from_rules(MODEL, MESH, {"global_step": ()}))["global_step"] == "[2, 4] map []"


def test_optimizer_states_go_with_their_weights() -> None:
    shapes = {
        "h.wq": (512, 256),
        "adam_m.h.wq": (512, 256),
        "accu_grads.adam_m.h.wq": (512, 256),
        "row.h.wq": (512,),  # as of Adafactor: another shape, so by the rules
    }
    rules = {"h.*": ("mp",), "row.*": ("dp",)}
    options: dict[str, Any] = {"optimizer_parallel": True, "dtypes": {"adam_m.h.wq": "float64"}}
    found = layouts(Strategy.from_rules(shapes, MESH, rules, **options))
    assert found == {
        "h.wq": "[2, 4] map [0, -1] opt -1",
        "adam_m.h.wq": "[2, 4] map [0, -1] opt -1",
        "accu_grads.adam_m.h.wq": "[2, 4] map [0, -1] opt -1",
        "row.h.wq": "[2, 4] map [1]",
    }
    assert optimizer_states(shapes)["accu_grads.adam_m.h.wq"].weight == "adam_m.h.wq"


def test_a_weight_whose_name_ends_as_another_does() -> None:
    """It is a weight of its own, and the state of an optimizer if the word before says so."""
    shapes = {"wq": (8, 8), "encoder.wq": (8, 8), "exp_avg.wq": (8, 8)}
    found = layouts(Strategy.from_rules(shapes, MESH, {"wq": ("mp",)}))
    assert (found["encoder.wq"], found["exp_avg.wq"]) == ("[2, 4] map [-1, -1]", "[2, 4] map [0, -1]")
    del shapes["exp_avg.wq"]
    found = Strategy.from_rules(shapes, MESH, {"wq": ("mp",), "encoder.wq": ("dp",)}, predict=True)
    assert layouts(found) == {"wq": "[2, 4] map [0, -1]", "encoder.wq": "[2, 4] map [1, -1]"}


def test_predict_leaves_out_the_optimizer() -> None:
    """And nothing else: MindSpore's optimizer parallel cuts a predict network, too (`tut_dst4_opt_predict`)."""
    found = layouts(Strategy.from_rules(MODEL, MESH, {}, predict=True, optimizer_parallel=True))
    assert not [name for name in found if name.startswith(("adam", "accu"))]
    assert found["embedding"] == "[2, 4] map [-1, -1] opt -1"


def test_pipeline_stages() -> None:
    """The mesh is of each stage; a tensor may be in several; states are where their weights are."""
    pipeline = {"embedding": [0, 1], "layers.[0-3].*": 0, "layers.[4-7].*": 1}
    strategy = Strategy.from_rules(MODEL, MESH, {"*.weight": ("mp",)}, pipeline=pipeline)
    assert (strategy.stages, strategy.ranks, strategy.merged) == (range(2), range(16), True)
    assert strategy.stages_of("embedding") == (0, 1)
    assert strategy.stages_of("layers.3.norm") == (0,)
    assert strategy.stages_of("layers.4.norm") == (1,)
    assert strategy.stages_of("adam_m.layers.0.wq.weight") == (0,)


@pytest.mark.parametrize("ending", [".ckpt", ".json"])
def test_it_is_written_and_read_back(tmp_path: Path, ending: str) -> None:
    """With shapes in JSON; also where a dimension has just the size of its axis, as one of an expanded layout has."""
    shapes = {"moe": (4, 32, 32), "nested": (64, 8)}
    rules = {"moe": ("mp", "dp"), "nested": (None, ("dp", "mp"))}
    strategy = Strategy.from_rules(shapes, MESH, rules)
    write_strategy(strategy, tmp_path / f"s{ending}")
    back = read_strategy(tmp_path / f"s{ending}")
    for name, shape in shapes.items():
        assert back.grid(name, shape) == strategy.grid(name, shape)
        assert ending == ".ckpt" or back.tensors[name][0].shape is not None


# Optimizer parallel: MindSpore's conditions, each compiled by MindSpore 2.10.0.

WHOLE_8, WHOLE_16 = Layout.of([8], [-1, -1]), Layout.of([16], [-1, -1])


@pytest.mark.parametrize(
    ("layout", "shape", "itemsize", "size", "threshold", "expected"),
    [
        # The threshold is of the whole weight, in units of 1024 bytes; one of just that size is cut.
        (WHOLE_8, (128, 128), 4, -1, 64, -1),
        (WHOLE_8, (128, 127), 4, -1, 64, 0),
        (WHOLE_8, (128, 128), 2, -1, 64, 0),
        (Layout.of([2, 2, 2], [-1, 1]), (128, 128), 4, -1, 64, -1),  # 32 KB a rank
        (Layout.of([8], [-1]), (256,), 4, -1, 1, -1),
        # Rows: those of the block, after the tensor map.
        (Layout.of([4], [-1]), (10,), 4, -1, 0, 0),
        (Layout.of([2, 4], [1, -1]), (12, 6), 4, -1, 0, 0),
        # Nobody shares the block.
        (Layout.of([4, 2], [1, -1, 0]), (4, 32, 32), 4, -1, 0, 0),
        # A size: at most so many pieces, written as a number; 1 is the same as none.
        (WHOLE_16, (240, 240), 4, 4, 0, 4),
        (Layout.of([2, 2, 4], [-1, 1]), (240, 480), 4, 16, 0, 8),
        (Layout.of([2, 2, 2, 2], [2, 1]), (480, 240), 4, 16, 0, 4),
        (WHOLE_8, (784, 512), 4, 1, 0, -1),
        (Layout.of([16], [-1]), (10,), 4, 8, 0, 0),
        # A size that does not divide the devices that share a block, where it is less than they are.
        (WHOLE_16, (240, 240), 4, 3, 0, 0),
        (Layout.of([2, 2, 2, 2], [2, 1]), (480, 240), 4, 5, 0, 4),
    ],
)
def test_optimizer_parallel_as_mindspore_does(
    layout: Layout, shape: tuple[int, ...], itemsize: int, size: int, threshold: int, expected: int
) -> None:
    nbytes = itemsize
    for extent in shape:
        nbytes *= extent
    assert optimizer_sharded(layout, shape, nbytes, size=size, threshold=threshold).opt_weight_shard_size == expected


def test_the_step_is_the_stride_of_those_that_share() -> None:
    cut = optimizer_sharded(Layout.of([2, 2, 2, 2], [2, 1]), (480, 240), 460_800, size=4, threshold=0)
    assert cut.opt_weight_shard_step == 3


def test_weights_that_the_optimizer_leaves_alone() -> None:
    """`Parameter.parallel_optimizer = False` stands in no strategy file."""
    options: dict[str, Any] = {"optimizer_parallel": True, "parallel_optimizer_threshold": 0}
    found = layouts(Strategy.from_rules(MODEL, MESH, {}, optimizer_parallel_except=["emb*"], **options))
    assert found["embedding"] == "[2, 4] map [-1, -1]"
    assert found["layers.0.norm"] == "[2, 4] map [-1] opt -1"


# MindSpore's files: the rules that a user would write for each network.

_ROW, _COLUMN = ("mp",), (None, "mp")
_DENSE = {"*layer1.weight": _COLUMN, "*layer2.weight": _ROW, "*layer3.weight": _COLUMN}
_TUTORIAL = {"*layer1.weight": _COLUMN, "*layer3.weight": _ROW}
_BLOCKS = {
    "*.[qkv].weight": _ROW,
    "*.[qkv].bias": _ROW,
    "*.up.weight": _ROW,
    "*.up.bias": _ROW,
    "*.o.weight": _COLUMN,
    "*.down.weight": _COLUMN,
}
_TRANSFORMER = {**_BLOCKS, "*head.weight": _ROW, "*embedding_table": _ROW}
_CUBE = {"dp": 2, "sp": 2, "mp": 2}
_REPEATED = {"dp": 2, "mp": 2, "rest": 2}
_ABC = {"a": 2, "b": 2, "c": 2}

RULES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    (r"tut_dst4_opt_predict", {"dp": 2, "mp": 2}, {"*layer1.weight": _ROW}),
    (r"real/tut_dst4_opt", {"dp": 2, "mp": 2}, {"*layer1.weight": _ROW, "*layer3.weight": _COLUMN}),
    (r"(real/)?tut_src8.*|api_semi.*|ffn_d8_mp2_optsize.*|ffn_d8_.*_lazy|ffn_d8_frozen_all", _REPEATED, _TUTORIAL),
    (r"ffn_dp_.*|conv_d4|api_recursive_d8|real/dp4.*|auto_tf_recursive.*", {"all": 0}, {}),
    (r"ffn_d(24|40)_mp8_opt", {"dp": 0, "mp": 8}, {"*layer1.weight": _COLUMN}),
    (r"ffn_d16_mp2_optsize.*", {"dp": 4, "sp": 2, "mp": 2}, {
        "*layer1.weight": _COLUMN, "*layer2.weight": ("sp", "mp")
    }),
    (r"ffn_d\d+_mp(?P<mp>\d+)(_opt)?", {"dp": 0, "mp": 0}, _DENSE),
    (r"ffn_d8_repeat_optsize2", _ABC, {"*layer1.weight": ("a",), "*layer2.weight": (None, ("a", "b"))}),
    (r"lay_nested_col", _CUBE, {"*layer1.weight": (None, ("sp", "mp")), "*layer3.weight": ("sp",)}),
    (r"lay_nested_row_opt", _CUBE, {"*layer1.weight": (("sp", "mp"),), "*layer2.weight": ("mp",)}),
    (r"lay_nested_3", _CUBE, {"*layer2.weight": (("dp", "sp", "mp"),)}),
    (r"lay_nested_1d_full", _CUBE, {
        "*layer1.weight": (None, ("dp", "sp", "mp")), "*layer1.bias": (("dp", "sp", "mp"),)
    }),
    (r"lay_opt_size2", {**_CUBE, "dp": 4}, {"*layer1.weight": (None, ("sp", "mp")), "*layer2.weight": (("sp", "mp"),)}),
    (r"lay_d40", {"dp": 5, "mp": 8}, {"*layer1.weight": (None, ("dp", "mp")), "*layer2.weight": (("dp", "mp"),)}),
    (r"lay_tf_norm_nested", _CUBE, {"*.q.*": (("sp", "mp"),)}),
    (r"tf_layout_d8_noopt", _CUBE, {
        "*.up.weight": (("sp", "mp"),), "*.down.weight": (None, ("sp", "mp")), "*.q.weight": _ROW
    }),
    (r"real/lay8_nested_opt", _CUBE, {"*up.*": (("sp", "mp"),), "*down.weight": (None, ("mp", "sp"))}),
    (r"tf_moe_d8", {"dp": 2, "outer": 2, "inner": 2}, {
        **{glob: tuple(("outer", "inner") if axis else None for axis in rule) for glob, rule in _TRANSFORMER.items()},
        "*.moe": (("dp", "outer"), None, "inner"),
    }),
    (r"tf_emb_dim_d8", {"dp": 2, "mp": 4}, {"*embedding_table": _COLUMN}),
    (r"tf_d\d+_mp(?P<mp>\d+)", {"dp": 0, "mp": 0}, _TRANSFORMER),
    (r"tf_(lamb|sgd)_d4", {"dp": 2, "mp": 2}, _TRANSFORMER),
    (r"asc_d8", _ABC, {"*.up.weight": ("c", "b")}),
    (r"asc_d16_opt", {"a": 2, "b": 2, "c": 2, "d": 2}, {"*.up.weight": (("c", "d"), "b"), "*.down.weight": ("d", "c")}),
    (r"real/asc8_opt", _ABC, {"*up.weight": ("c", "b"), "*down.weight": (("b", "c"), "a")}),
    (r"conv_d8", _ABC, {"*conv1_w": (("b", "c"),), "*conv2_w": ("c", "b"), "*conv3d_like": ("c",)}),
    (r"real/mix8_optsize2", {"dp": 2, "sp": 2, "mp": 2}, {
        "*layer1.weight": (None, "mp"), "*layer2.weight": ("sp",), "*layer3.weight": ("sp", "mp")
    }),
    (r"real/tp4_adam", {"mp": 4}, {**_DENSE, "*layer[13].bias": _ROW}),
    # What the searches found, which no rule could foretell:
    (r"auto_sharding_propagation_d8", {"dp": 2, "outer": 2, "inner": 2}, {
        "*layer1.weight": (None, ("outer", "inner")), "*layer1.bias": (("outer", "inner"),),
        "*layer2.weight": (("outer", "inner"),), "*layer3.weight": (None, "outer"), "*layer3.bias": ("outer",),
    }),
    (r"auto_dynamic_programming_d8", {"all": 8}, {
        "*layer2.weight": (None, "all"), "*layer2.bias": ("all",), "*layer3.weight": ("all",)
    }),
]  # fmt: skip


def rules_of(network: Network) -> tuple[dict[str, int], dict[str, Any]] | None:
    """The mesh and the rules for a network; extents of 0 are worked out from its name."""
    for pattern, mesh, rules in RULES:
        if match := re.fullmatch(pattern, network.name):
            mp = int(match.groupdict().get("mp") or mesh.get("mp", 1))
            return {axis: n or (mp if axis == "mp" else network.devices // mp) for axis, n in mesh.items()}, rules
    return None


def test_every_compiled_file_block_for_block(mindspore_data: Path) -> None:
    counts: Counter[str] = Counter()
    for network in networks(mindspore_data):
        if network.name.startswith(("pipe", "real/pipe")):
            continue
        found = rules_of(network)
        assert found is not None, network.name
        strategy = Strategy.from_rules(network.shapes, *found, **network.options)
        assert list(strategy.tensors) == list(network.shapes)
        for name, shape in network.shapes.items():
            assert strategy.grid(name, shape) == network.layout(name).grid(shape), (network.path, name)
        counts["files"] += 1
        counts["blocks"] += len(network.shapes)
        counts["of searched files"] += len(network.shapes) * network.searched
    assert counts == {"files": 166, "blocks": 4988, "of searched files": 252}


_PIPELINES: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "pipe_tut8": ({"dp": 2, "mp": 2}, _TUTORIAL, {"*layer1.*": 0, "*": 1}),
    "real/pipe8_opt": ({"dp": 2, "mp": 2}, _TUTORIAL, {"*layer1.*": 0, "*": 1}),
    "pipe_tut8_t0": ({"dp": 2, "mp": 2}, _TUTORIAL, {"*layer1.*": 0, "*": 1}),
    "pipe_noopt4": ({"mp": 2}, _TUTORIAL, {"*layer1.*": 0, "*": 1}),
    "pipe_tf8": ({"dp": 2, "mp": 2}, _BLOCKS, {"*.blocks.1.*": 1, "*final_norm*": 1, "*head*": 1, "*": 0}),
    "pipe_tf16_4st": ({"dp": 2, "mp": 2}, _BLOCKS, {
        "*.blocks.1.*": 1, "*.blocks.2.*": 2, "*.blocks.3.*": 3, "*final_norm*": 3, "*head*": 3, "*": 0
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", _PIPELINES)
def test_every_compiled_pipeline_block_for_block(mindspore_data: Path, name: str) -> None:
    """The stages' files merged: the same tensors in the same stages, and the same blocks on every rank of all."""
    parts = [network for network in networks(mindspore_data) if f"{network.name}/".startswith(f"{name}/")]
    shapes = {tensor: shape for part in parts for tensor, shape in part.shapes.items()}
    compiled = merge([(str(part.path), part.strategy) for part in parts])
    mesh, rules, pipeline = _PIPELINES[name]
    strategy = Strategy.from_rules(shapes, mesh, rules, pipeline=pipeline, **parts[0].options)
    assert {n: strategy.stages_of(n) for n in shapes} == {n: compiled.stages_of(n) for n in compiled.tensors}
    for tensor, shape in shapes.items():
        assert strategy.grid(tensor, shape) == compiled.grid(tensor, shape), tensor


# What is wrong.


@pytest.mark.parametrize(
    ("call", "codes", "places"),
    [
        ({"rules": {"*.wk.*": ("mp",)}}, ["no-match"], ["$.rules['*.wk.*']", "'*.wq.*'"]),
        (
            {"rules": {"*": ("mp",), "layers.0.*": ("dp",)}},
            ["unused-pattern"],
            ["$.rules['layers.0.*']", "layers.0.wq.weight"],
        ),
        ({"rules": {"adam*": ()}}, ["unused-pattern"], ["$.rules['adam*']", "optimizer state"]),
        ({"rules": {"embedding": ("tp",)}}, ["unknown-axis"], ["$.rules['embedding'][0]", "'tp'", "dp, mp"]),
        ({"rules": {"embedding": ("mp", "mp")}}, ["repeated-axis"], ["['embedding'][1]", "'mp'"]),
        ({"rules": {"*.norm": (None, "mp")}}, ["wrong-dimensions"], ["2 entries", "1 dim", "layers.0.norm"]),
        ({"mesh": {"dp": 0}}, ["out-of-range"], ["$.mesh.dp is 0", "1 to 131072", "likewise $.mesh"]),
        (
            {"mesh": {"dp": 3}, "rules": {"*.w?.weight": (None, "dp")}},
            ["not-divisible"],
            [
                "dimension 1, of size 256, into 3",
                "layers.0.wq.weight, ",
                "and 3 more",
                "(1 more)",
            ],
        ),
        ({"pipeline": {"layers.*": 0}}, ["unplaced-tensor"], ["$.pipeline", "embedding"]),
        ({"pipeline": {"*": 1}}, ["missing-stage"], ["$.pipeline", "stage 0", "stage 1"]),
        ({"pipeline": {"*": "0"}}, ["bad-stage"], ["$.pipeline['*'] is '0'"]),
        ({"optimizer_parallel": 1, "predict": "no"}, ["wrong-type"], ["$.optimizer_parallel is 1;", "$.predict"]),
        ({"optimizer_weight_shard_size": 0}, ["out-of-range"], ["$.optimizer_weight_shard_size is 0"]),
        ({"parallel_optimizer_threshold": -1}, ["out-of-range"], ["$.parallel_optimizer_threshold is -1"]),
        ({"optimizer_parallel": True, "optimizer_parallel_except": ["zz"]}, ["no-match"], ["except[0]: 'zz'"]),
        ({"shapes": {"global_step": ()}}, ["no-tensors"], []),
        (
            {"rules": {"a": ("tp",), "b": (3,)}, "mesh": {"dp": -2}, "predict": 3},
            ["out-of-range", "unknown-axis", "wrong-type"],
            ["rules has 5 faults"],
        ),
        ({"rules": ["mp"]}, ["wrong-type"], ["$.rules is ['mp']"]),
        ({"rules": {3: ()}}, ["bad-name"], ["$.rules has the key 3"]),
        ({"optimizer_parallel_except": "embedding"}, ["wrong-type"], ["$.optimizer_parallel_except is 'embedding'"]),
        ({"rules": {"embedding": "mp"}}, ["wrong-type"], ["$.rules['embedding'] is 'mp'"]),
    ],
)
def test_rules_that_are_none(call: dict[str, Any], codes: list[str], places: list[str]) -> None:
    """Each fault with its place, all at once."""
    arguments = {"shapes": MODEL, "mesh": MESH, "rules": {}, **call}
    with refused(UsageError, codes[0], *places) as caught:
        Strategy.from_rules(**arguments)
    assert set(codes) <= set(caught.value.codes)


def test_a_dtype_that_is_none() -> None:
    with refused(UsageError, "unknown-dtype", "'float31'"):
        Strategy.from_rules(MODEL, MESH, {}, optimizer_parallel=True, dtypes={"embedding": "float31"})


def test_operators_that_are_none() -> None:
    from reshard.strategy.operators import matmul

    three = matmul(((1, 1), (1, 3)))
    with refused(UsageError, "not-divisible", "$.operators['w']", "3 devices") as caught:
        Strategy.from_operators({"w": (4, 4), "b": (4,)}, {"w": three, "b": Layout.of([2], [0]), "zz": None}, 4)
    check(caught.value, "devices-differ", "$.operators['b']", "2 devices; a stage has 4")
    with refused(UsageError, "wrong-dimensions", "['w']", "1 dimensions", "has 2"):
        Strategy.from_operators({"w": (4, 4)}, {"w": Layout.of([4], [0])}, 4)
    with refused(UsageError, "out-of-range", "$.devices is 0"):
        Strategy.from_operators({"w": (4, 4)}, {}, 0)


# Properties.


@st.composite
def rule_cases(draw: st.DrawFn) -> tuple[dict[str, int], list[tuple[str, ...]], int]:
    """A mesh, what splits each dimension of a tensor, and the optimizer's size."""
    mesh = {f"a{n}": draw(st.sampled_from([1, 2, 3])) for n in range(draw(st.integers(1, 4)))}
    axes = draw(st.permutations(list(mesh)))
    ndim = draw(st.integers(1, 3))
    cuts: list[tuple[str, ...]] = [()] * ndim
    for axis in axes[: draw(st.integers(0, len(axes)))]:
        dim = draw(st.integers(0, ndim - 1))
        cuts[dim] = (*cuts[dim], axis)
    return mesh, cuts, draw(st.sampled_from([0, -1, 2, 3, 6]))


@given(rule_cases())
def test_rules_cut_as_numpy_does(case: tuple[dict[str, int], list[tuple[str, ...]], int]) -> None:
    """Each rank's block is where slicing by the named axes, one after the other, finds it."""
    mesh, cuts, size = case
    shape = tuple(36 * 6 for _ in cuts)
    options: dict[str, Any] = {"optimizer_parallel": True, "parallel_optimizer_threshold": 0} if size else {}
    options["optimizer_weight_shard_size"] = size or -1
    strategy = Strategy.from_rules({"w": shape}, mesh, {"w": cuts}, **options)
    layout = strategy.tensors["w"][0].layout
    axes = list(mesh)
    numbers = {
        "dev_matrix": list(mesh.values()),
        "tensor_map": [[len(axes) - 1 - axes.index(axis) for axis in entry] or -1 for entry in cuts],
        "opt_weight_shard_size": layout.opt_weight_shard_size,
    }
    for rank, block in strategy.grid("w", shape).by_rank().items():
        assert tuple(map(slice, block.start, block.stop)) == helpers.slices(numbers, shape, rank)
