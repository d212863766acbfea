"""One flipped bit of what is written: it is noticed, or it changes nothing.

* Of a plan: it is refused, or what it writes is the same.
* Of a target: every way to verify it notices, or says that it does not look. What it need not notice is in `UNSEEN`,
  with the reason.

Flipped headers and strategies are read in `tests/hostile/fuzz.py`.

The bits of each day are others; RESHARD_FUZZ_SECONDS=100000 goes through every byte of everything.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import pytest
import reference
from fuzzing import SECONDS, Fuzzer, directory, done, error_of, require, reshard
from reference import Cut, Held, Side

if TYPE_CHECKING:
    from collections import Counter
    from pathlib import Path
    from random import Random

    from click.testing import Result

SHARE = 0.4
DAY = 1  # the contents of the model, not the bits that are flipped

UNSEEN = {
    ("structure", "contents"): "it says that contents were not read",
    ("structure", "text"): "a text is contents, too",
    ("structure", "name of a copy"): "no strategy names it, so that any name is as good; each rank may have its own",
    ("structure", "notes"): "nothing says what the notes of a file should be",
    ("structure", "form of text"): "the extents of a text entry say nothing",
    ("against", "notes"): "notes are the file's own, and a conversion may change them; it says that it does not look",
    ("against", "form of text"): "the extents of a text entry say nothing; formats differ in them",
    ("sample", "contents"): "only a sample of the rows is compared, and it says so",
    ("sample", "notes"): "as under --against",
    ("sample", "form of text"): "as under --against",
}
"""What a way to verify need not notice, by what the flipped bit is of, and why. A manifest notices everything."""

SAYS = {
    "structure": r"contents were not read",
    "against": r"(?i)not (compared|looked at|read|checked)|are not",
    "sample": r"(?i)sample",
}
"""What a way to verify says where it need not notice."""


SHAPES = {"w": (4, 4), "v": (4, 2), "b": (2,), "adam_m.w": (4, 4), "s": ()}
DTYPES = {"w": "float32", "v": "bfloat16", "b": "float32", "adam_m.w": "float32", "s": "int64"}
SOURCE = Side(
    1, 4,
    {
        "w": {0: Cut((2, 2), ((1,), ()))},
        "v": {0: Cut((4,), ((0,), ()))},
        "b": {0: Cut((4,), ((),))},
        "adam_m.w": {0: Cut((2, 2), ((1,), (0,)))},
        "s": {0: Cut((4,), ())},
    },
)  # fmt: skip
TARGET = Side(
    1, 2,
    {
        "w": {0: Cut((2,), ((), (0,)))},
        "v": {0: Cut((2,), ((), ()), -1)},
        "b": {0: Cut((2,), ((),))},
        "adam_m.w": {0: Cut((2,), ((), ()))},
        "s": {0: Cut((2,), ())},
    },
)  # fmt: skip
COPIES = {"global_step": Held("int32", (), b"\x07\x08\x09\x0a"), "table": Held("uint8", (4,), b"%&$#")}
TEXT = {"run": "aé"}


@cache
def whole() -> dict[str, Held]:
    import random

    rng = random.Random(DAY)  # noqa: S311 -- an example
    return {
        name: Held.of(DTYPES[name], reference.some_bits(rng, DTYPES[name], shape)) for name, shape in SHAPES.items()
    }


@dataclass
class Base:
    """A conversion whose files are flipped.

    Attributes:
        root: has everything: `src`, `source_strategy.*`, `target_strategy.*`, `out`, `plan.json`, `manifest.json`.
        source, target: the strategies.
        format: of the source files.
        to: of the target files.
        form: of the strategy files.
    """

    root: Path
    source: Side
    target: Side
    format: str
    to: str
    form: str
    strategies: list[str] = field(default_factory=list)

    def rank_file(self, side: Side, rank: int) -> dict[str, Held | str]:
        found: dict[str, Held | str] = {**COPIES, **TEXT}
        for name, held in whole().items():
            slices = side.slices(name, held.shape, rank)
            if slices is not None:
                found[name] = Held.of(held.dtype, held.bits()[slices])
        return found

    def make(self) -> None:
        """Write everything, and see that it is as it should be."""
        import random

        rng = random.Random(DAY)  # noqa: S311 -- an example
        for rank in self.source.ranks:
            path = self.root / f"src/rank_{rank}/a.{self.format}"
            path.parent.mkdir(parents=True)
            entries = self.rank_file(self.source, rank)
            notes = {"format": "ms", "note": "kept"}
            as_ckpt = self.format == "ckpt"
            path.write_bytes(
                reference.ckpt_bytes(entries, rng) if as_ckpt else reference.safetensors_bytes(entries, notes)
            )
        for name, side in (("source", self.source), ("target", self.target)):
            side.form = self.form
            path = side.write(self.root / f"{name}_strategy", SHAPES)
            self.strategies.append(f"--{name}-strategy={path}")
        src, out = self.root / "src", self.root / "out"
        done("convert", src, out, *self.strategies, f"--to={self.to}")
        done("verify", out, "--write-manifest", self.root / "manifest.json")
        done("plan", src, *self.strategies, f"--to={self.to}", "-o", self.root / "plan.json")
        for way in WAYS:
            require(verified(self, way).exit_code == 0, f"{way} of what is valid")

    def files(self, kind: str) -> list[Path]:
        """Return the files of a kind that are flipped."""
        return {
            "target": lambda: sorted((self.root / "out").glob("rank_*/*")),
            "plan": lambda: [self.root / "plan.json"],
            "manifest": lambda: [self.root / "manifest.json"],
        }[kind]()


BASES = [
    (SOURCE, TARGET, "safetensors", "ckpt", "protobuf"),
    (SOURCE, TARGET, "ckpt", "safetensors", "json"),
]
KINDS = {"target": 4, "plan": 2, "manifest": 1}
"""What is flipped, and how often among all."""


class Flip(NamedTuple):
    """A bit of a file."""

    base: Base
    path: Path
    place: int
    bit: int
    before: bytes
    after: bytes

    def __str__(self) -> str:
        window = self.before[max(0, self.place - 24) : self.place + 24]
        return (
            f"bit {self.bit} of byte {self.place} of {self.path.relative_to(self.base.root)} "
            f"({self.base.format} -> {self.base.to}, {self.base.form}; "
            f"0x{self.before[self.place]:02x} -> 0x{self.after[self.place]:02x} in {window!r})"
        )


def one_flip(base: Base, kind: str, rng: Random, counts: Counter[str]) -> None:
    """Flip a bit, look what comes of it, and flip it back."""
    files = base.files(kind)
    path = rng.choices(files, [path.stat().st_size for path in files])[0]
    before = path.read_bytes()
    place, bit = rng.randrange(len(before)), rng.randrange(8)
    after = bytearray(before)
    after[place] ^= 1 << bit
    flip = Flip(base, path, place, bit, before, bytes(after))
    path.write_bytes(after)
    try:
        for told in LOOKS[kind](flip, counts):
            require(False, f"{told}\n{flip}")
    finally:
        path.write_bytes(before)
        shutil.rmtree(base.root / "new", ignore_errors=True)


def outcome(result: Result, counts: Counter[str], kind: str) -> bool:
    """Count how a command ended; return whether it went through."""
    counts[f"{kind}: {'done' if result.exit_code == 0 else 'refused'}"] += 1
    if result.exit_code:
        require(result.exit_code in {2, 4, 6}, f"exit code {result.exit_code}: {error_of(result)}")
    return result.exit_code == 0


def of_plan(flip: Flip, counts: Counter[str]) -> list[str]:
    base = flip.base
    result = reshard("run", flip.path, base.root / "new", "--source", base.root / "src")
    if not outcome(result, counts, "plan"):
        return []
    return [
        f"rank {rank} is not as was planned"
        for rank in base.target.ranks
        if (base.root / f"new/rank_{rank}/checkpoint_{rank}.{base.to}").read_bytes()
        != (base.root / f"out/rank_{rank}/checkpoint_{rank}.{base.to}").read_bytes()
    ]


def of_manifest(flip: Flip, counts: Counter[str]) -> list[str]:
    result = verified(flip.base, "manifest")
    counts[f"manifest: {'unseen' if result.exit_code == 0 else 'noticed'}"] += 1
    return [] if result.exit_code in {3, 4} else [f"verify --manifest ends with {result.exit_code}: {result.output}"]


WAYS = ("structure", "against", "manifest", "sample")


def verified(base: Base, way: str) -> Result:
    return reshard(*verify_words(base, way))


def verify_words(base: Base, way: str) -> list[str | Path]:
    words: list[str | Path] = {
        "structure": [base.strategies[1]],
        "against": [base.strategies[1], "--against", base.root / "src", base.strategies[0]],
        "manifest": ["--manifest", base.root / "manifest.json"],
        "sample": [base.strategies[1], "--against", base.root / "src", base.strategies[0], "--sample=30%"],
    }[way]
    return ["verify", base.root / "out", *words, "--verbose"]


def of_target(flip: Flip, counts: Counter[str]) -> list[str]:
    region = region_of(flip)
    found = []
    for way in WAYS:
        result = verified(flip.base, way)
        if result.exit_code in {3, 4}:
            counts[f"{way}: noticed"] += 1
            continue
        said = result.stdout + result.stderr
        counts[f"{way}: unseen"] += 1
        if result.exit_code:
            found.append(f"{way} of a flipped bit of {region} ends with {result.exit_code}: {error_of(result)}")
        elif (way, region) not in UNSEEN:
            found.append(f"{way} does not notice a flipped bit of {region}")
        elif not re.search(SAYS[way], said):
            found.append(f"{way} does not notice a flipped bit of {region}, and does not say so: {said}")
    return found


def region_of(flip: Flip) -> str:
    """Say what of a rank's file a byte belongs to."""
    read = reference.read_bytes(flip.before)
    contents = [(held.content, "contents") for held in read.tensors.values()]
    if flip.before[8:9] != b"{":
        contents += [(text.encode("utf-32-le"), "text") for text in read.texts.values()]
    for content, region in contents:
        at = flip.before.rindex(content)
        if at <= flip.place < at + len(content):
            return region
    listed = set(SHAPES)
    if flip.before[8:9] == b"{":
        header = flip.before[: 8 + int.from_bytes(flip.before[:8], "little")]
        notes = header.index(b'"__metadata__":') + len(b'"__metadata__":')
        if notes <= flip.place < header.index(b"}", notes):
            text = header.find(b'"reshard.str"')
            return "text" if text >= 0 and flip.place >= text and flip.place < header.index(b'}"', text) else "notes"
        for name in read.tensors.keys() - listed:
            at = header.index(f'"{name}":'.encode()) + 1
            if at <= flip.place < at + len(name):
                return "name of a copy"
        return "header"
    for name in read.texts | read.tensors:
        at = flip.before.index(bytes([0x0A, len(name)]) + name.encode()) + 2
        if at <= flip.place < at + len(name) and name not in listed:
            return "name of a copy"
        if name in read.texts and at + len(name) <= flip.place < at + len(name) + 6:
            return "form of text" if flip.before[flip.place - 1] == 0x08 else "header"
    return "header"


LOOKS = {
    "target": of_target,
    "plan": of_plan,
    "manifest": of_manifest,
}


def bases_in(root: Path) -> list[Base]:
    """Make every base below a directory."""
    bases = []
    for number, (source, target, *rest) in enumerate(BASES):
        place = root / f"{number}"
        place.mkdir()
        bases.append(Base(place, Side(**vars(source)), Side(**vars(target)), *rest))
        bases[-1].make()
    return bases


@pytest.mark.slow
@pytest.mark.timeout(10 * SECONDS * SHARE + 600)
@pytest.mark.parametrize("kind", KINDS)
def test_fuzz_flips(kind: str) -> None:
    share = SHARE * KINDS[kind] / sum(KINDS.values())
    with directory(f"flips-{kind}") as root:
        bases = bases_in(root)

        def one(rng: Random, _: Path, counts: Counter[str]) -> None:
            one_flip(rng.choice(bases), kind, rng, counts)

        Fuzzer(f"flips-{kind.replace(' ', '-')}", share, 60).run(one)
