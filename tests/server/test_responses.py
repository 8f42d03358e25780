"""OpenAI's Responses API with OpenAI's own client: items, typed events, and storage on disk."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from offspec.core.cache_dir import cache_root
from offspec.core.config import SamplingParams
from offspec.engine.engine import Engine
from offspec.server.stored_responses import StoredResponse, StoredResponses, new_id
from tests.server.answers import BOTH, PARAMETERS
from tests.support.fake_engine import Script, ScriptedEngine
from tests.support.live_server import NAME, LiveServer
from tests.support.tiny_models import tiny_engine

TOOLS: Any = [
    {"type": "function", "name": name, "parameters": PARAMETERS, "strict": False}
    for name in ("weather", "time")
]
ASKED: Any = {"model": NAME, "input": "w12 w13 w14"}
MESSAGES = [{"role": "user", "content": "w12 w13 w14"}]


@pytest.fixture
def scripted(served: LiveServer, engine: ScriptedEngine) -> Iterator[openai.OpenAI]:
    engine.answers = [BOTH]
    with served.client() as client:
        yield client


def items(response: Response) -> list[dict[str, Any]]:
    """Output of a response, without ids."""
    return [
        item.model_dump(exclude_none=True, exclude={"id", "call_id", "status"}) for item in response.output
    ]


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def text(said: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": said, "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "content": [part]}


def test_answers_equal_the_engines(client: openai.OpenAI, alone: Engine) -> None:
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=20, ignore_eos=True)
    expected = alone.generate(MESSAGES, params, speculate=False)
    fields = {**ASKED, "max_output_tokens": 20, "temperature": 0.8}
    fields["extra_body"] = {"seed": 5, "ignore_eos": True}
    whole = client.responses.create(**fields)
    assert (whole.output_text, items(whole)) == (expected.text, [text(expected.text)])
    assert (whole.status, whole.temperature, whole.object) == ("incomplete", 0.8, "response")
    assert whole.incomplete_details is not None and whole.incomplete_details.reason == "max_output_tokens"
    usage = whole.usage
    assert usage is not None and (usage.input_tokens, usage.output_tokens) == (expected.prompt_tokens, 20)
    with client.responses.stream(**fields) as stream:
        said = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert said == expected.text


def test_logprobs(client: openai.OpenAI, alone: Engine) -> None:
    known = alone.generate(MESSAGES, SamplingParams(max_tokens=4, logprobs=2), speculate=False).logprobs
    fields: Any = {**ASKED, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (item,) = client.responses.create(**fields, max_output_tokens=4).output
    assert known is not None and item.type == "message" and item.content[0].type == "output_text"
    found = item.content[0].logprobs or []
    assert [each.logprob for each in found] == pytest.approx([each.logprob for each in known], abs=1e-5)
    assert all(len(each.top_logprobs) == 2 for each in found)


def test_stream_events(scripted: openai.OpenAI) -> None:
    """Events are in order, numbered, each of the client's own type."""
    events = list(scripted.responses.create(**ASKED, tools=TOOLS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        type(event).model_validate(event.model_dump(), strict=True)
    names = [event.type.removeprefix("response.") for event in events]
    assert names[:2] == ["created", "in_progress"] and names[-1] == "completed"
    opened = [event.item.type for event in events if event.type == "response.output_item.added"]
    assert opened == ["reasoning", "message", "function_call", "function_call"]
    parts = {
        name: names.count(name) for name in ("content_part.added", "content_part.done", "output_item.done")
    }
    assert parts == {"content_part.added": 2, "content_part.done": 2, "output_item.done": 4}
    ended = [event.item.id for event in events if event.type == "response.output_item.done"]
    last = events[-1]
    assert last.type == "response.completed" and [item.id for item in last.response.output] == ended
    added = next(event for event in events if event.type == "response.output_item.added")
    assert added.item.type == "reasoning" and added.item.content == []


def test_tools_and_reasoning(scripted: openai.OpenAI) -> None:
    expected = [
        thought("Which city? Oslo."),
        text("I look."),
        {"type": "function_call", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call", "name": "time", "arguments": '{"city": "Rome"}'},
    ]
    whole = scripted.responses.create(**ASKED, tools=TOOLS)
    assert items(whole) == expected and whole.status == "completed"
    with scripted.responses.stream(**ASKED, tools=TOOLS) as stream:
        final = stream.get_final_response()
    for mine, theirs in zip(expected, items(final), strict=True):
        assert mine.items() <= theirs.items() or theirs["type"] == "message"
    assert whole.usage is not None and whole.usage.output_tokens_details.reasoning_tokens >= 3
    bare = scripted.responses.create(**ASKED, tools=TOOLS, tool_choice="none")
    assert [item.type for item in bare.output] == ["reasoning", "message"]


def test_response_formats_and_forced_calls(scripted: openai.OpenAI, engine: ScriptedEngine) -> None:
    schema = {"type": "object", "properties": {"sky": {"const": "blue"}}}
    engine.answers = ['{"sky": "blue"}']
    format: Any = {"format": {"type": "json_schema", "name": "sky", "schema": schema, "strict": True}}
    assert scripted.responses.create(**ASKED, text=format).output_text == '{"sky": "blue"}'
    given = engine.requests[-1].params.format
    assert given is not None and json.loads(given.text) == {**schema, "additionalProperties": False}
    engine.answers = ['{"name": "time", "arguments": {"city": "Rome"}}']
    choice: Any = {"type": "function", "name": "time"}
    (made,) = items(scripted.responses.create(**ASKED, tools=TOOLS, tool_choice=choice))
    assert made == {"type": "function_call", "name": "time", "arguments": '{"city": "Rome"}'}


def test_items_form_a_conversation(client: openai.OpenAI, alone: Engine) -> None:
    """Reasoning, text and calls of one turn form one message of the template."""
    given: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "w15"}]},
        {"id": "a", **thought("w16")},
        {"type": "message", "id": "b", "status": "completed", **text("w17")},
        {"type": "function_call", "call_id": "c", "name": "w18", "arguments": "{}"},
        {"type": "function_call", "call_id": "d", "name": "w18", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "w19"},
        {"type": "function_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "w20"}]},
        {"role": "user", "content": "w21"},
    ]
    plain = [
        {"role": "system", "content": "w30"},
        {"role": "user", "content": "w15"},
        {
            "role": "assistant",
            "content": "w17",
            "tool_calls": 2 * [{"function": {"name": "w18", "arguments": {}}}],
        },
        {"role": "tool", "content": "w19"},
        {"role": "tool", "content": "w20"},
        {"role": "user", "content": "w21"},
    ]
    expected = alone.generate(plain, SamplingParams(max_tokens=5), speculate=False)
    fields: Any = {"model": NAME, "input": given, "instructions": "w30"}
    answer = client.responses.create(**fields, max_output_tokens=5)
    assert answer.output_text == expected.text
    assert answer.usage is not None and answer.usage.input_tokens == expected.prompt_tokens


def test_previous_response_id(client: openai.OpenAI, alone: Engine, tiny_folder: Path) -> None:
    """Also after a restart, streamed or not; instructions are not carried over."""
    fields: Any = {"model": NAME, "max_output_tokens": 6}
    first = client.responses.create(**fields, input="w15 w16", instructions="w30")
    chunks = client.responses.create(**fields, input="w17", previous_response_id=first.id, stream=True)
    *_, last = chunks
    assert last.type in ("response.completed", "response.incomplete")
    second = last.response
    with LiveServer(tiny_engine(tiny_folder)) as again, again.client() as other:
        third = other.responses.create(**fields, input="w18", previous_response_id=second.id)
    messages = [
        {"role": "user", "content": "w15 w16"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "w17"},
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "w18"},
    ]
    assert second.output_text == alone.generate(messages[:3], SamplingParams(max_tokens=6)).text
    assert third.output_text == alone.generate(messages, SamplingParams(max_tokens=6)).text
    assert client.responses.retrieve(second.id).output_text == second.output_text


def test_input_items(scripted: openai.OpenAI, engine: ScriptedEngine) -> None:
    """Items of the whole conversation, in either order and in pages, with stable ids."""
    fields: Any = {"model": NAME, "tools": TOOLS}
    first = scripted.responses.create(**fields, input="Why?")
    outputs: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "dry"}
        for item in first.output
        if item.type == "function_call"
    ]
    added: Any = [{"role": "assistant", "content": "So."}, {"role": "user", "content": "And?", "id": "mine"}]
    second = scripted.responses.create(**fields, previous_response_id=first.id, input=[*outputs, *added])
    (only,) = scripted.responses.input_items.list(first.id)
    assert only.type == "message" and only.role == "user" and only.id.startswith("msg_")
    assert only.content[0].type == "input_text" and only.content[0].text == "Why?"
    items = list(scripted.responses.input_items.list(second.id, order="asc"))
    for item in items:
        type(item).model_validate(item.model_dump(), strict=True)
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item.type for item in items[1:5]] == kinds and len(items) == 9
    assert [item.id for item in items[1:5]] == [item.id for item in first.output]
    assert items[-2].type == "message" and items[-2].content[0].type == "output_text"
    assert items[-1].id == "mine" and len({item.id for item in items}) == 9
    latest_first = scripted.responses.input_items.list(
        second.id, limit=4, include=["reasoning.encrypted_content"]
    )
    assert len(latest_first.data) == 4 and latest_first.has_more
    assert [item.id for item in latest_first] == [item.id for item in reversed(items)]  # all pages
    page = scripted.responses.input_items.list(second.id, order="asc", after=items[7].id)
    assert [item.id for item in page.data] == ["mine"] and not page.has_more


def test_invalid_input_item_requests(scripted: openai.OpenAI) -> None:
    kept = scripted.responses.create(**ASKED)
    for id, more, status in (
        ("resp_x", {}, 404),
        (kept.id, {"after": "none"}, 404),
        (kept.id, {"limit": 0}, 400),
        (kept.id, {"order": "up"}, 400),
    ):
        given: Any = more
        with pytest.raises(openai.APIStatusError) as refused:
            scripted.responses.input_items.list(id, **given)
        assert refused.value.status_code == status
    doubled = StoredResponse(
        {"id": new_id(), "output": []}, [{"role": "user", "content": "a", "id": "b"}] * 2
    )
    StoredResponses(cache_root() / "responses").keep(doubled)
    found = list(scripted.responses.input_items.list(doubled.response["id"], limit=1))
    assert len(found) == len({item.id for item in found}) == 2


def test_damaged_stored_responses(scripted: openai.OpenAI) -> None:
    """Damaged responses are removed, wherever the damage is."""
    kept = StoredResponses(cache_root() / "responses")
    for items in ([{"role": "robot"}], [{"type": "reasoning", "summary": 3}], [3]):
        id = new_id()
        broken: Any = StoredResponse({"id": id}, items)
        kept.keep(broken)
        with pytest.raises(openai.BadRequestError, match="previous_response_id: there is no"):
            scripted.responses.create(**ASKED, previous_response_id=id)
        with suppress(openai.NotFoundError):
            scripted.responses.input_items.list(id)


def test_null_equals_an_omitted_field(scripted: openai.OpenAI) -> None:
    extra: Any = {"text": {"format": None}, "tools": None, "tool_choice": None, "reasoning": {"effort": None}}
    assert scripted.responses.create(**ASKED, extra_body=extra).text.format.type == "text"


def test_deleted_and_unknown_responses(scripted: openai.OpenAI) -> None:
    unkept = scripted.responses.create(**ASKED, store=False)
    removed = scripted.responses.create(**ASKED)
    scripted.responses.delete(removed.id)
    for id in (unkept.id, removed.id, "resp_../../x", ""):
        with pytest.raises(openai.BadRequestError, match="previous_response_id: there is no"):
            scripted.responses.create(**ASKED, previous_response_id=id)
    with pytest.raises(openai.NotFoundError):
        scripted.responses.retrieve(removed.id)


def test_failed_stream(scripted: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.answers = [Script("one two three four five six", fail_after=1)]
    *_, last = scripted.responses.create(**ASKED, stream=True)
    assert last.type == "response.failed" and last.response.error is not None
    assert last.response.error.code == "server_error" and last.response.status == "failed"


def stored(size: int = 0) -> StoredResponse:
    return StoredResponse({"id": new_id(), "padding": "x" * size}, [{"role": "user", "content": "Hello"}])


def test_stored_files_are_private_bounded_and_expire(tmp_path: Path) -> None:
    folder = tmp_path / "responses"
    kept = StoredResponses(folder, seconds=60, most_bytes=2500)
    given = [stored(1000) for _ in range(3)]
    for age, each in zip((30, 20, 0), given, strict=True):
        kept.keep(each)
        path = folder / f"{each.response['id']}.json"
        os.utime(path, (time.time() - age, time.time() - age))
        assert path.stat().st_mode & 0o077 == 0
    assert folder.stat().st_mode & 0o077 == 0
    first, second, third = (each.response["id"] for each in given)
    assert kept.get(first) is None and kept.get(second) == given[1] and kept.get(third) == given[2]
    os.utime(folder / f"{second}.json", (0, 0))
    assert kept.get(second) is None
    (folder / f"{third}.json").write_bytes(b"{")
    assert kept.get(third) is None and not kept.remove(third)
    kept.keep(stored(5000))  # too large even alone
    assert list(folder.iterdir()) == []


def test_folder_is_read_once_and_then_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and ages stay in memory, even if another server changes the folder meanwhile."""
    scans, scan = list[Path](), os.scandir

    def scandir(folder: Any) -> Any:
        scans.extend([folder] if folder == tmp_path else [])
        return scan(folder)

    monkeypatch.setattr("offspec.server.stored_responses.os.scandir", scandir)
    earlier, other = (StoredResponses(tmp_path, most_bytes=3500) for _ in range(2))
    first = stored(1000)
    earlier.keep(first)
    kept = StoredResponses(tmp_path, most_bytes=3500)
    given = [stored(1000) for _ in range(4)]
    kept.keep(given[0])
    assert other.remove(first.response["id"])
    for each in given[1:]:
        kept.keep(each)
    assert [kept.get(each.response["id"]) is not None for each in given] == [False, True, True, True]
    assert len(scans) == 2  # one for each of two servers
    assert kept.remove(given[1].response["id"])
    kept.keep(stored(1000))
    assert kept.get(given[2].response["id"]) is not None  # the removed response made room
    other.keep(theirs := stored(1000))  # it had not read the folder before
    monkeypatch.setattr("offspec.server.stored_responses._RESCAN_S", -1)
    kept.keep(stored(1000))
    assert len(scans) == 4 and kept.get(theirs.response["id"]) is not None
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 3500


def test_responses_expire_when_another_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, now = StoredResponses(tmp_path, seconds=60), time.time()
    kept.keep(stored())
    monkeypatch.setattr("offspec.server.stored_responses.time.time", lambda: now + 100)
    kept.keep(last := stored())
    assert [path.stem for path in tmp_path.iterdir()] == [last.response["id"]]


def test_full_disk_disables_storage_only(scripted: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: StoredResponses, stored: StoredResponse) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StoredResponses, "keep", full)
    answer = scripted.responses.create(**ASKED)
    assert answer.status == "completed" and (answer.model_extra or {})["store"] is False
