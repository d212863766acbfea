"""The README and `docs/`: every command runs and prints what is printed there, links work, figures are recorded.

A `console` block is typed in the folder that `reshard demo` makes, each page in its own folder. A `python` block is
run there, and prints the `text` block behind it. A `sh` block is not run, because it needs what no test has. The two
commands that set up a virtual environment are run as printed by `.ci/run`. `<!-- prepare: NAME -->` names what a page
needs besides the demo (`PREPARE`).
"""

from __future__ import annotations

import doctest
import json
import re
import shlex
import shutil
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import adapters
import click
import docs_made
import helpers
import numpy as np
import pytest
import tensor_parallel
from checkpoints import write_file
from commands import done
from deepspeed_files import write_zero
from samples import slow
from saves_files import tensor, write_save
from transcript import Typed, check, typed

import reshard
import reshard.mindspore
from reshard.cli.main import cli

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")),
]
SETUP = {"demo", "tests"}

SET_UP = dict(re.findall(r"<!-- run: (\w+) -->\n```sh\n(.*?)```", README, re.DOTALL))
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)
FENCE = re.compile(r"^```(.*)$", re.MULTILINE)
OPTION = re.compile(r"(?<![-|<\w])--[a-z][a-z-]*[a-z]\b(?!-)")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
OF_OTHERS = {  # options in the pages that are other programs'
    "--ckpt-format", "--scheduler-file", "--ntasks", "--cpus-per-task", "--nthreads",
}  # fmt: skip


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def test_the_two_commands_that_set_up_are_there_and_run_by_ci() -> None:
    assert set(SET_UP) == SETUP
    assert all(block.startswith("python3 -m venv .venv && ") for block in SET_UP.values())
    ci = (ROOT / ".ci" / "run").read_text()
    assert all(f'eval "$(printed {name})"' for name in SETUP)
    assert ci.count("eval") == 2


def test_the_readme_is_one_page() -> None:
    assert len(README.splitlines()) <= 150
    assert len(re.sub(r"```.*?```", "", README, flags=re.DOTALL).split()) <= 900
    first = README.split("\n\n")[1]
    assert len(first.split()) < 20


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    subprocess.run([sys.executable, "-m", "reshard", "demo"], cwd=folder, check=True, capture_output=True)
    return folder / "reshard-demo"


def prepare_dcp(folder: Path, _data: Path) -> None:
    convert(folder, "step-1000", "--to", "dcp")


def prepare_training(folder: Path, _data: Path) -> None:
    """What `reshard demo training` makes."""
    shutil.copytree(reshard.demo("training", folder.parent / "training"), folder, dirs_exist_ok=True)


def prepare_steps(folder: Path, _data: Path) -> None:
    for number in (100, 200, 300):
        convert(folder, "run", "--to", "dcp", "--weights-only", "--target-step", f"{number}")


def prepare_run(folder: Path, _data: Path) -> None:
    convert(folder, "run", "--to", "checkpoint2", "--target-step", "4")


def prepare_megatron(folder: Path, data: Path) -> None:
    shutil.copytree(data / "dcp" / "mcore_tp2_pp2" / "checkpoint", folder / "megatron" / "iter_0000001")


def prepare_megatron_legacy(folder: Path, data: Path) -> None:
    shutil.copytree(data / "megatron_legacy" / "plain" / "checkpoint", folder / "run")
    tensor_parallel.write_llama(folder / "llama", tensor_parallel.llama())
    for number, name in enumerate(("embed", "head"), 1):
        state = {f"model.{name}.weight": tensor(np.full((4, 2), number, np.float32))}
        write_save(folder / "model" / f"pytorch_model-{number:05d}-of-00002.bin", state)


def prepare_lora(folder: Path, _data: Path) -> None:
    model = adapters.weights("float32")
    (folder / "base").mkdir()
    write_file(folder / "base" / "model.safetensors", adapters.written(model))
    adapters.save(folder / "adapter", adapters.matrices(model))


def prepare_quantized(folder: Path, data: Path) -> None:
    shutil.copytree(data / "quantized" / "fp8_v3" / "checkpoint", folder / "deepseek")


def convert(folder: Path, target: str, *options: str) -> None:
    done(
        "convert", folder / "src_checkpoints", folder / target, "--source-strategy", folder / "src_strategy.ckpt",
        "--target-strategy", folder / "dst_strategy.ckpt", *options,
    )  # fmt: skip


def prepare_deepspeed(folder: Path, _: Path) -> None:
    """A run of DeepSpeed on two ranks."""
    write_zero(
        folder / "zero-run", [{"layers.0.weight": (16, 8), "layers.1.weight": (8, 16)}, {"norm": (8,), "bias": (8,)}]
    )


def prepare_orbax(folder: Path, data: Path) -> None:
    """A run of Orbax, and one as MaxText saves it."""
    for name, case in (("orbax-run", "run"), ("maxtext-run", "maxtext")):
        shutil.copytree(data / "orbax" / case / "checkpoint", folder / name)
    (folder / "config.json").write_text(json.dumps({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}))


LONG = {"arrays", "average", "clusters-and-s3", "jupyter"}
"""Pages of which a run takes several seconds: they start clusters, servers or kernels."""

PREPARE: dict[str, Callable[[Path, Path], None]] = {
    "step-1000": prepare_dcp, "steps": prepare_steps, "run": prepare_run, "megatron": prepare_megatron,
    "megatron-legacy": prepare_megatron_legacy, "lora": prepare_lora, "quantized": prepare_quantized,
    "deepspeed": prepare_deepspeed, "orbax": prepare_orbax, "training": prepare_training,
}  # fmt: skip


@pytest.mark.parametrize("start", ["forked", slow(None)])
@pytest.mark.parametrize(
    "page", [slow(page) if Path(page).stem in LONG else page for page in PAGES if BLOCK.search(text_of(page))]
)
def test_every_block_prints_what_is_printed_there(
    page: str, demo: Path, tmp_path: Path, start: str | None, mindspore_data: Path, request: pytest.FixtureRequest
) -> None:
    """With a `reshard` that starts at once, and when it is slow with the real one."""
    first = [request.getfixturevalue(start)] if start else []
    folder = tmp_path / "reshard-demo"
    shutil.copytree(demo, folder, symlinks=True)
    text = text_of(page)
    for name in re.findall(r"<!-- prepare: (\S+) -->", text):
        PREPARE[name](folder, mindspore_data)
    for language, block, printed in BLOCK.findall(text):
        if language == "console":
            check([command._replace(lines=[*command.lines, "..."]) for command in typed(block)], folder, *first)
        else:
            assert printed, block
            check([Typed(f"{shlex.quote(sys.executable)} -c {shlex.quote(block)}", printed.splitlines())], folder)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_known_kind(page: str) -> None:
    """None is passed by because its fence is misspelled."""
    fences = FENCE.findall(text_of(page))
    assert len(fences) % 2 == 0
    assert set(fences[::2]) <= {"console", "pycon", "python", "text", "py", "sh", "toml", "yaml"}
    assert set(fences[1::2]) <= {""}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in LINK.findall(re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)):
        if target.startswith("https://"):
            continue
        place, _, anchor = target.partition("#")
        path = (ROOT / page).parent / place if place else ROOT / page
        assert path.exists(), f"{page}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, target


def test_every_page_is_reached_from_the_readme() -> None:
    reached, left = {"README.md"}, ["README.md"]
    while left:
        page = left.pop()
        for target in LINK.findall(text_of(page)):
            path = ((ROOT / page).parent / target.partition("#")[0]).resolve()
            name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
            if name in PAGES and name not in reached:
                reached.add(name)
                left.append(name)
    assert reached == set(PAGES)


@pytest.mark.parametrize("place", docs_made.PAGES)
def test_a_generated_page_is_what_the_program_says(place: str) -> None:
    said = "run python tests/docs_made.py"
    assert text_of(f"docs/{place}") == docs_made.PAGES[place](), said


@pytest.mark.parametrize("name", [*reshard.__all__, *(f"mindspore.{name}" for name in reshard.mindspore.__all__)])
def test_each_public_name_has_an_example(name: str) -> None:
    """One that is run, as pytest finds it: `doctest` looks into the module that a name is from."""
    value = attrgetter(name)(reshard)
    page = text_of("docs/reference/api.md")
    if not docs_made.documented(value):
        assert f"| `reshard.{name}` |" in page
        return
    assert docs_made.example(value)
    short = name.removeprefix("mindspore.")
    assert (f"### `reshard.{name}`\n" if short == name else f"| `{short}` |") in page
    examples = doctest.DocTestFinder().find(sys.modules[value.__module__])
    assert f"{value.__module__}.{value.__qualname__}" in {each.name for each in examples if each.examples}


@pytest.mark.slow
def test_the_site_has_each_public_name(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-d", tmp_path], cwd=ROOT, check=True)
    page = (tmp_path / "reference" / "api" / "index.html").read_text()
    for name in reshard.__all__:
        value = getattr(reshard, name)
        assert f'id="{value.__module__}.{value.__qualname__}"' in page
    assert page.count(">&gt;&gt;&gt; </span>") > len(reshard.__all__)
    assert "https://github.com/reshard/reshard/blob/HEAD/CONTRIBUTING.md" in (tmp_path / "index.html").read_text()


def test_options_that_are_named_exist() -> None:
    known = set(options(cli)) | OF_OTHERS
    shown = subprocess.run(
        [sys.executable, "tests/bench/bench.py", "--help"], cwd=ROOT, check=True, capture_output=True
    )
    known |= set(OPTION.findall(shown.stdout.decode()))
    for page in PAGES:
        assert known.issuperset(OPTION.findall(text_of(page))), page


def options(command: click.Command) -> Iterator[str]:
    """The options of a command and of those below it."""
    context = click.Context(command)
    yield from (
        option for parameter in command.get_params(context) for option in (*parameter.opts, *parameter.secondary_opts)
    )
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below
            yield from options(below)


def test_the_figures_about_mindspore_are_those_recorded(mindspore_data: Path) -> None:
    figures = []
    for out in ("tc_ckpt", "tc_st"):
        calls = [
            call
            for name in helpers.case_names()
            for call in helpers.load_meta(mindspore_data / "cases" / name)["calls"]
            if call.get("out") == out
        ]
        wrong = sum(bool(call["ok"] and call["differs_from_reference"]) for call in calls)
        refused = sum(not call["ok"] for call in calls)
        figures.append((len(calls) - wrong - refused, wrong, refused))
    page = text_of("docs/benchmarks.md")
    for row, numbers in zip(
        ("every rank right", "wrong values or shapes, silently", "refused with an error"),
        zip(*figures, strict=True),
        strict=True,
    ):
        assert f"| {row} | {numbers[0]} | {numbers[1]} |" in page
    assert f"shapes in {figures[1][1]} with safetensors and in {figures[0][1]} with `.ckpt`" in " ".join(README.split())


def test_the_picture_is_drawn_from_the_recorded_figures(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "tests/bench/picture.py", tmp_path / "benchmark.svg"], cwd=ROOT, check=True)
    assert (tmp_path / "benchmark.svg").read_text() == text_of("docs/benchmark.svg")
    assert json.loads(text_of("docs/benchmarks.json"))["version"]
