"""Real configurations of EAGLE heads, and the shapes of the tensors that come with them."""

from pathlib import Path
from typing import Any

import torch

from offspec.draft.heads.files import HeadFiles

Shapes = dict[str, tuple[int, ...]]

# EAGLE-LLaMA3-Instruct-8B.json of github.com/SafeAILab/EAGLE, published as yuhuili/EAGLE-LLaMA3-Instruct-8B.
LLAMA3_EAGLE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "bias": False,
}

# traineagle3/config.json of the same, published as yuhuili/EAGLE3-LLaMA3.1-Instruct-8B: no rope_theta.
LLAMA3_EAGLE3: dict[str, Any] = {
    **{name: value for name, value in LLAMA3_EAGLE.items() if name not in ("rope_theta", "bias")},
    "draft_vocab_size": 32000,
}

# nm-testing/for_testing_gptoss20b_spec_eagle3, by the makers of RedHatAI's heads.
GPT_OSS_SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "base_model_ep_plan": None,
    "draft_vocab_size": 32000,
    "dtype": "bfloat16",
    "has_no_defaults_at_init": False,
    "norm_before_residual": True,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "accept_tolerance": 0.0,
                "proposal_type": "greedy",
                "speculative_tokens": 5,
                "verifier_accept_k": 1,
            }
        ],
        "verifier": {"architectures": ["GptOssForCausalLM"], "name_or_path": "openai/gpt-oss-20b"},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.1.0.dev0",
    "target_hidden_size": None,
    "transformer_layer_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 64,
        "num_hidden_layers": 1,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "use_cache": True,
        "vocab_size": 201088,
    },
}


class Listed(HeadFiles):
    """Files of a configuration and shapes alone, as large as the published ones."""

    def __init__(self, config: dict[str, Any], shapes: Shapes) -> None:
        super().__init__("published/head", Path(), [], config)
        self._tensors |= {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def layer_shapes(prefix: str, given: int, width: int = 4096, inner: int = 14336, pair: int = 1024) -> Shapes:
    """Of a layer whose queries are 4096 wide; given: what its attention takes."""
    return {
        f"{prefix}self_attn.q_proj.weight": (4096, given),
        f"{prefix}self_attn.k_proj.weight": (pair, given),
        f"{prefix}self_attn.v_proj.weight": (pair, given),
        f"{prefix}self_attn.o_proj.weight": (width, 4096),
        f"{prefix}mlp.gate_proj.weight": (inner, width),
        f"{prefix}mlp.up_proj.weight": (inner, width),
        f"{prefix}mlp.down_proj.weight": (width, inner),
        f"{prefix}post_attention_layernorm.weight": (width,),
    }


def third_shapes(prefix: str, width: int = 4096, inner: int = 14336, pair: int = 1024) -> Shapes:
    """Of an EAGLE-3 head of 32000 tokens."""
    return {
        **layer_shapes(prefix, 2 * width, width, inner, pair),
        f"{prefix}input_layernorm.weight": (width,),
        f"{prefix}hidden_norm.weight": (width,),
        "fc.weight": (width, 3 * width),
        "norm.weight": (width,),
        "lm_head.weight": (32000, width),
        "d2t": (32000,),
        "t2d": (128256,),
    }
