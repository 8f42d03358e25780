"""Tiny random models of every architecture that offspec reads from GGUF files."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.gguf_hybrids import HYBRIDS

COMMON = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
COMMON |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
COMMON |= {"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_YARN: dict[str, Any] = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
_MINISTRAL = _YARN | {"rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 8}
_MINISTRAL |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.25}
_GPT_OSS = _YARN | {
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "truncate": False,
}
_EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 32}
_LOCAL: dict[str, Any] = {"num_experts_per_tok": 2, "num_local_experts": 4, "head_dim": 16}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 5, "tie_word_embeddings": True}
_CAPPED = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}
# By llama.cpp's name: transformers' model type, and additions to the configuration.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 16}),
    "mistral3": ("ministral3", {"head_dim": 16, "rope_parameters": _MINISTRAL}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen2moe": ("qwen2_moe", _EXPERTS | {"shared_expert_intermediate_size": 48}),
    "qwen3moe": ("qwen3_moe", _EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
    "llama with experts": ("mixtral", _LOCAL | {"sliding_window": None}),
    "gpt-oss": ("gpt_oss", _LOCAL | {"sliding_window": 5, "rope_parameters": _GPT_OSS}),
    "phi3": ("phi3", {"sliding_window": 5}),
    "gemma2": ("gemma2", _GEMMA | _CAPPED),
    "gemma3": ("gemma3_text", _GEMMA | {"num_hidden_layers": 7}),
    "starcoder2": ("starcoder2", {"use_bias": True, "tie_word_embeddings": True, "sliding_window": None}),
}


def tiny_model(family: str, **changes: Any) -> PreTrainedModel:
    """A random float32 model whose weights are exact in bfloat16."""
    kind, extra = (FAMILIES | HYBRIDS)[family]
    torch.manual_seed(0)
    wanted = {**COMMON, **extra, **changes}
    config = AutoConfig.for_model(
        kind, **{name: value for name, value in wanted.items() if value is not None}
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.1)
            centre = parameter if "norm" in name else 0
            parameter.copy_(((centre + noise) * 256).round() / 256)
            parameter.copy_(parameter.bfloat16().float())
    return model
