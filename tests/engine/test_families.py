"""All supported families emit the same tokens as transformers, with any draft."""

from pathlib import Path

import pytest
import torch

from offspec import UnsupportedModelError
from offspec.model import runner
from offspec.model.probe.build import build_skeleton
from offspec_planners.placement import Placement, Tier
from tests.support.answers import PROMPT, TargetAndDrafts, generate_tokens, sampling
from tests.support.exhaustive import sampled_params
from tests.support.tiny_models import FAMILIES, reference, tiny_engine, write_model

GREEDY = sampling(0.0, 18)
FILTERED = sampling(0.6, 18, top_k=40, top_p=0.95, repetition_penalty=1.2)
HOT = sampling(1.0, 18, min_p=0.01, presence_penalty=0.5, frequency_penalty=0.3)

# Windows and soft caps; old position embeddings.
USUAL = ("gemma2", "gpt2")
# Features that these lack: sinks, experts, latents, keys of other layers, parallel blocks, scales, biases.
MORE = (
    "cohere2",
    "deepseek_v3",
    "gemma4_text",
    "glm4",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "opt",
    "phi",
    "smollm3",
)


@pytest.mark.usefixtures("drafters_stay")
@pytest.mark.parametrize(
    "family", sampled_params(sorted(FAMILIES), *USUAL, rare=lambda family: family not in MORE)
)
def test_tokens_do_not_depend_on_the_guesses(
    family: str, trio: TargetAndDrafts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks and a streamed output head, with the soft caps, scales and biases of each family."""
    model = write_model(tmp_path / "model", family)
    every = generate_tokens(model, GREEDY, FILTERED, HOT)
    greedy, filtered, hot = every
    assert list(greedy) == reference(model, PROMPT, 18)
    assert len(set(greedy)) > 4 and filtered != hot, "the test model emits too few tokens to detect errors"
    with tiny_engine(model, model, budget=128) as engine:
        results = [engine.generate(PROMPT, params) for params in (GREEDY, FILTERED, HOT)]
    assert [result.token_ids for result in results] == every
    assert all(result.tokens_per_pass > 2 for result in results), "an accurate draft is accepted"
    assert generate_tokens(model, FILTERED, draft="auto") == [filtered]
    assert generate_tokens(model, HOT, draft=model, verify="plain") == [hot]
    assert generate_tokens(model, GREEDY, HOT, draft=trio.hostile, budget=7) == [greedy, hot]
    monkeypatch.setattr(runner, "CHUNK", 4)
    placement = Placement((Tier.DISK, Tier.HOST, Tier.DEVICE), 2, 2, Tier.DISK)
    assert generate_tokens(model, GREEDY, draft=model, placement=placement) == [greedy]


def test_there_are_at_least_25_families() -> None:
    assert len(FAMILIES) >= 25


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("recurrent_gemma", "different logits"),
        ("t5", "encoder-decoder"),
        ("rwkv", "no small test model"),
        ("bert", "bert"),
    ],
)
def test_other_families_are_refused_by_name(family: str, reason: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=family) as caught:
        build_skeleton(tmp_path, torch.float32)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
