"""Run the plan of a command that writes a checkpoint, or report what it would do."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from reshard.cli.commands import KEY_FILES, TYPED, refuse_to_write
from reshard.cli.terminal import (
    OWN_PROCESS,
    called_as,
    cluster_client,
    print_json,
    print_text,
    requested_cluster,
    say,
    say_warnings,
    wrote,
)
from reshard.core.open import files_of_sources, made_at
from reshard.core.storage.small import refuse_existing, refuse_inputs
from reshard.errors import ReshardError, SourceError, UsageError, names
from reshard.view.progress import progress

if TYPE_CHECKING:
    from reshard.cli.options import Running
    from reshard.core.plan.plan import Plan
    from reshard.core.run.bound import Bound
    from reshard.core.run.settings import Report
    from reshard.core.storage.places import Place


KEYS = """
The object of --json has the keys schema (of the meaning of these keys, 1),
dry_run, source, step (of several checkpoints the newest is read: name, and
which are older), target, format, encryption (its mode, or null), ranks,
tensors, bytes_needed, bytes_read, bytes_written (contents), target_bytes (whole
files), source_files, target_files, tasks, peak_memory, bytes_copied (by the
store of TARGET), requests (to object stores, about: get, put, copy, post,
other; null if all files are local), partition,
read_amplification, seconds (null in a dry run), ran_on (likewise: where the
tasks ran), dropped, missing, left_out (by
--weights-only, --include and --exclude), changes (of names and values: kind,
text, tensors, detail), warnings, sampled (what was looked at when SOURCE was
opened), files: rank, path, nbytes; replicas, links, measured_memory, checksums,
resumed, finished: how many files an earlier run had finished, which were not
read again; removed: those of earlier runs that --overwrite or --restart
removed; verify: the command to type (null where TARGET alone is not enough);
manifest: the command that checks it. If it fails, it has error: code,
exit_code, message, facts, hint.
"""


def carry_out(plan: Plan, target: Place, running: Running, *, result: Place | None = None) -> None:
    """Run a plan, or report what it would do.

    Args:
        plan: the plan to run.
        target: the directory of the target files.
        running: the options.
        result: the target that the user named, if it is a file in the target directory.
    """
    from reshard.core.run.bound import bind

    _check_manifest(running.write_manifest, plan, target, overwrite=running.overwrite)
    refuse_to_write([f"{target}/{file.path}" for file in plan.files])
    bound = bind(_with_warning_of_keys(plan), target, running, is_whole=result in {None, target})
    if not running.quiet:
        say_warnings(bound.plan.warnings)
    if running.dry_run:
        messages = _preflight(bound, running)
        if not running.quiet:
            say_warnings(messages)
        print_plan(bound.plan, str(target), as_json=running.as_json, verbose=running.verbose)
        return
    done = _run(bound, running)
    wrote()
    if done.touched and not running.quiet:
        say_warnings([_touched(done.touched, "kept")])
    manifest = None
    if running.write_manifest is not None:
        manifest = _write_manifest(running.write_manifest, done, overwrite=running.overwrite)
    if running.as_json or not running.quiet:
        _print_done(bound.plan, target, result or target, done, running, manifest)


def _with_warning_of_keys(plan: Plan) -> Plan:
    """Return a plan with a warning if it decrypts what it writes."""
    if not plan.source.cipher or plan.cipher:
        return plan
    advice = "; --target-key-file encrypts it" if plan.format == "ckpt" else ""
    warning = f"{plan.source.root} is encrypted, and what is written is not{advice}"
    return replace(plan, warnings=(*plan.warnings, warning))


def _run(bound: Bound, running: Running) -> Report:
    """Run a plan, with a progress bar."""
    from reshard.core.run.executor import import_dask

    cluster = running.cluster
    if requested_cluster(cluster) is None and click.get_current_context().obj is OWN_PROCESS:
        import_dask()
    from reshard.core.run.run import run_bound

    checksums = None if running.write_manifest is None else True
    typed = click.get_current_context().meta[TYPED]
    with (
        cluster_client(cluster, running.threads, quiet=running.quiet) as client,
        progress(quiet=running.quiet or running.as_json) as callback,
    ):
        options = replace(running, client=client, checksums=checksums, command=typed)
        return run_bound(bound, options, progress=callback)


def _print_done(
    plan: Plan, directory: Place, location: Place, done: Report, running: Running, manifest: str | None
) -> None:
    """Print what a run wrote, and the commands that check it and look at it."""
    check = None if manifest is None else _command("verify", location, "--manifest", running.write_manifest)
    is_known = plan.shape != "file" and _is_known(plan, location)
    verify = _verify(plan, location, is_known=is_known)
    if running.as_json:
        from reshard.view.plans import plan_data

        print_json(plan_data(plan, str(directory), done, verify, check))
        return
    from reshard.view.plans import report_text

    look = None
    if is_known or plan.shape == "file":
        look = _inspect(location) if plan.cipher else _command("inspect", location)
    print_text(report_text(plan, done, verify or check or look, manifest, verbose=running.verbose))
    if running.verbose and verify and look:
        say(f"to look at it: {look}")
    if running.verbose and verify and check:
        say(f"to check it against the manifest: {check}")


def _verify(plan: Plan, location: Place, *, is_known: bool) -> str | None:
    """Return the command that verifies what a plan wrote; None if its path is not enough."""
    keys = [
        *(key_typed("--key-file", "cipher") if plan.source.cipher else ()),
        *(key_typed("--target-key-file", "target_cipher") if plan.cipher else ()),
    ]
    if plan.shape == "file" and plan.request is None and not (plan.dropped or keys):  # only the format changed
        return _command("verify", location, "--against", plan.source.root)
    return _command("verify", location, *keys) if is_known else None


def _is_known(plan: Plan, location: Place) -> bool:
    """Return whether a target's ledger covers all files of a plan.

    If so, its path alone is enough to verify it.
    """
    location.refresh()
    with suppress(SourceError):  # a target that cannot be read back is not proposed for `verify`
        ledger = made_at(location)
        return ledger is not None and all(file.path in ledger.records for file in plan.files)
    return False


def _command(*words: object) -> str:
    """Return a command line of this program, quoted for a shell."""
    return f"{called_as()} {shlex.join(map(str, words))}"


def _inspect(location: Place) -> str:
    """Return the command that inspects an encrypted target, given its key."""
    command = _command("inspect", location, *(typed := key_typed("--key-file", "target_cipher")))
    end = "_FILE" if os.environ.get("RESHARD_TARGET_KEY_FILE") else ""
    return command if typed else f'RESHARD_KEY{end}="$RESHARD_TARGET_KEY{end}" {command}'


def key_typed(option: str, name: str) -> tuple[object, ...]:
    """Return the option and key file that were typed for a parameter, if any."""
    typed = click.get_current_context().meta.get(KEY_FILES, {})
    return (option, typed[name]) if name in typed else ()


def print_plan(plan: Plan, directory: str, *, as_json: bool, verbose: bool, then: str | None = None) -> None:
    """Print a plan."""
    if as_json:
        from reshard.view.plans import plan_data

        print_json(plan_data(plan, directory))
    else:
        from reshard.view.plans import plan_text

        print_text(plan_text(plan, directory, verbose=verbose, then=then))


def _preflight(bound: Bound, running: Running) -> list[str]:
    """Return messages on existing target files and the options that they require."""
    from reshard.core.run.state.preflight import Do, files_with, preflight
    from reshard.view.text import count_text

    plan, root, older = bound
    state = preflight(plan, root, running)
    finished = files_with(state.fates, Do.KEEP)
    key = ", with another key" if plan.cipher else ""
    counts = (
        (len(finished), "would be kept unread, finished by an earlier run; reshard verify reads every bit"),
        (state.resumable, "would be resumed, begun by an earlier run"),
        (
            len(files_with(state.fates, Do.CHANGED)),
            f"would be refused, made by another plan{key} or from other sources; a run needs --restart",
        ),
        (len(files_with(state.fates, Do.UNMANAGED)), "would be in the way; a run needs --overwrite"),
    )
    removed = [f"{count_text(len(older), 'file')} of earlier runs would be removed: {names(sorted(older), most=3)}"]
    messages = [f"{count_text(count, 'target file')} {words}" for count, words in counts if count]
    touched = sum(state.fates[file].is_touched for file in finished)
    return [*messages, *(removed if older else []), *([_touched(touched, "would keep")] if touched else [])]


def _touched(count: int, verb: str) -> str:
    """Return the warning about finished files whose sources were copied or touched since."""
    from reshard.view.text import count_text

    return (
        f"{verb} {count_text(count, 'target file')} that an earlier run finished before source files were "
        "copied, linked or touched; samples of what they hold are equal, and `reshard verify` compares every bit"
    )


def _check_manifest(path: Place | None, plan: Plan, target: Place, *, overwrite: bool) -> None:
    """Refuse a manifest that exists, that would replace a file of the run, or that has no meaning.

    Raises:
        UsageError: the target is a zarr store, or encrypted.
        TargetError: the manifest exists, is a directory, or is a target file or a source file.
    """
    if path is None:
        return
    refuse_existing(path, overwrite=overwrite)
    if plan.shape == "store" or plan.cipher or plan.linked:
        obstacle = (
            "has its arrays in chunks" if plan.shape == "store" else "is encrypted" if plan.cipher else "gets links"
        )
        raise UsageError(
            f"--write-manifest is for plain checkpoint files, and {target} {obstacle}", code="no-manifest",
            hint=f"leave it out, and compare with the source: {called_as()} verify {target} --against SOURCE",
        )  # fmt: skip
    advice = "choose another name for the manifest"
    refuse_inputs([path], files_of_sources(plan.source), "one of the source files", advice)
    refuse_inputs([path], [f"{target}/{file.path}" for file in plan.files], "one of the target files", advice)


def _write_manifest(path: Place, report: Report, *, overwrite: bool) -> str:
    """Write the manifest of a finished run, and return a message about it."""
    from reshard.view.text import count_text  # not on every start

    try:
        count = report.write_manifest(path, overwrite=overwrite)
    except ReshardError as error:
        error.add_note("the target files are complete; the same command, without --restart, makes the manifest alone")
        raise
    return f"{path}, {count_text(count, 'checksum')} of {count_text(len(report.files), 'file')}"
