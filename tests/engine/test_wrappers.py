"""Language models inside models that see: the same tokens as transformers, whatever is guessed."""

from pathlib import Path

import pytest

from offspec import SamplingParams
from tests.support.products import some
from tests.support.tiny_models import reference, tiny_engine, write_config, write_model
from tests.support.wrappers import plain_prompt, small_whole

GREEDY = SamplingParams(max_tokens=18, ignore_eos=True)
# Windows and shared embeddings; positions in three sections, interleaved or not; experts; a closed outside.
FAMILIES = (
    "aya_vision", "deepseek_vl", "gemma3", "gemma4", "glm4v", "glm4v_moe", "idefics3", "internvl", "kimi_k25",
    "llava", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "voxtral",
)  # fmt: skip


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("hostile") / "model", "llama", seed=99, vocab_size=128)


@pytest.mark.parametrize("family", some(FAMILIES, "qwen2_5_vl"))
def test_tokens_do_not_depend_on_the_guesses(family: str, hostile: Path, tmp_path: Path) -> None:
    config = small_whole(family)
    model, prompt = write_config(tmp_path, config), plain_prompt(config)
    expected = reference(model, prompt, GREEDY.max_tokens)
    assert len(set(expected)) > 4, "the test model says too little to tell right from wrong"
    for draft, budget in ((hostile, 1), (hostile, 7), (model, 64)):
        with tiny_engine(model, draft, budget=budget) as engine:
            result = engine.generate(prompt, GREEDY)
            assert list(result.token_ids) == expected, (draft, budget)
    assert result.tokens_per_pass > 2, "a draft that knows the target's mind is believed"
