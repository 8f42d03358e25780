"""Request bodies of every API: minimal ones, and ones with most fields."""

from typing import Any

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
OLLAMA_CHAT, OLLAMA_TEXT = "/api/chat", "/api/generate"
USER: dict[str, Any] = {"role": "user", "content": "w12"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
IMAGE = {"type": "image", "source": {}}
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    TEXT: {"prompt": "w12"},
    MESSAGES: {"messages": [USER], "max_tokens": 9},
    RESPONSES: {"input": "w12"},
}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
VALID: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [
            {"role": "system", "content": "w15"},
            {"role": "user", "content": [{"type": "text", "text": "w12 w13"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "w19", "tool_call_id": "c"},
        ],
        **{"max_tokens": 1, "temperature": 0.5, "seed": 3, "n": 1, "stop": ["w40"], "stream": False},
        **{"logit_bias": {"12": 1.5}, "logprobs": True, "top_logprobs": 1},
        **{"tools": [TOOL], "tool_choice": "auto"},
    },
    TEXT: {"prompt": ["w12"], "max_tokens": 1, "logprobs": 1, "stop_token_ids": [*range(96)]},
    MESSAGES: {
        "system": [{"type": "text", "text": "w15"}],
        "messages": [
            {"role": "user", "content": "w12"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "w13", "signature": "x"},
                    {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "w14"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "w15"}]},
        ],
        **{"max_tokens": 1, "stop_sequences": ["w40"], "thinking": {"type": "enabled", "budget_tokens": 9}},
        "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
    },
    RESPONSES: {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "w12"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "w13"}]},
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "w15"},
        ],
        **{"instructions": "w15", "max_output_tokens": 1, "store": False, "reasoning": {"effort": "low"}},
        **{"text": {"format": {"type": "text"}}, "include": ["message.output_text.logprobs"]},
        "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}],
        "tool_choice": "auto",
    },
    OLLAMA_CHAT: {
        "messages": [
            {"role": "system", "content": "w15"},
            USER,
            {
                "role": "assistant",
                "content": "w13",
                "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "w14"}}}],
            },
            {"role": "tool", "content": "w19", "tool_name": "weather"},
        ],
        **{"stream": False, "think": "low", "tools": [TOOL], "logprobs": True, "top_logprobs": 1},
        "options": {"num_predict": 1, "temperature": 0.5, "seed": -1, "stop": ["w40"], "top_k": 4},
    },
    OLLAMA_TEXT: {
        **{"prompt": "w12", "system": "w15", "stream": False, "think": False, "keep_alive": "5m"},
        "options": {"num_predict": 1, "repeat_penalty": 1.1, "min_p": 0.1},
    },
    "/completion": {
        **{"prompt": "w12", "n_predict": 1, "top_k": 4, "temperature": 0.5, "seed": -1, "stop": ["w40"]},
        **{"logit_bias": [[12, 1.5], [13, False]], "cache_prompt": True, "repeat_penalty": 1.1},
    },
    "/tokenize": {"content": "w12 w13", "with_pieces": True},
    "/detokenize": {"tokens": [1, 0]},
}
