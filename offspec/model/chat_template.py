"""Rendering of messages with a chat template, rearranged if the template requires it.

Coding agents send several system messages, some of them after the first user message, and several user
messages in a row. Many templates reject such messages, and others omit some of them from the prompt.

If the template does not support tools, a system message describes them. Calls then use the Hermes format:
JSON between `<tool_call>` tags. Earlier calls are rendered as text in the same tags, and their results as
user messages.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offspec.checkpoint.ranges import one_line
from offspec.core.errors import RequestError
from offspec.model.prompt import Messages, checked_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
_SYSTEM = ("system", "developer")
_REASONING = ("reasoning_content", "reasoning", "thinking")

CALL_MARK = "<tool_call>"
_RESULT = "<tool_response>\n"
_PROMPT = """You can call functions. Their signatures, one JSON object per line:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and arguments between tags:
<tool_call>
{{"name": "function_name", "arguments": {{"argument": "value"}}}}
</tool_call>
The result of a call then comes between <tool_response> tags. Answer without a call if none helps."""


def supports_tools(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether the chat template supports tools. If not, offspec's own tool prompt is used."""
    return "tools" in str(tokenizer.chat_template)


def render(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Messages,
    variables: Mapping[str, Any],
    continue_final_message: bool,
) -> str:
    """Render messages with the chat template of a tokenizer; see `TextCodec.render`."""
    if not tokenizer.chat_template:
        raise RequestError("this model has no chat template; pass the prompt as plain text with `raw=True`")
    from offspec.model.template_limits import TemplateLimitError

    checked = checked_messages(messages)
    if "developer" not in str(tokenizer.chat_template):  # the template predates this role
        checked = [{**each, "role": "system"} if each["role"] == "developer" else each for each in checked]
    if not supports_tools(tokenizer):
        checked = with_tool_prompt(checked, variables.get("tools") or ())
    if continue_final_message and checked[-1]["role"] == "assistant" and not checked[-1]["content"].strip():
        checked.pop()  # an empty answer has nothing to continue
    continue_final_message = continue_final_message and checked[-1]["role"] == "assistant"
    text, failure = None, None
    for form in _written_forms(checked):
        try:
            written = _written(tokenizer, form, variables, continue_final_message)
        except Exception as error:  # a template is a program: it may raise anything
            failure = failure or error
            if isinstance(error, TemplateLimitError):
                break
            continue
        if _says_all(checked, written):
            return written
        if text is None and isinstance(form[0]["content"], str):
            text = written
    if text is not None:
        return text
    assert failure is not None
    reason = f"the model's chat template refuses the prompt: {one_line(failure)}"
    raise RequestError(reason) from failure


def _written(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    continues: bool,
) -> str:
    """Apply the chat template once. Raises whatever the template raises."""
    from offspec.model.template_limits import enforce_template_limits

    with enforce_template_limits(_size(messages) + _size(variables)):
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            **variables,
        )
    assert isinstance(text, str)
    return text


def _size(value: object) -> int:
    """Return the total characters of all strings in nested lists and mappings, counting other values as 1."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_size, value)) + sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 1


def _written_forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield variants of messages to try with a chat template, each with strings and with lists of parts.

    Templates of multimodal models expect parts, and some omit content that is a string.
    """
    for form in message_variants(messages):
        yield form
        yield [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in form]


def _says_all(messages: Messages, text: str) -> bool:
    """Return whether the output of a template contains all user and system text."""
    at = 0  # position of the previous message: searching from there keeps long conversations fast
    for message in messages:
        if message["role"] in ("user", "system", "developer"):
            said = message["content"].strip()
            found = text.find(said, at)
            at = found if found >= 0 else text.find(said)
            if at < 0:
                return False
    return True


def message_variants(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the messages unchanged, then variants with fewer roles in a stricter order.

    No variant loses text, except reasoning before a tool call.
    """
    form = list(messages)
    yield form
    for change in _CHANGES:
        changed = change(form)
        if changed != form:
            form = changed
            yield form


def _one_system(messages: Sequence[Message]) -> list[Message]:
    """Join leading system messages, turn later ones into user messages, and join successive turns."""
    start = next((at for at, each in enumerate(messages) if each["role"] not in _SYSTEM), len(messages))
    changed = list[Message]()
    for at, message in enumerate(messages):
        if message["role"] in _SYSTEM:
            message = message | {"role": "system" if at < start else "user"}
        before = changed[-1] if changed else {"role": None}
        # Tool calls and their results are left unchanged.
        if before["role"] == message["role"] != "tool" and "tool_calls" not in before:
            changed[-1] = _with_texts(before | message, before, message)
        else:
            changed.append(message)
    return changed


def _text_or_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Remove reasoning from messages that have both text and tool calls."""
    return [
        {name: value for name, value in each.items() if name not in _REASONING}
        if each.get("tool_calls") and each["content"].strip()
        else each
        for each in messages
    ]


def _user_in_result(messages: Sequence[Message]) -> list[Message]:
    """Append a user message that follows a tool result to that result."""
    changed = list[Message]()
    for message in messages:
        if message["role"] == "user" and changed and changed[-1]["role"] == "tool":
            changed[-1] = _with_texts(changed[-1], changed[-1], message)
        else:
            changed.append(message)
    return changed


def _system_in_user(messages: Sequence[Message]) -> list[Message]:
    """Prepend the system message to the first user message."""
    if [message["role"] for message in messages[:2]] != ["system", "user"]:
        return list(messages)
    return [_with_texts(messages[1], *messages[:2]), *messages[2:]]


def _with_texts(message: Message, *sources: Message) -> Message:
    texts = [source["content"] for source in sources if source["content"].strip()]
    return message | {"content": "\n\n".join(texts)}


_CHANGES: tuple[Callable[[Sequence[Message]], list[Message]], ...] = (
    _one_system,
    _text_or_reasoning,
    _user_in_result,
    _system_in_user,
)


def with_tool_prompt(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """Rewrite messages for a template that supports neither tools nor their results."""
    written = [_plain(message) for message in messages]
    if tools:
        signatures = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        prompt = _PROMPT.format(tools=signatures)
        if written and written[0]["role"] == "system":
            written[0] = {**written[0], "content": f"{written[0]['content']}\n\n{prompt}"}
        else:
            written.insert(0, {"role": "system", "content": prompt})
    return _joined(written)


def _plain(message: Mapping[str, Any]) -> Message:
    """Return a message with its tool calls or tool result written as text."""
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"{_RESULT}{content}\n</tool_response>"}
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    calls = [_call(call["function"]) for call in message.get("tool_calls") or ()]
    return {**rest, "content": "\n".join(filter(None, (content, *calls)))}


def _call(function: Mapping[str, Any]) -> str:
    made = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(made, ensure_ascii=False)}\n</tool_call>"


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Merge successive tool results into one user message."""
    found = list[Message]()
    for message in messages:
        before = found[-1] if found else None
        if before and _is_result(before) and _is_result(message):
            found[-1] = {**before, "content": f"{before['content']}\n{message['content']}"}
        else:
            found.append(message)
    return found


def _is_result(message: Mapping[str, Any]) -> bool:
    return message["role"] == "user" and str(message["content"]).startswith(_RESULT)
