"""Names of the files of ranks."""

from __future__ import annotations

import re

EXTENSIONS = {".ckpt", ".safetensors"}
"""The extensions of files of tensors."""

RANK_DIRECTORY = re.compile(r"rank_(\d+)")
