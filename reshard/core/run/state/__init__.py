"""The state of a run: what to do with each file of the target, the log, and locks."""
