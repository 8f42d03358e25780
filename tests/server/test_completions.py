"""Completions, by OpenAI's own client: text is continued as it is."""

from typing import Any

import openai
import pytest

from offspec.core.config import SamplingParams
from offspec.engine.engine import Engine
from tests.support.live_server import NAME

PROMPTS = ["w12 w13 w14", "w20 w21"]


def plain(engine: Engine, prompt: Any, **params: Any) -> str:
    """What the model says without speculation."""
    return engine.generate(prompt, SamplingParams(**params), raw=True, speculate=False).text


def test_a_text(client: openai.OpenAI, alone: Engine) -> None:
    expected = plain(alone, PROMPTS[0], max_tokens=16)
    whole = client.completions.create(model=NAME, prompt=PROMPTS[0])
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected, "length")
    assert whole.usage is not None and whole.usage.completion_tokens == 16
    ids = alone.encode(PROMPTS[0], raw=True)
    assert client.completions.create(model=NAME, prompt=ids).choices[0].text == expected
    asked: Any = {"model": NAME, "prompt": PROMPTS[0], "stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_with_several_choices(client: openai.OpenAI, alone: Engine, stream: bool) -> None:
    params: Any = {"temperature": 1.0, "max_tokens": 5}
    expected = [plain(alone, prompt, seed=3 + at, **params) for prompt in PROMPTS for at in range(2)]
    answer: Any = client.completions.create(model=NAME, prompt=PROMPTS, n=2, seed=3, stream=stream, **params)
    texts = ["", "", "", ""]
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected


def test_logprobs(client: openai.OpenAI, alone: Engine) -> None:
    known = alone.generate(PROMPTS[0], SamplingParams(max_tokens=4, logprobs=2), raw=True).logprobs
    assert known is not None
    asked: Any = {"model": NAME, "prompt": PROMPTS[0], "max_tokens": 4, "logprobs": 2}
    found = client.completions.create(**asked).choices[0].logprobs
    assert found is not None and found.tokens == [alone.spell([token.token]) for token in known]
    assert found.token_logprobs == pytest.approx([token.logprob for token in known], abs=1e-5)
    assert found.text_offset == [0, 3, 6, 9]
    assert found.top_logprobs is not None and all(len(top) == 2 for top in found.top_logprobs)
    streamed = [chunk.choices[0].logprobs for chunk in client.completions.create(**asked, stream=True)]
    assert [token for part in streamed if part for token in part.tokens or ()] == found.tokens
    assert [at for part in streamed if part for at in part.text_offset or ()] == found.text_offset
