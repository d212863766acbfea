"""Every MindSpore call that was recorded, made again under the same name.

The result must have the same files, tensors, dtypes, shapes and bytes. Where `differs_from_reference` says that
MindSpore's own result is wrong, or MindSpore raised an error, it must be the slice of the whole tensor instead. How
many calls went which way is asserted, and printed by `pytest -s`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import helpers
import numpy as np
from checkpoints import write_file
from refusals import refused
from samples import one_in

import reshard.mindspore as ms
from reshard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Outputs = dict[str, dict[str, dict[str, Any]]]


@dataclass
class Case:
    """A recorded model, with what its calls gave."""

    folder: Path
    meta: dict[str, Any] = field(init=False)
    full: dict[str, helpers.Array] = field(init=False)

    def __post_init__(self) -> None:
        self.meta, self.full = helpers.load_meta(self.folder), helpers.load_full(self.folder)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def strategies(self) -> list[str | None]:
        """The two strategy files."""
        found = [self.meta[side]["strategy_file"] for side in ("src", "dst")]
        return [None if name is None else str(self.folder / name) for name in found]

    def calls(self, name: str) -> Iterator[dict[str, Any]]:
        return (call for call in self.meta["calls"] if call["call"] == name)

    def names(self, side: str) -> set[str]:
        return set(self.meta[side]["layouts"] or ())

    def reference(self, rank: int, side: str | None) -> dict[str, dict[str, Any]]:
        """What a rank of one side must hold of every tensor, by plain slicing; whole tensors where that is None."""
        blocks = dict(self.full)
        if side is not None:
            blocks |= helpers.expected_blocks(self.full, self.meta[side], rank)
        return {
            name: {
                "dtype": self.meta["full"][name]["dtype"],
                "shape": list(block.shape),
                "sha256": hashlib.sha256(np.ascontiguousarray(block).tobytes()).hexdigest()[:32],
            }
            for name, block in blocks.items()
        }

    def of_rank(self, rank: int, side: str | None) -> set[str]:
        """The names that a rank of one side must have, of those in the files."""
        if side is None or self.meta[side]["layouts"] is None:
            return set(self.full)
        here = set(helpers.expected_blocks(self.full, self.meta[side], rank))
        return here | (set(self.full) - self.names("src") - self.names("dst"))


def cases(data: Path, every: int = 1) -> list[Case]:
    return [Case(data / "cases" / name) for name in helpers.case_names()[::every]]


def hashed(root: Path) -> Outputs:
    """All that was written, as it is recorded."""
    return {
        path.relative_to(root).as_posix(): {
            name: {"dtype": dtype, "shape": list(shape), "sha256": hashlib.sha256(content).hexdigest()[:32]}
            for name, (dtype, shape, content) in helpers.read_rank_file(path).items()
        }
        for path in sorted(root.rglob("*"))
        if path.suffix in {".ckpt", ".safetensors"}
    }


def check(case: Case, ours: Outputs, call: dict[str, Any], side: str | None = "dst") -> str:
    """Hold what was written against a recorded call; return which way it went."""
    theirs = {path.partition("/")[2]: tensors for path, tensors in call.get("outputs", {}).items()}
    differs = {path.partition("/")[2]: dict(wrong) for path, wrong in call.get("differs_from_reference", {}).items()}
    if not theirs:  # an error, of this call or of the one before it
        for path, tensors in ours.items():
            rank = int(re.findall(r"rank_(\d+)", path)[0])
            reference = case.reference(rank, side)
            assert tensors == {name: reference[name] for name in case.of_rank(rank, side)}, (case.name, path)
        assert len(ours) == (case.meta[side]["devices"] if side else 1)
        return "MindSpore fails"
    assert set(ours) == set(theirs), case.name
    dropped = case.names("src") - case.names("dst") if side == "dst" and case.names("dst") else set()
    for path, tensors in theirs.items():
        rank = int(re.findall(r"rank_(\d+)", path)[0])
        reference, wrong = case.reference(rank, side), differs.get(path, {})
        place = (case.name, path)
        for name, recorded in tensors.items():
            if name in dropped:  # MindSpore copies some rank's slice, by chance the right one where nothing is split
                assert name not in ours[path], (place, name)
            elif name in wrong:
                assert ours[path][name] == reference[name] != recorded, (place, name)
            else:
                assert ours[path][name] == recorded, (place, name)
        for name in set(ours[path]) - set(tensors):
            assert wrong[name] == "missing", (place, name)
            assert ours[path][name] == reference[name], (place, name)
    return "MindSpore is wrong" if any(differs.values()) else "equal"


def without_a_rank(function: Callable[..., object], *arguments: object) -> str:
    """A call for which a rank is lost: the error says which."""
    with refused(SourceError, "missing-block" if "by_rank" in function.__name__ else "missing-ranks", "rank 3"):
        function(*arguments)
    return "refused"


def check_counts(title: str, every: int, counts: Counter[str], **expected: int) -> None:
    """Hold how many calls went which way against those of all cases; of some cases, that no more did."""
    print(f"\n{title}: {dict(counts)}")
    wanted = {way.replace("_", " "): count for way, count in expected.items()}
    assert (counts == wanted) if every == 1 else (counts and counts <= Counter(wanted))


@one_in(4)
def test_transform_checkpoints(mindspore_data: Path, tmp_path: Path, every: int) -> None:
    """From ckpt; from safetensors, also with two processes, to ckpt, and as MindSpore would with contiguous slices."""
    counts: Counter[str] = Counter()
    for case in cases(mindspore_data, every):
        for call in case.calls("transform_checkpoints"):
            out = tmp_path / case.name / call["out"]
            output_format = call.get("output_format", call["format"])

            arguments = (
                str(case.folder / call["src_dir"]), str(out), "out", *case.strategies, call.get("process_num", 1),
                output_format,
            )  # fmt: skip
            if case.name == "lost_1":
                counts[without_a_rank(ms.transform_checkpoints, *arguments)] += 1
                assert not call["ok"]
                assert not out.exists()
            else:
                ms.transform_checkpoints(*arguments)
                counts[check(case, hashed(out), call)] += 1
    check_counts(
        "transform_checkpoints", every, counts, equal=127, MindSpore_is_wrong=53, MindSpore_fails=15, refused=5
    )


@one_in(4)
def test_transform_checkpoints_from_whole_tensors(mindspore_data: Path, tmp_path: Path, every: int) -> None:
    """How the source files of the cases were made."""
    counts: Counter[str] = Counter()
    for case in cases(mindspore_data, every):
        for call in case.calls("slice source: transform_checkpoints(None -> src)"):
            out = tmp_path / case.name
            write_file(out / "whole" / "rank_0" / "full.ckpt", case.full, "ckpt")
            ms.transform_checkpoints(out / "whole", out / "src", "src", None, case.strategies[0])
            counts[check(case, hashed(out / "src"), call, "src")] += 1
    check_counts("transform_checkpoints from whole tensors", every, counts, equal=38, MindSpore_fails=2)


@one_in(4)
def test_transform_checkpoints_to_whole_tensors(mindspore_data: Path, tmp_path: Path, every: int) -> None:
    counts: Counter[str] = Counter()
    for case in cases(mindspore_data, every):
        for call in case.calls("transform_checkpoints to full (dst None)"):
            out = tmp_path / case.name
            arguments = (case.folder / "src_ckpt", out, "out", case.strategies[0], None)
            if case.name == "lost_1":
                counts[without_a_rank(ms.transform_checkpoints, *arguments)] += 1
            else:
                ms.transform_checkpoints(*arguments)
                counts[check(case, hashed(out), call, None)] += 1
    check_counts("transform_checkpoints to whole tensors", every, counts, equal=36, MindSpore_fails=2, refused=1)


@one_in(4)
def test_by_rank_with_the_rank_list(mindspore_data: Path, tmp_path: Path, every: int) -> None:
    """Only the files of the rank list are given, so that it suffices; it is never longer than MindSpore's."""
    lists: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for case in cases(mindspore_data, every):
        (listed,) = case.calls("rank_list_for_transform")
        (call,) = case.calls("transform_checkpoint_by_rank")
        out = tmp_path / case.name
        for rank in range(case.meta["dst"]["devices"]):
            needed = ms.rank_list_for_transform(rank, *case.strategies)
            theirs = listed["per_rank"][str(rank)]
            assert needed == sorted(set(needed), reverse=True)
            if isinstance(theirs, dict):
                lists["MindSpore fails"] += 1
            else:
                assert len(needed) <= len(theirs)
                lists["equal" if needed == theirs else "as long" if len(needed) == len(theirs) else "shorter"] += 1
            files = {
                source: path
                for source in needed
                for path in (case.folder / "src_ckpt" / f"rank_{source}").glob("*.ckpt")
            }
            target = str(out / f"rank_{rank}" / "out.ckpt")
            arguments = (rank, files, target, *case.strategies)
            if case.name == "lost_1":
                without_a_rank(ms.transform_checkpoint_by_rank, *arguments)
            else:
                ms.transform_checkpoint_by_rank(*arguments)
        if case.name == "lost_1":
            assert not out.exists()
            counts["refused"] += 1
        else:
            counts[check(case, hashed(out), call)] += 1
    check_counts("rank_list_for_transform, of one rank each", every, lists, equal=174, shorter=36, MindSpore_fails=18)
    check_counts(
        "transform_checkpoint_by_rank", every, counts, equal=32, MindSpore_is_wrong=5, MindSpore_fails=3, refused=1
    )


@one_in(4)
def test_unified_and_load_distributed(mindspore_data: Path, tmp_path: Path, every: int) -> None:
    unified: Counter[str] = Counter()
    distributed: Counter[str] = Counter()
    for case in cases(mindspore_data, every):
        out = tmp_path / case.name
        source = case.folder / "src_safetensors"
        for call in case.calls("unified_safetensors"):
            arguments = (str(source), case.strategies[0], str(out / "unified"))
            if case.name == "lost_1":
                unified[without_a_rank(ms.unified_safetensors, *arguments)] += 1
                continue
            ms.unified_safetensors(*arguments)
            unified[_check_unified(case, out / "unified", call)] += 1
        for call in case.calls("load_distributed_checkpoint(network=None)"):
            returned = ms.load_distributed_checkpoint(
                network=None, predict_strategy=case.strategies[1], format="safetensors",
                unified_safetensors_dir=str(out / "unified"), dst_safetensors_dir=str(out / "ldc"),
            )  # fmt: skip
            assert returned == call["returned"]
            for tensors in call["outputs"].values():  # MindSpore makes hyper-parameters of a slice of these
                for name in [name for name in tensors if name.startswith("accu_grads")]:
                    del tensors[name]
            for path, wrong in call["differs_from_reference"].items():
                call["differs_from_reference"][path] = [pair for pair in wrong if not _left_out(case, *pair)]
            distributed[check(case, hashed(out / "ldc"), call)] += 1
    check_counts("unified_safetensors", every, unified, equal=35, MindSpore_is_wrong=2, MindSpore_fails=2, refused=1)
    check_counts("load_distributed_checkpoint", every, distributed, equal=33, MindSpore_is_wrong=3)


def _left_out(case: Case, name: str, what: str) -> bool:
    """Tensors that the target strategy does not name, which MindSpore leaves out too; and accumulated gradients."""
    return name.startswith("accu_grads") or (what == "missing" and name not in case.names("dst"))


def _check_unified(case: Case, out: Path, call: dict[str, Any]) -> str:
    ours = hashed(out)
    found = {name: tensor for tensors in ours.values() for name, tensor in tensors.items()}
    assert len(found) == sum(map(len, ours.values()))
    reference = case.reference(0, None)
    accumulated = {name for name in case.names("src") if name.startswith("accu_grads")}
    assert found == {name: tensor for name, tensor in reference.items() if name not in accumulated}
    index = json.loads((out / "param_name_map.json").read_bytes())
    assert index["weight_map"] == {
        name: path for path, tensors in ours.items() for name in tensors if path != "hyper_param.safetensors"
    }
    if not call["ok"]:
        return "MindSpore fails"
    theirs = {path.partition("/")[2]: tensors for path, tensors in call["outputs"].items()}
    wrong = {name for name, _ in call["differs_from_reference"]}
    assert wrong == accumulated & set(theirs["hyper_param.safetensors"])
    assert ours == {
        path: {name: tensor for name, tensor in tensors.items() if name not in wrong}
        for path, tensors in theirs.items()
    }
    # What MindSpore does not say, and does not read: that a file of hyper-parameters belongs to the set.
    assert index["metadata"].pop("hyper_param") == "hyper_param.safetensors"
    assert index == call["param_name_map"]
    return "MindSpore is wrong" if wrong else "equal"


@one_in(4)
def test_both_format_converters(mindspore_data: Path, tmp_path: Path, every: int) -> None:
    counts: Counter[str] = Counter()
    for case in cases(mindspore_data, every):
        for function, side in ((ms.ckpt_to_safetensors, "c2s"), (ms.safetensors_to_ckpt, "s2c")):
            (call,) = case.calls(function.__name__)
            function(str(case.folder / call["src_dir"]), str(tmp_path / case.name / side))
            ours = hashed(tmp_path / case.name / side)
            assert ours == {path.partition("/")[2]: tensors for path, tensors in call["outputs"].items()}, case.name
            assert not call["differs_from_reference"]
            counts["equal"] += 1
    check_counts("ckpt_to_safetensors, safetensors_to_ckpt", every, counts, equal=82)


def test_load_segmented_checkpoints(mindspore_data: Path) -> None:
    counts: Counter[str] = Counter()
    for case in cases(mindspore_data):
        for call in case.calls("load_segmented_checkpoints(rank_0)"):
            loaded = ms.load_segmented_checkpoints(str(case.folder / call["src_dir"]))
            shown = {name: [list(p.shape), re.findall(r"dtype=(\w+)", repr(p))[0]] for name, p in loaded.items()}
            assert shown == call["returned"], case.name
            counts["equal"] += 1
    check_counts("load_segmented_checkpoints", 1, counts, equal=41)
