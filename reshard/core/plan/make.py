"""`reshard.plan`: make a plan from a checkpoint, a target strategy and options."""

from __future__ import annotations

from dataclasses import replace
from glob import escape
from typing import TYPE_CHECKING, Any

from reshard import environment
from reshard.core.format import find, format_of, targets
from reshard.core.layout.arrangement import Arrangement
from reshard.core.listing import RANK_PATTERN, Listing
from reshard.core.model.assemble import assemble_whole
from reshard.core.model.checkpoint import Checkpoint
from reshard.core.model.facts import Opening
from reshard.core.model.holdings import strategy_of
from reshard.core.model.reshape import with_shapes
from reshard.core.open import open as open_checkpoint
from reshard.core.open import read_headers
from reshard.core.options import Options
from reshard.core.plan.budget import BAND_BYTES, IMPORTED_BYTES, budget
from reshard.core.plan.build import build
from reshard.core.plan.inputs import Selection, derived, globs
from reshard.core.plan.plan import Plan, Request, Stats
from reshard.core.plan.same_files import SameFiles
from reshard.core.plan.select import select, select_listed
from reshard.core.storage.cipher import MODE
from reshard.core.storage.places import as_place
from reshard.core.target import TargetInputs, TargetTensor
from reshard.errors import BudgetError, Faults, Option, StrategyError, Text, UsageError, bytes_text, names
from reshard.expressions.quantized.methods import is_code, refuse_parted, way_out, with_method
from reshard.formats.sets.sidecars import sidecar_names
from reshard.kits.files import by_name, encodings
from reshard.strategy.names import ALL_STAGES, ranks_text
from reshard.strategy.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from reshard.core.format import Format
    from reshard.core.model.checkpoint import SourceFile
    from reshard.core.model.entries import TargetFiles
    from reshard.core.storage.cipher import Cipher
    from reshard.core.storage.places import AnyName, Place
    from reshard.core.target import Target, TargetFile, TargetShape
    from reshard.rules.rules import Rules


def plan(
    source: Checkpoint,
    target: Strategy | Arrangement | None = None,
    *,
    format: str | None = None,  # noqa: A002 -- the word of every such tool
    files: TargetFiles | Options | None = None,
    ranks: Iterable[int] | None = None,
    stage: int | None = None,
    selection: Selection | None = None,
    remove_redundancy: bool = False,
    memory: int | None = None,
    threads: int | None = None,
    target_cipher: Cipher | None = None,
) -> Plan:
    """Plan the conversion of a checkpoint to another strategy.

    Args:
        source: the checkpoint to convert.
        target: the blocks that each rank will hold; None for one rank of whole tensors. For a Checkpoint 2.0 also the
            arrangement of another checkpoint.
        format: `safetensors` or `ckpt`; by default the source's, or safetensors if that is mixed or zarr. `zarr`
            for one group of whole tensors, without a target strategy; `dcp` for a distributed checkpoint of PyTorch;
            `deepspeed-universal` for a Universal Checkpoint of DeepSpeed. A checkpoint of Orbax is a zarr group.
        files: the options of the target's format, or another way to lay out its files; by default those of `format`.
        ranks: only these ranks of the target; by default all.
        stage: only the ranks of this stage of the target's pipeline. A strategy of one stage is refused without it if
            the strategy, or the files next to it, show that there are other stages; tensors that the strategy does not
            name are dropped.
        selection: which tensors, under which names, as which dtypes.
        remove_redundancy: store each block of a listed tensor on one of the ranks that would hold it.
        memory: resident memory in bytes that a run may use at its peak; by default about 100 MB and a few kB per tensor
            are enough; at URLs about 256 MB.
        threads: maximum number of threads of a run, reduced to fit in `memory`; by default 4.
        target_cipher: encrypts the target files, of format `ckpt`, as MindSpore does; needs the `crypto` extra.

    Raises:
        SourceError: weights are missing or would be dropped; all at once.
            Also a target layout that does not fit a tensor's shape, or a source that seems to be one rank of several.
        StrategyError: the target is one stage of a pipeline and `stage` is not given, or has no such stage.
        BudgetError: `memory` is too little; the error names the minimum.
        UsageError: an unknown format or rank, an invalid prefix, or a format that is not encrypted.
    """
    if threads is not None and threads < 1:
        raise UsageError(f"threads is {threads}; expected at least 1", code="out-of-range")
    memory = environment.memory(memory)
    source.require_whole()
    selection = selection or Selection()
    source = derived(source, selection)
    ranks = None if ranks is None else tuple(ranks)
    if files is None:
        files = _default_options(source, format)
    if source.opening.stage is not None and isinstance(files, Options):
        files = files.of_stage(source.opening.stage)
    destination_class = (format_of(files) or _default_format()).target(files)  # type: ignore[arg-type]  # or none looks at them
    written = _format_of(source, files, destination_class.format, format)
    stage = _only_stage(target, stage, ranks)
    request = Request(
        target, written, files, ranks, _full_selection(source, selection), remove_redundancy, memory,
        stage, _encrypting(target_cipher, written),
    )  # fmt: skip
    request = destination_class.settled(request, source)
    if destination_class.links:
        return _linked(source, request, destination_class)
    strategy, stage_ranks = _restrict_to_stage(target, stage, ranks)
    request = replace(request, target=strategy)
    source = source if destination_class.carries else source.unbound()
    selected = select(source, strategy, selection, carries=destination_class.carries)
    restacked: tuple[str, ...] = ()
    if isinstance(target, Arrangement):
        source, restacked = with_shapes(
            source, {old: target.shape_of(new) or () for old, new in selected.kept if new in target.tensors}
        )
    tensors = source.tensors
    items = [TargetTensor(new, tensors[old], selection.target_dtype(source, old)) for old, new in selected.kept]
    faults = Faults(source.root)
    refuse_parted(source, dict(selected.kept))
    _refuse_casts_of_codes(source, items)
    shapes = {item.name: item.tensor.spec.shape for item in items if item.tensor.text is None}
    arrangement = strategy.arrangement(shapes, faults) if isinstance(strategy, Strategy) else strategy
    of_stage = replace(request, ranks=stage_ranks)
    inputs = TargetInputs(source, of_stage, items, arrangement, dict(selected.objects), faults)
    destination = destination_class(inputs)
    try:
        limits = budget(source, items, destination, memory=memory, threads=threads)
    except BudgetError as error:
        _advise_rechunk(error, source)
        raise
    result = build(source, items, destination, limits, faults)
    source_objects = (*(name for name, _ in selected.objects), *source.extras.beside)
    objects = [name for name in source_objects if name not in destination.carried]
    lost = [f"{names(objects, most=3)}: not tensors, and left out; {_carriers()} have them"] if objects else []
    return replace(
        result,
        dropped=(*selected.dropped, *objects),
        missing=selected.missing,
        left_out=selected.left_out,
        warnings=(
            *source.warnings,
            *restacked,
            *destination.warnings(),
            *_method_left(source, result.files, destination.carried),
            *_left_beside(source, result.files, destination.carried),
            *lost,
            *result.warnings,
        ),
        request=request,
        shape="file" if isinstance(files, Options) and files.is_one_file else result.shape,
    )


def with_memory(made: Plan, memory: int, threads: int | None = None) -> Plan:
    """Plan the same conversion again, for another peak of memory.

    Raises:
        BudgetError: `memory` is too little; the error names the minimum.
        UsageError: files are converted one by one, or plans were combined.
    """
    request = made.request
    if request is None:
        raise UsageError("this plan does not depend on memory", code="no-request", hint="leave memory out")
    return plan(
        made.source.opened, request.target, format=request.format, files=request.files, ranks=request.ranks,
        stage=request.stage, selection=request.selection, remove_redundancy=request.remove_redundancy,
        memory=memory, threads=threads, target_cipher=request.cipher,
    )  # fmt: skip


def _advise_rechunk(error: BudgetError, source: Checkpoint) -> None:
    """Add the largest chunks of assigned arrays to an error, with smaller ones that would do."""
    from reshard.expressions.assigned import arrays_in  # rarely needed

    largest = max(arrays_in(source.coding), key=lambda array: array.row_bytes, default=None)
    if largest is not None and largest.row_bytes > BAND_BYTES and largest.can_shrink:
        size = bytes_text(largest.row_bytes)
        error.facts = (*error.facts, f"the chunks of the same rows of array {largest.name!r} have {size}")
        error.hint = Text(error.hint, f", or rechunk the array: array.rechunk({largest.smaller(BAND_BYTES)})")


def _full_selection(source: Checkpoint, selection: Selection) -> Selection:
    """Return the selection relative to the source as opened, with rules and adapter."""
    if source.origin is None:
        return selection
    left_out = source.left_out - source.origin.left_out - source.origin.checkpoint.left_out
    exclude = (*selection.exclude, *map(escape, sorted(left_out)))
    return replace(selection, rules=source.origin.rules, lora=source.lora, exclude=exclude)


def _linked(source: Checkpoint, request: Request, kind: type[Target]) -> Plan:
    """Plan a target whose files are links to the source's files."""
    renamed, left_out = select_listed(source, request.selection)
    refuse_parted(source, renamed)
    destination = kind(TargetInputs(source, request, (), None, renamed, Faults(source.root)))
    files = destination.files((), ())
    memory = (("program", IMPORTED_BYTES), *destination.memory)
    stats = Stats(
        tensors=len(source.tensors.keys() & renamed.keys() - set(destination.dropped)),
        bytes_needed=0, bytes_read=0, bytes_written=0,
        target_bytes=sum(file.layout.size for file in files if not file.link),
        source_files=sum(file.link is not None for file in files), target_files=len(files), tasks=0,
        peak_memory=sum(nbytes for _, nbytes in memory),
    )  # fmt: skip
    # A link changes the change time of its file, which then does not show whether the file was modified.
    lasting = replace(source, files=tuple(replace(file, change=(0, 0)) for file in source.files))
    return Plan(
        lasting, files, (), (), stats, destination.format, destination.ranks, 0, 1,
        dropped=destination.dropped, left_out=left_out, warnings=(*source.warnings, *destination.warnings()),
        memory=memory, request=request,
    )  # fmt: skip


def _refuse_casts_of_codes(source: Checkpoint, items: Iterable[TargetTensor]) -> None:
    """Raise `UsageError` if tensors would be cast that are codes: they would be rounded, and their scales be wrong."""
    if source.opening.quantized is None:
        return
    faults = Faults(source.root)
    for item in items:
        dtype = item.tensor.spec.dtype
        if item.dtype is not dtype and is_code(dtype) and item.tensor.spec.shape:
            fault = f"is {dtype} of quantized weights, and cannot be cast to {item.dtype}"
            faults.add(f"tensor {item.name!r}", fault, code="unsupported-cast", hint=way_out(source))
    faults.raise_if_any(UsageError)


def _method_left(source: Checkpoint, files: Iterable[TargetFile], carried: Collection[str] = ()) -> Iterator[str]:
    """Yield a warning if no file of a target says how it is quantized, though one of the source does."""
    quantized = source.opening.quantized
    if quantized is None or not quantized.file or quantized.file in carried:
        return
    if all(as_place(each.path).name != quantized.file for each in files):
        yield f"{quantized.file}, which says how the values are coded, is not in the target: keep it for its readers"


def _left_beside(source: Checkpoint, files: Iterable[TargetFile], carried: Collection[str]) -> Iterator[str]:
    """Yield a warning if files beside the tensors of a source are neither carried nor written anew."""
    written = {as_place(each.path).name for each in files}
    left = [name for name in sidecar_names(source) if name not in carried and name not in written]
    if left:
        yield f"{len(left):,} file{'s' * (len(left) != 1)} beside the tensors left out: {names(left, most=3)}"


def _carriers() -> str:
    return names([each.name for each in targets() if each.carries and not each.extends])


def _default_format() -> Format:
    """Return the format of files in which each rank has its own."""
    return next(each for each in targets() if each.one_file)


def _one_file(name: str) -> Any:
    """Return the options of a target that is one file."""
    kind: Any = _default_format().options
    return kind(name=name)


def _default_options(source: Checkpoint, requested: str | None) -> Options:
    """Return the options of a target by the encoding of its files; by default it has that of the source's."""
    encoding = requested or source.file_format
    own = (each for each in targets() if each.encoding == encoding == each.name and (requested or each.one_file))
    kind = next(own, _default_format()).options
    assert kind is not None  # noqa: S101 -- it is a target
    return kind()


def _format_of(source: Checkpoint, files: TargetFiles | Options, only: str, requested: str | None) -> str:
    """Return the encoding of target files: the only, the requested or the source's."""
    ways = {each.encoding for each in targets() if not each.one_file and each.encoding == each.name}
    if requested not in {None, only} and (only or requested in ways):
        raise UsageError(f"{type(files).__name__} does not write format {requested}", code="wrong-format")
    default = source.file_format if source.file_format in {module.NAME for module in encodings()} else "safetensors"
    return only or by_name(requested or str(default)).NAME


def _only_stage(target: Strategy | Arrangement | None, stage: int | None, ranks: Iterable[int] | None) -> int | None:
    """Return the only stage to write: the requested one, or that of the ranks if the strategy covers a single stage.

    Raises:
        StrategyError: the strategy covers a single stage, and neither this one nor ranks of it are requested.
    """
    if stage is not None or not isinstance(target, Strategy) or not target.others:
        return stage
    number, own = target.stages.start, f"{target.ranks.start}-{target.ranks.stop - 1}"
    if not ranks or not set(ranks).issubset(target.ranks):
        raise StrategyError(
            f"the target strategy covers only stage {number} of a pipeline", code="one-stage",
            hint=Text(f"give {ALL_STAGES}, or ", Option("stage_ranks", number, own), " to write only its ranks"),
        )  # fmt: skip
    return number


def _restrict_to_stage(
    target: Strategy | Arrangement | None, stage: int | None, ranks: Iterable[int] | None
) -> tuple[Strategy | Arrangement | None, tuple[int, ...] | None]:
    """Restrict a target's strategy and ranks to `stage`, if it is given.

    Raises:
        StrategyError: the strategy does not have the requested stage.
        UsageError: ranks of other stages are requested, or there is no strategy.
    """
    requested = None if ranks is None else tuple(ranks)
    if stage is None:
        return target, requested
    if not isinstance(target, Strategy):
        raise UsageError(
            f"no target strategy says which ranks stage {stage} has", code="missing-strategy",
            hint=Text("give ", Option("target_strategy")),
        )  # fmt: skip
    part = target.of_stage(stage)
    outside = set(requested or ()).difference(part.ranks)
    if outside:
        raise UsageError(
            f"{ranks_text(outside)} {'is' if len(outside) == 1 else 'are'} not in stage {stage} of the target",
            code="no-such-rank", facts=[f"stage {stage} has {ranks_text(part.ranks)}"],
        )  # fmt: skip
    if len(target.stages) == 1:
        return part, requested
    return target, tuple(
        part.ranks
    ) if requested is None else requested  # the whole strategy names the tensors of other stages


def plan_convert(
    path: AnyName,
    format: str,  # noqa: A002 -- the word of every such tool
    *,
    name: str | None = None,
    rank_pattern: str = RANK_PATTERN,
    suffix: str | None = None,
    drop: Iterable[str] = (),
    threads: int | None = None,
    cipher: Cipher | None = None,
    target_cipher: Cipher | None = None,
    rules: Rules | None = None,
) -> Plan:
    """Plan the conversion of every file of a checkpoint to another format.

    A file keeps its path below the directory, except for the extension. If the checkpoint's own metadata say which
    rank holds which block, its files mean nothing without the metadata; it becomes rank files of the same blocks.

    Args:
        path: a directory of rank directories, or one file.
        format: `safetensors` or `ckpt`.
        name: the name of the target file, if the source is one file.
        rank_pattern: the path of a rank's files below the directory.
        suffix: take the files whose names end with it, if a rank has several.
        drop: globs of entries to leave out because they cannot be converted.
        threads: maximum number of threads of a run.
        cipher: decrypts the files.
        target_cipher: as for `plan`.
        rules: map the names and shapes of its tensors to the target's; source and target are one file then.

    Returns:
        a plan to be run. It has no arrays of ranks, because it is unknown which tensors are parts of one array.

    Raises:
        SourceError: no files, or files that are not valid.
        UsageError: a unified set, whose index refers to its files by name.
    """
    path = as_place(path)
    if rules is not None:
        if path.is_dir():
            raise UsageError(
                f"{path} is a directory; rules are applied to all files together", code="not-a-file",
                hint=Text("leave ", Option("same_ranks"), " out"),
            )  # fmt: skip
        selection = Selection(drop=globs(drop), rules=rules)
        return plan(
            open_checkpoint(path, cipher=cipher), format=format, files=_one_file(name or path.name),
            selection=selection, threads=threads, target_cipher=target_cipher,
        )  # fmt: skip
    found = find(Listing(path)).format
    kind = "" if found.describes or not found.whole else "unified set"
    if found.describes:
        opened = open_checkpoint(path, cipher=cipher)
        if opened.extras.arrangement is not None:
            dropped = globs(drop)
            target = strategy_of(opened, drop=dropped)
            selection = Selection(drop=dropped)
            return plan(
                opened, target, format=format, selection=selection, threads=threads, target_cipher=target_cipher
            )
        kind = found.called.removeprefix("a ") or "distributed checkpoint"
    if kind:
        raise UsageError(
            f"{path} is a {kind}, which is not converted file by file", code="not-convertible",
            hint=Text("leave ", Option("same_ranks"), " out: whole tensors are written"),
        )  # fmt: skip
    files, ranks, warnings, step, cipher = read_headers(path, rank_pattern=rank_pattern, suffix=suffix, cipher=cipher)
    if name is not None:
        _one_file(name)  # refuses an invalid name
    extension = by_name(format).EXTENSION
    result = plan_files(
        Checkpoint(str(path), {}, files, ranks, warnings=tuple(warnings), coding=cipher, opening=Opening(step=step)),
        [name or f"{_below(path, file)}{extension}" for file in files],
        format,
        selections=[Selection(drop=globs(drop))] * len(files),
        threads=threads,
        target_cipher=target_cipher,
    )
    source = with_method(result.source)
    kept = (entry for file in files for entry in file.index.entries if entry not in result.dropped)
    refuse_parted(source, {entry: entry for entry in kept})
    noted = (*result.warnings, *([source.opening.quantized.text] if source.opening.quantized else ()))
    shape: TargetShape = "directory" if name is None else "file"
    return replace(result, shape=shape, warnings=(*noted, *_method_left(source, result.files)))


def plan_files(
    source: Checkpoint,
    paths: Sequence[str],
    format: str,  # noqa: A002 -- as above
    *,
    selections: Sequence[Selection],
    threads: int | None = None,
    target_cipher: Cipher | None = None,
) -> Plan:
    """Plan the conversion of files to another format, each as a file of whole tensors.

    Args:
        source: the files; it needs no tensors.
        paths: the path of each target file below the target directory.
        format: `safetensors` or `ckpt`.
        selections: for each file, which tensors, and under which names.
        threads: maximum number of threads of a run.
        target_cipher: as for `plan`.

    Raises:
        SourceError: entries cannot be converted, and no selection drops them.
        UsageError: two tensors of a file would have one name, or a dtype does not exist in the format.
    """
    items: list[list[TargetTensor]] = []
    dropped: dict[str, None] = {}
    for number, (file, selection) in enumerate(zip(source.files, selections, strict=True)):
        tensors = assemble_whole(file.path, source.files, source.ranks, [number])
        checkpoint = Checkpoint(file.path, tensors, (file,), (0,), unreadable=dict(file.index.unreadable))
        selected = select(checkpoint, None, selection)
        items.append([TargetTensor(new, tensors[old], tensors[old].spec.dtype) for old, new in selected.kept])
        dropped.update(dict.fromkeys(selected.dropped))
    destination = SameFiles(source, items, paths, by_name(format), _encrypting(target_cipher, format))
    all_items = [item for file_items in items for item in file_items]
    limits = budget(source, all_items, destination, threads=threads)
    result = build(source, all_items, destination, limits, Faults(source.root))
    return replace(result, dropped=tuple(dropped), warnings=source.warnings)


def _encrypting(cipher: Cipher | None, format: str) -> Cipher | None:  # noqa: A002 -- as above
    """Return the cipher for target files; raise `UsageError` if unsupported."""
    if cipher is not None and format != "ckpt":
        raise UsageError(
            f"{format} files cannot be encrypted", code="not-encryptable",
            hint=Text("choose format ckpt, or leave ", Option("target_cipher"), " out"),
        )  # fmt: skip
    return cipher and replace(cipher, mode=cipher.mode or MODE, required=True)


def _below(path: Place, file: SourceFile) -> str:
    """Return a file's path below the directory, without the extension."""
    path_below = file.path.removeprefix(f"{path.absolute()}/")
    stem, dot, extension = path_below.rpartition(".")
    return stem if dot and "/" not in extension else path_below
