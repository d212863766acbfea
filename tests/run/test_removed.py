"""What a run that starts over removes: files that earlier runs wrote and it does not; when, after kills, and not."""

from __future__ import annotations

import os
import shutil
from itertools import count
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
from checkpoints import assert_equal, assert_rank_files, numbers, plan_with, tree, write_file, write_ranks
from commands import call, done
from refusals import failed, refused
from remotes import get

import reshard
from reshard import Layout, Selection, Strategy
from reshard.core.run.state.ledger import Ledger
from reshard.core.run.state.session import Session
from reshard.errors import TargetError
from reshard.formats.checkpoint2.options import Checkpoint2
from reshard.formats.dcp.names import DCP

if TYPE_CHECKING:
    from pathlib import Path

    from faulty import Call, Faults

SHAPES = {"a": (8, 4), "b": (8, 8)}
FULL = numbers(SHAPES)


def ranks(number: int) -> Strategy:
    return Strategy.of(dict.fromkeys(SHAPES, Layout.of([number], [0, -1])))


STAGES = Strategy.of({"a": {0: Layout.of([2], [0, -1])}, "b": {1: Layout.of([2], [0, -1])}})


class Killed(BaseException):
    """Ends a run as a kill does, with no time to clean up."""


@pytest.fixture
def source(tmp_path: Path) -> reshard.Checkpoint:
    return reshard.open(write_file(tmp_path / "src" / "net.safetensors", FULL))


@pytest.fixture
def eight(source: reshard.Checkpoint, tmp_path: Path) -> Path:
    reshard.plan(source, ranks(8)).run(tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def unclean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed run leaves everything as it is, as one that was killed."""
    monkeypatch.setattr(Session, "failed", lambda *_: None)


def rank_names(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("rank_*"))


@pytest.mark.parametrize("option", ["overwrite", "restart"])
def test_fewer_ranks(source: reshard.Checkpoint, eight: Path, tmp_path: Path, option: str) -> None:
    plan = reshard.plan(source, ranks(4))
    report = plan.run(eight, **{option: True})
    assert sorted(report.removed) == [f"rank_{n}/checkpoint_{n}.safetensors" for n in (4, 5, 6, 7)]
    assert rank_names(eight) == ["rank_0", "rank_1", "rank_2", "rank_3"]
    assert_rank_files(eight, FULL, ranks(4))
    assert reshard.open(eight).strategy == ranks(4), "the ledger is valid for the ranks that it names"
    assert reshard.verify(eight).against == source.root
    done("convert", "--to=mindspore", eight, tmp_path / "set")
    assert_equal(reshard.open(tmp_path / "set"), FULL)
    assert done("inspect", eight, "--json")
    assert plan.run(eight).finished == 4
    reshard.plan(source, ranks(8)).run(eight, overwrite=True)
    assert_rank_files(eight, FULL, ranks(8))


def changed(path: Path) -> None:
    path.write_bytes(path.read_bytes()[::-1])


def touched(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def linked(path: Path) -> None:
    elsewhere = path.parents[2] / "elsewhere"
    shutil.move(path.parent, elsewhere)
    path.parent.symlink_to(elsewhere)


@pytest.mark.parametrize("change", [changed, touched, linked])
def test_ranks_of_unknown_origin_are_refused(
    source: reshard.Checkpoint, eight: Path, tmp_path: Path, change: Any
) -> None:
    change(eight / "rank_5" / "checkpoint_5.safetensors")
    before = tree(tmp_path)
    reshard.write_strategy(ranks(4), tmp_path / "four.ckpt")
    before["four.ckpt"] = (tmp_path / "four.ckpt").read_bytes()
    command = ["convert", source.root, eight, "--target-strategy", tmp_path / "four.ckpt", "--overwrite"]
    for more in ([], ["--dry-run"]):
        failed(6, "other-ranks", *command, *more, places=("rank_5/checkpoint_5.safetensors",))
        assert tree(tmp_path) == before
    shutil.rmtree(eight / ".reshard")
    assert call(*command).exit_code == 6
    assert tree(tmp_path) == before


def test_a_run_that_is_killed_anywhere_is_gone_on_with(
    source: reshard.Checkpoint, tmp_path: Path, faults: Faults, unclean: None
) -> None:
    """Until all is complete nothing of the old target is gone, and what is typed again removes the rest."""
    plan = reshard.plan(source, ranks(4), selection=Selection(cast={"float32": "float64"}))
    plan.run(tmp_path / "expected")
    reshard.plan(source, ranks(8)).run(tmp_path / "old")
    seen = set()
    for turn in count():
        out = tmp_path / f"{turn}"
        reshard.plan(source, ranks(8)).run(out)
        kinds: list[str] = []

        def killing(call: Call, turn: int = turn, kinds: list[str] = kinds) -> None:
            kinds.append(call.kind)
            if len(kinds) == turn + 1:
                raise Killed

        faults.clear()
        faults.every(killing, "create", "write_at", "publish", "remove")
        try:
            plan.run(out, overwrite=True, threads=1)
        except Killed:
            if not {"publish", "remove"}.intersection(kinds[:-1]):
                left = {path: content for path, content in tree(out).items() if not path.endswith(".partial")}
                assert left == tree(tmp_path / "old")
            seen.add(kinds[-1])
            faults.clear()
            plan.run(out, overwrite=True)
        else:
            break
        assert tree(out) == tree(tmp_path / "expected")
        assert reshard.verify(out).against == source.root
    assert seen == {"create", "write_at", "publish", "remove"}


def test_what_a_killed_run_of_more_ranks_left_goes_too(
    source: reshard.Checkpoint, tmp_path: Path, faults: Faults, unclean: None
) -> None:
    faults.nth(9, lambda _: (_ for _ in ()).throw(Killed()), "write_at", after=True)
    with pytest.raises(Killed):
        reshard.plan(source, ranks(8)).run(tmp_path / "out", threads=1)
    faults.clear()
    (tmp_path / "out" / "rank_6" / "mine.partial").touch()
    (tmp_path / "out" / "rank_7" / "checkpoint_7.safetensors.partial").touch()
    reshard.plan(source, ranks(4)).run(tmp_path / "out", overwrite=True)
    left = [path for path in tree(tmp_path / "out") if path.endswith(".partial")]
    assert left == ["rank_6/mine.partial", "rank_7/checkpoint_7.safetensors.partial"]


def test_other_ranks_of_the_same_target_stay(source: reshard.Checkpoint, eight: Path) -> None:
    four = ranks(4)
    assert len(reshard.plan(source, four, ranks=[0, 2, 3]).run(eight, overwrite=True).removed) == 5
    assert reshard.plan(source, four, ranks=[1]).run(eight, overwrite=True).removed == ()
    assert reshard.open(eight).strategy == four
    assert not reshard.open(eight)._record.opening.partial
    assert reshard.plan(source, four, ranks=[3]).run(eight, restart=True).removed == ()
    assert_rank_files(eight, FULL, four)


def test_stages_of_a_pipeline_stay(source: reshard.Checkpoint, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for overwrite in (False, True):
        for stage in (0, 1):
            report = reshard.plan(source, STAGES, target_stage=stage).run(out, overwrite=overwrite)
            assert report.removed == ()
    assert_rank_files(out, FULL, STAGES)
    one = STAGES.of_stage(1)
    report = reshard.plan(source, one, target_stage=1, drop=("a",)).run(out, overwrite=True)
    assert report.removed == (), "nobody knows which ranks the other stages have"


def test_files_that_another_run_writes_stay(
    source: reshard.Checkpoint, eight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where each process writes some ranks, over a larger target."""
    other = Ledger(str(eight))
    other.hold(["rank_3/checkpoint_3.safetensors"])
    try:
        report = reshard.plan(source, ranks(4), ranks=[0, 1]).run(eight, overwrite=True)
    finally:
        other.release()
    assert rank_names(eight) == ["rank_0", "rank_1", "rank_3"]
    assert "rank_3/checkpoint_3.safetensors" not in report.removed


def test_other_steps_and_iterations_stay(source: reshard.Checkpoint, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for step in (6, 7, 7):
        reshard.plan(source, to="checkpoint2", target_step=step).run(out, overwrite=True)
    reshard.plan(source).run(out, overwrite=True)
    assert {"iteration_00000006", "iteration_00000007"} <= {path.name for path in out.iterdir()}
    for number in (6, 7):
        assert_equal(reshard.open(out, step=number), FULL)
    for step in ("1_10", "1_20"):
        write_ranks(tmp_path / "ranks", FULL, ranks(2), name=f"net-{{rank}}-{step}")
        done("convert", tmp_path / "ranks", tmp_path / "converted", "--to", "ckpt", "--suffix", step, "--overwrite")
    assert len(tree(tmp_path / "converted")) == 4


def test_the_source_stays(source: reshard.Checkpoint, eight: Path) -> None:
    """It is where the target is, and was written by this program, too."""
    before = tree(eight)
    done("convert", eight, eight, "--to", "ckpt", "--overwrite")
    assert before.items() <= tree(eight).items()
    for path in eight.glob("rank_*/*.ckpt"):
        path.unlink()
    one = eight / "rank_5" / "checkpoint_5.safetensors"
    reshard.plan(reshard.open(one, layout={"*": "whole"}), prefix="one_").run(eight, overwrite=True)
    assert one.read_bytes() == before["rank_5/checkpoint_5.safetensors"]


def test_another_format_and_a_set_replace_ranks(source: reshard.Checkpoint, eight: Path) -> None:
    reshard.plan(source, ranks(4), to="ckpt").run(eight, overwrite=True)
    assert sorted(tree(eight)) == [f"rank_{n}/checkpoint_{n}.ckpt" for n in range(4)]
    reshard.plan(source, to="hf").run(eight, overwrite=True)
    assert len(tree(eight)) == 2
    assert reshard.verify(eight).against == source.root


def test_a_dcp_and_an_iteration_of_fewer_files(source: reshard.Checkpoint, tmp_path: Path) -> None:
    kinds = {"dcp": DCP, "run": Checkpoint2}
    for name, kind in kinds.items():
        more = {"step": 5} if kind is Checkpoint2 else {}
        small, large = (plan_with(source, files=kind(max_shard_size=size, **more)) for size in (100, 1 << 20))
        small.run(tmp_path / name)
        large.run(tmp_path / "expected" / name)
        assert large.run(tmp_path / name, overwrite=True).removed
        assert tree(tmp_path / name) == tree(tmp_path / "expected" / name)
        assert reshard.verify(tmp_path / name).against == source.root


def test_at_a_url(source: reshard.Checkpoint, root: str) -> None:
    url = f"{root}/out"
    for _ in range(2):
        reshard.plan(source, ranks(8)).run(url, overwrite=True)
        assert len(reshard.plan(source, ranks(4)).run(url, overwrite=True).removed) == 4
        assert len([path for path in get(url) if ".reshard" not in path]) == 4
        assert reshard.verify(url).against == source.root
        assert reshard.open(url).strategy == ranks(4)
    fs, path = fsspec.core.url_to_fs(f"{url}/rank_6/checkpoint_6.safetensors")
    fs.pipe_file(path, b"theirs")
    before = get(url)
    with refused(TargetError, "other-ranks", "rank_6/checkpoint_6.safetensors"):
        reshard.plan(source, ranks(2)).run(url, overwrite=True)
    assert get(url) == before


def test_ranks_that_the_ledger_does_not_name_are_named(eight: Path, source: reshard.Checkpoint) -> None:
    four = eight.parent / "four"
    reshard.plan(source, ranks(4)).run(four)
    shutil.copytree(eight / "rank_4", four / "rank_4")
    for command in (
        ["convert", "--to=mindspore", four, eight.parent / "set"],
        ["strategy", "make", "--like", four, "-o", four / "s.json"],
    ):
        result = call(*command)
        assert result.exit_code == 4
        assert "rank_4/checkpoint_4.safetensors is not in the ledger" in result.stderr
    assert "rank_4/checkpoint_4.safetensors is not in the ledger" in done("inspect", four).stderr
    assert "complete" not in done("verify", four).stdout
    shutil.rmtree(four / "rank_4")
    done("convert", "--to=mindspore", four, eight.parent / "set")
