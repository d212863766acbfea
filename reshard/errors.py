"""What goes wrong, and the exit code each kind of it has at the command line.

Every error is one clear sentence: what, where, what was expected and found, what to do next. Where a file
has several faults, all of them are reported at once, each with its place.

What to do next is often an option, which the command line calls `overwrite` in another way than Python does, or one of
MindSpore's functions. So a `Text` refers to an `Option`, and each of the three has a table of `Words`. To whom nothing
else is known, as in `str(error)`, a text is in Python's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple, NoReturn, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_SHOWN_FAULTS = 20

Words = Mapping[str, tuple[str, ...]]
"""How options are written, by their names: without a value, and with one."""

PYTHON: Words = {
    "against": ("against=...",),
    "allow_missing": ("allow_missing={!r}",),
    "cast": ("cast={{{!r}: {!r}}}",),
    "client": ("client=...",),
    "deduplicated": ("deduplicated=True",),
    "drop": ("drop={!r}",),
    "exclude": ("exclude", "exclude={!r}"),
    "include": ("include", "include={!r}"),
    "iteration": ("iteration=...", "iteration={}"),
    "key": ("cipher=...", "cipher=reshard.Cipher({!r}, key)"),
    "layout": ("layouts={{{!r}: {!r}}}",),
    "lora_alpha": ("alpha=... to reshard.LoRA",),
    "lora_tied": ("tied={!r} to reshard.LoRA",),
    "memory": ("memory=...", "memory={:_}"),
    "name_map": ("names=...",),
    "overwrite": ("overwrite=True",),
    "partial": ("partial=True",),
    "rank_pattern": ("rank_pattern=...",),
    "restart": ("restart=True",),
    "seed": ("seed={}",),
    "source": ("source=...",),
    "source_key": ("source_cipher=...", "source_cipher=reshard.Cipher({!r}, key)"),
    "source_strategy": ("source_strategy=...", "source_strategy={!r}"),
    "stage": ("stage={}",),
    "strategy": ("strategy=...", "strategy={!r}"),
    "suffix": ("suffix=...", "suffix={!r}"),
    "target_cipher": ("target_cipher=...", "target_cipher=reshard.Cipher({!r}, key)"),
    "target_key": ("cipher=...", "cipher=reshard.Cipher({!r}, key)"),
    "target_iteration": ("iteration=...", "iteration={}"),
    "target_layout": ("layouts={{{!r}: {!r}}}",),
    "target_partial": ("partial=True",),
    "target_rank_pattern": ("rank_pattern=...",),
    "target_stage": ("stage={}",),
    "target_step": ("step=... to reshard.Checkpoint2",),
    "target_strategy": ("strategy=...", "strategy={!r}"),
    "target_suffix": ("suffix=...", "suffix={!r}"),
    "weights_only": ("weights_only",),
}
"""As arguments of the public functions; those of the target, and of the source next to one, are `verify`'s."""


class Option(NamedTuple):
    """An option that a text refers to.

    Attributes:
        name: as in the tables of words.
        value: what it is given; None where a text names the option alone, or it has no value.
        rule: of the tensors that `layout` names in its value; how people write the size that `memory` has, and a
            shell the path that `strategy` has.
    """

    name: str
    value: object = None
    rule: str = ""

    def of(self, side: str) -> Option:
        """Return the option of the same meaning for `source` or `target`, where a call has both."""
        name = f"{side}_{self.name}"
        return self._replace(name=name) if name in PYTHON else self

    def written(self, words: Words) -> str:
        """Return what to type."""
        forms = words[self.name]
        return printable(forms[0 if self.value is None else -1].format(self.value, self.rule))


class Text(str):
    """A sentence in Python's words, which knows where they are options.

    >>> text = Text("w: differs; give ", Option("layout", "w", "whole"))
    >>> str(text), spelled(text, {"layout": ("{1} as the layout of {0}",)})
    ("w: differs; give layouts={'w': 'whole'}", 'w: differs; give whole as the layout of w')
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
    """Something failed; the base of every error that `reshard` raises on purpose."""

    exit_code: ClassVar[int] = 1

    @property
    def text(self) -> Text:
        """What it says, to be put into others' words."""
        return Text(*self.args)


class UsageError(ReshardError, ValueError):
    """The call itself is wrong: options that contradict each other, a value outside its range."""

    exit_code = 2


class VerifyError(ReshardError):
    """Two checkpoints that should hold the same values do not."""

    exit_code = 3


class SourceError(ReshardError, ValueError):
    """A source checkpoint is incomplete or corrupt."""

    exit_code = 4


class EncryptedError(SourceError):
    """A source file is encrypted, and there is no key."""


class GoneError(SourceError):
    """A source file is not there any more."""


class UnansweredError(SourceError):
    """An object store did not answer, or not properly, in any try to read."""

    exit_code = 1


class LayoutError(SourceError):
    """A layout cannot be applied to a tensor: sizes do not divide, axes are out of range."""


class StrategyError(SourceError):
    """A strategy file cannot be read, contradicts itself or does not fit the checkpoint."""


class PlanError(SourceError):
    """A plan file cannot be read, contradicts itself, or would do something else than was planned."""


class BudgetError(ReshardError):
    """Memory or disk space does not suffice."""

    exit_code = 5


class TargetError(ReshardError):
    """A target file exists already, is one of the sources, or a source changed under the run."""

    exit_code = 6


class NoBucketError(TargetError):
    """The bucket of a target does not exist."""

    exit_code = 1


class UnsentError(TargetError):
    """An object store did not answer, or not properly, in any try to write."""

    exit_code = 1


class ChangedError(TargetError):
    """A source is not what it was, so that what is written of it is worth nothing."""


class Faults:
    """Collect the faults of one subject, to raise them all at once.

    >>> faults = Faults("strategy.ckpt")
    >>> faults.add("$.w.dev_matrix", "is empty; expected at least one axis")
    >>> faults.add("$.b.tensor_map[0]", "is 3; expected -1 to 1")
    >>> faults.raise_if_any(StrategyError)
    Traceback (most recent call last):
    ...
    reshard.errors.StrategyError: strategy.ckpt has 2 faults:
      $.w.dev_matrix: is empty; expected at least one axis
      $.b.tensor_map[0]: is 3; expected -1 to 1
    """

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.count = 0
        self._first: list[tuple[str, str]] = []  # no more than are shown: a hostile file has millions

    def add(self, where: str, what: str | Callable[[], str]) -> None:
        """Remember one fault: `where` in the subject, and `what` is wrong there, or what finds that out slowly."""
        self.count += 1
        if self.count <= _SHOWN_FAULTS:
            said = what if isinstance(what, str) else what()
            self._first.append((where if where.isprintable() else repr(where), said))

    def raise_if_any(self, kind: type[ReshardError], *, advice: str = "") -> None:
        """Raise `kind` with every fault, one a line, and `advice` behind them; return if there are none."""
        if self.count:
            self._raise(kind, advice)

    def _raise(self, kind: type[ReshardError], advice: str) -> NoReturn:
        if self.count == 1:
            where, what = self._first[0]
            raise kind(Text(f"{self.subject}: ", where, ": ", what, *(["; ", advice] if advice else [])))
        lines: list[str] = [Text("  ", where, ": ", what) for where, what in self._first]
        if self.count > _SHOWN_FAULTS:
            lines.append(f"  and {self.count - _SHOWN_FAULTS} more")
        if advice:
            lines.append(Text("  ", advice))
        raise kind(joined("\n", [f"{self.subject} has {self.count} faults:", *lines]))


def bytes_text(nbytes: float) -> str:
    """Write a size in decimal units, as disks and networks are sold by.

    >>> bytes_text(0), bytes_text(999), bytes_text(1_500_000), bytes_text(999_999), bytes_text(2e15)
    ('0 B', '999 B', '1.5 MB', '1.0 MB', '2000.0 TB')
    """
    size = float(nbytes)
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 999.5 or (unit != "B" and size < 999.95):
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def printable(text: object, *, keep: str = "") -> str:
    r"""Escape what a terminal would obey instead of showing: control characters, bidirectional marks, lone bytes.

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
    listed: Sequence[str] = [text if (text := str(item)).isprintable() else repr(text) for item in items]
    if len(listed) <= most:
        return ", ".join(listed)
    return ", ".join(listed[:most]) + f" and {len(listed) - most} more"
