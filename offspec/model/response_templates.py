"""Response templates, in transformers' words, of families whose tokenizers have none.

Each family marks thoughts and calls of tools in its own way, and is known by what its chat template writes.
"""

from typing import Any

_WHOLE = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}
_INSIDE = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}}
_LLAMA = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.parameters}"}}

_AT_ONCE = r"(?=[\s\S])"  # the end of a mark with nothing in it
_XML = {
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\s]+)>\n?(?P<value>.*?)\n?</parameter>"},
    "repeats": True,
    "transform": _WHOLE,
}

# A thought begins an answer: elsewhere its tag is part of a sentence about tags.
THOUGHTS: dict[str, dict[str, Any]] = {
    "</think>": {"open_pattern": r"\A\s*<think>", "close": "</think>"},
    "</thinking>": {"open_pattern": r"\A\s*<thinking>", "close": "</thinking>"},
    "</reasoning>": {"open_pattern": r"\A\s*<reasoning>", "close": "</reasoning>"},
    "[/THINK]": {"open_pattern": r"\A\s*\[THINK\]", "close": "[/THINK]"},
}

_HARMONY = r"(?:<\|start\|>assistant)?"
_TO = r" ?to=functions\.(?P<name>[\w.-]+)"

# By what a chat template has in it, the more particular first.
CALLS: dict[str, dict[str, dict[str, Any]]] = {
    "<|channel|>": {  # gpt-oss
        "thinking": {
            "open_pattern": _HARMONY + r"<\|channel\|>analysis<\|message\|>",
            "close_pattern": r"<\|end\|>",
            "repeats": True,
            "join": "\n\n",
        },
        "said": {
            "open_pattern": _HARMONY
            + r"<\|channel\|>(?:final|commentary)(?: ?<\|constrain\|>\w+)?<\|message\|>",
            "close_pattern": r"<\|end\|>",
            "repeats": True,
            "join": "\n\n",
        },
        "tool_calls": {
            "open_pattern": rf"{_HARMONY}(?:<\|channel\|>\w+{_TO}|{_TO}<\|channel\|>\w+)"
            r"[^<]*(?:<\|constrain\|>\w+)?<\|message\|>",
            "close_pattern": r"<\|end\|>|<\|call\|>",
            "content": "json",
            "repeats": True,
            "transform": _WHOLE,
        },
    },
    "[TOOL_CALLS]": {  # Mistral: one name and its arguments, before that a list
        "tool_calls": {
            "open_pattern": r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]",
            "close_pattern": r"(?=\[TOOL_CALLS\])",
            "content": "json",
            "repeats": True,
            "transform": _WHOLE,
        },
        "tool_calls_listed": {
            "open_pattern": r"\[TOOL_CALLS\]\s*(?=\[)",
            "content": "json",
            "transform": _NAMED,
            "transform_each": True,
        },
    },
    "<｜tool▁calls▁begin｜>": {  # DeepSeek V3 and R1 (with the kind, and a block of code), V3.1
        "tool_calls": {
            "open_pattern": r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
            r"(?!function<)(?P<name>[\w.-]+)(?:<｜tool▁sep｜>|\s*```json)",
            "close_pattern": r"(?:\s*```)?<｜tool▁call▁end｜>",
            "content": "json",
            "repeats": True,
            "transform": _WHOLE,
        },
        "tool_calls_end": {"open": "<｜tool▁calls▁end｜>", "close_pattern": _AT_ONCE},
    },
    "<|tool_calls_section_begin|>": {  # Kimi K2
        "tool_calls": {
            "open_pattern": r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*functions\."
            r"(?P<name>[\w.-]+):\d+\s*<\|tool_call_argument_begin\|>",
            "close": "<|tool_call_end|>",
            "content": "json",
            "repeats": True,
            "transform": _WHOLE,
        },
        "tool_calls_end": {"open": "<|tool_calls_section_end|>", "close_pattern": _AT_ONCE},
    },
    "<arg_key>": {  # GLM 4.5 and later
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*(?P<name>[\w.-]+)\s*(?=<)",
            "close": "</tool_call>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
            },
            "repeats": True,
            "transform": _WHOLE,
        },
    },
    "<function=": {  # Qwen3-Coder, which sometimes leaves the outer tag out
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\s]+)>",
            "close": "</tool_call>",
            **_XML,
        },
        "tool_calls_bare": {
            "open_pattern": r"<function=(?P<name>[^>\s]+)>",
            "close": "</function>",
            **_XML,
        },
    },
    "<tool_call>": {  # Hermes, Qwen
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": _INSIDE,
        },
    },
    "dictionary of argument name and its value": {  # Llama 3.1 and later
        "tool_calls": {
            "open_pattern": r'\A\s*(?:<\|python_tag\|>\s*)?(?=\{\s*"(?:name|type)"\s*:)',
            "content": "json",
            "transform": _LLAMA,
        },
    },
}
