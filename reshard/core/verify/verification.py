"""The result of a verification."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard.errors import names
from reshard.upward import upward

if TYPE_CHECKING:
    from reshard.core.plan.changes import Change
    from reshard.core.rank_files import Step
    from reshard.core.verify.difference import Difference


@dataclass(frozen=True, slots=True)
class Counts:
    """How much was checked; see the properties of `Verification`."""

    files: int = 0
    tensors: int = 0
    copies: int = 0
    bytes_read: int = 0
    total_bytes: int = 0
    absent: int = 0
    linked: int = 0
    linked_summed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a target was compared; see the properties of `Verification`."""

    against: str | None = None
    step: Step | None = None
    changes: tuple[Change, ...] = ()
    note: str = ""
    sample: float | None = None
    by_checksums: bool = False
    independent: int = 0


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of a verification.

    Attributes:
        target: the directory or file that was verified.
        ranks: ranks whose files were checked; empty for a manifest, which has no ranks.
        counts: how much was checked.
        compared: how the target was compared.
        differences: the differences from the expected state.
        dropped: source tensors that the target does not have, and need not have.
        left_out: target tensors that were not requested.
        warnings: warnings; not differences.
        unchecked: descriptions of parts of the files that were not checked.
        seconds: duration of the verification.
        step: the training step of the target; None if the names of its files have none.
        complete: a strategy, an index, a source or a manifest shows that nothing is missing.
        by_ranks: the files are in rank directories.
        summed_bytes: bytes of a target alone that have the checksums that its files carry.

    >>> report = reshard.convert("src_checkpoints", "hf", to="hf", source_strategy="src_strategy.ckpt")
    >>> verification = reshard.verify("hf")
    >>> bool(verification), verification.tensors
    (True, 15)
    """

    target: str
    ranks: tuple[int, ...] = ()
    counts: Counts = field(default_factory=Counts)
    compared: Comparison = field(default_factory=Comparison)
    differences: tuple[Difference, ...] = ()
    dropped: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    seconds: float = 0.0
    step: Step | None = None
    complete: bool = True
    by_ranks: bool = False
    summed_bytes: int = 0

    @property
    def against(self) -> str | None:
        """The source or manifest that it was compared with; None if it was verified alone."""
        return self.compared.against

    @property
    def against_step(self) -> Step | None:
        """The training step of the source; None if the names of its files have none."""
        return self.compared.step

    @property
    def changes(self) -> tuple[Change, ...]:
        """The changes from source to target, as requested, or as recorded in ledgers."""
        return self.compared.changes

    @property
    def note(self) -> str:
        """The reason for this comparison, if it is from ledgers; advice for incomparable tensors."""
        return self.compared.note

    @property
    def sample(self) -> float | None:
        """The share of rows that was compared; None for all."""
        return self.compared.sample

    @property
    def by_checksums(self) -> bool:
        """Only sizes and checksums in the ledger were compared, because the source is gone."""
        return self.compared.by_checksums

    @property
    def independent(self) -> int:
        """Number of target files that the library safetensors read, not this program's reader."""
        return self.compared.independent

    @property
    def files(self) -> int:
        """Number of target files checked."""
        return self.counts.files

    @property
    def tensors(self) -> int:
        """Number of tensors checked, without the linked ones."""
        return self.counts.tensors

    @property
    def copies(self) -> int:
        """Number of blocks in files that were checked or compared, including replicas."""
        return self.counts.copies

    @property
    def bytes_read(self) -> int:
        """Bytes of contents read, of both sides; against a manifest, or alone, bytes of the files."""
        return self.counts.bytes_read

    @property
    def total_bytes(self) -> int:
        """Bytes that a comparison of all rows reads."""
        return self.counts.total_bytes

    @property
    def absent(self) -> int:
        """Number of blocks that are in no file of one side, and were not compared."""
        return self.counts.absent

    @property
    def linked(self) -> int:
        """Number of tensors with blocks in files that target and source share, which cannot be compared."""
        return self.counts.linked

    @property
    def linked_summed_bytes(self) -> int:
        """Bytes of the shared files that were compared with the checksums that these files contain."""
        return self.counts.linked_summed_bytes

    @property
    def equal(self) -> bool:
        """Return whether there are no differences."""
        return not self.differences

    def __bool__(self) -> bool:
        return self.equal

    def __repr__(self) -> str:
        verdict = f"{len(self.differences)} differences" if self.differences else "as it should be"
        against = f" against {names([self.against])}" if self.against else ""
        of = f"{names([self.target])}{against}"
        return f"<Verification of {of}: {verdict}, {self.tensors} tensors, {self.bytes_read} bytes>"

    def _repr_html_(self) -> str:
        return str(upward("html")(self))
