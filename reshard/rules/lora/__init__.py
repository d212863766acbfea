"""Settings of LoRA adapters. `adapter` reads an adapter, `merge` adds it to the weights of a checkpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass

from reshard.core.storage.places import RemotePath, as_place
from reshard.errors import UsageError

MOST_ALPHA = 1e9
TIED = ("both", "untie")


@dataclass(frozen=True, slots=True)
class LoRA:
    """The settings of a LoRA adapter that PEFT saved; it is read when it is merged.

    Attributes:
        root: the directory of `adapter_config.json` and `adapter_model.safetensors`.
        alpha: a value that replaces the configuration's `lora_alpha`; None to keep that.
        tied: the treatment of weights that are one tensor, such as `lm_head` and `embed_tokens`, if the adapter changes
            them differently: `untie` stores each with its own change, as it was trained; `both` gives both every
            change, as PEFT's `merge_and_unload` does; empty to refuse such an adapter.
        digest: the digest of the expected adapter; empty to accept any.

    Raises:
        UsageError: alpha is not a number, or `tied` is another word.

    >>> LoRA("/adapters/sql", alpha=16)
    LoRA(root='/adapters/sql', alpha=16, tied='', digest='')
    """

    root: str
    alpha: float | None = None
    tied: str = ""
    digest: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.root, str | os.PathLike | RemotePath):
            raise UsageError(f"root is {self.root!r:.60}; expected a path", code="bad-argument")
        if self.alpha is not None and not is_alpha(self.alpha):
            raise UsageError(
                f"the alpha of a LoRA adapter is {self.alpha!r:.60}; expected a number, such as 16", code="bad-value"
            )
        if self.tied not in {"", *TIED}:
            raise UsageError(
                f"tied of a LoRA adapter is {self.tied!r:.60}; expected {' or '.join(TIED)}", code="bad-value"
            )
        object.__setattr__(self, "root", str(as_place(self.root).absolute()))


def is_alpha(value: object) -> bool:
    """Return whether a value is a valid alpha: a finite number of plausible size."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MOST_ALPHA
