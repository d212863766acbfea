"""Errors: their kinds, exit codes and stable codes, and the form of their messages.

An error has a message of one line that states it, facts, and a hint with an option or command to type:

    error: dst already exists
           4 files, written by an earlier run
    hint:  pass --overwrite to replace it

Its `code` names the cause and stays the same when the wording changes. Faults of one file are reported together, one
example for each cause.

`str(error)` is in Python's words (`reshard.wording`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar, Self

from reshard.wording import PYTHON, Option, Text, Words, bytes_text, joined, names, parted, printable, spelled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "PYTHON", "BudgetError", "ChangedError", "EncryptedError", "Faults", "GoneError", "LayoutError", "NoBucketError",
    "Option", "PlanError", "ReshardError", "SourceError", "StrategyError", "TargetError", "Text", "UnansweredError",
    "UnsentError", "UsageError", "VerifyError", "Words", "bytes_text", "joined", "names", "parted", "printable",
    "spelled",
]  # fmt: skip

_SHOWN_FAULTS, _SHOWN_OTHERS = 20, 3


class ReshardError(Exception):
    """The base of every error that `reshard` raises on purpose.

    Args:
        message: one line under 80 characters that states the error, without advice.
        code: the cause, in words joined by hyphens; by default the code of the class.
        facts: lines that explain the message: an example, a count, the expected value.
        hint: advice, best a command or an option to type.

    Attributes:
        exit_code: the exit code of the command line.
        code: a stable name of the cause, for scripts and tests.
        codes: all causes, if the error reports several faults.

    >>> error = TargetError("dst already exists", code="already-exists", hint=Text("pass ", Option("overwrite")))
    >>> print(error)
    dst already exists
    hint: pass overwrite=True
    >>> error.code, error.exit_code
    ('already-exists', 6)
    """

    exit_code: ClassVar[int] = 1
    code: str = "failed"

    def __init__(self, message: str = "", *, code: str = "", facts: Iterable[str] = (), hint: str = "") -> None:
        super().__init__(message)
        self.code = code or self.code
        self.facts, self.hint = tuple(facts), hint
        self.codes: tuple[str, ...] = (self.code,)

    @property
    def message(self) -> str:
        """Return the line that states the error."""
        return self.args[0] if self.args else ""

    @property
    def text(self) -> Text:
        """Return the message, the facts and the hint, to be rendered for another interface."""
        lines = [Text(self.message), *(Text("  ", fact) for fact in self.facts)]
        return joined("\n", [*lines, *([Text("hint: ", self.hint)] if self.hint else [])])

    def __str__(self) -> str:
        return str(self.text)

    def _render_traceback_(self) -> list[str]:
        from reshard.messages import traceback_lines  # only IPython asks

        return traceback_lines(self)

    def changed(self, change: Callable[[str], str]) -> Self:
        """Return the same error with a function applied to its message, facts and hint."""
        error = type(self)(change(self.message), code=self.code, facts=map(change, self.facts), hint=change(self.hint))
        error.codes = self.codes
        return error

    def about(self, *subject: str | Option) -> Self:
        """Return the same error with a subject in front of its message, as `subject: message`."""
        message = Text(*subject, ": ", self.message)
        error = type(self)(message, code=self.code, facts=self.facts, hint=self.hint)
        error.codes = self.codes
        return error


class UsageError(ReshardError, ValueError):
    """The call itself is wrong: options that contradict each other, a value outside its range.

    >>> try:
    ...     reshard.convert("src_checkpoints", "dst", to="zip")
    ... except reshard.UsageError as error:
    ...     print(error.code, error.exit_code)
    unknown-format 2
    """

    exit_code = 2
    code = "usage"


class MissingNameError(UsageError, KeyError):
    """A mapping of tensors, of blocks or of groups does not have a name.

    >>> try:
    ...     reshard.open("src_checkpoints", strategy="src_strategy.ckpt")["net.layer9.weight"]
    ... except KeyError as error:
    ...     print(error.code)
    no-such-tensor
    """


class VerifyError(ReshardError):
    """Two checkpoints that should hold the same values do not.

    >>> error = reshard.VerifyError("a and b differ")
    >>> error.code, error.exit_code
    ('different', 3)
    """

    exit_code = 3
    code = "different"


class SourceError(ReshardError, ValueError):
    """A source checkpoint is incomplete or corrupt.

    >>> try:
    ...     reshard.open("missing")
    ... except reshard.SourceError as error:
    ...     print(error.code, error.exit_code)
    not-found 4
    """

    exit_code = 4
    code = "bad-source"


class EncryptedError(SourceError):
    """A source file is encrypted, and there is no key.

    >>> cipher = reshard.Cipher("AES-GCM", b"0123456789ABCDEF")
    >>> source = reshard.open("src_checkpoints", strategy="src_strategy.ckpt")
    >>> report = reshard.plan(source, target_cipher=cipher).run("sealed")
    >>> try:
    ...     reshard.open("sealed")
    ... except EncryptedError as error:
    ...     print(error.code, error.exit_code)
    encrypted 4
    """

    code = "encrypted"


class GoneError(SourceError):
    """A source file does not exist any more.

    >>> issubclass(GoneError, reshard.SourceError), GoneError.code
    (True, 'source-gone')
    """

    code = "source-gone"


class UnansweredError(SourceError):
    """An object store did not answer properly in any try to read.

    >>> issubclass(UnansweredError, reshard.SourceError), UnansweredError.code
    (True, 'store-not-answering')
    """

    exit_code = 1
    code = "store-not-answering"


class LayoutError(SourceError):
    """A layout cannot be applied to a tensor: sizes do not divide, axes are out of range.

    >>> try:
    ...     reshard.Strategy.of({"w": reshard.Layout.of([4], [0])}).grid("w", (6,))
    ... except LayoutError as error:
    ...     print(error.code)
    not-divisible
    """

    code = "bad-layout"


class StrategyError(SourceError):
    """A strategy file cannot be read, contradicts itself or does not fit the checkpoint.

    >>> try:
    ...     reshard.read_strategy("full.npz")
    ... except reshard.StrategyError as error:
    ...     print(error.code)
    not-a-strategy
    """

    code = "bad-strategy"


class PlanError(SourceError):
    """A plan file cannot be read, contradicts itself, or would do something else than was planned.

    >>> try:
    ...     reshard.read_plan("src_strategy.ckpt")
    ... except PlanError as error:
    ...     print(error.code)
    not-a-plan
    """

    code = "bad-plan"


class BudgetError(ReshardError):
    """Memory or disk space does not suffice.

    >>> source = reshard.open("src_checkpoints", strategy="src_strategy.ckpt")
    >>> try:
    ...     reshard.plan(source, "dst_strategy.ckpt", memory="1MB")
    ... except reshard.BudgetError as error:
    ...     print(error.code, error.exit_code)
    not-enough-memory 5
    """

    exit_code = 5
    code = "not-enough-room"


class TargetError(ReshardError):
    """A target file exists already, is one of the sources, or a source changed under the run.

    >>> try:
    ...     reshard.demo(directory="src_checkpoints")
    ... except reshard.TargetError as error:
    ...     print(error.code, error.exit_code)
    already-exists 6
    """

    exit_code = 6
    code = "bad-target"


class NoBucketError(TargetError):
    """The bucket of a target does not exist.

    >>> issubclass(NoBucketError, reshard.TargetError), NoBucketError.code
    (True, 'no-such-bucket')
    """

    exit_code = 1
    code = "no-such-bucket"


class UnsentError(TargetError):
    """An object store did not answer properly in any try to write.

    >>> issubclass(UnsentError, reshard.TargetError), UnsentError.code
    (True, 'store-not-answering')
    """

    exit_code = 1
    code = "store-not-answering"


class ChangedError(TargetError):
    """A source changed during the run, so that the written files are useless.

    >>> from pathlib import Path
    >>> source = reshard.open("src_checkpoints", strategy="src_strategy.ckpt")
    >>> file = Path("src_checkpoints/rank_0/checkpoint_0.ckpt")
    >>> count = file.write_bytes(file.read_bytes() + b"more")
    >>> try:
    ...     reshard.plan(source).run("whole")
    ... except ChangedError as error:
    ...     print(error.code, error.exit_code)
    source-changed 6
    """

    code = "source-changed"


_VERB = re.compile(
    r"(is|are|was|were|has|have|had|would|cannot|does|differs|lacks|holds|gives|names|matches|becomes|uses|repeats"
    r"|disagrees|begins|ends|needs|cuts|splits) "
)
"""The verb at the beginning of a predicate, whose subject is the location in front of it."""


class Faults:
    """The faults of one subject, raised together: one example for each cause.

    >>> faults = Faults("strategy.ckpt")
    >>> faults.add("$.w.dev_matrix", "is empty; expected at least one axis", code="empty-value")
    >>> faults.add("$.b.tensor_map[0]", "is 3; expected -1 to 1", code="out-of-range")
    >>> faults.add("$.c.tensor_map[0]", "is 4; expected -1 to 1", code="out-of-range")
    >>> faults.raise_if_any(StrategyError)
    Traceback (most recent call last):
    ...
    reshard.errors.StrategyError: strategy.ckpt has 3 faults
      $.w.dev_matrix is empty; expected at least one axis
      $.b.tensor_map[0] is 3; expected -1 to 1 (likewise $.c.tensor_map[0])
    """

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.count = 0
        self._causes: dict[tuple[str, str], _Cause] = {}

    def add(
        self, path: str, fault: str | ReshardError | Callable[[], str], *, code: str = "", hint: str = "",
        alike: str = "",
    ) -> None:  # fmt: skip
        """Record one fault.

        Args:
            path: its path in the subject.
            fault: a sentence, an error with code and hint, or a function that returns a sentence if it is shown.
            code: the cause. Faults of one code are shown as one example and a count; without a code each is shown.
            hint: advice; the hints of shown faults are joined.
            alike: only faults of one code with the same text here are shown as one.
        """
        self.count += 1
        if isinstance(fault, ReshardError):
            code, hint = code or fault.code, hint or fault.hint
            fault = joined("; ", [fault.message, *fault.facts])
        key = code, alike if code else path
        cause = self._causes.get(key)
        if cause is not None:
            cause.add(path)
        elif len(self._causes) < _SHOWN_FAULTS:  # a hostile file has millions
            sentence = fault if isinstance(fault, str) else fault()
            subject = path if isinstance(path, Text) or path.isprintable() else repr(path)
            example = Text(subject, " " if _VERB.match(sentence) else ": ", sentence)
            self._causes[key] = _Cause(path, example, code, hint)

    def unexpected(self, where: str, value: object, expected: str, *, code: str = "wrong-type") -> None:
        """Record a value that is not of the expected kind."""
        self.add(where, f"is {value!r:.60}; expected {expected}", code=code)

    def raise_if_any(self, kind: type[ReshardError], *, advice: str = "", code: str = "") -> None:
        """Raise `kind` if there are faults.

        Args:
            kind: the class of the error.
            advice: a hint for all faults.
            code: the cause of faults without a code.
        """
        if not self.count:
            return
        causes = list(self._causes.values())
        hints = list(dict.fromkeys(hint for hint in (*(cause.hint for cause in causes), advice) if hint))
        facts: list[str] = [cause.text() for cause in causes]
        if self.count == 1:
            message, *expected = parted(causes[0].example, "expected ")
            message, facts = Text(f"{self.subject}: ", message), [*expected]
        else:
            message = Text(f"{self.subject} has {self.count} faults")
            hidden = self.count - sum(cause.count for cause in causes)
            facts += [f"and {hidden} more"] if hidden else []
        codes = tuple(dict.fromkeys(cause.code or code or kind.code for cause in causes))
        error = kind(message, code=codes[0], facts=facts, hint=joined("; ", hints))
        error.codes = codes
        raise error


class _Cause:
    """A cause of faults: an example, and the paths of more faults."""

    def __init__(self, path: str, example: Text, code: str, hint: str) -> None:
        self.example, self.code, self.hint = example, code, hint
        self.count, self._paths, self._more = 1, [path], 0

    def add(self, path: str) -> None:
        self.count += 1
        if path not in self._paths and len(self._paths) <= _SHOWN_OTHERS:
            self._paths.append(path)
        else:
            self._more += 1

    def text(self) -> Text:
        same = f"likewise {names(self._paths[1:], most=_SHOWN_OTHERS)}" if len(self._paths) > 1 else ""
        rest = " and ".join(filter(None, (same, f"{self._more} more" if self._more else "")))
        return Text(self.example, f" ({rest})") if rest else self.example
