"""What sets Ministral 3, which llama.cpp calls mistral3, apart from a Llama.

Queries are scaled up with their position, and YaRN may leave the size of scores alone. A mistral3 that does
not say so, such as Mistral Small, is a Llama under another name.
"""

from __future__ import annotations

from typing import Any

from offspec.checkpoint.gguf.header import GgufHeader

_SCALE = "mistral3.attention.temperature_scale"
_WHOLE = "mistral3.rope.scaling.yarn_log_multiplier"
_SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
)


def as_ministral(config: Any, header: GgufHeader) -> Any:
    """The configuration for a file that was read as a Llama's: a Ministral 3 of these sizes, if it is one."""
    from transformers import AutoConfig

    if not header.metadata.get(_SCALE):
        return config
    sizes = {name: getattr(config, name) for name in _SHARED}
    rope = {"rope_type": "default", "rope_theta": 10_000.0}  # to be replaced by the file's
    return AutoConfig.for_model("ministral3", rope_parameters=rope, **sizes)


def ministral_rope(config: Any, header: GgufHeader) -> dict[str, Any]:
    """What Ministral 3 keeps in its rotary parameters besides the usual."""
    found: dict[str, Any] = {}
    if whole := header.metadata.get(_WHOLE):
        found |= {"mscale": 1.0, "mscale_all_dim": whole}
    if scale := header.metadata.get(_SCALE):
        original = header.metadata.get("mistral3.rope.scaling.original_context_length")
        original = original or config.max_position_embeddings
        found |= {"llama_4_scaling_beta": scale, "original_max_position_embeddings": original}
    return found
