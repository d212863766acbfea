"""The words of dask for schedulers, and the forms of addresses."""

from __future__ import annotations

import re

THREADS = ("threads", "threading")
SYNCHRONOUS = ("sync", "synchronous", "single-threaded")
PROCESSES = ("processes", "multiprocessing")
CURRENT = ("distributed", "dask.distributed")
LOCAL = re.compile(r"local(:[1-9][0-9]{0,3})?")
_ADDRESS = re.compile(r"[a-z]+://\S+|[^\s/]+:[0-9]+")


def is_word(text: str) -> bool:
    """Return whether a text names a scheduler or a cluster without an address.

    >>> [is_word(text) for text in ("threads", "local:4", "Sync", "local:0", "tcp://10.0.0.1:8786")]
    [True, True, True, False, False]
    """
    return text.lower() in {*THREADS, *SYNCHRONOUS, *PROCESSES, *CURRENT} or bool(LOCAL.fullmatch(text))


def is_address(text: str) -> bool:
    """Return whether a text has the form of an address.

    >>> [is_address(text) for text in ("tcp://10.0.0.1:8786", "node1:8786", "dask.json")]
    [True, True, False]
    """
    return bool(_ADDRESS.fullmatch(text)) and not text.startswith("local:")
