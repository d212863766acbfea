"""Names of the files of ranks, and of files that would pass for them."""

from __future__ import annotations

import re

from reshard.core.listing import FileNames

EXTENSIONS = {".ckpt", ".safetensors"}
"""The extensions of files of tensors."""

_ORIGINAL = "convert the Hugging Face model that it was made from"
_ALONE, _ALWAYS = frozenset({"foreign", "alone"}), frozenset({"foreign"})
FOREIGN = (
    FileNames(
        re.compile(r"model-rank-\d+-part-\d+\.safetensors"), "is of the sharded state of vLLM, which is not read",
        _ORIGINAL, code="unsupported-format", when=_ALWAYS,
    ),
    FileNames(
        re.compile(r"rank\d+\.engine"), "is of a model for TensorRT-LLM, which is not read", _ORIGINAL,
        {"config.json": re.compile(rb'"mapping"\s*:\s*\{[^{}]*"world_size"')}, "unsupported-format", _ALWAYS,
    ),
    FileNames(
        re.compile(r".+\.gguf", re.DOTALL), "is a GGUF file of llama.cpp, which is not read", _ORIGINAL,
        code="unsupported-format", when=_ALONE,
    ),
    FileNames(
        re.compile(r".+\.npy", re.DOTALL), "is a file of NumPy, which is not read",
        'in Python: reshard.write({"NAME": numpy.load("FILE.npy")}, "TARGET.safetensors")', code="unsupported-format",
        when=_ALONE,
    ),
    FileNames(
        re.compile(r".+\.npz", re.DOTALL), "is a file of NumPy, which is not read",
        'in Python: reshard.write(dict(numpy.load("FILE.npz")), "TARGET.safetensors")', code="unsupported-format",
        when=_ALONE,
    ),
)  # fmt: skip
"""Files of other programs that are not read; next to a checkpoint, some are ignored."""
