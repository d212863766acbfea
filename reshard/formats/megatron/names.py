"""Names of Megatron-LM's directories."""

from __future__ import annotations

import re

from reshard.core.listing import FileNames

RANKS = FileNames(
    re.compile(r"[mt]p_rank_(?P<part>\d{2,9})(?:_(?:pp_rank_)?(?P<stage>\d{3,9}))?(?:_(?P<expert>\d{3,9}))?"),
    "is the directory of one rank of Megatron-LM",
    "open the directory above",
    when=frozenset({"alone", "directory"}),
)
"""Directories of Megatron-LM's older format, one of each tensor-parallel part of each pipeline stage; and NeMo 1's."""

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""The directory of a checkpoint without an iteration, as conversions write it."""
