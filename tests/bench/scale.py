"""How the cost of planning, looking and converting grows with tensors, ranks and bytes.

    python tests/bench/scale.py                     # all; some minutes, 5 GB of disk
    python tests/bench/scale.py --only planning     # or inspect, bytes, cluster

Planning and `inspect` work on sparse files with real headers (`tests/hollow.py`): transformers with their two Adam
moments, weights cut by tensor parallelism, moments also by the optimizer. Planning is told in processor seconds:
opening (all headers and both strategies), plan and graph; memory is the peak of the whole process. `inspect` and the
commands on real bytes are told in seconds by the clock, the whole command, medians of some rounds; memory is that of
the command alone. 10,000 tasks of few bytes on two workers are promised in 40 s; seconds of the run alone, without the
start of the workers.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import hollow
from bench import memory, over, prepare, write_source
from measure import RESHARD, Measured, measured, planning

import reshard


def planning_table(root: Path) -> None:
    """Print what planning costs: the two promises, then both curves."""
    rows = {
        "promised: 2 s, 200 MB": [(10_000, (8, 8, 1), (6, 8, 1))],
        "promised: 30 s, 1 GB, 20,000 nodes": [(1_000, (64, 8, 8), (64, 8, 6))],
        "by target files": [(1_000, (data, 8, 8), (data, 8, 6)) for data in (8, 16, 32, 64)],
        "by tensors": [(tensors, (8, 8, 1), (6, 8, 1)) for tensors in (2_500, 5_000, 10_000, 20_000)],
    }
    print("\n| planning | tensors | ranks | opening | plan | graph | in all | a tensor and rank | peak | graph nodes |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for title, cases in rows.items():
        for tensors, before, after in cases:
            took = planning(*hollow.prepare(root / "hollow", tensors, before, after))
            ranks = [data * tensor * stages for data, tensor, stages in (before, after)]
            share = took.cpu / tensors / sum(ranks)
            print(
                f"| {title} | {tensors:,} | {ranks[0]:,} → {ranks[1]:,} | {took.opening:.2f} s | {took.planning:.2f} s "
                f"| {took.graphing:.2f} s | {took.cpu:.2f} s | {share * 1e6:.2f} µs | {took.peak / 1e6:.0f} MB "
                f"| {took.nodes:,} |",
                flush=True,
            )
            shutil.rmtree(root / "hollow")


def inspect_table(root: Path, rounds: int) -> None:
    """Print how long it takes to look: 64 ranks of 10,000 tensors, promised in 3 s."""
    print("\n| command, 64 ranks × 10,000 tensors | seconds | processor | peak |")
    print("|---|---|---|---|")
    _tell("`python -c 'import reshard'`", [measured(sys.executable, "-c", "import reshard") for _ in range(rounds)])
    _tell("`reshard --help`", [measured(*RESHARD, "--help") for _ in range(rounds)])
    for format in ("safetensors", "ckpt"):
        source, before, _ = map(str, hollow.prepare(root / "hollow", 10_000, (8, 8, 1), (6, 8, 1), format))
        strategy = ["--source-strategy", before]
        for options in ([], strategy, [*strategy, "--json"]):
            command = [*RESHARD, "inspect", source, *options]
            measured(*command)
            shown = " ".join(["reshard inspect", *(option for option in options if option != before)])
            _tell(f"`{shown}`, {format}", [measured(*command) for _ in range(rounds)])
        shutil.rmtree(root / "hollow")


def bytes_table(root: Path, rounds: int) -> None:
    """Print how long whole commands take on real bytes: 8 ranks to 4 by rows, and rows to columns; no fsync, warm."""
    print("\n| bytes | target | seconds | seconds a GB | processor | peak |")
    print("|---|---|---|---|---|---|")
    for tensors in (5, 10, 20, 40, 80):  # of 50 MB
        model = {f"layers.{i}.w": (12288, 2048) for i in range(tensors)}
        for name, (ranks, axis) in {"source": (8, 0), "rows": (4, 0), "columns": (8, 1)}.items():
            reshard.write_strategy(over(model, ranks, axis), root / f"{name}.ckpt")
        nbytes = write_source(root / "source", model, over(model, 8, 0), "safetensors")
        for target in ("rows", "columns"):
            command = [*RESHARD, "convert", str(root / "source"), str(root / "out"), "--tune=fsync=no", "-q"]
            command += [
                "--source-strategy",
                str(root / "source.ckpt"),
                "--target-strategy",
                str(root / f"{target}.ckpt"),
            ]
            runs = []
            for _ in range(rounds + 1):
                prepare(nbytes, source=root / "source", cold=False)
                runs.append(measured(*command))
                shutil.rmtree(root / "out")
            seconds = statistics.median(run.seconds for run in runs[1:])
            _tell(f"{nbytes / 1e9:.2f} GB | {target}", runs[1:], f"{seconds / nbytes * 1e9:.3f} s | ")
        shutil.rmtree(root / "source")


_TASKS = """
import sys, time
import reshard
from reshard.core.plan import budget
from reshard.core.run.clusters.connect import connected
source, before, after, out, cluster = sys.argv[1:]
if __name__ == "__main__":  # workers import this
    budget.TASK_BYTES, budget.MOST_TASKS = 1, 10_000
    plan = reshard.plan(reshard.open(source, strategy=before), reshard.read_strategy(after))
    def run(**scheduler):
        began = time.perf_counter()
        report = plan.run(out, restart=True, **scheduler)
        print(time.perf_counter() - began, plan.stats.tasks, len(report.receipts))
    if cluster == "threads":
        run(threads=2)
    else:
        with connected(cluster) as client:
            run(client=client)
"""


def cluster_table(root: Path, rounds: int) -> None:
    """Print how long 10,000 tasks of few bytes take on threads and on a cluster, from 64 ranks to 48."""
    model = {f"layers.{i}.w": (64, 48) for i in range(10_000)}
    strategies = {"before": over(model, 64, 0), "after": over(model, 48, 1)}
    for name, strategy in strategies.items():
        reshard.write_strategy(strategy, root / f"{name}.ckpt")
    write_source(root / "source", model, strategies["before"], "safetensors")
    (root / "tasks.py").write_text(_TASKS)
    print("\n| where | tasks | receipts | seconds | command | processor | peak |")
    print("|---|---|---|---|---|---|---|")
    for where in ("threads", "local:2"):
        paths = [root / name for name in ("tasks.py", "source", "before.ckpt", "after.ckpt", "out")]
        runs = [measured(sys.executable, *map(str, paths), where) for _ in range(rounds)]
        seconds, tasks, receipts = zip(*(run.out.split() or ("nan", "", "") for run in runs), strict=True)
        more = f"{tasks[0]} | {receipts[0]} | {statistics.median(map(float, seconds)):.1f} s"
        _tell(f"{where} | {more}", runs)
        shutil.rmtree(root / "out")
    shutil.rmtree(root / "source")


def _tell(title: str, runs: list[Measured], more: str = "") -> None:
    failed = next((run for run in runs if run.code), None)
    if failed:
        sys.exit(f"{title} failed:\n{failed.err}")
    seconds = [run.seconds for run in runs]
    cpu = statistics.median(run.cpu for run in runs)
    print(
        f"| {title} | {statistics.median(seconds):.2f} ({min(seconds):.2f}–{max(seconds):.2f}) s | {more}{cpu:.2f} s "
        f"| {max(run.peak for run in runs) / 1e6:.0f} MB |",
        flush=True,
    )


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["planning", "inspect", "bytes", "cluster"])
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of each command (default 5)")
    parser.add_argument("--dir", type=Path, default=Path("scale-data"), help="where the data goes; removed afterwards")
    options = parser.parse_args()
    shutil.rmtree(options.dir, ignore_errors=True)
    options.dir.mkdir(parents=True)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} processors, {memory() / 2**30:.0f} GiB")
    print(f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}: {' '.join(sys.argv)}")
    try:
        if options.only in {None, "planning"}:
            planning_table(options.dir)
        if options.only in {None, "inspect"}:
            inspect_table(options.dir, options.rounds)
        if options.only in {None, "bytes"}:
            bytes_table(options.dir, options.rounds)
        if options.only in {None, "cluster"}:
            cluster_table(options.dir, options.rounds)
    finally:
        shutil.rmtree(options.dir, ignore_errors=True)


if __name__ == "__main__":
    main()
