"""Protobuf messages, built from a descriptor set in a private pool.

Generated modules fail on runtimes older than their compiler, and clash with MindSpore's own in one process
("duplicate symbol"); a private `DescriptorPool` does neither. After a change to a `.proto` file:

    pip install grpcio-tools
    python -m reshard.strategy.proto
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message import Message

HERE = Path(__file__).parent
DESCRIPTORS = HERE / "descriptors.binpb"


@lru_cache(maxsize=1)
def _pool() -> DescriptorPool:
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool

    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file:
        pool.Add(file)
    return pool


@lru_cache
def message_class(full_name: str) -> type[Message]:
    """Return the class of a message by its full name.

    >>> message_class("mindspore.straspb.ParallelStrategyMap")(current_stage=2).IsInitialized()
    True
    """
    from google.protobuf.message_factory import GetMessageClass

    message: type[Message] = GetMessageClass(_pool().FindMessageTypeByName(full_name))
    return message
