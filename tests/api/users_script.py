"""A user's script, which type checkers read and `test_typing` runs: all of the public surface."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import reshard

if TYPE_CHECKING:
    from dask.array import Array


def show(progress: reshard.Progress) -> None:
    """Print how far a run is."""
    print(progress.written, progress.total)


def main(source_dir: Path, strategy: Path, target_strategy: str, out: Path) -> None:
    """Do everything once."""
    source: reshard.Checkpoint = reshard.open(source_dir, strategy=strategy, layout={}, contents="blocks")
    name = next(iter(source))
    array: Array = source[name]
    shape: tuple[int, ...] = source.tensors[name].spec.shape
    print(array, shape, source.nbytes, source.ranks, source.format, source.unreadable, source.warnings, source.groups())
    selection = reshard.Selection(include=["*"], exclude=(), cast={"float32": "bfloat16"}, name_map={}, drop=["*"])
    plan: reshard.Plan = reshard.plan(source, target_strategy, to="safetensors", memory="1GB", selection=selection)
    stats = plan.stats.peak_memory
    block: Array = plan.rank(0)[next(iter(plan.rank(0)))]
    report: reshard.Report = plan.run(out / "ranks", threads=1, progress=show, overwrite=True)
    computed: reshard.Report = plan.graph(out / "computed").compute()
    print(stats, block, report.files, computed.bytes_written)
    whole = reshard.plan(source, to="hf", max_shard_size="4GB", include="*", weights_only=True)
    whole.run(out / "hf", client="synchronous")
    print(reshard.convert(out / "hf", out / "one.safetensors", cast={"float32": "float16"}).files)
    result: reshard.Verification = reshard.verify(out / "hf", memory="1GB", independent=True)
    if not result:
        print(result.differences)
    source.to_zarr(out / "model.zarr", chunk_size="1MB")
    warnings.simplefilter("error", reshard.ReshardWarning)
    with reshard.open(out / "hf", storage_options=None) as opened:
        print(opened.hist(name, bins=8).counts, opened.stats()[name].quartiles, opened.to_dataframe())
    try:
        opened["*"]
    except reshard.UsageError as missing:
        print(missing.hint)
    try:
        reshard.open(out / "nothing")
    except reshard.SourceError as error:
        print(error.code, error.hint)
    except (reshard.StrategyError, reshard.UsageError, reshard.BudgetError, reshard.TargetError):
        raise
    plan.save(out / "plan.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
