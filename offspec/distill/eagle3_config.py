"""The configuration of an EAGLE-3 layer, after its target's own layers."""

from typing import Any

_POSITIONS = 4096


def layer_config(target: Any, vocabulary: int) -> Any:
    """A LlamaConfig of one layer with the heads and sizes of a target's, whatever its family calls them."""
    from transformers import LlamaConfig

    hidden, heads = int(target.hidden_size), int(target.num_attention_heads)
    rope = getattr(target, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=int(getattr(target, "intermediate_size", None) or 4 * hidden),
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=int(getattr(target, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(target, "head_dim", None) or hidden // heads),
        hidden_act="silu",
        max_position_embeddings=int(getattr(target, "max_position_embeddings", None) or _POSITIONS),
        rms_norm_eps=float(getattr(target, "rms_norm_eps", None) or 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": float(theta or 10_000.0)},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
