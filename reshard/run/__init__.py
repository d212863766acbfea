"""Doing what a plan says: the dask graph, its tasks, what is noted of them, and how a run resumes."""
