"""Log-probabilities of prompts are those of transformers, however the prompt is read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec import RequestError, SamplingParams
from offspec.core.events import PromptLogprobs, Result, TextDelta
from offspec.model import runner
from offspec.sampling.row_logprobs import PromptScorer, RowLogprobs
from offspec_planners.placement import Placement, Tier
from tests.support.answers import PROMPT
from tests.support.tiny_models import tiny_engine, write_hybrid, write_model

LONG = PROMPT * 4
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=3)
_STREAMED = Placement((Tier.DISK,) * 3, 2, 0, Tier.DISK)  # the head, too
CASES: dict[str, dict[str, Any]] = {
    "llama": {"draft": "suffix"},
    "gemma2": {"draft": "auto", "chunk": 5},  # soft-capped logits
    "qwen2": {"draft": "none", "placement": _STREAMED},
    "qwen3_next": {"draft": "suffix"},
}


@pytest.fixture
def short_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PASS_ROWS", 7)
    monkeypatch.setattr(runner, "SHARED_PROMPT_ROWS", 7)


def expected(folder: Path, ids: Sequence[int]) -> torch.Tensor:
    """Log-probabilities [T, V] of what follows each token."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return torch.log_softmax(model.eval()(torch.tensor([list(ids)])).logits[0].float(), -1)


def check(result: Result, folder: Path, prompt: Sequence[int]) -> None:
    found = result.prompt_logprobs
    assert found is not None and result.logprobs is not None and found[0] is None
    every = [*found[1:], *result.logprobs]
    ids = [*prompt, *result.token_ids]
    assert [token and token.token for token in every] == ids[1:]
    for place, (token, known) in enumerate(zip(every, expected(folder, ids), strict=False)):
        assert token is not None
        assert token.logprob == pytest.approx(float(known[ids[place + 1]]), abs=2e-4)
        likeliest = known.topk(len(token.top))
        assert len(token.top) == (3 if place + 1 < len(prompt) else 2)
        assert [one for one, _ in token.top] == likeliest.indices.tolist()
        assert [value for _, value in token.top] == pytest.approx(likeliest.values.tolist(), abs=2e-4)


@pytest.mark.parametrize("family", CASES)
def test_in_one_pass_and_in_several(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = (write_hybrid if family == "qwen3_next" else write_model)(tmp_path, family)
    with tiny_engine(folder, **CASES[family]) as engine:
        check(engine.generate(LONG, PARAMS), folder, LONG)
        monkeypatch.setattr(runner, "PASS_ROWS", 7)
        again = engine.generate(LONG, PARAMS)  # whose prompt the cache holds
        check(again, folder, LONG)
        assert again.reused_tokens == 0


@pytest.mark.usefixtures("short_passes")
@pytest.mark.parametrize("placement", [None, _STREAMED])
def test_of_several_sequences(placement: Placement | None, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    prompts = [LONG, LONG[:20], LONG[3:], [5]]
    without = SamplingParams(max_tokens=4, ignore_eos=True)
    with tiny_engine(folder, "suffix", placement=placement, sequences=4) as engine:
        plain = engine.generate_many(prompts, without)
        results = engine.generate_many([*prompts, LONG], [PARAMS] * len(prompts) + [without])
        for result, prompt, other in zip(results, prompts, plain, strict=False):
            check(result, folder, prompt)
            assert result.token_ids == other.token_ids
        assert results[-1].prompt_logprobs is None


def test_they_come_before_the_text(tmp_path: Path) -> None:
    with tiny_engine(write_model(tmp_path), "none") as engine:
        events = list(engine.stream(PROMPT, PARAMS))
        kinds = [type(event) for event in events if isinstance(event, PromptLogprobs | TextDelta)]
        assert kinds == [PromptLogprobs, *[TextDelta] * 4]
        result = engine.generate([5], PARAMS)
        assert result.prompt_logprobs == (None,)
        token = engine.generate([5, 9], PARAMS).to_json()["prompt_logprobs"][1]
        assert (token["token"], token["text"], len(token["top"])) == (9, "w9", 3)
    with pytest.raises(RequestError, match="prompt_logprobs must be None, or 0 or above, not -1"):
        SamplingParams(prompt_logprobs=-1)


def test_rows_of_a_pass_that_failed_count_once() -> None:
    states, scorer = torch.eye(4), PromptScorer([1, 2, 3, 0, 1], 1)
    for start in (0, 2, 2):
        rows = scorer.rows(start, states[start : start + 2])
        assert rows is not None
        rows.add(lambda hidden: hidden)
        scorer.collect()
    assert [token and token.token for token in scorer.tokens] == [None, 2, 3, 0, 1]
    assert [token and token.top[0][0] for token in scorer.tokens] == [None, 0, 1, 2, 3]
    assert scorer.rows(4, states[:1]) is None


def test_a_vocabulary_in_blocks() -> None:
    states, tokens = torch.randn(40, 9, generator=torch.Generator().manual_seed(1)), [*range(8)] * 5
    whole, blocks = RowLogprobs(states, tokens, 3), RowLogprobs(states, tokens, 3)
    whole.add(lambda rows: rows[:, :8])
    for start, end in ((0, 2), (2, 7), (7, 8)):
        blocks.add(lambda rows, start=start, end=end: rows[:, start:end], start)  # type: ignore[misc]
    for one, other in zip(whole.results(), blocks.results(), strict=True):
        assert (one.token, [token for token, _ in one.top]) == (
            other.token,
            [token for token, _ in other.top],
        )
        assert (one.logprob, *dict(one.top).values()) == pytest.approx(
            (other.logprob, *dict(other.top).values())
        )


@pytest.mark.gpu
@pytest.mark.parametrize("head", [Tier.DEVICE, Tier.DISK])
def test_on_a_gpu(head: Tier, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    placement = Placement((Tier.DEVICE, Tier.HOST, Tier.DISK), 2, 2, head)
    with tiny_engine(folder, "none", placement=placement, device=torch.device("cuda", 0)) as engine:
        check(engine.generate(LONG, PARAMS), folder, LONG)
