"""Connect to a cluster of dask: to a scheduler, by its address or file; to a cluster object; or to a temporary one."""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from reshard import environment
from reshard.core.run.clusters.workers import ignore_interrupts
from reshard.core.storage.threads import processor_count
from reshard.errors import ReshardError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

REACHED_WITHIN = 10
"""Seconds within which a scheduler must answer, and have a worker."""


@contextmanager
def connected(cluster: Any, threads: int | None = None) -> Iterator[Any]:
    """Yield a client of an existing cluster, or of a temporary local one.

    The client, and a local cluster, end with the context.

    Args:
        cluster: `local`, `local:N` with N worker processes, the address of a scheduler, or a cluster object such as
            `distributed.LocalCluster`.
        threads: threads of each worker of a temporary cluster; by default the processors are shared out.

    Raises:
        ReshardError: `distributed` is not installed, the cluster does not answer in time, or a certificate is missing.
    """
    try:
        from distributed import Client
    except ImportError:
        raise ReshardError(
            "a cluster needs the library distributed", code="library-missing", hint="pip install 'reshard[distributed]'"
        ) from None
    is_address = isinstance(cluster, str)
    if is_address and cluster.startswith("local"):
        with _temporary(int(cluster.partition(":")[2] or 0), threads) as client:
            yield client
        return
    address = cluster if is_address else cluster.scheduler_address
    if is_address and address.startswith(("tls://", "wss://")):
        _check_certificate(address)
    try:
        client = Client(cluster, timeout=REACHED_WITHIN, set_as_default=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise ReshardError(
            f"cluster {address} did not answer within {REACHED_WITHIN} s", code="not-reachable", facts=[str(error)]
        ) from None
    with client:
        if is_address:
            try:
                client.wait_for_workers(1, timeout=REACHED_WITHIN)
            except TimeoutError:
                raise ReshardError(
                    f"cluster {address} has no worker after {REACHED_WITHIN} s",
                    code="no-workers",
                    hint=f"start one: dask worker {address}",
                ) from None
        yield client


@contextmanager
def _temporary(workers: int, threads: int | None) -> Iterator[Any]:
    """Yield a client of worker processes of this machine; 0 of them means as many as there are processors, up to 4."""
    from distributed import Client, LocalCluster

    processors = processor_count()
    workers = workers or min(processors, 4)
    with (
        LocalCluster(
            n_workers=workers,
            threads_per_worker=environment.threads(threads) or max(1, processors // workers),
            processes=True,
            dashboard_address="127.0.0.1:0",
            silence_logs=logging.CRITICAL,  # workers of a stopped run log tracebacks; errors are raised here
        ) as local,
        Client(local, set_as_default=False) as client,
    ):
        client.run(ignore_interrupts)
        yield client


def _check_certificate(address: str) -> None:
    """Refuse an encrypted connection without a certificate of this machine.

    Raises:
        ReshardError: dask's configuration names no certificate, or one that cannot be read.
    """
    from distributed.security import Security

    facts: list[str] = []
    try:
        if Security().get_connection_args("client").get("ssl_context") is not None:
            return
    except OSError as error:
        facts.append(str(error))
    raise ReshardError(
        f"cluster {address} needs a certificate", code="no-certificate", facts=facts,
        hint="set ca-file, client.cert and client.key of distributed.comm.tls in dask's configuration",
    )  # fmt: skip


def address_in(path: str) -> str:
    """Return the address of a scheduler, from its file (`dask scheduler --scheduler-file`).

    Raises:
        UsageError: there is no such file, or it is another.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return str(json.load(file)["address"])
    except OSError as error:
        raise UsageError(
            f"cannot read the scheduler file {path}: {error.strerror}", code="no-such-cluster",
            hint="give the file that dask scheduler --scheduler-file writes, or an address such as tcp://10.0.0.1:8786",
        ) from None  # fmt: skip
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path} is no scheduler file", code="no-such-cluster", facts=["it has no address"]) from None
