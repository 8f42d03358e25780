"""Small models of all causal LM families of transformers: tokens are equal for all that the probe admits."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from offspec.model.probe.small_config import VOCABULARY, small_config, special_tokens
from tests.support.compare_generate import NOT_SAID, compare
from tests.support.exhaustive import sampled_params
from tests.support.versions import has_transformers

pytestmark = pytest.mark.usefixtures("drafters_stay")
# Families whose own defaults do not make a model, and what they need.
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "falcon": {"alibi": True, "new_decoder_architecture": False},
    "dots1": {"n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128, "num_key_value_heads": 8},
    "nemotron": {"num_key_value_heads": 8},
}

HEADS = {"codegen": 4}  # which its layout of queries, keys and values takes for granted


def small(family: str) -> Any:
    """Return a small configuration of a family; None if its defaults do not make a model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return small_config(CONFIG_MAPPING[family](**NEEDED.get(family, {})), HEADS.get(family, 2))
    except Exception:  # the exception type depends on the family's checks
        return None


def compare_family(family: str, folder: Path) -> str:
    """Return the result of `compare` for a family."""
    config = small(family)
    if config is None:
        return "no configuration"
    plain = [token for token in range(VOCABULARY) if token not in special_tokens(config.to_dict())]
    return compare(config, plain[7:90:5], folder)


# A latent that is expanded, layers of two widths, layers without keys of their own, scales by position; and
# chunks of positions, with scales by position that transformers takes from the length of its cache. Keys that
# an index selects, by layer or for several. Attention of a family's own, plain or with a bias by position.
ADMITTED = (
    *("deepseek_v3", "mimo_v2_flash", "gemma3n_text", "gemma4_text", "beam", "llama4_text"),
    *("deepseek_v32", "glm_moe_dsa"),
    *("gptj", "bloom", "mpt", "falcon"),
)


@pytest.mark.parametrize("family", sampled_params(ADMITTED, "gemma4_text", "llama4_text", "deepseek_v32"))
def test_admitted_families_emit_the_same_tokens(family: str, tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING

    if family not in CONFIG_MAPPING and not has_transformers("5.23"):
        pytest.skip(f"this transformers has no {family}")
    assert compare_family(family, tmp_path) == "same"


@pytest.mark.slow
def test_every_family(tmp_path: Path) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = {
        family: compare_family(family, tmp_path / family) for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    }
    wrong = {family: said for family, said in found.items() if not said.startswith(("same", *NOT_SAID))}
    assert not wrong
    assert sum(said == "same" for said in found.values()) > 95
