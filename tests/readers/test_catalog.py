"""The list of checkpoints below a directory: each format, each way to be damaged, and trees that lead nowhere."""

from __future__ import annotations

import os
import shutil
import sys
import time
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoints import numbers, plan_with, write_file, write_ranks
from dcp_files import item, write_torch
from refusals import refused
from remotes import put
from saves_files import tensor, write_save

import reshard
from reshard import Layout, SourceError, Strategy
from reshard.core.catalog import newest_complete, stored_checkpoints
from reshard.formats.dcp import completeness as doubts
from reshard.formats.zarr.layout import ZarrGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from remotes import Requests

    from reshard.core.catalog import StoredCheckpoint
    from reshard.core.storage.places import Place

CUT = Strategy.of({"w": Layout.of([4], [0, -1]), "b": Layout.of([4], [-1])})
FULL = numbers({"w": (8, 6), "b": (5,)})


def states(path: Path | str) -> dict[str, str]:
    """Return the state of each checkpoint, by its path below a directory, with the step of rank files."""
    found = {}
    for each in stored_checkpoints(path):
        assert each.state == "complete" or each.reason
        step = f"@{each.step}" if "_" in each.step else ""
        found[each.path.removeprefix(f"{path}").strip("/") + step] = each.state
    return found


def only(path: Path) -> StoredCheckpoint:
    (found,) = stored_checkpoints(path)
    return found


# --- complete ones are found, damaged ones are not called complete ---

REAL = [
    "dcp/fsdp2_bf16", "dcp/mcore_tp2_pp2", "dcp/zstd", "dcp/safetensors_format", "checkpoint2/graph_dp2_tp4",
    "checkpoint2/graph_1", "deepspeed/s2_dp2_bf16", "deepspeed/s3_dp2_fp16", "deepspeed/many_s1_dp11",
    "deepspeed/universal_s1_dp2_bf16",
]  # fmt: skip

HARMLESS = {
    "commit_success.txt", "latest", "latest_universal", "latest_checkpointed_iteration.txt", "zero_to_fp32.py",
    "_sharding", "orbax.checkpoint", "array_metadatas", "_CHECKPOINT_METADATA", "descriptor", "common.json", "buffers",
    "_strings.json", "README.md",
}  # fmt: skip
"""Files that no tensor is in, and that no reader needs."""


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("damage", ["removed", "cut"])
def test_no_damaged_one_is_complete(name: str, damage: str, mindspore_data: Path, tmp_path: Path) -> None:
    """Each file in turn, of those that a reader needs."""
    shutil.copytree(mindspore_data / name / "checkpoint", tmp_path / "run")
    (checkpoint,) = (each.path for each in stored_checkpoints(tmp_path / "run") if each.state == "complete")
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file() and str(path).startswith(checkpoint))
    for path in files[:: max(len(files) // 24, 1)]:
        is_buffer = path.parent.parent.name == "zero" and len([*path.parent.iterdir()]) == 1
        if is_buffer or {*path.parts} & HARMLESS or path.suffix == ".json":
            continue
        content = path.read_bytes()
        if damage == "removed":
            path.unlink()
        else:
            path.write_bytes(content[:-1])
        assert "complete" not in states(tmp_path / "run").values(), path
        path.write_bytes(content)
        if path.name != ".metadata":
            os.utime(path, (0, 0))  # files that are newer than .metadata are in doubt
    assert "complete" in states(tmp_path / "run").values()


@pytest.mark.parametrize("name", ["orbax/mesh4x2_ocdbt_zarr2", "orbax/mesh4x2_zarr3_v1", "megatron_legacy/plain"])
@pytest.mark.parametrize("damage", ["removed", "cut"])
def test_one_that_is_complete_has_its_values(name: str, damage: str, mindspore_data: Path, tmp_path: Path) -> None:
    """Databases have files that nothing needs any more."""
    shutil.copytree(mindspore_data / name / "checkpoint", tmp_path / "run")
    (checkpoint,) = (each.path for each in stored_checkpoints(tmp_path / "run") if each.state == "complete")
    full = {key: np.asarray(value).tobytes() for key, value in reshard.open(checkpoint).items()}
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    incomplete = 0
    for path in files[:: max(len(files) // 24, 1)]:
        content = path.read_bytes()
        if damage == "removed":
            path.unlink()
        else:
            path.write_bytes(content[: len(content) // 2])
        if "complete" in states(tmp_path / "run").values():
            assert {key: np.asarray(value).tobytes() for key, value in reshard.open(checkpoint).items()} == full
        else:
            incomplete += 1
        path.write_bytes(content)
    assert incomplete


@pytest.mark.parametrize("fault", ["", "encoded", "missing box", "gap"])
def test_a_dcp_whose_metadata_name_too_little_is_not_complete(fault: str, tmp_path: Path) -> None:
    top, whole = ((0, 0), (4, 6)), ((0, 0), (8, 6))
    box = top if fault in {"missing box", "gap"} else whole
    boxes = {"w": [top, ((4, 0), (4, 6))], "b": [((0,), (5,))]} if fault == "missing box" else None
    contents = item(np.ascontiguousarray(FULL["w"][: box[1][0]])), item(FULL["b"])
    items = {0: [("w", box, contents[0]), ("b", ((0,), (5,)), contents[1])]}
    encoding = {"transform_descriptors": ["secret/1"]} if fault == "encoded" else {}
    write_torch(tmp_path / "dcp", FULL, items, boxes=boxes, **encoding)
    assert only(tmp_path).state == ("unknown" if fault else "complete")
    if not fault:
        assert newest_complete(tmp_path)[0].path == str(tmp_path / "dcp")


def test_metadata_of_one_run_are_read_once(
    mindspore_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that differ only in the path and the identifier of the save; files are judged for each checkpoint."""
    read = []

    class Counted(doubts.DCPMetadata):
        def __init__(self, directory: Place, listing: Sequence[str], **more: bytes) -> None:
            read.append(directory.name)
            super().__init__(directory, listing, **more)

    monkeypatch.setattr(doubts, "DCPMetadata", Counted)
    doubts._KNOWN_ENDS.clear()
    for step, save in enumerate(["0" * 36, "1" * 36, "2" * 36, "3" * 36]):
        root = shutil.copytree(mindspore_data / "dcp" / "fsdp2_bf16" / "checkpoint", tmp_path / f"step{step}")
        content = (root / ".metadata").read_bytes()
        begin = content.index(b"save_id\x94\x8c$") + 10
        content = content[:begin] + save.encode() + content[begin + 36 :]
        content = content.replace(b"\x8c\nfsdp2_bf16\x94", b"\x8c\n%010d\x94" % step)
        if step == 3:
            content = content.replace(b"\x8c\x06length", b"\x8c\x06lengtH")
        (root / ".metadata").write_bytes(content)
    cut = next((tmp_path / "step1").glob("*.distcp"))
    cut.write_bytes(cut.read_bytes()[:-2000])
    assert states(tmp_path) == {"step0": "complete", "step1": "incomplete", "step2": "complete", "step3": "incomplete"}
    assert [name for name in read if name in {"step0", "step1", "step2"}] == ["step0"]
    assert "step3" in read


class StorageMeta:
    """As PyTorch has it; a path and an identifier of the save come first."""

    def __init__(self, save: int) -> None:
        self.__dict__ |= {"checkpoint_id": f"step{save}", "save_id": f"{save:036d}", "load_id": None, "modules": []}


def test_a_state_with_the_name_of_a_field(tmp_path: Path) -> None:
    """Pickle writes a text once, and refers to it then: the field has no text of its own in the record of the save."""
    items = [("w", ((0, 0), (8, 6)), item(FULL["w"])), ("b", ((0,), (5,)), item(FULL["b"]))]
    for save, nbytes in ((1, 300), (2, 400)):
        objects = {sys.intern("checkpoint_id"): b"x" * 700, "z": b"y" * nbytes}
        write_torch(tmp_path / f"step{save}", FULL, {0: items}, objects=objects, storage_meta=StorageMeta(save))
    cut = tmp_path / "step2" / "__0_0.distcp"
    cut.write_bytes(cut.read_bytes()[:-50])
    assert states(tmp_path) == {"step1": "complete", "step2": "incomplete"}


def test_metadata_of_many_marks_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"x")
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + b"\x8c\rcheckpoint_id\x94" * (4 << 16))
    began = time.process_time()
    assert only(tmp_path).state == "incomplete"
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    "name",
    ["deepspeed/broken_cut", "deepspeed/broken_missing_optim", "deepspeed/broken_surplus", "dcp/hf_sharded",
     "dcp/rank_local", "orbax/two_processes_files", "orbax/mesh2x2x2_files_zarr3", "orbax/absent_zarr2",
     "deepspeed/moe_s2_dp2"],
)  # fmt: skip
def test_what_is_broken_or_in_doubt_is_not_complete(name: str, mindspore_data: Path) -> None:
    assert "complete" not in states(mindspore_data / name).values()


# --- files of ranks ---


def test_ranks_are_complete_if_a_strategy_says_how_many_there_are(tmp_path: Path) -> None:
    write_ranks(tmp_path / "run", FULL, CUT)
    assert only(tmp_path).state == "unknown"
    reshard.write_strategy(CUT, tmp_path / "strategy.json")
    found = only(tmp_path)
    assert (found.state, found.ranks, found.files, found.path) == ("complete", 4, 4, str(tmp_path / "run"))
    assert reshard.runs(tmp_path).newest == found
    smaller = Strategy.of({name: Layout.of([3], [-1] * array.ndim) for name, array in FULL.items()})
    reshard.write_strategy(smaller, tmp_path / "other.json")
    shutil.rmtree(tmp_path / "run" / "rank_3")
    assert only(tmp_path).state == "unknown"
    (tmp_path / "other.json").unlink()
    assert only(tmp_path).state == "incomplete"


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_without_a_file(rank: int, tmp_path: Path) -> None:
    write_ranks(tmp_path / "run", FULL, CUT)
    reshard.write_strategy(CUT, tmp_path / "strategy.json")
    (file,) = (tmp_path / "run" / f"rank_{rank}").iterdir()
    content = file.read_bytes()
    for damaged in (content[:-1], content[:20], b""):
        file.write_bytes(damaged)
        assert only(tmp_path).state == "incomplete"
    file.unlink()
    assert only(tmp_path).state == "incomplete"


@pytest.mark.parametrize("is_target", [False, True])
def test_ranks_that_do_not_fit_together_do_not_open(tmp_path: Path, *, is_target: bool) -> None:
    run = tmp_path / "run"
    write_ranks(tmp_path / "src" if is_target else run, FULL, CUT)
    reshard.write_strategy(CUT, tmp_path / "strategy.json")
    if is_target:
        reshard.convert(tmp_path / "src", run, source_strategy=CUT, target_strategy=CUT)
        shutil.rmtree(tmp_path / "src")
        (tmp_path / "strategy.json").unlink()
    assert only(tmp_path).state == "complete"
    (path,) = (run / "rank_2").iterdir()
    block = np.ones((2, 6), np.float32)
    for content in ({"b": FULL["b"]}, {"w": block[:1], "b": FULL["b"]}, {"w": block.astype("f2"), "b": FULL["b"]}):
        write_file(path, content, path.suffix[1:])
        found = only(tmp_path)
        assert (found.state, found.ranks) == ("unknown", 4)
        assert "fit" in found.reason


def test_steps_in_the_same_rank_directories(tmp_path: Path) -> None:
    for step, rank in product((50, 100, 150), range(2)):
        write_file(tmp_path / f"rank_{rank}" / f"net-1_{step}.ckpt", {"w": np.ones((4,), np.float32)}, "ckpt")
    (tmp_path / "rank_1" / "net-1_150.ckpt").unlink()
    (tmp_path / "rank_0" / "net-1_200_breakpoint.ckpt").touch()
    reshard.write_strategy(Strategy.of({"w": Layout.of([2], [0])}), tmp_path / "strategy.json")
    assert states(tmp_path) == {"@1_50": "complete", "@1_100": "complete", "@1_150": "incomplete"}
    newest = newest_complete(tmp_path)[0]
    assert (newest.step, newest.path) == ("1_100", str(tmp_path))


# --- sets, single files, files of torch.save ---


def write_set(root: Path) -> Path:
    write_file(root.parent / "whole.safetensors", FULL)
    reshard.convert(root.parent / "whole.safetensors", root, to="hf", max_shard_size=100)
    shutil.rmtree(root / ".reshard")
    (root.parent / "whole.safetensors").unlink()
    return root


def test_a_set_and_what_a_trainer_saves_beside_it(tmp_path: Path) -> None:
    root = write_set(tmp_path / "checkpoint-500")
    write_save(root / "optimizer.pt", {"state": tensor(np.ones(4, np.float32))})
    write_save(root / "training_args.bin", {"lr": 0.1})
    found = only(tmp_path)
    assert (found.step, found.format, found.state) == ("500", "hf set", "complete")
    for name in ("optimizer.pt", "model-00002-of-00002.safetensors"):
        content = (root / name).read_bytes()
        (root / name).write_bytes(content[:-1])
        assert only(tmp_path).state == "incomplete"
        (root / name).write_bytes(content)
    (root / "model-00002-of-00002.safetensors").rename(tmp_path / "lost")
    assert only(tmp_path).state == "incomplete"
    (tmp_path / "lost").rename(root / "model-00002-of-00002.safetensors")
    (root / "model.safetensors.index.json").unlink()
    assert only(tmp_path).state != "complete"


def test_single_files(tmp_path: Path) -> None:
    write_file(tmp_path / "a" / "model.safetensors", FULL)
    write_save(tmp_path / "b" / "pytorch_model.bin", {"w": tensor(np.ones((2, 2), np.float32))})
    write_file(tmp_path / "c" / "net-1_10.ckpt", FULL, "ckpt")
    write_file(tmp_path / "c" / "net-1_20.ckpt", FULL, "ckpt")
    write_file(tmp_path / "rank_3" / "x.safetensors", FULL)
    assert states(tmp_path / "rank_3") == {"": "unknown"}
    shutil.move(tmp_path / "rank_3", tmp_path / "d" / "rank_3")
    names = {"a": "complete", "b/pytorch_model.bin": "complete", "c/net-1_10.ckpt": "complete"}
    assert states(tmp_path) == names | {"c/net-1_20.ckpt": "complete", "d": "incomplete"}
    for path in (tmp_path / "a/model.safetensors", tmp_path / "b/pytorch_model.bin", tmp_path / "c/net-1_20.ckpt"):
        path.write_bytes(path.read_bytes()[:-1])
    assert states(tmp_path) == dict.fromkeys(states(tmp_path), "incomplete") | {"c/net-1_10.ckpt": "complete"}


def test_stores(tmp_path: Path) -> None:
    write_file(tmp_path / "w.safetensors", FULL)
    source = reshard.open(tmp_path / "w.safetensors")
    plan_with(source, files=ZarrGroup(shard_size=64)).run(tmp_path / "plain.zarr")
    plan_with(source, files=ZarrGroup(compression="zstd", shard_size=64)).run(tmp_path / "small.zarr")
    (tmp_path / "w.safetensors").unlink()
    assert states(tmp_path) == {"plain.zarr": "complete", "small.zarr": "complete"}
    for name in ("plain.zarr", "small.zarr"):
        chunk = next(path for path in (tmp_path / name / "w").rglob("*") if path.is_file() and path.suffix != ".json")
        chunk.write_bytes(chunk.read_bytes()[:-1])
    found = states(tmp_path)
    assert found["plain.zarr"] == "incomplete"
    assert found["small.zarr"] != "complete"
    (tmp_path / "plain.zarr" / "zarr.json").unlink()
    assert states(tmp_path).get("plain.zarr") != "complete"


# --- the newest ---


def write_steps(root: Path, *steps: int) -> None:
    for step in steps:
        path = write_file(root / f"step-{step}" / "model.safetensors", FULL)
        os.utime(path, (1_700_000_000 - step, 1_700_000_000 - step))


def test_the_newest_is_of_the_highest_step_or_of_another_directory_that_changed_last(tmp_path: Path) -> None:
    write_steps(tmp_path / "a", 9, 10)  # copied in another order
    write_steps(tmp_path / "b", 1000)
    assert newest_complete(tmp_path)[0].path == str(tmp_path / "a" / "step-10")
    found = reshard.runs(tmp_path)
    assert found.newest is not None
    assert found.newest.path == newest_complete(tmp_path)[0].path
    assert [each.step for each in found] == ["9", "10", "1000"]
    assert len(found[1:]) == 2
    (tmp_path / "a" / "step-10" / "model.safetensors").write_bytes(b"\0" * 7)
    assert newest_complete(tmp_path)[0].step == "9"
    assert "step-9" in repr(found)
    assert "<table" in found._repr_html_()
    assert "no checkpoint" in repr(reshard.runs(write_file(tmp_path / "x" / "y" / "no.txt", {}).parent))


def test_older_ones_are_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_steps(tmp_path, *range(1, 9))
    looked: list[str] = []
    opens = reshard.core.format.Found.open
    monkeypatch.setattr(
        "reshard.core.format.Found.open",
        lambda found, *options, **more: looked.append(found.place.parent.name) or opens(found, *options, **more),
    )
    assert newest_complete(tmp_path)[0].step == "8"
    assert looked == ["step-8"]


def test_none_is_complete(tmp_path: Path) -> None:
    with refused(SourceError, "no-checkpoint", tmp_path):
        newest_complete(tmp_path)
    for name in ("tmp-checkpoint-5", "step_5.tmp"):
        write_file(tmp_path / name / "model.safetensors", FULL)
    assert states(tmp_path) == {"tmp-checkpoint-5": "incomplete", "step_5.tmp": "incomplete"}
    with refused(SourceError, "no-checkpoint", tmp_path, "step_5.tmp"):
        newest_complete(tmp_path)
    with refused(SourceError, "not-found", "nothere"):
        stored_checkpoints(tmp_path / "nothere")
    with refused(SourceError, "not-a-directory", "model.safetensors"):
        stored_checkpoints(tmp_path / "step_5.tmp" / "model.safetensors")


# --- trees ---


def test_links_hidden_directories_and_strange_names(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_steps(run, 5)
    write_steps(tmp_path / "archive", 3)
    write_steps(run / ".cache", 7)
    (run / "latest").symlink_to("step-5")
    (run / "again").symlink_to(run)
    (run / "up").symlink_to("..")
    (run / "step-3").symlink_to(tmp_path / "archive" / "step-3")
    (run / "nowhere").symlink_to("gone")
    (run / "loop").symlink_to("loop")
    (run / "line\nbreak.safetensors").write_bytes(b"")
    (run / "a\nb").mkdir()
    assert states(run) == {"step-5": "complete", "step-3": "complete"}


def test_a_directory_that_links_of_ranks_point_to_is_no_model(tmp_path: Path) -> None:
    write_ranks(tmp_path, FULL, CUT)
    reshard.write_strategy(CUT, tmp_path / "run.json")
    for rank in range(4):
        (tmp_path / f"rank_{rank}").rename(tmp_path / f"card{rank}")
        (tmp_path / f"rank_{rank}").symlink_to(f"card{rank}")
    assert states(tmp_path) == {"": "complete"}


def test_a_link_to_a_rank_is_no_model(tmp_path: Path) -> None:
    write_ranks(tmp_path / "run", FULL, CUT)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "best").symlink_to(tmp_path / "run" / "rank_0")
    assert states(tmp_path / "other") == {"best": "unknown"}
    assert reshard.open(tmp_path / "other" / "best").warnings


def test_a_copy_of_a_step_is_not_newer_than_the_step(tmp_path: Path) -> None:
    write_steps(tmp_path, 100, 50)
    copy = shutil.copytree(tmp_path / "step-100", tmp_path / "step-100.bak")
    os.utime(copy / "model.safetensors")
    assert newest_complete(tmp_path)[0].path == str(tmp_path / "step-100")


def test_a_strategy_that_names_no_tensor_of_ranks_says_nothing_of_them(tmp_path: Path) -> None:
    write_ranks(tmp_path / "run", FULL, CUT)
    reshard.write_strategy(Strategy.of({"other": Layout.of([4], [0])}), tmp_path / "strategy.json")
    assert only(tmp_path).state == "unknown"


def test_a_very_deep_tree(tmp_path: Path) -> None:
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        for _ in range(400):
            Path("d").mkdir()
            os.chdir("d")
    finally:
        os.chdir(here)
    write_steps(tmp_path / "d" / "d", 5)
    assert list(states(tmp_path)) == ["d/d/step-5"]
    shutil.rmtree(tmp_path / "d", ignore_errors=True)


def test_a_directory_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_steps(tmp_path, 5)
    write_steps(tmp_path / "closed", 6)
    scan: Callable[[str], object] = os.scandir

    def refuse(path: str = ".") -> object:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert states(tmp_path) == {"closed": "unknown", "step-5": "complete"}


# --- at a URL ---


def test_a_bucket_is_listed_once(bucket: str, asked: Requests, mindspore_data: Path, tmp_path: Path) -> None:
    """One page of a thousand files, for any number of directories."""
    for name in ("dcp/fsdp2_bf16", "orbax/run", "deepspeed/s2_dp2_bf16", "checkpoint2/graph_dp2_tp4"):
        shutil.copytree(mindspore_data / name / "checkpoint", tmp_path / "all" / name)
    write_ranks(tmp_path / "all" / "ranks", FULL, CUT)
    reshard.write_strategy(CUT, tmp_path / "all" / "ranks.json")
    write_set(tmp_path / "all" / "set")
    put(tmp_path / "all", f"{bucket}/all")
    expected = states(tmp_path / "all")
    asked.operations.clear()
    assert states(f"{bucket}/all") == expected
    assert [operation for operation in asked.operations if operation.startswith("List")] == ["ListObjects"]
    assert {*asked.operations} == {"ListObjects", "GetObject"}
    assert stored_checkpoints(f"{bucket}/all")[0].modified > 1_700_000_000
    with refused(SourceError, "not-found", "nothere"):
        stored_checkpoints(f"{bucket}/nothere")
    with refused(SourceError, "no-such-bucket", "s3://no-bucket"):
        stored_checkpoints("s3://no-bucket/run")
    with refused(SourceError, "not-a-directory", "ranks.json"):
        stored_checkpoints(f"{bucket}/all/ranks.json")
