"""Language models inside multimodal models emit the same tokens as transformers, with any draft."""

from pathlib import Path

import pytest

from tests.support.answers import TargetAndDrafts, generate_tokens, sampling
from tests.support.compare_generate import NOT_SAID, compare
from tests.support.exhaustive import sampled_params
from tests.support.tiny_models import reference, write_config
from tests.support.wrappers import plain_prompt, small_whole

# Positions in three sections; windows and shared embeddings; experts; a closed outside.
FAMILIES = ("qwen2_5_vl", "gemma4", "glm4v_moe", "kimi_k25", "llava", "qwen3_vl", "voxtral")
# A classifier, which transformers itself cannot load again as what it says it is; and a model whose smallest
# configuration here would take more memory than there is.
LEFT_OUT = ("shieldgemma2", "inkling_mm_model")


@pytest.mark.parametrize("family", sampled_params(FAMILIES, "qwen2_5_vl"))
def test_tokens_do_not_depend_on_the_guesses(family: str, trio: TargetAndDrafts, tmp_path: Path) -> None:
    config, greedy = small_whole(family), sampling(0.0, 18)
    model, prompt = write_config(tmp_path, config), plain_prompt(config)
    expected = reference(model, prompt, 18)
    assert len(set(expected)) > 4, "the test model emits too few tokens to detect errors"
    for draft, budget in ((trio.hostile, 7), (model, 64)):
        assert generate_tokens(model, greedy, draft=draft, prompt=prompt, budget=budget) == [tuple(expected)]


@pytest.mark.slow
@pytest.mark.usefixtures("drafters_stay")
def test_every_wrapper(tmp_path: Path) -> None:
    """All multimodal models of transformers, made small."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    def compared(family: str) -> str:
        try:
            config = small_whole(family)
        except Exception as error:  # the exception type depends on the family's checks
            return f"no configuration: {type(error).__name__} {error}"
        return compare(config, plain_prompt(config), tmp_path / family)

    families = [name for name in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES if name not in LEFT_OUT]
    found = {family: compared(family) for family in families}
    assert not {family: said for family, said in found.items() if not said.startswith(("same", *NOT_SAID))}
    assert sum(said == "same" for said in found.values()) > 60
