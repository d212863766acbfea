"""What is shown, in words that fit on a terminal.

1. Pieces: sizes, counts, tables, names that are safe to print. Names come from files that nobody vouches for, so every
   one goes through `errors.printable` before it may reach a terminal.
2. Strategies, plans, reports of runs and verdicts of verifications; names that repeat are folded (`strategy.names`), as
   a table of ten thousand tensors says nothing. Tables of tensors are in `tables`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.dtypes import BY_NAME
from reshard.errors import PYTHON, Option, Text, bytes_text, joined, names, printable, spelled
from reshard.formats.sets import DCP_NAME
from reshard.formats.zarr import NAME as ZARR
from reshard.layout.block import shape_text
from reshard.plan.changes import changes_of, described
from reshard.strategy.names import group_names, ranges_text
from reshard.view.words import layout_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.errors import Words
    from reshard.formats.rank_dirs import Step
    from reshard.layout.layout import Layout
    from reshard.plan.plan import Plan
    from reshard.run.run import Report
    from reshard.source.checkpoint import Looked, Sharding, SourceFile, Tensor
    from reshard.strategy.strategy import Strategy
    from reshard.verify.difference import Difference
    from reshard.verify.verification import Verification


_MOST_NAMES = 10


def count_text(number: int, noun: str) -> str:
    """Write how many of something there are.

    >>> count_text(1, "file"), count_text(12_000, "tensor")
    ('1 file', '12,000 tensors')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def shortened(name: str, room: int) -> str:
    """Cut a name in its middle.

    >>> shortened("model.layers.{0-31}.attention.wq.weight", 24)
    'model.layer....wq.weight'
    """
    if len(name) <= room:
        return name
    tail = (room - 3) // 2
    return f"{name[: room - 3 - tail]}...{name[-tail:]}"


def list_text(found: Sequence[str]) -> str:
    """Return how many names there are, and the first few of them, folded."""
    return f"{count_text(len(found), 'name')}: {_folded(found, _MOST_NAMES)}"


def _folded(found: Iterable[str], most: int) -> str:
    """Return names, folded, the first few of many."""
    folded = [printable(name) for name, _, _ in group_names((name, None) for name in found)]
    more = f" and {len(folded) - most:,} more" if len(folded) > most else ""
    return f"{', '.join(folded[:most])}{more}"


LEGEND = """\
layout: [extents of the device axes] map [the axis that cuts each dimension:
0 is the last, -1 none] opt N: rows are cut once more for the optimizer, into
N pieces or, with -1, into one for each rank that would hold the same"""
"""What the text of a layout means."""


def raw_text(layout: Layout) -> str:
    """Write a layout in the numbers of a strategy file.

    >>> from reshard.layout.layout import Layout
    >>> raw_text(Layout.of([2, 4], [1, -1]))
    '[2, 4] map [1, -1]'
    """
    text = str(layout)
    if layout.param_split_shape:
        text += f" rows {shape_text(layout.param_split_shape)}"
    return f"{text} field {layout.field}" if layout.field else text


def groups_of(strategy: Strategy) -> dict[tuple[int, Layout], list[str]]:
    """Return the tensors of each layout, by stage."""
    groups: dict[tuple[int, Layout], list[str]] = {}
    for name, placed in strategy.by_stage():
        groups.setdefault((placed.stage, placed.layout), []).append(name)
    return groups


def strategy_text(strategy: Strategy, title: str, *, raw: bool = False) -> str:
    """Write a strategy: its devices, stages and ranks, and the tensors of each layout, folded.

    Args:
        strategy: what is shown.
        title: the name of its file.
        raw: write the device matrix and tensor map of each layout, too.

    >>> from reshard.layout.layout import Layout
    >>> from reshard.strategy.strategy import Strategy
    >>> print(strategy_text(Strategy.of({f"h.{i}.w": Layout.of([2], [0, -1]) for i in range(4)}), "s.ckpt"))
    s.ckpt: 4 tensors over 2 ranks (0-1): 1 stage of 2 devices
    <BLANKLINE>
    rows / 2
      h.{0-3}.w  (4 tensors)
    """
    stages = count_text(len(strategy.stages), "stage")
    if strategy.others:
        stages = f"stage {strategy.stages.start} of a longer pipeline,"
    lines = [
        (
            f"{printable(title)}: {count_text(len(strategy.tensors), 'tensor')} over "
            f"{count_text(len(strategy.ranks), 'rank')} ({ranges_text(strategy.ranks)}): "
            f"{stages} of {count_text(strategy.devices, 'device')}"
        )
    ]
    several = len(strategy.stages) > 1
    groups: dict[tuple[int, str], list[str]] = {}
    for (stage, layout), members in groups_of(strategy).items():
        words = f"{layout_words(layout)}   # {raw_text(layout)}" if raw else layout_words(layout)
        groups.setdefault((stage, words), []).extend(members)
    for (stage, words), members in groups.items():
        lines += ["", f"stage {stage}: {words}" if several else words]
        for name, _, count in group_names((name, None) for name in members):
            lines.append(f"  {printable(name)}" + (f"  ({count_text(count, 'tensor')})" if count > 1 else ""))
    return "\n".join([*lines, "", *LEGEND.splitlines()] if raw else lines)


def kinds_text(formats: Iterable[str], *, index: bool = False) -> str:
    """Write how many files of which formats there are; those of a zarr store as one.

    >>> kinds_text(["ckpt", "ckpt"]), kinds_text(["safetensors"], index=True), kinds_text(["zarr"] * 31)
    ('2 ckpt files', '1 safetensors file and its index', 'a zarr store of 31 files')
    """
    counted = Counter(formats)
    if counted.keys() == {ZARR}:
        return f"a zarr store of {count_text(counted[ZARR], 'file')}"
    files = " and ".join(count_text(count, f"{kind} file") for kind, count in sorted(counted.items()))
    its = "its" if counted.total() == 1 else "their"
    return f"{files} and {its} index" if index else files


def of_ranks(before: str, ranks: Iterable[int]) -> str:
    """Write whose files there are, behind how many; nothing of rank 0 alone, who has whole tensors.

    >>> of_ranks(", ", [0, 1, 1, 2]), of_ranks(" for ", [3]), of_ranks(" for ", [0])
    (', 3 ranks (0-2)', ' for rank 3', '')
    """
    distinct = sorted(set(ranks))
    if len(distinct) == 1:
        return f"{before}rank {distinct[0]}" if distinct[0] else ""
    return f"{before}{count_text(len(distinct), 'rank')} ({ranges_text(distinct)})"


def source_lines(title: str, files: Sequence[SourceFile], ranks: Sequence[int], step: Step | None) -> list[str]:
    """Write what a checkpoint is read from: which of several, and the files that it has."""
    nbytes = bytes_text(sum(file.nbytes for file in files))
    kinds = f"{kinds_text(file.index.format for file in files)}{of_ranks(', ', ranks)}, {nbytes}"
    title = f"{printable(title)}: "
    return [Text(title, kinds)] if step is None else [Text(title, step.text()), kinds]


def _written_text(plan: Plan) -> str:
    """Write what files a plan writes."""
    kinds = [plan.format for file in plan.files if plan.exclusive or not file.last]
    if plan.format != DCP_NAME and any(file.pointer for file in plan.files):
        return f"a Checkpoint 2.0 of {kinds_text(kinds)}"
    return kinds_text(kinds, index=len(kinds) < len(plan.files))


def looked_text(looked: Looked | None) -> str | None:
    """Write how much of the contents was looked at when a checkpoint was opened; None where nothing is left to be said.

    >>> from reshard.source.checkpoint import Looked
    >>> looked_text(Looked(2, 10, 4, 1, 70))
    '2 of 10 tensors; 4 of 70 replicas, 1 of them bit for bit; verify compares all'
    >>> looked_text(Looked(10, 10, 70, 70, 70))
    'all 10 tensors; all 70 replicas, bit for bit'
    """
    if looked is None or (looked.tensors == looked.of_tensors and not looked.of_copies):
        return None
    tensors = count_text(looked.of_tensors, "tensor")
    every = "all " if looked.of_tensors > 1 else ""
    parts = [f"{every}{tensors}" if looked.tensors == looked.of_tensors else f"{looked.tensors:,} of {tensors}"]
    if looked.of_copies:
        copies = count_text(looked.of_copies, "replica")
        some = f"all {copies}" if looked.copies == looked.of_copies else f"{looked.copies:,} of {copies}"
        whole = "bit for bit" if looked.whole == looked.copies else f"{looked.whole:,} of them bit for bit"
        parts.append(f"{some}, {whole}")
    if looked.tensors < looked.of_tensors or looked.whole < looked.of_copies:
        parts.append("verify compares all")
    return "; ".join(parts)


def shards_text(tensor: Tensor, known: dict[Sharding, str]) -> str:
    """Write how many blocks and how many copies of each there are; tensors share their sharding, so once for all."""
    sharding = tensor.sharding
    if sharding not in known:
        copies = sorted({len(replicas) for replicas in sharding.replicas} or {1})
        replicas = f"{copies[0]}" if len(copies) == 1 else f"{copies[0]}-{copies[-1]}"
        known[sharding] = f"{max(len(sharding.blocks), 1)} x {replicas}"
    return known[sharding]


_MOST_FILES = 8


def plan_text(plan: Plan, directory: str, *, verbose: bool = False, then: str | None = None) -> str:
    """Write what a plan would do.

    Args:
        plan: what would be run.
        directory: where it would write.
        verbose: write everything there is to say of it.
        then: what to type next.
    """
    commands = [f"next: {printable(then)}"] if then else []
    if verbose:
        return joined("\n", [*_plan_table(plan, directory), *commands])
    stats = plan.stats
    files = f"{count_text(len(plan.source.files), 'file')} of {printable(near(plan.source.root))}"
    reads = f"reads {bytes_text(stats.bytes_read)} from {stats.source_files:,} of {files}"
    return joined(
        "\n",
        [
            f"would {_written(plan, directory, write='write', link='link')}",
            *_step_lines(plan),
            f"  {_tensors_text(plan)}; {reads}; about {bytes_text(stats.peak_memory)} of memory",
            *_changed_lines(plan),
            *commands,
        ],
    )


def _plan_table(plan: Plan, directory: str) -> list[Text]:
    """Write everything there is to say of a plan."""
    stats = plan.stats
    source, needed = plan.source, stats.read_amplification
    first, *more = source_lines(source.root, source.files, source.ranks, source.opening.step)
    more_than_needed = f", {needed:.2f} x what is needed" if needed > 1 else ""
    rows = [
        ("from", first),
        *(("", line) for line in more),
        ("to", f"{printable(directory)}: {_written_text(plan)}{of_ranks(', ', plan.ranks)}"),
        ("tensors", f"{stats.tensors:,}"),
        *([("changed", changed)] if (changed := changed_text(plan)) else []),
        ("read", f"{bytes_text(stats.bytes_read)} from {count_text(stats.source_files, 'file')}{more_than_needed}"),
        (
            "write",
            f"{bytes_text(stats.target_bytes)} to {count_text(stats.target_files, 'file')}"
            + (f", encrypted by {plan.cipher.mode}" if plan.cipher else ""),
        ),
        ("tasks", f"{stats.tasks:,}{', each writing whole files' if plan.by_file else ''}"),
        ("memory", f"about {bytes_text(stats.peak_memory)} at the peak"),
        *(("left out", text) for text in _left_out(plan)),
        *((title, list_text(some)) for title, some in (("dropped", plan.dropped), ("missing", plan.missing)) if some),
    ]
    if looked := looked_text(plan.source.opening.looked):
        rows.append(("sampled", looked))
    for number, file in enumerate(plan.files[:_MOST_FILES]):
        path = printable(f"{directory}/{file.path}")
        rows.append(("" if number else "files", f"{path}  {bytes_text(plan.size_of(file))}"))
    if len(plan.files) > _MOST_FILES:
        rows.append(("", f"and {len(plan.files) - _MOST_FILES:,} more"))
    return [Text(f"{title:<8} ", text) for title, text in rows]


def changed_text(plan: Plan) -> str:
    """Write what a plan changes of names and values."""
    return printable(described(changes_of(plan)))


def _changed_lines(plan: Plan) -> list[str]:
    return [f"  changed: {text}"] if (text := changed_text(plan)) else []


def _step_lines(plan: Plan) -> list[Text]:
    """Write which of several checkpoints is read, if there are several."""
    step = plan.source.opening.step
    return [Text("  from ", printable(near(plan.source.root)), ": ", step.text())] if step else []


def _tensors_text(plan: Plan) -> str:
    """Write how many tensors are converted, and how many are not."""
    others = {"left out": plan.left_out, "dropped": plan.dropped, "missing": plan.missing}
    text = ", ".join(f"{len(some):,} {title}" for title, some in others.items() if some)
    return count_text(plan.stats.tensors, "tensor") + (f" ({text})" if text else "")


def _written(plan: Plan, directory: str, *, write: str, link: str) -> str:
    """Write what files a plan writes, and where, with verbs for that."""
    place = printable(near(directory))
    if plan.linked:
        files = count_text(sum(file.link is not None for file in plan.files), "data file")
        own = names([f"{file.path} ({bytes_text(plan.size_of(file))})" for file in plan.files if file.link is None])
        return f"{link} {files} of {printable(near(plan.source.root))} and {write} {own} to {place}"
    encrypted = f", encrypted by {plan.cipher.mode}" if plan.cipher else ""
    if plan.alone:
        return f"{write} {place.rstrip('/')}/{printable(plan.files[0].path)}{encrypted}".replace(" ./", " ")
    ranks = sorted(set(plan.ranks))
    of = f" for {count_text(len(ranks), 'rank')}" if ranks == list(range(len(ranks))) and len(ranks) > 1 else None
    return f"{write} {_written_text(plan)}{of or of_ranks(' for ', ranks)} to {place}{encrypted}"


def _left_out(plan: Plan) -> list[Text]:
    """Write by which options how many tensors of the source are left out, if any are."""
    if not (plan.left_out and plan.request):
        return []
    asked = plan.request.selection
    given = {
        Option("weights_only"): asked.weights_only,
        Option("include"): asked.include,
        Option("exclude"): asked.exclude,
    }
    options = joined(" and ", [Text(option) for option, value in given.items() if value])
    return [Text("by ", options, f": {list_text(plan.left_out)}")]


def report_text(
    plan: Plan, report: Report, then: str | None = None, manifest: str | None = None, *, verbose: bool = False
) -> str:
    """Write in words what a run did: what was written, how it was checked, and what to type next.

    Args:
        plan: what was run.
        report: what came of it.
        then: what to type next.
        manifest: the manifest that was written, and what is in it.
        verbose: write everything there is to say of it.
    """
    commands = [f"next: {printable(then)}"] if then else []
    if report.finished == len(report.files):
        place = printable(near(report.directory))
        first = f"nothing is left to do: {_written_text(plan)} in {place}, finished by an earlier run"
    else:
        whole = not (report.resumed or report.finished)
        nbytes = bytes_text(report.target_bytes if whole else report.bytes_written)
        first = f"{_written(plan, report.directory, write='wrote', link='linked')}   {nbytes} in {report.seconds:.2f} s"
    facts = [_checked_text(plan, report)]
    if report.resumed and report.finished < len(report.files):
        facts.append(f"resumed from {bytes_text(report.resumed)} that an earlier run wrote")
    if report.finished:
        facts.append(_unread_text(report, then))
    if report.removed:
        removed = f"{count_text(len(report.removed), 'file')} of earlier runs: {names(report.removed, most=3)}"
        facts.append(f"removed {removed}")
    if manifest:
        facts.append(f"manifest: {printable(manifest)}")
    lines: list[str] = [*_step_lines(plan), *(f"  {fact}" for fact in facts), *_changed_lines(plan)]
    if verbose:
        lines += [Text("  ", text) for text in _details(plan, report)]
    return joined("\n", [first, *lines, *commands])


def _checked_text(plan: Plan, report: Report) -> str:
    """Write of how many tensors there are checks, which, and the peak of memory."""
    parts = [_tensors_text(plan)]
    looked = plan.source.opening.looked
    if looked and looked.of_copies:
        every = "all" if looked.copies == looked.of_copies else f"{looked.copies:,} of"
        parts.append(f"{every} {count_text(looked.of_copies, 'replica')} sampled")
    if report.finished < len(report.files):
        if report.checksums is not None:
            parts.append("every block checksummed")
        parts.append(f"peak memory {bytes_text(report.peak_memory)}")
    return "; ".join(parts)


def _details(plan: Plan, report: Report) -> Iterable[str]:
    """Yield what else there is to say of a run."""
    rate = f" ({bytes_text(report.bytes_written / report.seconds)}/s)" if report.seconds else ""
    written = f"{bytes_text(report.bytes_written)} of contents in {report.seconds:.2f} s{rate}"
    yield f"read {bytes_text(report.bytes_read)} from {count_text(report.source_files, 'file')}, wrote {written}"
    replicas = f"{count_text(report.replicas, 'replica')} of blocks" if report.replicas else ""
    links = f"{count_text(report.links, 'file')} linked" if report.links else ""
    if replicas or links:
        yield ", ".join(filter(None, (replicas, links)))
    yield from (Text("left out ", text) for text in _left_out(plan))
    gone = {
        "dropped, because the target does not have it": report.dropped,
        "missing, because the source does not have it": report.missing,
    }
    yield from (f"{title}: {list_text(some)}" for title, some in gone.items() if some)
    if looked := looked_text(plan.source.opening.looked):
        yield f"sampled, when the source was opened: {looked}"
    yield f"checksums: {_checksums_text(plan, report)}"


def _unread_text(report: Report, then: str | None) -> str:
    """Return that what the contents of finished files are now is not known: they may have rotted on the disk."""
    how = "the command below" if then and " verify " in then else "reshard verify"
    kept = f"{count_text(report.finished, 'file')} kept, finished by an earlier run"
    return f"{kept} and not read again: {how} reads every bit"


def _checksums_text(plan: Plan, report: Report) -> str:
    if report.checksums is None:
        return "none made"
    if plan.alone:
        return "CRC-32C of every block, not kept"
    return f"CRC-32C of every block, in {printable(near(report.directory))}/.reshard"


_MOST_SHOWN = 6  # of up to two lines each
_MOST_MISSING = 6
_ITSELF = "what it carries of itself (checksums, replicas)"


def verdict_text(
    found: Verification, words: Words = PYTHON, every_one: str = "`differences`", *, verbose: bool = False
) -> str:
    """Write in words what was verified, and what is not as it should be.

    Args:
        found: the result.
        words: how options are written.
        every_one: where more differences are than are shown.
        verbose: write everything there is to say of it.
    """
    target = printable(near(found.target))
    lines = [spelled(summary(found), words) if found.differences else f"verified: {target} {conclusion(found)}"]
    if found.note:
        lines.append(f"  {printable(spelled(found.note, words)).replace(f'{Path.cwd()}/', '')}")
    for side, step in (("target", found.step), ("source", found.against_step)):
        if step is not None:
            lines.append(f"  {side}: {spelled(step.text(side), words)}")
    if found.independent:
        files = count_text(found.independent, "file")
        lines.append(f"  {files} read with Hugging Face's safetensors library, not with reshard's reader")
    if found.sample is not None:
        again = spelled(Text("for the same again: ", Option("seed", found.seed)), words)
        lines.append(f"  a random sample, {_share(found):.3g} % of the bytes; {again}")
    absent = "not in the target, which need not have it"
    for title, some in ((absent, found.dropped), ("in the target, and not asked for", found.left_out)):
        if some:
            lines.append(f"  {title}: {_folded(some, _MOST_MISSING)}")
    lines += _differences_lines(found, words, every_one)
    if verbose:
        lines += [f"  {text}" for text in _verified_details(found)]
    return "\n".join(lines)


def _verified_details(found: Verification) -> Iterable[str]:
    """Yield what was looked at, and what was not."""
    files = count_text(found.files, "file")
    ranks = of_ranks(" of ", found.ranks) if found.ranks else ""
    blocks = "blocks compared" if found.ranks and found.against else "blocks of them"
    yield f"{count_text(found.tensors, 'tensor')}, {found.copies:,} {blocks}; {files}{ranks}"
    if found.bytes_read:
        rate = f" ({bytes_text(found.bytes_read / found.seconds)}/s)" if found.seconds else ""
        yield f"read {bytes_text(found.bytes_read)} in {found.seconds:.2f} s{rate}"
    if found.unchecked:
        yield f"not compared: {'; '.join(found.unchecked)}"


def summary(found: Verification) -> str:
    """Return one sentence of what differs.

    >>> from reshard.verify.difference import Difference
    >>> from reshard.verify.verification import Comparison, Verification
    >>> one = Difference("size", "has 7 bytes; expected 8", path="rank_0/a.ckpt")
    >>> summary(Verification("dst", compared=Comparison("m.json"), differences=(one,)))
    'dst differs from m.json: 1 of 1 file'
    """
    tensors = {one.name for one in found.differences if one.name is not None}
    files = {one.path for one in found.differences if one.path is not None}
    target, against = printable(near(found.target)), _ITSELF
    if found.against:
        against = _after_changes(found, found.against)
    dtypes = {(one.found, one.expected) for one in found.differences if one.kind == "dtype"}
    others = any(one.kind not in {"dtype", "missing", "extra"} for one in found.differences)
    if found.against and len(dtypes) == 1 and not others:
        ((actual, expected),) = dtypes
        cast = count_text(sum(one.kind == "dtype" for one in found.differences), "tensor")
        what = f"{actual} in {target}, {expected} in {against}"
        return f"{target} and {against} cannot be compared bit for bit: {cast}, {what}"
    count = count_text(len(found.differences), "difference")
    if tensors:
        count = f"{len(tensors):,} of {count_text(max(found.tensors, len(tensors)), 'tensor')}"
    elif files:
        count = f"{len(files):,} of {count_text(max(found.files, len(files)), 'file')}"
    return f"{target} differs from {against}: {count}"


def conclusion(found: Verification) -> str:
    """Return in a few words what was found; what follows "= " is what the target is."""
    if found.differences:
        return f"{summary(found).removeprefix(printable(near(found.target))).strip()}"
    if found.against is None and found.bytes_read:
        return "is complete and valid; its contents have the checksums that its files carry"
    if found.against is None:
        return _alone_text(found)
    if not found.ranks:
        return f"is as the manifest {printable(near(found.against))} says; {_every(found)}"
    if found.by_checksums:
        return f"has the sizes and checksums of its ledger, in {count_text(found.files, 'file')}"
    return _equal_text(found, found.against)


def _equal_text(found: Verification, against: str) -> str:
    """Return what a target is equal to, and how much of it was compared."""
    selected = any(one.kind == "selection" for one in found.changes)  # which says it
    rest = 0 if selected else len(found.left_out)
    others = f"; {count_text(rest, 'other')} in the target not compared" if rest else ""
    without = f", except {count_text(found.absent, 'block')} that no file has" if found.absent else ""
    return f"= {_after_changes(found, against)}; {_every(found)}{without}{others}"


def _after_changes(found: Verification, against: str) -> str:
    """Return what a target is made from, and what was changed of it on the way."""
    text = described(found.changes)
    return printable(f"{near(against)} after changes ({text})" if text else near(against))


def _every(found: Verification) -> str:
    """Return how much was compared."""
    how = "every bit" if found.sample is None else f"a random {_share(found):.3g} %"
    selected = ", ".join(one.text for one in found.changes if one.kind == "selection")
    return f"{how} of {count_text(found.tensors, 'tensor')}{f' ({selected})' if selected else ''}"


def _share(found: Verification) -> float:
    """Return which percentage of the bytes was compared."""
    return 100 * found.bytes_read / found.total_bytes if found.total_bytes else 100


def near(path: str) -> str:
    """Return a path as it is below the current directory, if it is there."""
    here = f"{Path.cwd()}/"
    return "." if f"{path}/" == here else path.removeprefix(here)


def _differences_lines(found: Verification, words: Words, every_one: str) -> Iterable[str]:
    """Yield the first differences; those of many tensors that are alike are one."""
    groups: dict[object, list[Difference]] = {}
    for number, one in enumerate(found.differences):
        key: object = number
        if one.kind == "dtype" or (one.kind in {"missing", "extra"} and one.path is None):
            key = one.kind, one.text
        elif one.kind == "values" and one.index is not None:
            key = one.kind, one.name
        groups.setdefault(key, []).append(one)
    shown = list(groups.values())[:_MOST_SHOWN]
    for one, *others in shown:
        if one.kind == "values" and one.index is not None:
            yield from _values_lines(sorted((one, *others), key=lambda each: each.side == "source"), found, words)
        elif others:
            folded = _folded((other.name or "" for other in (one, *others)), _MOST_MISSING)
            yield f"  {count_text(1 + len(others), 'tensor')}, {folded}: {one.text}"
        else:
            yield from _difference_lines(one, found, words)
    if rest := list(groups.values())[_MOST_SHOWN:]:
        more = {one.name for some in rest for one in some}
        noun = "difference" if None in more else "tensor"
        yield f"  and {count_text(len(rest) if None in more else len(more), noun)} more; {every_one} lists all"


def _alone_text(found: Verification) -> str:
    """Return what was found of a checkpoint by itself; it is complete only if something says what it should have."""
    if not found.complete:
        headers = "has valid headers" + (", and contents have the checksums in the files" if found.bytes_read else "")
        return f"{headers}; nothing says {'how many ranks' if found.by_ranks else 'which tensors'} there should be"
    return "is complete and valid in structure; contents were not read"


def _difference_lines(one: Difference, found: Verification, words: Words) -> Iterable[str]:
    """Yield what differs, and in which files."""
    if one.name is None:
        yield f"  {below(one.path or '', found.target)}: {printable(spelled(one.text, words))}"
        return
    place = printable(near(one.path)) if one.path is not None else ""
    kind = "object" if one.kind == "object" else "tensor"
    yield f"  {kind} {printable(one.name)}: {printable(spelled(one.text, words))}"
    if place:
        yield f"    {one.side}, {'' if one.rank is None else f'rank {one.rank}, '}{place}"


def _values_lines(every: Sequence[Difference], found: Verification, words: Words) -> Iterable[str]:
    """Yield the first element of a tensor that differs, as both files have it, and which other files differ."""
    one, *others = every
    block = f" of {count_text(one.block.size, 'element')} of this block" if one.block is not None else ""
    why = one.text.partition(f"expected 0x{one.expected}")[2]  # how two tensors became one
    name = f"{printable(one.name or '')}{shape_text(one.index or ())}"
    yield f"  {name}   {one.count}{block}{printable(spelled(why, words))}; {_distance_text(every)}"
    values = [_value_text(bits or "", one.dtype) for bits in (one.found, one.expected)]
    width = max(map(len, values))
    yield f"    {values[0]:{width}}  {printable(near(one.path or ''))} {shape_text(one.index_in_block or ())}"
    yield f"    {values[1]:{width}}  {printable(near(one.reference or ''))}"
    if others:
        files = [f"{near(other.path or '')} ({other.count:,})" for other in others]
        more = f", and {len(files) - _MOST_FILES} more" if len(files) > _MOST_FILES else ""
        yield f"    differs in {printable(', '.join(files[:_MOST_FILES]))}{more}, too"
    if found.against and not why and every[-1].side == "source":
        yield f"    replicas inside {printable(near(found.against))} differ from each other"


def _distance_text(every: Sequence[Difference]) -> str:
    """Write how far apart the values of a tensor are, and how many of them are NaN."""
    largest, nans = max(one.largest or 0 for one in every), sum(one.nans for one in every)
    nan = f", {nans:,} NaN" if nans else ""
    return f"largest |difference| {largest:.3g}{nan}"


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
    """Return a path as it is below a directory, where it is."""
    return printable(path.removeprefix(f"{Path(root).absolute()}/") if root else path)
