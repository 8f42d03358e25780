"""Small random MoE models, and placements that load experts on demand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from offspec_planners.placement import Placement
from tests.support.tiny_models import FAMILIES, HYBRIDS, write_config, write_hybrid, write_model

# Families missing in `tiny_models`, and settings that their defaults lack.
_MORE: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 6},
    "ernie4_5_moe": {},
    "glm4_moe": {"head_dim": 128},
    "granitemoe": {},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": [2] * 32},
    "minimax_m2": {},
    "olmoe": {},
}
_SMALL = (
    *("mixtral", "phimoe", "qwen2_moe", "qwen3_moe", "deepseek_v3", "mimo_v2_flash", "gpt_oss"),
    *("qwen3_next", "qwen3_5_moe_text", "lfm2_moe", "kimi_linear", "nemotron_h"),
)
EXPERT_FAMILIES = sorted({*_SMALL, *_MORE})


def write_experts(folder: Path, family: str, **overrides: Any) -> Path:
    """Write a small random model of one of EXPERT_FAMILIES, or with overrides one of `write_model`."""
    from transformers import CONFIG_MAPPING

    from offspec.model.probe.small_config import small_config

    if family in HYBRIDS:
        return write_hybrid(folder, family)
    if family in FAMILIES:
        return write_model(folder, family, **overrides)
    given = {**_MORE[family], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return write_config(folder, small_config(CONFIG_MAPPING[family](**given)))


def on_demand_placement(layers: int, slots: int, behind: int = 0) -> Placement:
    """Return a placement with `slots` expert slots and the rest in memory. behind: slots in RAM."""
    placed = Placement.in_memory(layers, range(layers), 0)
    return replace(placed, expert_slots=slots, host_expert_slots=behind)
