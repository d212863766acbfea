"""Real dask clusters for tests: a scheduler and workers as processes of their own, and what goes over their wires."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_START_SECONDS = 30


class Cluster:
    """A scheduler and its workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "scheduler.json").unlink(missing_ok=True)
        self.scheduler = self._start(
            "scheduler", "scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--no-jupyter",
            "--scheduler-file", str(folder / "scheduler.json"),
        )  # fmt: skip
        self.workers: list[subprocess.Popen[bytes]] = []
        self.address = self._address()

    def _start(self, name: str, *arguments: str, cwd: Path | None = None) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "dask", *arguments],
                stdout=log, stderr=log, cwd=cwd,
                # Workers look for a worker that was killed as long as this, half a minute by default.
                env={"DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "10s", **os.environ,
                     "PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip

    def _address(self) -> str:
        import json

        file = self.folder / "scheduler.json"
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if file.exists() and file.stat().st_size:
                return str(json.loads(file.read_text())["address"])
            assert self.scheduler.poll() is None, (self.folder / "scheduler.log").read_text()
            time.sleep(0.05)
        raise TimeoutError("the scheduler did not start")

    def add_worker(self, address: str | None = None, cwd: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a worker of one thread; it may reach the scheduler by another address."""
        name = f"worker-{len(self.workers)}"
        worker = self._start(
            name, "worker", address or self.address, "--nthreads", "1", "--no-nanny", "--no-dashboard",
            "--host", "127.0.0.1", "--name", name, "--local-directory", str(self.folder / name),
            "--death-timeout", "60", cwd=cwd,
        )  # fmt: skip
        self.workers.append(worker)
        return worker

    def stop(self) -> None:
        for process in (*self.workers, self.scheduler):
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


@contextmanager
def cluster(folder: Path, workers: int) -> Iterator[Cluster]:
    """Give a cluster that ends with the context."""
    one = Cluster(folder)
    try:
        for _ in range(workers):
            one.add_worker()
        yield one
    finally:
        one.stop()


@contextmanager
def client_of(address: str, workers: int) -> Iterator[Any]:
    from distributed import Client

    with Client(address, set_as_default=False, timeout=_START_SECONDS) as client:
        client.wait_for_workers(workers, timeout=_START_SECONDS)
        yield client


def nap(seconds: float, result: int) -> int:
    """A task that takes its time."""
    time.sleep(seconds)
    return result


_plans: list[int] = []


def count_plans() -> None:
    """On a worker: count from now on how often a plan is unpickled."""
    from reshard.core.plan.plan import Plan

    real: Any = Plan.__setstate__  # type: ignore[attr-defined]

    def counted(self: Plan, state: Any) -> None:
        _plans.append(1)
        real(self, state)

    Plan.__setstate__ = counted  # type: ignore[attr-defined]


def plans_counted() -> int:
    """On a worker: return the count."""
    return len(_plans)


class Wire:
    """Stands before a scheduler and counts the bytes that go through, in both directions."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._behind = host, int(port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self.nbytes = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                before, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(before,), daemon=True).start()

    def _connect(self, before: socket.socket) -> None:
        with before, socket.create_connection(self._behind) as behind:
            back = threading.Thread(target=self._pass_on, args=(behind, before), daemon=True)
            back.start()
            self._pass_on(before, behind)
            back.join()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(1 << 16):
                with self._lock:
                    self.nbytes += len(content)
                target.sendall(content)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
