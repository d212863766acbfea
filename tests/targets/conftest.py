"""Fixtures of tests of targets."""

from linked_dcp import apart  # noqa: F401 -- pytest finds it here

collect_ignore = ["deepspeed_training.py"]  # it is run by a Python that has DeepSpeed
