"""Token counts of answers, under the names of each API that batches can use."""

from typing import Any

from offspec.server.exchange import Usage


def usage_of(body: dict[str, Any]) -> Usage:
    """Token counts in the body of an answer; 0 for those that it lacks, as errors do."""
    usage = body.get("usage") or {}
    prompt = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    answer = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    return Usage(
        prompt_tokens=usage.get("prompt_tokens") or usage.get("input_tokens") or 0,
        cached_tokens=prompt.get("cached_tokens") or 0,
        answer_tokens=usage.get("completion_tokens") or usage.get("output_tokens") or 0,
        reasoning_tokens=answer.get("reasoning_tokens") or 0,
        passes=0,
    )
