"""Every family that offspec promises: the same tokens as transformers, whatever is guessed."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from offspec import SamplingParams, UnsupportedModelError
from offspec.model import runner
from offspec.model.probe.build import build_skeleton
from offspec_planners.placement import Placement, Tier
from tests.support.products import some
from tests.support.tiny_models import FAMILIES, reference, tiny_engine, write_model

PROMPT = [5, 9, 17, 33, 64, 20, 21, 22, 9]
GREEDY = SamplingParams(max_tokens=18, ignore_eos=True)
SAMPLED = (
    SamplingParams(
        max_tokens=18, ignore_eos=True, temperature=0.6, seed=7, top_k=40, top_p=0.95, repetition_penalty=1.2
    ),
    SamplingParams(
        max_tokens=18,
        ignore_eos=True,
        temperature=1.0,
        seed=8,
        min_p=0.01,
        presence_penalty=0.5,
        frequency_penalty=0.3,
    ),
)


# One of each kind: windows, soft caps, sinks, experts, old and new position embeddings.
USUAL = ("gemma2", "gpt2", "gpt_oss")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("hostile") / "model", "llama", seed=99)


@dataclass(frozen=True)
class Written:
    """A model, and what transformers' own greedy generate says after the prompt."""

    folder: Path
    says: list[int]


@pytest.fixture(scope="module", params=some(sorted(FAMILIES), *USUAL, one_in=2))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = write_model(tmp_path_factory.mktemp(request.param) / "model", request.param)
    return Written(folder, reference(folder, PROMPT, GREEDY.max_tokens))


def test_tokens_do_not_depend_on_the_guesses(family: Written, hostile: Path) -> None:
    model, expected = family.folder, {GREEDY: family.says}
    assert len(set(expected[GREEDY])) > 4, "the test model says too little to tell right from wrong"
    with tiny_engine(model, "none", budget=1) as engine:
        assert list(engine.generate(PROMPT, GREEDY).token_ids) == expected[GREEDY]
        for params in SAMPLED:
            expected[params] = list(engine.generate(PROMPT, params).token_ids)
    assert expected[SAMPLED[0]] != expected[SAMPLED[1]]
    every = (GREEDY, *SAMPLED)
    for draft, budget, verify, asked in (
        ("auto", 64, "coupled", SAMPLED[:1]),
        (model, 128, "coupled", every),
        (model, 64, "plain", SAMPLED[1:]),
        (hostile, 7, "coupled", (GREEDY, SAMPLED[1])),
    ):
        with tiny_engine(model, draft, budget=budget, verify=verify) as engine:
            for params in asked:
                result = engine.generate(PROMPT, params)
                assert list(result.token_ids) == expected[params], (draft, budget, verify, params)
                if draft == model and verify == "coupled":
                    assert result.tokens_per_pass > 2, "a draft that knows the target's mind is believed"


def test_chunks_and_a_head_that_streams(family: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each family's own soft caps, scales and biases hold when its head comes in blocks."""
    model, expected = family.folder, family.says
    monkeypatch.setattr(runner, "CHUNK", 4)
    placement = Placement((Tier.DISK, Tier.HOST, Tier.DEVICE), 2, 2, Tier.DISK)
    with tiny_engine(model, model, placement=placement) as engine:
        assert list(engine.generate(PROMPT, GREEDY).token_ids) == expected
        if engine._assembly.target.head_bytes:
            assert engine._assembly.target.head_block_bytes > 0


def test_there_are_at_least_25_families() -> None:
    assert len(FAMILIES) >= 25


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("recurrent_gemma", "other logits"),
        ("t5", "encoder-decoder"),
        ("bart", "encoder-decoder"),
        ("rwkv", "no small model"),
        ("bert", "bert"),
    ],
)
def test_other_families_are_refused_by_name(family: str, reason: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=family) as caught:
        import torch

        build_skeleton(tmp_path, torch.float32)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
