"""How families of models mark reasoning and calls of tools, known by what their chat templates write."""

from collections.abc import Callable
from dataclasses import dataclass

import regex

from offspec.chat.call_readers import JsonCall, Read, Reader, TaggedCall, Tools

_NAME = r"(?P<name>[\w.-]{1,128})"
_PARAMETER = (r"<parameter=(?P<key>[^>\n]{1,128})>", r"</parameter\s*/?>", "</function>")
_FUNCTION = r"<function=(?P<name>[^>\s]{1,128})>"
_ARG = (r"<arg_key>(?P<key>[^<]{0,128})</arg_key>\s*<arg_value>", "</arg_value>", "</tool_call>")
_BEGIN, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"

# The marks of reasoning, by the one that ends it. It begins an answer: elsewhere they are part of a sentence.
THOUGHTS = {
    "</think>": "<think>",
    "</thinking>": "<thinking>",
    "</reasoning>": "<reasoning>",
    "[/THINK]": "[THINK]",
}


@dataclass(frozen=True, slots=True)
class Family:
    """A way to mark calls.

    Args:
        readers: What reads a call, by the mark that opens it; of several readers the first that can.
        tokens: Other marks within a call, which may be special tokens.
        at_start: Calls are only at the beginning of an answer.
        messages: Readers also tell reasoning from text, so that an answer without tools needs them.
    """

    readers: dict[str, tuple[Callable[[Tools], Reader], ...]]
    tokens: tuple[str, ...] = ()
    at_start: bool = False
    messages: bool = False


@dataclass(slots=True)
class Dropped(Reader):
    """A mark that belongs to no call."""

    mark: str

    def read(self, text: str, final: bool) -> Read | bool:
        return Read((), len(self.mark))


class HarmonyMessage(Reader):
    """The header of a message of gpt-oss: of reasoning, of text, or of a call with its arguments.

    A header that cannot be read is left out, and its message is text.
    """

    _HEADER = regex.compile(
        r"(?:<\|start\|>assistant)?(?: ?to=functions\.(?P<first>[\w.-]+))?(?:<\|channel\|>(?P<channel>\w+))?"
        r"(?: ?to=functions\.(?P<second>[\w.-]+))?(?: ?<\|constrain\|>\w+| ?json)?<\|message\|>"
    )
    _MARK = regex.compile(r"<\|(?:start|end|call|message)\|>")
    _LONGEST = 200  # characters of a header that is damaged

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._call: tuple[JsonCall, int] | None = None

    def read(self, text: str, final: bool) -> Read | bool:
        if self._call is None:
            header = self._HEADER.match(text, partial=not final)
            if header is None:
                mark = self._MARK.search(text, 2, self._LONGEST)
                if mark is None and len(text) < self._LONGEST and not final:
                    return True
                damaged = mark is not None and mark[0] == "<|message|>"
                return Read((), mark.end() if mark and damaged else text.index("|>") + 2, text=damaged)
            if header.partial:
                return True
            name = header["first"] or header["second"]
            if not name or not self._tools:
                thought = "<|end|>" if header["channel"] == "analysis" and not name else ""
                return Read((), header.end(), thought, text=not thought)
            head = regex.escape(text[: header.end()]).replace(regex.escape(name), _NAME, 1)
            self._call = JsonCall(self._tools, rf"{head}\s*", r"\s*(?:<\|end\|>|<\|call\|>)"), header.end()
        call, end = self._call
        found = call.read(text, final)
        return Read((), end, text=True) if found is False else found


def _json(head: str, tail: str = "", arguments: str = "arguments") -> Callable[[Tools], Reader]:
    return lambda tools: JsonCall(tools, head, tail, arguments)


def _tagged(head: str, tags: tuple[str, str, str], tail: str = "") -> Callable[[Tools], Reader]:
    return lambda tools: TaggedCall(tools, head, *tags, tail, lines=tags is _PARAMETER)


def _dropped(mark: str) -> tuple[Callable[[Tools], Reader], ...]:
    return (lambda _: Dropped(mark),)


_BARE = _tagged(_FUNCTION, _PARAMETER, "</tool_call>")

# By what a chat template has in it, the more particular first.
FAMILIES: dict[str, Family] = {
    "<|channel|>": Family(  # gpt-oss
        {
            "<|start|>": (HarmonyMessage,),
            "<|channel|>": (HarmonyMessage,),
            "<|end|>": _dropped("<|end|>"),
            "<|call|>": _dropped("<|call|>"),
        },
        ("<|message|>", "<|constrain|>"),
        messages=True,
    ),
    "[TOOL_CALLS]": Family(  # Mistral: one name and its arguments, before that a list
        {
            "[TOOL_CALLS]": (
                _json(rf"\[TOOL_CALLS\]\s*{_NAME}(?:\[CALL_ID\]\w+)?\[ARGS\]\s*"),
                _json(r"\[TOOL_CALLS\]\s*(?=\[)"),
            )
        },
        ("[CALL_ID]", "[ARGS]"),
    ),
    "<｜tool▁calls▁begin｜>": Family(  # DeepSeek V3 and R1 (with the kind, and a block of code), V3.1
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
    "<|tool_calls_section_begin|>": Family(  # Kimi K2
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
    "<arg_key>": Family(  # GLM 4.5 and later
        {"<tool_call>": (_tagged(rf"<tool_call>\s*{_NAME}(?=[\s<])", _ARG),)},
        ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"),
    ),
    "<function=": Family(  # Qwen3-Coder, which sometimes leaves the outer tag out
        {
            "<tool_call>": (_tagged(rf"<tool_call>\s*{_FUNCTION}", _PARAMETER, "</tool_call>"),),
            "<function=": (_BARE,),
        },
        ("</tool_call>",),
    ),
    "<tool_call>": Family(  # Hermes, Qwen
        {"<tool_call>": (_json(r"<tool_call>\s*(?=\{)", r"\s*</tool_call>"),)},
        ("</tool_call>",),
    ),
    "dictionary of argument name and its value": Family(  # Llama 3.1 and later
        {
            "<|python_tag|>": (_json(r"<\|python_tag\|>\s*(?=\{)", "", "parameters"),),
            "{": (_json(r'(?=\{\s*"(?:name|type)"\s*:)', "", "parameters"),),
        },
        at_start=True,
    ),
}


def family_of(template: str) -> Family | None:
    """The family of a model with this chat template; None if it is unknown."""
    return next((family for mark, family in FAMILIES.items() if mark in template), None)


def thought_marks(template: str) -> tuple[str, str] | None:
    """The marks of reasoning in a chat template."""
    return next(((begin, end) for end, begin in THOUGHTS.items() if end in template), None)
