"""Trials of architectures: what they accept, refuse and measure, and that results are cached."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec import UnsupportedModelError
from offspec.core.cache_dir import cache_root
from offspec.model import attention
from offspec.model.attention import TreeContext
from offspec.model.probe import build
from offspec.model.probe.build import build_skeleton
from offspec.model.probe.cache_rows import measure_rows
from offspec.model.probe.compare import TrialResult, run_trial
from offspec.model.probe.small_config import small_config
from offspec.model.skeleton import skeleton_of
from offspec_kernels.tree_attention import tree_attention
from tests.support.tiny_models import load_all, open_model, write_model
from tests.support.versions import needs_transformers

CPU = torch.device("cpu")
PROMPT = [5, 9, 17, 33, 64, 20, 21, 22, 9]


def configured(family: str, **changed: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **changed)


def written(folder: Path, family: str, **changed: Any) -> Path:
    configured(family, **changed).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["deepseek_v3", "mimo_v2_flash", "gemma3n_text"])
def test_measured_rows_match_a_real_cache(family: str, tmp_path: Path) -> None:
    model = open_model(write_model(tmp_path, family))
    load_all(model, 16)
    with torch.no_grad():
        model.tree_model.hidden(torch.tensor(PROMPT), TreeContext.chain(len(PROMPT), CPU))
    stored = [
        sum(store[0, :, 0].numel() for store in (row.keys, row.values) if store is not None)
        for row in model.tree_model.cache.rows
    ]
    assert model.tree_model.cache.row_sizes == tuple(stored)
    assert list(model.skeleton.rows.kept) == stored
    assert model.cache_bytes(10) == 10 * 4 * sum(stored)
    model.close()


@pytest.mark.parametrize(
    ("family", "kept", "expanded"),
    [
        ("llama", {2 * 32 * 128}, 0),
        (
            "deepseek_v3",
            {512 + 64},
            128 * (128 + 64) + 128 * (128 + 128),
        ),  # keys, and what values are part of
        ("mimo_v2_flash", {4 * (192 + 128), 8 * (192 + 128)}, 0),
        ("gemma3n_text", {2 * 2 * 256, 0}, 0),
        (
            "gemma3_text",
            {2 * 4 * 256},
            0,
        ),  # window layers keep all rows: a rewind may go back beyond the window
    ],
)
def test_rows_of_real_sizes(family: str, kept: set[int], expanded: int) -> None:
    skeleton = skeleton_of(configured(family), torch.bfloat16)
    rows = measure_rows(skeleton)
    assert set(rows.kept) == kept and len(rows.kept) == len(skeleton.layers)
    assert rows.expanded == expanded
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())
    assert not any(buffer.is_meta for buffer in skeleton.model.buffers())


def test_memory_for_expanded_latents_and_a_chunk_is_reserved(tmp_path: Path) -> None:
    model = open_model(write_model(tmp_path, "deepseek_v3"))
    rows = model.skeleton.rows
    assert rows.expanded == 4 * (8 + 4) + 4 * (8 + 6)
    whole = model.scratch_bytes(8, 1000, 8)
    model.skeleton = replace(model.skeleton, rows=replace(rows, expanded=0))
    assert whole == model.scratch_bytes(8, 1000, 8) + 1000 * rows.expanded * 4
    model.close()
    model = open_model(write_model(tmp_path / "llama"))
    rows = model.skeleton.rows
    assert rows.head_size == 8
    sizes = [model.activation_bytes(2048, 2048, chunk) for chunk in (256, 1024, 2048)]
    assert sizes == sorted(set(sizes))
    model.skeleton = replace(model.skeleton, rows=replace(rows, head_size=256))
    assert model.activation_bytes(2048, 2048, 256) > sizes[0]
    model.close()


@pytest.mark.parametrize(
    ("family", "changed", "reason"),
    [
        ("doge", {}, "masks of its own"),
        ("nemotron", {"num_key_value_heads": 8}, "does not hand its keywords down"),
        pytest.param("moshi", {}, "different logits from their paths", marks=needs_transformers("5.23")),
    ],
)
def test_the_reason_is_what_failed_in_the_trial(
    family: str, changed: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"^{family} cannot be run .*{reason}") as caught:
        build_skeleton(written(tmp_path, family, **changed), torch.bfloat16)
    assert "\n" not in str(caught.value)


_E2B: dict[str, Any] = {  # layers of two head sizes; of both kinds some share keys and are wider
    "num_hidden_layers": 35,
    "num_kv_shared_layers": 20,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    "use_double_wide_mlp": True,
    "num_key_value_heads": 1,
}
_26B: dict[str, Any] = {  # experts, and keys that are values in layers with other key heads
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
    "num_key_value_heads": 8,
    "hidden_size_per_layer_input": 0,
}


@pytest.mark.parametrize("changed", [_E2B, _26B], ids=["E2B", "26B"])
def test_different_layers_are_tested_together(changed: dict[str, Any]) -> None:
    config = small_config(configured("gemma4_text", **changed))
    assert run_trial(config) == TrialResult(trees=True, chains=True, reason="", merges=True)


def test_a_wrong_mask_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single node that sees its sibling is enough."""
    config = small_config(configured("qwen3"))
    assert run_trial(config) == TrialResult(trees=True, chains=True, reason="", merges=True)
    seen = TreeContext.tree_mask

    def sees_a_sibling(context: TreeContext, start: int, end: int) -> Any:
        if len(context.ancestors) > 2:
            context.ancestors[2, 1] = True
        return seen(context, start, end)

    monkeypatch.setattr(TreeContext, "tree_mask", sees_a_sibling)
    found = run_trial(config)
    assert not found.trees and "different logits" in found.reason


def test_an_ignored_window_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(configured("mistral"))
    assert run_trial(config).trees

    def without(*args: Any, **kwargs: Any) -> Any:
        return tree_attention(*args, **kwargs | {"window": None})

    monkeypatch.setattr(attention, "tree_attention", without)
    assert not run_trial(config).chains


def test_an_architecture_is_probed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path / "cache"))
    tried = list[object]()

    def trial(config: Any) -> TrialResult:
        tried.append(config)
        return run_trial(config)

    monkeypatch.setattr(build, "run_trial", trial)
    good, bad = written(tmp_path / "good", "qwen3"), written(tmp_path / "bad", "doge")
    for _ in range(2):
        assert build_skeleton(good, torch.float32).rows == build_skeleton(good, torch.bfloat16).rows
        with pytest.raises(UnsupportedModelError, match="masks of its own"):
            build_skeleton(bad, torch.float32)
    assert len(tried) == 2
    for text in ("", "{}", json.dumps({"refusal": 3})):
        for file in cache_root().glob("architectures/*.json"):
            file.write_text(text)
        assert build_skeleton(good, torch.float32).rows.kept
    assert len(tried) == 5, "a damaged record counts as missing"
    build_skeleton(written(tmp_path / "other", "qwen3", head_dim=64), torch.float32)
    assert len(tried) == 6, "another configuration needs its own trial"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path / "file" / "cache"))
    assert build_skeleton(good, torch.float32).rows.kept and len(tried) == 7, "nothing can be cached"


def test_wrong_positions_are_detected_despite_scaled_embeddings() -> None:
    """PLBart counts cache rows, and scales the token embeddings but not those of positions."""
    config = small_config(configured("plbart", is_encoder_decoder=False))
    assert "different logits" in run_trial(config).reason
