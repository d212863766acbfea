"""Options of S3 clients: connections that fail if they stall.

aiohttp, the client of s3fs, has a timeout for received bytes but none for sent ones: if a store stops reading a part,
aiohttp waits forever. The kernel can end such a connection (TCP_USER_TIMEOUT of Linux) if sent bytes are not
acknowledged in time. (aiohttp then sends the part once more before the try fails.)
"""

from __future__ import annotations

import socket
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@lru_cache(maxsize=16)
def options(stall: float) -> dict[str, Any]:
    """Return options of s3fs for connections that fail if they stall, without retries by s3fs."""
    from fsspec.config import conf

    user_options = conf.get("s3", {}).get("config_kwargs", {})
    config: dict[str, Any] = {"read_timeout": stall, "retries": {"total_max_attempts": 1}}
    if _takes_sockets():
        config["connector_args"] = {"socket_factory": _sockets(stall)}
    return {"config_kwargs": {**config, **user_options}}


def _takes_sockets() -> bool:
    """Return whether this version of the client accepts a socket factory."""
    from aiobotocore.config import AioConfig
    from botocore.exceptions import ParamValidationError

    with suppress(ParamValidationError):
        AioConfig(connector_args={"socket_factory": socket.socket})
        return hasattr(socket, "TCP_USER_TIMEOUT")
    return False


def _sockets(stall: float) -> Callable[[tuple[Any, ...]], socket.socket]:
    """Return a factory of sockets that disconnect if sent bytes are not acknowledged in time."""

    def make(address: tuple[Any, ...]) -> socket.socket:
        connection = socket.socket(*address[:3])
        with suppress(OSError):  # some systems have the constant but not the option
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(stall * 1000)))
        return connection

    return make
