"""What a GGUF file calls the tensors of a state dict, where the gguf package does not say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# A tensor's name behind its layer's number, and those that a file may have for it: one of them, or several
# that together make it.
_IN_LAYER = tuple(
    (re.compile(pattern), names)
    for pattern, names in (
        (
            r"(mlp|feed_forward|block_sparse_moe)\.experts\.gate_up_proj",
            ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_gate_up_exps.weight"),
        ),
        (r"(mlp|feed_forward|block_sparse_moe)\.experts\.down_proj", ("ffn_down_exps.weight",)),
        (r"mlp\.experts\.gate_up_proj_bias", ("ffn_gate_exps.bias", "ffn_up_exps.bias")),
        (r"mlp\.experts\.down_proj_bias", ("ffn_down_exps.bias",)),
        (r"block_sparse_moe\.router\.weight", ("ffn_gate_inp.weight",)),
        (r"feed_forward\.expert_bias", ("exp_probs_b.bias",)),
        (
            r"shared_mlp\.input_linear\.weight",
            ("ffn_gate.weight", "ffn_up.weight", "ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
        ),
        (r"shared_mlp\.output_linear\.weight", ("ffn_down.weight", "ffn_down_shexp.weight")),
        (
            r"linear_attn\.in_proj_qkvz\.weight",
            ("attn_gate.weight", "attn_qkv.weight", "ssm_in.weight"),
        ),
        (r"(linear_attn|mamba|mixer)\.dt_bias", ("ssm_dt.bias",)),
        (r"(linear_attn|mamba|mixer)\.A_log", ("ssm_a",)),
        (r"(mamba|mixer)\.D", ("ssm_d",)),
    )
)
_LAYER = re.compile(r"(?:model|backbone)\.layers\.(\d+)\.(.+)")
# Parts of a multi-token prediction module, which lies behind the last layer, by the names of safetensors.
MODULE = {
    "nextn.eh_proj.weight": "mtp.fc.weight",
    "nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "mtp.norm.weight",
}


def file_names(name: str, known: Any) -> list[str]:
    """The names that a file may have for a tensor of the state dict; none where it is not known.

    known: the gguf package's table for the architecture.
    """
    if in_layer := _LAYER.fullmatch(name):
        for pattern, names in _IN_LAYER:
            if pattern.fullmatch(in_layer[2]):
                return [f"blk.{in_layer[1]}.{each}" for each in names]
    for spelling in (name, re.sub(r"^model\.", "backbone.", name)):
        if found := known.get_name(spelling, try_suffixes=(".weight", ".bias")):
            return [found] if found.endswith((".weight", ".bias")) else [f"{found}.weight", found]
    return []


def module_names(
    names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], layers: int, size: int
) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """Names and shapes of a multi-token prediction module: what `names` and `shapes` are to the model's.

    Its layer is one of those that look back at all. layers: of the model; size: of a state.
    """
    attends = re.compile(r"blk\.(\d+)\.attn_k\.weight")
    like = next((match[1] for name in names if (match := attends.fullmatch(name))), None)
    of_file = {f"blk.{layers}.{theirs}": ours for theirs, ours in MODULE.items()}
    found: dict[str, tuple[int, ...]] = dict.fromkeys(MODULE.values(), (size,))
    found["mtp.fc.weight"] = (size, 2 * size)
    for theirs, ours in names.items():
        if like is not None and theirs.startswith(f"blk.{like}."):
            name = "mtp.layers.0." + ours.removeprefix(f"model.layers.{like}.")
            of_file[f"blk.{layers}." + theirs.removeprefix(f"blk.{like}.")] = name
            found[name] = shapes[ours]
    return of_file, found
