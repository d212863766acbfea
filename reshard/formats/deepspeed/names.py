"""Names of DeepSpeed's files."""

from __future__ import annotations

import re
from dataclasses import dataclass

from reshard.core.listing import FileNames
from reshard.core.options import Options

MODEL_STATES = re.compile(r"(?:zero_pp_rank_(?P<rank>\d{1,9})_)?mp_rank_(?P<part>\d{1,9})_model_states\.pt")
"""Files of weights, and of all that is not of the optimizer: one of each tensor-parallel part; with ZeRO stage 3, one
of each of its data-parallel ranks."""

OPTIM_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<rank>\d{1,9})_mp_rank_(?P<part>\d{1,9})_optim_states\.pt")
"""Files of optimizer states: one of each data-parallel rank of each tensor-parallel part."""

EXPERT_STATES = re.compile(r"(?:layer_\d{1,9}_)?expert_\d{1,9}_mp_rank_(?P<part>\d{1,9})_model_states\.pt")
"""Files of the weights of one expert."""

FILES = FileNames(
    re.compile(
        r"(?:bf16_)?(?:zero_pp_rank_\d{1,9}_)?mp_rank_\d{1,9}_(?:model|optim)_states\.pt|"
        r"(?:layer_\d{1,9}_)?expert_\d{1,9}_mp_rank_\d{1,9}_model_states\.pt"
    ),
    "is of a checkpoint of DeepSpeed",
    "open the directory of all its files, or of the run",
)


@dataclass(frozen=True, slots=True)
class DeepSpeedUniversal(Options):
    """A Universal Checkpoint of DeepSpeed.

    Its files are `zero/PARAMETER/STATE.pt`, model states for all stages of ZeRO, and `latest_universal`.
    """
