"""A format of another package: the one of the guide, as it is installed; and what its table may not say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import numbers, write_file

import reshard
from reshard.core import format as listed
from reshard.errors import SourceError, UsageError
from reshard.formats import BlockList, Format, Found, Listing, named, register

if TYPE_CHECKING:
    from collections.abc import Iterator

PLUGIN = Path(__file__).parent / "plugin"
GUIDE = Path(__file__).parents[2] / "docs/guides/add-a-format.md"
FULL = {**numbers({"w": (4, 8), "v": (3,)}), "empty": np.zeros((0, 2), np.float32), "n": np.arange(5)}


def write_raw(root: Path, **changed: Any) -> Path:
    """Write raw cuts by hand: `w` in two files, and the others behind the first half."""
    root.mkdir(parents=True)
    halves, table = [FULL["w"][:, :4], FULL["w"][:, 4:]], {}
    content = halves[0].tobytes()
    (root / "b.raw").write_bytes(halves[1].tobytes())
    blocks = [
        {"offset": [0, 4 * half], "size": [4, 4], "file": f"{'ab'[half]}.raw", "begin": 0, "end": 64} for half in (0, 1)
    ]
    table["w"] = {"dtype": "float32", "shape": [4, 8], "blocks": blocks}
    for name, array in list(FULL.items())[1:]:
        begin, shape = len(content), list(array.shape)
        content += array.tobytes()
        block = {"offset": [0] * len(shape), "size": shape, "file": "a.raw", "begin": begin, "end": len(content)}
        table[name] = {"dtype": array.dtype.name, "shape": shape, "blocks": [block]}
    (root / "a.raw").write_bytes(content)
    table["w"] |= changed.pop("w", {})
    for number, block in enumerate(table["w"]["blocks"]):
        block.update(changed.get(f"block{number}", {}))
    (root / "cuts.json").write_text(json.dumps(table))
    return root


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a Python in which the package is installed."""
    site = tmp_path_factory.mktemp("site")
    (site / "raw_cuts.py").write_text((PLUGIN / "raw_cuts.py").read_text())
    about = site / "reshard_raw_cuts-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: reshard-raw-cuts\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[reshard.formats]\nraw-cuts = raw_cuts:RAW_CUTS\n")
    return {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "HOME": str(site)}


def run(environment: dict[str, str], *arguments: str | Path, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "reshard", *map(str, arguments)], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout


def test_an_installed_package_adds_a_format_to_every_command(installed: dict[str, str], tmp_path: Path) -> None:
    root = write_raw(tmp_path / "raw")
    rows = json.loads(run(installed, "formats", "--json"))["formats"]
    assert next((row["read"], row["write"], row["package"]) for row in rows if row["name"] == "raw-cuts") == (
        True, True, "raw_cuts",
    )  # fmt: skip
    inspected = json.loads(run(installed, "inspect", root, "--json"))
    assert {each["name"]: each["shape"] for each in inspected["tensors"]} == {k: list(v.shape) for k, v in FULL.items()}
    (row,) = json.loads(run(installed, "runs", tmp_path, "--json"))["checkpoints"]
    assert (row["format"], row["state"], row["files"]) == ("raw cuts", "complete", 3)
    run(installed, "convert", root, tmp_path / "hf", "--to", "hf")
    found = reshard.open(tmp_path / "hf")
    assert all(np.array_equal(found[name].compute(), array) for name, array in FULL.items())
    run(installed, "convert", tmp_path / "hf", tmp_path / "back", "--to", "raw-cuts")
    places = json.loads((tmp_path / "back/cuts.json").read_text())
    data = (tmp_path / "back/data.raw").read_bytes()
    for name, array in FULL.items():
        (block,) = places[name]["blocks"]
        assert data[block["begin"] : block["end"]] == array.tobytes()
        assert block["begin"] % 64 == 0
    run(installed, "convert", tmp_path / "hf", tmp_path / "wide", "--to", "raw-cuts", "--align", "512")
    places = json.loads((tmp_path / "wide/cuts.json").read_text())
    assert {block["begin"] % 512 for each in places.values() for block in each["blocks"]} == {0}
    assert "--align" in run(installed, "convert", "--to", "raw-cuts", "--help")
    run(installed, "convert", tmp_path / "hf", tmp_path / "no", "--to", "raw-cuts", "--align", "wide", code=2)
    run(installed, "convert", tmp_path / "hf", tmp_path / "no", "--to", "hf", "--align", "512", code=2)
    run(installed, "verify", tmp_path / "back")
    run(installed, "plan", tmp_path / "hf", "--to", "raw-cuts", "-o", tmp_path / "plan.json")
    run(installed, "run", tmp_path / "plan.json", tmp_path / "planned", "--cluster", "processes")
    assert (tmp_path / "planned/data.raw").read_bytes() == data
    (tmp_path / "back/data.raw").write_bytes(bytes([data[0] ^ 1]) + data[1:])
    run(installed, "verify", tmp_path / "back", code=3)


def test_copies_that_are_compared_are_no_checksums(installed: dict[str, str], tmp_path: Path) -> None:
    root = write_raw(tmp_path / "raw")
    table, data = json.loads((root / "cuts.json").read_text()), (root / "a.raw").read_bytes()
    content = FULL["v"].tobytes()
    table["v"]["blocks"].append({**table["v"]["blocks"][0], "begin": len(data), "end": len(data) + len(content)})
    (root / "a.raw").write_bytes(data + content)
    (root / "cuts.json").write_text(json.dumps(table))
    assert "checksums" not in run(installed, "verify", root)
    (root / "a.raw").write_bytes(data + bytes([content[0] ^ 1]) + content[1:])
    run(installed, "verify", root, code=3)


def test_what_a_package_cannot_read_is_a_checkpoint_that_is_not_valid(
    installed: dict[str, str], tmp_path: Path
) -> None:
    """Its own errors are of the file, and hide no other checkpoint from `runs`."""
    write_raw(tmp_path / "raw")
    cut = write_raw(tmp_path / "cut") / "cuts.json"
    cut.write_text(cut.read_text()[:-9])
    run(installed, "inspect", tmp_path / "cut", code=4)
    rows = json.loads(run(installed, "runs", tmp_path, "--json"))["checkpoints"]
    assert {(Path(row["path"]).name, row["state"]) for row in rows} == {("raw", "complete"), ("cut", "incomplete")}


def test_a_format_that_fails_to_find_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Failing(Format):
        name, title = "failing", "failing"

        def find(self, here: Listing) -> Found | None:
            raise KeyError(here.names)

    monkeypatch.setattr(listed, "_registered", [])
    register(Failing())
    path = write_file(tmp_path / "one/model.safetensors", FULL)
    with pytest.warns(reshard.ReshardWarning, match="'failing' is left out"):
        opened = reshard.open(path.parent)
    assert {*opened} == {*FULL}
    with pytest.warns(reshard.ReshardWarning, match="'failing' is left out"):
        assert len(reshard.runs(tmp_path)) == 1


def test_an_option_of_a_package_is_refused_by_name_elsewhere(installed: dict[str, str], tmp_path: Path) -> None:
    write_file(tmp_path / "one/model.safetensors", FULL)
    script = (
        "import reshard, sys\n"
        "try:\n    reshard.convert(sys.argv[1], sys.argv[2], to='hf', align=16)\n"
        "except reshard.UsageError as error:\n    print(error.code, error)"
    )
    words = [sys.executable, "-c", script, str(tmp_path / "one"), str(tmp_path / "out")]
    said = subprocess.run(words, env=installed, capture_output=True, text=True, check=True).stdout
    assert said.startswith("option-of-another-format")
    assert "raw-cuts" in said


def test_a_package_that_is_broken_breaks_no_other_format(installed: dict[str, str], tmp_path: Path) -> None:
    site = tmp_path / "site"
    about = site / "broken-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[reshard.formats]\nbroken = is_not_there:FORMAT\n")
    environment = {**installed, "PYTHONPATH": f"{site}:{installed['PYTHONPATH']}"}
    rows = json.loads(run(environment, "formats", "--json"))["formats"]
    assert next("is_not_there" in row["needs"] for row in rows if row["name"] == "broken")
    run(environment, "inspect", write_raw(tmp_path / "raw"))
    run(environment, "inspect", write_file(tmp_path / "one/model.safetensors", FULL))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Format]:
    """The format in this process; workers do not have it."""
    monkeypatch.setattr(listed, "_registered", [])
    monkeypatch.syspath_prepend(str(PLUGIN))
    from raw_cuts import RAW_CUTS  # type: ignore[import-not-found]

    register(RAW_CUTS)
    yield RAW_CUTS
    sys.modules.pop("raw_cuts")


WITHOUT = """
import sys
import reshard
if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    from raw_cuts import RAW_CUTS
    reshard.formats.register(RAW_CUTS)
    reshard.convert(sys.argv[2], sys.argv[3], to="safetensors", client="processes")
    reshard.convert(sys.argv[3], sys.argv[4], to="raw-cuts", client="processes")
"""


def test_workers_without_the_package_run_its_plans(tmp_path: Path) -> None:
    root = write_raw(tmp_path / "raw")
    (tmp_path / "script.py").write_text(WITHOUT)
    arguments = [tmp_path / "script.py", PLUGIN, root, tmp_path / "out", tmp_path / "back"]
    subprocess.run([sys.executable, *map(str, arguments)], check=True)
    found = reshard.open(tmp_path / "out")
    assert all(np.array_equal(found[name].compute(), array) for name, array in FULL.items())
    begin = json.loads((tmp_path / "back/cuts.json").read_text())["v"]["blocks"][0]["begin"]
    assert (tmp_path / "back/data.raw").read_bytes()[begin:].startswith(FULL["v"].tobytes())


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a gap": ({"block1": {"offset": [0, 4], "size": [4, 3], "end": 48}}, "bad-table"),
    "a block less": ({"w": {"blocks": []}}, "bad-table"),
    "an overlap": ({"block1": {"offset": [0, 3]}}, "bad-table"),
    "a range outside of the file": ({"block1": {"begin": 8, "end": 72}}, "truncated"),
    "a range behind the file": ({"block1": {"begin": 1 << 40, "end": (1 << 40) + 64}}, "truncated"),
    "a negative offset": ({"block1": {"begin": -64, "end": 0}}, "bad-table"),
    "an absurd offset": ({"block1": {"begin": 1 << 70, "end": (1 << 70) + 64}}, "bad-table"),
    "bytes of another tensor": ({"block1": {"file": "a.raw", "begin": 40, "end": 104}}, "bad-table"),
    "a path that leads out": ({"block1": {"file": "../b.raw"}}, "bad-table"),
    "an absolute path": ({"block1": {"file": "/etc/passwd"}}, "bad-table"),
    "a path with a line break": ({"block1": {"file": "b\n.raw"}}, "bad-table"),
    "a file that is missing": ({"block1": {"file": "c.raw"}}, "missing-file"),
    "a lie about the size of a block": ({"block1": {"end": 60}}, "bad-table"),
    "a lie about the shape": ({"w": {"shape": [4, 9]}}, "bad-table"),
    "a block outside of the tensor": ({"block1": {"offset": [0, 5]}}, "bad-table"),
    "other dimensions": ({"block1": {"offset": [4]}}, "bad-table"),
    "an unknown dtype": ({"w": {"dtype": "float33"}}, "bad-table"),
    "another width": ({"w": {"dtype": "float64"}}, "bad-table"),
    "a huge shape": ({"w": {"shape": [1 << 40, 1 << 40]}}, "bad-table"),
    "text for a number": ({"block1": {"begin": "0"}}, "bad-table"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_table_is_refused(name: str, registered: Format, tmp_path: Path) -> None:
    changed, code = WRONG[name]
    if name == "a block less":
        root = write_raw(tmp_path / "raw")
        table = json.loads((root / "cuts.json").read_text())
        del table["w"]["blocks"][1]
        (root / "cuts.json").write_text(json.dumps(table))
    elif name == "text for a number":
        root = write_raw(tmp_path / "raw")
    else:
        root = write_raw(tmp_path / "raw", **changed)
    if name == "text for a number":
        table_of = BlockList(Found(named("raw-cuts"), listed.Listing(reshard_place(root))))
        table_of.add("w", "float32", [4], [0], [4], "a.raw", [("0", 16)])  # type: ignore[list-item]
        with pytest.raises(SourceError) as refusal:
            table_of.checkpoint()
    else:
        with pytest.raises(SourceError) as refusal:
            reshard.open(root)
    assert code in refusal.value.codes


def reshard_place(path: Path) -> Any:
    from reshard.core.storage.places import as_place

    return as_place(path)


def test_a_link_out_of_the_directory_is_refused(registered: Format, tmp_path: Path) -> None:
    root = write_raw(tmp_path / "raw")
    (root / "b.raw").rename(tmp_path / "elsewhere.raw")
    (root / "b.raw").symlink_to(tmp_path / "elsewhere.raw")
    with pytest.raises(SourceError) as refusal:
        reshard.open(root)
    assert "bad-table" in refusal.value.codes


def test_what_is_no_format_is_refused(registered: Format) -> None:
    class Nameless(Format):
        name = "dcp"
        title = "another"

    for wrong in (object(), type(registered), Nameless(), registered):
        with pytest.raises(UsageError) as refusal:
            register(wrong)  # type: ignore[arg-type]
        assert refusal.value.code == "bad-format"


def test_a_format_is_asked_before_those_that_it_extends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Special(Format):
        name = "special"
        title = "Special"
        extends = ("orbax",)

    monkeypatch.setattr(listed, "_registered", [])
    register(Special())
    names = [each.name for each in listed.formats()]
    assert names.index("special") == names.index("orbax") - 1


def test_the_guide_has_the_code_of_the_package() -> None:
    code = (PLUGIN / "raw_cuts.py").read_text()
    assert len(code.splitlines()) <= 110
    assert f"```py\n{code}```" in GUIDE.read_text()
    assert (PLUGIN / "pyproject.toml").read_text().strip() in GUIDE.read_text()
