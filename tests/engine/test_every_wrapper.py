"""Every model of transformers that sees or hears, made small: its text is what transformers says."""

from pathlib import Path

import pytest

from tests.support.beside_generate import NOT_SAID, compare
from tests.support.wrappers import plain_prompt, small_whole

# A classifier, which transformers itself cannot load again as what it says it is; and a model whose smallest
# configuration here would take more memory than there is.
LEFT_OUT = ("shieldgemma2", "inkling_mm_model")


def compare_wrapper(family: str, folder: Path) -> str:
    """As `compare` says it."""
    try:
        config = small_whole(family)
    except Exception as error:  # whatever a family's own checks say
        return f"no configuration: {type(error).__name__} {error}"
    return compare(config, plain_prompt(config), folder)


@pytest.mark.slow
def test_every_wrapper(tmp_path: Path) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    families = [name for name in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES if name not in LEFT_OUT]
    found = {family: compare_wrapper(family, tmp_path / family) for family in families}
    assert not {family: said for family, said in found.items() if not said.startswith(("same", *NOT_SAID))}
    assert sum(said == "same" for said in found.values()) > 60
