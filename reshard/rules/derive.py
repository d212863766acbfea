"""Derive a checkpoint with the names and shapes of another program, by rules.

Its tensors are blocks of the source's files.

1. Names are matched first (`matching`).
2. Each rule and its shapes make a `FusedLayout`; shapes that do not fit are faults, and all are reported at once.
3. The blocks of a tensor that is split become blocks of its parts, or the other way round. Contents are read only to
   check padding that is left out and tensors that are tied: small ones whole, else samples.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.core.layout.block import shape_text
from reshard.core.model.checkpoint import Checkpoint, Shard, TensorSpec
from reshard.core.model.facts import Origin
from reshard.core.model.reshape import Shared, shards_in
from reshard.core.storage.places import as_place
from reshard.errors import Faults, SourceError, UsageError, names
from reshard.kits.training.rules import check_arguments
from reshard.rules.fused_layout import indices, of_fused, of_parts, pieces, placed, zeros
from reshard.rules.matching import match_names
from reshard.rules.numbers import numbers_in, read_config
from reshard.rules.patterns import SCALES, Family
from reshard.rules.ranges import Ranges, layers_fault

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from reshard.core.layout.block import Block, Shape
    from reshard.core.model.checkpoint import Tensor
    from reshard.dtypes import DType
    from reshard.rules.fused_layout import FusedLayout
    from reshard.rules.matching import Bound, Use
    from reshard.rules.rule import Rule
    from reshard.rules.rules import Rules

_SCALE_ROWS = 128
"""The rows and columns of a weight that share a scale (DeepSeek-V3); `scale_block` in `let` overrides it."""

_MOST_PARTS = 1 << 17
"""The most tensors that one may be split into: sixty layers of two thousand experts."""


class Fused(NamedTuple):
    """A fused tensor, on either side.

    Attributes:
        name: its name.
        dtype: the name of its dtype.
        use: the application of its rule.
        layout: how its parts make it up.
        parts: the names of its parts.
    """

    name: str
    dtype: str
    use: Use
    layout: FusedLayout
    parts: tuple[str, ...]


class Derived(NamedTuple):
    """The result of applying rules to a checkpoint.

    Attributes:
        checkpoint: the tensors in the names and shapes of the other side.
        side: the side of the source, 0 or 1.
        sides: the names of the source's side and of the result's.
        uses: the applications of rules, in the order of the rules.
        dropped: names of the source's tensors that have no counterpart.
        kept: names of replicated training state, which is not changed.
        fused: the tensors that are fused, or split, by name.
    """

    checkpoint: Checkpoint
    side: int
    sides: tuple[str, str]
    uses: tuple[Use, ...]
    dropped: tuple[str, ...]
    kept: tuple[str, ...]
    fused: Mapping[str, Fused]


def derive(source: Checkpoint, rules: Rules, drop: Iterable[str] = ()) -> Derived:
    """Apply rules to a checkpoint.

    Contents are read only to check padding that is left out and tensors that are tied: small ones whole, else samples.

    Args:
        source: the checkpoint.
        rules: rules for its names and the names of another program.
        drop: names and globs of tensors that may be left out if no rule names them.

    Raises:
        SourceError: tensors that no rule names, or several; missing parts; shapes that do not fit; all at once.
        UsageError: its names fit neither side, or both.
    """
    source.require_whole()
    if source.origin is not None and source.origin.rules is not None:
        raise UsageError(
            f"{source.origin.rules.root} was already applied to {source.root}", code="already-derived",
            hint=f"put it and {rules.root} into one file",
        )  # fmt: skip
    if source.opening.stage is not None:
        raise UsageError(
            f"{source.root} is one stage of a pipeline; rules need all tensors", code="one-stage",
            hint="open all stages",
        )  # fmt: skip
    return _Deriving(source, rules).result(tuple(drop))


class _Deriving:
    """The state of applying rules to one checkpoint."""

    def __init__(self, source: Checkpoint, rules: Rules) -> None:
        if not rules.numbers.config and (config := as_place(source.root) / "config.json").is_file():
            rules = replace(rules, numbers=replace(rules.numbers, config=numbers_in(read_config(config))))
        self.opened, self.source, self.rules = source, source.unbound(), rules
        self.side = rules.side_of(source)
        self.faults = Faults(rules.root)
        self.shared = Shared()
        self.tensors: dict[str, Tensor] = {}
        self.makers: dict[str, str] = {}
        self.fused: dict[str, Fused] = {}
        self.extents: dict[tuple[str, str], tuple[int, str]] = {}
        self.fronts: dict[tuple[str, str], Shape] = {}  # of the tensors that were split, by rule and name of the weight
        self.padding: dict[str, list[str]] = {}
        self.ties: dict[str, tuple[Tensor, ...]] = {}
        self.warnings: list[str] = []
        self.merged: set[str] = set()
        self.ranges = Ranges()
        self.scale_rows = self._scale_rows()

    def result(self, drop: Collection[str]) -> Derived:
        """Apply all rules and return the result."""
        matches = match_names(self.source, self.rules, self.side, self.ranges, self.faults, drop)
        check_arguments(self.source, self.rules, self.side, matches.uses, self.faults)
        for name in matches.training_state:
            self.tensors[name] = self.source.tensors[name]
            self.makers[name] = "the source"
        for use in sorted(matches.uses, key=lambda use: use.family.is_step):  # these are as many as their weights
            for bound, members in use.members.items():
                try:
                    self._apply(use, dict(bound), members)
                except (SourceError, UsageError) as error:
                    about = SourceError(
                        f"{use.family.of(use.rule.fused.text)} {error.message}",
                        code=error.code, facts=error.facts, hint=error.hint,
                    )  # fmt: skip
                    self.faults.add(use.rule.key_path, about)
        self.faults.raise_if_any(SourceError)
        self._check_numbers(matches.uses)
        if note := self.rules.content.get("note"):
            self.warnings.append(f"{self.rules.root}: {note}")
        for contents, padded in self.padding.items():
            self.warnings.append(f"rows of padding are left out of {names(padded)}; {contents}")
        sides = self.rules.sides[self.side], self.rules.sides[1 - self.side]
        left_out = frozenset({*matches.dropped, *self.source.extras.objects})
        if lost := [*matches.dropped, *self.source.extras.objects, *self.source.extras.beside]:
            self.warnings.append(
                f"left out by {self.rules.root} (dropped, mapped to null, or not a tensor): {names(lost)}"
            )
        origin = Origin(
            self.opened.opened.without(self.opened.left_out), self.rules, left_out, self.opened.lora,
            tuple(self.ties.items()), frozenset(self.merged), sides[1],
        )  # fmt: skip
        checkpoint = replace(
            self.source, tensors=self.tensors, strategy=None, warnings=(*self.source.warnings, *self.warnings),
            left_out=self.source.left_out.union(left_out), origin=origin,
            opening=replace(self.source.opening, elsewhere=frozenset()),
            extras=replace(self.source.extras, arrangement=None, objects={}, beside={}, paths={}),
        )  # fmt: skip
        uses = tuple(sorted(matches.uses, key=lambda use: (use.number, use.family)))
        return Derived(
            checkpoint, self.side, sides, uses, tuple(matches.dropped), tuple(matches.training_state), self.fused
        )

    def _check_numbers(self, uses: Sequence[Use]) -> None:
        """Check that no tensor is lost, by the ranges of words and the layer count."""
        source = {*self.source.all_names, *self.source.left_out}
        sides = (source, self.tensors) if self.side == 0 else (self.tensors, source)
        for rule_path, lost in self.ranges.lost(sides, self.side):
            self.faults.add(rule_path, lost)
        weights = [
            name
            for use in uses
            if use.family == Family()
            for name in (use.targets if self.side == use.rule.fused_side else use.sources)
        ]
        if not self.source.left_out and (fault := layers_fault(weights, self.rules.numbers.config)):
            self.faults.add(self.source.root, fault)
        self.faults.raise_if_any(SourceError)

    def _apply(self, use: Use, bound: Bound, members: Mapping[str, tuple[int, Bound]]) -> None:
        """Derive the tensors of one group of names."""
        rule = use.rule
        is_number = use.family.is_step and all(  # the steps of weights
            prod(self.source.tensors[name].spec.shape) == 1 for name in members
        )
        for name in () if is_number or (rule.is_name_only and len(members) == 1) else members:
            tensor = self.source.tensors[name]
            if tensor.text is not None:
                raise SourceError(f"needs {name!r}, which is text; expected a tensor", code="not-a-tensor")
            if tensor.varies and len(tensor.sharding.replicas[0]) > 1:
                self.warnings.append(f"{name} is taken from one rank; those of others may be different")
        before = len(use.targets)
        if rule.is_name_only or is_number:
            self._rename(use, bound, members)
        elif self.side == rule.fused_side:
            for name in members:
                self._split(use, bound, name)
        else:
            self._join(use, bound, members)
        if self.opened.origin and not self.opened.origin.merged.isdisjoint(members):
            self.merged.update(use.targets[before:])

    def _rename(self, use: Use, bound: Bound, members: Mapping[str, tuple[int, Bound]]) -> None:
        """Rename tensors; if several become one, they must be equal."""
        rule = use.rule
        first, *rest = members
        if rest:
            self._check_equal(use.family.of(rule.fused.write(bound)), first, rest)
        if self.side != rule.fused_side:
            self._add(use, rule.fused.write(bound), self.source.tensors[first])
            return
        counts = self._counts(rule)
        front = self.fronts.get((rule.key_path, rule.fused.write(bound)))
        if front is not None:
            counts = dict(zip(counts, front, strict=True))
        if rule.by and None in counts.values():
            raise SourceError(
                "is one scalar for several tensors", code="unknown-count",
                hint=f"give the counts of {names(counts)} in `by`",
            )  # fmt: skip
        _check_count(prod(count or 0 for count in counts.values()) * len(rule.parts))
        for index in product(*(range(count or 0) for count in counts.values())):
            for part in range(len(rule.parts)):
                self._add_part(
                    use, part, {**bound, **dict(zip(counts, index, strict=True))}, self.source.tensors[first]
                )

    def _check_equal(self, new: str, first: str, rest: Sequence[str]) -> None:
        """Check that tied tensors are equal: small ones whole, others by sampling.

        A warning says so if only samples were compared.
        """
        from reshard.rules.look import WHOLE_BYTES, equal  # imported late because it imports numpy

        for name in rest:
            if not equal(self.source, first, name):
                raise SourceError(f"ties {first!r} and {name!r}, which differ", code="not-equal")
        if self.source.tensors[first].spec.nbytes > WHOLE_BYTES:
            self.ties[new] = tuple(self.source.tensors[name] for name in (first, *rest))
            self.warnings.append(
                f"{names([first, *rest])} become one, {new}: a run compares samples of them, and verify all of them"
            )

    def _counts(self, rule: Rule) -> dict[str, int | None]:
        """Return the count of each word that becomes an axis; None if it is not given."""
        try:
            counts = {word: None if n is None else self.rules.numbers.value(n) for word, n in rule.by}
        except UsageError as error:
            raise UsageError(f"{error.message} (in by)", code=error.code, hint=error.hint) from None
        for word, count in counts.items():
            if count is not None and count < 1:
                raise SourceError(f"has {count} of {word} in by; expected at least 1", code="out-of-range")
        return counts

    def _scale_rows(self) -> int:
        try:
            rows = self.rules.numbers.value("scale_block") if "scale_block" in self.rules.numbers.let else _SCALE_ROWS
        except UsageError as error:
            raise error.about(f"{self.rules.root}: $.let.scale_block") from None
        if rows < 1:
            raise UsageError(
                f"{self.rules.root}: $.let.scale_block is {rows}; expected at least 1", code="out-of-range"
            )
        return rows

    def _scale(self, use: Use) -> int:
        return self.scale_rows if use.family.suffix in SCALES else 1

    def _split(self, use: Use, bound: Bound, name: str) -> None:
        """Split a tensor into its parts."""
        tensor, rule = self.source.tensors[name], use.rule
        dtype = _common_dtype([tensor.spec])
        counts = self._counts(rule)
        self._check_scales(use, [name], list(counts.values()))
        cut = rule.cut(self.rules.numbers, scale=self._scale(use))
        layout = of_fused(
            tensor.spec.shape, len(rule.parts), cut, list(counts.values()), flat=rule.flat, transposed=rule.transposed,
            at=rule.at,
        )  # fmt: skip
        _check_count(prod(layout.front) * len(layout.parts))
        self.fronts[rule.key_path, rule.fused.write(bound)] = layout.front
        if layout.padding:
            self._check_padding(tensor, layout, layout.padding)
        shards_of_part: dict[tuple[Shape, int], list[Shard]] = {
            (index, part): [] for index in product(*map(range, layout.front)) for part in range(len(layout.parts))
        }
        for shard in shards_in(tensor, layout.whole_space):
            for index, part, piece in pieces(layout, shard, dtype.itemsize):
                shards_of_part[index, part].append(piece)
        before = len(use.targets)
        for (index, number), shards in shards_of_part.items():
            box = layout.parts[number]
            spec = TensorSpec("", dtype, box.shape)
            words = {**bound, **dict(zip(counts, index, strict=True))}
            self._add_part(use, number, words, self.shared.tensor(spec, shards, space=box.space))
        self.fused[name] = Fused(name, dtype.name, use, layout, tuple(use.targets[before:]))

    def _check_padding(self, tensor: Tensor, layout: FusedLayout, padding: Block) -> None:
        """Check whether the padding that is left out is zero, if it is contiguous."""
        from reshard.rules.look import is_zero  # imported late because it imports numpy

        contents = "they were not checked"
        if not any(padding.start[1:]) and not layout.front:
            first = prod(tensor.spec.shape) - padding.size
            is_zeros = is_zero(self.source, tensor, first, padding.size)
            contents = "those checked are zeros" if is_zeros else "some are not zeros"
        self.padding.setdefault(contents, []).append(tensor.spec.name)

    def _join(self, use: Use, bound: Bound, members: Mapping[str, tuple[int, Bound]]) -> None:
        """Fuse a tensor from its parts."""
        rule = use.rule
        counts = self._counts(rule)
        sources: dict[tuple[Shape, int], str] = {}
        for name, (part, words) in members.items():
            sources[tuple(int(words[word]) for word in counts), part] = name
        front = tuple(
            max(index[n] for index, _ in sources) + 1 if count is None else count
            for n, count in enumerate(counts.values())
        )
        keys = ((index, part) for index in indices(front) for part in range(len(rule.parts)))
        expected_keys = []
        for index, part in keys:
            if (index, part) not in sources:
                absent = rule.parts[part].write({**bound, **dict(zip(counts, index, strict=True))})
                raise SourceError(
                    f"lacks {use.family.source_name(absent)!r}; the source has {names(members, most=2)}",
                    code="missing-tensor",
                )
            expected_keys.append((index, part))
        for word, count in zip(counts, front, strict=True):
            earlier_count, name = self.extents.setdefault(
                (rule.key_path, word), (count, use.family.of(rule.fused.write(bound)))
            )
            if count != earlier_count:
                raise SourceError(
                    f"has {count} of {word}, but {name!r} has {earlier_count}", code="wrong-count",
                    hint="check that all tensors were saved",
                )  # fmt: skip
        if len(sources) > len(expected_keys):
            raise SourceError(
                f"has {len(sources)} parts; expected {shape_text(front)} of {names(counts)}", code="wrong-count"
            )
        specs = [self.source.tensors[sources[key]].spec for key in expected_keys]
        dtype = _common_dtype(specs)
        shapes: list[set[Shape]] = [set() for _ in rule.parts]
        for spec, (_, part) in zip(specs, expected_keys, strict=True):
            shapes[part].add(spec.shape)
        for pattern, of_part in zip(rule.parts, shapes, strict=True):
            if len(of_part) > 1:
                mixed = names(map(shape_text, sorted(of_part)))
                raise SourceError(f"mixes shapes of {pattern.text}: {mixed}; expected one", code="wrong-shape")
        self._check_scales(use, [sources[key] for key in expected_keys[: len(rule.parts)]], front)
        cut = rule.cut(self.rules.numbers, scale=self._scale(use))
        layout = of_parts(
            [shape for (shape,) in shapes], cut, front, flat=rule.flat, transposed=rule.transposed, at=rule.at
        )
        shards: list[Shard] = []
        for (index, number), spec in zip(expected_keys, specs, strict=True):
            shards += placed(layout, self.source.tensors[spec.name], index, layout.parts[number])
        if layout.padding:
            shards += [zeros(layout, layout.padding, index) for index in product(*map(range, front))]
        new = rule.fused.write(bound)
        spec = TensorSpec(use.family.of(new), dtype, layout.shape)
        self._add(use, new, self.shared.tensor(spec, shards, space=layout.whole_space))
        self.fused[spec.name] = Fused(spec.name, dtype.name, use, layout, tuple(members))

    def _check_scales(self, use: Use, scales: Sequence[str], front: Sequence[int | None]) -> None:
        """Check that no cut divides a block of quantised weights that share a scale.

        Args:
            use: the use of the scales.
            scales: the name of the tensor that is split, or the names of the parts at one index.
            front: the extents of the axes in front, if known.
        """
        rule, block = use.rule, self._scale(use)
        if block == 1:
            return
        shapes: list[Shape] = []
        for name in scales:
            weight = name.removesuffix(use.family.suffix)
            if weight not in self.source.tensors:
                raise SourceError(f"has scales of {weight!r}, which is missing", code="missing-tensor")
            shape, of_scales = self.source.tensors[weight].spec.shape, self.source.tensors[name].spec.shape
            expected = (*shape[:-2], *(-(-extent // block) for extent in shape[-2:]))
            if of_scales != expected and not rule.flat:
                raise SourceError(
                    f"has scales {name!r} of {shape_text(of_scales)}; expected {shape_text(expected)}",
                    code="wrong-shape", facts=[f"{weight!r} is {shape_text(shape)}"],
                )  # fmt: skip
            shapes.append(shape)
        cut = rule.cut(self.rules.numbers)
        options: dict[str, Any] = {"flat": rule.flat, "transposed": rule.transposed, "at": rule.at}
        if self.side == rule.fused_side:
            layout = of_fused(shapes[0], len(rule.parts), cut, front, **options)
        else:
            layout = of_parts(shapes, cut, tuple(count or 0 for count in front), **options)
        last = sum(layout.axes[: cut.axis % len(layout.axes) + 1]) - 1  # the last finer axis of the one that is cut
        rows = [part.region.start[last] for part in layout.parts]
        rows += [layout.space[last]] if layout.axes[cut.axis % len(layout.axes)] > 1 else []
        rows += [prod(layout.space[: layout.axes[0]])] if rule.flat and prod(layout.front) > 1 else []
        if wrong := [row for row in rows if row % block]:
            raise SourceError(
                f"is cut at row {wrong[0]} of the weights; a scale covers {block} rows", code="not-divisible"
            )

    def _add_part(self, use: Use, part: int, bound: Bound, tensor: Tensor) -> None:
        """Add a part of a rule with these values of its words."""
        self.ranges.add(use.rule, use.family, part, bound)
        self._add(use, use.rule.parts[part].write(bound), tensor)

    def _add(self, use: Use, weight: str, tensor: Tensor) -> None:
        """Add a tensor under the name that belongs to its weight."""
        name = use.family.of(weight)
        if name in self.makers:
            makers = f"is made by both {self.makers[name]} and {use.rule.key_path}"
            self.faults.add(f"tensor {name!r}", makers, code="duplicate-name")
            return
        self.makers[name] = use.rule.key_path
        use.targets.append(name)
        self.tensors[name] = tensor._replace(spec=tensor.spec._replace(name=name))


def _common_dtype(specs: Sequence[TensorSpec]) -> DType:
    """Return the dtype of all parts of a tensor.

    Raises:
        SourceError: they differ, or values share a byte, whose order would change within it.
    """
    dtypes = {spec.dtype.name: spec.dtype for spec in specs}
    if len(dtypes) > 1:
        raise SourceError(f"mixes {names(sorted(dtypes))}; expected parts of one dtype", code="wrong-dtype")
    (dtype,) = dtypes.values()
    if dtype.bits:
        raise SourceError(f"is of {dtype}; such tensors can only be renamed", code="unsupported-dtype")
    return dtype


def _check_count(count: int) -> None:
    """Check that the number of resulting tensors is plausible.

    A tiny file may ask for any number.
    """
    if count > _MOST_PARTS:
        raise SourceError(f"would be {count:,} tensors; expected {_MOST_PARTS:,} at most", code="too-many-tensors")
