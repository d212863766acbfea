"""Read, write and merge strategy files, protobuf or JSON.

Sources: MindSpore 2.10 `node_strategy.proto` (in `proto/strategy.proto`) and `parallel/_parallel_serialization.py`.

* In a file that is not merged, only the operators' entries tell the stage; `current_stage` has no meaning.
* A file is merged if every tensor name begins with a stage number and a dash.
* A stage of a merged file with operators but no tensors has ranks like any other stage: they hold the tensors that no
  strategy names.
* The file of stage 0 does not say that there are other stages. The files of a pipeline's ranks are in one directory and
  have the rank as the last number of their names; the file of the highest rank shows that there are more stages.
* A nested tensor map is one `tensor_map` message for each dimension in protobuf, the second one empty for a nested
  1-D tensor; JSON has it expanded (see `core.layout.layout.foldings`).
* Unknown protobuf fields and JSON keys are kept and written back. But an unknown JSON key that resembles a missing one
  is reported as a misspelling.
"""

from __future__ import annotations

import re
from dataclasses import replace
from shlex import quote
from typing import TYPE_CHECKING, NoReturn

from reshard.arguments import checked
from reshard.core.layout.block import LONGEST_NAME
from reshard.core.layout.layout import foldings
from reshard.core.storage.base import reading
from reshard.core.storage.places import AnyName, Place, as_place
from reshard.core.storage.small import read_small, refuse_inputs, write_whole
from reshard.errors import Faults, Option, ReshardError, StrategyError, Text, names
from reshard.strategy.json_file import from_json, to_json
from reshard.strategy.proto.messages import from_protobuf, to_protobuf
from reshard.strategy.strategy import MOST_RANKS, MOST_STAGES, Placed, Strategy, agreed_devices, merged_names

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from reshard.core.layout.block import Shape
    from reshard.core.layout.layout import Layout
    from reshard.strategy.proto.messages import Unknown
    from reshard.strategy.strategy import Operator

_LARGEST_FILE = 1 << 26
_RULES = re.compile(rb"""^[ {"']*(mesh|operators|reshard-rules)["']?[ ]*:""", re.MULTILINE)
_LAST_NUMBER = re.compile(r"(.*?)(\d{1,9})(\D*)", re.DOTALL)


@reading(StrategyError)
@checked
def read_strategy(path: AnyName) -> Strategy:
    """Read a strategy file, or merge a directory of the files of a pipeline's ranks.

    A file is JSON if its name ends with `.json` or its content begins with `{`; else it is protobuf. If a
    local file is not merged, the file next to it with the highest number in place of its own is read, too: it shows
    whether there are more stages.

    Args:
        path: a file or a directory, local or at a URL.

    Raises:
        StrategyError: the file is missing, cannot be parsed or contradicts itself; all faults at once, each with
            its path in the file.

    >>> strategy = reshard.read_strategy("src_strategy.ckpt")
    >>> strategy
    <Strategy: 12 tensors over 8 ranks>
    >>> strategy.grid("net.layer1.weight", (16, 32)).ranks
    ((0, 1, 4, 5), (2, 3, 6, 7))
    """
    location = as_place(path)
    if location.is_dir():
        return merge([(str(file), _read_file(file)) for file in strategy_files(location)])
    strategy = _read_file(location)
    if not strategy.tensors:
        raise StrategyError(
            f"{location} names no tensor",
            code="no-tensors",
            facts=["MindSpore leaves such a file if the network has no parallel parameter, or did not compile"],
        )
    if not (location.can.has_latency or strategy.merged or strategy.others):
        return replace(strategy, others=_has_more_stages(location, strategy))
    return strategy


def _has_more_stages(path: Place, strategy: Strategy) -> bool:
    """Return whether the strategy file of the last rank shows more stages."""
    parts = _LAST_NUMBER.fullmatch(path.name)
    if parts is None:
        return False
    try:
        matches = [_LAST_NUMBER.fullmatch(sibling.name) for sibling in path.parent.iterdir()]
        alike = [match for match in matches if match and _are_alike(match, parts)]
        last = path.parent / max(alike, key=lambda match: int(match[2]))[0]
        if last.name == path.name:
            return False
        if path.status().nbytes == last.status().nbytes and path.read_bytes() == last.read_bytes():
            return False  # ranks of one stage have equal files
        last_strategy = _read_file(last)
    except (OSError, ReshardError, ValueError):  # the user did not ask for this file
        return False
    return (
        not last_strategy.merged
        and last_strategy.devices == strategy.devices
        and last_strategy.stages != strategy.stages
    )


def _are_alike(a: re.Match[str], b: re.Match[str]) -> bool:
    """Return whether two names differ only in their last numbers.

    The number may appear in a name more than once.

    >>> names = ["s_0.ckpt", "s_7.ckpt", "rank_0_rank_0.ckpt", "rank_7_rank_7.ckpt", "run_7_s_7.ckpt"]
    >>> a, b, c, d, e = (_LAST_NUMBER.fullmatch(name) for name in names)
    >>> _are_alike(a, b), _are_alike(c, d), _are_alike(a, e), _are_alike(c, e)
    (True, True, False, False)
    """
    first, second = (re.sub(rf"(?<!\d){match[2]}(?!\d)", "#", match[0]) for match in (a, b))
    return a.group(1, 3) == b.group(1, 3) or first == second


def strategy_files(directory: Place) -> list[Place]:
    """Return the strategy files of a directory, ordered by the numbers in names.

    Raises:
        StrategyError: the directory has files of both formats, or no strategy file.
    """
    files: dict[str, list[Place]] = {
        suffix: [p for p in directory.iterdir() if p.suffix == suffix and p.is_file()] for suffix in (".ckpt", ".json")
    }
    if all(files.values()):
        raise StrategyError(
            f"{directory} has strategy files of two formats",
            code="mixed-formats",
            facts=[f"{len(files[suffix])} {suffix}" for suffix in (".ckpt", ".json")],
            hint="move the files of one format away",
        )
    if not any(files.values()):
        raise StrategyError(
            f"{directory} has no strategy file",
            code="no-strategy-file",
            facts=["expected a .ckpt or .json file per rank"],
        )
    numbers = re.compile(r"\d+")
    return sorted(files[".ckpt"] + files[".json"], key=lambda p: ([int(n) for n in numbers.findall(p.name)], p.name))


@checked
def write_strategy(strategy: Strategy, path: str | os.PathLike[str]) -> None:
    """Write a strategy file for MindSpore.

    It is JSON if its name ends with `.json`, else protobuf. The file appears under its name only when it is complete.

    Raises:
        UsageError: for JSON, the shape of a tensor with nested entries is not known; for protobuf, the number of
            dimensions of a tensor from JSON, which expands such entries, is not known.
        TargetError: the file cannot be written.

    >>> strategy = reshard.Strategy.of({"w": reshard.Layout.of([2, 4], [1, -1])})
    >>> reshard.write_strategy(strategy, "made.json")
    >>> reshard.read_strategy("made.json").grid("w", (8, 6)).ranks
    ((0, 1, 2, 3), (4, 5, 6, 7))
    """
    target = as_place(path)
    write_whole(target, to_json(strategy) if target.suffix == ".json" else to_protobuf(strategy))


@reading(StrategyError)
@checked
def merge_strategies(directory: str | os.PathLike[str], target: str | os.PathLike[str]) -> Strategy:
    """Merge the strategy files of a pipeline's ranks into one, and return it.

    Raises:
        StrategyError: a stage is missing, a file is empty, files of one stage disagree; all faults at once.
        TargetError: the file to write is one of the sources, or cannot be written.

    >>> from pathlib import Path
    >>> Path("stages").mkdir()
    >>> file = Path("src_strategy.ckpt").rename("stages/src_strategy_0.ckpt")
    >>> merge_strategies("stages", "merged.ckpt")
    <Strategy: 12 tensors over 8 ranks>
    """
    source = as_place(directory)
    if not source.is_dir():
        raise StrategyError(
            f"{source} is not a directory",
            code="not-a-directory",
            hint="give the directory of all ranks' strategy files",
        )
    files = strategy_files(source)
    refuse_inputs([target], files, "one of the files that are merged")
    merged = merge([(str(file), _read_file(file)) for file in files])
    write_strategy(merged, target)
    return merged


def merge(parts: Sequence[tuple[str, Strategy]]) -> Strategy:
    """Merge the files of a pipeline's ranks, as `merge_pipeline_strategys` does.

    Files of the same stage must agree; no stage from 0 to the last may be missing.

    Args:
        parts: each file's name, for messages, and its strategy.

    Raises:
        StrategyError: all faults at once.
    """
    faults = Faults("merging strategies")
    by_stage: dict[int, tuple[str, Strategy]] = {}
    for path, part in parts:
        if not part.tensors:
            faults.add(path, "names no tensor; MindSpore leaves such a file after a failed run", code="no-tensors")
        elif part.merged:
            faults.add(path, "is already merged", code="already-merged", hint="give the files of the single ranks")
        else:
            first_path, first = by_stage.setdefault(part.stages.start, (path, part))
            if first.tensors != part.tensors:
                different = [
                    n for n in {**first.tensors, **part.tensors} if first.tensors.get(n) != part.tensors.get(n)
                ]
                faults.add(
                    path,
                    f"disagrees with {first_path} of the same stage {part.stages.start} on {names(different)}",
                    code="files-disagree",
                )
            elif first.devices != part.devices:
                faults.add(
                    path, f"has {part.devices} devices a stage; {first_path} has {first.devices}", code="devices-differ"
                )
    count = max(by_stage, default=-1) + 1
    for stage in sorted(set(range(count)) - set(by_stage)):
        faults.add(
            f"stage {stage}", f"has no file; {by_stage[count - 1][0]} is stage {count - 1}", code="missing-stage"
        )
    devices = {part.devices for _, part in by_stage.values()}
    if len(devices) > 1:
        faults.add("stages", f"have different numbers of devices: {names(sorted(devices))}", code="devices-differ")
    if not parts:
        faults.add("directory", "has no strategy file", code="no-strategy-file")
    faults.raise_if_any(StrategyError)
    stages = [by_stage[stage][1] for stage in range(count)]
    if count == 1:
        return stages[0]
    tensors: dict[str, tuple[Placed, ...]] = {}
    for part in stages:
        for name, places in part.tensors.items():
            tensors[name] = tensors.get(name, ()) + places
    operators = tuple(operator for part in stages for operator in part.operators)
    return Strategy(tensors, range(count), devices.pop(), operators, merged=True, current_stage=1)


def _read_file(path: Place) -> Strategy:
    content = read_small(path, "strategy file", _LARGEST_FILE, StrategyError)
    if not content:
        raise StrategyError(f"{path} is empty; expected a strategy file", code="empty-file")
    if b"parallel_layout_item" not in content and (kind := _RULES.search(content)):
        _refuse_rules(path, kind[1])
    faults = Faults(str(path))
    if path.suffix == ".json" or content.lstrip()[:1] == b"{":
        return _strategy(faults, *from_json(content, str(path), faults))
    # Field 1 of a strategy is a number (0x08), of a checkpoint a message (0x0a); safetensors begin with a length.
    if content[:1] == b"\n" or (content[8:9] == b"{" and int.from_bytes(content[:8], "little") < len(content)):
        raise StrategyError(
            f"{path} is a checkpoint, not a strategy file", code="not-a-strategy", hint=f"reshard inspect {path}"
        )
    return _strategy(faults, *from_protobuf(content, str(path), faults))


def _refuse_rules(path: Place, key: bytes) -> NoReturn:
    """Refuse rules, which are no strategy: they do not have the shapes of whole tensors."""
    if key == b"reshard-rules":
        problem, hint = "between the names of two programs", Text("give it as rules: ", Option("rules"))
    else:
        problem = "of a mesh, which need the shapes of whole tensors"
        command = f"reshard strategy make {quote(str(path))} -o strategy.ckpt --like WHOLE"
        hint = Text(
            "for ranks, give ", Option("layout", "NAME", "RULE"), "; or, with a checkpoint WHOLE of whole tensors: ",
            command,
        )  # fmt: skip
    raise StrategyError(f"{path} is a file of rules {problem}, not a strategy file", code="not-a-strategy", hint=hint)


def _strategy(
    faults: Faults,
    layouts: Sequence[tuple[str, Layout, Shape | None, Unknown]],
    operators: tuple[Operator, ...],
    current_stage: int,
    unknown: Unknown,
) -> Strategy:
    """Build the strategy from the parsed parts of a file.

    The stages come from names or operators. All tensors must have the same number of devices.
    """
    staged = merged_names(name for name, *_ in layouts)
    merged = bool(staged)
    operator_stages = {operator.stage for operator in operators}
    if not merged and len(operator_stages) > 1:
        faults.add(
            "operators",
            f"are of stages {sorted(operator_stages)}; a file that is not merged has one",
            code="several-stages",
        )
    own_stage = min(operator_stages, default=0)
    if own_stage >= MOST_STAGES:
        faults.add("operators", f"are of stage {own_stage}; the highest is {MOST_STAGES - 1}", code="out-of-range")
    by_name: dict[str, dict[int, Placed]] = {}
    for full_name, layout, shape, extra in layouts:
        if len(full_name.encode(errors="replace")) > LONGEST_NAME:
            faults.add(
                f"{full_name!r:.60}…",
                f"has {len(full_name)} characters; names have at most {LONGEST_NAME} bytes",
                code="name-too-long",
            )
            continue
        stage, name = staged.get(full_name, (own_stage, full_name))
        if stage in by_name.setdefault(name, {}):
            faults.add(full_name, "is listed twice", code="duplicate-name")
        is_plausible = shape is not None and len(shape) == len(layout.tensor_map) > 1
        expanded = is_plausible and bool(foldings(layout, shape or (), len(layout.tensor_map) - 1))
        by_name[name][stage] = Placed(stage, layout, shape, extra, expanded)
    tensors = {name: tuple(places[stage] for stage in sorted(places)) for name, places in by_name.items()}
    devices = agreed_devices(tensors, faults)
    stages = range(own_stage, own_stage + 1)
    if merged:
        last = max({placed.stage for places in tensors.values() for placed in places} | operator_stages, default=0)
        if last >= MOST_STAGES:
            faults.add(f"stage {last}", f"is too high; the highest is {MOST_STAGES - 1}", code="out-of-range")
        stages = range(last + 1)
    if len(stages) <= MOST_STAGES and len(stages) * devices > MOST_RANKS:
        faults.add(
            "stages",
            f"are {len(stages)} of {devices} devices; at most {MOST_RANKS} ranks are supported",
            code="too-many-ranks",
        )
    faults.raise_if_any(StrategyError)
    return Strategy(tensors, stages, devices, operators, merged, current_stage, unknown)
