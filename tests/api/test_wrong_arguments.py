"""A wrong argument of a public function is refused by its name; none is ignored."""

from __future__ import annotations

import inspect
from enum import Enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import write_file
from refusals import refused

import reshard
from reshard import Checkpoint, Plan, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


# ruff: noqa: ARG005 -- each call takes what it needs

HERE: Any = "nowhere"
ANY: Any = reshard

CALLS: list[tuple[str, Callable[[Any], object]]] = [
    ("path", lambda on: ANY.open(5)),
    ("path", lambda on: ANY.open({})),
    ("path", lambda on: ANY.open({-1: "a"})),
    ("strategy", lambda on: ANY.open(HERE, strategy=5)),
    ("layout", lambda on: ANY.open(HERE, layout={1: 2})),
    ("suffix", lambda on: ANY.open(HERE, suffix=5)),
    ("stage", lambda on: ANY.open(HERE, stage="first")),
    ("partial", lambda on: ANY.open(HERE, partial="yes")),
    ("step", lambda on: ANY.open(HERE, step="last")),
    ("cipher", lambda on: ANY.open(HERE, cipher="0123456789abcdef")),
    ("contents", lambda on: ANY.open(HERE, contents="some")),
    ("source", lambda on: ANY.plan(HERE)),
    ("target_strategy", lambda on: ANY.plan(on.source, 5)),
    ("to", lambda on: ANY.plan(on.source, to=5)),
    ("name", lambda on: on.source.array(5)),
    ("bins", lambda on: on.source.hist("w", True)),
    ("ranks", lambda on: ANY.plan(on.source, ranks=5)),
    ("selection", lambda on: ANY.plan(on.source, selection={"include": ["w"]})),
    ("include", lambda on: ANY.plan(on.source, include=5)),
    ("rules", lambda on: ANY.plan(on.source, rules=5)),
    ("lora", lambda on: ANY.plan(on.source, lora=5)),
    ("memory", lambda on: ANY.plan(on.source, memory=[])),
    ("threads", lambda on: ANY.plan(on.source, threads=0)),
    ("threads", lambda on: on.plan.run(on.out, threads="2")),
    ("directory", lambda on: on.plan.run(5)),
    ("client", lambda on: on.plan.run(on.out, client=5)),
    ("progress", lambda on: on.plan.run(on.out, progress=5)),
    ("overwrite", lambda on: on.plan.run(on.out, overwrite="no")),
    ("partition", lambda on: on.plan.graph(on.out, partition=5)),
    ("rank", lambda on: on.plan.rank("0")),
    ("path", lambda on: on.plan.save(5)),
    ("include", lambda on: ANY.Selection(include=5)),
    ("name_map", lambda on: ANY.Selection(name_map=["a=b"])),
    ("weights_only", lambda on: ANY.Selection(weights_only="no")),
    ("weights", lambda on: ANY.average([on.source, on.source], weights="ab")),
    ("checkpoints", lambda on: ANY.average(on.source)),
    ("a", lambda on: ANY.diff(1, 2)),
    ("tolerance", lambda on: ANY.diff(on.source, on.source, tolerance="small")),
    ("target", lambda on: ANY.verify(5)),
    ("progress", lambda on: ANY.verify(HERE, progress=5)),
    ("sample", lambda on: ANY.verify(on.source, against=on.source, sample="5%")),
    ("manifest", lambda on: ANY.verify(HERE, manifest=5)),
    ("source", lambda on: ANY.convert(5, on.out)),
    ("target", lambda on: ANY.convert(on.source, 5)),
    ("to", lambda on: ANY.convert(on.source, on.out, to=5)),
    ("link", lambda on: ANY.convert(on.source, on.out, link="yes")),
    ("arrays", lambda on: ANY.write([np.ones(3)], on.out)),
    ("patterns", lambda on: on.source.sel("w", 5)),
    ("dtype", lambda on: on.source.sel(dtype=5)),
    ("rank", lambda on: on.source.rank("0")),
    ("rules", lambda on: on.source.derive(5)),
    ("lora", lambda on: on.source.merge_lora(5)),
    ("arrays", lambda on: on.source.assign(5)),
    ("factor", lambda on: on.source.scale("w", factor="2")),
    ("dtype", lambda on: on.source.dequantize(5)),
    ("by", lambda on: on.source.groups(5)),
    ("threads", lambda on: on.source.stats(threads=0)),
    ("target", lambda on: on.source.picture("w", target=5)),
    ("chunk_size", lambda on: on.source.to_zarr(on.out, chunk_size=[])),
    ("drop", lambda on: on.source.to_strategy(drop="weight")),
    ("name", lambda on: on.source.read_object(5)),
    ("path", lambda on: ANY.runs(5)),
    ("path", lambda on: ANY.read_plan(5)),
    ("path", lambda on: ANY.read_strategy(5)),
    ("target", lambda on: ANY.Manifest.make(5)),
    ("directory", lambda on: ANY.demo("mindspore", 5)),
    ("max_shard_size", lambda on: ANY.plan(on.source, to="hf", max_shard_size=[])),
    ("compression", lambda on: ANY.plan(on.source, to="zarr", compression=5)),
    ("root", lambda on: ANY.LoRA(5)),
    ("rule", lambda on: ANY.Layout.parse(5, 1, 1)),
    ("layouts", lambda on: ANY.Strategy.of({"w": 5})),
    ("dev_matrix", lambda on: ANY.Layout.of("x", [1])),
    ("threads", lambda on: on.plan.run(on.out, threads=0)),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("source") / "a.safetensors"
    write_file(path, {"w": np.ones((4, 4), "float32")})
    return reshard.open(path)


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[f"{number}-{name}" for number, (name, _) in enumerate(CALLS)])
def test_a_wrong_argument_is_named(
    source: Checkpoint, tmp_path: Path, name: str, call: Callable[[Any], object]
) -> None:
    on = SimpleNamespace(source=source, plan=reshard.plan(source), out=str(tmp_path / "out"))
    with pytest.raises(UsageError, match=rf"\b{name}\b"):
        call(on)
    assert not any(tmp_path.iterdir())


def test_every_public_function_checks_its_arguments() -> None:
    public = {name: getattr(reshard, name) for name in reshard.__all__}
    functions = {name: value for name, value in public.items() if inspect.isfunction(value)}
    functions |= {
        f"{kind.__name__}.{name}": value
        for kind in (Checkpoint, Plan)
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and not name.startswith("_") and len(inspect.signature(value).parameters) > 1
    }
    unchecked = {name for name, function in functions.items() if not hasattr(function, "__wrapped__")}
    assert unchecked == set()


@pytest.mark.parametrize("option", [{"suffix": ".ckpt"}, {"rank_pattern": "node_{rank}/*"}])
def test_files_that_are_given_are_not_looked_for(source: Checkpoint, option: dict[str, str]) -> None:
    with refused(UsageError, "no-effect", next(iter(option))):
        reshard.open({0: source.root}, **option)  # type: ignore[arg-type]


def test_subclasses_and_numbers_of_numpy_are_accepted(source: Checkpoint, tmp_path: Path) -> None:
    report = reshard.plan(source, ranks=None, threads=np.int64(1)).run(tmp_path / "out", fsync=np.bool_(False))  # type: ignore[arg-type]
    assert report.bytes_written
    assert "w" in source.sel(*np.array(["w"]))
    other: Any = 5
    assert source.get(other) is None


NAMES: dict[str, Callable[[], Any]] = {
    "array": lambda: np.array(["w"]),
    "pandas": lambda: pytest.importorskip("pandas").Index(["w"]),
    "generator": lambda: (name for name in ["w"]),
    "keys": {"w": 1}.keys,
    "enum": lambda: [Words.W],
}


class Words(str, Enum):  # noqa: UP042 -- a StrEnum's `str` is its text
    """Texts whose `str` is another."""

    W = "w"


@pytest.mark.parametrize("kind", NAMES)
def test_collections_of_other_libraries_are_those_of_python(tmp_path: Path, kind: str) -> None:
    write_file(tmp_path / "a.safetensors", {"w": np.ones(4, "float32"), "v": np.ones(4, "float32")})
    reshard.convert(tmp_path / "a.safetensors", tmp_path / "out", to="hf", include=NAMES[kind]())
    assert list(reshard.open(tmp_path / "out")) == ["w"]


def test_numbers_of_numpy_reach_files_as_those_of_python(source: Checkpoint, tmp_path: Path) -> None:
    step: Any = np.int64(3)
    reshard.convert(source.root, tmp_path / "dcp", to="dcp", target_step=step, memory=np.int64(10**9))  # type: ignore[arg-type]
    assert reshard.open(tmp_path / "dcp").read_object("metadata.json")["sharded_backend"] == "torch_dist"
    layout = reshard.Layout.of(np.array([2]), np.array([0, -1]))
    assert layout == reshard.Layout.of([2], [0, -1])
    strategy = reshard.Strategy.of({"w": layout})
    reshard.write({"w": np.ones((4, 4))}, tmp_path / "ranks", target_strategy=strategy, ranks=np.array([1]))
    reshard.plan(source, strategy, ranks=[np.int64(0)], to="ckpt").save(tmp_path / "plan.json")
    scaled = source.scale("w", factor=np.float32(2))
    reshard.plan(scaled, to="safetensors").run(tmp_path / "scaled")
    assert [path.name for path in (tmp_path / "ranks").iterdir() if path.name.startswith("rank")] == ["rank_1"]


@pytest.mark.parametrize(
    "options",
    [
        {"cipher": "S3CR3T"}, {"storage_options": "S3CR3T"}, {"storage_options": [("key", "S3CR3T")]},
        {"storage_options": {5: "S3CR3T"}},
    ],
)  # fmt: skip
def test_no_message_shows_a_secret(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        reshard.open(HERE, **options)
    assert caught.value.code == "bad-argument"
    assert "S3CR3T" not in str(caught.value)


def test_options_of_a_path_are_refused_for_an_opened_source(tmp_path: Path) -> None:
    reshard.write({"w": np.ones(3, np.float32)}, tmp_path / "hf")
    source = reshard.open(tmp_path / "hf")
    with refused(UsageError, "no-effect", "source_strategy"):
        reshard.convert(source, tmp_path / "out", to="dcp", source_strategy="strategy.ckpt")
    assert not (tmp_path / "out").exists()
