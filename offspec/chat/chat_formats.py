"""Chat formats: marks of reasoning and tool calls by model family, detected from the chat template."""

from collections.abc import Callable
from dataclasses import dataclass

import regex

from offspec.chat.tool_parsers import JsonToolParser, ParsedCalls, TaggedToolParser, ToolParser, ToolSchemas

_NAME = r"(?P<name>[\w.-]{1,128})"
_PARAMETER = (r"<parameter=(?P<key>[^>\n]{1,128})>", r"</parameter\s*/?>", "</function>")
_FUNCTION = r"<function=(?P<name>[^>\s]{1,128})>"
_ARG = (r"<arg_key>(?P<key>[^<]{0,128})</arg_key>\s*<arg_value>", "</arg_value>", "</tool_call>")
_BEGIN, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"

# Begin mark of reasoning by its end mark. Reasoning is only at the start of an answer; elsewhere marks are
# text.
REASONING_MARKS = {
    "</think>": "<think>",
    "</thinking>": "<thinking>",
    "</reasoning>": "<reasoning>",
    "[/THINK]": "[THINK]",
}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Format of tool calls.

    Args:
        readers: Parsers of a call by its opening mark; the first parser that accepts the call is used.
        tokens: Other marks within a call, which may be special tokens.
        at_start: Whether calls are only at the beginning of an answer.
        messages: Whether the parsers also separate reasoning from text, so that answers without tools need
            them.
    """

    readers: dict[str, tuple[Callable[[ToolSchemas], ToolParser], ...]]
    tokens: tuple[str, ...] = ()
    at_start: bool = False
    messages: bool = False


@dataclass(slots=True)
class IgnoredMark(ToolParser):
    """Parser that skips a mark outside of calls."""

    mark: str

    def read(self, text: str, final: bool) -> ParsedCalls | bool:
        return ParsedCalls((), len(self.mark))


class HarmonyParser(ToolParser):
    """Parser of a gpt-oss message header for reasoning or text, or of a call with its arguments.

    An unreadable header is dropped, and its message is text.
    """

    _HEADER = regex.compile(
        r"(?:<\|start\|>assistant)?(?: ?to=functions\.(?P<first>[\w.-]+))?(?:<\|channel\|>(?P<channel>\w+))?"
        r"(?: ?to=functions\.(?P<second>[\w.-]+))?(?: ?<\|constrain\|>\w+| ?json)?<\|message\|>"
    )
    _MARK = regex.compile(r"<\|(?:start|end|call|message)\|>")
    _LONGEST = 200  # maximum characters of a damaged header

    def __init__(self, tools: ToolSchemas) -> None:
        self._tools = tools
        self._call: tuple[JsonToolParser, int] | None = None

    def read(self, text: str, final: bool) -> ParsedCalls | bool:
        if self._call is None:
            header = self._HEADER.match(text, partial=not final)
            if header is None:
                mark = self._MARK.search(text, 2, self._LONGEST)
                if mark is None and len(text) < self._LONGEST and not final:
                    return True
                damaged = mark is not None and mark[0] == "<|message|>"
                return ParsedCalls((), mark.end() if mark and damaged else text.index("|>") + 2, text=damaged)
            if header.partial:
                return True
            name = header["first"] or header["second"]
            if not name or not self._tools:
                thought = "<|end|>" if header["channel"] == "analysis" and not name else ""
                return ParsedCalls((), header.end(), thought, text=not thought)
            head = regex.escape(text[: header.end()]).replace(regex.escape(name), _NAME, 1)
            self._call = (
                JsonToolParser(self._tools, rf"{head}\s*", r"\s*(?:<\|end\|>|<\|call\|>)"),
                header.end(),
            )
        call, end = self._call
        found = call.read(text, final)
        return ParsedCalls((), end, text=True) if found is False else found


def _json(head: str, tail: str = "", arguments: str = "arguments") -> Callable[[ToolSchemas], ToolParser]:
    return lambda tools: JsonToolParser(tools, head, tail, arguments)


def _tagged(head: str, tags: tuple[str, str, str], tail: str = "") -> Callable[[ToolSchemas], ToolParser]:
    return lambda tools: TaggedToolParser(tools, head, *tags, tail, lines=tags is _PARAMETER)


def _dropped(mark: str) -> tuple[Callable[[ToolSchemas], ToolParser], ...]:
    return (lambda _: IgnoredMark(mark),)


_BARE = _tagged(_FUNCTION, _PARAMETER, "</tool_call>")

# Formats by a text that the chat template contains, more specific ones first.
CHAT_FORMATS: dict[str, ChatFormat] = {
    "<|channel|>": ChatFormat(  # gpt-oss
        {
            "<|start|>": (HarmonyParser,),
            "<|channel|>": (HarmonyParser,),
            "<|end|>": _dropped("<|end|>"),
            "<|call|>": _dropped("<|call|>"),
        },
        ("<|message|>", "<|constrain|>"),
        messages=True,
    ),
    "[TOOL_CALLS]": ChatFormat(  # Mistral: one name and its arguments, before that a list
        {
            "[TOOL_CALLS]": (
                _json(rf"\[TOOL_CALLS\]\s*{_NAME}(?:\[CALL_ID\]\w+)?\[ARGS\]\s*"),
                _json(r"\[TOOL_CALLS\]\s*(?=\[)"),
            )
        },
        ("[CALL_ID]", "[ARGS]"),
    ),
    "<｜tool▁calls▁begin｜>": ChatFormat(  # DeepSeek V3 and R1 (with the kind, and a block of code), V3.1
        {
            "<｜tool▁calls▁begin｜>": _dropped("<｜tool▁calls▁begin｜>"),
            _BEGIN: (
                _json(
                    rf"{_BEGIN}(?:function{_SEPARATOR})?(?!function<){_NAME}(?:{_SEPARATOR}|\s*```json)\s*",
                    r"(?:\s*```)?\s*<｜tool▁call▁end｜>",
                ),
            ),
            "<｜tool▁calls▁end｜>": _dropped("<｜tool▁calls▁end｜>"),
        },
        (_SEPARATOR, "<｜tool▁call▁end｜>"),
    ),
    "<|tool_calls_section_begin|>": ChatFormat(  # Kimi K2
        {
            "<|tool_calls_section_begin|>": _dropped("<|tool_calls_section_begin|>"),
            "<|tool_call_begin|>": (
                _json(
                    rf"<\|tool_call_begin\|>\s*functions\.{_NAME}:\d+\s*<\|tool_call_argument_begin\|>\s*",
                    r"\s*<\|tool_call_end\|>",
                ),
            ),
            "<|tool_calls_section_end|>": _dropped("<|tool_calls_section_end|>"),
        },
        ("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    "<arg_key>": ChatFormat(  # GLM 4.5 and later
        {"<tool_call>": (_tagged(rf"<tool_call>\s*{_NAME}(?=[\s<])", _ARG),)},
        ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"),
    ),
    "<function=": ChatFormat(  # Qwen3-Coder, which sometimes omits the outer tag
        {
            "<tool_call>": (_tagged(rf"<tool_call>\s*{_FUNCTION}", _PARAMETER, "</tool_call>"),),
            "<function=": (_BARE,),
        },
        ("</tool_call>",),
    ),
    "<tool_call>": ChatFormat(  # Hermes, Qwen
        {"<tool_call>": (_json(r"<tool_call>\s*(?=\{)", r"\s*</tool_call>"),)},
        ("</tool_call>",),
    ),
    "dictionary of argument name and its value": ChatFormat(  # Llama 3.1 and later
        {
            "<|python_tag|>": (_json(r"<\|python_tag\|>\s*(?=\{)", "", "parameters"),),
            "{": (_json(r'(?=\{\s*"(?:name|type)"\s*:)', "", "parameters"),),
        },
        at_start=True,
    ),
}


def chat_format_of(template: str) -> ChatFormat | None:
    """Return the format of a chat template; None if it is unknown."""
    return next((family for mark, family in CHAT_FORMATS.items() if mark in template), None)


def reasoning_marks(template: str) -> tuple[str, str] | None:
    """Return the begin and end marks of reasoning in a chat template, or None."""
    return next(((begin, end) for end, begin in REASONING_MARKS.items() if end in template), None)
