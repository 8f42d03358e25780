"""Tools, calls and results as text, for chat templates without tool support."""

from typing import Any

from offspec.model.chat_template import with_tool_prompt

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
USER: dict[str, Any] = {"role": "user", "content": "How is Oslo?"}
TALK: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "content": "Sunny.", "tool_call_id": "a"},
    {"role": "tool", "content": "Cold.", "tool_call_id": "b"},
    {"role": "assistant", "content": "Sunny."},
]


def test_tools_are_in_the_system_message() -> None:
    for talk in ([USER], [{"role": "system", "content": "Be brief."}, USER]):
        system, user = with_tool_prompt(talk, [TOOL])
        assert system["role"] == "system" and user == USER
        assert '{"name": "weather", "parameters": {"type": "object"}}' in system["content"]
        assert system["content"].startswith("Be brief.") == (len(talk) == 2)


def test_calls_and_results_are_text() -> None:
    written = with_tool_prompt(TALK, [])
    assert [message["role"] for message in written] == ["user", "assistant", "user", "assistant"]
    call = '{"name": "weather", "arguments": {"city": "Oslo"}}'
    assert written[1] == {"role": "assistant", "content": f"I look.\n<tool_call>\n{call}\n</tool_call>"}
    results = ("<tool_response>\nSunny.\n</tool_response>", "<tool_response>\nCold.\n</tool_response>")
    assert written[2]["content"] == "\n".join(results)


def test_other_messages_are_unchanged() -> None:
    assert with_tool_prompt([USER], []) == [USER]
