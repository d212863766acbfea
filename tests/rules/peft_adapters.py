"""Make small models, LoRA adapters for them and what PEFT merges; needs torch, transformers and peft.

    /path/to/python tests/rules/peft_adapters.py FOLDER

Each case of FOLDER has `base` (a Hugging Face set), `adapter`, `merged.safetensors` (what `merge_and_unload` changes),
and if the model ties its weights, `base.bin` (the same by `torch.save`) and `untied.safetensors` (the merge after the
weights were untied, as PEFT advises). Elements of the adapters are multiples of 1/8, so that every library has the same
products; those of embeddings of 1/2, as PEFT 0.21.2 rounds their products to the weight's dtype before it adds them.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

LAYERS = ["embed_tokens", "lm_head", "q_proj", "down_proj"]
CASES: dict[str, dict[str, Any]] = {
    "untied_float32": {"dtype": "float32", "targets": LAYERS},
    "untied_float16": {"dtype": "float16", "targets": LAYERS},
    "untied_bfloat16": {"dtype": "bfloat16", "targets": LAYERS},
    "trained_wider": {"dtype": "bfloat16", "targets": LAYERS, "trained": "float32"},
    "not_targeted": {"dtype": "bfloat16", "targets": ["q_proj"], "saved": True},
    "tied_head": {"dtype": "bfloat16", "targets": ["lm_head", "q_proj"], "tied": True},
    "tied_embedding": {"dtype": "bfloat16", "targets": ["embed_tokens"], "tied": True},
    "tied_both": {"dtype": "float32", "targets": ["embed_tokens", "lm_head"], "tied": True},
    "tied_ensured": {"dtype": "bfloat16", "targets": ["embed_tokens"], "tied": True, "ensured": True},
}


def make(root: Path, dtype: str, targets: list[str], *, trained: str = "", tied: bool = False, ensured: bool = False,
         saved: bool | str = "auto") -> None:  # fmt: skip
    """Write one case."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(len(root.name))
    kind, config = (Qwen2ForCausalLM, Qwen2Config) if tied else (LlamaForCausalLM, LlamaConfig)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = kind(config(**sizes, **heads, tie_word_embeddings=tied)).to(getattr(torch, dtype))
    model.save_pretrained(root / "base")

    def loaded(**how: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(root / "base", **how)

    more = {"ensure_weight_tying": True} if ensured else {}
    settings = LoraConfig(r=4, lora_alpha=6, target_modules=list(targets), init_lora_weights=False, **more)
    training = get_peft_model(loaded(dtype=getattr(torch, trained or dtype)), settings)
    for name, value in training.named_parameters():
        if ".lora_" in name:
            steps = 2 if ensured or "embed" in name else 8
            value.data.copy_((value.data * steps).round() / steps)
    training.save_pretrained(root / "adapter", save_embedding_layers=saved)
    before = {name: value.clone() for name, value in loaded(dtype=getattr(torch, dtype)).state_dict().items()}

    def merged(base: Any, path: Path) -> None:
        whole = PeftModel.from_pretrained(base, root / "adapter").merge_and_unload().state_dict()
        changed = {name: value.clone() for name, value in whole.items() if not torch.equal(value, before[name])}
        save_file(changed, path)

    merged(loaded(dtype=getattr(torch, dtype)), root / "merged.safetensors")
    if tied:
        torch.save(model.state_dict(), root / "base.bin")
        apart = loaded(dtype=getattr(torch, dtype))
        apart.lm_head.weight = torch.nn.Parameter(apart.model.embed_tokens.weight.data.clone())
        apart.config.tie_word_embeddings = False
        merged(apart, root / "untied.safetensors")
    said = json.loads((root / "adapter" / "adapter_config.json").read_text())
    said["base_model_name_or_path"] = "base"
    (root / "adapter" / "adapter_config.json").write_text(json.dumps(said, indent=1, sort_keys=True))
    for name in ("adapter/README.md", "base/generation_config.json"):
        (root / name).unlink(missing_ok=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for case, how in CASES.items():
        shutil.rmtree(Path(sys.argv[1]) / case, ignore_errors=True)
        make(Path(sys.argv[1]) / case, **how)
