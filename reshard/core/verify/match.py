"""Match the tensors of a source and a target, and compare their headers.

Names, selections and dtypes follow a conversion with the same options (`plan.select`). Two checkpoints in rank
directories without a strategy are matched rank by rank, as `convert` writes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from reshard.core.layout.block import shape_text
from reshard.core.model.assemble import assemble_whole
from reshard.core.model.checkpoint import unreadable_in
from reshard.core.model.holdings import MissingBlocks, is_deduplicated
from reshard.core.model.objects import Objects
from reshard.core.plan.select import all_states, has_no_place, select
from reshard.core.verify.difference import Difference
from reshard.errors import Option, SourceError, Text
from reshard.kits.safetensors import NAME as SAFETENSORS
from reshard.strategy.names import matches

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from reshard.core.model.checkpoint import Checkpoint, Tensor
    from reshard.core.plan.inputs import Selection
    from reshard.core.verify.difference import Kind


_ABSENT = "is in the source, not in the target"
_LACKS = Text(
    "is not in the file of this rank, which should have it; if each block is stored on one rank only, give ",
    Option("deduplicated"),
)


@dataclass(slots=True)
class Matched:
    """The result of matching two checkpoints.

    Attributes:
        pairs: source and target names of tensors with the expected dtype and shape.
        differences: differences in headers.
        dropped: names of source tensors that the target does not have, and need not have.
        left_out: names of target tensors that were not requested.
        warnings: warnings; not differences.
        absent: number of blocks that are in no file of one side, and cannot be compared.
    """

    pairs: list[tuple[str, str]] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    absent: int = 0


def pairs_of_ranks(source: Checkpoint, target: Checkpoint) -> Iterator[tuple[Checkpoint, Checkpoint, int | None]]:
    """Yield the pairs to compare: the checkpoints, or rank by rank without a strategy.

    The third item is the rank of the pair, or None for the checkpoints.
    """
    if source.tensors and target.tensors:
        yield source, target, None
        return
    for side, side_name, opposite in ((source, "source", target), (target, "target", source)):
        if not side.tensors and (opposite.tensors or set(source.ranks) != set(target.ranks)):
            raise SourceError(
                f"{side.root} has {len(set(side.ranks))} ranks, and nothing says how they were sharded",
                code="no-layout",
                hint=Text(
                    "pass ", Option("strategy").of(side_name), ", or ", Option("layout", "*", "RULE").of(side_name)
                ),
            )
    for rank in sorted(set(source.ranks)):
        yield _of_rank(source, rank), _of_rank(target, rank), rank


def _of_rank(checkpoint: Checkpoint, rank: int) -> Checkpoint:
    """Return the tensors of one rank as a checkpoint; file numbers stay the same."""
    numbers = _numbers(checkpoint, rank)
    tensors = assemble_whole(checkpoint.root, checkpoint.files, checkpoint.ranks, numbers)
    unreadable = unreadable_in(checkpoint.files[number] for number in numbers)
    return replace(checkpoint, tensors=tensors, unreadable=unreadable)


def _numbers(checkpoint: Checkpoint, rank: int | None) -> list[int]:
    """Return the numbers of the files of a rank; None means all."""
    return [number for number, file_rank in enumerate(checkpoint.ranks) if rank in {None, file_rank}]


def match(
    source: Checkpoint,
    target: Checkpoint,
    selection: Selection,
    *,
    rank: int | None = None,
    deduplicated: bool = False,
) -> Matched:
    """Find each source tensor in the target, by its converted name, on all its ranks.

    Args:
        source: the input of a conversion.
        target: the checkpoint to compare with the output of the conversion.
        selection: the options of the conversion.
        rank: the rank whose tensors the two have (`pairs_of_ranks`); None if they are whole checkpoints.
        deduplicated: the target stores each block on one rank only, even if no header says so.
    """
    lenient = replace(selection, drop=("*",), allow_missing=("*",))
    carries = target.format is not None and target.format.carries
    source = source if carries else source.unbound()
    selected = select(source, target.strategy, lenient, carries=carries)
    chosen = [*(name for name, _ in selected.kept), *(n for n in selected.dropped if n in source.tensors)]
    new_names = selection.renamed(list(source.all_names), words=source.opening.states)
    states = all_states(source, target.strategy, target.tensors)
    result = Matched()
    replicas = MissingBlocks(target, once=deduplicated or is_deduplicated(target), converted=True)
    paths = {target.ranks[number]: target.files[number].path for number in reversed(range(len(target.files)))}
    unreadable = _unreadable(target, rank)
    for name in chosen:
        new = new_names[name]
        counterpart = target.tensors.get(new)
        if counterpart is not None:
            _compare_headers(result, source, target, source.tensors[name], counterpart, selection)
            result.differences.extend(
                Difference("missing", _LACKS, new, "target", lack.rank, paths.get(lack.rank), lack.block)
                for lack in replicas.lacking(counterpart)
                if (lack.rank, new) not in unreadable
            )
        elif new in target.unreadable:  # reported by `_add_unreadable`
            continue
        elif _may_lack(source, target, name, new, selection, states) or replicas.may_be_elsewhere(
            new, source.tensors[name].spec.shape
        ):
            result.dropped.append(name)
        else:
            path = None if rank is None else paths[rank]
            result.differences.append(Difference("missing", _ABSENT, new, "target", rank, path))
    _compare_objects(result, source, target, dict(selected.objects))
    expected = {new_names[name] for name in chosen}
    for name in set(source.unreadable) & set(selected.dropped):
        if carries and new_names[name] in target.unreadable and source.format is target.format:  # files may be linked
            result.warnings.append(f"{name} cannot be read on either side, and is not compared")
            unreadable = {key: why for key, why in unreadable.items() if key[1] != new_names[name]}
            continue
        result.dropped.append(name)
        if not matches(name, selection.drop):
            fault = Text(f"{source.unreadable[name]}; to leave it out give ", Option("drop", name))
            result.differences.append(Difference("missing", fault, name=name))
            expected.add(new_names[name])
    source_names = {new_names[name] for name in (*source.tensors, *source.unreadable)}
    for name in target.tensors:
        if name in expected:
            continue
        if name in source_names or source.opening.stage is not None or matches(name, selection.allow_missing):
            result.left_out.append(name)
        else:
            result.differences.append(Difference("extra", "is in the target, not in the source", name=name))
    written = {new for _, new in selected.kept}
    dropped = {name for _, name in unreadable if name not in written and matches(name, selection.drop)}
    _add_unreadable(result, unreadable, written, dropped | (source_names - expected))
    result.differences.extend(_of_notes(source, target, rank))
    return result


def _add_unreadable(
    result: Matched,
    unreadable: Mapping[tuple[int | None, str], tuple[str, str | None]],
    written: Collection[str],
    unasked: Collection[str],
) -> None:
    """Add differences for unreadable entries of a target."""
    for (rank, name), (reason, path) in unreadable.items():
        if name in unasked:
            result.left_out.append(name)
        else:
            kind: Kind = "missing" if name in written else "extra"
            result.differences.append(Difference(kind, f"{reason}, and is not compared", name, "target", rank, path))


def _unreadable(target: Checkpoint, rank: int | None) -> dict[tuple[int | None, str], tuple[str, str | None]]:
    """Return reason and path of unreadable entries of a target, by rank and name.

    If a tensor has entries, but cannot be assembled from them, rank and path are None.
    """
    entries_of_files: dict[tuple[int | None, str], tuple[str, str | None]] = {
        (target.ranks[number], name): (reason, target.files[number].path)
        for number in _numbers(target, rank)
        for name, reason in target.files[number].index.unreadable
        if name in target.unreadable
    }
    entries = {name for _, name in entries_of_files}
    return entries_of_files | {
        (None, name): (reason, None) for name, reason in target.unreadable.items() if name not in entries
    }


_FRAMEWORKS = (None, "ms", "pt", "np", "tf", "flax", "mlx")
"""Values of the note `format`, which safetensors files may lack."""


def compares_notes(source: Checkpoint, target: Checkpoint) -> bool:
    """Return whether both have files with notes, metadata (`__metadata__`) that a conversion copies."""
    return all(any(file.index.format == SAFETENSORS for file in side.files) for side in (source, target))


def _of_notes(source: Checkpoint, target: Checkpoint, rank: int | None) -> Iterator[Difference]:
    """Compare the notes of target files with the notes of source files.

    If the notes of source files differ, a target file may have any of them. The note `format` names the framework that
    a file is for, so that it may be another framework's, too.
    """
    if not compares_notes(source, target):
        return
    source_notes = [dict(source.files[number].index.metadata) for number in _numbers(source, rank)]
    for number in _numbers(target, rank):
        file = target.files[number]
        notes = dict(file.index.metadata)
        for key in sorted({key for item in (notes, *source_notes) for key in item}):
            values = [item.get(key) for item in source_notes] + [*_FRAMEWORKS] * (key == "format")
            if file.index.format == SAFETENSORS and notes.get(key) not in values:
                fault = f"has {_noted(key, notes.get(key))}; the source has {_noted(key, values[0])}"
                yield Difference("note", fault, None, "target", target.ranks[number], file.path)


def _noted(key: str, value: str | None) -> str:
    return f"no note {key!r:.80}" if value is None else f"the note {key!r:.80} with {value!r:.80}"


def _may_lack(
    source: Checkpoint, target: Checkpoint, name: str, new: str, selection: Selection, states: Collection[str]
) -> bool:
    """Return whether a requested tensor may be missing from the target."""
    strategy = target.strategy
    if strategy is None:
        return name in selection.drop
    if new in target.opening.elsewhere:
        return True
    if new not in strategy.tensors:  # a conversion drops tensors outside the target strategy; weights only on request
        may = name in states or target.opening.stage is not None or matches(name, selection.drop)
        return may and has_no_place(source, strategy, name)
    present = {strategy.stage_of(rank) for rank in target.ranks}  # if opened as partial, its ranks may be absent
    return not present.intersection(strategy.stages_of(new))


def _compare_headers(
    result: Matched, source: Checkpoint, target: Checkpoint, tensor: Tensor, counterpart: Tensor, selection: Selection
) -> None:
    """Compare the headers of a tensor on both sides; add matching tensors to `pairs`."""
    name = counterpart.spec.name
    if tensor.text is not None or counterpart.text is not None:
        result.differences.extend(_of_texts(source, target, tensor, counterpart))
        return
    dtype = selection.target_dtype(source, tensor.spec.name)
    if counterpart.spec.dtype is not dtype:
        cast = f", cast to {dtype}" if dtype is not tensor.spec.dtype else ""
        fault = f"is {counterpart.spec.dtype}; {tensor.spec.dtype} in the source{cast}"
        result.differences.append(
            Difference("dtype", fault, name=name, found=f"{counterpart.spec.dtype}", expected=f"{dtype}")
        )
    elif counterpart.spec.shape != tensor.spec.shape:
        fault = f"is {shape_text(counterpart.spec.shape)}; the source has {shape_text(tensor.spec.shape)}"
        result.differences.append(Difference("shape", fault, name=name))
    else:
        absent = sum(not replicas for side in (tensor, counterpart) for replicas in side.sharding.replicas)
        result.absent += absent
        if absent:
            result.warnings.append(f"{absent} blocks of {name} are in no file, and are not compared")
        result.pairs.append((tensor.spec.name, name))


def _compare_objects(result: Matched, source: Checkpoint, target: Checkpoint, names: Mapping[str, str]) -> None:
    """Compare objects and sidecar files, by their names, if the target can have them."""
    if not (names or source.extras.beside):
        return
    if source.format is None or target.format is None:
        result.dropped.extend([*source.extras.beside, *names])
        return
    objects, others = source.format.objects(source), target.format.objects(target)
    if type(objects) is not type(others):
        objects, others = Objects(source), Objects(target)
    named = {**{name: name for name in source.extras.beside}, **names}
    lost = objects.problems(named)
    pairs = {}
    for old, new in named.items():
        if new in others.entries and old not in lost:
            pairs[old] = new
        elif old in lost or not target.format.carries:
            result.dropped.append(old)
        else:
            result.differences.append(Difference("object", _ABSENT, new))
    names_of = {new: old for old, new in pairs.items()}
    for new, fault in others.problems(names_of).items():
        result.differences.append(Difference("object", fault, new, path=others.entries[new].path))
        del pairs[names_of[new]]
    for (old, value), (new, other) in zip(objects.compared(pairs), others.compared(pairs.values()), strict=True):
        if value != other:
            fault = f"has other bytes than that of the source in {objects.entries[old].path or source.opened.root}"
            path = others.entries[new].path or target.opened.root
            result.differences.append(Difference("object", fault, new, path=path))


def _of_texts(source: Checkpoint, target: Checkpoint, tensor: Tensor, counterpart: Tensor) -> Iterator[Difference]:
    """Compare `str` entries: each copy must equal the text of a source rank."""
    texts = {tensor.text}
    if source.origin is None:  # its entries have the names of its tensors
        texts = {source.entry_text(at.file, tensor.spec.name) for copies in tensor.sharding.replicas for at in copies}
    for replicas in counterpart.sharding.replicas:
        for number in (at.file for at in replicas):
            text = target.entry_text(number, counterpart.spec.name)
            if text not in texts:
                fault = f"is {_shown(text)}; the source has {_shown(next(iter(texts)))}"
                file = target.files[number]
                yield Difference("text", fault, counterpart.spec.name, "target", target.ranks[number], file.path)


def _shown(text: str | None) -> str:
    return "no text" if text is None else f"{text!r:.80}"
