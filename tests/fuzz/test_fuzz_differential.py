"""Random models, layouts, formats and options: what the commands write is what numpy slices of the whole tensors are.

Each case makes the files of a source, runs a command in this process, reads what was written by readers that are
not the package's, and runs the verifications that must agree. Selections and names have tests in `tests/plan`.
"""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import reference
from by_file import by_file
from faulty import Faults, forget, install, raising
from fuzzing import SECONDS, Fuzzer, WrongError, done, error_of, is_unclear, require, reshard
from reference import Held, Read, Side, Tensor

from reshard.core.plan import budget

if TYPE_CHECKING:
    from collections import Counter
    from pathlib import Path
    from random import Random

SHARE = 0.35
DTYPES = ("float32", "float32", "bfloat16", "bfloat16", "float16", "int8", "bool", "uint8", "int64", "float64", "int4",
          "uint16", "int32")  # fmt: skip
RARE = ("float8_e4m3fn", "float8_e5m2", "complex64", "float8_e8m0fnu")
CASTS = (("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32"), ("float64", "float32"),
         ("int64", "int32"), ("bool", "float32"), ("float32", "float8_e4m3fn"), ("float16", "float64"))  # fmt: skip
OTHERS = {"global_step": "int32", "learning_rate": "float32", "loss_scale": "float32", "rng.state": "uint16"}


@dataclass
class Case:
    """A model, where it comes from, and what is asked for.

    Attributes:
        tensors: of the model.
        source: the strategy of the source; None for one file of whole tensors.
        target: the strategy of the target; None for whole tensors.
        format: of the source files.
        cast: an old and a new dtype.
        into: `ranks`, or a `set` or a `store` of whole tensors.
        to: format that is asked for, if any.
        ranks: of the target, if not all are asked for.
        words: other options.
        left_out: tensors that are not in the files of a stage, since a lower one has them.
    """

    tensors: list[Tensor]
    source: Side | None
    target: Side | None
    format: str
    cast: tuple[str, str] | None = None
    into: str = "ranks"
    to: str | None = None
    ranks: list[int] | None = None
    words: list[str] = field(default_factory=list)
    left_out: set[tuple[str, int]] = field(default_factory=set)

    def dtype(self, dtype: str) -> str:
        return self.cast[1] if self.cast and self.cast[0] == dtype else dtype

    def rank_file(self, rank: int) -> dict[str, Held | str]:
        """What a source rank's file has."""
        found: dict[str, Held | str] = {}
        for tensor in self.tensors:
            if self.source is not None and tensor.name in self.source.cuts:
                slices = self.source.slices(tensor.name, tensor.shape, rank)
                if slices is not None and (tensor.name, rank // self.source.devices) not in self.left_out:
                    found[tensor.name] = tensor.held(slices)
            elif tensor.text is not None:
                found[tensor.name] = tensor.text
            else:
                found[tensor.name] = Held.of(tensor.dtype, tensor.own.get(rank, tensor.bits))
        return found

    def write(self, root: Path, rng: Random) -> list[str]:
        """Write the source; return the words that name it."""

        def put(path: Path, entries: dict[str, Held | str]) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            as_ckpt, notes = self.format == "ckpt", {"format": "ms", "note": "kept"}
            content = reference.ckpt_bytes(entries, rng) if as_ckpt else reference.safetensors_bytes(entries, notes)
            path.write_bytes(content)

        if self.source is None:
            put(root / f"src.{self.format}", self.rank_file(0))
            return [str(root / f"src.{self.format}")]
        name = rng.choice(["checkpoint_{rank}", "net-3_1875", "x"])
        for rank in self.source.ranks:
            folder = root / "src" / f"rank_{rank}"
            put(folder / f"{name.format(rank=rank)}.{self.format}", self.rank_file(rank))
            if name == "net-3_1875":
                put(folder / f"net-2_99.{self.format}", {})  # an older step
            (folder / f"net-4_1.{self.format}.tmp").write_bytes(b"no checkpoint")
            (folder / "net-graph.meta").write_bytes(b"none either")
        strategy = self.source.write(root / "source_strategy", {tensor.name: tensor.shape for tensor in self.tensors})
        return [str(root / "src"), f"--source-strategy={strategy}"]

    def expected(self, rank: int) -> dict[str, set[Held]]:
        """What a target rank gets: by name, the values of which it is one."""
        found = {}
        for tensor in self.tensors:
            slices: tuple[slice, ...] | None = ()
            if self.target is not None and tensor.name in self.target.cuts:
                slices = self.target.slices(tensor.name, tensor.shape, rank)
            if tensor.text is None and slices is not None:
                new = self.dtype(tensor.dtype)
                values = [bits[slices] for bits in tensor.own.values() or [tensor.bits]]
                found[tensor.name] = {Held.of(new, reference.cast_bits(tensor.dtype, new, bits)) for bits in values}
        return found

    def texts(self) -> dict[str, str]:
        return {tensor.name: tensor.text for tensor in self.tensors if tensor.text is not None}


def make(rng: Random) -> Case:
    source = None if rng.random() < 0.08 else some_side(rng)
    target = None if rng.random() < 0.3 else some_side(rng)
    case = Case([], source, target, rng.choice(["ckpt", "safetensors"]))
    if target is None and (source is None or rng.random() < 0.75):
        case.into = rng.choice(["set", "store"])
    for name, weight in [*reference.some_names(rng, 4), ("every", None)]:
        add_tensor(rng, case, name, weight)
    ranks = list(source.ranks) if source else [0]
    for name, dtype in OTHERS.items():
        if rng.random() < 0.4:
            shape = rng.choice([(), (1,)])
            tensor = Tensor(name, dtype, reference.some_bits(rng, dtype, shape))
            if name != "global_step" and len(ranks) > 1 and rng.random() < 0.4:
                tensor.own = {rank: reference.some_bits(rng, dtype, shape) for rank in ranks}
            case.tensors.append(tensor)
    if rng.random() < 0.3:
        bits = reference.some_bits(rng, "uint8", ())
        case.tensors.append(Tensor("run.name", "str", bits, rng.choice(["größe 😀", "", "7"])))
    cast = rng.choice(CASTS)
    if rng.random() < 0.2 and cast[0] in {tensor.dtype for tensor in case.tensors}:
        case.cast = cast
    options(rng, case)
    return case


def some_side(rng: Random) -> Side:
    stages = rng.choice([1, 1, 1, 2, 3])
    devices = rng.choice([1, 2, 3, 4, 4, 6, 8, 12][: 8 if stages == 1 else 5])
    forms = ["protobuf", "protobuf", "protobuf merged", "json", "json merged", "directory"]
    return Side(stages, devices, form=rng.choice(forms[: 6 if stages > 1 else 5]))


def add_tensor(rng: Random, case: Case, name: str, weight: str | None) -> None:
    """Add a weight or an optimizer state with its layouts; `every` is in each stage, since none may be empty."""
    sides = [side for side in (case.source, case.target) if side is not None]
    while True:
        ndim = 1 if name == "every" else rng.choice([0, 1, 1, 2, 2, 2, 3, 4])
        cuts = []
        for side in sides:
            stages = range(side.stages) if name == "every" else sorted(reference.some_stages(rng, side))
            cuts.append({stage: reference.some_cut(rng, side.devices, ndim) for stage in stages})
        shape = reference.fitting(rng, [cut for some in cuts for cut in some.values()], ndim, empty=name != "every")
        if reference.prod(shape) <= 6000:
            break
    for side, by_stage in zip(sides, cuts, strict=True):
        for stage, cut in by_stage.items():
            can_be = side.form.startswith(("protobuf", "directory")) and ndim and not cut.optimizer
            if can_be and cut.splits[0] > 1 and rng.random() < 0.2:
                by_stage[stage] = reference.with_uneven(rng, cut, shape[0])
        side.cuts[name] = by_stage
    dtype = rng.choice(DTYPES if case.format == "ckpt" or rng.random() < 0.8 else RARE)
    tensor = Tensor(name, dtype, reference.some_bits(rng, dtype, shape), weight=weight)
    for _ in range(50):
        if not any(reference.looks_whole(tensor.bits, side, name) for side in sides):
            break
        tensor.bits = reference.some_bits(rng, dtype, shape)
    else:
        tensor.bits = tensor.bits * 0
    if case.source is not None:
        case.left_out |= {(name, stage) for stage in sorted(case.source.cuts[name])[1:] if rng.random() < 0.5}
    case.tensors.append(tensor)


def options(rng: Random, case: Case) -> None:
    """Choose the format of the target, its ranks, and how it is run."""
    words = case.words
    dtypes = {case.dtype(tensor.dtype) for tensor in case.tensors if tensor.text is None}
    case.to = rng.choice([None, "ckpt", "safetensors"]) if dtypes <= set(reference.CKPT) else "safetensors"
    if case.into == "store":
        case.to = "zarr"
        words += rng.choice([[], [f"--chunk-size={rng.choice([1, 100, 2000])}B"]])
        words += rng.choice([[], ["--compression=zstd"], ["--compression=zstd:3"]])
    elif case.into == "set":
        case.to = None
        words.append(f"--to={rng.choice(['mindspore', 'hf'])}")
        words += rng.choice([[], [f"--max-shard-size={rng.choice([100, 3000])}B"]])
    else:
        words += rng.choice([[], [], ["--prefix=net-é"]])
    if case.target is not None:
        if rng.random() < 0.2:
            ranks = list(case.target.ranks)
            case.ranks = sorted(rng.sample(ranks, rng.randint(1, len(ranks))))
            words.append("--ranks=" + ",".join(map(str, case.ranks)))
        words += rng.choice([[], [], [], [], ["--remove-redundancy"]])
    words += rng.choice([[], [f"--threads={rng.randint(1, 4)}"], ["--cluster=synchronous"]])
    words += rng.choice([["--tune=fsync=no"], ["--tune=fsync=no"], []])
    words += rng.choice([[], [], [], [f"--memory={rng.choice(['200MB', '1GiB'])}"]])


def one_case(rng: Random, root: Path, counts: Counter[str]) -> None:
    case = make(rng)
    source, *words = case.write(root, rng)
    words += case.words
    words += [f"--cast={case.cast[0]}={case.cast[1]}"] if case.cast else []
    words += [f"--to={case.to}"] if case.to else []
    if case.target is not None:
        shapes = {tensor.name: tensor.shape for tensor in case.tensors}
        words.append(f"--target-strategy={case.target.write(root / 'target_strategy', shapes)}")
    out = root / "out"
    ways = {"direct": direct, "again": run_again, "stopped": stopped}
    if case.into != "store" and not any(word.startswith(("--prefix", "--to")) for word in words):
        ways["planned"] = planned
    rates = {"direct": 10, "again": 2, "stopped": 2, "planned": 3}
    way = rng.choices(list(ways), [rates[way] for way in ways])[0]
    if case.into == "store" and way in {"again", "stopped"}:
        way = "direct"  # a finished store is refused
    counts[f"{case.into} {way}"] += 1
    with pytest.MonkeyPatch.context() as patch:
        if rng.random() < 0.7 and not any(word.startswith("--memory") for word in words):
            patch.setattr(budget, "BAND_BYTES", rng.choice([64, 256, 1000]))
            patch.setattr(budget, "TASK_BYTES", rng.choice([128, 512, 4000]))
        if rng.random() < 0.25:
            by_file(patch)
        told = ways[way](case, root, ["convert", source, str(out), *words], rng)
    if told is None:
        counts["refused as it may be"] += 1
        return
    check(case, out)
    verify(rng, case, root, out, told)


Told = dict[str, object] | None


def transformed(words: list[str]) -> Told:
    """Run a command; a JSON strategy whose nested entries may mean two things may be refused."""
    result = reshard(*words, "--json")
    if is_unclear(result) and ".json" in " ".join(words):
        return None
    if result.exit_code:
        raise WrongError(f"exit code {result.exit_code}: {error_of(result)}\n$ reshard {' '.join(words)}")
    told: dict[str, object] = json.loads(result.stdout)
    return told


def direct(case: Case, root: Path, words: list[str], rng: Random) -> Told:
    return transformed(words)


def run_again(case: Case, root: Path, words: list[str], rng: Random) -> Told:
    """Lose some of the finished files, and type the same command again."""
    told = transformed(words)
    if told is None:
        return None
    files = sorted(path for path in (root / "out").rglob("*") if path.is_file() and ".reshard" not in path.parts)
    for path in rng.sample(files, rng.randint(0, len(files))):
        path.unlink()
    return transformed(words)


def stopped(case: Case, root: Path, words: list[str], rng: Random) -> Told:
    """Stop after some writes, by a full disk, look that nothing unfinished has a final name, and go on."""
    left, faults = rng.randint(0, 20), Faults()
    faults.nth(left, raising(OSError(28, "No space left on device")), "write_at", after=True)
    with pytest.MonkeyPatch.context() as patch:
        install(faults, patch)
        result = reshard(*words)
    forget()
    if is_unclear(result):
        return None
    if len(faults.of("write_at")) > left:
        require(result.exit_code == 5, f"a full disk: exit code {result.exit_code}: {error_of(result)}")
        for path in sorted((root / "out").rglob("*")):
            if path.is_file() and ".reshard" not in path.parts and path.suffix in {".ckpt", ".safetensors"}:
                reference.read_file(path)  # complete, since it has a final name
    return transformed(words)


def planned(case: Case, root: Path, words: list[str], rng: Random) -> Told:
    """Plan here, run there."""
    plan, running = str(root / "plan.json"), ("--threads", "--cluster", "--tune=fsync=no")
    result = reshard("plan", words[1], *(w for w in words[3:] if not w.startswith(running)), "-o", plan)
    if is_unclear(result):
        return None
    require(result.exit_code == 0, f"plan: exit code {result.exit_code}: {error_of(result)}")
    there = str(root / "there") + (f".{case.format}" if case.source is None else "")
    shutil.move(words[1], there)
    told = transformed(["run", plan, words[2], "--source", there, *(w for w in words[3:] if w.startswith(running))])
    shutil.move(there, words[1])
    assert told is not None
    return {**told, "verify": None}


def check(case: Case, out: Path) -> None:
    """Compare what was written with slices of the whole tensors."""
    if case.into == "store":
        compare(case, 0, reference.read_store(out), "the store")
        return
    if case.into == "set":
        found, weight_map, files = reference.read_set(out)
        compare(case, 0, found, "the set")
        for name, file in weight_map.items():
            require(name in files[file].tensors, f"{name} is not in {file}, where the index says it is")
        beside = {name for path, read in files.items() if not path.startswith("hyper") for name in read.tensors}
        require(beside == set(weight_map), f"the index names {set(weight_map)}; the files have {beside}")
        return
    prefix = "net-é" if "--prefix=net-é" in case.words else "checkpoint_"
    extension = f".{case.to or case.format}"
    ranks = case.ranks or (list(case.target.ranks) if case.target else [0])
    written = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file() and ".reshard" not in p.parts}
    expected = {f"rank_{rank}/{prefix}{rank}{extension}" for rank in ranks}
    require(written == expected, f"wrote {sorted(written)}; expected {sorted(expected)}")
    read = {rank: reference.read_file(out / f"rank_{rank}/{prefix}{rank}{extension}") for rank in ranks}
    if extension == ".safetensors":
        notes = {"format": "ms"} | ({"note": "kept"} if case.format == "safetensors" else {})
        for rank, found in read.items():
            require(notes.items() <= found.notes.items(), f"rank {rank} has the notes {found.notes}; expected {notes}")
    once = "--remove-redundancy" in case.words
    for rank, found in read.items():
        compare(case, rank, found, f"rank {rank}", once=once)
    if once:
        stored_once(case, read)


def compare(case: Case, rank: int, found: Read, where: str, *, once: bool = False) -> None:
    """Compare a file with what it should have; if replicas are stored once, it may lack what the strategy lists."""
    expected = case.expected(rank)
    lacking = expected.keys() - found.tensors.keys()
    told = f"{where} has {sorted(found.tensors)}; expected {sorted(expected)}"
    require(found.tensors.keys() <= expected.keys(), told)
    require(not lacking or (once and case.target is not None and lacking <= case.target.cuts.keys()), told)
    for name, held in found.tensors.items():
        require(held in expected[name], f"{where}: {name} is {about(held)}; expected {[*map(about, expected[name])]}")
    require(found.texts == case.texts(), f"{where} has the texts {found.texts}; expected {case.texts()}")


def about(held: Held) -> str:
    return f"{held.dtype} {held.shape} {held.content[:40].hex()}"


def stored_once(case: Case, read: dict[int, Read]) -> None:
    """Each block of a listed tensor is in one file of its stage; a rank that would have none has its smallest."""
    assert case.target is not None
    listed = {rank: [name for name in found.tensors if name in case.target.cuts] for rank, found in read.items()}
    for tensor in case.tensors:
        if tensor.name not in case.target.cuts:
            continue
        for stage, blocks in case.target.blocks(tensor.name, tensor.shape).items():
            for block, ranks in blocks.items():
                replicas = [rank for rank in ranks if rank in read and tensor.name in read[rank].tensors]
                spare = [rank for rank in replicas if len(listed[rank]) == 1]
                told = f"{tensor.name}: block {block} of stage {stage} is in files of {replicas}, of {ranks}"
                require(replicas or set(ranks) - read.keys(), told)
                require(len(replicas) - len(spare) <= 1, told)


def verify(rng: Random, case: Case, root: Path, out: Path, told: dict[str, object]) -> None:
    """Every way to verify agrees; and the command that is proposed."""
    proposed = told.get("verify")
    if isinstance(proposed, str):
        words = shlex.split(proposed)
        result = reshard(*words[words.index("verify") :])
        if is_unclear(result):
            return
        require(result.exit_code == 0, f"exit code {result.exit_code}: {result.output}{result.stderr}\n$ {proposed}")
    if case.ranks is None and "--remove-redundancy" not in case.words and rng.random() < 0.4:
        target = [f"--target-strategy={next(root.glob('target_strategy*'))}"] if case.target else []
        result = reshard("verify", out, *target)
        require(result.exit_code == 0 or is_unclear(result), f"structure: {result.exit_code}: {error_of(result)}")
    if case.into != "store" and rng.random() < 0.4:
        done("verify", out, "--write-manifest", root / "manifest.json")
        done("verify", out, "--manifest", root / "manifest.json")


@pytest.mark.slow
@pytest.mark.timeout(10 * SECONDS * SHARE + 600)
def test_fuzz_differential() -> None:
    Fuzzer("differential", SHARE, 250).run(one_case)
