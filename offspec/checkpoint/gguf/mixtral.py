"""Mixtral, which llama.cpp calls llama, with experts."""

from __future__ import annotations

from typing import Any

from offspec.checkpoint.gguf.header import GgufHeader
from offspec.checkpoint.ranges import damaged

_SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
)


def as_mixtral(config: Any, header: GgufHeader) -> Any:
    """The configuration for a file that was read as a Llama's: a Mixtral of these sizes, if it has experts.

    Raises HeaderError for numbers of experts that cannot be.
    """
    from transformers import AutoConfig

    arch = header.metadata["general.architecture"]
    experts = header.metadata.get(f"{arch}.expert_count")
    if config.model_type != "llama" or not experts:
        return config
    chosen = header.metadata.get(f"{arch}.expert_used_count")
    if type(experts) is not int or type(chosen) is not int or not 0 < chosen <= experts < 2**16:
        damaged(header.path, f"{str(chosen)[:40]!r} of {str(experts)[:40]!r} experts cannot be chosen")
    sizes = {name: getattr(config, name) for name in _SHARED}
    rope = {"rope_type": "default", "rope_theta": 10_000.0}  # to be replaced by the file's
    counts = {"num_local_experts": experts, "num_experts_per_tok": chosen, "sliding_window": None}
    return AutoConfig.for_model("mixtral", rope_parameters=rope, **sizes, **counts)
