"""An answer with reasoning, text and two tool calls, and the tools that it calls."""

import json
from typing import Any

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "Tells.", "parameters": PARAMETERS}}
    for name in ("weather", "time")
]


def call(name: str, city: str) -> str:
    body = json.dumps({"name": name, "arguments": {"city": city}})
    return f"<tool_call>\n{body}\n</tool_call>"


BOTH = f"<think>\nWhich city? Oslo.\n</think>\n\nI look.\n\n{call('weather', 'Oslo')}\n{call('time', 'Rome')}"
