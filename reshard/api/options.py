"""The options that `convert`, `plan`, `write` and `verify` share, each with its type and its text once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from reshard.former import KEYWORDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from reshard.api.choices import Globs
    from reshard.core.plan.inputs import Selection
    from reshard.core.run.settings import Progress
    from reshard.core.storage.cipher import Cipher
    from reshard.core.storage.places import AnyName
    from reshard.core.verify.manifest import Manifest
    from reshard.rules.lora import LoRA
    from reshard.rules.rules import Rules


class SelectionKeywords(TypedDict, total=False):
    """Which tensors, under which names, as which dtypes: each as in `reshard.Selection`.

    Attributes:
        include: names, or globs, of the only tensors that are taken.
        exclude: names, or globs, of tensors that are not taken.
        weights_only: no optimizer states, `global_step` and the like.
        name_map: old to new names; optimizer states follow.
        cast: dtypes to convert, such as `{"float32": "bfloat16"}`.
        drop: weights that the target may lack.
        allow_missing: weights that the source may lack.
        rules: rules of other names and shapes, or their file.
        lora: an adapter to merge, or its directory.
        selection: in place of these keywords.
    """

    include: Globs
    exclude: Globs
    weights_only: bool
    name_map: Mapping[str, str] | None
    cast: Mapping[str, str] | Globs | None
    drop: Globs
    allow_missing: Globs
    rules: Rules | Mapping[str, Any] | AnyName | None
    lora: LoRA | AnyName | None
    selection: Selection | None


class TargetKeywords(TypedDict, total=False):
    """What is written; `reshard formats` says which formats take which options.

    Attributes:
        ranks: only these ranks of the target; with the strategy of one stage of a pipeline, ranks of this stage.
        target_stage: only the ranks of this stage of the target's pipeline.
        remove_redundancy: store each block on one of the ranks that would hold it.
        target_cipher: encrypts the target's `.ckpt` files, as MindSpore does; needs the `crypto` extra.
        memory: the most resident memory to use, in bytes or as `"1GB"`; by default about 100 MB are enough, at URLs 256
            MB, and some kB a tensor.
        threads: the most threads that a run may have, fewer if `memory` is for fewer; by default 4.
        prefix: what names of files begin with.
        max_shard_size: the most tensor bytes in a file, in bytes or as `"4GB"`; one tensor alone may have more.
        chunk_size: the most bytes in a chunk of a store, such as `"16MB"`.
        compression: `zstd`, or `zstd:LEVEL`.
        target_step: the step of the target, in a run's directory.
        link: link the files of the source, and write metadata alone.
    """

    ranks: Iterable[int] | None
    target_stage: int | None
    remove_redundancy: bool
    target_cipher: Cipher | None
    memory: int | str | None
    threads: int | None
    prefix: str | None
    max_shard_size: int | str | None
    chunk_size: int | str | None
    compression: str | None
    target_step: int | None
    link: bool


class RunKeywords(TypedDict, total=False):
    """How a target is written: each as in `Plan.run`.

    Attributes:
        client: where to run: a `distributed.Client`, a cluster, an address, or a word such as `"threads"`.
        overwrite: replace target files that exist.
        restart: discard the state of an earlier run in the target.
        progress: called with a `reshard.Progress` after each task; True shows a bar.
        storage_options: credentials and address of buckets, as for `reshard.open`.
    """

    client: Any
    overwrite: bool
    restart: bool
    progress: Callable[[Progress], None] | bool | None
    storage_options: Mapping[str, Any] | None


class PlanOptions(SelectionKeywords, TargetKeywords, total=False):
    """The options of `reshard.plan`."""


class WriteOptions(TargetKeywords, RunKeywords, total=False):
    """The options of `reshard.write`."""


class ConvertOptions(SelectionKeywords, TargetKeywords, RunKeywords, total=False):
    """The options of `reshard.convert`.

    Attributes:
        cipher: decrypts the source's `.ckpt` files.
        dequantize: multiply quantized weights by their scales first, as `Checkpoint.dequantize` to this dtype.
        same_ranks: `safetensors` and `ckpt`: convert each rank's file as it is cut; only the format changes. The
            default if the sharding of the source is unknown, and for one file.
    """

    cipher: Cipher | None
    dequantize: str | None
    same_ranks: bool


class VerifyOptions(SelectionKeywords, total=False):
    """The options of `reshard.verify`; those of a selection say how the target was made from the source.

    Attributes:
        cipher: decrypts the source, if that is a path, or the one that the ledger names.
        target_cipher: decrypts the target, if that is a path.
        manifest: the manifest of the target's files, in place of a source; no strategy is needed.
        as_is: compare the two as they are, ignoring changes that their ledgers record.
        sample: the share of rows to compare, more than 0 and at most 1; by default all. Some rows of every tensor are
            compared, chosen anew each time.
        partial: files of the manifest, or of some ranks of the checkpoint, may be missing.
        deduplicated: the target stores each replica once (`remove_redundancy`), on any of the ranks that the strategy
            gives it to. safetensors files say so themselves; `.ckpt` files cannot.
        independent: compare the target's safetensors files with what Hugging Face's library `safetensors` reads in
            them, too.
        memory: the most resident memory to use, in bytes or as `"1GB"`.
        threads: the number of threads; by default one for each available processor, at most 4.
        client: as for `Plan.run`: a cluster, whose workers read by the same paths, or threads.
        progress: called with bytes compared (as `written`) and to be compared; True shows a bar.
        storage_options: as for `reshard.open`, for both paths.
    """

    cipher: Cipher | None
    target_cipher: Cipher | None
    manifest: Manifest | AnyName | None
    as_is: bool
    sample: float | None
    partial: bool
    deduplicated: bool
    independent: bool
    memory: int | str | None
    threads: int | None
    client: Any
    progress: Callable[[Progress], None] | bool | None
    storage_options: Mapping[str, Any] | None


def taken(options: dict[str, Any], kind: type[Any]) -> dict[str, Any]:
    """Take the options of a kind out of a dict, and return them."""
    return {name: options.pop(name) for name in kind.__annotations__ if name in options}


def unexpected(function: str, name: str) -> TypeError:
    """Return the error for a keyword that a function does not have; one of old is told today's word."""
    advice = f"; {KEYWORDS[name]}" if name in KEYWORDS else ""
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{advice}")
