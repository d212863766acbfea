"""Results as `pandas.DataFrame`, a row for each tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.errors import ReshardError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.compute.differences import CheckpointDiff
    from reshard.compute.stats import CheckpointStats


def frame(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Any:
    """Return a data frame.

    Raises:
        ReshardError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError:
        raise ReshardError(
            "to_dataframe needs the library pandas", code="library-missing", hint="pip install pandas"
        ) from None
    return pd.DataFrame.from_records([*rows], columns=[*columns])


def attributes_frame(columns: Sequence[str], records: Iterable[object]) -> Any:
    """Return a data frame of attributes of records."""
    return frame(columns, ([getattr(record, column) for column in columns] for record in records))


def stats_frame(stats: CheckpointStats) -> Any:
    """Return the statistics of each tensor; see `CheckpointStats.to_dataframe`."""
    columns = ("name", "dtype", "shape", "size", "min", "max", "mean", "std", "norm", "zeros", "nans", "infs")
    result = attributes_frame(columns, stats.tensors.values())
    result.insert(3, "kind", [stats.kinds[name] for name in stats.tensors])
    return result


def diff_frame(diff: CheckpointDiff) -> Any:
    """Return the differences of each tensor; see `CheckpointDiff.to_dataframe`."""
    columns = (
        "name", "dtypes", "shape", "size", "differing", "not_finite", "max_abs", "mean_abs", "relative", "cosine",
        "first",
    )  # fmt: skip
    result = attributes_frame(columns, diff.tensors.values())
    result["within"] = [diff.accepts(each) for each in diff.tensors.values()]
    return result
