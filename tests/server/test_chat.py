"""Chat Completions with OpenAI's own client: the engine's tokens in the API's format."""

from collections.abc import Sequence
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from offspec.core.config import SamplingParams
from offspec.engine.engine import Engine
from tests.support.live_server import NAME, LiveServer

ASKED: list[Any] = [{"role": "user", "content": "w12 w13 w14 w12 w13"}]


def said(chunks: Sequence[ChatCompletionChunk], choice: int = 0) -> str:
    deltas = [found.delta for chunk in chunks for found in chunk.choices if found.index == choice]
    return "".join(delta.content or "" for delta in deltas)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_equal_the_engines(client: openai.OpenAI, alone: Engine, temperature: float) -> None:
    """Token counts are included; a stream sends them on request."""
    messages: list[Any] = [{"role": "user", "content": f"w12 w{20 + 10 * temperature:.0f} w14"}]
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=20, ignore_eos=True)
    expected, tokens = alone.generate(messages, params, speculate=False).text, len(alone.encode(messages))
    fields: Any = {"model": NAME, "messages": messages, "temperature": temperature, "seed": 5}
    fields |= {"max_completion_tokens": 20, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**fields)
    (choice,) = whole.choices
    usage = whole.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (tokens, 20, tokens + 20)
    assert (choice.message.content, choice.message.role) == (expected, "assistant")
    assert choice.finish_reason == "length"
    chunks = list(client.chat.completions.create(**fields, stream=True))
    assert said(chunks) == expected
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1 and len(chunks) > 3  # as it came, pass by pass
    assert all(chunk.usage is None for chunk in chunks)
    *_, last = client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage is not None and last.usage.prompt_tokens_details is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (tokens, 20)
    assert last.usage.prompt_tokens_details.cached_tokens == tokens - 1  # of the first answer


def test_choices_have_consecutive_seeds(client: openai.OpenAI, alone: Engine) -> None:
    fields: Any = {"model": NAME, "messages": ASKED, "temperature": 1, "seed": 11, "n": 3, "max_tokens": 8}
    fields["extra_body"] = {"ignore_eos": True}
    params = [SamplingParams(temperature=1.0, seed=11 + at, max_tokens=8, ignore_eos=True) for at in range(3)]
    expected = [alone.generate(ASKED, each, speculate=False).text for each in params]
    whole = client.chat.completions.create(**fields)
    assert [choice.message.content for choice in whole.choices] == expected
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.usage is not None and whole.usage.completion_tokens == 24
    chunks = list(client.chat.completions.create(**fields, stream=True))
    assert [said(chunks, choice) for choice in range(3)] == expected
    assert len(set(expected)) == 3


def test_logprobs(client: openai.OpenAI, alone: Engine) -> None:
    expected = alone.generate(ASKED, SamplingParams(max_tokens=7, logprobs=3), speculate=False).logprobs
    fields: Any = {"model": NAME, "messages": ASKED, "max_tokens": 7, "logprobs": True, "top_logprobs": 3}
    found = client.chat.completions.create(**fields).choices[0].logprobs
    assert expected is not None and found is not None and found.content is not None
    streamed = [
        token
        for chunk in client.chat.completions.create(**fields, stream=True)
        for choice in chunk.choices
        if choice.logprobs is not None
        for token in choice.logprobs.content or ()
    ]
    for tokens in (found.content, streamed):
        assert len(tokens) == 7
        for token, known in zip(tokens, expected, strict=True):
            assert (
                token.token == alone.decode_with_special([known.token]) == bytes(token.bytes or ()).decode()
            )
            assert token.logprob == pytest.approx(known.logprob, abs=1e-5)
            assert [top.token for top in token.top_logprobs] == [
                alone.decode_with_special([i]) for i, _ in known.top
            ]
    bare = client.chat.completions.create(model=NAME, messages=ASKED, max_tokens=2, logprobs=True)
    assert bare.choices[0].logprobs is not None
    assert [token.top_logprobs for token in bare.choices[0].logprobs.content or ()] == [[], []]


RULES: dict[str, dict[str, Any]] = {
    "stop": {"stop": ["w40"], "temperature": 1.0},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {17: 9.5, 18: -3.0}},
    "filters": {"temperature": 1.0, "top_k": 4, "top_p": 0.9, "min_p": 0.05},
    "repetition": {"repetition_penalty": 1.8, "no_repeat_ngram_size": 2},
    "ends": {"stop_token_ids": [20, 21, 22], "min_tokens": 3, "temperature": 1.2, "ignore_eos": True},
    "allowed": {"allowed_token_ids": [30, 31, 32, 33], "bad_words": ["w31"]},
}


@pytest.mark.parametrize("rule", RULES)
def test_all_sampling_parameters_apply(client: openai.OpenAI, alone: Engine, rule: str) -> None:
    given = RULES[rule]
    result = alone.generate(ASKED, SamplingParams(**given, seed=3, max_tokens=24), speculate=False)
    known = ("stop", "presence_penalty", "frequency_penalty", "top_p")  # sent by the client; others are extra
    own = {name: given[name] for name in given if name in known}
    extra = {name: value for name, value in given.items() if name not in own}
    if "logit_bias" in extra:
        extra["logit_bias"] = {str(token): by for token, by in extra["logit_bias"].items()}
    answer = client.chat.completions.create(
        model=NAME, messages=ASKED, max_tokens=24, seed=3, **own, extra_body=extra
    )
    assert answer.choices[0].message.content == result.text
    reason = "length" if result.finish_reason == "length" else "stop"
    assert answer.choices[0].finish_reason == reason


@pytest.mark.usefixtures("drafters_stay")
def test_trees_in_the_stream(client: openai.OpenAI) -> None:
    """Accepted tokens plus the bonus token spell the answer. Without the option, no trees are sent."""
    fields: Any = {"model": NAME, "messages": ASKED, "max_tokens": 24, "stream": True}
    plain_chunks = list(client.chat.completions.create(**fields))
    fields["extra_body"] = {"offspec": {"trees": True}, "ignore_eos": True}
    chunks = list(client.chat.completions.create(**fields))
    extras = [chunk.model_extra["offspec"] for chunk in chunks if "offspec" in (chunk.model_extra or {})]
    assert all(len(each) == 1 for each in extras)
    trees, passes = ([each[name] for each in extras if name in each] for name in ("tree", "pass"))
    spelled = ["".join(tree["text"][node] for node in tree["accepted"][1:]) + tree["bonus"] for tree in trees]
    assert "".join("".join(spelled).split()) == "".join(said(chunks).split())
    assert len(trees) == len(passes) == passes[-1]["index"] and len(trees) > 1
    assert sum(each["emitted"] for each in passes) == 24
    assert extras[0]["prefill"]["tokens"] + extras[0]["prefill"]["reused"] > 4
    assert not any("offspec" in (chunk.model_extra or {}) for chunk in plain_chunks)


def test_message_roles_and_parts(client: openai.OpenAI, alone: Engine) -> None:
    """Parts are joined, a developer message counts as system, and a final assistant message is continued."""
    messages: list[Any] = [
        {"role": "developer", "content": "w15"},
        {"role": "user", "content": [{"type": "text", "text": "w16 "}, {"type": "text", "text": "w17"}]},
        {"role": "assistant", "content": None, "tool_calls": [_call("w18")]},
        {"role": "tool", "content": "w19", "tool_call_id": "call_1"},
        {"role": "tool", "content": [], "tool_call_id": "call_2"},
        {"role": "assistant", "content": "w20"},
        {"role": "user", "content": "w21", "name": "w22"},
    ]
    plain_messages = [
        {"role": "system", "content": "w15"},
        {"role": "user", "content": "w16 w17"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "w18", "arguments": {"city": "Oslo"}}}],
        },
        {"role": "tool", "content": "w19"},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "w20"},
        {"role": "user", "content": "w21"},
    ]
    params = SamplingParams(max_tokens=5)
    answer = client.chat.completions.create(model=NAME, messages=messages, max_tokens=5)
    expected = alone.generate(plain_messages, params, speculate=False)
    assert answer.choices[0].message.content == expected.text
    begun: list[Any] = [*ASKED, {"role": "assistant", "content": "w30 w31"}]
    ids = alone.encode("w10 w12 w13 w14 w12 w13 w11 w10 w30 w31", raw=True)
    answer = client.chat.completions.create(model=NAME, messages=begun, max_tokens=5)
    assert answer.choices[0].message.content == alone.generate(ids, params, speculate=False).text
    assert answer.usage is not None and answer.usage.prompt_tokens == len(ids)


def test_server_defaults(client: openai.OpenAI, live: LiveServer) -> None:
    """Without a token limit an answer continues to the end of the context."""
    long: list[Any] = [{"role": "user", "content": "w12 " * 236}]
    answer = client.chat.completions.create(model=NAME, messages=long, extra_body={"ignore_eos": True})
    assert answer.usage is not None and answer.usage.total_tokens == live.service.engine.context
    assert answer.choices[0].finish_reason == "length"


def _call(name: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": '{"city": "Oslo"}'}}
