"""Rules give what Megatron-Core and MindSpore Transformers made of the same weights: both ways, any files to any."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import helpers
import ml_dtypes
import numpy as np
import pytest
from checkpoints import assert_rank_files, dtype_name, write_file, write_ranks
from truths import CASES, STATE, Truth, assert_arrays, made, truth
from written_dcp import assert_whole

import reshard
from reshard import Checkpoint2, HuggingFaceSet, Layout, Selection, Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from helpers import Array


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest, mindspore_data: Path) -> Truth:
    return truth(mindspore_data, request.param)


def tensor_parallel(full: Mapping[str, Array], *, stages: int = 1) -> Strategy:
    """Rows of norms are whole, of all else in two, columns of outputs likewise; layers in stages."""
    layouts: dict[str, Any] = {}
    for name, value in full.items():
        outputs = any(part in name for part in ("o_proj", "down_proj", "linear_proj", "fc2"))
        cut = value.ndim - 1 if outputs else value.ndim - 2
        whole = value.ndim < 2 or value.shape[cut] % 2
        layout = Layout.of([2], [0 if axis == cut and not whole else -1 for axis in range(value.ndim)])
        layouts[name] = layout if stages == 1 else {int("layers.1." in name): layout}
    return Strategy.of(layouts)


def read_set(root: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What the files of a directory have, by the library of safetensors."""
    found = {}
    for path in sorted(root.glob("*.safetensors")):
        found |= helpers.read_rank_file(path)
    return found


def bits_of(full: Mapping[str, Array]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        name: (dtype_name(value), value.shape, np.ascontiguousarray(value).tobytes()) for name, value in full.items()
    }


def of_dtypes(full: Mapping[str, Array]) -> dict[str, Array]:
    return {name: value.view(ml_dtypes.bfloat16) if value.dtype == np.uint16 else value for name, value in full.items()}


def test_from_what_megatron_wrote_and_back(case: Truth, tmp_path: Path) -> None:
    """Its sharded files give those of Hugging Face, and these its whole tensors."""
    source = reshard.open(case.checkpoint)
    derived = source.derive(case.rules)
    assert_arrays(derived, case.hf)
    selection = Selection(rules=case.rules)
    reshard.plan(source, files=HuggingFaceSet(), format="safetensors", selection=selection).run(
        tmp_path / "hf", fsync=False
    )
    assert read_set(tmp_path / "hf") == bits_of(case.hf)
    assert reshard.verify(tmp_path / "hf").equal, "by what the ledger says that it was made from"
    assert reshard.verify(tmp_path / "hf", against=source, selection=selection).equal
    back = reshard.open(tmp_path / "hf").derive(case.rules)
    assert_arrays(back, case.back)
    reshard.plan(back, format="dcp").run(tmp_path / "dcp", fsync=False)
    assert_whole(tmp_path / "dcp", of_dtypes(case.back))
    assert reshard.verify(tmp_path / "dcp").equal
    assert reshard.verify(tmp_path / "dcp", against=back).equal


@pytest.mark.parametrize("format", ["safetensors", "ckpt"])
def test_between_rank_files(case: Truth, tmp_path: Path, format: str) -> None:
    """Rows in two, in stages on one side; each rank's file has its slices of what the other program has."""
    hf, mcore = tensor_parallel(case.hf, stages=2), tensor_parallel(case.back)
    selection = Selection(rules=case.rules)
    source = reshard.open(write_ranks(tmp_path / "hf", case.hf, hf, format), strategy=hf)
    reshard.plan(source, mcore, selection=selection).run(tmp_path / "mcore", fsync=False)
    assert_rank_files(tmp_path / "mcore", case.back, mcore)
    assert reshard.verify(tmp_path / "mcore").equal
    source = reshard.open(tmp_path / "mcore", strategy=mcore)
    reshard.plan(source, hf, selection=selection).run(tmp_path / "back", fsync=False)
    assert_rank_files(tmp_path / "back", case.hf, hf)
    assert reshard.verify(tmp_path / "back", hf, against=source, selection=selection).equal


def test_to_every_kind_of_target(mindspore_data: Path, tmp_path: Path) -> None:
    case = truth(mindspore_data, "mcore_moe_ep2")
    hf = tensor_parallel(case.hf)
    source = reshard.open(write_ranks(tmp_path / "hf", case.hf, hf), strategy=hf)
    derived, layouts = source.derive(case.rules), tensor_parallel(case.back)
    reshard.plan(derived, format="zarr").run(tmp_path / "zarr", fsync=False)
    assert_arrays(reshard.open(tmp_path / "zarr"), case.back)
    reshard.plan(derived, layouts, format="dcp").run(tmp_path / "dcp", fsync=False)
    assert_whole(tmp_path / "dcp", of_dtypes(case.back))
    reshard.plan(derived, layouts, files=Checkpoint2(step=4), format="safetensors").run(
        tmp_path / "checkpoint2", fsync=False
    )
    assert_arrays(reshard.open(tmp_path / "checkpoint2"), case.back)
    for target in ("zarr", "dcp", "checkpoint2"):
        assert reshard.verify(tmp_path / target).equal, target
        assert_arrays(reshard.open(tmp_path / target).derive(case.rules), case.hf)


def test_a_state_alone_and_some_tensors(mindspore_data: Path, tmp_path: Path) -> None:
    """`sel` before and behind rules, and a selection with them: names are those that the rules make."""
    case = truth(mindspore_data, "mcore_tp2_pp2")
    source = reshard.open(case.checkpoint)
    states = source.sel("optimizer.*").derive(case.rules)
    assert_arrays(states, {name: value for name, value in case.hf.items() if name.startswith(STATE)})
    some = source.derive(case.rules).sel("*.2.*.q_proj.*")
    expected = {name: value for name, value in case.hf.items() if ".2." in name and "q_proj" in name}
    assert_arrays(some, expected)
    reshard.plan(some).run(tmp_path / "some", fsync=False)
    assert read_set(tmp_path / "some" / "rank_0") == bits_of(expected)
    assert reshard.verify(tmp_path / "some").equal
    selection = Selection(
        rules=case.rules,
        include=("*.2.*.q_proj.*",),
        name_map={"*model.layers.*": "*net.layers.*"},
        cast={"float32": "float64"},
    )  # fmt: skip
    reshard.plan(source, selection=selection).run(tmp_path / "renamed", fsync=False)
    found = read_set(tmp_path / "renamed" / "rank_0")
    assert {name.replace("net.", "model.") for name in found} == set(expected)
    assert {dtype for dtype, _, _ in found.values()} == {"bfloat16", "float64"}
    assert reshard.verify(tmp_path / "renamed").equal


# --- MindSpore Transformers' conversions of single tensors --------------------------------------------------------

FUSED = """
reshard-rules: 1
sides: [hf, mf]
rules:
  - hf:
      - model.layers.{l}.self_attn.q_proj.weight
      - model.layers.{l}.self_attn.k_proj.weight
      - model.layers.{l}.self_attn.v_proj.weight
    mf:
      interleave: decoder.layers.{l}.self_attention.linear_qkv.weight
      groups: groups
      sizes: [heads / groups * head, head, head]
  - hf: ["model.layers.{l}.mlp.experts.{e}.gate_proj.weight", "model.layers.{l}.mlp.experts.{e}.up_proj.weight"]
    mf: {concat: "decoder.layers.{l}.mlp.experts.weight1", axis: 1, by: {e: experts}, flat: true, transposed: true}
  - hf: model.layers.{l}.mlp.experts.{e}.down_proj.weight
    mf: {transpose: "decoder.layers.{l}.mlp.experts.weight2", by: {e: experts}, flat: true}
  - hf: ["model.layers.{l}.mlp.gate_proj.weight", "model.layers.{l}.mlp.up_proj.weight"]
    mf: {VERB: "decoder.layers.{l}.mlp.linear_fc1.weight"}
"""


@pytest.mark.parametrize(("verb", "order"), [("concat", "plain"), ("interleave", "interleaved")])
@pytest.mark.parametrize("format", ["safetensors", "ckpt"])
def test_conversions_of_mindspore_transformers(
    mindspore_data: Path, tmp_path: Path, verb: str, order: str, format: str
) -> None:
    folder = mindspore_data / "checkpoint2"
    numbers = json.loads((folder / "fused.json").read_text())
    of_qkv = numbers["decoder.layers.0.self_attention.linear_qkv.weight"]
    rules = made(
        FUSED.replace("VERB", verb), heads=of_qkv["num_attention_heads"], groups=of_qkv["num_query_groups"],
        head=of_qkv["kv_channels"], experts=numbers["decoder.layers.0.mlp.experts.weight1"]["num_moe_experts"],
    )  # fmt: skip
    sides: dict[str, dict[str, Array]] = {"hf": {}, "mf": {}}
    for name, value in np.load(folder / "fused.npz").items():
        side, _, rest = name.partition("/")
        stem, _, kind = rest.partition("/")
        if kind in {"", order}:
            sides[side][stem] = value
    for side, other in (("hf", "mf"), ("mf", "hf")):
        one = reshard.open(write_file(tmp_path / f"{side}.{format}", sides[side], format))
        assert_arrays(one.derive(rules), sides[other])
        for cut in (0, 1):
            strategy = Strategy.of({
                name: Layout.of([2], [0 if axis == cut and not value.shape[cut] % 2 else -1 for axis in range(2)])
                for name, value in sides[side].items()
            })  # fmt: skip
            root = write_ranks(tmp_path / f"{side}_{cut}", sides[side], strategy, format)
            ranks = reshard.open(root, strategy=strategy)
            assert_arrays(ranks.derive(rules), sides[other])
            reshard.plan(ranks, selection=Selection(rules=rules)).run(tmp_path / f"{side}_{cut}_out", fsync=False)
            assert_rank_files(tmp_path / f"{side}_{cut}_out", sides[other], None)
            assert reshard.verify(tmp_path / f"{side}_{cut}_out").equal
