"""Plan files: what is planned here runs there, byte for byte, or is refused with a sentence that says why."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import helpers
import numpy as np
import pytest
from checkpoints import numbers, plan_with, tree, write_file, write_ranks
from generators import Model, models
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import failed, refused
from samples import examples, sampled

import reshard
from reshard import Layout, Selection, Strategy
from reshard.core.model.digests import pages_digest
from reshard.core.model.entries import ShardFiles, SomeFiles
from reshard.core.plan.make import plan_convert
from reshard.core.plan.plan import plan_digest
from reshard.core.plan.planfile import read, save
from reshard.core.storage.local import local_store
from reshard.errors import PlanError, ReshardError, SourceError, TargetError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, COLUMNS = Layout.of([4], [0, -1]), Layout.of([4], [-1, 0])
SHAPES = {"layers.0.w": (8, 8), "layers.1.w": (8, 8), "moments.layers.0.w": (8, 8), "b": (8,)}
SOURCE = Strategy.of({name: ROWS if len(shape) > 1 else Layout.of([4], [-1]) for name, shape in SHAPES.items()})
MESH = Layout.of([2, 3], [-1, -1])
TARGET = Strategy.of(
    {
        "layers.0.w": Layout.of([2, 2], [0, -1]),
        "layers.1.w": Layout.of([2, 2], [-1, 1], -1),
        "moments.layers.0.w": Layout.of([2, 2], [(1, 0), -1]),
        "b": Layout.of([2, 2], [-1]),
    }
)
RENAMED = Strategy.of({f"model.{n}.w": Layout.of([2], [-1, 0]) for n in range(2)})

KINDS: dict[str, dict[str, Any]] = {
    "other layouts": {"target_strategy": TARGET},
    "whole": {},
    "ckpt": {"target_strategy": TARGET, "to": "ckpt", "prefix": "net-"},
    "some ranks": {"target_strategy": TARGET, "ranks": [3, 1]},
    "mindspore set": {"to": "mindspore", "max_shard_size": 300},
    "hugging face set": {"to": "hf", "max_shard_size": 300},
    "stored once": {"target_strategy": TARGET, "remove_redundancy": True},
    "cast": {"target_strategy": TARGET, "selection": Selection(cast={"float32": "bfloat16"})},
    "selected": {
        "target_strategy": RENAMED,
        "selection": Selection(include=["layers.*@2"], name_map={"layers.*.w": "model.*.w"}, drop=["b"]),
    },
    "weights": {"selection": Selection(weights_only=True, exclude=["*.1.w"], allow_missing=["*"])},
    "missing": {"target_strategy": SOURCE.with_layout("new", ROWS), "allow_missing": ["ne*"]},
    "little memory": {"target_strategy": TARGET, "memory": 60_000_000},
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    also = {"global_step": np.array(7, np.int32), "note": "größe"}
    return write_ranks(tmp_path / "src", numbers(SHAPES), SOURCE, also=also)


@pytest.fixture
def plan(root: Path) -> reshard.Plan:
    return reshard.plan(reshard.open(root, strategy=SOURCE), TARGET)


@pytest.fixture
def saved(plan: reshard.Plan, tmp_path: Path) -> Path:
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def moved(root: Path) -> Path:
    """The source, somewhere else and with other times, as it is on another machine; it is not where it was."""
    there = root.parent / "elsewhere" / "copy"
    shutil.copytree(root, there, copy_function=shutil.copy)  # times are not kept
    shutil.rmtree(root)
    return there


def assert_runs_alike(plan: reshard.Plan, root: Path, folder: Path, **reading: Any) -> reshard.Plan:
    """The plan, saved and read back on a copy of its source, does what it does itself."""
    plan.run(folder / "direct", fsync=False)
    plan.save(folder / "plan.json")
    again = reshard.read_plan(folder / "plan.json", source=moved(root), **reading)
    again.run(folder / "again", fsync=False)
    assert tree(folder / "again") == tree(folder / "direct")
    assert (again.stats, again.ranks, again.format) == (plan.stats, plan.ranks, plan.format)
    assert (again.dropped, again.missing, again.warnings) == (plan.dropped, plan.missing, plan.warnings)
    assert (again._record.band_bytes, again._record.threads) == (plan._record.band_bytes, plan._record.threads)
    again.save(folder / "again.json")
    first, second = (json.loads((folder / name).read_bytes()) for name in ("plan.json", "again.json"))
    assert second["provenance"]["source"].pop("root") != first["provenance"]["source"].pop("root")
    assert second == first
    return again


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_plan_does_the_same_on_a_copy_of_the_source(kind: str, root: Path, tmp_path: Path) -> None:
    options = dict(KINDS[kind])
    plan = reshard.plan(reshard.open(root, strategy=SOURCE), options.pop("target_strategy", None), **options)
    again = assert_runs_alike(plan, root, tmp_path)
    if kind == "linked":
        assert sum(file.link is not None for file in again._record.files) == sum(
            file.link is not None for file in plan._record.files
        )
    if kind == "missing":
        assert again.missing == ("new",)
    if kind == "little memory":
        assert again.stats.peak_memory <= 60_000_000


def test_copies_of_which_every_rank_has_its_own(tmp_path: Path) -> None:
    strategy = Strategy.of({"w": ROWS})
    for rank in range(4):
        tensors = {"w": np.full((2, 8), rank, np.float32), "seed": np.arange(rank, rank + 9), "text": f"rank {rank}"}
        write_file(tmp_path / "src" / f"rank_{rank}" / "a.safetensors", tensors)
    source = reshard.open(tmp_path / "src", strategy=strategy, layout={"seed": "copy"})
    assert source.tensors["seed"].varies
    assert source.warnings
    assert_runs_alike(reshard.plan(source, Strategy.of({"w": COLUMNS})), tmp_path / "src", tmp_path)


def test_a_choice_of_tensors(root: Path, tmp_path: Path) -> None:
    chosen = reshard.open(root, strategy=SOURCE).sel("layers.*", "note")
    again = assert_runs_alike(reshard.plan(chosen, TARGET), root, tmp_path)
    assert (list(again._record.source.tensors), again._record.source.left_out) == (
        list(chosen),
        chosen._record.left_out,
    )


def test_layouts_by_rule_and_ranks_that_are_not_there(tmp_path: Path) -> None:
    strategy = Strategy.of({"w": Layout.of([2, 2], [0, -1])})
    full = numbers({"w": (8, 8), "frozen": (4, 4)})
    rules = {"frozen": "split:0"}
    every = strategy.with_layout("frozen", Layout.of([4], [0, -1]))
    root = write_ranks(tmp_path / "a" / "src", full, every)
    source = reshard.open(root, strategy=strategy, layout=rules)
    assert_runs_alike(reshard.plan(source), root, tmp_path / "a")
    root = write_ranks(tmp_path / "b" / "src", {"w": full["w"]}, strategy)
    shutil.rmtree(root / "rank_3")
    source = reshard.open(root, strategy=strategy, partial=True)
    again = assert_runs_alike(reshard.plan(source), root, tmp_path / "b")
    assert again._record.source.opening.partial


@pytest.mark.parametrize("name", sampled([(name,) for name in helpers.case_names() if not name.startswith("lost")], 4))
def test_every_recorded_case(mindspore_data: Path, tmp_path: Path, name: str) -> None:
    case = mindspore_data / "cases" / name
    meta = helpers.load_meta(case)
    before, after = (meta[side]["strategy_file"] for side in ("src", "dst"))
    root = shutil.copytree(case / "src_ckpt", tmp_path / "src")
    source = reshard.open(root, strategy=case / before if before else None)
    target = reshard.read_strategy(case / after) if after else None
    assert_runs_alike(reshard.plan(source, target, drop=["*"], allow_missing=["*"]), root, tmp_path)


def test_one_stage_of_a_pipeline(mindspore_data: Path, tmp_path: Path) -> None:
    case = mindspore_data / "cases" / "pipe_1"
    root = shutil.copytree(case / "src_ckpt", tmp_path / "src")
    plan = reshard.plan(reshard.open(root, strategy=case / "src_strategy.ckpt", stage=1))
    assert plan._record.source.opening.stage == 1
    assert assert_runs_alike(plan, root, tmp_path)._record.files[0].path.endswith("_part1.ckpt")


def test_a_source_of_one_file_and_a_unified_set(root: Path, tmp_path: Path) -> None:
    reshard.plan(reshard.open(root, strategy=SOURCE)).run(tmp_path / "whole")
    reshard.plan(reshard.open(root, strategy=SOURCE), to="mindspore", max_shard_size=300).run(tmp_path / "set")
    one = tmp_path / "whole" / "rank_0" / "checkpoint_0.safetensors"
    plan = reshard.plan(reshard.open(one), TARGET)
    plan.run(tmp_path / "direct")
    plan.save(tmp_path / "plan.json")
    renamed = one.rename(tmp_path / "other name.bin")
    reshard.read_plan(tmp_path / "plan.json", source=renamed).run(tmp_path / "again")
    assert tree(tmp_path / "again") == tree(tmp_path / "direct")
    assert_runs_alike(reshard.plan(reshard.open(tmp_path / "set"), TARGET), tmp_path / "set", tmp_path / "sets")


def test_an_encrypted_source_needs_its_key_again(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    key = b"0123456789ABCDEF"
    cipher = reshard.Cipher("AES-GCM", key)
    for path in write_ranks(tmp_path / "src", numbers(SHAPES), SOURCE, "ckpt").rglob("*.ckpt"):
        path.write_bytes(b"".join(cipher.encrypt([path.read_bytes()])))
    source = reshard.open(tmp_path / "src", strategy=SOURCE, cipher=cipher)
    assert_runs_alike(reshard.plan(source, TARGET), tmp_path / "src", tmp_path, cipher=cipher)
    content = (tmp_path / "plan.json").read_bytes()
    assert key not in content
    assert key.hex().encode() not in content
    with refused(UsageError, "no-key", "cipher=..."):
        reshard.read_plan(tmp_path / "plan.json", source=tmp_path / "elsewhere" / "copy")
    wrong = reshard.Cipher("AES-GCM", bytes(16))
    with refused(SourceError, "wrong-key", "rank_0/checkpoint_0.ckpt"):
        reshard.read_plan(tmp_path / "plan.json", source=tmp_path / "elsewhere" / "copy", cipher=wrong)


@settings(max_examples=examples(40))
@given(model=models(), once=st.booleans())
def test_any_pair_of_strategies(tmp_path_factory: pytest.TempPathFactory, model: Model, once: bool) -> None:
    folder = tmp_path_factory.mktemp("any")
    full = numbers(model.shapes)
    write_ranks(folder / "src", full, model.source)
    try:
        source = reshard.open(folder / "src", strategy=model.source)
        plan = reshard.plan(source, model.target, remove_redundancy=once)
    except ReshardError:
        return
    plan.save(folder / "plan.json")
    again = reshard.read_plan(folder / "plan.json")
    assert plan_digest(again._record) == plan_digest(plan._record)
    assert repr(again._record.files) == repr(plan._record.files)
    assert repr(again._record.transfers) == repr(plan._record.transfers)
    shutil.rmtree(folder)


def test_strategies_of_mindspore_come_back(mindspore_data: Path, tmp_path: Path) -> None:
    """JSON strategies have shapes, expanded ones; what of a strategy moves bytes is all there after reading."""
    seen = 0
    for case in sorted((mindspore_data / "cases").iterdir()):
        for path in sorted(case.glob("*strategy*.json")):
            strategy = reshard.read_strategy(path)
            write_file(tmp_path / "w" / "rank_0" / "a.ckpt", {"x": np.zeros(1)}, "ckpt")
            plan = reshard.plan(reshard.open(tmp_path / "w"), strategy, allow_missing=["*"])
            plan.save(tmp_path / "plan.json", overwrite=True)
            request = reshard.read_plan(tmp_path / "plan.json")._record.request
            assert request is not None
            assert request.target is not None
            assert (request.target.stages, request.target.devices) == (strategy.stages, strategy.devices)
            for name, places in strategy.tensors.items():
                known = [(p.stage, p.layout, p.shape, p.expanded) for p in places]
                assert [(p.stage, p.layout, p.shape, p.expanded) for p in request.target.tensors[name]] == known
            seen += any(p.expanded for places in strategy.tensors.values() for p in places)
    assert seen


def test_the_same_plan_gives_the_same_bytes(plan: reshard.Plan, saved: Path, root: Path, tmp_path: Path) -> None:
    again = reshard.plan(reshard.open(root, strategy=SOURCE), TARGET)
    again.save(tmp_path / "second.json")
    assert (tmp_path / "second.json").read_bytes() == saved.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "second.json", "src"]


def test_it_holds_nothing_of_the_weights(root: Path, saved: Path) -> None:
    content = saved.read_bytes()
    for path in root.rglob("*.safetensors"):
        held = path.read_bytes()
        held = held[8 + int.from_bytes(held[:8], "little") :]
        assert not any(held[at : at + 16] in content for at in range(0, len(held) - 16, 16))


def test_a_plan_of_many_tensors_is_small(tmp_path: Path) -> None:
    names = {f"model.layers.{n}.attention.w{k}.weight": (96, 96) for n in range(100) for k in "qkvo"}
    layouts = [Layout.of([8, 4], [1, 0]), Layout.of([8, 4], [0, -1], -1)]
    source = Strategy.of({name: layouts[n % 2] for n, name in enumerate(names)})
    write_ranks(tmp_path / "src", numbers(names, "int16"), source)
    plan = reshard.plan(reshard.open(tmp_path / "src", strategy=source), Strategy.of(dict.fromkeys(names, MESH)))
    plan.save(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").stat().st_size < 150 * len(names) + 200 * len(plan._record.source.files)


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_bytes())
    change(content)
    path.write_bytes(json.dumps(content).encode())


def source_in(content: dict[str, Any]) -> dict[str, Any]:
    source: dict[str, Any] = content["provenance"]["source"]
    return source


def refuse(path: Path, kind: type[ReshardError], code: str, *places: str, **reading: Any) -> None:
    with refused(kind, code, *places) as caught:
        reshard.read_plan(path, **reading)
    assert caught.type is kind


def test_files_that_are_not_there(saved: Path, root: Path, tmp_path: Path) -> None:
    (root / "rank_2" / "checkpoint_2.safetensors").unlink()
    refuse(saved, SourceError, "not-found", "rank_2/checkpoint_2.safetensors", "source=")
    refuse(saved, SourceError, "not-found", "4 faults", source=tmp_path / "nowhere")


def test_a_pipe_is_not_waited_for(saved: Path, root: Path) -> None:
    path = root / "rank_2" / "checkpoint_2.safetensors"
    path.unlink()
    os.mkfifo(path)
    changed(saved, lambda content: source_in(content)["files"][2].__setitem__(2, 0))
    refuse(saved, SourceError, "not-a-file", "rank_2/checkpoint_2.safetensors")


def test_a_file_of_another_size(saved: Path, root: Path) -> None:
    with (root / "rank_1" / "checkpoint_1.safetensors").open("ab") as file:
        file.write(b"x")
    size = (root / "rank_1" / "checkpoint_1.safetensors").stat().st_size
    refuse(saved, TargetError, "source-changed", "rank_1/checkpoint_1.safetensors", f"{size} bytes", f"{size - 1} when")


def test_a_file_with_another_header(saved: Path, root: Path) -> None:
    path = root / "rank_1" / "checkpoint_1.safetensors"
    path.write_bytes(path.read_bytes().replace(b"global_step", b"global_stop"))
    refuse(saved, TargetError, "header-changed", "rank_1/checkpoint_1.safetensors")


def test_a_file_of_another_step(saved: Path, root: Path) -> None:
    """Its header is the same, and its weights are not."""
    full = {name: array + 1 for name, array in numbers(SHAPES).items()}
    also = {"global_step": np.array(8, np.int32), "note": "größe"}
    before = local_store().size(str(root / "rank_0" / "checkpoint_0.safetensors"))
    write_ranks(root, full, SOURCE, also=also)
    assert (root / "rank_0" / "checkpoint_0.safetensors").stat().st_size == before
    refuse(saved, TargetError, "source-changed", "4 faults", "contents")


def test_times_do_not_count(saved: Path, root: Path) -> None:
    for path in root.rglob("*.safetensors"):
        os.utime(path, (1, 1))
    reshard.read_plan(saved)


def test_what_would_do_something_else(saved: Path) -> None:
    changed(saved, lambda content: content.update(ranks=[0, 1]))
    refuse(saved, PlanError, "different-plan", saved)


def test_what_cannot_be_saved(root: Path, plan: reshard.Plan, tmp_path: Path) -> None:
    with refused(UsageError, "not-savable", "file by file"):
        reshard.Plan(plan_convert(root, "ckpt")).save(tmp_path / "plan.json")
    some = SomeFiles(ShardFiles(("a",), dict.fromkeys([*SHAPES, "global_step", "note"], 0)), (0,), with_index=False)
    with refused(UsageError, "not-savable", "SomeFiles"):
        plan_with(reshard.Checkpoint(plan._record.source), files=some).save(tmp_path / "plan.json")
    paths = {0: root / "rank_0" / "checkpoint_0.safetensors", 1: root / "rank_1" / "checkpoint_1.safetensors"}
    two = reshard.open(paths, strategy=SOURCE, partial=True)
    with refused(UsageError, "not-savable", "one directory"):
        reshard.plan(two, TARGET, ranks=[0], selection=Selection(include=["b"])).save(tmp_path / "plan.json")
    source_file = Path(plan._record.source.files[0].path)
    before = source_file.read_bytes()
    with refused(TargetError, "target-is-source", source_file):
        plan.save(source_file)
    assert source_file.read_bytes() == before
    starred = reshard.plan(
        reshard.Checkpoint(plan._record.source), selection=Selection(name_map={"layers.**.w": "model.**.w"})
    )
    with refused(UsageError, "not-savable", "layers.**.w"):
        starred.save(tmp_path / "plan.json")
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["provenance"]["target"].update(format="../x"), ("unknown-format", "'../x'")),
        (lambda c: c.update(ranks=[1 << 30]), ("no-such-rank", f"rank {1 << 30} ", "0 to 3")),
        (lambda c: c.update(memory=1), ("not-enough-memory", "1 B", "memory=58_000_000")),
        (lambda c: source_in(c)["strategy"]["tensors"].update(b=0), ("wrong-dimensions", "'b'", "[8]")),
    ],
)  # fmt: skip
def test_what_only_planning_finds_is_refused(
    change: Any, message: tuple[str, ...], saved: Path, tmp_path: Path
) -> None:
    changed(saved, change)
    before = tree(tmp_path)
    with refused(ReshardError, *message):
        reshard.read_plan(saved)
    assert tree(tmp_path) == before


def test_a_tensor_of_blocks_is_never_taken_for_copies(saved: Path) -> None:
    changed(saved, lambda content: source_in(content).update(varying=["layers.0.w", "nothing"]))
    assert not any(tensor.varies for tensor in reshard.read_plan(saved)._record.source.tensors.values())


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 70), 1 << 70), st.floats(), st.text(max_size=5),
    st.sampled_from(["..", "/", "w", [], {}, [[]], [0], {"w": 0}, 0, 1, 2, -1]),
)  # fmt: skip


@settings(max_examples=examples(300))
@given(data=st.data())
def test_any_change_is_refused_or_harmless(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A value anywhere in the file is replaced: a sentence, no traceback, and never another result."""
    folder = tmp_path_factory.mktemp("any")
    also = {"global_step": np.array(7, np.int32)}
    source = reshard.open(write_ranks(folder / "src", numbers(SHAPES), SOURCE, also=also), strategy=SOURCE)
    plan = reshard.plan(source, TARGET)
    plan.save(folder / "plan.json")
    content = json.loads((folder / "plan.json").read_bytes())
    at: Any = content
    while True:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if not isinstance(at[key], dict | list) or not at[key] or data.draw(st.integers(0, 7)) == 0:
            break
        at = at[key]
    at[key] = data.draw(VALUES)
    (folder / "plan.json").write_text(json.dumps(content))
    try:
        found = reshard.read_plan(folder / "plan.json")
    except ReshardError:
        pass
    else:
        assert plan_digest(found._record) == plan_digest(plan._record)
    finally:
        shutil.rmtree(folder)


def test_pages_are_spread_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    found = {}
    for size in (50_000, 200_000):  # all of a small file counts, and four pages of 4,096 bytes
        path.write_bytes(bytes(size))
        before = pages_digest(str(path))
        found[size] = 0
        for at in [*range(0, size, 1000), size - 1]:
            path.write_bytes(bytes(at) + b"1" + bytes(size - at - 1))
            found[size] += pages_digest(str(path)) != before
    assert found[50_000] == 51
    assert 13 <= found[200_000] <= 21


def test_the_target_that_is_named_is_not_a_part_of_the_plan(plan: reshard.Plan, tmp_path: Path) -> None:
    save(plan._record, tmp_path / "plan.json", directory="made/dst")
    assert read(tmp_path / "plan.json").directory == "made/dst"
    assert plan_digest(reshard.read_plan(tmp_path / "plan.json")._record) == plan_digest(plan._record)


def test_a_file_beside_the_weights_that_changed_is_named(tmp_path: Path) -> None:
    path = write_file(tmp_path / "set" / "model.safetensors", {"w": np.ones(4, "f4")})
    config = path.with_name("config.json")
    config.write_text('{"model_type": "x"}')
    plan = reshard.plan(reshard.open(path.parent), to="hf")
    plan.save(tmp_path / "plan.json")
    config.write_text('{"model_type": "x", "more": 1}')
    failed(6, "source-changed", "run", tmp_path / "plan.json", tmp_path / "out", places=(config,))
    config.unlink()
    failed(4, "different-plan", "run", tmp_path / "plan.json", tmp_path / "out")
