"""A -> B -> C -> ... -> A through random layouts and formats: at the end each byte of A's tensors is what it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import reference
from by_file import by_file
from fuzzing import SECONDS, Fuzzer, WrongError, error_of, is_unclear, require, reshard
from reference import Held, Side

from reshard.core.plan import budget

if TYPE_CHECKING:
    from collections import Counter
    from pathlib import Path
    from random import Random

SHARE = 0.25
COPIES = {"global_step": "int32", "learning_rate": "float32", "table": "bfloat16"}
DTYPES = ("float32", "bfloat16", "float16", "int8", "bool", "uint8", "int64", "float64", "int4", "uint16")
RARE = (*DTYPES, "float8_e4m3fn", "float8_e5m2", "complex64")


@dataclass
class Model:
    """Whole tensors, which each of some strategies cuts; copies and text are in every rank's file."""

    whole: dict[str, Held]
    copies: dict[str, Held | str]
    sides: list[Side]

    def rank_file(self, side: Side, rank: int) -> dict[str, Held | str]:
        found: dict[str, Held | str] = dict(self.copies)
        for name, held in self.whole.items():
            slices = side.slices(name, held.shape, rank)
            if slices is not None:
                found[name] = Held.of(held.dtype, held.bits()[slices])
        return found


@dataclass
class Link:
    """Where a chain is: what there is, and the words that name it."""

    path: Path
    words: list[str]
    kind: str  # `ranks`, `set` or `store`
    format: str


class UnclearError(Exception):
    """A JSON strategy may mean two things, and was refused."""


def make(rng: Random, formats: list[str]) -> Model:
    sides = [
        Side(
            stages,
            rng.choice([1, 2, 3, 4, 6, 8][: 6 // stages + 1]),
            form=rng.choice(["protobuf", "json", "directory"]),
        )
        for stages in rng.choices([1, 2, 3], [4, 2, 1], k=rng.randint(2, 5))
    ]
    for side in sides:
        if side.form == "directory" and side.stages == 1:
            side.form = "protobuf merged"
    whole = {}
    for name in [*(name for name, _ in reference.some_names(rng, 4)), "every"]:
        while True:
            ndim = 1 if name == "every" else rng.choice([0, 1, 2, 2, 3, 4])
            cuts = []
            for side in sides:
                stages = range(side.stages) if name == "every" else reference.some_stages(rng, side)
                cuts.append({stage: reference.some_cut(rng, side.devices, ndim) for stage in stages})
            shape = reference.fitting(rng, [cut for some in cuts for cut in some.values()], ndim, empty=True)
            if reference.prod(shape) <= 20_000:
                break
        for side, some in zip(sides, cuts, strict=True):
            for stage, cut in some.items():
                if side.form != "json" and ndim and not cut.optimizer and cut.splits[0] > 1 and rng.random() < 0.2:
                    some[stage] = reference.with_uneven(rng, cut, shape[0])
            side.cuts[name] = dict(sorted(some.items()))
        dtype = rng.choice(DTYPES if "ckpt" in formats else RARE)
        whole[name] = Held.of(dtype, reference.some_bits(rng, dtype, shape))
        for _ in range(50):
            if not any(reference.looks_whole(whole[name].bits(), side, name) for side in sides):
                break
            whole[name] = Held.of(dtype, reference.some_bits(rng, dtype, shape))
        else:
            whole[name] = Held.of(dtype, whole[name].bits() * 0)
    copies: dict[str, Held | str] = {
        name: Held.of(dtype, reference.some_bits(rng, dtype, (3,) if name == "table" else ()))
        for name, dtype in COPIES.items()
        if rng.random() < 0.5
    }
    if rng.random() < 0.4:
        copies["run"] = "größe"
    return Model(whole, copies, sides)


def one_chain(rng: Random, root: Path, counts: Counter[str]) -> None:
    formats = rng.choice([["ckpt", "safetensors"], ["safetensors"]])
    model = make(rng, formats)
    shapes = {name: held.shape for name, held in model.whole.items()}
    strategies = [side.write(root / f"strategy_{n}", shapes) for n, side in enumerate(model.sides)]
    format = rng.choice(formats)
    first = model.sides[0]
    for rank in first.ranks:
        path = root / f"a/rank_{rank}/checkpoint_{rank}.{format}"
        path.parent.mkdir(parents=True)
        entries = model.rank_file(first, rank)
        as_ckpt = format == "ckpt"
        path.write_bytes(reference.ckpt_bytes(entries, rng) if as_ckpt else reference.safetensors_bytes(entries, {}))
    link = Link(root / "a", [f"--source-strategy={strategies[0]}"], "ranks", format)
    with pytest.MonkeyPatch.context() as patch:
        if rng.random() < 0.6:
            patch.setattr(budget, "BAND_BYTES", rng.choice([64, 256, 1000]))
            patch.setattr(budget, "TASK_BYTES", rng.choice([128, 512, 4000]))
        try:
            for number, strategy in enumerate(strategies[1:], 1):
                link = between(rng, link, root / f"{number}", formats, counts)
                link = to_ranks(rng, link, root / f"{number}-ranks", strategy, rng.choice(formats))
                counts["links"] += 1
            link = between(rng, link, root / "last", formats, counts)
            link = to_ranks(rng, link, root / "b", strategies[0], format, whole_ranks=True)
        except UnclearError:
            counts["refused as it may be"] += 1
            return
    for rank in first.ranks:
        found = reference.read_file(link.path / f"rank_{rank}/checkpoint_{rank}.{format}")
        expected = model.rank_file(first, rank)
        texts = {name: text for name, text in expected.items() if isinstance(text, str)}
        require(found.texts == texts, f"rank {rank} has the texts {found.texts}; expected {texts}")
        require(
            found.tensors.keys() == expected.keys() - texts.keys(),
            f"rank {rank} has {sorted(found.tensors)}; expected {sorted(expected)}",
        )
        wrong = [name for name, held in found.tensors.items() if held != expected[name]]
        require(not wrong, f"rank {rank}: {wrong} came back changed")


def between(rng: Random, link: Link, path: Path, formats: list[str], counts: Counter[str]) -> Link:
    """Go by whole tensors or another format, or not."""
    way = rng.choice(["none", "set", "store", "whole", "convert"])
    if way == "convert" and (link.kind != "ranks" or len(formats) == 1):
        way = "none"
    counts[way] += 1
    if way == "none":
        return link
    if way == "set":
        style = [f"--to={rng.choice(['mindspore', 'huggingface'])}"]
        size = rng.choice([[], ["--max-shard-size=500B"]])
        step("convert", "--to=mindspore", link.path, path, *link.words, *style, *size)
        return Link(path, [], "set", "safetensors")
    if way == "store":
        chunks = rng.choice([[], ["--chunk-size=100B"], ["--chunk-size=100B", "--shard-size=700B"], ["--shard-size=0"]])
        compression = rng.choice([[], ["--compression=zstd:1"]])
        step("convert", link.path, path, *link.words, "--to=zarr", *chunks, *compression)
        return Link(path, [], "store", "zarr")
    format = rng.choice(formats)
    if way == "whole":
        step("convert", link.path, path, *link.words, f"--to={format}")
        return Link(path, [], "ranks", format)
    (format,) = set(formats) - {link.format}
    step("convert", link.path, path, f"--to={format}", "--same-ranks")
    return Link(path, link.words, "ranks", format)


def to_ranks(rng: Random, link: Link, path: Path, strategy: Path, format: str, *, whole_ranks: bool = False) -> Link:
    more = rng.choice([[], [], ["--remove-redundancy"], ["by file"], ["--threads=1"]])
    if whole_ranks and more == ["--remove-redundancy"]:
        more = []
    with pytest.MonkeyPatch.context() as patch:
        if more == ["by file"]:
            by_file(patch)
            more = []
        step("convert", link.path, path, *link.words, f"--target-strategy={strategy}", f"--to={format}", *more)
    return Link(path, [f"--source-strategy={strategy}"], "ranks", format)


def step(*words: str | Path) -> None:
    result = reshard(*words, "--tune=fsync=no")
    if is_unclear(result):
        raise UnclearError
    if result.exit_code:
        raise WrongError(f"exit code {result.exit_code}: {error_of(result)}\n$ reshard {' '.join(map(str, words))}")


@pytest.mark.slow
@pytest.mark.timeout(10 * SECONDS * SHARE + 600)
def test_fuzz_chains() -> None:
    Fuzzer("chains", SHARE, 120).run(one_chain)
