"""Supported architectures of GGUF files: one entry each, here or in `hybrids`.

Tests unpack a file of each architecture and compare it with the original model.
"""

from functools import partial
from typing import Any

from offspec.checkpoint.gguf.architecture import GgufArchitecture
from offspec.checkpoint.gguf.header import GgufHeader
from offspec.checkpoint.gguf.hybrids import HYBRIDS
from offspec.checkpoint.gguf.rope import (
    PHI_TABLES,
    ROPE_FACTORS,
    set_gemma_rope,
    set_gpt_oss_rope,
    set_phi_rope,
    set_rope,
)
from offspec.checkpoint.ranges import INSTEAD, damaged
from offspec.core.errors import UnsupportedModelError

_SCALE = "mistral3.attention.temperature_scale"
_WHOLE = "mistral3.rope.scaling.yarn_log_multiplier"
_SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
)
# Attributes that a Llama's file implies only by having tensors.
_BIASES = {"blk.0.attn_output.bias": "attention_bias", "blk.0.ffn_up.bias": "mlp_bias"}


def _complete_llama(config: Any, header: GgufHeader) -> Any:
    """Return the configuration of a Llama, or of a Mixtral of its sizes if the file has experts.

    Raises HeaderError for invalid numbers of experts.
    """
    arch = header.metadata["general.architecture"]
    if not (experts := header.metadata.get(f"{arch}.expert_count")):
        for name, attribute in _BIASES.items():
            setattr(config, attribute, name in header.tensors)
        return config
    chosen = header.metadata.get(f"{arch}.expert_used_count")
    if type(experts) is not int or type(chosen) is not int or not 0 < chosen <= experts < 2**16:
        damaged(header.path, f"invalid expert counts: {str(chosen)[:40]!r} of {str(experts)[:40]!r}")
    counts = {"num_local_experts": experts, "num_experts_per_tok": chosen, "sliding_window": None}
    return _of_sizes("mixtral", config, **counts)


def _complete_mistral(config: Any, header: GgufHeader) -> Any:
    """Return the configuration of a Ministral 3, or `_complete_llama`'s for another mistral3 file.

    Ministral 3 scales queries up with their position, and its YaRN may leave attention scores unscaled. A
    mistral3 file without these keys, such as Mistral Small, is a Llama under another name.
    """
    return _of_sizes("ministral3", config) if header.metadata.get(_SCALE) else _complete_llama(config, header)


def _set_mistral_rope(config: Any, arch: str, header: GgufHeader) -> None:
    """Apply `set_rope`, and set the additional rotary parameters of Ministral 3."""
    found: dict[str, Any] = {}
    if whole := header.metadata.get(_WHOLE):
        found |= {"mscale": 1.0, "mscale_all_dim": whole}
    if scale := header.metadata.get(_SCALE):
        original = header.metadata.get("mistral3.rope.scaling.original_context_length")
        original = original or config.max_position_embeddings
        found |= {"llama_4_scaling_beta": scale, "original_max_position_embeddings": original}
    set_rope(config, arch, header, found)


def _of_sizes(kind: str, config: Any, **more: Any) -> Any:
    from transformers import AutoConfig

    sizes = {name: getattr(config, name) for name in _SHARED}
    rope = {"rope_type": "default", "rope_theta": 10_000.0}  # later replaced by the file's values
    return AutoConfig.for_model(kind, rope_parameters=rope, **sizes, **more)


def _scale_scores(config: Any, header: GgufHeader, *, by_width: int) -> Any:
    """Set the score scale: by head size, or in the Gemma of `by_width` layers by hidden size per head."""
    width = config.hidden_size // config.num_attention_heads
    config.query_pre_attn_scalar = width if config.num_hidden_layers == by_width else config.head_dim
    return config


_CAP = {"final_logit_softcapping": "final_logit_softcapping"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_HEAD_SIZE = {"attention.key_length": "head_dim"}
_EXPERT_SIZE = {"expert_feed_forward_length": "moe_intermediate_size"}
_SHARED_SIZE = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}

_READ_BY_TRANSFORMERS = (
    GgufArchitecture(
        "gemma2",
        keys={"attn_logit_softcapping": "attn_logit_softcapping", **_CAP},
        complete=partial(_scale_scores, by_width=46),
        norms_plus_one=True,
    ),
    GgufArchitecture(
        "gemma3",
        keys=_CAP,
        complete=partial(_scale_scores, by_width=62),
        rope=set_gemma_rope,
        norms_plus_one=True,
    ),
    GgufArchitecture(
        "gpt-oss",
        unread=".rope.scaling.",
        keys={**_HEAD_SIZE, **_WINDOW, "expert_feed_forward_length": "intermediate_size"},
        rope=set_gpt_oss_rope,
        transposed_experts=True,
    ),
    GgufArchitecture(
        "llama", complete=_complete_llama, permuted=True
    ),  # also Mistral's models up to its third series
    GgufArchitecture(
        "mistral3", read_as="llama", complete=_complete_mistral, rope=_set_mistral_rope, permuted=True
    ),
    GgufArchitecture("phi3", keys=_WINDOW, rope=set_phi_rope, rope_tables=(ROPE_FACTORS, *PHI_TABLES)),
    GgufArchitecture("qwen2"),
    GgufArchitecture("qwen2moe", keys={**_EXPERT_SIZE, **_SHARED_SIZE}),
    GgufArchitecture("qwen3", keys=_HEAD_SIZE),
    GgufArchitecture("qwen3moe", keys=_EXPERT_SIZE),
    GgufArchitecture("starcoder2", keys={"rope.freq_base": "rope_theta"}),
)
ARCHITECTURES = {architecture.arch: architecture for architecture in (*_READ_BY_TRANSFORMERS, *HYBRIDS)}


def architecture_of(header: GgufHeader) -> GgufArchitecture:
    """Return the architecture of a file. Raises HeaderError, UnsupportedModelError for an unknown one."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str):
        damaged(header.path, "it does not name an architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{header.path} holds a {name[:40]!r} model, but GGUF files can be read only for "
            f"{', '.join(ARCHITECTURES)}: {INSTEAD}"
        )
    return ARCHITECTURES[name]
