"""Plan files: a plan that is made on one machine and run on another.

A plan file holds what a plan was made *from*: the source's files and the strategy that joins them, the target's
strategy and all options. Whoever reads it opens the same files again and plans again. That is small, takes no longer
(headers must be read to be compared anyway), and is safe: no offset, no path of a target file and no byte of a header
is taken from the plan file, so it can neither write outside the target nor read what is not below the source. It
holds no key and nothing of the weights.

What was planned is what is run, or nothing is. These are compared:

1. of each source file its size, a digest of all that its header says, and one of some pages of it, because checkpoints
   of two steps have equal headers; times are not, because a copy has others;
2. a digest of the plan made again with that of the plan that was saved: target files, headers, blocks (`plan_digest`).

The file is JSON of a numbered version. It is checked whole before anything of it is used (`schema`). Layouts, and the
places that tensors alike have, are listed once; the same plan gives the same bytes.
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
from reshard.layout.layout import MOST_DEVICES
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
from reshard.targets.pattern import PATTERN, Pattern, pattern_data, read_pattern

if TYPE_CHECKING:
    from reshard.plan.plan import Plan, Request
    from reshard.source.checkpoint import Checkpoint
    from reshard.storage.cipher import Cipher
    from reshard.targets.kinds import AnyFiles

Json = dict[str, Any]

VERSION = 1

_LARGEST_FILE = 1 << 28
_MOST_STARS = 8

# Each way to lay out the target's files: its name in a plan file, its class, and the kinds of the class's fields.
_WAYS: dict[str, tuple[type[Any], tuple[object, ...]]] = {
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
    """A plan file that was read and is valid in itself; its source was not looked at yet.

    Attributes:
        path: the plan file.
        source: the directory or file that the source was where it was planned.
        directory: where the target goes unless another directory is named: a path below the current one.
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
            source: where the source is, if it is not where it was planned; the directory of a run serves, too.
            cipher: decrypts the source's files.
            target_cipher: encrypts the target's files, in the mode that was planned.
            threads: the most threads that a run may have here, as for `reshard.plan`.

        Raises:
            SourceError: files of the source are not there, or not valid.
            TargetError: they are not those that were planned with.
            PlanError: the plan made of them is not the one that was saved.
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
        checkpoint = self._opened(root, cipher)
        request = _request(content)
        made = make_plan(
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
        if plan_digest(made) != content["digest"]:
            from reshard import __version__

            raise PlanError(
                f"this reshard would not write what {self.path} planned", code="different-plan",
                facts=[
                    f"reshard {content['made_by']} made the plan, and this is {__version__}; or the file was changed"
                ],
                hint="plan again",
            )  # fmt: skip
        return made

    def _opened(self, root: Path, cipher: Cipher | None) -> Checkpoint:
        given = self._content["source"]
        if given["encrypted"] and cipher is None:
            raise UsageError(
                f"the source that {self.path} plans with is encrypted", code="no-key",
                facts=["a plan file holds no key"], hint=Text("give it: ", Option("key")),
            )  # fmt: skip
        self._check_sizes(root)
        paths: dict[int, list[Place]] = {}
        for rank, path, *_ in given["files"]:
            paths.setdefault(rank, []).append(as_place(root / path))
        if given["described_by"]:
            checkpoint = open_checkpoint(as_place(root), contents=False)
            if checkpoint.extras.described_by != given["described_by"]:
                raise TargetError(
                    f"{root} has no {given['described_by']}, unlike when it was planned", code="source-changed",
                    hint=_OTHER_FILES,
                )  # fmt: skip
            tensors = with_varying(checkpoint.tensors, set(given["varying"]))
            checkpoint = replace(checkpoint, tensors=tensors)
        else:
            checkpoint = reopen(
                str(root),
                paths,
                strategy=read_small_strategy(given["strategy"]),
                part=given["stage"],
                partial=given["partial"],
                varying=set(given["varying"]),
                elsewhere=given["elsewhere"],
                warnings=given["warnings"],
                cipher=cipher,
            )
        self._check_contents(checkpoint)
        looked = given["looked"] and Looked(*given["looked"])  # when it was planned
        return replace(
            checkpoint.without(set(given["left_out"])),
            opening=replace(checkpoint.opening, looked=looked, by_file=given["by_file"]),
        )

    def _check_sizes(self, root: Path) -> None:
        missing, changed = Faults(str(root)), Faults(str(root))
        for _, path, nbytes, *_ in self._content["source"]["files"]:
            try:
                status = (root / path).stat()
            except OSError as error:
                missing.add(path, f"cannot be found ({error.strerror})", code="not-found")
                continue
            if not S_ISREG(status.st_mode):  # to open a pipe would wait for ever
                missing.add(path, "is not a regular file", code="not-a-file")
            elif status.st_size != nbytes:
                sizes = f"has {status.st_size} bytes; it had {nbytes} when it was planned"
                changed.add(path, sizes, code="source-changed")
        missing.raise_if_any(SourceError, advice=Text("say where the source is: ", Option("source")))
        changed.raise_if_any(TargetError, advice=_OTHER_FILES)

    def _check_contents(self, checkpoint: Checkpoint) -> None:
        changed = Faults(checkpoint.root)
        given = self._content["source"]
        files = {file.path: file for file in _listed(checkpoint)}
        planned = {path for _, path, *_ in given["files"]}
        for path in files.keys() ^ planned:  # of a store, which lists its own
            problem = "is gone since it was planned" if path in planned else "is new since it was planned"
            changed.add(path, problem, code="files-gone" if path in planned else "files-added")
        for _, path, _, header, pages in given["files"]:
            if path not in files:
                continue
            if files[path].header != given["headers"][header]:
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
    """Read a plan file that `Plan.save` wrote, here or on another machine, and open its source.

    Args:
        path: the plan file.
        source: where the source is, if it is not where it was planned: a directory with the same files below it.
        cipher: decrypts the source's files; a plan file holds no key.
        target_cipher: encrypts the target's files, in the mode that was planned.

    Raises:
        PlanError: the file is not valid, or this version would do something else than was planned.
        SourceError, TargetError: the source is not there, or is not the one that was planned with.
        UsageError: the source or the target is encrypted and no key is given, or the target is not and one is.
    """
    return read(path).plan(source, cipher=cipher, target_cipher=target_cipher)


def read(path: str | os.PathLike[str]) -> PlanFile:
    """Read a plan file; the source is not looked at.

    Raises:
        PlanError: it cannot be read, is of another version, or is not valid; the message says where.
    """
    return _checked(read_small(path, "plan file", _LARGEST_FILE, PlanError), os.fspath(path))


def save(plan: Plan, path: str | os.PathLike[str], *, directory: str | None = None, overwrite: bool = False) -> None:
    """Write a plan file, which appears under its name only when it is complete.

    Args:
        plan: a plan that `plan` made.
        path: where to write it.
        directory: as `PlanFile.directory`.
        overwrite: replace a file that is there.

    Raises:
        UsageError: the plan cannot be saved: it was put together from others, or its source is in several directories.
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
            "pattern": pattern_data(request.target) if isinstance(request.target, Pattern) else None,
            "format": request.format,
            "ranks": request.ranks,
            "stage": request.stage,
            "memory": request.memory,
            "remove_redundancy": request.remove_redundancy,
            "link_replicas": request.link_replicas,
            "encryption": plan.cipher and plan.cipher.mode,
        },
        "files": _way_data(request.files),
        "selection": selection_data(request.selection),
        "directory": directory,
    }


def read_selection(content: Json) -> Selection:
    """Return the selection that `selection_data` wrote, or raise `ValueError` where it is not valid."""
    check(content, SELECTION)
    _check_names(content["names"])
    return _selection(content)


def _selection(content: Json) -> Selection:
    return Selection(**{"name_map" if key == "names" else key: value for key, value in content.items()})


def _source_data(source: Checkpoint) -> Json:
    root = Path(source.root).absolute()
    headers: dict[str, int] = {}
    files = []
    for file in _listed(source):
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
    """A source file as a plan file has it: rank, path below the source's root, size, digest of the header; and where.

    The files of a zarr store are of rank 0, each there once, with the metadata of its arrays, and the group's at last.
    """

    rank: int
    path: str
    nbytes: int
    header: str
    place: str


def _listed(source: Checkpoint) -> list[_Listed]:
    """Return the files of a source, in its order."""
    root = Path(source.root).absolute()
    digests = index_digests([file.index for file in source.files])
    parts = {
        (rank, file.path, file.nbytes): header
        for rank, file, header in zip(source.ranks, source.files, digests, strict=True)
    }
    if source.format == ZARR:
        root = root.resolve()
        above = {
            directory for _, path, _ in parts for directory in Path(path).parents if directory.is_relative_to(root)
        }
        metadata = sorted(path for directory in above - {root} if (path := directory / METADATA).is_file())
        *chunks, last = parts.items()
        described = {(0, str(path), path.stat().st_size): "" for path in metadata}
        parts = {**described, **dict(chunks), last[0]: last[1]}
    found = []
    for (rank, place, nbytes), header in parts.items():
        if not Path(place).is_relative_to(root):
            raise UsageError(
                f"{place} is not below {root}", code="not-savable",
                facts=["a plan can be saved only if all files of its source are in one directory"],
            )  # fmt: skip
        below = Path(place).relative_to(root).as_posix()
        found.append(_Listed(rank, below, nbytes, header, place))
    return found


def _way_data(files: AnyFiles) -> Json:
    fields: Any = files  # each of the classes below is a tuple or a dataclass
    if isinstance(files, ZarrGroup) and files.times:
        raise UsageError(
            "a plan of a zarr store with the times of its source files cannot be saved", code="not-savable",
            hint="leave the times out",
        )  # fmt: skip
    for name, (way, _) in _WAYS.items():
        if type(files) is way:
            return {"way": name, "fields": fields if isinstance(fields, tuple) else astuple(fields)}
    raise UsageError(f"a plan with files of {type(files).__name__} cannot be saved", code="not-savable")


# --- reading ----------------------------------------------------------------------------------------------------


def _checked(content: bytes, path: str) -> PlanFile:
    """Check a plan file; what it says of its source is compared later, when that is opened."""
    try:
        found = parse(content)
        _check_version(found)
        check(found, _PLAN)
        _check_way(**found["files"])
        _check_files(found["source"])
        _check_names(found["selection"]["names"])
        read_small_strategy(found["source"]["strategy"])
        _request(found)
    except (ValueError, ReshardError) as error:
        raise PlanError(
            f"{path} is not a valid plan file",
            code="not-a-plan",
            facts=[line.strip() for line in str(error).splitlines()],
        ) from None
    return PlanFile(path, found["source"]["root"], found["directory"], found)


def _check_version(found: object) -> None:
    if not isinstance(found, dict) or "reshard_plan" not in found:
        raise ValueError("it has no key 'reshard_plan'; expected what `reshard plan -o FILE` writes")
    if found["reshard_plan"] != VERSION:
        raise ValueError(
            f"it is of version {found['reshard_plan']!r:.60}; this reshard reads version {VERSION}; plan again"
        )


def _check_way(way: str, fields: object) -> None:
    if way not in _WAYS:
        raise ValueError(f"$.files.way is {way!r:.60}; known are {', '.join(_WAYS)}")
    check(fields, _WAYS[way][1], "$.files.fields")


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
    """Refuse what takes a regular expression for ever."""
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
        _WAYS[files["way"]][0](*files["fields"]),
        target["ranks"],
        _selection(content["selection"]),
        target["remove_redundancy"],
        target["link_replicas"],
        target["memory"],
        target["stage"],
    )


def check_directory(directory: str) -> None:
    """Refuse a target directory that a plan file may not name: who reads one from elsewhere must not be led astray.

    Raises:
        UsageError: it is not below the current directory.
    """
    if not is_inner_path(directory):
        raise UsageError(
            f"target {directory!r} is not below the current directory", code="outside-directory",
            facts=["a plan file may not name such a directory"], hint="leave it out, and give it to `reshard run`",
        )  # fmt: skip
