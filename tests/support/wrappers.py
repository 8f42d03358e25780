"""Small multimodal models, whose language models are to run alone."""

import warnings
from typing import Any

from offspec.model.probe.small_config import VOCABULARY, _shrunk, special_tokens

MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24]}
HALF_MROPE = MROPE | {"mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
# Settings for families whose defaults do not make a model; those of the text apart where a family needs it.
NEEDED: dict[str, dict[str, Any]] = {
    "chameleon": {"vocabulary_map": {"<image>": 3}},
    "cohere_compass": {
        "text_config": {"rope_parameters": {"full_attention": MROPE, "sliding_attention": MROPE}}
    },
    "cosmos3_edge": {"text_config": {"hidden_size": 2048}},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense"] + ["sparse"] * 11, "num_experts_per_tok": 2}
    },
    "emu3": {"vocabulary_map": {"<image>": 3, "<|extra_200|>": 4}},
    "glm46v": {"text_config": {"rope_parameters": HALF_MROPE}},
    "glm4v": {"text_config": {"rope_parameters": HALF_MROPE}},
    "glm4v_moe": {"text_config": {"rope_parameters": HALF_MROPE, "head_dim": 128, "n_routed_experts": 16}},
    "glm_ocr": {"text_config": {"rope_parameters": MROPE | {"mrope_section": [8, 12, 12]}, "head_dim": 64}},
    "glmga": {"text_config": {"rope_parameters": HALF_MROPE}},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "spatial_target_layers": []},
    "hunyuan_vl": {"text_config": {"head_dim": 128, "rope_parameters": MROPE | {"mrope_section": [16] * 4}}},
    "ovis2": {"hidden_size": 4096},
    "paddleocr_vl": {"text_config": {"rope_parameters": MROPE, "head_dim": 128}},
    "qwen2_5_omni": {"thinker_config": {"text_config": {"rope_parameters": MROPE}}},
    "qwen2_5_omni_thinker": {"text_config": {"rope_parameters": MROPE}, "vision_start_token_id": 5},
    "qwen2_5_vl": {"text_config": {"rope_parameters": MROPE}},
    "qwen2_vl": {"text_config": {"rope_parameters": MROPE}},
    "qwen3_omni_moe_thinker": {
        "text_config": {"num_experts": 16, "head_dim": 128, "num_attention_heads": 32},
        "vision_start_token_id": 5,
    },
    "step3p7": {"text_config": {"sliding_window": 512}},
}
# Sizes on which the parts of a small model must agree.
AGREED: dict[str, dict[str, Any]] = {
    "dots3_note": {},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 4}},
    "glm5_next": {},
    "granite_docling": {"vision_config": {"out_hidden_size": 64}},
    "inkling2": {"vision_config": {"text_hidden_size": 576}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [3, 2]}},
    "muse_spark": {"audio_config": {"out_hidden_size": 128}},
}


def small_whole(family: str) -> Any:
    """A small configuration of a whole family, with its image and audio encoders.

    Its head is its own: tied to a random embedding, many families only repeat their last token.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = CONFIG_MAPPING[family](**NEEDED.get(family, {}))
        layers = dict(config.get_text_config().attribute_map).get("num_hidden_layers", "num_hidden_layers")
        shrunk = _shrunk(config.to_dict(), layers, 2)
        for name, value in AGREED.get(family, {}).items():
            shrunk[name] = shrunk[name] | value if isinstance(value, dict) else value
        return type(config).from_dict(_untied(shrunk))


def _untied(given: dict[str, Any]) -> dict[str, Any]:
    """Copy with every head untied from its embedding."""
    found = {
        name: _untied(value) if isinstance(value, dict) and "model_type" in value else value
        for name, value in given.items()
    }
    return found | {"tie_word_embeddings": False}


def plain_prompt(config: Any) -> list[int]:
    """Tokens that stand for text only."""
    special = special_tokens(config.to_dict())
    return [token for token in range(VOCABULARY) if token not in special][7:90:5]
