"""`hf://`: repositories of the Hugging Face Hub, against a stand-in of it."""

from __future__ import annotations

import re
import sys
import tempfile
from typing import TYPE_CHECKING

import pytest
from checkpoints import assert_equal, numbers, write_file
from commands import done
from hub_server import Hub, serving
from refusals import failed, refused

import reshard
from reshard.core.storage.places import as_place
from reshard.errors import ReshardError, SourceError, TargetError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),  # of huggingface_hub's client
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # its connections to a past server
]

FULL = numbers({"a.w": (64, 48), "b.w": (24, 12), "c": (12,)})
BESIDE = {"config.json": b'{"model_type": "x"}', "README.md": b"# a model\n", "tokenizer.model": b"\x00\x01"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    constants = pytest.importorskip("huggingface_hub.constants")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with serving() as hub:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
        pytest.importorskip("huggingface_hub").HfFileSystem.clear_instance_cache()  # of another endpoint
        yield hub
        assert not [*(tmp_path / "temporary").iterdir()], "a temporary file is left"


def model(directory: Path) -> dict[str, bytes]:
    """The files of a set in two files, and those beside them."""
    opened = reshard.open(write_file(directory / "whole.safetensors", FULL))
    reshard.plan(opened, to="hf", max_shard_size=13_000).run(directory / "set", ledger=False)
    return {path.name: path.read_bytes() for path in (directory / "set").iterdir()} | BESIDE


def test_a_set_is_read_by_ranges(hub: Hub, tmp_path: Path) -> None:
    hub.create("org/model", model(tmp_path))
    source = reshard.open("hf://org/model", contents=False)
    hub.ranges.clear()
    assert source["a.w"][8:10].compute().tobytes() == FULL["a.w"][8:10].tobytes()
    assert hub.nbytes == FULL["a.w"][8:10].nbytes
    assert_equal(source, FULL)


@pytest.mark.parametrize(
    ("repo", "revision", "url", "below"),
    [
        ("org/model", "v1", "hf://org/model@v1", ""),
        ("org/model", "refs/pr/1", "hf://org/model@refs/pr/1", ""),
        ("datasets/org/weights", "main", "hf://datasets/org/weights", ""),
        ("datasets/org/weights", "refs/convert/x", "hf://datasets/org/weights@refs/convert/x", ""),
        ("spaces/org/weights", "main", "hf://spaces/org/weights", ""),
        ("org/model", "main", "hf://org/model/sub", "sub/"),
        ("org/model", "main", "hf://models/org/model/sub", "sub/"),
        ("org/model", "v1", "hf://org/model@v1/sub", "sub/"),
        ("org/model", "refs/pr/1", "hf://org/model@refs/pr/1/sub", "sub/"),
        ("datasets/org/weights", "main", "hf://datasets/org/weights/sub", "sub/"),
    ],
)
def test_kinds_of_repositories_and_revisions(
    hub: Hub, tmp_path: Path, repo: str, revision: str, url: str, below: str
) -> None:
    files = {f"{below}{name}": content for name, content in model(tmp_path).items()}
    hub.create(repo, {"other.txt": b""})
    hub.create(repo, files, revision)
    assert_equal(reshard.open(url), FULL)
    assert (as_place(url) / "config.json").read_bytes() == BESIDE["config.json"]
    assert sorted(as_place(url).names()) == sorted(name.removeprefix(below) for name in files)


def test_a_set_is_written_with_its_index_last(hub: Hub, tmp_path: Path) -> None:
    hub.create("org/model", model(tmp_path))
    hub.create("org/new", {".gitattributes": b""})
    report = reshard.convert("hf://org/model", "hf://org/new/out", to="hf", max_shard_size=13_000)
    written = hub.files("org/new")
    beside = {name: written[f"out/{name}"] for name in BESIDE}
    assert beside == BESIDE
    assert_equal(reshard.open("hf://org/new/out"), FULL)
    paths = [path for commit in hub.commits for path in commit]
    assert all(len(commit) == 1 for commit in hub.commits), "one commit a file"
    of_set = [path for path in paths if ".reshard" not in path]
    assert of_set[-1] == "out/model.safetensors.index.json"
    assert set(report.files) == {path.removeprefix("out/") for path in of_set}
    assert reshard.verify("hf://org/new/out")
    assert reshard.verify("hf://org/new/out", against="hf://org/model")


def test_the_command_line_writes_and_reads(hub: Hub, tmp_path: Path) -> None:
    for name, content in model(tmp_path).items():
        (tmp_path / "set" / name).write_bytes(content)
    hub.create("org/new")
    assert "beside" in done("convert", tmp_path / "set", "hf://org/new", "--to", "hf").stdout
    done("convert", "hf://org/new", tmp_path / "back", "--to", "hf")
    assert_equal(reshard.open(tmp_path / "back"), FULL)
    assert {name: (tmp_path / "back" / name).read_bytes() for name in BESIDE} == BESIDE
    hub.create("org/new", hub.files("org/new") | {"notes.txt": b"mine"})
    done("convert", tmp_path / "set", "hf://org/new", "--to", "hf", "--cast", "float32=bf16", "--overwrite")
    assert hub.files("org/new")["notes.txt"] == b"mine"


def test_a_failed_commit_leaves_nothing_of_a_file(hub: Hub, tmp_path: Path) -> None:
    hub.create("org/new")
    source = reshard.open(write_file(tmp_path / "whole.safetensors", FULL))
    plan = reshard.plan(source, to="hf")
    for ledger in (False, True):
        hub.refuses = re.compile(r"model-.*|\.reshard/0" if ledger else "model-")
        with refused(TargetError, "no-access", "HF_TOKEN"):
            plan.run("hf://org/new", ledger=ledger)
        assert not [path for path in hub.files("org/new") if ".reshard" not in path]
    hub.refuses = re.compile("(?!)")
    plan.run("hf://org/new")
    assert_equal(reshard.open("hf://org/new"), FULL)


def test_what_is_not_there(hub: Hub, tmp_path: Path) -> None:
    hub.create("org/model", model(tmp_path))
    source = reshard.open("hf://org/model")
    hub.create("datasets/org/weights")
    for url, code, *places in (
        ("hf://org/none", "no-such-bucket", "hf://org/none"),
        ("hf://datasets/org/none@v9/sub", "no-such-bucket", "no repository hf://datasets/org/none"),
        ("hf://org/model@v9", "no-such-bucket", "hf://org/model", "revision v9"),
        ("hf://org/model@refs/pr/7/sub", "no-such-bucket", "hf://org/model", "revision refs/pr/7"),
        ("hf://datasets/org/weights@v9", "no-such-bucket", "hf://datasets/org/weights", "revision v9"),
        ("hf://org/model/sub", "not-found", "hf://org/model/sub"),
    ):
        with refused(SourceError, code, *places):
            reshard.open(url)
    for url in ("hf://org", "hf://datasets", "hf://datasets/org", "hf://models/org", "hf://org/model@refs/pr"):
        with refused(UsageError, "bad-url", url, "hf://OWNER/NAME"):
            reshard.open(url)
    with refused(UsageError, "bad-url", "hf://datasets/org"):
        reshard.plan(source, to="hf").run("hf://datasets/org")
    with refused(TargetError, "no-such-bucket", "hf://org/model", "revision v9"):
        reshard.plan(source, to="hf").run("hf://org/model@v9/out")
    with refused(TargetError, "no-such-bucket", "hf://org/none"):
        reshard.plan(source, to="hf").run("hf://org/none/out")


def test_a_file_that_was_replaced_is_refused(hub: Hub, tmp_path: Path) -> None:
    files = model(tmp_path)
    hub.create("org/model", files)
    plan = reshard.plan(reshard.open("hf://org/model"), to="hf")
    name = "model-00001-of-00002.safetensors"
    hub.create("org/model", files | {name: files[name][:-1] + b"\x7f"})
    with refused(ReshardError, "source-changed", name):
        plan.run(tmp_path / "out")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", None)
    monkeypatch.delitem(sys.modules, "reshard.core.storage.urls.hub", raising=False)
    failed(1, "library-missing", "inspect", "hf://org/model", places=("pip install 'reshard[hf]'",))
