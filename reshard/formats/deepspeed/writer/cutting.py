"""How trainings cut parameters in tensor parallelism, which a Universal Checkpoint says with each tensor.

DeepSpeed cuts along `cat_dim`; each half by itself if `param_n_sub_params` is 2; and fills up the vocabulary with zeros
if `vocab_tensor` is set. Here these follow from the patterns in the model states, or from what the user says of the
parts of the source. A training without tensor parallelism needs none of them.

Source: DeepSpeed 0.19.8 `checkpoint/universal_checkpoint.py` (`load_hp_checkpoint_state`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.errors import SourceError
from reshard.formats.deepspeed.pickled import optional_table
from reshard.formats.deepspeed.tensor_parallel import PATTERNS, NamePatterns, Recorded
from reshard.kits.parts.cuts import COLUMNS, COPY, GATE_AND_UP, ROWS, WHOLE
from reshard.strategy.names import matches

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reshard.formats.deepspeed.model import ModelStates

Entries = tuple[tuple[str, int], ...]
"""Entries next to a tensor."""

_ENTRIES: Mapping[str, Entries] = {
    COLUMNS: (("cat_dim", 0),),
    WHOLE: (("cat_dim", 0),),
    COPY: (("cat_dim", 0),),
    ROWS: (("cat_dim", 1),),
    GATE_AND_UP: (("cat_dim", 0), ("param_n_sub_params", 2)),
}
_VOCABULARY = "vocabulary_parameter_patterns"
_UNKNOWN = (
    "how tensor parallelism cuts some parameters is not written: load the target without it, or with DeepSpeed's AutoTP"
)


class Cutting:
    """How parameters are cut.

    Attributes:
        remarks: a warning if it is unknown for some parameters.
    """

    def __init__(self, model: ModelStates, rules: Mapping[str, str], parameters: Iterable[str]) -> None:
        """Read the patterns of a source.

        Args:
            model: its model states.
            rules: how the user says that its parts are cut, by name or glob; the last one that matches counts.
            parameters: the names of parameters in the source.
        """
        self._entries: dict[str, Entries] = {}
        is_known = True
        try:
            recorded, vocabulary = Recorded(model), NamePatterns(model.file.path)
            for pattern in optional_table(model.others, PATTERNS).get(_VOCABULARY) or ():
                vocabulary.add(pattern, value=True)
        except SourceError:  # of patterns that are not supported
            self.remarks: tuple[str, ...] = (_UNKNOWN,)
            return
        for name in parameters:
            rule = next((rule for pattern, rule in reversed([*rules.items()]) if matches(name, (pattern,))), None)
            is_known = is_known and (rule in _ENTRIES if rule else not recorded.unsupported.get(name))
            entries = _ENTRIES.get(rule or recorded.rule(name) or COLUMNS, _ENTRIES[COLUMNS])
            self._entries[name] = (*entries, ("vocab_tensor", True)) if vocabulary.get(name) else entries
        self.remarks = () if is_known else (_UNKNOWN,)

    def entries(self, name: str) -> Entries:
        """Return the entries next to a state of a parameter, by its name in the source."""
        return self._entries.get(name, _ENTRIES[COLUMNS])
