"""Checkpoints with the sizes of real models and sparse files, which take no disk space."""

import json
import math
from pathlib import Path
from typing import Any

from tests.support.tiny_models import write_tokenizer

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def _llama(hidden: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return {**_LLAMA, **sizes, "num_attention_heads": heads, **more}


SIZES = {
    "1b": _llama(2048, 8192, 16, 32, head_dim=64, tie_word_embeddings=True),
    "8b": _llama(4096, 14336, 32, 32),
    "32b": _llama(5120, 27648, 64, 40, quantization_config=_AWQ),
    "70b": _llama(8192, 28672, 80, 64, quantization_config=_AWQ),
}
_BYTES = {"BF16": 2, "F16": 2, "I32": 4}


def write_sparse(folder: Path, name: str) -> Path:
    """Write the checkpoint of one of SIZES, once."""
    place, config = folder / name, SIZES[name]
    if (place / "config.json").exists():
        return place
    place.mkdir(parents=True)
    header: dict[str, Any] = {}
    at = 0
    for tensor, (dtype, shape) in _tensors(config).items():
        size = _BYTES[dtype] * math.prod(shape)
        header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (place / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    write_tokenizer(place, 96)
    (place / "config.json").write_text(json.dumps(config))
    return place


def _tensors(config: dict[str, Any]) -> dict[str, tuple[str, list[int]]]:
    """Return (dtype, shape) by name."""
    hidden, inner, size = (config[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = (size * config[f"num_{name}_heads"] for name in ("attention", "key_value"))
    wide = ("BF16", [config["vocab_size"], hidden])
    found: dict[str, tuple[str, list[int]]] = {"model.embed_tokens.weight": wide}
    found["model.norm.weight"] = ("BF16", [hidden])
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = wide
    matrices = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}{norm}.weight"] = ("BF16", [hidden])
        for name, (rows, columns) in matrices.items():
            if "quantization_config" in config:
                found[f"{prefix}{name}.qweight"] = ("I32", [columns, rows // 8])
                found[f"{prefix}{name}.qzeros"] = ("I32", [columns // 128, rows // 8])
                found[f"{prefix}{name}.scales"] = ("F16", [columns // 128, rows])
            else:
                found[f"{prefix}{name}.weight"] = ("BF16", [rows, columns])
    return found
