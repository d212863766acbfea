"""Fixtures of tests of targets."""

from linked_dcp import apart  # noqa: F401 -- pytest finds it here
