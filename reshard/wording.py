"""Texts of messages, which name options as each interface writes them.

A hint is often an option, which the command line, Python and MindSpore's functions write in different ways. So a `Text`
refers to an `Option`, and each of the three has `Words`: a rule, and a table of exceptions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


class Words(NamedTuple):
    """How options are written.

    Attributes:
        rule: writes an option that is no exception.
        exceptions: the forms of others by their names: without a value, and with one.
    """

    rule: Callable[[Option], str]
    exceptions: Mapping[str, tuple[str, ...]]


_FLAGS = {"as_is", "deduplicated", "overwrite", "partial", "remove_redundancy", "restart"}
_BARE = {"allow_missing", "cast", "exclude", "include", "layout", "lora", "same_ranks", "stage", "weights_only"}
"""Options that Python's texts name without a value."""


def _argument(option: Option) -> str:
    """Write an option as an argument of a public function."""
    name = option.name
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
        "let": ("let={{{!r}: N}}",),
        "lora_alpha": ("alpha=... to reshard.LoRA",),
        "lora_tied": ("tied={!r} to reshard.LoRA",),
        "memory": ("memory=...", "memory={:_}"),
        "model_config": ("config=...",),
        "no_server_copy": ("server_copy=False",),
        "source_key": _CIPHER,
        "stage_ranks": ("target_stage=...", "target_stage={}"),
        "target_cipher": tuple(f"target_{form}" for form in _CIPHER),
        "target_key": tuple(f"target_{form}" for form in _CIPHER),
        "target_layout": ("layout={{{!r}: {!r}}}",),
    },
)

_SIDED = {
    "source": {"key", "strategy"},
    "target": {"key", "layout", "stage", "strategy"},
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
