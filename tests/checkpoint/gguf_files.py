"""GGUF files of tiny random models, written as llama.cpp writes them."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from offspec.checkpoint import Checkpoint, open_checkpoint
from offspec.events import Event


class Bench(NamedTuple):
    """A place to write a GGUF file and unpack it."""

    file: Path
    cache: Path
    events: list[Event]

    def open(self) -> Checkpoint:
        self.events.clear()
        return open_checkpoint(str(self.file), notify=self.events.append, cache_dir=self.cache)

    def left(self) -> list[str]:
        folder = self.cache / "unpacked"
        names = os.listdir(folder) if folder.exists() else []
        return [name for name in names if not name.endswith(".lock")]


COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# By llama.cpp's name: transformers' model type, and what the configuration adds.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen2moe": (
        "qwen2_moe",
        {
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3moe": (
        "qwen3_moe",
        {
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "norm_topk_prob": True,
        },
    ),
    "phi3": ("phi3", {"sliding_window": 5}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 5,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 10.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 5,
            "num_hidden_layers": 7,
            "tie_word_embeddings": True,
        },
    ),
    "starcoder2": ("starcoder2", {"use_bias": True, "tie_word_embeddings": True, "sliding_window": None}),
}


def tiny_model(family: str, **changes: Any) -> PreTrainedModel:
    """A random model in float32 whose weights are exact in bfloat16."""
    kind, extra = FAMILIES[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**COMMON, **extra, **changes})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.1)
            centre = parameter if "norm" in name else 0
            parameter.copy_(((centre + noise) * 256).round() / 256)
            parameter.copy_(parameter.bfloat16().float())
    return model


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    family: str,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    keys: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    without: tuple[str, ...] = (),
) -> None:
    """Write `model`: matrices as `kind`, vectors in float32.

    `keys` and `tensors` are added; a key whose value is None is left out, and so are tensors in `without`.
    """
    writer = gguf.GGUFWriter(path, family)
    pairs = {**_keys(model, family), **_vocabulary(model.config.vocab_size), **(keys or {})}
    for key, value in pairs.items():
        if value is None:
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, data in {**_tensors(model, family), **(tensors or {})}.items():
        if name in without:
            continue
        quantize = kind if data.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(data), quantize), raw_dtype=quantize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _keys(model: PreTrainedModel, family: str) -> dict[str, Any]:
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.dimension_count": head,
        "vocab_size": config.vocab_size,
    }
    if family == "starcoder2":
        keys["attention.layer_norm_epsilon"] = config.norm_epsilon
    else:
        keys["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    rope = config.rope_parameters
    keys["rope.freq_base"] = float(rope.get("full_attention", rope)["rope_theta"])
    for attribute, key in {
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "sliding_window": "attention.sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    }.items():
        value = getattr(config, attribute, None)
        if value is not None and not (family.startswith("qwen") and attribute == "sliding_window"):
            keys[key] = value
    return {f"{family}.{key}": value for key, value in keys.items()}


def _vocabulary(size: int) -> dict[str, Any]:
    """Bytes spelled as GPT-2 spells them, after three control tokens; one merge."""
    plain = [chr(code) for code in range(33, 33 + size - 4)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<pad>", "<s>", "</s>", "!!", *plain],
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (1 + len(plain)),
        "tokenizer.ggml.merges": ["! !"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}",
    }


def _tensors(model: PreTrainedModel, family: str) -> dict[str, np.ndarray]:
    arch = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    found: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        data = tensor.float().numpy()
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            layer = name.split(".")[2]
            gate, up = np.split(data, 2, axis=1)
            found[f"blk.{layer}.ffn_gate_exps.weight"] = gate
            found[f"blk.{layer}.ffn_up_exps.weight"] = up
            continue
        key = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert key, name
        if not key.endswith((".weight", ".bias")):
            key += ".weight"
        if family == "llama" and (".attn_q." in key or ".attn_k." in key):
            heads = "num_attention_heads" if "_q." in key else "num_key_value_heads"
            data = _permute(data, getattr(model.config, heads))
        if family.startswith("gemma") and key.endswith("norm.weight"):
            data = data + 1
        if key.endswith("gate_inp_shexp.weight"):
            data = data[0]
        found[key] = data
    return found


def _permute(data: np.ndarray, heads: int) -> np.ndarray:
    """Interleave the two halves of each head's rows, as llama.cpp's converter does for Llama."""
    halves = data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:])
    return halves.swapaxes(1, 2).reshape(data.shape)
