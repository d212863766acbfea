"""Files at S3 in parts: what the store copies itself, and what a later run goes on with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
import samples
from checkpoints import tree, write_file, write_ranks
from measure import RESHARD, measured
from refusals import refused
from remotes import get, put

import reshard
from reshard import Layout, Strategy
from reshard.core.plan.partition import partitioned
from reshard.core.plan.uploads.sending import requests_of
from reshard.core.run.state.ledger import Ledger
from reshard.core.storage.urls.failures import StoreError
from reshard.core.storage.urls.s3 import upload_parts
from reshard.core.storage.urls.s3.client import S3Client
from reshard.core.storage.urls.s3.upload_parts import LEAST_BYTES, Copied, parts_of
from reshard.errors import BudgetError, ChangedError, TargetError

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
BIG = {
    "a": np.arange(6 * MIB, dtype=np.float32).reshape(-1, 1024),  # 24 MiB
    "b": np.ones(7, np.float32),
    "c": np.arange(5 * MIB, dtype=np.float32).reshape(-1, 512)[::-1].copy(),
}


SMALL = {"a": BIG["a"][:3072], "b": BIG["b"]}  # 12 MiB, which are two parts of each half where parts are small


def cut(axes: list[int], sizes: list[int], names: str = "abc") -> Strategy:
    return Strategy.of({name: Layout.of(sizes, [-1] if name == "b" else axes) for name in names})


QUARTERS, HALVES, COLUMNS = cut([0, -1], [4]), cut([0, -1], [2]), cut([-1, 0], [2])
SMALL_QUARTERS, SMALL_HALVES = cut([0, -1], [4], "ab"), cut([0, -1], [2], "ab")


class Asked:
    """The requests of a process to S3: operations, and bytes of bodies in both directions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.operations: list[str] = []
        self.sent = self.received = 0
        lock, request = threading.Lock(), S3Client.request

        def counted(client: S3Client, method: str, key: str = "", query: Any = None, headers: Any = None,
                    body: Any = (), into: Any = None) -> Any:  # fmt: skip
            reply = request(client, method, key, query, headers, body, into)
            copies = "x-amz-copy-source" in (headers or {})
            kind = "copy" if copies else f"part {method}" if "partNumber" in (query or {}) else method
            with lock:
                self.operations.append(kind)
                self.sent += sum(map(len, body))
                self.received += reply.nbytes
            return reply

        monkeypatch.setattr(S3Client, "request", counted)

    def clear(self) -> None:
        self.operations.clear()
        self.sent = self.received = 0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


def uploads_at(bucket: str) -> list[str]:
    """The uploads that the store keeps."""
    found = fsspec.filesystem("s3").list_multipart_uploads(bucket.removeprefix("s3://"))
    return [str(upload["Key"]) for upload in found]


@pytest.fixture
def merge(bucket: str, tmp_path: Path) -> reshard.Plan:
    """A plan whose source is at S3, in quarters, and whose target are halves."""
    put(write_ranks(tmp_path / "src", BIG, QUARTERS), f"{bucket}/src")
    return reshard.plan(reshard.open(f"{bucket}/src", strategy=QUARTERS), HALVES)


class Refusing:
    """Have S3 refuse all parts of files but the first, of some keys."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch, self.send = monkeypatch, S3Client.send_part

    def parts(self, key: str = "") -> None:
        def failing(client: S3Client, name: str, upload: str, number: int, body: Any) -> str:
            if number > 1 and key in name:
                raise PermissionError("AccessDenied: no more")
            return self.send(client, name, upload, number, body)

        self.patch.setattr(S3Client, "send_part", failing)

    def nothing(self) -> None:
        self.patch.setattr(S3Client, "send_part", self.send)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Refusing:
    monkeypatch.setattr(upload_parts, "LEAST_PART_BYTES", 5 * MIB)
    return Refusing(monkeypatch)


@pytest.fixture
def small(tmp_path: Path) -> reshard.Checkpoint:
    return reshard.open(write_ranks(tmp_path / "small", SMALL, SMALL_QUARTERS), strategy=SMALL_QUARTERS)


def test_a_merge_sends_headers_and_seams_only(merge: reshard.Plan, bucket: str, tmp_path: Path, counts: Asked) -> None:
    """As the dry run says, which counts requests."""
    url = f"{bucket}/out"
    merge.run(tmp_path / "here")
    expected = requests_of(partitioned(merge._record, None, url), url)
    planned = partitioned(merge._record, None, url).stats
    assert expected is not None
    counts.clear()
    report = merge.run(url)
    assert get(url) == tree(tmp_path / "here")
    total = sum(map(len, tree(tmp_path / "here").values()))
    # Two files, each with a header that takes 5 MiB of the first block, and seams.
    operations = counts.operations
    assert operations.count("copy") == expected.copy >= 4
    assert operations.count("part PUT") <= expected.put
    assert abs(operations.count("POST") - expected.post) <= 1
    assert operations.count("GET") <= expected.get + expected.other
    assert report.bytes_copied == planned.bytes_copied > total // 3
    assert report.bytes_read == pytest.approx(planned.bytes_read, rel=0.01)
    assert report.bytes_written + report.bytes_copied >= merge.stats.bytes_written
    assert counts.sent + counts.received < 2 * (total - report.bytes_copied) + MIB
    assert merge.run(f"{bucket}/other", server_copy=False).bytes_copied == 0
    assert get(f"{bucket}/other") == tree(tmp_path / "here")


def random_strategy(rng: np.random.Generator, names: list[str]) -> Strategy:
    devices = int(rng.choice([1, 2, 4]))
    return Strategy.of({
        name: Layout.of([devices], [[0, -1], [-1, 0], [-1, -1]][rng.integers(3)]) for name in names
    })  # fmt: skip


@pytest.mark.parametrize("seed", [0, *map(samples.slow, range(1, 8))])
def test_random_layouts_are_copied_right(
    bucket: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tensors of some MiB, so that seams fall inside of them, and many are as long as the least that is copied."""
    rng = np.random.default_rng(seed)
    full = {
        f"t{n}": rng.integers(0, 1 << 30, (int(rng.choice([8, 512, 2048, 4096])), 1024)).astype(np.int32)
        for n in range(6)
    }
    source, target = random_strategy(rng, list(full)), random_strategy(rng, list(full))
    format = str(rng.choice(["ckpt", "safetensors"]))
    put(write_ranks(tmp_path / "src", full, source, format), f"{bucket}/src")
    plan = reshard.plan(reshard.open(f"{bucket}/src", strategy=source), target, to="safetensors")
    plan.run(tmp_path / "here")
    plan.run(f"{bucket}/out")
    assert get(f"{bucket}/out") == tree(tmp_path / "here")


def test_a_source_that_changes_is_not_copied(merge: reshard.Plan, bucket: str, tmp_path: Path) -> None:
    changed = write_ranks(tmp_path / "new", {name: values + 1 for name, values in BIG.items()}, QUARTERS)
    put(changed, f"{bucket}/src")
    with refused(ChangedError, "source-changed"):
        merge.run(f"{bucket}/out")
    assert get(f"{bucket}/out") == {}
    assert uploads_at(bucket) == []


STOPPED = """
import sys, time
sys.path[:0] = {path!r}
import reshard
from reshard.core.storage.urls.s3.client import S3Client
from test_uploads import COLUMNS, QUARTERS
send, calls = S3Client.send_part, []

def slow(client, key, upload, number, body):
    calls.append(number)
    if len(calls) > {number}:
        time.sleep(2)
        print("ready", flush=True)
        time.sleep(100)
    return send(client, key, upload, number, body)

S3Client.send_part = slow
reshard.plan(reshard.open({source!r}, strategy=QUARTERS), COLUMNS).run({target!r}, client="synchronous")
"""


def test_a_killed_run_goes_on_inside_a_file(bucket: str, tmp_path: Path, counts: Asked) -> None:
    source = write_ranks(tmp_path / "src", BIG, QUARTERS)
    plan = reshard.plan(reshard.open(source, strategy=QUARTERS), COLUMNS)
    plan.run(tmp_path / "here")
    script = STOPPED.format(path=[str(path) for path in sys.path], number=3, source=str(source), target=f"{bucket}/out")
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=os.environ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    assert get(f"{bucket}/out") == {}
    assert len(uploads_at(bucket)) == 2
    counts.clear()
    report = plan.run(f"{bucket}/out")
    assert get(f"{bucket}/out") == tree(tmp_path / "here")
    total = sum(map(len, tree(tmp_path / "here").values()))
    assert report.resumed >= 3 * 8 * MIB
    assert counts.sent < total - 3 * 8 * MIB + MIB
    assert report.bytes_read < plan.stats.bytes_read
    assert uploads_at(bucket) == []


def test_a_run_that_fails_says_what_is_kept(small: reshard.Checkpoint, bucket: str, refusing: Refusing) -> None:
    plan = reshard.plan(small, SMALL_HALVES)
    refusing.parts()
    with refused(TargetError, "no-access") as caught:
        plan.run(f"{bucket}/out", client="synchronous")
    assert any("the same command resumes" in str(note) for note in caught.value.__notes__)
    refusing.nothing()
    assert len(uploads_at(bucket)) >= 1
    assert plan.run(f"{bucket}/out").resumed >= 5 * MIB
    assert uploads_at(bucket) == []


@pytest.mark.parametrize("how", ["restart", "no ledger", "other plan", "gone"])
def test_uploads_that_are_of_no_use_are_ended(
    small: reshard.Checkpoint, bucket: str, tmp_path: Path, how: str, refusing: Refusing
) -> None:
    """Or, if they are gone, begun anew."""
    plan = reshard.plan(small, SMALL_HALVES)
    refusing.parts()
    with refused(TargetError, "no-access"):
        plan.run(f"{bucket}/out", ledger=how != "no ledger", client="synchronous")
    assert bool(uploads_at(bucket)) == (how != "no ledger")
    refusing.nothing()
    if how == "other plan":
        plan = reshard.plan(small, SMALL_HALVES, cast={"float32": "bfloat16"})
    if how == "gone":
        fs, name = fsspec.filesystem("s3"), bucket.removeprefix("s3://")
        for upload in fs.list_multipart_uploads(name):
            fs.abort_mpu(name, upload["Key"], upload["UploadId"])
    assert plan.run(f"{bucket}/out", restart=how != "gone").resumed == 0
    assert uploads_at(bucket) == []
    plan.run(tmp_path / "here")
    assert get(f"{bucket}/out") == tree(tmp_path / "here")


def test_uploads_of_files_that_are_no_longer_written_are_ended(tmp_path: Path, bucket: str, refusing: Refusing) -> None:
    """The new target has fewer ranks."""
    opened = reshard.open(write_ranks(tmp_path / "src", BIG, QUARTERS), strategy=QUARTERS)
    refusing.parts("rank_3")
    with refused(TargetError, "no-access"):
        reshard.plan(opened, QUARTERS).run(f"{bucket}/out", client="synchronous")
    assert ["rank_3" in key for key in uploads_at(bucket)] == [True]
    refusing.nothing()
    report = reshard.plan(opened, HALVES).run(f"{bucket}/out", restart=True)
    assert not any("rank_3" in path for path in report.removed)
    assert uploads_at(bucket) == []


@pytest.mark.parametrize("where", ["begin", "ledger"])
def test_uploads_that_no_ledger_records_are_ended(
    small: reshard.Checkpoint, bucket: str, where: str, refusing: Refusing, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = reshard.plan(small, SMALL_HALVES)
    begin = S3Client.begin

    def failing(client: S3Client, key: str) -> str:
        if where == "begin" and "rank_1" in key:
            raise PermissionError("AccessDenied: no more")
        return begin(client, key)

    def refuse(*_: object, **__: object) -> None:
        raise TargetError("no", code="no-access")

    monkeypatch.setattr(S3Client, "begin", failing)
    if where == "ledger":
        monkeypatch.setattr(Ledger, "add", refuse)
    with refused(TargetError, "no-access"):
        plan.run(f"{bucket}/out")
    assert uploads_at(bucket) == []


def test_memory_that_is_given_is_kept_or_refused(bucket: str, tmp_path: Path) -> None:
    source = reshard.open(write_ranks(tmp_path / "src", BIG, QUARTERS), strategy=QUARTERS)
    for memory in ("100MB", "150MB"):
        plan = partitioned(reshard.plan(source, COLUMNS, memory=memory)._record, None, f"{bucket}/out")
        assert plan.stats.peak_memory <= int(memory.removesuffix("MB")) * 1_000_000
        assert sum(dict(plan.memory).values()) == plan.stats.peak_memory
    with refused(BudgetError, "not-enough-memory", "memory="):
        reshard.plan(source, COLUMNS, memory="80MB").run(f"{bucket}/out")


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["100MB", "140MB", None])
@pytest.mark.parametrize("way", ["from", "to", "both", "columns"])
def test_the_memory_of_a_run_is_kept_at_s3(bucket: str, tmp_path: Path, way: str, memory: str | None) -> None:
    """Of whole commands: the buffers of requests, too, are within the limit, and within the prediction."""
    big = {name: np.concatenate([values + n for n in range(4)]) for name, values in BIG.items() if values.ndim == 2}
    big["b"] = BIG["b"]
    source = write_ranks(tmp_path / "src", big, QUARTERS)
    for name, strategy in {"source": QUARTERS, "target": COLUMNS if way == "columns" else HALVES}.items():
        reshard.write_strategy(strategy, tmp_path / f"{name}.ckpt")
    if way != "to":
        put(source, f"{bucket}/src")
    command = [
        *RESHARD, "convert", str(source) if way == "to" else f"{bucket}/src",
        str(tmp_path / "out") if way == "from" else f"{bucket}/out", "--source-strategy", f"{tmp_path}/source.ckpt",
        "--target-strategy", f"{tmp_path}/target.ckpt", "--tune=server-copy=no", "--json",
        *(["--memory", memory] if memory else []),
    ]  # fmt: skip
    planned = measured(*command, "--dry-run")
    if planned.code == 5:
        assert (way, memory) == ("columns", "100MB") or way == "both"
        return
    assert planned.code == 0, planned.out + planned.err
    predicted = json.loads(planned.out)["peak_memory"]
    ran = measured(*command)
    assert ran.code == 0, ran.err
    assert ran.peak <= predicted <= (int(memory.removesuffix("MB")) if memory else 260) * 1_000_000


def test_parts_are_as_s3_takes_them() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        size = int(rng.integers(1, 200 * MIB))
        edges = sorted(int(edge) for edge in rng.integers(0, size, 6))
        copies = [Copied(a, b - a, n, 7 * n) for n, (a, b) in enumerate(zip(edges[::2], edges[1::2], strict=True))]
        copies = [copied for copied in copies if copied.nbytes >= LEAST_BYTES]
        cut_up = parts_of(size, copies)
        assert [part.begin for part in cut_up] == [0, *(part.end for part in cut_up[:-1])]
        assert cut_up[-1].end == size
        assert all(part.end - part.begin >= LEAST_BYTES for part in cut_up[:-1])
        for part in cut_up:
            assert part.copied or part.end - part.begin <= upload_parts.part_bytes(size)  # as many buffers are planned
            if part.copied:
                whole = next(copied for copied in copies if copied.source == part.copied.source)
                assert part.copied.begin == part.begin >= whole.begin
                assert part.copied.offset - whole.offset == part.begin - whole.begin
                assert part.end <= whole.begin + whole.nbytes
    assert parts_of(0) == []
    assert len(parts_of(5 << 40)) <= 10_000


def test_a_file_of_one_part_is_one_request(bucket: str, tmp_path: Path, counts: Asked) -> None:
    source = reshard.open(write_file(tmp_path / "a.safetensors", {"b": BIG["b"]}))
    counts.clear()
    reshard.plan(source).run(f"{bucket}/out")
    assert "POST" not in counts.operations


@pytest.mark.slow
def test_a_store_that_refuses_copies_is_told_of(
    merge: reshard.Plan, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> str:
        raise StoreError("NotImplemented", "no copies", 501)

    monkeypatch.setattr(S3Client, "copy_part", refuse)
    with refused(TargetError, "store-error", "server_copy=False"):
        merge.run(f"{bucket}/out")
    assert merge.run(f"{bucket}/out", server_copy=False, restart=True).bytes_copied == 0
    assert uploads_at(bucket) == []
