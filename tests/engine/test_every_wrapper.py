"""Every model of transformers that sees or hears, made small: its text is what transformers says."""

from pathlib import Path

import pytest

from offspec import CheckpointError, SamplingParams, UnsupportedModelError
from tests.support.tiny_models import reference, tiny_engine, write_config
from tests.support.wrappers import plain_prompt, small_whole

TOKENS = 16
# A classifier, which transformers itself cannot load again as what it says it is; and a model whose smallest
# configuration here would take more memory than there is.
LEFT_OUT = ("shieldgemma2", "inkling_mm_model")


def compare(family: str, folder: Path) -> str:
    """ "same" where a tree says what transformers says, else why it is refused, or what it said."""
    try:
        config = small_whole(family)
    except Exception as error:  # whatever a family's own checks say
        return f"no configuration: {type(error).__name__} {error}"
    try:
        write_config(folder, config)
    except Exception as error:
        return f"no model: {type(error).__name__} {error}"
    prompt = plain_prompt(config)
    try:
        with tiny_engine(folder, folder, budget=24, context=64) as engine:
            result = engine.generate(prompt, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    except (UnsupportedModelError, CheckpointError) as error:
        return f"refused: {error}"
    try:
        expected = reference(folder, prompt, TOKENS)
    except Exception as error:  # of a family that says nothing without a picture
        return f"no reference: {type(error).__name__} {error}"
    if list(result.token_ids) != expected:
        return f"{list(result.token_ids)} instead of {expected}"
    return "same" if result.tokens_per_pass > 1 else f"{result.tokens_per_pass} tokens a pass"


@pytest.mark.slow
def test_every_wrapper(tmp_path: Path) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    families = [name for name in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES if name not in LEFT_OUT]
    found = {family: compare(family, tmp_path / family) for family in families}
    untold = ("same", "refused: ", "no model: ", "no configuration: ", "no reference: ")
    assert not {family: said for family, said in found.items() if not said.startswith(untold)}
    assert sum(said == "same" for said in found.values()) > 60
