"""Names of the files of ranks."""

from __future__ import annotations

EXTENSIONS = {".ckpt", ".safetensors"}
"""The extensions of files of tensors."""
