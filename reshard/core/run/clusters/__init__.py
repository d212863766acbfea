"""Clusters of dask: connect to one, check its workers, wake its scheduler; and decide where a run is executed."""
