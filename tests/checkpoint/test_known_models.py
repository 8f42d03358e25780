"""Configurations of well-known models: complete, and with as many parameters as their makers publish."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from offspec.checkpoint.known_models import known_config, known_models

# Parameters, each tensor once, as the hub counts them (tied heads are not separate tensors).
PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-chat-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Meta-Llama-3-70B-Instruct": 70_553_706_496,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen2.5-72B-Instruct": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B-Base": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-Instruct-v0.2": 7_241_732_096,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "mistralai/Mistral-Large-Instruct-2407": 122_610_069_504,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 46_702_792_704,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
}
# Published with fewer digits, or including parts outside of the language model.
ABOUT = {
    "openai/gpt-oss-20b": (20.91e9, 5e-4),
    "openai/gpt-oss-120b": (116.83e9, 5e-4),
    "Qwen/Qwen3.6-35B-A3B": (35e9, 0.02),
    "zai-org/GLM-4.5": (355e9, 0.01),
    "zai-org/GLM-4.5-Air": (106e9, 0.01),
    "Qwen/Qwen3.8-27B": (27e9, 0.01),
    "google/gemma-4-31B-it": (30.7e9, 5e-4),
    "google/gemma-4-26B-A4B-it": (25.2e9, 2e-3),
    "mistralai/Mistral-Medium-3.5-128B": (128e9, 0.03),  # includes a vision tower
    "zai-org/GLM-5": (744e9, 1e-3),
    "deepseek-ai/DeepSeek-V4-Flash": (284.4e9, 1e-3),
}


def parameters(hub_id: str, **changes: int) -> int:
    found = known_config(hub_id)
    assert found is not None
    config = AutoConfig.for_model(found.pop("model_type"), **(found | changes))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("hub_id", PUBLISHED)
def test_exact_parameter_counts(hub_id: str) -> None:
    """All layers are alike, so a layer is the difference between models of two layers and of one."""
    one, two = (parameters(hub_id, num_hidden_layers=layers) for layers in (1, 2))
    layers = (known_config(hub_id) or {})["num_hidden_layers"]
    assert one + (layers - 1) * (two - one) == PUBLISHED[hub_id]


@pytest.mark.parametrize("hub_id", ABOUT)
def test_approximate_parameter_counts(hub_id: str) -> None:
    published, within = ABOUT[hub_id]
    assert parameters(hub_id) == pytest.approx(published, rel=within)


def test_every_known_model_has_a_counted_configuration() -> None:
    counted = [known_config(hub_id) for hub_id in (*PUBLISHED, *ABOUT)]
    assert all(known_config(hub_id) in counted for hub_id in known_models())


def test_case_is_ignored_and_unknown_models_give_none() -> None:
    wanted = known_config("Qwen/Qwen3-8B")
    assert wanted is not None and wanted["hidden_size"] == 4096
    for name in ("QWEN/qwen3-8b", "hf.co/Qwen/Qwen3-8B", "https://huggingface.co/Qwen/Qwen3-8B/tree/main"):
        assert known_config(name) == wanted
    for other in ("Qwen/Qwen3-8B:Q4_K_M", "Qwen/Qwen3-8B@v2", "meta-llama/Llama-9-1T"):
        assert known_config(other) is None  # files other than the one with this configuration
    wanted["hidden_size"] = 1
    assert known_config("Qwen/Qwen3-8B") != wanted, "what a caller changes is changed for him alone"


def test_long_context_scaling_follows_the_makers() -> None:
    found = known_config("meta-llama/Llama-3.1-70B-Instruct")
    assert found is not None
    assert found["rope_scaling"]["factor"] == 8.0
    assert found["max_position_embeddings"] == 131_072
