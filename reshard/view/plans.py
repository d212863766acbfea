"""Plans and reports: a summary as text, all facts as text and as a page, and plain data."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from reshard.core.format import format_of
from reshard.core.layout.block import shape_text
from reshard.core.plan.changes import changes_of, described, left_out_text
from reshard.core.plan.uploads.sending import requests_of
from reshard.errors import Option, Text, bytes_text, joined, names, printable
from reshard.strategy.names import group_members
from reshard.view.pictures.flow import plan_picture
from reshard.view.pictures.task_stream import task_stream, task_sums
from reshard.view.pictures.thumbnails import Thumbnails
from reshard.view.sections import MOST_ROWS, Facts, Names, Note, Table, details, lines, markup, page, warnings_of
from reshard.view.svg import Markup, join, tag
from reshard.view.text import (
    count_text,
    fields_data,
    kinds_text,
    list_text,
    looked_text,
    near,
    of_ranks,
    plain,
    source_lines,
)
from reshard.view.words import cut_words

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.plan.plan import Plan, Transfer
    from reshard.core.run.graph import Graph
    from reshard.core.run.settings import Report
    from reshard.core.target import TargetFile
    from reshard.view.sections import Section

_MOST_FILES = 8


# --- plans ------------------------------------------------------------------------------------------------------


def plan_text(plan: Plan, directory: str, *, verbose: bool = False, then: str | None = None) -> str:
    """Describe a plan before it runs, with all facts if it is `verbose`, and `then`, the command to type next."""
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


def _plan_facts(plan: Plan) -> Facts:
    stats = plan.stats
    more = f", {stats.read_amplification:.2f} x what is needed" if stats.read_amplification > 1 else ""
    whole = "each writing whole files" if plan.by_file else f"bands of up to {bytes_text(plan.band_bytes)}"
    return Facts([
        ("tensors", f"{stats.tensors:,}", ""),
        ("read", bytes_text(stats.bytes_read), f"{count_text(stats.source_files, 'file')}{more}"),
        ("write", bytes_text(stats.target_bytes),
         f"{count_text(stats.target_files, 'file')}{of_ranks(', ', plan.ranks)}{_encrypted(plan)}"),
        ("tasks", f"{stats.tasks:,}", whole),
        ("memory", bytes_text(stats.peak_memory), f"at the peak, {count_text(plan.threads, 'thread')}"),
    ])  # fmt: skip


def _plan_table(plan: Plan, directory: str) -> list[str]:
    """Write all facts of a plan."""
    first, *more = source_lines(plan.source)
    files = [f"{printable(f'{directory}/{f.path}')}  {bytes_text(plan.size_of(f))}" for f in plan.files[:_MOST_FILES]]
    if len(plan.files) > _MOST_FILES:
        files.append(f"and {len(plan.files) - _MOST_FILES:,} more")
    to = f"{printable(directory)}: {_written_text(plan)}{of_ranks(', ', plan.ranks)}"
    return [
        *_titled("from", [first, *more]),
        *_titled("to", [to]),
        *lines(_plan_facts(plan)),
        *_titled("changed", [changed_text(plan)]),
        *_titled("requests", _requests_texts(plan, directory)),
        *_differing(plan),
        *_titled("files", files),
    ]


def _titled(title: str, texts: Sequence[str | Text]) -> list[Text]:
    """Return lines in the form of facts; the first has the title."""
    return [Text(f"{'' if number else title:<8} ", text) for number, text in enumerate(texts) if text]


def _differing(plan: Plan) -> list[Text]:
    """Write the tensors that are on one side only, and what was sampled of the source."""
    return [
        *_titled("left out", _left_out(plan)),
        *_titled("dropped", [list_text(plan.dropped)] if plan.dropped else []),
        *_titled("missing", [list_text(plan.missing)] if plan.missing else []),
        *_titled("sampled", [looked_text(plan.source.opening.looked) or ""]),
    ]


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
    kinds = [plan.format for file in plan.files if plan.shape == "store" or file.publish == "file"]
    if target is not None and target.called:
        files = count_text(len(plan.files), "file") if target.encoding else kinds_text(kinds)
        return f"{target.called} of {files}"
    written = kinds_text(kinds, index=len(kinds) < len(plan.files))
    sidecars = sum(file.publish != "file" for file in plan.files) - 1
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
    if plan.shape == "file":
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


def plan_html(plan: Plan) -> str:
    """Show a plan: its costs, the flow of its bytes, and dropped and missing tensors."""
    changed = changed_text(plan)
    left_out = [*plan.left_out, *sorted(plan.source.left_out)]

    def file_row(file: TargetFile) -> Sequence[str]:
        link = f"link to {file.link}" if file.link else ""
        return f"{file.rank}", file.path, bytes_text(plan.size_of(file)), link

    files = [file_row(file) for file in plan.files]
    sections: list[Section] = [
        _plan_facts(plan),
        *([Note(f"changed: {changed}")] if changed else []),
        details("What goes where", plan_picture(plan).html(), opened=True),
        _transfers(plan),
        Table("Target files", ("rank", "file", "bytes", ""), files, "file", wrap="file"),
        Names("Left out", left_out, "not chosen"),
        *_dropped_and_missing(plan),
        *warnings_of(plan),
    ]
    to = f"to {count_text(plan.stats.target_files, f'{plan.format} file')}"
    return page(("Plan", plan.source.title, to), sections, repr(plan))


def graph_html(graph: Graph) -> str:
    """Show a graph: its tasks by kind and the flow of its bytes."""
    kinds = [(kind, f"{count:,}") for kind, count in graph.kinds().items()]
    picture = details("What goes where", plan_picture(graph.plan).html())
    writes = f"writes {count_text(len(graph.plan.files), 'file')} when it is computed"
    return page(("Graph", graph.directory, writes), [Table("", ("task", "count"), kinds), picture], repr(graph))


def _dropped_and_missing(subject: Plan | Report) -> list[Section]:
    return [
        Names("Dropped", subject.dropped, "in the source, not in the target"),
        Names("Missing", subject.missing, "in the target, not in the source"),
    ]


def _transfers(plan: Plan) -> Table:
    """Return a table of the transfers, with their cuts."""
    source, thumbnails = plan.source, Thumbnails()

    def row(transfer: Transfer) -> tuple[str, Shape, int, str, str]:
        recipe, dtype, target_dtype = transfer.recipe, transfer.dtype, transfer.target_dtype
        dtypes = f"{dtype}" if dtype == target_dtype else f"{dtype} → {target_dtype}"
        blocks = f"{len(recipe.sources):,} → {len(recipe.targets):,}"
        files = len({at.file for copies in transfer.route.writes for at in copies})
        return dtypes, recipe.shape, prod(recipe.shape) * dtype.itemsize, blocks, f"{files:,}"

    def cut(transfer: Transfer) -> Markup:
        tensor = source.tensors[transfer.source_name]
        read = thumbnails.of_tensor(source, tensor, cut_words(source, tensor))
        return join([read, tag("span", "→", class_="to"), thumbnails.of_target(plan, transfer.route)])

    keys = [row(transfer) for transfer in plan.transfers]
    first: dict[tuple[str, Hashable], Transfer] = {}
    for transfer, key in zip(plan.transfers, keys, strict=True):
        first.setdefault((transfer.name, key), transfer)
    folded = group_members((transfer.name, key) for transfer, key in zip(plan.transfers, keys, strict=True))
    rows = [
        (name, f"{len(members):,}", key[0], shape_text(key[1]), bytes_text(key[2] * len(members)),
         cut(first[members[0], key]) if number < MOST_ROWS else "", *key[3:])
        for number, (name, key, members) in enumerate(folded)
    ]  # fmt: skip
    single = [
        (transfer.name, key[0], shape_text(key[1]), bytes_text(key[2]), *key[3:])
        for transfer, key in zip(plan.transfers, keys, strict=True)
    ]
    return Table(
        "Tensors", ("tensor", "count", "dtype", "shape", "bytes", "cut", "blocks", "in files"), rows, most=MOST_ROWS,
        more=f"{plan.stats.tensors:,}", typed=[".picture(NAME)"], beside=thumbnails.symbols(),
        found=(("tensor", "dtype", "shape", "bytes", "blocks", "in files"), single),
    )  # fmt: skip


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


def _report_facts(report: Report) -> Facts:
    rate = f"{bytes_text(report.bytes_written / report.seconds)}/s, " if report.seconds else ""
    whole = not (report.resumed or report.finished)
    written = [count_text(len(report.files), "file")]
    written += [count_text(report.links, "link")] if report.links else []
    written += [f"{bytes_text(report.resumed)} before"] if report.resumed else []
    measured = bytes_text(report.peak_memory) if report.peak_memory else "not measured"
    replicas = f"{count_text(report.replicas, 'replica')} of blocks" if report.replicas else ""
    return Facts([
        ("tensors", f"{report.tensors:,}", replicas),
        ("read", bytes_text(report.bytes_read), count_text(report.source_files, "file")),
        ("written", bytes_text(report.target_bytes if whole else report.bytes_written), ", ".join(written)),
        ("time", f"{report.seconds:.2f} s", f"{rate}on {report.ran_on}"),
        ("memory", measured, f"at the peak; {bytes_text(report.predicted_memory)} predicted"),
    ])  # fmt: skip


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


def _details(plan: Plan, report: Report) -> list[str]:
    """Return the additional lines of `verbose`."""
    if report.checksums is None:
        sums = "none made"
    elif plan.shape == "file":
        sums = "CRC-32C of every block, not kept"
    else:
        sums = f"CRC-32C of every block, in {printable(near(report.directory))}/.reshard"
    return [
        *lines(_report_facts(report)),
        *_differing(plan),
        *_titled("sums", [sums]),
    ]


def report_html(report: Report) -> str:
    """Show the results of a run, and which thread did what when."""
    sums = Table("", ("task", "count", "read", "written", "time of all"), task_sums(report))
    tasks = details("Tasks", task_stream(report).html(), markup(sums), more=f"{len(report.receipts):,}")
    sections: list[Section] = [
        _report_facts(report),
        Table("Files", ("file",), [(path,) for path in report.files], "file"),
        tasks,
        *_dropped_and_missing(report),
        *warnings_of(report),
    ]
    return page(("Report", report.directory), sections, repr(report))


# --- data -------------------------------------------------------------------------------------------------------


def plan_data(
    plan: Plan, directory: str, report: Report | None = None, verify: str | None = None, check: str | None = None
) -> dict[str, object]:
    """Return a plan and the report of its run as plain data; keys of the report are null before the run.

    `verify` and `check` are commands, for the target and for its manifest.
    """
    checksums = report and report.checksums
    requests = requests_of(plan, directory)
    return {
        "dry_run": report is None,
        "source": plan.source.title,
        "step": plain(plan.source.opening.step),
        "target": directory,
        "format": plan.format,
        "encryption": plan.cipher and plan.cipher.mode,
        "ranks": plain(plan.ranks),
        **plain(plan.stats),
        **({"bytes_read": report.bytes_read, "bytes_copied": report.bytes_copied} if report else {}),
        "requests": requests and requests._asdict(),
        "partition": "file" if plan.by_file else "tensor",
        "read_amplification": plan.stats.read_amplification,
        "seconds": report and report.seconds,
        "ran_on": report and report.ran_on,
        **fields_data(plan, "dropped", "missing", "left_out"),
        "changes": plain(changes_of(plan)),
        "warnings": plain(plan.warnings),
        "sampled": plain(plan.source.opening.looked),
        "files": [{"rank": file.rank, "path": file.path, "nbytes": plan.size_of(file)} for file in plan.files],
        "replicas": plan.replicas,
        "links": sum(file.link is not None for file in plan.files),
        "measured_memory": report and report.peak_memory,
        "checksums": None if checksums is None else {
            path: {name: f"{checksum:08x}" for name, checksum in tensors.items()}
            for path, tensors in checksums.items()
        },
        "resumed": report and report.resumed,
        "finished": report and report.finished,
        "removed": report and plain(report.removed),
        "verify": report and verify,
        "manifest": report and check,
    }  # fmt: skip
