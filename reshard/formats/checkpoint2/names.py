"""Names of the files of Checkpoint 2.0."""

from __future__ import annotations

import re

from reshard.core.listing import FileNames

METADATA = "metadata.json"
"""The file that lists the blocks."""

TRACKER = "latest_checkpointed_iteration.txt"
"""The tracker of a run."""

FILES = FileNames(
    re.compile(r"(?P<prefix>(?:.+-)?)(?P<kind>model|opt)-(?P<number>\d{7,})-(?P<count>\d{7,})\.safetensors", re.DOTALL),
    "is of a Checkpoint 2.0 of MindSpore Transformers",
    "open the directory of all its files",
    {METADATA: re.compile(rb'"state_dict_metadata"\s*:')},
)

COMMON = "common.json"
"""The file of the state of the training."""
