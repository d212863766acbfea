"""What a verification found, in words that fit on one screen, and as plain data. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from reshard.errors import PYTHON, Option, Text, names, spelled
from reshard.layout.block import shape_text
from reshard.view.folding import fold, ranges_text
from reshard.view.words import bytes_text, count_text, printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reshard.errors import Words
    from reshard.verify.difference import Difference
    from reshard.verify.verify import Verification

_MOST_SHOWN = 6  # of up to three lines each
_MOST_NAMES = 6


def verdict_text(found: Verification, words: Words = PYTHON, every_one: str = "`differences`") -> str:
    """Write in words what was verified, and what is not as it should be.

    Args:
        found: the result.
        words: how options are written.
        every_one: where more differences are than are shown.
    """
    lines = [f"{printable(found.target)}: {_conclusion(found)}"]
    files = count_text(found.files, "file")
    ranks = f" of {count_text(len(found.ranks), 'rank')} ({ranges_text(found.ranks)})" if found.ranks else ""
    blocks = "copies of blocks compared with others" if found.ranks and found.against else "blocks of them"
    lines.append(f"{count_text(found.tensors, 'tensor')}, {found.copies:,} {blocks}; {files}{ranks}")
    if found.unchecked:
        lines.append(f"not looked at: {'; '.join(found.unchecked)}")
    if found.bytes_read:
        rate = f" ({bytes_text(found.bytes_read / found.seconds)}/s)" if found.seconds else ""
        lines.append(f"read {bytes_text(found.bytes_read)} in {found.seconds:.2f} s{rate}")
    if found.sample is not None:
        share = found.bytes_read / found.total_bytes if found.total_bytes else 1
        again = Text("for the same again: ", Option("seed", found.seed))
        lines.append(f"a random sample, {100 * share:.3g} % of the bytes; {spelled(again, words)}")
    absent = "not in the target, which need not have it"
    for title, some in ((absent, found.dropped), ("in the target, and not asked for", found.left_out)):
        if some:
            lines.append(f"{title}: {_names(some)}")
    for difference in found.differences[:_MOST_SHOWN]:
        lines += _difference_lines(difference, found, words)
    if len(found.differences) > _MOST_SHOWN:
        lines.append(f"and {len(found.differences) - _MOST_SHOWN:,} more; {every_one} tells them all")
    return "\n".join(lines)


def summary(found: Verification) -> str:
    """Return one sentence of what differs, for the error that a command ends with.

    >>> from reshard.verify.difference import Difference
    >>> from reshard.verify.verify import Verification
    >>> one = Difference("size", "has 7 bytes; expected 8", path="rank_0/a.ckpt")
    >>> summary(Verification("dst", "m.json", (), 1, 0, 0, differences=(one,)))
    'dst is not what m.json says: 1 difference, in rank_0/a.ckpt'
    """
    tensors = dict.fromkeys(one.name for one in found.differences if one.name is not None)
    files = dict.fromkeys(one.path for one in found.differences if one.path is not None)
    where = [f"in {names(some, most=2)}" for some in (tensors, files) if some]
    count = count_text(len(found.differences), "difference")
    return f"{found.target} is not what {found.against} says: {', '.join([count, *where])}"


def _conclusion(found: Verification) -> str:
    against = printable(found.against or "")
    if found.differences:
        return f"DIFFERS from {against}: {count_text(len(found.differences), 'difference')}"
    if found.against is None:
        return "complete and sound in structure; contents were not read"
    if not found.ranks:
        return f"as the manifest {against} says"
    rows = "" if found.sample is None else " in the rows that were compared"
    return f"equal to {against}, bit for bit{rows}"


def _difference_lines(one: Difference, found: Verification, words: Words) -> Iterable[str]:
    subject = f"tensor {printable(one.name)}" if one.name is not None else _below(one.path or "", found.target)
    yield f"  {subject}: {printable(spelled(one.told, words))}"
    if one.path is not None and one.name is not None:
        root = found.against if one.side == "source" else found.target
        rank = "" if one.rank is None else f"rank {one.rank}, "
        yield f"    {one.side}, {rank}{_below(one.path, root)}"
    if one.index is not None and one.block is not None:
        yield (
            f"    first at {shape_text(one.index)} of the tensor, {shape_text(one.index_in_block or ())} of its block "
            f"{one.block}; compared with {_below(one.reference or '', found.against)}"
        )


def _below(path: str, root: str | None) -> str:
    """Return a path as it is below a directory, where it is."""
    return printable(path.removeprefix(f"{Path(root).absolute()}/") if root else path)


def _names(some: Iterable[str]) -> str:
    folded = [printable(name) for name, _, _ in fold((name, None) for name in some)]
    more = f" and {len(folded) - _MOST_NAMES:,} more" if len(folded) > _MOST_NAMES else ""
    return f"{', '.join(folded[:_MOST_NAMES])}{more}"


def verdict_data(found: Verification) -> dict[str, object]:
    """Return what was verified as plain data."""
    return {
        "target": found.target,
        "against": found.against,
        "equal": found.equal,
        "ranks": list(found.ranks),
        "files": found.files,
        "tensors": found.tensors,
        "copies": found.copies,
        "bytes_read": found.bytes_read,
        "total_bytes": found.total_bytes,
        "sample": found.sample,
        "seed": found.seed,
        "seconds": found.seconds,
        "dropped": list(found.dropped),
        "left_out": list(found.left_out),
        "notices": list(found.notices),
        "unchecked": list(found.unchecked),
        "differences": [_difference_data(one) for one in found.differences],
    }


def _difference_data(one: Difference) -> dict[str, object]:
    return {
        "kind": one.kind,
        "told": one.told,
        "tensor": one.name,
        "side": one.side,
        "rank": one.rank,
        "path": one.path,
        "block": None if one.block is None else {"start": list(one.block.start), "stop": list(one.block.stop)},
        "index": None if one.index is None else list(one.index),
        "index_in_block": None if one.index_in_block is None else list(one.index_in_block),
        "count": one.count,
        "found": one.found,
        "expected": one.expected,
        "reference": one.reference,
    }
