"""Runs that write a Checkpoint 2.0: what gets its name when, what is resumed, refused and verified; the commands."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import assert_equal, numbers, tree, write_file
from commands import done
from faulty import raising
from fsspec.core import url_to_fs
from refusals import failed, refused
from written_checkpoint2 import CUT, EVERYTHING, FULL, STRATEGIES, TRACKER, metadata, opened, rows, whole_file

import reshard
from reshard import Layout, Strategy
from reshard.errors import TargetError
from reshard.formats.checkpoint2.writer import Checkpoint2Target

if TYPE_CHECKING:
    from faulty import Faults


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("devices", [256, 1024])
def test_the_memory_that_the_metadata_of_many_ranks_take_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int, once: bool
) -> None:
    found = {}

    def measured(target: Checkpoint2Target, every: Any) -> bytes:
        tracemalloc.start()
        content = made(target, every)
        found["peak"], found["predicted"] = tracemalloc.get_traced_memory()[1], dict(target.memory)["metadata"]
        tracemalloc.stop()
        return content

    made = Checkpoint2Target._metadata
    monkeypatch.setattr(Checkpoint2Target, "_metadata", measured)
    full = numbers({f"w{number}": (1024, 1) for number in range(20)})
    layout = Layout.of([devices // 4, 4], [0, -1])
    reshard.plan(
        whole_file(tmp_path, full),
        Strategy.of(dict.fromkeys(full, layout)),
        to="checkpoint2",
        target_step=1,
        remove_redundancy=once,
    )
    assert found["peak"] <= found["predicted"] <= 4 * found["peak"]


@pytest.mark.parametrize("partition", [None, "file"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_names_come_in_order(tmp_path: Path, faults: Faults, partition: str | None, is_cut: bool) -> None:
    """First the files, then what stands beside them, last of all the tracker, which names a complete iteration."""
    plan = reshard.plan(whole_file(tmp_path), STRATEGIES["tensor parallel"] if is_cut else None, to="checkpoint2")
    plan.run(tmp_path / "run", partition=partition)
    named = [Path(one.path).name for one in faults.of("publish")]
    beside = [*["metadata.json"] * is_cut, "common.json", TRACKER]
    assert named[-len(beside) :] == beside
    assert len(named) == len(set(named)) == len(beside) + (8 if is_cut else 2)


def test_names_come_in_order_at_a_url(tmp_path: Path, faults: Faults) -> None:
    """Where a file has its name as soon as it is complete; a run that fails leaves the tracker as it was."""
    fs, place = url_to_fs("memory://ordered2")
    fs.pipe(f"{place}/{TRACKER}", b"2")
    plan = reshard.plan(whole_file(tmp_path), STRATEGIES["tensor parallel"], to="checkpoint2")
    faults.every(lambda one: raising(OSError("gone"))(one) if one.path.endswith("common.json") else None, "create")
    with pytest.raises(Exception, match="gone"):
        plan.run("memory://ordered2")
    assert fs.cat_file(f"{place}/{TRACKER}") == b"2"
    assert fs.exists(f"{place}/iteration_00000007/metadata.json")
    faults.clear()
    plan.run("memory://ordered2")
    made = [
        one.path.rpartition("/")[2] for one in faults.of("create") if "iteration_" in one.path or TRACKER in one.path
    ]
    assert made[-1] == TRACKER
    assert made.index("metadata.json") < made.index("common.json") < len(made) - 1
    assert not [name for name in made[made.index("metadata.json") :] if name.endswith(".safetensors")]
    assert fs.cat_file(f"{place}/{TRACKER}") == b"7"
    assert_equal(reshard.open("memory://ordered2"), EVERYTHING)


@pytest.mark.parametrize("turn", range(13))
def test_a_run_that_fails_names_no_iteration(tmp_path: Path, faults: Faults, turn: int) -> None:
    """Wherever names are given; the same run again ends with what an undisturbed one writes."""
    before = whole_file(tmp_path, {**FULL, "global_step": np.array([2])}, "before.safetensors")
    reshard.plan(before, to="checkpoint2").run(tmp_path / "run", fsync=False)
    old = tree(tmp_path / "run" / "iteration_00000002")
    source, one = whole_file(tmp_path), STRATEGIES["tensor parallel"]
    plan = reshard.plan(source, one, to="checkpoint2")
    plan.run(tmp_path / "whole", fsync=False)
    faults.clear()
    faults.nth(turn, raising(OSError("gone")), "publish")
    last = turn == 11
    try:
        plan.run(tmp_path / "run", fsync=False)
    except Exception:
        assert turn < 11
        assert (tmp_path / "run" / TRACKER).read_text() == "2"
        assert_equal(reshard.open(tmp_path / "run"), {**FULL, "global_step": np.array([2])})
        assert (tmp_path / "run/iteration_00000007/metadata.json").exists() == (turn > 8)
    else:
        assert turn >= 11 or last
    faults.clear()
    plan.run(tmp_path / "run", fsync=False)
    assert (tmp_path / "run" / TRACKER).read_text() == "7"
    assert tree(tmp_path / "run" / "iteration_00000002") == old
    assert tree(tmp_path / "run" / "iteration_00000007") == tree(tmp_path / "whole" / "iteration_00000007")
    assert_equal(reshard.open(tmp_path / "run"), EVERYTHING)


def test_an_iteration_that_is_replaced_is_not_named_meanwhile(tmp_path: Path, faults: Faults) -> None:
    source, one = whole_file(tmp_path), STRATEGIES["tensor parallel"]
    reshard.plan(source, one, to="checkpoint2").run(tmp_path / "run", fsync=False)
    changed = whole_file(
        tmp_path,
        {name: value + 1 for name, value in EVERYTHING.items()} | {"global_step": np.array([7], np.int32)},
        "b.safetensors",
    )
    plan = reshard.plan(changed, one, to="checkpoint2")
    with refused(TargetError, "other-run", "restart=True"):
        plan.run(tmp_path / "run")
    there: list[set[str]] = []
    faults.every(lambda _: there.append({path.name for path in (tmp_path / "run").rglob("*.[jt][sx]*")}), "publish")
    plan.run(tmp_path / "run", restart=True)
    assert {"metadata.json", "common.json", TRACKER}.isdisjoint(there[0])
    assert_equal(
        reshard.open(tmp_path / "run"), {name: value + (name != "global_step") for name, value in EVERYTHING.items()}
    )


def test_a_finished_run_writes_nothing_again(tmp_path: Path, faults: Faults) -> None:
    plan = reshard.plan(whole_file(tmp_path), STRATEGIES["tensor parallel"], to="checkpoint2")
    plan.run(tmp_path / "run")
    faults.clear()
    assert plan.run(tmp_path / "run").finished == len(plan._record.files)
    assert faults.of("publish", "remove") == []
    (tmp_path / "run" / TRACKER).write_text("3")  # a training went on
    faults.clear()
    plan.run(tmp_path / "run")
    assert [Path(one.path).name for one in faults.of("publish")] == [TRACKER]
    assert faults.of("remove") == []


def test_several_iterations_of_a_run(tmp_path: Path, mindspore_data: Path) -> None:
    source, full = opened(mindspore_data, "pynative_fsdp2_tp2")
    reshard.plan(source, rows(full), to="checkpoint2").run(tmp_path, fsync=False)
    reshard.plan(reshard.open(tmp_path), to="checkpoint2", target_step=7).run(
        tmp_path, fsync=False
    )  # next to its source
    assert (tmp_path / TRACKER).read_text() == "7"
    places = [tmp_path / f"iteration_0000000{number}" for number in (4, 7)]
    for place in places:
        assert_equal(reshard.open(place), full)
        assert reshard.verify(place).equal
    assert reshard.verify(tmp_path).against == str(places[0])
    (tmp_path / TRACKER).write_text("4")
    assert reshard.verify(tmp_path).against == source.root
    listed = done("inspect", tmp_path).stdout
    assert "iteration_00000004" in listed
    assert "iteration_00000007" in listed


def test_targets_that_are_refused(tmp_path: Path, mindspore_data: Path) -> None:
    source, full = opened(mindspore_data, "graph_dp2_tp4")
    root = tmp_path / "run"
    shutil.copytree(Path(source.root).parent, root)
    mine = reshard.open(root)
    with refused(TargetError, "overlaps", root):
        reshard.plan(mine, rows(full), to="checkpoint2").run(root)
    with refused(TargetError, "is-iteration", f"name {root}"):
        reshard.plan(source, rows(full), to="checkpoint2").run(root / "iteration_00000004")
    for overwrite in (False, True):  # of eight ranks, which would be taken for a part of it
        with refused(TargetError, "other-set", "iteration_00000004"):
            reshard.plan(source, rows(full), to="checkpoint2").run(root, overwrite=overwrite)
        with refused(TargetError, "other-set"):
            reshard.plan(source, to="checkpoint2").run(root, overwrite=overwrite)
    assert_equal(reshard.open(root), full)


@pytest.mark.parametrize("name", CUT)
def test_by_a_saved_plan(tmp_path: Path, mindspore_data: Path, name: str) -> None:
    """The plan file has the layouts of the pattern, which may be gone by then."""
    root = mindspore_data / "checkpoint2" / name / "checkpoint"
    made = reshard.plan(reshard.open(root), root, to="checkpoint2", target_step=7)
    made.save(tmp_path / "plan.json")
    made.run(tmp_path / "here", fsync=False, ledger=False)
    reshard.read_plan(tmp_path / "plan.json").run(tmp_path / "there", fsync=False, ledger=False)
    assert tree(tmp_path / "there") == tree(tmp_path / "here")


def test_a_plan_runs_over_a_copy_of_the_run(tmp_path: Path, mindspore_data: Path) -> None:
    """Its directory serves as that of the iteration does, whatever the tracker names since."""
    source, full = opened(mindspore_data, CUT[0])
    reshard.plan(source, to="checkpoint2").save(tmp_path / "plan.json")
    copy = tmp_path / "copy"
    shutil.copytree(Path(source.root).parent, copy)
    shutil.copytree(copy / "iteration_00000004", copy / "iteration_00000005")
    (copy / TRACKER).write_text("5")
    for number, place in enumerate([copy, copy / "iteration_00000004"]):
        reshard.read_plan(tmp_path / "plan.json", source=place).run(tmp_path / f"run{number}", fsync=False)
        assert_equal(reshard.open(tmp_path / f"run{number}"), full)


def test_by_way_of_a_store_common_is_the_source_s(tmp_path: Path, mindspore_data: Path) -> None:
    source, full = opened(mindspore_data, CUT[0])
    done("convert", source.root, tmp_path / "a.zarr")
    done("convert", tmp_path / "a.zarr", tmp_path / "run", "--to", "checkpoint2")
    found = reshard.open(tmp_path / "run")
    assert_equal(found, full)
    assert Path(found.root, "common.json").read_bytes() == Path(source.root, "common.json").read_bytes()
    text = (tmp_path / "a.zarr" / "zarr.json").read_text()
    attributes = json.loads(text)["attributes"]["reshard"]
    for said in ("[]", "{", 7, None):  # by another hand
        attributes["common"] = said
        (tmp_path / "a.zarr" / "zarr.json").write_text(
            json.dumps(json.loads(text) | {"attributes": {"reshard": attributes}})
        )
        plan = reshard.plan(reshard.open(tmp_path / "a.zarr"), to="checkpoint2", target_step=4)
        assert any("says null for what is not known" in warning for warning in plan.warnings)


def test_the_commands(tmp_path: Path, mindspore_data: Path) -> None:
    root = mindspore_data / "checkpoint2" / "graph_dp2_tp2_pp2_zero" / "checkpoint"
    source, full = opened(mindspore_data, "graph_dp2_tp2_pp2_zero")
    target = tmp_path / "run"
    words = ("--to", "checkpoint2", "--target-strategy", root, "--target-step", "9", "--prefix", "CKP")
    report = json.loads(done("convert", root, target, *words, "--json").stdout)
    assert report["target_files"] == 19
    assert {Path(file["path"]).name for file in report["files"]} >= {"CKP-model-0000007-0000008.safetensors", TRACKER}
    assert_equal(reshard.open(target), full)
    assert (target / TRACKER).read_text() == "9"
    assert done("verify", target).exit_code == 0
    done("convert", target, target, *words[:2], "--target-strategy", target, "--target-step", "11")
    assert_equal(reshard.open(target), full)
    done("convert", target, tmp_path / "cast", *words[:4], "--cast", "float32=bfloat16", "--weights-only")
    said = metadata(tmp_path / "cast" / "iteration_00000011")["state_dict_metadata"]
    assert {one["properties"]["dtype"] for one in said.values()} == {"BFloat16"}
    (tmp_path / "only").mkdir()
    shutil.copy(Path(source.root) / "metadata.json", tmp_path / "only")
    done("convert", target, tmp_path / "by metadata alone", *words[:2], "--target-strategy", tmp_path / "only")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("convert", "--to", "hf", "--target-step", "3"), "option-of-another-format"),
        (("convert", "--prefix", "a", "--to", "hf"), "option-of-another-format"),
        (("convert", "--to", "checkpoint2", "--ranks", "0"), "needs-all-ranks"),
        (("plan", "--max-shard-size", "1GB"), "option-of-another-format"),
        (
            ("plan", "--to", "checkpoint2", "--target-strategy", "x", "--max-shard-size", "1GB"),
            "option-of-another-format",
        ),
    ],
)
def test_options_that_do_not_go_together(tmp_path: Path, words: tuple[str, ...], code: str) -> None:
    write_file(tmp_path / "net.safetensors", EVERYTHING)
    failed(2, code, words[0], tmp_path / "net.safetensors", tmp_path / "run", *words[1:])
    assert not (tmp_path / "run").exists()
