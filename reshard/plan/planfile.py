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

import json
import os
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.errors import Faults, Option, PlanError, ReshardError, SourceError, TargetError, Text, UsageError
from reshard.formats.directories import is_iteration
from reshard.formats.entries import NamedFile, RankFiles
from reshard.formats.sets import DCP, HuggingFaceSet, LinkedDCP, MindSporeSet
from reshard.formats.zarr import METADATA, ZarrGroup
from reshard.formats.zarr import NAME as ZARR
from reshard.layout.arrangement import Arrangement
from reshard.layout.grid import MOST_DEVICES
from reshard.plan.make import plan as make_plan
from reshard.plan.plan import plan_digest
from reshard.plan.select import Selection, selection_data
from reshard.readers.open import files_read, reopen, with_varying
from reshard.readers.open import open as open_checkpoint
from reshard.source.checkpoint import Looked
from reshard.source.headers import index_digests, pages_digest
from reshard.source.made import STRATEGY, read_small_strategy, small_strategy
from reshard.storage.places import Place, as_place
from reshard.storage.small import read_small, refuse_existing, refuse_inputs, write_whole
from reshard.strategy.schema import ANY, COUNT, FLAG, INNER_PATH, LINE, TEXT, Maybe, check, is_inner_path, parse
from reshard.strategy.strategy import Strategy
from reshard.targets.checkpoint2 import Checkpoint2
from reshard.targets.pattern import PATTERN, pattern_data, read_pattern

if TYPE_CHECKING:
    from reshard.plan.plan import Plan, Request
    from reshard.source.checkpoint import Checkpoint
    from reshard.storage.cipher import Cipher
    from reshard.targets.kinds import AnyFiles

Json = dict[str, Any]

VERSION = 1

_LARGEST_FILE = 1 << 28
_MOST_STARS = 8

# Classes that lay out the target's files: name in a plan file, class, and kinds of the class's fields.
_FILES_CLASSES: dict[str, tuple[type[Any], tuple[object, ...]]] = {
    "rank_files": (RankFiles, (TEXT, TEXT)),
    "named_file": (NamedFile, (INNER_PATH,)),
    "mindspore_set": (MindSporeSet, (COUNT,)),
    "hugging_face_set": (HuggingFaceSet, (COUNT,)),
    "checkpoint2": (Checkpoint2, (Maybe(COUNT), Maybe(TEXT), COUNT, Maybe(TEXT))),
    "zarr_group": (ZarrGroup, (Maybe(COUNT), Maybe(COUNT), Maybe(TEXT), FLAG)),
    "dcp": (DCP, (COUNT, Maybe(COUNT))),
    "linked_dcp": (LinkedDCP, ()),
}

_SOURCE = {
    "root": LINE,
    "described_by": TEXT,
    "strategy": Maybe(STRATEGY),
    "stage": Maybe(COUNT),
    "partial": FLAG,
    "by_file": FLAG,
    "varying": [TEXT],
    "elsewhere": [TEXT],
    "looked": Maybe((COUNT,) * 5),
    "left_out": [TEXT],
    "warnings": [LINE],
    "encrypted": FLAG,
    "headers": [TEXT],  # digests
    "files": [(COUNT, INNER_PATH, COUNT, COUNT, TEXT)],  # rank, path, size, number of the header, digest of pages
}
_TARGET = {
    "strategy": Maybe(STRATEGY),
    "pattern": Maybe(PATTERN),
    "format": TEXT,
    "ranks": Maybe([COUNT]),
    "stage": Maybe(COUNT),
    "memory": Maybe(COUNT),
    "remove_redundancy": FLAG,
    "link_replicas": FLAG,
    "encryption": Maybe(TEXT),  # the mode
}
SELECTION = {
    "include": [TEXT],
    "exclude": [TEXT],
    "weights_only": FLAG,
    "names": {TEXT: TEXT},
    "cast": {TEXT: TEXT},
    "drop": [TEXT],
    "allow_missing": [TEXT],
    "rules": Maybe({TEXT: ANY}),  # which `Rules.of` checks
    "lora": Maybe({"root": LINE, "alpha": ANY, "tied": TEXT, "digest": TEXT}),  # and `LoRA`
}
_PLAN = {
    "reshard_plan": COUNT,
    "made_by": TEXT,
    "digest": TEXT,
    "source": _SOURCE,
    "target": _TARGET,
    "files": {"way": TEXT, "fields": ANY},
    "selection": SELECTION,
    "directory": Maybe(INNER_PATH),
}


@dataclass(frozen=True, slots=True, eq=False)
class PlanFile:
    """A plan file that was read and is valid; its source was not opened yet.

    Attributes:
        path: the plan file.
        source: the directory or file of the source on the machine where it was planned.
        directory: the default target directory: a path below the current directory.
    """

    path: str
    source: str
    directory: str | None
    _content: Json

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
            source: the path of the source, if it was moved since; may also be a run directory.
            cipher: decrypts the source's files.
            target_cipher: encrypts the target's files, in the mode that was planned.
            threads: maximum number of threads of a run, as for `reshard.plan`.

        Raises:
            SourceError: files of the source are missing, or not valid.
            TargetError: the source files differ from the planned ones.
            PlanError: the new plan differs from the saved one.
            UsageError: the source or the target is encrypted and no key is given, or the target is not and one is.
        """
        content = self._content
        mode = content["target"]["encryption"]
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
        root = Path(source or self.source).absolute()
        iteration = Path(self.source).name
        if is_iteration(iteration) and (root / iteration).is_dir():
            root /= iteration
        checkpoint = self._open_source(root, cipher)
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
            link_replicas=request.link_replicas,
            memory=request.memory,
            threads=threads,
            target_cipher=target_cipher and replace(target_cipher, mode=mode),
        )
        if plan_digest(result) != content["digest"]:
            from reshard import __version__

            raise PlanError(
                f"this reshard would not write what {self.path} planned", code="different-plan",
                facts=[
                    f"reshard {content['made_by']} made the plan, and this is {__version__}; or the file was changed"
                ],
                hint="plan again",
            )  # fmt: skip
        return result

    def _open_source(self, root: Path, cipher: Cipher | None) -> Checkpoint:
        planned = self._content["source"]
        if planned["encrypted"] and cipher is None:
            raise UsageError(
                f"the source that {self.path} plans with is encrypted", code="no-key",
                facts=["a plan file holds no key"], hint=Text("give it: ", Option("key")),
            )  # fmt: skip
        self._check_sizes(root)
        paths: dict[int, list[Place]] = {}
        for rank, path, *_ in planned["files"]:
            paths.setdefault(rank, []).append(as_place(root / path))
        if planned["described_by"]:
            checkpoint = open_checkpoint(as_place(root), contents=False)
            if checkpoint.extras.described_by != planned["described_by"]:
                raise TargetError(
                    f"{root} has no {planned['described_by']}, unlike when it was planned", code="source-changed",
                    hint=_OTHER_FILES,
                )  # fmt: skip
            tensors = with_varying(checkpoint.tensors, set(planned["varying"]))
            checkpoint = replace(checkpoint, tensors=tensors)
        else:
            checkpoint = reopen(
                str(root),
                paths,
                strategy=read_small_strategy(planned["strategy"]),
                part=planned["stage"],
                partial=planned["partial"],
                varying=set(planned["varying"]),
                elsewhere=planned["elsewhere"],
                warnings=planned["warnings"],
                cipher=cipher,
            )
        self._check_contents(checkpoint)
        sampling = planned["looked"] and Looked(*planned["looked"])  # from planning time
        return replace(
            checkpoint.without(set(planned["left_out"])),
            opening=replace(checkpoint.opening, looked=sampling, by_file=planned["by_file"]),
        )

    def _check_sizes(self, root: Path) -> None:
        missing, changed = Faults(str(root)), Faults(str(root))
        for _, path, nbytes, *_ in self._content["source"]["files"]:
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
        missing.raise_if_any(SourceError, advice=Text("say where the source is: ", Option("source")))
        changed.raise_if_any(TargetError, advice=_OTHER_FILES)

    def _check_contents(self, checkpoint: Checkpoint) -> None:
        changed = Faults(checkpoint.root)
        planned_source = self._content["source"]
        files = {file.path: file for file in _source_files(checkpoint)}
        planned = {path for _, path, *_ in planned_source["files"]}
        for path in files.keys() ^ planned:  # of a zarr store, which lists its own files
            problem = "is gone since it was planned" if path in planned else "is new since it was planned"
            changed.add(path, problem, code="files-gone" if path in planned else "files-added")
        for _, path, _, header, pages in planned_source["files"]:
            if path not in files:
                continue
            if files[path].header != planned_source["headers"][header]:
                changed.add(path, "has another header than when it was planned", code="header-changed")
            elif pages_digest(files[path].place) != pages:
                changed.add(path, "has other contents than when it was planned", code="source-changed")
        changed.raise_if_any(TargetError, advice=_OTHER_FILES)


_OTHER_FILES = "give the files that were planned with, or plan again"


def read_plan(
    path: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    cipher: Cipher | None = None,
    target_cipher: Cipher | None = None,
) -> Plan:
    """Read a plan file that `Plan.save` wrote on any machine, and open its source.

    Args:
        path: the plan file.
        source: the path of the source, if it was moved since: a directory with the same files below it.
        cipher: decrypts the source's files; a plan file holds no key.
        target_cipher: encrypts the target's files, in the mode that was planned.

    Raises:
        PlanError: the file is not valid, or this version would make another plan.
        SourceError, TargetError: the source is missing, or differs from the planned one.
        UsageError: the source or the target is encrypted and no key is given, or the target is not and one is.
    """
    return read(path).plan(source, cipher=cipher, target_cipher=target_cipher)


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
    source = files_read(plan.source.root, plan.source.files)
    refuse_inputs([path], source, "one of the source files", "choose another name for the plan")
    refuse_existing(path, overwrite=overwrite)
    content = json.dumps(_data(plan, plan.request, directory), separators=(",", ":")).encode() + b"\n"
    try:
        _checked(content, "plan")
    except PlanError as error:
        raise UsageError("this plan cannot be saved", code="not-savable", facts=[error.message, *error.facts]) from None
    write_whole(Path(path), content)


# --- writing ----------------------------------------------------------------------------------------------------


def _data(plan: Plan, request: Request, directory: str | None) -> Json:
    from reshard import __version__

    return {
        "reshard_plan": VERSION,
        "made_by": __version__,
        "digest": plan_digest(plan),
        "source": _source_data(plan.source.opened),
        "target": {
            "strategy": small_strategy(request.target if isinstance(request.target, Strategy) else None),
            "pattern": pattern_data(request.target) if isinstance(request.target, Arrangement) else None,
            "format": request.format,
            "ranks": request.ranks,
            "stage": request.stage,
            "memory": request.memory,
            "remove_redundancy": request.remove_redundancy,
            "link_replicas": request.link_replicas,
            "encryption": plan.cipher and plan.cipher.mode,
        },
        "files": _files_data(request.files),
        "selection": selection_data(request.selection),
        "directory": directory,
    }


def read_selection(content: Json) -> Selection:
    """Read the selection that `selection_data` wrote; raise `ValueError` if invalid."""
    check(content, SELECTION)
    _check_names(content["names"])
    return _selection(content)


def _selection(content: Json) -> Selection:
    return Selection(**{"name_map" if key == "names" else key: value for key, value in content.items()})


def _source_data(source: Checkpoint) -> Json:
    root = Path(source.root).absolute()
    headers: dict[str, int] = {}
    files = []
    for file in _source_files(source):
        number = headers.setdefault(file.header, len(headers))
        files.append((file.rank, file.path, file.nbytes, number, pages_digest(file.place)))
    return {
        "root": os.path.abspath(root),  # noqa: PTH100 -- without `..`, links as they are
        "described_by": source.extras.described_by,
        "strategy": small_strategy(source.strategy),
        "stage": source.opening.stage,
        "partial": source.opening.partial,
        "by_file": source.opening.by_file,
        "varying": [name for name, tensor in source.tensors.items() if tensor.varies],
        "elsewhere": sorted(source.opening.elsewhere),
        "looked": source.opening.looked,
        "left_out": sorted(source.left_out),
        "warnings": source.warnings,
        "encrypted": source.cipher is not None,
        "headers": list(headers),
        "files": files,
    }


class _Listed(NamedTuple):
    """A source file as in a plan file, with its full path.

    `path` is below the source's root, `header` is a digest, and `place` is the full path.

    The files of a zarr store have rank 0, each once, with the metadata of its arrays, and the group's last.
    """

    rank: int
    path: str
    nbytes: int
    header: str
    place: str


def _source_files(source: Checkpoint) -> list[_Listed]:
    """Return the files of a source, in its order."""
    root = Path(source.root).absolute()
    digests = index_digests([file.index for file in source.files])
    headers = {
        (rank, file.path, file.nbytes): header
        for rank, file, header in zip(source.ranks, source.files, digests, strict=True)
    }
    if source.format == ZARR:
        root = root.resolve()
        parents = {
            directory
            for _, file_path, _ in headers
            for directory in Path(file_path).parents
            if directory.is_relative_to(root)
        }
        metadata = sorted(file_path for directory in parents - {root} if (file_path := directory / METADATA).is_file())
        *chunks, last = headers.items()
        metadata_files = {(0, str(file_path), file_path.stat().st_size): "" for file_path in metadata}
        headers = {**metadata_files, **dict(chunks), last[0]: last[1]}
    result = []
    for (rank, path, nbytes), header in headers.items():
        if not Path(path).is_relative_to(root):
            raise UsageError(
                f"{path} is not below {root}", code="not-savable",
                facts=["a plan can be saved only if all files of its source are in one directory"],
            )  # fmt: skip
        relative = Path(path).relative_to(root).as_posix()
        result.append(_Listed(rank, relative, nbytes, header, path))
    return result


def _files_data(files: AnyFiles) -> Json:
    fields: Any = files  # each of the classes in `_FILES_CLASSES` is a tuple or a dataclass
    if isinstance(files, ZarrGroup) and files.times:
        raise UsageError(
            "a plan of a zarr store with the times of its source files cannot be saved", code="not-savable",
            hint="leave the times out",
        )  # fmt: skip
    for name, (kind, _) in _FILES_CLASSES.items():
        if type(files) is kind:
            return {"way": name, "fields": fields if isinstance(fields, tuple) else astuple(fields)}
    raise UsageError(f"a plan with files of {type(files).__name__} cannot be saved", code="not-savable")


# --- reading ----------------------------------------------------------------------------------------------------


def _checked(content: bytes, path: str) -> PlanFile:
    """Validate a plan file; its source is compared later, when it is opened."""
    try:
        parsed = parse(content)
        _check_version(parsed)
        check(parsed, _PLAN)
        _check_way(**parsed["files"])
        _check_files(parsed["source"])
        _check_names(parsed["selection"]["names"])
        read_small_strategy(parsed["source"]["strategy"])
        _request(parsed)
    except (ValueError, ReshardError) as error:
        raise PlanError(
            f"{path} is not a valid plan file",
            code="not-a-plan",
            facts=[line.strip() for line in str(error).splitlines()],
        ) from None
    return PlanFile(path, parsed["source"]["root"], parsed["directory"], parsed)


def _check_version(parsed: object) -> None:
    if not isinstance(parsed, dict) or "reshard_plan" not in parsed:
        raise ValueError("it has no key 'reshard_plan'; expected what `reshard plan -o FILE` writes")
    if parsed["reshard_plan"] != VERSION:
        raise ValueError(
            f"it is of version {parsed['reshard_plan']!r:.60}; this reshard reads version {VERSION}; plan again"
        )


def _check_way(way: str, fields: object) -> None:
    if way not in _FILES_CLASSES:
        raise ValueError(f"$.files.way is {way!r:.60}; known are {', '.join(_FILES_CLASSES)}")
    check(fields, _FILES_CLASSES[way][1], "$.files.fields")


def _check_files(source: Json) -> None:
    files = source["files"]
    if not files:
        raise ValueError("$.source.files is empty; expected at least one")
    if any(a[0] > b[0] for a, b in pairwise(files)) or len({file[1] for file in files}) < len(files):
        raise ValueError("$.source.files are not in the order of their ranks, or one is there twice")
    for number, (rank, _, _, header, _) in enumerate(files):
        if rank >= MOST_DEVICES or header >= len(source["headers"]):
            raise ValueError(f"$.source.files[{number}] is of rank {rank} and header {header}, which cannot be")


def _check_names(names: Json) -> None:
    """Refuse globs whose regular expressions could take forever."""
    for old in names:
        if old.count("*") > _MOST_STARS or "**" in old:
            raise ValueError(
                f"$.selection.names[{old!r:.60}] has more than {_MOST_STARS} stars, or two next to each other"
            )


def _request(content: Json) -> Request:
    from reshard.plan.plan import Request

    target, files = content["target"], content["files"]
    pattern = target["pattern"]
    return Request(
        read_small_strategy(target["strategy"]) if pattern is None else read_pattern(pattern),
        target["format"],
        _FILES_CLASSES[files["way"]][0](*files["fields"]),
        target["ranks"],
        _selection(content["selection"]),
        target["remove_redundancy"],
        target["link_replicas"],
        target["memory"],
        target["stage"],
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
