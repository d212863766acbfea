"""The verdict of a verification, in words and as plain data."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.core.layout.block import shape_text
from reshard.core.plan.changes import described
from reshard.dtypes import BY_NAME
from reshard.errors import PYTHON, bytes_text, printable, spelled
from reshard.view.sections import Facts, Names, Note, Table, page, warnings_of
from reshard.view.sections import lines as section_lines
from reshard.view.text import count_text, fields_data, folded_text, near, of_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.core.verify.difference import Difference
    from reshard.core.verify.verification import Verification
    from reshard.errors import Words
    from reshard.view.sections import Section

_MOST_SHOWN = 6  # differences, of up to two lines each
_MOST_NAMES = 6
_MOST_FILES = 8


def verdict_text(
    verification: Verification, words: Words = PYTHON, every_one: str = "`differences`", *, verbose: bool = False
) -> str:
    """Write the verdict and the first differences.

    Args:
        verification: the result.
        words: how options are written.
        every_one: the option or attribute that lists all differences.
        verbose: write all facts.
    """
    target = printable(near(verification.target))
    if verification.differences:
        lines = [spelled(summary(verification), words)]
    else:
        was_read = verification.against is not None or verification.bytes_read or verification.summed_bytes
        lines = [f"{'verified' if was_read else 'headers alone'}: {target} {conclusion(verification)}"]
    if verification.note:
        lines.append(f"  {printable(spelled(verification.note, words)).replace(f'{Path.cwd()}/', '')}")
    for side, step in (("target", verification.step), ("source", verification.against_step)):
        if step is not None:
            lines.append(f"  {side}: {spelled(step.text(side), words)}")
    if verification.independent:
        files = count_text(verification.independent, "file")
        lines.append(f"  {files} read with Hugging Face's safetensors library, too")
    if verification.sample is not None and verification.total_bytes:
        lines.append(f"  a random sample, {_percent(verification):.3g} % of the bytes")
    absent = {
        "not in the target, which need not have it": verification.dropped,
        "in the target, and not asked for": verification.left_out,
    }
    lines += [f"  {title}: {folded_text(tensors, _MOST_NAMES)}" for title, tensors in absent.items() if tensors]
    lines += _differences_lines(verification, words, every_one)
    if verbose:
        facts = _facts(verification).facts[1 : None if verification.bytes_read else 3]
        sections: list[Section] = [Facts(facts), *_unchecked(verification)]
        lines += [f"  {line}" for section in sections for line in section_lines(section)]
    return "\n".join(lines)


def _facts(verification: Verification) -> Facts:
    """Return the scope of a verification."""
    count, nbytes, seconds = len(verification.differences), verification.bytes_read, verification.seconds
    both = verification.against is not None and bool(verification.ranks)
    blocks = f"{count_text(verification.copies, 'block')} {'compared' if both else 'in files'}"
    sides = "of both sides" if both else ""
    if both and verification.sample is not None:
        sides = f"a sample of {bytes_text(verification.total_bytes)}"
    rate = f"{bytes_text(nbytes / seconds)}/s" if seconds and nbytes else ""
    return Facts([
        ("differences", f"{count:,}" if count else "none", ""),
        ("tensors", f"{verification.tensors:,}", blocks),
        ("files", f"{verification.files:,}", of_ranks("", verification.ranks)),
        ("read", bytes_text(nbytes), sides),
        ("time", f"{seconds:.2f} s", rate),
    ])  # fmt: skip


def _unchecked(verification: Verification) -> list[Note]:
    return [Note(f"not compared: {'; '.join(verification.unchecked)}")] if verification.unchecked else []


def verification_html(verification: Verification) -> str:
    """Show the scope and the differences of a verification."""
    target, against = verification.target, verification.against

    def row(difference: Difference) -> Sequence[str]:
        return (
            difference.name or below(difference.path or "", target),
            spelled(difference.text, PYTHON),
            "" if difference.index is None else shape_text(difference.index),
            difference.side if difference.rank is None else f"{difference.side}, rank {difference.rank}",
            below(difference.path or "", against if difference.side == "source" else target),
        )

    header, rows = ("tensor or file", "difference", "first at", "where", "file"), [*map(row, verification.differences)]
    sections: list[Section] = [
        _facts(verification),
        *([Table("Differences", header, rows, "difference", wrap="difference", opened=True)] if rows else []),
        Names("Dropped", verification.dropped, "in the source, not in the target"),
        Names("Left out", verification.left_out, "in the target, and not asked for"),
        *([Note(verification.note)] if verification.note else []),
        *_unchecked(verification),
        *warnings_of(verification),
    ]
    return page(("Verification", target, conclusion(verification)), sections, repr(verification))


# --- one sentence -----------------------------------------------------------------------------------------------


def summary(verification: Verification) -> str:
    """Return one sentence about the differences.

    >>> from reshard.core.verify.difference import Difference
    >>> from reshard.core.verify.verification import Comparison, Counts, Verification
    >>> size = Difference("size", "has 7 bytes; expected 8", path="rank_0/a.ckpt")
    >>> summary(Verification("dst", (), Counts(1, 9), Comparison("m.json"), (size,)))
    'dst differs from m.json: 1 of 1 file'
    """
    differences = verification.differences
    tensors = {each.name for each in differences if each.name is not None}
    files = {each.path for each in differences if each.path is not None}
    target, against = printable(near(verification.target)), "what it carries of itself (checksums, replicas)"
    if verification.against:
        against = _after_changes(verification, verification.against)
    casts = [(each.found, each.expected) for each in differences if each.kind == "dtype"]
    others = any(each.kind not in {"dtype", "missing", "extra"} for each in differences)
    if verification.against and len(set(casts)) == 1 and not others:
        actual, expected = casts[0]
        tensors_text = f"{count_text(len(casts), 'tensor')}, {actual} in {target}, {expected} in {against}"
        return f"{target} and {against} cannot be compared bit for bit: {tensors_text}"
    count = count_text(len(differences), "difference")
    if tensors:
        count = (
            f"{len(tensors):,} of {count_text(max(verification.tensors + verification.linked, len(tensors)), 'tensor')}"
        )
    elif files:
        count = f"{len(files):,} of {count_text(max(verification.files, len(files)), 'file')}"
    return f"{target} differs from {against}: {count}"


def conclusion(verification: Verification) -> str:
    """Return the verdict in a few words; after "= " comes the source that the target equals."""
    against = verification.against
    if verification.differences:
        return summary(verification).removeprefix(printable(near(verification.target))).strip()
    if against is None:
        return _alone_text(verification)
    if not verification.ranks:
        return f"is as the manifest {printable(near(against))} says; {_compared(verification)}"
    if verification.by_checksums:
        return f"has the sizes and checksums of its ledger, in {count_text(verification.files, 'file')}"
    linked = _linked_text(verification)
    if linked and not verification.tensors:
        return f"has the structure of {_after_changes(verification, against)}; {linked}"
    absent, rest = verification.absent, len(verification.left_out)
    without = f", except {count_text(absent, 'block')} that no file has" if absent else ""
    others = (
        f"; {count_text(rest, 'other')} in the target not compared" if rest and not _selection(verification) else ""
    )
    parts = (f"{_compared(verification)}{without}{others}", linked)
    return f"= {_after_changes(verification, against)}; {'; '.join(filter(None, parts))}"


def _linked_text(verification: Verification) -> str:
    """Return how many tensors were not compared because both sides have them in the same files, or ""."""
    if not verification.linked:
        return ""
    tensors = count_text(verification.linked, "tensor")
    sums = ", which have the checksums that they carry" if verification.linked_summed_bytes else ""
    return f"{tensors} not compared, in the same files on both sides{sums}"


def _alone_text(verification: Verification) -> str:
    """Return the verdict on a target that was compared with nothing."""
    if verification.summed_bytes:
        return "is complete and valid; its contents have the checksums that its files carry"
    if verification.bytes_read:
        return "is complete and valid in structure; its copies are equal, and other contents were not read"
    if verification.complete:
        return "is complete and valid in structure; contents were not read"
    expected = "how many ranks" if verification.by_ranks else "which tensors"
    return f"has valid headers; nothing says {expected} there should be"


def _after_changes(verification: Verification, against: str) -> str:
    """Return the path of the source and the changes since."""
    text = described(verification.changes)
    return printable(f"{near(against)} after changes ({text})" if text else near(against))


def _compared(verification: Verification) -> str:
    """Return the scope of a comparison: the share of the bits, the number of tensors and their selection."""
    share = "every bit" if verification.sample is None else f"a random {_percent(verification):.3g} %"
    selection = _selection(verification)
    return f"{share} of {count_text(verification.tensors, 'tensor')}{f' ({selection})' if selection else ''}"


def _selection(verification: Verification) -> str:
    """Return the selection of tensors in words, or ""."""
    return ", ".join(change.text for change in verification.changes if change.kind == "selection")


def _percent(verification: Verification) -> float:
    """Return the percentage of bytes that were compared."""
    return 100 * verification.bytes_read / verification.total_bytes if verification.total_bytes else 100


# --- differences ------------------------------------------------------------------------------------------------


def _differences_lines(verification: Verification, words: Words, every_one: str) -> Iterator[str]:
    """Yield the first differences; tensors that differ alike share a line."""
    groups: dict[object, list[Difference]] = {}
    for number, difference in enumerate(verification.differences):
        key: object = number
        if difference.kind == "dtype" or (difference.kind in {"missing", "extra"} and difference.path is None):
            key = difference.kind, difference.text
        elif difference.kind == "values" and difference.index is not None:
            key = difference.kind, difference.name
        groups.setdefault(key, []).append(difference)
    alike = list(groups.values())
    for group in alike[:_MOST_SHOWN]:
        yield from _alike_lines(group, verification, words)
    if rest := alike[_MOST_SHOWN:]:
        tensors = {each.name for group in rest for each in group}
        more = count_text(len(rest), "difference") if None in tensors else count_text(len(tensors), "tensor")
        yield f"  and {more} more; {every_one} lists all"


def _alike_lines(group: Sequence[Difference], verification: Verification, words: Words) -> Iterator[str]:
    first = group[0]
    text = printable(spelled(first.text, words))
    if first.kind == "values" and first.index is not None:
        yield from _values_lines(sorted(group, key=lambda each: each.side == "source"), verification, words)
    elif len(group) > 1:
        folded = folded_text((each.name or "" for each in group), _MOST_NAMES)
        yield f"  {count_text(len(group), 'tensor')}, {folded}: {first.text}"
    elif first.name is None:
        yield f"  {below(first.path or '', verification.target)}: {text}"
    else:
        yield f"  {'object' if first.kind == 'object' else 'tensor'} {printable(first.name)}: {text}"
        if first.path:
            rank = "" if first.rank is None else f"rank {first.rank}, "
            yield f"    {first.side}, {rank}{printable(near(first.path))}"


def _values_lines(differences: Sequence[Difference], verification: Verification, words: Words) -> Iterator[str]:
    """Yield the first differing element of a tensor in both files, and the other files that differ."""
    first, *others = differences
    block = f" of {count_text(first.block.size, 'element')} of this block" if first.block is not None else ""
    reason = first.text.partition(f"expected 0x{first.expected}")[2]  # set if rules merge tensors (`compare.ties`)
    name = f"{printable(first.name or '')}{shape_text(first.index or ())}"
    largest, nans = max(each.largest or 0 for each in differences), sum(each.nans for each in differences)
    distance = f"largest |difference| {largest:.3g}{f', {nans:,} NaN' if nans else ''}"
    yield f"  {name}   {first.count}{block}{printable(spelled(reason, words))}; {distance}"
    values = [_value_text(bits or "", first.dtype) for bits in (first.found, first.expected)]
    width = max(map(len, values))
    yield f"    {values[0]:{width}}  {printable(near(first.path or ''))} {shape_text(first.index_in_block or ())}"
    yield f"    {values[1]:{width}}  {printable(near(first.reference or ''))}"
    if others:
        files = [f"{near(other.path or '')} ({other.count:,})" for other in others]
        more = f", and {len(files) - _MOST_FILES} more" if len(files) > _MOST_FILES else ""
        yield f"    differs in {printable(', '.join(files[:_MOST_FILES]))}{more}, too"
    if verification.against and not reason and differences[-1].side == "source":
        yield f"    replicas inside {printable(near(verification.against))} differ from each other"


def _value_text(bits: str, dtype: str | None) -> str:
    """Return an element as hexadecimal digits and as its value.

    >>> _value_text("3f800000", "float32")
    '0x3f800000 (1.0)'
    """
    if dtype is None:
        return f"0x{bits}"
    import numpy as np

    kind = BY_NAME[dtype]
    value = np.array([int(bits, 16)], kind.carrier()).view(kind.numpy())[0]
    return f"0x{bits} ({value!s})"


def below(path: str, root: str | None) -> str:
    """Return a path relative to a directory, if it is below it."""
    return printable(path.removeprefix(f"{Path(root).absolute()}/") if root else path)


# --- data -------------------------------------------------------------------------------------------------------


def verdict_data(verification: Verification) -> dict[str, object]:
    """Return the result of a verification as plain data."""
    data = fields_data(
        verification, "target", "against", "step", "against_step", "equal", "changes", "note", "absent", "linked",
        "linked_summed_bytes", "complete", "ranks", "files", "tensors", "copies", "bytes_read", "total_bytes", "sample",
        "seconds", "dropped", "left_out", "warnings", "unchecked", "independent",
    )  # fmt: skip
    data["complete"] = verification.complete and verification.equal
    data["differences"] = [_difference_data(difference) for difference in verification.differences]
    return data


def _difference_data(difference: Difference) -> dict[str, object]:
    return {
        **fields_data(difference, "kind", "text"),
        "tensor": difference.name,
        **fields_data(
            difference, "side", "rank", "path", "block", "index", "index_in_block", "count", "found", "expected",
            "reference", "dtype",
        ),
        "largest": None if difference.largest is None or not isfinite(difference.largest) else difference.largest,
        "nans": difference.nans,
    }  # fmt: skip
