"""Errors: their kinds, exit codes and stable codes, and the form of their messages.

An error has a message of one line that states it, facts, and a hint with an option or command to type:

    error: dst already exists
           4 files, written by an earlier run
    hint:  pass --overwrite to replace it

Its `code` names the cause and stays the same when the wording changes. Faults of one file are reported together, one
example for each cause.

A hint is often an option, which the command line, Python and MindSpore's functions write in different ways. So a `Text`
refers to an `Option`, and each of the three has `Words`: a rule, and a table of exceptions. `str(error)` is in Python's
words.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_SHOWN_FAULTS, _SHOWN_OTHERS = 20, 3


class Words(NamedTuple):
    """How options are written.

    Attributes:
        rule: writes an option that is no exception.
        exceptions: the forms of others by their names: without a value, and with one.
    """

    rule: Callable[[Option], str]
    exceptions: Mapping[str, tuple[str, ...]]


_FLAGS = {"as_is", "deduplicated", "link_replicas", "overwrite", "partial", "remove_redundancy", "restart"}
_BARE = {"allow_missing", "cast", "exclude", "include", "layout", "lora", "same_ranks", "stage", "weights_only"}
"""Options that Python's texts name without a value."""


def _argument(option: Option) -> str:
    """Write an option as an argument of a public function; those of the target are `verify`'s."""
    name = option.name.removeprefix("target_")
    if option.value is not None:
        return f"{name}={option.value!r}"
    return name if name in _BARE or name == "dequantize" else f"{name}={'True' if name in _FLAGS else '...'}"


_CIPHER = ("cipher=...", "cipher=reshard.Cipher({!r}, key)")

PYTHON = Words(
    _argument,
    {
        "cast": ("cast", "cast={{{!r}: {!r}}}"),
        "key": _CIPHER,
        "layout": ("layout", "layout={{{!r}: {!r}}}"),
        "layouts_of": ("target=reshard.read_layouts(...)",),
        "let": ("let={{{!r}: N}}",),
        "link": ("files=reshard.LinkedDCP()",),
        "lora_alpha": ("alpha=... to reshard.LoRA",),
        "lora_tied": ("tied={!r} to reshard.LoRA",),
        "memory": ("memory=...", "memory={:_}"),
        "model_config": ("config=...",),
        "no_server_copy": ("server_copy=False",),
        "source_key": tuple(f"source_{form}" for form in _CIPHER),
        "target_cipher": tuple(f"target_{form}" for form in _CIPHER),
        "target_key": _CIPHER,
        "target_layout": ("layout={{{!r}: {!r}}}",),
    },
)

_SIDED = {
    "source": {"key", "strategy"},
    "target": {"iteration", "key", "layout", "partial", "rank_pattern", "stage", "strategy", "suffix"},
}  # options that have names of their own for a side, if a call has both


class Option(NamedTuple):
    """An option that a text refers to.

    Attributes:
        name: as on the command line, with underscores; `Words` have the exceptions.
        value: its value; None if a text names the option alone, or it has none.
        rule: the rule of `layout` for the tensors in its value; a size of `memory`, or a path of `strategy`, as typed.
    """

    name: str
    value: object = None
    rule: str = ""

    def of(self, side: str) -> Option:
        """Return the option for `source` or `target`, if a call has both."""
        return self._replace(name=f"{side}_{self.name}") if self.name in _SIDED[side] else self

    def written(self, words: Words) -> str:
        """Return what to type."""
        forms = words.exceptions.get(self.name)
        if forms is None:
            return printable(words.rule(self))
        return printable(forms[0 if self.value is None else -1].format(self.value, self.rule))


class Text(str):
    """A sentence in Python's words, which knows where they are options.

    >>> text = Text("w: differs; give ", Option("layout", "w", "whole"))
    >>> str(text), spelled(text, Words(repr, {"layout": ("{1} as the layout of {0}",)}))
    ("w: differs; give layout={'w': 'whole'}", 'w: differs; give whole as the layout of w')
    """

    __slots__ = ("parts",)
    parts: tuple[str | Option, ...]

    def __new__(cls, *parts: str | Option) -> Self:
        """Put a text together, of others too."""
        flat = tuple(piece for part in parts for piece in (part.parts if isinstance(part, Text) else (part,)))
        text = super().__new__(cls, "".join(_written(flat, PYTHON)))
        text.parts = flat
        return text

    def __reduce__(self) -> tuple[type[Text], tuple[str | Option, ...]]:
        return Text, self.parts

    def map(self, change: Callable[[Option], Option]) -> Text:
        """Return the text with each option changed."""
        return Text(*(change(part) if isinstance(part, Option) else part for part in self.parts))


def spelled(text: str, words: Words) -> str:
    """Return a text in some words; one that refers to no option is as it is."""
    return "".join(_written(text.parts, words)) if isinstance(text, Text) else text


def joined(separator: str, texts: Iterable[str]) -> Text:
    """Return texts as one, with something between them."""
    return Text(*[part for text in texts for part in (separator, text)][1:])


def _written(parts: Iterable[str | Option], words: Words) -> Iterable[str]:
    return (part.written(words) if isinstance(part, Option) else part for part in parts)


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
    """The call itself is wrong: options that contradict each other, a value outside its range."""

    exit_code = 2
    code = "usage"


class MissingNameError(UsageError, KeyError):
    """A mapping of tensors, of blocks or of groups does not have a name."""


class VerifyError(ReshardError):
    """Two checkpoints that should hold the same values do not."""

    exit_code = 3
    code = "different"


class SourceError(ReshardError, ValueError):
    """A source checkpoint is incomplete or corrupt."""

    exit_code = 4
    code = "bad-source"


class EncryptedError(SourceError):
    """A source file is encrypted, and there is no key."""

    code = "encrypted"


class GoneError(SourceError):
    """A source file does not exist any more."""

    code = "source-gone"


class UnansweredError(SourceError):
    """An object store did not answer properly in any try to read."""

    exit_code = 1
    code = "store-not-answering"


class LayoutError(SourceError):
    """A layout cannot be applied to a tensor: sizes do not divide, axes are out of range."""

    code = "bad-layout"


class StrategyError(SourceError):
    """A strategy file cannot be read, contradicts itself or does not fit the checkpoint."""

    code = "bad-strategy"


class PlanError(SourceError):
    """A plan file cannot be read, contradicts itself, or would do something else than was planned."""

    code = "bad-plan"


class BudgetError(ReshardError):
    """Memory or disk space does not suffice."""

    exit_code = 5
    code = "not-enough-room"


class TargetError(ReshardError):
    """A target file exists already, is one of the sources, or a source changed under the run."""

    exit_code = 6
    code = "bad-target"


class NoBucketError(TargetError):
    """The bucket of a target does not exist."""

    exit_code = 1
    code = "no-such-bucket"


class UnsentError(TargetError):
    """An object store did not answer properly in any try to write."""

    exit_code = 1
    code = "store-not-answering"


class ChangedError(TargetError):
    """A source changed during the run, so that the written files are useless."""

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


def parted(text: str, word: str) -> list[Text]:
    """Split a sentence at the first `; ` that a word follows; return both halves, or the whole.

    >>> parted("it is; it was; open it", "open")
    ['it is; it was', 'open it']
    """
    whole = Text(text)
    for number, part in enumerate(whole.parts):
        if isinstance(part, str) and f"; {word}" in part:
            before, _, after = part.partition(f"; {word}")
            return [Text(*whole.parts[:number], before), Text(word, after, *whole.parts[number + 1 :])]
    return [whole]


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


def bytes_text(nbytes: float) -> str:
    """Write a size in decimal units, like vendors of disks and networks.

    >>> bytes_text(0), bytes_text(999), bytes_text(1_500_000), bytes_text(999_999), bytes_text(2e15)
    ('0 B', '999 B', '1.5 MB', '1.0 MB', '2000.0 TB')
    """
    size, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 999.5 or (unit != "B" and size < 999.95):
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def printable(text: object, *, keep: str = "") -> str:
    r"""Escape unprintable characters: control characters, bidirectional marks, lone bytes.

    >>> print(printable("w\x1b[2J\n"), printable("a\nb", keep="\n").count("\n"), printable("größe"))
    w\x1b[2J\n 1 größe
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)


def names(items: Iterable[object], *, most: int = 5) -> str:
    """List some items for a message, the first few of many.

    >>> names(["a", "b"]), names(range(9), most=3)
    ('a, b', '0, 1, 2 and 6 more')
    """
    texts: Sequence[str] = [text if (text := str(item)).isprintable() else repr(text) for item in items]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")
