"""One flipped bit in anything that is read: the result is right, or one error says why there is none.

* Of a source, a strategy, a plan, an index, a store: a command ends with an error and its exit code, or with what the
  flipped file says, read by another reader (`reference`): never with other bytes, never with a traceback.
* The same where a file is gone, empty, truncated or too long.
* Of a target: every way to verify it notices, or says that it does not look. What it need not notice is in `UNSEEN`,
  with the reason.

The bits of each day are others; RESHARD_FUZZ_SECONDS=100000 goes through every byte of everything.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import reference
from fuzzing import SECONDS, Fuzzer, directory, done, error_of, require, reshard
from reference import Cut, Held, Read, Side

from reshard.strategy.proto import message_class  # the description of the message alone

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable
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


# --- what is flipped ---------------------------------------------------------------------------------------------

SHAPES = {"w": (4, 4), "v": (4, 2), "b": (2,), "adam_m.w": (4, 4), "s": ()}
DTYPES = {"w": "float32", "v": "bfloat16", "b": "float16", "adam_m.w": "float32", "s": "int8"}
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
PIPELINE = Side(
    2, 2,
    {
        "w": {0: Cut((2,), ((0,), ()))},
        "v": {1: Cut((2,), ((0,), ()))},
        "b": {0: Cut((2,), ((0,),)), 1: Cut((2,), ((),))},
        "adam_m.w": {0: Cut((2,), ((0,), ()))},
        "s": {1: Cut((2,), ())},
    },
)  # fmt: skip
COPIES = {"global_step": Held("int32", (), b"\x07\0\0\0"), "table": Held("uint8", (3,), b"abc")}
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
        done("convert", "--to=mindspore", src, self.root / "set", self.strategies[0], "--max-shard-size=50B")
        done("convert", src, self.root / "hub", self.strategies[0], "--to=hf")
        done("convert", src, self.root / "plain.zarr", self.strategies[0], "--to=zarr", "--chunk-size=16B")
        done("convert", src, self.root / "zstd.zarr", self.strategies[0], "--to=zarr", "--compression=zstd")
        for way in WAYS:
            require(verified(self, way).exit_code == 0, f"{way} of what is valid")

    def files(self, kind: str) -> list[Path]:
        """Return the files of a kind that are flipped."""
        return {
            "source": lambda: sorted((self.root / "src").rglob(f"a.{self.format}")),
            "target": lambda: sorted((self.root / "out").glob("rank_*/*")),
            "source strategy": lambda: sorted(self.root.glob("source_strategy.*")),
            "target strategy": lambda: sorted(self.root.glob("target_strategy.*")),
            "plan": lambda: [self.root / "plan.json"],
            "manifest": lambda: [self.root / "manifest.json"],
            "set": lambda: sorted(path for name in ("set", "hub") for path in (self.root / name).glob("[!.]*")),
            "store": lambda: [
                path
                for name in ("plain.zarr", "zstd.zarr")
                for path in sorted((self.root / name).rglob("*"))
                if path.is_file() and ".reshard" not in path.parts
            ],
        }[kind]()


BASES = [
    (SOURCE, TARGET, "safetensors", "ckpt", "protobuf"),
    (SOURCE, TARGET, "ckpt", "safetensors", "json"),
    (PIPELINE, SOURCE, "safetensors", "safetensors", "protobuf"),
    (SOURCE, PIPELINE, "ckpt", "ckpt", "json"),
]
KINDS = {
    "source": 2,
    "target": 4,
    "source strategy": 2,
    "target strategy": 2,
    "plan": 2,
    "manifest": 1,
    "set": 2,
    "store": 2,
}
"""What is flipped, and how often among all."""


# --- what must come of it ----------------------------------------------------------------------------------------


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
    files = base.files(kind)
    sizes = [path.stat().st_size for path in files]
    path = rng.choices(files, sizes)[0]
    flip_and_look(base, kind, path, rng.randrange(path.stat().st_size), rng.randrange(8), counts)


def flip_and_look(base: Base, kind: str, path: Path, place: int, bit: int, counts: Counter[str]) -> None:
    """Flip a bit, look what comes of it, and flip it back."""
    before = path.read_bytes()
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


def command(flip: Flip, source: str, *words: str | Path, target: bool = True) -> Result:
    """Transform or run, into a new directory."""
    base = flip.base
    strategies = base.strategies[not source.startswith("src") :] if target else []
    return reshard(*words, base.root / source, base.root / "new", *strategies, f"--to={base.to}")


def outcome(result: Result, counts: Counter[str], kind: str) -> bool:
    """Count how a command ended; return whether it went through."""
    counts[f"{kind}: {'done' if result.exit_code == 0 else 'refused'}"] += 1
    if result.exit_code:
        require(result.exit_code in {2, 4, 6}, f"exit code {result.exit_code}: {error_of(result)}")
    return result.exit_code == 0


def of_source(flip: Flip, counts: Counter[str]) -> list[str]:
    result = command(flip, "src", "convert")
    if not outcome(result, counts, "source"):
        return []
    base = flip.base
    try:
        held = sources(base)
    except Exception as error:
        return [f"convert reads what another reader cannot ({error})"]
    return wrong(flip, held, base.source, base.target)


def sources(base: Base) -> dict[int, Read]:
    """Read the source files; but for the CRC-32 that a `.ckpt` may carry, which MindSpore reads only where asked to."""
    return {
        rank: reference.read_file(base.root / f"src/rank_{rank}/a.{base.format}", crc=False)
        for rank in base.source.ranks
    }


def wrong(flip: Flip, held: dict[int, Read], source: Side, target: Side) -> list[str]:
    """Say what of a target is not what the source files and the strategies, as they are now, say."""
    names = {name for read in held.values() for name in read.tensors}
    made: dict[str, Held] = {}
    for name in sorted(names):
        copies = {rank: read.tensors[name] for rank, read in held.items() if name in read.tensors}
        if name not in source.cuts:
            values = set(copies.values())
            single = all(len(one.content) == reference.itemsize(one.dtype) for one in values)
            if len(values) > 1 and not (single and name != "global_step"):
                return [f"{name} differs between the ranks, and no strategy lists it"]
            made[name] = next(iter(copies.values()))
            continue
        joined = join(name, copies, source)
        if isinstance(joined, str):
            return [joined]
        made[name] = joined
    known = made.keys() | source.cuts.keys() | target.cuts.keys()
    states = {name for name in known if any(name.endswith(f".{other}") for other in known)}
    for name in target.cuts.keys() - made.keys() - states:
        return [f"{name} is in no source file, and the target's strategy names it"]
    for name in (source.cuts.keys() & made.keys()) - target.cuts.keys() - states:
        return [f"{name} is dropped without being asked for"]
    out = flip.base.root / "new"
    texts = {
        name: {read.texts[name] for read in held.values() if name in read.texts}
        for read in held.values()
        for name in read.texts
    }
    for rank in target.ranks:
        found = reference.read_file(out / f"rank_{rank}/checkpoint_{rank}.{flip.base.to}")
        expected: dict[str, Held] = {}
        for name, one in made.items():
            if name in target.cuts:
                try:
                    slices = target.slices(name, one.shape, rank)
                except Exception as error:
                    return [f"{name}: the target's layout cannot be applied ({error!r})"]
                if slices is not None:
                    expected[name] = Held.of(one.dtype, one.bits()[slices])
            elif name not in source.cuts:
                expected[name] = one
        if found.tensors.keys() != expected.keys():
            return [f"rank {rank} has {sorted(found.tensors)}; expected {sorted(expected)}"]
        for name, one in found.tensors.items():
            allowed = {expected[name]}
            if name not in source.cuts:
                allowed = {read.tensors[name] for read in held.values() if name in read.tensors}
            if one not in allowed and not (name in target.cuts and name not in source.cuts):
                return [f"rank {rank}: {name} is {one}; expected {allowed}"]
        if found.texts.keys() != texts.keys() or any(text not in texts[name] for name, text in found.texts.items()):
            return [f"rank {rank} has the texts {found.texts}; expected {texts}"]
    return []


def join(name: str, copies: dict[int, Held], source: Side) -> Held | str:
    """Put a tensor together from the ranks' blocks, which must fit and agree; or say what is wrong."""
    first = next(iter(copies.values()))
    by_stage = source.cuts[name]
    outside = [rank for rank in copies if rank // source.devices not in by_stage]
    if outside:
        return f"{name} is in the files of ranks {outside}; the strategy says that their stage does not hold it"
    try:
        ways = next(iter(by_stage.values()))
        shape = tuple(extent * parts for extent, parts in zip(first.shape, ways.splits, strict=True))
        if ways.uneven:
            shape = (sum(ways.uneven), *shape[1:])
        bits = first.bits()
        result = reference.np.zeros(shape, bits.dtype)
        filled = reference.np.zeros(shape, bool)
        replicas: dict[str, Any] = {}
        for rank, held in sorted(copies.items()):
            slices = source.slices(name, shape, rank)
            block = held.bits()
            if held.dtype != first.dtype or slices is None or result[slices].shape != block.shape:
                return f"{name} of rank {rank} is {held.dtype} {held.shape}, which does not fit"
            # Of a tensor that stages cut differently, equal blocks are compared when it is opened; verify compares all.
            if (replicas.setdefault(repr(slices), block) != block).any():
                return f"{name} of rank {rank} differs from its replica"
            result[slices] = reference.np.where(filled[slices], result[slices], block)  # the lowest stage counts
            filled[slices] = True
    except Exception as error:
        return f"{name}: the source's layout cannot be applied ({error!r})"
    return Held.of(first.dtype, result) if filled.all() else f"{name} is not there as a whole"


def of_strategy(flip: Flip, counts: Counter[str]) -> list[str]:
    base = flip.base
    result = command(flip, "src", "convert")
    kind = "source strategy" if "source" in flip.path.name else "target strategy"
    if not outcome(result, counts, kind):
        return []
    try:
        side = parse_strategy(flip.after)
    except Exception as error:
        return [f"convert reads a strategy that another reader cannot ({error!r})"]
    source, target = (side, base.target) if kind == "source strategy" else (base.source, side)
    held = sources(base)
    if len(source.ranks) != len(held):
        return [f"the strategy is of {len(source.ranks)} ranks, and {len(held)} are there"]
    return wrong(flip, held, source, target)


def parse_strategy(content: bytes) -> Side:
    """Read a strategy file by protobuf or JSON itself; an error where it says what `Side` does not know.

    Fields that are not there are none, as older files lack some; others may be there (DESIGN section 3).
    """
    listed: list[tuple[str, Cut]] = []
    stages = set()
    if content[:1] == b"{":
        data = json.loads(content)
        for name, item in data["parallel_layout_item"].items():
            entries = tuple((value,) if value >= 0 else () for value in item["tensor_map"])
            listed.append((name, Cut(tuple(item["dev_matrix"]), entries, item.get("opt_weight_shard_size", 0))))
            reference.require_format(item.get("field", 0) == 0, "field")
            shape = SHAPES.get(name.partition("-")[2] or name)
            reference.require_format(shape is None or tuple(item.get("tensor_shape", shape)) == shape, "tensor_shape")
        stages = {item["stage"] for item in data.get("parallel_strategy_item", {}).values()}
    else:
        message: Any = message_class("mindspore.straspb.ParallelStrategyMap")()
        message.ParseFromString(content)
        for item in message.parallel_layout_item:
            given = item.parallel_layouts
            matrix = tuple(extent for part in given.dev_matrix for extent in part.dim)
            parts = [list(part.dim) for part in given.tensor_map]
            flat = [value for part in parts for value in part]
            reference.require_format(len(parts) == 1 or all(len(part) < 2 for part in parts), "nested entries")
            reference.require_format(all(value >= -1 for value in flat) and given.field == 0, "entries")
            uneven = tuple(value for part in given.param_split_shape for value in part.dim)
            entries = tuple((value,) if value >= 0 else () for value in flat)
            listed.append((item.param_name, Cut(matrix, entries, given.opt_weight_shard_size, uneven)))
        stages = {item.parallel_strategys.stage for item in message.parallel_strategy_item}
    merged = all(re.fullmatch(r"\d+-.+", name, re.DOTALL) for name, _ in listed)
    cuts: dict[str, dict[int, Cut]] = defaultdict(dict)
    for full, cut in listed:
        stage, name = (
            (int(full.partition("-")[0]), full.partition("-")[2]) if merged else (max(stages, default=0), full)
        )
        reference.require_format(stage not in cuts[name], "a second layout")
        cuts[name][stage] = cut
    (devices,) = {reference.prod(cut.matrix) for _, cut in listed}
    last = max(stage for some in cuts.values() for stage in some)
    return Side(last + 1, devices, {name: dict(sorted(some.items())) for name, some in cuts.items()})


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


def of_whole(flip: Flip, counts: Counter[str]) -> list[str]:
    """A unified set or a store: what it becomes, and whether a comparison with its source notices it."""
    base = flip.base
    name = flip.path.relative_to(base.root).parts[0]
    kind = "store" if name.endswith(".zarr") else "set"
    verify = reshard("verify", base.root / name, "--against", base.root / "src", base.strategies[0])
    result = command(flip, name, "convert")
    went = outcome(result, counts, kind)
    original = {rank: original_file(base, rank) for rank in base.target.ranks}
    if went:
        new = {
            rank: reference.read_file(base.root / f"new/rank_{rank}/checkpoint_{rank}.{base.to}") for rank in original
        }
        same = all(
            (new[rank].tensors, new[rank].texts) == (original[rank].tensors, original[rank].texts) for rank in new
        )
        if not same:
            try:
                read = reference.read_store(base.root / name) if kind == "store" else read_set(base.root / name)
            except Exception as error:
                return [f"convert reads what another reader cannot ({error!r}), and writes other bytes"]
            told = wrong(flip, {0: read}, Side(1, 1), base.target)
            if told:
                return told
            if verify.exit_code == 0:
                return ["verify --against says that it is equal, and it becomes something else"]
    noticed = verify.exit_code in {3, 4}
    counts[f"{kind} verified: {'noticed' if noticed else 'unseen'}"] += 1
    if not went and not noticed:
        return [f"convert refuses it ({error_of(result)}), and verify --against says {verify.output!r}"]
    return []


def original_file(base: Base, rank: int) -> Read:
    return reference.read_file(base.root / f"out/rank_{rank}/checkpoint_{rank}.{base.to}")


def read_set(root: Path) -> Read:
    return reference.read_set(root)[0]


# --- verifying ---------------------------------------------------------------------------------------------------

WAYS = ("structure", "against", "manifest", "sample")


def verified(base: Base, way: str) -> Result:
    return reshard(*verify_words(base, way))


def verify_words(base: Base, way: str) -> list[str | Path]:
    words: list[str | Path] = {
        "structure": [base.strategies[1]],
        "against": [base.strategies[1], "--against", base.root / "src", base.strategies[0]],
        "manifest": ["--manifest", base.root / "manifest.json"],
        "sample": [base.strategies[1], "--against", base.root / "src", base.strategies[0], "--sample=30%", "--seed=1"],
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
    for name, runs in read.places.items():
        if any(offset <= flip.place < offset + nbytes for offset, nbytes in runs):
            return "text" if name in read.texts else "contents"
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
    "source": of_source,
    "target": of_target,
    "source strategy": of_strategy,
    "target strategy": of_strategy,
    "plan": of_plan,
    "manifest": of_manifest,
    "set": of_whole,
    "store": of_whole,
}


# --- files that are gone, or of another length ---------------------------------------------------------------------

HARMS: dict[str, Callable[[bytes], bytes | None]] = {
    "gone": lambda _: None,
    "empty": lambda _: b"",
    "one byte less": lambda content: content[:-1],
    "half of it": lambda content: content[: len(content) // 2],
    "one byte more": lambda content: content + b"\0",
}

ALLOWED = {
    (r"structure", r"zstd\.zarr/.*/c.*", r"empty|.* less|half.*|.* more"): (
        "how long a compressed chunk is only its contents tell, and it says that they were not read"
    ),
    (r".*", r"hub/model\.safetensors\.index\.json", r"gone"): "a set of one file is that file, whole without an index",
    (r".*", r"hub/model\.safetensors\.index\.json", r"one byte less"): "it is the line's end, and no part of the JSON",
}
"""Who need not warning: the command, the file and the harm, and why not."""


def harmed(base: Base, kind: str, path: Path, harm: str) -> list[str]:
    """Harm a file, and say who does not notice; then mend it."""
    before = path.read_bytes()
    after = HARMS[harm](before)
    if after == before:
        return []
    try:
        if after is None:
            path.unlink()
        else:
            path.write_bytes(after)
        told = unnoticed(base, kind, path, harm)
    finally:
        path.write_bytes(before)
        shutil.rmtree(base.root / "new", ignore_errors=True)
    return [f"{path.relative_to(base.root)} ({base.format} -> {base.to}), {harm}: {what}" for what in told]


def unnoticed(base: Base, kind: str, path: Path, harm: str) -> list[str]:
    """Return the commands that end with 0 though a file is harmed; those that only look at headers may say so."""
    name = path.relative_to(base.root).parts[0]
    against = ["--against", base.root / "src", base.strategies[0]]
    commands: dict[str, list[str | Path]] = {
        "transform": ["convert", base.root / name, base.root / "new", *base.strategies[name != "src" :]]
    }
    if kind == "target":
        commands = {"inspect": ["inspect", base.root / name, base.strategies[1].replace("--target", "--source")]}
        commands |= {way: verify_words(base, way) for way in WAYS}
    elif kind == "source":
        commands["plan"] = ["plan", base.root / name, *base.strategies]
        commands["run"] = ["run", base.root / "plan.json", base.root / "new", "--source", base.root / "src"]
    else:
        commands["structure"] = ["verify", base.root / name]
        commands["against"] = ["verify", base.root / name, *against]
    found = []
    below = path.relative_to(base.root).as_posix()
    for way, words in commands.items():
        allowed = any(all(map(re.fullmatch, one, (way, below, harm))) for one in ALLOWED)
        if reshard(*words).exit_code == 0 and not allowed:
            found.append(f"{way} ends with 0")
        shutil.rmtree(base.root / "new", ignore_errors=True)
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["source", "target", "set", "store"])
def test_lost_and_cut_files_are_noticed(kind: str) -> None:
    """No file that is read may be gone or of another length without every command that reads it saying so."""
    with directory(f"lost-{kind}") as root:
        found = [
            told
            for base in bases_in(root)[:2]
            for path in base.files(kind)
            for harm in HARMS
            for told in harmed(base, kind, path, harm)
        ]
    assert not found, f"{len(found)} are not noticed:\n" + "\n".join(found)


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
