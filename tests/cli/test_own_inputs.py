"""No command and no function writes over what it reads: by no spelling, through no link, and with no option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
from checkpoints import tree, write_ranks
from commands import call, done
from refusals import failed, refused
from stopped_runs import FULL, SOURCE, TARGET

import reshard
import reshard.mindspore as ms
from reshard import Layout, Strategy
from reshard.cli.commands import OUTPUTS
from reshard.cli.main import cli
from reshard.cli.values import PathType
from reshard.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

READ = ["--source-strategy", "source.ckpt"]
SPLIT = [*READ, "--target-strategy", "target.ckpt"]
MAPPED = [*SPLIT, "--name-map", "names.json"]
MAKE = ["strategy", "make", "rules.yaml", "--like", "src", *READ]

# The command, the option or argument that says what is written, and everything that is read.
CASES: dict[str, tuple[list[str], str, list[str]]] = {
    "transform": (
        ["transform", "src", "out", *MAPPED, "--write-manifest"],
        "transform",
        ["source.ckpt", "target.ckpt", "names.json", "src/rank_1/checkpoint_1.safetensors"],
    ),
    "unify": (
        ["unify", "src", "out", *READ, "--name-map", "names.json", "--write-manifest"],
        "unify",
        ["source.ckpt", "names.json", "src/rank_1/checkpoint_1.safetensors"],
    ),
    "average": (
        ["average", "src:0.5", "set:0.5", "out", *READ, "--write-manifest"],
        "average",
        ["source.ckpt", "src/rank_1/checkpoint_1.safetensors", "set/param_name_map.json", "set/part0.safetensors"],
    ),
    "convert": (
        ["convert", "src", "out", "--format", "ckpt", "--write-manifest"],
        "convert",
        ["src/rank_1/checkpoint_1.safetensors"],
    ),
    "convert one file": (["convert", "one.ckpt", "out.safetensors", "--format", "safetensors", "--write-manifest"],
        "convert", ["one.ckpt"]),
    "run": (
        ["run", "plan.json", "out", "--source", "src", "--write-manifest"],
        "run",
        ["plan.json", "src/rank_1/checkpoint_1.safetensors"],
    ),
    "plan": (
        ["plan", "src", *MAPPED, "-o"],
        "plan",
        ["source.ckpt", "target.ckpt", "names.json", "src/rank_1/checkpoint_1.safetensors"],
    ),
    "verify": (
        ["verify", "src", "--target-strategy", "source.ckpt", "--write-manifest"],
        "verify",
        ["source.ckpt", "src/rank_1/checkpoint_1.safetensors"],
    ),
    "merge": (["strategy", "merge", "pipeline", "-o"], "strategy merge", ["pipeline/strategy_1.ckpt"]),
    "make": (
        [*MAKE, "-o"], "strategy make", ["rules.yaml", "source.ckpt", "src/rank_1/checkpoint_1.safetensors"],
    ),
    "from a checkpoint": (
        ["strategy", "from-checkpoint", "made", "-o"],
        "strategy from-checkpoint",
        ["made/rank_0/checkpoint_0.safetensors"],
    ),
    "invert": (["rules", "invert", "equations.yaml", "-o"], "rules invert", ["equations.yaml"]),
}  # fmt: skip


def linked(path: Path) -> Path:
    link = Path("symbolic")
    link.symlink_to(path.absolute())
    return link


def hard_linked(path: Path) -> Path:
    link = Path("hard")
    link.unlink(missing_ok=True)
    link.hardlink_to(path)
    return link


def through_a_directory(path: Path) -> Path:
    link = Path("directory")
    link.symlink_to(path.absolute().parent)
    return link / path.name


def whose_unfinished_name_it_is(path: Path) -> Path:
    link = Path("new.partial")
    link.hardlink_to(path)
    return link.with_suffix("")


SPELLINGS: dict[str, Callable[[Path], object]] = {
    "as it is": lambda path: path,
    "absolute": lambda path: path.absolute(),
    "up and down": lambda path: f"src/../{path}",
    "as a URL": lambda path: f"file://{path.absolute()}",
    "symbolic link": linked,
    "hard link": hard_linked,
    "link to its directory": through_a_directory,
    "unfinished": whose_unfinished_name_it_is,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_ranks(Path("src"), FULL, SOURCE)
    reshard.write_strategy(SOURCE, "source.ckpt")
    reshard.write_strategy(TARGET, "target.ckpt")
    Path("names.json").write_text(json.dumps({"w": "c", "c": "w"}))
    Path("rules.yaml").write_text("mesh: {dp: 2}\nrules: {w: [dp]}\n")
    Path("equations.yaml").write_text("reshard-rules: 1\nsides: [a, b]\nrules: [{a: w, b: v}]\n")
    source = reshard.open("src", strategy=SOURCE)
    reshard.plan(source, TARGET).save("plan.json")
    reshard.plan(source, files=reshard.MindSporeSet(), format="safetensors").run("set", ledger=False)
    reshard.plan(source, format="ckpt").run("whole", ledger=False)
    next(Path("whole/rank_0").iterdir()).rename("one.ckpt")
    reshard.plan(source, TARGET).run("made")
    stages = Strategy.of({"a": Layout.of([2], [0])}), Strategy.of({"b": Layout.of([2], [0])})
    Path("pipeline").mkdir()
    for number, stage in enumerate(stages):
        ((name, (placed,)),) = stage.tensors.items()
        of_stage = Strategy({name: (placed._replace(stage=number),)}, range(number, number + 1), 2)
        reshard.write_strategy(of_stage, f"pipeline/strategy_{number}.ckpt")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "path"),
    [pytest.param(words, path, id=f"{name}: {path}") for name, (words, _, read) in CASES.items() for path in read],
)
def test_no_command_writes_over_what_it_reads(folder: Path, words: list[str], path: str) -> None:
    before = tree(folder)
    for spell in (SPELLINGS["as it is"], SPELLINGS["hard link"]):
        refused = call(*words, str(spell(Path(path))), "--overwrite")
        assert refused.exit_code == 6, refused.output
        assert refused.stderr.count("error: ") == 1
        assert {name: content for name, content in tree(folder).items() if name != "hard"} == before


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_however_it_is_spelled(folder: Path, spelling: str) -> None:
    before = {path: content for path, content in tree(folder).items() if path == "source.ckpt" or "src" in path}
    for path in ("source.ckpt", "src/rank_1/checkpoint_1.safetensors"):
        output = str(SPELLINGS[spelling](Path(path)))
        failed(
            6, "target-is-source", "transform", "src", "out", *SPLIT, "--overwrite", "--write-manifest", output,
            places=(path,),
        )  # fmt: skip
        for link in ("symbolic", "hard", "directory", "new.partial"):
            Path(link).unlink(missing_ok=True)
    assert not Path("out").exists()
    after = tree(folder)
    assert {path: after[path] for path in before} == before


def paths_of(command: click.Command, name: str = "") -> Iterator[tuple[str, click.Parameter]]:
    """Every path that a command is given, below a group of commands."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for one in command.list_commands(context):
            found = command.get_command(context, one)
            assert found is not None
            yield from paths_of(found, f"{name} {one}".strip())
        return
    for parameter in command.params:
        if isinstance(parameter.type, click.Path | click.File):
            yield name, parameter


def test_every_path_says_what_it_is_for() -> None:
    """A new option cannot forget it, and a new command that writes a file is among those above."""
    writing = set()
    for name, parameter in paths_of(cli):
        assert isinstance(parameter.type, PathType), f"{name}: {parameter.name}"
        if parameter.type.role == OUTPUTS:
            writing.add(name)
    assert writing == {command for _, command, _ in CASES.values()}


@pytest.mark.parametrize("more", [["--overwrite", "--dry-run"], ["--restart"]])
def test_target_files_are_not_inputs(folder: Path, more: list[str]) -> None:
    Path("dst/rank_0").mkdir(parents=True)
    Path("dst/rank_1").mkdir()
    strategy, names = ("source.ckpt", "--source-strategy"), ("names.json", "--name-map")
    places = {
        "dst/rank_0/checkpoint_0.safetensors": strategy,
        "dst/rank_1/checkpoint_1.safetensors.partial": names,
        "dst/rank_1/checkpoint_1.safetensors.0123abcd.partial": names,
    }
    for place, (old, option) in places.items():
        Path(place).write_bytes(Path(old).read_bytes())
        failed(6, "target-is-source", "transform", "src", "dst", *MAPPED, option, place, *more, places=(place,))
        assert Path(place).read_bytes() == Path(old).read_bytes()
        Path(place).unlink()
    Path("dst/param_name_map.json").write_bytes(Path("names.json").read_bytes())
    failed(
        6, "target-is-source", "unify", "src", "dst", *READ, "--name-map", "dst/param_name_map.json", *more,
        places=("dst/param_name_map.json",),
    )  # fmt: skip
    assert Path("dst/param_name_map.json").read_bytes() == Path("names.json").read_bytes()


def test_functions_do_not_write_over_what_they_read(folder: Path) -> None:
    before = tree(folder)
    plan = reshard.plan(reshard.open("src", strategy=SOURCE), TARGET)
    for path in ("src/rank_1/checkpoint_1.safetensors", hard_linked(Path("src/rank_1/checkpoint_1.safetensors"))):
        with refused(TargetError, "target-is-source", path):
            plan.save(path, overwrite=True)
    Path("hard").unlink()
    plan = reshard.plan(reshard.open("src", strategy=SOURCE), TARGET)  # a link more or less is a change
    report = plan.run("out")
    for path in ("src/rank_0/checkpoint_0.safetensors", f"out/{report.files[0]}"):
        with refused(TargetError, "target-is-source", path):
            report.write_manifest(path, overwrite=True)
    assert reshard.verify("out", TARGET, against=reshard.open("src", strategy=SOURCE)).equal
    for merge in (reshard.merge_strategies, ms.merge_pipeline_strategys):
        with refused(TargetError, "target-is-source", "strategy_1.ckpt"):
            merge("pipeline", "pipeline/../pipeline/strategy_1.ckpt")
    assert {path: content for path, content in tree(folder).items() if not path.startswith("out")} == before


def test_what_is_beside_an_input_may_be_written(folder: Path) -> None:
    """As often as one likes: a manifest in the directory that it is of, a plan in that of its source."""
    for more in ([], ["--overwrite"]):
        done("verify", "set", "--write-manifest", "set/manifest.json", *more)
        done("plan", "src", *SPLIT, "-o", "src/plan.json", *more)
        done(*MAKE, "-o", "src/made.ckpt", *more)
        done("transform", "src", "out", *SPLIT, "--write-manifest", "src/out.json", *more)


@pytest.mark.parametrize("words", [["plan", "s3://bucket/src"], [*MAKE, "-o", "s3://bucket/made.ckpt"]])
def test_a_url_where_only_files_of_this_machine_can_be(folder: Path, words: list[str]) -> None:
    """It made directories called `s3:`."""
    failed(2, "usage", *words, places=("is a URL",))


@pytest.mark.parametrize(
    ("store", "target"),
    [
        ("via", "via"),
        ("via", "via/out"),
        ("link/via", "out"),
        ("src/via", "out"),
        ("file://{here}/out", "out"),
        ("memory://a", "memory:///a/out"),
    ],
)
def test_a_store_on_the_way_is_apart(folder: Path, store: str, target: str) -> None:
    Path("out").mkdir()
    Path("link").symlink_to("out")
    before = tree(folder)
    words = ["transform", "src", target, *SPLIT, "--via-zarr", store.format(here=folder)]
    failed(6, "overlaps", *words, "--overwrite", places=("--via-zarr",))
    assert tree(folder) == before
    done("transform", "src", "out", *SPLIT, "--via-zarr", "outer")  # whose name only begins so
