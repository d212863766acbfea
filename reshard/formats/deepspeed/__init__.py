"""Checkpoints of DeepSpeed: ZeRO stages 0 to 3, and Universal Checkpoints."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from reshard.core.format import Format, Found
from reshard.core.listing import RunLayout
from reshard.core.model.findings import Findings, by_opening
from reshard.formats.deepspeed.names import FILES, MODEL_STATES
from reshard.kits.parts.cuts import rules_over_parts
from reshard.kits.torch.names import with_trainer_files

if TYPE_CHECKING:
    from reshard.core.listing import Contents, Listing, OpenOptions
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.model.findings import Directory
    from reshard.core.model.objects import Objects
    from reshard.core.options import Options
    from reshard.core.target import Target


class DeepSpeed(Format):
    """The files of model states and optimizer states of all ranks."""

    name = "deepspeed"
    title = "DeepSpeed"
    parts = (FILES,)
    runs = (
        RunLayout("latest", re.compile(r"global_step(\d{1,18})"), by_name=True),
        RunLayout("latest_universal", re.compile(r"global_step(\d{1,18})_universal"), by_name=True),
    )
    takes = frozenset({"strategy", "layouts"})
    carries = True

    def find(self, here: Listing) -> Found | None:
        """See `Format`."""
        return Found(self, here) if FILES.shown_by(here) else None

    def open(self, found: Found, options: OpenOptions, *, contents: Contents) -> Checkpoint:
        """See `Format`."""
        from reshard.formats.deepspeed.checkpoint import open_zero

        return open_zero(found.place, found.here.names, contents=contents, rules=rules_over_parts(options))

    def complete(self, found: Found, tree: Directory) -> Findings:
        """See `Format`."""
        return with_trainer_files(tree, partial(super().complete, found, tree))

    def objects(self, checkpoint: Checkpoint) -> Objects:
        """See `Format`."""
        from reshard.formats.deepspeed.writer import ModelValues

        return ModelValues(checkpoint)


class Universal(Format):
    """A directory for each parameter, with a file for each of its states."""

    name = "deepspeed-universal"
    title = "DeepSpeed Universal"
    whole = "a Universal Checkpoint of DeepSpeed"
    called = "a Universal Checkpoint"
    encoding = "deepspeed-universal"
    extends = ("deepspeed",)
    is_deep = True
    carries = True

    @property
    def options(self) -> type[Options]:
        """See `Format`."""
        from reshard.formats.deepspeed.names import DeepSpeedUniversal

        return DeepSpeedUniversal

    def target(self, options: Options) -> type[Target]:  # noqa: ARG002 -- all are of one kind
        """See `Format`."""
        from reshard.formats.deepspeed.writer import UniversalTarget

        return UniversalTarget

    def find(self, here: Listing) -> Found | None:
        """See `Format`."""
        is_universal = "zero" in here.names and any(map(MODEL_STATES.fullmatch, here.names))
        return Found(self, here) if is_universal else None

    def open(self, found: Found, options: OpenOptions, *, contents: Contents) -> Checkpoint:  # noqa: ARG002 -- it takes none
        """See `Format`."""
        from reshard.formats.deepspeed.universal import open_universal

        return open_universal(found.place, found.here.names, contents=contents)

    def remains(self, tree: Directory) -> str:
        """See `Format`."""
        zero = tree.below.get("zero")
        has_states = zero is not None and any("fp32.pt" in parameter.files for parameter in zero.below.values())
        return "has no file of model states" if has_states else ""

    def complete(self, found: Found, tree: Directory) -> Findings:
        """See `Format`."""
        if reason := _lacks_states(tree.below["zero"]):
            return Findings("incomplete", reason)
        return with_trainer_files(tree, partial(by_opening, partial(found.open, contents=False), found.place))

    objects = DeepSpeed.objects


def _lacks_states(zero: Directory) -> str:
    """Return which parameter lacks a file, or "". A frozen parameter has only its weights."""
    files = {name: {*parameter.files} for name, parameter in zero.below.items()}
    union = set[str]().union(*files.values())
    for name, present in files.items():
        if present not in (union, {"fp32.pt"}):
            return f"zero/{name} has no {min(union - present)}"
    return ""


FORMATS = (Universal(), DeepSpeed())
