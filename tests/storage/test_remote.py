"""Files at URLs: an S3 server of its own on loopback, and fsspec's memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import fsspec
import numpy as np
import pytest
from checkpoints import plan_with, tree, write_file, write_ranks
from commands import call, done
from faulty import Faults, raising
from refusals import failed, refused
from remotes import COLUMNS, FULL, ROWS, Requests, at_urls, get, put, records

import reshard
from reshard import Layout, Strategy
from reshard.core.plan import budget
from reshard.core.storage.places import RemotePath, any_store, as_place
from reshard.core.storage.urls import remote
from reshard.core.storage.urls.failures import translating
from reshard.core.storage.urls.s3 import upload_parts
from reshard.errors import ReshardError, SourceError, TargetError, UsageError, bytes_text
from reshard.formats.sets.options import HuggingFaceSet, MindSporeSet

if TYPE_CHECKING:
    from pathlib import Path

BIG = {"w": np.arange(3 << 20, dtype=np.float32).reshape(1024, 3072), "v": np.ones((24, 12), np.float32)}


@at_urls("format", ["ckpt", "safetensors"], 2)
def test_source_and_target_at_urls(root: str, tmp_path: Path, format: str) -> None:
    local = write_ranks(tmp_path / "src", FULL, ROWS, format)
    reshard.plan(reshard.open(local, strategy=ROWS), COLUMNS).run(tmp_path / "out")
    reshard.write_strategy(ROWS, tmp_path / "strategy" / "src.ckpt")
    put(tmp_path / "strategy", root)
    source = reshard.open(f"{put(local, root + '/src')}/", strategy=f"{root}/src.ckpt")
    assert repr(source).startswith(f"<Checkpoint {root}/src: 3 tensors")
    assert np.array_equal(source["w"][5:9].compute(), FULL["w"][5:9])
    plan = reshard.plan(source, COLUMNS)
    report = plan.run(f"{root}/out")
    assert report.directory == f"{root}/out"
    assert get(f"{root}/out") == tree(tmp_path / "out")
    plan.run(tmp_path / "fetched")
    assert tree(tmp_path / "fetched") == tree(tmp_path / "out")
    reshard.plan(reshard.open(local, strategy=ROWS), COLUMNS).run(f"{root}/stored", client="synchronous")
    assert get(f"{root}/stored") == tree(tmp_path / "out")
    with refused(TargetError, "already-exists", f"{root}/out", "overwrite=True"):
        plan.run(f"{root}/out", ledger=False)
    plan.run(f"{root}/out", ledger=False, overwrite=True)
    assert get(f"{root}/out") == tree(tmp_path / "out")
    with refused(TargetError, "target-is-source"):
        reshard.plan(source, ROWS).run(f"{root}/src", overwrite=True)
    back = reshard.plan(reshard.open(f"{root}/out", strategy=COLUMNS), ROWS)
    back.run(f"{root}/back")
    assert get(f"{root}/back") == tree(local)


def test_sets_and_single_files(root: str, tmp_path: Path) -> None:
    put(write_ranks(tmp_path / "src", FULL, ROWS), f"{root}/src")
    source = reshard.open(f"{root}/src", strategy=ROWS)
    for name, files in {"ms": MindSporeSet(2000), "hf": HuggingFaceSet(1100)}.items():
        plan = plan_with(source, files=files, format="safetensors")
        plan.run(tmp_path / name)
        plan.run(f"{root}/{name}")
        assert get(f"{root}/{name}") == tree(tmp_path / name)
        assert len(tree(tmp_path / name)) == 4
        assert np.array_equal(reshard.open(f"{root}/{name}")["w"].compute(), FULL["w"])
        with refused(TargetError, "overlaps", f"{root}/src"):
            plan.run(f"{root}/src", overwrite=True)
    replicas = Strategy.of({name: Layout.of([4], [-1] * array.ndim) for name, array in FULL.items()})
    reshard.plan(source, replicas).run(f"{root}/replicas")
    one = reshard.open({0: f"{root}/replicas/rank_3/checkpoint_3.safetensors"})
    assert np.array_equal(one["v"].compute(), FULL["v"])
    assert len(reshard.open(f"{root}/replicas/rank_3/checkpoint_3.safetensors")) == 3
    assert len(reshard.open(f"{root}/replicas/rank_3")) == 3


def test_only_ranges_are_read_each_once(root: str, asked: Requests, tmp_path: Path) -> None:
    """Headers in one request a file, then what is needed, in few requests; of a slice only its rows."""
    strategy = Strategy.of({"w": Layout.of([4], [0, -1]), "v": Layout.of([4], [0, -1])})
    put(write_ranks(tmp_path / "src", BIG, strategy), f"{root}/src")
    asked.ranges.clear()
    source = reshard.open(f"{root}/src", strategy=strategy)
    headers = [each for each in asked.ranges if each[1] == 0]
    assert len(headers) == 4
    assert asked.nbytes <= 4 * (1 << 20) + 1_000_000  # headers, and the samples that are compared
    asked.ranges.clear()
    assert np.array_equal(source["w"][300:310].compute(), BIG["w"][300:310])
    assert asked.nbytes == 10 * 3072 * 4
    asked.ranges.clear()
    target = Strategy.of({"w": Layout.of([2], [-1, 0]), "v": Layout.of([2], [0, -1])})
    plan = reshard.plan(source, target)
    report = plan.run(f"{root}/out")
    assert report.bytes_read == plan.stats.bytes_read == sum(array.nbytes for array in BIG.values())
    assert report.bytes_read <= asked.nbytes <= report.bytes_read + 100_000
    assert len(asked.ranges) <= 12  # of 3 MB each and more


def test_a_large_file_is_sent_in_parts(
    bucket: str, asked: Requests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_file(tmp_path / "model.safetensors", BIG)
    monkeypatch.setattr(upload_parts, "LEAST_PART_BYTES", 5 << 20)
    plan = reshard.plan(reshard.open(path), Strategy.of({"w": Layout.of([1], [-1, -1]), "v": Layout.of([1], [-1, -1])}))
    plan.run(bucket)
    assert asked.operations.count("UploadPart") >= 2
    assert asked.operations.count("CompleteMultipartUpload") == 1
    fs = fsspec.filesystem("s3")
    found = f"{bucket}/rank_0/checkpoint_0.safetensors"
    assert fs.info(found, refresh=True)["ETag"].strip('"').endswith(f"-{asked.operations.count('UploadPart')}")
    plan.run(tmp_path / "out")
    assert get(bucket) == tree(tmp_path / "out")


@pytest.mark.parametrize("ledger", [True, False])
def test_a_failure_leaves_nothing_unfinished(
    root: str,
    asked: Requests,
    tmp_path: Path,
    several_groups: None,
    ledger: bool,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither unfinished files nor parts of them that cost money, but for those of an upload that the ledger knows.

    With these the next run goes on. Without a ledger no complete files are left either.
    """
    before, after = (Strategy.of({"w": Layout.of([ranks], [0, -1])}) for ranks in (4, 2))
    full = {"w": np.arange(4 << 20, dtype=np.float32).reshape(1024, 4096)}
    put(write_ranks(tmp_path / "src", full, before), f"{root}/src")
    monkeypatch.setattr(upload_parts, "LEAST_PART_BYTES", 5 << 20)
    monkeypatch.setattr(budget, "BAND_BYTES", 1 << 20)
    plan = reshard.plan(reshard.open(f"{root}/src", strategy=before), after)
    # The first file is complete, five of the second file's eight MB are sent.
    faults.nth(9 + 1 + 5, raising(SourceError("the network is gone")), "write_at")
    with refused(SourceError, "bad-source", "the network is gone") as caught:
        plan.run(f"{root}/out", client="synchronous", ledger=ledger)
    assert len(get(f"{root}/out")) == len(records(f"{root}/out")) == ledger
    total = plan.stats.bytes_written
    kept = f"{bytes_text(total / 2)} of {bytes_text(total)} are written and kept"
    said = f"{kept}; the same command resumes (with restart=True it starts over)"
    assert getattr(caught.value, "__notes__", []) == ledger * [said]
    if root.startswith("s3"):
        assert asked.operations.count("CompleteMultipartUpload") == 1
        assert len(uploads(root)) <= ledger
    monkeypatch.undo()
    assert plan.run(f"{root}/out").finished == ledger
    assert not uploads(root)
    plan.run(tmp_path / "out")
    assert get(f"{root}/out") == tree(tmp_path / "out")


def uploads(root: str) -> list[str]:
    """The keys of the uploads that a bucket has parts of."""
    if not root.startswith("s3"):
        return []
    return [each["Key"] for each in fsspec.filesystem("s3").list_multipart_uploads(root.removeprefix("s3://"))]


def test_a_source_cut_short_names_the_byte(root: str, tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.safetensors", FULL)
    put(tmp_path, root)
    source = reshard.open(f"{root}/a.safetensors")
    fs, name = fsspec.core.url_to_fs(f"{root}/a.safetensors")
    fs.pipe_file(name, path.read_bytes()[:5000])
    with refused(SourceError, "truncated", "a.safetensors", "5000"):
        source["w"].compute()
    with refused(SourceError, "truncated", "5000"):
        reshard.open(f"{root}/a.safetensors")


def test_an_encrypted_source(root: str, mindspore_data: Path) -> None:
    pytest.importorskip("cryptography")
    content = (mindspore_data / "encrypted" / "aes-gcm.ckpt").read_bytes()
    fs, name = fsspec.core.url_to_fs(f"{root}/a.ckpt")
    fs.pipe_file(name, content)
    source = reshard.open(f"{root}/a.ckpt", cipher=reshard.Cipher("AES-GCM", b"0123456789ABCDEF"))
    with np.load(mindspore_data / "encrypted" / "full.npz") as arrays:
        full = dict(arrays)
    assert np.array_equal(source["w.f32"].compute(), full["w.f32"])
    reshard.plan(source).run(f"{root}/out")
    assert np.array_equal(reshard.open(f"{root}/out")["w.f32"].compute(), full["w.f32"])
    exported = reshard.Cipher(None, b"0123456789ABCDEF", required=False)
    assert reshard.open(f"{root}/a.ckpt", cipher=exported)._record.cipher == replace(exported, required=True)
    assert reshard.open(f"{root}/out", cipher=exported)._record.cipher is None


@at_urls("mode", ["AES-GCM", "SM4-CBC"], 2)
def test_an_encrypted_target(root: str, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setattr("reshard.core.storage.cipher.BLOCK_BYTES", 500)
    source = reshard.open(write_ranks(tmp_path / "src", FULL, ROWS, "ckpt"), strategy=ROWS)
    plain, cipher = reshard.plan(source, COLUMNS), reshard.Cipher(mode, bytes(16))
    plain.run(tmp_path / "plain")
    plan = reshard.plan(source, COLUMNS, target_cipher=cipher)
    assert plan.run(f"{root}/out").bytes_written == plain.stats.bytes_written
    for name, content in tree(tmp_path / "plain").items():
        if name.endswith(".ckpt"):
            found = bytearray(len(content))
            cipher.store().read_into(f"{root}/out/{name}", 0, memoryview(found))
            assert found == content
    assert plan.run(f"{root}/out").finished == len(plan._record.files)
    fs, name = fsspec.core.url_to_fs(f"{root}/out/rank_0/checkpoint_0.ckpt")
    fs.rm_file(name)
    assert plan.run(f"{root}/out").finished == len(plan._record.files) - 1
    assert reshard.verify(f"{root}/out", target_cipher=cipher)
    with refused(UsageError, "wrong-partition"):
        plan.run(tmp_path / "other", partition="tensor")


def test_what_is_not_there_or_cannot_be(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(SourceError, "not-found"):
        reshard.open(f"{bucket}/nothing")
    with refused(UsageError, "bad-url", "nosuch://x/y"):
        reshard.open("nosuch://x/y")
    plan = reshard.plan(reshard.open(write_file(tmp_path / "a.safetensors", FULL)))
    with refused(UsageError, "wrong-partition"):
        plan.run(bucket, partition="tensor")
    with refused(UsageError, "unknown-partition", "'rank'"):
        plan.run(tmp_path / "out", partition="rank")
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "reshard.core.storage.urls.obstore_client", raising=False)
    with refused(ReshardError, "library-missing", "gs://no-library/x", "pip install obstore", "reshard[remote]"):
        reshard.open("gs://no-library/x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("RESHARD_STALL_SECONDS", "0.1")
    with refused(SourceError, "store-not-answering", "s3://b/x", "127.0.0.1:9"):
        reshard.open("s3://b/x")


@pytest.mark.parametrize("below", ["", "/x", "/x/a.safetensors"])
def test_a_bucket_that_does_not_exist(server: str, tmp_path: Path, below: str) -> None:
    """Neither a source nor a lock in a target is looked for in vain: the bucket is named, and nothing else."""
    assert server
    url, local = f"s3://no-such-bucket-at-all{below}", write_file(tmp_path / "a.safetensors", FULL)
    commands = {
        4: [["inspect", url], ["convert", "--to=mindspore", url, tmp_path / "out"], ["verify", url],
            ["inspect", local, "--source-strategy", f"{url}/s.ckpt"]],
        1: [["convert", "--to=mindspore", local, url], ["convert", local, f"{url}/z.zarr"]],
    }  # fmt: skip
    for code, some in commands.items():
        for command in some:
            result = call(*command)
            lines = [line for line in result.stderr.splitlines() if not line.startswith("format:")]
            assert (result.exit_code, lines) == (
                code, ["error: the bucket s3://no-such-bucket-at-all does not exist"]
            ), command  # fmt: skip


@pytest.mark.parametrize(
    ("url", "error", "said"),
    [
        ("gs://b/x", OSError("Anonymous caller does not have access"), "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az://b/x", ValueError("Must provide an account_name with credentials!!"), "AZURE_STORAGE_ACCOUNT_NAME"),
        ("s3://b/x", PermissionError("Access Denied"), "AWS_PROFILE"),
        ("s3://b/x", OSError("the network is gone"), ""),
        ("ftp://b/x", PermissionError("Access Denied"), ""),
    ],
)
def test_only_what_seems_to_lack_credentials_names_their_places(url: str, error: Exception, said: str) -> None:
    code = "no-access" if said else "store-error"
    with refused(SourceError, code, url, error, said) as caught, translating(url, "read"):
        raise error
    assert bool(caught.value.hint) == bool(said)


def test_a_file_url_is_a_local_path(tmp_path: Path) -> None:
    write_ranks(tmp_path / "src", FULL, ROWS)
    source = reshard.open(f"file://{tmp_path}/src", strategy=ROWS)
    assert source._record.files[0].path == f"{tmp_path}/src/rank_0/checkpoint_0.safetensors"
    plan = reshard.plan(source, COLUMNS)
    plan.run(f"file://{tmp_path}/a")
    plan.run(tmp_path / "b")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert as_place("memory://a/b/") == RemotePath("memory://a/b")


def test_the_commands(bucket: str, tmp_path: Path) -> None:
    put(write_ranks(tmp_path / "src", FULL, ROWS), f"{bucket}/src")
    reshard.write_strategy(ROWS, tmp_path / "s" / "rows.ckpt")
    reshard.write_strategy(COLUMNS, tmp_path / "s" / "columns.ckpt")
    put(tmp_path / "s", bucket)

    options = ["--source-strategy", f"{bucket}/rows.ckpt", "--target-strategy", f"{bucket}/columns.ckpt"]
    command = ["convert", f"{bucket}/src", f"{bucket}/out", *options, "--to", "safetensors"]
    assert f"{bucket}/out/rank_0/checkpoint_0.safetensors" in done(*command, "--dry-run", "-v").stdout
    ran = subprocess.run(
        [sys.executable, "-m", "reshard", *command], capture_output=True, text=True, check=False, env=os.environ
    )
    assert ran.returncode == 0, ran.stderr
    assert f"next: {sys.executable} -m reshard verify {bucket}/out" in ran.stdout
    reshard.plan(reshard.open(tmp_path / "src", strategy=ROWS), COLUMNS).run(tmp_path / "out")
    assert get(f"{bucket}/out") == tree(tmp_path / "out")
    assert done(*command, "--dry-run").stderr.startswith("warning: 3 target files would be kept unread, finished by ")
    cast = "--cast=float32=float16"
    assert "warning: 3 target files would be refused, made by " in call(*command, "--dry-run", cast).stderr
    assert "nothing is left to do" in done(*command).stdout
    failed(6, "other-run", *command, cast, places=(f"{bucket}/out", "--restart"))
    done("convert", "--to=mindspore", f"{bucket}/src", f"{bucket}/set", "--source-strategy", f"{bucket}/rows.ckpt")
    done("convert", f"{bucket}/src", f"{bucket}/ckpt", "--to", "ckpt")
    assert sorted(get(f"{bucket}/ckpt")) == [f"rank_{rank}/checkpoint_{rank}.ckpt" for rank in range(4)]


def test_a_batch_is_few_requests(root: str, asked: Requests, tmp_path: Path) -> None:
    """Ranges that are near are joined, whatever their order; local ones may be among them."""
    content = np.random.default_rng(0).bytes(1 << 20)
    (tmp_path / "a").write_bytes(content)
    put(tmp_path, root)
    ranges = [(f"{root}/a", offset, 3000) for offset in range(900_000, 0, -4000)]
    ranges += [(str(tmp_path / "a"), 17, 1000)]
    wants = [(path, offset, memoryview(bytearray(nbytes))) for path, offset, nbytes in ranges]
    asked.ranges.clear()
    any_store().read(wants)
    assert len(asked.ranges) == 1
    assert all(buffer == content[offset : offset + len(buffer)] for _, offset, buffer in wants)


def test_an_array_at_a_url_is_read_in_as_few_requests_as_it_has_blocks(
    root: str, asked: Requests, tmp_path: Path
) -> None:
    put(write_ranks(tmp_path / "src", FULL, ROWS), f"{root}/src")
    lazy = reshard.open(f"{root}/src", strategy=ROWS)["w"]
    asked.ranges.clear()
    assert np.array_equal(lazy.compute(), FULL["w"])
    assert len(asked.ranges) == 4


def test_both_kinds_of_places_answer_alike(root: str, tmp_path: Path) -> None:
    for name in ("src/rank_0/a.ckpt", "src/b.json", "src/rank_0/deep/c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    put(tmp_path / "src", f"{root}/src")
    for base in (as_place(tmp_path / "src"), as_place(f"{root}/src")):
        base.refresh()
        assert base.is_dir()
        assert not base.is_file()
        assert (base.name, (base / "b.json").suffix, (base / "b.json").stem) == ("src", ".json", "b")
        assert str((base / "b.json").parent) == str(base)
        assert sorted(path.name for path in base.iterdir()) == ["b.json", "rank_0"]
        found = sorted(path.relative_to(base).as_posix() for path in base.files())  # type: ignore[arg-type]
        assert found == ["b.json", "rank_0/a.ckpt", "rank_0/deep/c"]
        assert base.existing(["b.json", "rank_0/a.ckpt", "c"]) == ["b.json", "rank_0/a.ckpt"]
        assert base.existing(["b.json", "c"]) == ["b.json"]
        assert (base / "nothing").existing(["a"]) == []
        assert (base / "b.json").read_bytes() == b"src/b.json"
        assert (base / "b.json").status().nbytes == len("src/b.json")
        assert (base / "b.json").is_there()
        assert not (base / "nothing").is_there()
        assert not base.is_symlink()


def test_a_file_that_nobody_ends_is_never_there(root: str) -> None:
    """fsspec completes a file as it is when it is collected; half of it would have the final name."""
    store = remote.remote_store()
    sink = store.create(store.unfinished(f"{root}/half"), 8)
    sink.write_at(0, b"half")
    del sink
    gc.collect()
    assert "half" not in get(root)
