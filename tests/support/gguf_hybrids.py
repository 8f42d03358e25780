"""Recurrent and hybrid architectures as llama.cpp's converter writes them: names, keys and layouts."""

import re
from typing import Any

import gguf
import numpy as np
from transformers import PreTrainedModel

Tensors = dict[str, np.ndarray]
_STATE, _FULL = "linear_attention", "full_attention"
_GATED: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "layer_types": [_STATE, _STATE, _FULL, _STATE],
}
_GATED |= {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8}
_GATED |= {"linear_value_head_dim": 16, "linear_conv_kernel_dim": 4}
_GATED["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": 64}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2}
_MAMBA |= {"mamba_d_conv": 4}
_FALCON = _MAMBA | {"head_dim": 16, "mamba_d_ssm": 128}
_GRANITE = _MAMBA | {
    "mamba_expand": 2,
    "layer_types": [_STATE, _FULL, _STATE],
    "shared_intermediate_size": 96,
}
_GRANITE |= {"num_local_experts": 0, "num_experts_per_tok": 0, "attention_multiplier": 0.125}
_GRANITE |= {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 4.0}
_GRANITE_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64}
_JAMBA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 3,
}
_JAMBA |= {"expert_layer_offset": 0, "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 32}
_CONVS = {"layer_types": ["conv", _FULL, "conv"], "tie_word_embeddings": True}
_NEMOTRON: dict[str, Any] = {
    "num_hidden_layers": None,
    "head_dim": 16,
    "layers_block_type": [_STATE, "mlp", _FULL, "mlp"],
}
_NEMOTRON |= {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2}
_SMALL: dict[str, Any] = {"num_attention_heads": None, "num_key_value_heads": None, "intermediate_size": None}
# By llama.cpp's name and variant: transformers' model type, and additions to the configuration.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon-h1": ("falcon_h1", _FALCON),
    "falcon-h1 normed": ("falcon_h1", _FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "granitehybrid": ("granitemoehybrid", _GRANITE),
    "granitehybrid experts": ("granitemoehybrid", _GRANITE | _GRANITE_EXPERTS),
    "jamba": ("jamba", _JAMBA),
    "lfm2": ("lfm2", _CONVS | {"block_auto_adjust_ff_dim": False}),
    "lfm2moe": ("lfm2_moe", _CONVS | _EXPERTS | {"num_dense_layers": 1}),
    "mamba": ("mamba", _SMALL | {"state_size": 8, "time_step_rank": 32}),
    "mamba2": ("mamba2", _SMALL | {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2}),
    "nemotron_h": ("nemotron_h", _NEMOTRON),
    "qwen35": ("qwen3_5_text", _GATED),
    "qwen35moe": ("qwen3_5_moe_text", _GATED | _SHARED),
    "qwen3next": ("qwen3_next", _GATED | _SHARED),
}


def hybrid_keys(model: PreTrainedModel, arch: str) -> dict[str, Any]:
    """Metadata keys below the architecture's name."""
    config: Any = model.config
    layers = len(model.base_model.layers)
    keys: dict[str, Any] = {
        "block_count": layers,
        "embedding_length": config.hidden_size,
        "context_length": getattr(config, "max_position_embeddings", 2**20),
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": next(
            getattr(config, name)
            for name in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")
            if hasattr(config, name)
        ),
    }
    if not arch.startswith("mamba"):
        kinds = list(getattr(config, "layer_types", None) or [])
        heads = config.num_key_value_heads
        by_layer = arch not in ("falcon-h1", *_DELTA)
        keys |= {
            "attention.head_count": config.num_attention_heads,
            "attention.head_count_kv": [heads * (kind == _FULL) for kind in kinds] if by_layer else heads,
            "feed_forward_length": config.intermediate_size,
        }
        if arch == "nemotron_h":
            keys["feed_forward_length"] = [config.intermediate_size * (kind == "mlp") for kind in kinds]
        if not arch.startswith(("granite", "jamba", "lfm2")):
            keys |= dict.fromkeys(("attention.key_length", "attention.value_length"), config.head_dim)
        if arch.startswith(("lfm2", "qwen", "falcon")):
            keys["rope.freq_base"] = float(config.rope_parameters["rope_theta"])
    return keys | _of_states(config, arch) | _of_experts(config) | _of_family(config, arch)


_DELTA = ("qwen35", "qwen35moe", "qwen3next")


# Attributes for kernel, state, groups and ranks, and those whose product is the inner size.
_STATES = {
    "falcon-h1": ("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads", "mamba_d_head"),
    "mamba": ("conv_kernel", "state_size", "", "time_step_rank", ""),
    "jamba": ("mamba_d_conv", "mamba_d_state", "", "mamba_dt_rank", ""),
    "mamba2": ("conv_kernel", "state_size", "n_groups", "num_heads", "head_dim"),
    "nemotron_h": ("conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads", "mamba_head_dim"),
}
_STATES["granitehybrid"] = _STATES["falcon-h1"]
_LINEAR = ("conv_kernel_dim", "key_head_dim", "num_key_heads", "num_value_heads", "value_head_dim")
_STATES |= dict.fromkeys(_DELTA, tuple(f"linear_{name}" for name in _LINEAR))


def _of_states(config: Any, arch: str) -> dict[str, Any]:
    if arch.startswith("lfm2"):
        return {"shortconv.l_cache": config.conv_L_cache}
    kernel, state, groups, rank, size = (getattr(config, name, 0) if name else 0 for name in _STATES[arch])
    inner = rank * size
    if not size:
        inner = config.intermediate_size if arch == "mamba" else config.mamba_expand * config.hidden_size
    keys = {"conv_kernel": kernel, "state_size": state, "inner_size": inner, "time_step_rank": rank}
    return {
        f"ssm.{key}": value for key, value in (keys | ({"group_count": groups} if groups else {})).items()
    }


def _of_experts(config: Any) -> dict[str, Any]:
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if not count:
        return {}
    keys = {"expert_count": count, "expert_used_count": config.num_experts_per_tok}
    for attribute, key in {
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "num_dense_layers": "leading_dense_block_count",
    }.items():
        if (value := getattr(config, attribute, None)) is not None:
            keys[key] = value
    return keys


def _of_family(config: Any, arch: str) -> dict[str, Any]:
    if arch == "granitehybrid":
        return {
            "attention.scale": config.attention_multiplier,
            "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier,
            "logit_scale": config.logits_scaling,
            "expert_shared_feed_forward_length": config.shared_intermediate_size,
            "rope.scaling.finetuned": False,
        }
    if arch in _DELTA:
        rotated = config.head_dim * config.rope_parameters["partial_rotary_factor"]
        keys = {"rope.dimension_count": int(rotated), "full_attention_interval": 4}
        return keys if arch == "qwen3next" else {**keys, "rope.dimension_sections": [2, 1, 1, 0]}
    return {"ssm.dt_b_c_rms": False} if arch == "mamba" else {}


def hybrid_tensors(model: PreTrainedModel, arch: str) -> Tensors:
    """Tensors under the names in the file, in the converter's layout."""
    config: Any = model.config
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    known = gguf.get_tensor_name_map(number, len(model.base_model.layers))
    found: Tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for key, data in _of_several(name, tensor.float().numpy(), config, arch):
            place = key.replace(".dt_bias", ".dt_proj.bias").replace(".expert_bias", ".expert_bias.bias")
            if arch == "nemotron_h" and ".mixer." in place:
                place = place.replace("model.", "backbone.")
            mapped = key if key.startswith("blk.") else known.get_name(place, (".weight", ".bias"))
            assert mapped, name
            found[mapped] = _laid_out(name, data, config, arch)
    return found


def _of_several(name: str, data: np.ndarray, config: Any, arch: str) -> list[tuple[str, np.ndarray]]:
    """Tensors of the file for one tensor of the model, by their names or by the model's."""
    layer = (re.findall(r"layers\.(\d+)", name) or [""])[0]

    def place(part: str) -> str:
        return f"blk.{layer}.{part}.weight"

    if name.endswith("experts.gate_up_proj"):
        return [
            (place(f"ffn_{part}_exps"), half)
            for part, half in zip(("gate", "up"), np.split(data, 2, axis=1), strict=True)
        ]
    if name.endswith("experts.down_proj"):
        return [(place("ffn_down_exps"), data)]
    if name.endswith("router.weight"):
        return [(place("ffn_gate_inp"), data)]
    if ".shared_mlp." in name:
        end = "_shexp" if config.num_local_experts else ""
        if "output_linear" in name:
            return [(place(f"ffn_down{end}"), data)]
        gate, up = np.split(data, 2)
        return [(place(f"ffn_gate{end}"), gate), (place(f"ffn_up{end}"), up)]
    if name.endswith("in_proj_qkvz.weight"):
        keys, size = config.linear_num_key_heads, config.linear_key_head_dim
        values = config.linear_num_value_heads // keys * config.linear_value_head_dim
        heads = data.reshape(keys, -1, data.shape[-1])
        parts = np.split(heads, np.cumsum([size, size, values]), axis=1)
        q, k, v, z = (part.reshape(-1, data.shape[-1]) for part in parts)
        return [(place("attn_qkv"), np.concatenate([q, k, v])), (place("attn_gate"), z)]
    return [(name, data)]


def _laid_out(name: str, data: np.ndarray, config: Any, arch: str) -> np.ndarray:
    if "conv1d.weight" in name or "conv.conv.weight" in name:
        data = data[:, 0]
    if arch in ("qwen35", "qwen35moe") and ".linear_attn." in name:
        data = _tiled(name, data, config)
    if name.endswith(".A_log"):
        data = -np.exp(data)
    if arch in _DELTA and name.endswith("norm.weight") and "linear_attn" not in name:
        data = data + 1
    if arch in ("granitehybrid", "nemotron_h") and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        data = data.reshape(heads, 2, -1, data.shape[-1]).swapaxes(1, 2).reshape(data.shape)
    if arch not in ("jamba", "mamba", *_DELTA) and name.endswith((".A_log", ".D")):
        data = data.reshape(-1, 1)
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        data = data.reshape(2, -1)
    if name.endswith("shared_expert_gate.weight"):
        data = data[0]
    return data


def _tiled(name: str, data: np.ndarray, config: Any) -> np.ndarray:
    """Order value heads by key head: the first of each key head, then the second of each, and so on."""
    keys, size = config.linear_num_key_heads, config.linear_value_head_dim

    def turned(part: np.ndarray, size: int) -> np.ndarray:
        heads = part.reshape(keys, -1, size, *part.shape[1:])
        return heads.swapaxes(0, 1).reshape(part.shape)

    if name.endswith(("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight")):
        return turned(data, 1)
    if name.endswith("out_proj.weight"):
        return turned(data.T, size).T
    if name.endswith("in_proj_z.weight"):
        return turned(data, size)
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        before = 2 * keys * config.linear_key_head_dim
        return np.concatenate([data[:before], turned(data[before:], size)])
    return data


def module_tensors(layers: int, one: PreTrainedModel, arch: str) -> tuple[Tensors, Tensors]:
    """Return an MTP module after `layers` layers: as in the GGUF file, and as in safetensors.

    one: a model with a single full-attention layer, which becomes the module's layer.
    """
    size = one.config.hidden_size
    random = np.random.default_rng(5)
    parts = {
        name: random.integers(-64, 64, shape).astype(np.float32) / 256
        for name, shape in (
            ("eh_proj", (size, 2 * size)),
            ("enorm", (size,)),
            ("hnorm", (size,)),
            ("shared_head_norm", (size,)),
        )
    }
    file = {f"blk.{layers}.nextn.{name}.weight": data + (data.ndim == 1) for name, data in parts.items()} | {
        name.replace("blk.0.", f"blk.{layers}."): data
        for name, data in hybrid_tensors(one, arch).items()
        if name.startswith("blk.0.")
    }
    theirs = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    stored = {f"mtp.{name}.weight": data for name, data in zip(theirs, parts.values(), strict=True)} | {
        name.replace("model.layers.0.", "mtp.layers.0."): tensor.numpy()
        for name, tensor in one.state_dict().items()
        if name.startswith("model.layers.0.")
    }
    return file, stored


def with_mtp(arch: str) -> dict[str, Any]:
    """Keys of a file with four layers and a module."""
    return {f"{arch}.block_count": 5, f"{arch}.nextn_predict_layers": 1}
