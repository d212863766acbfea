"""Names of the files of a model that `torch.save` wrote."""

from __future__ import annotations

import re

from reshard.core.listing import FileNames

_ALL = "open the directory of all its files"
_ALONE = frozenset({"alone"})

SAVES = FileNames(
    re.compile(r"(?P<kind>.+)_world_size_(?P<count>[1-9]\d{0,8})_rank_(?P<rank>0|[1-9]\d{0,8})\.pt", re.DOTALL),
    "is what one rank saved of its tensors (torch.save)",
    "open the directory of the files of all ranks",
)

SAVED_INDEX = re.compile(r".+\.(?:bin|pt|pth)\.index(?:\.[^.]+)?\.json", re.DOTALL)
"""The possible names of the index of a set of files of `torch.save`, such as `pytorch_model.bin.index.json`."""

SAVED_SET = FileNames(
    re.compile(rf"(?:.+[-_.])?\d{{5,}}-of-(?!0*1\.)\d{{5,}}\.(?:bin|pt|pth)|{SAVED_INDEX.pattern}", re.DOTALL),
    "is one of several files that torch.save made of one model",
    _ALL,
    when=_ALONE,
)
"""Sets of whole tensors in files of `torch.save`, as Hugging Face's `pytorch_model`."""

CONSOLIDATED = FileNames(
    re.compile(r"consolidated\.(?P<part>\d{1,9})\.pth"),
    "is what one rank of several saved of a model (torch.save)",
    _ALL,
)
"""Meta's files, one of each tensor-parallel part; the only one may be the whole model."""

PARTS = FileNames(
    re.compile(
        r"(?:.*_)?(?:zero_pp_rank_\d+_|mp_rank_(?!0+[_.])\d+).*\.pt|layer_\d+-model_\d+.*\.pt"
        r"|consolidated\.(?!0+\.)\d+\.pth",
        re.DOTALL,
    ),
    CONSOLIDATED.problem,
    _ALL,
    when=_ALONE,
)
"""Files of one rank of several, of programs that are not told apart."""
