"""A target says what it is made from: verified, inspected and opened by its path alone; and ledgers that lie."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import numbers, tree, write_ranks
from commands import call
from refusals import failed, refused
from remotes import put

import reshard
from reshard import Layout, Selection, Strategy
from reshard.core.model.digests import digest
from reshard.core.records.made import made_of
from reshard.core.storage.places import as_place
from reshard.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.core.plan.plan import Plan
    from reshard.core.target import TargetFile

FULL = numbers({"w": (48, 16), "b": (24,), "c": (12, 8), "moments.w": (48, 16)})
ALSO = {"step": np.array(7, np.int64), "note": "größe"}
SOURCE = Strategy.of({
    "w": Layout.of([4], [0, -1]), "b": Layout.of([4], [-1]), "c": Layout.of([4], [-1, 0]),
    "moments.w": Layout.of([4], [0, -1]),
})  # fmt: skip
TARGET = Strategy.of({
    "w": Layout.of([2], [-1, 0]), "b": Layout.of([2], [0]), "c": Layout.of([2], [0, -1]),
    "moments.w": Layout.of([2], [-1, 0]),
})  # fmt: skip
STAGES = Strategy.of({
    "w": {0: Layout.of([2], [0, -1])}, "b": {0: Layout.of([2], [-1])}, "c": {1: Layout.of([2], [0, -1])},
    "moments.w": {1: Layout.of([2], [0, -1])},
})  # fmt: skip

PLANS: dict[str, tuple[Strategy | None, dict[str, Any]]] = {
    "ranks": (TARGET, {}),
    "cast and renamed": (TARGET, {"selection": Selection(cast={"float32": "bfloat16"}, name_map={})}),
    "weights": (TARGET, {"selection": Selection(exclude=("moments.*",))}),
    "one rank": (TARGET, {"ranks": [1]}),
    "each replica once": (TARGET, {"remove_redundancy": True, "to": "ckpt"}),
    "a share of that": (SOURCE, {"remove_redundancy": True, "ranks": [1], "to": "ckpt"}),
    "one stage": (STAGES, {"target_stage": 1}),
    "a set": (None, {"to": "mindspore", "max_shard_size": 3000}),
    "a zarr store": (None, {"to": "zarr"}),
}


@pytest.fixture
def source(tmp_path: Path) -> reshard.Checkpoint:
    return reshard.open(write_ranks(tmp_path / "src", FULL, SOURCE, "ckpt", ALSO), strategy=SOURCE)


@pytest.fixture
def plan(source: reshard.Checkpoint) -> Plan:
    return reshard.plan(source, TARGET)


def spoil(root: Path, file: TargetFile) -> None:
    """Change a bit of a tensor."""
    offset, nbytes = next(content.runs[-1] for content in file.layout.contents if content.runs and content.text is None)
    content = bytearray((root / file.path).read_bytes())
    content[offset + nbytes - 1] ^= 1
    (root / file.path).write_bytes(content)


@pytest.mark.parametrize(("target", "options"), PLANS.values(), ids=list(PLANS))
def test_a_path_is_enough_to_verify(
    source: reshard.Checkpoint, tmp_path: Path, target: Strategy | None, options: dict[str, Any]
) -> None:
    """Every bit; and what differs is found."""
    plan = reshard.plan(source, target, **options)
    plan.run(tmp_path / "out")
    found = reshard.verify(tmp_path / "out")
    assert found
    assert found.against == str(tmp_path / "src")
    assert found.bytes_read > plan.stats.bytes_written
    some = next(file for file in plan._record.files if file.layout.contents)
    spoil(tmp_path / "out", some)
    (difference, *_) = reshard.verify(tmp_path / "out").differences
    assert difference.kind == "values"


def test_the_commands_need_no_options(plan: Plan, tmp_path: Path) -> None:
    plan.run(tmp_path / "out")
    verified = call("verify", tmp_path / "out")
    assert verified.exit_code == 0
    assert f"= {tmp_path}/src; every bit of " in verified.stdout
    assert json.loads(call("inspect", tmp_path / "out", "--json").stdout)["tensors"][1]["layouts"]
    assert reshard.open(tmp_path / "out").strategy == TARGET
    assert "needs no" not in call("verify", tmp_path / "out", "--target-strategy", tmp_path / "no").stdout


def test_ranks_that_several_runs_wrote_are_of_one_make(source: reshard.Checkpoint, tmp_path: Path) -> None:
    for rank in (1, 0):
        reshard.plan(source, TARGET, ranks=[rank]).run(tmp_path / "out")
    assert len(list((tmp_path / "out" / ".reshard").glob("made-*"))) == 1
    assert reshard.verify(tmp_path / "out").ranks == (0, 1)
    assert not reshard.open(tmp_path / "out")._record.opening.partial


def say_instead(ledger: Path, said: str, instead: str) -> None:
    """Change what a ledger says that its target is made from, as if it had been made so."""
    (made,) = ledger.glob("made-*")
    old, content = made.stem.removeprefix("made-"), made.read_text().replace(said, instead)
    new = digest(content.encode())
    (ledger / f"made-{new}.json").write_text(content)
    made.unlink()
    for log in ledger.iterdir():
        log.write_bytes(log.read_bytes().replace(old.encode(), new.encode()))


@pytest.mark.parametrize("gone", ["src", "encrypted"])
def test_where_the_source_is_gone_checksums_are_compared(plan: Plan, tmp_path: Path, gone: str) -> None:
    plan.run(tmp_path / "out")
    if gone == "src":
        shutil.rmtree(tmp_path / "src")
    else:
        say_instead(tmp_path / "out" / ".reshard", '"encrypted":false', '"encrypted":true')
    found = reshard.verify(tmp_path / "out")
    assert found
    assert found.against == "its ledger"
    assert found.bytes_read == plan.stats.bytes_written
    assert f"not with {tmp_path}/src: " in found.warnings[0]
    shown = call("verify", tmp_path / "out").stdout
    assert "has the sizes and checksums of its ledger" in shown
    assert "every bit" not in shown
    spoil(tmp_path / "out", plan._record.files[0])
    with (tmp_path / "out" / plan._record.files[1].path).open("ab") as file:
        file.write(b"x")
    assert sorted(d.kind for d in reshard.verify(tmp_path / "out").differences) == ["checksum", "size"]
    (tmp_path / "out" / plan._record.files[1].path).unlink()
    assert sorted(d.kind for d in reshard.verify(tmp_path / "out").differences) == ["checksum", "file"]
    result = call("verify", tmp_path / "out")
    assert result.exit_code == 3
    assert "has other bytes than were written at " in result.output


def test_at_a_url(source: reshard.Checkpoint, root: str, tmp_path: Path) -> None:
    for name in ("ranks", "a zarr store", "a set"):
        target, options = PLANS[name]
        url = f"{root}/{name.replace(' ', '')}"
        reshard.plan(source, target, **options).run(url)
        found = reshard.verify(url)
        assert found
        assert found.against == str(tmp_path / "src")
    assert reshard.open(f"{root}/ranks").strategy == TARGET
    copied = put(tmp_path / "src", f"{root}/src")
    reshard.plan(reshard.open(copied, strategy=SOURCE), TARGET).run(f"{root}/from")
    assert reshard.verify(f"{root}/from").against == copied


def test_what_somebody_else_wrote_since_has_no_strategy(plan: Plan, tmp_path: Path) -> None:
    plan.run(tmp_path / "out")
    write_ranks(tmp_path / "other", FULL, TARGET)
    for path in (tmp_path / "other").rglob("*.safetensors"):
        shutil.copy(path, tmp_path / "out" / plan._record.files[0].path)
    assert "--source-strategy shows whole tensors" in call("inspect", tmp_path / "out").output


def lying(made: dict[str, Any], **said: Any) -> dict[str, Any]:
    return {**made, "provenance": {**made["provenance"], **said}}


def source_in(made: dict[str, Any]) -> dict[str, Any]:
    source: dict[str, Any] = made["provenance"]["source"]
    return source


LIES = {
    "nothing": lambda _: b"",
    "no JSON": lambda _: b"{",
    "deep": lambda _: b"[" * 100_000,
    "another version": lambda made: json.dumps(made | {"reshard_made": 3}).encode(),
    "no source": lambda made: json.dumps(lying(made, source={})).encode(),
    "a layout that cannot be": lambda made: json.dumps(made).replace('"layouts": [[[2]', '"layouts": [[[3]').encode(),
    "a device for a source": lambda made: json.dumps(
        lying(made, source={**source_in(made), "files": [[0, "/dev/zero", 1, None, ""]], "strategy": None})
    ).encode(),
    "a selection of another kind": lambda made: json.dumps(lying(made, selection={"include": 3})).encode(),
    "stars without end": lambda made: json.dumps(
        lying(made, selection={**made["provenance"]["selection"], "names": {"*" * 50: "x"}})
    ).encode(),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=list(LIES))
def test_a_ledger_that_lies(plan: Plan, tmp_path: Path, lie: Any) -> None:
    """Nothing is taken for verified, and nothing goes wrong but in a sentence."""
    plan.run(tmp_path / "out")
    before = tree(tmp_path / "out")
    (path,) = (tmp_path / "out" / ".reshard").glob("made-*")
    path.write_bytes(lie(json.loads(path.read_bytes())))
    said = call("verify", tmp_path / "out")
    assert "every bit" not in said.stdout or "its ledger" in said.stdout
    assert "unexpected" not in said.output
    assert tree(tmp_path / "out") == before


def test_no_path_of_a_ledger_leads_out_of_the_target(plan: Plan, tmp_path: Path) -> None:
    plan.run(tmp_path / "out")
    (log,) = (tmp_path / "out" / ".reshard").glob("*.jsonl")
    for place in ("../src/rank_0/checkpoint_0.ckpt", f"{tmp_path}/src/rank_0/checkpoint_0.ckpt"):
        log.write_text(log.read_text().replace(plan._record.files[0].path, place))
        made = made_of(as_place(tmp_path / "out"))
        assert made is not None
        assert list(made.records) == [plan._record.files[1].path]
        log.write_text(log.read_text().replace(place, plan._record.files[0].path))
    (tmp_path / "out" / ".reshard").rename(tmp_path / "elsewhere")
    (tmp_path / "out" / ".reshard").symlink_to(tmp_path / "elsewhere")
    assert made_of(as_place(tmp_path / "out")) is None


def test_of_two_checkpoints_in_one_directory_none_is_meant(source: reshard.Checkpoint, tmp_path: Path) -> None:
    """Whichever the ledger has last: both would be found."""
    for format in ("ckpt", "safetensors"):
        reshard.plan(source, TARGET, to=format).run(tmp_path / "out")
    for command in ("inspect", "verify"):
        assert call(command, tmp_path / "out").exit_code == 4
    with pytest.raises(SourceError):
        reshard.open(tmp_path / "out")
    assert call("inspect", tmp_path / "out", "--suffix", ".ckpt").exit_code == 0


def test_a_file_that_the_ledger_does_not_know_is_not_passed_over(plan: Plan, tmp_path: Path) -> None:
    plan.run(tmp_path / "out", fsync=False)
    shutil.copytree(tmp_path / "out/rank_1", tmp_path / "out/rank_2")
    failed(4, "no-common-checkpoint", "inspect", tmp_path / "out", places=(tmp_path / "out",))


def test_a_strategy_that_the_ledger_contradicts_is_refused(source: reshard.Checkpoint, tmp_path: Path) -> None:
    """Of as many ranks, and equal in all that headers and samples can show; a cut that is the same otherwise passes."""
    target = tmp_path / "out"
    one = Strategy.of({name: Layout.of([2], [0, *[-1] * (value.ndim - 1)]) for name, value in FULL.items()})
    other = Strategy.of({name: Layout.of([2], [*[-1] * (value.ndim - 1), 0]) for name, value in FULL.items()})
    reshard.plan(source, one, selection=Selection(include=("w", "c"), drop=("b",))).run(target)
    same = Strategy.of(dict.fromkeys("wc", Layout.of([2, 1], [1, -1])))
    for options in ({}, {"strategy": one}, {"strategy": same}):
        assert np.array_equal(reshard.open(target, **options)["w"].compute(), FULL["w"])
    with refused(SourceError, "strategy-mismatch", "w, c"):
        reshard.open(target, strategy=other)
    command = "convert", target, tmp_path / "z", "--source-strategy", write_strategy(tmp_path, other)
    failed(4, "strategy-mismatch", *command, places=("--source-strategy", "w, c"))
    shutil.rmtree(target / ".reshard")
    assert reshard.open(target, strategy=other, contents=False).tensors["w"].spec.shape == (24, 32)


def write_strategy(folder: Path, strategy: Strategy) -> Path:
    reshard.write_strategy(strategy, folder / "strategy.ckpt")
    return folder / "strategy.ckpt"


def test_less_than_the_ledger_allows_is_said(plan: Plan, tmp_path: Path) -> None:
    plan.run(tmp_path / "out")
    found = reshard.verify(tmp_path / "out", TARGET)
    assert "run `verify` with the path alone to compare every bit" in found.unchecked[0]
