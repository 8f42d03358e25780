"""Models that GGUF files call llama, or mistral3: a Llama, a Mixtral or a Ministral 3.

Ministral 3 scales queries up with their position, and its YaRN may leave the size of scores alone. A mistral3
that does not say so, such as Mistral Small, is a Llama under another name.
"""

from __future__ import annotations

from typing import Any

from offspec.checkpoint.gguf.header import GgufHeader
from offspec.checkpoint.gguf.rope import set_rope
from offspec.checkpoint.ranges import damaged

_SCALE = "mistral3.attention.temperature_scale"
_WHOLE = "mistral3.rope.scaling.yarn_log_multiplier"
_SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
)
# Attributes that a Llama's file states only by having tensors.
_BIASES = {"blk.0.attn_output.bias": "attention_bias", "blk.0.ffn_up.bias": "mlp_bias"}


def complete_llama(config: Any, header: GgufHeader) -> Any:
    """The configuration of a Llama, or of a Mixtral of its sizes if the file has experts.

    Raises HeaderError for numbers of experts that cannot be.
    """
    arch = header.metadata["general.architecture"]
    if not (experts := header.metadata.get(f"{arch}.expert_count")):
        for name, attribute in _BIASES.items():
            setattr(config, attribute, name in header.tensors)
        return config
    chosen = header.metadata.get(f"{arch}.expert_used_count")
    if type(experts) is not int or type(chosen) is not int or not 0 < chosen <= experts < 2**16:
        damaged(header.path, f"{str(chosen)[:40]!r} of {str(experts)[:40]!r} experts cannot be chosen")
    counts = {"num_local_experts": experts, "num_experts_per_tok": chosen, "sliding_window": None}
    return _of_sizes("mixtral", config, **counts)


def complete_mistral(config: Any, header: GgufHeader) -> Any:
    """The configuration of a Ministral 3, or what `complete_llama` makes of a file that is none."""
    return _of_sizes("ministral3", config) if header.metadata.get(_SCALE) else complete_llama(config, header)


def set_mistral_rope(config: Any, arch: str, header: GgufHeader) -> None:
    """`set_rope` with what Ministral 3 keeps in its rotary parameters besides the usual."""
    found: dict[str, Any] = {}
    if whole := header.metadata.get(_WHOLE):
        found |= {"mscale": 1.0, "mscale_all_dim": whole}
    if scale := header.metadata.get(_SCALE):
        original = header.metadata.get("mistral3.rope.scaling.original_context_length")
        original = original or config.max_position_embeddings
        found |= {"llama_4_scaling_beta": scale, "original_max_position_embeddings": original}
    set_rope(config, arch, header, found)


def _of_sizes(kind: str, config: Any, **more: Any) -> Any:
    """A configuration of a kind with the sizes of another."""
    from transformers import AutoConfig

    sizes = {name: getattr(config, name) for name in _SHARED}
    rope = {"rope_type": "default", "rope_theta": 10_000.0}  # to be replaced by the file's
    return AutoConfig.for_model(kind, rope_parameters=rope, **sizes, **more)
