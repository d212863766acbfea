"""Random models, layouts, formats and options: what the commands write is what numpy slices of the whole tensors are.

Each case makes the files of a source, runs a command (in this process; some as a process of its own), reads what was
written by readers that are not the package's, and runs the verifications that must agree.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import reference
from by_file import by_file
from faulty import Faults, forget, install, raising
from fuzzing import SECONDS, Fuzzer, WrongError, done, error_of, is_unclear, require, reshard
from reference import Held, Read, Side, Tensor, Wishes

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


@dataclass
class Case:
    """A model, where it comes from, and what is asked for.

    Attributes:
        tensors: of the model.
        source: the strategy of the source; None for one file of whole tensors.
        target: the strategy of the target, by its names; None for whole tensors.
        selection: selection.
        format: of the source files.
        into: files of `ranks`, a `set` or a `store`.
        to: format that is asked for, if any.
        ranks: of the target, if not all are asked for.
        words: other options.
        present: the source ranks whose files are there.
    """

    tensors: list[Tensor]
    source: Side | None
    target: Side | None
    selection: Wishes
    format: str
    into: str = "ranks"
    to: str | None = None
    ranks: list[int] | None = None
    words: list[str] = field(default_factory=list)
    present: list[int] = field(default_factory=lambda: [0])
    left_out: set[tuple[str, int]] = field(default_factory=set)

    @property
    def by_name(self) -> dict[str, Tensor]:
        return {tensor.name: tensor for tensor in self.tensors}

    def lists(self, name: str) -> bool:
        return self.source is not None and name in self.source.cuts

    def new_name(self, tensor: Tensor) -> str:
        return self.selection.renamed(tensor.name, tensor.weight)

    # --- the source ---

    def rank_file(self, rank: int) -> dict[str, Held | str]:
        """What a source rank's file has."""
        found: dict[str, Held | str] = {}
        for tensor in self.tensors:
            if not tensor.in_files:
                continue
            if self.lists(tensor.name):
                assert self.source is not None
                slices = self.source.slices(tensor.name, tensor.shape, rank)
                if slices is not None and (tensor.name, rank // self.source.devices) not in self.left_out:
                    found[tensor.name] = tensor.held(slices)
            elif rank in tensor.replicas:
                if tensor.text is not None:
                    found[tensor.name] = tensor.text
                else:
                    found[tensor.name] = Held.of(tensor.dtype, tensor.own.get(rank, tensor.bits))
        return found

    def write(self, root: Path, rng: Random) -> list[str]:
        """Write the source; return the words that name it."""
        every = {rank: self.rank_file(rank) for rank in self.present}
        extension = f".{self.format}"

        def put(path: Path, entries: dict[str, Held | str]) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if self.format == "ckpt":
                path.write_bytes(reference.ckpt_bytes(entries, rng))
            else:
                path.write_bytes(reference.safetensors_bytes(entries, {"format": "ms", "note": "kept"}))

        if self.source is None:
            put(root / f"src{extension}", every[0])
            return [str(root / f"src{extension}")]
        pattern, words = "rank_{rank}", []
        if rng.random() < 0.1:
            pattern = "deep/n{rank}"
            words = ["--rank-pattern=deep/n{rank}/*"]
        name = rng.choice(["checkpoint_{rank}", "net-3_1875", "x"])
        parts = rng.random() < 0.08
        for rank, entries in every.items():
            folder = root / "src" / pattern.format(rank=rank)
            path = folder / (name.format(rank=rank) + extension)
            if parts and len(entries) > 1:
                half = len(entries) // 2
                put(path.with_stem(f"{path.stem}_part0"), dict(list(entries.items())[:half]))
                put(path.with_stem(f"{path.stem}_part1"), dict(list(entries.items())[half:]))
            elif parts:
                put(path.with_stem(f"{path.stem}_part0"), entries)
            else:
                put(path, entries)
            if name == "net-3_1875":
                put(folder / f"net-2_99{extension}", {})  # an older step
            (folder / f"net-4_1{extension}.tmp").write_bytes(b"no checkpoint")
            (folder / "net-graph.meta").write_bytes(b"none either")
        shapes = {tensor.name: tensor.shape for tensor in self.tensors}
        strategy = self.source.write(root / "source_strategy", shapes)
        return [str(root / "src"), f"--source-strategy={strategy}", *words]

    # --- what is expected ---

    def kept(self) -> list[Tensor]:
        """The tensors that the target gets, as a whole or in part."""
        return [
            tensor
            for tensor in self.tensors
            if tensor.in_files
            and self.selection.chooses(tensor)
            and (self.target is None or self.new_name(tensor) in self.target.cuts or not self.lists(tensor.name))
        ]

    def cast(self, held: Held) -> Held:
        return Held.of(self.selection.dtype(held.dtype), self.selection.cast_bits(held.dtype, held.bits()))

    def expected(self, rank: int) -> dict[str, set[Held]]:
        """What a target rank gets: by name, the values of which it is one."""
        found = {}
        for tensor in self.kept():
            new = self.new_name(tensor)
            if tensor.text is not None:
                continue
            slices: tuple[slice, ...] | None = ()
            if self.target is not None and new in self.target.cuts:
                slices = self.target.slices(new, tensor.shape, rank)
            if slices is not None:
                values = [bits for number, bits in tensor.own.items() if number in self.present] or [tensor.bits]
                found[new] = {self.cast(Held.of(tensor.dtype, bits[slices])) for bits in values}
        return found

    def texts(self) -> dict[str, str]:
        return {self.new_name(tensor): tensor.text for tensor in self.kept() if tensor.text is not None}


# --- making cases ------------------------------------------------------------------------------------------------


def make(rng: Random) -> Case:
    """Make a case that must succeed: some of the files that are written have a tensor; else they are no checkpoint."""
    while True:
        case = make_any(rng)
        written = case.ranks or (list(case.target.ranks) if case.target else [0])
        if any(map(case.expected, written)):
            return case


def make_any(rng: Random) -> Case:
    source = None if rng.random() < 0.08 else some_side(rng)
    target = None if rng.random() < 0.3 else some_side(rng)
    format = rng.choice(["ckpt", "safetensors"])
    case = Case([], source, target, Wishes(), format)
    if target is None and (source is None or rng.random() < 0.75):
        case.into = rng.choice(["set", "store"])
    names = reference.some_names(rng, 4)
    named = {weight for weight, state in names if state is None}
    if rng.random() < 0.3:
        case.selection.names = {weight: f"model/{n}.w" for n, weight in enumerate(sorted(named)) if rng.random() < 0.6}
        swapped = sorted(case.selection.names)[:2]
        if len(swapped) == 2 and rng.random() < 0.5:
            case.selection.names = {swapped[0]: swapped[1], swapped[1]: swapped[0]}
        elif any(name.startswith("net.") for name in named) and rng.random() < 0.3:
            case.selection.names = {"net.*": "model.*"}
    for name, weight in names:
        add_tensor(rng, case, name, weight)
    add_others(rng, case)
    every_stage_has_one(rng, case)
    if source is not None:
        case.present = list(source.ranks)
        leave_ranks_out(rng, case)
    choose(rng, case)
    options(rng, case)
    return case


def some_side(rng: Random) -> Side:
    stages = rng.choice([1, 1, 1, 2, 3])
    devices = rng.choice([1, 2, 3, 4, 4, 6, 8, 12][: 8 if stages == 1 else 5])
    forms = ["protobuf", "protobuf", "protobuf merged", "json", "json merged", "directory"]
    return Side(stages, devices, form=rng.choice(forms[: 6 if stages > 1 else 5]))


def add_tensor(rng: Random, case: Case, name: str, weight: str | None) -> None:
    """Add a weight or an optimizer state with its layouts."""
    new = case.selection.renamed(name, weight)
    while True:
        ndim = rng.choice([0, 1, 1, 2, 2, 2, 3, 4])
        cuts: list[tuple[Side, str, dict[int, reference.Cut]]] = []
        for side, own_name, chance in ((case.source, name, 0.88), (case.target, new, 0.9)):
            if side is not None and rng.random() < chance:
                stages = sorted(reference.some_stages(rng, side))
                cuts.append((side, own_name, {s: reference.some_cut(rng, side.devices, ndim) for s in stages}))
        every = [cut for _, _, by_stage in cuts for cut in by_stage.values()]
        shape = reference.fitting(rng, every, ndim, empty=True)
        if size(shape) <= 6000:
            break
    for side, own_name, by_stage in cuts:
        for stage, cut in by_stage.items():
            can_be = side.form.startswith(("protobuf", "directory")) and ndim and not cut.optimizer
            if can_be and cut.splits[0] > 1 and rng.random() < 0.2:
                by_stage[stage] = reference.with_uneven(rng, cut, shape[0])
        side.cuts[own_name] = by_stage
    dtype = rng.choice(DTYPES if case.format == "ckpt" or rng.random() < 0.8 else RARE)
    tensor = Tensor(name, dtype, reference.some_bits(rng, dtype, shape), weight=weight)
    for _ in range(50):
        if not any(reference.looks_whole(tensor.bits, side, own_name) for side, own_name, _ in cuts):
            break
        tensor.bits = reference.some_bits(rng, dtype, shape)
    else:
        tensor.bits = tensor.bits * 0
    if case.lists(name):
        assert case.source is not None
        held = sorted(case.source.cuts[name])
        case.left_out |= {(name, stage) for stage in held[1:] if rng.random() < 0.5}
    else:
        tensor.replicas = some_holders(rng, case)
    listed_by_target = case.target is not None and new in case.target.cuts
    asked_for = listed_by_target or (case.target is None and case.lists(name))
    if asked_for and not case.selection.names and rng.random() < 0.05:
        tensor.in_files = False
        if weight is None:
            case.selection.allow_missing.append(name)
    elif case.target is not None and not listed_by_target and case.lists(name) and weight is None:
        case.selection.drop.append(name)
    case.tensors.append(tensor)


def size(shape: reference.Shape) -> int:
    return reference.prod(shape)


def some_holders(rng: Random, case: Case) -> tuple[int, ...]:
    """Which ranks' files have what the source strategy does not list."""
    ranks = list(case.source.ranks) if case.source else [0]
    return tuple(ranks if rng.random() < 0.8 else sorted(rng.sample(ranks, rng.randint(1, len(ranks)))))


def add_others(rng: Random, case: Case) -> None:
    """Add what only training needs, text, and values that every rank has of its own."""
    for name, dtype in (("global_step", "int32"), ("learning_rate", "float32"), ("loss_scale", "float32"),
                        ("rng.state", "uint16")):  # fmt: skip
        if rng.random() < 0.4:
            shape = rng.choice([(), (1,)])
            replicas = some_holders(rng, case)
            tensor = Tensor(name, dtype, reference.some_bits(rng, dtype, shape), replicas=replicas)
            if name != "global_step" and len(replicas) > 1 and rng.random() < 0.4:
                tensor.own = {rank: reference.some_bits(rng, dtype, shape) for rank in replicas}
            case.tensors.append(tensor)
    if rng.random() < 0.3:
        bits = reference.some_bits(rng, "uint8", ())
        case.tensors.append(
            Tensor("run.name", "str", bits, rng.choice(["größe 😀", "", "7"]), replicas=some_holders(rng, case))
        )


def every_stage_has_one(rng: Random, case: Case) -> None:
    """Give each stage of a strategy a tensor; a file cannot tell of one that has none."""
    for side, named in ((case.source, "every.source"), (case.target, "every.target")):
        if side is None:
            continue
        held = {stage for cuts in side.cuts.values() for stage in cuts}
        if held != set(range(side.stages)):
            cuts = {stage: reference.some_cut(rng, side.devices, 1) for stage in range(side.stages)}
            other = case.target if side is case.source else case.source
            shape = reference.fitting(rng, cuts.values(), 1, empty=False)
            side.cuts[named] = cuts
            tensor = Tensor(named, "float32", reference.some_bits(rng, "float32", shape))
            case.tensors.append(tensor)
            if side is case.target:
                tensor.replicas = tuple(case.source.ranks) if case.source else (0,)
            elif other is not None:
                case.selection.drop.append(named)


def leave_ranks_out(rng: Random, case: Case) -> None:
    """Take away ranks whose blocks others have, as `--partial` allows."""
    assert case.source is not None
    if rng.random() > 0.1:
        return
    left = set(case.present)
    for rank in rng.sample(case.present, len(case.present)):
        if len(left) > 1 and suffices(case, left - {rank}):
            left.discard(rank)
    if left != set(case.present):
        case.present = sorted(left)
        case.words.append("--partial")


def suffices(case: Case, ranks: set[int]) -> bool:
    """Return whether some ranks have all: of each listed tensor, all blocks in its lowest stage."""
    assert case.source is not None
    for tensor in case.tensors:
        if not tensor.in_files:
            continue
        if case.lists(tensor.name):
            blocks = case.source.blocks(tensor.name, tensor.shape)
            if not all(ranks.intersection(held) for held in blocks[min(blocks)].values()):
                return False
        elif not ranks.intersection(tensor.replicas):
            return False
    return True


def choose(rng: Random, case: Case) -> None:
    """Select some of the tensors, in one way or another, and cast."""
    selection = case.selection
    inside = [tensor.name for tensor in case.tensors if tensor.in_files]
    if rng.random() < 0.15:
        selection.include = rng.sample(inside, rng.randint(1, len(inside)))
        if rng.random() < 0.5:
            selection.include = [f"{selection.include[0][:3]}*", *selection.include[1:]]
    if rng.random() < 0.15:
        selection.exclude = rng.sample(inside, 1)
    selection.weights_only = rng.random() < 0.15
    if all(tensor.text is not None for tensor in case.kept()):  # a target without any tensor is none
        selection.include, selection.exclude, selection.weights_only = [], [], False
    if rng.random() < 0.2:
        selection.cast = dict([rng.choice(CASTS)])
    without_unused(case)


def without_unused(case: Case) -> None:
    """Take back what would change nothing, which is refused."""
    selection = case.selection
    if all(case.new_name(tensor) == tensor.name for tensor in case.kept()):
        selection.include, selection.exclude, selection.weights_only = [], [], False
        if all(case.new_name(tensor) == tensor.name for tensor in case.kept()):
            selection.names = {}
    inside = [tensor.name for tensor in case.tensors if tensor.in_files]
    included = {name for name in inside if not selection.include or reference.matches(name, selection.include)}
    selection.exclude = [glob for glob in selection.exclude if any(reference.matches(n, [glob]) for n in included)]
    absent = [tensor for tensor in case.tensors if not tensor.in_files and selection.chooses(tensor)]
    selection.allow_missing = [tensor.name for tensor in absent if tensor.name in selection.allow_missing]
    if any(old not in {tensor.dtype for tensor in case.kept() if tensor.text is None} for old in selection.cast):
        selection.cast = {}


def options(rng: Random, case: Case) -> None:
    """Choose the format of the target, its ranks, and how it is run."""
    words = case.words
    dtypes = {case.selection.dtype(tensor.dtype) for tensor in case.kept() if tensor.text is None}
    only_safetensors = not dtypes <= set(reference.CKPT)
    case.to = rng.choice([None, "ckpt", "safetensors"])
    if only_safetensors:
        case.to = "safetensors"
    if case.into != "ranks":
        case.to = "zarr" if case.into == "store" else None
        if case.into == "store":
            words += rng.choice([[], [f"--chunk-size={rng.choice([1, 100, 2000])}B"]])
            words += rng.choice([[], ["--compression=zstd"], ["--compression=zstd:3"]])
        else:
            words.append(f"--to={rng.choice(['mindspore', 'hf'])}")
            words += rng.choice([[], [f"--max-shard-size={rng.choice([100, 3000])}B"]])
    else:
        words += rng.choice([[], [], ["--prefix=net/é_"[:9].replace("/", "-")]])
        if case.target is not None and rng.random() < 0.2:
            ranks = list(case.target.ranks)
            case.ranks = sorted(rng.sample(ranks, rng.randint(1, len(ranks))))
            words.append("--ranks=" + ",".join(map(str, case.ranks)))
        if case.target is not None:
            words += rng.choice([[], [], [], [], ["--remove-redundancy"]])
    words += rng.choice([[], [f"--threads={rng.randint(1, 4)}"], ["--cluster=synchronous"]])
    words += rng.choice([["--tune=fsync=no"], ["--tune=fsync=no"], []])
    words += rng.choice([[], [], [], [f"--memory={rng.choice(['200MB', '1GiB'])}"]])


# --- running and checking ----------------------------------------------------------------------------------------


def one_case(rng: Random, root: Path, counts: Counter[str]) -> None:
    case = make(rng)
    reading = case.write(root, rng)
    source, *read_words = reading
    (root / "names.json").write_text(json.dumps(case.selection.names))
    shapes = {case.new_name(tensor): tensor.shape for tensor in case.tensors}
    words = [*read_words, *case.words, *case.selection.words()]
    words += [f"--name-map={root / 'names.json'}"] if case.selection.names else []
    words += [f"--to={case.to}"] if case.to else []
    if case.target is not None:
        words.append(f"--target-strategy={case.target.write(root / 'target_strategy', shapes)}")
    out = root / "out"
    ways = {"direct": direct, "again": run_again, "stopped": stopped, "process": as_a_process}
    if "--partial" not in words:
        ways["over another"] = over_another
    if not any(word.startswith(("--prefix", "--chunk", "--compression", "--to")) for word in words):
        ways["planned"] = planned
    # Weights that are left out of a store are missed by what is said of their states there.
    is_whole = not case.selection.names and not case.selection.drop
    if case.into == "ranks" and case.target is not None and is_whole:
        ways["by a store"] = by_a_store
    rates = {"direct": 10, "again": 2, "stopped": 2, "process": 0.1, "over another": 2, "planned": 3, "by a store": 2}
    way = rng.choices(list(ways), [rates[way] for way in ways])[0]
    if case.into == "store" and way in {"again", "stopped"}:
        way = "direct"  # a finished store is refused
    counts[f"{case.into} {way}"] += 1
    small = rng.choice([True, True, False]) and not any(word.startswith("--memory") for word in words)
    with pytest.MonkeyPatch.context() as patch:
        if small:
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


def as_a_process(case: Case, root: Path, words: list[str], rng: Random) -> Told:
    ended = subprocess.run(
        [sys.executable, "-m", "reshard", *words, "--json"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONWARNINGS": "error"},
    )
    if ended.returncode == 4 and "whole shape is unclear" in ended.stderr:
        return None
    require(ended.returncode == 0, f"exit code {ended.returncode}: {ended.stderr}\n$ reshard {' '.join(words)}")
    told: dict[str, object] = json.loads(ended.stdout)
    return told


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


def over_another(case: Case, root: Path, words: list[str], rng: Random) -> Told:
    """Write over the target of another step, whose files have the same names."""
    other = root / "other"
    other.mkdir()
    changed = Case(**vars(case))
    changed.tensors = [Tensor(**vars(tensor)) for tensor in case.tensors]
    for tensor in changed.tensors:
        if not tensor.own and tensor.name != "global_step" and rng.random() < 0.7:
            flipped = tensor.bits ^ tensor.bits.dtype.type(1)
            if not (
                case.source and case.lists(tensor.name) and reference.looks_whole(flipped, case.source, tensor.name)
            ):
                tensor.bits = flipped
    reading = changed.write(other, rng)
    first = [words[0], reading[0], words[2], *reading[1:], *(w for w in words[3:] if "--source-str" not in w)]
    first = [word for word in first if not word.startswith("--rank-pattern")]
    first += [word for word in reading[1:] if word.startswith("--rank-pattern")]
    if transformed(first) is None:
        return None
    if case.into == "set":  # a set of other files than before may be refused
        result = reshard(*words, "--overwrite", "--dry-run")
        if result.exit_code == 6:
            return None
    return transformed([*words, "--overwrite"])


def planned(case: Case, root: Path, words: list[str], rng: Random) -> Told:
    """Plan here, run there."""
    if case.into == "store":
        return transformed(words)
    plan = str(root / "plan.json")
    running = ("--threads", "--cluster", "--tune=fsync=no")
    planning = [word for word in words[3:] if not word.startswith(running)]
    result = reshard("plan", words[1], *planning, "-o", plan)
    if is_unclear(result):
        return None
    if "not-savable" in result.codes:  # a conversion file by file
        return transformed(words)
    require(result.exit_code == 0, f"plan: exit code {result.exit_code}: {error_of(result)}")
    there = words[1]
    if rng.random() < 0.7:
        there = str(root / "there") + (f".{case.format}" if case.source is None else "")
        shutil.move(words[1], there)
    told = transformed(["run", plan, words[2], "--source", there, *(w for w in words[3:] if w.startswith(running))])
    if there != words[1]:
        shutil.move(there, words[1])
        assert told is not None
        told["verify"] = None
    return told


def by_a_store(case: Case, root: Path, words: list[str], rng: Random) -> Told:
    """Convert into a store first."""
    store, split = str(root / "via.zarr"), ("--target-strategy", "--ranks", "--remove-redundancy", "--prefix", "--to=")
    first = [word for word in words[3:] if not word.startswith(split)]
    if transformed([*words[:2], store, *first]) is None:
        return None
    running = ("--threads", "--cluster", "--tune", "--memory")
    format_ = [] if any(word.startswith("--to=") for word in words) else [f"--to={case.format}"]
    more = [word for word in words[3:] if word.startswith((*split, *running))]
    return transformed(["convert", store, words[2], *more, *format_])


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
    prefix = next(
        (word.removeprefix("--prefix=") for word in case.words if word.startswith("--prefix=")), "checkpoint_"
    )
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
    if "--remove-redundancy" in case.words:
        stored_once(case, read)
    else:
        for rank, found in read.items():
            compare(case, rank, found, f"rank {rank}")


def compare(case: Case, rank: int, found: Read, where: str) -> None:
    expected = case.expected(rank)
    require(
        found.tensors.keys() == expected.keys(), f"{where} has {sorted(found.tensors)}; expected {sorted(expected)}"
    )
    for name, held in found.tensors.items():
        require(held in expected[name], f"{where}: {name} is {about(held)}; expected {[*map(about, expected[name])]}")
    require(found.texts == case.texts(), f"{where} has the texts {found.texts}; expected {case.texts()}")


def about(held: Held) -> str:
    return f"{held.dtype} {held.shape} {held.content[:40].hex()}"


def stored_once(case: Case, read: dict[int, Read]) -> None:
    """Each block of a listed tensor is in one file of its stage; a rank that would have none has its smallest."""
    assert case.target is not None
    copies: dict[tuple[str, int, Held], list[int]] = {}
    listed = {rank: [name for name in found.tensors if name in case.target.cuts] for rank, found in read.items()}
    for rank, found in read.items():
        expected = case.expected(rank)
        require(
            found.tensors.keys() <= expected.keys(), f"rank {rank} has {sorted(found.tensors)}; not all are its own"
        )
        for name, held in found.tensors.items():
            require(held in expected[name], f"rank {rank}: {name} is {about(held)}; expected {expected[name]}")
        unlisted = expected.keys() - case.target.cuts.keys()
        require(unlisted <= found.tensors.keys(), f"rank {rank} lacks {unlisted - found.tensors.keys()}")
        require(found.texts == case.texts(), f"rank {rank} has the texts {found.texts}")
    for tensor in case.kept():
        new = case.new_name(tensor)
        if new not in case.target.cuts:
            continue
        for stage, blocks in case.target.blocks(new, tensor.shape).items():
            for block, ranks in blocks.items():
                replicas = [rank for rank in ranks if rank in read and new in read[rank].tensors]
                spare = [rank for rank in replicas if len(listed[rank]) == 1]
                told = f"{new}: block {block} of stage {stage} is in the files of ranks {replicas}, of {ranks}"
                require(replicas or set(ranks) - read.keys(), told)
                require(len(replicas) - len(spare) <= 1, told)
    assert not copies


def verify(rng: Random, case: Case, root: Path, out: Path, told: dict[str, object]) -> None:
    """Every way to verify agrees; and the command that is proposed."""
    proposed = told.get("verify")
    if isinstance(proposed, str):
        words = shlex.split(proposed)
        result = reshard(*words[words.index("verify") :])
        if is_unclear(result):
            return
        require(result.exit_code == 0, f"exit code {result.exit_code}: {result.output}{result.stderr}\n$ {proposed}")
    complete = case.ranks is None and "--remove-redundancy" not in case.words
    if complete and rng.random() < 0.4:
        target = [f"--target-strategy={next(root.glob('target_strategy*'))}"] if case.target else []
        missing = [f"--allow-missing={case.new_name(tensor)}" for tensor in case.tensors]
        result = reshard("verify", out, *target, *missing)
        unclear = is_unclear(result)
        require(result.exit_code == 0 or unclear, f"structure: {result.exit_code}: {error_of(result)}")
    if case.into != "store" and rng.random() < 0.4:
        done("verify", out, "--write-manifest", root / "manifest.json")
        done("verify", out, "--manifest", root / "manifest.json")
    if isinstance(proposed, str) and rng.random() < 0.3:
        noticed(rng, case, out, words[words.index("verify") :])


def noticed(rng: Random, case: Case, out: Path, words: list[str]) -> None:
    """A flipped bit in a tensor's contents is noticed."""
    places = [
        (path, offset + place)
        for path in sorted(out.rglob("*"))
        if path.suffix in {".ckpt", ".safetensors"} and not path.is_symlink()
        for name, runs in reference.read_file(path).places.items()
        for offset, nbytes in runs
        for place in range(nbytes)
        if not any(case.new_name(tensor) == name and tensor.own for tensor in case.tensors)
    ]
    if not places:
        return
    path, place = rng.choice(places)
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    result = reshard(*words)
    shown = path.relative_to(out)
    require(
        result.exit_code in {3, 4}, f"a flipped bit at byte {place} of {shown}: exit code {result.exit_code}\n$ {words}"
    )


@pytest.mark.slow
@pytest.mark.timeout(10 * SECONDS * SHARE + 600)
def test_fuzz_differential() -> None:
    Fuzzer("differential", SHARE, 250).run(one_case)
