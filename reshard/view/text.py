"""Text and plain data of plans and runs, and the elements of all text: counts, names, tables.

Names come from untrusted files, so each goes through `errors.printable` before it is shown on a terminal. Repeated
names are folded (`strategy.names`), which keeps tables of thousands of tensors short.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from reshard.core.format import format_of, targets
from reshard.core.layout.block import Block
from reshard.core.plan.changes import changes_of, described, left_out_text
from reshard.core.plan.uploads.sending import requests_of
from reshard.errors import Option, Text, bytes_text, joined, names, printable
from reshard.strategy.names import group_names, ranges_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reshard.core.model.checkpoint import Checkpoint, SourceFile
    from reshard.core.model.facts import SampleStats
    from reshard.core.plan.plan import Plan
    from reshard.core.rank_files import Step
    from reshard.core.run.settings import Report

_MOST_NAMES = 10
_MOST_FILES = 8
_LEAST_NAME = 24
_WIDEST = 256  # longer cells do not widen their column

NUMBERS = frozenset({
    "Inf", "NaN", "blocks", "bytes", "count", "differing", "in files", "max", "max |A-B|", "mean", "mean |A-B|", "min",
    "norm", "parameters", "rank", "read", "relative", "size", "std", "tensors", "time of all", "written", "zeros",
})  # fmt: skip
"""The titles of columns of numbers, which tables in text and HTML align to the right."""


# --- elements ---------------------------------------------------------------------------------------------------


def count_text(number: int, noun: str) -> str:
    """Write a number and its noun, in the plural if needed.

    >>> count_text(1, "file"), count_text(12_000, "tensor")
    ('1 file', '12,000 tensors')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def shortened(name: str, room: int) -> str:
    """Shorten a name to `room` characters by cutting its middle.

    >>> shortened("model.layers.{0-31}.attention.wq.weight", 24)
    'model.layer....wq.weight'
    """
    if len(name) <= room:
        return name
    tail = (room - 3) // 2
    return f"{name[: room - 3 - tail]}...{name[-tail:]}"


def near(path: str) -> str:
    """Return a path, or the paths in the title of a computed checkpoint, relative to the current directory."""
    here = f"{Path.cwd()}/"
    return "." if f"{path}/" == here else path.removeprefix(here).replace(f" {here}", " ")


def list_text(tensors: Sequence[str]) -> str:
    """Write the number of names and the first of them, folded."""
    return f"{count_text(len(tensors), 'name')}: {folded_text(tensors, _MOST_NAMES)}"


def folded_text(tensors: Iterable[str], most: int) -> str:
    """Write the first `most` names, folded, and the number of the rest."""
    folded = [printable(name) for name, _, _ in group_names((name, None) for name in tensors)]
    more = f" and {len(folded) - most:,} more" if len(folded) > most else ""
    return f"{', '.join(folded[:most])}{more}"


def table_lines(
    header: Sequence[str], rows: Iterable[Sequence[str]], width: int | None = None, *, below: int = 0
) -> list[str]:
    """Return the lines of a table; columns of numbers are aligned to the right.

    Args:
        header: the titles; the first column holds names.
        rows: the cells.
        width: the longest line, or None for any length; names are cut in the middle, but not so that two are equal.
        below: the number of last columns that get lines of their own if the table is too wide; there are more of these
            if names would be equal.
    """
    lines = [tuple(header), *map(tuple, rows)]
    sizes = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if width is None or sum(sizes) + 2 * len(sizes) - 2 <= width:
        return _columns(header, lines)
    first = [line[0] for line in lines]
    for kept in range(len(header) - below, 0, -1):
        room = max(_LEAST_NAME, width - sum(sizes[1:kept]) - 2 * (kept - 1))
        cut = [shortened(name, room) for name in first]
        if len(set(cut)) == len(set(first)):
            break
    else:
        kept, cut = 1, first
    above = _columns(header[:kept], [(name, *line[1:kept]) for name, line in zip(cut, lines, strict=True)])
    under = _columns(header[kept:], [line[kept:] for line in lines])
    if max(map(len, under)) > width - 4:
        under = ["  ".join(line[kept:]) for line in lines]
    return [
        text
        for line, rest in zip(above, under, strict=True)
        for text in (line, *wrap(rest, width, initial_indent="    ", subsequent_indent="    "))
    ]


def fitting_lines(lines: Iterable[str], width: int | None) -> list[str]:
    """Return lines, those that are wider than a terminal broken at spaces; rows of `table_lines` fit already."""
    fitting: list[str] = []
    for line in lines:
        is_wide = width is not None and len(line) > width
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        fitting += wrap(line, width or 0, subsequent_indent=indent, break_on_hyphens=False) if is_wide else [line]
    return fitting


def _columns(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [min(_WIDEST, max(map(len, column))) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if title in NUMBERS else cell.ljust(width)
            for cell, width, title in zip(line, widths, header, strict=True)
        ).rstrip()
        for line in lines
    ]


def plain(value: object) -> Any:
    """Convert a value to plain data for JSON: named tuples and blocks to dicts, other sequences to lists.

    >>> from reshard.core.layout.block import Block
    >>> plain((Block((0, 4), (2, 8)), "w", None))
    [{'start': [0, 4], 'stop': [2, 8]}, 'w', None]
    """
    if isinstance(value, Block):
        return fields_data(value, "start", "stop")
    if isinstance(value, tuple | list):
        keys = getattr(value, "_fields", None)
        return fields_data(value, *keys) if keys else [plain(item) for item in value]
    return value


def fields_data(record: object, *names: str) -> dict[str, Any]:
    """Return attributes of a record as plain data."""
    return {name: plain(getattr(record, name)) for name in names}


# --- sources ----------------------------------------------------------------------------------------------------


def kinds_text(formats: Iterable[str], *, index: bool = False) -> str:
    """Count the files of each format; a zarr store counts as one.

    >>> kinds_text(["ckpt", "ckpt"]), kinds_text(["safetensors"], index=True), kinds_text(["zarr"] * 31)
    ('2 ckpt files', '1 safetensors file and its index', 'a zarr store of 31 files')
    """
    counted = Counter(formats)
    called = next((each.called for each in targets() if {each.name} == counted.keys()), "")
    if called:
        return f"{called} of {count_text(sum(counted.values()), 'file')}"
    files = " and ".join(count_text(count, f"{kind} file") for kind, count in sorted(counted.items()))
    its = "its" if counted.total() == 1 else "their"
    return f"{files} and {its} index" if index else files


def of_ranks(before: str, ranks: Iterable[int]) -> str:
    """Write the ranks of files after `before`, or "" for none, or rank 0 alone, which has whole tensors.

    >>> of_ranks(", ", [0, 1, 1, 2]), of_ranks(" for ", [3]), of_ranks(" for ", [0])
    (', 3 ranks (0-2)', ' for rank 3', '')
    """
    distinct = sorted(set(ranks))
    if len(distinct) <= 1:
        return f"{before}rank {distinct[0]}" if any(distinct) else ""
    return f"{before}{count_text(len(distinct), 'rank')} ({ranges_text(distinct)})"


def source_lines(source: Checkpoint) -> list[str]:
    """Describe a source: its title, step if known, files, ranks and size."""
    ranks = [] if source.opened.opening.computation else source.ranks
    return files_lines(source.title, source.stored_files, ranks, source.opening.step)


def files_lines(
    title: str, files: Sequence[tuple[int, SourceFile]], ranks: Sequence[int], step: Step | None
) -> list[str]:
    """Describe files, given the rank of each: their title, step if known, ranks and size."""
    nbytes = bytes_text(sum(file.nbytes for _, file in files))
    kinds = f"{kinds_text(file.index.format for _, file in files)}{of_ranks(', ', ranks)}, {nbytes}"
    title = f"{printable(title)}: "
    return [Text(title, kinds)] if step is None else [Text(title, step.text()), kinds]


def looked_text(looked: SampleStats | None) -> str | None:
    """Describe the content sampling done on open, or return None if there is nothing to report.

    >>> from reshard.core.model.facts import SampleStats
    >>> looked_text(SampleStats(2, 10, 4, 1, 70))
    '2 of 10 tensors; 4 of 70 replicas, 1 of them bit for bit; verify compares all'
    >>> looked_text(SampleStats(10, 10, 70, 70, 70))
    'all 10 tensors; all 70 replicas, bit for bit'
    """
    if looked is None or (looked.tensors == looked.of_tensors and not looked.of_copies):
        return None
    tensors = count_text(looked.of_tensors, "tensor")
    all_ = "all " if looked.of_tensors > 1 else ""
    parts = [f"{all_}{tensors}" if looked.tensors == looked.of_tensors else f"{looked.tensors:,} of {tensors}"]
    if looked.of_copies:
        replicas = count_text(looked.of_copies, "replica")
        sampled = f"all {replicas}" if looked.copies == looked.of_copies else f"{looked.copies:,} of {replicas}"
        whole = "bit for bit" if looked.whole == looked.copies else f"{looked.whole:,} of them bit for bit"
        parts.append(f"{sampled}, {whole}")
    if looked.tensors < looked.of_tensors or looked.whole < looked.of_copies:
        parts.append("verify compares all")
    return "; ".join(parts)


# --- plans ------------------------------------------------------------------------------------------------------


def plan_text(plan: Plan, directory: str, *, verbose: bool = False, then: str | None = None) -> str:
    """Describe a plan before it runs.

    Args:
        plan: the plan.
        directory: the target.
        verbose: write all facts.
        then: the command to type next.
    """
    commands = [f"next: {printable(then)}"] if then else []
    if verbose:
        return joined("\n", [*_plan_table(plan, directory), *commands])
    stats = plan.stats
    files = f"{count_text(len(plan.source.stored_files), 'file')} of {printable(near(plan.source.title))}"
    reads = f"reads {bytes_text(stats.bytes_read)} from {stats.source_files:,} of {files}"
    return joined(
        "\n",
        [
            f"would {_written(plan, directory, write='write', link='link')}",
            *_step_lines(plan),
            f"  {_tensors_text(plan)}; {reads}; about {bytes_text(stats.peak_memory)} of memory",
            *(Text("  ", text) for text in _requests_texts(plan, directory)),
            *_changed_lines(plan),
            *commands,
        ],
    )


def _plan_table(plan: Plan, directory: str) -> list[Text]:
    """Write all facts of a plan."""
    stats, source = plan.stats, plan.source
    first, *more = source_lines(source)
    amplification = stats.read_amplification
    more_than_needed = f", {amplification:.2f} x what is needed" if amplification > 1 else ""
    read = f"{bytes_text(stats.bytes_read)} from {count_text(stats.source_files, 'file')}{more_than_needed}"
    written = f"{bytes_text(stats.target_bytes)} to {count_text(stats.target_files, 'file')}{_encrypted(plan)}"
    files = [f"{printable(f'{directory}/{f.path}')}  {bytes_text(plan.size_of(f))}" for f in plan.files[:_MOST_FILES]]
    if len(plan.files) > _MOST_FILES:
        files.append(f"and {len(plan.files) - _MOST_FILES:,} more")
    rows: list[tuple[str, str | None]] = [
        ("from", first),
        *(("", line) for line in more),
        ("to", f"{printable(directory)}: {_written_text(plan)}{of_ranks(', ', plan.ranks)}"),
        ("tensors", f"{stats.tensors:,}"),
        ("changed", changed_text(plan)),
        ("read", read),
        ("write", written),
        *(("requests" if not n else "", text) for n, text in enumerate(_requests_texts(plan, directory))),
        ("tasks", f"{stats.tasks:,}{', each writing whole files' if plan.by_file else ''}"),
        ("memory", f"about {bytes_text(stats.peak_memory)} at the peak"),
        *(("left out", text) for text in _left_out(plan)),
        ("dropped", list_text(plan.dropped) if plan.dropped else None),
        ("missing", list_text(plan.missing) if plan.missing else None),
        ("sampled", looked_text(source.opening.looked)),
        *(("" if number else "files", text) for number, text in enumerate(files)),
    ]
    return [Text(f"{title:<8} ", text) for title, text in rows if text]


def changed_text(plan: Plan) -> str:
    """Describe the names and values that a plan changes, or return ""."""
    return printable(described(changes_of(plan)))


def _changed_lines(plan: Plan) -> list[str]:
    return [f"  changed: {text}"] if (text := changed_text(plan)) else []


def _step_lines(plan: Plan) -> list[Text]:
    """Write the step that is read, if the source has steps, or how the source is computed."""
    step = plan.source.opening.step
    if plan.source.opened.opening.computation:
        return [Text("  ", printable(near(plan.source.title)))]
    return [Text("  from ", printable(near(plan.source.root)), ": ", step.text())] if step else []


def _requests_texts(plan: Plan, directory: str) -> list[Text]:
    """Write the requests to object stores, and the bytes that a store copies."""
    requests = requests_of(plan, directory)
    if requests is None:
        return []
    counts = {"get": requests.get, "put": requests.put, "copy": requests.copy, "post": requests.post}
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.items() if count)
    others = f"about {kinds}, {requests.other:,} other requests" if kinds else f"about {requests.other:,} requests"
    lines = [Text(others)]
    if plan.stats.bytes_copied:
        share = f"{bytes_text(plan.stats.bytes_copied)} of {bytes_text(plan.stats.target_bytes)}"
        lines.append(Text(f"the store copies {share} itself (", Option("no_server_copy"), " sends them)"))
    return lines


def _tensors_text(plan: Plan) -> str:
    """Count the tensors that are converted, and the ones that are not."""
    left_out = left_out_text(plan.source, plan.left_out)
    parts = [f"{left_out} left out"] if left_out else []
    parts += [f"{len(n):,} {title}" for title, n in (("dropped", plan.dropped), ("missing", plan.missing)) if n]
    return count_text(plan.stats.tensors, "tensor") + (f" ({', '.join(parts)})" if parts else "")


def _encrypted(plan: Plan) -> str:
    return f", encrypted by {plan.cipher.mode}" if plan.cipher else ""


def _written_text(plan: Plan) -> str:
    """Count the target files by format."""
    target = format_of(plan.request.files) if plan.request else None
    kinds = [plan.format for file in plan.files if plan.exclusive or not file.last]
    if target is not None and target.called:
        files = count_text(len(plan.files), "file") if target.encoding else kinds_text(kinds)
        return f"{target.called} of {files}"
    written = kinds_text(kinds, index=len(kinds) < len(plan.files))
    sidecars = sum(file.last for file in plan.files) - 1
    has_sidecars = sidecars > 0 and (target is None or not target.describes)
    return f"{written}, and {count_text(sidecars, 'file')} beside" if has_sidecars else written


def _written(plan: Plan, directory: str, *, write: str, link: str) -> str:
    """Describe the target files of a plan after the verb `write`, and linked ones after `link`."""
    target = printable(near(directory))
    if plan.linked:
        files = count_text(sum(file.link is not None for file in plan.files), "data file")
        own_files = names(
            [f"{file.path} ({bytes_text(plan.size_of(file))})" for file in plan.files if file.link is None]
        )
        return f"{link} {files} of {printable(near(plan.source.root))} and {write} {own_files} to {target}"
    if plan.alone:
        path = f"{target.rstrip('/')}/{printable(plan.files[0].path)}"
        return f"{write} {path}{_encrypted(plan)}".replace(" ./", " ")
    ranks = sorted(set(plan.ranks))
    from_zero = len(ranks) > 1 and ranks == list(range(len(ranks)))
    of = f" for {count_text(len(ranks), 'rank')}" if from_zero else of_ranks(" for ", ranks)
    return f"{write} {_written_text(plan)}{of} to {target}{_encrypted(plan)}"


def _left_out(plan: Plan) -> list[Text]:
    """Write the tensors of the source that are left out, and the options that leave them out."""
    if not (plan.left_out and plan.request):
        return []
    options = [name for name in ("weights_only", "include", "exclude") if getattr(plan.request.selection, name)]
    used = joined(" and ", [Text(Option(name)) for name in options])
    return [Text("by ", used, f": {list_text(plan.left_out)}")]


# --- runs -------------------------------------------------------------------------------------------------------


def report_text(
    plan: Plan, report: Report, then: str | None = None, manifest: str | None = None, *, verbose: bool = False
) -> str:
    """Describe a finished run: its files, its checks and the next command.

    Args:
        plan: the plan that was run.
        report: the result.
        then: the command to type next.
        manifest: the manifest that was written, and its contents in words.
        verbose: write all facts.
    """
    if report.finished == len(report.files):
        target = printable(near(report.directory))
        first = f"nothing is left to do: {_written_text(plan)} in {target}, finished by an earlier run"
    else:
        nbytes = bytes_text(report.bytes_written if report.resumed or report.finished else report.target_bytes)
        first = f"{_written(plan, report.directory, write='wrote', link='linked')}   {nbytes} in {report.seconds:.2f} s"
    facts = [_checked_text(plan, report)]
    if report.resumed and report.finished < len(report.files):
        facts.append(f"resumed from {bytes_text(report.resumed)} that an earlier run wrote")
    if report.finished:  # their contents may have rotted on the disk since
        finished = f"{count_text(report.finished, 'file')} kept, finished by an earlier run"
        command = "the command below" if then and " verify " in then else "reshard verify"
        facts.append(f"{finished} and not read again: {command} reads every bit")
    if report.removed:
        removed = f"{count_text(len(report.removed), 'file')} of earlier runs: {names(report.removed, most=3)}"
        facts.append(f"removed {removed}")
    if manifest:
        facts.append(f"manifest: {printable(manifest)}")
    lines: list[str] = [*_step_lines(plan), *(f"  {fact}" for fact in facts), *_changed_lines(plan)]
    if verbose:
        lines += [Text("  ", text) for text in _details(plan, report)]
    if then:
        lines.append(f"next: {printable(then)}")
    return joined("\n", [first, *lines])


def _checked_text(plan: Plan, report: Report) -> str:
    """Write the number of tensors, the checks of the run and its peak memory."""
    parts = [_tensors_text(plan)]
    sampling = plan.source.opening.looked
    if sampling and sampling.of_copies:
        share = "all" if sampling.copies == sampling.of_copies else f"{sampling.copies:,} of"
        parts.append(f"{share} {count_text(sampling.of_copies, 'replica')} sampled")
    if report.finished < len(report.files):
        if report.bytes_copied:
            parts.append(f"{bytes_text(report.bytes_copied)} copied by the store, not read here")
        elif report.checksums is not None and not any(receipt.bytes_kept for receipt in report.receipts):
            parts.append("every block checksummed")
        parts.append(f"peak memory {bytes_text(report.peak_memory)}")
    if report.ran_on.startswith("cluster "):
        parts.append(f"ran on {report.ran_on}")
    return "; ".join(parts)


def _details(plan: Plan, report: Report) -> Iterator[str]:
    """Yield the additional lines of `verbose`."""
    rate = f" ({bytes_text(report.bytes_written / report.seconds)}/s)" if report.seconds else ""
    written = f"{bytes_text(report.bytes_written)} of contents in {report.seconds:.2f} s{rate}, on {report.ran_on}"
    yield f"read {bytes_text(report.bytes_read)} from {count_text(report.source_files, 'file')}, wrote {written}"
    replicas = f"{count_text(report.replicas, 'replica')} of blocks" if report.replicas else ""
    links = f"{count_text(report.links, 'file')} linked" if report.links else ""
    yield from filter(None, [", ".join(filter(None, (replicas, links)))])
    yield from (Text("left out ", text) for text in _left_out(plan))
    if report.dropped:
        yield f"dropped, because the target does not have it: {list_text(report.dropped)}"
    if report.missing:
        yield f"missing, because the source does not have it: {list_text(report.missing)}"
    if sampled := looked_text(plan.source.opening.looked):
        yield f"sampled, when the source was opened: {sampled}"
    if report.checksums is None:
        yield "checksums: none made"
    elif plan.alone:
        yield "checksums: CRC-32C of every block, not kept"
    else:
        yield f"checksums: CRC-32C of every block, in {printable(near(report.directory))}/.reshard"
