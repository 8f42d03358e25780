"""gpt-oss with MXFP4 experts, as published, and the same values stored unquantized."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support import packers
from tests.support.tiny_models import write_model

# As in the config.json of openai/gpt-oss-20b.
SETTINGS = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}


def write_both(folder: Path) -> tuple[Path, Path]:
    """Write a model of the values of random codes, and a model with the codes themselves."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    dense = write_model(folder / "dense", "gpt_oss", tie_word_embeddings=False, **sizes)
    packed = folder / "packed"
    values, stored = load_file(dense / "model.safetensors"), dict[str, torch.Tensor]()
    for name, tensor in values.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            made = packers.mxfp4((tensor.shape[0], tensor.shape[1], tensor.shape[2]))
            values[name] = made.values
            stored |= {f"{name}_{part}": codes for part, codes in made.tensors.items()}
        else:
            stored[name] = tensor
    packers.save_both(dense, packed, SETTINGS, values, stored)
    return dense, packed
