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

MOST_SHARED_BYTES = 128 << 20
"""The most memory of the buffers that all threads share."""

_LEAST_SHARED_BYTES = 32 << 20  # the same, if no limit is given

DEFAULT_BYTES = 256_000_000
"""The memory of a run that the shared buffers may fill up, if no limit is given."""


def shared_bytes(needed: int, limit: int | None) -> int:
    """Return the memory of the shared buffers of a run.

    Args:
        needed: the other memory of the run.
        limit: the most memory of the run; None if it is not given.

    >>> shared_bytes(200_000_000, None), shared_bytes(300_000_000, None) >> 20, shared_bytes(90, 100)
    (56000000, 32, 10)
    """
    least, most = (_LEAST_SHARED_BYTES, DEFAULT_BYTES) if limit is None else (0, limit)
    return min(MOST_SHARED_BYTES, max(most - needed, least))


LEAST_REQUEST_BYTES = 2 << 20
"""The smallest request into which a long range is split."""

_NEAR_SECONDS = 0.005  # a store that answers sooner is on this machine or next to it: long requests cost the least


class Speed:
    """The latency and the rate of connections, as measured; they tell how long requests should be.

    With a certain memory in flight, short requests are faster, until they take about twice their latency. The estimate
    is that of this process; it follows slowly, since single requests differ much.
    """

    def __init__(self) -> None:
        self._latency = 0.0
        self._rate = float("inf")

    def add(self, waited: float, nbytes: int, took: float) -> None:
        """Add a request: seconds till its first byte, and bytes and seconds of its body."""
        if nbytes < LEAST_REQUEST_BYTES:
            return
        rate = nbytes / max(took, 1e-6)
        is_first = self._rate == float("inf")
        weight = 1.0 if is_first else 0.1
        self._latency += weight * (waited - self._latency)
        self._rate = rate if is_first else self._rate + weight * (rate - self._rate)

    def request_bytes(self) -> int:
        """Return the length into which long ranges are split."""
        if self._latency < _NEAR_SECONDS:
            return SLAB_BYTES
        return min(SLAB_BYTES, max(LEAST_REQUEST_BYTES, int(self._latency * self._rate)))


speed = Speed()


class Slab(NamedTuple):
    """A buffer of the pool: its memory, and the tokens of the shared buffers that it counts among, if any."""

    view: memoryview
    tokens: deque[None] | None


class Pool:
    """The shared buffers of this process.

    Buffers for reading and for sending are counted separately, so that reading ahead never takes all of them.
    """

    def __init__(self) -> None:
        self._free: deque[memoryview] = deque()
        self._limits = (-1, -1)
        self._tokens: tuple[deque[None], deque[None]] = deque(), deque()  # one for each buffer that is not in use
        self.reset()

    def reset(self) -> None:
        """Return to the limits of a process without a run; give the memory of unused buffers back to the system."""
        self.limit(_LEAST_SHARED_BYTES, reads=True, sends=True)
        self._free.clear()

    def limit(self, nbytes: int, *, reads: bool, sends: bool) -> None:
        """Set the memory of shared buffers, while none is in use; it is shared out to reading and sending."""
        most = nbytes // SLAB_BYTES
        sent = (most // 2 if reads else most) if sends else 0
        limits = (most - sent, sent)
        if limits != self._limits:
            self._limits = limits
            self._tokens = deque([None] * limits[0]), deque([None] * limits[1])
            self._free.clear()

    def take(self, *, own: bool, sends: bool) -> Slab | None:
        """Return a shared buffer if there is one; else one beyond them if `own`, or None."""
        shared = self._tokens[sends]
        tokens: deque[None] | None = shared
        try:
            shared.pop()
        except IndexError:
            if not own:
                return None
            tokens = None
        with suppress(IndexError):
            return Slab(self._free.pop(), tokens)
        return Slab(memoryview(mmap.mmap(-1, SLAB_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)), tokens)

    def give(self, slab: Slab) -> None:
        """Return a buffer; it is kept for the next use."""
        self._free.append(slab.view)
        self.forget(slab)

    def forget(self, slab: Slab) -> None:
        """Return a buffer that may still be in use: another one takes its place."""
        if slab.tokens is not None:
            slab.tokens.append(None)


pool = Pool()
