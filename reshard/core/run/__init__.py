"""Run a plan: the dask graph, its tasks, their records, and resuming."""
