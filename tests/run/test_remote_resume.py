"""Going on with runs whose target is a URL: what is finished is not written again, and nothing is lost or wrong."""

from __future__ import annotations

import signal
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
from checkpoints import plan_with, tree, write_ranks
from faulty import IMPORTED, Faults, raising
from refusals import refused
from remotes import COLUMNS, FULL, ROWS, at_urls, get, put, records
from samples import slow

import reshard
from reshard.core.run.state import session
from reshard.core.run.state.locks import LockObjects
from reshard.core.run.state.session import Session
from reshard.errors import ChangedError, TargetError, bytes_text
from reshard.formats.sets.options import HuggingFaceSet, MindSporeSet
from reshard.formats.zarr.layout import ZarrGroup

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def source(root: str, tmp_path: Path) -> reshard.Checkpoint:
    put(write_ranks(tmp_path / "src", FULL, ROWS), f"{root}/src")
    return reshard.open(f"{root}/src", strategy=ROWS)


@pytest.fixture
def undisturbed(source: reshard.Checkpoint, tmp_path: Path) -> dict[str, bytes]:
    reshard.plan(source, COLUMNS).run(tmp_path / "undisturbed")
    return tree(tmp_path / "undisturbed")


@pytest.fixture
def streamed(faults: Faults) -> list[str]:
    """The files that were begun to be written, by their last two names."""
    found: list[str] = []
    faults.every(lambda call: found.append("/".join(call.path.split("/")[-2:])), "create")
    return found


def stop_after(files: int, error: type[BaseException] = KeyboardInterrupt) -> Any:
    left = iter(range(files - 1))

    def progress(event: Any) -> None:
        if event.written and next(left, None) is None:
            raise error

    return progress


@at_urls("stop", [("synchronous", 1), ("threads", 1), ("synchronous", 2), ("threads", 2)], 3)
def test_finished_files_are_not_written_again(
    root: str, source: reshard.Checkpoint, undisturbed: dict[str, bytes], streamed: list[str], several_groups: None,
    stop: tuple[str, int],
) -> None:  # fmt: skip
    scheduler, finished = stop
    plan = reshard.plan(source, COLUMNS)
    with pytest.raises(KeyboardInterrupt) as caught:
        plan.run(f"{root}/out", client=scheduler, threads=1, progress=stop_after(finished))
    kept = get(f"{root}/out")
    assert kept.items() <= undisturbed.items()
    assert finished <= len(kept) <= len(undisturbed)  # the next one may have been on its way
    nbytes = plan.stats.bytes_written * len(kept) // len(undisturbed)
    (note,) = caught.value.__notes__
    assert note.startswith(
        f"{bytes_text(nbytes)} of {bytes_text(plan.stats.bytes_written)} are written and kept; the same command resumes"
    )
    streamed.clear()
    report = plan.run(f"{root}/out", client=scheduler)
    assert sorted(streamed) == sorted(undisturbed.keys() - kept.keys())
    assert (report.finished, report.resumed) == (len(kept), nbytes)
    assert get(f"{root}/out") == undisturbed
    assert len(records(f"{root}/out")) == 3


@pytest.mark.parametrize(("root", "every"), [("memory", 1), ("s3", 5), slow("s3", 1)], indirect=["root"])
def test_a_run_that_fails_at_any_write_is_gone_on_with(
    root: str, source: reshard.Checkpoint, undisturbed: dict[str, bytes], streamed: list[str], several_groups: None,
    faults: Faults, monkeypatch: pytest.MonkeyPatch, every: int,
) -> None:  # fmt: skip
    """Of files, records, names: whatever fails, no file is wrong, and what is whole is not written again."""
    monkeypatch.setattr(session, "FLUSH_SECONDS", 0)
    plan = reshard.plan(source, COLUMNS)
    operations, gone = ("write_at", "finish", "publish", "put"), raising(TargetError("the network is gone"))
    count = 0
    for number in range(0, 60, every):
        with faults.broken(number, gone, *operations, after=True):
            try:
                plan.run(f"{root}/out{number}", client="synchronous")
                break
            except TargetError:
                count += 1
        kept = get(f"{root}/out{number}")
        assert kept.items() <= undisturbed.items()
        streamed.clear()
        report = plan.run(f"{root}/out{number}", client="synchronous")
        assert len(streamed) == len(undisturbed) - report.finished
        assert report.finished in {len(kept), len(kept) - 1}  # one whose record could not be written
        assert get(f"{root}/out{number}") == undisturbed
    assert count > 3 * 4 // every


_KILLED = """
import os, signal, sys
from reshard.core.plan.uploads import sending
from reshard.core.run.state import session
from reshard.core.run.state.locks import LockObjects
from reshard.core.run.state.session import Session
from faulty import Faults, MonkeyPatch, install
sending.STREAMS_AT_ONCE, session.FLUSH_SECONDS = 1, 0
faults = Faults()
faults.nth(int(sys.argv[2]), lambda call: os.kill(os.getpid(), int(sys.argv[1])), "put", after=True)
install(faults, MonkeyPatch())
from reshard.cli.main import main
main(sys.argv[3:])
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_command_that_is_stopped_may_be_typed_again(bucket: str, tmp_path: Path, number: signal.Signals) -> None:
    """When two files are there, and the second is not noted yet."""
    write_ranks(tmp_path / "src", FULL, ROWS)
    reshard.write_strategy(ROWS, tmp_path / "rows.ckpt")
    reshard.write_strategy(COLUMNS, tmp_path / "columns.ckpt")
    options = [
        f"--source-strategy={tmp_path}/rows.ckpt",
        f"--target-strategy={tmp_path}/columns.ckpt",
        "--threads=1",
        "--to=safetensors",
    ]
    command = ["convert", f"{tmp_path}/src", f"{bucket}/out", *options]
    stopped = subprocess.run(
        [sys.executable, "-c", IMPORTED + _KILLED, str(int(number)), "4", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    kept = get(f"{bucket}/out")
    assert len(kept) in {2, 3}  # the next one may have been on its way
    if number == signal.SIGTERM:
        assert stopped.returncode == 143
        assert stopped.stderr.startswith("stopped by SIGTERM; ")
        assert " are written and kept; the same command resumes" in stopped.stderr
    else:
        assert stopped.returncode == -number
    plan = reshard.plan(reshard.open(tmp_path / "src", strategy=ROWS), COLUMNS)
    assert plan.run(f"{bucket}/out").finished == (len(kept) if number == signal.SIGTERM else 1)
    plan.run(tmp_path / "out")
    assert get(f"{bucket}/out") == tree(tmp_path / "out")


@at_urls(
    "case",
    [
        (MindSporeSet(9000), 1),
        (HuggingFaceSet(9000), 1),
        (MindSporeSet(9000), 2),
        (HuggingFaceSet(9000), 2),
    ],
    3,
)
def test_the_index_of_a_set_is_there_when_all_is(
    root: str, source: reshard.Checkpoint, tmp_path: Path, several_groups: None, case: tuple[Any, int]
) -> None:
    """Not while an older set is replaced either."""
    files, finished = case
    plan = plan_with(source, files=files, format="safetensors")
    plan.run(tmp_path / "out")
    (index,) = (file.path for file in plan._record.files if file.publish != "file")
    for options in ({}, {"restart": True}):
        with pytest.raises(KeyboardInterrupt):
            plan.run(f"{root}/out", client="synchronous", progress=stop_after(finished), **options)
        assert index not in get(f"{root}/out")
        assert plan.run(f"{root}/out").finished == finished
        assert get(f"{root}/out") == tree(tmp_path / "out")


def test_what_a_group_replaces_stays_until_all_of_it_is_sent(source: reshard.Checkpoint, faults: Faults) -> None:
    """Where a file gets its name after it is sent."""
    plan = reshard.plan(source, COLUMNS)
    url = f"memory://{uuid.uuid4().hex}"
    plan.run(url)
    before = get(url)
    faults.clear()
    faults.nth(1, raising(TargetError("the network is gone")), "finish", after=True)
    with refused(TargetError, "bad-target", "the network is gone"):
        plan.run(url, client="synchronous", restart=True)
    assert get(url) == before


def test_what_a_changed_source_leaves(root: str, source: reshard.Checkpoint, several_groups: None) -> None:
    """Of the run in which it changes nothing, so that the same command begins again; of an earlier one what it made."""
    fs, path = fsspec.core.url_to_fs(source._record.files[1].path)

    def change(event: Any) -> None:
        if event.written:
            fs.pipe_file(path, fs.cat_file(path)[:-1] + event.written.to_bytes(8)[-1:])

    plan = reshard.plan(source, COLUMNS)
    with pytest.raises(ChangedError) as caught:
        plan.run(f"{root}/out", client="synchronous", progress=change)
    assert not hasattr(caught.value, "__notes__")
    assert get(f"{root}/out") == {}
    assert records(f"{root}/out") == []
    plan = reshard.plan(reshard.open(f"{root}/src", strategy=ROWS), COLUMNS, ranks=[0])
    assert plan.run(f"{root}/out").finished == 0
    plan = reshard.plan(reshard.open(f"{root}/src", strategy=ROWS), COLUMNS)
    with pytest.raises(ChangedError) as caught:
        plan.run(f"{root}/out", client="synchronous", progress=change)
    (note,) = caught.value.__notes__
    assert "restart=True" in note
    assert len(get(f"{root}/out")) == 1


def test_on_a_cluster(
    source: reshard.Checkpoint, undisturbed: dict[str, bytes], root: str, streamed: list[str], several_groups: None
) -> None:
    """Workers note what they finished; the command skips it."""
    distributed = pytest.importorskip("distributed")
    plan = reshard.plan(source, COLUMNS)
    with distributed.Client(
        processes=False, n_workers=1, threads_per_worker=1, dashboard_address=":0", set_as_default=False
    ) as client:
        with pytest.raises(KeyboardInterrupt):
            plan.run(f"{root}/out", client=client, progress=stop_after(1))
        kept = get(f"{root}/out")
        assert kept.items() <= undisturbed.items()
        streamed.clear()
        report = plan.run(f"{root}/out", client=client)
    assert len(kept) == report.finished >= 1
    assert sorted(streamed) == sorted(undisturbed.keys() - kept.keys())
    assert get(f"{root}/out") == undisturbed


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("tasks", [slow(1), 3])
@pytest.mark.parametrize("killed", [True, False])
def test_a_store_is_resumed(
    source: reshard.Checkpoint, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: int, killed: bool,
    compression: str | None, faults: Faults,
) -> None:  # fmt: skip
    """Files of chunks that are complete are not sent again; at the end nothing but the store is there."""
    monkeypatch.setattr(session, "FLUSH_SECONDS", 0)
    plan = plan_with(source, files=ZarrGroup(chunk_size=1024, shard_size=0, compression=compression))
    plan.run(tmp_path / "whole")
    with monkeypatch.context() as patch:
        if killed:
            patch.setattr(Session, "failed", lambda *_: None)
            patch.setattr(LockObjects, "release", lambda locks: locks._ended.set())  # the object stays
            patch.setattr("reshard.core.run.state.locks._has_ended", lambda _: True)
        with pytest.raises(KeyboardInterrupt) as caught:
            plan.run(f"{root}/out", progress=stop_after(tasks), client="synchronous")
    assert killed or "written and kept; the same command resumes" in caught.value.__notes__[0]
    kept = get(f"{root}/out")
    assert "zarr.json" not in kept
    assert 0 < len(kept) < len(plan._record.files)
    faults.clear()
    monkeypatch.setattr("reshard.core.run.state.locks._has_ended", lambda _: True)
    other = plan_with(
        source, files=ZarrGroup(chunk_size=1024, shard_size=0, compression=None if compression else "zstd")
    )
    with refused(TargetError, "other-run", "restart=True"):
        other.run(f"{root}/out")
    report = plan.run(f"{root}/out")
    sent = [call.path.removeprefix(f"{root}/out/") for call in faults.of("create")]
    assert sorted(sent) == sorted({file.path for file in plan._record.files} - kept.keys())
    assert report.finished == len(kept)
    assert report.resumed + report.bytes_written == plan.stats.bytes_written
    assert get(f"{root}/out") == tree(tmp_path / "whole")
    assert not records(f"{root}/out")
