"""`reshard verify`: check that a checkpoint is complete, equal to its source, and unchanged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import click

from reshard.cli.commands import Command, option, record, typed
from reshard.cli.options import (
    cluster_option,
    json_option,
    memory_option,
    opened_target_options,
    opening_flag,
    overwrite_file_option,
    quiet_option,
    source_options,
    threads_option,
    verbose_option,
)
from reshard.cli.selection import selection_options
from reshard.cli.terminal import OPTIONS, REPORTED, cluster_client, print_json, print_text, say, say_warnings, wrote
from reshard.cli.values import READ_PLACE, WRITE_PLACE, share
from reshard.core.listing import OpenOptions
from reshard.core.plan.inputs import Selection
from reshard.core.storage.cipher import required
from reshard.errors import UsageError, VerifyError
from reshard.view.progress import progress

if TYPE_CHECKING:
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.storage.cipher import Cipher
    from reshard.core.storage.places import Place
    from reshard.core.verify.verification import Verification

_WORDS = ("comparing", "comparing")


@dataclass(frozen=True, kw_only=True)
class Checking:
    """How `verify` compares, and how much it prints."""

    deduplicated: bool
    independent: bool
    sample: float | None
    manifest: Place | None
    write_manifest: Place | None
    overwrite: bool
    memory: int | None
    threads: int | None
    cluster: str | None
    as_json: bool
    verbose: bool
    quiet: bool


_source, _target, _running = (partial(option, under=name) for name in ("Source", "Target", "Running"))

_checking_options = record(
    "checking",
    Checking,
    _target(
        "--deduplicated", is_flag=True,
        help="TARGET stores each block on only one of the ranks that share it; safetensors files say so themselves.",
    ),
    _target(
        "--independent", is_flag=True,
        help="Compare the safetensors files of TARGET with what Hugging Face's library reads in them, too.",
    ),
    _running(
        "--sample", in_short_help=True, callback=share, metavar="SHARE",
        help="Compare only a random share of the rows, such as 5%.",
    ),
    _target(
        "--manifest", in_short_help=True, type=READ_PLACE, metavar="FILE",
        help="Compare the files of TARGET with the checksums in FILE; no strategy is needed. With --partial TARGET may "
        "lack some of them.",
    ),
    option(
        "--write-manifest", under="Output", in_short_help=True, type=WRITE_PLACE, metavar="FILE",
        help="Write checksums of the files of TARGET into FILE. Every file is read for them.",
    ),
    overwrite_file_option,
    memory_option,
    threads_option,
    cluster_option,
    json_option,
    verbose_option,
    quiet_option,
)  # fmt: skip


@click.command(
    cls=Command,
    epilog="""
Examples:

  reshard verify dst_checkpoints
  reshard verify dst_checkpoints --target-strategy dst_strategy.ckpt \\
      --against src_checkpoints --source-strategy src_strategy.ckpt
  reshard verify dst_checkpoints --write-manifest dst.json
  reshard verify dst_checkpoints --manifest dst.json
""",
    details="""
Without a ledger, --against and --manifest, headers and the blocks of each rank
are checked, and checksums that files have of their contents. Replicas are
compared in samples, or, if the files have checksums and with --against, whole.
With --against SOURCE changes that ledgers of the two record (names, casts,
rules, an adapter, tensors left out) are listed, and applied before comparing.
Options such as --cast and --include say instead how TARGET is made from SOURCE.
Without --against, --rank-pattern, --suffix, --step and --partial are for TARGET;
with it, they are for SOURCE, and --partial for a TARGET with a strategy, too.
Tensors in files that both sides share, as after --link, are not compared; the
verdict counts them.

Exits with 0 if all is as it should be, with 3 if something differs, and with 4
if TARGET or SOURCE is incomplete or corrupt.

The object of --json has the keys schema (of the meaning of these keys, 1),
target, against, step and against_step (which of several checkpoints was
read: name, and which are older), equal, changes (from the source to the target:
kind, which is lora, rules, names, cast or selection; text, tensors: how many,
detail: such as the adapter), note (a remark on the comparison), absent (blocks
that no file has), linked (tensors in files that both sides share, which cannot
be compared), linked_summed_bytes (of these files, compared with checksums),
ranks, files, tensors, copies, bytes_read, total_bytes, sample,
seconds, dropped, left_out, warnings, unchecked (what was not checked),
independent (how many files of TARGET the safetensors library read), and
differences: kind (values, missing, extra, dtype, shape, text, note, object;
file, size, checksum), text, tensor, side, rank, path, block (start, stop),
index (in the whole tensor), index_in_block, count, found, expected, reference,
dtype, largest (absolute difference; null if not finite), nans (how many of
count). If it fails, it has error: code, exit_code, message, facts, hint.
""",
    short_help="Check a checkpoint: structure, every bit, or checksums.",
)
@click.argument("target", type=READ_PLACE)
@_source(
    "--against", "source", in_short_help=True, type=READ_PLACE, metavar="SOURCE",
    help="The checkpoint that TARGET was made from, or should be equal to.",
)  # fmt: skip
@_source(
    "--as-is", in_short_help=True, is_flag=True,
    help="Compare the two as they are, without the changes recorded in ledgers.",
)  # fmt: skip
@opened_target_options
@source_options
@selection_options
@_checking_options
def verify(
    target: Place,
    source: Place | None,
    as_is: bool,
    target_opening: OpenOptions,
    opening: OpenOptions,
    selection: Selection,
    checking: Checking,
) -> None:
    """Check the checkpoint TARGET: that it is complete, that every bit is that of SOURCE, that its files are unchanged.

    Without other options, what reshard wrote is compared bit for bit with the source that its ledger names, or if
    that is gone, with the sizes and checksums in the ledger.
    """
    from reshard.core.verify.verify import as_it_is
    from reshard.core.verify.verify import verify as verified
    from reshard.view.verdict import summary, verdict_data, verdict_text

    manifest, quiet = checking.manifest, checking.quiet
    opening, target_opening = _of_sides(opening, target_opening, compared=source is not None)
    _check_usage(source, opening, target_opening, checking)
    if checking.write_manifest is not None:
        _refuse_keys({"--target-key-file": target_opening.cipher, "--key-file": opening.cipher})
        _make(target, checking.write_manifest, target_opening, checking)
        return
    chosen = None if selection == Selection() else selection
    if as_is:
        chosen = as_it_is(chosen, source)
    has_options = (
        source or target_opening.strategy or checking.deduplicated or target_opening.given or selection != Selection()
    )
    cluster = checking.cluster
    if cluster is not None and (manifest or (has_options and source is None)):
        if typed("cluster"):
            raise UsageError(
                "--cluster is for a comparison with a source, or for TARGET without other options",
                code="needs-source",
                hint="add --against SOURCE",
            )
        cluster = None  # that of the environment is for comparisons
    with (
        cluster_client(cluster, checking.threads, quiet=quiet) as client,
        progress(quiet=quiet or checking.as_json, words=_WORDS) as callback,
    ):
        verify_target = partial(
            verified, cipher=target_opening.cipher, source_cipher=opening.cipher, independent=checking.independent,
            sample=checking.sample, memory=checking.memory, threads=checking.threads, client=client,
            progress=callback,
        )  # fmt: skip
        verification: Verification
        if manifest is not None:
            verification = verify_target(target, manifest=manifest, partial=target_opening.partial)
        elif not has_options:
            verification = verify_target(target)
        else:
            first = _opened("target", target, target_opening, opening.strategy, alone=source is None)
            second = source and _opened("source", source, opening, target_opening.strategy)
            verification = verify_target(first, against=second, selection=chosen, deduplicated=checking.deduplicated)
    if not quiet:
        say_warnings(verification.warnings)
    error = None if verification.equal else VerifyError(summary(verification), code="different")
    if checking.as_json:
        print_json(verdict_data(verification), error)
    elif not quiet:
        print_text(verdict_text(verification, OPTIONS, "--json", verbose=checking.verbose))
        click.get_current_context().meta[REPORTED] = True  # with a difference, the text is the error
    if error:
        raise error


def _opened(
    side: Literal["target", "source"],
    path: Place,
    opening: OpenOptions,
    other_strategy: Any,
    *,
    alone: bool = False,
) -> Place | Checkpoint:
    """Open a side with its options; without any, return its path for the ledger."""
    from reshard.api.jobs import noting_swap
    from reshard.core.verify.sides import opened

    if not alone and opening.strategy is None and not opening.given:
        return path
    with noting_swap(path, opening, other_strategy, side=side):
        return opened(path, what=side, **vars(opening))


def _of_sides(opening: OpenOptions, target_opening: OpenOptions, *, compared: bool) -> tuple[OpenOptions, OpenOptions]:
    """Return the options of the source and of the target; without a source, the target gets those that both have."""
    if compared:
        return opening, replace(target_opening, partial=opening.partial and target_opening.strategy is not None)
    names = ("rank_pattern", "suffix", "step", "partial")
    shared = {name: getattr(opening, name) for name in names}
    none = {name: getattr(OpenOptions(), name) for name in names}
    return replace(opening, **none), replace(target_opening, **shared)


_OF_MANIFESTS = {"--manifest": {"partial"}, "--write-manifest": {"rank_pattern", "suffix"}}
"""The options of opening TARGET that go with a manifest."""


def _check_usage(source: Place | None, opening: OpenOptions, target_opening: OpenOptions, checking: Checking) -> None:
    """Refuse options that would have no effect."""
    values = {"--against": source, "--manifest": checking.manifest, "--write-manifest": checking.write_manifest}
    ways = [flag for flag, value in values.items() if value is not None]
    if len(ways) > 1:
        raise UsageError(
            f"{' and '.join(ways)} exclude each other", code="conflicting-options", hint="give one of them"
        )
    if checking.overwrite and checking.write_manifest is None:
        raise UsageError("--overwrite is for --write-manifest", code="no-effect", hint="leave it out")
    if source is not None:
        return
    if opening.strategy is not None:
        raise UsageError(
            "--source-strategy is for a comparison, and there is no SOURCE",
            code="needs-source",
            hint="add --against SOURCE; the strategy of TARGET is --target-strategy",
        )
    for name in opening.given:
        raise UsageError(
            f"{opening_flag(name)} is for SOURCE, and there is none",
            code="needs-source",
            hint="for TARGET it is --target-layout" if name == "layouts" else "add --against SOURCE",
        )
    if not ways:
        return
    for name in target_opening.given:
        if name not in _OF_MANIFESTS[ways[0]]:
            side = "target-" if name in {"layouts", "stage"} else ""
            flag = opening_flag(name).replace("--", f"--{side}")
            raise UsageError(f"{flag} does not go with {ways[0]}", code="no-effect", hint="leave it out")
    if checking.deduplicated:
        raise UsageError(
            "--deduplicated is for a strategy; a manifest says what each file holds",
            code="conflicting-options",
            hint="leave it out",
        )
    if checking.write_manifest is not None and checking.sample is not None:
        raise UsageError("a manifest is of whole files", code="conflicting-options", hint="leave --sample out")


def _refuse_keys(keys: dict[str, Cipher | None]) -> None:
    """Refuse keys for a manifest."""
    if flags := [name for name, key in keys.items() if required(key)]:
        raise UsageError(
            "a manifest is of files that are not encrypted",
            code="not-encryptable",
            hint=f"leave {' and '.join(flags)} out",
        )


def _make(target: Place, path: Place, opening: OpenOptions, checking: Checking) -> None:
    """Make a manifest, and write it."""
    from reshard.core.open import files_read, read_headers
    from reshard.core.storage.places import as_place
    from reshard.core.storage.small import refuse_existing, refuse_inputs
    from reshard.core.verify.manifest import Manifest
    from reshard.core.verify.sides import options_of
    from reshard.view.text import count_text

    refuse_existing(path, overwrite=checking.overwrite)  # before any file is read
    if path.is_there() or as_place(f"{path}.partial").is_there():
        files = read_headers(target, rank_pattern=opening.rank_pattern, suffix=opening.suffix).files
        advice = "choose another name for the manifest"
        refuse_inputs([path], files_read(target, files), f"one of the files of {target}", advice)
    with options_of("target"), progress(quiet=checking.quiet, words=("reading", "reading")) as callback:
        manifest = Manifest.make(
            target, rank_pattern=opening.rank_pattern, suffix=opening.suffix, threads=checking.threads,
            progress=callback,
        )  # fmt: skip
    manifest.write(path, overwrite=checking.overwrite)
    wrote()
    if not checking.quiet:
        say(f"wrote {path}: {count_text(manifest.checksums, 'checksum')} of {count_text(len(manifest.files), 'file')}")
