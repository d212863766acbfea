"""How fast a whole `reshard` command is, compared with `cp -r` of the same bytes, in one run.

    python tests/bench/bench.py                      # every row, 4 GB, 9 rounds; about twenty minutes
    python tests/bench/bench.py --bytes 1GB --rounds 3 --rows rows,columns
    python tests/bench/bench.py --mindspore ms/bin/python   # also against MindSpore 2.10 in that Python
    python tests/bench/bench.py --torch torch/bin/python    # and PyTorch, with safetensors (RESHARD_TORCH_PYTHON)

How the figures are made. The data is random 16-bit numbers in the shapes of a transformer (about 340 tensors over 8
ranks; only the norms are replicas). Some virtual machines hand free memory back to the host within seconds, and
touching it again is ten times slower; so before each timed arm a process of its own allocates, touches and frees four
times the job's bytes. Arms run in random order, the first round is thrown away, and medians are reported with the
minimum and the maximum. Warm rows: source in the page cache, without fsync, against `cp -r`. Synced and cold rows: the
default, against `cp -r` followed by `sync`; one has a source of 0.55 of the machine's memory. The machine's name for
itself is printed; absolute times mean little. Linux slows writers down when more than 15 % of memory is still to be
written, as 4 GB in 24 GiB are.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from reshard.formats.dcp.names import DCP
from reshard.formats.sets.options import HuggingFaceSet

sys.path.insert(0, str(Path(__file__).parent.parent))

from checkpoints import blocks_of, places, plan_with
from measure import RESHARD, Measured, measured
from peers import PEAK, TORCH, against_peers, told, torch_table

import reshard
from reshard import Layout, Strategy
from reshard.core.model.entries import Content
from reshard.dtypes import BFLOAT16
from reshard.kits.files import by_name

HIDDEN, INNER, VOCABULARY = 2112, 5760, 24000  # multiples of 48, so that 8 and 6 ranks divide them

# On all processors: the host takes back in the meantime what the first pages freed. Not in large pages, which it takes
# back at once.
TOUCH = """
import mmap, os, sys
size, processes = int(sys.argv[1]), os.cpu_count()
for _ in range(processes):
    if os.fork() == 0:
        held = mmap.mmap(-1, size // processes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = memoryview(held)
        for start in range(0, len(view), 1 << 20):
            view[start : start + (1 << 20) : 4096] = b"x" * len(view[start : start + (1 << 20) : 4096])
        os._exit(0)
sys.exit(any(os.wait()[1] for _ in range(processes)))
"""


def shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a model of about that size in bfloat16."""
    layer = {
        "attention.wq": (HIDDEN, HIDDEN), "attention.wk": (HIDDEN, HIDDEN), "attention.wv": (HIDDEN, HIDDEN),
        "attention.wo": (HIDDEN, HIDDEN), "ffn.w1": (INNER, HIDDEN), "ffn.w3": (INNER, HIDDEN),
        "ffn.w2": (HIDDEN, INNER), "attention_norm": (HIDDEN,), "ffn_norm": (HIDDEN,),
    }  # fmt: skip
    whole = {"embedding": (VOCABULARY, HIDDEN), "head": (VOCABULARY, HIDDEN), "norm": (HIDDEN,)}
    per_layer = sum(2 * int(np.prod(shape)) for shape in layer.values())
    rest = sum(2 * int(np.prod(shape)) for shape in whole.values())
    layers = max(2, (nbytes - rest) // per_layer // 2 * 2)
    found = {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()}
    return found | whole


def over(model: dict[str, tuple[int, ...]], ranks: int, axis: int | None, *, optimizer: bool = False) -> Strategy:
    """Split every matrix along an axis (None: along none but by the optimizer)."""
    layouts = {}
    for name, shape in model.items():
        split = axis is not None and len(shape) == 2
        entries = [0 if split and dim == axis else -1 for dim in range(len(shape))]
        layouts[name] = Layout.of([ranks], entries, -1 if optimizer and len(shape) == 2 else 0)
    return Strategy.of(layouts)


def over_mesh(model: dict[str, tuple[int, ...]], fsdp: int, tp: int) -> Strategy:
    """Split every matrix over a mesh: columns of wo and w2 by tp, rows of others by tp and then by fsdp."""
    layouts = {}
    for name, shape in model.items():
        column = name.endswith(("wo", "w2"))
        layouts[name] = Layout.of([fsdp, tp], ([1, 0] if column else [(0, 1), -1]) if len(shape) == 2 else [-1])
    return Strategy.of(layouts)


def pipeline(model: dict[str, tuple[int, ...]], ranks: int) -> Strategy:
    """Two stages: the first half of the layers and the embedding, and the rest."""
    half = (len(model) - 3) // 9 // 2
    layouts = {}
    for name, shape in model.items():
        first = name == "embedding" or (name.startswith("layers.") and int(name.split(".")[1]) < half)
        entries = [0 if len(shape) == 2 and dim == 0 else -1 for dim in range(len(shape))]
        layouts[name] = {0 if first else 1: Layout.of([ranks // 2], entries)}
    return Strategy.of(layouts)


def rules(name: str) -> dict[str, object]:
    """Rules of a row: between the model and one whose matrices are fused, or transposed."""
    layer = "layers.{l}"
    qkv = [f"{layer}.attention.{one}" for one in ("wq", "wk", "wv")]
    gated = [f"{layer}.ffn.{one}" for one in ("w1", "w3")]
    others = [f"{layer}.{one}" for one in ("attention.wo", "ffn.w2", "attention_norm", "ffn_norm")]
    whole = ["embedding", "head", "norm"]
    if name == "fused":
        made: list[dict[str, object]] = [
            {"a": qkv, "b": {"interleave": "qkv", "by": "l", "groups": 16}},
            {"a": gated, "b": {"concat": "gated", "by": "l"}},
            *({"a": one, "b": {"stack": one.removeprefix(f"{layer}."), "by": "l"}} for one in others),
            *({"a": one, "b": one} for one in whole),
        ]
    elif name == "rows":
        made = [
            {"a": gated, "b": {"interleave": f"{layer}.gated"}},
            *({"a": one, "b": one} for one in (*qkv, *others, *whole)),
        ]
    else:
        matrices = [*qkv, *gated, *others[:2], *whole[:2]]
        made = [
            *({"a": one, "b": {"transpose": f"{one}.t"}} for one in matrices),
            *({"a": one, "b": one} for one in (*others[2:], "norm")),
        ]
    return {"reshard-rules": 1, "sides": ["a", "b"], "rules": made}


def write_source(root: Path, model: dict[str, tuple[int, ...]], strategy: Strategy, format: str) -> int:
    """Write rank files of random bytes; return how many bytes."""
    noise = np.random.default_rng(0).bytes(64 << 20)
    total = 0
    for rank in strategy.ranks:
        blocks = blocks_of(model, strategy, rank)
        contents = [Content(name, BFLOAT16, block.shape) for name, block in blocks.items()]
        layout = by_name(format).lay_out(contents, {"format": "ms"})
        path = root / f"rank_{rank}" / f"checkpoint_{rank}{by_name(format).EXTENSION}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(layout.size)
            for offset, literal in layout.literals:
                os.pwrite(file.fileno(), literal, offset)
            for number, (name, runs) in enumerate(places(layout).items()):
                for offset, nbytes in runs:
                    for start in range(0, nbytes, len(noise) // 2):
                        count = min(nbytes - start, len(noise) // 2)
                        shift = (number * 8191 + sum(blocks[name].start) * 127) % (
                            len(noise) // 2
                        )  # replicas are equal
                        os.pwrite(file.fileno(), noise[shift : shift + count], offset + start)
        total += layout.size
    return total


@dataclass
class Row:
    """One line of the table: a `reshard` command and what it is compared with."""

    name: str
    source: str
    target: str | None
    title: str
    most: float
    options: list[str] = field(default_factory=list)
    synced: bool = False
    cold: bool = False


_CHECKPOINT2 = ["--to", "checkpoint2"]
_DCP = ["--to", "dcp"]
_HF = ["--to", "hf", "--rules"]
_RULES = [
    ("fused", "QKV by groups, gate and up one behind the other, layers stacked", 1.1),
    ("rows", "gate and up row by row", 1.3),
    ("transposed", "every matrix transposed", 1.5),
]
ROWS = [
    Row("same", "st", "tp4", "safetensors tp8 → tp4, same axis, warm", 0.8),
    Row("columns", "st", "columns", "row → column, warm", 0.95),
    Row("six", "st", "six", "8 → 6 ranks, warm", 0.95),
    Row("optimizer", "st", "optimizer", "optimizer-sharded target, warm", 0.95),
    Row("convert", "st", None, "convert to one set, warm", 0.95, ["--to", "mindspore"]),
    Row("zarr", "st", None, "convert to a zarr store, warm", 1.5, ["--to", "zarr"]),
    Row("pipeline", "pipeline", "tp4", "pipeline 2 → 1, warm", 0.95),
    Row("ckpt", "ckpt", "tp4", ".ckpt → .ckpt, warm", 1.0),
    Row("ckpt-st", "ckpt", "tp4", ".ckpt → safetensors, warm", 1.0, ["--to", "safetensors"]),
    Row("checkpoint2", "checkpoint2", "fsdp4-tp4", "Checkpoint 2.0 fsdp8·tp2 → fsdp4·tp4, warm", 1.1, _CHECKPOINT2),
    Row("dcp-hf", "dcp", None, "DCP fsdp8 → Hugging Face set, warm", 1.1, ["--to", "hf"]),
    Row("dcp-columns", "dcp", "columns", "DCP row → column, warm", 1.1, _DCP),
    Row("hf-dcp", "hf", "st", "Hugging Face set → DCP fsdp8, warm", 1.1, _DCP),
    *(
        Row(f"rules-{name}", "hf", None, f"rules: {title}, warm", most, [*_HF, f"{{root}}/{name}.yaml"])
        for name, title, most in _RULES
    ),
    *(
        Row(f"rules-{name}-back", name, None, f"and back: {title}, warm", most, [*_HF, f"{{root}}/{name}.yaml"])
        for name, title, most in _RULES
    ),
    Row("cold", "st", "tp4", "tp8 → tp4, cold cache, synced", 1.1, cold=True, synced=True),
    Row("fsync", "st", "tp4", "tp8 → tp4, synced", 1.1, synced=True),
    Row("larger", "larger-st", "larger-tp4", "tp8 → tp4, larger than memory, synced", 0.8, synced=True),
]


def timed(command: list[str]) -> Measured:
    """Run a command as a whole process, with the operating system's own account of it."""
    took = measured(*command)
    if took.code:
        sys.exit(f"{' '.join(command)} failed:\n{(took.out + took.err)[-2000:]}")
    return took


def prepare(job: int, *, source: Path, cold: bool) -> None:
    """Make the memory of the machine ready, and the page cache cold or warm."""
    subprocess.run([sys.executable, "-c", TOUCH, str(min(4 * job, memory() * 3 // 4))], check=True)
    for path in source.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                if cold:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                else:
                    while file.read(1 << 24):
                        pass


def memory() -> int:
    """The machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def arms(row: Row, root: Path, out: Path, torch: str | None = None) -> dict[str, list[str]]:
    """The commands of a row: ours, the plain copy, and PyTorch's where a Python has it that knows the format."""
    source = root / row.source
    ours = [*RESHARD, "convert", str(source), str(out)]
    if row.source not in {"checkpoint2", "dcp", "hf", *(name for name, _, _ in _RULES)}:
        ours += ["--source-strategy", str(root / f"{row.source}.strategy.ckpt")]
    if row.target:
        ours += ["--target-strategy", str(root / f"{row.target}.strategy.ckpt")]
    ours += ["-q", *(option.format(root=root) for option in row.options), *([] if row.synced else ["--tune=fsync=no"])]
    copy = f"cp -r '{source}' '{out}'" + (" && sync" if row.synced else "")
    theirs = (
        {"torch": [torch, "-c", PEAK + TORCH[row.name], str(source), str(out)]} if torch and row.name in TORCH else {}
    )
    return {"reshard": ours, "cp": ["sh", "-c", copy], **theirs}


def measure(row: Row, root: Path, job: int, rounds: int, torch: str | None) -> dict[str, list[Measured]]:
    """Time the arms of a row in random order, round after round."""
    out = root / "out"
    commands = list(arms(row, root, out, torch).items())
    found: dict[str, list[Measured]] = {name: [] for name, _ in commands}
    for turn in range(rounds + 1):
        for name, command in random.sample(commands, len(commands)):
            shutil.rmtree(out, ignore_errors=True)
            os.sync()
            prepare(job, source=root / row.source, cold=row.cold)
            timing = timed(command)
            if turn:
                found[name].append(timing)
    shutil.rmtree(out, ignore_errors=True)
    return found


def bytes_moved(row: Row, root: Path) -> tuple[float, float]:
    """Bytes read for each byte needed, and written for each byte produced, by the kernel's count."""
    out = root / "out"
    script = "import sys; from reshard.cli.main import main\ntry: main()\nfinally: print(open('/proc/self/io').read())"
    command = arms(row, root, out)["reshard"]
    done = subprocess.run(
        [sys.executable, "-c", script, *command[len(RESHARD) :]], capture_output=True, text=True, check=True
    )
    io = dict(line.split(": ") for line in done.stdout.splitlines() if line.count(": ") == 1 and "char" in line)
    produced = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    needed = sum(path.stat().st_size for path in (root / row.source).rglob("*") if path.is_file())
    shutil.rmtree(out)
    return int(io["rchar"]) / needed, int(io["wchar"]) / produced


def spread(values: list[float]) -> str:
    """A median with the least and the most."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def tell(row: Row, found: dict[str, list[Measured]], moved: tuple[float, float]) -> dict[str, object]:
    """Print a row of the table; return it as values."""
    ours, copy = found["reshard"], found["cp"]
    ratios = [a.seconds / b.seconds for a, b in zip(ours, copy, strict=True)]
    median = statistics.median(a.seconds for a in ours) / statistics.median(b.seconds for b in copy)
    peak = max(timing.peak for timing in ours)
    print(
        f"| {row.title} | {median:.2f} × ({min(ratios):.2f}–{max(ratios):.2f}; goal {row.most}) "
        f"| {spread([t.seconds for t in ours])} s | {spread([t.seconds for t in copy])} s "
        f"| {statistics.median(t.cpu for t in ours):.2f} s | {peak / 1e6:.0f} MB | {moved[0]:.2f} | {moved[1]:.2f} |",
        flush=True,
    )
    return {
        "row": row.name, "ratio": median, "ratios": ratios, "seconds": [t.seconds for t in ours],
        "copy_seconds": [t.seconds for t in copy], "cpu": [t.cpu for t in ours], "peak": peak, "moved": moved,
        "torch": [(t.seconds, t.cpu, *told(t.out)) for t in found.get("torch", ())],
    }  # fmt: skip


def make_data(root: Path, nbytes: int, wanted: set[str], prefix: str = "") -> int:
    """Make the sources that some rows need, and all strategies; return the bytes of a source."""
    model = shapes(nbytes)
    sources = {"st": over(model, 8, 0), "ckpt": over(model, 8, 0), "pipeline": pipeline(model, 8)}
    targets = {
        "tp4": over(model, 4, 0), "columns": over(model, 8, 1), "six": over(model, 6, 0),
        "optimizer": over(model, 8, None, optimizer=True), "fsdp4-tp4": over_mesh(model, 4, 4),
    }  # fmt: skip
    for name, strategy in (sources | targets).items():
        reshard.write_strategy(strategy, root / f"{prefix}{name}.strategy.ckpt")
    made = [
        write_source(root / f"{prefix}{name}", model, strategy, "ckpt" if name == "ckpt" else "safetensors")
        for name, strategy in sources.items()
        if prefix + name in wanted
    ]
    if prefix + "checkpoint2" in wanted:
        plan = reshard.plan(
            reshard.open(root / f"{prefix}st", strategy=sources["st"]), over_mesh(model, 8, 2),
            to="checkpoint2", target_step=4,
        )  # fmt: skip
        plan.run(root / f"{prefix}checkpoint2")
        shutil.rmtree(root / f"{prefix}checkpoint2" / ".reshard")
    for name, target, files in (("dcp", sources["st"], DCP()), ("hf", None, HuggingFaceSet())):
        if prefix + name in wanted:
            plan = plan_with(reshard.open(root / f"{prefix}st", strategy=sources["st"]), target, files=files)
            plan.run(root / f"{prefix}{name}")
            shutil.rmtree(root / f"{prefix}{name}" / ".reshard")
    for name, _, _ in _RULES:
        (root / f"{name}.yaml").write_text(json.dumps(rules(name)))
        if name in wanted and not prefix:
            source = reshard.open(root / "hf").derive(reshard.Rules.of(rules(name)))
            reshard.plan(source, to="hf").run(root / name)
            shutil.rmtree(root / name / ".reshard")
    print(f"{len(model)} tensors, {made[0] / 1e9:.2f} GB over 8 ranks, bfloat16, random bytes\n")
    return made[0]


def main() -> None:
    """Make the data, run the rows, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", default="4GB", help="size of the source (default 4GB)")
    parser.add_argument("--rounds", type=int, default=9, help="counted rounds of each row (default 9)")
    parser.add_argument("--rows", help=f"only these, of {', '.join(row.name for row in ROWS)}")
    parser.add_argument("--dir", type=Path, default=Path("bench-data"), help="where the data goes; removed afterwards")
    parser.add_argument("--mindspore", help="a Python that has MindSpore 2.10, to compare with")
    parser.add_argument(
        "--torch", default=os.environ.get("RESHARD_TORCH_PYTHON"),
        help="a Python that has PyTorch and safetensors, likewise (default RESHARD_TORCH_PYTHON)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    from dask.utils import parse_bytes

    rows = [row for row in ROWS if not options.rows or row.name in options.rows.split(",")]
    compileall.compile_dir(Path(reshard.__file__).parent, quiet=1)  # as an installation is
    shutil.rmtree(options.dir, ignore_errors=True)
    options.dir.mkdir(parents=True)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} processors, {memory() / 2**30:.0f} GiB")
    print(f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}: {' '.join(sys.argv)}\n")
    try:
        wanted = {row.source for row in rows}
        wanted |= {"hf"} if wanted & {name for name, _, _ in _RULES} else set()
        job = make_data(options.dir, parse_bytes(options.bytes), wanted | {"st"})
        if "larger-st" in wanted:
            make_data(options.dir, int(0.55 * memory()), wanted, "larger-")
        print("| case | time ÷ `cp -r` | reshard | `cp -r` | CPU | peak | read ÷ needed | written ÷ produced |")
        print("|---|---|---|---|---|---|---|---|")
        figures = [
            tell(row, measure(row, options.dir, job, options.rounds, options.torch), bytes_moved(row, options.dir))
            for row in rows
        ]
        torch_table({row.name: row.title for row in rows}, figures)
        figures += against_peers(options.dir, options.mindspore)
        if options.json:
            machine = f"{os.cpu_count()} processors, {memory() / 2**30:.0f} GiB"
            about = {
                "version": reshard.__version__,
                "date": time.strftime("%Y-%m-%d"),
                "machine": machine,
                "bytes": job,
            }
            options.json.write_text(json.dumps(about | {"figures": figures}, indent=1))
    finally:
        shutil.rmtree(options.dir, ignore_errors=True)


if __name__ == "__main__":
    main()
