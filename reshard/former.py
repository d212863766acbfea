"""Words of earlier versions, and today's word for each."""

from __future__ import annotations

OPTIONS = {
    "drop-cache fsync no-drop-cache no-fsync no-server-copy": "--tune NAME=VALUE, such as --tune fsync=no",
    "from-checkpoint": "`reshard strategy make --like CHECKPOINT -o FILE`",
    "invert": "rules work both ways as they are",
    "iteration": "--step N chooses a checkpoint of a run",
    "layouts-of": "--target-strategy takes a checkpoint, too",
    "link-replicas": "leave it out; --remove-redundancy stores each block once",
    "lora-tied": "in Python, reshard.LoRA(DIR, tied='both') or 'untie'",
    "raw": "`reshard strategy show FILE --raw` shows device matrices and tensor maps",
    "scheduler": "--cluster threads or --cluster ADDRESS",
    "seed": "leave it out; each sample is chosen anew",
    "shard-size": "leave it out; small chunks share files of 64 MiB",
    "style": "--to FORMAT: hf, mindspore or checkpoint2",
    "target-iteration target-partial target-rank-pattern target-suffix": "without --against, --step, "
    "--partial, --rank-pattern and --suffix are for TARGET",
    "target-stage": "--ranks LIST chooses the ranks of a stage",
    "transform": "`reshard convert SOURCE TARGET`",
    "unify": "`reshard convert SOURCE TARGET --to hf`, or --to mindspore",
    "via-zarr": "`reshard convert SOURCE STORE.zarr`, then `reshard convert STORE.zarr TARGET`",
}
"""Commands, and options without their hyphens."""

_OF_FORMATS = "give to= and the options of the format, such as to='hf', max_shard_size='4GB'"
_OF_SOURCES = "it is a SourceError, TargetError or UsageError; `error.code` says which"
NAMES = {
    "Block": "it is in reshard.core.layout.block",
    "CheckpointDiff": "reshard.diff returns it",
    "CheckpointStats": "Checkpoint.stats returns it",
    "make_manifest": "it is reshard.Manifest.make(path)",
    "merge_strategies": "reshard.write_strategy(reshard.read_strategy(directory), path)",
    "read_layouts": "target_strategy= takes the checkpoint itself",
    "read_manifest": "it is reshard.Manifest.read(path)",
    "read_object": "it is checkpoint.read_object(name)",
    "strategy_of": "it is checkpoint.to_strategy()",
    "write_manifest": "it is manifest.write(path)",
    **dict.fromkeys(("Checkpoint2", "DCP", "HuggingFaceSet", "MindSporeSet", "ZarrGroup"), _OF_FORMATS),
    **dict.fromkeys(
        (
            "ChangedError",
            "EncryptedError",
            "GoneError",
            "LayoutError",
            "MissingNameError",
            "NoBucketError",
            "PlanError",
        ),
        _OF_SOURCES,
    ),
    **dict.fromkeys(("UnansweredError", "UnsentError"), _OF_SOURCES),
}
"""Names of the module `reshard`."""

KEYWORDS = {
    "cipher": "a written target has target_cipher",
    "files": _OF_FORMATS,
    "format": "it is to=",
    "iteration": "it is step=",
    "layouts_of": "target_strategy= takes a checkpoint, too",
    "link_replicas": "remove_redundancy=True stores each block once",
    "scheduler": "it is client=",
    "seed": "each sample is chosen anew",
    "shard_size": "small chunks share files of 64 MiB",
    "source_cipher": "it is cipher=, and that of the target is target_cipher=",
    "stage": "it is target_stage=",
    "step": "it is target_step=",
    "strategy": "it is target_strategy=",
}
"""Keywords of functions of the module `reshard`."""
