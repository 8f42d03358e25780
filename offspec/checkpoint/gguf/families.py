"""The architectures of GGUF files that can be read: an entry each, here or in `hybrids`.

The tests compare what is unpacked from a file of each with the model it came from.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from offspec.checkpoint.gguf.family import Family
from offspec.checkpoint.gguf.header import GgufHeader
from offspec.checkpoint.gguf.hybrids import HYBRIDS
from offspec.checkpoint.gguf.llamas import complete_llama, complete_mistral, set_mistral_rope
from offspec.checkpoint.gguf.rope import (
    PHI_TABLES,
    ROPE_FACTORS,
    set_gemma_rope,
    set_gpt_oss_rope,
    set_phi_rope,
)
from offspec.checkpoint.ranges import INSTEAD, damaged
from offspec.core.errors import UnsupportedModelError


def _scale_scores(config: Any, header: GgufHeader, *, by_width: int) -> Any:
    """A Gemma scales scores by its heads' size; the one of `by_width` layers, by the width per head."""
    width = config.hidden_size // config.num_attention_heads
    config.query_pre_attn_scalar = width if config.num_hidden_layers == by_width else config.head_dim
    return config


_CAP = {"final_logit_softcapping": "final_logit_softcapping"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_HEAD_SIZE = {"attention.key_length": "head_dim"}
_EXPERT_SIZE = {"expert_feed_forward_length": "moe_intermediate_size"}
_SHARED_SIZE = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}

_READ_BY_TRANSFORMERS = (
    Family(
        "gemma2",
        keys={"attn_logit_softcapping": "attn_logit_softcapping", **_CAP},
        complete=partial(_scale_scores, by_width=46),
        norms_plus_one=True,
    ),
    Family(
        "gemma3",
        keys=_CAP,
        complete=partial(_scale_scores, by_width=62),
        rope=set_gemma_rope,
        norms_plus_one=True,
    ),
    Family(
        "gpt-oss",
        unread=".rope.scaling.",
        keys={**_HEAD_SIZE, **_WINDOW, "expert_feed_forward_length": "intermediate_size"},
        rope=set_gpt_oss_rope,
        turned_experts=True,
    ),
    Family("llama", complete=complete_llama, permuted=True),  # Mistral's up to its third series, too
    Family("mistral3", read_as="llama", complete=complete_mistral, rope=set_mistral_rope, permuted=True),
    Family("phi3", keys=_WINDOW, rope=set_phi_rope, rope_tables=(ROPE_FACTORS, *PHI_TABLES)),
    Family("qwen2"),
    Family("qwen2moe", keys={**_EXPERT_SIZE, **_SHARED_SIZE}),
    Family("qwen3", keys=_HEAD_SIZE),
    Family("qwen3moe", keys=_EXPERT_SIZE),
    Family("starcoder2", keys={"rope.freq_base": "rope_theta"}),
)
FAMILIES = {family.arch: family for family in (*_READ_BY_TRANSFORMERS, *HYBRIDS)}


def family_of(header: GgufHeader) -> Family:
    """The family of a file. Raises HeaderError, UnsupportedModelError for one that is not in FAMILIES."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str):
        damaged(header.path, "it does not name an architecture")
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"{header.path} holds a {name[:40]!r} model, and GGUF files can be read for "
            f"{', '.join(FAMILIES)}: {INSTEAD}"
        )
    return FAMILIES[name]
