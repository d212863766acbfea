"""Checkpoint 2.0 of MindSpore Transformers as a source: real files give the whole tensors, and each trap is refused."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import helpers
import numpy as np
import pytest
from checkpoints import assert_equal, write_file
from commands import call, done
from measure import RESHARD, measured
from refusals import failed, refused

import reshard
from reshard import Strategy
from reshard.errors import SourceError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

SPLIT = "graph_dp2_tp4"
ONCE = "graph_dp2_tp2_pp2_zero_once"
SUBMESH = "pynative_submesh"
LOST = "pynative_submesh_once"
CASES = sorted(
    {path.split("/")[1] for path in helpers.packed_files("checkpoint2") if path.count("/") > 3 and "dcp_" not in path}
    | {path.split("/")[1] for path in helpers.packed_files("checkpoint2_more")} - {LOST}
)
NORM = "decoder.layers.0.input_layernorm.weight"

Json = dict[str, Any]


@pytest.fixture
def case(mindspore_data: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copies a case, to be spoilt; returns the directory of its last iteration."""

    def copied(name: str) -> Path:
        shutil.copytree(root_of(mindspore_data, name), tmp_path / name)
        return max((tmp_path / name / "checkpoint").glob("iteration_*"))

    return copied


def root_of(mindspore_data: Path, name: str) -> Path:
    return next(mindspore_data.glob(f"checkpoint2*/{name}"))


def full_of(place: Path) -> Mapping[str, Any]:
    return dict(np.load(place.parent.parent / "full.npz"))


def change(place: Path, what: Callable[[Json, Json], None]) -> None:
    """Change the metadata: the tensors, and the places of their blocks."""
    content = json.loads((place / "metadata.json").read_text())
    what(content["state_dict_metadata"], content["storage_data"])
    (place / "metadata.json").write_text(json.dumps(content))


def rewrite(place: Path, name: str, new: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any] | None]) -> None:
    """Write the files that have a tensor with another, or without it."""
    for path in place.glob("*.safetensors"):
        held = {
            key: np.frombuffer(content, np.uint8).view(_word(dtype)).reshape(shape)
            for key, (dtype, shape, content) in helpers.read_rank_file(path).items()
        }
        if name in held:
            found = new(held.pop(name))
            write_file(path, held | ({} if found is None else {name: found}))


def _word(dtype: str) -> Any:
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, dtype, dtype))


@pytest.mark.parametrize("name", CASES)
def test_real_ones_are_their_whole_tensors(mindspore_data: Path, name: str) -> None:
    root = root_of(mindspore_data, name)
    full = dict(np.load(root / "full.npz"))
    if name.endswith("pp2_zero_once"):
        del full["global_step"]  # which is in common.json alone
    for path in (root / "checkpoint", max((root / "checkpoint").glob("iteration_*"))):
        assert_equal(reshard.open(path), full)


@pytest.mark.parametrize("name", [name for name in CASES if name not in {"graph_1", "pynative_submesh"}])
def test_each_becomes_rank_files_of_the_same_blocks(mindspore_data: Path, tmp_path: Path, name: str) -> None:
    root = root_of(mindspore_data, name)
    source = reshard.open(root / "checkpoint")
    full = {key: value for key, value in np.load(root / "full.npz").items() if key in source}
    done("convert", root / "checkpoint", tmp_path / "out", "--to", "ckpt", "--same-ranks")
    made = reshard.open(tmp_path / "out", strategy=source.to_strategy())
    assert_equal(made, full)
    assert {file.index.format for file in made._record.files} == {"ckpt"}
    assert made.ranks == tuple(sorted(set(source.ranks)))
    assert reshard.verify(tmp_path / "out").equal


def test_another_iteration_of_a_run(mindspore_data: Path) -> None:
    root = mindspore_data / "checkpoint2" / "graph_dp4_tp2_weights_two" / "checkpoint"
    assert reshard.open(root).root.endswith("iteration_00000004")
    assert reshard.open(root, step=2).root.endswith("iteration_00000002")
    assert reshard.open(root / "iteration_00000002", step=2).root.endswith("iteration_00000002")
    with refused(SourceError, "no-such-iteration", "iteration 3", "iterations 2, 4"):
        reshard.open(root, step=3)
    with refused(SourceError, "no-such-iteration"):
        reshard.open(root / "iteration_00000002", step=4)


def test_a_run_that_does_not_say_which_iteration_is_complete(case: Callable[[str], Path]) -> None:
    place = case(SPLIT)
    tracker = place.parent / "latest_checkpointed_iteration.txt"
    tracker.write_text("5")
    with refused(SourceError, "no-such-iteration", "iteration 5", "iteration 4", tracker.name):
        reshard.open(place.parent)
    tracker.write_text("the last")
    with refused(SourceError, "bad-tracker", tracker, "the last"):
        reshard.open(place.parent)
    tracker.unlink()
    with refused(SourceError, "missing-tracker", tracker.name, "step=4"):
        reshard.open(place.parent)
    failed(4, "missing-tracker", "inspect", place.parent, places=("--step 4",))
    assert_equal(reshard.open(place.parent, step=4), full_of(place))


def test_options_that_say_what_the_metadata_say_are_refused(mindspore_data: Path) -> None:
    root = mindspore_data / "checkpoint2" / SPLIT / "checkpoint"
    for options in ({"strategy": Strategy.of({})}, {"suffix": "x"}, {"layout": {"*": "whole"}}, {"stage": 0}):
        with refused(UsageError, "self-described", root):
            reshard.open(root, **options)


def test_inspect_shows_layouts(mindspore_data: Path) -> None:
    root = mindspore_data / "checkpoint2" / SPLIT / "checkpoint"
    shown = done("inspect", root).stdout
    assert "rows / 4 × 2 copies" in shown
    assert "8 ranks (0-7)" in shown
    (row,) = (one for one in json.loads(done("inspect", root, "--json").stdout)["tensors"] if one["name"] == NORM)
    assert row["layouts"][0]["dev_matrix"] == [2, 4]


def test_inspect_lists_the_iterations_of_a_run(mindspore_data: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(mindspore_data / "checkpoint2" / "graph_dp4_tp2_weights_two" / "checkpoint", root)
    two, four = root / "iteration_00000002", root / "iteration_00000004"
    shutil.copytree(four, root / "iteration_00000006")
    gone = min((root / "iteration_00000006").glob("*-model-*"))
    gone.unlink()
    (two / "common.json").write_text(json.dumps(json.loads((two / "common.json").read_text()) | {"ckpt_status": 1}))
    shown = done("inspect", root).stdout.split("\n\n")[0]
    rows = shown.splitlines()[1:4]
    assert [line.split()[1] for line in rows] == ["2", "4", "6"]
    assert [state in row for state, row in zip(("unknown", "complete, newest", "incomplete"), rows, strict=True)] == [
        True
    ] * 3
    assert "was saved by a training that was not healthy" in shown
    assert f"{gone.name} is missing" in shown
    assert "iteration_00000002" not in done("inspect", root, "--step", "4").stdout
    found = json.loads(done("inspect", root, "--json").stdout)["iterations"]
    assert [(one["step"], one["last"], one["state"]) for one in found] == [
        ("2", False, "unknown"), ("4", True, "complete"), ("6", False, "incomplete"),
    ]  # fmt: skip
    assert all(one["nbytes"] > 0 for one in found)
    (root / "latest_checkpointed_iteration.txt").unlink()
    result = failed(4, "missing-tracker", "inspect", root, places=("--step 6",))
    assert "iteration_00000006" in result.stdout


def test_nothing_of_it_is_written_over(case: Callable[[str], Path], tmp_path: Path) -> None:
    place = case(SPLIT)
    for path in (place / "metadata.json", place / "common.json", place.parent / "latest_checkpointed_iteration.txt"):
        for source in (place.parent, place) if path.parent == place else (place.parent,):
            failed(
                6, "target-is-source", "convert", "--to=mindspore", source, tmp_path / "u",
                "--write-manifest", path, "--overwrite",
                places=(path.name,),
            )  # fmt: skip


# --- the traps of FORMAT.md ---


def test_files_may_have_any_names(case: Callable[[str], Path]) -> None:
    """Ranks are in the metadata, not in names: of de-duplicated sets numbers are others."""
    place = case(SPLIT)
    new = {path.name: f"{number}.safetensors" for number, path in enumerate(sorted(place.glob("*.safetensors")))}
    for old, name in new.items():
        (place / old).rename(place / name)

    def renamed(_: Json, places: Json) -> None:
        for some in places.values():
            for one in some:
                one["file_name"] = new[one["file_name"]]

    change(place, renamed)
    assert_equal(reshard.open(place), full_of(place))


def test_blocks_that_were_lost(case: Callable[[str], Path], tmp_path: Path) -> None:
    """With remove_redundancy the same defect drops blocks from the disk: named, refused, and left out by name.

    Of the two blocks of one norm, files of ranks 0 and 1 have the first, twice: no number of a file that is there
    contradicts its layout, but the group of ranks that are said to hold the same does.
    """
    place = case(LOST)
    found = reshard.open(place)
    norms = tuple(name for name in full_of(place) if name.endswith("layernorm.weight"))
    assert set(found.unreadable) == set(norms)
    assert_equal(found, full_of(place), but=norms)
    for command in (["convert", "--to=mindspore", place, tmp_path / "u"], ["verify", place.parent]):
        failed(4, "unreadable-tensor", *command, places=(f"--drop '{NORM}'",))
    done("convert", "--to=mindspore", place, tmp_path / "u", "--drop", "*norm.weight")
    assert_equal(reshard.open(tmp_path / "u"), full_of(place), but=norms)
    done("verify", place, "--drop", "*norm.weight")
    assert f"'{NORM}', and 5 more cannot be read" in call("inspect", place.parent).stdout


def test_a_place_that_the_layout_is_not_about(case: Callable[[str], Path]) -> None:
    """It is taken by its number where no described one has the block and all else agrees; otherwise not."""
    place = case(SPLIT)
    name = "embedding.word_embeddings.weight"

    def moved(tensors: Json, _: Json) -> None:
        tensors[name]["layout"]["rank_list"] = [8, 1, 2, 3, 9, 5, 6, 7]

    change(place, moved)
    assert_equal(reshard.open(place), full_of(place))

    def wrong(_: Json, places: Json) -> None:
        one, other = f"('{name}', (1,))", f"('{name}', (2,))"
        places[one], places[other] = places[other], places[one]

    change(place, wrong)
    assert name in reshard.open(place).unreadable


def test_files_with_whole_tensors_whatever_the_layout(case: Callable[[str], Path]) -> None:
    """MindSpore's integrated_save gathers; a tensor without dimensions is written with one."""
    place = case(SPLIT)
    full = full_of(place)
    name = "adam_m.embedding.word_embeddings.weight"
    rewrite(place, name, lambda _: full[name])
    assert_equal(reshard.open(place), full)
    seen = iter(range(99))
    rewrite(place, name, lambda _: full[name] if next(seen) else np.array_split(full[name], 4)[0])
    assert name in reshard.open(place).unreadable
    rewrite(place, name, lambda _: full[name][:3])
    assert name in reshard.open(place).unreadable


def test_a_single_value_without_dimensions(case: Callable[[str], Path]) -> None:
    place = case(SPLIT)

    def described(tensors: Json, places: Json) -> None:
        like = tensors[NORM]
        tensors["global_step"] = {
            "properties": like["properties"] | {"dtype": "Int32"}, "global_shape": [], "axis_fragmentations": [],
            "layout": None, "chunk": [{"global_offset": [0], "local_shape": []}],
        }  # fmt: skip
        places["('global_step', (0,))"] = places[f"('{NORM}', (0,))"]

    change(place, described)
    found = reshard.open(place)
    assert found.tensors["global_step"].spec.shape == ()
    assert found["global_step"].compute() == full_of(place)["global_step"]


def test_states_that_the_metadata_leave_out(case: Callable[[str], Path]) -> None:
    """They lie as their weights; other values must be the same on every rank."""
    place = case(SPLIT)

    def left_out(tensors: Json, places: Json) -> None:
        for name in [name for name in tensors if name.startswith("adam_v.")]:
            del tensors[name]
            for key in [key for key in places if f"'{name}'" in key]:
                del places[key]

    assert not reshard.open(place).warnings  # global_step is not listed there either
    change(place, left_out)
    found = reshard.open(place)
    assert_equal(found, full_of(place))
    (warning,) = found.warnings
    assert "adam_v." in warning
    steps = iter(range(99))
    rewrite(place, "global_step", lambda step: np.full_like(step, next(steps)))
    assert "global_step" in reshard.open(place).unreadable


def test_what_is_in_the_other_file_of_its_rank(case: Callable[[str], Path]) -> None:
    place = case(SPLIT)
    for model in place.glob("*-model-*"):
        opt = place / model.name.replace("-model-", "-opt-")
        spare = model.with_name("spare")
        model.rename(spare)
        opt.rename(model)
        spare.rename(opt)
    assert_equal(reshard.open(place), full_of(place))


def test_states_that_were_listed_and_not_saved(case: Callable[[str], Path]) -> None:
    """As before July 2026."""
    place = case(SPLIT)
    name = f"adam_v.{NORM}"
    rewrite(place, name, lambda _: None)
    found = reshard.open(place)
    assert set(found.unreadable) == {name}
    assert_equal(found, full_of(place), but=(name,))
    failed(4, "unreadable-tensor", "verify", place, places=(f"'{name}'",))


def test_a_weight_whose_place_is_in_a_file_of_the_optimizer(case: Callable[[str], Path]) -> None:
    """As of later stages before June 2026: it is a weight also where all of those files are left out."""
    place = case("pynative_pp2")
    name = "output_layer.weight"

    def misplaced(_: Json, places: Json) -> None:
        for key in [key for key in places if f"'{name}'" in key]:
            for one in places[key]:
                one["file_name"] = one["file_name"].replace("-model-", "-opt-")

    change(place, misplaced)
    assert_equal(reshard.open(place), full_of(place))
    for path in place.glob("*-opt-*"):
        path.unlink()
    found = reshard.open(place)
    assert found[name].compute().tobytes() == full_of(place)[name].tobytes()
    assert done("verify", place).exit_code == 0


def test_weights_alone(case: Callable[[str], Path]) -> None:
    place = case(SPLIT)
    for path in place.glob("*-opt-*"):
        path.unlink()
    found = reshard.open(place)
    assert any("no file of the optimizer is there" in warning for warning in found.warnings)
    full = {name: value for name, value in full_of(place).items() if name in found}
    assert all(not name.startswith("adam_") for name in full)
    assert_equal(found, full)
    assert NORM in full


@pytest.mark.parametrize(
    "what",
    [
        lambda one: one["layout"].update(interleaved_parallel=True),
        lambda one: one.update(global_shape=[26, 12]),
        lambda one: one.update(global_shape=[28, 12]),
        lambda one: one["properties"].update(dtype="Float32"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(case: Callable[[str], Path], what: Callable[[Json], None]) -> None:
    place = case(SPLIT)
    name = "embedding.word_embeddings.weight"
    change(place, lambda tensors, _: what(tensors[name]))
    with refused(SourceError, "unreadable-tensor", name, "drop="):
        reshard.plan(reshard.open(place))
    plan = reshard.plan(reshard.open(place), selection=reshard.Selection(drop=(name,)))
    assert plan.dropped == (name,)


def test_an_iteration_that_is_not_complete(case: Callable[[str], Path]) -> None:
    place = case(SPLIT)
    gone = min(place.glob("*-model-*"))
    gone.rename(place / "spare")
    with refused(SourceError, "missing-file", gone.name, "metadata.json"):
        reshard.open(place)
    failed(4, "missing-file", "verify", place.parent, places=(gone.name,))
    (place / "spare").rename(gone)
    content = gone.read_bytes()
    gone.write_bytes(content[:-1])
    with refused(SourceError, "truncated", gone.name):
        reshard.open(place)
    gone.write_bytes(content)
    (place / "metadata.json").unlink()
    with refused(SourceError, "duplicate-name", "metadata.json"):
        reshard.open(place)
    gone.unlink()
    with refused(SourceError, "missing-shards", "file 0 of 8", "metadata.json"):
        reshard.open(place)


def test_iterations_newer_than_the_last(case: Callable[[str], Path]) -> None:
    """The tracker is written last, and a newer directory may be half written, or its training stopped before that."""
    place = case(SPLIT)
    shutil.copytree(place, place.with_name("iteration_00000006"))
    newer = "has iteration 6, newer than 4, which latest_checkpointed_iteration.txt names"
    assert any(newer in warning for warning in reshard.open(place.parent).warnings)
    assert newer in done("verify", place.parent).stderr
    assert "is newer than" in done("inspect", place.parent).stdout
    assert not reshard.open(place.parent, step=4).warnings
    assert not reshard.open(place).warnings


def test_a_training_that_was_not_healthy(case: Callable[[str], Path]) -> None:
    place = case(SPLIT)
    common = json.loads((place / "common.json").read_text())
    (place / "common.json").write_text(json.dumps(common | {"ckpt_status": 1}))
    assert any("was not healthy" in warning for warning in reshard.open(place).warnings)
    (place / "common.json").write_text("{")
    with refused(SourceError, "not-json", "common.json"):
        reshard.open(place)
    (place / "common.json").unlink()
    assert any("has no common.json" in warning for warning in reshard.open(place).warnings)


def test_whole_tensors_in_several_files_need_no_metadata(case: Callable[[str], Path]) -> None:
    place = case("graph_1")
    (path,) = place.glob("*-model-*")
    held = full_of(place)
    names = sorted(name for name in helpers.read_rank_file(path))
    path.unlink()
    for number, some in enumerate((names[::2], names[1::2])):
        write_file(place / f"x-model-{number:07d}-0000002.safetensors", {name: held[name] for name in some})
    (place / "common.json").unlink()
    found = reshard.open(place)
    assert_equal(found, held)
    assert found._record.extras.described_by == "Checkpoint 2.0"


@pytest.mark.parametrize(
    ("what", "place"),
    [
        (lambda _, some: some[0].update(file_name="../x.safetensors"), "'../x.safetensors'"),
        (lambda _, some: some[0].update(storage_rank=-1), "storage_rank is -1"),
        (lambda _, some: some[0].update(storage_rank=7), "is of rank 7 here"),
        (lambda _, some: some[0].pop("file_name"), "has no 'file_name'"),
        (lambda _, some: some[0].update(rank_group=[True]), "True"),
        (lambda places, _: places.update(x=[]), "storage_data.x: "),
        (lambda places, some: places.update({f"('{NORM}', ({1 << 40},))": some}), str(1 << 40)),
        (lambda places, some: places.update({"('x', (0,))": some}), "'x'"),
    ],
)
def test_places_that_cannot_be(case: Callable[[str], Path], what: Callable[[Json, Any], None], place: str) -> None:
    root = case(SPLIT)
    change(root, lambda _, places: what(places, places[f"('{NORM}', (0,))"]))
    with refused(SourceError, "unknown-tensor" if place == "'x'" else "bad-metadata", "metadata.json", place):
        reshard.open(root)


@pytest.mark.parametrize(
    ("what", "place"),
    [
        (lambda one: one.update(global_shape="24"), "'24'"),
        (lambda one: one.update(global_shape=[-24, 12]), "[-24, 12]"),
        (lambda one: one.pop("properties"), "'properties'"),
        (lambda one: one["layout"].update(rank_list=[0, 1]), "rank_list has 2"),
        (lambda one: one["layout"].update(rank_list=[0] * 8), "rank_list has 8"),
        (lambda one: one["layout"].update(tensor_map=[0]), "tensor_map is of 1 dimensions"),
        (lambda one: one["layout"].update(tensor_map=[7, -1]), "tensor_map[0] is 7"),
        (lambda one: one["layout"].update(device_matrix=[1 << 40]), str(1 << 40)),
    ],
)
def test_tensors_that_cannot_be(case: Callable[[str], Path], what: Callable[[Json], None], place: str) -> None:
    root = case(SPLIT)
    change(root, lambda tensors, _: what(tensors["embedding.word_embeddings.weight"]))
    with refused(SourceError, "bad-metadata", "state_dict_metadata.embedding.word_embeddings.weight", place):
        reshard.open(root)


def write_large(place: Path, ranks: int, tensors: int) -> None:
    """Write a Checkpoint 2.0 of many ranks: weights in rows, and their states, which lie in each rank's other file."""
    place.mkdir(parents=True)
    layout = {
        "device_matrix": [ranks], "tensor_map": [0, -1], "interleaved_parallel": False, "alias_name": ["a"],
        "rank_list": [*range(ranks)],
    }  # fmt: skip
    names = [f"{kind}model.layers.{number}.attention.weight" for kind in ("", "adam_m.") for number in range(tensors)]
    with (place / "metadata.json").open("w") as file:
        file.write('{"state_dict_metadata": {')
        for number, name in enumerate(names):
            chunk = [{"global_offset": [block], "local_shape": [1, 4]} for block in range(ranks)]
            one = {"properties": {"dtype": "Float32"}, "global_shape": [ranks, 4], "layout": layout, "chunk": chunk}
            file.write(f'{", " * bool(number)}"{name}": {json.dumps(one)}')
        file.write('}, "storage_data": {')
        for number, name in enumerate(names):
            kind = "model" if name.startswith("adam") else "opt"  # and are the other way round
            for rank in range(ranks):
                held = f"x-{kind}-{rank:07d}-{ranks:07d}.safetensors"
                one = [{"file_name": held, "storage_rank": rank, "rank_group": [rank]}]
                file.write(f"{', ' * bool(number or rank)}\"('{name}', ({rank},))\": {json.dumps(one)}")
        file.write("}}")
    for kind in ("model", "opt"):
        some = {name: np.ones((1, 4), np.float32) for name in names if name.startswith("adam") == (kind == "opt")}
        path = write_file(place / f"x-{kind}-{0:07d}-{ranks:07d}.safetensors", some)
        for rank in range(1, ranks):
            shutil.copyfile(path, place / f"x-{kind}-{rank:07d}-{ranks:07d}.safetensors")
    (place / "common.json").write_text("{}")


@pytest.mark.slow
def test_many_ranks_take_no_more_memory_than_is_predicted(tmp_path: Path) -> None:
    """The metadata are 100 MB of JSON; all that they say of places is wrong, so that files are looked through."""
    place = tmp_path / "iteration_00000001"
    write_large(place, 2000, 125)
    assert (place / "metadata.json").stat().st_size > 100e6
    took = measured(*RESHARD, "convert", "--to=mindspore", str(place), str(tmp_path / "u"), "--dry-run", "--json")
    assert took.code == 0, took.err
    predicted = json.loads(took.out)["peak_memory"]
    assert took.peak < predicted < 150e6
