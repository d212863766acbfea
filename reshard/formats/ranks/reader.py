"""Interpret the files of ranks by a strategy and rules: their pipeline stage, their ranks, and how tensors are cut."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from reshard.core.layout.layout import Layout
from reshard.core.rank_files import rank_of
from reshard.core.records.made import made_of
from reshard.core.storage.places import as_place
from reshard.errors import LayoutError, Option, SourceError, StrategyError, Text, UsageError, names
from reshard.formats.ranks.one_of_several import is_later_part
from reshard.strategy.names import ALL_STAGES, check_layouts, matching, ranges_text, ranks_text
from reshard.strategy.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from reshard.core.model.checkpoint import SourceFile, Tensor
    from reshard.core.records.made import Made
    from reshard.core.storage.places import AnyName, Place

COPY = "copy"
"""The rule of a tensor whose value differs by rank, such as the state of a random number generator."""


def lone_rank(
    path: AnyName | Mapping[int, AnyName],
    strategy: Strategy | None,
    files: Sequence[SourceFile],
    ranks: Sequence[int],
    warnings: list[str],
    changed: Made | None = None,
) -> str:
    """Return why a single-rank source looks like one shard of several, or "".

    Args:
        path: the path that was opened.
        strategy: says which block the rank holds; None for whole tensors.
        files: the files.
        ranks: the rank that each of them is read as.
        warnings: gets one about a rank number in the path of tensors that are taken for whole ones.
        changed: the provenance of the files, of which some were changed or lost.

    Raises:
        SourceError: the path implies another rank than the strategy would read them as.
    """
    if len({*ranks}) != 1:
        return ""
    rank = ranks[0]
    rank_dir = None if isinstance(path, Mapping) else rank_of(as_place(path))
    own_rank, siblings = (rank_dir.rank, rank_dir.others) if rank_dir else (rank, [])
    if strategy is not None:
        if own_rank != rank and len(strategy.ranks) > 1:
            raise SourceError(
                f"{path} is rank {own_rank} according to its path, and would be taken for rank {rank}",
                code="one-rank",
                hint=Text("open the directory above, with ", Option("partial"), " if other ranks are missing"),
            )
        return ""
    way = Text("open the directory of all ranks with ", Option("strategy"))
    if rank_dir and _is_in_ledger(rank_dir.above, files):
        reason = f"{path}: is of rank {own_rank}, as the ledger of the directory above says"
        way = Text("open the directory above, which needs no strategy")
    elif siblings:
        lies = f"{ranks_text(siblings)} {'lies' if len(siblings) == 1 else 'lie'}"
        reason = f"{path}: is of rank {own_rank} according to its path, and {lies} next to it"
    elif len(files) == 1 and is_later_part(files[0].path):
        reason = f"{files[0].path}: is one of several parts of a checkpoint by its name, and the others are not there"
    elif shared := next((file.path for file in files if file.index.deduplicated), None):
        reason = f"{shared}: is de-duplicated, as its header says (remove_redundancy)"
    elif changed and changed.strategy and len(changed.strategy.ranks) > 1:
        reason = f"{path}: is one of {len(changed.strategy.ranks)} ranks, as its ledger says"
    else:
        if own_rank:
            warnings.append(
                f"{path}: is of rank {own_rank} according to its path; its tensors are taken for whole ones"
            )
        return ""
    whole = Option("layout", "*", "whole")
    expected = "; expected whole tensors, found what this rank holds; "
    return Text(reason, expected, way, ", or give ", whole, " if it lacks nothing")


def _is_in_ledger(above: Place, files: Sequence[SourceFile]) -> bool:
    """Return whether the parent directory's ledger lists these files and has a strategy."""
    with suppress(SourceError):  # a ledger that cannot be read does not say that other ranks are missing
        ledger = made_of(above)
        if ledger is not None and ledger.strategy:
            return {file.path for file in files} <= {f"{ledger.root}/{file}" for file in ledger.records}
    return False


def one_stage(
    root: str,
    strategy: Strategy | None,
    stage: int | Literal["own"] | None,
    files: Sequence[SourceFile],
    ranks: Sequence[int],
    warnings: list[str],
) -> tuple[Strategy | None, int | None]:
    """Return the strategy of the source's pipeline stage, and its number.

    The number is None if the source is a whole pipeline.

    Raises:
        StrategyError: the strategy covers one stage and `stage` is None, or it lacks the requested stage.
        UsageError: `stage` is not valid, or is a number without a strategy.
    """
    if not (stage in {None, "own"} or isinstance(stage, int)):
        raise UsageError(f"stage is {stage!r}; expected a number or 'own'", code="bad-value")
    if strategy is None:
        if isinstance(stage, int):
            raise UsageError(
                f"stage {stage} needs a strategy",
                code="missing-strategy",
                hint=Text("pass ", Option("strategy")),
            )
        return None, None
    if isinstance(stage, int):
        return strategy.of_stage(stage), stage
    has_other_stages = _has_other_stages(strategy, files, ranks)
    if not (has_other_stages or strategy.stages.start or (strategy.others and stage is None)):
        return strategy, None
    number = strategy.stages.start
    if stage is None:
        raise StrategyError(
            f"{root}: the strategy covers only stage {number} of a pipeline",
            code="one-stage",
            facts=["files of other stages are there"] if has_other_stages else [],
            hint=Text(f"give {ALL_STAGES}, or ", Option("stage", number), " to read only this stage"),
        )
    warnings.append(
        f"the strategy is that of stage {number} of a pipeline: of {len(set(ranks))} ranks only "
        f"{ranges_text(strategy.ranks)} are read, and only the tensors of that stage are converted"
    )
    return strategy, number


def _has_other_stages(strategy: Strategy, files: Sequence[SourceFile], ranks: Sequence[int]) -> bool:
    """Return whether the source has files of stages that the strategy does not cover.

    The strategy file of the first stage does not say that other stages exist. Ranks of other stages have other
    tensors; ranks with the same tensors mean that the strategy is the wrong one.
    """
    outside = [number for number, rank in enumerate(ranks) if rank not in strategy.ranks]
    if strategy.merged or len(strategy.stages) > 1 or not outside:
        return False
    inside = {n for file, rank in zip(files, ranks, strict=True) if rank in strategy.ranks for n in file.index.entries}
    own_names = inside & set(strategy.tensors)
    return not any(own_names <= set(files[number].index.entries) for number in outside)


def with_rules(
    strategy: Strategy | None, rules: Mapping[str, str], files: Sequence[SourceFile], ranks: Sequence[int]
) -> tuple[Strategy | None, Mapping[str, str], Collection[str]]:
    """Apply the user's layout rules to a strategy.

    Returns:
        the result; the rule of each tensor that has one; and the tensors named in full by a rule that cuts them as the
        strategy already did.

    Raises:
        StrategyError: a rule matches no tensor, later ones take all that it matches, or it does not fit one.
    """
    if not rules:
        return strategy, {}, ()
    shapes = {name: entry.shape for file in files for name, entry in file.index.entries.items()}
    devices = strategy.devices if strategy else max(ranks) + 1
    if devices == 1 and (cut := next((item for item in rules.items() if item[1].startswith("split:")), None)):
        raise UsageError(
            Text(Option("layout", *cut), " cuts nothing, as there is one rank"), code="no-effect",
            hint=Text("leave it out, or open the directory of all ranks"),
        )  # fmt: skip
    result = strategy or Strategy({}, range(1), devices)
    ruled: dict[str, str] = {}
    confirmed: set[str] = set()
    check_layouts(rules, shapes)
    for pattern, rule in rules.items():
        for name in matching(pattern, shapes):
            if not shapes[name] and name != pattern and rule != COPY:
                continue  # a glob that cuts tensors does not apply to scalars
            result, layout = _with_rule(result, pattern, rule, name, len(shapes[name]))
            ruled[name] = rule
            before = strategy.tensors.get(name, ()) if strategy else ()
            if layout and name == pattern and any(placed.layout.splits == layout.splits for placed in before):
                confirmed.add(name)
    return result, ruled, confirmed


def _with_rule(strategy: Strategy, pattern: str, rule: str, name: str, ndim: int) -> tuple[Strategy, Layout | None]:
    """Return a strategy with the layout of a rule for a tensor, and this layout; None for `copy`."""
    try:
        layout = None if rule == COPY else Layout.parse(rule, ndim, strategy.devices)
        return strategy.with_layout(name, layout), layout
    except (LayoutError, StrategyError) as error:
        about = error.about(Option("layout", pattern, rule), f": tensor {name!r}")
        raise StrategyError(about.message, code=error.code, facts=error.facts, hint=error.hint) from None


def refuse_other_strategy(
    root: str, strategy: Strategy, ledger_strategy: Strategy, tensors: Mapping[str, Tensor], ruled: Mapping[str, str]
) -> None:
    """Refuse a strategy, with the rules that the user gave, that contradicts the strategy in the ledger."""
    wrong = []
    for name, tensor in tensors.items():
        if name in ledger_strategy.tensors and (tensor.listed or name in ruled):
            try:
                is_same = tensor.listed and (
                    ledger_strategy.grid(name, tensor.spec.shape) == strategy.grid(name, tensor.spec.shape)
                )
            except LayoutError:
                is_same = False
            if not is_same:
                wrong.append(name)
    if wrong:
        by_rule = next((name for name in wrong if name in ruled), None)
        option = Option("layout", by_rule, ruled[by_rule]) if by_rule else Option("strategy")
        raise SourceError(
            f"{root} was written with another strategy, according to its ledger",
            code="strategy-mismatch",
            facts=[f"it cuts {names(wrong, most=3)} differently"],
            hint=Text("leave ", option, " out"),
        )
