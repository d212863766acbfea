"""Memory of what is computed with values, measured on whole commands: it does not grow with the tensors."""

from __future__ import annotations

import hollow
import pytest
from measure import RESHARD, measured

import reshard
from reshard import Layout, Strategy

MODEL = {"embedding": (24000, 4096), **{f"layers.{n}.w": (4096, 4096) for n in range(4)}}


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two checkpoints of holes, by rows and by columns, each with its strategy."""
    root = tmp_path_factory.mktemp("hollow")
    words = []
    for side, layout in {"source": Layout.of([8], [0, -1]), "target": Layout.of([64], [-1, 0])}.items():
        strategy = Strategy.of(dict.fromkeys(MODEL, layout))
        hollow.write_hollow(root / side, MODEL, strategy, "safetensors")
        reshard.write_strategy(strategy, root / f"{side}.json")
        words += [str(root / side), f"--{side}-strategy", str(root / f"{side}.json")]
    return words


@pytest.mark.slow
@pytest.mark.parametrize(("options", "most"), [([], 110e6), (["--threads", "1"], 90e6), (["--memory", "75MB"], 75e6)])
def test_statistics_take_little_memory(sides: list[str], options: list[str], most: float) -> None:
    took = measured(*RESHARD, "stats", *sides[:3], "--json", *options)
    assert took.code == 0, took.err
    assert took.peak < most


@pytest.mark.slow
@pytest.mark.parametrize(("options", "most"), [([], 200e6), (["--threads", "1"], 130e6), (["--memory", "90MB"], 90e6)])
def test_differences_take_little_memory(sides: list[str], options: list[str], most: float) -> None:
    source, *source_options = sides[:3]
    target, *target_options = sides[3:]
    took = measured(*RESHARD, "diff", source, target, *source_options, *target_options, "--json", *options)
    assert took.code == 0, took.err
    assert took.peak < most
