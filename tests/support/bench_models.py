"""Tiny random models that benches convert, and their logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def make_model(
    folder: Path, family: str = "llama", *, dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """Save a tiny random model of a family with grouped heads to `folder`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    settings = {
        "vocab_size": 61,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    config = AutoConfig.for_model(family, **settings)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():  # fresh norms are all ones and fresh biases zero: neither could show a mistake
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.copy_(torch.rand(parameter.shape) + 0.5)
            else:
                parameter.mul_(5)  # spread logits, so that an error becomes visible
    model.save_pretrained(folder)
    return model


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


def logits(model: Any) -> torch.Tensor:
    """Logits [2, 17, V] for fixed random ids."""
    ids = torch.randint(3, 61, (2, 17), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        result: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return result
