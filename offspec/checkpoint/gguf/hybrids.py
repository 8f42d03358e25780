"""Configurations of architectures with recurrent layers, from the keys and the tensors of a file.

transformers reads few of these from GGUF files. HYBRIDS has an entry for each. Tensors show which layers are
recurrent; sizes are read from the keys that llama.cpp's converter writes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from offspec.checkpoint.gguf.architecture import GgufArchitecture
from offspec.checkpoint.gguf.header import GgufHeader
from offspec.checkpoint.ranges import INSTEAD, damaged
from offspec.core.errors import UnsupportedModelError

_STATE, _FULL = "linear_attention", "full_attention"
_CONV = "ssm_conv1d.weight"  # every recurrent layer has it, except LFM2's


class _File:
    """Access to keys without the architecture's prefix, and to tensors by their name within a layer."""

    def __init__(self, header: GgufHeader, architecture: GgufArchitecture) -> None:
        self.header, self.arch = header, architecture.arch
        self.layers = self.count("block_count") - architecture.extra_layers(header)

    def key(self, name: str) -> Any:
        """Return a key's value; of a list with one number per layer, the largest."""
        value = self.header.metadata.get(f"{self.arch}.{name}")
        return max(value) if isinstance(value, list) and set(map(type, value)) == {int} else value

    def count(self, name: str, default: int = 0) -> int:
        """Return a number above 0; of a list with one per layer, the largest. HeaderError if absent."""
        value = self.key(name)
        value = default or None if value is None else value
        if type(value) is not int or not 0 < value < 2**31:
            damaged(self.header.path, f"invalid {self.arch}.{name}: {str(value)[:40]!r}")
        return value

    def ratio(self, name: str, default: float | None = None) -> float:
        value = self.key(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            damaged(self.header.path, f"invalid {self.arch}.{name}: {str(value)[:40]!r}")
        return float(value)

    def divided(self, name: str, by: str) -> int:
        """Return one key's number divided by another's. Raises HeaderError if it is not a multiple."""
        whole, parts = self.count(name), self.count(by)
        if whole % parts:
            damaged(self.header.path, f"{self.arch}.{name} of {whole} is not a multiple of {by} of {parts}")
        return whole // parts

    def has_tensor(self, tensor: str) -> list[bool]:
        """Return for each layer whether it has this tensor."""
        return [f"blk.{layer}.{tensor}" in self.header.tensors for layer in range(self.layers)]

    def common(self, eps: str = "rms_norm_eps") -> dict[str, Any]:
        return {
            "hidden_size": self.count("embedding_length"),
            "num_hidden_layers": self.layers,
            "tie_word_embeddings": "output.weight" not in self.header.tensors,
            eps: self.ratio("attention.layer_norm_rms_epsilon"),
        }

    def attention(self) -> dict[str, Any]:
        return {
            "max_position_embeddings": self.count("context_length"),
            "num_attention_heads": self.count("attention.head_count"),
            "num_key_value_heads": self.count("attention.head_count_kv"),
        }


def _qwen(file: _File) -> dict[str, Any]:
    heads, values = file.count("ssm.group_count"), file.count("ssm.time_step_rank")
    if values % heads:
        damaged(file.header.path, f"{values} value heads cannot share {heads} key heads")
    size = file.count("attention.key_length")
    sections = file.header.metadata.get(f"{file.arch}.rope.dimension_sections")
    rope = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": file.count("rope.dimension_count", size) / size,
    }
    if isinstance(sections, list) and file.arch != "qwen3next":
        rope |= {"mrope_section": [section for section in sections if section], "mrope_interleaved": True}
    return {
        **file.common(),
        **file.attention(),
        "head_dim": size,
        "layer_types": [_STATE if found else _FULL for found in file.has_tensor(_CONV)],
        "linear_conv_kernel_dim": file.count("ssm.conv_kernel"),
        "linear_key_head_dim": file.count("ssm.state_size"),
        "linear_num_key_heads": heads,
        "linear_num_value_heads": values,
        "linear_value_head_dim": file.divided("ssm.inner_size", "ssm.time_step_rank"),
        "rope_parameters": rope,
    }


def _qwen_dense(file: _File) -> dict[str, Any]:
    return {**_qwen(file), "intermediate_size": file.count("feed_forward_length")}


def _qwen_experts(file: _File) -> dict[str, Any]:
    experts = {
        "num_experts": file.count("expert_count"),
        "num_experts_per_tok": file.count("expert_used_count"),
        "moe_intermediate_size": file.count("expert_feed_forward_length"),
        "shared_expert_intermediate_size": file.count("expert_shared_feed_forward_length"),
    }
    if file.key("feed_forward_length"):
        experts["intermediate_size"] = file.count("feed_forward_length")
    return {**_qwen(file), **experts}


def _lfm2(file: _File) -> dict[str, Any]:
    convs = file.has_tensor("shortconv.conv.weight")
    return {
        **file.common("norm_eps"),
        **file.attention(),
        "intermediate_size": file.count("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,  # intermediate_size is already the adjusted size
        "layer_types": ["conv" if found else _FULL for found in convs],
        "conv_L_cache": file.count("shortconv.l_cache"),
        "conv_bias": any(file.has_tensor("shortconv.in_proj.bias")),
    }


def _lfm2_experts(file: _File) -> dict[str, Any]:
    fields = _lfm2(file)
    del fields["block_auto_adjust_ff_dim"]
    return {
        **fields,
        "num_dense_layers": file.has_tensor("ffn_gate_inp.weight").count(False),
        "use_expert_bias": any(file.has_tensor("exp_probs_b.bias")),
        "moe_intermediate_size": file.count("expert_feed_forward_length"),
        "num_experts": file.count("expert_count"),
        "num_experts_per_tok": file.count("expert_used_count"),
    }


def _mamba2_fields(file: _File) -> dict[str, Any]:
    return {
        "mamba_n_heads": file.count("ssm.time_step_rank"),
        "mamba_d_head": file.divided("ssm.inner_size", "ssm.time_step_rank"),
        "mamba_d_state": file.count("ssm.state_size"),
        "mamba_n_groups": file.count("ssm.group_count"),
        "mamba_d_conv": file.count("ssm.conv_kernel"),
        "mamba_conv_bias": any(file.has_tensor("ssm_conv1d.bias")),
        "mamba_proj_bias": any(file.has_tensor("ssm_in.bias")),
    }


def _granite(file: _File) -> dict[str, Any]:
    if file.header.metadata.get(f"{file.arch}.rope.scaling.finetuned"):
        raise UnsupportedModelError(
            f"{file.header.path} holds a Bamba, whose GGUF architecture is also granitehybrid, and which "
            f"cannot be read from GGUF: {INSTEAD}"
        )
    experts = file.header.metadata.get(f"{file.arch}.expert_count") or 0
    inner = file.count("feed_forward_length")
    fields = {
        **file.common(),
        **file.attention(),
        **_mamba2_fields(file),
        "mamba_expand": file.divided("ssm.inner_size", "embedding_length"),
        "layer_types": [_STATE if found else _FULL for found in file.has_tensor(_CONV)],
        "intermediate_size": inner,
        "shared_intermediate_size": file.count("expert_shared_feed_forward_length", inner),
        "num_local_experts": experts,
        "attention_multiplier": file.ratio("attention.scale", 1.0),
        "embedding_multiplier": file.ratio("embedding_scale", 1.0),
        "residual_multiplier": file.ratio("residual_scale", 1.0),
        "logits_scaling": file.ratio("logit_scale", 1.0),
        "attention_bias": any(file.has_tensor("attn_q.bias")),
    }
    return {**fields, "num_experts_per_tok": file.count("expert_used_count")} if experts else fields


def _falcon_h1(file: _File) -> dict[str, Any]:
    """Falcon-H1's multipliers are already applied to the weights; those that are absent are 1."""
    return {
        **file.common(),
        **file.attention(),
        **_mamba2_fields(file),
        "head_dim": file.count("attention.key_length"),
        "intermediate_size": file.count("feed_forward_length"),
        "mamba_d_ssm": file.count("ssm.inner_size"),
        "mamba_rms_norm": any(file.has_tensor("ssm_norm.weight")),
        "mamba_norm_before_gate": False,
        "projectors_bias": any(file.has_tensor("ssm_out.bias")),
        "attention_bias": any(file.has_tensor("attn_q.bias")),
        "mlp_bias": any(file.has_tensor("ffn_up.bias")),
    }


def _nemotron(file: _File) -> dict[str, Any]:
    states, dense = file.has_tensor(_CONV), file.has_tensor("ffn_up.weight")
    fields = {
        **file.common("layer_norm_epsilon"),
        **file.attention(),
        "head_dim": file.count("attention.key_length"),
        "intermediate_size": file.count("feed_forward_length"),
        "layers_block_type": [
            _STATE if state else "mlp" if mlp else _FULL for state, mlp in zip(states, dense, strict=True)
        ],
        "mamba_num_heads": file.count("ssm.time_step_rank"),
        "mamba_head_dim": file.divided("ssm.inner_size", "ssm.time_step_rank"),
        "ssm_state_size": file.count("ssm.state_size"),
        "n_groups": file.count("ssm.group_count"),
        "conv_kernel": file.count("ssm.conv_kernel"),
        "use_conv_bias": any(file.has_tensor("ssm_conv1d.bias")),
        "mamba_proj_bias": any(file.has_tensor("ssm_in.bias")),
        "attention_bias": any(file.has_tensor("attn_q.bias")),
        "mlp_bias": any(file.has_tensor("ffn_up.bias")),
    }
    del fields["num_hidden_layers"]  # derived from the list of layer types
    return fields


def _mamba2(file: _File) -> dict[str, Any]:
    return {
        **file.common("layer_norm_epsilon"),
        "num_heads": file.count("ssm.time_step_rank"),
        "head_dim": file.divided("ssm.inner_size", "ssm.time_step_rank"),
        "expand": file.divided("ssm.inner_size", "embedding_length"),
        "state_size": file.count("ssm.state_size"),
        "n_groups": file.count("ssm.group_count"),
        "conv_kernel": file.count("ssm.conv_kernel"),
        "use_conv_bias": any(file.has_tensor("ssm_conv1d.bias")),
        "use_bias": any(file.has_tensor("ssm_in.bias")),
    }


def _mamba(file: _File) -> dict[str, Any]:
    if file.header.metadata.get(f"{file.arch}.ssm.dt_b_c_rms"):
        raise UnsupportedModelError(
            f"{file.header.path} holds a Falcon Mamba, whose GGUF architecture is also mamba, and which "
            f"cannot be read from GGUF: {INSTEAD}"
        )
    return {
        **file.common("layer_norm_epsilon"),
        "intermediate_size": file.count("ssm.inner_size"),
        "expand": file.divided("ssm.inner_size", "embedding_length"),
        "state_size": file.count("ssm.state_size"),
        "time_step_rank": file.count("ssm.time_step_rank"),
        "conv_kernel": file.count("ssm.conv_kernel"),
        "use_conv_bias": any(file.has_tensor("ssm_conv1d.bias")),
        "use_bias": any(file.has_tensor("ssm_in.bias")),
    }


def _jamba(file: _File) -> dict[str, Any]:
    attends, experts = file.has_tensor("attn_k.weight"), file.has_tensor("ffn_gate_inp.weight")
    looks, chooses = _period(file, attends, "attention"), _period(file, experts, "experts")
    return {
        **file.common(),
        **file.attention(),
        "intermediate_size": file.count("feed_forward_length"),
        "attn_layer_period": looks[0],
        "attn_layer_offset": looks[1],
        "expert_layer_period": chooses[0],
        "expert_layer_offset": chooses[1],
        "num_experts": file.count("expert_count", 1) if any(experts) else 1,
        "num_experts_per_tok": file.count("expert_used_count", 1),
        "mamba_d_state": file.count("ssm.state_size"),
        "mamba_d_conv": file.count("ssm.conv_kernel"),
        "mamba_dt_rank": file.count("ssm.time_step_rank"),
        "mamba_expand": file.divided("ssm.inner_size", "embedding_length"),
        "mamba_conv_bias": any(file.has_tensor("ssm_conv1d.bias")),
        "mamba_proj_bias": any(file.has_tensor("ssm_in.bias")),
    }


def _period(file: _File, found: list[bool], what: str) -> tuple[int, int]:
    """Return period and offset of some layers, the only layout that such a configuration can express."""
    at = [layer for layer, has in enumerate(found) if has] or [0]
    period = at[1] - at[0] if len(at) > 1 else max(len(found), at[0] + 1)
    if (any(found) and at != list(range(at[0], len(found), period))) or at[0] >= period:
        raise UnsupportedModelError(
            f"{file.header.path} has {what} in layers {at[:8]}, which are not evenly spaced: {INSTEAD}"
        )
    return period, at[0]


def _hybrid(arch: str, kind: str, fields: Callable[[_File], dict[str, Any]], **more: Any) -> GgufArchitecture:
    """Return a hybrid's entry. kind: transformers' model type; fields: makes its configuration fields."""

    def configure(header: GgufHeader, architecture: GgufArchitecture) -> Any:
        from transformers import AutoConfig

        return AutoConfig.for_model(kind, **fields(_File(header, architecture)))

    return GgufArchitecture(arch, configure, **more)


_gated_delta = partial(_hybrid, norms_plus_one=True, has_module=True)
HYBRIDS = (
    _hybrid("falcon-h1", "falcon_h1", _falcon_h1),
    _hybrid("granitehybrid", "granitemoehybrid", _granite, rope=None, permuted=True),
    _hybrid("jamba", "jamba", _jamba, rope=None),
    _hybrid("lfm2", "lfm2", _lfm2),
    _hybrid("lfm2moe", "lfm2_moe", _lfm2_experts),
    _hybrid("mamba", "mamba", _mamba, rope=None),
    _hybrid("mamba2", "mamba2", _mamba2, rope=None),
    _hybrid("nemotron_h", "nemotron_h", _nemotron, rope=None, permuted=True),
    _gated_delta("qwen35", "qwen3_5_text", _qwen_dense, tiled_heads=True),
    _gated_delta("qwen35moe", "qwen3_5_moe_text", _qwen_experts, tiled_heads=True),
    _gated_delta("qwen3next", "qwen3_next", _qwen_experts),
)
