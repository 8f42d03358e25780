"""Targets with an MTP module in their checkpoint, in each published layout, and the module's logits."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.drafter_logits import paths
from tests.support.tiny_models import write_model

LAYERS = 3
GLM = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "partial_rotary_factor": 0.5,
}
DEEPSEEK = {
    **{name: value for name, value in GLM.items() if name != "partial_rotary_factor"},
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_STATE, FULL = "linear_attention", "full_attention"
HYBRID = {
    "layer_types": [_STATE, FULL, _STATE],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
}
HYBRID_EXPERTS = {
    **HYBRID,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
# Families that store norm weights minus one.
CENTRED = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
# Names of token norm, state norm, join and last norm, then the prefix of the layer's names.
NAMES = {
    "deepseek": ("enorm", "hnorm", "eh_proj", "shared_head.norm", ""),
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", ""),
    "qwen": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0."),
}
PREFIXES = {"deepseek": f"model.layers.{LAYERS}.", "mimo": "model.mtp_layers.0.", "qwen": "mtp."}
CASES = [
    ("deepseek", "llama", {}),
    ("deepseek", "glm4_moe", GLM),
    ("deepseek", "deepseek_v3", DEEPSEEK),
    ("mimo", "qwen2", {}),
    ("qwen", "qwen3", {}),
    ("qwen", "qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    ("qwen", "qwen3_5_text", HYBRID),
    ("qwen", "qwen3_5_moe_text", HYBRID_EXPERTS),
    ("qwen", "qwen3_next", HYBRID_EXPERTS),
]


def write_with_mtp(folder: Path, layout: str, family: str, overrides: Mapping[str, Any]) -> Path:
    """Write a target with an MTP module, and a model of the module's layer in the folder `layer`."""
    write_model(folder, family, **overrides)
    alone: dict[str, Any] = {"num_hidden_layers": 1}
    if "first_k_dense_replace" in overrides:
        alone["first_k_dense_replace"] = 0
    if "layer_types" in overrides:
        alone["layer_types"] = [FULL]
    write_model(folder / "layer", family, seed=7, **{**overrides, **alone})
    tensors = load_file(folder / "model.safetensors")
    prefix = PREFIXES[layout]
    token_norm, state_norm, join, last_norm, layer = NAMES[layout]
    for name, tensor in load_file(folder / "layer" / "model.safetensors").items():
        if name.startswith("model.layers.0."):
            tensors[prefix + layer + name.removeprefix("model.layers.0.")] = tensor
    size = tensors["model.embed_tokens.weight"].shape[1]
    torch.manual_seed(11)
    tensors[f"{prefix}{token_norm}.weight"] = 1 + 0.2 * torch.randn(size)
    tensors[f"{prefix}{state_norm}.weight"] = 1 + 0.2 * torch.randn(size)
    tensors[f"{prefix}{join}.weight"] = 0.5 * torch.randn(size, 2 * size)
    tensors[f"{prefix}{last_norm}.weight"] = 1 + 0.2 * torch.randn(size)
    if layout == "deepseek":  # redundant copies of the target's own
        tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}shared_head.head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class ReferenceMtp:
    """The module's published formulas around transformers' own layer, for all positions at once."""

    def __init__(self, folder: Path, layout: str) -> None:
        self.target: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.layer: Any = AutoModelForCausalLM.from_pretrained(
            folder / "layer", dtype=torch.float32, attn_implementation="eager"
        ).eval()
        stored, prefix = load_file(folder / "model.safetensors"), PREFIXES[layout]
        token_norm, state_norm, join, last_norm, _ = (f"{prefix}{name}.weight" for name in NAMES[layout])
        self.layer.model.norm.weight.data = stored[last_norm]
        centre = int(self.target.config.model_type in CENTRED)
        self._norms = [centre + stored[name] for name in (token_norm, state_norm)]
        self._join = stored[join]
        self._eps = self.target.config.rms_norm_eps
        self._states_first = layout == "mimo"

    def features(self, ids: Sequence[int]) -> torch.Tensor:
        """The target's final states [n, H], after its last norm."""
        states: torch.Tensor = self.target.model(torch.tensor([list(ids)])).last_hidden_state[0]
        return states

    @torch.no_grad()
    def __call__(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits [7, V] at the nodes of the tree below the last of the ids."""
        rows = []
        for path in paths():
            states, known = self.features(ids[:-1]), len(ids)
            for end in range(known, known + len(path) + 1):
                tokens = torch.tensor([*ids, *path][1:end])
                out = self._module(self.target.model.embed_tokens(tokens), states)
                states = torch.cat([states, out[-1:]])
            rows.append(self.target.lm_head(states[-1]))
        return torch.stack(rows)

    def _module(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        normed = [
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * weight
            for x, weight in zip((embedded, states), self._norms, strict=True)
        ]
        joined = torch.cat(normed[::-1] if self._states_first else normed, dim=-1) @ self._join.T
        out: torch.Tensor = self.layer.model(inputs_embeds=joined[None]).last_hidden_state[0]
        return out
