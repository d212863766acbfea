"""How fast reshard is at an object store, compared with scripts that do the same by obstore alone, in one run.

    python tests/bench/objects.py                                # 2 GB, 5 rounds, no latency; about ten minutes
    python tests/bench/objects.py --latency 20ms --rate 100e6    # of each request, and bytes a second of a connection
    python tests/bench/objects.py --only download,copies --runs 3 --size 1e9

The store is the server of `--server` (a directory of Go source, built here; it needs `go`), which serves a directory in
memory. It has the same two processors as its clients, so the processor time of a client counts. The scripts are in
`objects_peer.py`. Arms alternate, each in a process of its own, and the first round is thrown away. Some virtual
machines hand free memory back to the host, so before each arm a process touches as much as the arm will need (see
`bench.py`). Medians are reported. Results of the two arms are compared once, and so is the predicted peak memory (of
`--dry-run --json`) with the measured one, also with `--memory 100MB`.

The source is 8 ranks of safetensors files: bfloat16 matrices cut along their rows, and float32 norms that every rank
has. `copies` is the case in which the server copies parts of files by itself; only blocks of at least 5 MiB can be
copied, as they are with the default `--hidden`.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import TOUCH, memory, over, spread
from checkpoints import blocks_of, places
from measure import RESHARD, Measured, measured

import reshard
from reshard.core.model.entries import Content
from reshard.dtypes import BFLOAT16, BY_NAME
from reshard.kits.files import by_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.strategy.strategy import Strategy

ROOT = Path(__file__).resolve().parent.parent.parent
PEER = [sys.executable, str(Path(__file__).with_name("objects_peer.py"))]
BUCKET = "bench"
NO_COPY = "--tune=server-copy=no"
SMALL_MEMORY = "100MB"
VOCABULARY = 32000


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        job: what the peer does; empty if obstore cannot do it.
        source, target: where the two are, `local` or `s3`.
        strategy: of the target.
        goals: most times the peer's time: without latency, and with; None if there is no goal.
    """

    name: str
    title: str
    job: str
    source: str
    target: str
    strategy: str = "rows"
    goals: tuple[float, float] | None = (1.3, 1.2)


CASES = [
    Case("download", "s3 → local, 8 → 4 rows", "rows", "s3", "local"),
    Case("upload", "local → s3, 8 → 4 rows", "rows", "local", "s3"),
    Case("across", "s3 → s3, 8 → 4 rows", "rows", "s3", "s3"),
    Case("columns", "s3 → s3, rows → columns", "columns", "s3", "s3", "columns", (1.5, 1.5)),
    Case("verify", "verify s3 against s3, 4 and 8 rows", "compare", "s3", "s3", goals=None),
    Case("copies", "s3 → s3, 8 → 4 rows, server-side copies", "", "s3", "s3"),
]


class CommandError(Exception):
    """A command failed, or its result is wrong."""


class Server:
    """The server of a directory, and what it counted."""

    def __init__(self, binary: Path, directory: Path, options: list[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self.url = f"http://{address}"
        self.process = subprocess.Popen([str(binary), "-dir", str(directory), "-addr", address, *options])
        for _ in range(100):
            try:
                self.counts()
            except OSError:
                time.sleep(0.05)
            else:
                return
        self.stop()
        sys.exit("the server does not answer")

    def counts(self) -> dict[str, float]:
        """Return the counts since the last call."""
        with urllib.request.urlopen(f"{self.url}/_stats?reset=1", timeout=5) as reply:  # noqa: S310 -- ours
            return json.load(reply)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


@contextmanager
def serving(sources: Path, directory: Path, options: list[str]) -> Iterator[Server]:
    """Build the server and run it; children of this process find it in their environment."""
    if shutil.which("go") is None:
        sys.exit("go is not installed, and the server of this benchmark is built with it")
    if not (sources / "go.mod").exists():
        sys.exit(f"{sources} has no Go source of the server; pass --server")
    with tempfile.TemporaryDirectory() as built:
        binary = Path(built) / "s3server"
        subprocess.run(["go", "build", "-o", str(binary), "."], cwd=sources, check=True)
        server = Server(binary, directory, options)
        keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "NO_PROXY": "127.0.0.1"}
        region = {"AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1"}
        os.environ.update({"AWS_ENDPOINT_URL": server.url, **keys, **region})
        try:
            yield server
        finally:
            server.stop()


def shapes(nbytes: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a model, as many as it takes; norms, which are float32, come first in a file."""
    inner = hidden * 27 // 10 // 64 * 64
    layer = {
        "attention.wq": (hidden, hidden), "attention.wk": (hidden, hidden), "attention.wv": (hidden, hidden),
        "attention.wo": (hidden, hidden), "ffn.w1": (inner, hidden), "ffn.w2": (hidden, inner),
        "ffn.w3": (inner, hidden),
    }  # fmt: skip
    matrices: dict[str, tuple[int, ...]] = {"embedding": (VOCABULARY, hidden)}
    total, count = 2 * VOCABULARY * hidden, 0
    while total < nbytes:
        name, shape = list(layer.items())[count % len(layer)]
        matrices[f"layers.{count // len(layer)}.{name}"] = shape
        total += 2 * int(np.prod(shape))
        count += 1
    norms = {f"layers.{i}.{name}": (hidden,) for i in range(-(-count // 7)) for name in ("attention_norm", "ffn_norm")}
    return {**norms, "norm": (hidden,), **matrices}


def write_source(root: Path, model: dict[str, tuple[int, ...]], strategy: Strategy) -> None:
    """Write rank files of random bytes; vectors are equal on all ranks."""
    noise = np.random.default_rng(0).bytes(64 << 20)
    for rank in strategy.ranks:
        blocks = blocks_of(model, strategy, rank)
        contents = [
            Content(name, BFLOAT16 if len(block.shape) > 1 else BY_NAME["float32"], block.shape)
            for name, block in blocks.items()
        ]
        layout = by_name("safetensors").lay_out(contents, {"format": "pt"})
        path = root / f"rank_{rank}" / f"checkpoint_{rank}.safetensors"
        path.parent.mkdir(parents=True)
        with path.open("wb") as file:
            for offset, literal in layout.literals:
                os.pwrite(file.fileno(), literal, offset)
            for number, (name, runs) in enumerate(places(layout).items()):
                shift = number * 8191 + sum(blocks[name].start) * 127
                for offset, nbytes in runs:
                    for start in range(0, nbytes, len(noise) // 2):
                        first = (shift + start) % (len(noise) // 2)
                        piece = noise[first : first + min(nbytes - start, len(noise) // 2)]
                        os.pwrite(file.fileno(), piece, offset + start)


class Bench:
    """The data and the server, and what runs on them."""

    def __init__(self, options: argparse.Namespace, root: Path, server: Server) -> None:
        self.options, self.root, self.server = options, root, server
        self.extra = options.convert.split()
        shown = measured(*RESHARD, "convert", "--help-all").out
        self.copies = NO_COPY in shown

    def place(self, where: str, name: str) -> str:
        """Return the place of a checkpoint, as a command takes it."""
        return f"s3://{BUCKET}/{name}" if where == "s3" else str(self.root / "local" / name)

    def directory(self, where: str, name: str) -> Path:
        """Return the directory that has a checkpoint's files."""
        return self.root / ("served" if where == "s3" else "local") / (BUCKET if where == "s3" else "") / name

    def commands(self, case: Case) -> dict[str, list[str]]:
        """Return the commands of a case: ours, and obstore's if there is one."""
        source = self.place(case.source, "source")
        target = self.place(case.target, "copy" if case.name == "verify" else "out")
        strategies = ["--source-strategy", str(self.root / "source.ckpt")]
        strategies += ["--target-strategy", str(self.root / f"{case.strategy}.ckpt")]
        if case.name == "verify":
            ours = [*RESHARD, "verify", target, "--against", source, *strategies, "-q"]
        else:
            ours = [*RESHARD, "convert", source, target, *strategies, "-q", *self.extra]
            if self.copies and case.name != "copies":
                ours.append(NO_COPY)
        return {"reshard": ours, **({"obstore": [*PEER, case.job, source, target]} if case.job else {})}

    def run(self, case: Case, command: list[str]) -> tuple[Measured, dict[str, float]]:
        """Run a command on a clean target; return what it took, and what the server counted."""
        shutil.rmtree(self.directory(case.target, "out"), ignore_errors=True)
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")  # others may work on this machine
        touched = min(int(0.5e9 + (0 if case.name == "verify" else 1.5 * self.options.size)), free // 2)
        subprocess.run([sys.executable, "-c", TOUCH, str(touched)], check=True)
        self.server.counts()
        took = measured(*command)
        if took.code:
            raise CommandError(f"{' '.join(command)} failed with {took.code}:\n{(took.out + took.err)[-3000:]}")
        return took, self.server.counts()

    def predicted(self, command: list[str], *more: str) -> int | str:
        """Return the peak memory that a dry run predicts, or why it is refused."""
        dry = measured(*(word for word in command if word != "-q"), *more, "--dry-run", "--json")
        told = json.loads(dry.out)
        return f"refused, {told['error']['hint']}" if dry.code else told["peak_memory"]

    def measure(self, case: Case) -> dict[str, Any]:
        """Run the arms of a case alternately; return all figures."""
        commands = self.commands(case)
        if case.name == "verify":
            copy = self.directory("s3", "copy")
            made = measured(*PEER, "rows", self.place("s3", "source"), self.place("s3", "copy"))
            if made.code:
                raise CommandError(made.err)
        runs: dict[str, list[Measured]] = {arm: [] for arm in commands}
        counts: dict[str, dict[str, float]] = {}
        results: dict[str, str] = {}
        for turn in range(self.options.runs + 1):
            for arm in sorted(commands, reverse=turn % 2 == 0):
                took, counts[arm] = self.run(case, commands[arm])
                if turn:
                    runs[arm].append(took)
                elif case.name != "verify":
                    results[arm] = digest(self.directory(case.target, "out"))
        if len(set(results.values())) > 1:
            raise CommandError(f"{case.name}: the two results differ")
        row: dict[str, Any] = {"case": case.name, "counts": counts}
        for arm, several in runs.items():
            row[arm] = {"seconds": [t.seconds for t in several], "cpu": [t.cpu for t in several],
                        "peak": max(t.peak for t in several)}  # fmt: skip
        if case.name != "verify":
            shutil.rmtree(self.directory(case.target, "out"))
            row["predicted"] = self.predicted(commands["reshard"])
            row["small"] = self.predicted(commands["reshard"], "--memory", SMALL_MEMORY)
            if not isinstance(row["small"], str):
                small, _ = self.run(case, [*commands["reshard"], "--memory", SMALL_MEMORY])
                row["small_peak"], row["small_seconds"] = small.peak, small.seconds
        for directory in (self.directory(case.target, "out"), *([copy] if case.name == "verify" else [])):
            shutil.rmtree(directory, ignore_errors=True)
        return row

    def tell(self, case: Case, row: dict[str, Any]) -> None:
        """Print a row of the table."""
        ours, theirs = row["reshard"], row.get("obstore")
        median = statistics.median
        seconds = median(ours["seconds"])
        if theirs:
            ratio = row["ratio"] = seconds / median(theirs["seconds"])
            goal = case.goals and case.goals[bool(self.options.latency or self.options.rate)]
            told = f" (goal {goal}{'' if ratio <= goal else ', missed'})" if goal else ""
            shown = f"{ratio:.2f} ×{told}"
            peer = f"{spread(theirs['seconds'])} s | {median(theirs['cpu']):.2f} s | {theirs['peak'] / 1e6:.0f} MB"
        else:
            counts = row["counts"]["reshard"]
            row["share"] = (counts.get("in", 0) + counts.get("out", 0)) / row["nbytes"]
            met = seconds < 2 and row["share"] < 0.05
            shown = f"{row['share']:.1%} through the client (goal 2 s, 5 %{'' if met else ', missed'})"
            peer = "– | – | –"
        peak = beside(ours["peak"], row.get("predicted"))
        small = beside(row.get("small_peak"), row.get("small"))
        print(
            f"| {case.title} | {shown} | {spread(ours['seconds'])} s | {median(ours['cpu']):.2f} s | {peak} | {small} "
            f"| {peer} |",
            flush=True,
        )


def beside(peak: int | None, predicted: int | str | None) -> str:
    """Write a measured peak beside the predicted one."""
    if isinstance(predicted, str) or peak is None:
        return str(predicted or "–")
    if predicted is None:
        return f"{peak / 1e6:.0f} MB"
    return f"{peak / 1e6:.0f} of {predicted / 1e6:.0f} MB{', over' if peak > predicted else ''}"


def digest(root: Path) -> str:
    """Return a digest of the tensors of all rank files, whatever their headers' order and spaces."""
    total = hashlib.sha256()
    for path in sorted(root.rglob("*.safetensors")):
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(start - 8))
            for name, tensor in sorted(header.items()):
                if name != "__metadata__":
                    begin, end = tensor["data_offsets"]
                    total.update(f"{path.parent.name} {name} {tensor['dtype']} {tensor['shape']}".encode())
                    for at in range(begin, end, 1 << 24):
                        total.update(os.pread(file.fileno(), min(1 << 24, end - at), start + at))
    return total.hexdigest()


def make_data(root: Path, nbytes: int, hidden: int) -> int:
    """Write the strategies and the source, local and served, which are the same files; return the bytes."""
    model = shapes(nbytes, hidden)
    strategies = {"source": over(model, 8, 0), "rows": over(model, 4, 0), "columns": over(model, 8, 1)}
    for name, strategy in strategies.items():
        reshard.write_strategy(strategy, root / f"{name}.ckpt")
    local, served = root / "local" / "source", root / "served" / BUCKET / "source"
    write_source(local, model, strategies["source"])
    shutil.copytree(local, served, copy_function=os.link)
    total = sum(path.stat().st_size for path in local.rglob("*.safetensors"))
    print(f"{len(model)} tensors, {total / 1e9:.2f} GB over 8 ranks, bfloat16 and float32, random bytes\n", flush=True)
    return total


def counts_table(rows: list[dict[str, Any]]) -> None:
    """Print what the server counted in the last run of each arm."""
    print("\n| requests of one run | by operation | bytes to the server | from it | most in flight | connections |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        for arm, counts in row["counts"].items():
            operations = {name: int(count) for name, count in sorted(counts.items()) if name[:1].isupper()}
            shown = ", ".join(f"{count} {name}" for name, count in operations.items())
            failed = sum(int(count) for name, count in counts.items() if name.isdigit() and int(name) >= 500)
            print(f"| {row['case']}, {arm} | {shown}{f'; {failed} failed' if failed else ''} "
                  f"| {counts.get('in', 0) / 1e6:.0f} MB | {counts.get('out', 0) / 1e6:.0f} MB "
                  f"| {counts.get('most_in_flight', 0):.0f} | {counts.get('connections', 0):.0f} |")  # fmt: skip


def main() -> None:
    """Make the data, start the server, run the cases, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=lambda text: int(float(text)), default=int(2e9), help="bytes (default 2e9)")
    parser.add_argument("--hidden", type=int, default=5120, help="width of the model, a multiple of 64 (default 5120)")
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each arm (default 5)")
    parser.add_argument("--latency", help="of each request, such as 20ms (default none)")
    parser.add_argument("--rate", type=float, default=0, help="bytes a second of a connection (default: no limit)")
    parser.add_argument("--only", help=f"only these, of {', '.join(case.name for case in CASES)}")
    parser.add_argument("--convert", default="", help="more options of `reshard convert`, such as '--threads 2'")
    parser.add_argument("--server", type=Path, default=ROOT.parent / "shared" / "tools" / "s3server", help="its source")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="where a directory for the data is made")  # noqa: S108
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    cases = [case for case in CASES if not options.only or case.name in options.only.split(",")]
    compileall.compile_dir(Path(reshard.__file__).parent, quiet=1)  # as an installation is
    with tempfile.TemporaryDirectory(prefix="reshard-objects-", dir=options.dir) as name:
        root = Path(name)
        rates = ["-latency", options.latency or "0s", "-rate", str(options.rate)]
        print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} processors, {memory() / 2**30:.0f} GiB")
        print(f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}: {' '.join(sys.argv)}")
        with serving(options.server, root / "served", rates) as server:
            nbytes = make_data(root, options.size, options.hidden)
            bench = Bench(options, root, server)
            if not bench.copies:
                print(f"this reshard has no {NO_COPY}: `copies` is left out\n")
                cases = [case for case in cases if case.name != "copies"]
            print("| case | time ÷ obstore's | reshard | CPU | peak, predicted | the same in 100 MB "
                  "| obstore | CPU | peak |\n|---|---|---|---|---|---|---|---|---|")  # fmt: skip
            about = {"version": reshard.__version__, "date": time.strftime("%Y-%m-%d"), "arguments": sys.argv[1:]}
            rows: list[dict[str, Any]] = []
            for case in cases:
                try:
                    row = bench.measure(case) | {"nbytes": nbytes}
                except CommandError as error:
                    print(f"| {case.title} | {error} |", flush=True)
                else:
                    bench.tell(case, row)
                    rows.append(row)
                if options.json:
                    options.json.write_text(json.dumps({**about, "bytes": nbytes, "figures": rows}, indent=1))
            counts_table(rows)


if __name__ == "__main__":
    main()
