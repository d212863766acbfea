"""Operators' strategies: the layouts that MindSpore compiles of them, field for field."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from networks import networks
from refusals import refused

from reshard.errors import LayoutError
from reshard.strategy.operators import OPERATORS, add, batch_matmul, conv2d, gather, layer_norm, matmul
from reshard.strategy.strategy import Strategy

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.core.layout.layout import Layout
    from reshard.strategy.operators import OperatorStrategy

# Each compiled by MindSpore 2.10.0 over 8 devices, as a network of the one operator; None is what it refuses.
COMPILED: list[tuple[str, Any, str | None]] = [
    ("matmul", ((2, 2), (2, 2)), "[2, 2, 2] map [1, 0]"),
    ("matmul", ((1, 2), (2, 1)), "[2, 4] map [1, -1]"),
    ("matmul", ((1, 1), (1, 2)), "[2, 4] map [-1, 1]"),
    ("matmul", ((2, 1), (1, 1)), "[2, 4] map [-1, -1]"),
    ("matmul b", ((2, 2), (2, 2)), "[2, 2, 2] map [0, 1]"),
    ("matmul b", ((1, 2), (1, 2)), "[2, 4] map [-1, 1]"),
    ("matmul first", ((2, 2), (2, 2)), "[2, 2, 2] map [2, 1]"),
    ("matmul first", ((2, 1), (1, 1)), "[2, 4] map [1, -1]"),
    ("matmul a first", ((2, 2), (2, 2)), "[2, 2, 2] map [1, 2]"),
    ("matmul a first", ((2, 1), (2, 1)), "[2, 4] map [1, -1]"),
    ("batch_matmul", ((2, 2, 1), (2, 1, 2)), "[2, 2, 2] map [2, -1, 0]"),
    ("batch_matmul", ((2, 2, 2), (2, 2, 1)), "[2, 2, 2] map [2, 0, -1]"),
    ("batch_matmul b", ((2, 2, 1), (2, 2, 1)), "[2, 2, 2] map [2, 0, -1]"),
    ("batch_matmul b", ((2, 1, 2), (2, 1, 2)), "[2, 2, 2] map [2, -1, 1]"),
    ("batch_matmul", ((2, 2, 1), (1, 2)), "[2, 2, 2] map [-1, 0]"),
    ("batch_matmul", ((2, 1, 2), (2, 1)), "[2, 2, 2] map [1, -1]"),
    ("batch_matmul", ((2, 2, 1), (1, 1)), "[2, 2, 2] map [-1, -1]"),
    ("batch_matmul", ((2, 2, 1, 1), (2, 1, 2)), "[2, 2, 2] map [1, -1, 0]"),
    ("add", ((2, 2), (2,)), "[2, 2, 2] map [1]"),
    ("add", ((2, 1), (1,)), "[2, 4] map [-1]"),
    ("add", ((1, 8), (8,)), "[8] map [0]"),
    ("add", ((2, 2), (2, 2)), "[2, 2, 2] map [2, 1]"),
    ("add", ((2, 2), (1, 2)), "[2, 2, 2] map [-1, 1]"),
    ("add", ((2, 2, 2), (2,)), "[2, 2, 2] map [0]"),
    ("add", ((2, 2, 2), (2, 2)), "[2, 2, 2] map [1, 0]"),
    ("add first", ((2,), (2, 2)), "[2, 2, 2] map [1]"),
    ("layer_norm", ((2, 1), (1,), (1,)), "[2, 4] map [-1]"),
    ("layer_norm", ((2, 2, 1), (1,), (1,)), "[2, 2, 2] map [-1]"),
    ("layer_norm", ((1, 2), (2,), (2,)), None),
    ("layer_norm", ((2, 1), (1,)), "[2, 4] map [-1]"),
    ("layer_norm", ((2, 2, 1), (1,)), "[2, 2, 2] map [-1]"),
    ("gather", ((2, 4), (1,)), "[2, 4] map [1, 0]"),
    ("gather", ((2, 1), (1,)), "[4, 2] map [0, -1]"),
    ("gather", ((2, 2), (2,)), "[2, 2, 2] map [1, 0]"),
    ("gather", ((2, 2), (1,)), None),
    ("gather", ((2, 1), (2,)), None),
    ("gather", ((1, 2), (1,)), "[2, 4] map [-1, 1]"),
    ("gather", ((2, 1), (4, 1)), "[4, 2] map [0, -1]"),
    ("gather", ((2, 1), (2, 2)), "[2, 2, 2] map [0, -1]"),
    ("gather", ((1, 4), (2, 1)), "[2, 4] map [-1, 0]"),
    ("gather", ((1, 2), (2, 1)), "[2, 2, 2] map [-1, 1]"),
    ("gather", ((2, 1), (2, 1)), None),
    ("conv2d", ((2, 2, 1, 1), (1, 2, 1, 1)), "[2, 2, 2] map [-1, 1, -1, -1]"),
    ("conv2d", ((1, 2, 1, 1), (2, 2, 1, 1)), "[2, 2, 2] map [1, 2, -1, -1]"),
    ("conv2d", ((1, 1, 1, 1), (4, 1, 1, 1)), "[4, 2] map [1, -1, -1, -1]"),
    ("conv2d", ((2, 1, 2, 1), (2, 1, 1, 1)), "[2, 2, 2] map [0, -1, -1, -1]"),
]


def made(text: str, strategies: Any) -> OperatorStrategy:
    kind, *marks = text.split()
    options: dict[str, Any] = {f"transpose_{mark}": True for mark in marks if mark in {"a", "b"}}
    if "first" in marks:
        options["parameter"] = 0
    return OPERATORS[kind](strategies, **options)


@pytest.mark.parametrize(("operator", "strategies", "layout"), COMPILED)
def test_an_operator_as_mindspore_compiles_it(operator: str, strategies: Any, layout: str | None) -> None:
    if layout is None:
        with refused(LayoutError, "refused-by-mindspore"):
            made(operator, strategies).layout(8)
    else:
        assert str(made(operator, strategies).layout(8)) == layout


def test_the_tutorial() -> None:
    """8 devices with MatMul strategies -> 4 devices with another one and optimizer parallel."""
    shapes = {"layer1.weight": (784, 512), "layer1.bias": (512,), "layer3.bias": (10,)}
    source = Strategy.from_operators(shapes, {"layer1.weight": matmul(((2, 1), (1, 2)))}, 8)
    target = Strategy.from_operators(
        shapes,
        {"layer1.weight": matmul(((2, 2), (2, 1)))},
        4,
        optimizer_parallel=True,
        parallel_optimizer_threshold=0,
    )
    assert {name: str(places[0].layout) for name, places in source.tensors.items()} == {
        "layer1.weight": "[2, 2, 2] map [-1, 1]",
        "layer1.bias": "[8] map [-1]",
        "layer3.bias": "[8] map [-1]",
    }
    assert {name: str(places[0].layout) for name, places in target.tensors.items()} == {
        "layer1.weight": "[2, 2] map [0, -1] opt -1",
        "layer1.bias": "[4] map [-1] opt -1",
        "layer3.bias": "[4] map [-1]",  # 10 rows do not divide into 4 pieces
    }


# MindSpore's files.


def differences(made: Strategy, network: Any) -> list[str]:
    return [name for name in network.shapes if made.tensors[name][0].layout != network.layout(name)]


def test_every_compiled_file_field_for_field(mindspore_data: Path) -> None:
    """`dev_matrix`, `tensor_map`, `opt_weight_shard_size` and `_step` follow from what was asked of MindSpore."""
    counts: Counter[str] = Counter()
    for network in networks(mindspore_data):
        made = Strategy.from_operators(network.shapes, network.operators(), network.devices, **network.options)
        different = differences(made, network)
        kind = "searched" if network.searched else "asked for"
        counts[f"{kind}: files"] += 1
        counts[f"{kind}: equal"] += len(network.shapes) - len(different)
        counts[f"{kind}: different"] += len(different)
        assert network.searched or not different, (network.path, different)
    assert counts == {
        "asked for: files": 208,
        "asked for: equal": 6308,
        "asked for: different": 0,
        "searched: files": 6,
        "searched: equal": 220,
        "searched: different": 32,
    }


def test_every_compiled_file_from_the_operators_that_it_lists(mindspore_data: Path) -> None:
    """Where a search chose the operators' strategies, these are in the file, and the layouts follow from them, too."""
    for network in networks(mindspore_data):
        made = Strategy.from_operators(network.shapes, network.written_operators(), network.devices, **network.options)
        assert not differences(made, network), network.path


# What is wrong.


@pytest.mark.parametrize(
    ("call", "code", "places"),
    [
        (lambda: matmul(((2, 1, 1), (1, 2))), "operator-mismatch", ["MatMul", "2-D"]),
        (lambda: matmul(((2, 1),)), "operator-mismatch", ["MatMul", "2 inputs"]),
        (lambda: matmul(((2, 2), (4, 1))), "inputs-disagree", ["dimension k", "2 and 4"]),
        (lambda: matmul(((2, 2), (1, 1))), "inputs-disagree", ["dimension k", "1 and 2"]),
        (lambda: matmul(((0, 1), (1, 1))), "out-of-range", ["from 1 to 131072"]),
        (lambda: matmul(((2, 1), (1, 2)), parameter=2), "operator-mismatch", ["2, 2 dimensions"]),
        (lambda: batch_matmul(((2, 1, 1), (4, 1, 1))), "inputs-disagree", ["dimension b0", "2 and 4"]),
        (lambda: add(((2, 4), (2,))), "inputs-disagree", ["dimension d1", "2 and 4"]),
        (lambda: conv2d(((2, 1), (1, 1))), "operator-mismatch", ["4, 4 dimensions"]),
        (lambda: layer_norm(((2, 1),)), "operator-mismatch", ["2 inputs"]),
        (lambda: gather(((2, 1), (1,), (1,))), "operator-mismatch", ["Gather"]),
        (lambda: matmul(((2, 1), (1, 3))).layout(8), "not-divisible", ["6 devices", "the 8 "]),
        (lambda: matmul(((4, 1), (1, 4))).layout(8), "not-divisible", ["16 devices"]),
    ],
)
def test_a_strategy_that_is_none(call: Any, code: str, places: list[str]) -> None:
    with refused(LayoutError, code, *places):
        call()


# Properties.


@given(st.tuples(*[st.sampled_from([1, 2, 3, 4])] * 3), st.sampled_from([1, 2, 3]))
def test_the_weight_is_cut_as_its_own_strategy_says(cuts: tuple[int, int, int], repeats: int) -> None:
    """Whatever the axes are, k and n of the weight are cut k and n ways, and each block is on the other devices."""
    m, k, n = cuts
    devices = m * k * n * repeats
    layout: Layout = matmul(((m, k), (k, n))).layout(devices)
    assert layout.devices == devices
    assert layout.splits == (k, n)
    assert 1 not in layout.dev_matrix or layout.dev_matrix == (1,)
    grid = layout.grid((12, 12))
    assert {len(ranks) for ranks in grid.ranks} == {m * repeats}
    # Ranks that hold one block are `repeats` neighbours, for each part of m: repeats are the innermost axis.
    assert grid.ranks[0][:repeats] == tuple(range(repeats))
