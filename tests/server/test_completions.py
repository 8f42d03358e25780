"""Completions with OpenAI's own client: raw text is continued."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from offspec.core.config import SamplingParams
from offspec.engine.engine import Engine
from tests.support.live_server import NAME, LiveServer
from tests.support.tiny_models import tiny_engine

PROMPTS = ["w12 w13 w14", "w20 w21"]


def plain(engine: Engine, prompt: Any, **params: Any) -> str:
    """The model's answer without speculation."""
    return engine.generate(prompt, SamplingParams(**params), raw=True, speculate=False).text


def test_text_completion(client: openai.OpenAI, alone: Engine) -> None:
    expected = plain(alone, PROMPTS[0], max_tokens=16)
    whole = client.completions.create(model=NAME, prompt=PROMPTS[0])
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected, "length")
    assert whole.usage is not None and whole.usage.completion_tokens == 16
    ids = alone.encode(PROMPTS[0], raw=True)
    assert client.completions.create(model=NAME, prompt=ids).choices[0].text == expected
    arguments: Any = {"model": NAME, "prompt": PROMPTS[0], "stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(**arguments, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
def test_multiple_prompts_and_choices(client: openai.OpenAI, alone: Engine, stream: bool) -> None:
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
    arguments: Any = {"model": NAME, "prompt": PROMPTS[0], "max_tokens": 4, "logprobs": 2}
    found = client.completions.create(**arguments).choices[0].logprobs
    assert found is not None and found.tokens == [alone.decode_with_special([token.token]) for token in known]
    assert found.token_logprobs == pytest.approx([token.logprob for token in known], abs=1e-5)
    assert found.text_offset == [0, 3, 6, 9]
    assert found.top_logprobs is not None and all(len(top) == 2 for top in found.top_logprobs)
    streamed = [chunk.choices[0].logprobs for chunk in client.completions.create(**arguments, stream=True)]
    assert [token for part in streamed if part for token in part.tokens or ()] == found.tokens
    assert [at for part in streamed if part for at in part.text_offset or ()] == found.text_offset


def test_echo(client: openai.OpenAI, alone: Engine) -> None:
    """The prompt comes first in every choice, even if nothing follows."""
    expected = PROMPTS[0] + plain(alone, PROMPTS[0], max_tokens=4)
    arguments: Any = {"model": NAME, "echo": True}
    both = client.completions.create(**arguments, prompt=PROMPTS, max_tokens=4, n=2)
    assert [choice.text for choice in both.choices[:2]] == [expected] * 2
    assert [choice.text.startswith(PROMPTS[1]) for choice in both.choices[2:]] == [True] * 2
    chunks = client.completions.create(**arguments, prompt=PROMPTS[0], max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    ids = alone.encode(PROMPTS[0], raw=True)
    only = client.completions.create(**arguments, prompt=ids, max_tokens=0)
    assert (only.choices[0].text, only.choices[0].logprobs) == (alone.decode_with_special(ids), None)


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_echo_with_logprobs(client: openai.OpenAI, alone: Engine, tokens: int) -> None:
    """As evaluation harnesses request them: for the answer, and for each prompt token except the first."""
    params = SamplingParams(max_tokens=max(tokens, 1), logprobs=2, prompt_logprobs=2)
    known = alone.generate(PROMPTS[0], params, raw=True)
    assert known.prompt_logprobs is not None and known.logprobs is not None
    every = [token for token in (*known.prompt_logprobs[1:], *known.logprobs[:tokens]) if token]
    texts = [*PROMPTS[0].split(), *(token.text for token in known.logprobs[:tokens])]
    arguments: Any = {"model": NAME, "prompt": PROMPTS[0], "max_tokens": tokens, "echo": True, "logprobs": 2}
    whole = client.completions.create(**arguments).choices[0]
    found = whole.logprobs
    assert whole.text.startswith(PROMPTS[0]) and found is not None
    assert found.tokens == texts
    assert found.token_logprobs is not None and found.top_logprobs is not None
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert found.token_logprobs[1:] == pytest.approx([token.logprob for token in every], abs=1e-5)
    for top, token in zip(found.top_logprobs[1:], every, strict=True):
        expected = dict(zip(token.top_text, [value for _, value in token.top], strict=True))
        assert top == pytest.approx(expected | {token.text: token.logprob}, abs=1e-5)
    assert found.text_offset == [3 * at for at in range(len(texts))]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**arguments, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    streamed = [chunk.logprobs for chunk in chunks if chunk.logprobs]
    assert [token for part in streamed for token in part.tokens or ()] == texts
    assert [at for part in streamed for at in part.text_offset or ()] == found.text_offset


@pytest.fixture(scope="module")
def infilling(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The same model with a tokenizer that has fill-in-the-middle tokens."""
    folder = shutil.copytree(tiny_folder, tmp_path_factory.mktemp("infilling"), dirs_exist_ok=True)
    words = (folder / "tokenizer.json").read_text()
    for token, mark in ((90, "prefix"), (91, "suffix"), (92, "middle")):
        words = words.replace(f'"w{token}"', f'"<fim_{mark}>"')
    (folder / "tokenizer.json").write_text(words.replace('"w93"', '"<|endoftext|>"'))
    assert AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens(91) == "<fim_suffix>"
    with tiny_engine(folder, "none") as engine:
        yield engine


def test_fill_in_the_middle(infilling: Engine) -> None:
    ids = [90, 12, 13, 91, 20, 92]
    assert infilling.model_info.infill_ends == (90, 91, 92, 93)
    assert infilling.encode_infill("w12 w13", "w20") == ids
    ends = SamplingParams(max_tokens=16, seed=4, temperature=2.0, stop_token_ids=(90, 91, 92, 93))
    with LiveServer(infilling) as server, server.client() as client:
        expected = infilling.generate(ids, ends)
        arguments: Any = {"model": NAME, "prompt": "w12 w13", "suffix": "w20", "seed": 4, "temperature": 2.0}
        whole = client.completions.create(**arguments)
        assert whole.choices[0].text == expected.text
        assert whole.usage is not None and whole.usage.prompt_tokens == len(ids)
        shown = client.completions.create(**arguments, echo=True)
        assert shown.choices[0].text == "w12 w13" + expected.text
        with server.http() as http:
            body = {"input_prefix": "w12 ", "prompt": "w13", "input_suffix": "w20", "n_predict": 16}
            filled = http.post("/infill", json={**body, "seed": 4, "temperature": 2.0}).json()
            assert (filled["content"], filled["tokens_evaluated"]) == (expected.text, len(ids))
            body = {"model": NAME, "prompt": "w12 w13", "suffix": "w20", "stream": False}
            options = {"seed": 4, "temperature": 2.0, "num_predict": 16}
            filled = http.post("/api/generate", json={**body, "options": options}).json()
            assert (filled["response"], filled["prompt_eval_count"]) == (expected.text, len(ids))
            assert "insert" in http.post("/api/show", json={}).json()["capabilities"]
        with pytest.raises(openai.BadRequestError, match="suffix: the prompt must be text"):
            client.completions.create(**arguments | {"prompt": [12, 13]})
