"""The strategy of a checkpoint that says itself which rank holds which block: rank files of it are the same blocks."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import helpers
import numpy as np
import pytest
from commands import done
from refusals import failed, refused

import reshard
from reshard import Layout, Strategy
from reshard.errors import SourceError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WITHOUT = {"graph_1", "pynative_submesh", "pynative_submesh_once"}  # one rank of whole tensors; no stages
CASES = sorted(
    {
        path.split("/")[1]
        for archive in ("checkpoint2", "checkpoint2_more")
        for path in helpers.packed_files(archive)
        if path.count("/") > 3 and "dcp_" not in path
    }
    - WITHOUT
)
SPLIT = "graph_dp2_tp4"
EMBEDDING = "embedding.word_embeddings.weight"

Json = dict[str, Any]


def root_of(mindspore_data: Path, name: str) -> Path:
    return next(mindspore_data.glob(f"checkpoint2*/{name}"))


@pytest.fixture
def described(mindspore_data: Path, tmp_path: Path) -> Callable[[Callable[[Json], None]], reshard.Checkpoint]:
    """Opens a checkpoint of which the metadata of a tensor are changed."""

    def changed(what: Callable[[Json], None]) -> reshard.Checkpoint:
        shutil.copytree(root_of(mindspore_data, SPLIT), tmp_path / SPLIT)
        metadata = tmp_path / SPLIT / "checkpoint/iteration_00000004/metadata.json"
        content = json.loads(metadata.read_text())
        what(content["state_dict_metadata"][EMBEDDING]["layout"])
        metadata.write_text(json.dumps(content))
        return reshard.open(tmp_path / SPLIT / "checkpoint")

    return changed


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("suffix", ["ckpt", "json"])
def test_rank_files_have_the_same_blocks(mindspore_data: Path, tmp_path: Path, name: str, suffix: str) -> None:
    """Through the file, in both formats: rank by rank what the Checkpoint 2.0 has, and together the whole tensors."""
    root, file = root_of(mindspore_data, name), tmp_path / f"s.{suffix}"
    source = reshard.open(root / "checkpoint")
    made = source.to_strategy()
    assert not any(placed.layout.opt_weight_shard_size for places in made.tensors.values() for placed in places)
    reshard.write_strategy(made, file)
    read = reshard.read_strategy(file)
    reshard.plan(source, read, to="safetensors").run(tmp_path / "ranks", fsync=False)
    full = np.load(root / "full.npz")
    found = reshard.open(tmp_path / "ranks", strategy=file)
    assert set(found) == set(source)
    for tensor in found:
        assert found[tensor].compute().tobytes() == full[tensor].tobytes(), tensor
    if name.endswith("_once"):
        return
    for rank in sorted(set(source.ranks)):
        held: dict[str, Any] = {}
        for path in max((root / "checkpoint").glob("iteration_*")).glob(f"*-{rank:07d}-*.safetensors"):
            held |= helpers.read_rank_file(path)
        (path,) = (tmp_path / f"ranks/rank_{rank}").glob("*.safetensors")
        assert helpers.read_rank_file(path) == held, rank


def test_stages_and_what_they_share(mindspore_data: Path) -> None:
    for name in ("graph_tied_pp2", "graph_tied_pp2_zero_once"):  # of the latter stage 1 has no file with it
        made = reshard.open(root_of(mindspore_data, name) / "checkpoint").to_strategy()
        assert (made.stages, made.devices, made.merged) == (range(2), 4, True)
        assert made.stages_of(EMBEDDING) == (0, 1)
        assert made.stages_of("decoder.layers.1.mlp.linear_fc1.weight") == (1,)
        assert "global_step" not in made.tensors


def test_a_mesh_that_is_repeated_in_a_stage(described: Callable[..., reshard.Checkpoint]) -> None:
    found = described(lambda layout: layout.update(device_matrix=[4], rank_list=[0, 1, 2, 3], tensor_map=[0, -1]))
    (placed,) = found.to_strategy().tensors[EMBEDDING]
    assert placed.layout == Layout.of([2, 4], [0, -1])


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        (
            lambda layout: layout.update(rank_list=[4, 5, 6, 7, 0, 1, 2, 3]),
            "not-whole-stages",
            "ranks 4-7,0-3",
        ),
        (
            lambda layout: layout.update(device_matrix=[4], rank_list=[1, 2, 3, 4], tensor_map=[0, -1]),
            "unknown-blocks",
            "ranks",
        ),
        (lambda layout: layout.update(interleaved_parallel=True), "unreadable-tensor", "interleaved"),
    ],
)
def test_what_no_strategy_can_say_is_refused_by_name(
    described: Callable[..., reshard.Checkpoint], what: Callable[[Json], None], code: str, said: str
) -> None:
    found = described(what)
    with refused(SourceError, code, f"tensor '{EMBEDDING}'", said, f"drop='{EMBEDDING}'"):
        found.to_strategy()
    made = found.to_strategy(drop=["embedding.*"])
    assert set(found) - set(made.tensors) - {EMBEDDING} == {"global_step"}


def test_lost_blocks_are_refused_by_name(mindspore_data: Path) -> None:
    found = reshard.open(root_of(mindspore_data, "pynative_submesh_once") / "checkpoint")
    with refused(SourceError, "unreadable-tensor", "decoder.final_layernorm.weight", "lacks 1", "its 2"):
        found.to_strategy()
    assert "output_layer.weight" in found.to_strategy(drop=["*norm.weight"]).tensors


def test_of_what_has_a_strategy_and_of_what_has_none(tmp_path: Path, mindspore_data: Path) -> None:
    source = reshard.open(root_of(mindspore_data, "graph_1") / "checkpoint")
    with refused(UsageError, "no-layout"):
        source.to_strategy()
    cut = Strategy.of({EMBEDDING: Layout.of([2], [0, -1]), "output_layer.weight": Layout.of([2], [-1, 0])})
    selection = reshard.Selection(include=tuple(cut.tensors))
    reshard.plan(source, cut, selection=selection).run(tmp_path / "ranks")
    target = reshard.open(tmp_path / "ranks")
    assert target.to_strategy().tensors.keys() == cut.tensors.keys()
    assert list(target.to_strategy(drop=["out*"]).tensors) == [EMBEDDING]
    with refused(UsageError, "no-match"):
        target.to_strategy(drop=["output_layers.*"])


def test_the_command(mindspore_data: Path, tmp_path: Path) -> None:
    root = root_of(mindspore_data, "graph_tied_pp2_zero_once") / "checkpoint"
    file = tmp_path / "s.ckpt"
    shown = done("strategy", "make", "--like", root, "-o", file, "--drop", "adam_*")
    assert f"wrote {file}: 12 tensors over 8 ranks in 2 stages" in shown.stdout
    done("convert", root, tmp_path / "ranks", "--target-strategy", file)
    assert reshard.verify(tmp_path / "ranks").equal
    failed(6, "already-exists", "strategy", "make", "--like", root, "-o", file, places=("s.ckpt",))
    shown = done("strategy", "make", "--like", root, "-o", tmp_path / "s.json", "--step", "4")
    assert "has nested layouts, as that of embedding.word_embeddings.weight; MindSpore 2.10 does not" in shown.stderr
    for place in (root / "latest_checkpointed_iteration.txt", root / "iteration_00000004/metadata.json"):
        failed(6, "target-is-source", "strategy", "make", "--like", root, "-o", place, "--overwrite", places=(place,))
