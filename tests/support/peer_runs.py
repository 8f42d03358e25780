"""Made-up answers of the peers bench."""

from __future__ import annotations

from typing import Any

RECIPE = {
    "factor": 4,
    "fingerprint": "f",
    "layer_files": ["layer"] * 10,
    "layer_bytes": 1000,
    "head_bytes": 150,
    "matmul_parameters": 5,
}


def answer(emitted: list[int], seconds: list[float], name: str = "chat-1", **changes: Any) -> dict[str, Any]:
    tokens = sum(emitted)
    found = {
        "id": name,
        "token_ids": list(range(tokens)),
        "tokens": tokens,
        "passes": len(emitted),
        "seconds": sum(seconds),
        "ttft_s": seconds[0],
        "read_bytes": 1000 * len(emitted),
        "finish_reason": "length",
        "per_pass": [{"emitted": e, "seconds": s} for e, s in zip(emitted, seconds, strict=True)],
    }
    return {**found, **changes}


def run(
    contender: str, found: dict[str, Any] | None, variant: str = "", temperature: float = 0.0
) -> dict[str, Any]:
    place = {"contender": contender, "variant": variant, "temperature": temperature, "prompt": "chat-1"}
    if found is None:
        return {**place, "error": {"kind": "killed", "message": "it needed more"}}
    sizes = {"load_seconds": 1.0, "load_read_bytes": 10, "process_peak_bytes": 7}
    return {**place, **sizes, "answers": [found]}
