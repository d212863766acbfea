"""Objects of distributed checkpoints, and what Megatron keeps beside: as plain data, nothing imported or called."""

from __future__ import annotations

import argparse
import collections
import json
import pickle
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from checkpoints import numbers
from commands import done
from dcp_files import item, saved, write_torch
from refusals import refused

import reshard
from reshard.core.model.checkpoint import TensorSpec
from reshard.dtypes import BY_NAME
from reshard.errors import SourceError
from reshard.formats.checkpoint2.options import Checkpoint2
from reshard.kits.torch import objects as module
from reshard.kits.torch.pickles import Name, PickledObject

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FULL = numbers({"w": (6, 4)})
W = ("w", ((0, 0), (6, 4)), item(FULL["w"]))

KINDS = {
    "list.2": 5, "objects.int": 3, "objects.float": 0.5, "objects.none": None, "objects.text": "héllo",
    "objects.bytes": b"\x00\x01", "objects.tuple": (1, 2), "objects.set": {1, 2}, "objects.ordered.a": 1,
    "objects.list": [1, [2, 3]], "objects.size": (2, 3), "objects.dtype": Name("torch", "bfloat16"),
}  # fmt: skip
GROUP = {
    "lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-08, "weight_decay": 0.01, "amsgrad": False, "maximize": False,
    "foreach": False, "capturable": False, "differentiable": False, "fused": None, "decoupled_weight_decay": True,
    "params": [
        "emb.weight", "layers.0.norm.weight", "layers.0.norm.bias", "layers.0.up.weight", "layers.0.up.bias",
        "layers.0.down.weight",
    ],
}  # fmt: skip
COMMON = {
    "optimizer": {"param_groups": [{"lr": 0.01, "step": 5}]}, "iteration": 5, "checkpoint_version": 3.0,
    "args": {"num_layers": 4}, "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable"},
}  # fmt: skip


@pytest.fixture
def opened(mindspore_data: Path) -> Callable[[str], reshard.Checkpoint]:
    return lambda name: reshard.open(mindspore_data / "dcp" / name / "checkpoint")


def of(tmp_path: Path, **objects: bytes) -> reshard.Checkpoint:
    return reshard.open(write_torch(tmp_path / "src", FULL, {0: [W]}, objects=objects))


def test_real_ones_are_plain_data(opened: Callable[[str], reshard.Checkpoint]) -> None:
    found = opened("kinds")
    assert {name: found.read_object(name) for name in found._record.extras.objects} == KINDS
    found = opened("fsdp2_uneven")
    group = "optim.param_groups.0."
    members = [name for name in found._record.extras.objects if name.startswith(group)]
    assert {name.removeprefix(group): found.read_object(name) for name in members} == GROUP
    assert found._record.extras.paths
    assert found._record.extras.paths["optim.param_groups.0.lr"] == ("optim", "param_groups", 0, "lr")
    with pytest.raises(KeyError, match="nothing"):
        found.read_object("nothing")


def test_what_megatron_keeps_beside(opened: Callable[[str], reshard.Checkpoint]) -> None:
    found = opened("mcore_tp2_pp2")
    assert set(found._record.extras.beside) == {"common.pt", "metadata.json"}
    assert found.read_object("common.pt") == COMMON
    assert found.read_object("metadata.json")["sharded_backend"] == "torch_dist"
    assert found.read_object("decoder.layers.mlp.linear_fc1._extra_state/shard_2_4") == [None]
    assert not found.warnings
    assert found._record.extras.paths is None
    assert Checkpoint2().of(found._record).step == 5


def test_they_are_shown(mindspore_data: Path) -> None:
    data = {
        name: json.loads(done("inspect", mindspore_data / "dcp" / name / "checkpoint", "--json").stdout)
        for name in ("mcore_moe_ep2", "mcore_layers_apart", "kinds")
    }
    assert data["mcore_moe_ep2"]["training"] == {"iteration": 5, "optimizer": "fully_reshardable"}
    stacked = {one["name"]: one["stacked"] for one in data["mcore_moe_ep2"]["tensors"]}
    assert stacked["decoder.layers.mlp.experts.experts.linear_fc2.weight"] == ["layer", "expert"]
    assert stacked["optimizer.state.exp_avg.decoder.layers.mlp.router.weight"] == ["layer"]
    assert stacked["output_layer.weight"] == []
    assert not any(one["stacked"] for one in data["mcore_layers_apart"]["tensors"])
    assert data["kinds"]["objects"]["objects.set"] == "{1, 2}"
    assert data["kinds"]["objects"]["objects.dtype"] == "<torch.bfloat16>"
    assert data["kinds"]["training"] == {}


def test_arguments_of_megatron(tmp_path: Path) -> None:
    """The vocabulary as it is and as it is padded, in what one version keeps in a file and the next in an object."""
    some = argparse.Namespace(vocab_size=13, padded_vocab_size=16, tensor_model_parallel_size=2, lr=0.1)
    common = {"args": some, "iteration": 7}
    write_torch(tmp_path, FULL, {0: [W]}, planner_data=None, objects={"common_state/shard_0_1": saved([common])})
    (tmp_path / "metadata.json").write_text("{}")

    def training() -> Any:
        return json.loads(done("inspect", tmp_path, "--json").stdout)["training"]

    first = training()
    assert first["iteration"] == 7
    assert {13, 16, 2} <= set(first.values())
    (tmp_path / "common.pt").write_bytes(saved({**common, "iteration": 8}))
    assert training() == first | {"iteration": 8}
    (tmp_path / "common.pt").write_bytes(b"no")
    assert training() == first


class Called:
    """Pickled as a call that would leave a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("called", "w")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (collections.OrderedDict(a=[1, {"b": (2.5, True)}]), {"a": [1, {"b": (2.5, True)}]}),
        (argparse.Namespace(a=1, b=None), {"a": 1, "b": None}),
        ([b"", b"\xff\x00", "é"], [b"", b"\xff\x00", "é"]),
        ({(1, ("a",)): {2, "b"}}, {(1, ("a",)): {2, "b"}}),
        (-(2**70), -(2**70)),
    ],
)
def test_plain_data_of_any_kind(tmp_path: Path, value: Any, expected: Any) -> None:
    found = of(tmp_path, o=saved(value)).read_object("o")
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("value", ["x" * 70_000, {"a": [b"y" * 70_000]}, {"z" * 70_000: 1}])
def test_a_long_text_is_said_not_to_be_held(tmp_path: Path, value: Any) -> None:
    source = of(tmp_path, o=saved(value))
    with refused(SourceError, "unsupported-object", "object 'o'", "70.0 kB"):
        source.read_object("o")


def test_nothing_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = of(tmp_path, o=saved({"a": [Called()]}))
    found = source.read_object("o")["a"][0]
    assert isinstance(found, PickledObject)
    assert (found.name, found.arguments) == ("open", ("called", "w"))
    assert "not a tensor: o: {'a': [<" in done("inspect", source.root).stdout
    assert not (tmp_path / "called").exists()


def test_tensors_in_objects_are_described(tmp_path: Path) -> None:
    source = of(tmp_path, o=item(FULL["w"], wrapped="_rebuild_parameter"), bad=item(FULL["w"], first=9))
    assert source.read_object("o") == TensorSpec("", BY_NAME["float32"], (6, 4))
    assert isinstance(source.read_object("bad"), PickledObject)
    assert "not a tensor: o: tensor float32 [6, 4]" in done("inspect", source.root).stdout


def changed(content: bytes) -> bytes:
    at = content.index(b"word")
    return content[:at] + b"W" + content[at + 1 :]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (changed(saved("word")), "wrong-checksum"),
        (saved("word")[:-1], "not-torch-save"),
        (b"", "not-torch-save"),
        (saved({float("nan"): 1}), "unsupported-object"),
        (pickle.dumps(1), "not-torch-save"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, content: bytes, code: str) -> None:
    source = of(tmp_path, o=content)
    with refused(SourceError, code, f"{source.root}: object 'o'"):
        source.read_object("o")
    done("inspect", source.root)


def without_sums(content: bytes, name: bytes) -> bytes:
    """Put 0 for the sums of a record, in its header and in the directory."""
    found = bytearray(content)
    for mark, place, of_name in ((b"PK\x03\x04", 14, 30), (b"PK\x01\x02", 16, 46)):
        at = found.index(name)
        while found[at - of_name :][:4] != mark:
            at = found.index(name, at + 1)
        begin = at - of_name + place
        found[begin : begin + 4] = bytes(4)
    return bytes(found)


def test_sums_may_be_left_out(tmp_path: Path) -> None:
    """As `torch.serialization.set_crc32_options(False)` does: all are 0. One alone that is 0 is wrong."""
    content = without_sums(saved("word"), b"archive/data.pkl")
    with refused(SourceError, "wrong-checksum", "'archive/data.pkl'"):
        of(tmp_path / "one", o=content).read_object("o")
    assert of(tmp_path / "all", o=without_sums(content, b"archive/version")).read_object("o") == "word"


def test_many_are_looked_at_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = saved("word")
    source = of(tmp_path, a=one, b=one, c=one)
    monkeypatch.setattr("reshard.core.model.objects._MOST_SHOWN", 2 * len(one))
    shown = module.SavedObjects(source._record).shown()
    assert list(shown.values()) == ["'word'", "'word'", f"an object of {len(one)} B, which was not looked at"]


def test_objects_of_ranks_that_each_have_one(tmp_path: Path, mindspore_data: Path) -> None:
    root = shutil.copytree(mindspore_data / "dcp" / "rank_local" / "checkpoint", tmp_path / "src")
    source = reshard.open(root)
    assert source.warnings == ("several ranks have an object n each; that of the first rank is taken",)
    assert source._record.extras.objects["n"].path == f"{root}/__0_0.distcp"
    assert type(source.read_object("n")) is int


def test_a_file_that_has_objects_alone_is_not_stale(tmp_path: Path) -> None:
    write_torch(tmp_path, FULL, {0: [], 1: [W]}, objects={"o": saved(1)})
    found = reshard.open(tmp_path)
    assert not found.warnings
    assert [len(file.index.entries) for file in found._record.files] == [0, 1]
    assert found.read_object("o") == 1
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    with refused(SourceError, "truncated", "object 'o'", "__0_0.distcp"):
        found.read_object("o")
    with refused(SourceError, "truncated", "__0_0.distcp", "0 bytes"):
        reshard.open(tmp_path)
    (tmp_path / "__0_0.distcp").unlink()
    with refused(SourceError, "missing-file", "__0_0.distcp", ".metadata"):
        reshard.open(tmp_path)


def test_encoded_ones_are_not_read(tmp_path: Path) -> None:
    write_torch(tmp_path, FULL, {0: [W]}, objects={"o": saved(1)}, coded=["stream.zstd/1"])
    with refused(SourceError, "unreadable-object", "object 'o'", "'stream.zstd/1'"):
        reshard.open(tmp_path).read_object("o")
