"""Make a small GPT-2 with LoRA adapters, and what PEFT merges; needs torch, transformers and peft.

    /path/to/python tests/rules/gpt2_adapters.py FOLDER

Each case of FOLDER has `base` (a Hugging Face set), `adapter` and `merged.safetensors` (all weights after PEFT's
`merge_and_unload`). `c_proj` of attention is square; the head and `score` are Linear, the other layers Conv1D.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

CASES = {
    "conv_then_head": ("causal", ["c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "lm_head"]),
    "square_then_head": ("causal", ["attn.c_proj", "lm_head"]),
    "square_alone": ("causal", ["attn.c_proj"]),
    "conv_alone": ("causal", ["c_attn", "attn.c_proj", "mlp.c_fc"]),
    "square_linear": ("classes", ["attn.c_proj", "score"]),
    "embedding": ("causal", ["wte", "attn.c_proj", "c_attn"]),
}


def make(root: Path, kind: str, targets: list[str]) -> None:
    """Write one case."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config

    torch.manual_seed(len(root.name))
    auto = AutoModelForCausalLM if kind == "causal" else AutoModelForSequenceClassification
    config = GPT2Config(
        vocab_size=24, n_embd=16, n_layer=2, n_head=2, n_positions=8, num_labels=16, tie_word_embeddings=False
    )
    auto.from_config(config).save_pretrained(root / "base")
    settings = LoraConfig(r=4, lora_alpha=6, target_modules=targets, init_lora_weights=False)
    training = get_peft_model(auto.from_pretrained(root / "base"), settings)
    for name, value in training.named_parameters():
        if ".lora_" in name:
            value.data.copy_((value.data * 8).round() / 8)
    training.save_pretrained(root / "adapter")
    merged = PeftModel.from_pretrained(auto.from_pretrained(root / "base"), root / "adapter").merge_and_unload()
    save_file({name: value.clone() for name, value in merged.state_dict().items()}, root / "merged.safetensors")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for case, how in CASES.items():
        make(Path(sys.argv[1]) / case, *how)
