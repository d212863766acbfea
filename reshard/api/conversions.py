"""`reshard.convert`: a conversion in one call, with the defaults of the command of that name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.api.checkpoints import Checkpoint, record_of
from reshard.api.choices import selection_of, target_of
from reshard.errors import Option, TargetError, Text, UsageError
from reshard.formats import check_name
from reshard.formats.sets import LinkedDCP
from reshard.plan.make import plan, plan_convert
from reshard.plan.select import Selection
from reshard.readers.open import has_several_ranks, noted, self_described
from reshard.readers.open import open as open_checkpoint
from reshard.sizes import size_of
from reshard.storage.places import as_place
from reshard.targets.kinds import (
    CUT,
    RANKS,
    WHOLE,
    check_options,
    file_format,
    files_of,
    is_file_name,
    named_word,
    source_word,
    word_of,
)
from reshard.targets.pattern import read_layouts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from reshard.api.choices import Globs
    from reshard.plan.plan import Plan
    from reshard.rules.lora import LoRA
    from reshard.rules.rules import Rules
    from reshard.run.run import Progress, Report
    from reshard.source.checkpoint import Checkpoint as Record
    from reshard.storage.cipher import Cipher
    from reshard.storage.places import AnyName, Place
    from reshard.strategy.strategy import Strategy


def convert(
    source: AnyName | Checkpoint,
    target: AnyName,
    *,
    to: str | None = None,
    source_strategy: Strategy | AnyName | None = None,
    target_strategy: Strategy | AnyName | None = None,
    layouts_of: AnyName | None = None,
    same_ranks: bool = False,
    prefix: str | None = None,
    step: int | None = None,
    max_shard_size: int | str | None = None,
    chunk_size: int | str | None = None,
    shard_size: int | str | None = None,
    compression: str | None = None,
    ranks: Iterable[int] | None = None,
    stage: int | None = None,
    remove_redundancy: bool = False,
    link_replicas: bool = False,
    link: bool = False,
    include: Globs = (),
    exclude: Globs = (),
    weights_only: bool = False,
    name_map: Mapping[str, str] | None = None,
    cast: Mapping[str, str] | None = None,
    drop: Globs = (),
    allow_missing: Globs = (),
    rules: Rules | Mapping[str, Any] | AnyName | None = None,
    lora: LoRA | AnyName | None = None,
    selection: Selection | None = None,
    cipher: Cipher | None = None,
    target_cipher: Cipher | None = None,
    memory: int | str | None = None,
    threads: int | None = None,
    client: Any = None,
    scheduler: str | Callable[..., Any] | None = None,
    overwrite: bool = False,
    restart: bool = False,
    progress: Callable[[Progress], None] | bool | None = None,
) -> Report:
    """Convert a checkpoint, as `reshard convert SOURCE TARGET` does.

    Args:
        source: a path as for `reshard.open`, or an opened checkpoint.
        target: a directory, or one file if it is called `*.ckpt` or `*.safetensors`; a local path, or a URL.
        to: what is written: `safetensors` or `ckpt`, files of ranks, or one file; `hf` or `mindspore`, a set of whole
            tensors; `dcp`, of PyTorch; `checkpoint2`, of MindSpore Transformers; `zarr`, a store. By default what the
            target's name says, else what the source is.
        source_strategy: which rank of the source holds which block: a strategy, or a strategy file.
        target_strategy: likewise of the target, or rules (`.yaml`); None for whole tensors.
        layouts_of: `checkpoint2` and `dcp`: cut the tensors as in this Checkpoint 2.0.
        same_ranks: `safetensors` and `ckpt`: convert each rank's file as it is cut; only the format changes. By
            default if nothing says how the source was sharded, and for one file.
        prefix: as for `reshard.plan`.
        step: likewise.
        max_shard_size: likewise.
        chunk_size: `zarr`: the most bytes in a chunk, such as `"16MB"`.
        shard_size: `zarr`: the most bytes of chunks in a file; 0 for each chunk in its own.
        compression: `zarr`: `zstd`, `zstd:3` and so on.
        ranks: only these ranks of the target.
        stage: only the ranks of this stage of the target's pipeline.
        remove_redundancy: store each block on one of the ranks that would hold it.
        link_replicas: make equal target files links to one file.
        link: `dcp`: link the files of the source, a DCP, and write the metadata alone.
        include: as in `reshard.Selection`.
        exclude: likewise.
        weights_only: likewise.
        name_map: likewise.
        cast: likewise.
        drop: likewise.
        allow_missing: likewise.
        rules: likewise, or a rules file.
        lora: likewise, or the directory of an adapter.
        selection: in place of these keywords.
        cipher: decrypts the source's `.ckpt` files.
        target_cipher: encrypts the target's `.ckpt` files.
        memory: the most resident memory to use, in bytes or as `"1GB"`.
        threads: as for `Plan.run`.
        client: likewise.
        scheduler: likewise.
        overwrite: likewise.
        restart: likewise.
        progress: likewise.

    Returns:
        what was read and written, and the files.

    Raises:
        reshard.UsageError: options that contradict each other or the format.
        reshard.SourceError, reshard.StrategyError, reshard.BudgetError, reshard.TargetError: as `reshard.open`,
            `reshard.plan` and `Plan.run` do.
    """
    options = {
        "layouts_of": layouts_of, "target_strategy": target_strategy, "ranks": ranks, "target_stage": stage,
        "remove_redundancy": remove_redundancy, "link_replicas": link_replicas, "prefix": prefix, "target_step": step,
        "max_shard_size": max_shard_size, "link": link, "chunk_size": chunk_size, "shard_size": shard_size,
        "compression": compression,
    }  # fmt: skip
    given = [name for name, value in options.items() if value is not None and value is not False]
    selection = selection_of(
        selection, include=include, exclude=exclude, weights_only=weights_only, name_map=name_map, cast=cast, drop=drop,
        allow_missing=allow_missing, rules=rules, lora=lora,
    )  # fmt: skip
    word = _stated(to, target, link=link)
    if word is not None:
        check_options(word, given)
    place, memory_bytes = as_place(target), size_of(memory, "memory")
    made: Plan
    if not isinstance(source, Checkpoint) and _keeps_ranks(
        as_place(source), source_strategy, place, word, given, selection, cipher, memory_bytes, same_ranks=same_ranks
    ):
        made, name = _of_same_ranks(as_place(source), place, word, selection, given, cipher, target_cipher, threads)
    elif same_ranks:
        raise UsageError(
            "same_ranks converts the files of a path, and an opened checkpoint is given", code="needs-path",
            hint="name the directory of the source",
        )  # fmt: skip
    else:
        record = (
            record_of(source)
            if isinstance(source, Checkpoint)
            else open_checkpoint(source, strategy=source_strategy, cipher=cipher)
        )
        word = word or _of_source(record, given)
        check_options(word, given)
        name = _file_name(record, place, word, given)
        layout = read_layouts(layouts_of) if layouts_of is not None else target_of(target_strategy, record, selection)
        files = files_of(
            word, name, prefix=prefix, step=step, max_shard_size=size_of(max_shard_size, "max_shard_size"),
            chunk_size=size_of(chunk_size, "chunk_size"), shard_size=size_of(shard_size, "shard_size"),
            compression=compression,
        )  # fmt: skip
        made = plan(
            record, layout, format=None if word == "checkpoint2" or link else file_format(word),
            prefix=prefix or "checkpoint_", files=LinkedDCP() if link else files, ranks=ranks, stage=stage,
            selection=selection, remove_redundancy=remove_redundancy, link_replicas=link_replicas, memory=memory_bytes,
            threads=threads, target_cipher=target_cipher,
        )  # fmt: skip
    return made.run(
        place.parent if name else place, client=client, scheduler=scheduler, threads=threads, overwrite=overwrite,
        restart=restart, progress=progress,
    )  # fmt: skip


def _stated(to: str | None, target: AnyName, *, link: bool) -> str | None:
    """Return what is to be written, as an option or the name of the target says; None if neither does."""
    if to is not None:
        word = word_of(to)
        if word in RANKS or as_place(target).suffix == ".zarr":
            check_name(str(target), word)
        return word
    if link:
        return "dcp"
    named = named_word(target)
    return named and named[0]


def _of_source(source: Record, given: Collection[str]) -> str:
    """Return what is written if nothing else says it: what the source is."""
    word = source_word(source)
    return "safetensors" if word in WHOLE and {*CUT}.intersection(given) else word


def _file_name(source: Record, target: Place, word: str, given: Collection[str]) -> str | None:
    """Return the name of the target file if the target is one file, else None.

    Raises:
        UsageError: several ranks are asked for.
        TargetError: it is a directory, and the source is one file.
    """
    cut = [name for name in CUT if name in given]
    named = is_file_name(target)
    if word not in RANKS or not (named or as_place(source.root).is_file()):
        return None
    if cut and named:
        message = Text(f"{target.name} is the name of one file, and ", Option(cut[0]), " makes a file for each rank")
        raise UsageError(message, code="one-file", hint="name a directory")
    if cut:
        return None
    _refuse_directory(target, source.root)
    return target.name


def _refuse_directory(target: Place, source: object) -> None:
    if target.is_dir():
        raise TargetError(f"{target} is a directory, and {source} is one file", code="is-directory", hint="name a file")


def _keeps_ranks(
    source: Place,
    source_strategy: object,
    target: Place,
    word: str | None,
    given: Collection[str],
    selection: Selection | None,
    cipher: Cipher | None,
    memory: int | None,
    *,
    same_ranks: bool,
) -> bool:
    """Return whether each file is converted as it is cut: as asked for, or because nothing says how it was sharded."""
    if same_ranks:
        return True
    if word not in RANKS or source_strategy is not None or {*CUT}.intersection(given):
        return False
    if source.is_file():
        chosen = selection or Selection()
        plain = chosen == Selection(drop=chosen.drop, rules=chosen.rules)
        return plain and memory is None and self_described(source) is None
    if is_file_name(target) or not source.is_dir() or not has_several_ranks(source):
        return False
    known = noted(source, cipher)
    return not (known.is_known or known.change)


def _of_same_ranks(
    source: Place,
    target: Place,
    word: str | None,
    selection: Selection | None,
    given: Collection[str],
    cipher: Cipher | None,
    target_cipher: Cipher | None,
    threads: int | None,
) -> tuple[Plan, str | None]:
    """Plan how each file is converted as it is cut; return the target's name, too, if it is one file."""
    if word is None:
        raise UsageError(
            "same_ranks changes the format alone, and none is given", code="needs-format",
            hint=Text("add ", Option("to", "ckpt"), " or ", Option("to", "safetensors")),
        )  # fmt: skip
    chosen = selection or Selection()
    if given or chosen != Selection(drop=chosen.drop, rules=chosen.rules):
        raise UsageError(
            f"{source}: tensors cannot be cut or chosen if each rank's file is converted as it is",
            code="needs-strategy", hint=Text("say how it was sharded: ", Option("source_strategy")),
        )  # fmt: skip
    name = None
    if source.is_file():
        _refuse_directory(target, source)
        name = target.name
    made = plan_convert(
        source, word, name=name, drop=chosen.drop, threads=threads, cipher=cipher, target_cipher=target_cipher,
        rules=chosen.rules,
    )  # fmt: skip
    return made, name
