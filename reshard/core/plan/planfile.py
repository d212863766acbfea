"""Plan files: plans that are made on one machine and run on another.

A plan file holds the *inputs* of a plan: the source's files and the strategy that joins them, the target's strategy
and all options. The reader opens the same files and plans again. The file is small, reading it takes no longer (headers
must be read for the comparison anyway), and it is safe: no offset, no path of a target file and no byte of a header is
taken from the plan file, so it cannot write outside the target, nor read outside the source. It holds no key and no
weights.

The run is refused if it differs from the plan. These are compared:

1. the size of each source file, a digest of its header, and a digest of a few of its pages, because checkpoints of two
   steps have equal headers; times are not compared, because a copy has other times;
2. the digest of the new plan with the digest of the saved plan: target files, headers, blocks (`plan_digest`).

The file is JSON with a numbered version. It is validated as a whole before any of it is used (`schema`). Layouts, and
the storage entries of similar tensors, are listed once; the same plan gives the same bytes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any

from reshard.core.format import format_of, written
from reshard.core.layout.arrangement import Arrangement
from reshard.core.layout.grid import MOST_DEVICES
from reshard.core.model.digests import index_digests, pages_digest
from reshard.core.model.facts import SampleStats  # noqa: TC001 -- `schema.read` evaluates annotations
from reshard.core.open import files_of_sources
from reshard.core.options import Options
from reshard.core.plan.inputs import provenance_of, selection_of
from reshard.core.plan.make import plan as make_plan
from reshard.core.plan.plan import plan_digest
from reshard.core.records.arrangements import ArrangementRecord
from reshard.core.records.provenance import ComputationRecord, FileRecord, Provenance, SourceRecord
from reshard.core.records.schema import Count, InnerPath, Line, is_inner_path, parse, to_json
from reshard.core.records.schema import read as read_record
from reshard.core.reopen import recomputed, reopen
from reshard.core.runs import is_iteration
from reshard.core.storage.places import as_place
from reshard.core.storage.small import read_small, refuse_existing, refuse_inputs, write_whole
from reshard.errors import Faults, Option, PlanError, ReshardError, SourceError, TargetError, Text, UsageError

if TYPE_CHECKING:
    from reshard.core.model.checkpoint import Checkpoint
    from reshard.core.plan.plan import Plan, Request
    from reshard.core.storage.cipher import Cipher

VERSION = 4

_LARGEST_FILE = 1 << 28


@dataclass(frozen=True, slots=True)
class _OptionsRecord:
    """The format of the target, and its options: the fields of its class."""

    to: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, options: object) -> _OptionsRecord:
        """Return the record of options.

        Raises:
            UsageError: a plan with them cannot be saved.
        """
        format_ = format_of(options)
        if format_ is None or not isinstance(options, Options):
            raise UsageError(f"a plan with files of {type(options).__name__} cannot be saved", code="not-savable")
        return cls(format_.name, {each.name: getattr(options, each.name) for each in fields(options)})

    def read(self) -> Options:
        """Return the options; raise `ValueError` if the record is invalid."""
        try:
            kind = written(self.to).options
        except UsageError as error:
            raise ValueError(f"$.files.to: {error.message}") from None
        try:
            options: Options = read_record(kind, self.fields, "$.files.fields")
        except UsageError as error:
            raise ValueError(f"$.files.fields: {error.message}") from None
        return options


@dataclass(frozen=True, slots=True)
class _PlanRecord:
    """A plan file: provenance, and the other inputs of the plan.

    Attributes:
        reshard_plan: the version of the format.
        digest: the digest of the plan (`plan_digest`).
        provenance: the source, the target and the selection.
        warnings: warnings from opening the source.
        looked: as in `Opening`.
        arrangement: the arrangement of the target, if it is not a strategy.
        files: the format of the target, and its options.
        ranks: as in `Request`, like `memory`.
        directory: the default target directory.
    """

    reshard_plan: Count
    digest: str
    provenance: Provenance
    warnings: tuple[Line, ...]
    looked: SampleStats | None
    arrangement: ArrangementRecord | None
    files: _OptionsRecord
    ranks: tuple[Count, ...] | None
    memory: Count | None
    directory: InnerPath | None


@dataclass(frozen=True, slots=True, eq=False)
class PlanFile:
    """A plan file that was read and is valid; its source was not opened yet.

    Attributes:
        path: the plan file.
        source: the directory or file of the source on the machine where it was planned; or how it is computed.
        directory: the default target directory: a path below the current directory.
    """

    path: str
    source: str
    directory: str | None
    _content: _PlanRecord

    def plan(
        self,
        source: str | os.PathLike[str] | None = None,
        *,
        cipher: Cipher | None = None,
        target_cipher: Cipher | None = None,
        threads: int | None = None,
    ) -> Plan:
        """Open the source and make the plan again.

        Args:
            source: the path of the source, if it was moved since; may also be a run directory. Not for a source that
                is computed from others.
            cipher: decrypts the source's files.
            target_cipher: encrypts the target's files, in the mode that was planned.
            threads: maximum number of threads of a run, as for `reshard.plan`.

        Raises:
            SourceError: files of the source are missing, or not valid.
            TargetError: the source files differ from the planned ones.
            PlanError: the new plan differs from the saved one.
            UsageError: the source or the target is encrypted and no key is given, or the target is not and one is; or
                `source` is given for a computed source.
        """
        content = self._content
        mode = content.provenance.target.encryption
        if mode is not None and target_cipher is None:
            raise UsageError(
                f"the target that {self.path} plans is to be encrypted", code="no-key",
                facts=["a plan file holds no key"], hint=Text("give it: ", Option("target_cipher", mode)),
            )  # fmt: skip
        if mode is None and target_cipher is not None:
            raise UsageError(
                f"the target that {self.path} plans is not encrypted", code="not-encrypted",
                hint=Text("plan again with the key, or leave ", Option("target_cipher"), " out"),
            )  # fmt: skip
        checkpoint = self._open_source(source, cipher)
        request = _request(content)
        result = make_plan(
            checkpoint,
            request.target,
            format=request.format,
            files=request.files,
            ranks=request.ranks,
            stage=request.stage,
            selection=request.selection,
            remove_redundancy=request.remove_redundancy,
            memory=request.memory,
            threads=threads,
            target_cipher=target_cipher and replace(target_cipher, mode=mode),
        )
        if plan_digest(result) != content.digest:
            raise self._different(result)
        return result

    def _different(self, result: Plan) -> ReshardError:
        """Return the error for a new plan that differs: it names a file beside the weights that changed, if any."""
        from reshard import __version__

        made_by = self._content.provenance.made_by
        root, planned_ns = Path(result.source.opened.root), Path(self.path).stat().st_mtime_ns
        weights = {file.path for file in result.source.opened.files}
        beside = [path for file in result.files if (path := root / file.path).is_file() and str(path) not in weights]
        if changed := [path for path in beside if path.stat().st_mtime_ns >= planned_ns]:
            return TargetError(f"{changed[0]} changed since it was planned", code="source-changed", hint="plan again")
        other = f"reshard {made_by} made the plan, and this is {__version__}"
        return PlanError(
            f"this reshard would not write what {self.path} planned", code="different-plan",
            facts=[other if made_by != __version__ else "the files beside the weights changed, or the plan file did"],
            hint="plan again",
        )  # fmt: skip

    def _open_source(self, source: str | os.PathLike[str] | None, cipher: Cipher | None) -> Checkpoint:
        record = self._content.provenance.source
        if record.computation and source is not None:
            raise UsageError(
                f"{self.path} plans with several sources, which are where they were", code="several-sources",
                facts=[record.title], hint=Text("leave ", Option("source"), " out, or plan again"),
            )  # fmt: skip
        if record.encrypted and cipher is None:
            raise UsageError(
                f"the source that {self.path} plans with is encrypted", code="no-key",
                facts=["a plan file holds no key"], hint=Text("give it: ", Option("key")),
            )  # fmt: skip
        if record.computation is None:
            root = Path(source or record.root).absolute()
            iteration = Path(record.root).name
            if is_iteration(iteration) and (root / iteration).is_dir():
                root /= iteration
            checkpoint = _checked_source(record, root, cipher, Text("say where the source is: ", Option("source")))
        else:

            def open_source(each: SourceRecord) -> Checkpoint:
                return _checked_source(each, Path(each.root), cipher if each.encrypted else None)

            checkpoint = recomputed(record, open_source)
        opening = replace(checkpoint.opening, looked=self._content.looked)
        return replace(checkpoint, warnings=self._content.warnings, opening=opening)


def _checked_source(record: SourceRecord, root: Path, cipher: Cipher | None, advice: str = "") -> Checkpoint:
    """Open a source; refuse files that differ from the planned ones. The advice is for missing files."""
    _check_sizes(record, root, advice)
    checkpoint = reopen(record, as_place(root), cipher=cipher)
    if checkpoint.extras.described_by != record.described_by:
        raise TargetError(
            f"{root} has no {record.described_by}, unlike when it was planned", code="source-changed",
            hint=_OTHER_FILES,
        )  # fmt: skip
    _check_contents(record, checkpoint)
    return checkpoint


def _check_sizes(record: SourceRecord, root: Path, advice: str) -> None:
    missing, changed = Faults(str(root)), Faults(str(root))
    for _, path, nbytes, *_ in record.files:
        try:
            status = (root / path).stat()
        except OSError as error:
            missing.add(path, f"cannot be found ({error.strerror})", code="not-found")
            continue
        if not S_ISREG(status.st_mode):  # opening a pipe would block
            missing.add(path, "is not a regular file", code="not-a-file")
        elif status.st_size != nbytes:
            sizes = f"has {status.st_size} bytes; it had {nbytes} when it was planned"
            changed.add(path, sizes, code="source-changed")
    missing.raise_if_any(SourceError, advice=advice)
    changed.raise_if_any(TargetError, advice=_OTHER_FILES)


def _check_contents(record: SourceRecord, checkpoint: Checkpoint) -> None:
    changed = Faults(checkpoint.root)
    planned, current = _versions(record), _versions(_source_record(checkpoint))
    for path in current.keys() ^ planned.keys():  # of a store, which lists its own files
        problem = "is gone since it was planned" if path in planned else "is new since it was planned"
        changed.add(path, problem, code="files-gone" if path in planned else "files-added")
    for path in (path for path in planned if path in current):
        if current[path][0] != planned[path][0]:
            changed.add(path, "has another header than when it was planned", code="header-changed")
        elif current[path] != planned[path]:
            changed.add(path, "has other contents than when it was planned", code="source-changed")
    changed.raise_if_any(TargetError, advice=_OTHER_FILES)


def _versions(source: SourceRecord) -> dict[str, tuple[str, str]]:
    """Return the digests of header and pages of each file."""
    return {file.path: (source.headers[file.header or 0], file.version) for file in source.files}


_OTHER_FILES = "give the files that were planned with, or plan again"


def read(path: str | os.PathLike[str]) -> PlanFile:
    """Read a plan file without opening its source.

    Raises:
        PlanError: it cannot be read, has another version, or is not valid; the message says where.
    """
    return _checked(read_small(path, "plan file", _LARGEST_FILE, PlanError), os.fspath(path))


def save(plan: Plan, path: str | os.PathLike[str], *, directory: str | None = None, overwrite: bool = False) -> None:
    """Write a plan file; it gets its name only when it is complete.

    Args:
        plan: a plan that `plan` made.
        path: where to write it.
        directory: as `PlanFile.directory`.
        overwrite: replace an existing file.

    Raises:
        UsageError: the plan cannot be saved: it was combined from others, or its source is in several directories.
        SourceError: a source file cannot be read.
        TargetError: the file exists, cannot be written, or is one of the sources.
    """
    if plan.request is None:
        raise UsageError(
            "a plan to convert file by file cannot be saved", code="not-savable",
            hint="run it where the files are; it needs nothing else",
        )  # fmt: skip
    if any(file.inputs is not None for file in plan.source.files) and _reads_arrays(plan):
        raise UsageError(
            "a plan with assigned arrays cannot be saved, as arrays are in no file", code="not-savable",
            hint="run it, or write the arrays first",
        )  # fmt: skip
    refuse_inputs([path], files_of_sources(plan.source), "one of the source files", "choose another name for the plan")
    refuse_existing(path, overwrite=overwrite)
    content = to_json(_data(plan, plan.request, directory)) + b"\n"
    try:
        _checked(content, "plan")
    except PlanError as error:
        raise UsageError("this plan cannot be saved", code="not-savable", facts=[error.message, *error.facts]) from None
    write_whole(Path(path), content)


def _reads_arrays(plan: Plan) -> bool:
    """Return whether a tensor is computed from an assigned array."""
    from reshard.expressions.assigned import reads_arrays  # it brings numpy

    return reads_arrays(plan.source.coding)


# --- writing ----------------------------------------------------------------------------------------------------


def _data(plan: Plan, request: Request, directory: str | None) -> _PlanRecord:
    source = plan.source.opened
    return _PlanRecord(
        VERSION,
        plan_digest(plan),
        provenance_of(plan, _source_record(source)),
        tuple(source.warnings),
        source.opening.looked,
        ArrangementRecord.of(request.target) if isinstance(request.target, Arrangement) else None,
        _OptionsRecord.of(request.files),
        request.ranks,
        request.memory,
        directory,
    )


def _source_record(source: Checkpoint) -> SourceRecord:
    """Return the record of a source, with digests of its files; their paths are below it.

    Further files of metadata come first.
    """
    root = Path(source.root).absolute()
    computation = ComputationRecord.of(source, _source_record)
    if computation is not None:
        return SourceRecord.of(source, str(root), (), computation=computation)
    stored = source.stored_files
    digests = index_digests([file.index for _, file in stored])
    headers = {(rank, file.path, file.nbytes): header for (rank, file), header in zip(stored, digests, strict=True)}
    if source.format is not None and (metadata := source.format.metadata_of(source)):
        root = root.resolve()
        headers = {(0, file, Path(file).stat().st_size): "" for file in metadata} | headers
    numbers: dict[str, int] = {}
    files = []
    for (rank, path, nbytes), header in headers.items():
        if not Path(path).is_relative_to(root):
            raise UsageError(
                f"{path} is not below {root}", code="not-savable",
                facts=["a plan can be saved only if all files of its source are in one directory"],
            )  # fmt: skip
        number = numbers.setdefault(header, len(numbers))
        files.append(FileRecord(rank, Path(path).relative_to(root).as_posix(), nbytes, number, pages_digest(path)))
    named = os.path.abspath(Path(source.root).absolute())  # noqa: PTH100 -- without `..`, links as they are
    return SourceRecord.of(source, named, files, list(numbers))


# --- reading ----------------------------------------------------------------------------------------------------


def _checked(content: bytes, path: str) -> PlanFile:
    """Validate a plan file; its source is compared later, when it is opened."""
    try:
        parsed = parse(content)
        _check_version(parsed)
        result: _PlanRecord = read_record(_PlanRecord, parsed)
        for source in result.provenance.source.stored:
            _check_files(source)
            if source.strategy:
                source.strategy.read()
        _request(result)
    except (ValueError, ReshardError) as error:
        raise PlanError(
            f"{path} is not a valid plan file",
            code="not-a-plan",
            facts=[line.strip() for line in str(error).splitlines()],
        ) from None
    return PlanFile(path, result.provenance.source.title, result.directory, result)


def _check_version(parsed: object) -> None:
    if not isinstance(parsed, dict) or "reshard_plan" not in parsed:
        raise ValueError("it has no key 'reshard_plan'; expected what `reshard plan -o FILE` writes")
    if parsed["reshard_plan"] != VERSION:
        raise ValueError(
            f"it is of version {parsed['reshard_plan']!r:.60}; this reshard reads version {VERSION}; plan again"
        )


def _check_files(source: SourceRecord) -> None:
    files, path = source.files, "$.provenance.source.files"
    if not files:
        raise ValueError(f"{path} is empty; expected at least one")
    if any(a.rank > b.rank for a, b in pairwise(files)) or len({file.path for file in files}) < len(files):
        raise ValueError(f"{path} are not in the order of their ranks, or one is there twice")
    for number, file in enumerate(files):
        read_record(InnerPath, file.path, f"{path}[{number}][1]")
        if file.rank >= MOST_DEVICES or file.header is None or file.header >= len(source.headers):
            raise ValueError(f"{path}[{number}] is of rank {file.rank} and header {file.header}, which cannot be")


def _request(content: _PlanRecord) -> Request:
    from reshard.core.plan.plan import Request

    target, files = content.provenance.target, content.files.read()
    strategy = target.strategy.read() if target.strategy else None
    return Request(
        content.arrangement.read() if content.arrangement else strategy,
        target.format,
        files,
        content.ranks,
        selection_of(content.provenance.selection),
        target.remove_redundancy,
        content.memory,
        target.stage,
    )


def check_directory(directory: str) -> None:
    """Refuse a target directory that a plan file may not name.

    A plan file from another machine must not redirect the output.

    Raises:
        UsageError: it is not below the current directory.
    """
    if not is_inner_path(directory):
        raise UsageError(
            f"target {directory!r} is not below the current directory", code="outside-directory",
            facts=["a plan file may not name such a directory"], hint="leave it out, and give it to `reshard run`",
        )  # fmt: skip
