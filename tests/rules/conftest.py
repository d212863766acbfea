"""Fixtures of the tests of adapters."""

from adapters import base, lora  # noqa: F401 -- of several test files
