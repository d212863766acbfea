"""Which tensors of a source and a target are the same ones, and in what their headers differ.

Names, selections and dtypes are those of a conversion with the same options (`plan.select`). Two checkpoints of rank
directories that no strategy joins are matched rank by rank, as `convert` leaves them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from reshard.errors import Option, SourceError, Text
from reshard.formats.safetensors import NAME as SAFETENSORS
from reshard.formats.sets import DCP_ITEMS
from reshard.layout.block import shape_text
from reshard.plan.select import all_states, has_no_place, select
from reshard.source.assemble import assemble_whole
from reshard.source.replicas import Replicas, is_deduplicated
from reshard.strategy.names import matches
from reshard.verify.difference import Difference

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from reshard.plan.select import Selection
    from reshard.source.checkpoint import Checkpoint, Tensor
    from reshard.verify.difference import Kind


_ABSENT = "is in the source, not in the target"
_LACKS = Text(
    "is not in the file of this rank, which shall have it; if each replica is stored once, give ",
    Option("deduplicated"),
)


@dataclass(slots=True)
class Matched:
    """What was matched.

    Attributes:
        pairs: source and target name of the tensors that are alike in dtype and shape.
        differences: what headers tell.
        dropped: names of the source's tensors that the target need not have, and has not.
        left_out: names of the target's tensors that were not asked for.
        warnings: what should be known though it is not a difference.
        absent: blocks that are in no file of one side, and cannot be compared.
    """

    pairs: list[tuple[str, str]] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    absent: int = 0


def pairs_of_ranks(source: Checkpoint, target: Checkpoint) -> Iterator[tuple[Checkpoint, Checkpoint, int | None]]:
    """Yield what is compared with what: the two checkpoints, or, where no strategy joins their ranks, rank by rank.

    With each pair comes its rank; None with the two checkpoints.
    """
    if source.tensors and target.tensors:
        yield source, target, None
        return
    for one, what, other in ((source, "source", target), (target, "target", source)):
        if not one.tensors and (other.tensors or set(source.ranks) != set(target.ranks)):
            raise SourceError(
                f"{one.root} has {len(set(one.ranks))} ranks, and nothing says how they were sharded",
                code="no-layout",
                hint=Text("pass ", Option("strategy").of(what), ", or ", Option("layout", "*", "RULE").of(what)),
            )
    for rank in sorted(set(source.ranks)):
        yield _of_rank(source, rank), _of_rank(target, rank), rank


def _of_rank(checkpoint: Checkpoint, rank: int) -> Checkpoint:
    """Return what one rank holds, as a checkpoint of whole tensors whose files are numbered as before."""
    numbers = _numbers(checkpoint, rank)
    files = [checkpoint.files[number] for number in numbers]
    tensors = assemble_whole(checkpoint.root, checkpoint.files, checkpoint.ranks, numbers)
    unreadable = {name: reason for file in files for name, reason in file.index.unreadable}
    return replace(checkpoint, tensors=tensors, unreadable=unreadable)


def _numbers(checkpoint: Checkpoint, rank: int | None) -> list[int]:
    """Return the numbers of the files of a rank; None means all."""
    return [number for number, other in enumerate(checkpoint.ranks) if rank in {None, other}]


def match(
    source: Checkpoint,
    target: Checkpoint,
    selection: Selection,
    *,
    rank: int | None = None,
    deduplicated: bool = False,
) -> Matched:
    """Find each source tensor in the target, by the name that a conversion gives it, on every rank that it gives it to.

    Args:
        source: what a conversion reads.
        target: compared with what it writes.
        selection: what the conversion was asked for.
        rank: the two are what this rank holds of two checkpoints; None where they are the checkpoints.
        deduplicated: the target stores each replica once, whether its files say so or not.
    """
    lenient = replace(selection, drop=("*",), allow_missing=("*",))
    carries = target.format == DCP_ITEMS
    source = source if carries else source.unbound()
    selected = select(source, target.strategy, lenient, carries=carries)
    chosen = [*(name for name, _ in selected.kept), *(n for n in selected.dropped if n in source.tensors)]
    new_names = selection.renamed(list(source.every))
    states = all_states(source, target.strategy, target.tensors)
    found = Matched(warnings=list(selected.warnings))
    replicas = Replicas(target, once=deduplicated or is_deduplicated(target), converted=True)
    paths = {target.ranks[number]: target.files[number].path for number in reversed(range(len(target.files)))}
    unreadable = _unreadable(target, rank)
    for name in chosen:
        new = new_names[name]
        other = target.tensors.get(new)
        if other is not None:
            _compare_headers(found, source, target, source.tensors[name], other, selection)
            found.differences.extend(
                Difference("missing", _LACKS, new, "target", lack.rank, paths.get(lack.rank), lack.block)
                for lack in replicas.lacking(other)
                if (lack.rank, new) not in unreadable
            )
        elif new in target.unreadable:  # which is a difference of its own, of `unreadable`
            continue
        elif _may_lack(source, target, name, new, selection, states) or replicas.may_be_elsewhere(
            new, source.tensors[name].spec.shape
        ):
            found.dropped.append(name)
        else:
            path = None if rank is None else paths[rank]
            found.differences.append(Difference("missing", _ABSENT, new, "target", rank, path))
    _compare_objects(found, source, target, dict(selected.objects))
    expected = {new_names[name] for name in chosen}
    for name in set(source.unreadable) & set(selected.dropped):
        if new_names[name] in target.unreadable and source.format == target.format == DCP_ITEMS:  # files are linked
            found.warnings.append(f"{name} cannot be read on either side, and is not compared")
            unreadable = {one: why for one, why in unreadable.items() if one[1] != new_names[name]}
            continue
        found.dropped.append(name)
        if not matches(name, selection.drop):
            fault = Text(f"{source.unreadable[name]}; to leave it out give ", Option("drop", name))
            found.differences.append(Difference("missing", fault, name=name))
            expected.add(new_names[name])
    known = {new_names[name] for name in (*source.tensors, *source.unreadable)}
    for name in target.tensors:
        if name in expected:
            continue
        if name in known or source.opening.stage is not None or matches(name, selection.allow_missing):
            found.left_out.append(name)
        else:
            found.differences.append(Difference("extra", "is in the target, not in the source", name=name))
    written = {new for _, new in selected.kept}
    dropped = {name for _, name in unreadable if name not in written and matches(name, selection.drop)}
    _add_unreadable(found, unreadable, written, dropped | (known - expected))
    found.differences.extend(_of_notes(source, target, rank))
    return found


def _add_unreadable(
    found: Matched,
    unreadable: Mapping[tuple[int | None, str], tuple[str, str | None]],
    written: Collection[str],
    unasked: Collection[str],
) -> None:
    """Add what of a target cannot be read; it differs from all that a conversion writes."""
    for (rank, name), (reason, path) in unreadable.items():
        if name in unasked:
            found.left_out.append(name)
        else:
            kind: Kind = "missing" if name in written else "extra"
            found.differences.append(Difference(kind, f"{reason}, and is not compared", name, "target", rank, path))


def _unreadable(target: Checkpoint, rank: int | None) -> dict[tuple[int | None, str], tuple[str, str | None]]:
    """Return what of a target cannot be read, by rank and name: the reason, and the path of the file.

    Of a tensor that the files have, and that cannot be put together of what they have, there is neither rank nor path.
    """
    found: dict[tuple[int | None, str], tuple[str, str | None]] = {
        (target.ranks[number], name): (reason, target.files[number].path)
        for number in _numbers(target, rank)
        for name, reason in target.files[number].index.unreadable
        if name in target.unreadable
    }
    entries = {name for _, name in found}
    return found | {(None, name): (reason, None) for name, reason in target.unreadable.items() if name not in entries}


def compares_notes(source: Checkpoint, target: Checkpoint) -> bool:
    """Return whether both have files with notes, which a conversion carries over from one to the other."""
    return all(any(file.index.format == SAFETENSORS for file in side.files) for side in (source, target))


def _of_notes(source: Checkpoint, target: Checkpoint, rank: int | None) -> Iterator[Difference]:
    """Compare the notes of the target's files with those of the source's, which a conversion carries over.

    Source files whose notes differ leave open which of them a target file has. `format` says who wrote a file.
    """
    if not compares_notes(source, target):
        return
    given = [dict(source.files[number].index.metadata) for number in _numbers(source, rank)]
    for number in _numbers(target, rank):
        file = target.files[number]
        notes = dict(file.index.metadata)
        for key in sorted({key for some in (notes, *given) for key in some} - {"format"}):
            values = [some.get(key) for some in given]
            if file.index.format == SAFETENSORS and notes.get(key) not in values:
                fault = f"has {_noted(key, notes.get(key))}; the source has {_noted(key, values[0])}"
                yield Difference("note", fault, None, "target", target.ranks[number], file.path)


def _noted(key: str, value: str | None) -> str:
    return f"no note {key!r:.80}" if value is None else f"the note {key!r:.80} with {value!r:.80}"


def _may_lack(
    source: Checkpoint, target: Checkpoint, name: str, new: str, selection: Selection, states: Collection[str]
) -> bool:
    """Return whether the target need not have a tensor that is asked for."""
    strategy = target.strategy
    if strategy is None:
        return False
    if new in target.opening.elsewhere:
        return True
    if new not in strategy.tensors:  # a conversion drops what the target does not name; weights, where it is asked to
        may = name in states or target.opening.stage is not None or matches(name, selection.drop)
        return may and has_no_place(source, strategy, name)
    present = {strategy.stage_of(rank) for rank in target.ranks}  # opened as partial, there may be no rank of it
    return not present.intersection(strategy.stages_of(new))


def _compare_headers(
    found: Matched, source: Checkpoint, target: Checkpoint, tensor: Tensor, other: Tensor, selection: Selection
) -> None:
    """Compare what headers say of a tensor on both sides; what agrees goes on to be compared."""
    name = other.spec.name
    if tensor.text is not None or other.text is not None:
        found.differences.extend(_of_texts(source, target, tensor, other))
        return
    dtype = selection.target_dtype(source, tensor.spec.name)
    if other.spec.dtype is not dtype:
        cast = f", cast to {dtype}" if dtype is not tensor.spec.dtype else ""
        fault = f"is {other.spec.dtype}; {tensor.spec.dtype} in the source{cast}"
        found.differences.append(
            Difference("dtype", fault, name=name, found=f"{other.spec.dtype}", expected=f"{dtype}")
        )
    elif other.spec.shape != tensor.spec.shape:
        fault = f"is {shape_text(other.spec.shape)}; the source has {shape_text(tensor.spec.shape)}"
        found.differences.append(Difference("shape", fault, name=name))
    else:
        absent = sum(not replicas for one in (tensor, other) for replicas in one.sharding.replicas)
        found.absent += absent
        if absent:
            found.warnings.append(f"{absent} blocks of {name} are in no file, and are not compared")
        found.pairs.append((tensor.spec.name, name))


def _compare_objects(found: Matched, source: Checkpoint, target: Checkpoint, names: Mapping[str, str]) -> None:
    """Compare objects, by their names in both, and files beside the tensors, with those of a target that holds such."""
    if not (names or source.extras.beside):
        return
    from reshard.readers.dcp.objects import contents, problems  # not on every start

    every = {**source.extras.beside, **source.extras.objects}
    named = {**{name: name for name in source.extras.beside}, **names}
    lost, there = problems(every), {**target.extras.beside, **target.extras.objects}
    pairs = {}
    for old, new in named.items():
        other = there.get(new)
        if other is not None and old not in lost:
            pairs[old] = other
        elif old in lost or target.format != DCP_ITEMS:
            found.dropped.append(old)
        else:
            found.differences.append(Difference("object", _ABSENT, new))
    wrong = problems(pairs)
    for old, fault in wrong.items():
        found.differences.append(Difference("object", fault, named[old], path=pairs.pop(old).path))
    held = contents({old: every[old] for old in pairs})
    for (old, content), (_, other_content) in zip(held, contents(pairs), strict=True):
        if content != other_content:
            fault = f"has other bytes than that of the source in {every[old].path}"
            found.differences.append(Difference("object", fault, named[old], path=pairs[old].path))


def _of_texts(source: Checkpoint, target: Checkpoint, tensor: Tensor, other: Tensor) -> Iterator[Difference]:
    """Compare `str` entries: each copy in the target must be that of some source rank."""
    held = {tensor.text}
    if source.origin is None:  # whose entries have the names of tensors
        held = {source.entry_text(at.file, tensor.spec.name) for some in tensor.sharding.replicas for at in some}
    for replicas in other.sharding.replicas:
        for number in (at.file for at in replicas):
            text = target.entry_text(number, other.spec.name)
            if text not in held:
                fault = f"is {_shown(text)}; the source has {_shown(next(iter(held)))}"
                file = target.files[number]
                yield Difference("text", fault, other.spec.name, "target", target.ranks[number], file.path)


def _shown(text: str | None) -> str:
    return "no text" if text is None else f"{text!r:.80}"
