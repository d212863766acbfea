"""Random layouts, sharding strategies and pairs of them, for Hypothesis."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm, prod
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from reshard.core.layout.layout import Layout
from reshard.strategy.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reshard.core.layout.block import Shape

NAMES = ["net.w", "net.b", "moment1.net.w", "embedding.table", "head/ω", "layers.0-1", "accu_grads.net.w"]


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def factorisations(draw: st.DrawFn, devices: int) -> Shape:
    """A device matrix of that many devices: any factors in any order, ones among them."""
    extents = []
    while devices > 1 and len(extents) < 4:
        extents.append(draw(st.sampled_from(divisors(devices))))
        devices //= extents[-1]
    return (*extents, devices)


@st.composite
def layouts(draw: st.DrawFn, devices: int | None = None, ndim: int | None = None, *, optimizer: bool = True) -> Layout:
    """A layout: entries flat or nested, axes in any order or unused, optimizer sharding or none."""
    if devices is None:
        devices = draw(st.integers(1, 24))
    if ndim is None:
        ndim = draw(st.integers(1, 4))
    matrix = draw(factorisations(devices))
    tensor_map: list[list[int]] = [[] for _ in range(ndim)]
    for axis in draw(st.permutations(range(len(matrix)))):
        place = draw(st.integers(-1, ndim - 1))  # -1: unused
        if place >= 0 and (not tensor_map[place] or draw(st.booleans())):
            tensor_map[place].append(axis)
    used = {len(matrix) - 1 - value for axes in tensor_map for value in axes}
    replicas = prod(extent for axis, extent in enumerate(matrix) if axis not in used)
    sizes = [0, -1, *divisors(replicas)] if optimizer and ndim else [0]
    return Layout.of(matrix, [axes or [-1] for axes in tensor_map], draw(st.sampled_from(sizes)))


@st.composite
def shapes(draw: st.DrawFn, fitting: Iterable[Layout]) -> Shape:
    """A shape that every one of some layouts divides."""
    splits = [layout.splits for layout in fitting]
    return tuple(lcm(*ways) * draw(st.integers(1, 3)) for ways in zip(*splits, strict=True))


@st.composite
def laid_out(draw: st.DrawFn, *, optimizer: bool = True) -> tuple[Layout, Shape]:
    """A layout and a shape that it divides."""
    layout = draw(layouts(optimizer=optimizer))
    return layout, draw(shapes([layout]))


@dataclass(frozen=True)
class Model:
    """A strategy (or two, for the same tensors) and the whole shapes of the tensors."""

    source: Strategy
    target: Strategy
    shapes: dict[str, Shape]


@st.composite
def pipelines(draw: st.DrawFn, ranks: dict[str, int]) -> tuple[Strategy, dict[str, list[Layout]]]:
    """A strategy for tensors of given numbers of dimensions, over one stage or several; some are in two."""
    stages = draw(st.sampled_from([1, 1, 2, 3]))
    devices = draw(st.integers(1, 24 // stages))
    by_name: dict[str, dict[int, Layout]] = {}
    for name, ndim in ranks.items():
        held = draw(st.sets(st.integers(0, stages - 1), min_size=1, max_size=2))
        by_name[name] = {stage: draw(layouts(devices, ndim)) for stage in held}
    return Strategy.of(by_name), {name: list(places.values()) for name, places in by_name.items()}


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Several tensors under two strategies with unrelated numbers of devices and stages."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
    ndims = {name: draw(st.integers(1, 3)) for name in names}
    source, before = draw(pipelines(ndims))
    target, after = draw(pipelines(ndims))
    return Model(source, target, {name: draw(shapes(before[name] + after[name])) for name in names})
