"""Join the tensors of all ranks of Megatron-LM's older format, by a table of names.

* Tensors that are not of experts are the same in all expert-parallel ranks.
* The first layer of an MLP has the parts of a gate and of an up projection if it has twice the rows that the second has
  columns.
* If embeddings are tied, the output layer of the last stage is another replica of the embedding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.formats.megatron.numbering import EMBEDDING, HEAD, OF_MODEL, Numbering, is_extra, is_grouped, is_of_expert
from reshard.formats.megatron.shapes import core_name, shape_of, shapes
from reshard.kits.parts.cuts import COLUMNS, GATE_AND_UP, ROWS, WHOLE, Cuts, rule_in
from reshard.kits.parts.joining import check_shapes, join

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from reshard.core.storage.places import Place
    from reshard.formats.megatron.numbering import Rank
    from reshard.formats.torch_save.saves import Contents
    from reshard.kits.parts.joining import JoinedParts
    from reshard.kits.torch.file import FileTensor
    from reshard.kits.training.arguments import Arguments

_TABLE: Mapping[str, tuple[str, ...]] = {
    COLUMNS: (
        "word_embeddings.weight", ".output_layer.weight", ".word_embeddings_for_head.weight",
        ".linear_qkv.weight", ".linear_qkv.bias", ".linear_q.weight", ".linear_q.bias", ".linear_kv.weight",
        ".linear_kv.bias", "_attention.query.weight", "_attention.query.bias", "_attention.key_value.weight",
        "_attention.key_value.bias", ".linear_q_proj.weight", ".linear_q_up_proj.weight", ".linear_kv_up_proj.weight",
        ".linear_fc1.weight", ".linear_fc1.bias",
    ),
    ROWS: (".linear_proj.weight", ".linear_fc2.weight"),
    WHOLE: (
        "norm.weight", "norm.bias", ".layer_norm_weight", ".layer_norm_bias", ".linear_proj.bias", ".linear_fc2.bias",
        "position_embeddings.weight", "tokentype_embeddings.weight",
        ".router.weight", ".router.expert_bias", ".shared_experts.gate_weight",
    ),
}  # fmt: skip
"""Endings of names by rule, as Megatron-Core has them (`core_name`)."""

_TIED_HEAD = ".word_embeddings_for_head.weight"
_NOTHING = "a pickled NoneType, which is not read"


class Model:
    """The tensors of all ranks.

    Attributes:
        unreadable: the names of tensors that cannot be read, with the reason.
        objects: descriptions of values that are not read.
    """

    def __init__(self, directory: Place, files: Mapping[Rank, Contents], arguments: Arguments) -> None:
        """Name the tensors of all files; arguments and errors as for `Numbering`."""
        self.unreadable: dict[str, str] = {}
        self.objects: dict[str, str] = {}
        self._copies: dict[str, dict[tuple[int, ...], dict[int, list[FileTensor]]]] = {}
        numbering = Numbering(directory, files, arguments)
        self._directory, self._arguments, self._mesh = directory, arguments, numbering.mesh
        for number, (rank, contents) in enumerate(files.items()):
            self._add(number, rank, contents, numbering)
        for name in self.unreadable:
            self._copies.pop(name, None)
        self._tie()
        self._parts = {name: [*_complete_sets(places)] for name, places in self._copies.items()}

    def joined(self, rules: Mapping[str, str] | None, *, has_first_version: bool) -> JoinedParts:
        """Return the whole tensors.

        Args:
            rules: the user's rules, in place of the table.
            has_first_version: the files are of the first version, whose parts have all queries before all keys.

        Raises:
            SourceError: shapes contradict the arguments.
            StrategyError: a rule does not fit.
        """

        def rule(name: str) -> str | None:
            return None if has_first_version and "key_value." in name else self._rule(name)

        cuts = Cuts(rule, rules, [*self._parts, *self.unreadable])
        dense, of_experts = (
            {name: parts for name, parts in self._parts.items() if is_of_expert(name) == is_expert}
            for is_expert in (False, True)
        )
        joined = join(dense, self._mesh.parts, cuts.of) | join(of_experts, self._mesh.expert_parts, cuts.of)
        known = shapes(self._arguments)
        expected = {
            name: shape
            for name in joined.tensors
            if OF_MODEL.match(name) and not cuts.is_ruled(name) and (shape := shape_of(name, known)) is not None
        }
        check_shapes(self._directory, joined.tensors, expected, "args")
        joined.unreadable.update(self.unreadable)
        return joined

    def _rule(self, name: str) -> str | None:
        """Return how a tensor is cut, by the table, the shapes and the arguments; None if it is unknown."""
        core = core_name(name)
        if is_grouped(name):
            return None
        if not core.endswith((".linear_fc1.weight", ".linear_fc1.bias")):
            return rule_in(_TABLE, core)
        is_gated = self._is_gated(name)
        if is_gated is None or (is_gated and is_of_expert(name) and self._arguments["moe_mlp_glu_interleave_size"]):
            return None
        return GATE_AND_UP if is_gated else COLUMNS

    def _is_gated(self, name: str) -> bool | None:
        """Return whether the first layer of an MLP has rows for a gate, by its shapes, or else by the arguments."""
        weight = name.replace(".bias", ".weight")
        second = weight.replace(".linear_fc1.", ".linear_fc2.").replace(".dense_h_to_4h.", ".dense_4h_to_h.")
        rows, columns = self._shape(weight)[:1], self._shape(second)[1:]
        if rows and columns and rows[0] in {columns[0], 2 * columns[0]}:
            return rows != columns
        return self._arguments.is_gated if OF_MODEL.match(name) else None

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the parts of a tensor; () if there are none."""
        return next((part.shape for parts in self._parts.get(name, ()) for part in parts.values()), ())

    def _add(self, number: int, rank: Rank, contents: Contents, numbering: Numbering) -> None:
        """Add the tensors of file number `number`."""
        tensors, refused = contents.parts(number)
        for local, tensor in tensors.items():
            chunk, name = numbering.name(local, rank)
            if is_extra(name):
                self.objects[name] = "a state of a layer of Transformer Engine, which is not read"
                continue
            if is_grouped(name) and max(self._mesh.parts, self._mesh.experts) > 1:
                self.unreadable[name] = "has several experts in one tensor, and its parts are not joined"
            part = rank.part % self._mesh.expert_parts if is_of_expert(name) else rank.part
            place = self._copies.setdefault(name, {}).setdefault((chunk, rank.stage), {})
            place.setdefault(part, []).append(tensor)
        for local, reason in refused.items():
            name = numbering.name(local, rank)[1]
            (self.objects if is_extra(name) else self.unreadable).setdefault(name, reason)
        for local, kind in contents.objects.items():
            name = numbering.name(local, rank)[1]
            if name and kind != _NOTHING:  # an empty model has no name
                self.objects.setdefault(name, kind)

    def _tie(self) -> None:
        """Make the output layer a replica of the embedding if the two are tied."""
        embeddings = [name for name in self._copies if f".{name}".endswith(EMBEDDING)]
        is_tied = self._arguments["untie_embeddings_and_output_weights"] is False
        endings = (_TIED_HEAD, HEAD) if is_tied else (_TIED_HEAD,)
        heads = [name for name in self._copies if f".{name}".endswith(endings)] if len(embeddings) == 1 else []
        for number, head in enumerate(heads):
            copies = self._copies.pop(head)
            self._copies[embeddings[0]].update(((*place, number), parts) for place, parts in copies.items())


def _complete_sets(places: Mapping[tuple[int, ...], Mapping[int, list[FileTensor]]]) -> Iterator[dict[int, FileTensor]]:
    """Yield the replicas of a tensor, each with its parts by number."""
    for copies in places.values():
        for number in range(min(map(len, copies.values()))):
            yield {part: tensors[number] for part, tensors in copies.items()}
