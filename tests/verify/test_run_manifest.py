"""Manifests from the receipts of a run: byte for byte those that reading the files would give, and nothing is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import numbers, places, write_ranks
from commands import call
from generators import Model, models
from hypothesis import given, settings
from refusals import failed, refused
from remotes import get
from samples import examples
from stopped_runs import small_tasks, stopped  # noqa: F401 -- a fixture that is used by all

import reshard
from reshard import Layout, Strategy
from reshard.core.records.logs import known
from reshard.core.verify import manifest
from reshard.errors import UsageError

if TYPE_CHECKING:
    from reshard.core.run.settings import Report

FULL = numbers({"w": (48, 16), "b": (24,), "c": (12, 8), "moments.w": (48, 16)})
ALSO = {"step": np.array(7, np.int64), "none": np.zeros((0, 3), np.float32), "note": "größe"}
SOURCE = Strategy.of({
    "w": Layout.of([4], [0, -1]), "b": Layout.of([4], [-1]), "c": Layout.of([4], [-1, 0]),
    "moments.w": Layout.of([4], [0, -1]),
})  # fmt: skip
TARGET = Strategy.of({
    "w": Layout.of([2, 2], [-1, 0]), "b": Layout.of([2, 2], [0]), "c": Layout.of([2, 2], [0, -1]),
    "moments.w": Layout.of([2, 2], [-1, 0], opt_weight_shard_size=2),
})  # fmt: skip
SAME = Strategy.of({name: Layout.of([2], [-1] * array.ndim) for name, array in FULL.items()})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: src (4 ranks), and the strategies before.ckpt, after.ckpt (4 ranks), same.ckpt (2)."""
    monkeypatch.chdir(tmp_path)
    write_ranks(Path("src"), FULL, SOURCE, "ckpt", ALSO)
    for name, strategy in (("before", SOURCE), ("after", TARGET), ("same", SAME)):
        reshard.write_strategy(strategy, f"{name}.ckpt")
    return tmp_path


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """File and tensor of every block that is read for its sum, `str` entries apart."""
    found: list[tuple[str, str]] = []
    original = manifest.sum_contents

    def sum_contents(wanted: Any, **options: Any) -> Any:
        wanted = list(wanted)
        found.extend((path.rpartition("/")[2], name) for name, path, _ in wanted if isinstance(name, str))
        return original(wanted, **options)

    monkeypatch.setattr(manifest, "sum_contents", sum_contents)
    return found


def ran(*words: object) -> str:
    result = call(*words)
    assert result.exit_code == 0, result.output
    return result.stdout


def assert_as_read(target: object, manifest: str = "m.json") -> None:
    """A manifest that a run wrote is the one of its files."""
    ran("verify", target, "--write-manifest", "read.json", "--overwrite")
    assert Path(manifest).read_bytes() == Path("read.json").read_bytes()
    assert json.loads(Path(manifest).read_text())["files"]
    ran("verify", target, "--manifest", manifest)


BEFORE = ["--source-strategy", "before.ckpt"]
AFTER = [*BEFORE, "--target-strategy", "after.ckpt"]
MANIFEST = ["--write-manifest", "m.json"]

COMMANDS = {
    "ckpt": ["convert", "src", "dst", *AFTER],
    "safetensors": ["convert", "src", "dst", *AFTER, "--to", "safetensors"],
    "without replicas": ["convert", "src", "dst", *AFTER, "--remove-redundancy"],
    "MindSpore's set": ["convert", "src", "dst", "--to=mindspore", *BEFORE, "--max-shard-size", "3000B"],
    "Hugging Face's set": ["convert", "src", "dst", *BEFORE, "--max-shard-size", "3000B", "--to", "hf"],
    "a converted file": ["convert", "src/rank_0/checkpoint_0.ckpt", "dst.safetensors", "--to", "safetensors"],
    "local cluster": ["convert", "src", "dst", *AFTER, "--cluster", "local:1", "--threads", "1"],
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=list(COMMANDS))
def test_it_is_that_of_the_files_and_nothing_is_read(words: list[str], folder: Path, read: list[Any]) -> None:
    target = words[2]
    said = ran(*words, *MANIFEST)
    assert not read
    assert_as_read(target)
    sums = sum(1 + len(file.get("tensors", [])) for file in json.loads(Path("m.json").read_text())["files"].values())
    assert f"\n  manifest: m.json, {sums} checksums of " in said
    assert f"\nnext: reshard verify {target}" in said
    Path("m.json").unlink()
    assert ran(*words, *MANIFEST).startswith("nothing is left to do: ")
    if Path(target).is_file():  # its directory is another's, and gets no ledger: the sums are those of what is there
        assert not Path(".reshard").exists()
    else:
        assert not read
    assert_as_read(target)


@pytest.mark.parametrize("name", ["ckpt", "Hugging Face's set"])
def test_of_files_at_a_url(name: str, folder: Path, read: list[Any], request: pytest.FixtureRequest) -> None:
    """They are checked by it there, and once they are local."""
    url = f"memory://{abs(hash(request.node.nodeid))}"
    words = [url if word == "dst" else word for word in COMMANDS[name]]
    said = ran(*words, *MANIFEST)
    assert "\n  manifest: m.json, " in said
    assert "\nnext: reshard verify " in said
    for path, content in get(url).items():
        Path("dst", path).parent.mkdir(parents=True, exist_ok=True)
        Path("dst", path).write_bytes(content)
    assert not read
    assert_as_read("dst")
    assert_as_read(url)
    Path("m.json").unlink()
    assert ran(*words, *MANIFEST).startswith("nothing is left to do: ")
    assert not read
    assert_as_read("dst")
    ran(*words, "--restart", "--tune=fsync=no")
    Path("m.json").unlink()
    ran(*words, *MANIFEST)
    assert read
    assert_as_read("dst")


def test_of_a_plan_file(folder: Path, read: list[Any]) -> None:
    ran("plan", "src", *AFTER, "-o", "plan.json")
    data = json.loads(ran("run", "plan.json", "dst", *MANIFEST, "--json"))
    assert data["manifest"] == "reshard verify dst --manifest m.json"
    assert not read
    assert_as_read("dst")


def test_only_blocks_without_a_sum_are_read(folder: Path, read: list[Any]) -> None:
    """What was written twice around a crash, in ranges that do not fit together."""
    plan = reshard.plan(reshard.open("src", strategy=SOURCE), TARGET)
    plan.run("dst")
    path = "rank_2/checkpoint_2.ckpt"
    (place,) = places(plan._record.files[2].layout)["c"]
    kept = [some for some in known(str(folder / "dst")).records[path].ranges if not place[0] <= some[0] < sum(place)]
    (log,) = (folder / "dst" / ".reshard").glob("*.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines() if line]
    others = [line for line in lines if "wrote" not in line or line["file"] != path]
    now = {"file": path, "wrote": [*kept, [place[0], 5, 1]]}
    log.write_text("".join(json.dumps(line) + "\n" for line in [*others, now]))
    plan.run("dst").write_manifest("m.json")
    assert read == [("checkpoint_2.ckpt", "c")]
    assert_as_read("dst")


def test_after_a_run_without_sums_all_is_read(folder: Path, read: list[Any]) -> None:
    words = ["convert", "src", "dst", *AFTER, "--tune=fsync=no"]
    ran(*words)
    assert ran(*words, *MANIFEST).startswith("nothing is left to do: ")
    assert len(read) == 4 * (len(FULL) + 1)  # of no bytes the sum is known
    assert_as_read("dst")


@settings(max_examples=examples(15))
@given(models())
def test_of_any_model(tmp_path_factory: pytest.TempPathFactory, model: Model) -> None:
    root = tmp_path_factory.mktemp("any")
    write_ranks(root / "src", numbers(model.shapes, "int16"), model.source)
    plan = reshard.plan(reshard.open(root / "src", strategy=model.source), model.target)
    assert plan.run(root / "dst").manifest() == reshard.Manifest.make(root / "dst")


SET = ["convert", "--to=mindspore", "src", "dst", *BEFORE]
SOURCE_FILE = "src/rank_0/checkpoint_0.ckpt"


@pytest.mark.parametrize(
    ("words", "exit_code", "code", "place"),
    [
        ([*SET, "--write-manifest", "there.json"], 6, "already-exists", "there.json"),
        ([*SET, "--write-manifest", "src"], 6, "not-a-file", "src"),
        ([*SET, "--write-manifest", "dst/part0.safetensors"], 6, "target-is-source", "dst/part0.safetensors"),
        ([*SET, "--write-manifest", SOURCE_FILE, "--overwrite"], 6, "target-is-source", SOURCE_FILE),
        ([*SET, "--to", "zarr", *MANIFEST], 2, "no-manifest", "--write-manifest"),
    ],
)
def test_what_cannot_be_written_is_refused_first(
    folder: Path, words: list[str], exit_code: int, code: str, place: str
) -> None:
    Path("there.json").write_text("mine")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    for more in ([], ["--dry-run"]):
        result = failed(exit_code, code, *words, *more, places=(place,))
        assert not result.stdout
        assert result.stderr.count("error: ") == 1
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_one_that_is_there_is_replaced_when_asked(folder: Path) -> None:
    Path("m.json").write_text("mine")
    ran(*SET, *MANIFEST, "--overwrite")
    assert_as_read("dst")


def test_a_manifest_that_cannot_be_written_is_not_there_in_parts(folder: Path) -> None:
    Path("file").write_text("")
    failed(6, "cannot-write", *SET, "--write-manifest", "file/m.json", places=("file/m.json", "--restart"))
    assert ran(*SET, *MANIFEST).startswith("nothing is left to do: ")
    assert_as_read("dst")


def test_a_dry_run_writes_none(folder: Path) -> None:
    assert json.loads(ran(*SET, *MANIFEST, "--dry-run", "--json"))["manifest"] is None
    assert not Path("m.json").exists()


def test_without_checksums_there_is_none(folder: Path) -> None:
    plan = reshard.plan(reshard.open("src", strategy=SOURCE))
    reports: list[Report] = [
        plan.run("unsummed", fsync=False),
        plan.run("unnoted", ledger=False),
        reshard.plan(reshard.Checkpoint(plan._record.source), to="zarr").run("zarr"),
    ]
    for report in reports:
        with refused(UsageError, "no-checksums", report.directory, "checksums=True"):
            report.manifest()
        with refused(UsageError, "no-checksums", report.directory, "checksums=True"):
            report.write_manifest("m.json")
    assert not list(Path().glob("m.json*"))
