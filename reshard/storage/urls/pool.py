"""The buffers of requests: one pool for the process, within the memory that a run may take.

Buffers are reused, because touching new memory is slower than copying. Each thread that reads, and each file that is
sent, may always have one buffer, so that none waits for another; more are taken only while the pool has some.
"""

from __future__ import annotations

import mmap
from collections import deque
from contextlib import suppress
from typing import NamedTuple

SLAB_BYTES = 8 << 20
"""The size of a buffer, in bytes: of one request that reads, or of one part that is sent."""

POOL_BYTES = 64 << 20
"""The memory of the buffers that are shared by all threads, by default."""


class Slab(NamedTuple):
    """A buffer of the pool: its memory, and whether it counts among the shared ones."""

    view: memoryview
    is_shared: bool


class Pool:
    """The buffers of this process."""

    def __init__(self) -> None:
        self._free: deque[memoryview] = deque()
        self._most = 0
        self._tokens: deque[None] = deque()  # one for each shared buffer that is not in use
        self.limit(POOL_BYTES)

    def limit(self, nbytes: int) -> None:
        """Set the memory of shared buffers, while none is in use."""
        most = nbytes // SLAB_BYTES
        if most != self._most:
            self._most = most
            self._tokens = deque([None] * most)
            self._free.clear()

    def take(self, *, own: bool) -> Slab | None:
        """Return a shared buffer if there is one; else one beyond them if `own`, or None."""
        is_shared = True
        try:
            self._tokens.pop()
        except IndexError:
            if not own:
                return None
            is_shared = False
        with suppress(IndexError):
            return Slab(self._free.pop(), is_shared)
        return Slab(memoryview(mmap.mmap(-1, SLAB_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)), is_shared)

    def give(self, slab: Slab) -> None:
        """Return a buffer; it is kept for the next use."""
        self._free.append(slab.view)
        self.forget(slab)

    def forget(self, slab: Slab) -> None:
        """Return a buffer that may still be in use: another one takes its place."""
        if slab.is_shared and len(self._tokens) < self._most:
            self._tokens.append(None)


pool = Pool()
