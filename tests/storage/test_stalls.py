"""Object stores that stall, refuse, lose replies and corrupt: requests are made again, five times at most."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
from checkpoints import tree, write_file, write_ranks
from commands import heed_signals
from fsspec.asyn import AsyncFileSystem
from refusals import refused
from remotes import get, put
from samples import slow

import reshard
from reshard import Layout, Strategy
from reshard.core.storage.places import as_place
from reshard.core.storage.urls import retries
from reshard.core.storage.urls.failures import passes as may_pass
from reshard.core.storage.urls.remote import remote_store
from reshard.core.storage.urls.s3 import upload_parts
from reshard.errors import SourceError, UnansweredError, UnsentError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from faulty_proxy import FaultyProxy

STALL = 1.0
BIG = {"w": np.arange(3 << 20, dtype=np.float32).reshape(-1, 1024), "b": np.ones(7, np.float32)}  # 12 MiB
HALVES = Strategy.of({"w": Layout.of([2], [0, -1]), "b": Layout.of([2], [-1])})

READS = [
    ("stall", "GetObject"), ("wait", "GetObject"), ("cut", "GetObject"), ("503", "GetObject"), ("wait", "ListObjects"),
    ("503", "ListObjects"),
]  # fmt: skip
WRITES = [
    ("stall", "UploadPart"), ("wait", "UploadPart"), ("flip", "UploadPart"), ("lose", "UploadPart"),
    ("503", "UploadPart"), slow("wait", "CreateMultipartUpload"), slow("wait", "CompleteMultipartUpload"),
    ("lose", "CompleteMultipartUpload"), slow("503", "CompleteMultipartUpload"), ("lose", "PutObject"),
    ("flip", "PutObject"), slow("wait", "PutObject"),
]  # fmt: skip


@pytest.fixture
def through(bucket: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy that this process and those it starts reach S3 by."""
    monkeypatch.setenv("RESHARD_STALL_SECONDS", str(STALL))
    monkeypatch.setattr(retries, "_FIRST_DELAY", 0.1)
    monkeypatch.setattr(upload_parts, "LEAST_PART_BYTES", 5 << 20)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    yield proxy
    proxy.clear()


@pytest.mark.parametrize(("fault", "operation"), READS)
def test_a_read_that_fails_twice_is_made_again(
    bucket: str, through: FaultyProxy, tmp_path: Path, fault: str, operation: str
) -> None:
    local = write_ranks(tmp_path / "src", BIG, HALVES)
    put(local, f"{bucket}/src")
    as_place(bucket).refresh()
    through.on(fault, operation, times=2)
    reshard.plan(reshard.open(f"{bucket}/src", strategy=HALVES), HALVES).run(tmp_path / "out")
    assert tree(tmp_path / "out") == tree(local)
    assert through.count(operation, fault) == 2


@pytest.mark.parametrize(("fault", "operation"), WRITES)
def test_a_write_that_fails_once_is_made_again(
    bucket: str, through: FaultyProxy, tmp_path: Path, fault: str, operation: str
) -> None:
    """So what arrives broken is: the store compares it with the checksum that goes with it."""
    local = write_ranks(tmp_path / "src", BIG, HALVES)
    through.on(fault, operation, times=1)
    reshard.plan(reshard.open(local, strategy=HALVES), HALVES).run(f"{bucket}/out")
    assert get(f"{bucket}/out") == tree(local)
    assert through.count(operation, fault) == 1
    assert not fsspec.filesystem("s3").list_multipart_uploads(bucket.removeprefix("s3://"))


def test_a_small_object_is_compared_with_its_checksum(bucket: str, through: FaultyProxy) -> None:
    content = bytes(range(256)) * 40
    remote_store().put(f"{bucket}/a.json", content)
    through.on("flip", "GetObject", times=1)
    assert remote_store().contents(f"{bucket}/a.json") == content
    assert through.count("GetObject", "flip") == 1


def test_an_upload_that_vanished_is_not_taken_for_a_finished_one(
    bucket: str, through: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a lost reply may mean that the object is there, and only if it has the right size."""
    sink = remote_store().create(f"{bucket}/x", 6 << 20)
    sink.write_at(0, bytes(6 << 20))
    remote_store().put(f"{bucket}/x", b"theirs")
    fs = fsspec.filesystem("s3")
    (upload,) = fs.list_multipart_uploads(bucket.removeprefix("s3://"))
    fs.abort_mpu(bucket.removeprefix("s3://"), "x", upload["UploadId"])
    with refused(reshard.errors.TargetError, "store-not-answering", f"{bucket}/x"):
        sink.finish(durable=True)
    assert remote_store().contents(f"{bucket}/x") == b"theirs"
    sink.abort()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "operation", "error"),
    [
        ("stall", "GetObject", UnansweredError), ("wait", "GetObject", UnansweredError),
        ("wait", "ListObjects", UnansweredError), ("stall", "UploadPart", UnsentError),
        ("wait", "UploadPart", UnsentError), ("wait", "CompleteMultipartUpload", UnsentError),
        ("flip", "UploadPart", UnsentError),
    ],
)  # fmt: skip
def test_after_five_tries_it_has_failed(
    bucket: str, through: FaultyProxy, tmp_path: Path, fault: str, operation: str, error: type[Exception]
) -> None:
    local = write_ranks(tmp_path / "src", BIG, HALVES)
    put(local, f"{bucket}/src")
    as_place(bucket).refresh()
    is_read = error is UnansweredError
    through.on(fault, operation)
    begun = time.monotonic()
    with refused(error, "store-not-answering", "5 times") as caught:
        source = reshard.open(f"{bucket}/src" if is_read else local, strategy=HALVES)
        reshard.plan(source, HALVES).run(tmp_path / "out" if is_read else f"{bucket}/out", client="synchronous")
    assert time.monotonic() - begun < 60
    assert caught.value.exit_code == 1
    tries = Counter(seen.key for seen in through.seen if seen.fault)
    at_once = 2 if operation == "UploadPart" else 1  # parts of the same file
    assert 5 <= max(tries.values()) <= 5 * at_once
    through.clear()
    if not is_read:  # an upload that has parts is gone on with, and no other is left
        reshard.plan(reshard.open(local, strategy=HALVES), HALVES).run(f"{bucket}/out")
        assert get(f"{bucket}/out") == tree(local)
    assert not fsspec.filesystem("s3").list_multipart_uploads(bucket.removeprefix("s3://"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stall", "wait", "503"])
def test_a_command_that_fails_so_is_gone_on_with(bucket: str, through: FaultyProxy, tmp_path: Path, fault: str) -> None:
    """The second of two files cannot be sent; the first is kept."""
    local = write_ranks(tmp_path / "src", {"w": BIG["w"].repeat(2, 0), "b": BIG["b"]}, HALVES)
    reshard.write_strategy(HALVES, tmp_path / "halves.ckpt")
    strategy = f"{tmp_path}/halves.ckpt"
    options = [f"--source-strategy={strategy}", f"--target-strategy={strategy}", "--threads=1"]
    command = [sys.executable, "-m", "reshard", "convert", str(local), f"{bucket}/out", *options]

    through.on(fault, "UploadPart", key="rank_1")
    begun = time.monotonic()
    failed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert failed.returncode == 1, failed.stderr
    assert failed.stderr.count("error: ") == 1
    assert "the same command resumes" in failed.stderr
    assert time.monotonic() - begun < 60
    through.clear()
    through.seen.clear()
    assert list(get(f"{bucket}/out")) == ["rank_0/checkpoint_0.safetensors"]
    again = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert again.returncode == 0, again.stderr
    assert get(f"{bucket}/out") == tree(local)
    assert {seen.key for seen in through.seen if seen.operation == "UploadPart"} == {
        "out/rank_1/checkpoint_1.safetensors"
    }


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("fault", "operation"),
    [("stall", "GetObject"), ("wait", "ListObjects"), ("stall", "UploadPart"), ("wait", "")],
)
def test_a_signal_ends_a_stall(
    bucket: str, through: FaultyProxy, tmp_path: Path, fault: str, operation: str, number: signal.Signals
) -> None:
    """Within a few seconds, though a stall lasts longer; and the store may answer nothing any more."""
    path = write_file(tmp_path / "model.safetensors", {"w": BIG["w"].repeat(2, 0)})
    put(tmp_path, f"{bucket}/src")
    is_read = operation in {"GetObject", "ListObjects"}
    source, target = (f"{bucket}/src", f"{tmp_path}/out") if is_read else (str(path), f"{bucket}/out")
    through.on(fault, operation)
    command = [sys.executable, "-m", "reshard", "convert", "--to=mindspore", source, target]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        preexec_fn=heed_signals,  # noqa: PLW1509
        env=os.environ | {"RESHARD_STALL_SECONDS": "100"},
    )
    try:
        assert through.stalled.wait(60)
        time.sleep(1)
        begun = time.monotonic()
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        assert time.monotonic() - begun < 10
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + number, said
    assert said.startswith("interrupted" if number == signal.SIGINT else "stopped by SIGTERM")


class NeverFileSystem(AsyncFileSystem):
    """A file system without timeouts that never answers."""

    protocol = "never"
    cachable = False

    async def _info(self, *_: Any, **__: Any) -> Any:
        await asyncio.sleep(1000)

    _ls = _find = _info


def test_any_file_system_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("never", NeverFileSystem, clobber=True)
    monkeypatch.setenv("RESHARD_STALL_SECONDS", "0.05")
    begun = time.monotonic()
    with refused(UnansweredError, "store-not-answering", "never://b/x", "0.05 s", "5 times"):
        reshard.open("never://b/x")
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("seconds", ["0", "-1", "30 s", "nan", "inf"])
def test_seconds_that_are_none(monkeypatch: pytest.MonkeyPatch, seconds: str) -> None:
    monkeypatch.setenv("RESHARD_STALL_SECONDS", seconds)
    with refused(UsageError, "bad-value", "RESHARD_STALL_SECONDS"):
        reshard.open("memory://b/x")


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (TimeoutError(), True),
        (ConnectionResetError(), True),
        (FileNotFoundError("x"), False),
        (PermissionError("x"), False),
        (ValueError("x"), False),
        (OSError(22, "x"), False),
    ],
)
def test_what_may_pass(error: Exception, passes: bool) -> None:
    assert may_pass(error) == passes
    assert may_pass(SourceError("x")) is False
